//! Carriers: how a flow's bytes get to its destination. Either directly, or through a list of hops. Each hop is
//! reached through the one before.

use crate::flow::{Destination, DestinationError};
use crate::overlay::service::{Dissemination, LinkKind, Service, Trust};
use crate::overlay::session::Mode;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The protocol used with a hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HopProtocol {
    /// SOCKS5 (RFC 1928 and 1929). The name is sent if it is known (`socks5://` and `socks5h://` mean the same here).
    Socks5,
    /// SOCKS6 (draft-olteanu-intarea-socks-6), in the given dialect.
    Socks6(Socks6Dialect),
    /// HTTP CONNECT (RFC 9110 Sec. 9.3.6).
    Http,
    /// The same inside TLS.
    Https,
    /// CONNECT over HTTP/3 (RFC 9114 Sec. 4.4). Behind other hops, those carry its datagrams.
    Http3,
}

/// The SOCKS6 layout that a peer uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Socks6Dialect {
    /// The layout of the draft (-11 and -12).
    #[default]
    Draft,
    /// `socksx` 0.1.0: the address before the port, a 16-bit options length at the end, and a reply with the port
    /// first.
    Socksx010,
    /// `socksx` from 0.1.1 on: like 0.1.0, but a reply with the address first.
    Socksx,
}

/// User name and password (RFC 1929; SOCKS6 method 2; HTTP Basic).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// User name, 1 to 255 bytes.
    pub user: String,
    /// Password, 1 to 255 bytes.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credentials({}, ***)", self.user)
    }
}

/// One hop of a carrier.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hop {
    /// The protocol of the hop.
    pub protocol: HopProtocol,
    /// The address that the hop listens on.
    pub address: Destination,
    /// The credentials for the hop.
    pub credentials: Option<Credentials>,
    /// `?optimistic=true`: send greeting, request and data without waiting (SOCKS5; fails with servers that drop
    /// trailing bytes). SOCKS6 always sends all in one write if the draft allows it.
    pub optimistic: bool,
    /// `?tfo=true`: TCP Fast Open towards this hop (the first hop only). Use it only if a replay is harmless.
    pub tfo: bool,
    /// `?mptcp=true`: Multipath TCP towards this hop (the first hop only).
    pub mptcp: bool,
    /// `?ca=FILE`: the file of the authorities that may sign the hop's certificate, in PEM. `None`: those of the system.
    pub ca_file: Option<Arc<str>>,
    /// The text of that file. [`str::parse`] leaves it out, as core reads no files.
    pub ca_pem: Option<Arc<str>>,
}

/// A node of the overlay that delivers flows, and how their bytes and datagrams use the paths to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OverlayCarrier {
    /// The name of the node; `nearest:GROUP` for the nearest member of a group, or `group:GROUP` for all of them (UDP).
    pub node: Arc<str>,
    /// How the bytes of a flow use its paths.
    pub mode: Mode,
    /// The number of paths, 1 with [`Mode::Shortest`], otherwise in [`PATHS`](crate::overlay::service::PATHS). Fewer are used
    /// if the network has fewer.
    pub paths: u8,
    /// How the datagrams of a flow of UDP travel.
    pub service: Service,
}

impl OverlayCarrier {
    /// Returns the carrier over one path to this node.
    pub fn one_path(node: Arc<str>) -> Self {
        Self { node, mode: Mode::Shortest, paths: 1, service: Service::new(LinkKind::BestEffort) }
    }
}

impl fmt::Display for OverlayCarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "overlay:{}", self.node)?;
        let Service { kind, dissemination, deadline, trust, .. } = self.service;
        // What connections have in common with datagrams is said in the words of connections.
        let is_plain = kind == LinkKind::BestEffort && deadline.is_none() && trust == Trust::Members;
        match (self.mode, dissemination) {
            (Mode::Shortest, Dissemination::Shortest) if is_plain => Ok(()),
            (Mode::Stripe, _) => write!(f, " (stripe over {} paths)", self.paths),
            (Mode::Duplicate, _) if is_plain => write!(f, " (duplicate over {} paths)", self.paths),
            _ => write!(f, " ({})", self.service.words()),
        }
    }
}

/// How a flow is carried.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub enum Carrier {
    /// This node dials the destination.
    #[default]
    Direct,
    /// Through these hops, in order. Never empty.
    Hops(Vec<Hop>),
    /// Over the overlay to the node with this name, which delivers the flow.
    Overlay(OverlayCarrier),
    /// Through the tunnel with this name (`[[tunnel]]`). Its far side dials the destination.
    Tunnel(Arc<str>),
}

