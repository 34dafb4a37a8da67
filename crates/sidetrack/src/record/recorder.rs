//! Collects the ended flows of all workers.
//!
//! A thread with the lowest priority (SCHED_IDLE) does the work, so that a worker can preempt it at once. If the
//! machine has no idle time, ended flows pile up. Then the control thread, which has normal priority, takes some
//! of them in slices of a tenth of a millisecond, so that no record is lost.

use super::history::History;
use super::line::Lines;
use super::{Feed, FlowRecord, RecordWriter};
use crate::live::{Batch, Decided, ENDED_MAX, Ended, Ledger, Tally};
use sidetrack_core::flow::FlowId;
use sidetrack_sys::sync::lock;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// Time between two visits of each worker's ledger: a record is at most this late.
pub const VISIT_EVERY: Duration = Duration::from_millis(50);

/// Time between two visits while a ledger fills up faster.
const VISIT_SOON: Duration = Duration::from_millis(10);

/// How often the control thread checks whether flows pile up.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Pause between two slices in which the control thread helps.
const BREATH: Duration = Duration::from_millis(1);

/// How long writing the last lines may take when the process stops.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Another consumer of ended flows (the metrics).
pub trait Observer: Send + Sync {
    /// Called with flows that ended.
    fn took(&self, batch: &Batch) {
        for past in batch.iter() {
            let ended = past.to_ended();
            self.ended(&ended, ended.flow.decided().as_deref());
        }
    }
    /// Called with one flow that ended.
    fn ended(&self, ended: &Ended, decided: Option<&Decided>);
    /// Called with counts of flows that ended and have no record each.
    fn tallied(&self, tally: &Tally);
    /// Called when this number of records was lost, because the buffer was full or the file not writable.
    fn lost(&self, records: u64);
    /// Called when this number of flows is missing in the history, for these reasons.
    fn missing_in_history(&self, _flows: u64) {}
}

/// A collector of others that gets ended flows, too.
pub trait Offered: Send + Sync {
    /// Called with flows that ended. Never waits: what it has no room for is dropped.
    fn offer(&self, batch: &Arc<Batch>);
}

/// Visits the ledgers and passes their flows to the writer, the feed and the observer.
pub struct Recorder {
    sinks: Arc<Sinks>,
    pen: Pen,
    /// Running flows that followers were told about.
    told: BTreeSet<FlowId>,
}

/// The sources of ended flows, and the destinations of their records.
struct Sinks {
    ledgers: Vec<Arc<Ledger>>,
    feed: Arc<Feed>,
    writer: Mutex<Option<Arc<RecordWriter>>>,
    history: Mutex<Option<Arc<History>>>,
    offered: OnceLock<Vec<Arc<dyn Offered>>>,
    observer: Arc<dyn Observer>,
    /// Ended flows wait in their ledgers. Visits hold it for reading.
    held: RwLock<bool>,
}

/// Changes where the records of a running [`Recorder`] go. Ended flows wait meanwhile, so that none is lost or written twice.
#[derive(Clone)]
pub struct Switch(Arc<Sinks>);

impl Switch {
    /// Lets ended flows wait, and closes the record file and the history. Blocks until their last lines are written.
    pub fn hold(&self) {
        // Waits for a visit that goes on.
        *self.0.held.write().unwrap_or_else(PoisonError::into_inner) = true;
        let (writer, history) = (lock(&self.0.writer).take(), lock(&self.0.history).take());
        let lost = writer.map_or(0, |writer| writer.close(LAST_LINES));
        self.0.observer.lost(lost);
        if let Some(history) = history {
            self.0.observer.missing_in_history(history.close());
        }
    }

    /// Goes on with these.
    pub fn go_on(&self, writer: Option<RecordWriter>, history: Option<Arc<History>>) {
        *lock(&self.0.writer) = writer.map(Arc::new);
        *lock(&self.0.history) = history;
        *self.0.held.write().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Adds whole lines that another process of this node has made.
    pub fn add(&self, lines: &[u8]) {
        if let Some(writer) = self.0.writer() {
            writer.push(lines);
        }
        if let Some(history) = self.0.history() {
            history.push(lines);
        }
    }
}

/// One thread's buffers for writing lines.
#[derive(Default)]
struct Pen {
    lines: Lines,
    text: Vec<u8>,
}

impl Sinks {
    fn writer(&self) -> Option<Arc<RecordWriter>> {
        lock(&self.writer).clone()
    }

