//! Flows that are counted without a record of each.

use super::Decided;
use sidetrack_core::flow::EndReason;
use std::sync::Arc;
use std::time::Duration;

/// Flows too many at a time for a record of each: the kernel carried them from beginning to end, or they ended faster than
/// the recorder came.
#[derive(Clone, Debug)]
pub struct Tally {
    /// What they have in common, none if policy was not asked; addresses say nothing.
    pub decided: Option<Arc<Decided>>,
    /// How they ended.
    pub reason: EndReason,
    /// Bytes from clients, and from servers.
    pub bytes: (u64, u64),
    /// Of each: from being caught to the end, and until the path to the server stood, microseconds; the second is
    /// `u32::MAX` if it never did.
    pub times_us: Vec<(u32, u32)>,
}

impl Tally {
    /// None yet.
    pub const fn new(decided: Option<Arc<Decided>>, reason: EndReason) -> Self {
        Self { decided, reason, bytes: (0, 0), times_us: Vec::new() }
    }

    /// Whether a flow with this decision and end is one of these.
    pub fn is_of(&self, decided: Option<&Decided>, reason: EndReason) -> bool {
        let kind =
            |decided: &Decided| (decided.rule().cloned(), decided.action().cloned(), decided.flow.intercept);
        self.reason == reason && self.decided.as_deref().map(kind) == decided.map(kind)
    }

    /// One more.
    pub fn add(&mut self, [up, down]: [u64; 2], duration: Duration, connected: Option<Duration>) {
        let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX - 1);
        self.bytes = (self.bytes.0 + up, self.bytes.1 + down);
        self.times_us.push((us(duration), connected.map_or(u32::MAX, us)));
    }
}
