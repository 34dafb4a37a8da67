//! The table of UDP associations: every sequence of events on small tables, and random ones on larger tables, against
//! a model that searches a plain list.

use proptest::prelude::*;
use sidetrack_core::association::{
    Config, Counts, Dropped, Filtering, HELD_BYTES_MAX, HELD_MAX, Id, Input, MappingId, Output, Table,
};
use sidetrack_core::flow::{Destination, EndReason, Side};
use sidetrack_core::time::Instant;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const FILTERINGS: [Filtering; 3] =
    [Filtering::EndpointIndependent, Filtering::AddressDependent, Filtering::AddressAndPortDependent];

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn to(text: &str) -> Destination {
    text.parse().expect("a destination")
}

/// What the driver may do, with associations and mappings by their order of appearance.
#[derive(Clone, Copy, Debug)]
enum Act {
    Client(usize, usize, usize),
    Server(usize, usize, usize),
    Open(usize, Option<usize>),
    Refuse(usize),
    Error(usize),
    Kill(usize),
    Close(usize),
    Wait(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked,
    Open,
    Refused,
}

#[derive(Clone, Debug)]
struct Row {
    id: Id,
    mapping: MappingId,
    client: SocketAddr,
    destination: Destination,
    remote: Option<SocketAddr>,
    state: State,
    from: Side,
    begun: Instant,
    used: Instant,
    /// Rises with each use.
    turn: u64,
    /// The turn in which it was refused.
    refused: u64,
    counts: Counts,
    held: (u64, u64),
    error: Option<EndReason>,
}

/// The specification: a list without any index.
#[derive(Clone)]
struct World {
    config: Config,
    table: Table,
    now: Instant,
    turn: u64,
    rows: Vec<Row>,
    ids: BTreeSet<Id>,
    ended: BTreeSet<Id>,
    all: Vec<Id>,
    mappings: Vec<MappingId>,
    clients: Vec<SocketAddr>,
    destinations: Vec<Destination>,
    remotes: Vec<SocketAddr>,
}

impl World {
    fn new(config: Config) -> Self {
        let clients = ["192.0.2.1:1000", "192.0.2.1:1001", "[2001:db8::1]:1000", "[2001:db8::2]:1000"];
        let destinations = ["198.51.100.1:53", "198.51.100.1:54", "198.51.100.2:53", "dns.example:53"];
        let remotes = ["198.51.100.1:53", "198.51.100.1:54", "198.51.100.2:53", "198.51.100.3:53"];
        Self {
            table: Table::new(config.clone()),
            config,
            now: Instant::from_millis(1),
            turn: 0,
            rows: Vec::new(),
            ids: BTreeSet::new(),
            ended: BTreeSet::new(),
            all: Vec::new(),
            mappings: Vec::new(),
            clients: clients.map(address).to_vec(),
            destinations: destinations.map(to).to_vec(),
            remotes: remotes.map(address).to_vec(),
        }
    }

    fn source(client: SocketAddr) -> IpAddr {
        match client.ip() {
            IpAddr::V4(ip) => ip.into(),
            IpAddr::V6(ip) => std::net::Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        }
    }

    fn used_by(&self, client: SocketAddr) -> usize {
        self.rows.iter().filter(|row| Self::source(row.client) == Self::source(client)).count()
    }

    fn handle(&mut self, input: Input<'_>) -> Vec<Output> {
        self.table.handle(self.now, input);
        std::iter::from_fn(|| self.table.poll()).collect()
    }

    /// Removes a row, as the table must say.
    fn leaves(&mut self, at: usize, reason: Option<EndReason>, expected: &mut Vec<Output>) {
        let row = self.rows.remove(at);
        if let Some(reason) = reason.filter(|_| row.state != State::Refused) {
            expected.push(Output::End { id: row.id, reason, counts: row.counts });
        }
        if !self.rows.iter().any(|other| other.mapping == row.mapping) {
            expected.push(Output::Unmapped(row.mapping));
        }
    }

