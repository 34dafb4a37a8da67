//! `[policy]`, and `agreement` of rules.

use super::super::{AgreementFile, At, PolicyMode, raw};
use super::Check;
use sidetrack_core::agreement::{Access, Clause, End};
use std::sync::Arc;

impl Check<'_> {
    /// Checks where the agreement is and how it is applied.
    pub(super) fn agreement_file(&mut self, raw: Option<&At<raw::Policy>>) -> Option<AgreementFile> {
        let raw = raw?;
        let Some(path) = &raw.agreement else {
            let help = "write `agreement = \"./agreement.toml\"`, the file of the agreement";
            self.error(raw.span(), "[policy] names no agreement", help);
            return None;
        };
        let mode = match raw.mode.as_deref() {
            None | Some(raw::PolicyMode::Enforce) => PolicyMode::Enforce,
            Some(raw::PolicyMode::Audit) => PolicyMode::Audit,
        };
        let path_of = |at: &At<String>| self.surroundings.resolve(at);
        let (agreement, history) = (path_of(path), raw.history.as_ref().map(path_of));
        if let Some(at) = raw.history.as_ref().filter(|_| history.as_ref() == Some(&agreement)) {
            let help = "give the history a file of its own: `history = \"./agreement.history\"`";
            self.error(at.span(), "this is the file of the agreement itself", help);
        }
        Some(AgreementFile { path: agreement, mode, history })
    }

    /// Returns the question that a rule asks the agreement.
    pub(super) fn clause(&mut self, rule: &raw::Rule) -> Option<Arc<Clause>> {
        let raw = rule.agreement.as_ref()?;
        if !self.has_agreement {
            let help = "add [policy] with `agreement = \"./agreement.toml\"`, or take it out";
            self.error(raw.span(), "this rule asks an agreement, and there is none", help);
        }
        let Some(purpose) = &raw.purpose else {
            let help = "write `agreement = { purpose = \"research\" }`, with a purpose of the agreement";
            self.error(raw.span(), "the rule does not say what for it asks", help);
            return None;
        };
        let access = match raw.access.as_deref() {
            None | Some(raw::Access::Read) => Access::Read,
            Some(raw::Access::Write) => Access::Write,
        };
        let at = match raw.at.as_deref() {
            None | Some(raw::End::Client) => End::Client,
            Some(raw::End::Server) => End::Server,
        };
        Some(Arc::new(Clause { purpose: self.name(purpose).into(), access, at }))
    }
}
