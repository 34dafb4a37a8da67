//! The thread that drives our own links: TAP interfaces, a [`Direction`] for each way, one timer for all.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use sidetrack_core::time::Instant;
use sidetrack_sys::tap::{LONGEST_FRAME_BYTES, Tap};

use super::conditions::Conditions;
use super::direction::{Counts, Direction, Input};
use super::frame::TapFrame;
use crate::load::Histogram;

/// A timer wakes a thread some 40 us late. So the thread sleeps for that much less and polls for the rest.
const EARLY: Duration = Duration::from_micros(60);
/// After a long sleep the wake-up is even later (the CPU is idle, and its host may have given it away). So the thread
/// wakes up early once and then sleeps a second, short time.
const LONG_SLEEP: Duration = Duration::from_micros(500);
const EARLY_AFTER_LONG_SLEEP: Duration = Duration::from_micros(300);
/// Number and distance of the trials that measure a wake-up.
const WAKE_SAMPLES: usize = 15;
const WAKE_SAMPLE_GAP: Duration = Duration::from_millis(6);
/// Trials that took longer were delayed by other work, and do not count.
const LONGEST_WAKE: Duration = Duration::from_micros(80);
/// Maximum number of frames taken from one interface per turn.
const BATCH: usize = 64;
/// Frames up to this size in bytes are copied out of the large buffer into which they were read.
const SMALL_BYTES: usize = 4096;
/// Number of large buffers kept for later super-frames.
const POOL_BUFFERS: usize = 256;
/// Above ordinary threads, below the kernel's own real-time threads.
const PRIORITY: u8 = 10;

/// A direction over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the first node to the second.
    Forth,
    /// From the second node to the first.
    Back,
}

impl Way {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Forth, Self::Back];

    /// Returns its index in a pair: 0 or 1.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Forth => 0,
            Self::Back => 1,
        }
    }
}

/// How punctual the emulator was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Lateness {
    /// Half of the frames left at most this late, in nanoseconds.
    pub median_ns: u64,
    /// 99 of 100 frames left at most this late, in nanoseconds.
    pub p99_ns: u64,
    /// Duration of a wake-up in nanoseconds; it is subtracted from the delay of a frame that woke the thread.
    pub wake_up_ns: u64,
    /// Frames that the receiving interface refused.
    pub refused: u64,
}

impl std::fmt::Display for Lateness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [median, p99] = [self.median_ns, self.p99_ns].map(|ns| ns as f64 / 1e6);
        write!(f, "Frames left {median:.3} ms late in the median, {p99:.3} ms at most for 99 of 100.")
    }
}

/// A command to the thread.
enum Command {
    Add {
        taps: [Tap; 2],
        conditions: [Conditions; 2],
        seed: u64,
        number: Sender<usize>,
    },
    Set {
        link: usize,
        way: Way,
        conditions: Conditions,
    },
    Counts {
        link: usize,
        reply: Sender<[Counts; 2]>,
    },
    Lateness {
        reply: Sender<Lateness>,
    },
    /// Sent at that moment, only to measure a wake-up.
    Wake(std::time::Instant),
    Stop,
}

/// A running emulator; it and its interfaces end when it is dropped.
#[derive(Debug)]
pub struct Emulator {
    commands: Sender<Command>,
    wake: OwnedFd,
    thread: Option<std::thread::JoinHandle<Result<()>>>,
}

