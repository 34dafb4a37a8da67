//! What `sidetrack doctor` makes of facts: on a good machine, on a poor one, and of each fact alone.

use sidetrack::cli::doctor::report;
use sidetrack::doctor::{
    Check, CollectorUse, DnsUse, EngineUse, Facts, Interface, Isolation, Level, Neighbour, Nftables,
    OverlayUse, ShuntUse, Switch, TolerantUse, WireUse, examine,
};
use sidetrack_core::flow::Protocol;
use sidetrack_core::pressure::Memory;
use sidetrack_core::shunt::FastPathKind;
use sidetrack_sys::driver::{Offloads, Xdp};
use sidetrack_sys::nft::{Feature, ListedChain, Probe};
use std::collections::BTreeMap;
use std::time::Duration;

/// A machine on which everything works, seen by root.
fn good() -> Facts {
    let settings = [
        ("fs/pipe-max-size", "1048576"),
        ("fs/pipe-user-pages-soft", "16384"),
        ("net/core/somaxconn", "4096"),
        ("net/ipv4/conf/all/rp_filter", "2"),
        ("net/ipv4/ip_forward", "1"),
        ("net/ipv4/ip_local_port_range", "32768\t60999"),
        ("net/ipv4/tcp_available_congestion_control", "reno cubic bbr"),
        ("net/ipv4/tcp_congestion_control", "cubic"),
        ("net/ipv4/tcp_fastopen", "3"),
        ("net/ipv6/conf/all/forwarding", "1"),
        ("net/netfilter/nf_conntrack_acct", "1"),
        ("net/netfilter/nf_conntrack_events", "1"),
        ("net/netfilter/nf_conntrack_max", "262144"),
    ];
    Facts {
        kernel: "6.1.0-18-amd64".into(),
        uid: 0,
        net_admin: true,
        net_raw: true,
        sys_admin: true,
        sys_resource: true,
        isolation: Isolation::Works(Duration::from_millis(9)),
        nftables: Nftables::Known { probe: Probe::default(), chains: Vec::new() },
        nofile: (1024, 1_048_576),
        cgroup2: Some("/sys/fs/cgroup".into()),
        settings: settings.into_iter().map(|(name, value)| (name, value.to_owned())).collect(),
        memory: None,
        memory_percent: 85,
        running: Vec::new(),
        rp_filter: BTreeMap::from([("eth0".into(), 1), ("lo".into(), 0)]),
        ipv6: true,
        mptcp: true,
        landlock: Some(7),
        seccomp: true,
        data_user: Some("sidetrack".into()),
        neighbours: Vec::new(),
        engines: Vec::new(),
        shunt: None,
        wire: None,
        overlay: None,
        page: None,
        dns: None,
        collectors: Vec::new(),
    }
}

/// A machine that lacks whatever one can, seen by an ordinary user.
fn poor() -> Facts {
    let mut settings = good().settings;
    for (name, value) in [
        ("fs/pipe-user-pages-soft", "1024"),
        ("net/core/somaxconn", "128"),
        ("net/ipv4/conf/all/rp_filter", "0"),
        ("net/ipv4/ip_forward", "0"),
        ("net/ipv4/ip_local_port_range", "60000 60999"),
        ("net/ipv4/tcp_available_congestion_control", "reno cubic"),
        ("net/ipv4/tcp_fastopen", "1"),
        ("net/ipv6/conf/all/forwarding", "0"),
        ("net/netfilter/nf_conntrack_max", "8192"),
    ] {
        settings.insert(name, value.to_owned());
    }
    settings.remove("net/netfilter/nf_conntrack_acct");
    let why = "cannot make a user namespace for the command: Operation not permitted (os error 1)".to_owned();
    let remedy = Some("As root: sysctl kernel.unprivileged_userns_clone=1".to_owned());
    Facts {
        uid: 1000,
        net_admin: false,
        net_raw: false,
        sys_admin: false,
        sys_resource: false,
        isolation: Isolation::Failed { why, remedy },
        nftables: Nftables::NotAllowed,
        nofile: (1024, 1024),
        cgroup2: None,
        settings,
        ipv6: false,
        mptcp: false,
        landlock: None,
        seccomp: false,
        data_user: Some("nobody".into()),
        neighbours: vec![
            Neighbour::Docker,
            Neighbour::Podman,
            Neighbour::Firewalld,
            Neighbour::Tailscale,
            Neighbour::Resolved,
        ],
        ..good()
    }
}

