//! Two ends of a session over several paths that die, come back and differ in speed: the bytes arrive once and in order,
//! nothing waits for long, and no end holds more than its window.

use crate::random::{Random, each_seed};
use sidetrack_core::overlay::frame::{ResetReason, SessionFrame};
use sidetrack_core::overlay::session::{Config, Input, Mode, Output, PathSet, Session};
use sidetrack_core::time::Instant;
use std::collections::VecDeque;

/// Byte `at` of what this side's application sends.
fn byte(side: usize, at: u64) -> u8 {
    (at.wrapping_mul(29) ^ (at >> 9) ^ (side as u64 * 91)) as u8
}

/// One direction of a path: it keeps the order, and has a delay, a rate and room for some bytes, as a chain of kernels has.
struct Pipe {
    delay: u64,
    /// Bytes per millisecond.
    rate: u64,
    room: u64,
    /// Frames that wait for their turn, and frames on their way with their time.
    queue: VecDeque<SessionFrame>,
    queued: u64,
    way: VecDeque<(u64, SessionFrame)>,
    credit: u64,
}

fn size(frame: &SessionFrame) -> u64 {
    match frame {
        SessionFrame::Data { bytes, .. } => bytes.len() as u64 + 13,
        _ => 40,
    }
}

impl Pipe {
    fn new(delay: u64, rate: u64, room: u64) -> Self {
        let (queue, way) = (VecDeque::new(), VecDeque::new());
        Self { delay, rate, room, queue, queued: 0, way, credit: 0 }
    }

    fn push(&mut self, frame: SessionFrame) {
        self.queued += size(&frame);
        self.queue.push_back(frame);
    }

    /// One millisecond. `stuck`: it takes nothing and gives nothing.
    fn step(&mut self, now: u64, stuck: bool) -> Vec<SessionFrame> {
        let mut came = Vec::new();
        if stuck {
            return came;
        }
        self.credit = (self.credit + self.rate).min(self.rate * 2 + 20_000);
        while let Some(frame) = self.queue.front().filter(|frame| size(frame) <= self.credit) {
            self.credit -= size(frame);
            self.queued -= size(frame);
            let frame = self.queue.pop_front().expect("the first one");
            self.way.push_back((now + self.delay, frame));
        }
        while self.way.front().is_some_and(|(at, _)| *at <= now) {
            came.push(self.way.pop_front().expect("the first one").1);
        }
        came
    }
}

/// A path between the ends. A path that is cut says nothing to the ends until it is noticed.
struct Line {
    pipes: [Pipe; 2],
    up: bool,
    /// Cut, and when the ends notice.
    noticed_at: Option<u64>,
    /// Both ends have it. The far end has it one way sooner.
    near_up_at: Option<(u64, u64, u64)>,
    data_sent: u64,
}

struct End {
    session: Session,
    total: u64,
    read: u64,
    eof_told: bool,
    got: u64,
    got_at: u64,
    longest_gap: u64,
    accepted: u64,
    fin_came: bool,
    closed: Option<Option<ResetReason>>,
}

struct Pair {
    config: Config,
    ends: [End; 2],
    lines: Vec<Line>,
    random: Random,
    now: u64,
    mode: Mode,
    /// Most bytes that an application sends each millisecond.
    pace: u64,
    window_max: u64,
}

/// How long it takes until the ends notice that a path is dead, milliseconds.
const NOTICE: u64 = 112;

