//! The shape of the rooms: short functions, short files, and the field's words in names.

use crate::source::{all_sources, masked, words};

/// Longest function, in lines from `fn` to its closing brace.
const FUNCTION_LINES: usize = 70;

/// Longest file, in lines.
const FILE_LINES: usize = 600;

/// Words that say nothing, or that two readers take for opposite things. Sides of a flow are client and server,
/// neighbours are prev and next.
const FORBIDDEN: [&str; 10] = [
    "upstream",
    "downstream",
    "inbound",
    "outbound",
    "manager",
    "handler",
    "util",
    "utils",
    "helper",
    "helpers",
];

/// Names of other crates' that we have to write as they are (`MountPropagationFlags::DOWNSTREAM` is rustix' word).
const FOREIGN: [&str; 3] = ["hyper_util", "GraphicalReportHandler", "DOWNSTREAM"];

/// Every function with a body: where it begins, its name and its length in lines.
fn functions(code: &str) -> Vec<(usize, &str, usize)> {
    let mut found = Vec::new();
    let mut tokens = words(code).peekable();
    while let Some((at, word)) = tokens.next() {
        if word != "fn" {
            continue;
        }
        // `fn(u8) -> u8` is a type: no name follows directly.
        let Some(&(name_at, name)) = tokens.peek() else { break };
        if !code[at + 2..name_at].trim().is_empty() {
            continue;
        }
        if let Some(end) = body_end(code, name_at) {
            found.push((at, name, 1 + code[at..end].matches('\n').count()));
        }
    }
    found
}

/// The offset of the brace that closes the body of the function whose name is at `from`; none for a declaration.
fn body_end(code: &str, from: usize) -> Option<usize> {
    let mut brackets = 0_i32;
    let mut braces = 0_i32;
    for (at, byte) in code.bytes().enumerate().skip(from) {
        match byte {
            b'(' | b'[' => brackets += 1,
            b')' | b']' => brackets -= 1,
            b';' if braces == 0 && brackets == 0 => return None,
            b'{' => braces += 1,
            b'}' => {
                braces -= 1;
                if braces == 0 && brackets == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// The parts of an identifier in lower case: `HttpHead_x` gives `http`, `head`, `x`.
fn parts(identifier: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    for c in identifier.chars() {
        let starts_part = c == '_' || c.is_uppercase();
        if starts_part && parts.last().is_some_and(|last| !last.is_empty()) {
            parts.push(String::new());
        }
        if c != '_'
            && let Some(last) = parts.last_mut()
        {
            last.extend(c.to_lowercase());
        }
    }
    parts
}

fn is_forbidden(identifier: &str) -> bool {
    if FOREIGN.contains(&identifier) {
        return false;
    }
    let whole = identifier.to_lowercase();
    FORBIDDEN.contains(&whole.as_str()) || parts(identifier).iter().any(|p| FORBIDDEN.contains(&p.as_str()))
}

#[test]
fn no_function_is_longer_than_a_screen() {
    let mut long = Vec::new();
    for source in all_sources() {
        for (at, name, lines) in functions(&source.code) {
            if lines > FUNCTION_LINES {
                long.push(format!("{}: fn {name}, {lines} lines", source.place(at)));
            }
        }
    }
    assert!(long.is_empty(), "functions over {FUNCTION_LINES} lines:\n{}", long.join("\n"));
}

#[test]
fn no_file_is_longer_than_a_room() {
    let long: Vec<_> = all_sources()
        .iter()
        .map(|source| (source.text.lines().count(), &source.path))
        .filter(|(lines, _)| *lines > FILE_LINES)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "files over {FILE_LINES} lines, split them:\n{}", long.join("\n"));
}

#[test]
fn names_use_the_words_of_the_field() {
    let mut found = Vec::new();
    for source in all_sources().iter().filter(|source| !source.path.ends_with("walls/shape.rs")) {
        for (at, word) in words(&source.code).filter(|(_, word)| is_forbidden(word)) {
            found.push(format!("{}: `{word}`", source.place(at)));
        }
    }
    assert!(
        found.is_empty(),
        "say client/server, prev/next, or what the thing does; a foreign crate's name goes to FOREIGN:\n{}",
        found.join("\n")
    );
}

#[test]
fn the_measures_measure() {
    let code =
        masked("fn a() {\n  b(|| { c });\n}\ntrait T { fn d(x: [u8; 4]); fn e() { } }\ntype F = fn(u8);");
    let found: Vec<_> = functions(&code).into_iter().map(|(_, name, lines)| (name, lines)).collect();
    assert_eq!(found, [("a", 3), ("e", 1)]);
    for bad in ["FlowManager", "utils", "inbound_flows", "get_upstream", "UPSTREAM", "helper"] {
        assert!(is_forbidden(bad), "{bad}");
    }
    for good in ["handle", "utility", "hyper_util", "commonly", "handled", "ManagedBy"] {
        assert!(!is_forbidden(good), "{good}");
    }
}
