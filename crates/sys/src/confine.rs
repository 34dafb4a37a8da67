//! The system calls that a process may make after it has given up its rights (seccomp(2)). Each kind of process has a list
//! of calls; every other call fails with EPERM and is written to the kernel's audit log. Nothing is killed.
//!
//! Two answers are ENOSYS instead, so that the C library uses an older call: clone3(2), whose arguments a filter cannot read,
//! and calls that are newer than the lists. These are not logged.

mod calls;

use calls::{
    BASIC, BASIC_OLD, CHILDREN, EVENTS, EVENTS_OLD, FILES, FILES_OLD, KEEPER, KEEPER_OLD, LAST_KNOWN,
    QUESTIONS, SIGNALS, SOCKETS, SPLICE,
};
use libc::c_long;
use seccompiler::SeccompCmpArgLen::{self, Dword, Qword};
use seccompiler::SeccompCmpOp::{self, Eq, MaskedEq, Ne};
use seccompiler::{
    BackendError, BpfProgram, BpfProgramRef, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};
use std::collections::BTreeMap;
use std::io;

/// Kinds of processes, each with its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The main process of a node: it reads peers' bytes.
    Data,
    /// The same with a packet engine, which changes BPF maps.
    DataWithEngine,
    /// The keeper, and the guards, which take back what others did. A keeper starts a new guard if the first one has gone.
    Keeper,
    /// The shunt's process: it loads BPF programs.
    Shunt,
    /// The process that starts containers: it enters their networks.
    Containers,
    /// Orchestrators and domains' agents, and the small processes beside them: they read peers' bytes.
    Control,
    /// The main process of `run`, once the command runs: it ends what the command leaves running.
    Run,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Data,
        Self::DataWithEngine,
        Self::Keeper,
        Self::Shunt,
        Self::Containers,
        Self::Control,
        Self::Run,
    ];

    /// Returns the calls that are allowed with any arguments.
    fn calls(self) -> Vec<c_long> {
        let common = [BASIC, BASIC_OLD, SOCKETS, EVENTS, EVENTS_OLD];
        let more: &[&[c_long]] = match self {
            Self::Keeper => return [KEEPER, KEEPER_OLD].concat(),
            Self::Data => &[FILES, FILES_OLD, SPLICE, CHILDREN],
            Self::DataWithEngine => &[FILES, FILES_OLD, SPLICE, CHILDREN, &[libc::SYS_bpf]],
            Self::Shunt => &[CHILDREN, &[libc::SYS_bpf]],
            Self::Containers => &[CHILDREN, &[libc::SYS_setns]],
            Self::Control => &[FILES, FILES_OLD, CHILDREN],
            Self::Run => &[FILES, FILES_OLD, SPLICE, CHILDREN, SIGNALS, QUESTIONS],
        };
        [common.concat(), more.concat()].concat()
    }

    /// Returns the calls that are allowed with some arguments only. Each rule is one way to pass.
    fn conditions(self) -> Result<Vec<(c_long, Vec<SeccompRule>)>, BackendError> {
        let families = FAMILIES.iter().map(|family| rule(&[(Qword, 0, Eq, *family)]));
        // Processes with threads start no process. The keeper starts one: a new guard.
        let clones = if self == Self::Keeper { (NEW, 0) } else { (NEW | THREAD, THREAD) };
        let mut all = vec![
            (libc::SYS_socket, families.collect::<Result<_, _>>()?),
            (libc::SYS_clone, vec![rule(&[(Qword, 0, MaskedEq(clones.0), clones.1)])?]),
            (libc::SYS_ioctl, vec![rule(&[(Dword, 1, Ne, TIOCSTI), (Dword, 1, Ne, TIOCLINUX)])?]),
        ];
        // Of another process of the same user, these would change or end something.
        let own = u64::from(std::process::id());
        let mut of_own = vec![libc::SYS_prlimit64, libc::SYS_tgkill];
        // The thread that writes records lets all others go first.
        if matches!(self, Self::Data | Self::DataWithEngine | Self::Run) {
            of_own.push(libc::SYS_sched_setscheduler);
        }
        for call in of_own {
            all.push((call, vec![rule(&[(Dword, 0, Eq, 0)])?, rule(&[(Dword, 0, Eq, own)])?]));
        }
        Ok(all)
    }

    /// Returns the filter that refuses what is on no list.
    fn program(self) -> Result<BpfProgram, BackendError> {
        let any = self.calls().into_iter().map(|call| (call, Vec::new()));
        let rules: BTreeMap<_, _> = any.chain(self.conditions()?).collect();
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        SeccompFilter::new(rules, refuse, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?
            .try_into()
    }
}

/// The families of sockets of all processes. The packet engine has opened its own before.
const FAMILIES: &[u64] =
    &[libc::AF_UNIX as u64, libc::AF_INET as u64, libc::AF_INET6 as u64, libc::AF_NETLINK as u64];

/// The flags of clone(2) for new namespaces, and the one for a thread.
const NEW: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;
const THREAD: u64 = libc::CLONE_THREAD as u64;

