//! The thread that writes record lines, so that no other thread waits for a slow disk or a slow reader.

use sidetrack_sys::sync::lock;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of lines in the buffer. Further lines are dropped and counted.
pub const BUFFER_MAX: usize = 8 << 20;

/// Bytes that are written in one call, if they come fast enough. Otherwise lines are written after [`GATHER`].
const PIECE: usize = 256 << 10;

/// How long a line may wait for others, to be written with them.
const GATHER: Duration = Duration::from_millis(20);

/// Capacity of the buffer that is not freed.
const KEEP_ROOM: usize = 2 * PIECE;

/// How often to check whether the file was moved away from its name (log rotation).
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time without another failure after which writing works again.
const CALM: Duration = Duration::from_secs(1);

/// Pause before a write that would block is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// The destination of record lines.
#[derive(Clone, Debug)]
pub enum Target {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A file to append to, created with mode 0640. It is opened again after it is moved away, or on
    /// [`RecordWriter::reopen`].
    File(PathBuf),
    /// A pipe to another process of this node, which writes them.
    Pipe(std::sync::Arc<std::os::fd::OwnedFd>),
}

/// Writes lines on its own thread.
#[derive(Debug)]
pub struct RecordWriter {
    shared: Arc<Shared>,
}

/// Says why writing fails at present.
#[derive(Clone, Debug)]
pub struct Trouble(Arc<Shared>);

impl Trouble {
    /// Returns the place and the error. `None`: lines are written.
    pub fn now(&self) -> Option<String> {
        self.0.state().trouble.clone()
    }
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
    /// Why writing fails at present, and where.
    trouble: Option<String>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

impl RecordWriter {
    /// Opens the target and starts the thread.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, or if the thread cannot be started.
    pub fn start(target: Target) -> io::Result<Self> {
        let output: Box<dyn Output> = match target {
            Target::Stdout => Box::new(Stream(io::stdout())),
            Target::Stderr => Box::new(Stream(io::stderr())),
            Target::File(path) => Box::new(LogFile::open(path)?),
            Target::Pipe(pipe) => Box::new(Stream(File::from(pipe.try_clone()?))),
        };
        Self::start_with(output)
    }

    pub(super) fn start_with(output: Box<dyn Output>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = Writing { shared: shared.clone(), output, torn: false, failing: None };
        std::thread::Builder::new().name("records".to_owned()).spawn(move || thread.run())?;
        Ok(Self { shared })
    }

    /// Queues lines; `lines` ends with a line end. Never waits: lines that do not fit are dropped and counted.
    pub fn push(&self, lines: &[u8]) {
        if lines.is_empty() {
            return;
        }
        let mut state = self.shared.state();
        let room = BUFFER_MAX.saturating_sub(state.lines.len()).min(lines.len());
        let fits = lines[..room].iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        state.lines.extend_from_slice(&lines[..fits]);
        state.lost += count_lines(&lines[fits..]);
        // Wake the thread for the first lines, after which it gathers, and again for a whole piece.
        let (before, after) = (state.lines.len() - fits, state.lines.len());
        let wakes = before == 0 || (before < PIECE && after >= PIECE);
        drop(state);
        if wakes {
            self.shared.changed.notify_all();
        }
    }

    /// Opens the file again before the next line (SIGUSR1, log rotation).
    pub fn reopen(&self) {
        self.shared.state().reopen = true;
        self.shared.changed.notify_all();
    }

    /// Opens the file again after each SIGUSR1, as log rotation needs it, until the future is dropped or the
    /// writer has ended.
    ///
    /// # Errors
    /// Fails if the signal cannot be handled.
    pub fn reopen_on_signal(&self) -> io::Result<impl Future<Output = ()> + Send + use<>> {
        // Install the handler here and not at the first poll: without one, the signal would end the process.
        let mut signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::user_defined1())?;
        let shared = self.shared.clone();
        Ok(async move {
            while signals.recv().await.is_some() && !shared.state().done {
                shared.state().reopen = true;
                shared.changed.notify_all();
            }
        })
    }

    /// Returns the number of lines lost since the last call.
    pub fn take_lost(&self) -> u64 {
        std::mem::take(&mut self.shared.state().lost)
    }

    /// Returns what says why writing fails at present, also when this is gone.
    pub fn trouble(&self) -> Trouble {
        Trouble(self.shared.clone())
    }

