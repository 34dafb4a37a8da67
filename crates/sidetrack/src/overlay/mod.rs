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
mod door;
mod echoes;
mod endpoint;
mod entry;
mod flows;
mod groups;
pub mod identity;
mod ingress;
mod lanes;
mod mapped;
mod moved;
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
pub use entry::Entry;
pub use groups::{GroupTotals, GroupView};
pub use mapped::GraphLinkView;
pub use moved::{MovedSession, STATE_MAX, SessionFacts};
pub use paced::{PacedTotals, PacedView};
pub use packets::QueueSockets;
pub use setting::{LinkSetting, LinkSettingView};
pub use status::{
    CaughtView, DatagramsView, LegView, LinkView, PathView, PingView, RealTimeView, ServiceCountView,
    ServiceView, SessionPathsView, SpreadView, Status, WayView,
};
pub use trust::{FlowsView, TolerantView};

use crate::carry::Dialing;
use crate::config::{self, OnCrash};
use crate::live::{Ledger, Spread};
use anyhow::Context as _;
use arc_swap::{ArcSwap, ArcSwapOption};
use control::Event;
use datagrams::Pinged;
use entry::{Here, Place};
use shared::{NextId, Shared};
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Most flows that wait to be handed to the overlay.
const REQUESTS_MAX: usize = 4096;

/// Most sessions of another process that wait for their tasks; the thread that reads them waits when there are more.
const COMING_MAX: usize = 64;

/// How long the threads may take to end.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// How long sessions may take to leave their tasks. One that has not left is cut, so this is long also for a starved machine. Far
/// nodes wait for a path for 15 s.
const LEFT_WITHIN: Duration = Duration::from_secs(8);

/// Pause between two looks at threads and sessions that end.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Sockets of another process of this node, with their addresses.
#[derive(Default)]
pub struct Given {
    /// Where neighbours dial.
    pub listeners: Vec<(SocketAddr, TcpListener)>,
    /// For datagrams of links.
    pub datagrams: Vec<(SocketAddr, UdpSocket)>,
    /// What catches packets.
    pub packets: Option<QueueSockets>,
    /// Leads to the overlay of the other process until that lets go of it.
    pub door: Option<OwnedFd>,
}

/// What another process needs to continue the overlay.
pub struct Offered {
    /// Copies of the sockets.
    pub listeners: Vec<(SocketAddr, OwnedFd)>,
    /// Copies of the sockets.
    pub datagrams: Vec<(SocketAddr, OwnedFd)>,
    /// What catches packets, if anything does.
    pub packets: Option<QueueSockets>,
    /// Leads to the overlay of this process.
    pub door: OwnedFd,
}

/// The sockets of an overlay node: bound while there are rights.
pub struct Bound {
    config: config::Overlay,
    listeners: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
    packets: Option<packets::Bound>,
    /// Another process has the links until it lets go of them. The door leads there.
    door: Option<OwnedFd>,
}

/// The overlay of a node, in this process or in another one.
pub struct Overlay {
    entry: Arc<Entry>,
    addresses: Vec<SocketAddr>,
    start: Start,
    dialing: ArcSwapOption<Dialing>,
    running: Mutex<Option<Running>>,
    /// Sessions that have left their tasks, until it is certain which process continues them.
    moved: Mutex<Vec<MovedSession>>,
    /// What counts the paths of sessions that have come, until their flows come: by the address of the worker's end.
    spreads: Mutex<BTreeMap<SocketAddr, Arc<Spread>>>,
}

/// What the threads are started with, also a second time.
struct Start {
    config: config::Overlay,
    /// The configuration in force, and what numbers flows.
    of_node: (Arc<ArcSwap<config::Config>>, NextId),
    ledger: Arc<Ledger>,
    counters: Arc<shared::Counters>,
    listeners: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
    packets: Mutex<Option<packets::Bound>>,
    /// Conversations of whole packets that the threads before, or another process, have seen.
    conversations: Mutex<Option<Vec<u8>>>,
}