    fn room_for(&mut self, client: SocketAddr, expected: &mut Vec<Output>) {
        let own = self.used_by(client) >= self.config.per_client;
        let leaves = if self.rows.len() >= self.config.max {
            let rows = self.rows.iter().enumerate();
            let rows = rows.filter(|(_, row)| !own || Self::source(row.client) == Self::source(client));
            // In a full table, a client at its share gives its own; otherwise refused ones leave first.
            let order = |row: &Row| match row.state {
                State::Refused if !own => (0, row.refused),
                _ => (1, row.turn),
            };
            rows.min_by_key(|(_, row)| order(row)).map(|(at, _)| at)
        } else {
            None
        };
        if let Some(at) = leaves {
            self.leaves(at, Some(EndReason::Limit), expected);
        }
    }

    /// What happens to a datagram of this row.
    fn passes(&mut self, at: usize, from: Side, bytes: usize) -> Output {
        let total: u64 = self.rows.iter().map(|row| row.held.1).sum();
        self.turn += 1;
        let (now, turn) = (self.now, self.turn);
        let row = &mut self.rows[at];
        let output = match row.state {
            State::Refused => return Output::Drop(Dropped::Refused),
            State::Asked if row.from != from => return Output::Drop(Dropped::Waiting),
            State::Asked if row.held.0 >= HELD_MAX.into() || total + bytes as u64 > HELD_BYTES_MAX as u64 => {
                return Output::Drop(Dropped::Waiting);
            }
            State::Asked => {
                row.held = (row.held.0 + 1, row.held.1 + bytes as u64);
                Output::Hold(row.id)
            }
            State::Open if from == Side::Client => {
                row.counts.packets_up += 1;
                row.counts.bytes_up += bytes as u64;
                Output::Forward(row.id)
            }
            State::Open => {
                row.counts.packets_down += 1;
                row.counts.bytes_down += bytes as u64;
                row.error = None;
                Output::Deliver(row.id)
            }
        };
        (row.used, row.turn) = (now, turn);
        output
    }

    /// A new row for a datagram: takes over the ids that the table has chosen, after checking them.
    fn begins(
        &mut self,
        client: SocketAddr,
        destination: Destination,
        from: Side,
        actual: &[Output],
        expected: &mut Vec<Output>,
    ) -> usize {
        let begin = actual.iter().find_map(|output| match output {
            Output::Begin { id, mapping, .. } => Some((*id, *mapping)),
            _ => None,
        });
        let (id, mapping) = begin.expect("a new association begins");
        assert!(self.ids.insert(id), "an id is not used again");
        assert!((id.slot as usize) < self.config.max && (mapping.0 as usize) < self.config.max);
        assert!(!self.rows.iter().any(|row| row.id.slot == id.slot), "the slot is free");
        let known = self.rows.iter().find(|row| row.client == client).map(|row| row.mapping);
        assert!(known.is_none_or(|known| known == mapping), "a client endpoint keeps its mapping");
        assert!(
            !self.rows.iter().any(|row| row.mapping == mapping && row.client != client),
            "a mapping has one client"
        );
        self.all.push(id);
        if !self.mappings.contains(&mapping) {
            self.mappings.push(mapping);
        }
        self.turn += 1;
        self.rows.push(Row {
            id,
            mapping,
            client,
            destination,
            remote: None,
            state: State::Asked,
            from,
            begun: self.now,
            used: self.now,
            turn: self.turn,
            refused: 0,
            counts: Counts::default(),
            held: (0, 0),
            error: None,
        });
        expected.push(Output::Begin { id, mapping, is_mapping_new: known.is_none(), from });
        self.rows.len() - 1
    }

    fn client(&mut self, client: usize, destination: usize, bytes: usize) {
        let (client, destination) = (self.clients[client], self.destinations[destination].clone());
        let actual = self.handle(Input::FromClient { client, destination: &destination, bytes });
        let mut expected = Vec::new();
        let known = self.rows.iter().position(|row| row.client == client && row.destination == destination);
        let at = known.unwrap_or_else(|| {
            self.room_for(client, &mut expected);
            self.begins(client, destination, Side::Client, &actual, &mut expected)
        });
        expected.push(self.passes(at, Side::Client, bytes));
        assert_eq!(actual, expected);
    }

