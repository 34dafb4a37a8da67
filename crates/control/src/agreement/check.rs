//! From the raw file to facts and clauses: checks that all names are known and all constraints can be met.

use super::clause::{Clause, Effect, Labels};
use super::raw::{self, Consent};
use sidetrack_common::file::{At, List, Problem, nearest};
use sidetrack_core::agreement::{DataSet, Facts, FactsError, FactsParts, Node, Steps};
use sidetrack_core::area::{AttributeSet, BridgingFunction, Catalogue, CatalogueError, Position};
use sidetrack_core::net::{IpNet, IpSet, PortSet};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

/// Longest name, bytes.
const NAME_MAX: usize = 64;

/// A checked file. Only its conditions in Cedar are not checked yet.
pub(super) struct Checked {
    pub facts: Facts,
    pub labels: Labels,
    /// The agreements in force at the time of the check, each with its index in the file's list.
    pub clauses: Vec<(usize, Clause)>,
    pub purposes: Vec<Arc<str>>,
    /// When an agreement begins or ends next.
    pub next_change: Option<SystemTime>,
}

pub(super) struct Check<'f> {
    pub file: &'f raw::File,
    pub now: SystemTime,
    pub problems: Vec<Problem>,
}

impl Check<'_> {
    fn error(&mut self, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        self.problems.push(Problem::error(span, message, help));
    }

    /// Checks everything. Returns `None` if there is an error.
    pub(super) fn check(&mut self) -> Option<Checked> {
        match &self.file.version {
            Some(at) if **at == 1 => {}
            Some(at) => {
                self.error(at.span(), format!("version {} is not known", **at), "write `version = 1`")
            }
            None => {
                self.error(0..0, "the version of the format is missing", "write `version = 1` at the top")
            }
        }
        self.names();
        let purposes: Vec<Arc<str>> = items(&self.file.purposes).map(|at| at.as_str().into()).collect();
        let catalogue = self.catalogue()?;
        let nodes = self.nodes(&catalogue);
        let data = self.data();
        let steps =
            self.file.function.iter().map(|(name, function)| (name.as_str().into(), steps(name, function)));
        let parts = FactsParts { steps: steps.collect(), nodes, data, catalogue };
        let clauses = self.clauses(&parts.catalogue);
        let (clauses, next_change) = self.in_force(clauses);
        let facts = match Facts::new(parts) {
            Ok(facts) => facts,
            Err(error) => {
                let second = match &error {
                    FactsError::SameAddress { second, .. } => self.file.node.get(&**second),
                    FactsError::NoNode(_) => None,
                };
                let span = second.and_then(|node| node.address.as_ref()).map_or(0..0, List::span);
                self.error(span, error.to_string(), "correct `address` of one of them");
                return None;
            }
        };
        let labels = self.labels();
        self.problems.is_empty().then_some(Checked { facts, labels, clauses, purposes, next_change })
    }

    /// Checks all names: they appear in records and in policies.
    fn names(&mut self) {
        let file = self.file;
        let tables = file.party.iter().map(|(name, at)| (name, at.span()));
        let tables = tables.chain(file.node.iter().map(|(name, at)| (name, at.span())));
        let tables = tables.chain(file.data.iter().map(|(name, at)| (name, at.span())));
        let tables = tables.chain(file.function.iter().map(|(name, at)| (name, at.span())));
        let mut named: Vec<(&str, Range<usize>)> = tables.map(|(name, span)| (name.as_str(), span)).collect();
        let given = file.agreement.iter().filter_map(|one| one.name.as_ref());
        let given = given.chain(items(&file.attributes)).chain(items(&file.purposes));
        named.extend(given.map(|at| (at.as_str(), at.span())));
        for (name, span) in named {
            let fits = |c: char| c.is_alphanumeric() || "-_.:/".contains(c);
            let is_dots = matches!(name, "." | "..");
            if name.is_empty() || is_dots || name.len() > NAME_MAX || !name.chars().all(fits) {
                self.error(
                    span,
                    format!("'{name}' is not a valid name"),
                    "a name has 1 to 64 letters, digits and - _ . : / and is not . or ..",
                );
            }
        }
        let mut seen: BTreeMap<&str, Range<usize>> = BTreeMap::new();
        for at in file.agreement.iter().filter_map(|one| one.name.as_ref()) {
            if let Some(first) = seen.insert(at.as_str(), at.span()) {
                let message = format!("there are two agreements named '{}'", at.as_str());
                let problem = Problem::error(at.span(), message, "give each a name of its own");
                self.problems.push(problem.and(first, "the first"));
            }
        }
    }

    fn catalogue(&mut self) -> Option<Catalogue> {
        let attributes: Vec<Arc<str>> = items(&self.file.attributes).map(|at| at.as_str().into()).collect();
        for function in self.file.function.values() {
            self.known(&function.applies, "attribute", attributes.iter().map(|name| &**name));
            for order in [&function.before, &function.after] {
                self.known(order, "function", self.file.function.keys().map(String::as_str));
            }
        }
        let functions = self.file.function.iter().map(|(name, function)| bridging(name, function)).collect();
        let error = match Catalogue::new(attributes, functions) {
            Ok(catalogue) => return Some(catalogue),
            Err(error) => error,
        };
        // Unknown names were reported above with their places.
        let said =
            matches!(error, CatalogueError::UnknownAttribute { .. } | CatalogueError::UnknownFunction { .. });
        if !said || self.problems.is_empty() {
            let span = self.place_of(&error);
            self.error(span, error.to_string(), "see `attributes` and [function.NAME] in docs/control.md");
        }
        None
    }

    /// Returns the place of an error of the catalogue.
    fn place_of(&self, error: &CatalogueError) -> Range<usize> {
        let function = |name: &str| self.file.function.get(name).map(At::span);
        let attributes = || self.file.attributes.as_ref().map(List::span);
        let span = match error {
            CatalogueError::AppliesNothing { function: name } => function(name),
            CatalogueError::Cycle { cycle } => cycle.first().and_then(|name| {
                let function = self.file.function.get(name)?;
                let order = function.before.as_ref().or(function.after.as_ref());
                order.map(List::span).or_else(|| Some(function.span()))
            }),
            CatalogueError::Twice { name, .. } => {
                let mut same = items(&self.file.attributes).filter(|at| at.as_str() == name);
                same.nth(1).map(At::span).or_else(attributes)
            }
            CatalogueError::TooMany { .. }
            | CatalogueError::UnknownAttribute { .. }
            | CatalogueError::UnknownFunction { .. } => attributes(),
        };
        span.unwrap_or(0..0)
    }

    /// Reports names in a list that are not known.
    fn known<'k>(
        &mut self,
        list: &Option<List<String>>,
        what: &str,
        known: impl Iterator<Item = &'k str> + Clone,
    ) {
        for at in items(list) {
            self.is_known(at, what, known.clone());
        }
    }

    fn is_known<'k>(&mut self, at: &At<String>, what: &str, known: impl Iterator<Item = &'k str> + Clone) {
        if known.clone().any(|one| one == at.as_str()) {
            return;
        }
        let all: Vec<_> = known.clone().collect();
        let help = match nearest(at.as_str(), known) {
            Some(near) => format!("did you mean \"{near}\"? There are: {}", all.join(", ")),
            None if all.is_empty() => format!("this file declares no {what}"),
            None => format!("there are: {}", all.join(", ")),
        };
        self.error(at.span(), format!("there is no {what} '{}'", at.as_str()), help);
    }

    fn nodes(&mut self, catalogue: &Catalogue) -> Vec<Node> {
        let file = self.file;
        let mut nodes = Vec::new();
        for (name, raw) in &file.node {
            let Some(party) = &raw.party else {
                self.error(
                    raw.span(),
                    format!("nothing says which party the node '{name}' belongs to"),
                    "write `party = \"…\"`",
                );
                continue;
            };
            self.is_known(party, "party", file.party.keys().map(String::as_str));
            self.known(&raw.attributes, "attribute", items(&file.attributes).map(|at| at.as_str()));
            let addresses = items(&raw.address).filter_map(|at| match at.parse::<IpNet>() {
                Ok(net) => Some(net),
                Err(error) => {
                    self.problems.push(Problem::error(at.span(), error.to_string(), "such as \"10.1.0.10\""));
                    None
                }
            });
            let addresses: IpSet = addresses.collect();
            if raw.address.as_ref().is_none_or(|list| list.items().is_empty()) {
                let help = "write `address = \"10.1.0.10\"`: flows are known by addresses";
                self.error(raw.span(), format!("the node '{name}' has no address"), help);
            }
            let attributes = set(catalogue, &raw.attributes);
            nodes.push(Node {
                name: name.as_str().into(),
                party: party.as_str().into(),
                addresses,
                attributes,
            });
        }
        nodes
    }

    fn data(&mut self) -> Vec<DataSet> {
        let file = self.file;
        let mut sets = Vec::new();
        for (name, raw) in &file.data {
            let node = raw.node.as_ref();
            if let Some(at) = node {
                self.is_known(at, "node", file.node.keys().map(String::as_str));
            }
            let place = node.and_then(|at| file.node.keys().position(|known| known == at.as_str()));
            let lacks = [
                ("node = \"…\"", "which node has it", node.is_none()),
                ("port = 5432", "by which port it is served", raw.port.is_none()),
                (
                    "consent = \"given\"",
                    "whether those it is about have agreed (or \"withdrawn\", \"not-needed\")",
                    raw.consent.is_none(),
                ),
            ];
            for (key, what, _) in lacks.iter().filter(|(_, _, lacks)| *lacks) {
                self.error(raw.span(), format!("'{name}' does not say {what}"), format!("write `{key}`"));
            }
            let ports: PortSet = raw.port.iter().flat_map(List::items).map(|port| (**port, **port)).collect();
            let hosts = items(&raw.host).filter_map(|at| match at.parse() {
                Ok(pattern) => Some(pattern),
                Err(error) => {
                    let error: sidetrack_core::policy::HostPatternError = error;
                    self.problems.push(Problem::error(
                        at.span(),
                        error.to_string(),
                        "such as \"db.example\"",
                    ));
                    None
                }
            });
            let hosts = hosts.collect();
            if let Some(node) = place {
                sets.push(DataSet { name: name.as_str().into(), node, ports, hosts });
            }
        }
        sets
    }

    fn clauses(&mut self, catalogue: &Catalogue) -> Vec<(usize, Clause)> {
        let file = self.file;
        let mut clauses = Vec::new();
        for (place, raw) in file.agreement.iter().enumerate() {
            let Some(name) = &raw.name else {
                self.error(
                    raw.span(),
                    "this agreement lacks a name",
                    "write `name = \"…\"`: reasons speak of it",
                );
                continue;
            };
            self.known(&raw.parties, "party", file.party.keys().map(String::as_str));
            self.known(&raw.nodes, "node", file.node.keys().map(String::as_str));
            self.known(&raw.data, "data set", file.data.keys().map(String::as_str));
            self.known(&raw.purpose, "purpose", items(&file.purposes).map(|at| at.as_str()));
            self.known(&raw.requires, "attribute", items(&file.attributes).map(|at| at.as_str()));
            for list in [&raw.parties, &raw.nodes, &raw.data, &raw.purpose] {
                if let Some(empty) = list.as_ref().filter(|list| list.items().is_empty()) {
                    self.error(empty.span(), "this list is empty", "take the key out if anything goes");
                }
            }
            let effect = raw.effect.as_deref().copied().unwrap_or(Effect::Permit);
            if let Some(requires) = raw.requires.as_ref().filter(|_| effect == Effect::Forbid) {
                self.error(requires.span(), "what is forbidden obliges to nothing", "take `requires` out");
            }
            if let Some(surplus) = raw.surplus.as_ref().filter(|_| effect == Effect::Forbid) {
                self.error(surplus.span(), "what is forbidden allows nothing", "take `surplus` out");
            }
            let clause = Clause {
                name: name.as_str().into(),
                effect,
                parties: texts(&raw.parties),
                nodes: texts(&raw.nodes),
                data: texts(&raw.data),
                purposes: texts(&raw.purpose),
                access: raw.access.iter().flat_map(List::items).map(|access| access.as_str()).collect(),
                obligations: set(catalogue, &raw.requires),
                surplus: raw.surplus.as_deref().copied().unwrap_or_default(),
                when: raw.when.as_ref().map(|when| when.to_string()),
            };
            clauses.push((place, clause));
        }
        clauses
    }

    /// Returns the agreements that are valid now, and when that changes next.
    fn in_force(&mut self, clauses: Vec<(usize, Clause)>) -> (Vec<(usize, Clause)>, Option<SystemTime>) {
        let mut next: Option<SystemTime> = None;
        let mut holds = Vec::new();
        for (place, clause) in clauses {
            let raw = &self.file.agreement[place];
            let (from, until) = (raw.from.as_ref(), raw.until.as_ref());
            let (from, until) = (from.and_then(|at| self.time(at)), until.and_then(|at| self.time(at)));
            let turns = [from, until].into_iter().flatten().filter(|turn| *turn > self.now);
            next = turns.chain(next).min();
            if from.is_none_or(|from| from <= self.now) && until.is_none_or(|until| self.now < until) {
                holds.push((place, clause));
            }
        }
        (holds, next)
    }

    fn time(&mut self, at: &At<String>) -> Option<SystemTime> {
        let parsed = humantime::parse_rfc3339_weak(at.as_str());
        if parsed.is_err() {
            let help = "write \"2027-01-01T00:00:00Z\" (RFC 3339, UTC)";
            self.error(at.span(), format!("'{}' is not a time", at.as_str()), help);
        }
        parsed.ok()
    }

    fn labels(&self) -> Labels {
        let withdrawn = |data: &raw::Data| data.consent.as_deref() == Some(&Consent::Withdrawn);
        Labels {
            parties: self.file.party.iter().map(|(name, raw)| (name.clone(), texts(&raw.labels))).collect(),
            data: self.file.data.iter().map(|(name, raw)| (name.clone(), texts(&raw.labels))).collect(),
            withdrawn: self
                .file
                .data
                .iter()
                .filter(|(_, raw)| withdrawn(raw))
                .map(|(name, _)| name.clone())
                .collect(),
        }
    }
}

