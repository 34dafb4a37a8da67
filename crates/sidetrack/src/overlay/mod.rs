//! Runs an overlay node (Seamless Overlays): links to neighbours, relayed flows, and both ends of sessions.
//!
//! Four threads run beside the workers: one for control (hellos, link state), one for flows, one that receives datagrams, and
//! one that sends for paced links.
//! A link is one control connection and one connection for each flow, all TLS 1.3 over kernel TCP; some are kept ready. So each
//! hop repairs its own losses, the kernel applies back-pressure, and no flow waits for another.
//!
//! Datagrams travel beside the connections, sealed with keys of the control connection. They carry frequent hellos, and whole
//! packets that need no recovery. See `docs/overlay-protocol.md` and `docs/adr/0008-overlay-links.md`.

mod bench;
mod circuit;
mod control;
mod control_dial;
mod datagrams;
mod deliver;
mod delivered;
mod echoes;
mod endpoint;
mod groups;
pub mod identity;
mod ingress;
mod lanes;
mod mapped;
mod nearest;
mod paced;
mod packets;
mod places;
mod pool;
mod records;
mod secured;
mod sessions;
mod setting;
mod shape;
mod shared;
mod status;
mod stream;
mod tls;
mod trust;
mod udp;

pub use bench::BenchView;
pub use control::Echo;
pub(crate) use echoes::PER_SECOND_MAX;
pub use echoes::PacketBenchView;
pub use groups::{GroupTotals, GroupView};
pub use mapped::GraphLinkView;
pub use paced::{PacedTotals, PacedView};
pub use setting::{LinkSetting, LinkSettingView};
pub use status::{
    CaughtView, DatagramsView, LegView, LinkView, PathView, PingView, RealTimeView, ServiceCountView,
    ServiceView, SessionPathsView, SpreadView, Status, WayView,
};
pub use trust::{FlowsView, TolerantView};

use crate::carry::{Associating, Dialing, Entered, Entering, Failure, OverlayEntry, OverlayOrder};
use crate::config::{self, OnCrash};
use crate::live::{Ledger, Spread};
use anyhow::Context as _;
use arc_swap::ArcSwap;
use control::Event;
use datagrams::Pinged;
use ingress::Request;
use shared::{NextId, Shared};
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::Purpose;
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::service::Service;
use sidetrack_core::overlay::session::Mode;
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

/// Most flows that wait to be handed to the overlay.
const REQUESTS_MAX: usize = 4096;

/// How long the threads may take to end.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// How long a ping waits for its answer.
const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a listener waits when the process has no descriptor for the next connection.
const ACCEPT_REST: Duration = Duration::from_millis(10);

/// The sockets of an overlay node: bound while there are rights.
pub struct Bound {
    config: config::Overlay,
    listeners: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
    packets: Option<packets::Bound>,
}

/// An overlay node at work.
pub struct Overlay {
    entry: Arc<Entry>,
    addresses: Vec<SocketAddr>,
    stop: watch::Sender<bool>,
    stopped_datagrams: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    catching: Mutex<Option<packets::Catching>>,
}

/// The way into the overlay, for workers and the admin interface.
pub struct Entry {
    shared: Arc<Shared>,
    requests: mpsc::Sender<Request>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "overlay node {}", self.shared.identity.own())
    }
}

impl Bound {
    /// Binds the sockets, and installs the rules that catch packets if the configuration has any.
    ///
    /// # Errors
    /// Which address, and what the system said.
    pub fn new(config: &config::Overlay, on_crash: OnCrash) -> anyhow::Result<Self> {
        let bind = |address: &SocketAddr| {
            sockopt::listen(*address, &sockopt::ListenOptions::default())
                .with_context(|| format!("[overlay] listen = \"{address}\""))
        };
        let listeners: Vec<TcpListener> = config.listen.iter().map(bind).collect::<anyhow::Result<_>>()?;
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let dialled = config.nodes.iter().filter(|node| node.name != config.name);
        let datagrams = datagrams::bind(&addresses, dialled.flat_map(|node| node.addresses.clone()));
        let packets = packets::Bound::new(config, on_crash)?;
        Ok(Self { config: config.clone(), listeners, datagrams, packets })
    }

    /// Returns the capabilities that [`Bound::answer_kernel`] needs.
    pub fn needs(&self) -> CapabilitySet {
        self.packets.as_ref().map_or(CapabilitySet::empty(), |_| packets::NEEDED)
    }

    /// Starts the thread that answers the kernel about packets. It keeps the capabilities that the caller has now.
    ///
    /// # Errors
    /// Fails if the system provides no thread.
    pub fn answer_kernel(&mut self) -> anyhow::Result<()> {
        self.packets.as_mut().map_or(Ok(()), packets::Bound::answer_kernel)
    }

