//! The legs of a link whose ends have several addresses: each leg leads from one local address to one remote address. They are
//! measured one by one, and the link uses the best one, or all.
//!
//! ```text
//!   each leg:   Down ----- hellos pass both ways ----> Up         (the detector of `hello`, with hellos of its own)
//!                 ^------- `missed` intervals silent ---|
//!
//!   the link:   None ---- a leg is up ----> Best(leg)
//!                 ^                          |    |
//!                 |    no other leg is up    |    | it went down: the cheapest of the others, at once
//!                 +--------------------------+    | another leg was clearly cheaper for `hold`: that one
//!                                                 v
//!                                              Best(other)
//! ```
//!
//! The end that dialled the link numbers the legs. The other end learns of a leg by its first hello. Each end chooses the leg
//! that it sends on by itself. The link stays up as long as one leg is: what comes on any leg is a sign of life.

use super::frame::Hello;
use super::hello::{self, Detector, Lane, Pace, Quality};
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most legs of a link.
pub const LEGS_MAX: u8 = 8;

/// Times of the legs of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The pace of the hellos on each leg.
    pub pace: Pace,
    /// How long another leg has to be clearly cheaper before the link moves to it. Default: 3 s.
    pub hold: Duration,
}

impl Config {
    /// Makes a configuration with the default times.
    pub const fn new(pace: Pace) -> Self {
        Self { pace, hold: Duration::from_secs(3) }
    }
}

/// An event that the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// This end has a leg with this number. A number from [`LEGS_MAX`] on is ignored.
    Add(u8),
    /// A hello came on a leg.
    Hello(u8, Hello),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do or to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send this on a leg.
    Send(u8, Hello),
    /// [`Legs::best`] or [`Legs::up`] has changed.
    Changed,
}

/// One leg, as the status shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Its number.
    pub leg: u8,
    /// Both ends hear each other on it.
    pub is_up: bool,
    /// Its quality.
    pub quality: Quality,
}

/// The legs of one link.
#[derive(Clone, Debug)]
pub struct Legs {
    config: Config,
    legs: BTreeMap<u8, Detector>,
    best: Option<u8>,
    /// The leg that is clearly cheaper than the best one, and since when.
    rival: Option<(u8, Instant)>,
    outputs: VecDeque<Output>,
}

impl Legs {
    /// Returns a link without legs.
    pub fn new(config: Config) -> Self {
        Self { config, legs: BTreeMap::new(), best: None, rival: None, outputs: VecDeque::new() }
    }

    /// Returns the leg that this end should send on. `None`: no leg is up.
    pub fn best(&self) -> Option<u8> {
        self.best
    }

    /// Returns the legs that are up.
    pub fn up(&self) -> impl Iterator<Item = u8> {
        self.legs.iter().filter(|(_, leg)| leg.is_up()).map(|(number, _)| *number)
    }

    /// Whether a leg is so much worse than the best one that what is on it should move.
    pub fn is_worse(&self, leg: u8) -> bool {
        let cost = |leg: u8| self.legs.get(&leg).map(|leg| leg.quality().cost_us());
        let best = self.best.filter(|best| *best != leg).and_then(cost);
        best.zip(cost(leg)).is_some_and(|(best, cost)| is_clearly_cheaper(best, cost))
    }

    /// Returns all legs.
    pub fn views(&self) -> impl Iterator<Item = View> {
        let view = |(leg, detector): (&u8, &Detector)| View {
            leg: *leg,
            is_up: detector.is_up(),
            quality: detector.quality(),
        };
        self.legs.iter().map(view)
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Add(leg) => self.add(now, leg),
            Input::Hello(leg, hello) => {
                self.add(now, leg);
                if let Some(detector) = self.legs.get_mut(&leg) {
                    detector.handle(now, hello::Input::Hello(hello, Lane::Stream));
                }
            }
            Input::Tick => {}
        }
        for detector in self.legs.values_mut() {
            detector.handle(now, hello::Input::Tick);
        }
        let mut has_changed = false;
        for (number, detector) in &mut self.legs {
            while let Some(output) = detector.poll() {
                match output {
                    hello::Output::Send(hello, _) => self.outputs.push_back(Output::Send(*number, hello)),
                    hello::Output::Up | hello::Output::Down => has_changed = true,
                }
            }
        }
        if self.choose(now) || has_changed {
            self.outputs.push_back(Output::Changed);
        }
    }

    /// Returns the next output, or `None` if there is none.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call `handle(now, Input::Tick)`. `None`: there are no legs.
    pub fn deadline(&self) -> Option<Instant> {
        let rival = self.rival.map(|(_, since)| since + self.config.hold);
        self.legs.values().map(Detector::deadline).chain(rival).min()
    }

    fn add(&mut self, now: Instant, leg: u8) {
        if leg < LEGS_MAX {
            let config =
                hello::Config { stream: self.config.pace, datagrams: None, ..hello::Config::default() };
            self.legs.entry(leg).or_insert_with(|| Detector::new(config, now));
        }
    }

    /// Chooses the leg to send on. Returns true if it is another one than before.
    fn choose(&mut self, now: Instant) -> bool {
        let cost = |leg: u8| self.legs.get(&leg).filter(|leg| leg.is_up()).map(|leg| leg.quality().cost_us());
        let cheapest = self.up().filter_map(|leg| Some((cost(leg)?, leg))).min();
        let current = self.best.and_then(|best| Some((cost(best)?, best)));
        let next = match (current, cheapest) {
            // The leg went down, or there was none: no reason to wait.
            (None, cheapest) => cheapest.map(|(_, leg)| leg),
            (Some((_, best)), None) => Some(best),
            (Some((cost, best)), Some((other, leg))) if is_clearly_cheaper(other, cost) && leg != best => {
                let since = self.rival.filter(|(rival, _)| *rival == leg).map_or(now, |(_, since)| since);
                self.rival = Some((leg, since));
                if now.since(since) < self.config.hold {
                    return false;
                }
                Some(leg)
            }
            (Some((_, best)), _) => {
                self.rival = None;
                Some(best)
            }
        };
        let has_changed = next != self.best;
        if has_changed {
            (self.best, self.rival) = (next, None);
        }
        has_changed
    }
}

