//! The server end of version 5.

use super::super::address::{self, AddressError, NameLayout};
use super::super::password::{self, METHOD_NONE, METHOD_PASSWORD, METHOD_UNACCEPTABLE};
use super::super::reader::{Reader, Stop};
use super::super::reply::ReplyCode;
use super::super::server::{Input, MAX_PIPELINED_LEN, Output, Reply, Request, ServerConfig, Version};
use super::{VERSION, put_message};
use crate::flow::{Destination, EndReason};
use crate::secret;
use crate::socks::Command;
use crate::time::Instant;
use std::collections::VecDeque;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Password,
    Request,
    /// The driver dials the destination.
    Dialing,
    /// The driver listens for a client of BIND. Its address is told next, then its peer.
    Binding,
    Over,
}

impl State {
    const fn waits_for(self) -> &'static str {
        match self {
            Self::Greeting => "its greeting",
            Self::Password => "its user name and password",
            Self::Request | Self::Dialing | Self::Binding | Self::Over => "its request",
        }
    }
}

/// The server machine for one version 5 connection: greeting, password if accounts are configured, request.
///
/// A BIND waits for two replies of the driver; the state after the first is that after CONNECT's request. GSSAPI is never selected, because it would wrap all later data.
#[derive(Debug)]
pub struct Server {
    config: Arc<ServerConfig>,
    state: State,
    /// Received bytes that are not parsed yet. While the driver dials: bytes for the destination.
    buffer: Vec<u8>,
    user: Option<String>,
    outputs: VecDeque<Output>,
    deadline: Instant,
}

impl Server {
    /// Makes a machine for a new connection.
    pub fn new(config: Arc<ServerConfig>, now: Instant) -> Self {
        let deadline = now + config.handshake_timeout;
        Self::until(config, deadline)
    }

