//! The frames that are sent on a link. A frame is a length (4 bytes, big-endian, of the rest), a type (1 byte) and a
//! body.
//!
//! On a reliable link, frames follow each other in a TLS stream, which protects them. On a best-effort link, each
//! datagram carries one sealed frame. A receiver skips unknown types from 0x80 on: they are extensions, which older
//! nodes do not know ([`Spread`], [`Features`]).

mod body;
mod codec;
mod holding;
mod membership;
mod paced;
mod relayed;
mod spread;
mod timed;
mod vouched;
mod wire;

pub use codec::{Decoder, FRAME_MAX, FrameError, HEADER_BYTES};
pub use holding::{Confirmed, FLOW_WINDOW, FlowName, Holding};
pub use membership::Membership;
pub use paced::{Chunk, Offer, Paced, PacedAck, RUNS_MAX, Run};
pub use relayed::{DATAGRAM_HEADER_BYTES, OpenUdp, RELAYED_MAX, Relayed};
pub use spread::{Features, SUBGRAPH_NODES_MAX, Spread, Subgraph};
pub use timed::{Mark, Newest, RESEND_MAX, Repeats, Resend, Timed};
pub use vouched::{HASH_BYTES, Hash, PRIORITIES, Proof, STEPS_MAX, Standing, Vouched};

use super::{NodeId, PATH_MAX, Signature};
use crate::flow::{Destination, HostName};
use std::net::SocketAddr;

/// The version of this format; each greeting carries it.
pub const VERSION: u8 = 1;

/// Most payload bytes of one [`SessionFrame::Data`]: with its header it fills one TLS record (RFC 8446 Sec. 5.1).
pub const DATA_MAX: usize = 16_384 - HEADER_BYTES - 8;

/// Most payload bytes of a [`Packet`].
pub const PACKET_MAX: usize = 65_000;

/// Most bytes of the text in a refusal.
pub const DETAIL_MAX: usize = 255;

/// How a link recovers from loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkKind {
    /// Everything arrives, in order: kernel TCP with TLS on each hop.
    Reliable,
    /// Datagrams; lost ones are not retransmitted.
    BestEffort,
    /// Datagrams; a lost one is recovered only while it can still arrive before its deadline. None waits for another.
    RealTime,
}

/// How the source chooses the links that a packet uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dissemination {
    /// The cheapest path.
    Shortest,
    /// Node-disjoint paths, a copy on each; the first copy is delivered.
    Duplicate,
    /// All links on ways with a limited number of hops.
    Flood,
    /// Two disjoint paths, and more links around a source or destination in trouble.
    Graph,
}

/// The purpose of a connection between neighbours, as the dialling end states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Hellos, records and packets. Each link has one such connection.
    Control,
    /// An idle connection for a flow that the dialling node will send.
    FromDialer,
    /// An idle connection for a flow that the accepting node will send.
    FromAcceptor,
    /// Hellos, records and packets, instead of on the control connection that the link has. The link and its keys stay.
    MovedControl,
}

/// The first frame of every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// [`VERSION`].
    pub version: u8,
    /// The kind of the link.
    pub kind: LinkKind,
    /// The purpose of the connection.
    pub purpose: Purpose,
}

/// The state of a link as one end sees it (after BFD, RFC 5880 Sec. 4.1). A link is up only when both ends hear each
/// other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkState {
    /// This end has not heard the other end lately.
    #[default]
    Down,
    /// This end hears the other end, but the other end does not hear this end yet.
    Init,
    /// Both ends hear each other.
    Up,
}

/// Shows that its sender is alive, and lets the receiver measure the round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The state of the link as the sender sees it.
    pub state: LinkState,
    /// Rises by one with every hello.
    pub sequence: u32,
    /// The interval of hellos, ms.
    pub interval_ms: u16,
    /// The latest hello heard: its sequence, and how long ago it came, in µs.
    pub echo: Option<(u32, u32)>,
}

/// A link as one of its ends describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkEntry {
    /// The neighbour.
    pub neighbour: NodeId,
    /// The cost of the link, µs ([`super::hello::Quality::cost_us`]).
    pub cost_us: u32,
}

/// All links of one node, as this node describes them. The record with the highest sequence counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The node whose links they are.
    pub origin: NodeId,
    /// Rises with each record of this origin, also over restarts.
    pub sequence: u64,
    /// Its links, ordered by neighbour, each once.
    pub links: Vec<LinkEntry>,
    /// The origin's signature over [`Record::signed_bytes`].
    pub signature: Signature,
}

/// The nodes that a packet or session passes, in order, both ends included: 2 to [`PATH_MAX`] nodes, none twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Vec<NodeId>);

