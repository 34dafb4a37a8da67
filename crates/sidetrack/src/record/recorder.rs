//! Who collects ended flows from all workers.
//!
//! A thread of the lowest priority (SCHED_IDLE) does the work: a worker, or whatever else wants the processor, interrupts
//! it at once. Where the machine has no time left at all, flows pile up; then the control thread, which has the ordinary
//! priority, takes some of them in slices of a tenth of a millisecond, so that no record is lost.

use super::line::Lines;
use super::{Feed, FlowRecord, RecordWriter};
use crate::live::{Batch, Decided, ENDED_MAX, Ended, Ledger, Tally};
use sidetrack_core::flow::FlowId;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// How often every worker's ledger is visited: the latest that a record is late.
pub const VISIT_EVERY: Duration = Duration::from_millis(50);

/// The same while a ledger fills up faster.
const VISIT_SOON: Duration = Duration::from_millis(10);

/// How often the control thread looks whether flows pile up.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The pause between two slices of the control thread's help.
const BREATH: Duration = Duration::from_millis(1);

/// How long the last lines may take to be written when we stop.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Who else wants to see every flow that ended (the metrics).
pub trait Observer: Send + Sync {
    /// Flows ended.
    fn took(&self, batch: &Batch) {
        for past in batch.iter() {
            let ended = past.to_ended();
            self.ended(&ended, ended.flow.decided().as_deref());
        }
    }
    /// A flow ended.
    fn ended(&self, ended: &Ended, decided: Option<&Decided>);
    /// Flows ended of which there is no record each.
    fn tallied(&self, tally: &Tally);
    /// So many records were lost: no room, or not writable.
    fn lost(&self, records: u64);
}

/// Visits the ledgers and hands on what it finds: to the writer, the feed and the observer.
pub struct Recorder {
    sinks: Arc<Sinks>,
    pen: Pen,
    /// Flows in flight that followers have been told of.
    told: BTreeSet<FlowId>,
}

/// Where flows come from and where their records go.
struct Sinks {
    ledgers: Vec<Arc<Ledger>>,
    feed: Arc<Feed>,
    writer: Mutex<Option<Arc<RecordWriter>>>,
    observer: Arc<dyn Observer>,
}

/// What one thread writes lines with.
#[derive(Default)]
struct Pen {
    lines: Lines,
    text: Vec<u8>,
}

impl Sinks {
    fn writer(&self) -> Option<Arc<RecordWriter>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One visit of all ledgers: takes what waits by now, batch by batch; how many flows that were. Holds no lock that a
    /// worker could wait for.
    fn visit(&self, pen: &mut Pen) -> usize {
        let writer = self.writer();
        let mut taken = 0;
        for ledger in &self.ledgers {
            // Asked before they are taken, and no more than these: others end meanwhile, and this has an end.
            let mut left = ledger.ended_waiting();
            // A follower from before one of them ended is told of it.
            let is_wanted = writer.is_some() || self.feed.has_followers();
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

    /// Counts what has no record.
    fn count(&self) {
        let writer = self.writer();
        let is_wanted = writer.is_some() || self.feed.has_followers();
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
    }

    fn record(&self, batch: Batch, writer: Option<&RecordWriter>, pen: &mut Pen) {
        self.observer.took(&batch);
        if let Some(writer) = writer {
            pen.text.clear();
            pen.lines.write(&batch, &mut pen.text);
            writer.push(&pen.text);
        }
        if self.feed.has_followers() {
            for past in batch.iter() {
                let ended = past.to_ended();
                let decided = ended.flow.decided();
                self.feed.tell_ended(&FlowRecord::ended(&ended, decided.as_deref()));
            }
        }
        self.feed.keep(batch);
    }

    /// Where flows pile up: takes one batch of each such ledger. False if none does.
    fn help(&self, pen: &mut Pen) -> bool {
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

/// The thread of low priority.
struct Scribe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Scribe {
    fn start(sinks: Arc<Sinks>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::Builder::new().name("records".to_owned()).spawn(move || {
            // Where that is forbidden, it works as any other thread.
            let _ = sidetrack_sys::scheduling::become_idle();
            let mut pen = Pen::default();
            while !told.load(Relaxed) {
                // Who is told of flows that open is told by one thread, in order: by the control thread.
                let taken = if sinks.feed.wants_opened() { 0 } else { sinks.visit(&mut pen) };
                let is_busy = taken > ENDED_MAX / 8;
                std::thread::park_timeout(if is_busy { VISIT_SOON } else { VISIT_EVERY });
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends it after the batch at hand, for which it waits.
    fn end(self) {
        self.stop.store(true, Relaxed);
        self.thread.thread().unpark();
        if self.thread.join().is_err() {
            tracing::error!("the thread that makes records ended by a panic");
        }
    }
}

impl Recorder {
    /// A recorder of these workers. Without a writer no lines are written.
    pub fn new(
        ledgers: Vec<Arc<Ledger>>,
        feed: Arc<Feed>,
        writer: Option<RecordWriter>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let writer = Mutex::new(writer.map(Arc::new));
        let sinks = Arc::new(Sinks { ledgers, feed, writer, observer });
        Self { sinks, pen: Pen::default(), told: BTreeSet::new() }
    }

    /// Visits the ledgers until `stop` becomes true (or its sender goes), then once more, and waits for the last
    /// lines to be written, though not for ever. Stop the workers first, so that no flow ends later.
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
            // It may have to wait for the processor: not on this thread, which may serve others.
            let _ = tokio::task::spawn_blocking(move || scribe.end()).await;
        }
        self.finish().await;
    }

    /// The last visit.
    async fn finish(mut self) {
        self.visit();
        self.sinks.feed.close();
        let writer = self.sinks.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(writer) = writer else { return };
        // The wait is that of another thread's disk.
        let lost = tokio::task::spawn_blocking(move || writer.close(LAST_LINES)).await.unwrap_or(0);
        self.sinks.observer.lost(lost);
    }

    /// One visit; how many flows had ended.
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
