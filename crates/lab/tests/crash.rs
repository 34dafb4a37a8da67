//! The crash experiment with few points: it kills what is in force, and finds nothing left.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::process::Command;

use sidetrack_lab::launch::launcher;
use support::{Done, Tally};

/// Returns why the experiment cannot be made here.
fn obstacle() -> Option<String> {
    let has_tcx = || {
        let lo = sidetrack_sys::route::interface_index("lo").expect("every host has it");
        sidetrack_sys::bpf::attached(lo).is_ok()
    };
    support::obstacle().or_else(|| (!has_tcx()).then(|| "this kernel has no tcx (Linux 6.6)".into()))
}

/// Returns the cells of all rows that begin with this word, as text.
fn rows(text: &str, first: &str) -> Vec<Vec<String>> {
    let lines = text.lines().filter(|line| line.starts_with(&format!("| {first} |")));
    lines.map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

#[test]
fn nothing_is_left_at_random_points_of_start_reload_and_stop() {
    let mut tally = Tally::default();
    let case = "SIGKILL at random points";
    if let Some(obstacle) = obstacle() {
        tally.note(case, Ok(Done::Skipped(obstacle)));
        return tally.finish();
    }
    let launcher = launcher().expect("built beside the tests");
    let output = Command::new(launcher).args(["crash", "--quick"]).output().expect("it runs");
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{said}");
    for phase in ["start", "reload", "stop"] {
        let rows = rows(&text, phase);
        assert_eq!(rows.len(), 4, "a row for each configuration: {text}");
        for cells in rows {
            assert_eq!([&cells[3], &cells[5], &cells[7]], ["1", "0", "0"], "points, left, failed: {text}");
        }
    }
    // There was something to leave: tables, policy rules and routes; programs.
    let in_force = |setup: &str, column: usize| {
        let cells = rows(&text, setup).swap_remove(0);
        cells[column].parse::<u32>().unwrap_or_else(|_| panic!("{cells:?}"))
    };
    for setup in ["redirect and tproxy", "redirect and tproxy, closed"] {
        assert!((1..=3).all(|column| in_force(setup, column) > 0), "{text}");
    }
    for setup in ["reverse on the wire", "shunt by tc"] {
        assert!(in_force(setup, 5) >= 2, "{text}");
    }
    let reload = rows(&text, "reload");
    let closed = reload.iter().find(|cells| cells[1].ends_with("closed")).expect("a row");
    assert_eq!(closed[6], "1", "it is blocked: {text}");
    tally.note(case, Ok(Done::Ran));
    tally.finish();
}
