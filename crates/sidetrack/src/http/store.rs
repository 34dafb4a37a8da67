//! Stored responses in memory: variants under a key, limited in bytes; the least recently used key is evicted first. A
//! disk may hold more. The store also knows which keys are being fetched, so that concurrent misses make one fetch.

use super::content::{Content, End};
use super::disk::{Disk, DiskState, Fill, Which};
use sidetrack_core::http::cache::{Extent, Rules, Stored};
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Most variants (by Vary) under one key.
const VARIANTS_MAX: usize = 32;
/// Overhead of a key and a variant in the tables, in bytes.
const ENTRY_BYTES: usize = 256;
/// A hit updates the order of use at most once in this time.
const TOUCH: Duration = Duration::from_secs(1);
/// How long the store remembers that a key's responses are not shareable.
const UNSHARED: Duration = Duration::from_secs(30);
/// Most keys that it remembers this of.
const UNSHARED_MAX: usize = 4096;

/// A stored response.
#[derive(Debug)]
pub struct Object {
    /// The metadata that caching decisions need.
    pub stored: Stored,
    /// Its content.
    pub content: Arc<Content>,
}

/// A key, and the size of what is stored under it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The key.
    pub key: Arc<[u8]>,
    /// Bytes of content in memory.
    pub memory_bytes: u64,
    /// Bytes of files.
    pub disk_bytes: u64,
}

/// The stored responses in memory.
#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    capacity: usize,
    /// What the memory of the process allows.
    allowed: AtomicUsize,
    disk: Option<Arc<Disk>>,
}

#[derive(Debug, Default)]
struct Inner {
    keys: HashMap<Arc<[u8]>, Variants>,
    /// Keys in order of last use.
    order: BTreeMap<u64, Arc<[u8]>>,
    clock: u64,
    used: usize,
    fetching: HashMap<Arc<[u8]>, watch::Receiver<()>>,
    unshared: HashMap<Arc<[u8]>, Instant>,
}

#[derive(Debug)]
struct Variants {
    objects: Vec<Arc<Object>>,
    bytes: usize,
    turn: u64,
    touched: Instant,
}

/// Whether to fetch.
#[derive(Debug)]
pub enum Claim {
    /// Yes; other requests wait until this is dropped.
    Fetch(Fetching),
    /// Another request fetches: wait until its sender is dropped, then look again.
    Wait(watch::Receiver<()>),
    /// Yes, and other requests do not wait: the responses to this key are not shareable.
    Alone,
}

/// The right to fetch for all waiting requests.
#[derive(Debug)]
pub struct Fetching {
    store: Arc<Store>,
    key: Arc<[u8]>,
    _sender: watch::Sender<()>,
}

impl Fetching {
    /// The response is not shareable: waiting requests fetch by themselves, and for a while no request waits.
    pub fn not_shared(self) {
        let mut inner = lock(&self.store.inner);
        if inner.unshared.len() >= UNSHARED_MAX {
            inner.unshared.clear();
        }
        inner.unshared.insert(self.key.clone(), Instant::now());
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        lock(&self.store.inner).fetching.remove(&self.key);
    }
}

impl Store {
    /// A store with this capacity of memory, in front of a disk.
    pub fn new(capacity_bytes: u64, disk: Option<Arc<Disk>>) -> Self {
        let capacity = usize::try_from(capacity_bytes).unwrap_or(usize::MAX);
        Self { inner: Mutex::default(), capacity, allowed: AtomicUsize::new(usize::MAX), disk }
    }

    /// Allows at most this number of bytes in memory from now on, if that is less than the capacity. What is too much is evicted.
    pub fn allow(&self, bytes: u64) {
        self.allowed.store(usize::try_from(bytes).unwrap_or(usize::MAX), Relaxed);
        lock(&self.inner).shrink(self.capacity());
    }

    fn capacity(&self) -> usize {
        self.capacity.min(self.allowed.load(Relaxed))
    }

