//! The paced link: reliable streams over datagrams between two nodes whose bandwidth is bought. It sends at the declared
//! rate, never faster, and a loss does not slow it down (Seamless Overlays, Sec. 1.1 and 3).
//!
//! ```text
//!              an offer of the other end came              nothing came for SILENCE_MAX,
//!   OFFERING ---------------------------------> AGREED  or the other end breaks the protocol
//!      |                                          | \-----------------------------------> DOWN
//!      \------------- stopped by the driver ------/                                        ^
//!                               \--------------------------------------------------------- /
//!
//!   AGREED, by what is in flight:
//!
//!   SENDING -- no acknowledgement in time --> PROBING: the oldest packet goes again, after longer and longer waits;
//!      ^                                         |     after PROBES_QUIET of them nothing else is sent
//!      \----------- an acknowledgement ----------/
//! ```
//!
//! - **Packets** are numbered; each transmission has its own number, so an acknowledgement always says which one arrived.
//! - **Losses** show when later packets have arrived, or when time has passed ([`flight`]). Only the lost parts are sent
//!   again, under new numbers. Nothing else follows from a loss.
//! - **Streams** are independent: a missing packet delays only the streams that have bytes in it. Streams with something to
//!   send take turns (deficit round robin).
//! - **Memory** is bounded by credit: [`STREAM_WINDOW_MAX`] for a stream, [`RECEIVE_MAX`] and [`SEND_MAX`] for the link, plus
//!   [`CREDIT_FIRST`] for each of at most 2 * [`STREAMS_MAX`] streams.
//! - **Pace**: everything that this machine sends passes one token bucket ([`pace`]), acknowledgements first.

mod arrivals;
mod flight;
mod incoming;
mod outgoing;
pub mod pace;
mod ranges;
mod send;
mod stream;

pub use arrivals::{ACK_DELAY_MAX, ACK_SHARE};

use super::frame::{Chunk, Frame, Offer, Paced};
use crate::time::Instant;
use arrivals::Arrivals;
use flight::{Flight, Part, Settled};
use pace::Pace;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use stream::Stream;

/// Most streams that each end opens at a time.
pub const STREAMS_MAX: usize = 1_024;

/// Credit of a new stream, bytes.
pub const CREDIT_FIRST: u32 = 64 << 10;

/// Most bytes of one stream in the memory of the receiver, and in that of the sender.
pub const STREAM_WINDOW_MAX: usize = 8 << 20;

/// Most bytes of all streams that their receiver has granted beyond [`CREDIT_FIRST`].
pub const RECEIVE_MAX: usize = 32 << 20;

/// Most bytes of all streams in the memory of the sender, beyond [`CREDIT_FIRST`] for each.
pub const SEND_MAX: usize = 32 << 20;

/// Bytes that wait to be sent on one stream for at most this time at the rate: more would only make them older.
const UNSENT: Duration = Duration::from_millis(20);

/// Offers follow each other after this time while the other end has not heard one, and after the second one later.
const OFFER_EVERY: Duration = Duration::from_millis(200);
const OFFER_AGAIN: Duration = Duration::from_secs(2);

/// An other end that was agreed with and has sent nothing for this time is gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);

/// After this number of probes without an answer, only probes are sent.
const PROBES_QUIET: u32 = 3;

/// What a paced link is told at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The rate, bits per second, above 0. It counts all bytes of packets, with the headers of UDP and IP.
    pub rate: u64,
    /// Bytes that a datagram adds to a frame, with the headers of UDP and IP.
    pub around_bytes: usize,
    /// This end opens the streams with even names; the other end has the other value.
    pub is_even: bool,
    /// The number of the first packet, the same at both ends.
    pub first: u64,
}

/// What the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A frame of this link came, with this number of bytes.
    Came(Frame, usize),
    /// The driver has sent this number of bytes on the link beside this machine: they count for the rate.
    Spent(usize),
    /// The rate is this from now on, bits per second, above 0.
    Rate(u64),
    /// The deadline may have passed.
    Tick,
    /// The link ends.
    Stop,
}

/// What the driver has to do or to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Streams may be opened from now on. The value is the rate at which the other end sends, bits per second.
    Agreed(u64),
    /// The other end has opened this stream.
    Opened(u32),
    /// There is something to read on this stream: bytes, its end or its reset.
    Readable(u32),
    /// There is room for more bytes on this stream.
    Writable(u32),
    /// The link has ended, and all its streams.
    Down,
}

/// The result of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This number of bytes was read, at least 1.
    Bytes(usize),
    /// There is nothing to read yet; [`Output::Readable`] follows.
    Later,
    /// The other end has closed the stream, and all its bytes were read.
    Ended,
    /// The other end has dropped the stream, or the link is down.
    Broken,
}

