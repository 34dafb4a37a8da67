//! Paced links: reliable streams in sealed datagrams, to neighbours whose bandwidth is bought. The core decides
//! ([`sidetrack_core::overlay::paced`]).
//!
//! | thread | does |
//! |---|---|
//! | the one that receives datagrams | gives frames to the link, and wakes the tasks of its streams |
//! | the one of flows | reads and writes streams |
//! | the one of this module | sends, at the pace of each link |
//!
//! All three lock the link for a short time. Only the last one sends, so the order of packets is that of their numbers.

mod pump;
mod stream;
mod view;

pub(super) use pump::run;
pub(super) use stream::Stream;
pub use view::{PacedTotals, PacedView};
pub(super) use view::{of, totals};

use super::circuit;
use super::datagrams::{Bell, Link};
use super::shared::Shared;
use super::stream::Stream as FlowStream;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Frame, Offer};
use sidetrack_core::overlay::paced::{self, Config, Input, Output, View};
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use tokio::sync::mpsc;

/// Most streams of neighbours that wait for the thread of flows.
const OPENED_MAX: usize = 4_096;

/// The tasks that wait for a stream.
#[derive(Default)]
struct Waiting {
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// A link with the tasks that wait for it.
pub(crate) struct Inner {
    link: paced::Link,
    waiting: BTreeMap<u32, Waiting>,
    /// When the sending thread looks at the link again. `None`: it looks now, or waits without end.
    looks_at: Option<Instant>,
}

/// The paced part of one link, from one control connection to its end.
pub(crate) struct Lane {
    inner: Mutex<Inner>,
    rate: u64,
    /// Bytes of other datagrams on the link since the sending thread last looked.
    spent: AtomicUsize,
}

impl Lane {
    /// Makes the paced part of a link that is declared with this rate, bits per second.
    pub(super) fn new(rate: u64, around_bytes: usize, is_even: bool, now: Instant) -> Self {
        let config = Config { rate, around_bytes, is_even, first: 0 };
        let link = paced::Link::new(config, now);
        let inner = Mutex::new(Inner { link, waiting: BTreeMap::new(), looks_at: None });
        Self { inner, rate, spent: AtomicUsize::new(0) }
    }

    /// Notes that a datagram of this size was sent on the link beside it.
    pub(super) fn spend(&self, bytes: usize) {
        self.spent.fetch_add(bytes, Relaxed);
    }

    /// Returns the state for operators.
    pub(super) fn view(&self) -> View {
        self.lock().link.view()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Ends the link: its streams break.
    pub(super) fn stop(&self, now: Instant) {
        let mut inner = self.lock();
        inner.link.handle(now, Input::Stop);
        inner.take_outputs(|_| {});
    }
}

impl Inner {
    /// Wakes the tasks of streams, and gives all other outputs to `other`.
    fn take_outputs(&mut self, mut other: impl FnMut(Output)) {
        while let Some(output) = self.link.poll() {
            let woken = match output {
                Output::Readable(name) => {
                    self.waiting.get_mut(&name).and_then(|waiting| waiting.reader.take())
                }
                Output::Writable(name) => {
                    self.waiting.get_mut(&name).and_then(|waiting| waiting.writer.take())
                }
                Output::Down => {
                    let all = std::mem::take(&mut self.waiting).into_values();
                    all.flat_map(|waiting| [waiting.reader, waiting.writer]).flatten().for_each(Waker::wake);
                    other(output);
                    None
                }
                Output::Agreed(_) | Output::Opened(_) => {
                    other(output);
                    None
                }
            };
            if let Some(waker) = woken {
                waker.wake();
            }
        }
    }

    /// Wakes the sending thread if it would look too late.
    fn ring_if_due(&mut self, bell: &Bell) {
        if let Some(due) = self.link.deadline()
            && self.looks_at.is_none_or(|at| due < at)
        {
            // The thread sets it again when it has looked.
            self.looks_at = Some(due);
            bell.ring();
        }
    }
}

/// A stream that a neighbour has opened.
pub(super) type Opened = (NodeId, Stream);

/// What all paced links share.
pub(super) struct Lanes {
    /// By neighbour: the declared rates, bits per second.
    rates: BTreeMap<NodeId, u64>,
    /// By neighbour: rates below the declared ones that an operator has set, bits per second.
    limits: Mutex<BTreeMap<NodeId, u64>>,
    /// Wakes the sending thread.
    bell: Bell,
    opened: mpsc::Sender<Opened>,
    arriving: Mutex<Option<mpsc::Receiver<Opened>>>,
    /// By neighbour: offers for links that this node does not declare, bits per second.
    undeclared: Mutex<BTreeMap<NodeId, u64>>,
    /// Counts of links that have ended.
    pub ended: Totals,
}

/// Counts of paced links.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub bytes: AtomicU64,
    pub bytes_again: AtomicU64,
    pub packets: AtomicU64,
    pub lost: AtomicU64,
    pub late: AtomicU64,
    pub acks: AtomicU64,
}

impl Totals {
    fn add(&self, counts: paced::Counts) {
        for (total, more) in [
            (&self.bytes, counts.bytes),
            (&self.bytes_again, counts.bytes_again),
            (&self.packets, counts.packets),
            (&self.lost, counts.lost),
            (&self.late, counts.late),
            (&self.acks, counts.acks),
        ] {
            total.fetch_add(more, Relaxed);
        }
    }
}

impl Lanes {
    /// Returns the state for links that are declared with these rates.
    ///
    /// # Errors
    /// Fails if the system provides no descriptor.
    pub(super) fn new(rates: BTreeMap<NodeId, u64>) -> io::Result<Self> {
        let (opened, arriving) = mpsc::channel(OPENED_MAX);
        Ok(Self {
            rates,
            limits: Mutex::default(),
            bell: Bell::new()?,
            opened,
            arriving: Mutex::new(Some(arriving)),
            undeclared: Mutex::default(),
            ended: Totals::default(),
        })
    }

