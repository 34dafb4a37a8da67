//! Detects whether a neighbour is reachable, and measures the quality of the link to it.
//!
//! Both ends of a link send hellos at a steady pace. In each hello an end says whether it hears the other end. This is the
//! state machine of BFD (RFC 5880 Sec. 6.2) without its authentication and echo functions: a link that carries bytes in one
//! direction only never comes up. Hellos never wait in a queue behind data.
//!
//! ```text
//!            [Down] (1)                 [Init] or [Up]
//!   Down -------------------> Init ----------------------------> Up
//!    |                                                           ^
//!    |                       [Init] (1)                          |
//!    +-----------------------------------------------------------+
//!
//!   Init or Up --- silence ---> Down
//!   Up ------------ [Down] ---> Down
//!
//!   [State]: a hello arrived in which the neighbour reports this state.   (1): after `up_after` hellos in a row.
//! ```
//!
//! *Silence*: no hello and no other sign of life for `missed` intervals, or no hello for `starved`. A hello with state Up
//! does not bring up an end that is Down: the neighbour has not noticed yet that this end began anew.
//!
//! A hello travels on one of two lanes:
//!
//! - The *stream* is the control connection. A lost segment delays all hellos behind it until the kernel has retransmitted it,
//!   so a silence of a few hundred milliseconds proves nothing.
//! - *Datagrams* do not wait for each other. While the neighbour's echoes show that it receives them, hellos go in datagrams at a
//!   shorter interval. A cut link is noticed after a few intervals, and the missing hellos give the loss of the link.
//!
//! Where no datagram passes, all hellos travel on the stream.

mod quality;
#[cfg(test)]
mod tests;

pub use quality::Quality;

use super::frame::{Hello, LinkState};
use crate::time::Instant;
use quality::{Arrivals, Order};
use std::collections::VecDeque;
use std::time::Duration;

/// The interval of hellos, and how many may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Time between two hellos, 10 to 1000 ms.
    pub interval: Duration,
    /// The link goes down after this number of intervals without a sign of life. At least 2.
    pub missed: u32,
}

/// Times and counts of a detector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The pace on the stream.
    pub stream: Pace,
    /// The pace in datagrams, while they arrive. `None`: no datagrams are sent.
    pub datagrams: Option<Pace>,
    /// The link goes down after this time without a hello, even if the neighbour shows other signs of life
    /// ([`Input::Alive`]). A process without CPU time sends no hellos, but its kernel keeps its connections alive.
    pub starved: Duration,
    /// A link that is down comes up only after this number of hellos in a row.
    pub up_after: u32,
}

impl Default for Config {
    /// Default: a hello each 40 ms. A link that falls silent is down after 160 ms at most, and an idle link carries
    /// about 2 kB/s each way.
    fn default() -> Self {
        Self {
            stream: Pace { interval: Duration::from_millis(40), missed: 4 },
            datagrams: None,
            starved: Duration::from_secs(2),
            up_after: 2,
        }
    }
}

/// What a hello travels on: the control connection or a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The control connection.
    Stream,
    /// A datagram of its own.
    Datagram,
}

/// The lanes that one hello is sent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// The control connection alone.
    Stream,
    /// A datagram alone.
    Datagram,
    /// Both.
    Both,
}

impl Lanes {
    /// Whether the hello is sent on this lane.
    pub fn has(self, lane: Lane) -> bool {
        matches!(
            (self, lane),
            (Self::Both, _) | (Self::Stream, Lane::Stream) | (Self::Datagram, Lane::Datagram)
        )
    }
}

/// The bounds of the interval that a neighbour may announce, in ms.
const INTERVAL_MS: std::ops::RangeInclusive<u16> = 10..=1000;

/// The number of hellos whose send times are stored. The echo of an older hello is not measured.
const SENT_MAX: usize = 64;

/// While datagrams arrive, one of this number of hellos goes on the stream, too. It keeps the connection open in NATs
/// and firewalls, and shows whether the connection still works.
const STREAM_EVERY: u32 = 16;

