//! A node: how it is prepared, started and stopped.

mod engines;
mod kept;
mod steered;

pub(super) use engines::engine_listeners;
use engines::engines;
use kept::{ask_keeper, may_steer, wait_for};
pub(super) use steered::Steered;

use super::agreement;
use super::budget::{budget, sheets, warm_room};
use super::dns::Resolving;
use super::hold::{self, Holding};
use super::kernel::{KernelFlows, Paths};
use super::paths;
use super::ports;
use super::rights;
use super::sockets::{self, Before, Bound};
use super::systemd::Parent;
use super::threads::{Fleet, Serving};
use super::upgrade::{self, Act, Go, Heritage, Phase, Side, Step};
use crate::agreement::InForce;
use crate::carry::Dialing;
use crate::config::{Config, Listener, ListenerKind, OnCrash};
use crate::dns::SharedNames;
use crate::engine;
use crate::function::container::Containers;
use crate::function::{Function, Library};
use crate::http::sheet;
use crate::keeper::{Begin, Keeper};
use crate::live::{Clock, Ledger};
use crate::overlay;
use crate::process::Owners;
use crate::rights::DataUser;
use crate::steer::{Host, OWN_MARK, Steer};
use crate::worker::{Shared, Wires};
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_common::history::History;
use sidetrack_core::flow::{FlowId, Protocol};
use sidetrack_core::pressure::Memory;
use sidetrack_core::time::Instant;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine::{self, Kind};
use sidetrack_sys::conntrack::Events;
use sidetrack_sys::sync::lock;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;
use tokio::task::JoinHandle;

/// The listeners of a configuration, each with its sockets.
type Listeners = Vec<(Listener, Vec<Bound>)>;

/// A listener of the configuration, with the sockets that serve it.
pub(super) struct Served {
    pub listener: Listener,
    pub serving: Vec<Serving>,
}

/// All parts that need rights; they are made before rights are given up.
pub(super) struct Prepared {
    workers: usize,
    steered: Steered,
    overlay: Option<overlay::Bound>,
    engines: engine::Opened,
    containers: Option<Arc<Containers>>,
    functions: (Clock, Library),
    agreement: Arc<InForce>,
    writer: Option<agreement::Writer>,
    history: Option<History>,
    hold: Holding,
    /// What the addresses of the resolver stand for, if there is one.
    names: Option<SharedNames>,
    wires: Option<Arc<Wires>>,
    parent: Arc<Parent>,
    /// What an earlier process of this node hands over.
    heritage: Option<Arc<Heritage>>,
}

/// A running node.
pub(super) struct Node {
    pub(super) shared: Arc<Shared>,
    pub(super) fleet: Mutex<Option<Fleet>>,
    pub(super) ledgers: Vec<Arc<Ledger>>,
    pub(super) kernel: Arc<KernelFlows>,
    pub(super) served: Mutex<Vec<Served>>,
    pub(super) steered: Steered,
    pub(super) events: Mutex<Option<Events>>,
    pub(super) recording: Mutex<Option<JoinHandle<()>>>,
    pub(super) subscribed: AtomicBool,
    /// No new connections are to be redirected here any more.
    pub(super) leaving: AtomicBool,
    pub(super) workers: usize,
    overlay: Option<overlay::Overlay>,
    pub(super) engines: engine::Engines,
    /// Addresses of the paths that services asked for.
    paths: Mutex<Vec<SocketAddr>>,
    /// TCP addresses of the metrics page and of the interface for services.
    windows: Mutex<Vec<SocketAddr>>,
    /// Held while an agreement is read and put in force, so that the one read last is in force last.
    pub(super) agreeing: Mutex<()>,
    writer: Option<agreement::Writer>,
    pub(super) history: Option<History>,
    pub(super) names: Option<SharedNames>,
    pub(super) resolver: Mutex<Option<Resolving>>,
    /// The resolver while the node rests.
    pub(super) resting_resolver: Mutex<Option<super::dns::Bound>>,
    /// What has started this process.
    pub(super) parent: Arc<Parent>,
}

