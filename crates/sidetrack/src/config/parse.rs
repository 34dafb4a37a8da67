//! From text to what a file holds as it is written: every error of shape in one go, in words of the file.

use super::problem::{Problem, nearest};
use serde::de::{DeserializeOwned, IntoDeserializer};
use std::ops::Range;
use toml::de::{DeTable, DeValue};

type Table<'i> = DeTable<'i>;

/// Most errors of shape reported in one go.
const ERRORS_MAX: usize = 50;

/// Reads the text; `keys` is what lists the keys of such files, for messages. On an error of shape the offending entry is taken out and the rest is read again, so that one
/// run reports them all.
pub fn parse<F: DeserializeOwned>(text: &str, keys: &str) -> Result<F, Vec<Problem>> {
    let (mut document, syntax) = Table::parse_recoverable(text);
    if !syntax.is_empty() {
        return Err(syntax.iter().take(ERRORS_MAX).map(|error| syntax_problem(text, error)).collect());
    }
    let mut problems = Vec::new();
    loop {
        match F::deserialize(document.clone().into_deserializer()) {
            Ok(file) if problems.is_empty() => return Ok(file),
            Ok(_) => return Err(problems),
            Err(error) => {
                let span = error.span().unwrap_or(0..0);
                let within = remove(document.get_mut(), &span);
                problems.push(shape_problem(error.message(), span, within.as_deref(), keys));
                if within.is_none() || problems.len() == ERRORS_MAX {
                    return Err(problems);
                }
            }
        }
    }
}

fn syntax_problem(text: &str, error: &toml::de::Error) -> Problem {
    let span = error.span().unwrap_or(0..0);
    let end = span.end.min(text.len());
    let span = span.start.min(end)..end;
    match error.message() {
        "duplicate key" => Problem::error(span, "this key is given twice", "keep one of them"),
        _ if span.is_empty() && text[..end].trim_end().ends_with('=') => {
            Problem::error(span, "a value is missing here", "write one, or take the key out")
        }
        message => Problem::error(
            span,
            format!("this is no TOML: {}", message.trim_end_matches(", expected literal string")),
            "texts stand in \"quotes\", a list in [brackets], each key on a line of its own",
        ),
    }
}

/// Takes the innermost entry that holds `span` out of the table; gives the path of the table it was in.
fn remove(table: &mut Table<'_>, span: &Range<usize>) -> Option<String> {
    let holds = |outer: Range<usize>| outer.start <= span.start && span.end <= outer.end;
    let key = table
        .iter()
        .find(|(key, value)| holds(key.span()) || holds(value.span()) || holds_deep(value.get_ref(), span))?
        .0
        .clone();
    let value = table.get_mut(key.get_ref().as_ref())?;
    let inner = if holds(key.span()) {
        None
    } else {
        match value.get_mut() {
            DeValue::Table(inner) => remove(inner, span),
            DeValue::Array(items) => {
                let at =
                    items.iter().position(|item| holds(item.span()) || holds_deep(item.get_ref(), span))?;
                let within = match items.get_mut(at).map(toml::Spanned::get_mut) {
                    Some(DeValue::Table(inner)) => remove(inner, span),
                    _ => None,
                };
                if within.is_none() {
                    let others = items.iter().enumerate().filter(|(index, _)| *index != at);
                    *items = others.map(|(_, item)| item.clone()).collect();
                }
                Some(within.unwrap_or_default())
            }
            _ => None,
        }
    };
    match inner {
        Some(inner) if inner.is_empty() => Some(key.get_ref().to_string()),
        Some(inner) => Some(format!("{}.{inner}", key.get_ref())),
        None => table.remove(key.get_ref().as_ref()).map(|_| String::new()),
    }
}

/// Whether something inside holds `span`: the span of a table with a header of its own does not cover its body.
fn holds_deep(value: &DeValue<'_>, span: &Range<usize>) -> bool {
    let holds = |outer: Range<usize>| outer.start <= span.start && span.end <= outer.end;
    match value {
        DeValue::Table(table) => table.iter().any(|(key, value)| {
            holds(key.span()) || holds(value.span()) || holds_deep(value.get_ref(), span)
        }),
        DeValue::Array(items) => {
            items.iter().any(|item| holds(item.span()) || holds_deep(item.get_ref(), span))
        }
        _ => false,
    }
}

