//! Flows whose mark says that our own rules decide about them.

use sidetrack_core::flow::Process;
use sidetrack_core::policy::{Action, Carry, Condition, Match, Policy, Rule, ShuntAfter};
use sidetrack_core::shunt::{
    Both, Cause, Config, Connection, EntryId, FastPathKind, Identity, Input, Mark, MarkActions, Obstacle,
    Output, Phase, PortNumber, Shunt, ShuntAction, Traffic, Transport, Tuple, WhenFull,
};
use sidetrack_core::time::Instant;
use std::sync::Arc;
use std::time::Duration;

const ASKS_RULES: Mark = Mark(0x7123_0000);
const UNDECIDED: Mark = Mark(0x6120_0000);

fn rule(name: &str, ports: (u16, u16), action: Action) -> Rule {
    let matcher = Match::new(vec![Condition::Port([ports].into_iter().collect())]);
    Rule { name: name.into(), matcher, action }
}

fn shunt_after(bytes: u64, ms: u64) -> Action {
    Action::Carry(Arc::new(Carry {
        shunt: Some(ShuntAfter { bytes, ms, fast_path: None }),
        ..Carry::default()
    }))
}

fn shunt(rules: Vec<Rule>) -> Shunt {
    started(Config { rules: Some(Arc::new(Policy::new(rules, Action::default()))), ..config() })
}

fn config() -> Config {
    Config {
        ports: [1, 2].into_iter().filter_map(PortNumber::new).collect(),
        actions: MarkActions::default(),
        fast_path: FastPathKind::Tc,
        rules: None,
        entries_max: 20,
        entries_max_per_client: 20,
        when_full: WhenFull::default(),
        shunt_idle: Duration::from_secs(10),
        block_idle: Duration::from_secs(10),
        keep_every: Duration::from_secs(100),
    }
}

fn started(config: Config) -> Shunt {
    let mut shunt = Shunt::new(config, Instant::ZERO);
    shunt.handle(Instant::ZERO, Input::Listed(&[]));
    let _ = outputs(&mut shunt);
    shunt
}

fn connection(port: u16, mark: Mark, passed: u64) -> Connection {
    let address = |port| std::net::SocketAddr::from(([192, 0, 2, 1], port));
    Connection {
        tuple: Tuple::new(address(4000), address(port), Transport::Tcp, 0),
        identity: Identity::new(7, Some(1)),
        mark,
        phase: Some(Phase::Open),
        both_ways: true,
        translated: false,
        inspected: false,
        traffic: Some(both(passed)),
    }
}

fn both(bytes: u64) -> Both {
    Both { to_server: Traffic { packets: 1, bytes }, to_client: Traffic::default() }
}

fn outputs(shunt: &mut Shunt) -> Vec<Output> {
    std::iter::from_fn(|| shunt.poll()).collect()
}

fn installs(outputs: &[Output]) -> Vec<(EntryId, bool)> {
    let entry = |output: &Output| match output {
        Output::Install(entry) => Some((entry.id, entry.block)),
        _ => None,
    };
    outputs.iter().filter_map(entry).collect()
}

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

#[test]
fn a_flow_is_shunted_once_its_bytes_and_its_time_have_come() {
    let mut shunt = shunt(vec![rule("bulk", (5000, 5000), shunt_after(1000, 2000))]);
    let flow = connection(5000, ASKS_RULES, 10);
    shunt.handle(at(0), Input::Connection(flow));
    assert!(installs(&outputs(&mut shunt)).is_empty());
    let known = shunt.flow(&flow.tuple).expect("kept");
    assert_eq!((shunt.obstacle(known), shunt.rule(known)), (Some(Obstacle::TooEarly), Some("bulk")));
    // The bytes are requested again as long as a rule waits for them.
    shunt.handle(at(600), Input::Tick);
    assert_eq!(outputs(&mut shunt), [Output::CountSlow]);
    shunt.handle(at(600), Input::SlowCounted(flow.tuple, flow.identity, both(5000)));
    assert!(installs(&outputs(&mut shunt)).is_empty(), "enough bytes, too early");
    shunt.handle(at(2100), Input::Tick);
    let asked = outputs(&mut shunt);
    assert_eq!(installs(&asked), [(EntryId(1), false)]);
    assert!(!asked.contains(&Output::CountSlow), "nothing waits any more");
}

