//! The driver for AF_XDP: frames are rewritten and sent from where they arrived. One socket for each interface, all over
//! the same memory.

use super::driver::{Arrived, Driver, Mark, Routed};
use super::hops::{self, ETHERNET, ROUTED};
use super::open::Interface;
use sidetrack_core::engine::{Checksums, Hop};
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_sys::xsk::{Descriptor, FrameSize, HEADROOM, RING_ENTRIES, Umem, XskSocket};
use std::hint::black_box;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Frames that are handled together: as many as `Ahead` loads into the cache at once.
const BATCH: usize = 64;
/// Most frames of each interface that the kernel may fill. They must hold what comes while a batch is handled, or while
/// another process has the CPU. The kernel takes the frames in turn, so only a small number of them stays in the cache.
/// [`Fill`] adapts the number: it watches how low it falls.
const FILL: usize = 2048;
const FILL_MIN: usize = 256;
/// Refills in a row that find more than three quarters left. After this many, the number is halved.
const ENOUGH: u32 = 1024;
/// Visits in a row without any frame. After this many, a burst of any size may follow.
const IDLE: u32 = 4;
/// Additional frames of each interface that may wait to be handled.
const WAITING: usize = 4096;
/// Frames that the kernel never gets to fill: for packets that the engine builds, and for frames on their way out.
const OWN: usize = RING_ENTRIES as usize;
/// Shortest Ethernet frame without its checksum, bytes.
const SHORTEST: usize = 60;
/// Bytes of VLAN tags and the like around an IP packet, besides its Ethernet header.
const TAGS: usize = 64;

/// Largest IP packet that fits a frame.
pub(super) const MTU_MAX: u32 = (FrameSize::Page.bytes() - HEADROOM - ETHERNET - TAGS) as u32;

/// Returns the frame size that holds an IP packet of `mtu` bytes, at most [`MTU_MAX`].
pub(super) fn frame_size(mtu: u32) -> FrameSize {
    FrameSize::holding(mtu as usize + ETHERNET + TAGS).unwrap_or_default()
}

/// Returns how many frames one worker needs for this number of interfaces.
pub(super) const fn frames(interfaces: usize) -> usize {
    interfaces * (FILL + WAITING) + OWN
}

/// The driver over AF_XDP sockets.
#[derive(Debug)]
pub(super) struct XdpDriver {
    ports: Vec<Port>,
    routed: Routed,
    taken: [Descriptor; BATCH],
    /// One bit for each taken frame that is being sent.
    gone: u64,
    count: usize,
    from: usize,
    turn: usize,
    frames: FrameSize,
    free: Vec<u64>,
    /// True if the last visit found no frames.
    drained: bool,
    lost: u64,
}

#[derive(Debug)]
struct Port {
    interface: Interface,
    socket: XskSocket,
    outgoing: Vec<Descriptor>,
    fill: Fill,
}

/// Adapts how many frames the kernel gets to fill.
#[derive(Debug)]
struct Fill {
    wanted: usize,
    enough: u32,
    idle: u32,
}

impl Default for Fill {
    fn default() -> Self {
        Self { wanted: FILL, enough: 0, idle: 0 }
    }
}

impl Fill {
    /// Returns how many frames to give to the kernel when it has `left` of them.
    fn lacking(&mut self, left: usize) -> usize {
        if left * 2 < self.wanted {
            self.wanted = (self.wanted * 2).min(FILL);
            self.enough = 0;
        } else if left * 4 < self.wanted * 3 {
            self.enough = 0;
        } else {
            self.enough += 1;
            if self.enough == ENOUGH {
                self.wanted = (self.wanted / 2).max(FILL_MIN);
                self.enough = 0;
            }
        }
        let lacking = self.wanted.saturating_sub(left);
        // A small number is not worth it: each refill moves an index that the kernel reads.
        if lacking < BATCH { 0 } else { lacking }
    }

    /// Notes that `count` frames came.
    fn came(&mut self, count: usize) {
        self.idle = if count > 0 { 0 } else { self.idle + 1 };
        if self.idle == IDLE {
            *self = Self::default();
        }
    }
}

