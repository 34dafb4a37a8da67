//! ICMP messages that say a destination cannot be reached, as this host's own IP layer sees them: those that routers send
//! here, and those that the kernel sends to itself when a neighbour answers neither ARP nor neighbour solicitations.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::mem::size_of_val;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// "Destination unreachable" (RFC 792), and the same of ICMPv6 (RFC 4443).
const UNREACHABLE: u32 = 3;
const UNREACHABLE_V6: u32 = 1;

/// Level of options of raw(7) sockets, and the option of both families that says which types to drop.
const SOL_RAW: libc::c_int = 255;
const FILTER: libc::c_int = 1;

/// Room for one message: the kernel quotes at most 1,232 bytes.
const ROOM: usize = 2048;

/// Receives "destination unreachable" messages of both families.
#[derive(Debug)]
pub struct UnreachableSocket {
    v4: Socket,
    v6: Option<Socket>,
    room: Box<[u8; ROOM]>,
}

/// One message, from its type on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpMessage<'a> {
    /// Whether it is of ICMP for IPv4; otherwise of ICMPv6.
    pub is_v4: bool,
    /// Its bytes. The kernel has checked the checksum of an ICMPv6 message only.
    pub bytes: &'a [u8],
}

impl UnreachableSocket {
    /// Opens the sockets in this thread's network namespace. Needs CAP_NET_RAW.
    ///
    /// # Errors
    /// EPERM without the right.
    pub fn open() -> io::Result<Self> {
        let open = |domain, protocol| {
            Socket::new(domain, Type::RAW.nonblocking().cloexec(), Some(Protocol::from(protocol)))
        };
        let v4 = open(Domain::IPV4, libc::IPPROTO_ICMP)?;
        set_filter(&v4, SOL_RAW, &[!(1 << UNREACHABLE)])?;
        let v6 = open(Domain::IPV6, libc::IPPROTO_ICMPV6).ok();
        if let Some(v6) = &v6 {
            let mut drop = [u32::MAX; 8];
            drop[0] = !(1 << UNREACHABLE_V6);
            set_filter(v6, libc::IPPROTO_ICMPV6, &drop)?;
        }
        Ok(Self { v4, v6, room: Box::new([0; ROOM]) })
    }

    /// The next message; none if none waits.
    pub fn receive(&mut self) -> Option<IcmpMessage<'_>> {
        if let Some(length) = receive(&self.v4, &mut self.room[..]) {
            // An IPv4 socket gives the IP header as well.
            let header = usize::from(self.room[0] & 0xf) * 4;
            return Some(IcmpMessage {
                is_v4: true,
                bytes: self.room.get(header..length).unwrap_or_default(),
            });
        }
        let length = receive(self.v6.as_ref()?, &mut self.room[..])?;
        Some(IcmpMessage { is_v4: false, bytes: self.room.get(..length).unwrap_or_default() })
    }

    /// Readable when messages wait.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(&self.v4), self.v6.as_ref()].into_iter().flatten().map(AsFd::as_fd)
    }
}

/// Drops the types whose bits are set.
fn set_filter(socket: &Socket, level: libc::c_int, drop: &[u32]) -> io::Result<()> {
    let length = size_of_val(drop) as libc::socklen_t;
    // SAFETY: the option is `length` bytes long, all of which are borrowed until here; the kernel only reads them.
    let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, FILTER, drop.as_ptr().cast(), length) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How many bytes were received; none if nothing waits or the socket has an error.
fn receive(socket: &Socket, room: &mut [u8]) -> Option<usize> {
    // SAFETY: the kernel writes at most `room.len()` bytes, all of them borrowed until here.
    let length =
        unsafe { libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), room.len(), libc::MSG_DONTWAIT) };
    usize::try_from(length).ok()
}
