//! The flows of one worker.

use super::waiting::{ENDED_MAX, Waiting};
use super::{Afar, Batch, Ended, LiveFlow, Tally, UNSET, lock};
use sidetrack_core::deadlines::Deadlines;
use sidetrack_core::time::Instant;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// The flows of one worker: running flows, flows that ended recently, and counts for metrics.
#[derive(Debug, Default)]
pub struct Ledger {
    inner: Mutex<LedgerInner>,
    /// When the sweep must check each slot. Never locked while waiting for `inner`.
    looks: Arc<Mutex<Deadlines>>,
    /// Ended flows, until the recorder takes them.
    ended: Waiting,
    /// Whether records of single flows are not needed.
    unread: AtomicBool,
    /// How often deadlines were checked.
    sweeps: AtomicU64,
}

/// Connections of the packet engine that are stored between two visits while no consumer reads records: enough
/// to show the last ones.
const KEPT: usize = 256;

/// Most flows of one kind in a tally between two visits. Of further flows only the number is counted.
const COUNTED_MAX: usize = 1 << 18;

#[derive(Debug, Default)]
struct LedgerInner {
    slots: Vec<Option<Place>>,
    free: Vec<u32>,
    dropped: u64,
    live: usize,
    tallies: Vec<Tally>,
}

/// A running flow.
#[derive(Clone, Debug)]
enum Place {
    /// Its task is here.
    Here(Arc<LiveFlow>),
    /// It has no task any more.
    Afar(Arc<dyn Afar>),
}

impl Place {
    fn flow(&self) -> Option<Arc<LiveFlow>> {
        match self {
            Self::Here(flow) => Some(flow.clone()),
            Self::Afar(afar) => afar.clone().flow(),
        }
    }
}

/// A flow's index in its worker's ledger.
#[derive(Clone, Copy, Debug)]
pub struct Slot(u32);

impl Ledger {
    /// Enters a flow.
    pub fn enter(&self, flow: Arc<LiveFlow>) -> Slot {
        super::legs::begun(&flow);
        let mut inner = lock(&self.inner);
        let index = inner.take_slot();
        self.schedule(&flow, index);
        inner.slots[index as usize] = Some(Place::Here(flow));
        Slot(index)
    }

    /// Lets the sweep check the flow in this slot.
    fn schedule(&self, flow: &LiveFlow, index: u32) {
        // A check that an earlier flow in this slot has asked for is still done.
        let look = lock(&self.looks).look_at(index).map_or(UNSET, |at| at.as_nanos());
        flow.look.store(look, Relaxed);
        // Cannot fail: a flow is entered once.
        let _ = flow.looks.set((self.looks.clone(), index));
        flow.be_looked_at();
    }

    /// Enters a flow without a task.
    pub fn enter_afar(&self, flow: Arc<dyn Afar>) -> Slot {
        let mut inner = lock(&self.inner);
        let index = inner.take_slot();
        inner.slots[index as usize] = Some(Place::Afar(flow));
        Slot(index)
    }

    /// A running flow goes on without its task.
    pub fn go_afar(&self, slot: Slot, flow: Arc<dyn Afar>) {
        let before = lock(&self.inner)
            .slots
            .get_mut(slot.0 as usize)
            .and_then(|place| place.replace(Place::Afar(flow)));
        if let Some(Place::Here(flow)) = before {
            // The waker keeps its task's memory alive.
            *lock(&flow.waker) = None;
        }
    }

    /// A running flow without a task has one again.
    pub fn come_back(&self, slot: Slot, flow: Arc<LiveFlow>) {
        let mut inner = lock(&self.inner);
        self.schedule(&flow, slot.0);
        if let Some(place) = inner.slots.get_mut(slot.0 as usize) {
            *place = Some(Place::Here(flow));
        }
    }

    /// How many ended connections of the packet engine are stored with a record between two visits of the
    /// recorder. Further ones are only counted.
    pub fn kept(&self) -> usize {
        if self.is_read() { ENDED_MAX } else { KEPT }
    }

    /// Moves a flow from the running to the ended flows.
    pub fn leave(&self, slot: Slot, ended: Ended) {
        let mut inner = lock(&self.inner);
        let left = inner.slots.get_mut(slot.0 as usize).and_then(Option::take);
        if left.is_some() {
            inner.live -= 1;
            inner.free.push(slot.0);
        }
        // Under one lock: a reader that no longer sees the flow as running must find it among the ended ones.
        if !self.ended.put(&ended) {
            inner.only_count(&ended);
        }
        drop(inner);
        // The waker keeps its task's memory alive.
        *lock(&ended.flow.waker) = None;
    }

