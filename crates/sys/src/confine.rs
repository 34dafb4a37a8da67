//! What a process that has taken its rights away may no longer ask the kernel for (seccomp(2)). Small processes have a list of calls
//! that they make. Processes that run libraries of many kinds have a list of calls that none of them makes and that an attacker who
//! runs code in them would begin with. What is refused fails with EPERM, so that it can be read in the log.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
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
    /// The keeper, and the guards, which take back what others did. They make the calls of a list and no others.
    Keeper,
    /// The shunt's process: it loads BPF programs.
    Shunt,
    /// The process that starts containers: it enters their networks.
    Containers,
    /// Orchestrators and domains' agents: they read peers' bytes.
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
}

/// Other programs, other processes' memory and descriptors, namespaces, mounts, files past their paths, the kernel itself.
const NOBODY: &[libc::c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_enter,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_personality,
    libc::SYS_vhangup,
    libc::SYS_fanotify_init,
    libc::SYS_mknodat,
    libc::SYS_process_madvise,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
];

/// Calls that change a signal's way to another process.
const SIGNALS: &[libc::c_long] =
    &[libc::SYS_kill, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo, libc::SYS_pidfd_send_signal];

/// Families of sockets that no flow uses; the packet engine has opened its own before.
const FAMILIES: &[libc::c_int] = &[
    libc::AF_PACKET,
    libc::AF_XDP,
    libc::AF_KEY,
    libc::AF_ALG,
    libc::AF_VSOCK,
    libc::AF_CAN,
    libc::AF_TIPC,
    libc::AF_RDS,
    libc::AF_BLUETOOTH,
    libc::AF_X25,
    libc::AF_AX25,
    libc::AF_NFC,
];

/// All that the keeper and guards ask the kernel for: netlink, their socket, files of /proc, signals, memory, time.
const KEEPER: &[libc::c_long] = &[
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_capget,
    libc::SYS_chdir,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_connect,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_ioctl,
    libc::SYS_kill,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_prctl,
    libc::SYS_pread64,
    libc::SYS_prlimit64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_setsid,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_sysinfo,
    libc::SYS_tgkill,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_write,
    libc::SYS_writev,
];

