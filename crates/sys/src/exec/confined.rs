//! What a jailed command cannot do: a filter of system calls (seccomp(2)), and descriptors that it does not inherit.
//!
//! A network namespace confines IP. It does not confine AF_VSOCK, and some families, raw sockets and netlink groups are only there to be
//! attacked. The filter refuses their sockets with an error; it kills nothing. It refuses io_uring too, because a ring opens sockets that
//! no filter sees, and the two requests of ioctl(2) that type into the terminal: the shell outside would run what is typed.

use libc::c_int;
use rustix::fs::{FileType, fstat};
use rustix::io::FdFlags;
use seccompiler::sock_filter;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};

/// How a command is confined beside its network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Confined {
    /// Whether it may open unix sockets. Pairs of connected sockets are always possible.
    pub unix_sockets: bool,
    /// Whether it makes no unix socket with a path (Landlock, since Linux 5.13).
    pub no_socket_files: bool,
    /// Whether it may make networks of its own as `sidetrack run` does: with nftables and raw sockets, which need rights over a network.
    /// It has none over its own.
    pub nested: bool,
}

/// The last descriptor of standard input, output and error. Those are what the caller gives on purpose.
const LAST_STANDARD: RawFd = 2;

impl Confined {
    /// Confines the calling process, just before it executes the command. It cannot get privileges afterwards.
    pub(super) fn enter(self) -> io::Result<()> {
        close_inherited()?;
        rustix::thread::set_no_new_privs(true)?;
        if self.no_socket_files {
            crate::landlock::forbid_socket_files()?;
        }
        crate::confine::install(&self.program(), 0)
    }

    /// The filter: for each architecture that this processor executes, the numbers of its calls.
    fn program(self) -> Vec<sock_filter> {
        let mut program = vec![load(ARCHITECTURE)];
        for (architecture, calls) in ARCHITECTURES {
            program.extend(if_equal(*architecture, self.of_calls(calls)));
        }
        program.push(refuse(libc::ENOSYS));
        program
    }

    fn of_calls(self, calls: &Calls) -> Vec<sock_filter> {
        let mut block = vec![load(NUMBER)];
        if calls.has_x32 {
            // x32: the same calls by other numbers.
            block.extend([jump(JUMP_GREATER_EQUAL, X32_BIT, 0, 1), refuse(libc::ENOSYS)]);
        }
        block.extend(if_equal(calls.socket, self.of_socket()));
        block.extend(if_equal(calls.socketpair, self.of_socketpair()));
        let types_into_terminal = [
            vec![load(argument(1))],
            if_equal(TIOCSTI, vec![refuse(libc::EPERM)]),
            if_equal(TIOCLINUX, vec![refuse(libc::EPERM)]),
            vec![ALLOW],
        ];
        block.extend(if_equal(calls.ioctl, types_into_terminal.concat()));
        block.extend(if_equal(calls.io_uring_setup, vec![refuse(libc::EPERM)]));
        if let Some(call) = calls.socketcall {
            // Its arguments are in memory, which a filter cannot read. Programs of today use socket(2).
            let opens = [SOCKETCALL_SOCKET, SOCKETCALL_SOCKETPAIR];
            let refused = opens.map(|kind| if_equal(kind, vec![refuse(libc::EACCES)])).concat();
            block.extend(if_equal(call, [vec![load(argument(0))], refused, vec![ALLOW]].concat()));
        }
        block.push(ALLOW);
        block
    }

    fn of_socket(self) -> Vec<sock_filter> {
        let unix = if self.unix_sockets { ALLOW } else { refuse(libc::EACCES) };
        let more: &[u32] = if self.nested { &[NETLINK_NETFILTER] } else { &[] };
        let netlink = [
            vec![load(argument(2))],
            unless(&[&[NETLINK_ROUTE, NETLINK_SOCK_DIAG], more].concat(), &[refuse(libc::EPROTONOSUPPORT)]),
            vec![ALLOW],
        ];
        let raw = if self.nested { if_equal(SOCK_RAW, vec![ALLOW]) } else { Vec::new() };
        [
            vec![load(argument(0))],
            if_equal(family(libc::AF_UNIX), vec![unix]),
            if_equal(family(libc::AF_NETLINK), netlink.concat()),
            unless(&[family(libc::AF_INET), family(libc::AF_INET6)], &[refuse(libc::EAFNOSUPPORT)]),
            vec![load(argument(1)), statement(AND, TYPE_MASK)],
            raw,
            unless(&[SOCK_STREAM, SOCK_DGRAM], &[refuse(libc::EACCES)]),
            vec![load(argument(2))],
            unless(&PROTOCOLS, &[refuse(libc::EACCES)]),
            vec![ALLOW],
        ]
        .concat()
    }

    /// A datagram socket of a pair can send to a path all the same.
    fn of_socketpair(self) -> Vec<sock_filter> {
        let mut block = vec![load(argument(0))];
        block.extend(unless(&[family(libc::AF_UNIX)], &[refuse(libc::EAFNOSUPPORT)]));
        if !self.unix_sockets {
            block.extend([load(argument(1)), statement(AND, TYPE_MASK)]);
            block.extend(if_equal(SOCK_DGRAM, vec![refuse(libc::EACCES)]));
        }
        block.push(ALLOW);
        block
    }
}

