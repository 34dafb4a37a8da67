//! What `explain` says of a flow is what the workers, the packet filter's maps, its rules and the shunt do with it: random
//! rule sets, random flows.

use proptest::prelude::*;
use sidetrack::config::{Config, Question};
use sidetrack::explain::explain;
use sidetrack::shunt::Settings;
use sidetrack_core::flow::{Intercept, Process};
use sidetrack_core::policy::{Action, Capture, Decision, KernelAction, Seen, Traffic as Caught};
use sidetrack_core::shunt::{
    Connection, ForwardLine, Identity, Input, Mark, Output, Phase, PortNumber, Shunt, Transport, Tuple,
};
use sidetrack_core::time::Instant;
use std::net::SocketAddr;

/// The client came in by port 1, leaves by port 2, and the packet filter leaves the decision to the rules.
const LEFT_TO_RULES: Mark = Mark(0x7123_0000);

const ADDRESSES: [&str; 4] = ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"];

fn any_match() -> impl Strategy<Value = String> {
    let net = prop_oneof![
        Just("10.0.0.1"),
        Just("10.0.0.0/30"),
        Just("fd00::/64"),
        Just("fd00::2"),
        Just("0.0.0.0/0")
    ];
    let nets = || proptest::option::weighted(0.4, proptest::collection::vec(net.clone(), 1..3));
    let port = proptest::option::weighted(0.5, prop_oneof![Just("22"), Just("[22, 80]"), Just("\"20-30\"")]);
    let process = proptest::option::weighted(0.1, Just("\"rsync\""));
    let host = proptest::option::weighted(0.1, Just("\"a.example\""));
    (nets(), nets(), port, process, host).prop_map(|(from, to, port, process, host)| {
        let list = |nets: Vec<&str>| format!("[\"{}\"]", nets.join("\", \""));
        let keys = [
            ("from", from.map(list)),
            ("to", to.map(list)),
            ("port", port.map(str::to_owned)),
            ("process", process.map(str::to_owned)),
            ("host", host.map(str::to_owned)),
        ];
        let keys: Vec<_> =
            keys.into_iter().filter_map(|(key, value)| Some(format!("{key} = {}", value?))).collect();
        format!("match = {{ {} }}", keys.join(", "))
    })
}

fn any_rules() -> impl Strategy<Value = String> {
    let action = prop_oneof![
        2 => Just("action = \"deny\""),
        1 => Just("carrier = \"direct\""),
        1 => Just("carrier = \"direct\"\nshunt = {}"),
    ];
    let rules = proptest::collection::vec((any_match(), action), 0..6);
    (rules, any::<bool>()).prop_map(|(rules, deny)| {
        let mut text = format!(
            "version = 1\ndefault = \"{}\"\n[shunt]\nforwarding = \"bridged\"\n[[shunt.port]]\nnumber = 1\ninterface = \"a\"\n\
             [[shunt.port]]\nnumber = 2\ninterface = \"b\"\n",
            if deny { "deny" } else { "direct" }
        );
        for (index, (matches, action)) in rules.into_iter().enumerate() {
            // Nothing is known of the host of what is forwarded: together with `shunt` that is an error.
            let action = if matches.contains("host") { "action = \"deny\"" } else { action };
            text += &format!("[[rule]]\nname = \"r{index}\"\n{matches}\n{action}\n");
        }
        text
    })
}

/// Whether the shunt blocks a flow that the packet filter leaves to it.
fn blocks(config: &Config, tuple: Tuple) -> bool {
    let shunt = config.shunt.as_ref().expect("a shunt");
    let mut core = Settings::of(shunt).core;
    core.ports = [1, 2].into_iter().filter_map(PortNumber::new).collect();
    let mut machine = Shunt::new(core, Instant::ZERO);
    let identity = Identity::new(7, Some(1));
    let connection = Connection {
        tuple,
        identity,
        mark: LEFT_TO_RULES,
        phase: Some(Phase::Open),
        both_ways: true,
        translated: false,
        inspected: false,
        traffic: None,
    };
    machine.handle(Instant::ZERO, Input::Listed(&[connection]));
    let (mut blocked, mut marked) = (false, false);
    while let Some(output) = machine.poll() {
        match output {
            Output::Install(entry) => blocked |= entry.block,
            Output::MarkBlocked(..) => marked = true,
            Output::Whose(tuple, identity) => {
                machine.handle(Instant::ZERO, Input::Owned(tuple, identity, &Process::default()));
            }
            _ => {}
        }
    }
    assert_eq!(blocked, marked, "the packet filter and the fast path are told the same");
    blocked
}

fn answers(text: &str, client: SocketAddr, server: SocketAddr) {
    let config =
        Config::from_text("test", text).unwrap_or_else(|error| panic!("{}\n{text}", error.render(false)));
    let question = Question {
        listener: None,
        intercept: None,
        protocol: None,
        client,
        orig_dst: Some(server.into()),
        host: None,
        process: Process::default(),
        socks_user: None,
    };
    let said = explain(&config, &question).expect("a destination");
    let forwarded = said.forwarded.as_ref().expect("a shunt");
    let denied = said.action == "deny";
    let context = format!("{client} -> {server}: {said}\n{text}");
    // Forwarded packets: as said, and what is said is the same verdict.
    assert_eq!(forwarded.action == "drop", denied, "{context}");
    assert!(forwarded.by_packet_filter && !denied || forwarded.rule == said.rule, "{context}");
    let tuple = Tuple::new(client, server, Transport::Tcp, 0);
    let asks = config.shunt.as_ref().expect("a shunt").rules.is_some();
    assert_eq!(asks && blocks(&config, tuple), denied, "{context}");
    // The rules that are printed drop nothing else, and all that addresses decide.
    let lines = ForwardLine::of(&config.policy);
    let drops = ForwardLine::drops(&lines, client.ip(), server);
    let by_rule = denied && said.rule.is_some();
    assert!(!drops || by_rule, "{context}");
    assert!(drops || !by_rule || config.policy.asks_process(), "{context}");
    // Caught packets: user space, and what is left to the kernel.
    let flow = question.flow().expect("a destination");
    let seen = match config.policy.decide(&flow, Seen::Nothing) {
        Decision::NeedFirstBytes { .. } => Seen::FirstBytes(None),
        _ => Seen::Nothing,
    };
    let Decision::Verdict(verdict) = config.policy.decide(&flow, seen) else { panic!("{context}") };
    assert_eq!(verdict.action == Action::Deny, denied, "{context}");
    let traffic = Caught::Anywhere {
        intercept: Intercept::Redirect,
        forwarded: true,
        src: None,
        dst: None,
        ports: None,
    };
    let kernel =
        config.policy.kernel_path(&Capture { listener: "none".into(), protocol: flow.protocol, traffic });
    let line = kernel.iter().find(|line| line.matches.contains(client.ip(), server));
    let left = line.is_some_and(|line| line.action != KernelAction::UserSpace);
    assert!(!(left && denied), "{context}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_explain_says_is_what_happens(text in any_rules()) {
        for family in [[0, 1], [2, 3]] {
            for (from, to) in [(family[0], family[1]), (family[1], family[0])] {
                for port in [22, 80, 443] {
                    let address = |at: usize, port| SocketAddr::new(ADDRESSES[at].parse().expect("an address"), port);
                    answers(&text, address(from, 4000), address(to, port));
                }
            }
        }
    }
}
