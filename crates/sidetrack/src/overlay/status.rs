//! The status of the overlay, as operators see it.

use super::control::names;
use super::datagrams::{Counters, Datagrams, Route, ServiceCounts, Totals};
use super::groups::{self, GroupView};
use super::lanes;
use super::mapped::{self, GraphLinkView};
use super::paced::{self, PacedTotals, PacedView};
use super::packets;
use super::setting::LinkSettingView;
use super::shared::Shared;
use super::trust::{self, TolerantView};
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::frame::{Features, Subgraph};
use sidetrack_core::overlay::legs::View;
use sidetrack_core::overlay::node::Node;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service};
use sidetrack_core::overlay::{Keys, NodeId};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The status at one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// This node.
    pub node: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Its links.
    pub links: Vec<LinkView>,
    /// The best paths to all other nodes.
    pub paths: Vec<PathView>,
    /// All links of the overlay that both of their ends report, as this node knows them.
    #[serde(default)]
    pub graph: Vec<GraphLinkView>,
    /// When this node last learned of a link that came or went, milliseconds since 1970.
    #[serde(default)]
    pub links_changed_unix_ms: u64,
    /// Sessions with one end here.
    pub sessions: u64,
    /// Sessions begun here.
    pub sessions_opened: u64,
    /// Sessions delivered here.
    pub sessions_delivered: u64,
    /// Sessions that went on over a new path.
    pub sessions_resumed: u64,
    /// Further paths that were opened for sessions begun here.
    #[serde(default)]
    pub paths_opened: u64,
    /// Sessions refused here.
    pub sessions_refused: u64,
    /// Flows relayed here.
    pub relayed: u64,
    /// Bytes of relayed flows, including frames.
    pub relayed_bytes: u64,
    /// Connections of peers that are not members.
    pub strangers: u64,
    /// Link-state records that were not signed by their origin, not from members, or too many.
    pub records_dropped: u64,
    /// Packets that were dropped.
    pub packets_dropped: u64,
    /// Datagrams.
    #[serde(default)]
    pub datagrams: DatagramsView,
    /// Packets over subgraphs.
    #[serde(default)]
    pub spread: SpreadView,
    /// All paced links, if this node declares one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paced: Option<PacedTotals>,
    /// The same by service: those whose packets this node has sent, relayed or received.
    #[serde(default)]
    pub services: Vec<ServiceCountView>,
    /// Links in records that the topology does not allow, or allows only at a higher cost.
    #[serde(default)]
    pub links_beyond_topology: u64,
    /// What operators have set for links.
    #[serde(default)]
    pub settings: Vec<LinkSettingView>,
    /// Whole packets, if this node has rules for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caught: Option<CaughtView>,
    /// The groups that this node knows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupView>,
}

/// Counts of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatagramsView {
    /// Received and valid.
    pub received: u64,
    /// Sent.
    pub sent: u64,
    /// Not accepted by the system, or for a neighbour with an unknown address.
    pub unsent: u64,
    /// Received for a link that is not open: not ours, or of an earlier connection. Dropped, as are the next three.
    pub unknown: u64,
    /// Received with a wrong seal.
    pub forged: u64,
    /// Received for the second time.
    pub replayed: u64,
    /// Received on another leg before, where a neighbour sends on all legs.
    #[serde(default)]
    pub leg_copies: u64,
    /// From a neighbour, but not a valid frame, or not for us.
    pub unreadable: u64,
    /// Relayed packets that were dropped because the next link was down.
    pub no_link: u64,
    /// Dropped because they exceeded the rate that 'overlay link set' allows.
    pub too_fast: u64,
    /// Dropped because 'overlay link set' asked for it.
    pub lost_on_purpose: u64,
}

