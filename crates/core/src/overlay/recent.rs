//! A bounded table of conversations: the one that was silent for longest is forgotten first.

use super::packet::Ends;
use std::collections::BTreeMap;

/// What is known of each conversation, by the two ends that packets of one direction name.
#[derive(Clone, Debug)]
pub(super) struct Recent<V> {
    entries: BTreeMap<Ends, (u64, V)>,
    by_age: BTreeMap<u64, Ends>,
    clock: u64,
    most: usize,
}

impl<V> Recent<V> {
    /// Returns an empty table for at most `most` conversations.
    pub(super) fn new(most: usize) -> Self {
        Self { entries: BTreeMap::new(), by_age: BTreeMap::new(), clock: 0, most }
    }

    /// Returns what is known of a conversation.
    pub(super) fn get(&self, ends: &Ends) -> Option<&V> {
        self.entries.get(ends).map(|(_, value)| value)
    }

    /// Marks a conversation as the latest and returns what is known of it.
    pub(super) fn touch(&mut self, ends: &Ends) -> Option<&mut V> {
        let (age, value) = self.entries.get_mut(ends)?;
        self.by_age.remove(age);
        self.clock += 1;
        *age = self.clock;
        self.by_age.insert(self.clock, *ends);
        Some(value)
    }

    /// Enters a conversation as the latest, or replaces what is known of it.
    pub(super) fn put(&mut self, ends: Ends, value: V) {
        if let Some(known) = self.touch(&ends) {
            *known = value;
            return;
        }
        if self.entries.len() >= self.most
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.entries.remove(&oldest);
        }
        self.clock += 1;
        self.entries.insert(ends, (self.clock, value));
        self.by_age.insert(self.clock, ends);
    }

    /// Returns all, the one that was silent for longest first.
    pub(super) fn oldest_first(&self) -> impl Iterator<Item = (&Ends, &V)> {
        self.by_age.values().filter_map(|ends| Some((ends, self.get(ends)?)))
    }

    /// Forgets a conversation.
    pub(super) fn remove(&mut self, ends: &Ends) {
        if let Some((age, _)) = self.entries.remove(ends) {
            self.by_age.remove(&age);
        }
    }

    /// Returns how many conversations are known.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        debug_assert_eq!(self.entries.len(), self.by_age.len(), "each has one age");
        self.entries.len()
    }
}
