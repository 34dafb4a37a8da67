//! The recovery of one real-time link: a lost packet is sent again only while it can still arrive in time (NM-strikes of
//! Spines: N requests, M retransmissions, both spaced so that a burst of losses does not hit all of them).
//!
//! ```text
//! receiving end, for each missing number:            sending end, for each packet in the buffer:
//!
//!   a later number came, time is left                   sent ------------------ its time is over ---> forgotten
//!          |                                              |
//!       MISSING --- request 1, 2 .. N, spaced --->  first request
//!        |    |                                           |
//!  it came    its time is over                     retransmission 1, 2 .. M, spaced, while in time
//!        |    |                                           |
//!   recovered  given up                             further requests are ignored
//! ```
//!
//! No packet waits for another: the driver passes each one on when it comes. The end of a stream reveals no gap, so its last
//! packets are not recovered. All memory is bounded by [`KEPT_MAX`] and [`MISSING_MAX`].

use super::frame::{STRIKE_MAX, Spread};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Requests for a missing packet.
pub const REQUESTS: u32 = 3;

/// Retransmissions after the first request for a packet.
pub const RETRANSMISSIONS: u32 = 2;

/// Most packets in the buffer of the sending end.
pub const KEPT_MAX: usize = 1024;

/// Most missing numbers at the receiving end. If more are missing, the link is down rather than lossy.
pub const MISSING_MAX: usize = 512;

/// An event that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Send this packet. It still has this long until it must be at the other end of the link.
    Send(Box<Spread>, Duration),
    /// A packet with this number came. It still had this long until it had to be here.
    Came(u64, Duration),
    /// The other end requests these numbers.
    Requested(Vec<u64>),
    /// The round trip of the link, as measured.
    RoundTrip(Duration),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// A packet with its number on this link.
    Data(u64, Box<Spread>),
    /// A request for these numbers.
    Request(Vec<u64>),
}

/// Counts of one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Numbers that were requested.
    pub requested: u64,
    /// Retransmissions that were sent.
    pub retransmitted: u64,
    /// Missing packets that came in time.
    pub recovered: u64,
    /// Missing packets that did not come in time, or could not have.
    pub given_up: u64,
}

/// A packet at the sending end.
#[derive(Clone, Debug)]
struct Kept {
    packet: Box<Spread>,
    sent: Instant,
    until: Instant,
    /// Retransmissions that are left, the time of the next one, and the time between two. `None`: not requested yet.
    strikes: Option<(u32, Instant, Duration)>,
}

/// A missing number at the receiving end.
#[derive(Clone, Copy, Debug)]
struct Missing {
    /// Requests that are left.
    left: u32,
    next: Instant,
    spacing: Duration,
    until: Instant,
}

/// One real-time link: both directions of one end.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    round_trip: Duration,
    next_number: u64,
    kept: BTreeMap<u64, Kept>,
    /// The packets of which retransmissions are left.
    struck: BTreeSet<u64>,
    newest: Option<u64>,
    missing: BTreeMap<u64, Missing>,
    counts: Counts,
    outputs: VecDeque<Output>,
}

