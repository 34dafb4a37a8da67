//! The files on disk, by key. The index is in memory only and is rebuilt from the files when the cache starts. The
//! least recently used key is evicted first.

use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

/// Most variants under one key.
const VARIANTS_MAX: usize = 32;

/// One file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filed {
    /// Its number, which is its name.
    pub number: u64,
    /// Bytes on disk.
    pub bytes: u64,
    /// Distinguishes it from other files of the same key.
    pub variant: u64,
}

/// A write or read that is under way for a key. Its result is discarded if the key is removed meanwhile.
#[derive(Debug)]
pub struct Claim {
    /// The key.
    pub key: Arc<[u8]>,
    is_void: AtomicBool,
}

impl Claim {
    /// Whether the key was removed since, so that the result is discarded.
    pub fn is_void(&self) -> bool {
        self.is_void.load(Relaxed)
    }

    /// Lets the result be discarded.
    pub fn void(&self) {
        self.is_void.store(true, Relaxed);
    }
}

/// What to remove, from the index and from what a running scan still finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// This key.
    Key(Vec<u8>),
    /// All keys with this prefix.
    Prefix(Vec<u8>),
}

impl Which {
    /// Whether a key is one of these.
    pub fn is(&self, key: &[u8]) -> bool {
        match self {
            Self::Key(own) => own == key,
            Self::Prefix(start) => key.starts_with(start),
        }
    }
}

/// The files on disk, by key.
#[derive(Debug)]
pub(super) struct Index(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    keys: HashMap<Arc<[u8]>, Entry>,
    /// Keys in order of last use.
    order: BTreeMap<u64, Arc<[u8]>>,
    clock: u64,
    used: u64,
    files: usize,
    capacity: u64,
    claims: HashMap<Arc<[u8]>, Vec<Weak<Claim>>>,
    /// What was removed during the scan; `None` after the scan.
    removed: Option<(HashSet<Vec<u8>>, Vec<Which>)>,
}

#[derive(Debug)]
struct Entry {
    files: Vec<Filed>,
    turn: u64,
}

impl Index {
    /// An empty index; a scan fills it.
    pub(super) fn new(capacity: u64) -> Self {
        Self(Mutex::new(Inner { capacity, removed: Some(Default::default()), ..Inner::default() }))
    }

    /// Changes the capacity; returns the evicted files.
    pub(super) fn resize(&self, capacity: u64) -> Vec<u64> {
        let mut inner = lock(&self.0);
        inner.capacity = capacity;
        inner.shrink(0)
    }

    /// Returns the files of a key and a claim to read them, and marks the key as used; `None` if there are none.
    pub(super) fn find(&self, key: &[u8]) -> Option<(Vec<Filed>, Arc<Claim>)> {
        let mut inner = lock(&self.0);
        let files = inner.keys.get(key)?.files.clone();
        inner.touch(key);
        Some((files, inner.claim(key)))
    }

    /// Whether there is a file of this key.
    pub(super) fn has(&self, key: &[u8]) -> bool {
        lock(&self.0).keys.contains_key(key)
    }

    /// The number of the file of this key and variant.
    pub(super) fn number_of(&self, key: &[u8], variant: u64) -> Option<u64> {
        let inner = lock(&self.0);
        let files = &inner.keys.get(key)?.files;
        files.iter().find(|file| file.variant == variant).map(|file| file.number)
    }

    /// Announces that a file will be written for this key.
    pub(super) fn claim(&self, key: &[u8]) -> Arc<Claim> {
        lock(&self.0).claim(key)
    }

    /// Makes room for a file; returns the evicted files. `None`: it is larger than the capacity.
    pub(super) fn reserve(&self, bytes: u64) -> Option<Vec<u64>> {
        let mut inner = lock(&self.0);
        if bytes > inner.capacity {
            return None;
        }
        let gone = inner.shrink(bytes);
        inner.used += bytes;
        Some(gone)
    }

    /// Gives back the room of a reserved file that was not written.
    pub(super) fn release(&self, bytes: u64) {
        let mut inner = lock(&self.0);
        inner.used = inner.used.saturating_sub(bytes);
    }

    /// Enters a reserved file; it replaces one of the same variant. Returns the files to remove: the file itself if the key
    /// was removed meanwhile.
    pub(super) fn commit(&self, claim: &Claim, file: Filed) -> Vec<u64> {
        let mut inner = lock(&self.0);
        if claim.is_void() {
            inner.used = inner.used.saturating_sub(file.bytes);
            return vec![file.number];
        }
        inner.put(&claim.key, file)
    }

    /// Enters a file that the scan found; returns the files to remove. The scan begins with the least recently written file.
    pub(super) fn found(&self, key: &[u8], file: Filed) -> Vec<u64> {
        let mut inner = lock(&self.0);
        let is_removed = inner
            .removed
            .as_ref()
            .is_some_and(|(keys, more)| keys.contains(key) || more.iter().any(|which| which.is(key)));
        let known = inner.keys.get(key).is_some_and(|entry| {
            entry.files.iter().any(|other| other.variant == file.variant && other.number != file.number)
        });
        if is_removed || known {
            return vec![file.number];
        }
        inner.used += file.bytes;
        let key: Arc<[u8]> = key.into();
        let mut gone = inner.put(&key, file);
        gone.extend(inner.shrink(0));
        gone
    }

