//! From text to the raw file. Reports all errors of shape in one run, in the words of the file.

use super::problem::{Problem, nearest};
use serde::de::{DeserializeOwned, IntoDeserializer};
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeArray, DeString, DeTable, DeValue};

type Table<'i> = DeTable<'i>;

/// Most errors of shape that are reported in one run.
const ERRORS_MAX: usize = 50;

/// Most tables of a list that are read again because of one error.
const PART: usize = 128;

/// What could be read of a text.
pub struct Parsed<F> {
    /// The file without the wrong entries. `None` if the text is not TOML or has too many errors.
    pub file: Option<F>,
    /// All errors of shape.
    pub problems: Vec<Problem>,
    cut: Vec<Cut>,
    /// How many tables of lists were read, in all passes.
    read: usize,
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
pub fn parse<F: DeserializeOwned>(text: &str, keys: &str) -> Result<F, Vec<Problem>> {
    match parse_all(text, keys) {
        Parsed { file: Some(file), problems, .. } if problems.is_empty() => Ok(file),
        Parsed { problems, .. } => Err(problems),
    }
}

/// Like [`parse`], but continues after errors. A wrong entry is removed and the rest is parsed again, so that
/// one run reports all errors of shape and all wrong values.
pub fn parse_all<F: DeserializeOwned>(text: &str, keys: &str) -> Parsed<F> {
    parse_in_parts(text, keys, PART)
}

fn parse_in_parts<F: DeserializeOwned>(text: &str, keys: &str, part: usize) -> Parsed<F> {
    let (mut document, syntax) = Table::parse_recoverable(text);
    let mut parsed = Parsed { file: None, problems: Vec::new(), cut: Vec::new(), read: 0 };
    if !syntax.is_empty() {
        parsed.problems = syntax.iter().take(ERRORS_MAX).map(|error| syntax_problem(text, error)).collect();
        return parsed;
    }
    let mending = match parsed.read::<F>(&document) {
        Ok(file) => {
            parsed.file = Some(file);
            return parsed;
        }
        Err(_) => parsed.mend_parts(&mut document, keys, part),
    };
    if mending.is_ok() {
        parsed.file = parsed.mend(&mut document, keys).ok();
    }
    parsed
}

/// It cannot be read, whatever is taken out; or there are too many errors.
struct GivenUp;

impl<F: DeserializeOwned> Parsed<F> {
    fn read<G: DeserializeOwned>(&mut self, document: &Spanned<Table<'_>>) -> Result<G, toml::de::Error> {
        self.read += document.get_ref().iter().map(|(_, value)| tables_of(value)).sum::<usize>();
        G::deserialize(document.clone().into_deserializer())
    }

    /// Takes entries out of the document until it can be read.
    fn mend(&mut self, document: &mut Spanned<Table<'_>>, keys: &str) -> Result<F, GivenUp> {
        loop {
            let error = match self.read(document) {
                Ok(file) => return Ok(file),
                Err(error) => error,
            };
            let span = error.span().unwrap_or(0..0);
            let mut spans = Vec::new();
            // An error without a place is about the whole file, whatever stands at its beginning.
            let within = if span.is_empty() { None } else { remove(document.get_mut(), &span, &mut spans) };
            self.problems.push(shape_problem(error.message(), span, within.as_deref(), keys));
            let path = within.ok_or(GivenUp)?;
            let top = path.is_empty().then(|| spans.pop().map(|(key, _)| key)).flatten();
            let within = spans.into_iter().map(|(_, span)| span).collect();
            self.cut.push(Cut { within, top });
            if self.problems.len() == ERRORS_MAX {
                return Err(GivenUp);
            }
        }
    }

    /// Mends the long lists at the top of the document part by part: an error costs the reading of its part again, and not that
    /// of 50,000 rules.
    fn mend_parts(
        &mut self,
        document: &mut Spanned<Table<'_>>,
        keys: &str,
        part: usize,
    ) -> Result<(), GivenUp> {
        let mut lists = take_long_lists(document.get_mut(), part);
        if lists.is_empty() {
            return Ok(());
        }
        let frame_read = self.mend(document, keys);
        // A list under a key that is not known was taken out with its key.
        lists.retain(|(key, ..)| document.get_ref().get(key.get_ref().as_ref()).is_some());
        // Something at the top may have no remedy, such as a missing version. Then each part fails by the same error, once
        // it has no other; the last reading of the whole reports it.
        let lacking = match frame_read {
            Ok(_) => None,
            Err(GivenUp) if self.problems.len() == ERRORS_MAX => return Err(GivenUp),
            Err(GivenUp) => self.problems.pop(),
        };
        // What a part is read with: the least that is a file.
        let plain = document.get_ref().iter().filter(|(_, value)| is_plain(value.get_ref()));
        let plain = plain.map(|(key, value)| (key.clone(), value.clone())).collect();
        let plain = Spanned::new(document.span(), plain);
        let frame =
            if lacking.is_none() && self.read::<F>(&plain).is_ok() { plain } else { document.clone() };
        for (key, span, items) in lists {
            let mut mended = Vec::new();
            let mut items = items.into_iter().peekable();
            while items.peek().is_some() {
                let next: DeArray<'_> = items.by_ref().take(part).collect();
                let mut one = frame.clone();
                one.get_mut().insert(key.clone(), Spanned::new(span.clone(), DeValue::Array(next)));
                if self.mend(&mut one, keys).is_err() {
                    if lacking.is_none() || self.problems.last() != lacking.as_ref() {
                        return Err(GivenUp);
                    }
                    self.problems.pop();
                }
                if let Some(DeValue::Array(next)) =
                    one.get_mut().remove(key.get_ref().as_ref()).map(Spanned::into_inner)
                {
                    mended.extend(next);
                }
            }
            document.get_mut().insert(key, Spanned::new(span, DeValue::Array(mended.into_iter().collect())));
        }
        Ok(())
    }
}

/// A list of tables at the top of a document: its key, its place and its tables.
type TopList<'i> = (Spanned<DeString<'i>>, Range<usize>, DeArray<'i>);

/// How many tables a list holds; 0 for any other value.
fn tables_of(value: &Spanned<DeValue<'_>>) -> usize {
    match value.get_ref() {
        DeValue::Array(items) if items.iter().all(|item| item.get_ref().is_table()) => items.len(),
        _ => 0,
    }
}

/// Takes the items out of the lists with more tables than a part has; the lists stay, empty.
fn take_long_lists<'i>(table: &mut Table<'i>, part: usize) -> Vec<TopList<'i>> {
    let long = table.iter().filter(|(_, value)| tables_of(value) > part);
    let keys: Vec<_> = long.map(|(key, _)| key.clone()).collect();
    let mut lists = Vec::new();
    for key in keys {
        let Some(value) = table.remove(key.get_ref().as_ref()) else { continue };
        let span = value.span();
        table.insert(key.clone(), Spanned::new(span.clone(), DeValue::Array(DeArray::new())));
        if let DeValue::Array(items) = value.into_inner() {
            lists.push((key, span, items));
        }
    }
    lists
}

