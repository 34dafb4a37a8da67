//! The agreement that an orchestrator plans by.

use crate::api::{Agreed, Application, Consent, Wanted};
use crate::facts;
use anyhow::Context;
use sidetrack_common::agreement::Book;
use sidetrack_core::agreement::{Plan, Ruling};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

/// The agreement: its text, its parsed form, and its facts for domains.
#[derive(Debug)]
pub(super) struct Master {
    /// The text of the file.
    text: String,
    book: Book,
    facts: String,
}

impl Master {
    /// Reads the file and applies the later changes of consent. `known` is the agreement that was read before: a
    /// text that was found to be right is not checked again.
    pub(super) fn read(
        path: &Path,
        consent: &BTreeMap<String, Consent>,
        known: Option<&Self>,
    ) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (name, now) = (path.display().to_string(), SystemTime::now());
        let read = |text: &str| {
            crate::agreement::read(&name, text, now)
                .map_err(|error| anyhow::anyhow!("{}", error.render(false)))
        };
        if known.is_none_or(|known| known.text != text) {
            // Check the unchanged text first: places in error messages refer to it.
            read(&text)?;
        }
        let document = facts::with_consent(&text, consent)?;
        let book = read(&toml::to_string(&document)?)?;
        let facts = toml::to_string(&facts::without_agreements(document))?;
        Ok(Self { text, book, facts })
    }

    /// Whether the agreement in force has changed, because of its file or because of the date.
    /// A file that cannot be read counts as changed: reading it again gives the error.
    pub(super) fn is_outdated(&self, path: &Path, now: SystemTime) -> bool {
        self.book.next_change().is_some_and(|turn| turn <= now)
            || std::fs::read_to_string(path).map_or(true, |text| text != self.text)
    }

    /// Its facts without its agreements, for domains.
    pub(super) fn facts(&self) -> &str {
        &self.facts
    }

    /// Returns the party that owns a data set.
    pub(super) fn owner(&self, data: &str) -> Option<String> {
        let facts = self.book.agreement().facts();
        let found = facts.data().iter().find(|one| *one.name == *data)?;
        facts.nodes().get(found.node).map(|node| node.party.to_string())
    }

    /// Returns the parties of the client and of the data.
    pub(super) fn parties(&self, wanted: &Wanted) -> Option<(String, String)> {
        let nodes = self.book.agreement().facts().nodes();
        let client = nodes.iter().find(|node| *node.name == *wanted.client)?;
        Some((client.party.to_string(), self.owner(&wanted.data)?))
    }

    /// Returns the node of the client and the node of the data, by name.
    pub(super) fn nodes(&self, wanted: &Wanted) -> Option<(String, String)> {
        let facts = self.book.agreement().facts();
        let data = facts.data().iter().find(|one| *one.name == *wanted.data)?;
        Some((wanted.client.clone(), facts.nodes().get(data.node)?.name.to_string()))
    }

    /// Whether the client or the data belongs to this party.
    pub(super) fn touches(&self, wanted: &Wanted, party: &str) -> bool {
        self.parties(wanted).is_some_and(|(client, data)| client == party || data == party)
    }

    /// Returns the allowed movement, with the functions it passes through.
    ///
    /// # Errors
    /// Fails if the movement is not allowed; the text says why.
    pub(super) fn agreed(&self, application: &Application, wanted: &Wanted) -> Result<Agreed, String> {
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

    /// Returns those movements of an application that are still allowed.
    pub(super) fn allowed(&self, application: &Application) -> Vec<Agreed> {
        application.flows.iter().filter_map(|wanted| self.agreed(application, wanted).ok()).collect()
    }
}

/// Says that the agreement has no `what` of this name, and lists those it has.
fn unknown<'k>(what: &str, name: &str, known: impl Iterator<Item = &'k str>) -> String {
    let known: Vec<_> = known.collect();
    let there = match known.is_empty() {
        true => format!("it declares no {what}"),
        false => format!("it has: {}", known.join(", ")),
    };
    format!("there is no {what} '{name}' in the agreement; {there}")
}