    /// Returns the declared rate of the link to this neighbour, bits per second.
    pub(super) fn rate(&self, neighbour: NodeId) -> Option<u64> {
        self.rates.get(&neighbour).copied()
    }

    /// Returns the rate in force for the link to this neighbour, bits per second.
    pub(super) fn rate_now(&self, neighbour: NodeId) -> Option<u64> {
        let limit = lock(&self.limits).get(&neighbour).copied();
        limit.or_else(|| self.rate(neighbour))
    }

    /// Returns the rate that the neighbour offers on a link that this node does not declare, bits per second.
    pub(super) fn undeclared(&self, neighbour: NodeId) -> Option<u64> {
        lock(&self.undeclared).get(&neighbour).copied()
    }

    /// A new link may have something to send.
    pub(super) fn began(&self) {
        self.bell.ring();
    }

    /// A link has ended.
    pub(super) fn ended(&self, link: &Link, now: Instant) {
        if let Some(lane) = &link.lane {
            lane.stop(now);
            self.ended.add(lane.view().counts);
        }
    }

    /// Returns the streams that neighbours open. It can be taken once.
    pub(super) fn arriving(&self) -> Option<mpsc::Receiver<Opened>> {
        lock(&self.arriving).take()
    }
}

/// Handles a frame of a paced link. `bytes`: its length.
pub(super) fn came(shared: &Shared, link: &Arc<Link>, frame: Frame, bytes: usize) {
    let lanes = &shared.datagrams.lanes;
    let Some(lane) = &link.lane else {
        if let Frame::Offer(offer) = frame {
            not_declared(shared, link.neighbour, offer);
        }
        return;
    };
    let mut inner = lane.lock();
    inner.link.handle(shared.clock.now(), Input::Came(frame, bytes));
    let mut opened = Vec::new();
    inner.take_outputs(|output| match output {
        Output::Opened(name) => opened.push(name),
        output => tell(shared, link.neighbour, lane, output),
    });
    for name in opened {
        inner.waiting.insert(name, Waiting::default());
        let stream = Stream::new(shared, link, name);
        if let Err(error) = lanes.opened.try_send((link.neighbour, stream)) {
            // Dropping a stream locks the link.
            drop(inner);
            drop(error);
            inner = lane.lock();
        }
    }
    inner.ring_if_due(&lanes.bell);
}

fn not_declared(shared: &Shared, neighbour: NodeId, offer: Offer) {
    let before = lock(&shared.datagrams.lanes.undeclared).insert(neighbour, offer.rate);
    if before.is_none() {
        tracing::warn!(
            neighbour = %shared.identity.name(neighbour), rate_mbit = offer.rate as f64 / 1e6,
            "the neighbour declares the link to this node as bought, but this node does not: its flows use TCP; write an \
             [[overlay.link]] with the same two nodes into this node's file"
        );
    }
}

fn tell(shared: &Shared, neighbour: NodeId, lane: &Lane, output: Output) {
    let neighbour = shared.identity.name(neighbour);
    match output {
        Output::Agreed(peer) => tracing::info!(
            %neighbour, rate_mbit = lane.rate as f64 / 1e6, peer_rate_mbit = peer as f64 / 1e6,
            "overlay link is paced: flows use datagrams at the declared rate"
        ),
        Output::Down => {
            tracing::warn!(%neighbour, "paced link ended: flows use TCP until the link is made again")
        }
        Output::Opened(_) | Output::Readable(_) | Output::Writable(_) => {}
    }
}

/// Limits the rate of the link to this neighbour below the declared one, bits per second; none: the declared one.
pub(super) fn limit(shared: &Shared, neighbour: NodeId, bits_per_second: Option<u64>) {
    let lanes = &shared.datagrams.lanes;
    if let Some(declared) = lanes.rate(neighbour) {
        let rate = bits_per_second.map_or(declared, |rate| rate.min(declared));
        lock(&lanes.limits).insert(neighbour, rate);
        if let Some(link) = shared.datagrams.link(neighbour)
            && let Some(lane) = &link.lane
        {
            let mut inner = lane.lock();
            inner.link.handle(shared.clock.now(), Input::Rate(rate));
            inner.ring_if_due(&lanes.bell);
        }
    }
}

/// Opens a stream to this neighbour. `None`: the link to it is not paced now, or has too many streams.
pub(super) fn open(shared: &Shared, neighbour: NodeId) -> Option<FlowStream> {
    let link = shared.datagrams.link(neighbour)?;
    let lane = link.lane.as_ref()?;
    let name = {
        let mut inner = lane.lock();
        let name = inner.link.open()?;
        inner.waiting.insert(name, Waiting::default());
        name
    };
    Some(FlowStream::paced(Stream::new(shared, &link, name)))
}

/// Serves the streams that neighbours open, without end.
pub(super) async fn serve(shared: Arc<Shared>) {
    let Some(mut arriving) = shared.datagrams.lanes.arriving() else { return };
    while let Some((neighbour, stream)) = arriving.recv().await {
        tokio::spawn(circuit::wait_and_serve(shared.clone(), FlowStream::paced(stream), neighbour));
    }
}
