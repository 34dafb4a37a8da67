//! Socket options: what the kernel knows about a connection, and how we want ours to behave.
//!
//! Everything takes `impl AsFd`, so `std`, `socket2` and `tokio` sockets fit alike.
//! Numbers: `linux/in.h`, `linux/in6.h`, `linux/tcp.h`, `linux/netfilter_ipv4.h`.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

mod header;
mod listen;
mod tcp_info;

pub use header::{set_dont_fragment, set_hop_limit, set_traffic_class, speaks_mptcp};
pub use listen::{
    ListenOptions, SeenListener, adopt, inspect_listener, listen, listen_first, see_listener, try_address,
};
pub use tcp_info::{TcpInfo, tcp_info};

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// The same address with an IPv4-mapped IPv6 host (`::ffff:a.b.c.d`) written as the IPv4 host it is.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(IpAddr::V4(ip), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// The address a redirected connection was for before netfilter changed it (`SO_ORIGINAL_DST`), canonical.
///
/// A connection that was not redirected gives its own local address, without error: equal to the listener's
/// address means that a client dialled the listener itself.
///
/// So does one that conntrack does not know, or if conntrack is not in use: nothing changed its addresses.
///
/// # Errors
/// What getsockopt or getsockname says.
pub fn original_dst(fd: impl AsFd) -> io::Result<SocketAddr> {
    let fd = fd.as_fd();
    let local = local_address(fd)?;
    let original = match local {
        // On a dual-stack socket an IPv4 connection is answered at level 0 only; level 41 says ENOENT.
        SocketAddr::V4(_) => sockopt::ip_original_dst(fd).map(SocketAddr::V4),
        SocketAddr::V6(_) => sockopt::ipv6_original_dst(fd).map(SocketAddr::V6),
    };
    match original {
        Ok(original) => Ok(canonical(original)),
        Err(Errno::NOENT | Errno::NOPROTOOPT) => Ok(local),
        Err(error) => Err(error.into()),
    }
}

/// The local address of an internet socket, canonical: for a transparent (tproxy) listener's connection this
/// is the original destination.
///
/// # Errors
/// `Unsupported` for a socket that is not an internet one; else what getsockname says.
pub fn local_address(fd: impl AsFd) -> io::Result<SocketAddr> {
    internet(rustix::net::getsockname(fd)?)
}

/// The addresses of a client's connection.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// The peer of our socket: the client, or a proxy that speaks for it.
    pub peer: SocketAddr,
    /// Our end.
    pub ours: SocketAddr,
    /// What the client has dialled: our end, or the address of a captured connection. `None`: the connection has no socket of its own.
    pub asked: Option<SocketAddr>,
}

impl Ends {
    /// Those of this socket. What it does not tell is taken from the arguments.
    pub fn of(socket: Option<impl AsFd>, peer: SocketAddr, listener: SocketAddr) -> Self {
        let Some(socket) = socket.as_ref() else { return Self { peer, ours: listener, asked: None } };
        Self {
            peer: peer_address(socket).unwrap_or(peer),
            ours: local_address(socket).unwrap_or(listener),
            asked: original_dst(socket).ok(),
        }
    }
}

/// Whether an address is one of this host, asked of the routing tables. No packet is sent.
pub fn is_of_this_host(ip: IpAddr) -> bool {
    const DISCARD: u16 = 9;
    let ip = ip.to_canonical();
    let any = if ip.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    // The source of a packet to an address of our own is that address.
    let source = std::net::UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((ip, DISCARD))?;
        socket.local_addr()
    });
    ip.is_loopback() || source.is_ok_and(|source| source.ip() == ip)
}

/// The peer's address of a connected internet socket, canonical.
///
/// # Errors
/// `NotConnected`; `Unsupported` for a socket that is not an internet one.
pub fn peer_address(fd: impl AsFd) -> io::Result<SocketAddr> {
    internet(rustix::net::getpeername(fd)?.ok_or(io::ErrorKind::NotConnected)?)
}

fn internet(address: rustix::net::SocketAddrAny) -> io::Result<SocketAddr> {
    SocketAddr::try_from(address)
        .map(canonical)
        .map_err(|_| io::Error::new(io::ErrorKind::Unsupported, "not an internet socket"))
}

/// A TCP socket for a connection to `address`: non-blocking, closed on exec.
///
/// # Errors
/// What socket(2) says.
pub fn stream_socket(address: &SocketAddr) -> io::Result<Socket> {
    new_stream(Domain::for_address(*address), Protocol::TCP)
}

