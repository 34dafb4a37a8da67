//! The sockets where users and services connect to this program itself, and where its records go.

use super::orchestrator::Orchestrator;
use super::outgoing::{self, Paths};
use super::upgrade::{Heritage, Starter, WindowPart, socket_beside};
use crate::admin::{self, AdminSocket, AdminState, Tokens};
use crate::config::{Admin, AdminAt, Config, RecordTo};
use crate::live::Ledger;
use crate::record::history::{History, Settings};
use crate::record::{RecordWriter, Target};
use crate::rights::DataUser;
use anyhow::Context;
use sidetrack_common::systemd::passed::Passed;
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::scm;
use sidetrack_sys::sync::lock;
use sidetrack_sys::undo::Guard;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The sockets.
pub(super) struct Windows {
    admin: Option<AdminSocket>,
    metrics: Option<(TcpListener, Arc<[String]>)>,
    page: Option<PageAt>,
    /// Where services ask for paths.
    outgoing: Option<TcpListener>,
    /// Whom the page asks for applications.
    pub orchestrator: Option<Orchestrator>,
    /// Where upgrades are asked for, with its path.
    upgrades: Option<(OwnedFd, PathBuf)>,
}

/// Where browsers log in.
struct PageAt {
    listener: TcpListener,
    tokens: Tokens,
    hosts: Arc<[String]>,
}

impl PageAt {
    /// Opens the page's address, and reads its tokens, while the process has root's rights.
    fn open(
        settings: &Admin,
        address: SocketAddr,
        socket: Option<&Path>,
        before: (Option<&Heritage>, &Passed),
    ) -> anyhow::Result<Self> {
        let of = |part: &WindowPart| if let WindowPart::Page(at) = part { Some(*at) } else { None };
        let listener =
            listen(address, before, of).with_context(|| format!("[admin] page = \"{address}\""))?;
        let path = settings.page_tokens.clone().unwrap_or_else(|| Tokens::default_path(socket));
        let tokens = Tokens::load(&path)?;
        let address = listener.local_addr()?;
        tracing::info!(tokens = %path.display(), "the page is at http://{address}/; log in with a token of this file");
        Ok(Self { listener, tokens, hosts: settings.page_hosts.clone().into() })
    }
}

/// Takes the socket of an earlier process of this node or of the service manager, or binds one.
fn listen(
    address: SocketAddr,
    (heritage, passed): (Option<&Heritage>, &Passed),
    of: impl Fn(&WindowPart) -> Option<SocketAddr>,
) -> io::Result<TcpListener> {
    let taken = match heritage {
        Some(heritage) => heritage.tcp_window(address, of),
        None => passed.listeners(address)?.into_iter().next(),
    };
    taken.map_or_else(|| TcpListener::bind(address), Ok)
}

/// Takes the admin socket of an earlier process of this node, or binds one.
fn admin_socket(config: &Config, heritage: Option<&Heritage>) -> anyhow::Result<Option<AdminSocket>> {
    let (path, is_default) = match &config.admin.socket {
        AdminAt::Default => (admin::default_socket(), true),
        AdminAt::Path(path) => (path.clone(), false),
        AdminAt::None => return Ok(None),
    };
    let taken = heritage.and_then(|heritage| {
        heritage.window(|part| matches!(part, WindowPart::Admin { path: known, .. } if *known == path))
    });
    Ok(Some(match taken {
        Some((WindowPart::Admin { path, with_directory }, fd)) => {
            AdminSocket::taken(fd, &path, with_directory)
                .with_context(|| format!("the admin socket {}", path.display()))?
        }
        _ if is_default => AdminSocket::bind_default(&path)?,
        _ => AdminSocket::bind(&path)?,
    }))
}

/// Takes the socket for upgrades of an earlier process of this node, or binds one beside the admin socket. Without it the node
/// works, and cannot be upgraded while it runs.
fn upgrades(admin: Option<&Path>, heritage: Option<&Heritage>) -> Option<(OwnedFd, PathBuf)> {
    let path = socket_beside(admin?);
    let taken = heritage.and_then(|heritage| {
        heritage.window(|part| matches!(part, WindowPart::Upgrades(known) if *known == path))
    });
    if let Some((_, fd)) = taken {
        return Some((fd, path));
    }
    // The admin socket is ours alone, so this one is of a process that is gone.
    let _ = std::fs::remove_file(&path);
    match scm::listen(&path) {
        Ok(socket) => Some((socket, path)),
        Err(error) => {
            tracing::warn!("this node cannot be upgraded while it runs: {}: {error}", path.display());
            None
        }
    }
}

