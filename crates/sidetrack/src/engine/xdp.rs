//! Frames by AF_XDP: rewritten where they came in, sent from there. One socket for each interface, all over the same memory.

use super::driver::{Arrived, Driver, Mark};
use super::hops::{self, ETHERNET, ROUTED};
use super::open::Interface;
use sidetrack_core::engine::packet::Ip;
use sidetrack_core::engine::{Checksums, Hop};
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_sys::xsk::{Descriptor, FrameSize, HEADROOM, RING_ENTRIES, Umem, XskSocket};
use std::hint::black_box;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Frames that are handled together: as many as have their connections brought into the cache at once.
const BATCH: usize = 64;
/// Frames that the kernel always finds to fill, of each interface: what may come while a batch is handled, or while another
/// process has the CPU for a moment.
const FILL: usize = 2048;
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

/// The frames that take IP packets of so many bytes, at most [`MTU_MAX`].
pub fn frame_size(mtu: u32) -> FrameSize {
    FrameSize::holding(mtu as usize + ETHERNET + TAGS).unwrap_or_default()
}

/// Frames that one worker needs for so many interfaces.
pub const fn frames(interfaces: usize) -> usize {
    interfaces * (FILL + WAITING) + OWN
}

/// See the module.
#[derive(Debug)]
pub struct XdpDriver {
    ports: Vec<Port>,
    routed: RoutedSocket,
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
}

impl XdpDriver {
    /// Over these sockets, one for each interface, which share `umem`.
    pub fn new(umem: &Arc<Umem>, sockets: Vec<(Interface, XskSocket)>, routed: RoutedSocket) -> Self {
        let port = |(interface, socket)| Port { interface, socket, outgoing: Vec::new() };
        let mut driver = Self {
            ports: sockets.into_iter().map(port).collect(),
            routed,
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
            let lacking = FILL.saturating_sub(port.socket.to_fill());
            // Not for a handful: each time moves an index that the kernel reads.
            if lacking < BATCH {
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
        let sent = Ip::parse(packet).ok().map(|ip| self.routed.send(packet, ip.dst.into()));
        if !matches!(sent, Some(Ok(()))) {
            self.lost += 1;
        }
    }
}

impl Driver for XdpDriver {
    fn receive(&mut self) -> io::Result<usize> {
        // Whoever had the last batch may have met a fault in the middle of it.
        self.reclaim();
        self.finished();
        self.refill();
        for _ in 0..self.ports.len() {
            self.from = self.turn;
            self.turn = (self.turn + 1) % self.ports.len();
            let Some(port) = self.ports.get_mut(self.from) else { continue };
            self.count = port.socket.receive(&mut self.taken);
            self.drained = self.count == 0;
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
        self.lost + ports.sum::<u64>()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.ports.iter().map(|port| port.socket.as_fd()).collect()
    }
}
