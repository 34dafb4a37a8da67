//! What a process that has taken its rights away may no longer ask the kernel for (seccomp(2)): calls that none of ours makes and
//! that an attacker who runs code in it would begin with.

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
    /// The keeper: it may send signals, for it ends what its guard was to end.
    Keeper,
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

impl Kind {
    /// The calls that fail with EPERM whatever their arguments are.
    fn calls(self) -> Vec<libc::c_long> {
        let mut calls = NOBODY.to_vec();
        if self != Self::Keeper {
            calls.extend(SIGNALS);
        }
        if self != Self::DataWithEngine {
            calls.push(libc::SYS_bpf);
        }
        calls
    }

    fn program(self) -> Result<BpfProgram, seccompiler::BackendError> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            self.calls().into_iter().map(|call| (call, Vec::new())).collect();
        let of_family = |family: &libc::c_int| {
            let family = u64::from(family.unsigned_abs());
            let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, family)?;
            SeccompRule::new(vec![condition])
        };
        let families = FAMILIES.iter().map(of_family).collect::<Result<Vec<_>, _>>()?;
        rules.insert(libc::SYS_socket, families);
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, std::env::consts::ARCH.try_into()?)?
            .try_into()
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

    #[test]
    fn every_forbidden_call_is_refused() {
        for kind in [Kind::Data, Kind::DataWithEngine, Kind::Keeper] {
            confined(kind, move || {
                for call in kind.calls() {
                    // SAFETY: the filter refuses it before an argument is looked at; null pointers would be EFAULT.
                    let result = unsafe { libc::syscall(call, 0, 0, 0, 0, 0, 0) };
                    let error = io::Error::last_os_error();
                    assert_eq!((result, error.raw_os_error()), (-1, Some(libc::EPERM)), "{kind:?}: {call}");
                }
                for family in FAMILIES {
                    // SAFETY: no pointer; a descriptor that it gave would only leak into the test.
                    let result = unsafe { libc::socket(*family, libc::SOCK_RAW, 0) };
                    let error = io::Error::last_os_error();
                    assert_eq!((result, error.raw_os_error()), (-1, Some(libc::EPERM)), "{kind:?}: {family}");
                }
            });
        }
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
    fn the_keeper_may_end_processes_and_the_engine_may_change_maps() {
        assert!(!Kind::Keeper.calls().contains(&libc::SYS_kill));
        assert!(!Kind::DataWithEngine.calls().contains(&libc::SYS_bpf));
        assert!(Kind::Data.calls().contains(&libc::SYS_bpf) && Kind::Data.calls().contains(&libc::SYS_kill));
    }
}
