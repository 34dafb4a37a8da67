//! The client end of version 6: one write, one round trip.

use super::super::address;
use super::super::client::{Connected, Input, Output};
use super::super::handshake::{Event, Handshake};
use super::super::password::{self, METHOD_PASSWORD};
use super::super::reader::{Reader, Stop};
use super::super::reply::ReplyCode;
use super::message::{AuthReply, Command, OperationReply, Request};
use super::metadata::Metadata;
use super::options::{AuthData, AuthMethods, Options};
use super::session::{SessionId, SessionReport};
use super::stack::StackOption;
use super::{DecodeError, MAX_INITIAL_DATA_LEN, VERSION};
use crate::carrier::{Credentials, Socks6Dialect};
use crate::flow::{Destination, EndReason};
use crate::time::Instant;
use std::time::Duration;

/// What a client asks of the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientCommand {
    /// Connect to this destination. A name is sent as a name.
    Connect(Destination),
    /// Relay datagrams. What the proxy has bound is where to send them.
    UdpAssociate,
    /// Nothing: begin, resume or end a session, or request tokens. After `Connected`, close the connection.
    Noop,
}

/// What a client does with sessions. Not sent in the `socksx` layouts, which have no sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SessionUse {
    /// Nothing.
    #[default]
    None,
    /// Begin a session that is bound to the credentials.
    Begin {
        /// Also request a window of this number of tokens.
        token_request: Option<u32>,
    },
    /// Resume a session. Credentials are not sent.
    Resume {
        /// The id of the session.
        id: SessionId,
        /// Request a window of this number of tokens, if there is none yet.
        token_request: Option<u32>,
        /// Spend this token, so that the request is carried out at most once.
        token_spend: Option<u32>,
    },
    /// End a session. The request counts as outside it, so credentials are sent.
    TearDown {
        /// The id of the session.
        id: SessionId,
    },
}

/// The configuration of one request to a version 6 proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// The command.
    pub command: ClientCommand,
    /// The layout of the proxy. With either `socksx` layout, the client reads the replies of both generations.
    pub dialect: Socks6Dialect,
    /// The credentials. Not sent in the `socksx` layouts, where passwords do not work.
    pub credentials: Option<Credentials>,
    /// The metadata of the chain. If a key occurs twice, the last entry counts.
    pub metadata: Vec<Metadata>,
    /// The requested stack options. Not sent in the `socksx` layouts.
    pub stack: Vec<StackOption>,
    /// The first bytes for the destination, sent with the request. With credentials, and in the `socksx` layouts,
    /// these are the first [`MAX_INITIAL_DATA_LEN`] bytes. The rest follows the successful Authentication Reply.
    pub initial_data: Vec<u8>,
    /// The use of sessions.
    pub session: SessionUse,
    /// The time from `new` until the proxy must have connected.
    pub handshake_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the first Authentication Reply.
    Authentication,
    /// Waits for the answer to a password in the stream (-11).
    Status,
    /// Waits for the second Authentication Reply.
    SecondAuthentication,
    /// Waits for the Operation Reply.
    Operation,
}

impl State {
    const fn awaited(self) -> &'static str {
        match self {
            Self::Authentication | Self::SecondAuthentication => "Authentication Reply",
            Self::Status => "answer to the password",
            Self::Operation => "Operation Reply",
        }
    }
}

/// The client machine for one version 6 proxy.
#[derive(Debug)]
pub struct Client {
    dialect: Socks6Dialect,
    destination: Option<Destination>,
    credentials: Option<Credentials>,
    /// Initial data that is not sent yet.
    rest: Vec<u8>,
    state: State,
    handshake: Handshake,
    report: SessionReport,
}

impl Client {
    /// Starts the handshake. The first [`Client::poll`] returns request and initial data in one write.
    pub fn new(config: ClientConfig, now: Instant) -> Self {
        let ClientConfig { command, dialect, credentials, .. } = &config;
        let destination = match command {
            ClientCommand::Connect(destination) => Some(destination.clone()),
            ClientCommand::UdpAssociate => Some(address::UNSPECIFIED),
            ClientCommand::Noop => None,
        };
        let sends_credentials =
            *dialect == Socks6Dialect::Draft && !matches!(config.session, SessionUse::Resume { .. });
        let mut client = Self {
            dialect: *dialect,
            destination,
            credentials: credentials.clone().filter(|_| sends_credentials),
            rest: Vec::new(),
            state: State::Authentication,
            handshake: Handshake::new(now + config.handshake_timeout),
            report: SessionReport::default(),
        };
        client.open(config);
        client
    }

