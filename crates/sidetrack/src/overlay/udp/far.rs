//! The node that delivers datagrams: decides about each association as about each connection that another node asks for,
//! and sends from one port for each path.

use super::fates::{Fate, Fates};
use super::{Outbox, To, Use, pump, send};
use crate::carry::{Admitted, Failure, datagrams, resolve};
use crate::overlay::deliver::{admitted, flow, refusal};
use crate::overlay::delivered::Delivered;
use crate::overlay::shared::Shared;
use sidetrack_core::flow::{EndReason, Flow, Protocol};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{FrameError, OpenUdp, RELAYED_MAX, Refusal, Relayed, SessionId};
use sidetrack_core::overlay::service::Service;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{sockopt, udp};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tokio::io::Interest;
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Time to resolve a destination.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// How often associations that are idle, or that an operator has ended, are looked for.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// All sessions that other nodes have opened for flows of UDP.
#[derive(Default)]
pub(super) struct Far {
    sessions: Mutex<BTreeMap<SessionId, Arc<Session>>>,
    /// The one of each node that sends with proofs.
    proven: Mutex<BTreeMap<NodeId, Arc<Session>>>,
    associations: Arc<AtomicUsize>,
}

/// A place among the associations of this node.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// A session of one node.
pub(super) struct Session {
    shared: Arc<Shared>,
    origin: To,
    name: String,
    /// To the task that writes the session.
    out: Outbox,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    all: BTreeMap<u32, Association>,
    paths: BTreeMap<u32, Weak<Path>>,
}

/// An open association.
struct Association {
    path: Arc<Path>,
    remote: SocketAddr,
    service: Service,
    record: Delivered,
    /// Datagrams to the server and from it.
    packets: (u64, u64),
    /// What happened to the datagrams for the server.
    fates: Fates,
    used: Instant,
    _place: Place,
}

/// The sockets of one client of another node, one for each address family, and which association each server belongs to.
#[derive(Default)]
struct Path {
    sockets: Mutex<Vec<(Arc<UdpSocket>, AbortHandle)>>,
    servers: Mutex<BTreeMap<SocketAddr, u32>>,
}

impl Drop for Path {
    fn drop(&mut self) {
        lock(&self.sockets).iter().for_each(|(_, task)| task.abort());
    }
}

impl Far {
    pub(super) fn came(&self, origin: NodeId, session_id: SessionId, message: &[u8]) -> bool {
        let session = lock(&self.sessions).get(&session_id).cloned();
        let session = session.filter(|session| session.origin.node == origin);
        let Some(session) = session.or_else(|| self.proven_of(origin, session_id)) else { return false };
        session.came(Relayed::parse(message));
        true
    }

    fn proven_of(&self, origin: NodeId, id: SessionId) -> Option<Arc<Session>> {
        lock(&self.proven).get(&origin).filter(|session| session.origin.session == id).cloned()
    }

    /// Notes what happened to a datagram of the association with this number.
    pub(super) fn note(&self, origin: NodeId, session_id: SessionId, number: u32, fate: Fate) {
        let session = lock(&self.sessions).get(&session_id).cloned();
        if let Some(session) = session.filter(|session| session.origin.node == origin)
            && let Some(association) = lock(&session.table).all.get_mut(&number)
        {
            association.fates.add(fate);
        }
    }

    /// Whether `origin` has begun this session with proofs.
    pub(super) fn knows(&self, origin: NodeId, id: SessionId) -> bool {
        self.proven_of(origin, id).is_some()
    }

    /// Returns this session with proofs. Makes it if `origin` has begun another one, which ends.
    pub(super) fn proven(&self, to: To, make: impl FnOnce() -> Arc<Session>) -> Arc<Session> {
        if let Some(session) = self.proven_of(to.node, to.session) {
            return session;
        }
        let session = make();
        let before = lock(&self.proven).insert(to.node, session.clone());
        if let Some(before) = before {
            before.close();
        }
        session
    }

    /// Takes a place, unless `max` are taken.
    fn place(&self, max: usize) -> Option<Place> {
        let place = Place(self.associations.clone());
        (self.associations.fetch_add(1, Relaxed) < max).then_some(place)
    }
}

/// The far end of a session: delivers datagrams until the session ends.
pub(in crate::overlay) async fn receive(
    shared: Arc<Shared>,
    origin: NodeId,
    id: SessionId,
    stream: TcpStream,
) {
    let (out, waiting) = Outbox::new();
    let to = To { node: origin, what: Use::Delivered, session: id };
    let session = Arc::new(Session::new(shared.clone(), to, out));
    lock(&shared.udp.far.sessions).insert(id, session.clone());
    let look = async {
        loop {
            tokio::time::sleep(LOOK).await;
            session.look(Instant::now());
        }
    };
    let moved = pump(stream, waiting, |message| match Relayed::parse(message) {
        Ok((number, Relayed::Open(open))) => {
            // Packets may use the service from now on, in both directions.
            shared.datagrams.paths.enter(origin, Use::Delivered, id, [open.service]);
            session.open(number, *open);
        }
        said => session.came(said),
    });
    tokio::select! {
        ended = moved => tracing::debug!(node = session.name, ?ended, "a session for flows of UDP ended"),
        () = look => {}
    }
    lock(&shared.udp.far.sessions).remove(&id);
    shared.datagrams.paths.leave(origin, Use::Delivered);
    session.close();
}

