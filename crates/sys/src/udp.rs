//! Datagrams together with the local address they were sent to, so that an answer leaves from the address that
//! was asked (`IP_PKTINFO` of ip(7), `IPV6_PKTINFO` of RFC 3542). A socket on the unspecified address would
//! answer from an address of its own choice, and the asker would drop it.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

pub mod answers;
pub mod batch;
pub mod errors;
mod pages;

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::sockopt as rustix_sockopt;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

use crate::sockopt::set_int;

/// Room for one control message of either kind, aligned as `cmsghdr` wants it.
const CONTROL_WORDS: usize = 8;

/// One datagram's size and addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Bytes received; those beyond the buffer are lost.
    pub len: usize,
    /// Where it came from, as the socket's family writes it: an answer goes there.
    pub from: SocketAddr,
    /// The local address it was sent to; IPv4-mapped on a dual-stack socket.
    pub to: IpAddr,
}

/// A non-blocking UDP socket on `address` that tells destination addresses; an IPv6 one takes IPv4 too.
///
/// # Errors
/// What the system call that failed says: address in use, no permission for a port below 1024 ...
pub fn bind(address: SocketAddr) -> io::Result<UdpSocket> {
    bind_telling(address, false)
}

/// As [`bind`], but an IPv6 one takes IPv6 only.
///
/// # Errors
/// As [`bind`].
pub fn bind_family(address: SocketAddr) -> io::Result<UdpSocket> {
    bind_telling(address, true)
}

fn bind_telling(address: SocketAddr, only_v6: bool) -> io::Result<UdpSocket> {
    let kind = Type::DGRAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
        // An address that is local by its route only (AnyIP) cannot be a source for IPv6 otherwise.
        socket.set_freebind_v6(true)?;
    }
    tell_destinations(&socket, address)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// A non-blocking UDP socket on `address` that others of this process may share (`SO_REUSEPORT`: the kernel keeps the
/// datagrams of one sender and port together); an IPv6 one takes IPv6 only.
///
/// # Errors
/// What the system call that failed says.
pub fn bind_shared(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = of_family(address)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// As [`bind_shared`], on an address that no other socket has: the first of those that share it.
///
/// # Errors
/// As [`bind_shared`]; `AddrInUse` also if this process has a socket there.
pub fn bind_first(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = of_family(address)?;
    socket.bind(&address.into())?;
    socket.set_reuse_port(true)?;
    Ok(socket.into())
}

/// A non-blocking UDP socket on `address` for datagrams to addresses of other hosts, which rules give to it. It tells the original
/// destination of each. `shares`: others of this process may share the address, as for [`bind_shared`].
///
/// # Errors
/// As [`bind_first`]; `PermissionDenied` without CAP_NET_ADMIN or CAP_NET_RAW.
pub fn bind_transparent(address: SocketAddr, shares: bool) -> io::Result<UdpSocket> {
    let socket = of_family(address)?;
    crate::sockopt::set_transparent(&socket)?;
    tell_original_destinations(&socket, address)?;
    socket.set_reuse_port(shares)?;
    socket.bind(&address.into())?;
    socket.set_reuse_port(true)?;
    Ok(socket.into())
}

/// Makes a socket of another process on `address` receive as one of [`bind_first`] does, or with `transparent` as one of
/// [`bind_transparent`].
///
/// # Errors
/// What the system call that failed says.
pub fn adopt(socket: &UdpSocket, address: SocketAddr, transparent: bool) -> io::Result<()> {
    let socket = socket2::SockRef::from(socket);
    socket.set_nonblocking(true)?;
    socket.set_cloexec(true)?;
    socket.set_reuse_port(true)?;
    if transparent {
        crate::sockopt::set_transparent(&*socket)?;
        tell_original_destinations(&*socket, address)?;
    }
    Ok(())
}

/// Makes a socket on `address` tell the original destination of each datagram, address and port.
fn tell_original_destinations(socket: impl AsFd, address: SocketAddr) -> io::Result<()> {
    let (level, name) = match address {
        SocketAddr::V4(_) => (libc::SOL_IP, libc::IP_RECVORIGDSTADDR),
        SocketAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_RECVORIGDSTADDR),
    };
    set_int(socket, level, name, 1)
}

/// Makes a socket on `address` tell the destination address of each datagram.
///
/// # Errors
/// What setsockopt(2) says.
pub fn tell_destinations(socket: impl AsFd, address: SocketAddr) -> io::Result<()> {
    let (level, name) = match address {
        SocketAddr::V4(_) => (libc::SOL_IP, libc::IP_PKTINFO),
        SocketAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_RECVPKTINFO),
    };
    set_int(socket, level, name, 1)
}

