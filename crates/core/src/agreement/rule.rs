//! Decides about flows by an agreement.

use super::facts::{DataSet, Facts, Node, Steps};
use super::{Access, Clause, End, Surplus};
use crate::area::AttributeSet;
use crate::flow::Flow;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// Attributes that an agreement requires to be applied to the data.
pub type Obligations = AttributeSet;

/// A question to a reasoner: may this data move in this way?
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The node that requests the data, or sends it.
    pub client: &'a Node,
    /// The data.
    pub data: &'a DataSet,
    /// The node that has the data, or will have it.
    pub holder: &'a Node,
    /// The purpose of the data.
    pub purpose: &'a str,
    /// The kind of access.
    pub access: Access,
}

/// The answer of a reasoner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opinion {
    /// The parties have agreed.
    Permit(Permit),
    /// The parties have not agreed, with the reason in words.
    Refuse(String),
}

/// The agreement of the parties.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// The names of the agreements that allow it.
    pub by: Vec<Arc<str>>,
    /// The attributes that must be applied.
    pub obligations: Obligations,
    /// Whether one of the agreements allows a movement to a node with fewer attributes, from which nothing is missing
    /// (Eq. 4).
    pub surplus: Surplus,
}

/// Knows what the parties have agreed to.
pub trait Reasoner: fmt::Debug + Send + Sync {
    /// Returns the answer to a question. Equal questions get equal answers for as long as the reasoner is in use.
    fn opinion(&self, question: &Question<'_>) -> Opinion;
}

/// The data that a flow would move, and the client's node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Movement {
    /// The index of the client's node in [`Facts::nodes`].
    pub client: usize,
    /// The indexes of the data sets in [`Facts::data`], at least one.
    pub data: Vec<usize>,
}

/// The decision about a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// The flow is allowed if all of this is applied to it.
    Allow(Arc<Bridging>),
    /// The flow is denied, with the reason in words.
    Deny(Arc<str>),
}

/// What must be applied to an allowed flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bridging {
    /// The names of the agreements that allow it.
    pub by: Vec<Arc<str>>,
    /// The attributes that the data lacks at its source and must have.
    pub attributes: AttributeSet,
    /// [`Surplus::Allow`] if the movement is allowed only because an agreement allows the surplus.
    pub surplus: Surplus,
    /// The bridging functions that apply the attributes, in the order in which the client's bytes pass them.
    pub functions: Vec<Arc<str>>,
    /// The functions of the proxy at the client's end, in the order in which the client's bytes pass them.
    pub client: Vec<Arc<str>>,
    /// The functions of the proxy at the end of the data, in the order in which the client's bytes pass them.
    pub server: Vec<Arc<str>>,
}

impl Bridging {
    /// Returns the functions at one end of the path.
    pub fn at(&self, end: End) -> &[Arc<str>] {
        match end {
            End::Client => &self.client,
            End::Server => &self.server,
        }
    }
}

/// A pair of nodes and data that may move between them, with all that is known about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The node whose program opens the connection.
    pub client: Arc<str>,
    /// The data.
    pub data: Arc<str>,
    /// The node that the data leaves.
    pub from: Arc<str>,
    /// The node that the data goes to.
    pub to: Arc<str>,
    /// Whether there is a channel (Eq. 4): the data may move unchanged, apart from what an agreement requires.
    pub channel: bool,
    /// The missing attributes if there is no channel (Eq. 5), and those that the agreements require.
    pub missing: Vec<Arc<str>>,
    /// The attributes that the source node has and the destination lacks. Empty if and only if there is a channel.
    pub surplus: Vec<Arc<str>>,
    /// Whether the area logic alone forbids the movement. Either no function can apply the missing attributes, or
    /// there is a surplus that no agreement allows.
    pub unfeasible: bool,
    /// The decision.
    pub ruling: Ruling,
}

/// Facts, and a reasoner that knows what the parties agreed about them. An immutable snapshot.
#[derive(Clone, Debug)]
pub struct Agreement {
    facts: Facts,
    reasoner: Arc<dyn Reasoner>,
}

impl Agreement {
    /// Makes an agreement about these facts.
    pub fn new(facts: Facts, reasoner: Arc<dyn Reasoner>) -> Self {
        Self { facts, reasoner }
    }

    /// Returns the nodes, data sets and functions that it is about.
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the data that a flow would move.
    ///
    /// # Errors
    /// Fails with a reason in words: the client is not a node, or there is no data at the destination.
    pub fn movement(&self, flow: &Flow) -> Result<Movement, String> {
        let client = self.facts.node_at(flow.client.ip());
        let client = client.ok_or_else(|| {
            format!("the client {} is not a node of the agreement", flow.client.ip().to_canonical())
        })?;
        let data = self.facts.data_at(&flow.orig_dst);
        if data.is_empty() {
            return Err(format!("the agreement knows no data at {}", flow.orig_dst));
        }
        Ok(Movement { client, data })
    }

    /// Decides about a movement. All its data sets must be agreed on, and all get the attributes that any of them
    /// needs.
    pub fn rule(&self, movement: &Movement, purpose: &str, access: Access) -> Ruling {
        let (mut by, mut missing) = (BTreeSet::new(), AttributeSet::EMPTY);
        let mut surplus = Surplus::Deny;
        for data in &movement.data {
            let Some(question) = self.question(movement.client, *data, purpose, access) else {
                return Ruling::Deny("the agreement does not know what would move".into());
            };
            match self.reasoner.opinion(&question) {
                Opinion::Permit(permit) => {
                    if has_surplus_only(&question) {
                        if permit.surplus == Surplus::Deny {
                            return Ruling::Deny(self.surplus_denied(&question).into());
                        }
                        surplus = Surplus::Allow;
                    }
                    missing = missing.union(&missing_for(&question, &permit.obligations));
                    by.extend(permit.by);
                }
                Opinion::Refuse(why) => return Ruling::Deny(why.into()),
            }
        }
        // All data sets are allowed: one chain must apply everything that they lack together.
        self.bridge(missing).map_or_else(
            |why| Ruling::Deny(why.into()),
            |bridging| {
                let by = by.into_iter().collect();
                Ruling::Allow(Arc::new(Bridging { by, surplus, ..bridging }))
            },
        )
    }

