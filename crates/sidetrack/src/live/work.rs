//! What the rounds of a worker of the packet engine have done, for the metrics. The worker writes it once a second.

use sidetrack_core::engine::{Load, Totals};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the rounds of workers have done, and what was shed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    /// The rounds.
    pub totals: Totals,
    /// Connections refused or ended because the table, the ports or the memory for held bytes were used up.
    pub no_room: u64,
}

impl WorkCounts {
    /// Returns the rounds by the word of the load.
    pub fn rounds(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Load::ALL.into_iter().map(Load::as_str).zip(self.totals.rounds)
    }

    /// Returns what was served, by the word of its kind, the highest priority first.
    pub const fn served(&self) -> [(&'static str, u64); 4] {
        let all = &self.totals;
        [("connections", all.packets), ("timers", all.timers), ("merged", all.merged), ("new", all.openings)]
    }

    /// Returns the new connections that were shed, by the reason.
    pub const fn shed(&self) -> [(&'static str, u64); 2] {
        [("overload", self.totals.shed), ("room", self.no_room)]
    }

    /// Adds the counts of another worker.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        let (all, more) = (&mut self.totals, &other.totals);
        all.rounds.iter_mut().zip(more.rounds).for_each(|(all, more)| *all += more);
        all.packets += more.packets;
        all.timers += more.timers;
        all.merged += more.merged;
        all.openings += more.openings;
        all.shed += more.shed;
        self.no_room += other.no_room;
        self
    }

    const fn words(&self) -> [u64; WORDS] {
        let all = &self.totals;
        let [calm, overloaded, recovering] = all.rounds;
        let (packets, timers, merged) = (all.packets, all.timers, all.merged);
        [calm, overloaded, recovering, packets, timers, merged, all.openings, all.shed, self.no_room]
    }
}

const WORDS: usize = 9;

/// The counts of one worker, which other threads read.
#[derive(Debug, Default)]
pub struct Work([AtomicU64; WORDS]);

impl Work {
    /// Publishes the counts. Only the worker calls this.
    pub fn publish(&self, counts: &WorkCounts) {
        for (place, count) in self.0.iter().zip(counts.words()) {
            place.store(count, Relaxed);
        }
    }

    /// Returns the counts as last published.
    pub fn counts(&self) -> WorkCounts {
        let mut words = [0; WORDS];
        words.iter_mut().zip(&self.0).for_each(|(word, place)| *word = place.load(Relaxed));
        let [calm, overloaded, recovering, packets, timers, merged, openings, shed, no_room] = words;
        let rounds = [calm, overloaded, recovering];
        WorkCounts { totals: Totals { rounds, packets, timers, merged, openings, shed }, no_room }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_through_and_add_up() {
        let totals = Totals { rounds: [1, 2, 3], packets: 4, timers: 5, merged: 6, openings: 7, shed: 8 };
        let counts = WorkCounts { totals, no_room: 9 };
        let work = Work::default();
        work.publish(&counts);
        assert_eq!(work.counts(), counts);
        assert_eq!(counts.and(&counts).words(), counts.words().map(|word| 2 * word));
        assert_eq!(counts.rounds().collect::<Vec<_>>(), [("calm", 1), ("overloaded", 2), ("recovering", 3)]);
    }
}
