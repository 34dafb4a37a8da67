//! Splits a filter text into tokens.

use super::error::FilterError;
use super::test::Op;
use std::ops::Range;

/// The kind of a token. Words and strings contain their text. A string is never a keyword.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Word(String),
    Quoted(String),
    And,
    Or,
    Not,
    Op(Op),
    Open,
    Close,
    ListOpen,
    ListClose,
    Comma,
}

/// A token and its position in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) at: Range<usize>,
}

/// Operators and other symbols. A longer one comes before its own prefix.
const MARKS: [(&str, Kind); 18] = [
    ("==", Kind::Op(Op::Eq)),
    ("!=", Kind::Op(Op::Ne)),
    ("!~", Kind::Op(Op::FitsNot)),
    ("<=", Kind::Op(Op::Le)),
    (">=", Kind::Op(Op::Ge)),
    ("&&", Kind::And),
    ("||", Kind::Or),
    ("=~", Kind::Op(Op::Fits)),
    ("=", Kind::Op(Op::Eq)),
    ("~", Kind::Op(Op::Fits)),
    ("<", Kind::Op(Op::Lt)),
    (">", Kind::Op(Op::Gt)),
    ("!", Kind::Not),
    ("(", Kind::Open),
    (")", Kind::Close),
    ("[", Kind::ListOpen),
    ("]", Kind::ListClose),
    (",", Kind::Comma),
];

fn in_word(c: char) -> bool {
    c.is_alphanumeric() || "._-:/*?%@+".contains(c)
}

/// Splits the text into tokens.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, FilterError> {
    let mut tokens = Vec::new();
    let mut start = 0;
    while let Some(c) = text[start..].chars().next() {
        let rest = &text[start..];
        if c.is_whitespace() {
            start += c.len_utf8();
            continue;
        }
        let (kind, length) = if c == '"' || c == '\'' {
            quoted(rest, c, start)?
        } else if in_word(c) {
            let length = rest.find(|c| !in_word(c)).unwrap_or(rest.len());
            (word(&rest[..length]), length)
        } else if let Some((mark, kind)) = MARKS.iter().find(|(mark, _)| rest.starts_with(mark)) {
            (kind.clone(), mark.len())
        } else {
            let message = format!("'{c}' has no meaning here; put a value that holds it into quotes");
            return Err(FilterError::new(start..start + c.len_utf8(), message));
        };
        tokens.push(Token { kind, at: start..start + length });
        start += length;
    }
    Ok(tokens)
}

fn word(text: &str) -> Kind {
    match text {
        "and" => Kind::And,
        "or" => Kind::Or,
        "not" => Kind::Not,
        "in" => Kind::Op(Op::In),
        _ => Kind::Word(text.to_owned()),
    }
}

/// Reads a string in quotes. A backslash makes the next character literal.
fn quoted(rest: &str, quote: char, start: usize) -> Result<(Kind, usize), FilterError> {
    let mut text = String::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((index, c)) = chars.next() {
        if c == quote {
            return Ok((Kind::Quoted(text), index + c.len_utf8()));
        }
        let c = if c == '\\' { chars.next().map_or(c, |(_, c)| c) } else { c };
        text.push(c);
    }
    Err(FilterError::new(start..start + 1, format!("this quote is not closed: end the value with {quote}")))
}
