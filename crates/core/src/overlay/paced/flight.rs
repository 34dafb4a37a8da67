//! The packets that were sent and not yet acknowledged: which are lost, and the round trip (RFC 9002 Sec. 5 and 6).

use crate::overlay::frame::PacedAck;
use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// A packet is lost if this number of later packets has arrived, until reordering is seen (RFC 9002 Sec. 6.1.1).
const REORDER_MIN: u64 = 3;

/// Most that reordering raises this number to. Above it, only time tells.
const REORDER_MAX: u64 = 4_096;

/// The round trip while none is measured.
const RTT_FIRST: Duration = Duration::from_millis(100);

/// The clock of the driver, and what the receiver does not say about its delay.
const GRANULARITY: Duration = Duration::from_millis(1);

/// Most packets that are remembered at a time. More are sent only when the oldest one is settled.
pub(super) const FLIGHT_MAX: usize = 65_000;

/// A part of a packet that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Bytes of a stream, from and to.
    Data(u32, u64, u64),
    /// The end of a stream.
    End(u32),
    /// The reset of a stream.
    Reset(u32),
    /// Credit of a stream.
    Credit(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    InFlight,
    Arrived,
    Lost(Instant),
}

#[derive(Clone, Debug)]
struct Sent {
    at: Instant,
    fate: Fate,
    parts: Vec<Part>,
}

/// What an acknowledgement or a time-out has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Settled {
    /// Parts of packets that have arrived.
    pub arrived: Vec<Part>,
    /// Parts of packets that are lost.
    pub lost: Vec<Part>,
    /// Packets that are lost.
    pub lost_packets: u64,
    /// Packets that had counted as lost and have arrived.
    pub late_packets: u64,
}

/// The packets in flight of one direction.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    /// The number of the first packet in `sent`.
    base: u64,
    sent: VecDeque<Sent>,
    in_flight: usize,
    /// The newest packet that has arrived.
    newest: Option<u64>,
    reorder: u64,
    /// How much later than the round trip a packet was acknowledged that had counted as lost.
    slack: Duration,
    /// When reordering was last seen.
    reordered: Instant,
    smoothed: Option<Duration>,
    variation: Duration,
    latest: Duration,
    /// When the last packet was sent, and when the last one arrived.
    last_sent: Instant,
    last_news: Instant,
    /// Probes since the last acknowledgement.
    probes: u32,
}

impl Flight {
    /// Returns a flight whose first packet gets this number.
    pub(super) fn new(first: u64, now: Instant) -> Self {
        Self {
            base: first,
            sent: VecDeque::new(),
            in_flight: 0,
            newest: None,
            reorder: REORDER_MIN,
            slack: Duration::ZERO,
            reordered: now,
            smoothed: None,
            variation: Duration::ZERO,
            latest: Duration::ZERO,
            last_sent: now,
            last_news: now,
            probes: 0,
        }
    }

    /// Returns the number of the next packet.
    pub(super) fn next(&self) -> u64 {
        self.base + self.sent.len() as u64
    }

    /// Returns the first packet whose acknowledgement is of use.
    pub(super) fn floor(&self) -> u64 {
        self.base
    }

    pub(super) fn has_room(&self) -> bool {
        self.sent.len() < FLIGHT_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight == 0
    }

    pub(super) fn round_trip(&self) -> Duration {
        self.smoothed.unwrap_or(RTT_FIRST)
    }

    /// Returns how many probes were sent since the last acknowledgement.
    pub(super) fn probes(&self) -> u32 {
        self.probes
    }

