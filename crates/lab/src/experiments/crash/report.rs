//! The page: what was in force, and what was left, by configuration and phase.

use std::path::Path;

use super::point::Phase;
use super::{Group, Made, Results};
use crate::kit::{Bar, Bound, Page};

/// Returns the page, and whether everything was as it should be.
pub(super) fn page(results: &Results, load_after: f64) -> (Page, bool) {
    let mut page = Page::default();
    let count = results.groups.iter().map(|group| group.points.len()).sum::<usize>();
    let built = Path::new(&results.program).parent().and_then(Path::file_name).unwrap_or_default();
    page.text(format_args!(
        "## SIGKILL, {}\n\n{} and {load_after:.1} after. {count} points, seed {}. The program is the one in the folder `{}`.\n\n",
        results.machine.date,
        results.machine,
        results.seed,
        built.display()
    ));
    page.line(format_args!(
        "In force on the gateway while the program serves a flow, in addition to before:\n"
    ));
    page.columns([
        "configuration",
        "tables:",
        "policy rules:",
        "routes:",
        "settings:",
        "BPF programs:",
        "processes:",
    ]);
    for group in &results.groups {
        page.row(format_args!("{} | {}", group.setup.name(), group.in_force));
    }
    page.line(format_args!("\nAfter SIGKILL:\n"));
    page.columns([
        "phase",
        "configuration",
        "length, ms:",
        "points:",
        "it still ran:",
        "left behind:",
        "blocked:",
        "restarts that failed:",
        "longest until all is as before, or blocked, ms:",
    ]);
    for phase in Phase::ALL {
        results.groups.iter().for_each(|group| row(&mut page, group, phase));
    }
    page.blank();
    let all = || results.groups.iter().flat_map(|group| &group.points);
    for made in all().filter(|made| !made.outcome.is_well()) {
        let troubles: Vec<_> = made.outcome.left.iter().chain(&made.outcome.failed).cloned().collect();
        let (setup, phase) = (made.setup.name(), made.phase.name());
        page.line(format_args!(
            "- **Point {}**: {setup}, {:.1} ms into the {phase}: {}",
            made.number,
            made.delay_ms,
            troubles.join("; ")
        ));
    }
    results.missing.render(&mut page);
    let left = all().filter(|made| !made.outcome.left.is_empty()).count();
    let failed = all().filter(|made| made.outcome.failed.is_some()).count();
    let zero = |what, figure: usize| Bar::single(what, Some(figure as f64), Bound::AtMost(0.0));
    let bars = [zero("points with something left behind", left), zero("restarts that failed", failed)];
    page.blank();
    Bar::table(&mut page, &bars);
    let is_well = !results.missing.is_failure() && !bars.iter().any(Bar::is_failure);
    (page, is_well)
}

fn row(page: &mut Page, group: &Group, phase: Phase) {
    let points: Vec<&Made> = group.points.iter().filter(|made| made.phase == phase).collect();
    if points.is_empty() {
        return;
    }
    let count = |is: fn(&Made) -> bool| points.iter().filter(|made| is(made)).count();
    let longest = points.iter().filter_map(|made| made.outcome.settled_ms).fold(0.0, f64::max);
    page.row(format_args!(
        "{} | {} | {:.1} | {} | {} | {} | {} | {} | {longest:.1}",
        phase.name(),
        group.setup.name(),
        group.lengths.of(phase).as_secs_f64() * 1000.0,
        points.len(),
        count(|made| made.outcome.was_running),
        count(|made| !made.outcome.left.is_empty()),
        count(|made| made.outcome.was_blocked),
        count(|made| made.outcome.failed.is_some()),
    ));
}