    /// Removes a running flow without a record: another process goes on with it, or nothing is known of it any more.
    pub fn forget(&self, slot: Slot) {
        let mut inner = lock(&self.inner);
        if let Some(place) = inner.slots.get_mut(slot.0 as usize).and_then(Option::take) {
            inner.live -= 1;
            inner.free.push(slot.0);
            drop(inner);
            if let Place::Here(flow) = place {
                // The waker keeps its task's memory alive.
                *lock(&flow.waker) = None;
            }
        }
    }

    /// Adds a flow that was never running here: the kernel carried it, or it was rejected.
    pub fn note(&self, ended: Ended) {
        if !self.ended.put(&ended) {
            lock(&self.inner).only_count(&ended);
        }
    }

    /// Adds counts of flows without a record each.
    pub fn tally(&self, tallies: impl Iterator<Item = Tally>) {
        lock(&self.inner).tallies.extend(tallies);
    }

    /// Takes these counts.
    pub fn take_tallies(&self) -> Vec<Tally> {
        std::mem::take(&mut lock(&self.inner).tallies)
    }

    /// The number of ended flows that wait.
    pub fn ended_waiting(&self) -> usize {
        self.ended.len()
    }

    /// Whether enough flows wait that the recorder must take them soon.
    pub fn is_crowded(&self) -> bool {
        self.ended.is_crowded()
    }

    /// Whether a consumer reads the record of each flow.
    pub fn is_read(&self) -> bool {
        !self.unread.load(Relaxed)
    }

    /// Sets whether a consumer reads records.
    pub fn set_read(&self, is_read: bool) {
        self.unread.store(!is_read, Relaxed);
    }

    /// The number of running flows.
    pub fn len(&self) -> usize {
        lock(&self.inner).live
    }

    /// Whether no flow is running.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The flows that are running now.
    pub fn snapshot(&self) -> Vec<Arc<LiveFlow>> {
        let places: Vec<_> = lock(&self.inner).slots.iter().flatten().cloned().collect();
        // Those afar are put together without the lock.
        places.into_iter().filter_map(|place| place.flow()).collect()
    }

    /// Wakes the owners of flows whose deadline has passed. Checks only flows that are due for a check.
    pub fn wake_due(&self, now: Instant) {
        self.sweeps.fetch_add(1, Relaxed);
        loop {
            let Some(place) = lock(&self.looks).due(now) else { return };
            let flow = lock(&self.inner).slots.get(place as usize).and_then(Clone::clone);
            let Some(Place::Here(flow)) = flow else { continue };
            if let Some(again) = flow.looked_at(now) {
                lock(&self.looks).by(place, again);
            }
        }
    }

    /// How often the owner of this ledger has checked the deadlines of its flows. It grows while the worker runs.
    pub fn sweeps(&self) -> u64 {
        self.sweeps.load(Relaxed)
    }

    /// Returns the running flow with this number.
    pub fn find(&self, id: u64) -> Option<Arc<LiveFlow>> {
        let is_it = |place: &&Place| match place {
            Place::Here(flow) => flow.id.0 == id,
            Place::Afar(afar) => afar.number().0 == id,
        };
        let found = lock(&self.inner).slots.iter().flatten().find(is_it).cloned();
        found?.flow()
    }

    /// Takes the next batch of ended flows.
    pub fn take_batch(&self) -> Option<Batch> {
        self.ended.take()
    }

    /// Takes the number of ended flows that were not even counted by kind, because the recorder came too late.
    pub fn take_dropped(&self) -> u64 {
        std::mem::take(&mut lock(&self.inner).dropped)
    }

    /// Takes all flows that ended since the last call, and the number of those that were not counted by kind.
    pub fn take_ended(&self) -> (Vec<Ended>, u64) {
        let batches = std::iter::from_fn(|| self.take_batch());
        let ended = batches.flat_map(|batch| batch.iter().map(|past| past.to_ended()).collect::<Vec<_>>());
        (ended.collect(), self.take_dropped())
    }
}

