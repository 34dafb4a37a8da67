//! The event loop of the generator.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::connection::{Connection, Failure, Outcome, Tally};
use super::script::Script;
use super::{Report, Spec, Work};

/// A connection without progress for this time has failed.
const STUCK_AFTER: Duration = Duration::from_secs(5);
/// Interval between searches for stuck connections.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// After this number of failures the job ends, because the peer does not work.
const FAILURE_LIMIT: u64 = 20_000;
/// Maximum number of idle connections opened at a time, so that no backlog overflows.
const IDLE_OPENING: usize = 64;
/// Read buffer, in bytes.
const SCRATCH_BYTES: usize = 1 << 20;

/// Runs a job on the calling thread; `on_window` is called when the warm-up is over.
///
/// # Errors Epoll cannot be used. Failures of connections are in the report.
pub fn run(spec: &Spec, on_window: impl FnOnce()) -> Result<Report> {
    crate::launch::raise_file_limit();
    let mut engine = Engine::new(spec)?;
    let start = Instant::now();
    let warmup_end = start + Duration::from_millis(spec.warmup_ms);
    engine.run_until(warmup_end, |engine| spec.work == Work::Idle && engine.all_idle())?;
    on_window();
    // Idle connections have only one answer each, so the answers of the warm-up count. All other counts start at
    // zero.
    if spec.work != Work::Idle {
        engine.forget();
    }
    let window = Instant::now();
    engine.run_until(window + Duration::from_millis(spec.window_ms), Engine::is_exhausted)?;
    Ok(engine.report(window.elapsed()))
}

/// A slot for a connection; the generation distinguishes events of its current socket from those of an earlier one.
#[derive(Default)]
struct Slot {
    connection: Option<Connection>,
    generation: u32,
}

/// Returns the number of connections that a rate has opened after this time.
fn due(per_second: u32, after: Duration) -> u64 {
    (f64::from(per_second) * after.as_secs_f64()) as u64 + 1
}

struct Engine<'a> {
    spec: &'a Spec,
    script: Script,
    epoll: OwnedFd,
    slots: Vec<Slot>,
    /// Slots that need a connection.
    vacant: Vec<usize>,
    tally: Tally,
    errors: BTreeMap<String, u64>,
    /// Answers and failures since the start, warm-up included.
    ended: u64,
    failures: u64,
    /// Connections opened, and the time of the first: the basis of the rate.
    opened: u64,
    began: Instant,
    scratch: Vec<u8>,
    next_sweep: Instant,
}

impl<'a> Engine<'a> {
    fn new(spec: &'a Spec) -> Result<Self> {
        let count = spec.connections as usize;
        Ok(Self {
            spec,
            script: Script::new(spec),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot use epoll")?,
            slots: (0..count).map(|_| Slot::default()).collect(),
            vacant: (0..count).rev().collect(),
            tally: Tally::new(),
            errors: BTreeMap::new(),
            ended: 0,
            failures: 0,
            opened: 0,
            began: Instant::now(),
            scratch: vec![0; SCRATCH_BYTES],
            next_sweep: Instant::now() + SWEEP_EVERY,
        })
    }

