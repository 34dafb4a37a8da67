//! IPv4, IPv6 and TCP headers, read once and checked, and the few fields that are written in place.
//!
//! Nothing here panics: every offset is checked by [`Header::parse`], and reads past the end give zero.

use super::checksum::Sum;
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
    /// The acknowledgement field counts.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer counts.
    pub const URG: u8 = 0x20;
}

/// An IP address of either family in 16 bytes, IPv4 as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, Debug, Default, Eq)]
pub struct Address(pub(super) [u64; 2]);

/// Word by word: the derived one reads 16 bytes at once, and what was just written as two words waits for memory then.
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

    /// An IPv4 address from its 32 bits.
    #[inline]
    pub const fn v4(bits: u32) -> Self {
        Self([0, Self::V4_PREFIX | bits as u64])
    }

    /// Whether this is an IPv4 address.
    #[inline]
    pub const fn is_v4(self) -> bool {
        self.0[0] == 0 && self.0[1] >> 32 == 0xffff
    }

    /// The 32 bits of an IPv4 address.
    #[inline]
    pub(super) const fn v4_bits(self) -> u32 {
        self.0[1] as u32
    }

    pub(super) fn v6_bytes(self) -> [u8; 16] {
        ((u128::from(self.0[0]) << 64) | u128::from(self.0[1])).to_be_bytes()
    }

    fn from_v6(bytes: [u8; 16]) -> Self {
        let bits = u128::from_be_bytes(bytes);
        Self([(bits >> 64) as u64, bits as u64])
    }

    /// What this address adds to a pseudo header (or an IPv4 header).
    #[inline]
    pub(super) const fn sum(self) -> Sum {
        let sum = Sum::ZERO.u32(self.0[1] as u32);
        if self.is_v4() {
            return sum;
        }
        sum.u32((self.0[1] >> 32) as u32).u32(self.0[0] as u32).u32((self.0[0] >> 32) as u32)
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
    /// The address it talks to.
    pub local: Address,
    /// The other host's port in the upper half, the one it talks to in the lower.
    pub(super) ports: u32,
}

impl Tuple {
    /// A tuple from both ends.
    pub fn new(remote: SocketAddr, local: SocketAddr) -> Self {
        let ports = u32::from(remote.port()) << 16 | u32::from(local.port());
        Self { remote: remote.ip().into(), local: local.ip().into(), ports }
    }

    /// The other host's port.
    #[inline]
    pub const fn remote_port(&self) -> u16 {
        (self.ports >> 16) as u16
    }

    /// The port it talks to.
    #[inline]
    pub const fn local_port(&self) -> u16 {
        self.ports as u16
    }

    /// The other host.
    #[inline]
    pub fn remote_addr(&self) -> SocketAddr {
        SocketAddr::new(self.remote.into(), self.remote_port())
    }

    /// Address and port on our side.
    #[inline]
    pub(super) const fn source(&self) -> (Address, u16) {
        (self.local, self.local_port())
    }

    /// The tuple of a packet, without a look at anything else: a guess, if it carries no TCP or UDP.
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

    /// The address that it talks to.
    #[inline]
    pub fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(self.local.into(), self.local_port())
    }
}

/// Why bytes are no packet the engine can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Shorter than its headers, or than they say.
    #[error("the packet is shorter than its headers say")]
    Truncated,
    /// Neither IPv4 nor IPv6, or a header length that cannot be.
    #[error("an IP or TCP header has an impossible length or version")]
    Header,
    /// A fragment: TCP sets "don't fragment", and the engine keeps no reassembly buffers.
    #[error("the packet is a fragment")]
    Fragment,
    /// The IP or TCP checksum is wrong.
    #[error("a checksum is wrong")]
    Checksum,
    /// Flags no sender sets together: SYN with FIN or RST, FIN with RST, or none at all.
    #[error("the TCP flags contradict each other")]
    Flags,
    /// A TCP option runs past the header, or has an impossible length.
    #[error("a TCP option has an impossible length")]
    Option,
    /// A port is 0, or an address is multicast, broadcast or unspecified.
    #[error("an address or port cannot be an end of a connection")]
    Address,
}

