//! Measures how long the threads of the data path work at each stage. Off, it costs one relaxed load for each span.
//!
//! ```text
//!          start (at most 10 minutes)
//!   OFF ─────────────────────────────▶ ON
//!    ▲                                  │
//!    └───── its time is over, stop ─────┘
//! ```
//! A span is the time between entering a stage and leaving it. A span inside another one stops the outer one's clock,
//! so the times of all stages add up to the busy time of the threads. Time in which a thread waits is never inside a
//! span. The counts go on over several measurements, as counters do; a measurement is the difference of two readings.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use sidetrack_sys::sync::lock;

/// A stage of the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A worker's loop, apart from the stages below: system calls for events, wake-ups, and what has no stage.
    Loop,
    /// Admits clients and enters their flows.
    Admit,
    /// Reads destinations: handshakes of SOCKS and HTTP, first bytes.
    Intercept,
    /// Asks the rules.
    Policy,
    /// Makes paths: resolves, dials, speaks with hops.
    Dial,
    /// Runs functions on payload.
    Functions,
    /// Moves bytes between client and server.
    Move,
    /// Serves requests of HTTP.
    Http,
    /// A turn of the engine, apart from the stages below.
    EngineLoop,
    /// Takes frames from the interfaces.
    EngineReceive,
    /// Handles packets: connections, checksums, retransmissions.
    EnginePackets,
    /// Asks the rules for a server.
    EnginePolicy,
    /// Hands connections to the kernel, and reads their counts back.
    EngineOffload,
    /// Hands frames to the interfaces.
    EngineSend,
    /// Notes the flows that have ended.
    EngineRecords,
}

impl Stage {
    /// All stages, in the order of the table.
    pub const ALL: [Self; 15] = [
        Self::Loop,
        Self::Admit,
        Self::Intercept,
        Self::Policy,
        Self::Dial,
        Self::Functions,
        Self::Move,
        Self::Http,
        Self::EngineLoop,
        Self::EngineReceive,
        Self::EnginePackets,
        Self::EnginePolicy,
        Self::EngineOffload,
        Self::EngineSend,
        Self::EngineRecords,
    ];

    /// Returns its name: the part of the program and the stage.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Loop => "session loop",
            Self::Admit => "session admit",
            Self::Intercept => "session intercept",
            Self::Policy => "session policy",
            Self::Dial => "session dial",
            Self::Functions => "session functions",
            Self::Move => "session move",
            Self::Http => "session http",
            Self::EngineLoop => "engine loop",
            Self::EngineReceive => "engine receive",
            Self::EnginePackets => "engine packets",
            Self::EnginePolicy => "engine policy",
            Self::EngineOffload => "engine offload",
            Self::EngineSend => "engine send",
            Self::EngineRecords => "engine records",
        }
    }

    /// Enters this stage until the span is dropped.
    #[inline]
    pub fn enter(self) -> Span {
        self.enter_with(1)
    }

    /// As [`Self::enter`], for a batch of this number of events.
    #[inline]
    pub fn enter_with(self, events: u64) -> Span {
        if IS_ON.load(Relaxed) { Span(Some(begin(self, events))) } else { Span(None) }
    }

    /// Does `work` at this stage.
    #[inline]
    pub fn time<T>(self, work: impl FnOnce() -> T) -> T {
        let _span = self.enter();
        work()
    }
}

/// Time at a stage, from [`Stage::enter`] until it is dropped. Spans of a thread end in the reverse order.
#[derive(Debug)]
#[must_use = "a span ends when it is dropped"]
pub struct Span(Option<Outer>);

/// What the thread did before: `None` if it was in no span.
type Outer = Option<Stage>;

/// The events of a stage and the time at it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// How often the stage was entered; for packets, how many there were.
    pub events: u64,
    /// Time at it, nanoseconds.
    pub ns: u64,
}

/// The counts of all stages in the order of [`Stage::ALL`].
pub type Counts = [Busy; Stage::ALL.len()];

/// A measurement.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    /// Whether it goes on.
    pub is_running: bool,
    /// How long it has lasted.
    pub lasted: Duration,
    /// What each stage did meanwhile.
    pub counts: Counts,
}

#[derive(Debug)]
struct Counter {
    events: AtomicU64,
    ns: AtomicU64,
}

