//! What is told of flows: while they are there, and when they have ended.

use serde::{Deserialize, Serialize};
use sidetrack_core::shunt::{Both, Cause, FastPathKind, Flow, Obstacle, ShuntAction, Standing, Transport};
use sidetrack_core::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// Packets and bytes of both directions, on one path. Bytes are those of IP packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Packets from client to server; one that stands for several segments counts once.
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

/// A flow that ended and was on the fast path at least once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShuntRecord {
    /// Who sent the first packet.
    pub client: SocketAddr,
    /// To whom.
    pub server: SocketAddr,
    /// By which protocol.
    pub transport: Transport,
    /// The connection mark it had at the end.
    pub mark: u32,
    /// When it began, nanoseconds since 1970, where conntrack keeps time stamps.
    pub start_ns: Option<u64>,
    /// What passed on the slow path.
    pub slow: Counts,
    /// What passed on the fast path.
    pub fast: Counts,
    /// What was dropped on the fast path.
    #[serde(default)]
    pub dropped: Counts,
    /// It was blocked at last.
    #[serde(default)]
    pub blocked: bool,
    /// How often it was put on the fast path.
    pub installs: u32,
    /// Why it last left the fast path.
    pub cause: Option<Cause>,
    /// The rule that decided, where its mark left it to the rules.
    pub rule: Option<String>,
}

impl ShuntRecord {
    /// Of a flow that ended, and the rule that decided about it.
    pub fn new(flow: &Flow, rule: Option<&str>) -> Self {
        Self {
            client: flow.tuple.client,
            server: flow.tuple.server,
            transport: flow.tuple.transport,
            mark: flow.mark.0,
            start_ns: flow.identity.start_ns,
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

/// A flow that is there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowView {
    /// Number of its entry, or of the latest; names it for `shunt rm`.
    pub entry: Option<u64>,
    /// Who sent the first packet.
    pub client: SocketAddr,
    /// To whom.
    pub server: SocketAddr,
    /// By which protocol.
    pub transport: Transport,
    /// The connection mark.
    pub mark: u32,
    /// When it began, nanoseconds since 1970, where conntrack keeps time stamps.
    pub start_ns: Option<u64>,
    /// Where it stands: `slow`, `requested`, `installed`, `leaving` or `failed`.
    pub state: String,
    /// What its entry does while it has one; else what is wanted now: by a person, its mark, or a rule.
    pub action: ShuntAction,
    /// The fast path that has its entry, or has been asked for one.
    #[serde(default)]
    pub fast_path: Option<FastPathKind>,
    /// What somebody wants whatever policy says.
    pub pinned: Option<ShuntAction>,
    /// The rule that decided, where its mark left it to the rules.
    #[serde(default)]
    pub rule: Option<String>,
    /// What stands between it and the fast path.
    pub obstacle: Option<Obstacle>,
    /// Why it last left the fast path.
    pub cause: Option<Cause>,
    /// How often it was put on the fast path.
    pub installs: u32,
    /// When its entry was asked for, nanoseconds since 1970.
    pub requested_ns: Option<u64>,
    /// When its entry was confirmed, nanoseconds since 1970.
    pub installed_ns: Option<u64>,
    /// When its entry was gone, nanoseconds since 1970.
    #[serde(default)]
    pub gone_ns: Option<u64>,
    /// Seconds since its entry was asked for.
    pub requested_seconds: Option<f64>,
    /// Seconds since its entry was confirmed.
    pub installed_seconds: Option<f64>,
    /// Seconds since its entry was gone.
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
    /// A flow as it is now, which is `wall` since 1970: the rule that decided about it, what is wanted for it and what stands
    /// against that.
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
            entry: flow.entry.map(|entry| entry.0),
            client: flow.tuple.client,
            server: flow.tuple.server,
            transport: flow.tuple.transport,
            mark: flow.mark.0,
            start_ns: flow.identity.start_ns,
            state: flow.standing.as_str().to_owned(),
            // Of an entry that is gone nothing is said: it would look as if it were there still.
            action: if flow.standing.has_entry() { flow.action } else { wanted },
            fast_path: is_asked.then_some(flow.path),
            pinned: flow.pinned,
            rule: rule.map(str::to_owned),
            obstacle,
            cause: flow.cause,
            installs: flow.installs,
            requested_ns: date(flow.times.requested),
            installed_ns: date(flow.times.installed),
            gone_ns: date(flow.times.gone),
            requested_seconds: ago(flow.times.requested),
            installed_seconds: ago(flow.times.installed),
            gone_seconds: ago(flow.times.gone),
            slow: flow.slow().into(),
            fast: flow.fast().into(),
            dropped: flow.dropped().into(),
        }
    }
}
