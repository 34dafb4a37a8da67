//! The latest records, and the clients that follow new ones.

use super::FlowRecord;
use crate::live::{Batch, Ended, LiveFlow};
use serde::Serialize;
use sidetrack_core::filter::Filter;
use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc;

/// Most followers at a time. A further one is rejected.
pub const FOLLOWERS_MAX: usize = 64;

/// Most lines queued for one follower. Further lines are counted as missed.
const FOLLOW_QUEUE: usize = 1024;

/// Where the control thread stores what happened, and where the admin interface reads it.
#[derive(Debug)]
pub struct Feed {
    inner: Mutex<Inner>,
    recent_max: usize,
}

#[derive(Debug, Default)]
struct Inner {
    /// The latest ended flows: full batches, or small ones merged.
    recent: VecDeque<Batch>,
    /// The number of flows in them.
    kept: usize,
    ended: u64,
    followers: Vec<Follower>,
    closed: bool,
}

#[derive(Debug)]
struct Follower {
    filter: Filter,
    opened: bool,
    missed: u64,
    lines: mpsc::Sender<Arc<str>>,
}

/// One line of `/v1/events`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Event<'a> {
    Opened(&'a FlowRecord<'a>),
    Ended(&'a FlowRecord<'a>),
    /// This number of lines did not fit into the queue since the last line that did.
    Missed {
        count: u64,
    },
}

impl Event<'_> {
    fn line(&self) -> Option<Arc<str>> {
        serde_json::to_string(self).ok().map(|text| (text + "\n").into())
    }
}

/// A follower's end of the queue: JSON lines as they come. It ends when the recorder stops.
#[derive(Debug)]
pub struct Follow(mpsc::Receiver<Arc<str>>);

impl Follow {
    /// Returns the next line with its line end.
    pub async fn next(&mut self) -> Option<Arc<str>> {
        self.0.recv().await
    }

    /// [`Follow::next`] as a poll function.
    pub fn poll_next(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Option<Arc<str>>> {
        self.0.poll_recv(cx)
    }
}

/// There are [`FOLLOWERS_MAX`] followers already, or the recorder has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{FOLLOWERS_MAX} others follow the flows already: end one of them")]
pub struct TooManyFollowers;

impl Feed {
    /// A feed that stores the latest `recent_max` records.
    pub fn new(recent_max: usize) -> Self {
        Self { inner: Mutex::default(), recent_max }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Returns the latest ended flows for which `pick` is true, latest first, at most `most`.
    pub fn recent(&self, most: usize, mut pick: impl FnMut(&Ended) -> bool) -> Vec<Ended> {
        let inner = self.inner();
        let latest = inner.recent.iter().rev().flat_map(|batch| batch.iter().rev()).take(self.recent_max);
        latest.map(|past| past.to_ended()).filter(|ended| pick(ended)).take(most).collect()
    }

    /// The number of flows that ended since the start.
    pub fn ended_total(&self) -> u64 {
        self.inner().ended
    }

    /// The number of followers.
    pub fn followers(&self) -> usize {
        self.inner().followers.iter().filter(|follower| !follower.lines.is_closed()).count()
    }

    /// Follows flows that match `filter`: when they end and, if `opened` is set, when policy has decided on
    /// them.
    ///
    /// # Errors
    /// Fails if there are too many followers.
    pub fn follow(&self, filter: Filter, opened: bool) -> Result<Follow, TooManyFollowers> {
        let (sender, receiver) = mpsc::channel(FOLLOW_QUEUE);
        let mut inner = self.inner();
        inner.followers.retain(|follower| !follower.lines.is_closed());
        if inner.followers.len() >= FOLLOWERS_MAX {
            return Err(TooManyFollowers);
        }
        if !inner.closed {
            inner.followers.push(Follower { filter, opened, missed: 0, lines: sender });
        }
        Ok(Follow(receiver))
    }

    /// Whether a follower wants lines about opened flows.
    pub(super) fn wants_opened(&self) -> bool {
        self.inner().followers.iter().any(|follower| follower.opened)
    }

    /// Ends all followers. They can still read what is queued.
    pub(super) fn close(&self) {
        let mut inner = self.inner();
        inner.closed = true;
        inner.followers.clear();
    }

    /// Tells followers about a flow that policy has decided on.
    pub(super) fn tell_opened(&self, flow: &LiveFlow) {
        let decided = flow.decided();
        let record = FlowRecord::live(flow, decided.as_deref());
        self.inner().tell(&record, &Event::Opened(&record));
    }

    /// Tells followers about a flow that ended.
    pub(super) fn tell_ended(&self, record: &FlowRecord<'_>) {
        self.inner().tell(record, &Event::Ended(record));
    }

    /// Whether there are followers.
    pub(super) fn has_followers(&self) -> bool {
        !self.inner().followers.is_empty()
    }

    /// Stores ended flows, and drops the oldest beyond the limit.
    pub(super) fn keep(&self, batch: Batch) {
        let mut inner = self.inner();
        inner.ended += batch.len() as u64;
        if self.recent_max == 0 {
            return;
        }
        inner.kept += batch.len();
        // At low rates batches are small. Merging them saves memory.
        if !inner.recent.back_mut().is_some_and(|last| last.absorb(&batch)) {
            inner.recent.push_back(batch);
        }
        let mut oldest = Vec::new();
        while let Some(first) = inner.recent.front().map(Batch::len)
            && inner.kept - first >= self.recent_max
        {
            inner.kept -= first;
            oldest.extend(inner.recent.pop_front());
        }
        // Free the memory without the lock, so that readers do not wait for it.
        drop(inner);
        drop(oldest);
    }
}

impl Inner {
    fn tell(&mut self, record: &FlowRecord<'_>, event: &Event<'_>) {
        if self.followers.is_empty() {
            return;
        }
        let opening = matches!(event, Event::Opened(_));
        let mut line = None;
        self.followers.retain_mut(|follower| {
            if (!opening || follower.opened)
                && follower.filter.matches(&record.facts())
                && let Some(line) = line.get_or_insert_with(|| event.line())
            {
                follower.send(line.clone());
            }
            !follower.lines.is_closed()
        });
    }
}

impl Follower {
    fn send(&mut self, line: Arc<str>) {
        if self.missed > 0 {
            let told = Event::Missed { count: self.missed }.line();
            if told.is_some_and(|told| self.lines.try_send(told).is_ok()) {
                self.missed = 0;
            }
        }
        if self.missed > 0 || self.lines.try_send(line).is_err() {
            self.missed += 1;
        }
    }
}
