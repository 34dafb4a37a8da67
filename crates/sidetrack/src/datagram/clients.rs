//! The clients' side: which datagrams are taken, where each goes, and how answers are written.

use super::ROUNDS;
use super::association::{Association, Associations, LISTENER};
use super::captured::Captured;
use crate::carry::datagrams::with_scratch;
use crate::intercept::{Passed, Taken};
use crate::reactor::UdpSocket;
use sidetrack_core::association::{Dropped, Id, Input, MappingId};
use sidetrack_core::flow::Destination;
use sidetrack_core::socks::v5::udp::{Datagram, HeaderError, put_header};
use sidetrack_core::socks::v6::{UdpAssociation, Way, begin_datagram, end_datagram};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt;
use sidetrack_sys::udp;
use sidetrack_sys::udp::batch::{Batch, Target};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::task::Context;

/// Who sends to the socket, and what.
#[derive(Debug)]
pub(super) enum Clients {
    /// Any client sends payload for this server.
    Asking {
        /// The server.
        server: Destination,
    },
    /// Any client sends payload for any destination, which the kernel tells.
    Captured(Captured),
    /// One SOCKS client sends each datagram with its destination before it, by UDP or, in version 6, in its connection.
    Associated(Associated),
}

/// A client that has asked for UDP ASSOCIATE.
#[derive(Debug)]
pub(super) struct Associated {
    /// Its address: that of its connection.
    pub ip: IpAddr,
    /// Its port. `None`: that of its first datagram.
    pub port: Option<u16>,
    /// The address of the port that clients share, if they do.
    pub local: Option<SocketAddr>,
    /// Where answers go, from its first datagram on.
    pub target: Option<Target>,
    /// The user that it has authenticated as.
    pub user: Option<String>,
    /// The association of version 6. `None`: the client speaks version 5.
    pub v6: Option<UdpAssociation>,
    /// What waits to be sent in the client's connection (version 6).
    pub in_connection: Vec<u8>,
    /// Its place at a port that clients share.
    pub seat: Option<Taken>,
}

/// Most bytes of datagrams that wait for the client's connection.
const IN_CONNECTION_MAX: usize = 256 * 1024;

impl Associated {
    /// Whether a datagram from this address is the client's. RFC 1928 Sec. 6: others must be dropped.
    fn admits(&self, from: SocketAddr) -> bool {
        from.ip() == self.ip && self.port.is_none_or(|port| port == from.port())
    }

    /// Takes the header off a datagram. `None`: it only opens the way for answers.
    fn taken_off<'a>(
        &mut self,
        way: Way,
        datagram: &'a [u8],
    ) -> Result<Option<(Destination, &'a [u8])>, Dropped> {
        let Some(association) = &mut self.v6 else {
            let Datagram { remote, payload } = Datagram::parse(datagram).map_err(malformed)?;
            return Ok(Some((remote, payload)));
        };
        let taken = association.take(way, datagram)?;
        if taken.is_first {
            self.in_connection.extend_from_slice(&association.confirm());
        }
        Ok(taken.remote.map(|remote| (remote, taken.payload)))
    }
}

/// Why an answer has not left.
enum Unsent {
    Dropped(Dropped),
    Error(io::Error),
}

impl Associated {
    /// Sends a datagram of this server behind its header, which is written into `scratch`.
    fn answer(
        &mut self,
        socket: &UdpSocket,
        (scratch, client): (&mut Vec<u8>, &Target),
        from: &Destination,
        payload: &[u8],
    ) -> Result<(), Unsent> {
        let way = self.v6.as_ref().and_then(UdpAssociation::way);
        let is_whole = match &self.v6 {
            Some(association) => {
                let start = begin_datagram(scratch, association.id(), from);
                scratch.extend_from_slice(payload);
                end_datagram(scratch, start)
            }
            None => {
                put_header(scratch, from);
                scratch.extend_from_slice(payload);
                true
            }
        };
        match way {
            _ if !is_whole => Err(Unsent::Dropped(Dropped::TooLong)),
            Some(Way::Connection) if self.in_connection.len() + scratch.len() > IN_CONNECTION_MAX => {
                Err(Unsent::Dropped(Dropped::Unsent))
            }
            Some(Way::Connection) => {
                self.in_connection.extend_from_slice(scratch);
                Ok(())
            }
            Some(Way::Datagrams(_)) | None => socket.send_one(scratch, Some(client)).map_err(Unsent::Error),
        }
    }
}

