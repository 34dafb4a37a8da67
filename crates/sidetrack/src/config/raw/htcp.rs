//! `htcp` of a cache: caches of other vendors as siblings.

use super::super::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// HTCP (RFC 2756). Caches of other vendors, such as Squid, are asked for `http://` resources before the server,
/// and may ask this cache.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Htcp {
    /// The UDP address on which questions arrive and from which they are sent, such as "0.0.0.0:4827".
    #[schemars(required)]
    pub address: Option<At<String>>,
    /// Networks that may ask, besides the siblings. Default: none.
    pub from: Option<List<String>>,
    /// Caches that are asked for responses not stored here, at most 16. Default: none.
    pub siblings: Option<List<HtcpSibling>>,
}

/// A cache that is asked over HTCP.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HtcpSibling {
    /// Its HTTP address, such as "squid.example:3128".
    #[schemars(required)]
    pub http: Option<At<String>>,
    /// Its HTCP address, such as "squid.example:4827".
    #[schemars(required)]
    pub htcp: Option<At<String>>,
}
