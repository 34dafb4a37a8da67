//! The folder of what outlives a process: names of the wire's maps and programs in a file system of type `bpf`.
//!
//! ```text
//! FOLDER              one instance's; the process that uses it holds a lock on it
//! FOLDER/format-1     the maps `wires`, `wire_ends`, `wire_notes`, and `in-N` and `out-N` of each interface with index N
//! ```

use super::super::Link;
use super::WireMemory;
use crate::repair;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use sidetrack_core::wire;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The folder of all instances that name no other one.
pub const PINS: &str = "/sys/fs/bpf/sidetrack";

/// Where the kernel's file system of type `bpf` usually is.
const BPF_AT: &str = "/sys/fs/bpf";

/// `BPF_FS_MAGIC` (linux/magic.h).
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;

/// What the folder of a format is called, with the number of ours. A change of `wire.h`, of the maps or of their names takes
/// another one.
const FORMAT: &str = "format-";
pub(super) const FORMAT_NUMBER: u32 = 1;

/// How long the lock of a process that is just ending is waited for.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The folder of an instance, locked until this is dropped.
#[derive(Debug)]
pub struct Pins {
    folder: PathBuf,
    lock: OwnedFd,
}

/// Returns the folder of an instance in this network namespace that names no other one.
///
/// # Errors
/// ENOPROTOOPT before Linux 5.14.
pub fn default_pins() -> io::Result<PathBuf> {
    let cookie = crate::connects::network(UnixDatagram::unbound()?).ok_or(Errno::NOPROTOOPT)?;
    Ok(Path::new(PINS).join(format!("net-{cookie}")))
}

fn is_bpf(path: &Path) -> bool {
    let at = path.ancestors().find(|path| path.exists());
    let found = at.and_then(|at| rustix::fs::statfs(at).ok());
    found
        .is_some_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| kind & 0xffff_ffff == BPF_FS_MAGIC))
}

/// Says why nothing can have a name in this folder. `None`: it can, or it will be possible once the file system is mounted.
pub fn pins_obstacle(folder: &Path) -> Option<String> {
    if is_bpf(folder) || (folder.starts_with(BPF_AT) && Path::new(BPF_AT).is_dir()) {
        return None;
    }
    Some(format!("{} is in no file system of type bpf", folder.display()))
}

impl Pins {
    /// Makes the folder of an instance, and locks it. Mounts the file system if it is missing at its usual place.
    ///
    /// # Errors
    /// `WouldBlock` if another process has it; `Unsupported` if it is on another file system; EPERM.
    pub fn open(folder: &Path) -> io::Result<Self> {
        if folder.starts_with(BPF_AT) && !is_bpf(Path::new(BPF_AT)) {
            rustix::mount::mount("bpf", BPF_AT, "bpf", MountFlags::empty(), Some(c"mode=0700"))?;
        }
        if !is_bpf(folder) {
            let text = format!("{} is in no file system of type bpf", folder.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let until = Instant::now() + LOCK_PATIENCE;
        loop {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            match Self::lock(folder) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                // It was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < until => {}
                done => return done,
            }
        }
    }

    /// Locks a folder that is there.
    ///
    /// # Errors
    /// `WouldBlock` if another process has it; `NotFound`.
    pub fn lock(folder: &Path) -> io::Result<Self> {
        let lock =
            rustix::fs::open(folder, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        let ours = rustix::fs::fstat(&lock)?.st_ino;
        if fs::metadata(folder)?.ino() != ours {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self { folder: folder.to_owned(), lock })
    }

    /// The folder that another process has locked, with its lock: both have it.
    pub const fn given(folder: PathBuf, lock: OwnedFd) -> Self {
        Self { folder, lock }
    }

    /// Returns a copy of the lock, for another process. The folder is locked until both are closed.
    ///
    /// # Errors
    /// EMFILE.
    pub fn copy(&self) -> io::Result<OwnedFd> {
        self.lock.try_clone()
    }

    /// The folder as it was named.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder by a name that a process reaches also after it has become a user who may not enter the folders above it.
    pub fn reachable(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.lock.as_raw_fd()))
    }

    /// The folder of our format.
    pub(super) fn of_format(&self) -> PathBuf {
        self.reachable().join(format!("{FORMAT}{FORMAT_NUMBER}"))
    }

