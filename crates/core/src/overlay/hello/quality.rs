//! How good a link is: round trip, jitter, loss, and what that costs.

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

/// `old` moved by a `part`-th of the way to `new`.
fn smoothed(old: u32, new: u32, part: u64) -> u32 {
    let value = (u64::from(old) * (part - 1) + u64::from(new)) / part;
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Tells a later hello from an earlier one, over restarts of the neighbour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    latest: Option<u32>,
}

impl Order {
    /// Notes that this hello came; none: it is no later than one that came before, else by how much.
    pub(super) fn step(&mut self, sequence: u32) -> Option<u32> {
        let step = self.latest.map_or(1, |latest| sequence.wrapping_sub(latest));
        let is_later = step != 0 && step <= u32::MAX - SEQUENCE_JUMP;
        if is_later {
            self.latest = Some(sequence);
        }
        is_later.then_some(step)
    }

    /// The next hello is the first of a new count.
    pub(super) fn forget(&mut self) {
        self.latest = None;
    }
}

/// Counts which hellos came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Arrivals {
    order: Order,
    expected: u32,
    came: u32,
}

impl Arrivals {
    /// Notes that this hello came.
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

    /// What comes next follows nothing that came before.
    pub(super) fn pause(&mut self) {
        self.order.forget();
    }

    /// The share that did not come, parts per million.
    pub(super) fn loss_ppm(&self) -> u32 {
        let lost = u64::from(self.expected.saturating_sub(self.came));
        u32::try_from(lost * 1_000_000 / u64::from(self.expected.max(1))).unwrap_or(u32::MAX)
    }
}
