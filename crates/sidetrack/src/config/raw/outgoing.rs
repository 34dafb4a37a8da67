//! `[outgoing]`, as it is written.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Paths that services ask for one by one (docs/outgoing.md), in the shape of Brane's proxy.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Outgoing {
    /// Where services ask for them: "host:port". Whoever reaches it may have paths; rules decide about their flows.
    #[schemars(required)]
    pub listen: Option<At<String>>,
    /// The IP address on which each path has a port. Default: that of `listen`.
    pub address: Option<At<String>>,
    /// These ports, "first-last". Default "4200-4299".
    pub ports: Option<At<String>>,
    /// The folder that has a folder for each location, with `ca.pem` (whom TLS towards it believes) and `client-id.pem` (our
    /// certificate and key). Default: paths with TLS are refused.
    pub certificates: Option<At<String>>,
    /// When no port is left, a path that had no flow for so long makes room. Milliseconds. Default 3600000.
    pub free_after_ms: Option<At<u64>>,
}
