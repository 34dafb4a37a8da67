//! A store in one redb file. Each change is a transaction that is on disk when the call returns.
//!
//! ```text
//!          a call fails because of the file               it can be opened
//!   OPEN ─────────────────────────────────────> CLOSED ─────────────────────> OPEN
//!                                               │    ^
//!                                               └────┘ the next call tries again, and fails
//! ```
//!
//! redb refuses every further call after an error of its file, such as a full disk, until the file is opened anew. So it is, by the next
//! call: what was committed is there, and nothing else.

use super::{Entry, Event, If, LeaseId, Revision, Store, StoreError, WATCH_MAX};
use redb::backends::FileBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Key to revision, lease (0: none), value.
const ENTRIES: TableDefinition<'_, &str, (u64, u64, &[u8])> = TableDefinition::new("entries");
/// Lease to its duration and its end, milliseconds; the end counts from 1970.
const LEASES: TableDefinition<'_, u64, (u64, u64)> = TableDefinition::new("leases");
/// The last revision and the last lease.
const COUNTERS: TableDefinition<'_, &str, u64> = TableDefinition::new("counters");

/// A store in one file, with its watchers.
pub struct FileStore {
    state: Mutex<State>,
    /// Opens the file. The process may not open its path any more: it has given up the rights for that.
    open: Box<dyn Fn() -> Result<Database, DatabaseError> + Send + Sync>,
    watchers: Mutex<Watchers>,
    name: String,
}

/// What is open of the file.
enum State {
    Open(Database),
    Closed,
}

/// The watchers, and the latest changes for those that begin later.
#[derive(Default)]
struct Watchers {
    all: Vec<(String, mpsc::Sender<Event>)>,
    /// At most [`WATCH_MAX`].
    recent: VecDeque<Event>,
    /// The last revision of which `recent` does not have the changes.
    forgotten: Revision,
}

fn failed(error: impl ToString) -> StoreError {
    StoreError::Failed(error.to_string())
}

fn millis(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

fn last(transaction: &WriteTransaction, counter: &str) -> Result<u64, StoreError> {
    let counters = transaction.open_table(COUNTERS).map_err(failed)?;
    let number = counters.get(counter).map_err(failed)?;
    Ok(number.map_or(0, |number| number.value()))
}

fn next(transaction: &WriteTransaction, counter: &str) -> Result<u64, StoreError> {
    let number = last(transaction, counter)? + 1;
    let mut counters = transaction.open_table(COUNTERS).map_err(failed)?;
    counters.insert(counter, number).map_err(failed)?;
    Ok(number)
}

impl FileStore {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// Fails if another process uses it, if it is not such a file, or if it cannot be created.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let named = |error: &dyn std::fmt::Display| failed(format!("{}: {error}", path.display()));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| named(&error))?;
        let open = move || Database::builder().create_with_backend(FileBackend::new(file.try_clone()?)?);
        Self::with(path.display().to_string(), open).map_err(|error| match error {
            StoreError::Failed(error) => named(&error),
            other => other,
        })
    }

    fn with(
        name: String,
        open: impl Fn() -> Result<Database, DatabaseError> + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let database = open().map_err(failed)?;
        let transaction = database.begin_write().map_err(failed)?;
        transaction.open_table(ENTRIES).map_err(failed)?;
        transaction.open_table(LEASES).map_err(failed)?;
        transaction.open_table(COUNTERS).map_err(failed)?;
        let forgotten = last(&transaction, "revision")?;
        transaction.commit().map_err(failed)?;
        let watchers = Mutex::new(Watchers { forgotten, ..Watchers::default() });
        Ok(Self { state: Mutex::new(State::Open(database)), open: Box::new(open), watchers, name })
    }

    /// Does work on the open file. After an error of the file it is closed, for the next call to open it.
    fn on_file<T>(&self, work: impl FnOnce(&Database) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let mut state = lock(&self.state);
        let was_open = matches!(*state, State::Open(_));
        let database = match std::mem::replace(&mut *state, State::Closed) {
            State::Open(database) => database,
            State::Closed => (self.open)().map_err(failed)?,
        };
        let result = work(&database);
        match &result {
            Err(StoreError::Failed(error)) if was_open => {
                tracing::warn!(
                    "{}: {error}; the state keeps what it had, and changes are refused",
                    self.name
                );
            }
            Err(StoreError::Failed(_)) => {}
            Ok(_) | Err(_) => {
                if !was_open {
                    tracing::info!("{}: the state works again", self.name);
                }
                *state = State::Open(database);
            }
        }
        result
    }

    /// Commits a change as a whole, then tells the watchers.
    fn change<T>(
        &self,
        change: impl FnOnce(&WriteTransaction) -> Result<(T, Vec<Event>), StoreError>,
    ) -> Result<T, StoreError> {
        let (result, events) = self.on_file(|database| {
            let transaction = database.begin_write().map_err(failed)?;
            // If `change` fails, dropping the transaction rolls it back.
            let changed = change(&transaction)?;
            transaction.commit().map_err(failed)?;
            Ok(changed)
        })?;
        let mut watchers = lock(&self.watchers);
        for event in &events {
            if watchers.recent.len() == WATCH_MAX
                && let Some(oldest) = watchers.recent.pop_front()
            {
                watchers.forgotten = oldest.revision;
            }
            watchers.recent.push_back(event.clone());
        }
        watchers.all.retain(|(prefix, told)| {
            let theirs = events.iter().filter(|event| event.key.starts_with(prefix));
            theirs.into_iter().all(|event| told.try_send(event.clone()).is_ok()) && !told.is_closed()
        });
        Ok(result)
    }
}

