//! One UDP port for all clients of a `socks` listener (`udp_ports = "shared"`): which association a datagram belongs to.
//!
//! Each association has a socket of its own on the port, connected to its client, so that the kernel tells datagrams apart. It
//! cannot do so before the client's port is known, which a request may announce (RFC 1928 Sec. 6). Otherwise the first
//! datagram tells: it comes to the socket of the listener, and belongs to the only association of this address that waits for
//! one. Of SOCKS6, each datagram has the number of its association.

use sidetrack_core::socks::v6::UdpDatagram;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};

/// Most datagrams that wait for one association.
const WAITING_MAX: usize = 16;
/// Most bytes of them. One of any length has room.
const WAITING_BYTES_MAX: usize = 128 * 1024;

/// The associations of one port.
#[derive(Debug, Default)]
pub struct SharedPort {
    seats: Mutex<BTreeMap<IpAddr, Vec<Arc<Seat>>>>,
}

/// What is known of a client before its first datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Its address.
    pub ip: IpAddr,
    /// The port that it has announced.
    pub port: Option<u16>,
    /// The user that it has authenticated as.
    pub user: Option<String>,
    /// The number in its datagrams (version 6).
    pub number: Option<u64>,
}

#[derive(Debug)]
struct Seat {
    guest: Guest,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The client's port, once it is known.
    port: Option<u16>,
    came: Vec<(SocketAddr, Box<[u8]>)>,
    waker: Option<Waker>,
}

/// The place of one association. Dropping it gives the place up.
#[derive(Debug)]
pub struct Taken {
    port: Arc<SharedPort>,
    seat: Arc<Seat>,
}

/// The result of passing a datagram on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// An association has it.
    Yes,
    /// Too many wait for the association.
    Full,
    /// It is of no client.
    Stranger,
}

impl Guest {
    /// Says why the datagrams of this client could not be told from those of another one at its address. `None`: they can.
    fn conflict(&self, other: &Seat) -> Option<&'static str> {
        if self.number.is_some() || other.guest.number.is_some() {
            return None;
        }
        let theirs = lock(&other.inner).port;
        match (self.port, theirs) {
            (Some(port), Some(theirs)) if port == theirs => Some("another association has this port"),
            (Some(_), _) => None,
            (None, None) => Some("another client at this address has not sent its first datagram yet"),
            (None, Some(_)) if self.user != other.guest.user => Some("another user is at this address"),
            (None, Some(_)) => None,
        }
    }
}

impl SharedPort {
    /// Takes a place.
    ///
    /// # Errors
    /// Says in words why the client's datagrams could not be told from those of others.
    pub fn take(self: &Arc<Self>, guest: Guest) -> Result<Taken, &'static str> {
        let mut seats = lock(&self.seats);
        let all = seats.entry(guest.ip).or_default();
        if let Some(why) = all.iter().find_map(|other| guest.conflict(other)) {
            return Err(why);
        }
        let inner = Inner { port: guest.port, ..Inner::default() };
        let seat = Arc::new(Seat { guest, inner: inner.into() });
        all.push(seat.clone());
        Ok(Taken { port: self.clone(), seat })
    }

    /// Gives a datagram to the association that it belongs to.
    pub fn pass(&self, from: SocketAddr, datagram: &[u8]) -> Passed {
        let seats = lock(&self.seats);
        let all = seats.get(&from.ip()).map_or(&[][..], Vec::as_slice);
        let number = UdpDatagram::parse(datagram).map(|datagram| datagram.id);
        let of_number = all.iter().find(|seat| seat.guest.number.is_some() && seat.guest.number == number);
        let with = |port: Option<u16>| {
            all.iter().find(|seat| seat.guest.number.is_none() && lock(&seat.inner).port == port)
        };
        let found = of_number.or_else(|| with(Some(from.port()))).or_else(|| with(None)).cloned();
        drop(seats);
        let Some(seat) = found else { return Passed::Stranger };
        let mut inner = lock(&seat.inner);
        let bytes: usize = inner.came.iter().map(|(_, datagram)| datagram.len()).sum();
        if inner.came.len() == WAITING_MAX || bytes + datagram.len() > WAITING_BYTES_MAX {
            return Passed::Full;
        }
        inner.port = inner.port.or(Some(from.port()));
        inner.came.push((from, datagram.into()));
        if let Some(waker) = inner.waker.take() {
            waker.wake();
        }
        Passed::Yes
    }
}

impl Taken {
    /// Returns what has come, and wakes the task when more does.
    pub fn poll(&self, cx: &Context<'_>) -> Vec<(SocketAddr, Box<[u8]>)> {
        let mut inner = lock(&self.seat.inner);
        if !inner.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            inner.waker = Some(cx.waker().clone());
        }
        std::mem::take(&mut inner.came)
    }

    /// Gives a datagram of another client, which has come to the association's own socket, to its association.
    pub fn pass(&self, from: SocketAddr, datagram: &[u8]) -> Passed {
        self.port.pass(from, datagram)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut seats = lock(&self.port.seats);
        if let Some(all) = seats.get_mut(&self.seat.guest.ip) {
            all.retain(|seat| !Arc::ptr_eq(seat, &self.seat));
            if all.is_empty() {
                seats.remove(&self.seat.guest.ip);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(port: Option<u16>, user: Option<&str>) -> Guest {
        let ip = IpAddr::from([192, 0, 2, 1]);
        Guest { ip, port, user: user.map(str::to_owned), number: None }
    }

    fn from(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], port))
    }

    fn came(taken: &Taken) -> Vec<u16> {
        let waker = Waker::noop();
        taken.poll(&Context::from_waker(waker)).iter().map(|(from, _)| from.port()).collect()
    }

    #[test]
    fn clients_of_one_address_are_told_apart_or_refused() {
        let port = Arc::new(SharedPort::default());
        let first = port.take(guest(None, None)).expect("the only one");
        assert!(port.take(guest(None, None)).is_err(), "both wait");
        let known = port.take(guest(Some(7), None)).expect("it has announced its port");
        assert!(port.take(guest(Some(7), None)).is_err(), "the port is taken");
        assert_eq!(port.pass(from(7), b"a"), Passed::Yes);
        assert_eq!(port.pass(from(8), b"b"), Passed::Yes);
        assert_eq!((came(&known), came(&first)), (vec![7], vec![8]));
        assert_eq!(port.pass(from(9), b"c"), Passed::Stranger, "all ports are known");
        assert!(port.take(guest(None, Some("ann"))).is_err(), "another user could be meant");
        let second = port.take(guest(None, None)).expect("the first one is known");
        assert_eq!(port.pass(from(9), b"c"), Passed::Yes);
        assert_eq!((came(&first), came(&second)), (vec![], vec![9]));
        assert_eq!(port.pass(SocketAddr::from(([192, 0, 2, 2], 9)), b"c"), Passed::Stranger);
        drop((first, known, second));
        assert!(port.seats.lock().expect("no panic").is_empty());
    }

    #[test]
    fn what_waits_is_bounded() {
        let port = Arc::new(SharedPort::default());
        let taken = port.take(guest(None, None)).expect("the only one");
        for _ in 0..WAITING_MAX {
            assert_eq!(port.pass(from(1), b"x"), Passed::Yes);
        }
        assert_eq!(port.pass(from(1), b"x"), Passed::Full);
        assert_eq!(came(&taken).len(), WAITING_MAX);
        for _ in 0..2 {
            assert_eq!(port.pass(from(1), &[0; 65_507]), Passed::Yes);
        }
        assert_eq!(port.pass(from(1), &[0; 65_507]), Passed::Full);
    }
}
