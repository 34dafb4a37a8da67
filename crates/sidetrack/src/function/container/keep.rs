//! Keeps one container of a function running: drives `core::function::supervise`. Each container has a task on the
//! containers' thread.

use super::ask::Told;
use super::instance::Instance;
use super::pool::Pool;
use super::probe::probe;
use super::starter::Launcher;
use crate::live::Clock;
use crate::reactor::{TcpStream, sleep};
use crate::wire;
use sidetrack_common::containers::Order;
use sidetrack_core::function::supervise::{Failed, Input, Output, Pace, Supervisor};
use sidetrack_core::function::{ContainerSpec, Probe};
use sidetrack_sys::scm;
use std::future::{Future, pending, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::ready;
use std::time::Duration;
use tokio::sync::watch;

/// What a task keeps running. Holds only a weak reference to the pool.
pub(super) struct Charge {
    pool: Weak<Pool>,
    open: watch::Receiver<()>,
    function: Arc<str>,
    spec: Arc<ContainerSpec>,
    /// True: it takes no new flow, and ends with its last one.
    leave: watch::Receiver<bool>,
    /// The number of its container; 0 while there is none.
    number: Arc<AtomicU64>,
}

impl Charge {
    pub(super) fn of(pool: &Arc<Pool>, leave: watch::Receiver<bool>, number: Arc<AtomicU64>) -> Self {
        let (function, spec) = (pool.function().clone(), pool.spec().clone());
        Self { pool: Arc::downgrade(pool), open: pool.watch(), function, spec, leave, number }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // Tell waiting callers that there will be no container. They hold the pool, so it exists if one waits.
        if let Some(pool) = self.pool.upgrade() {
            pool.forsake();
        }
    }
}

/// A running container, and the connection about it.
struct Running {
    instance: Arc<Instance>,
    link: TcpStream,
    /// Readable when the container has ended.
    alive: TcpStream,
    asked_why: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.instance.end();
        // Closing the connection ends the container.
        let _ = self.link.reading(|fd| scm::close(fd));
    }
}

type Doing<T> = Option<Pin<Box<dyn Future<Output = T>>>>;

/// Waits for the end of a running operation; without end if there is none.
async fn done<T>(doing: &mut Doing<T>) -> T {
    match doing {
        Some(future) => {
            let value = future.as_mut().await;
            *doing = None;
            value
        }
        None => pending().await,
    }
}

/// Keeps one container running until the pool is dropped or becomes smaller, and after that as long as flows pass it.
pub(super) async fn keep(mut charge: Charge, launcher: Arc<Launcher>, clock: Clock) {
    let pace = Pace {
        probe_interval: Duration::from_millis(charge.spec.probe_interval_ms),
        start_timeout: Duration::from_millis(charge.spec.start_timeout_ms),
    };
    let mut supervisor = Supervisor::new(pace, clock.now());
    let mut running: Option<Running> = None;
    let mut starting: Doing<Result<Running, String>> = None;
    let mut probing: Doing<Result<(), String>> = None;
    loop {
        while let Some(output) = supervisor.poll() {
            match output {
                Output::Start => starting = Some(Box::pin(start(launcher.clone(), &charge))),
                Output::Probe => probing = running.as_ref().map(|running| probing_of(&running.instance)),
                output => obey(&charge, output, &mut running, &mut probing),
            }
        }
        let deadline = supervisor.deadline().map(|at| at.since(clock.now()));
        let input = tokio::select! {
            changed = charge.open.changed() => match changed {
                Ok(()) => Input::Again,
                Err(_) => break,
            },
            () = left(&mut charge.leave) => {
                if let (Some(pool), Some(running)) = (charge.pool.upgrade(), &running) {
                    pool.leave(running.instance.number);
                    tracing::info!(function = %charge.function, container = %running.instance.name, "not needed any more");
                }
                break;
            }
            started = done(&mut starting) => match started {
                Ok(started) => {
                    running = Some(started);
                    Input::Started
                }
                Err(why) => Input::Failed(Failed::Start(why)),
            },
            // If the program has ended, that is reported, not the probe that failed because of it.
            probed = done(&mut probing), if !running.as_ref().is_some_and(|running| running.asked_why) => match probed {
                Ok(()) => Input::Probed,
                Err(why) => Input::Failed(Failed::Probe(why)),
            },
            why = ended(running.as_mut(), clock) => Input::Failed(Failed::Ended(why)),
            () = waited(deadline) => Input::Tick,
        };
        supervisor.handle(clock.now(), input);
    }
    drop((starting, probing));
    drain(running, clock).await;
}

