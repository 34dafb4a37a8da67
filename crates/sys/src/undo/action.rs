//! Inverse actions as data, and as lines of text.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::napi::{self, Napi};
use crate::netlink::{Protocol, Socket};
use crate::nft::{self, Family};
use crate::route::{self, IpVersion, MarkRule};
use crate::sysctl;

/// An action that undoes something we did. Performing it twice, or when there is nothing to undo, is not an error.
///
/// Its `Display` is for people; [`Action::to_line`] is for journals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Removes a policy rule.
    RemoveMarkRule(MarkRule),
    /// Removes a local default route.
    RemoveLocalDefault {
        /// IP version.
        version: IpVersion,
        /// Index of the interface it leads to.
        interface: u32,
        /// Routing table.
        table: u32,
    },
    /// Deletes an nftables table without owner.
    DeleteTable {
        /// Family of the table.
        family: Family,
        /// Its name.
        name: String,
    },
    /// Puts a kernel setting back.
    RestoreSetting {
        /// Its name below /proc/sys, with slashes.
        name: String,
        /// The former value.
        value: String,
    },
    /// Has frames gather in an instance of NAPI as they did before.
    RestoreNapi(Napi),
    /// Ends the flows on the wire whose maps have names in this folder, and removes the folder.
    EndWire(PathBuf),
    /// Removes an empty directory.
    RemoveDirectory(PathBuf),
    /// Ends every process in a cgroup of the second generation and removes it: without the rules that went with us, what still
    /// runs in it would go past us.
    EndCgroup(PathBuf),
    /// Moves processes of one cgroup of the second generation to another: all, or one. They run again if they were frozen.
    ReturnProcesses {
        /// Directory of the cgroup in which they are.
        from: PathBuf,
        /// Directory of the one where they were. If it is gone, the parent of `from`.
        to: PathBuf,
        /// The one process; 0: all.
        pid: u32,
    },
    /// Puts `lo` of a network back as it was.
    RestoreLoopback {
        /// Its MTU, bytes.
        mtu_bytes: u32,
        /// Whether it was up.
        up: bool,
    },
    /// Removes a file (a unix socket, a bound namespace).
    RemoveFile(PathBuf),
    /// Removes a unix socket that nothing listens at any more, if it still is this one.
    RemoveSocket {
        /// Its path.
        path: PathBuf,
        /// Its inode.
        inode: u64,
        /// The folder goes, too, if nothing else is in it.
        with_directory: bool,
    },
}

/// Why an action could not be performed, or a line does not name an action.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// Netlink refused or failed.
    #[error(transparent)]
    Netlink(#[from] crate::netlink::Error),
    /// A file operation failed.
    #[error("cannot undo ({action}): {source}")]
    File {
        /// The action in words.
        action: String,
        /// The system's error.
        source: io::Error,
    },
    /// A line of a journal that says nothing.
    #[error("{0:?} is no undo action; the journal is damaged or of another version")]
    Unreadable(String),
}

impl Action {
    /// Performs it.
    ///
    /// # Errors
    /// If it could not be done although there was something to do.
    pub fn perform(&self) -> Result<(), ActionError> {
        match self {
            Self::RemoveMarkRule(rule) => Ok(route::remove_mark_rule(rule)?),
            Self::RemoveLocalDefault { version, interface, table } => {
                Ok(route::remove_local_default_of(*interface, *version, *table)?)
            }
            Self::DeleteTable { family, name } => {
                let mut socket = Socket::open(Protocol::Netfilter)?;
                nft::delete_table(&mut socket, *family, name)?;
                Ok(())
            }
            Self::RestoreSetting { name, value } => self.file(sysctl::write(name, value).map(|_| ())),
            Self::RestoreNapi(napi) => match napi::set(napi) {
                Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
                done => Ok(done?),
            },
            Self::EndWire(path) => self.file(crate::bpf::end_pinned(path)),
            Self::RemoveDirectory(path) => self.file(fs::remove_dir(path)),
            Self::EndCgroup(path) => self.file(end_cgroup(path)),
            Self::ReturnProcesses { from, to, pid } => self.file(return_processes(from, to, *pid)),
            Self::RestoreLoopback { mtu_bytes, up } => restore_loopback(*mtu_bytes, *up),
            Self::RemoveFile(path) => self.file(fs::remove_file(path)),
            Self::RemoveSocket { path, inode, with_directory } => {
                self.file(remove_socket(path, *inode, *with_directory))
            }
        }
    }

