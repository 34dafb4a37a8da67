//! Control groups, version 2: a leaf of our own around one command, so that rules can match its sockets.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

/// Most waits of [`Leaf::clear`], and the longest one, in nanoseconds.
const CLEAR_ROUNDS: u32 = 100;
const CLEAR_WAIT_NS: i64 = 50_000_000;

/// The cgroup2 hierarchy and our place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Where it is mounted: /sys/fs/cgroup, or /sys/fs/cgroup/unified on a hybrid system.
    pub mount: PathBuf,
    /// The cgroup of this process, relative to the mount; empty: the root.
    pub own: PathBuf,
}

impl Hierarchy {
    /// Finds the mount and our place.
    ///
    /// # Errors
    /// `NotFound` if no cgroup2 hierarchy is mounted.
    pub fn find() -> io::Result<Self> {
        let mount = mount_point(&fs::read_to_string("/proc/self/mountinfo")?).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                "no cgroup2 hierarchy is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified",
            )
        })?;
        let own = own_path(&fs::read_to_string("/proc/self/cgroup")?);
        Ok(Self { mount, own })
    }

    /// Makes a cgroup `name` below our own, so that limits set on us hold for it too.
    ///
    /// # Errors
    /// `AlreadyExists`; `PermissionDenied` unless root or given the subtree by its owner.
    pub fn create_leaf(&self, name: &str) -> io::Result<Leaf> {
        let path = self.own.join(name);
        fs::create_dir(self.mount.join(&path))?;
        Leaf::open(self.mount.clone(), path)
    }

    /// An existing cgroup, by its path below the mount.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn group(&self, path: &Path) -> io::Result<Leaf> {
        Leaf::open(self.mount.clone(), path.to_owned())
    }

    /// Control groups anywhere in the hierarchy whose name begins with `prefix`, for `cleanup`. At most
    /// [`Hierarchy::LOOKED_AT_MAX`] groups are looked at, parents first.
    pub fn leaves(&self, prefix: &str) -> Vec<Leaf> {
        let mut found = Vec::new();
        let mut waiting = std::collections::VecDeque::from([PathBuf::new()]);
        let mut looked_at = 0;
        while let Some(path) = waiting.pop_front().filter(|_| looked_at < Self::LOOKED_AT_MAX) {
            looked_at += 1;
            let Ok(entries) = fs::read_dir(self.mount.join(&path)) else { continue };
            for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
                let below = path.join(entry.file_name());
                if entry.file_name().to_string_lossy().starts_with(prefix) {
                    found.extend(Leaf::open(self.mount.clone(), below));
                } else {
                    waiting.push_back(below);
                }
            }
        }
        found
    }

    /// See [`Hierarchy::leaves`].
    pub const LOOKED_AT_MAX: usize = 20_000;
}

/// The cgroup of a process, by its path below the cgroup2 mount; empty: the root.
///
/// # Errors
/// `NotFound` if the process is gone.
pub fn path_of(pid: u32) -> io::Result<PathBuf> {
    Ok(own_path(&fs::read_to_string(format!("/proc/{pid}/cgroup"))?))
}

/// The match for an existing cgroup, by its path below the cgroup2 mount (with or without a leading slash).
///
/// # Errors
/// `NotFound` if there is no such cgroup or no cgroup2 mount.
pub fn find_match(path: &str) -> io::Result<crate::nft::CgroupMatch> {
    let relative = PathBuf::from(path.trim_matches('/'));
    let leaf = Leaf::open(Hierarchy::find()?.mount, relative)?;
    Ok(crate::nft::CgroupMatch { id: leaf.id(), level: leaf.level() })
}

/// A cgroup of ours. Dropping it does not remove it: a guard may have to do that after a crash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    mount: PathBuf,
    path: PathBuf,
    id: u64,
}

impl Leaf {
    fn open(mount: PathBuf, path: PathBuf) -> io::Result<Self> {
        // On 64-bit kernels the inode of a cgroup's directory is its id, what `socket cgroupv2` compares.
        let id = fs::metadata(mount.join(&path))?.ino();
        Ok(Self { mount, path, id })
    }

    /// The kernel's id of the cgroup.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Depth below the root of the hierarchy, for `socket cgroupv2 level N`; 1 is a child of the root.
    pub fn level(&self) -> u32 {
        u32::try_from(self.path.components().count()).unwrap_or(u32::MAX)
    }

    /// Its directory.
    pub fn directory(&self) -> PathBuf {
        self.mount.join(&self.path)
    }

