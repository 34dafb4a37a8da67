//! The client side: the inputs and outputs of all SOCKS client machines, and a client of either version as one type.

use super::v6::{Metadata, SessionReport, StackOption};
use super::{v5, v6};
use crate::flow::{Destination, EndReason};
use crate::hold::Answer;
use crate::time::Instant;

/// An event for a client machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// Bytes from the proxy.
    Bytes(&'a [u8]),
    /// The proxy will send nothing more: a FIN, or a reset (with which `socksx` reports that it could not connect).
    Eof,
    /// The deadline may have passed.
    Tick,
}

/// What a client machine wants done. After `Connected` or `Failed` it accepts no input and gives no output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write this to the proxy.
    Send(Vec<u8>),
    /// The proxy has connected. From now on, the bytes belong to the flow.
    Connected(Box<Connected>),
    /// Close the connection.
    Failed {
        /// The reason, for the record.
        reason: EndReason,
        /// The step, the code and its meaning, for the record and for people. The driver adds the name of the hop.
        detail: String,
    },
}

/// What the proxy reported when it had connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connected {
    /// The address that the proxy reports for its connection. It is often `0.0.0.0:0`, and may be a name.
    pub bound: Destination,
    /// How the proxy answered stack options (version 6).
    pub stack: Vec<StackOption>,
    /// The metadata of the reply (version 6).
    pub metadata: Vec<Metadata>,
    /// What the proxy reported about session and tokens (version 6).
    pub session: SessionReport,
    /// Bytes of the server that arrived with the last reply.
    pub leftover: Vec<u8>,
}

/// A client of either version, for one hop.
#[derive(Debug)]
pub enum Client {
    /// Version 5.
    V5(Box<v5::Client>),
    /// Version 6.
    V6(Box<v6::Client>),
}

impl Client {
    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<'_>) {
        match self {
            Self::V5(client) => client.handle(now, input),
            Self::V6(client) => client.handle(now, input),
        }
    }

    /// Returns the next output, or `None`. The first one, before any input, opens the handshake.
    pub fn poll(&mut self) -> Option<Output> {
        match self {
            Self::V5(client) => client.poll(),
            Self::V6(client) => client.poll(),
        }
    }

    /// Returns when to call [`Self::handle`] with [`Input::Tick`].
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::V5(client) => client.deadline(),
            Self::V6(client) => client.deadline(),
        }
    }

    /// Returns what the application would have been told, if the proxy refused the request with a code.
    pub fn told(&self) -> Option<Answer> {
        match self {
            Self::V5(client) => client.refused_with().map(|code| Answer::of_reply(code, true)),
            Self::V6(client) => client.refused_with().map(|code| Answer::of_reply(code, false)),
        }
    }

    /// Returns how many bytes of the initial data were returned in [`Output::Send`] so far. Right after the first
    /// poll this is the number of bytes sent with the request.
    pub fn initial_data_sent(&self) -> usize {
        match self {
            Self::V5(client) => client.initial_data_sent(),
            Self::V6(client) => client.initial_data_sent(),
        }
    }
}
