//! Applies an agreement to flows: caches its rulings and changes verdicts.

use crate::config::{Config, PolicyMode};
use sidetrack_core::agreement::{Agreement, Clause, Movement, Ruling};
use sidetrack_core::flow::Flow;
use sidetrack_core::function::{ChainSpec, FunctionSpec, OnChange, OnDown};
use sidetrack_core::policy::{Action, Carry, Verdict};
use sidetrack_sys::sync::{read, write};
use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::SystemTime;

/// Most rulings in the cache. Then the cache is emptied and rulings are computed again.
const REMEMBERED_MAX: usize = 65_536;

/// An agreement with a cache of its rulings. The answer to a question never changes.
#[derive(Debug)]
pub struct Book {
    text: Arc<str>,
    agreement: Agreement,
    agreements: Vec<Arc<str>>,
    purposes: Vec<Arc<str>>,
    next_change: Option<SystemTime>,
    rulings: RwLock<BTreeMap<(Arc<Clause>, Movement), Ruling>>,
}

impl Book {
    #[cfg(feature = "control")]
    pub(super) fn new(
        text: &str,
        agreement: Agreement,
        agreements: Vec<Arc<str>>,
        purposes: Vec<Arc<str>>,
        next_change: Option<SystemTime>,
    ) -> Self {
        Self { text: text.into(), agreement, agreements, purposes, next_change, rulings: RwLock::default() }
    }

    /// The text of the file.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// The agreement.
    pub const fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// The names of the agreements in force, in the order of the file.
    pub fn agreements(&self) -> &[Arc<str>] {
        &self.agreements
    }

    /// The purposes that it declares.
    pub fn purposes(&self) -> &[Arc<str>] {
        &self.purposes
    }

    /// When an agreement begins or ends next. The file must be read again at that time.
    pub const fn next_change(&self) -> Option<SystemTime> {
        self.next_change
    }

    /// Returns the ruling about a flow, for a rule with this clause.
    pub fn ask(&self, flow: &Flow, clause: &Arc<Clause>) -> Ruling {
        let movement = match self.agreement.movement(flow) {
            Ok(movement) => movement,
            Err(why) => return Ruling::Deny(why.into()),
        };
        let key = (clause.clone(), movement);
        if let Some(known) = read(&self.rulings).get(&key) {
            return known.clone();
        }
        let ruling = self.agreement.rule(&key.1, &clause.purpose, clause.access);
        let mut rulings = write(&self.rulings);
        if rulings.len() >= REMEMBERED_MAX {
            rulings.clear();
        }
        rulings.insert(key, ruling.clone());
        ruling
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
