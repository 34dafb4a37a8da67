//! Reload: on SIGHUP, when the file changes, or on request, the file is read and checked. A valid file replaces
//! the present snapshot as a whole. An invalid one changes nothing. Running flows continue in both cases, each
//! with its verdict.
//!
//! A configuration can be tried for some time: it is taken back unless it is confirmed.
//!
//! ```text
//! FILE (the file's text is in force) --try: checked and applied--> TRIED --confirm--> FILE (the command writes the file)
//! TRIED --time-out: the one before is applied again--> FILE
//! TRIED --the file is loaded--> FILE
//! ```

use crate::config::{Config, waiting_for_restart};
use arc_swap::ArcSwap;
use notify::event::ModifyKind;
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use sidetrack_core::policy::Policy;
use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

/// The file must be unchanged for this time: editors write in several steps.
const QUIET: Duration = Duration::from_millis(100);
/// A file that keeps changing is read after this time.
const QUIET_MAX: Duration = Duration::from_secs(2);
/// The answer when the [`Reloader`] has ended.
const GONE: &str = "sidetrack is shutting down";
/// Most requests for a reload that wait. Further ones are rejected.
const REQUESTS_MAX: usize = 16;
/// Most replaced policies that are kept.
const REPLACED_MAX: usize = 16;

/// Applies a checked configuration (listeners, packet filter) before it replaces the old one. If it fails, it
/// must leave everything as it was.
pub type Apply = Box<dyn FnMut(&Change<'_>) -> anyhow::Result<()> + Send>;

/// A configuration that is about to replace another.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// The present one.
    pub old: &'a Arc<Config>,
    /// The new one.
    pub new: &'a Arc<Config>,
    /// The text of the new one.
    pub text: &'a str,
}

/// The state of the configuration, for the admin interface and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// 1 for the configuration at the start, one more for each replacement.
    pub generation: u64,
    /// When the present configuration came into force.
    pub since: SystemTime,
    /// Why the last reload was rejected, with place and carets. `None` if it succeeded.
    pub last_error: Option<String>,
    /// Changed settings in the file that need a restart, one line each.
    pub waiting_for_restart: Vec<String>,
    /// When the configuration in force is taken back, unless it is confirmed. `None`: it stays.
    pub unconfirmed_until: Option<Instant>,
}

/// A handle for other parts of the program: the present snapshot and its state.
#[derive(Clone, Debug)]
pub struct ReloadHandle {
    path: Arc<Path>,
    current: Arc<ArcSwap<Config>>,
    standing: Arc<Mutex<Standing>>,
    requests: mpsc::Sender<Request>,
}

/// What is asked for, and where the answer goes.
type Request = (Wish, oneshot::Sender<Result<Done, String>>);

/// What a [`Reloader`] is asked for.
#[derive(Debug)]
enum Wish {
    /// Load the file.
    Reload,
    /// Try this text.
    Try(String, Duration),
    /// What is tried is good.
    Confirm,
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number of the configuration in force.
    pub generation: u64,
    /// The text of a configuration that is confirmed: it belongs into the file. `None`: the file has it.
    pub text: Option<String>,
}

/// A configuration that is in force until its time is over.
struct Tried {
    until: Instant,
    /// The one before, with its text. `None`: the program was started with the one that is tried.
    before: Option<(Arc<Config>, Option<String>)>,
    text: String,
}

/// Watches the file and reloads it. One task drives it.
pub struct Reloader {
    handle: ReloadHandle,
    requests: mpsc::Receiver<Request>,
    work: Arc<Mutex<Work>>,
    /// Ends the program: the configuration that it was started with was not confirmed.
    give_up: Option<oneshot::Sender<()>>,
}

/// The work of a reload. Only one runs at a time. It may wait until containers are healthy, so it uses a thread
/// of its own.
struct Work {
    handle: ReloadHandle,
    apply: Apply,
    /// Is told when a reload begins (true) and ends (false).
    tell: Box<dyn Fn(bool) + Send>,
    /// The configuration that the program started with.
    start: Arc<Config>,
    /// The last text that was read, valid or not. A change of the file that leaves its text the same is not a
    /// reload.
    last_text: Option<String>,
    /// The latest policies that were replaced: flows that they decided about refer to them, to say why.
    replaced: VecDeque<Arc<Policy>>,
    tried: Option<Tried>,
}

impl ReloadHandle {
    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The present snapshot, shared: a worker loads it once for each flow.
    pub const fn current(&self) -> &Arc<ArcSwap<Config>> {
        &self.current
    }

    /// The state of the configuration.
    pub fn standing(&self) -> Standing {
        lock(&self.standing).clone()
    }

    /// Reloads now. Returns the new generation.
    ///
    /// # Errors
    /// Says why the file was rejected, with place and carets, or that the [`Reloader`] has ended.
    pub async fn reload(&self) -> Result<u64, String> {
        self.ask(Wish::Reload)?.await.map_err(|_| GONE.to_owned())?.map(|done| done.generation)
    }