/// The threads.
struct Running {
    here: Here,
    stop: watch::Sender<bool>,
    stopped_datagrams: Arc<AtomicBool>,
    /// Those for flows and control, and those for datagrams.
    threads: [Vec<JoinHandle<()>>; 2],
    catching: Option<packets::Catching>,
    /// Brings sessions of another process. `None`: no more come.
    coming: mpsc::Sender<Option<MovedSession>>,
    /// Answers another process.
    doors: Vec<door::Open>,
}

/// Takes what was bound to an address of the configuration. Port 0 fits any.
fn take<T>(from: &mut Vec<(SocketAddr, T)>, address: SocketAddr) -> Option<T> {
    let fits = |bound: SocketAddr| address == bound || address.port() == 0 && address.ip() == bound.ip();
    let at = from.iter().position(|(bound, _)| fits(*bound))?;
    Some(from.swap_remove(at).1)
}

impl Bound {
    /// Binds the sockets, and installs the rules that catch packets if the configuration has any. `given`: sockets of another
    /// process, which has the links now.
    ///
    /// # Errors
    /// Which address, and what the system said.
    pub fn new(config: &config::Overlay, on_crash: OnCrash, given: Option<Given>) -> anyhow::Result<Self> {
        let Given { mut listeners, mut datagrams, packets, door } = given.unwrap_or_default();
        let mut bind = |address: &SocketAddr| match take(&mut listeners, *address) {
            Some(listener) => Ok(listener),
            None => sockopt::listen(*address, &sockopt::ListenOptions::default())
                .with_context(|| format!("[overlay] listen = \"{address}\"")),
        };
        let listeners: Vec<TcpListener> =
            config.listen.iter().map(&mut bind).collect::<anyhow::Result<_>>()?;
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<io::Result<Vec<_>>>()?;
        let dialled = config.nodes.iter().filter(|node| node.name != config.name);
        let datagrams = datagrams::bind(&addresses, dialled.flat_map(|node| node.addresses.clone()), |at| {
            take(&mut datagrams, at)
        });
        let packets = packets::Bound::new(config, on_crash, packets, door.is_some())?;
        // A key that is wrong must be known before another process lets go of its links.
        identity::Identity::new(config)?;
        Ok(Self { config: config.clone(), listeners, datagrams, packets, door })
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

    /// Starts the threads, or waits for [`Overlay::begin`] while another process has the links. Each delivery is checked by the
    /// current rules of `config`, which reloads change. `next_id` numbers the flows that are delivered.
    ///
    /// # Errors
    /// Fails if the node's key is wrong, or the system provides no thread.
    pub fn start(self, config: Arc<ArcSwap<config::Config>>, next_id: NextId) -> anyhow::Result<Overlay> {
        let addresses = self.listeners.iter().map(TcpListener::local_addr).collect::<io::Result<_>>()?;
        let waits = self.door.is_some();
        let door = self.door.map(door::Door::new).transpose()?.map(Arc::new);
        let overlay = Overlay {
            entry: Arc::new(Entry::new(Place::Elsewhere(door))),
            addresses,
            start: Start {
                config: self.config,
                of_node: (config, next_id),
                ledger: Arc::default(),
                counters: Arc::default(),
                listeners: self.listeners,
                datagrams: self.datagrams,
                packets: Mutex::new(self.packets),
                conversations: Mutex::default(),
            },
            dialing: ArcSwapOption::empty(),
            running: Mutex::default(),
            moved: Mutex::default(),
            spreads: Mutex::default(),
        };
        if !waits {
            overlay.begin(false)?;
        }
        Ok(overlay)
    }
}

impl Start {
    /// Starts the threads. `comes`: sessions of another process come.
    fn run(&self, dialing: Option<Arc<Dialing>>, comes: bool) -> anyhow::Result<Running> {
        let copies = |sockets: &[TcpListener]| sockets.iter().map(TcpListener::try_clone).collect();
        let listeners: io::Result<Vec<_>> = copies(&self.listeners);
        let datagrams: io::Result<Vec<_>> = self.datagrams.iter().map(UdpSocket::try_clone).collect();
        let (listeners, datagrams) = (listeners?, datagrams?);
        let (events, inbox) = mpsc::channel(control::EVENTS_MAX);
        let (requests, orders) = mpsc::channel(REQUESTS_MAX);
        let (coming, came) = mpsc::channel(COMING_MAX);
        let mut shared = Shared::new(&self.config, self.of_node.clone(), events, datagrams)?;
        (shared.ledger, shared.counters) = (self.ledger.clone(), self.counters.clone());
        shared.sessions.set_coming(comes);
        dialing.into_iter().for_each(|dialing| shared.dialing.store(dialing));
        let again = lock(&self.packets).as_ref().map(packets::Bound::again);
        let packets = std::mem::replace(&mut *lock(&self.packets), again);
        let known = lock(&self.conversations).take();
        let packets = packets.map(|packets| packets.start(&mut shared, known.as_deref()));
        let shared = Arc::new(shared);
        let (catching, ways) = packets.map(|packets| packets.run(&shared, &requests)).unzip();
        let catching = catching.flatten();
        let (stop, stopped) = watch::channel(false);
        let stopped_datagrams = Arc::new(AtomicBool::new(false));
        let of_datagrams = vec![
            datagram_thread(shared.clone(), stopped_datagrams.clone())?,
            paced_thread(shared.clone(), stopped_datagrams.clone())?,
        ];
        let flows = flows::serve(
            shared.clone(),
            listeners,
            (orders, came),
            ways.unwrap_or_default(),
            stopped.clone(),
        );
        let threads = [
            vec![
                thread("overlay-control", control::run(shared.clone(), inbox, stopped))?,
                thread("overlay-flows", flows)?,
            ],
            of_datagrams,
        ];
        let here = Here { shared, requests };
        Ok(Running { here, stop, stopped_datagrams, threads, catching, coming, doors: Vec::new() })
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
        &self.start.ledger
    }

