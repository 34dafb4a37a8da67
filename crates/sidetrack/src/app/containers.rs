//! Functions in containers: when they are started, and what a reload waits for.

use crate::config::Config;
use crate::function::container::Containers;
use crate::function::{Function, Library};
use crate::rights::DataUser;
use crate::worker::Shared;
use anyhow::Context;
use sidetrack_core::limit::DESCRIPTORS_PER_FLOW;
use std::sync::Arc;

/// Descriptors that a container on the way of a flow takes: into it, and back.
const DESCRIPTORS_PER_CONTAINER: u64 = 2;

/// Starts the process that starts containers, if the configuration asks for it. Before rights are given up.
pub(super) fn start(config: &Config, user: Option<&DataUser>) -> anyhow::Result<Option<Arc<Containers>>> {
    config.wants_containers().then(|| Containers::start(config.engine.as_deref(), user)).transpose()
}

/// The functions that a node starts with. Waits for containers; one that does not get well is down, and what that means for
/// flows their rules say.
pub(super) fn first(shared: &Shared, containers: Option<Arc<Containers>>) -> anyhow::Result<()> {
    if let Some(containers) = containers {
        containers.run(shared.clock()).context("the containers' thread")?;
        shared.functions.start_with(containers);
    }
    shared.functions.keep(&shared.config.load().functions);
    for function in shared.functions.functions() {
        if let Some(Err(why)) = function.pool().map(|pool| pool.wait()) {
            tracing::error!("{why}; it is tried again");
        }
    }
    Ok(())
}

/// The functions of a new configuration. Their containers are well: new flows can pass them at once.
///
/// # Errors
/// One does not get well; those that were started for it go.
pub(super) fn anew(library: &Library, new: &Config) -> anyhow::Result<Vec<Arc<Function>>> {
    anyhow::ensure!(
        library.containers().is_some() || !new.wants_containers(),
        "nothing here starts containers yet: restart sidetrack, or start it with `engine` in [containers] the next time"
    );
    let known = library.functions();
    let functions = library.make(&new.functions);
    let fresh = functions.iter().filter(|function| !known.iter().any(|old| Arc::ptr_eq(old, function)));
    for pool in fresh.filter_map(|function| function.pool()) {
        pool.wait().map_err(anyhow::Error::msg)?;
    }
    Ok(functions)
}

/// The open files that count for flows, where each takes more of them because of the containers on its way.
pub(super) fn share(config: &Config, nofile: u64) -> u64 {
    let containers = u64::try_from(config.most_containers()).unwrap_or(u64::MAX);
    let each = DESCRIPTORS_PER_FLOW.saturating_add(containers.saturating_mul(DESCRIPTORS_PER_CONTAINER));
    nofile / each * DESCRIPTORS_PER_FLOW
}
