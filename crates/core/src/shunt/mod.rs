//! The shunt: which flows take the fast path, and how they get there and back (NFShunt).
//!
//! The packet filter's rules say by a [`Mark`] what is to happen to a flow. [`Shunt`] hears of every connection that
//! conntrack reports, asks for entries of the fast path, and takes them back when the connection ends, stands still or is
//! no longer allowed. It is the state machine of the seed's Fig. 4, extended: connections end, permissions are
//! withdrawn, flows that stood still come back, events are lost, and bytes of the fast path are added to those of the
//! slow path, so that none goes uncounted.
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
//! In ASKING the policy bit of the mark has been cleared, so that the next packet on the slow path makes the rules decide
//! anew; until conntrack has shown the cleared mark, an older event cannot bring the flow back.

mod forward;
mod machine;
mod mark;
mod rules;
mod tracked;
mod wish;

pub use crate::policy::FastPathKind;
pub use forward::ForwardLine;
pub use machine::{Config, Shunt};
pub use mark::{Mark, MarkActions, PortNumber, ShuntAction};
pub use rules::RuleSet;
pub use tracked::{Flow, Standing};
pub use wish::{Want, Wish};

use crate::flow::Process;
use crate::time::Instant;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// Protocols that have flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The protocol with this IP protocol number.
    pub const fn of_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }

    /// The IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// As it is written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// What tells one connection from others at one moment: the addresses of its first packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    /// Who sent the first packet.
    pub client: SocketAddr,
    /// To whom.
    pub server: SocketAddr,
    /// By which protocol.
    pub transport: Transport,
    /// Conntrack zone.
    pub zone: u16,
}

impl fmt::Display for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} -> {}", self.transport.as_str(), self.client, self.server)
    }
}

/// What tells a connection from an earlier one on the same addresses and ports. Conntrack's id alone does not: it depends
/// on the place in memory and the addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// Conntrack's id.
    pub id: u32,
    /// When it began, nanoseconds since 1970; where conntrack keeps time stamps.
    pub start_ns: Option<u64>,
}

/// How far a connection is, as conntrack saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// TCP's handshake is not done.
    Opening,
    /// Data flows.
    Open,
    /// A FIN was seen.
    Closing,
    /// It was reset.
    Reset,
}

/// Packets and bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets; one that stands for several segments counts once, on both paths.
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
    /// What is left of it without a part of it; nothing where the part, counted a moment later, is more.
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
    /// Which connection on these addresses.
    pub identity: Identity,
    /// Its mark.
    pub mark: Mark,
    /// How far it is; `None` where the report does not say (it says so only when it changes).
    pub phase: Option<Phase>,
    /// Packets of both directions were seen, and it is worth keeping (`SEEN_REPLY` and `ASSURED`; for UDP the first alone).
    pub both_ways: bool,
    /// Addresses are rewritten: the fast path does not do that.
    pub translated: bool,
    /// An application-level gateway of netfilter reads its content (FTP, SIP).
    pub inspected: bool,
    /// What passed on the slow path, where the report says.
    pub traffic: Option<Both>,
}

/// Names one stay of one flow on the fast path; rises from 1 and is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub u64);

/// What the fast path is asked to do with both directions of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number.
    pub id: EntryId,
    /// The flow.
    pub tuple: Tuple,
    /// The port that the client's packets come in by, and the server's leave by.
    pub client_port: PortNumber,
    /// The port that the server's packets come in by, and the client's leave by.
    pub server_port: PortNumber,
    /// Which fast path is to have it.
    pub path: FastPathKind,
    /// Packets are dropped in place of passed on.
    pub block: bool,
    /// After so long without a packet in a direction it is over; [`Entry::NEVER_IDLE`]: it stays.
    pub idle: Duration,
}

impl Entry {
    /// The idle time of what is blocked: its entry stays until the connection ends or the rules change. If it went after a
    /// pause, the next packet would pass.
    pub const NEVER_IDLE: Duration = Duration::MAX;
}

/// Why a flow left the fast path, or is to leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The connection is closing: a FIN was seen.
    Fin,
    /// The connection was reset.
    Rst,
    /// A SYN came on its addresses: another connection, or a forged packet.
    Syn,
    /// Nothing came for the idle time.
    Idle,
    /// Conntrack forgot the connection.
    Ended,
    /// The rules have changed: they are asked again.
    RulesChanged,
    /// The mark no longer says so, or says something else.
    MarkChanged,
    /// A person or program withdrew it.
    Withdrawn,
    /// The fast path gave its place to another entry.
    Evicted,
    /// The fast path did not confirm it in time.
    Unconfirmed,
    /// The fast path was lost (a switch went away) or was emptied by somebody else.
    Lost,
    /// We stop.
    Shutdown,
}

