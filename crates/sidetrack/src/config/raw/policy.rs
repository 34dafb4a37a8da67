//! `[policy]`, and `agreement` of rules, as they are written.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// The data-flow agreement that rules ask.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The file of the agreement (docs/control.md); it is read again when this file is, and `sidetrack policy apply` puts
    /// another in its place.
    #[schemars(required)]
    pub agreement: Option<At<String>>,
    /// "enforce" denies what the agreement does not allow; "audit" carries it as if the rule did not ask, and the record
    /// says that it would have been denied. Default "enforce".
    pub mode: Option<At<PolicyMode>>,
}

/// What becomes of flows that the agreement does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// They are denied.
    Enforce,
    /// They are carried; the record says that they would have been denied.
    Audit,
}

/// What a rule asks the agreement about its flows.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Clause {
    /// What the data is wanted for: one of the purposes of the agreement.
    #[schemars(required)]
    pub purpose: Option<At<String>>,
    /// Whether the client gets the data ("read") or gives it ("write"). Default "read".
    pub access: Option<At<Access>>,
    /// Which end of the path this node stands at, and so which functions of the agreement its flows pass: "client" or
    /// "server". Default "client".
    pub at: Option<At<End>>,
}

/// What is done with data.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// The client gets it.
    Read,
    /// The client gives it.
    Write,
}

/// An end of the path between a client and data.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// The client's network.
    Client,
    /// The network of the data.
    Server,
}
