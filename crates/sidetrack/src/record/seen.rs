//! The destination of a flow, as a profile of `run` would name it.

use super::FlowRecord;
use sidetrack_core::flow::{EndReason, Host, Intercept};
use sidetrack_core::jail::Seen;

/// Whether we have refused a flow, and not the network.
pub const fn is_refusal(reason: EndReason) -> bool {
    matches!(reason, EndReason::PolicyDenied | EndReason::SecretRefused)
}

/// Returns the destination of a flow that reached it or that was refused. Under `run` it is what the program asked for; other
/// listeners see an address, and the name in the first bytes is what a program would ask for under `run`.
pub fn seen(record: &FlowRecord<'_>) -> Option<Seen> {
    let refused = record.reason.is_some_and(is_refusal);
    let to = record.orig_dst.as_deref().filter(|_| refused || record.connect_seconds.is_some())?;
    let asked = record.intercept == Some(Intercept::Run);
    let named = record.host.as_deref().filter(|_| !asked && matches!(to.host, Host::Ip(_)));
    let named = named.and_then(|name| name.parse().ok()).map(Host::Name);
    Some(Seen {
        refused,
        host: named.unwrap_or_else(|| to.host.clone()),
        port: to.port,
        protocol: record.protocol.unwrap_or_default(),
        program: record.process.as_deref().map(str::to_owned),
    })
}
