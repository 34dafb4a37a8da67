//! Who owns a local TCP socket, and what TCP knows about the connections of a port (sock_diag(7), linux/inet_diag.h): no
//! scan of /proc/net/tcp.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::netlink::{Error, Message, Protocol, Requests, Socket, attributes, flag};
use crate::sockopt::TcpInfo;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Bytes of `struct inet_diag_msg`.
const ANSWER: usize = 72;

/// `INET_DIAG_INFO`: the attribute with `struct tcp_info`, and the bit that asks for it.
const INFO: u16 = 2;
const WITH_INFO: u8 = 1 << (INFO - 1);
/// Sockets in these states have a connection: all but closed ones and listeners.
const CONNECTED: u32 = !(1 << 7 | 1 << 10);

/// A TCP connection of this network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The address of this end.
    pub local: SocketAddr,
    /// The address of the other end.
    pub remote: SocketAddr,
    /// What this end knows.
    pub info: TcpInfo,
}

/// The owner of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketOwner {
    /// Effective user id when it was made.
    pub uid: u32,
    /// Inode number, as `/proc/PID/fd/N -> socket:[INODE]` shows it; 0 once no process holds it.
    pub inode: u64,
}

/// A socket for such questions, for one network namespace. Needs no right.
#[derive(Debug)]
pub struct SockDiag {
    socket: Socket,
}

impl AsFd for SockDiag {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for SockDiag {
    fn from(socket: OwnedFd) -> Self {
        Self { socket: Socket::from(socket) }
    }
}

impl SockDiag {
    /// Opens it.
    ///
    /// # Errors
    /// If the kernel has no sock_diag.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(Protocol::SockDiag)? })
    }

