//! Notices that a side is gone while the pump does not read from it: after its FIN, or while the other side
//! takes nothing. Readiness does not report a reset then, because a socket after FIN is always readable. So the
//! pump asks the socket for its error, first soon, then less and less often. The worker's sweep keeps the time.

use sidetrack_core::flow::Side;
use sidetrack_core::time::Instant;
use std::time::Duration;

/// Time from the moment reading from a side stops until the first check.
const FIRST: Duration = Duration::from_millis(100);

/// Longest time between two checks. A reset on a long half-closed flow is noticed this late.
const LONGEST: Duration = Duration::from_secs(10);

/// When to check which side. The times double from [`FIRST`] to [`LONGEST`].
#[derive(Debug, Default)]
pub(super) struct Probe {
    due: Option<Instant>,
    /// 0: not armed.
    gap_ms: u16,
    client: bool,
    server: bool,
}

impl Probe {
    /// Sets which sides are not read at present.
    pub(super) fn arm(&mut self, now: Instant, client: bool, server: bool) {
        if (self.client, self.server) != (client, server) {
            (self.client, self.server, self.gap_ms) = (client, server, 0);
            self.due = (client || server).then(|| now + FIRST);
        }
    }

    /// When to check next. `None` while both sides are read.
    pub(super) const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns the sides to check now, if it is time.
    pub(super) fn take(&mut self, now: Instant) -> impl Iterator<Item = Side> + use<> {
        let is_due = self.due.is_some_and(|due| due <= now);
        if is_due {
            let gap = (Duration::from_millis(self.gap_ms.into()) * 2).clamp(FIRST, LONGEST);
            self.gap_ms = u16::try_from(gap.as_millis()).unwrap_or(u16::MAX);
            self.due = Some(now + gap);
        }
        let sides = [(Side::Client, self.client), (Side::Server, self.server)];
        sides.into_iter().filter(move |(_, unread)| is_due && *unread).map(|(side, _)| side)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn asks_soon_and_then_ever_more_rarely() {
        let mut probe = Probe::default();
        assert_eq!((probe.due(), probe.take(at(5)).count()), (None, 0));
        probe.arm(at(1000), true, false);
        assert_eq!(probe.take(at(1099)).count(), 0);
        let mut times = Vec::new();
        for _ in 0..10 {
            let due = probe.due().unwrap();
            times.push(due.as_nanos() / 1_000_000 - 1000);
            assert_eq!(probe.take(due).collect::<Vec<_>>(), [Side::Client]);
            probe.arm(due, true, false);
        }
        assert_eq!(times, [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 22_800, 32_800]);
        probe.arm(at(40_000), true, true);
        assert_eq!(probe.due(), Some(at(40_100)));
        probe.arm(at(40_000), false, false);
        assert_eq!(probe.due(), None);
    }
}
