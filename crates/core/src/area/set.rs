//! A small set of small numbers, stored as bits: attributes or functions of a catalogue.

use std::fmt;

const WORDS: usize = 4;

/// A set of numbers from 0 to [`SmallSet::MAX`] - 1. A copy and every operation cost a few instructions, so that all
/// pairs of a thousand nodes can be compared quickly.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SmallSet([u64; WORDS]);

impl SmallSet {
    /// One more than the largest number that a set can hold.
    pub const MAX: usize = 64 * WORDS;

    /// The empty set.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// Makes a set of this number alone. The set is empty if the number does not fit.
    pub fn of(number: usize) -> Self {
        let mut set = Self::EMPTY;
        set.insert(number);
        set
    }

    /// Adds a number. Returns false if it does not fit.
    pub fn insert(&mut self, number: usize) -> bool {
        let word = self.0.get_mut(number / 64);
        word.map(|word| *word |= 1 << (number % 64)).is_some()
    }

    /// Whether the set contains a number.
    pub fn contains(&self, number: usize) -> bool {
        self.0.get(number / 64).is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    /// Returns how many numbers the set contains.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// Whether `other` contains all numbers of this set.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.minus(other).is_empty()
    }

    /// Returns the numbers that are in at least one of both sets.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a | b)
    }

    /// Returns the numbers that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & b)
    }

    /// Returns the numbers of this set that are not in the other.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & !b)
    }

    /// Returns the numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        let words = self.0;
        words.into_iter().enumerate().flat_map(|(index, word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros();
                let next = rest.checked_sub(1)?;
                rest &= next;
                Some(64 * index + bit as usize)
            })
        })
    }

    fn zip(&self, other: &Self, operation: impl Fn(u64, u64) -> u64) -> Self {
        Self(std::array::from_fn(|at| operation(self.0[at], other.0[at])))
    }
}

impl FromIterator<usize> for SmallSet {
    /// Makes a set. Numbers that do not fit are left out.
    fn from_iter<I: IntoIterator<Item = usize>>(numbers: I) -> Self {
        let mut set = Self::EMPTY;
        for number in numbers {
            set.insert(number);
        }
        set
    }
}

impl fmt::Debug for SmallSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_put_in_and_nothing_else() {
        let numbers = [0, 1, 63, 64, 127, 200, 255];
        let set: SmallSet = numbers.into_iter().chain([256, 4000]).collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), numbers);
        assert_eq!(set.len(), numbers.len());
        assert!(!SmallSet::default().insert(SmallSet::MAX) && SmallSet::of(256).is_empty());
        let odd: SmallSet = [1, 63, 255].into_iter().collect();
        assert!(odd.is_subset(&set) && !set.is_subset(&odd));
        assert_eq!(set.minus(&odd).union(&odd), set);
        assert_eq!(set.intersection(&odd), odd);
    }
}
