//! Builds a list from its text, which may arrive in parts of any size. Memory holds at most one piece of names to
//! sort, the sorted pieces in the format of the table, and the table.

use super::table::{Table, Writer, take};
use super::{BELOW, HostList, ITSELF, NOT_BELOW, NOT_ITSELF};
use crate::flow::HostName;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

/// The longest line that is read, in bytes. A longer one is counted as skipped.
const LINE_MAX: usize = 1 << 20;
/// Most bytes of names that are sorted at a time.
const PIECE_BYTES: usize = 1 << 20;
/// Most names that are sorted at a time.
const PIECE_NAMES: usize = 1 << 16;

/// A line that is not an entry.
struct Foreign;

/// Reads a list. [`HostList`] describes the lines that it may contain.
#[derive(Default)]
pub struct HostListBuilder {
    /// The beginning of a line whose end has not arrived.
    line: Vec<u8>,
    /// This line is too long.
    is_overlong: bool,
    piece: Piece,
    /// Sorted names, in the format of [`Writer`].
    sorted: Vec<Vec<Vec<u8>>>,
    skipped: usize,
}

/// Names that are not sorted yet.
#[derive(Default)]
struct Piece {
    /// The names, each from its end on, one behind the other.
    text: Vec<u8>,
    /// For each name: its offset, its length, and its meanings.
    places: Vec<(u32, u8, u8)>,
}

impl HostListBuilder {
    /// Takes the next bytes of the text.
    pub fn push(&mut self, text: &[u8]) {
        let mut rest = text;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, behind) = rest.split_at(end);
            rest = behind.get(1..).unwrap_or_default();
            if self.line.is_empty() && !self.is_overlong {
                self.whole_line(line);
            } else {
                self.hold(line);
                self.end_line();
            }
        }
        self.hold(rest);
    }

    /// Ends the text.
    pub fn finish(mut self) -> HostList {
        self.end_line();
        self.sort();
        let mut merge = Merge::new(self.sorted);
        self.piece = Piece::default();
        let table = Table::new(move |name| merge.next(name));
        HostList { table, skipped: self.skipped }
    }

    fn hold(&mut self, part: &[u8]) {
        self.is_overlong |= self.line.len() + part.len() > LINE_MAX;
        if !self.is_overlong {
            self.line.extend_from_slice(part);
        }
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if std::mem::take(&mut self.is_overlong) {
            self.skipped += 1;
        } else {
            self.whole_line(&line);
        }
    }

    fn whole_line(&mut self, line: &[u8]) {
        if self.entries(line).is_err() {
            self.skipped += 1;
        }
    }

    fn entries(&mut self, line: &[u8]) -> Result<(), Foreign> {
        let line = line.split(|byte| *byte == b'#').next().unwrap_or_default().trim_ascii();
        if line.is_empty() || matches!(line, [b'!' | b'[', ..]) {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix(b"@@||") {
            return self.whole_domain(rest, NOT_ITSELF | NOT_BELOW);
        }
        if let Some(rest) = line.strip_prefix(b"||") {
            return self.whole_domain(rest, ITSELF | BELOW);
        }
        let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let first = words.next().unwrap_or_default();
        let is_address =
            std::str::from_utf8(first).is_ok_and(|text| text.parse::<std::net::IpAddr>().is_ok());
        if is_address {
            return words.filter(|word| !is_own(word)).try_for_each(|name| self.add(name, ITSELF));
        }
        match (words.next(), first) {
            (Some(_), _) => Err(Foreign),
            (None, [b'*', b'.', name @ ..]) => self.add(name, BELOW),
            (None, [b'.', name @ ..]) => self.add(name, ITSELF | BELOW),
            (None, name) => self.add(name, ITSELF),
        }
    }

    /// Adds an entry `name^`, with nothing behind it.
    fn whole_domain(&mut self, rest: &[u8], meanings: u8) -> Result<(), Foreign> {
        self.add(rest.strip_suffix(b"^").ok_or(Foreign)?, meanings)
    }

    fn add(&mut self, name: &[u8], meanings: u8) -> Result<(), Foreign> {
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte) || !byte.is_ascii();
        if !name.iter().all(is_name) {
            return Err(Foreign);
        }
        let name = HostName::from_bytes(name).map_err(|_| Foreign)?;
        let name = name.as_str().as_bytes();
        let length = u8::try_from(name.len()).map_err(|_| Foreign)?;
        if self.piece.text.len() + name.len() > PIECE_BYTES || self.piece.places.len() >= PIECE_NAMES {
            self.sort();
        }
        let start = u32::try_from(self.piece.text.len()).map_err(|_| Foreign)?;
        self.piece.text.extend(name.iter().rev());
        self.piece.places.push((start, length, meanings));
        Ok(())
    }

    /// Sorts the buffered names, and writes them in the format of the table.
    fn sort(&mut self) {
        let Piece { text, places } = &mut self.piece;
        let name = |(start, length, _): &(u32, u8, u8)| {
            &text[*start as usize..*start as usize + usize::from(*length)]
        };
        places.sort_unstable_by(|one, other| name(one).cmp(name(other)));
        let mut writer = Writer::default();
        for same in places.chunk_by(|one, other| name(one) == name(other)) {
            let meanings = same.iter().fold(0, |all, (_, _, meanings)| all | meanings);
            writer.push(name(&same[0]), meanings);
        }
        self.sorted.push(writer.segments);
        text.clear();
        places.clear();
    }
}

