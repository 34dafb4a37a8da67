//! The checked `[export]`.

use http::{HeaderName, HeaderValue};
use sidetrack_core::flow::{Destination, Protocol};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// Where reports of flows go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// A collector of IPFIX.
    pub ipfix: Option<Ipfix>,
    /// A collector of OpenTelemetry.
    pub otlp: Option<Otlp>,
}

/// A collector of IPFIX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipfix {
    /// Where it is.
    pub collector: Destination,
    /// The transport protocol.
    pub transport: Protocol,
    /// Observation domain.
    pub domain: u32,
    /// Time after which templates are sent again over UDP.
    pub refresh: Duration,
    /// Time after which a flow that goes on is reported. `None`: only its end is.
    pub active: Option<Duration>,
    /// Enterprise number of texts without a standard element.
    pub enterprise: Option<u32>,
}

impl fmt::Display for Ipfix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collector, transport, domain, refresh, active, enterprise } = self;
        write!(f, "{collector} ({}, domain {domain}", transport.as_str())?;
        write!(f, ", templates after {refresh:?}, running flows after {active:?}, enterprise {enterprise:?})")
    }
}

/// A collector of OpenTelemetry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Otlp {
    /// Where it is.
    pub collector: Destination,
    /// Whether it is reached by TLS.
    pub secure: bool,
    /// The path before `/v1/traces`, or empty.
    pub prefix: String,
    /// Fields of each request. Their values are secret.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The authorities that sign its certificate. `None`: those of this system.
    pub ca_pem: Option<Arc<str>>,
    /// Time between two reports of metrics.
    pub interval: Duration,
    /// Whether ended flows are sent.
    pub traces: bool,
    /// Whether metrics are sent.
    pub metrics: bool,
    /// Attributes of this node.
    pub resource: BTreeMap<String, String>,
}

impl Otlp {
    /// The value of the field Host.
    pub fn authority(&self) -> String {
        // The zone of an address means something on this host only.
        Destination { zone: 0, ..self.collector.clone() }.to_string()
    }
}

impl fmt::Display for Otlp {
    /// Without the values of headers, but a change of them is seen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collector, secure, prefix, headers, ca_pem, interval, traces, metrics, resource } = self;
        let scheme = if *secure { "https" } else { "http" };
        let mut secrets = DefaultHasher::new();
        headers.iter().for_each(|(name, value)| (name.as_str(), value.as_bytes()).hash(&mut secrets));
        ca_pem.hash(&mut secrets);
        write!(f, "{scheme}://{collector}{prefix} (metrics {metrics} each {interval:?}, traces {traces}")?;
        write!(f, ", files {:04x}, resource {resource:?})", secrets.finish() & 0xffff)
    }
}
