//! How the kernel takes over a connection while some of its packets are still in user space.
//!
//! If the kernel forwarded a packet while an earlier one still waits here, it would overtake that one. So the programs
//! count, for each side, the segments with payload that they leave to us ([`Seen::to_user`](sidetrack_sys::bpf::Seen)).
//! They count each segment once it is in our socket. We store the counts of a moment, and how many frames had come to our
//! sockets by then. These frames include all counted segments. When all of them are taken and sent on, we tell the
//! programs how many segments are done. If the programs have left no more than this number to us when the side's next
//! segment comes, they take that one and all later ones.
//!
//! With a sender that never pauses, that moment would not come: each batch that we forward makes it send more. But it
//! pauses when it receives no acknowledgement. So acknowledgements without payload wait here until the other side's
//! segments belong to the kernel, or the last of those segments was sent on. That takes some microseconds, once. They may
//! overtake each other, because an old acknowledgement tells its receiver nothing new.

use super::driver::{Arrived, Mark};
use super::offload::Offload;
use super::strays::Stray;
use sidetrack_core::engine::OffloadId;
use sidetrack_core::engine::packet::flags;
use sidetrack_core::time::Instant;
use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Longest wait of an acknowledgement. After that, user space keeps the connection for a while: neither side pauses.
const HELD: Duration = Duration::from_millis(20);

/// Most acknowledgements of a connection that wait.
const HELD_MAX: usize = 1024;

/// Both ends of a packet: sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ends {
    pub from: SocketAddr,
    pub to: SocketAddr,
}

/// Connections that the kernel is about to take over.
#[derive(Debug, Default)]
pub(super) struct Joining {
    /// The connection and the side, by both ends of the packets from that side.
    ends: HashMap<Ends, (OffloadId, usize)>,
    flows: HashMap<OffloadId, Flow>,
    /// Connections for which something happened since their counts were stored.
    stirred: BTreeSet<OffloadId>,
    /// The counts stored last.
    remembered: Option<Remembered>,
    /// Acknowledgements that need not wait any longer.
    free: Vec<Stray>,
}

/// How many segments the programs had left to us at some time, for each connection, and how many frames had come by then.
#[derive(Debug)]
struct Remembered {
    mark: Mark,
    to_user: Vec<(OffloadId, [u32; 2])>,
}

#[derive(Debug)]
struct Flow {
    ends: [Ends; 2],
    /// Acknowledgements that wait. `since` is the arrival of the first one.
    held: Vec<Stray>,
    since: Instant,
}

impl Ends {
    /// Returns the ends of a packet that is an acknowledgement without payload and other flags.
    fn of_acknowledgement(packet: &[u8]) -> Option<Self> {
        let (from, to, tcp, end): (IpAddr, IpAddr, usize, usize) = match packet.first()? >> 4 {
            4 => {
                let [from, to] = [12, 16].map(|at| packet.get(at..at + 4)?.first_chunk::<4>());
                let end = u16::from_be_bytes(*packet.get(2..4)?.first_chunk()?);
                ((*from?).into(), (*to?).into(), usize::from(packet.first()? & 0xf) * 4, end.into())
            }
            _ => {
                let [from, to] = [8, 24].map(|at| packet.get(at..at + 16)?.first_chunk::<16>());
                let end = u16::from_be_bytes(*packet.get(4..6)?.first_chunk()?);
                ((*from?).into(), (*to?).into(), 40, usize::from(end) + 40)
            }
        };
        let header: &[u8; 14] = packet.get(tcp..)?.first_chunk()?;
        let length = usize::from(header[12] >> 4) * 4;
        if tcp + length != end || header[13] & !flags::PSH != flags::ACK {
            return None;
        }
        let port = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        Some(Self { from: SocketAddr::new(from, port(0)), to: SocketAddr::new(to, port(2)) })
    }
}

impl Joining {
    /// Adds a connection, unless it is already here. `ends` are the ends of its packets, the client's first.
    pub(super) fn add(&mut self, to: OffloadId, ends: [Ends; 2]) {
        if self.flows.contains_key(&to) {
            return;
        }
        for (side, ends) in ends.into_iter().enumerate() {
            self.ends.insert(ends, (to, side));
        }
        self.flows.insert(to, Flow { ends, held: Vec::new(), since: Instant::ZERO });
        self.stirred.insert(to);
    }

    /// Removes a connection that the kernel has taken over or will not take over.
    pub(super) fn remove(&mut self, to: OffloadId) {
        if let Some(flow) = self.flows.remove(&to) {
            for ends in flow.ends {
                self.ends.remove(&ends);
            }
            self.free.extend(flow.held);
        }
        self.stirred.remove(&to);
    }

    /// Notes that something may have happened to every connection.
    pub(super) fn stir_all(&mut self) {
        self.stirred.extend(self.flows.keys());
    }

    /// Notes that something happened to this connection.
    pub(super) fn stir(&mut self, to: OffloadId) {
        if self.flows.contains_key(&to) {
            self.stirred.insert(to);
        }
    }

    /// True if there is something to do before the next packet comes.
    pub(super) fn is_busy(&self) -> bool {
        !self.stirred.is_empty() || self.remembered.is_some() || !self.free.is_empty()
    }

    /// Stores an acknowledgement. Returns false if it must not wait.
    fn hold(&mut self, to: OffloadId, arrived: &Arrived<'_>, now: Instant) -> bool {
        let Some(flow) = self.flows.get_mut(&to).filter(|flow| flow.held.len() < HELD_MAX) else {
            return false;
        };
        if flow.held.is_empty() {
            flow.since = now;
        }
        let (packet, hop, checksums) = (arrived.packet.to_vec(), arrived.hop, arrived.checksums);
        flow.held.push(Stray { packet, hop, checksums });
        self.stirred.insert(to);
        true
    }
}