fn check(facts: &Facts, name: &str) -> Check {
    let all = examine(facts);
    all.into_iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no check '{name}'"))
}

#[test]
fn a_taken_port_of_the_resolver_is_told_with_its_holder() {
    let of = |taken| check(&Facts { dns: Some(DnsUse { taken }), ..good() }, "resolver");
    assert_eq!(of(Vec::new()).level, Level::Ok);
    let taken = of(vec![("127.0.0.53:53".parse().unwrap(), Some("systemd-resolve".to_owned()))]);
    assert_eq!((taken.level, &*taken.found), (Level::Fail, "127.0.0.53:53 is in use by systemd-resolve"));
    assert!(taken.fix.unwrap().contains("DNSStubListener=no"));
}

#[test]
fn collectors_are_reached_or_not() {
    let of = |transport, reached| {
        let one = CollectorUse { table: "export.ipfix", collector: "flows:4739".into(), transport, reached };
        check(&Facts { collectors: vec![one], ..good() }, "collector")
    };
    let address = "192.0.2.1:4739".parse().unwrap();
    assert_eq!(of(Protocol::Tcp, Ok(address)).level, Level::Ok);
    assert!(of(Protocol::Udp, Ok(address)).found.contains("UDP shows no more"));
    let absent = of(Protocol::Tcp, Err("refused".into()));
    assert_eq!((absent.level, &*absent.found), (Level::Fail, "flows:4739 cannot be reached: refused"));
    assert_eq!(absent.needed_for, "[export.ipfix]: reports of flows");
}

#[test]
fn udp_has_checks_of_its_own() {
    let check = |facts: &Facts, name: &str| {
        let found = examine(facts).into_iter().find(|check| check.name == name);
        found.unwrap_or_else(|| panic!("no check '{name}'"))
    };
    let mut facts = good();
    for setting in ["net/core/rmem_max", "net/core/wmem_max"] {
        facts.settings.insert(setting, "4194304".into());
    }
    assert_eq!(check(&facts, "UDP receive buffer").level, Level::Ok);
    assert_eq!(check(&facts, "UDP send buffer").level, Level::Ok);
    assert_eq!(check(&facts, "UDP capture").level, Level::Ok);
    facts.settings.insert("net/core/rmem_max", "212992".into());
    let poor = check(&facts, "UDP receive buffer");
    assert_eq!((poor.level, poor.fix.as_deref()), (Level::Warn, Some("sysctl net.core.rmem_max=4194304")));
    facts.settings.insert("net/ipv4/ip_local_port_range", "60000 60999".into());
    let ports = check(&facts, "UDP ports");
    assert!(ports.found.starts_with("1000 local ports") && ports.fix.is_some(), "{ports:?}");
}

#[test]
fn a_page_without_tls_is_for_this_host() {
    let page = |address: &str| check(&Facts { page: Some(address.parse().unwrap()), ..good() }, "page").level;
    assert_eq!(["127.0.0.1:9466", "[::1]:9466"].map(page), [Level::Ok; 2]);
    assert_eq!(["0.0.0.0:9466", "192.0.2.1:80", "[2001:db8::1]:80"].map(page), [Level::Warn; 3]);
}

#[test]
fn a_good_machine_gets_no_complaint() {
    let printed = report(&good(), false, 80);
    assert_eq!(printed.code, 0);
    assert!(examine(&good()).iter().all(|check| check.level == Level::Ok), "{}", printed.out);
    insta::assert_snapshot!(printed.out);
}

