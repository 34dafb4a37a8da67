//! `[dns]`, as it is written.

use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// The resolver of this node, for clients of this host and of others (docs/dns.md). Rules on names apply to what it
/// answers, and to flows of clients that use its answers.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dns {
    /// The addresses for queries, over UDP and TCP, such as "10.0.0.1:53". A reload does not change them.
    #[schemars(required)]
    pub address: Option<List<String>>,
    /// How queries are answered. "name": a name gets an address of 198.18.0.0/15, and flows to it have the name as their
    /// destination. "resolve": name servers are asked, and clients get their answers. Default "name".
    pub mode: Option<At<DnsMode>>,
    /// Networks or "@set"s whose clients may ask. Queries of others get no answer. Default: loopback, private and link-local
    /// networks.
    pub from: Option<List<String>>,
    /// The name servers that are asked, 1 to 8, such as "9.9.9.9" or "10.0.0.2:5353". Default: those of /etc/resolv.conf at the
    /// start, without our own addresses.
    pub servers: Option<List<String>>,
    /// Most queries over UDP of one client that are answered per second, 1 to 1000000; the addresses of one IPv6 /64 are one
    /// client. As many again are told to come over TCP; further ones get no answer. Default 500.
    pub max_queries_per_s: Option<At<u32>>,
}

/// How queries are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DnsMode {
    /// By addresses that represent names.
    #[default]
    Name,
    /// By what name servers say.
    Resolve,
}
