//! The node that catches datagrams: one session to each node that delivers them, and a path for each client.

use super::fates::{Fate, Fates};
use super::group::Grouped;
use super::{BY_PACKET_MAX, Outbox, To, Use, WAITING_MAX, Waiting, proven, pump, send};
use crate::carry::datagrams::{Came, Datagrams, Lost, Remote};
use crate::carry::{Failure, OverlayOrder};
use crate::overlay::ingress::{self, Request, open_reserved};
use crate::overlay::nearest;
use crate::overlay::shared::Shared;
use sidetrack_core::association::Dropped;
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{OpenUdp, Refusal, Relayed, SessionId};
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::service::{Service, Trust};
use sidetrack_sys::sync::lock;
use sidetrack_sys::udp::batch::Batch;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use tokio::sync::{mpsc, watch};

/// Most datagrams that wait until the far node has opened their association.
const HELD_MAX: usize = 16;

/// Messages that one path takes before other work has its turn.
const TURN: usize = 64;

/// What a carrier has ahead of the name of a group whose members all get the datagrams.
const ALL_OF: &str = "group:";

/// What the far node has said about one association.
#[derive(Debug)]
enum Said {
    Opened(SocketAddr),
    Refused(Refusal, String),
    Datagram(Vec<u8>),
    Error(Refusal),
    /// Something happened to a datagram on the way.
    Happened(Fate),
    /// The session has ended.
    Over,
}

/// The state of a session.
#[derive(Clone, Debug)]
enum State {
    Opening,
    Open(SessionId),
    Over(EndReason, String),
}

/// The session to one node.
pub(super) struct Peer {
    pub node: NodeId,
    pub name: Arc<str>,
    trust: Trust,
    state: watch::Sender<State>,
    /// To the task that writes the session.
    session: Outbox,
    /// The paths of the associations, by number.
    paths: Mutex<BTreeMap<u32, mpsc::Sender<(u32, Said)>>>,
}

/// The sessions to all nodes that deliver datagrams of this one.
#[derive(Default)]
pub(super) struct Near {
    peers: Mutex<BTreeMap<(NodeId, Trust), Arc<Peer>>>,
    /// Numbers associations and paths. Numbers are used again after 2^32 of them.
    next: AtomicU32,
}

impl Near {
    pub(super) fn came(&self, origin: (NodeId, Trust), session: SessionId, message: &[u8]) -> bool {
        let peer = lock(&self.peers).get(&origin).cloned();
        let Some(peer) = peer else { return false };
        if !peer.has(session) {
            return false;
        }
        peer.came(message);
        true
    }

    /// Notes what happened to an answer for the association with this number. Returns false if this is not a session of this node.
    pub(super) fn note(&self, origin: (NodeId, Trust), session: SessionId, number: u32, fate: Fate) -> bool {
        let peer = lock(&self.peers).get(&origin).cloned();
        let Some(peer) = peer.filter(|peer| peer.has(session)) else { return false };
        peer.pass(number, Said::Happened(fate));
        true
    }

    fn number(&self) -> u32 {
        self.next.fetch_add(1, Relaxed)
    }

    /// Returns the session to a node. Opens it if there is none.
    fn peer(
        &self,
        shared: &Arc<Shared>,
        requests: &mpsc::Sender<Request>,
        (node, trust): (NodeId, Trust),
    ) -> Result<Arc<Peer>, Failure> {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(&(node, trust)) {
            return Ok(peer.clone());
        }
        let runtime =
            shared.flows.get().ok_or_else(|| Failure::new(EndReason::Shutdown, "the overlay is starting"))?;
        let (session, waiting) = Outbox::new();
        let (name, state) = (shared.identity.name(node), watch::Sender::new(State::Opening));
        let peer = Arc::new(Peer { node, name: name.into(), trust, state, session, paths: Mutex::default() });
        peers.insert((node, trust), peer.clone());
        runtime.spawn(keep(shared.clone(), requests.clone(), peer.clone(), waiting));
        Ok(peer)
    }
}