/// Counts of one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets with chunks that were sent.
    pub packets: u64,
    /// Bytes of streams that were sent for the first time.
    pub bytes: u64,
    /// Bytes of streams that were sent again.
    pub bytes_again: u64,
    /// Packets that were lost, as it seemed.
    pub lost: u64,
    /// Those of them that were late only.
    pub late: u64,
    /// Acknowledgements that were sent.
    pub acks: u64,
    /// Packets of the other end that were dropped because they broke the protocol or found no room.
    pub refused: u64,
}

/// The state of a link, for operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The counts.
    pub counts: Counts,
    /// True if streams can be opened.
    pub is_agreed: bool,
    /// True if the link has ended.
    pub is_down: bool,
    /// The rate of the other end, bits per second. 0: it has made no offer.
    pub peer_rate: u64,
    /// Streams that are open.
    pub streams: usize,
    /// Bytes that wait to be sent for the first time.
    pub queued_bytes: u64,
    /// Bytes in the memory of both directions.
    pub held_bytes: u64,
    /// How long the bytes that wait need at the rate.
    pub pacing_delay: Duration,
    /// The round trip.
    pub round_trip: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Offering,
    Agreed,
    Down,
}

/// Sums over all streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    /// Bytes in the memory of the sender.
    held: usize,
    /// Bytes that were never sent.
    unsent: usize,
    /// Bytes that the receiver has granted.
    granted: u64,
}

/// One end of a paced link: both directions.
#[derive(Clone, Debug)]
pub struct Link {
    config: Config,
    state: State,
    pace: Pace,
    flight: Flight,
    arrivals: Arrivals,
    streams: BTreeMap<u32, Stream>,
    sums: Sums,
    /// Streams of ours that are open.
    ours: usize,
    /// The names of the next streams; `None`: all names are used.
    next_own: Option<u32>,
    next_peer: Option<u32>,
    /// Streams that wait for their turn.
    active: VecDeque<u32>,
    /// Chunks other than data that wait.
    control: VecDeque<Part>,
    offer_at: Instant,
    peer: Option<Offer>,
    heard_at: Instant,
    /// Room of the latest packet, bytes of a frame.
    room: usize,
    counts: Counts,
    outputs: VecDeque<Output>,
}

impl Link {
    /// Makes one end of a link. It makes offers until the other end answers.
    pub fn new(config: Config, now: Instant) -> Self {
        Self {
            state: State::Offering,
            pace: Pace::new(config.rate, now),
            flight: Flight::new(config.first, now),
            arrivals: Arrivals::new(config.first, now),
            streams: BTreeMap::new(),
            sums: Sums::default(),
            ours: 0,
            next_own: Some(u32::from(!config.is_even)),
            next_peer: Some(u32::from(config.is_even)),
            active: VecDeque::new(),
            control: VecDeque::new(),
            offer_at: now,
            peer: None,
            heard_at: now,
            room: 1_200,
            counts: Counts::default(),
            outputs: VecDeque::new(),
            config,
        }
    }

    /// Returns the next output, or `None`. The driver takes all of them after each call that changes something.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Whether streams can be opened.
    pub fn is_agreed(&self) -> bool {
        self.state == State::Agreed
    }

