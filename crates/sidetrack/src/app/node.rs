//! What a node is made of.

use super::agreement;
use super::kernel::{KernelFlows, Paths};
use super::paths;
use super::ports;
use super::rights;
use super::sockets::{self, Bound};
use super::threads::{Fleet, Serving};
use crate::agreement::InForce;
use crate::carry::Dialing;
use crate::carry::tunnel::pool::READY_MAX as POOL_READY_MAX;
use crate::carry::warm::Room;
use crate::config::{Config, Listener, ListenerKind, OnCrash};
use crate::engine;
use crate::function::Function;
use crate::function::container::Containers;
use crate::http::sheet;
use crate::keeper::{Begin, Keeper, Order};
use crate::live::{Clock, Ledger};
use crate::overlay;
use crate::process::Owners;
use crate::rights::DataUser;
use crate::steer::{Host, OWN_MARK, Steer, TABLE};
use crate::worker::{Admission, FAR_WAITING_MAX, Shared};
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_core::flow::{FlowId, Process};
use sidetrack_core::limit::Budget;
use sidetrack_core::time::Instant;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine::{self, Kind};
use sidetrack_sys::conntrack::Events;
use sidetrack_sys::nft::{Family, OwnError, OwnedTable};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;

/// Descriptors kept back from flows: listeners, epoll, records, admin clients, resolver.
const DESCRIPTOR_RESERVE: u64 = 128;

/// The listeners of a configuration, each with its sockets.
type Listeners = Vec<(Listener, Vec<Bound>)>;

/// A listener of the configuration with the addresses that serve it.
pub(super) struct Served {
    pub listener: Listener,
    pub serving: Vec<Serving>,
}

/// Everything that needs rights: made before they are given up.
pub struct Prepared {
    workers: usize,
    steered: Steered,
    overlay: Option<overlay::Bound>,
    engines: engine::Opened,
    containers: Option<Arc<Containers>>,
    agreement: Arc<InForce>,
    writer: Option<agreement::Writer>,
}

/// A node at work.
pub struct Node {
    pub(super) shared: Arc<Shared>,
    pub(super) fleet: Mutex<Option<Fleet>>,
    pub(super) ledgers: Vec<Arc<Ledger>>,
    pub(super) kernel: Arc<KernelFlows>,
    pub(super) served: Mutex<Vec<Served>>,
    pub(super) steered: Steered,
    pub(super) events: Mutex<Option<Events>>,
    recording: Mutex<Option<JoinHandle<()>>>,
    pub(super) subscribed: AtomicBool,
    /// No connection is to be led here any more.
    pub(super) leaving: AtomicBool,
    pub(super) workers: usize,
    overlay: Option<overlay::Overlay>,
    engines: engine::Engines,
    /// Ports of paths that services asked for.
    paths: Mutex<Vec<SocketAddr>>,
    /// Where people and services ask us, by TCP.
    windows: Mutex<Vec<SocketAddr>>,
    /// Whoever reads an agreement and puts it in force does so alone: what was read last is in force last.
    pub(super) agreeing: Mutex<()>,
    writer: Option<agreement::Writer>,
}

/// Our side of what the kernel does for us.
pub(super) struct Steered {
    pub keeper: Option<Arc<Keeper>>,
    /// What the keeper was started for.
    pub may: Begin,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Prepared {
    /// Starts the processes that keep rights and become this user, and opens what takes rights to open.
    ///
    /// # Errors
    /// What cannot be had, and what the system said.
    pub fn new(config: &Config, user: Option<&DataUser>) -> anyhow::Result<Self> {
        let workers = match config.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            workers => workers,
        };
        ports::refuse_taken(config)?;
        let agreement = agreement::read(config, &InForce::default())?;
        let may_steer = may_steer(config)?;
        let overlay = config
            .overlay
            .as_ref()
            .map(|overlay| overlay::Bound::new(overlay, config.on_crash))
            .transpose()?;
        let engines = engine::Opened::new(&config.listeners, workers, OWN_MARK.value)?;
        let mut steered = Steered { keeper: None, may: Begin::default() };
        if may_steer {
            // Also where there is nothing to steer yet: a reload may bring it, and rules may ask for processes of others.
            let begin =
                Begin { closed: config.on_crash == OnCrash::Closed, owners: config.policy.asks_process() };
            steered.keeper = Some(Arc::new(Keeper::start(begin, user).context("cannot start the keeper")?));
            steered.may = begin;
            if Steer::new(config, &configured(config), 0, &Host::here())?.is_empty() {
                remove_orphan();
            }
        }
        let containers = super::containers::start(config, user)?;
        let file = config.agreement.as_ref().zip(user);
        let writer = file.map(|(file, user)| agreement::Writer::start(&file.path, user)).transpose()?;
        Ok(Self { workers, steered, overlay, engines, containers, agreement, writer })
    }

