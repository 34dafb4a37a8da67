//! State of the control plane: keys and values with revisions, leases and watches. The interface follows etcd.
//! One implementation is a file, for one process. The other is etcd, for several orchestrators.

mod etcd;
mod file;

pub use etcd::EtcdStore;
pub use file::FileStore;

use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

/// A number that increases with each change of a store.
pub type Revision = u64;

/// A lease: entries under it are deleted when it expires.
pub type LeaseId = u64;

/// A value and the revision of its last change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: Vec<u8>,
    /// The revision of its last change.
    pub revision: Revision,
    /// The lease of the entry, if it has one.
    pub lease: Option<LeaseId>,
}

/// The condition of a put or of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum If {
    /// No condition.
    Always,
    /// The key does not exist.
    Absent,
    /// The revision of the last change is this one.
    Revision(Revision),
}

impl If {
    /// Whether the condition holds for a key that was last changed at `revision`. `None`: it does not exist.
    fn holds(self, revision: Option<Revision>) -> bool {
        match self {
            Self::Always => true,
            Self::Absent => revision.is_none(),
            Self::Revision(expected) => revision == Some(expected),
        }
    }
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The key.
    pub key: String,
    /// The revision of this change.
    pub revision: Revision,
    /// Its new value. `None`: the key was deleted.
    pub entry: Option<Entry>,
}

/// Why a store did not do something.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The condition does not hold: another caller was faster.
    #[error("'{0}' was changed by another request meanwhile; try again")]
    Conflict(String),
    /// The lease has expired, or never existed.
    #[error("the lease {0} is over")]
    NoLease(LeaseId),
    /// The store itself failed.
    #[error("the state of the control plane cannot be read or written: {0}")]
    Failed(String),
}

/// A store. Times are arguments. A call may block while the disk works.
pub trait Store: Send + Sync {
    /// Whether other processes use it at the same time.
    fn is_shared(&self) -> bool {
        false
    }

    /// Returns a value.
    ///
    /// # Errors
    /// The store fails.
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError>;
    /// Returns all keys with this prefix, in order.
    ///
    /// # Errors
    /// The store fails.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Entry)>, StoreError>;
    /// Puts a value, with or without a lease. An earlier lease of the key no longer counts.
    ///
    /// # Errors
    /// Fails if the condition does not hold, the lease has expired, or the store fails.
    fn put(&self, key: &str, value: &[u8], when: If, lease: Option<LeaseId>) -> Result<Revision, StoreError>;
    /// Deletes a key. Returns false if it did not exist.
    ///
    /// # Errors
    /// Fails if the condition does not hold, or the store fails.
    fn delete(&self, key: &str, when: If) -> Result<bool, StoreError>;
    /// Creates a lease that expires `ttl` after `now`.
    ///
    /// # Errors
    /// The store fails.
    fn grant(&self, ttl: Duration, now: SystemTime) -> Result<LeaseId, StoreError>;
    /// Renews a lease: it expires its whole duration after `now`.
    ///
    /// # Errors
    /// Fails if the lease has expired, or if the store fails.
    fn keep_alive(&self, lease: LeaseId, now: SystemTime) -> Result<(), StoreError>;
    /// Deletes the entries of leases that have expired at `now`. Returns their keys.
    ///
    /// # Errors
    /// The store fails.
    fn expire(&self, now: SystemTime) -> Result<Vec<String>, StoreError>;
    /// Sends each change of keys with this prefix: the later ones, or those with at least the revision `from`. The
    /// channel closes if the watcher falls [`WATCH_MAX`] changes behind, or if the store no longer has the changes
    /// since `from`. The watcher must then list and watch again.
    ///
    /// # Errors
    /// The store fails.
    fn watch(&self, prefix: &str, from: Option<Revision>) -> Result<mpsc::Receiver<Event>, StoreError>;
}

/// Most changes that are queued for a watcher.
pub const WATCH_MAX: usize = 1024;