    fn history(&self) -> Option<Arc<History>> {
        lock(&self.history).clone()
    }

    /// Whether anybody reads the flows one by one.
    fn is_wanted(&self, writer: Option<&RecordWriter>) -> bool {
        let is_offered = self.offered.get().is_some_and(|places| !places.is_empty());
        writer.is_some() || lock(&self.history).is_some() || is_offered || self.feed.has_followers()
    }

    /// Visits all ledgers once and takes the flows that wait now, batch by batch. Returns how many. Holds no
    /// lock that a worker could wait for.
    fn visit(&self, pen: &mut Pen) -> usize {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        if *held {
            return 0;
        }
        let writer = self.writer();
        let mut taken = 0;
        for ledger in &self.ledgers {
            // Read the count first and take no more than that. More flows end meanwhile, and this visit must
            // finish.
            let mut left = ledger.ended_waiting();
            // Ask for followers before the flows are taken: a follower must see the flows that end after it
            // came.
            let is_wanted = self.is_wanted(writer.as_deref());
            ledger.set_read(is_wanted);
            while left > 0
                && let Some(batch) = ledger.take_batch()
            {
                left = left.saturating_sub(batch.len());
                taken += batch.len();
                self.record(batch, writer.as_deref(), pen);
            }
        }
        taken
    }

    /// Counts records that are missing.
    fn count(&self) {
        let writer = self.writer();
        let is_wanted = self.is_wanted(writer.as_deref());
        let mut lost = writer.map_or(0, |writer| writer.take_lost());
        for ledger in &self.ledgers {
            lost += ledger.take_dropped();
            for tally in ledger.take_tallies() {
                self.observer.tallied(&tally);
                if is_wanted {
                    lost += tally.times_us.len() as u64;
                }
            }
        }
        if lost > 0 {
            self.observer.lost(lost);
        }
        let missing = self.history().map_or(0, |history| history.take_lost());
        if missing > 0 {
            self.observer.missing_in_history(missing);
        }
    }

    fn record(&self, batch: Batch, writer: Option<&RecordWriter>, pen: &mut Pen) {
        self.observer.took(&batch);
        pen.text.clear();
        let history = self.history();
        if writer.is_some() || history.is_some() {
            pen.lines.write(&batch, &mut pen.text);
        }
        let followed: Vec<_> = match self.feed.has_followers() {
            true => batch.iter().map(|past| past.to_ended()).collect(),
            false => Vec::new(),
        };
        if let Some(places) = self.offered.get().filter(|places| !places.is_empty()) {
            let batch = Arc::new(batch.clone());
            places.iter().for_each(|place| place.offer(&batch));
        }
        // Keep the flows before their lines go out: a reader of a line may ask for its flow at once.
        self.feed.keep(batch);
        if let Some(writer) = writer {
            writer.push(&pen.text);
        }
        if let Some(history) = history {
            history.push(&pen.text);
        }
        for ended in &followed {
            let decided = ended.flow.decided();
            self.feed.tell_ended(&FlowRecord::ended(ended, decided.as_deref()));
        }
    }

