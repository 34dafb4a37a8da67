//! What the client machines of both versions share: bytes not read yet, outputs not taken yet, the deadline, the one end.

use super::client::{Connected, Input, Output};
use crate::flow::EndReason;
use crate::time::Instant;
use std::collections::VecDeque;

/// What an input means to a machine whose handshake is not over.
pub enum Event {
    /// There are new bytes in [`Handshake::buffer`].
    Bytes,
    /// No more bytes will come.
    Eof,
    /// Nothing to do.
    None,
}

/// See the module.
#[derive(Debug)]
pub struct Handshake {
    /// Bytes of the proxy that no message has taken yet.
    pub buffer: Vec<u8>,
    outputs: VecDeque<Output>,
    /// `None` once the handshake is over.
    deadline: Option<Instant>,
    initial_data_sent: usize,
}

impl Handshake {
    /// One that has to be over by `deadline`.
    pub fn new(deadline: Instant) -> Self {
        Self { buffer: Vec::new(), outputs: VecDeque::new(), deadline: Some(deadline), initial_data_sent: 0 }
    }

    /// Takes an input; a deadline that has come fails the handshake, naming what was `awaited`.
    pub fn handle(&mut self, now: Instant, input: Input<'_>, awaited: &str) -> Event {
        let Some(deadline) = self.deadline else { return Event::None };
        match input {
            Input::Bytes(bytes) => {
                self.buffer.extend_from_slice(bytes);
                return Event::Bytes;
            }
            Input::Eof => return Event::Eof,
            Input::Tick if now >= deadline => {
                self.fail(EndReason::ConnectTimeout, format!("no {awaited} from the proxy in time"));
            }
            Input::Tick => {}
        }
        Event::None
    }

    /// The next output, until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to hand in [`Input::Tick`]; `None` once the handshake is over.
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether it has ended, well or not.
    pub const fn is_over(&self) -> bool {
        self.deadline.is_none()
    }

    /// How many bytes of the initial data have been given out.
    pub const fn initial_data_sent(&self) -> usize {
        self.initial_data_sent
    }

    /// Gives out bytes for the proxy.
    pub fn send(&mut self, bytes: Vec<u8>) {
        self.outputs.push_back(Output::Send(bytes));
    }

    /// Gives out `message` with initial data behind it, in one write; nothing if both are empty.
    pub fn send_with(&mut self, mut message: Vec<u8>, initial_data: &[u8]) {
        message.extend_from_slice(initial_data);
        self.initial_data_sent += initial_data.len();
        if !message.is_empty() {
            self.send(message);
        }
    }

    /// Ends well.
    pub fn connected(&mut self, connected: Connected) {
        self.end(Output::Connected(Box::new(connected)));
    }

    /// Ends with a failure.
    pub fn fail(&mut self, reason: EndReason, detail: impl Into<String>) {
        self.end(Output::Failed { reason, detail: detail.into() });
    }

    fn end(&mut self, output: Output) {
        self.deadline = None;
        self.buffer = Vec::new();
        self.outputs.push_back(output);
    }
}