    fn open(&mut self, config: ClientConfig) {
        let mut initial_data = config.initial_data;
        if self.destination.is_none() {
            initial_data.clear();
        }
        // Without kind 2 no authentication can follow, so all data may follow at once ("false start"). The `socksx`
        // servers always require kind 2, and learn the length of the initial data from it.
        let advertises = self.credentials.is_some() || self.dialect != Socks6Dialect::Draft;
        if advertises && initial_data.len() > MAX_INITIAL_DATA_LEN {
            self.rest = initial_data.split_off(MAX_INITIAL_DATA_LEN);
        }
        let mut options = Options {
            metadata: last_of_each_key(config.metadata),
            stack: config.stack,
            ..Options::default()
        };
        if advertises {
            let methods = self.credentials.iter().map(|_| METHOD_PASSWORD).collect();
            // It was truncated to 2^14 above.
            let initial_data_len = u16::try_from(initial_data.len()).unwrap_or(u16::MAX);
            options.auth_methods = Some(AuthMethods { initial_data_len, methods });
        }
        if let Some(Credentials { user, password }) = &self.credentials {
            let (user, password) = (user.as_bytes().to_vec(), password.as_bytes().to_vec());
            options.auth_data.push(AuthData::Password { user, password });
        }
        match config.session {
            SessionUse::None => {}
            SessionUse::Begin { token_request } => {
                options.session_request = true;
                options.token_request = token_request;
            }
            SessionUse::Resume { id, token_request, token_spend } => {
                options.session_id = Some(id);
                options.token_request = token_request;
                options.token_spend = token_spend;
            }
            SessionUse::TearDown { id } => {
                options.session_id = Some(id);
                options.session_teardown = true;
            }
        }
        let command = match config.command {
            ClientCommand::Connect(_) => Command::Connect,
            ClientCommand::UdpAssociate => Command::UdpAssociate,
            ClientCommand::Noop => Command::Noop,
        };
        let destination = self.destination.clone().unwrap_or(address::UNSPECIFIED);
        match (Request { command, destination, options }).encode(self.dialect) {
            Ok(bytes) => self.handshake.send_with(bytes, &initial_data),
            Err(error) => self
                .handshake
                .fail(EndReason::HopFailed, format!("the SOCKS6 request cannot be sent: {error}")),
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match self.handshake.handle(now, input, self.state.awaited()) {
            Event::Bytes => self.advance(),
            Event::Eof => self.eof(),
            Event::None => {}
        }
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.handshake.poll()
    }

    /// Returns when to pass [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        self.handshake.deadline()
    }

    /// Returns the code with which the proxy refused the request.
    pub const fn refused_with(&self) -> Option<ReplyCode> {
        self.handshake.refusal()
    }

    /// As [`super::super::Client::initial_data_sent`].
    pub fn initial_data_sent(&self) -> usize {
        self.handshake.initial_data_sent()
    }

    /// Returns what the proxy has reported about session and tokens, also if the request failed.
    pub fn session_report(&self) -> &SessionReport {
        &self.report
    }

    fn eof(&mut self) {
        let (reason, detail) = match (self.state, self.handshake.buffer.as_slice()) {
            (State::Authentication, [VERSION]) => {
                let detail = "the proxy does not take our request for SOCKS6 (version mismatch reply)";
                (EndReason::HopFailed, detail.into())
            }
            (State::Operation, []) if self.dialect != Socks6Dialect::Draft => {
                // This is how `socksx` reports that it could not connect, for whatever reason.
                (
                    EndReason::Refused,
                    "the proxy closed instead of an Operation Reply: it could not connect".into(),
                )
            }
            (state, _) => (
                EndReason::HopFailed,
                format!("the proxy closed before its {} was complete", state.awaited()),
            ),
        };
        self.handshake.fail(reason, detail);
    }

    fn advance(&mut self) {
        while !self.handshake.is_over() {
            let used = match self.state {
                State::Authentication | State::SecondAuthentication => self.authentication(),
                State::Status => self.status(),
                State::Operation => self.operation(),
            };
            match used {
                // Once the handshake is over, the buffer is empty.
                Ok(Some(used)) if !self.handshake.is_over() => drop(self.handshake.buffer.drain(..used)),
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => self.malformed(error),
            }
        }
    }

    fn malformed(&mut self, error: DecodeError) {
        let seems = match error {
            DecodeError::Version(5) => " (it seems to speak SOCKS5)",
            DecodeError::Version(0) => " (it seems to speak SOCKS4)",
            DecodeError::Version(b'H') => " (it seems to speak HTTP)",
            DecodeError::Type(_) if self.dialect != Socks6Dialect::Draft => " (over its connection limit?)",
            _ => "",
        };
        let detail = format!("the proxy's {} is malformed: {error}{seems}", self.state.awaited());
        self.handshake.fail(EndReason::HopFailed, detail);
    }

