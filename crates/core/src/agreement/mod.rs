//! Data-flow agreements (EPI framework, Sec. II-A.2): which party may move which data where, for what purpose, and what has to
//! be applied to the data on the way.
//!
//! - [`Facts`] are what an agreement is about: nodes of parties with their attributes, data sets on nodes, and how a
//!   bridging function of the [area logic](crate::area) is made of functions at either end of the path.
//! - A [`Reasoner`] says whether the parties have agreed to a movement, and what it obliges them to apply. It is not part of
//!   this crate: an engine for policies is one, the verdict of somebody else's is another.
//! - [`Agreement`] puts both together: from a flow to the movements it may carry, from those to a [`Ruling`] with its
//!   reason and the [`Bridging`] that it asks for.
//!
//! Whatever is not known is denied: a client that is no node, a destination without a data set, an obligation that no
//! function can apply.

mod facts;
mod rule;

pub use facts::{DataSet, Facts, FactsError, FactsParts, Node, Steps};
pub use rule::{
    Agreement, Bridging, Movement, Obligations, Opinion, Permit, Plan, Question, Reasoner, Ruling,
};

use crate::flow::Side;
use std::fmt;
use std::sync::Arc;

/// What is done with data.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// It moves from the node that has it to the client.
    #[default]
    Read,
    /// It moves from the client to the node that is to have it.
    Write,
}

impl Access {
    /// Both, in the order of documents.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// The word of agreements and configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What an agreement says about attributes of the node that data leaves, which the node that it comes to lacks: Eq. 4 rules
/// such a movement out, and no function can help where Eq. 5 finds nothing missing.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Surplus {
    /// The movement is denied.
    #[default]
    Deny,
    /// It is allowed all the same.
    Allow,
}

impl Surplus {
    /// The word of agreements.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::Allow => "allow",
        }
    }
}

/// What a rule asks the agreement about its flows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Clause {
    /// What the data is wanted for.
    pub purpose: Arc<str>,
    /// What is done with it.
    pub access: Access,
    /// Which end of the path this node's functions stand at.
    pub at: End,
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.access, self.purpose)
    }
}

/// An end of the path between a client and data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// The proxy in the client's network.
    #[default]
    Client,
    /// The proxy in the network of the data.
    Server,
}

impl From<End> for Side {
    fn from(end: End) -> Self {
        match end {
            End::Client => Self::Client,
            End::Server => Self::Server,
        }
    }
}