impl Prepared {
    /// Starts the processes that keep rights or become this user, and opens what needs rights.
    ///
    /// # Errors
    /// What could not be started or opened, with the system's error.
    pub(super) fn new(
        config: &Config,
        user: Option<&DataUser>,
        names: Option<SharedNames>,
        (parent, heritage): (Arc<Parent>, Option<Arc<Heritage>>),
    ) -> anyhow::Result<Self> {
        let workers = match config.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            workers => workers,
        };
        if heritage.is_none() {
            ports::refuse_taken(config, &parent.passed)?;
        }
        let agreement = agreement::read(config, &InForce::default())?;
        let history = agreement::history(config, &agreement)?;
        let may_steer = may_steer(config)?;
        let overlay = config
            .overlay
            .as_ref()
            .map(|overlay| {
                let given = heritage.as_ref().map(|heritage| heritage.overlay());
                overlay::Bound::new(overlay, config.on_crash, given)
            })
            .transpose()?;
        let engines = engine::Opened::new(&config.listeners, workers, OWN_MARK.value)?;
        let mut steered = Steered { keeper: None, may: Begin::default(), used: AtomicBool::new(false) };
        if may_steer {
            // Also if nothing is steered yet: a reload may add it, and rules may need the processes of other users.
            let begin =
                Begin { closed: config.on_crash == OnCrash::Closed, owners: config.policy.asks_process() };
            let taken = heritage.as_ref().map_or(Ok(None), |heritage| heritage.keeper(begin))?;
            let is_taken = taken.is_some();
            let (keeper, may, used) = match taken {
                Some(taken) => taken,
                None => (Keeper::start(begin, user).context("cannot start the keeper")?, begin, false),
            };
            (steered.may, steered.used) = (may, AtomicBool::new(used));
            steered.keeper = Some(Arc::new(keeper));
            if !is_taken && Steer::new(config, &configured(config), 0, &Host::here())?.is_empty() {
                super::apply::remove_orphan();
            }
        }
        let containers = super::containers::start(config, user)?;
        let file = config.agreement.as_ref().zip(user);
        let writer = file.map(|(file, user)| agreement::Writer::start(&file.path, user)).transpose()?;
        let hold = Holding::open(config)?;
        let becomes = user.map(|user| (user.uid, user.gid));
        let wires = super::wires::open(config, becomes, heritage.as_deref())?;
        Ok(Self {
            workers,
            steered,
            overlay,
            engines,
            containers,
            functions: {
                let clock = Clock::start();
                (clock, Library::new(clock))
            },
            agreement,
            writer,
            history,
            hold,
            names,
            wires,
            parent,
            heritage,
        })
    }

    /// The process becomes the data plane's user. It keeps only the rights for marked and transparent sockets and for low
    /// ports. Peers' bytes are read only after this. `socket`: the admin socket. Call it while there is only one thread.
    ///
    /// # Errors
    /// Which right could not be given up.
    pub(super) fn give_up_rights(
        &mut self,
        config: &Config,
        file: &Path,
        user: Option<&DataUser>,
        socket: Option<&Path>,
    ) -> anyhow::Result<()> {
        let was_root = nix::unistd::geteuid().is_root();
        let of_packets = self.overlay.as_ref().map_or(CapabilitySet::empty(), overlay::Bound::needs);
        let of_packets = of_packets | self.hold.needs();
        rights::give_up(config, file, user, of_packets)?;
        let pins = self.wires.as_ref().and_then(|wires| wires.pinned_at());
        // For an unprivileged user, a guard process removes the socket.
        paths::restrict(config, file, socket.filter(|_| user.is_none()), pins);
        if was_root {
            confine::close_memory().context("PR_SET_DUMPABLE")?;
        }
        let changes_maps = engine_listeners(config).next().is_some() || self.wires.is_some();
        let kind = if changes_maps { Kind::DataWithEngine } else { Kind::Data };
        if let Err(error) = confine::confine(kind) {
            tracing::warn!(
                "system calls are not confined: {error}; on a kernel with CONFIG_SECCOMP_FILTER they are"
            );
        }
        if let Some(overlay) = &mut self.overlay {
            overlay.answer_kernel()?;
        }
        self.hold.answer_kernel()?;
        let held = caps::capabilities().context("capabilities")?.permitted;
        caps::keep_only(held - of_packets).context("cannot give up capabilities")
    }

    /// Makes the functions, and waits for their containers. Call it after rights were given up. With `all` a function that is down
    /// is an error: the node that is replaced goes on.
    ///
    /// # Errors
    /// The system has no more threads, or what is down.
    pub(super) fn start_functions(&mut self, config: &Config, all: bool) -> anyhow::Result<()> {
        let (clock, library) = &self.functions;
        for why in super::containers::first(library, *clock, &config.functions, self.containers.take())? {
            anyhow::ensure!(!all, "{why}");
            tracing::error!("{why}; it is tried again");
        }
        Ok(())
    }

    /// Binds all listeners. Later sockets on the same port must be made by the same user (SO_REUSEPORT).
    fn bind(&self, config: &Config) -> anyhow::Result<Listeners> {
        let mut listeners = Listeners::new();
        for listener in &config.listeners {
            let own = bound_addresses(&listeners);
            let passed = &self.parent.passed;
            let before = Before { own: &own, heritage: self.heritage.as_deref(), passed };
            let bound = sockets::bind(listener, config, (self.workers, self.names.as_ref()), before)?;
            listeners.push((listener.clone(), bound));
        }
        Ok(listeners)
    }

    /// Lets the keeper set up the kernel as the configuration says.
    fn steer(
        &self,
        config: &Config,
        bound: &Listeners,
        first_path: usize,
    ) -> anyhow::Result<(Paths, Option<Events>)> {
        let mut paths = Paths::default();
        let addresses = addresses(bound.iter().flat_map(|(_, bound)| bound).map(|bound| &*bound.listening));
        let steer = Steer::new(config, &addresses, first_path, &Host::here())?;
        let steer = hold::put(self.hold.hold.as_ref(), config, steer, &addresses);
        if self.steered.keeper.is_none() {
            return Ok((paths, None));
        }
        let since = SystemTime::now();
        let listeners = bound.iter().flat_map(|(_, bound)| bound);
        let listeners: Vec<_> = listeners.filter_map(Bound::proof).collect();
        let events = self.steered.steer(&steer, &listeners)?;
        paths.learn(&steer, config, since);
        Ok((paths, events))
    }

    /// Binds the listeners, lets the kernel redirect flows to them, and starts the workers.
    ///
    /// # Errors
    /// The listener or rule that failed, with the system's error.
    pub(super) fn start(
        self,
        config: Arc<ArcSwap<Config>>,
        (nofile, memory): (u64, Option<Memory>),
        go: Option<&Go>,
    ) -> anyhow::Result<Node> {
        let bound = self.bind(&config.load())?;
        let (paths, events) = self.steer(&config.load(), &bound, go.map_or(0, |go| go.first_path))?;
        if go.is_some() {
            upgrade::reached(Step(Side::New, Act::Did(Phase::Steered)));
        }
        let (budget, warm) = {
            let config = config.load();
            let warm = warm_room(&config, nofile, self.workers);
            sheet::allow(sheets(&config, nofile));
            (budget(&config, nofile, self.workers, memory), usize::try_from(warm).unwrap_or(usize::MAX))
        };
        let owners = self.steered.keeper.clone().map_or(Owners::Ourselves, ask_keeper);
        // Tunnels of workers may dial before all listeners are known.
        let mark = self.steered.keeper.as_ref().map(|_| OWN_MARK.value);
        let dialing = Dialing { mark, ..Dialing::default() };
        let (clock, library) = self.functions;
        let mut shared = Shared::new(config, dialing, owners, budget, clock).with_warm(warm);
        shared.functions = library;
        let shared = Arc::new(shared.with_hold(self.hold.hold).with_wires(self.wires));
        shared.number_from(go.map_or(1, |go| go.next_flow));
        if let Some(go) = go {
            upgrade::take_associations(&shared, std::mem::take(&mut lock(&go.associations)));
            self.names.iter().for_each(|names| upgrade::take_names(names, &go.names, clock.now()));
        }
        shared.agreement.store(self.agreement);
        let fleet = Fleet::start(&shared, self.workers)?;
        super::wires::adopt(&shared, fleet.ledgers())?;
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
            history: self.history,
            names: self.names,
            resolver: Mutex::default(),
            resting_resolver: Mutex::default(),
            parent: self.parent,
        };
        node.set_dialing(&lock(&node.served));
        node.shared.hold().into_iter().for_each(|hold| hold.begin());
        Ok(node)
    }
}