/// While no datagram arrives, one datagram hello is tried for each of this number of hellos on the stream.
const TRY_EVERY: u32 = 4;

/// An event that the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A hello of the neighbour arrived.
    Hello(Hello, Lane),
    /// The packet loss of the path before retransmission, in parts per million, if the driver measures it.
    Loss(u32),
    /// The neighbour gave another sign of life this long ago: its kernel acknowledged data, or other data came from it. This
    /// shows that the path works, not that the neighbour's process runs.
    Alive(Duration),
    /// The deadline may have passed. The driver has reported all input that had arrived before.
    Tick,
}

/// Since when a neighbour is silent. Time in which this process did not run does not count: a hello that arrived
/// meanwhile may still wait in the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Silence {
    /// When the last hello came.
    hello: Instant,
    /// When the last sign of life of any kind came.
    any: Instant,
    /// This process was late once since then, and the neighbour got extra time for that.
    has_grace: bool,
    /// A hello was sent on both lanes at once when the silence was first noticed.
    asked: bool,
}

/// What the driver has to do or to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send this hello on these lanes.
    Send(Hello, Lanes),
    /// The link is up.
    Up,
    /// The link is down.
    Down,
}

/// The detector of one link.
#[derive(Clone, Debug)]
pub struct Detector {
    config: Config,
    state: LinkState,
    sequence: u32,
    round: u32,
    sent: VecDeque<(u32, Instant, Lanes)>,
    next_hello: Instant,
    /// The latest hello heard: its sequence and when it came.
    heard: Option<(u32, Instant)>,
    order: Order,
    /// `None` until the first hello was heard.
    silence: Option<Silence>,
    heard_in_a_row: u32,
    peer_interval: Duration,
    /// When the neighbour last showed that it hears our datagrams.
    reached: Option<Instant>,
    /// The neighbour's echoes are old: it last heard this end more than two intervals ago.
    unheard: bool,
    arrivals: Arrivals,
    /// The driver measures the loss ([`Input::Loss`]).
    loss_is_told: bool,
    quality: Quality,
    outputs: VecDeque<Output>,
}