/// What a [`Packet`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// The last node sends the payload back as [`Protocol::EchoReply`].
    EchoRequest,
    /// The answer to an echo request, with the same payload.
    EchoReply,
    /// A frame of a session, after the id of the session. Sessions over best-effort links use it.
    Session,
    /// An IP packet, after the id of the session that was opened for packets.
    Ip,
    /// An IP packet to a group, after the head of [`super::group::head`]. Spread packets only.
    Group,
}

/// A datagram that follows a path. Its sender wrote out the whole path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The path.
    pub path: Path,
    /// The index in the path of the node that gets the packet next.
    pub position: u8,
    /// What the payload is.
    pub protocol: Protocol,
    /// At most [`PACKET_MAX`] bytes.
    pub payload: Vec<u8>,
}

/// A part of a frame that is larger than a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Identifies the frame that the piece belongs to.
    pub message: u32,
    /// The index of the piece.
    pub index: u8,
    /// The number of pieces of the frame.
    pub count: u8,
    /// At least one byte.
    pub bytes: Vec<u8>,
}

/// Identifies a session. The node where the session begins draws it at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub [u8; 16]);

/// Where an existing session continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The number of this attempt to resume the session. The requesting node counts from 1; 0 is not valid. The other
    /// end rejects a number that is not higher than the last one: such a request is late, or an attacker has replayed
    /// it.
    pub attempt: u32,
    /// The next byte that the requesting node expects.
    pub next: u64,
}

/// Requests a session, or requests that an existing session continues over a new path. Each node on the path hands it
/// to the next node, and then relays bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The session.
    pub session: SessionId,
    /// The path. Its first node makes the request, and its last node delivers the flow.
    pub path: Path,
    /// The index in the path of the node that gets the request next.
    pub position: u8,
    /// Set if the request continues an existing session.
    pub resume: Option<Resume>,
    /// Most bytes that the other end may send beyond the next expected byte.
    pub window_bytes: u32,
    /// The destination of the flow.
    pub destination: Destination,
    /// The application that opened the flow.
    pub client: SocketAddr,
    /// The host name of the flow, if known.
    pub host: Option<HostName>,
    /// The first node's signature over [`Open::signed_bytes`].
    pub signature: Signature,
}

/// Answers [`Open`]: the session is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The session.
    pub session: SessionId,
    /// The next byte that the answering node expects.
    pub next: u64,
    /// Most bytes that the requesting node may send beyond `next`.
    pub window_bytes: u32,
    /// The last node's signature over [`Opened::signed_bytes`].
    pub signature: Signature,
}

/// Why a session was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The node that answers has no link to the next node of the path.
    NoLink,
    /// The request is not for this node, its signature is invalid, or its path is not valid.
    BadRequest,
    /// The rules of the last node do not let the requesting node reach the destination.
    Denied,
    /// The destination refused the connection.
    ConnectionRefused,
    /// No route to the destination.
    Unreachable,
    /// The destination did not answer in time.
    TimedOut,
    /// The name of the destination could not be resolved.
    Dns,
    /// A limit is reached.
    Limit,
    /// The node does not know the session that is to be resumed.
    UnknownSession,
}

/// Answers [`Open`]: the session is refused. The sender closes the connection afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The node that refuses it.
    pub by: NodeId,
    /// The reason.
    pub reason: Refusal,
    /// The reason as text, at most [`DETAIL_MAX`] bytes.
    pub detail: String,
}

/// Why a session was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResetReason {
    /// The application on the sender's side reset its connection, or has disappeared.
    Application,
    /// No new path was found in time.
    PathLost,
    /// The other end broke the protocol.
    Protocol,
    /// An operator ended it, a limit was reached, or the node stops.
    Ended,
}

/// The frames that the two ends of a session exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionFrame {
    /// Bytes of the flow.
    Data {
        /// The position of the first byte in the flow.
        offset: u64,
        /// 1 to [`DATA_MAX`] bytes.
        bytes: Vec<u8>,
    },
    /// Acknowledges data and grants credit.
    Ack(Ack),
    /// The flow ends here in this direction.
    Fin {
        /// Number of bytes of the whole direction.
        offset: u64,
    },
    /// The session ends. The receiver still delivers the bytes before `offset`.
    Reset {
        /// Number of bytes that were sent in this direction.
        offset: u64,
        /// The reason.
        reason: ResetReason,
    },
    /// The sender has nothing more to send, and expects nothing more.
    Done,
    /// This number of data bytes came on this path since it began. Only ends that use several paths say so
    /// ([`Features::PATHS`]).
    Arrived {
        /// Data bytes, without headers; repeated ones count, too.
        bytes: u64,
    },
}

