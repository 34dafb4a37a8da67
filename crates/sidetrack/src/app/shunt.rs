//! The shunt of a node: its process, the records of its flows, and requests from the admin interface.

use super::node::Node;
use super::upgrade::{Heritage, ShuntedRow};
use crate::config::Config;
use crate::live::{Decided, Ended, Ledger, LiveFlow, Slot};
use crate::shunt::{Ask, Capacity, FlowView, ShuntRecord, Shunter, Told, Which};
use anyhow::Context;
use sidetrack_core::flow::{EndReason, Flow, FlowId, Intercept, Protocol};
use sidetrack_core::policy::{Action, Verdict};
use sidetrack_core::shunt::{ShuntAction, Transport};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Time between two fetches of records.
const FETCH_EVERY: Duration = Duration::from_secs(1);

/// The listener of shunted flows in records, because no listener of ours captured them.
const LISTENER: &str = "shunt";

/// The shunt of a node.
pub(super) struct ShuntFlows {
    shunter: Shunter,
    /// The name and the text of the configuration file that it was started with.
    started_with: [String; 2],
    /// Numbers that another process of the node has given to flows, until they are listed here.
    numbered: Mutex<BTreeMap<Key, (Option<u64>, FlowId)>>,
    ledger: Arc<Ledger>,
    /// Running flows that were listed, until their record comes.
    seen: Mutex<BTreeMap<Key, Seen>>,
    /// As last fetched.
    capacity: Mutex<Capacity>,
}

/// The addresses and the protocol of a flow.
type Key = (SocketAddr, SocketAddr, Transport);

struct Seen {
    flow: Arc<LiveFlow>,
    slot: Slot,
    start_ns: Option<u64>,
}

/// Whether both start times are the same, as far as they are known.
fn is_same(one: Option<u64>, other: Option<u64>) -> bool {
    one.is_none() || other.is_none() || one == other
}

impl ShuntFlows {
    /// Starts the shunt if the configuration has one, or goes on with that of the process before this one. Must be called before
    /// privileges are given up. `file`: the name and the text of the configuration.
    ///
    /// # Errors
    /// Says what is missing.
    pub(super) fn start(
        config: &Config,
        file: [String; 2],
        heritage: Option<&Heritage>,
    ) -> anyhow::Result<Option<Arc<Self>>> {
        if config.shunt.is_none() {
            return Ok(None);
        }
        if let Some((shunter, file)) = heritage.and_then(Heritage::shunt) {
            // The process before this one asks until it says that it does not.
            shunter.rest();
            return Ok(Some(Self::of(shunter, file)));
        }
        anyhow::ensure!(
            caps::holds(CapabilitySet::NET_ADMIN | CapabilitySet::BPF),
            "[shunt] needs root (CAP_NET_ADMIN and CAP_BPF): start with sudo"
        );
        let shunter = Shunter::start(&file[0], &file[1]).context("[shunt]")?;
        Ok(Some(Self::of(shunter, file)))
    }

    fn of(shunter: Shunter, started_with: [String; 2]) -> Arc<Self> {
        Arc::new(Self {
            shunter,
            started_with,
            numbered: Mutex::default(),
            ledger: Arc::default(),
            seen: Mutex::default(),
            capacity: Mutex::default(),
        })
    }

    /// The name and the text of the configuration file that it was started with.
    pub(super) fn started_with(&self) -> (&str, &str) {
        let [name, text] = &self.started_with;
        (name, text)
    }

    /// Copies of the connection to its process, for another process of the node.
    pub(super) fn copies(&self) -> std::io::Result<[OwnedFd; 2]> {
        self.shunter.copies()
    }

    /// Asks nothing until [`ShuntFlows::resume`]: another process of the node does. If this one ends meanwhile, the shunt goes on, and
    /// the other process writes the records.
    pub(super) fn rest(&self) {
        self.shunter.rest();
    }

    /// Asks again.
    pub(super) fn resume(&self) {
        if let Err(error) = self.shunter.resume() {
            tracing::error!("{error:#}");
        }
    }

    /// The numbers of running flows.
    pub(super) fn numbers(&self) -> Vec<ShuntedRow> {
        let seen = self.seen();
        let rows = seen.iter().map(|((client, server, transport), seen)| ShuntedRow {
            which: Which { client: *client, server: *server, transport: *transport },
            start_ns: seen.start_ns,
            id: seen.flow.id.0,
        });
        rows.collect()
    }

    /// Keeps the numbers that another process has given to flows.
    pub(super) fn keep_numbers(&self, rows: impl Iterator<Item = ShuntedRow>) {
        let mut numbered = lock(&self.numbered);
        for ShuntedRow { which, start_ns, id } in rows {
            numbered.insert((which.client, which.server, which.transport), (start_ns, FlowId(id)));
        }
    }

    /// The number of a flow that is new here.
    fn number(&self, node: &Node, key: &Key, start_ns: Option<u64>) -> FlowId {
        let given = lock(&self.numbered).remove(key).filter(|(start, _)| is_same(*start, start_ns));
        given.map_or_else(|| node.next_flow_id(), |(_, id)| id)
    }

