//! Carriers of datagrams.
//!
//! Two shapes: a socket that is connected to one server ([`connect`]), which the kernel filters and which sends trains; and
//! a path to any number of destinations ([`Datagrams`]), which keeps the client's outside port (RFC 4787 REQ-1).

mod associate;
mod capsules;
mod direct;

pub use capsules::{Capsules, Over};
pub use direct::Direct;

use super::gate::{self, Admitted};
use super::{Dialing, Failure, Order, overlay};
use crate::live::Taken;
use crate::reactor::UdpSocket;
use sidetrack_core::association::Dropped;
use sidetrack_core::carrier::{Carrier, Hop};
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::icmp::Unreachable;
use sidetrack_sys::udp::batch::Batch;
use sidetrack_sys::{sockopt, udp};
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::task::{Context, Poll};

/// Batches that are taken from one socket before its task looks at the others.
const ROUNDS: usize = 4;

thread_local! {
    /// The memory for the datagram that is written next, and for where its headers begin whose length is set last.
    static SCRATCH: RefCell<(Vec<u8>, Vec<usize>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Gives `write` memory for one datagram, which is empty. All tasks of a thread use it in turn: an idle association keeps none.
pub fn with_scratch<T>(write: impl FnOnce(&mut Vec<u8>, &mut Vec<usize>) -> T) -> T {
    SCRATCH.with_borrow_mut(|(bytes, begun)| {
        bytes.clear();
        begun.clear();
        write(bytes, begun)
    })
}

/// A destination of datagrams. The gate has seen its address, if it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remote {
    /// An address.
    Address(Admitted),
    /// A name, which the last hop resolves.
    Name(Destination),
}

/// What came on a path.
#[derive(Debug)]
pub enum Came<'a> {
    /// A datagram.
    Datagram {
        /// Its sender. `None`: the only destination of the path, whose address the path does not tell.
        from: Option<SocketAddr>,
        /// Its payload. May be empty.
        payload: &'a [u8],
    },
    /// An error about earlier datagrams, such as an ICMP error.
    Error {
        /// Their destination. `None`: it is not known.
        to: Option<SocketAddr>,
        /// What it means.
        failure: Failure,
        /// What the path has said, if its words can be passed on to the client.
        said: Option<Unreachable>,
    },
    /// A destination that the path cannot be used for any more.
    Refused {
        /// The destination. `None`: its address is not known.
        to: Option<SocketAddr>,
        /// The reason.
        failure: Failure,
    },
    /// A datagram that is dropped.
    Dropped(Dropped),
}

/// A datagram that could not be sent.
#[derive(Debug)]
pub struct Lost {
    /// Why it counts as dropped.
    pub why: Dropped,
    /// What the system said.
    pub failure: Failure,
    /// The longest payload that the path carries, bytes, if it was too long and that is known.
    pub fits_bytes: Option<usize>,
}

/// A path that carries the datagrams of one client to any number of destinations.
pub trait Datagrams: fmt::Debug {
    /// Sends one datagram without waiting. It is never cut.
    ///
    /// # Errors
    /// Fails if the path does not take it. The path itself goes on.
    fn send(&mut self, to: &Remote, payload: &[u8]) -> Result<(), Lost>;

    /// Returns what carries them, if the carrier leaves a choice.
    fn taken(&self) -> Option<Taken> {
        None
    }

    /// Returns the sockets of a path without hops: another process can go on with them. `None`: it has hops.
    fn sockets(&self) -> Option<Vec<BorrowedFd<'_>>> {
        None
    }

    /// Returns how many copies of datagrams to this destination were sent. `None`: one of each datagram.
    fn copies(&self, _: &Remote) -> Option<u64> {
        None
    }

    /// Says what happened on the way to datagrams from this destination. `None`: nothing that is known.
    fn happened(&self, _: &Remote) -> Option<String> {
        None
    }

    /// Passes what has come to `take`: at most a few batches, so that other paths have their turn. Pending: there was
    /// nothing, and the task is woken when there is.
    ///
    /// # Errors
    /// Fails if the path is over, for example because a hop has ended it.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        batch: &mut Batch,
        take: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>>;
}

impl Remote {
    /// Returns the address, if it is known.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Address(admitted) => Some(sockopt::canonical(admitted.address())),
            Self::Name(_) => None,
        }
    }

    /// Returns the destination to send to a hop, or to a node of the overlay.
    pub fn destination(&self) -> Destination {
        match self {
            Self::Address(admitted) => sockopt::canonical(admitted.address()).into(),
            Self::Name(destination) => destination.clone(),
        }
    }
}

