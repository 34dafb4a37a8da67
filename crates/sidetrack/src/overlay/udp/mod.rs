//! Flows of UDP over the overlay: what two nodes say about them, and how it travels. The messages are in core
//! ([`sidetrack_core::overlay::frame::Relayed`]).
//!
//! There is one session from the node that catches datagrams to each node that delivers them. Its opening is signed. Orders
//! and their answers travel in the session; datagrams travel as packets of the overlay by the service of their rule, and in
//! the session while packets do not arrive. Relays keep nothing for an association. Flows among members that lie have no
//! session ([`proven`]).
//!
//! ```text
//!   client --> association --> Through (near) --packets--> Session (far) --> socket of the path --> server
//!                                   \______session: open, opened, refused______/
//! ```

mod far;
mod fates;
mod group;
mod near;
mod proven;

pub(super) use far::receive;
pub(super) use fates::Fate;
pub(super) use near::associate;
pub(super) use proven::serve;

use super::datagrams::{self, Use};
use super::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{PACKET_MAX, Protocol, RELAYED_MAX, Relayed, SessionId};
use sidetrack_core::overlay::service::{LinkKind, Service, Trust};
use std::io;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// Most datagrams that wait for a session, or for a path. Those that find no room are dropped.
const WAITING_MAX: usize = 512;

/// Most orders and answers that wait for a session.
const ORDERS_MAX: usize = 4096;

/// Messages longer than this travel in the session: a packet also carries the id of the session.
const BY_PACKET_MAX: usize = PACKET_MAX - 16;

/// Both ends of the flows of UDP of this node.
#[derive(Default)]
pub(super) struct Udp {
    near: near::Near,
    far: far::Far,
    orders: proven::Orders,
}

impl Udp {
    /// Handles a message that `origin` has sent in a packet. Returns false if this is not a session of flows of UDP.
    pub(super) fn came(&self, origin: NodeId, session: SessionId, message: &[u8]) -> bool {
        let trust = Trust::Members;
        self.near.came((origin, trust), session, message) || self.far.came(origin, session, message)
    }

    /// Notes what happened to a packet of `origin` with this message.
    pub(super) fn note(&self, origin: NodeId, session: SessionId, message: &[u8], fate: Fate) {
        let Ok((number, Relayed::Datagram(_))) = Relayed::parse(message) else { return };
        if !self.near.note((origin, Trust::Members), session, number, fate) {
            self.far.note(origin, session, number, fate);
        }
    }

    /// Handles a message that `origin` has sent with a proof, after the id of what it belongs to.
    pub(super) fn came_proven(&self, shared: &Shared, origin: NodeId, payload: &[u8]) {
        let Some((id, message)) = payload.split_first_chunk::<16>() else { return };
        let id = SessionId(*id);
        if !self.near.came((origin, Trust::Tolerant), id, message) {
            proven::came(shared, origin, id, message);
        }
    }
}

/// The way to the task that writes a session. Orders do not wait behind datagrams.
struct Outbox {
    orders: mpsc::Sender<Vec<u8>>,
    datagrams: mpsc::Sender<Vec<u8>>,
}

/// What waits for that task.
struct Waiting {
    orders: mpsc::Receiver<Vec<u8>>,
    datagrams: mpsc::Receiver<Vec<u8>>,
}

impl Outbox {
    fn new() -> (Self, Waiting) {
        let (orders, ordered) = mpsc::channel(ORDERS_MAX);
        let (datagrams, waiting) = mpsc::channel(WAITING_MAX);
        (Self { orders, datagrams }, Waiting { orders: ordered, datagrams: waiting })
    }
}

impl Waiting {
    /// Returns the next message. `None`: no sender is left.
    async fn next(&mut self) -> Option<Vec<u8>> {
        tokio::select! {
            biased;
            Some(order) = self.orders.recv() => Some(order),
            Some(datagram) = self.datagrams.recv() => Some(datagram),
            else => None,
        }
    }

    fn is_empty(&self) -> bool {
        self.orders.is_empty() && self.datagrams.is_empty()
    }
}

/// Where messages go.
#[derive(Clone, Copy, Debug)]
struct To {
    node: NodeId,
    what: Use,
    session: SessionId,
}

impl To {
    /// Returns a message after the id of its session.
    fn ahead_of(&self, message: &[u8]) -> Vec<u8> {
        [&self.session.0[..], message].concat()
    }
}

/// Sends a datagram of an association to a node: as a packet of this service, or in the session. Returns the number of copies
/// that were sent; 0: it is dropped.
fn send(shared: &Shared, to: &To, service: &Service, message: Vec<u8>, session: &Outbox) -> u64 {
    let by_packet = service.kind != LinkKind::Reliable && message.len() <= BY_PACKET_MAX;
    if service.trust == Trust::Tolerant {
        if by_packet {
            let message = to.ahead_of(&message);
            return datagrams::send_vouched(shared, to.node, service, Protocol::Session, message, |_, _| ());
        }
        // A reliable flow has no pieces.
        let left = message.len() <= BY_PACKET_MAX && session.datagrams.try_send(message).is_ok();
        return if left { datagrams::reliable_copies(shared) } else { 0 };
    }
    if by_packet
        && let Some(sent) = datagrams::send(shared, (to.node, to.what), service, message.clone(), |_, _| ())
    {
        return sent;
    }
    session.datagrams.try_send(message).is_ok().into()
}

/// Moves the messages of a session until it ends, or no sender is left. `take` gets each message that comes.
async fn pump(session: TcpStream, mut waiting: Waiting, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let (reading, writing) = session.into_split();
    let read = async {
        let mut reading = BufReader::new(reading);
        let mut message = vec![0; RELAYED_MAX];
        loop {
            let length = usize::from(reading.read_u16().await?);
            let message = message.get_mut(..length).ok_or(io::ErrorKind::InvalidData)?;
            reading.read_exact(message).await?;
            take(message);
        }
    };
    let write = async {
        let mut writing = BufWriter::new(writing);
        while let Some(message) = waiting.next().await {
            let Ok(length) = u16::try_from(message.len()) else { continue };
            writing.write_u16(length).await?;
            writing.write_all(&message).await?;
            if waiting.is_empty() {
                writing.flush().await?;
            }
        }
        Ok(())
    };
    tokio::select! {
        ended = read => ended,
        ended = write => ended,
    }
}
