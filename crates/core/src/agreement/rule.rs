//! From a flow to a ruling.

use super::facts::{DataSet, Facts, Node, Steps};
use super::{Access, Clause, End, Surplus};
use crate::area::AttributeSet;
use crate::flow::Flow;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// Attributes that an agreement obliges the parties to apply to the data.
pub type Obligations = AttributeSet;

/// May this data move so?
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The node that asks for the data, or has it to give.
    pub client: &'a Node,
    /// The data.
    pub data: &'a DataSet,
    /// The node that has it, or is to have it.
    pub holder: &'a Node,
    /// What the data is wanted for.
    pub purpose: &'a str,
    /// What is done with it.
    pub access: Access,
}

/// What the parties say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opinion {
    /// They have agreed.
    Permit(Permit),
    /// They have not, and why, in words.
    Refuse(String),
}

/// An agreement that there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// The names of the agreements that allow it.
    pub by: Vec<Arc<str>>,
    /// What they oblige to.
    pub obligations: Obligations,
    /// Whether one of them allows a movement to a node that has less, and lacks nothing (Eq. 4).
    pub surplus: Surplus,
}

/// Who knows what the parties have agreed to.
pub trait Reasoner: fmt::Debug + Send + Sync {
    /// What they say to this. The same question has the same answer for as long as the reasoner is in use.
    fn opinion(&self, question: &Question<'_>) -> Opinion;
}

/// What a flow would move: data sets, for a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Movement {
    /// The place of the client's node in [`Facts::nodes`].
    pub client: usize,
    /// The places of the data sets in [`Facts::data`]; at least one.
    pub data: Vec<usize>,
}

/// What is decided about a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// It may go on, if all of this is applied to it.
    Allow(Arc<Bridging>),
    /// It may not, and why, in words.
    Deny(Arc<str>),
}

/// What is applied to a flow that is allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bridging {
    /// The names of the agreements that allow it.
    pub by: Vec<Arc<str>>,
    /// The attributes that the data does not have where it comes from and has to carry.
    pub attributes: AttributeSet,
    /// [`Surplus::Allow`] if the movement is allowed for this word of an agreement only.
    pub surplus: Surplus,
    /// The bridging functions that apply them, in the order in which a client's bytes pass them.
    pub functions: Vec<Arc<str>>,
    /// The functions of the proxy at the client's end, in the order in which a client's bytes pass them.
    pub client: Vec<Arc<str>>,
    /// The functions of the proxy at the end of the data, in the order in which a client's bytes pass them.
    pub server: Vec<Arc<str>>,
}

impl Bridging {
    /// The functions at one end of the path.
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
    /// The node that it comes to.
    pub to: Arc<str>,
    /// Whether there is a channel (Eq. 4): the data may move as it is, but for what an agreement obliges to.
    pub channel: bool,
    /// What is missing where there is none (Eq. 5), and what the agreements oblige to.
    pub missing: Vec<Arc<str>>,
    /// What the node that the data leaves has and the other lacks: empty exactly if there is a channel.
    pub surplus: Vec<Arc<str>>,
    /// Whether the area logic rules the movement out, whatever else is said against it: no function can apply what is
    /// missing, or there is a surplus that nothing can be done about and that no agreement allows.
    pub unfeasible: bool,
    /// What comes of it.
    pub ruling: Ruling,
}

/// Facts, and who knows what the parties agreed to about them. An immutable snapshot.
#[derive(Clone, Debug)]
pub struct Agreement {
    facts: Facts,
    reasoner: Arc<dyn Reasoner>,
}

impl Agreement {
    /// An agreement about these facts.
    pub fn new(facts: Facts, reasoner: Arc<dyn Reasoner>) -> Self {
        Self { facts, reasoner }
    }

    /// What it is about.
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// What a flow would move.
    ///
    /// # Errors
    /// In words: the client is no node, or there is no data where it goes.
    pub fn movement(&self, flow: &Flow) -> Result<Movement, String> {
        let client = self.facts.node_at(flow.client.ip());
        let client = client.ok_or_else(|| {
            format!("the client {} is no node of the agreement", flow.client.ip().to_canonical())
        })?;
        let data = self.facts.data_at(&flow.orig_dst);
        if data.is_empty() {
            return Err(format!("the agreement knows no data at {}", flow.orig_dst));
        }
        Ok(Movement { client, data })
    }

    /// Decides about a movement. Every data set of it has to be agreed on, and gets all that any of them needs.
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
        self.bridge(missing).map_or_else(
            |why| Ruling::Deny(why.into()),
            |bridging| {
                let by = by.into_iter().collect();
                Ruling::Allow(Arc::new(Bridging { by, surplus, ..bridging }))
            },
        )
    }

    /// Decides about a flow of a rule that asks this.
    pub fn ask(&self, flow: &Flow, clause: &Clause) -> Ruling {
        match self.movement(flow) {
            Ok(movement) => self.rule(&movement, &clause.purpose, clause.access),
            Err(why) => Ruling::Deny(why.into()),
        }
    }

    /// What there is between every node and all data that other nodes have, in the order of their declaration.
    pub fn plans(&self, purpose: &str, access: Access) -> impl Iterator<Item = Plan> {
        let pairs = self.facts.nodes().iter().enumerate().flat_map(|(client, _)| {
            let elsewhere = self.facts.data().iter().enumerate().filter(move |(_, data)| data.node != client);
            elsewhere.map(move |(data, _)| (client, data))
        });
        pairs.filter_map(move |(client, data)| self.plan(client, data, purpose, access))
    }

    /// What there is between a node and data; places in [`Facts::nodes`] and [`Facts::data`].
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

    /// Says that Eq. 4 rules a movement out, and what allows it.
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

    /// The functions at both ends that apply exactly these attributes. Each bridging function encloses those before it:
    /// what comes last at the client's end comes first at the other.
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

/// The node that the data leaves, and the one that it comes to.
const fn ends<'a>(question: &Question<'a>) -> (&'a Node, &'a Node) {
    match question.access {
        Access::Read => (question.holder, question.client),
        Access::Write => (question.client, question.holder),
    }
}

/// Whether Eq. 4 does not hold, although nothing is missing by Eq. 5: the node that the data comes to has less.
fn has_surplus_only(question: &Question<'_>) -> bool {
    let (from, to) = ends(question);
    from.attributes != to.attributes && to.attributes.is_subset(&from.attributes)
}

/// Eq. 5 where there is no channel (Eq. 4), and whatever else the parties have obliged themselves to; none of what the
/// data has already.
fn missing_for(question: &Question<'_>, obligations: &Obligations) -> AttributeSet {
    let (from, to) = ends(question);
    let needed = if from.attributes.is_subset(&to.attributes) { AttributeSet::EMPTY } else { to.attributes };
    needed.union(obligations).minus(&from.attributes)
}
