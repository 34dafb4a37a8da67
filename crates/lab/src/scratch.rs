//! A folder that is removed when this process ends, also when it is killed.

use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result};

/// Waits for the end of its input, ignoring signals, and then removes the folder.
const GUARD: &str = "trap '' HUP INT TERM; cat >/dev/null; rm -rf -- \"$1\"";

/// A folder named after this process; on a memory file system by default.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    guard: Child,
    /// Its end is the guard's signal; the kernel closes it when this process is killed.
    stdin: Option<ChildStdin>,
}

impl Scratch {
    /// Makes the folder and starts its guard.
    ///
    /// # Errors
    /// The folder cannot be made, or there is no `sh`.
    pub fn new() -> Result<Self> {
        let memory = PathBuf::from("/dev/shm");
        Self::below(&if memory.is_dir() { memory } else { std::env::temp_dir() })
    }

    /// Makes the folder on a disk.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn on_disk() -> Result<Self> {
        let disk = PathBuf::from("/var/tmp");
        Self::below(&if disk.is_dir() { disk } else { std::env::temp_dir() })
    }

    fn below(parent: &Path) -> Result<Self> {
        let prefix = format!("sidetrack-lab-{}-", std::process::id());
        let path = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent)?.keep();
        let guard = Command::new("sh").args(["-c", GUARD, "guard"]).arg(&path).stdin(Stdio::piped()).spawn();
        let mut guard = guard.context("cannot start sh, which removes the scratch folder")?;
        let stdin = guard.stdin.take();
        Ok(Self { path, guard, stdin })
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.guard.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::Scratch;

    #[test]
    fn the_folder_goes_with_its_owner() {
        let scratch = Scratch::new().expect("sh is everywhere");
        let path = scratch.path().to_owned();
        std::fs::write(path.join("file"), "text").expect("writable");
        drop(scratch);
        assert!(!path.exists());
    }
}
