//! Datagrams between two neighbours: they carry best-effort links, and hellos at the shorter interval.
//!
//! A datagram is a [`Header`] and one frame, sealed with an AEAD. The header is the associated data, and the sequence
//! is the nonce. Each control connection gives each direction a new key and a new link name, taken from its
//! handshake. So a datagram of an earlier control connection is never accepted on a later one.
//!
//! [`Window`] drops a datagram that arrives twice. A lost datagram is not retransmitted. A frame larger than a
//! datagram is cut into [`pieces`]. [`mtu`] finds the largest datagram that the path passes.

pub mod mtu;
pub mod pieces;

/// The first byte of every datagram: version 1 of this format.
pub const KIND: u8 = 1;

/// Bytes before the sealed frame: kind, link, sequence.
pub const HEADER_BYTES: usize = 13;

/// Bytes that sealing adds (AES-128-GCM, RFC 5116 Sec. 5.1).
pub const TAG_BYTES: usize = 16;

/// Bytes that a datagram adds to its frame.
pub const OVERHEAD_BYTES: usize = HEADER_BYTES + TAG_BYTES;

/// Most datagrams under one key. A node that has sent this number makes a new control connection.
pub const SEQUENCE_MAX: u64 = 1 << 48;

/// The part of a datagram before the sealed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Names this direction of the link since its latest control connection.
    pub link: u32,
    /// Rises by one with every datagram.
    pub sequence: u64,
}

impl Header {
    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [KIND; HEADER_BYTES];
        bytes[1..5].copy_from_slice(&self.link.to_be_bytes());
        bytes[5..].copy_from_slice(&self.sequence.to_be_bytes());
        bytes
    }

    /// Splits a datagram into its header and the sealed frame. `None` if it is not a datagram of this format.
    pub fn split(datagram: &[u8]) -> Option<(Self, &[u8])> {
        let (kind, rest) = datagram.split_first()?;
        let (link, rest) = rest.split_first_chunk::<4>()?;
        let (sequence, sealed) = rest.split_first_chunk::<8>()?;
        let header = Self { link: u32::from_be_bytes(*link), sequence: u64::from_be_bytes(*sequence) };
        let fits = *kind == KIND && header.sequence < SEQUENCE_MAX && sealed.len() > TAG_BYTES;
        fits.then_some((header, sealed))
    }
}

/// Words of 64 datagrams that a [`Window`] remembers.
const WORDS: usize = 64;

/// Remembers which datagrams have arrived (after RFC 6479). It covers the last 4,096 numbers, rounded to whole words
/// of 64.
#[derive(Clone, Debug)]
pub struct Window {
    bits: [u64; WORDS],
    newest: Option<u64>,
}

impl Default for Window {
    fn default() -> Self {
        Self { bits: [0; WORDS], newest: None }
    }
}

impl Window {
    /// Whether this number is new: not accepted before, and not older than the window.
    pub fn is_new(&self, sequence: u64) -> bool {
        let Some(newest) = self.newest else { return true };
        if sequence > newest {
            return true;
        }
        newest / 64 - sequence / 64 < WORDS as u64 && self.bits[slot(sequence)] >> (sequence % 64) & 1 == 0
    }

    /// Notes that a datagram with a valid seal arrived. Returns true if it is the newest so far.
    pub fn accept(&mut self, sequence: u64) -> bool {
        let is_newest = self.newest.is_none_or(|newest| sequence > newest);
        if is_newest {
            // The ring reuses the words between the old newest number and this one: clear them, or old bits would
            // count as arrivals.
            let before = self.newest.map_or(sequence / 64, |newest| newest / 64);
            let words = (sequence / 64 - before).min(WORDS as u64);
            for word in 0..words {
                self.bits[slot((sequence / 64 - word) * 64)] = 0;
            }
            self.newest = Some(sequence);
        }
        self.bits[slot(sequence)] |= 1 << (sequence % 64);
        is_newest
    }
}

fn slot(sequence: u64) -> usize {
    // Always less than WORDS.
    usize::try_from(sequence / 64 % WORDS as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_header_reads_as_it_is_written_and_what_is_cut_is_none() {
        let header = Header { link: 0x0102_0304, sequence: 0x0506_0708_090a };
        let mut bytes = header.to_bytes().to_vec();
        assert_eq!(bytes, [1, 1, 2, 3, 4, 0, 0, 5, 6, 7, 8, 9, 10]);
        bytes.extend([0xee; TAG_BYTES + 1]);
        assert_eq!(Header::split(&bytes), Some((header, &[0xee; TAG_BYTES + 1][..])));
        for length in 0..bytes.len() {
            assert_eq!(Header::split(&bytes[..length]), None, "{length} bytes");
        }
        bytes[0] = 2;
        assert_eq!(Header::split(&bytes), None, "another version");
        (bytes[0], bytes[5]) = (1, 1);
        assert_eq!(Header::split(&bytes), None, "a number that no key may have");
    }

    /// Compares the window with a set of all numbers.
    #[test]
    fn each_number_is_accepted_once_whatever_the_order() {
        let mut dice = 7_u64;
        let mut roll = move |n: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % n
        };
        let (mut window, mut seen, mut newest) = (Window::default(), BTreeSet::new(), 0_u64);
        for _ in 0..200_000 {
            let jump = if roll(1000) == 0 { roll(20_000) } else { roll(4) };
            let sequence = if roll(3) == 0 { newest.saturating_sub(roll(5000)) } else { newest + jump };
            let is_new = window.is_new(sequence);
            let remembers = newest / 64 - (sequence / 64).min(newest / 64) < 64;
            let expected = remembers && !seen.contains(&sequence);
            assert_eq!(is_new, expected, "{sequence} after {newest}");
            if is_new {
                assert_eq!(window.accept(sequence), seen.is_empty() || sequence > newest);
                seen.insert(sequence);
                newest = newest.max(sequence);
            }
        }
        assert!(seen.len() > 50_000);
        assert!(window.is_new(SEQUENCE_MAX - 1));
        window.accept(SEQUENCE_MAX - 1);
        assert!(!window.is_new(SEQUENCE_MAX - 1) && !window.is_new(newest));
    }
}
