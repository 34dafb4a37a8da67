//! `[[tunnel]]` as it is written.

use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;

/// A long-lived connection to a far side: a listener of kind "tunnel" of another sidetrack.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tunnel {
    /// Its name, unique; rules say `carrier = "tunnel:<name>"`.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// The far side, "host:port", or a list of its addresses. A new flow uses the first one that is connected.
    #[schemars(required)]
    pub address: Option<List<String>>,
    /// A file with this host's certificate chain and its private key, in PEM (`sidetrack tunnel key`).
    #[schemars(required)]
    pub identity: Option<At<String>>,
    /// A file with the certificate of the authority that signed the far side's, in PEM. Either this or `pins`.
    pub ca: Option<At<String>>,
    /// The keys of the far side, each "sha256//BASE64", or "NAME=sha256//BASE64" if the certificate must have this name too.
    pub pins: Option<List<String>>,
    /// With `ca`: the far side's name in its certificate. Default: the host of `address`.
    pub server_name: Option<At<String>>,
    /// The transport protocol. Default "auto".
    pub transport: Option<At<Transport>>,
    /// Time between two keep-alive messages, milliseconds, 100 to 60000. Default 2000.
    pub keepalive_ms: Option<At<u64>>,
    /// After this time of silence the path is lost and its flows end, milliseconds, 500 to 600000. Must be more
    /// than `keepalive_ms`. Default 6000.
    pub lost_after_ms: Option<At<u64>>,
}

/// The transport protocol of a tunnel.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// QUIC, or TLS over TCP if UDP does not get through.
    Auto,
    /// QUIC only.
    Quic,
    /// TLS over TCP only.
    Tls,
}
