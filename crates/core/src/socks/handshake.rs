//! The common part of both client machines: unread bytes, queued outputs, the deadline, and the end of the handshake.

use super::ReplyCode;
use super::client::{Connected, Input, Output};
use crate::flow::EndReason;
use crate::time::Instant;
use std::collections::VecDeque;

/// What an input means while the handshake is not over.
pub(super) enum Event {
    /// There are new bytes in [`Handshake::buffer`].
    Bytes,
    /// No more bytes will come.
    Eof,
    /// Nothing to do.
    None,
}

/// The common state of a client handshake.
#[derive(Debug)]
pub(super) struct Handshake {
    /// Bytes of the proxy that are not parsed yet.
    pub buffer: Vec<u8>,
    outputs: VecDeque<Output>,
    /// `None` once the handshake is over.
    deadline: Option<Instant>,
    initial_data_sent: usize,
    refusal: Option<ReplyCode>,
}

impl Handshake {
    /// Makes a handshake that must be over by `deadline`.
    pub(super) fn new(deadline: Instant) -> Self {
        Self {
            buffer: Vec::new(),
            outputs: VecDeque::new(),
            deadline: Some(deadline),
            initial_data_sent: 0,
            refusal: None,
        }
    }

    /// Handles an input. If the deadline has passed, the handshake fails with a detail that names what was `awaited`.
    pub(super) fn handle(&mut self, now: Instant, input: Input<'_>, awaited: &str) -> Event {
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

    /// Returns the next output, or `None`.
    pub(super) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to pass [`Input::Tick`]. `None` once the handshake is over.
    pub(super) const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether the handshake has ended, successfully or not.
    pub(super) const fn is_over(&self) -> bool {
        self.deadline.is_none()
    }

    /// Returns how many bytes of the initial data were returned for sending.
    pub(super) const fn initial_data_sent(&self) -> usize {
        self.initial_data_sent
    }

    /// Queues bytes for the proxy.
    pub(super) fn send(&mut self, bytes: Vec<u8>) {
        self.outputs.push_back(Output::Send(bytes));
    }

    /// Queues `message` with the initial data behind it, in one write. Does nothing if both are empty.
    pub(super) fn send_with(&mut self, mut message: Vec<u8>, initial_data: &[u8]) {
        message.extend_from_slice(initial_data);
        self.initial_data_sent += initial_data.len();
        if !message.is_empty() {
            self.send(message);
        }
    }

    /// Ends the handshake successfully.
    pub(super) fn connected(&mut self, connected: Connected) {
        self.end(Output::Connected(Box::new(connected)));
    }

    /// Ends the handshake with a failure.
    pub(super) fn fail(&mut self, reason: EndReason, detail: impl Into<String>) {
        self.end(Output::Failed { reason, detail: detail.into() });
    }

    /// Ends the handshake because the proxy answered the request with this code.
    pub(super) fn refused(&mut self, code: ReplyCode, detail: String) {
        self.refusal = Some(code);
        self.fail(code.end_reason(), detail);
    }

    /// Returns the code with which the proxy refused the request.
    pub(super) const fn refusal(&self) -> Option<ReplyCode> {
        self.refusal
    }

    fn end(&mut self, output: Output) {
        self.deadline = None;
        self.buffer = Vec::new();
        self.outputs.push_back(output);
    }
}