#[test]
fn after_the_rules_of_the_packet_filter_changed_it_waits_for_their_word() {
    let mut shunt = shunt(vec![rule("bulk", (5000, 5000), shunt_after(0, 0))]);
    let flow = connection(5000, ASKS_RULES, 10);
    shunt.handle(at(0), Input::Connection(flow));
    let entry = installs(&outputs(&mut shunt))[0].0;
    shunt.handle(at(1), Input::Installed(entry));
    shunt.handle(at(2), Input::RulesChanged);
    shunt.handle(at(3), Input::Gone(entry, Cause::RulesChanged, both(5)));
    let asked = outputs(&mut shunt);
    assert!(asked.contains(&Output::Ask(flow.tuple, flow.identity)), "{asked:?}");
    // Bytes alone do not move the flow, because the filter may have dropped them.
    shunt.handle(at(700), Input::SlowCounted(flow.tuple, flow.identity, both(1 << 40)));
    shunt.handle(at(700), Input::Tick);
    assert!(installs(&outputs(&mut shunt)).is_empty());
    shunt.handle(at(800), Input::Connection(connection(5000, UNDECIDED, 20)));
    assert!(installs(&outputs(&mut shunt)).is_empty());
    shunt.handle(at(801), Input::Connection(connection(5000, ASKS_RULES, 20)));
    assert_eq!(installs(&outputs(&mut shunt)), [(EntryId(2), false)]);
}

#[test]
fn a_rule_that_denies_blocks_and_what_no_rule_shunts_stays() {
    let rules = vec![
        rule("no", (23, 23), Action::Deny),
        rule("web", (80, 80), Action::default()),
        rule("bulk", (1, 100), shunt_after(0, 0)),
    ];
    for (port, expected) in
        [(23, Some(ShuntAction::Block)), (80, None), (22, Some(ShuntAction::Shunt)), (200, None)]
    {
        let mut shunt = shunt(rules.clone());
        shunt.handle(at(0), Input::Connection(connection(port, ASKS_RULES, 10)));
        let installed = installs(&outputs(&mut shunt));
        let blocks =
            installed.first().map(|(_, block)| if *block { ShuntAction::Block } else { ShuntAction::Shunt });
        assert_eq!(blocks, expected, "port {port}");
    }
}

#[test]
fn without_rules_the_number_has_no_meaning() {
    let mut shunt = shunt(Vec::new());
    let flow = connection(5000, ASKS_RULES, 10);
    shunt.handle(at(0), Input::Connection(flow));
    assert!(installs(&outputs(&mut shunt)).is_empty());
    let known = shunt.flow(&flow.tuple).expect("kept");
    assert_eq!((shunt.obstacle(known), shunt.rule(known)), (None, None), "a policy without a word on it");
}

#[test]
fn a_flow_that_a_rule_or_the_default_denies_is_marked_so_that_the_packet_filter_drops_it() {
    for (rules, default) in [
        (vec![rule("all", (1, 9), Action::default()), rule("no", (23, 23), Action::Deny)], Action::default()),
        (Vec::new(), Action::Deny),
    ] {
        let rules = Some(Arc::new(Policy::new(rules, default)));
        let mut shunt = started(Config { rules, ..config() });
        let flow = connection(23, ASKS_RULES, 10);
        shunt.handle(at(0), Input::Connection(flow));
        let asked = outputs(&mut shunt);
        assert!(asked.contains(&Output::MarkBlocked(flow.tuple, flow.identity, 2)), "{asked:?}");
        assert_eq!(installs(&asked), [(EntryId(1), true)]);
        // Conntrack reports the mark: no further step is needed.
        shunt.handle(at(1), Input::Installed(EntryId(1)));
        assert_eq!(outputs(&mut shunt), [Output::KeepBlocked(flow.tuple, flow.identity)]);
        shunt.handle(at(2), Input::Connection(connection(23, Mark(0x7122_0000), 10)));
        assert_eq!(outputs(&mut shunt), []);
    }
}

