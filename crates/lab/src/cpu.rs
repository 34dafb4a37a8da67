//! CPU time and memory of a program and all its children, found by their session.

use std::fs;

/// Nanoseconds in one tick of `/proc/PID/stat`; USER_HZ is 100 on every architecture Linux has.
const TICK_NS: u64 = 10_000_000;

/// The fields of `/proc/PID/stat` used here (proc_pid_stat(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    session: u32,
    /// Own time, ended threads included.
    own_ticks: u64,
    /// Time of children that ended and were waited for.
    children_ticks: u64,
}

/// Returns the processes of session `session`.
#[must_use]
pub fn session_members(session: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| stat(*pid).is_some_and(|stat| stat.session == session))
        .collect()
}

/// Returns the CPU time of a session's processes, in nanoseconds. Live threads are exact (schedstat); ended threads
/// and children are counted in ticks of 10 ms.
#[must_use]
pub fn session_cpu_ns(session: u32) -> u64 {
    session_members(session).into_iter().map(process_cpu_ns).sum()
}

/// Returns the resident memory of a session's processes, in bytes (`Pss`: a page shared by n processes counts 1/n for
/// each).
#[must_use]
pub fn session_resident_bytes(session: u32) -> u64 {
    session_members(session).into_iter().filter_map(proportional_bytes).sum()
}

/// Returns the CPU time of one process, in nanoseconds; of one that has ended, 0.
#[must_use]
pub fn process_cpu_ns(pid: u32) -> u64 {
    let Some(stat) = stat(pid) else { return 0 };
    let living = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, |tasks| {
        tasks.filter_map(|task| thread_cpu_ns(&task.ok()?.path().join("schedstat"))).sum::<u64>()
    });
    living.max(stat.own_ticks * TICK_NS) + stat.children_ticks * TICK_NS
}

fn thread_cpu_ns(schedstat: &std::path::Path) -> Option<u64> {
    fs::read_to_string(schedstat).ok()?.split_whitespace().next()?.parse().ok()
}

fn stat(pid: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The command name may contain spaces and brackets; the fields start after its last ')'. `state` is the third.
    let fields: Vec<&str> = text.get(text.rfind(')')? + 1..)?.split_whitespace().collect();
    let number = |position: usize| fields.get(position - 3)?.parse::<u64>().ok();
    Some(Stat {
        session: u32::try_from(number(6)?).ok()?,
        own_ticks: number(14)? + number(15)?,
        children_ticks: number(16)? + number(17)?,
    })
}

fn proportional_bytes(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::{Stat, parse_stat};

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let text = "42 (a) b (c) S 1 42 7 0 -1 4194560 1 2 3 4 11 22 33 44 20 0 1 0 5";
        assert_eq!(parse_stat(text), Some(Stat { session: 7, own_ticks: 33, children_ticks: 77 }));
        assert_eq!(parse_stat("42 (short) S 1"), None);
    }
}
