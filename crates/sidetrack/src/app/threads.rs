//! The worker threads, and how listeners are started and stopped on them.

use super::sockets::{Bound, Proof};
use crate::datagram;
use crate::http::{self, Proxy};

use crate::intercept::hold::{Held, Hold};
use crate::intercept::{Catches, Listening};
use crate::live::{Decided, Ledger};
use crate::reactor;
use crate::session;
use crate::worker::{Moved, Returned, Serve, Service, Shared, Worker};
use anyhow::Context;
use sidetrack_core::flow::{EndReason, Protocol};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

/// A listener's sockets for one worker, and what serves its connections.
struct Start {
    service: Arc<Service>,
    /// `None` for a listener of UDP.
    socket: Option<TcpListener>,
    datagrams: Option<UdpSocket>,
    /// Serves HTTP/3 on the datagrams.
    proxy: Option<Arc<Proxy>>,
    stop: watch::Receiver<bool>,
}

/// How long workers may take to end and record all flows when the process stops.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// How long a reload waits until workers have closed the sockets of a removed listener.
const LET_GO_PATIENCE: Duration = Duration::from_millis(100);

/// A listener in service. Dropping it stops accepting; flows continue.
#[derive(Debug)]
pub struct Serving {
    /// The state that its connections share.
    pub listening: Arc<Listening>,
    /// Handles its requests, if requests are handled one by one.
    pub proxy: Option<Arc<Proxy>>,
    /// Copies of the workers' sockets: the first proves to the keeper that we listen, and another process may go on with them.
    /// They are closed first: connections that the kernel gives to a socket without an accepting worker are lost.
    sockets: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
    stop: watch::Sender<bool>,
}

impl Serving {
    /// Its address, and a descriptor that proves that we listen on it.
    pub fn proof(&self) -> Option<Proof<'_>> {
        let socket = match self.listening.protocol {
            Protocol::Udp => self.datagrams.first()?.as_fd(),
            Protocol::Tcp => self.sockets.first()?.as_fd(),
        };
        Some(((self.listening.protocol, self.listening.address), socket))
    }

    /// The sockets: those that accept connections, and those that get datagrams.
    pub fn sockets(&self) -> (&[TcpListener], &[UdpSocket]) {
        (&self.sockets, &self.datagrams)
    }

    /// Stops accepting, and keeps the sockets: new connections wait in them. Waits at most `patience` for the workers.
    pub fn rest(self, patience: Duration) -> Bound {
        self.stop.send_replace(true);
        let until = Instant::now() + patience;
        while !self.stop.is_closed() && Instant::now() < until {
            std::thread::park_timeout(Duration::from_micros(200));
        }
        let Self { listening, proxy, sockets, datagrams, stop: _ } = self;
        Bound { listening, proxy, sockets, datagrams }
    }

    /// Stops accepting, and waits a short time until all workers have closed their sockets. A busy worker closes
    /// its socket later.
    pub fn finish(mut self) {
        self.sockets.clear();
        self.datagrams.clear();
        self.stop.send_replace(true);
        let until = Instant::now() + LET_GO_PATIENCE;
        while !self.stop.is_closed() && Instant::now() < until {
            std::thread::park_timeout(Duration::from_micros(200));
        }
    }
}

/// What another thread gives to a worker.
enum Given {
    /// A connection that is held.
    Held(Held),
    /// A flow that policy has denied before a packet was sent.
    Denied(Decided),
    /// A flow of the process before this one.
    Moved(Box<Moved>),
    /// A flow that came back from the wire.
    Returned(Box<Returned>),
}

struct Thread {
    starts: mpsc::UnboundedSender<Start>,
    /// At most as many as are held at the same time, and as threads of a command.
    given: mpsc::UnboundedSender<Given>,
    handle: JoinHandle<()>,
}

/// A runtime on its own thread, for work that a worker's loop does not do: name resolution, and other protocols'
/// libraries. The workers enter its context.
struct Background {
    handle: Handle,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Background {
    fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot make the background's event loop")?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("background".into())
            .spawn(move || {
                let _ = runtime.block_on(stopped);
                // Do not wait for pending name look-ups.
                runtime.shutdown_background();
            })
            .context("cannot start the background thread")?;
        Ok(Self { handle, stop, thread })
    }

    fn stop(self) {
        let _ = self.stop.send(());
        if self.thread.join().is_err() {
            tracing::error!("the background thread ended by a panic");
        }
    }
}

