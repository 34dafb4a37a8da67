//! An ordering of slots by deadline, for owners whose deadlines mostly move later.
//!
//! A deadline that moves later costs nothing: the slot is checked at the old deadline, and then reinserted with the
//! new one. Only a deadline that moves earlier changes the order. So a flow whose idle time-out restarts with every
//! byte is checked once per idle time-out. A slot that many short flows use one after the other is checked as rarely.

use crate::time::Instant;
use std::collections::BTreeSet;

/// The slots in order of their next check. Contains each slot at most once. The highest slot number limits the
/// memory.
#[derive(Clone, Debug, Default)]
pub struct Deadlines {
    order: BTreeSet<(Instant, u32)>,
    /// The next check of each slot.
    looks: Vec<Option<Instant>>,
}

impl Deadlines {
    /// Makes an empty order.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the next check of this slot. `None` if there is none.
    pub fn look_at(&self, place: u32) -> Option<Instant> {
        *self.looks.get(usize::try_from(place).ok()?)?
    }

    /// Ensures that this slot is checked at `at` or earlier.
    pub fn by(&mut self, place: u32, at: Instant) {
        let Ok(index) = usize::try_from(place) else { return };
        if self.looks.len() <= index {
            self.looks.resize(index + 1, None);
        }
        if let Some(look) = self.looks.get_mut(index) {
            match *look {
                Some(sooner) if sooner <= at => return,
                Some(later) => drop(self.order.remove(&(later, place))),
                None => {}
            }
            *look = Some(at);
            self.order.insert((at, place));
        }
    }

    /// Returns the next slot whose check is due, the most overdue first. It is not checked again until [`Self::by`]
    /// requests it.
    pub fn due(&mut self, now: Instant) -> Option<u32> {
        let (at, place) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.order.pop_first();
        if let Some(look) = usize::try_from(place).ok().and_then(|index| self.looks.get_mut(index)) {
            *look = None;
        }
        Some(place)
    }

    /// Returns the time of the first check.
    pub fn deadline(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }
}
