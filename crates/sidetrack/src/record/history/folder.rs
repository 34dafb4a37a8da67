//! The files of a history: their names, what is made of them, and what must go.
//!
//! ```text
//!   flows.ndjson ──65,536 lines, or an hour──> 00000007.ndjson ──into columns──> 00000007-FROM-TO.parquet ──too old, or
//!   (lines of the                              (closed)                          (whole when it has         too many bytes──> gone
//!    recorder)                                                                   this name)
//! ```
//!
//! A process that dies leaves each step done or not begun: a file gets its name when it is whole, and the file that it is made
//! of is removed after that. The next start removes the rest (`.tmp`), and goes on.

use rustix::fs::{FlockOperation, flock};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The format of the folder that this version reads and writes.
const FORMAT: u32 = 1;
/// Files that may go because of their age, in each [`AGE_EVERY`]: a clock that jumps for a moment must not empty the folder.
const AGED_AT_ONCE: usize = 4;
/// Time between two looks at the age of files.
const AGE_EVERY: Duration = Duration::from_secs(60);
/// Counters take at most this part of the room.
const COUNTERS_PART: u64 = 4;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Ended flows.
    Flows,
    /// Bytes of running flows in each second.
    Counters,
}

impl Content {
    /// The name of the file that lines are added to.
    const fn journal(self) -> &'static str {
        match self {
            Self::Flows => "flows.ndjson",
            Self::Counters => "counters.ndjson",
        }
    }

    const fn infix(self) -> &'static str {
        match self {
            Self::Flows => "",
            Self::Counters => ".counters",
        }
    }
}

/// A file that is not written any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    /// Rises from file to file.
    pub number: u64,
    pub content: Content,
    /// The first and last moment, milliseconds since 1970. `None`: lines, not columns.
    pub span: Option<(i64, i64)>,
}

impl Name {
    fn text(self) -> String {
        let Self { number, content, span } = self;
        match span {
            None => format!("{number:08}{}.ndjson", content.infix()),
            Some((from, to)) => format!("{number:08}-{from}-{to}{}.parquet", content.infix()),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (stem, is_lines) = match text.strip_suffix(".ndjson") {
            Some(stem) => (stem, true),
            None => (text.strip_suffix(".parquet")?, false),
        };
        let (stem, content) = match stem.strip_suffix(Content::Counters.infix()) {
            Some(stem) => (stem, Content::Counters),
            None => (stem, Content::Flows),
        };
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let mut parts = stem.split('-');
        let mut part = || parts.next().filter(|part| is_number(part));
        let number = part()?.parse().ok()?;
        let span = if is_lines { None } else { Some((part()?.parse().ok()?, part()?.parse().ok()?)) };
        (parts.next().is_none() && (8..=20).contains(&stem.split('-').next()?.len())).then_some(Self {
            number,
            content,
            span,
        })
    }
}

/// Whether sidetrack gives files of this name to a history.
pub fn is_file_of_history(name: &str) -> bool {
    let plain = name.strip_suffix(".tmp").unwrap_or(name);
    ["lock", "format", Content::Flows.journal(), Content::Counters.journal()].contains(&plain)
        || Name::parse(plain).is_some()
}

/// How much a history may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    /// Bytes of all files together.
    pub bytes_max: u64,
    /// Age of the latest moment in a file.
    pub keep: Duration,
    /// Lines after which a file is closed.
    pub lines_max: usize,
}

struct State {
    /// By number.
    files: BTreeMap<u64, (Name, u64)>,
    next: u64,
    aged: Option<Instant>,
}

/// A folder of files that this process alone writes.
pub(super) struct Folder {
    path: PathBuf,
    bounds: Bounds,
    state: Mutex<State>,
    /// Held as long as this process writes here.
    held: Mutex<Option<File>>,
}

fn about(path: &Path, error: &io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("the history in {} {what}: {error}", path.display()))
}