    fn server(&mut self, mapping: usize, remote: usize, bytes: usize) {
        let Some(&mapping) = self.mappings.get(mapping) else { return };
        let remote = self.remotes[remote];
        let actual = self.handle(Input::FromServer { mapping, remote, bytes });
        let mut expected = Vec::new();
        let of_mapping = |row: &Row| row.mapping == mapping;
        let Some(client) = self.rows.iter().find(|row| of_mapping(row)).map(|row| row.client) else {
            assert_eq!(actual, [Output::Drop(Dropped::Unknown)]);
            return;
        };
        // Of several that lead to one address, the one that was opened first and is still there.
        let owner = self.rows.iter().position(|row| of_mapping(row) && row.remote == Some(remote));
        let is_known =
            |row: &Row| of_mapping(row) && row.remote.is_some_and(|other| other.ip() == remote.ip());
        let may = match self.config.filtering {
            Filtering::EndpointIndependent => true,
            Filtering::AddressDependent => self.rows.iter().any(is_known),
            Filtering::AddressAndPortDependent => false,
        };
        let destination = Destination::from(remote);
        let asked = self.rows.iter().position(|row| of_mapping(row) && row.destination == destination);
        let output = match (owner, asked) {
            (Some(at), _) => self.passes(at, Side::Server, bytes),
            (None, _) if !may => Output::Drop(Dropped::Filtered),
            (None, Some(at)) => self.passes(at, Side::Server, bytes),
            (None, None) if self.rows.len() >= self.config.max => Output::Drop(Dropped::Full),
            (None, None) => {
                let at = self.begins(client, destination, Side::Server, &actual, &mut expected);
                self.passes(at, Side::Server, bytes)
            }
        };
        expected.push(output);
        assert_eq!(actual, expected);
    }

    fn open(&mut self, id: Id, remote: Option<usize>) {
        let remote = remote.map(|remote| self.remotes[remote]);
        let actual = self.handle(Input::Opened { id, remote, idle: None, lifetime: None });
        let mut expected = Vec::new();
        let now = self.now;
        let taken = |rows: &[Row], row: &Row| {
            rows.iter()
                .any(|other| other.mapping == row.mapping && other.remote == remote && other.id != row.id)
        };
        let row = self.rows.iter().position(|row| row.id == id && row.state == State::Asked);
        if let Some(at) = row {
            let is_taken = taken(&self.rows, &self.rows[at]);
            let row = &mut self.rows[at];
            row.state = State::Open;
            row.remote = remote.filter(|_| !is_taken);
            let (packets, bytes) = std::mem::take(&mut row.held);
            match row.from {
                Side::Client => (row.counts.packets_up, row.counts.bytes_up) = (packets, bytes),
                Side::Server => (row.counts.packets_down, row.counts.bytes_down) = (packets, bytes),
            }
            row.used = now;
            expected.extend((packets > 0).then_some(Output::Release(id)));
        }
        assert_eq!(actual, expected);
    }

    fn refuse(&mut self, id: Id) {
        let actual = self.handle(Input::Refused(id, EndReason::PolicyDenied));
        self.turn += 1;
        let (now, turn) = (self.now, self.turn);
        let row = self.rows.iter_mut().find(|row| row.id == id && row.state == State::Asked);
        let expected = row.map(|row| {
            (row.state, row.used, row.refused, row.held) = (State::Refused, now, turn, (0, 0));
            Output::End { id, reason: EndReason::PolicyDenied, counts: row.counts }
        });
        assert_eq!(actual, Vec::from_iter(expected));
    }

