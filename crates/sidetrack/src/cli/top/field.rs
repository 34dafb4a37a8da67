//! The filter while it is written: a line with a cursor, what is wrong with it, and what may come next.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use sidetrack_core::filter::{Filter, FilterError};

/// Longest filter, bytes.
const TEXT_MAX: usize = 2000;
/// Most words that are offered at a time.
const OFFERED_MAX: usize = 12;

/// A line with a cursor.
#[derive(Clone, Debug, Default)]
pub struct Field {
    text: String,
    /// The byte before which the next character is written.
    at: usize,
    error: Option<FilterError>,
    offered: Vec<String>,
}

impl Field {
    /// A field with this text, and the cursor at its end.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), at: text.len(), error: None, offered: Vec::new() }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The characters before the cursor.
    pub fn before(&self) -> &str {
        &self.text[..self.at]
    }

    /// What is wrong, and where.
    pub const fn error(&self) -> Option<&FilterError> {
        self.error.as_ref()
    }

    /// Words that may come next.
    pub fn offered(&self) -> &[String] {
        &self.offered
    }

    /// Reads the filter. False: [`Field::error`] says what is wrong.
    pub fn check(&mut self) -> bool {
        self.error = Filter::parse(&self.text).err();
        self.error.is_none()
    }

    /// Takes a key. `values` returns values of a field of the filter that are known here.
    pub fn key(&mut self, key: KeyEvent, values: impl Fn(&str) -> Vec<String>) {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        self.offered.clear();
        match key.code {
            KeyCode::Char('u') if control => {
                self.text.drain(..self.at);
                self.at = 0;
            }
            KeyCode::Char('w') if control => {
                let kept = self.before().trim_end();
                let from = kept.rfind(char::is_whitespace).map_or(0, |space| space + 1);
                self.text.drain(from..self.at);
                self.at = from;
            }
            KeyCode::Char('a') if control => self.at = 0,
            KeyCode::Char('e') if control => self.at = self.text.len(),
            KeyCode::Char(c) if !control && self.text.len() < TEXT_MAX => {
                self.text.insert(self.at, c);
                self.at += c.len_utf8();
            }
            KeyCode::Backspace => {
                if let Some(c) = self.before().chars().next_back() {
                    self.at -= c.len_utf8();
                    self.text.remove(self.at);
                }
            }
            KeyCode::Delete if self.at < self.text.len() => {
                self.text.remove(self.at);
            }
            KeyCode::Left => self.at -= self.before().chars().next_back().map_or(0, char::len_utf8),
            KeyCode::Right => self.at += self.text[self.at..].chars().next().map_or(0, char::len_utf8),
            KeyCode::Home => self.at = 0,
            KeyCode::End => self.at = self.text.len(),
            KeyCode::Tab => self.complete(values),
            _ => {}
        }
        self.check();
    }

    /// Writes as much as all possible words have in common, and offers the words if there are several.
    fn complete(&mut self, values: impl Fn(&str) -> Vec<String>) {
        let found = Filter::complete(&self.text, self.at, values);
        let Some(first) = found.words.first() else { return };
        let common = found.words.iter().fold(first.as_str(), |common, word| {
            let same = common.char_indices().zip(word.chars()).take_while(|((_, one), other)| one == other);
            &common[..same.last().map_or(0, |((at, c), _)| at + c.len_utf8())]
        });
        let written = &self.text[found.from..self.at];
        if common.len() > written.len() && common.starts_with(written) {
            let common = common.to_owned();
            self.text.replace_range(found.from..self.at, &common);
            self.at = found.from + common.len();
        }
        if found.words.len() > 1 {
            self.offered = found.words;
            self.offered.truncate(OFFERED_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(field: &mut Field, codes: &[KeyCode]) {
        for code in codes {
            field.key(KeyEvent::new(*code, KeyModifiers::NONE), |_| vec!["bulk".into(), "web site".into()]);
        }
    }

    #[test]
    fn keys_write_and_move() {
        let mut field = Field::default();
        press(&mut field, &[KeyCode::Char('ä'), KeyCode::Char('b'), KeyCode::Left, KeyCode::Left]);
        press(&mut field, &[KeyCode::Left, KeyCode::Char('x'), KeyCode::Right, KeyCode::Backspace]);
        assert_eq!((field.text(), field.before()), ("xb", "x"));
        press(&mut field, &[KeyCode::Delete, KeyCode::Delete, KeyCode::Backspace, KeyCode::Backspace]);
        assert_eq!(field.text(), "");
        let mut field = Field::new("port == 443");
        field.key(KeyEvent::new(KeyCode::Char('w'), KeyModifiers::CONTROL), |_| Vec::new());
        assert_eq!(field.text(), "port == ");
        assert!(field.error().is_some(), "a value is missing");
        field.key(KeyEvent::new(KeyCode::Char('u'), KeyModifiers::CONTROL), |_| Vec::new());
        assert!(field.text().is_empty() && field.error().is_none());
    }

    #[test]
    fn words_are_completed() {
        let mut field = Field::new("rul");
        press(&mut field, &[KeyCode::Tab]);
        assert_eq!(field.text(), "rule");
        let mut field = Field::new("rule == ");
        press(&mut field, &[KeyCode::Tab]);
        assert_eq!(field.text(), "rule == ", "several");
        assert!(field.offered().iter().any(|word| word == "bulk"), "{:?}", field.offered());
        press(&mut field, &[KeyCode::Char('b'), KeyCode::Tab]);
        assert_eq!(field.text(), "rule == bulk");
    }
}
