//! An association of one table goes on in another: that of the process that replaces the first one's.

use super::{State, Table};
use crate::association::{Counts, Id, MappingId, Output};
use crate::flow::{Destination, Side};
use crate::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// An open association, without a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Again {
    /// The client's address and port.
    pub client: SocketAddr,
    /// The destination that the client asks for.
    pub destination: Destination,
    /// The side that has sent the first datagram.
    pub from: Side,
    /// The address from which its server sends.
    pub remote: Option<SocketAddr>,
    /// Its idle time.
    pub idle: Duration,
    /// Its lifetime.
    pub lifetime: Option<Duration>,
    /// The time since its first datagram.
    pub age: Duration,
    /// The time since its last datagram.
    pub unused: Duration,
    /// What has passed.
    pub counts: Counts,
}

fn before(now: Instant, time: Duration) -> Instant {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    Instant::from_nanos(now.as_nanos().saturating_sub(nanos))
}

impl Table {
    /// Returns what another table needs to go on with an association. `None`: it is not open.
    pub fn again(&self, now: Instant, id: Id) -> Option<Again> {
        let association = self.alive(id)?;
        let State::Open { idle, lifetime } = association.state else { return None };
        Some(Again {
            client: self.mapping(association.mapping)?.client,
            destination: association.destination.clone(),
            from: association.from,
            remote: association.remote,
            idle,
            lifetime,
            age: now.since(association.begun),
            unused: now.since(association.used),
            counts: association.counts,
        })
    }

    /// Goes on with an association of another table: policy is not asked, and there is no [`Output::Begin`]. `None`: there is no
    /// room, or the client has begun one to the same destination.
    pub fn go_on(&mut self, now: Instant, again: &Again) -> Option<(Id, MappingId)> {
        let known = self.clients.get(&again.client).and_then(|index| self.mapping(*index));
        let is_there = known.is_some_and(|mapping| mapping.destinations.get(&again.destination).is_some());
        if is_there || self.len() >= self.config.max {
            return None;
        }
        let used = before(now, again.unused);
        let slot = self.begin(before(now, again.age), again.client, again.destination.clone(), again.from);
        // It is the last one: the table has just begun it.
        let Some(Output::Begin { id, mapping, .. }) = self.outputs.pop_back() else { return None };
        self.totals.begun -= 1;
        if let Some(association) =
            self.slots.get_mut(slot as usize).and_then(|slot| slot.association.as_mut())
        {
            association.counts = again.counts;
        }
        self.opened(used, id, again.remote, (Some(again.idle), again.lifetime));
        Some((id, mapping))
    }
}