    fn tick(&mut self) {
        let actual = self.handle(Input::Tick);
        let due = |row: &Row, config: &Config| match row.state {
            State::Asked => (row.begun + config.opening, Some(EndReason::ConnectTimeout)),
            State::Refused => (row.used + config.refused_for, None),
            State::Open => {
                let idle = (row.used + config.idle, Some(row.error.unwrap_or(EndReason::Idle)));
                let life = config.lifetime.map(|life| (row.begun + life, Some(EndReason::Lifetime)));
                life.filter(|life| life.0 <= idle.0).unwrap_or(idle)
            }
        };
        let mut expected = Vec::new();
        while let Some(at) = self.rows.iter().position(|row| due(row, &self.config).0 <= self.now) {
            let lifetime = self.config.lifetime;
            let row = &self.rows[at];
            let is_old =
                lifetime.is_some_and(|life| self.now >= row.begun + life) && row.state == State::Open;
            let reason = if is_old { Some(EndReason::Lifetime) } else { due(row, &self.config).1 };
            self.leaves(at, reason, &mut expected);
        }
        // Those that are due at once leave in any order.
        let sorted = |outputs: &[Output]| {
            let mut texts: Vec<_> = outputs.iter().map(|output| format!("{output:?}")).collect();
            texts.sort();
            texts
        };
        assert_eq!(sorted(&actual), sorted(&expected));
        for output in actual {
            self.note(output);
        }
    }

    fn note(&mut self, output: Output) {
        if let Output::End { id, .. } = output {
            assert!(self.ended.insert(id), "one end for each association");
        }
    }

    fn act(&mut self, act: Act) {
        let id = |all: &[Id], at: usize| all.get(at).copied();
        match act {
            Act::Client(client, destination, bytes) => self.client(client, destination, bytes),
            Act::Server(mapping, remote, bytes) => self.server(mapping, remote, bytes),
            Act::Open(at, remote) => {
                if let Some(id) = id(&self.all, at) {
                    self.open(id, remote);
                }
            }
            Act::Refuse(at) => {
                if let Some(id) = id(&self.all, at) {
                    self.refuse(id);
                }
            }
            Act::Error(at) => {
                if let Some(id) = id(&self.all, at) {
                    assert_eq!(self.handle(Input::Error(id, EndReason::Refused)), []);
                    let row = self.rows.iter_mut().find(|row| row.id == id && row.state != State::Refused);
                    row.into_iter().for_each(|row| row.error = Some(EndReason::Refused));
                }
            }
            Act::Kill(at) => {
                if let Some(id) = id(&self.all, at) {
                    let actual = self.handle(Input::End(id, EndReason::Killed));
                    let mut expected = Vec::new();
                    let at = self.rows.iter().position(|row| row.id == id && row.state != State::Refused);
                    if let Some(at) = at {
                        self.leaves(at, Some(EndReason::Killed), &mut expected);
                    }
                    assert_eq!(actual, expected);
                }
            }
            Act::Close(at) => self.close(at),
            Act::Wait(millis) => {
                self.now = self.now + Duration::from_millis(millis);
                self.tick();
            }
        }
        assert_eq!(self.table.len(), self.rows.len());
        assert!(self.rows.len() <= self.config.max);
        for row in &self.rows {
            let is_alive = row.state != State::Refused;
            assert_eq!(self.table.counts(row.id), is_alive.then_some(row.counts));
            assert_eq!(self.table.client_of(row.mapping), Some(row.client));
            assert_eq!(self.table.mapping_of(row.client), Some(row.mapping));
            assert_eq!(self.table.parties(row.id), is_alive.then_some((row.client, &row.destination)));
        }
        assert_eq!(self.table.deadline().is_none(), self.rows.is_empty() && self.table.deadline().is_none());
    }

    fn close(&mut self, at: usize) {
        let Some(&mapping) = self.mappings.get(at) else { return };
        let actual = self.handle(Input::Close(mapping, EndReason::Ok));
        let mut ends = 0;
        while let Some(at) = self.rows.iter().position(|row| row.mapping == mapping) {
            let mut expected = Vec::new();
            self.leaves(at, Some(EndReason::Ok), &mut expected);
            assert!(expected.iter().all(|output| actual.contains(output)), "{actual:?}");
            ends += expected.len();
        }
        assert_eq!(actual.len(), ends);
    }