/// The items of an optional list.
fn items(list: &Option<List<String>>) -> impl Iterator<Item = &At<String>> + Clone {
    list.iter().flat_map(|list| list.items())
}

fn texts(list: &Option<List<String>>) -> Vec<String> {
    items(list).map(|at| at.to_string()).collect()
}

/// The set of attributes in a list. Unknown ones were reported before.
fn set(catalogue: &Catalogue, list: &Option<List<String>>) -> AttributeSet {
    items(list)
        .filter_map(|at| catalogue.set([at.as_str()]).ok())
        .fold(AttributeSet::EMPTY, |all, one| all.union(&one))
}

fn bridging(name: &str, raw: &raw::Function) -> BridgingFunction {
    BridgingFunction {
        name: name.into(),
        applies: texts(&raw.applies),
        cost: raw.cost.as_deref().copied().unwrap_or(1),
        position: match raw.position.as_deref() {
            None | Some(raw::Position::Anywhere) => Position::Anywhere,
            Some(raw::Position::First) => Position::First,
            Some(raw::Position::Last) => Position::Last,
        },
        before: texts(&raw.before),
        after: texts(&raw.after),
    }
}

/// The functions of proxies. Default: one with the same name at the client's end.
fn steps(name: &str, raw: &raw::Function) -> Steps {
    let names = |list: &Option<List<String>>| items(list).map(|at| at.as_str().into()).collect();
    match (&raw.client, &raw.server) {
        (None, None) => Steps { client: vec![name.into()], server: Vec::new() },
        (client, server) => Steps { client: names(client), server: names(server) },
    }
}
