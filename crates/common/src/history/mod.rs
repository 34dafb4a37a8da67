//! The history of a node's agreements: versions and decisions in one file that is only appended to, chained by hashes.
//!
//! The chain shows that a line was changed, inserted or removed. It cannot show that the last lines were removed, unless the hash of
//! the last line is known from elsewhere: a running node knows it, and `sidetrack policy audit head` prints it.

mod chain;

pub use chain::{Act, Broken, Caller, Cause, Entry, Head, Why, hex, read};

use rustix::fs::{Mode, OFlags};
use sidetrack_sys::sync::lock;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// Largest history, bytes. A longer one has to be moved away before the next change.
pub const HISTORY_MAX_BYTES: u64 = 256 << 20;

/// The SHA-256 of several pieces in a row.
fn digest(pieces: &[&[u8]]) -> [u8; 32] {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    pieces.iter().for_each(|piece| context.update(piece));
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

/// Why a history cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The system's error.
    #[error("the history {0}: {1}")]
    Io(PathBuf, io::Error),
    /// Another process has it open.
    #[error("the history {0} is used by another process: give each node a file of its own")]
    InUse(PathBuf),
    /// A link is broken.
    #[error("the history {0} is broken: {1}; keep it as evidence, and move it away to begin a new one")]
    Broken(PathBuf, Broken),
    /// It has other entries than this process has written.
    #[error(
        "the history {0} ends with entry {1}, and this node has written entry {2}: it was cut or replaced; keep it as evidence, and \
         restart sidetrack with a new one"
    )]
    Replaced(PathBuf, u64, u64),
    /// It is too large.
    #[error("the history {0} has more than 256 MiB: move it away and restart sidetrack to begin a new one")]
    Full(PathBuf),
    /// It has no such version.
    #[error("there is no version {0} in the history: it has 1 to {1}")]
    Unknown(u64, u64),
}

