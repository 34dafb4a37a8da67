//! Where admin sockets are unless somebody says otherwise.

use sidetrack_sys::probe;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where `sidetrack up` as root has its socket unless its configuration says otherwise.
pub const SYSTEM_SOCKET: &str = "/run/sidetrack/admin.sock";

/// Name of the socket of `sidetrack up`.
const UP: &str = "admin.sock";

/// What stands before and behind the process id in the name of the socket of a `sidetrack run`.
const RUN: &str = "run-";
const SOCK: &str = ".sock";

/// The directory of this user's sockets: `/run/sidetrack` for root; for others what systemd made for the service
/// (`RuntimeDirectory=`), else `$XDG_RUNTIME_DIR/sidetrack`, `/run/user/UID/sidetrack` where that variable is not set, or
/// `/tmp/sidetrack-UID` where there is no such directory.
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
    // A relative path is to be ignored (XDG Base Directory Specification); systemd gives a list with colons.
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

/// Where the socket of `sidetrack up` is unless the configuration or `--admin` says otherwise.
pub fn default_socket() -> PathBuf {
    directory().join(UP)
}

/// Where the socket of the `sidetrack run` with this process id is.
pub fn run_socket(pid: u32) -> PathBuf {
    directory().join(format!("{RUN}{pid}{SOCK}"))
}

/// The runs of this user that answer, by process id.
pub fn runs() -> Vec<(u32, PathBuf)> {
    let mut runs = run_sockets(&directory());
    runs.retain(|(_, path)| !probe::socket_is_stale(path));
    runs
}

/// Removes what runs of this user that were killed have left.
pub fn forget_dead_runs() {
    for (_, path) in run_sockets(&directory()) {
        if probe::socket_is_stale(&path) {
            // Another one may have removed it just now.
            let _ = fs::remove_file(path);
        }
    }
}

/// Sockets that runs of this user have left or still have.
pub fn run_sockets(directory: &Path) -> Vec<(u32, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let run = |name: &str| name.strip_prefix(RUN)?.strip_suffix(SOCK)?.parse().ok();
    let mut runs: Vec<_> =
        entries.filter_map(|entry| Some((run(entry.file_name().to_str()?)?, entry.path()))).collect();
    runs.sort_unstable();
    runs
}

/// Makes the [`directory`] if there is none, for this user alone (for everybody to look into, if we are root).
///
/// # Errors
/// What the system says; `PermissionDenied` if it is there and belongs to somebody else, who could put a socket of theirs in
/// the place of ours.
pub fn make_directory(directory: &Path) -> io::Result<()> {
    let uid = probe::uid();
    let mode = if uid == 0 { 0o755 } else { 0o700 };
    match fs::DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => return made,
    }
    // Not the target of a link that somebody else put there.
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
