//! Large content in memory, in pages that the kernel can send without a copy (memfd_create(2), vmsplice(2), sendfile(2)).

use crate::reactor::TcpStream;
use rustix::fs::{MemfdFlags, memfd_create};
use sidetrack_sys::splice::Mapped;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

/// Smallest content that is worth a descriptor, in bytes.
pub const LEAST: u64 = 1 << 20;

/// Most bytes that one call sends, so that other connections do not wait long.
const SEND_MAX: usize = 1 << 20;

/// Most descriptors that are reserved for sheets.
pub const SHEETS_MAX: u64 = 128;

/// The allowed number of sheets, and the current number.
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

    /// Raises the limit to `sheets`; never lowers it.
    fn allow(&self, sheets: u64) {
        self.limit.fetch_max(usize::try_from(sheets).unwrap_or(usize::MAX), Relaxed);
    }
}

/// Raises the limit of sheets; never lowers it. Admission reserves this number of descriptors.
pub fn allow(sheets: u64) {
    ROOM.allow(sheets);
}

/// The pages of a sheet. Written pages never change; bytes are only appended.
#[derive(Debug)]
pub struct Pages {
    file: File,
    /// Made for the first client that is sent all of them.
    mapped: OnceLock<Option<Mapped>>,
    room: &'static Room,
}

impl Pages {
    fn new(room: &'static Room) -> Option<Self> {
        let more = |count: usize| (count < room.limit.load(Relaxed)).then_some(count + 1);
        room.count.fetch_update(Relaxed, Relaxed, more).ok()?;
        match memfd_create("sidetrack-cache", MemfdFlags::CLOEXEC) {
            Ok(fd) => Some(Self { file: fd.into(), mapped: OnceLock::new(), room }),
            Err(_) => {
                room.count.fetch_sub(1, Relaxed);
                None
            }
        }
    }

    /// Maps the current content, if there is address space. Call it for complete content only: later bytes are not mapped.
    pub fn mapped(&self) -> Option<&Mapped> {
        let map = || Mapped::new(&self.file, self.file.metadata().ok()?.len()).ok();
        self.mapped.get_or_init(map).as_ref()
    }

    /// Sends bytes without a mapping, as far as the socket has room; 0: there are no more.
    ///
    /// # Errors
    /// As `sendfile(2)`.
    pub fn poll_send(
        &self,
        cx: &mut Context<'_>,
        socket: &TcpStream,
        range: &Range<u64>,
    ) -> Poll<io::Result<u64>> {
        let count = usize::try_from(range.end - range.start).unwrap_or(usize::MAX).min(SEND_MAX);
        loop {
            ready!(socket.poll_write_ready(cx));
            let sent = socket.writing(|socket| {
                Ok(rustix::fs::sendfile(socket, &self.file, Some(&mut range.start.clone()), count)?)
            });
            match sent {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                result => return Poll::Ready(result.map(|sent| sent as u64)),
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.room.count.fetch_sub(1, Relaxed);
    }
}

/// Large content in pages of memory.
#[derive(Debug)]
pub struct Sheet {
    pages: Arc<Pages>,
    /// The end of each piece.
    ends: Vec<u64>,
    /// A piece did not fit; none follows.
    is_full: bool,
}

impl Sheet {
    /// Returns a sheet for content of this length; `None` if it is small, or the limit of sheets is reached.
    pub fn of(length: u64) -> Option<Self> {
        Self::within(&ROOM, length)
    }

    fn within(room: &'static Room, length: u64) -> Option<Self> {
        let pages = (length >= LEAST).then(|| Pages::new(room))??;
        Some(Self { pages: Arc::new(pages), ends: Vec::new(), is_full: false })
    }

    /// Appends a piece; returns false if there is no room.
    pub fn push(&mut self, piece: &[u8]) -> bool {
        // The bytes of a piece that was written in part have no entry in `ends` and are never read.
        self.is_full |= (&self.pages.file).write_all(piece).is_err();
        if !self.is_full {
            self.ends.push(self.ends.last().unwrap_or(&0) + piece.len() as u64);
        }
        !self.is_full
    }

    /// Returns at most `most` pieces from index `from` on.
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
    use crate::carry::Stream;
    use crate::http::copy::{Outgoing, Progress, STALL};
    use crate::http::duplex::Duplex;
    use crate::live::{Clock, LiveFlow};
    use crate::reactor::block_on;
    use crate::session::allow_pipes;
    use sidetrack_core::flow::FlowId;
    use sidetrack_core::http::framing::Length;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream as Blocking};

    #[test]
    fn pages_leave_through_a_pipe_and_where_there_is_none() {
        static ROOM: Room = Room::none();
        ROOM.allow(1);
        let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 253) as u8).collect();
        let mut sheet = Sheet::within(&ROOM, bytes.len() as u64).expect("one is allowed");
        assert!(sheet.push(&bytes));
        for (pipes, first, end) in
            [(1, 0, 3_000_000), (1, 4_097, 2_999_999), (0, 0, 3_000_000), (0, 4_097, 9_000)]
        {
            allow_pipes(pipes);
            let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
            let mut far = Blocking::connect(listener.local_addr().expect("bound")).expect("loopback");
            let near = listener.accept().expect("loopback").0;
            let reader = std::thread::spawn(move || {
                let mut got = Vec::new();
                far.read_to_end(&mut got).map(|_| got)
            });
            let written = block_on(async {
                near.set_nonblocking(true).expect("a socket");
                let near = Duplex::from(Stream::from(TcpStream::new(near.into()).expect("a loop")));
                let live = LiveFlow::new(FlowId(1));
                let progress = Progress { live: &live, clock: Clock::start(), stall: STALL, end: None };
                let mut out = Outgoing::new(&near, b"head".to_vec(), Length::Exact(end - first));
                out.push_pages(sheet.pages(), first..end, progress).await.expect("a reader");
                out.written
            });
            let got = reader.join().expect("no panic").expect("all of it");
            let range = usize::try_from(first).expect("small")..usize::try_from(end).expect("small");
            assert!(got.strip_prefix(b"head") == Some(&bytes[range]), "{pipes} {first} {end}");
            assert_eq!(written.expect("a loop"), 4 + end - first);
        }
    }

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
