//! Limits on numbers: descriptors, pipes, ports and connections.

use super::{Check, Facts};
use sidetrack_core::limit::Budget;
use sidetrack_core::pressure::NEVER;

/// Descriptors reserved for other uses than flows, roughly. `sidetrack up` prints the exact number of flows.
const RESERVE: u64 = 128;

/// Fewer flows than this are reported.
const FEW_FLOWS: u64 = 4_096;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    [
        Some(descriptors(facts)),
        memory(facts),
        pipes(facts),
        ports(facts),
        backlog(facts),
        conntrack_max(facts),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn descriptors(facts: &Facts) -> Check {
    let (soft, hard) = facts.nofile;
    // The soft limit is raised to the hard limit at the start.
    let flows = Budget::from_nofile(hard, RESERVE).flows().max;
    let found = format!("RLIMIT_NOFILE is {soft}, at most {hard}: about {flows} flows at a time");
    let needed_for = "two descriptors a flow; what is more is refused with the reason limit";
    if flows < FEW_FLOWS {
        let fix = "LimitNOFILE=1048576 in the systemd unit; a line '* hard nofile 1048576' in /etc/security/limits.conf";
        return Check::warn("descriptors", found).needed_for(needed_for).fix(fix);
    }
    Check::ok("descriptors", found).needed_for(needed_for)
}

/// A control group with less memory is reported: a node without flows needs about a third of it.
const MEMORY_MIN: u64 = 64 << 20;

fn memory(facts: &Facts) -> Option<Check> {
    let memory = facts.memory?;
    let (percent, mark) = (memory.percent(), facts.memory_percent);
    let found = format!("the control group allows {} MiB, {percent} % are used", memory.limit_bytes >> 20);
    let needed_for = format!("from {mark} % on (memory_percent of [limits]) new flows are refused");
    let fix = "MemoryMax= in the systemd unit, or the memory limit of the container";
    if mark < NEVER && percent >= u64::from(mark) {
        let found = format!("{found}: new flows are refused");
        return Some(Check::warn("memory", found).needed_for(needed_for).fix(fix));
    }
    if memory.limit_bytes < MEMORY_MIN {
        return Some(Check::warn("memory", found).needed_for(needed_for).fix(fix));
    }
    Some(Check::ok("memory", found).needed_for(needed_for))
}

/// Pages of 4 KiB in one of our pipes, which have 64 KiB.
const PAGES_PER_PIPE: u64 = 16;
/// Fewer pipes of that size than this are reported; an ordinary kernel grants more.
const PIPES_MIN: u64 = 256;

fn pipes(facts: &Facts) -> Option<Check> {
    let soft = facts.number("fs/pipe-user-pages-soft")?;
    let needed_for = "large flows are spliced through pipes, not copied";
    if soft == 0 || facts.sys_resource || facts.sys_admin {
        return Some(Check::ok("pipes", "no limit for this user").needed_for(needed_for));
    }
    let pipes = soft / PAGES_PER_PIPE;
    let found = format!("{pipes} pipes of 64 KiB for this user, then smaller ones");
    if pipes < PIPES_MIN {
        return Some(
            Check::warn("pipes", found).needed_for(needed_for).sets("fs/pipe-user-pages-soft", 16_384),
        );
    }
    Some(Check::ok("pipes", found).needed_for(needed_for))
}

fn ports(facts: &Facts) -> Option<Check> {
    let count = facts.local_ports()?;
    let found = format!("{count} local ports: at most {count} connections to one server at a time");
    let needed_for = "connections to the server";
    if count < 16_384 {
        let fix = "sysctl net.ipv4.ip_local_port_range='1024 65535'";
        return Some(Check::warn("local ports", found).needed_for(needed_for).fix(fix));
    }
    Some(Check::ok("local ports", found).needed_for(needed_for))
}

fn backlog(facts: &Facts) -> Option<Check> {
    let backlog = facts.number("net/core/somaxconn")?;
    let found = format!("{backlog} connections may wait to be accepted");
    let needed_for = "bursts of new connections";
    if backlog < 1_024 {
        return Some(Check::warn("backlog", found).needed_for(needed_for).sets("net/core/somaxconn", 4_096));
    }
    Some(Check::ok("backlog", found).needed_for(needed_for))
}

fn conntrack_max(facts: &Facts) -> Option<Check> {
    let max = facts.number("net/netfilter/nf_conntrack_max")?;
    let found = format!("{max} connections can be tracked");
    let needed_for = "redirected and forwarded connections; above it the kernel drops new ones";
    if max < 32_768 {
        let check = Check::warn("conntrack table", found).needed_for(needed_for);
        return Some(check.sets("net/netfilter/nf_conntrack_max", 262_144));
    }
    Some(Check::ok("conntrack table", found).needed_for(needed_for))
}