    /// From here on peers' bytes are read: the process becomes the user of the data plane and keeps what marked and transparent
    /// sockets and low ports need. `socket`: its admin socket. To be called while it has one thread.
    ///
    /// # Errors
    /// What could not be given up.
    pub fn give_up_rights(
        &mut self,
        config: &Config,
        file: &Path,
        user: Option<&DataUser>,
        socket: Option<&Path>,
    ) -> anyhow::Result<()> {
        let was_root = nix::unistd::geteuid().is_root();
        let of_packets = self.overlay.as_ref().map_or(CapabilitySet::empty(), overlay::Bound::needs);
        rights::give_up(config, file, user, of_packets)?;
        // A guard removes the socket for an unprivileged user.
        paths::restrict(config, file, socket.filter(|_| user.is_none()));
        if was_root {
            confine::close_memory().context("PR_SET_DUMPABLE")?;
        }
        let kind = if engine_listeners(config).next().is_some() { Kind::DataWithEngine } else { Kind::Data };
        if let Err(error) = confine::confine(kind) {
            tracing::warn!(
                "system calls are not confined: {error}; on a kernel with CONFIG_SECCOMP_FILTER they are"
            );
        }
        if let Some(overlay) = &mut self.overlay {
            overlay.answer_kernel()?;
        }
        let held = caps::capabilities().context("capabilities")?.permitted;
        caps::keep_only(held - of_packets).context("cannot give up capabilities")
    }

    /// Binds all listeners; sockets that share a port later have to be made by the same user (SO_REUSEPORT).
    fn bind(&self, config: &Config) -> anyhow::Result<Listeners> {
        let mut listeners = Listeners::new();
        for listener in &config.listeners {
            let own = bound_addresses(&listeners);
            let bound = sockets::bind(listener, config, self.workers, &own)?;
            listeners.push((listener.clone(), bound));
        }
        Ok(listeners)
    }

    /// Lets the keeper do what the configuration asks of the kernel.
    fn steer(&self, config: &Config, bound: &Listeners) -> anyhow::Result<(Paths, Option<Events>)> {
        let mut paths = Paths::default();
        let addresses = addresses(bound.iter().flat_map(|(_, bound)| bound).map(|bound| &*bound.listening));
        let steer = Steer::new(config, &addresses, 0, &Host::here())?;
        if self.steered.keeper.is_none() {
            return Ok((paths, None));
        }
        let since = SystemTime::now();
        let mut events = None;
        if !steer.is_empty() {
            let listeners = bound.iter().flat_map(|(_, bound)| bound);
            let listeners: Vec<_> = listeners.filter_map(Bound::proof).collect();
            events = self.steered.steer(&steer, &listeners)?;
        }
        paths.learn(&steer, config, since);
        Ok((paths, events))
    }

