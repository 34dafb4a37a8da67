//! One end of a session: carries the bytes of one flow in both directions, in order and each exactly once, over one or several
//! changing paths.
//!
//! An end buffers the bytes of its application until the other end has received them. When a path dies, the other end says on
//! the next path which byte it expects, and this end continues there. The promise: **the application sees a FIN only after the
//! far application's kernel has accepted every byte** that the application had sent by then. If that never happens, it sees a
//! reset. Credit runs from the receiving application to the sending one, so no end buffers more than its window.
//!
//! Paths that keep order and lose nothing ([`Config::retransmit`] is `None`) need no recovery here. On other paths missing
//! pieces are requested and retransmitted one by one, never a whole window.
//!
//! With several paths ([`Mode`]) the paths keep order and lose nothing while they exist; the picture of one path is at the head
//! of `lanes.rs`. Striped data that was on a path that died, and striped data that is on its way for too long, is sent on the
//! other paths. The receiver puts the data in order in its window, and at most [`PIECES_MAX`] pieces of it.
//!
//! ```text
//!                      both directions are complete
//!        Open ----------------------------------------> Lingering
//!         |  |                                              |
//!         |  | Reset frame from the other end               | Done sent and received,
//!         |  +----------> ResetByPeer                       | or `path_timeout` is over
//!         |                   | what came before it         |
//!         | our application   | is delivered, or `linger`   |
//!         | resets, or the    | is over                     |
//!         | other end breaks  v                             v
//!         | the protocol   Closing <------------------------+
//!         v                   ^  |
//!     Resetting --------------+  | `Output::Closed` is taken
//!                Reset is sent,  v
//!                or `linger`   Closed
//!                is over
//! ```
//!
//! Exceptions to the picture: an end that is Open for `path_timeout` without a path goes to Closing (`PathLost`). On paths
//! that lose data, Resetting waits for an answer and repeats its Reset until `linger` is over. A Reset frame ends Resetting
//! and Lingering at once; a reset of our application ends Lingering and `ResetByPeer` at once.

mod attempt;
mod lanes;
mod outputs;
mod pace;
mod receive;
mod send;
mod state;

pub use attempt::Attempt;
pub use lanes::{Mode, PATHS_MAX, PathSet};
pub use receive::PIECES_MAX;
pub use state::StateError;

use super::frame::{Ack, DATA_MAX, ResetReason, SessionFrame};
use crate::time::Instant;
use lanes::Lanes;
use receive::{Gaps, Receiver};
use send::Sender;
use std::time::Duration;

/// Bounds of one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The window towards the other end at the beginning, in bytes. At least [`Config::WINDOW_MIN`]. Default: 256
    /// KiB.
    pub window_bytes: u32,
    /// The window grows up to this number of bytes. It grows while the application takes all data, and a whole window
    /// arrives within two seconds. Default: 32 MiB.
    pub window_max_bytes: u32,
    /// Most bytes of our application that are buffered until the other end has them. Default: 32 MiB.
    pub keep_max_bytes: u32,
    /// Time without an answer after which frames are retransmitted. `None`: paths lose nothing while they exist.
    pub retransmit: Option<Duration>,
    /// The session ends after this time without a path. Default: 15 s.
    pub path_timeout: Duration,
    /// The most time for delivering the bytes that came before a reset. Default: 2 s.
    pub linger: Duration,
}

impl Config {
    /// Smallest window, in bytes: two data frames.
    pub const WINDOW_MIN: u32 = 32_768;
}

impl Default for Config {
    /// The defaults suit reliable paths. 32 MiB carry 1 Gbit/s over a lossy path with a round trip of 64 ms. Data
    /// behind a lost segment waits in the kernel for the retransmission, which may be lost, too. So three and a half
    /// round trips of data can be in flight.
    fn default() -> Self {
        Self {
            window_bytes: 262_144,
            window_max_bytes: 33_554_432,
            keep_max_bytes: 33_554_432,
            retransmit: None,
            path_timeout: Duration::from_secs(15),
            linger: Duration::from_secs(2),
        }
    }
}

