//! Numbers made smaller: nothing else in the engine casts to a type that may not hold the value.

/// Returns the length of something that packets carry, which is also a distance of sequence numbers.
///
/// A packet has at most 64 KiB, and the outbox 1 MiB. What the engine holds or changes for one connection is bounded by
/// `Config::hold_bytes` and `Config::edit_bytes`, and its tables by `Config::max_connections`.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "all lengths of the engine are bounded far below 2^32")]
pub(super) const fn length(bytes: usize) -> u32 {
    bytes as u32
}

/// Returns the low half of a number: of a hash, a clock that wraps, or an address.
#[inline]
pub(super) const fn low_half(number: u64) -> u32 {
    (number & 0xffff_ffff) as u32
}