impl Pair {
    fn new(seed: u64, mode: Mode, lines: Vec<(u64, u64)>) -> Self {
        let mut random = Random::new(seed);
        let window_bytes = 32_768_u32 << random.below(3);
        let window_max = u64::from(window_bytes) << random.below(5);
        let config = Config {
            window_bytes,
            window_max_bytes: window_max as u32,
            keep_max_bytes: 65_536 << random.below(6),
            ..Config::default()
        };
        // The far end learns of the other paths when the first of them comes.
        let sessions = [Session::with_mode(config, mode, Instant::ZERO), Session::new(config, Instant::ZERO)];
        let ends = sessions.map(|session| End {
            session,
            total: random.below(1_500_000),
            read: 0,
            eof_told: false,
            got: 0,
            got_at: 0,
            longest_gap: 0,
            accepted: 0,
            fin_came: false,
            closed: None,
        });
        let line = |(delay, rate): (u64, u64)| {
            let room = 20_000 + random.below(400_000);
            let pipes = [Pipe::new(delay, rate, room), Pipe::new(delay, rate, room)];
            Line { pipes, up: false, noticed_at: None, near_up_at: None, data_sent: 0 }
        };
        let lines = lines.into_iter().map(line).collect();
        Self { config, ends, lines, random, now: 0, mode, pace: 20_000, window_max }
    }

    fn tell(&mut self, end: usize, input: Input) {
        self.ends[end].session.handle(Instant::from_millis(self.now), input);
    }

    /// The near end's opening has reached the far end. The answer reaches the near end in order with what follows.
    fn raise(&mut self, path: usize) {
        let (next, limit) = self.ends[0].session.expects();
        let line = &mut self.lines[path];
        let (delay, rate, room) = (line.pipes[0].delay, line.pipes[0].rate, line.pipes[0].room);
        line.pipes = [Pipe::new(delay, rate, room), Pipe::new(delay, rate, room)];
        (line.up, line.noticed_at) = (true, None);
        if path > 0 || self.now > 1 {
            self.tell(1, Input::Mode(self.mode));
        }
        let (far_next, far_limit) = self.ends[1].session.expects();
        self.tell(1, Input::PathUp { path: path as u8, next, limit });
        self.lines[path].near_up_at = Some((self.now + delay, far_next, far_limit));
    }

    /// The path dies; the ends notice later, or at once.
    fn cut(&mut self, path: usize, silently: bool) {
        self.lines[path].noticed_at = Some(self.now + if silently { NOTICE } else { 0 });
    }

    /// Another process continues with this end, if it has no path.
    fn move_end(&mut self, end: usize) {
        let now = Instant::from_millis(self.now);
        let Some(bytes) = self.ends[end].session.to_bytes(now) else { return };
        let session = Session::from_bytes(&bytes, self.config, now).expect("a state");
        assert_eq!(session.mode(), self.ends[end].session.mode());
        self.ends[end].session = session;
    }

    fn lines_step(&mut self) {
        for path in 0..self.lines.len() {
            if let Some((at, next, limit)) = self.lines[path].near_up_at
                && at <= self.now
                && self.lines[path].noticed_at.is_none()
            {
                self.lines[path].near_up_at = None;
                self.tell(0, Input::PathUp { path: path as u8, next, limit });
            }
            if self.lines[path].noticed_at.is_some_and(|at| at <= self.now) {
                let line = &mut self.lines[path];
                (line.up, line.noticed_at, line.near_up_at) = (false, None, None);
                (0..2).for_each(|end| self.tell(end, Input::PathDown(path as u8)));
            }
            if !self.lines[path].up {
                continue;
            }
            for to in 0..2 {
                let line = &mut self.lines[path];
                // What the far end sends before its answer has arrived comes behind the answer.
                let waits = to == 0 && line.near_up_at.is_some();
                let stuck = line.noticed_at.is_some() || waits;
                for frame in line.pipes[to].step(self.now, stuck) {
                    self.tell(to, Input::Frame(path as u8, frame));
                }
            }
        }
    }

    fn ready(&self, end: usize) -> PathSet {
        let lines = (0_u8..).zip(&self.lines);
        let ready = lines.filter(|(_, line)| {
            let pipe = &line.pipes[1 - end];
            line.up && (end == 1 || line.near_up_at.is_none()) && pipe.queued < pipe.room
        });
        ready.fold(PathSet::default(), |ready, (path, _)| ready.with(path))
    }

