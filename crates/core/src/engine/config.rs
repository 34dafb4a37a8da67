//! The settings of the engine, and the callbacks that it calls while it runs.

use super::handshake::Handshake;
use super::offload::{OffloadId, Progress, Translation};
use super::ports::Share;
use super::slot::Slot;
use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::net::{IpAddr, SocketAddr};

/// Settings of one engine: one worker's.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect to.
    pub listen: Vec<Listen>,
    /// The addresses and ports that connections to servers may come from.
    pub sources: Share,
    /// Most connections at once, including those in TIME-WAIT; 1 to 2^24.
    pub max_connections: u32,
    /// Most unfinished handshakes with clients. The engine answers further SYNs with SYN cookies and keeps no state for
    /// them.
    pub syn_backlog: u32,
    /// Another program answers SYNs before they come here, with cookies made from
    /// [`Engine::cookies`](super::Engine::cookies). The engine then looks for a cookie in every acknowledgement of a
    /// client. If it finds a valid one, it ends the client's earlier connection.
    pub cookies_elsewhere: bool,
    /// The kernel may handle servers' SYN-ACKs: see [`Callbacks::offload_handshake`].
    pub offloads_handshakes: bool,
    /// Largest IP packet sent, bytes, at least 1280.
    pub mtu: u16,
    /// Shift of the windows that the engine announces to clients, 0 to 14.
    pub window_shift: u8,
    /// Most bytes of a client that are held until there is a server. The default is the initial window of RFC 6928, so
    /// the engine may send all of it to the server at once.
    pub hold_bytes: u32,
    /// Most bytes held for all connections together; the engine ends a connection that would need more.
    pub hold_total_bytes: usize,
    /// Most changed bytes kept for retransmission, per direction of a connection. At this limit the engine drops further
    /// segments of the direction until the receiver has acknowledged some bytes.
    pub edit_bytes: usize,
    /// Time for the whole handshake with a server, milliseconds.
    pub connect_timeout_ms: u64,
    /// A connection ends when no packet came for this time, milliseconds.
    pub idle_timeout_ms: u64,
    /// A connection ends after this time, milliseconds.
    pub lifetime_ms: Option<u64>,
    /// How long a closed connection is kept for late packets, milliseconds. A full table or a new SYN ends it earlier.
    pub time_wait_ms: u64,
    /// Most answers per second to packets that belong to no connection or look like an attack (RFC 5961, section 7).
    pub challenges_per_second: u32,
    /// Most session records that may wait to be taken; further ones are lost and counted.
    pub max_records: usize,
    /// 256 secret random bits: for initial sequence numbers, cookies, the hash of the table and the order of ports.
    pub seed: [u64; 4],
}

impl Config {
    /// Returns the default settings for these listeners and sources.
    pub fn new(listen: Vec<Listen>, sources: Share, seed: [u64; 4]) -> Self {
        Self {
            listen,
            sources,
            max_connections: 65_536,
            syn_backlog: 4096,
            cookies_elsewhere: false,
            offloads_handshakes: false,
            mtu: 1500,
            window_shift: 7,
            hold_bytes: 14_600,
            hold_total_bytes: 64 << 20,
            edit_bytes: 65_536,
            connect_timeout_ms: 10_000,
            idle_timeout_ms: 300_000,
            lifetime_ms: None,
            time_wait_ms: 1000,
            challenges_per_second: 1000,
            max_records: 65_536,
            seed,
        }
    }
}

/// An address and port that clients connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// The address. None: every address whose packets the driver hands over.
    pub address: Option<IpAddr>,
    /// The port. None: every port.
    pub port: Option<u16>,
}

/// How the driver reaches a neighbour: a number that only the driver understands, for example a link-layer address. The
/// driver gives it with every packet, and the engine returns it with the packets to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hop(pub u64);

/// Identifies a connection of one engine; rises from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// What the engine knows about a client when a server is to be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening<'a> {
    /// The connection.
    pub id: ConnectionId,
    /// The client.
    pub client: SocketAddr,
    /// The address and port that it connected to.
    pub local: SocketAddr,
    /// When its SYN came.
    pub opened: Instant,
    /// Its first bytes so far, in order.
    pub first: &'a [u8],
    /// No more bytes will come before the choice: the wait is over, the client sent FIN, or the limit of held bytes is
    /// reached.
    pub last: bool,
    /// The client has received the bytes of [`Selection::Reply`].
    pub replied: bool,
    /// Whether there is room, if the answer to the last question was [`Selection::Crowded`].
    pub crowd: Crowd,
}

/// What the engine knows about room for a client that asks for a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crowd {
    /// It was not asked to make room.
    Unknown,
    /// A connection of the client with the most has left for this one.
    HasLeft,
    /// No connection may leave for this client.
    Full,
}

