//! Listening sockets.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;

use rustix::net::{AddressFamily, ipproto, sockopt};
use sidetrack_core::flow::Protocol as Transport;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::netns::NetNs;

/// How a listener is made. The default: 4096 waiting connections, `TCP_NODELAY`, nothing else.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// Most connections waiting to be accepted; the kernel caps it at `net.core.somaxconn`.
    pub backlog: u32,
    /// Several sockets (one per worker) share the port and the kernel spreads connections over them.
    pub reuse_port: bool,
    /// An IPv6 listener takes IPv4 connections too, as IPv4-mapped addresses.
    pub dual_stack: bool,
    /// Accept for foreign addresses, for tproxy; needs CAP_NET_ADMIN or CAP_NET_RAW.
    pub transparent: bool,
    /// Bind an address that no interface has yet.
    pub freebind: bool,
    /// Accept Multipath TCP (RFC 8684) where the kernel has it, silently plain TCP elsewhere.
    pub mptcp: bool,
    /// TCP Fast Open queue length; `None`: off.
    pub fastopen_queue_len: Option<u32>,
    /// `TCP_NODELAY`, which accepted sockets inherit: one system call less for each.
    pub nodelay: bool,
    /// `SO_MARK` for the listener's packets, inherited by what it accepts.
    pub mark: Option<u32>,
    /// Accepted sockets inherit `SO_LINGER` of zero: if the process is killed, their peers get a reset instead of FIN. Each
    /// orderly close has to take that back first ([`super::end_in_order_on_close`]).
    pub reset_if_killed: bool,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            backlog: 4096,
            reuse_port: false,
            dual_stack: false,
            transparent: false,
            freebind: false,
            mptcp: false,
            fastopen_queue_len: None,
            nodelay: true,
            mark: None,
            reset_if_killed: false,
        }
    }
}

/// A non-blocking TCP listener on `address` (port 0: the kernel chooses), closed on exec.
///
/// # Errors
/// What the system call that failed says: address in use, not ours, no permission for a port below 1024 ...
pub fn listen(address: SocketAddr, options: &ListenOptions) -> io::Result<TcpListener> {
    let prepared = |protocol| {
        let kind = Type::STREAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
        prepare(&socket, address, options).map(|()| socket)
    };
    let multipath = options.mptcp.then(|| prepared(Protocol::MPTCP));
    let socket = match multipath {
        Some(Ok(socket)) => socket,
        // Kernels without MPTCP, and those whose MPTCP sockets lack one of our options.
        Some(Err(error)) if super::lacks_mptcp(&error) => prepared(Protocol::TCP)?,
        Some(Err(error)) => return Err(error),
        None => prepared(Protocol::TCP)?,
    };
    socket.bind(&address.into())?;
    socket.listen(super::clamp(options.backlog))?;
    Ok(socket.into())
}

/// A listener as [`listen`] makes it, on an address that no other process may have. From now on more sockets of this process may
/// share its port, with [`ListenOptions::reuse_port`].
///
/// With `SO_REUSEPORT` from the start the bind would succeed beside a listener of another process of the same user, and the
/// kernel would split the connections between both.
///
/// # Errors
/// As [`listen`]; `AddrInUse` also if this process listens there.
pub fn listen_first(address: SocketAddr, options: &ListenOptions) -> io::Result<TcpListener> {
    let listener = listen(address, &ListenOptions { reuse_port: false, ..options.clone() })?;
    // After listen(2), not between bind(2) and it: two processes may both have bound the address until one of them listens.
    SockRef::from(&listener).set_reuse_port(true)?;
    Ok(listener)
}

/// Tries whether `address` is free for a TCP listener; nothing listens there afterwards.
///
/// # Errors
/// What bind(2) says: `AddrInUse` if another socket listens there.
pub fn try_address(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Makes a listener of another process serve as one of [`listen`] does. What is decided by bind(2) stays as it is: its address, whether
/// an IPv6 one takes IPv4 connections too, and its transport protocol.
///
/// # Errors
/// `InvalidInput`: it is to accept Multipath TCP, and cannot; what the system call that failed says.
pub fn adopt(listener: &TcpListener, options: &ListenOptions) -> io::Result<()> {
    let socket = SockRef::from(listener);
    let has_mptcp = sockopt::socket_protocol(listener)? == Some(ipproto::MPTCP);
    if options.mptcp && !has_mptcp {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket does not accept Multipath TCP"));
    }
    socket.set_nonblocking(true)?;
    socket.set_cloexec(true)?;
    if options.reuse_port {
        socket.set_reuse_port(true)?;
    }
    prepare_accepting(&socket, options)?;
    // On a socket that listens already this changes the backlog alone.
    socket.listen(super::clamp(options.backlog))
}

fn prepare(socket: &Socket, address: SocketAddr, options: &ListenOptions) -> io::Result<()> {
    // A restarted listener must not wait for connections in TIME-WAIT.
    socket.set_reuse_address(true)?;
    if options.reuse_port {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(!options.dual_stack)?;
    }
    if options.freebind {
        if address.is_ipv6() { socket.set_freebind_v6(true)? } else { socket.set_freebind_v4(true)? }
    }
    prepare_accepting(socket, options)
}

/// Sets what may be set on a listener at any time.
fn prepare_accepting(socket: &Socket, options: &ListenOptions) -> io::Result<()> {
    if options.transparent {
        super::set_transparent(socket)?;
    }
    if options.nodelay {
        super::set_tcp_nodelay(socket, true)?;
    }
    if options.reset_if_killed {
        super::reset_on_close(socket)?;
    }
    if let Some(mark) = options.mark {
        super::set_mark(socket, mark)?;
    }
    if let Some(queue_len) = options.fastopen_queue_len {
        super::set_tcp_fastopen(socket, queue_len)?;
    }
    Ok(())
}

/// What a descriptor shows of itself as a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenListener {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its transport protocol.
    pub protocol: Transport,
    /// Whether it takes connections for addresses of other hosts (IP_TRANSPARENT).
    pub transparent: bool,
}