    fn step(&mut self, end: usize) {
        self.tell(end, Input::Tick);
        self.application(end);
        for _ in 0..500 {
            let ready = self.ready(end);
            let (path, frame) = match self.ends[end].session.poll(ready) {
                None => break,
                Some(Output::Send(path, frame)) => (path, frame),
                Some(Output::SendData { path, offset }) => {
                    let bytes = self.ends[end].session.data(offset).to_vec();
                    assert!(!bytes.is_empty());
                    self.lines[usize::from(path)].data_sent += bytes.len() as u64;
                    (path, SessionFrame::Data { offset, bytes })
                }
                Some(Output::Fin) => {
                    let (this, other) = (&self.ends[end], &self.ends[1 - end]);
                    assert!(!this.fin_came && this.got == other.total, "one FIN, after the last byte");
                    if this.eof_told {
                        assert_eq!(other.accepted, this.total, "FIN before the far kernel had every byte");
                    }
                    self.ends[end].fin_came = true;
                    continue;
                }
                Some(Output::Closed(reason)) => {
                    assert_eq!(self.ends[end].closed.replace(reason), None, "one end");
                    continue;
                }
            };
            assert!(ready.has(path), "only what is ready is used");
            self.lines[usize::from(path)].pipes[1 - end].push(frame);
        }
    }

    fn application(&mut self, at: usize) {
        let now = Instant::from_millis(self.now);
        let (pace, window_max) = (self.pace, self.window_max);
        let end = &mut self.ends[at];
        let n = (end.session.room() as u64).min(end.total - end.read).min(self.random.below(pace));
        if n > 0 {
            let bytes = (end.read..end.read + n).map(|place| byte(at, place)).collect();
            end.session.handle(now, Input::Read(bytes));
            end.read += n;
        }
        if end.read == end.total && !end.eof_told {
            end.eof_told = true;
            end.session.handle(now, Input::Eof);
        }
        while !end.session.deliverable().is_empty() {
            let piece = end.session.deliverable();
            for byte_got in piece {
                assert_eq!(*byte_got, byte(1 - at, end.got), "byte {} of side {}", end.got, 1 - at);
                end.got += 1;
            }
            let n = piece.len();
            end.session.handle(now, Input::Written(n));
            end.longest_gap = end.longest_gap.max(self.now - end.got_at);
            end.got_at = self.now;
        }
        if self.random.permille(300) {
            end.accepted = end.got;
        }
        if end.session.wants_confirmation() {
            end.session.handle(now, Input::Confirmed(end.accepted));
        }
        // What is beyond the bytes in order was granted, so it is never more than the window.
        let (next, limit) = end.session.expects();
        assert!(limit.saturating_sub(next) <= window_max + 32_768, "{limit} - {next}");
    }

    fn run(&mut self, until: u64, mut event: impl FnMut(&mut Self)) {
        while self.now < until && self.ends.iter().any(|end| end.closed.is_none()) {
            self.now += 1;
            event(self);
            self.lines_step();
            self.step(0);
            self.step(1);
        }
    }

    fn assert_all_delivered(&self) {
        for end in 0..2 {
            let (this, other) = (&self.ends[end], &self.ends[1 - end]);
            assert_eq!(this.closed, Some(None), "side {end} at {} ms: {:?}", self.now, this.session.sent());
            assert_eq!((this.got, this.fin_came), (other.total, true), "side {end}");
        }
    }
}

fn wild_lines(seed: u64) -> Vec<(u64, u64)> {
    let mut random = Random::new(seed ^ 0xABCD);
    (0..1 + random.below(4)).map(|_| (1 + random.below(60), 100 + random.below(8000))).collect()
}

fn mode_of(seed: u64) -> Mode {
    if seed.is_multiple_of(2) { Mode::Stripe } else { Mode::Duplicate }
}

#[test]
fn paths_that_die_and_come_back_lose_nothing_and_repeat_nothing() {
    each_seed(300, |seed| {
        let mut pair = Pair::new(seed, mode_of(seed), wild_lines(seed));
        pair.now = 1;
        pair.raise(0);
        pair.run(400_000, |pair| {
            for path in 0..pair.lines.len() {
                let line = &pair.lines[path];
                let is_free = line.near_up_at.is_none() && line.noticed_at.is_none();
                if line.up && is_free && pair.random.permille(3) {
                    let silently = pair.random.permille(500);
                    pair.cut(path, silently);
                } else if !line.up && pair.random.permille(15) {
                    pair.raise(path);
                }
            }
        });
        pair.assert_all_delivered();
    });
}

