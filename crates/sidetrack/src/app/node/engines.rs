//! The packet engines of a node.

use crate::config::{Config, Listener, ListenerKind};
use crate::engine;
use crate::worker::{Admission, Shared};
use anyhow::Context;
use std::sync::Arc;

/// The packet engines of a configuration.
pub(in crate::app) fn engine_listeners(config: &Config) -> impl Iterator<Item = &Listener> {
    config.listeners.iter().filter(|listener| matches!(listener.kind, ListenerKind::Engine(_)))
}

pub(super) fn engines(opened: engine::Opened, shared: &Arc<Shared>) -> anyhow::Result<engine::Engines> {
    let (numbers, functions, bounds) = (shared.clone(), shared.clone(), shared.clone());
    let surroundings = engine::Surroundings {
        config: shared.config.clone(),
        clock: shared.clock(),
        next_id: Arc::new(move || numbers.next_flow_id()),
        chains: Arc::new(move |spec, flow| functions.functions.chain(spec, flow)),
        admit: Arc::new(move |client, for_one_that_leaves| {
            Admission::beside(&bounds, client, for_one_that_leaves)
                .map(|leave| leave.map(|leave| Box::new(leave) as engine::Leave))
        }),
        internal: Arc::default(),
    };
    engine::Engines::start(opened, &surroundings).context("cannot start the packet engine")
}
