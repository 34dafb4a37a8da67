//! Answers of name servers that are kept for as long as they allow (RFC 2181 Sec. 8, RFC 2308).
//!
//! ```text
//!            put                      its time is over, or room is needed
//!   absent --------> kept (ages) -----------------------------------------> absent
//! ```

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of all kept answers, as they stand in messages. In memory they take a few times that.
const BYTES_MAX: usize = 4 * 1024 * 1024;
/// Bytes that count for an entry beside its message.
const ENTRY_BYTES: usize = 128;
/// Longest time for which an answer is kept, seconds (RFC 8767 Sec. 4 recommends days at most).
const LONGEST_S: u32 = 86_400;
/// Longest time for which it is kept that there is no such name or data, seconds (RFC 2308 Sec. 5).
const NEGATIVE_LONGEST_S: u32 = 10_800;
/// How long a failure is kept, seconds (RFC 9520 Sec. 3.2: at least 1).
const FAILURE_S: u32 = 1;

/// What was asked of a name server. Names are equal whatever the case of their letters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// The name.
    pub name: Name,
    /// The number of the record type.
    pub kind: u16,
    /// Whether records of DNSSEC are wanted (the DO bit).
    pub dnssec: bool,
    /// Whether the server shall not check them (the CD bit).
    pub unchecked: bool,
}

#[derive(Debug)]
struct Entry {
    message: Arc<Message>,
    since: Instant,
    until: Instant,
    bytes: usize,
}

/// The kept answers, bounded by their bytes. If there is no room, the one whose time ends first leaves.
#[derive(Debug)]
pub(super) struct Cache {
    entries: BTreeMap<Key, Entry>,
    by_end: BTreeSet<(Instant, Key)>,
    bytes: usize,
    bytes_max: usize,
}

impl Default for Cache {
    fn default() -> Self {
        Self::new(BYTES_MAX)
    }
}

impl Cache {
    /// An empty cache for this number of bytes.
    pub(super) const fn new(bytes_max: usize) -> Self {
        Self { entries: BTreeMap::new(), by_end: BTreeSet::new(), bytes: 0, bytes_max }
    }

    /// Returns a kept answer and its age in seconds.
    pub(super) fn get(&self, key: &Key, now: Instant) -> Option<(Arc<Message>, u32)> {
        let entry = self.entries.get(key).filter(|entry| now < entry.until)?;
        let age = u32::try_from(now.since(entry.since).as_secs()).unwrap_or(u32::MAX);
        Some((entry.message.clone(), age))
    }

    /// Keeps an answer of this length, if it may be kept.
    pub(super) fn put(&mut self, key: &Key, message: &Arc<Message>, bytes: usize, now: Instant) {
        self.remove(key);
        let Some(lifetime) = lifetime_s(message) else { return };
        let bytes = bytes.saturating_add(ENTRY_BYTES);
        while self.bytes.saturating_add(bytes) > self.bytes_max {
            let Some((_, first)) = self.by_end.first().cloned() else { return };
            self.remove(&first);
        }
        let until = now + Duration::from_secs(lifetime.into());
        self.by_end.insert((until, key.clone()));
        self.entries.insert(key.clone(), Entry { message: message.clone(), since: now, until, bytes });
        self.bytes += bytes;
    }

    /// Returns the number of kept answers.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn remove(&mut self, key: &Key) {
        if let Some(old) = self.entries.remove(key) {
            self.by_end.remove(&(old.until, key.clone()));
            self.bytes -= old.bytes;
        }
    }
}

/// Returns for how many seconds an answer may be kept. `None`: it may not.
pub(super) fn lifetime_s(message: &Message) -> Option<u32> {
    let shortest = message.answers.iter().map(|record| record.ttl).min();
    let seconds = match (message.metadata.response_code, shortest) {
        _ if message.metadata.truncation => return None,
        (ResponseCode::NoError, Some(shortest)) => shortest.min(LONGEST_S),
        (ResponseCode::NoError | ResponseCode::NXDomain, shortest) => {
            // Without a SOA record it must not be kept (RFC 2308 Sec. 5).
            let negative = message.authorities.iter().find_map(negative_s)?;
            negative.min(shortest.unwrap_or(u32::MAX)).min(NEGATIVE_LONGEST_S)
        }
        (ResponseCode::ServFail, _) => FAILURE_S,
        _ => return None,
    };
    (seconds > 0).then_some(seconds)
}

/// Returns for how long the zone says that a name or its data is not there.
fn negative_s(record: &Record) -> Option<u32> {
    match &record.data {
        RData::SOA(soa) => Some(record.ttl.min(soa.minimum)),
        _ => None,
    }
}
