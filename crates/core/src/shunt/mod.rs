//! The shunt: which flows take the fast path, and how they get there and back (NFShunt).
//!
//! The packet filter's rules set a [`Mark`] that says what to do with a flow. [`Shunt`] is told of every connection
//! that conntrack reports. It requests entries of the fast path. It removes them when the connection ends, is idle,
//! or may not stay any longer.
//!
//! It extends the state machine of NFShunt, Fig. 4: connections end, permissions are withdrawn, idle flows come back,
//! and events can be lost. The bytes of both paths are added, so that all bytes are counted.
//!
//! ```text
//!             policy says shunt               confirmed
//!   SLOW ----------------------> REQUESTED ---------------> INSTALLED
//!    ^  ^                            | refused                  | FIN, RST, SYN, idle, rules changed, withdrawn
//!    |  |                            v                          v
//!    |  +---- after a while ---- FAILED                      LEAVING
//!    |                                                          | last counters are here
//!    +------------- the mark no longer says so ------------ ASKING
//! ```
//!
//! In ASKING the policy bit of the mark is cleared, so that the rules decide again at the next packet on the slow
//! path. Until conntrack has reported the cleared mark, an older event cannot bring the flow back.

mod capacity;
mod flows;
mod forward;
mod machine;
mod mark;
mod meaning;
mod rules;
mod times;
mod tracked;
mod tuple;
mod wish;

pub use crate::policy::FastPathKind;
pub use capacity::WhenFull;
pub use forward::ForwardLine;
pub use machine::{Config, Shunt};
pub use mark::{Mark, MarkActions, PortNumber, ShuntAction};
pub use meaning::Meaning;
pub use rules::RuleSet;
pub use times::Times;
pub use tracked::{Flow, Standing};
pub use tuple::Tuple;
pub use wish::{Want, Wish};

use crate::flow::Process;
pub use crate::flow::Protocol as Transport;
use std::num::NonZeroU64;
use std::time::Duration;

/// Distinguishes a connection from an earlier one with the same addresses and ports. Conntrack's id alone does not
/// suffice: it depends on a memory address and on the addresses of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// Conntrack's id.
    pub id: u32,
    start_ns: Option<NonZeroU64>,
}

impl Identity {
    /// Returns the identity of a connection with this id that began at `start_ns`, in ns since 1970. `None` if conntrack
    /// keeps no time stamps.
    pub const fn new(id: u32, start_ns: Option<u64>) -> Self {
        let start_ns = match start_ns {
            Some(start_ns) => NonZeroU64::new(start_ns),
            None => None,
        };
        Self { id, start_ns }
    }

    /// Returns when the connection began, in ns since 1970. `None` if conntrack keeps no time stamps.
    pub const fn start_ns(&self) -> Option<u64> {
        match self.start_ns {
            Some(start_ns) => Some(start_ns.get()),
            None => None,
        }
    }
}

/// The phase of a connection, as conntrack reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The TCP handshake is not complete.
    Opening,
    /// The connection is established.
    Open,
    /// A FIN was seen.
    Closing,
    /// The connection was reset.
    Reset,
}

/// Packets and bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets. One that holds several segments counts once, on both paths.
    pub packets: u64,
    /// Bytes of IP packets, headers included.
    pub bytes: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.packets = self.packets.saturating_add(other.packets);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Traffic of both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Both {
    /// From the client to the server.
    pub to_server: Traffic,
    /// From the server to the client.
    pub to_client: Traffic,
}

impl Both {
    /// Returns the traffic without a part of it. Zero if the part, which may be counted a moment later, is larger.
    #[must_use]
    pub const fn less(self, part: Self) -> Self {
        const fn less(all: Traffic, part: Traffic) -> Traffic {
            Traffic {
                packets: all.packets.saturating_sub(part.packets),
                bytes: all.bytes.saturating_sub(part.bytes),
            }
        }
        Self {
            to_server: less(self.to_server, part.to_server),
            to_client: less(self.to_client, part.to_client),
        }
    }
}

impl std::ops::AddAssign for Both {
    fn add_assign(&mut self, other: Self) {
        self.to_server += other.to_server;
        self.to_client += other.to_client;
    }
}

