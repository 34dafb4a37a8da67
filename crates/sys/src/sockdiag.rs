//! Who owns a local TCP socket (sock_diag(7), linux/inet_diag.h): one exact question, no scan of /proc/net/tcp.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::netlink::{Error, Message, Protocol, Requests, Socket};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Bytes of `struct inet_diag_msg`.
const ANSWER: usize = 72;

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
}

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

/// Reads `struct inet_diag_msg`. The kernel falls back to a listener of the local port: that is not the socket asked for.
fn answer(payload: &[u8], local: SocketAddr, remote: SocketAddr) -> Option<SocketOwner> {
    let payload: &[u8; ANSWER] = payload.first_chunk()?;
    let word = |at: usize| payload.get(at..at + 4)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let v4 = *payload.first()? == 2;
    let found_remote =
        SocketAddr::new(read_address(payload.get(24..40)?, v4)?, read_port(payload.get(6..8)?)?);
    let found_local = SocketAddr::new(read_address(payload.get(8..24)?, v4)?, read_port(payload.get(4..6)?)?);
    let asked = found_local == local && found_remote == remote;
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
    fn short_answers_are_no_answer() {
        let any = "127.0.0.1:1".parse().expect("address");
        for length in 0..ANSWER {
            assert_eq!(answer(&vec![2; length], any, any), None);
        }
    }
}