    /// Starts the threads. Each delivery is checked by the current rules of `config`, which reloads change. `next_id`
    /// numbers the flows that are delivered.
    ///
    /// # Errors
    /// Fails if the node's key is wrong, or the system provides no thread.
    pub fn start(self, config: Arc<ArcSwap<config::Config>>, next_id: NextId) -> anyhow::Result<Overlay> {
        let (events, inbox) = mpsc::channel(control::EVENTS_MAX);
        let (requests, orders) = mpsc::channel(REQUESTS_MAX);
        let mut shared = Shared::new(&self.config, (config, next_id), events, self.datagrams)?;
        let packets = self.packets.map(|packets| packets.start(&mut shared));
        let shared = Arc::new(shared);
        let (catching, ways) = packets.map(|packets| packets.run(&shared, &requests)).unzip();
        let addresses = self.listeners.iter().map(TcpListener::local_addr).collect::<io::Result<_>>()?;
        let (stop, stopped) = watch::channel(false);
        let stopped_datagrams = Arc::new(AtomicBool::new(false));
        let threads = vec![
            datagram_thread(shared.clone(), stopped_datagrams.clone())?,
            paced_thread(shared.clone(), stopped_datagrams.clone())?,
            thread("overlay-control", control::run(shared.clone(), inbox, stopped.clone()))?,
            thread(
                "overlay-flows",
                serve(shared.clone(), self.listeners, orders, ways.unwrap_or_default(), stopped),
            )?,
        ];
        let entry = Arc::new(Entry { shared, requests });
        let catching = Mutex::new(catching);
        Ok(Overlay { entry, addresses, stop, stopped_datagrams, threads: Mutex::new(threads), catching })
    }
}

fn thread(name: &str, task: impl Future<Output = ()> + Send + 'static) -> anyhow::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot make an event loop for the overlay")?;
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || runtime.block_on(task));
    spawned.context("cannot start a thread for the overlay")
}

fn datagram_thread(shared: Arc<Shared>, stopped: Arc<AtomicBool>) -> anyhow::Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name("overlay-datagrams".to_owned());
    let spawned = thread.spawn(move || datagrams::run(&shared, &stopped));
    spawned.context("cannot start a thread for the overlay's datagrams")
}

fn paced_thread(shared: Arc<Shared>, stopped: Arc<AtomicBool>) -> anyhow::Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name("overlay-paced".to_owned());
    let spawned = thread.spawn(move || paced::run(&shared, &stopped));
    spawned.context("cannot start a thread for the overlay's paced links")
}

impl Overlay {
    /// Returns the entry for workers and the admin interface.
    pub fn entry(&self) -> Arc<Entry> {
        self.entry.clone()
    }

    /// Returns the ledger of the flows that are delivered here.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.entry.shared.ledger
    }

    /// Returns the addresses that neighbours dial.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Sets how sockets are dialled from now on.
    pub fn set_dialing(&self, dialing: Dialing) {
        self.entry.shared.dialing.store(Arc::new(dialing));
    }

    /// Ends all links and sessions: their applications see a reset.
    pub fn stop(&self) {
        // Catching stops first: packets caught from now on could no longer be carried.
        drop(lock(&self.catching).take());
        let _ = self.stop.send(true);
        self.stopped_datagrams.store(true, Relaxed);
        let until = Instant::now() + STOP_PATIENCE;
        for thread in lock(&self.threads).drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            if thread.is_finished() && thread.join().is_err() {
                tracing::error!("a thread of the overlay ended by a panic");
            }
        }
    }
}

impl Entry {
    /// Returns the counts of whole packets. `None`: the node has no `[[overlay.packets]]`.
    pub fn packets(&self) -> Option<CaughtView> {
        self.shared.packets.as_ref().map(|packets| status::caught(&packets.counters))
    }

    /// Returns the counts of paced links. `None`: the node declares none.
    pub fn paced(&self) -> Option<PacedTotals> {
        paced::totals(&self.shared)
    }

    /// Returns the counts of packets over subgraphs.
    pub fn spread(&self) -> SpreadView {
        status::spread(&self.shared.datagrams)
    }

