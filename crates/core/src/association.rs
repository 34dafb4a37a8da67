//! UDP as flows: which datagrams belong together, which may pass, and how each association ends (RFC 4787).
//!
//! A *mapping* is one client endpoint and the outside port that represents it. The mapping is endpoint-independent
//! always (REQ-1): the client keeps its outside port, whatever server it talks to. An *association* is one mapping and
//! one destination: a flow, which policy decides, and which leaves one record. [`Filtering`] chooses which servers may
//! send to a mapping.
//!
//! ```text
//!                         first datagram                     no room, and it came from the server: dropped
//!   (nothing) ------------------------------------> ASKED   (a client's takes the place that is idle for longest)
//!       ^                                           |   |
//!       |            opened: held datagrams go on   |   |  refused: one End, held datagrams are dropped
//!       |                                           v   v
//!       |     datagrams both ways restart idle  +- OPEN REFUSED -+  further datagrams of the client are dropped
//!       |                                       +-> |   |  <----+
//!       +--- idle, lifetime, closed, killed, limit -+   |
//!       |    (one End with its reason)                  |
//!       +---- `refused_for` is over, limit: silent -----+
//! ```
//!
//! The machine **counts datagrams and never touches them**. Each datagram has exactly one [`Output::Forward`],
//! [`Output::Deliver`], [`Output::Hold`] or [`Output::Drop`]. A refused association stays for a while, so that a client
//! that repeats its datagrams causes one record instead of thousands. An ICMP error ends nothing (REQ-10): the
//! association ends with the error's reason only if the server has not sent since.

mod few;
mod order;
mod table;

pub use table::{Again, Table};

use crate::flow::{Destination, EndReason, Side};
use std::net::SocketAddr;
use std::time::Duration;

/// Most datagrams that wait for one association to open.
pub const HELD_MAX: u32 = 16;

/// Most bytes that wait in one table for associations to open.
pub const HELD_BYTES_MAX: usize = 4 << 20;

/// Which servers may send to a mapping (RFC 4787 Sec. 5).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Filtering {
    /// Every server, once the client has sent anything. Peer-to-peer programs work best with it.
    EndpointIndependent,
    /// Servers at an address to which the client has sent.
    AddressDependent,
    /// Servers at an address and port to which the client has sent.
    #[default]
    AddressAndPortDependent,
}

/// The limits of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Which servers may send to a mapping.
    pub filtering: Filtering,
    /// Most associations, at least 1. It includes refused ones.
    pub max: usize,
    /// The share of one client (an IPv4 address, or the /64 of an IPv6 address), at least 1. A client that has its share in a
    /// full table gives the place for its next association itself.
    pub per_client: usize,
    /// An association ends after this time without a datagram that passed. Default: 300 s (REQ-5).
    pub idle: Duration,
    /// An association ends after this time since its first datagram. Default: `None`, no limit.
    pub lifetime: Option<Duration>,
    /// Time from the first datagram until the association must be open. Default: 30 s.
    pub opening: Duration,
    /// How long the datagrams of a refused association are dropped before policy is asked again. Default: 10 s.
    pub refused_for: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            filtering: Filtering::default(),
            max: 16_384,
            per_client: 8_192,
            idle: Duration::from_secs(300),
            lifetime: None,
            opening: Duration::from_secs(30),
            refused_for: Duration::from_secs(10),
        }
    }
}

/// One association. An id is not used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    /// Its index, below [`Config::max`]. The driver may use it for its own table.
    pub slot: u32,
    generation: u32,
}

/// One mapping: an index below [`Config::max`]. It is used again after [`Output::Unmapped`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MappingId(pub u32);

