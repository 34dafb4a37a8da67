//! An AF_XDP socket with one interface's frames, and where these are: with the kernel, on their way out, or nobody's.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result, ensure};
use sidetrack_sys::xsk::{self, Copying, Descriptor, FrameSize, RING_ENTRIES, Umem, XskSocket};

/// Frames that the kernel always finds to fill.
const FILL: usize = RING_ENTRIES as usize;
/// All frames: those, as many on their way out, and what may wait to be taken.
const FRAMES: usize = 2 * FILL + 8192;
/// Large enough for every frame of the lab's packets.
const FRAME: FrameSize = FrameSize::Half;
/// Frames taken at a time.
pub const BATCH: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Rings {
    socket: XskSocket,
    /// Frames that are nobody's.
    free: Vec<u64>,
    outgoing: Vec<Descriptor>,
}

impl Rings {
    /// Of this interface, by its name and index, in this thread's network namespace. Frames come once a program sends them here.
    ///
    /// # Errors
    /// It has several receive queues, or no AF_XDP.
    pub fn open(interface: &str, index: u32) -> Result<Self> {
        let queues = xsk::queues(interface);
        ensure!(queues == 1, "{interface} has {queues} receive queues; one is served");
        let umem = Umem::new(FRAMES, FRAME)?;
        let socket = XskSocket::open(&umem, index, 0, Copying::Auto, None)
            .with_context(|| format!("no AF_XDP on {interface}"))?;
        let free = (0..FRAMES).map(|frame| (frame * FRAME.bytes()) as u64).collect();
        Ok(Self { socket, free, outgoing: Vec::with_capacity(4 * BATCH) })
    }

    /// Takes back what was sent, gives the kernel frames to fill, and takes those that came in; how many. Each of them has to be
    /// let go, or sent.
    pub fn receive(&mut self, taken: &mut [Descriptor; BATCH]) -> usize {
        let mut addresses = [0; BATCH];
        loop {
            let count = self.socket.finished(&mut addresses);
            self.free.extend(addresses.iter().take(count).map(|address| FRAME.beginning(*address)));
            if count < BATCH {
                break;
            }
        }
        let lacking = FILL - self.socket.to_fill();
        if lacking >= BATCH {
            let start = self.free.len() - lacking.min(self.free.len().saturating_sub(FILL));
            let given = self.socket.give(self.free.get(start..).unwrap_or_default());
            self.free.drain(start..start + given);
        }
        self.socket.receive(taken)
    }

    /// The bytes of a frame that was received.
    pub fn frame(&mut self, descriptor: Descriptor) -> &mut [u8] {
        self.socket.frame(descriptor)
    }

    /// Lets go of one.
    pub fn let_go(&mut self, descriptor: Descriptor) {
        self.free.push(FRAME.beginning(descriptor.address));
    }

    /// Has a frame that was received sent by [`Rings::flush`].
    pub fn forward(&mut self, descriptor: Descriptor) {
        self.outgoing.push(descriptor);
    }

    /// Has a new frame sent by [`Rings::flush`], which `write` fills, and says how long it is; false: there is none free.
    pub fn send<const ROOM: usize>(&mut self, write: impl FnOnce(&mut [u8; ROOM]) -> usize) -> bool {
        let Some(address) = self.free.pop() else { return false };
        let room = Descriptor { address, length: ROOM as u32, options: 0 };
        let Some(frame) = self.socket.frame(room).first_chunk_mut() else { return false };
        let length = write(frame) as u32;
        self.outgoing.push(Descriptor { length, ..room });
        true
    }

    /// Sends; how many frames found room.
    ///
    /// # Errors
    /// The interface is down.
    pub fn flush(&mut self) -> Result<usize> {
        let sent = self.socket.send(&self.outgoing);
        self.outgoing.drain(..sent);
        self.socket.wake()?;
        Ok(sent)
    }

    /// Frames that found no room here.
    ///
    /// # Errors
    /// What getsockopt(2) says.
    pub fn lost(&self) -> Result<u64> {
        Ok(self.socket.lost()?)
    }
}

impl AsFd for Rings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
