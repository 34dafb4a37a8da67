//! The last bytes of a side that has reset: they still belong to the other side, and the reset that we pass on
//! must not overtake them. Our own closing with a reset would discard all unsent bytes.

use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::time::Instant;
use std::time::Duration;

/// The other side gets the reset after this time without progress, even if bytes are left.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two checks whether everything was sent.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// State of passing on a reset after the last bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Farewell {
    /// The side that has reset.
    pub gone: Side,
    /// When to give up, if nothing moves until then.
    until: Instant,
    /// After everything was read and written: bytes that the kernel had not sent at the last check.
    unsent_bytes: Option<u32>,
}

impl Farewell {
    /// Starts when this side is gone.
    pub(super) fn new(gone: Side, now: Instant) -> Self {
        Self { gone, until: now + PATIENCE, unsent_bytes: None }
    }

    /// Returns the side that is gone, if this end reason is a reset. The end then waits for its last bytes.
    pub(super) const fn gone_for(reason: EndReason) -> Option<Side> {
        match reason {
            EndReason::ClientReset => Some(Side::Client),
            EndReason::ServerReset => Some(Side::Server),
            _ => None,
        }
    }

    /// The end reason of the flow.
    pub(super) const fn reason(&self) -> EndReason {
        match self.gone {
            Side::Client => EndReason::ClientReset,
            Side::Server => EndReason::ServerReset,
        }
    }

    /// Called when the other side has taken some bytes.
    pub(super) fn moved(&mut self, now: Instant) {
        self.until = now + PATIENCE;
    }

    /// Whether the other side has taken nothing for too long.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.until <= now
    }

    /// When to check again.
    pub(super) fn due(&self, now: Instant) -> Instant {
        if self.unsent_bytes.is_some() { self.until.min(now + LOOK_AGAIN) } else { self.until }
    }

    /// Whether only the kernel still has bytes.
    pub(super) const fn is_sending(&self) -> bool {
        self.unsent_bytes.is_some()
    }

    /// Whether the connection may be reset now. `unsent_bytes` is what the kernel has not sent yet.
    pub(super) fn is_over(&mut self, now: Instant, unsent_bytes: u32) -> bool {
        if self.unsent_bytes.is_some_and(|before| unsent_bytes < before) {
            self.moved(now);
        }
        self.unsent_bytes = Some(unsent_bytes);
        unsent_bytes == 0 || self.is_late(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn words_that_move_are_waited_for_and_no_others() {
        let mut farewell = Farewell::new(Side::Client, at(0));
        assert_eq!(farewell.due(at(10)), at(2000));
        farewell.moved(at(1000));
        assert!(!farewell.is_late(at(2999)) && farewell.is_late(at(3000)));
        assert!(!farewell.is_over(at(2900), 500));
        assert_eq!(farewell.due(at(2900)), at(2950));
        assert!(!farewell.is_over(at(2950), 400));
        assert!(!farewell.is_over(at(4949), 400));
        assert!(farewell.is_over(at(4950), 400));
        assert!(Farewell::new(Side::Server, at(0)).is_over(at(1), 0));
    }

    #[test]
    fn only_resets_have_last_words() {
        for side in [Side::Client, Side::Server] {
            assert_eq!(Farewell::gone_for(Farewell::new(side, at(0)).reason()), Some(side));
        }
        assert_eq!(Farewell::gone_for(EndReason::Killed), None);
    }
}
