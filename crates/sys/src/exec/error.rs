//! What can go wrong before the command runs, and what to do about it.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;

use super::Program;

/// One step of the child's way to exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A user namespace (and the network and mount namespaces it lets us make).
    UserNamespace,
    /// Network and mount namespaces, as root.
    Namespaces,
    /// uid_map, gid_map and setgroups.
    IdMap,
    /// `lo` up.
    Loopback,
    /// Local default routes.
    Route,
    /// The nft redirect.
    Redirect,
    /// The listener all connections go to.
    Listener,
    /// The UDP socket on port 53.
    Resolver,
    /// The sockets for all other datagrams.
    Datagrams,
    /// resolv.conf and the other private files.
    Files,
    /// Joining the control group.
    Cgroup,
    /// Handing the sockets to the parent.
    Handover,
    /// The nested user namespace that gives the caller's own ids back.
    NestedNamespace,
    /// Limits, signal mask, death with the parent, working directory.
    Process,
    /// The filter of system calls, and inherited descriptors.
    Confine,
    /// exec itself.
    Exec,
}

impl Step {
    const ALL: [Self; 16] = [
        Self::UserNamespace,
        Self::Namespaces,
        Self::IdMap,
        Self::Loopback,
        Self::Route,
        Self::Redirect,
        Self::Listener,
        Self::Resolver,
        Self::Datagrams,
        Self::Files,
        Self::Cgroup,
        Self::Handover,
        Self::NestedNamespace,
        Self::Process,
        Self::Confine,
        Self::Exec,
    ];

    pub(super) fn code(self) -> u8 {
        Self::ALL
            .iter()
            .position(|step| *step == self)
            .and_then(|at| u8::try_from(at).ok())
            .unwrap_or(u8::MAX)
    }

    pub(super) fn from_code(code: u8) -> Self {
        Self::ALL.get(usize::from(code)).copied().unwrap_or(Self::Process)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::UserNamespace => "make a user namespace for the command",
            Self::Namespaces => "make a network and a mount namespace for the command",
            Self::IdMap => "map the user and group ids of the command's namespace",
            Self::Loopback => "bring 'lo' up in the command's namespace",
            Self::Route => "route every address to 'lo' in the command's namespace",
            Self::Redirect => "redirect the command's connections with nftables",
            Self::Listener => "listen for the command's connections",
            Self::Resolver => "receive the command's DNS questions on port 53",
            Self::Datagrams => "capture the command's datagrams",
            Self::Files => "give the command its own resolv.conf",
            Self::Cgroup => "put the command into its control group",
            Self::Handover => "hand the command's sockets over",
            Self::NestedNamespace => "give the command its own user id back",
            Self::Process => "prepare the command's process",
            Self::Confine => "confine the command's system calls (seccomp)",
            Self::Exec => "execute the command",
        })
    }
}

