//! The table of running flows, which all viewers share. It exists while there is a viewer, and is brought up to date once a
//! second. Each change has the number of the update that found it, its version: a viewer asks what has changed since a
//! version, whenever it can take it. So there is no queue for a viewer, and a slow one misses only what was in between.

use super::row::Row;
use crate::live::{Ended, Ledger};
use crate::record::Feed;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most flows whose end is remembered, for viewers that have not heard of it yet. A viewer that needs an older one starts again.
const GONE_MAX: usize = 1 << 17;
/// Most ended flows that are sent with their record for one update.
const ENDED_EACH: usize = 200;
/// Most ended flows that are kept for viewers.
const ENDED_MAX: usize = 2000;
/// Flows whose TCP is asked in one update.
const ASKED_EACH: usize = 256;
/// Updates after which the TCP of a flow is asked again.
const ASK_AGAIN: u64 = 3;

/// The table.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// The number of the latest update. 0: there was none.
    pub(super) version: u64,
    updated: Option<Instant>,
    /// By the number of the flow.
    pub(super) rows: BTreeMap<u64, Row>,
    /// Flows that ended, with the version.
    gone: VecDeque<(u64, u64)>,
    /// Ends of this version and earlier ones are forgotten.
    forgotten: u64,
    ended: VecDeque<(u64, Ended)>,
    ended_total: u64,
    /// The number of ended flows that were not kept, with the version.
    missed: VecDeque<(u64, u64)>,
    /// The next flow whose TCP is asked.
    ask_next: u64,
    /// Payload bytes of the last second, up and down.
    pub(super) rates: (u64, u64),
}

impl Table {
    /// An empty table that goes on with the versions of this one, so that no viewer takes one for the other.
    pub(super) fn emptied(&self) -> Self {
        Self { version: self.version, forgotten: self.version, ..Self::default() }
    }

    /// Whether it was brought up to date at least once.
    pub(super) const fn is_filled(&self) -> bool {
        self.updated.is_some()
    }

    /// Looks at all flows.
    pub(super) fn update(&mut self, ledgers: &[Arc<Ledger>], feed: &Feed, now: Instant) {
        let after =
            self.updated.map_or(Duration::from_secs(1), |before| now.saturating_duration_since(before));
        let is_first = self.updated.replace(now).is_none();
        self.version += 1;
        let version = self.version;
        let mut sum = (0, 0);
        for flow in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
            let row = self.rows.entry(flow.id.0).or_insert_with(|| Row::new(flow, version));
            let (up, down) = row.look(version, after);
            sum = (sum.0 + up, sum.1 + down);
        }
        let per_second = |bytes: u64| (bytes as f64 / after.as_secs_f64().max(0.001)) as u64;
        self.rates = if is_first { (0, 0) } else { (per_second(sum.0), per_second(sum.1)) };
        self.forget_gone();
        self.take_ended(feed, is_first);
        self.ask_tcp();
    }

    fn forget_gone(&mut self) {
        let (version, gone) = (self.version, &mut self.gone);
        self.rows.retain(|id, row| {
            let is_here = row.seen_at == version;
            if !is_here {
                gone.push_back((version, *id));
            }
            is_here
        });
        while self.gone.len() > GONE_MAX {
            if let Some((version, _)) = self.gone.pop_front() {
                self.forgotten = version;
            }
        }
    }

    fn take_ended(&mut self, feed: &Feed, is_first: bool) {
        let total = feed.ended_total();
        let new = usize::try_from(total - self.ended_total.min(total)).unwrap_or(usize::MAX);
        self.ended_total = total;
        // What ended before is not news.
        if is_first || new == 0 {
            return;
        }
        let taken = feed.recent(new.min(ENDED_EACH), |_| true);
        let missed = new - taken.len().min(new);
        if missed > 0 {
            self.missed.push_back((self.version, missed as u64));
        }
        self.ended.extend(taken.into_iter().rev().map(|ended| (self.version, ended)));
        while self.ended.len() > ENDED_MAX {
            if let Some((version, _)) = self.ended.pop_front() {
                self.missed.push_back((version, 1));
            }
        }
        while self.missed.len() > ENDED_MAX {
            self.missed.pop_front();
        }
    }

    /// Asks the TCP of some flows, in turn.
    fn ask_tcp(&mut self) {
        let (version, start) = (self.version, self.ask_next);
        let old = version.saturating_sub(ASK_AGAIN);
        let mut asked = 0;
        self.ask_next = 0;
        for (id, row) in self.rows.range_mut(start..) {
            if asked == ASKED_EACH {
                self.ask_next = *id;
                break;
            }
            if row.wants_tcp(old) {
                row.ask_tcp(version);
                asked += 1;
            }
        }
    }

    /// Whether a viewer at this version can go on from there.
    pub(super) fn remembers(&self, since: u64) -> bool {
        since >= self.forgotten && since <= self.version
    }

    /// Flows that ended after version `since`.
    pub(super) fn gone(&self, since: u64) -> impl Iterator<Item = u64> {
        self.gone.iter().rev().take_while(move |(version, _)| *version > since).map(|(_, id)| *id)
    }

    /// The latest flows that ended after version `since`, earliest first.
    pub(super) fn ended(&self, since: u64) -> impl Iterator<Item = &Ended> {
        let first = self.ended.partition_point(|(version, _)| *version <= since);
        self.ended.range(first..).map(|(_, ended)| ended)
    }

    /// How many flows ended after version `since` and are not among these.
    pub(super) fn missed(&self, since: u64) -> u64 {
        self.missed.iter().rev().take_while(|(version, _)| *version > since).map(|(_, count)| count).sum()
    }

    /// Ended flows since the start of the process.
    pub(super) const fn ended_total(&self) -> u64 {
        self.ended_total
    }
}
