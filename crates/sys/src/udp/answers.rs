//! Datagrams that leave from addresses of other hosts: answers to clients whose datagrams were captured on their way.
//!
//! A UDP socket sends from its own port only, and cannot be bound to one that a program of this host uses. A raw socket
//! (raw(7)) for the protocol UDP has no port: it sends from any address (`IP_TRANSPARENT`, `IP_PKTINFO`), we write the
//! UDP header (RFC 768), and the kernel writes the IP header and the fragments.
//!
//! The sockets are bound to addresses to which no host ever sends, so that they receive nothing.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use super::{CONTROL_WORDS, empty_message, info_v4, info_v6, put};
use crate::sockopt::{set_mark, set_transparent};
use sidetrack_core::engine::checksum::Sum;
use sidetrack_core::icmp::Unreachable;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The IPv4 dummy address (RFC 7600 Sec. 4.8): no host has it.
const NOBODY_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
/// An address of the discard prefix (RFC 6666).
const NOBODY_V6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);

/// Bytes of a UDP header.
const HEADER: usize = 8;
/// Longest payload of a datagram, in bytes, over IPv4.
const LONGEST: usize = 65_507;

/// Sockets that send datagrams, and refusals of datagrams, from any address. Several threads may use them at once.
#[derive(Debug)]
pub struct AnswerSockets {
    v4: Pair,
    v6: Option<Pair>,
}

/// The sockets of one IP version.
#[derive(Debug)]
struct Pair {
    udp: OwnedFd,
    icmp: OwnedFd,
}

impl AnswerSockets {
    /// Opens the sockets in the network namespace of this thread. `mark`: that of all they send. Where IPv6 is switched off,
    /// they send IPv4 only.
    ///
    /// # Errors
    /// `PermissionDenied` without CAP_NET_RAW, or with a mark and without CAP_NET_ADMIN.
    pub fn open(mark: Option<u32>) -> io::Result<Self> {
        let v4 = Pair::open(Domain::IPV4, NOBODY_V4.into(), mark)?;
        Ok(Self { v4, v6: Pair::open(Domain::IPV6, NOBODY_V6.into(), mark).ok() })
    }

