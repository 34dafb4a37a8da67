//! The servers' side: datagrams to them, and what comes back.

use super::ROUNDS;
use super::association::{Association, Associations, Server};
use super::path::{PathId, State, Users};
use crate::carry::Failure;
use crate::carry::datagrams::{self, Came, Lost, Remote};
use sidetrack_core::association::{Dropped, Id, Input};
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::icmp::Unreachable;
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp::batch::Batch;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::task::{Context, Poll};

impl Associations {
    /// Whether the server of this association takes whole messages of a batch.
    pub(super) fn sends_trains(&self, id: Id) -> bool {
        let is_plain = |association: &Association| {
            matches!(association.server, Server::Own(_)) && association.functions.is_none()
        };
        self.find(id).is_some_and(is_plain)
    }

    /// Whether a datagram of this side passes the functions of its association. Returns the association if so. A datagram of the
    /// client with the placeholder of a secret ends the association.
    pub(super) fn passed(&mut self, id: Id, from: Side, payload: Option<&[u8]>) -> Option<Id> {
        let now = self.worker.clock.now();
        if let (Side::Client, Some(secrets), Some(payload)) = (from, self.listening.secrets(), payload)
            && let Err(misplaced) = secrets.find(payload)
        {
            let why = secrets.why(misplaced, None);
            self.tell_of(id, self.refusal(Some(EndReason::SecretRefused)), payload.len());
            self.find_mut(id)?.entry.note(why);
            self.table.handle(now, Input::End(id, EndReason::SecretRefused));
            return None;
        }
        if let Some(functions) = self.find_mut(id).and_then(|association| association.functions.as_mut())
            && !functions.passes(now, from, payload.map_or(0, <[u8]>::len))
        {
            self.dropped[Dropped::Limited as usize] += 1;
            return None;
        }
        Some(id)
    }

    /// Sends messages to an association's server.
    pub(super) fn forward(&mut self, id: Id, batch: &Batch, range: Range<usize>) {
        let Some(Server::Own(socket)) = self.find(id).map(|association| &association.server) else { return };
        let sent = socket.send(batch, range, None);
        self.dropped[Dropped::Unsent as usize] += sent.lost as u64;
        if let Some(error) = sent.error {
            self.failed(id, &error);
        }
        self.count(id);
    }

    /// Sends one datagram to an association's server.
    pub(super) fn forward_one(&mut self, id: Id, payload: &[u8]) {
        let Self { slots, paths, .. } = self;
        let association = slots.get(id.slot as usize).and_then(Option::as_ref).filter(|it| it.id == id);
        match association.map(|association| &association.server) {
            Some(Server::Own(socket)) => {
                if let Err(error) = socket.send_one(payload, None) {
                    self.failed(id, &error);
                }
            }
            Some(Server::Path(path, remote)) => {
                let sent = match paths.get(*path).map(|path| &mut path.state) {
                    Some(State::Open(open)) => open.send(remote, payload),
                    _ => Ok(()),
                };
                if let Err(Lost { why, failure, fits_bytes }) = sent {
                    self.dropped[why as usize] += 1;
                    if let Some(fits_bytes) = fits_bytes.filter(|_| why == Dropped::TooLong) {
                        self.tell_too_long(id, fits_bytes, payload.len());
                    }
                    self.table.handle(self.worker.clock.now(), Input::Error(id, failure.reason));
                }
            }
            Some(Server::None) | None => {}
        }
    }

