//! Rows without figures: an experiment names them, goes on, and says at its end that something is missing.

use super::Page;
use crate::peers::Absent;
use crate::progress::Progress;
use anyhow::Result;
use serde::Serialize;

/// Rows and parts without figures. One that needs a program which is not installed is named in the report, and does not make
/// the run fail.
#[derive(Debug, Default, Serialize)]
pub struct Missing {
    /// Those whose programs are absent.
    pub absent: Vec<String>,
    /// Those that could not be measured.
    pub troubles: Vec<String>,
}

impl Missing {
    /// Gives what a row came to; notes and prints why it came to nothing.
    pub fn note<T>(&mut self, row: &str, done: Result<T>, progress: &Progress) -> Option<T> {
        let error = match done {
            Ok(done) => return Some(done),
            Err(error) => error,
        };
        if let Some(absent) = error.downcast_ref::<Absent>() {
            progress.say(&format!("{row} is not measured: {absent}"));
            self.absent.push(format!("{row}: {absent}"));
        } else {
            progress.say(&format!("{row} was not measured: {error:#}"));
            self.troubles.push(format!("{row}: {error:#}"));
        }
        None
    }

    /// Whether a row could not be measured that should have been.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        !self.troubles.is_empty()
    }

    /// Writes the rows as a list; nothing if none is missing.
    pub fn render(&self, page: &mut Page) {
        for absent in &self.absent {
            page.line(format_args!("- Not measured, its program is absent: {absent}"));
        }
        for trouble in &self.troubles {
            page.line(format_args!("- **Not measured**: {trouble}"));
        }
        if !self.absent.is_empty() || !self.troubles.is_empty() {
            page.blank();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn what_is_absent_fails_nothing_and_what_breaks_is_named() {
        let (mut missing, progress) = (Missing::default(), Progress::new());
        assert_eq!(missing.note("Flood", Ok(7), &progress), Some(7));
        let absent = || Err::<(), _>(anyhow::Error::new(Absent("scp: install it".to_owned())));
        assert_eq!(missing.note("Wide", absent(), &progress), None);
        assert_eq!(missing.note("Scp", absent().context("no copy"), &progress), None);
        assert!(!missing.is_failure() && missing.absent.len() == 2, "{missing:?}");
        assert_eq!(missing.note("Idle", Err::<(), _>(anyhow!("it broke")), &progress), None);
        assert!(missing.is_failure());
        let mut page = Page::default();
        missing.render(&mut page);
        assert!(page.as_str().contains("- **Not measured**: Idle: it broke\n"), "{page:?}");
    }
}