/// The older names of some of these.
#[cfg(target_arch = "x86_64")]
const KEEPER_OLD: &[libc::c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_getdents,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const KEEPER_OLD: &[libc::c_long] = &[];

/// Families of sockets of the keeper and of guards; those of IPv4 and IPv6 name interfaces.
const KEEPER_FAMILIES: &[libc::c_int] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// What a filter says.
enum List {
    /// These fail with EPERM, and so do sockets of these families.
    AllBut(Vec<libc::c_long>, &'static [libc::c_int]),
    /// All others fail with EPERM, and so do sockets of other families.
    Only(Vec<libc::c_long>, &'static [libc::c_int]),
}

impl Kind {
    fn list(self) -> List {
        if self == Self::Keeper {
            return List::Only([KEEPER, KEEPER_OLD].concat(), KEEPER_FAMILIES);
        }
        let mut calls = NOBODY.to_vec();
        if self != Self::Run {
            calls.extend(SIGNALS);
        }
        if !matches!(self, Self::DataWithEngine | Self::Shunt) {
            calls.push(libc::SYS_bpf);
        }
        if self == Self::Containers {
            calls.retain(|call| *call != libc::SYS_setns);
        }
        List::AllBut(calls, FAMILIES)
    }

    fn program(self) -> Result<BpfProgram, seccompiler::BackendError> {
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let (calls, families, matched, otherwise) = match self.list() {
            List::AllBut(calls, families) => (calls, families, refuse, SeccompAction::Allow),
            List::Only(calls, families) => (calls, families, SeccompAction::Allow, refuse),
        };
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            calls.into_iter().map(|call| (call, Vec::new())).collect();
        let of_family = |family: &libc::c_int| {
            let family = u64::from(family.unsigned_abs());
            let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, family)?;
            SeccompRule::new(vec![condition])
        };
        let families = families.iter().map(of_family).collect::<Result<Vec<_>, _>>()?;
        rules.insert(libc::SYS_socket, families);
        SeccompFilter::new(rules, otherwise, matched, std::env::consts::ARCH.try_into()?)?.try_into()
    }
}

/// Takes these calls from this thread, and from those that it starts, for good: they fail with EPERM. It sets no_new_privs.
///
/// # Errors
/// This processor is none that the filter is made for, or the kernel has no seccomp filters.
pub fn confine(kind: Kind) -> io::Result<()> {
    let program = kind.program().map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
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
    const LAST: libc::c_long = 500;

    /// Numbers of calls that only the kernel's own code makes, in traced programs: no filter is asked about them (x86-64).
    const TRACING: [libc::c_long; 2] = [335, 336];

    fn assert_refused(kind: Kind, call: libc::c_long, first: libc::c_long) {
        // SAFETY: the filter refuses it before an argument is looked at; null pointers would be EFAULT.
        let result = unsafe { libc::syscall(call, first, 0, 0, 0, 0, 0) };
        let error = io::Error::last_os_error();
        assert_eq!((result, error.raw_os_error()), (-1, Some(libc::EPERM)), "{kind:?}: {call} ({first})");
    }

    #[test]
    fn every_forbidden_call_is_refused() {
        for kind in Kind::ALL {
            confined(kind, move || {
                let (calls, families) = match kind.list() {
                    List::AllBut(calls, families) => (calls, families.to_vec()),
                    List::Only(calls, families) => {
                        let others =
                            (0..LAST).filter(|call| !calls.contains(call) && *call != libc::SYS_socket);
                        let others = others.filter(|call| !TRACING.contains(call));
                        (others.collect(), (1..45).filter(|family| !families.contains(family)).collect())
                    }
                };
                calls.into_iter().for_each(|call| assert_refused(kind, call, 0));
                for family in families {
                    assert_refused(kind, libc::SYS_socket, family.into());
                }
            });
        }
    }

    #[test]
    fn a_process_is_confined_at_once() {
        // The limit and the flag belong to the whole process: a child of its own.
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fine = confine_process(Kind::Control).is_ok()
                && rustix::process::getrlimit(rustix::process::Resource::Core).maximum == Some(0)
                && rustix::process::dumpable_behavior() == Ok(rustix::process::DumpableBehavior::NotDumpable);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!fine)) };
        }
        let mut status = 0;
        // SAFETY: a valid place for the status of our own child.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
    }

    #[test]
    fn what_flows_need_goes_on() {
        confined(Kind::Data, || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            std::thread::spawn(move || TcpStream::connect(address).unwrap()).join().unwrap();
            listener.accept().unwrap();
            // The resolver asks netlink for addresses of its own.
            rustix::net::socket(rustix::net::AddressFamily::NETLINK, rustix::net::SocketType::RAW, None)
                .unwrap();
            std::fs::read("/proc/self/status").unwrap();
        });
    }

    #[test]
    fn each_kind_may_do_what_it_is_there_for() {
        let forbids = |kind: Kind, call: libc::c_long| match kind.list() {
            List::AllBut(calls, _) => calls.contains(&call),
            List::Only(calls, _) => !calls.contains(&call),
        };
        let may = |call: libc::c_long| Kind::ALL.into_iter().filter(move |kind| !forbids(*kind, call));
        assert_eq!(may(libc::SYS_kill).collect::<Vec<_>>(), [Kind::Keeper, Kind::Run]);
        assert_eq!(may(libc::SYS_bpf).collect::<Vec<_>>(), [Kind::DataWithEngine, Kind::Shunt]);
        assert_eq!(may(libc::SYS_setns).collect::<Vec<_>>(), [Kind::Containers]);
        assert_eq!(may(libc::SYS_execve).count() + may(libc::SYS_setuid).count(), 0);
    }
}
