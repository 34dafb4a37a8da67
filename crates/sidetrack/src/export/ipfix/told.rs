//! What the collector was told of each running flow, so that each byte is told once.

use crate::record::{FlowRecord, is_refusal};
use sidetrack_core::flow::{EndReason, Host, Protocol};
use sidetrack_core::ipfix::{End, Report};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Shortest and longest time between two looks at running flows.
const LOOK: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(30)];
/// Looks at running flows after which one that was not among them is forgotten. Its end was dropped.
const LOOKS_MAX: u8 = 20;

/// What was told of one flow.
struct Before {
    at: Instant,
    bytes: [u64; 2],
    packets: [u64; 2],
    /// Looks since it was seen.
    unseen: u8,
}

/// All running flows of which something was told.
pub(super) struct Told {
    active: Option<Duration>,
    flows: HashMap<u64, Before>,
}

impl Told {
    /// Nothing was told. Running flows are due each time `active` is over.
    pub(super) fn new(active: Option<Duration>) -> Self {
        Self { active, flows: HashMap::new() }
    }

    /// Time between two looks at running flows. `None`: they are not reported.
    pub(super) fn look_every(&self) -> Option<Duration> {
        let [shortest, longest] = LOOK;
        self.active.map(|active| (active / 10).clamp(shortest, longest))
    }

    /// Whether a running flow must be reported. Notes that it was seen.
    pub(super) fn is_due(&mut self, flow: u64, opened: Instant) -> bool {
        let Some(active) = self.active else { return false };
        let since = match self.flows.get_mut(&flow) {
            Some(before) => {
                before.unseen = 0;
                before.at
            }
            None => opened,
        };
        since.elapsed() >= active
    }

    /// Forgets flows that were not seen for long. Call it after each look.
    pub(super) fn forget_gone(&mut self) {
        self.flows.retain(|_, before| {
            before.unseen += 1;
            before.unseen <= LOOKS_MAX
        });
    }

    /// The report of a running flow.
    pub(super) fn running<'r>(
        &mut self,
        record: &'r FlowRecord<'_>,
        dialled: Option<SocketAddr>,
    ) -> Report<'r> {
        let all = report(record, dialled, End::Active);
        let packets = all.packets.unwrap_or_default();
        let now = Before { at: Instant::now(), bytes: all.bytes, packets, unseen: 0 };
        let before = self.flows.insert(all.flow, now);
        since(all, before)
    }

    /// The last report of a flow.
    pub(super) fn ended<'r>(
        &mut self,
        record: &'r FlowRecord<'_>,
        dialled: Option<SocketAddr>,
    ) -> Report<'r> {
        let all = report(record, dialled, record.reason.map_or(End::Seen, end));
        let before = self.flows.remove(&all.flow);
        since(all, before)
    }
}

/// What the counts of a report grew by.
fn since(all: Report<'_>, before: Option<Before>) -> Report<'_> {
    let Some(before) = before else { return all };
    let less = |[up, down]: [u64; 2], [then_up, then_down]: [u64; 2]| {
        [up.saturating_sub(then_up), down.saturating_sub(then_down)]
    };
    let packets = all.packets.map(|packets| less(packets, before.packets));
    Report { bytes: less(all.bytes, before.bytes), packets, ..all }
}

const fn end(reason: EndReason) -> End {
    match reason {
        EndReason::Idle => End::Idle,
        EndReason::Limit => End::NoRoom,
        EndReason::Lifetime
        | EndReason::PolicyDenied
        | EndReason::SecretRefused
        | EndReason::FunctionRefused
        | EndReason::PolicyRevoked
        | EndReason::ChainChanged
        | EndReason::Killed
        | EndReason::Shutdown => End::Forced,
        _ => End::Seen,
    }
}

/// The address of the server: the one that the client asked for, or the one to which the name led, if it was dialled here.
fn server(record: &FlowRecord<'_>, dialled: Option<SocketAddr>) -> Option<IpAddr> {
    match &record.orig_dst.as_deref()?.host {
        Host::Ip(ip) => Some(*ip),
        Host::Name(_) => {
            let is_direct = record.carrier.as_deref() == Some("direct");
            dialled.filter(|_| is_direct).map(|dialled| dialled.ip())
        }
    }
}

fn report<'r>(record: &'r FlowRecord<'_>, dialled: Option<SocketAddr>, end: End) -> Report<'r> {
    let server = server(record, dialled);
    let port = record.orig_dst.as_deref().map_or(0, |dst| dst.port);
    let since = record.ts.system_time().duration_since(UNIX_EPOCH).unwrap_or_default();
    let start_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    let text = |text: &'r Option<std::borrow::Cow<'_, str>>| text.as_deref().unwrap_or_default();
    Report {
        flow: record.flow,
        protocol: record.protocol.unwrap_or(Protocol::Tcp),
        client: record.client,
        server,
        server_port: port,
        dialled: dialled
            .filter(|dialled| server.map(|ip| (ip, port)) != Some((dialled.ip(), dialled.port()))),
        start_ms,
        end_ms: start_ms.saturating_add((record.duration_seconds * 1e3) as u64),
        bytes: [record.bytes_up, record.bytes_down],
        packets: record.packets_up.zip(record.packets_down).map(|(up, down)| [up, down]),
        end,
        is_denied: record.reason.is_some_and(is_refusal),
        host: text(&record.host),
        process: text(&record.process),
        user: text(&record.user),
        own: [
            text(&record.rule),
            text(&record.carrier),
            text(&record.listener),
            record.reason.map_or("", EndReason::as_str),
        ],
    }
}
