//! Which packets belong to which flows.
//!
//! A leg is one connection of a flow: the client's, or the one to the server. A flow of HTTP may share its legs with others.
//!
//! ```text
//! unknown --note--> known --note (next flow)--> known --sweep: no live flow for KEPT--> unknown
//! ```

use super::packet::Ends;
use crate::flow::{FlowId, Side};
use crate::time::Instant;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// One connection of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The side of the flow.
    pub side: Side,
    /// A packet that the peer sends us: from the client or the server, to our socket.
    pub ends: Ends,
    /// The address that the client dialled, where the kernel redirects it to our socket. Packets of both directions then show
    /// this address instead of our socket's.
    pub asked: Option<SocketAddr>,
}

/// The leg of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The number of the leg.
    pub leg: u64,
    /// The side of the flow.
    pub side: Side,
    /// Whether the packet goes from the client towards the server.
    pub is_up: bool,
    /// The sender to show, if it is another than in the packet.
    pub from: Option<SocketAddr>,
    /// The receiver to show, if it is another than in the packet.
    pub to: Option<SocketAddr>,
}

#[derive(Debug)]
struct Known {
    leg: Leg,
    /// The latest flows on it, the latest last.
    flows: Vec<FlowId>,
    noted: Instant,
}

/// The legs of all flows.
#[derive(Debug, Default)]
pub struct Table {
    legs: BTreeMap<u64, Known>,
    /// By the ends of packets that our peer sends.
    by_ends: BTreeMap<Ends, u64>,
    made: u64,
}

impl Table {
    /// Most legs. Further ones are not noted.
    pub const LEGS_MAX: usize = 1 << 17;
    /// Most flows of one leg that are kept.
    pub const FLOWS_MAX: usize = 16;
    /// How long a leg is kept after its last flow was noted, if none of its flows runs any more.
    pub const KEPT: Duration = Duration::from_secs(60);

    /// Notes a leg of a flow. Returns false if there is no room.
    pub fn note(&mut self, now: Instant, flow: FlowId, leg: Leg) -> bool {
        let known = self.by_ends.get(&leg.ends).and_then(|number| self.legs.get_mut(number));
        if let Some(known) = known.filter(|known| known.leg.side == leg.side) {
            known.noted = now;
            if !known.flows.contains(&flow) {
                if known.flows.len() == Self::FLOWS_MAX {
                    known.flows.remove(0);
                }
                known.flows.push(flow);
            }
            return true;
        }
        if self.legs.len() >= Self::LEGS_MAX {
            return false;
        }
        self.made += 1;
        self.legs.insert(self.made, Known { leg, flows: vec![flow], noted: now });
        self.by_ends.insert(leg.ends, self.made);
        if let Some(asked) = leg.asked.filter(|asked| *asked != leg.ends.to) {
            self.by_ends.insert(Ends { to: asked, ..leg.ends }, self.made);
        }
        true
    }

    /// Whether the client's leg between these ends is known.
    pub fn knows(&self, ends: &Ends) -> bool {
        self.by_ends.contains_key(ends)
    }

    /// Returns the leg of a packet.
    pub fn find(&self, ends: &Ends) -> Option<Found> {
        let of_peer = self.by_ends.get(ends).map(|number| (*number, true));
        let (number, is_from_peer) =
            of_peer.or_else(|| self.by_ends.get(&ends.answer()).map(|number| (*number, false)))?;
        let leg = &self.legs.get(&number)?.leg;
        let shown = leg.asked.unwrap_or(leg.ends.to);
        let ours = if is_from_peer { ends.to } else { ends.from };
        let new = (shown != ours).then_some(shown);
        let (from, to) = if is_from_peer { (None, new) } else { (new, None) };
        let is_up = (leg.side == Side::Client) == is_from_peer;
        Some(Found { leg: number, side: leg.side, is_up, from, to })
    }

    /// Returns a leg.
    pub fn leg(&self, number: u64) -> Option<Leg> {
        self.legs.get(&number).map(|known| known.leg)
    }

    /// Returns the latest flows on a leg, the latest last.
    pub fn flows(&self, leg: u64) -> &[FlowId] {
        self.legs.get(&leg).map(|known| known.flows.as_slice()).unwrap_or_default()
    }