#[test]
fn ends_that_move_to_other_processes_lose_nothing() {
    each_seed(300, |seed| {
        let mut pair = Pair::new(seed, mode_of(seed), wild_lines(seed));
        let mut moving = None;
        pair.now = 1;
        pair.raise(0);
        pair.run(400_000, |pair| {
            let all = pair.lines.len();
            match moving {
                Some(end) if pair.lines.iter().all(|line| !line.up) => {
                    pair.move_end(end);
                    moving = None;
                }
                Some(_) => {}
                None if pair.random.permille(3) => {
                    let up: Vec<_> = (0..all).filter(|path| pair.lines[*path].up).collect();
                    up.into_iter().for_each(|path| pair.cut(path, false));
                    moving = Some(pair.random.below(2) as usize);
                }
                None => {
                    let path = pair.random.below(all as u64) as usize;
                    if !pair.lines[path].up && pair.random.permille(60) {
                        pair.raise(path);
                    }
                }
            }
        });
        pair.assert_all_delivered();
    });
}

/// The near end sends at this pace, in bytes per millisecond, and one path after the other is cut and comes back.
fn longest_gap(seed: u64, mode: Mode, lines: &[(u64, u64)], pace: u64) -> u64 {
    let mut pair = Pair::new(seed, mode, lines.to_vec());
    pair.pace = pace * 2;
    (pair.ends[0].total, pair.ends[1].total) = (pace * 4000, 0);
    pair.now = 1;
    (0..lines.len()).for_each(|path| pair.raise(path));
    pair.run(60_000, |pair| {
        let path = (pair.now / 1000) as usize % pair.lines.len();
        match pair.now % 1000 {
            500 => pair.cut(path, true),
            700 => pair.raise(path),
            0..100 => pair.ends[1].longest_gap *= u64::from(pair.now > 1000),
            _ => {}
        }
    });
    pair.assert_all_delivered();
    pair.ends[1].longest_gap
}

#[test]
fn with_copies_a_silent_death_costs_no_more_than_a_round_trip() {
    each_seed(60, |seed| {
        let gap = longest_gap(seed, Mode::Duplicate, &[(20, 4000), (20, 4000)], 500);
        assert!(gap <= 40, "{gap} ms");
        let gap = longest_gap(seed, Mode::Duplicate, &[(10, 4000), (35, 4000)], 500);
        assert!(gap <= 70, "{gap} ms of the longer round trip");
    });
}

#[test]
fn striped_bytes_of_a_path_that_died_wait_for_its_death_and_one_way_more() {
    each_seed(60, |seed| {
        // The data that was on its way, the time until the death is noticed, and the way of the other path with its queue.
        let gap = longest_gap(seed, Mode::Stripe, &[(20, 2000), (20, 2000)], 1000);
        assert!(gap <= NOTICE + 3 * 40, "{gap} ms");
    });
}

#[test]
fn stripes_use_all_paths_and_a_slow_one_holds_little_up() {
    each_seed(40, |seed| {
        let lines = vec![(15, 1000), (25, 1000), (40, 20)];
        let mut pair = Pair::new(seed, Mode::Stripe, lines);
        let bytes = 4_000_000;
        (pair.ends[0].total, pair.ends[1].total, pair.pace) = (bytes, 0, 20_000);
        let config = Config::default();
        let near = Session::with_mode(config, Mode::Stripe, Instant::ZERO);
        (pair.ends[0].session, pair.ends[1].session) = (near, Session::new(config, Instant::ZERO));
        pair.window_max = config.window_max_bytes.into();
        pair.now = 1;
        (0..3).for_each(|path| pair.raise(path));
        pair.run(60_000, |_| {});
        pair.assert_all_delivered();
        let sent: Vec<_> = pair.lines.iter().map(|line| line.data_sent).collect();
        assert!(sent[0] > bytes / 4 && sent[1] > bytes / 4, "{sent:?}");
        assert!(sent.iter().sum::<u64>() < bytes * 3 / 2, "hardly any of it twice: {sent:?}");
        // One path alone needs more than four seconds for it.
        assert!(pair.ends[1].got_at < 3900, "{} ms: {sent:?}", pair.ends[1].got_at);
        assert!(pair.ends[1].longest_gap < 2000, "{} ms", pair.ends[1].longest_gap);
    });
}