    /// Returns the metric name and the count of each change of the paths that flows use.
    pub fn path_counts(&self) -> [(&'static str, u64); 3] {
        let counters = &self.shared.counters;
        [
            ("resumed", counters.sessions_resumed.load(Relaxed)),
            ("opened", counters.paths_opened.load(Relaxed)),
            ("leg_changed", self.shared.datagrams.legs.moves.load(Relaxed)),
        ]
    }

    /// Returns the counts of packets over subgraphs, by service.
    pub fn services(&self) -> Vec<ServiceCountView> {
        status::counted(&self.shared.datagrams)
    }

    /// Returns the state of the overlay. `None`: it is stopping.
    pub async fn status(&self) -> Option<Status> {
        let (reply, answer) = oneshot::channel();
        self.shared.control.send(Event::Status(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Sends an echo request to a node, by name, along the path that flows would take.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn ping(&self, node: &str) -> Result<PingView, String> {
        let to = self.other(node)?;
        let identity = &self.shared.identity;
        let stopping = || "the overlay is stopping".to_owned();
        let (reply, answer) = oneshot::channel();
        self.shared.control.send(Event::Ping(to, reply)).await.map_err(|_| stopping())?;
        let echo =
            timeout(PING_TIMEOUT, answer).await.map_err(|_| format!("no answer from {node} in 3 s"))?;
        let Echo { path, rtt } = echo.map_err(|_| stopping())??;
        let path = control::names(identity, &path);
        Ok(PingView { path, links: Vec::new(), rtt_ms: rtt.as_secs_f64() * 1000.0 })
    }

    /// Sends an echo request to a node, by name, over the links that packets of this service would use.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn ping_by(&self, node: &str, service: &Service) -> Result<PingView, String> {
        let to = self.other(node)?;
        let since = Instant::now();
        let Pinged { links, answer } = datagrams::ping(&self.shared, to, service, datagrams::ECHO_BYTES)?;
        let answer = timeout(PING_TIMEOUT, answer).await;
        answer
            .map_err(|_| format!("no answer from {node} in 3 s"))?
            .map_err(|_| "too many pings".to_owned())?;
        let rtt_ms = since.elapsed().as_secs_f64() * 1000.0;
        let named = |(from, to)| [from, to].map(|node| self.shared.identity.name(node));
        Ok(PingView { path: Vec::new(), links: links.into_iter().map(named).collect(), rtt_ms })
    }

    /// Returns the links that packets of a service to a node would use now.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub fn way(&self, node: &str, service: &Service) -> Result<WayView, String> {
        let (links, named) = datagrams::links(&self.shared, self.other(node)?, service)?;
        let name = |(from, to)| [from, to].map(|node| self.shared.identity.name(node));
        Ok(WayView {
            kind: service.kind.name().to_owned(),
            dissemination: service.dissemination.name().to_owned(),
            named: named.name().to_owned(),
            links: links.into_iter().map(name).collect(),
        })
    }

    /// Measures a service by a steady stream of echo requests.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn bench_packets(
        &self,
        node: &str,
        service: &Service,
        duration: Duration,
        per_second: u32,
    ) -> Result<PacketBenchView, String> {
        echoes::run(&self.shared, self.other(node)?, service, duration, per_second).await
    }

    /// Returns another node of the overlay by its name.
    fn other(&self, node: &str) -> Result<NodeId, String> {
        let identity = &self.shared.identity;
        let to = identity.node_named(node).ok_or_else(|| format!("the overlay has no node '{node}'"))?;
        if to == identity.own() {
            return Err(format!("'{node}' is this node itself"));
        }
        Ok(to)
    }
}

impl Entry {
    /// Changes the settings of the link to a neighbour.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn set_link(&self, neighbour: &str, setting: LinkSetting) -> Result<LinkSettingView, String> {
        let to = self.other(neighbour)?;
        let stopping = |_| "the overlay is stopping".to_owned();
        let (reply, answer) = oneshot::channel();
        self.shared.control.send(Event::SetLink(to, setting, reply)).await.map_err(|_| stopping(()))?;
        answer.await.map_err(|_| stopping(()))
    }

    /// Floods a session to a node for this time, at most at this rate (bits per second). Returns what arrived.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn bench(
        &self,
        node: &str,
        duration: Duration,
        rate: Option<u64>,
    ) -> Result<BenchView, String> {
        bench::run(&self.requests, node, duration, rate).await
    }
}

impl OverlayEntry for Entry {
    fn open(&self, order: OverlayOrder) -> Entering {
        let requests = self.requests.clone();
        Box::pin(async move {
            if Reserved::of(&order.destination).is_some() {
                let detail = "this name stands for something inside the overlay and is not a host";
                return Err(Failure::new(EndReason::PolicyDenied, detail));
            }
            let internal =
                |what: &str, error: io::Error| Failure::new(EndReason::Internal, format!("{what}: {error}"));
            let (near, leg) = pair().map_err(|error| internal("a socket to the overlay", error))?;
            let (reply, answer) = oneshot::channel();
            let stopping = || Failure::new(EndReason::Shutdown, "the overlay is stopping");
            let spread = (order.carrier.mode != Mode::Shortest).then(Arc::<Spread>::default);
            let request = Request { order, leg, spread: spread.clone(), reply };
            requests.send(request).await.map_err(|_| stopping())?;
            let _session = answer.await.map_err(|_| stopping())??;
            Ok(Entered { stream: near, spread })
        })
    }

