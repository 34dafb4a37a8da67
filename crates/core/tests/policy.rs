//! Policy: the first match wins, data is requested only where it can change the answer, and the kernel path never allows
//! more than the rules do.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Flow, HostName, Intercept, Process, Protocol};
use sidetrack_core::http::message::Method;
use sidetrack_core::http::uri::Resource;
use sidetrack_core::net::{IpNet, IpSet, PortSet};
use sidetrack_core::policy::{
    Action, Capture, Carry, Condition, Decision, Dial, HostFile, HostList, HostPattern, KernelAction,
    KernelPath, KernelRule, Match, Policy, ProxyVersion, Rule, Seen, TraceOutcome, Traffic, Url, UrlPattern,
    Verdict, Warm, without_user_space,
};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

fn nets(texts: &[&str]) -> IpSet {
    texts.iter().map(|text| text.parse::<IpNet>().unwrap()).collect()
}

fn ports(ranges: &[(u16, u16)]) -> PortSet {
    ranges.iter().copied().collect()
}

fn hosts(texts: &[&str]) -> Condition {
    Condition::Host(texts.iter().map(|text| text.parse().unwrap()).collect())
}

fn rule(name: &str, conditions: Vec<Condition>, action: Action) -> Rule {
    Rule { name: name.into(), matcher: Match::new(conditions), action }
}

fn hop(text: &str) -> Action {
    let carrier = Carrier::Hops(vec![text.parse().unwrap()]);
    Action::Carry(Arc::new(Carry { carrier, ..Carry::default() }))
}

fn flow(client: &str, dst: &str) -> Flow {
    Flow {
        protocol: Protocol::Tcp,
        intercept: Intercept::Redirect,
        listener: "lan".into(),
        client: client.parse().unwrap(),
        orig_dst: dst.parse().unwrap(),
        host: None,
        process: None,
        user: None,
    }
}

fn verdict(decision: Decision) -> Verdict {
    match decision {
        Decision::Verdict(verdict) => verdict,
        other => panic!("no verdict yet: {other:?}"),
    }
}

#[test]
fn files_words_and_urls_are_asked_as_far_as_they_are_known() {
    let list = HostList::parse(b"||ads.example^\n");
    let file = HostFile { path: "ads.txt".into(), list: Arc::new(list) };
    let policy = Policy::new(
        vec![
            rule("file", vec![Condition::HostFile(vec![file])], Action::Deny),
            rule("word", vec![Condition::HostContains(vec!["casino".into(), "bücher".into()])], Action::Deny),
            rule("url", vec![Condition::Url(vec![UrlPattern::new("*://*/banner/*")])], Action::Deny),
        ],
        Action::default(),
    );
    assert!(policy.asks_url());
    let flow = flow("192.0.2.1:9", "198.51.100.1:443");
    assert!(matches!(policy.decide(&flow, Seen::Nothing), Decision::NeedFirstBytes { .. }));
    fn ruled(policy: &Policy, flow: &Flow, seen: Seen<'_>) -> Option<String> {
        verdict(policy.decide(flow, seen)).rule.map(|rule| rule.to_string())
    }
    for (name, wanted) in [
        ("www.ads.example", Some("file")),
        ("bigcasino.example", Some("word")),
        ("web.example", None),
        ("die-BÜCHER.example", Some("word")),
    ] {
        let host: HostName = name.parse().unwrap();
        assert_eq!(ruled(&policy, &flow, Seen::FirstBytes(Some(&host))).as_deref(), wanted, "{name}");
        for path in ["banner/1.png", "%62anner/1.png", "a/../b%61nner/x"] {
            let url = format!("http://{name}/{path}");
            let url = Url::of(&Resource::parse(url.as_bytes(), &Method::Get).unwrap());
            let seen = Seen::Request { host: Some(&host), url: &url };
            assert_eq!(ruled(&policy, &flow, seen).as_deref(), wanted.or(Some("url")), "{url:?}");
        }
    }
    assert_eq!(ruled(&policy, &flow, Seen::FirstBytes(None)), None, "nobody knows its name");
    let trace: Vec<String> =
        policy.trace(&flow, Seen::FirstBytes(None)).iter().map(ToString::to_string).collect();
    assert_eq!(
        trace,
        [
            "1. 'file': no: not host_file ads.txt",
            "2. 'word': no: not host_contains casino, bücher",
            "3. 'url': no: not url *://*/banner/*"
        ]
    );
}

