//! A running flow between two sockets that another process of this node goes on with.

use crate::live::{Decided, Spared};
use sidetrack_core::splice;
use sidetrack_sys::sync::lock;
use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

/// A flow without a task.
pub struct Moved {
    /// The sockets to the client and to the server.
    pub sockets: [TcpStream; 2],
    /// Bytes that were read from the client and from the server, and not written yet.
    pub held: [Vec<u8>; 2],
    /// Its limits. The lifetime is counted from now.
    pub config: splice::Config,
    /// Its number.
    pub id: u64,
    /// Its times and counts.
    pub spared: Spared,
    /// What was decided about it.
    pub decided: Arc<Decided>,
    /// A note for the record.
    pub note: Option<Box<str>>,
}

/// Where flows go when another process takes over. It is closed most of the time.
#[derive(Default)]
pub struct Exit(Mutex<Option<Sender<Moved>>>);

impl std::fmt::Debug for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Exit")
    }
}

impl Exit {
    /// Opens it, or closes it. No flow leaves after it was closed.
    pub fn set(&self, to: Option<Sender<Moved>>) {
        *lock(&self.0) = to;
    }

    /// Lets a flow leave, if it is open. `flow` takes it apart, if it can be. Returns whether it has left.
    pub fn leave(&self, flow: impl FnOnce() -> Option<Moved>) -> bool {
        // Held until the flow is in the queue: its receiver takes all of them after it has closed this.
        let to = lock(&self.0);
        let Some(to) = &*to else { return false };
        let Some(moved) = flow() else { return false };
        // The receiver is there as long as this is open.
        let _ = to.send(moved);
        true
    }
}
