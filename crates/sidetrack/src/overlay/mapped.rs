//! The links of the whole overlay, as operators see them.

use super::shared::Shared;
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::route::Graph;

/// A link between two nodes, as their link-state records report it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GraphLinkView {
    /// Its ends.
    pub ends: [String; 2],
    /// Its cost, milliseconds: that of the direction with the higher one.
    pub cost_ms: f64,
    /// True if the link is in trouble: it loses more, or costs more, than usually.
    pub troubled: bool,
}

/// Returns the links of the overlay.
pub(super) fn links(shared: &Shared, graph: &Graph) -> Vec<GraphLinkView> {
    let view = |(one, other, cost_us)| GraphLinkView {
        ends: [one, other].map(|node| shared.identity.name(node)),
        cost_ms: f64::from(cost_us) / 1000.0,
        troubled: graph.is_troubled(one, other),
    };
    graph.links().map(view).collect()
}
