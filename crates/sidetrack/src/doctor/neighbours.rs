//! Other programs on this machine that have rules or answer DNS questions, and how sidetrack works beside them.

use super::facts::Neighbour;
use super::{Check, DnsUse, Facts, Nftables};
use sidetrack_sys::nft::ListedChain;
use std::net::SocketAddr;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let mut checks: Vec<_> = facts.neighbours.iter().map(|neighbour| known(*neighbour)).collect();
    if let Nftables::Known { chains, .. } = &facts.nftables {
        checks.push(nat_chains(chains));
    }
    checks.extend(facts.dns.as_ref().map(resolver));
    checks
}

/// Checks that no other program has the addresses of `[dns]`.
fn resolver(dns: &DnsUse) -> Check {
    let needed_for = "[dns]: answering the names of clients";
    if dns.taken.is_empty() {
        return Check::ok("resolver", "no other program has its addresses").needed_for(needed_for);
    }
    let shown = |(address, holder): &(SocketAddr, Option<String>)| {
        format!("{address} is in use by {}", holder.as_deref().unwrap_or("another program"))
    };
    let found: Vec<_> = dns.taken.iter().map(shown).collect();
    Check::fail("resolver", found.join("; ")).needed_for(needed_for).fix(
        "give [dns] one address that clients reach, not *:53; or DNSStubListener=no in /etc/systemd/resolved.conf; or \
         port=0 for dnsmasq",
    )
}

fn known(neighbour: Neighbour) -> Check {
    let needed_for = "getting along: Sidetrack has one table of its own and changes nobody else's";
    match neighbour {
        Neighbour::Docker => Check::warn(
            "Docker",
            "containers' traffic is forwarded: a redirect listener catches it only with forwarded = true; published \
             ports are translated by Docker before a reverse listener could see them",
        )
        .needed_for(needed_for)
        .fix("name Docker's networks in `except` of a forwarded listener (docker network inspect)"),
        Neighbour::Podman => Check::warn(
            "podman",
            "containers of root are forwarded as Docker's are; rootless ones are local traffic of their user",
        )
        .needed_for(needed_for)
        .fix("name podman's networks in `except` of a forwarded listener (podman network inspect)"),
        Neighbour::Firewalld => Check::warn(
            "firewalld",
            "a reload flushes its own table and leaves ours; its zones still decide who may reach our listeners",
        )
        .needed_for(needed_for)
        .fix("firewall-cmd --add-port=PORT/tcp for listeners that other hosts use"),
        Neighbour::Tailscale => Check::warn(
            "Tailscale",
            "it routes by marks of its own (0xff0000); names of the tailnet are answered at 100.100.100.100",
        )
        .needed_for(needed_for)
        .fix("except = [\"100.64.0.0/10\", \"fd7a:115c:a1e0::/48\"] to leave the tailnet alone"),
        Neighbour::Resolved => Check::ok(
            "systemd-resolved",
            "answers names at 127.0.0.53; `run` gives its command another resolver and covers the sockets that lead \
             around it",
        )
        .needed_for("names inside `run`"),
    }
}

/// Checks for other programs' chains that translate destinations of outgoing or incoming connections.
fn nat_chains(chains: &[ListedChain]) -> Check {
    const PRE_ROUTING: u32 = 0;
    const LOCAL_OUT: u32 = 3;
    let others = chains.iter().filter(|chain| {
        chain.kind == "nat"
            && [PRE_ROUTING, LOCAL_OUT].contains(&chain.hook)
            && !chain.table.starts_with("sidetrack")
    });
    let named: Vec<_> = others
        .map(|chain| format!("{} {} {} (priority {})", chain.family, chain.table, chain.name, chain.priority))
        .collect();
    let needed_for = "redirect and the kernel path: the first chain that translates a connection decides";
    if named.is_empty() {
        return Check::ok("address translation", "nobody else translates destinations here")
            .needed_for(needed_for);
    }
    Check::warn("address translation", format!("others translate destinations, too: {}", named.join("; ")))
        .needed_for(needed_for)
        .fix("look what they translate: nft list ruleset")
}
