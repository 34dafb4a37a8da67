//! Carries whole packets (Seamless Overlays, Secs. 2.1 and 2.2). Packets that rules catch go unchanged to the node that
//! delivers them; TCP stays between the applications. There is one session for each node and direction, and each hop
//! repairs its losses. The session's opening is signed, and the far side's rules decide about it. If a rule says best
//! effort, the packets travel in datagrams instead, under that session's id.
//!
//! Packets that come faster than they can be sent are dropped, as by any router: the applications' congestion control
//! reacts.

mod answering;
mod groups;
mod judge;
mod way;

pub use answering::QueueSockets;
pub(super) use groups::deliver_to_group;

use super::datagrams::Use;
use super::ingress::{Request, open_reserved};
use super::shared::Shared;
use crate::config::{self, OnCrash};
use answering::{Answering, Caught, DELIVERED_MARK};
use anyhow::Context as _;
use judge::Judged;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::SessionId;
use sidetrack_core::overlay::packet::{Catch, Interceptor, Origin, PACKET_MAX, Receiver, Refused, Target};
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::service::{LinkKind, Service, Trust};
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::nfqueue::Verdict;
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::sleep;
use way::{ByDatagram, Reliable, Vouched, Way};

/// Most packets that wait for the session to one node.
const WAITING_MAX: usize = 512;

/// How long to wait before asking again for a session that ended or was refused.
const REST: Duration = Duration::from_millis(250);

/// Counts of packets.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Caught, and sent to the node that delivers them.
    pub sent: AtomicU64,
    /// Those of the sent ones that went in datagrams.
    pub by_datagram: AtomicU64,
    /// Caught, and dropped because the session or the link to their node was full.
    pub dropped: AtomicU64,
    /// Caught while there was no session to their node: passed without the overlay or dropped, as `on_crash` says.
    pub without_way: AtomicU64,
    /// Delivered.
    pub delivered: AtomicU64,
    /// From other nodes, and not delivered: unreadable, forged, or to a destination that no entry allows.
    pub refused: AtomicU64,
    /// From other nodes, and denied by a rule of this node, or to one of our own ports.
    pub denied: AtomicU64,
    /// From other nodes, and rejected by the system.
    pub failed: AtomicU64,
}

/// The state of caught packets, for all threads.
pub(super) struct Interception {
    rules: Mutex<Interceptor>,
    /// The configuration that the verdicts about conversations come from.
    judged: Mutex<Judged>,
    raw: Arc<RoutedSocket>,
    /// Where packets to IP multicast addresses are delivered.
    networks: Arc<groups::Networks>,
    /// Sessions of packets that other nodes have opened. Datagrams must come under these ids and from these nodes.
    sessions: Mutex<BTreeMap<SessionId, NodeId>>,
    /// Counts of packets.
    pub counters: Counters,
}

/// The resources that need rights, opened while the process has them.
pub(super) struct Bound {
    catches: Vec<config::Packets>,
    groups: Vec<config::Group>,
    networks: Arc<groups::Networks>,
    raw: Arc<RoutedSocket>,
    caught: Option<Caught>,
    /// The thread that answers the kernel, if it runs.
    answering: Option<Arc<Answering>>,
}

/// The right that is needed at the moment when a verdict is given.
pub(super) const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN;

/// What the thread needs while it answers.
struct Begin {
    interception: Arc<Interception>,
    ways: BTreeMap<(NodeId, Service), Box<dyn Way>>,
    shared: Arc<Shared>,
    stopped: Arc<AtomicBool>,
    /// Dropped when it answers no more.
    _over: SyncSender<()>,
}

/// Packets are caught. Dropping this stops it; the rules stay until [`Answering`] ends.
pub(super) struct Catching {
    stop: Arc<AtomicBool>,
    over: std::sync::mpsc::Receiver<()>,
    _answering: Arc<Answering>,
}

