//! Files: mistakes with their places, and what is planned.

use sidetrack::agreement::Book;
use sidetrack::cli::policy::{PlanArgs, plan};
use sidetrack_core::agreement::Access;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Two hospitals and a research centre, the example of docs/control.md.
const HOSPITALS: &str = include_str!("../../../../examples/hospital/control/agreement.toml");

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_780_000_000)
}

/// What is wrong with the example after one text in it was replaced by another.
fn mistake(old: &str, new: &str) -> String {
    assert!(HOSPITALS.contains(old), "{old}");
    let text = HOSPITALS.replacen(old, new, 1);
    match Book::read("agreement.toml", &text, now()) {
        Ok(_) => panic!("no mistake: {new}"),
        Err(error) => error.render(false),
    }
}

#[test]
fn mistakes_are_pointed_at() {
    let cases = [
        ("version = 1", "version = 2"),
        ("version = 1", ""),
        ("party = \"st-lucas\"", "party = \"st-lukas\""),
        ("applies = [\"counted\"]", "applies = [\"countet\"]"),
        ("applies = [\"counted\"]", "applies = []"),
        ("requires = [\"encrypted\"", "requires = [\"encripted\""),
        ("purpose = [\"research\"]", "purpose = [\"reserch\"]"),
        ("consent = \"given\"", "consent = \"maybe\""),
        ("consent = \"given\"", ""),
        ("position = \"last\"", "position = \"last\"\nbefore = [\"count\"]"),
        ("address = \"10.83.1.10\"", "address = \"10.83.1.300\""),
        ("address = \"10.83.1.10\"", "address = \"10.83.2.10\""),
        ("until = \"2099-01-01T00:00:00Z\"", "until = \"next year\""),
        ("principal.party.labels", "principal.party.lables"),
        ("contains(\"academic\")", "contains(\"academic\""),
        ("contains(\"academic\")", "contains(3)"),
        (
            "[[agreement]]\nname = \"trial-17\"",
            "[[agreement]]\nname = \"trial-17\"\n[[agreement]]\nname = \"trial-17\"",
        ),
        ("[data.heart-rates]", "[dada.heart-rates]"),
        ("name = \"trial-17\"", "name = \"trial 17\""),
    ];
    let all: Vec<_> =
        cases.iter().map(|(old, new)| format!("=== {old} -> {new}\n{}", mistake(old, new))).collect();
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn a_plan_names_pairs_gaps_functions_and_what_cannot_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("agreement.toml");
    std::fs::write(&file, HOSPITALS).expect("written");
    let args = |purpose: Option<&str>| PlanArgs {
        file: file.clone(),
        purpose: purpose.map(Into::into),
        access: Some(Access::Read),
        allowed: false,
        json: false,
    };
    let printed = plan(&args(None), false).expect("a plan");
    assert_eq!((printed.code, &*printed.err), (0, ""));
    insta::assert_snapshot!(printed.out);
    let unknown = plan(&args(Some("sale")), false).expect("a plan");
    assert_eq!((unknown.code, unknown.err.contains("there is no purpose 'sale'")), (2, true));
}

#[test]
fn agreements_begin_and_end() {
    let text = HOSPITALS.replacen("2099-01-01T00:00:00Z", "2026-06-01T00:00:00Z", 1);
    let held = |seconds: u64| {
        let book =
            Book::read("agreement.toml", &text, UNIX_EPOCH + Duration::from_secs(seconds)).expect("right");
        let turns =
            book.next_change().map(|turn| turn.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        (book.agreements().iter().any(|name| **name == *"trial-17"), turns)
    };
    let until = 1_780_272_000;
    assert_eq!(held(until - 1), (true, Some(until)));
    assert_eq!(held(until), (false, None));
}