/// Whether a value holds no others.
fn is_plain(value: &DeValue<'_>) -> bool {
    !matches!(value, DeValue::Table(_) | DeValue::Array(_))
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

/// Says where a path of keys is, in words: `rule.match` is the `match` of a `[[rule]]`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;
    use std::fmt::Write;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct File {
        version: u32,
        #[serde(default)]
        default: String,
        #[serde(default)]
        limits: Limits,
        #[serde(default)]
        rule: Vec<Rule>,
        #[serde(default)]
        listen: Vec<Rule>,
    }

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Limits {
        flows: Option<u8>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Rule {
        name: String,
        port: Option<u8>,
    }

    /// Counts work instead of time.
    #[test]
    fn an_error_in_a_long_list_does_not_read_all_of_it_again() {
        let mut text = "version = 1\n".to_owned();
        for number in 0..50_000 {
            let wrong = if number % 1_100 == 0 { "prot" } else { "port" };
            writeln!(text, "[[rule]]\nname = 'r{number}'\n{wrong} = 1").expect("a text");
        }
        let parsed = parse_all::<File>(&text, "keys");
        assert_eq!(parsed.problems.len(), 46);
        assert_eq!(parsed.file.map(|file| file.rule.len()), Some(50_000));
        // The first pass, the parts, the last pass; and each error its part.
        assert!(parsed.read <= 3 * 50_000 + 46 * PART, "{} tables read", parsed.read);
    }

    #[test]
    fn nor_is_it_read_again_for_each_error_where_the_top_cannot_be_mended() {
        for top in ["", "version = 'one'\n", "versoin = 1\nlimits = { flow = 1 }\n"] {
            let mut text = top.to_owned();
            for number in 0..50_000 {
                let wrong = if number % 1_100 == 0 { "prot" } else { "port" };
                writeln!(text, "[[rule]]\nname = 'r{number}'\n{wrong} = 1").expect("a text");
            }
            let parsed = parse_all::<File>(&text, "keys");
            // 46 rules, what is wrong at the top, and the version that is missing.
            let at_the_top = top.matches('=').count().min(2);
            assert_eq!(parsed.problems.len(), 46 + at_the_top + 1, "{top}");
            assert!(parsed.read <= 3 * 50_000 + 46 * PART, "{top}{} tables read", parsed.read);
        }
    }

    #[test]
    fn many_errors_end_the_reading_also_where_the_top_cannot_be_mended() {
        let text = "[[rule]]\nname = 'a'\nprot = 1\n".repeat(50_000);
        let parsed = parse_all::<File>(&text, "keys");
        assert_eq!((parsed.problems.len(), parsed.file), (ERRORS_MAX, None));
        assert!(parsed.read <= 50_000 + ERRORS_MAX * PART, "{} tables read", parsed.read);
    }

    proptest! {
        #[test]
        fn a_file_is_read_in_parts_as_at_once(lines in proptest::collection::vec(0..12_usize, 0..40)) {
            const LINES: [&str; 12] = [
                "[[rule]]\nname = 'a'", "[[rule]]\nname = 'b'\nport = 1", "[[listen]]\nname = 'c'", "[[rule]]\nport = 2",
                "[[rule]]\nname = 'd'\nprot = 1", "[[listen]]\nname = 'e'\nport = 'x'", "[[rule]]\nname = 5",
                "[[listen]]\nport = 300\nname = 'f'", "[[rule]]", "[[rule]]\nname = 'g'\n[rule.extra]\nx = 1",
                "[[wrong]]\nname = 'h'", "[[listen]]\nname = 'i'\nport = { a = 1 }",
            ];
            let picked: Vec<_> = lines.iter().map(|line| LINES[*line]).collect();
            for top in ["version = 1\nlimits = { flow = 1 }\n", "version = 1\n", "version = 'x'\ndefault = 'y'\n"] {
                let text = format!("{top}{}", picked.join("\n"));
                let by_place = |mut parsed: Parsed<File>| {
                    parsed.problems.sort_by_key(|problem| problem.place().map(|place| place.start));
                    (parsed.file, parsed.problems)
                };
                let whole = by_place(parse_in_parts(&text, "keys", usize::MAX));
                for part in [1, 3] {
                    prop_assert_eq!(&by_place(parse_in_parts(&text, "keys", part)), &whole, "{}", text);
                }
            }
        }
    }
}
