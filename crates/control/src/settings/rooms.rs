//! What nodes offer to containers, and what functions need.

use super::{Check, texts};
use crate::api::Room;
use serde::Deserialize;
use sidetrack_common::file::{At, List};
use sidetrack_core::placement::Demand;
use std::collections::BTreeMap;

/// Default memory of a container, bytes: that of a function in a proxy's configuration.
const MEMORY_BYTES: u64 = 128 << 20;
/// Default of the highest number of containers.
const REPLICAS_MAX: u16 = 8;

/// The room of a node, as written in the file of a domain.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawRoom {
    cpu_percent: Option<At<u32>>,
    memory_bytes: Option<At<u64>>,
    cost_milli: Option<At<u64>>,
    labels: Option<List<String>>,
}

/// What a function needs for one application, as written in the file of an orchestrator.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawDemand {
    cpu_percent: Option<At<u32>>,
    replica_cpu_percent: Option<At<u32>>,
    replica_cpu_percent_max: Option<At<u32>>,
    memory_bytes: Option<At<u64>>,
    replicas_max: Option<At<u16>>,
    labels: Option<List<String>>,
}

impl Check<'_> {
    /// The rooms of these nodes.
    pub(super) fn rooms(&mut self, raw: &BTreeMap<String, At<RawRoom>>, nodes: &[String]) -> Vec<Room> {
        let mut rooms = Vec::new();
        for (node, at) in raw {
            if !nodes.contains(node) {
                let help = "add it to `nodes`, or take this table out";
                self.error(at.span(), format!("the node '{node}' is not offered"), help);
            }
            let (Some(cpu), Some(memory)) = (&at.cpu_percent, &at.memory_bytes) else {
                let help = "write `cpu_percent = 400` (four cores) and `memory_bytes = 8589934592`";
                self.error(at.span(), "nothing says how much room the node has", help);
                continue;
            };
            rooms.push(Room {
                node: node.clone(),
                cpu_milli: u64::from(**cpu) * 10,
                memory_bytes: **memory,
                cost_milli: at.cost_milli.as_ref().map_or(1000, |at| **at),
                labels: texts(&at.labels),
            });
        }
        rooms
    }

    /// What functions need.
    pub(super) fn demands(&mut self, raw: &BTreeMap<String, At<RawDemand>>) -> BTreeMap<String, Demand> {
        let mut demands = BTreeMap::new();
        for (function, at) in raw {
            let Some(cpu) = &at.cpu_percent else {
                let help = "write `cpu_percent = 100`: the CPU time that one application needs of it, per cent of a core";
                self.error(at.span(), format!("nothing says how much CPU time '{function}' needs"), help);
                continue;
            };
            let milli =
                |at: &Option<At<u32>>, default: u64| at.as_ref().map_or(default, |at| u64::from(**at) * 10);
            let first = milli(&at.replica_cpu_percent, 1000);
            let demand = Demand {
                function: function.as_str().into(),
                cpu_milli: u64::from(**cpu) * 10,
                replica_cpu_milli: first,
                replica_cpu_max_milli: milli(&at.replica_cpu_percent_max, first.max(1000)),
                memory_bytes: at.memory_bytes.as_ref().map_or(MEMORY_BYTES, |at| **at),
                replicas_max: at.replicas_max.as_ref().map_or(REPLICAS_MAX, |at| **at).into(),
                labels: texts(&at.labels).into_iter().map(Into::into).collect(),
            };
            if demand.replica_cpu_max_milli < first {
                let help = "raise `replica_cpu_percent_max`, or lower `replica_cpu_percent`";
                self.error(at.span(), "a container begins with more CPU time than it can use", help);
            }
            demands.insert(function.clone(), demand);
        }
        demands
    }
}
