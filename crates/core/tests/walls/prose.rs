//! The English of comments and documents: words that hide the actor or the meaning do not come back into what was rewritten.
//!
//! The list begins with the words that readers stumbled over most. To add one, put it into [`WORDS`] with its reason;
//! the test then names each place.

use crate::markdown::plain_lines;
use crate::source::{all_sources, files, root, text};
use std::path::Path;

/// Words (or the beginnings of sentences) that a comment does not contain, and what to write instead.
const WORDS: [(&str, &str); 13] = [
    ("whoever", "name the actor: the client, the relay, the kernel"),
    ("somebody", "name the actor: another process, another socket"),
    ("nobody", "name the actor, or say that it is not done"),
    ("in the place of", "say \"instead of\" or \"replaces\""),
    ("in place of", "say \"instead of\""),
    ("is no ", "say \"is not a\", or what happens: reject, drop, discard"),
    ("are no ", "say \"are not\", or what happens"),
    ("so many", "say \"this number of\", or name the number"),
    ("see the module", "say here what the item is or does"),
    ("seed 00", "use the short title of docs/seeds.md: \"EPI framework, Sec. III-B\""),
    ("the facts", "name the document or the type"),
    ("believe", "say \"trust\" or \"accept\""),
    ("what became of", "say \"the state of\" or \"the result of\""),
];

/// A sentence that consists of this only tells nothing.
const EMPTY: [&str; 2] = ["Which.", "See the module."];

/// Places where a word is right: the path, a part of the line, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("crates/core/tests/walls/prose.rs", "", "the list itself names the words"),
    ("crates/sidetrack/src/config/raw.rs", "`nobody`", "the system user of this name"),
    ("crates/sidetrack/src/config/raw/function.rs", "(nobody)", "the system user of this name"),
    ("docs/configuration.md", "(nobody)", "the system user of this name"),
    ("crates/sidetrack/tests/examples.rs", "`nobody`", "the system user of this name"),
    ("crates/sidetrack/tests/ordinary_user.rs", "`nobody`", "the system user of this name"),
    ("crates/testkit/src/apart.rs", "`nobody`", "the system user of this name"),
];

/// The comments of a Rust or C file: the number of each line and its text.
fn comments(path: &str, text: &str) -> Vec<(usize, String)> {
    let mut inside = false;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let comment = if path.ends_with(".rs") {
            line.trim_start()
                .strip_prefix("//")
                .or_else(|| line.split_once(" // ").map(|(_, comment)| comment))
        } else {
            let begins = line.find("/*");
            let comment = if inside { Some(line) } else { begins.map(|at| &line[at..]) };
            inside = (inside || begins.is_some()) && !line.contains("*/");
            comment
        };
        if let Some(comment) = comment {
            let comment = comment.trim_start_matches(['/', '!', '*', ' ']);
            found.push((number + 1, comment.trim_end_matches(['*', '/', ' ']).to_owned()));
        }
    }
    found
}

/// The words of the list in a comment, with what to write instead. A word that a line break divides is found too.
fn findings(comments: &[(usize, String)]) -> Vec<(usize, &'static str, &'static str, &str)> {
    let mut found = Vec::new();
    for (at, (line, comment)) in comments.iter().enumerate() {
        let neighbour = |at: Option<usize>, number: usize| {
            let found = at.and_then(|at| comments.get(at)).filter(|(other, _)| *other == number);
            found.map_or("", |(_, comment)| comment.as_str())
        };
        let before = neighbour(at.checked_sub(1), line.wrapping_sub(1)).to_lowercase();
        let next = neighbour(Some(at + 1), line + 1);
        let (from, to) = (before.len() + 1, before.len() + 1 + comment.to_lowercase().len());
        let all = format!("{before} {comment} {next}").to_lowercase();
        let starts_here = |word: &str| {
            let mut places = all.match_indices(word).map(|(place, _)| place);
            places.any(|place| (from..to).contains(&place) && is_word_start(&all, place))
        };
        found.extend(
            WORDS
                .iter()
                .filter(|(word, _)| starts_here(word))
                .map(|(word, why)| (*line, *word, *why, comment.as_str())),
        );
        if let Some(empty) = EMPTY.iter().find(|empty| comment == *empty) {
            found.push((*line, *empty, "say here what the item is or does", comment.as_str()));
        }
    }
    found
}

