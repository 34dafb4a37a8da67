//! The timing wheel. Each connection has one entry, in a list of those due in the same 10 ms. One more list holds the
//! connections in TIME-WAIT in order of arrival.
//!
//! Entries are links in fixed arrays: arming, moving and removing are O(1) and allocate nothing. A deadline past the
//! wheel's horizon of about ten seconds is checked at the horizon and armed again. An entry is not removed when its
//! connection ends. The next connection in the same slot mostly finds it armed early enough, so a short connection costs
//! the wheel nothing. An entry that expires without a connection is dropped then.

use super::slot::{Slot, Table};
use crate::time::Instant;

/// Length of a step of the wheel, milliseconds.
pub const STEP_MS: u64 = 10;
/// Steps per turn.
const STEPS: usize = 1024;
const TURN: u64 = 1024;
const _: () = assert!(STEPS as u64 == TURN);
const NONE: u32 = u32::MAX;
const STEP_NS: u64 = STEP_MS * 1_000_000;

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
    list: u32,
}

/// Both links of an entry. Two entries share a cache line, and none spans two: one memory access instead of two.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
struct Links {
    /// In the list of its step.
    step: Link,
    /// In the list of those in TIME-WAIT; `list` is 0 for entries in it.
    wait: Link,
}

impl Default for Links {
    fn default() -> Self {
        Self { step: UNLINKED, wait: UNLINKED }
    }
}

#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
}

const EMPTY: List = List { first: NONE, last: NONE };
const UNLINKED: Link = Link { prev: NONE, next: NONE, list: NONE };
const _: () = assert!(size_of::<Links>() == 32);

/// The timing wheel.
#[derive(Debug)]
pub(super) struct Wheel {
    links: Table<Slot, Links>,
    lists: Vec<List>,
    waiting: List,
    /// One bit per step: whether its list has entries.
    busy: [u64; STEPS / 64],
    /// The step up to which all due entries were returned.
    current: u64,
}

impl Wheel {
    /// Returns a wheel for entries `0..entries`.
    pub(super) fn new(entries: usize, now: Instant) -> Self {
        Self {
            links: Table::filled(entries),
            lists: vec![EMPTY; STEPS],
            waiting: EMPTY,
            busy: [0; STEPS / 64],
            current: now.as_nanos() / STEP_NS,
        }
    }

    /// Returns how often it was given a slot that it does not have.
    pub(super) fn impossible(&self) -> u64 {
        self.links.impossible()
    }

    /// Makes sure that `slot` is returned at `at` or earlier; one that is due earlier stays where it is.
    #[inline]
    pub(super) fn arm(&mut self, slot: Slot, at: Instant) {
        let entry = slot.number();
        let step = at.as_nanos().div_ceil(STEP_NS);
        let ahead = step.saturating_sub(self.current).clamp(1, TURN - 1);
        match self.ahead(entry) {
            Some(armed) if armed <= ahead => return,
            Some(_) => self.disarm(entry),
            None => {}
        }
        let list = ((self.current + ahead) % TURN) as u32;
        self.push(entry, list);
    }

    /// Puts `slot` at the end of the list of those in TIME-WAIT.
    #[inline]
    pub(super) fn wait(&mut self, slot: Slot) {
        self.wait_no_more(slot);
        let entry = slot.number();
        let last = std::mem::replace(&mut self.waiting.last, entry);
        match self.links.get_mut(Slot::of_number(last)) {
            Some(links) => links.wait.next = entry,
            None => self.waiting.first = entry,
        }
        self.links.at_mut(Slot::of_number(entry)).wait = Link { prev: last, next: NONE, list: 0 };
    }

    /// Takes `slot` out of the list of those in TIME-WAIT, if it is there.
    #[inline]
    pub(super) fn wait_no_more(&mut self, slot: Slot) {
        let links = self.links.at_mut(slot);
        let Link { prev, next, list } = links.wait;
        if list == NONE {
            return;
        }
        links.wait = UNLINKED;
        match self.links.get_mut(Slot::of_number(prev)) {
            Some(links) => links.wait.next = next,
            None => self.waiting.first = next,
        }
        match self.links.get_mut(Slot::of_number(next)) {
            Some(links) => links.wait.prev = prev,
            None => self.waiting.last = prev,
        }
    }

    /// Returns the slot that went into TIME-WAIT next after `slot`.
    pub(super) fn waits_after(&self, slot: Slot) -> Option<Slot> {
        let next = self.links.at(slot).wait.next;
        (next != NONE).then(|| Slot::of_number(next))
    }

    /// Returns the slot that has been in TIME-WAIT longest.
    #[inline]
    pub(super) fn longest_waiting(&self) -> Option<Slot> {
        (self.waiting.first != NONE).then(|| Slot::of_number(self.waiting.first))
    }

    /// Returns the list that `slot` is in; the read brings its links into the cache.
    #[inline]
    pub(super) fn list_of(&self, slot: Slot) -> Option<u32> {
        self.links.get(slot).map(|links| links.step.list)
    }

    /// Takes `entry` out of the list of its step.
    fn disarm(&mut self, entry: u32) {
        let links = self.links.at_mut(Slot::of_number(entry));
        let Link { prev, next, list } = std::mem::replace(&mut links.step, UNLINKED);
        if list == NONE {
            return;
        }
        match self.links.get_mut(Slot::of_number(prev)) {
            Some(links) => links.step.next = next,
            None => self.list(list, |list| list.first = next),
        }
        match self.links.get_mut(Slot::of_number(next)) {
            Some(links) => links.step.prev = prev,
            None => self.list(list, |list| list.last = prev),
        }
        if prev == NONE && next == NONE {
            self.mark(list, false);
        }
    }