#[test]
fn the_first_rule_that_matches_wins() {
    let policy = Policy::new(
        vec![
            rule("narrow", vec![Condition::To(nets(&["10.0.0.0/24"]))], hop("socks5://gw")),
            rule("wide", vec![Condition::To(nets(&["10.0.0.0/8"]))], Action::default()),
        ],
        Action::Deny,
    );
    for (dst, rule, why) in [
        ("10.0.0.1:1", Some("narrow"), "rule 'narrow'"),
        ("10.0.1.1:1", Some("wide"), "rule 'wide'"),
        ("11.0.0.1:1", None, "no rule matched; default deny"),
        // A destination that is known only by name is not in any set of addresses.
        ("a.example:1", None, "no rule matched; default deny"),
    ] {
        let verdict = verdict(policy.decide(&flow("192.0.2.1:9", dst), Seen::Nothing));
        assert_eq!((verdict.rule.as_deref(), &*verdict.why), (rule, why), "{dst}");
    }
}

#[test]
fn every_condition_holds_and_fails() {
    let mut base = flow("192.0.2.1:9", "10.0.0.1:443");
    base.user = Some("ann".into());
    base.process = Some(Process { name: Some("curl".into()), uid: Some(1000), ..Process::default() });
    base.host = Some("www.example.nl".parse().unwrap());
    let cases: Vec<(Condition, Condition)> = vec![
        (Condition::From(nets(&["192.0.2.0/24"])), Condition::From(nets(&["192.0.3.0/24", "::/0"]))),
        (Condition::To(nets(&["10.0.0.1", "fd00::/8"])), Condition::To(nets(&["10.0.0.2"]))),
        (Condition::Port(ports(&[(1, 2), (400, 443)])), Condition::Port(ports(&[(444, 500)]))),
        (Condition::Listener(vec!["x".into(), "lan".into()]), Condition::Listener(vec!["x".into()])),
        (Condition::Intercept(vec![Intercept::Redirect]), Condition::Intercept(vec![Intercept::Socks])),
        (Condition::Protocol(Protocol::Tcp), Condition::Protocol(Protocol::Udp)),
        (Condition::SocksUser(vec!["ann".into()]), Condition::SocksUser(vec!["Ann".into()])),
        (Condition::Process(vec!["curl".into()]), Condition::Process(vec!["cur".into()])),
        (Condition::Uid(vec![0, 1000]), Condition::Uid(vec![0])),
        (hosts(&["*.Example.NL"]), hosts(&["example.nl", "*.www.example.nl"])),
    ];
    for (holds, fails) in cases {
        let name = holds.to_string();
        let decide = |condition| {
            let policy = Policy::new(vec![rule("r", vec![condition], Action::default())], Action::Deny);
            verdict(policy.decide(&base, Seen::Nothing)).rule.is_some()
        };
        assert!(decide(holds), "{name}");
        assert!(!decide(fails), "{name}");
    }
}

#[test]
fn an_ipv4_mapped_client_is_the_ipv4_client() {
    let policy = Policy::new(
        vec![rule("r", vec![Condition::From(nets(&["192.0.2.0/24"]))], Action::default())],
        Action::Deny,
    );
    let mapped = flow("[::ffff:192.0.2.1]:9", "10.0.0.1:1");
    assert!(verdict(policy.decide(&mapped, Seen::Nothing)).rule.is_some());
}

