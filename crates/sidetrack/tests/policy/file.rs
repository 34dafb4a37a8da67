//! Files: mistakes with their places, and what is planned.

use crate::node::Dice;
use sidetrack::agreement;
use sidetrack::cli::policy::{PlanArgs, plan};
use sidetrack_core::agreement::Access;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Two hospitals and a research centre, the example of docs/control.md.
const HOSPITALS: &str = include_str!("../../../../examples/hospital/control/agreement.toml");

/// The condition in it.
const CONDITION: &str = "principal.party.labels.contains(\"academic\")";

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_780_000_000)
}

/// What is wrong with the example after one text in it was replaced by another.
fn mistake(old: &str, new: &str) -> String {
    assert!(HOSPITALS.contains(old), "{old}");
    let text = HOSPITALS.replacen(old, new, 1);
    match agreement::read("agreement.toml", &text, now()) {
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
        (CONDITION, "resource.consent == \"yes\""),
        (CONDITION, "count(principal.party.labels) > 1"),
        (CONDITION, "resource in Ward::\"4\""),
        (CONDITION, "true }; permit (principal, action, resource) when { true"),
        (CONDITION, "(((((((((((((((((((((((((((((((((true)))))))))))))))))))))))))))))))))"),
        (
            "[[agreement]]\nname = \"trial-17\"",
            "[[agreement]]\nname = \"trial-17\"\n[[agreement]]\nname = \"trial-17\"",
        ),
        ("[data.heart-rates]", "[dada.heart-rates]"),
        ("name = \"trial-17\"", "name = \"trial 17\""),
        ("name = \"trial-17\"", "name = \"..\""),
        ("until = \"2099-01-01T00:00:00Z\"", "surplus = \"maybe\""),
        ("effect = \"forbid\"", "effect = \"forbid\"\nsurplus = \"allow\""),
        ("until = \"2099-01-01T00:00:00Z\"", "nodes = [\"radix-lap\"]"),
        ("until = \"2099-01-01T00:00:00Z\"", "nodes = [\"somewhere\"]"),
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

/// The research centre has fewer attributes than the hospital, and lacks nothing: Eq. 4 rules the movement out.
#[test]
fn data_moves_to_a_node_that_has_less_only_where_an_agreement_allows_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("agreement.toml");
    let printed = |surplus: &str| {
        let text = HOSPITALS
            .replacen(
                "attributes = [\"audited\"]",
                "attributes = [\"audited\", \"counted\", \"isolated\"]",
                1,
            )
            .replacen("until = \"2099-01-01T00:00:00Z\"", surplus, 1);
        std::fs::write(&file, text).expect("written");
        let printed = plan(
            &PlanArgs {
                file: file.clone(),
                purpose: Some("research".into()),
                access: Some(Access::Read),
                allowed: false,
                json: false,
            },
            false,
        );
        printed.expect("a plan").out
    };
    let block = |out: &str| {
        let from = out.find("radix-lab: read heart-rates").expect("the movement");
        out[from..].lines().take(3).collect::<Vec<_>>().join("\n")
    };
    for denied in ["", "surplus = \"deny\""] {
        let out = printed(denied);
        assert_eq!(
            block(&out),
            "radix-lab: read heart-rates for research\n  lucas-db -> radix-lab: no channel, missing encrypted, \
             pseudonymised, surplus isolated, unfeasible\n  deny: unfeasible: 'radix-lab' lacks 'isolated', which 'lucas-db' \
             has (Eq. 4), and no function can help; `surplus = \"allow\"` in an agreement allows it"
        );
        // The ratio follows from the list: of its lines those that say so.
        let marked = out.lines().filter(|line| line.ends_with(", unfeasible")).count();
        let listed = out.lines().filter(|line| line.contains(" -> ") && line.contains("channel")).count();
        assert_eq!((marked, listed), (2, 4), "{out}");
        assert!(out.ends_with("unfeasibility ratio 0.50: 2 of 4 movements are unfeasible\n"), "{out}");
    }
    let out = printed("surplus = \"allow\"");
    assert_eq!(
        block(&out),
        "radix-lab: read heart-rates for research\n  lucas-db -> radix-lab: no channel, missing encrypted, \
         pseudonymised, surplus isolated\n  allow: by trial-17, through encrypt -> decrypt -> pseudonymise, surplus = \"allow\""
    );
    assert!(out.ends_with("unfeasibility ratio 0.25: 1 of 4 movements are unfeasible\n"), "{out}");
}

#[test]
fn agreements_begin_and_end() {
    let text = HOSPITALS.replacen("2099-01-01T00:00:00Z", "2026-06-01T00:00:00Z", 1);
    let held = |seconds: u64| {
        let book = agreement::read("agreement.toml", &text, UNIX_EPOCH + Duration::from_secs(seconds))
            .expect("right");
        let turns =
            book.next_change().map(|turn| turn.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        (book.agreements().iter().any(|name| **name == *"trial-17"), turns)
    };
    let until = 1_780_272_000;
    assert_eq!(held(until - 1), (true, Some(until)));
    assert_eq!(held(until), (false, None));
}

/// Functions that each have to come before the other: no order can be right, and all of the circle is named.
#[test]
fn constraints_that_go_in_a_circle_are_named() {
    let circle = [("count", "counted", "audit"), ("audit", "audited", "mask"), ("mask", "masked", "count")];
    let function =
        |(name, applies, next)| format!("[function.{name}]\napplies = \"{applies}\"\nbefore = \"{next}\"\n");
    let functions: String = circle.map(function).concat();
    let text = format!("version = 1\nattributes = [\"counted\", \"audited\", \"masked\"]\n{functions}");
    let error = agreement::read("agreement.toml", &text, now()).expect_err("no order is right").render(false);
    for name in ["count", "audit", "mask"] {
        assert!(error.contains(name), "{name} is not in\n{error}");
    }
}

/// Anything may stand in a file: it is an agreement, or it is refused with words and a place inside the text. The texts are the
/// example, changed by a seeded generator as an editor or a broken disk would change it.
#[test]
fn no_text_breaks_the_reader() {
    let mut dice = Dice(5);
    let (mut right, mut wrong) = (0, 0);
    for _ in 0..400 {
        let mut text = HOSPITALS.as_bytes().to_vec();
        for _ in 0..=dice.below(3) {
            spoil(&mut text, &mut dice);
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        match agreement::read("agreement.toml", &text, now()) {
            Ok(book) => {
                book.purposes();
                right += 1;
            }
            Err(error) => {
                assert!(error.render(false).contains("agreement.toml"), "no place: {text}");
                wrong += 1;
            }
        }
    }
    assert!(
        right > 20 && wrong > 100,
        "{right} right and {wrong} wrong: the generator is too tame or too wild"
    );
}

/// Conditions that are as long and as deep as they may be, on a thread with as little stack as any of ours has: each is an answer or
/// an error.
#[test]
fn conditions_at_their_bounds_break_nothing() {
    let full = |begin: &str, piece: &str, end: &str| {
        let times = (4096 - begin.len() - end.len()) / piece.len();
        format!("{begin}{}{end}", piece.repeat(times))
    };
    let nested =
        |open: &str, inside: &str, close: &str| format!("{}{inside}{}", open.repeat(32), close.repeat(32));
    let conditions = [
        full("true", " && true", ""),
        full("false", " || false", ""),
        full("1", "+1", " == 1"),
        full("1", "*1", " == 1"),
        full("principal", ".party", ""),
        full("principal.party.labels", ".contains(\"\")", ""),
        full("principal has party", ".party", ""),
        full("", "if true then true else ", "true"),
        full("", "if ", "true"),
        full("", "!", "true"),
        full("", "-", "1 == 1"),
        full("[1", ",1", "] == [1]"),
        full("", "\"", ""),
        full("", "{", ""),
        "true // of course".to_owned(),
        // Far beyond: the engine's reader would run out of stack.
        format!("{}true{}", "(".repeat(200_000), ")".repeat(200_000)),
        nested("(", "true", ")"),
        nested("[", "1", "]"),
        nested("{a:", "1", "}"),
        nested("[1].contains(", "1", ")"),
        nested("!(", "true", ")"),
        nested("(if true then ", "true", " else true)"),
    ];
    let read = move || {
        for condition in conditions {
            let text = HOSPITALS.replacen(&format!("'{CONDITION}'"), &format!("'''{condition}'''"), 1);
            assert_ne!(text, HOSPITALS);
            match agreement::read("agreement.toml", &text, now()) {
                Ok(book) => drop(book.agreement().plans("research", Access::Read).collect::<Vec<_>>()),
                Err(error) => assert!(error.render(false).contains("condition"), "{}", error.render(false)),
            }
        }
    };
    let reader = std::thread::Builder::new().stack_size(2 << 20).spawn(read);
    reader.expect("a thread").join().expect("no panic");
}

/// The seeds of the fuzz target, which leaves the policy engine out.
#[test]
fn seeds_of_the_fuzz_target_are_read_with_the_engine() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/agreement");
    let mut read = 0;
    for entry in std::fs::read_dir(folder).expect("the seeds") {
        let text = std::fs::read(entry.expect("an entry").path()).expect("a seed");
        if let Err(error) = agreement::read("agreement.toml", &String::from_utf8_lossy(&text), now()) {
            assert!(error.render(false).contains("agreement.toml"));
        }
        read += 1;
    }
    assert!(read >= 10, "{read} seeds");
}

/// One change: bytes that go, come twice, move to another place, or become others.
fn spoil(text: &mut Vec<u8>, dice: &mut Dice) {
    let at = dice.below(text.len());
    let end = (at + 1 + dice.below(60)).min(text.len());
    match dice.below(4) {
        0 => drop(text.drain(at..end)),
        1 => {
            let piece = text[at..end].to_vec();
            let to = dice.below(text.len());
            text.splice(to..to, piece);
        }
        2 => text[at] = b"\"[]{}=.,\n\\0aZ\xff#"[dice.below(15)],
        _ => {
            // A whole line twice.
            let begin = text[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |line| line + 1);
            let line: Vec<u8> =
                text[begin..].iter().copied().take_while(|byte| *byte != b'\n').chain([b'\n']).collect();
            text.splice(begin..begin, line);
        }
    }
}
