//! What a node is made of, and how a new configuration takes the place of the old one.

use super::kernel::{self, Paths};
use super::sockets::{self, Bound};
use super::threads::{Fleet, Serving};
use crate::carry::Dialing;
use crate::config::{Config, Listener};
use crate::keeper::Keeper;
use crate::live::{Clock, Ledger};
use crate::process::Owners;
use crate::reload::Change;
use crate::session::PIPES_MAX;
use crate::steer::{OWN_MARK, Steer};
use crate::worker::Shared;
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_core::flow::Process;
use sidetrack_core::limit::Budget;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::cgroup;
use sidetrack_sys::conntrack::Events;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Descriptors kept back from flows: listeners, epoll, records, admin clients, resolver.
const DESCRIPTOR_RESERVE: u64 = 128;

/// A listener of the configuration with the addresses that serve it.
struct Served {
    listener: Listener,
    serving: Vec<Serving>,
}

/// Everything that needs rights: made before they are given up.
pub struct Prepared {
    name: String,
    workers: usize,
    bound: Vec<(Listener, Vec<Bound>)>,
    steered: Steered,
    steer: Steer,
    events: Option<Events>,
}

/// A node at work.
pub struct Node {
    shared: Arc<Shared>,
    fleet: Mutex<Option<Fleet>>,
    ledgers: Vec<Arc<Ledger>>,
    /// The kernel's flows.
    kernel_ledger: Arc<Ledger>,
    served: Mutex<Vec<Served>>,
    steered: Steered,
    paths: Arc<Mutex<Paths>>,
    events: Mutex<Option<Events>>,
    subscribed: AtomicBool,
    name: String,
    workers: usize,
}

