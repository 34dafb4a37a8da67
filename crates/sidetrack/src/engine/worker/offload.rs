//! What a worker lends to the kernel, and takes back.

use super::Worker;
use sidetrack_core::time::Instant;

impl Worker {
    /// Lends connections whose first bytes are about to be sent: before that, so that the answer finds the kernel ready.
    pub(super) fn offload_early(&mut self, now: Instant) {
        while let Some(offload) = &mut self.engine.callbacks_mut().offload
            && let Some(slot) = offload.next_early()
        {
            self.offload_one(now, slot, 0);
        }
    }

    fn offload_one(&mut self, now: Instant, slot: u32, returns: u32) {
        let Some(translation) = self.engine.translation(slot) else { return };
        let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
        if let Some(to) = offload.offload(slot, returns, &translation, now) {
            self.engine.lend(slot, to);
        }
    }

    /// Lends connections to the kernel, and learns what became of those it has. Everything was sent before.
    pub(super) fn offload(&mut self, now: Instant) {
        while let Some(offload) = &mut self.engine.callbacks_mut().offload
            && let Some((slot, returns)) = offload.next(now)
        {
            self.offload_one(now, slot, returns);
        }
        self.tell_standing();
        let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
        let driver = &self.driver;
        let waited = offload.carry_on(|mark| driver.is_past(mark), now);
        if !waited.is_empty() {
            waited.into_iter().for_each(|stray| self.stray(now, stray));
            self.driver.flush();
            self.tell_standing();
        }
        self.see_ends(now);
        self.reclaim(now);
    }

    /// Connections whose both sides have closed there.
    fn see_ends(&mut self, now: Instant) {
        let mut found = false;
        while let Some(offload) = &mut self.engine.callbacks_mut().offload
            && let Some((to, slot)) = offload.over()
        {
            found = true;
            self.engine.over(now, slot, to);
        }
        if let Some(offload) = &mut self.engine.callbacks_mut().offload {
            offload.looked(now, found);
        }
        if found {
            self.note_records();
        }
    }

    /// The kernel is told what was handled and sent here of connections that it has.
    fn tell_standing(&mut self) {
        let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
        for (to, slot) in offload.touched() {
            let standing = self.engine.standing(slot, to);
            if let (Some(offload), Some(standing)) = (&mut self.engine.callbacks_mut().offload, standing) {
                offload.stands(to, &standing);
            }
        }
    }

    /// Takes back connections that the kernel has done with.
    fn reclaim(&mut self, now: Instant) {
        while let Some(offload) = &mut self.engine.callbacks_mut().offload
            && let Some((to, slot)) = offload.done_with(now)
        {
            if let Some(slot) = slot {
                self.engine.reclaim(now, slot);
            }
            if let Some(offload) = &mut self.engine.callbacks_mut().offload {
                offload.forget(to, now);
            }
        }
    }
}
