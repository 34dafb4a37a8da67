//! The containers of one function: those that work, and the reason why the last one failed.

use super::instance::{Guest, Instance};
use sidetrack_core::function::{ContainerSpec, Resources};
use sidetrack_sys::sync::lock;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long an engine may take to start a container, in addition to the function's own start time.
const ENGINE_PATIENCE: Duration = Duration::from_secs(20);

/// The working containers of one function. When this is dropped, the containers end as soon as no flow passes them.
#[derive(Debug)]
pub struct Pool {
    function: Arc<str>,
    spec: Arc<ContainerSpec>,
    /// The limits of each container; at first those of the specification.
    limits: Mutex<Resources>,
    well: Mutex<Vec<Arc<Instance>>>,
    /// Why the last container failed, and how many have failed.
    trouble: Mutex<Trouble>,
    changed: Condvar,
    next: AtomicUsize,
    /// How many containers should run.
    target: AtomicU16,
    /// Dropped with the pool, which the keeping tasks notice; a value sent ends their pauses.
    open: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Trouble {
    why: Option<String>,
    falls: u64,
}

impl Pool {
    pub(super) fn new(function: Arc<str>, spec: ContainerSpec) -> Self {
        Self {
            function,
            target: AtomicU16::new(spec.instances),
            limits: Mutex::new(spec.resources),
            spec: Arc::new(spec),
            well: Mutex::default(),
            trouble: Mutex::default(),
            changed: Condvar::new(),
            next: AtomicUsize::new(0),
            open: watch::Sender::new(()),
        }
    }

    /// Returns the function's name.
    pub const fn function(&self) -> &Arc<str> {
        &self.function
    }

    /// Returns its specification.
    pub const fn spec(&self) -> &Arc<ContainerSpec> {
        &self.spec
    }

    /// Returns a receiver that fails when the pool is dropped.
    pub(super) fn watch(&self) -> watch::Receiver<()> {
        self.open.subscribe()
    }

    /// Ends the pauses of containers that wait before they are started again.
    pub fn again(&self) {
        self.open.send_replace(());
    }

    /// Returns the limits of each container.
    pub fn limits(&self) -> Resources {
        *lock(&self.limits)
    }

    /// Gives all containers other limits, those that run included.
    pub fn limit(&self, limits: Resources) {
        if std::mem::replace(&mut *lock(&self.limits), limits) != limits {
            tracing::info!(function = %self.function, ?limits, "the containers get other limits");
            self.well().iter().for_each(|instance| instance.limit(limits));
        }
    }

    /// Returns how many containers should run now.
    pub fn target(&self) -> u16 {
        self.target.load(Relaxed)
    }

    pub(super) fn aim(&self, target: u16) {
        self.target.store(target, Relaxed);
    }

    /// Takes a container that works out: it gets no new flow.
    pub(super) fn leave(&self, number: u64) {
        lock(&self.well).retain(|other| other.number != number);
    }

    /// Returns the working containers.
    pub fn well(&self) -> Vec<Arc<Instance>> {
        lock(&self.well).clone()
    }

    /// Returns how often a started container has failed.
    pub fn falls(&self) -> u64 {
        lock(&self.trouble).falls
    }

    /// Returns why the last container failed.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.trouble).why.clone()
    }

    /// Returns a permit for the working container with the fewest flows; equal ones take turns. Those in `refused` are
    /// not chosen.
    ///
    /// # Errors
    /// Returns why no container works.
    pub fn pick(&self, refused: &[u64]) -> Result<Guest, String> {
        let well = lock(&self.well);
        let turn = self.next.fetch_add(1, Relaxed);
        let fit = |at: usize| {
            let instance = &well[(turn + at) % well.len()];
            (!refused.contains(&instance.number)).then_some(instance)
        };
        let best = (0..well.len()).filter_map(fit).min_by_key(|instance| instance.flows());
        best.map(Instance::guest).ok_or_else(|| self.why())
    }

    fn why(&self) -> String {
        let trouble = lock(&self.trouble);
        match &trouble.why {
            Some(why) => format!("no container of it is well: {why}"),
            None => "no container of it is well yet".to_owned(),
        }
    }

    pub(super) fn up(&self, instance: &Arc<Instance>) {
        lock(&self.well).push(instance.clone());
        // They may have changed while it was started.
        let limits = self.limits();
        if limits != instance.spec.resources {
            instance.limit(limits);
        }
        self.changed.notify_all();
    }

    pub(super) fn down(&self, number: Option<u64>, why: String) {
        {
            let mut trouble = lock(&self.trouble);
            trouble.why = Some(why);
            trouble.falls += 1;
        }
        // Last, and under the lock of the waiting callers: a caller that has checked before is asleep by now, and is
        // woken.
        lock(&self.well).retain(|other| Some(other.number) != number);
        self.changed.notify_all();
    }

    /// Tells waiting callers that the containers are no longer kept running.
    pub(super) fn forsake(&self) {
        lock(&self.trouble).why.get_or_insert_with(|| "sidetrack is shutting down".to_owned());
        // As in `down`: the lock makes sure that a waiting caller is woken.
        drop(lock(&self.well));
        self.changed.notify_all();
    }

    /// Waits until all containers work. It blocks, so flows must not call it.
    ///
    /// # Errors
    /// Returns why a container could not be started or did not work in time.
    pub fn wait(&self) -> Result<(), String> {
        let most = Duration::from_millis(self.spec.start_timeout_ms) + ENGINE_PATIENCE;
        let until = Instant::now() + most;
        let mut well = lock(&self.well);
        loop {
            if well.len() >= usize::from(self.spec.instances) {
                return Ok(());
            }
            let why = lock(&self.trouble).why.clone();
            if let Some(why) = why {
                return Err(format!("function '{}': {why}", self.function));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("function '{}': not started within {} s", self.function, most.as_secs()));
            }
            well = self.changed.wait_timeout(well, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
