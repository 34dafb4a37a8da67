//! The agreement that an orchestrator plans by.

use crate::agreement::Book;
use crate::control::api::{Agreed, Application, Consent, Wanted};
use crate::control::facts;
use anyhow::Context;
use sidetrack_core::agreement::{Plan, Ruling};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

/// See the module.
#[derive(Debug)]
pub(super) struct Master {
    /// The file as it was read.
    text: String,
    book: Book,
    facts: String,
}

impl Master {
    /// Reads the file, with consent as it was changed since. `known` is what was read before: a text that was found to be right
    /// is not looked at once more.
    pub fn read(
        path: &Path,
        consent: &BTreeMap<String, Consent>,
        known: Option<&Self>,
    ) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (name, now) = (path.display().to_string(), SystemTime::now());
        let read = |text: &str| {
            Book::read(&name, text, now).map_err(|error| anyhow::anyhow!("{}", error.render(false)))
        };
        if known.is_none_or(|known| known.text != text) {
            // As it is written first: its mistakes have places there.
            read(&text)?;
        }
        let document = facts::with_consent(&text, consent)?;
        let book = read(&toml::to_string(&document)?)?;
        let facts = toml::to_string(&facts::without_agreements(document))?;
        Ok(Self { text, book, facts })
    }

    /// Whether the file or the time has changed what holds.
    pub fn is_outdated(&self, path: &Path, now: SystemTime) -> bool {
        self.book.next_change().is_some_and(|turn| turn <= now)
            || std::fs::read_to_string(path).is_ok_and(|text| text != self.text)
    }

    /// The facts without what was agreed, for domains.
    pub fn facts(&self) -> &str {
        &self.facts
    }

    /// Whose data it is.
    pub fn owner(&self, data: &str) -> Option<String> {
        let facts = self.book.agreement().facts();
        let found = facts.data().iter().find(|one| *one.name == *data)?;
        facts.nodes().get(found.node).map(|node| node.party.to_string())
    }

    /// The parties of the client and of the data.
    pub fn parties(&self, wanted: &Wanted) -> Option<(String, String)> {
        let nodes = self.book.agreement().facts().nodes();
        let client = nodes.iter().find(|node| *node.name == *wanted.client)?;
        Some((client.party.to_string(), self.owner(&wanted.data)?))
    }

    /// The names of the client's node and of that of the data.
    pub fn nodes(&self, wanted: &Wanted) -> Option<(String, String)> {
        let facts = self.book.agreement().facts();
        let data = facts.data().iter().find(|one| *one.name == *wanted.data)?;
        Some((wanted.client.clone(), facts.nodes().get(data.node)?.name.to_string()))
    }

    /// Whether a party is at one of its ends.
    pub fn touches(&self, wanted: &Wanted, party: &str) -> bool {
        self.parties(wanted).is_some_and(|(client, data)| client == party || data == party)
    }

    /// What may move.
    ///
    /// # Errors
    /// It may not, and why.
    pub fn agreed(&self, application: &Application, wanted: &Wanted) -> Result<Agreed, String> {
        let purpose = &application.purpose;
        if !self.book.purposes().iter().any(|one| **one == **purpose) {
            return Err(unknown("purpose", purpose, self.book.purposes().iter().map(|one| &**one)));
        }
        let agreement = self.book.agreement();
        let client = agreement.facts().nodes().iter().position(|node| *node.name == *wanted.client);
        let nodes = agreement.facts().nodes().iter().map(|node| &*node.name);
        let client = client.ok_or_else(|| unknown("node", &wanted.client, nodes))?;
        let data = agreement.facts().data().iter().position(|data| *data.name == *wanted.data);
        let sets = agreement.facts().data().iter().map(|data| &*data.name);
        let data = data.ok_or_else(|| unknown("data set", &wanted.data, sets))?;
        let plan =
            agreement.plan(client, data, purpose, application.access).ok_or("there is nothing to plan")?;
        let Plan { missing, ruling, .. } = plan;
        let texts = |names: &[std::sync::Arc<str>]| names.iter().map(ToString::to_string).collect();
        match ruling {
            Ruling::Deny(why) => Err(why.to_string()),
            Ruling::Allow(bridging) => Ok(Agreed {
                wanted: wanted.clone(),
                by: texts(&bridging.by),
                requires: texts(&missing),
                surplus: bridging.surplus,
                functions_client: texts(&bridging.client),
                functions_server: texts(&bridging.server),
            }),
        }
    }

    /// What may still move of what an application asked for.
    pub fn allowed(&self, application: &Application) -> Vec<Agreed> {
        application.flows.iter().filter_map(|wanted| self.agreed(application, wanted).ok()).collect()
    }
}

/// Says that the agreement has no `what` of this name, and which it has.
fn unknown<'k>(what: &str, name: &str, known: impl Iterator<Item = &'k str>) -> String {
    let known: Vec<_> = known.collect();
    let there = match known.is_empty() {
        true => format!("it declares no {what}"),
        false => format!("it has: {}", known.join(", ")),
    };
    format!("there is no {what} '{name}' in the agreement; {there}")
}
