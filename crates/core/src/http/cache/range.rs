//! Byte ranges (RFC 9110 Sec. 14).

/// Most ranges of one request. A request with more gets the whole representation (RFC 9110 Sec. 14.2).
const MAX_RANGES: usize = 16;

/// One range of a Range field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteRange {
    /// From one position to another, or to the end.
    From {
        /// First byte.
        first: u64,
        /// Last byte, inclusive. `None` is the end.
        last: Option<u64>,
    },
    /// This number of bytes at the end.
    Suffix(u64),
}

impl ByteRange {
    /// Returns the first and last byte in a representation of `total` bytes. `None` if the range contains none of
    /// them.
    pub fn resolve(self, total: u64) -> Option<(u64, u64)> {
        let end = total.checked_sub(1)?;
        match self {
            Self::From { first, last } if first <= end => Some((first, last.unwrap_or(end).min(end))),
            Self::Suffix(count @ 1..) => Some((total.saturating_sub(count), end)),
            _ => None,
        }
    }
}

/// The ranges of a Range field in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges(pub Vec<ByteRange>);

impl Ranges {
    /// Reads a Range field. `None` for another unit, invalid syntax or too many ranges: the field is then ignored.
    pub fn parse(field: &[u8]) -> Option<Self> {
        let (unit, set) = field.split_at(field.iter().position(|byte| *byte == b'=')?);
        if !unit.eq_ignore_ascii_case(b"bytes") {
            return None;
        }
        let mut ranges = Vec::new();
        for member in set.get(1..)?.split(|byte| *byte == b',').map(super::super::fields::trim) {
            if member.is_empty() {
                continue;
            }
            let dash = member.iter().position(|byte| *byte == b'-')?;
            let (first, last) = (member.get(..dash)?, member.get(dash + 1..)?);
            let range = match (first, last) {
                ([], []) => return None,
                ([], count) => ByteRange::Suffix(number(count)?),
                (first, []) => ByteRange::From { first: number(first)?, last: None },
                (first, last) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if last < first {
                        return None;
                    }
                    ByteRange::From { first, last: Some(last) }
                }
            };
            ranges.push(range);
        }
        (1..=MAX_RANGES).contains(&ranges.len()).then_some(Self(ranges))
    }

    /// Returns the first and last bytes of the ranges in a representation of `total` bytes, in the order of the
    /// request. Ranges that overlap or touch are merged. Empty: the request cannot be satisfied.
    pub fn resolve(&self, total: u64) -> Vec<(u64, u64)> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        for (first, last) in self.0.iter().filter_map(|range| range.resolve(total)) {
            let touches =
                |other: &(u64, u64)| first <= other.1.saturating_add(1) && other.0 <= last.saturating_add(1);
            match found.iter_mut().find(|other| touches(other)) {
                Some(other) => *other = (other.0.min(first), other.1.max(last)),
                None => found.push((first, last)),
            }
        }
        found
    }
}

/// The range of a 206 (RFC 9110 Sec. 14.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRange {
    /// First byte.
    pub first: u64,
    /// Last byte, inclusive.
    pub last: u64,
    /// Length of the whole representation, if it is known.
    pub total: Option<u64>,
}

impl ContentRange {
    /// Reads a Content-Range field. `None` for another unit, invalid syntax or an unsatisfied range.
    pub fn parse(field: &[u8]) -> Option<Self> {
        let (unit, rest) = field.split_at(field.iter().position(|byte| *byte == b' ')?);
        let rest = rest.get(1..)?;
        let (range, total) = rest.split_at(rest.iter().position(|byte| *byte == b'/')?);
        let (first, last) = range.split_at(range.iter().position(|byte| *byte == b'-')?);
        let (first, last) = (number(first)?, number(last.get(1..)?)?);
        let total = match total.get(1..)? {
            b"*" => None,
            digits => Some(number(digits)?),
        };
        let good =
            unit.eq_ignore_ascii_case(b"bytes") && first <= last && total.is_none_or(|total| last < total);
        good.then_some(Self { first, last, total })
    }

    /// Returns the number of bytes.
    pub const fn length(&self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }

    /// Whether it is the whole representation.
    pub fn is_whole(&self) -> bool {
        self.first == 0 && self.total == Some(self.length())
    }
}

impl std::fmt::Display for ContentRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "bytes {}-{}/", self.first, self.last)?;
        match self.total {
            Some(total) => write!(f, "{total}"),
            None => f.write_str("*"),
        }
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    let good = (1..=18).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits).ok().filter(|_| good)?.parse().ok()
}
