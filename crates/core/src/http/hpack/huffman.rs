//! The Huffman code of RFC 7541 Appendix B. It is canonical: among codes of one length, larger symbols have larger
//! codes, and longer codes follow shorter ones. So the lengths alone define it.

use super::HpackError;

/// The length of each symbol's code in bits. The last symbol is EOS, which no string contains.
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28,
    28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6,
    6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8,
    13, 19, 13, 14, 6, 15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15,
    11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23,
    23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23,
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26,
    26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21,
    22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27,
    27, 26, 30,
];

const SYMBOLS: usize = 257;
const SHORTEST: usize = 5;
const LONGEST: usize = 30;

/// The codes of one length.
#[derive(Clone, Copy)]
struct Row {
    /// The first code.
    first: u32,
    /// The end of the codes of this length and of all shorter ones, filled up with zeros to [`LONGEST`] bits.
    limit: u32,
    /// The place of the first code's symbol in [`Codes::symbols`].
    begin: usize,
}

struct Codes {
    /// One row for each length.
    rows: [Row; LONGEST + 1],
    /// All symbols in the order of their codes.
    symbols: [u16; SYMBOLS],
}

const CODES: &Codes = &Codes::new();

impl Codes {
    #[expect(clippy::cast_possible_truncation, reason = "there are 257 symbols")]
    const fn new() -> Self {
        let mut codes =
            Self { rows: [Row { first: 0, limit: 0, begin: 0 }; LONGEST + 1], symbols: [0; SYMBOLS] };
        let (mut code, mut placed, mut length) = (0, 0, SHORTEST);
        while length <= LONGEST {
            codes.rows[length].first = code;
            codes.rows[length].begin = placed;
            let mut symbol = 0;
            while symbol < SYMBOLS {
                if LENGTHS[symbol] as usize == length {
                    codes.symbols[placed] = symbol as u16;
                    placed += 1;
                    code += 1;
                }
                symbol += 1;
            }
            codes.rows[length].limit = code << (LONGEST - length);
            code <<= 1;
            length += 1;
        }
        codes
    }
}

/// Decodes a string.
///
/// # Errors
/// [`HpackError::Huffman`] if it contains EOS, or does not end with less than 8 bits that are all 1 (RFC 7541 Sec. 5.2).
pub(super) fn decode(bytes: &[u8]) -> Result<Vec<u8>, HpackError> {
    let mut out = Vec::with_capacity(bytes.len() * 8 / SHORTEST);
    let mut bytes = bytes.iter();
    // The lowest `count` bits of `held` are those that were read and not decoded yet.
    let (mut held, mut count) = (0_u64, 0_usize);
    loop {
        while count < LONGEST
            && let Some(byte) = bytes.next()
        {
            held = held << 8 | u64::from(*byte);
            count += 8;
        }
        // Missing bits are filled up with 1, like padding.
        let missing = LONGEST.saturating_sub(count);
        let filled = held << missing | ((1 << missing) - 1);
        let window = (filled >> (count + missing - LONGEST) & 0xffff_ffff) as u32 & ((1 << LONGEST) - 1);
        let mut rows = CODES.rows.iter().enumerate().skip(SHORTEST);
        let (length, row) = rows.find(|(_, row)| window < row.limit).ok_or(HpackError::Huffman)?;
        if length > count {
            let ones = (1 << count) - 1;
            return if count < 8 && held & ones == ones { Ok(out) } else { Err(HpackError::Huffman) };
        }
        let place = row.begin + ((window >> (LONGEST - length)) - row.first) as usize;
        let symbol = CODES.symbols.get(place).and_then(|symbol| u8::try_from(*symbol).ok());
        out.push(symbol.ok_or(HpackError::Huffman)?);
        count -= length;
        held &= (1 << count) - 1;
    }
}

/// Encodes a string, for tests.
#[cfg(test)]
pub(super) fn encode(bytes: &[u8]) -> Vec<u8> {
    let (mut bits, mut out) = (Vec::new(), Vec::new());
    for byte in bytes {
        let place = CODES.symbols.iter().position(|symbol| *symbol == u16::from(*byte)).unwrap();
        let length = usize::from(LENGTHS[usize::from(*byte)]);
        let row = CODES.rows[length];
        let code = row.first + u32::try_from(place - row.begin).unwrap();
        bits.extend((0..length).rev().map(|at| code >> at & 1 == 1));
    }
    bits.resize(bits.len().next_multiple_of(8), true);
    for byte in bits.chunks(8) {
        out.push(byte.iter().fold(0, |byte, bit| byte << 1 | u8::from(*bit)));
    }
    out
}