/// Bytes that the engine sends to a client before there is a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl Reply {
    /// Most bytes of a reply.
    pub const MAX: usize = 32;

    /// Returns a reply of these bytes; none if they are empty or more than [`Reply::MAX`].
    pub fn new(reply: &[u8]) -> Option<Self> {
        let (mut bytes, len) = ([0; Self::MAX], u8::try_from(reply.len()).ok()?);
        bytes.get_mut(..reply.len())?.copy_from_slice(reply);
        (!reply.is_empty()).then_some(Self { bytes, len })
    }

    /// Returns the number of bytes.
    pub(super) const fn len(&self) -> u8 {
        self.len
    }

    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// The callback's choice for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Ask again when there are more bytes, or `wait_ms` after the first question about this client. If [`Opening::last`]
    /// is set, this ends the connection with reason `handshake_timeout`.
    Wait {
        /// The wait.
        wait_ms: u64,
    },
    /// Send these bytes to the client, and ask again when it has acknowledged them. This is for a client that waits for
    /// an answer before it continues. [`Callbacks::payload`] must remove the server's own answer from its stream. It is
    /// allowed once for a connection, and not if [`Opening::last`] is set. Otherwise the connection ends with reason
    /// `internal`.
    Reply(Reply),
    /// Connect to this server.
    Server(Target),
    /// Reset the client, and write this reason into the record.
    Refuse(EndReason),
    /// There is no room for one more connection with a server. The engine ends one of the client with the most, if this
    /// client has fewer, and asks again at once with the result ([`Opening::crowd`]). The same answer again ends the
    /// connection with reason `limit`.
    Crowded,
}

/// A server, and how to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its address and port.
    pub address: SocketAddr,
    /// How it is reached.
    pub hop: Hop,
    /// The server sees the client's own address and port; the network must route its answers here.
    pub keep_client_address: bool,
    /// Payload from the client goes through [`Callbacks::payload`].
    pub inspect_client: bool,
    /// Payload from the server goes through [`Callbacks::payload`].
    pub inspect_server: bool,
    /// Time for the handshake with the server, milliseconds. None: as configured.
    pub connect_timeout_ms: Option<u64>,
    /// Idle time-out, milliseconds. None: as configured.
    pub idle_timeout_ms: Option<u64>,
    /// Longest life, milliseconds. None: as configured.
    pub lifetime_ms: Option<u64>,
}

impl Target {
    /// Returns a server with the default settings.
    #[inline]
    pub const fn new(address: SocketAddr, hop: Hop) -> Self {
        Self {
            address,
            hop,
            keep_client_address: false,
            inspect_client: false,
            inspect_server: false,
            connect_timeout_ms: None,
            idle_timeout_ms: None,
            lifetime_ms: None,
        }
    }
}

/// What the engine does with payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Forward it unchanged.
    Keep,
    /// Forward these bytes instead: the same number, more, fewer, or none.
    Replace(Vec<u8>),
    /// Like `Replace`; later bytes of this direction pass without a call of [`Callbacks::payload`].
    Last(Vec<u8>),
    /// Reset both sides, and write this reason into the record.
    Reset(EndReason),
}

/// The callbacks of the engine. They run while a packet is handled and must not block.
pub trait Callbacks {
    /// Chooses the server. The engine asks when the client's handshake is done, with no bytes, and again as bytes come.
    fn select(&mut self, opening: &Opening<'_>) -> Selection;

    /// Called before a connection ends to make room for one of another client.
    fn leaving(&mut self, id: ConnectionId) {
        let _ = id;
    }

    /// Inspects payload of the directions that the [`Target`] names. Each byte comes once and in order.
    fn payload(&mut self, id: ConnectionId, from: Side, bytes: &[u8]) -> Payload {
        let _ = (id, from, bytes);
        Payload::Keep
    }

    /// Called when the connection in this slot needs only translation from now on: it may be offloaded
    /// ([`Engine::translation`](super::Engine::translation)).
    fn plain(&mut self, slot: Slot) {
        let _ = slot;
    }

    /// Called when the first bytes of the connection in this slot are on their way unchanged and its later packets need
    /// only translation. A program that also follows FINs may take the connection already.
    fn delivering(&mut self, slot: Slot) {
        let _ = slot;
    }

    /// Called before a SYN goes to the server of the connection in this slot. A program can take the connection if it can
    /// handle the SYN-ACK, send the first bytes and translate from then on. Returns the program's number of the
    /// connection then. Only with [`Config::offloads_handshakes`].
    ///
    /// `sides` is how the program translates then, the client first. What depends on the SYN-ACK is zero in it. For the
    /// server, `mss` is the most that we accept; its time stamps, numbers and windows are missing. For the client,
    /// `stamp_add` is missing.
    fn offload_handshake(
        &mut self,
        slot: Slot,
        sides: &[Translation; 2],
        handshake: &Handshake<'_>,
    ) -> Option<OffloadId> {
        let _ = (slot, sides, handshake);
        None
    }

    /// Returns what the kernel has forwarded of an offloaded connection since the last call; none if nothing.
    fn progress(&mut self, offloaded: OffloadId) -> Option<Progress> {
        let _ = offloaded;
        None
    }

    /// Called when an offloaded connection begins to close, or when user space takes the SYN-ACK itself. From then on its
    /// packets must come to user space.
    fn closing(&mut self, offloaded: OffloadId) {
        let _ = offloaded;
    }

    /// Called when an offloaded connection has ended: the kernel must remove it.
    fn ended(&mut self, offloaded: OffloadId) {
        let _ = offloaded;
    }
}
