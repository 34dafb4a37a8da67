//! A socket for a connection of which no socket is left: it is put together under `TCP_REPAIR`, and goes on as if it had always
//! been there.
//!
//! ```text
//! put together (sends nothing) --Again::begin--> an ordinary socket; its first packet asks the peer where it stands
//! put together --dropped-----------------------> gone without a packet
//! ```

use super::{ON, RECEIVED, TO_SEND, option};
use crate::sockopt;
use sidetrack_core::wire::Begin;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// `TCP_REPAIR_OFF`: off, and a window probe is sent.
const OFF_AND_PROBE: libc::c_int = 0;

/// Kinds of TCP options (linux/tcp.h).
const MSS: u32 = 2;
const WINDOW: u32 = 3;
const SACK_PERMITTED: u32 = 4;
const STAMPS: u32 = 8;

/// The ends of a connection, as its socket knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Between {
    /// The host that it talks to.
    pub remote: SocketAddr,
    /// The address that this host talks to, behind redirections of this host.
    pub local: SocketAddr,
    /// The mark of its packets.
    pub mark: Option<u32>,
    /// Whether the local address may be one of another host: one that tproxy caught, or that of the client.
    pub is_foreign: bool,
}

/// A socket that is put together, and sends nothing yet.
#[derive(Debug)]
pub struct Again(Socket);

/// Sets an option of whole words.
fn set<const N: usize>(fd: BorrowedFd<'_>, name: libc::c_int, value: [u32; N]) -> io::Result<()> {
    // SAFETY: the kernel reads at most the size of the value, which lives through the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            name,
            value.as_ptr().cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Again {
    /// Puts it together.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN; EADDRNOTAVAIL if another socket has these ends, or if the local address is gone; EHOSTUNREACH without a route; what the kernel
    /// says about numbers that do not fit each other.
    pub fn new(between: &Between, begin: &Begin) -> io::Result<Self> {
        let Between { remote, local, mark, is_foreign } = *between;
        let socket = Socket::new(
            Domain::for_address(remote),
            Type::STREAM.cloexec().nonblocking(),
            Some(Protocol::TCP),
        )?;
        let fd = socket.as_fd();
        option(fd, libc::TCP_REPAIR, ON)?;
        // Dropped from here on, it is gone without a packet.
        if let Some(mark) = mark {
            sockopt::set_mark(fd, mark)?;
        }
        if is_foreign {
            sockopt::set_transparent(fd)?;
        }
        socket.bind(&local.into())?;
        for (which, number) in [(TO_SEND, begin.sends), (RECEIVED, begin.expects)] {
            option(fd, libc::TCP_REPAIR_QUEUE, which)?;
            set(fd, libc::TCP_QUEUE_SEQ, [number])?;
        }
        // Under repair this sends nothing: it is connected at once.
        socket.connect(&remote.into())?;
        agree(fd, begin)?;
        // The window that it offers reaches as far as the peer was told; the next packet of the peer sets the one that it may use.
        let (window, told) = (begin.window, begin.told);
        set(
            fd,
            libc::TCP_REPAIR_WINDOW,
            [begin.expects.wrapping_sub(1), window, window, told, begin.expects],
        )?;
        Ok(Self(socket))
    }

    /// Lets it go on. Its first packet asks the peer to say where it stands.
    ///
    /// # Errors
    /// What setsockopt says.
    pub fn begin(self) -> io::Result<TcpStream> {
        let fd = self.0.as_fd();
        option(fd, libc::TCP_REPAIR, OFF_AND_PROBE)?;
        // The end of repair takes these away. Without them a listener could not be bound to this port again.
        self.0.set_reuse_address(true)?;
        self.0.set_reuse_port(true)?;
        sockopt::set_tcp_nodelay(fd, true)?;
        Ok(self.0.into())
    }
}

/// Sets what the handshake had agreed on.
fn agree(fd: BorrowedFd<'_>, begin: &Begin) -> io::Result<()> {
    let scales = u32::from(begin.own_shift) << 16 | u32::from(begin.peer_shift);
    let mut options = vec![[MSS, u32::from(begin.mss)], [WINDOW, scales]];
    if begin.sack {
        options.push([SACK_PERMITTED, 0]);
    }
    if begin.stamp.is_some() {
        options.push([STAMPS, 0]);
    }
    for one in options {
        set(fd, libc::TCP_REPAIR_OPTIONS, one)?;
    }
    // The lowest bit would ask for microseconds.
    begin.stamp.map_or(Ok(()), |stamp| set(fd, libc::TCP_TIMESTAMP, [stamp.wrapping_add(1) & !1]))
}
