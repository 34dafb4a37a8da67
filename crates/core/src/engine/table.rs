//! The index from a tuple to its connection: a hash table with open addressing and a fixed number of places. It neither
//! grows nor allocates while packets come.

use super::narrow::low_half;
use super::packet::Tuple;

/// The secret of the hash: without it an attacker cannot choose tuples that collide.
pub(super) type HashKey = [u64; 4];

/// Returns the hash of a tuple: multiply and fold with secret keys.
#[inline]
pub(super) fn hash(key: &HashKey, tuple: &Tuple) -> u32 {
    let low = fold(tuple.remote.0[1] ^ key[0], tuple.local.0[1] ^ key[1]);
    let high = fold(tuple.remote.0[0] ^ key[2], tuple.local.0[0] ^ key[3]);
    let mixed = fold(low ^ high ^ u64::from(tuple.ports), key[0] | 1);
    low_half(mixed ^ (mixed >> 32))
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    ((wide & 0xffff_ffff_ffff_ffff) as u64) ^ ((wide >> 64) as u64)
}

/// The index. A place holds the hash in its upper half and the value + 1 in its lower half; 0 is an empty place.
#[derive(Debug)]
pub(super) struct Index {
    places: Vec<u64>,
    mask: usize,
}

impl Index {
    /// Returns an index for up to `entries` entries; it is never more than half full.
    pub(super) fn new(entries: usize) -> Self {
        let size = (entries.max(8) * 2).next_power_of_two();
        Self { places: vec![0; size], mask: size - 1 }
    }

    /// Returns the address of its places and their size in bytes.
    pub(super) fn memory(&self) -> (usize, usize) {
        (self.places.as_ptr().addr(), size_of_val(self.places.as_slice()))
    }

    /// Returns the value under `hash` for which `is_it` is true.
    #[inline]
    pub(super) fn find(&self, hash: u32, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut at = hash as usize & self.mask;
        loop {
            let place = self.places.get(at).copied().unwrap_or(0);
            if place == 0 {
                return None;
            }
            let value = low_half(place).wrapping_sub(1);
            if (place >> 32) as u32 == hash && is_it(value) {
                return Some(value);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Returns the content of the first place that a lookup of `hash` reads.
    #[inline]
    pub(super) fn place(&self, hash: u32) -> u64 {
        self.places.get(hash as usize & self.mask).copied().unwrap_or(0)
    }

    /// Returns the value that is probably stored under `hash`: tuples are not compared.
    #[inline]
    pub(super) fn probable(&self, hash: u32) -> Option<u32> {
        self.find(hash, |_| true)
    }

    /// Adds an entry. The caller keeps the number of entries within the limit given to [`Index::new`].
    #[inline]
    pub(super) fn insert(&mut self, hash: u32, value: u32) {
        let mut at = hash as usize & self.mask;
        for _ in 0..self.places.len() {
            match self.places.get_mut(at) {
                Some(place) if *place == 0 => {
                    *place = u64::from(hash) << 32 | u64::from(value.wrapping_add(1));
                    return;
                }
                _ => at = (at + 1) & self.mask,
            }
        }
    }

    /// Removes an entry and closes the gap, so a lookup never walks over removed entries.
    pub(super) fn remove(&mut self, hash: u32, value: u32) {
        let wanted = u64::from(hash) << 32 | u64::from(value.wrapping_add(1));
        let mut gap = hash as usize & self.mask;
        loop {
            match self.places.get(gap) {
                None | Some(0) => return,
                Some(place) if *place == wanted => break,
                Some(_) => gap = (gap + 1) & self.mask,
            }
        }
        let mut at = gap;
        loop {
            at = (at + 1) & self.mask;
            let place = self.places.get(at).copied().unwrap_or(0);
            if place == 0 {
                break;
            }
            // An entry may move to the gap unless its home lies between the gap and itself.
            let home = (place >> 32) as usize & self.mask;
            if (at.wrapping_sub(home) & self.mask) >= (at.wrapping_sub(gap) & self.mask) {
                self.set(gap, place);
                gap = at;
            }
        }
        self.set(gap, 0);
    }

    #[inline]
    fn set(&mut self, at: usize, place: u64) {
        if let Some(to) = self.places.get_mut(at) {
            *to = place;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((any::<bool>(), 0_u32..40, 0_u32..6), 1..400)) {
            // Few hashes for many values: long probes and many gaps.
            let mut index = Index::new(40);
            let mut model = BTreeMap::new();
            for (add, value, spread) in steps {
                let hash = (value % 5).wrapping_mul(0x9e37_79b9) ^ (spread / 4);
                if add && !model.contains_key(&value) {
                    index.insert(hash, value);
                    model.insert(value, hash);
                } else if !add && let Some(hash) = model.remove(&value) {
                    index.remove(hash, value);
                }
                for value in 0..40 {
                    let expected = model.get(&value).map(|_| value);
                    let hash = model.get(&value).copied().unwrap_or(value);
                    prop_assert_eq!(index.find(hash, |found| found == value), expected);
                }
            }
        }
    }

    #[test]
    fn the_hash_depends_on_its_key_and_on_every_part() {
        let tuple = Tuple::new("10.0.0.1:1000".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        let key =
            [0x1234_5678_9abc_def1, 0x0fed_cba9_8765_4321, 0x1111_2222_3333_4445, 0x5555_6666_7777_8889];
        let base = hash(&key, &tuple);
        assert_ne!(base, hash(&[1, 2, 3, 4], &tuple));
        for other in [
            "10.0.0.3:1000 10.0.0.2:80",
            "10.0.0.1:1001 10.0.0.2:80",
            "10.0.0.1:1000 10.0.0.2:81",
            "10.0.0.1:1000 10.0.0.4:80",
            "[2001:db8::1]:1000 [2001:db8::2]:80",
        ] {
            let (remote, local) = other.split_once(' ').unwrap();
            let other = Tuple::new(remote.parse().unwrap(), local.parse().unwrap());
            assert_ne!(base, hash(&key, &other), "{other:?}");
        }
    }
}