    /// Waits until all lines are written, at most `patience`. Returns the number of lines lost since
    /// [`RecordWriter::take_lost`], including those still waiting.
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

/// A destination of lines that can be opened again.
pub(super) trait Output: Send {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Removes the last bytes again, which begin a line that has no end. Returns false if that is not possible.
    fn cut(&mut self, _bytes: u64) -> bool {
        false
    }
    /// Makes sure that the next bytes go to the file with the target's name. `wanted`: a reopen was requested,
    /// or a write failed.
    fn refresh(&mut self, wanted: bool) -> io::Result<()>;
    fn name(&self) -> String;
}

struct Stream<W>(W);

impl Output for Stream<io::Stdout> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Flush at once: records are not held back in a buffer.
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

impl Output for Stream<File> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn refresh(&mut self, _wanted: bool) -> io::Result<()> {
        Ok(())
    }

    fn name(&self) -> String {
        "the process that goes on".to_owned()
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
    /// Creating the file failed, and the warning was logged.
    refused: bool,
}

impl LogFile {
    fn open(path: PathBuf) -> io::Result<Self> {
        let file = open(&path).map_err(|error| {
            io::Error::new(error.kind(), format!("records cannot be written to {}: {error}", path.display()))
        })?;
        Ok(Self { path, file, looked: Instant::now(), refused: false })
    }

    /// Whether the name still refers to the open file.
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

    fn cut(&mut self, bytes: u64) -> bool {
        cut(&self.file, bytes).is_ok()
    }

    fn refresh(&mut self, wanted: bool) -> io::Result<()> {
        if !wanted && (self.looked.elapsed() < LOOK_EVERY || self.in_place()) {
            return Ok(());
        }
        self.looked = Instant::now();
        match open(&self.path) {
            Ok(file) => (self.file, self.refused) = (file, false),
            // The file was created while this process was root. The file that was moved away stays writable.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                if !std::mem::replace(&mut self.refused, true) {
                    tracing::warn!(
                        "this user cannot create {} again: records continue in the file that was moved away. Let log rotation \
                         create the file for this user (`create` of logrotate)",
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

/// Removes the last bytes of a regular file.
pub(super) fn cut(file: &File, bytes: u64) -> io::Result<()> {
    let metadata = file.metadata()?;
    let left = metadata.len().checked_sub(bytes).filter(|_| metadata.is_file());
    file.set_len(left.ok_or(ErrorKind::Unsupported)?)
}

/// The state of the thread.
struct Writing {
    shared: Arc<Shared>,
    output: Box<dyn Output>,
    /// The last line has no end yet, because writing failed within it.
    torn: bool,
    /// While writing fails: how many lines were lost so far, and when it failed last.
    failing: Option<(u64, Instant)>,
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

    /// Waits for lines and moves them into `lines`. Returns whether to open the file again, or `None` when
    /// everything is written and the writer is closed.
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
            // End the torn line, so that the next one is complete.
            lines.insert(0, b'\n');
        }
        let mut written = 0;
        let result = self
            .output
            .refresh(reopen || self.failing.is_some())
            .and_then(|()| self.write_all(lines, &mut written));
        if written > 0 {
            let whole = lines[..written].iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
            let begun = (written - whole) as u64;
            self.torn = begun > 0 && !self.output.cut(begun);
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
                // Another process has made the shared descriptor non-blocking: wait for its reader.
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.shared.state().closing => {
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn fails(&mut self, error: &io::Error, lost: u64) {
        let mut state = self.shared.state();
        state.lost += lost;
        state.trouble = Some(format!("{}: {error}", self.output.name()));
        drop(state);
        if self.failing.is_none() {
            tracing::warn!(
                target_name = self.output.name(),
                %error,
                "records cannot be written; flows continue, and lost records are counted. Make room, or allow writing there: then \
                 records are written again"
            );
        }
        self.failing = Some((self.failing.map_or(0, |(before, _)| before) + lost, Instant::now()));
    }

    /// A full disk may take a short line after it has refused a long one: that is not the end of the trouble.
    fn works_again(&mut self) {
        if let Some((lost, _)) = self.failing.take_if(|(_, failed)| failed.elapsed() >= CALM) {
            self.shared.state().trouble = None;
            tracing::info!(target_name = self.output.name(), lost, "records are written again");
        }
    }
}

#[cfg(test)]
#[path = "writer_tests.rs"]
mod tests;
