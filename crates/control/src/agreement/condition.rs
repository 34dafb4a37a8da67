//! Checks a condition before the policy engine reads it. The engine parses, checks and frees a text with
//! recursion as deep as its nesting, and agreements come from other machines. So texts that are nested too
//! deeply are rejected here.

use std::ops::Range;

/// Longest condition, bytes.
pub(super) const BYTES_MAX: usize = 4096;

/// Deepest nesting of brackets in a condition.
pub(super) const DEPTH_MAX: usize = 32;

/// Says why a text must not reach the policy engine, and where. `None` if it may.
pub(super) fn refused(text: &str) -> Option<(String, Range<usize>)> {
    if text.len() > BYTES_MAX {
        let end = text.ceil_char_boundary(BYTES_MAX);
        return Some((
            format!("it is longer than {BYTES_MAX} bytes: write several agreements"),
            end..text.len(),
        ));
    }
    let mut depth = 0_usize;
    for (at, byte) in brackets(text.as_bytes()) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            _ => depth = depth.saturating_sub(1),
        }
        if depth > DEPTH_MAX {
            return Some((format!("brackets stand more than {DEPTH_MAX} deep here"), at..at + 1));
        }
    }
    None
}

/// State of the lexer.
enum Within {
    Code,
    Text,
    Comment,
}

/// The brackets outside texts and comments, with their positions.
fn brackets(bytes: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    let mut within = Within::Code;
    let mut escaped = false;
    bytes.iter().copied().enumerate().filter(move |(at, byte)| {
        let next = bytes.get(at + 1);
        match within {
            Within::Code => match byte {
                b'"' => within = Within::Text,
                b'/' if next == Some(&b'/') => within = Within::Comment,
                b'(' | b'[' | b'{' | b')' | b']' | b'}' => return true,
                _ => {}
            },
            Within::Text if escaped => escaped = false,
            Within::Text => match byte {
                b'\\' => escaped = true,
                b'"' => within = Within::Code,
                _ => {}
            },
            Within::Comment if matches!(byte, b'\n' | b'\r') => within = Within::Code,
            Within::Comment => {}
        }
        false
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_count_where_they_are_brackets() {
        let nested = |depth: usize| format!("{}true{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(refused(&nested(DEPTH_MAX)), None);
        let (words, place) = refused(&nested(DEPTH_MAX + 1)).expect("too deep");
        assert_eq!((&*words, place), ("brackets stand more than 32 deep here", DEPTH_MAX..DEPTH_MAX + 1));
        assert_eq!(refused(&"(true) && ".repeat(100)), None, "one after the other");
        assert_eq!(refused(&format!("\"{}\" == \"\"", "(".repeat(100))), None, "in a text");
        assert_eq!(refused(&format!("true // {}\n", "(".repeat(100))), None, "in a comment");
        // A closing bracket within a text does not count.
        assert!(refused(&"(\")\\\"\" == ".repeat(DEPTH_MAX + 1)).is_some());
        assert!(refused(&format!("// \"\n{}", nested(DEPTH_MAX + 1))).is_some());
    }

    #[test]
    fn a_long_one_is_refused_at_a_place_in_the_text() {
        assert_eq!(refused(&" ".repeat(BYTES_MAX)), None);
        let text = "é".repeat(BYTES_MAX);
        let (_, place) = refused(&text).expect("too long");
        assert!(text.is_char_boundary(place.start) && place.end == text.len());
    }
}
