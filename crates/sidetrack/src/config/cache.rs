//! What a cache of HTTP responses is set to.

use sidetrack_core::flow::Destination;
use sidetrack_core::http::cache::Rules;
use sidetrack_core::http::uri::KeyRules;
use sidetrack_core::net::IpSet;
use std::net::SocketAddr;
use std::path::PathBuf;

/// What a cache is set to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSettings {
    /// Most bytes in memory.
    pub memory_bytes: u64,
    /// Most bytes of one response's content; larger ones are not kept.
    pub object_bytes: u64,
    /// Heuristics, stale responses, targeted fields.
    pub rules: Rules,
    /// What is left out of keys.
    pub keys: KeyRules,
    /// Other caches that are asked before the server is.
    pub siblings: Vec<Destination>,
    /// Where stored responses are kept on disk, too.
    pub disk: Option<DiskSettings>,
    /// Whose PURGE requests are followed; nobody's where it is empty.
    pub purge_from: IpSet,
    /// How it speaks HTCP, if it does.
    pub htcp: Option<HtcpSettings>,
}

/// How a cache asks others by HTCP, and is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HtcpSettings {
    /// Where it listens, and asks from.
    pub address: SocketAddr,
    /// Who may ask, beside the siblings.
    pub from: IpSet,
    /// Who is asked before the server is.
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

/// What a cache keeps on disk.
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
