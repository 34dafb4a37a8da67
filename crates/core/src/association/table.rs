//! The table: lookups, room and time-outs.

mod again;

pub use again::Again;

use super::few::Few;
use super::order::{Linked, Links, Order};
use super::{
    Config, Counts, Dropped, Filtering, HELD_BYTES_MAX, HELD_MAX, Id, Input, MappingId, Output, Totals,
};
use crate::deadlines::Deadlines;
use crate::flow::{Destination, EndReason, Side};
use crate::limit::source_key;
use crate::time::Instant;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked,
    Open { idle: Duration, lifetime: Option<Duration> },
    Refused,
}

/// One association.
#[derive(Clone, Debug)]
struct Association {
    mapping: u32,
    destination: Destination,
    remote: Option<SocketAddr>,
    state: State,
    from: Side,
    begun: Instant,
    /// The last datagram that passed or was held. Of a refused one: when it was refused.
    used: Instant,
    counts: Counts,
    held: u32,
    held_bytes: usize,
    /// The ICMP error since the server's last datagram.
    error: Option<EndReason>,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    generation: u32,
    association: Option<Association>,
    links: [Links; 2],
}

#[derive(Clone, Debug)]
struct Mapping {
    client: SocketAddr,
    associations: u32,
    destinations: Few<Destination>,
    remotes: Few<SocketAddr>,
}

/// The associations of one client address, refused ones too.
#[derive(Clone, Debug, Default)]
struct Source {
    order: Order,
    associations: usize,
}

/// The lists that a slot is in: all open, or all refused, and those of its client.
const ALL: usize = 0;
const OF_CLIENT: usize = 1;

/// The slots, with the links of one list.
struct List<'a, const WHICH: usize>(&'a mut [Slot]);

impl<const WHICH: usize> Linked for List<'_, WHICH> {
    fn links(&mut self, slot: u32) -> Option<&mut Links> {
        self.0.get_mut(slot as usize)?.links.get_mut(WHICH)
    }
}

/// Adds a last element. A short list has no more room than it needs: the table of a SOCKS client has one association mostly.
fn add_last<T>(list: &mut Vec<T>, last: T) {
    if list.len() < 4 {
        list.reserve_exact(1);
    }
    list.push(last);
}

/// The table of one listening socket.
#[derive(Clone, Debug)]
pub struct Table {
    config: Config,
    slots: Vec<Slot>,
    free: Vec<u32>,
    mappings: Vec<Option<Mapping>>,
    free_mappings: Vec<u32>,
    clients: Few<SocketAddr>,
    sources: Few<IpAddr, Source>,
    /// All that are asked or open.
    alive: Order,
    refused: Order,
    held_bytes: usize,
    deadlines: Deadlines,
    outputs: VecDeque<Output>,
    totals: Totals,
}

