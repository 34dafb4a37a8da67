//! Gives the files that root created and the data plane writes to the data plane's user, before root is given up.
//!
//! Only files of root are given away, and only under names that sidetrack uses. If a folder was configured by mistake,
//! its other files stay as they are.

use crate::config::{Config, HttpListener, RecordTo};
use crate::record::history::is_file_of_history;
use crate::rights::DataUser;
use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::{Path, PathBuf};

/// The files, each with the mode for creating it.
pub(super) fn files(config: &Config) -> Vec<(PathBuf, u32)> {
    let mut files = Vec::new();
    if let RecordTo::File(path) = &config.record.to {
        files.push((path.clone(), 0o640));
    }
    if let Some(history) = config.agreement.as_ref().and_then(|file| file.history.as_ref()) {
        files.push((history.clone(), 0o640));
    }
    let taps = proxies(config).any(|http| http.tap.is_some());
    if let Some(tap) = config.tap.as_ref().filter(|_| taps) {
        files.extend([&tap.keylog, &tap.har].into_iter().flatten().map(|path| (path.clone(), 0o600)));
    }
    files
}

/// The folders that the data plane writes.
pub(super) fn folders(config: &Config) -> Vec<PathBuf> {
    caches(config).chain(config.history.iter().map(|history| history.path.clone())).collect()
}

fn caches(config: &Config) -> impl Iterator<Item = PathBuf> {
    let disks = proxies(config).filter_map(|http| http.cache.as_ref()?.disk.as_ref());
    disks.map(|disk| disk.folder.clone())
}

fn proxies(config: &Config) -> impl Iterator<Item = &HttpListener> {
    config.listeners.iter().filter_map(|listener| listener.kind.http())
}

/// Creates missing files and folders, and gives all of them to the user.
///
/// # Errors
/// What could not be created or given away.
pub(super) fn hand_over(config: &Config, user: &DataUser) -> anyhow::Result<()> {
    let cannot = |path: &Path| format!("cannot give {} to user '{}'", path.display(), user.name);
    if let Some(agreement) = &config.agreement {
        // The data plane writes it for `sidetrack policy apply`.
        file(&agreement.path, 0o644, user).with_context(|| cannot(&agreement.path))?;
    }
    for (path, mode) in files(config) {
        file(&path, mode, user).with_context(|| cannot(&path))?;
    }
    for folder in caches(config) {
        cache(&folder, user).with_context(|| cannot(&folder))?;
    }
    if let Some(settings) = &config.history {
        history(&settings.path, user).with_context(|| cannot(&settings.path))?;
    }
    Ok(())
}

/// Creates missing files and folders, so that Landlock can allow them. A failure is reported later, where the file is
/// used.
pub(super) fn make(config: &Config) {
    for (path, mode) in files(config) {
        let _ = open(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode);
    }
    for folder in folders(config) {
        let _ = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
    }
}

/// Gives an open file to the user, if it belongs to root and has no other name.
fn give(file: &File, user: &DataUser) -> io::Result<()> {
    let metadata = file.metadata()?;
    // A hard link could point to any file of root, and the data plane's user could then write that file.
    let is_plain = metadata.is_dir() || (metadata.is_file() && metadata.nlink() == 1);
    if metadata.uid() == 0 && is_plain {
        fchown(file, Some(user.uid), Some(user.gid))?;
    }
    Ok(())
}

fn open(path: &Path, flags: OFlags, mode: u32) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::open(path, flags, Mode::from_raw_mode(mode))?.into())
}

/// Gives one file away. Anything but a regular file (a link, a pipe, /dev/null) stays as it is.
fn file(path: &Path, mode: u32, user: &DataUser) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_file() => Ok(()),
        Ok(_) => give(&open(path, OFlags::RDONLY, 0)?, user),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            give(&open(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode)?, user)
        }
        Err(error) => Err(error),
    }
}

/// Gives a cache's folder away, with its subfolders and files.
fn cache(folder: &Path, user: &DataUser) -> io::Result<()> {
    let is_new = !folder.try_exists()?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if folder.metadata()?.uid() == user.uid {
        return Ok(());
    }
    let is_ours = is_new || folder.join("new").is_dir() || fs::read_dir(folder)?.next().is_none();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let kind = entry.file_type()?;
        if kind.is_file() && name == "lock" {
            give(&open(&entry.path(), OFlags::RDONLY, 0)?, user)?;
        } else if kind.is_dir() && (name == "new" || is_number(name, 2)) {
            give_folder(&entry.path(), user)?;
        }
    }
    // Last: if this is interrupted, the next start repeats it.
    if is_ours {
        give(&open(folder, OFlags::RDONLY | OFlags::DIRECTORY, 0)?, user)?;
    }
    Ok(())
}

/// Gives a history's folder away, with its files.
fn history(folder: &Path, user: &DataUser) -> io::Result<()> {
    let is_new = !folder.try_exists()?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if folder.metadata()?.uid() == user.uid {
        return Ok(());
    }
    let is_ours = is_new || folder.join("format").is_file() || fs::read_dir(folder)?.next().is_none();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let ours = entry.file_name().to_str().is_some_and(is_file_of_history);
        if ours && entry.file_type()?.is_file() {
            give(&open(&entry.path(), OFlags::RDONLY, 0)?, user)?;
        }
    }
    // Last: if this is interrupted, the next start repeats it.
    if is_ours {
        give(&open(folder, OFlags::RDONLY | OFlags::DIRECTORY, 0)?, user)?;
    }
    Ok(())
}

fn give_folder(folder: &Path, user: &DataUser) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let ours = entry.file_name().to_str().is_some_and(|name| is_number(name, 16));
        if ours && entry.file_type()?.is_file() {
            give(&open(&entry.path(), OFlags::RDONLY, 0)?, user)?;
        }
    }
    give(&open(folder, OFlags::RDONLY | OFlags::DIRECTORY, 0)?, user)
}

fn is_number(name: &str, digits: usize) -> bool {
    name.len() == digits && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
