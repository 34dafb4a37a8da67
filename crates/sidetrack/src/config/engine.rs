//! `[[listen]]` of kind engine, checked.

use super::ReverseTarget;
use sidetrack_core::engine::Steering;
use sidetrack_core::ldap::{self, First};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

/// How the engine receives and sends packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineIo {
    /// Packet sockets.
    #[default]
    Packet,
    /// AF_XDP, in the driver.
    Xdp,
}

/// A condition on the first bytes of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// They begin with these bytes; never empty.
    Prefix(Box<[u8]>),
    /// An LDAP request about this entry or one below it. An anonymous bind in front of it does not count.
    LdapDn(Box<str>),
    /// This expression matches within their first [`Pattern::LOOKED_AT`] bytes.
    Regex(Pattern),
}

/// A regular expression over bytes. Matching takes time proportional to the number of bytes, for any input.
#[derive(Clone, Debug)]
pub struct Pattern(regex::bytes::Regex);

impl Pattern {
    /// Most bytes that are searched.
    pub const LOOKED_AT: usize = 4096;
    /// Most memory of the compiled expression, bytes.
    const SIZE_MAX: usize = 1 << 18;

    /// Compiles an expression. `.` and classes mean bytes, so that a sender cannot avoid a match with invalid
    /// UTF-8.
    ///
    /// # Errors
    /// Says where the expression is wrong, or that it is too large.
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
        // More bytes may still match. Do not wait for more bytes than are searched.
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
    /// Whether the first bytes fit. `None`: more bytes are needed.
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

/// The settings of an engine listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineListener {
    /// The interfaces whose packets it receives; never empty.
    pub interfaces: Vec<String>,
    /// The servers; all of them are addresses.
    pub target: ReverseTarget,
    /// Servers chosen by first bytes, tried in order before `target`.
    pub choices: Vec<(Choice, SocketAddr)>,
    /// How it receives and sends packets.
    pub io: EngineIo,
    /// Source addresses of connections to servers; never empty. They belong to this host.
    pub sources: Vec<IpAddr>,
    /// Source ports of connections to servers.
    pub source_ports: RangeInclusive<u16>,
    /// How packets from servers reach the worker that has the connection.
    pub steering: Steering,
    /// Most connections of each worker at a time.
    pub connections_max: u32,
    /// Most offloaded connections at a time, of all workers. 0: none.
    pub offload_max: u32,
    /// Most connections at a time that the kernel forwards from their SYN on. 0: none.
    pub kernel_connections_max: u16,
    /// Longest time that interfaces may collect frames. 0: their own setting.
    pub coalesce: Duration,
    /// The program in the driver answers every SYN with a cookie.
    pub answer_by_xdp: bool,
}

impl EngineListener {
    /// The ports above Linux's default range of ephemeral ports, so that the host's own connections do not use
    /// them.
    pub const SOURCE_PORTS: RangeInclusive<u16> = 61_000..=65_535;
    /// Default for connections of each worker.
    pub const CONNECTIONS_MAX: u32 = 65_536;
    /// Default for offloaded connections: none. It stays so until it is shown that streams over lossy links end
    /// in the kernel as they do in user space.
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
        // Backtracking engines need exponential time for this expression.
        let evil = Choice::Regex(Pattern::new("^(a+)+$").unwrap());
        let mut bytes = vec![b'a'; 4095];
        bytes.push(b'b');
        assert_eq!(evil.fits(&bytes), Some(false));
    }
}
