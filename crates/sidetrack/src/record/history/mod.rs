//! The history: ended flows, and the bytes of running ones in each second, kept on disk for days.
//!
//! The recorder's lines go to a file, as lines of JSON. When it is full, a thread of the lowest priority makes a file of
//! columns of it (Apache Parquet), which takes a tenth of the room and is searched faster: see [`folder`].

mod columns;
mod counters;
mod folder;
mod groups;
mod journal;
mod search;
mod segment;

pub use counters::Moved;
pub use folder::is_file_of_history;
pub use groups::{By, Group, Groups, Key, Sum};
pub use search::Found;

use super::FlowRecord;
use super::writer::{RecordWriter, Trouble};
use crate::live::Ledger;
use counters::Sampler;
use folder::{Bounds, Content, Folder, Name};
use journal::Journal;
use segment::Draft;
use sidetrack_core::filter::Filter;
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Time between two samples of running flows.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Lines after which a file is closed.
const LINES_MAX: usize = 1 << 16;
/// Pause after a file could not be made into columns.
const RETRY: Duration = Duration::from_secs(60);
/// How long writing the last lines may take when the process stops.
const LAST_LINES: Duration = Duration::from_secs(2);

/// First and last moment, milliseconds since 1970.
pub type Span = (i64, i64);

/// Where a history is, and how much it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// A folder.
    pub path: PathBuf,
    /// Bytes of all files together. The oldest file goes first.
    pub bytes_max: u64,
    /// Time after which flows go.
    pub keep: Duration,
    /// Whether bytes of running flows are kept for each second.
    pub counters: bool,
}

/// The time that a question is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first millisecond since 1970.
    pub since_ms: i64,
    /// The last one.
    pub until_ms: i64,
}

impl Window {
    /// All time.
    pub const ALL: Self = Self { since_ms: i64::MIN, until_ms: i64::MAX };

    /// Whether a flow with this span was there within the window.
    pub const fn touches(&self, (from, to): Span) -> bool {
        from <= self.until_ms && self.since_ms <= to
    }

    /// Whether all flows within this span were there within the window.
    const fn contains(&self, (from, to): Span) -> bool {
        self.since_ms <= from && to <= self.until_ms
    }
}

/// Sums that are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Top {
    /// The fields that flows are grouped by.
    pub keys: Vec<Key>,
    /// The order.
    pub by: By,
}

/// A question.
#[derive(Clone, Debug)]
pub struct Query {
    /// When flows were there.
    pub window: Window,
    /// Which flows.
    pub filter: Filter,
    /// Most flows, or groups, of the answer.
    pub limit: usize,
    /// Sums instead of a list.
    pub top: Option<Top>,
}

/// The moments of capture and end of a record.
fn span(record: &FlowRecord<'_>) -> Span {
    let from = millis(record.ts.system_time());
    (from, from.saturating_add((record.duration_seconds * 1e3) as i64))
}

/// Milliseconds since 1970.
pub fn millis(time: SystemTime) -> i64 {
    i64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(i64::MAX)
}