impl Carrier {
    /// Says why this carrier cannot carry UDP. `None`: it can.
    pub fn udp_obstacle(&self) -> Option<&'static str> {
        match self {
            Self::Direct => None,
            Self::Hops(hops) => udp_obstacle_of(hops),
            Self::Overlay(_) | Self::Tunnel(_) => None,
        }
    }

    /// Says which hop of HTTP/3 cannot be reached, by its index, and why the hops before it cannot carry its datagrams. `None`:
    /// there is none.
    pub fn http3_obstacle(&self) -> Option<(usize, &'static str)> {
        let Self::Hops(hops) = self else { return None };
        let of_http3 = hops.iter().enumerate().filter(|(_, hop)| hop.protocol == HopProtocol::Http3);
        of_http3.filter_map(|(index, _)| Some((index, udp_obstacle_of(&hops[..index])?))).next()
    }

    /// Whether a path for datagrams through this carrier leads to one destination only, as CONNECT-UDP and a tunnel do.
    pub fn leads_to_one(&self) -> bool {
        match self {
            Self::Hops(hops) => hops.last().is_some_and(|hop| hop.protocol.is_http()),
            Self::Tunnel(_) => true,
            Self::Direct | Self::Overlay(_) => false,
        }
    }
}

/// Says why these hops cannot carry UDP.
fn udp_obstacle_of(hops: &[Hop]) -> Option<&'static str> {
    // The datagrams pass the last hop of kind `http` in its connection, which any hop before it can carry.
    let last = hops.iter().rposition(|hop| hop.protocol.is_http());
    let mut relays = hops.iter().skip(last.map_or(0, |at| at + 1));
    let is_socksx = |hop: &Hop| match hop.protocol {
        HopProtocol::Socks6(dialect) => dialect != Socks6Dialect::Draft,
        _ => false,
    };
    let why = "the layouts of socksx carry no UDP (hops socks6+socksx and socks6+socksx010)";
    relays.any(is_socksx).then_some(why)
}

/// Why a text is not a valid hop.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HopError {
    /// There is no `://`.
    #[error("'{0}' is not a hop: write socks5://host:port, socks6://host:port or http://host:port")]
    NoScheme(String),
    /// The scheme is not supported.
    #[error(
        "unknown hop scheme '{0}': use socks5, socks5h, socks6, socks6+socksx, socks6+socksx010, http, https or h3"
    )]
    BadScheme(String),
    /// The address part is wrong.
    #[error(transparent)]
    BadAddress(#[from] DestinationError),
    /// The user or the password is empty, longer than 255 bytes, or has invalid percent-encoding.
    #[error("user and password of a hop have 1 to 255 bytes each, percent-encoded: user:password@host")]
    BadCredentials,
    /// An option after `?` is unknown.
    #[error(
        "unknown hop option '{0}': use optimistic, tfo or mptcp, each =true or =false; https and h3 also have ca=FILE"
    )]
    BadOption(String),
}

impl HopProtocol {
    /// Returns the URL scheme.
    pub const fn scheme(self) -> &'static str {
        match self {
            Self::Socks5 => "socks5",
            Self::Socks6(Socks6Dialect::Draft) => "socks6",
            Self::Socks6(Socks6Dialect::Socksx010) => "socks6+socksx010",
            Self::Socks6(Socks6Dialect::Socksx) => "socks6+socksx",
            Self::Http => "http",
            Self::Https => "https",
            Self::Http3 => "h3",
        }
    }

    const fn default_port(self) -> u16 {
        match self {
            Self::Socks5 | Self::Socks6(_) => 1080,
            Self::Http => 3128,
            Self::Https | Self::Http3 => 443,
        }
    }

    /// Whether the hop is asked by CONNECT and CONNECT-UDP.
    pub const fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Https | Self::Http3)
    }

    /// Whether the hop has a certificate, which we verify.
    pub const fn is_encrypted(self) -> bool {
        matches!(self, Self::Https | Self::Http3)
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let hex = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(hex, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).ok()
}

impl Credentials {
    /// Parses percent-encoded `user:password`.
    fn from_userinfo(text: &str) -> Option<Self> {
        let (user, password) = text.split_once(':')?;
        let (user, password) = (percent_decoded(user)?, percent_decoded(password)?);
        let fits = |part: &str| (1..=255).contains(&part.len());
        (fits(&user) && fits(&password)).then_some(Self { user, password })
    }
}

impl FromStr for Hop {
    type Err = HopError;