    /// Lets this user and group add and remove names.
    ///
    /// # Errors
    /// EPERM.
    pub fn give_to(&self, user: u32, group: u32) -> io::Result<()> {
        std::os::unix::fs::chown(self.reachable(), Some(user), Some(group))?;
        match std::os::unix::fs::chown(self.of_format(), Some(user), Some(group)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    /// Whether a process has left something here.
    pub fn is_used(&self) -> bool {
        self.of_format().exists()
    }

    /// The numbers of other formats that are here.
    pub fn other_formats(&self) -> Vec<u32> {
        let names = fs::read_dir(self.reachable()).into_iter().flatten().flatten();
        let numbers =
            names.filter_map(|entry| entry.file_name().to_str()?.strip_prefix(FORMAT)?.parse().ok());
        numbers.filter(|number| *number != FORMAT_NUMBER).collect()
    }

    /// Removes all names. What no process has ends.
    ///
    /// # Errors
    /// EACCES.
    pub fn clear(&self) -> io::Result<()> {
        for folder in fs::read_dir(self.reachable())? {
            let folder = self.reachable().join(folder?.file_name());
            for name in fs::read_dir(&folder)? {
                fs::remove_file(folder.join(name?.file_name()))?;
            }
            fs::remove_dir(folder)?;
        }
        Ok(())
    }

    /// As [`Self::clear`], and removes the folder itself if this process may.
    ///
    /// # Errors
    /// EACCES.
    pub fn remove(self) -> io::Result<()> {
        self.clear()?;
        // An empty folder does no harm: the one above it may belong to another user.
        let _ = fs::remove_dir(&self.folder);
        Ok(())
    }

    /// Whether something is here, and no interface of it is left: its network namespace is gone.
    fn is_orphan(&self) -> bool {
        let names = fs::read_dir(self.of_format()).into_iter().flatten().flatten();
        let is_link = |path: &PathBuf| interface_of(path).is_some();
        let links: Vec<_> = names.map(|entry| entry.path()).filter(is_link).collect();
        let is_dead =
            |path: &PathBuf| Link::pinned(path).and_then(|link| link.interface()).is_ok_and(|at| at == 0);
        !links.is_empty() && links.iter().all(is_dead)
    }
}

/// The index of the interface in the name of an attachment, and the hook's word.
pub(super) fn interface_of(path: &Path) -> Option<(&str, u32)> {
    let (hook, index) = path.file_name()?.to_str()?.split_once('-')?;
    Some((hook, index.parse().ok()?)).filter(|(hook, _)| ["in", "out"].contains(hook))
}

/// The usual folder of this network namespace, if something is in it and no process has it.
pub fn abandoned_pins() -> Option<PathBuf> {
    let folder = default_pins().ok()?;
    let pins = Pins::lock(&folder).ok()?;
    let is_used = fs::read_dir(pins.reachable()).is_ok_and(|mut all| all.next().is_some());
    is_used.then_some(folder)
}

/// Removes what network namespaces have left that are gone.
pub fn remove_orphans() {
    let folders = fs::read_dir(PINS).into_iter().flatten().flatten().map(|entry| entry.path());
    for pins in folders.filter_map(|folder| Pins::lock(&folder).ok()).filter(Pins::is_orphan) {
        let _ = pins.remove();
    }
}

/// Ends the flows that a process has left in this folder: their hosts get a RST with the right numbers. Then removes the folder.
///
/// # Errors
/// `WouldBlock` if a process has it.
pub fn end_pinned(folder: &Path) -> io::Result<()> {
    let pins = Pins::lock(folder)?;
    if pins.is_used()
        && !pins.is_orphan()
        && let Ok((memory, _on, found)) = WireMemory::adopt(&pins)
    {
        for adopted in found {
            memory.cut(adopted.id, drop);
        }
    }
    pins.remove()
}

impl WireMemory {
    /// Removes a flow, and resets it at both hosts. `failed` gets what kept one of them from being told: it learns of the end when
    /// it sends something, from this host's TCP.
    pub fn cut(&self, id: super::WireId, failed: impl Fn(io::Error)) {
        let (stands, ends) = (self.stands(id), self.ends(id));
        if let Err(error) = self.remove(id) {
            failed(io::Error::other(error));
        }
        for ((sent, seen), (remote, local)) in wire::reset_at(&stands).into_iter().zip(&stands).zip(ends) {
            let acknowledged = seen.standing.sent;
            repair::reset(&repair::Gone { remote, local, sent, acknowledged }).unwrap_or_else(&failed);
        }
    }
}
