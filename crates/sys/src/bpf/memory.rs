//! BPF arrays in memory that user space maps: programs and user space read and write the same words without
//! system calls.
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

use super::{Map, MapKind, MapShape};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// `BPF_F_MMAPABLE` (Linux 5.5).
const MAPPABLE: u32 = 1 << 10;

/// An array and its memory, which is unmapped when this is dropped.
pub(super) struct Shared {
    map: Map,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is only ever reached through atomics, and stays mapped as long as this lives.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("map", &self.map).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Shared {
    /// Creates an array of `entries` zeroed values, each a multiple of eight bytes.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub(super) fn new(name: &'static str, value_bytes: usize, entries: u32) -> io::Result<Self> {
        let shape = MapShape { kind: MapKind::Array, name, key_bytes: 4, value_bytes, entries_max: entries };
        Self::of(Map::create_with(shape, MAPPABLE)?)
    }

    /// Maps the memory of an array that can be mapped.
    ///
    /// # Errors
    /// ENOMEM; EPERM if it cannot.
    pub(super) fn of(map: Map) -> io::Result<Self> {
        let bytes = map.shape().value_bytes * map.shape().entries_max as usize;
        // SAFETY: a new mapping; no pointer into it exists yet. The kernel refuses a length beyond the array's.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_fd().as_raw_fd(),
                0,
            )
        };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        let start = start.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { map, start, bytes })
    }

    /// Returns its length in bytes.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the map.
    pub(super) const fn map(&self) -> &Map {
        &self.map
    }

    /// Returns the 32-bit word at this offset, a multiple of four.
    pub(super) fn u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.bytes, "a word outside of the array");
        // SAFETY: inside of the mapping, which begins at a page, and aligned; it lives as long as `self`. The kernel's side
        // reads and writes such a word as a whole.
        unsafe { AtomicU32::from_ptr(self.start.add(at).as_ptr().cast()) }
    }

    /// Returns the 64-bit word at this offset, a multiple of eight.
    pub(super) fn u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.bytes, "a word outside of the array");
        // SAFETY: as in `u32`.
        unsafe { AtomicU64::from_ptr(self.start.add(at).as_ptr().cast()) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `of`; no reference into it outlives `self`.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