#[test]
fn first_bytes_are_asked_for_only_where_they_can_change_the_answer() {
    let policy = Policy::new(
        vec![
            rule(
                "name",
                vec![hosts(&["*.example"]), Condition::Port(ports(&[(443, 443)]))],
                hop("socks6://gw"),
            ),
            rule("rest", vec![], Action::default()),
        ],
        Action::Deny,
    )
    .with_first_bytes_ms(42);
    let ssh = flow("192.0.2.1:9", "10.0.0.1:22");
    assert_eq!(verdict(policy.decide(&ssh, Seen::Nothing)).rule.as_deref(), Some("rest"), "never held");
    let mut tls = flow("192.0.2.1:9", "10.0.0.1:443");
    let needs = Decision::NeedFirstBytes { rule: "name".into(), wait_ms: 42 };
    assert_eq!(policy.decide(&tls, Seen::Nothing), needs);
    let name: HostName = "a.example".parse().unwrap();
    let other: HostName = "a.test".parse().unwrap();
    let decided = |seen| verdict(policy.decide(&tls, seen)).rule.unwrap();
    assert_eq!(&*decided(Seen::FirstBytes(Some(&name))), "name");
    assert_eq!(&*decided(Seen::FirstBytes(Some(&other))), "rest");
    assert_eq!(&*decided(Seen::FirstBytes(None)), "rest");
    tls.host = Some(other);
    assert_eq!(verdict(policy.decide(&tls, Seen::Nothing)).rule.as_deref(), Some("rest"), "known: no wait");
    let by_name = flow("192.0.2.1:9", "b.example:443");
    assert_eq!(verdict(policy.decide(&by_name, Seen::Nothing)).rule.as_deref(), Some("name"));
}

#[test]
fn the_process_is_asked_for_before_the_bytes_and_only_when_needed() {
    let both =
        vec![hosts(&["*"]), Condition::Process(vec!["curl".into()]), Condition::Port(ports(&[(80, 80)]))];
    let policy = Policy::new(vec![rule("r", both, Action::default())], Action::Deny);
    assert!(verdict(policy.decide(&flow("192.0.2.1:9", "10.0.0.1:22"), Seen::Nothing)).rule.is_none());
    let mut http = flow("192.0.2.1:9", "10.0.0.1:80");
    assert_eq!(policy.decide(&http, Seen::Nothing), Decision::NeedProcess { rule: "r".into() });
    http.process = Some(Process::default());
    assert!(
        verdict(policy.decide(&http, Seen::Nothing)).rule.is_none(),
        "not found: does not match, no wait"
    );
    http.process = Some(Process { name: Some("curl".into()), ..Process::default() });
    assert!(matches!(policy.decide(&http, Seen::Nothing), Decision::NeedFirstBytes { .. }));
}

#[test]
fn the_trace_names_the_condition_that_failed() {
    let policy = Policy::new(
        vec![
            rule("a", vec![Condition::Port(ports(&[(1, 9)])), hosts(&["x.example"])], Action::Deny),
            rule("b", vec![hosts(&["x.example"])], Action::Deny),
            rule("c", vec![], Action::Deny),
        ],
        Action::Deny,
    );
    let flow = flow("192.0.2.1:9", "10.0.0.1:80");
    let outcomes: Vec<_> = policy.trace(&flow, Seen::Nothing).into_iter().map(|line| line.outcome).collect();
    let failed = |text: &str| TraceOutcome::Failed { condition: text.into() };
    assert_eq!(outcomes, [failed("port 1-9"), TraceOutcome::NeedsFirstBytes, TraceOutcome::NotReached]);
    let explained = policy.explain(&flow, None);
    assert_eq!(explained.verdict.rule.as_deref(), Some("c"));
    assert_eq!(explained.waits, Some(("b".into(), Policy::FIRST_BYTES_MS)));
    assert_eq!(explained.trace[1].outcome, failed("host x.example"));
}

#[test]
fn host_patterns_read_and_match() {
    let matches =
        |pattern: &str, host: &str| pattern.parse::<HostPattern>().unwrap().matches(&host.parse().unwrap());
    assert!(matches("*.example", "a.example") && matches("*.example", "a.b.EXAMPLE."));
    assert!(!matches("*.example", "example") && !matches("*.example", "badexample"));
    assert!(matches("Example", "example") && !matches("example", "a.example") && matches("*", "x"));
    for bad in ["", "*.", "a*.example", "*a.example", "a.*", "**", "*.*.example", "a b"] {
        assert!(bad.parse::<HostPattern>().is_err(), "{bad}");
    }
}