#[test]
fn a_blocked_flow_stays_blocked_while_its_connection_is_there() {
    let mut shunt = shunt(vec![rule("no", (23, 23), Action::Deny)]);
    let flow = connection(23, Mark(0x7122_0000), 10);
    shunt.handle(at(0), Input::Connection(flow));
    let mut id = EntryId(0);
    // After any removal except by a change of the policy, the entry is installed again without asking the rules.
    for cause in [Cause::Idle, Cause::Lost, Cause::Unconfirmed, Cause::Syn, Cause::Fin] {
        let asked = outputs(&mut shunt);
        id = installs(&asked).first().expect("asked for again").0;
        let entry = asked.iter().find_map(|output| match output {
            Output::Install(entry) => Some(entry),
            _ => None,
        });
        assert_eq!(entry.map(|entry| entry.idle), Some(sidetrack_core::shunt::Entry::NEVER_IDLE));
        assert!(!asked.iter().any(|output| matches!(output, Output::Ask(..))), "{asked:?}");
        shunt.handle(at(1), Input::Installed(id));
        shunt.handle(at(2), Input::Gone(id, cause, both(100)));
    }
    let known = shunt.flow(&flow.tuple).expect("kept");
    assert_eq!(
        (known.fast(), known.dropped().to_server.bytes),
        (Both::default(), 500),
        "dropped is not moved"
    );
    let id = installs(&outputs(&mut shunt)).first().map_or(id, |entry| entry.0);
    shunt.handle(at(3), Input::Installed(id));
    shunt.handle(at(4), Input::RulesChanged);
    shunt.handle(at(5), Input::Gone(id, Cause::RulesChanged, both(1)));
    assert!(outputs(&mut shunt).contains(&Output::Ask(flow.tuple, flow.identity)));
}

#[test]
fn a_silent_blocked_flow_makes_room_and_is_blocked_still() {
    let config = Config { entries_max: 2, block_idle: Duration::from_secs(1), ..config() };
    let mut shunt = started(config);
    let blocked = |port| connection(port, Mark(0x7122_0000), 10);
    for port in [1, 2] {
        shunt.handle(at(0), Input::Connection(blocked(port)));
        let id = installs(&outputs(&mut shunt))[0].0;
        shunt.handle(at(0), Input::Installed(id));
    }
    shunt.handle(at(900), Input::Counted(EntryId(1), both(9)));
    let _ = outputs(&mut shunt);
    // First it is too early; later the entry that was silent longest is evicted.
    shunt.handle(at(950), Input::Connection(blocked(3)));
    assert_eq!(outputs(&mut shunt), []);
    shunt.handle(at(1100), Input::Connection(blocked(4)));
    assert_eq!(outputs(&mut shunt), [Output::Remove(EntryId(2), Cause::Evicted)]);
    shunt.handle(at(1101), Input::Gone(EntryId(2), Cause::Evicted, both(1)));
    let asked = outputs(&mut shunt);
    assert!(!asked.iter().any(|output| matches!(output, Output::Ask(..))), "its mark stays: {asked:?}");
    shunt.handle(at(6200), Input::Tick);
    assert_eq!(installs(&outputs(&mut shunt)).len(), 1, "one place, for one of those that wait");
}

#[test]
fn conntrack_keeps_a_blocked_flow_for_as_long_as_it_sends() {
    let mut shunt = started(Config { keep_every: Duration::from_secs(2), ..config() });
    let flow = connection(23, Mark(0x7122_0000), 10);
    shunt.handle(at(0), Input::Connection(flow));
    shunt.handle(at(0), Input::Installed(EntryId(1)));
    let _ = outputs(&mut shunt);
    let keeps = |shunt: &mut Shunt| outputs(shunt).contains(&Output::KeepBlocked(flow.tuple, flow.identity));
    shunt.handle(at(2500), Input::Tick);
    assert!(!keeps(&mut shunt), "it was silent");
    shunt.handle(at(2600), Input::Counted(EntryId(1), both(50)));
    shunt.handle(at(3200), Input::Tick);
    assert!(keeps(&mut shunt));
}

