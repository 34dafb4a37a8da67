//! The life cycle of a function's container: started, probed until it works, probed regularly, ended when it fails,
//! and started again after a growing pause. The driver starts, probes and ends it, and reports the results.
//!
//! ```text
//!             pause is over               started               good probe
//!   Pausing ----------------> Starting -------------> Coming -----------------> Well
//!      ^                          |                      |                        |
//!      | start failed             |  start_timeout       |  three bad probes      |
//!      +--------------------------+--or it has ended-----+--or it has ended-------+
//! ```

use crate::time::Instant;
use std::time::Duration;

/// The times of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Interval between two probes of a container that works.
    pub probe_interval: Duration,
    /// Time limit from the start to the first good probe.
    pub start_timeout: Duration,
}

impl Pace {
    /// Interval after a bad probe of a container that has not worked yet.
    pub const STARTING_INTERVAL: Duration = Duration::from_millis(20);
    /// Number of bad probes in a row after which a container that worked is ended.
    pub const BAD_PROBES: u32 = 3;
    /// Interval after a bad probe of a container that worked.
    pub const RETRY_INTERVAL: Duration = Duration::from_millis(100);
    /// The first pause before a new start.
    pub const PAUSE_MIN: Duration = Duration::from_millis(200);
    /// The longest pause. Each pause is twice as long as the one before.
    pub const PAUSE_MAX: Duration = Duration::from_secs(30);
    /// After a container has worked for this time, the next pause is the shortest again.
    pub const FORGIVEN: Duration = Duration::from_secs(60);
}

/// An event for a supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The container was started.
    Started,
    /// A probe was successful.
    Probed,
    /// A start or a probe failed, or the container ended by itself, for this reason.
    Failed(Failed),
    /// The obstacle to starting it may be gone (its image has arrived): the pause ends now.
    Again,
    /// The deadline may have passed.
    Tick,
}

/// What failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// The container could not be started.
    Start(String),
    /// A probe failed.
    Probe(String),
    /// The container has ended.
    Ended(String),
}

/// What a supervisor wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Start a container.
    Start,
    /// Probe it. Answer with [`Input::Probed`] or [`Failed::Probe`].
    Probe,
    /// From now on, flows may pass it.
    Up,
    /// From now on, no flow may pass it, for this reason. Flows that pass it must end.
    Down(String),
    /// End the container and remove what is left of it.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Pausing {
        until: Instant,
    },
    Starting,
    /// Has not worked yet. `why` is the reason of the last bad probe.
    Coming {
        until: Instant,
        why: Option<String>,
    },
    Well {
        since: Instant,
        bad: u32,
    },
}

/// The supervisor of one container.
#[derive(Clone, Debug)]
pub struct Supervisor {
    pace: Pace,
    state: State,
    pause: Duration,
    /// When the next probe is due. `None` while a probe is running.
    probe_at: Option<Instant>,
    outputs: Vec<Output>,
}

impl Supervisor {
    /// Makes a supervisor that starts a container now.
    pub fn new(pace: Pace, now: Instant) -> Self {
        let state = State::Pausing { until: now };
        Self { pace, state, pause: Pace::PAUSE_MIN, probe_at: None, outputs: Vec::new() }
    }

