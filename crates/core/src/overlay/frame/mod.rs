//! What travels on a link. A frame is a length (4 bytes, big-endian, of what follows), a type (1 byte) and a body.
//!
//! On a link of the reliable kind frames follow each other in a TLS stream, so that what arrives is what the
//! neighbour sent; a link of datagrams carries one frame in each, sealed. Types from 0x80 on may be skipped by those who do
//! not know them: room for what comes (multicast, dissemination graphs).

mod body;
mod codec;
mod wire;

pub use codec::{Decoder, FRAME_MAX, FrameError, HEADER_BYTES};

use super::{NodeId, PATH_MAX, Signature};
use crate::flow::{Destination, HostName};
use std::net::SocketAddr;

/// Version of this format, in every greeting.
pub const VERSION: u8 = 1;

/// Most payload bytes of one [`SessionFrame::Data`]: with its header it fills one TLS record (RFC 8446 Sec. 5.1).
pub const DATA_MAX: usize = 16_384 - HEADER_BYTES - 8;

/// Most payload bytes of a [`Packet`].
pub const PACKET_MAX: usize = 65_000;

/// Most bytes of the words in a refusal.
pub const DETAIL_MAX: usize = 255;

/// How a link recovers what is lost on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkKind {
    /// Everything arrives, in order: kernel TCP with TLS on each hop.
    Reliable,
    /// Datagrams; what is lost stays lost.
    BestEffort,
}

/// The purpose of a connection between neighbours, as the dialling end states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Purpose {
    /// Hellos, records and packets: one for each link.
    Control,
    /// Waits to carry a flow that the dialling node sends on its way.
    FromDialer,
    /// Waits to carry a flow that the accepting node sends on its way.
    FromAcceptor,
}

/// The first frame of every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// [`VERSION`].
    pub version: u8,
    /// The kind of the link.
    pub kind: LinkKind,
    /// What the connection is for.
    pub purpose: Purpose,
}

/// Where one end of a link sees it (after BFD, RFC 5880 Sec. 4.1): a link is up only when both ends hear each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkState {
    /// Nothing was heard lately.
    #[default]
    Down,
    /// The other end was heard, and has not heard us yet.
    Init,
    /// Both hear each other.
    Up,
}

/// Shows that its sender is there, and lets the round trip be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Where the sender sees the link.
    pub state: LinkState,
    /// Rises by one with every hello.
    pub sequence: u32,
    /// How often hellos come, milliseconds.
    pub interval_ms: u16,
    /// The latest hello heard: its sequence, and how long ago it came, microseconds.
    pub echo: Option<(u32, u32)>,
}

/// One end's word about one of its links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkEntry {
    /// The neighbour.
    pub neighbour: NodeId,
    /// The cost of the link, microseconds ([`super::hello::Quality::cost_us`]).
    pub cost_us: u32,
}

/// All links of one node, in its own word. The newest sequence counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Whose links they are.
    pub origin: NodeId,
    /// Rises with every record of this origin, also over its restarts.
    pub sequence: u64,
    /// Its links, by neighbour, rising, each once.
    pub links: Vec<LinkEntry>,
    /// The origin's signature over [`Record::signed_bytes`].
    pub signature: Signature,
}

/// The nodes that something passes, in order, both ends included. 2 to [`PATH_MAX`] nodes, none twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Vec<NodeId>);

/// What a [`Packet`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// To be sent back as [`Protocol::EchoReply`].
    EchoRequest,
    /// The answer, with the payload of the request.
    EchoReply,
    /// A frame of a session, after the session's id: how sessions travel over links of datagrams.
    Session,
    /// An IP packet, after the id of the session that was opened for packets.
    Ip,
}

/// A datagram on its way along a path that its sender wrote out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The way.
    pub path: Path,
    /// Index in the path of the node it is on its way to.
    pub position: u8,
    /// What the payload is.
    pub protocol: Protocol,
    /// At most [`PACKET_MAX`] bytes.
    pub payload: Vec<u8>,
}

/// A part of a frame that is larger than a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Tells its frame from others that are cut.
    pub message: u32,
    /// Which part it is.
    pub index: u8,
    /// How many there are.
    pub count: u8,
    /// At least one byte.
    pub bytes: Vec<u8>,
}

/// Names a session: drawn at random by the node where it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub [u8; 16]);

/// Where a session that stands is to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// Of the attempts of this session, counted from 1 by the asking node: one that comes after a later one is over, or was
    /// recorded on its way and is said again by somebody else. Never 0.
    pub attempt: u32,
    /// The next byte that the asking node expects.
    pub next: u64,
}

