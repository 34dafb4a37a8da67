//! The datagrams of one link, from one control connection to its end.

use super::legs::LinkLegs;
use super::seal::Direction;
use crate::overlay::paced::Lane;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::datagram::mtu::{self, Search};
use sidetrack_core::overlay::datagram::pieces::{self, Joiner};
use sidetrack_core::overlay::datagram::{Header, OVERHEAD_BYTES, SEQUENCE_MAX, Window};
use sidetrack_core::overlay::frame::{Frame, Piece};
use sidetrack_core::overlay::realtime::Recovery;
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// Bytes of a probe without its padding: type and number.
const PROBE_BYTES: usize = 5;

/// The address of a neighbour, and the socket that reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Index of the socket.
    pub socket: usize,
    /// The neighbour's address.
    pub to: SocketAddr,
    /// Our address that the neighbour sends to; unspecified while it is unknown.
    pub from: IpAddr,
}

/// Why a datagram of a link was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// The seal is wrong.
    Forged,
    /// It came before, or is too old to decide that.
    Replayed,
    /// It came before, and the link has several legs.
    Copy,
    /// Sealed by the neighbour, but not a valid frame of this version.
    Unreadable,
}

/// The state of the receiving side.
#[derive(Debug, Default)]
struct Receiving {
    window: Window,
    joiner: Joiner,
}

/// The link's keys, route and packet sizes.
pub(crate) struct Link {
    /// The neighbour.
    pub neighbour: NodeId,
    /// The number of the control connection it belongs to.
    pub number: u64,
    send: Direction,
    receive: Direction,
    sequence: AtomicU64,
    message: AtomicU32,
    receiving: Mutex<Receiving>,
    route: Mutex<Option<Route>>,
    /// Its legs, if it has several.
    pub legs: LinkLegs,
    search: Mutex<Search>,
    recovery: Mutex<Recovery>,
    /// Most bytes of a datagram.
    bytes: AtomicUsize,
    /// When the control thread was last told that something came, nanoseconds of our clock.
    pub alive_told: AtomicU64,
    /// Half of the round trip of the link, µs.
    pub one_way_us: AtomicU32,
    /// Its paced part, if this node declares its bandwidth as bought.
    pub lane: Option<Lane>,
}

impl Link {
    /// Returns a new link; `route` leads to the configured address of the neighbour.
    pub(crate) fn new(
        neighbour: NodeId,
        number: u64,
        (send, receive): (Direction, Direction),
        (route, legs): (Option<Route>, LinkLegs),
        lane: Option<Lane>,
        now: Instant,
    ) -> Self {
        let search = Search::new(now);
        let bytes = AtomicUsize::new(search.bytes());
        Self {
            neighbour,
            number,
            send,
            receive,
            sequence: AtomicU64::new(0),
            message: AtomicU32::new(0),
            receiving: Mutex::default(),
            route: Mutex::new(route),
            legs,
            search: Mutex::new(search),
            recovery: Mutex::default(),
            bytes,
            alive_told: AtomicU64::new(0),
            one_way_us: AtomicU32::new(0),
            lane,
        }
    }

    /// Returns the link's name in the headers of received datagrams.
    pub(crate) fn name(&self) -> u32 {
        self.receive.name
    }

    /// Returns where its datagrams go. None: the address is unknown until the neighbour has sent a datagram.
    pub(crate) fn route(&self) -> Option<Route> {
        *lock(&self.route)
    }