    /// The flows, for the recorder.
    pub(super) const fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Returns how full the fast path is, at most a second ago.
    pub(super) fn capacity(&self) -> Capacity {
        *lock(&self.capacity)
    }

    /// Sends a request to the shunt. Blocks until it answers: microseconds, or milliseconds if it must list
    /// conntrack.
    ///
    /// # Errors
    /// Fails if the shunt refuses the request.
    pub(super) fn ask(&self, ask: &Ask) -> anyhow::Result<Told> {
        self.shunter.ask(ask)
    }

    /// Writes records from the shunt's reports until `stop`, then makes the shunt undo everything.
    pub(super) async fn record(self: Arc<Self>, node: Arc<Node>, mut stop: watch::Receiver<bool>) {
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
        if self.shunter.rests() {
            return Ok(());
        }
        if let Told::Records(records, capacity) = self.ask(&Ask::Records)? {
            *lock(&self.capacity) = capacity;
            records.iter().for_each(|record| self.note(node, record, None));
        }
        if last {
            if let Told::Flows(flows) = self.ask(&Ask::Flows)? {
                let shunted = flows.iter().filter(|flow| flow.installs > 0);
                shunted.for_each(|flow| self.note(node, &so_far(flow), Some(EndReason::Shutdown)));
            }
            self.shunter.finish()?;
        }
        Ok(())
    }

    /// Updates the ledger with flows that are or were on the fast path. Blocks like [`ShuntFlows::ask`].
    pub(super) fn look(&self, node: &Node) {
        if self.shunter.rests() {
            return;
        }
        let flows = match self.ask(&Ask::Flows) {
            Ok(Told::Flows(flows)) => flows,
            Ok(_) => return,
            Err(error) => return tracing::warn!("cannot list the shunted flows: {error:#}"),
        };
        let mut seen = self.seen();
        for view in flows.iter().filter(|flow| flow.installs > 0) {
            let record = so_far(view);
            let key = (view.client, view.server, view.transport);
            match seen.get(&key) {
                // An earlier flow with the same addresses: its record is on its way.
                Some(known) if !is_same(known.start_ns, view.start_ns) => {}
                Some(known) => {
                    known.flow.decide(decided(&record));
                    count(&known.flow, &record);
                }
                None => {
                    let flow = live(self.number(node, &key, view.start_ns), &record);
                    let slot = self.ledger.enter(flow.clone());
                    seen.insert(key, Seen { flow, slot, start_ns: view.start_ns });
                }
            }
        }
    }

    fn seen(&self) -> MutexGuard<'_, BTreeMap<Key, Seen>> {
        lock(&self.seen)
    }

    fn note(&self, node: &Node, record: &ShuntRecord, reason: Option<EndReason>) {
        let key = (record.client, record.server, record.transport);
        let mut all = self.seen();
        let is_its = all.get(&key).is_some_and(|seen| is_same(seen.start_ns, record.start_ns));
        let seen = if is_its { all.remove(&key) } else { None };
        drop(all);
        let (flow, slot) = match seen {
            Some(seen) => (seen.flow, Some(seen.slot)),
            None => (live(self.number(node, &key, record.start_ns), record), None),
        };
        flow.decide(decided(record));
        count(&flow, record);
        let otherwise = if record.blocked { EndReason::PolicyDenied } else { EndReason::KernelClosed };
        let ended = Ended {
            duration: flow.opened.elapsed(),
            flow,
            reason: reason.unwrap_or(otherwise),
            detail: Some(detail(record).into()),
        };
        match slot {
            Some(slot) => self.ledger.leave(slot, ended),
            None => self.ledger.note(ended),
        }
    }
}

fn live(id: FlowId, record: &ShuntRecord) -> Arc<LiveFlow> {
    let mut live = LiveFlow::new(id);
    if let Some(since) = record.start_ns.map(|ns| UNIX_EPOCH + Duration::from_nanos(ns)) {
        let age = SystemTime::now().duration_since(since).unwrap_or_default();
        live.opened = Instant::now().checked_sub(age).unwrap_or(live.opened);
        live.since = since;
    }
    live.decide(decided(record));
    count(&live, record);
    Arc::new(live)
}

fn decided(record: &ShuntRecord) -> Decided {
    let verdict = verdict(record.rule.as_deref(), record.blocked);
    Decided::new(flow(record.transport, record.client, record.server), Some(verdict))
}

/// Sets the counts to those of both paths, which never shrink. Dropped bytes do not count.
fn count(flow: &LiveFlow, record: &ShuntRecord) {
    let (up, down) = flow.bytes();
    let (now_up, now_down) =
        (record.slow.bytes_up + record.fast.bytes_up, record.slow.bytes_down + record.fast.bytes_down);
    flow.count(now_up.saturating_sub(up), now_down.saturating_sub(down));
    if record.transport == Protocol::Tcp {
        return;
    }
    flow.set_packets(
        record.slow.packets_up + record.fast.packets_up,
        record.slow.packets_down + record.fast.packets_down,
    );
}

fn flow(protocol: Protocol, client: SocketAddr, server: SocketAddr) -> Flow {
    Flow {
        protocol,
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

/// Returns details that have no field in the record.
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

/// Makes a record of a flow that continues when we stop, with its counts until now.
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