/// What is known of the checksums of a packet that came in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksums {
    /// Nothing: they are verified.
    #[default]
    Verify,
    /// The network card, or the kernel, has verified them.
    Verified,
    /// The TCP checksum was never finished (a local sender left it to the card): it is made in full on the way out.
    Partial,
    /// As [`Checksums::Verify`], but one that was never finished may come without a word about it: virtual interfaces
    /// forget the mark where XDP takes the packet.
    Unmarked,
}

/// What stands in the IP header.
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
    /// Where the carried protocol begins, bytes.
    pub payload: usize,
    /// Where the packet ends, bytes.
    pub end: usize,
}

impl Ip {
    /// Reads the IP header, and the extension headers of IPv6.
    ///
    /// # Errors
    /// Says what is wrong with it.
    // In its caller's code, field by field, so that nothing goes by way of memory: with every packet that costs more than
    // all that is read here.
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
        // Offset and "more fragments"; the other bits do not make a fragment.
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
        // Hop-by-hop, routing and destination options may come before TCP; each at most once or twice (RFC 8200).
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

    /// Whether the checksum of the header is right; IPv6 has none.
    pub fn checksum_holds(&self, bytes: &[u8]) -> bool {
        !self.src.is_v4()
            || bytes.get(..self.payload).is_some_and(|h| Sum::default().bytes(h).folded() == 0xffff)
    }

    /// What the pseudo header adds to the checksum of the protocol carried.
    #[inline]
    pub(super) fn pseudo(&self) -> Sum {
        let length = u32::try_from(self.end - self.payload).unwrap_or(0);
        self.src.sum().add(self.dst.sum()).u16(u16::from(self.protocol)).u32(length)
    }

    /// Whether the checksums are right, as far as `checksums` says that they can be.
    // Not in its caller's code: a copy of the header is looked at, and the original stays out of memory.
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

    /// Whether the checksum of the TCP segment carried is that of the pseudo header alone.
    fn is_unfinished(&self, bytes: &[u8]) -> bool {
        u16_at(bytes, self.payload + 16) == self.pseudo().folded()
    }

    /// Whether the checksum of the protocol carried is right.
    pub(super) fn payload_checksum_holds(&self, bytes: &[u8], pseudo: Sum) -> bool {
        bytes.get(self.payload..self.end).is_some_and(|b| pseudo.bytes(b).folded() == 0xffff)
    }
}

/// A checked TCP segment: its fields, and where its parts are.
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
    /// [`flags`].
    pub flags: u8,
    /// Time to live.
    pub ttl: u8,
    /// Where the TCP header begins.
    pub tcp: usize,
    /// Where the payload begins.
    pub data: usize,
    /// Where the packet ends.
    pub end: usize,
}

impl Header {
    /// Reads and checks the segment that `ip` carries. Checksums are looked at only where `checksums` says so.
    ///
    /// # Errors
    /// Says what is wrong with it.
    // As [`Ip::parse`].
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
        // At most one of the three, else a smaller one is left when the lowest is taken out.
        if lone & lone.wrapping_sub(1) != 0 || (lone == 0 && self.flags & ACK == 0) {
            return Err(Malformed::Flags);
        }
        if self.tuple.remote_port() == 0 || self.tuple.local_port() == 0 || !is_unicast(ip.src) {
            return Err(Malformed::Address);
        }
        Ok(())
    }

    /// Whether the checksum is that of the pseudo header alone, as a sender leaves it to its card.
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

    /// Whether any of these flags is set.
    #[inline]
    pub const fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    /// Bytes of payload.
    #[inline]
    pub const fn len(&self) -> u32 {
        (self.end - self.data) as u32
    }

    /// Whether there is no payload.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.end == self.data
    }

    /// The sequence number after this segment: payload, and one for SYN or FIN.
    #[inline]
    pub fn seq_end(&self) -> Seq {
        self.seq + self.len() + u32::from(self.has(flags::SYN | flags::FIN))
    }

    /// The options.
    #[inline]
    pub fn options<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(self.tcp + 20..self.data).unwrap_or_default()
    }

    /// The payload.
    #[inline]
    pub fn payload<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(self.data..self.end).unwrap_or_default()
    }
}

/// Whether an address can be an end of a connection: not unspecified, multicast or broadcast.
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

/// Writes bytes at a place that a parser has checked; nothing if it is not there.
#[inline]
pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(at..at + value.len()) {
        to.copy_from_slice(value);
    }
}