/// The same with Multipath TCP (RFC 8684) if the kernel has it, and whether it is one.
///
/// # Errors
/// What socket(2) says of plain TCP; a kernel without MPTCP is not an error.
pub fn mptcp_socket(address: &SocketAddr) -> io::Result<(Socket, bool)> {
    let domain = Domain::for_address(*address);
    match new_stream(domain, Protocol::MPTCP) {
        Ok(socket) => Ok((socket, true)),
        Err(error) if lacks_mptcp(&error) => Ok((new_stream(domain, Protocol::TCP)?, false)),
        Err(error) => Err(error),
    }
}

fn new_stream(domain: Domain, protocol: Protocol) -> io::Result<Socket> {
    Socket::new(domain, Type::STREAM.nonblocking().cloexec(), Some(protocol))
}

/// Kernels built without MPTCP say EPROTONOSUPPORT or EINVAL, those with `net.mptcp.enabled=0` ENOPROTOOPT, those whose MPTCP
/// lacks an option EOPNOTSUPP.
fn lacks_mptcp(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPROTONOSUPPORT | libc::EINVAL | libc::ENOPROTOOPT | libc::EOPNOTSUPP)
    )
}

/// Starts a connection on a non-blocking socket; true if it is made already (or deferred to the first write
/// by [`set_tcp_fastopen_connect`]), false if the socket will become writable when it is made or has failed.
///
/// # Errors
/// What connect(2) says at once: no route, no free port, and so on.
pub fn start_connect(socket: &Socket, address: SocketAddr) -> io::Result<bool> {
    match socket.connect(&address.into()) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(false),
        Err(error) => Err(error),
    }
}

/// How an asynchronous connect or the peer ended: takes the pending error of the socket (`SO_ERROR`).
///
/// # Errors
/// What getsockopt says; the pending error is the inner result.
pub fn take_error(fd: impl AsFd) -> io::Result<Option<io::Error>> {
    SockRef::from(&fd).take_error()
}

/// Lets a socket bind foreign addresses and accept for them (`IP_TRANSPARENT`, `IPV6_TRANSPARENT`).
///
/// # Errors
/// `PermissionDenied` without CAP_NET_ADMIN or CAP_NET_RAW.
pub fn set_transparent(fd: impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(&fd);
    match sockopt::socket_domain(&fd)? {
        AddressFamily::INET6 => socket.set_ip_transparent_v6(true),
        _ => socket.set_ip_transparent_v4(true),
    }
}

/// Lets bind(2) with port 0 leave the port to connect(2), which can then share it between destinations
/// (`IP_BIND_ADDRESS_NO_PORT`).
///
/// # Errors
/// What setsockopt says.
pub fn set_bind_address_no_port(fd: impl AsFd) -> io::Result<()> {
    set_int(fd, libc::SOL_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)
}

/// Marks every packet the socket sends (`SO_MARK`): how rules know our own connections.
///
/// # Errors
/// `PermissionDenied` without CAP_NET_ADMIN or CAP_NET_RAW.
pub fn set_mark(fd: impl AsFd, mark: u32) -> io::Result<()> {
    SockRef::from(&fd).set_mark(mark)
}

/// Lets a listener take data in the SYN (TCP Fast Open, RFC 7413), at most `queue_len` such connections not
/// accepted yet. Takes effect where sysctl `net.ipv4.tcp_fastopen` has bit 2.
///
/// # Errors
/// What setsockopt says.
pub fn set_tcp_fastopen(fd: impl AsFd, queue_len: u32) -> io::Result<()> {
    set_int(fd, libc::SOL_TCP, libc::TCP_FASTOPEN, clamp(queue_len))
}

/// Lets connect(2) return at once and the first write go into the SYN when the kernel holds a cookie of that
/// server (`TCP_FASTOPEN_CONNECT`); [`TcpInfo::syn_data_acked`] says whether it did.
///
/// # Errors
/// `Unsupported` (EOPNOTSUPP) where the client bit of sysctl `net.ipv4.tcp_fastopen` is off.
pub fn set_tcp_fastopen_connect(fd: impl AsFd) -> io::Result<()> {
    set_int(fd, libc::SOL_TCP, libc::TCP_FASTOPEN_CONNECT, 1)
}

/// Sends small segments at once (`TCP_NODELAY`); accepted sockets inherit it from their listener.
///
/// # Errors
/// What setsockopt says.
pub fn set_tcp_nodelay(fd: impl AsFd, on: bool) -> io::Result<()> {
    Ok(sockopt::set_tcp_nodelay(fd, on)?)
}

/// Lets the acknowledgement of a connection's answer wait for the first bytes, which follow at once and carry it
/// (`TCP_QUICKACK` off before `connect`): a packet less. The kernel acknowledges as ever once the handshake is done; if
/// no bytes follow, the other side learns of the connection up to 200 ms late. Set on a listening socket, what its
/// connections receive first is acknowledged with our answer, or 40 ms later; on a connected one, so is what it receives
/// next.
///
/// # Errors
/// What setsockopt says.
pub fn set_tcp_ack_with_data(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_tcp_quickack(fd, false)?)
}

