//! Reads the workspace's Rust sources, and masks what is not code so that a search finds code only.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace root exists")
}

/// One Rust source file.
pub(crate) struct Source {
    /// Path from the workspace root, with `/`.
    pub path: String,
    /// The file as it is.
    pub text: String,
    /// The file with comments, strings and character literals blanked; lines and columns are kept.
    pub code: String,
}

impl Source {
    fn read(root: &Path, path: &Path) -> Self {
        let text = text(path);
        let code = masked(&text);
        Self { path: relative(root, path), text, code }
    }

    /// `path:line` of a byte offset into `code`.
    pub(crate) fn place(&self, offset: usize) -> String {
        let line = 1 + self.code.as_bytes()[..offset].iter().filter(|byte| **byte == b'\n').count();
        format!("{}:{line}", self.path)
    }
}

/// The text of a file; the test fails with its name if it cannot be read.
pub(crate) fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned()
}

/// Every file under `folder` (from the root) whose name ends with `suffix`, sorted. Build output and dot folders
/// are left out.
pub(crate) fn files(folder: &str, suffix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root().join(folder)];
    while let Some(folder) = open.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        for entry in entries {
            let path = entry.expect("a folder can be listed").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                open.push(path);
            } else if path.is_file() && name.ends_with(suffix) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Every Rust source of the repository: all crates, their tests, and the fuzz targets. Read once.
pub(crate) fn all_sources() -> &'static [Source] {
    static SOURCES: OnceLock<Vec<Source>> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let root = root();
        files("", ".rs").iter().map(|path| Source::read(&root, path)).collect()
    })
}

/// Every Rust source under `folder` (from the root). Panics if there is none: a scan over nothing would pass for
/// the wrong reason.
pub(crate) fn sources(folder: &str) -> Vec<&'static Source> {
    let found: Vec<_> =
        all_sources().iter().filter(|source| Path::new(&source.path).starts_with(folder)).collect();
    assert!(!found.is_empty(), "nothing to scan: no Rust source under {folder}");
    found
}

/// Where a scan of Rust text stands.
enum Mode {
    Code,
    Line,
    /// A block comment and how deep it is nested.
    Block(usize),
    Text,
    /// A raw string and the number of `#` that close it.
    Raw(usize),
}

/// Blanks comments, strings and character literals of Rust text, byte for byte; line breaks stay.
pub(crate) fn masked(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut mode = Mode::Code;
    let mut at = 0;
    while at < bytes.len() {
        let (next, length, visible) = step(&mode, bytes, at);
        let end = (at + length).min(bytes.len());
        for &byte in &bytes[at..end] {
            out.push(if visible || byte == b'\n' { byte } else { b' ' });
        }
        at = end;
        mode = next.unwrap_or(mode);
    }
    String::from_utf8(out).expect("blanks keep UTF-8")
}

/// The mode after the bytes at `at` (if it changes), how many bytes that takes, and whether they are code.
fn step(mode: &Mode, bytes: &[u8], at: usize) -> (Option<Mode>, usize, bool) {
    let rest = &bytes[at..];
    match mode {
        Mode::Code => step_in_code(bytes, at),
        Mode::Line => ((rest[0] == b'\n').then_some(Mode::Code), 1, false),
        Mode::Block(depth) if rest.starts_with(b"*/") => {
            (Some(if *depth == 1 { Mode::Code } else { Mode::Block(depth - 1) }), 2, false)
        }
        Mode::Block(depth) if rest.starts_with(b"/*") => (Some(Mode::Block(depth + 1)), 2, false),
        Mode::Text if rest[0] == b'\\' => (None, 2, false),
        Mode::Text => ((rest[0] == b'"').then_some(Mode::Code), 1, false),
        Mode::Raw(hashes) => {
            let closes =
                rest[0] == b'"' && rest.len() > *hashes && rest[1..=*hashes].iter().all(|byte| *byte == b'#');
            if closes { (Some(Mode::Code), 1 + hashes, false) } else { (None, 1, false) }
        }
        Mode::Block(_) => (None, 1, false),
    }
}

fn step_in_code(bytes: &[u8], at: usize) -> (Option<Mode>, usize, bool) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        return (Some(Mode::Line), 2, false);
    }
    if rest.starts_with(b"/*") {
        return (Some(Mode::Block(1)), 2, false);
    }
    if rest[0] == b'"' {
        return (Some(Mode::Text), 1, false);
    }
    let in_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    if !in_word && let Some((hashes, length)) = raw_string_start(rest) {
        return (Some(Mode::Raw(hashes)), length, false);
    }
    match rest[0] {
        b'\'' => (None, char_literal_length(rest).unwrap_or(1), char_literal_length(rest).is_none()),
        _ => (None, 1, true),
    }
}

/// `r"`, `r##"`, `br"`, `cr#"`: the number of `#` and the length of the opening.
fn raw_string_start(rest: &[u8]) -> Option<(usize, usize)> {
    let prefix = usize::from(matches!(rest[0], b'b' | b'c'));
    if rest.get(prefix) != Some(&b'r') {
        return None;
    }
    let hashes = rest[prefix + 1..].iter().take_while(|byte| **byte == b'#').count();
    (rest.get(prefix + 1 + hashes) == Some(&b'"')).then_some((hashes, prefix + 2 + hashes))
}

/// The length of a character literal that begins here; none for a lifetime.
fn char_literal_length(rest: &[u8]) -> Option<usize> {
    if rest.get(1) == Some(&b'\\') {
        let close = rest.iter().skip(3).position(|byte| *byte == b'\'')?;
        return Some(close + 4);
    }
    let text = std::str::from_utf8(&rest[1..rest.len().min(6)]);
    let valid = match &text {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&rest[1..1 + error.valid_up_to()]).unwrap_or_default(),
    };
    let width = valid.chars().next()?.len_utf8();
    (rest.get(1 + width) == Some(&b'\'')).then_some(width + 2)
}

/// The identifiers and keywords of masked code, each with its byte offset.
pub(crate) fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = 0;
    std::iter::from_fn(move || {
        let start = rest + code[rest..].find(is_word)?;
        let length = code[start..].find(|c: char| !is_word(c)).unwrap_or(code.len() - start);
        rest = start + length;
        Some((start, &code[start..rest]))
    })
}

#[test]
fn masking_keeps_code_and_places() {
    let text = "let a = \"unsafe // x\"; // unsafe\n/* /* unsafe */ */ b('\\'', '\"', 'x', '→');\nfn f<'a>(x: &'a str) { r#\"un\"safe\"# }";
    let code = masked(text);
    assert_eq!(code.len(), text.len());
    assert_eq!(code.lines().count(), 3);
    assert!(!code.contains("unsafe") && !code.contains("un\"safe"), "{code}");
    for kept in ["let a =", "b(", "fn f<'a>(x: &'a str) {"] {
        assert!(code.contains(kept), "{kept}: {code}");
    }
    assert_eq!(words("a_1(b::c)").map(|(_, word)| word).collect::<Vec<_>>(), ["a_1", "b", "c"]);
}
