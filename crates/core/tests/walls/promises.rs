//! The tables of promises, of invariants and of the five seed documents name files, tests and commands that exist.

use crate::markdown::{code_spans, table};
use crate::source::{root, sources, text, words};
use std::collections::BTreeSet;

/// How the last cell of a row begins that promises nothing yet: what it names need not exist.
const NOT_YET: &str = "not yet";

/// The targets of the Makefile.
fn make_targets() -> BTreeSet<String> {
    let makefile = text(&root().join("Makefile"));
    let rules = makefile.lines().filter(|line| !line.starts_with(['\t', '#', ' ', '.']));
    let heads = rules.filter_map(|line| line.split_once(':')).filter(|(_, rest)| !rest.starts_with('='));
    heads.flat_map(|(names, _)| names.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Whether a file, or a file of a folder, defines a function of this name.
fn defines(path: &str, function: &str) -> bool {
    let folder =
        if path.ends_with(".rs") { path.rsplit_once('/').map_or("", |(folder, _)| folder) } else { path };
    sources(folder).iter().filter(|source| source.path.starts_with(path)).any(|source| {
        let mut tokens = words(&source.code);
        let mut before = "";
        tokens.any(|(_, word)| std::mem::replace(&mut before, word) == "fn" && word == function)
    })
}

/// What is wrong with one code span that claims to show something: a path, a `path::test`, or a command line.
fn complaint(span: &str, targets: &BTreeSet<String>) -> Option<String> {
    let mut parts = span.split_whitespace();
    let first = parts.next().unwrap_or_default();
    let second = parts.next().unwrap_or_default();
    match first {
        "make" => (!targets.contains(second)).then(|| format!("the Makefile has no target '{second}'")),
        "cargo" => cargo_complaint(span),
        "sidetrack" => subcommand_complaint("crates/sidetrack/src", second),
        "sidetrack-lab" => subcommand_complaint("crates/lab/src", second),
        _ => path_complaint(first),
    }
}

/// What is wrong with `cargo test -p CRATE [--test FILE] [FILTER]` or `cargo test --workspace`.
fn cargo_complaint(span: &str) -> Option<String> {
    let parts: Vec<_> = span.split_whitespace().collect();
    let folder = match parts.as_slice() {
        ["cargo", "test", "--workspace", ..] => return None,
        ["cargo", "test", "-p", "sidetrack", ..] => "crates/sidetrack",
        ["cargo", "test", "-p", name, ..] => &name.replace("sidetrack-", "crates/"),
        _ => return Some(format!("'{span}': write cargo test -p CRATE [--test FILE] [FILTER]")),
    };
    match parts[4..] {
        [] => path_complaint(folder),
        ["--test", file] => {
            let single = root().join(format!("{folder}/tests/{file}.rs"));
            let several = root().join(format!("{folder}/tests/{file}/main.rs"));
            (!single.exists() && !several.exists()).then(|| format!("{folder}/tests has no {file}"))
        }
        [filter] => {
            let known = sources(folder).iter().any(|source| source.path.contains(filter));
            (!known).then(|| format!("no file of {folder} is called after '{filter}'"))
        }
        _ => Some(format!("'{span}' is more than this test understands")),
    }
}

/// Whether a binary's sources know a sub-command of this name: an arm of its enum, or a module.
fn subcommand_complaint(folder: &str, command: &str) -> Option<String> {
    let mut found = false;
    for source in sources(folder) {
        let near_main = ["/main.rs", "/cli/", "/cli.rs"].iter().any(|part| source.path.contains(part));
        found |= near_main && words(&source.code).any(|(_, word)| word.eq_ignore_ascii_case(command));
    }
    (!found).then(|| format!("no sub-command '{command}' in {folder}"))
}

fn path_complaint(span: &str) -> Option<String> {
    let (path, function) = span.split_once("::").unwrap_or((span, ""));
    if !root().join(path).exists() {
        return Some(format!("there is no {path}"));
    }
    let function = function.rsplit("::").next().unwrap_or_default();
    let known = function.is_empty() || defines(path, function);
    (!known).then(|| format!("{path} has no function '{function}'"))
}

/// Checks the tables of a document: as many cells as the header, none empty, and code spans in the columns `shown`
/// that exist. Returns the number of rows.
fn check(document: &str, header: &[&str], shown: &[usize]) -> usize {
    let rows = table(&text(&root().join(document)), header);
    let targets = make_targets();
    let mut wrong = Vec::new();
    for row in &rows {
        let place = format!("{document}:{}", row.line);
        if row.cells.len() != header.len() || row.cells.iter().any(String::is_empty) {
            wrong.push(format!("{place}: {} cells, all filled, are wanted", header.len()));
            continue;
        }
        if row.cells.last().is_some_and(|last| last.starts_with(NOT_YET)) {
            continue;
        }
        for &column in shown {
            let spans = code_spans(&row.cells[column]);
            if spans.is_empty() {
                wrong.push(format!(
                    "{place}: '{}' names nothing in `code`, nor says not yet",
                    row.cells[column]
                ));
            }
            let complaints = spans.iter().filter_map(|span| complaint(span, &targets));
            wrong.extend(complaints.map(|complaint| format!("{place}: {complaint}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    rows.len()
}

#[test]
fn the_seed_table_is_complete_and_names_what_exists() {
    let rows =
        check("docs/seeds.md", &["section", "what it says", "where it lives", "shown by", "figure"], &[2, 3]);
    assert!(rows > 150, "the five documents hold more than {rows} features and claims");
}

#[test]
fn every_promise_names_what_shows_it() {
    let rows = check("SPECIFICATION.md", &["promise", "number", "shown by", "measured"], &[2]);
    assert!(rows > 40, "only {rows} promises");
}

#[test]
fn every_invariant_names_its_test() {
    let rows = check("ARCHITECTURE.md", &["invariant", "held by"], &[1]);
    assert!(rows >= 10, "only {rows} invariants");
}

#[test]
fn complaints_are_made() {
    let targets = make_targets();
    assert!(targets.contains("test") && targets.contains("run"), "{targets:?}");
    for bad in [
        "make nothing",
        "no/such/file.rs",
        "crates/core/src/time.rs::no_such_test",
        "cargo",
        "sidetrack frobnicate",
    ] {
        assert!(complaint(bad, &targets).is_some(), "{bad}");
    }
    let own = "crates/core/tests/walls/promises.rs::complaints_are_made";
    for good in ["make test", "README.md", "crates/core/", own, "cargo test -p sidetrack-core", "docs/"] {
        assert_eq!(complaint(good, &targets), None, "{good}");
    }
}