#[test]
fn too_little_memory_is_told_with_what_it_does() {
    let of = |used_mib: u64, limit_mib: u64, memory_percent| {
        let memory = Memory { used_bytes: used_mib << 20, limit_bytes: limit_mib << 20 };
        check(&Facts { memory: Some(memory), memory_percent, ..good() }, "memory")
    };
    assert_eq!(of(100, 256, 85).level, Level::Ok);
    let short = of(220, 256, 85);
    assert_eq!(short.level, Level::Warn);
    assert!(short.found.ends_with("85 % are used: new flows are refused"), "{}", short.found);
    assert!(short.fix.is_some_and(|fix| fix.contains("MemoryMax=")));
    assert_eq!(of(220, 256, 100).level, Level::Ok, "it is switched off");
    assert_eq!(of(1, 32, 85).level, Level::Warn, "that is too little for any node");
}

#[test]
fn a_poor_machine_is_told_what_to_do() {
    let printed = report(&poor(), false, 80);
    assert_eq!(printed.code, 1);
    for check in examine(&poor()).iter().filter(|check| check.level != Level::Ok) {
        assert!(check.fix.is_some(), "{check:?}");
    }
    insta::assert_snapshot!(printed.out);
}

#[test]
fn an_old_kernel_is_told_what_it_lacks() {
    let missing = [Feature::Owner, Feature::Persist, Feature::SocketCgroup, Feature::CtEvents];
    let probe = Probe { missing: missing.map(|feature| (feature, 95)).into() };
    let facts = Facts { nftables: Nftables::Known { probe, chains: Vec::new() }, ..good() };
    for name in ["rules go with us", "blocked after a crash", "run --mode cgroup", "kernel path"] {
        assert_eq!(check(&facts, name).level, Level::Warn, "{name}");
    }
    assert_eq!(check(&facts, "tproxy").level, Level::Ok);
    assert!(check(&facts, "rules go with us").found.contains("Linux 5.12"));
    assert_eq!(report(&facts, false, 80).code, 0, "one can do without");
    let none = Probe { missing: Feature::ALL.map(|feature| (feature, 95)).into() };
    let facts = Facts { nftables: Nftables::Known { probe: none, chains: Vec::new() }, ..good() };
    assert_eq!(check(&facts, "nftables").level, Level::Fail);
}

#[test]
fn the_page_about_kernels_has_the_same_table() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/howto/kernels.md");
    let page = std::fs::read_to_string(path).expect("the page");
    let table = sidetrack::doctor::kernel_table();
    assert!(page.contains(&table), "put this table into docs/howto/kernels.md:\n{table}");
}

#[test]
fn nat_of_others_is_named_and_ours_is_not() {
    let chain = |table: &str, kind: &str, hook, priority| ListedChain {
        family: "ip".into(),
        table: table.into(),
        name: "CHAIN".into(),
        kind: kind.into(),
        hook,
        priority,
    };
    let with = |chains| Facts { nftables: Nftables::Known { probe: Probe::default(), chains }, ..good() };
    let own =
        with(vec![chain("sidetrack", "nat", 3, -100), chain("x", "filter", 0, 0), chain("x", "nat", 4, 100)]);
    assert_eq!(check(&own, "address translation").level, Level::Ok);
    let docker = check(&with(vec![chain("nat", "nat", 0, -100)]), "address translation");
    assert_eq!(docker.level, Level::Warn);
    assert!(docker.found.contains("ip nat CHAIN (priority -100)"), "{}", docker.found);
}

#[test]
fn the_stricter_of_all_and_own_reverse_path_filter_counts() {
    let level = |all: &str, own: u8| {
        let mut facts = good();
        facts.settings.insert("net/ipv4/conf/all/rp_filter", all.to_owned());
        facts.rp_filter = BTreeMap::from([("eth0".into(), own)]);
        check(&facts, "reverse path filter").level
    };
    // The kernel takes the greater of both; 2 is the loose one.
    assert_eq!([level("0", 0), level("2", 1), level("1", 2), level("0", 2)], [Level::Ok; 4]);
    assert_eq!([level("1", 0), level("0", 1), level("1", 1)], [Level::Warn; 3]);
}