impl XdpDriver {
    /// Returns a driver for these sockets, one for each interface, which share `umem`.
    pub(super) fn new(umem: &Arc<Umem>, sockets: Vec<(Interface, XskSocket)>, routed: RoutedSocket) -> Self {
        let port =
            |(interface, socket)| Port { interface, socket, outgoing: Vec::new(), fill: Fill::default() };
        let mut driver = Self {
            ports: sockets.into_iter().map(port).collect(),
            routed: Routed::new(routed),
            taken: [Descriptor::default(); BATCH],
            gone: 0,
            count: 0,
            from: 0,
            turn: 0,
            frames: umem.frame_size(),
            free: (0..umem.frames()).map(|frame| (frame * umem.frame_size().bytes()) as u64).collect(),
            drained: false,
            lost: 0,
        };
        driver.refill();
        driver
    }

    /// Gives the kernel frames to fill, so that it has enough of them while others wait to be handled.
    fn refill(&mut self) {
        for port in &mut self.ports {
            let lacking = port.fill.lacking(port.socket.to_fill());
            if lacking == 0 {
                continue;
            }
            let spare = self.free.len().saturating_sub(OWN);
            let start = self.free.len() - lacking.min(spare);
            let given = port.socket.give(self.free.get(start..).unwrap_or_default());
            self.free.drain(start..start + given);
        }
    }

    /// Takes back the frames that were sent.
    fn finished(&mut self) {
        let mut addresses = [0; BATCH];
        for port in &mut self.ports {
            loop {
                let count = port.socket.finished(&mut addresses);
                let frames = addresses.iter().take(count).map(|address| self.frames.beginning(*address));
                self.free.extend(frames);
                if count < BATCH {
                    break;
                }
            }
        }
    }

    /// Frees the frames of the last batch that were not sent.
    fn reclaim(&mut self) {
        for (frame, descriptor) in self.taken.iter().enumerate().take(self.count) {
            if self.gone >> frame & 1 == 0 {
                self.free.push(self.frames.beginning(descriptor.address));
            }
        }
        (self.count, self.gone) = (0, 0);
    }

    fn route(&mut self, packet: &[u8]) {
        self.routed.send(packet);
    }
}

impl Driver for XdpDriver {
    fn receive(&mut self) -> io::Result<usize> {
        // A panic may have stopped the worker in the middle of the last batch. Then its frames are still taken.
        self.reclaim();
        self.finished();
        self.refill();
        for _ in 0..self.ports.len() {
            self.from = self.turn;
            self.turn = (self.turn + 1) % self.ports.len();
            let Some(port) = self.ports.get_mut(self.from) else { continue };
            self.count = port.socket.receive(&mut self.taken);
            self.drained = self.count == 0;
            port.fill.came(self.count);
            if self.count > 0 {
                for descriptor in self.taken.iter().take(self.count) {
                    // The kernel may have written them on another CPU: this reads all of them at the same time, not one
                    // after the other.
                    black_box(port.socket.frame(*descriptor).get(ETHERNET).copied());
                }
                return Ok(self.count);
            }
            port.socket.wake()?;
        }
        Ok(0)
    }