/// Keeps a session until it ends.
async fn keep(shared: Arc<Shared>, requests: mpsc::Sender<Request>, peer: Arc<Peer>, waiting: Waiting) {
    let (reason, detail) = match peer.trust {
        Trust::Members => keep_open(&shared, &requests, &peer, waiting).await,
        Trust::Tolerant => match proven::begin(&shared, &peer) {
            Ok(session) => {
                peer.state.send_replace(State::Open(session));
                proven::pass(&shared, peer.to(session), waiting).await;
                (EndReason::Shutdown, "the overlay is stopping".to_owned())
            }
            Err(Failure { reason, detail, .. }) => (reason, detail),
        },
    };
    lock(&shared.udp.near.peers).remove(&(peer.node, peer.trust));
    peer.state.send_replace(State::Over(reason, detail));
    // A path whose channel is full looks at the state once it has emptied it.
    for (number, path) in std::mem::take(&mut *lock(&peer.paths)) {
        let _ = path.try_send((number, Said::Over));
    }
}

/// Keeps a session that relays carry until it ends. Returns why it ended.
async fn keep_open(
    shared: &Shared,
    requests: &mpsc::Sender<Request>,
    peer: &Peer,
    waiting: Waiting,
) -> (EndReason, String) {
    match open_reserved(Reserved::Udp, &peer.name, requests).await {
        Ok((stream, session)) => {
            tracing::info!(node = %peer.name, "flows of UDP pass over the overlay");
            peer.state.send_replace(State::Open(session));
            let ended = pump(stream, waiting, |message| peer.came(message)).await;
            shared.datagrams.paths.leave(peer.node, Use::Caught);
            let why = ended.err().map_or_else(String::new, |error| format!(": {error}"));
            (EndReason::HopFailed, format!("overlay:{}: the session for datagrams ended{why}", peer.name))
        }
        // A node that does not know the name looks it up.
        Err(Failure { reason: EndReason::Dns, .. }) => {
            let detail = format!("overlay:{}: this node is too old to deliver flows of UDP", peer.name);
            (EndReason::Unsupported, detail)
        }
        Err(Failure { reason, detail, .. }) => (reason, detail),
    }
}

impl Peer {
    fn to(&self, session: SessionId) -> To {
        To { node: self.node, what: Use::Caught, session }
    }

    /// Passes a message to the path of its association. A path that does not keep up loses datagrams.
    fn came(&self, message: &[u8]) {
        let Ok((number, said)) = Relayed::parse(message) else {
            tracing::debug!(node = %self.name, "an unreadable message about a flow of UDP");
            return;
        };
        let said = match said {
            Relayed::Opened(remote) => Said::Opened(remote),
            Relayed::Refused(reason, detail) => Said::Refused(reason, detail),
            Relayed::Datagram(payload) => Said::Datagram(payload.to_vec()),
            Relayed::Error(reason) => Said::Error(reason),
            // Only the node that catches says so.
            Relayed::Open(_) | Relayed::Close => return,
        };
        self.pass(number, said);
    }

    fn pass(&self, number: u32, said: Said) {
        let path = lock(&self.paths).get(&number).cloned();
        if let Some(path) = path {
            let _ = path.try_send((number, said));
        }
    }

    fn has(&self, session: SessionId) -> bool {
        matches!(&*self.state.borrow(), State::Open(own) if *own == session)
    }

    fn over(&self) -> Failure {
        match &*self.state.borrow() {
            State::Over(reason, detail) => Failure::new(*reason, detail.clone()),
            State::Opening | State::Open(_) => Failure::new(EndReason::Shutdown, "the overlay is stopping"),
        }
    }

    /// Waits until the session is open. Returns its id.
    async fn opened(&self) -> Result<SessionId, Failure> {
        let mut state = self.state.subscribe();
        let decided = state.wait_for(|state| !matches!(state, State::Opening)).await;
        match decided.map(|state| state.clone()) {
            Ok(State::Open(session)) => Ok(session),
            _ => Err(self.over()),
        }
    }
}