#[test]
fn json_has_the_same_checks() {
    let json: serde_json::Value = serde_json::from_str(&report(&poor(), true, 80).out).expect("JSON");
    let first = &json["checks"][0];
    assert_eq!((first["name"].as_str(), first["level"].as_str()), (Some("run without root"), Some("fail")));
    assert_eq!(json["checks"].as_array().map(Vec::len), Some(examine(&poor()).len()));
}

#[test]
fn what_confines_processes_is_looked_at() {
    let level = |landlock, seccomp, user: Option<&str>| {
        let facts = Facts { landlock, seccomp, data_user: user.map(str::to_owned), ..good() };
        ["landlock", "seccomp", "user"].map(|name| check(&facts, name).level)
    };
    assert_eq!(level(Some(5), true, Some("sidetrack")), [Level::Ok; 3]);
    // A user that other programs have, too, and a Landlock that does not know everything.
    assert_eq!(level(Some(1), false, Some("nobody")), [Level::Warn; 3]);
    assert_eq!(level(None, false, None), [Level::Warn; 3]);
}

/// An interface with everything.
fn interface(name: &str) -> Interface {
    Interface {
        name: name.into(),
        mtu: Some(1500),
        running: true,
        xdp: Some(Xdp { native: true, zero_copy: true }),
        queues: 2,
        offloads: Offloads { gro: Some(true), rx_checksum: Some(true), tx_checksum: Some(true) },
        bridge: Some("br0".into()),
    }
}

/// An engine listener at `eth0` and another interface.
fn engine(xdp: bool, other: Interface) -> Facts {
    let interfaces = vec![interface("eth0"), other];
    let engine = EngineUse { listener: "fast".into(), xdp, offload: true, interfaces };
    Facts { engines: vec![engine], ..good() }
}

#[test]
fn interfaces_of_engine_listeners_are_looked_at() {
    let fine = engine(true, interface("eth1"));
    assert!(examine(&fine).iter().all(|check| check.level == Level::Ok), "{:?}", examine(&fine));
    for what in ["XDP", "queues", "GRO", "checksums", "MTU"] {
        check(&fine, &format!("eth1: {what}"));
    }
    let offloads = |gro, rx_checksum| Offloads {
        gro: Some(gro),
        rx_checksum: Some(rx_checksum),
        tx_checksum: Some(true),
    };
    let no_xdp = Some(Xdp { native: false, zero_copy: false });
    for (what, level, fix, other) in [
        ("XDP", Level::Fail, "io = \"packet\"", Interface { xdp: no_xdp, ..interface("eth1") }),
        ("queues", Level::Warn, "ethtool -L eth1 combined 2", Interface { queues: 4, ..interface("eth1") }),
        (
            "GRO",
            Level::Warn,
            "ethtool -K eth1 gro on",
            Interface { offloads: offloads(false, true), ..interface("eth1") },
        ),
        (
            "checksums",
            Level::Warn,
            "ethtool -K eth1 rx on",
            Interface { offloads: offloads(true, false), ..interface("eth1") },
        ),
        (
            "MTU",
            Level::Fail,
            "ip link set dev eth1 mtu 3762",
            Interface { mtu: Some(9000), ..interface("eth1") },
        ),
        (
            "MTU",
            Level::Warn,
            "ip link set dev eth1 mtu 1500",
            Interface { mtu: Some(1600), ..interface("eth1") },
        ),
        ("MTU", Level::Warn, "ip link set dev eth1 up", Interface { running: false, ..interface("eth1") }),
    ] {
        let found = check(&engine(true, other), &format!("eth1: {what}"));
        assert_eq!(found.level, level, "{found:?}");
        assert!(
            found.fix.as_ref().is_some_and(|said| said.contains(fix) && !said.contains('\n')),
            "{found:?}"
        );
    }
    // Packet sockets need none of this.
    let poor = Interface { xdp: no_xdp, queues: 1, ..interface("eth1") };
    assert!(examine(&engine(false, poor)).iter().all(|check| check.level == Level::Ok));
    let absent = check(&engine(true, Interface { name: "eth9".into(), ..Interface::default() }), "eth9");
    assert!(absent.level == Level::Fail && absent.needed_for.contains("'fast'"), "{absent:?}");
}

