//! Paced links: two ends over a network that loses, delays, reorders, repeats and goes dark, on a virtual clock.

use crate::random::{Random, each_seed};
use sidetrack_core::overlay::frame::{Chunk, Frame, Offer, Paced, PacedAck, RUNS_MAX, Run};
use sidetrack_core::overlay::paced::pace::{BURST, BURST_MIN_BYTES};
use sidetrack_core::overlay::paced::{
    ACK_DELAY_MAX, ACK_SHARE, CREDIT_FIRST, Config, Input, Link, Output, RECEIVE_MAX, Read, SEND_MAX,
    SILENCE_MAX, STREAMS_MAX,
};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Bytes that a datagram adds to a frame: seal, UDP and IPv4.
const AROUND: usize = 29 + 28;

/// Bytes of a frame in a packet of 1,500 bytes.
const ROOM: usize = 1_500 - AROUND;

const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// What the network does to packets.
#[derive(Clone, Debug, Default)]
struct Network {
    delay: Duration,
    jitter: Duration,
    loss_permille: u64,
    repeat_permille: u64,
    /// Nothing passes at these times.
    dark: Vec<(Instant, Instant)>,
}

/// The bytes of one direction of a stream, as the test writes and reads them.
#[derive(Clone, Debug, Default)]
struct Half {
    to_write: u64,
    written: u64,
    read: u64,
    ended: bool,
    broken: bool,
    /// Its reader takes at most this number of bytes in a turn.
    gulp: usize,
}

fn byte(name: u32, end: usize, offset: u64) -> u8 {
    (offset.wrapping_mul(0x9E37_79B9) >> 7) as u8 ^ name as u8 ^ (end as u8).wrapping_mul(77)
}

struct World {
    ends: [Link; 2],
    now: Instant,
    network: Network,
    random: Random,
    flying: BTreeMap<(Instant, u64), (usize, Vec<u8>)>,
    number: u64,
    /// What each end has sent: when, and how many bytes.
    sent: [Vec<(Instant, usize)>; 2],
    acks: [usize; 2],
    arrived: [usize; 2],
    /// By stream: what its opening end writes, and what the other one writes.
    halves: BTreeMap<u32, [Half; 2]>,
    opened: [BTreeSet<u32>; 2],
    down: [bool; 2],
    held_max: u64,
    still: u32,
}

impl World {
    fn new(rates: [u64; 2], first: u64, network: Network, seed: u64) -> Self {
        let config = |end: usize| Config { rate: rates[end], around_bytes: AROUND, is_even: end == 0, first };
        Self {
            ends: [0, 1].map(|end| Link::new(config(end), Instant::ZERO)),
            now: Instant::ZERO,
            network,
            random: Random::new(seed),
            flying: BTreeMap::new(),
            number: 0,
            sent: [Vec::new(), Vec::new()],
            acks: [0; 2],
            arrived: [0; 2],
            halves: BTreeMap::new(),
            opened: [BTreeSet::new(), BTreeSet::new()],
            down: [false; 2],
            held_max: 0,
            still: 0,
        }
    }

    /// Opens a stream at an end: it writes `there` bytes, and the other end `back` bytes.
    fn open(&mut self, end: usize, there: u64, back: u64) -> u32 {
        let name = self.ends[end].open().expect("agreed");
        let half = |to_write| Half { to_write, gulp: usize::MAX, ..Half::default() };
        let halves = if end == 0 { [half(there), half(back)] } else { [half(back), half(there)] };
        self.halves.insert(name, halves);
        self.opened[end].insert(name);
        name
    }

    fn put(&mut self, from: usize, frame: &Frame) {
        let bytes = frame.to_datagram();
        assert!(bytes.len() <= ROOM, "{} bytes", bytes.len());
        self.sent[from].push((self.now, bytes.len() + AROUND));
        self.acks[from] += if matches!(frame, Frame::PacedAck(_)) { bytes.len() + AROUND } else { 0 };
        let is_dark = self.network.dark.iter().any(|(from, to)| (*from..*to).contains(&self.now));
        let copies = 1 + u64::from(self.random.permille(self.network.repeat_permille));
        for _ in 0..copies {
            if is_dark || self.random.permille(self.network.loss_permille) {
                continue;
            }
            let jitter = self.random.below(self.network.jitter.as_nanos() as u64 + 1);
            let at = self.now + self.network.delay + Duration::from_nanos(jitter);
            self.number += 1;
            self.flying.insert((at, self.number), (1 - from, bytes.clone()));
        }
    }