impl Bound {
    /// Opens a queue and installs the rules. `given`: those of another process. `waits`: another process has the overlay now.
    ///
    /// # Errors
    /// Returns the resource that is not available.
    pub(super) fn new(
        config: &config::Overlay,
        on_crash: OnCrash,
        given: Option<QueueSockets>,
        waits: bool,
    ) -> anyhow::Result<Option<Self>> {
        let catches_none = config.packets.is_empty() && given.is_none();
        if catches_none && config.groups.is_empty() {
            return Ok(None);
        }
        let caught = if catches_none { None } else { Some(Caught::new(config, on_crash, given, waits)?) };
        let raw = RoutedSocket::open(DELIVERED_MARK.value)
            .context("[[overlay.packets]] and [[overlay.group]] cannot deliver packets (they need root)")?;
        let (groups, networks) = (config.groups.clone(), Arc::new(groups::Networks::open(config)?));
        let (catches, raw) = (config.packets.clone(), Arc::new(raw));
        Ok(Some(Self { catches, groups, networks, raw, caught, answering: None }))
    }

    /// Returns what a second start needs.
    pub(super) fn again(&self) -> Self {
        let Self { catches, groups, networks, raw, answering, .. } = self;
        let (catches, groups) = (catches.clone(), groups.clone());
        let (networks, raw, answering) = (networks.clone(), raw.clone(), answering.clone());
        Self { catches, groups, networks, raw, caught: None, answering }
    }

    /// Starts the thread that answers the kernel. Only this thread keeps the right to do so.
    ///
    /// # Errors
    /// Fails if the system provides no thread.
    pub(super) fn answer_kernel(&mut self) -> anyhow::Result<()> {
        self.answering = self.caught.take().map(Answering::start).transpose()?;
        Ok(())
    }

    /// Returns copies of the sockets that catch packets, for another process. `None`: no packets are caught.
    ///
    /// # Errors
    /// Fails if the system provides no descriptor.
    pub(super) fn sockets(&self) -> io::Result<Option<QueueSockets>> {
        self.answering.as_ref().map_or(Ok(None), |answering| answering.sockets())
    }

    /// Another process goes on with the rules: they stay.
    pub(super) fn leave(&self) {
        self.answering.iter().for_each(|answering| answering.leave());
    }

    /// Adds what the other threads of the overlay need to `shared`. `known`: the conversations so far.
    pub(super) fn start(self, shared: &mut Shared, known: Option<&[u8]>) -> Start {
        let node = |packets: &config::Packets| {
            let target = match &packets.target {
                config::Target::Node(node) => Target::Node(shared.identity.node_named(node)?),
                config::Target::Group(group) => Target::Group(group.clone()),
                config::Target::Nearest(group) => Target::Nearest(group.clone()),
            };
            Some(Catch {
                target,
                to: packets.to.clone(),
                ports: packets.port.clone(),
                service: packets.service,
            })
        };
        let mut rules = Interceptor::new(self.catches.iter().filter_map(node).collect())
            .with_groups(groups::rules(&self.groups, &shared.identity));
        if let Some(Err(error)) = known.map(|known| rules.know(known)) {
            tracing::error!(%error, "connections of whole packets may have to begin anew");
        }
        let counters = Counters::default();
        let (rules, judged, sessions) = (Mutex::new(rules), Mutex::default(), Mutex::default());
        let interception = Arc::new(Interception {
            rules,
            judged,
            raw: self.raw,
            networks: self.networks,
            sessions,
            counters,
        });
        shared.packets = Some(interception.clone());
        let mut nodes = BTreeMap::new();
        for packets in &self.catches {
            if let config::Target::Node(node) = &packets.target {
                let services: &mut BTreeSet<_> = nodes.entry(node.clone()).or_default();
                services.insert(packets.service);
            }
        }
        Start { interception, nodes, answering: self.answering }
    }
}

/// The state between [`Bound`] and [`Catching`].
pub(super) struct Start {
    interception: Arc<Interception>,
    /// The nodes, and the services of the packets to them.
    nodes: BTreeMap<Arc<str>, BTreeSet<Service>>,
    answering: Option<Arc<Answering>>,
}

