//! Ethernet frames with a TCP segment in IPv4: the parts of the formats that the generator needs (RFC 791, RFC 9293).

use std::net::SocketAddrV4;

/// No more data.
pub const FIN: u8 = 1;
/// Synchronise.
pub const SYN: u8 = 2;
/// Reset.
pub const RST: u8 = 4;
/// Push.
pub const PSH: u8 = 8;
/// The acknowledgement number is valid.
pub const ACK: u8 = 16;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
const IP: usize = 20;
/// Bytes of a TCP header without options.
const TCP: usize = 20;
/// Largest payload that the generator sends.
pub(super) const PAYLOAD_MAX: usize = 16;
/// Longest frame that the generator sends.
pub(super) const FRAME_MAX: usize = ETHERNET + IP + TCP + PAYLOAD_MAX;
/// Shortest Ethernet frame without its checksum.
const SHORTEST: usize = 60;

/// The header fields of a TCP segment, and the length of its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Sender.
    pub from: SocketAddrV4,
    /// Receiver.
    pub to: SocketAddrV4,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: u8,
    /// Bytes of payload.
    pub payload: u16,
}

impl Segment {
    /// Returns an answer to this segment, with these flags and without payload: it has the expected sequence number
    /// and acknowledges everything.
    #[must_use]
    pub fn answer(&self, flags: u8) -> Self {
        Self { from: self.to, to: self.from, seq: self.ack, ack: self.end(), flags, payload: 0 }
    }

    /// Returns the sequence number after its last one.
    #[must_use]
    pub fn end(&self) -> u32 {
        let extra = u32::from(self.flags & (SYN | FIN) != 0);
        self.seq.wrapping_add(u32::from(self.payload)).wrapping_add(extra)
    }

    /// Returns true if exactly these of SYN, FIN, RST and ACK are set.
    #[must_use]
    pub fn is(&self, flags: u8) -> bool {
        self.flags & (SYN | FIN | RST | ACK) == flags
    }

    /// Reads a frame; `None` if it has no TCP segment in IPv4.
    #[must_use]
    pub fn read(frame: &[u8]) -> Option<Self> {
        let ip: &[u8; IP] = frame.get(ETHERNET..)?.first_chunk()?;
        if frame.get(12..ETHERNET)? != [8, 0] || ip[0] != 0x45 || ip[9] != 6 {
            return None;
        }
        let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let tcp: &[u8; TCP] = frame.get(ETHERNET + IP..)?.first_chunk()?;
        let header = usize::from(tcp[12] >> 4) * 4;
        let payload = total.checked_sub(IP + header)?;
        let address = |at: usize, port: usize| {
            let ip = [ip[at], ip[at + 1], ip[at + 2], ip[at + 3]];
            SocketAddrV4::new(ip.into(), u16::from_be_bytes([tcp[port], tcp[port + 1]]))
        };
        let word = |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
        Some(Self {
            from: address(12, 0),
            to: address(16, 2),
            seq: word(4),
            ack: word(8),
            flags: tcp[13],
            payload: u16::try_from(payload).ok()?,
        })
    }

    /// Writes the frame with all its checksums, from the interface `from` to its neighbour `to`, and returns its
    /// length. The payload is a fixed text of at most [`PAYLOAD_MAX`] bytes.
    pub fn write(&self, frame: &mut [u8; FRAME_MAX], to: [u8; 6], from: [u8; 6]) -> usize {
        let payload = usize::from(self.payload).min(PAYLOAD_MAX);
        let total = (IP + TCP + payload) as u16;
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&from);
        frame[12..14].copy_from_slice(&[8, 0]);
        let (ip, tcp) = frame[ETHERNET..].split_at_mut(IP);
        ip.copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        ip[2..4].copy_from_slice(&total.to_be_bytes());
        ip[12..16].copy_from_slice(&self.from.ip().octets());
        ip[16..20].copy_from_slice(&self.to.ip().octets());
        let sum = checksum(sum(ip));
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        tcp[..2].copy_from_slice(&self.from.port().to_be_bytes());
        tcp[2..4].copy_from_slice(&self.to.port().to_be_bytes());
        tcp[4..8].copy_from_slice(&self.seq.to_be_bytes());
        tcp[8..12].copy_from_slice(&self.ack.to_be_bytes());
        tcp[12..TCP].copy_from_slice(&[0x50, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        tcp[TCP..].copy_from_slice(b"sixteen bytes...");
        let sum = checksum(pseudo(ip, TCP + payload) + sum_of(tcp, TCP + payload));
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        (ETHERNET + usize::from(total)).clamp(SHORTEST, FRAME_MAX)
    }
}

/// Returns true if both checksums of a frame that [`Segment::read`] accepted are correct.
pub(super) fn checksums_hold(frame: &[u8]) -> bool {
    let Some((ip, rest)) = frame.get(ETHERNET..).and_then(|bytes| bytes.split_at_checked(IP)) else {
        return false;
    };
    let length = usize::from(u16::from_be_bytes([ip[2], ip[3]])).saturating_sub(IP);
    checksum(sum(ip)) == 0 && checksum(pseudo(ip, length) + sum_of(rest, length)) == 0
}

fn pseudo(ip: &[u8], length: usize) -> u64 {
    sum(ip.get(12..20).unwrap_or_default()) + 6 + length as u64
}

fn sum_of(bytes: &[u8], length: usize) -> u64 {
    sum(bytes.get(..length).unwrap_or_default())
}

fn sum(bytes: &[u8]) -> u64 {
    let (pairs, last) = bytes.as_chunks::<2>();
    let whole: u64 = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum();
    whole + last.first().map_or(0, |byte| u64::from(*byte) << 8)
}

fn checksum(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_gives_back_what_was_written() {
        for payload in [0, 1, 16] {
            let (from, to) = ("10.0.0.1:1024".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
            let segment = Segment { from, to, seq: 0xffff_fff8, ack: 7, flags: ACK | PSH, payload };
            let mut frame = [0xaa; FRAME_MAX];
            let length = segment.write(&mut frame, [1; 6], [2; 6]);
            assert_eq!((length, &frame[..6]), ((54 + usize::from(payload)).max(60), &[1; 6][..]));
            assert_eq!(Segment::read(&frame[..length]), Some(segment));
            assert!(checksums_hold(&frame[..length]));
            for at in 26..54 {
                let mut broken = frame;
                broken[at] ^= 4;
                assert!(!checksums_hold(&broken[..length]), "byte {at}");
            }
        }
    }

    #[test]
    fn what_is_no_segment_is_none() {
        let (from, to) = ("10.0.0.1:1024".parse().unwrap(), "10.0.0.2:80".parse().unwrap());
        let mut frame = [0; FRAME_MAX];
        let length =
            Segment { from, to, seq: 1, ack: 2, flags: SYN, payload: 0 }.write(&mut frame, [1; 6], [2; 6]);
        for cut in 0..54 {
            assert_eq!(Segment::read(&frame[..cut]), None, "{cut} of {length} bytes");
        }
        for (at, byte) in [(12, 6), (14, 0x46), (23, 17)] {
            let mut other = frame;
            other[at] = byte;
            assert_eq!(Segment::read(&other), None, "byte {at}");
        }
    }
}
