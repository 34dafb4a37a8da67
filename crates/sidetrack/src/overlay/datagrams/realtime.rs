//! Real-time links: numbers packets for each neighbour, and sends the lost ones again while they are in time. The core
//! decides ([`sidetrack_core::overlay::realtime`]).

use super::link::Link;
use super::receive::may_send;
use super::{Datagrams, spread};
use crate::overlay::shared::Shared;
use rustix::event::{EventfdFlags, eventfd};
use sidetrack_core::overlay::frame::{Frame, Mark, Spread, Timed};
use sidetrack_core::overlay::realtime::{Counts, Input};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// How long a packet without a deadline is recovered.
const UNLIMITED: Duration = Duration::from_secs(1);

/// Counts of all real-time links.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// Packets that were sent for the first time.
    pub sent: AtomicU64,
    /// Repetitions that were sent.
    pub repeated: AtomicU64,
    /// Numbers that were requested.
    pub requested: AtomicU64,
    /// Missing packets that came in time by a repetition.
    pub recovered: AtomicU64,
    /// Missing packets that did not come in time.
    pub given_up: AtomicU64,
}

impl Totals {
    fn add(&self, counts: Counts) {
        let Counts { sent, repeated, requested, recovered, given_up } = counts;
        for (total, more) in [
            (&self.sent, sent),
            (&self.repeated, repeated),
            (&self.requested, requested),
            (&self.recovered, recovered),
            (&self.given_up, given_up),
        ] {
            total.fetch_add(more, Relaxed);
        }
    }
}

/// Wakes a thread that keeps the time: the receiving one when another thread has sent the first packet after a silence, or
/// the one that sends for paced links.
#[derive(Clone, Debug)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Bell {
    /// Makes a bell.
    ///
    /// # Errors
    /// Fails if the system provides no descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)))
    }

    /// Wakes the thread.
    pub(crate) fn ring(&self) {
        // A full counter also wakes the thread.
        let _ = rustix::io::write(self, &1_u64.to_ne_bytes());
    }

    /// Resets it after a wait.
    pub(crate) fn heard(&self) {
        let _ = rustix::io::read(self, &mut [0; 8]);
    }
}

/// Gives an input to the recovery of a link, and sends the frames that it returns. Returns false if the system did not
/// accept one of them.
pub(crate) fn recover(shared: &Shared, link: &Link, input: Input) -> bool {
    let datagrams = &shared.datagrams;
    let mut recovery = link.recovery();
    let was_idle = recovery.deadline().is_none();
    recovery.handle(datagrams.clock.now(), input);
    let mut sent = true;
    // The lock is held meanwhile: frames must leave in the order of their numbers, or the other end sees gaps.
    while let Some(frame) = recovery.poll() {
        // The first transmission has been checked before it got its number.
        let repeats = matches!(&frame, Frame::Timed(Timed { mark: Mark { repeats: Some(_), .. }, .. }));
        let may = !repeats || may_send(shared, link.neighbour, bytes_of(&frame));
        sent &= may && datagrams.send_on(link, &frame);
    }
    datagrams.real_time.add(recovery.take_counts());
    if was_idle && recovery.deadline().is_some() {
        datagrams.bell.ring();
    }
    sent
}

fn bytes_of(frame: &Frame) -> usize {
    if let Frame::Timed(timed) = frame { timed.packet.payload.len() } else { 0 }
}

/// Sends a packet on a real-time link. Returns false if the system did not accept it.
pub(super) fn send(shared: &Shared, link: &Link, packet: Box<Spread>) -> bool {
    let left = packet.left().unwrap_or(UNLIMITED);
    recover(shared, link, Input::Send(packet, left))
}

/// Handles a packet that came on a real-time link.
pub(super) fn came(shared: &Shared, link: &Link, timed: Timed) {
    let Timed { mark, packet } = timed;
    let one_way = Duration::from_micros(link.one_way_us.load(Relaxed).into());
    let left = packet.left().map_or(UNLIMITED, |left| left.saturating_sub(one_way));
    recover(shared, link, Input::Came(mark, left));
    spread::arrived(shared, link, *packet, mark.repeats.is_some());
}

/// Does what is due.
pub(super) fn tick(shared: &Shared, datagrams: &Datagrams) {
    let now = datagrams.clock.now();
    for link in datagrams.all() {
        let due = link.recovery().deadline();
        if due.is_some_and(|due| due <= now) {
            recover(shared, &link, Input::Tick);
        }
    }
}
