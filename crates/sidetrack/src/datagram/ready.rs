//! Wakes one task for many sockets, and tells it which of them are ready.

use sidetrack_sys::sync::lock;
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};

/// The sockets of one task that may be ready.
#[derive(Debug, Default)]
pub(super) struct Ready {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Slots of associations. At most one entry for each wake-up of a socket or of a flow.
    slots: Vec<u32>,
    task: Option<Waker>,
}

impl Ready {
    /// Returns the waker for one slot.
    pub(super) fn waker(self: &Arc<Self>, slot: u32) -> Waker {
        Waker::from(Arc::new(OfSlot { ready: self.clone(), slot }))
    }

    /// Sets the task that is woken.
    pub(super) fn set_task(&self, waker: &Waker) {
        let mut inner = lock(&self.inner);
        if !inner.task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            inner.task = Some(waker.clone());
        }
    }

    /// Exchanges the list of ready slots for this one, which is empty.
    pub(super) fn exchange(&self, slots: &mut Vec<u32>) {
        slots.clear();
        std::mem::swap(&mut lock(&self.inner).slots, slots);
    }

    /// Wakes the task for a slot.
    pub(super) fn notify(&self, slot: u32) {
        let mut inner = lock(&self.inner);
        // A socket and a kill may both wake a slot before the task looks: one entry is enough.
        if inner.slots.last() != Some(&slot) {
            inner.slots.push(slot);
        }
        if let Some(task) = inner.task.take() {
            task.wake();
        }
    }
}

/// The waker of one slot.
struct OfSlot {
    ready: Arc<Ready>,
    slot: u32,
}

impl Wake for OfSlot {
    fn wake(self: Arc<Self>) {
        self.ready.notify(self.slot);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.notify(self.slot);
    }
}
