//! Handles ICMP errors about the engine's connections (RFC 792, RFC 4443). Each quotes a packet that the engine sent, and is
//! translated for the side whose packet caused it. A quote is trusted only if its sequence number fits (RFC 5927, Sec. 4).

use super::checksum::Sum;
use super::config::Callbacks;
use super::connection::Phase;
use super::machine::{Drop, Engine, Fate};
use super::narrow::length;
use super::packet::{Address, ICMP, Ip, Malformed, TCP, Tuple, put, u8_at, u16_at, u32_at};
use super::seq::Seq;
use super::slot::Slot;
use super::table::hash;
use crate::flow::{EndReason, Side};
use crate::time::Instant;

/// The kind of an ICMP error.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Error {
    /// Type 3 code 4, or "packet too big".
    TooBig,
    /// The destination is unreachable, or refuses.
    Unreachable,
    /// Anything else that quotes a packet.
    Other,
}

fn kind(v4: bool, kind: u8, code: u8) -> Option<Error> {
    Some(match (v4, kind, code) {
        (true, 3, 4) | (false, 2, _) => Error::TooBig,
        (true, 3, _) | (false, 1, _) => Error::Unreachable,
        (true, 11 | 12, _) | (false, 3 | 4, _) => Error::Other,
        _ => return None,
    })
}

impl<C: Callbacks> Engine<C> {
    /// Translates an ICMP message that quotes one of the engine's connections; leaves any other to the host.
    #[inline(never)]
    pub(super) fn icmp(&mut self, now: Instant, packet: &mut [u8]) -> Fate {
        let Ok(ip) = &Ip::parse(packet) else { return Fate::NotOurs };
        let start = ip.payload;
        let v4 = ip.protocol == ICMP;
        let Some(error) = kind(v4, u8_at(packet, start), u8_at(packet, start + 1)) else {
            return Fate::NotOurs;
        };
        let quote = start + 8;
        let Some((inner, ports, seq)) = quoted(packet, quote, ip.end, v4) else { return Fate::NotOurs };
        // The quoted packet is one that we sent, so our address is the source in it.
        let ports = ports.rotate_left(16);
        let tuple = Tuple { remote: inner.1, local: inner.0, ports };
        let key = hash(&self.config.seed, &tuple);
        let Some((slot, to)) = self.find(key, &tuple) else { return Fate::NotOurs };
        let pseudo = if v4 { Sum::ZERO } else { ip.pseudo() };
        if !ip.checksum_holds(packet) || !ip.payload_checksum_holds(packet, pseudo) {
            return Fate::Dropped(Drop::Malformed(Malformed::Checksum));
        }
        self.quoted_error(now, slot, to, packet, ip, error, Seq(seq))
    }

    /// Takes a packet of the engine that has no route. If it is the SYN to a server, the connection ends. For an established
    /// connection it counts as lost: the sender retransmits.
    pub fn unrouted(&mut self, now: Instant, packet: &[u8]) {
        let is_v4 = packet.first().is_some_and(|byte| byte >> 4 == 4);
        self.give_up(now, packet, is_v4);
    }

    /// Handles an ICMP message, from its type on, that reached this host's own IP layer: the kernel reports a silent
    /// neighbour so. If the message says that a server is unreachable, the connection that waits for this server ends.
    /// The checksum of an ICMPv6 message covers addresses that are not here, so the caller must have checked it.
    pub fn reported(&mut self, now: Instant, message: &[u8], is_v4: bool) {
        let is_whole = !is_v4 || Sum::ZERO.bytes(message).checksum() == 0;
        if is_whole && kind(is_v4, u8_at(message, 0), u8_at(message, 1)) == Some(Error::Unreachable) {
            self.give_up(now, message.get(8..).unwrap_or_default(), is_v4);
        }
    }

    /// Ends the connection if `packet` is its SYN to the server; the first 28 or 48 bytes are enough.
    fn give_up(&mut self, now: Instant, packet: &[u8], is_v4: bool) {
        let Some((addresses, ports, seq)) = quoted(packet, 0, packet.len(), is_v4) else { return };
        let tuple = Tuple { remote: addresses.1, local: addresses.0, ports: ports.rotate_left(16) };
        let key = hash(&self.config.seed, &tuple);
        let Some((slot, Side::Server)) = self.find(key, &tuple) else { return };
        let is_our_syn = self.slow_of(slot).is_some_and(|slow| slow.isn[Side::Server] == Seq(seq));
        if is_our_syn && self.tables.hot.at(slot).phase == Phase::Connecting {
            self.recall(now, slot);
            self.refuse(now, slot, EndReason::Unreachable);
        }
    }