/// Marks every inherited descriptor that could lead out to be closed at exec: all but standard input, output and error, files, folders,
/// pipes and terminals. A socket, a TUN device or a ring would carry packets past the namespace.
fn close_inherited() -> io::Result<()> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let Some(number) = entry?.file_name().to_str().and_then(|name| name.parse::<RawFd>().ok()) else {
            continue;
        };
        if number <= LAST_STANDARD {
            continue;
        }
        // SAFETY: the process has one thread, which closes nothing meanwhile but the folder that it reads; of that one the kernel says
        // EBADF at worst.
        #[allow(unsafe_code, reason = "the numbers come from the kernel")]
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        let Ok(kind) = fstat(descriptor).map(|stat| FileType::from_raw_mode(stat.st_mode)) else { continue };
        let is_kept = match kind {
            FileType::RegularFile | FileType::Directory | FileType::Fifo => true,
            FileType::CharacterDevice => rustix::termios::isatty(descriptor),
            _ => false,
        };
        if !is_kept {
            rustix::io::fcntl_setfd(descriptor, FdFlags::CLOEXEC)?;
        }
    }
    Ok(())
}

/// The numbers of the calls of one architecture.
struct Calls {
    socket: u32,
    socketpair: u32,
    ioctl: u32,
    io_uring_setup: u32,
    socketcall: Option<u32>,
    has_x32: bool,
}

/// `AUDIT_ARCH_*` of linux/audit.h, with the numbers of the kernel's tables.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURES: &[(u32, Calls)] = &[
    (
        0xC000_003E,
        Calls { socket: 41, socketpair: 53, ioctl: 16, io_uring_setup: 425, socketcall: None, has_x32: true },
    ),
    (
        0x4000_0003,
        Calls {
            socket: 359,
            socketpair: 360,
            ioctl: 54,
            io_uring_setup: 425,
            socketcall: Some(102),
            has_x32: false,
        },
    ),
];
#[cfg(target_arch = "aarch64")]
const ARCHITECTURES: &[(u32, Calls)] = &[
    (
        0xC000_00B7,
        Calls {
            socket: 198,
            socketpair: 199,
            ioctl: 29,
            io_uring_setup: 425,
            socketcall: None,
            has_x32: false,
        },
    ),
    (
        0x4000_0028,
        Calls {
            socket: 281,
            socketpair: 288,
            ioctl: 54,
            io_uring_setup: 425,
            socketcall: None,
            has_x32: false,
        },
    ),
];

/// Offsets in what a filter sees (`struct seccomp_data`). Of an argument it loads the low half.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

const X32_BIT: u32 = 0x4000_0000;
const TYPE_MASK: u32 = 0xF;
const SOCK_STREAM: u32 = 1;
const SOCK_DGRAM: u32 = 2;
const SOCK_RAW: u32 = 3;
/// None, TCP, UDP, Multipath TCP.
const PROTOCOLS: [u32; 4] = [0, 6, 17, 262];
const NETLINK_ROUTE: u32 = 0;
const NETLINK_SOCK_DIAG: u32 = 4;
const NETLINK_NETFILTER: u32 = 12;
const SOCKETCALL_SOCKET: u32 = 1;
const SOCKETCALL_SOCKETPAIR: u32 = 8;
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541C;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_GREATER_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const ALLOW: sock_filter = statement(RETURN, libc::SECCOMP_RET_ALLOW);

const fn refuse(errno: c_int) -> sock_filter {
    statement(RETURN, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs())
}

const fn family(family: c_int) -> u32 {
    family.unsigned_abs()
}

const fn statement(code: u16, k: u32) -> sock_filter {
    jump(code, k, 0, 0)
}

const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn load(offset: u32) -> sock_filter {
    statement(LOAD, offset)
}

/// Executes `block` if the loaded value is `value`. The block returns, or loads nothing.
fn if_equal(value: u32, block: Vec<sock_filter>) -> Vec<sock_filter> {
    // A long jump, because a block can have more instructions than a conditional jump can pass.
    let past = u32::try_from(block.len()).unwrap_or(u32::MAX);
    [vec![jump(JUMP_EQUAL, value, 1, 0), statement(JUMP, past)], block].concat()
}

/// Executes `block` unless the loaded value is one of `values`.
fn unless(values: &[u32], block: &[sock_filter]) -> Vec<sock_filter> {
    let mut steps = Vec::new();
    for (index, value) in values.iter().enumerate() {
        let past = values.len() - 1 - index + block.len();
        steps.push(jump(JUMP_EQUAL, *value, u8::try_from(past).unwrap_or(u8::MAX), 0));
    }
    steps.extend_from_slice(block);
    steps
}

#[cfg(test)]
#[allow(unsafe_code, reason = "calls that libraries would not make")]
mod tests {
    use super::*;

