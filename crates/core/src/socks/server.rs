//! The server side: the inputs and outputs of all SOCKS server machines, and the machine that accepts versions 5 and
//! 6 on one port.

use super::Command;
use super::reply::ReplyCode;
use super::v6::{Metadata, SessionAnswer, SessionId, SessionQuery, StackOption};
use super::{v5, v6};
use crate::carrier::Credentials;
use crate::flow::{Destination, EndReason};
use crate::time::Instant;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Most client bytes that are buffered between the request and [`Output::Done`]. Once this number is buffered,
/// [`Server::wants_bytes`] is false, and more bytes end the connection with [`EndReason::Limit`].
pub const MAX_PIPELINED_LEN: usize = 64 * 1024;

/// The SOCKS6 layout that a listener expects. It does not distinguish the two generations of `socksx`: their requests
/// are alike, and both accept the same reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ServerDialect {
    /// Detected from the request. The detection is wrong only for a `socksx` request to some IPv4 addresses that end
    /// in .0, and to a few IPv6 addresses.
    #[default]
    Auto,
    /// The layout of the draft.
    Draft,
    /// The layout of `socksx`.
    Socksx,
}

/// The configuration of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Serve version 5.
    pub v5: bool,
    /// Serve version 6.
    pub v6: bool,
    /// The layout of version 6.
    pub dialect: ServerDialect,
    /// Serve UDP ASSOCIATE. Default: false. Without it, and in the `socksx` layouts, it is answered with code 7.
    pub udp: bool,
    /// Serve BIND. Default: false, it is answered with code 7.
    pub bind: bool,
    /// The accounts that may use it. Empty: all clients may use it without authentication.
    pub accounts: Vec<Credentials>,
    /// Offer the sessions and tokens of version 6. The driver then answers [`Output::Session`] from a
    /// [`v6::SessionTable`].
    pub sessions: bool,
    /// The time from `new` until the request must be complete. Default: 10 s.
    pub handshake_timeout: Duration,
    /// How long to delay a version 6 request whose announced initial data has not arrived yet. It applies only if the
    /// request asks for TCP Fast Open to the destination, because then the data goes into the SYN. Zero: never.
    /// Default: 30 ms. Other requests are never delayed: announced data may never come (`socksx`).
    pub initial_data_wait: Duration,
}

impl ServerConfig {
    /// Whether this command is served.
    pub const fn serves(&self, command: Command) -> bool {
        match command {
            Command::Connect => true,
            Command::Bind => self.bind,
            Command::UdpAssociate => self.udp,
        }
    }

    /// Returns the commands that are served, in words.
    pub const fn served(&self) -> &'static str {
        match (self.bind, self.udp) {
            (false, false) => "CONNECT only",
            (true, false) => "CONNECT and BIND only",
            (false, true) => "CONNECT and UDP ASSOCIATE only",
            (true, true) => "CONNECT, BIND and UDP ASSOCIATE only",
        }
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            v5: true,
            v6: true,
            dialect: ServerDialect::Auto,
            udp: false,
            bind: false,
            accounts: Vec::new(),
            sessions: true,
            handshake_timeout: Duration::from_secs(10),
            initial_data_wait: Duration::from_millis(30),
        }
    }
}

/// The version of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// RFC 1928.
    V5,
    /// The layout of the draft.
    V6,
    /// A layout of `socksx`, with version byte 6.
    V6Socksx,
}