/// Requests of ioctl(2) that type into a terminal: a shell on the same terminal would run it.
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541C;

/// Returns a rule that passes if all these arguments compare as said.
fn rule(conditions: &[(SeccompCmpArgLen, u8, SeccompCmpOp, u64)]) -> Result<SeccompRule, BackendError> {
    let condition = |(len, at, op, value): &(SeccompCmpArgLen, u8, SeccompCmpOp, u64)| {
        SeccompCondition::new(*at, len.clone(), op.clone(), *value)
    };
    SeccompRule::new(conditions.iter().map(condition).collect::<Result<_, _>>()?)
}

/// Returns the filter that says ENOSYS to clone3(2) and to calls that are newer than the lists. It is installed after the
/// other filter: if two filters refuse a call, the answer of the later one counts.
fn newer_calls() -> BpfProgram {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const IF_ABOVE: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, k| sock_filter { code, jt, jf: 0, k };
    vec![
        // The call's number is the first field of what a filter sees.
        step(LOAD, 0, 0),
        step(IF_EQUAL, 2, libc::SYS_clone3 as u32),
        step(IF_ABOVE, 1, LAST_KNOWN as u32),
        step(RETURN, 0, libc::SECCOMP_RET_ALLOW),
        step(RETURN, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs()),
    ]
}

/// Confines this thread, and those that it starts, to the calls of a list, for good. It sets no_new_privs.
///
/// # Errors
/// This processor is none that the filter is made for, or the kernel has no seccomp filters.
pub fn confine(kind: Kind) -> io::Result<()> {
    let program = kind.program().map_err(io::Error::other)?;
    rustix::thread::set_no_new_privs(true)?;
    match install(&program, libc::SECCOMP_FILTER_FLAG_LOG) {
        // Before Linux 4.14 refused calls cannot be logged.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => install(&program, 0)?,
        installed => installed?,
    }
    install(&newer_calls(), 0)
}

#[allow(unsafe_code, reason = "the crate installs no filter with a log")]
pub(crate) fn install(program: BpfProgramRef<'_>, flags: libc::c_ulong) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    // `sock_filter` has the layout of the kernel's structure of this name.
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: the kernel copies the `len` instructions, which live across the call, and writes nothing.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// True if a filter of system calls is in force for this process already: that of a container, or of a jail around it.
pub fn is_confined() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == "2"))
}

/// True if this kernel has seccomp filters.
pub fn is_available() -> bool {
    let errno: libc::c_uint = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the call reads one number and changes nothing.
    #[allow(unsafe_code, reason = "the crate has no such question")]
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const errno) };
    result == 0
}

/// What a process does once that has taken its rights and reads what others send: it leaves no core file, closes its memory to
/// others, and confines its calls. To be called while it has one thread.
///
/// # Errors
/// The first step that failed; the others were taken.
pub fn confine_process(kind: Kind) -> io::Result<()> {
    let steps = [leave_no_core(), close_memory(), confine(kind)];
    steps.into_iter().collect()
}

/// Makes this process leave no core file, which would hold keys and what flows carried; children inherit it.
///
/// # Errors
/// What setrlimit(2) says.
pub fn leave_no_core() -> io::Result<()> {
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    Ok(rustix::process::setrlimit(rustix::process::Resource::Core, none)?)
}

/// Closes this process's memory and descriptors to other processes of the same user (PR_SET_DUMPABLE).
///
/// # Errors
/// What prctl(2) says.
pub fn close_memory() -> io::Result<()> {
    let closed = rustix::process::DumpableBehavior::NotDumpable;
    Ok(rustix::process::set_dumpable_behavior(closed)?)
}

