//! The page: a heading, and the table and bars of each part.

use std::path::Path;

use super::Results;
use crate::kit::{Bar, Bound, Page};

/// Writes the page. Returns whether everything was as it should be.
pub(super) fn write(page: &mut Page, results: &Results, load_after: f64) -> bool {
    let built = Path::new(&results.program).parent().and_then(Path::file_name).unwrap_or_default();
    page.text(format_args!(
        "## Faults, {}\n\n{} and {load_after:.1} after. The program is the one in the folder `{}`.\n\n",
        results.machine.date,
        results.machine,
        built.display()
    ));
    let mut bars = Vec::new();
    if let Some(done) = &results.reload {
        done.table(page);
        bars.extend(done.bars());
    }
    if let Some(done) = &results.memory {
        done.table(page);
        bars.extend(done.bars());
    }
    if let Some(done) = &results.disk {
        done.table(page);
        bars.extend(done.bars());
    }
    if let Some(done) = &results.clock {
        done.table(page);
        bars.extend(done.bars());
    }
    results.missing.render(page);
    Bar::table(page, &bars);
    !results.missing.is_failure() && !bars.iter().any(Bar::is_failure)
}

/// A bar for something that must not happen.
pub(super) fn none(what: &str, count: u64) -> Bar {
    Bar::single(what, Some(count as f64), Bound::AtMost(0.0))
}

/// A bar for something that must happen.
pub(super) fn some(what: &str, count: u64) -> Bar {
    Bar::single(what, Some(count as f64), Bound::AtLeast(1.0))
}

/// Bytes as MiB.
pub(super) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