/// The fast paths of the requested entries.
fn paths(outputs: &[Output]) -> Vec<FastPathKind> {
    let path = |output: &Output| match output {
        Output::Install(entry) => Some(entry.path),
        _ => None,
    };
    outputs.iter().filter_map(path).collect()
}

#[test]
fn the_rule_that_decides_says_by_which_fast_path() {
    let by = |fast_path| {
        let shunt = Some(ShuntAfter { bytes: 0, ms: 0, fast_path });
        Action::Carry(Arc::new(Carry { shunt, ..Carry::default() }))
    };
    let rules = vec![
        rule("no", (23, 23), Action::Deny),
        rule("switch", (22, 22), by(Some(FastPathKind::OpenFlow))),
        rule("shown", (80, 80), by(Some(FastPathKind::None))),
        rule("rest", (1, 100), by(None)),
    ];
    let mut shunt = shunt(rules);
    for (port, path) in [
        (22, FastPathKind::OpenFlow),
        (80, FastPathKind::None),
        (90, FastPathKind::Tc),
        // Entries that drop go to the first fast path in the configuration.
        (23, FastPathKind::Tc),
    ] {
        let flow = connection(port, ASKS_RULES, 10);
        shunt.handle(at(0), Input::Connection(flow));
        assert_eq!(paths(&outputs(&mut shunt)), [path], "port {port}");
        assert_eq!(shunt.flow(&flow.tuple).map(|flow| flow.path), Some(path));
    }
}

#[test]
fn a_mark_that_names_another_fast_path_moves_the_flow() {
    let mut actions = MarkActions::default();
    assert!(actions.set(4, FastPathKind::Xdp));
    let mut shunt = started(Config { actions, ..config() });
    let [by_default, by_xdp] = [1, 4].map(|number| Mark(0x7120_0000 | number << 16));
    let flow = connection(5000, by_default, 10);
    shunt.handle(at(0), Input::Connection(flow));
    assert_eq!(paths(&outputs(&mut shunt)), [FastPathKind::Tc]);
    shunt.handle(at(1), Input::Installed(EntryId(1)));
    let _ = outputs(&mut shunt);
    // The same mark again changes nothing.
    shunt.handle(at(2), Input::Connection(flow));
    assert_eq!(outputs(&mut shunt), []);
    shunt.handle(at(3), Input::Connection(connection(5000, by_xdp, 10)));
    assert_eq!(outputs(&mut shunt), [Output::Remove(EntryId(1), Cause::MarkChanged)]);
    shunt.handle(at(4), Input::Gone(EntryId(1), Cause::MarkChanged, both(5)));
    assert_eq!(outputs(&mut shunt), [Output::Ask(flow.tuple, flow.identity)]);
    shunt.handle(at(5), Input::Connection(connection(5000, UNDECIDED, 10)));
    shunt.handle(at(6), Input::Connection(connection(5000, by_xdp, 10)));
    assert_eq!(paths(&outputs(&mut shunt)), [FastPathKind::Xdp]);
}

#[test]
fn who_pins_a_flow_leaves_its_fast_path_to_policy() {
    let mut actions = MarkActions::default();
    assert!(actions.set(4, FastPathKind::Xdp));
    for (number, path) in [(4, FastPathKind::Xdp), (0, FastPathKind::Tc)] {
        let mut shunt = started(Config { actions, ..config() });
        let flow = connection(5000, Mark(0x7120_0000 | number << 16), 10);
        shunt.handle(at(0), Input::Pinned(flow, ShuntAction::Shunt));
        assert_eq!(paths(&outputs(&mut shunt)), [path], "action {number}");
    }
}