    /// "It is not there" is fine.
    fn file(&self, result: io::Result<()>) -> Result<(), ActionError> {
        match result {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(ActionError::File { action: self.to_string(), source })
            }
            _ => Ok(()),
        }
    }

    /// One line of text without line break; [`FromStr`] reads it back.
    pub fn to_line(&self) -> String {
        match self {
            Self::RemoveMarkRule(MarkRule { version, mark, mask, table, priority }) => {
                format!("rule {} {mark} {mask} {table} {priority}", digit(*version))
            }
            Self::RemoveLocalDefault { version, interface, table } => {
                format!("route {} {interface} {table}", digit(*version))
            }
            Self::DeleteTable { family, name } => format!("table {family} {}", escape(name.as_bytes())),
            Self::RestoreSetting { name, value } => {
                format!("setting {} {}", escape(name.as_bytes()), escape(value.as_bytes()))
            }
            Self::RestoreNapi(Napi { id, defer_hard_irqs, gro_flush_timeout_ns }) => {
                format!("napi {id} {defer_hard_irqs} {gro_flush_timeout_ns}")
            }
            Self::EndWire(path) => format!("wire {}", escape_path(path)),
            Self::RemoveDirectory(path) => format!("directory {}", escape_path(path)),
            Self::EndCgroup(path) => format!("cgroup {}", escape_path(path)),
            Self::ReturnProcesses { from, to, pid } => {
                format!("return {} {} {pid}", escape_path(from), escape_path(to))
            }
            Self::RestoreLoopback { mtu_bytes, up } => format!("loopback {mtu_bytes} {}", u8::from(*up)),
            Self::RemoveFile(path) => format!("file {}", escape_path(path)),
            Self::RemoveSocket { path, inode, with_directory } => {
                format!("socket {} {inode} {}", escape_path(path), u8::from(*with_directory))
            }
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RemoveMarkRule(rule) => write!(
                f,
                "remove the {} policy rule fwmark {:#x}/{:#x} lookup {}",
                rule.version, rule.mark, rule.mask, rule.table
            ),
            Self::RemoveLocalDefault { version, interface, table } => {
                write!(
                    f,
                    "remove the local {version} default route of interface {interface} from table {table}"
                )
            }
            Self::DeleteTable { family, name } => write!(f, "delete the nftables table {family} {name}"),
            Self::RestoreSetting { name, value } => {
                write!(f, "set the kernel setting {} back to {value}", name.replace('/', "."))
            }
            Self::RestoreNapi(Napi { id, gro_flush_timeout_ns, .. }) => {
                write!(f, "set the gro-flush-timeout of NAPI {id} back to {gro_flush_timeout_ns} ns")
            }
            Self::EndWire(path) => write!(f, "end the flows on the wire of {} and remove it", path.display()),
            Self::RemoveDirectory(path) => write!(f, "remove the directory {}", path.display()),
            Self::EndCgroup(path) => {
                write!(f, "end what runs in the cgroup {} and remove it", path.display())
            }
            Self::ReturnProcesses { from, to, pid: 0 } => {
                write!(f, "move the processes of the cgroup {} back to {}", from.display(), to.display())
            }
            Self::ReturnProcesses { to, pid, .. } => {
                write!(f, "move process {pid} back to the cgroup {}", to.display())
            }
            Self::RestoreLoopback { mtu_bytes, up } => {
                let state = if *up { "up" } else { "down" };
                write!(f, "set lo back to {state}, with an MTU of {mtu_bytes} bytes")
            }
            Self::RemoveFile(path) | Self::RemoveSocket { path, .. } => {
                write!(f, "remove {}", path.display())
            }
        }
    }
}

impl FromStr for Action {
    type Err = ActionError;

    fn from_str(line: &str) -> Result<Self, ActionError> {
        let words: Vec<&str> = line.split(' ').collect();
        read(&words).ok_or_else(|| ActionError::Unreadable(line.to_owned()))
    }
}

