//! Undo actions on disk, for `sidetrack cleanup`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::{Action, ActionError};

/// A file of undo actions, one a line. It belongs on a file system that does not survive a reboot (/run): what it undoes does
/// not survive one either.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

/// Most bytes of a journal that are read; a real one has a few lines.
const BYTES_MAX: u64 = 1 << 20;

impl Journal {
    /// Opens the journal, keeping what is in it.
    ///
    /// # Errors
    /// If the file can be neither opened nor made.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Notes an action; to be called *before* doing what it takes back.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn note(&mut self, action: &Action) -> io::Result<()> {
        self.file.write_all(format!("{}\n", action.to_line()).as_bytes())
    }

    /// Forgets everything: the orderly end.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn forget(self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The entries of a journal that another process left behind, latest first; a line that cannot be read is an error in its place. No
    /// file: nothing.
    ///
    /// # Errors
    /// If the file is there and cannot be read.
    pub fn left_behind(path: &Path) -> io::Result<Vec<Result<Action, ActionError>>> {
        let mut text = String::new();
        match File::open(path) {
            Ok(file) => io::Read::read_to_string(&mut io::Read::take(file, BYTES_MAX), &mut text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        Ok(text.lines().rev().map(str::parse).collect())
    }
}
