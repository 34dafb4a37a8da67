//! The Flow: one intercepted connection, as every stage sees it, and the closed list of end reasons.

use crate::host_name;
pub use crate::host_name::{HostName, HostNameError};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;
use std::sync::Arc;

/// Identifies a flow within one process. Ids rise from 1 and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One of the two sides of a flow. Do not call them upstream, downstream, inbound or outbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The application that opened the connection, or the hop that is nearer to it.
    Client,
    /// The destination, or the hop that is nearer to it.
    Server,
}

impl Side {
    /// Both sides, in the order of arrays.
    pub const BOTH: [Self; 2] = [Self::Client, Self::Server];

    /// Returns the other side.
    #[inline]
    pub const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// An address or a name, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// An IP address. Never an IPv4-mapped IPv6 address (`::ffff:a.b.c.d`).
    Ip(IpAddr),
    /// A name, not resolved yet.
    Name(HostName),
}

impl From<IpAddr> for Host {
    fn from(ip: IpAddr) -> Self {
        Self::Ip(ip.to_canonical())
    }
}

/// Bytes of the longest IPv4 address as text, with a dot behind it.
const V4_MAX: usize = 16;

impl Host {
    /// Parses an address or a name as clients, peers and configurations write it. All of them use this parser, so
    /// text that is an address never becomes a name.
    ///
    /// An IPv4 address has four decimal numbers without leading zeros. An IPv6 address may be in brackets (RFC 3986
    /// Sec. 3.2.2). One final dot is dropped.
    ///
    /// # Errors
    /// Fails if the text is neither. `inet_aton(3)` accepts `127.1`, `2130706433`, `0177.0.0.1` and `0x7f.1` as
    /// addresses; here they are [`HostNameError::Number`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HostNameError> {
        match host_name::address(bytes)? {
            Some(ip) => Ok(Self::from(ip)),
            None => HostName::from_bytes(bytes).map(Self::Name),
        }
    }

    /// Appends the host as in an authority (RFC 3986 Sec. 3.2.2): an IPv6 address is in brackets.
    pub fn write_to(&self, text: &mut String) {
        match self {
            Self::Name(name) => text.push_str(name.as_str()),
            Self::Ip(IpAddr::V4(ip)) => {
                // Append in one piece: every request to an address writes it more than once.
                let (mut bytes, mut length) = ([b'.'; V4_MAX], 0);
                for octet in ip.octets() {
                    for place in [100, 10, 1].into_iter().filter(|place| octet >= *place || *place == 1) {
                        bytes[length] = b'0' + octet / place % 10;
                        length += 1;
                    }
                    length += 1;
                }
                text.push_str(str::from_utf8(&bytes[..length - 1]).unwrap_or_default());
            }
            Self::Ip(IpAddr::V6(ip)) => {
                // Writing to a String cannot fail.
                let _ = fmt::Write::write_fmt(text, format_args!("[{ip}]"));
            }
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// The destination of a flow, or of one hop: a host and a port.
///
/// Written `192.0.2.1:80`, `[2001:db8::1]:80`, `[fe80::1%2]:80` or `db.example.nl:5432`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Destination {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// The zone of a link-local IPv6 address (RFC 4007): the number of an interface of this host. 0: it has none.
    /// Another host must not be told it.
    pub zone: u32,
}

impl Destination {
    /// Returns the socket address, if the host is an IP address.
    pub const fn socket_addr(&self) -> Option<SocketAddr> {
        match self.host {
            Host::Ip(IpAddr::V6(ip)) => Some(SocketAddr::V6(SocketAddrV6::new(ip, self.port, 0, self.zone))),
            Host::Ip(ip) => Some(SocketAddr::new(ip, self.port)),
            Host::Name(_) => None,
        }
    }

    /// Returns the socket address, if the host is an IP address without a zone. A packet filter cannot translate to
    /// an address with one.
    pub const fn unzoned_addr(&self) -> Option<SocketAddr> {
        if self.zone == 0 { self.socket_addr() } else { None }
    }
}

impl From<SocketAddr> for Destination {
    fn from(address: SocketAddr) -> Self {
        let zone = match address {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => v6.scope_id(),
            _ => 0,
        };
        Self { host: address.ip().into(), port: address.port(), zone }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(IpAddr::V6(ip)) if self.zone != 0 => write!(f, "[{ip}%{}]:{}", self.zone, self.port),
            Host::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

/// Why a text is not a valid `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// There is no colon before a port.
    #[error("'{0}' lacks a port: write host:port, or [IPv6]:port")]
    NoPort(String),
    /// The port is not a number from 1 to 65535.
    #[error("'{0}' is not a port: a port is a number from 1 to 65535")]
    BadPort(String),
    /// The host is neither an address nor a name.
    #[error("'{0}' is not a host: {1}")]
    BadHost(String, HostNameError),
}

impl FromStr for Destination {
    type Err = DestinationError;

    /// Parses the form in which destinations are written. A zone is the number of an interface.
    fn from_str(text: &str) -> Result<Self, DestinationError> {
        let (host, port) = text.rsplit_once(':').ok_or_else(|| DestinationError::NoPort(text.to_owned()))?;
        let port = port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| DestinationError::BadPort(port.to_owned()))?;
        if !host.starts_with('[') && host.contains(':') {
            return Err(DestinationError::NoPort(text.to_owned()));
        }
        let bad = |error| DestinationError::BadHost(host.to_owned(), error);
        if let Some((ip, zone)) = zoned(host) {
            // Only a link-local address is not the same host on every link.
            let zone = zone.parse().ok().filter(|zone| *zone != 0 && ip.is_unicast_link_local());
            let zone = zone.ok_or(HostNameError::Zone).map_err(bad)?;
            return Ok(Self { host: Host::Ip(ip.into()), port, zone });
        }
        let host = Host::from_bytes(host.as_bytes()).map_err(bad)?;
        Ok(Self { host, port, zone: 0 })
    }
}

/// The transport protocol of a flow. The words are those of rules and of records.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// A TCP connection.
    #[default]
    Tcp,
    /// A UDP association: the datagrams between one client endpoint and one destination.
    Udp,
}