    /// Binds the listeners, has the kernel lead flows to them, and starts the workers.
    ///
    /// # Errors
    /// Which listener or rule, and what the system said.
    pub fn start(self, config: Arc<ArcSwap<Config>>, nofile: u64) -> anyhow::Result<Node> {
        let bound = self.bind(&config.load())?;
        let (paths, events) = self.steer(&config.load(), &bound)?;
        let (budget, warm) = {
            let config = config.load();
            let warm = warm_room(&config, nofile, self.workers);
            sheet::allow(sheets(&config, nofile));
            (budget(&config, nofile, self.workers), usize::try_from(warm).unwrap_or(usize::MAX))
        };
        let owners = self.steered.keeper.clone().map_or(Owners::Ourselves, ask_keeper);
        // Workers may dial (their tunnels) before all listeners are known.
        let dialing = Dialing {
            mark: self.steered.keeper.as_ref().map(|_| OWN_MARK.value),
            own: Vec::new(),
            overlay: None,
        };
        let shared = Shared::new(config, dialing, owners, budget, Clock::start()).with_warm(warm);
        let shared = Arc::new(shared);
        super::containers::first(&shared, self.containers)?;
        shared.agreement.store(self.agreement);
        let fleet = Fleet::start(&shared, self.workers)?;
        let served = bound.into_iter().map(|(listener, bound)| {
            let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
            Served { listener, serving }
        });
        let engines = engines(self.engines, &shared)?;
        let numbers = shared.clone();
        let next_id = Arc::new(move || numbers.next_flow_id());
        let overlay =
            self.overlay.map(|overlay| overlay.start(shared.config.clone(), next_id)).transpose()?;
        let node = Node {
            served: Mutex::new(served.collect()),
            ledgers: fleet.ledgers().to_vec(),
            kernel: Arc::new(KernelFlows::new(paths, shared.clone(), self.steered.keeper.clone())),
            fleet: Mutex::new(Some(fleet)),
            shared,
            steered: self.steered,
            recording: Mutex::default(),
            subscribed: AtomicBool::new(events.is_some()),
            leaving: AtomicBool::new(false),
            events: Mutex::new(events),
            workers: self.workers,
            overlay,
            engines,
            paths: Mutex::default(),
            windows: Mutex::default(),
            agreeing: Mutex::default(),
            writer: self.writer,
        };
        node.set_dialing(&lock(&node.served));
        Ok(node)
    }
}

impl Node {
    /// The flows of each worker, those of the packet engine, those delivered for other nodes, and those of the kernel.
    pub fn ledgers(&self) -> Vec<Arc<Ledger>> {
        let delivered = self.overlay.as_ref().map(overlay::Overlay::ledger);
        let own = self.ledgers.iter().chain(self.engines.ledgers()).chain(delivered);
        own.chain([self.kernel.ledger()]).cloned().collect()
    }

    /// The listeners: name, kind, addresses.
    pub fn listeners(&self) -> Vec<(Arc<str>, &'static str, Vec<SocketAddr>)> {
        let served = lock(&self.served);
        let rows = served.iter().map(|served| {
            let addresses = match served.listener.kind {
                ListenerKind::Engine(_) => served.listener.addresses.clone(),
                _ => served.serving.iter().map(|serving| serving.listening.address).collect(),
            };
            (served.listener.name.clone(), served.listener.kind.intercept().as_str(), addresses)
        });
        rows.collect()
    }

    /// What serves the requests of each listener that serves them one by one.
    pub fn proxies(&self) -> Vec<super::caches::Named> {
        let served = lock(&self.served);
        let first = |served: &Served| served.serving.first().and_then(|one| one.listening.proxy().cloned());
        served.iter().filter_map(|served| Some((served.listener.name.clone(), first(served)?))).collect()
    }

    /// The functions of the configuration in force.
    pub fn functions(&self) -> Vec<Arc<Function>> {
        self.shared.functions.functions()
    }

    /// The clock of flows.
    pub(super) fn now(&self) -> Instant {
        self.shared.clock().now()
    }

    /// Worker threads.
    pub(super) const fn workers(&self) -> usize {
        self.workers
    }

    /// Whether a flow of the listener of this name is in flight.
    pub(super) fn has_flow(&self, listener: &str) -> bool {
        let of = |ledger: &Arc<Ledger>| {
            let flows = ledger.snapshot();
            flows.iter().any(|flow| flow.decided().is_some_and(|decided| *decided.flow.listener == *listener))
        };
        self.ledgers.iter().any(of)
    }

