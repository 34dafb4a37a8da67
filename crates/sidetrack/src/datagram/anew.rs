//! Rules that have changed: an association that they deny now ends. One that they would carry in another way goes on as it is.

use super::association::Associations;
use sidetrack_core::association::{Id, Input};
use sidetrack_core::flow::EndReason;
use sidetrack_core::policy::Action;
use std::sync::Arc;

impl Associations {
    /// Asks the rules again about all associations, if the configuration is another one than before. It is called before
    /// datagrams pass, so that none passes by a rule that is not in force any more.
    pub(super) fn follow_rules(&mut self) {
        let config = self.worker.config();
        if Arc::ptr_eq(&config, &self.config) {
            return;
        }
        self.config = config;
        let now = self.worker.clock.now();
        let ids: Vec<_> = self.slots.iter().flatten().map(|association| association.id).collect();
        for id in ids {
            let Some(why) = self.denied_now(id) else { continue };
            if let Some(association) = self.find_mut(id) {
                association.entry.note(format!("the configuration has changed: {why}"));
            }
            self.table.handle(now, Input::End(id, EndReason::PolicyDenied));
            self.finish();
        }
    }

    /// Returns why the rules deny an association. `None`: they do not.
    pub(super) fn denied_now(&self, id: Id) -> Option<Arc<str>> {
        let association = self.find(id)?;
        let (client, asked) = (association.client.to, association.asked);
        let mut flow = association.flow.clone();
        let verdict = self.ask_rules(&mut flow, client, asked)?;
        let is_denied = verdict.action == Action::Deny && !self.is_our_question(client, asked);
        is_denied.then_some(verdict.why)
    }
}