#[test]
fn a_match_covers_another_only_if_it_surely_matches_all_of_it() {
    let m = |conditions: Vec<Condition>| Match::new(conditions);
    let wide = m(vec![Condition::To(nets(&["10.0.0.0/8"]))]);
    let narrow = m(vec![Condition::To(nets(&["10.1.0.0/16"])), Condition::Port(ports(&[(1, 2)]))]);
    assert!(
        wide.covers(&narrow) && !narrow.covers(&wide) && m(vec![]).covers(&wide) && !wide.covers(&m(vec![]))
    );
    assert!(m(vec![hosts(&["*.example"])]).covers(&m(vec![hosts(&["a.example", "*.b.example"])])));
    assert!(!m(vec![hosts(&["*.example"])]).covers(&m(vec![hosts(&["example"])])));
    assert!(!m(vec![hosts(&["a.example"])]).covers(&m(vec![hosts(&["*.example"])])));
}

#[test]
fn networks_read_as_they_are_written() {
    for text in ["10.0.0.0/8", "0.0.0.0/0", "192.0.2.1", "2001:db8::/32", "::/0", "::1"] {
        assert_eq!(text.parse::<IpNet>().unwrap().to_string(), text);
    }
    assert_eq!("::ffff:10.0.0.0/104".parse::<IpNet>().unwrap().to_string(), "10.0.0.0/8");
    for bad in ["", "10.0.0.0/33", "10.0.0.1/8", "10.0.0/8", "::1/129", "10.0.0.0/", "a/8", "10.0.0.0/+8"] {
        assert!(bad.parse::<IpNet>().is_err(), "{bad}");
    }
    let set = nets(&["10.0.0.0/9", "10.128.0.0/9", "fd00::/8"]);
    assert!(set.covers(&nets(&["10.0.0.0/8"])) && !set.covers(&nets(&["10.0.0.0/7"])));
    assert!(set.overlaps(&nets(&["fdff::1"])) && !set.overlaps(&nets(&["11.0.0.0/8", "fe00::/8"])));
}

#[test]
fn sets_are_written_with_the_fewest_networks() {
    let text = |set: IpSet| set.to_string();
    assert_eq!(text(nets(&["10.0.0.0/30"]).difference(&nets(&["10.0.0.1"]))), "10.0.0.0, 10.0.0.2/31");
    assert_eq!(text(IpSet::all().difference(&nets(&["0.0.0.0/0"]))), "::/0");
    assert_eq!(text(IpSet::all().difference(&nets(&["0.0.0.0/1", "::/0"]))), "128.0.0.0/1");
    assert_eq!(text(IpSet::all().difference(&IpSet::all())), "");
    assert_eq!(text(nets(&["10.0.0.0/9", "10.128.0.0/9"]).intersection(&IpSet::all())), "10.0.0.0/8");
    let last = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    assert_eq!(text(nets(&["ffff::/16"]).intersection(&nets(&[last, "fffe::/16"]))), last);
    assert_eq!(nets(&["::/0"]).difference(&nets(&[last])).nets().len(), 128);
    assert_eq!(PortSet::all().difference(&ports(&[(80, 80), (65535, 65535)])).to_string(), "1-79, 81-65534");
    assert_eq!(ports(&[(1, 9)]).intersection(&ports(&[(5, 7), (9, 20)])).to_string(), "5-7, 9");
}

#[test]
fn lines_are_cut_around_what_user_space_keeps() {
    let policy = Policy::new(
        vec![
            rule(
                "names",
                vec![Condition::Port(ports(&[(443, 443)])), hosts(&["*.example"])],
                hop("socks5://gw"),
            ),
            rule("no", vec![Condition::To(nets(&["10.0.0.0/8"]))], Action::Deny),
        ],
        Action::default(),
    );
    let cut = without_user_space(policy.kernel_path(&lan(Intercept::Redirect)));
    let outside = IpSet::all().difference(&nets(&["10.0.0.0/8"]));
    assert_eq!(lines(&cut), [format!("default: to {outside} port 1-442, 444-65535 Accept masquerade")]);
}

