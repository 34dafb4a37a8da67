//! The paths of a session, at one end: what is in flight on each, and what each still has to say.
//!
//! ```text
//!            PathUp (counts begin at 0)
//!    Down ------------------------------> Up ---+ data, acknowledgements, FIN, Done
//!     ^                                   |     |
//!     |   PathDown: what was in flight    |<----+
//!     +--- and not told as arrived is ----+
//!          given to the other paths
//! ```
//!
//! A path keeps the order and loses nothing while it exists. So the number of data bytes that came on it says exactly which
//! data arrived, and an end tells the other one this number ([`SessionFrame::Arrived`](super::SessionFrame::Arrived)).

use super::pace::Pace;
use crate::overlay::frame::{Ack, DATA_MAX};
use crate::overlay::service::PATHS;
use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Most paths of a session.
pub const PATHS_MAX: u8 = *PATHS.end();

/// The other end is told what came on a path after this number of bytes, or after this time.
const TELL_EVERY: u64 = 32 * 1024;
const TELL_WITHIN: Duration = Duration::from_millis(5);

/// A path gets new data only if it arrives there after at most this many times the delay of the fastest path, and some time.
const SLOWER_MAX: u32 = 2;
const SLOWER_EXTRA: Duration = Duration::from_millis(50);

/// How the bytes of a session use its paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// One path.
    #[default]
    Shortest,
    /// Each byte on one of several paths, whichever is free. The far end puts them in order.
    Stripe,
    /// Each byte on all of several paths; the first copy counts.
    Duplicate,
}

impl Mode {
    /// Returns the word of the configuration for this mode.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shortest => "shortest",
            Self::Stripe => "stripe",
            Self::Duplicate => "duplicate",
        }
    }
}

/// A set of paths of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSet(u8);

impl PathSet {
    /// All paths.
    pub const ALL: Self = Self(u8::MAX);

    /// Returns the set of this path only.
    pub const fn of(path: u8) -> Self {
        Self(if path < PATHS_MAX { 1 << path } else { 0 })
    }

    /// Returns the set with this path, too.
    #[must_use]
    pub const fn with(self, path: u8) -> Self {
        Self(self.0 | Self::of(path).0)
    }

    /// Whether the path is in the set.
    pub const fn has(self, path: u8) -> bool {
        self.0 & Self::of(path).0 != 0
    }
}

/// Data on its way on one path.
#[derive(Clone, Copy, Debug)]
struct Flight {
    offset: u64,
    bytes: u64,
    /// Data bytes that were sent on this path, with this one.
    sent: u64,
    at: Instant,
    /// What had arrived when it was sent, and when that was told.
    arrived: u64,
    arrived_at: Instant,
    /// There was more to send than the path carries.
    is_full: bool,
}

/// One path of a session.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    is_up: bool,
    /// These are due or done on this path.
    must_ack: bool,
    fin_sent: bool,
    pub(super) reset_sent: bool,
    pub(super) done_sent: bool,
    /// The last acknowledgement on this path.
    told: Ack,
    flights: VecDeque<Flight>,
    /// The first ones of `flights` that were sent on another path, too.
    repeated: usize,
    /// Data bytes: sent, and told as arrived.
    sent: u64,
    arrived: u64,
    arrived_at: Instant,
    /// Data bytes that came, and what the other end was told.
    came: u64,
    came_told: u64,
    tell_at: Option<Instant>,
    /// The byte behind the last one that was sent on this path.
    pub(super) cursor: u64,
    pace: Pace,
}

impl Lane {
    fn new() -> Self {
        Self {
            is_up: false,
            must_ack: false,
            fin_sent: false,
            reset_sent: false,
            done_sent: false,
            told: Ack::default(),
            flights: VecDeque::new(),
            repeated: 0,
            sent: 0,
            arrived: 0,
            arrived_at: Instant::ZERO,
            came: 0,
            came_told: 0,
            tell_at: None,
            cursor: 0,
            pace: Pace::new(),
        }
    }

    fn in_flight(&self) -> u64 {
        self.sent - self.arrived
    }

    /// Returns the first data that is on its way for too long and was not sent on another path: offset, and since when it
    /// is too long.
    fn overdue(&self) -> Option<(u64, Instant)> {
        let flight = self.flights.get(self.repeated)?;
        Some((flight.offset, flight.at + self.pace.patience()))
    }

    /// Notes that the other end has acknowledged all bytes before this one.
    fn acked(&mut self, next: u64) {
        while self.flights.front().is_some_and(|flight| flight.offset + flight.bytes <= next) {
            self.flights.pop_front();
            self.repeated = self.repeated.saturating_sub(1);
        }
    }
}

/// The paths of a session.
#[derive(Clone, Debug)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
}

