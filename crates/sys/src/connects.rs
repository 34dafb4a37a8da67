//! connect(2) of a command and its children, asked about before it happens (seccomp_unotify(2), Linux 5.14).
//!
//! ICMP for IPv4 has no code that Linux reports as `EACCES`. So a filter in the command hands each connect(2) to us first. We read the
//! address from the command's memory. What policy denies fails with `EACCES`; everything else goes on, and the network decides about it.
//! The command can change the address after we have read it. That opens nothing, because the network refuses it then.
//!
//! ```text
//!   connect(2) -> [asked] -- refuse -> EACCES
//!                    |  `-- go on --> the kernel executes it
//!                    +-- we are gone -> ENOSYS
//! ```
#![allow(unsafe_code, reason = "no kept crate knows these calls")]

use libc::c_ulong;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::ipproto;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use seccompiler::sock_filter;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The architecture (`AUDIT_ARCH_*` of linux/audit.h) whose calls are asked about. Others go on.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;

/// The lengths of addresses that are asked about: `sockaddr_in`, `sockaddr_in6`, `sockaddr_storage`. A filter sees no family, and unix
/// sockets, whose addresses seldom have these lengths, are none of our business.
const LENGTHS: [u32; 3] = [16, 28, 128];

/// `SO_NETNS_COOKIE` (asm-generic/socket.h).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// `IPPROTO_MPTCP`.
const MULTIPATH_TCP: u32 = 262;

/// Installs the filter in the calling thread, just before it executes the command. Needs CAP_SYS_ADMIN in the thread's user namespace.
/// The descriptor is closed on exec.
///
/// # Errors
/// `EBUSY` if a filter around this process asks already; other reasons of seccomp(2).
pub(crate) fn ask() -> io::Result<OwnedFd> {
    let program = program();
    let new = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    match install(&program, new | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
        // Before Linux 5.19, a signal interrupts a call that we have read, and it is asked again.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => install(&program, new),
        installed => installed,
    }
}

fn program() -> Vec<sock_filter> {
    let step = |code: u32, k, jt, jf| sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k };
    let load = |offset| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let equal = |k, jt, jf| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, jt, jf);
    let call = u32::try_from(libc::SYS_connect).unwrap_or(u32::MAX);
    // Offsets in `struct seccomp_data`; jumps that find nothing lead to the last step but one.
    vec![
        load(4),
        equal(ARCHITECTURE, 0, 6),
        load(0),
        equal(call, 0, 4),
        load(16 + 8 * 2),
        equal(LENGTHS[0], 3, 0),
        equal(LENGTHS[1], 2, 0),
        equal(LENGTHS[2], 1, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_USER_NOTIF, 0, 0),
    ]
}

fn install(program: &[sock_filter], flags: c_ulong) -> io::Result<OwnedFd> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: the kernel copies the instructions, which live across the call, and writes nothing.
    let listener =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    let listener = RawFd::try_from(listener).unwrap_or(-1);
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which nothing else has.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}

/// Asks about each connect(2) of the command.
#[derive(Debug)]
pub struct Questions(OwnedFd);

/// One call that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    id: u64,
    /// The calling thread's id.
    pub thread: u32,
    /// Where it wants to connect; an IPv4-mapped address as IPv4. `None`: to no address of IP.
    pub server: Option<SocketAddr>,
    socket: RawFd,
}

impl From<OwnedFd> for Questions {
    fn from(listener: OwnedFd) -> Self {
        Self(listener)
    }
}

impl Question {
    /// The calling process. `None`: it is gone.
    pub fn process(&self) -> Option<u32> {
        u32::try_from(thread_group(self.thread)?.as_raw_nonzero().get()).ok()
    }
}

impl Questions {
    /// Waits for the next question. `None`: all processes of the command have ended.
    ///
    /// # Errors
    /// Only if the descriptor fails.
    pub fn wait(&self) -> io::Result<Option<Question>> {
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !fds[0].revents().contains(PollFlags::IN) {
                return Ok(None);
            }
            match self.receive() {
                Ok(notice) => return Ok(Some(self.question(&notice))),
                // The caller is gone, or a signal came.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn receive(&self) -> io::Result<libc::seccomp_notif> {
        // SAFETY: a plain structure of integers, which the kernel wants to be zero before.
        let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request writes one such structure.
        let result =
            unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut notice) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(notice) }
    }

    fn question(&self, notice: &libc::seccomp_notif) -> Question {
        let [socket, at, length, ..] = notice.data.args;
        let mut bytes = [0; 28];
        let length = usize::try_from(length).unwrap_or(0).min(bytes.len());
        let read = read_memory(notice.pid, at, bytes.get_mut(..length).unwrap_or_default());
        // What was read may be of another process if this one ended meanwhile.
        let server = read.filter(|_| self.waits(notice.id)).and_then(|read| address(bytes.get(..read)?));
        let socket = RawFd::try_from(socket & 0xFFFF_FFFF).unwrap_or(-1);
        Question { id: notice.id, thread: notice.pid, server, socket }
    }

    fn waits(&self, id: u64) -> bool {
        // SAFETY: the request reads one number.
        unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id) == 0 }
    }

    /// Whether the socket is one of TCP in the network namespace of `ours`, a socket of this process. Programs in networks of their own
    /// connect to addresses of those.
    pub fn is_tcp_of_network(&self, question: &Question, ours: impl AsFd) -> bool {
        let is = || {
            let process = thread_group(question.thread)?;
            let process = pidfd_open(process, PidfdFlags::empty()).ok()?;
            let socket = pidfd_getfd(&process, question.socket, PidfdGetfdFlags::empty()).ok()?;
            let protocol = rustix::net::sockopt::socket_protocol(&socket).ok()??;
            let is_tcp = protocol == ipproto::TCP || protocol.as_raw().get() == MULTIPATH_TCP;
            Some(is_tcp && network(&socket)? == network(&ours)? && self.waits(question.id))
        };
        is().unwrap_or(false)
    }

    /// Lets the call go on.
    pub fn go_on(&self, question: &Question) {
        self.answer(question, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE);
    }

    /// Lets the call fail with `EACCES`.
    pub fn refuse(&self, question: &Question) {
        self.answer(question, -libc::EACCES, 0);
    }

    fn answer(&self, question: &Question, error: libc::c_int, flags: c_ulong) {
        let flags = u32::try_from(flags).unwrap_or(0);
        let answer = libc::seccomp_notif_resp { id: question.id, val: 0, error, flags };
        // SAFETY: the request reads one such structure. It fails if the caller is gone, which needs no answer.
        unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw const answer) };
    }
}

