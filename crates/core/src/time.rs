//! Time as a value. `core` never reads a clock: the driver passes the time.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point in monotonic time: nanoseconds since an epoch that the driver chose (for example its own start).
///
/// Only differences have a meaning. Arithmetic saturates, so no clock value causes a panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The epoch itself.
    pub const ZERO: Self = Self(0);

    /// Returns the instant `nanos` nanoseconds after the epoch.
    #[inline]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the instant `millis` milliseconds after the epoch.
    #[inline]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Returns the nanoseconds since the epoch.
    #[inline]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time since `earlier`. Zero if `earlier` is later.
    #[inline]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    #[inline]
    fn add(self, rhs: Duration) -> Self {
        let nanos = rhs.as_secs().saturating_mul(1_000_000_000).saturating_add(u64::from(rhs.subsec_nanos()));
        Self(self.0.saturating_add(nanos))
    }
}

impl Sub for Instant {
    type Output = Duration;

    #[inline]
    fn sub(self, rhs: Self) -> Duration {
        self.since(rhs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let end = Instant::from_nanos(u64::MAX);
        assert_eq!(end + Duration::MAX, end);
        assert_eq!(Instant::ZERO.since(end), Duration::ZERO);
        assert_eq!(Instant::from_millis(3) - Instant::from_millis(1), Duration::from_millis(2));
    }
}
