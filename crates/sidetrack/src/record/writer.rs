//! The thread that writes record lines, so that a slow disk or a reader that sleeps holds up nobody.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of lines that wait to be written; what comes while so many wait is dropped and counted.
pub const BUFFER_MAX: usize = 8 << 20;

/// Bytes that are written in one piece, if they come fast enough; what comes slower is written after [`GATHER`].
const PIECE: usize = 256 << 10;

/// How long lines wait for others that are written with them.
const GATHER: Duration = Duration::from_millis(20);

/// Room that is kept for the next lines.
const KEEP_ROOM: usize = 2 * PIECE;

/// How often a file is looked for under its name, to see whether somebody moved it away (log rotation).
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long to wait before a descriptor that would block is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// Where record lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A file, appended to, made with mode 0640. Opened anew when it is moved away or [`RecordWriter::reopen`] says so.
    File(PathBuf),
}

/// Writes lines on a thread of its own.
#[derive(Debug)]
pub struct RecordWriter {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<u8>,
    lost: u64,
    reopen: bool,
    closing: bool,
    done: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

impl RecordWriter {
    /// Opens the target and starts the thread.
    ///
    /// # Errors
    /// When the file cannot be opened, or the thread cannot be started.
    pub fn start(target: Target) -> io::Result<Self> {
        let output: Box<dyn Output> = match target {
            Target::Stdout => Box::new(Stream(io::stdout())),
            Target::Stderr => Box::new(Stream(io::stderr())),
            Target::File(path) => Box::new(LogFile::open(path)?),
        };
        Self::start_with(output)
    }

    fn start_with(output: Box<dyn Output>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = Writing { shared: shared.clone(), output, torn: false, failing: None };
        std::thread::Builder::new().name("records".to_owned()).spawn(move || thread.run())?;
        Ok(Self { shared })
    }

    /// Takes lines to be written; `lines` ends with a line end. Never waits: what has no room is dropped and counted.
    pub fn push(&self, lines: &[u8]) {
        if lines.is_empty() {
            return;
        }
        let mut state = self.shared.state();
        let room = BUFFER_MAX.saturating_sub(state.lines.len()).min(lines.len());
        let fits = lines[..room].iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        state.lines.extend_from_slice(&lines[..fits]);
        state.lost += count_lines(&lines[fits..]);
        // The first lines wake the thread, which then gathers, and a whole piece does; none in between.
        let (before, after) = (state.lines.len() - fits, state.lines.len());
        let wakes = before == 0 || (before < PIECE && after >= PIECE);
        drop(state);
        if wakes {
            self.shared.changed.notify_all();
        }
    }

    /// Opens the file anew before the next line (SIGUSR1, log rotation).
    pub fn reopen(&self) {
        self.shared.state().reopen = true;
        self.shared.changed.notify_all();
    }

    /// Opens the file anew at every SIGUSR1, as log rotation asks for, until the future is dropped or the writer has ended.
    ///
    /// # Errors
    /// When the signal cannot be caught.
    pub fn reopen_on_signal(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        // Caught from here on, not from the first poll: until then the signal would end the process.
        let mut signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::user_defined1())?;
        let shared = self.shared.clone();
        Ok(async move {
            while signals.recv().await.is_some() && !shared.state().done {
                shared.state().reopen = true;
                shared.changed.notify_all();
            }
        })
    }

    /// Lines lost since the last call.
    pub fn take_lost(&self) -> u64 {
        std::mem::take(&mut self.shared.state().lost)
    }

    /// Waits until all lines are written, at most for `patience`; gives the number of lines lost since
    /// [`RecordWriter::take_lost`], with those that were still waiting.
    pub fn close(&self, patience: Duration) -> u64 {
        let mut state = self.shared.state();
        state.closing = true;
        self.shared.changed.notify_all();
        let waited = self.shared.changed.wait_timeout_while(state, patience, |state| !state.done);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let left = count_lines(&std::mem::take(&mut state.lines));
        std::mem::take(&mut state.lost) + left
    }
}

impl Drop for RecordWriter {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.shared.changed.notify_all();
    }
}

/// Something that lines are written to and that can be opened anew.
trait Output: Send {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Makes sure that the next bytes go where the target's name points. `wanted`: somebody asked, or writing failed.
    fn refresh(&mut self, wanted: bool) -> io::Result<()>;
    fn name(&self) -> String;
}

struct Stream<W>(W);

impl Output for Stream<io::Stdout> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Straight through: a record is not held back in a buffer of ours.
        let written = self.0.write(bytes)?;
        self.0.flush().map(|()| written)
    }

    fn refresh(&mut self, _wanted: bool) -> io::Result<()> {
        Ok(())
    }

    fn name(&self) -> String {
        "standard output".to_owned()
    }
}

