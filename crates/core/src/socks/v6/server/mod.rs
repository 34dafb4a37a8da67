//! The server end of version 6.
//!
//! The client sends a request. The server answers with an Authentication Reply, or with two if a -11 client sends its
//! password in the stream. For CONNECT and NOOP, an Operation Reply follows. A client that advertised no method does
//! not wait for the Authentication Reply, so both replies are sent in one write.

mod authenticate;
mod replies;

use super::message::{Command, Request};
use super::options::Options;
use super::session::SessionId;
use super::stack::StackOption;
use super::{DecodeError, dialect};
use crate::carrier::Socks6Dialect;
use crate::flow::{Destination, EndReason, Host};
use crate::socks::Command as Served;
use crate::socks::address::AddressError;
use crate::socks::reply::ReplyCode;
use crate::socks::server::{self as driver, Input, MAX_PIPELINED_LEN, Output, Reply, ServerConfig, Version};
use crate::time::Instant;
use std::collections::VecDeque;
use std::sync::Arc;

#[derive(Debug)]
enum State {
    /// Waits for the complete request.
    Request,
    /// Waits for initial data and the password message behind it (-11).
    Exchange(Box<Request>),
    /// Waits for the answer of the session table.
    Session(Box<Pending>),
    /// Delays a request that wants its initial data in the SYN.
    InitialData(Box<driver::Request>, Instant),
    /// The driver dials the destination.
    Dialing,
    /// The driver listens for a client of BIND. Its address is told next, then its peer.
    Binding,
    Over,
}

/// A request that is authenticated, and waits for the answer of the session table.
#[derive(Debug)]
struct Pending {
    request: Request,
    auth: Authenticated,
}

/// The result of authenticating a request.
#[derive(Debug, Default)]
struct Authenticated {
    user: Option<String>,
    /// The options of the Authentication Reply.
    reply: Options,
    session: Option<SessionId>,
}

/// The server machine for one version 6 connection.
///
/// A BIND waits for two replies of the driver. In the `socksx` layouts, BIND and UDP ASSOCIATE are answered with code 7.
/// These layouts get the one reply that both generations
/// accept.
#[derive(Debug)]
pub struct Server {
    config: Arc<ServerConfig>,
    state: State,
    dialect: Socks6Dialect,
    /// Received bytes that are not parsed yet. While the driver dials: bytes for the destination.
    buffer: Vec<u8>,
    /// An Authentication Reply that will be sent together with the Operation Reply.
    held_reply: Vec<u8>,
    /// The stack options that the client requested.
    asked: Vec<StackOption>,
    outputs: VecDeque<Output>,
    deadline: Instant,
    now: Instant,
}

impl Server {
    /// Makes a machine for a new connection.
    pub fn new(config: Arc<ServerConfig>, now: Instant) -> Self {
        let deadline = now + config.handshake_timeout;
        Self::until(config, deadline)
    }

    /// Makes a machine for a connection whose handshake must end by `deadline`.
    pub(in crate::socks) fn until(config: Arc<ServerConfig>, deadline: Instant) -> Self {
        Self {
            config,
            state: State::Request,
            dialect: Socks6Dialect::Draft,
            buffer: Vec::new(),
            held_reply: Vec::new(),
            asked: Vec::new(),
            outputs: VecDeque::new(),
            deadline,
            now: Instant::ZERO,
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        self.now = now;
        match input {
            Input::Bytes(bytes) => self.bytes(bytes),
            Input::Eof => self.eof(),
            Input::Session(answer) => self.session(answer),
            Input::Reply(reply) => self.reply(reply),
            Input::Tick => self.tick(),
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to pass [`Input::Tick`]. `None` once the request was returned.
    pub fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Request | State::Exchange(_) | State::Session(_) => Some(self.deadline),
            State::InitialData(_, until) => Some(*until),
            State::Dialing | State::Binding | State::Over => None,
        }
    }

    /// Whether the driver may read from the client. See [`MAX_PIPELINED_LEN`].
    pub fn wants_bytes(&self) -> bool {
        !matches!(self.state, State::Over) && self.buffer.len() < MAX_PIPELINED_LEN
    }

    /// As [`super::super::Server::take_pipelined`].
    pub fn take_pipelined(&mut self) -> Vec<u8> {
        let has_request = matches!(self.state, State::Dialing | State::Binding);
        if has_request { std::mem::take(&mut self.buffer) } else { Vec::new() }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        match self.state {
            State::Over => return,
            State::Dialing | State::Binding | State::Session(_) if self.buffer.len() >= MAX_PIPELINED_LEN => {
                let detail =
                    "more client bytes than are held while dialling: the driver must heed wants_bytes";
                return self.fail(EndReason::Limit, detail.into());
            }
            _ => self.buffer.extend_from_slice(bytes),
        }
        match std::mem::replace(&mut self.state, State::Over) {
            State::Request => self.request(),
            State::Exchange(request) => self.exchange(request),
            State::InitialData(request, until) => self.initial_data(request, until),
            other => self.state = other,
        }
    }

    fn eof(&mut self) {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Request => {
                self.fail(EndReason::ClientGone, "the client closed before its request was complete".into());
            }
            State::Exchange(_) => {
                self.fail(EndReason::ClientGone, "the client closed before its password".into());
            }
            // No more data will come, so do not wait any longer.
            State::InitialData(request, _) => self.emit(request),
            other => self.state = other,
        }
    }

    fn tick(&mut self) {
        if self.deadline().is_none_or(|deadline| self.now < deadline) {
            return;
        }
        match std::mem::replace(&mut self.state, State::Over) {
            State::InitialData(request, _) => self.emit(request),
            State::Exchange(_) => {
                self.fail(EndReason::HandshakeTimeout, "the client's password did not come in time".into());
            }
            _ => {
                let detail = "the client's request was not complete in time";
                self.fail(EndReason::HandshakeTimeout, detail.into());
            }
        }
    }

