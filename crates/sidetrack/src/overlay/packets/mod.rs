//! Carries whole packets (Seamless Overlays, Secs. 2.1 and 2.2). Packets that rules catch go unchanged to the node that
//! delivers them; TCP stays between the applications. There is one session for each node and direction, and each hop
//! repairs its losses. The session's opening is signed, and the far side's rules decide about it. If a rule says best
//! effort, the packets travel in datagrams instead, under that session's id.
//!
//! Packets that come faster than they can be sent are dropped, as by any router: the applications' congestion control
//! reacts.

mod groups;
mod judge;
mod way;

pub(super) use groups::deliver_to_group;

use super::datagrams::Use;
use super::ingress::{Request, open_reserved};
use super::shared::Shared;
use crate::config::{self, OnCrash};
use crate::steer::OWN_MARK;
use anyhow::Context as _;
use judge::Judged;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::SessionId;
use sidetrack_core::overlay::packet::{Catch, Interceptor, Origin, PACKET_MAX, Receiver, Refused, Target};
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::service::{LinkKind, Service, Trust};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::nfqueue::{Queue, Verdict};
use sidetrack_sys::nft::{Lifetime, MarkBits, OwnedTable, Packets};
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader, BufWriter};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;
use way::{ByDatagram, Reliable, Vouched, Way};

/// The mark of delivered packets: our rules do not catch them.
pub(super) const DELIVERED_MARK: MarkBits = MarkBits { value: 0x5f00_0000, mask: 0xff00_0000 };

/// The name of the table that catches packets.
pub(super) const TABLE: &str = "sidetrack-packets";

/// The queue numbers that we may use.
const QUEUES: std::ops::RangeInclusive<u16> = 24_000..=24_063;

/// Most packets that wait in the kernel. Further ones pass without the overlay, or are dropped (`on_crash`).
const QUEUE_PACKETS: u32 = 8192;

/// Most packets that wait for the session to one node.
const WAITING_MAX: usize = 512;

/// How often the thread checks whether it must end.
const LOOK: Duration = Duration::from_millis(200);

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
    queue: Option<Waiting>,
    /// The thread, if it runs.
    thread: Option<(JoinHandle<()>, oneshot::Sender<Begin>)>,
}

/// What the thread needs.
struct Waiting {
    queue: Queue,
    table: OwnedTable,
    bypass: bool,
}

impl Waiting {
    /// Opens a queue and installs the rules that put packets into it.
    fn new(config: &config::Overlay, on_crash: OnCrash) -> anyhow::Result<Self> {
        let bypass = on_crash == OnCrash::Open;
        let queue = Queue::open(QUEUES, QUEUE_PACKETS, bypass, LOOK)
            .context("[[overlay.packets]] needs a packet queue (root, and NFQUEUE in the kernel)")?;
        let rules = Packets {
            catches: config
                .packets
                .iter()
                .flat_map(|packets| groups::catches(packets, &config.groups))
                .collect(),
            queue: queue.number(),
            bypass,
            own: [OWN_MARK, DELIVERED_MARK],
        };
        let lifetime = if bypass { Lifetime::Socket } else { Lifetime::SocketThenOrphan };
        let table = OwnedTable::create(&rules.table(TABLE), lifetime)
            .context("[[overlay.packets]] cannot catch packets")?;
        Ok(Self { queue, table, bypass })
    }
}

/// The right that is needed at the moment when a verdict is given.
pub(super) const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN;

/// What the thread waits for before it starts.
struct Begin {
    interception: Arc<Interception>,
    ways: BTreeMap<(NodeId, Service), Box<dyn Way>>,
    shared: Arc<Shared>,
    stopped: Arc<AtomicBool>,
}

