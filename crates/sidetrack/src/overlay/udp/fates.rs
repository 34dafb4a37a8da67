//! What happened on the way to the datagrams that a flow of UDP gets from the overlay, for its record.

use std::fmt;

/// What happened to a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::overlay) enum Fate {
    /// A copy came after its deadline, and was dropped.
    Late,
    /// It was lost on the last link, and came in time because the link sent it again.
    Recovered,
}

/// Counts of one flow and direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fates {
    late: u64,
    recovered: u64,
}

impl Fates {
    /// Counts a datagram.
    pub(super) const fn add(&mut self, fate: Fate) {
        match fate {
            Fate::Late => self.late += 1,
            Fate::Recovered => self.recovered += 1,
        }
    }

    /// Returns them in words. `None`: nothing happened.
    pub(super) fn told(self) -> Option<String> {
        (self != Self::default()).then(|| self.to_string())
    }
}

impl fmt::Display for Fates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "of the datagrams that came, {} were recovered on the last link; {} came too late",
            self.recovered, self.late
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_told_and_nothing_else() {
        let mut fates = Fates::default();
        assert_eq!(fates.told(), None);
        fates.add(Fate::Late);
        fates.add(Fate::Recovered);
        fates.add(Fate::Recovered);
        let told = "of the datagrams that came, 2 were recovered on the last link; 1 came too late";
        assert_eq!(fates.told().as_deref(), Some(told));
    }
}
