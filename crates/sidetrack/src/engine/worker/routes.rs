//! What becomes of connections to servers that no route leads to.

use super::Worker;
use sidetrack_core::time::Instant;

impl Worker {
    /// Ends connections to whose servers no route leads: their clients need not wait for a time-out.
    pub(super) fn end_unrouted(&mut self, now: Instant) {
        for packet in self.driver.take_unrouted() {
            self.engine.unrouted(now, &packet);
        }
        self.send_own();
    }
}