/// Acknowledges what has come now, and what comes next as the kernel does by itself (`TCP_QUICKACK` on): the end of
/// [`set_tcp_ack_with_data`]. A peer that holds its next bytes back until the ones before are acknowledged (RFC 896)
/// would else wait 40 ms for it.
///
/// # Errors
/// What setsockopt says.
pub fn set_tcp_ack_at_once(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_tcp_quickack(fd, true)?)
}

/// Chooses the congestion control by its kernel name (`bbr`, `cubic`, ...) and returns what is in force.
///
/// # Errors
/// `NotFound` where the kernel lacks it; `PermissionDenied` where it is not in
/// `net.ipv4.tcp_allowed_congestion_control`.
pub fn set_congestion(fd: impl AsFd, name: &str) -> io::Result<String> {
    sockopt::set_tcp_congestion(&fd, name)?;
    congestion(fd)
}

/// The congestion control in force.
///
/// # Errors
/// What getsockopt says.
pub fn congestion(fd: impl AsFd) -> io::Result<String> {
    Ok(sockopt::tcp_congestion(fd)?)
}

/// Makes the coming close(2) send a reset and forget unsent bytes (`SO_LINGER` of zero).
///
/// # Errors
/// What setsockopt says.
pub fn reset_on_close(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(fd, Some(Duration::ZERO))?)
}

/// Takes [`reset_on_close`] back: the coming close(2) sends what is unsent, then FIN.
///
/// # Errors
/// What setsockopt says.
pub fn end_in_order_on_close(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(fd, None)?)
}

/// How long sent bytes may stay unacknowledged before the kernel gives up (`TCP_USER_TIMEOUT`, RFC 5482);
/// `None`: the kernel's own limit.
///
/// # Errors
/// What setsockopt says.
pub fn set_tcp_user_timeout(fd: impl AsFd, limit: Option<Duration>) -> io::Result<()> {
    let millis = limit.map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX));
    Ok(sockopt::set_tcp_user_timeout(fd, millis)?)
}

/// Probes an idle peer after `idle`, then every `interval`, and gives up after `probes` without an answer.
/// The kernel counts in whole seconds from 1.
///
/// # Errors
/// What setsockopt says.
pub fn set_keepalive(fd: impl AsFd, idle: Duration, interval: Duration, probes: u32) -> io::Result<()> {
    let second = Duration::from_secs(1);
    SockRef::from(&fd).set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(idle.max(second))
            .with_interval(interval.max(second))
            .with_retries(probes),
    )
}

/// Asks for a receive buffer of `bytes` (the kernel doubles it and caps it at `net.core.rmem_max`), which
/// also switches its auto-tuning off; returns what is in force.
///
/// # Errors
/// What setsockopt says.
pub fn set_receive_buffer(fd: impl AsFd, bytes: usize) -> io::Result<usize> {
    sockopt::set_socket_recv_buffer_size(&fd, bytes)?;
    Ok(sockopt::socket_recv_buffer_size(fd)?)
}

/// Asks for a send buffer of `bytes`, as [`set_receive_buffer`] does (`net.core.wmem_max`).
///
/// # Errors
/// What setsockopt says.
pub fn set_send_buffer(fd: impl AsFd, bytes: usize) -> io::Result<usize> {
    sockopt::set_socket_send_buffer_size(&fd, bytes)?;
    Ok(sockopt::socket_send_buffer_size(fd)?)
}

/// A socket that waits to be readable is so from `bytes` on, at the end of the stream, or when the kernel wants its memory
/// back (`SO_RCVLOWAT`; 1 as sockets are made). The kernel gives the socket room for this many, at most half of
/// `net.ipv4.tcp_rmem`'s largest, and does not take that room away again.
///
/// # Errors
/// What setsockopt says.
pub fn set_receive_low_water(fd: impl AsFd, bytes: u32) -> io::Result<()> {
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, clamp(bytes))
}

fn clamp(value: u32) -> libc::c_int {
    libc::c_int::try_from(value).unwrap_or(libc::c_int::MAX)
}

/// setsockopt(2) with an `int`, for the options that neither rustix nor socket2 has.
pub(crate) fn set_int(
    fd: impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(4);
    // SAFETY: `value` lives across the call and `len` is its size; the kernel only reads it.
    let result =
        unsafe { libc::setsockopt(fd.as_fd().as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the number of a socket: all descriptors of it have the same, in all processes, and it is never used again.
///
/// # Errors
/// ENOTSOCK.
pub fn cookie(socket: impl std::os::fd::AsFd) -> std::io::Result<u64> {
    Ok(rustix::net::sockopt::socket_cookie(socket)?)
}

#[cfg(test)]
mod tests;