/// What has arrived of the other direction, and how much more may be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ack {
    /// All bytes before this one have arrived. One more if the FIN has arrived, too.
    pub next: u64,
    /// The other end may send bytes before this one.
    pub limit: u64,
    /// The application's kernel has accepted all bytes before this one.
    pub confirmed: u64,
    /// Bytes from here on have arrived, but those from `next` up to here are missing. 0: no gap is known.
    pub hole_end: u64,
}

/// Any frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The first frame of each connection.
    Greeting(Greeting),
    /// Shows that the sender is alive.
    Hello(Hello),
    /// The links of a node.
    Record(Record),
    /// Acknowledges this record, or a newer one of its origin.
    RecordAck {
        /// The node that made the record.
        origin: NodeId,
        /// The sequence of the record.
        sequence: u64,
    },
    /// The accepting end of a link asks the dialling end for this number of further connections to send flows on.
    Want {
        /// The number of connections.
        connections: u16,
    },
    /// A datagram that follows a path.
    Packet(Packet),
    /// A part of a frame (in datagrams only).
    Piece(Piece),
    /// Tests whether datagrams of this size pass; the neighbour answers it (in datagrams only).
    Probe {
        /// The number of the probe.
        number: u32,
        /// The number of zero bytes that give the probe its size.
        padding: u16,
    },
    /// The answer to a probe (in datagrams only).
    ProbeAck {
        /// The number of the probe.
        number: u32,
    },
    /// Requests a session.
    Open(Box<Open>),
    /// The session is established.
    Opened(Opened),
    /// The session is refused.
    Refused(Refused),
    /// A frame between the two ends of a session.
    Session(SessionFrame),
    /// A packet over a subgraph (in datagrams only).
    Spread(Box<Spread>),
    /// What a node understands beyond version 1.
    Features(Features),
    /// The groups of a node.
    Membership(Membership),
    /// Acknowledges this membership, or a newer one of its origin.
    MembershipAck {
        /// The node that made it.
        origin: NodeId,
        /// Its sequence.
        sequence: u64,
    },
    /// A packet over a subgraph with its number on this real-time link (in datagrams only).
    Timed(Timed),
    /// Requests packets of this real-time link (in datagrams only).
    Resend(Resend),
    /// Says which transmission on this real-time link was the newest one (in datagrams only).
    Newest(Newest),
    /// Shows that the sender is alive on this leg of the link (in datagrams only).
    LegHello {
        /// The number of the leg ([`super::legs`]).
        leg: u8,
        /// The same as on the link itself.
        hello: Hello,
    },
    /// A packet of a paced link (in datagrams only).
    Paced(Box<Paced>),
    /// Says which packets of a paced link have arrived (in datagrams only).
    PacedAck(Box<PacedAck>),
    /// Says that the sender uses this link as a paced one (in datagrams only).
    Offer(Offer),
    /// A packet with the proof of its source (in datagrams only).
    Vouched(Box<Vouched>),
    /// The statement under which the proofs of a node count.
    Standing(Standing),
    /// Which messages of a reliable intrusion-tolerant flow the sender has (in datagrams only).
    Holding(Box<Holding>),
}

impl Path {
    /// Makes a path of these nodes. `None` if there are too few or too many of them, or if one is there twice.
    pub fn new(nodes: Vec<NodeId>) -> Option<Self> {
        let fits = (2..=PATH_MAX).contains(&nodes.len());
        let once = || nodes.iter().enumerate().all(|(index, node)| !nodes[..index].contains(node));
        (fits && once()).then_some(Self(nodes))
    }

    /// Returns the nodes.
    pub fn nodes(&self) -> &[NodeId] {
        &self.0
    }

    /// Returns the first node.
    pub fn first(&self) -> NodeId {
        self.0[0]
    }

    /// Returns the last node.
    pub fn last(&self) -> NodeId {
        self.0[self.0.len() - 1]
    }

    /// Returns the nodes between the first and the last one.
    pub fn relays(&self) -> &[NodeId] {
        &self.0[1..self.0.len() - 1]
    }

    /// Returns the node at this position.
    pub fn at(&self, position: u8) -> Option<NodeId> {
        self.0.get(usize::from(position)).copied()
    }

    /// Returns the node before this position.
    pub fn before(&self, position: u8) -> Option<NodeId> {
        self.at(position.checked_sub(1)?)
    }

    /// Returns the path in the opposite direction.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self(self.0.iter().rev().copied().collect())
    }
}
