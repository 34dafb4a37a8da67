//! Bounds what questions about names can carry out of a jail.
//!
//! The owner of a zone sees each question about a name below it. So a command that may ask for `*.example` can send bytes to
//! that owner in the labels. Names that an entry writes out carry nothing. For all others the length and the rate of new names
//! are bounded; a name that was asked before is free.

use crate::flow::HostName;
use crate::policy::NameMatch;
use crate::time::Instant;
use std::collections::BTreeSet;

/// The longest label before the part that an entry writes out, bytes. A digest in hexadecimal (SHA-1) has 40.
const LABEL_BYTES_MAX: usize = 40;
/// The longest text before that part, bytes.
const TEXT_BYTES_MAX: usize = 80;
/// New names that may come at once.
const BURST: u64 = 128;
/// The time after which one more new name may come, ns: two names per second.
const REFILL_NS: u64 = 500_000_000;
/// Most names that are remembered. Later ones are new each time.
const REMEMBERED_MAX: usize = 4096;

/// Decides which questions may leave the host.
///
/// ```text
/// not listed ------------------------------------------> NotAllowed
/// written out in an entry -----------------------------> passes
/// wildcard --too long----------------------------------> TooLong
///          --asked before------------------------------> passes
///          --new, tokens left (one less)---------------> passes, remembered
///          --new, no tokens----------------------------> TooMany
/// ```
#[derive(Clone, Debug)]
pub struct NameBudget {
    asked: BTreeSet<HostName>,
    /// The time at which the budget is whole again. It is at most [`BURST`] refills ahead.
    whole_at_ns: u64,
}

/// Why a question is not asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRefusal {
    /// No entry lets a connection to the name pass.
    NotAllowed,
    /// A label, or all labels before the part that the entry writes out, are too long.
    TooLong,
    /// Too many different names in a short time.
    TooMany,
}

impl NameRefusal {
    /// Returns the reason in words.
    pub const fn why(self) -> &'static str {
        match self {
            Self::NotAllowed => "the name is not allowed",
            Self::TooLong => "the labels are too long for a wildcard",
            Self::TooMany => "too many different names for a wildcard",
        }
    }
}

impl Default for NameBudget {
    fn default() -> Self {
        Self::new()
    }
}

impl NameBudget {
    /// Makes a full budget.
    pub const fn new() -> Self {
        Self { asked: BTreeSet::new(), whole_at_ns: 0 }
    }

    /// Whether a question about `name` may be asked. `how` tells which entry lets it pass. Returns whether the entry
    /// writes the name out.
    ///
    /// # Errors
    /// The question must not leave the host.
    pub fn ask(&mut self, now: Instant, name: &HostName, how: NameMatch) -> Result<bool, NameRefusal> {
        let written_out = match how {
            NameMatch::No => return Err(NameRefusal::NotAllowed),
            NameMatch::Exact => return Ok(true),
            NameMatch::Wildcard { written_bytes } => written_bytes,
        };
        let free = name.as_str().len().saturating_sub(written_out);
        let text = name.as_str().get(..free).unwrap_or_default();
        if free > TEXT_BYTES_MAX || text.split('.').any(|label| label.len() > LABEL_BYTES_MAX) {
            return Err(NameRefusal::TooLong);
        }
        if self.asked.contains(name) {
            return Ok(false);
        }
        let from = self.whole_at_ns.max(now.as_nanos());
        if from - now.as_nanos() > (BURST - 1) * REFILL_NS {
            return Err(NameRefusal::TooMany);
        }
        self.whole_at_ns = from.saturating_add(REFILL_NS);
        if self.asked.len() < REMEMBERED_MAX {
            self.asked.insert(name.clone());
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(budget: &mut NameBudget, ms: u64, name: &str) -> Result<bool, NameRefusal> {
        let how = NameMatch::Wildcard { written_bytes: ".pkg.example".len() };
        budget.ask(Instant::from_millis(ms), &name.parse().unwrap(), how)
    }

    #[test]
    fn what_is_written_out_is_free_and_what_is_not_listed_is_refused() {
        let mut budget = NameBudget::new();
        let long: HostName = format!("{}.pkg.example", "a".repeat(63)).parse().unwrap();
        for _ in 0..1000 {
            assert_eq!(budget.ask(Instant::ZERO, &long, NameMatch::Exact), Ok(true));
        }
        assert_eq!(budget.ask(Instant::ZERO, &long, NameMatch::No), Err(NameRefusal::NotAllowed));
    }

    #[test]
    fn labels_of_a_wildcard_are_bounded() {
        let mut budget = NameBudget::new();
        assert_eq!(ask(&mut budget, 0, &format!("{}.pkg.example", "a".repeat(40))), Ok(false));
        let long = format!("{}.pkg.example", "a".repeat(41));
        assert_eq!(ask(&mut budget, 0, &long), Err(NameRefusal::TooLong));
        let many = format!("{0}.{0}.{0}.pkg.example", "a".repeat(30));
        assert_eq!(ask(&mut budget, 0, &many), Err(NameRefusal::TooLong));
    }

    #[test]
    fn new_names_of_a_wildcard_are_bounded_and_known_ones_are_free() {
        let mut budget = NameBudget::new();
        let passed = |budget: &mut NameBudget, ms, from: u64| {
            (from..from + 1000).filter(|n| ask(budget, ms, &format!("n{n}.pkg.example")).is_ok()).count()
        };
        assert_eq!(passed(&mut budget, 1000, 0), 128);
        assert_eq!(passed(&mut budget, 1000, 0), 128, "known names");
        assert_eq!(passed(&mut budget, 1000, 5000), 0);
        assert_eq!(passed(&mut budget, 2000, 5000), 2, "two per second");
        assert_eq!(passed(&mut budget, 500_000, 10_000), 128, "never more than a burst");
        // A clock that goes back gives nothing.
        assert_eq!(passed(&mut budget, 0, 20_000), 0);
    }

    #[test]
    fn memory_is_bounded() {
        let mut budget = NameBudget::new();
        for n in 0..20_000 {
            let _ = ask(&mut budget, n * 1000, &format!("n{n}.pkg.example"));
        }
        assert_eq!(budget.asked.len(), REMEMBERED_MAX);
    }
}
