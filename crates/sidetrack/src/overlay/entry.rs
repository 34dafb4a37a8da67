//! The way into the overlay, for workers and the admin interface. It stays the same while the overlay changes hands.
//!
//! ```text
//!                 threads start                       the change is final
//!   new process:  ELSEWHERE (asks through the door) ----------------------> HERE
//!   old process:  HERE ----------------------> ELSEWHERE (it waits for the outcome)
//!                  ^      let go of             |
//!                  +----------------------------+  taken back
//!   both:         any --stop--> STOPPED
//! ```
//!
//! A request that is under way while the overlay changes hands is asked again at the new place. So an upgrade refuses no flow.

use super::door::Door;
use super::ingress::Request;
use super::{
    BenchView, CaughtView, Echo, Event, LinkSetting, LinkSettingView, PacedTotals, PacketBenchView, PingView,
    Pinged, ServiceCountView, SpreadView, Status, WayView, bench, control, datagrams, echoes, paced, pair,
    status, udp,
};
use crate::carry::{Associating, Entered, Entering, Failure, OverlayEntry, OverlayOrder};
use crate::live::Spread;
use crate::overlay::shared::Shared;
use arc_swap::ArcSwapOption;
use sidetrack_core::flow::EndReason;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::reserved::Reserved;
use sidetrack_core::overlay::service::Service;
use sidetrack_core::overlay::session::Mode;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

/// How long a ping waits for its answer.
const PING_TIMEOUT: Duration = Duration::from_secs(3);

/// The threads of the overlay in this process.
#[derive(Clone)]
pub(super) struct Here {
    pub shared: Arc<Shared>,
    pub requests: mpsc::Sender<Request>,
}

/// Where the overlay of this node is.
#[derive(Clone)]
pub(super) enum Place {
    /// In this process.
    Here(Here),
    /// In another process of this node. Flows can be asked for there if there is a door.
    Elsewhere(Option<Arc<Door>>),
    /// Nowhere: the node stops.
    Stopped,
}

/// The way into the overlay, for workers and the admin interface.
pub struct Entry {
    place: watch::Sender<Place>,
    /// What the threads of this process share or have shared last, for counts.
    last: ArcSwapOption<Shared>,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.last() {
            Some(shared) => write!(f, "overlay node {}", shared.identity.own()),
            None => f.write_str("overlay node of another process"),
        }
    }
}

fn stopping() -> Failure {
    Failure::new(EndReason::Shutdown, "the overlay is stopping")
}

impl Here {
    /// Opens a session. `None`: the overlay leaves this process.
    async fn open(&self, order: OverlayOrder) -> Option<Result<Entered, Failure>> {
        let internal =
            |what: &str, error: io::Error| Failure::new(EndReason::Internal, format!("{what}: {error}"));
        let (near, leg) = match pair() {
            Ok(pair) => pair,
            Err(error) => return Some(Err(internal("a socket to the overlay", error))),
        };
        let (reply, answer) = oneshot::channel();
        let spread = (order.carrier.mode != Mode::Shortest).then(Arc::<Spread>::default);
        let request = Request { order, leg, spread: spread.clone(), reply };
        self.requests.send(request).await.ok()?;
        let opened = answer.await.ok()?;
        Some(opened.map(|_session| Entered { stream: near, spread }))
    }
}

impl Entry {
    /// An entry to the overlay at this place.
    pub(super) fn new(place: Place) -> Self {
        let last = ArcSwapOption::empty();
        let this = Self { place: watch::Sender::new(Place::Stopped), last };
        this.set(place);
        this
    }

    /// Notes where the overlay is from now on. Requests that wait go there.
    pub(super) fn set(&self, place: Place) {
        if let Place::Here(here) = &place {
            self.last.store(Some(here.shared.clone()));
        }
        self.place.send_replace(place);
    }

    /// Returns what the threads of this process share or have shared last.
    pub(super) fn last(&self) -> Option<Arc<Shared>> {
        self.last.load_full()
    }

    /// Returns the threads of this process.
    ///
    /// # Errors
    /// The overlay is not in this process, in words.
    pub(super) fn here(&self) -> Result<Here, String> {
        match &*self.place.borrow() {
            Place::Here(here) => Ok(here.clone()),
            Place::Elsewhere(_) => {
                Err("the overlay changes hands at the end of an upgrade: ask again then".to_owned())
            }
            Place::Stopped => Err("the overlay is stopping".to_owned()),
        }
    }

    /// Returns the counts of whole packets. `None`: the node has no `[[overlay.packets]]`.
    pub fn packets(&self) -> Option<CaughtView> {
        self.last()?.packets.as_ref().map(|packets| status::caught(&packets.counters))
    }

    /// Returns the counts of paced links. `None`: the node declares none.
    pub fn paced(&self) -> Option<PacedTotals> {
        paced::totals(&*self.last()?)
    }

    /// Returns the counts of packets over subgraphs.
    pub fn spread(&self) -> SpreadView {
        self.last().map(|shared| status::spread(&shared.datagrams)).unwrap_or_default()
    }

