//! `[[listen]]` of kind engine, checked.

use super::ReverseTarget;
use sidetrack_core::engine::Steering;
use std::net::IpAddr;
use std::ops::RangeInclusive;

/// How the engine gets at packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineIo {
    /// Packet sockets.
    #[default]
    Packet,
    /// AF_XDP, in the driver.
    Xdp,
}

/// A listener that is the packet engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineListener {
    /// The interfaces whose packets it takes; never empty.
    pub interfaces: Vec<String>,
    /// The servers, all of them addresses.
    pub target: ReverseTarget,
    /// How it gets at packets.
    pub io: EngineIo,
    /// Addresses of this host that connections to servers come from; never empty.
    pub sources: Vec<IpAddr>,
    /// Ports of these that they come from.
    pub source_ports: RangeInclusive<u16>,
    /// How the answers of servers find the worker that asked.
    pub steering: Steering,
    /// Most connections at a time of each worker.
    pub connections_max: u32,
}

impl EngineListener {
    /// What lies above Linux's default range of ephemeral ports, so that the host's own connections never meet it.
    pub const SOURCE_PORTS: RangeInclusive<u16> = 61_000..=65_535;
    /// Connections of each worker.
    pub const CONNECTIONS_MAX: u32 = 65_536;
}
