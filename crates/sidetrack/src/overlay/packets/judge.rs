//! Applies this node's rules to conversations that another node begins with whole packets: the same rules as for its
//! flows.

use super::Interception;
use crate::carry::{Dialing, gate};
use crate::config::Config;
use crate::overlay::deliver::{flow, is_allowed};
use crate::overlay::shared::Shared;
use sidetrack_core::flow::Protocol;
use sidetrack_core::overlay::packet::{Ends, Refused, Transport};
use sidetrack_sys::sync::lock;
use std::sync::{Arc, Weak};

/// The configuration that the verdicts came from. It is weak: an old configuration with its lists of hosts is freed at
/// once, but its address is not used again.
#[derive(Default)]
pub(super) struct Judged {
    config: Weak<Config>,
    dialing: Weak<Dialing>,
}

impl Interception {
    /// Discards the verdicts if a reload has changed the rules, or if our own ports changed. Then each conversation is
    /// judged again.
    pub(crate) fn look_at_rules(&self, shared: &Shared) {
        let (config, dialing) = (shared.config.load(), shared.dialing.load());
        let mut judged = lock(&self.judged);
        let is_same = std::ptr::eq(judged.config.as_ptr(), Arc::as_ptr(&config))
            && std::ptr::eq(judged.dialing.as_ptr(), Arc::as_ptr(&dialing));
        if !is_same {
            *judged = Judged { config: Arc::downgrade(&config), dialing: Arc::downgrade(&dialing) };
            self.rules().rules_changed();
        }
    }
}

/// Checks whether a node may begin this conversation.
///
/// # Errors
/// No entry of `[[overlay.deliver]]` allows its destination, a rule denies it, or the destination is a port of our own.
pub(super) fn judge(shared: &Shared, from: &str, ends: &Ends) -> Result<(), Refused> {
    let to = ends.destination;
    if !is_allowed(&shared.deliver, from, to) {
        return Err(Refused::Destination);
    }
    of_group(shared, from, ends)
}

/// Checks whether a node may begin this conversation with a group. The entry of the group has allowed its addresses.
///
/// # Errors
/// A rule denies it, or the destination is a port of our own.
pub(super) fn of_group(shared: &Shared, from: &str, ends: &Ends) -> Result<(), Refused> {
    let to = ends.destination;
    let protocol = match ends.transport {
        Transport::Tcp => Protocol::Tcp,
        Transport::Udp => Protocol::Udp,
    };
    let flow = flow(protocol, from, ends.source, to.into());
    let denied = match gate::delivered(&shared.config.load().policy, &flow, vec![to]) {
        Err(failure) => failure.detail,
        // Our listeners speak TCP. A server may have the same port for UDP.
        Ok(_) if ends.transport == Transport::Tcp && shared.dialing.load().is_own(to) => {
            format!("{to} is a listener of this node itself")
        }
        Ok(_) => return Ok(()),
    };
    tracing::info!(%from, destination = %to, client = %ends.source, "delivery of packets denied: {denied}");
    Err(Refused::Denied)
}
