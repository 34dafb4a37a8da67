//! What this kernel's nftables can do, found out by trying: each try is a transaction that is never committed, so that nothing
//! changes and no program sees it.

use std::collections::BTreeMap;
use std::fmt;

use sidetrack_core::flow::Protocol;
use sidetrack_core::net::IpNet;

use super::apply::Lifetime;
use super::compile;
use super::{
    Chain, ChainKind, DataKind, Element, Family, Field, Flowtable, Hook, LastState, RTN_LOCAL, Rule, Set,
    Span, Statement, TCP, Table, Test, TimeoutPolicy, Value, ct_event, priority,
};
use crate::netlink::{Error, Requests, Socket};
use crate::nfqueue::HOLD_NUMBERS;

/// Something a kernel may or may not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// nftables at all, with tables of family inet.
    Tables,
    /// Tables that go with their owner.
    Owner,
    /// Tables that stay for a successor.
    Persist,
    /// nat chains in family inet, and REDIRECT.
    Redirect,
    /// DNAT by a map of address and port.
    DnatMap,
    /// MASQUERADE.
    Masquerade,
    /// TPROXY.
    TProxy,
    /// Matching transparent sockets.
    SocketTransparent,
    /// Matching sockets by cgroup.
    SocketCgroup,
    /// Matching the type of an address.
    Fib,
    /// Choosing the conntrack events of a connection.
    CtEvents,
    /// Choosing the conntrack time-outs of a connection.
    CtTimeout,
    /// Rejecting with a TCP reset.
    Reject,
    /// Sets of ranges over several fields.
    ConcatenatedRanges,
    /// Flow tables: forwarding past the rules.
    Flowtable,
    /// Handing packets to user space (NFQUEUE, as a target of xtables).
    Queue,
}

impl Feature {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::Tables,
        Self::Owner,
        Self::Persist,
        Self::Redirect,
        Self::DnatMap,
        Self::Masquerade,
        Self::TProxy,
        Self::SocketTransparent,
        Self::SocketCgroup,
        Self::Fib,
        Self::CtEvents,
        Self::CtTimeout,
        Self::Reject,
        Self::ConcatenatedRanges,
        Self::Flowtable,
        Self::Queue,
    ];

    /// The first kernel that has it, and the configuration option that must be on.
    pub const fn needs(self) -> &'static str {
        match self {
            Self::Tables => "CONFIG_NF_TABLES_INET",
            Self::Owner => "Linux 5.12",
            Self::Persist => "Linux 6.9",
            Self::Redirect => "Linux 5.2, CONFIG_NFT_NAT and CONFIG_NFT_REDIR",
            Self::DnatMap => "Linux 5.2, CONFIG_NFT_NAT",
            Self::Masquerade => "Linux 5.2, CONFIG_NFT_MASQ",
            Self::TProxy => "Linux 4.19, CONFIG_NFT_TPROXY",
            Self::SocketTransparent => "Linux 5.10, CONFIG_NFT_SOCKET",
            Self::SocketCgroup => "Linux 5.13, CONFIG_NFT_SOCKET and CONFIG_SOCK_CGROUP_DATA",
            Self::Fib => "CONFIG_NFT_FIB_INET",
            Self::CtEvents => "CONFIG_NFT_CT and CONFIG_NF_CONNTRACK_EVENTS",
            Self::CtTimeout => "Linux 4.19, CONFIG_NFT_CT and CONFIG_NF_CONNTRACK_TIMEOUT",
            Self::Reject => "CONFIG_NFT_REJECT_INET",
            Self::ConcatenatedRanges => "Linux 5.6",
            Self::Flowtable => "Linux 4.16, CONFIG_NF_FLOW_TABLE_INET",
            Self::Queue => {
                "CONFIG_NETFILTER_NETLINK_QUEUE, CONFIG_NETFILTER_XT_TARGET_NFQUEUE and CONFIG_NFT_COMPAT"
            }
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tables => "nftables",
            Self::Owner => "nft table flag owner",
            Self::Persist => "nft table flag persist",
            Self::Redirect => "nft redirect",
            Self::DnatMap => "nft dnat by map",
            Self::Masquerade => "nft masquerade",
            Self::TProxy => "nft tproxy",
            Self::SocketTransparent => "nft socket transparent",
            Self::SocketCgroup => "nft socket cgroupv2",
            Self::Fib => "nft fib",
            Self::CtEvents => "nft ct event",
            Self::CtTimeout => "nft ct timeout",
            Self::Reject => "nft reject",
            Self::ConcatenatedRanges => "nft sets of concatenated ranges",
            Self::Flowtable => "nft flowtable",
            Self::Queue => "NFQUEUE",
        })
    }
}

/// What a kernel has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// For each feature it lacks, the error number it answered with.
    pub missing: BTreeMap<Feature, i32>,
}

impl Probe {
    /// Whether the feature is there.
    pub fn has(&self, feature: Feature) -> bool {
        !self.missing.contains_key(&feature)
    }
}