impl Windows {
    pub(super) fn open(
        config: &Config,
        heritage: Option<&Heritage>,
        passed: &Passed,
    ) -> anyhow::Result<Self> {
        let before = (heritage, passed);
        let admin = admin_socket(config, heritage)?;
        let metrics = config.admin.metrics.map(|address| {
            let of = |part: &WindowPart| if let WindowPart::Metrics(at) = part { Some(*at) } else { None };
            listen(address, before, of).with_context(|| format!("[admin] metrics = \"{address}\""))
        });
        let socket = admin.as_ref().map(AdminSocket::path);
        let page = config.admin.page;
        let page = page.map(|address| PageAt::open(&config.admin, address, socket, before)).transpose()?;
        let upgrades = upgrades(socket, heritage);
        let outgoing = config.outgoing.as_ref().map(|settings| {
            let of = |part: &WindowPart| if let WindowPart::Outgoing(at) = part { Some(*at) } else { None };
            let address = settings.listen;
            listen(address, before, of).with_context(|| format!("[outgoing] listen = \"{address}\""))
        });
        let outgoing = outgoing.transpose()?;
        let metrics =
            metrics.transpose()?.map(|listener| (listener, config.admin.metrics_hosts.clone().into()));
        let orchestrator = config.admin.orchestrator.as_ref().map(Orchestrator::new).transpose()?;
        Ok(Self { admin, metrics, page, outgoing, orchestrator, upgrades })
    }

    pub(super) fn admin_path(&self) -> Option<&Path> {
        self.admin.as_ref().map(AdminSocket::path)
    }

    /// Where upgrades are asked for.
    pub(super) const fn upgrades(&self) -> Option<&(OwnedFd, PathBuf)> {
        self.upgrades.as_ref()
    }

    /// Starts the process that removes the admin socket at our end, if the data plane's user may not remove it.
    pub(super) fn guard(&self, user: Option<&DataUser>) -> anyhow::Result<Option<Guard>> {
        let Some(socket) = self.admin.as_ref().filter(|_| user.is_some()) else { return Ok(None) };
        let guard = Guard::spawn_fixed(vec![socket.undo()], CapabilitySet::DAC_OVERRIDE);
        guard.map(Some).context("cannot start the guard of the admin socket")
    }

    /// The TCP addresses.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.metrics
            .iter()
            .map(|(listener, _)| listener)
            .chain(self.page.iter().map(|page| &page.listener))
            .chain(&self.outgoing)
            .filter_map(|listener| listener.local_addr().ok())
            .collect()
    }
}

/// The tasks that serve the windows, and what ends them.
type Serving = (watch::Sender<bool>, Vec<JoinHandle<io::Result<()>>>);

/// The windows while the node runs. They can rest for a while.
pub(super) struct Open {
    windows: Mutex<Windows>,
    state: Mutex<AdminState>,
    paths: Option<Arc<Paths>>,
    config: Arc<Config>,
    serving: Mutex<Option<Serving>>,
}

impl Open {
    pub(super) fn new(
        windows: Windows,
        state: AdminState,
        paths: Option<Arc<Paths>>,
        config: Arc<Config>,
    ) -> Self {
        let (windows, state, serving) = (Mutex::new(windows), Mutex::new(state), Mutex::default());
        Self { windows, state, paths, config, serving }
    }

    /// Serves, in tasks of the caller's event loop.
    pub(super) fn serve(&self) {
        let (windows, state) = (lock(&self.windows), lock(&self.state).clone());
        let (stop, stopped) = watch::channel(false);
        let mut tasks = Vec::new();
        let cannot = |error: &io::Error| tracing::error!(%error, "a window of this program stays closed");
        if let Some(Ok(socket)) = windows.admin.as_ref().map(|one| one.copy().inspect_err(cannot)) {
            tasks.push(tokio::spawn(admin::serve(state.clone(), socket, stopped.clone())));
        }
        if let Some(PageAt { listener, tokens, hosts }) = &windows.page
            && let Ok(listener) = listener.try_clone().inspect_err(cannot)
        {
            let serve =
                admin::serve_page(state.clone(), listener, tokens.clone(), hosts.clone(), stopped.clone());
            tasks.push(tokio::spawn(serve));
        }
        if let Some((listener, names)) = &windows.metrics
            && let Ok(listener) = listener.try_clone().inspect_err(cannot)
        {
            let serve = admin::serve_metrics(state, listener, names.clone(), stopped.clone());
            tasks.push(tokio::spawn(serve));
        }
        if let Some((listener, paths)) = windows.outgoing.as_ref().zip(self.paths.clone())
            && let Ok(listener) = listener.try_clone().inspect_err(cannot)
        {
            tasks.push(tokio::spawn(outgoing::serve(paths, listener, stopped)));
        }
        *lock(&self.serving) = Some((stop, tasks));
    }

