//! Connection tracking (ctnetlink): events, lists and deletion. Numbers: linux/netfilter/nfnetlink_conntrack.h.
//!
//! - An event leaves when its packet passes the last hook. DESTROY events carry byte counts only while
//!   [`enable_accounting`] is in force, and only for connections that began after it.
//! - ENOBUFS means events are lost: [`Event::Overrun`]. A caller that needs all of them lists the table again and compares.

mod events;
mod filter;
mod parse;

use std::io;
use std::net::SocketAddr;

use crate::netlink::{AttributeWriter, Error, Protocol, Requests, Socket, flag};
use crate::nft::MarkBits;
use crate::sysctl;

pub use events::{Event, Events, Group, buffer_bytes};
pub use filter::Only;
pub use parse::{parse, parse_datagram};

const SUBSYSTEM: u16 = 1;
const NEW: u16 = SUBSYSTEM << 8;
const GET: u16 = (SUBSYSTEM << 8) | 1;
const DELETE: u16 = (SUBSYSTEM << 8) | 2;

/// IP protocol number of TCP.
const TCP: u8 = 6;
/// `IP_CT_TCP_FLAG_BE_LIBERAL`.
const LIBERAL: u8 = 0x08;
/// `IP_CT_TCP_FLAG_MAXACK_SET`.
const ACKNOWLEDGED: u8 = 0x20;

/// Attribute numbers (`CTA_*`).
mod attribute {
    pub(super) const TUPLE_ORIGINAL: u16 = 1;
    pub(super) const TUPLE_REPLY: u16 = 2;
    pub(super) const STATUS: u16 = 3;
    pub(super) const PROTOCOL_INFO: u16 = 4;
    pub(super) const HELP: u16 = 5;
    pub(super) const TIMEOUT: u16 = 7;
    pub(super) const MARK: u16 = 8;
    pub(super) const COUNTERS_ORIGINAL: u16 = 9;
    pub(super) const COUNTERS_REPLY: u16 = 10;
    pub(super) const ID: u16 = 12;
    pub(super) const ZONE: u16 = 18;
    pub(super) const TIMESTAMP: u16 = 20;
    pub(super) const MARK_MASK: u16 = 21;
}

/// Bits of [`Entry::status`] (`IPS_*`).
pub mod status {
    /// Packets of both directions were seen.
    pub const SEEN_REPLY: u32 = 0x2;
    /// It is not evicted early.
    pub const ASSURED: u32 = 0x4;
    /// Its first packet has left.
    pub const CONFIRMED: u32 = 0x8;
    /// Its source is rewritten.
    pub const SRC_NAT: u32 = 0x10;
    /// Its destination is rewritten.
    pub const DST_NAT: u32 = 0x20;
    /// It is on its way out.
    pub const DYING: u32 = 0x200;
    /// A flow table forwards it.
    pub const OFFLOAD: u32 = 0x4000;
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    /// Where packets of this direction come from.
    pub source: SocketAddr,
    /// Where they go to.
    pub destination: SocketAddr,
    /// IP protocol number, 6 for TCP.
    pub protocol: u8,
}

/// What passed in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets.
    pub packets: u64,
    /// Bytes, IP headers included.
    pub bytes: u64,
}

/// A tracked connection as an event or a list shows it. What the kernel did not send is `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The connection's id; together with `start_ns` unique across port reuse.
    pub id: Option<u32>,
    /// As the client sent it.
    pub original: Tuple,
    /// As answers come back: shows what NAT did.
    pub reply: Tuple,
    /// Bits of [`status`].
    pub status: u32,
    /// The connection mark; 0 is not sent and reads as 0.
    pub mark: u32,
    /// Seconds until it is forgotten.
    pub timeout_s: Option<u32>,
    /// `TCP_CONNTRACK_*` state, 3 is established.
    pub tcp_state: Option<u8>,
    /// From client to server; with accounting only.
    pub client_to_server: Option<Counters>,
    /// From server to client; with accounting only.
    pub server_to_client: Option<Counters>,
    /// When it began, nanoseconds since 1970; with time stamps only.
    pub start_ns: Option<u64>,
    /// When it ended; in DESTROY events, with time stamps only.
    pub stop_ns: Option<u64>,
    /// Conntrack zone.
    pub zone: u16,
    /// A helper (application-level gateway) reads its content.
    pub helped: bool,
}

/// What to change of a connection; what is `None` or `false` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Bits of the mark.
    pub mark: Option<MarkBits>,
    /// TCP: accept whatever sequence numbers come, in both directions (`IP_CT_TCP_FLAG_BE_LIBERAL`): for connections of
    /// which conntrack does not see every packet. Sequence numbers are then accepted, not learnt anew.
    pub liberal: bool,
    /// TCP: forget the latest acknowledgement of both directions (`IP_CT_TCP_FLAG_MAXACK_SET`), against which a RST is
    /// judged: until the next one is seen, every RST ends the connection. For connections whose RSTs another program has judged.
    pub forget_acknowledged: bool,
    /// Seconds until it is forgotten unless packets come.
    pub timeout_s: Option<u32>,
}

/// The settings that accounting needs, and their values.
const ACCOUNTING: [(&str, &str); 3] = [
    ("net/netfilter/nf_conntrack_acct", "1"),
    // 2, the default, gives connections that began before a listener joined no events at all.
    ("net/netfilter/nf_conntrack_events", "1"),
    ("net/netfilter/nf_conntrack_timestamp", "1"),
];

