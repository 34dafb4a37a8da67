//! The paced part of links, as operators see it.

use super::{Lane, Shared};
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::Features;
use std::sync::atomic::Ordering::Relaxed;

/// The paced part of one link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PacedView {
    /// "agreed": flows use it. "waiting": the neighbour has not answered yet. "not declared there": the neighbour has no
    /// `[[overlay.link]]` with `bought = true`, or its datagrams do not arrive. "not known there": the neighbour's version
    /// does not know paced links. "not declared here": the neighbour offers it, and this node's file does not. "ended": the
    /// link ended, and is made again with the next control connection.
    pub state: String,
    /// The rate at which this node sends, Mb/s.
    pub rate_mbit: f64,
    /// The rate at which the neighbour sends, Mb/s. 0: it has not said so.
    pub peer_rate_mbit: f64,
    /// Flows on it now.
    pub streams: usize,
    /// Bytes that wait to be sent for the first time.
    pub queued_bytes: u64,
    /// How long these bytes need at the rate, milliseconds.
    pub pacing_delay_ms: f64,
    /// Its round trip, milliseconds.
    pub rtt_ms: f64,
    /// Share of this node's packets that were lost, percent.
    pub loss_percent: f64,
    /// Bytes of flows that were sent for the first time.
    pub bytes: u64,
    /// Bytes of flows that were sent again.
    pub bytes_again: u64,
    /// Packets that were sent.
    pub packets: u64,
    /// Those of them that seemed lost.
    pub lost: u64,
    /// Those of the lost ones that were only late.
    pub late: u64,
    /// Packets of the neighbour that were dropped because they found no room or broke the protocol.
    pub refused: u64,
}

/// Counts of all paced links of a node since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacedTotals {
    /// Bytes of flows that were sent for the first time.
    pub bytes: u64,
    /// Bytes of flows that were sent again.
    pub bytes_again: u64,
    /// Packets that were sent.
    pub packets: u64,
    /// Those of them that seemed lost.
    pub lost: u64,
    /// Those of the lost ones that were only late.
    pub late: u64,
    /// Acknowledgements that were sent.
    pub acks: u64,
    /// Bytes that wait to be sent for the first time now.
    pub queued_bytes: u64,
    /// How long the longest queue of a link needs at its rate, µs.
    pub pacing_delay_us: u64,
}

impl PacedTotals {
    /// Returns the metric name and the value of each count.
    pub const fn counts(&self) -> [(&'static str, u64); 6] {
        [
            ("bytes", self.bytes),
            ("bytes_again", self.bytes_again),
            ("packets", self.packets),
            ("lost", self.lost),
            ("late", self.late),
            ("acknowledgements", self.acks),
        ]
    }
}

fn mbit(bits_per_second: u64) -> f64 {
    bits_per_second as f64 / 1e6
}

/// Returns the paced part of the link to this neighbour. `None`: neither end declares it.
pub(in crate::overlay) fn of(shared: &Shared, neighbour: NodeId) -> Option<PacedView> {
    let lanes = &shared.datagrams.lanes;
    let Some(declared) = lanes.rate_now(neighbour) else {
        let peer_rate_mbit = mbit(lanes.undeclared(neighbour)?);
        return Some(PacedView {
            state: "not declared here".to_owned(),
            peer_rate_mbit,
            ..PacedView::default()
        });
    };
    let view = shared.datagrams.link(neighbour).and_then(|link| link.lane.as_ref().map(Lane::view));
    let Some(view) = view else {
        let state = "waiting".to_owned();
        return Some(PacedView { state, rate_mbit: mbit(declared), ..PacedView::default() });
    };
    let counts = view.counts;
    let is_known = shared.graph.load().features(neighbour) & Features::PACED != 0;
    let state = match (view.is_agreed, view.is_down, is_known) {
        (true, ..) => "agreed",
        (_, true, _) => "ended",
        (_, _, false) => "not known there",
        (_, _, true) => "not declared there",
    };
    Some(PacedView {
        state: state.to_owned(),
        rate_mbit: mbit(declared),
        peer_rate_mbit: mbit(view.peer_rate),
        streams: view.streams,
        queued_bytes: view.queued_bytes,
        pacing_delay_ms: view.pacing_delay.as_secs_f64() * 1e3,
        rtt_ms: view.round_trip.as_secs_f64() * 1e3,
        loss_percent: (counts.lost - counts.late) as f64 * 100.0 / counts.packets.max(1) as f64,
        bytes: counts.bytes,
        bytes_again: counts.bytes_again,
        packets: counts.packets,
        lost: counts.lost,
        late: counts.late,
        refused: counts.refused,
    })
}

/// Returns the counts of all paced links. `None`: this node declares none.
pub(in crate::overlay) fn totals(shared: &Shared) -> Option<PacedTotals> {
    let lanes = &shared.datagrams.lanes;
    if lanes.rates.is_empty() {
        return None;
    }
    let ended = &lanes.ended;
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
    let mut totals = PacedTotals {
        bytes: count(&ended.bytes),
        bytes_again: count(&ended.bytes_again),
        packets: count(&ended.packets),
        lost: count(&ended.lost),
        late: count(&ended.late),
        acks: count(&ended.acks),
        ..PacedTotals::default()
    };
    for view in shared.datagrams.all().iter().filter_map(|link| link.lane.as_ref().map(Lane::view)) {
        totals.bytes += view.counts.bytes;
        totals.bytes_again += view.counts.bytes_again;
        totals.packets += view.counts.packets;
        totals.lost += view.counts.lost;
        totals.late += view.counts.late;
        totals.acks += view.counts.acks;
        totals.queued_bytes += view.queued_bytes;
        let delay = u64::try_from(view.pacing_delay.as_micros()).unwrap_or(u64::MAX);
        totals.pacing_delay_us = totals.pacing_delay_us.max(delay);
    }
    Some(totals)
}
