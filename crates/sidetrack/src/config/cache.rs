//! Settings of a cache of HTTP responses.

use sidetrack_core::flow::Destination;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::uri::KeyRules;
use sidetrack_core::net::IpSet;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Settings of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSettings {
    /// Most bytes in memory.
    pub memory_bytes: u64,
    /// Most bytes of one response's content. Larger responses are not stored.
    pub object_bytes: u64,
    /// Heuristic freshness, stale responses, targeted cache-control fields.
    pub rules: Rules,
    /// Parts of a URL that are left out of cache keys.
    pub keys: KeyRules,
    /// Other caches, asked before the server.
    pub siblings: Vec<Destination>,
    /// Where responses are stored on disk as well as in memory.
    pub disk: Option<DiskSettings>,
    /// Clients whose PURGE requests are accepted. Empty: none.
    pub purge_from: IpSet,
    /// HTCP settings, if it is on.
    pub htcp: Option<HtcpSettings>,
}

/// How a cache asks other caches over HTCP, and answers them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HtcpSettings {
    /// The UDP address on which it listens and from which it asks.
    pub address: SocketAddr,
    /// Clients that may ask, besides the siblings.
    pub from: IpSet,
    /// Caches that are asked before the server.
    pub siblings: Vec<HtcpSibling>,
}

/// A cache that is asked by HTCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HtcpSibling {
    /// Where it serves HTTP.
    pub http: Destination,
    /// Where it answers HTCP.
    pub htcp: Destination,
}

/// Settings of a cache's disk store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSettings {
    /// The folder.
    pub folder: PathBuf,
    /// Most bytes in it.
    pub bytes: u64,
}

impl DiskSettings {
    /// 10 GiB.
    pub const BYTES: u64 = 10 << 30;
}

impl CacheSettings {
    /// 256 MiB.
    pub const MEMORY_BYTES: u64 = 256 << 20;
    /// 32 MiB.
    pub const OBJECT_BYTES: u64 = 32 << 20;
}
