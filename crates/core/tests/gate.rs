//! Which addresses may be dialled for a flow that policy has accepted.

use proptest::prelude::*;
use sidetrack_core::flow::{Destination, Flow, Host, HostName, Intercept, Process, Protocol};
use sidetrack_core::net::{IpSet, embedded_v4};
use sidetrack_core::policy::{
    Action, Carry, Condition, Decision, Denied, Dialled, HostPattern, Match, NEVER_DIAL, Policy, Rule, Seen,
    never_dial,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

fn rule(name: &str, conditions: Vec<Condition>, action: Action) -> Rule {
    Rule { name: name.into(), matcher: Match::new(conditions), action }
}

fn to(nets: &[&str]) -> Condition {
    Condition::To(nets.iter().map(|net| net.parse().expect("a network")).collect())
}

fn host(pattern: &str) -> Condition {
    Condition::Host(vec![pattern.parse::<HostPattern>().expect("a pattern")])
}

fn flow(destination: &str) -> Flow {
    let orig_dst: Destination = destination.parse().expect("a destination");
    let host = match &orig_dst.host {
        Host::Name(name) => Some(name.clone()),
        Host::Ip(_) => None,
    };
    Flow {
        protocol: Protocol::Tcp,
        intercept: Intercept::Socks,
        listener: "in".into(),
        client: "192.0.2.7:4000".parse().expect("an address"),
        orig_dst,
        host,
        process: Some(Process::default()),
        user: None,
    }
}

/// Asks policy like the data path: first about the flow, then about the address.
fn ask(policy: &Policy, destination: &str, ip: &str, is_local: bool) -> Result<(), Denied> {
    let flow = flow(destination);
    let Decision::Verdict(verdict) = policy.decide(&flow, Seen::Nothing) else { panic!("more is asked") };
    let Action::Carry(carry) = &verdict.action else { panic!("{destination} is denied by its name") };
    let dialled = Dialled {
        flow: &flow,
        seen: Seen::Nothing,
        carry,
        ip: ip.parse().expect("an address"),
        name: flow.host.as_ref(),
        is_configured: false,
    };
    policy.admits(&dialled, || is_local)
}

fn by_rule(result: &Result<(), Denied>, name: &str) -> bool {
    matches!(result, Err(Denied::Rule { why, .. }) if **why == *format!("rule '{name}'"))
}

#[test]
fn a_deny_by_network_holds_for_names() {
    let rules = vec![
        rule("web", vec![host("*")], Action::default()),
        rule("inside", vec![to(&["10.0.0.0/8", "fd00::/8"])], Action::Deny),
    ];
    let policy = Policy::new(rules, Action::default());
    for inside in [
        "10.1.2.3",
        "::ffff:10.1.2.3",
        "fd12::1",
        "64:ff9b::10.1.2.3",
        "64:ff9b:1::10.1.2.3",
        "2002:a01:203::1",
    ] {
        assert!(by_rule(&ask(&policy, "www.example:80", inside, true), "inside"), "{inside}");
    }
    for outside in ["192.0.2.1", "2001:db8::1", "64:ff9b::192.0.2.1"] {
        assert_eq!(ask(&policy, "www.example:80", outside, false), Ok(()), "{outside}");
    }
}

#[test]
fn only_a_rule_that_names_host_or_network_goes_before_it() {
    let carry = Action::default;
    let inside = || rule("inside", vec![to(&["10.0.0.0/8"])], Action::Deny);
    for (earlier, passes) in [
        (vec![host("db.example")], true),
        (vec![to(&["10.1.0.0/16"])], true),
        (vec![host("*.example"), to(&["10.1.0.0/16"])], true),
        (vec![host("*.example")], false),
        (vec![host("*")], false),
        (vec![host("other.example")], false),
        (vec![to(&["10.2.0.0/16"])], false),
        (vec![Condition::Port([(5432, 5432)].into_iter().collect())], false),
    ] {
        let policy = Policy::new(vec![rule("earlier", earlier.clone(), carry()), inside()], carry());
        let result = ask(&policy, "db.example:5432", "10.1.2.3", false);
        assert_eq!(result.is_ok(), passes, "{earlier:?}: {result:?}");
        let policy = Policy::new(vec![inside(), rule("later", earlier.clone(), carry())], carry());
        assert!(
            by_rule(&ask(&policy, "db.example:5432", "10.1.2.3", false), "inside"),
            "{earlier:?} comes too late"
        );
    }
}

#[test]
fn other_conditions_of_the_rule_still_count() {
    let from = |net: &str| Condition::From([net.parse().expect("a network")].into_iter().collect());
    let policy = |conditions| Policy::new(vec![rule("inside", conditions, Action::Deny)], Action::default());
    let asked = |conditions| ask(&policy(conditions), "a.example:80", "10.0.0.1", false);
    assert!(by_rule(&asked(vec![to(&["10.0.0.0/8"]), from("192.0.2.0/24")]), "inside"));
    assert_eq!(asked(vec![to(&["10.0.0.0/8"]), from("198.51.100.0/24")]), Ok(()));
    let of_process = policy(vec![to(&["10.0.0.0/8"]), Condition::Uid(vec![7])]);
    assert!(of_process.asks_process_of_addresses());
    assert_eq!(
        ask(&of_process, "a.example:80", "10.0.0.1", false),
        Ok(()),
        "the process is known, and another"
    );
    let unknown = Flow { process: None, ..flow("a.example:80") };
    let name = unknown.host.as_ref();
    let ip = "10.0.0.1".parse().unwrap();
    let dialled = Dialled {
        flow: &unknown,
        seen: Seen::Nothing,
        carry: &Carry::default(),
        ip,
        name,
        is_configured: false,
    };
    assert!(by_rule(&of_process.admits(&dialled, || false), "inside"), "what is not known lets nothing pass");
}

#[test]
fn some_networks_are_dialled_only_where_a_rule_names_them() {
    let open = Policy::new(Vec::new(), Action::default());
    for never in [
        "169.254.169.254",
        "0.0.0.0",
        "0.1.2.3",
        "::",
        "fe80::1",
        "fd00:ec2::254",
        "64:ff9b::169.254.169.254",
    ] {
        for is_local in [true, false] {
            let result = ask(&open, "a.example:80", never, is_local);
            assert!(matches!(result, Err(Denied::Never { .. })), "{never}: {result:?}");
        }
    }
    for loopback in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
        assert!(
            ask(&open, "a.example:80", loopback, false).is_err(),
            "{loopback} for a client of another host"
        );
        assert_eq!(ask(&open, "a.example:80", loopback, true), Ok(()), "{loopback} for one of this host");
    }
    let metadata = |conditions| {
        let policy = Policy::new(vec![rule("metadata", conditions, Action::default())], Action::default());
        ask(&policy, "meta.example:80", "169.254.169.254", false)
    };
    assert_eq!(metadata(vec![host("meta.example")]), Ok(()));
    assert_eq!(metadata(vec![to(&["169.254.169.254"])]), Ok(()));
    assert!(metadata(vec![host("*.example")]).is_err(), "a pattern names no host");
    assert!(metadata(vec![to(&["0.0.0.0/0"])]).is_err(), "all addresses are none in particular");
    assert!(metadata(vec![]).is_err());
    let off = open.with_never_dial(IpSet::default());
    assert_eq!(ask(&off, "a.example:80", "169.254.169.254", false), Ok(()));
}

