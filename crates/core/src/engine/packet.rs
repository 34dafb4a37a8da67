//! IPv4, IPv6 and TCP headers: read once, checked, and a few fields written in place.
//!
//! Nothing here panics: every offset is checked by [`Header::parse`], and reads past the end give zero.

use super::checksum::Sum;
use super::config::Hop;
use super::narrow::{length, low_half};
use super::seq::Seq;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Protocol numbers (IANA).
pub(super) const TCP: u8 = 6;
pub(super) const ICMP: u8 = 1;
pub(super) const ICMPV6: u8 = 58;

/// TCP flags as bits of the 14th byte of the header.
pub mod flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset.
    pub const RST: u8 = 0x04;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement field is valid.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer is valid.
    pub const URG: u8 = 0x20;
}

/// An IP address of either family in 16 bytes, IPv4 as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, Debug, Default, Eq)]
pub struct Address(pub(super) [u64; 2]);

/// Compares word by word: the derived comparison reads 16 bytes at once, and stalls if they were just written as two
/// words.
impl PartialEq for Address {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        (self.0[0] ^ other.0[0]) | (self.0[1] ^ other.0[1]) == 0
    }
}

impl Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl Address {
    const V4_PREFIX: u64 = 0xffff_0000_0000;

    /// Returns an IPv4 address from its 32 bits.
    #[inline]
    pub const fn v4(bits: u32) -> Self {
        Self([0, Self::V4_PREFIX | bits as u64])
    }

    /// True if this is an IPv4 address.
    #[inline]
    pub const fn is_v4(self) -> bool {
        self.0[0] == 0 && self.0[1] >> 32 == 0xffff
    }

    /// Returns the 32 bits of an IPv4 address.
    #[inline]
    pub(super) const fn v4_bits(self) -> u32 {
        low_half(self.0[1])
    }

    pub(super) fn v6_bytes(self) -> [u8; 16] {
        ((u128::from(self.0[0]) << 64) | u128::from(self.0[1])).to_be_bytes()
    }

    fn from_v6(bytes: [u8; 16]) -> Self {
        let bits = u128::from_be_bytes(bytes);
        Self([(bits >> 64) as u64, (bits & 0xffff_ffff_ffff_ffff) as u64])
    }

    /// Returns what this address adds to the checksum of a pseudo header (or of an IPv4 header).
    #[inline]
    pub(super) const fn sum(self) -> Sum {
        let sum = Sum::ZERO.u32(low_half(self.0[1]));
        if self.is_v4() {
            return sum;
        }
        sum.u32((self.0[1] >> 32) as u32).u32(low_half(self.0[0])).u32((self.0[0] >> 32) as u32)
    }
}

impl From<IpAddr> for Address {
    #[inline]
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self::v4(ip.to_bits()),
            IpAddr::V6(ip) => Self::from_v6(ip.octets()),
        }
    }
}

impl From<Address> for IpAddr {
    #[inline]
    fn from(address: Address) -> Self {
        if address.is_v4() {
            Self::V4(Ipv4Addr::from_bits(address.v4_bits()))
        } else {
            Self::V6(Ipv6Addr::from(address.v6_bytes()))
        }
    }
}

/// Both ends of a segment: `remote` sent it, `local` is the address that the engine answers for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The other host.
    pub remote: Address,
    /// The address that the other host sends to.
    pub local: Address,
    /// The other host's port in the upper half, the local port in the lower half.
    pub(super) ports: u32,
}

impl Tuple {
    /// Returns a tuple from both ends.
    pub fn new(remote: SocketAddr, local: SocketAddr) -> Self {
        let ports = u32::from(remote.port()) << 16 | u32::from(local.port());
        Self { remote: remote.ip().into(), local: local.ip().into(), ports }
    }

    /// Returns the other host's port.
    #[inline]
    pub const fn remote_port(&self) -> u16 {
        (self.ports >> 16) as u16
    }

    /// Returns the port that the other host sends to.
    #[inline]
    pub const fn local_port(&self) -> u16 {
        (self.ports & 0xffff) as u16
    }

    /// Returns the other host's address and port.
    #[inline]
    pub fn remote_addr(&self) -> SocketAddr {
        SocketAddr::new(self.remote.into(), self.remote_port())
    }

    /// Returns the address and port on our side.
    #[inline]
    pub(super) const fn source(&self) -> (Address, u16) {
        (self.local, self.local_port())
    }

