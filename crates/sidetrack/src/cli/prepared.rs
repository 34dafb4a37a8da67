//! A new text for a configuration file that a person wrote: owner and mode stay. The text is checked before it replaces the old one,
//! which happens in one step.

use crate::config::Config;
use anyhow::Context as _;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

/// The ending of a file that is not in its place yet.
const NEW: &str = ".sidetrack-new";

/// A checked text that is on the disk beside its file. On drop, it is removed.
#[derive(Debug)]
pub(super) struct Prepared {
    /// The file, with links followed.
    path: PathBuf,
    beside: PathBuf,
    before: Option<String>,
    is_committed: bool,
}

impl Prepared {
    /// Writes a text beside the file and checks it there. `before` is the text that it was made from; `None`: there is no file.
    ///
    /// # Errors
    /// The file cannot be written, or the text has mistakes. Nothing is left then.
    pub(super) fn new(path: &Path, before: Option<String>, text: &str) -> anyhow::Result<Self> {
        // Relative paths in the text start from the folder of the name that the user gave, also if that is a link.
        if let Err(error) = Config::from_text(&path.display().to_string(), text) {
            let shown = error.render(false);
            anyhow::bail!(
                "with this change {} would be wrong, so it was not changed:\n{}",
                path.display(),
                shown.trim_end()
            );
        }
        Self::of_checked(path, before, text)
    }

    /// As [`Prepared::new`], for a text that was checked elsewhere.
    ///
    /// # Errors
    /// The file cannot be written. Nothing is left then.
    pub(super) fn of_checked(path: &Path, before: Option<String>, text: &str) -> anyhow::Result<Self> {
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let name = path.file_name().with_context(|| format!("{} is not a file", path.display()))?;
        let mut beside = name.to_owned();
        beside.push(NEW);
        let beside = path.with_file_name(beside);
        let cannot = || format!("cannot write {}", beside.display());
        match fs::remove_file(&beside) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).with_context(cannot),
            _ => {}
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside);
        let mut file = file.with_context(cannot)?;
        let prepared = Self { path, beside: beside.clone(), before, is_committed: false };
        file.write_all(text.as_bytes()).with_context(cannot)?;
        prepared.like_before(&file)?;
        file.sync_all().with_context(cannot)?;
        Ok(prepared)
    }

    /// Gives the new file the owner and mode of the old one. A new file has the usual mode.
    fn like_before(&self, file: &File) -> anyhow::Result<()> {
        let (mode, owner) = match fs::metadata(&self.path) {
            Ok(old) => (old.mode() & 0o7777, Some((old.uid(), old.gid()))),
            Err(_) => (0o644, None),
        };
        let ours = file.metadata()?;
        if let Some((uid, gid)) = owner.filter(|owner| *owner != (ours.uid(), ours.gid())) {
            fchown(file, Some(uid), Some(gid)).with_context(|| {
                format!("cannot give the new text to the owner of {}", self.path.display())
            })?;
        }
        Ok(file.set_permissions(fs::Permissions::from_mode(mode))?)
    }

    /// Puts the text in its place.
    ///
    /// # Errors
    /// The file has changed since its text was read, or cannot be replaced.
    pub(super) fn commit(mut self) -> anyhow::Result<()> {
        anyhow::ensure!(
            read(&self.path)? == self.before,
            "{} was changed by another program meanwhile: try again",
            self.path.display()
        );
        let cannot = || format!("cannot replace {}", self.path.display());
        fs::rename(&self.beside, &self.path).with_context(cannot)?;
        self.is_committed = true;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // The name must survive a power cut, too.
        File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()).with_context(cannot)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = fs::remove_file(&self.beside);
        }
    }
}

/// Reads a configuration. `None`: there is no file.
pub(super) fn read(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_in_one_step_and_keeps_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sidetrack.toml");
        let old = "version = 1\ndefault = \"deny\" # mine\n".to_owned();
        fs::write(&path, &old).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
        let entries = || fs::read_dir(folder.path()).expect("listed").count();

        let wrong =
            Prepared::new(&path, Some(old.clone()), "version = 1\nwrong = 2\n").expect_err("a mistake");
        assert!(wrong.to_string().contains("was not changed"), "{wrong}");
        assert_eq!((entries(), fs::read_to_string(&path).expect("read")), (1, old.clone()));

        let new = format!("{old}# more\n");
        drop(Prepared::new(&path, Some(old.clone()), &new).expect("prepared"));
        assert_eq!((entries(), fs::read_to_string(&path).expect("read")), (1, old.clone()), "not committed");

        let prepared = Prepared::new(&path, Some("another text".to_owned()), &new).expect("prepared");
        assert!(prepared.commit().expect_err("changed").to_string().contains("meanwhile"));
        assert_eq!(entries(), 1);

        Prepared::new(&path, Some(old), &new).expect("prepared").commit().expect("replaced");
        assert_eq!((entries(), fs::read_to_string(&path).expect("read")), (1, new));
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o7777, 0o640);
    }
}
