//! Times of a flow that may not have come yet, in 8 bytes each.

use crate::time::Instant;

/// A time that may not have come yet. The last value of an [`Instant`], 584 years after the start, means that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment(Instant);

impl Moment {
    /// The time has not come.
    pub(super) const NEVER: Self = Self(Instant::from_nanos(u64::MAX));

    /// Returns the time, if it has come.
    pub(super) const fn get(self) -> Option<Instant> {
        if self.0.as_nanos() == u64::MAX { None } else { Some(self.0) }
    }
}

impl Default for Moment {
    fn default() -> Self {
        Self::NEVER
    }
}

impl From<Instant> for Moment {
    fn from(at: Instant) -> Self {
        Self(at)
    }
}

/// The times of a flow's latest stay on the fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    requested: Moment,
    installed: Moment,
    gone: Moment,
}

impl Times {
    /// Returns when the entry was requested.
    pub const fn requested(&self) -> Option<Instant> {
        self.requested.get()
    }

    /// Returns when the entry was confirmed.
    pub const fn installed(&self) -> Option<Instant> {
        self.installed.get()
    }

    /// Returns when the entry was removed.
    pub const fn gone(&self) -> Option<Instant> {
        self.gone.get()
    }

    /// Begins a stay.
    pub(super) fn request(now: Instant) -> Self {
        Self { requested: now.into(), ..Self::default() }
    }

    /// Notes that the entry was confirmed.
    pub(super) fn install(&mut self, now: Instant) {
        self.installed = now.into();
    }

    /// Notes that the entry was removed.
    pub(super) fn end(&mut self, now: Instant) {
        self.gone = now.into();
    }
}
