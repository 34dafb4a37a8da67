//! How the kernel schedules a thread (sched(7)).
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::time::Duration;

/// Puts the calling thread, and no other, before every ordinary one: SCHED_FIFO with `priority`, 1 to 99. Threads and
/// processes it starts do not inherit that. Needs CAP_SYS_NICE.
///
/// # Errors
/// `InvalidInput` if the priority is none; `PermissionDenied`, also where the cgroup has no real-time share.
pub fn become_real_time(priority: u8) -> io::Result<()> {
    schedule(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, priority.into())
}

/// Puts the calling thread, and no other, behind every ordinary one (SCHED_IDLE): it gets the time that no other thread wants,
/// and is interrupted at once when another does. Needs no capability; without CAP_SYS_NICE there is no way back.
///
/// # Errors
/// Those of sched_setscheduler(2).
pub fn become_idle() -> io::Result<()> {
    schedule(libc::SCHED_IDLE, 0)
}

/// Lets other ordinary threads finish before the calling thread, and no other, when it wakes (SCHED_BATCH). It gets an ordinary
/// share of the processor. Needs no capability.
///
/// # Errors
/// Those of sched_setscheduler(2).
pub fn become_batch() -> io::Result<()> {
    schedule(libc::SCHED_BATCH, 0)
}

/// Sets the policy of the calling thread. The function of this name in musl always fails, so the call is made directly.
fn schedule(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    // SAFETY: 0 names the calling thread; the kernel reads one number, its sched_param, which lives across the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The processor time that the calling thread has used so far (CLOCK_THREAD_CPUTIME_ID): what a piece of work costs, however often
/// the thread had to wait for others meanwhile.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes `time`, which lives across the call. The clock of the calling thread is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_time_of_a_thread_goes_on_while_it_works_alone() {
        let before = super::thread_cpu_time();
        let mut rounds = 0_u64;
        while super::thread_cpu_time() == before && rounds < u64::from(u32::MAX) {
            rounds += 1;
        }
        assert!(super::thread_cpu_time() > before);
        let fresh = std::thread::spawn(super::thread_cpu_time).join().expect("no panic");
        assert!(fresh < std::time::Duration::from_secs(10), "a new thread has used hardly any");
    }

    #[test]
    fn a_thread_becomes_idle_and_works_on() {
        let policy = std::thread::spawn(|| {
            super::become_idle().expect("needs no right");
            let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("readable");
            let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
            fields.nth(38).map(str::to_owned)
        });
        assert_eq!(policy.join().expect("no panic").as_deref(), Some("5"), "SCHED_IDLE");
    }

    #[test]
    fn a_priority_out_of_range_is_refused() {
        let error = std::thread::spawn(|| super::become_real_time(0)).join().expect("no panic");
        assert_eq!(error.map_err(|error| error.kind()), Err(std::io::ErrorKind::InvalidInput));
    }
}