/// A shunt by this fast path between two ports of a bridge.
fn shunt(path: FastPathKind, bridged: bool) -> Facts {
    let ports = vec![interface("lan0"), interface("wan0")];
    let use_of = ShuntUse { fast_paths: vec![path], bridged, ports, switch: None };
    let mut facts = Facts { shunt: Some(use_of), ..good() };
    facts.settings.insert("net/bridge/bridge-nf-call-iptables", "1".into());
    facts
}

#[test]
fn what_flows_on_the_wire_need_is_looked_at() {
    let on = |interfaces| Some(WireUse { interfaces, unpinned: None });
    let facts = |kernel: &str| Facts { kernel: kernel.into(), wire: on(2), ..good() };
    assert_eq!(check(&facts("6.6.1"), "wire").level, Level::Ok);
    assert_eq!(check(&facts("6.1.0-18-amd64"), "wire").level, Level::Fail);
    let unpinned = WireUse { interfaces: 2, unpinned: Some("/a is in no file system of type bpf".into()) };
    let unpinned = Facts { wire: Some(unpinned), ..facts("7.0") };
    for poor in [Facts { net_admin: false, ..facts("7.0") }, Facts { wire: on(0), ..facts("7.0") }, unpinned]
    {
        let found = check(&poor, "wire");
        assert!(found.level == Level::Warn && found.fix.is_some(), "{found:?}");
    }
}

#[test]
fn what_the_shunt_needs_is_looked_at() {
    for (path, bridged) in
        [(FastPathKind::Tc, true), (FastPathKind::Xdp, false), (FastPathKind::Flowtable, false)]
    {
        let fine = shunt(path, bridged);
        assert!(examine(&fine).iter().all(|check| check.level == Level::Ok), "{:?}", examine(&fine));
        check(&fine, if bridged { "shunt: bridge" } else { "shunt: routes" });
        check(&fine, "shunt: conntrack");
    }
    let warned = |facts: &Facts, name: &str, fix: &str| {
        let found = check(facts, name);
        assert!(
            found.level > Level::Ok && found.fix.as_ref().is_some_and(|said| said.contains(fix)),
            "{found:?}"
        );
    };
    let mut facts = shunt(FastPathKind::Tc, true);
    facts.settings.insert("net/bridge/bridge-nf-call-iptables", "0".into());
    warned(&facts, "shunt: bridge", "sysctl net.bridge.bridge-nf-call-iptables=1");
    facts.settings.remove("net/bridge/bridge-nf-call-iptables");
    warned(&facts, "shunt: bridge", "modprobe br_netfilter");
    let mut facts = shunt(FastPathKind::Tc, true);
    facts.shunt.as_mut().expect("a shunt").ports[1].bridge = None;
    warned(&facts, "shunt: bridge", "ip link set dev wan0 master");
    let mut facts = shunt(FastPathKind::Tc, false);
    facts.settings.insert("net/ipv4/ip_forward", "0".into());
    facts.settings.insert("net/ipv6/conf/all/forwarding", "0".into());
    warned(&facts, "shunt: routes", "sysctl net.ipv4.ip_forward=1");
    let mut facts = shunt(FastPathKind::Tc, false);
    facts.settings.remove("net/netfilter/nf_conntrack_events");
    warned(&facts, "shunt: conntrack", "modprobe nf_conntrack");
    let probe = Probe { missing: [(Feature::Flowtable, 95)].into() };
    let facts = Facts {
        nftables: Nftables::Known { probe, chains: Vec::new() },
        ..shunt(FastPathKind::Flowtable, false)
    };
    warned(&facts, "shunt: flowtable", "fast_path = \"tc\"");
    let listen = vec!["127.0.0.1:6653".parse().expect("an address")];
    for (is_served, connected, level) in
        [(false, vec![], Level::Warn), (true, vec![], Level::Warn), (true, listen.clone(), Level::Ok)]
    {
        let mut facts = shunt(FastPathKind::OpenFlow, true);
        facts.shunt.as_mut().expect("a shunt").switch =
            Some(Switch { listen: listen.clone(), is_served, connected });
        assert_eq!(check(&facts, "shunt: switch").level, level);
    }
}

