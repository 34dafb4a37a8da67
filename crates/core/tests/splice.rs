//! The splice core against a small model: every order of reads, writes, blocks, FINs, resets and late binding.

use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::splice::{Config, Input, Output, Splice};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const LIMIT: u32 = 2;
const NOW: Instant = Instant::ZERO;

/// What the two peers still want to send, and what they have received.
#[derive(Clone, Debug, PartialEq, Eq)]
struct World {
    splice: Splice,
    bound: bool,
    /// Bytes each side still has to send, by side.
    to_send: [u32; 2],
    /// Bytes each side has received, and whether FIN came.
    received: [(u32, bool); 2],
    read: [u32; 2],
    failed: [bool; 2],
    closed: Option<(EndReason, bool)>,
}

fn index(side: Side) -> usize {
    match side {
        Side::Client => 0,
        Side::Server => 1,
    }
}

impl World {
    fn new(up: u32, down: u32) -> Self {
        let config = Config { limit: LIMIT, idle: None, lifetime: None, linger: Duration::from_secs(1) };
        Self {
            splice: Splice::new(config, NOW),
            bound: false,
            to_send: [up, down],
            received: [(0, false); 2],
            read: [0; 2],
            failed: [false; 2],
            closed: None,
        }
    }

    fn tell(&mut self, input: Input) {
        self.splice.handle(NOW, input);
        for side in [Side::Client, Side::Server] {
            assert!(self.splice.held(side) <= LIMIT, "{self:?}");
        }
    }

    /// Every possible answer to one output.
    fn answers(&self, output: Output) -> Vec<World> {
        let mut next = Vec::new();
        let mut with = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world);
        };
        match output {
            Output::Read(side, max) => {
                assert!(side == Side::Client || self.bound, "nothing is asked of a server that is not there");
                let at = index(side);
                for n in 1..=max.min(self.to_send[at]) {
                    with(&|w| {
                        w.to_send[at] -= n;
                        w.read[at] += n;
                        w.tell(Input::Read(side, n));
                    });
                }
                if self.to_send[at] == 0 {
                    with(&|w| w.tell(Input::Eof(side)));
                }
                with(&|w| w.tell(Input::ReadBlocked(side)));
            }
            Output::Write(side, n) => {
                assert!(n > 0 && (side == Side::Client || self.bound));
                let at = index(side);
                for part in 1..=n {
                    with(&|w| {
                        assert!(!w.received[at].1, "a byte after FIN");
                        w.received[at].0 += part;
                        w.tell(Input::Written(side, part));
                    });
                }
                with(&|w| w.tell(Input::WriteBlocked(side)));
            }
            Output::Fin(side) => with(&|w| {
                let at = index(side);
                assert!(!w.received[at].1, "FIN twice");
                assert_eq!(w.received[at].0, w.read[1 - at], "FIN before the last byte");
                assert_eq!(w.to_send[1 - at], 0, "FIN though the other side still sends");
                w.received[at].1 = true;
                w.tell(Input::FinSent(side));
            }),
            Output::Close { reason, reset } => with(&|w| {
                assert!(w.closed.is_none(), "closed twice");
                w.closed = Some((reason, reset));
                w.check_close();
            }),
        }
        next
    }

    fn check_close(&self) {
        let Some((reason, reset)) = self.closed else { return };
        match reason {
            EndReason::Ok => {
                assert!(!reset && !self.failed[0] && !self.failed[1]);
                // The close itself sends the last FIN.
                assert!(self.received[0].1 || self.received[1].1);
                assert_eq!(self.received[0].0, self.read[1]);
                assert_eq!(self.received[1].0, self.read[0]);
                assert_eq!(self.to_send, [0, 0]);
            }
            EndReason::ClientReset => assert!(reset && self.failed[0]),
            EndReason::ServerReset => {
                assert!(reset && self.failed[1]);
                if !self.failed[0] {
                    assert_eq!(self.received[0].0, self.read[1], "bytes before a reset go first");
                }
            }
            other => panic!("no way to {other}"),
        }
    }

    /// Every event that can happen spontaneously.
    fn events(&self) -> Vec<World> {
        let mut next = Vec::new();
        let mut with = |input: Input, change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            world.tell(input);
            next.push(world);
        };
        if !self.bound {
            with(Input::Bound, &|w| w.bound = true);
        }
        with(Input::Woken, &|_| {});
        if matches!(self.splice.clone().poll(), Some(Output::Close { .. })) {
            return next; // the end is decided, and a reset now changes nothing
        }
        for side in [Side::Client, Side::Server] {
            if (side == Side::Client || self.bound) && !self.failed[index(side)] {
                with(Input::Failed(side), &|w| w.failed[index(side)] = true);
            }
        }
        next
    }
}