fn lan(intercept: Intercept) -> Capture {
    let traffic = Traffic::Anywhere { intercept, forwarded: true, src: None, dst: None, ports: None };
    Capture { listener: "lan".into(), protocol: Protocol::Tcp, traffic }
}

fn lines(rules: &[KernelRule]) -> Vec<String> {
    let part = |text: &str, set: Option<String>| set.map(|set| format!("{text} {set} ")).unwrap_or_default();
    let line = |rule: &KernelRule| {
        format!(
            "{}: {}{}{}{:?}{}",
            rule.rule.as_deref().unwrap_or("default"),
            part("from", rule.matches.from.as_ref().map(ToString::to_string)),
            part("to", rule.matches.to.as_ref().map(ToString::to_string)),
            part("port", rule.matches.port.as_ref().map(ToString::to_string)),
            rule.action,
            if rule.masquerade { " masquerade" } else { "" }
        )
    };
    rules.iter().map(line).collect()
}

#[test]
fn rules_for_udp_change_nothing_of_what_the_kernel_does_with_connections() {
    let rules = |protocol| vec![rule("r", vec![Condition::Protocol(protocol)], Action::Deny)];
    let path = |rules| lines(&Policy::new(rules, Action::default()).kernel_path(&lan(Intercept::Redirect)));
    assert_eq!(path(rules(Protocol::Udp)), path(vec![]));
    assert!(path(rules(Protocol::Tcp)).is_empty(), "all connections are denied");
}

#[test]
fn the_kernel_path_respects_earlier_rules() {
    let rules = vec![
        rule("names", vec![Condition::Port(ports(&[(443, 443)])), hosts(&["*.example"])], hop("socks5://gw")),
        rule("bulk", vec![Condition::To(nets(&["10.0.0.0/8"]))], Action::default()),
        rule("no", vec![Condition::To(nets(&["10.9.0.0/16", "11.0.0.0/8"]))], Action::Deny),
        rule("never", vec![Condition::SocksUser(vec!["a".into()])], Action::Deny),
        rule("move", vec![Condition::Port(ports(&[(80, 80)]))], moved("192.0.2.80:8080")),
    ];
    let policy = Policy::new(rules, Action::default());
    let path = policy.kernel_path(&lan(Intercept::Redirect));
    assert_eq!(
        lines(&path),
        [
            "names: port 443 UserSpace",
            "bulk: to 10.0.0.0/8 Accept masquerade",
            "no: to 10.9.0.0/16, 11.0.0.0/8 UserSpace",
            "move: to 0.0.0.0/0 port 80 Dnat(192.0.2.80:8080) masquerade",
            "move: port 80 UserSpace",
            "default: Accept masquerade",
        ]
    );
}

fn moved(to: &str) -> Action {
    Action::Carry(Arc::new(Carry { to: Some(to.parse().unwrap()), ..Carry::default() }))
}

fn web(address: &str, server: &str) -> Capture {
    let (address, server) = (address.parse().unwrap(), server.parse().unwrap());
    Capture::reverse("web".into(), Protocol::Tcp, address, &server).unwrap()
}

