//! The task that collects ended flows from all workers.

use super::{Feed, FlowRecord, RecordWriter};
use crate::live::{Decided, ENDED_MAX, Ended, Ledger, Tally};
use sidetrack_core::flow::FlowId;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How often every worker's ledger is visited: the latest that a record is late.
pub const VISIT_EVERY: Duration = Duration::from_millis(50);

/// The same while a ledger fills up faster.
const VISIT_SOON: Duration = Duration::from_millis(10);
/// Ended flows in a ledger that say so.
const CROWDED: usize = ENDED_MAX / 4;

/// How long the last lines may take to be written when we stop.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Who else wants to see every flow that ended (the metrics).
pub trait Observer: Send + Sync {
    /// A flow ended.
    fn ended(&self, ended: &Ended, decided: Option<&Decided>);
    /// Flows ended of which there is no record each.
    fn tallied(&self, tally: &Tally);
    /// So many records were lost: no room, or not writable.
    fn lost(&self, records: u64);
}

/// Visits the ledgers and hands on what it finds: to the writer, the feed and the observer.
pub struct Recorder {
    ledgers: Vec<Arc<Ledger>>,
    feed: Arc<Feed>,
    writer: Option<RecordWriter>,
    observer: Arc<dyn Observer>,
    /// Flows in flight that followers have been told of.
    told: BTreeSet<FlowId>,
    lines: Vec<u8>,
}

impl Recorder {
    /// A recorder of these workers. Without a writer no lines are written.
    pub fn new(
        ledgers: Vec<Arc<Ledger>>,
        feed: Arc<Feed>,
        writer: Option<RecordWriter>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        Self { ledgers, feed, writer, observer, told: BTreeSet::new(), lines: Vec::new() }
    }

    /// Visits the ledgers until `stop` becomes true (or its sender goes), then once more, and waits for the last
    /// lines to be written, though not for ever. Stop the workers first, so that no flow ends later.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut wait = Duration::ZERO;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
            wait = if self.visit() < CROWDED { VISIT_EVERY } else { VISIT_SOON };
        }
        self.finish().await;
    }

    /// The last visit.
    async fn finish(mut self) {
        self.visit();
        self.feed.close();
        let Some(writer) = self.writer.take() else { return };
        // The wait is that of another thread's disk: not on this one, which may serve others.
        let lost = tokio::task::spawn_blocking(move || writer.close(LAST_LINES)).await.unwrap_or(0);
        self.observer.lost(lost);
    }

    /// One visit; how many flows had ended in the ledger that had most.
    pub fn visit(&mut self) -> usize {
        let mut most = 0;
        self.tell_opened();
        for ledger in self.ledgers.clone() {
            let (all, dropped) = ledger.take_ended();
            most = most.max(all.len());
            if dropped > 0 {
                self.observer.lost(dropped);
            }
            // Asked after they were taken: who followed before one of them ended is told of it.
            let is_wanted = self.writer.is_some() || self.feed.has_followers();
            ledger.set_read(is_wanted);
            for ended in &all {
                self.take(ended, is_wanted);
            }
            for tally in ledger.take_tallies() {
                self.observer.tallied(&tally);
                if is_wanted {
                    self.observer.lost(tally.times_us.len() as u64);
                }
            }
            self.feed.keep(all);
        }
        if let Some(writer) = &self.writer {
            writer.push(&self.lines);
            self.lines.clear();
            self.observer.lost(writer.take_lost());
        }
        most
    }

    /// `is_wanted`: somebody reads records.
    fn take(&mut self, ended: &Ended, is_wanted: bool) {
        let decided = ended.flow.decided();
        self.observer.ended(ended, decided.as_deref());
        if !is_wanted {
            return;
        }
        let record = FlowRecord::ended(ended, decided.as_deref());
        if self.writer.is_some() {
            record.write_line(&mut self.lines);
        }
        self.feed.tell_ended(&record);
    }

    fn tell_opened(&mut self) {
        if !self.feed.wants_opened() {
            self.told.clear();
            return;
        }
        let mut live = BTreeSet::new();
        for flow in self.ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
            if flow.decided().is_none_or(|decided| decided.verdict.is_none()) {
                continue;
            }
            if !self.told.contains(&flow.id) {
                self.feed.tell_opened(&flow);
            }
            live.insert(flow.id);
        }
        self.told = live;
    }
}