/// The running thread that catches packets; dropping this stops it.
pub(super) struct Catching {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Bound {
    /// Opens a queue and installs the rules.
    ///
    /// # Errors
    /// Returns the resource that is not available.
    pub(super) fn new(config: &config::Overlay, on_crash: OnCrash) -> anyhow::Result<Option<Self>> {
        if config.packets.is_empty() && config.groups.is_empty() {
            return Ok(None);
        }
        let queue = if config.packets.is_empty() { None } else { Some(Waiting::new(config, on_crash)?) };
        let raw = RoutedSocket::open(DELIVERED_MARK.value)
            .context("[[overlay.packets]] and [[overlay.group]] cannot deliver packets (they need root)")?;
        let (groups, networks) = (config.groups.clone(), Arc::new(groups::Networks::open(config)?));
        let (catches, raw) = (config.packets.clone(), Arc::new(raw));
        Ok(Some(Self { catches, groups, networks, raw, queue, thread: None }))
    }

    /// Returns what a second start needs. It catches no packets: the queue and the table are those of the first start.
    pub(super) fn again(&self) -> Self {
        let Self { catches, groups, networks, raw, .. } = self;
        let (catches, groups) = (catches.clone(), groups.clone());
        Self { catches, groups, networks: networks.clone(), raw: raw.clone(), queue: None, thread: None }
    }

    /// Starts the thread that answers the kernel. Only this thread keeps the right to do so.
    ///
    /// # Errors
    /// Fails if the system provides no thread.
    pub(super) fn answer_kernel(&mut self) -> anyhow::Result<()> {
        let Some(Waiting { queue, table, bypass }) = self.queue.take() else { return Ok(()) };
        let (begin, begun) = oneshot::channel();
        let thread = std::thread::Builder::new().name("overlay-packets".to_owned()).spawn(move || {
            if let Err(error) = caps::keep_only(NEEDED) {
                tracing::error!(%error, "cannot give up capabilities");
            }
            answer_kernel(queue, table, bypass, begun);
        });
        self.thread = Some((thread.context("cannot start a thread for packets")?, begin));
        Ok(())
    }

    /// Adds what the other threads of the overlay need to `shared`.
    pub(super) fn start(self, shared: &mut Shared) -> Start {
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
        let rules = Interceptor::new(self.catches.iter().filter_map(node).collect())
            .with_groups(groups::rules(&self.groups, &shared.identity));
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
        Start { interception, nodes, thread: self.thread }
    }
}

/// The state between [`Bound`] and [`Catching`].
pub(super) struct Start {
    interception: Arc<Interception>,
    /// The nodes, and the services of the packets to them.
    nodes: BTreeMap<Arc<str>, BTreeSet<Service>>,
    thread: Option<(JoinHandle<()>, oneshot::Sender<Begin>)>,
}

impl Start {
    /// Lets the thread start. Returns the tasks that carry the packets, for the thread of flows.
    pub(super) fn run(
        self,
        shared: &Arc<Shared>,
        requests: &mpsc::Sender<Request>,
    ) -> (Catching, Vec<impl Future<Output = ()> + Send + use<>>) {
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
        let stop = Arc::new(AtomicBool::new(false));
        let thread = self.thread.map(|(thread, begin)| {
            // If the thread has ended already, it has logged the reason.
            let _ = begin.send(Begin {
                interception: self.interception,
                ways,
                shared: shared.clone(),
                stopped: stop.clone(),
            });
            thread
        });
        (Catching { stop, thread }, tasks)
    }
}

impl Drop for Catching {
    /// Stops the thread, which removes the rules.
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of packets ended by a panic");
        }
    }
}

/// The thread that reads the queue. The table exists as long as this thread runs.
fn answer_kernel(mut queue: Queue, table: OwnedTable, bypass: bool, begun: oneshot::Receiver<Begin>) {
    let Ok(begin) = begun.blocking_recv() else { return };
    let without_way = if bypass { Verdict::Accept } else { Verdict::Drop };
    while !begin.stopped.load(Relaxed) {
        if let Err(error) = queue.read(|packet| begin.caught(packet, without_way)) {
            tracing::error!(%error, "the packet queue");
            break;
        }
    }
    // An orderly end removes the rules, also where a crash would leave them.
    if let Err(error) = table.delete() {
        tracing::error!(%error, table = TABLE, "cannot take the rules back");
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
