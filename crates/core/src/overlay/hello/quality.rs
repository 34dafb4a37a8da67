//! The quality of a link: round trip, jitter and loss, and the cost computed from them.

/// The number of hellos over which loss is counted. After that, older hellos lose weight.
const LOSS_WINDOW: u32 = 256;

/// A jump of the sequence beyond this is a restart of the neighbour, not loss.
const SEQUENCE_JUMP: u32 = 1024;

/// The measured quality of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// Smoothed round trip, µs; 0 = not measured yet.
    pub rtt_us: u32,
    /// Mean deviation of the round trip, µs.
    pub jitter_us: u32,
    /// Packet loss before retransmission, parts per million.
    pub loss_ppm: u32,
}

impl Quality {
    /// Base cost of each hop, µs: if two paths are otherwise equal, the one with fewer hops wins.
    pub const HOP_COST_US: u32 = 300;

    /// Highest cost of a link, µs.
    pub const COST_MAX_US: u32 = 60_000_000;

    /// Returns the expected time of a byte over this link, in µs: half a round trip, plus the repair of lost bytes. A
    /// repair takes a round trip and 10 ms to notice the loss. In an ordered stream, the bytes behind a lost byte
    /// wait, too. So a loss counts eight times.
    pub fn cost_us(&self) -> u32 {
        let one_way = u64::from(self.rtt_us / 2);
        let repair = u64::from(self.rtt_us) + 10_000;
        let loss = u64::from(self.loss_ppm.min(1_000_000));
        let cost = u64::from(Self::HOP_COST_US) + one_way + 8 * loss * repair / 1_000_000;
        u32::try_from(cost).unwrap_or(u32::MAX).min(Self::COST_MAX_US)
    }

    /// Adds one measured round trip to the averages (RFC 6298 Sec. 2).
    pub(super) fn measured(&mut self, rtt_us: u32) {
        if self.rtt_us == 0 {
            (self.rtt_us, self.jitter_us) = (rtt_us.max(1), rtt_us / 2);
            return;
        }
        let deviation = self.rtt_us.abs_diff(rtt_us);
        self.jitter_us = smoothed(self.jitter_us, deviation, 4);
        self.rtt_us = smoothed(self.rtt_us, rtt_us, 8).max(1);
    }
}

/// Moves `old` towards `new` by one `part`-th of the distance.
fn smoothed(old: u32, new: u32, part: u64) -> u32 {
    let value = (u64::from(old) * (part - 1) + u64::from(new)) / part;
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Tells newer hellos from older ones, also if the neighbour restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    latest: Option<u32>,
}

impl Order {
    /// Notes that this hello arrived. Returns how many numbers it is after the latest one, or `None` if it is not
    /// newer.
    pub(super) fn step(&mut self, sequence: u32) -> Option<u32> {
        let step = self.latest.map_or(1, |latest| sequence.wrapping_sub(latest));
        let is_later = step != 0 && step <= u32::MAX - SEQUENCE_JUMP;
        if is_later {
            self.latest = Some(sequence);
        }
        is_later.then_some(step)
    }

    /// Starts a new count with the next hello.
    pub(super) fn forget(&mut self) {
        self.latest = None;
    }
}

/// Counts how many of the expected hellos arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrivals {
    order: Order,
    expected: u32,
    came: u32,
}

impl Arrivals {
    /// Notes that this hello arrived.
    pub(super) fn note(&mut self, sequence: u32) {
        let Some(step) = self.order.step(sequence) else { return };
        if step > SEQUENCE_JUMP {
            (self.expected, self.came) = (1, 1);
            return;
        }
        self.expected += step;
        self.came += 1;
        if self.expected > LOSS_WINDOW {
            self.expected /= 2;
            self.came = (self.came / 2).min(self.expected);
        }
    }

    /// The next hello starts a new count, so the numbers between do not count as lost.
    pub(super) fn pause(&mut self) {
        self.order.forget();
    }

    /// Returns the share of hellos that did not arrive, in parts per million.
    pub(super) fn loss_ppm(&self) -> u32 {
        let lost = u64::from(self.expected.saturating_sub(self.came));
        u32::try_from(lost * 1_000_000 / u64::from(self.expected.max(1))).unwrap_or(u32::MAX)
    }
}
