//! Frames of a TAP: a virtio header, then Ethernet. A TCP super-frame stands for several frames of a wire. It can be
//! cut into smaller parts, as a network card does (virtio 1.2, 5.1.6.2; RFC 9293; RFC 791; RFC 8200).

use std::ops::Range;

use sidetrack_sys::tap::VNET_HEADER_BYTES;

use super::direction::Frame;

const ETHERNET_BYTES: usize = 14;
const IPV6_BYTES: usize = 40;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;

/// `flags` of the virtio header: the checksum covers only the pseudo header, and the receiver has to complete it.
const NEEDS_CHECKSUM: u8 = 1;
/// `gso_type`: TCP over IPv4, TCP over IPv6, and a bit that means that the TCP flag CWR is set.
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// A frame with its virtio header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapFrame {
    bytes: Vec<u8>,
    /// Length of the frame in `bytes`; the rest is unused memory of the pool's buffer.
    length: usize,
    segments: Option<Segments>,
}

/// The layout of a super-frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segments {
    is_v6: bool,
    /// Offset of the TCP header.
    tcp: usize,
    /// Offset of the payload.
    payload: usize,
    /// Payload bytes of each frame except the last, at least 1.
    size: usize,
    /// Payload bytes of all frames.
    total: usize,
}

impl TapFrame {
    /// Makes the frame in the first `length` bytes of `bytes`.
    #[must_use]
    pub fn new(bytes: Vec<u8>, length: usize) -> Self {
        let length = length.min(bytes.len());
        let segments = bytes.get(..length).and_then(Segments::of);
        Self { bytes, length, segments }
    }

    /// Returns the virtio header and the frame.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }

    /// Returns the memory, for a pool.
    #[must_use]
    pub fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }
}

impl Frame for TapFrame {
    fn wire_frames(&self) -> usize {
        self.segments.map_or(1, |segments| segments.total.div_ceil(segments.size).max(1))
    }

    fn wire_bytes(&self, index: usize) -> usize {
        let Some(segments) = self.segments else { return self.length.saturating_sub(VNET_HEADER_BYTES) };
        let payload = segments.total.saturating_sub(index * segments.size).min(segments.size);
        segments.payload - VNET_HEADER_BYTES + payload
    }

    fn cut(&self, range: Range<usize>) -> Option<Self> {
        if range == (0..self.wire_frames()) {
            return Some(Self::new(self.as_bytes().to_vec(), self.length));
        }
        let bytes = self.segments?.cut(self.as_bytes(), range)?;
        Some(Self::new(bytes, usize::MAX))
    }

    fn memory_bytes(&self) -> usize {
        self.bytes.len()
    }
}

impl Segments {
    /// Returns the layout; `None` unless it is a TCP super-frame that can be cut.
    fn of(bytes: &[u8]) -> Option<Self> {
        let (header, packet) = bytes.split_at_checked(VNET_HEADER_BYTES)?;
        let is_v6 = match header.get(1)? & !GSO_ECN {
            GSO_TCPV4 => false,
            GSO_TCPV6 => true,
            _ => return None,
        };
        let size = usize::from(u16::from_ne_bytes([*header.get(4)?, *header.get(5)?]));
        let ethertype = if is_v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
        let ip = packet.get(ETHERNET_BYTES..)?;
        let ip_bytes = if is_v6 { IPV6_BYTES } else { usize::from(ip.first()? & 15) * 4 };
        let protocol = *ip.get(if is_v6 { 6 } else { 9 })?;
        let tcp_bytes = usize::from(*ip.get(ip_bytes + 12)? >> 4) * 4;
        let tcp = VNET_HEADER_BYTES + ETHERNET_BYTES + ip_bytes;
        let payload = tcp + tcp_bytes;
        let total = bytes.len().checked_sub(payload)?;
        let fits = packet.get(12..14)? == ethertype && protocol == TCP && ip_bytes >= 20 && tcp_bytes >= 20;
        (fits && size > 0).then_some(Self { is_v6, tcp, payload, size, total })
    }

