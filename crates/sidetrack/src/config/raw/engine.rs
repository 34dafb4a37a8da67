//! `engine` of `[[listen]]` as it is written.

use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// How the packet engine gets at packets, and where its connections to servers come from. A reload does not change it.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// "packet" (packet sockets: every interface) or "xdp" (AF_XDP in the driver). Default "packet".
    pub io: Option<At<EngineIo>>,
    /// Addresses of this host that connections to servers come from. Default: those of `address`.
    pub sources: Option<List<String>>,
    /// Their ports, "first-last". Default "61000-65535", which Linux gives to no connection of its own.
    pub source_ports: Option<At<String>>,
    /// How the answers of servers find the worker that asked: "port" (each worker has a part of the ports) or "ip" (each
    /// has addresses of its own). Default "port".
    pub steering: Option<At<Steering>>,
    /// Servers by the first bytes of a client, tried in order before `to` or `names`. Default: none.
    #[serde(default)]
    pub choose: Vec<At<Choice>>,
    /// Most connections at a time of each worker, 16 to 16777216. Default 65536.
    pub connections_max: Option<At<u32>>,
    /// Most connections at a time whose packets the kernel translates by itself, once nothing is left to decide or to look
    /// at, 0 (none) to 4194304. With io = "xdp" the far end of a veth must take frames that XDP sends. Default 0.
    pub offload_max: Option<At<u32>>,
    /// Most connections at a time that a program in the driver carries from their SYN on, where the rules need neither their
    /// bytes nor a count of flows, 0 (none) to 65535; as many of the last of `source_ports` are theirs. Only with io = "xdp".
    /// Default 0.
    pub kernel_connections_max: Option<At<u32>>,
    /// How long frames may gather in the interfaces before the kernel takes them, microseconds, 0 (as long as they do) to 10000:
    /// less CPU time for a packet while many come, and as much more delay. Default 0.
    pub coalesce_us: Option<At<u32>>,
    /// When SYNs are answered with cookies: "flood" (while more handshakes are half done than are kept) or "xdp" (always, by the
    /// program in the driver: user space hears of a client when its handshake is done). "xdp" only with io = "xdp" and
    /// `choose` or `names`: the client has to speak first. Default "flood".
    pub syn_cookies: Option<At<SynCookies>>,
}

/// A server for clients whose first bytes are like this; one of `prefix`, `regex` and `ldap_dn`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// They begin with this text.
    pub prefix: Option<At<String>>,
    /// This regular expression is found in their first 4096: of bytes, in the syntax of Rust's regex crate. Those in which
    /// it is not found yet are waited for as long as a name.
    pub regex: Option<At<String>>,
    /// They are an LDAP request about this entry or one below it: the name of a bind, the base of a search.
    pub ldap_dn: Option<At<String>>,
    /// The server, an address and a port.
    #[schemars(required)]
    pub to: Option<At<String>>,
}

/// How the engine gets at packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EngineIo {
    /// Packet sockets.
    Packet,
    /// AF_XDP, in the driver.
    Xdp,
}

/// How the answers of servers find the worker that asked.
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
    /// In a flood.
    Flood,
    /// Always, in the driver.
    Xdp,
}
