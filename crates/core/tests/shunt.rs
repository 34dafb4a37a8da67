//! The shunt against a model of conntrack, the packet filter's rules and a fast path: every order of events up to a
//! length, and long random orders.

use sidetrack_core::shunt::{
    Both, Cause, Config, Connection, Entry, EntryId, FastPathKind, Identity, Input, Mark, MarkActions,
    Obstacle, Output, Phase, PortNumber, Shunt, ShuntAction, Standing, Traffic, Transport, Tuple, WhenFull,
};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

const PORTS: u32 = 0x6120_1234;

fn tuple() -> Tuple {
    let (client, server) =
        ("192.0.2.1:4000".parse().expect("an address"), "198.51.100.2:5000".parse().expect("an address"));
    Tuple::new(client, server, Transport::Tcp, 0)
}

fn config(fast_path: FastPathKind) -> Config {
    Config {
        ports: [1, 2].into_iter().filter_map(PortNumber::new).collect(),
        actions: MarkActions::default(),
        fast_path,
        rules: None,
        entries_max: 20,
        entries_max_per_client: 4,
        when_full: WhenFull::default(),
        shunt_idle: Duration::from_secs(10),
        block_idle: Duration::from_secs(10),
        keep_every: Duration::from_secs(100),
    }
}

fn mark_for(action: ShuntAction) -> Mark {
    let number = MarkActions::default().number(action).expect("a number");
    Mark(PORTS | Mark::DECIDED | u32::from(number) << 16)
}

fn bytes(count: u64) -> Both {
    Both { to_server: Traffic { packets: count, bytes: count }, to_client: Traffic::default() }
}

/// A fast path with its own counters, and one whose packets conntrack counts.
const KINDS: [FastPathKind; 2] = [FastPathKind::Tc, FastPathKind::Flowtable];

/// The model of a conntrack entry.
#[derive(Clone, Copy, Debug)]
struct Tracked {
    identity: Identity,
    mark: Mark,
    phase: Phase,
    passed: u64,
}

/// The current verdict of the rules: `None` drops the packets before they reach the policy.
type Rules = Option<ShuntAction>;

#[derive(Clone, Copy, Debug)]
enum Report {
    Changed(Connection),
    Ended(Connection),
}

#[derive(Clone, Debug)]
struct World {
    shunt: Shunt,
    fast_path: FastPathKind,
    now: Instant,
    rules: Rules,
    tracked: Option<Tracked>,
    connections: u32,
    reports: VecDeque<Report>,
    installing: VecDeque<Entry>,
    removing: VecDeque<EntryId>,
    table: BTreeMap<EntryId, (Entry, u64)>,
    /// The connection of the latest entry.
    offloaded: Option<Identity>,
    list_asked: bool,
    sent_fast: u64,
    sent_slow: u64,
    recorded_fast: u64,
    recorded_slow: u64,
    /// Reports with counts were lost: the slow path's bytes cannot be compared.
    lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Packet,
    Report,
    LoseReports,
    List,
    Confirm,
    Refuse,
    Remove,
    Idle,
    Fin,
    Forget,
    Reuse,
    Allow,
    Deny,
    Block,
    Late,
    Withdraw,
}

const STEPS: [Step; 16] = [
    Step::Packet,
    Step::Report,
    Step::LoseReports,
    Step::List,
    Step::Confirm,
    Step::Refuse,
    Step::Remove,
    Step::Idle,
    Step::Fin,
    Step::Forget,
    Step::Reuse,
    Step::Allow,
    Step::Deny,
    Step::Block,
    Step::Late,
    Step::Withdraw,
];

impl World {
    fn new(fast_path: FastPathKind) -> Self {
        let mut world = Self {
            shunt: Shunt::new(config(fast_path), Instant::ZERO),
            fast_path,
            now: Instant::ZERO,
            rules: Some(ShuntAction::Shunt),
            tracked: None,
            connections: 0,
            reports: VecDeque::new(),
            installing: VecDeque::new(),
            removing: VecDeque::new(),
            table: BTreeMap::new(),
            offloaded: None,
            list_asked: false,
            sent_fast: 0,
            sent_slow: 0,
            recorded_fast: 0,
            recorded_slow: 0,
            lost: false,
        };
        world.obey();
        world
    }

