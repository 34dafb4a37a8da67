//! How the kernel schedules a thread (sched(7)).
#![allow(unsafe_code)]

use std::io;

/// Puts the calling thread, and no other, before every ordinary one: SCHED_FIFO with `priority`, 1 to 99. Threads and
/// processes it starts do not inherit that. Needs CAP_SYS_NICE.
///
/// # Errors
/// `InvalidInput` if the priority is none; `PermissionDenied`, also where the cgroup has no real-time share.
pub fn become_real_time(priority: u8) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: priority.into() };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: 0 names the calling thread; the kernel reads `parameter`, which lives across the call.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_priority_out_of_range_is_refused() {
        let error = std::thread::spawn(|| super::become_real_time(0)).join().expect("no panic");
        assert_eq!(error.map_err(|error| error.kind()), Err(std::io::ErrorKind::InvalidInput));
    }
}
