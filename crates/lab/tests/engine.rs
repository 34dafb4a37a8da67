//! The complete engine experiment: the generator and the engine count the same, and streams between two kernels are
//! exact over bad links.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::path::Path;
use std::process::Command;

use sidetrack_lab::launch::{find_program, launcher};
use sidetrack_lab::peers::ours;
use support::{Done, Tally};

/// Runs these parts of the experiment, if this user and host can; returns its output.
fn run(case: &str, arguments: &[&str]) -> Option<String> {
    let mut tally = Tally::default();
    let (mut text, launcher) = (None, launcher().expect("built beside the tests"));
    let done = if !rustix::process::geteuid().is_root() {
        Ok(Done::Skipped("namespaces with links need root".into()))
    } else if !Path::new("/dev/net/tun").exists() {
        Ok(Done::Skipped("this host has no /dev/net/tun".into()))
    } else if find_program("nginx").is_none() {
        Ok(Done::Skipped("nginx is not installed".into()))
    } else if let Err(missing) = ours::program() {
        Ok(Done::Skipped(missing.to_string()))
    } else {
        let output =
            Command::new(launcher).arg("engine").arg("--quick").args(arguments).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        text = Some(said.clone());
        if output.status.success() { Ok(Done::Ran) } else { Err(format!("{said}\n{complaint}")) }
    };
    tally.note(case, done);
    tally.finish();
    text
}

/// Returns the cells of the first row of the table whose head begins with this word.
fn row(text: &str, head: &str) -> Vec<String> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("| {head}")));
    let row = lines.nth(2).unwrap_or_else(|| panic!("no row of {head} in\n{text}"));
    row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

#[test]
fn generator_and_engine_count_the_same() {
    let Some(text) = run("AF_XDP at both ends", &["--part", "wire"]) else { return };
    let cells = row(&text, "plane");
    let number = |at: usize| cells[at].parse::<f64>().unwrap_or_else(|_| panic!("{cells:?}"));
    let (given_up, completed, records) = (number(10), number(11), number(12));
    assert!(completed > 100.0, "{cells:?}");
    // A connection that the generator has given up may have ended with `ok` for the engine.
    assert!(records >= completed && records <= completed + given_up, "{cells:?}");
}

#[test]
fn under_overload_connections_that_exist_are_answered_and_new_ones_are_shed() {
    let Some(text) = run("more than can be served", &["--part", "overload"]) else { return };
    let table = |start: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("| {start}")));
        let cells = line.unwrap_or_else(|| panic!("no row {start} in\n{text}")).trim_matches('|').split('|');
        cells.map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    };
    let number =
        |cells: &[String], at: usize| cells[at].parse::<f64>().unwrap_or_else(|_| panic!("{cells:?}"));
    let (calm, overload) = (table("as many as"), table("more than"));
    assert!(number(&calm, 4) > 0.0 && number(&overload, 4) > 0.0, "answers: {calm:?} {overload:?}");
    // How many new ones are served is the table's matter: a debug build answers later than the generator waits.
    assert!(number(&overload, 8) > 0.0, "and shed: {overload:?}");
}

#[test]
fn streams_between_two_kernels_are_exact_over_bad_links() {
    let arguments = ["--part", "exact", "--connections", "200"];
    let Some(text) = run("byte for byte", &arguments) else { return };
    let cells = row(&text, "payload");
    assert_eq!(cells[1..4], ["200", "200", "0"], "{text}");
    assert!(cells[6].parse::<u64>().is_ok_and(|lost| lost > 20), "the links lost frames: {text}");
    assert!(text.contains("| changed | 200 | 200 | 0 |"), "{text}");
}
