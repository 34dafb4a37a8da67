//! The life of one container of a function: started, probed until it is well, probed on, ended when it is not, and
//! started again after a pause that grows. Pure: the driver starts, probes and ends, and says how that went.

use crate::time::Instant;
use std::time::Duration;

/// When things are to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// From one probe of a container that is well to the next.
    pub probe_interval: Duration,
    /// From the start to the first good probe at most.
    pub start_timeout: Duration,
}

impl Pace {
    /// From a bad probe of a container that has not been well yet to the next.
    pub const STARTING_INTERVAL: Duration = Duration::from_millis(20);
    /// Bad probes in a row after which one that was well is ended.
    pub const BAD_PROBES: u32 = 3;
    /// From a bad probe of one that was well to the next.
    pub const RETRY_INTERVAL: Duration = Duration::from_millis(100);
    /// The first pause before a new start.
    pub const PAUSE_MIN: Duration = Duration::from_millis(200);
    /// The longest pause; each is twice as long as the one before.
    pub const PAUSE_MAX: Duration = Duration::from_secs(30);
    /// One that was well for so long begins again with the first pause.
    pub const FORGIVEN: Duration = Duration::from_secs(60);
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// It was started.
    Started,
    /// A probe went well.
    Probed,
    /// A start or a probe failed, or it ended by itself, for this reason.
    Failed(Failed),
    /// What kept it from starting may be over (its image has come): a pause ends now.
    Again,
    /// The deadline has come.
    Tick,
}

/// What failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It could not be started.
    Start(String),
    /// A probe.
    Probe(String),
    /// It is gone.
    Ended(String),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Start one.
    Start,
    /// Probe it; answered by [`Input::Probed`] or [`Failed::Probe`].
    Probe,
    /// Flows may pass it from now on.
    Up,
    /// No flow may pass it from now on, for this reason; those that do are to end.
    Down(String),
    /// End it, whatever is left of it.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Pausing {
        until: Instant,
    },
    Starting,
    /// Not well yet; the last bad probe said this.
    Coming {
        until: Instant,
        why: Option<String>,
    },
    Well {
        since: Instant,
        bad: u32,
    },
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Supervisor {
    pace: Pace,
    state: State,
    pause: Duration,
    /// When the next probe is due; none: one is under way.
    probe_at: Option<Instant>,
    outputs: Vec<Output>,
}

impl Supervisor {
    /// One that is to be started now.
    pub fn new(pace: Pace, now: Instant) -> Self {
        let state = State::Pausing { until: now };
        Self { pace, state, pause: Pace::PAUSE_MIN, probe_at: None, outputs: Vec::new() }
    }

    /// Something happened. What does not fit the state is left over from a container that is gone.
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

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<Output> {
        (!self.outputs.is_empty()).then(|| self.outputs.remove(0))
    }

    /// When [`Input::Tick`] is due.
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

    /// One that is well since `ms`.
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

    /// Every order of eight events: it is up only between a good probe and the next end, at most one is running, and there is
    /// always something that goes on.
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
