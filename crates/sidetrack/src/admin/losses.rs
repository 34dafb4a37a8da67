//! What a running process cannot write at present: records, the history, and stored responses.

use super::findings::Finding;
use super::{AdminState, Control};
use crate::record::Trouble;

/// Something that is written, and what says why it is not.
pub type Written = (&'static str, Trouble);

/// The names of checks that only a running process can make, for `sidetrack doctor`.
pub const ONLY_RUNNING: [&str; 4] = [RECORDS, HISTORY, CACHE, "memory"];

/// The file of records.
pub const RECORDS: &str = "records";
/// The history of flows.
pub const HISTORY: &str = "history";
/// Responses on disk.
const CACHE: &str = "cache on disk";

/// Returns what is not written at present: its name, the place and the error.
pub(super) fn now(written: &[Written], control: &dyn Control) -> Vec<(&'static str, String)> {
    let files = written.iter().filter_map(|(name, trouble)| Some((*name, trouble.now()?)));
    let caches = control.caches().into_iter().filter_map(|cache| cache.disk);
    let caches = caches.filter_map(|disk| Some((CACHE, format!("{}: {}", disk.folder, disk.trouble?))));
    files.chain(caches).collect()
}

/// Returns a finding for each of them.
pub(super) fn findings(state: &AdminState) -> Vec<Finding> {
    let finding = |(name, why): (&'static str, String)| Finding {
        name: name.to_owned(),
        level: "warn".to_owned(),
        found: format!("the running sidetrack cannot write to {why}"),
        needed_for: match name {
            CACHE => "responses that survive a restart; requests are served",
            _ => "knowing what flows there were; flows go on",
        }
        .to_owned(),
        fix: Some("make room, or allow writing there; sidetrack tries again by itself".to_owned()),
    };
    now(&state.written, &*state.control).into_iter().map(finding).collect()
}

impl AdminState {
    /// The same with what it writes.
    #[must_use]
    pub fn writing(self, written: Vec<Written>) -> Self {
        Self { written: written.into(), ..self }
    }

    /// Tells the metrics what is not written at present.
    pub(super) fn count_losses(&self) {
        let now = now(&self.written, &*self.control);
        for name in [RECORDS, HISTORY, CACHE] {
            let what = if name == CACHE { "cache" } else { name };
            self.metrics.read_unwritable(what, now.iter().any(|(other, _)| *other == name));
        }
        let disks = self.control.caches().into_iter().filter_map(|cache| cache.disk);
        self.metrics.read_unwritten(disks.map(|disk| disk.unwritten).sum());
    }
}
