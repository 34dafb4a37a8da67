//! The thread that sends the packets of paced links: it sleeps until a link may send, and then sends a batch.

use super::{Input, tell};
use crate::overlay::datagrams::{Link, Train};
use crate::overlay::shared::Shared;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_core::overlay::frame::Frame;
use sidetrack_core::time::Instant;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// How often the thread checks whether it must end.
const LOOK: Duration = Duration::from_millis(200);

/// Most packets of one link before the next one has its turn.
const TURN: usize = 256;

/// Sends until `stopped`.
pub(crate) fn run(shared: &Shared, stopped: &AtomicBool) {
    let (mut frames, mut train) = (Vec::new(), Train::default());
    while !stopped.load(Relaxed) {
        let mut next = None;
        for link in shared.datagrams.all() {
            let due = pump(shared, &link, &mut frames, &mut train);
            next = next.into_iter().chain(due).min();
        }
        wait(shared, next);
    }
}

fn wait(shared: &Shared, until: Option<Instant>) {
    let due = until.map_or(LOOK, |at| at.since(shared.clock.now())).min(LOOK);
    let bell = &shared.datagrams.lanes.bell;
    let limit = Timespec { tv_sec: 0, tv_nsec: due.subsec_nanos().into() };
    let mut descriptors = [PollFd::new(bell, PollFlags::IN)];
    // A signal needs no reaction.
    let _ = poll(&mut descriptors, Some(&limit));
    if !descriptors[0].revents().is_empty() {
        bell.heard();
    }
}

/// Sends what a link may send now. Returns when to look at it again.
fn pump(shared: &Shared, link: &Arc<Link>, frames: &mut Vec<Frame>, train: &mut Train) -> Option<Instant> {
    let lane = link.lane.as_ref()?;
    // Without an address nothing can be sent: the neighbour dials, and its first datagram brings the address.
    // A link with several legs sends on its best one. The route of the link is that of the latest datagram, on whichever leg it came.
    let route = link.legs.best().or_else(|| link.route());
    let due = {
        let now = shared.clock.now();
        let room = link.frame_bytes();
        let mut inner = lane.lock();
        match lane.spent.swap(0, Relaxed) {
            0 => inner.link.handle(now, Input::Tick),
            bytes => inner.link.handle(now, Input::Spent(bytes)),
        }
        inner.take_outputs(|output| tell(shared, link.neighbour, lane, output));
        if route.is_none() {
            inner.looks_at = None;
            return Some(now + LOOK);
        }
        while frames.len() < TURN
            && let Some(frame) = inner.link.transmit(now, room)
        {
            frames.push(frame);
        }
        inner.take_outputs(|output| tell(shared, link.neighbour, lane, output));
        inner.looks_at = inner.link.deadline();
        inner.looks_at
    };
    // The lock is free while packets are sealed and sent.
    if let Some(route) = route {
        shared.datagrams.send_batch(link, route, frames.drain(..), train);
    }
    due
}
