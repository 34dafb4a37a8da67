//! A set of numbers as ranges: bytes of a stream, or packets.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch each other: the start, and the end behind the last number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn first(&self) -> Option<Range<u64>> {
        self.0.first_key_value().map(|(start, end)| *start..*end)
    }

    /// Returns the ranges from the highest to the lowest.
    pub(super) fn newest_first(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().rev().map(|(start, end)| *start..*end)
    }

    pub(super) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((other, other_end)) = self.0.range(..=end).next_back().map(|(a, b)| (*a, *b)) {
            if other_end < start {
                break;
            }
            (start, end) = (start.min(other), end.max(other_end));
            self.0.remove(&other);
        }
        self.0.insert(start, end);
    }

    pub(super) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((start, end)) = self.0.range(..range.end).next_back().map(|(a, b)| (*a, *b)) {
            if end <= range.start {
                break;
            }
            self.0.remove(&start);
            if range.end < end {
                self.0.insert(range.end, end);
            }
            if start < range.start {
                self.0.insert(start, range.start);
            }
        }
    }

    /// Returns the parts of `range` that are not in the set.
    pub(super) fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (mut from, mut parts) = (range.start, Vec::new());
        let before = self.0.range(..=range.start).next_back();
        let within =
            self.0.range(range.start.saturating_add(1)..range.end.max(range.start.saturating_add(1)));
        for (start, end) in before.into_iter().chain(within) {
            if from < *start {
                parts.push(from..(*start).min(range.end));
            }
            from = from.max(*end);
        }
        if from < range.end {
            parts.push(from..range.end);
        }
        parts
    }

    /// Returns the end of the range that begins at `at` or before and holds `at`, and removes it.
    pub(super) fn take_at(&mut self, at: u64) -> Option<u64> {
        let (start, end) = self.0.range(..=at).next_back().map(|(a, b)| (*a, *b))?;
        if end > at || start == at {
            self.0.remove(&start);
            return Some(end);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Compares the ranges with a set of all numbers.
    #[test]
    fn they_hold_what_a_set_of_numbers_holds() {
        let mut dice = 5_u64;
        let mut roll = move |n: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % n
        };
        for _ in 0..300 {
            let (mut ranges, mut all) = (Ranges::default(), BTreeSet::new());
            for _ in 0..60 {
                let start = roll(64);
                let range = start..start + roll(12);
                match roll(3) {
                    0 => {
                        ranges.remove(range.clone());
                        all.retain(|number| !range.contains(number));
                    }
                    1 => {
                        let missing: BTreeSet<u64> =
                            ranges.missing(range.clone()).into_iter().flatten().collect();
                        assert_eq!(missing, range.filter(|number| !all.contains(number)).collect());
                    }
                    _ => {
                        ranges.insert(range.clone());
                        all.extend(range);
                    }
                }
                let held: BTreeSet<u64> = ranges.newest_first().flatten().collect();
                assert_eq!(held, all);
                let touching: Vec<_> = ranges.newest_first().collect();
                assert!(touching.windows(2).all(|pair| pair[1].end < pair[0].start), "{ranges:?}");
            }
        }
    }
}
