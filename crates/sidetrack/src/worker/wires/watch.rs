//! The thread that looks at flows on the wire: each when it is due, which is rarely while nothing moves.

use super::wired::Wired;
use super::{LINGERS, Wires};
use sidetrack_core::deadlines::Deadlines;
use sidetrack_core::flow::{EndReason, FlowId};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::{WireId, monotonic_ns};
use sidetrack_sys::sync::lock;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two looks at flows that have come back and still need the kernel's help.
const LEAVING_AGAIN: Duration = Duration::from_millis(5);

/// The flows, and when to look at them.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// By their places in the memory.
    flows: Mutex<Vec<Option<Arc<Wired>>>>,
    due: Mutex<Due>,
    bell: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Due {
    looks: Deadlines,
    is_over: bool,
}

/// The time of these looks.
pub(super) fn now() -> Instant {
    Instant::from_nanos(monotonic_ns())
}

impl Wires {
    /// Starts to look at flows.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn begin(self: &Arc<Self>) -> io::Result<()> {
        lock(&self.watch.due).is_over = false;
        let wires = self.clone();
        let thread = std::thread::Builder::new().name("wires".into()).spawn(move || wires.look_on())?;
        *lock(&self.watch.thread) = Some(thread);
        Ok(())
    }

    /// Ends all flows of this process, and removes all that would outlive it. Those that another process has go on.
    pub fn stop(&self) {
        self.rest();
        if self.is_awaited() {
            // Another process has the flows and the pins.
            return;
        }
        for wired in self.take_watched() {
            wired.finish(EndReason::Shutdown);
        }
        self.remove_leaving();
        self.remove_lingering(std::time::Instant::now() + 2 * LINGERS);
        // The lock stays with the copy that another process has.
        let pins = lock(&self.pins).take().filter(|_| self.is_ours());
        if let Some(Err(error)) = pins.map(sidetrack_sys::bpf::Pins::remove) {
            tracing::warn!(%error, "cannot remove the pins of the wire");
        }
    }

    /// Stops to look at flows, until [`Self::begin`].
    pub(super) fn rest(&self) {
        lock(&self.watch.due).is_over = true;
        self.watch.bell.notify_all();
        let thread = lock(&self.watch.thread).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that looks at flows on the wire has ended by a panic");
        }
    }

    /// Takes all flows that are looked at.
    pub(super) fn take_watched(&self) -> Vec<Arc<Wired>> {
        std::mem::take(&mut *lock(&self.watch.flows)).into_iter().flatten().collect()
    }

    /// Looks at a flow from now on.
    pub(super) fn enter(&self, wired: Arc<Wired>) {
        let place = wired.id().place();
        let mut flows = lock(&self.watch.flows);
        let at = place as usize;
        if flows.len() <= at {
            flows.resize(at + 1, None);
        }
        flows[at] = Some(wired);
        drop(flows);
        self.look_soon(place);
    }

    /// Looks at a flow at once.
    pub(super) fn look_soon(&self, place: u32) {
        lock(&self.watch.due).looks.by(place, Instant::ZERO);
        self.watch.bell.notify_all();
    }

    /// Returns the flow with this number.
    pub(super) fn watched(&self, number: FlowId) -> Option<Arc<Wired>> {
        lock(&self.watch.flows).iter().flatten().find(|wired| wired.number() == number).cloned()
    }

    /// A flow is over.
    pub(super) fn forget(&self, id: WireId) {
        if let Some(place) = lock(&self.watch.flows).get_mut(id.place() as usize) {
            *place = None;
        }
    }

    fn look_on(&self) {
        let mut due = lock(&self.watch.due);
        while !due.is_over {
            let now = now();
            if let Some(place) = due.looks.due(now) {
                drop(due);
                let wired = lock(&self.watch.flows).get(place as usize).cloned().flatten();
                let again = wired.and_then(|wired| wired.look(now));
                due = lock(&self.watch.due);
                again.into_iter().for_each(|again| due.looks.by(place, again));
                continue;
            }
            let most = if self.look_at_leaving() { LEAVING_AGAIN } else { LINGERS };
            let next = due.looks.deadline().map_or(most, |at| at.since(now).min(most));
            let waited = self.watch.bell.wait_timeout(due, next.max(Duration::from_millis(1)));
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            self.remove_lingering(std::time::Instant::now());
            due = lock(&self.watch.due);
        }
    }
}
