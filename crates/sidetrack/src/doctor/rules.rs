//! Rights, namespaces and the features of the packet filter.

use super::{Check, Facts, Isolation, Nftables};
use sidetrack_sys::nft::{Feature, Probe};

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![run_without_root(facts), run_in_cgroup(facts), rights(facts)];
    match &facts.nftables {
        Nftables::Known { probe, .. } => checks.extend(features(probe)),
        Nftables::NotAllowed => checks.push(
            Check::warn("nftables", "only CAP_NET_ADMIN may look at it: nothing is known")
                .needed_for("redirect, tproxy, the kernel path")
                .fix("sudo sidetrack doctor"),
        ),
        Nftables::Absent(why) => checks.push(
            Check::fail("nftables", why.clone())
                .needed_for("every way of catching traffic but socks and reverse")
                .fix("a kernel with CONFIG_NF_TABLES; modprobe nf_tables"),
        ),
    }
    checks
}

fn run_without_root(facts: &Facts) -> Check {
    let name = "run without root";
    let needed_for = "sidetrack run -- CMD without root, with nothing on the host to clean up";
    match &facts.isolation {
        Isolation::NotTried => Check::ok(name, "not tried").needed_for(needed_for),
        Isolation::Works(time) => {
            let found =
                format!("a command was run in a network of its own, in {} ms", time.as_millis().max(1));
            Check::ok(name, found).needed_for(needed_for)
        }
        Isolation::Failed { why, remedy } => {
            let check = if facts.is_network_root() { Check::warn(name, why) } else { Check::fail(name, why) };
            let fix =
                remedy.clone().unwrap_or_else(|| "as root: sidetrack run --mode cgroup -- CMD".to_owned());
            check.needed_for(needed_for).fix(fix)
        }
    }
}

fn run_in_cgroup(facts: &Facts) -> Check {
    let name = "run --mode cgroup";
    let needed_for =
        "sidetrack run in the host's own network, where namespaces are forbidden; sidetrack attach";
    let lacks = |feature| matches!(&facts.nftables, Nftables::Known { probe, .. } if !probe.has(feature));
    let Some(mount) = &facts.cgroup2 else {
        return Check::warn(name, "no cgroup2 hierarchy is mounted")
            .needed_for(needed_for)
            .fix("mount -t cgroup2 none /sys/fs/cgroup/unified");
    };
    if lacks(Feature::SocketCgroup) {
        let found =
            format!("this kernel cannot match sockets by cgroup: it takes {}", Feature::SocketCgroup.needs());
        return Check::warn(name, found).needed_for(needed_for);
    }
    if !facts.is_network_root() {
        return Check::warn(name, "this user is not root").needed_for(needed_for).fix("run it as root");
    }
    Check::ok(name, format!("cgroup2 is mounted at {}", mount.display())).needed_for(needed_for)
}

fn rights(facts: &Facts) -> Check {
    let needed_for =
        "redirect, tproxy, the kernel path, keeping the client's address; socks, reverse and run need none";
    let missing = match (facts.net_admin, facts.net_raw) {
        (true, true) => return Check::ok("rights", "CAP_NET_ADMIN and CAP_NET_RAW").needed_for(needed_for),
        (false, true) => "CAP_NET_ADMIN is missing",
        (true, false) => "CAP_NET_RAW is missing",
        (false, false) => "CAP_NET_ADMIN and CAP_NET_RAW are missing",
    };
    Check::warn("rights", missing)
        .needed_for(needed_for)
        .fix("run it as root, or: setcap cap_net_admin,cap_net_raw+ep $(command -v sidetrack)")
}

/// Features that sidetrack uses: their name, their use, and what to do without them.
const USES: [(&[Feature], &str, &str, &str); 8] = [
    (
        &[Feature::Owner],
        "rules go with us",
        "nothing stays behind, even after SIGKILL",
        "after a crash: sidetrack cleanup",
    ),
    (&[Feature::Persist], "blocked after a crash", "on_crash = \"closed\"", "use on_crash = \"open\""),
    (
        &[Feature::Redirect, Feature::Fib],
        "redirect",
        "listeners of kind redirect, run",
        "use socks or reverse",
    ),
    (
        &[Feature::TProxy, Feature::SocketTransparent],
        "tproxy",
        "listeners of kind tproxy",
        "use redirect: the server then sees our address",
    ),
    (
        &[Feature::TProxy, Feature::SocketTransparent, Feature::Fib],
        "UDP capture",
        "UDP of run, and of listeners of kind redirect and tproxy",
        "datagrams of run are refused; use socks or reverse",
    ),
    (
        &[Feature::DnatMap, Feature::ConcatenatedRanges, Feature::CtEvents],
        "kernel path",
        "flows of TCP and UDP that the kernel carries alone, still recorded",
        "such flows go through user space: kernel = \"never\"",
    ),
    (
        &[Feature::Reject],
        "refusing",
        "denied flows are told at once",
        "denied flows of the kernel path are dropped",
    ),
    (
        &[Feature::Queue],
        "faithful connect",
        "connect = \"faithful\": refused is refused; [[overlay.packets]]",
        "connect = \"early\": connections are accepted at once",
    ),
];

/// The table of `docs/howto/kernels.md`: what each of these checks needs of the kernel.
pub fn kernel_table() -> String {
    let mut text = String::from("| check of `doctor` | needs | for | without it |\n|---|---|---|---|\n");
    for (features, name, needed_for, instead) in &USES {
        let needs = features.iter().map(|feature| format!("{feature}: {}", feature.needs()));
        let needs = needs.collect::<Vec<_>>().join("; ");
        text += &format!("| {name} | {needs} | {needed_for} | {instead} |\n");
    }
    text
}

fn features(probe: &Probe) -> Vec<Check> {
    if !probe.has(Feature::Tables) {
        let found = format!("this kernel has no tables of family inet: it takes {}", Feature::Tables.needs());
        return vec![
            Check::fail("nftables", found)
                .needed_for("every way of catching traffic but socks and reverse")
                .fix("modprobe nf_tables, or another kernel"),
        ];
    }
    let check = |(features, name, needed_for, instead): &(&[Feature], &str, &str, &str)| {
        let missing: Vec<_> = features.iter().filter(|feature| !probe.has(**feature)).collect();
        if missing.is_empty() {
            let found: Vec<_> = features.iter().map(ToString::to_string).collect();
            return Check::ok(*name, found.join(", ")).needed_for(*needed_for);
        }
        let takes: Vec<_> =
            missing.iter().map(|feature| format!("{feature}: it takes {}", feature.needs())).collect();
        Check::warn(*name, format!("this kernel lacks {}", takes.join("; ")))
            .needed_for(*needed_for)
            .fix(*instead)
    };
    USES.iter().map(check).collect()
}
