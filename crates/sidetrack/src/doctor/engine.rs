//! The interfaces of engine listeners.

use super::uses::{EngineUse, Interface};
use super::{Check, Facts};

/// The largest packet that fits into a frame of AF_XDP, see docs/engine.md.
const XDP_MTU_MAX: u32 = 3_762;

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    facts.engines.iter().flat_map(of_listener).collect()
}

fn of_listener(engine: &EngineUse) -> Vec<Check> {
    let mut checks = Vec::new();
    for interface in &engine.interfaces {
        let Some(mtu) = interface.mtu else {
            checks.push(absent(interface, &format!("engine listener '{}'", engine.listener)));
            continue;
        };
        checks.push(if engine.xdp { xdp(interface) } else { packet(interface) });
        checks.push(queues(interface, engine));
        checks.push(gro(interface, engine));
        checks.push(checksums(interface));
        checks.push(mtu_of(interface, mtu, engine));
    }
    checks
}

/// The check for an interface that does not exist.
pub(super) fn absent(interface: &Interface, user: &str) -> Check {
    let name = &interface.name;
    Check::fail(name, "there is no such interface")
        .needed_for(user)
        .fix(format!("write the name of an interface of this host (ip link), or make {name}"))
}

/// Checks for XDP support in the driver.
pub(super) fn xdp(interface: &Interface) -> Check {
    let name = format!("{}: XDP", interface.name);
    let needed_for = "io = \"xdp\" of the engine, fast_path = \"xdp\" of the shunt";
    let check = match interface.xdp {
        Some(xdp) if xdp.native && xdp.zero_copy => Check::ok(name, "native, AF_XDP without copying"),
        Some(xdp) if xdp.native => Check::ok(name, "native, AF_XDP copies frames"),
        Some(_) => Check::fail(name, "its driver has no XDP; the generic mode is not used")
            .fix("engine: io = \"packet\"; shunt: fast_path = \"tc\""),
        None => Check::ok(
            name,
            "this kernel does not say what the driver can do (Linux 6.3 does); it is tried at the start",
        ),
    };
    check.needed_for(needed_for)
}

fn packet(interface: &Interface) -> Check {
    let native = interface.xdp.is_some_and(|xdp| xdp.native);
    let found = if native { "packet sockets; its driver also has native XDP" } else { "packet sockets" };
    Check::ok(format!("{}: packets", interface.name), found).needed_for("io = \"packet\" of the engine")
}

fn queues(interface: &Interface, engine: &EngineUse) -> Check {
    let name = format!("{}: queues", interface.name);
    let found =
        format!("{} receive {}", interface.queues, if interface.queues == 1 { "queue" } else { "queues" });
    let needed_for = "one worker takes one queue of each interface";
    let there = engine.interfaces.iter().filter(|other| other.mtu.is_some());
    let fewest = there.map(|other| other.queues).min().unwrap_or(1);
    if engine.xdp && interface.queues != fewest {
        return Check::warn(name, format!("{found}, another interface of the listener has {fewest}"))
            .needed_for(needed_for)
            .fix(format!("ethtool -L {} combined {fewest}", interface.name));
    }
    Check::ok(name, found).needed_for(needed_for)
}

fn gro(interface: &Interface, engine: &EngineUse) -> Check {
    let name = format!("{}: GRO", interface.name);
    let needed_for = "few interruptions for many frames; offloaded connections, at both ends of a veth";
    let check = match interface.offloads.gro {
        Some(true) => Check::ok(name, "on"),
        Some(false) if engine.offload => Check::warn(name, "off, and the listener has offload_max")
            .fix(format!("ethtool -K {} gro on", interface.name)),
        Some(false) => Check::ok(name, "off"),
        None => Check::ok(name, "its driver does not say"),
    };
    check.needed_for(needed_for)
}

fn checksums(interface: &Interface) -> Check {
    let name = format!("{}: checksums", interface.name);
    let needed_for = "the engine computes those that the card does not, for each packet";
    let fix = |what: &str| format!("ethtool -K {} {what}", interface.name);
    let check = match (interface.offloads.rx_checksum, interface.offloads.tx_checksum) {
        (Some(false), Some(false)) => {
            Check::warn(name, "the card neither verifies nor computes them").fix(fix("rx on tx on"))
        }
        (Some(false), _) => Check::warn(name, "the card does not verify them").fix(fix("rx on")),
        (_, Some(false)) => Check::ok(name, "the card verifies them; it does not compute them"),
        (Some(true), _) => Check::ok(name, "the card verifies and computes them"),
        (None, _) => Check::ok(name, "its driver does not say"),
    };
    check.needed_for(needed_for)
}

fn mtu_of(interface: &Interface, mtu: u32, engine: &EngineUse) -> Check {
    let name = format!("{}: MTU", interface.name);
    let needed_for = "a path with a smaller MTU than both interfaces is not learnt";
    let least = engine.interfaces.iter().filter_map(|other| other.mtu).min().unwrap_or(mtu);
    let set = |mtu: u32| format!("ip link set dev {} mtu {mtu}", interface.name);
    let check = match mtu {
        mtu if engine.xdp && mtu > XDP_MTU_MAX => {
            Check::fail(name, format!("{mtu} bytes; AF_XDP takes {XDP_MTU_MAX} at most"))
                .fix(set(XDP_MTU_MAX))
        }
        mtu if mtu != least => {
            Check::warn(name, format!("{mtu} bytes, another interface of the listener has {least}"))
                .fix(set(least))
        }
        mtu => Check::ok(name, format!("{mtu} bytes")),
    };
    let check = check.needed_for(needed_for);
    if interface.running {
        return check;
    }
    Check::warn(check.name, format!("{}; the interface is down", check.found))
        .needed_for("packets")
        .fix(format!("ip link set dev {} up", interface.name))
}
