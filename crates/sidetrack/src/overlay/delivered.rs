//! The record of a flow that this node delivers for another node: it shows in `flows` while it is in flight, and ends once.

use super::endpoint::Broken;
use super::shared::Shared;
use crate::carry::Failure;
use crate::live::{Decided, Ended, Ledger, LiveFlow, Slot, Spared, Taken, Transport};
use sidetrack_core::flow::{EndReason, Flow, FlowId};
use sidetrack_core::overlay::frame::ResetReason;
use sidetrack_core::policy::{Action, Carry, Verdict};
use std::net::SocketAddr;
use std::sync::Arc;

/// A delivered flow's place in the ledger. If the task is dropped, the node is stopping, and the record says so.
pub(super) struct Delivered {
    ledger: Arc<Ledger>,
    live: Arc<LiveFlow>,
    flow: Flow,
    slot: Option<Slot>,
}

impl Delivered {
    /// Enters a flow that another node asks to have delivered.
    pub(super) fn begin(shared: &Arc<Shared>, flow: Flow) -> Self {
        let live = Arc::new(LiveFlow::new((shared.next_id)()));
        live.decide(Decided::new(flow.clone(), None));
        let slot = Some(shared.ledger.enter(live.clone()));
        Self { ledger: shared.ledger.clone(), live, flow, slot }
    }

    /// Enters a flow that another process of this node has begun to deliver.
    pub(super) fn again(ledger: &Arc<Ledger>, (id, spared): (FlowId, &Spared), decided: Decided) -> Self {
        let (live, flow) = (Arc::new(LiveFlow::again(id, spared)), decided.flow.clone());
        live.decide(decided);
        let slot = Some(ledger.enter(live.clone()));
        Self { ledger: ledger.clone(), live, flow, slot }
    }

    /// Forgets it without a record: another process goes on with it.
    pub(super) fn forget(mut self) {
        if let Some(slot) = self.slot.take() {
            self.ledger.forget(slot);
        }
    }

    /// Returns the flow in flight.
    pub(super) const fn live(&self) -> &Arc<LiveFlow> {
        &self.live
    }

    /// Notes that the destination was dialled at this address and has answered.
    pub(super) fn connected(&self, to: Option<SocketAddr>) {
        self.decide(Action::Carry(Arc::new(Carry::default())));
        self.live.connected(self.live.age());
        self.live.carried_by(to.map(|address| Taken { transport: Transport::Direct, address }));
    }

    fn decide(&self, action: Action) {
        // Deliveries pass unless a rule denies them: no rule carries them.
        let verdict =
            Verdict { rule: None, index: None, action, why: "[[overlay.deliver]]".into(), agreement: None };
        self.live.decide(Decided::new(self.flow.clone(), Some(verdict)));
    }

    /// Ends a flow whose destination was not reached.
    pub(super) fn failed(&mut self, failure: &Failure) {
        if failure.reason == EndReason::PolicyDenied {
            self.decide(Action::Deny);
        }
        self.end(failure.reason, Some(failure.detail.clone()));
    }

    /// Ends a flow that was delivered.
    pub(super) fn ended(&mut self, ended: Result<(), Broken>) {
        let from = self.flow.user.as_deref().unwrap_or_default();
        let (reason, detail) = match (self.live.ending(), ended) {
            (_, Ok(())) => (EndReason::Ok, None),
            (Some(wish), Err(_)) => (wish, None),
            (None, Err(Broken { is_here: true, .. })) => (EndReason::ServerReset, None),
            (None, Err(Broken { reason, .. })) => match reason {
                ResetReason::Application => (EndReason::ClientReset, None),
                ResetReason::PathLost => {
                    (EndReason::ClientReset, Some(format!("no path to node '{from}' came back in time")))
                }
                ResetReason::Ended => (EndReason::ClientReset, Some(format!("node '{from}' has ended it"))),
                ResetReason::Protocol => {
                    (EndReason::HopFailed, Some(format!("node '{from}' broke the overlay's protocol")))
                }
            },
        };
        self.end(reason, detail);
    }

    /// Ends a flow for this reason. Later calls do nothing.
    pub(super) fn end(&mut self, reason: EndReason, detail: Option<String>) {
        if let Some(slot) = self.slot.take() {
            let (duration, detail) = (self.live.age(), detail.map(String::into_boxed_str));
            self.ledger.leave(slot, Ended { flow: self.live.clone(), reason, detail, duration });
        }
    }
}

impl Drop for Delivered {
    fn drop(&mut self) {
        self.end(EndReason::Shutdown, None);
    }
}