impl Session {
    pub(super) fn new(shared: Arc<Shared>, origin: To, out: Outbox) -> Self {
        let (name, table) = (shared.identity.name(origin.node), Mutex::default());
        Self { shared, origin, name, out, table }
    }

    /// Handles a message about an association that is open.
    fn came(&self, said: Result<(u32, Relayed<'_>), FrameError>) {
        match said {
            Ok((number, Relayed::Datagram(payload))) => self.forward(number, payload),
            Ok((number, Relayed::Close)) => self.end(number, EndReason::Ok, None),
            // An opening travels in the session, where it comes once and in order.
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(node = self.name, %error, "an unreadable message about a flow of UDP");
            }
        }
    }

    pub(super) fn answer(&self, number: u32, said: &Relayed<'_>) {
        // If the session is that full, the other node asks again.
        let _ = self.out.orders.try_send(said.to_bytes(number));
    }

    /// Opens an association, after its destination is resolved.
    pub(super) fn open(self: &Arc<Self>, number: u32, open: OpenUdp) {
        let max = self.shared.config.load().limits.max_associations;
        let flow = flow(Protocol::Udp, &self.name, open.client, open.destination.clone());
        let flow = Flow { host: open.host.clone(), ..flow };
        let mut record = Delivered::begin(&self.shared, flow.clone());
        let Some(place) = self.shared.udp.far.place(max) else {
            let failure = Failure::new(EndReason::Limit, "this node delivers `max_associations` already");
            return self.refuse(number, &mut record, &failure);
        };
        let session = self.clone();
        tokio::spawn(async move {
            let addresses = timeout(OPEN_TIMEOUT, resolve(&open.destination)).await;
            let late = |_| Failure::new(EndReason::Dns, "its name was not resolved in time");
            let opened = addresses.map_err(late).and_then(|addresses| {
                let allowed = admitted(&session.shared, &session.name, &flow, addresses?)?;
                session.reach(open.path, &allowed)
            });
            match opened {
                Ok((path, remote)) => {
                    record.connected(Some(remote));
                    let (service, used) = (open.service, Instant::now());
                    let association = Association {
                        path,
                        remote,
                        service,
                        record,
                        packets: (0, 0),
                        fates: Fates::default(),
                        used,
                        _place: place,
                    };
                    session.enter(number, association);
                    let said = Relayed::Opened(remote).to_bytes(number);
                    // An error means that the session has ended.
                    let _ = session.out.orders.send(said).await;
                }
                Err(failure) => session.refuse(number, &mut record, &failure),
            }
        });
    }

    fn refuse(&self, number: u32, record: &mut Delivered, failure: &Failure) {
        tracing::debug!(from = self.name, why = failure.detail, "a flow of UDP is not delivered");
        record.failed(failure);
        self.answer(number, &Relayed::Refused(refusal(failure.reason), failure.detail.clone()));
    }

    fn enter(&self, number: u32, association: Association) {
        let remote = association.remote;
        lock(&association.path.servers).insert(remote, number);
        let before = lock(&self.table).all.insert(number, association);
        if let Some(mut before) = before {
            before.record.end(EndReason::BadRequest, Some("its number was used again".to_owned()));
        }
    }

