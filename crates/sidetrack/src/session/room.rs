//! How many bytes all flows of the process buffer together because a receiver does not take them. Beyond a bound each
//! direction buffers little more, so that many receivers that stop at once cannot use up the memory.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Most bytes that a direction buffers while memory is tight. They still fill a segment.
const TIGHT_BYTES: u32 = 1_400;

/// Bytes in the buffers of all directions.
static HELD: AtomicUsize = AtomicUsize::new(0);
/// From here on memory is tight.
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);
/// Memory is short for another reason.
static IS_SHORT: AtomicBool = AtomicBool::new(false);

/// Sets how many bytes all flows may buffer together, and whether memory is short.
pub fn set(most: usize, is_short: bool) {
    MOST.store(most, Relaxed);
    IS_SHORT.store(is_short, Relaxed);
}

/// Returns the bytes in all buffers.
pub fn held() -> usize {
    HELD.load(Relaxed)
}

/// Returns how many bytes a direction may buffer that has this limit otherwise.
pub(super) fn limit(otherwise: u32) -> u32 {
    let is_tight = IS_SHORT.load(Relaxed) || HELD.load(Relaxed) > MOST.load(Relaxed);
    if is_tight { otherwise.min(TIGHT_BYTES) } else { otherwise }
}

/// Counts the bytes of a buffer.
pub(super) fn take(bytes: usize) {
    HELD.fetch_add(bytes, Relaxed);
}

/// Takes back the bytes of a buffer that is gone.
pub(super) fn give_back(bytes: usize) {
    HELD.fetch_sub(bytes, Relaxed);
}