#[test]
fn every_interleaving_keeps_the_rules_and_can_end() {
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut parents: Vec<Vec<usize>> = Vec::new();
    let mut closed = Vec::new();
    let mut ends = BTreeSet::new();
    let mut todo: Vec<(World, Option<usize>)> = vec![(World::new(3, 3), None)];
    while let Some((world, parent)) = todo.pop() {
        let fresh = numbers.len();
        let number = *numbers.entry(format!("{world:?}")).or_insert(fresh);
        if number == fresh {
            parents.push(Vec::new());
        }
        parents[number].extend(parent);
        if number != fresh {
            continue;
        }
        assert!(numbers.len() < 200_000, "the state space must stay small enough to explore");
        if let Some((reason, _)) = world.closed {
            ends.insert(reason);
            closed.push(number);
            assert_eq!(world.splice.clone().poll(), None, "nothing after Close");
            assert_eq!(world.splice.deadline(), None);
            continue;
        }
        let mut asked = world.clone();
        let answers = asked.splice.poll().map(|output| asked.answers(output)).unwrap_or_default();
        todo.extend(world.events().into_iter().chain(answers).map(|child| (child, Some(number))));
    }
    assert_eq!(ends, BTreeSet::from([EndReason::Ok, EndReason::ClientReset, EndReason::ServerReset]));
    assert!(numbers.len() > 500, "only {} states: the exploration lost its way", numbers.len());
    // No stuck state: from every state some path leads to Close.
    let mut can_end = vec![false; numbers.len()];
    while let Some(number) = closed.pop() {
        if !std::mem::replace(&mut can_end[number], true) {
            closed.extend(&parents[number]);
        }
    }
    for (state, number) in &numbers {
        assert!(can_end[*number], "stuck: {state}");
    }
}

#[test]
fn half_close_keeps_the_other_direction_open() {
    let mut splice = Splice::new(Config::default(), NOW);
    splice.handle(NOW, Input::Bound);
    splice.handle(NOW, Input::ReadBlocked(Side::Server));
    let mut down = 3;
    let mut order = Vec::new();
    while let Some(output) = splice.poll() {
        let input = match output {
            Output::Read(Side::Client, _) => Input::Eof(Side::Client),
            Output::Read(Side::Server, _) if down > 0 => {
                down -= 1;
                Input::Read(Side::Server, 100)
            }
            Output::Read(Side::Server, _) => Input::Eof(Side::Server),
            Output::Write(side, n) => Input::Written(side, n),
            Output::Fin(side) => {
                order.push((side, down));
                splice.handle(NOW, Input::FinSent(side));
                Input::Woken
            }
            Output::Close { reason, reset } => {
                assert_eq!((reason, reset), (EndReason::Ok, false));
                break;
            }
        };
        splice.handle(NOW, input);
    }
    assert_eq!(
        order,
        [(Side::Server, 3)],
        "the client's FIN goes first, alone; the other goes with the close"
    );
    assert_eq!(down, 0, "the close comes after the last byte");
    assert!(splice.is_closed());
}

#[test]
fn time_outs_end_with_a_reset_and_their_reason() {
    let config = Config {
        idle: Some(Duration::from_millis(100)),
        lifetime: Some(Duration::from_millis(250)),
        ..Config::default()
    };
    let mut splice = Splice::new(config, NOW);
    assert_eq!(splice.deadline(), Some(Instant::from_millis(100)));
    splice.handle(Instant::from_millis(99), Input::Tick);
    assert!(matches!(splice.poll(), Some(Output::Read(Side::Client, _))));
    splice.handle(Instant::from_millis(99), Input::Read(Side::Client, 1));
    assert_eq!(splice.deadline(), Some(Instant::from_millis(199)));
    let mut idle = splice.clone();
    idle.handle(Instant::from_millis(199), Input::Tick);
    assert_eq!(idle.poll(), Some(Output::Close { reason: EndReason::Idle, reset: true }));
    assert_eq!(idle.poll(), None);
    splice.handle(Instant::from_millis(190), Input::Read(Side::Client, 1));
    assert_eq!(splice.deadline(), Some(Instant::from_millis(250)));
    splice.handle(Instant::from_millis(250), Input::Tick);
    assert_eq!(splice.poll(), Some(Output::Close { reason: EndReason::Lifetime, reset: true }));
}

#[test]
fn bytes_before_a_reset_that_cannot_leave_are_given_up_after_the_linger_time() {
    let mut splice = Splice::new(Config::default(), NOW);
    splice.handle(NOW, Input::Bound);
    splice.handle(NOW, Input::Read(Side::Server, 10));
    splice.handle(NOW, Input::WriteBlocked(Side::Client));
    splice.handle(NOW, Input::Failed(Side::Server));
    assert_eq!(splice.poll(), None);
    assert_eq!(splice.deadline(), Some(Instant::from_millis(2000)));
    splice.handle(Instant::from_millis(2000), Input::Tick);
    assert_eq!(splice.poll(), Some(Output::Close { reason: EndReason::ServerReset, reset: true }));
}

#[test]
fn a_wish_to_end_is_obeyed_at_once() {
    let mut splice = Splice::new(Config::default(), NOW);
    splice.handle(NOW, Input::Read(Side::Client, 10));
    splice.handle(NOW, Input::End(EndReason::Killed));
    splice.handle(NOW, Input::Failed(Side::Client));
    assert_eq!(splice.poll(), Some(Output::Close { reason: EndReason::Killed, reset: true }));
}