    /// Returns the state for operators.
    pub fn view(&self) -> View {
        let received: u64 = self.streams.values().map(|stream| stream.incoming.held()).sum();
        View {
            counts: self.counts,
            is_agreed: self.is_agreed(),
            is_down: self.state == State::Down,
            peer_rate: self.peer.map_or(0, |offer| offer.rate),
            streams: self.streams.len(),
            queued_bytes: self.sums.unsent as u64,
            held_bytes: self.sums.held as u64 + received,
            pacing_delay: self.pace.time(self.sums.unsent),
            round_trip: self.flight.round_trip(),
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        if self.state == State::Down {
            return;
        }
        match input {
            Input::Came(frame, bytes) => self.came(now, frame, bytes),
            Input::Spent(bytes) => self.pace.spend(now, bytes),
            Input::Rate(rate) => {
                self.config.rate = rate;
                self.pace.set_rate(rate);
            }
            Input::Stop => return self.down(),
            Input::Tick => {}
        }
        let mut settled = Settled::default();
        self.flight.look(now, &mut settled);
        self.settle(settled);
        let is_silent = self.is_agreed() && now.since(self.heard_at) >= SILENCE_MAX;
        if is_silent || self.flight.silence(now) >= SILENCE_MAX {
            self.down();
        }
    }

    /// Returns when to call [`Link::handle`] with a tick, and then [`Link::transmit`].
    pub fn deadline(&self) -> Option<Instant> {
        if self.state == State::Down {
            return None;
        }
        let around = self.config.around_bytes;
        let offer = self.offer_at.max(self.pace.when(Offer::BYTES + around));
        let ack =
            self.arrivals.due(around).map(|due| due.max(self.pace.when(self.arrivals.bytes() + around)));
        let data = self.has_work().then(|| self.pace.wake(self.room + around));
        let silent = self.is_agreed().then(|| self.heard_at + SILENCE_MAX);
        let probe = self.probe_at().map(|at| at.max(self.pace.when(self.room + around)));
        [Some(offer), ack, data, silent, probe, self.flight.look_at()].into_iter().flatten().min()
    }

    fn came(&mut self, now: Instant, frame: Frame, bytes: usize) {
        match frame {
            Frame::Offer(offer) => self.offered(now, offer),
            Frame::Paced(packet) => {
                if self.accepts(&packet) {
                    self.heard_at = now;
                    self.arrivals.came(now, &packet, bytes);
                    packet.chunks.into_iter().for_each(|chunk| self.chunk(chunk));
                } else {
                    // Without an acknowledgement it comes again, when there may be room.
                    self.counts.refused += 1;
                }
            }
            Frame::PacedAck(ack) => match self.flight.acknowledged(now, &ack) {
                Some(settled) => {
                    self.heard_at = now;
                    self.settle(settled);
                }
                None => self.counts.refused += 1,
            },
            _ => self.counts.refused += 1,
        }
    }

    fn offered(&mut self, now: Instant, offer: Offer) {
        self.heard_at = now;
        let is_first = self.peer.is_none();
        self.peer = Some(offer);
        if is_first || !offer.heard {
            // The answer says that this offer was heard.
            self.offer_at = self.offer_at.min(now);
        }
        if self.state == State::Offering {
            self.state = State::Agreed;
            self.outputs.push_back(Output::Agreed(offer.rate));
        }
    }

    fn is_own(&self, stream: u32) -> bool {
        stream.is_multiple_of(2) == self.config.is_even
    }

    /// Whether all chunks of a packet can be taken.
    fn accepts(&self, packet: &Paced) -> bool {
        // Before an offer of the other end came, its credit is not known.
        self.peer.is_some()
            && packet.chunks.iter().all(|chunk| {
                let name = match chunk {
                    Chunk::Data { stream, .. }
                    | Chunk::End { stream, .. }
                    | Chunk::Reset { stream }
                    | Chunk::Credit { stream, .. } => *stream,
                };
                let Some(stream) = self.streams.get(&name) else {
                    return self.knows(name) || self.may_open(name) && fits_new(chunk);
                };
                match chunk {
                    Chunk::Data { offset, bytes, .. } => stream.incoming.accepts(*offset, bytes.len()),
                    Chunk::End { offset, .. } => stream.incoming.may_end(*offset),
                    Chunk::Reset { .. } | Chunk::Credit { .. } => true,
                }
            })
    }

    /// Whether a stream of this name was there.
    fn knows(&self, name: u32) -> bool {
        let next = if self.is_own(name) { self.next_own } else { self.next_peer };
        next.is_none_or(|next| name < next)
    }

    /// Whether the other end may open this stream now, and with it those of its streams before it.
    fn may_open(&self, name: u32) -> bool {
        let theirs = self.streams.len() - self.ours;
        // An end learns that a stream is over before the other one does: so there is room for twice the number.
        let room = 2 * STREAMS_MAX - theirs.min(2 * STREAMS_MAX);
        let opens = |next: u32| (name - next) as usize / 2 < room;
        !self.is_own(name) && self.next_peer.is_some_and(|next| name >= next && opens(next))
    }

    fn open_theirs(&mut self, name: u32) {
        while let Some(next) = self.next_peer.filter(|next| *next <= name) {
            self.next_peer = next.checked_add(2);
            self.enter(next);
            self.outputs.push_back(Output::Opened(next));
        }
    }

    fn enter(&mut self, name: u32) {
        let limit = self.peer.map_or(CREDIT_FIRST, |offer| offer.credit);
        self.streams.insert(name, Stream::new(limit.into(), CREDIT_FIRST.into()));
        self.sums.granted += u64::from(CREDIT_FIRST);
        self.grant(name);
    }

    fn chunk(&mut self, chunk: Chunk) {
        match chunk {
            Chunk::Data { stream, offset, bytes } => {
                self.open_theirs_if_new(stream);
                let is_readable = self.with(stream, |stream| stream.incoming.data(offset, &bytes));
                if is_readable == Some(true) {
                    self.outputs.push_back(Output::Readable(stream));
                }
                if self.streams.get(&stream).is_some_and(Stream::is_left) {
                    self.grant(stream);
                }
            }
            Chunk::End { stream, offset } => {
                self.open_theirs_if_new(stream);
                self.with(stream, |stream| stream.peer_ended(offset));
                self.over(stream);
            }
            Chunk::Reset { stream } => {
                self.open_theirs_if_new(stream);
                self.with(stream, Stream::peer_reset);
                self.over(stream);
            }
            Chunk::Credit { stream, limit } => {
                self.open_theirs_if_new(stream);
                if self.with(stream, |stream| stream.out.credit(limit)) == Some(true) {
                    self.activate(stream);
                }
            }
        }
    }

    fn open_theirs_if_new(&mut self, name: u32) {
        if !self.is_own(name) {
            self.open_theirs(name);
        }
    }

    /// The other end's half of a stream is over.
    fn over(&mut self, name: u32) {
        for output in [Output::Readable(name), Output::Writable(name)] {
            self.outputs.push_back(output);
        }
        self.end_if_due(name);
        self.reap(name);
    }

    /// Changes a stream and keeps the sums right.
    fn with<R>(&mut self, name: u32, change: impl FnOnce(&mut Stream) -> R) -> Option<R> {
        let stream = self.streams.get_mut(&name)?;
        let before = Sums::of(stream);
        let result = change(stream);
        self.sums.add(&before, &Sums::of(stream));
        Some(result)
    }

    fn reap(&mut self, name: u32) {
        if self.streams.get(&name).is_some_and(Stream::is_over)
            && let Some(stream) = self.streams.remove(&name)
        {
            self.sums.add(&Sums::of(&stream), &Sums::default());
            self.ours -= usize::from(self.is_own(name));
        }
    }

    /// Grants credit to a stream, as much as its share of the link's memory allows.
    fn grant(&mut self, name: u32) {
        let share = RECEIVE_MAX / self.streams.len().max(1);
        let share = share.clamp(CREDIT_FIRST as usize, STREAM_WINDOW_MAX) as u64;
        let spare = (RECEIVE_MAX as u64).saturating_sub(self.sums.granted);
        let granted = self.with(name, |stream| {
            let window = share.min(stream.incoming.granted() + spare).max(CREDIT_FIRST.into());
            let is_told = stream.incoming.grant(window) && !stream.credit_is_queued;
            stream.credit_is_queued |= is_told;
            is_told
        });
        if granted == Some(true) {
            self.control.push_back(Part::Credit(name));
        }
    }

    fn settle(&mut self, settled: Settled) {
        self.counts.lost += settled.lost_packets;
        self.counts.late += settled.late_packets;
        for part in settled.arrived {
            let (Part::Data(name, ..) | Part::End(name) | Part::Reset(name) | Part::Credit(name)) = part;
            self.with(name, |stream| match part {
                Part::Data(_, from, to) => stream.out.arrived(from, to),
                Part::End(_) => stream.end_arrived(),
                Part::Reset(_) => stream.reset_arrived(),
                Part::Credit(_) => {}
            });
            self.tell_room(name);
            self.reap(name);
        }
        for part in settled.lost {
            match part {
                Part::Data(name, from, to) => {
                    self.with(name, |stream| stream.out.lost(from, to));
                    self.activate(name);
                }
                Part::End(name) => {
                    self.with(name, Stream::end_was_lost);
                    self.end_if_due(name);
                }
                Part::Reset(_) => self.control.push_back(part),
                Part::Credit(name) => {
                    let is_told = |stream: &mut Stream| std::mem::replace(&mut stream.credit_is_queued, true);
                    if self.with(name, is_told) == Some(false) {
                        self.control.push_back(part);
                    }
                }
            }
        }
    }

    fn tell_room(&mut self, name: u32) {
        let room = self.room_of(name);
        if let Some(stream) = self.streams.get_mut(&name)
            && stream.wants_room
            && room > 0
        {
            stream.wants_room = false;
            self.outputs.push_back(Output::Writable(name));
        }
    }

    fn down(&mut self) {
        self.state = State::Down;
        self.streams.clear();
        (self.active, self.control, self.sums) = (VecDeque::new(), VecDeque::new(), Sums::default());
        self.ours = 0;
        self.outputs.push_back(Output::Down);
    }
}

/// Whether a chunk may be the first one of a stream.
fn fits_new(chunk: &Chunk) -> bool {
    match chunk {
        Chunk::Data { offset, bytes, .. } => offset.saturating_add(bytes.len() as u64) <= CREDIT_FIRST.into(),
        _ => true,
    }
}

impl Sums {
    fn of(stream: &Stream) -> Self {
        Self { held: stream.out.held(), unsent: stream.out.unsent(), granted: stream.incoming.granted() }
    }

    fn add(&mut self, before: &Self, after: &Self) {
        self.held = self.held + after.held - before.held;
        self.unsent = self.unsent + after.unsent - before.unsent;
        self.granted = self.granted + after.granted - before.granted;
    }
}