    /// Puts this text in force, which is checked as if it were the file's. Without [`ReloadHandle::confirm`] the configuration before
    /// it comes back after this time.
    ///
    /// # Errors
    /// Says why the text was rejected, or that another configuration is tried.
    pub async fn attempt(&self, text: String, within: Duration) -> Result<Done, String> {
        self.ask(Wish::Try(text, within))?.await.map_err(|_| GONE.to_owned())?
    }

    /// Keeps the configuration that is tried. Its text belongs into the file, which the caller writes.
    ///
    /// # Errors
    /// None is tried.
    pub async fn confirm(&self) -> Result<Done, String> {
        self.ask(Wish::Confirm)?.await.map_err(|_| GONE.to_owned())?
    }

    /// [`ReloadHandle::reload`] for a thread that may block.
    ///
    /// # Errors
    /// Fails as [`ReloadHandle::reload`] does.
    pub fn reload_blocking(&self) -> Result<u64, String> {
        let done = self.ask(Wish::Reload)?.blocking_recv().map_err(|_| GONE.to_owned())?;
        done.map(|done| done.generation)
    }

    fn ask(&self, wish: Wish) -> Result<oneshot::Receiver<Result<Done, String>>, String> {
        let (answer, answered) = oneshot::channel();
        let sent = self.requests.try_send((wish, answer));
        sent.map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => "too many reloads wait already; try again".to_owned(),
            mpsc::error::TrySendError::Closed(_) => GONE.to_owned(),
        })?;
        Ok(answered)
    }
}

impl Reloader {
    /// Creates a reloader for the file at `path`, from which `config` was read.
    pub fn new(path: &Path, config: Arc<Config>, apply: Apply) -> (Self, ReloadHandle) {
        let (sender, requests) = mpsc::channel(REQUESTS_MAX);
        let standing = Standing {
            generation: 1,
            since: SystemTime::now(),
            last_error: None,
            waiting_for_restart: Vec::new(),
            unconfirmed_until: None,
        };
        let start = config.clone();
        let handle = ReloadHandle {
            path: path.into(),
            current: Arc::new(ArcSwap::new(config)),
            standing: Arc::new(Mutex::new(standing)),
            requests: sender,
        };
        // The text that was just read. Events for other files in the folder then cause no reload.
        let last_text = std::fs::read_to_string(path).ok();
        let work = Arc::new(Mutex::new(Work {
            handle: handle.clone(),
            apply,
            tell: Box::new(drop),
            start,
            last_text,
            replaced: VecDeque::new(),
            tried: None,
        }));
        (Self { handle: handle.clone(), requests, work, give_up: None }, handle)
    }

    /// The program was started with a configuration that must be confirmed within this time. Else `give_up` is told.
    #[must_use]
    pub fn unconfirmed(mut self, within: Duration, give_up: oneshot::Sender<()>) -> Self {
        let until = Instant::now() + within;
        lock(&self.work).try_until(Tried { until, before: None, text: String::new() });
        self.give_up = Some(give_up);
        self
    }

    /// Calls `tell` with true when a reload begins, and with false when it has ended, successful or not.
    #[must_use]
    pub fn telling(self, tell: impl Fn(bool) + Send + 'static) -> Self {
        lock(&self.work).tell = Box::new(tell);
        self
    }

    /// Reloads on SIGHUP, on changes of the file and on request, until dropped. `ready` is sent once everything
    /// is watched.
    ///
    /// # Errors
    /// Fails if SIGHUP cannot be handled. If the file cannot be watched, this is logged, and SIGHUP still works.
    pub async fn run(mut self, ready: oneshot::Sender<()>) -> std::io::Result<()> {
        let mut hangup = signal(SignalKind::hangup())?;
        let (told, mut changes) = mpsc::channel(1);
        let watcher = watch(&self.handle.path, told);
        if let Err(error) = &watcher {
            let path = self.handle.path.display();
            tracing::warn!(
                "cannot watch {path} for changes ({error}); reload with SIGHUP or the admin interface"
            );
        }
        // Fails if the start was aborted.
        let _ = ready.send(());
        let mut unrest = Unrest::default();
        loop {
            tokio::select! {
                // The result is in the log and in `Standing`.
                Some(()) = hangup.recv() => drop(self.reload("SIGHUP").await),
                Some((wish, answer)) = self.requests.recv() => {
                    let done = match wish {
                        Wish::Reload => self.reload("asked to").await,
                        Wish::Try(text, within) => self.run_work(move |work| work.attempt(text, within)).await,
                        Wish::Confirm => lock(&self.work).confirm(),
                    };
                    // The requester may be gone.
                    let _ = answer.send(done);
                }
                () = unconfirmed(self.handle.standing().unconfirmed_until) => {
                    let is_over = self.run_work(|work| Ok(work.take_back())).await == Ok(false);
                    if let Some(give_up) = self.give_up.take().filter(|_| is_over) {
                        let _ = give_up.send(());
                    }
                }
                // Only noted here: requests that come meanwhile do not wait until the file is unchanged.
                Some(()) = changes.recv(), if watcher.is_ok() => unrest.again(),
                () = unrest.over() => {
                    unrest = Unrest::default();
                    if self.changed() {
                        drop(self.reload("the file changed").await);
                    }
                }
            }
        }
    }

