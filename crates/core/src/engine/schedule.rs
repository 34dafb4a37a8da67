//! Which work a worker of the engine does in a round, and how much of each kind, by load and by priority.
//!
//! A round handles the frames that were taken together. Its parts come in the order of their priority:
//!
//! | part | how much of it |
//! |---|---|
//! | packets of connections | all that were taken: at most [`BATCH`] |
//! | time-outs | a [`Share`], from 64 to 1024 |
//! | packets that other workers have merged in | a [`Share`], from 64 to 512 |
//! | first packets of new connections | an allowance, from 2 to [`BATCH`]; further ones are shed |
//!
//! A share doubles after each round that used it up, and returns to its beginning otherwise. So no work of one moment
//! holds up packets for long, and a long queue is served faster than a short one. Each part gets something in each
//! round, so none starves.
//!
//! The allowance protects the connections that exist. It follows the time that a frame waits before it is taken:
//!
//! ```text
//!           frames wait for over 2 ms, for 20 ms on end
//!   CALM --------------------------------------------> OVERLOADED   the allowance halves each ms
//!    ^  every new connection is served                   |      ^
//!    |                                  frames wait      |      | over 50 us
//!    |                                  for under 25 us  v      |
//!    +-------- nothing was shed for 1 s ------------- RECOVERING   the allowance grows by one each ms in which
//!                                                                  something was shed
//! ```
//!
//! The allowance grows only while it sheds: in small rounds it has no effect, and that they are small does not say that all new connections
//! can be served. An overload that comes in bursts is one overload; otherwise each burst would meet the patience of a calm worker.
//!
//! A loop of some hundred connections keeps a queue of less than 2 ms and does not count as overload. Once it is one, the queue is kept
//! much shorter, because connections wait in it twice for each answer. A burst that is served within 20 ms sheds nothing. A client whose SYN is shed sends it again after a second, as it
//! does when a queue of a card is full; the packets of connections would be lost in that queue, too.

use crate::time::Instant;
use std::time::Duration;

/// Most frames of a round.
pub const BATCH: usize = 64;

/// Frames that wait longer than this are late, while all new connections are served.
const LATE: Duration = Duration::from_millis(2);
/// Once new connections are shed, frames are to wait for at most this time.
const TARGET: Duration = Duration::from_micros(50);
/// Frames may be late for this long before new connections are shed.
const PATIENCE: Duration = Duration::from_millis(20);
/// The time between two changes of the allowance.
const STEP: Duration = Duration::from_millis(1);
/// An overload is over when nothing was shed for this time. Clients send a SYN again after a second (RFC 6298, Sec. 2).
const OVER: Duration = Duration::from_secs(1);
/// The least allowance of a round.
const LEAST: usize = 2;
/// The longest time that one frame is taken to need. A thread that lost its CPU for a while is not slow.
const COST_MAX_NS: u64 = 200_000;
/// The part of a new measurement in the mean: one of this number.
const SMOOTH: u64 = 8;

/// How much of one kind of work a round does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    now: usize,
    least: usize,
    most: usize,
}

impl Share {
    /// Returns a share that begins at `least`, which is at least 1, and grows to at most `most`.
    pub const fn new(least: usize, most: usize) -> Self {
        let least = if least == 0 { 1 } else { least };
        Self { now: least, least, most }
    }

    /// Returns the share of the next round.
    pub const fn get(self) -> usize {
        self.now
    }

    /// Notes how much of it was used.
    fn used(&mut self, done: usize) {
        let whole = done >= self.now;
        self.now = if whole { self.now.saturating_mul(2).min(self.most) } else { self.least };
    }
}

/// Whether new connections can all be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Load {
    /// All are served.
    #[default]
    Calm,
    /// Frames wait too long: fewer and fewer are served.
    Overloaded,
    /// Frames wait briefly again: more and more are served.
    Recovering,
}

impl Load {
    /// All loads.
    pub const ALL: [Self; 3] = [Self::Calm, Self::Overloaded, Self::Recovering];

    /// Returns the word of metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::Overloaded => "overloaded",
            Self::Recovering => "recovering",
        }
    }
}

/// What a round may do at most, besides the packets of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Time-outs.
    pub timers: usize,
    /// Packets that other workers have merged in.
    pub merged: usize,
    /// Packets that belong to no connection: the first ones of new connections.
    pub openings: usize,
}

/// What a round has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Packets of connections.
    pub packets: usize,
    /// Time-outs.
    pub timers: usize,
    /// Packets that other workers have merged in.
    pub merged: usize,
    /// First packets of new connections.
    pub openings: usize,
    /// First packets of new connections that were shed.
    pub shed: usize,
}

