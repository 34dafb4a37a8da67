//! Real-time links in a chain: what arrives in time, and at which cost, under bursts of losses.

use crate::random::{Random, each_seed, seeds};
use crate::redundancy::graph;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Protocol, Spread};
use sidetrack_core::overlay::realtime::{
    Input, KEPT_MAX, MISSING_MAX, Output, REQUESTS, RETRANSMISSIONS, Recovery,
};
use sidetrack_core::overlay::service::{LinkKind, Service};
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::time::Instant;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

const HOPS: usize = 3;
const HOP: Duration = Duration::from_millis(10);
const BUDGET: Duration = Duration::from_millis(65);

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// A packet of a source with this budget.
fn packet(source: &mut Source) -> Box<Spread> {
    let graph = graph(&[(1, 2, 5)], &BTreeSet::new());
    let service = Service { deadline: Some(BUDGET), ..Service::new(LinkKind::RealTime) };
    let subgraph = graph.subgraph(NodeId(1), NodeId(2), &service).expect("a path");
    Box::new(source.packet(&service, subgraph, Protocol::Ip, vec![1]))
}

/// Two states (Gilbert and Elliott): in the bad one everything on the link is lost, both ways.
struct Burst {
    is_bad: bool,
    until: Instant,
}

impl Burst {
    /// Whether the link loses what is sent now. Bad times last 4 ms on average, good ones 396 ms: 1 % of the time.
    fn loses(&mut self, now: Instant, random: &mut Random) -> bool {
        while self.until <= now {
            self.is_bad = !self.is_bad;
            let mean_us = if self.is_bad { 4_000.0 } else { 396_000.0 };
            let uniform = (random.below(1 << 30) + 1) as f64 / (1_u64 << 30) as f64;
            self.until = self.until + Duration::from_micros((-uniform.ln() * mean_us) as u64 + 1);
        }
        self.is_bad
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Source,
    /// Data with this number on the hop, of the packet with this sequence and age.
    Data(usize, u64, u64, u32),
    Request(usize, Vec<u64>),
    /// An end has something to do: hop, and whether it is the receiving one.
    Wake(usize, bool),
}

/// What happened to a stream.
#[derive(Debug, Default)]
struct Result {
    sent: u64,
    in_time: u64,
    late: u64,
    /// Data frames on all hops.
    copies: u64,
    lost: u64,
}

/// A stream of a packet each millisecond over a chain of links, of which the middle one loses.
struct Chain {
    now: Instant,
    random: Random,
    burst: Burst,
    ends: Vec<[Recovery; 2]>,
    heap: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    serial: u64,
    seen: Vec<BTreeSet<u64>>,
    result: Result,
}

impl Chain {
    fn new(seed: u64) -> Self {
        let mut ends: Vec<_> = (0..HOPS).map(|_| [Recovery::default(), Recovery::default()]).collect();
        ends.iter_mut().flatten().for_each(|end| end.handle(Instant::ZERO, Input::RoundTrip(2 * HOP)));
        Self {
            now: Instant::ZERO,
            random: Random::new(seed),
            burst: Burst { is_bad: true, until: Instant::ZERO },
            ends,
            heap: BinaryHeap::new(),
            serial: 0,
            seen: vec![BTreeSet::new(); HOPS],
            result: Result::default(),
        }
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.serial += 1;
        self.heap.push(Reverse((at, self.serial, event)));
    }

    fn run(mut self, count: u64) -> Result {
        let mut source = Source::new(1);
        self.schedule(self.now, Event::Source);
        while let Some(Reverse((at, _, event))) = self.heap.pop() {
            self.now = at;
            match event {
                Event::Source => {
                    self.result.sent += 1;
                    let packet = packet(&mut source);
                    self.forward(0, packet);
                    if self.result.sent < count {
                        self.schedule(at + ms(1), Event::Source);
                    }
                }
                Event::Data(hop, number, sequence, age_us) => self.data(hop, number, sequence, age_us),
                Event::Request(hop, numbers) => self.tell(hop, 0, Input::Requested(numbers)),
                Event::Wake(hop, is_receiver) => self.tell(hop, usize::from(is_receiver), Input::Tick),
            }
        }
        self.result
    }