/// Opens a path for the datagrams of a client, and the association with the destination of the order.
///
/// # Errors
/// Fails if the node cannot be reached, or refuses the destination.
pub(in crate::overlay) async fn associate(
    shared: Arc<Shared>,
    requests: mpsc::Sender<Request>,
    order: OverlayOrder,
) -> Result<Box<dyn Datagrams>, Failure> {
    let name = &order.carrier.node;
    let service = order.carrier.service;
    if let Some(group) = name.strip_prefix(ALL_OF) {
        let grouped = Grouped::new(shared, group, service, order.client)?;
        return Ok(Box::new(grouped));
    }
    let (peer, session) = peer_of(&shared, &requests, name, service.trust).await?;
    match service.trust {
        Trust::Members => shared.datagrams.paths.enter(peer.node, Use::Caught, session, [service]),
        Trust::Tolerant if !shared.datagrams.paths.begin(peer.node, service) => {
            let detail = format!("overlay:{}: {}", peer.name, proven::TOO_MANY);
            return Err(Failure::new(EndReason::Limit, detail));
        }
        Trust::Tolerant => {}
    }
    let (sender, received) = mpsc::channel(WAITING_MAX);
    let number = shared.udp.near.number();
    let OverlayOrder { client, host, destination, .. } = order;
    let (numbers, all) = (HashMap::new(), HashMap::new());
    let to = peer.to(session);
    let mut through =
        Through { shared, peer, to, service, number, client, host, numbers, all, sender, received };
    let (first, order) = through.enter(destination);
    through.peer.session.orders.send(order).await.map_err(|_| through.peer.over())?;
    loop {
        let (number, said) = through.received.recv().await.ok_or_else(|| through.peer.over())?;
        match said {
            Said::Refused(reason, detail) => return Err(through.refused(number, reason, detail)),
            Said::Over => return Err(through.peer.over()),
            said => through.heard(number, said, &mut |_| ()),
        }
        if through.all.get(&first).is_some_and(|one| one.remote.is_some()) {
            return Ok(Box::new(through));
        }
    }
}

/// Returns the session to the node that a carrier names, or to the nearest member of a group that accepts one.
async fn peer_of(
    shared: &Arc<Shared>,
    requests: &mpsc::Sender<Request>,
    name: &str,
    trust: Trust,
) -> Result<(Arc<Peer>, SessionId), Failure> {
    let mut last = nearest::no_node(name);
    for node in nearest::destinations(shared, name) {
        let peer = shared.udp.near.peer(shared, requests, (node, trust))?;
        match peer.opened().await {
            Ok(session) => return Ok((peer, session)),
            Err(failure) => last = failure,
        }
    }
    Err(last)
}

/// An association on a path.
#[derive(Debug)]
struct One {
    destination: Destination,
    /// The server's address, once the far node has opened it.
    remote: Option<SocketAddr>,
    /// Datagrams that wait until then.
    held: Vec<Vec<u8>>,
    /// Copies of datagrams that were sent.
    copies: u64,
    /// What happened to the answers.
    fates: Fates,
}

/// A path for the datagrams of one client.
struct Through {
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    to: To,
    service: Service,
    /// The number of the path.
    number: u32,
    client: SocketAddr,
    host: Option<sidetrack_core::flow::HostName>,
    numbers: HashMap<Destination, u32>,
    all: HashMap<u32, One>,
    sender: mpsc::Sender<(u32, Said)>,
    received: mpsc::Receiver<(u32, Said)>,
}

impl fmt::Debug for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a path for datagrams to node {}", self.peer.name)
    }
}

impl Through {
    /// Numbers an association. Returns the number, and the order for the far node.
    fn enter(&mut self, destination: Destination) -> (u32, Vec<u8>) {
        let number = self.shared.udp.near.number();
        lock(&self.peer.paths).insert(number, self.sender.clone());
        let open = OpenUdp {
            path: self.number,
            service: self.service,
            client: self.client,
            host: self.host.clone(),
            destination: Destination { zone: 0, ..destination.clone() },
        };
        self.numbers.insert(destination.clone(), number);
        self.all.insert(
            number,
            One { destination, remote: None, held: Vec::new(), copies: 0, fates: Fates::default() },
        );
        (number, Relayed::Open(Box::new(open)).to_bytes(number))
    }

    /// Asks the far node for a further association.
    fn open(&mut self, destination: Destination) -> Result<u32, Lost> {
        let (number, order) = self.enter(destination);
        if self.peer.session.orders.try_send(order).is_ok() {
            return Ok(number);
        }
        self.forget(number);
        let failure = Failure::new(EndReason::Limit, "too many orders wait for the node that delivers");
        Err(Lost { why: Dropped::Unsent, failure, fits_bytes: None })
    }