/// Lets a bound socket hear only this peer, and send to it.
///
/// # Errors
/// What connect(2) says: no route.
pub fn hear_only(socket: &UdpSocket, peer: SocketAddr) -> io::Result<()> {
    socket.connect(peer)
}

/// A non-blocking UDP socket for the family of `address`, bound to nothing.
///
/// # Errors
/// What socket(2) says.
pub fn unbound(address: SocketAddr) -> io::Result<Socket> {
    of_family(address)
}

fn of_family(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::DGRAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    Ok(socket)
}

/// Returns the MTU of the route to an address, as this host knows it: that of the interface, or a smaller one that the kernel has
/// learnt. No packet is sent.
///
/// # Errors
/// There is no route.
pub fn route_mtu(to: SocketAddr) -> io::Result<u32> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    let mtu = if to.is_ipv4() { rustix_sockopt::ip_mtu(&socket) } else { rustix_sockopt::ipv6_mtu(&socket) };
    Ok(mtu?)
}

/// Whether a datagram was not sent because it is longer than UDP, or its path, carries.
pub fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}

/// Receives one datagram on a socket of [`bind`].
///
/// # Errors
/// `WouldBlock` if there is none; `InvalidData` if the kernel did not tell where it was sent to.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Datagram> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut storage = SockAddrStorage::zeroed();
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut message = empty_message();
    message.msg_name = (&raw mut storage).cast();
    message.msg_namelen = storage.size_of();
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<[u64; CONTROL_WORDS]>() as _;
    // SAFETY: every pointer in `message` is to a live local or to `buffer`, with its true size.
    let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, 0) };
    let len = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel wrote an address of `msg_namelen` bytes into `storage`.
    let from = unsafe { SockAddr::new(storage, message.msg_namelen) };
    let missing = || io::Error::new(io::ErrorKind::InvalidData, "a datagram without addresses");
    let from = from.as_socket().ok_or_else(missing)?;
    let to = destination(&message).ok_or_else(missing)?;
    Ok(Datagram { len, from, to })
}

/// Sends `bytes` to `to` with the source address `from`, both as [`receive`] told them.
///
/// # Errors
/// `WouldBlock`; `AddrNotAvailable` or EINVAL if `from` is not a local address; the peer's ICMP refusal of an
/// earlier datagram.
pub fn send(socket: impl AsFd, bytes: &[u8], to: SocketAddr, from: IpAddr) -> io::Result<usize> {
    let mut control = [0_u64; CONTROL_WORDS];
    let name = SockAddr::from(to);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut message = empty_message();
    message.msg_name = name.as_ptr().cast_mut().cast();
    message.msg_namelen = name.len();
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = 0;
    match (from, to) {
        (IpAddr::V4(ip), SocketAddr::V4(_)) => put(&mut message, libc::SOL_IP, libc::IP_PKTINFO, info_v4(ip)),
        (ip, SocketAddr::V6(_)) => {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            put(&mut message, libc::SOL_IPV6, libc::IPV6_PKTINFO, info_v6(ip));
        }
        (IpAddr::V6(_), SocketAddr::V4(_)) => return Err(io::ErrorKind::InvalidInput.into()),
    }
    // SAFETY: every pointer in `message` is to a live local or to `bytes`, with its true size; sendmsg only
    // reads through them.
    let sent = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

fn empty_message() -> libc::msghdr {
    // SAFETY: all-zero is a valid `msghdr`: null pointers with zero lengths.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn info_v4(ip: Ipv4Addr) -> libc::in_pktinfo {
    let ip = libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) };
    libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: ip, ipi_addr: libc::in_addr { s_addr: 0 } }
}

fn info_v6(ip: Ipv6Addr) -> libc::in6_pktinfo {
    libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: ip.octets() }, ipi6_ifindex: 0 }
}

/// Appends one control message behind those of `msg_controllen`, and adds its length. The control buffer must have room.
fn put<T>(message: &mut libc::msghdr, level: libc::c_int, kind: libc::c_int, value: T) {
    let size = u32::try_from(size_of::<T>()).unwrap_or(u32::MAX);
    let before: usize = message.msg_controllen as _;
    // SAFETY: CMSG_SPACE and CMSG_LEN only compute. The control buffer has at least CONTROL_WORDS * 8 = 64 bytes, more
    // than CMSG_SPACE of either struct of addresses (28 and 40). Only a batch appends a second message, of 24 bytes, to a
    // buffer of 96 bytes. CMSG_SPACE keeps `before` aligned as `cmsghdr` wants it.
    unsafe {
        message.msg_controllen = (before + libc::CMSG_SPACE(size) as usize) as _;
        let header = message.msg_control.cast::<u8>().add(before).cast::<libc::cmsghdr>();
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(size) as _;
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
    }
}

