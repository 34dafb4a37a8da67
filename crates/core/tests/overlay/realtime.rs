//! Real-time links in a chain: what arrives in time, and at which cost, under bursts of losses.

use crate::random::{Random, each_seed, seeds};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{
    Frame, Mark, Newest, Protocol, RESEND_MAX, Repeats, Resend, Spread, Subgraph, Timed,
};
use sidetrack_core::overlay::realtime::{
    Input, KEPT_MAX, MISSING_MAX, NOTES, QUIET, REPETITIONS_MAX, Recovery,
};
use sidetrack_core::overlay::service::{LinkKind, Service};
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const HOPS: usize = 3;
const HOP: Duration = Duration::from_millis(10);
const BUDGET: Duration = Duration::from_millis(65);

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// A packet of a source with this budget.
fn packet(source: &mut Source) -> Box<Spread> {
    let service = Service { deadline: Some(BUDGET), ..Service::new(LinkKind::RealTime) };
    let subgraph = Subgraph::new(NodeId(1), NodeId(2), [(NodeId(1), NodeId(2))]).expect("a link");
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

#[derive(Clone, Debug)]
enum Event {
    Source,
    /// A frame comes to the end of the hop with this index: 0 the sending one, 1 the receiving one.
    Frame(usize, usize, Frame),
    /// An end has something to do: hop and index.
    Wake(usize, usize),
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
    events: BTreeMap<(Instant, u64), Event>,
    serial: u64,
    /// When each end is woken next.
    wakes: [[Option<Instant>; 2]; HOPS],
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
            events: BTreeMap::new(),
            serial: 0,
            wakes: [[None; 2]; HOPS],
            seen: vec![BTreeSet::new(); HOPS],
            result: Result::default(),
        }
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.serial += 1;
        self.events.insert((at, self.serial), event);
    }

    /// A stream of this number of packets, one each `pace`.
    fn run(mut self, count: u64, pace: Duration) -> Result {
        let mut source = Source::new(1);
        self.schedule(self.now, Event::Source);
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now = at;
            match event {
                Event::Source => {
                    let mut packet = packet(&mut source);
                    packet.payload = at.as_nanos().to_be_bytes().to_vec();
                    self.result.sent += 1;
                    self.tell(0, 0, Input::Send(packet, BUDGET));
                    if self.result.sent < count {
                        self.schedule(at + pace, Event::Source);
                    }
                }
                Event::Frame(hop, end, frame) => self.frame(hop, end, frame),
                Event::Wake(hop, end) => {
                    self.wakes[hop][end] = None;
                    self.tell(hop, end, Input::Tick);
                }
            }
        }
        self.result
    }

    /// Does with a frame what the driver of a node does.
    fn frame(&mut self, hop: usize, end: usize, frame: Frame) {
        match frame {
            Frame::Timed(Timed { mark, mut packet }) => {
                packet.grow_older(HOP.as_micros() as u32);
                let left = packet.left().expect("it has a budget");
                self.tell(hop, end, Input::Came(mark, left));
                if self.seen[hop].insert(packet.sequence) {
                    self.pass(hop, packet);
                }
            }
            Frame::Resend(resend) => self.tell(hop, end, Input::Requested(resend)),
            Frame::Newest(newest) => self.tell(hop, end, Input::Newest(newest)),
            other => panic!("{other:?}"),
        }
    }

    fn pass(&mut self, hop: usize, packet: Box<Spread>) {
        let left = packet.left().expect("it has a budget");
        if packet.is_late() {
            self.result.late += 1;
        } else if hop + 1 == HOPS {
            // The age that nodes count is the time that passed.
            let sent = u64::from_be_bytes(packet.payload[..].try_into().expect("its time"));
            let took = self.now.since(Instant::from_nanos(sent));
            assert_eq!(took, Duration::from_micros(packet.age_us.into()));
            self.result.in_time += 1;
        } else {
            self.tell(hop + 1, 0, Input::Send(packet, left));
        }
    }

    fn tell(&mut self, hop: usize, end: usize, input: Input) {
        let now = self.now;
        self.ends[hop][end].handle(now, input);
        while let Some(frame) = self.ends[hop][end].poll() {
            let is_lost = hop == 1 && self.burst.loses(now, &mut self.random);
            self.result.copies += u64::from(matches!(frame, Frame::Timed(_)));
            self.result.lost += u64::from(is_lost);
            if !is_lost {
                self.schedule(now + HOP, Event::Frame(hop, 1 - end, frame));
            }
        }
        if let Some(at) = self.ends[hop][end].deadline()
            && self.wakes[hop][end].is_none()
        {
            self.wakes[hop][end] = Some(at);
            self.schedule(at, Event::Wake(hop, end));
        }
    }
}

