//! TCP options: those of a SYN (RFC 9293, RFC 7323, RFC 2018), and the two that every segment may carry: time stamps and
//! SACK blocks.

use super::packet::{Malformed, u8_at, u32_at};

const END: u8 = 0;
const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;

/// Largest window shift (RFC 7323, section 2.3).
pub const MAX_WINDOW_SHIFT: u8 = 14;

/// What the options of a SYN or SYN-ACK offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Offer {
    /// Largest payload that the sender accepts, bytes. If absent: 536 (IPv4) or 1220 (IPv6).
    pub mss: Option<u16>,
    /// Shift of the sender's windows, 0 to 14.
    pub window_scale: Option<u8>,
    /// The sender understands SACK.
    pub sack: bool,
    /// The sender's time stamp clock (TSval), and the stamp that it echoes (TSecr).
    pub timestamps: Option<(u32, u32)>,
}

/// One option of a segment: its kind, and the place of its value after kind and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    kind: u8,
    start: usize,
    len: usize,
}

/// Returns the next option from `at` on and the offset after it; none at the end.
fn next(options: &[u8], mut at: usize) -> Result<Option<(Place, usize)>, Malformed> {
    loop {
        match options.get(at) {
            None | Some(&END) => return Ok(None),
            Some(&NOP) => at += 1,
            Some(&kind) => {
                let length = usize::from(u8_at(options, at + 1));
                if length < 2 || at + length > options.len() {
                    return Err(Malformed::Option);
                }
                return Ok(Some((Place { kind, start: at + 2, len: length - 2 }, at + length)));
            }
        }
    }
}

impl Offer {
    /// Reads the options of a SYN or SYN-ACK. Unknown options are skipped.
    ///
    /// # Errors
    /// [`Malformed::Option`] if an option runs past the end.
    // The short case is inlined and returned field by field, for the same reason as [`super::packet::Ip::parse`].
    #[inline(always)]
    pub fn parse(options: &[u8]) -> Result<Self, Malformed> {
        if options.is_empty() {
            return Ok(Self::default());
        }
        let Self { mss, window_scale, sack, timestamps } = Self::parse_all(options)?;
        Ok(Self { mss, window_scale, sack, timestamps })
    }

    #[inline(never)]
    fn parse_all(options: &[u8]) -> Result<Self, Malformed> {
        let mut offer = Self::default();
        let mut at = 0;
        while let Some((place, after)) = next(options, at)? {
            let field = options.get(place.start..place.start + place.len).unwrap_or_default();
            match (place.kind, field) {
                // Some senders announce 0. Below 64 nothing useful fits, and a peer could make us send tiny segments.
                (MSS, [high, low]) => offer.mss = Some(u16::from_be_bytes([*high, *low]).max(64)),
                (WINDOW_SCALE, [shift]) => offer.window_scale = Some((*shift).min(MAX_WINDOW_SHIFT)),
                (SACK_PERMITTED, []) => offer.sack = true,
                (TIMESTAMPS, [..]) if place.len == 8 => {
                    offer.timestamps = Some((u32_at(field, 0), u32_at(field, 4)));
                }
                _ => {}
            }
            at = after;
        }
        Ok(offer)
    }

    /// Writes the options for a SYN or SYN-ACK, in the order Linux uses, padded to 4 bytes.
    pub fn write(&self) -> Written {
        let mut out = Written::default();
        self.write_into(&mut out);
        out
    }

    /// Appends the options to `out`, as [`Offer::write`] writes them.
    #[inline]
    pub fn write_into(&self, out: &mut Written) {
        if let Some(mss) = self.mss {
            out.push(u32::from_be_bytes([MSS, 4, 0, 0]) | u32::from(mss));
        }
        if let Some((value, echo)) = self.timestamps {
            let [first, second] = if self.sack { [SACK_PERMITTED, 2] } else { [NOP, NOP] };
            out.push(u32::from_be_bytes([first, second, TIMESTAMPS, 10]));
            out.push(value);
            out.push(echo);
        } else if self.sack {
            out.push(u32::from_be_bytes([NOP, NOP, SACK_PERMITTED, 2]));
        }
        if let Some(shift) = self.window_scale {
            out.push(u32::from_be_bytes([NOP, WINDOW_SCALE, 3, shift]));
        }
    }
}

/// Options ready for a header: at most 40 bytes, always a multiple of 4.
///
/// They are stored as words and never copied as bytes. A wide read of bytes that were just written in small parts stalls
/// the processor longer than it takes to compute them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    words: [u32; 10],
    len: usize,
}

impl Written {
    /// Returns two NOPs and a time stamp option, as in every segment of a connection with time stamps.
    pub fn timestamps(value: u32, echo: u32) -> Self {
        let mut out = Self::default();
        out.add_timestamps(value, echo);
        out
    }

    /// Appends what [`Written::timestamps`] returns.
    #[inline]
    pub fn add_timestamps(&mut self, value: u32, echo: u32) {
        self.push(u32::from_be_bytes([NOP, NOP, TIMESTAMPS, 10]));
        self.push(value);
        self.push(echo);
    }

