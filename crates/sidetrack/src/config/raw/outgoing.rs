//! `[outgoing]`, as it is written.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Listening ports that services ask for, each for one destination (docs/outgoing.md). The interface is that of
/// Brane's proxy.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Outgoing {
    /// The address for requests, "host:port". Every program that reaches it may get ports; rules decide about
    /// their flows.
    #[schemars(required)]
    pub listen: Option<At<String>>,
    /// The IP address of the listening ports. Default: that of `listen`.
    pub address: Option<At<String>>,
    /// The ports to use, "first-last". Default "4200-4299".
    pub ports: Option<At<String>>,
    /// The folder with one folder per location. Each has `ca.pem` (the authorities to trust for TLS towards it)
    /// and `client-id.pem` (our certificate and key). Default: paths with TLS are rejected.
    pub certificates: Option<At<String>>,
    /// If no port is left, removes a path without flows for this time, milliseconds. Default 3600000.
    pub free_after_ms: Option<At<u64>>,
}
