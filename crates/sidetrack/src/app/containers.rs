//! Functions in containers: when they are started, and which of them a reload waits for.

use crate::config::Config;
use crate::function::container::Containers;
use crate::function::{Function, Library};
use crate::live::Clock;
use crate::rights::DataUser;
use anyhow::Context;
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::limit::DESCRIPTORS_PER_FLOW;
use std::sync::Arc;

/// Descriptors per flow and container: one into it, one back.
const DESCRIPTORS_PER_CONTAINER: u64 = 2;

/// Starts the process that starts containers, if the configuration needs it. Call it before rights are given up.
pub(super) fn start(config: &Config, user: Option<&DataUser>) -> anyhow::Result<Option<Arc<Containers>>> {
    config.wants_containers().then(|| Containers::start(config.container_engine.as_deref(), user)).transpose()
}

/// Starts the functions of a new node and waits for their containers. Returns why some are down: they are tried again, and the
/// rules say what happens to their flows meanwhile.
///
/// # Errors
/// The system has no more threads.
pub(super) fn first(
    library: &Library,
    clock: Clock,
    functions: &[Arc<FunctionSpec>],
    containers: Option<Arc<Containers>>,
) -> anyhow::Result<Vec<String>> {
    if let Some(containers) = containers {
        containers.run(clock).context("the containers' thread")?;
        library.start_with(containers);
    }
    library.keep(functions);
    let functions = library.functions();
    let down = functions.iter().filter_map(|function| function.pool()?.wait().err());
    Ok(down.map(|why| why.to_string()).collect())
}

/// Makes the functions of a new configuration. Their containers are healthy on return, so new flows can use them.
///
/// # Errors
/// A container does not become healthy; those started for this configuration are stopped.
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

/// The open files that count for flows, if each flow needs more because of its containers.
pub(super) fn share(config: &Config, nofile: u64) -> u64 {
    let containers = u64::try_from(config.most_containers()).unwrap_or(u64::MAX);
    let each = DESCRIPTORS_PER_FLOW.saturating_add(containers.saturating_mul(DESCRIPTORS_PER_CONTAINER));
    nofile / each * DESCRIPTORS_PER_FLOW
}