    /// The scan is over.
    pub(super) fn scanned(&self) {
        lock(&self.0).removed = None;
    }

    /// Whether the scan is over.
    pub(super) fn is_scanned(&self) -> bool {
        lock(&self.0).removed.is_none()
    }

    /// Forgets all files, which stay where they are, and voids all claims: files are scanned anew.
    pub(super) fn forget_all(&self) {
        drop(self.remove(&Which::Prefix(Vec::new())));
        lock(&self.0).removed = Some(Default::default());
    }

    /// Removes keys and voids the claims on them. Returns the files to remove and the removed keys.
    pub(super) fn remove(&self, which: &Which) -> (Vec<u64>, Vec<Arc<[u8]>>) {
        let mut inner = lock(&self.0);
        if let Some((keys, more)) = &mut inner.removed {
            match which {
                Which::Key(key) => drop(keys.insert(key.clone())),
                Which::Prefix(_) => more.push(which.clone()),
            }
        }
        let claimed = inner.claims.iter().filter(|(key, _)| which.is(key));
        for claim in claimed.flat_map(|(_, claims)| claims).filter_map(Weak::upgrade) {
            claim.void();
        }
        let keys: Vec<Arc<[u8]>> = match which {
            Which::Key(key) => {
                inner.keys.get_key_value(&key[..]).map(|(key, _)| key.clone()).into_iter().collect()
            }
            Which::Prefix(_) => inner.keys.keys().filter(|key| which.is(key)).cloned().collect(),
        };
        let gone = keys.iter().flat_map(|key| inner.remove(key)).collect();
        (gone, keys)
    }

    /// Voids what is under way for a key.
    pub(super) fn void(&self, key: &[u8]) {
        let inner = lock(&self.0);
        let claims = inner.claims.get(key).into_iter().flatten();
        claims.filter_map(Weak::upgrade).for_each(|claim| claim.void());
    }

    /// Removes one file that turned out to be unusable.
    pub(super) fn remove_file(&self, key: &[u8], number: u64) {
        let mut inner = lock(&self.0);
        let Some(entry) = inner.keys.get_mut(key) else { return };
        let Some(place) = entry.files.iter().position(|file| file.number == number) else { return };
        let file = entry.files.swap_remove(place);
        let is_last = entry.files.is_empty();
        inner.used = inner.used.saturating_sub(file.bytes);
        inner.files -= 1;
        if is_last {
            inner.remove(key);
        }
    }

    /// Evicts least recently used keys until 1/`part` of the used room is free; returns the evicted files.
    pub(super) fn make_room(&self, part: u64) -> Vec<u64> {
        let mut inner = lock(&self.0);
        let aim = inner.used - inner.used / part.max(1);
        inner.shrink_to(aim)
    }

    /// The first `most` keys with this prefix in order, with the bytes of their files.
    pub(super) fn list(&self, start: &[u8], most: usize) -> Vec<(Arc<[u8]>, u64)> {
        let inner = lock(&self.0);
        let found = inner.keys.iter().filter(|(key, _)| key.starts_with(start));
        let mut found: Vec<_> = found
            .map(|(key, entry)| (key.clone(), entry.files.iter().map(|file| file.bytes).sum()))
            .collect();
        drop(inner);
        found.sort_unstable();
        found.truncate(most);
        found
    }

    /// Keys, files, bytes and capacity.
    pub(super) fn counts(&self) -> (usize, usize, u64, u64) {
        let inner = lock(&self.0);
        (inner.keys.len(), inner.files, inner.used, inner.capacity)
    }
}

impl Inner {
    fn claim(&mut self, key: &[u8]) -> Arc<Claim> {
        let key: Arc<[u8]> = match self.keys.get_key_value(key) {
            Some((key, _)) => key.clone(),
            None => key.into(),
        };
        let claim = Arc::new(Claim { key: key.clone(), is_void: AtomicBool::new(false) });
        // Drop finished claims here, so that the list only has those under way.
        let claims = self.claims.entry(key).or_default();
        claims.retain(|claim| claim.strong_count() > 0);
        claims.push(Arc::downgrade(&claim));
        if self.claims.len() > 4096 {
            self.claims.retain(|_, claims| claims.iter().any(|claim| claim.strong_count() > 0));
        }
        claim
    }

    fn touch(&mut self, key: &[u8]) {
        let Some(entry) = self.keys.get_mut(key) else { return };
        if let Some(key) = self.order.remove(&entry.turn) {
            self.clock += 1;
            entry.turn = self.clock;
            self.order.insert(self.clock, key);
        }
    }