    /// Serves a listener that is in no configuration, as long as what it gives is there.
    ///
    /// # Errors
    /// We are shutting down.
    pub(super) fn serve(&self, bound: Bound) -> anyhow::Result<Serving> {
        let fleet = lock(&self.fleet);
        Ok(fleet.as_ref().context("sidetrack is shutting down")?.serve(bound))
    }

    /// The addresses of such listeners.
    pub(super) fn set_paths(&self, paths: Vec<SocketAddr>) {
        *lock(&self.paths) = paths;
        self.set_dialing(&lock(&self.served));
    }

    /// Our own ports that are no listeners for flows: no flow is led there.
    pub(super) fn set_windows(&self, windows: Vec<SocketAddr>) {
        *lock(&self.windows) = windows;
        self.set_dialing(&lock(&self.served));
    }

    /// What writes the agreement's file where this process may not make a file beside it.
    pub(super) const fn agreement_writer(&self) -> Option<&agreement::Writer> {
        self.writer.as_ref()
    }

    /// The data-flow agreement in force.
    pub(super) fn agreement(&self) -> &ArcSwap<InForce> {
        &self.shared.agreement
    }

    /// The number of a flow that somebody else carries.
    pub fn next_flow_id(&self) -> FlowId {
        self.shared.next_flow_id()
    }

    /// Says where we listen.
    pub fn announce(&self) {
        for (name, kind, addresses) in self.listeners() {
            for address in addresses {
                tracing::info!(listener = %name, kind, %address, "listening");
            }
        }
        for address in self.overlay.iter().flat_map(overlay::Overlay::addresses) {
            tracing::info!(kind = "overlay", %address, "listening");
        }
        tracing::info!("ready");
    }

    pub(super) fn set_dialing(&self, served: &[Served]) {
        let own = served.iter().flat_map(|served| &served.serving).map(|serving| serving.listening.address);
        let mark = self.steered.keeper.as_ref().map(|_| OWN_MARK.value);
        let mut dialing = Dialing { mark, own: own.collect(), overlay: None };
        dialing.own.extend(lock(&self.paths).iter());
        dialing.own.extend(lock(&self.windows).iter());
        if let Some(overlay) = &self.overlay {
            dialing.own.extend(overlay.addresses());
            overlay.set_dialing(dialing.clone());
            dialing.overlay = Some(overlay.entry());
        }
        self.shared.dialing.store(Arc::new(dialing));
    }

    /// Turns the ends of the kernel's flows into records, as a task of the caller's event loop.
    pub fn record_kernel_flows(&self) {
        if let Some(events) = lock(&self.events).take() {
            *lock(&self.recording) = Some(tokio::spawn(self.kernel.clone().record(events)));
        }
    }

    /// Gives those of the kernel's flows their records that have none yet. They go on.
    pub async fn end_kernel_flows(&self) {
        let recording = lock(&self.recording).take();
        if let Some(recording) = recording {
            self.kernel.stop();
            // A task that panicked has said so.
            let _ = recording.await;
        }
    }

    /// Brings the ledger of the kernel's flows up to date. Blocks for as long as the kernel takes to list them.
    pub fn look_at_kernel_flows(&self) {
        self.kernel.look();
    }