/// Opens a path for the datagrams of the order's client through its carrier: hops, the overlay, or a tunnel.
///
/// # Errors
/// Fails if a hop, a node or a far side cannot be reached or refuses. The failure names it.
pub async fn associate(order: &Order<'_>) -> Result<Box<dyn Datagrams>, Failure> {
    match &order.carry.carrier {
        Carrier::Hops(hops) => associate::associate(order, hops).await,
        Carrier::Overlay(carrier) => overlay::associate(order, carrier).await,
        Carrier::Tunnel(name) => Ok(Box::new(capsules::through_tunnel(order, name).await?)),
        Carrier::Direct => {
            Err(Failure::new(EndReason::Internal, "this carrier has no such path for datagrams"))
        }
    }
}

/// Opens a path to the order's destination through these hops.
///
/// # Errors
/// As [`associate()`].
pub(super) async fn through(order: &Order<'_>, hops: &[Hop]) -> Result<Box<dyn Datagrams>, Failure> {
    // Boxed: a hop of HTTP/3 among them asks for such a path, too.
    Box::pin(associate::associate(order, hops)).await
}

/// Opens a socket whose datagrams go to this address, and that receives only from there.
///
/// # Errors
/// Fails with `loop` if the address is our own listener, otherwise with the reason that fits the system's error.
pub fn connect(dialing: &Dialing, to: Admitted) -> Result<UdpSocket, Failure> {
    let address = to.address();
    if dialing.is_own_datagrams(address) {
        return Err(own(address));
    }
    let opened = || -> io::Result<UdpSocket> {
        let socket = unbound(dialing, address)?;
        udp::batch::receive_trains(&socket);
        gate::start_datagrams(&socket, to)?;
        UdpSocket::new(socket.into())
    };
    opened().map_err(|error| failure(&error, address))
}

/// Checks that there is a way to this address from an unconnected socket.
///
/// # Errors
/// As [`connect`].
pub fn probe(dialing: &Dialing, to: Admitted) -> Result<(), Failure> {
    let address = to.address();
    if dialing.is_own_datagrams(address) {
        return Err(own(address));
    }
    let tried = unbound(dialing, address).and_then(|socket| gate::start_datagrams(&socket, to));
    tried.map_err(|error| failure(&error, address))
}

fn own(address: SocketAddr) -> Failure {
    Failure::new(EndReason::Loop, format!("{address} is our own listener"))
}

/// Returns a socket for the family of this address. Its mark is set before the first datagram: our capture rules would lead
/// an unmarked one back to us.
pub fn unbound(dialing: &Dialing, address: SocketAddr) -> io::Result<socket2::Socket> {
    let socket = udp::unbound(address)?;
    if let Some(mark) = dialing.mark {
        sockopt::set_mark(&socket, mark)?;
    }
    Ok(socket)
}

/// Returns such a socket, non-blocking, with a port that the kernel chooses at no address.
pub fn bound(dialing: &Dialing, address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    let any = match address {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = unbound(dialing, address)?;
    socket.bind(&any.into())?;
    Ok(socket.into())
}

/// Maps an error of a UDP socket, such as an ICMP error, to an end reason.
pub fn failure(error: &io::Error, to: SocketAddr) -> Failure {
    super::direct::failure(error, to)
}

/// Maps an error of sending to why the datagram is lost.
fn lost(error: &io::Error, to: SocketAddr) -> Lost {
    let why = if udp::is_too_long(error) { Dropped::TooLong } else { Dropped::Unsent };
    Lost { why, failure: failure(error, to), fits_bytes: None }
}

/// Receives from a socket in turn. `take` gets each batch. Ready: there may be more.
fn receive(
    socket: &UdpSocket,
    cx: &mut Context<'_>,
    batch: &mut Batch,
    mut take: impl FnMut(io::Result<(&Batch, usize)>),
) -> Poll<()> {
    let mut has_taken = false;
    for _ in 0..ROUNDS {
        match socket.receive(batch) {
            Ok(count) => take(Ok((batch, count))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => take(Err(error)),
        }
        has_taken = true;
    }
    if socket.poll_read_ready(cx).is_ready() || has_taken { Poll::Ready(()) } else { Poll::Pending }
}
