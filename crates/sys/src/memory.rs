//! The memory that the control groups of this process use, and their limits.
//!
//! A group's limit holds for all groups below it, so the group and all above it are read. Both versions of control groups are
//! known: `memory.max` and `memory.high` of version 2, `memory.limit_in_bytes` of version 1. The files stay open, because a node
//! may not open them after its start.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::cgroup::unescape;

/// Version 1 has no word for "no limit", but a number near 2^63.
const NO_LIMIT: u64 = 1 << 60;
/// A file of statistics has a few KiB.
const TEXT_MAX: usize = 16 * 1024;
/// Most groups that are read: a deeper tree is cut at its root, where limits are rare.
const LEVELS_MAX: usize = 8;

/// What a control group uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Bytes that the kernel cannot take back by itself: all without the pages of files.
    pub used_bytes: u64,
    /// Its limit.
    pub limit_bytes: u64,
}

/// The control group of this process, and those above it.
#[derive(Debug)]
pub struct Groups {
    levels: Vec<Level>,
}

/// Files of one group.
#[derive(Debug)]
struct Level {
    folder: PathBuf,
    /// The lowest of them counts.
    limits: Vec<File>,
    usage: File,
    stat: File,
    /// How lines of pages of files begin in `memory.stat`.
    file_pages: [&'static str; 2],
}

/// The two layouts of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Groups {
    /// Opens the files of the groups of this process.
    ///
    /// # Errors
    /// `NotFound` if no control group counts memory.
    pub fn open() -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let levels: Vec<Level> = places(&mounts, &own)
            .into_iter()
            .flat_map(|(version, mount, folder)| Level::all(version, &mount, &folder))
            .collect();
        if levels.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no control group counts memory"));
        }
        Ok(Self { levels })
    }

    /// Returns the use of the group that is nearest to its limit, and the group's folder. `None`: none has a limit.
    pub fn look(&self) -> Option<(Use, &Path)> {
        let all = self.levels.iter().filter_map(|level| Some((level.look()?, &*level.folder)));
        let share = |found: &Use| u128::from(found.used_bytes) * 1_000_000 / u128::from(found.limit_bytes);
        all.max_by_key(|(found, _)| share(found))
    }
}

impl Level {
    /// Opens the groups from `folder` up to the root of the mount. Those without files of memory are left out.
    fn all(version: Version, mount: &Path, folder: &Path) -> Vec<Self> {
        let folders = folder.ancestors().take_while(|folder| folder.starts_with(mount)).take(LEVELS_MAX);
        folders.filter_map(|folder| Self::open(version, folder).ok()).collect()
    }

    fn open(version: Version, folder: &Path) -> io::Result<Self> {
        let (limits, usage, file_pages): (&[&str], _, _) = match version {
            Version::One => (
                &["memory.limit_in_bytes"],
                "memory.usage_in_bytes",
                ["total_active_file ", "total_inactive_file "],
            ),
            Version::Two => {
                (&["memory.max", "memory.high"], "memory.current", ["active_file ", "inactive_file "])
            }
        };
        let open = |name: &str| File::open(folder.join(name));
        Ok(Self {
            folder: folder.to_owned(),
            limits: limits.iter().map(|name| open(name)).collect::<io::Result<_>>()?,
            usage: open(usage)?,
            stat: open("memory.stat")?,
            file_pages,
        })
    }

    /// `None` without a limit, or if the group is gone.
    fn look(&self) -> Option<Use> {
        let limits = self.limits.iter().filter_map(|file| text(file).ok()?.trim().parse().ok());
        let limit_bytes = limits.filter(|limit| (1..NO_LIMIT).contains(limit)).min()?;
        let used: u64 = text(&self.usage).ok()?.trim().parse().ok()?;
        let of_files = self.of_files(&text(&self.stat).ok()?);
        Some(Use { used_bytes: used.saturating_sub(of_files), limit_bytes })
    }

    fn of_files(&self, stat: &str) -> u64 {
        let lines = stat.lines();
        let number = |line: &str| {
            let rest = self.file_pages.iter().find_map(|start| line.strip_prefix(start))?;
            rest.trim().parse::<u64>().ok()
        };
        lines.filter_map(number).sum()
    }
}