impl Emulator {
    /// Starts the thread, with a priority above all ordinary threads if the kernel allows it.
    ///
    /// # Errors
    /// The thread or its wake-up descriptor cannot be made.
    pub fn start() -> Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let theirs = wake.try_clone()?;
        let (commands, receiver) = channel();
        let thread = std::thread::Builder::new().name("links".into()).spawn(move || {
            // Without that right the links are less exact under load, which [`Lateness`] shows.
            let _ = sidetrack_sys::scheduling::become_real_time(PRIORITY);
            Engine::new(receiver, theirs).run()
        });
        let thread = Some(thread.context("cannot start the links' thread")?);
        let emulator = Self { commands, wake, thread };
        for _ in 0..WAKE_SAMPLES {
            std::thread::sleep(WAKE_SAMPLE_GAP);
            emulator.ask(Command::Wake(std::time::Instant::now()))?;
        }
        Ok(emulator)
    }

    /// Joins two interfaces; `conditions` and the result's index are for [`Way::Forth`] and [`Way::Back`].
    ///
    /// # Errors
    /// The thread has ended.
    pub fn add(&self, taps: [Tap; 2], conditions: [Conditions; 2], seed: u64) -> Result<usize> {
        let (number, answer) = channel();
        self.ask(Command::Add { taps, conditions, seed, number })?;
        answer.recv().context("the links' thread has ended")
    }

    /// Changes one direction of a link; frames on their way are not affected.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn set(&self, link: usize, way: Way, conditions: Conditions) -> Result<()> {
        self.ask(Command::Set { link, way, conditions })
    }

    /// Returns the counts of frames of a link, forth and back.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn counts(&self, link: usize) -> Result<[Counts; 2]> {
        let (reply, answer) = channel();
        self.ask(Command::Counts { link, reply })?;
        answer.recv().context("the links' thread has ended")
    }

    /// Returns how punctual it was so far, for all links together.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn lateness(&self) -> Result<Lateness> {
        let (reply, answer) = channel();
        self.ask(Command::Lateness { reply })?;
        answer.recv().context("the links' thread has ended")
    }

    fn ask(&self, command: Command) -> Result<()> {
        self.commands.send(command).map_err(|_| anyhow!("the links' thread has ended"))?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).context("cannot wake the links' thread")?;
        Ok(())
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.ask(Command::Stop);
        if let Some(thread) = self.thread.take()
            && let Ok(Err(error)) = thread.join()
        {
            eprintln!("sidetrack-lab: the links ended early: {error:#}");
        }
    }
}

/// One end of a link and the direction that begins there.
struct Lane {
    from: Tap,
    to: usize,
    direction: Direction<TapFrame>,
}

/// The state of the thread. The lanes of link n are 2n and 2n + 1.
struct Engine {
    commands: Receiver<Command>,
    wake: OwnedFd,
    epoch: std::time::Instant,
    lanes: Vec<Lane>,
    pool: Vec<Vec<u8>>,
    late: Histogram,
    refused: u64,
    /// The measured durations of a wake-up, sorted.
    wake_samples: Vec<Duration>,
    /// Subtracted for the first frame after a sleep: it waited this long during the wake-up. A TAP has no time
    /// stamps.
    waited: Duration,
}

impl Engine {
    fn new(commands: Receiver<Command>, wake: OwnedFd) -> Self {
        let epoch = std::time::Instant::now();
        Self {
            commands,
            wake,
            epoch,
            lanes: Vec::new(),
            pool: Vec::new(),
            late: Histogram::new(),
            refused: 0,
            wake_samples: Vec::new(),
            waited: Duration::ZERO,
        }
    }

    fn now(&self) -> Instant {
        Instant::ZERO + self.epoch.elapsed()
    }

    fn run(mut self) -> Result<()> {
        loop {
            self.wait()?;
            while let Ok(command) = self.commands.try_recv() {
                if !self.obey(command) {
                    return Ok(());
                }
            }
            for lane in 0..self.lanes.len() {
                self.receive(lane)?;
                self.deliver();
            }
        }
    }