/// Keys that stand at the top of a file; one that is met inside a table was meant to stand above it.
const TOP_KEYS: [&str; 4] = ["version", "workers", "on_crash", "default"];

fn shape_problem(message: &str, span: Range<usize>, within: Option<&str>, keys: &str) -> Problem {
    let place = place(within.unwrap_or_default());
    if let Some((key, known)) = unknown(message, "unknown field `") {
        if TOP_KEYS.contains(&key) && !within.unwrap_or_default().is_empty() {
            let help = format!("`{key}` stands at the top of the file, above the first [table] or [[table]]");
            return Problem::error(span, format!("unknown key `{key}` {place}"), help);
        }
        return Problem::error(span, format!("unknown key `{key}` {place}"), choices(key, &known, "keys"));
    }
    if let Some((word, known)) = unknown(message, "unknown variant `") {
        let text = format!("`{word}` is none of the words allowed here");
        return Problem::error(span, text, choices(word, &known, "words"));
    }
    let message = message.lines().next().unwrap_or(message);
    Problem::error(span, plain(message), format!("{keys} lists every key and its type ({place})"))
}

/// Tables of tables, each under a name of its own.
const NAMED: [&str; 4] = ["data", "function", "node", "party"];

/// Where a path of keys leads, in words: `rule.match` is the `match` of a [[rule]].
fn place(path: &str) -> String {
    let (table, keys) = path.split_once('.').unwrap_or((path, ""));
    if NAMED.contains(&table) {
        let (name, keys) = keys.split_once('.').unwrap_or((keys, ""));
        let table = format!("[{table}.{name}]");
        return if keys.is_empty() { format!("in {table}") } else { format!("in the `{keys}` of {table}") };
    }
    let table = match table {
        "" => return "at the top of the file".to_owned(),
        "agreement" | "listen" | "rule" | "test" => format!("[[{table}]]"),
        table => format!("[{table}]"),
    };
    if keys.is_empty() { format!("in {table}") } else { format!("in the `{keys}` of {table}") }
}

/// Words of other tools, and ours.
const SYNONYMS: [(&str, &str); 18] = [
    ("dst", "to"),
    ("destination", "to"),
    ("src", "from"),
    ("source", "from"),
    ("dport", "port"),
    ("ports", "port"),
    ("port", "ports"),
    ("sni", "host"),
    ("domain", "host"),
    ("proc", "process"),
    ("uid", "user"),
    ("via", "carrier"),
    ("hops", "carrier"),
    ("bind", "address"),
    ("listen", "address"),
    ("drop", "deny"),
    ("reject", "deny"),
    ("type", "kind"),
];

/// Serde's types in words of TOML.
fn plain(message: &str) -> String {
    message
        .replace("invalid type: ", "wrong type: ")
        .replace("invalid value: ", "wrong value: ")
        .replace("a sequence", "a list")
        .replace(": sequence", ": a list")
        .replace(": map", ": a table")
        .replace("expected u8", "expected a number from 0 to 255")
        .replace("expected u32", "expected a whole number, not negative")
        .replace("expected u64", "expected a whole number, not negative")
        .replace("expected a boolean", "expected true or false")
}

/// The word that serde does not know, and the words it does.
fn unknown<'m>(message: &'m str, prefix: &str) -> Option<(&'m str, Vec<&'m str>)> {
    let (word, rest) = message.strip_prefix(prefix)?.split_once('`')?;
    Some((word, rest.split('`').skip(1).step_by(2).collect()))
}

fn choices(word: &str, known: &[&str], what: &str) -> String {
    let all = known.iter().map(|one| format!("`{one}`")).collect::<Vec<_>>().join(", ");
    let synonym = || SYNONYMS.iter().find(|(theirs, ours)| *theirs == word && known.contains(ours));
    match nearest(word, known.iter().copied()).or_else(|| synonym().map(|(_, ours)| *ours)) {
        Some(near) => format!("did you mean `{near}`? {what} here: {all}"),
        None => format!("{what} here: {all}"),
    }
}