    /// Waits until the keeper is gone, which it never is by itself; says what that means. For ever without a keeper.
    pub async fn keeper_gone(&self, on_crash: OnCrash) -> String {
        let Some(keeper) = &self.steered.keeper else { return std::future::pending().await };
        let ended = match keeper.watch() {
            Ok(end) => wait_for(end).await,
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "cannot watch the keeper: its end would go unnoticed");
            return std::future::pending().await;
        }
        let how = keeper.ended().map_or_else(|| "it ended".to_owned(), |status| status.to_string());
        let traffic = match on_crash {
            OnCrash::Open => "its rules are gone: captured traffic goes past sidetrack",
            OnCrash::Closed => "its rules stay: captured traffic is blocked",
        };
        format!(
            "the keeper process, which holds the rights, is gone ({how}); {traffic} until sidetrack is started again, which \
             'Restart=on-failure' of systemd does"
        )
    }

    /// The way into the overlay, if this node is part of one.
    pub fn overlay(&self) -> Option<Arc<overlay::Entry>> {
        self.overlay.as_ref().map(overlay::Overlay::entry)
    }

    /// How many flows the workers carry.
    pub fn flows_in_flight(&self) -> usize {
        self.ledgers.iter().map(|ledger| ledger.len()).sum()
    }

    /// Stops accepting, gives every flow its end, stops the workers.
    pub fn stop(&self) {
        lock(&self.served).clear();
        self.engines.stop();
        if let Some(fleet) = lock(&self.fleet).take() {
            fleet.stop();
        }
        if let Some(overlay) = &self.overlay {
            overlay.stop();
        }
        if let Some(Err(error)) = self.shared.functions.containers().map(|containers| containers.finish()) {
            tracing::error!("containers: {error}; `sidetrack cleanup` removes what is left");
        }
    }

    /// Lets the keeper take everything back.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub fn take_back(&self) -> anyhow::Result<()> {
        self.steered.keeper.as_ref().map_or(Ok(()), |keeper| keeper.finish()).context("the keeper")
    }
}

impl Steered {
    /// Lets the keeper steer to these listeners.
    pub(super) fn steer(
        &self,
        steer: &Steer,
        listeners: &[(SocketAddr, BorrowedFd<'_>)],
    ) -> anyhow::Result<Option<Events>> {
        let Some(keeper) = &self.keeper else { return Ok(None) };
        let (addresses, proofs): (Vec<_>, Vec<_>) = listeners.iter().copied().unzip();
        let order = Order::of(steer, &addresses).map_err(anyhow::Error::msg)?;
        let (warnings, events) = keeper.steer(order, &proofs)?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        Ok(events)
    }
}

/// The addresses that a configuration names; port 0 where the kernel picks one.
fn configured(config: &Config) -> Vec<(Arc<str>, SocketAddr)> {
    let of = |listener: &Listener| {
        let name = listener.name.clone();
        listener.addresses.clone().into_iter().map(move |address| (name.clone(), address))
    };
    config.listeners.iter().flat_map(of).collect()
}

/// The packet engines of a configuration.
pub(super) fn engine_listeners(config: &Config) -> impl Iterator<Item = &Listener> {
    config.listeners.iter().filter(|listener| matches!(listener.kind, ListenerKind::Engine(_)))
}

fn engines(opened: engine::Opened, shared: &Arc<Shared>) -> anyhow::Result<engine::Engines> {
    let (numbers, functions, bounds) = (shared.clone(), shared.clone(), shared.clone());
    let surroundings = engine::Surroundings {
        config: shared.config.clone(),
        clock: shared.clock(),
        next_id: Arc::new(move || numbers.next_flow_id()),
        chains: Arc::new(move |spec, flow| functions.functions.chain(spec, flow)),
        admit: Arc::new(move |client| {
            Admission::beside(&bounds, client)
                .map(|leave| leave.map(|leave| Box::new(leave) as engine::Leave))
        }),
    };
    engine::Engines::start(opened, &surroundings).context("cannot start the packet engine")
}

pub(super) fn addresses<'a>(
    listening: impl Iterator<Item = &'a crate::intercept::Listening>,
) -> Vec<(Arc<str>, SocketAddr)> {
    listening.map(|listening| (listening.name.clone(), listening.address)).collect()
}

/// The addresses that these listeners got.
pub(super) fn bound_addresses(listeners: &[(Listener, Vec<Bound>)]) -> Vec<SocketAddr> {
    listeners.iter().flat_map(|(_, bound)| bound).map(|bound| bound.listening.address).collect()
}

/// The keeper may see all processes of this host; we may not.
fn ask_keeper(keeper: Arc<Keeper>) -> Owners {
    Owners::Asked(Arc::new(move |local, remote| {
        keeper.owner(local, remote).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot look up a process");
            Process::default()
        })
    }))
}