/// Whether a word begins here. "There is no such file" and "is no longer" are plain English.
fn is_word_start(text: &str, at: usize) -> bool {
    let (before, from) = text.split_at(at);
    let is_plain =
        before.ends_with("there ") || from.starts_with("is no longer") || from.starts_with("are no longer");
    !before.ends_with(|before: char| before.is_alphanumeric()) && !is_plain
}

/// Whether a line of this file is one of [`EXCEPTIONS`].
fn is_excepted(path: &str, line: &str) -> bool {
    EXCEPTIONS.iter().any(|(file, part, _)| *file == path && line.contains(part))
}

#[test]
fn comments_are_plain() {
    let root = root();
    let c = ["bpf/"].iter().flat_map(|folder| [".h", ".c"].map(|suffix| files(folder, suffix))).flatten();
    let c = c.map(|path| {
        let name = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
        (name, text(Path::new(&path)))
    });
    let rust = all_sources().iter().map(|source| (source.path.clone(), source.text.clone()));
    let (mut bad, mut checked) = (Vec::new(), 0);
    for (path, text) in c.chain(rust) {
        checked += 1;
        for (line, word, why, comment) in findings(&comments(&path, &text)) {
            if !is_excepted(&path, comment) {
                bad.push(format!("{path}:{line}: \"{word}\": {why}"));
            }
        }
    }
    assert!(checked > 20, "the checked folders are there: {checked}");
    assert!(bad.is_empty(), "write plain English (CONTRIBUTING.md):\n{}", bad.join("\n"));
}

#[test]
fn documents_are_plain() {
    let root = root();
    let (mut bad, mut checked) = (Vec::new(), 0);
    for path in files("", ".md") {
        let name = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
        checked += 1;
        for (line, word, why, sentence) in findings(&plain_lines(&text(&path))) {
            if !is_excepted(&name, sentence) {
                bad.push(format!("{name}:{line}: \"{word}\": {why}"));
            }
        }
    }
    assert!(checked > 10, "the documents are there: {checked}");
    assert!(bad.is_empty(), "write plain English (CONTRIBUTING.md):\n{}", bad.join("\n"));
}

#[test]
fn the_checker_finds_what_it_looks_for() {
    let rust = "//! Whoever asks.\nlet a = \"nobody\"; // in the place\n/// of a whisper\n/// Which.\nlet b = 1; // in the\n// place of it\n";
    let rust = comments("a.rs", rust);
    let found: Vec<_> = findings(&rust).into_iter().map(|(line, word, ..)| (line, word)).collect();
    assert_eq!(found, [(1, "whoever"), (2, "in the place of"), (4, "Which."), (5, "in the place of")]);
    let c = "/* so */\nint many; /* somebody's */\n/*\n * as\n * seed 003 says */\nint nobody;\n";
    let c = comments("a.h", c);
    let found: Vec<_> = findings(&c).into_iter().map(|(line, word, ..)| (line, word)).collect();
    assert_eq!(found, [(2, "somebody"), (5, "seed 00")]);
    let plain = [(1, "The kernel is not asked, and a misbelieved one is none.".to_owned())];
    let there = [(2, "None if there".to_owned()), (3, "is no room.".to_owned())];
    assert!(findings(&there).is_empty(), "that is plain");
    assert!(findings(&[(1, "It is no longer open.".to_owned())]).is_empty(), "that is plain");
    assert!(findings(&plain).is_empty(), "a word inside of another is another word");
}
