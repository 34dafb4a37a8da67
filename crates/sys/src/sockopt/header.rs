//! Fields of the IP header of a connection's packets, and whether it is Multipath TCP.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::sockopt;

/// `TCP_IS_MPTCP` (linux/tcp.h, since Linux 6.1).
const TCP_IS_MPTCP: libc::c_int = 43;

/// Sets the TOS byte (IPv4) or traffic class (IPv6) of what the socket sends, and gives the one in force: the kernel
/// keeps the two ECN bits to itself.
///
/// # Errors
/// What setsockopt says.
pub fn set_traffic_class(fd: impl AsFd, class: u8) -> io::Result<u8> {
    match super::local_address(&fd)? {
        SocketAddr::V4(_) => {
            sockopt::set_ip_tos(&fd, class)?;
            Ok(sockopt::ip_tos(&fd)?)
        }
        SocketAddr::V6(_) => {
            sockopt::set_ipv6_tclass(&fd, class.into())?;
            Ok(u8::try_from(sockopt::ipv6_tclass(&fd)?).unwrap_or(class))
        }
    }
}

/// Sets the TTL (IPv4) or hop limit (IPv6) of what the socket sends, at least 1, and gives the one in force.
///
/// # Errors
/// What setsockopt says; `InvalidInput` for 0.
pub fn set_hop_limit(fd: impl AsFd, limit: u8) -> io::Result<u8> {
    if limit == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a packet with 0 hops left goes nowhere"));
    }
    match super::local_address(&fd)? {
        SocketAddr::V4(_) => {
            sockopt::set_ip_ttl(&fd, limit.into())?;
            Ok(u8::try_from(sockopt::ip_ttl(&fd)?).unwrap_or(limit))
        }
        SocketAddr::V6(_) => {
            sockopt::set_ipv6_unicast_hops(&fd, Some(limit))?;
            Ok(sockopt::ipv6_unicast_hops(&fd)?)
        }
    }
}

/// Whether a connection speaks Multipath TCP (RFC 8684): asked for, and the peer has it too. False where the kernel
/// cannot say.
pub fn speaks_mptcp(fd: impl AsFd) -> bool {
    let mut value: libc::c_int = 0;
    let mut len = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(4);
    // SAFETY: `value` has room for `len` bytes and both live across the call; the kernel writes at most `len`.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_TCP,
            TCP_IS_MPTCP,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    result == 0 && value == 1
}

/// Asks the kernel that no packet of this socket be cut on its way (DF in IPv4; in IPv6 only the sender could cut), or
/// allows it, and gives what is in force.
///
/// # Errors
/// What setsockopt says.
pub fn set_dont_fragment(fd: impl AsFd, avoid: bool) -> io::Result<bool> {
    let (level, name) = match super::local_address(&fd)? {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    };
    // The values of IPv6 are the same.
    let value = if avoid { libc::IP_PMTUDISC_DO } else { libc::IP_PMTUDISC_DONT };
    // SAFETY: `value` lives across the call and its length is given.
    let result = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(avoid) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockopt::{ListenOptions, listen, mptcp_socket};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn what_is_in_force_is_told() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert_eq!(set_traffic_class(&stream, 0x2b).unwrap(), 0x28, "without the bits of ECN");
            assert_eq!(set_hop_limit(&stream, 7).unwrap(), 7);
            assert_eq!(set_hop_limit(&stream, 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert!(set_dont_fragment(&stream, true).unwrap());
            assert!(!set_dont_fragment(&stream, false).unwrap());
        }
    }

    #[test]
    fn multipath_takes_two() {
        for mptcp in [true, false] {
            let options = ListenOptions { mptcp, ..Default::default() };
            let listener = listen("127.0.0.1:0".parse().unwrap(), &options).unwrap();
            let to = listener.local_addr().unwrap();
            let (socket, has_mptcp) = mptcp_socket(&to).unwrap();
            socket.set_nonblocking(false).unwrap();
            socket.connect(&to.into()).unwrap();
            assert_eq!(speaks_mptcp(&socket), mptcp && has_mptcp);
        }
        // Clients of either kind have what the listener was told.
        let options = ListenOptions { mptcp: true, reset_if_killed: true, ..Default::default() };
        let listener = listen("127.0.0.1:0".parse().unwrap(), &options).unwrap();
        listener.set_nonblocking(false).unwrap();
        let to = listener.local_addr().unwrap();
        let plain = TcpStream::connect(to).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let (socket, has_mptcp) = mptcp_socket(&to).unwrap();
        socket.set_nonblocking(false).unwrap();
        socket.connect(&to.into()).unwrap();
        let (multipath, _) = listener.accept().unwrap();
        assert_eq!((speaks_mptcp(&accepted), speaks_mptcp(&multipath)), (false, has_mptcp));
        for stream in [&accepted, &multipath] {
            assert!(stream.nodelay().unwrap());
            assert_eq!(socket2::SockRef::from(stream).linger().unwrap(), Some(std::time::Duration::ZERO));
        }
        drop((plain, socket));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!speaks_mptcp(TcpStream::connect(listener.local_addr().unwrap()).unwrap()));
    }
}