    /// Returns the flows of all legs.
    pub fn all_flows(&self) -> impl Iterator<Item = FlowId> {
        self.legs.values().flat_map(|known| known.flows.iter().copied())
    }

    /// Forgets legs without a running flow.
    pub fn sweep(&mut self, now: Instant, runs: impl Fn(FlowId) -> bool) {
        let Self { legs, by_ends, .. } = self;
        legs.retain(|_, known| {
            now.since(known.noted) < Self::KEPT || known.flows.iter().any(|flow| runs(*flow))
        });
        by_ends.retain(|_, number| legs.contains_key(number));
    }

    /// The number of legs.
    pub fn len(&self) -> usize {
        self.legs.len()
    }

    /// Whether there is no leg.
    pub fn is_empty(&self) -> bool {
        self.legs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Protocol;

    fn ends(from: &str, to: &str) -> Ends {
        Ends { protocol: Protocol::Tcp, from: from.parse().unwrap(), to: to.parse().unwrap() }
    }

    #[test]
    fn both_directions_of_a_redirected_client_show_what_it_dialled() {
        let mut table = Table::default();
        let asked = "192.0.2.1:443".parse().unwrap();
        let leg =
            Leg { side: Side::Client, ends: ends("10.0.0.1:999", "127.0.0.1:1080"), asked: Some(asked) };
        assert!(table.note(Instant::ZERO, FlowId(1), leg));
        // As OUTPUT redirects: the request has our socket's address, and the answer the one that was dialled.
        let up = table.find(&ends("10.0.0.1:999", "127.0.0.1:1080")).unwrap();
        assert_eq!((up.is_up, up.from, up.to), (true, None, Some(asked)));
        let down = table.find(&ends("192.0.2.1:443", "10.0.0.1:999")).unwrap();
        assert_eq!((down.leg, down.is_up, down.from, down.to), (up.leg, false, None, None));
        assert_eq!(table.find(&ends("127.0.0.1:1080", "10.0.0.1:999")).unwrap().from, Some(asked));
        assert_eq!(table.find(&ends("10.0.0.1:998", "127.0.0.1:1080")), None);
        let udp = Ends { protocol: Protocol::Udp, ..leg.ends };
        assert_eq!(table.find(&udp), None);
    }

    #[test]
    fn packets_to_the_server_go_up() {
        let mut table = Table::default();
        let leg = Leg { side: Side::Server, ends: ends("192.0.2.1:80", "10.0.0.2:777"), asked: None };
        table.note(Instant::ZERO, FlowId(1), leg);
        assert!(table.find(&leg.ends.answer()).unwrap().is_up);
        assert!(!table.find(&leg.ends).unwrap().is_up);
    }

    #[test]
    fn flows_share_a_leg_and_it_goes_when_none_runs() {
        let mut table = Table::default();
        let leg = Leg { side: Side::Client, ends: ends("10.0.0.1:1", "10.0.0.2:2"), asked: None };
        for flow in 1..40 {
            table.note(Instant::ZERO, FlowId(flow), leg);
        }
        let number = table.find(&leg.ends).unwrap().leg;
        assert_eq!(table.flows(number).len(), Table::FLOWS_MAX);
        assert_eq!(table.flows(number).last(), Some(&FlowId(39)));
        let later = Instant::ZERO + Table::KEPT;
        table.sweep(later, |flow| flow == FlowId(30));
        assert_eq!(table.len(), 1);
        table.sweep(later, |_| false);
        assert!(table.is_empty() && table.find(&leg.ends).is_none());
    }

    #[test]
    fn the_number_of_legs_is_bounded() {
        let mut table = Table::default();
        for number in 0..=Table::LEGS_MAX {
            let from = SocketAddr::from(([10, 0, 0, 1], u16::try_from(number % 65536).unwrap()));
            let to = SocketAddr::from(([10, 0, 0, 2], u16::try_from(number / 65536).unwrap()));
            let ends = Ends { protocol: Protocol::Tcp, from, to };
            let leg = Leg { side: Side::Client, ends, asked: None };
            assert_eq!(table.note(Instant::ZERO, FlowId(1), leg), number < Table::LEGS_MAX);
        }
    }
}