    /// Everything ends, each association once.
    fn finish(mut self) {
        for at in 0..self.mappings.len() {
            self.close(at);
        }
        assert!(self.table.is_empty() && self.rows.is_empty());
        self.act(Act::Wait(1 << 40));
        assert_eq!(self.table.deadline(), None, "nothing is left to wait for");
    }
}

fn config(filtering: Filtering, max: usize, per_client: usize) -> Config {
    Config {
        filtering,
        max,
        per_client,
        idle: Duration::from_millis(10),
        lifetime: Some(Duration::from_millis(25)),
        opening: Duration::from_millis(7),
        refused_for: Duration::from_millis(5),
    }
}

/// Every sequence of these acts up to this length.
fn explore(world: &World, acts: &[Act], depth: usize, seen: &mut u64) {
    *seen += 1;
    if depth == 0 {
        return world.clone().finish();
    }
    for act in acts {
        let mut next = world.clone();
        next.act(*act);
        explore(&next, acts, depth - 1, seen);
    }
}

#[test]
fn every_sequence_on_a_small_table_is_as_the_model_says() {
    let acts = [
        Act::Client(0, 0, 1),
        Act::Client(1, 1, 0),
        Act::Client(2, 0, 2),
        Act::Server(0, 0, 3),
        Act::Server(0, 1, 1),
        Act::Open(0, Some(0)),
        Act::Open(1, Some(1)),
        Act::Refuse(0),
        Act::Kill(1),
        Act::Wait(6),
    ];
    for filtering in FILTERINGS {
        for (max, per_client) in [(2, 1), (1, 1), (2, 2)] {
            let mut seen = 0;
            explore(&World::new(config(filtering, max, per_client)), &acts, 4, &mut seen);
            assert_eq!(seen, 11_111);
        }
    }
}

fn act() -> impl Strategy<Value = Act> {
    let bytes = prop_oneof![Just(0_usize), Just(1), Just(1200), Just(65_507)];
    prop_oneof![
        6 => (0..4_usize, 0..4_usize, bytes.clone()).prop_map(|(a, b, c)| Act::Client(a, b, c)),
        6 => (0..6_usize, 0..4_usize, bytes).prop_map(|(a, b, c)| Act::Server(a, b, c)),
        6 => (0..40_usize, proptest::option::of(0..4_usize)).prop_map(|(a, b)| Act::Open(a, b)),
        1 => (0..40_usize).prop_map(Act::Refuse),
        1 => (0..40_usize).prop_map(Act::Error),
        1 => (0..40_usize).prop_map(Act::Kill),
        1 => (0..6_usize).prop_map(Act::Close),
        2 => (0..12_u64).prop_map(Act::Wait),
    ]
}

proptest! {
    #[test]
    fn any_sequence_is_as_the_model_says(
        filtering in prop_oneof![Just(FILTERINGS[0]), Just(FILTERINGS[1]), Just(FILTERINGS[2])],
        max in 1..9_usize,
        per_client in 1..9_usize,
        acts in proptest::collection::vec(act(), 0..120),
    ) {
        let mut world = World::new(config(filtering, max, per_client));
        for act in acts {
            world.act(act);
        }
        world.finish();
    }
}

fn outputs(table: &mut Table, now: Instant, input: Input<'_>) -> Vec<Output> {
    table.handle(now, input);
    std::iter::from_fn(|| table.poll()).collect()
}

#[test]
fn what_waits_is_bounded_for_one_association_and_for_all() {
    let mut table = Table::new(Config::default());
    let (now, destination) = (Instant::ZERO, to("198.51.100.1:53"));
    let mut send = |port: u16, bytes| {
        let client = SocketAddr::new([192, 0, 2, 1].into(), port);
        let outputs =
            outputs(&mut table, now, Input::FromClient { client, destination: &destination, bytes });
        *outputs.last().unwrap()
    };
    for _ in 0..HELD_MAX {
        assert!(matches!(send(1, 0), Output::Hold(_)));
    }
    assert_eq!(send(1, 0), Output::Drop(Dropped::Waiting), "one association");
    let mut port = 2;
    while let Output::Hold(_) = send(port, 65_507) {
        port += 1;
    }
    assert_eq!(usize::from(port - 2), HELD_BYTES_MAX / 65_507, "all associations");
    assert_eq!(table.totals().dropped[Dropped::Waiting as usize], 2);
}

#[test]
fn a_rule_gives_an_association_times_of_its_own() {
    let mut table = Table::new(Config::default());
    let (client, destination) = (address("192.0.2.1:1000"), to("198.51.100.1:53"));
    let datagram = Input::FromClient { client, destination: &destination, bytes: 1 };
    let began = outputs(&mut table, Instant::ZERO, datagram);
    let Output::Begin { id, .. } = began[0] else { panic!("{began:?}") };
    let (idle, lifetime) = (Some(Duration::from_secs(5)), Some(Duration::from_secs(12)));
    let opened = Input::Opened { id, remote: None, idle, lifetime };
    assert_eq!(outputs(&mut table, Instant::ZERO, opened), [Output::Release(id)]);
    let at = |seconds: u64| Instant::from_millis(seconds * 1000);
    for second in [4, 8] {
        assert_eq!(outputs(&mut table, at(second), Input::Tick), []);
        assert_eq!(outputs(&mut table, at(second), datagram), [Output::Forward(id)]);
    }
    assert_eq!(outputs(&mut table, at(11), Input::Tick), []);
    let ends = outputs(&mut table, at(12), Input::Tick);
    assert!(
        matches!(ends[0], Output::End { reason: EndReason::Lifetime, counts, .. } if counts.packets_up == 3)
    );
}

#[test]
fn the_one_that_is_idle_for_longest_leaves_if_the_driver_has_no_descriptor() {
    let mut table = Table::new(Config::default());
    let destination = to("198.51.100.1:53");
    let clients = ["192.0.2.1:1", "192.0.2.2:1", "192.0.2.1:2", "192.0.2.1:3", "192.0.2.3:1"].map(address);
    let mut send = |millis: u64, client| {
        let input = Input::FromClient { client, destination: &destination, bytes: 1 };
        let all = outputs(&mut table, Instant::from_millis(millis), input);
        all.iter().find_map(|output| match output {
            Output::Begin { id, .. } => Some(*id),
            _ => None,
        })
    };
    let ids: Vec<_> = (1..).zip(clients).filter_map(|(at, client)| send(at, client)).collect();
    assert_eq!(send(9, clients[0]), None, "it is used again");
    let [first, second, third, last, on_hop] = ids[..] else { panic!("{ids:?}") };
    let now = Instant::from_millis(10);
    assert_eq!(outputs(&mut table, now, Input::Refused(third, EndReason::PolicyDenied)).len(), 1);
    assert_eq!(table.leave_among(last, |_| false), None);
    assert_eq!(table.leave_among(second, |id| id == second), None, "it does not leave for itself");
    assert_eq!(table.leave_among(last, |id| id == third), None, "a refused one is on no hop");
    let left = table.leave_among(last, |id| id != second && id != first);
    assert_eq!(left.expect("older ones are on other hops").0, on_hop);
    let left = table.leave_for(last, true).expect("its client has another one");
    assert_eq!(left.0, first, "not the refused one, which has no descriptor");
    assert_eq!(table.leave_for(last, true), None);
    assert_eq!(table.leave_for(last, false).expect("another client's").0, second);
    assert_eq!(table.leave_for(last, false), None, "it does not leave for itself");
    let ends: Vec<_> = std::iter::from_fn(|| table.poll()).collect();
    let is_limit = |output: &Output, id| matches!(output, Output::End { id: of, reason: EndReason::Limit, .. } if *of == id);
    let has_left = |id| ends.iter().any(|end| is_limit(end, id));
    assert!(has_left(on_hop) && has_left(first) && has_left(second), "{ends:?}");
}
