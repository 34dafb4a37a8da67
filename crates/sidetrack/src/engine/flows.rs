//! Flows in flight, as the rest of the program sees them, and what is left of each.

use crate::live::{Decided, Ended, Ledger, LiveFlow, Slot};
use sidetrack_core::engine::{ConnectionId, Opening, Record};
use sidetrack_core::flow::{EndReason, Flow, FlowId, Intercept};
use sidetrack_core::time::Instant;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, SystemTime};

/// Gives the next flow its number.
pub type NextId = Arc<dyn Fn() -> FlowId + Send + Sync>;

/// The flows of one worker.
pub struct Flows {
    ledger: Arc<Ledger>,
    next_id: NextId,
    listener: Arc<str>,
    known: HashMap<ConnectionId, Known>,
    waker: Waker,
}

/// A flow that policy was asked about.
struct Known {
    flow: Arc<LiveFlow>,
    /// None if it was refused: it is never in flight.
    slot: Option<Slot>,
    detail: Option<Box<str>>,
}

impl fmt::Debug for Flows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flows").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl Flows {
    /// None yet. `waker` is woken when somebody wishes one of them to end.
    pub fn new(listener: Arc<str>, ledger: Arc<Ledger>, next_id: NextId, waker: Waker) -> Self {
        Self { ledger, next_id, listener, known: HashMap::new(), waker }
    }

    /// A flow as it is before policy is asked.
    pub fn flow(&self, opening: &Opening<'_>) -> Flow {
        Flow {
            intercept: Intercept::Engine,
            listener: self.listener.clone(),
            client: opening.client,
            orig_dst: opening.local.into(),
            host: None,
            process: None,
            user: None,
        }
    }

    fn live(&self, opened: Instant, now: Instant, decided: Decided) -> LiveFlow {
        let mut live = LiveFlow::new((self.next_id)());
        let age = now.since(opened);
        live.opened = live.opened.checked_sub(age).unwrap_or(live.opened);
        live.since = SystemTime::now().checked_sub(age).unwrap_or(live.since);
        live.decide(decided);
        live
    }

    /// It is carried.
    pub fn carried(&mut self, opening: &Opening<'_>, now: Instant, decided: Decided) {
        let flow = Arc::new(self.live(opening.opened, now, decided));
        flow.set_waker(&self.waker);
        let slot = Some(self.ledger.enter(flow.clone()));
        self.known.insert(opening.id, Known { flow, slot, detail: None });
    }

    /// It is refused, for this reason in words.
    pub fn refused(&mut self, opening: &Opening<'_>, now: Instant, decided: Decided, detail: String) {
        let flow = Arc::new(self.live(opening.opened, now, decided));
        let known = Known { flow, slot: None, detail: Some(detail.into()) };
        self.known.insert(opening.id, known);
    }

    /// It has ended.
    pub fn ended(&mut self, record: &Record) {
        let known = self.known.remove(&record.id).unwrap_or_else(|| {
            // The client left before policy could be asked.
            let flow = Flow {
                intercept: Intercept::Engine,
                listener: self.listener.clone(),
                client: record.client,
                orig_dst: record.local.into(),
                host: None,
                process: None,
                user: None,
            };
            let flow = self.live(record.opened, record.closed, Decided { flow, verdict: None });
            Known { flow: Arc::new(flow), slot: None, detail: None }
        });
        count(&known.flow, record.client_bytes, record.server_bytes);
        if let Some(connected) = record.connected {
            known.flow.connected(connected.since(record.opened));
        }
        self.leave(known, record.reason, record.closed.since(record.opened));
    }

    fn leave(&self, known: Known, reason: EndReason, duration: Duration) {
        let ended = Ended { flow: known.flow, reason, detail: known.detail, duration };
        match known.slot {
            Some(slot) => self.ledger.leave(slot, ended),
            None => self.ledger.note(ended),
        }
    }

    /// Those in flight and what their sides have sent until now.
    pub fn count(&self, traffic: impl Iterator<Item = (ConnectionId, u64, u64)>) {
        for (id, up, down) in traffic {
            if let Some(known) = self.known.get(&id) {
                count(&known.flow, up, down);
            }
        }
    }

    /// Those that somebody wishes to end.
    pub fn unwanted(&self) -> Vec<ConnectionId> {
        let wished = |known: &Known| {
            // A waker is taken by whoever uses it.
            known.flow.set_waker(&self.waker);
            known.flow.ending().is_some()
        };
        self.known.iter().filter(|(_, known)| wished(known)).map(|(id, _)| *id).collect()
    }

    /// All end here and now: their engine is gone.
    pub fn lost(&mut self, detail: &str) {
        for (_, mut known) in std::mem::take(&mut self.known) {
            known.detail.get_or_insert_with(|| detail.into());
            let duration = known.flow.age();
            self.leave(known, EndReason::Internal, duration);
        }
    }
}

/// Brings the counts up to these, which never shrink.
fn count(flow: &LiveFlow, up: u64, down: u64) {
    let before = flow.bytes();
    let (up, down) = (up.saturating_sub(before.0), down.saturating_sub(before.1));
    if up + down > 0 {
        flow.count(up, down);
        flow.touch(flow.age());
    }
}
