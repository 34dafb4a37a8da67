//! The shunt beside the node: its process, the records of its flows, and what people ask of it.

use super::node::Node;
use crate::config::Config;
use crate::live::{Decided, Ended, Ledger, LiveFlow};
use crate::shunt::{Ask, FlowView, ShuntRecord, Shunter, Told};
use anyhow::Context;
use sidetrack_core::flow::{EndReason, Flow, FlowId, Intercept};
use sidetrack_core::policy::{Action, Verdict};
use sidetrack_core::shunt::{ShuntAction, Transport};
use sidetrack_sys::caps::{self, CapabilitySet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// How often records are fetched.
const FETCH_EVERY: Duration = Duration::from_secs(1);

/// The listener of shunted flows in records: nothing of ours caught them.
const LISTENER: &str = "shunt";

/// The shunt of a node.
pub struct ShuntFlows {
    shunter: Shunter,
    ledger: Arc<Ledger>,
}

impl ShuntFlows {
    /// Starts the shunt if the configuration has one. Before rights are given up.
    ///
    /// # Errors
    /// What is missing.
    pub fn start(config: &Config, name: &str, text: &str) -> anyhow::Result<Option<Arc<Self>>> {
        if config.shunt.is_none() {
            return Ok(None);
        }
        anyhow::ensure!(
            caps::holds(CapabilitySet::NET_ADMIN | CapabilitySet::BPF),
            "[shunt] needs root (CAP_NET_ADMIN and CAP_BPF): start with sudo"
        );
        let shunter = Shunter::start(name, text).context("[shunt]")?;
        Ok(Some(Arc::new(Self { shunter, ledger: Arc::default() })))
    }

    /// The flows as the recorder sees them.
    pub const fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Asks the shunt. Blocks for as long as it takes to answer: microseconds, and milliseconds where it has to list
    /// conntrack.
    ///
    /// # Errors
    /// What it says against it.
    pub fn ask(&self, ask: &Ask) -> anyhow::Result<Told> {
        self.shunter.ask(ask)
    }

    /// Turns what it tells into records until `stop`, then lets it take everything back.
    pub async fn record(self: Arc<Self>, node: Arc<Node>, mut stop: watch::Receiver<bool>) {
        let mut well = true;
        loop {
            let stopped = tokio::select! {
                () = tokio::time::sleep(FETCH_EVERY) => false,
                _ = stop.wait_for(|stop| *stop) => true,
            };
            let (own, node) = (self.clone(), node.clone());
            let fetched = tokio::task::spawn_blocking(move || own.fetch(&node, stopped)).await;
            match fetched {
                Ok(Err(error)) if well => {
                    well = false;
                    tracing::error!("{error:#}");
                }
                _ => {}
            }
            if stopped {
                return;
            }
        }
    }

    fn fetch(&self, node: &Node, last: bool) -> anyhow::Result<()> {
        if let Told::Records(records) = self.ask(&Ask::Records)? {
            records.iter().for_each(|record| self.note(node.next_flow_id(), record, None));
        }
        if last {
            if let Told::Flows(flows) = self.ask(&Ask::Flows)? {
                let shunted = flows.iter().filter(|flow| flow.installs > 0);
                shunted.for_each(|flow| {
                    self.note(node.next_flow_id(), &so_far(flow), Some(EndReason::Shutdown))
                });
            }
            self.shunter.finish()?;
        }
        Ok(())
    }

    fn note(&self, id: FlowId, record: &ShuntRecord, reason: Option<EndReason>) {
        let mut live = LiveFlow::new(id);
        if let Some(since) = record.start_ns.map(|ns| UNIX_EPOCH + Duration::from_nanos(ns)) {
            let age = SystemTime::now().duration_since(since).unwrap_or_default();
            live.opened = Instant::now().checked_sub(age).unwrap_or(live.opened);
            live.since = since;
        }
        let verdict = verdict(record.rule.as_deref(), record.blocked);
        live.decide(Decided { flow: flow(record.client, record.server), verdict: Some(verdict) });
        live.count(
            record.slow.bytes_up + record.fast.bytes_up,
            record.slow.bytes_down + record.fast.bytes_down,
        );
        let duration = live.opened.elapsed();
        let reason = reason.unwrap_or(EndReason::KernelClosed);
        self.ledger.note(Ended {
            flow: Arc::new(live),
            reason,
            detail: Some(detail(record).into()),
            duration,
        });
    }
}

fn flow(client: SocketAddr, server: SocketAddr) -> Flow {
    Flow {
        intercept: Intercept::Kernel,
        listener: LISTENER.into(),
        client,
        orig_dst: server.into(),
        host: None,
        process: None,
        user: None,
    }
}

fn verdict(rule: Option<&str>, blocked: bool) -> Verdict {
    let why = match rule {
        Some(name) => format!("rule '{name}', to which the packet filter's mark leaves it").into(),
        None => "the packet filter's mark".into(),
    };
    let action = if blocked { Action::Deny } else { Action::default() };
    Verdict { rule: rule.map(Into::into), index: None, action, why, agreement: None }
}

/// What the fields of a record have no room for.
fn detail(record: &ShuntRecord) -> String {
    let transport = if record.transport == Transport::Udp { "udp; " } else { "" };
    let last = record.cause.map(|cause| format!(", last left it: {}", cause.as_str())).unwrap_or_default();
    let dropped = match (record.dropped.bytes_up, record.dropped.bytes_down) {
        (0, 0) => String::new(),
        (up, down) => format!(", {up} bytes up and {down} down dropped"),
    };
    format!(
        "{transport}fast path {} times, {} bytes up and {} down of all{dropped}{last}",
        record.installs, record.fast.bytes_up, record.fast.bytes_down
    )
}

/// A flow that goes on when we stop, as a record of what there was until now.
fn so_far(flow: &FlowView) -> ShuntRecord {
    ShuntRecord {
        client: flow.client,
        server: flow.server,
        transport: flow.transport,
        mark: flow.mark,
        start_ns: flow.start_ns,
        slow: flow.slow,
        fast: flow.fast,
        dropped: flow.dropped,
        blocked: flow.action == ShuntAction::Block,
        installs: flow.installs,
        cause: flow.cause,
        rule: flow.rule.clone(),
    }
}