/// A complete, authenticated request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The version of the request.
    pub version: Version,
    /// What the client asks for.
    pub command: Command,
    /// CONNECT: the destination. BIND: the host that will connect. UDP ASSOCIATE: the address that the client sends
    /// from. In both, zeros mean that the client does not know it yet. Version 6: the address to bind.
    pub destination: Destination,
    /// The authenticated user, if authentication was needed.
    pub user: Option<String>,
    /// The requested stack options (version 6). TFO and MPTCP are used only if they are listed here.
    pub stack: Vec<StackOption>,
    /// The metadata of the chain (version 6), to be copied to the next hop.
    pub metadata: Vec<Metadata>,
    /// The session of the request (version 6). Touch it in the table when the flow ends.
    pub session: Option<SessionId>,
    /// The number of initial data bytes that the client announced (version 6). It may send more, or never send them.
    pub announced_len: u16,
    /// Client bytes for the destination that arrived with the request. Later bytes are in [`Output::Done`].
    pub first_bytes: Vec<u8>,
}

/// The driver's answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The result.
    pub code: ReplyCode,
    /// The local address of the connection to the destination; of BIND the listening address, then the peer; of UDP
    /// ASSOCIATE the address that receives datagrams. `None` is sent as `0.0.0.0:0`.
    pub bound: Option<SocketAddr>,
    /// Which stack options were applied. TFO, MPTCP and Happy Eyeballs are answered as not used if they were
    /// requested but are not listed here.
    pub stack: Vec<StackOption>,
    /// Metadata for the client (version 6, layout of the draft).
    pub metadata: Vec<Metadata>,
}

impl Reply {
    /// Makes the answer for an established connection with this local address.
    pub fn connected(bound: SocketAddr) -> Self {
        Self { code: ReplyCode::Succeeded, bound: Some(bound), stack: Vec::new(), metadata: Vec::new() }
    }

    /// Makes the answer for a failure.
    pub fn failed(code: ReplyCode) -> Self {
        Self { code, bound: None, stack: Vec::new(), metadata: Vec::new() }
    }
}

/// An event for a server machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// Bytes from the client.
    Bytes(&'a [u8]),
    /// The client will send nothing more: a FIN, or a reset. After the request, a FIN is a half-close and changes
    /// nothing here.
    Eof,
    /// The answer to [`Output::Session`].
    Session(SessionAnswer),
    /// The answer to [`Output::Request`].
    Reply(Reply),
    /// The deadline may have passed.
    Tick,
}

/// What a server machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write this to the client.
    Send(Vec<u8>),
    /// Look this up in the session table, and answer with [`Input::Session`].
    Session(SessionQuery),
    /// Do what the client asks for, and answer with [`Input::Reply`]. A successful BIND has two answers: when it
    /// listens, and when the peer has connected.
    Request(Box<Request>),
    /// The handshake is over. From now on, the bytes belong to the flow.
    Done {
        /// Client bytes after [`Request::first_bytes`], for the destination.
        leftover: Vec<u8>,
    },
    /// All is answered, and no flow follows (a NOOP): close the connection.
    Finished,
    /// Close the connection after all queued bytes are written.
    Failed {
        /// The reason, for the record.
        reason: EndReason,
        /// The reason in words, for the record and for people.
        detail: String,
    },
}

/// A server of either version. The first byte decides which machine runs.
#[derive(Debug)]
pub struct Server {
    config: Arc<ServerConfig>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    First { deadline: Instant },
    V5(v5::Server),
    V6(Box<v6::Server>),
    Refused(std::collections::VecDeque<Output>),
}

/// The answer to a browser that treats the port as an HTTP proxy.
const HTTP_REFUSAL: &str = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 35\r\n\
    Connection: close\r\n\r\nThis port speaks SOCKS, not HTTP.\r\n";