    /// The error of socket(2) or socketpair(2) in a thread with this filter.
    fn errors(unix_sockets: bool) -> impl Fn(libc::c_long, [c_int; 3]) -> Option<c_int> {
        errors_of(Confined { unix_sockets, ..Confined::default() })
    }

    fn errors_of(confined: Confined) -> impl Fn(libc::c_long, [c_int; 3]) -> Option<c_int> {
        move |call, [family, kind, protocol]| {
            std::thread::spawn(move || {
                rustix::thread::set_no_new_privs(true).unwrap();
                crate::confine::install(&confined.program(), 0).unwrap();
                let mut pair = [0_i32; 2];
                // SAFETY: opens descriptors at most, which end with the test; the array lives across the call.
                let opened = unsafe { libc::syscall(call, family, kind, protocol, pair.as_mut_ptr()) };
                (opened < 0).then(|| io::Error::last_os_error().raw_os_error()).flatten()
            })
            .join()
            .unwrap()
        }
    }

    #[test]
    fn sockets_of_the_network_are_opened_and_all_others_are_refused() {
        let with = errors(true);
        let socket = |family, kind, protocol| with(libc::SYS_socket, [family, kind, protocol]);
        for family in [libc::AF_INET, libc::AF_INET6] {
            assert_eq!(socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0), None);
            assert_eq!(socket(family, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, 17), None);
            assert_eq!(socket(family, libc::SOCK_RAW, 1), Some(libc::EACCES));
            assert_eq!(socket(family, libc::SOCK_RAW, 255), Some(libc::EACCES));
            for (kind, protocol) in
                [(libc::SOCK_STREAM, 132), (libc::SOCK_DGRAM, 1), (libc::SOCK_DGRAM, 136), (6, 33)]
            {
                assert_eq!(socket(family, kind, protocol), Some(libc::EACCES), "{kind} {protocol}");
            }
        }
        assert_eq!(socket(libc::AF_UNIX, libc::SOCK_STREAM, 0), None);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 0), None);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 12), Some(libc::EPROTONOSUPPORT));
        let allowed = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
        for family in (0..64).filter(|family| !allowed.contains(family)) {
            assert_eq!(socket(family, libc::SOCK_STREAM, 0), Some(libc::EAFNOSUPPORT), "{family}");
            assert_eq!(socket(family, libc::SOCK_RAW, 0), Some(libc::EAFNOSUPPORT), "{family}");
        }
    }

    #[test]
    fn without_unix_sockets_pairs_that_cannot_send_elsewhere_remain() {
        let without = errors(false);
        assert_eq!(without(libc::SYS_socket, [libc::AF_UNIX, libc::SOCK_STREAM, 0]), Some(libc::EACCES));
        let pair = |kind| without(libc::SYS_socketpair, [libc::AF_UNIX, kind, 0]);
        assert_eq!(pair(libc::SOCK_STREAM), None);
        assert_eq!(pair(libc::SOCK_DGRAM | libc::SOCK_CLOEXEC), Some(libc::EACCES));
        assert_eq!(errors(true)(libc::SYS_socketpair, [libc::AF_UNIX, libc::SOCK_DGRAM, 0]), None);
    }

    #[test]
    fn a_jail_that_may_hold_others_opens_what_their_networks_need_and_nothing_else() {
        let with = errors_of(Confined { unix_sockets: true, nested: true, ..Confined::default() });
        let socket = |family, kind, protocol| with(libc::SYS_socket, [family, kind, protocol]);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 12), None);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, 9), Some(libc::EPROTONOSUPPORT));
        assert_ne!(socket(libc::AF_INET, libc::SOCK_RAW, 255), Some(libc::EACCES));
        assert_eq!(socket(libc::AF_INET, libc::SOCK_DGRAM, 1), Some(libc::EACCES));
        assert_eq!(socket(libc::AF_PACKET, libc::SOCK_RAW, 0), Some(libc::EAFNOSUPPORT));
        assert_eq!(with(libc::SYS_io_uring_setup, [8, 0, 0]), Some(libc::EPERM));
    }

    #[test]
    fn rings_and_typing_into_the_terminal_are_refused() {
        let with = errors(true);
        assert_eq!(with(libc::SYS_io_uring_setup, [8, 0, 0]), Some(libc::EPERM));
        for request in [TIOCSTI, TIOCLINUX] {
            assert_eq!(with(libc::SYS_ioctl, [-1, request.cast_signed(), 0]), Some(libc::EPERM));
        }
        assert_eq!(with(libc::SYS_ioctl, [-1, 0x541B, 0]), Some(libc::EBADF));
    }

    #[test]
    fn every_jump_stays_in_the_program() {
        for (unix_sockets, nested) in [(true, false), (false, false), (true, true), (false, true)] {
            let program = Confined { unix_sockets, nested, ..Confined::default() }.program();
            for (at, step) in program.iter().enumerate() {
                let far = match step.code {
                    JUMP => usize::try_from(step.k).unwrap(),
                    _ => usize::from(step.jt.max(step.jf)),
                };
                assert!(at + far + 1 < program.len() || far == 0, "{at}");
            }
            assert!(matches!(program.last(), Some(last) if last.code == RETURN));
        }
    }
}
