//! One end of a session: carries the bytes of one flow in both directions, in order and each exactly once, over changing paths.
//!
//! An end buffers the bytes of its application until the other end has received them. When a path dies, the other end says on
//! the next path which byte it expects, and this end continues there. The promise: **the application sees a FIN only after the
//! far application's kernel has accepted every byte** that the application had sent by then. If that never happens, it sees a
//! reset. Credit runs from the receiving application to the sending one, so no end buffers more than its window.
//!
//! Paths that keep order and lose nothing ([`Config::retransmit`] is `None`) need no recovery here. On other paths missing
//! pieces are requested and retransmitted one by one, never a whole window.
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

mod receive;
mod send;

use super::frame::{Ack, DATA_MAX, ResetReason, SessionFrame};
use crate::time::Instant;
use receive::Receiver;
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
    /// A path is established. The other end expects byte `next`, and this end may send bytes before `limit`.
    PathUp {
        /// The next byte (or the FIN behind the last) that the other end expects.
        next: u64,
        /// The credit.
        limit: u64,
    },
    /// The path is gone.
    PathDown,
    /// A frame of the other end arrived.
    Frame(SessionFrame),
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
    /// Send this along the path.
    Send(SessionFrame),
    /// Send the data that begins at this offset ([`Session::data`]) along the path.
    SendData {
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
    phase: Phase,
    now: Instant,
    /// Since when there is no path. `None`: there is a path.
    pathless_since: Option<Instant>,
    send: Sender,
    receive: Receiver,
    reset_sent: bool,
    done_sent: bool,
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
            phase: Phase::Open,
            now,
            pathless_since: Some(now),
            send: Sender::new(config.keep_max_bytes),
            receive: Receiver::new(&config, now),
            reset_sent: false,
            done_sent: false,
            done_came: false,
            repeat_at: None,
        }
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
        [phase, pathless, repeat].into_iter().flatten().min()
    }

    /// Handles one event. An event that does not fit the state is ignored.
    pub fn handle(&mut self, now: Instant, input: Input) {
        self.now = now;
        if matches!(self.phase, Phase::Closing(_) | Phase::Closed) {
            return;
        }
        match input {
            Input::PathUp { next, limit } => self.path_up(next, limit),
            Input::PathDown => {
                self.pathless_since.get_or_insert(now);
            }
            Input::Frame(frame) => self.frame(frame),
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

    /// Returns the next output. While the path accepts no more data, the driver need not call this: no output is lost.
    pub fn poll(&mut self) -> Option<Output> {
        match self.phase {
            Phase::Closed => None,
            Phase::Closing(reason) => {
                self.phase = Phase::Closed;
                Some(Output::Closed(reason))
            }
            Phase::Resetting(reason, _) => self.poll_reset(reason),
            Phase::Open | Phase::ResetByPeer { .. } | Phase::Lingering(_) => self.poll_open(),
        }
    }

    fn poll_open(&mut self) -> Option<Output> {
        let may_fin = matches!(self.phase, Phase::Open) && self.send.is_confirmed_to_mark();
        if may_fin && self.receive.take_fin() {
            self.settle();
            return Some(Output::Fin);
        }
        // All that follows is sent along the path.
        if !self.has_path() {
            return None;
        }
        // Acknowledgements go before data: credit that waits behind our data would stop the other end.
        if let Some(ack) = self.receive.take_ack() {
            return Some(Output::Send(SessionFrame::Ack(ack)));
        }
        if matches!(self.phase, Phase::Open)
            && let Some(output) = self.send.poll(self.now)
        {
            self.arm();
            return Some(output);
        }
        if matches!(self.phase, Phase::Lingering(_)) && !self.done_sent {
            self.done_sent = true;
            self.arm();
            self.settle();
            return Some(Output::Send(SessionFrame::Done));
        }
        None
    }

    fn poll_reset(&mut self, reason: ResetReason) -> Option<Output> {
        if !self.has_path() || self.reset_sent {
            return None;
        }
        self.reset_sent = true;
        if self.config.retransmit.is_none() {
            self.phase = Phase::Closing(Some(reason));
        }
        self.arm();
        Some(Output::Send(SessionFrame::Reset { offset: self.send.sent(), reason }))
    }

    fn arm(&mut self) {
        if let Some(retransmit) = self.config.retransmit {
            self.repeat_at.get_or_insert(self.now + retransmit);
        }
    }

    // A protocol error of the other end resets the session: it asks for bytes that were never sent or are
    // acknowledged.
    fn path_up(&mut self, next: u64, limit: u64) {
        if !self.send.rewind(next, limit) {
            return self.reset(ResetReason::Protocol);
        }
        self.pathless_since = None;
        self.receive.must_ack();
        (self.reset_sent, self.done_sent) = (false, false);
        self.arm();
    }

    fn frame(&mut self, frame: SessionFrame) {
        let is_fair = match frame {
            SessionFrame::Data { offset, bytes } => {
                self.receive.data(offset, bytes, self.config.retransmit.is_some())
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

    fn ack(&mut self, ack: &Ack) -> bool {
        let is_news = self.send.acked() < ack.next;
        let is_fair = self.send.ack(ack);
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
            (self.reset_sent, self.done_sent) = (false, false);
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
            Phase::Lingering(_) if self.done_sent && self.done_came => self.phase = Phase::Closing(None),
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
