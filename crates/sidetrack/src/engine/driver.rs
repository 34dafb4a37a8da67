//! The interface between a worker and the driver that moves its frames.

use sidetrack_core::engine::packet::Ip;
use sidetrack_core::engine::{Checksums, Hop};
use sidetrack_sys::raw::RoutedSocket;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

/// A received packet.
#[derive(Debug)]
pub struct Arrived<'a> {
    /// The IP packet; other bytes may follow its end.
    pub packet: &'a mut [u8],
    /// The neighbour it came from.
    pub hop: Hop,
    /// What the driver knows about its checksums.
    pub checksums: Checksums,
}

/// The number of frames that had arrived at each interface at some time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mark(pub Vec<u64>);

/// Moves the frames of one worker. Frame numbers refer to the last [`Driver::receive`].
pub trait Driver: Send + fmt::Debug {
    /// Takes waiting frames, at most one batch, and returns their number.
    ///
    /// # Errors
    /// Returns the system's error if frames can no longer be received, such as ENETDOWN.
    fn receive(&mut self) -> io::Result<usize>;

    /// Returns the packet of a frame; none if the frame holds no IP packet.
    fn arrived(&mut self, frame: usize) -> Option<Arrived<'_>>;

    /// Sends the packet of a frame, which now has `len` bytes, to a neighbour. At most once for each frame.
    fn forward(&mut self, frame: usize, len: usize, hop: Hop);

    /// Sends a packet to a neighbour. A packet that does not fit the queue is lost, as on a full link.
    fn send(&mut self, packet: &[u8], hop: Hop);

    /// Hands all outgoing packets to the kernel. Received frames are no longer valid after that.
    fn flush(&mut self);

    /// Returns which frames have come until now, including those that were not taken yet.
    fn mark(&mut self) -> Mark {
        Mark::default()
    }

    /// True if all frames that had arrived at that time were taken.
    fn is_past(&self, mark: &Mark) -> bool {
        let _ = mark;
        true
    }

    /// Returns how many frames wait behind those of the last [`Driver::receive`]; 0 if that took all.
    fn waiting(&mut self) -> usize {
        0
    }

    /// Returns the number of packets lost because a queue was full, since the start.
    fn lost(&self) -> u64;

    /// Takes the packets sent since the last call for which the kernel has no route.
    fn take_unrouted(&mut self) -> Vec<Vec<u8>> {
        Vec::new()
    }

    /// Returns descriptors that are readable when frames wait.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
}

/// Sends packets by the kernel's routes, and keeps those for which it has no route.
#[derive(Debug)]
pub(super) struct Routed {
    socket: RoutedSocket,
    unrouted: Vec<Vec<u8>>,
    /// Packets lost because the socket's queue was full.
    pub(super) lost: u64,
}

impl Routed {
    pub(super) fn new(socket: RoutedSocket) -> Self {
        Self { socket, unrouted: Vec::new(), lost: 0 }
    }

    /// Sends a packet by the kernel's route. A packet without a route is kept for [`Driver::take_unrouted`].
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

/// True if the kernel reported that the destination is unreachable: no route, or a route of type unreachable, prohibit or
/// blackhole.
fn is_unreachable(error: &io::Error) -> bool {
    const EACCES: i32 = 13;
    const EINVAL: i32 = 22;
    const EADDRNOTAVAIL: i32 = 99;
    const ENETUNREACH: i32 = 101;
    const EHOSTUNREACH: i32 = 113;
    matches!(error.raw_os_error(), Some(EACCES | EINVAL | EADDRNOTAVAIL | ENETUNREACH | EHOSTUNREACH))
}
