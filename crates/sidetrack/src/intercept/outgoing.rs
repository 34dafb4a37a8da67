//! What the connections to the port of a path that a service asked for share.

use crate::carry::tls::ToServer;
use sidetrack_core::time::Instant;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// See the module.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// TLS with the server, where the path has it; its clients speak without.
    pub tls: Option<ToServer>,
    /// When its last flow began, nanoseconds of the clock of flows.
    last: AtomicU64,
}

impl Outgoing {
    /// A path that was just asked for.
    pub fn new(tls: Option<ToServer>, now: Instant) -> Self {
        Self { tls, last: AtomicU64::new(now.as_nanos()) }
    }

    /// Notes that a flow takes it, or somebody asked for it again.
    pub fn used(&self, now: Instant) {
        self.last.fetch_max(now.as_nanos(), Relaxed);
    }

    /// When it was used last.
    pub fn last_used(&self) -> Instant {
        Instant::from_nanos(self.last.load(Relaxed))
    }
}
