//! Words to look for in bytes that come in pieces.

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, Input, MatchKind};
use std::fmt;

/// Why words cannot be looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WordsError {
    /// One is empty: it would be everywhere.
    #[error("an empty word would be found everywhere")]
    Empty,
    /// One is too long.
    #[error("a word has at most {} bytes", Words::LENGTH_MAX)]
    TooLong,
    /// There are too many.
    #[error("there are at most {} words", Words::COUNT_MAX)]
    TooMany,
}

/// Words, compiled once for all flows. Earlier words win over later ones that begin at the same place.
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
    /// Which one.
    pub word: usize,
    /// Where it begins and ends.
    pub start: usize,
    /// The byte after its last.
    pub end: usize,
}

impl Words {
    /// Longest word, bytes.
    pub const LENGTH_MAX: usize = 1024;
    /// Most words of one function.
    pub const COUNT_MAX: usize = 1024;

    /// Compiles words.
    ///
    /// # Errors
    /// One of them is of no use, or there are too many.
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Bytes of the longest.
    pub const fn longest(&self) -> usize {
        self.longest
    }

    /// A word by its number.
    pub fn word(&self, number: usize) -> &[u8] {
        self.words.get(number).map_or(&[], Vec::as_slice)
    }

    /// The first word in `bytes` that begins at `from` or later.
    pub fn find(&self, bytes: &[u8], from: usize) -> Option<Found> {
        let input = Input::new(bytes).range(from.min(bytes.len())..);
        let found = self.automaton.find(input)?;
        Some(Found { word: found.pattern().as_usize(), start: found.start(), end: found.end() })
    }

    /// The first place from `from` on where a word begins of which not all bytes are there yet; the length of `bytes` if
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
