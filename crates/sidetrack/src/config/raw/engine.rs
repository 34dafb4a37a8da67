//! `engine` of `[[listen]]` as it is written.

use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// How the packet engine receives packets, and the source addresses of its connections to servers. A reload does
/// not change it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// "packet" (packet sockets: every interface) or "xdp" (AF_XDP in the driver). Default "packet".
    pub io: Option<At<EngineIo>>,
    /// Source addresses of connections to servers; they belong to this host. Default: those of `address`.
    pub sources: Option<List<String>>,
    /// Source ports of connections to servers, "first-last". Default "61000-65535", which Linux does not use for
    /// its own connections.
    pub source_ports: Option<At<String>>,
    /// How packets from servers reach the worker that has the connection: "port" (each worker has a part of the
    /// ports) or "ip" (each has its own addresses). Default "port".
    pub steering: Option<At<Steering>>,
    /// Servers chosen by the first bytes of a client, tried in order before `to` or `names`. Default: none.
    #[serde(default)]
    pub choose: Vec<At<Choice>>,
    /// Most connections at a time of each worker, 16 to 16777216. Default 65536.
    pub connections_max: Option<At<u32>>,
    /// Most offloaded connections at a time, 0 (none) to 4194304. The kernel translates the packets of a
    /// connection once nothing is left to decide or to inspect. With io = "xdp" the far end of a veth must
    /// accept frames that XDP sends. Default 0.
    pub offload_max: Option<At<u32>>,
    /// Most connections at a time that a program in the driver forwards from their SYN on, 0 (none) to 65535.
    /// The rules must need neither their bytes nor a count of flows. This number of ports, the last of
    /// `source_ports`, is reserved for them. Only with io = "xdp". Default 0.
    pub kernel_connections_max: Option<At<u32>>,
    /// Longest time that interfaces may collect frames before the kernel takes them, microseconds, 0 (their own
    /// setting) to 10000. Under load this needs less CPU time per packet and adds up to this delay. Default 0.
    pub coalesce_us: Option<At<u32>>,
    /// When SYNs are answered with cookies. "flood": while there are more half-open handshakes than are stored.
    /// "xdp": always, by the program in the driver; user space sees a client after its handshake. "xdp" needs io
    /// = "xdp" and `choose` or `names`, because the client must speak first. Default "flood".
    pub syn_cookies: Option<At<SynCookies>>,
}

/// A server for clients with certain first bytes. Has one of `prefix`, `regex` and `ldap_dn`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// They begin with this text.
    pub prefix: Option<At<String>>,
    /// This regular expression matches within their first 4096 bytes. It is over bytes, in the syntax of Rust's
    /// regex crate. If it does not match yet, more bytes are awaited as long as for a name.
    pub regex: Option<At<String>>,
    /// They are an LDAP request about this entry or one below it: the name of a bind, or the base of a search. After an
    /// anonymous bind the next request decides; the engine answers the bind itself.
    pub ldap_dn: Option<At<String>>,
    /// The server: an address and a port.
    #[schemars(required)]
    pub to: Option<At<String>>,
}

/// How the engine receives and sends packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineIo {
    /// Packet sockets.
    Packet,
    /// AF_XDP, in the driver.
    Xdp,
}

/// How packets from servers reach the worker that has the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Steering {
    /// By port.
    Port,
    /// By address.
    Ip,
}

/// When SYNs are answered with cookies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SynCookies {
    /// During a flood of SYNs.
    Flood,
    /// Always, in the driver.
    Xdp,
}
