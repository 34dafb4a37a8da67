//! Intrusion-tolerant packets, as operators see them.

use super::datagrams::Datagrams;
use super::status::DeliveredView;
use serde::{Deserialize, Serialize};

/// Counts of intrusion-tolerant packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TolerantView {
    /// Copies that this node has sent of its own packets, echoes included.
    pub copies: u64,
    /// Packets for this node: the first copy of each.
    pub delivered: DeliveredView,
    /// Packets of other nodes, relayed: the first copy of each.
    pub relayed: u64,
    /// Further copies, dropped.
    pub duplicates: u64,
    /// Copies that came after the deadline of their packet, dropped.
    pub late: u64,
    /// Copies on a link that their frame does not name, or of a node that is not a member, dropped.
    pub off_graph: u64,
    /// Copies with a wrong proof, dropped.
    pub forged: u64,
    /// Copies that were recorded before their source or this node restarted, dropped.
    pub replayed: u64,
    /// Copies of a source whose epoch this node does not know yet, dropped.
    pub unknown: u64,
    /// Copies that were dropped unchecked: their source or the neighbour caused more checks than its share.
    pub unchecked: u64,
    /// Waiting packets that were dropped because their source held most.
    pub over_share: u64,
    /// Waiting packets whose deadline was over, dropped.
    pub expired: u64,
    /// Packets that wait now, for all neighbours.
    pub waiting: usize,
    /// Their bytes.
    pub waiting_bytes: usize,
    /// Reliable flows. The counts above do not have them.
    #[serde(default)]
    pub flows: FlowsView,
}

/// Counts of reliable flows: intrusion-tolerant packets that all arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowsView {
    /// Packets of this node, echo requests included.
    pub sent: u64,
    /// Packets of this node that were refused because too many were on their way.
    pub blocked: u64,
    /// Packets of this node that were dropped because their destination restarted before it confirmed them.
    pub given_up: u64,
    /// Copies sent to neighbours.
    pub copies: u64,
    /// Of these, copies that were sent to the same neighbour before.
    pub resent: u64,
    /// Packets for this node, delivered in order.
    pub delivered: u64,
    /// Packets of other nodes that were kept and passed on.
    pub relayed: u64,
    /// Further copies, dropped.
    pub duplicates: u64,
    /// Packets outside the window of their flow, or beyond the flows of their source, dropped.
    pub beyond: u64,
    /// Frames that name no flow between two members, dropped.
    pub off_flow: u64,
    /// Packets and confirmations with a wrong proof, dropped.
    pub forged: u64,
    /// Frames from before a restart of the source or the destination, dropped.
    pub replayed: u64,
    /// Frames of nodes whose epoch is not known yet, dropped.
    pub unknown: u64,
    /// Frames that were dropped unchecked: their source or the neighbour caused more checks than its share.
    pub unchecked: u64,
    /// Packets that are kept now.
    pub kept: usize,
    /// Their bytes.
    pub kept_bytes: usize,
}

fn flows(datagrams: &Datagrams) -> FlowsView {
    let (counts, (kept, kept_bytes)) = datagrams.flow_counts();
    FlowsView {
        sent: counts.sent,
        blocked: counts.blocked,
        given_up: counts.given_up,
        copies: counts.copies,
        resent: counts.resent,
        delivered: counts.delivered,
        relayed: counts.relayed,
        duplicates: counts.duplicates,
        beyond: counts.beyond,
        off_flow: counts.off_flow,
        forged: counts.forged,
        replayed: counts.replayed,
        unknown: counts.unknown,
        unchecked: counts.unchecked,
        kept,
        kept_bytes,
    }
}

impl FlowsView {
    fn line(&self) -> String {
        if *self == Self::default() {
            return String::new();
        }
        format!(
            "reliable flows {} packets sent, {} relayed, {} delivered; {} copies, {} of them again; {} kept; {} given up; \
             dropped: {} duplicate, {} beyond the window, {} forged, {} replayed, {} of unknown epochs, {} unchecked, {} of \
             no flow\n",
            self.sent,
            self.relayed,
            self.delivered,
            self.copies,
            self.resent,
            self.kept,
            self.given_up,
            self.duplicates,
            self.beyond,
            self.forged,
            self.replayed,
            self.unknown,
            self.unchecked,
            self.off_flow
        )
    }
}

/// Returns the counts now.
pub(super) fn of(datagrams: &Datagrams) -> TolerantView {
    let (counts, (waiting, waiting_bytes)) = datagrams.tolerant_counts();
    let [shortest, duplicate, flood, graph] = counts.delivered;
    TolerantView {
        copies: counts.copies,
        delivered: DeliveredView { shortest, duplicate, flood, graph },
        relayed: counts.relayed,
        duplicates: counts.duplicates,
        late: counts.late,
        off_graph: counts.off_graph,
        forged: counts.forged,
        replayed: counts.replayed,
        unknown: counts.unknown,
        unchecked: counts.unchecked,
        over_share: counts.over_share,
        expired: counts.expired,
        waiting,
        waiting_bytes,
        flows: flows(datagrams),
    }
}

impl TolerantView {
    /// Returns the counts in words, or nothing if all are zero.
    pub fn line(&self) -> String {
        let flows = self.flows.line();
        if (Self { flows: FlowsView::default(), ..*self }) == Self::default() {
            return flows;
        }
        let DeliveredView { shortest, duplicate, flood, graph } = self.delivered;
        format!(
            "intrusion-tolerant packets {} copies sent, {} relayed, {} delivered; {} waiting; dropped: {} duplicate, {} late, \
             {} expired, {} over their share, {} forged, {} replayed, {} of unknown epochs, {} unchecked, {} off their \
             subgraph\n{flows}",
            self.copies,
            self.relayed,
            shortest + duplicate + flood + graph,
            self.waiting,
            self.duplicates,
            self.late,
            self.expired,
            self.over_share,
            self.forged,
            self.replayed,
            self.unknown,
            self.unchecked,
            self.off_graph
        )
    }
}
