//! Invariant 2: `unsafe` stands in `crates/sys` only, in files that say so, each use with its reason.

use crate::source::{Source, all_sources, sources, words};

/// How many lines above an `unsafe` its `SAFETY:` comment may begin (other lines of the comment, attributes and
/// the head of a statement may stand between).
const REASON_WITHIN_LINES: usize = 8;

fn is_in_sys(source: &Source) -> bool {
    source.path.starts_with("crates/sys/")
}

/// The `unsafe` keywords of a file: byte offsets.
fn uses(source: &Source) -> impl Iterator<Item = usize> {
    words(&source.code).filter(|(_, word)| *word == "unsafe").map(|(at, _)| at)
}

/// Whether a comment with `SAFETY:` (or `# Safety` for an `unsafe fn`) stands on the line or shortly above it.
fn has_reason(source: &Source, at: usize) -> bool {
    let line = source.code[..at].matches('\n').count();
    let lines: Vec<_> = source.text.lines().collect();
    let first = line.saturating_sub(REASON_WITHIN_LINES);
    lines[first..=line].iter().any(|line| line.contains("SAFETY:") || line.contains("# Safety"))
}

#[test]
fn unsafe_stands_in_sys_only() {
    let strays: Vec<_> = all_sources()
        .iter()
        .filter(|source| !is_in_sys(source))
        .flat_map(|source| uses(source).map(|at| source.place(at)).collect::<Vec<_>>())
        .collect();
    assert!(strays.is_empty(), "`unsafe` outside crates/sys:\n{}", strays.join("\n"));
}

#[test]
fn the_lint_is_lifted_in_sys_only() {
    let lifted: Vec<_> = all_sources()
        .iter()
        .filter(|source| {
            ["allow(unsafe_code", "expect(unsafe_code"].iter().any(|lifted| source.code.contains(lifted))
                && !is_in_sys(source)
        })
        .map(|source| source.path.as_str())
        .collect();
    assert!(lifted.is_empty(), "`allow(unsafe_code)` outside crates/sys:\n{}", lifted.join("\n"));
}

#[test]
fn every_unsafe_says_why_it_is_sound() {
    let sys = sources("crates/sys");
    let silent: Vec<_> = sys
        .iter()
        .flat_map(|source| uses(source).filter(|at| !has_reason(source, *at)).map(|at| source.place(at)))
        .collect();
    assert!(silent.is_empty(), "`unsafe` without a SAFETY comment above it:\n{}", silent.join("\n"));
}

#[test]
fn a_reason_is_seen_and_its_absence_too() {
    let good = "// SAFETY: the pointer is ours.\nlet x = unsafe { *p };";
    let bad = "\n\n\n\n\n\n\n\n\n// A comment.\nlet x = unsafe { *p };";
    for (text, expected) in [(good, true), (bad, false)] {
        let source = Source { path: "x.rs".into(), text: text.into(), code: crate::source::masked(text) };
        let at = uses(&source).next().expect("there is one");
        assert_eq!(has_reason(&source, at), expected);
    }
}
