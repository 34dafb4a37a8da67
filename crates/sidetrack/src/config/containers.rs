//! What a configuration needs from containers.

use super::Config;
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::policy::{Action, Rule};
use std::sync::Arc;

impl Config {
    /// Whether the process that starts containers is needed.
    pub fn wants_containers(&self) -> bool {
        self.container_engine.is_some() || self.functions.iter().any(|function| function.kind.is_container())
    }

    /// The most containers that a flow of one rule passes through. A rule that asks the agreement counts all
    /// functions, because the agreement may name any of them.
    pub fn most_containers(&self) -> usize {
        let containers = |functions: &[Arc<FunctionSpec>]| {
            functions.iter().filter(|function| function.kind.is_container()).count()
        };
        let of = |rule: &Rule| match &rule.action {
            Action::Carry(carry) => {
                let own = carry.chain.as_ref().map_or(0, |chain| containers(&chain.functions));
                own + carry.agreement.as_ref().map_or(0, |_| containers(&self.functions))
            }
            Action::Deny => 0,
        };
        self.policy.rules().iter().map(of).max().unwrap_or(0)
    }
}
