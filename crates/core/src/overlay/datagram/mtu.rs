//! Finds the largest datagram that a path passes: datagram packetization layer path MTU discovery (RFC 8899), with a
//! short list of sizes.
//!
//! A probe is a datagram of the size to be tested, and the neighbour answers it. A probe carries nothing else, so a
//! size that does not pass loses no data.

use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// The sizes to try, in bytes of UDP payload, rising: the minimum that every path must pass (RFC 9000 Sec. 14),
/// several kinds of tunnel, Ethernet with IPv6, Ethernet with IPv4, and jumbo frames.
const SIZES: [usize; 9] = [1200, 1232, 1332, 1372, 1412, 1432, 1452, 1472, 8952];

/// How long to wait for the answer to a probe before the next try.
const PATIENCE: Duration = Duration::from_millis(250);

/// A size does not pass if this number of probes of it was not answered.
const TRIES: u8 = 3;

/// The interval at which the size in use is confirmed.
const CONFIRM: Duration = Duration::from_secs(15);

/// The interval at which larger sizes are tried again.
const RAISE: Duration = Duration::from_secs(600);

/// An event that the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The neighbour answered the probe with this number.
    Answered(u32),
    /// The kernel reports that datagrams of this number of bytes do not pass.
    TooLarge(usize),
    /// The deadline may have passed.
    Tick,
}

/// Tells the driver to send a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Its number.
    pub number: u32,
    /// Bytes of the whole datagram.
    pub bytes: usize,
}

/// A probe that waits for its answer, and the index of its size.
#[derive(Clone, Copy, Debug)]
struct Trial {
    at: usize,
    number: u32,
    tries: u8,
    until: Instant,
}

/// Finds the size for one link.
#[derive(Clone, Debug)]
pub struct Search {
    /// Index of the size in use.
    good: usize,
    trial: Option<Trial>,
    /// When the size in use is confirmed next.
    confirm_at: Instant,
    /// When larger ones are tried next.
    raise_at: Instant,
    number: u32,
    outputs: VecDeque<Probe>,
}

impl Search {
    /// Starts with the smallest size in use. The first probe has the largest size, and the next ones go downwards.
    pub fn new(now: Instant) -> Self {
        let confirm_at = now + CONFIRM;
        Self { good: 0, trial: None, confirm_at, raise_at: now, number: 0, outputs: VecDeque::new() }
    }

    /// Returns the number of bytes that a datagram may have.
    pub fn bytes(&self) -> usize {
        SIZES[self.good]
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Answered(number) => self.answered(now, number),
            Input::TooLarge(bytes) => self.too_large(now, bytes),
            Input::Tick => {}
        }
        self.proceed(now);
    }

    /// Returns the next probe to send, or `None`.
    pub fn poll(&mut self) -> Option<Probe> {
        self.outputs.pop_front()
    }

    /// When to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Instant {
        self.trial.map_or(self.confirm_at.min(self.raise_at), |trial| trial.until)
    }

    fn answered(&mut self, now: Instant, number: u32) {
        let Some(trial) = self.trial.filter(|trial| trial.number == number) else { return };
        (self.good, self.trial) = (trial.at, None);
        self.confirm_at = now + CONFIRM;
    }

    fn too_large(&mut self, now: Instant, bytes: usize) {
        let below = SIZES.iter().rposition(|size| *size < bytes).unwrap_or(0);
        if self.good > below {
            self.good = below;
            self.confirm_at = now + CONFIRM;
        }
        if let Some(trial) = self.trial.filter(|trial| SIZES[trial.at] >= bytes) {
            self.failed(now, trial);
        }
    }

    /// Handles a size that does not pass: tries the next smaller one.
    fn failed(&mut self, now: Instant, trial: Trial) {
        self.trial = None;
        if trial.at == self.good {
            // The size in use has stopped passing. Fall back to the smallest size and search again.
            self.good = 0;
            self.confirm_at = now + CONFIRM;
            self.raise_at = now;
        } else if trial.at > self.good + 1 {
            self.attempt(now, trial.at - 1, 1);
        }
    }

    fn proceed(&mut self, now: Instant) {
        if let Some(trial) = self.trial {
            if trial.until > now {
                return;
            }
            if trial.tries < TRIES {
                return self.attempt(now, trial.at, trial.tries + 1);
            }
            self.failed(now, trial);
        }
        if self.trial.is_some() {
            return;
        }
        // Only one size is probed at a time. The search for larger sizes comes before the confirmation of the size
        // in use.
        if self.raise_at <= now {
            self.raise_at = now + RAISE;
            if self.good + 1 < SIZES.len() {
                self.attempt(now, SIZES.len() - 1, 1);
            }
        } else if self.confirm_at <= now {
            self.confirm_at = now + CONFIRM;
            self.attempt(now, self.good, 1);
        }
    }

    fn attempt(&mut self, now: Instant, at: usize, tries: u8) {
        self.number = self.number.wrapping_add(1);
        self.trial = Some(Trial { at, number: self.number, tries, until: now + PATIENCE });
        self.outputs.push_back(Probe { number: self.number, bytes: SIZES[at] });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a path for `ms` milliseconds that passes datagrams of up to `passes` bytes and loses `lost` of ten
    /// probes.
    fn run(search: &mut Search, from_ms: u64, ms: u64, passes: usize, lost: u32) -> usize {
        let mut probes = 0;
        let mut answers: Vec<(u64, u32)> = Vec::new();
        for at in from_ms..from_ms + ms {
            let now = Instant::from_millis(at);
            for (_, number) in answers.extract_if(.., |(due, _)| *due <= at).collect::<Vec<_>>() {
                search.handle(now, Input::Answered(number));
            }
            if search.deadline() <= now {
                search.handle(now, Input::Tick);
            }
            while let Some(probe) = search.poll() {
                probes += 1;
                if probe.bytes <= passes && probe.number % 10 >= lost {
                    answers.push((at + 40, probe.number));
                }
            }
        }
        probes
    }

    #[test]
    fn the_largest_size_that_passes_is_found() {
        for (passes, found) in [(9000, 8952), (1500, 1472), (1471, 1452), (1400, 1372), (1200, 1200)] {
            let mut search = Search::new(Instant::ZERO);
            assert_eq!(search.bytes(), 1200, "what passes everywhere, until more is known");
            run(&mut search, 0, 8000, passes, 0);
            assert_eq!(search.bytes(), found);
        }
    }

    #[test]
    fn some_lost_probes_change_nothing_and_a_narrower_path_is_noticed() {
        let mut search = Search::new(Instant::ZERO);
        run(&mut search, 0, 60_000, 1500, 2);
        assert_eq!(search.bytes(), 1472);
        run(&mut search, 60_000, 25_000, 1380, 0);
        assert_eq!(search.bytes(), 1372);
        run(&mut search, 85_000, 620_000, 1500, 0);
        assert_eq!(search.bytes(), 1472, "and a wider one, later");
        let probes = run(&mut search, 705_000, 60_000, 1500, 0);
        assert!(probes < 6, "{probes} in a minute");
    }

    #[test]
    fn the_systems_word_counts_at_once() {
        let mut search = Search::new(Instant::ZERO);
        run(&mut search, 0, 8000, 1500, 0);
        search.handle(Instant::from_millis(8000), Input::TooLarge(1472));
        assert_eq!(search.bytes(), 1452);
        search.handle(Instant::from_millis(8000), Input::TooLarge(10));
        assert_eq!(search.bytes(), 1200, "never less");
        search.handle(Instant::from_millis(8000), Input::Answered(7));
        assert_eq!(search.bytes(), 1200, "the answer to something else");
    }
}