    /// Enters a file whose bytes are already counted.
    fn put(&mut self, key: &Arc<[u8]>, file: Filed) -> Vec<u64> {
        if !self.keys.contains_key(key) {
            self.clock += 1;
            self.order.insert(self.clock, key.clone());
            self.keys.insert(key.clone(), Entry { files: Vec::new(), turn: self.clock });
        }
        self.touch(key);
        let Some(entry) = self.keys.get_mut(key) else { return Vec::new() };
        let is_full = entry.files.len() >= VARIANTS_MAX;
        let mut place = entry.files.iter().position(|other| other.variant == file.variant);
        if place.is_none() && is_full {
            place = Some(0);
        }
        let old = place.map(|place| entry.files.remove(place));
        entry.files.push(file);
        self.files += 1;
        let Some(old) = old else { return Vec::new() };
        self.used = self.used.saturating_sub(old.bytes);
        self.files -= 1;
        // A scan may find a file that is already known.
        if old.number == file.number { Vec::new() } else { vec![old.number] }
    }

    fn remove(&mut self, key: &[u8]) -> Vec<u64> {
        let Some(entry) = self.keys.remove(key) else { return Vec::new() };
        self.order.remove(&entry.turn);
        self.files -= entry.files.len();
        self.used = self.used.saturating_sub(entry.files.iter().map(|file| file.bytes).sum());
        entry.files.into_iter().map(|file| file.number).collect()
    }

    /// Evicts until this number of bytes is free.
    fn shrink(&mut self, bytes: u64) -> Vec<u64> {
        self.shrink_to(self.capacity.saturating_sub(bytes))
    }

    fn shrink_to(&mut self, aim: u64) -> Vec<u64> {
        let mut gone = Vec::new();
        while self.used > aim {
            let Some(key) = self.order.first_key_value().map(|(_, key)| key.clone()) else { break };
            gone.extend(self.remove(&key));
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filed(number: u64, variant: u64) -> Filed {
        Filed { number, bytes: 100, variant }
    }

    fn put(index: &Index, key: &[u8], file: Filed) -> Vec<u64> {
        let claim = index.claim(key);
        let mut gone = index.reserve(file.bytes).unwrap();
        gone.extend(index.commit(&claim, file));
        gone
    }

    #[test]
    fn the_longest_unused_goes_first_and_the_bound_holds() {
        let index = Index::new(1000);
        for number in 0..10 {
            assert!(put(&index, &[number], filed(number.into(), 0)).is_empty());
        }
        assert!(index.find(&[0]).is_some());
        assert_eq!(put(&index, b"new", filed(10, 0)), [1], "0 was used");
        assert_eq!(index.counts(), (10, 10, 1000, 1000));
        assert_eq!(index.reserve(1001), None);
        assert_eq!(index.resize(300), [2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(index.make_room(2).len(), 2);
        assert_eq!(index.counts().2, 100);
    }

    #[test]
    fn the_same_variant_is_replaced_and_others_stay() {
        let index = Index::new(10_000);
        assert!(put(&index, b"k", filed(1, 7)).is_empty() && put(&index, b"k", filed(2, 8)).is_empty());
        assert_eq!(put(&index, b"k", filed(3, 7)), [1]);
        assert_eq!(index.number_of(b"k", 7), Some(3));
        assert_eq!(index.counts(), (1, 2, 200, 10_000));
        index.remove_file(b"k", 3);
        index.remove_file(b"k", 2);
        assert_eq!(index.counts(), (0, 0, 0, 10_000));
        let gone: Vec<_> = (0..40).flat_map(|number| put(&index, b"v", filed(number, number))).collect();
        assert_eq!((gone.len(), index.counts().1), (40 - VARIANTS_MAX, VARIANTS_MAX));
    }

    #[test]
    fn what_is_under_way_for_a_removed_key_comes_to_nothing() {
        let index = Index::new(1000);
        let (one, other) = (index.claim(b"http://a/1"), index.claim(b"http://b/1"));
        index.reserve(200).unwrap();
        assert_eq!(index.remove(&Which::Prefix(b"http://a/".to_vec())), (Vec::new(), Vec::new()));
        assert_eq!(index.commit(&one, filed(1, 0)), [1], "its own file goes");
        assert!(index.commit(&other, filed(2, 0)).is_empty());
        assert_eq!(index.counts(), (1, 1, 100, 1000));
        let (_, reading) = index.find(b"http://b/1").unwrap();
        assert_eq!(index.remove(&Which::Key(b"http://b/1".to_vec())).0, [2]);
        assert!(reading.is_void());
    }

    #[test]
    fn a_scan_brings_back_nothing_that_was_removed_or_replaced_meanwhile() {
        let index = Index::new(1000);
        index.remove(&Which::Key(b"gone".to_vec()));
        index.remove(&Which::Prefix(b"http://a/".to_vec()));
        put(&index, b"new", filed(9, 0));
        assert_eq!(index.found(b"gone", filed(1, 0)), [1]);
        assert_eq!(index.found(b"http://a/x", filed(2, 0)), [2]);
        assert_eq!(index.found(b"new", filed(3, 0)), [3], "what was written since is newer");
        assert!(index.found(b"new", filed(9, 0)).is_empty(), "the scan saw the new file, too");
        assert!(index.found(b"old", filed(4, 0)).is_empty());
        index.scanned();
        assert_eq!(index.counts(), (2, 2, 200, 1000));
        assert!(index.is_scanned() && index.find(b"old").is_some());
    }
}