#[test]
fn a_rule_that_asks_for_the_process_waits_until_somebody_says_whose_it_is() {
    let matcher = Match::new(vec![
        Condition::Port([(5000, 5000)].into_iter().collect()),
        Condition::Process(vec!["rsync".into()]),
    ]);
    let rules = vec![Rule { name: "copies".into(), matcher, action: shunt_after(0, 0) }];
    let flow = connection(5000, ASKS_RULES, 10);
    let rsync = Process { name: Some("rsync".into()), ..Process::default() };
    let whose = Output::Whose(flow.tuple, flow.identity);
    for (process, installed) in [(rsync.clone(), 1), (Process::default(), 0)] {
        let mut shunt = shunt(rules.clone());
        shunt.handle(at(0), Input::Connection(flow));
        assert_eq!(outputs(&mut shunt), [whose]);
        // The owner is asked for once, however often the connection is reported.
        shunt.handle(at(1), Input::Connection(flow));
        assert_eq!(outputs(&mut shunt), []);
        let known = shunt.flow(&flow.tuple).expect("kept");
        assert_eq!(shunt.obstacle(known), Some(Obstacle::Unidentified));
        // An answer about an earlier connection with the same addresses is ignored.
        let other = Identity::new(6, Some(1));
        shunt.handle(at(2), Input::Owned(flow.tuple, other, &rsync));
        assert_eq!(outputs(&mut shunt), []);
        shunt.handle(at(3), Input::Owned(flow.tuple, flow.identity, &process));
        assert_eq!(installs(&outputs(&mut shunt)).len(), installed, "{process:?}");
        let known = shunt.flow(&flow.tuple).expect("kept");
        assert_eq!(shunt.rule(known), (installed == 1).then_some("copies"));
        // A second answer changes nothing.
        shunt.handle(at(4), Input::Owned(flow.tuple, flow.identity, &rsync));
        assert_eq!(outputs(&mut shunt), []);
    }
    let mut shunt = shunt(rules);
    for other in [
        connection(5001, ASKS_RULES, 10),
        Connection { tuple: Tuple::new(flow.tuple.client(), flow.tuple.server(), Transport::Udp, 0), ..flow },
    ] {
        shunt.handle(at(0), Input::Connection(other));
        assert_eq!(outputs(&mut shunt), [], "no process decides about {}", other.tuple);
    }
}

/// A shunt with two entries, both in use, and a flow that waits for one.
fn scarce(when_full: WhenFull) -> (Shunt, [Connection; 3]) {
    let mut shunt = started(Config { entries_max: 2, when_full, ..config() });
    let flows = [1, 2, 3].map(|port| connection(port, Mark(0x7121_0000), 0));
    for flow in flows {
        shunt.handle(at(0), Input::Connection(flow));
        let installed = installs(&outputs(&mut shunt));
        installed.iter().for_each(|(id, _)| shunt.handle(at(0), Input::Installed(*id)));
    }
    let waits = shunt.flow(&flows[2].tuple).expect("kept");
    assert_eq!((shunt.obstacle(waits), shunt.waiting()), (Some(Obstacle::Full), 1));
    let _ = outputs(&mut shunt);
    (shunt, flows)
}

#[test]
fn the_fastest_flow_that_waits_takes_the_entry_of_the_slowest() {
    let (mut shunt, flows) = scarce(WhenFull::Fastest);
    for (ms, bytes) in [(500, [0, 100, 0]), (2500, [10, 9100, 40_000])] {
        shunt.handle(at(ms), Input::Tick);
        assert_eq!(outputs(&mut shunt), [Output::CountSlow]);
        shunt.handle(at(ms), Input::Counted(EntryId(1), both(bytes[0])));
        shunt.handle(at(ms), Input::Counted(EntryId(2), both(bytes[1])));
        shunt.handle(at(ms), Input::SlowCounted(flows[2].tuple, flows[2].identity, both(bytes[2])));
        assert_eq!(outputs(&mut shunt), []);
        shunt.handle(at(ms + 500), Input::Tick);
    }
    assert_eq!(outputs(&mut shunt), [Output::Remove(EntryId(1), Cause::Evicted)]);
    let rates = flows.map(|flow| shunt.flow(&flow.tuple).and_then(|flow| flow.bytes_per_s()));
    assert_eq!(rates, [Some(5), Some(4500), Some(20_000)]);
    // No other flow comes between: the place is for the flow that it was taken for.
    shunt.handle(at(3001), Input::Gone(EntryId(1), Cause::Evicted, both(10)));
    let done = outputs(&mut shunt);
    assert_eq!(installs(&done), [(EntryId(3), false)]);
    assert!(done.contains(&Output::Ask(flows[0].tuple, flows[0].identity)), "{done:?}");
    assert_eq!((shunt.evicted(), shunt.waiting(), shunt.entries()), (1, 0, 2));
    assert_eq!(shunt.flow(&flows[0].tuple).and_then(|flow| flow.cause), Some(Cause::Evicted));
}