/// Counts of packets over subgraphs (`dissemination` other than "shortest").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpreadView {
    /// Copies that this node has sent of its own packets, echoes included.
    pub copies: u64,
    /// Packets for this node, by the dissemination that their source chose: the first copy of each.
    pub delivered: DeliveredView,
    /// Packets of other nodes, relayed: the first copy of each.
    pub relayed: u64,
    /// Further copies, dropped.
    pub duplicates: u64,
    /// Copies that came after the deadline of their packet, dropped.
    pub late: u64,
    /// Copies on a link that their frame does not name, or of a node that is not a member, dropped.
    pub off_graph: u64,
    /// Packets on real-time links, and their recovery.
    #[serde(default)]
    pub real_time: RealTimeView,
    /// Packets without a proof of their source, where `[overlay] trust` demands one, dropped.
    #[serde(default)]
    pub unvouched: u64,
    /// Intrusion-tolerant packets. The counts above do not have them.
    #[serde(default)]
    pub tolerant: TolerantView,
}

/// Counts of real-time links: the recovery between this node and its neighbours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RealTimeView {
    /// Copies that this node has sent to a neighbour for the first time.
    pub sent: u64,
    /// Copies that it has sent again.
    pub repeated: u64,
    /// Copies that it has requested from a neighbour.
    pub requested: u64,
    /// Requested copies that came in time.
    pub recovered: u64,
    /// Missing copies that did not come in time.
    pub given_up: u64,
}

/// Counts of the packets of one service over subgraphs, echoes not included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceCountView {
    /// The kind of links that the packets name.
    pub kind: String,
    /// The dissemination that they name.
    pub dissemination: String,
    /// Copies that this node has sent to neighbours, of its own packets and of those that it relays. Repetitions on real-time
    /// links are not included.
    pub copies: u64,
    /// Packets for this node: the first copy of each.
    pub delivered: u64,
    /// Copies that came after the deadline of their packet, dropped.
    pub late: u64,
}

impl ServiceCountView {
    /// Returns the metric name and the count of each result.
    pub const fn fates(&self) -> [(&'static str, u64); 3] {
        [("copy_sent", self.copies), ("delivered", self.delivered), ("late", self.late)]
    }
}

/// Packets by dissemination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeliveredView {
    /// Over the cheapest path.
    pub shortest: u64,
    /// Over paths that share no relay.
    pub duplicate: u64,
    /// Over all links on short ways.
    pub flood: u64,
    /// Over graphs with targeted redundancy.
    #[serde(default)]
    pub graph: u64,
}

impl SpreadView {
    /// Returns the metric name and the count of each result.
    pub const fn fates(&self) -> [(&'static str, u64); 27] {
        [
            ("unvouched", self.unvouched),
            ("tolerant_copy_sent", self.tolerant.copies),
            ("tolerant_relayed", self.tolerant.relayed),
            ("tolerant_duplicate", self.tolerant.duplicates),
            ("tolerant_late", self.tolerant.late),
            ("tolerant_off_graph", self.tolerant.off_graph),
            ("tolerant_forged", self.tolerant.forged),
            ("tolerant_replayed", self.tolerant.replayed),
            ("tolerant_unchecked", self.tolerant.unchecked),
            ("tolerant_over_share", self.tolerant.over_share),
            ("tolerant_expired", self.tolerant.expired),
            ("reliable_sent", self.tolerant.flows.sent),
            ("reliable_blocked", self.tolerant.flows.blocked),
            ("reliable_given_up", self.tolerant.flows.given_up),
            ("reliable_copy_sent", self.tolerant.flows.copies),
            ("reliable_resent", self.tolerant.flows.resent),
            ("reliable_relayed", self.tolerant.flows.relayed),
            ("reliable_forged", self.tolerant.flows.forged),
            ("repeated", self.real_time.repeated),
            ("requested", self.real_time.requested),
            ("recovered", self.real_time.recovered),
            ("given_up", self.real_time.given_up),
            ("copy_sent", self.copies),
            ("relayed", self.relayed),
            ("duplicate", self.duplicates),
            ("late", self.late),
            ("off_graph", self.off_graph),
        ]
    }
}

/// The links that packets of one service use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServiceView {
    /// The kind of links.
    #[serde(default)]
    pub kind: String,
    /// The dissemination.
    pub dissemination: String,
    /// The links, each from one node to another. Empty: the nodes on the way do not understand such packets; they take
    /// one path.
    pub links: Vec<[String; 2]>,
    /// The ones of these links that do not recover losses, although the kind is real time: one end does not know how.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrecovered: Vec<[String; 2]>,
    /// True if packets arrive over these links.
    pub arrives: bool,
}

