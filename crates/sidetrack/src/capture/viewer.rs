//! One viewer of a capture: chooses packets by its filter, and writes them as a pcapng file in pieces.
//!
//! ```text
//! views --finish, or its time is over--> finishing --all packets until then are written--> over
//!       --its reader is gone-------------------------------------------------------------> over
//! ```

use super::comment;
use super::packets::{Packet, Packets};
use crate::live::{Decided, LiveFlow, keys};
use crate::record::FlowRecord;
use bytes::Bytes;
use sidetrack_core::capture::pcapng::{self, Direction};
use sidetrack_core::capture::{Leg, Table};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::filter::Filter;
use sidetrack_core::flow::{FlowId, Intercept, Side};
use sidetrack_core::policy::Action;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// A piece is sent when it has this many bytes, or when no packet waits.
const PIECE_BYTES: usize = 64 << 10;

/// How often a leg whose flows do not match is asked about again: bytes and ages of flows grow.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// How long the kernel may take to hand over a packet.
const GRACE: Duration = Duration::from_millis(150);

/// How often the counts are written.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Most names that are written.
const NAMES_MAX: usize = 1 << 16;

/// The flows that are known to the capture.
pub(super) type Flows = HashMap<FlowId, Arc<LiveFlow>>;

/// What the capture knows, when a viewer looks.
pub(super) struct Known<'a> {
    pub packets: &'a Packets,
    pub table: &'a Table,
    pub flows: &'a Flows,
    /// The name of an interface.
    pub name: &'a dyn Fn((usize, i32)) -> String,
    /// Packets that the kernel could not hand over since the capture began.
    pub lost: u64,
    pub now: Instant,
}

/// What a viewer knows of a leg.
#[derive(Debug, Default)]
struct Seen {
    /// The flow that matches.
    matched: Option<FlowId>,
    /// When its flows were asked about, and how many there were.
    asked: Option<(Instant, usize)>,
    /// The flow that the latest comment of each direction is about.
    told: [Option<FlowId>; 2],
    /// The name of its TLS connection, and how many bytes of its secrets are written.
    secrets: Option<([u8; 32], usize)>,
}

