//! What a worker of the packet engine reports now and then: flows in flight, lost packets, shed connections, and errors of
//! the engine itself.

use super::Worker;
use crate::live::work::WorkCounts;
use sidetrack_core::time::Instant;
use std::sync::atomic::Ordering;

impl Worker {
    /// Updates the counts of flows in flight, and logs lost packets and errors of the engine.
    pub(super) fn count(&mut self, now: Instant, since: Instant) {
        self.engine.refresh(now);
        if let Some(offload) = &mut self.engine.callbacks_mut().offload {
            offload.look_around(now);
        }
        let traffic: Vec<_> = self.engine.traffic().collect();
        let shunted: Vec<_> = self.engine.passed_elsewhere().collect();
        let states: Vec<_> = self.engine.reached_since(since).collect();
        let flows = &mut self.engine.callbacks_mut().flows;
        flows.count(traffic.into_iter());
        flows.shunted(shunted.into_iter());
        flows.reached(states.into_iter());
        let lost = self.driver.lost();
        if lost > self.lost {
            let more = lost - std::mem::replace(&mut self.lost, lost);
            tracing::warn!(listener = %self.listener.name, lost = more, "packets come faster than the engine takes them");
        }
        self.count_internal();
        self.count_work();
    }

    /// Publishes what the rounds have done, and logs shed connections.
    fn count_work(&mut self) {
        let totals = *self.schedule.totals();
        let room = self.engine.counters().shed;
        // After a fault a worker has a new engine, which counts from 0.
        self.room = if room < self.room.1 {
            (self.room.0 + room, room)
        } else {
            (self.room.0 + room - self.room.1, room)
        };
        self.work.publish(&WorkCounts { totals, no_room: self.room.0 });
        let more = totals.shed - std::mem::replace(&mut self.shed, totals.shed);
        if more > 0 {
            tracing::warn!(
                listener = %self.listener.name,
                shed = more,
                "new connections come faster than the engine serves them; those that exist go on"
            );
        }
    }

    fn count_internal(&mut self) {
        let all = self.engine.counters().internal;
        // After a fault a worker has a new engine, which counts from 0.
        let more = all.checked_sub(self.internal).unwrap_or(all);
        self.internal = all;
        if more > 0 {
            self.surroundings.internal.fetch_add(more, Ordering::Relaxed);
            tracing::error!(
                listener = %self.listener.name,
                errors = more,
                "the packet engine looked for a connection that it does not have; please report this"
            );
        }
    }
}