fn read(words: &[&str]) -> Option<Action> {
    Some(match words {
        ["rule", version, mark, mask, table, priority] => Action::RemoveMarkRule(MarkRule {
            version: version_of(version)?,
            mark: mark.parse().ok()?,
            mask: mask.parse().ok()?,
            table: table.parse().ok()?,
            priority: priority.parse().ok()?,
        }),
        ["route", version, interface, table] => Action::RemoveLocalDefault {
            version: version_of(version)?,
            interface: interface.parse().ok()?,
            table: table.parse().ok()?,
        },
        ["table", family, name] => Action::DeleteTable {
            family: [Family::Inet, Family::Ip, Family::Ip6].into_iter().find(|f| f.to_string() == *family)?,
            name: text(name)?,
        },
        ["setting", name, value] => Action::RestoreSetting { name: text(name)?, value: text(value)? },
        ["napi", id, defer_hard_irqs, gro_flush_timeout_ns] => Action::RestoreNapi(Napi {
            id: id.parse().ok()?,
            defer_hard_irqs: defer_hard_irqs.parse().ok()?,
            gro_flush_timeout_ns: gro_flush_timeout_ns.parse().ok()?,
        }),
        ["wire", path] => Action::EndWire(path_of(path)?),
        ["directory", path] => Action::RemoveDirectory(path_of(path)?),
        ["cgroup", path] => Action::EndCgroup(path_of(path)?),
        ["return", from, to, pid] => {
            Action::ReturnProcesses { from: path_of(from)?, to: path_of(to)?, pid: pid.parse().ok()? }
        }
        ["loopback", mtu, up @ ("0" | "1")] => {
            Action::RestoreLoopback { mtu_bytes: mtu.parse().ok()?, up: *up == "1" }
        }
        ["file", path] => Action::RemoveFile(path_of(path)?),
        ["socket", path, inode, with_directory @ ("0" | "1")] => Action::RemoveSocket {
            path: path_of(path)?,
            inode: inode.parse().ok()?,
            with_directory: *with_directory == "1",
        },
        _ => return None,
    })
}

fn remove_socket(path: &Path, inode: u64, with_directory: bool) -> io::Result<()> {
    if fs::symlink_metadata(path)?.ino() != inode {
        return Ok(());
    }
    // The descriptors of a process that is killed are closed one after the other.
    if !crate::probe::socket_is_stale(path) {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    fs::remove_file(path)?;
    if let Some(directory) = path.parent().filter(|_| with_directory) {
        // Other sockets may be in it.
        let _ = fs::remove_dir(directory);
    }
    Ok(())
}

/// Kills what is in a cgroup until it is empty, then removes it. A killed process leaves its cgroup a moment later.
fn end_cgroup(path: &Path) -> io::Result<()> {
    const ATTEMPTS: u32 = 200;
    const PAUSE: Duration = Duration::from_millis(10);
    for _ in 0..ATTEMPTS {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
            done => return done,
        }
        // `cgroup.kill` (Linux 5.14) spares no child that is just being born; before that, one by one and again.
        if fs::write(path.join("cgroup.kill"), "1").is_err() {
            let inside = fs::read_to_string(path.join("cgroup.procs"))?;
            let pids = inside.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
            // One that has ended in between does not matter.
            pids.for_each(|pid| kill_process(pid, Signal::KILL).unwrap_or(()));
        }
        std::thread::sleep(PAUSE);
    }
    fs::remove_dir(path)
}

/// Moves what is in `from` until nothing is left: a process may have been born meanwhile.
fn return_processes(from: &Path, to: &Path, only: u32) -> io::Result<()> {
    const ROUNDS: u32 = 1000;
    let to = if to.is_dir() { to } else { from.parent().unwrap_or(to) };
    // A process that is moved out of a frozen group runs again, but a frozen one may not be seen moving.
    let _ = fs::write(from.join("cgroup.freeze"), "0");
    for _ in 0..ROUNDS {
        let inside = fs::read_to_string(from.join("cgroup.procs"))?;
        let pids = inside.lines().filter(|pid| only == 0 || pid.parse() == Ok(only));
        let mut left = 0;
        for pid in pids {
            left += 1;
            match fs::write(to.join("cgroup.procs"), pid) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                done => done?,
            }
        }
        if left == 0 {
            return Ok(());
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

fn restore_loopback(mtu_bytes: u32, up: bool) -> Result<(), ActionError> {
    route::set_mtu("lo", mtu_bytes)?;
    if !up {
        route::link_down("lo")?;
        // The kernel has given it this address when it came up, and would do so again.
        route::remove_address("lo", std::net::Ipv4Addr::LOCALHOST.into(), 8)?;
    }
    Ok(())
}

const fn digit(version: IpVersion) -> char {
    match version {
        IpVersion::V4 => '4',
        IpVersion::V6 => '6',
    }
}

fn version_of(word: &str) -> Option<IpVersion> {
    match word {
        "4" => Some(IpVersion::V4),
        "6" => Some(IpVersion::V6),
        _ => None,
    }
}

/// Everything but plain ASCII as `%XX`, so that no space or line break is left; the empty text is `%`.
fn escape(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "%".into();
    }
    let one = |byte: &u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => char::from(*byte).to_string(),
        other => format!("%{other:02x}"),
    };
    bytes.iter().map(one).collect()
}