/// A history that is open for new entries.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    open: Mutex<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    head: Head,
    /// The length of the file up to the head, bytes.
    len: u64,
    /// The digest of the latest version, unless it could not be put in force.
    latest: Option<[u8; 32]>,
    /// The digest of the text that this program itself has refused last.
    refused: Option<[u8; 32]>,
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl History {
    /// Opens a history, or creates it, and checks all of it. An incomplete last line is cut off, and an entry says so.
    ///
    /// # Errors
    /// A link is broken, another process uses the file, or the system reports an error.
    pub fn open(path: &Path) -> Result<Self, HistoryError> {
        let failed = |error| HistoryError::Io(path.to_owned(), error);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::from_raw_mode(0o640));
        let mut file = File::from(opened.map_err(|error| failed(error.into()))?);
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(HistoryError::InUse(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let text = whole(&mut file, path)?;
        let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let (text, torn) = text.split_at(end);
        let mut latest = None;
        let head = read(text, |entry, _| {
            if let Act::Version { text, .. } = &entry.act {
                latest = Some(digest(&[text.as_bytes()]));
            } else if let Act::Failed { .. } = &entry.act {
                latest = None;
            }
        });
        let head = head.map_err(|broken| HistoryError::Broken(path.to_owned(), broken))?;
        let history = Self {
            path: path.to_owned(),
            open: Mutex::new(Open { file, head, len: end as u64, latest, refused: None }),
        };
        if !torn.is_empty() {
            lock(&history.open).file.set_len(end as u64).map_err(failed)?;
            history.append(&Caller::default(), Act::Mended { cut_bytes: torn.len() as u64 })?;
        }
        Ok(history)
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The end of the chain, as this process has written it.
    pub fn head(&self) -> Head {
        lock(&self.open).head
    }

    /// Records a text as the next version, unless it is that of the latest version. Returns the number of the version.
    ///
    /// # Errors
    /// The entry cannot be written: then the text must not be put in force.
    pub fn version(
        &self,
        by: &Caller,
        cause: Cause,
        same_as: Option<u64>,
        text: &str,
    ) -> Result<u64, HistoryError> {
        let mut open = lock(&self.open);
        let digest = digest(&[text.as_bytes()]);
        if open.latest == Some(digest) && cause != Cause::Rollback {
            return Ok(open.head.version);
        }
        let version = open.head.version + 1;
        let act = Act::Version { version, cause, same_as, text: text.to_owned() };
        open.append(&self.path, by, act)?;
        open.latest = Some(digest);
        Ok(version)
    }

    /// Records that a text was refused. A file that this program finds unchanged and refuses again is not recorded twice.
    ///
    /// # Errors
    /// The entry cannot be written.
    pub fn refused(&self, by: &Caller, text: &str, error: &str) -> Result<(), HistoryError> {
        let mut open = lock(&self.open);
        let digest = digest(&[text.as_bytes()]);
        if *by == Caller::default() && open.refused.replace(digest) == Some(digest) {
            return Ok(());
        }
        open.append(&self.path, by, Act::Refused { error: error.to_owned(), text_sha256: hex(&digest) })
    }

    /// Records that a version could not be put in force.
    ///
    /// # Errors
    /// The entry cannot be written.
    pub fn failed(&self, by: &Caller, version: u64, error: &str) -> Result<(), HistoryError> {
        let mut open = lock(&self.open);
        // The next text is a version even if it is the same one.
        open.latest = None;
        open.append(&self.path, by, Act::Failed { version, error: error.to_owned() })
    }

    fn append(&self, by: &Caller, act: Act) -> Result<(), HistoryError> {
        lock(&self.open).append(&self.path, by, act)
    }

    /// Checks the whole file, and that it ends where this process has stopped writing. Gives each entry with the end of the chain after
    /// it to `see`.
    ///
    /// # Errors
    /// Names the first broken link.
    pub fn verify(&self, see: impl FnMut(Entry, &Head)) -> Result<Head, HistoryError> {
        // The lock keeps entries out while the file is read. The file is opened anew: another one may have its name by now.
        let open = lock(&self.open);
        let mut file = File::open(&self.path).map_err(|error| HistoryError::Io(self.path.clone(), error))?;
        let text = whole(&mut file, &self.path)?;
        let head = read(&text, see).map_err(|broken| HistoryError::Broken(self.path.clone(), broken))?;
        if head.hash == open.head.hash {
            return Ok(head);
        }
        Err(HistoryError::Replaced(self.path.clone(), head.number, open.head.number))
    }

    /// Returns the text of a version.
    ///
    /// # Errors
    /// There is no such version, or the history is broken.
    pub fn text(&self, version: u64) -> Result<String, HistoryError> {
        let mut found = None;
        let head = self.verify(|entry, _| match entry.act {
            Act::Version { version: number, text, .. } if number == version => found = Some(text),
            _ => {}
        })?;
        found.ok_or(HistoryError::Unknown(version, head.version))
    }
}

impl Open {
    fn append(&mut self, path: &Path, by: &Caller, act: Act) -> Result<(), HistoryError> {
        let failed = |error| HistoryError::Io(path.to_owned(), error);
        let mut entry = Entry { number: 0, at_ms: now_ms(), clock_back_ms: 0, by: by.clone(), act };
        let (line, head) = self
            .head
            .append(&mut entry)
            .map_err(|why| HistoryError::Broken(path.to_owned(), Broken { line: entry.number, why }))?;
        let len = self.len + line.len() as u64;
        if len > HISTORY_MAX_BYTES {
            return Err(HistoryError::Full(path.to_owned()));
        }
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // A part of the line would break the chain.
            let _ = self.file.set_len(self.len);
            return Err(failed(error));
        }
        (self.head, self.len) = (head, len);
        Ok(())
    }
}

/// Reads a file from its beginning.
fn whole(file: &mut File, path: &Path) -> Result<Vec<u8>, HistoryError> {
    let mut text = Vec::new();
    let read =
        file.seek(SeekFrom::Start(0)).and_then(|_| file.take(HISTORY_MAX_BYTES + 1).read_to_end(&mut text));
    match read {
        Ok(_) if text.len() as u64 > HISTORY_MAX_BYTES => Err(HistoryError::Full(path.to_owned())),
        Ok(_) => Ok(text),
        Err(error) => Err(HistoryError::Io(path.to_owned(), error)),
    }
}

#[cfg(test)]
mod tests;
