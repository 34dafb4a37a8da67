//! Datagrams to all members of a group: each travels as a whole packet, from the client's address, and each member delivers
//! it as it delivers the packets of `[[overlay.packets]]`. Answers go to the client's address, not over this path.

use crate::carry::Failure;
use crate::carry::datagrams::{Came, Datagrams, Lost, Remote};
use crate::overlay::datagrams;
use crate::overlay::shared::Shared;
use sidetrack_core::association::Dropped;
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::group::GroupName;
use sidetrack_core::overlay::packet;
use sidetrack_core::overlay::service::Service;
use sidetrack_sys::udp::batch::Batch;
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

/// Most destinations of one client whose copies are counted.
const COUNTED_MAX: usize = 1024;

/// A path for the datagrams of one client to a group.
pub(super) struct Grouped {
    shared: Arc<Shared>,
    group: GroupName,
    service: Service,
    client: SocketAddr,
    /// Copies that were sent, by destination.
    copies: BTreeMap<SocketAddr, u64>,
}

impl fmt::Debug for Grouped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a path for datagrams to group {}", self.group)
    }
}

impl Grouped {
    pub(super) fn new(
        shared: Arc<Shared>,
        group: &str,
        service: Service,
        client: SocketAddr,
    ) -> Result<Self, Failure> {
        let unknown = |_| Failure::new(EndReason::Unreachable, format!("there is no group '{group}'"));
        Ok(Self { shared, group: group.parse().map_err(unknown)?, service, client, copies: BTreeMap::new() })
    }

    fn lost(why: Dropped, reason: EndReason, detail: &str) -> Lost {
        Lost { why, failure: Failure::new(reason, detail), fits_bytes: None }
    }
}

impl Datagrams for Grouped {
    fn send(&mut self, to: &Remote, payload: &[u8]) -> Result<(), Lost> {
        let Some(to) = to.address() else {
            let detail = "a group has no node that looks names up: write `resolve = \"local\"`";
            return Err(Self::lost(Dropped::Unsent, EndReason::Unsupported, detail));
        };
        let packet = packet::datagram(self.client, to, payload);
        let packet = packet.filter(|packet| packet.len() <= packet::PACKET_MAX).ok_or_else(|| {
            let detail = "it is too long for one packet, or of another address family than its client";
            let headers = if to.is_ipv4() { 28 } else { 48 };
            let fits_bytes = (to.is_ipv4() == self.client.is_ipv4()).then_some(packet::PACKET_MAX - headers);
            Lost { fits_bytes, ..Self::lost(Dropped::TooLong, EndReason::Unsupported, detail) }
        })?;
        let sent =
            datagrams::send_to_group(&self.shared, (&self.group, None), &self.service, packet, |_, _| ());
        let counters = self.shared.member.counters(&self.group);
        let became = if sent > 0 { &counters.sent } else { &counters.unsent };
        became.fetch_add(1, Relaxed);
        if self.copies.len() < COUNTED_MAX || self.copies.contains_key(&to) {
            *self.copies.entry(to).or_default() += sent;
        }
        if sent > 0 {
            return Ok(());
        }
        let detail = format!("no member of the group '{}' can be reached, or the links are full", self.group);
        Err(Self::lost(Dropped::Unsent, EndReason::Unreachable, &detail))
    }

    fn copies(&self, to: &Remote) -> Option<u64> {
        self.copies.get(&to.address()?).copied()
    }

    fn poll_receive(
        &mut self,
        _: &mut Context<'_>,
        _: &mut Batch,
        _: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>> {
        Poll::Pending
    }
}
