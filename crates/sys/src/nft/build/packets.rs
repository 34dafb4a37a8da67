//! The table that catches whole packets for the overlay.

use sidetrack_core::net::{IpSet, PortSet};

use super::selector::{MarkBits, Versions};
use crate::nft::{
    Chain, ChainKind, DataKind, Family, Field, Hook, InterfaceName, Rule, Set, Span, Statement, Table, Value,
    Verdict, priority,
};

/// Packets that are to be caught.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketCatch {
    /// Those of this host only (hook output); else all that leave it, those it forwards too (hook postrouting).
    pub local: bool,
    /// To these addresses.
    pub to: IpSet,
    /// TCP and UDP with one of these ports at either end; none = with any.
    pub ports: Option<PortSet>,
    /// Set for IP multicast: its packets go on after the queue, so they stay in conntrack. Unless `local`, they are those that come
    /// in by these interfaces (hook prerouting): the host itself does not forward them.
    pub heard_on: Option<Vec<InterfaceName>>,
}

/// Catches packets and hands them to a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packets {
    /// The number of the queue.
    pub catches: Vec<PacketCatch>,
    /// The number of the queue.
    pub queue: u16,
    /// Whether packets pass while no process reads the queue; otherwise they are dropped.
    pub bypass: bool,
    /// Packets with these marks are ours and never caught: our sockets', and those that were delivered.
    pub own: [MarkBits; 2],
}

impl Packets {
    /// The table. What is caught, and what is delivered (the second of our marks), stays out of conntrack: it would know one
    /// direction only and take the other for invalid.
    pub fn table(&self, name: &str) -> Table {
        let mut table = Table::new(Family::Inet, name);
        let delivered = Statement::mark(Field::Mark, self.own[1].value, self.own[1].mask);
        let mut chains = [
            Chain::base("untracked_in", ChainKind::Filter, Hook::Prerouting, priority::RAW),
            Chain::base("untracked_out", ChainKind::Filter, Hook::Output, priority::RAW),
            Chain::base("caught_here", ChainKind::Filter, Hook::Output, priority::MANGLE),
            Chain::base("caught", ChainKind::Filter, Hook::Postrouting, priority::MANGLE),
            Chain::base("heard", ChainKind::Filter, Hook::Prerouting, priority::MANGLE),
        ];
        for chain in &mut chains {
            let is_raw = chain.name.starts_with("untracked");
            if is_raw {
                chain.rules.push(Rule::new([
                    delivered.clone(),
                    Statement::NoTrack,
                    Statement::Verdict(Verdict::Accept),
                ]));
            }
            for own in &self.own {
                chain.rules.push(Rule::new([
                    Statement::mark(Field::Mark, own.value, own.mask),
                    Statement::Verdict(Verdict::Accept),
                ]));
            }
        }
        for (number, catch) in self.catches.iter().enumerate() {
            let matches = catch.matches(&format!("catch{number}"), &mut table.sets);
            let [untracked_in, untracked_out, here, everywhere, heard] = &mut chains;
            for matching in matches {
                let with = |end: Statement| Rule::new(matching.iter().cloned().chain([end]));
                let queued = with(Statement::Queue { number: self.queue, bypass: self.bypass });
                if catch.heard_on.is_some() {
                    let chain = if catch.local { &mut *here } else { &mut *heard };
                    chain.rules.push(queued);
                    continue;
                }
                untracked_out.rules.push(with(Statement::NoTrack));
                if !catch.local {
                    untracked_in.rules.push(with(Statement::NoTrack));
                }
                let chain = if catch.local { &mut *here } else { &mut *everywhere };
                chain.rules.push(queued);
            }
        }
        table.chains.extend(chains);
        table
    }
}

impl PacketCatch {
    /// The matches of each rule needed; their sets are added to `sets`.
    fn matches(&self, name: &str, sets: &mut Vec<Set>) -> Vec<Vec<Statement>> {
        const TRANSPORTS: [u8; 2] = [6, 17];
        let mut rules = Vec::new();
        for v6 in Versions::BOTH.single() {
            let Some(addresses) = super::selector::address_set(&format!("{name}_to"), &self.to, v6) else {
                continue;
            };
            let field = if v6 { Field::Ip6Destination } else { Field::Ip4Destination };
            let to = Statement::is_in(field, &*addresses.name);
            super::selector::add(sets, addresses);
            let transport =
                TRANSPORTS.map(|protocol| Statement::is(Field::L4Proto, Value::Protocol(protocol)));
            for transport in transport {
                let mut common = vec![to.clone(), transport];
                if let (false, Some(interfaces)) = (self.local, &self.heard_on) {
                    common.extend(super::selector::interface_match(interfaces, name, sets));
                }
                match &self.ports {
                    None => rules.push(common),
                    Some(ports) => {
                        let spans: Vec<_> =
                            ports.ranges().map(|(first, last)| Span::ports(first, last)).collect();
                        let set = Set::of_spans(format!("{name}_ports"), DataKind::Port, spans);
                        for end in [Field::TransportDestination, Field::TransportSource] {
                            let port = Statement::is_in(end, &*set.name);
                            rules.push(common.iter().cloned().chain([port]).collect());
                        }
                        super::selector::add(sets, set);
                    }
                }
            }
        }
        rules
    }
}