#[derive(Debug)]
pub(super) struct Viewer {
    filter: Filter,
    last: Option<Duration>,
    snap_bytes: u32,
    pieces: mpsc::Sender<Bytes>,
    is_finishing: Arc<AtomicBool>,
    /// When the kernel has handed over everything, and the time of the last packet.
    until: Option<(Instant, u64)>,
    /// The number of the next packet. `None`: it has not looked yet.
    next: Option<u64>,
    seen: HashMap<u64, Seen>,
    interfaces: HashMap<(usize, i32), u32>,
    names: HashSet<IpAddr>,
    piece: Vec<u8>,
    /// Packets that are written, and that were dropped: in total, and since the last written one.
    written: u64,
    dropped: u64,
    just_dropped: u64,
    /// What the kernel had lost when this began.
    lost_before: u64,
    counted: Option<(Instant, (u64, u64))>,
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl Viewer {
    pub(super) fn new(
        filter: Filter,
        last: Option<Duration>,
        snap_bytes: u32,
        pieces: mpsc::Sender<Bytes>,
        is_finishing: Arc<AtomicBool>,
    ) -> Self {
        Self {
            filter,
            last,
            snap_bytes,
            pieces,
            is_finishing,
            until: None,
            next: None,
            seen: HashMap::new(),
            interfaces: HashMap::new(),
            names: HashSet::new(),
            piece: Vec::new(),
            written: 0,
            dropped: 0,
            just_dropped: 0,
            lost_before: 0,
            counted: None,
        }
    }

    /// Writes the packets that are kept since the last call. Returns false when the viewer is over.
    pub(super) fn look(&mut self, known: &Known<'_>) -> bool {
        if self.pieces.is_closed() {
            return false;
        }
        let next = self.next.unwrap_or_else(|| self.begin(known));
        if self.until.is_none() && self.is_finishing.load(Relaxed) {
            self.until = Some((known.now + GRACE, now_ns()));
        }
        for packet in known.packets.from(next) {
            if self.until.is_none_or(|(_, last)| packet.time_ns <= last) {
                self.packet(packet, known);
            }
        }
        self.next = Some(known.packets.next());
        let is_over =
            self.until.is_some_and(|(until, last)| known.now >= until && !known.packets.waits(last));
        // The last piece waits for its place.
        let is_over = is_over && self.pieces.capacity() > 0;
        self.count(known, is_over);
        self.send();
        !is_over
    }

    fn begin(&mut self, known: &Known<'_>) -> u64 {
        pcapng::section(&mut self.piece, concat!("sidetrack ", env!("CARGO_PKG_VERSION")));
        self.lost_before = known.lost;
        let before = |last: Duration| u64::try_from(last.as_nanos()).unwrap_or(u64::MAX);
        match self.last {
            Some(last) => known.packets.since(now_ns().saturating_sub(before(last))),
            None => known.packets.next(),
        }
    }

    fn packet(&mut self, packet: &Packet, known: &Known<'_>) {
        let leg = packet.found.leg;
        let Some(flow) = self.matches(leg, known) else { return };
        if let Some(random) = packet.random
            && let Some(seen) = self.seen.get_mut(&leg)
        {
            seen.secrets = Some((random, 0));
        }
        // One place stays for the counts at the end.
        if self.pieces.capacity() < 2 {
            self.dropped += 1;
            self.just_dropped += 1;
            return;
        }
        let interface = self.interface(packet.interface, known);
        self.name(leg, known);
        self.secrets(leg);
        let comment = self.comment(packet, flow, known);
        let block = pcapng::Packet {
            interface,
            time_ns: packet.time_ns,
            data: &packet.data,
            length: packet.length,
            direction: Some(if packet.is_outgoing { Direction::Out } else { Direction::In }),
            dropped: std::mem::take(&mut self.just_dropped),
            comment: comment.as_deref(),
        };
        pcapng::packet(&mut self.piece, &block);
        self.written += 1;
        if self.piece.len() >= PIECE_BYTES {
            self.send();
        }
    }

    /// Returns the flow of a leg that matches the filter. Once one has, all packets of the connection belong to the capture.
    fn matches(&mut self, leg: u64, known: &Known<'_>) -> Option<FlowId> {
        let flows = known.table.flows(leg);
        let seen = self.seen.entry(leg).or_default();
        let is_fresh = seen.asked.is_some_and(|(at, count)| {
            count == flows.len() && known.now.saturating_duration_since(at) < ASK_AGAIN
        });
        if is_fresh {
            return seen.matched;
        }
        seen.asked = Some((known.now, flows.len()));
        let does = |id: &&FlowId| {
            known.flows.get(id).is_some_and(|flow| {
                let decided = flow.decided();
                decided.is_some() && self.filter.matches(&FlowRecord::live(flow, decided.as_deref()).facts())
            })
        };
        // The latest: requests of HTTP follow each other on one connection.
        seen.matched = flows.iter().rev().find(does).copied().or(seen.matched);
        seen.matched
    }

    fn interface(&mut self, interface: (usize, i32), known: &Known<'_>) -> u32 {
        let number = u32::try_from(self.interfaces.len()).unwrap_or(u32::MAX);
        *self.interfaces.entry(interface).or_insert_with(|| {
            pcapng::interface(&mut self.piece, &(known.name)(interface), self.snap_bytes);
            number
        })
    }

    /// Writes the name of the server, if it is known and new.
    fn name(&mut self, leg: u64, known: &Known<'_>) {
        let Some(Leg { side, ends, asked }) = known.table.leg(leg) else { return };
        for flow in known.table.flows(leg) {
            let Some(decided) = known.flows.get(flow).and_then(|flow| flow.decided()) else { continue };
            let Some(name) = &decided.flow.host else { continue };
            let server = match side {
                Side::Client => asked.or_else(|| is_caught_on_its_way(&decided).then_some(ends.to)),
                Side::Server => is_direct(&decided).then_some(ends.from),
            };
            let Some(ip) = server.map(|server| server.ip()) else { continue };
            if self.names.len() < NAMES_MAX && self.names.insert(ip) {
                pcapng::names(&mut self.piece, [(ip, name.as_str())]);
            }
        }
    }

    /// Writes the secrets of a leg's TLS connection that are new.
    fn secrets(&mut self, leg: u64) {
        let Some((random, written)) = self.seen.get_mut(&leg).and_then(|seen| seen.secrets.as_mut()) else {
            return;
        };
        if let Some(lines) = keys::lines(random, *written) {
            *written += lines.len();
            pcapng::secrets(&mut self.piece, &lines);
        }
    }

    /// The comment of the first packet of each flow and direction.
    fn comment(&mut self, packet: &Packet, flow: FlowId, known: &Known<'_>) -> Option<String> {
        let found = packet.found;
        let [up, down] = &mut self.seen.get_mut(&found.leg)?.told;
        let told = if found.is_up { up } else { down };
        if *told == Some(flow) {
            return None;
        }
        *told = Some(flow);
        let live = known.flows.get(&flow)?;
        let decided = live.decided();
        Some(comment::of(&FlowRecord::live(live, decided.as_deref()), found.side, found.is_up))
    }

    /// Writes how many packets the capture has and lacks, if that has changed.
    fn count(&mut self, known: &Known<'_>, is_over: bool) {
        let counts = (self.written, self.dropped + (known.lost - self.lost_before));
        let is_due = self.counted.is_none_or(|(at, before)| {
            before != counts && (is_over || known.now.saturating_duration_since(at) >= COUNT_EVERY)
        });
        if is_due && !self.interfaces.is_empty() && self.pieces.capacity() > 0 {
            pcapng::statistics(&mut self.piece, 0, now_ns(), counts);
            self.counted = Some((known.now, counts));
        }
    }

    fn send(&mut self) {
        if self.piece.is_empty() {
            return;
        }
        match self.pieces.try_send(Bytes::from(std::mem::take(&mut self.piece))) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            // No packet is written while there is no place, so this is a count at most. It goes with the next piece.
            Err(mpsc::error::TrySendError::Full(piece)) => self.piece = piece.into(),
        }
    }

    /// Forgets legs that the capture has forgotten.
    pub(super) fn sweep(&mut self, table: &Table) {
        self.seen.retain(|leg, _| table.leg(*leg).is_some());
    }
}

/// Whether the client has dialled the server's address itself, and not that of a proxy.
fn is_caught_on_its_way(decided: &Decided) -> bool {
    use Intercept::{Engine, Kernel, Redirect, Run, Tproxy};
    matches!(decided.flow.intercept, Run | Redirect | Tproxy | Engine | Kernel)
}

/// Whether we dial the server, and no hop.
fn is_direct(decided: &Decided) -> bool {
    matches!(decided.action(), Some(Action::Carry(carry)) if carry.carrier == Carrier::Direct)
}
