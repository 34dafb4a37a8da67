//! Sessions whose far end is this node. They are looked up here when they continue over a new path.

use super::endpoint::Path;
use super::lanes::Usage;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::SessionId;
use sidetrack_core::overlay::session::{Attempt, PATHS_MAX};
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;

/// Most ended sessions whose ids are remembered, so that a replayed opening starts nothing.
const ENDED_MAX: usize = 65_536;

/// Most sessions at a time; near ends and far ends both count.
pub(super) const SESSIONS_MAX: usize = 100_000;

/// Most memory of all sessions together, bytes. Each session may use at least [`SHARE_MIN`] and at most [`SHARE_MAX`].
const MEMORY_BYTES: usize = 512 * 1024 * 1024;
const SHARE_MIN: usize = 64 * 1024;
const SHARE_MAX: usize = 32 * 1024 * 1024;

/// An open session.
struct Live {
    /// The node that asked for it.
    from: NodeId,
    /// Takes its new paths.
    paths: mpsc::Sender<Path>,
    /// The latest attempt to open each path again, by its number.
    attempts: [u32; PATHS_MAX as usize],
}

/// The result of an attempt to continue a session.
pub(super) enum Resumed {
    /// The session accepts the path: send it here.
    On(mpsc::Sender<Path>),
    /// A later attempt has already succeeded: the asking node no longer waits for this one.
    Overtaken,
    /// The session has ended, or never existed.
    Unknown,
}

#[derive(Default)]
struct Inner {
    live: BTreeMap<SessionId, Live>,
    ended: BTreeMap<SessionId, ()>,
    order: VecDeque<SessionId>,
    /// Sessions that began here and use several paths.
    usages: BTreeMap<SessionId, Arc<Usage>>,
}

/// The open sessions, and the ids of ended ones.
#[derive(Default)]
pub(super) struct Sessions {
    inner: Mutex<Inner>,
    count: AtomicUsize,
}

/// Counts one session until it is dropped.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Sessions {
    /// Counts one more session; none if the limit is reached.
    pub(super) fn count(&self) -> Option<Counted<'_>> {
        if self.count.fetch_add(1, Relaxed) >= SESSIONS_MAX {
            self.count.fetch_sub(1, Relaxed);
            return None;
        }
        Some(Counted(&self.count))
    }

    /// Returns the number of sessions.
    pub(super) fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Returns how many bytes one session may hold in each direction now.
    pub(super) fn share_bytes(&self) -> u32 {
        let share = (MEMORY_BYTES / 2 / self.len().max(1)).clamp(SHARE_MIN, SHARE_MAX);
        u32::try_from(share).unwrap_or(u32::MAX)
    }

    /// Adds a session that the node `from` asked for. Returns false if this id is or was in use.
    pub(super) fn enter(&self, id: SessionId, from: NodeId, paths: mpsc::Sender<Path>) -> bool {
        let mut inner = lock(&self.inner);
        if inner.live.contains_key(&id) || inner.ended.contains_key(&id) {
            return false;
        }
        inner.live.insert(id, Live { from, paths, attempts: [0; PATHS_MAX as usize] });
        true
    }

    /// Checks an attempt of `from` to continue the session with this id over another path.
    pub(super) fn resume(&self, id: SessionId, from: NodeId, attempt: Attempt) -> Resumed {
        let mut inner = lock(&self.inner);
        let Some(live) = inner.live.get_mut(&id).filter(|live| live.from == from) else {
            return Resumed::Unknown;
        };
        match live.attempts.get_mut(usize::from(attempt.path)) {
            Some(latest) if *latest < attempt.number => {
                *latest = attempt.number;
                Resumed::On(live.paths.clone())
            }
            _ => Resumed::Overtaken,
        }
    }

    /// Notes a session that began here and uses several paths. [`Sessions::forget`] takes it back.
    pub(super) fn note(&self, id: SessionId, usage: Arc<Usage>) {
        lock(&self.inner).usages.insert(id, usage);
    }

    /// Forgets a session that began here.
    pub(super) fn forget(&self, id: SessionId) {
        lock(&self.inner).usages.remove(&id);
    }

    /// Returns what the sessions that began here do with their paths.
    pub(super) fn usages(&self) -> Vec<Arc<Usage>> {
        lock(&self.inner).usages.values().cloned().collect()
    }

    /// Removes a session, and remembers its id.
    pub(super) fn leave(&self, id: SessionId) {
        let mut inner = lock(&self.inner);
        if inner.live.remove(&id).is_some() {
            inner.ended.insert(id, ());
            inner.order.push_back(id);
        }
        while inner.order.len() > ENDED_MAX {
            if let Some(old) = inner.order.pop_front() {
                inner.ended.remove(&old);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::overlay::session::Mode;

    #[test]
    fn an_attempt_that_is_late_or_said_again_changes_nothing() {
        let (sessions, id, from) = (Sessions::default(), SessionId([7; 16]), NodeId(1));
        let attempt = |number| Attempt { mode: Mode::Shortest, path: 0, number };
        let is_on = |from, number| matches!(sessions.resume(id, from, attempt(number)), Resumed::On(_));
        assert!(matches!(sessions.resume(id, from, attempt(1)), Resumed::Unknown), "it never was");
        assert!(sessions.enter(id, from, mpsc::channel(1).0));
        assert!(is_on(from, 1) && is_on(from, 3));
        for number in [2, 3] {
            assert!(matches!(sessions.resume(id, from, attempt(number)), Resumed::Overtaken), "{number}");
        }
        assert!(matches!(sessions.resume(id, NodeId(2), attempt(4)), Resumed::Unknown), "of another node");
        assert!(is_on(from, 4));
        let other = Attempt { mode: Mode::Stripe, path: 1, number: 1 };
        assert!(matches!(sessions.resume(id, from, other), Resumed::On(_)), "each path counts by itself");
        assert!(matches!(sessions.resume(id, from, other), Resumed::Overtaken));
        sessions.leave(id);
        assert!(matches!(sessions.resume(id, from, attempt(5)), Resumed::Unknown), "it is over");
    }
}
