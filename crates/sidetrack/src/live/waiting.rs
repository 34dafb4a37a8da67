//! Where flows that ended wait for the recorder.

use super::{Batch, Ended, lock};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

/// Ended flows that a worker's ledger holds for the recorder. Of those that come while so many wait there is no record:
/// they are only counted, so that no flow is ever held up and metrics stay true.
pub const ENDED_MAX: usize = 32_768;

/// The same in bytes of their compact form.
pub const BYTES_MAX: usize = 8 << 20;

/// Two threads may take flows at a time: then a third cell is free for the worker, who never waits for them.
const CELLS: usize = 3;

/// One writer puts flows in, up to two readers take them out, in batches. The writer never waits for a reader, which may
/// be a thread of low priority that was interrupted: it turns to another cell.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    cells: [Mutex<Cell>; CELLS],
    /// The cell the writer used last.
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
        // Only where several threads put flows in.
        lock(&self.cells[at % CELLS])
    }

    /// Puts a flow in; false if there is no room.
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

    /// Flows that wait.
    pub(super) fn len(&self) -> usize {
        self.flows.load(Relaxed)
    }

    /// Whether more wait than a quarter of what has room.
    pub(super) fn is_crowded(&self) -> bool {
        self.len() >= ENDED_MAX / 4 || self.bytes.load(Relaxed) >= BYTES_MAX / 4
    }
}
