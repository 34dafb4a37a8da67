//! How many containers of a function run: a machine that follows the number of flows and the CPU time they use.
//!
//! ```text
//!              more are needed: the target rises at once
//!            +------------------------------------------+
//!            v                                          |
//!   +---> STEADY ------- fewer would do --------> CALM -+
//!   |        ^                                      |  |
//!   |        +---------- no longer ----------------+   | fewer would do for `calm`:
//!   |                                                  | the target falls by one
//!   +--------------------------------------------------+
//! ```
//!
//! Fewer do only if they would be at most three quarters full, so a load that stays the same changes nothing. More
//! containers start at once, because flows wait for them. They end one at a time and after a while, because starting one
//! again costs more than keeping it.

use crate::time::Instant;
use std::time::Duration;

/// CPU use of a container above which another one is started, thousandths of a core.
pub const CPU_HIGH_MILLI: u64 = 800;
/// CPU use of a container up to which fewer do, thousandths of a core.
pub const CPU_LOW_MILLI: u64 = 500;
/// Time after a growth in which CPU time causes no other one: the new container has to take its share first.
pub const CPU_REST: Duration = Duration::from_secs(5);

/// The bounds of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Fewest containers, at least 1.
    pub min: u16,
    /// Most containers, at least `min`.
    pub max: u16,
    /// The number of flows for which one container is meant. 0 counts as 1.
    pub flows_per_replica: u32,
    /// How long fewer have to do before one ends.
    pub calm: Duration,
}

/// What the containers do now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The flows that pass all of them.
    pub flows: u64,
    /// The containers that work.
    pub well: u16,
    /// The CPU time of all of them since the previous sample, thousandths of a core. `None`: unknown.
    pub cpu_milli: Option<u64>,
}

/// The machine of one pool.
#[derive(Clone, Debug)]
pub struct Scaler {
    bounds: Bounds,
    target: u16,
    /// The target that was polled last.
    told: u16,
    calm_since: Option<Instant>,
    grown: Option<Instant>,
}

impl Scaler {
    /// A pool that begins with its fewest containers.
    pub fn new(bounds: Bounds) -> Self {
        let min = bounds.min.max(1);
        let (max, flows_per_replica) = (bounds.max.max(min), bounds.flows_per_replica.max(1));
        let bounds = Bounds { min, max, flows_per_replica, ..bounds };
        Self { bounds, target: min, told: min, calm_since: None, grown: None }
    }

    /// The number of containers that should run.
    pub const fn target(&self) -> u16 {
        self.target
    }

    /// Handles a sample.
    pub fn handle(&mut self, now: Instant, sample: Sample) {
        let needed = self.by_flows(sample.flows).max(self.by_cpu(now, &sample));
        let needed = needed.clamp(self.bounds.min, self.bounds.max);
        if needed > self.target {
            self.target = needed;
            (self.calm_since, self.grown) = (None, Some(now));
            return;
        }
        if !self.fewer_do(&sample) {
            self.calm_since = None;
            return;
        }
        let since = *self.calm_since.get_or_insert(now);
        if now.since(since) >= self.bounds.calm {
            self.target -= 1;
            self.calm_since = None;
        }
    }

    /// Returns a new target once.
    pub fn poll(&mut self) -> Option<u16> {
        let is_new = self.told != self.target;
        self.told = self.target;
        is_new.then_some(self.target)
    }

    fn by_flows(&self, flows: u64) -> u16 {
        u16::try_from(flows.div_ceil(self.bounds.flows_per_replica.into())).unwrap_or(u16::MAX)
    }

    /// One more than there are, if all are there and use too much CPU time.
    fn by_cpu(&self, now: Instant, sample: &Sample) -> u16 {
        let rests = self.grown.is_some_and(|grown| now.since(grown) < CPU_REST);
        let is_high = sample.cpu_milli.is_some_and(|used| used > CPU_HIGH_MILLI * u64::from(sample.well));
        if is_high && !rests && sample.well >= self.target { self.target.saturating_add(1) } else { 0 }
    }

    fn fewer_do(&self, sample: &Sample) -> bool {
        let fewer = u64::from(self.target.saturating_sub(1));
        if self.target <= self.bounds.min || sample.well < self.target {
            return false;
        }
        // Without a fraction: flows / (fewer * flows_per_replica) <= 3 / 4.
        let room = fewer * u64::from(self.bounds.flows_per_replica) * 3;
        let cpu = sample.cpu_milli.is_none_or(|used| used <= CPU_LOW_MILLI * fewer);
        sample.flows.saturating_mul(4) <= room && cpu
    }
}
