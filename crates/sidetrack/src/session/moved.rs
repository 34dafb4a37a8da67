//! A running flow between two sockets goes on in another process.
//!
//! ```text
//! MOVING --wanted elsewhere, and it can be taken apart--> gone (its entry leaves the ledger without a record)
//! gone --the other process puts it together--> MOVING there, with the same number, times and counts
//! ```
//!
//! Half-closed states need no field: the end of a side that has sent FIN is read again, and a FIN that is sent again changes nothing.

use super::Entry;
use super::carrying::{Carried, Carrying, Motion, Moving, Stage, wiring};
use super::pump::Parted;
use crate::carry::Stream;
use crate::live::{Decided, LiveFlow, Spared};
use crate::reactor::{self, TcpStream};
use crate::worker::{Admission, Moved, Returned, Worker};
use sidetrack_core::flow::{EndReason, FlowId};
use sidetrack_core::splice;
use std::sync::Arc;
use std::time::Duration;

impl Carried {
    /// Gives the flow away, if that is wanted and possible. Returns whether it is gone.
    pub(super) fn leaves(&mut self) -> bool {
        let live = self.entry.live().clone();
        if !live.takes_wish_to_leave() {
            return false;
        }
        let worker = self.entry.worker.clone();
        let has_left = worker.exit().leave(|| {
            let decided = live.decided()?;
            let Motion::Sockets(pump) = &mut self.motion else { return None };
            if self.part_of.is_some() {
                return None;
            }
            let Parted { sockets, held, config } = pump.take_apart()?;
            let (id, spared) = (live.id.0, live.spared());
            let (note, spread) = (self.note.take(), self.spread.take());
            Some(Moved { sockets, held, config, id, spared, decided, note, spread })
        });
        if has_left {
            self.entry.give_away();
        }
        live.has_answered();
        has_left
    }
}

/// Goes on with a flow of another process, on its worker.
pub fn adopt(worker: &Arc<Worker>, moved: Moved) {
    let Moved { sockets, held, config, id, spared, decided, note, spread } = moved;
    let mut entry = Entry::again(worker, (id, &spared), (*decided).clone(), None);
    // It was admitted once, so it stays also without a place.
    let admission = Admission::ask(worker, decided.flow.client.ip(), || true).ok();
    let (client, server) = match sockets.map(|socket| TcpStream::new(socket.into())) {
        [Ok(client), Ok(server)] => (client, server),
        [Err(error), _] | [_, Err(error)] => return entry.end(EndReason::Limit, Some(error.to_string())),
    };
    let [up, down] = held;
    let wiring = wiring(worker, entry.live(), config);
    let moving = Moving { early: (up, down), config, chain: None, wiring };
    let motion = moving.between((Stream::Tcp(client), Stream::Tcp(server)), entry.live(), worker.clock);
    let carried = Carried { motion, entry, part_of: None, note, spread };
    let mut carrying = Carrying { stage: Stage::Moving(carried) };
    reactor::spawn(async move {
        // Await by reference: awaiting by value would store the future twice in this task.
        let wired = (&mut carrying).await;
        if let Some(admission) = admission {
            super::keep(wired, admission);
        }
    });
}

/// Goes on with a flow that came back from the wire, on its worker.
pub fn come_back(worker: &Arc<Worker>, returned: Returned) {
    let Returned { sockets, live, home: (_, slot), idle, lifetime, kept, detail } = returned;
    let mut entry = Entry { worker: worker.clone(), live, slot: Some(slot), note: detail };
    let opened = sockets.map(|socket| socket.begin().and_then(|socket| TcpStream::new(socket.into())));
    let (client, server) = match opened {
        [Ok(client), Ok(server)] => (client, server),
        [Err(error), _] | [_, Err(error)] => return entry.end(EndReason::Internal, Some(error.to_string())),
    };
    let limits = worker.config().limits;
    let left = |life: Duration| life.saturating_sub(entry.live().age()).max(Duration::from_millis(1));
    let config = splice::Config {
        limit: u32::try_from(limits.buffer_bytes).unwrap_or(u32::MAX),
        idle,
        lifetime: lifetime.map(left),
        ..splice::Config::default()
    };
    let moving = Moving { early: (Vec::new(), Vec::new()), config, chain: None, wiring: None };
    let motion = moving.between((Stream::Tcp(client), Stream::Tcp(server)), entry.live(), worker.clock);
    let carried = Carried { motion, entry, part_of: None, note: None, spread: None };
    let mut carrying = Carrying { stage: Stage::Moving(carried) };
    reactor::spawn(async move {
        // Await by reference: awaiting by value would store the future twice in this task.
        (&mut carrying).await;
        drop(kept);
    });
}

impl Entry {
    /// Leaves to another process: the flow has no record here. Returns its number, its times and counts, and its note.
    pub fn leaves(mut self) -> (u64, Spared, Option<Box<str>>) {
        self.give_away();
        (self.live.id.0, self.live.spared(), self.note.take().map(Into::into))
    }

    /// Enters a flow that has left another process.
    pub fn again(
        worker: &Arc<Worker>,
        (id, spared): (u64, &Spared),
        decided: Decided,
        note: Option<Box<str>>,
    ) -> Self {
        let live = Arc::new(LiveFlow::again(FlowId(id), spared));
        live.decide(decided);
        let slot = worker.ledger.enter(live.clone());
        Self { worker: worker.clone(), live, slot: Some(slot), note: note.map(Into::into) }
    }
}
