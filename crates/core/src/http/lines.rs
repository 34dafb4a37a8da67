//! Finds line ends and control bytes in a head, 64 bytes at a time.

use super::fields::is_token_byte;
use wide::u8x16;

/// Bytes that are examined together, one bit of a word for each.
const BLOCK: usize = 64;

/// A set of bytes.
#[derive(Clone, Copy, Debug)]
enum Set {
    /// Bytes below space, and DEL.
    Controls,
    LineFeeds,
}

/// The positions of the bytes of one set in a text, in order.
#[derive(Clone, Debug)]
pub(super) struct Marks<'a> {
    text: &'a [u8],
    set: Set,
    /// The offset of the block that the remaining marks belong to.
    block: usize,
    marks: u64,
}

impl<'a> Marks<'a> {
    /// Finds control bytes from this position on.
    pub(super) fn of_controls(text: &'a [u8], from: usize) -> Self {
        Self::new(text, Set::Controls, from)
    }

    fn new(text: &'a [u8], set: Set, from: usize) -> Self {
        let mut marks = Self { text, set, block: from, marks: 0 };
        marks.look();
        marks
    }

    /// Marks the bytes of the current block.
    fn look(&mut self) {
        let rest = self.text.get(self.block..).unwrap_or_default();
        self.marks = match rest.first_chunk() {
            Some(block) => marked(block, self.set),
            None => {
                // Fill the last block up with a byte that is in no set.
                let mut block = [b' '; BLOCK];
                if let Some(begin) = block.get_mut(..rest.len()) {
                    begin.copy_from_slice(rest);
                }
                marked(&block, self.set)
            }
        };
    }
}

impl Iterator for Marks<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.marks == 0 {
            if self.text.len() <= self.block + BLOCK {
                return None;
            }
            self.block += BLOCK;
            self.look();
        }
        let at = self.block + self.marks.trailing_zeros() as usize;
        self.marks &= self.marks - 1;
        Some(at)
    }
}

/// The lines of a text without their ends, each with its offset. Text behind the last line end is a line, too, unless
/// it is empty.
#[derive(Clone, Debug)]
pub(super) struct Lines<'a> {
    ends: Marks<'a>,
    begin: usize,
}

impl<'a> Lines<'a> {
    pub(super) fn of(text: &'a [u8]) -> Self {
        Self { ends: Marks::new(text, Set::LineFeeds, 0), begin: 0 }
    }

    /// Returns the whole text, including the lines that were already returned.
    pub(super) const fn text(&self) -> &'a [u8] {
        self.ends.text
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = (usize, &'a [u8]);

    fn next(&mut self) -> Option<(usize, &'a [u8])> {
        let begin = self.begin;
        let end = match self.ends.next() {
            Some(end) => end,
            None if begin < self.ends.text.len() => self.ends.text.len(),
            None => return None,
        };
        self.begin = end + 1;
        let line = self.ends.text.get(begin..end).unwrap_or_default();
        Some((begin, line.strip_suffix(b"\r").unwrap_or(line)))
    }
}

/// Marks the bytes of a block that are in a set. The first byte has the lowest bit.
fn marked(block: &[u8; BLOCK], set: Set) -> u64 {
    let (rows, _) = block.as_chunks::<16>();
    rows.iter().enumerate().fold(0, |marks, (index, row)| {
        let row = u8x16::new(*row);
        let found = match set {
            Set::LineFeeds => row.simd_eq(u8x16::splat(b'\n')),
            // A byte is a control if it is the smaller one of itself and the last byte below space.
            Set::Controls => row.simd_eq(row.min(u8x16::splat(b' ' - 1))) | row.simd_eq(u8x16::splat(0x7f)),
        };
        marks | u64::from(found.to_bitmask()) << (index * 16)
    })
}

/// Returns how many bytes at the beginning of a line are a field name: bytes of a token (RFC 9110 Sec. 5.6.2).
pub(super) fn name_length(line: &[u8]) -> usize {
    // Nearly all names are letters and hyphens, and not longer than one row.
    let usual = line.first_chunk().map_or(0, |row| {
        let row = u8x16::new(*row);
        let from_a = (row | u8x16::splat(0x20)) - u8x16::splat(b'a');
        let letters = from_a.simd_eq(from_a.min(u8x16::splat(b'z' - b'a')));
        (letters | row.simd_eq(u8x16::splat(b'-'))).to_bitmask().trailing_ones() as usize
    });
    if line.get(usual) == Some(&b':') {
        return usual;
    }
    line.iter().position(|byte| !is_token_byte(*byte)).unwrap_or(line.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_judged_as_each_of_their_bytes() {
        let is_control = |byte: u8| byte < b' ' || byte == 0x7f;
        for place in 0..BLOCK {
            for byte in 0..=u8::MAX {
                // Neighbours that would show carries and borrows, and neighbours that are marked, too.
                for around in [b' ', b'\t', b'~', 0x80, 0xff, b'\n', 0x7f] {
                    let mut block = [around; BLOCK];
                    block[place] = byte;
                    for (set, is) in [
                        (Set::Controls, &is_control as &dyn Fn(u8) -> bool),
                        (Set::LineFeeds, &|byte| byte == b'\n'),
                    ] {
                        let wanted = (0..BLOCK).fold(0, |bits, at| bits | u64::from(is(block[at])) << at);
                        assert_eq!(marked(&block, set), wanted, "{set:?} {block:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn marks_are_found_across_blocks_and_from_any_place() {
        for length in [0, 1, 63, 64, 65, 127, 128, 129, 200] {
            let mut text = vec![b'a'; length];
            for at in (0..length).step_by(31) {
                text[at] = b'\r';
            }
            for from in 0..=length {
                let wanted: Vec<usize> = (0..length).step_by(31).filter(|at| *at >= from).collect();
                assert_eq!(Marks::of_controls(&text, from).collect::<Vec<_>>(), wanted, "{length} {from}");
            }
        }
    }

    #[test]
    fn names_end_where_the_first_byte_stands_that_no_token_may_have() {
        let by_bytes = |line: &[u8]| line.iter().take_while(|byte| is_token_byte(**byte)).count();
        for length in [0, 1, 2, 12, 15, 16, 17, 31, 32, 40] {
            let name: Vec<u8> = b"Content-Length!Az".iter().copied().cycle().take(length).collect();
            for line in [&name[..], &[&name[..], b": value and more"].concat(), &[&name[..], b":"].concat()] {
                assert_eq!(name_length(line), by_bytes(line));
                for place in 0..line.len() {
                    for byte in 0..=u8::MAX {
                        let mut other = line.to_vec();
                        other[place] = byte;
                        assert_eq!(name_length(&other), by_bytes(&other), "{other:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn lines_are_as_splitting_has_them() {
        for text in
            ["", "\n", "a", "a\r\n", "a\r\nb", "\r\n\r\na\n\nb\r\r\n", &"x".repeat(64), &"y\n".repeat(64)]
        {
            let mut wanted: Vec<&[u8]> = text
                .as_bytes()
                .split(|byte| *byte == b'\n')
                .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
                .collect();
            if text.is_empty() || text.ends_with('\n') {
                wanted.pop();
            }
            let lines: Vec<_> = Lines::of(text.as_bytes()).collect();
            assert_eq!(lines.iter().map(|(_, line)| *line).collect::<Vec<_>>(), wanted, "{text:?}");
            assert!(
                lines.iter().all(|(begin, line)| text.as_bytes()[*begin..].starts_with(line)),
                "{text:?}"
            );
        }
    }
}