    fn connection(tracked: &Tracked) -> Connection {
        Connection {
            tuple: tuple(),
            identity: tracked.identity,
            mark: tracked.mark,
            phase: Some(tracked.phase),
            both_ways: true,
            translated: false,
            inspected: false,
            traffic: Some(bytes(tracked.passed)),
        }
    }

    fn changed(&mut self) {
        if let Some(tracked) = &self.tracked {
            self.reports.push_back(Report::Changed(Self::connection(tracked)));
        }
    }

    fn tell(&mut self, input: Input<'_>) {
        self.shunt.handle(self.now, input);
        self.obey();
    }

    fn obey(&mut self) {
        while let Some(output) = self.shunt.poll() {
            match output {
                Output::Install(entry) => self.installing.push_back(entry),
                Output::Remove(entry, _) => self.removing.push_back(entry),
                Output::Ask(_, identity) => {
                    if let Some(tracked) = self.tracked.as_mut().filter(|t| t.identity == identity) {
                        tracked.mark.0 &= !Mark::DECIDED;
                        self.changed();
                    }
                }
                Output::Keep(..) | Output::KeepBlocked(..) | Output::CountSlow => {}
                Output::MarkBlocked(..) => unreachable!("there are no rules of our own"),
                Output::Whose(..) => unreachable!("there are no rules of our own"),
                Output::List => self.list_asked = true,
                Output::Record(flow) => {
                    self.recorded_fast += flow.fast().to_server.bytes + flow.dropped().to_server.bytes;
                    self.recorded_slow += flow.slow().to_server.bytes;
                    assert!(flow.was_shunted());
                }
            }
        }
    }

    /// Sends a packet of the client, by the fast or the slow path.
    fn packet(&mut self) {
        let on_fast_path = self.table.values_mut().find(|(entry, _)| entry.tuple == tuple());
        match (on_fast_path, &mut self.tracked, self.fast_path.is_counted_by_conntrack()) {
            (Some((_, count)), _, false) => {
                *count += 1;
                self.sent_fast += 1;
                return;
            }
            // Conntrack counts the packet, too. Without a conntrack entry there is no fast path.
            (Some((_, count)), Some(tracked), true) if self.offloaded == Some(tracked.identity) => {
                *count += 1;
                tracked.passed += 1;
                self.sent_fast += 1;
                return;
            }
            _ => {}
        }
        if self.tracked.is_none() {
            self.connections += 1;
            let identity = Identity::new(7, Some(self.connections.into()));
            self.tracked = Some(Tracked { identity, mark: Mark(PORTS), phase: Phase::Open, passed: 0 });
        }
        let rules = self.rules;
        let Some(tracked) = &mut self.tracked else { return };
        tracked.passed += 1;
        self.sent_slow += 1;
        if let (None, Some(action)) = (tracked.mark.action(), rules) {
            tracked.mark = mark_for(action);
            self.changed();
        }
    }

    fn forget(&mut self) {
        if let Some(tracked) = self.tracked.take() {
            self.reports.push_back(Report::Ended(Self::connection(&tracked)));
        }
    }

    fn report(&mut self) {
        match self.reports.pop_front() {
            Some(Report::Changed(connection)) => self.tell(Input::Connection(connection)),
            Some(Report::Ended(connection)) => self.tell(Input::Ended(connection)),
            None => {}
        }
    }

    fn list(&mut self) {
        if std::mem::take(&mut self.list_asked) {
            // The driver discards earlier reports before it lists.
            self.lost |= !self.reports.is_empty();
            self.reports.clear();
            let list: Vec<_> = self.tracked.iter().map(Self::connection).collect();
            self.tell(Input::Listed(&list));
        }
    }

    fn confirm(&mut self) {
        if let Some(entry) = self.installing.pop_front() {
            assert!(
                self.table.values().all(|(other, _)| other.tuple != entry.tuple),
                "two entries for one flow: {entry:?} {:?}",
                self.table
            );
            self.table.insert(entry.id, (entry, 0));
            self.offloaded = self.tracked.map(|tracked| tracked.identity);
            self.tell(Input::Installed(entry.id));
        }
    }

