//! Whether memory is short, and how much a node may use for what it can do without.
//!
//! ```text
//!            share >= mark
//!   Enough ----------------> Short
//!     ^                        |
//!     +------------------------+
//!        share < mark - BACK, or the limit is gone
//! ```
//!
//! Between the two marks nothing changes, so that a node near the mark does not refuse and admit flows by turns.

/// Percentage points between the mark where memory becomes short and the one where there is enough again.
pub const BACK: u8 = 10;

/// With this mark, memory is never short.
pub const NEVER: u8 = 100;

/// One in this number of bytes of the limit is for bytes that receivers do not take.
const BUFFER_SHARE: u64 = 8;

/// One in this number of bytes of the limit is for caches, together.
const CACHE_SHARE: u64 = 4;

/// One in this number of bytes of the limit is for pipes.
const PIPE_SHARE: u64 = 16;

/// While there is enough memory, caches get back one in this number of bytes of their share each time.
const CACHE_STEP: u64 = 16;

/// Memory in use, and its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes in use that the kernel cannot take back by itself.
    pub used_bytes: u64,
    /// Most bytes. Beyond them the kernel kills a process.
    pub limit_bytes: u64,
}

impl Memory {
    /// Returns the share that is used, in whole percent. 0 without a limit.
    pub fn percent(&self) -> u64 {
        let share = u128::from(self.used_bytes) * 100;
        let percent = share.checked_div(u128::from(self.limit_bytes)).unwrap_or(0);
        u64::try_from(percent).unwrap_or(u64::MAX)
    }

    /// Returns how many bytes caches may have, which have `cached` bytes now. There is still enough memory when buffers
    /// and pipes have their shares.
    fn room(&self, mark: u8, cached: u64) -> u64 {
        let enough = u128::from(self.limit_bytes) * u128::from(mark.saturating_sub(BACK)) / 100;
        let others = self.used_bytes.saturating_sub(cached);
        let kept = self.for_buffers() + self.for_pipes();
        u64::try_from(enough).unwrap_or(u64::MAX).saturating_sub(others).saturating_sub(kept)
    }

    /// Returns how many bytes flows may buffer together before each keeps little.
    pub const fn for_buffers(&self) -> u64 {
        self.limit_bytes / BUFFER_SHARE
    }

    /// Returns how many bytes pipes may have together.
    pub const fn for_pipes(&self) -> u64 {
        self.limit_bytes / PIPE_SHARE
    }
}

/// Says when memory becomes short, and when there is enough again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    is_short: bool,
    /// Bytes that all caches may have together. `None`: as many as they are configured for.
    caches: Option<u64>,
}

/// What a look at the memory has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Memory is short from now on.
    Short,
    /// There is enough again.
    Enough,
}

impl Pressure {
    /// Starts with enough memory.
    pub const fn new() -> Self {
        Self { is_short: false, caches: None }
    }

    /// Takes a look at the memory. `None`: there is no limit. `mark`: the share from which it is short, in percent; from
    /// [`NEVER`] on it never is. `cached`: the bytes of all caches.
    pub fn handle(&mut self, memory: Option<Memory>, mark: u8, cached: u64) -> Option<Change> {
        let memory = memory.filter(|memory| memory.limit_bytes > 0 && mark < NEVER);
        let was_short = self.is_short;
        self.is_short = memory.is_some_and(|memory| {
            let wanted = if was_short { mark.saturating_sub(BACK) } else { mark };
            memory.percent() >= u64::from(wanted)
        });
        self.caches = memory.map(|memory| {
            let share = (memory.limit_bytes / CACHE_SHARE).min(memory.room(mark, cached));
            let present = self.caches.unwrap_or(share).min(share);
            if self.is_short {
                // A quarter goes at each look, until there is enough.
                present.min(cached) / 4 * 3
            } else {
                present.saturating_add(share / CACHE_STEP).min(share)
            }
        });
        match (was_short, self.is_short) {
            (false, true) => Some(Change::Short),
            (true, false) => Some(Change::Enough),
            _ => None,
        }
    }

    /// Whether memory is short.
    pub const fn is_short(&self) -> bool {
        self.is_short
    }

    /// Returns how many bytes all caches may have together. `None`: as many as they are configured for.
    pub const fn caches(&self) -> Option<u64> {
        self.caches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(percent: u64) -> Option<Memory> {
        Some(Memory { used_bytes: percent * 1000, limit_bytes: 100_000 })
    }

    #[test]
    fn every_course_of_use_changes_between_short_and_enough_at_the_marks_only() {
        const STEPS: [u64; 6] = [0, 74, 75, 84, 85, 120];
        for course in 0..STEPS.len().pow(5) {
            let (mut pressure, mut short) = (Pressure::new(), false);
            for step in 0..5 {
                let percent = STEPS[course / STEPS.len().pow(step) % STEPS.len()];
                let change = pressure.handle(used(percent), 85, 0);
                let now = percent >= 85 || (short && percent >= 75);
                let wanted = (now != short).then_some(if now { Change::Short } else { Change::Enough });
                assert_eq!((change, pressure.is_short()), (wanted, now), "course {course}, step {step}");
                short = now;
            }
        }
    }

    #[test]
    fn without_a_limit_or_a_mark_it_is_never_short() {
        let mut pressure = Pressure::new();
        assert_eq!(pressure.handle(used(90), 85, 0), Some(Change::Short));
        assert_eq!(pressure.handle(None, 85, 0), Some(Change::Enough), "the limit was taken away");
        assert_eq!((pressure.handle(used(200), NEVER, 0), pressure.caches()), (None, None));
        let none = Memory { used_bytes: 7, limit_bytes: 0 };
        assert_eq!((pressure.handle(Some(none), 85, 0), none.percent()), (None, 0));
    }

    #[test]
    fn caches_shrink_while_memory_is_short_and_get_their_share_back() {
        let mut pressure = Pressure::new();
        pressure.handle(used(20), 85, 0);
        assert_eq!(pressure.caches(), Some(25_000));
        pressure.handle(used(90), 85, 20_000);
        assert_eq!(pressure.caches(), Some(0), "nothing is left");
        for _ in 0..20 {
            pressure.handle(used(20), 85, 0);
        }
        assert_eq!(pressure.caches(), Some(25_000));
        // Nearly all of the memory is in the caches.
        let mut left = Vec::new();
        for _ in 0..3 {
            pressure.handle(used(90), 85, 80_000);
            left.extend(pressure.caches());
        }
        assert_eq!(left, [18_750, 14_061, 10_545], "a quarter goes at each look");
    }

    #[test]
    fn caches_have_what_all_else_leaves() {
        let mut pressure = Pressure::new();
        // 75 % are enough, and 18.75 % of them are for buffers and pipes.
        pressure.handle(used(50), 85, 0);
        assert_eq!(pressure.caches(), Some(6_250));
        pressure.handle(used(56), 85, 6_250);
        assert_eq!(pressure.caches(), Some(6_500), "they are full");
        pressure.handle(used(65), 85, 5_000);
        assert_eq!((pressure.caches(), pressure.is_short()), (Some(0), false), "all else has taken more");
    }

    #[test]
    fn no_number_overflows() {
        let most = Memory { used_bytes: u64::MAX, limit_bytes: 1 };
        assert_eq!(most.percent(), u64::MAX);
        let mut pressure = Pressure::new();
        pressure.handle(Some(Memory { used_bytes: u64::MAX, limit_bytes: u64::MAX }), 85, u64::MAX);
        assert!(pressure.is_short());
    }
}