impl Lanes {
    pub(super) fn new() -> Self {
        Self { lanes: vec![Lane::new()] }
    }

    fn get(&self, path: u8) -> Option<&Lane> {
        self.lanes.get(usize::from(path)).filter(|lane| lane.is_up)
    }

    pub(super) fn get_mut(&mut self, path: u8) -> Option<&mut Lane> {
        self.lanes.get_mut(usize::from(path)).filter(|lane| lane.is_up)
    }

    /// Returns the paths that exist and are in `ready`.
    pub(super) fn up(&self, ready: PathSet) -> impl Iterator<Item = u8> {
        let lanes = (0_u8..).zip(&self.lanes);
        lanes.filter(move |(path, lane)| lane.is_up && ready.has(*path)).map(|(path, _)| path)
    }

    pub(super) fn has_any(&self) -> bool {
        self.lanes.iter().any(|lane| lane.is_up)
    }

    /// Whether this holds for all paths, and there is one.
    pub(super) fn all(&self, holds: impl Fn(&Lane) -> bool) -> bool {
        self.has_any() && self.lanes.iter().filter(|lane| lane.is_up).all(holds)
    }

    /// Begins a path, at the next byte that the other end expects. Counts of an earlier path with this number are forgotten.
    /// `tell`: the first thing to say on it is that nothing came yet.
    pub(super) fn raise(&mut self, path: u8, next: u64, tell: Option<Instant>) {
        let path = usize::from(path.min(PATHS_MAX - 1));
        while self.lanes.len() <= path {
            self.lanes.push(Lane::new());
        }
        self.lanes[path] = Lane { is_up: true, cursor: next, tell_at: tell, ..Lane::new() };
    }

    /// Ends a path. Returns what was in flight on it: offset and bytes.
    pub(super) fn lower(&mut self, path: u8) -> Vec<(u64, u64)> {
        let Some(lane) = self.get_mut(path) else { return Vec::new() };
        let lost = lane.flights.iter().map(|flight| (flight.offset, flight.bytes)).collect();
        *lane = Lane::new();
        lost
    }

    /// Ends all paths.
    pub(super) fn lower_all(&mut self) {
        self.lanes = vec![Lane::new()];
    }

    /// An acknowledgement is due on all paths.
    pub(super) fn must_ack(&mut self) {
        self.lanes.iter_mut().filter(|lane| lane.is_up).for_each(|lane| lane.must_ack = true);
    }

    /// FIN has to be sent again.
    pub(super) fn repeat_last(&mut self) {
        for lane in &mut self.lanes {
            (lane.fin_sent, lane.reset_sent, lane.done_sent) = (false, false, false);
        }
    }

    /// Returns a path on which this was not said yet, and notes that it is said.
    pub(super) fn take(&mut self, ready: PathSet, said: fn(&mut Lane) -> &mut bool) -> Option<u8> {
        let lanes = (0_u8..).zip(&mut self.lanes);
        for (path, lane) in lanes.filter(|(path, lane)| lane.is_up && ready.has(*path)) {
            if !std::mem::replace(said(lane), true) {
                return Some(path);
            }
        }
        None
    }

    /// Returns the path on which to acknowledge this now, if there is one. `ride`: news are told beside what came on the
    /// path, too.
    pub(super) fn take_ack(&mut self, ready: PathSet, ack: Ack, now: Instant, ride: bool) -> Option<u8> {
        for (path, lane) in (0_u8..).zip(&mut self.lanes) {
            if !lane.is_up || !ready.has(path) {
                continue;
            }
            let rides = ride && lane.must_tell(now) && lane.told != ack;
            if lane.must_ack || rides {
                (lane.must_ack, lane.told) = (false, ack);
                return Some(path);
            }
        }
        None
    }

    /// Returns the path on which to tell how many data bytes came on it, and the number.
    pub(super) fn take_arrived(&mut self, ready: PathSet, now: Instant) -> Option<(u8, u64)> {
        let lanes = (0_u8..).zip(&mut self.lanes);
        let mut due = lanes.filter(|(path, lane)| lane.is_up && ready.has(*path) && lane.must_tell(now));
        let (path, lane) = due.next()?;
        (lane.came_told, lane.tell_at) = (lane.came, None);
        Some((path, lane.came))
    }

    /// Notes that data came on a path.
    pub(super) fn came(&mut self, path: u8, bytes: usize, now: Instant) {
        if let Some(lane) = self.get_mut(path) {
            lane.came += bytes as u64;
            lane.tell_at.get_or_insert(now + TELL_WITHIN);
        }
    }