    fn arrived(&mut self, frame: usize) -> Option<Arrived<'_>> {
        let descriptor = *self.taken.get(frame)?;
        let bytes = self.ports.get_mut(self.from)?.socket.frame(descriptor);
        let hop = hops::hop(self.from, hops::sender(bytes)?);
        Some(Arrived { packet: bytes.get_mut(ETHERNET..)?, hop, checksums: Checksums::Unmarked })
    }

    fn forward(&mut self, frame: usize, len: usize, hop: Hop) {
        let Some(mut descriptor) = self.taken.get(frame).copied() else { return };
        let Some(port) = self.ports.get_mut(self.from) else { return };
        let Some((number, to)) = hops::neighbour(hop) else {
            let bytes = port.socket.frame(descriptor);
            let packet = bytes.get(ETHERNET..ETHERNET + len).unwrap_or_default().to_vec();
            return self.route(&packet);
        };
        // After a short packet there may be the sender's padding; there is always room for it.
        descriptor.length = (ETHERNET + len).max(SHORTEST) as u32;
        let Some(from) = self.ports.get(number).map(|port| port.interface.address) else { return };
        let Some(port) = self.ports.get_mut(self.from) else { return };
        let Some((header, packet)) = port.socket.frame(descriptor).split_first_chunk_mut::<ETHERNET>() else {
            return;
        };
        *header = hops::header(to, from, packet);
        if let Some(padding) = packet.get_mut(len..) {
            padding.fill(0);
        }
        self.gone |= 1 << frame;
        if let Some(port) = self.ports.get_mut(number) {
            port.outgoing.push(descriptor);
        }
    }

    fn send(&mut self, packet: &[u8], hop: Hop) {
        if hop == ROUTED {
            return self.route(packet);
        }
        let Some((number, to)) = hops::neighbour(hop) else { return };
        let Some(port) = self.ports.get_mut(number) else { return };
        let length = (ETHERNET + packet.len()).max(SHORTEST);
        let Some(address) = (length <= self.frames.bytes()).then(|| self.free.pop()).flatten() else {
            self.lost += 1;
            return;
        };
        let descriptor = Descriptor { address, length: length as u32, options: 0 };
        if let Some((header, rest)) = port.socket.frame(descriptor).split_first_chunk_mut::<ETHERNET>() {
            *header = hops::header(to, port.interface.address, packet);
            let (body, padding) = rest.split_at_mut(packet.len().min(rest.len()));
            body.copy_from_slice(packet.get(..body.len()).unwrap_or_default());
            padding.fill(0);
        }
        port.outgoing.push(descriptor);
    }

    fn flush(&mut self) {
        for port in &mut self.ports {
            // Frames that do not fit at first may fit after the kernel was woken.
            for _ in 0..2 {
                let sent = port.socket.send(&port.outgoing);
                port.outgoing.drain(..sent);
                if let Err(error) = port.socket.wake() {
                    // The interface is down; queued frames wait for it.
                    tracing::debug!(interface = %port.interface.name, %error, "cannot send");
                }
                if port.outgoing.is_empty() {
                    break;
                }
            }
            self.lost += port.outgoing.len() as u64;
            let unsent = port.outgoing.drain(..);
            self.free.extend(unsent.map(|descriptor| self.frames.beginning(descriptor.address)));
        }
        self.reclaim();
    }

    fn waiting(&mut self) -> usize {
        self.ports.iter().map(|port| port.socket.waiting()).sum()
    }

    fn is_past(&self, _mark: &Mark) -> bool {
        self.drained
    }

    fn lost(&self) -> u64 {
        let ports = self.ports.iter().map(|port| port.socket.lost().unwrap_or(0));
        self.lost + self.routed.lost + ports.sum::<u64>()
    }

    fn take_unrouted(&mut self) -> Vec<Vec<u8>> {
        self.routed.take_unrouted()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.ports.iter().map(|port| port.socket.as_fd()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_finds_as_many_frames_as_it_takes_and_no_more() {
        let mut fill = Fill::default();
        assert_eq!(fill.lacking(0), FILL, "at first all");
        // One batch is taken at a time: a smaller number is enough, and then a still smaller one.
        for _ in 0..10 * ENOUGH {
            fill.lacking(fill.wanted - 1);
        }
        assert_eq!(
            (fill.wanted, fill.lacking(FILL_MIN - BATCH + 1), fill.lacking(FILL_MIN - BATCH)),
            (256, 0, 64)
        );
        // A burst.
        assert_eq!(fill.lacking(FILL_MIN / 2 - 1), 2 * FILL_MIN - (FILL_MIN / 2 - 1));
        for _ in 0..8 {
            fill.lacking(0);
        }
        assert_eq!(fill.wanted, FILL, "never more than there are");
        // A number that is needed now and then is kept.
        for _ in 0..10 * ENOUGH {
            fill.lacking(FILL - 1);
            fill.lacking(FILL * 2 / 3);
        }
        assert_eq!(fill.wanted, FILL);
    }

    #[test]
    fn a_line_that_rests_may_bring_anything() {
        let mut fill = Fill { wanted: FILL_MIN, enough: 0, idle: 0 };
        for count in [0, 0, 0, 1, 0, 0, 0] {
            fill.came(count);
            assert_eq!(fill.wanted, FILL_MIN);
        }
        fill.came(0);
        assert_eq!(fill.wanted, FILL);
    }
}
