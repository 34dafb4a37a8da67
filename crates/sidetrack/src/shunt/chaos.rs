//! A fast path that does what a bad one might: refuses entries, confirms and reports late, and loses entries that it had. For
//! tests of everything around it; the same seed does the same.

use super::{FastPath, Report};
use sidetrack_core::shunt::{Cause, Entry, EntryId, Obstacle};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How long a turn may last: there is always something that was held back.
const TURN: Duration = Duration::from_millis(5);

/// See the module.
pub struct ChaosPath<P> {
    inner: P,
    state: u64,
    held: VecDeque<Report>,
    out: VecDeque<Report>,
    installed: BTreeSet<EntryId>,
}

impl<P: FastPath> ChaosPath<P> {
    /// Around a fast path that works.
    pub fn new(inner: P, seed: u64) -> Self {
        // Zero is the one state that xorshift does not leave.
        let (held, out) = (VecDeque::new(), VecDeque::new());
        Self { inner, state: seed.max(1), held, out, installed: BTreeSet::new() }
    }

    /// One of so many, by xorshift64.
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
        // In order, but in its own time.
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
