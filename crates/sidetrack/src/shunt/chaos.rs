//! A fast path that misbehaves on purpose: it rejects entries, confirms and reports late, and loses entries. For tests of
//! everything around it; the same seed gives the same behaviour.

use super::{FastPath, Report};
use sidetrack_core::shunt::{Cause, Entry, EntryId, Obstacle};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Longest turn: there may always be a delayed report.
const TURN: Duration = Duration::from_millis(5);

/// Wraps a fast path, and delays or changes its reports at random.
pub struct ChaosPath<P> {
    inner: P,
    state: u64,
    held: VecDeque<Report>,
    out: VecDeque<Report>,
    installed: BTreeSet<EntryId>,
}

impl<P: FastPath> ChaosPath<P> {
    /// Wraps a fast path that works.
    pub fn new(inner: P, seed: u64) -> Self {
        // Xorshift never leaves the state zero.
        let (held, out) = (VecDeque::new(), VecDeque::new());
        Self { inner, state: seed.max(1), held, out, installed: BTreeSet::new() }
    }

    /// True once in `many` calls on average, by xorshift64.
    fn one_in(&mut self, many: u64) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.is_multiple_of(many)
    }

    fn gather(&mut self) {
        while let Some(report) = self.inner.report() {
            match report {
                Report::Installed(id) => {
                    self.installed.insert(id);
                }
                Report::Gone(id, ..) => {
                    self.installed.remove(&id);
                }
                _ => {}
            }
            self.held.push_back(report);
        }
    }
}

impl<P: FastPath> FastPath for ChaosPath<P> {
    fn install(&mut self, entry: &Entry) {
        if self.one_in(4) {
            let why = if self.one_in(2) { Obstacle::Full } else { Obstacle::Refused };
            return self.held.push_back(Report::Failed(entry.id, why));
        }
        self.inner.install(entry);
    }

    fn remove(&mut self, id: EntryId, cause: Cause) {
        self.inner.remove(id, cause);
    }

    fn suspend(&mut self) {
        self.inner.suspend();
    }

    fn tend(&mut self) -> io::Result<Duration> {
        let due = self.inner.tend()?;
        self.gather();
        if self.one_in(8)
            && let Some(id) = self.installed.iter().next().copied()
        {
            self.inner.remove(id, Cause::Lost);
            self.gather();
        }
        // Reports keep their order, but are delayed.
        while !self.held.is_empty() && !self.one_in(3) {
            self.out.extend(self.held.pop_front());
        }
        Ok(due.min(TURN))
    }

    fn count(&mut self) -> io::Result<()> {
        self.inner.count()
    }

    fn finish(&mut self) {
        self.inner.finish();
    }

    fn report(&mut self) -> Option<Report> {
        self.out.pop_front()
    }

    fn judges_resets(&self) -> bool {
        self.inner.judges_resets()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.descriptors()
    }
}
