//! Searches for words in bytes that arrive in pieces.

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, Input, MatchKind};
use std::fmt;

/// Why a list of words is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WordsError {
    /// A word is empty. It would match everywhere.
    #[error("an empty word would be found everywhere")]
    Empty,
    /// A word is too long.
    #[error("a word has at most {} bytes", Words::LENGTH_MAX)]
    TooLong,
    /// There are too many words.
    #[error("there are at most {} words", Words::COUNT_MAX)]
    TooMany,
}

/// Words, compiled once for all flows. If several words match at one position, the first in the list wins.
#[derive(Clone)]
pub struct Words {
    automaton: AhoCorasick,
    words: Vec<Vec<u8>>,
    ignore_case: bool,
    longest: usize,
}

/// A word that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The index of the word.
    pub word: usize,
    /// The offset of its first byte.
    pub start: usize,
    /// The byte after its last.
    pub end: usize,
}

impl Words {
    /// Most bytes of a word.
    pub const LENGTH_MAX: usize = 1024;
    /// Most words in one function.
    pub const COUNT_MAX: usize = 1024;

    /// Compiles words.
    ///
    /// # Errors
    /// Fails if a word is empty or too long, or if there are too many.
    pub fn new(words: &[Vec<u8>], ignore_case: bool) -> Result<Self, WordsError> {
        let longest = words.iter().map(Vec::len).max().unwrap_or(0);
        if words.iter().any(Vec::is_empty) {
            return Err(WordsError::Empty);
        } else if longest > Self::LENGTH_MAX {
            return Err(WordsError::TooLong);
        } else if words.len() > Self::COUNT_MAX {
            return Err(WordsError::TooMany);
        }
        let automaton = AhoCorasickBuilder::new()
            .match_kind(MatchKind::LeftmostFirst)
            .ascii_case_insensitive(ignore_case)
            .build(words)
            .map_err(|_| WordsError::TooMany)?;
        Ok(Self { automaton, words: words.to_vec(), ignore_case, longest })
    }

    /// Whether there are no words.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the length of the longest word.
    pub const fn longest(&self) -> usize {
        self.longest
    }

    /// Returns a word by its index.
    pub fn word(&self, number: usize) -> &[u8] {
        self.words.get(number).map_or(&[], Vec::as_slice)
    }

    /// Returns the first word in `bytes` that begins at `from` or later.
    pub fn find(&self, bytes: &[u8], from: usize) -> Option<Found> {
        let input = Input::new(bytes).range(from.min(bytes.len())..);
        let found = self.automaton.find(input)?;
        Some(Found { word: found.pattern().as_usize(), start: found.start(), end: found.end() })
    }

    /// Returns the first position from `from` on where an incomplete word may begin. Returns the length of `bytes` if
    /// there is none.
    pub fn unfinished(&self, bytes: &[u8], from: usize) -> usize {
        let first = bytes.len().saturating_sub(self.longest.saturating_sub(1)).max(from);
        (first..bytes.len()).find(|at| self.begins(&bytes[*at..])).unwrap_or(bytes.len())
    }

    /// Whether a longer word begins with these bytes.
    fn begins(&self, bytes: &[u8]) -> bool {
        let same = |a: &[u8], b: &[u8]| if self.ignore_case { a.eq_ignore_ascii_case(b) } else { a == b };
        self.words.iter().any(|word| word.len() > bytes.len() && same(&word[..bytes.len()], bytes))
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Words({})", self.words.len())
    }
}
