//! The splice core: which bytes may move next between the two sides of a flow, and how the flow ends.
//!
//! It **counts bytes and never touches them**: read and write, `splice(2)` and other ways to move bytes use the same
//! core. The driver asks [`Splice::poll`] what to do, does it, and reports with [`Splice::handle`].
//!
//! Rules that hold whatever the driver reports (explored exhaustively in `tests/splice.rs`):
//! - A side gets a FIN only after the last byte for it was written.
//! - No read is requested that could take a direction above its limit ([`Config::limit`], [`Input::Limit`]).
//! - A reset is passed on as a reset, never as an orderly end. The bytes before it are sent first.
//! - There is exactly one [`Output::Close`], and nothing after it.

use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::time::Duration;

/// Limits of one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most bytes buffered per direction, at least 1. Default: 64 KiB.
    pub limit: u32,
    /// The flow ends after this time without a moved byte. Default: `None`, no limit.
    pub idle: Option<Duration>,
    /// The flow ends after this time since its beginning. Default: `None`, no limit.
    pub lifetime: Option<Duration>,
    /// How long the bytes before a reset may take to be written. Default: 2 s.
    pub linger: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self { limit: 65_536, idle: None, lifetime: None, linger: Duration::from_secs(2) }
    }
}

/// An event that the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The server side is connected (late binding). Before this event, the core does not use it.
    Bound,
    /// This number of bytes (more than 0) was read from this side.
    Read(Side, u32),
    /// This side sent FIN.
    Eof(Side),
    /// This number of bytes was written to this side.
    Written(Side, u32),
    /// FIN was sent to this side.
    FinSent(Side),
    /// Reading from this side would block.
    ReadBlocked(Side),
    /// Writing to this side would block.
    WriteBlocked(Side),
    /// Sets how many bytes of the direction from this side may be buffered (for example after a change to a pipe). A
    /// limit below the present number takes effect as the bytes are written.
    Limit(Side, u32),
    /// Reading or writing may be possible again on both sides: try all of it again.
    Woken,
    /// This side has failed: reset, timed out, unreachable.
    Failed(Side),
    /// The node ends the flow for this reason.
    End(EndReason),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Read at most this number of bytes from this side.
    Read(Side, u32),
    /// Write this number of buffered bytes to this side.
    Write(Side, u32),
    /// Send FIN to this side.
    Fin(Side),
    /// Close both sides. The flow is over.
    Close {
        /// The only reason.
        reason: EndReason,
        /// Whether the sides get a reset instead of an orderly end.
        reset: bool,
    },
}

/// One direction, named after the side that the bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Direction {
    limit: u32,
    held: u32,
    eof: bool,
    fin_sent: bool,
    read_blocked: bool,
    write_blocked: bool,
}

impl Direction {
    /// Whether every byte and the end of this direction arrived, and all bytes were written.
    const fn is_over(&self) -> bool {
        self.eof && self.held == 0
    }

    const fn new(limit: u32) -> Self {
        Self { limit, held: 0, eof: false, fin_sent: false, read_blocked: false, write_blocked: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// The server side is not connected yet.
    Unbound,
    Open,
    /// This side has failed. Its earlier bytes are still being written to the other side.
    Draining(Side, EndReason, Instant),
    Closing(EndReason, bool),
    Closed,
}

/// The core of one flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splice {
    config: Config,
    phase: Phase,
    /// From client to server, and from server to client.
    up: Direction,
    down: Direction,
    active: Instant,
    end: Option<Instant>,
}

impl Splice {
    /// Makes the core of a flow whose client is connected and whose server is not (report [`Input::Bound`]).
    pub fn new(config: Config, now: Instant) -> Self {
        let limit = config.limit.max(1);
        Self {
            config,
            phase: Phase::Unbound,
            up: Direction::new(limit),
            down: Direction::new(limit),
            active: now,
            end: config.lifetime.map(|lifetime| now + lifetime),
        }
    }

    /// Returns its limits.
    pub const fn config(&self) -> Config {
        self.config
    }

    /// Returns the number of bytes that were read from this side and not yet written to the other.
    pub fn held(&self, from: Side) -> u32 {
        self.leaving(from).held
    }

    /// Whether the driver waits for this side to become readable. If not, nothing is to be read from it now: it has
    /// sent FIN, or its buffer is full.
    pub fn waits_to_read(&self, side: Side) -> bool {
        self.leaving(side).read_blocked
    }

    /// Whether this side has sent FIN.
    pub fn has_ended(&self, side: Side) -> bool {
        self.leaving(side).eof
    }

    /// Returns when a byte last moved.
    pub fn active(&self) -> Instant {
        self.active
    }

    /// Whether [`Output::Close`] was returned.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// Returns when to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Option<Instant> {
        let idle = self.config.idle.map(|idle| self.active + idle);
        let drain = match self.phase {
            Phase::Draining(_, _, until) => Some(until),
            Phase::Closed => return None,
            _ => None,
        };
        [idle, self.end, drain].into_iter().flatten().min()
    }