#[test]
fn a_reverse_listener_becomes_nat() {
    let all = Policy::new(vec![], Action::default());
    let path = |policy: &Policy, address, server| lines(&policy.kernel_path(&web(address, server)));
    assert_eq!(path(&all, "192.0.2.1:80", "10.0.0.2:8080"), ["default: Dnat(10.0.0.2:8080) masquerade"]);
    assert_eq!(path(&all, "127.0.0.1:80", "127.0.0.1:8080"), ["default: Dnat(127.0.0.1:8080)"]);
    assert!(path(&all, "0.0.0.0:80", "127.0.0.1:8080").is_empty(), "no way to loopback");
    assert!(path(&all, "[::]:80", "10.0.0.2:8080").is_empty(), "no way between families");
    let (address, server) = ("0.0.0.0:1".parse().unwrap(), "a.example:1".parse().unwrap());
    assert!(Capture::reverse("web".into(), Protocol::Tcp, address, &server).is_none());
    let by_source = Policy::new(
        vec![
            rule(
                "to-us",
                vec![Condition::To(nets(&["10.0.0.2"])), Condition::From(nets(&["10.5.0.0/16"]))],
                Action::Deny,
            ),
            rule("else", vec![Condition::To(nets(&["10.0.0.3"]))], Action::Deny),
        ],
        Action::default(),
    );
    assert_eq!(
        path(&by_source, "192.0.2.1:80", "10.0.0.2:8080"),
        ["to-us: from 10.5.0.0/16 UserSpace", "default: Dnat(10.0.0.2:8080) masquerade"]
    );
    assert!(path(&Policy::new(vec![], Action::Deny), "192.0.2.1:80", "10.0.0.2:80").is_empty());
}

#[test]
fn datagrams_are_left_to_the_kernel_where_it_keeps_a_clients_outside_port() {
    let udp = |capture| Capture { protocol: Protocol::Udp, ..capture };
    let path = |policy: &Policy, capture| lines(&policy.kernel_path(&udp(capture)));
    let all = Policy::new(vec![], Action::default());
    assert_eq!(path(&all, web("192.0.2.1:54", "10.0.0.2:54")), ["default: Dnat(10.0.0.2:54) masquerade"]);
    assert!(path(&all, lan(Intercept::Tproxy)).is_empty(), "another port for each server");
    let keep = Action::Carry(Arc::new(Carry { keep_client_address: true, ..Carry::default() }));
    assert_eq!(path(&Policy::new(vec![], keep), lan(Intercept::Tproxy)), ["default: Accept"]);
}

#[test]
fn whatever_needs_us_stays_with_us() {
    let needy: [fn(&mut Carry); 9] = [
        |carry| carry.dial = Dial::Name,
        |carry| carry.proxy_protocol = Some(ProxyVersion::V1),
        |carry| carry.warm = Some(Warm { ready: 1, idle_ms: Warm::IDLE_MS }),
        |carry| carry.idle_timeout_ms = Some(1),
        |carry| carry.lifetime_ms = Some(1),
        |carry| carry.connect_timeout_ms = Some(1),
        |carry| carry.tfo = true,
        |carry| carry.mptcp = true,
        |carry| carry.kernel = KernelPath::Never,
    ];
    for (index, needs) in needy.into_iter().enumerate() {
        let mut carry = Carry::default();
        needs(&mut carry);
        let policy = Policy::new(vec![], Action::Carry(Arc::new(carry)));
        assert!(policy.kernel_path(&lan(Intercept::Redirect)).is_empty(), "option {index}");
    }
    let keep = Carry { keep_client_address: true, ..Carry::default() };
    let policy = Policy::new(vec![], Action::Carry(Arc::new(keep)));
    assert_eq!(lines(&policy.kernel_path(&lan(Intercept::Tproxy))), ["default: Accept"]);
}

/// A few networks, so that rules and flows often match.
fn any_net() -> impl Strategy<Value = IpSet> {
    let net = prop_oneof![
        Just("10.0.0.0/8"),
        Just("10.0.0.0/30"),
        Just("10.0.0.2"),
        Just("fd00::/8"),
        Just("0.0.0.0/0"),
        Just("::/0")
    ];
    proptest::collection::vec(net, 1..3).prop_map(|texts| nets(&texts))
}

