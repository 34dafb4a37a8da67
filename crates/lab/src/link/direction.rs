//! One direction of a link, as a pure state machine: frames and time in, frames out when they are due.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use serde::Serialize;
use sidetrack_core::time::Instant;

use super::conditions::{Conditions, LossState};
use super::random::Random;

/// Frames of one super-frame stay together if their arrivals are less than this apart. So a super-frame is cut only
/// as finely as its timing requires.
const BUNCH: Duration = Duration::from_micros(100);
/// Maximum number of bytes on their way: 2.5 Gbit/s times 400 ms. It protects our memory; it is not a property of the
/// link.
pub const LINE_BYTES: usize = 128 << 20;

/// The unit that travels: one frame of a wire, or a super-frame that stands for several.
pub trait Frame: Sized {
    /// Returns the number of wire frames it stands for, at least 1.
    fn wire_frames(&self) -> usize;
    /// Returns the length of one of them with its Ethernet header, in bytes.
    fn wire_bytes(&self, index: usize) -> usize;
    /// Returns only these of them; `None` if they cannot be cut out.
    fn cut(&self, range: Range<usize>) -> Option<Self>;
    /// Returns the memory it uses, in bytes.
    fn memory_bytes(&self) -> usize;
}

/// An event.
#[derive(Debug)]
pub enum Input<F> {
    /// A frame enters the link.
    Frame(F),
    /// Sets the conditions of the link; frames on their way are not affected.
    Conditions(Conditions),
}

/// Counts of wire frames by their fate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Frames that entered.
    pub offered: u64,
    /// Frames that left, duplicates included.
    pub delivered: u64,
    /// Frames dropped by the loss model.
    pub lost: u64,
    /// Frames dropped because the queue of the rate was full.
    pub queue_full: u64,
    /// Frames dropped while the link was down.
    pub down: u64,
    /// Frames dropped because of [`LINE_BYTES`], or because they could not be cut. A run with such a count is
    /// invalid.
    pub overrun: u64,
    /// Frames sent twice.
    pub duplicated: u64,
    /// Frames that overtook others.
    pub reordered: u64,
}

/// The fate of one frame of a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Dropped,
    Arrives { at: Instant, twice: bool, overtakes: bool },
}

/// One direction of a link, as a state machine.
#[derive(Debug)]
pub struct Direction<F> {
    conditions: Conditions,
    random: Random,
    loss: LossState,
    /// When the last byte accepted so far has left the queue.
    busy_until: Instant,
    /// When the last frame that keeps its order arrives.
    last_arrival: Instant,
    line: BTreeMap<(Instant, u64), F>,
    line_bytes: usize,
    sequence: u64,
    counts: Counts,
}

