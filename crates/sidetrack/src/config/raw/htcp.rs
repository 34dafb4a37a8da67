//! `htcp` of a cache: caches of other makers as siblings.

use super::super::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// HTCP (RFC 2756): caches of other makers, Squid say, are asked for `http://` resources before the server is, and ask
/// here.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Htcp {
    /// Where questions come in by UDP, and go out from, as "0.0.0.0:4827".
    #[schemars(required)]
    pub address: Option<At<String>>,
    /// Networks that may ask, beside the siblings. Default: none.
    pub from: Option<List<String>>,
    /// Caches that are asked for what is not stored here; at most 16. Default: none.
    pub siblings: Option<List<HtcpSibling>>,
}

/// A cache that is asked by HTCP.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HtcpSibling {
    /// Where it serves HTTP, as "squid.example:3128".
    #[schemars(required)]
    pub http: Option<At<String>>,
    /// Where it answers HTCP, as "squid.example:4827".
    #[schemars(required)]
    pub htcp: Option<At<String>>,
}