#[test]
fn flows_wait_where_the_configuration_says_so() {
    let (mut shunt, _) = scarce(WhenFull::Wait);
    for ms in [500, 1000, 2500, 3000] {
        shunt.handle(at(ms), Input::Tick);
        assert_eq!(outputs(&mut shunt), []);
    }
}

#[test]
fn a_pinned_flow_keeps_its_entry() {
    let (mut shunt, flows) = scarce(WhenFull::Fastest);
    flows[..2].iter().for_each(|flow| shunt.handle(at(1), Input::Pinned(*flow, ShuntAction::Shunt)));
    for (ms, bytes) in [(500, 0), (2500, 40_000)] {
        shunt.handle(at(ms), Input::Tick);
        shunt.handle(at(ms), Input::SlowCounted(flows[2].tuple, flows[2].identity, both(bytes)));
        shunt.handle(at(ms + 500), Input::Tick);
    }
    assert!(!outputs(&mut shunt).iter().any(|output| matches!(output, Output::Remove(..))));
}

/// Returns the resident memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim_end_matches("kB").trim().parse::<usize>().expect("kB") * 1024
}

#[test]
fn a_hundred_thousand_flows_come_are_counted_and_go() {
    const FLOWS: u64 = 100_000;
    let most = 120_000;
    let mut shunt = started(Config { entries_max: most, entries_max_per_client: most, ..config() });
    let flow = |number: u64| {
        // A hundred flows of each client.
        let [.., high, low] = (number / 100).to_be_bytes();
        let port = 4000 + u16::try_from(number % 100).expect("small");
        let client = std::net::SocketAddr::from(([10, 0, high, low], port));
        let plain = connection(5000, Mark(0x7121_0000), 0);
        Connection { tuple: Tuple::new(client, plain.tuple.server(), Transport::Tcp, 0), ..plain }
    };
    // Written once, so that it is resident before.
    let mut ids = vec![EntryId(1); FLOWS as usize];
    ids.clear();
    let before = resident();
    for number in 0..FLOWS {
        shunt.handle(at(number / 100), Input::Connection(flow(number)));
        let installed = installs(&outputs(&mut shunt));
        assert_eq!(installed.len(), 1, "flow {number}");
        installed.iter().for_each(|(id, _)| shunt.handle(at(number / 100), Input::Installed(*id)));
        ids.extend(installed.into_iter().map(|(id, _)| id));
    }
    assert_eq!((shunt.entries(), shunt.waiting(), shunt.evicted()), (100_000, 0, 0));
    // All tables together, and what the allocator adds. Addresses that rise fill a tree badly.
    let of_each = resident().saturating_sub(before) / FLOWS as usize;
    println!("{of_each} bytes for each flow");
    assert!(of_each < 512, "{of_each} bytes for each flow");
    for id in &ids {
        shunt.handle(at(2000), Input::Counted(*id, both(1500)));
    }
    let _ = outputs(&mut shunt);
    // Each of them ends at conntrack: its entry goes, and it leaves one record with its bytes.
    let mut records = 0;
    for (number, id) in (0..FLOWS).zip(&ids) {
        shunt.handle(at(3000), Input::Ended(flow(number)));
        shunt.handle(at(3000), Input::Gone(*id, Cause::Ended, both(3000)));
        records += outputs(&mut shunt)
            .iter()
            .filter(|output| matches!(output, Output::Record(flow) if flow.before == both(3000)))
            .count();
    }
    assert_eq!((records, shunt.entries()), (100_000, 0));
    assert!(shunt.flow(&flow(0).tuple).is_none(), "nothing is kept");
}
