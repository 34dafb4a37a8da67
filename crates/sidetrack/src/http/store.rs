//! Stored responses in memory: variants under a key, bounded in bytes, the longest unused go first; and who is fetching
//! what, so that many who miss the same make one fetch.

use sidetrack_core::http::cache::Stored;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Most variants (by Vary) under one key.
const VARIANTS_MAX: usize = 32;
/// Overhead of a key and a variant in the tables, bytes.
const ENTRY_BYTES: usize = 256;
/// A hit moves an object to the end of the line at most so often.
const TOUCH: Duration = Duration::from_secs(1);
/// How long it is remembered that a key's responses are not shared.
const UNSHARED: Duration = Duration::from_secs(30);
/// Most keys of which that is remembered.
const UNSHARED_MAX: usize = 4096;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The content of a response: whole, or still coming in.
#[derive(Debug)]
pub struct Content {
    state: Mutex<ContentState>,
    grown: Notify,
    /// The number of bytes it will have.
    pub length: u64,
}

#[derive(Debug, Default)]
struct ContentState {
    pieces: Vec<Arc<[u8]>>,
    held: u64,
    end: End,
}

/// How far a content is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// More comes.
    #[default]
    Coming,
    /// All is there.
    Whole,
    /// It broke off: what is there is not all.
    Cut,
}

impl Content {
    /// Content that will come.
    pub fn coming(length: u64) -> Self {
        Self { state: Mutex::default(), grown: Notify::new(), length }
    }

    /// Content that is there.
    pub fn whole(bytes: Vec<u8>) -> Self {
        let content = Self::coming(bytes.len() as u64);
        content.push(&bytes);
        content.finish(true);
        content
    }

    /// Adds a piece.
    pub fn push(&self, data: &[u8]) {
        if !data.is_empty() {
            let mut state = lock(&self.state);
            state.held += data.len() as u64;
            state.pieces.push(data.into());
            drop(state);
            self.grown.notify_waiters();
        }
    }

    /// No more comes; it is whole only if its length is right.
    pub fn finish(&self, complete: bool) {
        let mut state = lock(&self.state);
        state.end = if complete && state.held == self.length { End::Whole } else { End::Cut };
        drop(state);
        self.grown.notify_waiters();
    }

    /// How far it is.
    pub fn end(&self) -> End {
        lock(&self.state).end
    }

    /// Pieces from the one of this number on, `most` of them; waits while there is none and more comes.
    pub async fn pieces(&self, from: usize, most: usize) -> (Vec<Arc<[u8]>>, End) {
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            // From here on no growth is missed.
            grown.as_mut().enable();
            {
                let state = lock(&self.state);
                let pieces: Vec<_> = state.pieces.iter().skip(from).take(most).cloned().collect();
                if !pieces.is_empty() || state.end != End::Coming {
                    return (pieces, state.end);
                }
            }
            grown.await;
        }
    }
}

/// A stored response.
#[derive(Debug)]
pub struct Object {
    /// What decisions are made from.
    pub stored: Stored,
    /// Its content.
    pub content: Arc<Content>,
}

/// See the module.
#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct Inner {
    keys: HashMap<Arc<[u8]>, Variants>,
    /// Keys in the order of their last use.
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
    /// Yes; others wait until this is dropped.
    Fetch(Fetching),
    /// Somebody does: wait until the sender is gone, then look again.
    Wait(watch::Receiver<()>),
    /// Yes, and nobody waits for it: what is there is not shared.
    Alone,
}

/// The right to fetch for all who wait.
#[derive(Debug)]
pub struct Fetching {
    store: Arc<Store>,
    key: Arc<[u8]>,
    _sender: watch::Sender<()>,
}

impl Fetching {
    /// What comes is not shared: who waits fetches for itself, and nobody waits for a while.
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
    /// A store of so many bytes.
    pub fn new(capacity_bytes: u64) -> Self {
        let capacity = usize::try_from(capacity_bytes).unwrap_or(usize::MAX);
        Self { inner: Mutex::default(), capacity }
    }

    /// All that is stored under a key.
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

