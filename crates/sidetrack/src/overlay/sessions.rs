//! Sessions whose far end is this node. They are looked up here when they continue over a new path.

use super::endpoint::Path;
use super::lanes::Usage;
use super::moved::MovedSession;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::SessionId;
use sidetrack_core::overlay::session::{Attempt, PATHS_MAX};
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

/// Most ended sessions whose ids are remembered, so that a replayed opening starts nothing.
const ENDED_MAX: usize = 65_536;

/// Most sessions at a time; near ends and far ends both count.
pub(super) const SESSIONS_MAX: usize = 100_000;

/// Most memory of all sessions together, bytes. Each session may use at least [`SHARE_MIN`] and at most [`SHARE_MAX`].
const MEMORY_BYTES: usize = 512 * 1024 * 1024;
const SHARE_MIN: usize = 64 * 1024;
const SHARE_MAX: usize = 32 * 1024 * 1024;

/// How long another process may take to send its sessions. Meanwhile an attempt to continue a session that is not here waits.
const COME_WITHIN: Duration = Duration::from_secs(10);

/// Pause between two looks whether a session has come.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

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
    /// All sessions leave for another process.
    leaving: watch::Sender<bool>,
    /// Those that have left their tasks. There are at most [`SESSIONS_MAX`].
    moved: Mutex<Vec<MovedSession>>,
    /// Sessions of another process still come.
    coming: watch::Sender<bool>,
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

    /// Adds a session that another process of this node has begun. `attempts`: the latest attempts that it has accepted.
    pub(super) fn enter_again(
        &self,
        (id, from): (SessionId, NodeId),
        paths: mpsc::Sender<Path>,
        attempts: &[u32],
    ) {
        let mut known = [0; PATHS_MAX as usize];
        known.iter_mut().zip(attempts).for_each(|(known, attempt)| *known = *attempt);
        lock(&self.inner).live.insert(id, Live { from, paths, attempts: known });
    }

    /// Returns the latest attempt to open each path of a session.
    pub(super) fn attempts(&self, id: SessionId) -> Vec<u32> {
        lock(&self.inner).live.get(&id).map(|live| live.attempts.to_vec()).unwrap_or_default()
    }

    /// Lets all sessions leave their tasks.
    pub(super) fn leave_all(&self) {
        self.leaving.send_replace(true);
    }

    /// Waits until all sessions have to leave.
    pub(super) async fn all_leave(&self) {
        let mut leaving = self.leaving.subscribe();
        // The sender lives as long as `self`, so an error cannot happen.
        let _ = leaving.wait_for(|leaving| *leaving).await;
    }

    /// Adds a session that has left its task.
    pub(super) fn put_moved(&self, moved: MovedSession) {
        lock(&self.moved).push(moved);
    }

    /// Takes the sessions that have left their tasks.
    pub(super) fn take_moved(&self) -> Vec<MovedSession> {
        std::mem::take(&mut lock(&self.moved))
    }

    /// Notes whether sessions of another process still come.
    pub(super) fn set_coming(&self, coming: bool) {
        self.coming.send_replace(coming);
    }

    /// Whether sessions of another process still come.
    pub(super) fn are_coming(&self) -> bool {
        *self.coming.borrow()
    }

    /// As [`Sessions::resume`], but waits for a session that another process has not sent yet. If it was called unknown, its other
    /// end would give it up.
    pub(super) async fn resume_when_here(&self, id: SessionId, from: NodeId, attempt: Attempt) -> Resumed {
        let until = Instant::now() + COME_WITHIN;
        loop {
            // Looked at first: a session may come in between.
            let comes = self.are_coming() && Instant::now() < until;
            match self.resume(id, from, attempt) {
                Resumed::Unknown if comes => sleep(LOOK_AGAIN).await,
                resumed => return resumed,
            }
        }
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