/// All workers of the process.
pub struct Fleet {
    threads: Vec<Thread>,
    background: Background,
    ledgers: Vec<Arc<Ledger>>,
    stop: watch::Sender<bool>,
    hold: Option<Arc<Hold>>,
}

impl Fleet {
    /// Starts the workers.
    ///
    /// # Errors
    /// Fails if the system gives no thread or no epoll instance.
    pub fn start(shared: &Arc<Shared>, workers: usize) -> anyhow::Result<Self> {
        let background = Background::start()?;
        let (stop, stopped) = watch::channel(false);
        let pipes = shared.pipes() / workers.max(1);
        let ledgers: Vec<_> = (0..workers).map(|_| Arc::new(Ledger::default())).collect();
        let threads = ledgers
            .iter()
            .enumerate()
            .map(|(number, ledger)| {
                let worker = Arc::new(Worker::new(shared.clone(), ledger.clone()));
                let background = background.handle.clone();
                thread(number, worker, pipes, stopped.clone(), background)
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(hold) = shared.hold() {
            let workers: Vec<_> = threads.iter().map(|thread| thread.given.clone()).collect();
            let turn = AtomicUsize::new(0);
            hold.serve(Box::new(move |held| {
                let at = turn.fetch_add(1, Relaxed) % workers.len();
                // A worker that has ended drops it, which answers it.
                let _ = workers[at].send(Given::Held(held));
            }));
        }
        Ok(Self { threads, background, ledgers, stop, hold: shared.hold().cloned() })
    }

    /// The ledgers of the workers.
    pub fn ledgers(&self) -> &[Arc<Ledger>] {
        &self.ledgers
    }

    /// Gives each worker its socket of a listener.
    pub fn serve(&self, bound: Bound) -> Serving {
        let (stop, stopped) = watch::channel(false);
        // Without a copy (no free descriptor) the keeper's next order reports what is missing.
        let copies: Vec<_> = bound.sockets.iter().filter_map(|socket| socket.try_clone().ok()).collect();
        let copies = (copies, bound.datagrams.iter().filter_map(|socket| socket.try_clone().ok()).collect());
        let serve: Serve = match bound.proxy.clone() {
            Some(proxy) => Box::new(move |worker, listening, arrived| {
                proxy.clone().serve(worker, listening, arrived);
            }),
            None => Box::new(|worker, listening, arrived| {
                let relays = session::Relays { associate: datagram::relay, tunnel: datagram::tunnelled };
                session::serve(worker, listening, arrived, relays);
            }),
        };
        let proxy = bound.proxy.clone().filter(|proxy| proxy.settings.http3);
        // Requests are answered one by one, so their clients are accepted early.
        let holds = bound.proxy.is_none() && self.hold.is_some();
        if let Some(hold) = self.hold.as_ref().filter(|_| holds) {
            hold.listens(&bound.listening);
        }
        let service = Arc::new(Service { listening: bound.listening.clone(), serve, holds });
        // An earlier process of this node may have had more workers than this one.
        let rounds = bound.sockets.len().max(bound.datagrams.len()).max(1);
        let (mut sockets, mut datagrams) = (bound.sockets.into_iter(), bound.datagrams.into_iter());
        for thread in self.threads.iter().cycle().take(rounds.next_multiple_of(self.threads.len().max(1))) {
            let (service, socket, datagrams) = (service.clone(), sockets.next(), datagrams.next());
            let proxy = proxy.clone();
            // Cannot fail: a worker that ended has ended the process too (see `thread`).
            let _ = thread.starts.send(Start { service, socket, datagrams, proxy, stop: stopped.clone() });
        }
        let (sockets, datagrams) = copies;
        Serving { listening: bound.listening, proxy: bound.proxy, sockets, datagrams, stop }
    }

    /// Returns what records flows that policy has denied before a packet was sent.
    pub fn denials(&self) -> impl Fn(Decided) + Send + use<> {
        let given = self.threads.first().map(|thread| thread.given.clone());
        move |decided| {
            // A worker that has ended writes no records any more.
            given.iter().for_each(|given| drop(given.send(Given::Denied(decided.clone()))));
        }
    }

    /// Goes on with a flow of the process before this one.
    pub fn adopt(&self, moved: Moved) {
        let at = usize::try_from(moved.id).unwrap_or_default() % self.threads.len().max(1);
        // A worker that has ended has ended the process, too.
        let _ = self.threads[at].given.send(Given::Moved(Box::new(moved)));
    }

    /// Goes on with a flow that came back from the wire, on the worker that had it.
    pub fn come_back(&self, returned: Returned) {
        let is_home = |ledger: &Arc<Ledger>| Arc::ptr_eq(ledger, &returned.home.0);
        let at = self.ledgers.iter().position(is_home).unwrap_or_default();
        // A worker that has ended has ended the process, too.
        let _ = self.threads[at].given.send(Given::Returned(Box::new(returned)));
    }

    /// Lets connections be held: all listeners are served.
    pub fn begin(&self) {
        self.hold.iter().for_each(|hold| hold.begin());
    }

    /// Ends all flows with `shutdown`, and stops the workers.
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
        self.background.stop();
        if let Some(hold) = self.hold {
            hold.end();
        }
    }
}

fn thread(
    number: usize,
    worker: Arc<Worker>,
    pipes: usize,
    stopped: watch::Receiver<bool>,
    background: Handle,
) -> anyhow::Result<Thread> {
    let (starts, inbox) = mpsc::unbounded_channel();
    let (given, given_inbox) = mpsc::unbounded_channel();
    let handle = std::thread::Builder::new()
        .name(format!("worker-{number}"))
        .spawn(move || {
            session::allow_pipes(pipes);
            let _entered = background.enter();
            if let Err(error) = reactor::block_on(work(worker, inbox, given_inbox, stopped)) {
                tracing::error!(%error, "a worker's event loop ended");
            }
        })
        .context("cannot start a worker thread")?;
    Ok(Thread { starts, given, handle })
}

async fn work(
    worker: Arc<Worker>,
    mut inbox: mpsc::UnboundedReceiver<Start>,
    mut given: mpsc::UnboundedReceiver<Given>,
    mut stopped: watch::Receiver<bool>,
) {
    reactor::spawn(worker.clone().sweep(http::tend));
    loop {
        tokio::select! {
            start = inbox.recv() => match start {
                Some(start) => accept_on(&worker, start),
                None => break,
            },
            Some(given) = given.recv() => take(&worker, given),
            _ = stopped.changed() => break,
        }
    }
    while let Ok(given) = given.try_recv() {
        // What is held is dropped, and so answered.
        if matches!(given, Given::Denied(_) | Given::Returned(_)) {
            take(&worker, given);
        }
    }
    for flow in worker.ledger.snapshot() {
        flow.end(EndReason::Shutdown);
    }
    let until = Instant::now() + STOP_PATIENCE;
    while !worker.ledger.is_empty() && Instant::now() < until {
        reactor::yield_now().await;
    }
    worker.part().await;
}

fn take(worker: &Arc<Worker>, given: Given) {
    match given {
        Given::Held(held) => session::serve_held(worker.clone(), held),
        Given::Moved(moved) => session::adopt(worker, *moved),
        Given::Returned(returned) => session::come_back(worker, *returned),
        Given::Denied(decided) => {
            let why = decided.verdict.as_ref().map(|verdict| verdict.why.to_string());
            let mut entry = session::Entry::new(worker);
            entry.live().decide(decided);
            entry.end(EndReason::PolicyDenied, why);
        }
    }
}

fn accept_on(worker: &Arc<Worker>, start: Start) {
    let Start { service, socket, datagrams, proxy, stop } = start;
    if let Some(socket) = datagrams {
        if service.listening.protocol == Protocol::Udp {
            let listening = service.listening.clone();
            return reactor::spawn(datagram::serve(worker.clone(), listening, socket, stop));
        }
        match proxy {
            Some(proxy) => {
                let listening = service.listening.clone();
                reactor::spawn(proxy.accept_quic(worker.clone(), listening, socket, stop.clone()));
            }
            None if matches!(service.listening.catches, Catches::Socks(_)) => {
                let listening = service.listening.clone();
                reactor::spawn(datagram::share(worker.clone(), listening, socket, stop.clone()));
            }
            None => reactor::spawn(worker.clone().accept_quic(service.clone(), socket, stop.clone())),
        }
    }
    let Some(socket) = socket else { return };
    match reactor::TcpListener::new(socket) {
        Ok(listener) => {
            reactor::spawn(worker.clone().accept(service, listener, stop));
        }
        Err(error) => {
            tracing::error!(listener = %service.listening.name, %error, "cannot watch the listener")
        }
    }
}