/// The destination address out of the control messages that recvmsg filled in.
fn destination(message: &libc::msghdr) -> Option<IpAddr> {
    // SAFETY: `message` was filled in by recvmsg and its control buffer lives; CMSG_FIRSTHDR and CMSG_NXTHDR
    // stay within `msg_controllen`, and the kernel wrote a whole struct behind each header of these kinds.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::SOL_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    return Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()).into());
                }
                (libc::SOL_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    return Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
                }
                _ => header = libc::CMSG_NXTHDR(message, header),
            }
        }
    }
    None
}

/// The original destination, address and port, out of the control messages that recvmsg filled in.
fn original_destination(message: &libc::msghdr) -> Option<SocketAddr> {
    // SAFETY: `message` was filled in by recvmsg and its control buffer lives; CMSG_FIRSTHDR and CMSG_NXTHDR
    // stay within `msg_controllen`, and the kernel wrote a whole struct behind each header of these kinds.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let data = libc::CMSG_DATA(header);
            match ((*header).cmsg_level, (*header).cmsg_type) {
                (libc::SOL_IP, libc::IP_ORIGDSTADDR) => {
                    let name = data.cast::<libc::sockaddr_in>().read_unaligned();
                    let ip = Ipv4Addr::from(name.sin_addr.s_addr.to_ne_bytes());
                    return Some((ip, u16::from_be(name.sin_port)).into());
                }
                (libc::SOL_IPV6, libc::IPV6_ORIGDSTADDR) => {
                    let name = data.cast::<libc::sockaddr_in6>().read_unaligned();
                    return Some(
                        (Ipv6Addr::from(name.sin6_addr.s6_addr), u16::from_be(name.sin6_port)).into(),
                    );
                }
                _ => header = libc::CMSG_NXTHDR(message, header),
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn wait(socket: &UdpSocket) {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&limit)).unwrap(), 1);
    }

    fn ask(server: &UdpSocket, target: SocketAddr, asked: IpAddr) {
        let client = UdpSocket::bind(if target.is_ipv6() { "[::1]:0" } else { "127.0.0.1:0" }).unwrap();
        // A connected socket drops answers from any other address: what programs do.
        client.connect(target).unwrap();
        client.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        client.send(b"question").unwrap();
        wait(server);
        let mut buffer = [0; 64];
        let datagram = receive(server, &mut buffer).unwrap();
        assert_eq!(&buffer[..datagram.len], b"question");
        assert_eq!(datagram.to, asked);
        assert_eq!(send(server, b"answer", datagram.from, datagram.to).unwrap(), 6);
        let len = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], b"answer");
    }

    #[test]
    fn answers_leave_from_the_address_asked() {
        let server = bind("[::]:0".parse().unwrap()).unwrap();
        let port = server.local_addr().unwrap().port();
        ask(
            &server,
            SocketAddr::new("127.0.0.9".parse().unwrap(), port),
            "::ffff:127.0.0.9".parse().unwrap(),
        );
        ask(&server, SocketAddr::new("::1".parse().unwrap(), port), "::1".parse().unwrap());
        let server = bind("0.0.0.0:0".parse().unwrap()).unwrap();
        let port = server.local_addr().unwrap().port();
        ask(&server, SocketAddr::new("127.0.0.7".parse().unwrap(), port), "127.0.0.7".parse().unwrap());
    }

    #[test]
    fn both_families_may_have_one_port() {
        let four = bind_family("0.0.0.0:0".parse().unwrap()).unwrap();
        let port = four.local_addr().unwrap().port();
        let six = bind_family(SocketAddr::new("::".parse().unwrap(), port)).unwrap();
        ask(&six, SocketAddr::new("::1".parse().unwrap(), port), "::1".parse().unwrap());
        ask(&four, SocketAddr::new("127.0.0.8".parse().unwrap(), port), "127.0.0.8".parse().unwrap());
    }

    #[test]
    fn an_empty_socket_would_block() {
        let server = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_eq!(receive(&server, &mut [0; 16]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let to = server.local_addr().unwrap();
        let error = send(&server, b"x", to, "::1".parse().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
