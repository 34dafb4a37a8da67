//! One life of one link, as far as datagrams go.

use super::seal::Direction;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::datagram::mtu::{self, Search};
use sidetrack_core::overlay::datagram::pieces::{self, Joiner};
use sidetrack_core::overlay::datagram::{Header, OVERHEAD_BYTES, SEQUENCE_MAX, Window};
use sidetrack_core::overlay::frame::{Frame, Piece};
use sidetrack_core::time::Instant;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a probe besides its padding: type and number.
const PROBE_BYTES: usize = 5;

/// Where a neighbour's datagrams go, and by which socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index of the socket.
    pub socket: usize,
    /// The neighbour.
    pub to: SocketAddr,
    /// Our address, if it has asked for one.
    pub from: IpAddr,
}

/// What became of datagrams that came under a link's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// Its seal does not fit.
    Forged,
    /// It came before, or is too old to tell.
    Replayed,
    /// Sealed by the neighbour, and no frame of this version.
    Unreadable,
}

/// What its receiver remembers.
#[derive(Debug, Default)]
struct Receiving {
    window: Window,
    joiner: Joiner,
}

/// See the module.
pub struct Link {
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
    search: Mutex<Search>,
    /// Bytes that a datagram may have.
    bytes: AtomicUsize,
    /// When the control thread last heard that something came, nanoseconds of our clock.
    pub alive_told: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// A link that begins; `route` is where the configuration says the neighbour is.
    pub fn new(
        neighbour: NodeId,
        number: u64,
        (send, receive): (Direction, Direction),
        route: Option<Route>,
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
            search: Mutex::new(search),
            bytes,
            alive_told: AtomicU64::new(0),
        }
    }

    /// Its name in the headers of what comes.
    pub fn name(&self) -> u32 {
        self.receive.name
    }

    /// Where its datagrams go; none: nobody knows before the neighbour has spoken.
    pub fn route(&self) -> Option<Route> {
        *lock(&self.route)
    }

    /// Bytes that a datagram may have.
    pub fn datagram_bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Bytes that a frame may have to travel whole.
    pub fn frame_bytes(&self) -> usize {
        self.datagram_bytes() - OVERHEAD_BYTES
    }

    /// The datagrams of a frame: one, or its pieces.
    pub fn seal(&self, frame: &Frame) -> Vec<Vec<u8>> {
        let (bytes, room) = (frame.to_datagram(), self.frame_bytes());
        if bytes.len() <= room || matches!(frame, Frame::Probe { .. }) {
            return self.seal_one(&bytes).into_iter().collect();
        }
        let message = self.message.fetch_add(1, Relaxed);
        let cut = pieces::cut(&bytes, message, room);
        cut.into_iter().flatten().filter_map(|piece| self.seal_one(&piece)).collect()
    }

    fn seal_one(&self, frame: &[u8]) -> Option<Vec<u8>> {
        let sequence = self.sequence.fetch_add(1, Relaxed);
        (sequence < SEQUENCE_MAX).then(|| self.send.seal(sequence, frame)).flatten()
    }

    /// What a datagram under our name says; none: a piece, or a frame that may be skipped.
    ///
    /// # Errors
    /// Why it is dropped.
    pub fn open(&self, header: Header, sealed: &mut [u8], route: Route) -> Result<Option<Frame>, Dropped> {
        if !lock(&self.receiving).window.is_new(header.sequence) {
            return Err(Dropped::Replayed);
        }
        let frame = self.receive.open(header, sealed).ok_or(Dropped::Forged)?;
        // One thread receives: nothing came between.
        if lock(&self.receiving).window.accept(header.sequence) {
            // A neighbour that moved, or whose NAT did, is answered where it is now.
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

    /// Tells the search for the largest datagram; gives the probes to send.
    pub fn search(&self, now: Instant, input: mtu::Input) -> Vec<Frame> {
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

    /// When the search wants a tick.
    pub fn search_at(&self) -> Instant {
        lock(&self.search).deadline()
    }
}
