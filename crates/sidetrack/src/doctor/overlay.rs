//! What a node of the overlay needs: congestion control, buffers and packet sizes of its links, and neighbours of its version.
//! Clocks are not looked at: ages of packets count from node to node, so no two clocks have to agree.

use super::uses::{OverlayUse, TolerantUse};
use super::{Check, Facts};

/// The size of a socket's buffer that a node asks for, bytes.
const BUFFER_BYTES: u64 = 4 << 20;

/// Fewer bytes than this are reported: 10 ms at 200 Mb/s.
const BUFFER_LEAST: u64 = 256 << 10;

/// The smallest MTU on which datagrams of a node travel whole: 1,200 bytes and the headers of UDP and IPv6.
const MTU_LEAST: u32 = 1_248;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let Some(overlay) = &facts.overlay else { return Vec::new() };
    let mut checks = vec![congestion(facts, overlay)];
    checks.extend(buffer(facts, "receive", "net/core/rmem_max"));
    checks.extend(buffer(facts, "send", "net/core/wmem_max"));
    checks.extend(overlay.mtus.iter().map(|(node, mtu)| packet_size(node, *mtu)));
    checks.push(versions(overlay));
    checks.extend(overlay.groups.iter().map(|(name, members)| group(name, members.as_deref())));
    checks.extend(overlay.tolerant.map(trust));
    checks
}

fn group(name: &str, members: Option<&[String]>) -> Check {
    let title = format!("overlay: group {name}");
    let needed_for = "packets to the group";
    match members {
        None => Check::ok(title, "its members are not known: no running sidetrack was asked")
            .needed_for(needed_for),
        Some([]) => {
            Check::warn(title, "it has no member: packets to it arrive nowhere").needed_for(needed_for).fix(
                format!("run `sidetrack overlay group join {name}` on a node, or write `join = true` there"),
            )
        }
        Some(members) => Check::ok(title, format!("members: {}", members.join(", "))).needed_for(needed_for),
    }
}

fn trust(TolerantUse { links, beyond }: TolerantUse) -> Check {
    let (name, needed_for) = ("overlay: trust", "packets that arrive although members lie");
    let check = match (links, beyond) {
        (0, _) => Check::warn(name, "the file does not say which links there may be")
            .fix("write an [[overlay.topology]] for each link: otherwise two nodes that lie can draw paths to themselves"),
        (_, Some(beyond @ 1..)) => Check::warn(name, format!("{beyond} announced links exceed the topology"))
            .fix("look at the costs in `sidetrack overlay status` and at [[overlay.topology]]: it is out of date, or a node lies"),
        (links, _) => Check::ok(name, format!("the topology has {links} links, and no other counts")),
    };
    check.needed_for(needed_for)
}

fn congestion(facts: &Facts, overlay: &OverlayUse) -> Check {
    let (name, wanted) = ("overlay: congestion control", &overlay.congestion);
    let needed_for = "links that keep their rate although packets are lost";
    let known = facts.setting("net/ipv4/tcp_available_congestion_control").unwrap_or_default();
    if known.split_whitespace().any(|one| one == wanted) {
        return Check::ok(name, format!("{wanted} is there")).needed_for(needed_for);
    }
    let found = format!("the kernel has no {wanted} now: {known}");
    Check::warn(name, found).needed_for(needed_for).fix(format!("modprobe tcp_{wanted}"))
}

fn buffer(facts: &Facts, direction: &str, setting: &'static str) -> Option<Check> {
    let most = facts.number(setting)?;
    let name = format!("overlay: {direction} buffer");
    let found = format!("{} KiB of the wanted {} KiB", most.min(BUFFER_BYTES) >> 10, BUFFER_BYTES >> 10);
    let needed_for = "datagrams that come while the node is busy";
    Some(if most < BUFFER_LEAST {
        Check::warn(name, found).needed_for(needed_for).sets(setting, BUFFER_BYTES)
    } else {
        Check::ok(name, found).needed_for(needed_for)
    })
}

fn packet_size(node: &str, mtu: Option<u32>) -> Check {
    let name = format!("overlay: MTU to {node}");
    let needed_for =
        "datagrams of at least 1,200 bytes; a smaller MTU on the way is found while the node runs";
    match mtu {
        Some(mtu) if mtu < MTU_LEAST => Check::warn(name, format!("{mtu} bytes; {MTU_LEAST} are needed"))
            .needed_for(needed_for)
            .fix("raise the MTU of the interface to it (ip link set dev INTERFACE mtu 1280)"),
        Some(mtu) => Check::ok(name, format!("{mtu} bytes")).needed_for(needed_for),
        None => Check::warn(name, "there is no route to its address")
            .needed_for("the link to it")
            .fix("look at `ip route`, and at `address` in [overlay.node]"),
    }
}

fn versions(overlay: &OverlayUse) -> Check {
    let name = "overlay: versions";
    let needed_for = "packets over several paths, graphs, recovery in real time";
    let lacking: Vec<_> = match &overlay.lacking {
        Err(why) => return Check::ok(name, format!("not known: {why}")).needed_for(needed_for),
        Ok(lacking) => lacking.iter().filter(|(_, lacks)| !lacks.is_empty()).collect(),
    };
    if lacking.is_empty() {
        return Check::ok(name, "all neighbours know what this version knows").needed_for(needed_for);
    }
    let words = |(node, lacks): &&(String, Vec<String>)| format!("{node} does not know {}", lacks.join(", "));
    let found: Vec<_> = lacking.iter().map(words).collect();
    Check::warn(name, found.join("; ")).needed_for(needed_for).fix("install this version on these nodes, too")
}