impl Start {
    /// Lets packets be caught. Returns the tasks that carry the packets, for the thread of flows.
    pub(super) fn run(
        self,
        shared: &Arc<Shared>,
        requests: &mpsc::Sender<Request>,
    ) -> (Option<Catching>, Vec<impl Future<Output = ()> + Send + use<>>) {
        let mut ways: BTreeMap<_, Box<dyn Way>> = BTreeMap::new();
        let mut tasks = Vec::new();
        for (name, services) in self.nodes {
            let Some(node) = shared.identity.node_named(&name) else { continue };
            let (packets, waiting) = mpsc::channel(WAITING_MAX);
            let stands = Arc::new(AtomicBool::new(false));
            let reliable = Reliable { packets, stands: stands.clone() };
            for service in services.iter().copied() {
                if service.trust == Trust::Tolerant {
                    if !shared.datagrams.paths.begin(node, service) {
                        tracing::error!(node = %name, "too many kinds of intrusion-tolerant packets");
                    }
                    let shared = shared.clone();
                    let way: Box<dyn Way> = Box::new(Vouched { to: node, service, shared });
                    ways.insert((node, service), way);
                    continue;
                }
                let way: Box<dyn Way> = match service.kind {
                    LinkKind::Reliable => Box::new(reliable.clone()),
                    LinkKind::BestEffort | LinkKind::RealTime => Box::new(ByDatagram {
                        to: node,
                        service,
                        shared: shared.clone(),
                        interception: self.interception.clone(),
                        reliable: reliable.clone(),
                    }),
                };
                ways.insert((node, service), way);
            }
            // Packets with proofs need no session.
            if services.iter().all(|service| service.trust == Trust::Tolerant) {
                continue;
            }
            let carried = Carried { node, name, services, stands, requests: requests.clone() };
            tasks.push(carry(shared.clone(), carried, waiting));
        }
        let catching = self.answering.map(|answering| {
            let stop = Arc::new(AtomicBool::new(false));
            let (sender, over) = sync_channel(0);
            answering.begin(Begin {
                interception: self.interception,
                ways,
                shared: shared.clone(),
                stopped: stop.clone(),
                _over: sender,
            });
            Catching { stop, over, _answering: answering }
        });
        (catching, tasks)
    }
}

impl Drop for Catching {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // Until the thread has dropped its end.
        let _ = self.over.recv();
    }
}

impl Begin {
    fn caught(&self, packet: &[u8], without_way: Verdict) -> Verdict {
        let counters = &self.interception.counters;
        let whom = self.interception.rules().outgoing(packet);
        let whom = match whom {
            Some((Receiver::Node(node), service)) => Some((node, service)),
            Some((to_group, service)) => return self.to_group(packet, to_group, &service, without_way),
            // Packets to IP multicast addresses are copies of what goes on in the network itself.
            None if groups::is_multicast(packet) => return Verdict::Accept,
            None => None,
        };
        let way = whom.and_then(|whom| self.ways.get(&whom)).filter(|way| way.stands());
        let Some(way) = way else {
            counters.without_way.fetch_add(1, Relaxed);
            return without_way;
        };
        let became = if way.take(packet) { &counters.sent } else { &counters.dropped };
        became.fetch_add(1, Relaxed);
        Verdict::Drop
    }
}

impl Interception {
    /// Returns the conversations that have been seen, for another process.
    pub(super) fn known(&self) -> Vec<u8> {
        self.rules().known()
    }

    fn rules(&self) -> std::sync::MutexGuard<'_, Interceptor> {
        lock(&self.rules)
    }

    fn sessions(&self) -> std::sync::MutexGuard<'_, BTreeMap<SessionId, NodeId>> {
        lock(&self.sessions)
    }

    /// Delivers a packet whose source is proven.
    pub(super) fn deliver_vouched(&self, shared: &Shared, from: NodeId, packet: &[u8]) {
        if let Some(member) = shared.identity.member(from) {
            self.deliver(shared, Origin { node: from, is_proven: true }, &member.name, packet);
        }
    }

    /// Delivers a packet that came in a datagram, if `from` has opened this session for packets.
    pub(super) fn deliver_datagram(&self, shared: &Shared, from: NodeId, session: SessionId, packet: &[u8]) {
        if self.sessions().get(&session) != Some(&from) {
            self.counters.refused.fetch_add(1, Relaxed);
            return;
        }
        if let Some(member) = shared.identity.member(from) {
            self.deliver(shared, from, &member.name, packet);
        }
    }

    /// Delivers a packet that `from` has sent, if the rules allow it.
    fn deliver(&self, shared: &Shared, from: impl Into<Origin>, name: &str, packet: &[u8]) {
        self.look_at_rules(shared);
        let verdict = self.rules().incoming(from, packet, |ends| judge::judge(shared, name, ends));
        let became = match verdict {
            Ok(ends) => match self.raw.send(packet, ends.destination.ip()) {
                Ok(()) => &self.counters.delivered,
                Err(error) => {
                    tracing::debug!(to = %ends.destination, %error, "a packet cannot be delivered");
                    &self.counters.failed
                }
            },
            Err(Refused::Denied) => &self.counters.denied,
            Err(refused) => {
                tracing::debug!(from = name, ?refused, "a packet is not delivered");
                &self.counters.refused
            }
        };
        became.fetch_add(1, Relaxed);
    }
}