/// A connection as conntrack reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its addresses.
    pub tuple: Tuple,
    /// Distinguishes connections with the same addresses.
    pub identity: Identity,
    /// Its mark.
    pub mark: Mark,
    /// Its phase. `None` if the report does not contain it, because it has not changed.
    pub phase: Option<Phase>,
    /// Packets of both directions were seen, and the connection is assured (`SEEN_REPLY` and `ASSURED`; for UDP only
    /// the first).
    pub both_ways: bool,
    /// NAT rewrites its addresses, which the fast path cannot do.
    pub translated: bool,
    /// A conntrack helper of netfilter reads its content (FTP, SIP).
    pub inspected: bool,
    /// The traffic on the slow path, if the report contains it.
    pub traffic: Option<Both>,
}

/// Identifies one stay of one flow on the fast path. Ids rise from 1 and are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u64);

/// An entry of the fast path: how to treat both directions of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number.
    pub id: EntryId,
    /// The flow.
    pub tuple: Tuple,
    /// The ingress port of the client's packets, which is the egress port of the server's packets.
    pub client_port: PortNumber,
    /// The ingress port of the server's packets, which is the egress port of the client's packets.
    pub server_port: PortNumber,
    /// The fast path to use.
    pub path: FastPathKind,
    /// Packets are dropped instead of forwarded.
    pub block: bool,
    /// The entry ends after this time without a packet in a direction. [`Entry::NEVER_IDLE`]: it does not end.
    pub idle: Duration,
}

impl Entry {
    /// The idle time of a blocked flow: its entry stays until the connection ends or the rules change. If the entry
    /// ended after a pause, the next packet would pass.
    pub const NEVER_IDLE: Duration = Duration::MAX;
}

/// Why a flow left the fast path, or has to leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The connection is closing: a FIN was seen.
    Fin,
    /// The connection was reset.
    Rst,
    /// A SYN arrived on its addresses: another connection, or a forged packet.
    Syn,
    /// No packet arrived for the idle time.
    Idle,
    /// Conntrack forgot the connection.
    Ended,
    /// The rules have changed, so they decide again.
    RulesChanged,
    /// The mark has changed, and no longer demands this.
    MarkChanged,
    /// A person or a program withdrew it.
    Withdrawn,
    /// The fast path needed its place for another entry.
    Evicted,
    /// The fast path did not confirm it in time.
    Unconfirmed,
    /// The fast path was lost (a switch disappeared), or another program removed its entries.
    Lost,
    /// The shunt stops.
    Shutdown,
}

impl Cause {
    /// Returns the word of listings and records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fin => "fin",
            Self::Rst => "rst",
            Self::Syn => "syn",
            Self::Idle => "idle",
            Self::Ended => "ended",
            Self::RulesChanged => "rules_changed",
            Self::MarkChanged => "mark_changed",
            Self::Withdrawn => "withdrawn",
            Self::Evicted => "evicted",
            Self::Unconfirmed => "unconfirmed",
            Self::Lost => "lost",
            Self::Shutdown => "shutdown",
        }
    }

    /// Whether the policy is still valid when an entry is removed for this cause. A blocked flow is then blocked
    /// again at once, without asking the rules.
    pub const fn keeps_block(self) -> bool {
        !matches!(
            self,
            Self::RulesChanged | Self::MarkChanged | Self::Withdrawn | Self::Shutdown | Self::Ended
        )
    }

    /// Whether the connection itself has ended or ends.
    pub const fn is_end(self) -> bool {
        matches!(self, Self::Fin | Self::Rst | Self::Ended)
    }
}

/// Why a flow that policy wants on the fast path is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// The mark names an unknown port, or the same port for both sides.
    UnknownPort,
    /// The number of the action in the mark has no meaning.
    UnknownAction,
    /// Its rule waits for more bytes, or for more time.
    TooEarly,
    /// A rule needs the process behind the flow, and the search for it is not finished.
    Unidentified,
    /// The configuration has `fast_path = "none"`. Otherwise the flow would be shunted.
    NoPath,
    /// The handshake is not complete, or only one direction was seen.
    NotEstablished,
    /// The connection is closing.
    Closing,
    /// NAT rewrites its addresses.
    Translated,
    /// A conntrack helper reads its content.
    Inspected,
    /// The fast path cannot match flows of this kind (IPv6 in OpenFlow 1.0).
    Unsupported,
    /// The table is full, or the client has reached its limit of entries.
    Full,
    /// The fast path refused the entry.
    Refused,
    /// The fast path cannot be reached now.
    Unreachable,
    /// A person or a program keeps the flow on the slow path.
    Held,
}