    /// Does what an end and its applications can do now.
    fn serve(&mut self, end: usize) {
        while let Some(output) = self.ends[end].poll() {
            match output {
                Output::Opened(name) => assert!(self.opened[end].insert(name), "{name} twice"),
                Output::Down => self.down[end] = true,
                Output::Agreed(_) | Output::Readable(_) | Output::Writable(_) => {}
            }
        }
        for name in self.opened[end].clone() {
            self.read(end, name);
            self.write(end, name);
        }
        while let Some(frame) = self.ends[end].transmit(self.now, ROOM) {
            self.put(end, &frame);
        }
        let view = self.ends[end].view();
        self.held_max = self.held_max.max(view.held_bytes);
    }

    fn read(&mut self, end: usize, name: u32) {
        let Some(halves) = self.halves.get_mut(&name) else { return };
        let half = &mut halves[1 - end];
        let mut room = [0; 8_192];
        let mut left = half.gulp;
        while left > 0 && !half.ended && !half.broken {
            let most = left.min(room.len());
            match self.ends[end].read(name, &mut room[..most]) {
                Read::Bytes(count) => {
                    for value in &room[..count] {
                        assert_eq!(*value, byte(name, 1 - end, half.read), "stream {name} at {}", half.read);
                        half.read += 1;
                    }
                    left -= count;
                }
                Read::Later => break,
                Read::Ended => half.ended = true,
                Read::Broken => half.broken = true,
            }
        }
    }

    fn write(&mut self, end: usize, name: u32) {
        let Some(halves) = self.halves.get_mut(&name) else { return };
        // What is written on a stream that the other end has left is dropped.
        if halves[1 - end].broken || halves[1 - end].ended {
            return;
        }
        let half = &mut halves[end];
        while half.written < half.to_write {
            let most = (half.to_write - half.written).min(4_096);
            let bytes: Vec<u8> = (half.written..half.written + most).map(|at| byte(name, end, at)).collect();
            match self.ends[end].write(name, &bytes) {
                None | Some(0) => break,
                Some(count) => half.written += count as u64,
            }
        }
    }

    /// Goes to the next event, but not beyond `until`.
    fn step(&mut self, until: Instant) {
        let events = self.flying.keys().next().map(|(at, _)| *at);
        let deadlines = self.ends.iter().filter_map(Link::deadline);
        let next = events.into_iter().chain(deadlines).min().unwrap_or(until);
        // A deadline that stays in the past would stop the clock.
        self.still = if next > self.now { 0 } else { self.still + 1 };
        let ends = &self.ends;
        assert!(
            self.still < 200,
            "the clock stands still at {:?}: {:?}",
            self.now,
            ends.each_ref().map(Link::view)
        );
        self.now = self.now.max(next).min(until);
        while let Some(entry) = self.flying.first_entry()
            && entry.key().0 <= self.now
        {
            let (to, bytes) = entry.remove();
            let frame = Frame::from_datagram(&bytes).expect("valid").expect("known");
            self.arrived[to] += bytes.len();
            self.ends[to].handle(self.now, Input::Came(frame, bytes.len()));
            self.serve(to);
        }
        for end in 0..2 {
            self.ends[end].handle(self.now, Input::Tick);
            self.serve(end);
        }
    }

    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.step(until);
        }
    }

    fn run_until(&mut self, time: Duration, is_done: impl Fn(&Self) -> bool) {
        let until = self.now + time;
        while !is_done(self) {
            assert!(self.now < until, "not done in {time:?}: {:?}", self.halves);
            // Slow readers have their turn although nothing comes.
            self.step(until.min(self.now + ms(20)));
        }
    }

    fn agree(&mut self) {
        self.run_until(ms(30_000), |world| world.ends.iter().all(Link::is_agreed));
    }

    /// Checks every window of 10 ms against the rate.
    fn check_rate(&self, end: usize, rate: u64) {
        let window = ms(10);
        let burst = (rate as u128 * BURST.as_nanos() / 8_000_000_000).max(BURST_MIN_BYTES as u128);
        let allowed = rate as u128 * window.as_nanos() / 8_000_000_000 + burst + 2;
        let (mut sum, mut last) = (0, 0);
        for (first, (from, bytes)) in self.sent[end].iter().enumerate() {
            while let Some((at, more)) = self.sent[end].get(last)
                && at.since(*from) <= window
            {
                sum += more;
                last += 1;
            }
            assert!(sum as u128 <= allowed, "{sum} bytes of {allowed} in 10 ms from packet {first}");
            sum -= bytes;
        }
    }

    fn all_over(&self) -> bool {
        self.halves.values().all(|halves| halves.iter().all(|half| half.read == half.to_write))
    }
}