    fn remove(&mut self) {
        // A removal never overtakes the installation of the same entry.
        let Some(id) = self.removing.front().copied() else { return };
        if self.installing.iter().any(|entry| entry.id == id) {
            return;
        }
        self.removing.pop_front();
        if let Some((_, count)) = self.table.remove(&id) {
            self.tell(Input::Gone(id, Cause::Withdrawn, bytes(count)));
        }
    }

    fn idle(&mut self) {
        if let Some((id, (_, count))) = self.table.pop_first() {
            self.tell(Input::Gone(id, Cause::Idle, bytes(count)));
        }
    }

    fn rules(&mut self, rules: Rules) {
        self.rules = rules;
        self.tell(Input::RulesChanged);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Packet => self.packet(),
            Step::Report => self.report(),
            Step::LoseReports => {
                self.lost |= !self.reports.is_empty();
                self.reports.clear();
                self.tell(Input::EventsLost);
            }
            Step::List => self.list(),
            Step::Confirm => self.confirm(),
            Step::Refuse => {
                if let Some(entry) = self.installing.pop_front() {
                    self.removing.retain(|id| *id != entry.id);
                    self.tell(Input::Failed(entry.id, Obstacle::Refused));
                }
            }
            Step::Remove => self.remove(),
            Step::Idle => self.idle(),
            Step::Fin => {
                if let Some(tracked) = &mut self.tracked {
                    tracked.phase = Phase::Closing;
                    self.changed();
                }
            }
            Step::Forget => self.forget(),
            Step::Reuse => {
                self.forget();
                self.packet();
            }
            Step::Allow => self.rules(Some(ShuntAction::Shunt)),
            Step::Deny => self.rules(None),
            Step::Block => self.rules(Some(ShuntAction::Block)),
            Step::Late => {
                self.now = self.now + Duration::from_secs(6);
                self.tell(Input::Tick);
            }
            Step::Withdraw => self.tell(Input::Withdraw(tuple())),
        }
    }

    /// Delivers everything that is under way.
    fn settle(&mut self) {
        for _ in 0..100 {
            if self.reports.is_empty()
                && self.installing.is_empty()
                && self.removing.is_empty()
                && !self.list_asked
            {
                return;
            }
            self.list();
            self.report();
            self.confirm();
            self.remove();
        }
        panic!("it never settles: {self:?}");
    }

    /// Checks the invariants at rest, when nothing is under way.
    fn check(&self) {
        assert_eq!(self.shunt.entries(), self.table.len(), "entries that nobody knows of");
        let decided = self.tracked.as_ref().and_then(|tracked| tracked.mark.action());
        let says = |action| decided == MarkActions::default().number(action);
        for (entry, _) in self.table.values() {
            let tracked = self.tracked.as_ref().expect("an entry of a connection that is over");
            if entry.block {
                assert!(says(ShuntAction::Block), "blocked though the rules do not say so");
            } else {
                assert!(says(ShuntAction::Shunt), "shunted though the rules do not say so");
                assert_eq!(tracked.phase, Phase::Open, "a closing connection is shunted");
            }
        }
        let live = self.shunt.flow(&tuple());
        let failed = live.is_some_and(|flow| matches!(flow.standing, Standing::Failed { .. }));
        let open = self.tracked.as_ref().is_some_and(|tracked| tracked.phase == Phase::Open);
        if open && !failed && says(ShuntAction::Shunt) {
            assert_eq!(self.table.len(), 1, "it is to be shunted and is not: {live:?}");
        }
        let in_table: u64 = self.table.values().map(|(_, count)| count).sum();
        let of_live =
            live.map_or(0, |flow| flow.before.to_server.bytes + flow.dropped_before.to_server.bytes);
        assert_eq!(
            self.recorded_fast + of_live + in_table,
            self.sent_fast,
            "bytes of the fast path are lost"
        );
        if !self.lost {
            assert!(self.recorded_slow <= self.sent_slow);
        }
    }

    fn settle_and_check(mut self) {
        self.settle();
        self.check();
        // Another packet makes the rules decide if they have not: then the state must match their decision.
        self.packet();
        self.settle();
        self.check();
        // After the shutdown, all entries must be removed.
        self.tell(Input::Shutdown);
        self.settle();
        assert!(self.table.is_empty() && self.shunt.is_empty());
    }
}

