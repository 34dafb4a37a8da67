//! Views of flows that exist, and records of flows that have ended.

use serde::{Deserialize, Serialize};
use sidetrack_core::shunt::{Both, Cause, FastPathKind, Flow, Obstacle, ShuntAction, Standing, Transport};
use sidetrack_core::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// Packets and bytes of both directions, on one path. Bytes are those of whole IP packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Packets from client to server; a packet that holds several segments counts once.
    pub packets_up: u64,
    /// Bytes from client to server.
    pub bytes_up: u64,
    /// Packets from server to client.
    pub packets_down: u64,
    /// Bytes from server to client.
    pub bytes_down: u64,
}

impl From<Both> for Counts {
    fn from(both: Both) -> Self {
        Self {
            packets_up: both.to_server.packets,
            bytes_up: both.to_server.bytes,
            packets_down: both.to_client.packets,
            bytes_down: both.to_client.bytes,
        }
    }
}

/// How full the fast path is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Entries now.
    pub entries: u64,
    /// Most entries, `entries_max`.
    pub entries_max: u64,
    /// Flows on the slow path for which there is no entry.
    pub waiting: u64,
    /// Entries that flows have lost to faster ones since the start.
    pub evicted: u64,
}

impl Capacity {
    /// Returns the numbers of entries, by the words of the metric.
    pub const fn entries(&self) -> [(&'static str, u64); 3] {
        [("used", self.entries), ("max", self.entries_max), ("wanted", self.waiting)]
    }
}

/// A flow that ended and was on the fast path at least once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShuntRecord {
    /// The sender of the first packet.
    pub client: SocketAddr,
    /// The receiver of the first packet.
    pub server: SocketAddr,
    /// The transport protocol.
    pub transport: Transport,
    /// The connection mark at the end.
    pub mark: u32,
    /// When it began, nanoseconds since 1970, if conntrack keeps time stamps.
    pub start_ns: Option<u64>,
    /// What passed on the slow path.
    pub slow: Counts,
    /// What passed on the fast path.
    pub fast: Counts,
    /// What was dropped on the fast path.
    #[serde(default)]
    pub dropped: Counts,
    /// It was blocked at the end.
    #[serde(default)]
    pub blocked: bool,
    /// How often it was put on the fast path.
    pub installs: u32,
    /// Why it last left the fast path.
    pub cause: Option<Cause>,
    /// The rule that decided, if its mark left the decision to the rules.
    pub rule: Option<String>,
}

impl ShuntRecord {
    /// Returns the record of a flow that ended, with the rule that decided about it.
    pub fn new(flow: &Flow, rule: Option<&str>) -> Self {
        Self {
            client: flow.tuple.client(),
            server: flow.tuple.server(),
            transport: flow.tuple.transport,
            mark: flow.mark.0,
            start_ns: flow.identity.start_ns(),
            slow: flow.slow().into(),
            fast: flow.fast().into(),
            dropped: flow.dropped().into(),
            blocked: flow.action == ShuntAction::Block,
            installs: flow.installs,
            cause: flow.cause,
            rule: rule.map(str::to_owned),
        }
    }
}

/// A flow that exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowView {
    /// The number of its entry, or of the latest one; it names the flow for `shunt rm`.
    pub entry: Option<u64>,
    /// The sender of the first packet.
    pub client: SocketAddr,
    /// The receiver of the first packet.
    pub server: SocketAddr,
    /// The transport protocol.
    pub transport: Transport,
    /// The connection mark.
    pub mark: u32,
    /// When it began, nanoseconds since 1970, if conntrack keeps time stamps.
    pub start_ns: Option<u64>,
    /// Its state: `slow`, `requested`, `installed`, `leaving` or `failed`.
    pub state: String,
    /// What its entry does, if it has one. Otherwise the action wanted now: pinned by an operator, set by its mark, or by
    /// a rule.
    pub action: ShuntAction,
    /// The fast path that has its entry, or was asked for one.
    #[serde(default)]
    pub fast_path: Option<FastPathKind>,
    /// The action that an operator pinned, regardless of policy.
    pub pinned: Option<ShuntAction>,
    /// The rule that decided, if its mark left the decision to the rules.
    #[serde(default)]
    pub rule: Option<String>,
    /// What prevents it from being on the fast path.
    pub obstacle: Option<Obstacle>,
    /// Why it last left the fast path.
    pub cause: Option<Cause>,
    /// Bytes per second of both directions and both paths, as last measured. Rates are measured while entries are scarce.
    #[serde(default)]
    pub bytes_per_s: Option<u64>,
    /// How often it was put on the fast path.
    pub installs: u32,
    /// When its entry was requested, nanoseconds since 1970.
    pub requested_ns: Option<u64>,
    /// When its entry was confirmed, nanoseconds since 1970.
    pub installed_ns: Option<u64>,
    /// When its entry was removed, nanoseconds since 1970.
    #[serde(default)]
    pub gone_ns: Option<u64>,
    /// Seconds since its entry was requested.
    pub requested_seconds: Option<f64>,
    /// Seconds since its entry was confirmed.
    pub installed_seconds: Option<f64>,
    /// Seconds since its entry was removed.
    pub gone_seconds: Option<f64>,
    /// What passed on the slow path, as last reported.
    pub slow: Counts,
    /// What passed on the fast path.
    pub fast: Counts,
    /// What was dropped on the fast path.
    #[serde(default)]
    pub dropped: Counts,
}

impl FlowView {
    /// Returns the view of a flow now; `wall` is the time since 1970. It includes the rule that decided, the action
    /// wanted, and what prevents it.
    pub fn new(
        flow: &Flow,
        rule: Option<&str>,
        (wanted, obstacle): (ShuntAction, Option<Obstacle>),
        now: Instant,
        wall: Duration,
    ) -> Self {
        let ago = |at: Option<Instant>| at.map(|at| (now - at).as_micros() as f64 / 1e6);
        let date = |at: Option<Instant>| {
            let since = wall.saturating_sub(now - at?);
            u64::try_from(since.as_nanos()).ok()
        };
        let is_asked = flow.standing.has_entry() || matches!(flow.standing, Standing::Failed { .. });
        Self {
            entry: flow.entry().map(|entry| entry.0),
            client: flow.tuple.client(),
            server: flow.tuple.server(),
            transport: flow.tuple.transport,
            mark: flow.mark.0,
            start_ns: flow.identity.start_ns(),
            state: flow.standing.as_str().to_owned(),
            // An entry that was removed is not shown: it would look as if it still existed.
            action: if flow.standing.has_entry() { flow.action } else { wanted },
            fast_path: is_asked.then_some(flow.path),
            pinned: flow.pinned,
            rule: rule.map(str::to_owned),
            obstacle,
            cause: flow.cause,
            bytes_per_s: flow.bytes_per_s(),
            installs: flow.installs,
            requested_ns: date(flow.times.requested()),
            installed_ns: date(flow.times.installed()),
            gone_ns: date(flow.times.gone()),
            requested_seconds: ago(flow.times.requested()),
            installed_seconds: ago(flow.times.installed()),
            gone_seconds: ago(flow.times.gone()),
            slow: flow.slow().into(),
            fast: flow.fast().into(),
            dropped: flow.dropped().into(),
        }
    }
}
