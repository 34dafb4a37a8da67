//! Limits the handshakes with peers that dialled us: in total, for each source address, and for all unknown peers
//! together, so that configured neighbours always find a free place.

use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard};

/// Most handshakes at a time.
const PLACES: usize = 512;
/// Most of these for source addresses that no member is configured with.
const STRANGERS_MAX: usize = 384;
/// Most of these for one such source. A neighbour behind NAT dials at most this many at once.
const SOURCE_MAX: usize = 256;

/// Counts the handshakes.
pub(super) struct Places {
    neighbours: BTreeSet<IpAddr>,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    strangers: usize,
    by_source: BTreeMap<IpAddr, usize>,
}

/// A place for one handshake; it becomes free when this is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    source: IpAddr,
}

impl Places {
    /// Returns free places. `neighbours` are the addresses that neighbours are configured with.
    pub(super) fn new(neighbours: impl Iterator<Item = IpAddr>) -> Arc<Self> {
        let neighbours = neighbours.map(|address| address.to_canonical()).collect();
        Arc::new(Self { neighbours, taken: Mutex::default() })
    }

    /// Takes a place for a connection from this address. None: the limit is reached, and the connection must be closed.
    pub(super) fn take(self: &Arc<Self>, from: IpAddr) -> Option<Place> {
        let from = from.to_canonical();
        let is_neighbour = self.neighbours.contains(&from);
        let source = if is_neighbour { from } else { network(from) };
        let mut taken = self.taken();
        let of_source = taken.by_source.get(&source).copied().unwrap_or(0);
        let is_full = taken.all >= PLACES
            || !is_neighbour && (taken.strangers >= STRANGERS_MAX || of_source >= SOURCE_MAX);
        if is_full {
            return None;
        }
        taken.all += 1;
        if !is_neighbour {
            taken.strangers += 1;
            taken.by_source.insert(source, of_source + 1);
        }
        Some(Place { places: self.clone(), source })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        lock(&self.taken)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken();
        taken.all -= 1;
        // Only unknown peers are counted by source.
        if let Some(count) = taken.by_source.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                taken.by_source.remove(&self.source);
            }
            taken.strangers -= 1;
        }
    }
}

/// Returns the address that a source is counted by: one host has a whole /64 of IPv6 addresses.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn take(places: &Arc<Places>, from: &str) -> Vec<Place> {
        std::iter::from_fn(|| places.take(address(from))).collect()
    }

    #[test]
    fn strangers_leave_places_for_other_sources_and_for_neighbours() {
        let places = Places::new([address("192.0.2.1")].into_iter());
        let first = take(&places, "198.51.100.1");
        assert_eq!(first.len(), SOURCE_MAX);
        let second = take(&places, "198.51.100.2");
        assert_eq!(second.len(), STRANGERS_MAX - SOURCE_MAX);
        let neighbour = take(&places, "::ffff:192.0.2.1");
        assert_eq!(neighbour.len(), PLACES - STRANGERS_MAX);
        drop((first, second, neighbour));
        assert_eq!(take(&places, "192.0.2.1").len(), PLACES);
        let taken = places.taken();
        assert_eq!((taken.all, taken.strangers, taken.by_source.len()), (0, 0, 0));
    }

    #[test]
    fn addresses_of_one_host_share_its_places() {
        let places = Places::new(std::iter::empty());
        let held = take(&places, "2001:db8::1");
        assert_eq!(held.len(), SOURCE_MAX);
        assert!(places.take(address("2001:db8::2")).is_none());
        assert!(places.take(address("2001:db8:0:1::1")).is_some());
    }
}