#[test]
fn bursts_of_losses_on_one_of_three_hops_cost_a_packet_in_a_thousand_at_most() {
    let (mut all, mut runs) = (Result::default(), 0);
    for seed in seeds(40) {
        let one = Chain::new(seed).run(5_000, ms(1));
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
fn a_slow_stream_recovers_its_losses_too() {
    // Voice: the next packet comes after 20 ms. So the note after a short silence shows the loss.
    let (mut sent, mut in_time) = (0, 0);
    for seed in seeds(20) {
        let one = Chain::new(seed).run(1_000, ms(20));
        (sent, in_time) = (sent + one.sent, in_time + one.in_time);
    }
    assert!(in_time * 10_000 >= sent * 9_985, "{in_time} of {sent}");
    assert!(in_time < sent, "something is lost at all");
}

/// One end, and what it says at a time.
struct End {
    machine: Recovery,
    source: Source,
}

impl End {
    fn new() -> Self {
        let mut end = Self { machine: Recovery::default(), source: Source::new(1) };
        end.at(0, Input::RoundTrip(ms(20)));
        end
    }

    fn at(&mut self, time: u64, input: Input) -> Vec<Frame> {
        self.machine.handle(Instant::ZERO + ms(time), input);
        std::iter::from_fn(|| self.machine.poll()).collect()
    }

    fn send(&mut self, time: u64, left: u64) -> Vec<Frame> {
        let packet = packet(&mut self.source);
        self.at(time, Input::Send(packet, ms(left)))
    }

    /// A packet for the first time.
    fn came(&mut self, time: u64, number: u64, heard: u32, left: u64) -> Vec<Frame> {
        self.at(time, Input::Came(Mark { number, heard, repeats: None }, ms(left)))
    }
}

fn resend(request: u32, numbers: &[u64]) -> Frame {
    Frame::Resend(Resend { request, numbers: numbers.to_vec() })
}

#[test]
fn a_gap_is_requested_once_and_again_only_if_the_request_was_not_heard() {
    let mut end = End::new();
    assert_eq!(end.came(0, 0, 0, 90), []);
    // 1 and 2 are missing.
    assert_eq!(end.came(1, 3, 0, 90), [resend(1, &[1, 2])]);
    // Later packets do not show yet that the request was lost: it may still be on its way, and so may the answer.
    for time in 2..26 {
        assert_eq!(end.came(time, 2 + time, 0, 90), [], "{time}");
    }
    // A round trip and a quarter later they do. 2 came in the meantime.
    let repeats = Some(Repeats { first: 2, lost: 2 });
    assert_eq!(end.at(26, Input::Came(Mark { number: 28, heard: 1, repeats }, ms(90))), []);
    assert_eq!(end.came(27, 29, 0, 90), [resend(2, &[1])]);
    assert_eq!(end.came(28, 30, 0, 90), []);
    // The other end has heard this one, so there is no third; if the answer is lost, its number is missing.
    assert_eq!(end.came(70, 32, 2, 90), [resend(3, &[31])]);
    let repeats = Some(Repeats { first: 1, lost: 31 });
    assert_eq!(end.at(91, Input::Came(Mark { number: 33, heard: 3, repeats }, ms(90))), []);
    let counts = end.machine.take_counts();
    // 1 was there until 91, which is still in time.
    assert_eq!((counts.requested, counts.recovered, counts.given_up), (4, 2, 0));
    // What cannot be in time is not requested; a packet that came in another order is not lost.
    assert_eq!(end.came(200, 36, 3, 19), [resend(4, &[34, 35])], "the packet before was of use for longer");
    assert_eq!(end.came(201, 38, 3, 19), []);
    assert_eq!(end.came(202, 34, 3, 19), []);
    assert_eq!(end.came(300, 39, 4, 19), []);
    let counts = end.machine.take_counts();
    assert_eq!((counts.requested, counts.recovered, counts.given_up), (2, 0, 2), "37 and 35");
    assert_eq!(end.machine.deadline(), None, "an end that sends nothing has nothing to do");
}

#[test]
fn a_request_is_answered_once_with_a_new_number_and_the_age_of_the_packet() {
    let mut end = End::new();
    let sent = end.send(0, 60);
    assert!(matches!(&sent[..], [Frame::Timed(Timed { mark: Mark { number: 0, repeats: None, .. }, .. })]));
    let request = |request, numbers: &[u64]| Input::Requested(Resend { request, numbers: numbers.to_vec() });
    // So is a number that was never sent.
    let answers = end.at(20, request(1, &[0, 7]));
    let [Frame::Timed(Timed { mark, packet })] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(*mark, Mark { number: 1, heard: 1, repeats: Some(Repeats { first: 0, lost: 0 }) });
    assert_eq!(packet.age_us, 20_000);
    assert_eq!(end.at(21, request(1, &[0])), [], "the same number again");
    // The repetition is lost as well.
    let answers = end.at(45, request(2, &[1]));
    let Some(Frame::Timed(Timed { mark, packet })) = answers.last() else { panic!("{answers:?}") };
    assert_eq!(mark.repeats, Some(Repeats { first: 0, lost: 1 }));
    assert_eq!(packet.age_us, 45_000);
    // Now it would come too late.
    let note = Frame::Newest(Newest { number: 2, heard: 3 });
    assert_eq!(end.at(55, request(3, &[2])), [note]);
    assert_eq!(end.machine.take_counts().repeated, 2);
    // A packet is not sent again without end, whatever is requested.
    let first = end.send(100, 1_000).len();
    let copies: usize = (3..40).map(|number| end.at(100, request(4, &[number])).len()).sum();
    assert_eq!((first, copies), (1, usize::from(REPETITIONS_MAX)));
}

#[test]
fn after_a_short_silence_the_newest_number_is_told_twice() {
    let (mut end, mut other) = (End::new(), End::new());
    assert_eq!(end.machine.deadline(), None);
    end.send(0, 60);
    end.send(1, 60);
    assert_eq!((end.machine.deadline(), NOTES), (Some(Instant::ZERO + ms(1) + QUIET), 2));
    assert_eq!(end.at(5, Input::Tick), []);
    let newest = Newest { number: 1, heard: 0 };
    assert_eq!(end.at(6, Input::Tick), [Frame::Newest(newest)]);
    assert_eq!(end.at(11, Input::Tick), [Frame::Newest(newest)]);
    assert_eq!(end.machine.deadline(), None);
    // The other end got the first packet only.
    other.came(10, 0, 0, 50);
    assert_eq!(other.at(16, Input::Newest(newest)), [resend(1, &[1])]);
    assert_eq!(other.at(17, Input::Newest(newest)), []);
}

#[test]
fn memory_and_traffic_are_bounded_whatever_comes() {
    each_seed(100, |seed| {
        let mut random = Random::new(seed);
        let mut end = Recovery::default();
        let mut source = Source::new(1);
        let mut now = Instant::ZERO + ms(10_000);
        let (mut numbers, mut copies, mut requests) = (BTreeSet::new(), BTreeMap::<u64, u8>::new(), 0);
        let mut newest = 0;
        for _ in 0..1_500 {
            // The clock may go back.
            now = if random.permille(20) {
                Instant::ZERO + now.since(Instant::ZERO + ms(random.below(300)))
            } else {
                now + Duration::from_micros(random.below(4_000))
            };
            let left = ms(random.below(200));
            let wild = random.next() >> random.below(64);
            let mark = |number, random: &mut Random| {
                let repeats = random.permille(300).then(|| Repeats { first: random.below(99), lost: wild });
                Mark { number, heard: random.below(1 << 20) as u32 >> random.below(20), repeats }
            };
            let input = match random.below(8) {
                0..2 => Input::Send(packet(&mut source), left),
                2 => {
                    newest += random.below(20);
                    Input::Came(mark(newest, &mut random), left)
                }
                3 => Input::Came(mark(wild, &mut random), left),
                4 => {
                    let numbers = (0..random.below(64)).map(|_| random.below(1_000)).collect();
                    Input::Requested(Resend { request: random.next() as u32, numbers })
                }
                5 => Input::RoundTrip(ms(random.below(100))),
                6 => Input::Newest(Newest { number: wild, heard: 0 }),
                _ => Input::Tick,
            };
            end.handle(now, input);
            while let Some(frame) = end.poll() {
                match frame {
                    Frame::Timed(Timed { mark, packet }) => {
                        assert!(numbers.insert(mark.number), "{} twice", mark.number);
                        *copies.entry(packet.sequence).or_default() += 1;
                    }
                    Frame::Resend(Resend { request, numbers }) => {
                        assert!(request > requests && numbers.len() <= RESEND_MAX);
                        assert!(!numbers.is_empty() && numbers.windows(2).all(|two| two[0] < two[1]));
                        requests = request;
                    }
                    Frame::Newest(newest) => assert!(numbers.contains(&newest.number)),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(copies.values().all(|times| *times <= 1 + REPETITIONS_MAX));
        let (kept, missing) = end.held();
        assert!(kept <= KEPT_MAX && missing <= MISSING_MAX, "{kept} {missing}");
    });
}
