//! CRC32c (RFC 9260 Appendix A): polynomial 0x1EDC6F41, reflected. A table and a loop are fast enough for one header
//! per connection, so this needs no crate.

use std::ops::Range;

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    /// The polynomial with its bits reversed.
    const POLYNOMIAL: u32 = 0x1edc_6f41_u32.reverse_bits();
    let mut table = [0; 256];
    let mut index: u32 = 0;
    while index < 256 {
        let mut value = index;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ POLYNOMIAL } else { value >> 1 };
            bit += 1;
        }
        table[index as usize] = value;
        index += 1;
    }
    table
}

/// Returns the checksum of `bytes`.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    checksum_without(bytes, 0..0)
}

/// Returns the checksum of `bytes`, as if the bytes at `zeroed` were 0.
pub(super) fn checksum_without(bytes: &[u8], zeroed: Range<usize>) -> u32 {
    let step = |sum: u32, (index, byte): (usize, &u8)| {
        let byte = if zeroed.contains(&index) { 0 } else { *byte };
        // The index has 8 bits, and the table has 256 entries.
        TABLE[usize::from(sum.to_le_bytes()[0] ^ byte)] ^ sum >> 8
    };
    !bytes.iter().enumerate().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_checksums() {
        // From RFC 3720 Appendix B.4, and the usual check value.
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
        assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
        assert_eq!(checksum(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(checksum(&rising), 0x46dd_794e);
        assert_eq!(checksum_without(&[0xff; 32], 0..32), 0x8a91_36aa);
    }
}
