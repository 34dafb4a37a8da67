//! `[[listen]]` of kind engine, checked.

use super::ReverseTarget;
use sidetrack_core::engine::Steering;
use sidetrack_core::ldap::{self, First};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

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
    /// This expression is found in the first [`Pattern::LOOKED_AT`] of them.
    Regex(Pattern),
}

/// A regular expression over bytes. Looking for it takes time in proportion to the bytes, whatever they are.
#[derive(Clone, Debug)]
pub struct Pattern(regex::bytes::Regex);

impl Pattern {
    /// Most bytes that are looked at.
    pub const LOOKED_AT: usize = 4096;
    /// Most memory that the expression may take, bytes.
    const SIZE_MAX: usize = 1 << 18;

    /// Reads an expression. `.` and classes mean bytes, so that no sender can hide behind invalid UTF-8.
    ///
    /// # Errors
    /// Where it is wrong, or that it is too large, in words.
    pub fn new(text: &str) -> Result<Self, String> {
        let mut builder = regex::bytes::RegexBuilder::new(text);
        let built = builder.unicode(false).size_limit(Self::SIZE_MAX).dfa_size_limit(Self::SIZE_MAX).build();
        built.map(Self).map_err(|error| error.to_string())
    }

    fn fits(&self, first: &[u8]) -> Option<bool> {
        let looked_at = first.get(..Self::LOOKED_AT).unwrap_or(first);
        if self.0.is_match(looked_at) {
            return Some(true);
        }
        // More bytes may bring it; no more are waited for than are looked at.
        (first.len() >= Self::LOOKED_AT).then_some(false)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

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
            Self::Regex(pattern) => pattern.fits(first),
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
    /// Most connections at a time whose packets the kernel translates by itself, of all workers; 0: none.
    pub offload_max: u32,
    /// Most connections at a time that the kernel carries from their SYN on; 0: none.
    pub kernel_connections_max: u16,
    /// How long frames may gather in the interfaces; 0: as long as they do.
    pub coalesce: Duration,
    /// Every SYN is answered with a cookie, by the program in the driver.
    pub answer_by_xdp: bool,
}

impl EngineListener {
    /// What lies above Linux's default range of ephemeral ports, so that the host's own connections never meet it.
    pub const SOURCE_PORTS: RangeInclusive<u16> = 61_000..=65_535;
    /// Connections of each worker.
    pub const CONNECTIONS_MAX: u32 = 65_536;
    /// Connections that the kernel translates: none where nobody asks for it, until streams over links that lose packets
    /// are shown to end in its hands as they do in ours.
    pub const OFFLOAD_MAX: u32 = 0;
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

    #[test]
    fn an_expression_is_looked_for_in_a_bounded_part_only() {
        let api = Choice::Regex(Pattern::new(r"^(GET|POST) /api/v[0-9]+/").unwrap());
        assert_eq!(
            [&b"GET /ap"[..], b"POST /api/v12/x HTTP/1.1", b"GET /other"].map(|first| api.fits(first)),
            [None, Some(true), None],
            "only more bytes than are looked at say no"
        );
        let late = Choice::Regex(Pattern::new("end").unwrap());
        let mut bytes = vec![b'x'; Pattern::LOOKED_AT - 3];
        assert_eq!(late.fits(&bytes), None);
        bytes.extend(b"end");
        assert_eq!(late.fits(&bytes), Some(true));
        bytes.splice(0..0, *b"y");
        assert_eq!(late.fits(&bytes), Some(false), "one byte too late");
    }

    #[test]
    fn expressions_are_of_bytes_and_of_bounded_size() {
        let any = Choice::Regex(Pattern::new(r"(?s)^\x16\x03.\xff").unwrap());
        assert_eq!(any.fits(b"\x16\x03\xfe\xff"), Some(true), "not only UTF-8");
        assert!(Pattern::new("(").is_err());
        let huge = "(a{100}){100}{100}";
        assert!(Pattern::new(huge).unwrap_err().contains("size"), "{huge}");
        // One that takes other engines time without end.
        let evil = Choice::Regex(Pattern::new("^(a+)+$").unwrap());
        let mut bytes = vec![b'a'; 4095];
        bytes.push(b'b');
        assert_eq!(evil.fits(&bytes), Some(false));
    }
}
