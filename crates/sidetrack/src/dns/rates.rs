//! How many datagrams of one source are answered: a table of token buckets.

use sidetrack_core::limit::{TokenBucket, source_key};
use sidetrack_core::time::Instant;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Most sources that are counted at a time. If one more comes, all begin anew.
const SOURCES_MAX: usize = 8192;

/// How a datagram is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treated {
    /// As it asks.
    Answered,
    /// By a request to come again over TCP: a forged source cannot do that, and gets no more bytes than were sent.
    Slowed,
    /// Not at all.
    Dropped,
}

/// Two buckets: for answers, and for requests to come over TCP.
#[derive(Debug)]
struct Source {
    answers: TokenBucket,
    slowed: TokenBucket,
}

/// The rates of all sources. The addresses of one IPv6 /64 are one source.
#[derive(Debug, Default)]
pub(super) struct Rates {
    sources: BTreeMap<IpAddr, Source>,
    per_second: u32,
}

impl Rates {
    /// Counts a datagram from this source, of which `per_second` are answered.
    pub(super) fn treat(&mut self, source: IpAddr, per_second: u32, now: Instant) -> Treated {
        let source = source_key(source);
        let is_full = self.sources.len() >= SOURCES_MAX && !self.sources.contains_key(&source);
        if is_full || self.per_second != per_second {
            self.sources.clear();
            self.per_second = per_second;
        }
        let bucket = || TokenBucket::new(per_second, per_second, now);
        let entry =
            self.sources.entry(source).or_insert_with(|| Source { answers: bucket(), slowed: bucket() });
        if entry.answers.take(now).is_some() {
            Treated::Answered
        } else if entry.slowed.take(now).is_some() {
            Treated::Slowed
        } else {
            Treated::Dropped
        }
    }
}