impl Cause {
    /// The word of listings and records.
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

    /// Whether the policy stands when an entry is gone for this cause: a blocked flow is blocked again at once, and the rules
    /// are not asked.
    pub const fn keeps_block(self) -> bool {
        !matches!(
            self,
            Self::RulesChanged | Self::MarkChanged | Self::Withdrawn | Self::Shutdown | Self::Ended
        )
    }

    /// Whether the connection itself is over or ends.
    pub const fn is_end(self) -> bool {
        matches!(self, Self::Fin | Self::Rst | Self::Ended)
    }
}

/// Why a flow that policy wants on the fast path is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// The mark names a port that is not configured, or the same for both sides.
    UnknownPort,
    /// The number of the action in the mark has no meaning.
    UnknownAction,
    /// Its rule waits for more bytes, or for time to pass.
    TooEarly,
    /// A rule asks for the process behind it, which is being looked for.
    Unidentified,
    /// The configuration has no fast path (`fast_path = "none"`): it would have been shunted.
    NoPath,
    /// The handshake is not done, or only one direction was seen.
    NotEstablished,
    /// The connection is closing.
    Closing,
    /// Its addresses are rewritten.
    Translated,
    /// Netfilter reads its content.
    Inspected,
    /// The fast path cannot match flows of this kind (IPv6 in OpenFlow 1.0).
    Unsupported,
    /// The table is full, or its client has as many entries as one may have.
    Full,
    /// The fast path refused it.
    Refused,
    /// There is no fast path now.
    Unreachable,
    /// A person or program keeps it on the slow path.
    Held,
}

impl Obstacle {
    /// In words, for `shunt why`.
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

/// What happens to a shunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// Conntrack reports a connection that is there.
    Connection(Connection),
    /// Conntrack reports the end of a connection.
    Ended(Connection),
    /// What passed on the slow path until now, asked for by a person who looks.
    SlowCounted(Tuple, Identity, Both),
    /// Whose a connection is, as asked for by [`Output::Whose`]; [`Process::default`] if nobody knows.
    Owned(Tuple, Identity, &'a Process),
    /// Conntrack's reports were lost.
    EventsLost,
    /// All connections that are there, as asked for by [`Output::List`].
    Listed(&'a [Connection]),
    /// The fast path has the entry.
    Installed(EntryId),
    /// The fast path has not taken the entry.
    Failed(EntryId, Obstacle),
    /// What passed on the fast path until now.
    Counted(EntryId, Both),
    /// The entry is no longer there, why, and all that passed on the fast path.
    Gone(EntryId, Cause, Both),
    /// The fast path can be reached again.
    PathBack,
    /// The rules have changed.
    RulesChanged,
    /// A connection that somebody wants to be treated like this whatever policy says.
    Pinned(Connection, ShuntAction),
    /// Somebody withdraws an entry, or a pin: policy is asked again.
    Withdraw(Tuple),
    /// Take everything back.
    Shutdown,
    /// Time has passed.
    Tick,
}

/// What a shunt wants done.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time is taken from a short queue, and copied nowhere else"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Install this; answer with [`Input::Installed`], [`Input::Failed`] or [`Input::Gone`].
    Install(Entry),
    /// Remove this; answer with [`Input::Gone`].
    Remove(EntryId, Cause),
    /// Make conntrack's window tracking liberal for a connection whose packets it does not see all, and keep it from timing
    /// out.
    Keep(Tuple, Identity),
    /// Set the timeout of a blocked connection in conntrack anew: conntrack does not see its packets, which are dropped before
    /// it.
    KeepBlocked(Tuple, Identity),
    /// Clear the policy bit of its mark, so that the rules are asked again.
    Ask(Tuple, Identity),
    /// Set the action in its mark to this number, which blocks: one of our own rules denies the flow, and the packet filter
    /// drops what has this mark.
    MarkBlocked(Tuple, Identity, u8),
    /// List all connections.
    List,
    /// Say what has passed on the slow path: [`Input::SlowCounted`] for each connection. A rule waits for bytes.
    CountSlow,
    /// Say which process of this host opened the connection: [`Input::Owned`]. A rule asks.
    Whose(Tuple, Identity),
    /// A connection that was on the fast path at least once has ended.
    Record(Flow),
}

impl Input<'_> {
    /// When something that stands for the passing of time happens.
    pub const fn is_tick(&self) -> bool {
        matches!(self, Self::Tick)
    }
}

/// The times of a flow's latest stay on the fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// When the entry was asked for.
    pub requested: Option<Instant>,
    /// When it was confirmed.
    pub installed: Option<Instant>,
    /// When it was gone.
    pub gone: Option<Instant>,
}
