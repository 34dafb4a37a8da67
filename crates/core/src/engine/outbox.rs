//! Packets of the engine's own making, waiting to be taken: built behind each other in one buffer that is used again.

use super::checksum::Sum;
use super::config::Hop;
use super::packet::{TCP, Tuple, put};
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
        let v4 = to.remote.is_v4();
        let length = TCP_HEADER + options.len() + payload.len();
        let total = length + if v4 { 20 } else { 40 };
        let (start, fits) = (self.bytes.len(), u16::try_from(total).is_ok());
        if !fits || start + total > MAX_BYTES {
            self.refused += 1;
            return;
        }
        let addresses = to.remote.sum().add(to.local.sum());
        let tcp = tcp(segment, addresses, length as u32);
        if v4 {
            let mut head = [0; 40];
            head[..20].copy_from_slice(&ipv4(to, addresses, total as u16));
            head[20..].copy_from_slice(&tcp);
            self.bytes.extend_from_slice(&head);
        } else {
            self.bytes.extend_from_slice(&ipv6(to, length as u16));
            self.bytes.extend_from_slice(&tcp);
        }
        if !options.is_empty() {
            self.bytes.extend_from_slice(options);
        }
        if !payload.is_empty() {
            self.bytes.extend_from_slice(payload);
        }
        self.packets.push((start, self.bytes.len(), segment.hop));
    }
}

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// The header of a packet of `total` bytes; `addresses` is the sum of both.
fn ipv4(to: Tuple, addresses: Sum, total: u16) -> [u8; 20] {
    let [high, low] = total.to_be_bytes();
    let ttl_protocol = u16::from_be_bytes([TTL, TCP]);
    let [c0, c1] = addresses.u16(0x4500).u16(total).u16(0x4000).u16(ttl_protocol).checksum().to_be_bytes();
    let [s0, s1, s2, s3] = to.local.v4_bits().to_be_bytes();
    let [d0, d1, d2, d3] = to.remote.v4_bits().to_be_bytes();
    // "Don't fragment", so the identification need not differ (RFC 6864).
    [0x45, 0, high, low, 0, 0, 0x40, 0, TTL, TCP, c0, c1, s0, s1, s2, s3, d0, d1, d2, d3]
}

/// The header in front of `length` bytes.
fn ipv6(to: Tuple, length: u16) -> [u8; 40] {
    let mut head = [0; 40];
    let [high, low] = length.to_be_bytes();
    put(&mut head, 0, &[0x60, 0, 0, 0, high, low, TCP, TTL]);
    put(&mut head, 8, &to.local.v6_bytes());
    put(&mut head, 24, &to.remote.v6_bytes());
    head
}

/// The header, with the checksum of the whole segment of `length` bytes.
fn tcp(segment: &Segment<'_>, addresses: Sum, length: u32) -> [u8; TCP_HEADER] {
    let Segment { to, seq, ack, flags, window, options, payload, .. } = *segment;
    let offset = ((5 + options.len() / 4) as u8) << 4;
    let sum = addresses.u16(u16::from(TCP)).u32(length).u32(to.ports).u32(seq.0).u32(ack.0);
    let sum = sum.u16(u16::from_be_bytes([offset, flags])).u16(window);
    let sum = if options.is_empty() { sum } else { sum.add(Sum::ZERO.bytes(options)) };
    let sum = if payload.is_empty() { sum } else { sum.add(Sum::ZERO.bytes(payload)) };
    let [p0, p1] = to.local_port().to_be_bytes();
    let [p2, p3] = to.remote_port().to_be_bytes();
    let [s0, s1, s2, s3] = seq.0.to_be_bytes();
    let [a0, a1, a2, a3] = ack.0.to_be_bytes();
    let [w0, w1] = window.to_be_bytes();
    let [c0, c1] = sum.checksum().to_be_bytes();
    [p0, p1, p2, p3, s0, s1, s2, s3, a0, a1, a2, a3, offset, flags, w0, w1, c0, c1, 0, 0]
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