/// Whether the kernel's part is possible; an error where a listener cannot do without.
fn may_steer(config: &Config) -> anyhow::Result<bool> {
    if caps::holds(CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW) {
        return Ok(true);
    }
    let captures = |listener: &&Listener| {
        matches!(listener.kind, ListenerKind::Redirect(_) | ListenerKind::Tproxy(_) | ListenerKind::Engine(_))
    };
    if let Some(listener) = config.listeners.iter().find(captures) {
        anyhow::bail!(
            "listener '{}': kind {} needs root (CAP_NET_ADMIN and CAP_NET_RAW): start with sudo, or use \
             'sidetrack run -- COMMAND', which needs no rights",
            listener.name,
            listener.kind.intercept().as_str()
        );
    }
    tracing::debug!("without CAP_NET_ADMIN nothing is left to the kernel; all flows pass through user space");
    Ok(false)
}

/// Rules that kept traffic blocked after a crash (`on_crash = "closed"`) are of no use to a configuration without any.
fn remove_orphan() {
    match OwnedTable::adopt(Family::Inet, TABLE).map(OwnedTable::delete) {
        Ok(Ok(())) => tracing::info!("the rules that kept traffic blocked after a crash are removed"),
        // Mostly none is there; one of a running sidetrack is not ours to touch.
        Err(OwnError::NoOrphan { .. } | OwnError::OwnedByAnother { .. }) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot look for rules left by a crash"),
        Err(error) => tracing::warn!(%error, "cannot look for rules left by a crash"),
    }
}

/// Waits until a descriptor is readable.
async fn wait_for(fd: std::os::fd::OwnedFd) -> std::io::Result<()> {
    #[expect(deprecated, reason = "its successor is unsafe; this descriptor is owned and stays open")]
    let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
    fd.readable().await.map(drop)
}

/// How many descriptors are set aside for connections to servers that wait for a flow.
pub(super) fn warm_room(config: &Config, nofile: u64, workers: usize) -> u64 {
    let wanted = Room::wanted(&config.policy, workers);
    u64::try_from(wanted).unwrap_or(u64::MAX).min(nofile / 8)
}

/// A flow over the overlay holds two descriptors more than others: both ends of the connection between its worker and the
/// overlay's thread. As many are left to the flows of other nodes that pass here or end here.
const fn overlay_part(config: &Config) -> u64 {
    if config.overlay.is_some() { 2 } else { 1 }
}

/// How many descriptors are set aside for large content in the memory of caches.
fn sheets(config: &Config, nofile: u64) -> u64 {
    let caches = |listener: &Listener| listener.kind.http().is_some_and(|http| http.cache.is_some());
    if config.listeners.iter().any(caches) { sheet::SHEETS_MAX.min(nofile / 16) } else { 0 }
}

/// How many flows the limit on open files and the configuration allow.
fn budget(config: &Config, nofile: u64, workers: usize) -> Budget {
    let is_far = |listener: &&Listener| matches!(listener.kind, ListenerKind::Tunnel(_));
    let waiting = config.listeners.iter().find(is_far).map_or(0, |_| FAR_WAITING_MAX);
    let paths: usize = config.tunnels.iter().map(|tunnel| tunnel.paths.len()).sum();
    // Connections of tunnels that hold no flow yet.
    let idle = ((waiting + paths * POOL_READY_MAX) * workers) as u64;
    let idle = idle.min(nofile / 8) + warm_room(config, nofile, workers) + sheets(config, nofile);
    let share = super::containers::share(config, nofile) / overlay_part(config);
    let budget = Budget::from_nofile(share, DESCRIPTOR_RESERVE + idle);
    match config.limits.max_flows {
        Some(most) => budget.at_most(most.into()),
        None => budget,
    }
}
