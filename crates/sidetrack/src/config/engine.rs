//! `[[listen]]` of kind engine, checked.

use super::ReverseTarget;
use sidetrack_core::engine::Steering;
use sidetrack_core::ldap::{self, First};
use std::net::{IpAddr, SocketAddr};
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

/// What the first bytes of a client are like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// They begin with these; never empty.
    Prefix(Box<[u8]>),
    /// An LDAP request about this entry or one below it.
    LdapDn(Box<str>),
}

impl Choice {
    /// Whether the first bytes are like this; none: that takes more of them.
    pub fn fits(&self, first: &[u8]) -> Option<bool> {
        match self {
            Self::Prefix(prefix) if first.len() < prefix.len() => {
                if prefix.starts_with(first) {
                    None
                } else {
                    Some(false)
                }
            }
            Self::Prefix(prefix) => Some(first.starts_with(prefix)),
            Self::LdapDn(base) => match ldap::first_request(first) {
                First::NeedMore => None,
                First::NotLdap => Some(false),
                First::Request(request) => Some(ldap::is_below(request.dn, base)),
            },
        }
    }
}

/// A listener that is the packet engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineListener {
    /// The interfaces whose packets it takes; never empty.
    pub interfaces: Vec<String>,
    /// The servers, all of them addresses.
    pub target: ReverseTarget,
    /// Servers by first bytes, tried in order before `target`.
    pub choices: Vec<(Choice, SocketAddr)>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_is_asked_for_only_while_it_can_decide() {
        let ssh = Choice::Prefix((*b"SSH-").into());
        assert_eq!(
            [&b""[..], b"SS", b"SSH-2", b"GET"].map(|first| ssh.fits(first)),
            [None, None, Some(true), Some(false)]
        );
        let dn = Choice::LdapDn("dc=one".into());
        let delete = b"\x30\x0b\x02\x01\x07\x4a\x06dc=one";
        assert_eq!(
            [&delete[..4], delete, b"GET"].map(|first| dn.fits(first)),
            [None, Some(true), Some(false)]
        );
    }
}
