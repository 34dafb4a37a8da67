//! What a worker lends to the kernel, and takes back.

use super::Worker;
use sidetrack_core::time::Instant;

impl Worker {
    /// Lends connections to the kernel, and learns what became of those it has. Everything was sent before.
    pub(super) fn lend(&mut self, now: Instant) {
        let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
        let mut more = offload.next(now);
        while let Some((slot, returns)) = more {
            let translation = self.engine.translation(slot);
            let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
            let to = translation.and_then(|translation| offload.lend(slot, returns, &translation, now));
            more = offload.next(now);
            if let Some(to) = to {
                self.engine.lend(slot, to);
            }
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
        self.reclaim(now);
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