/// Whether a leg is so much cheaper that measuring errors do not explain it: by a fifth and 2 ms.
fn is_clearly_cheaper(cost_us: u32, than_us: u32) -> bool {
    u64::from(cost_us) * 5 + 10_000 < u64::from(than_us) * 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlay::frame::LinkState;

    const PACE: Pace = Pace { interval: Duration::from_millis(28), missed: 4 };

    /// Two ends of a link, and the one-way delay of each leg in ms; `None`: it is cut.
    struct Link {
        ends: [Legs; 2],
        ways: Vec<Option<u64>>,
        flying: Vec<(u64, usize, u8, Hello)>,
        changes: [Vec<(u64, Option<u8>)>; 2],
        now: u64,
    }

    impl Link {
        fn new(ways: &[u64]) -> Self {
            let mut ends = [(); 2].map(|()| Legs::new(Config::new(PACE)));
            for leg in 0..ways.len() {
                ends[0].handle(Instant::ZERO, Input::Add(leg as u8));
            }
            let ways = ways.iter().copied().map(Some).collect();
            Self { ends, ways, flying: Vec::new(), changes: Default::default(), now: 0 }
        }

        fn run(&mut self, ms: u64) {
            for _ in 0..ms {
                self.now += 1;
                let now = Instant::from_millis(self.now);
                let arrived = self.flying.extract_if(.., |(at, ..)| *at <= self.now).collect::<Vec<_>>();
                for (_, to, leg, hello) in arrived {
                    if self.ways[usize::from(leg)].is_some() {
                        self.ends[to].handle(now, Input::Hello(leg, hello));
                    }
                }
                for end in 0..2 {
                    if self.ends[end].deadline().is_some_and(|at| at <= now) {
                        self.ends[end].handle(now, Input::Tick);
                    }
                    while let Some(output) = self.ends[end].poll() {
                        match output {
                            Output::Send(leg, hello) => {
                                if let Some(delay) = self.ways[usize::from(leg)] {
                                    self.flying.push((self.now + delay, 1 - end, leg, hello));
                                }
                            }
                            Output::Changed => self.changes[end].push((self.now, self.ends[end].best())),
                        }
                    }
                }
            }
        }

        fn best(&self) -> [Option<u8>; 2] {
            [0, 1].map(|end| self.ends[end].best())
        }
    }

    #[test]
    fn a_cut_leg_is_left_within_its_time_out_and_taken_again_when_it_is_better() {
        let mut link = Link::new(&[5, 20]);
        link.run(5000);
        assert_eq!(link.best(), [Some(0); 2], "the other end has learned of both, and measures the same");
        assert_eq!(link.ends[1].up().collect::<Vec<_>>(), [0, 1]);
        link.ways[0] = None;
        let cut = link.now;
        link.run(150);
        assert_eq!(link.best(), [Some(1); 2]);
        for changes in &link.changes {
            let (at, best) = *changes.last().expect("a change");
            assert!(at - cut <= 28 * 5 && best == Some(1), "{at} - {cut}");
        }
        link.ways[0] = Some(5);
        link.run(1000);
        assert_eq!(link.best(), [Some(1); 2], "it has to be better for a while");
        link.run(4000);
        assert_eq!(link.best(), [Some(0); 2]);
    }

    #[test]
    fn legs_that_are_nearly_alike_do_not_alternate() {
        let mut link = Link::new(&[10, 11]);
        link.run(1000);
        let best = link.best();
        for round in 0..200 {
            link.ways = vec![Some(10 + round % 3), Some(11 - round % 3)];
            link.run(100);
        }
        assert_eq!(link.best(), best);
    }

    #[test]
    fn without_a_leg_there_is_no_best_one_and_no_number_is_too_high() {
        let mut link = Link::new(&[5]);
        link.run(1000);
        link.ways[0] = None;
        link.run(1000);
        assert_eq!(link.best(), [None; 2]);
        link.ways[0] = Some(5);
        link.run(1000);
        assert_eq!(link.best(), [Some(0); 2]);
        let mut legs = Legs::new(Config::new(PACE));
        let hello = Hello { state: LinkState::Up, sequence: 1, interval_ms: 28, echo: None };
        for leg in 0..=u8::MAX {
            legs.handle(Instant::ZERO, Input::Hello(leg, hello));
        }
        assert_eq!(legs.views().count(), LEGS_MAX.into());
    }
}
