//! The checked `[export]`.

use sidetrack_core::flow::{Destination, Protocol};
use std::fmt;
use std::time::Duration;

/// Where reports of flows go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// A collector of IPFIX.
    pub ipfix: Option<Ipfix>,
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
