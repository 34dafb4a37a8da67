//! Completion: which words may come next in a filter that is being written.

use super::lexer::{Kind, Token, tokens};
use super::test::{self, Field, Word};
use crate::flow::{EndReason, Intercept, Protocol};

/// What may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Where the word begins that these words replace, in bytes. It ends where the text was asked about.
    pub from: usize,
    /// The words that fit what is written of it, in the order of the documentation. A value with other characters than a
    /// word has stands in quotes.
    pub words: Vec<String>,
    /// The field whose value is expected, by its name in the text. Values of `proc`, `host` and others are not known here.
    pub field: Option<String>,
}

/// What the grammar expects after some tokens.
enum Expected {
    Field,
    Operator(Field),
    /// A value of this field.
    Value(Field, String),
    /// `and` or `or`, or the end.
    Joint,
}

/// Names of fields in the order in which they are offered. Alternative names are left out.
const OFFERED: [&str; 23] = [
    "proc",
    "host",
    "dst",
    "port",
    "src",
    "rule",
    "chain",
    "carrier",
    "reason",
    "state",
    "age",
    "bytes",
    "up",
    "down",
    "protocol",
    "listener",
    "intercept",
    "user",
    "connect",
    "first_byte",
    "packets",
    "sport",
    "id",
];

/// Returns the words that may stand at byte `at` of the text. What follows is not looked at. `values` gives values of a
/// field that only the caller knows, such as the names of rules.
pub(super) fn complete(text: &str, at: usize, values: impl Fn(&str) -> Vec<String>) -> Completion {
    let none = Completion { from: at, words: Vec::new(), field: None };
    let Some(before) = text.get(..at) else { return none };
    let typed_at = before.rfind(|c: char| c.is_whitespace() || "=!~<>()[],&|\"'".contains(c));
    let mut from = typed_at.map_or(0, |end| end + before[end..].chars().next().map_or(1, char::len_utf8));
    // An open quote belongs to the word.
    let quote = before[..from].chars().next_back().filter(|c| "\"'".contains(*c));
    if quote.is_some_and(|quote| before.matches(quote).count() % 2 == 1) {
        from -= 1;
    }
    let Ok(known) = tokens(&before[..from]) else { return none };
    let typed = before[from..].trim_start_matches(['"', '\'']);
    let (words, field) = match expected(&known) {
        Expected::Field => (OFFERED.iter().chain(&["not"]).map(|word| (*word).to_owned()).collect(), None),
        Expected::Operator(field) => (operators(field), None),
        Expected::Joint => (vec!["and".to_owned(), "or".to_owned()], None),
        Expected::Value(field, name) => {
            let mut words = fixed(field);
            words.extend(values(&name).iter().map(|value| quoted(value)));
            (words, Some(name))
        }
    };
    let fits =
        |word: &String| word.trim_start_matches('"').starts_with(typed) && word.trim_matches('"') != typed;
    Completion { from, words: words.into_iter().filter(fits).collect(), field }
}

fn expected(known: &[Token]) -> Expected {
    let field_of = |token: &Token| match &token.kind {
        Kind::Word(name) => test::field(name, token.at.clone()).ok().map(|field| (field, name.clone())),
        _ => None,
    };
    let value_after = |index: usize| {
        let before = index.checked_sub(1).and_then(|index| known.get(index)).and_then(field_of);
        before.map_or(Expected::Joint, |(field, name)| Expected::Value(field, name))
    };
    let Some(last) = known.last() else { return Expected::Field };
    match &last.kind {
        Kind::And | Kind::Or | Kind::Not | Kind::Open => Expected::Field,
        Kind::Op(_) => value_after(known.len() - 1),
        // In a list: back to its operator.
        Kind::ListOpen | Kind::Comma => {
            let operator = known.iter().rposition(|token| matches!(token.kind, Kind::Op(_)));
            operator.map_or(Expected::Joint, value_after)
        }
        Kind::Word(_) => {
            let before =
                known.len().checked_sub(2).and_then(|index| known.get(index)).map(|token| &token.kind);
            let is_field = matches!(before, None | Some(Kind::And | Kind::Or | Kind::Not | Kind::Open));
            match field_of(last).filter(|_| is_field) {
                Some((field, _)) => Expected::Operator(field),
                None => Expected::Joint,
            }
        }
        Kind::Quoted(_) | Kind::Close | Kind::ListClose => Expected::Joint,
    }
}

fn operators(field: Field) -> Vec<String> {
    let words: &[&str] = match field {
        Field::Number(_) => &[">", "<", ">=", "<=", "==", "!=", "in"],
        Field::Word(_) | Field::Address(_) => &["==", "!=", "~", "!~", "in"],
    };
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The values that the language itself knows.
fn fixed(field: Field) -> Vec<String> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    match field {
        Field::Word(Word::State) => words(&["live", "ended"]),
        Field::Word(Word::Protocol) => Protocol::ALL.iter().map(|one| one.as_str().to_owned()).collect(),
        Field::Word(Word::Intercept) => Intercept::ALL.iter().map(|one| one.as_str().to_owned()).collect(),
        Field::Word(Word::Reason) => EndReason::ALL.iter().map(|one| one.as_str().to_owned()).collect(),
        _ => Vec::new(),
    }
}

/// The value, in quotes unless it is one word of the language.
fn quoted(value: &str) -> String {
    let is_word = matches!(tokens(value).as_deref(), Ok([Token { kind: Kind::Word(_), at }]) if at.len() == value.len());
    if is_word {
        value.to_owned()
    } else {
        format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_end(text: &str) -> (usize, String) {
        let values =
            |field: &str| if field == "rule" { vec!["lan".into(), "to web".into()] } else { Vec::new() };
        let found = complete(text, text.len(), values);
        (found.from, found.words.join(" "))
    }

    #[test]
    fn what_may_come_next_is_offered() {
        assert!(at_end("").1.starts_with("proc host dst"));
        for (text, from, words) in [
            ("pr", 0, "proc protocol"),
            ("proc", 0, ""),
            ("proc ", 5, "== != ~ !~ in"),
            ("age ", 4, "> < >= <= == != in"),
            ("state == ", 9, "live ended"),
            ("state == l", 9, "live"),
            ("state==l", 7, "live"),
            ("state == live ", 14, "and or"),
            ("state == live a", 14, "and"),
            ("state == live and por", 18, "port"),
            ("not (por", 5, "port"),
            ("protocol in [tcp, u", 18, "udp"),
            ("rule == ", 8, "lan \"to web\""),
            ("rule == \"to", 8, "\"to web\""),
            ("rule == \"to web\" ", 17, "and or"),
            ("proc == ", 8, ""),
            ("nothing ", 8, "and or"),
            ("§ ", 3, ""),
        ] {
            assert_eq!(at_end(text), (from, words.to_owned()), "{text}");
        }
    }

    #[test]
    fn any_text_and_any_place_are_survived() {
        let text = "rule == \"ä\" and not (port in [443, 8000-8100] or host ~ '*.ü') && x";
        for at in 0..=text.len() + 2 {
            let found = complete(text, at, |_| vec!["ö\"".to_owned()]);
            assert!(found.from <= at);
        }
    }
}
