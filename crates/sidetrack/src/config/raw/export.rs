//! `[export]`: where reports of flows and metrics are sent.

use super::super::At;
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Sends reports of ended flows to collectors (docs/export.md). `sidetrack up` reads this table; `sidetrack run` does not.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Sends flows in the format of IPFIX (RFC 7011). Default: off.
    pub ipfix: Option<At<Ipfix>>,
    /// Sends flows as spans, and metrics, to OpenTelemetry (OTLP over HTTP). Default: off.
    pub otlp: Option<At<Otlp>>,
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

/// A collector of OpenTelemetry, by OTLP over HTTP.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Otlp {
    /// The collector, "http://host:port" or "https://host:port", with a path before /v1/traces if it has one. Default port 4318.
    #[schemars(required)]
    pub endpoint: Option<At<String>>,
    /// A file with fields for each request, such as "Authorization: Bearer TOKEN", one per line. Default: none.
    pub headers_file: Option<At<String>>,
    /// A PEM file with the authorities that sign the collector's certificate. Default: those of this system.
    pub ca: Option<At<String>>,
    /// Time between two reports of metrics, milliseconds, 1000 to 3600000. Default 60000.
    pub interval_ms: Option<At<u64>>,
    /// Whether ended flows are sent, as spans. Default true.
    pub traces: Option<bool>,
    /// Whether metrics are sent, those of /metrics. Default true.
    pub metrics: Option<bool>,
    /// Attributes of this node, such as { "deployment.environment.name" = "test" }. Default: "service.name" is "sidetrack",
    /// "service.version" its version, and "service.instance.id" differs at each start.
    #[serde(default)]
    pub resource: BTreeMap<String, At<String>>,
}
