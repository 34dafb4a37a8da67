//! Server handshakes that a program in XDP finishes: user space sends the SYN, the program takes the SYN-ACK
//! and sends the client's first bytes (`struct handshake` of `bpf/offload.h`).

use super::super::layout::engine::{FLOW_COMPLETING, flow as flow_at, flow_side, handshake as handshake_at};
use super::{OffloadMemory, OffloadPart, OffloadSide, Offloaded};
use sidetrack_core::engine::{Handshake, SynAck};
use sidetrack_core::time::Instant;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Bytes of an Ethernet header.
pub(super) const LINK_HEADER: usize = 14;
/// At most this many handshakes at once, of all workers: 8 MiB.
pub(super) const HANDSHAKES_MAX: u32 = 8192;

impl OffloadMemory {
    fn write_handshake(
        &self,
        number: u32,
        [client, server]: &[OffloadSide; 2],
        handshake: &Handshake<'_>,
        behind_ns: u64,
    ) {
        let at = |word| number as usize * handshake_at::SIZE + word;
        let Handshake { clock, acknowledges, shown, needs, packet, .. } = *handshake;
        let ethertype: [u8; 2] = if server.remote.is_ipv6() { [0x86, 0xdd] } else { [8, 0] };
        let [needs_low, needs_high] = needs.to_ne_bytes();
        let [stamps, sack, scale] =
            [handshake.timestamps, handshake.sack, handshake.window_scale].map(u8::from);
        self.handshakes.u64(at(handshake_at::BEHIND_NS)).store(behind_ns, Relaxed);
        for (word, value) in [
            (handshake_at::CLOCK, clock),
            (handshake_at::ACKNOWLEDGES, acknowledges),
            (handshake_at::SHOWN, shown),
            (handshake_at::STAMP, client.standing.stamp),
            (handshake_at::LENGTH, (packet.len() + LINK_HEADER) as u32),
            (handshake_at::NEEDS, u32::from_ne_bytes([needs_low, needs_high, stamps, sack])),
            (handshake_at::SCALE, u32::from(scale)),
        ] {
            self.handshakes.u32(at(word)).store(value, Relaxed);
        }
        // The Ethernet header has 14 bytes: two bytes of the packet complete its last word.
        let (first, rest) = packet.split_at(packet.len().min(2));
        let mut header = [0; LINK_HEADER + 2];
        header[..6].copy_from_slice(&server.to);
        header[6..12].copy_from_slice(&server.from);
        header[12..LINK_HEADER].copy_from_slice(&ethertype);
        header[LINK_HEADER..LINK_HEADER + first.len()].copy_from_slice(first);
        let (words, last) = rest.as_chunks::<4>();
        let mut end = [0; 4];
        end[..last.len()].copy_from_slice(last);
        let words = header.as_chunks::<4>().0.iter().chain(words).chain([&end]);
        for (word, bytes) in words.enumerate() {
            self.handshakes
                .u32(at(handshake_at::FRAME + word * 4))
                .store(u32::from_ne_bytes(*bytes), Relaxed);
        }
    }
}

impl OffloadPart {
    /// Leaves the handshake of a server that is about to get a SYN to a program in XDP: it takes the SYN-ACK
    /// if that is as expected, and the connection is offloaded from then on. `None` if there is no
    /// room. `behind_ns` is the monotonic clock minus the worker's time, nanoseconds.
    pub fn begin_handshake(
        &mut self,
        sides: &[OffloadSide; 2],
        handshake: &Handshake<'_>,
        behind_ns: u64,
    ) -> Option<Offloaded> {
        // The packet's last bytes may take one word more.
        if handshake.packet.len() > handshake_at::SIZE - handshake_at::FRAME - LINK_HEADER - 4 {
            return None;
        }
        if self.free.is_empty() {
            return None;
        }
        let number = self.free_handshakes.pop()?;
        self.whole.write_handshake(number, sides, handshake, behind_ns);
        self.offload_as(sides, Some(number))
    }

    /// Returns what the SYN-ACK said, if a program has taken it and sent the first bytes. Read this before
    /// anything else of the connection. `behind_ns` is as in [`OffloadPart::begin_handshake`].
    pub fn syn_ack(&mut self, offloaded: Offloaded, behind_ns: u64) -> Option<SynAck> {
        let at = offloaded.0 as usize * flow_at::SIZE;
        let flows = &self.whole.flows;
        while flows.u32(at).load(Acquire) == FLOW_COMPLETING {
            std::hint::spin_loop();
        }
        let at_ns = flows.u64(at + flow_at::CONNECTED_NS).load(Acquire);
        if at_ns == 0 {
            return None;
        }
        let number = flows.u32(at + flow_at::NUMBER).load(Acquire);
        self.free_handshake(offloaded);
        let server = |word| self.whole.read(offloaded.0, 1, word);
        let [low, high, shift, _] = server(flow_side::MSS).to_ne_bytes();
        let stamp = server(flow_side::STAMP_FIRST);
        let clock = stamp.wrapping_add(server(flow_side::STAMP_ADD));
        let at = Instant::from_nanos(at_ns.saturating_sub(behind_ns));
        Some(SynAck { number, mss: u16::from_ne_bytes([low, high]), shift, stamp, clock, at })
    }

    /// Frees the connection's place for a handshake, if it has one: the program has read it, or the connection was taken
    /// back.
    pub(super) fn free_handshake(&mut self, offloaded: Offloaded) {
        let handshake =
            self.whole.flows.u32(offloaded.0 as usize * flow_at::SIZE + flow_at::HANDSHAKE).swap(0, Relaxed);
        self.free_handshakes.extend(handshake.checked_sub(1));
    }
}
