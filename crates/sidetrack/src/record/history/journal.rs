//! The file that lines are added to, as the recorder's writer sees it.

use super::folder::{Content, Folder};
use crate::record::writer::{Output, cut};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Time after which a file is closed with the next lines.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// A file that lines are added to.
pub(super) struct Journal {
    folder: Arc<Folder>,
    content: Content,
    file: File,
    lines: usize,
    is_at_line_end: bool,
    opened: Instant,
    /// Makes columns of closed files.
    compactor: Thread,
}

impl Journal {
    /// Opens it.
    pub(super) fn open(folder: Arc<Folder>, content: Content, compactor: Thread) -> io::Result<Self> {
        let (mut file, bytes) = folder.journal(content)?;
        let lines = count(&mut file, bytes)?;
        Ok(Self { folder, content, file, lines, is_at_line_end: true, opened: Instant::now(), compactor })
    }

    fn turn_if_full(&mut self) -> io::Result<()> {
        let is_full =
            self.lines >= self.folder.lines_max() || self.lines > 0 && self.opened.elapsed() >= TIME_MAX;
        if is_full && self.is_at_line_end {
            self.file = self.folder.turn(self.content)?;
            (self.lines, self.opened) = (0, Instant::now());
            self.folder.make_room();
            self.compactor.unpark();
        }
        Ok(())
    }
}

/// Counts the lines of a file that was written before.
fn count(file: &mut File, bytes: u64) -> io::Result<usize> {
    use std::io::{BufRead, BufReader, Seek, SeekFrom};
    if bytes == 0 {
        return Ok(0);
    }
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut lines = 0;
    loop {
        let piece = reader.fill_buf()?;
        if piece.is_empty() {
            return Ok(lines);
        }
        lines += piece.iter().filter(|byte| **byte == b'\n').count();
        let length = piece.len();
        reader.consume(length);
    }
}

impl Output for Journal {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.turn_if_full()?;
        // At most up to the line that fills the file.
        let room = self.folder.lines_max().saturating_sub(self.lines).max(1);
        let ends = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
        let end = ends.map(|(at, _)| at + 1).nth(room - 1).unwrap_or(bytes.len());
        let written = self.file.write(&bytes[..end])?;
        if let Some(done) = bytes.get(..written).filter(|done| !done.is_empty()) {
            self.lines += done.iter().filter(|byte| **byte == b'\n').count();
            self.is_at_line_end = done.ends_with(b"\n");
        }
        Ok(written)
    }

    fn cut(&mut self, bytes: u64) -> bool {
        let is_cut = cut(&self.file, bytes).is_ok();
        self.is_at_line_end |= is_cut;
        is_cut
    }

    fn refresh(&mut self, _wanted: bool) -> io::Result<()> {
        Ok(())
    }

    fn name(&self) -> String {
        format!("the history in {}", self.folder.path().display())
    }
}
