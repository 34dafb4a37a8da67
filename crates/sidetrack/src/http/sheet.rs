//! Large content in memory, in pages that the kernel can send as they are (memfd_create(2), sendfile(2)): nothing is copied for who
//! reads it over a socket.

use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Least length of content that is worth a descriptor, bytes.
pub const LEAST: u64 = 1 << 20;

/// Most descriptors that are set aside for sheets.
pub const SHEETS_MAX: u64 = 128;

/// How many sheets there may be, and how many there are.
#[derive(Debug)]
struct Room {
    limit: AtomicUsize,
    count: AtomicUsize,
}

static ROOM: Room = Room::none();

impl Room {
    const fn none() -> Self {
        Self { limit: AtomicUsize::new(0), count: AtomicUsize::new(0) }
    }

    /// Lets there be so many, or as many as were allowed before.
    fn allow(&self, sheets: u64) {
        self.limit.fetch_max(usize::try_from(sheets).unwrap_or(usize::MAX), Relaxed);
    }
}

/// Lets there be so many sheets, or as many as were allowed before: descriptors that admission sets aside.
pub fn allow(sheets: u64) {
    ROOM.allow(sheets);
}

/// The pages of a sheet. They stay as they are for whoever holds them; bytes are only ever added behind those that are there.
#[derive(Debug)]
pub struct Pages {
    file: File,
    room: &'static Room,
}

impl Pages {
    fn new(room: &'static Room) -> Option<Self> {
        let more = |count: usize| (count < room.limit.load(Relaxed)).then_some(count + 1);
        room.count.fetch_update(Relaxed, Relaxed, more).ok()?;
        match memfd_create("sidetrack-cache", MemfdFlags::CLOEXEC) {
            Ok(fd) => Some(Self { file: fd.into(), room }),
            Err(_) => {
                room.count.fetch_sub(1, Relaxed);
                None
            }
        }
    }

    /// As a file.
    pub const fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.room.count.fetch_sub(1, Relaxed);
    }
}

/// See the module.
#[derive(Debug)]
pub struct Sheet {
    pages: Arc<Pages>,
    /// Where each piece ends.
    ends: Vec<u64>,
    /// There was no room for a piece; none follows.
    is_full: bool,
}

impl Sheet {
    /// A sheet for content of this length; none if it is small, or there are enough of them.
    pub fn of(length: u64) -> Option<Self> {
        Self::within(&ROOM, length)
    }

    fn within(room: &'static Room, length: u64) -> Option<Self> {
        let pages = (length >= LEAST).then(|| Pages::new(room))??;
        Some(Self { pages: Arc::new(pages), ends: Vec::new(), is_full: false })
    }

    /// Adds a piece; false: there is no room for it.
    pub fn push(&mut self, piece: &[u8]) -> bool {
        // What is left of a piece that did not fit is never told of.
        self.is_full |= (&self.pages.file).write_all(piece).is_err();
        if !self.is_full {
            self.ends.push(self.ends.last().unwrap_or(&0) + piece.len() as u64);
        }
        !self.is_full
    }

    /// Pieces from the one of this number on, at most `most`.
    ///
    /// # Errors
    /// As `pread(2)`.
    pub fn pieces(&self, from: usize, most: usize) -> io::Result<Vec<Arc<[u8]>>> {
        let mut start = from.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        let read = |end: &u64| {
            let mut piece = vec![0; usize::try_from(end - start).unwrap_or(usize::MAX)];
            self.pages.file.read_exact_at(&mut piece, start)?;
            start = *end;
            Ok(piece.into())
        };
        self.ends.iter().skip(from).take(most).map(read).collect()
    }

    /// Its pages.
    pub fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_as_they_went_in_and_sheets_are_counted() {
        static ROOM: Room = Room::none();
        let of = |length| Sheet::within(&ROOM, length);
        assert!(of(LEAST).is_none(), "none is allowed");
        ROOM.allow(2);
        assert!(of(LEAST - 1).is_none(), "too small");
        let mut sheet = of(LEAST).expect("one is allowed");
        let pieces: Vec<Vec<u8>> = (0..20_u8).map(|n| vec![n; 1 + 997 * usize::from(n)]).collect();
        assert!(pieces.iter().all(|piece| sheet.push(piece)));
        for (from, most) in [(0, 20), (0, 3), (7, 5), (19, 16), (20, 1)] {
            let read = sheet.pieces(from, most).expect("memory");
            let wanted = pieces.iter().skip(from).take(most);
            assert!(read.iter().map(|piece| piece.to_vec()).eq(wanted.cloned()), "{from} {most}");
        }
        let other = of(LEAST).expect("two are allowed");
        assert!(of(LEAST).is_none(), "three are not");
        let pages = other.pages().clone();
        drop(other);
        assert!(of(LEAST).is_none(), "somebody still reads it");
        drop(pages);
        assert!(of(LEAST).is_some());
    }
}