impl Server {
    /// Makes a machine for a new connection.
    pub fn new(config: Arc<ServerConfig>, now: Instant) -> Self {
        let deadline = now + config.handshake_timeout;
        Self { config, stage: Stage::First { deadline } }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match (&mut self.stage, &input) {
            (Stage::V5(server), _) => server.handle(now, input),
            (Stage::V6(server), _) => server.handle(now, input),
            (Stage::First { deadline }, Input::Bytes([first, ..])) => {
                let (first, deadline) = (*first, *deadline);
                self.choose(first, deadline);
                match &mut self.stage {
                    Stage::V5(server) => server.handle(now, input),
                    Stage::V6(server) => server.handle(now, input),
                    _ => {}
                }
            }
            (Stage::First { .. }, Input::Eof) => {
                self.refuse(None, EndReason::ClientGone, "the client closed without a byte".into());
            }
            (Stage::First { deadline }, Input::Tick) if now >= *deadline => {
                self.refuse(None, EndReason::HandshakeTimeout, "the client sent nothing in time".into());
            }
            (Stage::First { .. } | Stage::Refused(_), _) => {}
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        match &mut self.stage {
            Stage::First { .. } => None,
            Stage::V5(server) => server.poll(),
            Stage::V6(server) => server.poll(),
            Stage::Refused(outputs) => outputs.pop_front(),
        }
    }

    /// Returns when to call [`Self::handle`] with [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::First { deadline } => Some(*deadline),
            Stage::V5(server) => server.deadline(),
            Stage::V6(server) => server.deadline(),
            Stage::Refused(_) => None,
        }
    }

    /// Whether the driver may read from the client. See [`MAX_PIPELINED_LEN`].
    pub fn wants_bytes(&self) -> bool {
        match &self.stage {
            Stage::First { .. } => true,
            Stage::V5(server) => server.wants_bytes(),
            Stage::V6(server) => server.wants_bytes(),
            Stage::Refused(_) => false,
        }
    }

    /// Takes the client bytes that arrived after [`Request::first_bytes`], so that the driver can send them while it
    /// still dials (for example with a request to the next hop). They are then not in [`Output::Done`].
    pub fn take_pipelined(&mut self) -> Vec<u8> {
        match &mut self.stage {
            Stage::V5(server) => server.take_pipelined(),
            Stage::V6(server) => server.take_pipelined(),
            Stage::First { .. } | Stage::Refused(_) => Vec::new(),
        }
    }

    fn choose(&mut self, first: u8, deadline: Instant) {
        let config = self.config.clone();
        match first {
            5 if config.v5 => self.stage = Stage::V5(v5::Server::until(config, deadline)),
            6 if config.v6 => self.stage = Stage::V6(Box::new(v6::Server::until(config, deadline))),
            _ => self.refuse_version(first),
        }
    }

    fn refuse_version(&mut self, first: u8) {
        let reason = EndReason::BadRequest;
        let served = match (self.config.v5, self.config.v6) {
            (true, true) => "5 and 6",
            (true, false) => "5",
            (false, true) => "6",
            (false, false) => "none",
        };
        let detail = |what: &str| format!("{what}; this listener serves SOCKS versions: {served}");
        match first {
            4 => self.refuse(
                Some(vec![0x00, 0x5b, 0, 0, 0, 0, 0, 0]),
                EndReason::Unsupported,
                detail("the client speaks SOCKS4, which has neither names nor IPv6 nor passwords"),
            ),
            5 => self.refuse(Some(vec![5, 0xff]), EndReason::Unsupported, detail("the client speaks SOCKS5")),
            6 => self.refuse(None, EndReason::Unsupported, detail("the client speaks SOCKS6")),
            b'A'..=b'Z' | b'a'..=b'z' => {
                self.refuse(Some(HTTP_REFUSAL.into()), reason, detail("the client seems to speak HTTP"));
            }
            other => {
                // The version mismatch reply of the draft.
                let answer = self.config.v6.then(|| vec![6]);
                self.refuse(
                    answer,
                    reason,
                    detail(&format!("first byte 0x{other:02x} is not a SOCKS version")),
                );
            }
        }
    }

    fn refuse(&mut self, answer: Option<Vec<u8>>, reason: EndReason, detail: String) {
        let outputs = answer.map(Output::Send).into_iter().chain([Output::Failed { reason, detail }]);
        self.stage = Stage::Refused(outputs.collect());
    }
}
