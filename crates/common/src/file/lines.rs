//! A text with an index of its lines. Showing one place does not read all text before it: a file with 50,000
//! rules may have a problem in each.

use miette::{MietteError, MietteSpanContents, SourceCode, SourceSpan, SpanContents};
use std::ops::Range;

/// A named text with the offsets of its lines.
#[derive(Clone, Debug)]
pub(super) struct Lines {
    name: String,
    text: String,
    /// The first byte of each line. A line ends with `\n`, `\r` or both, as miette counts them.
    starts: Vec<usize>,
}

impl Lines {
    pub(super) fn new(name: &str, text: String) -> Self {
        let bytes = text.as_bytes();
        let ends = (0..bytes.len()).filter(|at| match bytes[*at] {
            b'\n' => true,
            b'\r' => bytes.get(at + 1) != Some(&b'\n'),
            _ => false,
        });
        let starts = std::iter::once(0).chain(ends.map(|end| end + 1)).collect();
        Self { name: name.to_owned(), text, starts }
    }

    /// Returns the number of the line, from 0, that contains this byte. For a byte behind the end, returns the
    /// last line.
    fn line_of(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at).saturating_sub(1)
    }

    /// Line and column of a byte, both from 1; columns in characters.
    pub(super) fn line_column(&self, at: usize) -> (usize, usize) {
        let at = if self.text.is_char_boundary(at) { at } else { self.text.len() };
        let line = self.line_of(at);
        (line + 1, self.text[self.starts[line]..at].chars().count() + 1)
    }

    /// Returns the range of the lines that contain a span, with `before` and `after` more lines, and the number
    /// of the first line.
    fn window(&self, span: &SourceSpan, before: usize, after: usize) -> (Range<usize>, usize) {
        // One line more: miette reads the byte before an empty span.
        let first = self.line_of(span.offset()).saturating_sub(before + 1);
        // The window ends where the line after the last one begins.
        let behind = self.line_of(span.offset().saturating_add(span.len())).saturating_add(after + 2);
        let end = self.starts.get(behind).copied().unwrap_or(self.text.len());
        (self.starts[first]..end, first)
    }
}

impl SourceCode for Lines {
    fn read_span<'a>(
        &'a self,
        span: &SourceSpan,
        before: usize,
        after: usize,
    ) -> Result<Box<dyn SpanContents<'a> + 'a>, MietteError> {
        let (window, first) = self.window(span, before, after);
        let inside = SourceSpan::new((span.offset() - window.start).into(), span.len());
        let part: &'a str = &self.text[window.clone()];
        let read = part.read_span(&inside, before, after)?;
        let shown = SourceSpan::new((read.span().offset() + window.start).into(), read.span().len());
        Ok(Box::new(MietteSpanContents::new_named(
            self.name.clone(),
            read.data(),
            shown,
            read.line() + first,
            read.column(),
            read.line_count() + first,
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares with miette's own search, which reads from the beginning of the text.
        #[test]
        fn a_place_is_shown_as_from_the_whole_text(
            text in "[ab\u{e4}\r\n]{0,60}", begin in 0..70_usize, len in 0..20_usize, before in 0..4_usize, after in 0..4_usize,
        ) {
            let lines = Lines::new("f", text.clone());
            let begin = begin.min(text.len());
            let span = SourceSpan::new(begin.into(), len.min(text.len() - begin));
            let (ours, theirs) = (lines.read_span(&span, before, after), text.as_str().read_span(&span, before, after));
            match (ours, theirs) {
                (Ok(ours), Ok(theirs)) => {
                    prop_assert_eq!(ours.data(), theirs.data());
                    prop_assert_eq!(ours.span(), theirs.span());
                    prop_assert_eq!((ours.line(), ours.column()), (theirs.line(), theirs.column()));
                    prop_assert_eq!(ours.name(), Some("f"));
                }
                (ours, theirs) => prop_assert_eq!(ours.is_err(), theirs.is_err()),
            }
        }
    }

    /// Counts work instead of time: each place in a text with 50,000 lines reads a few of them.
    #[test]
    fn a_place_in_a_long_text_reads_a_few_lines() {
        let count = 50_000;
        let line = "[[rule]] # one of many\n";
        let lines = Lines::new("f", line.repeat(count));
        for at in (0..count).step_by(997) {
            let begin = at * line.len() + 2;
            let (window, first) = lines.window(&SourceSpan::new(begin.into(), 4), 1, 1);
            assert!(window.len() <= 6 * line.len(), "{window:?}");
            assert_eq!((first, lines.line_column(begin)), (at.saturating_sub(2), (at + 1, 3)));
        }
    }
}