    /// Reads the tuple of a packet without any check. The result is meaningless if the packet carries neither TCP nor
    /// UDP.
    #[inline(always)]
    pub(super) fn guess(bytes: &[u8]) -> Option<Self> {
        let head = bytes.first_chunk::<20>()?;
        if head[0] >> 4 != 4 {
            return Self::guess_v6(bytes);
        }
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let ports = u32_at(bytes, usize::from(head[0] & 0x0f) * 4);
        Some(Self { remote: Address::v4(word(12)), local: Address::v4(word(16)), ports })
    }

    #[inline(never)]
    fn guess_v6(bytes: &[u8]) -> Option<Self> {
        let head = bytes.first_chunk::<40>()?;
        let [remote, local] = [8, 24].map(|at| head[at..].first_chunk().copied().map(Address::from_v6));
        Some(Self { remote: remote?, local: local?, ports: u32_at(bytes, 40) })
    }

    /// Returns the address and port that the other host sends to.
    #[inline]
    pub fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(self.local.into(), self.local_port())
    }
}

/// Why the engine cannot accept bytes as a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The packet is shorter than its headers, or shorter than they say.
    #[error("the packet is shorter than its headers say")]
    Truncated,
    /// Neither IPv4 nor IPv6, or an impossible header length.
    #[error("an IP or TCP header has an impossible length or version")]
    Header,
    /// A fragment: TCP sets "don't fragment", and the engine keeps no reassembly buffers.
    #[error("the packet is a fragment")]
    Fragment,
    /// The IP or TCP checksum is wrong.
    #[error("a checksum is wrong")]
    Checksum,
    /// A combination of flags that no sender sets: SYN with FIN or RST, FIN with RST, or no flag at all.
    #[error("the TCP flags contradict each other")]
    Flags,
    /// A TCP option runs past the header, or has an impossible length.
    #[error("a TCP option has an impossible length")]
    Option,
    /// A port is 0, or an address is multicast, broadcast or unspecified.
    #[error("an address or port cannot be an end of a connection")]
    Address,
}

/// What the driver knows about the checksums of a received packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksums {
    /// Nothing: the engine verifies them.
    #[default]
    Verify,
    /// The network card or the kernel has verified them.
    Verified,
    /// The TCP checksum is unfinished (a local sender left it to the card): the engine computes it before sending.
    Partial,
    /// Like [`Checksums::Verify`], but an unfinished checksum may come without a mark: virtual interfaces lose the mark
    /// when XDP takes the packet.
    Unmarked,
}

/// The fields of an IP header that the engine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ip {
    /// Sender.
    pub src: Address,
    /// Receiver.
    pub dst: Address,
    /// The protocol carried.
    pub protocol: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// Offset of the carried protocol's header, bytes.
    pub payload: usize,
    /// Offset of the packet's end, bytes.
    pub end: usize,
}

