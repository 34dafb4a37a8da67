//! Flows that the kernel forwards without us, as conntrack shows them: their records, and a list of the running
//! ones.
//!
//! The end of each flow comes as a DESTROY event. Running flows are listed on request only: events for new
//! connections would cost each of them a few per cent.

mod paths;

pub(super) use paths::Paths;

use crate::keeper::{Keeper, KernelFlow, KernelFlowKey};
use crate::live::{Decided, Ended, Ledger, LiveFlow, Slot};
use crate::worker::Shared;
use sidetrack_core::flow::{EndReason, Flow, Intercept};
use sidetrack_core::policy::Action;
use sidetrack_sys::conntrack::{Event, Events};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

/// Details in the records at our end: of a flow that continues, and of one that the kernel can no longer
/// forward.
const GOES_ON: &str = "the kernel carries it on; bytes are those until now";
const ENDS: &str = "its addresses were rewritten by our rules, which end";

/// The kernel's flows: the paths they belong to, and those that were listed.
pub(super) struct KernelFlows {
    paths: Mutex<Paths>,
    /// Running flows that were listed at least once.
    seen: Mutex<BTreeMap<KernelFlowKey, Seen>>,
    ledger: Arc<Ledger>,
    shared: Arc<Shared>,
    keeper: Option<Arc<Keeper>>,
    stop: Notify,
}

struct Seen {
    flow: Arc<LiveFlow>,
    slot: Slot,
    /// It was not in the last list: its event is on its way, or was lost.
    missing: bool,
}

impl KernelFlows {
    /// Starts without flows. Without a keeper there are never any.
    pub(super) fn new(paths: Paths, shared: Arc<Shared>, keeper: Option<Arc<Keeper>>) -> Self {
        let (paths, seen) = (Mutex::new(paths), Mutex::default());
        Self { paths, seen, ledger: Arc::default(), shared, keeper, stop: Notify::new() }
    }

