//! `[outgoing]`, checked.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Paths that services ask for one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Where they are asked for.
    pub listen: SocketAddr,
    /// The address on which each path has a port.
    pub address: IpAddr,
    /// The ports; at least one.
    pub ports: RangeInclusive<u16>,
    /// The folder with the certificates of locations.
    pub certificates: Option<PathBuf>,
    /// A path that had no flow for so long may make room for others.
    pub free_after_ms: u64,
}
