//! Limits how fast a node sends to a neighbour, if an operator has set a rate: one limit for all flows of the link.

use sidetrack_core::overlay::NodeId;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The bytes that were sent and not yet paid off at the rate.
#[derive(Debug)]
struct Debt {
    bytes: f64,
    at: Instant,
}

/// The limit of one link. Without a limit it costs one atomic read.
#[derive(Debug)]
pub(super) struct Shaper {
    /// 0: there is no limit.
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
    /// Sets the limit in bits per second; none: there is no limit.
    pub(super) fn set(&self, bits_per_second: Option<u64>) {
        self.bits_per_second.store(bits_per_second.unwrap_or(0), Relaxed);
        *lock(&self.debt) = Debt { bytes: 0.0, at: Instant::now() };
    }

    /// Returns the limit, bits per second.
    pub(super) fn rate(&self) -> Option<u64> {
        Some(self.bits_per_second.load(Relaxed)).filter(|rate| *rate > 0)
    }

    /// Returns how long a sender must wait until all but `burst` of the sent bytes are paid off.
    pub(super) fn wait(&self, burst: Duration) -> Duration {
        let Some(rate) = self.rate() else { return Duration::ZERO };
        let bytes_per_second = rate as f64 / 8.0;
        let mut debt = lock(&self.debt);
        let now = Instant::now();
        let worked = now.saturating_duration_since(debt.at).as_secs_f64() * bytes_per_second;
        *debt = Debt { bytes: (debt.bytes - worked).max(0.0), at: now };
        Duration::from_secs_f64(debt.bytes / bytes_per_second).saturating_sub(burst)
    }

    /// Notes that this number of bytes was sent.
    pub(super) fn spend(&self, bytes: usize) {
        if self.rate().is_some() {
            lock(&self.debt).bytes += bytes as f64;
        }
    }
}

/// The limits of all links.
#[derive(Debug, Default)]
pub(super) struct Shapers {
    all: Mutex<BTreeMap<NodeId, Arc<Shaper>>>,
    /// The limits of the configuration, bits per second.
    declared: BTreeMap<NodeId, u64>,
}

impl Shapers {
    /// Returns limits, some of them declared in the configuration, bits per second.
    pub(super) fn new(declared: BTreeMap<NodeId, u64>) -> Self {
        let shapers = Self { all: Mutex::default(), declared };
        for neighbour in shapers.declared.keys() {
            shapers.set(*neighbour, None);
        }
        shapers
    }

    /// Sets the limit of the link to this neighbour, bits per second; none: the one of the configuration.
    pub(super) fn set(&self, neighbour: NodeId, bits_per_second: Option<u64>) {
        let rate = bits_per_second.or_else(|| self.declared.get(&neighbour).copied());
        self.of(neighbour).set(rate);
    }

    /// Returns the limit of the link to this neighbour.
    pub(super) fn of(&self, neighbour: NodeId) -> Arc<Shaper> {
        lock(&self.all).entry(neighbour).or_default().clone()
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
