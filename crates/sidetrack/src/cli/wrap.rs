//! Breaks text into lines that fit the terminal.

use std::io::{self, IsTerminal};
use unicode_width::UnicodeWidthStr;

/// The width of text that does not go to a terminal.
pub const USUAL_WIDTH: usize = 80;

/// The width of standard output in columns.
pub fn width() -> usize {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return USUAL_WIDTH;
    }
    let size = terminal_size::terminal_size_of(&stdout);
    size.map_or(USUAL_WIDTH, |(terminal_size::Width(width), _)| usize::from(width))
}

/// Appends `text` after `begun`. Breaks lines between words so that they have at most `width` columns. Further lines begin
/// with `indent` blanks. A word that is longer than a line gets a line of its own.
pub fn push_wrapped(out: &mut String, begun: &str, text: &str, indent: usize, width: usize) {
    out.push_str(begun);
    let mut used = begun.width();
    let mut is_first = true;
    for word in text.split_whitespace() {
        let gap = usize::from(!is_first);
        if !is_first && used + gap + word.width() > width {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            used = indent;
        } else if !is_first {
            out.push(' ');
            used += gap;
        }
        out.push_str(word);
        used += word.width();
        is_first = false;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_further_ones_hang() {
        let wrapped = |text: &str, width| {
            let mut out = String::new();
            push_wrapped(&mut out, "name  ", text, 6, width);
            out
        };
        assert_eq!(wrapped("one two three", 13), "name  one two\n      three\n");
        assert_eq!(wrapped("one two three", 12), "name  one\n      two\n      three\n");
        assert_eq!(wrapped("unbreakable two", 10), "name  unbreakable\n      two\n");
        assert_eq!(wrapped("", 10), "name  \n");
    }
}
