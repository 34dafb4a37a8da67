//! An AF_XDP socket with one interface's frames, and the owner of each frame: the kernel, the send queue, or none
//! (free).

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result, ensure};
use sidetrack_sys::xsk::{self, Copying, Descriptor, FrameSize, RING_ENTRIES, Umem, XskSocket};

/// Free frames that the kernel always has.
const FILL: usize = RING_ENTRIES as usize;
/// All frames: those, the same number in the send queue, and those that may wait in the receive ring.
const FRAMES: usize = 2 * FILL + 8192;
/// Large enough for every frame of the lab's packets.
const FRAME: FrameSize = FrameSize::Half;
/// Maximum number of frames taken at a time.
pub(super) const BATCH: usize = 64;

/// An AF_XDP socket with its frames.
#[derive(Debug)]
pub(super) struct Rings {
    socket: XskSocket,
    /// Free frames.
    free: Vec<u64>,
    outgoing: Vec<Descriptor>,
}

impl Rings {
    /// Opens it on this interface (name and index), in this thread's network namespace. Frames arrive once an XDP
    /// program redirects them here.
    ///
    /// # Errors The interface has several receive queues, or no AF_XDP.
    pub(super) fn open(interface: &str, index: u32) -> Result<Self> {
        let queues = xsk::queues(interface);
        ensure!(queues == 1, "{interface} has {queues} receive queues; one is served");
        let umem = Umem::new(FRAMES, FRAME)?;
        let socket = XskSocket::open(&umem, index, 0, Copying::Auto, None)
            .with_context(|| format!("no AF_XDP on {interface}"))?;
        let free = (0..FRAMES).map(|frame| (frame * FRAME.bytes()) as u64).collect();
        Ok(Self { socket, free, outgoing: Vec::with_capacity(4 * BATCH) })
    }

    /// Takes sent frames back, gives the kernel free frames, and takes received frames; returns their number. Each of
    /// them must be released or sent.
    pub(super) fn receive(&mut self, taken: &mut [Descriptor; BATCH]) -> usize {
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

    /// Returns the bytes of a received frame.
    pub(super) fn frame(&mut self, descriptor: Descriptor) -> &mut [u8] {
        self.socket.frame(descriptor)
    }

    /// Releases a received frame.
    pub(super) fn let_go(&mut self, descriptor: Descriptor) {
        self.free.push(FRAME.beginning(descriptor.address));
    }

    /// Queues a received frame for [`Rings::flush`].
    pub(super) fn forward(&mut self, descriptor: Descriptor) {
        self.outgoing.push(descriptor);
    }

    /// Queues a new frame for [`Rings::flush`]. `write` fills it and returns its length. Returns false if there is no
    /// free frame.
    pub(super) fn send<const ROOM: usize>(&mut self, write: impl FnOnce(&mut [u8; ROOM]) -> usize) -> bool {
        let Some(address) = self.free.pop() else { return false };
        let room = Descriptor { address, length: ROOM as u32, options: 0 };
        let Some(frame) = self.socket.frame(room).first_chunk_mut() else { return false };
        let length = write(frame) as u32;
        self.outgoing.push(Descriptor { length, ..room });
        true
    }

    /// Sends the queued frames; returns the number that the ring accepted.
    ///
    /// # Errors
    /// The interface is down.
    pub(super) fn flush(&mut self) -> Result<usize> {
        let sent = self.socket.send(&self.outgoing);
        self.outgoing.drain(..sent);
        self.socket.wake()?;
        Ok(sent)
    }

    /// Returns the number of frames that the receive ring could not hold.
    ///
    /// # Errors An error of getsockopt(2).
    pub(super) fn lost(&self) -> Result<u64> {
        Ok(self.socket.lost()?)
    }
}

impl AsFd for Rings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
