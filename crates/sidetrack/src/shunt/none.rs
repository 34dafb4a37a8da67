//! No fast path: every flow that would be shunted is shown with that, and stays where it is.

use super::{FastPath, Report};
use sidetrack_core::shunt::{Cause, Entry, EntryId, Obstacle};
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

/// How long it may be left alone.
const NOTHING_DUE: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug, Default)]
pub struct NoPath {
    reports: VecDeque<Report>,
}

impl FastPath for NoPath {
    fn install(&mut self, entry: &Entry) {
        self.reports.push_back(Report::Failed(entry.id, Obstacle::NoPath));
    }

    /// Nothing was ever installed: there is nothing to remove.
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
