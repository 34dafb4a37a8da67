//! ICMP errors about datagrams of unconnected sockets: the queue of errors (`IP_RECVERR` of ip(7)).

use super::empty_message;
use crate::sockopt::set_int;
use sidetrack_core::icmp::Unreachable;
use socket2::{SockAddr, SockAddrStorage};
use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};

/// Where an error came from, of ip(7): an ICMP message.
const ICMP: u8 = libc::SO_EE_ORIGIN_ICMP;
/// An ICMPv6 message.
const ICMP6: u8 = libc::SO_EE_ORIGIN_ICMP6;

/// An error about an earlier datagram.
#[derive(Debug)]
pub struct AboutDatagram {
    /// Where the datagram went.
    pub to: SocketAddr,
    /// What the error means for a connection: `ECONNREFUSED` is a closed port.
    pub error: io::Error,
    /// The host that reports it. `None`: this one.
    pub reporter: Option<IpAddr>,
    /// What the error says about the path. `None`: something else than ICMP and a path's MTU.
    pub said: Option<Unreachable>,
}

/// Makes a socket of the family of `address` keep errors for [`next`].
///
/// # Errors
/// What setsockopt(2) says.
pub fn report(socket: impl AsFd, address: SocketAddr) -> io::Result<()> {
    let (level, name) = match address {
        SocketAddr::V4(_) => (libc::SOL_IP, libc::IP_RECVERR),
        SocketAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_RECVERR),
    };
    set_int(socket, level, name, 1)
}

/// Room for the longest control message, `sock_extended_err` (16 bytes) with an IPv6 address (28), and for another of the
/// same size, in words.
const CONTROL_WORDS: usize = 16;

/// Takes the oldest error, without waiting. `None`: there is none, or it is not about a datagram.
pub fn next(socket: impl AsFd) -> Option<AboutDatagram> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut storage = SockAddrStorage::zeroed();
    let mut byte = [0_u8; 1];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    let mut message = empty_message();
    message.msg_name = (&raw mut storage).cast();
    message.msg_namelen = storage.size_of();
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<[u64; CONTROL_WORDS]>() as _;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: every pointer in `message` is to a live local, with its true size.
    let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    if received < 0 {
        return None;
    }
    // SAFETY: the kernel wrote an address of `msg_namelen` bytes into `storage`.
    let to = unsafe { SockAddr::new(storage, message.msg_namelen) }.as_socket()?;
    let (extended, reporter) = extended(&message)?;
    let code = i32::try_from(extended.ee_errno).ok()?;
    let said = match extended.ee_origin {
        ICMP => Unreachable::read(true, extended.ee_type, extended.ee_code, extended.ee_info),
        ICMP6 => Unreachable::read(false, extended.ee_type, extended.ee_code, extended.ee_info),
        _ if code == libc::EMSGSIZE => Some(Unreachable::TooBig { mtu_bytes: extended.ee_info }),
        _ => None,
    };
    // A message without an MTU says nothing that could be passed on (RFC 1191 Sec. 5).
    let said = said.filter(|said| !matches!(said, Unreachable::TooBig { mtu_bytes: 0 }));
    Some(AboutDatagram { to, error: io::Error::from_raw_os_error(code), reporter, said })
}

/// Finds the error in the control messages, and the host that reports it.
fn extended(message: &libc::msghdr) -> Option<(libc::sock_extended_err, Option<IpAddr>)> {
    // SAFETY: `message` was filled in by recvmsg and its control buffer lives; CMSG_FIRSTHDR and CMSG_NXTHDR stay within
    // `msg_controllen`. The kernel wrote the struct and an address of either family, or one of family 0, behind a header
    // of these kinds.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            if matches!(kind, (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)) {
                let data = libc::CMSG_DATA(header);
                let extended = data.cast::<libc::sock_extended_err>().read_unaligned();
                let offender = data.add(size_of::<libc::sock_extended_err>());
                let family = i32::from(offender.cast::<libc::sa_family_t>().read_unaligned());
                let reporter = match family {
                    libc::AF_INET => {
                        let address = offender.cast::<libc::sockaddr_in>().read_unaligned();
                        Some(Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes()).into())
                    }
                    libc::AF_INET6 if kind.0 == libc::SOL_IPV6 => {
                        let address = offender.cast::<libc::sockaddr_in6>().read_unaligned();
                        Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
                    }
                    _ => None,
                };
                return Some((extended, reporter));
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::batch::{Target, send_one};
    use super::super::unbound;
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::UdpSocket;

    #[test]
    fn a_closed_port_is_named_by_its_address() {
        for ip in ["127.0.0.1", "::1"] {
            let gone = UdpSocket::bind((ip, 0)).unwrap();
            let to = gone.local_addr().unwrap();
            drop(gone);
            let socket = unbound(to).unwrap();
            report(&socket, to).unwrap();
            let socket = UdpSocket::from(socket);
            assert!(next(&socket).is_none());
            send_one(&socket, b"anybody", Some(&Target { to, from: None })).unwrap();
            let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(poll(&mut [PollFd::new(&socket, PollFlags::ERR)], Some(&limit)).unwrap(), 1);
            let said = next(&socket).expect("an error");
            assert_eq!((said.to, said.error.kind()), (to, io::ErrorKind::ConnectionRefused));
            assert_eq!((said.reporter, said.said), (Some(to.ip()), Some(Unreachable::Port)));
        }
    }
}