impl Protocol {
    /// All values, in the order of the documents.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Udp];

    /// Returns the protocol with this IP protocol number.
    pub const fn of_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }

    /// Returns the IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// Returns the word of configuration and records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Returns the address and the zone of `[ADDRESS%ZONE]`.
fn zoned(host: &str) -> Option<(Ipv6Addr, &str)> {
    let (ip, zone) = host.strip_prefix('[')?.strip_suffix(']')?.split_once('%')?;
    Some((ip.parse().ok()?, zone))
}

/// How a flow was caught. The words are those of `kind` in `[[listen]]`, of rules and of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Intercept {
    /// `sidetrack run`: a command in a namespace (or cgroup) of its own.
    Run,
    /// nft REDIRECT of local or forwarded traffic.
    Redirect,
    /// nft TPROXY: the kernel keeps the original destination as the local address of our socket.
    Tproxy,
    /// An explicit SOCKS5 or SOCKS6 request.
    Socks,
    /// A request to this program as an HTTP proxy.
    Http,
    /// A port of this program represents a server.
    Reverse,
    /// The near side of a tunnel has requested it.
    Tunnel,
    /// The packet engine answers for an address and port, without a socket of this program.
    Engine,
    /// The kernel carried it by NAT. This program saw it only in conntrack.
    Kernel,
}

impl Intercept {
    /// All values, in the order of the documents.
    pub const ALL: [Self; 9] = [
        Self::Run,
        Self::Redirect,
        Self::Tproxy,
        Self::Socks,
        Self::Http,
        Self::Reverse,
        Self::Tunnel,
        Self::Engine,
        Self::Kernel,
    ];

    /// Returns the word of configuration and records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Redirect => "redirect",
            Self::Tproxy => "tproxy",
            Self::Socks => "socks",
            Self::Http => "http",
            Self::Reverse => "reverse",
            Self::Tunnel => "tunnel",
            Self::Engine => "engine",
            Self::Kernel => "kernel",
        }
    }
}