    /// Returns for how long packets are in flight without an acknowledgement.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        if self.is_empty() { Duration::ZERO } else { now.since(self.last_news) }
    }

    /// Notes that a packet was sent. Returns its number.
    pub(super) fn sent(&mut self, now: Instant, parts: Vec<Part>) -> u64 {
        let number = self.next();
        if self.is_empty() {
            // The silence before this packet says nothing.
            self.last_news = now;
        }
        self.sent.push_back(Sent { at: now, fate: Fate::InFlight, parts });
        self.in_flight += 1;
        self.last_sent = now;
        number
    }

    /// Handles an acknowledgement. `None`: it names a packet that was not sent.
    pub(super) fn acknowledged(&mut self, now: Instant, ack: &PacedAck) -> Option<Settled> {
        let newest = expand(ack.newest, self.next());
        if newest >= self.next() {
            return None;
        }
        let mut settled = Settled::default();
        let mut sample = None;
        let mut top = newest.saturating_add(1);
        let mut arrived = ack.arrived;
        let mut runs = ack.runs.iter();
        loop {
            let bottom = top.saturating_sub(arrived.into());
            for number in bottom.max(self.base)..top.max(self.base) {
                let at = self.arrived(now, number, &mut settled);
                if number == newest {
                    sample = at;
                }
            }
            let Some(run) = runs.next() else { break };
            top = bottom.saturating_sub(run.missing.into());
            arrived = run.arrived;
        }
        if let Some(at) = sample {
            self.measure(now.since(at), Duration::from_micros(ack.age_us.into()));
        }
        if !settled.arrived.is_empty() || settled.late_packets > 0 || sample.is_some() {
            self.last_news = now;
            self.probes = 0;
        }
        self.newest = self.newest.max(Some(newest));
        if settled.late_packets > 0 {
            self.reordered = now;
        } else if now.since(self.reordered) > self.round_trip() * 32 {
            // Reordering may have ended: follow it slowly.
            self.reorder = (self.reorder * 7 / 8).max(REORDER_MIN);
            self.slack = self.slack * 7 / 8;
            self.reordered = now;
        }
        self.look(now, &mut settled);
        Some(settled)
    }

    /// Notes that a packet has arrived. Returns when it was sent, if that is news.
    fn arrived(&mut self, now: Instant, number: u64, settled: &mut Settled) -> Option<Instant> {
        let index = usize::try_from(number - self.base).ok()?;
        let (newest, round_trip) = (self.newest.unwrap_or(number), self.round_trip());
        let sent = self.sent.get_mut(index)?;
        match sent.fate {
            Fate::Arrived => return None,
            Fate::InFlight => self.in_flight -= 1,
            Fate::Lost(_) => {
                settled.late_packets += 1;
                let distance = newest.saturating_sub(number) + 1;
                self.reorder = self.reorder.max(distance).min(REORDER_MAX);
                let slack = now.since(sent.at).saturating_sub(round_trip).min(round_trip);
                self.slack = self.slack.max(slack);
            }
        }
        sent.fate = Fate::Arrived;
        settled.arrived.append(&mut sent.parts);
        Some(sent.at)
    }

    fn measure(&mut self, elapsed: Duration, age: Duration) {
        let sample = elapsed.saturating_sub(age).max(Duration::from_micros(1));
        self.latest = sample;
        match self.smoothed {
            None => (self.smoothed, self.variation) = (Some(sample), sample / 2),
            Some(smoothed) => {
                self.variation = (self.variation * 3 + smoothed.abs_diff(sample)) / 4;
                self.smoothed = Some((smoothed * 7 + sample) / 8);
            }
        }
    }

    /// Returns how much later than a packet another one must have been sent, if that one has arrived and the first has not.
    fn patience(&self) -> Duration {
        let round_trip = self.round_trip();
        let longest = round_trip.max(self.latest);
        (longest * 9 / 8)
            .max(round_trip + self.variation * 4)
            .max(round_trip + self.slack * 9 / 8)
            .max(GRANULARITY)
    }

    /// Finds the packets that are lost, and forgets those that are settled.
    pub(super) fn look(&mut self, now: Instant, settled: &mut Settled) {
        let (patience, reorder) = (self.patience(), self.reorder);
        if let Some(newest) = self.newest.filter(|newest| *newest >= self.base) {
            let count = usize::try_from(newest - self.base).unwrap_or(usize::MAX);
            for (number, sent) in (self.base..).zip(self.sent.iter_mut()).take(count) {
                let is_lost = newest - number >= reorder || sent.at + patience <= now;
                if sent.fate == Fate::InFlight && is_lost {
                    sent.fate = Fate::Lost(now);
                    self.in_flight -= 1;
                    settled.lost_packets += 1;
                    settled.lost.extend(sent.parts.iter().copied());
                }
            }
        }
        // A lost packet is remembered for two round trips: if it was late only, its acknowledgement says so.
        let kept = self.round_trip() * 2;
        while let Some(first) = self.sent.front() {
            let settled = match first.fate {
                Fate::InFlight => false,
                Fate::Arrived => true,
                Fate::Lost(at) => at + kept <= now || self.sent.len() >= FLIGHT_MAX,
            };
            if !settled {
                break;
            }
            self.sent.pop_front();
            self.base += 1;
        }
    }

    /// Returns when [`Flight::look`] may find a lost packet.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let newest = self.newest.filter(|newest| *newest > self.base)?;
        let count = usize::try_from(newest - self.base).unwrap_or(usize::MAX);
        let oldest = self.sent.iter().take(count).find(|sent| sent.fate == Fate::InFlight)?;
        Some(oldest.at + self.patience())
    }

    /// Returns when to send a probe, because nothing else would show that the last packets are lost. `ack_delay`: how long
    /// the other end may wait with an acknowledgement.
    pub(super) fn probe_at(&self, ack_delay: Duration) -> Option<Instant> {
        if self.is_empty() {
            return None;
        }
        let wait = self.round_trip() + (self.variation * 4).max(GRANULARITY) + ack_delay;
        let wait = wait.saturating_mul(1 << self.probes.min(5)).min(Duration::from_secs(1));
        Some(self.last_sent.max(self.last_news) + wait)
    }

    /// Returns the parts of the oldest packet in flight: a probe carries them again.
    pub(super) fn probe(&mut self) -> Vec<Part> {
        self.probes = self.probes.saturating_add(1);
        let oldest = self.sent.iter().find(|sent| sent.fate == Fate::InFlight);
        oldest.map(|sent| sent.parts.clone()).unwrap_or_default()
    }
}