    fn associate(&self, order: OverlayOrder) -> Associating {
        Box::pin(udp::associate(self.shared.clone(), self.requests.clone(), order))
    }
}

/// Returns two connected sockets over loopback: the worker's end and ours. They are TCP, so that resets pass as resets.
fn pair() -> io::Result<(std::net::TcpStream, std::net::TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = std::net::TcpStream::connect(listener.local_addr()?)?;
    let own = near.local_addr()?;
    // Another process of this host may have connected first.
    for _ in 0..16 {
        let (leg, peer) = listener.accept()?;
        if peer == own {
            for socket in [&near, &leg] {
                socket.set_nonblocking(true)?;
                sockopt::set_tcp_nodelay(socket, true)?;
            }
            return Ok((near, leg));
        }
    }
    Err(io::Error::other("others connect to it"))
}

/// The task of the thread of flows.
async fn serve(
    shared: Arc<Shared>,
    listeners: Vec<TcpListener>,
    mut orders: mpsc::Receiver<Request>,
    ways: Vec<impl Future<Output = ()> + Send + 'static>,
    mut stop: watch::Receiver<bool>,
) {
    // It is set once: this is the only thread of flows.
    let _ = shared.flows.set(tokio::runtime::Handle::current());
    for (node, _) in shared.identity.members().filter(|(node, _)| *node != shared.identity.own()) {
        tokio::spawn(pool::maintain(shared.clone(), node));
    }
    tokio::spawn(paced::serve(shared.clone()));
    tokio::spawn(udp::serve(shared.clone()));
    for way in ways {
        tokio::spawn(way);
    }
    for listener in listeners {
        match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => {
                tokio::spawn(accept(shared.clone(), listener));
            }
            Err(error) => tracing::error!(%error, "cannot watch the overlay's listener"),
        }
    }
    loop {
        tokio::select! {
            request = orders.recv() => match request {
                Some(request) => {
                    tokio::spawn(ingress::run(shared.clone(), request));
                }
                None => return,
            },
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

async fn accept(shared: Arc<Shared>, listener: tokio::net::TcpListener) {
    let identity = &shared.identity;
    let members = identity.members().filter_map(|(node, _)| identity.member(node));
    let addresses = members.flat_map(|member| member.addresses.clone());
    let places = places::Places::new(addresses.map(|address| address.ip()));
    loop {
        match listener.accept().await {
            Ok((tcp, peer)) => {
                // A flood is closed at once. Otherwise neighbours would wait behind it in the kernel's accept queue.
                let Some(place) = places.take(peer.ip()) else {
                    shared.counters.strangers.fetch_add(1, Relaxed);
                    continue;
                };
                let shared = shared.clone();
                tokio::spawn(async move {
                    let accepted = shared.accept(tcp).await;
                    drop(place);
                    match accepted {
                        Ok((stream, neighbour, purpose)) => arrived(shared, stream, neighbour, purpose).await,
                        Err(error) => {
                            shared.counters.strangers.fetch_add(1, Relaxed);
                            tracing::debug!(%peer, error = format!("{error:#}"), "a connection that is not a neighbour's");
                        }
                    }
                });
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// Handles a connection that a neighbour has dialled.
async fn arrived(
    shared: Arc<Shared>,
    stream: stream::Stream,
    neighbour: sidetrack_core::overlay::NodeId,
    purpose: Purpose,
) {
    match purpose {
        Purpose::Control | Purpose::MovedControl => match stream.park() {
            Ok(stream) => {
                let (gone, _) = oneshot::channel();
                let stream = Box::new(stream);
                let event = match purpose {
                    Purpose::MovedControl => Event::Moved { neighbour, stream, dialled: false },
                    _ => Event::Connected { neighbour, stream, dialled: false, gone },
                };
                // An error only means that the control thread has ended.
                let _ = shared.control.send(event).await;
            }
            Err(error) => tracing::error!(%error, "cannot hand over a control connection"),
        },
        Purpose::FromDialer => circuit::wait_and_serve(shared, stream, neighbour).await,
        Purpose::FromAcceptor => shared.pool.put(neighbour, stream),
    }
}
