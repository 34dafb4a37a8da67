//! A payload function for the packet engine, in fewer than 100 lines. It resets a connection whose client sends a
//! forbidden word, however the network cuts it into segments, and it writes what the server says in capitals.
//!
//! `cargo run -p sidetrack-core --example engine_function` shows what it decides about pieces of two connections. The
//! test `crates/core/tests/engine/example.rs` runs it in the engine, over simulated links.

use sidetrack_core::engine::{Callbacks, ConnectionId, Hop, Opening, Payload, Selection, Target};
use sidetrack_core::flow::{EndReason, Side};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// The function, with what it remembers of each connection.
pub(crate) struct Guard {
    server: Target,
    word: Vec<u8>,
    /// The client's last bytes, one fewer than the word has: the word may continue in the next segment.
    last: BTreeMap<ConnectionId, Vec<u8>>,
}

impl Guard {
    /// Guards this server against a word.
    pub(crate) fn new(server: SocketAddr, hop: Hop, word: &[u8]) -> Self {
        // Without these two, the engine would forward payload without asking.
        let server = Target { inspect_client: true, inspect_server: true, ..Target::new(server, hop) };
        Self { server, word: word.to_vec(), last: BTreeMap::new() }
    }

    /// Forgets a connection that has ended: the engine's record names it.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        self.last.remove(&id);
    }

    fn is_forbidden(&mut self, id: ConnectionId, bytes: &[u8]) -> bool {
        let seen = self.last.entry(id).or_default();
        seen.extend_from_slice(bytes);
        let found = seen.windows(self.word.len()).any(|part| part == self.word);
        let kept = seen.len().min(self.word.len().saturating_sub(1));
        seen.drain(..seen.len() - kept);
        found
    }
}

impl Callbacks for Guard {
    fn select(&mut self, _: &Opening<'_>) -> Selection {
        Selection::Server(self.server)
    }

    // Each byte comes once and in order, also if the network loses, repeats or reorders packets. The engine keeps what was
    // changed until it is acknowledged, and translates sequence numbers.
    fn payload(&mut self, id: ConnectionId, from: Side, bytes: &[u8]) -> Payload {
        match from {
            Side::Client if self.is_forbidden(id, bytes) => Payload::Reset(EndReason::PolicyDenied),
            Side::Client => Payload::Keep,
            Side::Server => Payload::Replace(bytes.to_ascii_uppercase()),
        }
    }
}

fn main() {
    let mut guard = Guard::new(([192, 0, 2, 1], 80).into(), Hop(0), b"secret");
    for (id, from, piece) in [
        (1, Side::Client, "GET /sec"),
        (2, Side::Client, "GET /other"),
        (2, Side::Server, "hello"),
        (1, Side::Client, "ret"),
    ] {
        let decision = guard.payload(ConnectionId(id), from, piece.as_bytes());
        println!("connection {id}, {from:?} says {piece:?}: {decision:?}");
    }
    guard.forget(ConnectionId(1));
}