#[test]
fn each_byte_comes_once_and_in_order_whatever_the_network_does() {
    each_seed(200, |seed| {
        let mut random = Random::new(seed);
        let rates = [0, 1].map(|_| 2_000_000 << random.below(6));
        let mut network = Network {
            delay: Duration::from_micros(100 + random.below(30_000)),
            jitter: Duration::from_micros([0, 300, 8_000][random.below(3) as usize]),
            loss_permille: [0, 5, 20, 100, 250][random.below(5) as usize],
            repeat_permille: random.below(20),
            dark: Vec::new(),
        };
        for _ in 0..random.below(3) {
            let from = Instant::from_millis(100 + random.below(900));
            network.dark.push((from, from + ms(20 + random.below(600))));
        }
        let first = (1_u64 << 32) - random.below(200);
        let mut world = World::new(rates, first, network, seed);
        world.agree();
        for _ in 0..1 + random.below(5) {
            let (end, there, back) = (random.below(2) as usize, random.below(200_000), random.below(60_000));
            let name = world.open(end, there, back);
            if random.permille(300) {
                let gulp = 200 + random.below(3_000) as usize;
                world.halves.get_mut(&name).expect("open")[1 - end].gulp = gulp;
            }
            world.run(ms(random.below(60)));
        }
        world.run_until(ms(120_000), World::all_over);
        assert!(!world.down.contains(&true));
        for (end, rate) in rates.into_iter().enumerate() {
            world.check_rate(end, rate);
        }
        // Half of the streams are closed by their opening end, the others by both.
        for name in world.halves.keys().copied().collect::<Vec<_>>() {
            let end = (name % 2) as usize;
            world.ends[end].close(name);
            if random.permille(500) {
                world.ends[1 - end].close(name);
                world.opened[1 - end].remove(&name);
            }
            world.opened[end].remove(&name);
        }
        let names: Vec<u32> = world.halves.keys().copied().collect();
        world.run_until(ms(60_000), |world| {
            names.iter().all(|name| {
                let end = (name % 2) as usize;
                !world.opened[1 - end].contains(name) || world.halves[name][end].ended
            })
        });
        for name in names {
            let end = (name % 2) as usize;
            if world.opened[1 - end].remove(&name) {
                world.ends[1 - end].abandon(name);
            }
        }
        world.run_until(ms(60_000), |world| world.ends.iter().all(|end| end.view().streams == 0));
    });
}

