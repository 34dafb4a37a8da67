//! `[[listen]]`.

use super::super::{At, List};
use super::{Cache, Engine, Number, Protocol, UserEntry};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A listener: one way by which flows reach Sidetrack. `kind` says how, and which of the other keys apply.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Listen {
    /// Name in rules and records. Default: the kind.
    pub name: Option<At<String>>,
    /// How flows reach it.
    #[schemars(required)]
    pub kind: Option<At<ListenKind>>,
    /// The address to listen on: "127.0.0.1:1080", "[::1]:1080", "*:1080" for every address, or a list. A link-local address
    /// needs its interface: "[fe80::1%eth0]:1080". Required for socks, http, reverse, tunnel and engine. Default for redirect and tproxy: a port that the kernel picks.
    pub address: Option<List<String>>,
    /// reverse, redirect and tproxy: the transport protocol, "tcp" or "udp". The datagrams of one client to one destination are one
    /// association, with one record. A reverse listener of UDP needs `to`. Default "tcp".
    pub protocol: Option<At<Protocol>>,
    /// Peers (networks or "@set") that must send a PROXY protocol header, which is trusted. Default: none.
    pub accept_proxy_protocol: Option<List<String>>,
    /// socks, http and reverse: accept Multipath TCP, if the kernel has it. Other clients use plain TCP. Default false.
    pub mptcp: Option<At<bool>>,
    /// socks: versions served, of 5 and 6. Default [5, 6].
    pub versions: Option<List<u8>>,
    /// socks and http: users that may use it. redirect: users (names or ids) whose programs are captured. Default: every
    /// user.
    pub users: Option<List<UserEntry>>,
    /// socks: wire layouts of SOCKS6 accepted. Default "auto".
    pub dialect: Option<At<Dialect>>,
    /// socks: serve BIND: a port on this host waits for one connection from the host that the client names. Needs a rule with
    /// `carrier = "direct"`. Default false.
    pub bind: Option<At<bool>>,
    /// socks: the UDP ports that relay datagrams (UDP ASSOCIATE): "each" means a port of its own for each client connection,
    /// "shared" the listener's own port number for all, "off" none. Default "each".
    pub udp_ports: Option<At<UdpPorts>>,
    /// socks: the IP address that clients are told to send datagrams to, if a translator (NAT) is before this host. Default:
    /// the address that they have connected to.
    pub udp_advertise: Option<At<String>>,
    /// socks: which servers may send datagrams to a client (RFC 4787 Sec. 5): those that it has sent to
    /// ("address-and-port-dependent"), other ports of their addresses too ("address-dependent"), or every server
    /// ("endpoint-independent", for peer-to-peer programs; policy is asked about each). Default
    /// "address-and-port-dependent".
    pub udp_filtering: Option<At<UdpFiltering>>,
    /// The server. reverse: "host:port". engine: an address and port. http: the server for requests that name none, "host:port"
    /// or, by TLS, "https://host:port?ca=FILE" (`ca`: the authorities to trust, in PEM; default: those of the system); without
    /// a server such requests are rejected.
    pub to: Option<At<String>>,
    /// reverse and engine: servers by the name in the first bytes (TLS SNI or HTTP Host). "*.example" means all names below.
    pub names: Option<At<BTreeMap<String, At<String>>>>,
    /// reverse and engine with `names`: the server for flows with another name or without one. Default: they are rejected.
    pub default: Option<At<String>>,
    /// redirect: capture connections that programs on this host open. Default true.
    pub local: Option<At<bool>>,
    /// redirect: capture connections that this host forwards. Default false.
    pub forwarded: Option<At<bool>>,
    /// redirect and tproxy: only forwarded connections that arrive on these interfaces. Default: all. engine: the interfaces
    /// towards clients and servers whose packets it receives; required.
    pub interfaces: Option<List<String>>,
    /// redirect and tproxy: only from these networks or "@set"s. Default: all.
    pub src: Option<List<String>>,
    /// redirect and tproxy: only to these networks or "@set"s. Default: all, if another key restricts the capture.
    pub dst: Option<List<String>>,
    /// redirect and tproxy: not to these networks or "@set"s. Default: none.
    pub except: Option<List<String>>,
    /// redirect and tproxy: only to these ports, numbers or "first-last". Default: all.
    pub ports: Option<List<Number>>,
    /// tunnel: a file with this host's certificate chain and its private key, in PEM (`sidetrack tunnel key`). http: the same,
    /// for TLS with clients of the listener, by HTTP/1.1 or HTTP/2. Default for http: no TLS.
    pub identity: Option<At<String>>,
    /// http: serve HTTP/3 too, on the UDP port of the same number. Needs `identity`. Default false.
    pub http3: Option<At<bool>>,
    /// tunnel: a file with the certificates of the authorities whose near sides are accepted, in PEM. Either this or `pins`.
    pub ca: Option<At<String>>,
    /// tunnel: the keys of the near sides that are accepted, each "sha256//BASE64", or "NAME=sha256//BASE64" if the certificate
    /// must have this name too.
    pub pins: Option<List<String>>,
    /// redirect: only programs in this control group, relative to the cgroup2 mount. Default: all.
    pub cgroup: Option<At<String>>,
    /// http, redirect and tproxy: a shared cache of responses. With redirect and tproxy, requests to port 80 are then
    /// handled one by one, as by a listener of kind http. Default: none.
    pub cache: Option<At<Cache>>,
    /// http, redirect and tproxy: intercept TLS connections according to [tap]. With redirect and tproxy, requests to port
    /// 80 are then handled one by one too. Default false.
    pub tap: Option<At<bool>>,
    /// engine: how it receives packets, and the source addresses of its connections to servers. Default: that of each key.
    pub engine: Option<At<Engine>>,
}

/// How flows reach a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListenKind {
    /// Clients send SOCKS5 or SOCKS6 requests; both work on one port.
    Socks,
    /// Clients send HTTP requests as to a proxy.
    Http,
    /// Connections (or datagrams) to this port are for one server, or for several by name.
    Reverse,
    /// The kernel redirects connections of this host, or forwarded ones, to it.
    Redirect,
    /// The kernel hands it forwarded connections with their original destination.
    Tproxy,
    /// Far side of tunnels, over QUIC and over TLS on the same port.
    Tunnel,
    /// The packet engine, for one server or for several by name. It has its own TCP and no sockets.
    Engine,
}

/// The UDP ports of a SOCKS listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UdpPorts {
    /// One for each connection of a client that asks for UDP ASSOCIATE.
    #[default]
    Each,
    /// The listener's port number, for all clients. They are told apart by address and port.
    Shared,
    /// None: UDP ASSOCIATE is refused.
    Off,
}

/// Which servers may send datagrams to a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UdpFiltering {
    /// Every server, once the client has sent anything.
    EndpointIndependent,
    /// Servers at an address to which the client has sent.
    AddressDependent,
    /// Servers at an address and port to which the client has sent.
    #[default]
    AddressAndPortDependent,
}

/// Which wire layouts of SOCKS6 are accepted.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// The layout is detected from the request.
    Auto,
    /// Only draft-olteanu-intarea-socks-6.
    Draft,
    /// Only the layout of the `socksx` crate.
    Socksx,
}