    fn request(&mut self) {
        self.state = State::Request;
        match dialect::of_request(self.config.dialect, &self.buffer) {
            Ok(dialect) => self.dialect = dialect,
            Err(_) => return,
        }
        match Request::decode(&self.buffer, self.dialect) {
            Ok(None) => {}
            Ok(Some((request, len))) => {
                self.buffer.drain(..len);
                self.asked.clone_from(&request.options.stack);
                self.authenticate(Box::new(request));
            }
            Err(DecodeError::Version(_)) => {
                // This byte alone is the version mismatch reply.
                self.send(vec![super::VERSION]);
                self.fail(EndReason::BadRequest, "the client does not speak SOCKS6".into());
            }
            Err(error) => {
                let (code, reason) = match error {
                    DecodeError::Address(AddressError::Type(_)) => {
                        (ReplyCode::AddressTypeNotSupported, EndReason::Unsupported)
                    }
                    _ => (ReplyCode::GeneralFailure, EndReason::BadRequest),
                };
                self.reply_auth(true, Options::default());
                self.operation_reply(code, None, Options::default());
                self.fail(reason, format!("the client's SOCKS6 request: {error}"));
            }
        }
    }

    /// Sends the successful Authentication Reply, and carries out the command.
    fn operate(&mut self, request: Request, auth: Authenticated) {
        let Request { command, destination, options } = request;
        let may_wait = options.auth_methods.is_none() || self.dialect != Socks6Dialect::Draft;
        self.reply_auth(true, auth.reply);
        match command {
            Command::Noop => {
                self.operation_reply(ReplyCode::Succeeded, None, Options::default());
                self.state = State::Over;
                self.outputs.push_back(Output::Finished);
            }
            Command::Connect if asks_for_dns(&destination) => {
                let detail = format!("CONNECT to {destination} asks for DNS, which is not offered");
                self.refuse(ReplyCode::ConnectionRefused, EndReason::Unsupported, detail);
            }
            command => match self.served(command) {
                Some(command) => {
                    if !may_wait {
                        self.send_held();
                    }
                    let request = Box::new(driver::Request {
                        version: match self.dialect {
                            Socks6Dialect::Draft => Version::V6,
                            Socks6Dialect::Socksx010 | Socks6Dialect::Socksx => Version::V6Socksx,
                        },
                        command,
                        destination,
                        user: auth.user,
                        stack: options.stack,
                        metadata: options.metadata,
                        session: auth.session,
                        announced_len: options.auth_methods.map_or(0, |methods| methods.initial_data_len),
                        first_bytes: Vec::new(),
                    });
                    self.initial_data(request, self.now + self.config.initial_data_wait);
                }
                None => {
                    let served = self.config.served();
                    let detail =
                        format!("command {command:?} with {destination} is not served: {served}, and NOOP");
                    self.refuse(ReplyCode::CommandNotSupported, EndReason::Unsupported, detail);
                }
            },
        }
    }

    /// Returns the command of the driver. `None`: it is not served in this layout.
    fn served(&self, command: Command) -> Option<Served> {
        let is_draft = self.dialect == Socks6Dialect::Draft;
        match command {
            Command::Connect => Some(Served::Connect),
            Command::Bind => Some(Served::Bind).filter(|_| is_draft && self.config.bind),
            Command::UdpAssociate => Some(Served::UdpAssociate).filter(|_| is_draft && self.config.udp),
            Command::Noop | Command::Other(_) => None,
        }
    }

    /// Returns the request to the driver, or delays it if waiting for its initial data is useful.
    fn initial_data(&mut self, request: Box<driver::Request>, until: Instant) {
        let is_connect = request.command == Served::Connect;
        let wants_syn_data =
            is_connect && request.stack.iter().any(|option| matches!(option, StackOption::Tfo(_)));
        let missing = self.buffer.len() < usize::from(request.announced_len);
        if wants_syn_data && missing && self.now < until {
            self.state = State::InitialData(request, until);
        } else {
            self.emit(request);
        }
    }

    fn emit(&mut self, mut request: Box<driver::Request>) {
        request.first_bytes = std::mem::take(&mut self.buffer);
        self.state = if request.command == Served::Bind { State::Binding } else { State::Dialing };
        self.outputs.push_back(Output::Request(request));
    }

    fn reply(&mut self, reply: Reply) {
        let is_first = matches!(self.state, State::Binding);
        if !is_first && !matches!(self.state, State::Dialing) {
            return;
        }
        let Reply { code, bound, stack, metadata } = reply;
        let stack = self.stack_answers(stack);
        self.operation_reply(
            code,
            bound.map(Destination::from),
            Options { stack, metadata, ..Options::default() },
        );
        if code == ReplyCode::Succeeded && is_first {
            // The driver waits for the peer now, as it waits for a server after CONNECT.
            self.state = State::Dialing;
        } else if code == ReplyCode::Succeeded {
            let leftover = std::mem::take(&mut self.buffer);
            self.outputs.push_back(Output::Done { leftover });
            self.state = State::Over;
        } else {
            self.fail(code.end_reason(), format!("refused the client: {code}"));
        }
    }

    fn refuse(&mut self, code: ReplyCode, reason: EndReason, detail: String) {
        self.operation_reply(code, None, Options::default());
        self.fail(reason, detail);
    }
}

/// Whether this is CONNECT to the unspecified address and port 53, which means the DNS service of the proxy.
fn asks_for_dns(destination: &Destination) -> bool {
    matches!(destination.host, Host::Ip(ip) if ip.is_unspecified()) && destination.port == 53
}