    /// Stores an object in the place of the same variant, if there is one.
    pub fn insert(&self, key: &[u8], object: Arc<Object>) {
        let mut inner = lock(&self.inner);
        let inner = &mut *inner;
        inner.unshared.remove(key);
        if !inner.keys.contains_key(key) {
            inner.clock += 1;
            let (turn, key): (u64, Arc<[u8]>) = (inner.clock, key.into());
            inner.order.insert(turn, key.clone());
            let variants = Variants { objects: Vec::new(), bytes: 0, turn, touched: Instant::now() };
            inner.keys.insert(key, variants);
        }
        if let Some(variants) = inner.keys.get_mut(key) {
            let same = |other: &Arc<Object>| {
                other.stored.is_same_variant(&object.stored) && other.stored.extent == object.stored.extent
            };
            variants.objects.retain(|other| !same(other));
            if variants.objects.len() >= VARIANTS_MAX {
                variants.objects.remove(0);
            }
            variants.objects.push(object);
        }
        inner.count(key);
        inner.shrink(self.capacity);
    }

    /// Replaces one object by another, if it is still there.
    pub fn replace(&self, key: &[u8], old: &Arc<Object>, new: Option<Arc<Object>>) {
        let mut inner = lock(&self.inner);
        if let Some(variants) = inner.keys.get_mut(key)
            && let Some(place) = variants.objects.iter().position(|other| Arc::ptr_eq(other, old))
        {
            variants.objects.splice(place..=place, new);
            inner.count(key);
        }
    }

    /// Forgets all that is stored under a key; whether there was something.
    pub fn remove(&self, key: &[u8]) -> bool {
        lock(&self.inner).remove(key)
    }

    /// Says that all that is stored under a key may have changed: it is validated before it is used again.
    pub fn invalidate(&self, key: &[u8]) {
        let mut inner = lock(&self.inner);
        let Some(variants) = inner.keys.get_mut(key) else { return };
        for object in &mut variants.objects {
            let mut stored = object.stored.clone();
            stored.is_invalid = true;
            *object = Arc::new(Object { stored, content: object.content.clone() });
        }
    }

    /// Asks whether to fetch for this key.
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
    /// Counts the bytes under a key anew.
    fn count(&mut self, key: &[u8]) {
        let Some(variants) = self.keys.get_mut(key) else { return };
        if variants.objects.is_empty() {
            self.remove(key);
            return;
        }
        let bytes = |object: &Arc<Object>| {
            let content = usize::try_from(object.content.length).unwrap_or(usize::MAX);
            object.stored.memory_bytes().saturating_add(content) + ENTRY_BYTES
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

    /// Drops what has not been used for longest until the rest fits.
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
    use sidetrack_core::http::cache::{Extent, Rules};
    use sidetrack_core::http::fields::Fields;
    use sidetrack_core::http::message::Response;

    fn object(bytes: usize) -> Arc<Object> {
        let response = Response::new(200, Fields::from([("Cache-Control", "max-age=9")]));
        let stored = Stored::new(&Fields::new(), &response, Extent::Whole, (0, 0), &Rules::default());
        Arc::new(Object { stored, content: Arc::new(Content::whole(vec![0; bytes])) })
    }

    #[test]
    fn what_is_stored_never_exceeds_the_capacity_and_the_oldest_goes_first() {
        let store = Store::new(100_000);
        for number in 0..50_u8 {
            store.insert(&[number], object(9000));
            assert!(lock(&store.inner).used <= 100_000);
        }
        assert!(store.find(&[0]).is_empty() && !store.find(&[49]).is_empty());
        store.insert(b"large", object(200_000));
        assert!(store.find(b"large").is_empty() && lock(&store.inner).used <= 100_000);
        let left: Vec<u8> = (0..50).filter(|number| store.remove(&[*number])).collect();
        assert!(lock(&store.inner).used == 0 && lock(&store.inner).order.is_empty(), "{left:?}");
    }

    #[test]
    fn the_same_variant_is_replaced_and_an_object_that_went_is_not_put_back() {
        let store = Store::new(100_000);
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
        let store = Arc::new(Store::new(1000));
        let Claim::Fetch(fetching) = store.claim(b"k") else { panic!("nobody fetches") };
        assert!(matches!(store.claim(b"k"), Claim::Wait(_)) && matches!(store.claim(b"j"), Claim::Fetch(_)));
        drop(fetching);
        let Claim::Fetch(fetching) = store.claim(b"k") else { panic!("nobody fetches") };
        fetching.not_shared();
        assert!(matches!(store.claim(b"k"), Claim::Alone), "remembered for a while");
    }
}