/// Counts of whole packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaughtView {
    /// Caught here and sent to the node that delivers them.
    pub sent: u64,
    /// Those of the sent ones that went in datagrams.
    #[serde(default)]
    pub by_datagram: u64,
    /// Caught, and dropped because the session to that node was full.
    pub dropped: u64,
    /// Caught while there was no session: passed without the overlay or dropped, as `on_crash` says.
    pub without_way: u64,
    /// From other nodes, delivered here.
    pub delivered: u64,
    /// From other nodes, and not delivered: unreadable, forged, or to a destination that no `[[overlay.deliver]]` allows.
    pub refused: u64,
    /// From other nodes, and denied by a rule of this node, or to one of Sidetrack's own ports.
    #[serde(default)]
    pub denied: u64,
    /// From other nodes, and rejected by the system.
    pub failed: u64,
}

impl CaughtView {
    /// Returns the metric name and the count of each result.
    pub const fn fates(&self) -> [(&'static str, u64); 7] {
        [
            ("sent", self.sent),
            ("dropped", self.dropped),
            ("without_way", self.without_way),
            ("delivered", self.delivered),
            ("refused", self.refused),
            ("denied", self.denied),
            ("failed", self.failed),
        ]
    }
}

/// One link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LinkView {
    /// The neighbour.
    pub neighbour: String,
    /// True if both ends hear each other.
    pub up: bool,
    /// Round trip, milliseconds.
    pub rtt_ms: f64,
    /// Its mean deviation, milliseconds.
    pub jitter_ms: f64,
    /// Share of sent datagrams that is lost before recovery, percent; measured where datagrams pass.
    #[serde(default)]
    pub loss_percent: f64,
    /// Cost, milliseconds.
    pub cost_ms: f64,
    /// True if the neighbour hears our datagrams.
    #[serde(default)]
    pub datagrams: bool,
    /// Most bytes of a datagram.
    #[serde(default)]
    pub datagram_bytes: usize,
    /// True if the neighbour recovers packets of real-time services. Otherwise they are sent as best effort.
    #[serde(default)]
    pub real_time: bool,
    /// What this program understands and the neighbour does not announce: it runs an older version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    /// Connections that wait for flows.
    pub idle_connections: usize,
    /// Its paced part, if one of the two ends declares it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paced: Option<PacedView>,
    /// Its legs, if it has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub legs: Vec<LegView>,
}

/// One leg of a link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LegView {
    /// Our address. "0.0.0.0" or "::" while it is unknown.
    pub from: String,
    /// The neighbour's address.
    pub to: String,
    /// True if both ends hear each other on it.
    pub up: bool,
    /// True if this node sends on it.
    pub used: bool,
    /// Round trip, milliseconds.
    pub rtt_ms: f64,
    /// Share of hellos that is lost, percent.
    pub loss_percent: f64,
}

/// The best path to a node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PathView {
    /// The node.
    pub to: String,
    /// The nodes of the path; empty if there is no path.
    pub path: Vec<String>,
    /// Its cost, milliseconds.
    pub cost_ms: f64,
    /// True if packets to this node travel in datagrams now.
    #[serde(default)]
    pub by_datagram: bool,
    /// The services of packets to this node that use more than one path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceView>,
    /// The paths of sessions to this node that use several: at most 16 sets of paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sessions: Vec<SessionPathsView>,
}

/// The paths of sessions that use several, and the same ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionPathsView {
    /// "stripe" or "duplicate".
    pub dissemination: String,
    /// How many sessions use these paths now.
    pub sessions: u64,
    /// The nodes of each path.
    pub paths: Vec<Vec<String>>,
    /// Bytes of flows that these sessions have sent on each path, copies included.
    pub sent_bytes: Vec<u64>,
}

/// The answer to a ping.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PingView {
    /// The nodes of the path. Empty with `links`.
    pub path: Vec<String>,
    /// The links that copies of the packet could use, if the request named a kind of links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<[String; 2]>,
    /// Round trip, milliseconds.
    pub rtt_ms: f64,
}