impl<F: Frame> Direction<F> {
    /// A direction without traffic.
    #[must_use]
    pub fn new(conditions: Conditions, seed: u64) -> Self {
        Self {
            conditions,
            random: Random::new(seed),
            loss: LossState::default(),
            busy_until: Instant::ZERO,
            last_arrival: Instant::ZERO,
            line: BTreeMap::new(),
            line_bytes: 0,
            sequence: 0,
            counts: Counts::default(),
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<F>) {
        match input {
            Input::Conditions(conditions) => self.conditions = conditions,
            Input::Frame(frame) => self.take(now, frame),
        }
    }

    /// Returns the next frame that is due at `now`; call it until it returns `None`.
    pub fn poll(&mut self, now: Instant) -> Option<F> {
        if self.deadline()? > now {
            return None;
        }
        let (_, frame) = self.line.pop_first()?;
        self.line_bytes = self.line_bytes.saturating_sub(frame.memory_bytes());
        self.counts.delivered += frame.wire_frames() as u64;
        Some(frame)
    }

    /// Returns the time when [`Self::poll`] has a frame; `None` if no frame is on its way.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.line.first_key_value().map(|((due, _), _)| *due)
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn take(&mut self, now: Instant, frame: F) {
        let frames = frame.wire_frames();
        self.counts.offered += frames as u64;
        if !self.conditions.is_up {
            self.counts.down += frames as u64;
            return;
        }
        if self.conditions.on_super_frames {
            let bytes = (0..frames).map(|index| frame.wire_bytes(index) as u64).sum();
            let fate = self.decide(now, bytes, frames as u64);
            return self.keep(frame, &Run { part: 0..frames, first: fate, last: fate });
        }
        let mut run = Run { part: 0..0, first: Fate::Dropped, last: Fate::Dropped };
        for index in 0..frames {
            let fate = self.decide(now, frame.wire_bytes(index) as u64, 1);
            if index > 0 && stay_together(run.first, fate) {
                run = Run { part: run.part.start..index + 1, last: fate, ..run };
            } else {
                self.keep_part(&frame, &run);
                run = Run { part: index..index + 1, first: fate, last: fate };
            }
        }
        self.keep(frame, &run);
    }

    /// Draws the fate of `bytes` that stand for `frames` frames of a wire.
    fn decide(&mut self, now: Instant, bytes: u64, frames: u64) -> Fate {
        let conditions = self.conditions;
        if self.loss.takes_next(conditions.loss, &mut self.random) {
            self.counts.lost += frames;
            return Fate::Dropped;
        }
        let mut leaves = now;
        if let Some(rate) = conditions.rate {
            let begins = self.busy_until.max(now);
            // An idle link sends any frame, however small the queue is.
            if begins > now && begins.since(now) + rate.time_of(bytes) > rate.time_of(rate.queue_bytes) {
                self.counts.queue_full += frames;
                return Fate::Dropped;
            }
            leaves = begins + rate.time_of(bytes);
            self.busy_until = leaves;
        }
        let twice = self.random.happens(conditions.duplicate);
        let overtakes = self.random.happens(conditions.reorder);
        self.counts.duplicated += if twice { frames } else { 0 };
        self.counts.reordered += if overtakes { frames } else { 0 };
        let at = if overtakes { leaves } else { self.in_order(leaves) };
        Fate::Arrives { at, twice, overtakes }
    }

    /// Returns the arrival time of a frame that leaves the queue at `leaves` and overtakes no other.
    fn in_order(&mut self, leaves: Instant) -> Instant {
        let Conditions { delay, jitter, .. } = self.conditions;
        let spread = if jitter.is_zero() { Duration::ZERO } else { (2 * jitter).mul_f64(self.random.unit()) };
        let arrival = leaves + (delay + spread).saturating_sub(jitter);
        self.last_arrival = self.last_arrival.max(arrival);
        self.last_arrival
    }

    /// Puts a part of `frame` on the line.
    fn keep_part(&mut self, frame: &F, run: &Run) {
        if run.part.is_empty() || run.last == Fate::Dropped {
            return;
        }
        match frame.cut(run.part.clone()) {
            Some(cut) => self.put(cut, run.last),
            None => self.counts.overrun += run.part.len() as u64,
        }
    }

    /// Puts the last part of `frame` on the line; it may be the whole frame.
    fn keep(&mut self, frame: F, run: &Run) {
        if run.part.len() < frame.wire_frames() {
            self.keep_part(&frame, run);
        } else {
            self.put(frame, run.last);
        }
    }

    fn put(&mut self, frame: F, fate: Fate) {
        let Fate::Arrives { at, twice, .. } = fate else { return };
        if twice && let Some(copy) = frame.cut(0..frame.wire_frames()) {
            self.line_up(copy, at);
        }
        self.line_up(frame, at);
    }

    fn line_up(&mut self, frame: F, at: Instant) {
        if self.line_bytes + frame.memory_bytes() > LINE_BYTES {
            self.counts.overrun += frame.wire_frames() as u64;
            return;
        }
        self.line_bytes += frame.memory_bytes();
        self.line.insert((at, self.sequence), frame);
        self.sequence += 1;
    }
}

/// Neighbouring frames with the same fate stay one frame, which leaves when the last of them is due.
struct Run {
    part: Range<usize>,
    first: Fate,
    last: Fate,
}

/// Returns true if a frame may join the run that began with `first`.
fn stay_together(first: Fate, next: Fate) -> bool {
    match (first, next) {
        (Fate::Dropped, Fate::Dropped) => true,
        (
            Fate::Arrives { at: first, twice: false, overtakes: false },
            Fate::Arrives { at: next, twice: false, overtakes: false },
        ) => next.since(first) <= BUNCH,
        _ => false,
    }
}

#[cfg(test)]
#[path = "direction_tests.rs"]
mod tests;
