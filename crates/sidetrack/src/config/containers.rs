//! What a configuration asks of containers.

use super::Config;
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::policy::{Action, Rule};
use std::sync::Arc;

impl Config {
    /// Whether it asks for the process that starts containers.
    pub fn wants_containers(&self) -> bool {
        self.engine.is_some() || self.functions.iter().any(|function| function.kind.is_container())
    }

    /// The most containers that a flow of one rule passes; an agreement may ask for any of the functions.
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