    /// Its path below the mount, as `nft` and `systemd-cgls` write it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a process in (0: the caller); what it starts later is born inside.
    ///
    /// # Errors
    /// `PermissionDenied` without write access to both cgroups and their common ancestor; ESRCH if it is gone.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        fs::write(self.directory().join("cgroup.procs"), pid.to_string())
    }

    /// Processes inside.
    ///
    /// # Errors
    /// `NotFound` if the cgroup was removed.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let text = fs::read_to_string(self.directory().join("cgroup.procs"))?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Ends every process inside (SIGKILL), in groups below it too, and waits until they are gone.
    ///
    /// # Errors
    /// `TimedOut` if some are still there after five seconds (a process in an uninterruptible wait).
    pub fn clear(&self) -> io::Result<()> {
        let mut events = fs::File::open(self.directory().join("cgroup.events"))?;
        if !is_populated(&mut events)? {
            return Ok(());
        }
        // Linux 5.14: all at once, and nothing can fork its way out.
        let all_at_once = fs::write(self.directory().join("cgroup.kill"), "1").is_ok();
        for _ in 0..CLEAR_ROUNDS {
            if !all_at_once {
                for pid in self.pids()?.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?))
                {
                    // It may have ended since.
                    let _ = rustix::process::kill_process(pid, Signal::KILL);
                }
            }
            if !is_populated(&mut events)? {
                return Ok(());
            }
            // POLLPRI says that the file changed since it was read; the bound covers the way without cgroup.kill,
            // where a process may have been born in between.
            let limit = Timespec { tv_sec: 0, tv_nsec: CLEAR_WAIT_NS };
            poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&limit))?;
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Removes it.
    ///
    /// # Errors
    /// `ResourceBusy` while processes are inside; `NotFound` if it was removed.
    pub fn remove(&self) -> io::Result<()> {
        fs::remove_dir(self.directory())
    }
}

/// Reads cgroup.events, and so resets what poll(2) waits for.
fn is_populated(events: &mut fs::File) -> io::Result<bool> {
    let mut text = String::new();
    events.rewind()?;
    events.read_to_string(&mut text)?;
    Ok(text.lines().any(|line| line == "populated 1"))
}

/// The first cgroup2 mount of a mountinfo file (proc_pid_mountinfo(5)) that shows its root.
fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (system.starts_with("cgroup2 ") && root == "/").then(|| unescape(point))
    })
}

/// Mountinfo writes blank, tab, newline and backslash as three octal digits.
pub(crate) fn unescape(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Our path from /proc/self/cgroup: the line of hierarchy 0.
fn own_path(cgroups: &str) -> PathBuf {
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    PathBuf::from(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn both_layouts_of_mounts_are_read() {
        let hybrid = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      31 30 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n\
                      40 30 0:36 /sub /elsewhere rw - cgroup2 cgroup2 rw\n\
                      41 30 0:36 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(hybrid), Some("/sys/fs/cgroup/uni fied".into()));
        let unified = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(mount_point(unified), Some("/sys/fs/cgroup".into()));
        assert_eq!(mount_point("24 1 0:1 / / rw - ext4 /dev/vda rw\n- \n"), None);
        assert_eq!(unescape(r"a\b\0\1340"), PathBuf::from(r"a\b\0\0"));
    }

    #[test]
    fn our_place_is_the_line_of_hierarchy_0() {
        assert_eq!(own_path("4:memory:/a\n0::/user.slice/x\n"), PathBuf::from("user.slice/x"));
        assert_eq!(own_path("4:memory:/a\n"), PathBuf::new());
    }

    #[test]
    fn a_leaf_holds_a_process_and_goes_away() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let hierarchy = Hierarchy::find().unwrap();
        let leaf = hierarchy.create_leaf(&format!("sidetrack-test-{}", std::process::id())).unwrap();
        assert!(leaf.id() > 1 && leaf.level() >= 1);
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        leaf.add(child.id()).unwrap();
        assert_eq!(leaf.pids().unwrap(), [child.id()]);
        assert_eq!(leaf.remove().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(child.stdin.take());
        child.wait().unwrap();
        leaf.clear().unwrap();
        // It starts its children once it is inside, and its last word says that they are there.
        let script = "read -r go; sleep 1000 & echo; exec sleep 1000";
        let mut endless = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        leaf.add(endless.id()).unwrap();
        endless.stdin.take().unwrap().write_all(b"go\n").unwrap();
        endless.stdout.take().unwrap().read_exact(&mut [0; 1]).unwrap();
        assert_eq!(leaf.pids().unwrap().len(), 2);
        leaf.clear().unwrap();
        assert!(!endless.wait().unwrap().success());
        assert_eq!(leaf.pids().unwrap(), []);
        leaf.remove().unwrap();
        assert_eq!(leaf.pids().unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
