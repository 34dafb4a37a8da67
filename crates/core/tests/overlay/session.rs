//! Two ends of a session over paths that die, lose, reorder and repeat: the bytes arrive once and in order, and FIN keeps
//! its promise.

use crate::random::{Random, each_seed};
use sidetrack_core::overlay::frame::{Ack, DATA_MAX, ResetReason, SessionFrame};
use sidetrack_core::overlay::session::{Config, Input, Output, PathSet, Session};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Byte `at` of what this side's application sends.
fn byte(side: usize, at: u64) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 8) ^ (side as u64 * 77)) as u8
}

/// An application and its kernel, beside one end.
struct End {
    session: Session,
    /// Bytes the application will send, and how many it has sent.
    total: u64,
    read: u64,
    eof_told: bool,
    /// Bytes written to the application's kernel, and those the kernel has accepted.
    got: u64,
    accepted: u64,
    fin_came: bool,
    closed: Option<Option<ResetReason>>,
    /// How long the application takes nothing.
    sleepy: u64,
}

struct Pair {
    config: Config,
    ends: [End; 2],
    /// Frames on their way to each end: when they arrive.
    wires: [BTreeMap<(u64, u64), SessionFrame>; 2],
    lossy: bool,
    path: bool,
    random: Random,
    serial: u64,
    now: u64,
}

impl Pair {
    fn new(seed: u64, lossy: bool) -> Self {
        let mut random = Random::new(seed);
        let config = Config {
            window_bytes: 32_768 << random.below(3),
            window_max_bytes: 65_536 << random.below(3),
            keep_max_bytes: 32_768 << random.below(4),
            retransmit: lossy.then_some(Duration::from_millis(50)),
            ..Config::default()
        };
        let mut end = || End {
            session: Session::new(config, Instant::ZERO),
            total: random.below(600_000),
            read: 0,
            eof_told: false,
            got: 0,
            accepted: 0,
            fin_came: false,
            closed: None,
            sleepy: 0,
        };
        let ends = [end(), end()];
        let wires = Default::default();
        Self { config, ends, wires, lossy, path: false, random, serial: 0, now: 0 }
    }

    fn tell(&mut self, end: usize, input: Input) {
        self.ends[end].session.handle(Instant::from_millis(self.now), input);
    }

    fn raise_path(&mut self) {
        self.path = true;
        for end in 0..2 {
            let (next, limit) = self.ends[1 - end].session.expects();
            self.tell(end, Input::PathUp { path: 0, next, limit });
        }
    }

    fn cut_path(&mut self) {
        self.path = false;
        self.wires = Default::default();
        for end in 0..2 {
            self.tell(end, Input::PathDown(0));
        }
    }

    /// Another process continues with this end. It has no path then.
    fn move_end(&mut self, end: usize) {
        let now = Instant::from_millis(self.now);
        let Some(bytes) = self.ends[end].session.to_bytes(now) else { return };
        let session = Session::from_bytes(&bytes, self.config, now).expect("a state");
        assert_eq!(session.to_bytes(now).as_ref(), Some(&bytes), "the same state");
        let before = std::mem::replace(&mut self.ends[end].session, session);
        let after = &self.ends[end].session;
        assert_eq!(after.expects(), before.expects());
        assert_eq!((after.sent(), after.delivered()), (before.sent(), before.delivered()));
        assert_eq!(after.room(), before.room());
    }

    fn transmit(&mut self, to: usize, frame: SessionFrame) {
        self.serial += 1;
        if !self.lossy {
            self.wires[to].insert((self.now + 10, self.serial), frame);
            return;
        }
        let copies = [1, 1, 1, 1, 1, 1, 1, 0, 2, 1][self.random.below(10) as usize];
        for _ in 0..copies {
            self.serial += 1;
            let at = self.now + 5 + self.random.below(30);
            self.wires[to].insert((at, self.serial), frame.clone());
        }
    }

