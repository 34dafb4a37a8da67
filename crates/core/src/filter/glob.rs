//! Patterns with `*` (any run of characters, also none) and `?` (any one character).

/// Whether `pattern` matches the whole `text`. The time is at most proportional to the product of both lengths. No
/// recursion.
pub(crate) fn fits(pattern: &str, text: &str) -> bool {
    let mut pattern_left = pattern.chars();
    let mut text_left = text.chars();
    // Where to continue if the latest `*` must stand for a longer run.
    let mut retry: Option<(std::str::Chars<'_>, std::str::Chars<'_>)> = None;
    loop {
        let before = text_left.clone();
        match (pattern_left.next(), text_left.next()) {
            (None, None) => return true,
            (Some('*'), _) => {
                retry = Some((pattern_left.clone(), before.clone()));
                text_left = before;
            }
            (Some('?'), Some(_)) => {}
            (Some(want), Some(got)) if want == got => {}
            _ => {
                let Some((pattern_after, mut text_after)) = retry.take() else { return false };
                if text_after.next().is_none() {
                    return false;
                }
                pattern_left = pattern_after.clone();
                text_left = text_after.clone();
                retry = Some((pattern_after, text_after));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fits;
    use proptest::prelude::*;

    /// The definition of matching, without optimisation.
    fn by_definition(pattern: &[u8], text: &[u8]) -> bool {
        match (pattern.first(), text.first()) {
            (None, None) => true,
            (Some(b'*'), _) => {
                by_definition(&pattern[1..], text) || !text.is_empty() && by_definition(pattern, &text[1..])
            }
            (Some(b'?'), Some(_)) => by_definition(&pattern[1..], &text[1..]),
            (Some(a), Some(b)) if a == b => by_definition(&pattern[1..], &text[1..]),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn patterns_fit_as_defined(pattern in "[ab*?]{0,8}", text in "[abc]{0,8}") {
            prop_assert_eq!(fits(&pattern, &text), by_definition(pattern.as_bytes(), text.as_bytes()));
        }
    }

    #[test]
    fn names_and_wildcards() {
        assert!(fits("*.example", "www.example"));
        assert!(!fits("*.example", "example"));
        assert!(fits("*", ""));
        assert!(fits("caf?", "café"));
        assert!(!fits("", "a"));
    }
}