impl Detector {
    /// Makes a detector for a link on which nothing was heard yet. The first hello is sent at once.
    pub fn new(config: Config, now: Instant) -> Self {
        Self {
            config,
            state: LinkState::Down,
            sequence: 0,
            round: 0,
            sent: VecDeque::new(),
            next_hello: now,
            heard: None,
            order: Order::default(),
            silence: None,
            heard_in_a_row: 0,
            peer_interval: config.stream.interval,
            reached: None,
            unheard: false,
            arrivals: Arrivals::default(),
            loss_is_told: false,
            quality: Quality::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Whether both ends hear each other.
    pub fn is_up(&self) -> bool {
        self.state == LinkState::Up
    }

    /// Returns the measured quality of the link.
    pub fn quality(&self) -> Quality {
        self.quality
    }

    /// Whether the neighbour hears our datagrams.
    pub fn reaches_by_datagram(&self, now: Instant) -> bool {
        self.reached.is_some_and(|at| now.since(at) < self.config.starved)
    }

    /// Whether the neighbour has been silent for longer than usual. The driver then looks for other signs of life and reports
    /// them as [`Input::Alive`].
    pub fn is_suspect(&self, now: Instant) -> bool {
        self.suspect_at().is_some_and(|at| at <= now)
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        // First: time in which this process did not run must not count as the neighbour's silence.
        self.excuse(now);
        match input {
            Input::Hello(hello, lane) => self.hello(now, &hello, lane),
            Input::Loss(ppm) => {
                self.loss_is_told = true;
                self.quality.loss_ppm = ppm.min(1_000_000);
            }
            Input::Alive(ago) => self.alive(now, ago),
            Input::Tick => {}
        }
        if self.silent_at().is_some_and(|at| at <= now) {
            (self.heard, self.silence, self.reached) = (None, None, None);
            self.heard_in_a_row = 0;
            // A neighbour that restarted begins again with low sequence numbers: they must not look old.
            self.order.forget();
            self.arrivals.pause();
            self.go(LinkState::Down);
        }
        if self.next_hello <= now || self.has_to_ask(now) {
            self.send(now);
        }
    }

    /// Returns the next output, or `None` if there is none.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Instant {
        let ask = self.suspect_at().filter(|_| self.silence.is_some_and(|silence| !silence.asked));
        [self.silent_at(), ask].into_iter().flatten().fold(self.next_hello, Instant::min)
    }

    /// When the neighbour will have been silent for too long.
    fn silent_at(&self) -> Option<Instant> {
        let silence = self.silence?;
        Some((silence.any + self.patience()).min(silence.hello + self.config.starved.max(self.patience())))
    }

    /// When the neighbour becomes suspect: shortly after a hello was due.
    fn suspect_at(&self) -> Option<Instant> {
        Some(self.silence?.any + self.peer_interval * 4 / 3)
    }

    fn has_to_ask(&self, now: Instant) -> bool {
        self.silence.is_some_and(|silence| !silence.asked) && self.is_suspect(now)
    }

    /// How long a neighbour may be silent before its link goes down.
    fn patience(&self) -> Duration {
        let pace = self.config.datagrams.filter(|_| self.hears_datagrams()).unwrap_or(self.config.stream);
        self.peer_interval.max(pace.interval) * pace.missed.max(2)
    }

    /// Whether the neighbour sends its hellos in datagrams.
    fn hears_datagrams(&self) -> bool {
        self.config.datagrams.is_some_and(|pace| self.peer_interval <= pace.interval)
    }

    /// Returns the interval of our own hellos now.
    fn interval(&self, now: Instant) -> Duration {
        let brisk = self.config.datagrams.filter(|_| self.reaches_by_datagram(now));
        brisk.unwrap_or(self.config.stream).interval
    }

    /// Subtracts the time in which this process did not run from the neighbour's silence. Hellos of that time may
    /// still wait in the socket, so the first such delay leaves two intervals to read them.
    fn excuse(&mut self, now: Instant) {
        let (late, interval) = (now.since(self.deadline()), self.interval(now));
        let Some(silence) = self.silence.filter(|_| late > interval) else { return };
        // Moves a point in time forward, so that the silence since then is shorter by `late`.
        let excused = |since: Instant, patience: Duration| {
            let silent = (now - since).saturating_sub(late);
            let most = patience.saturating_sub(interval * 2);
            let counted = if silence.has_grace { silent } else { silent.min(most) };
            since + (now - since).saturating_sub(counted)
        };
        self.silence = Some(Silence {
            hello: excused(silence.hello, self.config.starved.max(self.patience())),
            any: excused(silence.any, self.patience()),
            has_grace: true,
            asked: silence.asked,
        });
    }

    fn alive(&mut self, now: Instant, ago: Duration) {
        let Some(silence) = &mut self.silence else { return };
        if now - silence.any > ago {
            silence.any = silence.any + (now - silence.any).saturating_sub(ago);
            (silence.has_grace, silence.asked) = (false, false);
        }
    }

    fn send(&mut self, now: Instant) {
        let (interval, is_suspect) = (self.interval(now), self.is_suspect(now));
        // Count from the moment the hello was due, so that the interval does not drift. After a long delay count from
        // now.
        let next = self.next_hello + interval;
        self.next_hello = if self.next_hello <= now && next > now { next } else { now + interval };
        if let Some(silence) = self.silence.as_mut().filter(|_| is_suspect) {
            silence.asked = true;
        }
        self.round = self.round.wrapping_add(1);
        if self.config.datagrams.is_none() {
            self.say(now, Lanes::Stream);
        } else if self.reaches_by_datagram(now) {
            let is_both = is_suspect || self.unheard || self.round.is_multiple_of(STREAM_EVERY);
            self.say(now, if is_both { Lanes::Both } else { Lanes::Datagram });
        } else {
            self.say(now, Lanes::Stream);
            if self.round % TRY_EVERY == 1 {
                // This datagram has its own sequence: if the neighbour echoes it, the datagram has arrived.
                self.say(now, Lanes::Datagram);
            }
        }
    }

    fn say(&mut self, now: Instant, lanes: Lanes) {
        self.sequence = self.sequence.wrapping_add(1);
        if self.sent.len() >= SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((self.sequence, now, lanes));
        let echo = self
            .heard
            .map(|(sequence, at)| (sequence, u32::try_from(now.since(at).as_micros()).unwrap_or(u32::MAX)));
        let interval_ms = u16::try_from(self.interval(now).as_millis()).unwrap_or(u16::MAX);
        let hello = Hello { state: self.state, sequence: self.sequence, interval_ms, echo };
        self.outputs.push_back(Output::Send(hello, lanes));
    }

    fn hello(&mut self, now: Instant, hello: &Hello, lane: Lane) {
        self.count(hello, lane);
        if self.order.step(hello.sequence).is_none() {
            // An old or repeated hello has no new information.
            return;
        }
        self.heard = Some((hello.sequence, now));
        self.silence = Some(Silence { hello: now, any: now, has_grace: false, asked: false });
        self.heard_in_a_row = self.heard_in_a_row.saturating_add(1);
        self.peer_interval = interval_of(hello);
        self.measure(now, hello.echo);
        let enough = self.heard_in_a_row >= self.config.up_after;
        match (self.state, hello.state) {
            (LinkState::Down, LinkState::Down) if enough => self.go(LinkState::Init),
            (LinkState::Down, LinkState::Init) if enough => self.go(LinkState::Up),
            (LinkState::Init, LinkState::Init | LinkState::Up) => self.go(LinkState::Up),
            // The other end no longer hears this end, or has restarted.
            (LinkState::Up, LinkState::Down) => self.go(LinkState::Down),
            _ => {}
        }
    }

    /// Counts the hellos of the lane that shows loss: datagrams if they are used, otherwise the stream.
    fn count(&mut self, hello: &Hello, lane: Lane) {
        match self.config.datagrams {
            None => self.arrivals.note(hello.sequence),
            Some(pace) if interval_of(hello) > pace.interval => self.arrivals.pause(),
            Some(_) if lane == Lane::Datagram => self.arrivals.note(hello.sequence),
            Some(_) => {}
        }
        if !self.loss_is_told {
            self.quality.loss_ppm = self.arrivals.loss_ppm();
        }
    }

    fn measure(&mut self, now: Instant, echo: Option<(u32, u32)>) {
        let Some((sequence, delay_us)) = echo else { return };
        let delay = Duration::from_micros(delay_us.into());
        self.unheard = delay > self.interval(now) * 2;
        let Some(at) = self.sent.iter().position(|(sent, ..)| *sent == sequence) else { return };
        let (_, since, lanes) = self.sent[at];
        // Each hello is measured once: a repeated echo arrives later and would give a longer round trip.
        self.sent.drain(..=at);
        if let Some(rtt) = now.since(since).checked_sub(delay) {
            self.quality.measured(u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX));
        }
        if lanes == Lanes::Datagram {
            self.reached = Some(now);
        }
    }

    fn go(&mut self, state: LinkState) {
        let before = std::mem::replace(&mut self.state, state);
        match (before, state) {
            (LinkState::Up, LinkState::Down) => self.outputs.push_back(Output::Down),
            (LinkState::Down | LinkState::Init, LinkState::Up) => self.outputs.push_back(Output::Up),
            _ => {}
        }
    }
}

fn interval_of(hello: &Hello) -> Duration {
    Duration::from_millis(hello.interval_ms.clamp(*INTERVAL_MS.start(), *INTERVAL_MS.end()).into())
}
