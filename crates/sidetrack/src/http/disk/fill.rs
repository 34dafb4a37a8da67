//! Copies a response that is too large for memory to the disk, while it is sent to its client.

use super::file::Writing;
use super::index::Claim;
use super::{Disk, Filed, lock};
use crate::reactor::timeout;
use sidetrack_core::http::cache::Stored;
use sidetrack_core::http::cache::file::{BLOCK, variant_of};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Most blocks that wait to be written. Beyond that the client waits for the disk.
const AHEAD: usize = 16;
/// How long a client waits for one block to be written. After that the copy is given up.
const PATIENCE: Duration = Duration::from_millis(500);

/// A copy of a response on its way to the disk. If it is dropped without [`Fill::finish`], it is removed.
#[derive(Debug)]
pub struct Fill {
    disk: Arc<Disk>,
    most: u64,
    taken: u64,
    block: Vec<u8>,
    path: Arc<Path>,
}

/// State shared by the fill and the thread that writes.
#[derive(Debug)]
struct Path {
    claim: Arc<Claim>,
    writing: Mutex<Option<Writing>>,
    waiting: AtomicUsize,
    moved: Notify,
}

impl Fill {
    pub(super) fn new(disk: Arc<Disk>, claim: Arc<Claim>, key: &[u8], stored: Stored, most: u64) -> Self {
        let (writing, waiting, moved) = (Mutex::default(), AtomicUsize::new(0), Notify::new());
        let path = Arc::new(Path { claim, writing, waiting, moved });
        let fill = Self { disk, most, taken: 0, block: Vec::new(), path };
        let key = key.to_vec();
        fill.act(move |disk, path| {
            let begun = Writing::begin(&disk.folder, disk.new_number(), &key, &stored, 0)?;
            *lock(&path.writing) = Some(begun);
            Ok(())
        });
        fill
    }

    /// Lets the writing thread run `act`; if it fails, the copy is given up.
    fn act(&self, act: impl FnOnce(&Disk, &Path) -> io::Result<()> + Send + 'static) {
        let (disk, path) = (self.disk.clone(), self.path.clone());
        path.waiting.fetch_add(1, SeqCst);
        self.disk.writes.send(move || {
            if let Err(error) = act(&disk, &path) {
                *lock(&path.writing) = None;
                path.claim.void();
                disk.is_in_trouble(&error);
            }
            path.waiting.fetch_sub(1, SeqCst);
            path.moved.notify_waiters();
        });
    }

    /// Takes a piece; returns whether the copy goes on.
    pub async fn push(&mut self, mut data: &[u8]) -> bool {
        self.taken += data.len() as u64;
        if self.taken > self.most {
            return false;
        }
        while !data.is_empty() {
            let (now, later) = data.split_at(data.len().min(BLOCK - self.block.len()));
            self.block.extend_from_slice(now);
            data = later;
            if self.block.len() == BLOCK && !(self.has_room().await && self.send_block()) {
                return false;
            }
        }
        true
    }

    /// Waits until the disk is less than [`AHEAD`] blocks behind; returns false if that takes too long.
    async fn has_room(&self) -> bool {
        while self.path.waiting.load(SeqCst) >= AHEAD {
            let moved = self.path.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            let still = self.path.waiting.load(SeqCst) >= AHEAD;
            if still && timeout(PATIENCE, moved).await.is_err() {
                return false;
            }
        }
        true
    }

    fn send_block(&mut self) -> bool {
        let block = std::mem::replace(&mut self.block, Vec::with_capacity(BLOCK));
        self.act(move |_, path| match &mut *lock(&path.writing) {
            Some(writing) => writing.push(&block),
            None => Ok(()),
        });
        !self.path.claim.is_void()
    }

    /// Bytes of content taken so far.
    pub const fn taken(&self) -> u64 {
        self.taken
    }

    /// Ends the copy: once it is written, it is stored as `stored`, and the parts whose bytes it contains are removed.
    pub fn finish(mut self, stored: Stored, parts: &[Stored]) {
        if !self.block.is_empty() {
            self.send_block();
        }
        let (variant, parts) = (variant_of(&stored), parts.iter().map(variant_of).collect::<Vec<_>>());
        self.act(move |disk, path| {
            let Some(mut writing) = lock(&path.writing).take() else { return Ok(()) };
            // The key was removed meanwhile, or another process uses the folder.
            if path.claim.is_void() {
                return Ok(());
            }
            writing.set_head(&path.claim.key, &stored);
            let (number, bytes) = (writing.number(), writing.file_bytes());
            let Some(gone) = disk.index.reserve(bytes) else { return Ok(()) };
            disk.remove_files(gone);
            if let Err(error) = writing.finish() {
                disk.index.release(bytes);
                return Err(error);
            }
            let gone = disk.index.commit(&path.claim, Filed { number, bytes, variant });
            disk.remove_files(gone);
            disk.works();
            // Remove the parts last: until the whole is entered, they serve requests.
            let old = parts.into_iter().filter(|part| *part != variant);
            let old = old.filter_map(|part| disk.index.number_of(&path.claim.key, part));
            old.for_each(|number| disk.remove_number(&path.claim.key, number));
            Ok(())
        });
    }
}

impl Drop for Fill {
    fn drop(&mut self) {
        // This is queued behind all other writes: after `finish` it finds nothing to remove.
        self.act(|_, path| {
            *lock(&path.writing) = None;
            Ok(())
        });
    }
}