    /// Removes and returns the next entry due at `now`. None: all were returned, and the wheel has reached `now`.
    #[inline]
    pub(super) fn due(&mut self, now: Instant) -> Option<Slot> {
        let target = now.as_nanos() / STEP_NS;
        // No entry lies further ahead than one turn, so each step is visited at most once.
        self.current = self.current.max(target.saturating_sub(TURN));
        loop {
            let first = self.lists.get((self.current % TURN) as usize).map_or(NONE, |list| list.first);
            if first != NONE {
                self.disarm(first);
                return Some(Slot::of_number(first));
            }
            if self.current >= target {
                return None;
            }
            self.current += 1;
        }
    }

    /// Returns when [`Wheel::due`] will next return an entry; never earlier than any armed deadline.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let start = self.current % TURN;
        (0..TURN)
            .find(|ahead| {
                let step = ((start + ahead) % TURN) as usize;
                self.busy.get(step / 64).is_some_and(|word| word >> (step % 64) & 1 == 1)
            })
            .map(|ahead| Instant::from_nanos((self.current + ahead) * STEP_NS))
    }

    /// Returns the number of steps until `entry` is due; none if it is not armed.
    #[inline]
    fn ahead(&self, entry: u32) -> Option<u64> {
        let list = self.links.at(Slot::of_number(entry)).step.list;
        (list != NONE).then(|| (u64::from(list) + TURN - self.current % TURN) % TURN)
    }

    fn push(&mut self, entry: u32, list: u32) {
        let mut last = NONE;
        self.list(list, |list| {
            last = std::mem::replace(&mut list.last, entry);
            if list.first == NONE {
                list.first = entry;
            }
        });
        if let Some(links) = self.links.get_mut(Slot::of_number(last)) {
            links.step.next = entry;
        }
        self.links.at_mut(Slot::of_number(entry)).step = Link { prev: last, next: NONE, list };
        self.mark(list, true);
    }

    #[inline]
    fn list(&mut self, list: u32, change: impl FnOnce(&mut List)) {
        if let Some(list) = self.lists.get_mut(list as usize) {
            change(list);
        }
    }

    #[inline]
    fn mark(&mut self, list: u32, busy: bool) {
        if let Some(word) = self.busy.get_mut(list as usize / 64) {
            let bit = 1 << (list % 64);
            *word = if busy { *word | bit } else { *word & !bit };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn slot(number: u32) -> Slot {
        Slot::of_number(number)
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    #[test]
    fn entries_come_when_they_are_due() {
        let mut wheel = Wheel::new(4, at(0));
        wheel.arm(slot(0), at(25));
        wheel.arm(slot(1), at(5));
        wheel.arm(slot(2), at(25));
        wheel.arm(slot(2), at(400));
        assert_eq!(wheel.deadline(), Some(at(10)));
        assert_eq!(wheel.due(at(9)), None);
        assert_eq!(wheel.due(at(10)), Some(slot(1)));
        assert_eq!(wheel.due(at(29)), None);
        assert_eq!(
            (wheel.due(at(30)), wheel.due(at(30)), wheel.due(at(30))),
            (Some(slot(0)), Some(slot(2)), None)
        );
        assert_eq!(wheel.deadline(), None);
    }

    #[test]
    fn the_waiting_come_in_order() {
        let mut wheel = Wheel::new(4, at(0));
        wheel.arm(slot(1), at(50));
        for entry in [2, 1, 0, 3] {
            wheel.wait(slot(entry));
        }
        assert_eq!(wheel.longest_waiting(), Some(slot(2)));
        wheel.wait_no_more(slot(1));
        wheel.wait_no_more(slot(1));
        wheel.wait(slot(2));
        assert_eq!(wheel.due(at(1000)), Some(slot(1)), "the steps know nothing of it");
        for entry in [0, 3, 2] {
            assert_eq!(wheel.longest_waiting(), Some(slot(entry)));
            wheel.wait_no_more(slot(entry));
        }
        assert_eq!(wheel.longest_waiting(), None);
    }

    proptest! {
        #[test]
        fn it_is_a_sorted_map(steps in prop::collection::vec((0_u32..20, 0_u64..30_000, 0_u8..8), 1..300)) {
            let mut wheel = Wheel::new(20, at(0));
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            let mut now = 0;
            for (entry, ms, what) in steps {
                if what < 5 {
                    // The wheel promises the wished time or the horizon, whichever is earlier, and never later than
                    // before.
                    let due = (now + ms).div_ceil(STEP_MS).clamp(now / STEP_MS + 1, now / STEP_MS + 1023) * STEP_MS;
                    wheel.arm(slot(entry), at(now + ms));
                    model.entry(entry).and_modify(|armed| *armed = due.min(*armed)).or_insert(due);
                } else if what == 5 {
                    wheel.disarm(entry);
                    model.remove(&entry);
                } else {
                    now += ms;
                    let mut handed = Vec::new();
                    while let Some(entry) = wheel.due(at(now)) {
                        handed.push(entry.number());
                    }
                    handed.sort_unstable();
                    let due: Vec<_> = model.iter().filter(|(_, due)| **due <= now).map(|(e, _)| *e).collect();
                    model.retain(|_, due| *due > now);
                    prop_assert_eq!(handed, due);
                }
                prop_assert_eq!(wheel.deadline().map(Instant::as_nanos), model.values().min().map(|ms| ms * 1_000_000));
            }
        }
    }
}
