//! Offloads connections of a worker to the kernel, and takes them back.

use super::super::offload::Offload;
use super::super::open::Interface;
use super::super::select::Select;
use super::super::targets::Targets;
use super::Worker;
use crate::live::Clock;
use sidetrack_core::engine::{self, Engine, Slot};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::{CookieSettings, Cookies, OffloadMemory, monotonic_ns};
use std::sync::Arc;

/// What a worker needs to offload connections.
pub(super) struct OffloadInputs {
    pub(super) offload_memory: Option<(Arc<OffloadMemory>, u32)>,
    pub(super) interfaces: Vec<Interface>,
    pub(super) targets: Option<Arc<Targets>>,
}

impl OffloadInputs {
    pub(super) fn offload(&self, clock: Clock) -> Option<Offload> {
        let (offload_memory, worker) = self.offload_memory.as_ref()?;
        Some(Offload::new(offload_memory.part(*worker), self.interfaces.clone(), clock, self.targets.clone()))
    }
}

/// Lets XDP answer SYNs as this engine would.
pub(super) fn answer(cookies: Option<&(Arc<Cookies>, u32)>, engine: &Engine<Select>, clock: Clock) {
    let Some((cookies, worker)) = cookies else { return };
    let engine::Cookies { key, clock: stamps, mss, window, window_shift } = engine.cookies();
    let behind_ns = monotonic_ns().saturating_sub(clock.now().as_nanos());
    cookies.set(*worker, &CookieSettings { key, clock: stamps, behind_ns, mss, window, shift: window_shift });
}

impl Worker {
    /// Offloads connections whose first bytes are about to be sent. This must precede the sending: the kernel must be
    /// ready when the answer comes.
    pub(super) fn offload_early(&mut self, now: Instant) {
        while let Some(offload) = &mut self.engine.callbacks_mut().offload
            && let Some(slot) = offload.next_early()
        {
            self.offload_one(now, slot, 0);
        }
    }

    fn offload_one(&mut self, now: Instant, slot: Slot, returns: u32) {
        let Some(translation) = self.engine.translation(slot) else { return };
        let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
        if let Some(to) = offload.offload(slot, returns, &translation, now) {
            self.engine.offload(slot, to);
        }
    }

    /// Offloads connections, and copies back the state of those that the kernel has. All packets must have been sent
    /// before.
    pub(super) fn offload(&mut self, now: Instant) {
        while let Some(offload) = &mut self.engine.callbacks_mut().offload
            && let Some((slot, returns)) = offload.next(now)
        {
            self.offload_one(now, slot, returns);
        }
        self.tell_standing();
        // Packets that waited are handled after the programs were told what is done; then the programs get the new
        // numbers.
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

    /// Ends connections whose two sides have closed in the kernel.
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

    /// Tells the kernel the numbers of offloaded connections whose packets were handled in user space.
    fn tell_standing(&mut self) {
        let Some(offload) = &mut self.engine.callbacks_mut().offload else { return };
        for (to, slot) in offload.touched() {
            let standing = self.engine.standing(slot, to);
            if let (Some(offload), Some(standing)) = (&mut self.engine.callbacks_mut().offload, standing) {
                offload.stands(to, &standing);
            }
        }
    }

    /// Takes back connections that the kernel no longer uses.
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