/// Asks for a session, or for one that stands to go on over a new path. Goes along its path; each node on it hands it to
/// the next and then passes bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// The session.
    pub session: SessionId,
    /// The way; its first node is the one that asks, its last the one that delivers.
    pub path: Path,
    /// Index in the path of the node it is on its way to.
    pub position: u8,
    /// Goes on with a session that stands.
    pub resume: Option<Resume>,
    /// Most bytes that the other end may send beyond those.
    pub window_bytes: u32,
    /// Where the flow is to be delivered.
    pub destination: Destination,
    /// The application that opened the flow.
    pub client: SocketAddr,
    /// The host name of the flow, if known.
    pub host: Option<HostName>,
    /// The first node's signature over [`Open::signed_bytes`].
    pub signature: Signature,
}

/// The session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The session.
    pub session: SessionId,
    /// The next byte that the answering node expects.
    pub next: u64,
    /// Most bytes that the asking node may send beyond those.
    pub window_bytes: u32,
    /// The last node's signature over [`Opened::signed_bytes`].
    pub signature: Signature,
}

/// Why a session is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The next node of the path cannot be reached from the node that answers.
    NoLink,
    /// Not for us, a bad signature, a path that is none.
    BadRequest,
    /// The last node's rules do not let this node deliver there.
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
    /// The session to go on with is not known.
    UnknownSession,
}

/// A session is refused. The sender closes the connection afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The node that says so.
    pub by: NodeId,
    /// Why.
    pub reason: Refusal,
    /// In words, at most [`DETAIL_MAX`] bytes.
    pub detail: String,
}

/// Why a session ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ResetReason {
    /// The application on this side reset its connection, or is gone.
    Application,
    /// No path came back in time.
    PathLost,
    /// The other end broke the protocol.
    Protocol,
    /// An operator, a limit or a stopping node ended it.
    Ended,
}

/// What the two ends of a session say to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionFrame {
    /// Bytes of the flow.
    Data {
        /// Place of the first of them in the flow.
        offset: u64,
        /// 1 to [`DATA_MAX`] bytes.
        bytes: Vec<u8>,
    },
    /// What has come.
    Ack(Ack),
    /// The flow ends here in this direction.
    Fin {
        /// Number of bytes of the whole direction.
        offset: u64,
    },
    /// The session ends; what lies before `offset` still counts.
    Reset {
        /// Bytes of this direction that were sent.
        offset: u64,
        /// Why.
        reason: ResetReason,
    },
    /// Its sender has nothing left to say or to hear.
    Done,
}

/// What has come of the other direction, and what may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ack {
    /// All bytes before this one have come (one more for the FIN).
    pub next: u64,
    /// The other end may send bytes before this one.
    pub limit: u64,
    /// All bytes before this one (one more for the FIN) were accepted by the kernel of the application.
    pub confirmed: u64,
    /// Bytes from here on have come while those from `next` on are missing; 0 = none is known to be missing.
    pub hole_end: u64,
}

/// Anything that travels on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// First of every connection.
    Greeting(Greeting),
    /// Is the neighbour there?
    Hello(Hello),
    /// Links of a node.
    Record(Record),
    /// This record, or a newer one of its origin, is known.
    RecordAck {
        /// Whose.
        origin: NodeId,
        /// Which.
        sequence: u64,
    },
    /// The accepting end of a link asks the dialling end for this number of further connections to send flows on.
    Want {
        /// How many.
        connections: u16,
    },
    /// A datagram.
    Packet(Packet),
    /// A part of a frame (in datagrams only).
    Piece(Piece),
    /// To be answered: datagrams of this size pass (in datagrams only).
    Probe {
        /// Which.
        number: u32,
        /// Zeros behind it that give it its size.
        padding: u16,
    },
    /// The answer to a probe (in datagrams only).
    ProbeAck {
        /// To which.
        number: u32,
    },
    /// Asks for a session.
    Open(Box<Open>),
    /// The session stands.
    Opened(Opened),
    /// The session is not there.
    Refused(Refused),
    /// Between the ends of a session.
    Session(SessionFrame),
}

impl Path {
    /// A path of these nodes; none if they are too few, too many, or one is there twice.
    pub fn new(nodes: Vec<NodeId>) -> Option<Self> {
        let fits = (2..=PATH_MAX).contains(&nodes.len());
        let once = || nodes.iter().enumerate().all(|(index, node)| !nodes[..index].contains(node));
        (fits && once()).then_some(Self(nodes))
    }

    /// The nodes.
    pub fn nodes(&self) -> &[NodeId] {
        &self.0
    }

    /// Where it begins.
    pub fn first(&self) -> NodeId {
        self.0[0]
    }

    /// Where it ends.
    pub fn last(&self) -> NodeId {
        self.0[self.0.len() - 1]
    }

    /// The nodes between its ends.
    pub fn relays(&self) -> &[NodeId] {
        &self.0[1..self.0.len() - 1]
    }

    /// The node at this place.
    pub fn at(&self, position: u8) -> Option<NodeId> {
        self.0.get(usize::from(position)).copied()
    }

    /// The node before this place.
    pub fn before(&self, position: u8) -> Option<NodeId> {
        self.at(position.checked_sub(1)?)
    }

    /// The same way back.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self(self.0.iter().rev().copied().collect())
    }
}
