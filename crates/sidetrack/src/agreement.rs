//! Data-flow agreements on a node: the agreement in force, and what it changes in verdicts. `docs/control.md` explains how to
//! write one. Without the feature `control` nothing can read one: [`read`] then refuses every file.

pub use sidetrack_common::agreement::{Book, FILE_MAX};
#[cfg(feature = "control")]
pub use sidetrack_control::agreement::{load, read};
#[cfg(not(feature = "control"))]
pub use without::read;

use crate::config::{Config, PolicyMode};
use sidetrack_core::agreement::{Clause, Ruling};
use sidetrack_core::flow::Flow;
use sidetrack_core::function::{ChainSpec, FunctionSpec, OnChange, OnDown};
use sidetrack_core::policy::{Action, Carry, Verdict};
use std::sync::Arc;

/// A program that was built without the feature `control` takes no agreement.
#[cfg(not(feature = "control"))]
mod without {
    use super::Book;
    use crate::config::{ConfigError, Problem};
    use std::time::SystemTime;

    /// Refuses the text; `name` is that of the file in the message.
    ///
    /// # Errors
    /// Always: nothing here can read an agreement.
    pub fn read(name: &str, text: &str, _now: SystemTime) -> Result<Book, ConfigError> {
        let message = "this program was built without data-flow agreements".to_owned();
        let hint = "use a build with the feature `control`, or remove `agreement` from [policy]";
        Err(ConfigError::new(name, text, vec![Problem::error(0..0, message, hint)]))
    }
}

/// The agreement in force, and how it is applied.
#[derive(Clone, Debug, Default)]
pub struct InForce {
    /// The agreement. Without one nothing is allowed.
    pub book: Option<Arc<Book>>,
    /// What happens to flows that it does not allow.
    pub mode: PolicyMode,
}

/// What an allowed flow must pass through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    /// The functions, in the order in which a client's bytes pass through them.
    pub functions: Vec<Arc<FunctionSpec>>,
    /// The agreement's decision, for the record.
    pub said: Arc<str>,
}

/// Returns the functions of a configuration that a flow must pass through according to the agreement.
///
/// # Errors
/// Fails if the flow is not allowed; the text says why.
pub fn needs(
    in_force: &InForce,
    config: &Config,
    flow: &Flow,
    clause: &Arc<Clause>,
) -> Result<Needs, Arc<str>> {
    let book = in_force.book.as_ref().ok_or("no agreement is in force")?;
    let bridging = match book.ask(flow, clause) {
        Ruling::Allow(bridging) => bridging,
        Ruling::Deny(why) => return Err(why),
    };
    let spec = |name: &Arc<str>| {
        let known = config.functions.iter().find(|spec| spec.name == *name);
        known
            .cloned()
            .ok_or_else(|| format!("the agreement asks for the function '{name}', which this node lacks"))
    };
    let functions = bridging.at(clause.at).iter().map(spec).collect::<Result<_, _>>()?;
    Ok(Needs { functions, said: format!("allow: {}", bridging.by.join(", ")).into() })
}

impl InForce {
    /// Returns the verdict after asking the agreement, if the flow's rule refers to it.
    pub fn judge(&self, config: &Config, flow: &Flow, verdict: Verdict) -> Verdict {
        let Action::Carry(carry) = &verdict.action else { return verdict };
        let Some(clause) = &carry.agreement else { return verdict };
        match needs(self, config, flow, clause) {
            Ok(Needs { functions, said }) => {
                let action = match functions.is_empty() {
                    true => verdict.action.clone(),
                    false => Action::Carry(Arc::new(through(carry, functions))),
                };
                Verdict { action, agreement: Some(said), ..verdict }
            }
            Err(why) if self.mode == PolicyMode::Audit => {
                Verdict { agreement: Some(format!("would deny: {why}").into()), ..verdict }
            }
            Err(why) => Verdict {
                action: Action::Deny,
                why: format!("{}; agreement: {why}", verdict.why).into(),
                agreement: Some(format!("deny: {why}").into()),
                ..verdict
            },
        }
    }

    /// Says why a flow that is carried under this verdict must end. `None` if it may continue.
    pub fn revokes(&self, config: &Config, flow: &Flow, verdict: &Verdict) -> Option<Arc<str>> {
        let Action::Carry(carry) = &verdict.action else { return None };
        let clause = carry.agreement.as_ref()?;
        if self.mode == PolicyMode::Audit {
            return None;
        }
        let functions = match needs(self, config, flow, clause) {
            Ok(needs) => needs.functions,
            Err(why) => return Some(why),
        };
        let mut passed = carry.chain.iter().flat_map(|chain| &chain.functions);
        let lacks = functions.iter().find(|function| !passed.any(|one| one == *function))?;
        Some(
            format!("it does not pass the function '{}', which the agreement asks for now", lacks.name)
                .into(),
        )
    }
}

/// Adds these functions after those of the rule. None of them may be skipped: the agreement requires them.
fn through(carry: &Carry, functions: Vec<Arc<FunctionSpec>>) -> Carry {
    let (mut all, on_change) = match &carry.chain {
        Some(chain) => (chain.functions.clone(), chain.on_change),
        None => (Vec::new(), OnChange::default()),
    };
    all.extend(functions);
    Carry {
        chain: Some(Arc::new(ChainSpec { functions: all, on_change, on_down: OnDown::Deny })),
        ..carry.clone()
    }
}