    /// Returns the metric name and the count of each change of the paths that flows use.
    pub fn path_counts(&self) -> [(&'static str, u64); 3] {
        let last = self.last();
        let count = |of: fn(&Shared) -> u64| last.as_deref().map_or(0, of);
        [
            ("resumed", count(|shared| shared.counters.sessions_resumed.load(Relaxed))),
            ("opened", count(|shared| shared.counters.paths_opened.load(Relaxed))),
            ("leg_changed", count(|shared| shared.datagrams.legs.moves.load(Relaxed))),
        ]
    }

    /// Returns the counts of packets over subgraphs, by service.
    pub fn services(&self) -> Vec<ServiceCountView> {
        self.last().map(|shared| status::counted(&shared.datagrams)).unwrap_or_default()
    }

    /// Returns the state of the overlay. `None`: it is stopping, or changes hands.
    pub async fn status(&self) -> Option<Status> {
        let place = self.place.borrow().clone();
        match place {
            Place::Here(here) => {
                let (reply, answer) = oneshot::channel();
                here.shared.control.send(Event::Status(reply)).await.ok()?;
                answer.await.ok()
            }
            Place::Elsewhere(door) => door?.status().await,
            Place::Stopped => None,
        }
    }

    /// Sends an echo request to a node, by name, along the path that flows would take.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn ping(&self, node: &str) -> Result<PingView, String> {
        let shared = self.here()?.shared;
        let to = other(&shared, node)?;
        let stopping = || "the overlay is stopping".to_owned();
        let (reply, answer) = oneshot::channel();
        shared.control.send(Event::Ping(to, reply)).await.map_err(|_| stopping())?;
        let echo =
            timeout(PING_TIMEOUT, answer).await.map_err(|_| format!("no answer from {node} in 3 s"))?;
        let Echo { path, rtt } = echo.map_err(|_| stopping())??;
        let path = control::names(&shared.identity, &path);
        Ok(PingView { path, links: Vec::new(), rtt_ms: rtt.as_secs_f64() * 1000.0 })
    }

    /// Sends an echo request to a node, by name, over the links that packets of this service would use.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn ping_by(&self, node: &str, service: &Service) -> Result<PingView, String> {
        let shared = self.here()?.shared;
        let to = other(&shared, node)?;
        let since = Instant::now();
        let Pinged { links, answer } = datagrams::ping(&shared, to, service, datagrams::ECHO_BYTES)?;
        let answer = timeout(PING_TIMEOUT, answer).await;
        answer
            .map_err(|_| format!("no answer from {node} in 3 s"))?
            .map_err(|_| "too many pings".to_owned())?;
        let rtt_ms = since.elapsed().as_secs_f64() * 1000.0;
        let named = |(from, to)| [from, to].map(|node| shared.identity.name(node));
        Ok(PingView { path: Vec::new(), links: links.into_iter().map(named).collect(), rtt_ms })
    }

    /// Returns the links that packets of a service to a node would use now.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub fn way(&self, node: &str, service: &Service) -> Result<WayView, String> {
        let shared = self.here()?.shared;
        let (links, named) = datagrams::links(&shared, other(&shared, node)?, service)?;
        let name = |(from, to)| [from, to].map(|node| shared.identity.name(node));
        Ok(WayView {
            kind: service.kind.name().to_owned(),
            dissemination: service.dissemination.name().to_owned(),
            named: named.name().to_owned(),
            links: links.into_iter().map(name).collect(),
        })
    }

    /// Measures a service by a steady stream of echo requests.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn bench_packets(
        &self,
        node: &str,
        service: &Service,
        duration: Duration,
        per_second: u32,
    ) -> Result<PacketBenchView, String> {
        let shared = self.here()?.shared;
        let to = other(&shared, node)?;
        echoes::run(&shared, to, service, duration, per_second).await
    }

    /// Changes the settings of the link to a neighbour.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn set_link(&self, neighbour: &str, setting: LinkSetting) -> Result<LinkSettingView, String> {
        let shared = self.here()?.shared;
        let to = other(&shared, neighbour)?;
        let stopping = |_| "the overlay is stopping".to_owned();
        let (reply, answer) = oneshot::channel();
        shared.control.send(Event::SetLink(to, setting, reply)).await.map_err(|_| stopping(()))?;
        answer.await.map_err(|_| stopping(()))
    }

    /// Floods a session to a node for this time, at most at this rate (bits per second). Returns what arrived.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn bench(
        &self,
        node: &str,
        duration: Duration,
        rate: Option<u64>,
    ) -> Result<BenchView, String> {
        bench::run(&self.here()?.requests, node, duration, rate).await
    }
}

/// Returns another node of the overlay by its name.
fn other(shared: &Shared, node: &str) -> Result<NodeId, String> {
    let identity = &shared.identity;
    let to = identity.node_named(node).ok_or_else(|| format!("the overlay has no node '{node}'"))?;
    if to == identity.own() {
        return Err(format!("'{node}' is this node itself"));
    }
    Ok(to)
}

impl OverlayEntry for Entry {
    fn open(&self, order: OverlayOrder) -> Entering {
        let mut places = self.place.subscribe();
        Box::pin(async move {
            if Reserved::of(&order.destination).is_some() {
                let detail = "this name stands for something inside the overlay and is not a host";
                return Err(Failure::new(EndReason::PolicyDenied, detail));
            }
            loop {
                let place = places.borrow_and_update().clone();
                let opened = match place {
                    Place::Here(here) => here.open(order.clone()).await,
                    Place::Elsewhere(Some(door)) => door.open(&order).await,
                    Place::Elsewhere(None) => None,
                    Place::Stopped => return Err(stopping()),
                };
                if let Some(opened) = opened {
                    return opened;
                }
                places.changed().await.map_err(|_| stopping())?;
            }
        })
    }

    fn associate(&self, order: OverlayOrder) -> Associating {
        let mut places = self.place.subscribe();
        Box::pin(async move {
            loop {
                let place = places.borrow_and_update().clone();
                match place {
                    Place::Here(Here { shared, requests }) => {
                        return udp::associate(shared, requests, order).await;
                    }
                    // What datagrams need is at one place. The association begins when it is here.
                    Place::Elsewhere(_) => places.changed().await.map_err(|_| stopping())?,
                    Place::Stopped => return Err(stopping()),
                }
            }
        })
    }
}
