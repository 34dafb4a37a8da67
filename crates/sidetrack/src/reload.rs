//! Reload: on SIGHUP, when the file changes, or when asked, the file is read and checked; only a right one takes the
//! place of the snapshot in use, as a whole. A wrong one changes nothing. Flows keep running either way: each keeps
//! the verdict it got.

use crate::config::{Config, waiting_for_restart};
use arc_swap::ArcSwap;
use notify::event::ModifyKind;
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};

/// The file has to be left alone for so long: editors write in several steps.
const QUIET: Duration = Duration::from_millis(100);
/// A file that never comes to rest is read after so long.
const QUIET_MAX: Duration = Duration::from_secs(2);
/// The answer where nobody drives the [`Reloader`] any more.
const GONE: &str = "sidetrack is shutting down";
/// Requests that wait for a reload at a time; more are refused.
const REQUESTS_MAX: usize = 16;

/// Makes a checked configuration effective (listeners, packet filter) before it takes the old one's place.
/// What it refuses changes nothing: on an error it has to leave all as it was.
pub type Apply = Box<dyn FnMut(&Change<'_>) -> anyhow::Result<()> + Send>;

/// A configuration about to take the place of another.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    /// The one in use.
    pub old: &'a Arc<Config>,
    /// The one to come.
    pub new: &'a Arc<Config>,
    /// The text of the new one.
    pub text: &'a str,
}

/// How the configuration stands, for the admin interface and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// 1 for the configuration at the start, one more for each that took its place.
    pub generation: u64,
    /// When the configuration in use was taken.
    pub since: SystemTime,
    /// Why the last reload was refused, with place and carets; none if it was not.
    pub last_error: Option<String>,
    /// What the file has changed that only a restart puts in force, one line for each setting.
    pub waiting_for_restart: Vec<String>,
}

/// What everybody may hold: the snapshot in use and how it stands.
#[derive(Clone, Debug)]
pub struct ReloadHandle {
    path: Arc<Path>,
    current: Arc<ArcSwap<Config>>,
    standing: Arc<Mutex<Standing>>,
    requests: mpsc::Sender<oneshot::Sender<Result<u64, String>>>,
}

/// Watches and reloads; one task drives it.
pub struct Reloader {
    handle: ReloadHandle,
    requests: mpsc::Receiver<oneshot::Sender<Result<u64, String>>>,
    work: Arc<Mutex<Work>>,
}

/// What one reload does, one at a time. It may wait for containers to get well, so it has a thread of its own.
struct Work {
    handle: ReloadHandle,
    apply: Apply,
    /// The configuration that the program started with.
    start: Arc<Config>,
    /// The text that was read last, right or wrong: a change of the file that changes nothing is no reload.
    last_text: Option<String>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReloadHandle {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The snapshot in use, shared: a worker loads it once for each flow.
    pub const fn current(&self) -> &Arc<ArcSwap<Config>> {
        &self.current
    }

    /// How the configuration stands.
    pub fn standing(&self) -> Standing {
        lock(&self.standing).clone()
    }

    /// Reloads now; gives the new generation.
    ///
    /// # Errors
    /// Why the file was refused, with place and carets; or that nobody drives the [`Reloader`] any more.
    pub async fn reload(&self) -> Result<u64, String> {
        self.ask()?.await.map_err(|_| GONE.to_owned())?
    }

    /// As [`ReloadHandle::reload`], for a thread that may block.
    ///
    /// # Errors
    /// As [`ReloadHandle::reload`].
    pub fn reload_blocking(&self) -> Result<u64, String> {
        self.ask()?.blocking_recv().map_err(|_| GONE.to_owned())?
    }

    fn ask(&self) -> Result<oneshot::Receiver<Result<u64, String>>, String> {
        let (answer, answered) = oneshot::channel();
        let sent = self.requests.try_send(answer);
        sent.map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => "too many reloads wait already; try again".to_owned(),
            mpsc::error::TrySendError::Closed(_) => GONE.to_owned(),
        })?;
        Ok(answered)
    }
}

impl Reloader {
    /// For the file at `path`, from which `config` was read.
    pub fn new(path: &Path, config: Arc<Config>, apply: Apply) -> (Self, ReloadHandle) {
        let (sender, requests) = mpsc::channel(REQUESTS_MAX);
        let standing = Standing {
            generation: 1,
            since: SystemTime::now(),
            last_error: None,
            waiting_for_restart: Vec::new(),
        };
        let start = config.clone();
        let handle = ReloadHandle {
            path: path.into(),
            current: Arc::new(ArcSwap::new(config)),
            standing: Arc::new(Mutex::new(standing)),
            requests: sender,
        };
        // What was just read: a change nearby is no change of it.
        let last_text = std::fs::read_to_string(path).ok();
        let work = Arc::new(Mutex::new(Work { handle: handle.clone(), apply, start, last_text }));
        (Self { handle: handle.clone(), requests, work }, handle)
    }

