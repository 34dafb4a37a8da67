//! Replaces the agreement's file atomically: a reader, or a start after a crash, finds the old text or the new one.
//!
//! If the folder belongs to root, the data plane's user cannot create a file in it. Then a process does it that keeps the
//! right to write in this folder, and replaces only files that the user may write anyway.

use crate::rights::{DataUser, TO_BECOME, become_or_stay, restrict};
use crate::wire;
use anyhow::Context;
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat};
use serde::{Deserialize, Serialize};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine;
use sidetrack_sys::landlock::{Allowed, May};
use sidetrack_sys::sync::lock;
use sidetrack_sys::{process, scm};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The argument that makes the program run as this process.
pub(super) const ARGUMENT: &str = "agreement-writer";

/// The name of this process in `ps` and `top`.
const NAME: &std::ffi::CStr = c"sidetrack-write";

/// Needed to create and rename a file in a folder of root.
const NEEDED: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// The first message to the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Begin {
    /// The user to become.
    user: DataUser,
    /// The folder of the agreement. The process replaces files only there.
    folder: PathBuf,
}

/// Asks the process to replace a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Replace {
    /// The file's name in the folder.
    name: OsString,
    text: String,
}

/// Our end of the connection to the process.
#[derive(Debug)]
pub(crate) struct Writer {
    folder: PathBuf,
    end: Mutex<OwnedFd>,
    child: Mutex<std::process::Child>,
}

impl Writer {
    /// Starts the process for the folder of this file. Call it before rights are given up.
    ///
    /// # Errors
    /// The new process cannot be started, or reports a failure.
    pub(crate) fn start(path: &Path, user: &DataUser) -> anyhow::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        let child =
            process::respawn(ARGUMENT, theirs).context("cannot start the process for the agreement")?;
        // The process may have another working directory, so it gets an absolute path.
        let folder = folder_of(path)?;
        wire::send(&ours, &Begin { user: user.clone(), folder: folder.clone() }, &[])?;
        answer(&ours).context("the process for the agreement")?;
        Ok(Self { folder, end: Mutex::new(ours), child: Mutex::new(child) })
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let name = path
            .file_name()
            .map(OsString::from)
            .filter(|_| folder_of(path).is_ok_and(|at| at == self.folder));
        let name = name.ok_or_else(|| {
            io::Error::other(
                "its folder belongs to another user, and is not that of the agreement at the start: restart sidetrack",
            )
        })?;
        let end = lock(&self.end);
        wire::send(&*end, &Replace { name, text: text.to_owned() }, &[])?;
        answer(&end)
    }
}

fn folder_of(path: &Path) -> io::Result<PathBuf> {
    Ok(std::path::absolute(path)?.parent().unwrap_or(Path::new("/")).to_owned())
}

fn answer(end: &OwnedFd) -> io::Result<()> {
    let answer = wire::receive::<Result<(), String>>(end)?;
    let (done, _) = answer.ok_or_else(|| io::Error::other("the process that writes it is gone"))?;
    done.map_err(io::Error::other)
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Closing the connection ends the process after the current request.
        let _ = scm::close(&*lock(&self.end));
        let _ = lock(&self.child).wait();
    }
}

/// Runs this process until the other end closes.
///
/// # Errors
/// The failure that ends the process.
pub(crate) fn serve(end: OwnedFd) -> anyhow::Result<()> {
    process::ignore_stop_signals();
    // An error only affects the name in `ps`.
    let _ = process::set_name(NAME);
    let held = caps::capabilities().context("capabilities")?.permitted;
    caps::keep_only(held & (NEEDED | TO_BECOME)).context("cannot give up capabilities")?;
    let Some((Begin { user, folder }, _)) = wire::receive::<Begin>(&end)? else { return Ok(()) };
    become_or_stay(Some(&user), NEEDED)?;
    restrict(&[Allowed { path: folder.clone(), may: May::Change }]);
    if let Err(error) = confine::confine_process(confine::Kind::Control) {
        tracing::warn!("the system calls of the process for the agreement are not confined: {error}");
    }
    wire::send(&end, &Ok::<(), String>(()), &[])?;
    while let Some((Replace { name, text }, _)) = wire::receive::<Replace>(&end)? {
        let written = written_by_user(&folder, &name).and_then(|path| rename_over(&path, &text));
        let written = written.map_err(|error| error.to_string());
        wire::send(&end, &written, &[])?;
    }
    Ok(())
}

/// Returns the path of a file in the folder that this process's user may write without a capability.
fn written_by_user(folder: &Path, name: &OsStr) -> io::Result<PathBuf> {
    let is_name = Path::new(name).file_name() == Some(name);
    let path = folder.join(name);
    if !is_name || !fs::symlink_metadata(&path)?.is_file() {
        return Err(io::Error::other("it is not a regular file of the agreement's folder"));
    }
    // Without EACCESS, the kernel asks about the real user, who is not root, and ignores capabilities.
    accessat(CWD, &path, Access::WRITE_OK, AtFlags::empty())?;
    Ok(path)
}

/// Replaces the text of a file that this process's user may write.
///
/// # Errors
/// The system's error; the file has its old text then.
pub(super) fn replace(path: &Path, text: &str, writer: Option<&Writer>) -> io::Result<()> {
    match (rename_over(path, text), writer) {
        // The folder belongs to root, but the file was given to the data plane's user.
        (Err(error), Some(writer)) if error.kind() == ErrorKind::PermissionDenied => {
            // Do not let the writer replace a file that this user may not write.
            match accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS) {
                Ok(()) => writer.write(path, text),
                Err(_) => Err(error),
            }
        }
        (done, _) => done,
    }
}

/// Creates a file with the text and the permissions of the old one, and renames it over the old one.
fn rename_over(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let beside = path.with_file_name(name);
    let mode = fs::metadata(path).map_or(0o644, |old| old.permissions().mode() & 0o7777);
    // Remove what a killed process left. O_NOFOLLOW below does not follow a link at this path.
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(&beside, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(text.as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    // Sync the folder, so that the new name is on disk. If the folder cannot be opened, the new text stays all the same.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(())
}