/// Reads a file of the kernel from its beginning.
fn text(file: &File) -> io::Result<String> {
    let (mut bytes, mut length) = (vec![0; TEXT_MAX], 0);
    loop {
        let more = file.read_at(&mut bytes[length..], length as u64)?;
        length += more;
        if more == 0 || length == bytes.len() {
            bytes.truncate(length);
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}

/// Finds the mounts of hierarchies that may count memory: version, mount point, and our folder there.
fn places(mountinfo: &str, cgroups: &str) -> Vec<(Version, PathBuf, PathBuf)> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        let mut system = system.split(' ');
        let version = match (system.next()?, system.nth(1)) {
            ("cgroup2", _) => Version::Two,
            ("cgroup", Some(options)) if options.split(',').any(|word| word == "memory") => Version::One,
            _ => return None,
        };
        let own = own(version, cgroups)?;
        // A container may see its own group as the root of the mount, and still know its name outside.
        let below = own.strip_prefix(&root).map_or_else(|_| PathBuf::new(), Path::to_owned);
        Some((version, point.clone(), point.join(below)))
    });
    mounts.collect()
}

/// Our group in /proc/self/cgroup (cgroups(7)): an absolute path.
fn own(version: Version, cgroups: &str) -> Option<PathBuf> {
    cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_it = match version {
            Version::One => controllers.split(',').any(|word| word == "memory"),
            Version::Two => number == "0" && controllers.is_empty(),
        };
        is_it.then(|| PathBuf::from(path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_where_they_are_mounted() {
        let mounts = "31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      32 30 0:28 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                      33 30 0:36 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n";
        let found = places(mounts, "4:memory:/a/b\n1:cpu:/c\n0::/user.slice/x\n");
        let place = |version, mount: &str, folder: &str| (version, mount.into(), folder.into());
        assert_eq!(
            found,
            [
                place(Version::One, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory/a/b"),
                place(Version::Two, "/sys/fs/cgroup/uni fied", "/sys/fs/cgroup/uni fied/user.slice/x"),
            ]
        );
        // Docker without a namespace of control groups: the mount shows our group only.
        let inside = "32 30 0:28 /docker/1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let found = places(inside, "4:memory:/docker/1\n");
        assert_eq!(found, [place(Version::One, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory")]);
        assert_eq!(places("24 1 0:1 / / rw - ext4 /dev/vda rw\n- \n", "0::/\n"), []);
    }

    fn group(files: &[(&str, &str)], at: &Path) {
        fs::create_dir_all(at).unwrap();
        files.iter().for_each(|(name, text)| fs::write(at.join(name), text).unwrap());
    }

    #[test]
    fn the_group_nearest_to_its_limit_counts_and_pages_of_files_do_not() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().to_owned();
        let (upper, lower) = (root.join("a"), root.join("a/b"));
        let stat = "anon 5\nactive_file 100\ninactive_file 200\nunevictable 9\n";
        group(
            &[
                ("memory.max", "2000\n"),
                ("memory.high", "max\n"),
                ("memory.current", "1800\n"),
                ("memory.stat", stat),
            ],
            &upper,
        );
        group(
            &[
                ("memory.max", "max\n"),
                ("memory.high", "1000\n"),
                ("memory.current", "700\n"),
                ("memory.stat", stat),
            ],
            &lower,
        );
        let groups = Groups { levels: Level::all(Version::Two, &root, &lower) };
        assert_eq!(groups.levels.len(), 2, "the root has no files");
        assert_eq!(groups.look(), Some((Use { used_bytes: 1500, limit_bytes: 2000 }, &*upper)));
        fs::write(upper.join("memory.max"), "max\n").unwrap();
        assert_eq!(groups.look(), Some((Use { used_bytes: 400, limit_bytes: 1000 }, &*lower)));
        fs::write(lower.join("memory.high"), "max\n").unwrap();
        assert_eq!(groups.look(), None);
        let of_v1 = root.join("v1");
        let stat = "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30\n";
        let files = |limit| {
            [("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", "450\n"), ("memory.stat", stat)]
        };
        group(&files("9223372036854771712\n"), &of_v1);
        let groups = Groups { levels: Level::all(Version::One, &root, &of_v1) };
        assert_eq!(groups.look(), None, "that is the word for no limit");
        group(&files("500\n"), &of_v1);
        assert_eq!(groups.look(), Some((Use { used_bytes: 400, limit_bytes: 500 }, &*of_v1)));
    }
}
