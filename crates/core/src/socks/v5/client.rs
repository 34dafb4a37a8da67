//! The client end of version 5.

use super::super::address::{self, NameLayout};
use super::super::client::{Connected, Input, Output};
use super::super::handshake::{Event, Handshake};
use super::super::password::{self, METHOD_NONE, METHOD_PASSWORD, METHOD_UNACCEPTABLE};
use super::super::reader::{Reader, Stop};
use super::super::reply::ReplyCode;
use super::super::v6::SessionReport;
use super::{VERSION, put_message};
use crate::carrier::Credentials;
use crate::flow::{Destination, EndReason};
use crate::socks::Command;
use crate::time::Instant;
use std::borrow::Cow;
use std::time::Duration;

/// The configuration of one request to a version 5 proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// What the proxy is asked for. BIND: [`Output::Connected`] tells of the first reply.
    pub command: Command,
    /// The destination. A name is sent as a name. UDP ASSOCIATE: the address that datagrams come from; zeros if it is not
    /// known.
    pub destination: Destination,
    /// The credentials. Without them, the client does not offer the password method.
    pub credentials: Option<Credentials>,
    /// Send greeting, password, request and initial data in one write, without waiting for answers. This saves one
    /// round trip, or two with a password, and one more for the data. It fails with servers that drop bytes they do
    /// not expect yet.
    pub optimistic: bool,
    /// The first bytes for the destination. If not optimistic, they are sent after the proxy has connected.
    pub initial_data: Vec<u8>,
    /// The time from `new` until the proxy must have connected.
    pub handshake_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Method,
    Status,
    Reply,
}

/// The client machine for one version 5 proxy.
#[derive(Debug)]
pub struct Client {
    config: ClientConfig,
    state: State,
    handshake: Handshake,
}

impl Client {
    /// Starts the handshake. The first [`Client::poll`] returns the opening bytes.
    pub fn new(mut config: ClientConfig, now: Instant) -> Self {
        let initial_data = std::mem::take(&mut config.initial_data);
        let handshake = Handshake::new(now + config.handshake_timeout);
        let mut client = Self { config, state: State::Method, handshake };
        client.open(initial_data);
        client
    }

