//! A flood of SYNs: each from an address and a port of its own, with a number of its own, and what comes back is not answered.

use std::net::{Ipv4Addr, SocketAddrV4};

use super::segment::{SYN, Segment};

/// The network of these addresses, for benchmarks (RFC 2544), and the bits that change.
const NETWORK: u32 = u32::from_be_bytes([198, 18, 0, 0]);
const HOSTS: u32 = 0x1_ffff;
/// SYNs sent at once at most; what is missed after a pause is not made up for.
const AT_ONCE: u64 = 64;

/// The flood.
#[derive(Debug)]
pub(super) struct Flood {
    front: SocketAddrV4,
    per_s: u64,
    /// When the next one is due.
    next_ns: u64,
    sent: u64,
}

impl Flood {
    pub(super) fn new(front: SocketAddrV4, per_s: u32) -> Self {
        Self { front, per_s: per_s.into(), next_ns: 0, sent: 0 }
    }

    /// Returns how many were sent.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends what is due.
    pub(super) fn poll(&mut self, now_ns: u64, out: &mut Vec<Segment>) {
        if self.per_s == 0 || now_ns < self.next_ns {
            return;
        }
        let due = (u128::from(now_ns - self.next_ns) * u128::from(self.per_s) / 1_000_000_000) as u64 + 1;
        self.next_ns = if due > AT_ONCE { now_ns } else { self.next_ns + due * 1_000_000_000 / self.per_s };
        for _ in 0..due.min(AT_ONCE) {
            out.push(self.syn());
        }
    }

    fn syn(&mut self) -> Segment {
        // Weyl's sequence, mixed: no address and port come again soon.
        self.sent += 1;
        let mut mixed = self.sent.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^= mixed >> 29;
        let address = Ipv4Addr::from_bits(NETWORK | (mixed as u32 & HOSTS));
        let port = 1024 + (mixed >> 32) as u16 % (u16::MAX - 1024);
        let from = SocketAddrV4::new(address, port);
        Segment { from, to: self.front, seq: (mixed >> 16) as u32, ack: 0, flags: SYN, payload: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn it_keeps_its_rate_and_no_address_and_port_comes_twice() {
        let mut flood = Flood::new("10.0.0.1:80".parse().unwrap(), 100_000);
        let mut out = Vec::new();
        for now_us in 0..100_000_u64 {
            flood.poll(now_us * 1000, &mut out);
        }
        assert!((9_990..=10_010).contains(&out.len()), "{}", out.len());
        assert_eq!(out.len() as u64, flood.sent());
        let from: HashSet<_> = out.iter().map(|segment| segment.from).collect();
        assert!(from.len() > 9_990 && out.iter().all(|segment| segment.is(SYN)), "{}", from.len());
    }

    #[test]
    fn a_pause_is_not_made_up_for_and_no_flood_sends_nothing() {
        let mut flood = Flood::new("10.0.0.1:80".parse().unwrap(), 1_000_000);
        let mut out = Vec::new();
        flood.poll(5_000_000_000, &mut out);
        assert_eq!(out.len() as u64, AT_ONCE);
        flood.poll(5_000_000_001, &mut out);
        assert!(out.len() as u64 <= AT_ONCE + 1);
        Flood::new("10.0.0.1:80".parse().unwrap(), 0).poll(5_000_000_000, &mut out);
        assert!(out.len() as u64 <= AT_ONCE + 1);
    }
}
