//! One container as flows see it.

use super::ask::{SOCKETS_MAX, Want};
use crate::wire;
use sidetrack_core::function::{ContainerSpec, Resources};
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::sync::{Notify, watch};

/// If fewer sockets than this are left, more are requested.
const LOW: usize = 24;

/// A running container.
#[derive(Debug)]
pub struct Instance {
    /// Its number among those of this process.
    pub number: u64,
    /// Its name at the container engine.
    pub name: String,
    /// Its function.
    pub function: Arc<str>,
    /// The specification: its protocol, its port and more.
    pub spec: Arc<ContainerSpec>,
    /// The connection for requests; sending does not wait.
    asking: OwnedFd,
    stock: Mutex<Stock>,
    refilled: Notify,
    asked: AtomicBool,
    gone: watch::Sender<bool>,
    flows: AtomicUsize,
    idle: Notify,
    /// The CPU time used at the last look, with the time of the look: microseconds since the start of the clock.
    cpu: Mutex<Option<(Instant, u64)>>,
    /// Its use since the look before, thousandths of a core. `u64::MAX`: unknown.
    cpu_milli: AtomicU64,
    /// Connections that came back although no flow waited for them.
    pub(super) strays: Arc<AtomicU64>,
}

/// Unused sockets of the container's network.
#[derive(Debug, Default)]
pub(super) struct Stock {
    /// Not connected yet.
    pub sockets: Vec<OwnedFd>,
    pub listeners: Vec<TcpListener>,
}

/// The permit of one flow to use a container. The container exists as long as a permit does.
#[derive(Debug)]
pub struct Guest {
    instance: Arc<Instance>,
    /// False for our own probes, which do not count as flows.
    counts: bool,
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.counts && self.instance.flows.fetch_sub(1, Relaxed) == 1 {
            self.instance.idle.notify_one();
        }
    }
}

impl std::ops::Deref for Guest {
    type Target = Instance;

    fn deref(&self) -> &Instance {
        &self.instance
    }
}

impl Instance {
    pub(super) fn new(
        name: String,
        (function, spec): (Arc<str>, Arc<ContainerSpec>),
        asking: OwnedFd,
        sockets: Vec<OwnedFd>,
    ) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: COUNT.fetch_add(1, Relaxed),
            name,
            function,
            spec,
            asking,
            stock: Mutex::new(Stock { sockets, listeners: Vec::new() }),
            refilled: Notify::new(),
            asked: AtomicBool::new(false),
            gone: watch::Sender::new(false),
            flows: AtomicUsize::new(0),
            idle: Notify::new(),
            cpu: Mutex::default(),
            cpu_milli: AtomicU64::new(u64::MAX),
            strays: Arc::default(),
        }
    }

    /// Returns the address it listens on, in its own network.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.spec.port).into()
    }

    /// Returns a permit for one more flow.
    pub(super) fn guest(self: &Arc<Self>) -> Guest {
        self.flows.fetch_add(1, Relaxed);
        Guest { instance: self.clone(), counts: true }
    }

    /// Returns a permit for a probe.
    pub(super) fn visitor(self: &Arc<Self>) -> Guest {
        Guest { instance: self.clone(), counts: false }
    }

    /// Returns the number of flows that pass it.
    pub fn flows(&self) -> usize {
        self.flows.load(Relaxed)
    }

    /// Waits until no flow passes it.
    pub(super) async fn unused(&self) {
        while self.flows() > 0 {
            self.idle.notified().await;
        }
    }

    /// Returns an unconnected socket of its network; `None` if the container is gone.
    pub(super) async fn socket(&self) -> Option<OwnedFd> {
        self.take(Want::Sockets(SOCKETS_MAX), LOW, |stock| {
            let socket = stock.sockets.pop();
            (socket, stock.sockets.len())
        })
        .await
    }

    /// Returns a listener of its network; `None` if the container is gone.
    pub(super) async fn listener(&self) -> Option<TcpListener> {
        self.take(Want::Listener, 0, |stock| {
            let listener = stock.listeners.pop();
            (listener, stock.listeners.len())
        })
        .await
    }

    async fn take<T>(
        &self,
        want: Want,
        low: usize,
        mut pick: impl FnMut(&mut Stock) -> (Option<T>, usize),
    ) -> Option<T> {
        let mut gone = self.gone.subscribe();
        loop {
            // Registered before the check, so that a refill in between is not missed.
            let refilled = self.refilled.notified();
            let (picked, left) = pick(&mut lock(&self.stock));
            if left < low || picked.is_none() {
                self.ask(want);
            }
            if picked.is_some() {
                return picked;
            }
            tokio::select! {
                () = refilled => {}
                _ = gone.wait_for(|gone| *gone) => return None,
            }
        }
    }

    fn ask(&self, want: Want) {
        // A request for sockets serves all waiting flows; a request for a listener serves one.
        if want == Want::Listener || !self.asked.swap(true, Relaxed) {
            // A failed send means that the container is gone, which is reported elsewhere.
            let _ = wire::send(&self.asking, &want, &[]);
        }
    }

    /// Requests its CPU time.
    pub(super) fn ask_cpu(&self) {
        // As in `ask`.
        let _ = wire::send(&self.asking, &Want::Cpu, &[]);
    }

    /// Gives it other limits.
    pub(super) fn limit(&self, limits: Resources) {
        // As in `ask`.
        let _ = wire::send(&self.asking, &Want::Limit(limits.into()), &[]);
    }

    /// Takes the answer to [`Self::ask_cpu`].
    pub(super) fn note_cpu(&self, now: Instant, used_us: Option<u64>) {
        let Some(used) = used_us else { return };
        let Some((then, before)) = lock(&self.cpu).replace((now, used)) else { return };
        let passed_us = u64::try_from(now.since(then).as_micros()).unwrap_or(u64::MAX);
        if let Some(milli) = used.saturating_sub(before).saturating_mul(1000).checked_div(passed_us) {
            self.cpu_milli.store(milli, Relaxed);
        }
    }

    /// Its use of the processor between the last two looks, thousandths of a core.
    pub(super) fn cpu_milli(&self) -> Option<u64> {
        Some(self.cpu_milli.load(Relaxed)).filter(|known| *known != u64::MAX)
    }

    /// Requests the reason why it has ended.
    pub(super) fn ask_why(&self) {
        let _ = wire::send(&self.asking, &Want::Why, &[]);
    }

    /// Adds the sockets or listeners of an answer, and wakes the flows that wait for them.
    pub(super) fn refill(&self, put: impl FnOnce(&mut Stock)) {
        put(&mut lock(&self.stock));
        self.asked.store(false, Relaxed);
        self.refilled.notify_waiters();
    }

    /// Marks the container as gone: it must not be used any more.
    pub(super) fn end(&self) {
        self.gone.send_replace(true);
        // The kernel removes the network with the last of these sockets.
        *lock(&self.stock) = Stock::default();
    }

    /// Returns a receiver that becomes true when the container must not be used any more.
    pub(super) fn gone(&self) -> watch::Receiver<bool> {
        self.gone.subscribe()
    }

    /// Returns the number of connections that came back although no flow waited for them.
    pub fn strays(&self) -> u64 {
        self.strays.load(Relaxed)
    }
}
