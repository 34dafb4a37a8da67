//! Settings of UDP.

use super::{Check, Facts};

/// Room for datagrams that one socket of a listener asks for, bytes.
const BUFFER_BYTES: u64 = 4 << 20;

/// Descriptors of one flow of TCP. Associations may use half of all descriptors.
const HALF: u64 = 2;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let buffers = [("receive", "net/core/rmem_max"), ("send", "net/core/wmem_max")];
    let buffers = buffers.into_iter().filter_map(|(word, setting)| buffer(facts, word, setting));
    buffers.chain(ports(facts)).collect()
}

fn buffer(facts: &Facts, word: &str, setting: &'static str) -> Option<Check> {
    let most = facts.number(setting)?;
    let found = format!("sockets may have {most} bytes");
    let needed_for = "bursts of UDP and QUIC; what finds no room is lost";
    let name = format!("UDP {word} buffer");
    Some(if most < BUFFER_BYTES {
        Check::warn(name, found).needed_for(needed_for).sets(setting, BUFFER_BYTES)
    } else {
        Check::ok(name, found).needed_for(needed_for)
    })
}

/// Each client of UDP has a port of its own towards the servers (RFC 4787 REQ-1).
fn ports(facts: &Facts) -> Option<Check> {
    let ports = facts.local_ports()?;
    let (_, hard) = facts.nofile;
    let associations = hard / HALF;
    let found =
        format!("{ports} local ports; the limit on files allows {associations} clients of UDP at a time");
    let check = Check::ok("UDP ports", found).needed_for("one port for each client of UDP, to all servers");
    let fix = "more than that: sysctl net.ipv4.ip_local_port_range='1024 65535'";
    Some(if ports < associations { check.fix(fix) } else { check })
}