/// The links that packets of a service to a node would use now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WayView {
    /// The kind of links.
    pub kind: String,
    /// The dissemination in question.
    pub dissemination: String,
    /// The dissemination that the packets name: another one if a node on the way does not know its code.
    pub named: String,
    /// The links, each from one node to another.
    pub links: Vec<[String; 2]>,
}

fn ms(us: impl Into<u64>) -> f64 {
    let us: u64 = us.into();
    us as f64 / 1000.0
}

/// Returns the status now.
pub(super) fn of<K: Keys>(shared: &Shared, node: &Node<K>, uptime: Duration) -> Status {
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    let identity = &shared.identity;
    let graph = shared.graph.load();
    let links = node.links().map(|(neighbour, up, quality)| LinkView {
        neighbour: identity.name(neighbour),
        up,
        rtt_ms: ms(quality.rtt_us),
        jitter_ms: ms(quality.jitter_us),
        loss_percent: f64::from(quality.loss_ppm) / 10_000.0,
        cost_ms: ms(node.cost_us(neighbour).unwrap_or_default()),
        datagrams: node.reaches_by_datagram(neighbour, shared.clock.now()),
        datagram_bytes: shared.datagrams.link(neighbour).map_or(0, |link| link.datagram_bytes()),
        real_time: graph.recovers(identity.own(), neighbour),
        // Statements of features travel only over links that are up.
        lacks: if up { lacking(graph.features(neighbour)) } else { Vec::new() },
        idle_connections: shared.pool.idle(neighbour),
        paced: paced::of(shared, neighbour),
        legs: legs(shared, neighbour),
    });
    let others = identity.members().filter(|(other, _)| *other != identity.own());
    let paths = others.map(|(to, _)| match node.route(to, &BTreeSet::new()) {
        Some(route) => PathView {
            to: identity.name(to),
            path: names(identity, route.path.nodes()),
            cost_ms: ms(route.cost_us),
            by_datagram: shared.datagrams.paths.is_proven(to, shared.clock.now()),
            services: services(shared, to),
            sessions: lanes::view(shared, to),
        },
        None => PathView {
            to: identity.name(to),
            path: Vec::new(),
            cost_ms: 0.0,
            by_datagram: false,
            services: Vec::new(),
            sessions: lanes::view(shared, to),
        },
    });
    let caught = shared.packets.as_ref().map(|packets| caught(&packets.counters));
    let (records, packets) = node.drops();
    let counters = &shared.counters;
    Status {
        node: identity.name(identity.own()),
        uptime_seconds: uptime.as_secs(),
        links: links.collect(),
        links_beyond_topology: node.beyond_topology(),
        paths: paths.collect(),
        graph: mapped::links(shared, &graph),
        links_changed_unix_ms: 0,
        sessions: shared.sessions.len() as u64,
        sessions_opened: count(&counters.sessions_opened),
        sessions_delivered: count(&counters.sessions_delivered),
        sessions_resumed: count(&counters.sessions_resumed),
        paths_opened: count(&counters.paths_opened),
        sessions_refused: count(&counters.sessions_refused),
        relayed: count(&counters.relayed),
        relayed_bytes: count(&counters.relayed_bytes),
        strangers: count(&counters.strangers),
        records_dropped: records.forged + records.strangers + records.too_fast,
        packets_dropped: packets.no_link + packets.off_path,
        datagrams: datagrams(&shared.datagrams.counters),
        spread: spread(&shared.datagrams),
        paced: paced::totals(shared),
        services: counted(&shared.datagrams),
        settings: Vec::new(),
        caught,
        groups: groups::views(shared),
    }
}

/// Returns the names of the features that are missing among these bits.
fn lacking(bits: u32) -> Vec<String> {
    let missing = Features::NAMES.iter().filter(|(bit, _)| bits & bit == 0);
    missing.map(|(_, name)| (*name).to_owned()).collect()
}