    /// Returns the frames `range` alone, with new headers: length, sequence numbers, flags and checksums.
    fn cut(&self, bytes: &[u8], range: Range<usize>) -> Option<Vec<u8>> {
        let from = range.start.checked_mul(self.size)?;
        let to = range.end.checked_mul(self.size)?.min(self.total);
        let data = bytes.get(self.payload..)?.get(from..to)?;
        let mut cut = Vec::with_capacity(self.payload + data.len());
        cut.extend_from_slice(bytes.get(..self.payload)?);
        cut.extend_from_slice(data);
        if data.len() <= self.size {
            // One frame of a wire is not a super-frame: it has no type and no size.
            *cut.get_mut(1)? = 0;
            cut.get_mut(4..6)?.fill(0);
        }
        self.renumber(&mut cut, range.start, from, to == self.total)?;
        let ip = VNET_HEADER_BYTES + ETHERNET_BYTES;
        let length = u16::try_from(cut.len() - ip).ok()?;
        if self.is_v6 {
            put(&mut cut, ip + 4, length - u16::try_from(IPV6_BYTES).ok()?)?;
        } else {
            put(&mut cut, ip + 2, length)?;
            let id = take(&cut, ip + 4)?.wrapping_add(u16::try_from(range.start).ok()?);
            put(&mut cut, ip + 4, id)?;
            put(&mut cut, ip + 10, 0)?;
            let sum = fold(sum(0, cut.get(ip..self.tcp)?));
            put(&mut cut, ip + 10, !sum)?;
        }
        self.finish_checksum(&mut cut)?;
        Some(cut)
    }

    /// Sets TCP's sequence number and flags of a part that begins at payload byte `from`.
    fn renumber(&self, cut: &mut [u8], first: usize, from: usize, is_last: bool) -> Option<()> {
        let sequence = cut.get_mut(self.tcp + 4..self.tcp + 8)?;
        let number = u32::from_be_bytes(sequence.try_into().ok()?).wrapping_add(u32::try_from(from).ok()?);
        sequence.copy_from_slice(&number.to_be_bytes());
        let flags = cut.get_mut(self.tcp + 13)?;
        if !is_last {
            *flags &= !(FIN | PSH);
        }
        if first > 0 {
            *flags &= !CWR;
        }
        Some(())
    }

    /// Sets the checksum: only of the pseudo header if the receiver completes it, as in the kernel's frame; otherwise
    /// the full one.
    fn finish_checksum(&self, cut: &mut [u8]) -> Option<()> {
        let ip = VNET_HEADER_BYTES + ETHERNET_BYTES;
        let addresses = if self.is_v6 { ip + 8..ip + 40 } else { ip + 12..ip + 20 };
        let length = u32::try_from(cut.len() - self.tcp).ok()?;
        let pseudo = sum(u32::from(TCP) + length, cut.get(addresses)?);
        let checksum = if cut.first()? & NEEDS_CHECKSUM != 0 {
            fold(pseudo)
        } else {
            put(cut, self.tcp + 16, 0)?;
            !fold(sum(pseudo, cut.get(self.tcp..)?))
        };
        put(cut, self.tcp + 16, checksum)
    }
}

/// Adds 16-bit words (RFC 1071); an odd last byte is the high half of a word. 64 KiB cannot overflow 32 bits.
fn sum(start: u32, bytes: &[u8]) -> u32 {
    bytes.chunks(2).fold(start, |sum, pair| {
        sum + u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))
    })
}

fn fold(mut sum: u32) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn take(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

fn put(bytes: &mut [u8], at: usize, value: u16) -> Option<()> {
    bytes.get_mut(at..at + 2)?.copy_from_slice(&value.to_be_bytes());
    Some(())
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