    /// Handles an error about a packet sent to side `to`.
    #[allow(clippy::too_many_arguments, reason = "one message and what was found out about it")]
    fn quoted_error(
        &mut self,
        now: Instant,
        slot: Slot,
        to: Side,
        packet: &mut [u8],
        ip: &Ip,
        error: Error,
        seq: Seq,
    ) -> Fate {
        self.recall(now, slot);
        let hot = self.tables.hot.at(slot);
        match hot.phase {
            Phase::Connecting if to == Side::Server => {
                let is_our_syn = self.slow_of(slot).is_some_and(|slow| slow.isn[Side::Server] == seq);
                if is_our_syn && error == Error::Unreachable {
                    self.refuse(now, slot, EndReason::Unreachable);
                }
                Fate::Taken
            }
            Phase::Bound if hot.same_family => {
                let (own, other) = (&hot.leg[to], &hot.leg[to.other()]);
                // Only packets in flight can have caused an error.
                let sent = other.next + other.add;
                if seq.before(own.acked) || seq.after(sent) || header_too_long(packet, ip) {
                    return Fate::Dropped(Drop::OutOfWindow);
                }
                self.translate_quote(slot, to, packet, ip, seq)
            }
            _ => Fate::Taken,
        }
    }

    /// Rewrites a quoted packet, and the message around it, as if the packet of the side that caused it had been quoted.
    fn translate_quote(&mut self, slot: Slot, to: Side, packet: &mut [u8], ip: &Ip, seq: Seq) -> Fate {
        let hot = self.tables.hot.at(slot);
        let cause = hot.tuple[to.other()];
        let (start, quote) = (ip.payload, ip.payload + 8);
        let v4 = ip.protocol == ICMP;
        let inner_tcp = quote + if v4 { usize::from(u8_at(packet, quote) & 0xf) * 4 } else { 40 };
        // The quoted packet as its sender made it: from the sender to us.
        write_addresses(packet, quote, v4, cause.remote, cause.local);
        put(packet, inner_tcp, &cause.remote_port().to_be_bytes());
        put(packet, inner_tcp + 2, &cause.local_port().to_be_bytes());
        put(packet, inner_tcp + 4, &(seq - hot.leg[to.other()].add).0.to_be_bytes());
        // The message: from the address that the client or server talks to, to the client or server.
        write_addresses(packet, 0, v4, cause.local, cause.remote);
        put(packet, start + 2, &[0, 0]);
        let pseudo = if v4 {
            Sum::ZERO
        } else {
            let length = length(ip.end - start);
            cause.local.sum().add(cause.remote.sum()).u16(u16::from(ip.protocol)).u32(length)
        };
        let checksum = pseudo.bytes(packet.get(start..ip.end).unwrap_or_default()).checksum();
        put(packet, start + 2, &checksum.to_be_bytes());
        Fate::Forward { len: ip.end, hop: hot.leg[to.other()].hop }
    }
}

/// True if the outer header has options, which the translation does not handle. Real ICMP errors have none.
fn header_too_long(_packet: &[u8], ip: &Ip) -> bool {
    ip.src.is_v4() && ip.payload != 20
}

/// Returns the addresses, ports and sequence number of a quoted TCP packet; at least 8 bytes of TCP must be there.
fn quoted(packet: &[u8], at: usize, end: usize, v4: bool) -> Option<((Address, Address), u32, u32)> {
    let inner = packet.get(at..end)?;
    let (header, protocol) = if v4 {
        if inner.first()? >> 4 != 4 || u16_at(inner, 6) & 0x1fff != 0 {
            return None;
        }
        (usize::from(u8_at(inner, 0) & 0xf) * 4, u8_at(inner, 9))
    } else {
        if inner.first()? >> 4 != 6 {
            return None;
        }
        (40, u8_at(inner, 6))
    };
    if protocol != TCP || header < 20 || inner.len() < header + 8 {
        return None;
    }
    let address = |at: usize| {
        if v4 {
            Some(Address::v4(u32_at(inner, at)))
        } else {
            let bytes: [u8; 16] = inner.get(at..at + 16)?.try_into().ok()?;
            Some(Address::from(std::net::IpAddr::from(bytes)))
        }
    };
    let addresses = if v4 { (address(12)?, address(16)?) } else { (address(8)?, address(24)?) };
    Some((addresses, u32_at(inner, header), u32_at(inner, header + 4)))
}

/// Writes both addresses of the IP header at `at`, and the checksum if it is IPv4.
fn write_addresses(packet: &mut [u8], at: usize, v4: bool, src: Address, dst: Address) {
    if !v4 {
        put(packet, at + 8, &src.v6_bytes());
        put(packet, at + 24, &dst.v6_bytes());
        return;
    }
    put(packet, at + 12, &src.v4_bits().to_be_bytes());
    put(packet, at + 16, &dst.v4_bits().to_be_bytes());
    let header = usize::from(u8_at(packet, at) & 0xf) * 4;
    put(packet, at + 10, &[0, 0]);
    let checksum = Sum::ZERO.bytes(packet.get(at..at + header).unwrap_or_default()).checksum();
    put(packet, at + 10, &checksum.to_be_bytes());
}