    fn transmit(&mut self, number: u32, payload: &[u8]) -> Result<(), Lost> {
        let message = Relayed::Datagram(payload).to_bytes(number);
        if self.service.trust == Trust::Tolerant && message.len() > BY_PACKET_MAX {
            let failure = Failure::new(EndReason::Unsupported, "it is longer than one packet with a proof");
            let fits_bytes = Some((BY_PACKET_MAX + payload.len()).saturating_sub(message.len()));
            return Err(Lost { why: Dropped::TooLong, failure, fits_bytes });
        }
        let copies = send(&self.shared, &self.to, &self.service, message, &self.peer.session);
        if copies > 0 {
            if let Some(one) = self.all.get_mut(&number) {
                one.copies += copies;
            }
            return Ok(());
        }
        let failure = Failure::new(EndReason::Unreachable, "the links to the node are full or down");
        Err(Lost { why: Dropped::Unsent, failure, fits_bytes: None })
    }

    /// Forgets an association. Returns why, in words.
    fn refused(&mut self, number: u32, reason: Refusal, detail: String) -> Failure {
        self.forget(number);
        ingress::failure(reason, &self.peer.name, detail)
    }

    fn forget(&mut self, number: u32) -> Option<One> {
        lock(&self.peer.paths).remove(&number);
        let one = self.all.remove(&number)?;
        self.numbers.remove(&one.destination);
        Some(one)
    }

    fn heard(&mut self, number: u32, said: Said, take: &mut dyn FnMut(Came<'_>)) {
        let Some(one) = self.all.get_mut(&number) else {
            return take(Came::Dropped(Dropped::Unknown));
        };
        match said {
            Said::Opened(remote) => {
                one.remote = Some(remote);
                for payload in std::mem::take(&mut one.held) {
                    if let Err(Lost { why, .. }) = self.transmit(number, &payload) {
                        take(Came::Dropped(why));
                    }
                }
            }
            Said::Datagram(payload) => match one.remote {
                Some(from) => take(Came::Datagram { from: Some(from), payload: &payload }),
                None => take(Came::Dropped(Dropped::Unknown)),
            },
            Said::Happened(fate) => one.fates.add(fate),
            // The caller ends the path.
            Said::Over => {}
            Said::Error(reason) => {
                let failure = ingress::failure(reason, &self.peer.name, "an error of the network".to_owned());
                take(Came::Error { to: one.destination.socket_addr(), failure, said: None });
            }
            // It was idle there: the next datagram opens it again.
            Said::Refused(Refusal::UnknownSession, _) => drop(self.forget(number)),
            Said::Refused(reason, detail) => {
                let to = one.destination.socket_addr();
                let failure = self.refused(number, reason, detail);
                take(Came::Refused { to, failure });
            }
        }
    }
}

impl Datagrams for Through {
    fn send(&mut self, to: &Remote, payload: &[u8]) -> Result<(), Lost> {
        let destination = to.destination();
        let number = match self.numbers.get(&destination) {
            Some(number) => *number,
            None => self.open(destination)?,
        };
        let Some(one) = self.all.get_mut(&number) else { return Ok(()) };
        if one.remote.is_some() {
            return self.transmit(number, payload);
        }
        if one.held.len() >= HELD_MAX {
            let failure =
                Failure::new(EndReason::ConnectTimeout, "the node that delivers has not answered yet");
            return Err(Lost { why: Dropped::Waiting, failure, fits_bytes: None });
        }
        one.held.push(payload.to_vec());
        Ok(())
    }

    fn copies(&self, to: &Remote) -> Option<u64> {
        let number = self.numbers.get(&to.destination())?;
        self.all.get(number).map(|one| one.copies)
    }

    fn happened(&self, to: &Remote) -> Option<String> {
        let number = self.numbers.get(&to.destination())?;
        self.all.get(number)?.fates.told()
    }

    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        _: &mut Batch,
        take: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>> {
        for _ in 0..TURN {
            match self.received.poll_recv(cx) {
                Poll::Ready(Some((_, Said::Over)) | None) => return Poll::Ready(Err(self.peer.over())),
                Poll::Ready(Some((number, said))) => self.heard(number, said, take),
                Poll::Pending => {
                    // The channel may have been full when the session ended.
                    return match &*self.peer.state.borrow() {
                        State::Over(reason, detail) => {
                            Poll::Ready(Err(Failure::new(*reason, detail.clone())))
                        }
                        State::Opening | State::Open(_) => Poll::Pending,
                    };
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Through {
    /// The far node need not wait until the associations are idle.
    fn drop(&mut self) {
        let mut paths = lock(&self.peer.paths);
        for number in self.all.keys() {
            paths.remove(number);
            let _ = self.peer.session.orders.try_send(Relayed::Close.to_bytes(*number));
        }
    }
}