/// An event that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A path is established. The other end expects byte `next`, and this end may send bytes before `limit`. A path that had
    /// this number before is gone. With [`Mode::Shortest`], every other path is gone, too.
    PathUp {
        /// The number of the path, below [`PATHS_MAX`].
        path: u8,
        /// The next byte (or the FIN behind the last) that the other end expects.
        next: u64,
        /// The credit.
        limit: u64,
    },
    /// The path with this number is gone.
    PathDown(u8),
    /// A frame of the other end arrived on this path.
    Frame(u8, SessionFrame),
    /// The other end uses several paths in this way, so this end does so, too. It has no effect after the first time.
    Mode(Mode),
    /// The application sent these bytes; no more than [`Session::room`].
    Read(Vec<u8>),
    /// The application sent FIN.
    Eof,
    /// This number of bytes of [`Session::deliverable`] was written to the application.
    Written(usize),
    /// The application's kernel has accepted all bytes before this one.
    Confirmed(u64),
    /// The application reset its connection, or the node ends the session.
    Reset(ResetReason),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send this along the path with this number.
    Send(u8, SessionFrame),
    /// Send the data that begins at this offset ([`Session::data`]) along this path.
    SendData {
        /// The number of the path.
        path: u8,
        /// The position of its first byte in the flow.
        offset: u64,
    },
    /// Send FIN to the application.
    Fin,
    /// The session is over. No output follows.
    Closed(Option<ResetReason>),
}

/// The state of an end; see the diagram at the head of this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// This end was reset. It tells the other end, and then the session is over.
    Resetting(ResetReason, Instant),
    /// The other end was reset. Its earlier bytes are delivered first.
    ResetByPeer {
        offset: u64,
        reason: ResetReason,
        until: Instant,
    },
    /// Both directions are complete; the other end may still need our acknowledgements.
    Lingering(Instant),
    Closing(Option<ResetReason>),
    Closed,
}

/// One end of a session.
#[derive(Clone, Debug)]
pub struct Session {
    config: Config,
    mode: Mode,
    phase: Phase,
    now: Instant,
    /// Since when there is no path. `None`: there is a path.
    pathless_since: Option<Instant>,
    send: Sender,
    receive: Receiver,
    lanes: Lanes,
    /// The other end is told what came on each path.
    tells: bool,
    done_came: bool,
    /// When unanswered frames are sent again on a path that loses data.
    repeat_at: Option<Instant>,
}

impl Session {
    /// Makes an end without a path.
    pub fn new(config: Config, now: Instant) -> Self {
        let window = config.window_bytes.max(Config::WINDOW_MIN);
        let config =
            Config { window_bytes: window, window_max_bytes: config.window_max_bytes.max(window), ..config };
        Self {
            config,
            mode: Mode::Shortest,
            phase: Phase::Open,
            now,
            pathless_since: Some(now),
            send: Sender::new(config.keep_max_bytes),
            receive: Receiver::new(&config, now),
            lanes: Lanes::new(),
            tells: false,
            done_came: false,
            repeat_at: None,
        }
    }

    /// Makes an end without a path that uses its paths in this way. They have to keep order and lose nothing if it is not
    /// [`Mode::Shortest`]: [`Config::retransmit`] has no effect then.
    pub fn with_mode(config: Config, mode: Mode, now: Instant) -> Self {
        let retransmit = config.retransmit.filter(|_| mode == Mode::Shortest);
        Self { mode, tells: mode != Mode::Shortest, ..Self::new(Config { retransmit, ..config }, now) }
    }

    /// Returns how this end uses its paths.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the number of bytes that may be read from the application now.
    pub fn room(&self) -> usize {
        if matches!(self.phase, Phase::Open) { self.send.room() } else { 0 }
    }

    /// Returns bytes for the application, in order. Empty if there are none now. Report written bytes with
    /// [`Input::Written`].
    pub fn deliverable(&self) -> &[u8] {
        if matches!(self.phase, Phase::Open | Phase::ResetByPeer { .. }) {
            self.receive.deliverable()
        } else {
            &[]
        }
    }

    /// Returns the data of [`Output::SendData`]. Empty if it has been acknowledged meanwhile.
    pub fn data(&self, offset: u64) -> &[u8] {
        self.send.data(offset)
    }

    /// Returns the next byte that this end expects, and the limit of the other end. A new path is opened with them.
    pub fn expects(&self) -> (u64, u64) {
        (self.receive.next(), self.receive.told_limit())
    }

    /// Number of bytes written to the application so far.
    pub fn delivered(&self) -> u64 {
        self.receive.delivered()
    }

    /// Returns the number of bytes read from the application so far, and how many of them the far application's
    /// kernel has accepted.
    pub fn sent(&self) -> (u64, u64) {
        (self.send.end(), self.send.confirmed())
    }