impl Node {
    /// All ledgers: of the workers, the packet engine, flows delivered for other nodes, and flows in the kernel.
    pub(super) fn ledgers(&self) -> Vec<Arc<Ledger>> {
        let delivered = self.overlay.as_ref().map(overlay::Overlay::ledger);
        let own = self.ledgers.iter().chain(self.engines.ledgers()).chain(delivered);
        own.chain([self.kernel.ledger()]).cloned().collect()
    }

    /// The ledgers of the workers alone.
    pub(super) fn worker_ledgers(&self) -> &[Arc<Ledger>] {
        &self.ledgers
    }

    /// The listeners: name, kind, addresses.
    pub(super) fn listeners(&self) -> Vec<(Arc<str>, &'static str, Vec<SocketAddr>)> {
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

    /// The proxies of all listeners that serve single requests.
    pub(super) fn proxies(&self) -> Vec<super::caches::Named> {
        let served = lock(&self.served);
        let first = |served: &Served| served.serving.first().and_then(|one| one.proxy.clone());
        served.iter().filter_map(|served| Some((served.listener.name.clone(), first(served)?))).collect()
    }

    /// The functions of the configuration in force.
    pub(super) fn functions(&self) -> Vec<Arc<Function>> {
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

    /// Whether a running flow belongs to the listener of this name.
    pub(super) fn has_flow(&self, listener: &str) -> bool {
        let of = |ledger: &Arc<Ledger>| {
            let flows = ledger.snapshot();
            flows.iter().any(|flow| flow.decided().is_some_and(|decided| *decided.flow.listener == *listener))
        };
        self.ledgers.iter().any(of)
    }

    /// Lets the service manager keep the listeners for the process after a crash of this one.
    pub(super) fn keep_listeners(&self) {
        self.parent.keep(&lock(&self.served));
    }

    /// Serves a listener that is not in the configuration, until the returned value is dropped.
    ///
    /// # Errors
    /// The node is shutting down.
    pub(super) fn serve(&self, bound: Bound) -> anyhow::Result<Serving> {
        let fleet = lock(&self.fleet);
        Ok(fleet.as_ref().context("sidetrack is shutting down")?.serve(bound))
    }

    /// Sets the addresses of the paths that services asked for.
    pub(super) fn set_paths(&self, paths: Vec<SocketAddr>) {
        *lock(&self.paths) = paths;
        self.set_dialing(&lock(&self.served));
    }

    /// Sets our own ports that are not listeners. No flow may be sent to them.
    pub(super) fn set_windows(&self, windows: Vec<SocketAddr>) {
        *lock(&self.windows) = windows;
        self.set_dialing(&lock(&self.served));
    }

    /// The process that writes the agreement's file, if this process may not create files beside it.
    pub(super) const fn agreement_writer(&self) -> Option<&agreement::Writer> {
        self.writer.as_ref()
    }

    /// The data-flow agreement in force.
    pub(super) fn agreement(&self) -> &ArcSwap<InForce> {
        &self.shared.agreement
    }

    /// A number for a flow that the caller forwards.
    pub(super) fn next_flow_id(&self) -> FlowId {
        self.shared.next_flow_id()
    }

    /// Logs the addresses of all listeners.
    pub(super) fn announce(&self) {
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
        let own = |protocol| {
            let serving = served.iter().flat_map(|served| &served.serving);
            let receives = move |one: &&Serving| {
                let listening = &one.listening;
                listening.protocol == protocol || protocol == Protocol::Udp && listening.has_datagrams
            };
            serving.filter(receives).map(|one| one.listening.address).collect()
        };
        let mark = self.mark();
        let mut dialing =
            Dialing { mark, own: own(Protocol::Tcp), own_datagrams: own(Protocol::Udp), overlay: None };
        dialing.own.extend(lock(&self.paths).iter());
        dialing.own.extend(lock(&self.windows).iter());
        if let Some(overlay) = &self.overlay {
            dialing.own.extend(overlay.addresses());
            // Neighbours send datagrams to the same ports.
            dialing.own_datagrams.extend(overlay.addresses());
            overlay.set_dialing(dialing.clone());
            dialing.overlay = Some(overlay.entry());
        }
        self.shared.dialing.store(Arc::new(dialing));
    }

    /// The mark of our own connections, if rules of ours capture connections.
    pub(super) fn mark(&self) -> Option<u32> {
        self.steered.keeper.as_ref().map(|_| OWN_MARK.value)
    }

    /// Records the ends of flows in the kernel, in a task of the caller's event loop.
    pub(super) fn record_kernel_flows(&self) {
        if let Some(events) = lock(&self.events).take() {
            *lock(&self.recording) = Some(tokio::spawn(self.kernel.clone().record(events)));
        }
    }

    /// Writes the missing records of flows in the kernel. These flows go on.
    pub(super) async fn end_kernel_flows(&self) {
        let recording = lock(&self.recording).take();
        if let Some(recording) = recording {
            self.kernel.stop();
            // A panic of the task was already logged.
            let _ = recording.await;
        }
    }

    /// Updates the ledger of flows in the kernel. Blocks while the kernel lists them.
    pub(super) fn look_at_kernel_flows(&self) {
        self.kernel.look();
    }

    /// Waits until the keeper dies, which it never does by itself; returns the consequences. Never returns without a keeper.
    pub(super) async fn keeper_gone(&self, on_crash: OnCrash) -> String {
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

    /// The overlay, if this node is part of one.
    pub(super) const fn links(&self) -> Option<&overlay::Overlay> {
        self.overlay.as_ref()
    }

    /// The entry to the overlay, if this node is part of one.
    pub(super) fn overlay(&self) -> Option<Arc<overlay::Entry>> {
        self.overlay.as_ref().map(overlay::Overlay::entry)
    }

    /// The number of flows in the workers.
    pub(super) fn flows_in_flight(&self) -> usize {
        self.ledgers.iter().map(|ledger| ledger.len()).sum()
    }

    /// Stops accepting, ends every flow, and stops the workers.
    pub(super) fn stop(&self) {
        // No new flows first, then the end of flows. The overlay and the containers stop last, because flows use them.
        lock(&self.served).clear();
        self.engines.stop();
        if let Some(fleet) = lock(&self.fleet).take() {
            fleet.stop();
        }
        self.shared.wires().into_iter().for_each(|wires| wires.stop());
        if let Some(overlay) = &self.overlay {
            overlay.stop();
        }
        if let Some(Err(error)) = self.shared.functions.containers().map(|containers| containers.finish()) {
            tracing::error!("containers: {error}; `sidetrack cleanup` removes what is left");
        }
    }

    /// Lets the keeper undo all of its changes.
    ///
    /// # Errors
    /// The keeper cannot be waited for.
    pub(super) fn take_back(&self) -> anyhow::Result<()> {
        self.steered.keeper.as_ref().map_or(Ok(()), |keeper| keeper.finish()).context("the keeper")
    }
}

/// The addresses in the configuration; port 0 if the kernel chooses.
fn configured(config: &Config) -> Vec<(Arc<str>, SocketAddr)> {
    let of = |listener: &Listener| {
        let name = listener.name.clone();
        listener.addresses.clone().into_iter().map(move |address| (name.clone(), address))
    };
    config.listeners.iter().flat_map(of).collect()
}

pub(super) fn addresses<'a>(
    listening: impl Iterator<Item = &'a crate::intercept::Listening>,
) -> Vec<(Arc<str>, SocketAddr)> {
    listening.map(|listening| (listening.name.clone(), listening.address)).collect()
}

/// The addresses that these listeners are bound to.
pub(super) fn bound_addresses(listeners: &[(Listener, Vec<Bound>)]) -> Vec<SocketAddr> {
    listeners.iter().flat_map(|(_, bound)| bound).map(|bound| bound.listening.address).collect()
}
