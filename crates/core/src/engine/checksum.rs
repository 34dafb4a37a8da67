//! The Internet checksum: computed in full (RFC 1071), or from what changed (RFC 1624, equation 3).

/// A sum of 16-bit words in ones' complement, not yet folded.
///
/// It is built over bytes ([`Sum::bytes`]) or over changes ([`Sum::replace_u16`], [`Sum::replace_u32`]). Both kinds add
/// up, so the change of a whole packet is one `Sum`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum(u64);

impl Sum {
    /// The sum of nothing.
    pub const ZERO: Self = Self(0);

    /// Adds bytes. An odd last byte is padded with a zero, so only the last slice added may be odd.
    #[must_use]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        // Two 16-bit words at once: a carry out of the low half counts the same after folding (RFC 1071, 2(B)).
        let mut sum = self.0;
        let (words, rest) = bytes.as_chunks::<4>();
        for word in words {
            sum += u64::from(u32::from_be_bytes(*word));
        }
        let mut last = [0; 4];
        for (to, from) in last.iter_mut().zip(rest) {
            *to = *from;
        }
        Self(fold_once(sum + u64::from(u32::from_be_bytes(last))))
    }

    /// Adds one word.
    #[must_use]
    #[inline]
    pub const fn u16(self, word: u16) -> Self {
        Self(self.0 + word as u64)
    }

    /// Adds two words.
    #[must_use]
    #[inline]
    pub const fn u32(self, words: u32) -> Self {
        Self(self.0 + (words >> 16) as u64 + (words & 0xffff) as u64)
    }

    /// Adds the change of a word from `old` to `new`.
    #[must_use]
    #[inline]
    pub const fn replace_u16(self, old: u16, new: u16) -> Self {
        Self(self.0 + (!old) as u64 + new as u64)
    }

    /// Adds the change of two words.
    #[must_use]
    #[inline]
    pub const fn replace_u32(self, old: u32, new: u32) -> Self {
        self.u32(!old).u32(new)
    }

    /// Adds another sum.
    #[must_use]
    #[inline]
    pub const fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    /// Returns the sum as one word.
    #[inline]
    pub const fn folded(self) -> u16 {
        let sum = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        (sum & 0xffff) as u16
    }

    /// Returns the checksum field of data with this sum.
    #[inline]
    pub const fn checksum(self) -> u16 {
        !self.folded()
    }

    /// Returns the checksum field `old` after the changes in this sum.
    #[inline]
    pub const fn apply(self, old: u16) -> u16 {
        !Self(self.0 + (!old) as u64).folded()
    }
}

/// Keeps the sum small, so that adding many packets cannot overflow it.
#[inline]
const fn fold_once(sum: u64) -> u64 {
    (sum & 0xffff_ffff) + (sum >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slow(bytes: &[u8]) -> u16 {
        let mut sum = 0_u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn rfc_1071_example() {
        let sum = Sum::default().bytes(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.folded(), 0xddf2);
        assert_eq!(sum.checksum(), 0x220d);
    }

    #[test]
    fn rfc_1624_example() {
        // The case for which equation 2 of RFC 1141 gives the wrong zero.
        assert_eq!(Sum::default().replace_u16(0x5555, 0x3285).apply(0xdd2f), 0x0000);
    }

    proptest! {
        #[test]
        fn full_equals_word_by_word(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Sum::default().bytes(&bytes).checksum(), slow(&bytes));
        }

        #[test]
        fn incremental_equals_full(
            mut bytes in prop::collection::vec(any::<u8>(), 8..80),
            new in any::<u32>(),
            at in 0_usize..16,
        ) {
            // A first word that is not zero keeps the sum away from the one value with two spellings.
            bytes[0] = 1;
            let at = (4 + at * 2).min((bytes.len() - 4) & !1);
            let before = slow(&bytes);
            let old = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
            bytes[at..at + 4].copy_from_slice(&new.to_be_bytes());
            prop_assert_eq!(Sum::default().replace_u32(old, new).apply(before), slow(&bytes));
        }
    }
}