impl Recovery {
    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Send(packet, left) => self.send(now, packet, left),
            Input::Came(number, left) => self.came(now, number, left),
            Input::Requested(numbers) => self.requested(now, &numbers),
            Input::RoundTrip(time) => self.round_trip = time,
            Input::Tick => {}
        }
        self.strike(now);
        self.request(now);
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call `handle(now, Input::Tick)`. Packets that only have to be forgotten can wait.
    pub fn deadline(&self) -> Option<Instant> {
        let strikes = self.struck.iter().filter_map(|number| self.kept.get(number)?.strikes);
        let missing = self.missing.values();
        let requests = missing.map(|missing| if missing.left > 0 { missing.next } else { missing.until });
        strikes.map(|(_, next, _)| next).chain(requests).min()
    }

    fn send(&mut self, now: Instant, packet: Box<Spread>, left: Duration) {
        let number = self.next_number;
        self.next_number = self.next_number.saturating_add(1);
        // Packets leave the buffer in order, so those whose time is over are at its front, or soon will be.
        while let Some(first) = self.kept.first_entry()
            && (first.get().until <= now || self.kept.len() >= KEPT_MAX)
        {
            let gone = self.kept.pop_first();
            gone.map(|(number, _)| self.struck.remove(&number));
        }
        let kept = Kept { packet: packet.clone(), sent: now, until: now + left, strikes: None };
        self.kept.insert(number, kept);
        self.outputs.push_back(Output::Data(number, packet));
    }

    fn came(&mut self, now: Instant, number: u64, left: Duration) {
        if self.missing.remove(&number).is_some() {
            self.counts.recovered += 1;
        }
        let Some(newest) = self.newest else {
            self.newest = Some(number);
            return;
        };
        if number <= newest {
            return;
        }
        self.newest = Some(number);
        let lost = number - newest - 1;
        // What is missing was sent a little before this packet, and has about the same time left. A request and its answer
        // take a round trip. The requests share the time until the last answer would be late.
        let window = left.checked_sub(self.round_trip);
        let room = (MISSING_MAX - self.missing.len()) as u64;
        let Some(window) = window.filter(|_| lost <= room) else {
            self.counts.given_up = self.counts.given_up.saturating_add(lost);
            return;
        };
        let spacing = window / REQUESTS;
        let missing = Missing { left: REQUESTS, next: now, spacing, until: now + left };
        self.missing.extend((newest + 1..number).map(|number| (number, missing)));
    }

    fn requested(&mut self, now: Instant, numbers: &[u64]) {
        for number in numbers {
            let Some(kept) = self.kept.get_mut(number).filter(|kept| kept.strikes.is_none()) else {
                continue;
            };
            let window = kept.until.since(now).saturating_sub(self.round_trip / 2);
            kept.strikes = Some((RETRANSMISSIONS, now, window / RETRANSMISSIONS));
            self.struck.insert(*number);
        }
    }

    /// Sends the retransmissions that are due and can still arrive in time.
    fn strike(&mut self, now: Instant) {
        let one_way = self.round_trip / 2;
        let (kept, counts, outputs) = (&mut self.kept, &mut self.counts, &mut self.outputs);
        self.struck.retain(|number| {
            let Some(kept) = kept.get_mut(number) else { return false };
            let Some((left, next, spacing)) = &mut kept.strikes else { return false };
            if *next > now {
                return true;
            }
            if now + one_way > kept.until {
                return false;
            }
            *left -= 1;
            // After a pause of this process, the others must not leave at once: they would meet the same loss.
            *next = (*next + *spacing).max(now + Duration::from_micros(1));
            let mut packet = kept.packet.clone();
            packet.grow_older(u32::try_from(now.since(kept.sent).as_micros()).unwrap_or(u32::MAX));
            counts.retransmitted += 1;
            outputs.push_back(Output::Data(*number, packet));
            *left > 0
        });
    }

    /// Sends the requests that are due, and gives up what would be late.
    fn request(&mut self, now: Instant) {
        let before = self.missing.len();
        self.missing.retain(|_, missing| missing.until > now);
        self.counts.given_up += (before - self.missing.len()) as u64;
        let mut due = Vec::new();
        for (number, missing) in self.missing.iter_mut().filter(|(_, one)| one.left > 0 && one.next <= now) {
            missing.left -= 1;
            missing.next = (missing.next + missing.spacing).max(now + Duration::from_micros(1));
            if now + self.round_trip <= missing.until {
                due.push(*number);
            }
        }
        self.counts.requested += due.len() as u64;
        self.outputs.extend(due.chunks(STRIKE_MAX).map(|numbers| Output::Request(numbers.to_vec())));
    }
}