/// What all rounds have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Rounds at each load, in the order of [`Load::ALL`].
    pub rounds: [u64; 3],
    /// Packets of connections.
    pub packets: u64,
    /// Time-outs.
    pub timers: u64,
    /// Packets that other workers have merged in.
    pub merged: u64,
    /// First packets of new connections.
    pub openings: u64,
    /// First packets of new connections that were shed.
    pub shed: u64,
}

/// Decides what each round does.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    load: Load,
    timers: Share,
    merged: Share,
    allowance: usize,
    /// Since when frames have been late, at [`Load::Calm`].
    late_since: Option<Instant>,
    /// When the allowance last changed.
    changed: Instant,
    /// When something was last shed, and whether it was since the allowance changed.
    shed: Instant,
    sheds: bool,
    /// When the last round began, and its frames.
    last: Option<(Instant, usize)>,
    /// The time that one frame needs, as a moving mean, ns.
    cost_ns: u64,
    totals: Totals,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            load: Load::Calm,
            timers: Share::new(64, 1024),
            merged: Share::new(64, 512),
            allowance: BATCH,
            late_since: None,
            changed: Instant::ZERO,
            shed: Instant::ZERO,
            sheds: false,
            last: None,
            cost_ns: 0,
            totals: Totals::default(),
        }
    }
}

impl Schedule {
    /// Begins a round. `taken` frames were taken for it, and `waiting` more are there.
    pub fn begin(&mut self, now: Instant, taken: usize, waiting: usize) -> Round {
        self.measure(now, taken);
        let delay = Duration::from_nanos(self.cost_ns.saturating_mul(waiting as u64));
        self.follow(now, delay);
        let rounds = self.totals.rounds.get_mut(self.load as usize);
        if let Some(rounds) = rounds {
            *rounds += 1;
        }
        Round { timers: self.timers.get(), merged: self.merged.get(), openings: self.allowance }
    }

    /// Ends a round.
    pub fn end(&mut self, done: &Done) {
        self.timers.used(done.timers);
        self.merged.used(done.merged);
        let all = &mut self.totals;
        all.packets += done.packets as u64;
        all.timers += done.timers as u64;
        all.merged += done.merged as u64;
        all.openings += done.openings as u64;
        all.shed += done.shed as u64;
        if let Some((began, _)) = self.last.filter(|_| done.shed > 0) {
            (self.shed, self.sheds) = (began, true);
        }
    }

    /// Returns the load of the present round.
    pub const fn load(&self) -> Load {
        self.load
    }

    /// Returns what all rounds have done.
    pub const fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Measures what one frame of the last round needed.
    fn measure(&mut self, now: Instant, taken: usize) {
        // After a round without frames the worker may have slept.
        if let Some((began, frames @ 1..)) = self.last {
            let passed = u64::try_from(now.since(began).as_nanos()).unwrap_or(u64::MAX);
            let cost = (passed / frames as u64).min(COST_MAX_NS);
            self.cost_ns = match self.cost_ns {
                0 => cost,
                mean => mean - mean / SMOOTH + cost / SMOOTH,
            };
        }
        self.last = Some((now, taken));
    }

    /// Changes the load and the allowance by the time that frames wait.
    fn follow(&mut self, now: Instant, delay: Duration) {
        if self.load == Load::Calm {
            self.watch(now, delay);
        } else if now.since(self.shed) >= OVER {
            (self.load, self.allowance) = (Load::Calm, BATCH);
        } else if now.since(self.changed) >= STEP && delay > TARGET {
            self.cut(now);
        } else if now.since(self.changed) >= STEP && delay < TARGET / 2 {
            self.allowance = (self.allowance + usize::from(self.sheds)).min(BATCH);
            self.load = Load::Recovering;
            (self.changed, self.sheds) = (now, false);
        }
    }

    /// Waits for an overload.
    fn watch(&mut self, now: Instant, delay: Duration) {
        if delay <= LATE {
            self.late_since = None;
        } else if now.since(*self.late_since.get_or_insert(now)) >= PATIENCE {
            self.late_since = None;
            self.cut(now);
        }
    }