impl LedgerInner {
    fn take_slot(&mut self) -> u32 {
        self.live += 1;
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        })
    }

    /// Adds the flow to the count of its kind: the same rule, carrier and end reason.
    fn only_count(&mut self, ended: &Ended) {
        let decided = ended.flow.decided();
        let found = self.tallies.iter().position(|tally| tally.is_of(decided.as_deref(), ended.reason));
        let at = found.unwrap_or_else(|| {
            self.tallies.push(Tally::new(decided, ended.reason));
            self.tallies.len() - 1
        });
        match self.tallies.get_mut(at) {
            Some(tally) if tally.times_us.len() < COUNTED_MAX => {
                let (up, down) = ended.flow.bytes();
                tally.add([up, down], ended.duration, ended.flow.connect_time());
            }
            _ => self.dropped += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::flow::{EndReason, FlowId};
    use std::sync::atomic::AtomicU64;
    use std::task::Waker;
    use std::time::Duration;

    #[test]
    fn slots_are_used_again_and_every_flow_ends_once() {
        let ledger = Ledger::default();
        let flows: Vec<_> = (1..4).map(|n| Arc::new(LiveFlow::new(FlowId(n)))).collect();
        let slots: Vec<_> = flows.iter().map(|flow| ledger.enter(flow.clone())).collect();
        let ended = |flow: &Arc<LiveFlow>| Ended {
            flow: flow.clone(),
            reason: EndReason::Ok,
            detail: None,
            duration: Duration::ZERO,
        };
        ledger.leave(slots[1], ended(&flows[1]));
        assert_eq!(ledger.len(), 2);
        let again = ledger.enter(Arc::new(LiveFlow::new(FlowId(4))));
        assert_eq!(again.0, slots[1].0);
        assert_eq!(ledger.take_ended().0.len(), 1);
        assert!(ledger.take_ended().0.is_empty());
    }

    /// Counts how often it was woken.
    #[derive(Default)]
    struct Wakes(AtomicU64);

    impl std::task::Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    /// Returns how often the owner is woken by sweeps at these times.
    fn woken(ledger: &Ledger, flow: &LiveFlow, sweeps: &[u64]) -> Vec<u64> {
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let sweep = |ms: &u64| {
            flow.set_waker(&waker);
            let before = wakes.0.load(Relaxed);
            ledger.wake_due(at(*ms));
            wakes.0.load(Relaxed) - before
        };
        sweeps.iter().map(sweep).collect()
    }

    #[test]
    fn an_owner_is_woken_at_its_deadline_wherever_that_has_moved() {
        let ledger = Ledger::default();
        let flow = Arc::new(LiveFlow::new(FlowId(1)));
        flow.set_deadline(Some(at(500)), EndReason::Idle);
        ledger.enter(flow.clone());
        assert_eq!(woken(&ledger, &flow, &[499, 500]), [0, 1], "set before it was entered");
        assert_eq!(woken(&ledger, &flow, &[550, 600]), [0, 1], "once more, as it did nothing");
        flow.set_deadline(Some(at(9000)), EndReason::Idle);
        assert_eq!(woken(&ledger, &flow, &[700, 8999]), [0, 0], "later");
        flow.set_deadline(Some(at(9100)), EndReason::Idle);
        flow.set_deadline(Some(at(9050)), EndReason::Idle);
        assert_eq!(woken(&ledger, &flow, &[9049, 9050]), [0, 1], "earlier");
        flow.set_deadline(None, EndReason::Idle);
        assert_eq!(woken(&ledger, &flow, &[100_000]), [0], "none");
        flow.set_deadline(Some(at(100_001)), EndReason::Idle);
        assert_eq!(woken(&ledger, &flow, &[100_001]), [1]);
    }

    #[test]
    fn the_next_flow_of_a_slot_is_woken_at_its_own_deadline() {
        let ledger = Ledger::default();
        let [first, second] = [1, 2].map(|n| Arc::new(LiveFlow::new(FlowId(n))));
        first.set_deadline(Some(at(500)), EndReason::Idle);
        let slot = ledger.enter(first.clone());
        let duration = Duration::ZERO;
        ledger.leave(slot, Ended { flow: first, reason: EndReason::Ok, detail: None, duration });
        ledger.enter(second.clone());
        second.set_deadline(Some(at(800)), EndReason::Idle);
        assert_eq!(woken(&ledger, &second, &[500, 799, 800]), [0, 0, 1]);
    }

    #[test]
    fn flows_that_end_faster_than_anybody_looks_are_counted_all_the_same() {
        let ledger = Ledger::default();
        let first = ENDED_MAX as u64;
        for n in 0..first + 10 {
            let flow = Arc::new(LiveFlow::new(FlowId(n + 1)));
            let slot = ledger.enter(flow.clone());
            flow.count(n, 1);
            let reason = if n == first + 3 { EndReason::ClientReset } else { EndReason::Ok };
            ledger.leave(slot, Ended { flow, reason, detail: None, duration: Duration::from_micros(n) });
        }
        let (ended, dropped) = ledger.take_ended();
        assert_eq!((ended.len(), ended[0].flow.id, dropped), (ENDED_MAX, FlowId(1), 0));
        let tallies = ledger.take_tallies();
        let found: Vec<_> =
            tallies.iter().map(|tally| (tally.reason, tally.times_us.len(), tally.bytes)).collect();
        assert_eq!(
            found,
            [(EndReason::Ok, 9, (9 * first + 42, 9)), (EndReason::ClientReset, 1, (first + 3, 1))]
        );
        assert_eq!(
            tallies[0].times_us[4],
            (ENDED_MAX as u32 + 5, u32::MAX),
            "the fourth was reset, and none had a server"
        );
    }
}
