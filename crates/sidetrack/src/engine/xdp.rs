//! Frames by AF_XDP: rewritten where they came in, sent from there. One socket for each interface, all over the same memory.

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

/// Frames that are handled together: as many as have their connections brought into the cache at once.
const BATCH: usize = 64;
/// Frames that the kernel finds to fill, of each interface: what may come while a batch is handled, or while another process has
/// the CPU for a moment. The kernel takes them in turn, so few of them stay in the cache; how many is found out by how low
/// their number falls, see [`Fill`].
const FILL: usize = 2048;
const FILL_MIN: usize = 256;
/// Refills in a row that find more than three quarters: fewer will do.
const ENOUGH: u32 = 1024;
/// Visits in a row without any frame: then a burst of any size may follow.
const IDLE: u32 = 4;
/// Frames of each interface that may wait to be handled besides.
const WAITING: usize = 4096;
/// Frames that are never given to be filled: for packets of the engine's own, and those on their way out.
const OWN: usize = RING_ENTRIES as usize;
/// Shortest Ethernet frame without its checksum.
const SHORTEST: usize = 60;
/// Bytes of VLAN tags and the like around an IP packet, besides its Ethernet header.
const TAGS: usize = 64;

/// Largest IP packet that fits a frame.
pub const MTU_MAX: u32 = (FrameSize::Page.bytes() - HEADROOM - ETHERNET - TAGS) as u32;

/// Returns the frame size that holds an IP packet of `mtu` bytes, at most [`MTU_MAX`].
pub fn frame_size(mtu: u32) -> FrameSize {
    FrameSize::holding(mtu as usize + ETHERNET + TAGS).unwrap_or_default()
}

/// Returns how many frames one worker needs for this number of interfaces.
pub const fn frames(interfaces: usize) -> usize {
    interfaces * (FILL + WAITING) + OWN
}

/// The driver over AF_XDP sockets.
#[derive(Debug)]
pub struct XdpDriver {
    ports: Vec<Port>,
    routed: Routed,
    taken: [Descriptor; BATCH],
    /// Frames of those that are on their way out again.
    gone: u64,
    count: usize,
    from: usize,
    turn: usize,
    frames: FrameSize,
    free: Vec<u64>,
    /// The last time there were no frames to be taken.
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

/// How many frames the kernel is to find.
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
    /// Returns how many frames the kernel gets when it has `left` of them.
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
        // Not for a handful: each time moves an index that the kernel reads.
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
    /// Over these sockets, one for each interface, which share `umem`.
    pub fn new(umem: &Arc<Umem>, sockets: Vec<(Interface, XskSocket)>, routed: RoutedSocket) -> Self {
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

    /// Gives the kernel frames to fill: it has enough of them however many wait to be handled.
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

    /// Takes back what was sent.
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

    /// Frames of the last batch that went nowhere are free again.
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
        // A fault may have stopped the worker in the middle of the last batch: its frames are still taken.
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
                    // The kernel wrote them on another processor perhaps: all are read at the same time, not one after the other.
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
        // Behind a short packet there may be what the sender padded it with; there is always room for it.
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
            // What finds no room at first may find some when the kernel has been woken.
            for _ in 0..2 {
                let sent = port.socket.send(&port.outgoing);
                port.outgoing.drain(..sent);
                if let Err(error) = port.socket.wake() {
                    // The interface is down; what is queued waits for it.
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
        // A batch at a time is taken: fewer do, and then fewer still.
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
        // What it now and then comes near to is kept.
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