    /// Returns all responses stored in memory under a key.
    pub fn find(&self, key: &[u8]) -> Vec<Arc<Object>> {
        let mut inner = lock(&self.inner);
        let inner = &mut *inner;
        let Some(variants) = inner.keys.get_mut(key) else { return Vec::new() };
        if variants.touched.elapsed() >= TOUCH {
            variants.touched = Instant::now();
            if let Some(key) = inner.order.remove(&variants.turn) {
                inner.clock += 1;
                variants.turn = inner.clock;
                inner.order.insert(inner.clock, key);
            }
        }
        variants.objects.clone()
    }

    /// Loads all responses that are on disk under a key into memory, if memory has none.
    pub async fn load(&self, key: &[u8], rules: &Rules) -> Vec<Arc<Object>> {
        let Some(disk) = &self.disk else { return Vec::new() };
        let Some((objects, claim)) = disk.load(key, rules).await else { return Vec::new() };
        let mut inner = lock(&self.inner);
        // A purge voids claims before it takes this lock, so that this check cannot miss it.
        if claim.is_void() {
            return Vec::new();
        }
        if let Some(known) = inner.keys.get(key) {
            return known.objects.clone();
        }
        for object in &objects {
            inner.enter(key, object.clone());
        }
        inner.shrink(self.capacity());
        objects
    }

