//! The interface between a worker and the driver that moves its frames.

use sidetrack_core::engine::packet::Ip;
use sidetrack_core::engine::{Checksums, Hop};
use sidetrack_sys::raw::RoutedSocket;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

/// A packet that came in.
#[derive(Debug)]
pub struct Arrived<'a> {
    /// The IP packet; bytes behind its end may follow.
    pub packet: &'a mut [u8],
    /// The neighbour it came from.
    pub hop: Hop,
    /// What is known of its checksums.
    pub checksums: Checksums,
}

/// How many frames had come by each interface at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mark(pub Vec<u64>);

/// Moves the frames of one worker. Numbers of frames are those of the last [`Driver::receive`].
pub trait Driver: Send + fmt::Debug {
    /// Takes the frames that wait, a batch at most; how many.
    ///
    /// # Errors
    /// What the system says when frames can no longer be taken, such as ENETDOWN.
    fn receive(&mut self) -> io::Result<usize>;

    /// The packet of a frame; none if the frame carries no IP packet.
    fn arrived(&mut self, frame: usize) -> Option<Arrived<'_>>;

    /// Sends the packet of a frame, which has `len` bytes now, to a neighbour. Once for each frame at most.
    fn forward(&mut self, frame: usize, len: usize, hop: Hop);

    /// Sends a packet to a neighbour. What finds no room is lost, as on a full link.
    fn send(&mut self, packet: &[u8], hop: Hop);

    /// Hands everything to be sent to the kernel; frames that came in are gone then.
    fn flush(&mut self);

    /// Returns which frames have come until now, including those that were not taken yet.
    fn mark(&mut self) -> Mark {
        Mark::default()
    }

    /// Whether all frames that had come at that time were taken.
    fn is_past(&self, mark: &Mark) -> bool {
        let _ = mark;
        true
    }

    /// Packets that found no room since the beginning.
    fn lost(&self) -> u64;

    /// Takes the packets sent since the last call to which no route leads.
    fn take_unrouted(&mut self) -> Vec<Vec<u8>> {
        Vec::new()
    }

    /// Readable when frames wait.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
}

/// Packets that the kernel routes, and those for which it has no route.
#[derive(Debug)]
pub(super) struct Routed {
    socket: RoutedSocket,
    unrouted: Vec<Vec<u8>>,
    /// Packets that found no room.
    pub(super) lost: u64,
}

impl Routed {
    pub(super) fn new(socket: RoutedSocket) -> Self {
        Self { socket, unrouted: Vec::new(), lost: 0 }
    }

    /// Sends a packet where the kernel leads it. One without a route is kept for [`Driver::take_unrouted`].
    pub(super) fn send(&mut self, packet: &[u8]) {
        let Ok(ip) = Ip::parse(packet) else { return };
        match self.socket.send(packet, ip.dst.into()) {
            Ok(()) => {}
            Err(error) if is_unreachable(&error) => {
                if self.unrouted.len() < UNROUTED_MAX {
                    self.unrouted.push(packet.to_vec());
                }
            }
            Err(_) => self.lost += 1,
        }
    }

    pub(super) fn take_unrouted(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.unrouted)
    }
}

/// Packets without a route that wait to be taken; the worker takes them after each batch.
const UNROUTED_MAX: usize = 1024;

/// Whether the kernel said that no way leads there: no route, or a route of type unreachable, prohibit or blackhole.
fn is_unreachable(error: &io::Error) -> bool {
    const EACCES: i32 = 13;
    const EINVAL: i32 = 22;
    const EADDRNOTAVAIL: i32 = 99;
    const ENETUNREACH: i32 = 101;
    const EHOSTUNREACH: i32 = 113;
    matches!(error.raw_os_error(), Some(EACCES | EINVAL | EADDRNOTAVAIL | ENETUNREACH | EHOSTUNREACH))
}