#[test]
fn every_order_of_events_keeps_the_rules() {
    let mut paths: Vec<(World, usize)> = KINDS.map(|kind| (World::new(kind), 0)).into();
    // Begin with a marked connection, so that no steps are needed to get there.
    for (world, _) in &mut paths {
        world.step(Step::Packet);
        world.step(Step::List);
    }
    let mut worlds = 0;
    while let Some((world, depth)) = paths.pop() {
        worlds += 1;
        if depth < 4 {
            paths.extend(STEPS.iter().map(|step| {
                let mut next = world.clone();
                next.step(*step);
                (next, depth + 1)
            }));
        }
        world.settle_and_check();
    }
    assert_eq!(worlds, KINDS.len() * (1 + 16 + 256 + 4096 + 65536));
}

/// xorshift64*, so that a seed determines a run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).expect("31 bits") % bound
    }
}

#[test]
fn long_random_runs_keep_the_rules() {
    for seed in 1..=2000 {
        let mut random = Random(seed);
        let mut world = World::new(KINDS[random.below(KINDS.len())]);
        for _ in 0..100 {
            // Packets and deliveries are more frequent than faults.
            let step = match random.below(32) {
                0..16 => STEPS[random.below(STEPS.len())],
                16..24 => Step::Packet,
                24..28 => Step::Report,
                28..30 => Step::Confirm,
                _ => Step::Remove,
            };
            world.step(step);
            if random.below(10) == 0 {
                world.clone().settle_and_check();
            }
        }
        world.settle_and_check();
    }
}

fn established(mark: Mark) -> Connection {
    Connection {
        tuple: tuple(),
        identity: Identity::new(7, Some(1)),
        mark,
        phase: Some(Phase::Open),
        both_ways: true,
        translated: false,
        inspected: false,
        traffic: None,
    }
}

fn outputs(shunt: &mut Shunt) -> Vec<Output> {
    std::iter::from_fn(|| shunt.poll()).collect()
}

fn wants_entry(connection: Connection) -> bool {
    let mut shunt = Shunt::new(config(FastPathKind::Tc), Instant::ZERO);
    shunt.handle(Instant::ZERO, Input::Connection(connection));
    outputs(&mut shunt).iter().any(|output| matches!(output, Output::Install(_)))
}

#[test]
fn what_is_never_shunted() {
    let shunt = mark_for(ShuntAction::Shunt);
    assert!(wants_entry(established(shunt)));
    assert!(!wants_entry(established(mark_for(ShuntAction::Ignore))));
    assert!(!wants_entry(established(Mark(PORTS))), "undecided");
    assert!(!wants_entry(established(Mark(shunt.0 & !Mark::EGRESS_KNOWN))), "only one port known");
    assert!(!wants_entry(established(Mark(0x7131_0000))), "port 3 is not configured");
    assert!(!wants_entry(established(Mark(0x7111_0000))), "out by the port it came in by");
    assert!(!wants_entry(established(Mark(0x7123_0000))), "action 3 means nothing");
    for phase in [Phase::Opening, Phase::Closing, Phase::Reset] {
        assert!(!wants_entry(Connection { phase: Some(phase), ..established(shunt) }), "{phase:?}");
    }
    assert!(!wants_entry(Connection { both_ways: false, ..established(shunt) }));
    assert!(!wants_entry(Connection { translated: true, ..established(shunt) }));
    assert!(!wants_entry(Connection { inspected: true, ..established(shunt) }));
    let block = mark_for(ShuntAction::Block);
    let half = Connection { both_ways: false, phase: Some(Phase::Opening), ..established(block) };
    assert!(wants_entry(half), "a block waits for nothing");
}