    /// Makes a machine for a connection whose handshake must end by `deadline`.
    pub(in crate::socks) fn until(config: Arc<ServerConfig>, deadline: Instant) -> Self {
        let (buffer, outputs) = (Vec::new(), VecDeque::new());
        Self { config, state: State::Greeting, buffer, user: None, outputs, deadline }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match (self.state, input) {
            (State::Over, _)
            | (_, Input::Session(_))
            | (State::Dialing | State::Binding, Input::Eof | Input::Tick) => {}
            (State::Dialing | State::Binding, Input::Bytes(bytes)) => self.hold(bytes),
            (State::Dialing | State::Binding, Input::Reply(reply)) => self.reply(&reply),
            (_, Input::Bytes(bytes)) => {
                self.buffer.extend_from_slice(bytes);
                self.advance();
            }
            (state, Input::Eof) => {
                self.fail(EndReason::ClientGone, format!("the client closed before {}", state.waits_for()));
            }
            (state, Input::Tick) if now >= self.deadline => {
                let detail = format!("the client did not finish {} in time", state.waits_for());
                self.fail(EndReason::HandshakeTimeout, detail);
            }
            (_, Input::Tick | Input::Reply(_)) => {}
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to pass [`Input::Tick`]. `None` once the request was returned.
    pub fn deadline(&self) -> Option<Instant> {
        (!matches!(self.state, State::Dialing | State::Binding | State::Over)).then_some(self.deadline)
    }

    /// Whether the driver may read from the client. See [`MAX_PIPELINED_LEN`].
    pub fn wants_bytes(&self) -> bool {
        self.state != State::Over && self.buffer.len() < MAX_PIPELINED_LEN
    }

    /// As [`super::super::Server::take_pipelined`].
    pub fn take_pipelined(&mut self) -> Vec<u8> {
        let has_request = matches!(self.state, State::Dialing | State::Binding);
        if has_request { std::mem::take(&mut self.buffer) } else { Vec::new() }
    }

    fn hold(&mut self, bytes: &[u8]) {
        if self.buffer.len() >= MAX_PIPELINED_LEN {
            let detail = "more client bytes than are held while dialling: the driver must heed wants_bytes";
            self.fail(EndReason::Limit, detail.into());
        } else {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// Parses all messages that are complete.
    fn advance(&mut self) {
        loop {
            let buffer = std::mem::take(&mut self.buffer);
            let mut reader = Reader::new(&buffer);
            let step = match self.state {
                State::Greeting => self.greeting(&mut reader),
                State::Password => self.password(&mut reader),
                State::Request => self.request(&mut reader),
                State::Dialing | State::Binding | State::Over => Err(Stop::Incomplete),
            };
            match step {
                Ok(()) => self.buffer = reader.rest().to_vec(),
                Err(Stop::Incomplete) => {
                    self.buffer = buffer;
                    break;
                }
                Err(Stop::Address(error)) => return self.refuse_address(error),
            }
        }
        // The request is complete, so the bytes behind it belong to the destination.
        if matches!(self.state, State::Dialing | State::Binding) {
            self.emit_first_bytes();
        }
    }

    fn greeting(&mut self, reader: &mut Reader<'_>) -> Result<(), Stop> {
        let version = reader.u8()?;
        if version != VERSION {
            self.fail(EndReason::BadRequest, format!("version byte 0x{version:02x} instead of 05"));
            return Ok(());
        }
        let count = reader.u8()?;
        let methods = reader.take(usize::from(count))?;
        let offers = |method| methods.contains(&method);
        let needs_password = !self.config.accounts.is_empty();
        let method = if !needs_password && offers(METHOD_NONE) {
            METHOD_NONE
        } else if offers(METHOD_PASSWORD) {
            // Without accounts, any password is accepted from a client that offers only the password method.
            METHOD_PASSWORD
        } else {
            METHOD_UNACCEPTABLE
        };
        self.send(vec![VERSION, method]);
        match method {
            METHOD_NONE => self.state = State::Request,
            METHOD_PASSWORD => self.state = State::Password,
            _ if needs_password => self.fail(
                EndReason::AuthFailed,
                "the client offers no user name and password, which this listener asks for".into(),
            ),
            _ => self.fail(
                EndReason::AuthFailed,
                format!("the client offers none of the methods 0 (none) and 2 (password): {methods:02x?}"),
            ),
        }
        Ok(())
    }

    fn password(&mut self, reader: &mut Reader<'_>) -> Result<(), Stop> {
        // Check the version before the rest: a client of another protocol might wait for an answer instead of sending
        // more.
        if let Some(&version) = reader.rest().first().filter(|version| **version != password::VERSION) {
            self.send(vec![password::VERSION, 1]);
            self.fail(EndReason::BadRequest, format!("RFC 1929 version byte 0x{version:02x} instead of 01"));
            return Ok(());
        }
        let (_, user, password) = password::read_request(reader)?;
        let account = secret::account(&self.config.accounts, user, password);
        if account.is_none() && !self.config.accounts.is_empty() {
            self.send(vec![password::VERSION, 1]);
            let user = String::from_utf8_lossy(user);
            self.fail(EndReason::AuthFailed, format!("wrong password or unknown user {user:?}"));
            return Ok(());
        }
        self.user = account.map(|account| account.user.clone());
        self.send(vec![password::VERSION, 0]);
        self.state = State::Request;
        Ok(())
    }

    fn request(&mut self, reader: &mut Reader<'_>) -> Result<(), Stop> {
        let version = reader.u8()?;
        if version != VERSION {
            self.refuse(
                ReplyCode::GeneralFailure,
                EndReason::BadRequest,
                format!("the request has version byte 0x{version:02x} instead of 05"),
            );
            return Ok(());
        }
        let command = reader.u8()?;
        reader.u8()?;
        let atyp = reader.u8()?;
        let host = address::read_host(reader, atyp, NameLayout::Bare)?;
        let destination = Destination { host, port: reader.u16()?, zone: 0 };
        let Some(command) = Command::from_wire(command).filter(|command| self.config.serves(*command)) else {
            let name = Command::from_wire(command).map_or("unknown", Command::name);
            let served = self.config.served();
            self.refuse(
                ReplyCode::CommandNotSupported,
                EndReason::Unsupported,
                format!("command {command} ({name}) to {destination} is not served, {served}"),
            );
            return Ok(());
        };
        self.state = if command == Command::Bind { State::Binding } else { State::Dialing };
        self.outputs.push_back(Output::Request(Box::new(Request {
            version: Version::V5,
            command,
            destination,
            user: self.user.take(),
            stack: Vec::new(),
            metadata: Vec::new(),
            session: None,
            announced_len: 0,
            first_bytes: Vec::new(),
        })));
        Ok(())
    }

    fn emit_first_bytes(&mut self) {
        if let Some(Output::Request(request)) = self.outputs.back_mut() {
            request.first_bytes = std::mem::take(&mut self.buffer);
        }
    }

    fn reply(&mut self, reply: &Reply) {
        let bound = reply.bound.map_or(address::UNSPECIFIED, Destination::from);
        let mut message = Vec::with_capacity(22);
        put_message(&mut message, reply.code.v5(), &bound);
        self.send(message);
        if reply.code == ReplyCode::Succeeded && self.state == State::Binding {
            // The driver waits for the peer now, as it waits for a server after CONNECT.
            self.state = State::Dialing;
        } else if reply.code == ReplyCode::Succeeded {
            let leftover = std::mem::take(&mut self.buffer);
            self.outputs.push_back(Output::Done { leftover });
            self.state = State::Over;
        } else {
            self.fail(reply.code.end_reason(), format!("refused the client: {}", reply.code));
        }
    }

    fn refuse_address(&mut self, error: AddressError) {
        let (code, reason) = match error {
            AddressError::Type(_) => (ReplyCode::AddressTypeNotSupported, EndReason::Unsupported),
            AddressError::Name(_) => (ReplyCode::GeneralFailure, EndReason::BadRequest),
        };
        self.refuse(code, reason, error.to_string());
    }

    fn refuse(&mut self, code: ReplyCode, reason: EndReason, detail: String) {
        let mut message = Vec::with_capacity(10);
        put_message(&mut message, code.v5(), &address::UNSPECIFIED);
        self.send(message);
        self.fail(reason, detail);
    }

    fn send(&mut self, bytes: Vec<u8>) {
        self.outputs.push_back(Output::Send(bytes));
    }

    fn fail(&mut self, reason: EndReason, detail: String) {
        self.state = State::Over;
        self.buffer = Vec::new();
        self.outputs.push_back(Output::Failed { reason, detail });
    }
}
