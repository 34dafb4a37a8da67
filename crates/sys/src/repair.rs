//! Reads a connection out of the kernel's TCP, takes it away without a packet, and puts one back: `TCP_REPAIR` (linux/tcp.h).
//! All of it takes CAP_NET_ADMIN in the user namespace of the socket's network namespace.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

mod again;

pub use again::{Again, Between};

use crate::bpf::monotonic_ns;
use crate::sockopt;
use sidetrack_core::wire::{Agreed, Numbers};
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// `TCP_REPAIR_ON`, and `TCP_REPAIR_OFF_NO_WP`: off, without a window probe.
const ON: libc::c_int = 1;
const OFF: libc::c_int = -1;

/// `TCP_REPAIR_QUEUE`: the queue of received bytes, that of bytes to send.
const RECEIVED: libc::c_int = 1;
const TO_SEND: libc::c_int = 2;

/// `TCPI_OPT_*` of linux/tcp.h.
const STAMPS: u8 = 1;
const SACK: u8 = 2;
const ECN: u8 = 8;

/// `TCP_ESTABLISHED` (net/tcp_states.h).
const ESTABLISHED: u8 = 1;
/// States after the peer's FIN: `TCP_TIME_WAIT`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`, `TCP_CLOSING`.
const TIME_WAIT: u8 = 6;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;

fn option(fd: BorrowedFd<'_>, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value is a whole integer that lives through the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            name,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads an option of whole words; those that the kernel does not write stay 0.
fn words<const N: usize>(fd: BorrowedFd<'_>, name: libc::c_int) -> io::Result<[u32; N]> {
    let mut value = [0_u32; N];
    let mut length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which the array has; both live through the call.
    let result = unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::IPPROTO_TCP, name, value.as_mut_ptr().cast(), &raw mut length)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Reads the number of a queue of a socket under repair.
fn queue(fd: BorrowedFd<'_>, which: libc::c_int) -> io::Result<u32> {
    option(fd, libc::TCP_REPAIR_QUEUE, which)?;
    words::<1>(fd, libc::TCP_QUEUE_SEQ).map(|[number]| number)
}

/// Reads where a connection stands. If something is left unsent in it ([`unsent`]), what the kernel would send in the moment between
/// the first two questions is lost until it is sent again.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; EINVAL if it is not connected.
pub fn numbers(fd: impl AsFd) -> io::Result<Numbers> {
    let fd = fd.as_fd();
    option(fd, libc::TCP_REPAIR, ON)?;
    let read = under_repair(fd);
    option(fd, libc::TCP_REPAIR, OFF)?;
    read
}

/// Reads the sequence number that a connection expects next.
///
/// # Errors
/// As [`numbers`].
pub fn expects(fd: impl AsFd) -> io::Result<u32> {
    let fd = fd.as_fd();
    option(fd, libc::TCP_REPAIR, ON)?;
    let read = queue(fd, RECEIVED);
    option(fd, libc::TCP_REPAIR, OFF)?;
    read
}

/// Acknowledges at once what was received.
///
/// # Errors
/// What setsockopt says.
pub fn acknowledge(fd: impl AsFd) -> io::Result<()> {
    option(fd.as_fd(), libc::TCP_QUICKACK, 1)
}

fn under_repair(fd: BorrowedFd<'_>) -> io::Result<Numbers> {
    let written = queue(fd, TO_SEND)?;
    // At once: while that queue is selected, the kernel sends nothing and takes it for sent.
    option(fd, libc::TCP_REPAIR_QUEUE, RECEIVED)?;
    // Bytes may come in between two questions.
    let (mut unread, mut expects) = (unread(fd)?, queue(fd, RECEIVED)?);
    loop {
        let again = self::unread(fd)?;
        if again == unread {
            break;
        }
        (unread, expects) = (again, queue(fd, RECEIVED)?);
    }
    let [_, window, _, offers, since] = words::<5>(fd, libc::TCP_REPAIR_WINDOW)?;
    let told = since.wrapping_add(offers);
    let now = monotonic_ns() / 1_000_000;
    let clock = words::<1>(fd, libc::TCP_TIMESTAMP)?[0].wrapping_sub(now as u32);
    Ok(Numbers { written, unacknowledged: unacknowledged(fd)?, expects, unread, window, told, clock })
}

/// Reads what was agreed.
///
/// # Errors
/// What getsockopt says.
pub fn agreed(fd: impl AsFd) -> io::Result<Agreed> {
    let info = words::<64>(fd.as_fd(), libc::TCP_INFO)?;
    let [state, _, _, _] = info[0].to_ne_bytes();
    let [_, options, shifts, _] = info[1].to_ne_bytes();
    // The kernel leaves the room of time stamps out of both.
    let stamps = if options & STAMPS != 0 { 12 } else { 0 };
    Ok(Agreed {
        established: state == ESTABLISHED,
        stamps: options & STAMPS != 0,
        sack: options & SACK != 0,
        ecn: options & ECN != 0,
        peer_shift: shifts & 15,
        own_shift: shifts >> 4,
        send_mss_bytes: info[4] + stamps,
        told_mss_bytes: info[21] + stamps,
    })
}

fn count(fd: BorrowedFd<'_>, what: libc::Ioctl) -> io::Result<u32> {
    let mut count: libc::c_int = 0;
    // SAFETY: the kernel writes one integer, which lives through the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), what, &raw mut count) };
    if result == 0 { Ok(count.unsigned_abs()) } else { Err(io::Error::last_os_error()) }
}

/// Whether the peer's FIN has come. It is not among the bytes of [`unread`], and [`expects`] counts it.
///
/// # Errors
/// What getsockopt says.
pub fn has_fin(fd: impl AsFd) -> io::Result<bool> {
    let [info] = words::<1>(fd.as_fd(), libc::TCP_INFO)?;
    Ok(matches!(info.to_ne_bytes()[0], TIME_WAIT | CLOSE_WAIT | LAST_ACK | CLOSING))
}

/// Bytes that were received and not read yet.
///
/// # Errors
/// What ioctl says.
pub fn unread(fd: impl AsFd) -> io::Result<u32> {
    count(fd.as_fd(), libc::FIONREAD)
}

/// Bytes that were written and not acknowledged yet.
///
/// # Errors
/// What ioctl says.
pub fn unacknowledged(fd: impl AsFd) -> io::Result<u32> {
    count(fd.as_fd(), libc::TIOCOUTQ)
}

/// Bytes that were written and not sent yet.
///
/// # Errors
/// What ioctl says.
pub fn unsent(fd: impl AsFd) -> io::Result<u32> {
    /// `SIOCOUTQNSD` (linux/sockios.h).
    const NOT_SENT: libc::Ioctl = 0x894b;
    count(fd.as_fd(), NOT_SENT)
}

/// Closes a connection without a packet: its peer is not told. What it has not sent or read is gone.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN: then it is closed as ever.
pub fn forget(socket: impl Into<OwnedFd>) -> io::Result<()> {
    let socket = socket.into();
    option(socket.as_fd(), libc::TCP_REPAIR, ON)?;
    // A program that starts at this moment may have a copy of the descriptor: closing ours would not be enough.
    Ok(rustix::net::connect_unspec(&socket)?)
}

/// Bounds the window that is offered to the peer from now on, bytes; what it was offered before stays valid.
///
/// # Errors
/// What setsockopt says.
pub fn clamp_window(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    option(fd.as_fd(), libc::TCP_WINDOW_CLAMP, bytes.try_into().unwrap_or(libc::c_int::MAX))
}

/// Keeps a port from being chosen for new connections, until the result is dropped. Call it when no socket has it any more.
///
/// # Errors
/// EADDRINUSE if another connection has it already.
pub fn keep_port(local: SocketAddr) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(local), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&local.into())?;
    Ok(socket.into())
}

