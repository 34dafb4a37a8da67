//! What a worker asks of whoever moves its frames.

use sidetrack_core::engine::{Checksums, Hop};
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

    /// Remembers which frames have come until now, those that nobody has taken yet counted.
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

    /// Readable when frames wait.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
}