    /// Returns the recovery of packets of real-time services, both directions.
    pub(crate) fn recovery(&self) -> MutexGuard<'_, Recovery> {
        lock(&self.recovery)
    }

    /// Returns the most bytes of a datagram.
    pub(crate) fn datagram_bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Returns the most bytes of a frame that travels in one datagram.
    pub(crate) fn frame_bytes(&self) -> usize {
        self.datagram_bytes() - OVERHEAD_BYTES
    }

    /// Returns the datagrams of a frame: one, or its pieces.
    pub(crate) fn seal(&self, frame: &Frame) -> Vec<Vec<u8>> {
        let (bytes, room) = (frame.to_datagram(), self.frame_bytes());
        if bytes.len() <= room || matches!(frame, Frame::Probe { .. }) {
            return self.seal_one(&bytes).into_iter().collect();
        }
        let message = self.message.fetch_add(1, Relaxed);
        let cut = pieces::cut(&bytes, message, room);
        cut.into_iter().flatten().filter_map(|piece| self.seal_one(&piece)).collect()
    }

    /// Appends the datagram of a frame that fits into one. Returns whether it could be sealed.
    pub(crate) fn seal_onto(&self, frame: &Frame, out: &mut Vec<u8>) -> bool {
        let sequence = self.sequence.fetch_add(1, Relaxed);
        sequence < SEQUENCE_MAX && self.send.seal_onto(sequence, &frame.to_datagram(), out).is_some()
    }

    fn seal_one(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let sequence = self.sequence.fetch_add(1, Relaxed);
        (sequence < SEQUENCE_MAX).then(|| self.send.seal(sequence, frame)).flatten()
    }

    /// Returns the frame in a datagram under our name. None: it was a piece, or a frame that may be skipped.
    ///
    /// # Errors
    /// Returns why the datagram is dropped.
    pub(crate) fn open(
        &self,
        header: Header,
        sealed: &mut [u8],
        route: Route,
    ) -> Result<Option<Frame>, Dropped> {
        if !lock(&self.receiving).window.is_new(header.sequence) {
            return Err(if self.legs.exist() { Dropped::Copy } else { Dropped::Replayed });
        }
        let frame = self.receive.open(header, sealed).ok_or(Dropped::Forged)?;
        // Only one thread receives, so the window has not changed since the check above.
        if lock(&self.receiving).window.accept(header.sequence) {
            // If a neighbour or its NAT has moved, answers go to the new address.
            *lock(&self.route) = Some(route);
        }
        match Frame::from_datagram(frame).map_err(|_| Dropped::Unreadable)? {
            Some(Frame::Piece(piece)) => self.join(piece),
            frame => Ok(frame),
        }
    }

    fn join(&self, piece: Piece) -> Result<Option<Frame>, Dropped> {
        let Some(bytes) = lock(&self.receiving).joiner.join(piece) else { return Ok(None) };
        match Frame::from_datagram(&bytes).map_err(|_| Dropped::Unreadable)? {
            Some(Frame::Piece(_)) => Err(Dropped::Unreadable),
            frame => Ok(frame),
        }
    }

    /// Gives an input to the search for the largest datagram. Returns the probes to send.
    pub(crate) fn search(&self, now: Instant, input: mtu::Input) -> Vec<Frame> {
        let mut search = lock(&self.search);
        search.handle(now, input);
        self.bytes.store(search.bytes(), Relaxed);
        let probes = std::iter::from_fn(|| search.poll());
        let frame = |probe: mtu::Probe| Frame::Probe {
            number: probe.number,
            padding: u16::try_from(probe.bytes - OVERHEAD_BYTES - PROBE_BYTES).unwrap_or(0),
        };
        probes.map(frame).collect()
    }

    /// Begins the search for the largest datagram again, because the way is another one.
    pub(crate) fn restart_search(&self, now: Instant) {
        let mut search = lock(&self.search);
        *search = Search::new(now);
        self.bytes.store(search.bytes(), Relaxed);
    }

    /// Returns when the search needs a tick.
    pub(crate) fn search_at(&self) -> Instant {
        lock(&self.search).deadline()
    }
}

#[cfg(test)]
mod tests {
    use super::super::seal::directions;
    use super::*;
    use std::array;

    fn link(own: NodeId, neighbour: NodeId) -> Link {
        let keys = directions(own, neighbour, &array::from_fn(|at| at as u8)).expect("keys");
        Link::new(neighbour, 1, keys, (None, LinkLegs::new(None)), None, Instant::ZERO)
    }

    /// The neighbour may use both legs a moment before one of them is up for us.
    #[test]
    fn a_second_copy_is_no_replay_where_hellos_pass_on_legs() {
        let [sender, receiver] = [link(NodeId(1), NodeId(2)), link(NodeId(2), NodeId(1))];
        let to = SocketAddr::from(([192, 0, 2, 9], 8100));
        let route = Route { socket: 0, to, from: to.ip() };
        let datagram = sender.seal(&Frame::Piece(Piece { message: 1, index: 0, count: 2, bytes: vec![7] }));
        let open = || {
            let (header, sealed) = Header::split(&datagram[0]).expect("a datagram");
            receiver.open(header, &mut sealed.to_vec(), route).map(|_| ())
        };
        assert_eq!([open(), open()], [Ok(()), Err(Dropped::Replayed)]);
        receiver.legs.begin();
        assert!(receiver.legs.chosen().is_empty(), "none is up yet");
        assert_eq!(open(), Err(Dropped::Copy));
    }
}
