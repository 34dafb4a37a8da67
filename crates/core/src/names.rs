//! Addresses that represent names: the table behind the private DNS of `run`.
//!
//! A program asks our resolver for `db.example.nl`. It gets an address of 198.18.0.0/15 and connects to it (the range
//! is for benchmarks, RFC 2544, and unused on the Internet). The table maps the connection's destination back. So the
//! proxy gets the name, and the name never leaves the machine as a query.
//!
//! A program may keep an address far longer than the TTL of the answer. So a mapping is stable while it is in use.
//! When the table is full, only the address whose time is over first gets another name, and only after
//! [`NameTable::minimum_age`]. A connection to the wrong host would be worse than a failed lookup.

use crate::flow::HostName;
use crate::net::IpNet;
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

/// The address of our own resolver, which is never assigned to a name.
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// First address of the range, 198.18.0.0.
const BASE: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// Length of the range's prefix.
const PREFIX_BITS: u8 = 15;
/// Addresses that are assigned in each /24: all except .0 and .255, which some stacks treat as a network or broadcast
/// address.
const PER_BLOCK: u32 = 254;
/// /24 blocks in the range.
const BLOCKS: u32 = 1 << (24 - PREFIX_BITS as u32);

/// Names and their addresses, limited in number. Both directions take logarithmic time.
#[derive(Debug)]
pub struct NameTable {
    capacity: usize,
    minimum_age: Duration,
    /// The time for which an address is kept that was returned, and to which no connection was made since.
    unconnected_age: Duration,
    slots: Vec<Slot>,
    by_name: BTreeMap<HostName, u32>,
    /// Slots by the time from which they may get another name.
    by_end: BTreeSet<(Instant, u32)>,
}

#[derive(Debug)]
struct Slot {
    name: HostName,
    /// From then on, the address may represent another name.
    kept_until: Instant,
}

impl NameTable {
    /// Most names in a table: every address of the range except .0 and .255 of each /24, and [`RESOLVER`].
    pub const MAX_CAPACITY: usize = (BLOCKS * PER_BLOCK - 1) as usize;

    /// The default time for which an address must be unused before it may represent another name.
    ///
    /// It is 10 minutes: Java keeps an answer for 30 s, browsers for a minute, connection pools for a few minutes.
    pub const DEFAULT_MINIMUM_AGE: Duration = Duration::from_secs(600);

    /// Makes an empty table for `capacity` names, at least 1 and at most [`Self::MAX_CAPACITY`].
    pub fn new(capacity: usize) -> Self {
        Self::with_minimum_age(capacity, Self::DEFAULT_MINIMUM_AGE)
    }

    /// As [`Self::new`], with another minimum age before an address is reused.
    pub fn with_minimum_age(capacity: usize, minimum_age: Duration) -> Self {
        Self {
            capacity: capacity.clamp(1, Self::MAX_CAPACITY),
            minimum_age,
            unconnected_age: minimum_age,
            slots: Vec::new(),
            by_name: BTreeMap::new(),
            by_end: BTreeSet::new(),
        }
    }

    /// Keeps an address to which no connection was made for this time only, at most [`Self::minimum_age`]. So a client that
    /// asks for many names fills the table less soon.
    #[must_use]
    pub fn with_unconnected_age(mut self, age: Duration) -> Self {
        self.unconnected_age = age.min(self.minimum_age);
        self
    }

    /// Returns the address that represents `name`, the same one as before if it has one. Counts as a use.
    ///
    /// `None` if the table is full and no address was unused for the minimum age. Answer SERVFAIL then, so that the
    /// program tries again later.
    pub fn address_for(&mut self, name: &HostName, now: Instant) -> Option<Ipv4Addr> {
        let until = now + self.unconnected_age;
        if let Some(&index) = self.by_name.get(name) {
            self.keep(index, until);
            return address_of(index);
        }
        let slot = Slot { name: name.clone(), kept_until: until };
        let index = if self.slots.len() < self.capacity {
            let index = u32::try_from(self.slots.len()).ok()?;
            self.slots.push(slot);
            index
        } else {
            self.reclaim(slot, now)?
        };
        self.by_name.insert(name.clone(), index);
        self.by_end.insert((until, index));
        address_of(index)
    }

