//! The unix socket. It never replaces another process's socket, and is removed at the end.

use super::places::make_directory;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use sidetrack_common::history::Caller;
use sidetrack_sys::probe::socket_is_stale;
use sidetrack_sys::undo::Action;
use std::fs;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Owner and group may connect.
const MODE: u32 = 0o660;

/// Attempts to create the directory of a socket, if it is removed meanwhile.
const ATTEMPTS: u32 = 5;

/// Why the socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process answers there.
    #[error(
        "another sidetrack answers at {0}: stop it, or give this one a socket of its own ([admin] socket)"
    )]
    InUse(PathBuf),
    /// A file that is not a socket has this name.
    #[error("{0} exists and is not a socket: remove it, or choose another path ([admin] socket)")]
    NotASocket(PathBuf),
    /// The system reports an error.
    #[error(
        "the admin socket {0} cannot be made: {1}; choose a path that this user may write to ([admin] socket)"
    )]
    Io(PathBuf, #[source] io::Error),
}

/// A bound admin socket.
#[derive(Debug)]
pub struct AdminSocket {
    listener: UnixListener,
    /// `None`: another value removes the file.
    guard: Option<Guard>,
    place: Place,
}

/// Where a socket is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    path: PathBuf,
    inode: u64,
    /// Also remove the directory, if it is empty.
    with_directory: bool,
}

/// Removes the socket when dropped, if it is still ours.
#[derive(Debug)]
pub(super) struct Guard(Place);

/// The process at the other end of a connection to the admin socket, as the kernel knew it when it connected.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Client {
    uid: Option<u32>,
    pid: Option<i32>,
    /// It is a browser at this address.
    page: Option<SocketAddr>,
}

impl Connected<IncomingStream<'_, tokio::net::UnixListener>> for Client {
    fn connect_info(stream: IncomingStream<'_, tokio::net::UnixListener>) -> Self {
        let known = stream.io().peer_cred().ok();
        Self { uid: known.map(|known| known.uid()), pid: known.and_then(|known| known.pid()), page: None }
    }
}

impl Client {
    /// A browser that is logged in to the page.
    pub(super) fn of_page(address: Option<SocketAddr>) -> Self {
        Self { page: address, ..Self::default() }
    }

    /// The caller for the history. `peer`: for which peer it asks, as it says.
    pub(super) fn caller(self, peer: Option<String>) -> Caller {
        let name = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
        let page = self.page.map(|address| format!("the page, from {}", address.ip()));
        let program = page.or_else(|| self.pid.and_then(name).map(|name| name.trim_end().to_owned()));
        // A process may be root's and unknown to the kernel's answer, but the history names a caller in any case.
        Caller { uid: Some(self.uid.unwrap_or(u32::MAX)), pid: self.pid, program, peer }
    }
}

impl AdminSocket {
    /// Like [`Self::bind`], in the [directory of this user's sockets](super::directory). The directory is
    /// created if needed, and removed with its last socket.
    ///
    /// # Errors
    /// Fails as [`Self::bind`] does, and if the directory belongs to another user.
    pub fn bind_default(path: &Path) -> Result<Self, BindError> {
        for _ in 1..ATTEMPTS {
            match Self::in_directory(path) {
                // Another process has just removed the directory with its own socket.
                Err(BindError::Io(_, error)) if error.kind() == ErrorKind::NotFound => {}
                done => return done,
            }
        }
        Self::in_directory(path)
    }

    fn in_directory(path: &Path) -> Result<Self, BindError> {
        let made = path.parent().map_or(Ok(()), make_directory);
        made.map_err(|error| BindError::Io(path.to_owned(), error))?;
        let socket = Self::unguarded(path)?;
        Ok(Self::guarded(socket.listener, Place { with_directory: true, ..socket.place }))
    }

    /// Creates the socket with mode 0660, and its directory if needed. Replaces a stale socket, but not one that
    /// answers.
    ///
    /// # Errors
    /// Fails if another process answers there, if another file has this name, or if the system reports an error.
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        Self::unguarded(path).map(|socket| Self::guarded(socket.listener, socket.place))
    }

    fn guarded(listener: UnixListener, place: Place) -> Self {
        Self { listener, guard: Some(Guard(place.clone())), place }
    }

    fn unguarded(path: &Path) -> Result<Self, BindError> {
        let failed = |error| BindError::Io(path.to_owned(), error);
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
        }
        make_room(path)?;
        // Create the socket under another name and link it into place when its mode is right. So other users can
        // never connect, and a link, unlike a rename, replaces no other socket.
        let hidden = hidden_name(path);
        let listener = UnixListener::bind(&hidden).map_err(failed)?;
        let linked = fs::set_permissions(&hidden, fs::Permissions::from_mode(MODE))
            .and_then(|()| fs::hard_link(&hidden, path))
            .and_then(|()| fs::symlink_metadata(path));
        fs::remove_file(&hidden).map_err(failed)?;
        match linked {
            Ok(metadata) => {
                let place = Place { path: path.to_owned(), inode: metadata.ino(), with_directory: false };
                Ok(Self { listener, guard: None, place })
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(BindError::InUse(path.to_owned())),
            Err(error) => Err(failed(error)),
        }
    }

    /// The action that removes it, for a process that outlives this one.
    pub fn undo(&self) -> Action {
        let Place { path, inode, with_directory } = &self.place;
        Action::RemoveSocket { path: path.clone(), inode: *inode, with_directory: *with_directory }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.place.path
    }

    /// The socket that an earlier process of this node has bound, at this path. It is removed at our end.
    ///
    /// # Errors
    /// Another process has a socket there now.
    pub fn taken(listener: std::os::fd::OwnedFd, path: &Path, with_directory: bool) -> io::Result<Self> {
        let inode = fs::symlink_metadata(path)?.ino();
        let place = Place { path: path.to_owned(), inode, with_directory };
        Ok(Self::guarded(listener.into(), place))
    }

    /// A copy, which does not remove the file.
    ///
    /// # Errors
    /// There is no free descriptor.
    pub fn copy(&self) -> io::Result<Self> {
        Ok(Self { listener: self.listener.try_clone()?, guard: None, place: self.place.clone() })
    }

    /// The descriptor, for a process that goes on with it, and whether its directory goes with it.
    pub fn descriptor(&self) -> (std::os::fd::BorrowedFd<'_>, bool) {
        (self.listener.as_fd(), self.place.with_directory)
    }

    /// Leaves the file where it is at our end: another process goes on with it.
    pub fn leave(&mut self) {
        if let Some(guard) = self.guard.take() {
            std::mem::forget(guard);
        }
    }

    pub(super) fn into_listener(self) -> io::Result<(tokio::net::UnixListener, Option<Guard>)> {
        self.listener.set_nonblocking(true)?;
        Ok((tokio::net::UnixListener::from_std(self.listener)?, self.guard))
    }
}

fn hidden_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// Removes the socket of a killed process.
fn make_room(path: &Path) -> Result<(), BindError> {
    let failed = |error| BindError::Io(path.to_owned(), error);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => Err(BindError::NotASocket(path.to_owned())),
        Ok(_) if socket_is_stale(path) => fs::remove_file(path).map_err(failed),
        Ok(_) => Err(BindError::InUse(path.to_owned())),
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Place { path, inode, with_directory } = &self.0;
        if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.ino() == *inode) {
            let _ = fs::remove_file(path);
            if *with_directory && let Some(directory) = path.parent() {
                let _ = fs::remove_dir(directory);
            }
        }
    }
}