/// Why a command did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No program was given.
    #[error("no command was given: write it after '--'")]
    NoCommand,
    /// The program does not exist.
    #[error("{}: command not found", .0.display())]
    NotFound(OsString),
    /// The program exists but cannot be executed.
    #[error("{}: cannot be executed: {}", .0.display(), .1)]
    NotExecutable(OsString, #[source] io::Error),
    /// A step of the set-up failed.
    #[error("cannot {step}: {text}{}", remedy_text(.remedy.as_deref()))]
    Setup {
        /// The system call or step that failed.
        step: Step,
        /// Its errno; 0: none.
        errno: i32,
        /// What the kernel said.
        text: String,
        /// What to do about it.
        remedy: Option<String>,
    },
    /// The process could not be made.
    #[error("cannot start a process: {0}")]
    Fork(#[source] io::Error),
    /// The child did not answer.
    #[error("the command's process did not get ready: {0}")]
    Wait(#[source] io::Error),
    /// The child was killed by another process before it could report.
    #[error("the command's process ended while its network was made: was it killed?")]
    ChildVanished,
}

fn remedy_text(remedy: Option<&str>) -> String {
    remedy.map(|remedy| format!(". {remedy}")).unwrap_or_default()
}

impl LaunchError {
    /// The exit code a shell would give: 127 not found, 126 not executable, else 125 (ours, as env(1) and
    /// timeout(1) do).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFound(_) => 127,
            Self::NotExecutable(..) => 126,
            _ => 125,
        }
    }

    pub(super) fn step(step: Step, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(0);
        Self::Setup { step, errno, text: error.to_string(), remedy: remedy(step, errno) }
    }

    pub(super) fn reported(step: Step, errno: i32, text: String, program: &Program) -> Self {
        if step != Step::Exec {
            return Self::Setup { step, errno, text, remedy: remedy(step, errno) };
        }
        let name = program.argv.first().cloned().unwrap_or_default();
        match errno {
            // A directory of PATH that may not be searched gives EACCES for every name that is nowhere.
            libc::ENOENT | libc::ENOTDIR | libc::EACCES if !exists(&name, program) => Self::NotFound(name),
            _ => Self::NotExecutable(name, io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Whether there is such a file: a script whose interpreter is missing exists, and yet exec says ENOENT.
fn exists(name: &OsString, program: &Program) -> bool {
    if name.as_encoded_bytes().contains(&b'/') {
        let directory = program.directory.clone().unwrap_or_default();
        return fs::metadata(directory.join(name)).is_ok();
    }
    let own =
        program.env.iter().rev().find(|(variable, _)| variable == "PATH").map(|(_, value)| value.clone());
    let path = own.unwrap_or_else(|| std::env::var_os("PATH"));
    path.is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| fs::metadata(directory.join(name)).is_ok())
    })
}

const CGROUP_WAY: &str = "Or run as root with '--mode cgroup', which needs no namespace";

fn remedy(step: Step, errno: i32) -> Option<String> {
    let denied = matches!(errno, libc::EPERM | libc::EACCES | libc::ENOSPC | libc::EUSERS | libc::EINVAL);
    let is_refused = matches!(errno, libc::EPROTONOSUPPORT | libc::EACCES);
    match step {
        Step::Redirect | Step::Datagrams if is_refused && crate::confine::is_confined() => Some(
            "A filter of system calls around this process refuses it. If that is a jail of `sidetrack run`, give the outer one --nested"
                .to_owned(),
        ),
        Step::Redirect if matches!(errno, libc::ENOENT | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT) => Some(
            "The kernel lacks nftables NAT: load nft_redir, nft_chain_nat and nf_conntrack (modprobe nft_redir)"
                .to_owned(),
        ),
        Step::Process => None,
        _ if denied => Some(match user_namespace_obstacle() {
            Some(obstacle) => format!("{obstacle}. {CGROUP_WAY}"),
            None => format!(
                "Inside a container, it needs its permission for user namespaces (seccomp, AppArmor). {CGROUP_WAY}"
            ),
        }),
        _ => None,
    }
}

/// What keeps ordinary users from making user namespaces on this host, with the remedy; `None` if nothing that
/// can be read does.
pub fn user_namespace_obstacle() -> Option<String> {
    if fs::symlink_metadata("/proc/self/ns/user").is_err() {
        return Some("The kernel has no user namespaces (CONFIG_USER_NS)".to_owned());
    }
    forbidding_setting(|name| fs::read_to_string(format!("/proc/sys/{name}")).ok())
}

fn forbidding_setting(read: impl Fn(&str) -> Option<String>) -> Option<String> {
    let obstacles = [
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or install an AppArmor profile with 'userns,' \
             for sidetrack",
        ),
    ];
    obstacles.iter().find(|(name, bad, _)| read(name).is_some_and(|value| value.trim() == *bad)).map(
        |(name, bad, fix)| {
            format!("This host forbids user namespaces: {} is {bad}. As root: {fix}", name.replace('/', "."))
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_survive_the_way_to_the_parent() {
        for step in Step::ALL {
            assert_eq!(Step::from_code(step.code()), step);
        }
        assert_eq!(Step::from_code(200), Step::Process);
    }

    #[test]
    fn settings_that_forbid_user_namespaces_are_named_with_the_fix() {
        let host = |name: &'static str, value: &'static str| {
            forbidding_setting(move |asked| (asked == name).then(|| value.to_owned()))
        };
        let ubuntu = host("kernel/apparmor_restrict_unprivileged_userns", "1\n").unwrap();
        assert!(ubuntu.contains("kernel.apparmor_restrict_unprivileged_userns is 1"), "{ubuntu}");
        assert!(ubuntu.contains("profile"), "{ubuntu}");
        let debian = host("kernel/unprivileged_userns_clone", "0\n").unwrap();
        assert!(debian.ends_with("As root: sysctl kernel.unprivileged_userns_clone=1"), "{debian}");
        assert!(host("user/max_user_namespaces", "0").is_some());
        assert_eq!(host("user/max_user_namespaces", "96365\n"), None);
        assert_eq!(host("nothing", "0"), None);
    }

    #[test]
    fn errors_say_where_and_what_to_do() {
        let denied = io::Error::from_raw_os_error(libc::EPERM);
        let text = LaunchError::step(Step::UserNamespace, &denied).to_string();
        assert!(text.starts_with("cannot make a user namespace for the command: Operation not permitted"));
        assert!(text.contains("--mode cgroup"), "{text}");
        let program = Program { argv: vec!["/etc/hostname".into()], ..Program::default() };
        let error = LaunchError::reported(Step::Exec, libc::EACCES, String::new(), &program);
        assert_eq!(error.exit_code(), 126);
        let error = LaunchError::reported(Step::Exec, libc::ENOENT, String::new(), &program);
        assert_eq!(error.exit_code(), 126, "the file is there: its interpreter is not");
        let program = Program { argv: vec!["no-such-program".into()], ..Program::default() };
        let error = LaunchError::reported(Step::Exec, libc::ENOENT, String::new(), &program);
        assert_eq!(
            (error.exit_code(), error.to_string().as_str()),
            (127, "no-such-program: command not found")
        );
    }
}
