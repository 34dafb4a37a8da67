//! The tunnel carrier: long-lived connections to a far side, so that a new flow needs no handshake. Request,
//! metadata and the client's first bytes leave in the first flight, and the far side dials the destination.
//!
//! Each worker has its own tunnels and shares nothing with other workers. A tunnel has one or more paths, the
//! addresses in its configuration. A path is a QUIC connection with a stream for each flow. If UDP does not get
//! through, it is a pool of TLS connections, one for each flow (`docs/adr/0007-tunnel-fallback.md`). A flow of UDP has a stream
//! too, and a lane of QUIC datagrams beside it ([`lanes`]).

pub mod lanes;
mod open;
pub mod path;
pub mod pool;
pub mod quic;
pub mod stream;

pub use stream::Stream;

pub(super) use open::{associate, carry};

use super::Dialing;
use crate::config::{Config, Tunnel as Settings};
use crate::reactor;
use arc_swap::ArcSwap;
use path::Path;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Returns the settings for dialling at the time of the call.
pub type AskDialing = Arc<dyn Fn() -> Arc<Dialing> + Send + Sync>;

/// How long a stopping worker waits until its far sides know.
const CLOSING: Duration = Duration::from_millis(200);

thread_local! {
    /// The tunnels of this worker.
    static OPEN: RefCell<Vec<Rc<Tunnel>>> = const { RefCell::new(Vec::new()) };
}

/// Access to the tunnels of the calling thread's worker.
pub struct Tunnels {
    dialing: AskDialing,
    config: Arc<ArcSwap<Config>>,
}

impl fmt::Debug for Tunnels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnels").finish_non_exhaustive()
    }
}

/// One tunnel.
pub struct Tunnel {
    settings: Arc<Settings>,
    paths: Vec<Rc<Path>>,
    /// Dropping it stops the tasks that keep the paths open.
    _stop: watch::Sender<()>,
}

impl Tunnels {
    /// The tunnels of this configuration in force, dialled with these settings.
    pub fn new(dialing: AskDialing, config: Arc<ArcSwap<Config>>) -> Self {
        Self { dialing, config }
    }

    /// Opens and closes tunnels according to `settings`. Unchanged tunnels are not touched. Flows of removed
    /// tunnels live as long as their connections.
    pub fn update(&self, settings: &[Arc<Settings>]) {
        let old = OPEN.take();
        let wanted = settings.iter().map(|settings| {
            let found = old.iter().find(|tunnel| tunnel.settings == *settings).cloned();
            found.unwrap_or_else(|| Rc::new(Tunnel::open(settings.clone(), &self.dialing)))
        });
        OPEN.set(wanted.collect());
    }

    /// Returns the tunnel with this name. A flow of a new configuration may come before the worker has looked at it.
    pub fn find(&self, name: &str) -> Option<Rc<Tunnel>> {
        Self::opened(name).or_else(|| {
            self.update(&self.config.load().tunnels);
            Self::opened(name)
        })
    }

    fn opened(name: &str) -> Option<Rc<Tunnel>> {
        OPEN.with_borrow(|open| open.iter().find(|tunnel| *tunnel.settings.name == *name).cloned())
    }

    /// Closes all tunnels, and waits a moment so that the far sides learn of it.
    pub async fn close(&self) {
        for tunnel in OPEN.take() {
            for path in &tunnel.paths {
                // A far side that is not told in time notices by itself (`lost_after_ms`).
                let _ = reactor::timeout(CLOSING, path.close()).await;
            }
        }
    }
}

impl Tunnel {
    fn open(settings: Arc<Settings>, dialing: &AskDialing) -> Self {
        let path = |address| Rc::new(Path::new(settings.clone(), address, dialing.clone()));
        let paths: Vec<_> = settings.paths.iter().cloned().map(path).collect();
        let (stop, stopped) = watch::channel(());
        for path in &paths {
            let (path, mut stopped) = (path.clone(), stopped.clone());
            reactor::spawn(async move {
                tokio::select! {
                    () = path.hold() => {}
                    // Nothing is ever sent on this channel: it ends with its sender.
                    _ = stopped.changed() => {}
                }
            });
        }
        Self { settings, paths, _stop: stop }
    }
}
