//! Running flows that another process of this node goes on with.

use super::{Shared, Worker};
use crate::live::{Decided, Spared, Spread};
use sidetrack_core::association::Again;
use sidetrack_core::splice;
use sidetrack_sys::sync::lock;
use sidetrack_sys::udp::batch::Target;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
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
    /// Counts what the flow does with its paths of the overlay, if it has several. Its session brings it to the other process.
    pub spread: Option<Arc<Spread>>,
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

/// An association of UDP without a table.
#[derive(Debug)]
pub struct MovedDatagrams {
    /// The number of the clients' socket ([`sidetrack_sys::sockopt::cookie`]).
    pub socket_cookie: u64,
    /// Its number.
    pub id: u64,
    /// Its times and counts.
    pub spared: Spared,
    /// What was decided about it.
    pub decided: Arc<Decided>,
    /// A note for the record.
    pub note: Option<Box<str>>,
    /// Its state in the table.
    pub again: Again,
    /// Where answers go.
    pub client: Target,
    /// The address that the client has asked, if it was captured.
    pub asked: Option<SocketAddr>,
    /// Whether it has a socket of its own, which is connected to its server.
    pub is_own: bool,
    /// That socket, or those that all associations of its client share.
    pub sockets: Vec<OwnedFd>,
}

/// Associations that wait while one process replaces another: nothing reads their datagrams.
#[derive(Debug, Default)]
pub struct Resting {
    is_on: AtomicBool,
    waiting: Mutex<Vec<MovedDatagrams>>,
}

impl Resting {
    /// Whether the process rests: associations wait here instead of their end.
    pub fn set(&self, is_on: bool) {
        self.is_on.store(is_on, Relaxed);
    }

    /// Whether it does.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Adds associations.
    pub fn put(&self, moved: impl IntoIterator<Item = MovedDatagrams>) {
        lock(&self.waiting).extend(moved);
    }

    /// Takes those of this socket.
    pub fn take(&self, socket_cookie: u64) -> Vec<MovedDatagrams> {
        let mut waiting = lock(&self.waiting);
        let (taken, left) =
            std::mem::take(&mut *waiting).into_iter().partition(|moved| moved.socket_cookie == socket_cookie);
        *waiting = left;
        taken
    }

    /// Takes those of all sockets but these.
    pub fn take_but(&self, sockets: &[u64]) -> Vec<MovedDatagrams> {
        let mut waiting = lock(&self.waiting);
        let (left, taken) = std::mem::take(&mut *waiting)
            .into_iter()
            .partition(|moved| sockets.contains(&moved.socket_cookie));
        *waiting = left;
        taken
    }

    /// Takes all.
    pub fn take_all(&self) -> Vec<MovedDatagrams> {
        std::mem::take(&mut lock(&self.waiting))
    }

    /// Looks at all.
    pub fn look<T>(&self, work: impl FnOnce(&[MovedDatagrams]) -> T) -> T {
        work(&lock(&self.waiting))
    }
}

impl Shared {
    /// Where associations wait while another process takes over.
    pub const fn resting(&self) -> &Resting {
        &self.resting
    }
}

impl Worker {
    /// Where associations wait while another process takes over.
    pub fn resting(&self) -> &Resting {
        self.shared.resting()
    }
}
