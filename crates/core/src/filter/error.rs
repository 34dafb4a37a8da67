//! Errors in filter texts, with their position.

use std::fmt;
use std::ops::Range;

/// Why a text is not a valid filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterError {
    /// The wrong bytes of the text. Empty where something is missing.
    pub at: Range<usize>,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl FilterError {
    pub(super) fn new(at: Range<usize>, message: impl Into<String>) -> Self {
        Self { at, message: message.into() }
    }

    /// Returns two lines with the text and a mark below the wrong part, and then the message.
    pub fn caret(&self, text: &str) -> String {
        // Print one line with one column per character: tabs and line ends would move the mark to the wrong place.
        let flat: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let column = text.get(..self.at.start).unwrap_or(text).chars().count();
        let width = text.get(self.at.clone()).map_or(0, |part| part.chars().count()).max(1);
        format!("  {flat}\n  {}{}\n{}", " ".repeat(column), "^".repeat(width), self.message)
    }
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "filter, column {}: {}", self.at.start + 1, self.message)
    }
}

impl std::error::Error for FilterError {}

/// Returns the word that is nearest to `typed`, if it is near enough to be a typing error.
pub(super) fn nearest<'a>(typed: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A long text is not a typing error, and the cost of the distance grows with the square of its length.
    if typed.len() > 24 {
        return None;
    }
    let (distance, word) =
        words.into_iter().map(|word| (distance(typed, word), word)).min_by_key(|(distance, _)| *distance)?;
    (distance <= 1 + typed.len() / 4).then_some(word)
}

/// Returns the Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let cost = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = cost.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_textbook() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(nearest("prot", ["port", "proc", "host"]), Some("proc"));
        assert_eq!(nearest("zzzzz", ["port", "proc"]), None);
    }
}
