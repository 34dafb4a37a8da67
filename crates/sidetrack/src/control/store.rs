//! State of the control plane: keys and values with revisions, leases and watches, as etcd has them, so that it can be one.
//! Here it is one file.

mod file;

pub use file::FileStore;

use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

/// A number that rises with every change of a store.
pub type Revision = u64;

/// A lease: what was put under it goes when it runs out.
pub type LeaseId = u64;

/// A value and when it was put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: Vec<u8>,
    /// The revision of its last change.
    pub revision: Revision,
    /// The lease it is under, if it is.
    pub lease: Option<LeaseId>,
}

/// When a value is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum If {
    /// Always.
    Always,
    /// Nothing has the key yet.
    Absent,
    /// Its last change was this one.
    Revision(Revision),
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The key.
    pub key: String,
    /// Its value now; none: it is gone.
    pub entry: Option<Entry>,
}

/// Why a store did not do something.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The condition of a put does not hold: somebody else was faster.
    #[error("'{0}' was changed by somebody else meanwhile; try again")]
    Conflict(String),
    /// The lease ran out, or never was.
    #[error("the lease {0} is over")]
    NoLease(LeaseId),
    /// The store itself fails.
    #[error("the state of the control plane cannot be read or written: {0}")]
    Failed(String),
}

/// A store. Times are arguments; a call may block for as long as a disk takes.
pub trait Store: Send + Sync {
    /// A value.
    ///
    /// # Errors
    /// The store fails.
    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError>;
    /// All keys with this prefix, in order.
    ///
    /// # Errors
    /// The store fails.
    fn list(&self, prefix: &str) -> Result<Vec<(String, Entry)>, StoreError>;
    /// Puts a value, under a lease or none; a lease it was under before does not matter any more.
    ///
    /// # Errors
    /// The condition does not hold, the lease is over, or the store fails.
    fn put(&self, key: &str, value: &[u8], when: If, lease: Option<LeaseId>) -> Result<Revision, StoreError>;
    /// Takes a key away; false if there was none.
    ///
    /// # Errors
    /// The store fails.
    fn delete(&self, key: &str) -> Result<bool, StoreError>;
    /// A lease that runs out so long after `now`.
    ///
    /// # Errors
    /// The store fails.
    fn grant(&self, ttl: Duration, now: SystemTime) -> Result<LeaseId, StoreError>;
    /// The lease runs out its whole time after `now` again.
    ///
    /// # Errors
    /// The lease is over, or the store fails.
    fn keep_alive(&self, lease: LeaseId, now: SystemTime) -> Result<(), StoreError>;
    /// Takes away what is under leases that are over at `now`; gives the keys.
    ///
    /// # Errors
    /// The store fails.
    fn expire(&self, now: SystemTime) -> Result<Vec<String>, StoreError>;
    /// Tells of every change of keys with this prefix from now on. Who does not listen for [`WATCH_MAX`] changes is
    /// dropped, and has to list and watch anew.
    fn watch(&self, prefix: &str) -> mpsc::Receiver<Event>;
}

/// Changes that wait for a watcher.
pub const WATCH_MAX: usize = 1024;