    /// The owner of the TCP socket that is bound to `local` and connected to `remote`. For the client of a redirected
    /// connection: its own address, and the *original* destination. `None` if this host has no such socket.
    ///
    /// # Errors
    /// If netlink fails, or this kernel has no INET_DIAG (ENOENT is `None`, so then too).
    pub fn owner(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<Option<SocketOwner>, Error> {
        let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        let (local, remote) = (canonical(local), canonical(remote));
        let mut request = Requests::new();
        request.push("look up a local TCP socket", SOCK_DIAG_BY_FAMILY, 0, &question(local, remote), |_| {});
        let read = |message: &Message<'_>| answer(message.payload, local, remote);
        match self.socket.ask(&request, read) {
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(None),
            other => other,
        }
    }

    /// Returns the TCP connections of this network namespace of which one end has this port, with their state.
    ///
    /// # Errors
    /// If netlink fails.
    pub fn connections(&mut self, port: u16) -> Result<Vec<Connection>, Error> {
        let mut found = Vec::new();
        for family in [2, 10] {
            let mut bytes = vec![family, 6, WITH_INFO, 0];
            bytes.extend_from_slice(&CONNECTED.to_ne_bytes());
            bytes.resize(REQUEST, 0);
            let mut request = Requests::new();
            request.push("list TCP connections", SOCK_DIAG_BY_FAMILY, flag::DUMP, &bytes, |_| {});
            found.extend(self.socket.dump(&request, |message| connection(message.payload))?);
        }
        found.retain(|one| one.local.port() == port || one.remote.port() == port);
        Ok(found)
    }
}

/// Bytes of `struct inet_diag_req_v2`.
const REQUEST: usize = 56;

/// `struct inet_diag_req_v2`.
fn question(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv4() { 2 } else { 10 };
    let mut bytes = vec![family, 6, 0, 0];
    bytes.extend_from_slice(&u32::MAX.to_ne_bytes()); // any state
    bytes.extend_from_slice(&local.port().to_be_bytes());
    bytes.extend_from_slice(&remote.port().to_be_bytes());
    bytes.extend_from_slice(&address(local.ip()));
    bytes.extend_from_slice(&address(remote.ip()));
    bytes.extend_from_slice(&0u32.to_ne_bytes()); // any interface
    bytes.extend_from_slice(&[0xff; 8]); // no cookie
    bytes
}

fn address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Reads the two ends out of `struct inet_diag_msg`.
fn ends(payload: &[u8; ANSWER]) -> Option<(SocketAddr, SocketAddr)> {
    let v4 = *payload.first()? == 2;
    let remote = SocketAddr::new(read_address(payload.get(24..40)?, v4)?, read_port(payload.get(6..8)?)?);
    let local = SocketAddr::new(read_address(payload.get(8..24)?, v4)?, read_port(payload.get(4..6)?)?);
    Some((local, remote))
}

fn connection(payload: &[u8]) -> Option<Connection> {
    let (local, remote) = ends(payload.first_chunk()?)?;
    let info = attributes(payload.get(ANSWER..)?).first(INFO)?;
    Some(Connection { local, remote, info: TcpInfo::of_bytes(info.payload) })
}

/// Reads `struct inet_diag_msg`. The kernel falls back to a listener of the local port: that is not the socket asked for.
fn answer(payload: &[u8], local: SocketAddr, remote: SocketAddr) -> Option<SocketOwner> {
    let payload: &[u8; ANSWER] = payload.first_chunk()?;
    let word = |at: usize| payload.get(at..at + 4)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let asked = ends(payload)? == (local, remote);
    asked.then_some(SocketOwner { uid: word(64)?, inode: word(68)?.into() })
}

fn read_port(bytes: &[u8]) -> Option<u16> {
    bytes.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

fn read_address(bytes: &[u8], v4: bool) -> Option<IpAddr> {
    if v4 {
        return bytes.first_chunk::<4>().map(|bytes| Ipv4Addr::from(*bytes).into());
    }
    bytes.first_chunk::<16>().map(|bytes| IpAddr::from(Ipv6Addr::from(*bytes)).to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn inode(stream: &TcpStream) -> u64 {
        let link =
            std::fs::read_link(format!("/proc/self/fd/{}", stream.as_raw_fd())).expect("own descriptor");
        let text = link.to_string_lossy().into_owned();
        text.trim_start_matches("socket:[").trim_end_matches(']').parse().expect("socket:[inode]")
    }

    #[test]
    fn the_owner_of_a_client_socket_is_found() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let server = listener.local_addr().expect("address");
            let client = TcpStream::connect(server).expect("connect");
            let mut diag = SockDiag::open().expect("sock_diag");
            let from = client.local_addr().expect("address");
            let owner = diag.owner(from, server).expect("answer").expect("found");
            assert_eq!(
                owner,
                SocketOwner { uid: rustix::process::geteuid().as_raw(), inode: inode(&client) }
            );
        }
    }

    #[test]
    fn a_dual_stack_socket_is_found_by_its_ipv4_address() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let port = listener.local_addr().expect("address").port();
        let Ok(client) = TcpStream::connect(format!("[::ffff:127.0.0.1]:{port}")) else { return };
        let from = client.local_addr().expect("address");
        let found = SockDiag::open().expect("sock_diag").owner(from, listener.local_addr().expect("address"));
        assert_eq!(found.expect("answer").expect("found").inode, inode(&client));
    }

    #[test]
    fn a_listener_on_the_port_is_not_the_client() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let local = listener.local_addr().expect("address");
        let nobody = "127.0.0.1:9".parse().expect("address");
        assert_eq!(SockDiag::open().expect("sock_diag").owner(local, nobody).expect("answer"), None);
    }

    #[test]
    fn both_ends_of_a_connection_are_listed_with_what_they_know() {
        use std::io::{Read as _, Write as _};
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let server = listener.local_addr().expect("address");
        let mut client = TcpStream::connect(server).expect("connect");
        let (mut accepted, from) = listener.accept().expect("accept");
        client.write_all(&[7; 1000]).expect("sent");
        accepted.read_exact(&mut [0; 1000]).expect("received");
        let found = SockDiag::open().expect("sock_diag").connections(server.port()).expect("a list");
        let end = |local| found.iter().find(|one| one.local == local).expect("listed");
        assert_eq!((found.len(), end(server).remote, end(from).remote), (2, from, server));
        assert_eq!(end(server).info.received_bytes, 1000);
        let own = crate::sockopt::tcp_info(&client).expect("TCP_INFO");
        assert_eq!(end(from).info.send_mss_bytes, own.send_mss_bytes);
    }

    #[test]
    fn short_answers_are_no_answer() {
        let any = "127.0.0.1:1".parse().expect("address");
        for length in 0..ANSWER {
            assert_eq!(answer(&vec![2; length], any, any), None);
            assert_eq!(connection(&vec![2; length]), None);
        }
    }
}
