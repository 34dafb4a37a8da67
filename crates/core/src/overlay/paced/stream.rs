//! One stream of a paced link: its two halves, and how it ends.
//!
//! ```text
//! our half:    OPEN -- closed here, or the other end closed --> ENDING -- all bytes and the end have arrived --> DONE
//!                \--- dropped here --> RESETTING -- the reset has arrived --> DONE
//! any state -- the other end's reset came --> DONE
//! ```
//!
//! There is no half-close: an end that closes its half reads nothing more. So the other end drops what it has not sent, and
//! closes its half. It still reads all that was sent to it. A stream is forgotten when no one uses it here and both halves
//! are over.

use super::incoming::Incoming;
use super::outgoing::Outgoing;

/// The state of our half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Open,
    /// The end is to be sent, or was sent.
    Ending {
        arrived: bool,
    },
    Resetting,
    Done,
}

/// A stream of a paced link.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub out: Outgoing,
    pub incoming: Incoming,
    half: Half,
    /// The end or the reset of the other end came.
    peer_is_over: bool,
    /// The other end has dropped the stream.
    pub is_reset: bool,
    /// No one uses it here any more.
    is_left: bool,
    /// The end is queued or sent, and not known to be lost.
    end_is_queued: bool,
    /// Credit is queued.
    pub credit_is_queued: bool,
    /// The writer waits for room.
    pub wants_room: bool,
    /// It waits for its turn to send.
    pub is_active: bool,
    /// Bytes that it may send in this turn.
    pub deficit: i64,
}

impl Stream {
    pub(super) fn new(limit: u64, granted: u64) -> Self {
        Self {
            out: Outgoing::new(limit),
            incoming: Incoming::new(granted),
            half: Half::Open,
            peer_is_over: false,
            is_reset: false,
            is_left: false,
            end_is_queued: false,
            credit_is_queued: false,
            wants_room: false,
            is_active: false,
            deficit: 0,
        }
    }

    pub(super) fn may_write(&self) -> bool {
        self.half == Half::Open
    }

    pub(super) fn is_left(&self) -> bool {
        self.is_left
    }

    /// Whether the end must be queued now: all bytes were sent once.
    pub(super) fn take_end(&mut self) -> bool {
        let is_ending = matches!(self.half, Half::Ending { arrived: false });
        let due = is_ending && !self.end_is_queued && self.out.unsent() == 0;
        self.end_is_queued |= due;
        due
    }

    /// Whether the end is still to be sent when its turn comes.
    pub(super) fn sends_end(&self) -> bool {
        matches!(self.half, Half::Ending { arrived: false })
    }

    pub(super) fn sends_reset(&self) -> bool {
        self.half == Half::Resetting
    }

    pub(super) fn end_was_lost(&mut self) {
        self.end_is_queued = false;
    }

    /// Closes it: the bytes that were written still arrive.
    pub(super) fn close(&mut self) {
        self.leave();
        if self.half == Half::Open {
            self.half = Half::Ending { arrived: false };
        }
    }

    /// Drops it. Returns whether the other end must be told with a reset.
    pub(super) fn abandon(&mut self) -> bool {
        self.leave();
        let tells = self.half == Half::Open;
        if tells {
            self.half = Half::Resetting;
            self.out.clear();
        }
        tells
    }

    fn leave(&mut self) {
        self.is_left = true;
        self.incoming.clear();
    }

    /// The other end has closed its half at this offset.
    pub(super) fn peer_ended(&mut self, offset: u64) {
        self.peer_is_over = true;
        self.incoming.set_end(offset);
        if self.half == Half::Open {
            self.out.clear();
            self.half = Half::Ending { arrived: false };
        }
    }

    /// The other end has dropped the stream.
    pub(super) fn peer_reset(&mut self) {
        (self.peer_is_over, self.is_reset, self.half) = (true, true, Half::Done);
        self.out.clear();
        self.incoming.clear();
    }

    /// The other end has our end.
    pub(super) fn end_arrived(&mut self) {
        if let Half::Ending { arrived } = &mut self.half {
            *arrived = true;
        }
    }

    /// The other end has our reset.
    pub(super) fn reset_arrived(&mut self) {
        (self.peer_is_over, self.half) = (true, Half::Done);
    }

    /// Whether nothing about it matters any more.
    pub(super) fn is_over(&self) -> bool {
        let half = match self.half {
            Half::Open | Half::Resetting => false,
            Half::Ending { arrived } => arrived && self.out.is_done(),
            Half::Done => true,
        };
        half && self.peer_is_over && self.is_left
    }
}
