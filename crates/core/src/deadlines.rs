//! Who is to be looked at when: an order of places by deadline, for owners whose deadlines mostly move later.
//!
//! A deadline that moves later costs nothing: the place is looked at when the old one comes, and put back for the new one. Only
//! one that moves earlier changes the order. So a flow whose idle time-out moves on with every byte is looked at once an idle
//! time-out, and a place that is used again and again by short flows as rarely.

use crate::time::Instant;
use std::collections::BTreeSet;

/// See the module. Holds each place at most once; its memory is bounded by the highest number of a place.
#[derive(Clone, Debug, Default)]
pub struct Deadlines {
    order: BTreeSet<(Instant, u32)>,
    /// When each place is looked at next.
    looks: Vec<Option<Instant>>,
}

impl Deadlines {
    /// Nobody is to be looked at.
    pub fn new() -> Self {
        Self::default()
    }

    /// When this place is looked at next; `None`: never, as yet.
    pub fn look_at(&self, place: u32) -> Option<Instant> {
        *self.looks.get(usize::try_from(place).ok()?)?
    }

    /// Sees to it that this place is looked at by `at`. A look that comes before that anyway will do.
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

    /// The next place whose look has come, the longest due first. It is not looked at again until [`Self::by`] says so.
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

    /// When the first look comes.
    pub fn deadline(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }
}