impl Offload {
    /// Stores how many segments the programs have left to us, and how many frames have come. To be called before frames
    /// are taken.
    pub(super) fn remember(&mut self, mark: impl FnOnce() -> Mark) {
        if self.joining.remembered.is_some() || self.joining.stirred.is_empty() {
            return;
        }
        let stirred = std::mem::take(&mut self.joining.stirred);
        let mut to_user = |to| Some((to, self.given_to_user(to)?.map(|(to_user, _)| to_user)));
        let to_user = stirred.into_iter().filter_map(&mut to_user).collect();
        // The mark is read after the counts. A program counts a segment only once it is in our socket, so the mark covers
        // all counted ones.
        self.joining.remembered = Some(Remembered { mark: mark(), to_user });
    }

    /// True if a packet must wait: an acknowledgement to a side whose segments the kernel does not handle yet.
    pub(super) fn holds(&mut self, arrived: &Arrived<'_>, now: Instant) -> bool {
        if self.joining.flows.is_empty() {
            return false;
        }
        let Some(ends) = Ends::of_acknowledgement(arrived.packet) else { return false };
        let Some((to, side)) = self.joining.ends.get(&ends).copied() else { return false };
        let other = self.given_to_user(to).map(|to_user| if side == 0 { to_user[1] } else { to_user[0] });
        other.is_some_and(|(_, joined)| !joined) && self.joining.hold(to, arrived, now)
    }

    /// Tells the programs what is done, if all frames up to the stored mark were taken. To be called after everything was
    /// sent. Returns the packets that have waited and must be handled now.
    pub(super) fn carry_on(&mut self, is_past: impl FnOnce(&Mark) -> bool, now: Instant) -> Vec<Stray> {
        if let Some(Remembered { to_user, .. }) =
            self.joining.remembered.take_if(|remembered| is_past(&remembered.mark))
        {
            for (to, to_user) in to_user {
                self.tell(to, to_user, now);
            }
        }
        std::mem::take(&mut self.joining.free)
    }

    fn tell(&mut self, to: OffloadId, to_user: [u32; 2], now: Instant) {
        let Some(after) = self.told(to, to_user) else { return };
        if after.iter().all(|(_, joined)| *joined) {
            return self.has_joined(to);
        }
        let Some(flow) = self.joining.flows.get_mut(&to) else { return };
        if flow.held.is_empty() {
            return;
        }
        if after.map(|(to_user, _)| to_user) == to_user {
            // No segment of the sender is left in user space: the kernel handles what it sends next.
            self.joining.free.append(&mut flow.held);
        } else if flow.since + HELD <= now {
            self.take_back(to, now);
        } else {
            self.joining.stirred.insert(to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::engine::{Checksums, Hop};

    fn packet(v6: bool, flag: u8, payload: usize) -> Vec<u8> {
        let mut packet = vec![0; if v6 { 40 } else { 20 } + 20 + payload];
        let length = packet.len() as u16;
        if v6 {
            packet[0] = 0x60;
            packet[4..6].copy_from_slice(&(length - 40).to_be_bytes());
            packet[23] = 1;
            packet[39] = 2;
        } else {
            packet[0] = 0x45;
            packet[2..4].copy_from_slice(&length.to_be_bytes());
            packet[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        }
        let tcp = packet.len() - payload - 20;
        packet[tcp + 1] = 7;
        packet[tcp + 3] = 80;
        packet[tcp + 12] = 0x50;
        packet[tcp + 13] = flag;
        packet
    }

    #[test]
    fn only_an_acknowledgement_and_nothing_else_is_one() {
        let ends = |from: &str, to: &str| Some(Ends { from: from.parse().unwrap(), to: to.parse().unwrap() });
        assert_eq!(Ends::of_acknowledgement(&packet(false, 0x10, 0)), ends("10.0.0.1:7", "10.0.0.2:80"));
        assert_eq!(Ends::of_acknowledgement(&packet(true, 0x18, 0)), ends("[::1]:7", "[::2]:80"));
        for (flag, payload) in [(0x11, 0), (0x12, 0), (0x14, 0), (0x10, 1), (0, 0)] {
            for v6 in [false, true] {
                assert_eq!(Ends::of_acknowledgement(&packet(v6, flag, payload)), None, "{flag} {payload}");
            }
        }
        for v6 in [false, true] {
            let whole = packet(v6, 0x10, 0);
            for end in 0..whole.len() - 6 {
                assert_eq!(Ends::of_acknowledgement(&whole[..end]), None, "cut at {end}");
            }
        }
    }

    #[test]
    fn what_was_held_is_freed_when_the_connection_leaves() {
        let mut joining = Joining::default();
        let to = OffloadId(std::num::NonZeroU32::MIN);
        let ends = Ends::of_acknowledgement(&packet(false, 0x10, 0)).unwrap();
        joining.add(to, [ends, Ends { from: ends.to, to: ends.from }]);
        let mut bytes = packet(false, 0x10, 0);
        let arrived = Arrived { packet: &mut bytes, hop: Hop(1), checksums: Checksums::Verify };
        for _ in 0..HELD_MAX {
            assert!(joining.hold(to, &arrived, Instant::ZERO));
        }
        assert!(!joining.hold(to, &arrived, Instant::ZERO), "the bound");
        joining.remove(to);
        assert_eq!((joining.free.len(), joining.ends.len(), joining.stirred.len()), (HELD_MAX, 0, 0));
        assert!(!joining.hold(to, &arrived, Instant::ZERO));
    }
}
