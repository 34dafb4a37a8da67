//! Files that only the command sees: bind mounts in its own mount namespace (mount_namespaces(7)).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

/// Where the files are prepared. Covered for the moment only, and only in the command's mount namespace.
const STAGES: [&str; 4] = ["/tmp", "/run", "/mnt", "/var"];

/// `MS_SLAVE | MS_REC`.
const SLAVE: u32 = (libc::MS_SLAVE | libc::MS_REC) as u32;

/// What to cover with what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrivateFiles {
    /// Path and contents of files that replace existing ones. A path that does not exist is left out:
    /// nothing can be mounted there, and no program reads it.
    pub contents: Vec<(PathBuf, Vec<u8>)>,
    /// Unix sockets to be covered by an empty file, so that connect(2) says ECONNREFUSED: ways around the
    /// network namespace, such as a name service daemon. Those that do not exist are left out.
    pub masked_sockets: Vec<PathBuf>,
}

impl PrivateFiles {
    fn is_empty(&self) -> bool {
        self.contents.is_empty() && self.masked_sockets.is_empty()
    }

    /// Mounts everything in the mount namespace of the calling process, which must be its own.
    pub(super) fn mount(&self) -> io::Result<()> {
        // Mounts made here must not appear outside; those made outside may still appear here.
        let slave = MountPropagationFlags::from_bits_retain(SLAVE);
        rustix::mount::mount_change("/", slave)?;
        if self.is_empty() {
            return Ok(());
        }
        // Opened before the stage covers anything: a target may lie below it.
        let targets = self.open_targets()?;
        let stage = mount_stage()?;
        let mounted = mount_over(&targets, stage);
        // The bind mounts keep the file system alive; the stage itself goes, whatever happened.
        let unmounted = rustix::mount::unmount(stage, UnmountFlags::DETACH);
        mounted?;
        Ok(unmounted?)
    }

    /// The files that exist to be covered, and with what.
    fn open_targets(&self) -> io::Result<Vec<Target<'_>>> {
        // connect(2) wants write permission before it sees that this is not a socket.
        let masks = self.masked_sockets.iter().map(|path| (path, &b""[..], 0o666));
        let files = self.contents.iter().map(|(path, text)| (path, text.as_slice(), 0o444));
        let mut targets = Vec::new();
        for (path, text, mode) in files.chain(masks) {
            // Follows symbolic links: /etc/resolv.conf often is one.
            match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
                Ok(target) => targets.push(Target { target, text, mode }),
                // What is covered by nothing is a socket that the command cannot reach either.
                Err(Errno::ACCESS) if text.is_empty() => {}
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                Err(error) => return Err(located(path, error.into())),
            }
        }
        Ok(targets)
    }
}

/// One file to be covered.
struct Target<'a> {
    target: OwnedFd,
    text: &'a [u8],
    mode: u32,
}

fn mount_over(targets: &[Target<'_>], stage: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    let mut made: BTreeMap<(&[u8], u32), PathBuf> = BTreeMap::new();
    for Target { target, text, mode } in targets {
        let index = made.len();
        // All masks are the same file.
        let (source, is_new) = match made.entry((*text, *mode)) {
            Entry::Occupied(source) => (source.get().clone(), false),
            Entry::Vacant(place) => (place.insert(stage.join(index.to_string())).clone(), true),
        };
        if is_new {
            fs::write(&source, text)?;
            fs::set_permissions(&source, fs::Permissions::from_mode(*mode))?;
            // A mount of its own first, so that it alone becomes read-only: root ignores the mode.
            rustix::mount::mount_bind(&source, &source)?;
            rustix::mount::mount_remount(&source, flags | MountFlags::BIND, c"")?;
        }
        rustix::mount::mount_bind(&source, format!("/proc/self/fd/{}", target.as_raw_fd()))?;
    }
    Ok(())
}

/// Names the file. The number of the error is lost, but no remedy depends on it here.
fn located(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn mount_stage() -> io::Result<&'static Path> {
    let stage = STAGES.iter().map(Path::new).find(|path| path.is_dir()).ok_or(io::ErrorKind::NotFound)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("sidetrack", stage, "tmpfs", flags, Some(c"mode=0755,size=16m"))?;
    Ok(stage)
}