fn any_condition() -> impl Strategy<Value = Condition> {
    prop_oneof![
        any_net().prop_map(Condition::From),
        any_net().prop_map(Condition::To),
        (1..4u16, 1..4u16).prop_map(|(a, b)| Condition::Port(ports(&[(a, b)]))),
        prop_oneof![Just("lan"), Just("web"), Just("other")]
            .prop_map(|name| Condition::Listener(vec![name.into()])),
        prop_oneof![Just(Intercept::Redirect), Just(Intercept::Reverse)]
            .prop_map(|kind| Condition::Intercept(vec![kind])),
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)].prop_map(Condition::Protocol),
        Just(Condition::SocksUser(vec!["ann".into()])),
        Just(Condition::Process(vec!["curl".into()])),
        Just(Condition::Uid(vec![0])),
        Just(hosts(&["*.example"])),
    ]
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        3 => Just(Action::default()),
        1 => Just(Action::Deny),
        1 => Just(hop("socks5://gw")),
        1 => prop_oneof![Just("10.0.0.1:3"), Just("[fd00::1]:2"), Just("127.0.0.1:1"), Just("a.example:1")].prop_map(moved),
        1 => any::<(bool, bool)>().prop_map(|(tfo, keep_client_address)| {
            Action::Carry(Arc::new(Carry { tfo, keep_client_address, ..Carry::default() }))
        }),
    ]
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let rules =
        proptest::collection::vec((proptest::collection::vec(any_condition(), 0..4), any_action()), 0..6);
    (rules, any_action()).prop_map(|(rules, default)| {
        let rule_of = |(index, (conditions, action))| rule(&format!("r{index}"), conditions, action);
        Policy::new(rules.into_iter().enumerate().map(rule_of).collect(), default)
    })
}

fn any_ip() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        Just("10.0.0.1"),
        Just("10.0.0.2"),
        Just("10.0.0.9"),
        Just("11.0.0.1"),
        Just("fd00::1"),
        Just("fe00::1")
    ]
    .prop_map(|text| text.parse().unwrap())
}

