//! `[dns]`: what it says, mistakes in it, and what it means for flows that the kernel could forward alone.

use crate::load;
use sidetrack::config::{Config, DnsMode, NameStanding};
use sidetrack_core::policy::KernelAction;

const GATEWAY: &str = "[[listen]]\nname = \"out\"\nkind = \"redirect\"\nlocal = false\nforwarded = true\ninterfaces = [\"lan0\"]\n";

fn file(dns: &str, more: &str) -> String {
    format!("version = 1\ndefault = \"deny\"\n[dns]\n{dns}{GATEWAY}{more}")
}

fn read(text: &str) -> Config {
    load(text).unwrap()
}

#[test]
fn the_defaults_let_private_networks_ask_and_represent_names() {
    let config = read(&file("address = \"10.0.0.1:53\"\n", ""));
    let dns = config.dns.expect("a resolver");
    assert_eq!((dns.mode, dns.max_queries_per_s, dns.servers.len()), (DnsMode::Name, 500, 0));
    for (ip, may) in [
        ("10.9.9.9", true),
        ("127.0.0.1", true),
        ("fe80::1", true),
        ("fd00::1", true),
        ("192.0.2.1", false),
        ("2001:db8::1", false),
    ] {
        assert_eq!(dns.from.contains(ip.parse().expect("an address")), may, "{ip}");
    }
    let keys = "address = [\"10.0.0.1:53\", \"[::1]:53\"]\nmode = \"resolve\"\nfrom = \"192.0.2.0/24\"\n\
                servers = [\"9.9.9.9\", \"[2620:fe::fe]:5353\"]\nmax_queries_per_s = 7\n";
    let dns = read(&file(keys, "")).dns.expect("a resolver");
    assert_eq!((dns.mode, dns.max_queries_per_s, dns.addresses.len()), (DnsMode::Resolve, 7, 2));
    assert_eq!(
        dns.servers,
        ["9.9.9.9:53", "[2620:fe::fe]:5353"].map(|text| text.parse().expect("an address"))
    );
}

#[test]
fn mistakes_are_told() {
    for (keys, said) in [
        ("mode = \"name\"\n", "nothing says where queries are answered"),
        ("address = \"ns.example:53\"\n", "is not an address with a port"),
        ("address = \"10.0.0.1:53\"\nmode = \"both\"\n", "is none of the words allowed here"),
        ("address = \"10.0.0.1:53\"\nservers = \"dns.example\"\n", "is not a name server"),
        ("address = \"10.0.0.1:53\"\nservers = \"10.0.0.1\"\n", "it would ask itself"),
        ("address = \"10.0.0.1:53\"\nservers = []\n", "0 name servers are out of range"),
        ("address = \"10.0.0.1:53\"\nmax_queries_per_s = 0\n", "0 is out of range"),
    ] {
        let found = load(&file(keys, "")).unwrap_err();
        assert!(found.contains(said), "{keys}: {found}");
    }
}

#[test]
fn a_listener_that_leaves_the_represented_addresses_out_is_told() {
    let narrow = GATEWAY.replace("interfaces = [\"lan0\"]", "dst = [\"192.0.2.0/24\"]");
    let warned = |listener: &str, dns: &str| {
        let config = read(&format!(
            "version = 1\ndefault = \"deny\"\n[dns]\naddress = \"10.0.0.1:53\"\n{dns}{listener}"
        ));
        config.warnings.iter().any(|warning| warning.to_string().contains("198.18.0.0/15"))
    };
    assert!(warned(&narrow, "") && !warned(GATEWAY, "") && !warned(&narrow, "mode = \"resolve\"\n"));
    assert!(!warned(&narrow.replace("\"192.0.2.0/24\"", "\"192.0.2.0/24\", \"198.18.0.0/15\""), ""));
}

#[test]
fn represented_addresses_are_never_left_to_the_kernel() {
    let rule = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n";
    let client = "10.0.0.9".parse().expect("an address");
    let taken = |text: &str, to: &str| {
        let config = read(text);
        let paths = config.kernel_paths(&config.listeners[0]);
        let to = to.parse().expect("an address");
        paths
            .iter()
            .flat_map(|(_, lines)| lines)
            .find(|line| line.matches.contains(client, to))
            .map(|line| line.action)
    };
    let with = file("address = \"10.0.0.1:53\"\n", rule);
    let without = format!("version = 1\ndefault = \"deny\"\n{GATEWAY}{rule}");
    assert_eq!(taken(&with, "198.19.9.9:80"), Some(KernelAction::UserSpace));
    assert_eq!(taken(&with, "192.0.2.1:80"), Some(KernelAction::Accept));
    assert_eq!(taken(&without, "198.19.9.9:80"), Some(KernelAction::Accept));
}

#[test]
fn a_name_is_denied_if_no_flow_to_it_can_pass() {
    let rules = "[[rule]]\nname = \"mail\"\nmatch = { host = \"mail.example\", port = 25 }\naction = \"deny\"\n\
                 [[rule]]\nname = \"own\"\nmatch = { host = \"*.example\" }\ncarrier = \"direct\"\n\
                 [[rule]]\nname = \"far\"\nmatch = { host = \"*.far.test\", from = \"10.0.0.0/8\" }\ncarrier = \"socks5://192.0.2.1:1080\"\n";
    let config = read(&file("address = \"10.0.0.1:53\"\n", rules));
    for (name, standing) in [
        ("mail.example", NameStanding::ResolvedHere),
        ("x.far.test", NameStanding::ResolvedElsewhere),
        ("ads.test", NameStanding::Denied),
    ] {
        assert_eq!(config.standing(&name.parse().expect("a name")), standing, "{name}");
    }
}