    /// Whether the file's text has changed. A file that is missing for a moment will come back.
    fn changed(&self) -> bool {
        let text = std::fs::read_to_string(&*self.handle.path);
        match text {
            Ok(text) => Some(&text) != lock(&self.work).last_text.as_ref(),
            // The reload will report the reason.
            Err(error) => error.kind() == ErrorKind::PermissionDenied,
        }
    }

    async fn reload(&self, reason: &'static str) -> Result<Done, String> {
        self.run_work(move |work| work.reload(reason).map(|generation| Done { generation, text: None })).await
    }

    /// Changes the configuration on a thread that may block, so that this task can answer other requests.
    async fn run_work<T: Send + 'static>(
        &self,
        change: impl FnOnce(&mut Work) -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let work = self.work.clone();
        let done = tokio::task::spawn_blocking(move || {
            let mut work = lock(&work);
            (work.tell)(true);
            let result = change(&mut work);
            (work.tell)(false);
            result
        })
        .await;
        done.unwrap_or_else(|error| Err(format!("the reload ended early: {error}")))
    }
}

/// Waits until the time of a configuration that is tried is over. Pending for ever without one.
async fn unconfirmed(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until).await,
        None => std::future::pending().await,
    }
}

impl Work {
    /// Reads, checks, applies and swaps. Logs and stores the result.
    fn reload(&mut self, reason: &str) -> Result<u64, String> {
        let path = self.handle.path.clone();
        let text = std::fs::read_to_string(&*path);
        let result = match &text {
            Ok(text) => Config::from_text(&path.display().to_string(), text),
            // Reads again, for an error message with all details.
            Err(_) => Config::load(&*path),
        };
        self.last_text = text.ok();
        let result = result.map_err(|error| with_hint(error.render(false)));
        let text = self.last_text.clone().unwrap_or_default();
        let result = result.and_then(|config| self.swap(Arc::new(config), &text));
        if result.is_ok() && self.tried.take().is_some() {
            tracing::info!("the configuration that was tried is replaced by the file");
        }
        self.note(&result, reason);
        result
    }

    /// Notes the result of a change.
    fn note(&self, result: &Result<u64, String>, reason: &str) {
        let path = self.handle.path.clone();
        let mut standing = lock(&self.handle.standing);
        match result {
            Ok(generation) => {
                let generation = *generation;
                let waiting_for_restart = waiting_for_restart(&self.start, &self.handle.current.load());
                if !waiting_for_restart.is_empty() {
                    // One event for all of them: the log limits the lines of each place in the program.
                    tracing::warn!("some settings need a restart:\n{}", waiting_for_restart.join("\n"));
                }
                *standing = Standing {
                    generation,
                    since: SystemTime::now(),
                    last_error: None,
                    waiting_for_restart,
                    unconfirmed_until: self.tried.as_ref().map(|tried| tried.until),
                };
                tracing::info!(generation, "{} reloaded ({reason})", path.display());
            }
            Err(error) => {
                standing.last_error = Some(error.clone());
                tracing::error!("{} is rejected ({reason}); nothing changes\n{error}", path.display());
            }
        }
    }

    /// Puts a text in force for some time.
    fn attempt(&mut self, text: String, within: Duration) -> Result<Done, String> {
        if self.tried.is_some() {
            return Err("another configuration waits for its confirmation; confirm it, or wait until it is taken back".to_owned());
        }
        let before = self.handle.current.load_full();
        let config = Config::from_text(&self.handle.path.display().to_string(), &text);
        let config = config.map_err(|error| with_hint(error.render(false)))?;
        let generation = self.swap(Arc::new(config), &text)?;
        // The time begins now: containers may have taken some.
        let until = Instant::now() + within;
        self.try_until(Tried { until, before: Some((before, self.last_text.clone())), text });
        self.note(&Ok(generation), &format!("tried for {} s", within.as_secs_f64()));
        Ok(Done { generation, text: None })
    }

    fn try_until(&mut self, tried: Tried) {
        lock(&self.handle.standing).unconfirmed_until = Some(tried.until);
        self.tried = Some(tried);
    }