    fn from_str(text: &str) -> Result<Self, HopError> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| HopError::NoScheme(text.to_owned()))?;
        let protocol = match scheme {
            "socks5" | "socks5h" => HopProtocol::Socks5,
            "socks6" => HopProtocol::Socks6(Socks6Dialect::Draft),
            "socks6+socksx" => HopProtocol::Socks6(Socks6Dialect::Socksx),
            "socks6+socksx010" => HopProtocol::Socks6(Socks6Dialect::Socksx010),
            "http" => HopProtocol::Http,
            "https" => HopProtocol::Https,
            "h3" => HopProtocol::Http3,
            other => return Err(HopError::BadScheme(other.to_owned())),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (credentials, host) = match rest.rsplit_once('@') {
            Some((userinfo, host)) => {
                (Some(Credentials::from_userinfo(userinfo).ok_or(HopError::BadCredentials)?), host)
            }
            None => (None, rest),
        };
        let address = if host.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']')) {
            host.parse()?
        } else {
            format!("{host}:{}", protocol.default_port()).parse()?
        };
        let mut hop = Self {
            protocol,
            address,
            credentials,
            optimistic: false,
            tfo: false,
            mptcp: false,
            ca_file: None,
            ca_pem: None,
        };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let bad = || HopError::BadOption(option.to_owned());
            let (name, value) = option.split_once('=').unwrap_or((option, "true"));
            if name == "ca" && protocol.is_encrypted() && !value.is_empty() {
                hop.ca_file = Some(percent_decoded(value).ok_or_else(bad)?.into());
                continue;
            }
            let value = value.parse().map_err(|_| bad())?;
            match name {
                "optimistic" => hop.optimistic = value,
                "tfo" => hop.tfo = value,
                "mptcp" => hop.mptcp = value,
                _ => return Err(bad()),
            }
        }
        Ok(hop)
    }
}

impl fmt::Display for Hop {
    /// Writes the hop without credentials, so that it may be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.protocol.scheme(), self.address)
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct => f.write_str("direct"),
            Self::Overlay(carrier) => carrier.fmt(f),
            Self::Hops(hops) => {
                for (index, hop) in hops.iter().enumerate() {
                    if index > 0 {
                        f.write_str(" -> ")?;
                    }
                    hop.fmt(f)?;
                }
                Ok(())
            }
            Self::Tunnel(name) => write!(f, "tunnel:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hops_read_as_they_are_written() {
        for text in ["socks5://gw:1081", "socks6://[2001:db8::1]:1080", "http://10.0.0.1:3128"] {
            assert_eq!(text.parse::<Hop>().unwrap().to_string(), text);
        }
        assert_eq!("socks6://gw".parse::<Hop>().unwrap().to_string(), "socks6://gw:1080");
        assert_eq!("http://[::1]".parse::<Hop>().unwrap().to_string(), "http://[::1]:3128");
        let hop: Hop = "h3://a:b@gw?ca=my%20ca.pem&optimistic".parse().unwrap();
        assert_eq!((hop.to_string(), hop.ca_file.as_deref()), ("h3://gw:443".to_owned(), Some("my ca.pem")));
        assert!("http://gw?ca=ca.pem".parse::<Hop>().is_err() && "https://gw?ca=".parse::<Hop>().is_err());
        let hop: Hop = "socks5://us%3Aer:p%40ss@gw:1/?tfo=true&optimistic".parse().unwrap();
        assert_eq!(hop.credentials, Some(Credentials { user: "us:er".into(), password: "p@ss".into() }));
        assert!(hop.tfo && hop.optimistic && !hop.mptcp);
        assert!(!format!("{hop:?} {hop}").contains("p@ss"), "a password must not reach a log");
        for bad in
            ["gw:1", "ftp://gw", "socks5://", "socks5://user@gw", "socks5://%zz:a@gw", "socks5://gw?x=1"]
        {
            assert!(bad.parse::<Hop>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_hop_of_http_3_needs_hops_before_it_that_carry_datagrams() {
        let obstacle = |hops: &[&str]| {
            let hops = hops.iter().map(|hop| hop.parse().unwrap()).collect();
            Carrier::Hops(hops).http3_obstacle().map(|(index, _)| index)
        };
        for good in [
            &["h3://a"][..],
            &["socks5://a", "h3://b"],
            &["socks6://a", "https://b", "h3://c", "socks6+socksx://d"],
            &["socks6+socksx://a", "http://b", "h3://c"],
        ] {
            assert_eq!(obstacle(good), None, "{good:?}");
        }
        assert_eq!(obstacle(&["socks6+socksx://a", "h3://b"]), Some(1));
        assert_eq!(obstacle(&["http://a", "h3://b", "socks6+socksx010://c", "h3://d"]), Some(3));
        assert_eq!(Carrier::Direct.http3_obstacle(), None);
    }
}