    /// Whether a response is on disk under a key.
    pub fn is_on_disk(&self, key: &[u8]) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.has(key))
    }

    /// Stores an object; it replaces one of the same variant.
    pub fn insert(&self, key: &[u8], object: Arc<Object>) {
        let mut inner = lock(&self.inner);
        inner.unshared.remove(key);
        inner.enter(key, object.clone());
        inner.shrink(self.capacity());
        drop(inner);
        self.settled(key, &object);
    }

    /// Writes a stored object to the disk, too, if its content is now complete.
    pub fn settled(&self, key: &[u8], object: &Arc<Object>) {
        if let Some(disk) = self.disk.as_ref().filter(|_| object.content.end() == End::Whole) {
            disk.put(key, object);
        }
    }

    /// Begins a copy of a passing response for the disk. It will replace one of the same variant.
    pub fn fill(&self, key: &[u8], stored: &Stored, most: u64) -> Option<Fill> {
        let disk = self.disk.as_ref()?;
        let mut inner = lock(&self.inner);
        inner.unshared.remove(key);
        if let Some(variants) = inner.keys.get_mut(key) {
            variants.objects.retain(|other| !other.stored.is_same_variant(stored));
            inner.count(key);
        }
        drop(inner);
        disk.fill(key, stored, most)
    }

    /// Removes an object from memory, if it is still there.
    pub fn forget(&self, key: &[u8], object: &Arc<Object>) {
        let mut inner = lock(&self.inner);
        if let Some(variants) = inner.keys.get_mut(key) {
            variants.objects.retain(|other| !Arc::ptr_eq(other, object));
            inner.count(key);
        }
    }

    /// Replaces one object by another, if it is still there.
    pub fn replace(&self, key: &[u8], old: &Arc<Object>, new: Option<Arc<Object>>) {
        let mut inner = lock(&self.inner);
        let Some(variants) = inner.keys.get_mut(key) else { return };
        let Some(place) = variants.objects.iter().position(|other| Arc::ptr_eq(other, old)) else { return };
        variants.objects.splice(place..=place, new.clone());
        inner.count(key);
        drop(inner);
        match (&self.disk, new) {
            (Some(disk), Some(new)) if new.content.end() == End::Whole => disk.update(key, &new),
            (Some(disk), _) => disk.remove_variant(key, &old.stored),
            (None, _) => {}
        }
    }

    /// Replaces the object with this content, even if its metadata has changed meanwhile.
    pub fn replace_content(
        &self,
        key: &[u8],
        content: &Arc<Content>,
        make: impl FnOnce(&Stored) -> Option<Arc<Object>>,
    ) -> Option<Arc<Object>> {
        let inner = lock(&self.inner);
        let objects = inner.keys.get(key).map(|variants| &variants.objects)?;
        let old = objects.iter().find(|other| Arc::ptr_eq(&other.content, content))?.clone();
        drop(inner);
        let new = make(&old.stored);
        self.replace(key, &old, new.clone());
        new
    }

    /// Removes the parts of a variant that is now stored whole.
    pub fn drop_parts(&self, key: &[u8], whole: &Stored) {
        let mut inner = lock(&self.inner);
        let Some(variants) = inner.keys.get_mut(key) else { return };
        let is_part =
            |other: &Arc<Object>| other.stored.extent != Extent::Whole && other.stored.is_same_variant(whole);
        let (parts, kept) = std::mem::take(&mut variants.objects).into_iter().partition(is_part);
        variants.objects = kept;
        let parts: Vec<Arc<Object>> = parts;
        inner.count(key);
        drop(inner);
        if let Some(disk) = &self.disk {
            parts.iter().for_each(|part| disk.remove_variant(key, &part.stored));
        }
    }

    /// Replaces several objects by one, if all of them are still there; returns whether it did.
    pub fn merge(&self, key: &[u8], parts: &[&Arc<Object>], one: &Arc<Object>) -> bool {
        let mut inner = lock(&self.inner);
        let Some(variants) = inner.keys.get_mut(key) else { return false };
        let is_in =
            |list: &[Arc<Object>], part: &Arc<Object>| list.iter().any(|other| Arc::ptr_eq(other, part));
        if !parts.iter().all(|part| is_in(&variants.objects, part)) {
            return false;
        }
        variants.objects.retain(|other| !parts.iter().any(|part| Arc::ptr_eq(other, part)));
        inner.enter(key, one.clone());
        inner.shrink(self.capacity());
        drop(inner);
        if let Some(disk) = &self.disk {
            for part in parts {
                disk.remove_variant(key, &part.stored);
            }
        }
        self.settled(key, one);
        true
    }

    /// Removes everything stored under keys; returns the number of keys. Blocks while files are removed.
    pub fn purge(&self, which: &Which) -> usize {
        // The disk first: a load that is under way would bring the response back into memory otherwise.
        let on_disk = self.disk.as_ref().map(|disk| disk.purge(which)).unwrap_or_default();
        self.purge_memory(which, on_disk)
    }

    /// Like [`Self::purge`], without blocking the worker.
    pub async fn purge_behind(&self, which: Which) -> usize {
        let on_disk = match &self.disk {
            Some(disk) => disk.purge_behind(which.clone()).await,
            None => Vec::new(),
        };
        self.purge_memory(&which, on_disk)
    }

    fn purge_memory(&self, which: &Which, on_disk: Vec<Arc<[u8]>>) -> usize {
        let mut inner = lock(&self.inner);
        let keys: Vec<Arc<[u8]>> = match which {
            Which::Key(key) => {
                inner.keys.get_key_value(&key[..]).map(|(key, _)| key.clone()).into_iter().collect()
            }
            Which::Prefix(_) => inner.keys.keys().filter(|key| which.is(key)).cloned().collect(),
        };
        let only_in_memory = keys.iter().filter(|key| !on_disk.contains(key)).count();
        for key in &keys {
            inner.remove(key);
        }
        on_disk.len() + only_in_memory
    }

    /// Marks everything stored under a key as possibly changed: it is validated before its next use. Responses that are on
    /// disk only are removed.
    pub fn invalidate(&self, key: &[u8]) {
        if let Some(disk) = &self.disk {
            disk.remove(&Which::Key(key.to_vec()));
        }
        let mut inner = lock(&self.inner);
        let Some(variants) = inner.keys.get_mut(key) else { return };
        for object in &mut variants.objects {
            let mut stored = object.stored.clone();
            stored.is_invalid = true;
            *object = Arc::new(Object { stored, content: object.content.clone() });
        }
    }

    /// The first `most` keys with this prefix, in order.
    pub fn list(&self, start: &[u8], most: usize) -> Vec<Listed> {
        let on_disk = self.disk.as_ref().map(|disk| disk.list(start, most)).unwrap_or_default();
        let inner = lock(&self.inner);
        let in_memory = inner.keys.iter().filter(|(key, _)| key.starts_with(start));
        let mut found: BTreeMap<Arc<[u8]>, Listed> = BTreeMap::new();
        for (key, variants) in in_memory {
            let of_memory = |object: &Arc<Object>| object.content.memory_bytes() as u64;
            let memory_bytes = variants.objects.iter().map(of_memory).sum();
            found.insert(key.clone(), Listed { key: key.clone(), memory_bytes, disk_bytes: 0 });
        }
        drop(inner);
        for (key, disk_bytes) in on_disk {
            let listed = Listed { key: key.clone(), memory_bytes: 0, disk_bytes: 0 };
            found.entry(key).or_insert(listed).disk_bytes = disk_bytes;
        }
        found.into_values().take(most).collect()
    }

    /// The number of keys in memory, their bytes, and the capacity in bytes.
    pub fn memory(&self) -> (usize, u64, u64) {
        let inner = lock(&self.inner);
        (inner.keys.len(), inner.used as u64, self.capacity() as u64)
    }

    /// Lets go of the disk: see [`Disk::rest`].
    pub fn rest(&self) {
        self.disk.iter().for_each(|disk| disk.rest());
    }

    /// Uses the disk again.
    pub fn resume(&self, rules: &Rules) {
        self.disk.iter().for_each(|disk| disk.resume(rules));
    }

    /// The state of the disk.
    pub fn disk(&self) -> Option<DiskState> {
        self.disk.as_ref().map(|disk| disk.state())
    }

    /// Decides whether the caller fetches for this key.
    pub fn claim(self: &Arc<Self>, key: &[u8]) -> Claim {
        let mut inner = lock(&self.inner);
        if inner.unshared.get(key).is_some_and(|since| since.elapsed() < UNSHARED) {
            return Claim::Alone;
        }
        if let Some(waiting) = inner.fetching.get(key) {
            return Claim::Wait(waiting.clone());
        }
        let (sender, receiver) = watch::channel(());
        let key: Arc<[u8]> = key.into();
        inner.fetching.insert(key.clone(), receiver);
        Claim::Fetch(Fetching { store: self.clone(), key, _sender: sender })
    }
}