/// Tries every feature on a netfilter socket.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN: then nothing is known. Otherwise only failures of the socket.
pub fn probe(socket: &mut Socket) -> Result<Probe, Error> {
    let mut found = Probe::default();
    for feature in Feature::ALL {
        if let Some(errno) = refusal(socket, &requests(feature))? {
            found.missing.insert(feature, errno);
        }
    }
    Ok(found)
}

/// Whether the kernel has this feature.
///
/// # Errors
/// As [`probe`].
pub fn knows(socket: &mut Socket, feature: Feature) -> Result<bool, Error> {
    Ok(refusal(socket, &requests(feature))?.is_none())
}

/// Whether the kernel knows the table flags of a lifetime.
pub(super) fn knows_lifetime(socket: &mut Socket, lifetime: Lifetime) -> Result<bool, Error> {
    Ok(refusal(socket, &lifetime_requests(lifetime))?.is_none())
}

/// The error number with which the kernel answers a dry run; `None` if it takes it.
fn refusal(socket: &mut Socket, requests: &Requests) -> Result<Option<i32>, Error> {
    match socket.transact(requests) {
        Ok(()) => Ok(None),
        Err(Error::Refused(refusal)) if refusal.errno != libc::EPERM => Ok(Some(refusal.errno)),
        Err(error) => Err(error),
    }
}

const NAME: &str = "sidetrack-probe";

fn requests(feature: Feature) -> Requests {
    match feature {
        Feature::Owner => lifetime_requests(Lifetime::Socket),
        Feature::Persist => lifetime_requests(Lifetime::SocketThenOrphan),
        _ => compile::dry_run(|requests| compile::create(requests, &table(feature), 0)),
    }
}

fn lifetime_requests(lifetime: Lifetime) -> Requests {
    compile::dry_run(|requests| compile::create(requests, &Table::new(Family::Inet, NAME), lifetime.flags()))
}

/// A table with one rule that uses the feature.
fn table(feature: Feature) -> Table {
    use Statement as S;
    let one = |kind, hook, priority, statements: Vec<Statement>| {
        let chain = Chain::base("probe", kind, hook, priority).with(Rule::new(statements));
        Table::new(Family::Inet, NAME).with_chain(chain)
    };
    let nat = |hook, statements| one(ChainKind::Nat, hook, priority::DSTNAT, statements);
    let filter = |statements| one(ChainKind::Filter, Hook::Prerouting, priority::MANGLE, statements);
    match feature {
        Feature::Redirect => nat(Hook::Output, vec![S::is(Field::L4Proto, TCP), S::Redirect { port: 1 }]),
        Feature::DnatMap => {
            let dnat = S::DnatMap {
                fields: super::build::destination_fields(Protocol::Tcp, false),
                map: "map".into(),
                v6: false,
            };
            nat(Hook::Prerouting, vec![dnat]).with_set(super::build::empty_server_map("map"))
        }
        Feature::Masquerade => nat(Hook::Postrouting, vec![S::Masquerade]),
        Feature::TProxy => filter(vec![S::TProxy { v6: false, port: 1 }, S::TProxy { v6: true, port: 1 }]),
        Feature::SocketTransparent => filter(vec![
            S::is(Field::SocketTransparent, Value::Boolean(true)),
            S::is(Field::SocketWildcard, Value::Boolean(false)),
        ]),
        Feature::SocketCgroup => filter(vec![S::is(Field::SocketCgroup { level: 1 }, Value::Cgroup(1))]),
        Feature::Fib => filter(vec![S::is(Field::DestinationType, Value::AddressType(RTN_LOCAL))]),
        Feature::CtEvents => filter(vec![S::SetCtEvents(ct_event::DESTROY)]),
        Feature::CtTimeout => {
            let policy = TimeoutPolicy {
                name: "probe".into(),
                protocol: Protocol::Tcp,
                seconds: vec![(LastState::Close, 1)],
            };
            filter(vec![S::is(Field::L4Proto, TCP), S::SetCtTimeout("probe".into())]).with_timeouts(policy)
        }
        Feature::Reject => one(ChainKind::Filter, Hook::Output, priority::FILTER, vec![S::RejectWithReset]),
        Feature::ConcatenatedRanges => filter(vec![S::Match(
            super::build::destination_fields(Protocol::Tcp, false),
            Test::In("ranges".into()),
        )])
        .with_set(concatenated_ranges()),
        Feature::Flowtable => {
            let flowtable =
                Flowtable { name: "probe".into(), priority: 0, devices: Vec::new(), counter: false };
            Table::new(Family::Inet, NAME).with_flowtable(flowtable)
        }
        Feature::Queue => filter(vec![S::Queue { number: *HOLD_NUMBERS.start(), bypass: true }]),
        Feature::Tables | Feature::Owner | Feature::Persist => Table::new(Family::Inet, NAME),
    }
}

fn concatenated_ranges() -> Set {
    let net = IpNet::new(std::net::Ipv4Addr::new(192, 0, 2, 0).into(), 24);
    let element = Element::set(vec![Span::from(net), Span::ports(1, 2)]);
    let key = vec![DataKind::Ipv4, DataKind::Port];
    Set { name: "ranges".into(), key, interval: true, data: None, elements: vec![element] }
}
