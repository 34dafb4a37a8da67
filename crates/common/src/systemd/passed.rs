//! Listening sockets that systemd has passed at the start: those of a socket unit (systemd.socket(5)), and those that it has kept for
//! the process before this one ([`Systemd::keep`](super::Systemd::keep)).

use anyhow::Context as _;
use sidetrack_core::flow::Protocol;
use sidetrack_sys::sockopt::{SeenListener, see_listener};
use sidetrack_sys::sync::lock;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Mutex;

/// What the names of kept sockets begin with. Those of a socket unit have the name of the unit, or what `FileDescriptorName=` says.
const KEPT: &str = "kept-";

/// The name of a listener's sockets while the service manager keeps them. It has no `:`, which separates names.
#[must_use]
pub fn kept_name(protocol: Protocol, address: SocketAddr) -> String {
    format!("{KEPT}{}-{address}", protocol.as_str()).replace(':', "_")
}

/// The sockets.
#[derive(Debug, Default)]
pub struct Passed {
    sockets: Mutex<Vec<Socket>>,
}

#[derive(Debug)]
struct Socket {
    name: String,
    seen: SeenListener,
    fd: OwnedFd,
    /// A listener has a copy.
    is_used: bool,
}

impl Socket {
    fn is_kept(&self) -> bool {
        self.name.starts_with(KEPT)
    }
}

impl Passed {
    /// Takes what was passed to this process. What is not a listening socket is closed, with a line in the log. Call it before the
    /// program opens anything.
    ///
    /// # Errors
    /// The environment promises more than there is.
    pub fn from_environment() -> anyhow::Result<Self> {
        let passed = sidetrack_sys::passed::take(|name| std::env::var_os(name))
            .context("the sockets that the service manager passes")?;
        Ok(Self::of(passed))
    }

    fn of(passed: Vec<(String, OwnedFd)>) -> Self {
        let mut sockets: Vec<Socket> = Vec::new();
        for (name, fd) in passed {
            match see_listener(&fd) {
                Ok(seen) => sockets.push(Socket { name, seen, fd, is_used: false }),
                Err(error) => {
                    tracing::warn!("what the service manager passes as '{name}' is not used: {error}")
                }
            }
        }
        Self { sockets: Mutex::new(sockets) }
    }

    /// Whether nothing was passed.
    pub fn is_empty(&self) -> bool {
        lock(&self.sockets).is_empty()
    }

    /// Whether there is a socket on this address.
    pub fn has(&self, protocol: Protocol, address: SocketAddr) -> bool {
        lock(&self.sockets).iter().any(|socket| is_on(socket, protocol, address))
    }

    /// Whether a socket unit has this address.
    pub fn is_of_unit(&self, protocol: Protocol, address: SocketAddr) -> bool {
        lock(&self.sockets).iter().any(|socket| !socket.is_kept() && is_on(socket, protocol, address))
    }

    /// Returns the TCP listeners on this address. Those of a socket unit stay here as well: they are there again after a listener was
    /// removed by one reload and added by another.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn listeners(&self, address: SocketAddr) -> io::Result<Vec<TcpListener>> {
        Ok(self.take(Protocol::Tcp, address)?.into_iter().map(TcpListener::from).collect())
    }

    /// Returns the UDP sockets on this address, as [`Passed::listeners`].
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn datagrams(&self, address: SocketAddr) -> io::Result<Vec<UdpSocket>> {
        Ok(self.take(Protocol::Udp, address)?.into_iter().map(UdpSocket::from).collect())
    }

    fn take(&self, protocol: Protocol, address: SocketAddr) -> io::Result<Vec<OwnedFd>> {
        let mut sockets = lock(&self.sockets);
        let mut taken = Vec::new();
        for socket in
            sockets.iter_mut().filter(|socket| !socket.is_kept() && is_on(socket, protocol, address))
        {
            socket.is_used = true;
            taken.push(socket.fd.try_clone()?);
        }
        let kept = sockets.extract_if(.., |socket| socket.is_kept() && is_on(socket, protocol, address));
        let kept: Vec<_> = kept.map(|socket| socket.fd).collect();
        // The unit's socket may be among the kept ones, too.
        Ok(if taken.is_empty() { kept } else { taken })
    }

    /// The names of all kept sockets.
    pub fn kept(&self) -> Vec<String> {
        let sockets = lock(&self.sockets);
        sockets.iter().filter(|socket| socket.is_kept()).map(|socket| socket.name.clone()).collect()
    }

    /// Closes kept sockets that nothing listens on any more.
    pub fn close_kept(&self, is_wanted: impl Fn(Protocol, SocketAddr) -> bool) {
        lock(&self.sockets)
            .retain(|socket| !socket.is_kept() || is_wanted(socket.seen.protocol, socket.seen.address));
    }

    /// The sockets of units that nothing listens on: protocol, address and name.
    pub fn unused(&self) -> Vec<(Protocol, SocketAddr, String)> {
        let sockets = lock(&self.sockets);
        let unused = sockets.iter().filter(|socket| !socket.is_kept() && !socket.is_used);
        unused.map(|Socket { name, seen, .. }| (seen.protocol, seen.address, name.clone())).collect()
    }
}

fn is_on(socket: &Socket, protocol: Protocol, address: SocketAddr) -> bool {
    socket.seen.protocol == protocol && socket.seen.address == address
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listener() -> (SocketAddr, OwnedFd) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        (listener.local_addr().unwrap(), listener.into())
    }

    #[test]
    fn names_can_stand_in_a_list() {
        assert_eq!(kept_name(Protocol::Tcp, "127.0.0.1:80".parse().unwrap()), "kept-tcp-127.0.0.1_80");
        assert_eq!(
            kept_name(Protocol::Udp, "[2001:db8::1]:53".parse().unwrap()),
            "kept-udp-[2001_db8__1]_53"
        );
    }

    #[test]
    fn kept_sockets_are_taken_once_and_those_of_units_again() {
        let ((kept_at, kept), (unit_at, unit)) = (listener(), listener());
        let passed = Passed::of(vec![
            (kept_name(Protocol::Tcp, kept_at), kept),
            ("sidetrack.socket".to_owned(), unit),
            ("nothing".to_owned(), std::io::pipe().unwrap().0.into()),
        ]);
        assert_eq!(passed.kept(), [kept_name(Protocol::Tcp, kept_at)]);
        assert!(passed.has(Protocol::Tcp, kept_at) && !passed.has(Protocol::Udp, kept_at));
        assert!(passed.is_of_unit(Protocol::Tcp, unit_at) && !passed.is_of_unit(Protocol::Tcp, kept_at));
        assert_eq!(passed.unused(), [(Protocol::Tcp, unit_at, "sidetrack.socket".to_owned())]);
        for (again, address, count) in
            [(false, kept_at, 1), (true, kept_at, 0), (false, unit_at, 1), (true, unit_at, 1)]
        {
            assert_eq!(passed.listeners(address).unwrap().len(), count, "{address} {again}");
        }
        assert!(passed.unused().is_empty() && passed.datagrams(unit_at).unwrap().is_empty());
    }

    #[test]
    fn a_kept_socket_without_a_listener_is_closed() {
        let (address, kept) = listener();
        let passed = Passed::of(vec![(kept_name(Protocol::Tcp, address), kept)]);
        passed.close_kept(|protocol, wanted| (protocol, wanted) == (Protocol::Tcp, address));
        assert!(passed.has(Protocol::Tcp, address));
        passed.close_kept(|_, _| false);
        assert!(!passed.has(Protocol::Tcp, address));
        TcpListener::bind(address).expect("the address is free");
    }
}
