//! The shunt: its fast paths, the slow path beside them, and conntrack.

use super::uses::{ShuntUse, Switch};
use super::{Check, Facts, Nftables, engine};
use sidetrack_core::shunt::FastPathKind;
use sidetrack_sys::nft::Feature;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let Some(shunt) = &facts.shunt else { return Vec::new() };
    let mut checks = Vec::new();
    for port in &shunt.ports {
        if port.mtu.is_none() {
            checks.push(engine::absent(port, "[[shunt.port]]"));
        } else if shunt.fast_paths.contains(&FastPathKind::Xdp) {
            checks.push(engine::xdp(port));
        }
    }
    checks.extend(shunt.fast_paths.iter().map(|path| backend(*path, facts)));
    checks.extend(shunt.switch.as_ref().map(switch));
    checks.push(if shunt.bridged { bridge(shunt, facts) } else { router(facts) });
    checks.push(conntrack(facts));
    checks
}

/// Whether a fast path is available.
fn backend(path: FastPathKind, facts: &Facts) -> Check {
    let name = format!("shunt: {}", path.as_str());
    let needed_for = format!("fast_path = \"{}\"", path.as_str());
    let check = match path {
        FastPathKind::Tc | FastPathKind::Xdp | FastPathKind::XdpGeneric if !facts.net_admin => {
            Check::warn(name, "BPF programs on interfaces need root").fix("start with sudo")
        }
        FastPathKind::Tc | FastPathKind::Xdp => Check::ok(name, "BPF programs on the interfaces"),
        FastPathKind::XdpGeneric => Check::warn(name, "XDP behind the driver: slow, for trials")
            .fix("fast_path = \"tc\", or \"xdp\" where the driver has it"),
        FastPathKind::Flowtable => match &facts.nftables {
            Nftables::Known { probe, .. } if probe.has(Feature::Flowtable) => {
                Check::ok(name, "a flow table of nftables")
            }
            Nftables::Known { .. } => Check::fail(
                name,
                format!("this kernel has no flow tables: it takes {}", Feature::Flowtable.needs()),
            )
            .fix("fast_path = \"tc\""),
            _ => Check::warn(name, "nothing is known of nftables").fix("sudo sidetrack doctor"),
        },
        FastPathKind::OpenFlow => Check::ok(name, "entries of a switch"),
        FastPathKind::Wire => Check::ok(name, "flows of listeners"),
        FastPathKind::None => Check::ok(name, "nothing is moved; what would be is shown"),
    };
    check.needed_for(needed_for)
}

/// Whether a switch is connected; the switch opens the connection.
fn switch(switch: &Switch) -> Check {
    let listen: Vec<_> = switch.listen.iter().map(ToString::to_string).collect();
    let listen = listen.join(" and ");
    let connected: Vec<_> = switch.connected.iter().map(ToString::to_string).collect();
    let check = match (switch.is_served, connected.as_slice()) {
        (_, [_, ..]) => Check::ok("shunt: switch", format!("connected to {listen}: {}", connected.join(", "))),
        (true, []) => Check::warn("shunt: switch", format!("no switch is connected to {listen}"))
            .fix("Open vSwitch: ovs-vsctl set-controller BRIDGE tcp:THIS-HOST:PORT; a firewall must let it through"),
        (false, []) => Check::warn("shunt: switch", format!("nothing listens at {listen} yet: `sidetrack up` does"))
            .fix("sudo sidetrack up, then sidetrack doctor again"),
    };
    check.needed_for("entries of a switch: it connects here by OpenFlow")
}

/// Both ports of the slow path must belong to one bridge, whose packets must pass netfilter.
fn bridge(shunt: &ShuntUse, facts: &Facts) -> Check {
    let name = "shunt: bridge";
    let needed_for = "forwarding = \"bridged\": the slow path, and conntrack's view of bridged connections";
    let there = || shunt.ports.iter().filter(|port| port.mtu.is_some());
    let first = there().next().and_then(|port| port.bridge.as_deref());
    let stray = there().find(|port| port.bridge.is_none() || port.bridge.as_deref() != first);
    let check = match (stray, facts.number("net/bridge/bridge-nf-call-iptables")) {
        (Some(port), _) => {
            Check::warn(name, format!("{} is not a port of the bridge of the others", port.name))
                .fix(format!("ip link set dev {} master BRIDGE", port.name))
        }
        (None, Some(1)) => {
            Check::ok(name, format!("{}; its packets pass netfilter", first.unwrap_or("the switch bridges")))
        }
        (None, Some(_)) => {
            Check::warn(name, "bridged packets do not pass netfilter, so conntrack never sees them")
                .fix("sysctl net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1")
        }
        (None, None) => {
            Check::warn(name, "bridged packets do not pass netfilter: br_netfilter is not loaded")
                .fix("modprobe br_netfilter")
        }
    };
    check.needed_for(needed_for)
}

fn router(facts: &Facts) -> Check {
    let name = "shunt: routes";
    let needed_for = "forwarding = \"routed\": the slow path";
    let v4 = facts.number("net/ipv4/ip_forward").is_some_and(|value| value != 0);
    let v6 = facts.number("net/ipv6/conf/all/forwarding").is_some_and(|value| value != 0);
    let check = match (v4, v6) {
        (true, true) => Check::ok(name, "IPv4 and IPv6 are forwarded"),
        (true, false) => Check::ok(name, "IPv4 is forwarded, IPv6 is not"),
        (false, true) => Check::ok(name, "IPv6 is forwarded, IPv4 is not"),
        (false, false) => Check::warn(name, "this host forwards nothing")
            .fix("sysctl net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"),
    };
    check.needed_for(needed_for)
}

fn conntrack(facts: &Facts) -> Check {
    let name = "shunt: conntrack";
    let needed_for = "marks and ends of connections: without events nothing is moved";
    let check = match (
        facts.setting("net/netfilter/nf_conntrack_events"),
        facts.number("net/netfilter/nf_conntrack_max"),
    ) {
        (None, _) | (_, None) => Check::fail(name, "this kernel has no conntrack, or it is not loaded")
            .fix("modprobe nf_conntrack nf_conntrack_netlink"),
        (Some("0"), _) => Check::ok(name, "events are off; Sidetrack switches them on while it needs them"),
        (Some(_), Some(max)) => Check::ok(name, format!("events are on; {max} connections can be tracked")),
    };
    check.needed_for(needed_for)
}