#[cfg(test)]
#[allow(unsafe_code, reason = "calls that libraries would not make")]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    /// A filter is a thread's own.
    fn confined(kind: Kind, test: impl FnOnce() + Send + 'static) {
        std::thread::spawn(move || {
            confine(kind).unwrap();
            test();
        })
        .join()
        .unwrap();
    }

    /// The largest number of a call that is tried; Linux 6.18 has some 470.
    const LAST: c_long = 500;

    /// Numbers of calls that only the kernel's own code makes, in traced programs: no filter is asked about them (x86-64).
    const TRACING: [c_long; 2] = [335, 336];

    fn refusal(call: c_long, arguments: [c_long; 3]) -> Option<i32> {
        let [a, b, c] = arguments;
        // SAFETY: a filter refuses it before an argument is looked at; else null pointers are EFAULT.
        let result = unsafe { libc::syscall(call, a, b, c, 0, 0, 0) };
        (result == -1).then(|| io::Error::last_os_error().raw_os_error()).flatten()
    }

    #[test]
    fn every_call_on_no_list_is_refused() {
        for kind in Kind::ALL {
            confined(kind, move || {
                let conditions = kind.conditions().unwrap();
                let allowed: Vec<_> =
                    kind.calls().into_iter().chain(conditions.iter().map(|(call, _)| *call)).collect();
                let others = (0..LAST).filter(|call| !allowed.contains(call) && !TRACING.contains(call));
                for call in others {
                    let is_new = call > LAST_KNOWN || call == libc::SYS_clone3;
                    let expected = if is_new { libc::ENOSYS } else { libc::EPERM };
                    assert_eq!(refusal(call, [0; 3]), Some(expected), "{kind:?}: {call}");
                }
                assert!(allowed.iter().all(|call| *call <= LAST_KNOWN), "{kind:?}");
            });
        }
    }

    #[test]
    fn arguments_decide_about_some_calls() {
        for kind in Kind::ALL {
            confined(kind, move || {
                let refused = |call, arguments| refusal(call, arguments) == Some(libc::EPERM);
                let families = (0..45).filter(|family| !FAMILIES.contains(family));
                for family in families {
                    let family = family.cast_signed();
                    assert!(
                        refused(libc::SYS_socket, [family, libc::SOCK_RAW.into(), 0]),
                        "{kind:?}: {family}"
                    );
                }
                for flag in 0..7 {
                    // CLONE_NEWNS, and CLONE_NEWCGROUP to CLONE_NEWNET; with CLONE_THREAD, which allows threads.
                    let flag = if flag == 0 { 0x2_0000 } else { 0x100_0000 << flag };
                    assert!(refused(libc::SYS_clone, [flag, 0, 0]), "{kind:?}: {flag:x}");
                    assert!(refused(libc::SYS_clone, [flag | 0x1_0000, 0, 0]), "{kind:?}: {flag:x}");
                }
                for request in [TIOCSTI, TIOCLINUX] {
                    assert!(refused(libc::SYS_ioctl, [-1, request.cast_signed(), 0]), "{kind:?}");
                    assert_eq!(refusal(libc::SYS_ioctl, [-1, 0x541B, 0]), Some(libc::EBADF), "{kind:?}");
                }
                // Process 1 and its first thread.
                assert!(refused(libc::SYS_tgkill, [1, 1, 0]), "{kind:?}");
                assert!(refused(libc::SYS_prlimit64, [1, libc::RLIMIT_NOFILE.into(), 0]), "{kind:?}");
                let own = std::process::id().into();
                assert_eq!(
                    refusal(libc::SYS_prlimit64, [own, libc::RLIMIT_NOFILE.into(), 0]),
                    None,
                    "{kind:?}"
                );
                let tid = rustix::thread::gettid().as_raw_nonzero().get().into();
                assert_eq!(refusal(libc::SYS_tgkill, [own, tid, 0]), None, "{kind:?}");
            });
        }
    }

    /// Runs this in a child with one thread; true if it returned true.
    fn in_child(test: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls nothing that needs a lock of another thread but the allocator's, which the C library
        // keeps usable in a forked child, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = test();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut status = 0;
        // SAFETY: a valid place for the status of our own child.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        child > 0 && (waited, status) == (child, 0)
    }

    #[test]
    fn a_process_is_confined_at_once() {
        // The limit and the flag belong to the whole process: a child of its own.
        assert!(in_child(|| {
            confine_process(Kind::Control).is_ok()
                && rustix::process::getrlimit(rustix::process::Resource::Core).maximum == Some(0)
                && rustix::process::dumpable_behavior() == Ok(rustix::process::DumpableBehavior::NotDumpable)
        }));
    }

    #[test]
    fn only_a_keeper_starts_a_process() {
        for kind in Kind::ALL {
            let starts = in_child(|| confine(kind).is_ok() && in_child(|| confine(kind).is_ok()));
            assert_eq!(starts, kind == Kind::Keeper, "{kind:?}");
        }
    }

    #[test]
    fn what_flows_need_goes_on() {
        for kind in [Kind::Data, Kind::DataWithEngine, Kind::Control, Kind::Run] {
            confined(kind, || {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let address = listener.local_addr().unwrap();
                std::thread::spawn(move || TcpStream::connect(address).unwrap()).join().unwrap();
                listener.accept().unwrap();
                // The resolver asks netlink for addresses of its own.
                let netlink = rustix::net::AddressFamily::NETLINK;
                rustix::net::socket(netlink, rustix::net::SocketType::RAW, None).unwrap();
                std::fs::read("/proc/self/status").unwrap();
                let folder = tempfile::tempdir().unwrap();
                std::fs::write(folder.path().join("a"), "text").unwrap();
                std::fs::rename(folder.path().join("a"), folder.path().join("b")).unwrap();
                folder.close().unwrap();
            });
        }
    }

    #[test]
    fn each_kind_may_do_what_it_is_there_for() {
        let may = |call| Kind::ALL.into_iter().filter(move |kind| kind.calls().contains(&call));
        assert_eq!(may(libc::SYS_kill).collect::<Vec<_>>(), [Kind::Keeper, Kind::Run]);
        assert_eq!(may(libc::SYS_bpf).collect::<Vec<_>>(), [Kind::DataWithEngine, Kind::Shunt]);
        assert_eq!(may(libc::SYS_setns).collect::<Vec<_>>(), [Kind::Containers]);
        assert_eq!(may(libc::SYS_execve).count() + may(libc::SYS_setuid).count(), 0);
    }
}