/// The local process behind a flow, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Process id in our own pid namespace.
    pub pid: Option<u32>,
    /// Base name of the executable (`/proc/PID/exe`), otherwise `comm`.
    pub name: Option<String>,
    /// User id that owns the socket.
    pub uid: Option<u32>,
    /// It is on this host, but what is missing above could not be found: it has closed its socket or ended, or we may not see it.
    pub is_hidden: bool,
}

/// One intercepted connection or UDP association, as policy and records see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Its transport protocol.
    pub protocol: Protocol,
    /// How it was caught.
    pub intercept: Intercept,
    /// Name of the listener that caught it (`[[listen]] name`, or its kind).
    pub listener: Arc<str>,
    /// The client's address. If the listener trusts the PROXY protocol, the address in its header.
    pub client: SocketAddr,
    /// The destination that the application requested: a name or an address, before any rule.
    pub orig_dst: Destination,
    /// The host name, if known: from our DNS answer, a SOCKS request, SNI or the HTTP Host field.
    pub host: Option<HostName>,
    /// The local process, if a rule needs it and it was found.
    pub process: Option<Process>,
    /// The authenticated user: the SOCKS user, or the name in the certificate of a tunnel's near side.
    pub user: Option<String>,
}

/// Why a flow ended. This is a closed list: every flow ends with exactly one of these reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// Both sides closed in an orderly way, and every byte was delivered.
    Ok,
    /// The client reset the connection or disappeared.
    ClientReset,
    /// The server, or the last hop, reset the connection.
    ServerReset,
    /// No byte moved for the idle time-out.
    Idle,
    /// The lifetime of the flow is over.
    Lifetime,
    /// A rule denied the flow, or no rule matched and the default is deny.
    PolicyDenied,
    /// A request has the placeholder of a secret that does not go to its server.
    SecretRefused,
    /// The destination, or a hop, refused the connection.
    Refused,
    /// No route to the destination or to a hop.
    Unreachable,
    /// The connection, or a handshake with a hop, timed out.
    ConnectTimeout,
    /// The name could not be resolved.
    Dns,
    /// The server did not prove its identity: its certificate is not trusted.
    Certificate,
    /// TLS with the server failed, or TLS with a client whose connection was to be intercepted.
    TlsFailed,
    /// A hop broke its protocol, or refused for another reason.
    HopFailed,
    /// A hop, or this node, did not accept the credentials.
    AuthFailed,
    /// The client broke the protocol of the listener.
    BadRequest,
    /// The client requested a command or address type that is not supported.
    Unsupported,
    /// The client's handshake timed out.
    HandshakeTimeout,
    /// The client left before the connection was made.
    ClientGone,
    /// A function of the chain refused the flow.
    FunctionRefused,
    /// A function of the chain is down, or could not do its work.
    FunctionFailed,
    /// The agreement of its rule no longer allows it, or requires functions that it does not pass.
    PolicyRevoked,
    /// A reload changed the chain of its rule, and the rule requires to cut its flows then.
    ChainChanged,
    /// A limit (descriptors, flows) was reached, so the flow was refused.
    Limit,
    /// The flow would have come back to this program.
    Loop,
    /// `flows kill` or the admin interface ended it.
    Killed,
    /// The program was told to stop.
    Shutdown,
    /// The kernel carried it and conntrack reported its end.
    KernelClosed,
    /// An internal error. The log has the detail.
    Internal,
}

impl EndReason {
    /// All reasons, in the order of their declaration.
    pub const ALL: [Self; 29] = [
        Self::Ok,
        Self::ClientReset,
        Self::ServerReset,
        Self::Idle,
        Self::Lifetime,
        Self::PolicyDenied,
        Self::SecretRefused,
        Self::Refused,
        Self::Unreachable,
        Self::ConnectTimeout,
        Self::Dns,
        Self::Certificate,
        Self::TlsFailed,
        Self::HopFailed,
        Self::AuthFailed,
        Self::BadRequest,
        Self::Unsupported,
        Self::HandshakeTimeout,
        Self::ClientGone,
        Self::FunctionRefused,
        Self::FunctionFailed,
        Self::PolicyRevoked,
        Self::ChainChanged,
        Self::Limit,
        Self::Loop,
        Self::Killed,
        Self::Shutdown,
        Self::KernelClosed,
        Self::Internal,
    ];

