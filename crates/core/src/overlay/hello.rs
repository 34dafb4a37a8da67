//! Whether a neighbour is there, and how good the link to it is.
//!
//! Both ends of a link send hellos at a steady pace and say whether they hear the other (the state machine of BFD,
//! RFC 5880 Sec. 6.2, without its authentication and echo functions): a link that carries bytes one way only never
//! comes up. Hellos travel on a connection, or in datagrams, of their own, never behind data.

use super::frame::{Hello, LinkState};
use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Times of a detector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How often a hello is sent, 10 to 1000 ms.
    pub interval: Duration,
    /// So many intervals without a sign of life, and the link is down. At least 2.
    pub missed: u32,
    /// No longer than this may hellos stay away while the neighbour's kernel still answers ([`Input::Acked`]): it lacks
    /// the time to speak, but its connections stand.
    pub starved: Duration,
    /// So many hellos must be heard before a link that is down may come up.
    pub up_after: u32,
}

impl Default for Config {
    /// Three hellos of 40 ms: a link that falls silent is down after 160 ms at most, and idle links carry about
    /// 2 kB/s each way.
    fn default() -> Self {
        Self { interval: Duration::from_millis(40), missed: 4, starved: Duration::from_secs(2), up_after: 2 }
    }
}

/// The bounds of what a neighbour may say about its pace.
const INTERVAL_MS: std::ops::RangeInclusive<u16> = 10..=1000;

/// Hellos whose times of sending are remembered; an echo of an older one measures nothing.
const SENT_MAX: usize = 64;

/// Hellos over which loss is counted before older ones begin to be forgotten.
const LOSS_WINDOW: u32 = 256;

/// A jump of the sequence beyond this is a restart of the neighbour, not loss.
const SEQUENCE_JUMP: u32 = 1024;

/// What is known about a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// Smoothed round trip, microseconds; 0 = not measured yet.
    pub rtt_us: u32,
    /// Mean deviation of the round trip, microseconds.
    pub jitter_us: u32,
    /// Share of what is sent that is lost on the way, parts per million, before recovery.
    pub loss_ppm: u32,
}

impl Quality {
    /// Cost of every hop, whatever its quality, microseconds: of two equal ways the shorter.
    pub const HOP_COST_US: u32 = 300;

    /// Highest cost of a link, microseconds.
    pub const COST_MAX_US: u32 = 60_000_000;

    /// The time a byte is expected to take over this link, microseconds: half a round trip, and for the lost ones the
    /// repair (a round trip and 10 ms to notice). In an ordered stream those behind a lost byte wait, too: a loss
    /// counts eight times.
    pub fn cost_us(&self) -> u32 {
        let one_way = u64::from(self.rtt_us / 2);
        let repair = u64::from(self.rtt_us) + 10_000;
        let loss = u64::from(self.loss_ppm.min(1_000_000));
        let cost = u64::from(Self::HOP_COST_US) + one_way + 8 * loss * repair / 1_000_000;
        u32::try_from(cost).unwrap_or(u32::MAX).min(Self::COST_MAX_US)
    }

    /// Takes one measured round trip into account (RFC 6298 Sec. 2).
    fn measured(&mut self, rtt_us: u32) {
        if self.rtt_us == 0 {
            (self.rtt_us, self.jitter_us) = (rtt_us.max(1), rtt_us / 2);
            return;
        }
        let deviation = self.rtt_us.abs_diff(rtt_us);
        self.jitter_us = smoothed(self.jitter_us, deviation, 4);
        self.rtt_us = smoothed(self.rtt_us, rtt_us, 8).max(1);
    }
}

/// `old` moved by a `part`-th of the way to `new`.
fn smoothed(old: u32, new: u32, part: u64) -> u32 {
    let value = (u64::from(old) * (part - 1) + u64::from(new)) / part;
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// What the driver tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A hello of the neighbour came.
    Hello(Hello),
    /// The loss below our own recovery, where somebody else measures it (the kernel, for TCP), parts per million.
    Loss(u32),
    /// The neighbour's kernel has acknowledged something of ours lately. Says that the way there and back is good, not
    /// that the neighbour is.
    Acked,
    /// The deadline may have passed, and all that had arrived was told.
    Tick,
}

/// Since when a neighbour is silent, in time that we were awake: what we slept through it may have said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Silence {
    /// No hello.
    hello: Instant,
    /// No sign of life at all.
    any: Instant,
    /// We were away once since then, and left time to read.
    has_grace: bool,
}

/// What the driver is to do or know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send this.
    Send(Hello),
    /// The link is up.
    Up,
    /// The link is down.
    Down,
}

/// Counts which hellos came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Arrivals {
    latest: Option<u32>,
    expected: u32,
    came: u32,
}