    /// If flows pile up in a ledger, takes one batch of each such ledger. Returns false if none do.
    fn help(&self, pen: &mut Pen) -> bool {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        if *held {
            return false;
        }
        let writer = self.writer();
        let mut helped = false;
        for ledger in self.ledgers.iter().filter(|ledger| ledger.is_crowded()) {
            if let Some(batch) = ledger.take_batch() {
                self.record(batch, writer.as_deref(), pen);
                helped = true;
            }
        }
        helped
    }
}

/// The thread with low priority.
struct Scribe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Scribe {
    fn start(sinks: Arc<Sinks>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::Builder::new().name("records".to_owned()).spawn(move || {
            // If this is not permitted, the thread runs with normal priority.
            let _ = sidetrack_sys::scheduling::become_idle();
            let mut pen = Pen::default();
            while !told.load(Relaxed) {
                // Followers of opened flows must get their lines in order: the control thread alone does that
                // then.
                let taken = if sinks.feed.wants_opened() { 0 } else { sinks.visit(&mut pen) };
                let is_busy = taken > ENDED_MAX / 8;
                std::thread::park_timeout(if is_busy { VISIT_SOON } else { VISIT_EVERY });
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Stops the thread and waits until it has finished its batch.
    fn end(self) {
        self.stop.store(true, Relaxed);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            tracing::error!("the thread that makes records ended by a panic");
        }
    }
}

impl Recorder {
    /// Creates a recorder for these workers. Without a writer no lines are written.
    pub fn new(
        ledgers: Vec<Arc<Ledger>>,
        feed: Arc<Feed>,
        writer: Option<RecordWriter>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let writer = Mutex::new(writer.map(Arc::new));
        let (history, offered, held) = (Mutex::default(), OnceLock::new(), RwLock::new(false));
        let sinks = Arc::new(Sinks { ledgers, feed, writer, history, offered, observer, held });
        Self { sinks, pen: Pen::default(), told: BTreeSet::new() }
    }

    /// Keeps the flows in a history, too.
    #[must_use]
    pub fn keeping(self, history: Option<Arc<History>>) -> Self {
        *lock(&self.sinks.history) = history;
        self
    }

    /// Changes where the records go, while it runs.
    pub fn switch(&self) -> Switch {
        Switch(self.sinks.clone())
    }

    /// Offers ended flows to these places, too.
    #[must_use]
    pub fn offering(self, places: Vec<Arc<dyn Offered>>) -> Self {
        // There are none before this.
        let _ = self.sinks.offered.set(places);
        self
    }

    /// Visits the ledgers until `stop` becomes true or its sender is dropped. Then visits them once more, and
    /// waits a limited time until the last lines are written. Stop the workers first, so that no flow ends
    /// later.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let scribe = match Scribe::start(self.sinks.clone()) {
            Ok(scribe) => Some(scribe),
            Err(error) => {
                tracing::error!(%error, "cannot start the thread that makes records; the control thread makes them");
                None
            }
        };
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
            if scribe.is_none() || self.sinks.feed.wants_opened() {
                self.visit();
            }
            self.sinks.count();
            while self.sinks.help(&mut self.pen) {
                tokio::time::sleep(BREATH).await;
            }
        }
        if let Some(scribe) = scribe {
            // Joining may wait for the processor, so it runs on another thread: this one may have other work.
            let _ = tokio::task::spawn_blocking(move || scribe.end()).await;
        }
        self.finish().await;
    }

    /// Makes the last visit.
    async fn finish(mut self) {
        self.visit();
        self.sinks.feed.close();
        let (writer, history) = (lock(&self.sinks.writer).take(), lock(&self.sinks.history).take());
        // The disk may be slow, so this waits on another thread.
        let closing = tokio::task::spawn_blocking(move || {
            let lost = writer.map_or(0, |writer| writer.close(LAST_LINES));
            (lost, history.map_or(0, |history| history.close()))
        });
        let (lost, missing) = closing.await.unwrap_or_default();
        self.sinks.observer.lost(lost);
        self.sinks.observer.missing_in_history(missing);
    }

    /// Visits all ledgers once. Returns how many flows had ended.
    pub fn visit(&mut self) -> usize {
        self.tell_opened();
        let taken = self.sinks.visit(&mut self.pen);
        self.sinks.count();
        taken
    }

    fn tell_opened(&mut self) {
        let Sinks { ledgers, feed, .. } = &*self.sinks;
        if !feed.wants_opened() {
            self.told.clear();
            return;
        }
        let mut live = BTreeSet::new();
        for flow in ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
            if flow.decided().is_none_or(|decided| decided.verdict.is_none()) {
                continue;
            }
            if !self.told.contains(&flow.id) {
                feed.tell_opened(&flow);
            }
            live.insert(flow.id);
        }
        self.told = live;
    }
}
