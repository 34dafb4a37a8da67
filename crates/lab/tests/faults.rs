//! The experiment of faults, some seconds for each part.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::process::Command;

use sidetrack_lab::launch::launcher;
use support::{Done, Tally};

/// Makes one part, and returns its page. `None`: it cannot be made here, which is noted.
fn part(tally: &mut Tally, name: &str) -> Option<String> {
    if let Some(obstacle) = support::obstacle() {
        tally.note(name, Ok(Done::Skipped(obstacle)));
        return None;
    }
    let launcher = launcher().expect("built beside the tests");
    let output =
        Command::new(launcher).args(["faults", "--quick", "--part", name]).output().expect("it runs");
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{said}");
    if let Some(absent) = text.lines().find(|line| line.contains("its program is absent")) {
        tally.note(name, Ok(Done::Skipped(absent.to_owned())));
        return None;
    }
    assert!(text.contains("bars, 0 failed"), "{text}");
    tally.note(name, Ok(Done::Ran));
    Some(text.into_owned())
}

/// Returns the cells of the first row of numbers.
fn figures(text: &str) -> Vec<f64> {
    let row = text.lines().skip_while(|line| !line.starts_with("|---")).nth(1).expect("a row");
    row.trim_matches('|').split('|').map(|cell| cell.trim().parse().unwrap_or(f64::NAN)).collect()
}

#[test]
fn no_reload_cuts_a_flow() {
    let mut tally = Tally::default();
    if let Some(text) = part(&mut tally, "reload") {
        let figures = figures(&text);
        assert_eq!((figures[0], figures[2]), (40.0, 40.0), "reloads, flows: {text}");
        assert!(figures[3] > 0.0, "flows went on: {text}");
    }
    tally.finish();
}

#[test]
fn jumps_of_the_clock_cut_no_flow() {
    let mut tally = Tally::default();
    if let Some(text) = part(&mut tally, "clock") {
        assert_eq!(text.matches("| fetched again | found |").count(), 3, "{text}");
    }
    tally.finish();
}
