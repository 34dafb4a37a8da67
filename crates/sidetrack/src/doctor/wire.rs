//! What flows need that go to the wire.

use super::uses::WireUse;
use super::{Check, Facts};

/// The first kernel with tcx.
const LEAST: (u32, u32) = (6, 6);

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let Some(WireUse { interfaces, unpinned }) = &facts.wire else { return Vec::new() };
    let name = "wire";
    let check = if version(&facts.kernel).is_some_and(|version| version < LEAST) {
        let found = format!("Linux {} has no tcx, which takes Linux 6.6", facts.kernel);
        Check::fail(name, found).fix("take [wire] and shunt = { fast_path = \"wire\" } out")
    } else if !facts.net_admin {
        Check::warn(name, "reading connections out of TCP needs CAP_NET_ADMIN").fix("start with sudo")
    } else if *interfaces == 0 {
        let found = "no interface has Ethernet addresses: all flows stay with their sockets";
        Check::warn(name, found).fix("ip link")
    } else if let Some(why) = unpinned {
        Check::warn(name, format!("flows on the wire end when sidetrack is killed: {why}"))
            .fix("mount -t bpf bpf /sys/fs/bpf")
    } else {
        Check::ok(name, format!("{interfaces} interfaces whose packets the kernel can translate"))
    };
    vec![check.needed_for("shunt = { fast_path = \"wire\" }")]
}

/// The first two numbers of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