impl Table {
    /// Makes an empty table.
    pub fn new(config: Config) -> Self {
        let at_least_one = |number: usize| number.clamp(1, u32::MAX as usize);
        let config =
            Config { max: at_least_one(config.max), per_client: at_least_one(config.per_client), ..config };
        Self {
            config,
            slots: Vec::new(),
            free: Vec::new(),
            mappings: Vec::new(),
            free_mappings: Vec::new(),
            clients: Few::default(),
            sources: Few::default(),
            alive: Order::default(),
            refused: Order::default(),
            held_bytes: 0,
            deadlines: Deadlines::new(),
            outputs: VecDeque::new(),
            totals: Totals::default(),
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match input {
            Input::FromClient { client, destination, bytes } => {
                self.client_sent(now, client, destination, bytes);
            }
            Input::FromServer { mapping, remote, bytes } => self.server_sent(now, mapping, remote, bytes),
            Input::FromServerOf { id, bytes } => match self.alive(id) {
                Some(_) => self.pass(now, id.slot, Side::Server, bytes),
                None => self.drop_one(Dropped::Unknown),
            },
            Input::Opened { id, remote, idle, lifetime } => self.opened(now, id, remote, (idle, lifetime)),
            Input::Refused(id, reason) => self.refuse(now, id, reason),
            Input::Error(id, reason) => {
                if let Some(association) = self.find(id) {
                    association.error = Some(reason);
                }
            }
            Input::End(id, reason) => {
                if self.find(id).is_some() {
                    self.remove(id.slot, Some(reason));
                }
            }
            Input::Close(mapping, reason) => self.close(mapping, reason),
            Input::Tick => self.tick(now),
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call [`Self::handle`] with [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        self.deadlines.deadline()
    }

    /// Returns the client and the destination of an association that has begun and is not over.
    pub fn parties(&self, id: Id) -> Option<(SocketAddr, &Destination)> {
        let association = self.alive(id)?;
        Some((self.mapping(association.mapping)?.client, &association.destination))
    }

    /// Returns what has passed so far.
    pub fn counts(&self, id: Id) -> Option<Counts> {
        Some(self.alive(id)?.counts)
    }

    /// Returns the mapping of a client.
    pub fn mapping_of(&self, client: SocketAddr) -> Option<MappingId> {
        self.clients.get(&client).copied().map(MappingId)
    }

    /// Returns the client of a mapping.
    pub fn client_of(&self, mapping: MappingId) -> Option<SocketAddr> {
        Some(self.mapping(mapping.0)?.client)
    }

    /// Returns the number of associations, refused ones too. Never above [`Config::max`].
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are no associations.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the counts since the start.
    pub const fn totals(&self) -> Totals {
        self.totals
    }

    fn mapping(&self, index: u32) -> Option<&Mapping> {
        self.mappings.get(index as usize)?.as_ref()
    }

    fn alive(&self, id: Id) -> Option<&Association> {
        let slot = self.slots.get(id.slot as usize).filter(|slot| slot.generation == id.generation)?;
        slot.association.as_ref().filter(|association| association.state != State::Refused)
    }

    /// Finds an association that has begun and is not over.
    fn find(&mut self, id: Id) -> Option<&mut Association> {
        let slot = self.slots.get_mut(id.slot as usize).filter(|slot| slot.generation == id.generation)?;
        slot.association.as_mut().filter(|association| association.state != State::Refused)
    }

    fn id(&self, slot: u32) -> Id {
        Id { slot, generation: self.slots.get(slot as usize).map_or(0, |slot| slot.generation) }
    }

    fn drop_one(&mut self, why: Dropped) {
        self.totals.dropped[why as usize] += 1;
        self.outputs.push_back(Output::Drop(why));
    }

    fn client_sent(&mut self, now: Instant, client: SocketAddr, destination: &Destination, bytes: usize) {
        let known = self.clients.get(&client).copied();
        let slot = known
            .and_then(|index| self.mapping(index))
            .and_then(|mapping| mapping.destinations.get(destination).copied());
        match slot {
            Some(slot) => self.pass(now, slot, Side::Client, bytes),
            None => {
                self.make_room(client);
                let slot = self.begin(now, client, destination.clone(), Side::Client);
                self.pass(now, slot, Side::Client, bytes);
            }
        }
    }

    fn server_sent(&mut self, now: Instant, id: MappingId, remote: SocketAddr, bytes: usize) {
        let Some(mapping) = self.mapping(id.0) else { return self.drop_one(Dropped::Unknown) };
        if let Some(&slot) = mapping.remotes.get(&remote) {
            return self.pass(now, slot, Side::Server, bytes);
        }
        let is_address_known = || {
            let from = SocketAddr::new(remote.ip(), 0);
            mapping.remotes.from(&from).is_some_and(|other| other.ip() == remote.ip())
        };
        let may_begin = match self.config.filtering {
            Filtering::EndpointIndependent => true,
            Filtering::AddressDependent => is_address_known(),
            Filtering::AddressAndPortDependent => false,
        };
        if !may_begin {
            return self.drop_one(Dropped::Filtered);
        }
        let (client, destination) = (mapping.client, Destination::from(remote));
        if let Some(&slot) = mapping.destinations.get(&destination) {
            // The client has asked for it, but it is not open, or refused.
            return self.pass(now, slot, Side::Server, bytes);
        }
        if self.len() >= self.config.max {
            return self.drop_one(Dropped::Full);
        }
        let slot = self.begin(now, client, destination, Side::Server);
        self.pass(now, slot, Side::Server, bytes);
    }

    /// Decides about a datagram of an association.
    fn pass(&mut self, now: Instant, slot: u32, from: Side, bytes: usize) {
        let (id, total) = (self.id(slot), self.held_bytes);
        let Some(association) = self.slots.get_mut(slot as usize).and_then(|slot| slot.association.as_mut())
        else {
            return self.drop_one(Dropped::Unknown);
        };
        match association.state {
            State::Refused => return self.drop_one(Dropped::Refused),
            State::Open { .. } => {
                association.counts.add(from, 1, bytes);
                if from == Side::Server {
                    association.error = None;
                }
                let output = match from {
                    Side::Client => Output::Forward(id),
                    Side::Server => Output::Deliver(id),
                };
                self.outputs.push_back(output);
            }
            // Held datagrams all go the same way.
            State::Asked if association.from != from => return self.drop_one(Dropped::Waiting),
            State::Asked => {
                if association.held >= HELD_MAX || total.saturating_add(bytes) > HELD_BYTES_MAX {
                    return self.drop_one(Dropped::Waiting);
                }
                association.held += 1;
                association.held_bytes += bytes;
                self.held_bytes += bytes;
                self.outputs.push_back(Output::Hold(id));
            }
        }
        // A clock that goes back changes nothing.
        association.used = association.used.max(now);
        let source = self.mapping_source(slot);
        self.alive.used(&mut List::<ALL>(&mut self.slots), slot);
        if let Some(source) = source.and_then(|source| self.sources.get_mut(&source)) {
            source.order.used(&mut List::<OF_CLIENT>(&mut self.slots), slot);
        }
    }

    /// Returns the key of the client that an association belongs to.
    fn mapping_source(&self, slot: u32) -> Option<IpAddr> {
        let association = self.slots.get(slot as usize)?.association.as_ref()?;
        Some(source_key(self.mapping(association.mapping)?.client.ip()))
    }

    /// Ends the association that was unused for longest, if the table is full: one of this client if it has its share.
    fn make_room(&mut self, client: SocketAddr) {
        if self.len() < self.config.max {
            return;
        }
        let own = self.sources.get(&source_key(client.ip()));
        let own = own.filter(|source| source.associations >= self.config.per_client);
        let leaves = match own {
            Some(source) => source.order.oldest(),
            None => self.refused.oldest().or(self.alive.oldest()),
        };
        if let Some(slot) = leaves {
            let is_alive = self.find(self.id(slot)).is_some();
            self.totals.left += u64::from(is_alive);
            self.remove(slot, is_alive.then_some(EndReason::Limit));
        }
    }

    /// Ends the association that was unused for longest, apart from this one, because the driver has no descriptor for this
    /// one. `own`: only one of the same client. Returns what it has ended, also reported by [`Output::End`].
    pub fn leave_for(&mut self, id: Id, own: bool) -> Option<(Id, Counts)> {
        let source = self.mapping_source(id.slot)?;
        let mut next = if own { self.sources.get(&source)?.order.oldest() } else { self.alive.oldest() };
        let (slot, leaves, counts) = loop {
            let slot = next?;
            let leaves = self.id(slot);
            // Refused ones use no descriptor.
            match self.alive(leaves).map(|association| association.counts) {
                Some(counts) if slot != id.slot => break (slot, leaves, counts),
                _ if own => next = Order::next(&mut List::<OF_CLIENT>(&mut self.slots), slot),
                _ => next = Order::next(&mut List::<ALL>(&mut self.slots), slot),
            }
        };
        self.totals.left += 1;
        self.remove(slot, Some(EndReason::Limit));
        Some((leaves, counts))
    }

    /// As [`Table::leave_for`], for a driver whose hop has no room: ends the association that was unused for longest among those
    /// that `fits` accepts.
    pub fn leave_among(&mut self, id: Id, fits: impl Fn(Id) -> bool) -> Option<(Id, Counts)> {
        let mut next = self.alive.oldest();
        loop {
            let slot = next?;
            let leaves = self.id(slot);
            match self.alive(leaves).map(|association| association.counts) {
                Some(counts) if slot != id.slot && fits(leaves) => {
                    self.totals.left += 1;
                    self.remove(slot, Some(EndReason::Limit));
                    return Some((leaves, counts));
                }
                _ => next = Order::next(&mut List::<ALL>(&mut self.slots), slot),
            }
        }
    }

    /// Begins an association, for which there is room. Returns its slot.
    fn begin(&mut self, now: Instant, client: SocketAddr, destination: Destination, from: Side) -> u32 {
        let known = self.clients.get(&client).copied();
        let index = known.unwrap_or_else(|| self.begin_mapping(client));
        let slot = self.free.pop().unwrap_or_else(|| {
            add_last(&mut self.slots, Slot::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(mapping) = self.mappings.get_mut(index as usize).and_then(Option::as_mut) {
            mapping.associations += 1;
            mapping.destinations.add(destination.clone(), slot);
        }
        if let Some(place) = self.slots.get_mut(slot as usize) {
            place.association = Some(Association {
                mapping: index,
                destination,
                remote: None,
                state: State::Asked,
                from,
                begun: now,
                used: now,
                counts: Counts::default(),
                held: 0,
                held_bytes: 0,
                error: None,
            });
        }
        self.alive.append(&mut List::<ALL>(&mut self.slots), slot);
        let source = source_key(client.ip());
        self.sources.add(source, Source::default());
        if let Some(source) = self.sources.get_mut(&source) {
            source.associations += 1;
            source.order.append(&mut List::<OF_CLIENT>(&mut self.slots), slot);
        }
        self.totals.begun += 1;
        self.deadlines.by(slot, now + self.config.opening);
        let (id, mapping) = (self.id(slot), MappingId(index));
        self.outputs.push_back(Output::Begin { id, mapping, is_mapping_new: known.is_none(), from });
        slot
    }

    fn begin_mapping(&mut self, client: SocketAddr) -> u32 {
        let mapping =
            Mapping { client, associations: 0, destinations: Few::default(), remotes: Few::default() };
        let index = self.free_mappings.pop().unwrap_or_else(|| {
            add_last(&mut self.mappings, None);
            u32::try_from(self.mappings.len() - 1).unwrap_or(u32::MAX)
        });
        if let Some(place) = self.mappings.get_mut(index as usize) {
            *place = Some(mapping);
        }
        self.clients.add(client, index);
        index
    }

    fn opened(
        &mut self,
        now: Instant,
        id: Id,
        remote: Option<SocketAddr>,
        (idle, lifetime): (Option<Duration>, Option<Duration>),
    ) {
        let (idle, lifetime) = (idle.unwrap_or(self.config.idle), lifetime.or(self.config.lifetime));
        let Config { opening, refused_for, .. } = self.config;
        let Some(association) = self.find(id).filter(|association| association.state == State::Asked) else {
            return;
        };
        association.state = State::Open { idle, lifetime };
        association.remote = remote;
        let held_bytes = std::mem::take(&mut association.held_bytes);
        let held = std::mem::take(&mut association.held);
        association.counts.add(association.from, held.into(), held_bytes);
        association.used = association.used.max(now);
        let (index, due) = (association.mapping, due(association, opening, refused_for));
        self.held_bytes -= held_bytes;
        if let (Some(remote), Some(mapping)) =
            (remote, self.mappings.get_mut(index as usize).and_then(Option::as_mut))
        {
            // A name may lead to an address that the client has asked for too: the first one gets the answers.
            mapping.remotes.add(remote, id.slot);
        }
        self.deadlines.by(id.slot, due);
        if held > 0 {
            self.outputs.push_back(Output::Release(id));
        }
    }

    fn refuse(&mut self, now: Instant, id: Id, reason: EndReason) {
        let refused_for = self.config.refused_for;
        let Some(association) = self.find(id).filter(|association| association.state == State::Asked) else {
            return;
        };
        association.state = State::Refused;
        association.used = now;
        let held_bytes = std::mem::take(&mut association.held_bytes);
        let counts = association.counts;
        self.held_bytes -= held_bytes;
        self.alive.remove(&mut List::<ALL>(&mut self.slots), id.slot);
        self.refused.append(&mut List::<ALL>(&mut self.slots), id.slot);
        self.deadlines.by(id.slot, now + refused_for);
        self.outputs.push_back(Output::End { id, reason, counts });
    }

    /// Frees a slot. `reason`: it was not over yet.
    fn remove(&mut self, slot: u32, reason: Option<EndReason>) {
        let id = self.id(slot);
        let source = self.mapping_source(slot);
        let place = self.slots.get_mut(slot as usize);
        let Some(association) = place.and_then(|place| place.association.take()) else { return };
        let order = if association.state == State::Refused { &mut self.refused } else { &mut self.alive };
        order.remove(&mut List::<ALL>(&mut self.slots), slot);
        if let Some(key) = source
            && let Some(source) = self.sources.get_mut(&key)
        {
            source.order.remove(&mut List::<OF_CLIENT>(&mut self.slots), slot);
            source.associations -= 1;
            if source.associations == 0 {
                self.sources.remove(&key);
            }
        }
        self.held_bytes -= association.held_bytes;
        if let Some(place) = self.slots.get_mut(slot as usize) {
            place.generation = place.generation.wrapping_add(1);
        }
        self.free.push(slot);
        if let Some(reason) = reason {
            self.outputs.push_back(Output::End { id, reason, counts: association.counts });
        }
        self.leave_mapping(&association, slot);
    }

    fn leave_mapping(&mut self, association: &Association, slot: u32) {
        let index = association.mapping;
        let Some(place) = self.mappings.get_mut(index as usize) else { return };
        let Some(mapping) = place else { return };
        mapping.destinations.remove(&association.destination);
        if let Some(remote) = association.remote
            && mapping.remotes.get(&remote) == Some(&slot)
        {
            mapping.remotes.remove(&remote);
        }
        mapping.associations -= 1;
        if mapping.associations == 0 {
            self.clients.remove(&mapping.client);
            *place = None;
            self.free_mappings.push(index);
            self.outputs.push_back(Output::Unmapped(MappingId(index)));
        }
    }

    fn close(&mut self, mapping: MappingId, reason: EndReason) {
        // The last one that is removed takes the mapping with it.
        while let Some(slot) = self.mapping(mapping.0).and_then(|mapping| mapping.destinations.any().copied())
        {
            let is_alive = self.find(self.id(slot)).is_some();
            self.remove(slot, is_alive.then_some(reason));
        }
    }

    fn tick(&mut self, now: Instant) {
        let Config { opening, refused_for, .. } = self.config;
        while let Some(slot) = self.deadlines.due(now) {
            let association = self.slots.get(slot as usize).and_then(|slot| slot.association.as_ref());
            let Some(association) = association else { continue };
            let due = due(association, opening, refused_for);
            if now < due {
                self.deadlines.by(slot, due);
                continue;
            }
            let reason = over(association, now);
            self.remove(slot, reason);
        }
    }
}

/// Returns when an association ends if nothing happens.
fn due(association: &Association, opening: Duration, refused_for: Duration) -> Instant {
    match association.state {
        State::Asked => association.begun + opening,
        State::Refused => association.used + refused_for,
        State::Open { idle, lifetime } => {
            let idle = association.used + idle;
            lifetime.map_or(idle, |lifetime| idle.min(association.begun + lifetime))
        }
    }
}

/// Returns the reason of an association whose time is over. `None`: it was refused before.
fn over(association: &Association, now: Instant) -> Option<EndReason> {
    match association.state {
        State::Asked => Some(EndReason::ConnectTimeout),
        State::Refused => None,
        State::Open { lifetime, .. }
            if lifetime.is_some_and(|lifetime| now >= association.begun + lifetime) =>
        {
            Some(EndReason::Lifetime)
        }
        State::Open { .. } => Some(association.error.unwrap_or(EndReason::Idle)),
    }
}
