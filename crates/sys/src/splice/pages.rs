//! The pages of a memory file on their way into a pipe, and from there to a socket, without being copied.
//!
//! sendfile(2) looks every page of a memory file up by itself, which is a fifth of what sending them takes. A mapping knows
//! where they are: vmsplice(2) puts them into the pipe sixteen at a time.
#![allow(unsafe_code, reason = "works on memory that it shares with the kernel")]

use super::Pipe;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// A file in our memory, to be sent and not to be looked at. A send reads what is in the file at that moment: it is
/// for files whose bytes do not change any more. The pages stay in what was sent, whatever becomes of the mapping.
#[derive(Debug)]
pub struct Mapped {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is only ever named to the kernel, never read or written through `start`.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the first `bytes` of a file.
    ///
    /// # Errors
    /// As `mmap(2)`: no address space (ENOMEM), a file that cannot be mapped (ENODEV), nothing to map (EINVAL).
    pub fn new(file: &File, bytes: u64) -> io::Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        let start = start.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, bytes })
    }

    /// Puts the pages of these bytes into the pipe, as many as it has room for; gives how many bytes. What lies outside of the
    /// mapping is left out.
    ///
    /// # Errors
    /// `WouldBlock` where the pipe has no room; as `vmsplice(2)`, where the file has become shorter than it was (EFAULT).
    pub fn fill(&self, pipe: &mut Pipe, range: Range<u64>) -> io::Result<usize> {
        let within = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(self.bytes);
        let (first, end) = (within(range.start), within(range.end));
        if first >= end {
            return Ok(0);
        }
        // SAFETY: `first` is below the length of the mapping.
        let base = unsafe { self.start.add(first) };
        let piece = libc::iovec { iov_base: base.as_ptr().cast(), iov_len: end - first };
        loop {
            // SAFETY: the piece lies within the mapping, which lives as long as `self`; the kernel only reads there and holds
            // the pages themselves from then on.
            let moved = unsafe {
                libc::vmsplice(pipe.write.as_raw_fd(), &raw const piece, 1, libc::SPLICE_F_NONBLOCK)
            };
            match usize::try_from(moved) {
                Ok(moved) => {
                    pipe.queued_bytes += moved;
                    return Ok(moved);
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no reference into it is left.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::splice::{DEFAULT_PIPE_BYTES, splice_to};
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    fn memory(bytes: &[u8]) -> File {
        let mut file = File::from(memfd_create("pages", MemfdFlags::CLOEXEC).expect("memory"));
        file.write_all(bytes).expect("memory");
        file
    }

    /// What arrives over a connection when these bytes of the mapping are sent.
    fn sent(pages: &Mapped, mut range: Range<u64>) -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("loopback");
        let mut far = listener.accept().expect("loopback").0;
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            far.read_to_end(&mut got).map(|_| got)
        });
        let mut pipe = Pipe::new(DEFAULT_PIPE_BYTES).expect("a pipe");
        // Bounded: every round sends a byte at least.
        while pages.fill(&mut pipe, range.clone()).expect("pages") > 0 {
            while !pipe.is_empty() {
                range.start +=
                    splice_to(&mut pipe, &near, usize::MAX, false).expect("a socket that waits") as u64;
            }
        }
        drop(near);
        reader.join().expect("no panic").expect("all of it")
    }

    #[test]
    fn every_part_arrives_as_it_is() {
        let bytes: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
        let file = memory(&bytes);
        let pages = Mapped::new(&file, bytes.len() as u64).expect("mapped");
        for (first, end) in
            [(0, 300_000), (1, 4097), (4095, 4096), (70_001, 299_999), (299_999, 300_000), (9, 9)]
        {
            assert_eq!(sent(&pages, first as u64..end as u64), &bytes[first..end], "{first} to {end}");
        }
        assert_eq!(sent(&pages, 299_990..u64::MAX), &bytes[299_990..], "no more than there is");
    }

    #[test]
    fn pages_on_their_way_outlive_mapping_and_file() {
        let bytes = vec![7; 20_000];
        let file = memory(&bytes);
        let pages = Mapped::new(&file, 20_000).expect("mapped");
        let mut pipe = Pipe::new(DEFAULT_PIPE_BYTES).expect("a pipe");
        assert_eq!(pages.fill(&mut pipe, 0..20_000).expect("pages"), 20_000);
        drop((pages, file));
        let mut got = vec![0; 20_000];
        let mut end = File::from(pipe.read);
        end.read_exact(&mut got).expect("the pipe");
        assert_eq!(got, bytes);
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_and_a_full_pipe_waits() {
        let file = memory(&[1; 200_000]);
        let pages = Mapped::new(&file, 200_000).expect("mapped");
        let mut pipe = Pipe::new(DEFAULT_PIPE_BYTES).expect("a pipe");
        assert!(pages.fill(&mut pipe, 0..200_000).expect("pages") <= pipe.capacity_bytes());
        let full = pages.fill(&mut pipe, 0..200_000).expect_err("it is full");
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let mut pipe = Pipe::new(DEFAULT_PIPE_BYTES).expect("a pipe");
        file.set_len(0).expect("memory");
        assert!(pages.fill(&mut pipe, 100_000..200_000).is_err());
        assert!(Mapped::new(&file, 0).is_err(), "nothing to map");
    }
}
