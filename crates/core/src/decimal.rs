//! Decimal numbers without heap memory and without the formatting machinery, because heads and records of every
//! request contain some.

/// The digits of a number.
pub(crate) struct Digits {
    bytes: [u8; Self::MAX],
    start: usize,
}

impl Digits {
    /// The number of digits of `u64::MAX`.
    const MAX: usize = 20;

    /// Makes the digits of a number.
    pub(crate) fn of(number: u64) -> Self {
        let (mut bytes, mut start, mut rest) = ([b'0'; Self::MAX], Self::MAX, number);
        for place in bytes.iter_mut().rev() {
            *place = b'0' + u8::try_from(rest % 10).unwrap_or_default();
            (start, rest) = (start - 1, rest / 10);
            if rest == 0 {
                break;
            }
        }
        Self { bytes, start }
    }

    /// Returns the digits as text.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    /// Appends the digits to a text.
    pub(crate) fn push_to(&self, text: &mut String) {
        // Digits are always text; one piece is cheaper than a character at a time.
        text.push_str(str::from_utf8(self.as_bytes()).unwrap_or_default());
    }
}
