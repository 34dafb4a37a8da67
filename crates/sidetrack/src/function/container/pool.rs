//! The containers of one function: those that are well, and what is wrong with the others.

use super::instance::{Guest, Instance};
use sidetrack_core::function::ContainerSpec;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How long an engine may take to start a container, beside what the function may take to get well.
const ENGINE_PATIENCE: Duration = Duration::from_secs(20);

/// See the module. Dropped, its containers go once no flow passes them.
#[derive(Debug)]
pub struct Pool {
    function: Arc<str>,
    spec: Arc<ContainerSpec>,
    well: Mutex<Vec<Arc<Instance>>>,
    /// Why one is down that was to be up, once that has happened, and how often.
    trouble: Mutex<Trouble>,
    changed: Condvar,
    next: AtomicUsize,
    /// Its end is that of the pool; what it sends ends pauses.
    open: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Trouble {
    why: Option<String>,
    falls: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(super) fn new(function: Arc<str>, spec: ContainerSpec) -> Self {
        Self {
            function,
            spec: Arc::new(spec),
            well: Mutex::default(),
            trouble: Mutex::default(),
            changed: Condvar::new(),
            next: AtomicUsize::new(0),
            open: watch::Sender::new(()),
        }
    }

    /// The function's name.
    pub const fn function(&self) -> &Arc<str> {
        &self.function
    }

    /// Its definition.
    pub const fn spec(&self) -> &Arc<ContainerSpec> {
        &self.spec
    }

    /// Told when the pool is dropped.
    pub(super) fn watch(&self) -> watch::Receiver<()> {
        self.open.subscribe()
    }

    /// Containers that wait before they are started again are started now.
    pub fn again(&self) {
        self.open.send_replace(());
    }

    /// Containers that are well.
    pub fn well(&self) -> Vec<Arc<Instance>> {
        lock(&self.well).clone()
    }

    /// How often one that was started has been given up.
    pub fn falls(&self) -> u64 {
        lock(&self.trouble).falls
    }

    /// What was wrong with the last one that fell.
    pub fn trouble(&self) -> Option<String> {
        lock(&self.trouble).why.clone()
    }

    /// The container with the fewest flows, for one flow more; `refused` are not asked again. Among equals each in turn.
    ///
    /// # Errors
    /// None is well, and why.
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
        self.changed.notify_all();
    }

    pub(super) fn down(&self, number: Option<u64>, why: String) {
        {
            let mut trouble = lock(&self.trouble);
            trouble.why = Some(why);
            trouble.falls += 1;
        }
        // Last, and under the lock of those who wait: one that has looked before is asleep by now.
        lock(&self.well).retain(|other| Some(other.number) != number);
        self.changed.notify_all();
    }

    /// Nobody keeps its containers any more.
    pub(super) fn forsake(&self) {
        lock(&self.trouble).why.get_or_insert_with(|| "sidetrack is shutting down".to_owned());
        // As in `down`.
        drop(lock(&self.well));
        self.changed.notify_all();
    }

    /// Waits until all containers are well. Not for flows: it blocks.
    ///
    /// # Errors
    /// One could not be started or did not get well in time, and why.
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
