//! Ended flows that wait to be sent to one collector.

use crate::live::Batch;
use sidetrack_sys::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Most bytes of batches that wait for one collector.
const BYTES_MAX: usize = 16 << 20;
/// What a batch takes besides its flows, bytes.
const BATCH_BYTES: usize = 512;

/// A bounded queue: the thread of the records adds, the thread of the collector takes.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    /// Told after each addition, and at the end.
    more: Notify,
    closed: AtomicBool,
    /// Told at the end.
    ending: Notify,
}

#[derive(Default)]
struct Waiting {
    batches: VecDeque<Arc<Batch>>,
    bytes: usize,
    flows: usize,
}

impl Queue {
    /// Adds a batch. Returns false if there is no room. Never waits.
    pub(super) fn offer(&self, batch: &Arc<Batch>) -> bool {
        let bytes = batch.size() + BATCH_BYTES;
        let mut waiting = lock(&self.waiting);
        if waiting.bytes + bytes > BYTES_MAX {
            return false;
        }
        waiting.bytes += bytes;
        waiting.flows += batch.len();
        waiting.batches.push_back(batch.clone());
        drop(waiting);
        self.more.notify_one();
        true
    }

    /// Takes the oldest batch.
    pub(super) fn take(&self) -> Option<Arc<Batch>> {
        let mut waiting = lock(&self.waiting);
        let batch = waiting.batches.pop_front()?;
        waiting.bytes = waiting.bytes.saturating_sub(batch.size() + BATCH_BYTES);
        waiting.flows = waiting.flows.saturating_sub(batch.len());
        Some(batch)
    }

    /// Waits for the oldest batch and takes it. `None`: the queue is closed, and empty.
    pub(super) async fn next(&self) -> Option<Arc<Batch>> {
        loop {
            if let Some(batch) = self.take() {
                return Some(batch);
            }
            if self.is_closed() {
                return None;
            }
            self.more.notified().await;
        }
    }

    /// Flows that wait.
    pub(super) fn flows(&self) -> usize {
        lock(&self.waiting).flows
    }

    /// Says that no batch follows.
    pub(super) fn close(&self) {
        self.closed.store(true, Relaxed);
        self.more.notify_one();
        self.ending.notify_waiters();
        self.ending.notify_one();
    }

    /// Whether no batch follows.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Waits until no batch follows.
    pub(super) async fn closing(&self) {
        loop {
            let told = self.ending.notified();
            if self.is_closed() {
                // For the next caller.
                self.ending.notify_one();
                return;
            }
            told.await;
        }
    }
}
