//! The client's side: what every SOCKS client machine takes and gives, and either version as one type.

use super::v6::{Metadata, SessionReport, StackOption};
use super::{v5, v6};
use crate::flow::{Destination, EndReason};
use crate::time::Instant;

/// What happens to a client machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// Bytes from the proxy.
    Bytes(&'a [u8]),
    /// Nothing more will come from the proxy: a FIN, or a reset (how `socksx` says that it could not connect).
    Eof,
    /// The deadline has come.
    Tick,
}

/// What a client machine wants. After `Connected` or `Failed` it takes and gives nothing more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write this to the proxy.
    Send(Vec<u8>),
    /// The proxy has connected; from here on bytes are the flow's.
    Connected(Box<Connected>),
    /// Close.
    Failed {
        /// For the record.
        reason: EndReason,
        /// The step, the code and its meaning, for the record and a person. Does not name the hop: the driver does.
        detail: String,
    },
}

/// What the proxy said when it had connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// The address the proxy says it uses; often `0.0.0.0:0`, and it may be a name.
    pub bound: Destination,
    /// What the proxy did about stack options (version 6).
    pub stack: Vec<StackOption>,
    /// Metadata of the reply (version 6).
    pub metadata: Vec<Metadata>,
    /// What the proxy said about session and tokens (version 6).
    pub session: SessionReport,
    /// Server bytes that came with the last reply.
    pub leftover: Vec<u8>,
}

/// A client of either version, towards one hop.
#[derive(Debug)]
pub enum Client {
    /// Version 5.
    V5(Box<v5::Client>),
    /// Version 6.
    V6(Box<v6::Client>),
}

impl Client {
    /// Takes one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match self {
            Self::V5(client) => client.handle(now, input),
            Self::V6(client) => client.handle(now, input),
        }
    }

    /// The next output, until `None`. The first one, before any input, is what opens the handshake.
    pub fn poll(&mut self) -> Option<Output> {
        match self {
            Self::V5(client) => client.poll(),
            Self::V6(client) => client.poll(),
        }
    }

    /// When to hand in [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::V5(client) => client.deadline(),
            Self::V6(client) => client.deadline(),
        }
    }

    /// How many bytes of the initial data have been given out in [`Output::Send`] so far. Right after the first poll:
    /// how many went out with the request.
    pub fn initial_data_sent(&self) -> usize {
        match self {
            Self::V5(client) => client.initial_data_sent(),
            Self::V6(client) => client.initial_data_sent(),
        }
    }
}