/// The action of the lines on a packet.
fn filtered(lines: &[KernelRule], from: IpAddr, to: SocketAddr) -> (KernelAction, Option<Arc<str>>) {
    let line = lines.iter().find(|line| line.matches.contains(from, to));
    line.map_or((KernelAction::UserSpace, None), |line| (line.action, line.rule.clone()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// The filter never treats a packet in another way than the rules treat its flow, if they know only addresses.
    #[test]
    fn the_kernel_never_says_more_than_the_rules(policy in any_policy(), from in any_ip(), to in any_ip(), port in 1..4u16) {
        let to = SocketAddr::new(to, port);
        let flow = Flow { client: SocketAddr::new(from, 9), orig_dst: to.into(), ..flow("1.1.1.1:1", "1.1.1.1:1") };
        let (action, by) = filtered(&policy.kernel_path(&lan(Intercept::Redirect)), from, to);
        let decision = policy.decide(&flow, Seen::Nothing);
        match action {
            KernelAction::UserSpace => {}
            KernelAction::Accept | KernelAction::Dnat(_) => {
                let verdict = verdict(decision);
                prop_assert_eq!(&verdict.rule, &by);
                let Action::Carry(carry) = verdict.action else { panic!("denied, but left to the kernel") };
                prop_assert_eq!(&carry.carrier, &Carrier::Direct);
                let dialled = carry.to.clone().unwrap_or(flow.orig_dst).socket_addr().unwrap();
                prop_assert_eq!(dialled, if let KernelAction::Dnat(to) = action { to } else { to });
                prop_assert!(dialled.is_ipv4() == to.is_ipv4());
            }
        }
    }

    /// Without the lines for user space, the filter does the same.
    #[test]
    fn cut_lines_do_the_same(policy in any_policy(), from in any_ip(), to in any_ip(), port in 1..4u16) {
        let to = SocketAddr::new(to, port);
        let whole = policy.kernel_path(&lan(Intercept::Redirect));
        let cut = without_user_space(whole.clone());
        prop_assert!(cut.iter().all(|line| line.action != KernelAction::UserSpace));
        let (action, by) = filtered(&whole, from, to);
        let expected = if action == KernelAction::UserSpace { (action, None) } else { (action, by) };
        prop_assert_eq!(filtered(&cut, from, to), expected);
    }

    /// Sets of addresses behave as sets.
    #[test]
    fn sets_are_sets(a in any_net(), b in any_net(), ip in any_ip(), c in any_ip()) {
        for ip in [ip, c] {
            prop_assert_eq!(a.intersection(&b).contains(ip), a.contains(ip) && b.contains(ip));
            prop_assert_eq!(a.difference(&b).contains(ip), a.contains(ip) && !b.contains(ip));
        }
        let rebuilt: IpSet = a.difference(&b).nets().iter().copied().collect();
        prop_assert_eq!(rebuilt.covers(&a.difference(&b)), true);
        prop_assert_eq!(a.difference(&b).covers(&rebuilt), true);
        prop_assert!(a.covers(&a.intersection(&b)) && !a.difference(&b).overlaps(&b));
    }

    /// And it does all that it can: a plain verdict on addresses alone does not need user space.
    #[test]
    fn plain_rules_reach_the_kernel(conditions in proptest::collection::vec(any_net().prop_map(Condition::To), 1..2), from in any_ip(), to in any_ip()) {
        let policy = Policy::new(vec![rule("r", conditions, Action::default())], Action::Deny);
        let to = SocketAddr::new(to, 1);
        let flow = Flow { client: SocketAddr::new(from, 9), orig_dst: to.into(), ..flow("1.1.1.1:1", "1.1.1.1:1") };
        let (action, _) = filtered(&policy.kernel_path(&lan(Intercept::Redirect)), from, to);
        let carried = matches!(verdict(policy.decide(&flow, Seen::Nothing)).action, Action::Carry(_));
        prop_assert_eq!(action == KernelAction::Accept, carried);
    }

    /// A reverse listener's flows have its server as destination.
    #[test]
    fn nat_of_a_reverse_listener_follows_the_rules(policy in any_policy(), from in any_ip(), server in any_ip()) {
        let server = SocketAddr::new(server, 2);
        let address = if server.is_ipv4() { "192.0.2.1:1" } else { "[2001:db8::1]:1" };
        let mut flow = Flow { client: SocketAddr::new(from, 9), orig_dst: server.into(), ..flow("1.1.1.1:1", "1.1.1.1:1") };
        (flow.intercept, flow.listener) = (Intercept::Reverse, "web".into());
        let path = policy.kernel_path(&web(address, &server.to_string()));
        let (action, by) = filtered(&path, from, address.parse().unwrap());
        if let KernelAction::Dnat(to) = action {
            let verdict = verdict(policy.decide(&flow, Seen::Nothing));
            prop_assert_eq!(&verdict.rule, &by);
            let Action::Carry(carry) = verdict.action else { panic!("denied, but left to the kernel") };
            prop_assert_eq!(carry.to.clone().unwrap_or(flow.orig_dst).socket_addr(), Some(to));
            prop_assert_eq!(&carry.carrier, &Carrier::Direct);
        }
        prop_assert_ne!(action, KernelAction::Accept);
    }

    /// Whatever the answers to policy's questions are, there is a verdict, and the trace agrees with it.
    #[test]
    fn every_flow_gets_a_verdict(policy in any_policy(), from in any_ip(), to in any_ip(), port in 1..4u16, named in any::<bool>()) {
        let mut flow = flow("1.1.1.1:1", "1.1.1.1:1");
        (flow.client, flow.orig_dst) = (SocketAddr::new(from, 9), SocketAddr::new(to, port).into());
        let name: HostName = "a.example".parse().unwrap();
        let mut seen = Seen::Nothing;
        let mut questions = 0;
        let verdict = loop {
            match policy.decide(&flow, seen) {
                Decision::Verdict(verdict) => break verdict,
                Decision::NeedProcess { .. } => flow.process = Some(Process::default()),
                Decision::NeedFirstBytes { .. } => seen = Seen::FirstBytes(named.then_some(&name)),
            }
            questions += 1;
            prop_assert!(questions <= 2);
        };
        let matched = policy.trace(&flow, seen).into_iter().find(|line| line.outcome == TraceOutcome::Matched);
        prop_assert_eq!(matched.map(|line| line.rule), verdict.rule.clone());
        prop_assert_eq!(policy.explain(&flow, named.then_some(&name)).verdict, verdict);
    }
}