impl Associations {
    /// Reads from the clients' socket.
    pub(super) fn read_clients(&mut self, batch: &mut Batch) {
        for _ in 0..ROUNDS {
            match self.socket.receive(batch) {
                Ok(count) => self.take_from_clients(batch, count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP error about an answer: the socket cannot say which client it is about.
                Err(_) => {}
            }
        }
        if self.socket.poll_read_ready(&mut Context::from_waker(&self.waker)).is_ready() {
            self.ready.notify(LISTENER);
        }
    }

    /// Passes on the messages in the batch. Neighbours of one association leave in one call.
    fn take_from_clients(&mut self, batch: &Batch, count: usize) {
        let now = self.worker.clock.now();
        let mut run: Option<(Id, usize)> = None;
        for at in 0..count {
            let forwards = match &self.clients {
                Clients::Asking { .. } => self.take_from_client(batch, now, at),
                Clients::Captured(_) => {
                    self.take_captured(batch, now, at);
                    None
                }
                Clients::Associated(_) => {
                    self.take_from_associated(batch, now, at);
                    None
                }
            };
            if let Some((id, first)) = run.filter(|(id, _)| Some(*id) != forwards) {
                self.forward(id, batch, first..at);
                run = None;
            }
            run = run.or(forwards.map(|id| (id, at)));
        }
        if let Some((id, first)) = run {
            self.forward(id, batch, first..count);
        }
    }

    /// Asks the table about each datagram of a message. Returns the association whose server gets the whole message.
    fn take_from_client(&mut self, batch: &Batch, now: Instant, at: usize) -> Option<Id> {
        let (Some(from), to) = batch.addresses(at) else { return None };
        let client = self.listening.client(sockopt::canonical(from));
        let target = Target { to: from, from: to };
        let mut all = None;
        for (number, payload) in batch.datagrams(at).enumerate() {
            let Clients::Asking { server } = &self.clients else { return None };
            let input = Input::FromClient { client, destination: server, bytes: payload.len() };
            self.table.handle(now, input);
            let passed = self.outputs(Some(payload), target);
            // The first one may be held while the others already pass.
            match (passed, all) {
                (Some(id), None) if number == 0 && self.sends_trains(id) => all = Some(id),
                (Some(id), None) => self.forward_one(id, payload),
                _ => {}
            }
        }
        all
    }

    /// Takes the datagrams of a message whose sender has to be the client of an association.
    fn take_from_associated(&mut self, batch: &Batch, now: Instant, at: usize) {
        let (Some(from), to) = batch.addresses(at) else { return };
        let (client, target) = (sockopt::canonical(from), Target { to: from, from: to });
        for datagram in batch.datagrams(at) {
            let Clients::Associated(associated) = &mut self.clients else { return };
            if !associated.admits(client) {
                // It came before the socket was connected.
                let passed = associated.seat.as_ref().map(|seat| seat.pass(client, datagram));
                if passed != Some(Passed::Yes) {
                    self.dropped[Dropped::Stranger as usize] += 1;
                }
                continue;
            }
            let taken = associated.taken_off(Way::Datagrams(client), datagram);
            if taken.is_ok() {
                associated.port = Some(client.port());
                associated.target = Some(target);
            }
            self.pass_associated(now, (client, target), taken);
        }
    }

    /// Takes a datagram of the client that has come to the port that clients share.
    pub(super) fn take_from_shared(&mut self, client: SocketAddr, datagram: &[u8]) {
        let (now, target) = (self.worker.clock.now(), Target { to: client, from: None });
        let Clients::Associated(associated) = &mut self.clients else { return };
        if !associated.admits(client) {
            self.dropped[Dropped::Stranger as usize] += 1;
            return;
        }
        let taken = associated.taken_off(Way::Datagrams(client), datagram);
        if taken.is_ok() {
            associated.port = Some(client.port());
            associated.target = Some(target);
        }
        self.pass_associated(now, (client, target), taken);
    }

    /// Takes a datagram that has come in the client's connection (version 6).
    pub(super) fn take_from_connection(&mut self, client: SocketAddr, message: &[u8]) {
        let now = self.worker.clock.now();
        let target = Target { to: client, from: None };
        let Clients::Associated(associated) = &mut self.clients else { return };
        let taken = associated.taken_off(Way::Connection, message);
        if taken.is_ok() {
            associated.target = Some(target);
        }
        self.pass_associated(now, (client, target), taken);
    }

    /// Passes on a datagram whose header is taken off.
    fn pass_associated(
        &mut self,
        now: Instant,
        (client, target): (SocketAddr, Target),
        taken: Result<Option<(Destination, &[u8])>, Dropped>,
    ) {
        let (destination, payload) = match taken {
            Ok(Some(taken)) => taken,
            Ok(None) => return,
            Err(why) => return self.dropped[why as usize] += 1,
        };
        let input = Input::FromClient { client, destination: &destination, bytes: payload.len() };
        self.table.handle(now, input);
        if let Some(id) = self.outputs(Some(payload), target) {
            self.forward_one(id, payload);
            self.count(id);
        }
    }

    /// Returns where the datagrams go that come on a path, which is for one mapping, and maybe for one association only.
    pub(super) fn client_of(&self, only: Option<Id>, mapping: Option<MappingId>) -> Option<Target> {
        match (&self.clients, only) {
            (Clients::Asking { .. } | Clients::Captured(_), Some(id)) => Some(self.find(id)?.client),
            (Clients::Asking { .. }, None) => None,
            (Clients::Captured(_), None) => Some(Target { to: self.table.client_of(mapping?)?, from: None }),
            (Clients::Associated(associated), _) => associated.target,
        }
    }

    /// Returns the sender that the client of an association expects, if this server answers.
    pub(super) fn expected(&self, association: &Association, server: Option<SocketAddr>) -> Destination {
        let asked = match &self.clients {
            // It has asked this address, and a rule may have sent its datagrams elsewhere.
            Clients::Captured(_) | Clients::Associated(_) => association.asked,
            Clients::Asking { .. } => None,
        };
        // A sender without an address is the destination that the client has named.
        asked.or(server).map_or_else(|| association.flow.orig_dst.clone(), Destination::from)
    }

    /// Sends a datagram of this server to the client.
    pub(super) fn deliver(&mut self, client: &Target, from: &Destination, payload: &[u8]) {
        let sent = match &mut self.clients {
            Clients::Asking { .. } => self.socket.send_one(payload, Some(client)).map_err(Unsent::Error),
            Clients::Captured(captured) => match from.socket_addr() {
                Some(from) => captured.answers.send(from, client.to, payload).map_err(Unsent::Error),
                None => Err(Unsent::Error(io::ErrorKind::AddrNotAvailable.into())),
            },
            Clients::Associated(associated) => {
                with_scratch(|scratch, _| associated.answer(&self.socket, (scratch, client), from, payload))
            }
        };
        match sent {
            Ok(()) => {}
            Err(Unsent::Dropped(why)) => self.dropped[why as usize] += 1,
            Err(Unsent::Error(error)) => {
                let why = if udp::is_too_long(&error) { Dropped::TooLong } else { Dropped::Unsent };
                self.dropped[why as usize] += 1;
            }
        }
    }
}

const fn malformed(error: HeaderError) -> Dropped {
    match error {
        HeaderError::Fragment(_) => Dropped::Fragment,
        HeaderError::Short | HeaderError::Address(_) => Dropped::Malformed,
    }
}
