//! Packets of the engine's own making, waiting to be taken: built behind each other in one buffer that is used again.

use super::checksum::Sum;
use super::config::Hop;
use super::packet::{TCP, Tuple};
use super::seq::Seq;

/// Most bytes that wait; what a full outbox refuses is lost as on a full link, and sent again by whoever waits for it.
const MAX_BYTES: usize = 1 << 20;

/// Time to live of our own packets (RFC 1700's recommendation, still everybody's default).
const TTL: u8 = 64;

/// A segment to build.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    /// The connection as its receiver sends on it: `remote` is where this goes.
    pub(super) to: Tuple,
    pub(super) hop: Hop,
    pub(super) seq: Seq,
    pub(super) ack: Seq,
    pub(super) flags: u8,
    pub(super) window: u16,
    /// A multiple of 4 bytes, at most 40.
    pub(super) options: &'a [u8],
    pub(super) payload: &'a [u8],
}

/// The packets.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    packets: Vec<(usize, usize, Hop)>,
    taken: usize,
    /// Packets that found no room.
    pub(super) refused: u64,
}

impl Outbox {
    /// The next packet to send; when there is none left, the buffer is used from its beginning again.
    pub(super) fn poll(&mut self) -> Option<(&[u8], Hop)> {
        let Some(&(start, end, hop)) = self.packets.get(self.taken) else {
            self.bytes.clear();
            self.packets.clear();
            self.taken = 0;
            return None;
        };
        self.taken += 1;
        self.bytes.get(start..end).map(|bytes| (bytes, hop))
    }

    /// Builds a TCP segment with all its checksums.
    pub(super) fn segment(&mut self, segment: &Segment<'_>) {
        let Segment { to, options, payload, .. } = *segment;
        let length = 20 + options.len() + payload.len();
        let Some(start) = self.begin(to, length, TCP, segment.hop) else { return };
        let tcp = self.bytes.len();
        self.bytes.extend_from_slice(&to.local_port().to_be_bytes());
        self.bytes.extend_from_slice(&to.remote_port().to_be_bytes());
        self.bytes.extend_from_slice(&segment.seq.0.to_be_bytes());
        self.bytes.extend_from_slice(&segment.ack.0.to_be_bytes());
        self.bytes.extend_from_slice(&[((5 + options.len() / 4) as u8) << 4, segment.flags]);
        self.bytes.extend_from_slice(&segment.window.to_be_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(options);
        self.bytes.extend_from_slice(payload);
        let pseudo = to.remote.sum().add(to.local.sum()).u16(u16::from(TCP)).u32(length as u32);
        let checksum = pseudo.bytes(self.bytes.get(tcp..).unwrap_or_default()).checksum();
        super::packet::put(&mut self.bytes, tcp + 16, &checksum.to_be_bytes());
        self.packets.push((start, self.bytes.len(), segment.hop));
    }

    /// Writes the IP header for `length` bytes of `protocol`; none if there is no room or they fit no IP packet.
    fn begin(&mut self, to: Tuple, length: usize, protocol: u8, _hop: Hop) -> Option<usize> {
        let start = self.bytes.len();
        let total = u16::try_from(length + 20).ok();
        let (Some(total), true) = (total, start + length + 40 <= MAX_BYTES) else {
            self.refused += 1;
            return None;
        };
        if to.remote.is_v4() {
            let [high, low] = total.to_be_bytes();
            // "Don't fragment", so the identification need not differ (RFC 6864).
            let head = [0x45, 0, high, low, 0, 0, 0x40, 0, TTL, protocol, 0, 0];
            let sum = Sum::ZERO.bytes(&head).add(to.local.sum()).add(to.remote.sum());
            let checksum = sum.checksum().to_be_bytes();
            self.bytes.extend_from_slice(head.get(..10).unwrap_or_default());
            self.bytes.extend_from_slice(&checksum);
            self.bytes.extend_from_slice(&to.local.v4_bits().to_be_bytes());
            self.bytes.extend_from_slice(&to.remote.v4_bits().to_be_bytes());
        } else {
            let [high, low] = (total - 20).to_be_bytes();
            self.bytes.extend_from_slice(&[0x60, 0, 0, 0, high, low, protocol, TTL]);
            self.bytes.extend_from_slice(&to.local.v6_bytes());
            self.bytes.extend_from_slice(&to.remote.v6_bytes());
        }
        Some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::packet::{Checksums, Header, Ip, flags};

    #[test]
    fn what_is_built_parses_and_its_checksums_hold() {
        for (remote, local) in [("10.0.0.1:1", "10.0.0.2:80"), ("[2001:db8::1]:1", "[2001:db8::2]:80")] {
            let to = Tuple::new(remote.parse().unwrap(), local.parse().unwrap());
            let mut outbox = Outbox::default();
            let options = crate::engine::options::Written::timestamps(1, 2);
            for payload in [&b""[..], b"odd", b"even"] {
                outbox.segment(&Segment {
                    to,
                    hop: Hop(9),
                    seq: Seq(1),
                    ack: Seq(2),
                    flags: flags::ACK,
                    window: 3,
                    options: options.as_slice(),
                    payload,
                });
                let (bytes, hop) = outbox.poll().unwrap();
                let ip = Ip::parse(bytes).unwrap();
                let header = Header::parse(bytes, &ip, Checksums::Verify).unwrap();
                assert_eq!((header.payload(bytes), hop, header.window), (payload, Hop(9), 3));
                assert_eq!(header.tuple, Tuple::new(local.parse().unwrap(), remote.parse().unwrap()));
                assert!(outbox.poll().is_none());
            }
        }
    }

    #[test]
    fn it_is_bounded() {
        let to = Tuple::new("10.0.0.1:1".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        let mut outbox = Outbox::default();
        let payload = [0; 1400];
        for _ in 0..2000 {
            let (seq, ack) = (Seq(1), Seq(2));
            outbox.segment(&Segment {
                to,
                hop: Hop(0),
                seq,
                ack,
                flags: 0,
                window: 0,
                options: &[],
                payload: &payload,
            });
        }
        assert!(outbox.refused > 0 && outbox.bytes.len() <= MAX_BYTES);
    }
}