fn not(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Looks whether a descriptor of another process is a TCP listener, or a UDP socket without a peer, of our own network namespace.
/// Needs CAP_NET_ADMIN there.
///
/// # Errors
/// `InvalidInput` with what it is instead; what getsockopt(2) says.
pub fn inspect_listener(fd: impl AsFd) -> io::Result<SeenListener> {
    let seen = see_listener(fd.as_fd())?;
    // A port of another namespace says nothing about who has that port here.
    if !NetNs::of_socket(fd.as_fd())?.is(&NetNs::current()?)? {
        return Err(not("a socket of another network namespace"));
    }
    Ok(seen)
}

/// Looks whether a descriptor is a TCP listener, or a UDP socket without a peer, of any network namespace.
///
/// # Errors
/// As [`inspect_listener`].
pub fn see_listener(fd: impl AsFd) -> io::Result<SeenListener> {
    let fd = fd.as_fd();
    if !matches!(sockopt::socket_domain(fd)?, AddressFamily::INET | AddressFamily::INET6) {
        return Err(not("a socket of another family than IPv4 and IPv6"));
    }
    let protocol = sockopt::socket_protocol(fd)?;
    let protocol = match protocol {
        Some(ipproto::TCP | ipproto::MPTCP) => Transport::Tcp,
        Some(ipproto::UDP) => Transport::Udp,
        _ => return Err(not("a socket of another protocol than TCP and UDP")),
    };
    let listens = match protocol {
        Transport::Tcp => sockopt::socket_acceptconn(fd)?,
        // It has a port, and no peer: what comes to the port comes to it.
        Transport::Udp => super::local_address(fd)?.port() != 0 && SockRef::from(&fd).peer_addr().is_err(),
    };
    if !listens {
        return Err(not("a socket that does not listen"));
    }
    let transparent = SockRef::from(&fd).ip_transparent_v4()?;
    Ok(SeenListener { address: super::local_address(fd)?, protocol, transparent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listeners_of_this_namespace_pass() {
        if !crate::caps::holds(crate::caps::CapabilitySet::NET_ADMIN) {
            eprintln!("skipped: needs root");
            return;
        }
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            for transparent in [false, true] {
                for mptcp in [false, true] {
                    let options = ListenOptions { transparent, mptcp, ..ListenOptions::default() };
                    let listener = listen(address, &options).unwrap();
                    let seen = inspect_listener(&listener).unwrap();
                    let (address, protocol) = (listener.local_addr().unwrap(), Transport::Tcp);
                    assert_eq!(seen, SeenListener { address, protocol, transparent });
                }
            }
            let bound = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
            bound.bind(&address.into()).unwrap();
            assert_eq!(inspect_listener(&bound).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        let (reader, _writer) = std::io::pipe().unwrap();
        inspect_listener(&reader).unwrap_err();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let seen = inspect_listener(&udp).unwrap();
        assert_eq!((seen.address, seen.protocol), (udp.local_addr().unwrap(), Transport::Udp));
        udp.connect(udp.local_addr().unwrap()).unwrap();
        assert_eq!(inspect_listener(&udp).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let unbound = crate::udp::unbound("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_eq!(inspect_listener(&unbound).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let unix = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert_eq!(inspect_listener(&unix).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// As a service manager makes it: it blocks, with its own backlog.
    #[test]
    fn a_listener_of_another_process_serves_like_our_own() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let options = ListenOptions { reuse_port: true, reset_if_killed: true, ..ListenOptions::default() };
        adopt(&listener, &options).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let _client = std::net::TcpStream::connect(address).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert!(accepted.nodelay().unwrap());
        assert_eq!(SockRef::from(&accepted).linger().unwrap(), Some(std::time::Duration::ZERO));
        let _second = listen(address, &options).expect("another socket of ours shares the port");
        let mptcp = ListenOptions { mptcp: true, ..options };
        assert_eq!(adopt(&listener, &mptcp).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
