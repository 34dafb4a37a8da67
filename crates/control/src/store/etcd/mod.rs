//! A store on etcd, for several orchestrators: the state survives the loss of a minority of etcd's members, and of any
//! orchestrator (docs/control.md). Why over its JSON gateway: ADR 21.
//!
//! A request that a member did not answer may have been carried out. It is sent again to the next member. If its condition does
//! not hold then because the first attempt changed the key, the value in etcd is the one that was to be put: that is success.

mod client;
mod watcher;
mod wire;

use super::{Entry, Event, If, LeaseId, Revision, Store, StoreError, WATCH_MAX};
use crate::settings::EtcdAt;
use client::{Answer, Client, Failure};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use wire::{
    Bytes64, Compare, Done, Found, LeaseAsk, Leased, Line, Number, Operation, Range, Transaction, end_of,
    lease,
};

/// Shortest lease that etcd grants reliably while it elects a leader, seconds.
const TTL_MIN_S: u64 = 1;

/// A store on etcd.
pub struct EtcdStore {
    client: Arc<Client>,
    /// What all our keys begin with.
    prefix: String,
    /// Where requests run while their callers wait.
    runtime: Handle,
}

impl EtcdStore {
    /// A store at these members. Requests run on `runtime`, which must have several threads. No member is asked yet.
    pub fn new(at: EtcdAt, runtime: Handle) -> Self {
        Self { prefix: at.prefix.clone(), client: Arc::new(Client::new(at)), runtime }
    }

    /// Waits for a request, and lets other tasks of this thread go on elsewhere meanwhile.
    fn wait<T>(&self, request: impl Future<Output = T>) -> T {
        match Handle::try_current() {
            Ok(_) => tokio::task::block_in_place(|| self.runtime.block_on(request)),
            Err(_) => self.runtime.block_on(request),
        }
    }

    fn key(&self, key: &str) -> Bytes64 {
        Bytes64(format!("{}{key}", self.prefix).into_bytes())
    }

    fn range(&self, range: &Range) -> Result<Found, StoreError> {
        Ok(self.wait(self.client.ask("/v3/kv/range", range))?.value)
    }

    fn one(&self, key: &str) -> Range {
        Range { key: self.key(key), range_end: None, limit: None }
    }

    fn transact(&self, transaction: &Transaction) -> Result<Answer<Done>, Failure> {
        self.wait(self.client.ask("/v3/kv/txn", transaction))
    }
}

/// The key without our prefix.
fn own(prefix: &str, key: &Bytes64) -> Option<String> {
    String::from_utf8(key.0.clone()).ok()?.strip_prefix(prefix).map(str::to_owned)
}

/// What the key has now, if the condition did not hold.
fn present(done: Done) -> Option<Entry> {
    let mut found = done.responses.into_iter().flat_map(|response| response.response_range.kvs);
    found.next().map(wire::KeyValue::entry)
}

impl Store for EtcdStore {
    fn is_shared(&self) -> bool {
        true
    }

    fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        Ok(self.range(&self.one(key))?.kvs.into_iter().next().map(wire::KeyValue::entry))
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, Entry)>, StoreError> {
        let key = self.key(prefix);
        let range = Range { range_end: Some(end_of(&key.0)), key, limit: None };
        let found = self.range(&range)?.kvs.into_iter();
        Ok(found.filter_map(|pair| Some((own(&self.prefix, &pair.key)?, pair.entry()))).collect())
    }

    fn put(&self, key: &str, value: &[u8], when: If, under: Option<LeaseId>) -> Result<Revision, StoreError> {
        let etcd_key = self.key(key);
        let transaction = Transaction {
            compare: Compare::of(&etcd_key, when),
            success: vec![Operation::Put {
                key: etcd_key,
                value: Bytes64(value.to_vec()),
                lease: lease(under),
            }],
            failure: vec![Operation::Range(self.one(key))],
        };
        let answer = self.transact(&transaction).map_err(|failure| match (failure, under) {
            (Failure::NotFound(_), Some(lease)) => StoreError::NoLease(lease),
            (failure, _) => failure.into(),
        })?;
        if answer.value.succeeded {
            return Ok(answer.value.header.revision.0);
        }
        match present(answer.value) {
            Some(there) if answer.repeated && there.value == value && there.lease == under => {
                Ok(there.revision)
            }
            _ => Err(StoreError::Conflict(key.to_owned())),
        }
    }

    fn delete(&self, key: &str, when: If) -> Result<bool, StoreError> {
        let etcd_key = self.key(key);
        let transaction = Transaction {
            compare: Compare::of(&etcd_key, when),
            success: vec![Operation::DeleteRange { key: etcd_key }],
            failure: vec![Operation::Range(self.one(key))],
        };
        let Answer { value: done, repeated } = self.transact(&transaction)?;
        if done.succeeded {
            let deleted =
                done.responses.first().is_some_and(|response| response.response_delete_range.deleted.0 > 0);
            return Ok(deleted || repeated);
        }
        match present(done) {
            // An earlier attempt has deleted it.
            None if repeated => Ok(true),
            _ => Err(StoreError::Conflict(key.to_owned())),
        }
    }

    fn grant(&self, ttl: Duration, _now: SystemTime) -> Result<LeaseId, StoreError> {
        // etcd counts whole seconds. Rounded up: the holder counts with at least this time.
        let ttl = Number(ttl.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX).max(TTL_MIN_S));
        let ask = LeaseAsk { ttl: Some(ttl), id: Number(0) };
        let leased: Answer<Leased> = self.wait(self.client.ask("/v3/lease/grant", &ask))?;
        Ok(leased.value.id.0)
    }

    fn keep_alive(&self, lease: LeaseId, _now: SystemTime) -> Result<(), StoreError> {
        let ask = LeaseAsk { ttl: None, id: Number(lease) };
        let line: Answer<Line<Leased>> = self.wait(self.client.ask("/v3/lease/keepalive", &ask))?;
        match line.value.result {
            Some(leased) if leased.ttl.0 > 0 => Ok(()),
            _ => Err(StoreError::NoLease(lease)),
        }
    }

    /// etcd does it itself: nothing is left to do.
    fn expire(&self, _now: SystemTime) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }

    fn watch(&self, prefix: &str, from: Option<Revision>) -> Result<mpsc::Receiver<Event>, StoreError> {
        let start = match from {
            Some(revision) => revision,
            // The next revision is fixed before this returns, so that no later change is missed.
            None => {
                wire::after(self.range(&Range { limit: Some(Number(1)), ..self.one("") })?.header.revision.0)
            }
        };
        let (told, changes) = mpsc::channel(WATCH_MAX);
        let key = self.key(prefix);
        let watch = watcher::Watcher::new(self.client.clone(), self.prefix.clone(), key, start, told);
        self.runtime.spawn(watch.follow());
        Ok(changes)
    }
}
