//! Default paths of admin sockets.

use sidetrack_sys::probe;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The default socket of `sidetrack up` as root.
pub const SYSTEM_SOCKET: &str = "/run/sidetrack/admin.sock";

/// File name of the socket of `sidetrack up`.
const UP: &str = "admin.sock";

/// Prefix and suffix around the process id in the file name of the socket of a `sidetrack run`.
const RUN: &str = "run-";
const SOCK: &str = ".sock";

/// The directory of this user's sockets. For root: `/run/sidetrack`. For other users, the first of: the
/// service's directory made by systemd (`RuntimeDirectory=`); `$XDG_RUNTIME_DIR/sidetrack`; if that variable is
/// not set, `/run/user/UID/sidetrack`; if there is no such directory, `/tmp/sidetrack-UID`.
pub fn directory() -> PathBuf {
    directory_of(probe::uid(), |name| std::env::var_os(name), Path::is_dir)
}

fn directory_of(
    uid: u32,
    variable: impl Fn(&str) -> Option<OsString>,
    is_dir: impl Fn(&Path) -> bool,
) -> PathBuf {
    if uid == 0 {
        return "/run/sidetrack".into();
    }
    // Relative paths must be ignored (XDG Base Directory Specification). systemd gives a list with colons.
    let absolute = |name: &str| {
        let value = variable(name)?.into_string().ok()?;
        value.split(':').next().filter(|path| path.starts_with('/')).map(PathBuf::from)
    };
    if let Some(service) = absolute("RUNTIME_DIRECTORY") {
        return service;
    }
    let session = || Some(PathBuf::from(format!("/run/user/{uid}"))).filter(|path| is_dir(path));
    match absolute("XDG_RUNTIME_DIR").or_else(session) {
        Some(runtime) => runtime.join("sidetrack"),
        None => format!("/tmp/sidetrack-{uid}").into(),
    }
}

/// The default socket of `sidetrack up`, without `--admin` and a configured path.
pub fn default_socket() -> PathBuf {
    directory().join(UP)
}

/// The socket of the `sidetrack run` with this process id.
pub fn run_socket(pid: u32) -> PathBuf {
    directory().join(format!("{RUN}{pid}{SOCK}"))
}

/// Returns the runs of this user that answer, with process ids.
pub fn runs() -> Vec<(u32, PathBuf)> {
    let mut runs = run_sockets(&directory());
    runs.retain(|(_, path)| !probe::socket_is_stale(path));
    runs
}

/// Removes the sockets of this user's runs that were killed.
pub fn forget_dead_runs() {
    for (_, path) in run_sockets(&directory()) {
        if probe::socket_is_stale(&path) {
            // Fails if another process has just removed it.
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns the sockets of this user's runs, including those of ended runs.
pub fn run_sockets(directory: &Path) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let run = |name: &str| name.strip_prefix(RUN)?.strip_suffix(SOCK)?.parse().ok();
    let mut runs: Vec<_> =
        entries.filter_map(|entry| Some((run(entry.file_name().to_str()?)?, entry.path()))).collect();
    runs.sort_unstable();
    runs
}

/// Creates the [`directory`] if it does not exist. Only this user may enter it; root's may be read by all users.
///
/// # Errors
/// Fails as the system does. Fails with `PermissionDenied` if it belongs to another user, who could replace our
/// socket.
pub(super) fn make_directory(directory: &Path) -> io::Result<()> {
    let uid = probe::uid();
    let mode = if uid == 0 { 0o755 } else { 0o700 };
    match fs::DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => return made,
    }
    // Do not follow a link, which another user could have made.
    let found = fs::symlink_metadata(directory)?;
    if !found.is_dir() || ![0, uid].contains(&found.uid()) {
        let what = format!("{} is not a directory of this user", directory.display());
        return Err(io::Error::new(ErrorKind::PermissionDenied, what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(uid: u32, variables: &[(&str, &str)], directories: &[&str]) -> String {
        let variable = |name: &str| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| OsString::from(value))
        };
        let is_dir = |path: &Path| directories.iter().any(|directory| Path::new(directory) == path);
        directory_of(uid, variable, is_dir).display().to_string()
    }

    #[test]
    fn everybody_has_a_place() {
        let session = &["/run/user/1000"];
        let xdg = ("XDG_RUNTIME_DIR", "/run/user/1000");
        assert_eq!(of(0, &[xdg], session), "/run/sidetrack");
        assert_eq!(of(1000, &[xdg], session), "/run/user/1000/sidetrack");
        assert_eq!(of(1000, &[], session), "/run/user/1000/sidetrack");
        assert_eq!(of(1000, &[], &[]), "/tmp/sidetrack-1000");
        for nothing in ["", "not/absolute"] {
            assert_eq!(of(1000, &[("XDG_RUNTIME_DIR", nothing)], &[]), "/tmp/sidetrack-1000");
        }
        let service = ("RUNTIME_DIRECTORY", "/run/sidetrack:/run/other");
        assert_eq!(of(998, &[service, xdg], session), "/run/sidetrack");
    }

    #[test]
    fn sockets_of_runs_are_told_from_others() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["run-12.sock", "run-7.sock", "run-x.sock", ".run-7.sock.7", "admin.sock"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let runs = run_sockets(folder.path());
        assert_eq!(runs.iter().map(|(pid, _)| *pid).collect::<Vec<_>>(), [7, 12]);
        assert_eq!(runs[0].1, folder.path().join("run-7.sock"));
    }

    #[test]
    fn the_directory_is_made_once_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let ours = folder.path().join("sidetrack");
        make_directory(&ours).unwrap();
        make_directory(&ours).unwrap();
        assert_eq!(fs::metadata(&ours).unwrap().mode() & 0o022, 0);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&ours, &link).unwrap();
        assert_eq!(make_directory(&link).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
}
