//! The reader of agreements but for the policy engine.

#[path = "../../../crates/control/src/agreement/check.rs"]
mod check;
#[path = "../../../crates/control/src/agreement/clause.rs"]
mod clause;
#[path = "../../../crates/control/src/agreement/condition.rs"]
mod condition;
#[path = "../../../crates/control/src/agreement/raw.rs"]
mod raw;

use crate::file::{ConfigError, parse};
use check::{Check, Checked};
use sidetrack_core::agreement::{Access, Agreement, Opinion, Permit, Question, Reasoner, Surplus};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// 2026-06: between the times that agreements of the seeds begin and end at.
const NOW: Duration = Duration::from_secs(1_780_000_000);

/// Says yes to everything: what follows is the area logic's.
#[derive(Debug)]
struct Yes(Permit);

impl Reasoner for Yes {
    fn opinion(&self, _: &Question<'_>) -> Opinion {
        Opinion::Permit(self.0.clone())
    }
}

/// Reads a text and plans what may move.
///
/// # Errors
/// What is wrong with it.
pub fn read(text: &str) -> Result<(), ConfigError> {
    let refused = |problems| ConfigError::new("agreement.toml", text, problems);
    let file: raw::File = parse(text, "docs/control.md").map_err(refused)?;
    let mut check = Check { file: &file, now: UNIX_EPOCH + NOW, problems: Vec::new() };
    let checked = check.check();
    assert_eq!(checked.is_some(), check.problems.is_empty(), "either facts or what is wrong with them");
    let Some(Checked { facts, clauses, .. }) = checked else { return Err(refused(check.problems)) };
    for (place, clause) in &clauses {
        assert!(file.agreement.len() > *place);
        let when = clause.when.as_deref().unwrap_or_default();
        if let Some((_, span)) = condition::refused(when) {
            assert!(when.get(span).is_some(), "a place in the condition");
        }
    }
    let obligations = clauses.first().map(|(_, clause)| clause.obligations).unwrap_or_default();
    let yes = Yes(Permit { by: Vec::new(), obligations, surplus: Surplus::Deny });
    let agreement = Agreement::new(facts, Arc::new(yes));
    for access in [Access::Read, Access::Write] {
        // Bounded: a text of nodes alone has their square.
        for plan in agreement.plans("research", access).take(64) {
            assert_ne!(plan.from, plan.to);
        }
    }
    Ok(())
}
