//! Clients whose datagrams were captured on their way to any destination: each answer has to leave from the address that the
//! client has asked, which is another host's.

use super::association::Associations;
use sidetrack_core::association::Input;
use sidetrack_core::flow::Destination;
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::batch::{Batch, Target, send_one};
use sidetrack_sys::udp::bind_foreign;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

/// Most sockets for answers of one listening socket. Each is bound to one address that clients have asked.
const ANSWERS_MAX: usize = 256;

/// The state of captured clients.
#[derive(Debug)]
pub(super) struct Captured {
    /// Sends answers.
    pub answers: Answers,
    /// The destination of the datagram that is looked at now.
    pub asked: Option<SocketAddr>,
}

/// Sockets that send from addresses of other hosts. All clients that have asked an address share its socket. If there are too
/// many, the one that is unused for longest is closed.
#[derive(Debug)]
pub(super) struct Answers {
    mark: Option<u32>,
    sockets: BTreeMap<SocketAddr, (OwnedFd, u64)>,
    /// The addresses in the order of their last use.
    order: BTreeMap<u64, SocketAddr>,
    uses: u64,
}

impl Captured {
    /// Makes the state. `mark`: that of our own packets, which no rule captures.
    pub(super) const fn new(mark: Option<u32>) -> Self {
        let answers = Answers { mark, sockets: BTreeMap::new(), order: BTreeMap::new(), uses: 0 };
        Self { answers, asked: None }
    }
}

impl Answers {
    /// Sends a datagram to a client, from an address that it has asked.
    ///
    /// # Errors
    /// The system's error; the datagram is lost then.
    pub(super) fn send(&mut self, from: SocketAddr, client: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.uses += 1;
        if !self.sockets.contains_key(&from) {
            self.open(from)?;
        }
        let Some((socket, used)) = self.sockets.get_mut(&from) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        self.order.remove(&std::mem::replace(used, self.uses));
        self.order.insert(self.uses, from);
        send_one(socket, payload, Some(&Target { to: client, from: None }))
    }

    fn open(&mut self, from: SocketAddr) -> io::Result<()> {
        let socket = bind_foreign(from)?;
        if let Some(mark) = self.mark {
            sockopt::set_mark(&socket, mark)?;
        }
        while self.sockets.len() >= ANSWERS_MAX
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.sockets.remove(&oldest);
        }
        self.sockets.insert(from, (socket.into(), self.uses));
        self.order.insert(self.uses, from);
        Ok(())
    }
}

impl Associations {
    /// Takes the datagrams of a message to any destination.
    pub(super) fn take_captured(&mut self, batch: &Batch, now: Instant, at: usize) {
        let ((Some(from), _), Some(asked)) = (batch.addresses(at), batch.original(at)) else { return };
        let client = self.listening.client(sockopt::canonical(from));
        let (destination, target) = (Destination::from(asked), Target { to: from, from: Some(asked.ip()) });
        if let super::clients::Clients::Captured(captured) = &mut self.clients {
            captured.asked = Some(asked);
        }
        let mut passed = None;
        for payload in batch.datagrams(at) {
            let input = Input::FromClient { client, destination: &destination, bytes: payload.len() };
            self.table.handle(now, input);
            if let Some(id) = self.outputs(Some(payload), target) {
                self.forward_one(id, payload);
                passed = Some(id);
            }
        }
        if let Some(id) = passed {
            self.count(id);
        }
    }
}