/// Reads memory of a thread. Returns how many bytes there were; `None`: we may not, or there is none.
fn read_memory(thread: u32, at: u64, into: &mut [u8]) -> Option<usize> {
    let ours = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let at = usize::try_from(at).ok()?;
    let theirs = libc::iovec { iov_base: std::ptr::without_provenance_mut(at), iov_len: into.len() };
    let thread = libc::pid_t::try_from(thread).ok()?;
    // SAFETY: the kernel writes at most `into.len()` bytes to `into`; the other address is of the other process.
    let read = unsafe { libc::process_vm_readv(thread, &raw const ours, 1, &raw const theirs, 1, 0) };
    usize::try_from(read).ok()
}

/// Reads an address of IP.
fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(*bytes.first_chunk()?);
    let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
    let ip = match i32::from(family) {
        libc::AF_INET => IpAddr::V4(Ipv4Addr::from(*bytes.get(4..)?.first_chunk::<4>()?)),
        libc::AF_INET6 => IpAddr::V6(Ipv6Addr::from(*bytes.get(8..)?.first_chunk::<16>()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip.to_canonical(), port))
}

/// The process that a thread belongs to.
fn thread_group(thread: u32) -> Option<Pid> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    Pid::from_raw(line.trim().parse().ok()?)
}

/// The number of a socket's network namespace, which is never used again.
pub(crate) fn network(socket: impl AsFd) -> Option<u64> {
    let (mut cookie, mut length) = (0_u64, libc::socklen_t::try_from(size_of::<u64>()).ok()?);
    // SAFETY: the kernel writes at most `length` bytes to the number, and the length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(cookie)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream, UdpSocket};

    #[test]
    fn addresses_are_read_and_short_ones_are_not() {
        let v4 = [2, 0, 1, 187, 192, 0, 2, 7, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(address(&v4), Some("192.0.2.7:443".parse().expect("an address")));
        let mut v6 = [0; 28];
        v6[0] = 10;
        v6[3] = 80;
        v6[23] = 1;
        assert_eq!(address(&v6), Some("[::1]:80".parse().expect("an address")));
        v6[18..20].copy_from_slice(&[0xff, 0xff]);
        assert_eq!(address(&v6), Some("0.0.0.1:80".parse().expect("an address")), "mapped");
        for length in 0..24 {
            assert_eq!(address(&v6[..length]), None);
        }
        for length in 0..8 {
            assert_eq!(address(&v4[..length]), None);
        }
        assert_eq!(address(&[1, 0, b'/', b'a']), None);
    }

    /// A thread with the filter connects; this one answers.
    #[test]
    fn a_call_is_refused_or_goes_on() {
        let server = TcpListener::bind("127.0.0.1:0").expect("listen");
        let to = server.local_addr().expect("an address");
        let (give, given) = std::sync::mpsc::channel();
        let asking = std::thread::spawn(move || {
            // Without CAP_SYS_ADMIN the kernel wants this.
            rustix::thread::set_no_new_privs(true).expect("prctl");
            give.send(ask()).expect("the other thread is there");
            let results = [TcpStream::connect(to).map(drop), TcpStream::connect(to).map(drop)];
            let datagrams = UdpSocket::bind("127.0.0.1:0").expect("bind");
            (results.map(|result| result.err().and_then(|error| error.raw_os_error())), datagrams.connect(to))
        });
        let questions = match given.recv().expect("a descriptor") {
            Ok(listener) => Questions::from(listener),
            // A filter around this test asks already, or there is no such kernel.
            Err(_) => return,
        };
        for is_refused in [true, false] {
            let question = questions.wait().expect("a question").expect("it runs");
            assert_eq!(question.server, Some(to));
            assert!(questions.is_tcp_of_network(&question, &server));
            if is_refused {
                questions.refuse(&question);
            } else {
                questions.go_on(&question);
            }
        }
        let question = questions.wait().expect("a question").expect("it runs");
        assert!(!questions.is_tcp_of_network(&question, &server), "a socket of UDP");
        questions.go_on(&question);
        let (results, datagrams) = asking.join().expect("a thread");
        assert_eq!(results, [Some(libc::EACCES), None]);
        datagrams.expect("it went on");
        assert!(questions.wait().expect("an end").is_none(), "no thread has the filter any more");
    }
}
