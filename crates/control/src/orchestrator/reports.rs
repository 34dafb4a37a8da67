//! What set-ups have reported lately, for screens. It is kept in memory: another orchestrator, and this one after a restart, does not
//! know it.

use crate::api::{ApplicationStatus, Progress, Report};
use crate::name;
use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Set-ups that are kept.
const KEPT_MAX: usize = 64;
/// Lines of one set-up: its steps, and why it failed.
const LINES_MAX: usize = 9;

/// The latest set-ups, oldest first.
#[derive(Debug, Default)]
pub(super) struct Reports(Mutex<VecDeque<Report>>);

impl Reports {
    /// A set-up begins. One whose name is not valid ends at its first step, and is not kept.
    pub(super) fn begin(&self, status: &ApplicationStatus) {
        let name = &status.application.name;
        if name::check(name).is_err() {
            return;
        }
        let mut kept = lock(&self.0);
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        let (id, owner) = (status.id.clone(), status.owner.clone());
        kept.push_back(Report { name: name.clone(), id, owner, lines: Vec::new() });
    }

    /// The set-up with this identity reports a line.
    pub(super) fn add(&self, id: &str, line: &Progress) {
        let mut kept = lock(&self.0);
        if let Some(report) = kept.iter_mut().rev().find(|report| report.id == id)
            && report.lines.len() < LINES_MAX
        {
            report.lines.push(line.clone());
        }
    }

    /// Returns those that `fits` selects, oldest first.
    pub(super) fn of(&self, fits: impl Fn(&Report) -> bool) -> Vec<Report> {
        lock(&self.0).iter().filter(|report| fits(report)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Phase, Step};
    use serde_json::json;

    fn status(name: &str, id: &str) -> ApplicationStatus {
        let application = json!({ "name": name, "purpose": "research", "flows": [] });
        ApplicationStatus {
            application: serde_json::from_value(application).expect("an application"),
            id: id.to_owned(),
            owner: Some("app.example".to_owned()),
            phase: Phase::Preparing,
            domains: Vec::new(),
            movements: Vec::new(),
            by: None,
            placed: Vec::new(),
        }
    }

    #[test]
    fn the_latest_set_ups_are_kept_with_bounded_lines() {
        let reports = Reports::default();
        let line = Progress::Done { step: Step::Submit, number: 1, seconds: 0.1, detail: "known".to_owned() };
        reports.begin(&status("../x", "bad"));
        for at in 0..KEPT_MAX + 3 {
            let id = format!("id-{at}");
            reports.begin(&status("trial", &id));
            (0..LINES_MAX + 5).for_each(|_| reports.add(&id, &line));
        }
        reports.add("id-0", &line);
        let all = reports.of(|_| true);
        assert_eq!((all.len(), all[0].id.as_str(), all[0].lines.len()), (KEPT_MAX, "id-3", LINES_MAX));
        assert!(reports.of(|report| report.owner.as_deref() == Some("other.example")).is_empty());
    }
}
