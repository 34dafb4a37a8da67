//! Associations go on in another process of this node: their sockets, times and counts.
//!
//! ```text
//! OPEN --the process rests, and the way to the server is direct--> waits ([`Resting`]): no datagram is read
//! waits --the clients' socket is served, here or in the other process--> OPEN there
//! ```
//!
//! Datagrams that come meanwhile wait in the sockets. Associations with hops or functions, and those that are not open, end.

use super::association::{Association, Associations, PATH, Server};
use super::clients::Clients;
use super::path::{State, Users};
use crate::carry::Gate;
use crate::carry::datagrams::{Direct, Remote};
use crate::reactor::UdpSocket;
use crate::session::Entry;
use crate::worker::{Admission, MovedDatagrams};
use sidetrack_core::association::{Id, Input};
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::EndReason;
use sidetrack_core::policy::Action;
use sidetrack_sys::sockopt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

impl Associations {
    /// Takes out the associations that can go on elsewhere. The others stay.
    pub(super) fn take_apart(&mut self) -> Vec<MovedDatagrams> {
        let ids: Vec<_> = self.slots.iter().flatten().map(|association| association.id).collect();
        ids.into_iter().filter_map(|id| self.take_one(id)).collect()
    }

    fn take_one(&mut self, id: Id) -> Option<MovedDatagrams> {
        if matches!(self.clients, Clients::Associated(_)) {
            return None;
        }
        self.count(id);
        let again = self.table.again(self.worker.clock.now(), id)?;
        let socket_cookie = sockopt::cookie(&self.socket).ok()?;
        let Self { slots, paths, .. } = self;
        let place = slots.get_mut(id.slot as usize)?;
        let association = place.as_deref().filter(|association| association.id == id)?;
        if association.functions.is_some() || association.entry.live().ending().is_some() {
            return None;
        }
        let decided = association.entry.live().decided()?;
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().ok();
        let (is_own, sockets): (bool, Vec<OwnedFd>) = match &association.server {
            Server::Own(socket) => (true, vec![copy(socket.as_fd())?]),
            Server::Path(path, Remote::Address(_)) => match paths.get(*path).map(|path| &path.state) {
                Some(State::Open(open)) => {
                    let sockets = open.sockets()?;
                    (false, sockets.into_iter().map(copy).collect::<Option<_>>()?)
                }
                _ => return None,
            },
            Server::Path(..) | Server::None => return None,
        };
        let Association { entry, client, asked, .. } = *place.take()?;
        let (id, spared, note) = entry.leaves();
        Some(MovedDatagrams {
            socket_cookie,
            id,
            spared,
            decided,
            note,
            again,
            client,
            asked,
            is_own,
            sockets,
        })
    }

    /// Goes on with an association that has waited.
    pub(super) fn adopt(&mut self, moved: MovedDatagrams) {
        let MovedDatagrams { id, spared, decided, note, again, client, asked, is_own, sockets, .. } = moved;
        let mut entry = Entry::again(&self.worker, (id, &spared), (*decided).clone(), note);
        let now = self.worker.clock.now();
        let Some((id, mapping)) = self.table.go_on(now, &again) else {
            return entry.end(
                EndReason::Limit,
                Some("the client has begun it again, or there is no room".to_owned()),
            );
        };
        let (flow, from, remote) = (decided.flow.clone(), again.from, again.remote);
        let waker = self.ready.waker(id.slot);
        entry.live().set_waker(&waker);
        let peer = flow.client.ip();
        // It was admitted once, so it stays also without a place.
        let admission = if is_own {
            Admission::of_datagrams(&self.worker, peer, false).ok()
        } else {
            Admission::of_datagrams_beside(&self.worker, peer).ok()
        };
        let association = Association {
            id,
            mapping,
            entry,
            flow,
            client,
            asked,
            from,
            server: Server::None,
            functions: None,
            held: Vec::new(),
            waker,
            admission,
        };
        let slot = id.slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        self.slots[slot] = Some(Box::new(association));
        let server = match is_own {
            true => sockets.into_iter().next().and_then(|fd| UdpSocket::new(fd.into()).ok()).map(Server::Own),
            false => self.direct(id, remote, sockets),
        };
        let has_way = server.is_some();
        if let (Some(server), Some(association)) = (server, self.find_mut(id)) {
            association.server = server;
        }
        if !has_way {
            self.table.handle(now, Input::End(id, EndReason::Internal));
        }
        if let Some(why) = self.denied_now(id) {
            if let Some(association) = self.find_mut(id) {
                association.entry.note(format!("the configuration has changed: {why}"));
            }
            self.table.handle(now, Input::End(id, EndReason::PolicyDenied));
        }
        self.finish();
        self.count(id);
        self.ready.notify(id.slot);
    }

    /// The path of the client of an association to all its servers, with these sockets if it is new.
    fn direct(&mut self, id: Id, remote: Option<SocketAddr>, sockets: Vec<OwnedFd>) -> Option<Server> {
        let association = self.find(id)?;
        let decided = association.entry.live().decided()?;
        let Some(Action::Carry(carry)) = decided.action() else { return None };
        let config = self.worker.config();
        let peer = association.flow.client.ip();
        let gate = Gate {
            policy: &config.policy,
            flow: &association.flow,
            carry,
            resource: None,
            peer,
            is_configured: false,
        };
        let to = Remote::Address(gate.admit(None, remote?).ok()?);
        let mapping = self.mapping_of_path(association.mapping);
        let path = self.paths.shared(&Carrier::Direct, mapping).or_else(|| {
            let direct = Direct::with(self.worker.dialing(), sockets).ok()?;
            let ready = self.ready.clone();
            let waker = |index: u32| ready.waker(index | PATH);
            let users = Users { mapping, only: None };
            Some(self.paths.add(Carrier::Direct, users, State::Open(Box::new(direct)), waker))
        })?;
        self.ready.notify(path.index | PATH);
        Some(Server::Path(path, to))
    }
}
