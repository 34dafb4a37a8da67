//! The connections of flows, noted while packets are captured.
//!
//! A capture has to know which packets belong to which flow. While no capture runs, a flow pays for this with one load of a flag.

use super::LiveFlow;
use sidetrack_core::capture::{Ends, Leg};
use sidetrack_core::flow::{FlowId, Protocol, Side};
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// Most notes that wait for the capture. Further ones are lost and counted.
const NOTES_MAX: usize = 1 << 16;

static WANTED: AtomicBool = AtomicBool::new(false);
static NOTES: Mutex<Vec<Note>> = Mutex::new(Vec::new());
static LOST: AtomicU64 = AtomicU64::new(0);

/// What a capture is told.
#[derive(Clone, Debug)]
pub enum Note {
    /// A flow has begun.
    Begun(Arc<LiveFlow>),
    /// A connection of a flow.
    Leg(FlowId, Leg),
}

/// Whether a capture runs.
#[inline]
pub fn are_wanted() -> bool {
    WANTED.load(Relaxed)
}

/// Sets whether a capture runs. What was noted before is forgotten.
pub fn want(is_wanted: bool) {
    WANTED.store(is_wanted, Relaxed);
    lock(&NOTES).clear();
}

/// Takes the notes.
pub fn take() -> Vec<Note> {
    std::mem::take(&mut lock(&NOTES))
}

/// Takes the number of notes that were lost.
pub fn take_lost() -> u64 {
    LOST.swap(0, Relaxed)
}

fn put(note: Note) {
    let mut notes = lock(&NOTES);
    if notes.len() < NOTES_MAX {
        notes.push(note);
    } else {
        LOST.fetch_add(1, Relaxed);
    }
}

/// Notes that a flow has begun, if a capture runs.
pub(super) fn begun(flow: &Arc<LiveFlow>) {
    if are_wanted() {
        put(Note::Begun(flow.clone()));
    }
}

/// Notes the connection of a flow at this side, if a capture runs.
#[inline]
pub fn note(flow: &LiveFlow, side: Side, socket: impl AsFd) {
    if are_wanted() {
        note_socket(flow.id, side, socket);
    }
}

fn note_socket(flow: FlowId, side: Side, socket: impl AsFd) {
    // A socket that has no addresses any more has no packets either.
    if let (Ok(from), Ok(to)) = (sockopt::peer_address(&socket), sockopt::local_address(&socket)) {
        let asked = (side == Side::Client).then(|| sockopt::original_dst(&socket).ok()).flatten();
        put(Note::Leg(flow, Leg { side, ends: Ends { protocol: Protocol::Tcp, from, to }, asked }));
    }
}