/// One end of a connection of which no socket is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The host that it talked to.
    pub remote: SocketAddr,
    /// The address that this host talked to, as it stands in its packets.
    pub local: SocketAddr,
    /// Sequence number that the host expects next, or a later one in its window.
    pub sent: u32,
    /// Sequence number up to which everything of the host was acknowledged.
    pub acknowledged: u32,
}

/// Resets a connection of which no socket is left: its host gets a RST at the number that it expects.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN; EADDRNOTAVAIL if another socket has these ends; EHOSTUNREACH without a route.
pub fn reset(gone: &Gone) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(gone.remote), Type::STREAM, Some(Protocol::TCP))?;
    let fd = socket.as_fd();
    option(fd, libc::TCP_REPAIR, ON)?;
    // The address may be one that tproxy caught.
    sockopt::set_transparent(fd)?;
    socket.bind(&gone.local.into())?;
    for (which, number) in [(TO_SEND, gone.sent), (RECEIVED, gone.acknowledged)] {
        option(fd, libc::TCP_REPAIR_QUEUE, which)?;
        option(fd, libc::TCP_QUEUE_SEQ, number.cast_signed())?;
    }
    // Under repair this sends nothing: it is connected at once.
    socket.connect(&gone.remote.into())?;
    option(fd, libc::TCP_REPAIR, OFF)?;
    sockopt::reset_on_close(fd)
}