fn unescape(word: &str) -> Option<Vec<u8>> {
    if word == "%" {
        return Some(Vec::new());
    }
    let mut bytes = word.bytes();
    let mut plain = Vec::with_capacity(word.len());
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digits = [bytes.next()?, bytes.next()?];
            plain.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            plain.push(byte);
        }
    }
    Some(plain)
}

fn text(word: &str) -> Option<String> {
    String::from_utf8(unescape(word)?).ok()
}

fn escape_path(path: &Path) -> String {
    escape(path.as_os_str().as_bytes())
}

fn path_of(word: &str) -> Option<PathBuf> {
    Some(OsString::from_vec(unescape(word)?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_read_back() {
        let rule = MarkRule { version: IpVersion::V6, mark: 1, mask: u32::MAX, table: 100, priority: 9 };
        let actions = [
            Action::RemoveMarkRule(rule),
            Action::RemoveLocalDefault { version: IpVersion::V4, interface: 1, table: 100 },
            Action::DeleteTable { family: Family::Inet, name: "side track".into() },
            Action::RestoreSetting { name: "net/ipv4/ip_forward".into(), value: String::new() },
            Action::RestoreNapi(Napi { id: 8193, defer_hard_irqs: 2, gro_flush_timeout_ns: u64::MAX }),
            Action::RemoveDirectory(OsString::from_vec(b"/sys/fs/\xff\n%x".to_vec()).into()),
            Action::RemoveFile("/run/sidetrack/admin.sock".into()),
            Action::EndCgroup("/sys/fs/cgroup/sidetrack-run-1".into()),
            Action::ReturnProcesses {
                from: "/sys/fs/cgroup/a b".into(),
                to: "/sys/fs/cgroup".into(),
                pid: 7,
            },
            Action::RestoreLoopback { mtu_bytes: 65_536, up: false },
            Action::RemoveSocket { path: "/run/a b".into(), inode: 7, with_directory: true },
        ];
        for action in actions {
            let line = action.to_line();
            assert!(line.is_ascii() && !line.contains('\n'), "{line:?}");
            assert_eq!(line.parse::<Action>().expect("own line"), action);
        }
    }

    #[test]
    fn broken_lines_are_refused() {
        for line in [
            "",
            "rule",
            "rule 5 1 1 1 1",
            "rule 4 x 1 1 1",
            "file",
            "file a b",
            "socket /run/a 1",
            "socket /run/a 1 2",
            "return /a /b",
            "loopback 1 2",
            "file %f",
            "file %zz",
            "boom /",
        ] {
            assert!(line.parse::<Action>().is_err(), "{line:?}");
        }
    }

    #[test]
    fn what_is_gone_already_is_no_error() {
        let path = std::env::temp_dir().join("sidetrack-undo-no-such-thing");
        Action::RemoveFile(path.clone()).perform().expect("no file");
        Action::EndCgroup(path.clone()).perform().expect("no cgroup");
        let all = Action::ReturnProcesses { from: path.clone(), to: path.clone(), pid: 0 };
        all.perform().expect("no cgroup");
        Action::RemoveDirectory(path).perform().expect("no directory");
    }

    #[test]
    fn a_cgroup_is_ended_with_what_runs_in_it() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let name = format!("sidetrack-undo-test-{}", std::process::id());
        let leaf =
            crate::cgroup::Hierarchy::find().and_then(|tree| tree.create_leaf(&name)).expect("cgroup2");
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("sleep");
        leaf.add(child.id()).expect("moved");
        Action::EndCgroup(leaf.directory()).perform().expect("ended");
        assert!(!leaf.directory().exists());
        assert!(!child.wait().expect("ended").success());
    }
}