/// The parameters of the task that keeps a session to one node.
struct Carried {
    node: NodeId,
    name: Arc<str>,
    services: BTreeSet<Service>,
    stands: Arc<AtomicBool>,
    requests: mpsc::Sender<Request>,
}

/// Keeps a session to a node open, and sends waiting packets through it, without end.
async fn carry(shared: Arc<Shared>, carried: Carried, mut waiting: mpsc::Receiver<Vec<u8>>) {
    let Carried { node, name, services, stands, requests } = carried;
    let by_datagram = services.iter().any(|service| service.kind != LinkKind::Reliable);
    let mut told = String::new();
    loop {
        match open_reserved(Reserved::Packets, &name, &requests).await {
            Ok((session, id)) => {
                told.clear();
                if by_datagram {
                    shared.datagrams.paths.enter(node, Use::Packets, id, services.iter().copied());
                }
                stands.store(true, Relaxed);
                // A reader of the log may send at once: it is true by now.
                tracing::info!(node = %name, "packets pass over the overlay");
                let ended = pass(session, &mut waiting).await;
                stands.store(false, Relaxed);
                shared.datagrams.paths.leave(node, Use::Packets);
                match ended {
                    Ok(()) => return,
                    Err(error) => {
                        tracing::info!(node = %name, %error, "packets pass no more over the overlay")
                    }
                }
            }
            Err(error) => {
                let error = error.detail;
                if error != told {
                    tracing::warn!(node = %name, %error, "packets have no way to a node; trying on");
                    told = error;
                }
            }
        }
        // Packets that have waited in the meantime are too old.
        while waiting.try_recv().is_ok() {}
        sleep(REST).await;
    }
}

/// Writes packets, each after its length. Returns `Ok` when no sender is left. The far end sends nothing; reading only
/// shows its end.
async fn pass(session: TcpStream, waiting: &mut mpsc::Receiver<Vec<u8>>) -> io::Result<()> {
    let (mut ended, sending) = session.into_split();
    let mut sending = BufWriter::with_capacity(65_536, sending);
    let mut byte = [0];
    loop {
        let packet = tokio::select! {
            packet = waiting.recv() => packet,
            end = ended.read(&mut byte) => return end.and(Err(io::ErrorKind::UnexpectedEof.into())),
        };
        let Some(packet) = packet else { return Ok(()) };
        let Ok(length) = u16::try_from(packet.len()) else { continue };
        sending.write_u16(length).await?;
        sending.write_all(&packet).await?;
        if waiting.is_empty() {
            sending.flush().await?;
        }
    }
}

/// The far end of a session of packets: delivers packets until the session ends.
pub(super) async fn receive(
    shared: Arc<Shared>,
    interception: Arc<Interception>,
    from: NodeId,
    id: SessionId,
    session: TcpStream,
) {
    interception.sessions().insert(id, from);
    receive_stream(&shared, &interception, from, session).await;
    interception.sessions().remove(&id);
}

async fn receive_stream(shared: &Shared, interception: &Interception, from: NodeId, session: TcpStream) {
    let name = shared.identity.name(from);
    let mut session = BufReader::with_capacity(65_536, session);
    let mut packet = vec![0; PACKET_MAX];
    loop {
        let Ok(length) = session.read_u16().await else { return };
        let Some(packet) = packet.get_mut(..usize::from(length)) else { return };
        if session.read_exact(packet).await.is_err() {
            return;
        }
        interception.deliver(shared, from, &name, packet);
    }
}