    /// Returns the path with this number, with a socket for the first of these addresses that has a route.
    fn reach(
        self: &Arc<Self>,
        path: u32,
        addresses: &[Admitted],
    ) -> Result<(Arc<Path>, SocketAddr), Failure> {
        let path = {
            let mut table = lock(&self.table);
            table.paths.retain(|_, path| path.strong_count() > 0);
            let known = table.paths.get(&path).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let new = Arc::<Path>::default();
                table.paths.insert(path, Arc::downgrade(&new));
                new
            })
        };
        let dialing = self.shared.dialing.load();
        let mut first = None;
        for admitted in addresses {
            let reached = datagrams::probe(&dialing, *admitted).and_then(|()| {
                let to = admitted.address();
                self.socket(&path, to).map_err(|error| datagrams::failure(&error, to))
            });
            match reached {
                Ok(_) => return Ok((path, sockopt::canonical(admitted.address()))),
                Err(failure) => drop(first.get_or_insert(failure)),
            }
        }
        Err(first.unwrap_or_else(|| Failure::new(EndReason::Unreachable, "no address to try")))
    }

    /// Returns the socket of a path for the family of this address.
    fn socket(self: &Arc<Self>, path: &Arc<Path>, to: SocketAddr) -> io::Result<Arc<UdpSocket>> {
        let mut sockets = lock(&path.sockets);
        if let Some(socket) = fitting(&sockets, to) {
            return Ok(socket);
        }
        let socket = datagrams::bound(&self.shared.dialing.load(), to)?;
        udp::errors::report(&socket, to)?;
        let socket = Arc::new(UdpSocket::from_std(socket)?);
        let (session, weak) = (self.clone(), Arc::downgrade(path));
        let task = tokio::spawn(listen(session, weak, socket.clone()));
        sockets.push((socket.clone(), task.abort_handle()));
        Ok(socket)
    }

    /// Sends a datagram to the server of an association.
    fn forward(&self, number: u32, payload: &[u8]) {
        let mut table = lock(&self.table);
        let Some(association) = table.all.get_mut(&number) else {
            drop(table);
            return self.answer(number, &Relayed::Refused(Refusal::UnknownSession, String::new()));
        };
        association.used = Instant::now();
        association.packets.0 += 1;
        association.count(payload.len() as u64, 0);
        let socket = fitting(&lock(&association.path.sockets), association.remote);
        let sent = socket.map(|socket| socket.try_send_to(payload, association.remote));
        if let Some(Err(error)) = sent
            && error.kind() != io::ErrorKind::WouldBlock
        {
            let reason = datagrams::failure(&error, association.remote).reason;
            drop(table);
            self.answer(number, &Relayed::Error(refusal(reason)));
        }
    }

    /// Sends a server's datagram back.
    fn deliver(&self, number: u32, payload: &[u8]) {
        let service = {
            let mut table = lock(&self.table);
            let Some(association) = table.all.get_mut(&number) else { return };
            association.used = Instant::now();
            association.packets.1 += 1;
            association.count(0, payload.len() as u64);
            association.service
        };
        let message = Relayed::Datagram(payload).to_bytes(number);
        send(&self.shared, &self.origin, &service, message, &self.out);
    }

    fn end(&self, number: u32, reason: EndReason, detail: Option<String>) {
        let association = lock(&self.table).all.remove(&number);
        if let Some(mut association) = association {
            lock(&association.path.servers).retain(|_, other| *other != number);
            association.end(reason, detail);
        }
    }

    /// Ends associations that are idle, or that an operator has ended.
    pub(super) fn look(&self, now: Instant) {
        let idle = Duration::from_millis(self.shared.config.load().limits.udp_idle_timeout_ms);
        let over: Vec<_> = {
            let table = lock(&self.table);
            let over = table.all.iter().filter_map(|(number, association)| {
                let is_idle = now.saturating_duration_since(association.used) >= idle;
                let wished = association.record.live().ending();
                wished.or(is_idle.then_some(EndReason::Idle)).map(|reason| (*number, reason))
            });
            over.collect()
        };
        for (number, reason) in over {
            self.end(number, reason, None);
            let said = match reason {
                EndReason::Idle => Relayed::Refused(Refusal::UnknownSession, String::new()),
                _ => Relayed::Refused(Refusal::Denied, "an operator of the far node has ended it".to_owned()),
            };
            self.answer(number, &said);
        }
    }

    /// Ends all associations, with the session.
    fn close(&self) {
        let all = std::mem::take(&mut lock(&self.table).all);
        for (_, mut association) in all {
            let detail = format!("node '{}' has ended the session", self.name);
            association.end(EndReason::ClientReset, Some(detail));
        }
    }
}

impl Association {
    fn end(&mut self, reason: EndReason, detail: Option<String>) {
        let parts = [detail, self.fates.told()];
        self.record.end(reason, parts.into_iter().flatten().reduce(|detail, told| detail + "; " + &told));
    }

    fn count(&self, up: u64, down: u64) {
        let live = self.record.live();
        live.count(up, down);
        live.set_packets(self.packets.0, self.packets.1);
        if down > 0 {
            live.first_byte(live.age());
        }
        live.touch(live.age());
    }
}

fn fitting(sockets: &[(Arc<UdpSocket>, AbortHandle)], to: SocketAddr) -> Option<Arc<UdpSocket>> {
    let fits = |socket: &UdpSocket| socket.local_addr().is_ok_and(|own| own.is_ipv4() == to.is_ipv4());
    sockets.iter().map(|(socket, _)| socket).find(|socket| fits(socket)).cloned()
}

/// Receives what comes to one socket of a path, until the path is gone.
async fn listen(session: Arc<Session>, path: Weak<Path>, socket: Arc<UdpSocket>) {
    let mut payload = vec![0; RELAYED_MAX];
    while socket.ready(Interest::READABLE | Interest::ERROR).await.is_ok() {
        let Some(path) = path.upgrade() else { return };
        let number = |from: SocketAddr| lock(&path.servers).get(&sockopt::canonical(from)).copied();
        loop {
            match socket.try_recv_from(&mut payload) {
                // Others have not been asked (RFC 4787 Sec. 5, address and port-dependent filtering).
                Ok((length, from)) => {
                    if let Some(number) = number(from) {
                        session.deliver(number, &payload[..length]);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // It only says that an error waits in the queue of errors.
                Err(_) => {}
            }
        }
        let next = || udp::errors::next(&socket).ok_or(io::ErrorKind::WouldBlock.into());
        while let Ok(error) = socket.try_io(Interest::ERROR, next) {
            if let Some(number) = number(error.to) {
                let reason = datagrams::failure(&error.error, error.to).reason;
                session.answer(number, &Relayed::Error(refusal(reason)));
            }
        }
    }
}