    /// One millisecond of one end.
    fn step(&mut self, end: usize) {
        while let Some(entry) = self.wires[end].first_entry().filter(|entry| entry.key().0 <= self.now) {
            let frame = entry.remove();
            self.tell(end, Input::Frame(0, frame));
        }
        self.tell(end, Input::Tick);
        self.application(end);
        // The path takes only so much in a millisecond.
        for _ in 0..8 {
            match self.ends[end].session.poll(PathSet::ALL) {
                None => break,
                Some(Output::Send(_, frame)) => self.transmit(1 - end, frame),
                Some(Output::SendData { offset, .. }) => {
                    let bytes = self.ends[end].session.data(offset).to_vec();
                    assert!(!bytes.is_empty() && bytes.len() <= DATA_MAX);
                    self.transmit(1 - end, SessionFrame::Data { offset, bytes });
                }
                Some(Output::Fin) => self.fin(end),
                Some(Output::Closed(reason)) => {
                    assert_eq!(self.ends[end].closed.replace(reason), None, "one end");
                }
            }
        }
    }

    fn fin(&mut self, end: usize) {
        let (this, other) = (&self.ends[end], &self.ends[1 - end]);
        assert!(!this.fin_came, "one FIN");
        assert_eq!(this.got, other.total, "FIN after the last byte");
        // The promise: what this application has sent by now, the far kernel has accepted.
        let (_, confirmed) = this.session.sent();
        assert!(confirmed <= other.accepted, "nothing is confirmed that was not accepted");
        if this.eof_told {
            assert_eq!(other.accepted, this.total, "FIN before the far kernel had every byte");
        }
        self.ends[end].fin_came = true;
    }

    fn application(&mut self, at: usize) {
        let now = Instant::from_millis(self.now);
        let end = &mut self.ends[at];
        let room = end.session.room() as u64;
        let n = room.min(end.total - end.read).min(self.random.below(20_000));
        if n > 0 {
            let bytes = (end.read..end.read + n).map(|place| byte(at, place)).collect();
            end.session.handle(now, Input::Read(bytes));
            end.read += n;
        }
        if end.read == end.total && !end.eof_told {
            end.eof_told = true;
            end.session.handle(now, Input::Eof);
        }
        if end.sleepy > 0 {
            end.sleepy -= 1;
        } else if self.random.permille(5) {
            end.sleepy = self.random.below(300);
        } else {
            let piece = end.session.deliverable();
            let take = piece.len().min(1 + self.random.below(30_000) as usize);
            for byte_got in &piece[..take] {
                assert_eq!(*byte_got, byte(1 - at, end.got), "byte {} of side {}", end.got, 1 - at);
                end.got += 1;
            }
            end.session.handle(now, Input::Written(take));
        }
        // The kernel's acknowledgements come later.
        if self.random.permille(200) {
            end.accepted = end.got;
        }
        if end.session.wants_confirmation() {
            end.session.handle(now, Input::Confirmed(end.accepted));
        }
    }