impl Ip {
    /// Reads the IP header, and the extension headers of IPv6.
    ///
    /// # Errors
    /// Returns the kind of error if the header is malformed.
    // Inlined and returned field by field, so that no field goes through memory: that would cost more per packet than the
    // parsing itself.
    #[inline(always)]
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        match bytes.first().ok_or(Malformed::Truncated)? >> 4 {
            4 => Self::parse_v4(bytes),
            6 => {
                let Self { src, dst, protocol, ttl, payload, end } = Self::parse_v6(bytes)?;
                let (src, dst) = (Address([src.0[0], src.0[1]]), Address([dst.0[0], dst.0[1]]));
                Ok(Self { src, dst, protocol, ttl, payload, end })
            }
            _ => Err(Malformed::Header),
        }
    }

    #[inline(always)]
    fn parse_v4(bytes: &[u8]) -> Result<Self, Malformed> {
        let Some(head) = bytes.first_chunk::<20>() else { return Err(Malformed::Truncated) };
        let header = usize::from(head[0] & 0x0f) * 4;
        let end = usize::from(u16::from_be_bytes([head[2], head[3]]));
        if header < 20 || end < header {
            return Err(Malformed::Header);
        }
        if bytes.len() < end {
            return Err(Malformed::Truncated);
        }
        // The offset and "more fragments"; the other bits do not make a fragment.
        if u16::from_be_bytes([head[6], head[7]]) & 0x3fff != 0 {
            return Err(Malformed::Fragment);
        }
        Ok(Self {
            src: Address::v4(u32::from_be_bytes([head[12], head[13], head[14], head[15]])),
            dst: Address::v4(u32::from_be_bytes([head[16], head[17], head[18], head[19]])),
            protocol: head[9],
            ttl: head[8],
            payload: header,
            end,
        })
    }

    #[inline(never)]
    fn parse_v6(bytes: &[u8]) -> Result<Self, Malformed> {
        let address = |at: usize| {
            bytes.get(at..at + 16).and_then(|b| b.try_into().ok()).map(Address::from_v6).unwrap_or_default()
        };
        let end = 40 + usize::from(u16_at(bytes, 4));
        if bytes.len() < end {
            return Err(Malformed::Truncated);
        }
        let mut protocol = u8_at(bytes, 6);
        let mut payload = 40;
        // Hop-by-hop, routing and destination options may precede TCP, each at most twice (RFC 8200).
        for _ in 0..6 {
            match protocol {
                0 | 43 | 60 => {
                    protocol = u8_at(bytes, payload);
                    payload += 8 + usize::from(u8_at(bytes, payload + 1)) * 8;
                    if payload > end {
                        return Err(Malformed::Truncated);
                    }
                }
                44 => return Err(Malformed::Fragment),
                _ => break,
            }
        }
        Ok(Self { src: address(8), dst: address(24), protocol, ttl: u8_at(bytes, 7), payload, end })
    }

    /// True if the header checksum is right; IPv6 has none.
    pub fn checksum_holds(&self, bytes: &[u8]) -> bool {
        !self.src.is_v4()
            || bytes.get(..self.payload).is_some_and(|h| Sum::default().bytes(h).folded() == 0xffff)
    }

    /// Returns what the pseudo header adds to the checksum of the carried protocol.
    #[inline]
    pub(super) fn pseudo(&self) -> Sum {
        let length = u32::try_from(self.end - self.payload).unwrap_or(0);
        self.src.sum().add(self.dst.sum()).u16(u16::from(self.protocol)).u32(length)
    }

    /// True if those checksums are right that `checksums` does not exclude from the check.
    // Not inlined: it takes a copy of the header, so the caller can keep the original in registers.
    #[inline(never)]
    fn checksums_hold(self, bytes: &[u8], checksums: Checksums) -> bool {
        let holds = || self.payload_checksum_holds(bytes, self.pseudo());
        self.checksum_holds(bytes)
            && match checksums {
                Checksums::Verified | Checksums::Partial => true,
                Checksums::Verify => holds(),
                Checksums::Unmarked => self.is_unfinished(bytes) || holds(),
            }
    }

    /// True if the TCP checksum field covers the pseudo header alone.
    fn is_unfinished(&self, bytes: &[u8]) -> bool {
        u16_at(bytes, self.payload + 16) == self.pseudo().folded()
    }

    /// True if the checksum of the carried protocol is right.
    pub(super) fn payload_checksum_holds(&self, bytes: &[u8], pseudo: Sum) -> bool {
        bytes.get(self.payload..self.end).is_some_and(|b| pseudo.bytes(b).folded() == 0xffff)
    }
}

/// A checked TCP segment: its fields, and the offsets of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its sender and its receiver.
    pub tuple: Tuple,
    /// Sequence number of the first byte (or of SYN).
    pub seq: Seq,
    /// Acknowledgement number, if the ACK flag is set.
    pub ack: Seq,
    /// Window field, not scaled.
    pub window: u16,
    /// The bits of [`flags`].
    pub flags: u8,
    /// Time to live.
    pub ttl: u8,
    /// Offset of the TCP header.
    pub tcp: usize,
    /// Offset of the payload.
    pub data: usize,
    /// Offset of the packet's end.
    pub end: usize,
}