    /// Notes that data was sent on a path.
    pub(super) fn sent(&mut self, path: u8, offset: u64, bytes: usize, now: Instant) {
        let Some(lane) = self.get_mut(path) else { return };
        if lane.in_flight() == 0 {
            lane.arrived_at = now;
        }
        let bytes = bytes as u64;
        lane.sent += bytes;
        lane.cursor = offset + bytes;
        let (sent, arrived, arrived_at) = (lane.sent, lane.arrived, lane.arrived_at);
        let is_full = lane.pace.is_full(lane.in_flight());
        lane.flights.push_back(Flight { offset, bytes, sent, at: now, arrived, arrived_at, is_full });
    }

    /// Handles the number of data bytes that arrived on a path. Returns false if fewer were sent.
    pub(super) fn arrived(&mut self, path: u8, bytes: u64, now: Instant) -> bool {
        let Some(lane) = self.get_mut(path) else { return true };
        if bytes > lane.sent || bytes < lane.arrived {
            return false;
        }
        let mut last = None;
        while let Some(flight) = lane.flights.front().filter(|flight| flight.sent <= bytes) {
            last = Some(*flight);
            lane.flights.pop_front();
            lane.repeated = lane.repeated.saturating_sub(1);
        }
        (lane.arrived, lane.arrived_at) = (bytes, now);
        if let Some(flight) = last {
            let over = now.since(flight.arrived_at);
            lane.pace.measured(now, now.since(flight.at), (bytes - flight.arrived, over), flight.is_full);
        }
        true
    }

    /// Notes that the other end has all bytes before this one.
    pub(super) fn acked(&mut self, next: u64) {
        self.lanes.iter_mut().for_each(|lane| lane.acked(next));
    }

    /// Returns the path on which FIN was not sent yet, and notes that it is sent. `after`: only on a path that has sent all
    /// data before this byte.
    pub(super) fn take_fin(&mut self, ready: PathSet, after: Option<u64>) -> Option<u8> {
        let is_behind = |lane: &Lane| after.is_none_or(|end| lane.cursor >= end);
        let ready = self.up(ready).filter(|path| self.get(*path).is_some_and(is_behind));
        let ready = ready.fold(PathSet::default(), PathSet::with);
        self.take(ready, |lane| &mut lane.fin_sent)
    }

    /// Returns the paths that may carry more data, the one on which it would arrive first in front.
    pub(super) fn free(&self, ready: PathSet) -> Vec<u8> {
        let mut free: Vec<_> = self
            .up(ready)
            .filter_map(|path| {
                let lane = self.get(path)?;
                let has_room = lane.in_flight() < lane.pace.room();
                has_room.then(|| (lane.pace.delay(lane.in_flight()), path))
            })
            .collect();
        free.sort_unstable();
        free.into_iter().map(|(_, path)| path).collect()
    }

    /// Returns the path for new data: the one on which it arrives first, if it is worth while. On a path that is much slower
    /// than another one, the data would arrive after all that follows it, and the other end would wait for it.
    pub(super) fn worth(&self, free: &[u8]) -> Option<u8> {
        let delay = |lane: &Lane| lane.pace.delay(lane.in_flight() + DATA_MAX as u64);
        let path = *free.first()?;
        let Some(arrives) = delay(self.get(path)?) else { return Some(path) };
        let least = self.lanes.iter().filter(|lane| lane.is_up).filter_map(delay).min()?;
        (arrives <= least * SLOWER_MAX + SLOWER_EXTRA).then_some(path)
    }

    /// Returns data that has been on its way for too long on another path than this one, the first in the flow. It counts
    /// as sent again from now on.
    pub(super) fn take_overdue(&mut self, path: u8, now: Instant) -> Option<u64> {
        let others = (0_u8..).zip(&self.lanes).filter(|(other, lane)| *other != path && lane.is_up);
        let late = others.filter_map(|(other, lane)| {
            let (offset, at) = lane.overdue()?;
            (at <= now).then_some((offset, other))
        });
        let (offset, other) = late.min()?;
        self.get_mut(other)?.repeated += 1;
        Some(offset)
    }

    /// Returns when something is to be said or to be sent again. What is due already waits for a path that is ready.
    /// `tells`: the other end is told what came. `repeats`: data that is overdue is sent again.
    pub(super) fn deadline(&self, now: Instant, tells: bool, repeats: bool) -> Option<Instant> {
        let up = || self.lanes.iter().filter(|lane| lane.is_up);
        let several = repeats && up().count() > 1;
        let overdue = up().filter_map(|lane| lane.overdue()).map(|(_, at)| at).filter(|_| several);
        let tell = up().filter_map(|lane| lane.tell_at).filter(|_| tells);
        overdue.chain(tell).filter(|at| *at > now).min()
    }
}

impl Lane {
    fn must_tell(&self, now: Instant) -> bool {
        let is_due = self.tell_at.is_some_and(|at| at <= now);
        is_due || self.came >= self.came_told + TELL_EVERY
    }
}