    /// Looks at an association that was woken: its own socket has received, or another thread ends it.
    pub(super) fn look_at(&mut self, slot: u32, batch: &mut Batch) {
        let now = self.worker.clock.now();
        let Some(association) = self.slots.get(slot as usize).and_then(Option::as_ref) else { return };
        let id = association.id;
        if let Some(reason) = association.entry.live().ending() {
            self.table.handle(now, Input::End(id, reason));
            return self.finish();
        }
        association.entry.live().set_waker(&association.waker);
        for _ in 0..ROUNDS {
            let Some(Server::Own(socket)) = self.find(id).map(|association| &association.server) else {
                return;
            };
            match socket.receive(batch) {
                Ok(count) => self.take_from_server(now, id, batch, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => self.failed(id, &error),
            }
        }
        let Some(association) = self.find(id) else { return };
        let cx = &mut Context::from_waker(&association.waker);
        if matches!(&association.server, Server::Own(socket) if socket.poll_read_ready(cx).is_ready()) {
            self.ready.notify(slot);
        }
    }

    /// Passes the messages of an association's own socket to the client.
    fn take_from_server(&mut self, now: Instant, id: Id, batch: &Batch, count: usize) {
        let Some(association) = self.find(id) else { return };
        let (mapping, target) = (association.mapping, association.client);
        let is_plain = association.functions.is_none();
        association.entry.live().first_byte(association.entry.live().age());
        for at in 0..count {
            let Some(remote) = batch.addresses(at).0.map(sockopt::canonical) else { continue };
            let datagrams = batch.datagrams(at).count();
            let mut passed = 0;
            for payload in batch.datagrams(at) {
                self.table.handle(now, Input::FromServer { mapping, remote, bytes: payload.len() });
                let passes = self.outputs(Some(payload), target).is_some();
                passed += usize::from(passes);
                if passes && !is_plain {
                    self.deliver(&target, &remote.into(), payload);
                }
            }
            // The state of an association does not change between the datagrams of one message.
            if is_plain && passed == datagrams {
                let sent = self.socket.send(batch, at..at + 1, Some(&target));
                self.dropped[Dropped::Unsent as usize] += sent.lost as u64;
            }
        }
        self.count(id);
    }

    /// Looks at a path that was woken.
    pub(super) fn look_at_path(&mut self, index: u32, batch: &mut Batch) {
        let Some((id, path)) = self.paths.at(index) else { return };
        let (users, waker) = (path.users, path.waker.clone());
        if !matches!(path.state, State::Open(_)) {
            return;
        }
        // The path is taken out meanwhile, because what it receives may begin and end associations that use it.
        let State::Open(mut open) = std::mem::replace(&mut path.state, State::Looked) else { return };
        let mut cx = Context::from_waker(&waker);
        let polled = open.poll_receive(&mut cx, batch, &mut |came| self.take_from_path(id, users, came));
        if let Some(path) = self.paths.get(id) {
            path.state = State::Open(open);
        }
        match polled {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => waker.wake(),
            Poll::Ready(Err(failure)) => self.path_is_over(id, &failure),
        }
    }

    fn take_from_path(&mut self, path: PathId, users: Users, came: Came<'_>) {
        let now = self.worker.clock.now();
        let (from, payload) = match came {
            Came::Datagram { from, payload } => (from, payload),
            Came::Error { to, failure, said } => return self.error_on_path(path, to, &failure, said),
            Came::Refused { to, failure } => return self.refused_on_path(path, to, &failure),
            Came::Dropped(why) => return self.dropped[why as usize] += 1,
        };
        let bytes = payload.len();
        let (only, mapping) = (users.only, users.mapping.or(self.mapping));
        let input = match (only, mapping) {
            (Some(id), _) => Input::FromServerOf { id, bytes },
            (None, Some(mapping)) => match from {
                Some(remote) => Input::FromServer { mapping, remote, bytes },
                None => return self.dropped[Dropped::Unknown as usize] += 1,
            },
            (None, None) => return self.dropped[Dropped::Unknown as usize] += 1,
        };
        self.table.handle(now, input);
        let Some(target) = self.client_of(only, mapping) else { return };
        if let Some(id) = self.outputs(Some(payload), target)
            && let Some(association) = self.find(id)
        {
            association.entry.live().first_byte(association.entry.live().age());
            let from = self.expected(association, from);
            let target = if users.mapping.is_some() { association.client } else { target };
            self.deliver(&target, &from, payload);
            self.count(id);
        }
    }

    /// An error about datagrams on a path: mostly an ICMP error, which ends nothing (RFC 4787 REQ-10).
    fn error_on_path(
        &mut self,
        path: PathId,
        to: Option<SocketAddr>,
        failure: &Failure,
        said: Option<Unreachable>,
    ) {
        let now = self.worker.clock.now();
        for association in self.slots.iter().flatten() {
            let Server::Path(its, remote) = &association.server else { continue };
            if *its == path && (to.is_none() || remote.address() == to) {
                self.table.handle(now, Input::Error(association.id, failure.reason));
                if let Some(said) = said.or_else(|| Unreachable::of_reason(failure.reason)) {
                    self.tell_of(association.id, said, 0);
                }
            }
        }
    }

    /// The far end of a path refuses a destination: its associations end.
    fn refused_on_path(&mut self, path: PathId, to: Option<SocketAddr>, failure: &Failure) {
        self.end_on_path(path, failure, |remote| to.is_none() || remote.address() == to);
    }

    /// A path is over: its associations end. The next datagram begins another one, on another path.
    fn path_is_over(&mut self, path: PathId, failure: &Failure) {
        self.paths.remove(path);
        self.end_on_path(path, failure, |_| true);
    }

    /// Ends the associations of a path with these destinations.
    fn end_on_path(&mut self, path: PathId, failure: &Failure, is_meant: impl Fn(&Remote) -> bool) {
        let now = self.worker.clock.now();
        let mut ids = Vec::new();
        for association in self.slots.iter_mut().flatten() {
            if matches!(&association.server, Server::Path(its, to) if *its == path && is_meant(to)) {
                association.entry.note(failure.detail.clone());
                ids.push(association.id);
            }
        }
        for id in ids {
            self.table.handle(now, Input::End(id, failure.reason));
        }
        self.finish();
    }

    /// An error of the association's own socket. Mostly an ICMP error, which ends nothing (RFC 4787 REQ-10).
    pub(super) fn failed(&mut self, id: Id, error: &io::Error) {
        let Some(association) = self.find(id) else { return };
        let to = association.flow.orig_dst.socket_addr().unwrap_or(self.listening.address);
        let reason = datagrams::failure(error, to).reason;
        self.table.handle(self.worker.clock.now(), Input::Error(id, reason));
    }

    /// Ends an association whose path is its own, with the path.
    pub(super) fn leave_path(&mut self, id: Id, server: &Server) {
        if let Server::Path(path, _) = server
            && self.paths.get(*path).is_some_and(|path| path.users.only == Some(id))
        {
            self.paths.remove(*path);
        }
    }

    /// Ends every association that waits for this path.
    pub(super) fn refuse_waiting(&mut self, path: PathId, failure: &Failure) {
        let Some(path) = self.paths.remove(path) else { return };
        let State::Opening(waiting) = path.state else { return };
        for waiting in waiting {
            if self.find(waiting.id).is_some() {
                self.refuse(waiting.id, Failure::new(failure.reason, failure.detail.clone()));
            }
        }
    }
}