#[test]
fn what_the_overlay_needs_is_looked_at() {
    let overlay = |mtu, lacking| OverlayUse {
        congestion: "bbr".into(),
        mtus: vec![("chicago".into(), mtu)],
        lacking,
        groups: vec![("tv".into(), Some(vec!["chicago".into()]))],
        tolerant: Some(TolerantUse { links: 3, beyond: Some(0) }),
    };
    let with = |settings: [(&'static str, &str); 3], overlay| {
        let mut facts = Facts { overlay: Some(overlay), ..good() };
        facts.settings.extend(settings.map(|(name, value)| (name, value.to_owned())));
        facts
    };
    let control = "net/ipv4/tcp_available_congestion_control";
    let fine = [(control, "cubic bbr"), ("net/core/rmem_max", "4194304"), ("net/core/wmem_max", "8388608")];
    let facts = with(fine, overlay(Some(1500), Ok(vec![("chicago".into(), Vec::new())])));
    assert!(examine(&facts).iter().all(|check| check.level == Level::Ok));
    assert_eq!(check(&facts, "overlay: receive buffer").found, "4096 KiB of the wanted 4096 KiB");
    let poor = [(control, "reno cubic"), ("net/core/rmem_max", "212992"), ("net/core/wmem_max", "212992")];
    let old =
        vec![("chicago".into(), vec!["graphs".into(), "groups".into()]), ("sanjose".into(), Vec::new())];
    let facts = with(poor, overlay(Some(1200), Ok(old)));
    for (name, fix) in [
        ("overlay: congestion control", "modprobe tcp_bbr"),
        ("overlay: receive buffer", "sysctl net.core.rmem_max=4194304"),
        ("overlay: send buffer", "sysctl net.core.wmem_max=4194304"),
        ("overlay: MTU to chicago", "raise the MTU"),
        ("overlay: versions", "install this version"),
    ] {
        let check = check(&facts, name);
        assert_eq!(check.level, Level::Warn, "{check:?}");
        assert!(check.fix.as_ref().is_some_and(|told| told.starts_with(fix)), "{check:?}");
    }
    assert_eq!(check(&facts, "overlay: versions").found, "chicago does not know graphs, groups");
    let mut lies = overlay(Some(1500), Ok(Vec::new()));
    (lies.groups[0].1, lies.tolerant) = (Some(Vec::new()), Some(TolerantUse { links: 3, beyond: Some(2) }));
    let facts = with(fine, lies.clone());
    assert_eq!(check(&facts, "overlay: trust").found, "2 announced links exceed the topology");
    let empty = check(&facts, "overlay: group tv");
    assert!(empty.level == Level::Warn && empty.fix.is_some_and(|fix| fix.contains("group join tv")));
    lies.tolerant = Some(TolerantUse { links: 0, beyond: None });
    assert_eq!(check(&with(fine, lies), "overlay: trust").level, Level::Warn);
    let facts = with(fine, overlay(None, Err("it does not run".into())));
    assert_eq!(check(&facts, "overlay: group tv").found, "members: chicago");
    assert_eq!(check(&facts, "overlay: MTU to chicago").found, "there is no route to its address");
    assert_eq!(check(&facts, "overlay: versions").found, "not known: it does not run");
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let wide = Interface { queues: 64, mtu: Some(9000), ..interface("enp129s0f0np15") };
    let engine = engine(true, wide).engines;
    let all = Facts { engines: engine, shunt: shunt(FastPathKind::OpenFlow, true).shunt, ..poor() };
    for facts in [good(), poor(), all] {
        for width in [40, 60, 80, 120] {
            let text = report(&facts, false, width).out;
            for line in text.lines() {
                // A word that is longer than the room has a line of its own.
                let words = line.trim_start().trim_start_matches("fix: ").trim_start_matches("needed for: ");
                let fits = unicode_width::UnicodeWidthStr::width(line) <= width;
                assert!(fits || words.split_whitespace().count() == 1, "{width}: {line}");
            }
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&text), words(&report(&facts, false, 10_000).out), "no word is lost");
        }
    }
}
