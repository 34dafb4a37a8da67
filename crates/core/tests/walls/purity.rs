//! Invariant 1: core has no clock, no I/O, no threads and no global state, and depends on almost nothing.

use crate::source::{Source, root, sources, words};
use std::collections::BTreeSet;
use std::process::Command;

/// Everything core may depend on, straight or through another: parsers, a search and vectors of bytes without I/O,
/// serialising and error texts, and their macros; a checksum; comparisons that take the same time always; and the tables of international names (`idna` and those below it), as names
/// of peers are converted where they are read.
const ALLOWED: [&str; 50] = [
    "sidetrack-core",
    "aho-corasick",
    "base64",
    "memchr",
    "wide",
    "safe_arch",
    "bytemuck",
    "data-encoding",
    "httparse",
    "ref-cast",
    "ref-cast-impl",
    "serde",
    "serde_core",
    "serde_derive",
    "sfv",
    "thiserror",
    "thiserror-impl",
    "proc-macro2",
    "quote",
    "syn",
    "unicode-ident",
    "displaydoc",
    "icu_collections",
    "icu_locale_core",
    "icu_normalizer",
    "icu_normalizer_data",
    "icu_properties",
    "icu_properties_data",
    "icu_provider",
    "idna",
    "idna_adapter",
    "litemap",
    "potential_utf",
    "smallvec",
    "stable_deref_trait",
    "subtle",
    "synstructure",
    "tinystr",
    "twox-hash",
    "utf8_iter",
    "utf_types",
    "writeable",
    "yoke",
    "yoke-derive",
    "zerofrom",
    "zerofrom-derive",
    "zerotrie",
    "zerovec",
    "zerovec-derive",
    "zeroize",
];

/// What core must not name: a path of the standard library, and why.
const FORBIDDEN_PATHS: [(&str, &str); 17] = [
    ("std::fs", "core has no files"),
    ("std::process", "core has no processes"),
    ("std::thread", "core has no threads"),
    ("std::env", "core has no surroundings"),
    ("std::os", "core knows no operating system"),
    ("std::io", "core has no I/O"),
    ("std::net::TcpStream", "core has no sockets"),
    ("std::net::TcpListener", "core has no sockets"),
    ("std::net::UdpSocket", "core has no sockets"),
    ("std::net::ToSocketAddrs", "core resolves no names"),
    ("std::time::Instant", "time is an argument: core::time::Instant"),
    ("std::time::SystemTime", "time is an argument"),
    ("std::sync::Mutex", "core has no threads"),
    ("std::sync::RwLock", "core has no threads"),
    ("std::sync::atomic", "core has no shared state"),
    ("std::sync::OnceLock", "core has no global state"),
    ("std::sync::LazyLock", "core has no global state"),
];

/// What core must not say, wherever it comes from.
const FORBIDDEN_WORDS: [(&str, &str); 7] = [
    ("unsafe", "no unsafe outside crates/sys"),
    ("HashMap", "its order depends on a random seed: BTreeMap"),
    ("HashSet", "its order depends on a random seed: BTreeSet"),
    ("RandomState", "randomness is a seeded generator, given as an argument"),
    ("thread_local", "core has no global state"),
    ("println", "core has no I/O"),
    ("eprintln", "core has no I/O"),
];

/// Every path that a `use` declaration of `code` brings in, braces multiplied out: `std::net::{A, b::C}` gives two.
fn used_paths(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for (at, word) in words(code) {
        if word == "use"
            && let Some(end) = code[at..].find(';')
        {
            let tree: String = code[at + 3..at + end].split_whitespace().collect::<Vec<_>>().join(" ");
            multiply_out("", &tree, &mut paths);
        }
    }
    paths
}

fn multiply_out(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    match tree.split_once('{') {
        Some((head, rest)) => {
            let inner = rest.strip_suffix('}').unwrap_or(rest);
            for branch in split_at_top_level(inner) {
                multiply_out(&format!("{prefix}{}", head.trim()), branch, paths);
            }
        }
        None if tree.is_empty() => {}
        None => paths.push(format!("{prefix}{}", tree.split(" as ").next().unwrap_or(tree).trim())),
    }
}

/// Splits at commas that stand in no braces.
fn split_at_top_level(list: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    list.split(|c: char| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .collect()
}

fn forbidden_in(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let squeezed: String = source.code.split_whitespace().collect();
    let used = used_paths(&source.code);
    for (path, why) in FORBIDDEN_PATHS {
        let by_use = used.iter().any(|used| used == path || used.starts_with(&format!("{path}::")));
        let in_full = squeezed.match_indices(path).any(|(at, _)| {
            !squeezed[at + path.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
        });
        if by_use || in_full {
            found.push(format!("{}: `{path}`: {why}", source.path));
        }
    }
    for (at, word) in words(&source.code) {
        if let Some((_, why)) = FORBIDDEN_WORDS.iter().find(|(forbidden, _)| *forbidden == word) {
            found.push(format!("{}: `{word}`: {why}", source.place(at)));
        }
        let mutable = word == "static" && source.code[at + 6..].trim_start().starts_with("mut ");
        if mutable {
            found.push(format!("{}: `static mut`: core has no global state", source.place(at)));
        }
    }
    found
}

#[test]
fn core_sources_name_no_clock_io_thread_or_global() {
    let found: Vec<_> = sources("crates/core/src").into_iter().flat_map(forbidden_in).collect();
    assert!(found.is_empty(), "core thinks, it does not act:\n{}", found.join("\n"));
}

#[test]
fn the_scan_would_see_each_breach() {
    let breaches = [
        "use std::{collections::BTreeMap, fs};",
        "use std::net::{IpAddr, TcpStream};",
        "fn f() { let x = std::time::Instant::now(); }",
        "fn f() -> std :: io :: Result<()> { Ok(()) }",
        "use std::sync::{Arc, atomic::{AtomicU8, Ordering}};",
        "static mut COUNT: u8 = 0;",
        "fn f() { unsafe { g() } }",
    ];
    for code in breaches {
        let source = Source { path: "x.rs".into(), text: code.into(), code: code.into() };
        assert!(!forbidden_in(&source).is_empty(), "not seen: {code}");
    }
    let fine = "use std::net::{IpAddr, SocketAddr}; use std::sync::Arc; fn f(i: std::iter::Empty<u8>) {}";
    let source = Source { path: "x.rs".into(), text: fine.into(), code: fine.into() };
    assert_eq!(forbidden_in(&source), Vec::<String>::new());
}

#[test]
fn core_depends_on_nothing_but_what_is_allowed() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--package", "sidetrack-core", "--edges", "normal,build"])
        .args(["--prefix", "none", "--format", "{p}", "--target", "all"])
        .current_dir(root())
        .output()
        .expect("cargo can be started");
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8_lossy(&output.stdout).into_owned();
    let names: BTreeSet<_> = tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains("sidetrack-core") && names.contains("serde"), "the tree is not core's: {tree}");
    let strangers: Vec<_> = names.iter().filter(|name| !ALLOWED.contains(name)).collect();
    assert!(
        strangers.is_empty(),
        "core may not depend on {strangers:?}. Put what needs it into another crate, or extend ALLOWED with a \
         reason in docs/dependencies.md"
    );
}
