//! An agreement at work: what it says about flows, remembered, and what follows for their verdicts.

use crate::config::{Config, PolicyMode};
use sidetrack_core::agreement::{Agreement, Clause, Movement, Ruling};
use sidetrack_core::flow::Flow;
use sidetrack_core::function::{ChainSpec, FunctionSpec, OnChange, OnDown};
use sidetrack_core::policy::{Action, Carry, Verdict};
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

/// Most rulings that are remembered; then all are forgotten, and asked for again.
const REMEMBERED_MAX: usize = 65_536;

/// An agreement and what it has said so far: the answer to a question never changes.
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
    pub(super) fn new(
        text: &str,
        agreement: Agreement,
        agreements: Vec<Arc<str>>,
        purposes: Vec<Arc<str>>,
        next_change: Option<SystemTime>,
    ) -> Self {
        Self { text: text.into(), agreement, agreements, purposes, next_change, rulings: RwLock::default() }
    }

    /// The text it was read from.
    pub fn text(&self) -> &Arc<str> {
        &self.text
    }

    /// The agreement.
    pub const fn agreement(&self) -> &Agreement {
        &self.agreement
    }

    /// The names of those in force, in the order of the file.
    pub fn agreements(&self) -> &[Arc<str>] {
        &self.agreements
    }

    /// What data may be wanted for.
    pub fn purposes(&self) -> &[Arc<str>] {
        &self.purposes
    }

    /// When an agreement begins or ends next: the file has to be read again then.
    pub const fn next_change(&self) -> Option<SystemTime> {
        self.next_change
    }

    /// What is decided about a flow of a rule that asks this.
    pub fn ask(&self, flow: &Flow, clause: &Arc<Clause>) -> Ruling {
        let movement = match self.agreement.movement(flow) {
            Ok(movement) => movement,
            Err(why) => return Ruling::Deny(why.into()),
        };
        let key = (clause.clone(), movement);
        if let Some(known) = self.rulings.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return known.clone();
        }
        let ruling = self.agreement.rule(&key.1, &clause.purpose, clause.access);
        let mut rulings = self.rulings.write().unwrap_or_else(PoisonError::into_inner);
        if rulings.len() >= REMEMBERED_MAX {
            rulings.clear();
        }
        rulings.insert(key, ruling.clone());
        ruling
    }
}

/// What is in force: a book, and what its word is worth.
#[derive(Clone, Debug, Default)]
pub struct InForce {
    /// The agreement; without one nothing is allowed.
    pub book: Option<Arc<Book>>,
    /// What becomes of flows that it does not allow.
    pub mode: PolicyMode,
}

/// What a flow that is allowed has to pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    /// The functions, in the order in which a client's bytes pass them.
    pub functions: Vec<Arc<FunctionSpec>>,
    /// What the agreement said, for the record.
    pub said: Arc<str>,
}

/// The functions of a configuration that a flow has to pass by what the agreement says about it.
///
/// # Errors
/// It must not go on, and why.
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
    /// The verdict about a flow after the agreement was asked, where its rule asks it.
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

    /// Why a flow that was carried under this verdict must not go on; none if it may.
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

/// The same way, and then through these functions. None of the chain is ever skipped: what is agreed on is applied.
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