    /// Returns the name that `address` represents, if any. Does not count as a use; see [`Self::name_used`].
    pub fn name_of(&self, address: Ipv4Addr) -> Option<HostName> {
        let slot = self.slots.get(index_of(address)? as usize)?;
        Some(slot.name.clone())
    }

    /// As [`Self::name_of`], for a connection made now. Counts as a use.
    pub fn name_used(&mut self, address: Ipv4Addr, now: Instant) -> Option<HostName> {
        let index = index_of(address)?;
        let name = self.slots.get(index as usize)?.name.clone();
        self.keep(index, now + self.minimum_age);
        Some(name)
    }

    /// Returns what each address represents, and for how long it is kept at least, in the order that [`Self::put`] needs.
    pub fn rows(&self, now: Instant) -> impl Iterator<Item = (Ipv4Addr, &HostName, Duration)> {
        self.slots.iter().enumerate().filter_map(move |(index, slot)| {
            let address = address_of(u32::try_from(index).ok()?)?;
            Some((address, &slot.name, slot.kept_until.since(now)))
        })
    }

    /// Adds a row of another table. Returns false if it does not follow the rows that are here, or if the table is full.
    pub fn put(&mut self, (address, name, kept): (Ipv4Addr, HostName, Duration), now: Instant) -> bool {
        let Some(index) = index_of(address).filter(|index| *index as usize == self.slots.len()) else {
            return false;
        };
        if self.slots.len() >= self.capacity || self.by_name.contains_key(&name) {
            return false;
        }
        let kept_until = now + kept.min(self.minimum_age);
        self.slots.push(Slot { name: name.clone(), kept_until });
        self.by_name.insert(name, index);
        self.by_end.insert((kept_until, index));
        true
    }

    /// The range of all addresses that represent names, 198.18.0.0/15.
    pub fn range() -> IpNet {
        IpNet::new(Ipv4Addr::from_bits(BASE).into(), PREFIX_BITS)
    }

    /// Whether `address` is in 198.18.0.0/15, even if it represents no name now.
    ///
    /// A connection to such an address without a name must be refused, and never dialled.
    pub const fn contains(address: Ipv4Addr) -> bool {
        address.to_bits() >> (32 - PREFIX_BITS as u32) == BASE >> (32 - PREFIX_BITS as u32)
    }

    /// Returns the number of names.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns how long an address must be without a connection before it may represent another name.
    pub const fn minimum_age(&self) -> Duration {
        self.minimum_age
    }

    /// Keeps slot `index` until this time, or longer. If the clock went back, nothing changes.
    fn keep(&mut self, index: u32, until: Instant) {
        if let Some(slot) = self.slots.get_mut(index as usize)
            && slot.kept_until < until
        {
            self.by_end.remove(&(slot.kept_until, index));
            slot.kept_until = until;
            self.by_end.insert((until, index));
        }
    }

    /// Takes the slot whose time is over first from its name, and puts `new` there. The caller adds it to the indexes.
    fn reclaim(&mut self, new: Slot, now: Instant) -> Option<u32> {
        let &(until, index) = self.by_end.first()?;
        if now < until {
            return None;
        }
        let slot = self.slots.get_mut(index as usize)?;
        self.by_end.remove(&(until, index));
        let old = std::mem::replace(slot, new);
        self.by_name.remove(&old.name);
        Some(index)
    }
}

/// Returns the address of slot `index`. Slot 0 is 198.18.0.2.
fn address_of(index: u32) -> Option<Ipv4Addr> {
    // The position among all usable addresses. Position 0 belongs to the resolver.
    let position = index.checked_add(1)?;
    let (block, host) = (position / PER_BLOCK, position % PER_BLOCK + 1);
    (block < BLOCKS).then(|| Ipv4Addr::from_bits(BASE + block * 256 + host))
}

/// Returns the slot of `address`: the inverse of [`address_of`].
fn index_of(address: Ipv4Addr) -> Option<u32> {
    if !NameTable::contains(address) {
        return None;
    }
    let offset = address.to_bits() - BASE;
    let (block, host) = (offset / 256, offset % 256);
    if host == 0 || host == 255 {
        return None;
    }
    (block * PER_BLOCK + host - 1).checked_sub(1)
}