fn legs(shared: &Shared, neighbour: NodeId) -> Vec<LegView> {
    let Some(link) = shared.datagrams.link(neighbour) else { return Vec::new() };
    let used = link.legs.chosen();
    let view = |(view, route): (View, Route)| LegView {
        from: route.from.to_string(),
        to: route.to.to_string(),
        up: view.is_up,
        used: used.contains(&route),
        rtt_ms: ms(view.quality.rtt_us),
        loss_percent: f64::from(view.quality.loss_ppm) / 10_000.0,
    };
    link.legs.views().into_iter().map(view).collect()
}

/// Returns the counts of whole packets.
pub(super) fn caught(packets: &packets::Counters) -> CaughtView {
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    CaughtView {
        sent: count(&packets.sent),
        by_datagram: count(&packets.by_datagram),
        dropped: count(&packets.dropped),
        without_way: count(&packets.without_way),
        delivered: count(&packets.delivered),
        refused: count(&packets.refused),
        denied: count(&packets.denied),
        failed: count(&packets.failed),
    }
}

fn services(shared: &Shared, to: NodeId) -> Vec<ServiceView> {
    let graph = shared.graph.load();
    let named = |(from, to)| [from, to].map(|node| shared.identity.name(node));
    let view = |(service, subgraph, arrives): (Service, Option<Arc<Subgraph>>, bool)| {
        let is_unrecovered =
            |link: &(NodeId, NodeId)| service.kind == LinkKind::RealTime && !graph.recovers(link.0, link.1);
        let links: Vec<_> = subgraph.iter().flat_map(|subgraph| subgraph.links()).collect();
        ServiceView {
            kind: service.kind.name().to_owned(),
            dissemination: service.dissemination.name().to_owned(),
            unrecovered: links.iter().copied().filter(is_unrecovered).map(named).collect(),
            links: links.into_iter().map(named).collect(),
            arrives,
        }
    };
    let services = shared.datagrams.paths.subgraphs(to, shared.clock.now());
    services.into_iter().map(view).collect()
}

/// Returns the counts of packets over subgraphs.
pub(super) fn spread(datagrams: &Datagrams) -> SpreadView {
    let counts = datagrams.spread_counts();
    let [shortest, duplicate, flood, graph] = counts.delivered;
    SpreadView {
        copies: datagrams.counters.copies.load(Relaxed),
        delivered: DeliveredView { shortest, duplicate, flood, graph },
        relayed: counts.relayed,
        duplicates: counts.duplicates,
        late: counts.late,
        off_graph: counts.off_graph,
        real_time: real_time(&datagrams.real_time),
        unvouched: datagrams.counters.unvouched.load(Relaxed),
        tolerant: trust::of(datagrams),
    }
}

/// Returns the counts of each service that has any.
pub(super) fn counted(datagrams: &Datagrams) -> Vec<ServiceCountView> {
    let view = |(kind, dissemination, counts): (LinkKind, Dissemination, &ServiceCounts)| ServiceCountView {
        kind: kind.name().to_owned(),
        dissemination: dissemination.name().to_owned(),
        copies: counts.copies.load(Relaxed),
        delivered: counts.delivered.load(Relaxed),
        late: counts.late.load(Relaxed),
    };
    let is_used = |view: &ServiceCountView| view.fates().iter().any(|(_, count)| *count > 0);
    datagrams.services.all().map(view).filter(is_used).collect()
}

fn real_time(totals: &Totals) -> RealTimeView {
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    RealTimeView {
        sent: count(&totals.sent),
        repeated: count(&totals.repeated),
        requested: count(&totals.requested),
        recovered: count(&totals.recovered),
        given_up: count(&totals.given_up),
    }
}

fn datagrams(counters: &Counters) -> DatagramsView {
    let count = |counter: &AtomicU64| counter.load(Relaxed);
    DatagramsView {
        received: count(&counters.received),
        sent: count(&counters.sent),
        unsent: count(&counters.unsent),
        unknown: count(&counters.unknown),
        forged: count(&counters.forged),
        replayed: count(&counters.replayed),
        leg_copies: count(&counters.leg_copies),
        unreadable: count(&counters.unreadable),
        no_link: count(&counters.no_link),
        too_fast: count(&counters.too_fast),
        lost_on_purpose: count(&counters.lost_on_purpose),
    }
}