/// The history of this node.
pub struct History {
    folder: Arc<Folder>,
    flows: RecordWriter,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl History {
    /// Opens a history, and starts its threads.
    ///
    /// # Errors
    /// The folder cannot be used, with the reason.
    pub fn open(settings: &Settings, ledgers: Vec<Arc<Ledger>>) -> io::Result<Self> {
        Self::with_files_of(LINES_MAX, settings, ledgers)
    }

    fn with_files_of(lines_max: usize, settings: &Settings, ledgers: Vec<Arc<Ledger>>) -> io::Result<Self> {
        let bounds = Bounds { bytes_max: settings.bytes_max, keep: settings.keep, lines_max };
        let folder = Arc::new(Folder::open(&settings.path, bounds)?);
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let (told, place) = (stop.clone(), folder.clone());
        let thread = std::thread::Builder::new().name("history".to_owned()).spawn(move || {
            // If this is not permitted, the thread runs with normal priority.
            let _ = sidetrack_sys::scheduling::become_idle();
            let counters: Option<RecordWriter> = receiver.recv().ok().flatten();
            keep(&place, &ledgers, counters, &told);
        })?;
        let open = |content| {
            let journal = Journal::open(folder.clone(), content, thread.thread().clone())?;
            RecordWriter::start_with(Box::new(journal))
        };
        let flows = open(Content::Flows)?;
        let counters = settings.counters.then(|| open(Content::Counters)).transpose()?;
        // The thread waits for this; it cannot have ended.
        let _ = sender.send(counters);
        Ok(Self { folder, flows, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Adds lines of ended flows. Never waits: lines that do not fit into the buffer are dropped and counted.
    pub fn push(&self, lines: &[u8]) {
        self.flows.push(lines);
    }

    /// Returns the number of flows lost since the last call.
    pub fn take_lost(&self) -> u64 {
        self.flows.take_lost()
    }

    /// Returns what says why flows cannot be written at present.
    pub fn trouble(&self) -> Trouble {
        self.flows.trouble()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.folder.bytes()
    }

    /// Searches the stored flows. Takes up to some seconds on all cores.
    pub fn search(&self, query: &Query) -> Found {
        search::search(&self.folder, query)
    }

    /// Returns what running flows moved within a window, in rising order of time: one flow, or all together.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn moved(&self, flow: Option<u64>, window: Window) -> io::Result<Vec<Moved>> {
        moved(&self.folder, flow, window)
    }

    /// Ends the threads, after the last lines are written. Returns the number of flows lost since [`History::take_lost`].
    pub fn close(&self) -> u64 {
        let lost = self.flows.close(LAST_LINES);
        self.stop.store(true, Relaxed);
        if let Some(thread) = lock(&self.thread).take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the thread of the history ended by a panic");
            }
        }
        self.folder.release();
        lost
    }
}

/// The thread: samples, makes columns and room until it is stopped.
fn keep(folder: &Folder, ledgers: &[Arc<Ledger>], counters: Option<RecordWriter>, stop: &AtomicBool) {
    let (mut sampler, mut lines) = (Sampler::default(), Vec::new());
    let (mut sampled, mut failed) = (Instant::now(), None::<Instant>);
    while !stop.load(Relaxed) {
        std::thread::park_timeout(SAMPLE_EVERY.saturating_sub(sampled.elapsed()));
        if sampled.elapsed() >= SAMPLE_EVERY {
            sampled = Instant::now();
            if let Some(counters) = &counters {
                lines.clear();
                sampler.sample(ledgers, millis(SystemTime::now()), &mut lines);
                counters.push(&lines);
            }
            folder.make_room();
        }
        let may_try = failed.is_none_or(|failed| failed.elapsed() >= RETRY);
        if may_try && let Some(name) = folder.to_compact() {
            failed = match compact(folder, name) {
                Ok(()) => None,
                Err(error) => {
                    if failed.is_none() {
                        let path = folder.path().display();
                        tracing::warn!(
                            "the history in {path} keeps its lines, which take more room: {error}"
                        );
                    }
                    Some(Instant::now())
                }
            };
            folder.make_room();
        }
    }
    if let Some(counters) = counters {
        counters.close(LAST_LINES);
    }
}

/// Makes a file of columns of one with lines.
fn compact(folder: &Folder, name: Name) -> io::Result<()> {
    let lines = BufReader::new(folder.read(name)?);
    let torn = |count: u64| {
        if count > 0 {
            tracing::warn!(file = name.number, count, "lines of the history were torn, and are left out");
        }
    };
    match name.content {
        Content::Flows => {
            let mut draft = Draft::new();
            torn(each_line(lines, |line| {
                serde_json::from_slice::<FlowRecord<'_>>(line).map(|record| draft.add(&record)).is_ok()
            })?);
            folder.replace(name, draft.span(), |file| draft.write(file).map_err(io::Error::other))
        }
        Content::Counters => {
            let mut samples = Vec::new();
            torn(each_line(lines, |line| Moved::read(line).map(|one| samples.push(one)).is_some())?);
            let times = || samples.iter().map(|one| one.at_ms);
            let span = times().min().zip(times().max());
            folder.replace(name, span, |file| counters::write(&samples, file).map_err(io::Error::other))
        }
    }
}

/// Passes each line. Returns how many were not accepted.
fn each_line(mut lines: impl BufRead, mut accepts: impl FnMut(&[u8]) -> bool) -> io::Result<u64> {
    let (mut line, mut refused) = (Vec::new(), 0);
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line)? == 0 {
            return Ok(refused);
        }
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        refused += u64::from(!text.is_empty() && !accepts(text));
    }
}

fn moved(folder: &Folder, flow: Option<u64>, window: Window) -> io::Result<Vec<Moved>> {
    let mut sums: BTreeMap<i64, Moved> = BTreeMap::new();
    let mut add = |one: Moved| {
        if !window.touches((one.at_ms, one.at_ms)) || flow.is_some_and(|flow| flow != one.flow) {
            return;
        }
        let none = Moved { at_ms: one.at_ms, flow: flow.unwrap_or(0), up: 0, down: 0 };
        let sum = sums.entry(one.at_ms).or_insert(none);
        sum.up = sum.up.saturating_add(one.up);
        sum.down = sum.down.saturating_add(one.down);
    };
    let (names, current) = folder.list(Content::Counters);
    for name in names.into_iter().filter(|name| name.span.is_none_or(|span| window.touches(span))) {
        let mut file = match folder.read(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        if search::is_columns(&mut file)? {
            counters::read(file).map_err(io::Error::other)?.into_iter().for_each(&mut add);
        } else {
            each_line(BufReader::new(file), |line| Moved::read(line).map(&mut add).is_some())?;
        }
    }
    if let Some((file, bytes)) = current {
        each_line(BufReader::new(file.take(bytes)), |line| Moved::read(line).map(&mut add).is_some())?;
    }
    Ok(sums.into_values().collect())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
