//! Sockets of a command's network, made without entering it: to reach its servers.
//!
//! Entering the network of an ordinary user's command would take a process of its own. But a socket belongs to the network of the
//! listener that accepted it. So a listener and one other socket there give any number of sockets: the other one connects
//! to the listener, accept(2) returns a socket of that network, and connect(2) with `AF_UNSPEC` makes both unconnected again.

use crate::sockopt::{self, ListenOptions};
use crate::sync::lock;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

/// How long one step at loopback may take. It takes longer only if the command keeps our listener busy.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a server of the command may take to accept.
const CONNECT: Duration = Duration::from_secs(10);

/// Most connections of others, of the command itself, that are dropped to find ours.
const STRANGERS_MAX: usize = 64;

/// Makes sockets of one network.
#[derive(Debug)]
pub struct InsideSockets {
    listener: TcpListener,
    other: Mutex<Socket>,
    /// The port of the listener.
    port: u16,
}

impl InsideSockets {
    /// Opens it in the network of the calling thread. Its sockets have this mark, which needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// What socket(2), bind(2) or setsockopt(2) says.
    pub fn open(mark: u32) -> io::Result<Self> {
        let options =
            ListenOptions { backlog: 16, dual_stack: true, mark: Some(mark), ..ListenOptions::default() };
        let listener = sockopt::listen((Ipv6Addr::UNSPECIFIED, 0).into(), &options)?;
        let other = Socket::new(Domain::IPV6, Type::STREAM.cloexec(), Some(Protocol::TCP))?;
        sockopt::set_mark(&other, mark)?;
        Self::of(listener, other)
    }

    fn of(listener: TcpListener, other: Socket) -> io::Result<Self> {
        listener.set_nonblocking(false)?;
        SockRef::from(&listener).set_read_timeout(Some(PATIENCE))?;
        other.set_write_timeout(Some(PATIENCE))?;
        let port = listener.local_addr()?.port();
        Ok(Self { listener, other: Mutex::new(other), port })
    }

    /// Returns its descriptors, for [`Self::from_descriptors`] in another process.
    pub fn descriptors(&mut self) -> Vec<BorrowedFd<'_>> {
        let other: &Socket = self.other.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        vec![self.listener.as_fd(), other.as_fd()]
    }

    /// Takes over what [`Self::descriptors`] gave. `None` if descriptors are missing, or are not these.
    pub fn from_descriptors(fds: Vec<OwnedFd>) -> Option<Self> {
        let [listener, other] = <[OwnedFd; 2]>::try_from(fds).ok()?;
        Self::of(listener.into(), other.into()).ok()
    }

    /// Connects to a server of that network. Blocks for 10 s at most.
    ///
    /// # Errors
    /// What connect(2) says: `ConnectionRefused` if no socket listens there.
    pub fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.socket()?;
        socket.set_write_timeout(Some(CONNECT))?;
        socket.connect(&mapped(to).into())?;
        socket.set_write_timeout(None)?;
        Ok(socket.into())
    }

    /// Makes one more socket.
    fn socket(&self) -> io::Result<Socket> {
        let other = lock(&self.other);
        // By IPv6 where that is on: a socket that has spoken IPv4 cannot speak IPv6 later.
        let at = |ip: IpAddr| mapped((ip, self.port).into()).into();
        let connected = other.connect(&at(Ipv6Addr::LOCALHOST.into()));
        connected.or_else(|_| other.connect(&at(Ipv4Addr::LOCALHOST.into())))?;
        let accepted = self.accepted(&other);
        let again = rustix::net::connect_unspec(&*other);
        let socket = accepted?;
        again?;
        rustix::net::connect_unspec(&socket)?;
        Ok(socket)
    }

    /// Accepts the connection of `other`. The command may connect to the listener, too.
    fn accepted(&self, other: &Socket) -> io::Result<Socket> {
        let ours = other.local_addr()?.as_socket();
        for _ in 0..STRANGERS_MAX {
            let (stream, from) = self.listener.accept()?;
            if ours.is_some_and(|ours| ours == from) {
                return Ok(stream.into());
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// An IPv4 address as the IPv6 sockets write it.
fn mapped(to: SocketAddr) -> SocketAddr {
    match to.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), to.port()).into(),
        IpAddr::V6(_) => to,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn sockets_are_of_the_network_where_it_was_opened() {
        if !crate::caps::is_network_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let inside = std::thread::spawn(|| {
            crate::netns::unshare_net().unwrap();
            crate::route::link_up("lo").unwrap();
            let servers = ["127.0.0.1:7001", "[::1]:7002"].map(|at| TcpListener::bind(at).unwrap());
            (servers, InsideSockets::open(1).unwrap())
        });
        let (servers, mut inside) = inside.join().unwrap();
        let copies: Vec<_> = inside.descriptors().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let inside = InsideSockets::from_descriptors(copies).unwrap();
        let mut clients = Vec::new();
        for number in 0..6_u8 {
            let server = &servers[usize::from(number % 2)];
            let mut client = inside.connect(server.local_addr().unwrap()).unwrap();
            let (mut accepted, _) = server.accept().unwrap();
            client.write_all(&[number]).unwrap();
            let mut got = [0];
            accepted.read_exact(&mut got).unwrap();
            assert_eq!(got, [number]);
            clients.push((client, accepted));
        }
        let closed = inside.connect("127.0.0.1:7003".parse().unwrap()).unwrap_err();
        assert_eq!(closed.kind(), io::ErrorKind::ConnectionRefused);
    }
}
