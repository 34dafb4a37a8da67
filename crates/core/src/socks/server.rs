//! The server's side: what every SOCKS server machine takes and gives, and the machine that tells versions 5 and 6
//! apart on one port.

use super::reply::ReplyCode;
use super::v6::{Metadata, SessionAnswer, SessionId, SessionQuery, StackOption};
use super::{v5, v6};
use crate::carrier::Credentials;
use crate::flow::{Destination, EndReason};
use crate::time::Instant;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Client bytes held between the request and [`Output::Done`]. Once that many wait,
/// [`Server::wants_bytes`] is false, and handing in more ends the connection with [`EndReason::Limit`].
pub const MAX_PIPELINED_LEN: usize = 64 * 1024;

/// Which layout of SOCKS6 a listener expects (`Socks6Dialect` without the generations of `socksx`, whose requests
/// are alike and which take a common reply).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ServerDialect {
    /// Told from the request. Wrong only for a `socksx` request to some IPv4 addresses that end in .0 and to few
    /// IPv6 addresses.
    #[default]
    Auto,
    /// The draft's.
    Draft,
    /// `socksx`'s.
    Socksx,
}

/// What a listener serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Serve version 5.
    pub v5: bool,
    /// Serve version 6.
    pub v6: bool,
    /// Layout of version 6.
    pub dialect: ServerDialect,
    /// Who may use it; empty: everyone, without authentication.
    pub accounts: Vec<Credentials>,
    /// Offer sessions and tokens of version 6; the driver then answers [`Output::Session`] from a
    /// [`v6::SessionTable`].
    pub sessions: bool,
    /// From `new` until the request is complete.
    pub handshake_timeout: Duration,
    /// How long a version 6 request is held back for initial data that it announced, when it asks for TCP Fast Open
    /// to the destination (without the data at hand there is nothing to put into the SYN). Tens of milliseconds;
    /// zero: never. Requests without TFO are never held: announced data may never come (`socksx`).
    pub initial_data_wait: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            v5: true,
            v6: true,
            dialect: ServerDialect::Auto,
            accounts: Vec::new(),
            sessions: true,
            handshake_timeout: Duration::from_secs(10),
            initial_data_wait: Duration::from_millis(30),
        }
    }
}

/// The version a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// RFC 1928.
    V5,
    /// The draft's layout.
    V6,
    /// A layout of `socksx` under version byte 6.
    V6Socksx,
}

/// A complete, authenticated CONNECT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// How it was asked.
    pub version: Version,
    /// Where to.
    pub destination: Destination,
    /// Who authenticated, if that was needed.
    pub user: Option<String>,
    /// Stack options asked for (version 6). TFO and MPTCP are to be used only when they are here.
    pub stack: Vec<StackOption>,
    /// The chain's metadata (version 6), to be copied to the next hop.
    pub metadata: Vec<Metadata>,
    /// The session it is part of (version 6); touch it in the table when the flow ends.
    pub session: Option<SessionId>,
    /// Bytes of initial data the client announced (version 6). It may send more, or never send them.
    pub announced_len: u16,
    /// Client bytes that came along and belong to the destination. What comes later is in [`Output::Done`].
    pub first_bytes: Vec<u8>,
}

/// What the driver did about a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// How it went.
    pub code: ReplyCode,
    /// The local address of the connection to the destination; `None` is sent as `0.0.0.0:0`.
    pub bound: Option<SocketAddr>,
    /// What was done about stack options. TFO, MPTCP and Happy Eyeballs that were asked for and are missing here are
    /// answered as not used.
    pub stack: Vec<StackOption>,
    /// Metadata for the client (version 6, draft layout).
    pub metadata: Vec<Metadata>,
}

impl Reply {
    /// Connected; bound to this address.
    pub fn connected(bound: SocketAddr) -> Self {
        Self { code: ReplyCode::Succeeded, bound: Some(bound), stack: Vec::new(), metadata: Vec::new() }
    }

    /// Not connected.
    pub fn failed(code: ReplyCode) -> Self {
        Self { code, bound: None, stack: Vec::new(), metadata: Vec::new() }
    }
}

/// What happens to a server machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// Bytes from the client.
    Bytes(&'a [u8]),
    /// Nothing more will come from the client: a FIN, or a reset. After the request a FIN is a half-close and changes
    /// nothing here.
    Eof,
    /// The answer to [`Output::Session`].
    Session(SessionAnswer),
    /// The answer to [`Output::Request`].
    Reply(Reply),
    /// The deadline has come.
    Tick,
}

/// What a server machine wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write this to the client.
    Send(Vec<u8>),
    /// Look this up in the session table and answer with [`Input::Session`].
    Session(SessionQuery),
    /// Dial, and answer with [`Input::Reply`].
    Request(Box<Request>),
    /// The handshake is over: from here on bytes are the flow's.
    Done {
        /// Client bytes after [`Request::first_bytes`], for the destination.
        leftover: Vec<u8>,
    },
    /// All was answered and no flow follows (a NOOP): close.
    Finished,
    /// Close, after what was sent is written.
    Failed {
        /// For the record.
        reason: EndReason,
        /// For the record and a person.
        detail: String,
    },
}

/// The first byte decides which version's machine runs.
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

/// Answers a browser that took the port for an HTTP proxy.
const HTTP_REFUSAL: &str = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 35\r\n\
    Connection: close\r\n\r\nThis port speaks SOCKS, not HTTP.\r\n";

impl Server {
    /// A new connection.
    pub fn new(config: Arc<ServerConfig>, now: Instant) -> Self {
        let deadline = now + config.handshake_timeout;
        Self { config, stage: Stage::First { deadline } }
    }

    /// Takes one event.
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

    /// The next output, until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        match &mut self.stage {
            Stage::First { .. } => None,
            Stage::V5(server) => server.poll(),
            Stage::V6(server) => server.poll(),
            Stage::Refused(outputs) => outputs.pop_front(),
        }
    }

    /// When to hand in [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::First { deadline } => Some(*deadline),
            Stage::V5(server) => server.deadline(),
            Stage::V6(server) => server.deadline(),
            Stage::Refused(_) => None,
        }
    }

    /// May the driver read from the client? See [`MAX_PIPELINED_LEN`].
    pub fn wants_bytes(&self) -> bool {
        match &self.stage {
            Stage::First { .. } => true,
            Stage::V5(server) => server.wants_bytes(),
            Stage::V6(server) => server.wants_bytes(),
            Stage::Refused(_) => false,
        }
    }

    /// Takes the client bytes that came after [`Request::first_bytes`], to send them along with a dial that is
    /// under way (a next hop's request, say). They are then no longer in [`Output::Done`].
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
                self.refuse(answer, reason, detail(&format!("first byte 0x{other:02x} is no SOCKS version")));
            }
        }
    }

    fn refuse(&mut self, answer: Option<Vec<u8>>, reason: EndReason, detail: String) {
        let outputs = answer.map(Output::Send).into_iter().chain([Output::Failed { reason, detail }]);
        self.stage = Stage::Refused(outputs.collect());
    }
}
