//! The system call bpf(2). Its argument is a union of structures, of which only the offsets are written here
//! (linux/bpf.h, `union bpf_attr`).
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{FromRawFd, OwnedFd};

/// Commands (`enum bpf_cmd`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Command {
    MapCreate = 0,
    MapLookup = 1,
    MapUpdate = 2,
    MapDelete = 3,
    ProgramLoad = 5,
    Pin = 6,
    OpenPinned = 7,
    ProgramTestRun = 10,
    InfoByFd = 15,
    ProgramQuery = 16,
    MapLookupAndDelete = 21,
    MapLookupBatch = 24,
    LinkCreate = 28,
    LinkUpdate = 29,
}

/// Bytes of an argument: enough for every field used here. The rest is zero, which older kernels require.
const SIZE: usize = 128;

/// An argument of bpf(2). It borrows the buffers that it points to.
#[repr(C, align(8))]
pub(super) struct Argument<'a> {
    bytes: [u8; SIZE],
    buffers: PhantomData<&'a mut [u8]>,
}

impl<'a> Argument<'a> {
    pub(super) const fn new() -> Self {
        Self { bytes: [0; SIZE], buffers: PhantomData }
    }

    fn put(mut self, at: usize, value: &[u8]) -> Self {
        self.bytes[at..at + value.len()].copy_from_slice(value);
        self
    }

    /// Sets the number at this offset.
    pub(super) fn u32(self, at: usize, value: u32) -> Self {
        self.put(at, &value.to_ne_bytes())
    }

    /// Sets the number at this offset.
    pub(super) fn u64(self, at: usize, value: u64) -> Self {
        self.put(at, &value.to_ne_bytes())
    }

    /// Sets the descriptor at this offset.
    pub(super) fn fd(self, at: usize, fd: impl std::os::fd::AsRawFd) -> Self {
        self.put(at, &fd.as_raw_fd().to_ne_bytes())
    }

    /// Sets the name at this offset, cut to 15 bytes.
    pub(super) fn name(self, at: usize, name: &str) -> Self {
        let length = name.len().min(15);
        self.put(at, &name.as_bytes()[..length])
    }

    /// Sets the address of bytes that the kernel reads.
    pub(super) fn input(self, at: usize, bytes: &'a [u8]) -> Self {
        self.u64(at, bytes.as_ptr() as u64)
    }

    /// Sets the address of bytes that the kernel writes.
    pub(super) fn output(self, at: usize, bytes: &'a mut [u8]) -> Self {
        self.u64(at, bytes.as_mut_ptr() as u64)
    }

    /// Returns the number at this offset, after the call.
    pub(super) fn read_u32(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.bytes[at..at + 4]);
        u32::from_ne_bytes(bytes)
    }

    /// Calls bpf(2).
    ///
    /// # Safety
    /// Every address in the argument points to a buffer as long as the kernel expects for this command.
    unsafe fn call(&mut self, command: Command) -> io::Result<i32> {
        // SAFETY: the argument is initialised and SIZE bytes long; its buffers are the caller's promise.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command as i32, self.bytes.as_mut_ptr(), SIZE) };
        match i32::try_from(result) {
            Ok(result) if result >= 0 => Ok(result),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Calls a command that returns nothing but success.
    ///
    /// # Safety
    /// As [`Argument::call`].
    pub(super) unsafe fn perform(&mut self, command: Command) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.call(command) }.map(drop)
    }

    /// Calls a command that returns a new descriptor.
    ///
    /// # Safety
    /// As [`Argument::call`], and the command is one whose result is a new descriptor.
    pub(super) unsafe fn open(&mut self, command: Command) -> io::Result<OwnedFd> {
        // SAFETY: the caller's promise.
        let fd = unsafe { self.call(command) }?;
        // SAFETY: the kernel has just made it for us (close-on-exec, as all of BPF), no other code has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