/// An event that the driver reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// A client has sent a datagram of `bytes` payload bytes.
    FromClient {
        /// The client's address and port.
        client: SocketAddr,
        /// The destination that the client asks for.
        destination: &'a Destination,
        /// Bytes of payload. May be 0.
        bytes: usize,
    },
    /// A datagram came to the outside port of a mapping.
    FromServer {
        /// The mapping.
        mapping: MappingId,
        /// The sender.
        remote: SocketAddr,
        /// Bytes of payload. May be 0.
        bytes: usize,
    },
    /// The server of an association has sent a datagram on a path that only this association has: a hop does not say which
    /// address belongs to a name.
    FromServerOf {
        /// The association.
        id: Id,
        /// Bytes of payload. May be 0.
        bytes: usize,
    },
    /// The path of an association is open. Late reports about an association that is over are ignored, also below.
    Opened {
        /// The association.
        id: Id,
        /// The address from which its server sends. `None`: a hop resolves the name.
        remote: Option<SocketAddr>,
        /// Its idle time, instead of [`Config::idle`].
        idle: Option<Duration>,
        /// Its lifetime, instead of [`Config::lifetime`].
        lifetime: Option<Duration>,
    },
    /// The association may not, or cannot, be opened.
    Refused(Id, EndReason),
    /// An ICMP error came about the association. It goes on.
    Error(Id, EndReason),
    /// The association ends now: killed, or its hop is gone.
    End(Id, EndReason),
    /// A mapping ends now with all its associations: its client has closed it.
    Close(MappingId, EndReason),
    /// The deadline may have passed.
    Tick,
}

/// Why a datagram was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dropped {
    /// The table is full, and a datagram of a server does not end another association.
    Full,
    /// The sender is not one of the servers that may send to the mapping.
    Filtered,
    /// Its association was refused.
    Refused,
    /// Too many datagrams, or bytes, wait for associations to open.
    Waiting,
    /// It came to a mapping that is over.
    Unknown,
    /// A socket buffer had no room for it, or the system refused to send it. The driver counts these and those below.
    Unsent,
    /// It is longer than its path carries.
    TooLong,
    /// It came to the port of a SOCKS client from another sender.
    Stranger,
    /// It is a fragment in the sense of RFC 1928 Sec. 7.
    Fragment,
    /// Its header is malformed.
    Malformed,
    /// A function of kind `limit` has no bandwidth for it.
    Limited,
}

impl Dropped {
    /// All values, in the order of their declaration.
    pub const ALL: [Self; 11] = [
        Self::Full,
        Self::Filtered,
        Self::Refused,
        Self::Waiting,
        Self::Unknown,
        Self::Unsent,
        Self::TooLong,
        Self::Stranger,
        Self::Fragment,
        Self::Malformed,
        Self::Limited,
    ];

    /// Returns the word of metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Filtered => "filtered",
            Self::Refused => "refused",
            Self::Waiting => "waiting",
            Self::Unknown => "unknown",
            Self::Unsent => "unsent",
            Self::TooLong => "too_long",
            Self::Stranger => "stranger",
            Self::Fragment => "fragment",
            Self::Malformed => "malformed",
            Self::Limited => "limited",
        }
    }
}

/// What the driver has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// A new association: ask policy, and answer with [`Input::Opened`] or [`Input::Refused`].
    Begin {
        /// The association.
        id: Id,
        /// Its mapping.
        mapping: MappingId,
        /// The mapping is new too: it needs an outside port.
        is_mapping_new: bool,
        /// The side that has sent the first datagram.
        from: Side,
    },
    /// Send the datagram of this input to the server.
    Forward(Id),
    /// Send the datagram of this input to the client.
    Deliver(Id),
    /// Hold the datagram of this input until [`Output::Release`] or [`Output::End`].
    Hold(Id),
    /// Drop the datagram of this input.
    Drop(Dropped),
    /// Send the held datagrams of this association on, to the other side of the one that has begun it.
    Release(Id),
    /// The association is over: write its record, and drop what is held. The only one for this association.
    End {
        /// The association.
        id: Id,
        /// The only reason.
        reason: EndReason,
        /// What has passed.
        counts: Counts,
    },
    /// The mapping has no association any more: its outside port may be closed.
    Unmapped(MappingId),
}

/// The datagrams of one association that have passed, and their payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Datagrams from the client to the server.
    pub packets_up: u64,
    /// Datagrams from the server to the client.
    pub packets_down: u64,
    /// Bytes from the client to the server.
    pub bytes_up: u64,
    /// Bytes from the server to the client.
    pub bytes_down: u64,
}

impl Counts {
    fn add(&mut self, from: Side, packets: u64, bytes: usize) {
        let (all, sum) = match from {
            Side::Client => (&mut self.packets_up, &mut self.bytes_up),
            Side::Server => (&mut self.packets_down, &mut self.bytes_down),
        };
        *all += packets;
        *sum += bytes as u64;
    }
}

/// Counts of one table since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Associations that have begun.
    pub begun: u64,
    /// Associations that ended to make room for others.
    pub left: u64,
    /// Dropped datagrams, in the order of [`Dropped::ALL`].
    pub dropped: [u64; Dropped::ALL.len()],
}