/// Returns the lowest 32 bits of a number, as they travel.
pub(super) fn low(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0)
}

/// Returns the number with these lowest 32 bits that is nearest to `expected` (RFC 9000 Sec. A.3).
pub(super) fn expand(low: u32, expected: u64) -> u64 {
    const SPAN: u64 = 1 << 32;
    let near = expected & !(SPAN - 1) | u64::from(low);
    if near + SPAN / 2 <= expected {
        near + SPAN
    } else if near > expected + SPAN / 2 && near >= SPAN {
        near - SPAN
    } else {
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::overlay::frame::Run;

    fn ack(newest: u32, arrived: u16, runs: &[(u16, u16)]) -> PacedAck {
        let runs =
            runs.iter().map(|(missing, arrived)| Run { missing: *missing, arrived: *arrived }).collect();
        PacedAck { newest, age_us: 0, arrived, runs }
    }

    fn ms(count: u64) -> Instant {
        Instant::from_millis(count)
    }

    #[test]
    fn a_number_is_expanded_over_the_wrap() {
        for expected in [0_u64, 5, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 40) + 77] {
            for distance in [0, 1, 100, (1 << 31) - 1] {
                for number in [expected + distance, expected.saturating_sub(distance)] {
                    assert_eq!(expand(low(number), expected), number, "{number} near {expected}");
                }
            }
        }
    }

    #[test]
    fn only_what_is_missing_is_lost_and_what_was_late_teaches() {
        let mut flight = Flight::new((1 << 32) - 4, ms(0));
        for at in 0..10 {
            flight.sent(ms(at), vec![Part::Data(1, at, at + 1)]);
        }
        // 10 packets over the wrap of 32 bits: the third and the fourth are missing.
        let settled = flight.acknowledged(ms(40), &ack(3, 4, &[(2, 2)])).expect("valid");
        assert_eq!(settled.lost, [Part::Data(1, 2, 3), Part::Data(1, 3, 4)]);
        assert_eq!((settled.arrived.len(), settled.lost_packets), (6, 2));
        assert_eq!(flight.round_trip(), Duration::from_millis(33));
        // The fourth was late only.
        let settled = flight.acknowledged(ms(41), &ack(3, 5, &[(1, 2)])).expect("valid");
        assert_eq!((settled.late_packets, settled.lost_packets, flight.reorder), (1, 0, 5));
        assert_eq!(flight.acknowledged(ms(41), &ack(6, 1, &[])), None, "it was not sent");
        // The last two have no packets after them: a probe is due.
        assert_eq!(flight.in_flight, 2);
        let due = flight.probe_at(Duration::from_millis(20)).expect("two are in flight");
        assert!(due > ms(60) && due < ms(200), "{due:?}");
        assert_eq!(flight.probe(), [Part::Data(1, 8, 9)]);
        assert!(
            flight.probe_at(Duration::from_millis(20)).expect("again") > due,
            "it waits longer each time"
        );
    }

    #[test]
    fn a_hole_is_lost_after_some_time_although_few_packets_follow() {
        let mut flight = Flight::new(0, ms(0));
        for at in 0..2 {
            flight.sent(ms(at), vec![Part::Reset(u32::try_from(at).unwrap_or(0))]);
        }
        let settled = flight.acknowledged(ms(11), &ack(1, 1, &[])).expect("valid");
        assert_eq!(settled.lost_packets, 0);
        let at = flight.look_at().expect("a hole");
        let mut settled = Settled::default();
        flight.look(at, &mut settled);
        assert_eq!(settled.lost, [Part::Reset(0)]);
        assert!(flight.is_empty() && flight.probe_at(Duration::ZERO).is_none());
    }
}
