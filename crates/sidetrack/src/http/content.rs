//! The content of a stored response. It is in memory, complete or still arriving, or in a file, from which it is read
//! while it is sent.

use super::disk::OnDisk;
use super::sheet::{Pages, Sheet};
use sidetrack_sys::sync::lock;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Memory used by content on disk, in addition to its checksums, in bytes.
const ON_DISK_BYTES: usize = 256;

/// The content of a stored response.
#[derive(Debug)]
pub struct Content {
    state: Mutex<ContentState>,
    grown: Notify,
    /// Its complete length in bytes.
    pub length: u64,
    on_disk: Option<OnDisk>,
}

#[derive(Debug, Default)]
struct ContentState {
    pieces: Vec<Arc<[u8]>>,
    /// Used instead of pieces if the content is large.
    sheet: Option<Sheet>,
    held: u64,
    end: End,
}

/// How much of a content has arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// More bytes will arrive.
    #[default]
    Coming,
    /// It is complete.
    Whole,
    /// It was cut off: the end is missing.
    Cut,
}

impl ContentState {
    fn push(&mut self, data: &[u8]) {
        match &mut self.sheet {
            Some(sheet) => {
                if !sheet.push(data) {
                    // The stated length was wrong, so the content never becomes complete.
                    return;
                }
            }
            None => self.pieces.push(data.into()),
        }
        self.held += data.len() as u64;
    }

    fn pieces(&self, from: usize, most: usize) -> io::Result<Vec<Arc<[u8]>>> {
        match &self.sheet {
            Some(sheet) => sheet.pieces(from, most),
            None => Ok(self.pieces.iter().skip(from).take(most).cloned().collect()),
        }
    }
}

impl Content {
    /// Content that is still to arrive.
    pub fn coming(length: u64) -> Self {
        let state = ContentState { sheet: Sheet::of(length), ..ContentState::default() };
        Self { state: Mutex::new(state), grown: Notify::new(), length, on_disk: None }
    }

    /// Complete content.
    pub fn whole(bytes: Vec<u8>) -> Self {
        Self::of_pieces(if bytes.is_empty() { Vec::new() } else { vec![bytes.into()] })
    }

    /// Complete content, in pieces that are not empty.
    pub fn of_pieces(pieces: Vec<Arc<[u8]>>) -> Self {
        let held = pieces.iter().map(|piece| piece.len() as u64).sum();
        let sheet = Sheet::of(held).and_then(|mut sheet| {
            let fits = pieces.iter().all(|piece| sheet.push(piece));
            fits.then_some(sheet)
        });
        let pieces = if sheet.is_some() { Vec::new() } else { pieces };
        let state = Mutex::new(ContentState { pieces, sheet, held, end: End::Whole });
        Self { state, grown: Notify::new(), length: held, on_disk: None }
    }

    /// Content in a file.
    pub fn on_disk(file: OnDisk) -> Self {
        let state = ContentState { end: End::Whole, ..ContentState::default() };
        let length = file.length();
        Self { state: Mutex::new(state), grown: Notify::new(), length, on_disk: Some(file) }
    }

    /// Adds a piece.
    pub fn push(&self, data: &[u8]) {
        if !data.is_empty() {
            let mut state = lock(&self.state);
            state.push(data);
            drop(state);
            self.grown.notify_waiters();
        }
    }

    /// Ends the content. It is complete only if its length is right.
    pub fn finish(&self, complete: bool) {
        let mut state = lock(&self.state);
        state.end = if complete && state.held == self.length { End::Whole } else { End::Cut };
        drop(state);
        self.grown.notify_waiters();
    }

    /// How much of it has arrived.
    pub fn end(&self) -> End {
        lock(&self.state).end
    }

    /// Bytes of memory it uses, or will use when it is complete.
    pub fn memory_bytes(&self) -> usize {
        match &self.on_disk {
            Some(file) => ON_DISK_BYTES + file.memory_bytes(),
            None => usize::try_from(self.length).unwrap_or(usize::MAX),
        }
    }

    /// All pieces, if it is complete and in memory.
    pub fn in_memory(&self) -> Option<Vec<Arc<[u8]>>> {
        let state = lock(&self.state);
        (self.on_disk.is_none() && state.end == End::Whole).then(|| state.pieces(0, usize::MAX))?.ok()
    }

    /// The pieces that have arrived so far, if it is in memory.
    pub fn so_far(&self) -> Option<Vec<Arc<[u8]>>> {
        let state = lock(&self.state);
        self.on_disk.is_none().then(|| state.pieces(0, usize::MAX))?.ok()
    }

    /// All pieces, from memory or disk; `None` if they cannot be read.
    pub async fn all(&self) -> Option<Vec<Arc<[u8]>>> {
        let mut all = Vec::new();
        loop {
            let (pieces, end) = self.pieces(all.len(), usize::MAX).await;
            let is_last = pieces.is_empty() || end == End::Whole;
            all.extend(pieces);
            match end {
                End::Cut => return None,
                _ if is_last => break,
                _ => {}
            }
        }
        let held: u64 = all.iter().map(|piece| piece.len() as u64).sum();
        (held == self.length).then_some(all)
    }

    /// All of it in pages, if it is complete and large.
    pub fn pages(&self) -> Option<Arc<Pages>> {
        let state = lock(&self.state);
        state.sheet.as_ref().filter(|_| state.end == End::Whole).map(|sheet| sheet.pages().clone())
    }

    /// Makes it ready to be read. While the caller holds the result, all of it stays readable, even if the file is removed.
    ///
    /// # Errors
    /// Its file is gone, or cannot be read.
    pub async fn open(&self) -> io::Result<Option<Arc<File>>> {
        match &self.on_disk {
            Some(file) => file.open().await.map(Some),
            None => Ok(None),
        }
    }

    /// The index of the piece that contains this byte or comes before it, and the position of that piece's first byte.
    pub fn begin_at(&self, position: u64) -> (usize, u64) {
        self.on_disk.as_ref().map_or((0, 0), |file| file.block_of(position))
    }

    /// Returns pieces from this index on, at most `most`. Waits while there are none and more will arrive. An empty result
    /// with [`End::Cut`] means that no more can be read.
    pub async fn pieces(&self, from: usize, most: usize) -> (Vec<Arc<[u8]>>, End) {
        if let Some(file) = &self.on_disk {
            return file.piece(from).await;
        }
        // The pieces are mostly there: register as a waiter only if they are not.
        if let Some(here) = self.here(from, most) {
            return here;
        }
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            // Register before looking again: growth in between would be missed otherwise.
            grown.as_mut().enable();
            if let Some(here) = self.here(from, most) {
                return here;
            }
            grown.await;
        }
    }

    /// The pieces in memory, if there are any or no more will arrive.
    fn here(&self, from: usize, most: usize) -> Option<(Vec<Arc<[u8]>>, End)> {
        let state = lock(&self.state);
        let Ok(pieces) = state.pieces(from, most) else { return Some((Vec::new(), End::Cut)) };
        (!pieces.is_empty() || state.end != End::Coming).then_some((pieces, state.end))
    }
}