struct Latest {
    /// Tells measurements apart: the end of one must not end the next.
    number: u64,
    began: Instant,
    before: Counts,
    ended: Option<(Duration, Counts)>,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static COUNTERS: [Counter; Stage::ALL.len()] =
    [const { Counter { events: AtomicU64::new(0), ns: AtomicU64::new(0) } }; Stage::ALL.len()];
static LATEST: Mutex<Option<Latest>> = Mutex::new(None);

thread_local! {
    /// The stage of this thread, and since when its clock runs.
    static CURRENT: Cell<Option<(Stage, Instant)>> = const { Cell::new(None) };
}

#[cold]
fn begin(stage: Stage, events: u64) -> Outer {
    let now = Instant::now();
    let outer = CURRENT.replace(Some((stage, now)));
    if let Some((outer, since)) = outer {
        add(outer, now - since);
    }
    if let Some(counter) = COUNTERS.get(stage as usize) {
        counter.events.fetch_add(events, Relaxed);
    }
    outer.map(|(stage, _)| stage)
}

fn add(stage: Stage, time: Duration) {
    if let Some(counter) = COUNTERS.get(stage as usize) {
        counter.ns.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if let Some(outer) = self.0 {
            end(outer);
        }
    }
}

#[cold]
fn end(outer: Outer) {
    let now = Instant::now();
    if let Some((stage, since)) = CURRENT.replace(outer.map(|stage| (stage, now))) {
        add(stage, now - since);
    }
}

/// Returns what all stages have done while measurements ran, since the program began.
pub fn counts() -> Counts {
    let mut counts = Counts::default();
    for (busy, counter) in counts.iter_mut().zip(&COUNTERS) {
        *busy = Busy { events: counter.events.load(Relaxed), ns: counter.ns.load(Relaxed) };
    }
    counts
}

/// Begins a measurement and returns its number; `None` if one runs.
pub fn start() -> Option<u64> {
    let mut latest = lock(&LATEST);
    if latest.as_ref().is_some_and(|latest| latest.ended.is_none()) {
        return None;
    }
    let number = latest.as_ref().map_or(1, |latest| latest.number + 1);
    *latest = Some(Latest { number, began: Instant::now(), before: counts(), ended: None });
    IS_ON.store(true, Relaxed);
    Some(number)
}

/// Ends the measurement with this number, or any (`None`). It is kept until the next one begins.
pub fn stop(number: Option<u64>) {
    let mut latest = lock(&LATEST);
    let Some(latest) = latest.as_mut() else { return };
    if number.is_none_or(|number| number == latest.number) && latest.ended.is_none() {
        IS_ON.store(false, Relaxed);
        latest.ended = Some((latest.began.elapsed(), counts()));
    }
}

/// Returns the latest measurement.
pub fn latest() -> Option<Measurement> {
    let latest = lock(&LATEST);
    let latest = latest.as_ref()?;
    let (lasted, mut now) = latest.ended.unwrap_or_else(|| (latest.began.elapsed(), counts()));
    for (now, before) in now.iter_mut().zip(&latest.before) {
        now.events -= before.events;
        now.ns -= before.ns;
    }
    Some(Measurement { is_running: latest.ended.is_none(), lasted, counts: now })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(ns: u64) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_nanos(ns) {}
    }

    // One test, because a measurement is one for the whole process. Other tests of this program run beside it: none of them
    // dials or serves a request.
    #[test]
    fn times_exclude_inner_spans_and_nothing_is_counted_while_it_is_off() {
        let of = |stage: Stage| latest().unwrap().counts[stage as usize];
        drop(Stage::Dial.enter());
        assert_eq!(counts()[Stage::Dial as usize], Busy::default());
        assert!(latest().is_none());
        let before = Stage::Dial.enter();
        let number = start().unwrap();
        assert!(start().is_none(), "one at a time");
        drop(before);
        assert_eq!(of(Stage::Dial), Busy::default(), "it began while nothing was measured");
        let outer = Stage::Http.enter();
        busy(2_000_000);
        {
            let _inner = Stage::Dial.enter_with(7);
            busy(3_000_000);
        }
        stop(Some(number + 1));
        assert!(latest().unwrap().is_running, "that is the number of another");
        // It ends inside a span: the span is still counted when it ends, but not in this measurement.
        stop(Some(number));
        drop(outer);
        let (outer, inner) = (of(Stage::Http), of(Stage::Dial));
        assert_eq!((outer.events, inner.events), (1, 7));
        assert!(outer.ns >= 2_000_000 && inner.ns >= 3_000_000, "{outer:?} {inner:?}");
        let all = latest().unwrap();
        assert!(!all.is_running && u128::from(outer.ns + inner.ns) <= all.lasted.as_nanos(), "{all:?}");
        let next = start().unwrap();
        assert_eq!((next, of(Stage::Dial)), (number + 1, Busy::default()));
        stop(None);
        for (at, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, at);
        }
    }
}
