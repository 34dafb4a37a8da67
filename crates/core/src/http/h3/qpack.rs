//! Field sections without a dynamic table (QPACK, RFC 9204 Sec. 4.5): entries of the static table, and literals.

use super::table::STATIC;
use super::{Code, Error};
use crate::http::hpack::{HpackError, Rest};

/// What each field counts beyond its name and value (RFC 9114 Sec. 4.2.2), in bytes.
const FIELD_BYTES: usize = 32;

/// Fields whose values no table may ever hold.
const SECRETS: [&[u8]; 3] = [b"authorization", b"cookie", b"proxy-authorization"];

/// Decodes a field section, and calls `each` with the name and value of every field in order.
///
/// # Errors
/// The section refers to a dynamic table or is malformed: the connection must end. Or its fields have more than `list_max` bytes,
/// counted as in RFC 9114 Sec. 4.2.2: only the stream must.
pub fn decode(section: &[u8], list_max: usize, mut each: impl FnMut(&[u8], &[u8])) -> Result<(), Error> {
    let mut rest = Rest(section);
    if rest.integer(8).map_err(bad)? != 0 {
        return Err(broken("a field section needs a dynamic table"));
    }
    let is_negative = rest.0.first().is_some_and(|first| first & 0x80 != 0);
    rest.integer(7).map_err(bad)?;
    if is_negative {
        return Err(broken("a field section has a negative base"));
    }
    let mut size: usize = 0;
    while let Some(first) = rest.0.first().copied() {
        let (name, value);
        if first & 0x80 != 0 {
            let (known, text) = entry(first & 0x40 != 0, rest.integer(6).map_err(bad)?)?;
            (name, value) = (known.to_vec(), text.to_vec());
        } else if first & 0x40 != 0 {
            name = entry(first & 0x10 != 0, rest.integer(4).map_err(bad)?)?.0.to_vec();
            value = rest.string(7).map_err(bad)?;
        } else if first & 0x20 != 0 {
            name = rest.string(3).map_err(bad)?;
            value = rest.string(7).map_err(bad)?;
        } else {
            return Err(broken("a field refers to a dynamic table"));
        }
        size = size.saturating_add(name.len() + value.len() + FIELD_BYTES);
        if size > list_max {
            return Err(Error::of_stream(Code::ExcessiveLoad, "the fields are too large"));
        }
        each(&name, &value);
    }
    Ok(())
}

/// Returns an entry of the static table.
fn entry(is_static: bool, index: usize) -> Result<(&'static [u8], &'static [u8]), Error> {
    if !is_static {
        return Err(broken("a field refers to a dynamic table"));
    }
    let entry = STATIC.get(index).ok_or(broken("a field refers to an entry that does not exist"))?;
    Ok((entry.0.as_bytes(), entry.1.as_bytes()))
}

const fn broken(why: &'static str) -> Error {
    Error::new(Code::QpackDecompression, why)
}

const fn bad(error: HpackError) -> Error {
    broken(match error {
        HpackError::Truncated => "a field section ends in a field",
        HpackError::Integer => "a field section has an integer of too many bytes",
        HpackError::Huffman => "a field section has a string with a bad Huffman code",
        HpackError::Index | HpackError::SizeUpdate | HpackError::TooLarge => "a field section is malformed",
    })
}

/// Encodes a field section. Names must be in lower case. Strings have no Huffman code.
pub fn encode<'a>(fields: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let mut out = vec![0, 0];
    for (name, value) in fields {
        let of_name = STATIC.iter().position(|(known, _)| known.as_bytes() == name);
        let whole =
            STATIC.iter().position(|(known, text)| (known.as_bytes(), text.as_bytes()) == (name, value));
        let never = if SECRETS.contains(&name) { 0x20 } else { 0 };
        match (whole, of_name) {
            (Some(index), _) => integer(&mut out, 0xc0, 6, index),
            (None, Some(index)) => {
                integer(&mut out, 0x50 | never, 4, index);
                text(&mut out, 0, 7, value);
            }
            (None, None) => {
                text(&mut out, 0x20 | never >> 1, 3, name);
                text(&mut out, 0, 7, value);
            }
        }
    }
    out
}

fn text(out: &mut Vec<u8>, bits: u8, prefix: u32, text: &[u8]) {
    integer(out, bits, prefix, text.len());
    out.extend_from_slice(text);
}

/// Appends an integer behind the bits of its prefix (RFC 7541 Sec. 5.1).
#[expect(clippy::cast_possible_truncation, reason = "each part fits a byte")]
fn integer(out: &mut Vec<u8>, bits: u8, prefix: u32, value: usize) {
    let full = (1 << prefix) - 1;
    if value < full {
        return out.push(bits | value as u8);
    }
    out.push(bits | full as u8);
    let mut rest = value - full;
    while rest >= 128 {
        out.push((rest % 128) as u8 | 0x80);
        rest /= 128;
    }
    out.push(rest as u8);
}