/// Whether this is a name of the local host in hosts(5). Lists often begin with such names.
fn is_own(name: &[u8]) -> bool {
    const OWN: [&[u8]; 5] = [b"localhost", b"localhost.localdomain", b"local", b"broadcasthost", b"0.0.0.0"];
    OWN.iter().any(|own| name.eq_ignore_ascii_case(own)) || name.starts_with(b"ip6-")
}

/// Merges several sorted pieces.
struct Merge(BinaryHeap<Reverse<Cursor>>);

/// The next name of a sorted piece.
struct Cursor {
    /// The segments behind the current one.
    behind: std::vec::IntoIter<Vec<u8>>,
    /// The segment that contains the name.
    segment: Vec<u8>,
    at: usize,
    name: Vec<u8>,
    meanings: u8,
}

impl Merge {
    fn new(sorted: Vec<Vec<Vec<u8>>>) -> Self {
        let cursors = sorted.into_iter().filter_map(|segments| {
            let (behind, segment) = (segments.into_iter(), Vec::new());
            let mut cursor = Cursor { behind, segment, at: 0, name: Vec::new(), meanings: 0 };
            cursor.advance().then_some(Reverse(cursor))
        });
        Self(cursors.collect())
    }

    /// Copies the next name into `name`. Returns its meanings in all pieces together.
    fn next(&mut self, name: &mut Vec<u8>) -> Option<u8> {
        let first = &self.0.peek()?.0;
        name.clear();
        name.extend_from_slice(&first.name);
        let mut meanings = 0;
        while let Some(mut top) = self.0.peek_mut().filter(|top| top.0.name == *name) {
            meanings |= top.0.meanings;
            if !top.0.advance() {
                PeekMut::pop(top);
            }
        }
        Some(meanings)
    }
}

impl Cursor {
    /// Moves to the next name. Returns false at the end.
    fn advance(&mut self) -> bool {
        if self.at == self.segment.len() {
            // Drop the segment that was read, so that its memory can be reused.
            let Some(next) = self.behind.next() else { return false };
            (self.segment, self.at) = (next, 0);
        }
        let mut rest = self.segment.get(self.at..).unwrap_or_default();
        let before = rest.len();
        let Some(entry) = take(&mut rest) else { return false };
        self.at += before - rest.len();
        self.name.truncate(entry.shared);
        self.name.extend_from_slice(entry.rest);
        self.meanings = entry.meanings;
        true
    }
}

impl Ord for Cursor {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl PartialOrd for Cursor {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Cursor {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Cursor {}