impl Header {
    /// Reads and checks the segment that `ip` carries. `checksums` says which checksums are verified.
    ///
    /// # Errors
    /// Returns the kind of error if the segment is malformed.
    // Inlined for the same reason as [`Ip::parse`].
    #[inline(always)]
    pub fn parse(bytes: &[u8], ip: &Ip, checksums: Checksums) -> Result<Self, Malformed> {
        let tcp = ip.payload;
        if ip.end < tcp + 20 {
            return Err(Malformed::Truncated);
        }
        let Some(Ok(head)) = bytes.get(tcp..tcp + 20).map(<&[u8; 20]>::try_from) else {
            return Err(Malformed::Truncated);
        };
        let length = usize::from(head[12] >> 4) * 4;
        if length < 20 {
            return Err(Malformed::Header);
        }
        if tcp + length > ip.end {
            return Err(Malformed::Truncated);
        }
        let flags = head[13] & 0x3f;
        let ports = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        let header = Self {
            tuple: Tuple { remote: ip.src, local: ip.dst, ports },
            seq: Seq(u32::from_be_bytes([head[4], head[5], head[6], head[7]])),
            ack: Seq(u32::from_be_bytes([head[8], head[9], head[10], head[11]])),
            window: u16::from_be_bytes([head[14], head[15]]),
            flags,
            ttl: ip.ttl,
            tcp,
            data: tcp + length,
            end: ip.end,
        };
        header.check(ip)?;
        if checksums != Checksums::Verified && !ip.checksums_hold(bytes, checksums) {
            return Err(Malformed::Checksum);
        }
        Ok(header)
    }

    #[inline(always)]
    fn check(&self, ip: &Ip) -> Result<(), Malformed> {
        use flags::{ACK, FIN, RST, SYN};
        let lone = self.flags & (SYN | RST | FIN);
        // At most one of the three may be set: `x & (x - 1)` is zero only then.
        if lone & lone.wrapping_sub(1) != 0 || (lone == 0 && self.flags & ACK == 0) {
            return Err(Malformed::Flags);
        }
        if self.tuple.remote_port() == 0 || self.tuple.local_port() == 0 || !is_unicast(ip.src) {
            return Err(Malformed::Address);
        }
        Ok(())
    }

    /// True if the checksum covers the pseudo header alone, as a sender leaves it to its card.
    #[inline]
    pub(super) fn is_unfinished(&self, bytes: &[u8], ip: &Ip) -> bool {
        ip.is_unfinished(bytes)
    }

    /// Finishes a checksum that the sender left to its card.
    pub(super) fn finish(&self, bytes: &mut [u8], ip: &Ip) {
        put(bytes, self.tcp + 16, &[0, 0]);
        let sum = ip.pseudo().bytes(bytes.get(self.tcp..self.end).unwrap_or_default());
        put(bytes, self.tcp + 16, &sum.checksum().to_be_bytes());
    }

    /// True if any of these flags is set.
    #[inline]
    pub const fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    /// Returns the number of payload bytes.
    #[inline]
    pub const fn len(&self) -> u32 {
        length(self.end - self.data)
    }

    /// True if there is no payload.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.end == self.data
    }

    /// Returns the sequence number after this segment: the payload, plus one for SYN or FIN.
    #[inline]
    pub fn seq_end(&self) -> Seq {
        self.seq + self.len() + u32::from(self.has(flags::SYN | flags::FIN))
    }

    /// Returns the options.
    #[inline]
    pub fn options<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(self.tcp + 20..self.data).unwrap_or_default()
    }

    /// Returns the payload.
    #[inline]
    pub fn payload<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(self.data..self.end).unwrap_or_default()
    }
}

/// A segment that has reached the engine, with all that is known of it.
pub(super) struct Packet<'a> {
    /// The whole IP packet, which is rewritten in place.
    pub(super) bytes: &'a mut [u8],
    pub(super) header: &'a Header,
    /// The neighbour that it came from.
    pub(super) hop: Hop,
    pub(super) checksums: Checksums,
}

impl Packet<'_> {
    /// Returns the TCP options.
    #[inline]
    pub(super) fn options(&self) -> &[u8] {
        self.header.options(self.bytes)
    }

    /// Returns the payload.
    #[inline]
    pub(super) fn payload(&self) -> &[u8] {
        self.header.payload(self.bytes)
    }
}

/// True if an address can be an end of a connection: it is not unspecified, multicast or broadcast.
#[inline]
fn is_unicast(address: Address) -> bool {
    if address.is_v4() {
        let bits = address.v4_bits();
        bits != 0 && bits != u32::MAX && bits >> 28 != 0xe
    } else {
        address.0[0] >> 56 != 0xff && address.0 != [0; 2]
    }
}

#[inline]
pub(super) fn u8_at(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

#[inline]
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_be_bytes)
}

#[inline]
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_be_bytes)
}

/// Writes bytes at an offset that a parser has checked; does nothing if it lies outside.
#[inline]
pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + value.len()) {
        to.copy_from_slice(value);
    }
}