/// Watches one link.
#[derive(Clone, Debug)]
pub struct Detector {
    config: Config,
    state: LinkState,
    sequence: u32,
    sent: VecDeque<(u32, Instant)>,
    next_hello: Instant,
    /// The latest hello heard: its sequence and when it came.
    heard: Option<(u32, Instant)>,
    /// None until something was heard.
    silence: Option<Silence>,
    heard_in_a_row: u32,
    peer_interval: Duration,
    arrivals: Arrivals,
    /// Somebody else measures the loss.
    loss_is_told: bool,
    quality: Quality,
    outputs: VecDeque<Output>,
}

impl Detector {
    /// A link on which nothing was heard yet; the first hello goes at once.
    pub fn new(config: Config, now: Instant) -> Self {
        Self {
            config,
            state: LinkState::Down,
            sequence: 0,
            sent: VecDeque::new(),
            next_hello: now,
            heard: None,
            silence: None,
            heard_in_a_row: 0,
            peer_interval: config.interval,
            arrivals: Arrivals::default(),
            loss_is_told: false,
            quality: Quality::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Whether both ends hear each other.
    pub fn is_up(&self) -> bool {
        self.state == LinkState::Up
    }

    /// What is known about the link.
    pub fn quality(&self) -> Quality {
        self.quality
    }

    /// Tells one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        self.excuse(now);
        match input {
            Input::Hello(hello) => self.hello(now, &hello),
            Input::Loss(ppm) => {
                self.loss_is_told = true;
                self.quality.loss_ppm = ppm.min(1_000_000);
            }
            Input::Acked => {
                if let Some(silence) = &mut self.silence {
                    (silence.any, silence.has_grace) = (now, false);
                }
            }
            Input::Tick => {}
        }
        if self.silent_at().is_some_and(|at| at <= now) {
            (self.heard, self.silence) = (None, None);
            self.heard_in_a_row = 0;
            // A neighbour that restarts counts from the beginning.
            self.arrivals.latest = None;
            self.go(LinkState::Down);
        }
        if self.next_hello <= now {
            self.send(now);
        }
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Instant {
        self.silent_at().map_or(self.next_hello, |at| at.min(self.next_hello))
    }

    /// When the neighbour will have been silent for too long.
    fn silent_at(&self) -> Option<Instant> {
        let silence = self.silence?;
        Some((silence.any + self.patience()).min(silence.hello + self.config.starved.max(self.patience())))
    }

    /// How long a neighbour that lives may be silent.
    fn patience(&self) -> Duration {
        self.peer_interval.max(self.config.interval) * self.config.missed.max(2)
    }

    /// We are called later than we asked for: what the neighbour said meanwhile may still wait to be read, so that the
    /// time we were away counts for nothing, and for the first time two intervals are left to read.
    fn excuse(&mut self, now: Instant) {
        let late = now.since(self.deadline());
        let Some(silence) = self.silence.filter(|_| late > self.config.interval) else { return };
        // As if they had been silent for so much less.
        let excused = |since: Instant, patience: Duration| {
            let silent = (now - since).saturating_sub(late);
            let most = patience.saturating_sub(self.config.interval * 2);
            let counted = if silence.has_grace { silent } else { silent.min(most) };
            since + (now - since).saturating_sub(counted)
        };
        self.silence = Some(Silence {
            hello: excused(silence.hello, self.config.starved.max(self.patience())),
            any: excused(silence.any, self.patience()),
            has_grace: true,
        });
    }

    fn send(&mut self, now: Instant) {
        // From the moment it was due, so that the pace does not drift; after a long sleep from now on.
        let next = self.next_hello + self.config.interval;
        self.next_hello = if next > now { next } else { now + self.config.interval };
        self.sequence = self.sequence.wrapping_add(1);
        if self.sent.len() >= SENT_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((self.sequence, now));
        let echo = self
            .heard
            .map(|(sequence, at)| (sequence, u32::try_from(now.since(at).as_micros()).unwrap_or(u32::MAX)));
        let interval_ms = u16::try_from(self.config.interval.as_millis()).unwrap_or(u16::MAX);
        let hello = Hello { state: self.state, sequence: self.sequence, interval_ms, echo };
        self.outputs.push_back(Output::Send(hello));
    }

    fn hello(&mut self, now: Instant, hello: &Hello) {
        if self.arrivals.note(hello.sequence) {
            // Older than one that came before: it says nothing new.
            return;
        }
        self.heard = Some((hello.sequence, now));
        self.silence = Some(Silence { hello: now, any: now, has_grace: false });
        self.heard_in_a_row = self.heard_in_a_row.saturating_add(1);
        let interval_ms = hello.interval_ms.clamp(*INTERVAL_MS.start(), *INTERVAL_MS.end());
        self.peer_interval = Duration::from_millis(interval_ms.into());
        if !self.loss_is_told {
            self.quality.loss_ppm = self.arrivals.loss_ppm();
        }
        self.measure(now, hello.echo);
        let enough = self.heard_in_a_row >= self.config.up_after;
        match (self.state, hello.state) {
            (LinkState::Down, LinkState::Down) if enough => self.go(LinkState::Init),
            (LinkState::Down, LinkState::Init) if enough => self.go(LinkState::Up),
            (LinkState::Init, LinkState::Init | LinkState::Up) => self.go(LinkState::Up),
            // The other end does not hear us any more, or has begun anew.
            (LinkState::Up, LinkState::Down) => self.go(LinkState::Down),
            _ => {}
        }
    }

    fn measure(&mut self, now: Instant, echo: Option<(u32, u32)>) {
        let Some((sequence, delay_us)) = echo else { return };
        let Some(at) = self.sent.iter().position(|(sent, _)| *sent == sequence) else { return };
        let round = now.since(self.sent[at].1);
        // Each is measured once: the same echo again would have its later arrival counted.
        self.sent.drain(..=at);
        if let Some(rtt) = round.checked_sub(Duration::from_micros(delay_us.into())) {
            self.quality.measured(u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX));
        }
    }

    fn go(&mut self, state: LinkState) {
        let before = std::mem::replace(&mut self.state, state);
        match (before, state) {
            (LinkState::Up, LinkState::Down) => self.outputs.push_back(Output::Down),
            (LinkState::Down | LinkState::Init, LinkState::Up) => self.outputs.push_back(Output::Up),
            _ => {}
        }
    }
}

impl Arrivals {
    /// Notes that this hello came; true: a later one had come before.
    fn note(&mut self, sequence: u32) -> bool {
        let step = self.latest.map_or(1, |latest| sequence.wrapping_sub(latest));
        if step == 0 || step > u32::MAX - SEQUENCE_JUMP {
            return true;
        }
        self.latest = Some(sequence);
        if step > SEQUENCE_JUMP {
            (self.expected, self.came) = (1, 1);
            return false;
        }
        self.expected += step;
        self.came += 1;
        if self.expected > LOSS_WINDOW {
            self.expected /= 2;
            self.came = (self.came / 2).min(self.expected);
        }
        false
    }

