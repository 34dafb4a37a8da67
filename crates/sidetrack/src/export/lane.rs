//! One collector: the flows that wait for it, and what was counted.

use super::queue::Queue;
use crate::live::Batch;
use crate::metrics::ExportCounts;
use crate::record::Offered;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Why reports were not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drop {
    /// The queue was full.
    Full,
    /// The connection broke while they were sent, or the collector's host said that no program receives them.
    Lost,
    /// The collector refused them for good.
    Refused,
    /// The program ended before the collector took them.
    Ending,
}

impl Drop {
    const ALL: [Self; 4] = [Self::Full, Self::Lost, Self::Refused, Self::Ending];

    /// The word in metrics.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Lost => "lost",
            Self::Refused => "refused",
            Self::Ending => "ending",
        }
    }
}

/// One collector.
pub(super) struct Lane {
    /// The word in metrics and in the log.
    pub(super) name: &'static str,
    pub(super) queue: Queue,
    sent: AtomicU64,
    dropped: [AtomicU64; Drop::ALL.len()],
    failures: AtomicU64,
    /// Reports that were taken from the queue, and neither sent nor dropped yet.
    held: AtomicU64,
    /// The latest attempt has failed.
    is_failing: AtomicBool,
}

impl Lane {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            queue: Queue::default(),
            sent: AtomicU64::new(0),
            dropped: Default::default(),
            failures: AtomicU64::new(0),
            held: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
        }
    }

    /// Notes reports that are about to be sent.
    pub(super) fn hold(&self, reports: u64) {
        self.held.fetch_add(reports, Relaxed);
    }

    fn release(&self, reports: u64) {
        // Never fails: the function returns a number each time.
        let _ = self.held.fetch_update(Relaxed, Relaxed, |held| Some(held.saturating_sub(reports)));
    }

    /// Drops all reports that are about to be sent.
    pub(super) fn drop_held(&self, reason: Drop) -> u64 {
        let left = self.held.load(Relaxed);
        self.dropped(reason, left);
        left
    }

    /// Notes reports that the collector, or its network, has taken.
    pub(super) fn sent(&self, reports: u64) {
        self.sent.fetch_add(reports, Relaxed);
        self.release(reports);
        if self.is_failing.swap(false, Relaxed) {
            tracing::info!(to = self.name, "reports of flows are sent again");
        }
    }

    /// Notes reports that are not sent.
    pub(super) fn dropped(&self, reason: Drop, reports: u64) {
        if reason != Drop::Full {
            self.release(reports);
        }
        let all = Drop::ALL.iter().zip(&self.dropped);
        all.filter(|(one, _)| **one == reason).for_each(|(_, count)| {
            count.fetch_add(reports, Relaxed);
        });
    }

    /// Notes an attempt to reach the collector, or to send, that failed. The first one in a row is logged.
    pub(super) fn failed(&self, error: &dyn Display) {
        self.failures.fetch_add(1, Relaxed);
        if !self.is_failing.swap(true, Relaxed) {
            tracing::warn!(to = self.name, "cannot send reports of flows; trying again: {error}");
        }
    }

    /// Drops what still waits, and returns how many flows that are.
    pub(super) fn give_up(&self) -> u64 {
        while let Some(batch) = self.queue.take() {
            self.hold(batch.len() as u64);
        }
        self.drop_held(Drop::Ending)
    }

    pub(super) fn counts(&self) -> ExportCounts {
        let dropped = Drop::ALL.iter().zip(&self.dropped);
        ExportCounts {
            to: self.name,
            sent: self.sent.load(Relaxed),
            dropped: dropped.map(|(reason, count)| (reason.as_str(), count.load(Relaxed))).collect(),
            failures: self.failures.load(Relaxed),
            waiting: self.queue.flows() as u64,
        }
    }
}

impl Offered for Lane {
    fn offer(&self, batch: &Arc<Batch>) {
        if !self.queue.offer(batch) {
            self.dropped(Drop::Full, batch.len() as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::{Ended, LiveFlow};
    use sidetrack_core::flow::{EndReason, FlowId};
    use std::time::Duration;

    fn batch(flows: u64) -> Arc<Batch> {
        let mut batch = Batch::default();
        for id in 0..flows {
            let (flow, duration) = (Arc::new(LiveFlow::new(FlowId(id))), Duration::ZERO);
            batch.add(&Ended { flow, reason: EndReason::Ok, detail: None, duration });
        }
        Arc::new(batch)
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (lane, batch) = (Lane::new("test"), batch(100));
        let mut offered = 0;
        while lane.counts().dropped[0].1 == 0 {
            lane.offer(&batch);
            offered += 100;
            assert!(offered < 10_000_000, "there is a bound");
        }
        let counts = lane.counts();
        assert_eq!((counts.waiting, counts.dropped[0]), (offered - 100, ("full", 100)));
        assert!(lane.queue.take().is_some());
        lane.offer(&batch);
        assert_eq!(lane.counts().dropped[0].1, 100, "there is room again");
        // The batch that was taken is on its way.
        lane.hold(100);
        lane.sent(60);
        assert_eq!(lane.give_up(), offered - 60);
        assert_eq!((lane.counts().waiting, lane.counts().dropped[3]), (0, ("ending", offered - 60)));
    }

    #[tokio::test]
    async fn what_waits_is_taken_before_the_end() {
        let lane = Lane::new("test");
        lane.offer(&batch(1));
        lane.queue.close();
        lane.queue.closing().await;
        lane.queue.closing().await;
        assert!(lane.queue.next().await.is_some());
        assert!(lane.queue.next().await.is_none());
    }
}