impl Folder {
    /// Opens a folder, makes it if it is not there, and mends what a process that died has left.
    ///
    /// # Errors
    /// Another process writes there, a later version has written it, or it cannot be read or written.
    pub(super) fn open(path: &Path, bounds: Bounds) -> io::Result<Self> {
        let cannot = |error: io::Error| about(path, &error, "cannot be opened");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(cannot)?;
        let lock =
            private(OpenOptions::new().write(true).create(true)).open(path.join("lock")).map_err(cannot)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let message =
                format!("another sidetrack writes the history in {}: name another path", path.display());
            io::Error::new(io::ErrorKind::WouldBlock, message)
        })?;
        format_of(path)?;
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(path).map_err(cannot)? {
            let entry = entry.map_err(cannot)?;
            let text = entry.file_name().to_string_lossy().into_owned();
            if text.ends_with(".tmp") && is_file_of_history(&text) {
                fs::remove_file(entry.path()).map_err(cannot)?;
            }
            let Some(name) = Name::parse(&text) else { continue };
            let bytes = entry.metadata().map_err(cannot)?.len();
            match files.get(&name.number) {
                // The lines are in the columns: the process died before it removed them.
                Some((other, _)) if Name::is_same_but_columns(*other, name) => {
                    fs::remove_file(path.join(Name { span: None, ..name }.text())).map_err(cannot)?;
                    if name.span.is_some() {
                        files.insert(name.number, (name, bytes));
                    }
                }
                Some((other, _)) => tracing::warn!(
                    file = text,
                    other = other.text(),
                    "two files of a history have one number: one is ignored"
                ),
                None => drop(files.insert(name.number, (name, bytes))),
            }
        }
        let next = files.keys().next_back().map_or(1, |last| last + 1);
        let state = Mutex::new(State { files, next, aged: None });
        Ok(Self { path: path.to_owned(), bounds, state, held: Mutex::new(Some(lock)) })
    }

    /// Lets another process write here. This one only reads from now on.
    pub(super) fn release(&self) {
        drop(lock(&self.held).take());
    }

    /// Lines after which a file is closed.
    pub(super) const fn lines_max(&self) -> usize {
        self.bounds.lines_max
    }

    /// The place.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file that lines are added to. Returns also its number of bytes.
    pub(super) fn journal(&self, content: Content) -> io::Result<(File, u64)> {
        let path = self.path.join(content.journal());
        let mut file = private(OpenOptions::new().read(true).append(true).create(true)).open(path)?;
        let mut bytes = file.metadata()?.len();
        if bytes > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                // A line that a dying process has torn: end it. A reader leaves it out.
                file.write_all(b"\n")?;
                bytes += 1;
            }
        }
        Ok((file, bytes))
    }

    /// Closes the file that lines are added to, under a name of its own, and opens a new one.
    pub(super) fn turn(&self, content: Content) -> io::Result<File> {
        let mut state = lock(&self.state);
        let name = Name { number: state.next, content, span: None };
        let from = self.path.join(content.journal());
        match fs::metadata(&from) {
            Ok(metadata) => {
                fs::rename(&from, self.path.join(name.text()))?;
                state.next += 1;
                state.files.insert(name.number, (name, metadata.len()));
            }
            // The last turn closed the file, but the disk had no room for a new one.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        drop(state);
        self.journal(content).map(|(file, _)| file)
    }

    /// The oldest file of lines that is closed.
    pub(super) fn to_compact(&self) -> Option<Name> {
        lock(&self.state).files.values().map(|(name, _)| *name).find(|name| name.span.is_none())
    }

    /// Opens a file.
    pub(super) fn read(&self, name: Name) -> io::Result<File> {
        match File::open(self.path.join(name.text())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && name.span.is_none() => {
                // Made into columns since it was listed.
                let now = lock(&self.state).files.get(&name.number).map(|(name, _)| *name);
                now.filter(|now| now.span.is_some())
                    .map_or(Err(error), |now| File::open(self.path.join(now.text())))
            }
            opened => opened,
        }
    }

    /// Puts a file with columns instead of one with lines. `write` fills it; without a span there is nothing to keep.
    pub(super) fn replace(
        &self,
        lines: Name,
        span: Option<(i64, i64)>,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> io::Result<()> {
        let old = self.path.join(lines.text());
        let Some(span) = span else {
            fs::remove_file(old)?;
            lock(&self.state).files.remove(&lines.number);
            return Ok(());
        };
        let name = Name { span: Some(span), ..lines };
        let (whole, part) = (self.path.join(name.text()), self.path.join(name.text() + ".tmp"));
        let written = private(OpenOptions::new().write(true).create(true).truncate(true))
            .open(&part)
            .and_then(|mut file| {
                write(&mut file)?;
                file.sync_all()?;
                file.metadata()
            });
        let bytes = match written {
            Ok(metadata) => metadata.len(),
            Err(error) => {
                // The next try begins anew; until then it takes no room.
                let _ = fs::remove_file(&part);
                return Err(error);
            }
        };
        let mut state = lock(&self.state);
        if !state.files.contains_key(&lines.number) {
            // It had to make room meanwhile.
            return fs::remove_file(&part);
        }
        fs::rename(&part, &whole)?;
        state.files.insert(name.number, (name, bytes));
        fs::remove_file(old)
    }

    /// Returns the files that are not written any more, in rising order of their numbers, and the file that lines are added
    /// to, with the bytes that are there now.
    pub(super) fn list(&self, content: Content) -> (Vec<Name>, Option<(File, u64)>) {
        let state = lock(&self.state);
        let names =
            state.files.values().map(|(name, _)| *name).filter(|name| name.content == content).collect();
        let current = File::open(self.path.join(content.journal()))
            .and_then(|file| file.metadata().map(|metadata| (file, metadata.len())));
        (names, current.ok())
    }

    /// Removes files that are too old, and the oldest while all are too large.
    pub(super) fn make_room(&self) {
        let mut state = lock(&self.state);
        for content in [Content::Counters, Content::Flows] {
            let most = match content {
                Content::Counters => self.bounds.bytes_max / COUNTERS_PART,
                Content::Flows => self.bounds.bytes_max,
            };
            let current = |content: Content| {
                fs::metadata(self.path.join(content.journal())).map_or(0, |metadata| metadata.len())
            };
            loop {
                let counts = |name: &Name| content == Content::Flows || name.content == content;
                let closed: u64 =
                    state.files.values().filter(|(name, _)| counts(name)).map(|(_, bytes)| bytes).sum();
                let open = match content {
                    Content::Flows => current(Content::Flows) + current(Content::Counters),
                    Content::Counters => current(content),
                };
                if closed + open <= most {
                    break;
                }
                let Some(oldest) = state.files.values().map(|(name, _)| *name).find(counts) else { break };
                if !self.remove(&mut state, oldest) {
                    break;
                }
            }
        }
        if state.aged.is_none_or(|aged| aged.elapsed() >= AGE_EVERY) {
            state.aged = Some(Instant::now());
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let first = i64::try_from(now.saturating_sub(self.bounds.keep).as_millis()).unwrap_or(i64::MAX);
            let is_old = |name: &Name| name.span.is_some_and(|(_, to)| to < first);
            let old: Vec<_> =
                state.files.values().map(|(name, _)| *name).filter(is_old).take(AGED_AT_ONCE).collect();
            for name in old {
                self.remove(&mut state, name);
            }
        }
    }

    /// Returns false if the file cannot be removed: then it still counts, and the next look tries again.
    fn remove(&self, state: &mut State, name: Name) -> bool {
        match fs::remove_file(self.path.join(name.text())) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(file = name.text(), %error, "a file of the history cannot be removed");
                return false;
            }
            _ => drop(state.files.remove(&name.number)),
        }
        true
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        let open = [Content::Flows, Content::Counters].map(|content| {
            fs::metadata(self.path.join(content.journal())).map_or(0, |metadata| metadata.len())
        });
        lock(&self.state).files.values().map(|(_, bytes)| bytes).sum::<u64>() + open.iter().sum::<u64>()
    }
}

impl Name {
    fn is_same_but_columns(one: Self, other: Self) -> bool {
        one.content == other.content && one.span.is_some() != other.span.is_some()
    }
}

/// Only the user of this process may read the files.
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    options.mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
}

/// Checks the format, and writes it where there is none yet.
fn format_of(path: &Path) -> io::Result<()> {
    let file = path.join("format");
    match fs::read_to_string(&file) {
        Ok(text) => match text.trim().parse::<u32>() {
            Ok(FORMAT) => Ok(()),
            Ok(later) if later > FORMAT => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the history in {} has format {later}, written by a later sidetrack; this one reads format {FORMAT}: name \
                     another path, or install that version",
                    path.display()
                ),
            )),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "{} is no format of a history: name another path, or move the folder away",
                    file.display()
                ),
            )),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let part = path.join("format.tmp");
            let mut new = private(OpenOptions::new().write(true).create(true).truncate(true)).open(&part)?;
            new.write_all(format!("{FORMAT}\n").as_bytes())?;
            new.sync_all()?;
            fs::rename(part, file)
        }
        Err(error) => Err(about(path, &error, "cannot be read")),
    }
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
