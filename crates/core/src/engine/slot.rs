//! What the engine's tables are indexed by: the place of a connection, and the side of a connection.
//!
//! The engine itself makes every [`Slot`], and it never shortens a table. So an index outside a table is an error of the
//! engine, whatever packets come: see [`Table::at`].

use super::narrow::length;
use crate::flow::Side;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// The place of a connection in the tables of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u32);

impl Slot {
    /// The place of an engine's first connection.
    pub const FIRST: Self = Self(0);

    /// No place.
    pub(super) const NONE: Self = Self(u32::MAX);

    /// Returns the number of the place, as the timing wheel and the ports store it.
    #[inline]
    pub(super) const fn number(self) -> u32 {
        self.0
    }

    /// Returns the slot that [`Slot::number`] was called on.
    #[inline]
    pub(super) const fn of_number(number: u32) -> Self {
        Self(number)
    }

    /// Returns the value under which the index finds the tuple of a side's packets.
    #[inline]
    pub(super) fn entry(self, from: Side) -> u32 {
        self.0 << 1 | u32::from(from == Side::Server)
    }

    /// Returns what [`Slot::entry`] was made of.
    #[inline]
    pub(super) const fn of_entry(value: u32) -> (Self, Side) {
        (Self(value >> 1), if value & 1 == 0 { Side::Client } else { Side::Server })
    }
}

/// The place of the state that a connection needs only during some phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlowSlot(u32);

impl SlowSlot {
    /// The connection has no such state.
    pub(super) const NONE: Self = Self(u32::MAX);

    /// Returns its number, which only serves to load a cache line.
    #[inline]
    pub(super) const fn number(self) -> u32 {
        self.0
    }
}

impl Default for SlowSlot {
    fn default() -> Self {
        Self::NONE
    }
}

/// The index of a table.
pub(super) trait Place: Copy {
    fn of_number(number: u32) -> Self;
    fn at(self) -> usize;
}

impl Place for Slot {
    #[inline]
    fn of_number(number: u32) -> Self {
        Self(number)
    }

    #[inline]
    fn at(self) -> usize {
        self.0 as usize
    }
}

impl Place for SlowSlot {
    #[inline]
    fn of_number(number: u32) -> Self {
        Self(number)
    }

    #[inline]
    fn at(self) -> usize {
        self.0 as usize
    }
}

/// Rows that are used again and never removed.
#[derive(Debug)]
pub(super) struct Table<I, T> {
    rows: Vec<T>,
    // Apart from the rest: no packet needs it. The counter would make every read of a table one that may change it.
    outside: Box<Outside<T>>,
    by: PhantomData<I>,
}

/// What an impossible index finds.
#[derive(Debug, Default)]
struct Outside<T> {
    /// An empty row.
    row: T,
    impossible: Cell<u64>,
    /// `impossible` when the row was emptied.
    cleared: u64,
}

impl<T> Outside<T> {
    // Inlined: a call here would keep values of the usual way out of registers.
    #[inline(always)]
    fn count(&self) {
        debug_assert!(false, "an index outside a table of the engine");
        self.impossible.set(self.impossible.get().wrapping_add(1));
    }
}

impl<I: Place, T: Default> Table<I, T> {
    /// Returns a table without rows that reserves memory for `rows` of them.
    pub(super) fn new(rows: usize) -> Self {
        Self { rows: Vec::with_capacity(rows), outside: Box::default(), by: PhantomData }
    }

    /// Returns a table of empty rows.
    pub(super) fn filled(rows: usize) -> Self
    where
        T: Clone,
    {
        Self { rows: vec![T::default(); rows], ..Self::new(0) }
    }

    /// Adds an empty row.
    #[inline]
    pub(super) fn add(&mut self) -> I {
        let number = length(self.rows.len());
        self.rows.push(T::default());
        I::of_number(number)
    }

    /// Returns a row that may not exist.
    #[inline]
    pub(super) fn get(&self, at: I) -> Option<&T> {
        self.rows.get(at.at())
    }

    /// The same, to change it.
    #[inline]
    pub(super) fn get_mut(&mut self, at: I) -> Option<&mut T> {
        self.rows.get_mut(at.at())
    }

    /// Returns a row that exists. If it does not, the engine has an error: a debug build panics, and any other build counts
    /// it ([`Counters::internal`](super::Counters::internal)) and goes on with an empty row.
    #[inline]
    pub(super) fn at(&self, at: I) -> &T {
        match self.rows.get(at.at()) {
            Some(row) => row,
            None => {
                self.outside.count();
                &self.outside.row
            }
        }
    }

    /// The same, to change it. [`Table::clear_outside`] empties the row that an impossible index finds.
    #[inline]
    pub(super) fn at_mut(&mut self, at: I) -> &mut T {
        match self.rows.get_mut(at.at()) {
            Some(row) => row,
            None => {
                self.outside.count();
                &mut self.outside.row
            }
        }
    }

    /// Empties the row that an impossible index finds, if one has found it since the last call.
    pub(super) fn clear_outside(&mut self) {
        let Outside { row, impossible, cleared } = &mut *self.outside;
        if *cleared != impossible.get() {
            (*row, *cleared) = (T::default(), impossible.get());
        }
    }

    /// Returns how often [`Table::at`] was given an impossible index.
    pub(super) fn impossible(&self) -> u64 {
        self.outside.impossible.get()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.rows.iter()
    }

    /// Returns the places of all rows.
    pub(super) fn places(&self) -> impl Iterator<Item = I> + Clone + use<I, T> {
        (0..length(self.rows.len())).map(I::of_number)
    }

    /// Returns the address of the rows and the size of the reserved memory in bytes.
    pub(super) fn memory(&self) -> (usize, usize) {
        (self.rows.as_ptr().addr(), self.rows.capacity() * size_of::<T>())
    }
}

/// What both sides of a connection have, the client's first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Pair<T>(pub [T; 2]);

impl<T> Index<Side> for Pair<T> {
    type Output = T;

    #[inline]
    fn index(&self, side: Side) -> &T {
        &self.0[side as usize]
    }
}

impl<T> IndexMut<Side> for Pair<T> {
    #[inline]
    fn index_mut(&mut self, side: Side) -> &mut T {
        &mut self.0[side as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_the_index_names_a_slot_and_a_side() {
        for number in [0, 1, (1 << 24) - 1] {
            for side in Side::BOTH {
                let slot = Slot::of_number(number);
                assert_eq!(Slot::of_entry(slot.entry(side)), (slot, side));
            }
        }
    }

    #[test]
    fn a_row_is_found_and_a_pair_has_two_sides() {
        let mut table: Table<Slot, Pair<u8>> = Table::new(1);
        let first = table.add();
        table.at_mut(first)[Side::Server] = 7;
        assert_eq!(*table.at(first), Pair([0, 7]));
        assert_eq!((table.at(first)[Side::Client], table.get(Slot::of_number(1))), (0, None));
        assert_eq!(table.impossible(), 0);
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "an index outside a table"))]
    fn an_impossible_index_is_counted() {
        let mut table: Table<Slot, u8> = Table::new(0);
        *table.at_mut(Slot::of_number(3)) = 5;
        assert_eq!(
            (*table.at_mut(Slot::of_number(3)), table.impossible()),
            (0, 2),
            "a debug build ends before"
        );
    }
}