/// Our side of what the kernel does for us.
struct Steered {
    keeper: Option<Arc<Keeper>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Prepared {
    /// Binds all listeners and lets the keeper do what the configuration asks of the kernel.
    ///
    /// # Errors
    /// Which listener or rule, and what the system said.
    pub fn new(config: &Config, name: &str, text: &str) -> anyhow::Result<Self> {
        let workers = match config.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            workers => workers,
        };
        let bound = config
            .listeners
            .iter()
            .map(|listener| Ok((listener.clone(), sockets::bind(listener, config, workers)?)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let addresses = addresses(bound.iter().flat_map(|(_, bound)| bound).map(|bound| &*bound.listening));
        let steer = Steer::new(config, &addresses, 0, &cgroup::find_match)?;
        let mut steered = Steered { keeper: None };
        let mut events = None;
        if !steer.is_empty() && needed(&steer)? {
            steered.keeper = Some(Arc::new(Keeper::start().context("cannot start the keeper")?));
            events = steered.steer(name, text, &addresses, 0)?;
        }
        Ok(Self { name: name.to_owned(), workers, bound, steered, steer, events })
    }

    /// From here on peers' bytes are read: nothing but what marked and transparent sockets and low ports need is kept.
    pub fn give_up_rights(&self) -> anyhow::Result<()> {
        let held = caps::capabilities().context("capabilities")?.permitted;
        caps::keep_only(held & (CapabilitySet::NET_RAW | CapabilitySet::NET_BIND_SERVICE))
            .context("cannot give up capabilities")
    }

    /// Starts the workers.
    pub fn start(self, config: Arc<ArcSwap<Config>>, nofile: u64) -> anyhow::Result<Node> {
        let mut paths = Paths::default();
        let budget = {
            let config = config.load();
            if self.steered.keeper.is_some() {
                paths.learn(&self.steer, &config);
            }
            budget(&config, nofile, self.workers)
        };
        let owners = self.steered.keeper.clone().map_or(Owners::Ourselves, ask_keeper);
        let shared = Arc::new(Shared::new(config, Dialing::default(), owners, budget, Clock::start()));
        let fleet = Fleet::start(&shared, self.workers)?;
        let served = self.bound.into_iter().map(|(listener, bound)| {
            let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
            Served { listener, serving }
        });
        let node = Node {
            served: Mutex::new(served.collect()),
            ledgers: fleet.ledgers().to_vec(),
            kernel_ledger: Arc::default(),
            fleet: Mutex::new(Some(fleet)),
            shared,
            steered: self.steered,
            paths: Arc::new(Mutex::new(paths)),
            subscribed: AtomicBool::new(self.events.is_some()),
            events: Mutex::new(self.events),
            name: self.name,
            workers: self.workers,
        };
        node.set_dialing(&lock(&node.served));
        Ok(node)
    }
}

impl Node {
    /// The flows of each worker, and those of the kernel.
    pub fn ledgers(&self) -> Vec<Arc<Ledger>> {
        self.ledgers.iter().chain([&self.kernel_ledger]).cloned().collect()
    }

    /// The listeners: name, kind, addresses.
    pub fn listeners(&self) -> Vec<(Arc<str>, &'static str, Vec<SocketAddr>)> {
        let served = lock(&self.served);
        let rows = served.iter().map(|served| {
            let addresses = served.serving.iter().map(|serving| serving.listening.address).collect();
            (served.listener.name.clone(), served.listener.kind.intercept().as_str(), addresses)
        });
        rows.collect()
    }

    /// Says where we listen.
    pub fn announce(&self) {
        for (name, kind, addresses) in self.listeners() {
            for address in addresses {
                tracing::info!(listener = %name, kind, %address, "listening");
            }
        }
        tracing::info!("ready");
    }

    /// Puts a new configuration in force: all of it or nothing. Flows go on under the rules they began with.
    ///
    /// # Errors
    /// What cannot be done; nothing has changed then.
    pub fn apply(&self, change: &Change<'_>) -> anyhow::Result<()> {
        let new = change.new;
        let fleet = lock(&self.fleet);
        let fleet = fleet.as_ref().context("sidetrack is shutting down")?;
        let mut served = lock(&self.served);
        let kept = |listener: &Listener| {
            // The handshake time-out is part of what a SOCKS listener's connections share.
            let same = change.old.limits.handshake_timeout_ms == new.limits.handshake_timeout_ms;
            served.iter().any(|served| same && served.listener == *listener)
        };
        let fresh = new
            .listeners
            .iter()
            .filter(|listener| !kept(listener))
            .map(|listener| Ok((listener.clone(), sockets::bind(listener, new, self.workers)?)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let stays = |served: &Served| {
            new.listeners.contains(&served.listener)
                && !fresh.iter().any(|(fresh, _)| *fresh == served.listener)
        };
        let old = served.iter().filter(|served| stays(served)).flat_map(|served| &served.serving);
        let listening = old
            .map(|serving| &*serving.listening)
            .chain(fresh.iter().flat_map(|(_, bound)| bound).map(|bound| &*bound.listening));
        let addresses = addresses(listening);
        self.steer_anew(new, change.text, &addresses)?;
        // Nothing can fail from here on.
        served.retain(stays);
        for (listener, bound) in fresh {
            let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
            served.push(Served { listener, serving });
        }
        self.set_dialing(&served);
        Ok(())
    }

    fn steer_anew(
        &self,
        config: &Config,
        text: &str,
        addresses: &[(Arc<str>, SocketAddr)],
    ) -> anyhow::Result<()> {
        let mut paths = lock(&self.paths);
        let steer = Steer::new(config, addresses, paths.next(), &cgroup::find_match)?;
        if self.steered.keeper.is_none() {
            anyhow::ensure!(
                steer.steering.redirects.is_empty() && steer.steering.tproxies.is_empty(),
                "listeners of kind redirect and tproxy need rights that were given up at the start: restart sidetrack"
            );
            return Ok(());
        }
        let events = self.steered.steer(&self.name, text, addresses, paths.next())?;
        paths.learn(&steer, config);
        // The first subscription serves all later configurations.
        if let Some(events) = events.filter(|_| !self.subscribed.swap(true, Relaxed)) {
            *lock(&self.events) = Some(events);
            self.record_kernel_flows();
        }
        Ok(())
    }

    fn set_dialing(&self, served: &[Served]) {
        let own = served.iter().flat_map(|served| &served.serving).map(|serving| serving.listening.address);
        let mark = self.steered.keeper.as_ref().map(|_| OWN_MARK.value);
        self.shared.dialing.store(Arc::new(Dialing { mark, own: own.collect() }));
    }

    /// Turns the ends of the kernel's flows into records, as a task of the caller's event loop.
    pub fn record_kernel_flows(&self) {
        if let Some(events) = lock(&self.events).take() {
            let ledger = self.kernel_ledger.clone();
            tokio::spawn(kernel::record(events, self.paths.clone(), self.shared.clone(), ledger));
        }
    }

    /// Stops accepting, gives every flow its end, stops the workers.
    pub fn stop(&self) {
        lock(&self.served).clear();
        if let Some(fleet) = lock(&self.fleet).take() {
            fleet.stop();
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
    fn steer(
        &self,
        name: &str,
        text: &str,
        addresses: &[(Arc<str>, SocketAddr)],
        first_path: usize,
    ) -> anyhow::Result<Option<Events>> {
        let Some(keeper) = &self.keeper else { return Ok(None) };
        let addresses = addresses.iter().map(|(name, address)| (name.to_string(), *address)).collect();
        let (warnings, events) = keeper.steer(name, text, addresses, first_path)?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        Ok(events)
    }
}

fn addresses<'a>(
    listening: impl Iterator<Item = &'a crate::intercept::Listening>,
) -> Vec<(Arc<str>, SocketAddr)> {
    listening.map(|listening| (listening.name.clone(), listening.address)).collect()
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
fn needed(steer: &Steer) -> anyhow::Result<bool> {
    if caps::is_network_root() {
        return Ok(true);
    }
    anyhow::ensure!(
        steer.steering.redirects.is_empty() && steer.steering.tproxies.is_empty(),
        "listeners of kind redirect and tproxy need root (CAP_NET_ADMIN): start with sudo, or use \
         'sidetrack run -- COMMAND', which needs no rights"
    );
    tracing::info!("without CAP_NET_ADMIN nothing is left to the kernel; all flows pass through user space");
    Ok(false)
}

/// How many flows the limit on open files and the configuration allow.
fn budget(config: &Config, nofile: u64, workers: usize) -> Budget {
    let pipes = (workers * PIPES_MAX) as u64;
    let budget = Budget::with_pipes(nofile, DESCRIPTOR_RESERVE, pipes.min(nofile / 16));
    match config.limits.max_flows {
        Some(most) => budget.at_most(most.into()),
        None => budget,
    }
}