    /// Handles one event. An event that does not fit the state is ignored.
    pub fn handle(&mut self, now: Instant, input: Input) {
        if matches!(self.phase, Phase::Closing(..) | Phase::Closed) {
            return;
        }
        match input {
            Input::Bound if self.phase == Phase::Unbound => self.phase = Phase::Open,
            Input::Bound => {}
            Input::Read(side, n) => self.read(now, side, n),
            Input::Eof(side) => {
                self.leaving_mut(side).eof = true;
                self.active = now;
            }
            Input::Written(side, n) => {
                let direction = self.leaving_mut(side.other());
                direction.held = direction.held.saturating_sub(n);
                direction.read_blocked = false;
                self.active = now;
            }
            Input::FinSent(side) => self.leaving_mut(side.other()).fin_sent = true,
            Input::ReadBlocked(side) => self.leaving_mut(side).read_blocked = true,
            Input::WriteBlocked(side) => self.leaving_mut(side.other()).write_blocked = true,
            Input::Limit(side, limit) => self.leaving_mut(side).limit = limit.max(1),
            Input::Woken => {
                for direction in [&mut self.up, &mut self.down] {
                    direction.read_blocked = false;
                    direction.write_blocked = false;
                }
            }
            Input::Failed(side) => self.failed(now, side),
            Input::End(reason) => self.phase = Phase::Closing(reason, true),
            Input::Tick => self.tick(now),
        }
        self.settle();
    }

    /// Returns what to do next. `None`: wait for an event.
    pub fn poll(&mut self) -> Option<Output> {
        match self.phase {
            Phase::Closed => None,
            Phase::Closing(reason, reset) => {
                self.phase = Phase::Closed;
                Some(Output::Close { reason, reset })
            }
            Phase::Draining(from, ..) => self.poll_write(from),
            Phase::Unbound => self.poll_read(Side::Client),
            // Server to client first, because the client waits for the answer. Writes before reads, because they free
            // buffers.
            Phase::Open => self
                .poll_write(Side::Server)
                .or_else(|| self.poll_write(Side::Client))
                .or_else(|| self.poll_read(Side::Server))
                .or_else(|| self.poll_read(Side::Client)),
        }
    }

    fn leaving(&self, side: Side) -> &Direction {
        match side {
            Side::Client => &self.up,
            Side::Server => &self.down,
        }
    }

    fn leaving_mut(&mut self, side: Side) -> &mut Direction {
        match side {
            Side::Client => &mut self.up,
            Side::Server => &mut self.down,
        }
    }

    fn read(&mut self, now: Instant, side: Side, n: u32) {
        let direction = self.leaving_mut(side);
        direction.held = direction.held.saturating_add(n);
        direction.write_blocked = false;
        self.active = now;
    }

    fn failed(&mut self, now: Instant, side: Side) {
        let reason = match side {
            Side::Client => EndReason::ClientReset,
            Side::Server => EndReason::ServerReset,
        };
        self.phase = match self.phase {
            // The other side has failed before, so there is no side to write to.
            Phase::Draining(_, first, _) => Phase::Closing(first, true),
            Phase::Open if self.leaving(side).held > 0 => {
                Phase::Draining(side, reason, now + self.config.linger)
            }
            _ => Phase::Closing(reason, true),
        };
    }

    fn tick(&mut self, now: Instant) {
        if let Phase::Draining(_, reason, until) = self.phase
            && until <= now
        {
            self.phase = Phase::Closing(reason, true);
        } else if self.end.is_some_and(|end| end <= now) {
            self.phase = Phase::Closing(EndReason::Lifetime, true);
        } else if self.config.idle.is_some_and(|idle| self.active + idle <= now) {
            self.phase = Phase::Closing(EndReason::Idle, true);
        }
    }

    /// Changes the phase if nothing is left to do in the present one.
    fn settle(&mut self) {
        match self.phase {
            // Closing also sends the outstanding FIN, which saves one call per flow.
            Phase::Open
                if self.up.is_over() && self.down.is_over() && (self.up.fin_sent || self.down.fin_sent) =>
            {
                self.phase = Phase::Closing(EndReason::Ok, false);
            }
            Phase::Draining(side, reason, _) if self.leaving(side).held == 0 => {
                self.phase = Phase::Closing(reason, true);
            }
            _ => {}
        }
    }

    fn poll_read(&self, side: Side) -> Option<Output> {
        let direction = self.leaving(side);
        let room = direction.limit.saturating_sub(direction.held);
        (!direction.eof && !direction.read_blocked && room > 0).then_some(Output::Read(side, room))
    }

    fn poll_write(&self, from: Side) -> Option<Output> {
        let direction = self.leaving(from);
        if direction.held > 0 {
            (!direction.write_blocked).then_some(Output::Write(from.other(), direction.held))
        } else {
            (direction.eof && !direction.fin_sent).then_some(Output::Fin(from.other()))
        }
    }
}
