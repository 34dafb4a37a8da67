//! Maps and attachments that outlive this process: each has a name in a file system of type `bpf`.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use super::syscall::{Argument, Command};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn name(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Gives a map or an attachment this name.
///
/// # Errors
/// EPERM if the folder is on another file system; EEXIST if the name is taken; ENOENT if there is no such folder.
pub(super) fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let name = name(path)?;
    let mut argument = Argument::new().input(0, name.as_bytes_with_nul()).fd(8, fd.as_raw_fd());
    // SAFETY: the name ends with a NUL and is borrowed until here.
    unsafe { argument.perform(Command::Pin) }
}

/// Reads the first words of what the kernel says of a map or an attachment (`struct bpf_map_info`, `struct bpf_link_info`).
///
/// # Errors
/// What bpf(2) reports.
pub(super) fn info<const N: usize>(fd: BorrowedFd<'_>) -> io::Result<[u32; N]> {
    let mut bytes = vec![0; N * 4];
    let length = u32::try_from(bytes.len()).unwrap_or(0);
    let mut argument = Argument::new().fd(0, fd.as_raw_fd()).u32(4, length).output(8, &mut bytes);
    // SAFETY: the kernel writes at most as many bytes as are named, which the buffer has; it is borrowed until here.
    unsafe { argument.perform(Command::InfoByFd) }?;
    let mut words =
        bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    Ok(std::array::from_fn(|_| words.next().unwrap_or(0)))
}

/// Opens what has this name.
///
/// # Errors
/// ENOENT if nothing has it; EPERM without CAP_BPF.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    let name = name(path)?;
    let mut argument = Argument::new().input(0, name.as_bytes_with_nul());
    // SAFETY: the name ends with a NUL and is borrowed until here; the result is a descriptor.
    unsafe { argument.open(Command::OpenPinned) }
}
