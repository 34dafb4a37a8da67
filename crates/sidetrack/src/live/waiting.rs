//! Queue of ended flows for the recorder.

use super::{Batch, Ended, lock};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// Most ended flows that wait in a worker's ledger. Further ones get no record and are only counted, so that no
/// flow is delayed and metrics stay correct.
pub const ENDED_MAX: usize = 32_768;

/// The limit in bytes of their compact form.
pub const BYTES_MAX: usize = 8 << 20;

/// Number of cells. Two threads may read at a time; the third cell is then free for the worker, which never
/// waits for them.
const CELLS: usize = 3;

/// A queue with one writer and up to two readers, which take batches. The writer never waits for a reader, which
/// may be a preempted thread of low priority: it uses another cell.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    cells: [Mutex<Cell>; CELLS],
    /// The cell that the writer used last.
    at: AtomicUsize,
    flows: AtomicUsize,
    bytes: AtomicUsize,
}

#[derive(Debug, Default)]
struct Cell {
    full: VecDeque<Batch>,
    filling: Batch,
}

impl Waiting {
    fn cell(&self) -> MutexGuard<'_, Cell> {
        let at = self.at.load(Relaxed);
        for turn in 0..CELLS {
            let place = (at + turn) % CELLS;
            if let Some(cell) = self.cells.get(place).and_then(|cell| cell.try_lock().ok()) {
                if turn > 0 {
                    self.at.store(place, Relaxed);
                }
                return cell;
            }
        }
        // Only reached if several threads write.
        lock(&self.cells[at % CELLS])
    }

    /// Adds a flow. Returns false if there is no room.
    pub(super) fn put(&self, ended: &Ended) -> bool {
        if self.flows.load(Relaxed) >= ENDED_MAX || self.bytes.load(Relaxed) >= BYTES_MAX {
            return false;
        }
        let mut cell = self.cell();
        if cell.filling.is_full() {
            let full = std::mem::take(&mut cell.filling);
            cell.full.push_back(full);
        }
        let before = cell.filling.size();
        cell.filling.add(ended);
        self.bytes.fetch_add(cell.filling.size() - before, Relaxed);
        self.flows.fetch_add(1, Relaxed);
        true
    }

    /// Takes the next batch, the oldest of its cell.
    pub(super) fn take(&self) -> Option<Batch> {
        self.cells.iter().find_map(|cell| {
            let batch = {
                let mut cell = lock(cell);
                cell.full.pop_front().unwrap_or_else(|| std::mem::take(&mut cell.filling))
            };
            if batch.is_empty() {
                return None;
            }
            self.flows.fetch_sub(batch.len(), Relaxed);
            self.bytes.fetch_sub(batch.size(), Relaxed);
            Some(batch)
        })
    }

    /// The number of waiting flows.
    pub(super) fn len(&self) -> usize {
        self.flows.load(Relaxed)
    }

    /// Whether more than a quarter of the limit is waiting.
    pub(super) fn is_crowded(&self) -> bool {
        self.len() >= ENDED_MAX / 4 || self.bytes.load(Relaxed) >= BYTES_MAX / 4
    }
}