    fn open(&mut self, initial_data: Vec<u8>) {
        let optimistic = self.config.optimistic;
        let mut opening = match (&self.config.credentials, optimistic) {
            (None, _) => vec![VERSION, 1, METHOD_NONE],
            // Offer both: a server that needs no password saves the round trip.
            (Some(_), false) => vec![VERSION, 2, METHOD_NONE, METHOD_PASSWORD],
            // The password follows in the same write, so offer only this method.
            (Some(_), true) => vec![VERSION, 1, METHOD_PASSWORD],
        };
        if let Some(credentials) = &self.config.credentials {
            let mut message = Vec::new();
            let (user, password) = (credentials.user.as_bytes(), credentials.password.as_bytes());
            if password::put_request(&mut message, user, password).is_none() {
                let detail = "user and password for a SOCKS5 hop must have 1 to 255 bytes each";
                return self.handshake.fail(EndReason::AuthFailed, detail);
            }
            if optimistic {
                opening.append(&mut message);
            }
        }
        if optimistic {
            put_message(&mut opening, self.config.command.wire(), &self.config.destination);
            self.handshake.send_with(opening, &initial_data);
        } else {
            self.config.initial_data = initial_data;
            self.handshake.send(opening);
        }
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        let awaited = self.awaited();
        match self.handshake.handle(now, input, &awaited) {
            Event::Bytes => self.advance(),
            Event::Eof => {
                let detail = format!("the proxy closed before its {}", self.awaited());
                self.handshake.fail(EndReason::HopFailed, detail);
            }
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

    /// Returns what the proxy has to send next.
    fn awaited(&self) -> Cow<'static, str> {
        match self.state {
            State::Method => "method selection".into(),
            State::Status => "answer to the password".into(),
            State::Reply => format!("reply to {}", self.config.command).into(),
        }
    }

    fn advance(&mut self) {
        while !self.handshake.is_over() {
            let buffer = std::mem::take(&mut self.handshake.buffer);
            let mut reader = Reader::new(&buffer);
            let step = match self.state {
                State::Method => self.method(&mut reader),
                State::Status => self.status(&mut reader),
                State::Reply => self.reply(&mut reader),
            };
            match step {
                Ok(()) => self.handshake.buffer = reader.rest().to_vec(),
                Err(Stop::Incomplete) => {
                    self.handshake.buffer = buffer;
                    return;
                }
                Err(Stop::Address(error)) => {
                    return self
                        .handshake
                        .fail(EndReason::HopFailed, format!("the proxy's reply is malformed: {error}"));
                }
            }
        }
    }

    fn version(&mut self, reader: &mut Reader<'_>) -> Result<bool, Stop> {
        let version = reader.u8()?;
        if version != VERSION {
            let seems = match version {
                0 => " (it seems to speak SOCKS4)",
                6 => " (it seems to speak SOCKS6)",
                b'H' => " (it seems to speak HTTP)",
                _ => "",
            };
            let awaited = self.awaited();
            self.handshake.fail(
                EndReason::HopFailed,
                format!("the proxy's {awaited} begins with 0x{version:02x} instead of 05{seems}"),
            );
        }
        Ok(version == VERSION)
    }

    fn method(&mut self, reader: &mut Reader<'_>) -> Result<(), Stop> {
        if !self.version(reader)? {
            return Ok(());
        }
        let has_credentials = self.config.credentials.is_some();
        match reader.u8()? {
            METHOD_NONE if !(has_credentials && self.config.optimistic) => self.request(),
            METHOD_PASSWORD if has_credentials => {
                self.state = State::Status;
                if !self.config.optimistic {
                    self.send_password();
                }
            }
            METHOD_UNACCEPTABLE if has_credentials => {
                self.handshake.fail(EndReason::AuthFailed, "the proxy accepts no user name and password");
            }
            METHOD_UNACCEPTABLE => self.handshake.fail(
                EndReason::AuthFailed,
                "the proxy asks for authentication: give user:password@ in the hop",
            ),
            other => self.handshake.fail(
                EndReason::HopFailed,
                format!("the proxy selected method {other}, which was not offered"),
            ),
        }
        Ok(())
    }

    fn send_password(&mut self) {
        let mut message = Vec::new();
        if let Some(credentials) = &self.config.credentials {
            let (user, password) = (credentials.user.as_bytes(), credentials.password.as_bytes());
            // Their lengths were checked when the client was made.
            let _ = password::put_request(&mut message, user, password);
        }
        self.handshake.send(message);
    }

    fn status(&mut self, reader: &mut Reader<'_>) -> Result<(), Stop> {
        // Some servers answer with version 05, so ignore the version byte.
        reader.u8()?;
        match reader.u8()? {
            0 => self.request(),
            status => self.handshake.fail(
                EndReason::AuthFailed,
                format!("the proxy did not accept user name and password (status {status})"),
            ),
        }
        Ok(())
    }

    /// Sends the request, unless an optimistic client has sent it already.
    fn request(&mut self) {
        self.state = State::Reply;
        if !self.config.optimistic {
            let mut message = Vec::new();
            put_message(&mut message, self.config.command.wire(), &self.config.destination);
            self.handshake.send(message);
        }
    }

    fn reply(&mut self, reader: &mut Reader<'_>) -> Result<(), Stop> {
        if !self.version(reader)? {
            return Ok(());
        }
        let code = ReplyCode::from_wire(reader.u8()?);
        if code != ReplyCode::Succeeded {
            // Do not wait for the rest: many servers truncate a failure reply.
            let ClientConfig { command, destination, .. } = &self.config;
            let detail = match command {
                Command::UdpAssociate => format!("the proxy answered {command}: {code}"),
                _ => format!("the proxy answered {command} to {destination}: {code}"),
            };
            self.handshake.refused(code, detail);
            return Ok(());
        }
        reader.u8()?;
        let atyp = reader.u8()?;
        let host = address::read_bound(reader, atyp, NameLayout::Bare)?;
        let bound = Destination { host, port: reader.u16()?, zone: 0 };
        let rest = std::mem::take(&mut self.config.initial_data);
        self.handshake.send_with(Vec::new(), &rest);
        self.handshake.connected(Connected {
            bound,
            stack: Vec::new(),
            metadata: Vec::new(),
            session: SessionReport::default(),
            leftover: reader.rest().to_vec(),
        });
        Ok(())
    }
}
