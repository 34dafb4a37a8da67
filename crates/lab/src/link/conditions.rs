//! The conditions of one direction of a link: what it does to frames.

use std::time::Duration;

use super::random::Random;

/// The conditions of one direction of a link. The default is a perfect wire.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conditions {
    /// One-way delay; half of the round-trip time of a link with the same delay both ways.
    pub delay: Duration,
    /// Adds or subtracts a uniform delay of at most this; never below zero; frames keep their order.
    pub jitter: Duration,
    /// Which frames are lost.
    pub loss: Loss,
    /// The rate at which frames leave, and its queue; absent: they leave at once.
    pub rate: Option<Rate>,
    /// Probability (0 to 1) that a frame arrives twice.
    pub duplicate: f64,
    /// Probability (0 to 1) that a frame overtakes all delayed frames.
    pub reorder: f64,
    /// False: no frame passes; frames that are already on their way still arrive.
    pub is_up: bool,
    /// Whether losses, duplicates and the rate apply to the super-frames of the sending host (up to 64 KiB of TCP),
    /// not to frames of the wire. Imitates an emulator on a sending host with segmentation offload.
    pub on_super_frames: bool,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: Loss::None,
            rate: None,
            duplicate: 0.0,
            reorder: 0.0,
            is_up: true,
            on_super_frames: false,
        }
    }
}

impl Conditions {
    /// Returns a perfect wire with this delay.
    #[must_use]
    pub fn delayed(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }
}

/// Which frames are lost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Loss {
    /// None.
    None,
    /// Each frame with this probability (0 to 1), independently of the others.
    Bernoulli(f64),
    /// In bursts: Gilbert's model (Bell System Technical Journal 39, 1960). Before each frame the link may change its
    /// state. In the bad state every frame is lost, in the good state none.
    Burst {
        /// Probability (0 to 1) that a good link goes bad.
        enter: f64,
        /// Probability (0 to 1) that a bad link recovers; the mean length of a burst is its inverse.
        leave: f64,
    },
}

impl Loss {
    /// Returns the share of frames lost in the long run, 0 to 1.
    #[must_use]
    pub fn share(self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Bernoulli(probability) => probability,
            Self::Burst { enter, leave } if enter + leave > 0.0 => enter / (enter + leave),
            Self::Burst { .. } => 0.0,
        }
    }

    /// Returns the variance of the number of losses among `frames`, divided by that of independent losses of the same
    /// share. In bursts, neighbouring frames have the correlation 1 - enter - leave.
    #[must_use]
    pub fn variance_factor(self) -> f64 {
        match self {
            Self::Burst { enter, leave } if enter + leave > 0.0 => (2.0 - enter - leave) / (enter + leave),
            _ => 1.0,
        }
    }
}

/// A rate and its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Bits per second, Ethernet header included, at least 1.
    pub bits_per_second: u64,
    /// Capacity of the queue in bytes; a frame that does not fit is dropped.
    pub queue_bytes: u64,
}

impl Rate {
    /// Returns the time that `bytes` take.
    #[must_use]
    pub fn time_of(self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 8 * 1_000_000_000 / u128::from(self.bits_per_second.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Draws losses; keeps the state of a burst.
#[derive(Debug, Clone, Default)]
pub(super) struct LossState {
    is_bad: bool,
}

impl LossState {
    /// Returns true if the next frame is lost.
    pub(super) fn takes_next(&mut self, loss: Loss, random: &mut Random) -> bool {
        match loss {
            Loss::None => false,
            Loss::Bernoulli(probability) => random.happens(probability),
            Loss::Burst { enter, leave } => {
                let changes = random.happens(if self.is_bad { leave } else { enter });
                self.is_bad ^= changes;
                self.is_bad
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_have_their_share_and_their_length() {
        let loss = Loss::Burst { enter: 0.01, leave: 0.2 };
        let (mut state, mut random) = (LossState::default(), Random::new(3));
        let lost: Vec<bool> = (0..200_000).map(|_| state.takes_next(loss, &mut random)).collect();
        let count = lost.iter().filter(|lost| **lost).count() as f64;
        let bursts = lost.windows(2).filter(|pair| !pair[0] && pair[1]).count() as f64;
        let (expected, length) = (200_000.0 * loss.share(), count / bursts);
        let deviation = (expected * (1.0 - loss.share()) * loss.variance_factor()).sqrt();
        assert!((count - expected).abs() < 4.0 * deviation, "{count} of {expected} +- {deviation}");
        assert!((4.7..5.3).contains(&length), "mean burst {length}, nominal 5");
    }

    #[test]
    fn a_frame_takes_its_time() {
        let rate = Rate { bits_per_second: 10_000_000, queue_bytes: 0 };
        assert_eq!(rate.time_of(1250), Duration::from_millis(1));
        let slowest = Rate { bits_per_second: 0, queue_bytes: 0 };
        assert_eq!(slowest.time_of(u64::MAX), Duration::from_nanos(u64::MAX), "saturates");
    }
}