    /// Decides about a flow of a rule with this clause.
    pub fn ask(&self, flow: &Flow, clause: &Clause) -> Ruling {
        match self.movement(flow) {
            Ok(movement) => self.rule(&movement, &clause.purpose, clause.access),
            Err(why) => Ruling::Deny(why.into()),
        }
    }

    /// Returns the plans for every node and all data of other nodes, in the order of their declaration.
    pub fn plans(&self, purpose: &str, access: Access) -> impl Iterator<Item = Plan> {
        let pairs = self.facts.nodes().iter().enumerate().flat_map(|(client, _)| {
            let elsewhere = self.facts.data().iter().enumerate().filter(move |(_, data)| data.node != client);
            elsewhere.map(move |(data, _)| (client, data))
        });
        pairs.filter_map(move |(client, data)| self.plan(client, data, purpose, access))
    }

    /// Returns the plan for a node and data, given as indexes in [`Facts::nodes`] and [`Facts::data`].
    pub fn plan(&self, client: usize, data: usize, purpose: &str, access: Access) -> Option<Plan> {
        let question = self.question(client, data, purpose, access)?;
        let (from, to) = ends(&question);
        let permit = match self.reasoner.opinion(&question) {
            Opinion::Permit(permit) => permit,
            Opinion::Refuse(_) => Permit::default(),
        };
        let missing = missing_for(&question, &permit.obligations);
        let catalogue = self.facts.catalogue();
        let is_refused = has_surplus_only(&question) && permit.surplus == Surplus::Deny;
        let names = |set| catalogue.attribute_names(set).cloned().collect();
        Some(Plan {
            client: question.client.name.clone(),
            data: question.data.name.clone(),
            from: from.name.clone(),
            to: to.name.clone(),
            channel: from.attributes.is_subset(&to.attributes),
            missing: names(missing),
            surplus: names(from.attributes.minus(&to.attributes)),
            unfeasible: is_refused || !catalogue.is_bridgeable(missing),
            ruling: self.rule(&Movement { client, data: vec![data] }, purpose, access),
        })
    }

    fn question<'a>(
        &'a self,
        client: usize,
        data: usize,
        purpose: &'a str,
        access: Access,
    ) -> Option<Question<'a>> {
        let data = self.facts.data().get(data)?;
        let (client, holder) = (self.facts.nodes().get(client)?, self.facts.nodes().get(data.node)?);
        Some(Question { client, data, holder, purpose, access })
    }

    /// Returns the reason that Eq. 4 forbids a movement, and how to allow it.
    fn surplus_denied(&self, question: &Question<'_>) -> String {
        let (from, to) = ends(question);
        let surplus = self.facts.catalogue().attribute_names(from.attributes.minus(&to.attributes));
        let surplus: Vec<_> = surplus.map(|name| format!("'{name}'")).collect();
        format!(
            "unfeasible: '{}' lacks {}, which '{}' has (Eq. 4), and no function can help; `surplus = \"allow\"` in an \
             agreement allows it",
            to.name,
            surplus.join(", "),
            from.name
        )
    }

    /// Returns the functions at both ends that apply exactly these attributes. Each bridging function encloses those
    /// before it, so the last one at the client's end is the first one at the other end.
    fn bridge(&self, missing: AttributeSet) -> Result<Bridging, String> {
        let catalogue = self.facts.catalogue();
        let bridge = catalogue.bridge(missing).map_err(|offending| {
            let names: Vec<_> =
                catalogue.attribute_names(offending).map(|name| format!("'{name}'")).collect();
            format!("unfeasible: no bridging function can apply {}", names.join(", "))
        })?;
        let functions: Vec<_> = catalogue.chain(bridge.functions).cloned().collect();
        let steps = || functions.iter().filter_map(|name| self.facts.steps(name));
        Ok(Bridging {
            by: Vec::new(),
            attributes: missing,
            surplus: Surplus::Deny,
            client: steps().flat_map(|Steps { client, .. }| client).cloned().collect(),
            server: steps().rev().flat_map(|Steps { server, .. }| server).cloned().collect(),
            functions,
        })
    }
}

/// Returns the source node and the destination node of the data.
const fn ends<'a>(question: &Question<'a>) -> (&'a Node, &'a Node) {
    match question.access {
        Access::Read => (question.holder, question.client),
        Access::Write => (question.client, question.holder),
    }
}

/// Whether Eq. 4 does not hold, although nothing is missing by Eq. 5: the destination node has fewer attributes.
fn has_surplus_only(question: &Question<'_>) -> bool {
    let (from, to) = ends(question);
    from.attributes != to.attributes && to.attributes.is_subset(&from.attributes)
}

/// Returns the missing attributes: those of Eq. 5 if there is no channel (Eq. 4), and those that the parties require.
/// Leaves out the attributes that the data already has.
fn missing_for(question: &Question<'_>, obligations: &Obligations) -> AttributeSet {
    let (from, to) = ends(question);
    let needed = if from.attributes.is_subset(&to.attributes) { AttributeSet::EMPTY } else { to.attributes };
    needed.union(obligations).minus(&from.attributes)
}