    fn run_until(&mut self, end: Instant, stop: impl Fn(&Self) -> bool) -> Result<()> {
        let mut events = Vec::with_capacity(256);
        loop {
            self.fill();
            let now = Instant::now();
            if now >= end || stop(self) || self.failures >= FAILURE_LIMIT {
                return Ok(());
            }
            self.sweep(now);
            let timeout = Timespec::try_from(self.patience(now, end)).context("a time-out out of range")?;
            match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("epoll_wait failed"),
            }
            for event in events.drain(..) {
                self.dispatch(event.data.u64(), event.flags);
            }
        }
    }

    /// Opens connections in vacant slots.
    fn fill(&mut self) {
        while !self.vacant.is_empty() && self.may_open() {
            let Some(at) = self.vacant.pop() else { return };
            self.opened += 1;
            match Connection::open(self.spec, &self.script)
                .and_then(|connection| self.register(at, connection))
            {
                Ok(()) => {}
                Err(failure) => {
                    self.fail(at, &failure);
                    return; // the next round tries again, so that this is not a tight loop
                }
            }
        }
    }

    fn may_open(&self) -> bool {
        if self.started() >= self.spec.max_requests {
            return false;
        }
        if self.spec.per_second.is_some_and(|rate| self.opened >= due(rate, self.began.elapsed())) {
            return false;
        }
        self.spec.work != Work::Idle || self.opening() < IDLE_OPENING
    }

    /// Returns the time to wait for events; with a rate, the next connection may be due earlier.
    fn patience(&self, now: Instant, end: Instant) -> Duration {
        const TICK: Duration = Duration::from_millis(1);
        if self.spec.per_second.is_some() && !self.vacant.is_empty() {
            return TICK;
        }
        end.min(self.next_sweep).saturating_duration_since(now).max(TICK)
    }

    fn opening(&self) -> usize {
        let open = self.slots.len() - self.vacant.len();
        open.saturating_sub(usize::try_from(self.ended).unwrap_or(usize::MAX))
    }

    fn started(&self) -> u64 {
        self.ended + (self.slots.len() - self.vacant.len()) as u64
    }

    fn register(&mut self, at: usize, connection: Connection) -> Result<(), Failure> {
        let Some(slot) = self.slots.get_mut(at) else { return Ok(()) };
        slot.generation = slot.generation.wrapping_add(1);
        let data = epoll::EventData::new_u64((u64::from(slot.generation) << 32) | at as u64);
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &connection, data, flags).map_err(|error| format!("epoll: {error}"))?;
        slot.connection = Some(connection);
        Ok(())
    }

    fn dispatch(&mut self, data: u64, flags: epoll::EventFlags) {
        let at = (data & u64::from(u32::MAX)) as usize;
        let Some(slot) = self.slots.get_mut(at) else { return };
        if u64::from(slot.generation) != data >> 32 {
            return;
        }
        let Some(connection) = slot.connection.as_mut() else { return };
        let ended =
            flags.intersects(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR);
        let (before, work) = (self.tally.requests, self.spec.work);
        let outcome = connection.advance(&self.script, work, ended, &mut self.scratch, &mut self.tally);
        self.ended += self.tally.requests - before;
        match outcome {
            Ok(Outcome::Open) => {}
            Ok(Outcome::More) => self.rearm(at, data),
            Ok(Outcome::Done) => self.vacate(at),
            Err(failure) => self.fail(at, &failure),
        }
    }

    /// A connection that stops reading before its socket is empty requests the event again (edge-triggered).
    fn rearm(&mut self, at: usize, data: u64) {
        let Some(connection) = self.slots.get(at).and_then(|slot| slot.connection.as_ref()) else { return };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let _ = epoll::modify(&self.epoll, connection, epoll::EventData::new_u64(data), flags);
    }

    fn vacate(&mut self, at: usize) {
        if let Some(slot) = self.slots.get_mut(at) {
            slot.connection = None;
        }
        self.vacant.push(at);
    }

    fn fail(&mut self, at: usize, failure: &Failure) {
        *self.errors.entry(failure.to_string()).or_default() += 1;
        self.failures += 1;
        self.ended += 1;
        if self.spec.work == Work::Idle {
            // It is not opened again: the report says how many connections were open.
            if let Some(slot) = self.slots.get_mut(at) {
                slot.connection = None;
            }
        } else {
            self.vacate(at);
        }
    }

    fn sweep(&mut self, now: Instant) {
        if now < self.next_sweep {
            return;
        }
        self.next_sweep = now + SWEEP_EVERY;
        let stuck = |slot: &Slot| {
            slot.connection
                .as_ref()
                .is_some_and(|connection| connection.is_stuck(now, STUCK_AFTER, self.spec.work))
        };
        let stuck: Vec<usize> =
            (0..self.slots.len()).filter(|at| self.slots.get(*at).is_some_and(stuck)).collect();
        for at in stuck {
            self.fail(at, &Failure::Borrowed("nothing moved for 5 s"));
        }
    }

    fn all_idle(&self) -> bool {
        let done = |slot: &Slot| slot.connection.as_ref().is_none_or(Connection::is_answered);
        self.vacant.is_empty() && self.slots.iter().all(done)
    }

    fn is_exhausted(&self) -> bool {
        self.ended >= self.spec.max_requests
    }

    fn forget(&mut self) {
        self.tally.requests = 0;
        self.tally.bytes = 0;
        self.tally.latencies.clear();
        self.errors.clear();
    }

    fn report(self, window: Duration) -> Report {
        let open = self.slots.iter().filter(|slot| slot.connection.is_some()).count();
        Report {
            requests: self.tally.requests,
            errors: self.errors,
            bytes: self.tally.bytes,
            window_ns: u64::try_from(window.as_nanos()).unwrap_or(u64::MAX),
            p50_ns: self.tally.latencies.quantile(0.5),
            p99_ns: self.tally.latencies.quantile(0.99),
            open: u32::try_from(open).unwrap_or(u32::MAX),
        }
    }
}

#[cfg(test)]
mod tests;
