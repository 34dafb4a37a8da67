//! Metrics of the overlay.

use super::{Metrics, raise, signed};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WhatLabel {
    what: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FateLabel {
    fate: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServiceLabels {
    kind: String,
    dissemination: String,
    fate: &'static str,
}

/// What a node of the overlay counts.
#[derive(Debug, Default)]
pub(super) struct OverlayMetrics {
    packets: Family<FateLabel, Counter>,
    services: Family<ServiceLabels, Counter>,
    group_packets: Family<FateLabel, Counter>,
    groups: Gauge,
    group_members: Gauge,
    paths: Family<FateLabel, Counter>,
    paced: Family<WhatLabel, Counter>,
    paced_queued_bytes: Gauge,
    pacing_delay_us: Gauge,
}

impl OverlayMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register("overlay_packets", "Whole packets of the overlay, by their fate", self.packets.clone());
        to.register(
            "overlay_service_packets",
            "Packets of the overlay over subgraphs, by kind of links, dissemination and fate",
            self.services.clone(),
        );
        to.register(
            "overlay_group_packets",
            "Packets to groups of the overlay, by their fate",
            self.group_packets.clone(),
        );
        to.register("overlay_groups", "Groups of the overlay that have members", self.groups.clone());
        to.register("overlay_group_members", "Members of all groups", self.group_members.clone());
        to.register(
            "overlay_paths",
            "Changes of the paths that flows of the overlay use",
            self.paths.clone(),
        );
        to.register(
            "overlay_paced",
            "Packets and bytes on paced links of the overlay, and what was lost and sent again",
            self.paced.clone(),
        );
        to.register(
            "overlay_paced_queued_bytes",
            "Bytes that wait on paced links to be sent for the first time",
            self.paced_queued_bytes.clone(),
        );
        to.register(
            "overlay_pacing_delay_us",
            "How long the longest queue of a paced link needs at its rate",
            self.pacing_delay_us.clone(),
        );
    }
}

impl Metrics {
    /// Takes over the counts of the overlay's whole packets, by fate.
    pub fn read_packets(&self, fates: &[(&'static str, u64)]) {
        for &(fate, total) in fates {
            raise(&self.overlay.packets.get_or_create_owned(&FateLabel { fate }), total);
        }
    }

    /// Takes over the counts of packets of one service of the overlay, by fate.
    pub fn read_service(&self, kind: &str, dissemination: &str, fates: &[(&'static str, u64)]) {
        for &(fate, total) in fates {
            let (kind, dissemination) = (kind.to_owned(), dissemination.to_owned());
            let labels = ServiceLabels { kind, dissemination, fate };
            raise(&self.overlay.services.get_or_create_owned(&labels), total);
        }
    }

    /// Takes over the counts of packets to the overlay's groups, by fate, and how many groups and members there are.
    pub fn read_groups(&self, fates: &[(&'static str, u64)], groups: u64, members: u64) {
        for &(fate, total) in fates {
            raise(&self.overlay.group_packets.get_or_create_owned(&FateLabel { fate }), total);
        }
        self.overlay.groups.set(signed(groups));
        self.overlay.group_members.set(signed(members));
    }

    /// Takes over the counts of the overlay's paths, by their fate.
    pub fn read_paths(&self, fates: &[(&'static str, u64)]) {
        for &(fate, total) in fates {
            raise(&self.overlay.paths.get_or_create_owned(&FateLabel { fate }), total);
        }
    }

    /// Takes over the counts of paced links, and what waits on them: bytes, and the µs that the longest queue needs.
    pub fn read_paced(&self, counts: &[(&'static str, u64)], (queued_bytes, delay_us): (u64, u64)) {
        for &(what, total) in counts {
            raise(&self.overlay.paced.get_or_create_owned(&WhatLabel { what }), total);
        }
        self.overlay.paced_queued_bytes.set(signed(queued_bytes));
        self.overlay.pacing_delay_us.set(signed(delay_us));
    }
}
