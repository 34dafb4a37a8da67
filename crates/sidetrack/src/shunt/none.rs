//! No fast path: every flow that would be shunted is shown as such, and stays on the slow path.

use super::{FastPath, Report};
use sidetrack_core::shunt::{Cause, Entry, EntryId, Obstacle};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// How long until the next call is needed.
const NOTHING_DUE: Duration = Duration::from_secs(1);

/// A fast path that rejects every entry.
#[derive(Debug, Default)]
pub(super) struct NoPath {
    reports: VecDeque<Report>,
}

impl FastPath for NoPath {
    fn install(&mut self, entry: &Entry) {
        self.reports.push_back(Report::Failed(entry.id, Obstacle::NoPath));
    }

    /// Does nothing: no entry was ever installed.
    fn remove(&mut self, _id: EntryId, _cause: Cause) {}

    fn suspend(&mut self) {}

    fn tend(&mut self) -> io::Result<Duration> {
        Ok(NOTHING_DUE)
    }

    fn count(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    fn judges_resets(&self) -> bool {
        false
    }
}
