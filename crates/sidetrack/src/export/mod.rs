//! Sends reports of flows to collectors of others.
//!
//! The thread of the records offers each batch of ended flows to the queue of each collector, which costs it one copy. A
//! thread for each collector encodes and sends. If its queue is full, flows are dropped and counted: a dead or slow
//! collector slows neither flows nor records.

mod backoff;
mod dial;
mod ipfix;
mod lane;
mod otlp;
mod queue;

use crate::config::{Export, Ipfix, Otlp};
use crate::live::Ledger;
use crate::metrics::ExportCounts;
use crate::record::Offered;
use lane::Lane;
use ring::rand::{SecureRandom, SystemRandom};
use sidetrack_sys::sync::lock;
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long sending what waits may take when the process stops.
const LAST_REPORTS: Duration = Duration::from_secs(2);

/// What the threads need besides their settings.
#[derive(Clone)]
pub struct Around {
    /// The mark that keeps our own connections from being captured again.
    pub mark: Option<u32>,
    /// The running flows.
    pub ledgers: Vec<Arc<Ledger>>,
    /// Returns what `/metrics` shows.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
}

/// The collectors of this node.
pub struct Exports {
    ipfix: Option<(Ipfix, Arc<Lane>)>,
    otlp: Option<(Otlp, Arc<Lane>)>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Exports {
    /// The queues of all collectors. Nothing is sent before [`Exports::start`].
    pub fn new(settings: &Export) -> Arc<Self> {
        let ipfix = settings.ipfix.clone().map(|ipfix| (ipfix, Arc::new(Lane::new("ipfix"))));
        let otlp = settings.otlp.clone().map(|otlp| (otlp, Arc::new(Lane::new("otlp"))));
        Arc::new(Self { ipfix, otlp, threads: Mutex::default() })
    }

    fn lanes(&self) -> impl Iterator<Item = &Arc<Lane>> {
        let ipfix = self.ipfix.iter().map(|(_, lane)| lane);
        ipfix.chain(self.otlp.iter().map(|(_, lane)| lane))
    }

    /// Where ended flows are offered.
    pub fn places(&self) -> Vec<Arc<dyn Offered>> {
        let ipfix = self.ipfix.iter().map(|(_, lane)| lane);
        let otlp = self.otlp.iter().filter(|(settings, _)| settings.traces).map(|(_, lane)| lane);
        ipfix.chain(otlp).map(|lane| lane.clone() as Arc<dyn Offered>).collect()
    }

    /// What was sent and dropped since the start.
    pub fn counts(&self) -> Vec<ExportCounts> {
        self.lanes().map(|lane| lane.counts()).collect()
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// The system has no room for a thread.
    pub fn start(&self, around: &Around) -> io::Result<()> {
        if let Some((settings, lane)) = &self.ipfix {
            let sending = ipfix::run(lane.clone(), settings.clone(), around.clone());
            lock(&self.threads).push(thread(lane.clone(), sending)?);
        }
        if let Some((settings, lane)) = &self.otlp {
            let mut seed = [0; 16];
            SystemRandom::new().fill(&mut seed).map_err(|_| io::Error::other("no random numbers"))?;
            let sending = otlp::run(lane.clone(), settings.clone(), around.clone(), seed);
            lock(&self.threads).push(thread(lane.clone(), sending)?);
        }
        Ok(())
    }

    /// Sends what waits, within [`LAST_REPORTS`], and ends the threads.
    pub fn close(&self) {
        self.lanes().for_each(|lane| lane.queue.close());
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            if thread.join().is_err() {
                tracing::error!("a thread that sends reports ended by a panic");
            }
        }
        for lane in self.lanes() {
            let left = lane.give_up();
            if left > 0 {
                tracing::warn!(to = lane.name, flows = left, "reports of flows were not sent before the end");
            }
        }
    }
}

/// Starts a thread that runs `sending`, until it ends, or for at most [`LAST_REPORTS`] after the queue was closed.
fn thread(lane: Arc<Lane>, sending: impl Future<Output = ()> + Send + 'static) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name(format!("export-{}", lane.name)).spawn(move || {
        // If this is not permitted, the thread runs with normal priority.
        let _ = sidetrack_sys::scheduling::become_batch();
        runtime.block_on(async {
            let over = async {
                lane.queue.closing().await;
                tokio::time::sleep(LAST_REPORTS).await;
            };
            tokio::select! {
                () = sending => {}
                () = over => {}
            }
        });
        // A look-up of a name may hang in the system's resolver.
        runtime.shutdown_background();
    })
}

/// Any number, for pauses that must not be the same on all nodes.
fn chance() -> u32 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_micros()
}
