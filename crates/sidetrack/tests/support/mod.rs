//! Flows and ledgers for tests: nothing here opens a socket.
#![allow(dead_code, reason = "every test binary uses a part")]

pub(crate) mod schema;

use sidetrack::live::{Decided, Ended, Ledger, LiveFlow, Slot};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{EndReason, Flow, FlowId, Intercept, Process, Protocol};
use sidetrack_core::policy::{Action, Carry, Verdict};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// A flow from 10.1.0.5 to `dst`, as the listener `out` redirected it.
pub(crate) fn flow(dst: &str) -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        intercept: Intercept::Redirect,
        listener: "out".into(),
        client: ([10, 1, 0, 5], 40_000).into(),
        orig_dst: dst.parse().expect("a destination"),
        host: None,
        process: None,
        user: None,
    }
}

/// What the rule `name` says: carried over `hops`, directly if there are none.
pub(crate) fn carried(rule: Option<&str>, hops: &[&str]) -> Verdict {
    let hops: Vec<_> = hops.iter().map(|hop| hop.parse().expect("a hop")).collect();
    let carrier = if hops.is_empty() { Carrier::Direct } else { Carrier::Hops(hops) };
    verdict(rule, Action::Carry(Arc::new(Carry { carrier, ..Carry::default() })))
}

/// What the rule `name` says: no.
pub(crate) fn denied(rule: Option<&str>) -> Verdict {
    verdict(rule, Action::Deny)
}

fn verdict(rule: Option<&str>, action: Action) -> Verdict {
    let (index, why) = (rule.map(|_| 0), "a test".into());
    Verdict { rule: rule.map(Into::into), index, action, why, agreement: None }
}

/// A flow in flight that policy has decided on.
pub(crate) fn live(id: u64, flow: Flow, verdict: Verdict) -> Arc<LiveFlow> {
    let mut live = LiveFlow::new(FlowId(id));
    live.since = UNIX_EPOCH + Duration::from_millis(1_795_302_439_123);
    live.decide(Decided::new(flow, Some(verdict)));
    Arc::new(live)
}

/// A flow with all there is to know of one.
pub(crate) fn full(id: u64) -> Arc<LiveFlow> {
    let mut known = flow("10.9.8.7:443");
    known.host = Some("www.example".parse().expect("a name"));
    known.process =
        Some(Process { pid: Some(321), name: Some("curl".into()), uid: Some(1000), is_hidden: false });
    known.user = Some("alice".into());
    let live = live(id, known, carried(Some("bulk"), &["socks6://alice:secret@gw:1080", "http://b:3128"]));
    live.count(1024, 1 << 20);
    live.connected(Duration::from_micros(41_237));
    live.first_byte(Duration::from_micros(52_001));
    live
}

/// The flow's end after 1.5 s.
pub(crate) fn ended(flow: &Arc<LiveFlow>, reason: EndReason) -> Ended {
    Ended { flow: flow.clone(), reason, detail: None, duration: Duration::from_millis(1_500) }
}

/// Enters the flow.
pub(crate) fn enter(ledger: &Ledger, flow: &Arc<LiveFlow>) -> Slot {
    ledger.enter(flow.clone())
}