/// Switches byte counts, events and time stamps on in this network namespace. Returns name and former value of what was
/// changed, for undoing with [`sysctl::write`].
///
/// # Errors
/// `NotFound` if this kernel has no conntrack (or its module is not loaded: make a table that uses it first);
/// `PermissionDenied` without the right.
pub fn enable_accounting() -> io::Result<Vec<(&'static str, String)>> {
    let mut changed = Vec::new();
    for (name, value) in ACCOUNTING {
        let before = sysctl::write(name, value)?;
        if before != value {
            changed.push((name, before));
        }
    }
    Ok(changed)
}

/// A connection to the conntrack table of one network namespace, for lists and deletions.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

/// Returns the address that a redirected client has itself, from the two ends of its connection as we see them. The kernel
/// gives it another port if that connection would be one that conntrack knows: one program may use a port for several servers, and an
/// ended connection is known for two minutes. `None`: conntrack does not know the connection, or this thread has no CAP_NET_ADMIN.
pub fn behind_redirect(ours: SocketAddr, client: SocketAddr) -> Option<SocketAddr> {
    let reply = Tuple { source: ours, destination: client, protocol: TCP };
    let entry = Conntrack::open().ok()?.find(&reply, 0).ok()??;
    (entry.reply == reply).then_some(entry.original.source)
}

impl Conntrack {
    /// Opens a socket; needs no right yet.
    ///
    /// # Errors
    /// If the kernel has no netfilter netlink.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(Protocol::Netfilter)? })
    }

    /// Lists the connections whose mark fits (the kernel filters), or all.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn list(&mut self, mark: Option<MarkBits>) -> Result<Vec<Entry>, Error> {
        let mut request = Requests::new();
        request.push("list connections", GET, flag::DUMP, &header(0), |w| {
            if let Some(mark) = mark {
                w.u32_be(attribute::MARK, mark.value);
                w.u32_be(attribute::MARK_MASK, mark.mask);
            }
        });
        // A mark filter is ignored by kernels before 3.6 and by odd ones after; a second look costs nothing.
        let fits = |entry: &Entry| mark.is_none_or(|mark| entry.mark & mark.mask == mark.value & mark.mask);
        self.socket.dump(&request, |message| parse(message).filter(fits))
    }

    /// One connection as it is now, by the addresses of its first packet; `None` if there is none.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn find(&mut self, original: &Tuple, zone: u16) -> Result<Option<Entry>, Error> {
        let mut request = Requests::new();
        request.push("look up a connection", GET, 0, &header(family(original)), |w| {
            write_tuple(w, attribute::TUPLE_ORIGINAL, original);
            if zone != 0 {
                w.u16_be(attribute::ZONE, zone);
            }
        });
        match self.socket.ask(&request, parse) {
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(None),
            found => found,
        }
    }

    /// Lets the kernel notice connections whose time has run out. By itself it looks at each only every half minute or so,
    /// and the DESTROY event comes as late as that.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn evict_expired(&mut self) -> Result<(), Error> {
        // Listing the table evicts what has expired; nothing has this mark.
        self.list(Some(MarkBits { value: u32::MAX, mask: u32::MAX })).map(drop)
    }

    /// Changes a connection; says whether it was there. It is reported as an update, to the caller's own subscriptions too.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn update(&mut self, original: &Tuple, zone: u16, change: Change) -> Result<bool, Error> {
        let mut request = Requests::new();
        // Without CREATE: one that is gone is not made anew.
        request.push("change a connection", NEW, flag::ACK, &header(family(original)), |w| {
            write_tuple(w, attribute::TUPLE_ORIGINAL, original);
            if let Some(mark) = change.mark {
                w.u32_be(attribute::MARK, mark.value);
                w.u32_be(attribute::MARK_MASK, mark.mask);
            }
            let liberal = if change.liberal { LIBERAL } else { 0 };
            let mask = liberal | if change.forget_acknowledged { ACKNOWLEDGED } else { 0 };
            if mask != 0 && original.protocol == TCP {
                // Flags and the mask of those that change, for both directions.
                w.nested(attribute::PROTOCOL_INFO, |w| {
                    w.nested(1, |w| [4, 5].into_iter().for_each(|kind| w.bytes(kind, &[liberal, mask])));
                });
            }
            if let Some(timeout_s) = change.timeout_s {
                w.u32_be(attribute::TIMEOUT, timeout_s);
            }
            if zone != 0 {
                w.u16_be(attribute::ZONE, zone);
            }
        });
        match self.socket.transact(&request) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Deletes exactly this connection: next packets of it begin a new one. Says whether it was still there.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN.
    pub fn delete(&mut self, entry: &Entry) -> Result<bool, Error> {
        let mut request = Requests::new();
        // A deletion without a tuple would empty the whole table; this one always has one.
        request.push("delete a connection", DELETE, flag::ACK, &header(family(&entry.original)), |w| {
            write_tuple(w, attribute::TUPLE_ORIGINAL, &entry.original);
            if let Some(id) = entry.id {
                w.u32_be(attribute::ID, id);
            }
            if entry.zone != 0 {
                w.u16_be(attribute::ZONE, entry.zone);
            }
        });
        match self.socket.transact(&request) {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// `struct nfgenmsg`.
const fn header(family: u8) -> [u8; 4] {
    [family, 0, 0, 0]
}

/// `AF_INET` or `AF_INET6`.
const fn family(tuple: &Tuple) -> u8 {
    if tuple.source.is_ipv4() { 2 } else { 10 }
}

fn write_tuple(w: &mut AttributeWriter<'_>, kind: u16, tuple: &Tuple) {
    w.nested(kind, |w| {
        let base = if tuple.source.is_ipv4() { 1 } else { 3 };
        w.nested(1, |w| {
            w.address(base, tuple.source.ip());
            w.address(base + 1, tuple.destination.ip());
        });
        w.nested(2, |w| {
            w.u8(1, tuple.protocol);
            w.u16_be(2, tuple.source.port());
            w.u16_be(3, tuple.destination.port());
        });
    });
}
