//! `[export]`: where reports of flows and metrics are sent.

use super::super::At;
use schemars::JsonSchema;
use serde::Deserialize;

/// Sends reports of ended flows to collectors (docs/export.md). `sidetrack up` reads this table; `sidetrack run` does not.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Sends flows in the format of IPFIX (RFC 7011). Default: off.
    pub ipfix: Option<At<Ipfix>>,
}

/// A collector of IPFIX.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ipfix {
    /// The collector, "host:port"; IPFIX has port 4739.
    #[schemars(required)]
    pub collector: Option<At<String>>,
    /// The transport protocol: "udp" or "tcp". Default "udp".
    pub transport: Option<At<IpfixTransport>>,
    /// Observation domain, 0 to 4294967295: tells the senders behind one address apart. Default 1.
    pub observation_domain: Option<At<u32>>,
    /// Time after which templates are sent again over UDP, milliseconds, 1000 to 86400000. Default 60000.
    pub template_refresh_ms: Option<At<u64>>,
    /// Time after which a flow that goes on is reported, and again after each such time, milliseconds, 1000 to 86400000. 0: only
    /// its end is reported. Default 60000.
    pub active_timeout_ms: Option<At<u64>>,
    /// Private enterprise number, 1 to 4294967295, for the texts without a standard element: rule (element 1), carrier (2),
    /// listener (3) and reason (4). Default: they are left out.
    pub enterprise: Option<At<u32>>,
}

/// The transport protocol to a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IpfixTransport {
    /// Datagrams: what gets lost is lost.
    Udp,
    /// A connection.
    Tcp,
}
