//! One entry of a list: `github.com`, `*.pypi.example:443`, `10.0.0.0/8:5432`, `udp:192.0.2.1:53`.
//!
//! ```text
//! entry  = [ ( "tcp" / "udp" ) ":" ] target [ ":" ports ]      ; without a protocol: tcp
//! target = "*" / name / "*." name / network
//! network = IPv4 [ "/" bits ] / "[" IPv6 "]" [ "/" bits ]      ; without ports also IPv6 [ "/" bits ]
//! ports  = "*" / port [ "-" port ]                             ; without: all
//! ```

use crate::flow::{Host, HostName, HostNameError, Protocol};
use crate::net::{IpNet, IpNetError};
use crate::policy::{HostPattern, HostPatternError};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// One entry of a list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The hosts.
    pub target: Target,
    /// The first and the last port. `None`: all ports.
    pub ports: Option<(u16, u16)>,
}

/// The hosts of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// All names and all addresses, but for the closed networks.
    Any,
    /// The addresses of a network. A name that resolves to one of them is not meant.
    Network(IpNet),
    /// Names, as the command asks for them. The name that a connection's first bytes claim does not count.
    Name(HostPattern),
}

/// Why a text is not an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// Nothing is written.
    #[error(
        "the list is empty: write HOST, HOST:PORT or NETWORK:PORT, such as github.com or 10.0.0.0/8:5432"
    )]
    Empty,
    /// A line of a profile begins with another word.
    #[error("'{0}' is not 'allow' or 'deny': write one entry a line, with 'deny' before what is denied")]
    Verb(String),
    /// An address of IPv6 is not in brackets, or a bracket is not closed.
    #[error("'{0}': write an IPv6 address in brackets if a port follows: [2001:db8::1]:443")]
    Brackets(String),
    /// The ports are neither a number, nor a range, nor `*`.
    #[error("'{0}' is not a port: write 1 to 65535, a range such as 8000-8010, or *")]
    Ports(String),
    /// The network is wrong.
    #[error(transparent)]
    Network(#[from] IpNetError),
    /// The name pattern is wrong.
    #[error(transparent)]
    Pattern(#[from] HostPatternError),
    /// The host is neither an address nor a name.
    #[error("'{0}' is not a host: {1}")]
    Host(String, HostNameError),
}

impl Entry {
    /// Returns the entry for one destination, as a message writes it that says how to allow it.
    pub fn of(protocol: Protocol, host: &Host, port: u16) -> Self {
        let target = match host {
            Host::Ip(ip) => Target::Network((*ip).into()),
            Host::Name(name) => Target::Name(HostPattern::Exact(name.clone())),
        };
        Self { protocol, target, ports: (port != 0).then_some((port, port)) }
    }

    /// Returns the entry for a name and all ports.
    pub fn of_name(name: &HostName) -> Self {
        Self::of(Protocol::Tcp, &Host::Name(name.clone()), 0)
    }
}

impl FromStr for Entry {
    type Err = EntryError;

    fn from_str(text: &str) -> Result<Self, EntryError> {
        let prefixed = [Protocol::Tcp, Protocol::Udp].into_iter().find_map(|protocol| {
            let rest = text.strip_prefix(protocol.as_str())?.strip_prefix(':')?;
            Some((protocol, rest))
        });
        let (protocol, rest) = prefixed.unwrap_or((Protocol::Tcp, text));
        if rest.is_empty() {
            return Err(EntryError::Empty);
        }
        let (target, written) = divided(rest)?;
        let ports = written.map_or(Ok(None), ports)?;
        Ok(Self { protocol, target: parsed(&target)?, ports })
    }
}

/// Returns the target, without brackets, and the ports.
fn divided(text: &str) -> Result<(String, Option<&str>), EntryError> {
    let brackets = || EntryError::Brackets(text.to_owned());
    let Some(inner) = text.strip_prefix('[') else {
        return match text.split_once(':') {
            None => Ok((text.to_owned(), None)),
            // Two colons: an address of IPv6 without ports.
            Some((_, rest)) if rest.contains(':') => {
                let address = text.split('/').next().unwrap_or_default();
                address.parse::<IpAddr>().map_err(|_| brackets())?;
                Ok((text.to_owned(), None))
            }
            Some((target, ports)) => Ok((target.to_owned(), Some(ports))),
        };
    };
    let (address, rest) = inner.split_once(']').ok_or_else(brackets)?;
    if !address.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()) {
        return Err(brackets());
    }
    let (bits, ports) = rest.split_once(':').map_or((rest, None), |(bits, ports)| (bits, Some(ports)));
    if !bits.is_empty() && !bits.starts_with('/') {
        return Err(brackets());
    }
    Ok((format!("{address}{bits}"), ports))
}

fn ports(text: &str) -> Result<Option<(u16, u16)>, EntryError> {
    if text == "*" {
        return Ok(None);
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let port = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|port| is_number && *port != 0)
    };
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok(Some((first, last))),
        _ => Err(EntryError::Ports(text.to_owned())),
    }
}

fn parsed(text: &str) -> Result<Target, EntryError> {
    if text == "*" {
        return Ok(Target::Any);
    }
    if text.contains('/') {
        return Ok(Target::Network(text.parse()?));
    }
    if text.contains('*') {
        return Ok(Target::Name(text.parse()?));
    }
    match Host::from_bytes(text.as_bytes()) {
        Ok(Host::Ip(ip)) => Ok(Target::Network(ip.into())),
        Ok(Host::Name(name)) => Ok(Target::Name(HostPattern::Exact(name))),
        Err(error) => Err(EntryError::Host(text.to_owned(), error)),
    }
}

impl fmt::Display for Entry {
    /// Writes the entry so that it can be parsed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.protocol == Protocol::Udp {
            f.write_str("udp:")?;
        }
        match &self.target {
            Target::Any => f.write_str("*")?,
            Target::Name(pattern) => pattern.fmt(f)?,
            Target::Network(net) if net.is_v6() && self.ports.is_some() => {
                let text = net.to_string();
                let (address, bits) = text.split_once('/').map_or((&*text, None), |(a, b)| (a, Some(b)));
                write!(f, "[{address}]")?;
                if let Some(bits) = bits {
                    write!(f, "/{bits}")?;
                }
            }
            Target::Network(net) => net.fmt(f)?,
        }
        match self.ports {
            None => Ok(()),
            Some((first, last)) if first == last => write!(f, ":{first}"),
            Some((first, last)) => write!(f, ":{first}-{last}"),
        }
    }
}