impl Inner {
    /// Enters an object; it replaces one of the same variant.
    fn enter(&mut self, key: &[u8], object: Arc<Object>) {
        if !self.keys.contains_key(key) {
            self.clock += 1;
            let (turn, key): (u64, Arc<[u8]>) = (self.clock, key.into());
            self.order.insert(turn, key.clone());
            let variants = Variants { objects: Vec::new(), bytes: 0, turn, touched: Instant::now() };
            self.keys.insert(key, variants);
        }
        if let Some(variants) = self.keys.get_mut(key) {
            let same = |other: &Arc<Object>| {
                other.stored.is_same_variant(&object.stored) && other.stored.extent == object.stored.extent
            };
            variants.objects.retain(|other| !same(other));
            if variants.objects.len() >= VARIANTS_MAX {
                variants.objects.remove(0);
            }
            variants.objects.push(object);
        }
        self.count(key);
    }

    /// Updates the byte count of a key.
    fn count(&mut self, key: &[u8]) {
        let Some(variants) = self.keys.get_mut(key) else { return };
        if variants.objects.is_empty() {
            self.remove(key);
            return;
        }
        let bytes = |object: &Arc<Object>| {
            object.stored.memory_bytes().saturating_add(object.content.memory_bytes()) + ENTRY_BYTES
        };
        let now = variants.objects.iter().map(bytes).sum::<usize>() + key.len();
        self.used = self.used.saturating_sub(variants.bytes).saturating_add(now);
        variants.bytes = now;
    }