#[test]
fn many_tiny_pieces_stay_within_what_the_far_end_orders() {
    each_seed(20, |seed| {
        let mut pair = Pair::new(seed, Mode::Stripe, vec![(2, 4000), (60, 4000)]);
        (pair.ends[0].total, pair.ends[1].total, pair.pace) = (30_000, 30_000, 8);
        pair.now = 1;
        (0..2).for_each(|path| pair.raise(path));
        pair.run(200_000, |pair| {
            if pair.now.is_multiple_of(700) {
                pair.cut(0, true);
            } else if pair.now % 700 == 300 {
                pair.raise(0);
            }
        });
        pair.assert_all_delivered();
    });
}

#[test]
fn an_end_that_lies_about_what_arrived_is_reset() {
    for bytes in [1, u64::MAX] {
        let mut session = Session::with_mode(Config::default(), Mode::Stripe, Instant::ZERO);
        session.handle(Instant::ZERO, Input::PathUp { path: 0, next: 0, limit: 1000 });
        session.handle(Instant::ZERO, Input::Frame(0, SessionFrame::Arrived { bytes }));
        let outputs: Vec<_> = std::iter::from_fn(|| session.poll(PathSet::ALL)).collect();
        assert_eq!(outputs.last(), Some(&Output::Closed(Some(ResetReason::Protocol))), "{outputs:?}");
    }
    // More pieces behind a gap than the receiver orders.
    let mut session = Session::with_mode(Config::default(), Mode::Stripe, Instant::ZERO);
    session.handle(Instant::ZERO, Input::PathUp { path: 0, next: 0, limit: 1000 });
    for offset in 1..10_000 {
        session.handle(Instant::ZERO, Input::Frame(0, SessionFrame::Data { offset, bytes: vec![1] }));
    }
    let outputs: Vec<_> = std::iter::from_fn(|| session.poll(PathSet::ALL)).collect();
    assert_eq!(outputs.last(), Some(&Output::Closed(Some(ResetReason::Protocol))), "{outputs:?}");
}

#[test]
fn random_frames_on_random_paths_never_panic() {
    each_seed(200, |seed| {
        let mut random = Random::new(seed);
        let mut session = Session::with_mode(Config::default(), mode_of(seed), Instant::ZERO);
        for at in 0..400 {
            let path = random.below(7) as u8;
            let number = random.below(3) * random.below(70_000);
            let input = match random.below(9) {
                0 => Input::PathUp { path, next: number, limit: number * 2 },
                1 => Input::PathDown(path),
                2 => Input::Mode(mode_of(random.next())),
                3 => Input::Read(vec![1; random.below(40_000) as usize]),
                4 => Input::Frame(path, SessionFrame::Arrived { bytes: number }),
                5 => Input::Frame(path, SessionFrame::Data { offset: number, bytes: vec![2; 900] }),
                6 => Input::Frame(path, SessionFrame::Fin { offset: number }),
                7 => Input::Written(random.below(10_000) as usize),
                _ => Input::Tick,
            };
            session.handle(Instant::from_millis(at), input);
            let ready = (0..5).filter(|_| random.permille(600)).fold(PathSet::default(), PathSet::with);
            for _ in 0..20 {
                match session.poll(ready) {
                    Some(Output::SendData { offset, path }) => {
                        assert!(ready.has(path) && !session.data(offset).is_empty());
                    }
                    Some(_) => {}
                    None => break,
                }
            }
        }
    });
}
