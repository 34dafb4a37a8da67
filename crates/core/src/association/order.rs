//! Lists of slots in order of their last use: a move to the end is O(1) and allocates nothing.

/// The neighbours of one slot in one list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Links {
    prev: Option<u32>,
    next: Option<u32>,
}

/// A list of slots, the one that was unused for longest first. The links stand in the slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    first: Option<u32>,
    last: Option<u32>,
}

/// The slots that have links for a list.
pub(super) trait Linked {
    /// Returns the links of a slot.
    fn links(&mut self, slot: u32) -> Option<&mut Links>;
}

impl Order {
    /// Returns the slot that was unused for longest.
    pub(super) const fn oldest(&self) -> Option<u32> {
        self.first
    }

    /// Returns the slot behind this one.
    pub(super) fn next(slots: &mut impl Linked, slot: u32) -> Option<u32> {
        slots.links(slot)?.next
    }

    /// Appends a slot that is not in the list.
    pub(super) fn append(&mut self, slots: &mut impl Linked, slot: u32) {
        let Some(links) = slots.links(slot) else { return };
        *links = Links { prev: self.last, next: None };
        match self.last.and_then(|last| slots.links(last)) {
            Some(links) => links.next = Some(slot),
            None => self.first = Some(slot),
        }
        self.last = Some(slot);
    }

    /// Removes a slot that is in the list.
    pub(super) fn remove(&mut self, slots: &mut impl Linked, slot: u32) {
        let Some(Links { prev, next }) = slots.links(slot).map(std::mem::take) else { return };
        match prev.and_then(|prev| slots.links(prev)) {
            Some(links) => links.next = next,
            None => self.first = next,
        }
        match next.and_then(|next| slots.links(next)) {
            Some(links) => links.prev = prev,
            None => self.last = prev,
        }
    }

    /// Moves a slot of the list to the end, because it was used.
    pub(super) fn used(&mut self, slots: &mut impl Linked, slot: u32) {
        if self.last != Some(slot) {
            self.remove(slots, slot);
            self.append(slots, slot);
        }
    }
}
