//! Memory that the kernel provides page by page when it is first used. An allocator may give out memory that was used before, and
//! has to clear all of it, so that all of it is resident.
#![allow(unsafe_code, reason = "maps memory")]

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

/// Bytes of our own, all zero at the start.
#[derive(Debug)]
pub(super) struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone, as that of a boxed slice.
unsafe impl Send for Pages {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Pages {}

impl Pages {
    /// Reserves this many bytes, at least 1.
    ///
    /// # Panics
    /// The process has no address space left, as when an allocation fails.
    pub(super) fn new(bytes: usize) -> Self {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at a place that the kernel chooses touches no memory that is in use.
        let start = unsafe { mmap_anonymous(null_mut(), bytes, access, flags) };
        let start = start.ok().and_then(|start| NonNull::new(start.cast()));
        Self { start: start.expect("address space for a batch of datagrams"), bytes }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has this length, is initialised with zeros, and lives as long as this value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the value is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, of this length, and nothing borrows it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the mapping that are resident, of `/proc/self/smaps`.
    fn resident_bytes(pages: &Pages) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let first = pages.start.as_ptr() as usize;
        let mut of = false;
        let mut sum = 0;
        for line in smaps.lines() {
            if let Some((range, _)) = line.split_once(' ')
                && let Some((from, to)) = range.split_once('-')
                && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
            {
                // The kernel may have joined neighbouring mappings into one.
                of = from <= first && first < to;
            } else if of && let Some(rest) = line.strip_prefix("Private_Dirty:") {
                sum += rest.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024;
            }
        }
        sum
    }

    #[test]
    fn only_what_is_used_is_resident() {
        let mut pages = Pages::new(2 << 20);
        let before = resident_bytes(&pages);
        assert_eq!(pages.len(), 2 << 20);
        pages[0] = 1;
        pages[1 << 20] = 2;
        assert_eq!((pages[0], pages[1], pages[1 << 20]), (1, 0, 2));
        let grown = resident_bytes(&pages).saturating_sub(before);
        assert!(grown < 1 << 20, "{grown} bytes for two pages");
    }
}
