//! The table behind `run`'s private DNS: it is stable, bijective and bounded, and never gives a wrong host.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::flow::HostName;
use sidetrack_core::names::{NameTable, RESOLVER};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

fn name(number: usize) -> HostName {
    format!("h{number}.example").parse().unwrap()
}

#[test]
fn every_address_of_the_range_is_used_once_and_none_that_must_not_be() {
    let mut table = NameTable::new(usize::MAX);
    let mut seen = BTreeSet::new();
    for number in 0..NameTable::MAX_CAPACITY {
        let address = table.address_for(&name(number), Instant::ZERO).unwrap();
        assert!(NameTable::contains(address), "{address}");
        assert!(!matches!(address.octets()[3], 0 | 255), "{address}");
        assert_ne!(address, RESOLVER);
        assert!(seen.insert(address), "{address} handed out twice");
        assert_eq!(table.name_of(address), Some(name(number)));
    }
    for offset in 0..1_u32 << 17 {
        let address = Ipv4Addr::from_bits(u32::from_be_bytes([198, 18, 0, 0]) + offset);
        assert_eq!(table.name_of(address).is_some(), seen.contains(&address), "{address}");
    }
    assert_eq!(seen.first(), Some(&Ipv4Addr::new(198, 18, 0, 2)));
    assert_eq!(seen.last(), Some(&Ipv4Addr::new(198, 19, 255, 254)));
    assert_eq!(table.len(), NameTable::MAX_CAPACITY);
    assert_eq!(table.address_for(&name(usize::MAX), Instant::ZERO), None, "full, and nothing is old");
}

#[test]
fn an_address_outside_or_never_handed_out_has_no_name() {
    let mut table = NameTable::new(8);
    let first = table.address_for(&name(0), Instant::ZERO).unwrap();
    for address in [
        "198.17.255.255",
        "198.20.0.1",
        "198.18.0.0",
        "198.18.0.1",
        "198.18.0.3",
        "198.18.0.255",
        "127.0.0.1",
    ] {
        assert_eq!(table.name_of(address.parse().unwrap()), None, "{address}");
        assert_eq!(table.name_used(address.parse().unwrap(), Instant::ZERO), None, "{address}");
    }
    assert_eq!(table.name_of(first), Some(name(0)));
    assert!(NameTable::contains(Ipv4Addr::new(198, 18, 0, 0)));
    assert!(NameTable::contains(Ipv4Addr::new(198, 19, 255, 255)));
    assert!(!NameTable::contains(Ipv4Addr::new(198, 17, 255, 255)));
    assert!(!NameTable::contains(Ipv4Addr::new(198, 20, 0, 0)));
}

#[test]
fn only_the_longest_unused_is_replaced_and_only_when_old_enough() {
    let age = Duration::from_secs(60);
    let mut table = NameTable::with_minimum_age(2, age);
    let at = |seconds: u64| Instant::from_millis(seconds * 1000);
    let (a, b) = (table.address_for(&name(0), at(0)).unwrap(), table.address_for(&name(1), at(1)).unwrap());
    assert_eq!(table.address_for(&name(2), at(59)), None);
    assert_eq!(table.name_used(a, at(59)), Some(name(0)), "a connection counts as a use");
    assert_eq!(table.address_for(&name(2), at(60)), None, "b is 59 s old");
    assert_eq!(table.address_for(&name(2), at(61)), Some(b));
    assert_eq!((table.name_of(a), table.name_of(b)), (Some(name(0)), Some(name(2))));
    assert_eq!(table.address_for(&name(1), at(61)), None, "the name that lost its address gets no wrong one");
    assert_eq!(table.address_for(&name(0), at(61)), Some(a));
}

#[test]
fn a_clock_that_goes_back_frees_nothing() {
    let mut table = NameTable::with_minimum_age(1, Duration::ZERO);
    let late = Instant::from_millis(1000);
    let address = table.address_for(&name(0), late).unwrap();
    assert_eq!(table.address_for(&name(0), Instant::ZERO), Some(address));
    assert_eq!(table.address_for(&name(1), Instant::ZERO), None);
    assert_eq!(table.address_for(&name(1), late), Some(address));
}

#[test]
fn a_capacity_of_zero_still_serves_one_name() {
    let mut table = NameTable::new(0);
    assert!(table.is_empty());
    assert!(table.address_for(&name(0), Instant::ZERO).is_some());
    assert_eq!(table.address_for(&name(1), Instant::ZERO), None);
}

/// A model of the table: simple and slow.
struct Model {
    capacity: usize,
    age: Duration,
    entries: BTreeMap<HostName, (Ipv4Addr, Instant)>,
}

impl Model {
    /// Checks the table's answer for `name`, and updates the model.
    fn check(&mut self, name: &HostName, now: Instant, got: Option<Ipv4Addr>) {
        if let Some((address, used)) = self.entries.get_mut(name) {
            assert_eq!(got, Some(*address), "a name keeps its address");
            *used = now;
            return;
        }
        if self.entries.len() < self.capacity {
            let address = got.expect("there is room");
            assert!(self.entries.values().all(|(taken, _)| *taken != address));
            self.entries.insert(name.clone(), (address, now));
            return;
        }
        let oldest = self.entries.values().map(|(_, used)| *used).min().unwrap();
        if now.since(oldest) < self.age {
            assert_eq!(got, None, "nothing is old enough");
            return;
        }
        let address = got.expect("one is old enough");
        let (loser, _) = self.entries.iter().find(|(_, (taken, _))| *taken == address).unwrap();
        let loser = loser.clone();
        assert_eq!(self.entries[&loser].1, oldest, "only one of the longest unused loses its address");
        self.entries.remove(&loser);
        self.entries.insert(name.clone(), (address, now));
    }
}

proptest! {
    #[test]
    fn agrees_with_a_model(
        capacity in 1usize..6,
        age_s in 0u64..20,
        steps in prop::collection::vec((0usize..10, 0u64..8, any::<bool>()), 1..200),
    ) {
        let age = Duration::from_secs(age_s);
        let mut table = NameTable::with_minimum_age(capacity, age);
        let mut model = Model { capacity, age, entries: BTreeMap::new() };
        let mut now = Instant::ZERO;
        for (number, seconds, connect) in steps {
            now = now + Duration::from_secs(seconds);
            let name = name(number);
            if connect {
                if let Some((address, used)) = model.entries.get_mut(&name) {
                    prop_assert_eq!(table.name_used(*address, now), Some(name));
                    *used = now;
                }
            } else {
                let got = table.address_for(&name, now);
                model.check(&name, now, got);
            }
            prop_assert!(table.len() <= capacity);
            for (name, (address, _)) in &model.entries {
                let held = table.name_of(*address);
                prop_assert_eq!(held.as_ref(), Some(name));
            }
        }
    }
}