    fn run(&mut self, until: u64, mut event: impl FnMut(&mut Self)) {
        while self.now < until && self.ends.iter().any(|end| end.closed.is_none()) {
            self.now += 1;
            event(self);
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

#[test]
fn paths_that_die_lose_nothing() {
    each_seed(150, |seed| {
        let mut pair = Pair::new(seed, false);
        pair.raise_path();
        pair.run(300_000, |pair| {
            if pair.path && pair.random.permille(8) {
                pair.cut_path();
            } else if !pair.path && pair.random.permille(20) {
                pair.raise_path();
            }
        });
        pair.assert_all_delivered();
    });
}

#[test]
fn paths_that_lose_repeat_and_reorder_deliver_all_the_same() {
    each_seed(150, |seed| {
        let mut pair = Pair::new(seed, true);
        pair.raise_path();
        pair.run(300_000, |_| {});
        pair.assert_all_delivered();
    });
}

#[test]
fn ends_that_move_to_other_processes_lose_nothing() {
    for lossy in [false, true] {
        each_seed(150, |seed| {
            let mut pair = Pair::new(seed, lossy);
            pair.raise_path();
            pair.run(300_000, |pair| {
                if pair.path && pair.random.permille(12) {
                    pair.cut_path();
                    let end = pair.random.below(2) as usize;
                    pair.move_end(end);
                    if pair.random.permille(100) {
                        pair.move_end(1 - end);
                    }
                } else if !pair.path && pair.random.permille(30) {
                    pair.raise_path();
                }
            });
            pair.assert_all_delivered();
        });
    }
}

#[test]
fn a_reset_is_told_by_the_process_that_continues() {
    each_seed(100, |seed| {
        let mut pair = Pair::new(seed, false);
        pair.ends.iter_mut().for_each(|end| end.total = 1 << 30);
        pair.raise_path();
        pair.run(20 + seed, |_| {});
        pair.cut_path();
        pair.tell(0, Input::Reset(ResetReason::Application));
        pair.move_end(0);
        pair.raise_path();
        pair.run(60_000, |pair| {
            // The one that is told moves, too, with the bytes that come before the reset.
            if seed.is_multiple_of(2) && pair.now == 60 + seed {
                pair.move_end(1);
            }
        });
        for end in &pair.ends {
            assert_eq!(end.closed, Some(Some(ResetReason::Application)));
            assert!(!end.fin_came);
        }
    });
}

#[test]
fn no_bytes_of_a_state_panic_and_a_state_that_is_cut_is_none() {
    each_seed(40, |seed| {
        let mut pair = Pair::new(seed, false);
        pair.raise_path();
        pair.run(5 + seed * 3, |_| {});
        let now = Instant::from_millis(pair.now);
        let Some(bytes) = pair.ends[0].session.to_bytes(now) else { return };
        for length in 0..bytes.len().min(300) {
            assert!(Session::from_bytes(&bytes[..length], pair.config, now).is_err());
        }
        for _ in 0..500 {
            let mut bytes = bytes.clone();
            let at = pair.random.below(bytes.len().min(250) as u64) as usize;
            bytes[at] ^= 1 << pair.random.below(8);
            let Ok(mut session) = Session::from_bytes(&bytes, pair.config, now) else { continue };
            let (next, limit) = session.expects();
            session.handle(now, Input::PathUp { path: 0, next: session.sent().0, limit: limit.max(next) });
            session.handle(now, Input::Read(vec![1; session.room().min(50_000)]));
            session.handle(now, Input::Written(session.deliverable().len()));
            session.handle(now, Input::Frame(0, SessionFrame::Data { offset: next, bytes: vec![2; 100] }));
            for _ in 0..100 {
                let Some(output) = session.poll(PathSet::ALL) else { break };
                if let Output::SendData { offset, .. } = output {
                    assert!(!session.data(offset).is_empty());
                }
            }
        }
    });
}

#[test]
fn without_a_path_both_applications_get_the_reset() {
    each_seed(50, |seed| {
        let mut pair = Pair::new(seed, false);
        pair.ends.iter_mut().for_each(|end| end.total = 1 << 30);
        pair.raise_path();
        pair.run(5 + seed, |_| {});
        pair.cut_path();
        let (from, timeout) = (pair.now, Config::default().path_timeout.as_millis() as u64);
        pair.run(100_000, |_| {});
        for end in &pair.ends {
            assert_eq!(end.closed, Some(Some(ResetReason::PathLost)));
            assert!(!end.fin_came);
        }
        assert!((timeout..=timeout + 1).contains(&(pair.now - from)), "{} ms", pair.now - from);
    });
}

#[test]
fn a_reset_comes_after_the_bytes_before_it() {
    each_seed(100, |seed| {
        let mut pair = Pair::new(seed, seed % 2 == 1);
        pair.ends.iter_mut().for_each(|end| end.total = 1 << 30);
        pair.raise_path();
        let at = 20 + seed;
        pair.run(60_000, |pair| {
            if pair.now == at {
                pair.tell(0, Input::Reset(ResetReason::Application));
            }
        });
        assert_eq!(pair.ends[1].closed, Some(Some(ResetReason::Application)), "the far side is told");
        assert_eq!(pair.ends[0].closed, Some(Some(ResetReason::Application)));
        assert!(!pair.ends[1].fin_came);
    });
}

#[test]
fn a_receiver_that_sleeps_for_a_minute_stops_the_sender_and_no_timer_ends_them() {
    let mut pair = Pair::new(3, false);
    (pair.ends[0].total, pair.ends[1].total) = (3_000_000, 10);
    pair.ends[1].sleepy = 60_000;
    pair.raise_path();
    pair.run(59_000, |_| {});
    let end = &pair.ends[0];
    let bound = u64::from(Config::default().keep_max_bytes);
    assert!(end.read < 1_000_000 && end.read <= bound, "credit holds the sender back: {}", end.read);
    assert_eq!(end.session.room(), 0);
    pair.run(300_000, |_| {});
    pair.assert_all_delivered();
}

#[test]
fn an_end_that_lies_is_reset() {
    let lies: Vec<SessionFrame> = vec![
        SessionFrame::Data { offset: u64::MAX - 70_000, bytes: vec![0; 10] },
        SessionFrame::Data { offset: 10, bytes: vec![0; 10] },
        SessionFrame::Ack(Ack { next: 1, ..Ack::default() }),
        SessionFrame::Ack(Ack { confirmed: 5, ..Ack::default() }),
        SessionFrame::Fin { offset: u64::MAX },
    ];
    for lie in lies {
        let mut session = Session::new(Config::default(), Instant::ZERO);
        session.handle(Instant::ZERO, Input::PathUp { path: 0, next: 0, limit: 1000 });
        session.handle(Instant::ZERO, Input::Frame(0, lie.clone()));
        let outputs: VecDeque<_> = std::iter::from_fn(|| session.poll(PathSet::ALL)).collect();
        assert_eq!(
            outputs.back(),
            Some(&Output::Closed(Some(ResetReason::Protocol))),
            "{lie:?}: {outputs:?}"
        );
    }
    let mut session = Session::new(Config::default(), Instant::ZERO);
    session.handle(Instant::ZERO, Input::PathUp { path: 0, next: 77, limit: 1000 });
    let outputs: Vec<_> = std::iter::from_fn(|| session.poll(PathSet::ALL)).collect();
    assert!(outputs.is_empty() && session.wants_path(), "such a path is none: {outputs:?}");
}

#[test]
fn crumbs_are_put_together_and_ahead_of_a_gap_they_are_bounded() {
    let config = Config { retransmit: Some(Duration::from_millis(50)), ..Config::default() };
    let mut session = Session::new(config, Instant::ZERO);
    session.handle(Instant::ZERO, Input::PathUp { path: 0, next: 0, limit: 1000 });
    for offset in (1..20_000).rev() {
        session.handle(Instant::ZERO, Input::Frame(0, SessionFrame::Data { offset, bytes: vec![1] }));
    }
    assert!(session.deliverable().is_empty());
    for offset in 0..1000 {
        session.handle(Instant::ZERO, Input::Frame(0, SessionFrame::Data { offset, bytes: vec![1] }));
    }
    assert!(session.deliverable().len() >= 1000, "one buffer holds them");
}

/// The window that an end grants after this number of bytes has come and were taken at once, a piece every `pace`.
fn window_after(bytes: u64, pace: Duration) -> u64 {
    let (mut now, mut offset) = (Instant::ZERO, 0);
    let mut end = Session::new(Config::default(), now);
    end.handle(now, Input::PathUp { path: 0, next: 0, limit: 0 });
    while offset < bytes {
        now = now + pace;
        end.handle(now, Input::Frame(0, SessionFrame::Data { offset, bytes: vec![0; DATA_MAX] }));
        offset += DATA_MAX as u64;
        while let n @ 1.. = end.deliverable().len() {
            end.handle(now, Input::Written(n));
        }
        while end.poll(PathSet::ALL).is_some() {}
    }
    let (next, limit) = end.expects();
    assert_eq!(next, offset, "no piece was refused");
    limit - next
}

#[test]
fn windows_grow_with_the_path_and_no_further() {
    let max = u64::from(Config::default().window_max_bytes);
    // 500 Mb/s, 4 Mb/s, 0.8 Mb/s.
    let fast = window_after(80_000_000, Duration::from_micros(262));
    assert!((max * 3 / 4..=max).contains(&fast), "{fast}: all that a lossy path of a long round trip needs");
    let slow = window_after(80_000_000, Duration::from_micros(32_768));
    assert!((750_000..=2_097_152).contains(&slow), "{slow}: more would wait for seconds");
    let crawling = window_after(8_000_000, Duration::from_micros(163_840));
    assert!(crawling <= 524_288, "{crawling}");
}