    fn confirm(&mut self) -> Result<Done, String> {
        let tried = self.tried.take().ok_or("no configuration waits for a confirmation")?;
        let mut standing = lock(&self.handle.standing);
        standing.unconfirmed_until = None;
        let generation = standing.generation;
        drop(standing);
        tracing::info!(generation, "the configuration is confirmed");
        let text = tried.before.is_some().then_some(tried.text);
        if text.is_some() {
            // The caller writes it: then nothing has changed.
            self.last_text.clone_from(&text);
        }
        Ok(Done { generation, text })
    }

    /// Takes back what is tried if its time is over. Returns false if nothing was there before it.
    fn take_back(&mut self) -> bool {
        let Some(tried) = self.tried.take_if(|tried| tried.until <= Instant::now()) else { return true };
        lock(&self.handle.standing).unconfirmed_until = None;
        let Some((before, text)) = tried.before else { return false };
        let done = self.swap(before, text.as_deref().unwrap_or_default());
        self.note(&done, "not confirmed");
        if done.is_ok() {
            let why =
                "the configuration that was tried is not confirmed: the one before it is in force again";
            tracing::warn!("{why}");
            lock(&self.handle.standing).last_error = Some(why.to_owned());
        }
        true
    }

    fn swap(&mut self, new: Arc<Config>, text: &str) -> Result<u64, String> {
        let old = self.handle.current.load_full();
        // Apply first: if that fails, the old snapshot stays in use.
        (self.apply)(&Change { old: &old, new: &new, text }).map_err(|error| format!("{error:#}"))?;
        self.handle.current.store(new);
        self.replaced.truncate(REPLACED_MAX - 1);
        self.replaced.push_front(old.policy.clone());
        Ok(self.handle.standing().generation + 1)
    }
}

/// Adds to an error why this process may not be able to read a file that other users can read.
fn with_hint(error: String) -> String {
    if !error.contains(DENIED) {
        return error;
    }
    format!(
        "{error}\nhelp: after its start sidetrack may read only the folders of files that its first configuration named, and no \
         others: restart it for files elsewhere"
    )
}

/// The system's message for missing permission.
const DENIED: &str = "Permission denied";

/// A file that is changing: the latest time to read it, and when it counts as unchanged.
#[derive(Debug, Default)]
struct Unrest(Option<(Instant, Instant)>);

impl Unrest {
    /// Notes another change.
    fn again(&mut self) {
        let now = Instant::now();
        let (latest, _) = self.0.unwrap_or((now + QUIET_MAX, now));
        self.0 = Some((latest, (now + QUIET).min(latest)));
    }

    /// Waits until the file counts as unchanged. Pending for ever if it is not changing.
    async fn over(&self) {
        match self.0 {
            Some((_, quiet)) => sleep_until(quiet).await,
            None => std::future::pending().await,
        }
    }
}

/// Waits until nothing has changed for a while.
pub async fn settle(changes: &mut mpsc::Receiver<()>) {
    let latest = Instant::now() + QUIET_MAX;
    loop {
        let quiet = (Instant::now() + QUIET).min(latest);
        match timeout_at(quiet, changes.recv()).await {
            Ok(Some(())) if Instant::now() < latest => {}
            Ok(None) => return sleep_until(quiet).await,
            Ok(Some(())) | Err(_) => return,
        }
    }
}

/// Watches the folders of the file and of its link target instead of the file, because editors replace it. Sends
/// a message for each possible change, until the watcher is dropped.
///
/// # Errors
/// Fails if the folders cannot be watched.
pub fn watch(path: &Path, told: mpsc::Sender<()>) -> notify::Result<RecommendedWatcher> {
    let name = path.file_name().map(ToOwned::to_owned);
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        let ours = |path: &PathBuf| path.file_name() == name.as_deref();
        // A lost event may have been about this file.
        let relevant = event.map_or(true, |event| event.need_rescan() || changes(&event, ours));
        if relevant {
            // If the channel is full, the receiver will be woken anyway.
            let _ = told.try_send(());
        }
    })?;
    let folder = |path: &Path| match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let own = folder(path);
    watcher.watch(&own, RecursiveMode::NonRecursive)?;
    let linked = std::fs::canonicalize(path).map(|path| folder(&path));
    if let Ok(linked) = linked
        && std::fs::canonicalize(&own).is_ok_and(|own| own != linked)
    {
        watcher.watch(&linked, RecursiveMode::NonRecursive)?;
    }
    Ok(watcher)
}

/// Whether an event may have changed the text under our name. Each entry that appears, disappears or is renamed
/// counts, because it may be part of a link. Writes to other files do not count: logs and records may be in the
/// same folder.
fn changes(event: &Event, ours: impl Fn(&PathBuf) -> bool) -> bool {
    match event.kind {
        EventKind::Access(_) => false,
        EventKind::Create(_) | EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)) => true,
        _ => event.paths.iter().any(ours),
    }
}
