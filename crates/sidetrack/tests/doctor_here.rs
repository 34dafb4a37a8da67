//! `sidetrack doctor` on the machine at hand. Without a test harness: looking starts a command, and that is for
//! processes with one thread only.

use sidetrack::cli::doctor::report;
use sidetrack::config::Config;
use sidetrack::doctor::{Facts, Isolation, Level, Nftables, examine};

fn main() {
    let facts = Facts::gather(None);
    println!("{}", report(&facts, false, 100).out);
    assert!(facts.nofile.0 > 0 && facts.nofile.0 <= facts.nofile.1, "{:?}", facts.nofile);
    assert!(
        facts.settings.contains_key("net/core/somaxconn") || facts.settings.is_empty(),
        "{:?}",
        facts.settings
    );
    // Root without the right to look, or an ordinary user with it, would be a fault of ours.
    assert_eq!(facts.net_admin, !matches!(facts.nftables, Nftables::NotAllowed), "{:?}", facts.nftables);
    let checks = examine(&facts);
    for check in &checks {
        let complete = !check.name.is_empty() && !check.found.is_empty() && !check.needed_for.is_empty();
        assert!(complete, "{check:?}");
    }
    let run = checks.iter().find(|check| check.name == "run without root").expect("it is looked at");
    assert_eq!(run.level == Level::Ok, matches!(facts.isolation, Isolation::Works(_)), "{run:?}");
    let json: serde_json::Value = serde_json::from_str(&report(&facts, true, 100).out).expect("JSON");
    assert_eq!(json["checks"].as_array().map(Vec::len), Some(checks.len()));
    interfaces();
    println!("doctor_here: ok");
}

/// Loopback is everywhere, and an interface of this name nowhere.
fn interfaces() {
    let text = "version = 1\n[[listen]]\nname = 'fast'\nkind = 'engine'\naddress = '192.0.2.10:443'\n\
                interfaces = ['lo', 'no-such-link']\nto = '192.0.2.11:443'\nengine = { io = 'xdp' }\n\
                [shunt]\nforwarding = 'routed'\n[[shunt.port]]\nnumber = 1\ninterface = 'lo'\n\
                [[shunt.port]]\nnumber = 2\ninterface = 'no-such-link'\n";
    let config =
        Config::from_text("doctor.toml", text).unwrap_or_else(|error| panic!("{}", error.render(false)));
    let facts = Facts::gather(Some(&config));
    let mtu = std::fs::read_to_string("/sys/class/net/lo/mtu").expect("loopback has one");
    let [lo, absent] = &facts.engines[0].interfaces[..] else { panic!("{:?}", facts.engines) };
    assert_eq!(lo.mtu.map(|mtu| mtu.to_string()).as_deref(), Some(mtu.trim()));
    assert!(lo.queues >= 1 && lo.offloads.gro.is_some(), "{lo:?}");
    assert_eq!((absent.mtu, absent.running), (None, false));
    let checks = examine(&facts);
    let level = |name: &str| checks.iter().find(|check| check.name == name).map(|check| check.level);
    assert_eq!(level("no-such-link"), Some(Level::Fail));
    for name in [
        "lo: XDP",
        "lo: queues",
        "lo: GRO",
        "lo: checksums",
        "lo: MTU",
        "shunt: tc",
        "shunt: routes",
        "shunt: conntrack",
    ] {
        assert!(level(name).is_some(), "{name}: {checks:?}");
    }
}