    fn remove(&mut self, key: &[u8]) -> bool {
        let Some(variants) = self.keys.remove(key) else { return false };
        self.order.remove(&variants.turn);
        self.used = self.used.saturating_sub(variants.bytes);
        true
    }

    /// Evicts least recently used keys until the rest fits.
    fn shrink(&mut self, capacity: usize) {
        while self.used > capacity {
            let Some((_, key)) = self.order.pop_first() else { return };
            self.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::http::cache::Rules;
    use sidetrack_core::http::fields::Fields;
    use sidetrack_core::http::message::Response;

    fn object(bytes: usize) -> Arc<Object> {
        let response = Response::new(200, Fields::from([("Cache-Control", "max-age=9")]));
        let stored = Stored::new(&Fields::new(), &response, Extent::Whole, (0, 0), &Rules::default());
        Arc::new(Object { stored, content: Arc::new(Content::whole(vec![0; bytes])) })
    }

    #[test]
    fn what_is_stored_never_exceeds_the_capacity_and_the_oldest_goes_first() {
        let store = Store::new(100_000, None);
        for number in 0..50_u8 {
            store.insert(&[number], object(9000));
            assert!(lock(&store.inner).used <= 100_000);
        }
        assert!(store.find(&[0]).is_empty() && !store.find(&[49]).is_empty());
        store.insert(b"large", object(200_000));
        assert!(store.find(b"large").is_empty() && lock(&store.inner).used <= 100_000);
        let left: Vec<u8> = (0..50).filter(|number| store.purge(&Which::Key(vec![*number])) == 1).collect();
        assert!(lock(&store.inner).used == 0 && lock(&store.inner).order.is_empty(), "{left:?}");
    }

    #[test]
    fn when_memory_is_short_less_than_the_capacity_is_stored() {
        let store = Store::new(100_000, None);
        (0..20_u8).for_each(|number| store.insert(&[number], object(4000)));
        assert!(store.memory().1 > 80_000);
        store.allow(30_000);
        assert!(store.memory().1 <= 30_000 && !store.find(&[19]).is_empty(), "the oldest went");
        store.insert(&[20], object(4000));
        assert_eq!((store.memory().1 <= 30_000, store.memory().2), (true, 30_000));
        store.allow(u64::MAX);
        assert_eq!(store.memory().2, 100_000);
    }

    #[test]
    fn the_same_variant_is_replaced_and_an_object_that_went_is_not_put_back() {
        let store = Store::new(100_000, None);
        let (first, second) = (object(1), object(2));
        store.insert(b"k", first.clone());
        store.insert(b"k", second.clone());
        assert_eq!(store.find(b"k").len(), 1);
        store.replace(b"k", &first, Some(object(3)));
        assert_eq!(store.find(b"k")[0].content.length, 2, "it was not there any more");
        store.replace(b"k", &second, None);
        assert!(store.find(b"k").is_empty() && lock(&store.inner).used == 0);
    }

    #[test]
    fn one_fetches_and_others_wait_until_it_is_over() {
        let store = Arc::new(Store::new(1000, None));
        let Claim::Fetch(fetching) = store.claim(b"k") else { panic!("nobody fetches") };
        assert!(matches!(store.claim(b"k"), Claim::Wait(_)) && matches!(store.claim(b"j"), Claim::Fetch(_)));
        drop(fetching);
        let Claim::Fetch(fetching) = store.claim(b"k") else { panic!("nobody fetches") };
        fetching.not_shared();
        assert!(matches!(store.claim(b"k"), Claim::Alone), "remembered for a while");
    }
}
