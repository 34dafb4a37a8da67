//! The worker threads, and how listeners come and go on them.

use super::sockets::Bound;
use crate::intercept::Listening;
use crate::live::Ledger;
use crate::session;
use crate::worker::{Shared, Worker};
use anyhow::Context;
use sidetrack_core::flow::EndReason;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// A socket and what its connections share, on its way to a worker.
type Start = (Arc<Listening>, TcpListener, watch::Receiver<bool>);

/// How long workers may take to give each flow its end and its record when the process stops.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// How long a reload waits for workers to let go of the sockets of a listener that goes.
const LET_GO_PATIENCE: Duration = Duration::from_millis(100);

/// A listener that is being served; dropping it stops the accepting. Flows go on.
#[derive(Debug)]
pub struct Serving {
    /// What its connections share.
    pub listening: Arc<Listening>,
    stop: watch::Sender<bool>,
}

impl Serving {
    /// Stops the accepting and waits until all workers have let go of their sockets, though not for long: one may be
    /// busy, and will come to it.
    pub fn finish(self) {
        self.stop.send_replace(true);
        let until = Instant::now() + LET_GO_PATIENCE;
        while !self.stop.is_closed() && Instant::now() < until {
            std::thread::park_timeout(Duration::from_micros(200));
        }
    }
}

struct Thread {
    starts: mpsc::UnboundedSender<Start>,
    handle: JoinHandle<()>,
}

/// All workers of the process.
pub struct Fleet {
    threads: Vec<Thread>,
    ledgers: Vec<Arc<Ledger>>,
    stop: watch::Sender<bool>,
}

impl Fleet {
    /// Starts the workers.
    ///
    /// # Errors
    /// The system gives no thread or no epoll instance.
    pub fn start(shared: &Arc<Shared>, workers: usize) -> anyhow::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let pipes = shared.pipes() / workers.max(1);
        let ledgers: Vec<_> = (0..workers).map(|_| Arc::new(Ledger::default())).collect();
        let threads = ledgers
            .iter()
            .enumerate()
            .map(|(number, ledger)| {
                let worker = Arc::new(Worker::new(shared.clone(), ledger.clone()));
                thread(number, worker, pipes, stopped.clone())
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self { threads, ledgers, stop })
    }

    /// The flows of each worker.
    pub fn ledgers(&self) -> &[Arc<Ledger>] {
        &self.ledgers
    }

    /// Hands each worker its socket of a listener.
    pub fn serve(&self, bound: Bound) -> Serving {
        let (stop, stopped) = watch::channel(false);
        for (thread, socket) in self.threads.iter().zip(bound.sockets) {
            // A worker that is gone has taken the process with it: see `thread`.
            let _ = thread.starts.send((bound.listening.clone(), socket, stopped.clone()));
        }
        Serving { listening: bound.listening, stop }
    }

    /// Ends all flows with `shutdown` and stops the workers.
    pub fn stop(self) {
        let _ = self.stop.send(true);
        let until = Instant::now() + STOP_PATIENCE;
        for thread in self.threads {
            drop(thread.starts);
            while !thread.handle.is_finished() && Instant::now() < until {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            if thread.handle.is_finished() && thread.handle.join().is_err() {
                tracing::error!("a worker ended by a panic");
            }
        }
    }
}

fn thread(
    number: usize,
    worker: Arc<Worker>,
    pipes: usize,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<Thread> {
    let (starts, inbox) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot make a worker's event loop")?;
    let handle = std::thread::Builder::new()
        .name(format!("worker-{number}"))
        .spawn(move || {
            session::allow_pipes(pipes);
            runtime.block_on(work(worker, inbox, stopped));
        })
        .context("cannot start a worker thread")?;
    Ok(Thread { starts, handle })
}

async fn work(
    worker: Arc<Worker>,
    mut inbox: mpsc::UnboundedReceiver<Start>,
    mut stopped: watch::Receiver<bool>,
) {
    tokio::spawn(worker.clone().sweep());
    loop {
        tokio::select! {
            start = inbox.recv() => match start {
                Some((listening, socket, stop)) => accept_on(&worker, listening, socket, stop),
                None => break,
            },
            _ = stopped.changed() => break,
        }
    }
    for flow in worker.ledger.snapshot() {
        flow.end(EndReason::Shutdown);
    }
    let until = tokio::time::Instant::now() + STOP_PATIENCE;
    while !worker.ledger.is_empty() && tokio::time::Instant::now() < until {
        tokio::task::yield_now().await;
    }
}

fn accept_on(
    worker: &Arc<Worker>,
    listening: Arc<Listening>,
    socket: TcpListener,
    stop: watch::Receiver<bool>,
) {
    match tokio::net::TcpListener::from_std(socket) {
        Ok(listener) => {
            tokio::spawn(worker.clone().accept(listening, listener, stop));
        }
        Err(error) => tracing::error!(listener = %listening.name, %error, "cannot watch the listener"),
    }
}