    /// Returns the sockets, to hand them to another process: two for each IP version, IPv4 first.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let pairs = [Some(&self.v4), self.v6.as_ref()];
        pairs.into_iter().flatten().flat_map(|pair| [pair.udp.as_fd(), pair.icmp.as_fd()]).collect()
    }

    /// Returns what [`Self::descriptors`] of another process gave. `None`: they are not two or four.
    pub fn of_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut rest = descriptors.into_iter();
        let v4 = Pair { udp: rest.next()?, icmp: rest.next()? };
        let v6 = rest.next().zip(rest.next()).map(|(udp, icmp)| Pair { udp, icmp });
        rest.next().is_none().then_some(Self { v4, v6 })
    }

    /// Sends a datagram of at most 65,507 bytes from one address and port to another.
    ///
    /// # Errors
    /// `InvalidInput` if one address is IPv4 and the other IPv6; `Unsupported` for IPv6 where it is switched off; EMSGSIZE
    /// for more bytes; `WouldBlock` if there is no room; no route.
    pub fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        if payload.len() > LONGEST {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        let header = header(from, to, payload);
        transmit(&self.pair(to)?.udp, from.ip(), to, [&header, payload])
    }

    /// Tells the sender of a datagram why it does not arrive, by an ICMP error from the address it has asked.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn tell(
        &self,
        why: Unreachable,
        asked: SocketAddr,
        client: SocketAddr,
        payload_bytes: usize,
    ) -> io::Result<()> {
        let quoted = quoted(client, asked, payload_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        let mut head = why.header(client.is_ipv4());
        if client.is_ipv4() {
            // The kernel computes that of ICMPv6, with its pseudo-header.
            let sum = Sum::ZERO.bytes(&head).bytes(&quoted).checksum();
            head[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        let to = SocketAddr::new(client.ip(), 0);
        transmit(&self.pair(client)?.icmp, asked.ip(), to, [&head, &quoted])
    }

    fn pair(&self, to: SocketAddr) -> io::Result<&Pair> {
        match (to, &self.v6) {
            (SocketAddr::V4(_), _) => Ok(&self.v4),
            (SocketAddr::V6(_), Some(pair)) => Ok(pair),
            (SocketAddr::V6(_), None) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Pair {
    fn open(domain: Domain, nobody: IpAddr, mark: Option<u32>) -> io::Result<Self> {
        let icmp = if nobody.is_ipv4() { libc::IPPROTO_ICMP } else { libc::IPPROTO_ICMPV6 };
        let open = |protocol| {
            let kind = Type::RAW.nonblocking().cloexec();
            let socket = Socket::new(domain, kind, Some(Protocol::from(protocol)))?;
            set_transparent(&socket)?;
            if let Some(mark) = mark {
                set_mark(&socket, mark)?;
            }
            socket.bind(&SocketAddr::new(nobody, 0).into())?;
            Ok::<_, io::Error>(socket.into())
        };
        Ok(Self { udp: open(libc::IPPROTO_UDP)?, icmp: open(icmp)? })
    }
}

/// The UDP header of a datagram.
fn header(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> [u8; HEADER] {
    let length = (HEADER + payload.len()) as u16;
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&from.port().to_be_bytes());
    header[2..4].copy_from_slice(&to.port().to_be_bytes());
    header[4..6].copy_from_slice(&length.to_be_bytes());
    let pseudo = address(address(Sum::ZERO, from.ip()), to.ip()).u16(libc::IPPROTO_UDP as u16).u16(length);
    let sum = match pseudo.bytes(&header).bytes(payload).checksum() {
        // Zero says that there is no checksum (RFC 768).
        0 => u16::MAX,
        sum => sum,
    };
    header[6..].copy_from_slice(&sum.to_be_bytes());
    header
}

fn address(sum: Sum, ip: IpAddr) -> Sum {
    match ip {
        IpAddr::V4(ip) => sum.bytes(&ip.octets()),
        IpAddr::V6(ip) => sum.bytes(&ip.octets()),
    }
}

/// The IP and UDP headers of a datagram, as an ICMP message quotes them. `None`: the addresses are of two IP versions.
fn quoted(from: SocketAddr, to: SocketAddr, payload_bytes: usize) -> Option<Vec<u8>> {
    const TTL: u8 = 64;
    let length = u16::try_from(HEADER + payload_bytes).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(48);
    match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            bytes.extend_from_slice(&[0x45, 0]);
            bytes.extend_from_slice(&length.saturating_add(20).to_be_bytes());
            bytes.extend_from_slice(&[0, 0, 0, 0, TTL, libc::IPPROTO_UDP as u8, 0, 0]);
            bytes.extend_from_slice(&source.octets());
            bytes.extend_from_slice(&destination.octets());
            let sum = Sum::ZERO.bytes(&bytes).checksum();
            bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            bytes.extend_from_slice(&[0x60, 0, 0, 0]);
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&[libc::IPPROTO_UDP as u8, TTL]);
            bytes.extend_from_slice(&source.octets());
            bytes.extend_from_slice(&destination.octets());
        }
        _ => return None,
    }
    bytes.extend_from_slice(&from.port().to_be_bytes());
    bytes.extend_from_slice(&to.port().to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&[0, 0]);
    Some(bytes)
}

/// Sends one message in two parts, from this address.
fn transmit(socket: impl AsFd, from: IpAddr, to: SocketAddr, parts: [&[u8]; 2]) -> io::Result<()> {
    // raw(7): the port means nothing, and for IPv6 it has to be 0.
    let mut to = to;
    to.set_port(0);
    let name = SockAddr::from(to);
    let mut control = [0_u64; CONTROL_WORDS];
    let mut parts =
        parts.map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
    let mut message = empty_message();
    message.msg_name = name.as_ptr().cast_mut().cast();
    message.msg_namelen = name.len();
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = 0;
    match (from, to) {
        (IpAddr::V4(ip), SocketAddr::V4(_)) => put(&mut message, libc::SOL_IP, libc::IP_PKTINFO, info_v4(ip)),
        (IpAddr::V6(ip), SocketAddr::V6(_)) => {
            put(&mut message, libc::SOL_IPV6, libc::IPV6_PKTINFO, info_v6(ip));
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    let (fd, flags) = (socket.as_fd().as_raw_fd(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
    // SAFETY: every pointer in `message` is to a live local or to one of the two parts, with its true size; sendmsg only
    // reads through them.
    match unsafe { libc::sendmsg(fd, &raw const message, flags) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::time::Duration;

    /// A client of this host that hears only the address it has asked.
    fn client(asked: SocketAddr) -> UdpSocket {
        let any = if asked.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
        let socket = UdpSocket::bind(any).unwrap();
        socket.connect(asked).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket
    }

    fn sockets() -> Option<AnswerSockets> {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        Some(AnswerSockets::open(None).unwrap())
    }

    #[test]
    fn datagrams_of_every_length_come_from_any_address_and_port() {
        let Some(sockets) = sockets() else { return };
        // A program of this host has the port.
        let taken = ["127.0.0.9:0", "[::1]:0"].map(|address| UdpSocket::bind(address).unwrap());
        for asked in taken.each_ref().map(|socket| socket.local_addr().unwrap()) {
            let client = client(asked);
            for length in [0, 1, 2, 1472, 9001, LONGEST] {
                let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
                sockets.send(asked, client.local_addr().unwrap(), &payload).unwrap();
                let mut buffer = vec![0; 65_536];
                let got = client.recv(&mut buffer).unwrap();
                assert!(buffer[..got] == payload, "{length} bytes of {asked}");
            }
            let long = sockets.send(asked, client.local_addr().unwrap(), &[0; LONGEST + 1]).unwrap_err();
            assert!(super::super::is_too_long(&long), "{long}");
        }
    }

    #[test]
    fn a_refusal_reaches_the_socket_that_has_asked() {
        let Some(sockets) = sockets() else { return };
        // Bound, so that the kernel itself refuses nothing.
        let taken = ["127.0.0.1:0", "[::1]:0"].map(|address| UdpSocket::bind(address).unwrap());
        for asked in taken.each_ref().map(|socket| socket.local_addr().unwrap()) {
            let client = client(asked);
            let whys = [
                (Unreachable::Port, libc::ECONNREFUSED),
                (Unreachable::Prohibited, if asked.is_ipv4() { libc::EHOSTUNREACH } else { libc::EACCES }),
                (Unreachable::TooBig { mtu_bytes: 1400 }, libc::EMSGSIZE),
            ];
            for (why, code) in whys {
                client.send(b"question").unwrap();
                sockets.tell(why, asked, client.local_addr().unwrap(), 8).unwrap();
                let error = client.recv(&mut [0; 10]).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(code), "{why:?} {asked}");
            }
        }
    }

    #[test]
    fn sockets_are_handed_over_and_hear_nothing() {
        let Some(sockets) = sockets() else { return };
        let copies: Vec<_> =
            sockets.descriptors().iter().map(|socket| socket.try_clone_to_owned().unwrap()).collect();
        drop(sockets);
        let asked = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = asked.local_addr().unwrap();
        let client = client(address);
        client.send(b"question").unwrap();
        let mut buffer = [0; 10];
        assert_eq!(asked.recv(&mut buffer).unwrap(), 8);
        for socket in &copies {
            let heard = rustix::net::recv(socket, &mut buffer, rustix::net::RecvFlags::DONTWAIT);
            assert_eq!(heard.map(|(bytes, _)| bytes), Err(rustix::io::Errno::AGAIN));
        }
        let sockets = AnswerSockets::of_descriptors(copies).unwrap();
        sockets.send(address, client.local_addr().unwrap(), b"answer").unwrap();
        assert_eq!(client.recv(&mut buffer).unwrap(), 6);
        assert!(AnswerSockets::of_descriptors(Vec::new()).is_none());
    }

    #[test]
    fn checksums_are_those_of_rfc_768() {
        let (from, to) = ("192.0.2.1:53".parse().unwrap(), "192.0.2.2:40000".parse().unwrap());
        // 0xc000 + 0x0201 + 0xc000 + 0x0202 + 17 + 10 + 53 + 40000 + 10 + 0x6f6b ("ok"), folded and inverted.
        assert_eq!(header(from, to, b"ok"), [0, 53, 0x9c, 0x40, 0, 10, 0x6f, 0xf5]);
        let (from, to) = ("[2001:db8::1]:53".parse().unwrap(), "[2001:db8::2]:40000".parse().unwrap());
        let header = header(from, to, b"");
        let whole = address(address(Sum::ZERO, from.ip()), to.ip()).u16(17).u16(8).bytes(&header);
        assert_eq!(whole.checksum(), 0, "a receiver's sum");
        assert_eq!(quoted(from, "192.0.2.2:1".parse().unwrap(), 0), None);
    }
}
