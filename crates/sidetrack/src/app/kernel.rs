//! Records of flows that the kernel carried alone, from conntrack.

use crate::config::Config;
use crate::live::{Decided, Ended, Ledger, LiveFlow};
use crate::steer::{Path, Steer};
use crate::worker::Shared;
use sidetrack_core::flow::{EndReason, Flow, Intercept};
use sidetrack_core::policy::{Action, Verdict};
use sidetrack_sys::conntrack::{Entry, Event, Events};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::io::unix::AsyncFd;

/// Paths that are kept: connections outlive reloads, and their records name the rule they began under.
const PATHS_KEPT: usize = 4096;

/// The paths of this configuration and those before, by number.
#[derive(Default)]
pub struct Paths {
    known: BTreeMap<usize, (Path, Verdict)>,
    next: usize,
}

impl Paths {
    /// The number of the next configuration's first path.
    pub const fn next(&self) -> usize {
        self.next
    }

    /// Adds the paths of a configuration that is in force now.
    pub fn learn(&mut self, steer: &Steer, config: &Config) {
        for (number, path) in steer.numbered_paths() {
            let rule = path.index.and_then(|index| config.policy.rules().get(index));
            let verdict = Verdict {
                rule: path.rule.clone(),
                index: path.index,
                action: rule
                    .map_or_else(|| config.policy.default_action().clone(), |rule| rule.action.clone()),
                why: path
                    .rule
                    .as_ref()
                    .map_or_else(|| "default".into(), |rule| format!("rule '{rule}'").into()),
            };
            self.known.insert(number, (path.clone(), verdict));
        }
        self.next = steer.first_path + steer.paths.len();
        while self.known.len() > PATHS_KEPT.max(steer.paths.len()) {
            // The oldest is the one that follows the newest, numbers being used in a ring.
            let newest = steer.numbered_paths().last().map_or(0, |(number, _)| number);
            let after = self.known.range(newest + 1..).next().map(|(number, _)| *number);
            let Some(oldest) = after.or_else(|| self.known.keys().next().copied()) else { break };
            self.known.remove(&oldest);
        }
    }
}

/// Turns the ends of connections into records, for ever.
pub async fn record(events: Events, paths: Arc<Mutex<Paths>>, shared: Arc<Shared>, ledger: Arc<Ledger>) {
    #[expect(deprecated, reason = "its successor is unsafe; this descriptor is owned and stays open")]
    let mut socket = match AsyncFd::new(events) {
        Ok(socket) => socket,
        Err(error) => {
            return tracing::error!(%error, "cannot watch conntrack: the kernel's flows have no records");
        }
    };
    let mut batch = Vec::new();
    loop {
        let Ok(mut ready) = socket.readable_mut().await else { return };
        match ready.get_inner_mut().read(&mut batch) {
            Ok(true) => {}
            Ok(false) => ready.clear_ready(),
            Err(error) => return tracing::error!(%error, "conntrack events ended"),
        }
        for event in batch.drain(..) {
            match event {
                Event::Destroy(entry) => {
                    let paths = paths.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(ended) = ended(&entry, &paths, &shared) {
                        ledger.note(ended);
                    }
                }
                Event::Overrun => {
                    tracing::warn!("conntrack events were lost: some records of kernel flows are missing")
                }
                _ => {}
            }
        }
        tokio::task::yield_now().await;
    }
}

fn ended(entry: &Entry, paths: &Paths, shared: &Shared) -> Option<Ended> {
    let (path, verdict) = paths.known.get(&Path::number_in(entry.mark)?)?;
    debug_assert!(matches!(verdict.action, Action::Carry(_)), "a denied flow is never left to the kernel");
    // What the client asked for, and where the answers came from if the destination was changed.
    let orig_dst = match path.intercept {
        Intercept::Reverse => entry.reply.source,
        _ => entry.original.destination,
    };
    let flow = Flow {
        intercept: Intercept::Kernel,
        listener: path.listener.clone(),
        client: entry.original.source,
        orig_dst: orig_dst.into(),
        host: None,
        process: None,
        user: None,
    };
    let span = entry.stop_ns.zip(entry.start_ns).map(|(stop, start)| stop.saturating_sub(start));
    let duration = Duration::from_nanos(span.unwrap_or_default());
    let mut live = LiveFlow::new(shared.next_flow_id());
    live.since =
        entry.start_ns.map_or_else(SystemTime::now, |ns| SystemTime::UNIX_EPOCH + Duration::from_nanos(ns));
    live.decide(Decided { flow, verdict: Some(verdict.clone()) });
    let bytes =
        |counters: &Option<sidetrack_sys::conntrack::Counters>| counters.as_ref().map_or(0, |c| c.bytes);
    live.count(bytes(&entry.client_to_server), bytes(&entry.server_to_client));
    Some(Ended { flow: Arc::new(live), reason: EndReason::KernelClosed, detail: None, duration })
}