#[test]
fn what_a_client_says_about_itself_names_nothing() {
    let policy =
        Policy::new(vec![rule("meta", vec![host("meta.example")], Action::default())], Action::default());
    // The client dialled the address; the name was only in its first bytes.
    let flow = Flow { host: Some("meta.example".parse().unwrap()), ..flow("169.254.169.254:80") };
    let ip = "169.254.169.254".parse().unwrap();
    let Action::Carry(carry) = &policy.rules()[0].action else { panic!("it denies") };
    let dialled = Dialled { flow: &flow, seen: Seen::Nothing, carry, ip, name: None, is_configured: false };
    assert!(policy.admits(&dialled, || true).is_err());
    assert_eq!(
        policy.admits(&Dialled { is_configured: true, ..dialled }, || false),
        Ok(()),
        "the file names it"
    );
}

#[test]
fn the_written_networks_are_networks() {
    assert_eq!(never_dial().nets().len(), NEVER_DIAL.len());
}

#[test]
fn addresses_inside_addresses_are_seen() {
    let v4 = |text: &str| embedded_v4(text.parse().unwrap());
    let lo = Some(Ipv4Addr::LOCALHOST);
    for text in ["64:ff9b::7f00:1", "64:ff9b:1:ffff::7f00:1", "2002:7f00:1::", "::127.0.0.1"] {
        assert_eq!(v4(text), lo, "{text}");
    }
    for text in ["::", "::1", "2001:db8::7f00:1", "127.0.0.1", "64:ff9c::7f00:1"] {
        assert_eq!(v4(text), None, "{text}");
    }
}