    /// Handles one event. An event that does not fit the state belongs to an earlier container, and is ignored.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match (&mut self.state, input) {
            (State::Starting, Input::Started) => {
                self.state = State::Coming { until: now + self.pace.start_timeout, why: None };
                self.probe(now);
            }
            (State::Starting, Input::Failed(Failed::Start(why))) => self.fall(now, why),
            (State::Coming { .. }, Input::Probed) => {
                self.state = State::Well { since: now, bad: 0 };
                self.probe_at = Some(now + self.pace.probe_interval);
                self.outputs.push(Output::Up);
            }
            (State::Coming { why, .. }, Input::Failed(Failed::Probe(said))) => {
                *why = Some(said);
                self.probe_at = Some(now + Pace::STARTING_INTERVAL);
                self.tick(now);
            }
            (State::Well { bad, .. }, Input::Probed) => {
                *bad = 0;
                self.probe_at = Some(now + self.pace.probe_interval);
            }
            (State::Well { bad, .. }, Input::Failed(Failed::Probe(why))) => {
                *bad += 1;
                if *bad >= Pace::BAD_PROBES {
                    self.fall(now, why);
                } else {
                    self.probe_at = Some(now + Pace::RETRY_INTERVAL);
                }
            }
            (State::Coming { .. } | State::Well { .. }, Input::Failed(Failed::Ended(why))) => {
                self.fall(now, why);
            }
            (State::Pausing { until }, Input::Again) => {
                *until = now;
                self.tick(now);
            }
            (_, Input::Tick) => self.tick(now),
            _ => {}
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        (!self.outputs.is_empty()).then(|| self.outputs.remove(0))
    }

    /// Returns when [`Input::Tick`] is due.
    pub fn deadline(&self) -> Option<Instant> {
        let until = match &self.state {
            State::Pausing { until } | State::Coming { until, .. } => Some(*until),
            State::Starting | State::Well { .. } => None,
        };
        until.into_iter().chain(self.probe_at).min()
    }

    fn tick(&mut self, now: Instant) {
        match &self.state {
            State::Pausing { until } if *until <= now => {
                self.state = State::Starting;
                self.outputs.push(Output::Start);
            }
            State::Coming { until, why } if *until <= now => {
                let limit = self.pace.start_timeout.as_millis();
                let why = why.as_deref().unwrap_or("the probe got no answer");
                let why = format!("not well {limit} ms after its start: {why}");
                self.fall(now, why);
            }
            State::Coming { .. } | State::Well { .. } if self.probe_at.is_some_and(|at| at <= now) => {
                self.probe(now);
            }
            _ => {}
        }
    }

    fn probe(&mut self, _now: Instant) {
        self.probe_at = None;
        self.outputs.push(Output::Probe);
    }

    fn fall(&mut self, now: Instant, why: String) {
        // A container that has worked for long starts again with the shortest pause.
        if matches!(self.state, State::Well { since, .. } if now.since(since) >= Pace::FORGIVEN) {
            self.pause = Pace::PAUSE_MIN;
        }
        self.outputs.extend([Output::Down(why), Output::End]);
        self.state = State::Pausing { until: now + self.pause };
        self.pause = (self.pause * 2).min(Pace::PAUSE_MAX);
        self.probe_at = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace =
        Pace { probe_interval: Duration::from_secs(1), start_timeout: Duration::from_millis(500) };

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    fn drain(supervisor: &mut Supervisor) -> Vec<Output> {
        std::iter::from_fn(|| supervisor.poll()).collect()
    }

    fn failed(what: fn(String) -> Failed) -> Input {
        Input::Failed(what("why".to_owned()))
    }

    /// A supervisor whose container works since `ms`.
    fn well(ms: u64) -> Supervisor {
        let mut one = Supervisor::new(PACE, at(ms));
        for input in [Input::Tick, Input::Started, Input::Probed] {
            one.handle(at(ms), input);
        }
        assert_eq!(drain(&mut one), [Output::Start, Output::Probe, Output::Up]);
        one
    }

    #[test]
    fn a_pause_ends_when_somebody_says_so_and_nothing_else_does() {
        let mut one = Supervisor::new(PACE, at(0));
        one.handle(at(0), Input::Tick);
        one.handle(at(0), failed(Failed::Start));
        drain(&mut one);
        one.handle(at(1), Input::Tick);
        assert_eq!(drain(&mut one), []);
        one.handle(at(1), Input::Again);
        one.handle(at(1), Input::Again);
        assert_eq!(drain(&mut one), [Output::Start], "once");
        let mut one = well(0);
        one.handle(at(1), Input::Again);
        assert_eq!(drain(&mut one), [], "one that is well is left alone");
    }

    #[test]
    fn one_bad_probe_is_forgiven_and_three_are_not() {
        let mut one = well(0);
        for ms in [1000, 1100] {
            one.handle(at(ms), Input::Tick);
            one.handle(at(ms), failed(Failed::Probe));
        }
        one.handle(at(1200), Input::Tick);
        one.handle(at(1200), Input::Probed);
        assert_eq!(drain(&mut one), vec![Output::Probe; 3]);
        for ms in [2200, 2300, 2400] {
            assert_eq!(one.deadline(), Some(at(ms)));
            one.handle(at(ms), Input::Tick);
            one.handle(at(ms), failed(Failed::Probe));
        }
        let end = [Output::Down("why".into()), Output::End];
        assert_eq!(drain(&mut one)[3..], end);
        assert_eq!(one.deadline(), Some(at(2600)));
    }

    #[test]
    fn one_that_never_gets_well_is_ended_and_says_what_the_probe_said() {
        let mut one = Supervisor::new(PACE, at(0));
        one.handle(at(0), Input::Tick);
        one.handle(at(10), Input::Started);
        one.handle(at(20), failed(Failed::Probe));
        assert_eq!(one.deadline(), Some(at(40)));
        one.handle(at(40), Input::Tick);
        one.handle(at(510), Input::Tick);
        let words = "not well 500 ms after its start: why";
        let expected = [Output::Start, Output::Probe, Output::Probe, Output::Down(words.into()), Output::End];
        assert_eq!(drain(&mut one), expected);
        one.handle(at(511), Input::Probed);
        assert_eq!(drain(&mut one), [], "an answer that comes too late");
    }

    #[test]
    fn pauses_grow_to_their_bound_and_are_forgiven() {
        let mut one = Supervisor::new(PACE, at(0));
        let mut now = at(0);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            one.handle(now, Input::Tick);
            one.handle(now, failed(Failed::Start));
            let until = one.deadline().unwrap();
            pauses.push(until.since(now).as_millis());
            now = until;
        }
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        for input in [Input::Tick, Input::Started, Input::Probed] {
            one.handle(now, input);
        }
        now = now + Pace::FORGIVEN;
        one.handle(now, failed(Failed::Ended));
        assert_eq!(one.deadline(), Some(now + Pace::PAUSE_MIN));
    }

    /// Every order of eight events: the container is up only between a good probe and the next end, at most one runs,
    /// and a next step is always due.
    #[test]
    fn every_order_of_events_keeps_the_rules() {
        let inputs = [
            Input::Tick,
            Input::Started,
            Input::Probed,
            failed(Failed::Start),
            failed(Failed::Probe),
            failed(Failed::Ended),
        ];
        let mut stack = vec![(Supervisor::new(PACE, at(0)), at(0), false, false, 0)];
        let mut seen = 0_u32;
        while let Some((one, now, up, running, depth)) = stack.pop() {
            seen += 1;
            if depth == 8 {
                continue;
            }
            for input in &inputs {
                let (mut next, mut up, mut running) = (one.clone(), up, running);
                let now = if *input == Input::Tick { next.deadline().unwrap_or(now).max(now) } else { now };
                next.handle(now, input.clone());
                for output in drain(&mut next) {
                    match output {
                        Output::Start => assert!(!std::mem::replace(&mut running, true), "two at a time"),
                        Output::Up => assert!(running && !std::mem::replace(&mut up, true)),
                        Output::Down(_) => up = false,
                        Output::End => {
                            assert!(!up && running);
                            running = false;
                        }
                        Output::Probe => assert!(running),
                    }
                }
                assert!(running || next.deadline().is_some(), "nothing would ever start it again");
                stack.push((next, now, up, running, depth + 1));
            }
        }
        assert!(seen > 1_000_000, "{seen}");
    }
}