    /// Whether the other end waits for the confirmation that the application's kernel has accepted all delivered
    /// bytes. If so, the driver checks the socket and reports [`Input::Confirmed`].
    pub fn wants_confirmation(&self) -> bool {
        matches!(self.phase, Phase::Open)
            && self.receive.delivered() > self.receive.confirmed()
            && (self.send.has_fin() || self.receive.has_fin())
    }

    /// Whether there is a path.
    pub fn has_path(&self) -> bool {
        self.pathless_since.is_none()
    }

    /// Whether the session would continue over a new path.
    pub fn wants_path(&self) -> bool {
        !self.has_path() && !matches!(self.phase, Phase::Closing(_) | Phase::Closed)
    }

    /// Limits the buffers of each direction from now on, because memory is short. Credit that was granted stays
    /// granted.
    pub fn set_memory_max(&mut self, bytes: u32) {
        self.receive.set_window_max(bytes.min(self.config.window_max_bytes));
        self.send.set_keep_max(bytes.min(self.config.keep_max_bytes));
    }

    /// Returns when to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Option<Instant> {
        let phase = match self.phase {
            Phase::Open | Phase::Closing(_) => None,
            Phase::Resetting(_, until) | Phase::ResetByPeer { until, .. } | Phase::Lingering(until) => {
                Some(until)
            }
            Phase::Closed => return None,
        };
        let pathless = self.pathless_since.map(|since| since + self.config.path_timeout);
        let repeat = self.repeat_at.filter(|_| self.has_path());
        let lanes = self.lanes.deadline(self.now, self.tells, self.mode == Mode::Stripe);
        [phase, pathless, repeat, lanes].into_iter().flatten().min()
    }

    /// Handles one event. An event that does not fit the state is ignored.
    pub fn handle(&mut self, now: Instant, input: Input) {
        self.now = now;
        if matches!(self.phase, Phase::Closing(_) | Phase::Closed) {
            return;
        }
        match input {
            Input::PathUp { path, next, limit } => self.path_up(path, next, limit),
            Input::PathDown(path) => self.path_down(path),
            Input::Frame(path, frame) => self.frame(path, frame),
            Input::Mode(mode) => self.change_mode(mode),
            Input::Read(bytes) => {
                if matches!(self.phase, Phase::Open) {
                    self.send.read(bytes);
                }
            }
            Input::Eof => self.send.fin(),
            Input::Written(n) => self.receive.written(n, now),
            Input::Confirmed(offset) => self.receive.confirm(offset),
            Input::Reset(reason) => self.reset(reason),
            Input::Tick => {}
        }
        self.tick();
        self.settle();
    }

    fn arm(&mut self) {
        if let Some(retransmit) = self.config.retransmit {
            self.repeat_at.get_or_insert(self.now + retransmit);
        }
    }

    // A protocol error of the other end resets the session: it asks for bytes that were never sent or, on its only path, are
    // acknowledged.
    fn path_up(&mut self, path: u8, next: u64, limit: u64) {
        let is_fair = match self.mode {
            Mode::Shortest => self.send.rewind(next, limit),
            // What was on a path that died is in the hands of the others, so nothing is rewound.
            Mode::Stripe | Mode::Duplicate => {
                self.path_down(path);
                self.send.catch_up(next, limit)
            }
        };
        if !is_fair {
            return self.reset(ResetReason::Protocol);
        }
        if self.mode == Mode::Shortest {
            self.lanes.lower_all();
        }
        // The other end may not know yet that this end uses several paths. It tells what arrived when it has heard the same.
        let tell = (self.mode != Mode::Shortest).then_some(self.now);
        self.lanes.raise(path, next, tell);
        self.pathless_since = None;
        self.receive.must_ack();
        self.arm();
    }

    fn path_down(&mut self, path: u8) {
        for (offset, bytes) in self.lanes.lower(path) {
            if self.mode == Mode::Stripe {
                self.send.lost(offset, bytes);
            }
        }
        if self.lanes.has_any() {
            // An acknowledgement may have been lost with the path.
            self.receive.must_ack();
        } else {
            self.pathless_since.get_or_insert(self.now);
        }
    }

    fn change_mode(&mut self, mode: Mode) {
        if self.mode != Mode::Shortest || mode == Mode::Shortest {
            return;
        }
        (self.mode, self.tells) = (mode, true);
        if !self.lanes.has_any() {
            // What was on the path that died is sent again: only one path rewinds by itself.
            self.send.rewind_to_acked();
        }
    }

    fn frame(&mut self, path: u8, frame: SessionFrame) {
        let is_fair = match frame {
            SessionFrame::Data { offset, bytes } => {
                self.lanes.came(path, bytes.len(), self.now);
                self.receive.data(offset, bytes, self.gaps())
            }
            SessionFrame::Arrived { bytes } => {
                self.tells = true;
                self.lanes.arrived(path, bytes, self.now)
            }
            SessionFrame::Fin { offset } => {
                // Note only the first FIN: a repeated one must not add to the bytes that must be confirmed before
                // it is passed on.
                let mark = !self.receive.has_fin();
                let is_fair = self.receive.fin(offset);
                if mark {
                    self.send.mark();
                }
                is_fair
            }
            SessionFrame::Ack(ack) => self.ack(&ack),
            SessionFrame::Reset { offset, reason } => {
                if matches!(self.phase, Phase::Open) {
                    let until = self.now + self.config.linger;
                    self.phase = Phase::ResetByPeer { offset, reason, until };
                } else if !matches!(self.phase, Phase::ResetByPeer { .. }) {
                    self.phase = Phase::Closing(Some(reason));
                }
                true
            }
            SessionFrame::Done => {
                self.done_came = true;
                true
            }
        };
        if !is_fair {
            self.reset(ResetReason::Protocol);
        }
    }

    fn gaps(&self) -> Gaps {
        match (self.mode, self.config.retransmit) {
            (Mode::Shortest, None) => Gaps::None,
            (Mode::Shortest, Some(_)) => Gaps::Lossy,
            (Mode::Stripe | Mode::Duplicate, _) => Gaps::Paths,
        }
    }

    fn ack(&mut self, ack: &Ack) -> bool {
        let is_news = self.send.acked() < ack.next;
        let is_fair = self.send.ack(ack);
        if self.mode == Mode::Shortest {
            self.lanes.acked(self.send.acked());
        }
        if let Some(retransmit) = self.config.retransmit {
            if is_news {
                self.repeat_at = Some(self.now + retransmit);
            }
            self.send.fill_hole(ack.hole_end, self.now, retransmit / 2);
        }
        is_fair
    }

    fn reset(&mut self, reason: ResetReason) {
        match self.phase {
            // The other end was reset before, so it need not be told.
            Phase::ResetByPeer { reason, .. } => self.phase = Phase::Closing(Some(reason)),
            // Both directions were complete before, so nothing was lost.
            Phase::Lingering(_) => self.phase = Phase::Closing(None),
            Phase::Open => self.phase = Phase::Resetting(reason, self.now + self.config.linger),
            _ => {}
        }
    }

    fn tick(&mut self) {
        let now = self.now;
        match self.phase {
            Phase::Lingering(until) if until <= now => self.phase = Phase::Closing(None),
            Phase::Resetting(reason, until) if until <= now => self.phase = Phase::Closing(Some(reason)),
            Phase::ResetByPeer { reason, until, .. } if until <= now => {
                self.phase = Phase::Closing(Some(reason))
            }
            Phase::Open
                if self.pathless_since.is_some_and(|since| since + self.config.path_timeout <= now) =>
            {
                self.phase = Phase::Closing(Some(ResetReason::PathLost));
            }
            _ => {}
        }
        // The other end was silent for too long: repeat what it may have missed, and our acknowledgement.
        if self.has_path() && self.repeat_at.is_some_and(|at| at <= now) {
            self.repeat_at = None;
            self.lanes.repeat_last();
            self.send.repeat();
            self.receive.must_ack();
            self.arm();
        }
    }

    /// Changes the state if nothing is left to do in the present one.
    fn settle(&mut self) {
        match self.phase {
            Phase::Open if self.send.is_complete() && self.receive.is_complete() => {
                // The other end may look for a new path for this time, because our last frames may not have reached it.
                self.phase = Phase::Lingering(self.now + self.config.path_timeout);
            }
            Phase::Lingering(_) if self.done_came && self.lanes.all(|lane| lane.done_sent) => {
                self.phase = Phase::Closing(None);
            }
            Phase::ResetByPeer { offset, reason, .. }
                if self.receive.deliverable().is_empty() && self.receive.next() >= offset =>
            {
                self.phase = Phase::Closing(Some(reason));
            }
            _ => {}
        }
    }
}

/// Whether `more` bytes still fit into the data frame that holds `length` bytes.
fn fits_one_frame(length: usize, more: usize) -> bool {
    length + more <= DATA_MAX
}