impl Output for Stream<io::Stderr> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn refresh(&mut self, _wanted: bool) -> io::Result<()> {
        Ok(())
    }

    fn name(&self) -> String {
        "standard error".to_owned()
    }
}

struct LogFile {
    path: PathBuf,
    file: File,
    looked: Instant,
    /// The file could not be made anew, which was said.
    refused: bool,
}

impl LogFile {
    fn open(path: PathBuf) -> io::Result<Self> {
        let file = open(&path).map_err(|error| {
            io::Error::new(error.kind(), format!("records cannot be written to {}: {error}", path.display()))
        })?;
        Ok(Self { path, file, looked: Instant::now(), refused: false })
    }

    /// Whether the name still leads to the file we hold.
    fn in_place(&self) -> bool {
        match (self.file.metadata(), std::fs::metadata(&self.path)) {
            (Ok(held), Ok(named)) => held.dev() == named.dev() && held.ino() == named.ino(),
            _ => false,
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

impl Output for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn refresh(&mut self, wanted: bool) -> io::Result<()> {
        if !wanted && (self.looked.elapsed() < LOOK_EVERY || self.in_place()) {
            return Ok(());
        }
        self.looked = Instant::now();
        match open(&self.path) {
            Ok(file) => (self.file, self.refused) = (file, false),
            // The file was made while this process was root. What was moved away can still be written to.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                if !std::mem::replace(&mut self.refused, true) {
                    tracing::warn!(
                        "this user may not make {} anew: records go on into the file that was moved away. Have log rotation \
                         make the file for this user (`create` of logrotate)",
                        self.path.display()
                    );
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// The thread's side.
struct Writing {
    shared: Arc<Shared>,
    output: Box<dyn Output>,
    /// The last line written has no end yet, because writing failed in its middle.
    torn: bool,
    /// Since writing fails: how many lines that cost.
    failing: Option<u64>,
}

impl Writing {
    fn run(mut self) {
        let mut lines = Vec::new();
        while let Some(reopen) = self.next(&mut lines) {
            self.write_lines(&mut lines, reopen);
            lines.clear();
            lines.shrink_to(KEEP_ROOM);
        }
        self.shared.state().done = true;
        self.shared.changed.notify_all();
    }

    /// Waits for lines and puts them into `lines`; none when all are written and the writer is closed. Gives whether the
    /// file is to be opened anew.
    fn next(&self, lines: &mut Vec<u8>) -> Option<bool> {
        let idle = |state: &mut State| state.lines.is_empty() && !state.reopen && !state.closing;
        let waited = self.shared.changed.wait_while(self.shared.state(), idle);
        let state = waited.unwrap_or_else(PoisonError::into_inner);
        let few = |state: &mut State| state.lines.len() < PIECE && !state.reopen && !state.closing;
        let gathered = self.shared.changed.wait_timeout_while(state, GATHER, few);
        let (mut state, _) = gathered.unwrap_or_else(PoisonError::into_inner);
        if state.lines.is_empty() && !state.reopen {
            return None;
        }
        std::mem::swap(lines, &mut state.lines);
        Some(std::mem::take(&mut state.reopen))
    }

    fn write_lines(&mut self, lines: &mut Vec<u8>, reopen: bool) {
        if self.torn {
            // Ends the torn line, so that the next one is whole.
            lines.insert(0, b'\n');
        }
        let mut written = 0;
        let result = self
            .output
            .refresh(reopen || self.failing.is_some())
            .and_then(|()| self.write_all(lines, &mut written));
        if written > 0 {
            self.torn = lines[written - 1] != b'\n';
        }
        let lost = count_lines(&lines[written..]);
        match result {
            Ok(()) => self.works_again(),
            Err(error) => self.fails(&error, lost),
        }
    }

    fn write_all(&mut self, lines: &[u8], written: &mut usize) -> io::Result<()> {
        while *written < lines.len() {
            match self.output.write(&lines[*written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => *written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Somebody made the descriptor we share with them non-blocking: wait for its reader.
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.shared.state().closing => {
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn fails(&mut self, error: &io::Error, lost: u64) {
        self.shared.state().lost += lost;
        if self.failing.is_none() {
            tracing::warn!(
                target_name = self.output.name(),
                %error,
                "records cannot be written; flows go on, lost records are counted"
            );
        }
        self.failing = Some(self.failing.unwrap_or(0) + lost);
    }

    fn works_again(&mut self) {
        if let Some(lost) = self.failing.take() {
            tracing::info!(target_name = self.output.name(), lost, "records are written again");
        }
    }
}

#[cfg(test)]
#[path = "writer_tests.rs"]
mod tests;