    fn loss_ppm(&self) -> u32 {
        let lost = u64::from(self.expected.saturating_sub(self.came));
        u32::try_from(lost * 1_000_000 / u64::from(self.expected.max(1))).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_WAY: Duration = Duration::from_millis(10);

    /// Two ends joined by wires that `passes` may cut, for so many milliseconds; gives what each end announced.
    fn pair(ms: u64, passes: impl Fn(bool, u64) -> bool) -> ([Detector; 2], [Vec<(u64, Output)>; 2]) {
        let mut ends = [
            Detector::new(Config::default(), Instant::ZERO),
            Detector::new(Config::default(), Instant::ZERO),
        ];
        let mut wires: [VecDeque<(Instant, Hello)>; 2] = Default::default();
        let mut said: [Vec<(u64, Output)>; 2] = Default::default();
        for at in 0..ms {
            let now = Instant::from_millis(at);
            for end in 0..2 {
                while let Some((_, hello)) = wires[end].pop_front_if(|(due, _)| *due <= now) {
                    ends[end].handle(now, Input::Hello(hello));
                }
                ends[end].handle(now, Input::Tick);
                while let Some(output) = ends[end].poll() {
                    match output {
                        Output::Send(hello) if passes(end == 0, at) => {
                            wires[1 - end].push_back((now + ONE_WAY, hello))
                        }
                        Output::Send(_) => {}
                        other => said[end].push((at, other)),
                    }
                }
            }
        }
        (ends, said)
    }

    #[test]
    fn both_ends_come_up_and_measure_the_round_trip() {
        let (ends, said) = pair(2000, |_, _| true);
        for end in 0..2 {
            assert_eq!(said[end].len(), 1, "{said:?}");
            assert_eq!(said[end][0].1, Output::Up);
            assert_eq!(
                ends[end].quality(),
                Quality { rtt_us: 20_000, jitter_us: ends[end].quality().jitter_us, loss_ppm: 0 }
            );
            assert!(ends[end].quality().jitter_us < 1000);
        }
    }

    #[test]
    fn silence_is_noticed_in_time_and_a_one_way_link_never_comes_up() {
        let (_, said) = pair(2000, |_, at| at < 1000);
        for end in said {
            let (at, output) = end[1];
            assert_eq!(output, Output::Down);
            assert!((1000..1000 + 10 + 161).contains(&at), "{at}");
        }
        let (ends, said) = pair(2000, |from_first, _| from_first);
        assert_eq!(said, [vec![], vec![]]);
        assert!(!ends[0].is_up() && !ends[1].is_up());
        // One direction dies: both ends know.
        let (_, said) = pair(2000, |from_first, at| from_first || at < 1000);
        assert!(said.iter().all(|end| end.len() == 2 && end[1].1 == Output::Down), "{said:?}");
    }

    /// One end that hears a hello at each of these times; gives the end, up.
    fn heard_until(ms: u64) -> Detector {
        let mut end = Detector::new(Config::default(), Instant::ZERO);
        for (sequence, at) in (0..=ms).step_by(40).enumerate() {
            let sequence = u32::try_from(sequence).expect("few");
            let hello = Hello { state: LinkState::Up, sequence, interval_ms: 40, echo: None };
            let hello = if sequence < 3 { Hello { state: LinkState::Init, ..hello } } else { hello };
            end.handle(Instant::from_millis(at), Input::Hello(hello));
            end.handle(Instant::from_millis(at), Input::Tick);
        }
        assert!(end.is_up());
        end
    }

    #[test]
    fn who_slept_does_not_take_it_for_the_silence_of_others() {
        // Any sleep, the tick before what was said meanwhile is read: the link stays.
        for slept in [1, 50, 159, 160, 161, 500, 1000, 100_000] {
            let mut end = heard_until(1000);
            let woken = Instant::from_millis(1000 + slept);
            end.handle(woken, Input::Tick);
            assert!(end.is_up(), "after {slept} ms");
            // But a neighbour that says nothing any more is noticed, also by one who sleeps all the time.
            let late = Duration::from_millis(300);
            let mut now = woken;
            for _ in 0..100 {
                end.handle(now, Input::Tick);
                now = end.deadline() + late * u32::from(slept > 500);
            }
            assert!(!end.is_up(), "nobody spoke after {slept} ms");
        }
    }

    #[test]
    fn a_neighbour_whose_kernel_answers_may_be_silent_for_longer_not_for_ever() {
        let mut end = heard_until(1000);
        let mut last_up = 0;
        for at in (1001..8000).step_by(10) {
            end.handle(Instant::from_millis(at), Input::Acked);
            end.handle(Instant::from_millis(at), Input::Tick);
            if end.is_up() {
                last_up = at;
            }
        }
        assert!((2980..3010).contains(&last_up), "{last_up}");
        end.handle(Instant::from_millis(9000), Input::Acked);
        assert!(!end.is_up(), "an acknowledgement alone brings no link up");
    }

    #[test]
    fn lost_hellos_are_counted_and_cost() {
        let (ends, said) = pair(8000, |_, at| at % 400 >= 40);
        assert_eq!(said[0].len(), 1, "one lost in ten takes no link down: {said:?}");
        let quality = ends[0].quality();
        assert!((60_000..150_000).contains(&quality.loss_ppm), "{quality:?}");
        assert!(quality.cost_us() > Quality { loss_ppm: 0, ..quality }.cost_us() + 10_000);
    }

    #[test]
    fn a_neighbour_that_restarts_and_counts_anew_is_heard_again() {
        let hello = |sequence| Hello { state: LinkState::Init, sequence, interval_ms: 40, echo: None };
        let mut detector = Detector::new(Config::default(), Instant::ZERO);
        for sequence in 400..410 {
            detector.handle(Instant::from_millis(u64::from(sequence) * 40), Input::Hello(hello(sequence)));
        }
        assert!(detector.is_up());
        for sequence in 1..20 {
            detector.handle(
                Instant::from_millis(16_400 + u64::from(sequence) * 40),
                Input::Hello(hello(sequence)),
            );
        }
        let changes: Vec<_> = std::iter::from_fn(|| detector.poll())
            .filter(|output| !matches!(output, Output::Send(_)))
            .collect();
        assert_eq!(changes, [Output::Up, Output::Down, Output::Up]);
    }

    #[test]
    fn what_makes_no_sense_is_survived() {
        let mut detector = Detector::new(Config::default(), Instant::ZERO);
        for sequence in [u32::MAX, 0, 7, 7, 3, u32::MAX / 2, 1] {
            let hello =
                Hello { state: LinkState::Up, sequence, interval_ms: 0, echo: Some((sequence, u32::MAX)) };
            detector.handle(Instant::from_millis(1), Input::Hello(hello));
        }
        detector.handle(Instant::ZERO, Input::Loss(u32::MAX));
        assert!(detector.quality().cost_us() <= Quality::COST_MAX_US);
        assert!(!detector.is_up(), "up needs both ends to say that they hear");
    }
}