#[test]
fn one_client_cannot_take_the_whole_table_and_blocks_have_a_reserve() {
    let mut shunt = Shunt::new(config(FastPathKind::Tc), Instant::ZERO);
    let mut install = |client: u8, port: u16, action| {
        let mut connection = established(mark_for(action));
        let client = ([10, 0, 0, client], port).into();
        connection.tuple = Tuple::new(client, connection.tuple.server(), Transport::Tcp, 0);
        shunt.handle(Instant::ZERO, Input::Connection(connection));
        outputs(&mut shunt).iter().any(|output| matches!(output, Output::Install(_)))
    };
    let of_one = (1..10).filter(|port| install(1, *port, ShuntAction::Shunt)).count();
    assert_eq!(of_one, 4);
    let of_all = (2..30).filter(|client| install(*client, 1, ShuntAction::Shunt)).count();
    assert_eq!(of_one + of_all, 18);
    let blocks = (2..30).filter(|client| install(*client, 2, ShuntAction::Block)).count();
    assert_eq!(blocks, 2);
}

#[test]
fn a_confirmation_that_never_comes_is_given_up() {
    let mut world = World::new(FastPathKind::Tc);
    world.step(Step::Packet);
    world.list();
    assert_eq!(world.installing.len(), 1);
    world.step(Step::Late);
    assert_eq!(world.removing.len(), 1, "asked to let go");
    let id = world.installing.pop_front().unwrap().id;
    world.removing.clear();
    world.tell(Input::Gone(id, Cause::Lost, Both::default()));
    assert_eq!(world.shunt.flow(&tuple()).unwrap().cause, Some(Cause::Unconfirmed));
    assert_eq!(world.shunt.entries(), 0);
}

#[test]
fn pins_go_before_policy_until_they_are_withdrawn() {
    let mut shunt = Shunt::new(config(FastPathKind::Tc), Instant::ZERO);
    let now = Instant::ZERO;
    let marked = established(mark_for(ShuntAction::Shunt));
    shunt.handle(now, Input::Connection(marked));
    let Some(Output::Install(entry)) = outputs(&mut shunt).pop() else { panic!("wanted") };
    shunt.handle(now, Input::Installed(entry.id));
    outputs(&mut shunt);
    shunt.handle(now, Input::Pinned(marked, ShuntAction::Ignore));
    assert_eq!(outputs(&mut shunt), [Output::Remove(entry.id, Cause::Withdrawn)]);
    shunt.handle(now, Input::Gone(entry.id, Cause::Withdrawn, bytes(5)));
    shunt.handle(now, Input::Connection(marked));
    assert_eq!(outputs(&mut shunt), [], "released for good");
    let flow = *shunt.flow(&tuple()).unwrap();
    assert_eq!((shunt.obstacle(&flow), flow.fast()), (Some(Obstacle::Held), bytes(5)));
    shunt.handle(now, Input::Pinned(marked, ShuntAction::Block));
    let Some(Output::Install(block)) = outputs(&mut shunt).pop() else { panic!("wanted") };
    assert!(block.block && block.id > entry.id);
    shunt.handle(now, Input::Installed(block.id));
    assert_eq!(outputs(&mut shunt), [Output::KeepBlocked(tuple(), marked.identity)]);
    shunt.handle(now, Input::Withdraw(tuple()));
    assert_eq!(outputs(&mut shunt), [Output::Remove(block.id, Cause::Withdrawn)]);
    shunt.handle(now, Input::Gone(block.id, Cause::Withdrawn, bytes(1)));
    assert_eq!(outputs(&mut shunt), [Output::Ask(tuple(), marked.identity)], "inspected again");
}

#[test]
fn a_shunted_connection_is_kept_in_conntrack() {
    let mut world = World::new(FastPathKind::Tc);
    world.step(Step::Packet);
    world.list();
    world.step(Step::Confirm);
    let mut kept = 0;
    for _ in 0..60 {
        world.now = world.now + Duration::from_secs(6);
        world.shunt.handle(world.now, Input::Tick);
        kept += outputs(&mut world.shunt).iter().filter(|output| matches!(output, Output::Keep(..))).count();
    }
    assert_eq!(kept, 3, "every 100 s in 360 s");
}