#[test]
fn a_loss_does_not_slow_it_down_and_streams_share_it() {
    for (seed, jitter) in [(1, Duration::ZERO), (2, Duration::from_micros(500)), (3, ms(4))] {
        let rate = 100_000_000;
        let network =
            Network { delay: ms(10), jitter, loss_permille: 20, repeat_permille: 0, dark: Vec::new() };
        let mut world = World::new([rate, rate], 0, network, seed);
        world.agree();
        let streams = [0, 1].map(|_| world.open(0, u64::MAX, 0));
        world.run(ms(500));
        let read = |world: &World| streams.map(|name| world.halves[&name][0].read);
        let before = read(&world);
        world.run(ms(2_000));
        let after = read(&world);
        let got = [0, 1].map(|at| (after[at] - before[at]) as f64);
        let share = (ROOM - Paced::OVERHEAD_BYTES - Chunk::DATA_BYTES) as f64 / 1_500.0;
        let possible = rate as f64 / 8.0 * 2.0 * share;
        let goodput = (got[0] + got[1]) / possible;
        assert!(goodput >= 0.97, "{goodput} with a jitter of {jitter:?}: {:?}", world.ends[0].view());
        assert!(got.iter().all(|bytes| bytes / possible >= 0.45), "{got:?} of {possible}");
        world.check_rate(0, rate);
        // Acknowledgements take a small part of what arrives, and a little more where little arrives.
        let delayed =
            world.now.as_nanos() as usize / ACK_DELAY_MAX.as_nanos() as usize * (11 + 4 * RUNS_MAX + AROUND);
        assert!(world.acks[1] <= world.arrived[1] / ACK_SHARE + delayed, "{} bytes", world.acks[1]);
    }
}

#[test]
fn a_stream_that_no_one_reads_stops_its_writer_and_no_other_stream() {
    let network = Network { delay: ms(5), loss_permille: 10, ..Network::default() };
    let mut world = World::new([50_000_000; 2], 7, network, 3);
    world.agree();
    let stuck = world.open(0, u64::MAX, 0);
    world.halves.get_mut(&stuck).expect("open")[0].gulp = 0;
    world.run(ms(5_000));
    let written = world.halves[&stuck][0].written;
    let lively = world.open(0, 3_000_000, 1_000);
    world.run_until(ms(3_000), |world| {
        let halves = &world.halves[&lively];
        (halves[0].read, halves[1].read) == (3_000_000, 1_000)
    });
    assert_eq!(world.halves[&stuck][0].written, written, "credit stops the writer");
    assert!(world.held_max <= (SEND_MAX + RECEIVE_MAX) as u64, "{} bytes", world.held_max);
    world.halves.get_mut(&stuck).expect("open")[0].gulp = usize::MAX;
    world.run(ms(500));
    assert!(world.halves[&stuck][0].written > written, "and reading lets it go on");
}

#[test]
fn the_memory_of_many_streams_that_no_one_reads_is_bounded() {
    let mut world = World::new([4_000_000_000; 2], 7, Network { delay: ms(1), ..Network::default() }, 3);
    world.agree();
    for _ in 0..40 {
        let name = world.open(0, 4 << 20, 0);
        world.halves.get_mut(&name).expect("open")[0].gulp = 0;
    }
    world.run(ms(700));
    let most = SEND_MAX + RECEIVE_MAX + 2 * 40 * CREDIT_FIRST as usize;
    assert!(world.held_max <= most as u64, "{} bytes of {most}", world.held_max);
    assert!(world.held_max >= RECEIVE_MAX as u64 / 2, "{} bytes", world.held_max);
}

#[test]
fn a_dropped_stream_breaks_at_the_other_end_and_both_forget_it() {
    let network = Network { delay: ms(5), loss_permille: 200, ..Network::default() };
    let mut world = World::new([10_000_000; 2], 7, network, 3);
    world.agree();
    let (dropped, kept) = (world.open(0, u64::MAX, u64::MAX), world.open(1, 100_000, 100_000));
    world.run(ms(200));
    world.ends[0].abandon(dropped);
    world.opened[0].remove(&dropped);
    world.run_until(ms(20_000), |world| world.halves[&dropped][0].broken);
    // What is written after that is dropped, and does not block.
    assert_eq!(world.ends[1].write(dropped, &[1; 100]), Some(100));
    world.opened[1].remove(&dropped);
    world.ends[1].abandon(dropped);
    world.run_until(ms(20_000), |world| {
        world.halves[&kept].iter().all(|half| half.read == 100_000)
            && world.ends.iter().all(|end| end.view().streams == 1)
    });
}