    fn cut(&mut self, now: Instant) {
        if self.load == Load::Calm {
            self.shed = now;
        }
        self.load = Load::Overloaded;
        self.allowance = (self.allowance / 2).max(LEAST);
        (self.changed, self.sheds) = (now, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn at(us: u64) -> Instant {
        Instant::from_nanos(1_000_000_000 + us * 1000)
    }

    /// Frames of one us each: `waiting` of them wait for as many us. Each round under overload sheds one, if it `sheds`.
    fn rounds(schedule: &mut Schedule, from_us: u64, to_us: u64, waiting: usize, sheds: bool) -> Round {
        let mut round = None;
        for us in (from_us..to_us).step_by(BATCH) {
            round = Some(schedule.begin(at(us), BATCH, waiting));
            let shed = usize::from(sheds && schedule.load() != Load::Calm);
            schedule.end(&Done { packets: BATCH - shed, shed, ..Done::default() });
        }
        round.expect("a round")
    }

    #[test]
    fn a_burst_is_served_and_a_lasting_overload_is_shed_until_it_ends() {
        let mut schedule = Schedule::default();
        let (mut from, mut until) = (0, 0);
        let mut run = |schedule: &mut Schedule, to_ms: u64, waiting, sheds| {
            (from, until) = (until, to_ms * 1000);
            rounds(schedule, from, until, waiting, sheds)
        };
        assert_eq!(run(&mut schedule, 19, 4000, true).openings, BATCH);
        assert_eq!((run(&mut schedule, 30, 100, true).openings, schedule.load()), (BATCH, Load::Calm));
        assert_eq!(run(&mut schedule, 49, 4000, true).openings, BATCH, "the patience began again");
        let shed = run(&mut schedule, 60, 4000, true);
        assert_eq!((shed.openings, schedule.load()), (LEAST, Load::Overloaded));
        // Between both bounds nothing changes.
        let same = run(&mut schedule, 80, 40, true);
        assert_eq!((same.openings, schedule.load()), (LEAST, Load::Overloaded));
        let more = run(&mut schedule, 91, 0, true);
        assert!((LEAST + 9..LEAST + 13).contains(&more.openings), "{more:?}");
        assert_eq!(schedule.load(), Load::Recovering);
        // Now it needs no patience.
        assert_eq!(run(&mut schedule, 95, 4000, true).openings, LEAST);
        // It grows only while it sheds, and is over a second after it last did.
        let whole = run(&mut schedule, 200, 0, true);
        assert_eq!((whole.openings, schedule.load()), (BATCH, Load::Recovering));
        assert_eq!(run(&mut schedule, 210, 4000, true).openings, LEAST, "no patience yet");
        let idle = run(&mut schedule, 1200, 0, false);
        assert!(idle.openings <= LEAST + 1, "{idle:?}");
        assert_eq!((run(&mut schedule, 1215, 0, false).openings, schedule.load()), (BATCH, Load::Calm));
        let totals = schedule.totals();
        assert!(totals.rounds.iter().all(|rounds| *rounds > 0), "{totals:?}");
        assert_eq!(totals.rounds.iter().sum::<u64>() * BATCH as u64, totals.packets + totals.shed);
    }

    #[test]
    fn a_share_follows_its_queue() {
        let mut share = Share::new(64, 500);
        for (used, next) in [(63, 64), (64, 128), (128, 256), (256, 500), (500, 500), (499, 64), (0, 64)] {
            share.used(used);
            assert_eq!(share.get(), next);
        }
        assert_eq!(Share::new(0, 9).get(), 1);
    }

    #[test]
    fn a_worker_that_sleeps_or_loses_its_cpu_is_not_overloaded() {
        let mut schedule = Schedule::default();
        // One frame each 10 ms: the worker sleeps in between.
        for round in 0..100 {
            schedule.begin(at(round * 20_000), 1, 0);
            schedule.begin(at(round * 20_000 + 10), 0, 0);
        }
        assert!(schedule.cost_ns <= 10_000, "{}", schedule.cost_ns);
        // It lost the CPU for a second once: a frame is not taken to need that long.
        schedule.begin(at(3_000_000), 1, 0);
        schedule.begin(at(4_000_000), 1, 0);
        assert!(schedule.cost_ns <= 10_000 + COST_MAX_NS / SMOOTH, "{}", schedule.cost_ns);
    }

    /// A frame in the queue of a simulated interface.
    #[derive(Clone, Copy)]
    struct Frame {
        came_ns: u64,
        is_new: bool,
    }

    /// Serves one frame of a connection each 20 us, and new connections each `new_ns` in the first `burst_ms` of each 100 ms, for a
    /// second. A new connection needs 4 us, a shed one 0.2 us, another frame 0.5 us. Returns the sorted waits of the frames of
    /// connections after the first 100 ms, those that were lost in the full queue, and how many new ones were served.
    fn simulate(new_ns: u64, burst_ms: u64, sheds: bool) -> (Vec<u64>, u64, u64) {
        const SECOND: u64 = 1_000_000_000;
        let (mut schedule, mut queue) = (Schedule::default(), VecDeque::new());
        let (mut now, mut next, mut lost, mut opened, mut waits) = (0_u64, [0, 7_000], 0, 0, Vec::new());
        while now < SECOND {
            for (at, (every, is_new)) in next.iter_mut().zip([(20_000, false), (new_ns, true)]) {
                while *at <= now {
                    if is_new && *at / 1_000_000 % 100 >= burst_ms {
                        // Between two bursts.
                    } else if queue.len() < 4096 {
                        queue.push_back(Frame { came_ns: *at, is_new });
                    } else {
                        lost += u64::from(!is_new);
                    }
                    *at += every;
                }
            }
            queue.make_contiguous().sort_by_key(|frame| frame.came_ns);
            let batch: Vec<Frame> = (0..BATCH).map_while(|_| queue.pop_front()).collect();
            let began = Instant::from_nanos(now);
            let round = schedule.begin(began, batch.len(), queue.len());
            let mut done = Done::default();
            now += 300;
            for frame in batch.iter().filter(|frame| !frame.is_new) {
                now += 500;
                done.packets += 1;
                if frame.came_ns > SECOND / 10 {
                    waits.push(now - frame.came_ns);
                }
            }
            for _ in batch.iter().filter(|frame| frame.is_new) {
                let serves = !sheds || done.openings < round.openings;
                now += if serves { 4000 } else { 200 };
                done.openings += usize::from(serves);
                done.shed += usize::from(!serves);
            }
            opened += done.openings as u64;
            schedule.end(&done);
        }
        waits.sort_unstable();
        (waits, lost, opened)
    }

    #[test]
    fn connections_keep_their_latency_when_more_new_ones_come_than_can_be_served() {
        let p99 = |waits: &[u64]| waits[waits.len() * 99 / 100];
        let (alone, lost, opened) = simulate(20_000, 100, true);
        assert_eq!((lost, opened >= 49_000), (0, true), "without overload nothing is shed");
        // Three times as many as can be served.
        let (waits, lost, opened) = simulate(1_300, 100, true);
        assert_eq!(lost, 0);
        assert!(opened > 100_000, "{opened} of some 250,000 that fit into a second");
        assert!(p99(&waits) < 300_000, "{} ns, without overload {}", p99(&waits), p99(&alone));
        // In bursts it is one overload: no burst meets the patience of a calm worker.
        let (waits, lost, opened) = simulate(1_300, 20, true);
        assert_eq!(lost, 0);
        assert!(opened > 20_000, "{opened} of some 50,000 that fit into the bursts");
        assert!(p99(&waits) < 400_000, "{} ns in bursts", p99(&waits));
        // Without a schedule the queue is always full.
        let (waits, ..) = simulate(1_300, 100, false);
        assert!(p99(&waits) > 8_000_000, "{}", p99(&waits));
    }

    proptest! {
        #[test]
        fn each_part_gets_something_in_each_round_and_no_round_is_long(
            steps in proptest::collection::vec(
                (0u64..5_000, 0usize..=BATCH, 0usize..10_000, 0usize..2000, 0usize..2000), 1..300),
        ) {
            let (mut schedule, mut us) = (Schedule::default(), 0);
            let mut openings_before = BATCH;
            for (passed, taken, waiting, timers, merged) in steps {
                us += passed;
                let before = schedule.load();
                let round = schedule.begin(at(us), taken, waiting);
                prop_assert!((64..=1024).contains(&round.timers) && (64..=512).contains(&round.merged));
                prop_assert!((LEAST..=BATCH).contains(&round.openings));
                prop_assert!(round.openings == BATCH || schedule.load() != Load::Calm);
                prop_assert!(round.openings < BATCH || schedule.load() != Load::Overloaded);
                // The arrows of the diagram.
                let fits = match (before, schedule.load()) {
                    (Load::Calm, Load::Recovering) => false,
                    (_, Load::Overloaded) => round.openings <= openings_before,
                    (_, Load::Recovering) => round.openings >= openings_before,
                    (_, Load::Calm) => true,
                };
                prop_assert!(fits, "{before:?} {:?} {openings_before} {}", schedule.load(), round.openings);
                openings_before = round.openings;
                schedule.end(&Done {
                    packets: taken,
                    shed: taken.saturating_sub(round.openings),
                    timers: timers.min(round.timers),
                    merged: merged.min(round.merged),
                    ..Done::default()
                });
            }
        }
    }
}
