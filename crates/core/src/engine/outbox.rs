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
        let length = TCP_HEADER + options.len() + payload.len();
        let total = length + if to.remote.is_v4() { 20 } else { 40 };
        let (start, fits) = (self.bytes.len(), u16::try_from(total).is_ok());
        if !fits || start + total > MAX_BYTES {
            self.refused += 1;
            return;
        }
        if to.remote.is_v4() {
            self.bytes.extend_from_slice(&ipv4(to, total as u16));
        } else {
            self.bytes.extend_from_slice(&ipv6(to, length as u16));
        }
        let mut head = tcp(segment);
        let pseudo = to.remote.sum().add(to.local.sum()).u16(u16::from(TCP)).u32(length as u32);
        let sum = pseudo.bytes(&head).add(Sum::ZERO.bytes(options)).add(Sum::ZERO.bytes(payload));
        put(&mut head, 16, &sum.checksum().to_be_bytes());
        self.bytes.extend_from_slice(&head);
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

/// The header of a packet of `total` bytes.
fn ipv4(to: Tuple, total: u16) -> [u8; 20] {
    let mut head = [0; 20];
    let [high, low] = total.to_be_bytes();
    // "Don't fragment", so the identification need not differ (RFC 6864).
    put(&mut head, 0, &[0x45, 0, high, low, 0, 0, 0x40, 0, TTL, TCP]);
    put(&mut head, 12, &to.local.v4_bits().to_be_bytes());
    put(&mut head, 16, &to.remote.v4_bits().to_be_bytes());
    let checksum = Sum::ZERO.bytes(&head).checksum();
    put(&mut head, 10, &checksum.to_be_bytes());
    head
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

/// The header without its checksum.
fn tcp(segment: &Segment<'_>) -> [u8; TCP_HEADER] {
    let mut head = [0; TCP_HEADER];
    put(&mut head, 0, &segment.to.local_port().to_be_bytes());
    put(&mut head, 2, &segment.to.remote_port().to_be_bytes());
    put(&mut head, 4, &segment.seq.0.to_be_bytes());
    put(&mut head, 8, &segment.ack.0.to_be_bytes());
    put(&mut head, 12, &[((5 + segment.options.len() / 4) as u8) << 4, segment.flags]);
    put(&mut head, 14, &segment.window.to_be_bytes());
    head
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