    /// Reloads on SIGHUP, on changes of the file and on request, until dropped. `ready` is told once all is watched.
    ///
    /// # Errors
    /// SIGHUP cannot be caught. A file that cannot be watched is logged, and SIGHUP still works.
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
        // Nobody listens any more where the start was given up.
        let _ = ready.send(());
        let mut unrest = Unrest::default();
        loop {
            tokio::select! {
                // How it went stands in the log and in `Standing`.
                Some(()) = hangup.recv() => drop(self.reload("SIGHUP").await),
                Some(answer) = self.requests.recv() => {
                    // Who asked may have gone.
                    let _ = answer.send(self.reload("asked to").await);
                }
                // Whoever asks meanwhile does not wait for the file to come to rest.
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

    /// What was read last need not be read again; a file that is gone for a moment will come back.
    fn changed(&self) -> bool {
        let text = std::fs::read_to_string(&*self.handle.path);
        match text {
            Ok(text) => Some(&text) != lock(&self.work).last_text.as_ref(),
            // The reload says why.
            Err(error) => error.kind() == ErrorKind::PermissionDenied,
        }
    }

    /// One reload, on a thread that may block: whoever looks in meanwhile is answered.
    async fn reload(&self, reason: &'static str) -> Result<u64, String> {
        let work = self.work.clone();
        let done = tokio::task::spawn_blocking(move || lock(&work).reload(reason)).await;
        done.unwrap_or_else(|error| Err(format!("the reload ended early: {error}")))
    }
}

impl Work {
    /// Reads, checks, applies and swaps; logs and remembers how it went.
    fn reload(&mut self, reason: &str) -> Result<u64, String> {
        let path = self.handle.path.clone();
        let text = std::fs::read_to_string(&*path);
        let result = match &text {
            Ok(text) => Config::from_text(&path.display().to_string(), text),
            // Says in full why it cannot be read.
            Err(_) => Config::load(&*path),
        };
        self.last_text = text.ok();
        let result = result.map_err(|error| with_hint(error.render(false)));
        let result = result.and_then(|config| self.swap(config));
        let mut standing = lock(&self.handle.standing);
        match &result {
            Ok(generation) => {
                let generation = *generation;
                let waiting_for_restart = waiting_for_restart(&self.start, &self.handle.current.load());
                if !waiting_for_restart.is_empty() {
                    // One event: each place in the program writes a limited number of them.
                    tracing::warn!("some settings need a restart:\n{}", waiting_for_restart.join("\n"));
                }
                *standing =
                    Standing { generation, since: SystemTime::now(), last_error: None, waiting_for_restart };
                tracing::info!(generation, "{} reloaded ({reason})", path.display());
            }
            Err(error) => {
                standing.last_error = Some(error.clone());
                tracing::error!("{} is not taken ({reason}); nothing changes\n{error}", path.display());
            }
        }
        result
    }

    fn swap(&mut self, config: Config) -> Result<u64, String> {
        let old = self.handle.current.load_full();
        let new = Arc::new(config);
        let text = self.last_text.as_deref().unwrap_or_default();
        (self.apply)(&Change { old: &old, new: &new, text }).map_err(|error| format!("{error:#}"))?;
        self.handle.current.store(new);
        Ok(self.handle.standing().generation + 1)
    }
}

/// Says why a file may be closed that others can read.
fn with_hint(error: String) -> String {
    if !error.contains(DENIED) {
        return error;
    }
    format!(
        "{error}\nhelp: after its start sidetrack may read only the folders of files that its first configuration named, and no \
         others: restart it for files elsewhere"
    )
}

/// How the system words a refusal.
const DENIED: &str = "Permission denied";

/// A file that changes: since when, and when that is over.
#[derive(Debug, Default)]
struct Unrest(Option<(Instant, Instant)>);

impl Unrest {
    /// It has changed again.
    fn again(&mut self) {
        let now = Instant::now();
        let (latest, _) = self.0.unwrap_or((now + QUIET_MAX, now));
        self.0 = Some((latest, (now + QUIET).min(latest)));
    }

    /// Waits until it has come to rest; for ever while it is at rest.
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

/// Watches the folders of the file and of what it links to, not the file: editors put a new one in its place. Tells of
/// what may have changed it, until the watcher is dropped.
///
/// # Errors
/// The folders cannot be watched.
pub fn watch(path: &Path, told: mpsc::Sender<()>) -> notify::Result<RecommendedWatcher> {
    let name = path.file_name().map(ToOwned::to_owned);
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        let ours = |path: &PathBuf| path.file_name() == name.as_deref();
        // An event that was lost may have been ours.
        let relevant = event.map_or(true, |event| event.need_rescan() || changes(&event, ours));
        if relevant {
            // Full: somebody is being told already.
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

/// Whether an event may have changed what is read under our name. Any entry that comes, goes or is renamed counts
/// (links may lead over it); data written to others does not (logs and records may lie in the same folder).
fn changes(event: &Event, ours: impl Fn(&PathBuf) -> bool) -> bool {
    match event.kind {
        EventKind::Access(_) => false,
        EventKind::Create(_) | EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)) => true,
        _ => event.paths.iter().any(ours),
    }
}
