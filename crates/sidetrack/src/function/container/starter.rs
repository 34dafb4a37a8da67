//! Our end of the connection to the containers' process, and the thread that keeps the containers of all functions
//! running.

use super::ask::{Ask, Begun};
use super::grow;
use super::pool::Pool;
use super::process::ARGUMENT;
use crate::live::Clock;
use crate::reactor;
use crate::rights::DataUser;
use crate::wire;
use anyhow::Context;
use sidetrack_common::containers::Order;
use sidetrack_core::function::ContainerSpec;
use sidetrack_sys::sync::lock;
use sidetrack_sys::{process, scm};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How long the removal of all containers may take when we stop.
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// Starts containers.
#[derive(Debug)]
pub struct Containers {
    launcher: Arc<Launcher>,
    child: Mutex<std::process::Child>,
    engine: PathBuf,
    pools: mpsc::UnboundedSender<Arc<Pool>>,
    /// Taken when the thread is started.
    inbox: Mutex<Option<mpsc::UnboundedReceiver<Arc<Pool>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    stop: watch::Sender<bool>,
}

/// The connection over which containers are requested.
#[derive(Debug)]
pub(super) struct Launcher(Mutex<OwnedFd>);

impl Launcher {
    /// Requests a container. Returns the connection that holds it.
    ///
    /// # Errors
    /// Fails if the containers' process is gone.
    pub(super) fn launch(&self, order: Order) -> io::Result<OwnedFd> {
        let (ours, theirs) = scm::pair()?;
        let end = lock(&self.0);
        wire::send(&*end, &Ask::Start(Box::new(order)), &[theirs.as_fd()])?;
        Ok(ours)
    }
}

impl Containers {
    /// Starts the process, which becomes this user, finds the engine and removes what a crash left. To be called before
    /// rights are given up.
    ///
    /// # Errors
    /// Fails if there is no engine, or we may not use it.
    pub fn start(engine: Option<&Path>, user: Option<&DataUser>) -> anyhow::Result<Arc<Self>> {
        let (ours, theirs) = scm::pair()?;
        let child = process::respawn(ARGUMENT, theirs).context("cannot start the containers' process")?;
        wire::send(&ours, &Ask::Begin { engine: engine.map(Path::to_owned), user: user.cloned() }, &[])?;
        let begun = wire::receive::<Begun>(&ours)?.context("the containers' process ended")?;
        let engine = match begun.0 {
            Begun::Ready { engine, version, removed } => {
                for name in removed {
                    tracing::info!("container {name}, which a crash had left, is removed");
                }
                tracing::debug!(engine = %engine.display(), %version, "container engine");
                engine
            }
            Begun::Failed(why) => anyhow::bail!("functions in containers: {why}"),
        };
        let launcher = Arc::new(Launcher(Mutex::new(ours)));
        let (pools, inbox) = mpsc::unbounded_channel();
        let inbox = Mutex::new(Some(inbox));
        let (child, thread, stop) = (Mutex::new(child), Mutex::default(), watch::Sender::new(false));
        Ok(Arc::new(Self { launcher, child, engine, pools, inbox, thread, stop }))
    }

    /// Starts the thread that keeps containers running. To be called once, after rights are given up.
    ///
    /// # Errors
    /// Fails if the system provides no thread.
    pub fn run(&self, clock: Clock) -> io::Result<()> {
        let Some(mut inbox) = lock(&self.inbox).take() else {
            return Ok(());
        };
        let launcher = self.launcher.clone();
        let mut stop = self.stop.subscribe();
        let work = async move {
            loop {
                let pool = tokio::select! {
                    pool = inbox.recv() => pool,
                    _ = stop.wait_for(|stop| *stop) => None,
                };
                // When this loop ends, the running tasks are dropped with the event loop.
                let Some(pool) = pool else { break };
                reactor::spawn(grow::follow(&pool, launcher.clone(), clock));
            }
            inbox.close();
            while let Ok(pool) = inbox.try_recv() {
                pool.forsake();
            }
        };
        let loops = move || {
            if let Err(error) = reactor::block_on(work) {
                tracing::error!(%error, "the event loop of the containers ended");
            }
        };
        let thread = std::thread::Builder::new().name("containers".into()).spawn(loops)?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    /// Returns the engine's socket.
    pub fn engine(&self) -> &Path {
        &self.engine
    }

    /// Keeps containers of this function running from now on, until the pool is dropped.
    pub fn pool(&self, function: &Arc<str>, spec: &ContainerSpec) -> Arc<Pool> {
        let pool = Arc::new(Pool::new(function.clone(), spec.clone()));
        // The thread ends only when we stop; then no container will come.
        if self.pools.send(pool.clone()).is_err() {
            pool.forsake();
        }
        pool
    }

    /// Ends the process when all containers are removed.
    ///
    /// # Errors
    /// Returns the error of waitpid(2), or an error if it takes too long.
    pub fn finish(&self) -> io::Result<()> {
        // First the tasks end. Then closing the connection makes the process remove the containers that are left.
        self.stop.send_replace(true);
        if lock(&self.thread).take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the containers' thread ended by a panic");
        }
        scm::close(&*lock(&self.launcher.0))?;
        let mut child = lock(&self.child);
        let until = std::time::Instant::now() + STOP_PATIENCE;
        while child.try_wait()?.is_none() {
            if std::time::Instant::now() > until {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the container engine does not remove them",
                ));
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        Ok(())
    }
}