    /// Appends four bytes, most significant first.
    #[inline]
    fn push(&mut self, word: u32) {
        if let Some(to) = self.words.get_mut(self.len) {
            *to = word;
            self.len += 1;
        }
    }

    /// Returns the words: four bytes each, most significant first.
    #[inline]
    pub fn words(&self) -> &[u32] {
        self.words.get(..self.len).unwrap_or_default()
    }

    /// Returns the bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.words().iter().flat_map(|word| word.to_be_bytes()).collect()
    }
}

impl From<&[u8]> for Written {
    /// Copies options as they appear in a header.
    fn from(options: &[u8]) -> Self {
        let mut out = Self::default();
        for word in options.as_chunks::<4>().0 {
            out.push(u32::from_be_bytes(*word));
        }
        out
    }
}

/// Where the options are that the engine translates, as offsets into the options of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Located {
    /// TSval; TSecr follows 4 bytes later.
    pub timestamps: Option<usize>,
    /// The first edge of the first SACK block, and the number of blocks.
    pub sack: Option<(usize, usize)>,
}

impl Located {
    /// Finds the options.
    ///
    /// # Errors
    /// [`Malformed::Option`] if an option runs past the end, or if a SACK option does not hold whole blocks.
    #[inline(always)]
    pub fn parse(options: &[u8]) -> Result<Self, Malformed> {
        if options.is_empty() {
            return Ok(Self::default());
        }
        // The form of nearly every segment with time stamps (RFC 7323, appendix A).
        if options.len() == 12 && u32_at(options, 0) == 0x0101_080a {
            return Ok(Self { timestamps: Some(4), sack: None });
        }
        let Self { timestamps, sack } = Self::parse_all(options)?;
        Ok(Self { timestamps, sack })
    }

    #[inline(never)]
    fn parse_all(options: &[u8]) -> Result<Self, Malformed> {
        let mut located = Self::default();
        let mut at = 0;
        while let Some((place, after)) = next(options, at)? {
            match place.kind {
                TIMESTAMPS if place.len == 8 => located.timestamps = Some(place.start),
                SACK if place.len % 8 != 0 => return Err(Malformed::Option),
                SACK => located.sack = Some((place.start, place.len / 8)),
                _ => {}
            }
            at = after;
        }
        Ok(located)
    }
}

/// Overwrites the option whose value begins at `start`, with its kind and length, with NOPs.
pub(super) fn blank(options: &mut [u8], start: usize, len: usize) {
    if let Some(place) = options.get_mut(start.saturating_sub(2)..start + len) {
        place.fill(NOP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_linux_syn() {
        // 02 04 05b4 | 04 02 | 08 0a TSval TSecr | 01 | 03 03 07
        let bytes = [2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 9, 0, 0, 0, 7, 1, 3, 3, 7];
        let offer = Offer { mss: Some(1460), window_scale: Some(7), sack: true, timestamps: Some((9, 7)) };
        assert_eq!(Offer::parse(&bytes), Ok(offer));
        assert_eq!(offer.write().to_bytes(), bytes);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for bad in [&[2_u8, 0][..], &[2, 1, 0, 0], &[8, 11, 0, 0], &[5], &[3, 255, 1]] {
            assert_eq!(Offer::parse(bad), Err(Malformed::Option), "{bad:?}");
            assert_eq!(Located::parse(bad), Err(Malformed::Option), "{bad:?}");
        }
        assert_eq!(Located::parse(&[5, 6, 0, 0, 0, 0]), Err(Malformed::Option), "half a SACK block");
        assert_eq!(Offer::parse(&[3, 3, 200]).unwrap().window_scale, Some(14), "RFC 7323: 14 is used");
    }

    #[test]
    fn sack_blocks_and_time_stamps_are_found() {
        let mut bytes = vec![1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 1, 1, 5, 18];
        bytes.extend([0; 16]);
        assert_eq!(Located::parse(&bytes), Ok(Located { timestamps: Some(4), sack: Some((16, 2)) }));
        blank(&mut bytes, 16, 16);
        assert_eq!(Located::parse(&bytes), Ok(Located { timestamps: Some(4), sack: None }));
        assert_eq!(Located::parse(&bytes[..12]).unwrap().timestamps, Some(4));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..41)) {
            let _ = Offer::parse(&bytes);
            let _ = Located::parse(&bytes);
        }

        #[test]
        fn what_is_written_is_read(
            mss in prop::option::of(64_u16..), shift in prop::option::of(0_u8..15),
            sack in any::<bool>(), timestamps in prop::option::of(any::<(u32, u32)>()),
        ) {
            let offer = Offer { mss, window_scale: shift, sack, timestamps };
            let written = offer.write();
            prop_assert_eq!(Written::from(&written.to_bytes()[..]), written);
            prop_assert_eq!(Offer::parse(&written.to_bytes()), Ok(offer));
        }
    }
}