proptest! {
    /// If a rule before all rules that carry denies an address, a flow to a name is never carried to that address: neither
    /// bare nor inside an IPv6 address.
    #[test]
    fn a_name_leads_nowhere_an_address_does_not(bits in any::<u32>(), length in 0_u8..=32, seed in any::<u32>()) {
        let net = sidetrack_core::net::IpNet::new(Ipv4Addr::from(bits).into(), length);
        let denied: IpSet = [net].into_iter().collect();
        let rules = vec![
            rule("net", vec![Condition::To(denied.clone())], Action::Deny),
            rule("rest", vec![host("a.example")], Action::default()),
        ];
        let policy = Policy::new(rules, Action::default()).with_never_dial(IpSet::default());
        let near = Ipv4Addr::from(bits ^ (seed >> length.min(31)));
        let far = Ipv4Addr::from(seed);
        for ip in [near, far] {
            let mapped = IpAddr::V6(ip.to_ipv6_mapped());
            let translated = IpAddr::V6(Ipv6Addr::from(0x0064_ff9b_u128 << 96 | u128::from(u32::from(ip))));
            for form in [IpAddr::V4(ip), mapped, translated] {
                let name: HostName = "a.example".parse().unwrap();
                let flow = flow("a.example:80");
                let dialled = Dialled {
                    flow: &flow, seen: Seen::Nothing, carry: &Carry::default(), ip: form, name: Some(&name), is_configured: false,
                };
                prop_assert_eq!(policy.admits(&dialled, || false).is_err(), denied.contains(ip.into()));
                prop_assert!(policy.may_be_denied(form) || !denied.contains(ip.into()));
            }
        }
    }
}

#[test]
fn deliveries_are_asked_about_with_every_address() {
    let carry = |name: &str, conditions| rule(name, conditions, Action::Carry(Carry::default().into()));
    let rules = vec![
        carry("all-of-good", vec![host("good.example")]),
        rule("bad", vec![host("bad.example")], Action::Deny),
        carry("all", vec![]),
        rule("inside", vec![to(&["10.0.0.0/8"])], Action::Deny),
    ];
    let policy = Policy::new(rules, Action::Deny);
    let ask =
        |destination: &str, ip: &str| policy.delivers(&flow(destination), ip.parse().expect("an address"));
    assert!(by_rule(&ask("x.example:80", "10.1.2.3"), "inside"), "deny rules with networks go first");
    assert!(by_rule(&ask("10.1.2.3:80", "10.1.2.3"), "inside"));
    assert!(by_rule(&ask("x.example:80", "64:ff9b::10.1.2.3"), "inside"));
    assert!(by_rule(&ask("x.example:80", "::ffff:10.1.2.3"), "inside"));
    assert!(by_rule(&ask("bad.example:80", "192.0.2.1"), "bad"));
    assert_eq!(ask("x.example:80", "192.0.2.1"), Ok(()));
    assert_eq!(ask("good.example:80", "10.1.2.3"), Ok(()), "an earlier rule for the exact host");
    let only_default = Policy::new(Vec::new(), Action::Deny);
    let to = "192.0.2.1".parse().expect("an address");
    assert_eq!(only_default.delivers(&flow("x.example:80"), to), Ok(()), "the default is not for deliveries");
}
