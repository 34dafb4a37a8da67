//! Decodes header blocks of HTTP/2: HPACK (RFC 7541). It returns each field as the peer sent it: nothing is
//! normalised, dropped or cut.

mod huffman;
mod table;
#[cfg(test)]
mod tests;

use table::{ENTRY_BYTES, Table};

/// Most continuation bytes of an integer: every length and index that fits a frame needs fewer.
const CONTINUATION_MAX: u32 = 4;

/// Why a block cannot be decoded. All later blocks of the connection depend on it: the connection is broken (RFC
/// 9113 Sec. 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HpackError {
    /// The block ends inside a field.
    #[error("a header block ends inside a field")]
    Truncated,
    /// An index that no table has.
    #[error("a header block refers to an entry that does not exist")]
    Index,
    /// An integer with too many bytes.
    #[error("a header block has an integer of too many bytes")]
    Integer,
    /// A string that is not a valid Huffman code.
    #[error("a header block has a string with a bad Huffman code")]
    Huffman,
    /// A size update that is too large or not at the beginning of its block (RFC 7541 Sec. 4.2).
    #[error("a header block changes the size of the table where or how it must not")]
    SizeUpdate,
    /// The fields are larger than the limit.
    #[error("the fields of a header block are too large")]
    TooLarge,
}

/// The decoder of one direction of a connection. Give it every block, in order.
#[derive(Debug)]
pub struct Decoder {
    table: Table,
    table_max: usize,
    list_max: usize,
}

impl Decoder {
    /// Makes a decoder. `table_max`: SETTINGS_HEADER_TABLE_SIZE of the receiving end, in bytes. `list_max`: most bytes of a
    /// block's fields, counted as in RFC 9113 Sec. 6.5.2.
    pub const fn new(table_max: usize, list_max: usize) -> Self {
        Self { table: Table::new(table_max), table_max, list_max }
    }

    /// Decodes a whole block, and calls `each` with the name and value of every field in order. Returns the size of the
    /// field list in bytes, counted as in RFC 9113 Sec. 6.5.2.
    ///
    /// # Errors
    /// Fails if the block is malformed or too large. The decoder must not be used after that.
    pub fn decode(&mut self, block: &[u8], mut each: impl FnMut(&[u8], &[u8])) -> Result<usize, HpackError> {
        let mut rest = Rest(block);
        let (mut size, mut has_fields) = (0, false);
        while let Some(first) = rest.0.first().copied() {
            if first & 0b1110_0000 == 0b0010_0000 {
                let max = rest.integer(5)?;
                if has_fields || max > self.table_max {
                    return Err(HpackError::SizeUpdate);
                }
                self.table.resize(max);
                continue;
            }
            has_fields = true;
            let mut count = |name: &[u8], value: &[u8]| {
                size += name.len() + value.len() + ENTRY_BYTES;
                if size > self.list_max { Err(HpackError::TooLarge) } else { Ok(()) }
            };
            if first & 0b1000_0000 != 0 {
                let (name, value) = self.table.get(rest.integer(7)?).ok_or(HpackError::Index)?;
                count(name, value)?;
                each(name, value);
                continue;
            }
            let is_added = first & 0b0100_0000 != 0;
            let name = match rest.integer(if is_added { 6 } else { 4 })? {
                0 => rest.string(7)?,
                index => self.table.get(index).ok_or(HpackError::Index)?.0.to_vec(),
            };
            let value = rest.string(7)?;
            count(&name, &value)?;
            each(&name, &value);
            if is_added {
                self.table.insert(&name, &value);
            }
        }
        Ok(size)
    }
}

/// The bytes of a block that are not decoded yet.
pub(in crate::http) struct Rest<'a>(pub(in crate::http) &'a [u8]);

impl Rest<'_> {
    /// Reads an integer that begins in the lowest `prefix` bits of the next byte (RFC 7541 Sec. 5.1).
    pub(in crate::http) fn integer(&mut self, prefix: u32) -> Result<usize, HpackError> {
        let mut byte = || {
            let (first, rest) = self.0.split_first().ok_or(HpackError::Truncated)?;
            self.0 = rest;
            Ok(usize::from(*first))
        };
        let full = (1 << prefix) - 1;
        let mut value = byte()? & full;
        if value < full {
            return Ok(value);
        }
        for index in 0..CONTINUATION_MAX {
            let next = byte()?;
            value += (next & 0x7f) << (7 * index);
            if next & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(HpackError::Integer)
    }

    /// Reads a string (RFC 7541 Sec. 5.2) whose length begins in the lowest `prefix` bits. The bit above them says whether it has
    /// a Huffman code (RFC 9204 Sec. 4.1.2).
    pub(in crate::http) fn string(&mut self, prefix: u32) -> Result<Vec<u8>, HpackError> {
        let is_huffman = self.0.first().is_some_and(|first| first & (1 << prefix) != 0);
        let length = self.integer(prefix)?;
        let (text, rest) = self.0.split_at_checked(length).ok_or(HpackError::Truncated)?;
        self.0 = rest;
        if is_huffman { huffman::decode(text) } else { Ok(text.to_vec()) }
    }
}
