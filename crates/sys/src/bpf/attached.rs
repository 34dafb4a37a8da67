//! Which programs are attached to an interface at its tcx hooks, ours and those of other programs.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;

use super::program::{Hook, TCX_EGRESS, TCX_INGRESS};
use super::syscall::{Argument, Command};

/// Most programs that the kernel attaches to one hook (`BPF_MPROG_MAX` in kernel/bpf/mprog.c).
const PROGRAMS_MAX: u32 = 64;

/// Returns the hook and the kernel's id of each program at the tcx hooks of the interface with this index, in this
/// thread's network namespace (`BPF_PROG_QUERY`).
///
/// # Errors
/// ENODEV if there is no such interface; EPERM without CAP_NET_ADMIN; EINVAL if the kernel has no tcx (before Linux 6.6).
pub fn attached(index: u32) -> io::Result<Vec<(Hook, u32)>> {
    let mut found = Vec::new();
    for (hook, kind) in [(Hook::TcxIngress, TCX_INGRESS), (Hook::TcxEgress, TCX_EGRESS)] {
        let mut ids = [0; PROGRAMS_MAX as usize * 4];
        let mut argument =
            Argument::new().u32(0, index).u32(4, kind).output(16, &mut ids).u32(24, PROGRAMS_MAX);
        // SAFETY: there is room for PROGRAMS_MAX ids of four bytes, borrowed until the call returns.
        unsafe { argument.perform(Command::ProgramQuery) }?;
        let count = argument.read_u32(24) as usize;
        let ids = ids.chunks_exact(4).take(count);
        found.extend(ids.map(|id| (hook, u32::from_ne_bytes([id[0], id[1], id[2], id[3]]))));
    }
    Ok(found)
}