    fn authentication(&mut self) -> Result<Option<usize>, DecodeError> {
        let Some((AuthReply { success, options }, used)) = AuthReply::decode(&self.handshake.buffer)? else {
            return Ok(None);
        };
        self.report_session(&options);
        if success {
            self.state = State::Operation;
            self.send_rest();
        } else if let Some(detail) = self.refusal(&options) {
            self.handshake.fail(EndReason::AuthFailed, detail);
        } else {
            // -11: send the password once more, in the stream. Data may follow the client's last message at once.
            self.state = State::Status;
            self.send_password();
            self.send_rest();
        }
        Ok(Some(used))
    }

    /// Returns why a failed Authentication Reply is final. `None`: the proxy wants the password in the stream.
    fn refusal(&self, options: &Options) -> Option<String> {
        let status = options.auth_data.iter().find_map(|data| match data {
            AuthData::PasswordStatus(status) if *status != 0 => Some(status),
            _ => None,
        });
        // From the most exact reason to the most general one.
        if options.session_invalid {
            Some("the proxy does not know the session".into())
        } else if options.token_rejected {
            Some("the proxy rejected the token: it was spent before, or left the window".into())
        } else if let Some(status) = status {
            Some(format!("the proxy did not accept user name and password (status {status})"))
        } else if self.state == State::SecondAuthentication {
            Some("the proxy did not accept user name and password".into())
        } else {
            match (options.auth_selection, &self.credentials) {
                (Some(METHOD_PASSWORD), Some(_)) => None,
                (Some(method), Some(_)) if method != password::METHOD_UNACCEPTABLE => {
                    Some(format!("the proxy wants authentication method {method}, which is not known here"))
                }
                (_, Some(_)) => Some("the proxy did not accept user name and password".into()),
                (_, None) => Some("the proxy asks for authentication: give user:password@ in the hop".into()),
            }
        }
    }

    fn send_password(&mut self) {
        let mut message = Vec::new();
        if let Some(Credentials { user, password }) = &self.credentials {
            // Their lengths were checked when the request was encoded.
            let _ = password::put_request(&mut message, user.as_bytes(), password.as_bytes());
        }
        self.handshake.send(message);
    }

    fn send_rest(&mut self) {
        let rest = std::mem::take(&mut self.rest);
        self.handshake.send_with(Vec::new(), &rest);
    }

    fn status(&mut self) -> Result<Option<usize>, DecodeError> {
        let mut reader = Reader::new(&self.handshake.buffer);
        let mut read = || -> Result<u8, Stop> {
            reader.u8()?;
            reader.u8()
        };
        match read() {
            Err(_) => return Ok(None),
            Ok(0) => self.state = State::SecondAuthentication,
            Ok(status) => {
                let detail = format!("the proxy did not accept user name and password (status {status})");
                self.handshake.fail(EndReason::AuthFailed, detail);
            }
        }
        Ok(Some(2))
    }

    fn operation(&mut self) -> Result<Option<usize>, DecodeError> {
        let Some((OperationReply { code, bound, options }, used)) =
            OperationReply::decode(&self.handshake.buffer, self.dialect)?
        else {
            return Ok(None);
        };
        self.report_session(&options);
        if code == ReplyCode::Succeeded {
            let leftover = self.handshake.buffer.split_off(used);
            self.handshake.connected(Connected {
                bound,
                stack: options.stack,
                metadata: options.metadata,
                session: self.report.clone(),
                leftover,
            });
        } else {
            let detail = match &self.destination {
                Some(destination) => format!("the proxy answered CONNECT to {destination}: {code}"),
                None => format!("the proxy answered NOOP: {code}"),
            };
            self.handshake.refused(code, detail);
        }
        Ok(Some(used))
    }

    fn report_session(&mut self, options: &Options) {
        let report = &mut self.report;
        if let Some(id) = &options.session_id {
            report.id = Some(id.clone());
        }
        report.ok |= options.session_ok;
        report.invalid |= options.session_invalid;
        report.window = options.token_window.or(report.window);
        if options.token_accepted || options.token_rejected {
            report.token_accepted = Some(options.token_accepted);
        }
    }
}

/// Removes repeated keys: a message must contain each key at most once.
fn last_of_each_key(mut metadata: Vec<Metadata>) -> Vec<Metadata> {
    let mut seen = std::collections::BTreeSet::new();
    metadata.reverse();
    metadata.retain(|entry| seen.insert(entry.key));
    metadata.reverse();
    metadata
}