    /// Returns the addresses that neighbours dial.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Sets how sockets are dialled from now on.
    pub fn set_dialing(&self, dialing: Dialing) {
        let dialing = Arc::new(dialing);
        self.dialing.store(Some(dialing.clone()));
        if let Some(running) = &*lock(&self.running) {
            running.here.shared.dialing.store(dialing);
        }
    }

    /// Starts the threads: links come up. `comes`: sessions of another process follow by [`Overlay::adopt`].
    ///
    /// # Errors
    /// Fails if the system provides no thread or no copy of a socket.
    pub fn begin(&self, comes: bool) -> anyhow::Result<()> {
        let running = self.start.run(self.dialing.load_full(), comes)?;
        let here = running.here.clone();
        *lock(&self.running) = Some(running);
        self.entry.set(Place::Here(here));
        Ok(())
    }

    /// Starts the threads unless they run: another process has let go of its links, or has ended. `comes`: as in
    /// [`Overlay::begin`].
    ///
    /// # Errors
    /// As [`Overlay::begin`].
    pub fn take_over(&self, comes: bool) -> anyhow::Result<()> {
        let runs = lock(&self.running).is_some();
        if runs { Ok(()) } else { self.begin(comes) }
    }

    /// Continues a session of another process. Blocks while many wait.
    pub fn adopt(&self, session: MovedSession) {
        lock(&self.spreads).extend(session.spread());
        self.comes(Some(session));
    }

    /// Takes what counts the paths of a session that has come. `near`: the address of the worker's end of its connection.
    pub fn take_spread(&self, near: SocketAddr) -> Option<Arc<Spread>> {
        lock(&self.spreads).remove(&near)
    }

    /// No flow comes any more: the rest of [`Overlay::take_spread`] is forgotten.
    pub fn forget_spreads(&self) {
        lock(&self.spreads).clear();
    }

    /// No more sessions come.
    pub fn all_came(&self) {
        self.comes(None);
    }

    fn comes(&self, session: Option<MovedSession>) {
        let coming = lock(&self.running).as_ref().map(|running| running.coming.clone());
        // Without threads the node stops, and the session ends with its socket.
        if let Some(coming) = coming {
            let _ = coming.blocking_send(session);
        }
    }

