//! Waits until programs in the kernel have seen a change of their maps.
#![allow(unsafe_code, reason = "makes a system call that no kept crate wraps safely")]

use std::io;

/// `MEMBARRIER_CMD_GLOBAL` (linux/membarrier.h): waits for a grace period of RCU.
const GLOBAL: libc::c_int = 1;

/// Waits until every BPF program of tc and XDP that runs at the time of this call has ended. It takes some milliseconds. Packets
/// that come meanwhile are not delayed.
///
/// # Errors
/// EINVAL if the kernel has processors without a timer tick (`nohz_full`); ENOSYS.
pub(crate) fn wait_for_programs() -> io::Result<()> {
    // SAFETY: the call takes no pointer.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_waited_for() {
        super::wait_for_programs().unwrap();
    }
}
