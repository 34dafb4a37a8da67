//! nftables: our one table, as values, as netlink and as text.
//!
//! A [`Table`] is plain data. [`Table::apply`] makes it real in one transaction, [`OwnedTable`] ties its life to ours, and its
//! `Display` prints what `nft list table` would print. Numbers: linux/netfilter/nf_tables.h.

mod apply;
mod build;
mod compile;
mod expression;
mod field;
mod interface;
mod list;
mod model;
mod owned;
mod probe;
mod refill;
mod render;
mod set;
mod timeout;
mod watch;

pub use apply::{Lifetime, TableInfo, delete_table, find_table};
pub use build::{
    ANSWERS_MARK, CgroupMatch, Except, HoldQueue, KernelPath, KernelRoute, MarkBits, NoKernelPath,
    PacketCatch, Packets, Redirect, Selector, Steering, TProxy, leaving_ours, run_namespace,
    run_namespace_held, run_namespace_with_datagrams, run_namespace_with_datagrams_held,
    run_namespace_with_servers, run_namespace_with_servers_held,
};
pub use field::{DataKind, Field, Value};
pub use interface::InterfaceName;
pub use list::{ListedChain, ListedTable, list_base_chains, list_tables};
pub use model::{
    Base, Chain, ChainKind, Family, Flowtable, Hook, Policy, Rule, Statement, Table, Test, Verdict,
};
pub use owned::{OwnError, OwnedTable};
pub use probe::{Feature, Probe, knows, probe};
pub use set::{Element, ElementData, MapData, Set, Span};
pub use timeout::{LastState, TimeoutPolicy};
pub use watch::RuleChanges;

/// `NFPROTO_IPV4`.
pub const NFPROTO_IPV4: u8 = 2;
/// `NFPROTO_IPV6`.
pub const NFPROTO_IPV6: u8 = 10;
/// `IPPROTO_TCP` as a value of [`Field::L4Proto`].
pub const TCP: Value = Value::Protocol(6);
/// `IPPROTO_UDP` as a value of [`Field::L4Proto`].
pub const UDP: Value = Value::Protocol(17);
/// `RTN_LOCAL` of [`Field::DestinationType`]: an address of this host.
pub const RTN_LOCAL: u32 = 2;
/// `RTN_BROADCAST` of [`Field::DestinationType`]: a broadcast address of a network of this host.
pub const RTN_BROADCAST: u32 = 3;
/// `RTN_MULTICAST` of [`Field::DestinationType`]: a multicast address.
pub const RTN_MULTICAST: u32 = 5;

/// Bits of [`Field::TcpFlags`] (RFC 9293 section 3.1).
pub mod tcp_flag {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Opens a connection.
    pub const SYN: u8 = 0x02;
    /// Resets it.
    pub const RST: u8 = 0x04;
    /// The acknowledgement field counts.
    pub const ACK: u8 = 0x10;

    pub(super) fn fmt(bits: u8, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = [(FIN, "fin"), (SYN, "syn"), (RST, "rst"), (ACK, "ack")];
        let set: Vec<_> = names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
        f.write_str(&set.join(","))
    }
}

/// Priorities with a name (linux/netfilter_ipv4.h); lower runs earlier.
pub mod priority {
    /// Before conntrack.
    pub const RAW: i32 = -300;
    /// Where packets are marked.
    pub const MANGLE: i32 = -150;
    /// Where destinations are rewritten.
    pub const DSTNAT: i32 = -100;
    /// Where packets are filtered.
    pub const FILTER: i32 = 0;
    /// Where sources are rewritten.
    pub const SRCNAT: i32 = 100;
}

/// Bits of [`Field::CtState`] (`NF_CT_STATE_BIT`).
pub mod ct_state {
    /// Not part of any connection.
    pub const INVALID: u32 = 1;
    /// Of a connection that both sides have spoken on.
    pub const ESTABLISHED: u32 = 2;
    /// Expected by another connection, or an ICMP error of one.
    pub const RELATED: u32 = 4;
    /// Of a connection that one side has spoken on.
    pub const NEW: u32 = 8;
    /// Kept out of conntrack.
    pub const UNTRACKED: u32 = 64;

    pub(super) fn fmt(bits: u32, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = [
            (INVALID, "invalid"),
            (ESTABLISHED, "established"),
            (RELATED, "related"),
            (NEW, "new"),
            (UNTRACKED, "untracked"),
        ];
        let set: Vec<_> = names.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
        f.write_str(&set.join(","))
    }
}

/// Bits of [`Statement::SetCtEvents`] (`1 << IPCT_*`).
pub mod ct_event {
    /// A new connection.
    pub const NEW: u32 = 1;
    /// A connection that is gone.
    pub const DESTROY: u32 = 4;
    /// Its mark changed.
    pub const MARK: u32 = 128;
}