    /// Returns the word in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ClientReset => "client_reset",
            Self::ServerReset => "server_reset",
            Self::Idle => "idle",
            Self::Lifetime => "lifetime",
            Self::PolicyDenied => "policy_denied",
            Self::SecretRefused => "secret_refused",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
            Self::ConnectTimeout => "connect_timeout",
            Self::Dns => "dns",
            Self::Certificate => "certificate",
            Self::TlsFailed => "tls_failed",
            Self::HopFailed => "hop_failed",
            Self::AuthFailed => "auth_failed",
            Self::BadRequest => "bad_request",
            Self::Unsupported => "unsupported",
            Self::HandshakeTimeout => "handshake_timeout",
            Self::ClientGone => "client_gone",
            Self::FunctionRefused => "function_refused",
            Self::FunctionFailed => "function_failed",
            Self::PolicyRevoked => "policy_revoked",
            Self::ChainChanged => "chain_changed",
            Self::Limit => "limit",
            Self::Loop => "loop",
            Self::Killed => "killed",
            Self::Shutdown => "shutdown",
            Self::KernelClosed => "kernel_closed",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn an_address_in_an_authority_is_written_as_ever() {
        for octet in 0..=255 {
            let ip = Ipv4Addr::new(octet, 255 - octet, octet, 0);
            let mut text = String::from("at ");
            Host::Ip(ip.into()).write_to(&mut text);
            assert_eq!(text, format!("at {ip}"));
        }
    }

    #[test]
    fn destinations_read_as_they_are_written() {
        for text in ["192.0.2.1:80", "[2001:db8::1]:443", "db.example.nl:5432"] {
            assert_eq!(text.parse::<Destination>().unwrap().to_string(), text);
        }
        assert_eq!("Db.Example.NL.:1".parse::<Destination>().unwrap().to_string(), "db.example.nl:1");
        assert_eq!("[::ffff:192.0.2.1]:1".parse::<Destination>().unwrap().to_string(), "192.0.2.1:1");
        for bad in ["", "a", "a:", "a:0", "a:65536", "2001:db8::1:80", ":80", "a b:1", "[a]:1", "127.1:80"] {
            assert!(bad.parse::<Destination>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_link_local_address_has_the_zone_of_its_interface() {
        let destination: Destination = "[fe80::1%7]:80".parse().unwrap();
        assert_eq!(destination.to_string(), "[fe80::1%7]:80");
        assert_eq!(destination.host, Host::Ip("fe80::1".parse().unwrap()), "rules match the address");
        let address = destination.socket_addr().unwrap();
        assert!(matches!(address, SocketAddr::V6(v6) if v6.scope_id() == 7), "{address}");
        assert_eq!((Destination::from(address), destination.unzoned_addr()), (destination, None));
        assert_eq!("[fe80::1]:80".parse::<Destination>().unwrap().to_string(), "[fe80::1]:80");
        for bad in
            ["[fe80::1%eth0]:80", "[fe80::1%]:80", "[fe80::1%0]:80", "[2001:db8::1%7]:80", "[::1%1]:80"]
        {
            let error = bad.parse::<Destination>().unwrap_err();
            assert!(matches!(error, DestinationError::BadHost(_, HostNameError::Zone)), "{bad}: {error}");
        }
        let global = SocketAddr::V6(SocketAddrV6::new("2001:db8::1".parse().unwrap(), 80, 0, 7));
        assert_eq!(Destination::from(global), "[2001:db8::1]:80".parse().unwrap());
    }

    #[test]
    fn every_reason_has_a_word_of_its_own() {
        let words: std::collections::BTreeSet<_> = EndReason::ALL.iter().map(|r| r.as_str()).collect();
        assert_eq!(words.len(), EndReason::ALL.len());
    }
}
