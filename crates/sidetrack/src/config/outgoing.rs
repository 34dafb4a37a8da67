//! `[outgoing]`, checked.

use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Listening ports that services ask for, each for one destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// The address on which services send their requests.
    pub listen: SocketAddr,
    /// The address of the listening ports.
    pub address: IpAddr,
    /// The ports to use; at least one.
    pub ports: RangeInclusive<u16>,
    /// The folder with the certificates of the locations.
    pub certificates: Option<PathBuf>,
    /// A path without flows for this time may be removed when no port is left, milliseconds.
    pub free_after_ms: u64,
}