impl Store for FileStore {
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.on_file(|database| {
            let entries = database.begin_read().map_err(failed)?.open_table(ENTRIES).map_err(failed)?;
            let found = entries.get(key).map_err(failed)?;
            Ok(found.map(|found| entry(found.value())))
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Entry)>, StoreError> {
        self.on_file(|database| {
            let entries = database.begin_read().map_err(failed)?.open_table(ENTRIES).map_err(failed)?;
            let mut found = Vec::new();
            for row in entries.range(prefix..).map_err(failed)? {
                let (key, value) = row.map_err(failed)?;
                if !key.value().starts_with(prefix) {
                    break;
                }
                found.push((key.value().to_owned(), entry(value.value())));
            }
            Ok(found)
        })
    }

    fn put(&self, key: &str, value: &[u8], when: If, lease: Option<LeaseId>) -> Result<Revision, StoreError> {
        self.change(|transaction| {
            if let Some(lease) = lease {
                let leases = transaction.open_table(LEASES).map_err(failed)?;
                leases.get(lease).map_err(failed)?.ok_or(StoreError::NoLease(lease))?;
            }
            let revision = next(transaction, "revision")?;
            let mut entries = transaction.open_table(ENTRIES).map_err(failed)?;
            let old = entries.get(key).map_err(failed)?.map(|old| old.value().0);
            if !when.holds(old) {
                return Err(StoreError::Conflict(key.to_owned()));
            }
            entries.insert(key, (revision, lease.unwrap_or(0), value)).map_err(failed)?;
            let entry = Entry { value: value.to_vec(), revision, lease };
            Ok((revision, vec![Event { key: key.to_owned(), revision, entry: Some(entry) }]))
        })
    }

    fn delete(&self, key: &str, when: If) -> Result<bool, StoreError> {
        self.change(|transaction| {
            let mut entries = transaction.open_table(ENTRIES).map_err(failed)?;
            let old = entries.remove(key).map_err(failed)?.map(|old| old.value().0);
            // An error rolls the removal back.
            if !when.holds(old) {
                return Err(StoreError::Conflict(key.to_owned()));
            }
            if old.is_none() {
                return Ok((false, Vec::new()));
            }
            let revision = next(transaction, "revision")?;
            Ok((true, vec![Event { key: key.to_owned(), revision, entry: None }]))
        })
    }

    fn grant(&self, ttl: Duration, now: SystemTime) -> Result<LeaseId, StoreError> {
        self.change(|transaction| {
            let lease = next(transaction, "lease")?;
            let ttl = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
            let mut leases = transaction.open_table(LEASES).map_err(failed)?;
            leases.insert(lease, (ttl, millis(now).saturating_add(ttl))).map_err(failed)?;
            Ok((lease, Vec::new()))
        })
    }

    fn keep_alive(&self, lease: LeaseId, now: SystemTime) -> Result<(), StoreError> {
        self.change(|transaction| {
            let mut leases = transaction.open_table(LEASES).map_err(failed)?;
            let held = leases.get(lease).map_err(failed)?.map(|held| held.value());
            let (ttl, end) = held.ok_or(StoreError::NoLease(lease))?;
            if end <= millis(now) {
                return Err(StoreError::NoLease(lease));
            }
            leases.insert(lease, (ttl, millis(now).saturating_add(ttl))).map_err(failed)?;
            Ok(((), Vec::new()))
        })
    }

    fn expire(&self, now: SystemTime) -> Result<Vec<String>, StoreError> {
        if self.none_is_over(now)? {
            return Ok(Vec::new());
        }
        self.change(|transaction| {
            let mut leases = transaction.open_table(LEASES).map_err(failed)?;
            let mut over = Vec::new();
            for row in leases.iter().map_err(failed)? {
                let (lease, times) = row.map_err(failed)?;
                if times.value().1 <= millis(now) {
                    over.push(lease.value());
                }
            }
            for lease in &over {
                leases.remove(lease).map_err(failed)?;
            }
            let mut entries = transaction.open_table(ENTRIES).map_err(failed)?;
            let mut keys = Vec::new();
            for row in entries.iter().map_err(failed)? {
                let (key, value) = row.map_err(failed)?;
                if over.contains(&value.value().1) {
                    keys.push(key.value().to_owned());
                }
            }
            for key in &keys {
                entries.remove(key.as_str()).map_err(failed)?;
            }
            let revision = next(transaction, "revision")?;
            let events = keys.iter().map(|key| Event { key: key.clone(), revision, entry: None }).collect();
            Ok((keys, events))
        })
    }

    fn watch(&self, prefix: &str, from: Option<Revision>) -> Result<mpsc::Receiver<Event>, StoreError> {
        let (told, changes) = mpsc::channel(WATCH_MAX);
        let mut watchers = lock(&self.watchers);
        if let Some(from) = from {
            if from <= watchers.forgotten {
                // Closed: the changes since then are not known.
                return Ok(changes);
            }
            let since = watchers.recent.iter().filter(|event| event.revision >= from);
            // There is room for all: at most as many are kept.
            let _ = since
                .filter(|event| event.key.starts_with(prefix))
                .try_for_each(|event| told.try_send(event.clone()));
        }
        watchers.all.push((prefix.to_owned(), told));
        Ok(changes)
    }
}

impl FileStore {
    /// Whether no lease has expired, so that no write transaction is needed.
    fn none_is_over(&self, now: SystemTime) -> Result<bool, StoreError> {
        self.on_file(|database| {
            let leases = database.begin_read().map_err(failed)?.open_table(LEASES).map_err(failed)?;
            for row in leases.iter().map_err(failed)? {
                if row.map_err(failed)?.1.value().1 <= millis(now) {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }
}

fn entry((revision, lease, value): (u64, u64, &[u8])) -> Entry {
    Entry { value: value.to_vec(), revision, lease: Some(lease).filter(|lease| *lease != 0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    fn store() -> (tempfile::TempDir, FileStore) {
        let folder = tempfile::tempdir().expect("a folder");
        let store = FileStore::open(&folder.path().join("state.redb")).expect("a store");
        (folder, store)
    }

    #[test]
    fn values_have_revisions_and_conditions() {
        let (folder, store) = store();
        let first = store.put("a/1", b"one", If::Absent, None).expect("put");
        assert!(matches!(store.put("a/1", b"two", If::Absent, None), Err(StoreError::Conflict(_))));
        let second = store.put("a/1", b"two", If::Revision(first), None).expect("put");
        assert!(second > first);
        assert!(store.put("a/1", b"three", If::Revision(first), None).is_err());
        store.put("a/2", b"other", If::Always, None).expect("put");
        store.put("b", b"", If::Always, None).expect("put");
        let keys = |store: &FileStore| {
            store.list("a/").expect("a list").into_iter().map(|(key, _)| key).collect::<Vec<_>>()
        };
        assert_eq!(keys(&store), ["a/1", "a/2"]);
        let delete = |when| store.delete("a/2", when);
        assert!(delete(If::Always).expect("deleted") && !delete(If::Always).expect("nothing"));
        drop(store);
        let again = FileStore::open(&folder.path().join("state.redb")).expect("the same");
        assert_eq!(
            again.get("a/1").expect("read").map(|entry| (entry.value, entry.revision)),
            Some((b"two".to_vec(), second))
        );
        assert!(FileStore::open(&folder.path().join("state.redb")).is_err(), "one at a time");
    }

    /// A file in memory, on a disk that may be full.
    #[derive(Debug, Clone, Default)]
    struct Disk {
        bytes: Arc<Mutex<Vec<u8>>>,
        is_full: Arc<AtomicBool>,
    }

    impl Disk {
        fn room(&self) -> io::Result<()> {
            if self.is_full.load(Relaxed) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }
    }

    impl redb::StorageBackend for Disk {
        fn len(&self) -> io::Result<u64> {
            Ok(lock(&self.bytes).len() as u64)
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            let from = usize::try_from(offset).expect("it fits");
            out.copy_from_slice(&lock(&self.bytes)[from..from + out.len()]);
            Ok(())
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.room()?;
            lock(&self.bytes).resize(usize::try_from(len).expect("it fits"), 0);
            Ok(())
        }

        fn sync_data(&self) -> io::Result<()> {
            Ok(())
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.room()?;
            let from = usize::try_from(offset).expect("it fits");
            lock(&self.bytes)[from..from + data.len()].copy_from_slice(data);
            Ok(())
        }
    }

    #[test]
    fn after_a_full_disk_it_has_what_was_committed_and_works_again() {
        let disk = Disk::default();
        let opened = disk.clone();
        let store = FileStore::with("state".to_owned(), move || {
            Database::builder().create_with_backend(opened.clone())
        });
        let store = store.expect("a store");
        store.put("a", b"before", If::Always, None).expect("put");
        let mut watch = store.watch("", None).expect("a watch");
        for _ in 0..3 {
            disk.is_full.store(true, Relaxed);
            for _ in 0..2 {
                let refused = store.put("a", b"meanwhile", If::Always, None);
                assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
            }
            disk.is_full.store(false, Relaxed);
            assert_eq!(store.get("a").expect("read").map(|entry| entry.value), Some(b"before".to_vec()));
        }
        assert!(watch.try_recv().is_err(), "nothing was changed");
        store.put("a", b"after", If::Always, None).expect("put");
        assert_eq!(store.get("a").expect("read").map(|entry| entry.value), Some(b"after".to_vec()));
        assert_eq!(watch.try_recv().expect("told").entry.map(|entry| entry.value), Some(b"after".to_vec()));
    }

    #[test]
    fn a_value_that_was_changed_is_not_deleted_by_its_old_revision() {
        let (_folder, store) = store();
        let mut watch = store.watch("", None).expect("a watch");
        let first = store.put("a", b"one", If::Absent, None).expect("put");
        let second = store.put("a", b"two", If::Always, None).expect("put");
        for when in [If::Revision(first), If::Absent] {
            assert!(matches!(store.delete("a", when), Err(StoreError::Conflict(_))), "{when:?}");
        }
        assert_eq!(store.get("a").expect("read").map(|entry| entry.revision), Some(second));
        assert!(store.delete("a", If::Revision(second)).expect("deleted"));
        assert!(
            matches!(store.delete("a", If::Revision(second)), Err(StoreError::Conflict(_))),
            "it is gone"
        );
        // The refused deletions told the watcher nothing.
        let told: Vec<_> =
            std::iter::from_fn(|| watch.try_recv().ok()).map(|event| event.entry.is_some()).collect();
        assert_eq!(told, [true, true, false]);
    }

    #[test]
    fn a_watch_begins_at_a_revision_while_its_changes_are_known() {
        let (folder, store) = store();
        let first = store.put("a", b"1", If::Always, None).expect("put");
        store.put("b", b"2", If::Always, None).expect("put");
        assert!(store.delete("a", If::Always).expect("deleted"));
        let seen = |store: &FileStore, from| {
            let mut watch = store.watch("a", Some(from)).expect("a watch");
            let seen: Vec<_> =
                std::iter::from_fn(|| watch.try_recv().ok()).map(|event| event.revision).collect();
            (seen, watch.is_closed())
        };
        assert_eq!(seen(&store, first), (vec![first, first + 2], false));
        assert_eq!(seen(&store, first + 1), (vec![first + 2], false));
        assert_eq!(seen(&store, first + 3), (vec![], false));
        for number in 0..WATCH_MAX {
            store.put("c", &[number as u8], If::Always, None).expect("put");
        }
        assert_eq!(seen(&store, first + 2), (vec![], true), "no longer known: list and watch again");
        drop(store);
        let again = FileStore::open(&folder.path().join("state.redb")).expect("the same");
        assert_eq!(seen(&again, first), (vec![], true));
    }

    #[test]
    fn what_is_under_a_lease_goes_with_it_and_watchers_are_told() {
        let (_folder, store) = store();
        let (start, second) = (UNIX_EPOCH, Duration::from_secs(1));
        let mut watch = store.watch("app/", None).expect("a watch");
        let lease = store.grant(second * 10, start).expect("a lease");
        store.put("app/1", b"x", If::Always, Some(lease)).expect("put");
        store.put("other", b"x", If::Always, Some(lease)).expect("put");
        store.put("app/2", b"x", If::Always, Some(lease)).expect("put");
        // Put again without a lease: it stays.
        store.put("app/2", b"y", If::Always, None).expect("put");
        store.keep_alive(lease, start + second * 5).expect("kept");
        assert!(store.expire(start + second * 14).expect("nothing").is_empty());
        assert_eq!(store.expire(start + second * 15).expect("over"), ["app/1", "other"]);
        assert!(matches!(store.keep_alive(lease, start), Err(StoreError::NoLease(_))));
        assert!(matches!(store.put("app/3", b"", If::Always, Some(lease)), Err(StoreError::NoLease(_))));
        let told: Vec<_> = std::iter::from_fn(|| watch.try_recv().ok())
            .map(|event| (event.key, event.entry.is_some()))
            .collect();
        let expected = [("app/1", true), ("app/2", true), ("app/2", true), ("app/1", false)];
        assert_eq!(told, expected.map(|(key, there)| (key.to_owned(), there)));
    }
}