    /// Time left for a packet of this age when `hops` links are still before it.
    fn left(age_us: u32, hops: usize) -> Duration {
        BUDGET.saturating_sub(Duration::from_micros(age_us.into())).saturating_sub(HOP * hops as u32)
    }

    fn forward(&mut self, hop: usize, packet: Box<Spread>) {
        let left = Self::left(packet.age_us, HOPS - 1 - hop);
        self.tell(hop, 0, Input::Send(packet, left));
    }

    fn data(&mut self, hop: usize, number: u64, sequence: u64, age_us: u32) {
        let age_us = age_us + HOP.as_micros() as u32;
        self.tell(hop, 1, Input::Came(number, Self::left(age_us, HOPS - 1 - hop)));
        if !self.seen[hop].insert(sequence) {
            return;
        }
        if Duration::from_micros(age_us.into()) > BUDGET {
            self.result.late += 1;
        } else if hop + 1 == HOPS {
            // The age that nodes count is the time that passed.
            assert!(self.now.since(Instant::ZERO + ms(sequence)) <= BUDGET);
            self.result.in_time += 1;
        } else {
            let mut source = Source::new(1);
            let mut packet = packet(&mut source);
            (packet.sequence, packet.age_us) = (sequence, age_us);
            self.forward(hop + 1, packet);
        }
    }

