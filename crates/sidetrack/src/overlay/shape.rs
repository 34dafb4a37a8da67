//! How fast a node sends to a neighbour, where somebody has set a bound: one for all flows of the link.

use sidetrack_core::overlay::NodeId;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What was sent and not yet worked off at the rate.
#[derive(Debug)]
struct Debt {
    bytes: f64,
    at: Instant,
}

/// The bound of one link. Without one it costs a look at a number.
#[derive(Debug)]
pub struct Shaper {
    /// 0: none.
    bits_per_second: AtomicU64,
    debt: Mutex<Debt>,
}

impl Default for Shaper {
    fn default() -> Self {
        let debt = Mutex::new(Debt { bytes: 0.0, at: Instant::now() });
        Self { bits_per_second: AtomicU64::new(0), debt }
    }
}

impl Shaper {
    fn lock(&self) -> MutexGuard<'_, Debt> {
        self.debt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bits per second from now on; none: as fast as the link takes it.
    pub fn set(&self, bits_per_second: Option<u64>) {
        self.bits_per_second.store(bits_per_second.unwrap_or(0), Relaxed);
        *self.lock() = Debt { bytes: 0.0, at: Instant::now() };
    }

    /// The bound, bits per second.
    pub fn rate(&self) -> Option<u64> {
        Some(self.bits_per_second.load(Relaxed)).filter(|rate| *rate > 0)
    }

    /// How long whoever wants to send has to wait until all but `burst` of what was sent is worked off.
    pub fn wait(&self, burst: Duration) -> Duration {
        let Some(rate) = self.rate() else { return Duration::ZERO };
        let bytes_per_second = rate as f64 / 8.0;
        let mut debt = self.lock();
        let now = Instant::now();
        let worked = now.saturating_duration_since(debt.at).as_secs_f64() * bytes_per_second;
        *debt = Debt { bytes: (debt.bytes - worked).max(0.0), at: now };
        Duration::from_secs_f64(debt.bytes / bytes_per_second).saturating_sub(burst)
    }

    /// So many bytes were sent.
    pub fn spend(&self, bytes: usize) {
        if self.rate().is_some() {
            self.lock().bytes += bytes as f64;
        }
    }
}

/// The bounds of all links.
#[derive(Debug, Default)]
pub struct Shapers {
    all: Mutex<BTreeMap<NodeId, Arc<Shaper>>>,
}

impl Shapers {
    /// That of the link to this neighbour.
    pub fn of(&self, neighbour: NodeId) -> Arc<Shaper> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).entry(neighbour).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_is_worked_off_at_the_rate() {
        let shaper = Shaper::default();
        shaper.spend(1_000_000_000);
        assert_eq!(shaper.wait(Duration::ZERO), Duration::ZERO, "no bound");
        shaper.set(Some(8_000));
        assert_eq!(shaper.wait(Duration::ZERO), Duration::ZERO, "what was sent before counts for nothing");
        shaper.spend(60_000);
        let wait = shaper.wait(Duration::ZERO);
        assert!(wait > Duration::from_secs(50) && wait <= Duration::from_secs(60), "{wait:?}");
        assert!(shaper.wait(Duration::from_secs(20)) <= Duration::from_secs(40));
        shaper.set(None);
        assert_eq!((shaper.rate(), shaper.wait(Duration::ZERO)), (None, Duration::ZERO));
    }
}