    /// The flows, for the admin interface and the recorder.
    pub(super) const fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The paths of all configurations so far.
    pub(super) fn paths(&self) -> MutexGuard<'_, Paths> {
        lock(&self.paths)
    }

    /// Makes [`KernelFlows::record`] record the running flows and end.
    pub(super) fn stop(&self) {
        self.stop.notify_one();
    }

    /// Writes a record for each connection that ends, until [`KernelFlows::stop`].
    pub(super) async fn record(self: Arc<Self>, events: Events) {
        #[expect(deprecated, reason = "its successor is unsafe; this descriptor is owned and stays open")]
        let mut socket = match AsyncFd::new(events) {
            Ok(socket) => socket,
            Err(error) => {
                return tracing::error!(%error, "cannot watch conntrack: the kernel's flows have no records");
            }
        };
        loop {
            let ready = tokio::select! {
                ready = socket.readable_mut() => ready,
                () = self.stop.notified() => break,
            };
            let Ok(mut ready) = ready else { return };
            match self.take(ready.get_inner_mut()) {
                Ok(true) => {}
                Ok(false) => ready.clear_ready(),
                Err(error) => return tracing::error!(%error, "conntrack events ended"),
            }
            tokio::task::yield_now().await;
        }
        let mut events = socket.into_inner();
        let last = tokio::task::spawn_blocking(move || self.finish(&mut events)).await;
        if last.is_err() {
            tracing::error!("the kernel's flows in flight have no records");
        }
    }

    /// Reads some events. Returns whether there may be more.
    fn take(&self, events: &mut Events) -> Result<bool, sidetrack_sys::netlink::Error> {
        let mut batch = Vec::new();
        let more = events.read(&mut batch)?;
        for event in batch {
            match event {
                Event::Destroy(entry) => self.ended(&KernelFlow::from(&entry)),
                Event::Overrun => {
                    tracing::warn!("conntrack events were lost: some records of kernel flows are missing");
                }
                _ => {}
            }
        }
        Ok(more)
    }

    /// Handles the end of a flow.
    fn ended(&self, entry: &KernelFlow) {
        let seen = lock(&self.seen).remove(&entry.key());
        let (flow, slot) = match seen {
            Some(seen) => (seen.flow, Some(seen.slot)),
            None => match self.flow(entry) {
                Some(flow) => (flow, None),
                None => return,
            },
        };
        count(&flow, entry);
        self.note(flow, slot, (EndReason::KernelClosed, None), lasted(entry));
    }

    fn note(
        &self,
        flow: Arc<LiveFlow>,
        slot: Option<Slot>,
        (reason, detail): (EndReason, Option<&str>),
        duration: Duration,
    ) {
        let ended = Ended { flow, reason, detail: detail.map(Into::into), duration };
        match slot {
            Some(slot) => self.ledger.leave(slot, ended),
            None => self.ledger.note(ended),
        }
    }

    /// Returns the flow of an entry. `None` if its mark is not known.
    fn flow(&self, entry: &KernelFlow) -> Option<Arc<LiveFlow>> {
        let paths = lock(&self.paths);
        let (path, verdict) = paths.of(entry.mark, entry.start_ns)?;
        debug_assert!(
            matches!(verdict.action, Action::Carry(_)),
            "a denied flow is never left to the kernel"
        );
        // The client's destination. If a rule of ours changed the destination, use the address that answers.
        let orig_dst = match path.intercept {
            Intercept::Reverse => entry.server,
            _ => entry.destination,
        };
        let flow = Flow {
            protocol: entry.protocol,
            intercept: Intercept::Kernel,
            listener: path.listener.clone(),
            client: entry.client,
            orig_dst: orig_dst.into(),
            host: None,
            process: None,
            user: None,
        };
        let mut live = LiveFlow::new(self.shared.next_flow_id());
        if let Some(since) = entry.start_ns.map(|ns| UNIX_EPOCH + Duration::from_nanos(ns)) {
            let age = SystemTime::now().duration_since(since).unwrap_or_default();
            live.opened = Instant::now().checked_sub(age).unwrap_or(live.opened);
            live.since = since;
        }
        live.decide(Decided::new(flow, Some(verdict.clone())));
        Some(Arc::new(live))
    }

    /// Updates the ledger with the running flows. Blocks while the kernel lists them.
    pub(super) fn look(&self) {
        let Some(keeper) = self.keeper.as_ref().filter(|_| self.paths().next() > 0) else { return };
        match keeper.flows() {
            Ok(entries) => self.listed(&entries),
            Err(error) => tracing::warn!(%error, "cannot list the flows that the kernel carries"),
        }
    }

    fn listed(&self, entries: &[KernelFlow]) {
        let mut seen = lock(&self.seen);
        seen.values_mut().for_each(|seen| seen.missing = !seen.missing);
        for entry in entries {
            if let Some(known) = seen.get_mut(&entry.key()) {
                known.missing = false;
                count(&known.flow, entry);
            } else if !entry.closed
                && let Some(flow) = self.flow(entry)
            {
                count(&flow, entry);
                let slot = self.ledger.enter(flow.clone());
                seen.insert(entry.key(), Seen { flow, slot, missing: false });
            }
        }
    }

    /// Makes the last list, and records what has ended and what continues.
    fn finish(&self, events: &mut Events) {
        let entries = self.keeper.as_ref().map_or_else(Vec::new, |keeper| {
            keeper.flows().unwrap_or_else(|error| {
                tracing::warn!(%error, "the kernel's flows in flight have no records");
                Vec::new()
            })
        });
        let mut left: BTreeMap<_, _> = entries.into_iter().map(|entry| (entry.key(), entry)).collect();
        // A flow that ends meanwhile has both an entry in the list and an event.
        let mut more = true;
        while more {
            let mut batch = Vec::new();
            more = events.read(&mut batch).unwrap_or(false);
            for event in batch {
                if let Event::Destroy(entry) = event {
                    let entry = KernelFlow::from(&entry);
                    left.remove(&entry.key());
                    self.ended(&entry);
                }
            }
        }
        let mut left: Vec<_> = left.into_values().collect();
        left.sort_by_key(|entry| entry.start_ns);
        for entry in left {
            if entry.closed {
                self.ended(&entry);
                continue;
            }
            let seen = lock(&self.seen).remove(&entry.key());
            let (flow, slot) =
                seen.map_or_else(|| (self.flow(&entry), None), |s| (Some(s.flow), Some(s.slot)));
            if let Some(flow) = flow {
                count(&flow, &entry);
                let duration = flow.opened.elapsed();
                self.note(
                    flow,
                    slot,
                    (EndReason::Shutdown, Some(if entry.translated { ENDS } else { GOES_ON })),
                    duration,
                );
            }
        }
    }
}

/// Sets the counts to those of conntrack, which never shrink.
fn count(flow: &LiveFlow, entry: &KernelFlow) {
    let (up, down) = flow.bytes();
    flow.count(entry.bytes_up.saturating_sub(up), entry.bytes_down.saturating_sub(down));
    flow.set_packets(entry.packets_up, entry.packets_down);
}

/// Returns the duration that conntrack measured.
fn lasted(entry: &KernelFlow) -> Duration {
    let span = entry.stop_ns.zip(entry.start_ns).map(|(stop, start)| stop.saturating_sub(start));
    Duration::from_nanos(span.unwrap_or_default())
}