    /// Sleeps until a frame or a command arrives or the next frame is nearly due.
    fn wait(&mut self) -> Result<()> {
        let due = self.lanes.iter().filter_map(|lane| lane.direction.deadline()).min();
        let left = due
            .map(|due| due.since(self.now()))
            .map(|left| left.saturating_sub(if left > LONG_SLEEP { EARLY_AFTER_LONG_SLEEP } else { EARLY }));
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let mut waiting: Vec<_> =
            self.lanes.iter().map(|lane| PollFd::new(&lane.from, PollFlags::IN)).collect();
        waiting.push(PollFd::new(&self.wake, PollFlags::IN));
        let begun = std::time::Instant::now();
        let ready = match rustix::event::poll(&mut waiting, timeout.as_ref()) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error).context("poll"),
        };
        let slept = begun.elapsed();
        let typical = self.typical_wake_up();
        // After a short sleep the caches are still warm: half of that time.
        self.waited = match slept {
            _ if ready == 0 || slept < typical => Duration::ZERO,
            short if short < LONG_SLEEP => typical / 2,
            _ => typical,
        };
        let _ = rustix::io::read(self.wake.as_fd(), &mut [0; 8]);
        Ok(())
    }

    /// The median of the trials. A longer wake-up in a single case is hidden by the receiver's own wake-up.
    fn typical_wake_up(&self) -> Duration {
        let median = self.wake_samples.get(self.wake_samples.len() / 2).copied().unwrap_or_default();
        median.min(LONGEST_WAKE)
    }

    /// Returns false when the thread has to end.
    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Add { taps: [a, b], conditions: [forth, back], seed, number } => {
                let first = self.lanes.len();
                self.lanes.push(Lane { from: a, to: first + 1, direction: Direction::new(forth, seed) });
                self.lanes.push(Lane { from: b, to: first, direction: Direction::new(back, !seed) });
                let _ = number.send(first / 2);
            }
            Command::Set { link, way, conditions } => {
                let now = self.now();
                if let Some(lane) = self.lanes.get_mut(2 * link + way.index()) {
                    lane.direction.handle(now, Input::Conditions(conditions));
                }
            }
            Command::Counts { link, reply } => {
                let counts = |lane: usize| {
                    self.lanes.get(lane).map_or_else(Counts::default, |lane| lane.direction.counts())
                };
                let _ = reply.send([counts(2 * link), counts(2 * link + 1)]);
            }
            Command::Lateness { reply } => {
                let (median_ns, p99_ns) = (self.late.quantile(0.5), self.late.quantile(0.99));
                let wake_up_ns = u64::try_from(self.typical_wake_up().as_nanos()).unwrap_or(u64::MAX);
                let _ = reply.send(Lateness { median_ns, p99_ns, wake_up_ns, refused: self.refused });
            }
            Command::Wake(sent) => {
                let took = sent.elapsed();
                let at = self.wake_samples.partition_point(|sample| *sample < took);
                self.wake_samples.insert(at, took);
            }
            Command::Stop => return false,
        }
        true
    }

    fn receive(&mut self, lane: usize) -> Result<()> {
        for _ in 0..BATCH {
            let mut buffer = self.pool.pop().unwrap_or_else(|| vec![0; LONGEST_FRAME_BYTES]);
            let Some(Lane { from, direction, .. }) = self.lanes.get_mut(lane) else { return Ok(()) };
            let Some(length) = from.receive(&mut buffer).context("an interface of a link is gone")? else {
                self.pool.push(buffer);
                return Ok(());
            };
            let now = Instant::ZERO + self.epoch.elapsed().saturating_sub(std::mem::take(&mut self.waited));
            if length <= SMALL_BYTES {
                let small = buffer.get(..length).unwrap_or_default().to_vec();
                direction.handle(now, Input::Frame(TapFrame::new(small, length)));
                self.pool.push(buffer);
            } else {
                direction.handle(now, Input::Frame(TapFrame::new(buffer, length)));
            }
        }
        Ok(())
    }

    /// Delivers all frames that are due.
    fn deliver(&mut self) {
        for lane in 0..self.lanes.len() {
            loop {
                let now = self.now();
                let Some(lane) = self.lanes.get_mut(lane) else { return };
                let Some(due) = lane.direction.deadline() else { break };
                let Some(frame) = lane.direction.poll(now) else { break };
                let to = lane.to;
                self.late.record(u64::try_from(now.since(due).as_nanos()).unwrap_or(u64::MAX));
                let sent = self.lanes.get(to).is_some_and(|lane| lane.from.send(frame.as_bytes()).is_ok());
                self.refused += u64::from(!sent);
                self.reuse(frame.into_buffer());
            }
        }
    }

    fn reuse(&mut self, buffer: Vec<u8>) {
        if buffer.len() == LONGEST_FRAME_BYTES && self.pool.len() < POOL_BUFFERS {
            self.pool.push(buffer);
        }
    }
}