#[test]
fn without_an_answer_it_offers_seldom_and_opens_nothing() {
    let network = Network { dark: vec![(Instant::ZERO, Instant::from_millis(20_000))], ..Network::default() };
    let mut world = World::new([10_000_000; 2], 0, network, 1);
    world.run(ms(10_000));
    assert!(world.ends[0].open().is_none() && !world.ends[0].is_agreed());
    assert!((10..=60).contains(&world.sent[0].len()), "{} offers", world.sent[0].len());
    world.run(ms(11_000));
    assert!(world.ends.iter().all(Link::is_agreed), "and agrees when the network is there");
}

#[test]
fn a_dead_network_gets_probes_only_and_ends_the_link() {
    let network = Network { delay: ms(5), ..Network::default() };
    let mut world = World::new([100_000_000; 2], 0, network, 1);
    world.agree();
    let name = world.open(0, u64::MAX, 0);
    world.run(ms(300));
    world.network.dark = vec![(world.now, Instant::from_millis(1_000_000))];
    world.run(ms(2_000));
    let sent = world.sent[0].len();
    world.run(ms(2_000));
    assert!(world.sent[0].len() - sent <= 8, "{} packets into the dark", world.sent[0].len() - sent);
    world.run(SILENCE_MAX);
    assert_eq!(world.down, [true; 2]);
    assert_eq!(world.ends[0].write(name, &[1]), None);
    assert_eq!(world.ends[1].read(name, &mut [0; 10]), Read::Broken);
    assert!(world.ends[0].deadline().is_none() && world.ends[0].transmit(world.now, ROOM).is_none());
}

#[test]
fn a_hostile_end_is_bounded_and_ends_nothing_else() {
    each_seed(200, |seed| {
        let mut random = Random::new(seed);
        let config = Config { rate: 10_000_000, around_bytes: AROUND, is_even: true, first: 0 };
        let (mut link, mut now) = (Link::new(config, Instant::ZERO), Instant::ZERO);
        let mut opened = 0;
        for turn in 0..400_u32 {
            now = now + Duration::from_micros(random.below(3_000));
            let is_wild = random.permille(20);
            let stream = random.below(if is_wild { u64::from(u32::MAX) } else { 40 }) as u32;
            let is_wild = random.permille(20);
            let offset = random.below(if is_wild { u64::MAX / 2 } else { 100_000 });
            let chunk = match random.below(5) {
                0 => Chunk::End { stream, offset },
                1 => Chunk::Reset { stream },
                2 => Chunk::Credit { stream, limit: offset },
                _ => {
                    Chunk::Data { stream, offset, bytes: vec![turn as u8; 1 + random.below(1_300) as usize] }
                }
            };
            let frame = match random.below(8) {
                0 => Frame::Offer(Offer {
                    rate: 5,
                    credit: random.below(1 << 32) as u32,
                    heard: random.permille(500),
                }),
                1 => {
                    let run =
                        Run { missing: 1 + random.below(9) as u16, arrived: 1 + random.below(65_534) as u16 };
                    let newest = random.below(300) as u32;
                    Frame::PacedAck(Box::new(PacedAck {
                        newest,
                        age_us: turn,
                        arrived: run.arrived,
                        runs: vec![run; 5],
                    }))
                }
                _ => Frame::Paced(Box::new(Paced {
                    number: random.below(if is_wild { 1 << 32 } else { 500 }) as u32,
                    back: random.below(1 << 16) as u16,
                    chunks: vec![chunk],
                })),
            };
            link.handle(now, Input::Came(frame, 1_400));
            while let Some(output) = link.poll() {
                if let Output::Opened(name) = output {
                    opened += 1;
                    if random.permille(300) {
                        link.abandon(name);
                    }
                }
            }
            if let Some(name) = link.open() {
                link.write(name, &[3; 2_000]);
                link.close(name);
            }
            while link.transmit(now, ROOM).is_some() {}
        }
        let view = link.view();
        assert!(view.streams <= 3 * STREAMS_MAX && opened <= 2 * STREAMS_MAX + 400);
        assert!(view.held_bytes <= (SEND_MAX + RECEIVE_MAX + 3 * STREAMS_MAX * CREDIT_FIRST as usize) as u64);
    });
}