    /// Accepts nothing any more. Answers that are under way have a second.
    pub(super) fn rest(&self) -> Vec<JoinHandle<io::Result<()>>> {
        let Some((stop, tasks)) = lock(&self.serving).take() else { return Vec::new() };
        let _ = stop.send(true);
        tasks
    }

    /// Leaves the files of the sockets where they are at our end.
    pub(super) fn leave(&self) {
        lock(&self.windows).admin.as_mut().into_iter().for_each(AdminSocket::leave);
    }

    /// Lets the starter listen for upgrades.
    pub(super) fn listen(&self, starter: &Starter, config: &Path) {
        let windows = lock(&self.windows);
        let Some((socket, path)) = &windows.upgrades else { return };
        if let Err(error) = starter.listen(socket, path, config) {
            tracing::warn!("this node cannot be upgraded while it runs: {error}");
        }
    }

    /// Closes all sockets, and removes their files unless [`Open::leave`] was called.
    pub(super) fn close(&self) {
        let mut windows = lock(&self.windows);
        (windows.admin, windows.metrics, windows.page) = (None, None, None);
        (windows.outgoing, windows.upgrades) = (None, None);
    }

    /// The paths that services asked for, if they may.
    pub(super) const fn paths(&self) -> Option<&Arc<Paths>> {
        self.paths.as_ref()
    }

    /// All metrics, as text.
    pub(super) fn metrics_text(&self) -> String {
        lock(&self.state).metrics_text()
    }

    /// Copies of the sockets, for a process that goes on with them.
    pub(super) fn offered(&self) -> io::Result<Vec<(WindowPart, OwnedFd)>> {
        let windows = lock(&self.windows);
        let mut offered = Vec::new();
        if let Some(admin) = &windows.admin {
            let (fd, with_directory) = admin.descriptor();
            let part = WindowPart::Admin { path: admin.path().to_owned(), with_directory };
            offered.push((part, fd.try_clone_to_owned()?));
        }
        if let Some((listener, _)) = &windows.metrics {
            offered
                .push((WindowPart::Metrics(listener.local_addr()?), listener.as_fd().try_clone_to_owned()?));
        }
        if let Some(PageAt { listener, .. }) = &windows.page {
            offered.push((WindowPart::Page(listener.local_addr()?), listener.as_fd().try_clone_to_owned()?));
        }
        if let Some(outgoing) = &windows.outgoing {
            offered
                .push((WindowPart::Outgoing(outgoing.local_addr()?), outgoing.as_fd().try_clone_to_owned()?));
        }
        if let Some((socket, path)) = &windows.upgrades {
            offered.push((WindowPart::Upgrades(path.clone()), socket.try_clone()?));
        }
        Ok(offered)
    }

    /// Opens the record file and the history again. Failures are logged: the node goes on without them.
    pub(super) fn records_again(&self) -> (Option<RecordWriter>, Option<Arc<History>>) {
        let lost = |error: &anyhow::Error| tracing::error!("records are lost from now on: {error:#}");
        let writer = writer(&self.config).inspect_err(lost).ok().flatten();
        let mut state = lock(&self.state);
        let history = history(&self.config, &state.ledgers).inspect_err(lost).ok().flatten();
        *state = state.clone().with_history(history.clone());
        (writer, history)
    }
}

/// Opens the history of a configuration.
pub(super) fn history(config: &Config, ledgers: &[Arc<Ledger>]) -> anyhow::Result<Option<Arc<History>>> {
    let settings = config.history.as_ref().map(|history| Settings {
        path: history.path.clone(),
        bytes_max: history.max_bytes,
        keep: history.keep,
        counters: history.counters,
    });
    let open = settings.map(|settings| History::open(&settings, ledgers.to_vec()));
    Ok(open.transpose().context("[history]")?.map(Arc::new))
}

/// Opens what records are written to.
pub(super) fn writer(config: &Config) -> anyhow::Result<Option<RecordWriter>> {
    let target = match &config.record.to {
        RecordTo::None => None,
        RecordTo::Stdout => Some(Target::Stdout),
        RecordTo::Stderr => Some(Target::Stderr),
        RecordTo::File(path) => Some(Target::File(path.clone())),
    };
    target.map(RecordWriter::start).transpose().context("[record] to")
}
