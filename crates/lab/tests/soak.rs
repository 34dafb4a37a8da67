//! The soak with a few seconds: every route and listener has flows, there was a fault and reloads, and all bars hold.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::process::Command;

use sidetrack_lab::launch::launcher;
use support::{Done, Tally, obstacle};

/// Returns the number in this column of the row with this name.
fn number(text: &str, row: &str, column: usize) -> usize {
    let line = text.lines().find(|line| line.starts_with(&format!("| {row} |")));
    let line = line.unwrap_or_else(|| panic!("no row {row}: {text}"));
    let cell = line.trim_matches('|').split('|').nth(column).map(str::trim);
    cell.and_then(|cell| cell.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn no_byte_is_wrong_and_no_flow_is_cut_without_a_fault() {
    let mut tally = Tally::default();
    let case = "mixed traffic";
    if let Some(obstacle) = obstacle() {
        tally.note(case, Ok(Done::Skipped(obstacle)));
        return tally.finish();
    }
    let launcher = launcher().expect("built beside the tests");
    let output = Command::new(launcher).args(["soak", "--quick"]).output().expect("it runs");
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{said}");
    let rows = [
        "kernel", "splice", "socks5", "http", "tunnel", "overlay", "wasm", "tproxy", "redirect", "reverse",
        "engine", "shunt", "run",
    ];
    for row in rows {
        assert!(number(&text, row, 1) > 0, "no flow of {row}: {text}");
    }
    assert!(number(&text, "far program", 1) > 0, "{text}");
    assert!(text.contains(" reloads.") && !text.contains(" 0 reloads."), "{text}");
    tally.note(case, Ok(Done::Ran));
    tally.finish();
}