fn obey(
    charge: &Charge,
    output: Output,
    running: &mut Option<Running>,
    probing: &mut Doing<Result<(), String>>,
) {
    match output {
        Output::Up => {
            if let (Some(pool), Some(running)) = (charge.pool.upgrade(), &running) {
                // First the change, then the log line: a reader of the log may send flows at once.
                charge.number.store(running.instance.number, Relaxed);
                pool.up(&running.instance);
                tracing::info!(function = %charge.function, container = %running.instance.name, "well");
            }
        }
        Output::Down(why) => {
            tracing::error!(function = %charge.function, "down: {why}");
            charge.number.store(0, Relaxed);
            if let Some(pool) = charge.pool.upgrade() {
                pool.down(running.as_ref().map(|running| running.instance.number), why);
            }
        }
        Output::End => {
            *probing = None;
            *running = None;
        }
        Output::Start | Output::Probe => {}
    }
}

/// Keeps the container for the flows that still pass it. No new flow comes.
async fn drain(running: Option<Running>, clock: Clock) {
    let Some(mut running) = running else { return };
    let instance = running.instance.clone();
    tokio::select! {
        () = instance.unused() => {}
        _ = ended(Some(&mut running), clock) => {}
    }
}

/// Waits until the container shall leave; without end if nothing decides that any more.
async fn left(leave: &mut watch::Receiver<bool>) {
    if leave.wait_for(|leave| *leave).await.is_err() {
        pending().await
    }
}

async fn waited(time: Option<Duration>) {
    match time {
        Some(time) => sleep(time).await,
        None => pending().await,
    }
}

fn probing_of(instance: &Arc<Instance>) -> Pin<Box<dyn Future<Output = Result<(), String>>>> {
    let instance = instance.clone();
    Box::pin(async move {
        let probed = probe(&instance.visitor()).await?;
        match instance.spec.probe {
            Probe::Connect => Ok(()),
            Probe::Echo => probed.echo,
        }
    })
}

/// Requests a container, and waits until it runs.
fn start(
    launcher: Arc<Launcher>,
    charge: &Charge,
) -> impl Future<Output = Result<Running, String>> + 'static {
    let limits = charge.pool.upgrade().map_or(charge.spec.resources, |pool| pool.limits());
    let spec = ContainerSpec { resources: limits, ..(*charge.spec).clone() };
    let order = Order::new(&charge.function, &spec);
    let known = (charge.function.clone(), charge.spec.clone());
    async move {
        let broken = |error: io::Error| format!("the containers' process does not answer: {error}");
        let own = launcher.launch(order).map_err(|_| GONE.to_owned())?;
        rustix::io::ioctl_fionbio(&own, true).map_err(|error| broken(error.into()))?;
        let asking = own.try_clone().map_err(broken)?;
        let link = TcpStream::new(own).map_err(broken)?;
        match told(&link).await.map_err(broken)? {
            Some((Told::Started { name }, mut fds)) if !fds.is_empty() => {
                let alive = TcpStream::new(fds.remove(0)).map_err(broken)?;
                let instance = Arc::new(Instance::new(name, known, asking, fds));
                Ok(Running { instance, link, alive, asked_why: false })
            }
            Some((Told::Failed(why), _)) => Err(why),
            Some((other, _)) => Err(format!("the containers' process says {other:?}")),
            None => Err(GONE.to_owned()),
        }
    }
}

const GONE: &str = "the containers' process is gone: restart sidetrack";

/// Returns the next message about a container; `None` if the containers' process is gone.
async fn told(link: &TcpStream) -> io::Result<Option<(Told, Vec<OwnedFd>)>> {
    poll_fn(|cx| {
        loop {
            ready!(link.poll_read_ready(cx));
            match link.reading(|fd| wire::receive::<Told>(fd)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return std::task::Poll::Ready(result),
            }
        }
    })
    .await
}

/// Handles the messages about a container until it has ended. Returns the reason.
async fn ended(running: Option<&mut Running>, clock: Clock) -> String {
    let Some(running) = running else { return pending().await };
    loop {
        let said = tokio::select! {
            said = told(&running.link) => said,
            () = poll_fn(|cx| running.alive.poll_read_ready(cx)), if !running.asked_why => {
                running.asked_why = true;
                running.instance.ask_why();
                continue;
            }
        };
        match said {
            Ok(Some((Told::Sockets, fds))) => {
                running.instance.refill(|stock| stock.sockets.extend(fds));
            }
            Ok(Some((Told::Listener, fds))) => {
                running.instance.refill(|stock| stock.listeners.extend(fds.into_iter().map(Into::into)));
            }
            Ok(Some((Told::Cpu(used_us), _))) => running.instance.note_cpu(clock.now(), used_us),
            Ok(Some((Told::Ended(why) | Told::Failed(why), _))) => return why,
            Ok(Some((Told::Started { .. }, _))) => {}
            Ok(None) | Err(_) => return GONE.to_owned(),
        }
    }
}
