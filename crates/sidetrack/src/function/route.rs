//! The way of one flow through the functions of its rule: groups of functions inside this process, and
//! containers between them.

use super::container::Pool;
use super::{Function, Library};
use sidetrack_core::chain::Chain;
use sidetrack_core::flow::Flow;
use sidetrack_core::function::{ChainSpec, OnDown, Stop};
use std::sync::Arc;

/// The functions and containers of one flow.
pub struct Route {
    /// The functions before the first container, if there are any.
    pub chain: Option<Box<Chain>>,
    /// The containers, in order from the client to the server.
    pub legs: Vec<Leg>,
}

/// One container of a route.
pub struct Leg {
    /// The function's name.
    pub name: Arc<str>,
    /// The functions between this container and the next, or the server.
    pub chain: Option<Box<Chain>>,
    /// What happens if it is down.
    pub on_down: OnDown,
    function: Arc<Function>,
}

impl Leg {
    /// Returns its containers.
    ///
    /// # Errors
    /// Fails if this process does not start containers.
    pub fn pool(&self) -> Result<&Pool, String> {
        let nobody = || "containers are started by `sidetrack up` alone".to_owned();
        self.function.pool().map(|pool| &**pool).ok_or_else(nobody)
    }
}

impl Library {
    /// Makes the way of one flow.
    ///
    /// # Errors
    /// Fails if a function ends the flow at once, for example a filter by host name.
    pub fn route(&self, spec: &ChainSpec, flow: &Flow) -> Result<Route, Stop> {
        let mut groups = spec.functions.split(|function| function.kind.is_container());
        let mut containers = spec.functions.iter().filter(|function| function.kind.is_container());
        let mut chain = || match groups.next() {
            Some(group) if !group.is_empty() => Ok(Some(Box::new(self.stages(group, flow)?))),
            _ => Ok(None),
        };
        let first = chain()?;
        let leg = |spec_of: &Arc<sidetrack_core::function::FunctionSpec>| {
            let function = self.function(spec_of);
            function.tally.flow();
            Ok(Leg { name: spec_of.name.clone(), chain: chain()?, on_down: spec.on_down, function })
        };
        Ok(Route { chain: first, legs: containers.by_ref().map(leg).collect::<Result<_, Stop>>()? })
    }
}
