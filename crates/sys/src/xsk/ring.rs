//! The rings of an AF_XDP socket. One side writes entries and moves the producer index, the other reads them
//! and moves the consumer index. Each index only grows, is written by one owner, and is published after the
//! entries it covers.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// A mapped ring.
#[derive(Debug)]
struct Ring<T> {
    mapping: NonNull<u8>,
    bytes: usize,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    entries: NonNull<T>,
    size: u32,
}

// SAFETY: it is one of the two owners of a shared ring, and moves as a whole; the other is the kernel.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T> Ring<T> {
    fn map(fd: &OwnedFd, offsets: &libc::xdp_ring_offset, page: u64, size: u32) -> io::Result<Self> {
        let bytes = offsets.desc as usize + size as usize * size_of::<T>();
        let page = libc::off_t::try_from(page).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping of the socket's own ring, wherever the kernel wants it.
        let at = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), bytes, protection, flags, fd.as_raw_fd(), page)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = NonNull::new(at.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel says where inside the mapping its parts are; they are aligned as their types want it.
        let part = |offset: u64| unsafe { mapping.add(offset as usize) };
        Ok(Self {
            producer: part(offsets.producer).cast(),
            consumer: part(offsets.consumer).cast(),
            flags: part(offsets.flags).cast(),
            entries: part(offsets.desc).cast(),
            mapping,
            bytes,
            size,
        })
    }

    fn index(part: NonNull<AtomicU32>) -> &'static AtomicU32 {
        // SAFETY: it lies in a mapping that lives as long as the ring, which no result of ours outlives: all callers are in
        // this file and use it at once.
        unsafe { part.as_ref() }
    }

    /// Returns the place of an entry.
    fn place(&self, index: u32) -> NonNull<T> {
        // SAFETY: the index is brought into the ring, which has `size` entries, a power of two.
        unsafe { self.entries.add((index & (self.size - 1)) as usize) }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nothing in it is used afterwards.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.bytes) };
    }
}

/// A ring whose entries we write.
#[derive(Debug)]
pub(super) struct Producer<T> {
    ring: Ring<T>,
    next: u32,
}

impl<T> Producer<T> {
    pub(super) fn map(
        fd: &OwnedFd,
        offsets: &libc::xdp_ring_offset,
        page: u64,
        size: u32,
    ) -> io::Result<Self> {
        Ok(Self { ring: Ring::map(fd, offsets, page, size)?, next: 0 })
    }

    /// Writes entries until the ring is full. Returns how many.
    pub(super) fn push(&mut self, entries: impl Iterator<Item = T>) -> usize {
        let taken = Ring::<T>::index(self.ring.consumer).load(Ordering::Acquire);
        let room = self.ring.size - self.next.wrapping_sub(taken);
        let mut count = 0;
        for entry in entries.take(room as usize) {
            // SAFETY: the place lies in the ring and is ours until the index below is published.
            unsafe { self.ring.place(self.next).write(entry) };
            self.next = self.next.wrapping_add(1);
            count += 1;
        }
        Ring::<T>::index(self.ring.producer).store(self.next, Ordering::Release);
        count
    }

    /// Returns the number of entries that the kernel has not taken yet.
    pub(super) fn waiting(&self) -> u32 {
        let taken = Ring::<T>::index(self.ring.consumer).load(Ordering::Acquire);
        self.next.wrapping_sub(taken).min(self.ring.size)
    }

    /// True if the kernel sleeps until it is woken.
    pub(super) fn wants_wakeup(&self) -> bool {
        Ring::<T>::index(self.ring.flags).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// A ring whose entries we read.
#[derive(Debug)]
pub(super) struct Consumer<T> {
    ring: Ring<T>,
    next: u32,
}

impl<T: Copy> Consumer<T> {
    pub(super) fn map(
        fd: &OwnedFd,
        offsets: &libc::xdp_ring_offset,
        page: u64,
        size: u32,
    ) -> io::Result<Self> {
        Ok(Self { ring: Ring::map(fd, offsets, page, size)?, next: 0 })
    }

    /// Returns the number of entries that were not read yet.
    pub(super) fn waiting(&self) -> u32 {
        let made = Ring::<T>::index(self.ring.producer).load(Ordering::Relaxed);
        made.wrapping_sub(self.next).min(self.ring.size)
    }

    /// Reads entries until the ring or `entries` is exhausted. Returns how many.
    pub(super) fn pop(&mut self, entries: &mut [T]) -> usize {
        let made = Ring::<T>::index(self.ring.producer).load(Ordering::Acquire);
        let waiting = made.wrapping_sub(self.next).min(self.ring.size) as usize;
        let count = waiting.min(entries.len());
        for entry in entries.iter_mut().take(count) {
            // SAFETY: the place lies in the ring, and the kernel has published what it holds.
            *entry = unsafe { self.ring.place(self.next).read() };
            self.next = self.next.wrapping_add(1);
        }
        if count > 0 {
            Ring::<T>::index(self.ring.consumer).store(self.next, Ordering::Release);
        }
        count
    }
}