impl Obstacle {
    /// Returns the reason in words, for `shunt why`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UnknownPort => "its mark names a port that the configuration does not have",
            Self::UnknownAction => "the number of the action in its mark has no meaning in the configuration",
            Self::TooEarly => "its rule waits for more bytes, or for time to pass",
            Self::Unidentified => "a rule asks for the process behind it, which is being looked for",
            Self::NoPath => "fast_path = \"none\": it would be shunted",
            Self::NotEstablished => "packets of both directions have not been seen yet",
            Self::Closing => "the connection is closing",
            Self::Translated => "its addresses are rewritten (NAT), which the fast path does not do",
            Self::Inspected => "a conntrack helper reads its content",
            Self::Unsupported => "the fast path cannot match flows of this kind",
            Self::Full => {
                "the table of the fast path is full, or its client has as many entries as one may have"
            }
            Self::Refused => "the fast path refused the entry",
            Self::Unreachable => "the fast path is not reachable",
            Self::Held => "it was released to the slow path for good",
        }
    }
}

/// An event for a shunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// Conntrack reports an existing connection.
    Connection(Connection),
    /// Conntrack reports the end of a connection.
    Ended(Connection),
    /// The traffic on the slow path so far.
    SlowCounted(Tuple, Identity, Both),
    /// The process behind a connection, as requested with [`Output::Whose`]. [`Process::default`] if it is unknown.
    Owned(Tuple, Identity, &'a Process),
    /// Some of conntrack's reports were lost.
    EventsLost,
    /// All existing connections, as requested with [`Output::List`].
    Listed(&'a [Connection]),
    /// The fast path has installed the entry.
    Installed(EntryId),
    /// The fast path has not installed the entry.
    Failed(EntryId, Obstacle),
    /// The traffic on the fast path so far.
    Counted(EntryId, Both),
    /// The fast path has removed the entry: the cause, and all traffic of the stay.
    Gone(EntryId, Cause, Both),
    /// The fast path can be reached again.
    PathBack,
    /// The rules have changed.
    RulesChanged,
    /// A person or a program demands this action for a connection, whatever policy says.
    Pinned(Connection, ShuntAction),
    /// A person or a program withdraws an entry or a pin. Policy then decides again.
    Withdraw(Tuple),
    /// Remove all entries.
    Shutdown,
    /// The deadline may have passed.
    Tick,
}

/// What a shunt wants done.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time is taken from a short queue, and copied nowhere else"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Install this entry. Answer with [`Input::Installed`], [`Input::Failed`] or [`Input::Gone`].
    Install(Entry),
    /// Remove this entry. Answer with [`Input::Gone`].
    Remove(EntryId, Cause),
    /// Keep a connection of which conntrack does not see all packets: make its window tracking liberal, and renew its
    /// timeout.
    Keep(Tuple, Identity),
    /// Renew the timeout of a blocked connection. Conntrack does not see its packets, because they are dropped before
    /// it.
    KeepBlocked(Tuple, Identity),
    /// Clear the policy bit of its mark, so that the rules decide again.
    Ask(Tuple, Identity),
    /// Set the action in its mark to this number, which means block. One of our own rules denies the flow, and the
    /// packet filter drops packets with this mark.
    MarkBlocked(Tuple, Identity, u8),
    /// List all connections.
    List,
    /// Report the traffic on the slow path as [`Input::SlowCounted`] for each connection. A rule waits for bytes.
    CountSlow,
    /// Report the process of this host that opened the connection as [`Input::Owned`]. A rule needs it.
    Whose(Tuple, Identity),
    /// Write the record of a connection that was on the fast path at least once, and has ended.
    Record(Flow),
}

impl Input<'_> {
    /// Whether this input only reports that time has passed.
    pub const fn is_tick(&self) -> bool {
        matches!(self, Self::Tick)
    }
}
