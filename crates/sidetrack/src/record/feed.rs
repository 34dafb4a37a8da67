//! The latest records, and those who follow along.

use super::FlowRecord;
use crate::live::{Batch, Ended, LiveFlow};
use serde::Serialize;
use sidetrack_core::filter::Filter;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// Followers at one time; one more is refused.
pub const FOLLOWERS_MAX: usize = 64;

/// Lines that wait for one follower; what comes while so many wait is counted as missed.
const FOLLOW_QUEUE: usize = 1024;

/// Where the control thread puts what happened, and the admin interface finds it.
#[derive(Debug)]
pub struct Feed {
    inner: Mutex<Inner>,
    recent_max: usize,
}

#[derive(Debug, Default)]
struct Inner {
    /// The latest flows that ended: full batches, and what comes in small ones put together.
    recent: VecDeque<Batch>,
    /// The number of these.
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
    /// So many lines had no room, since the last one that had.
    Missed {
        count: u64,
    },
}

impl Event<'_> {
    fn line(&self) -> Option<Arc<str>> {
        serde_json::to_string(self).ok().map(|text| (text + "\n").into())
    }
}

/// A follower's end: JSON lines as they come, none when the recorder stops.
#[derive(Debug)]
pub struct Follow(mpsc::Receiver<Arc<str>>);

impl Follow {
    /// The next line, with its line end.
    pub async fn next(&mut self) -> Option<Arc<str>> {
        self.0.recv().await
    }

    /// As [`Follow::next`], for those who poll.
    pub fn poll_next(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Option<Arc<str>>> {
        self.0.poll_recv(cx)
    }
}

/// [`FOLLOWERS_MAX`] are there already, or the recorder has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{FOLLOWERS_MAX} others follow the flows already: end one of them")]
pub struct TooManyFollowers;

impl Feed {
    /// A feed that keeps the latest `recent_max` records.
    pub fn new(recent_max: usize) -> Self {
        Self { inner: Mutex::default(), recent_max }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The latest flows that ended and that `pick` takes, latest first, at most `most`.
    pub fn recent(&self, most: usize, mut pick: impl FnMut(&Ended) -> bool) -> Vec<Ended> {
        let inner = self.inner();
        let latest = inner.recent.iter().rev().flat_map(|batch| batch.iter().rev()).take(self.recent_max);
        latest.map(|past| past.to_ended()).filter(|ended| pick(ended)).take(most).collect()
    }

    /// The number of flows that ended since the start.
    pub fn ended_total(&self) -> u64 {
        self.inner().ended
    }

    /// The number of those who follow.
    pub fn followers(&self) -> usize {
        self.inner().followers.iter().filter(|follower| !follower.lines.is_closed()).count()
    }

    /// Follows the flows that `filter` takes as they end and, if `opened` is set, as policy has decided on them.
    ///
    /// # Errors
    /// When there are too many followers.
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

    /// Whether somebody wants to hear of flows that open.
    pub(super) fn wants_opened(&self) -> bool {
        self.inner().followers.iter().any(|follower| follower.opened)
    }

    /// Ends all that follow, after what they have not read yet.
    pub(super) fn close(&self) {
        let mut inner = self.inner();
        inner.closed = true;
        inner.followers.clear();
    }

    /// Tells of a flow that policy has decided on.
    pub(super) fn tell_opened(&self, flow: &LiveFlow) {
        let decided = flow.decided();
        let record = FlowRecord::live(flow, decided.as_deref());
        self.inner().tell(&record, &Event::Opened(&record));
    }

    /// Tells of a flow that ended.
    pub(super) fn tell_ended(&self, record: &FlowRecord<'_>) {
        self.inner().tell(record, &Event::Ended(record));
    }

    /// Whether somebody follows.
    pub(super) fn has_followers(&self) -> bool {
        !self.inner().followers.is_empty()
    }

    /// Keeps flows that ended, instead of the oldest.
    pub(super) fn keep(&self, batch: Batch) {
        let mut inner = self.inner();
        inner.ended += batch.len() as u64;
        if self.recent_max == 0 {
            return;
        }
        inner.kept += batch.len();
        // At low rates batches are small: put together they take less memory.
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
        // Whoever reads need not wait until their memory is given back.
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