    fn tell(&mut self, hop: usize, end: usize, input: Input) {
        let now = self.now;
        self.ends[hop][end].handle(now, input);
        while let Some(output) = self.ends[hop][end].poll() {
            let is_lost = hop == 1 && self.burst.loses(now, &mut self.random);
            let event = match output {
                Output::Data(number, packet) => {
                    self.result.copies += 1;
                    Event::Data(hop, number, packet.sequence, packet.age_us)
                }
                Output::Request(numbers) => Event::Request(hop, numbers),
            };
            self.result.lost += u64::from(is_lost);
            if !is_lost {
                self.schedule(now + HOP, event);
            }
        }
        if let Some(at) = self.ends[hop][end].deadline() {
            self.schedule(at.max(now + Duration::from_micros(1)), Event::Wake(hop, end == 1));
        }
    }
}

#[test]
fn bursts_of_losses_on_one_of_three_hops_cost_a_packet_in_a_thousand_at_most() {
    let (mut all, mut runs) = (Result::default(), 0);
    for seed in seeds(40) {
        let one = Chain::new(seed).run(5_000);
        all.sent += one.sent;
        all.in_time += one.in_time;
        all.late += one.late;
        all.copies += one.copies;
        all.lost += one.lost;
        runs += 1;
    }
    let in_time = all.in_time as f64 / all.sent as f64;
    let copies = all.copies as f64 / (all.sent * HOPS as u64) as f64;
    println!("{runs} runs: {all:?}: {:.4} % in time, {copies:.4} copies on each hop", in_time * 100.0);
    assert!(all.lost * 1000 > all.sent * 7, "about one in a hundred is lost: {all:?}");
    assert!(in_time >= 0.999, "{in_time}");
    assert!(copies <= 1.05, "{copies}");
}

#[test]
fn a_missing_packet_is_requested_while_it_can_be_in_time_and_not_after() {
    let mut end = Recovery::default();
    let at = |count: u64| Instant::ZERO + ms(count);
    end.handle(at(0), Input::RoundTrip(ms(20)));
    end.handle(at(0), Input::Came(0, ms(50)));
    assert_eq!(end.poll(), None);
    // 1 and 2 are missing; a request is answered a round trip later, so it leaves within the first 30 ms.
    end.handle(at(1), Input::Came(3, ms(50)));
    let mut requests = Vec::new();
    for time in 1..60 {
        end.handle(at(time), Input::Tick);
        requests.extend(std::iter::from_fn(|| end.poll()).map(|output| (time, output)));
        if time == 12 {
            end.handle(at(time), Input::Came(2, ms(38)));
        }
    }
    let request = |numbers: &[u64]| Output::Request(numbers.to_vec());
    assert_eq!(requests, [(1, request(&[1, 2])), (11, request(&[1, 2])), (21, request(&[1]))]);
    let counts = end.counts();
    assert_eq!((counts.requested, counts.recovered, counts.given_up), (5, 1, 1));
    assert_eq!(end.deadline(), None, "nothing is left to do");
    // What cannot be in time is not requested.
    end.handle(at(70), Input::Came(6, ms(19)));
    assert_eq!((end.poll(), end.counts().given_up), (None, 3));
    // A repetition, and one that is late, change nothing.
    end.handle(at(71), Input::Came(6, ms(19)));
    end.handle(at(71), Input::Came(1, ms(19)));
    assert_eq!((end.poll(), end.deadline(), end.counts().recovered), (None, None, 1));
}

#[test]
fn the_first_request_starts_the_retransmissions_and_they_carry_their_age() {
    let mut end = Recovery::default();
    let mut source = Source::new(1);
    let at = |count: u64| Instant::ZERO + ms(count);
    end.handle(at(0), Input::RoundTrip(ms(20)));
    end.handle(at(0), Input::Send(packet(&mut source), ms(60)));
    assert!(matches!(end.poll(), Some(Output::Data(0, _))));
    let mut sent = Vec::new();
    for time in 20..90 {
        // It is requested again and again, and so is a number that was never sent.
        end.handle(at(time), Input::Requested(vec![0, 7]));
        while let Some(Output::Data(number, packet)) = end.poll() {
            sent.push((time, number, packet.age_us));
        }
    }
    assert_eq!(sent, [(20, 0, 20_000), (35, 0, 35_000)]);
    assert_eq!(sent.len(), RETRANSMISSIONS as usize);
    // A request that comes too late starts nothing.
    end.handle(at(100), Input::Send(packet(&mut source), ms(60)));
    end.poll();
    end.handle(at(155), Input::Requested(vec![1]));
    assert_eq!((end.poll(), end.deadline()), (None, None));
}

#[test]
fn memory_and_traffic_are_bounded_whatever_comes() {
    each_seed(100, |seed| {
        let mut random = Random::new(seed);
        let mut end = Recovery::default();
        let mut source = Source::new(1);
        let mut now = Instant::ZERO + ms(10_000);
        let (mut data, mut requests) = (BTreeMap::<u64, u32>::new(), BTreeMap::<u64, u32>::new());
        let mut newest = 0;
        for _ in 0..1_500 {
            // The clock may go back.
            now = if random.permille(20) {
                Instant::ZERO + now.since(Instant::ZERO + ms(random.below(300)))
            } else {
                now + Duration::from_micros(random.below(4_000))
            };
            let left = ms(random.below(200));
            let input = match random.below(7) {
                0..2 => Input::Send(packet(&mut source), left),
                2 => {
                    newest += random.below(20);
                    Input::Came(newest, left)
                }
                3 => Input::Came(random.next() >> random.below(64), left),
                4 => Input::Requested((0..random.below(64)).map(|_| random.below(1_000)).collect()),
                5 => Input::RoundTrip(ms(random.below(100))),
                _ => Input::Tick,
            };
            end.handle(now, input);
            while let Some(output) = end.poll() {
                match output {
                    Output::Data(number, _) => *data.entry(number).or_default() += 1,
                    Output::Request(numbers) => {
                        assert!(!numbers.is_empty() && numbers.windows(2).all(|two| two[0] < two[1]));
                        numbers.into_iter().for_each(|number| *requests.entry(number).or_default() += 1);
                    }
                }
            }
        }
        assert!(data.values().all(|times| *times <= 1 + RETRANSMISSIONS));
        assert!(requests.values().all(|times| *times <= REQUESTS));
        let text = format!("{end:?}");
        assert!(text.matches("Kept {").count() <= KEPT_MAX);
        assert!(text.matches("Missing {").count() <= MISSING_MAX);
    });
}
