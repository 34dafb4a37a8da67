//! From text to the raw file. Reports all errors of shape in one run, in the words of the file.

use super::problem::{Problem, nearest};
use serde::de::{DeserializeOwned, IntoDeserializer};
use std::ops::Range;
use toml::de::{DeTable, DeValue};

type Table<'i> = DeTable<'i>;

/// Most errors of shape that are reported in one run.
const ERRORS_MAX: usize = 50;

/// The result of reading a text.
pub struct Parsed<F> {
    /// The file without the wrong entries. `None` if the text is not TOML or has too many errors.
    pub file: Option<F>,
    /// All errors of shape.
    pub problems: Vec<Problem>,
    cut: Vec<Cut>,
}

/// An entry that was removed.
struct Cut {
    /// The tables and lists around it, from the outermost.
    within: Vec<Range<usize>>,
    /// The key, if the entry was at the top of the file.
    top: Option<String>,
}

impl<F> Parsed<F> {
    /// Whether a removed entry may be the cause of a problem: something seems to be missing in the table where
    /// the entry was.
    pub fn explains(&self, problem: &Problem) -> bool {
        self.cut.iter().any(|cut| match &cut.top {
            Some(key) => problem.help().contains(&format!("`{key}")) || problem.place() == Some(0..0),
            None => cut.within.iter().any(|span| problem.place().as_ref() == Some(span)),
        })
    }
}

/// Parses the text. `keys` names the command that lists the keys of such files, for messages.
///
/// # Errors
/// Returns all errors of shape.
#[cfg(feature = "control")]
pub fn parse<F: DeserializeOwned>(text: &str, keys: &str) -> Result<F, Vec<Problem>> {
    match parse_all(text, keys) {
        Parsed { file: Some(file), problems, .. } if problems.is_empty() => Ok(file),
        Parsed { problems, .. } => Err(problems),
    }
}

/// Like [`parse`], but continues after errors. A wrong entry is removed and the rest is parsed again, so that
/// one run reports all errors of shape and all wrong values.
pub fn parse_all<F: DeserializeOwned>(text: &str, keys: &str) -> Parsed<F> {
    let (mut document, syntax) = Table::parse_recoverable(text);
    let mut parsed = Parsed { file: None, problems: Vec::new(), cut: Vec::new() };
    if !syntax.is_empty() {
        parsed.problems = syntax.iter().take(ERRORS_MAX).map(|error| syntax_problem(text, error)).collect();
        return parsed;
    }
    loop {
        match F::deserialize(document.clone().into_deserializer()) {
            Ok(file) => return Parsed { file: Some(file), ..parsed },
            Err(error) => {
                let span = error.span().unwrap_or(0..0);
                let mut spans = Vec::new();
                let within = remove(document.get_mut(), &span, &mut spans);
                parsed.problems.push(shape_problem(error.message(), span, within.as_deref(), keys));
                let Some(path) = within else { return parsed };
                let top = path.is_empty().then(|| spans.pop().map(|(key, _)| key)).flatten();
                let within = spans.into_iter().map(|(_, span)| span).collect();
                parsed.cut.push(Cut { within, top });
                if parsed.problems.len() == ERRORS_MAX {
                    return parsed;
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
            format!("this is not TOML: {}", message.trim_end_matches(", expected literal string")),
            "texts stand in \"quotes\", a list in [brackets], each key on a line of its own",
        ),
    }
}

/// Removes the innermost entry that contains `span`. Returns the path of the table around it, and adds the key
/// and place of each entry on the way to `way`.
fn remove(
    table: &mut Table<'_>,
    span: &Range<usize>,
    way: &mut Vec<(String, Range<usize>)>,
) -> Option<String> {
    let holds = |outer: Range<usize>| outer.start <= span.start && span.end <= outer.end;
    let key = table
        .iter()
        .find(|(key, value)| holds(key.span()) || holds(value.span()) || holds_deep(value.get_ref(), span))?
        .0
        .clone();
    let value = table.get_mut(key.get_ref().as_ref())?;
    way.push((key.get_ref().to_string(), value.span()));
    let inner = if holds(key.span()) {
        None
    } else {
        match value.get_mut() {
            DeValue::Table(inner) => remove(inner, span, way),
            DeValue::Array(items) => {
                let at =
                    items.iter().position(|item| holds(item.span()) || holds_deep(item.get_ref(), span))?;
                way.extend(items.get(at).map(|item| (String::new(), item.span())));
                let within = match items.get_mut(at).map(toml::Spanned::get_mut) {
                    Some(DeValue::Table(inner)) => remove(inner, span, way),
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

/// Whether an entry inside contains `span`. The span of a table with its own header does not cover its body.
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

/// Keys at the top of a file. If one is found inside a table, the user probably meant the top.
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

/// Tables whose entries are named tables.
const NAMED: [&str; 4] = ["data", "function", "node", "party"];

/// Says where a path of keys is, in words: `rule.match` is the `match` of a [[rule]].
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

/// Words of other tools, and the keys that they mean here.
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

/// Replaces serde's type names with words of TOML.
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

/// Returns the word that serde does not know, and the words that it knows.
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
