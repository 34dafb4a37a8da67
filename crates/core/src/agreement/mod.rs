//! Data-flow agreements (EPI framework, Sec. II-A.2): which party may move which data where, for what purpose, and
//! what must be applied to the data on the way.
//!
//! - [`Facts`] are the subject of an agreement: nodes of parties with their attributes, and data sets on nodes. They
//!   also say which functions at either end of the path form a bridging function of the [area logic](crate::area).
//! - A [`Reasoner`] decides whether the parties have agreed to a movement, and what they must apply to it.
//!   Implementations are outside of this crate, for example a policy engine, or the verdict of a foreign service.
//! - [`Agreement`] combines both. It derives from a flow the movements that it may carry. It derives from these a
//!   [`Ruling`] with its reason, and the [`Bridging`] that is needed.
//!
//! Everything unknown is denied: a client that is not a node, a destination without a data set, an obligation that no
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

/// What a flow does with data.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// The data moves from the node that has it to the client.
    #[default]
    Read,
    /// The data moves from the client to the node that will have it.
    Write,
}

impl Access {
    /// Both, in the order of the documents.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// Returns the word of agreements and configuration.
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

/// What an agreement says about a surplus: attributes of the source node that the destination node lacks. Eq. 4
/// forbids such a movement, and no function can help if nothing is missing by Eq. 5.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Surplus {
    /// The movement is denied.
    #[default]
    Deny,
    /// The movement is allowed.
    Allow,
}

impl Surplus {
    /// Returns the word of agreements.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::Allow => "allow",
        }
    }
}

/// The question that a rule asks the agreement about its flows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Clause {
    /// The purpose of the data.
    pub purpose: Arc<str>,
    /// The kind of access.
    pub access: Access,
    /// The end of the path at which this node's functions are.
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
