//! `[policy]`, and `agreement` of rules, as they are written.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// The data-flow agreement that rules refer to.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The file of the agreement (docs/control.md). It is read again whenever the configuration is; `sidetrack
    /// policy apply` replaces it.
    #[schemars(required)]
    pub agreement: Option<At<String>>,
    /// "enforce" denies flows that the agreement does not allow. "audit" carries them as if the rule did not
    /// ask, and the record says that they would have been denied. Default "enforce".
    pub mode: Option<At<PolicyMode>>,
    /// The file that keeps each version of the agreement and each decision about it, with the caller and the
    /// time, chained by hashes (docs/control.md). It is only appended to. If it is broken, sidetrack does not
    /// start; if it cannot be written, an agreement is refused. Default: none is kept.
    pub history: Option<At<String>>,
}

/// What happens to flows that the agreement does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// They are denied.
    Enforce,
    /// They are carried, and the record says that they would have been denied.
    Audit,
}

/// The question that a rule asks the agreement about its flows.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Clause {
    /// The purpose of the data flow: one of the purposes in the agreement.
    #[schemars(required)]
    pub purpose: Option<At<String>>,
    /// Whether the client receives the data ("read") or sends it ("write"). Default "read".
    pub access: Option<At<Access>>,
    /// The end of the path at which this node is: "client" or "server". It decides which functions of the
    /// agreement the flows pass through. Default "client".
    pub at: Option<At<End>>,
}

/// The direction of the data.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// The client receives it.
    Read,
    /// The client sends it.
    Write,
}

/// An end of the path between a client and data.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// The network of the client.
    Client,
    /// The network of the data.
    Server,
}