    /// Returns what another process needs to continue the overlay. Its flows come through the door until [`Overlay::let_go`].
    ///
    /// # Errors
    /// Fails if the system provides no descriptor or no thread, or if the overlay is not in this process.
    pub fn offered(&self) -> anyhow::Result<Offered> {
        let mut running = lock(&self.running);
        let running = running.as_mut().context("the overlay is not in this process")?;
        let Start { listeners, datagrams, packets, .. } = &self.start;
        let listener = |one: &TcpListener| Ok((one.local_addr()?, one.try_clone()?.into()));
        let socket = |one: &UdpSocket| Ok((one.local_addr()?, one.try_clone()?.into()));
        let (open, door) = door::open(running.here.clone())?;
        running.doors.push(open);
        Ok(Offered {
            listeners: listeners.iter().map(listener).collect::<io::Result<_>>()?,
            datagrams: datagrams.iter().map(socket).collect::<io::Result<_>>()?,
            packets: lock(packets).as_ref().map_or(Ok(None), packets::Bound::sockets)?,
            door,
        })
    }

    /// Ends the links, for another process that continues the overlay. Sessions leave their tasks and wait here. Returns how many.
    pub fn let_go(&self) -> usize {
        let Some(running) = lock(&self.running).take() else { return 0 };
        // New requests wait until it is certain which process goes on.
        self.entry.set(Place::Elsewhere(None));
        let sessions = &running.here.shared.sessions;
        let until = Instant::now() + LEFT_WITHIN;
        // An upgrade may follow another one at once.
        while sessions.are_coming() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        sessions.leave_all();
        while sessions.len() > 0 && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        let (left, moved) = (sessions.len(), sessions.take_moved());
        if left > 0 {
            tracing::error!("{left} sessions of the overlay did not leave in time, and end");
        }
        let packets = running.here.shared.packets.clone();
        // The threads for datagrams end later: what they still read is only lost.
        running.end(false);
        *lock(&self.start.conversations) = packets.map(|packets| packets.known());
        let count = moved.len();
        lock(&self.moved).extend(moved);
        count
    }

    /// Returns the conversations of whole packets, once this process has let go.
    pub fn conversations(&self) -> Option<Vec<u8>> {
        lock(&self.start.conversations).clone()
    }

    /// Sets the conversations of whole packets that another process has seen, before the start here.
    pub fn set_conversations(&self, known: Vec<u8>) {
        *lock(&self.start.conversations) = Some(known);
    }

    /// Another process has the overlay for good: flows that are asked for here are refused.
    pub fn leave(&self) {
        self.entry.set(Place::Stopped);
        lock(&self.start.packets).take().iter().for_each(packets::Bound::leave);
    }

    /// Takes the sessions that wait here: another process continues them.
    pub fn take_moved(&self) -> Vec<MovedSession> {
        std::mem::take(&mut lock(&self.moved))
    }

    /// Starts the threads again with the sessions that wait here: no other process continues them. Does nothing if they run.
    ///
    /// # Errors
    /// As [`Overlay::begin`].
    pub fn go_on(&self) -> anyhow::Result<()> {
        if let Some(running) = &mut *lock(&self.running) {
            running.doors.clear();
            return Ok(());
        }
        self.begin(true)?;
        self.take_moved().into_iter().for_each(|session| self.adopt(session));
        self.all_came();
        // Their flows are here.
        self.forget_spreads();
        Ok(())
    }

    /// Ends all links and sessions: their applications see a reset.
    pub fn stop(&self) {
        self.entry.set(Place::Stopped);
        // The rules that catch packets go with the threads.
        drop(lock(&self.start.packets).take());
        if let Some(running) = lock(&self.running).take() {
            running.end(true);
        }
        drop(self.take_moved());
    }
}

impl Running {
    /// Ends the threads. `all`: waits for those of datagrams, too.
    fn end(self, all: bool) {
        // Catching stops first: packets caught from now on could no longer be carried.
        drop((self.catching, self.doors));
        let _ = self.stop.send(true);
        self.stopped_datagrams.store(true, Relaxed);
        let until = Instant::now() + STOP_PATIENCE;
        let [threads, of_datagrams] = self.threads;
        for thread in threads.into_iter().chain(of_datagrams.into_iter().filter(|_| all)) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::park_timeout(LOOK_AGAIN);
            }
            if thread.is_finished() && thread.join().is_err() {
                tracing::error!("a thread of the overlay ended by a panic");
            }
        }
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
