//! Counts of flows that have no record each.

use super::Decided;
use sidetrack_core::flow::EndReason;
use std::sync::Arc;
use std::time::Duration;

/// Flows that are too many for one record each: the kernel carried them from beginning to end, or they ended
/// faster than the recorder could take them.
#[derive(Clone, Debug)]
pub struct Tally {
    /// The data that they share. `None` if policy was not asked. The addresses in it have no meaning.
    pub decided: Option<Arc<Decided>>,
    /// Their end reason.
    pub reason: EndReason,
    /// Bytes from clients, and bytes from servers.
    pub bytes: (u64, u64),
    /// For each flow, in microseconds: the time from the capture to the end, and until the path to the server
    /// was set up. The second is `u32::MAX` if it never was.
    pub times_us: Vec<(u32, u32)>,
}

impl Tally {
    /// An empty tally.
    pub const fn new(decided: Option<Arc<Decided>>, reason: EndReason) -> Self {
        Self { decided, reason, bytes: (0, 0), times_us: Vec::new() }
    }

    /// Whether a flow with this decision and end belongs to this tally.
    pub fn is_of(&self, decided: Option<&Decided>, reason: EndReason) -> bool {
        let kind =
            |decided: &Decided| (decided.rule().cloned(), decided.action().cloned(), decided.flow.intercept);
        self.reason == reason && self.decided.as_deref().map(kind) == decided.map(kind)
    }

    /// Adds one flow.
    pub fn add(&mut self, [up, down]: [u64; 2], duration: Duration, connected: Option<Duration>) {
        let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX - 1);
        self.bytes = (self.bytes.0 + up, self.bytes.1 + down);
        self.times_us.push((us(duration), connected.map_or(u32::MAX, us)));
    }
}
