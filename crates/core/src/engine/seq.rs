//! Sequence numbers: 32 bits that wrap (RFC 9293, section 3.4).

use std::ops::{Add, Sub};

/// A TCP sequence or acknowledgement number.
///
/// Numbers are compared around the circle, so there is deliberately no `Ord`: [`Seq::before`] means nothing for numbers
/// half the circle apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seq(pub u32);

impl Seq {
    /// True if this number comes before `other`.
    #[inline]
    pub const fn before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }

    /// True if this number comes after `other`.
    #[inline]
    pub const fn after(self, other: Self) -> bool {
        other.before(self)
    }

    /// Returns the later of two numbers.
    #[must_use]
    #[inline]
    pub const fn max(self, other: Self) -> Self {
        if self.before(other) { other } else { self }
    }

    /// Returns the earlier of two numbers.
    #[must_use]
    #[inline]
    pub const fn min(self, other: Self) -> Self {
        if self.before(other) { self } else { other }
    }

    /// Returns the distance from `earlier` to this number; 0 if this number is not after it.
    #[inline]
    pub const fn since(self, earlier: Self) -> u32 {
        if self.before(earlier) { 0 } else { self.0.wrapping_sub(earlier.0) }
    }
}

impl Add<u32> for Seq {
    type Output = Self;

    #[inline]
    fn add(self, n: u32) -> Self {
        Self(self.0.wrapping_add(n))
    }
}

impl Sub<u32> for Seq {
    type Output = Self;

    #[inline]
    fn sub(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n))
    }
}

impl Sub for Seq {
    /// The distance, modulo 2^32.
    type Output = u32;

    #[inline]
    fn sub(self, other: Self) -> u32 {
        self.0.wrapping_sub(other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_goes_around_the_circle() {
        let end = Seq(u32::MAX);
        assert!(end.before(Seq(0)) && Seq(0).after(end) && !Seq(7).before(Seq(7)));
        assert_eq!((end + 2, Seq(1) - 2, Seq(1) - end), (Seq(1), end, 2));
        assert_eq!((Seq(1).since(end), end.since(Seq(1))), (2, 0));
        assert_eq!((end.max(Seq(3)), end.min(Seq(3))), (Seq(3), end));
    }
}
