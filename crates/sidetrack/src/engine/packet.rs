//! The driver for packet sockets, one for each interface.

use super::driver::{Arrived, Driver, Mark, Routed};
use super::hops::{self, ETHERNET, ROUTED};
use super::open::Interface;
use sidetrack_core::engine::{Checksums, Hop};
use sidetrack_sys::raw::{BATCH, FrameChecksum, Frames, PacketSocket, RoutedSocket, VNET_HEADER_BYTES};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};

/// A frame to send by one interface.
#[derive(Clone, Copy, Debug)]
enum Outgoing {
    /// A received frame, and its present length with the header.
    Forwarded(usize, usize),
    /// A range of bytes in `made`.
    Made(usize, usize),
}

/// The driver over packet sockets.
#[derive(Debug)]
pub(super) struct PacketDriver {
    ports: Vec<Port>,
    routed: Routed,
    frames: Frames,
    /// The interface of the current frames, and the interface that is read first next time.
    from: usize,
    turn: usize,
    /// Packets that the engine itself built, each as a frame with its header.
    made: Vec<u8>,
    lost: u64,
}

#[derive(Debug)]
struct Port {
    interface: Interface,
    socket: PacketSocket,
    outgoing: Vec<Outgoing>,
    /// The number of frames that the kernel has put into the socket, and that were taken from it.
    come: u64,
    taken: u64,
    /// The last visit left frames behind, as it seems.
    full: bool,
}

impl Port {
    /// Asks the kernel how many frames have come. Returns how many it has dropped since the last time.
    fn count(&mut self) -> u64 {
        let Ok(counts) = self.socket.counts() else { return 0 };
        self.come += u64::from(counts.come);
        u64::from(counts.dropped)
    }
}

impl PacketDriver {
    /// Returns a driver for these sockets, one for each interface.
    pub(super) fn new(sockets: Vec<(Interface, PacketSocket)>, routed: RoutedSocket) -> Self {
        let port = |(interface, socket)| Port {
            interface,
            socket,
            outgoing: Vec::new(),
            come: 0,
            taken: 0,
            full: false,
        };
        let ports = sockets.into_iter().map(port).collect();
        let routed = Routed::new(routed);
        Self { ports, routed, frames: Frames::default(), from: 0, turn: 0, made: Vec::new(), lost: 0 }
    }

    /// Sends a packet by the kernel's route.
    fn route(&mut self, packet: &[u8]) {
        self.routed.send(packet);
    }
}

impl Driver for PacketDriver {
    fn receive(&mut self) -> io::Result<usize> {
        for _ in 0..self.ports.len() {
            self.from = self.turn;
            self.turn = (self.turn + 1) % self.ports.len();
            let Some(port) = self.ports.get_mut(self.from) else { continue };
            let count = match port.socket.receive(&mut self.frames) {
                // The interface may come up again; meanwhile the others have work.
                Err(error) if error.raw_os_error() == Some(ENETDOWN) => 0,
                result => result?,
            };
            port.taken += count as u64;
            port.full = count == BATCH;
            if count > 0 {
                return Ok(count);
            }
        }
        Ok(0)
    }

    fn arrived(&mut self, frame: usize) -> Option<Arrived<'_>> {
        let (checksum, bytes) = self.frames.frame(frame);
        let hop = hops::hop(self.from, hops::sender(bytes)?);
        let checksums = match checksum {
            FrameChecksum::Unknown => Checksums::Verify,
            FrameChecksum::Valid => Checksums::Verified,
            FrameChecksum::Partial => Checksums::Partial,
        };
        Some(Arrived { packet: bytes.get_mut(ETHERNET..)?, hop, checksums })
    }

    fn forward(&mut self, frame: usize, len: usize, hop: Hop) {
        self.frames.clear_header(frame);
        let (_, bytes) = self.frames.frame(frame);
        let Some((header, packet)) = bytes.split_first_chunk_mut::<ETHERNET>() else { return };
        let Some((number, to)) = hops::neighbour(hop) else {
            let packet = packet.get(..len).unwrap_or_default().to_vec();
            return self.route(&packet);
        };
        let Some(port) = self.ports.get_mut(number) else { return };
        *header = hops::header(to, port.interface.address, packet);
        port.outgoing.push(Outgoing::Forwarded(frame, VNET_HEADER_BYTES + ETHERNET + len));
    }

    fn send(&mut self, packet: &[u8], hop: Hop) {
        if hop == ROUTED {
            return self.route(packet);
        }
        let Some((number, to)) = hops::neighbour(hop) else { return };
        let Some(port) = self.ports.get_mut(number) else { return };
        let start = self.made.len();
        self.made.extend_from_slice(&[0; VNET_HEADER_BYTES]);
        self.made.extend_from_slice(&hops::header(to, port.interface.address, packet));
        self.made.extend_from_slice(packet);
        port.outgoing.push(Outgoing::Made(start, self.made.len()));
    }

    fn flush(&mut self) {
        for port in &mut self.ports {
            let mut rest = port.outgoing.as_slice();
            while !rest.is_empty() {
                let (frames, made) = (&self.frames, &self.made);
                let bytes = |outgoing: &Outgoing| match *outgoing {
                    Outgoing::Forwarded(frame, len) => frames.with_header(frame).get(..len),
                    Outgoing::Made(start, end) => made.get(start..end),
                };
                let slices: Vec<_> = rest
                    .iter()
                    .take(BATCH)
                    .map(|outgoing| IoSlice::new(bytes(outgoing).unwrap_or_default()))
                    .collect();
                match port.socket.send(&slices) {
                    Ok(sent) if sent > 0 => rest = rest.get(sent..).unwrap_or_default(),
                    // The queue is full, or the first frame is rejected: it is lost, as on any link.
                    Ok(_) | Err(_) => {
                        self.lost += 1;
                        rest = rest.get(1..).unwrap_or_default();
                    }
                }
            }
            port.outgoing.clear();
        }
        self.made.clear();
    }

    fn mark(&mut self) -> Mark {
        let come = self.ports.iter_mut().map(|port| {
            self.lost += port.count();
            port.come
        });
        Mark(come.collect())
    }

    fn waiting(&mut self) -> usize {
        let full = self.ports.iter_mut().filter(|port| port.full);
        full.map(|port| {
            self.lost += port.count();
            usize::try_from(port.come.saturating_sub(port.taken)).unwrap_or(usize::MAX)
        })
        .sum()
    }

    fn is_past(&self, mark: &Mark) -> bool {
        self.ports.iter().zip(&mark.0).all(|(port, come)| port.taken >= *come)
    }

    fn lost(&self) -> u64 {
        self.lost + self.routed.lost
    }

    fn take_unrouted(&mut self) -> Vec<Vec<u8>> {
        self.routed.take_unrouted()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.ports.iter().map(|port| port.socket.as_fd()).collect()
    }
}

/// The error "network is down".
const ENETDOWN: i32 = 100;
