//! Packets that the engine itself builds. They wait one after another in a buffer that is used again and again.

use super::checksum::Sum;
use super::config::Hop;
use super::narrow::length;
use super::packet::{Address, TCP, Tuple};
use super::seq::Seq;

/// Most bytes that wait. A packet that does not fit is lost, as on a full link; its timer retransmits it.
const MAX_BYTES: usize = 1 << 20;

/// Time to live of our own packets (recommended by RFC 1700, still the usual default).
const TTL: u8 = 64;

/// A segment to build.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    /// The connection as its receiver sends on it: `remote` is the destination of this segment.
    pub(super) to: Tuple,
    pub(super) hop: Hop,
    pub(super) seq: Seq,
    pub(super) ack: Seq,
    pub(super) flags: u8,
    pub(super) window: u16,
    /// Four bytes each, most significant first; at most ten words.
    pub(super) options: &'a [u32],
    pub(super) payload: &'a [u8],
}

/// The packets that wait to be sent.
#[derive(Debug)]
pub(super) struct Outbox {
    /// Overwritten again and again, never cleared.
    bytes: Vec<u8>,
    used: usize,
    packets: Vec<(u32, u32, Hop)>,
    taken: usize,
    /// Packets that did not fit.
    pub(super) refused: u64,
}

impl Default for Outbox {
    fn default() -> Self {
        // Zeros: the kernel provides this memory only when it is first used.
        Self { bytes: vec![0; MAX_BYTES], used: 0, packets: Vec::new(), taken: 0, refused: 0 }
    }
}

impl Outbox {
    /// Returns the next packet to send. When there is none left, the buffer is used from its beginning again.
    #[inline]
    pub(super) fn poll(&mut self) -> Option<(&[u8], Hop)> {
        let Some(&(start, end, hop)) = self.packets.get(self.taken) else {
            self.packets.clear();
            (self.taken, self.used) = (0, 0);
            return None;
        };
        self.taken += 1;
        self.bytes.get(start as usize..end as usize).map(|bytes| (bytes, hop))
    }

    /// Builds a TCP segment with all its checksums.
    #[inline]
    pub(super) fn segment(&mut self, segment: &Segment<'_>) {
        let start = self.used;
        let Some(total) = self.write(segment) else { return };
        self.used += total;
        self.packets.push((length(start), length(start + total), segment.hop));
    }

    /// Builds a segment that is not queued, and returns it.
    pub(super) fn draft(&mut self, segment: &Segment<'_>) -> Option<&[u8]> {
        let start = self.used;
        let total = self.write(segment)?;
        self.bytes.get(start..start + total)
    }

    /// Builds a segment after the queued ones, and returns its length.
    #[inline]
    fn write(&mut self, segment: &Segment<'_>) -> Option<usize> {
        // Nothing that was just written is copied: see `Written` for the reason.
        let Segment { to, options, payload, .. } = segment;
        let v4 = to.remote.is_v4();
        let length = TCP_HEADER + options.len() * 4 + payload.len();
        let total = length + if v4 { 20 } else { 40 };
        let start = self.used;
        let room = self.bytes.get_mut(start..start + total);
        let (Some(room), Ok(whole), Ok(length)) = (room, u16::try_from(total), u16::try_from(length)) else {
            self.refused += 1;
            return None;
        };
        let addresses = to.remote.sum().add(to.local.sum());
        let tcp = if v4 {
            let (head, tcp) = room.split_first_chunk_mut()?;
            ipv4(head, to, addresses, whole);
            tcp
        } else {
            let (head, tcp) = room.split_first_chunk_mut()?;
            ipv6(head, to, length);
            tcp
        };
        self::tcp(tcp, segment, addresses, length.into());
        Some(total)
    }
}

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Writes the word at offset `$at`.
macro_rules! word {
    ($to:ident, $at:literal, $value:expr) => {
        $to[$at..$at + 4].copy_from_slice(&u32::to_be_bytes($value))
    };
}

/// Writes the IPv4 header of a packet of `total` bytes; `addresses` is the sum of both addresses.
#[inline]
fn ipv4(head: &mut [u8; 20], to: &Tuple, addresses: Sum, total: u16) {
    let ttl_protocol = u16::from_be_bytes([TTL, TCP]);
    let checksum = addresses.u16(0x4500).u16(total).u16(0x4000).u16(ttl_protocol).checksum();
    word!(head, 0, 0x4500_0000 | u32::from(total));
    // "Don't fragment" is set, so the identification need not differ (RFC 6864).
    word!(head, 4, 0x4000);
    word!(head, 8, u32::from(ttl_protocol) << 16 | u32::from(checksum));
    word!(head, 12, to.local.v4_bits());
    word!(head, 16, to.remote.v4_bits());
}

/// Writes the IPv6 header in front of `length` bytes.
fn ipv6(head: &mut [u8; 40], to: &Tuple, length: u16) {
    let address = |address: Address| address.v6_bytes();
    word!(head, 0, 0x6000_0000);
    word!(head, 4, u32::from(length) << 16 | u32::from(u16::from_be_bytes([TCP, TTL])));
    head[8..24].copy_from_slice(&address(to.local));
    head[24..40].copy_from_slice(&address(to.remote));
}

/// Writes the whole segment of `length` bytes, with its checksum.
#[inline]
fn tcp(into: &mut [u8], segment: &Segment<'_>, addresses: Sum, length: u32) {
    let Segment { to, seq, ack, flags, window, options, payload, .. } = segment;
    #[expect(clippy::cast_possible_truncation, reason = "a TCP header has at most 15 words")]
    let offset = ((5 + options.len()) as u8) << 4;
    let offset_flags = u16::from_be_bytes([offset, *flags]);
    let ports = to.ports.rotate_left(16);
    let mut sum = addresses.u16(u16::from(TCP)).u32(length).u32(ports).u32(seq.0).u32(ack.0);
    sum = sum.u16(offset_flags).u16(*window);
    let Some((head, rest)) = into.split_first_chunk_mut::<TCP_HEADER>() else { return };
    let (written, rest) = rest.split_at_mut((options.len() * 4).min(rest.len()));
    for (to, word) in written.as_chunks_mut::<4>().0.iter_mut().zip(*options) {
        *to = word.to_be_bytes();
        sum = sum.u32(*word);
    }
    if !payload.is_empty() {
        sum = sum.add(Sum::ZERO.bytes(payload));
        rest.copy_from_slice(payload);
    }
    word!(head, 0, ports);
    word!(head, 4, seq.0);
    word!(head, 8, ack.0);
    word!(head, 12, u32::from(offset_flags) << 16 | u32::from(*window));
    word!(head, 16, u32::from(sum.checksum()) << 16);
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
                    options: options.words(),
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
        assert!(outbox.refused > 0 && outbox.used <= MAX_BYTES);
    }
}
