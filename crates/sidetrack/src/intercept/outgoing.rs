//! State that all connections to a service's requested port share.

use crate::carry::tls::ToServer;
use sidetrack_core::time::Instant;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A listening port that a service asked for.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// TLS with the server, if the path asks for it. Clients do not use TLS.
    pub tls: Option<ToServer>,
    /// When its last flow began, in nanoseconds of the flows' clock.
    last: AtomicU64,
}

impl Outgoing {
    /// A path that was just requested.
    pub fn new(tls: Option<ToServer>, now: Instant) -> Self {
        Self { tls, last: AtomicU64::new(now.as_nanos()) }
    }

    /// Notes that a flow uses it, or that a service asked for it again.
    pub fn used(&self, now: Instant) {
        self.last.fetch_max(now.as_nanos(), Relaxed);
    }

    /// When it was last used.
    pub fn last_used(&self) -> Instant {
        Instant::from_nanos(self.last.load(Relaxed))
    }
}
