//! A flow whose packets the kernel passes on: no socket of ours is left. User space reads its counts, and ends it.

use crate::live::LiveFlow;
use crate::worker::Wires;
use sidetrack_core::flow::{EndReason, Side as Of};
use sidetrack_core::splice;
use sidetrack_core::time::Instant;
use sidetrack_core::wire::Side;
use sidetrack_sys::bpf::{WireEnd, WireId};
use sidetrack_sys::repair::{self, Gone};
use sidetrack_sys::route;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Time between two looks at a flow: at first, and at most. It doubles while nothing moves.
const SOON: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_secs(1);

/// Why a flow on the wire ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub reason: EndReason,
    /// A text for the record besides the reason.
    pub detail: Option<&'static str>,
}

/// A flow on the wire. Dropped before its end, it is reset at both hosts.
#[derive(Debug)]
pub(super) struct OnWire {
    wires: Arc<Wires>,
    id: WireId,
    sides: [Side; 2],
    /// Bytes of the client and of the server that user space had passed on when the kernel began.
    before: [u64; 2],
    /// Keeps our port towards the server from new connections.
    port: Option<OwnedFd>,
    config: splice::Config,
    active: Instant,
    pause: Duration,
    /// The changes of routes that it knows of.
    routes: u64,
    is_over: bool,
}

/// `sent` of a side that has sent nothing since the kernel began: the upper half counts wraps, from 1.
fn first_sent(side: &Side) -> u64 {
    (1 << 32) | u64::from(side.expects)
}

impl OnWire {
    pub(super) fn new(
        (wires, id, sides): (Arc<Wires>, WireId, [Side; 2]),
        (before, port): ([u64; 2], Option<OwnedFd>),
        (config, now): (splice::Config, Instant),
    ) -> Self {
        wires.took();
        let (routes, pause) = (wires.route_changes(), SOON);
        Self { wires, id, sides, before, port, config, active: now, pause, routes, is_over: false }
    }

    /// Bytes of the client and of the server so far, by user space and by the kernel.
    fn bytes(&self) -> [u64; 2] {
        let seen = self.wires.memory().look(self.id);
        [0, 1].map(|at| {
            let (side, seen) = (&self.sides[at], &seen[at]);
            let waiting = u64::from(side.expects.wrapping_sub(side.next));
            let carried = seen.sent.saturating_sub(first_sent(side)) + waiting;
            self.before[at] + carried.saturating_sub(seen.finished.into())
        })
    }

    /// Takes over the counts. Returns when to look again, or how it ends.
    pub(super) fn look(&mut self, now: Instant, live: &LiveFlow) -> Result<Instant, End> {
        let ended = self.wires.memory().ended(self.id);
        // Read after the end: nothing is counted later.
        let ([up, down], (known_up, known_down)) = (self.bytes(), live.bytes());
        let (more_up, more_down) = (up.saturating_sub(known_up), down.saturating_sub(known_down));
        if more_up + more_down > 0 {
            live.count(more_up, more_down);
            live.touch(live.age());
            (self.active, self.pause) = (now, SOON);
        } else {
            self.pause = (self.pause * 2).min(LATER);
        }
        if more_down > 0 {
            live.first_byte(live.age());
        }
        if let Some(why) = ended {
            return Err(self.ended(why));
        }
        self.follow_routes();
        // Dropped before it is over, it is reset at both hosts.
        let cut = |reason| End { reason, detail: None };
        if let Some(reason) = live.ending() {
            return Err(cut(reason));
        }
        let age = live.age();
        let lifetime = self.config.lifetime.map(|all| (now + all.saturating_sub(age), EndReason::Lifetime));
        let idle = self.config.idle.map(|idle| (self.active + idle, EndReason::Idle));
        let ends = lifetime.into_iter().chain(idle);
        let first = ends.min_by_key(|(at, _)| *at);
        if let Some((_, reason)) = first.filter(|(at, _)| *at <= now) {
            return Err(cut(reason));
        }
        let again = now + self.pause;
        Ok(first.map_or(again, |(at, _)| again.min(at)))
    }

    /// Lets packets leave by other interfaces, if routes have changed. Without a route they wait for one, as those of sockets do.
    fn follow_routes(&mut self) {
        let changes = self.wires.route_changes();
        if changes == self.routes {
            return;
        }
        self.routes = changes;
        for (at, side) in self.sides.iter_mut().enumerate() {
            if let Ok(Some(egress)) = route::way(side.local.ip(), side.remote.ip())
                && egress != side.egress
                && self.wires.reach(egress).is_ok()
            {
                side.egress = egress;
                self.wires.memory().leads(self.id, at, egress);
            }
        }
    }

    fn ended(&mut self, why: WireEnd) -> End {
        self.is_over = true;
        let (reason, detail) = match why {
            WireEnd::Finished => (EndReason::Ok, None),
            WireEnd::ClientReset => (EndReason::ClientReset, None),
            WireEnd::ServerReset => (EndReason::ServerReset, None),
            WireEnd::Reused => {
                self.wires.remove(self.id);
                let detail = "a host began a new connection between the same ends";
                return End { reason: EndReason::ClientReset, detail: Some(detail) };
            }
        };
        self.wires.leave(self.id, self.port.take());
        End { reason, detail }
    }

    /// Resets it at both hosts.
    fn cut(&mut self) {
        let seen = self.wires.memory().look(self.id);
        self.port = None;
        self.wires.remove(self.id);
        for (of, (side, seen)) in [Of::Client, Of::Server].into_iter().zip(self.sides.iter().zip(seen)) {
            let (sent, acknowledged) = (seen.standing.acknowledged, seen.standing.sent);
            let gone = Gone { remote: side.remote, local: side.local, sent, acknowledged };
            if let Err(error) = repair::reset(&gone) {
                // The host learns of it when it sends something: this host's TCP does not know the connection.
                tracing::debug!(side = ?of, host = %side.remote, %error, "cannot reset a flow of the wire");
            }
        }
    }
}

impl Drop for OnWire {
    fn drop(&mut self) {
        if !self.is_over {
            self.cut();
        }
    }
}
