//! Settings of TCP and IP.

use super::{Check, Facts};

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    [
        Some(accounting(facts)),
        congestion(facts),
        fast_open(facts),
        Some(multipath(facts)),
        Some(ipv6(facts)),
        forwarding(facts),
        Some(reverse_path(facts)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn accounting(facts: &Facts) -> Check {
    let needed_for = "records of flows that the kernel carries, with their bytes";
    let name = "conntrack accounting";
    let values = ["acct", "events"]
        .map(|what| facts.setting(&format!("net/netfilter/nf_conntrack_{what}")).unwrap_or(""));
    match values {
        ["", _] | [_, ""] => Check::warn(name, "this kernel has no conntrack, or it is not loaded")
            .needed_for(needed_for)
            .fix("modprobe nf_conntrack nf_conntrack_netlink"),
        ["1", "1"] => Check::ok(name, "on").needed_for(needed_for),
        _ => Check::ok(name, "off; Sidetrack switches it on while it needs it").needed_for(needed_for),
    }
}

fn congestion(facts: &Facts) -> Option<Check> {
    let used = facts.setting("net/ipv4/tcp_congestion_control")?;
    let there = facts.setting("net/ipv4/tcp_available_congestion_control").unwrap_or(used);
    let needed_for = "throughput over long or lossy paths";
    let found = format!("{used} is used; there are {there}");
    let has_bbr = there.split(' ').any(|one| one == "bbr");
    let check = Check::ok("congestion control", found).needed_for(needed_for);
    Some(if has_bbr { check } else { check.fix("for bbr: modprobe tcp_bbr") })
}

fn fast_open(facts: &Facts) -> Option<Check> {
    let bits = facts.number("net/ipv4/tcp_fastopen")?;
    let needed_for = "one round trip less: hops with ?tfo=true (client), our listeners (server)";
    let found = match bits & 3 {
        3 => return Some(Check::ok("TCP Fast Open", "on for clients and servers").needed_for(needed_for)),
        1 => "on for clients, off for servers",
        2 => "on for servers, off for clients",
        _ => "off",
    };
    Some(Check::warn("TCP Fast Open", found).needed_for(needed_for).sets("net/ipv4/tcp_fastopen", 3))
}

fn multipath(facts: &Facts) -> Check {
    let needed_for = "hops with ?mptcp=true, rules with mptcp = true; without it they use plain TCP";
    if facts.mptcp {
        return Check::ok("Multipath TCP", "sockets can be made").needed_for(needed_for);
    }
    Check::warn("Multipath TCP", "no sockets can be made")
        .needed_for(needed_for)
        .fix("sysctl net.mptcp.enabled=1, or a kernel with CONFIG_MPTCP")
}

fn ipv6(facts: &Facts) -> Check {
    let needed_for = "catching and carrying IPv6; without it those connections fail, and none leaks";
    if facts.ipv6 {
        return Check::ok("IPv6", "sockets can be made").needed_for(needed_for);
    }
    Check::warn("IPv6", "switched off on this host")
        .needed_for(needed_for)
        .fix("sysctl net.ipv6.conf.all.disable_ipv6=0 net.ipv6.conf.default.disable_ipv6=0 net.ipv6.conf.lo.disable_ipv6=0")
}

fn forwarding(facts: &Facts) -> Option<Check> {
    let v4 = facts.number("net/ipv4/ip_forward")? != 0;
    let v6 = facts.number("net/ipv6/conf/all/forwarding").is_some_and(|value| value != 0);
    let needed_for = "tproxy and redirect of other hosts' traffic, on a router";
    let found = match (v4, v6) {
        (true, true) => return Some(Check::ok("forwarding", "IPv4 and IPv6").needed_for(needed_for)),
        (true, false) => "IPv4 only",
        (false, true) => "IPv6 only",
        (false, false) => "off: this host is not a router",
    };
    let fix = "on a router: sysctl net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1";
    Some(Check::warn("forwarding", found).needed_for(needed_for).fix(fix))
}

/// Strict reverse path filtering (RFC 3704 Sec. 2.2) drops a packet for an address that the routing table expects
/// elsewhere, such as an answer to a foreign-bound socket. The greater of `all` and the interface's own value applies.
fn reverse_path(facts: &Facts) -> Check {
    const STRICT: u8 = 1;
    let all = facts.number("net/ipv4/conf/all/rp_filter").unwrap_or(0);
    let all = u8::try_from(all).unwrap_or(u8::MAX);
    let strict: Vec<_> = facts
        .rp_filter
        .iter()
        .filter(|(_, own)| all.max(**own) == STRICT)
        .map(|(name, _)| name.as_str())
        .collect();
    let needed_for = "tproxy, keep_client_address";
    if strict.is_empty() {
        return Check::ok("reverse path filter", "not strict on any interface").needed_for(needed_for);
    }
    let shown = strict.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    let more = if strict.len() > 5 { format!(" and {} more", strict.len() - 5) } else { String::new() };
    Check::warn(
        "reverse path filter",
        format!("strict on {shown}{more}: it drops packets for addresses of others"),
    )
    .needed_for(needed_for)
    .fix("for the interfaces meant: sysctl net.ipv4.conf.all.rp_filter=2")
}
