//! A control group with a limit of memory, of either version.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::peers::Unavailable;

/// Name of our groups, before the process's number.
const NAME: &str = "sidetrack-lab-memory-";
/// Most tries to remove it: a process that has just ended is still inside for a moment.
const TRIES: u32 = 500;
const REST: Duration = Duration::from_millis(10);

/// The files of one version: limit, limit with swap, use, most use, and the file that counts kills.
struct Files {
    limit: &'static str,
    swap: &'static str,
    used: &'static str,
    peak: &'static str,
    kills: &'static str,
}

const ONE: Files = Files {
    limit: "memory.limit_in_bytes",
    swap: "memory.memsw.limit_in_bytes",
    used: "memory.usage_in_bytes",
    peak: "memory.max_usage_in_bytes",
    kills: "memory.oom_control",
};
const TWO: Files = Files {
    limit: "memory.max",
    swap: "memory.swap.max",
    used: "memory.current",
    peak: "memory.peak",
    kills: "memory.events",
};

/// A control group; it is removed when this is dropped.
pub(super) struct Group {
    folder: PathBuf,
    files: &'static Files,
}

impl Group {
    /// Makes one below ours.
    ///
    /// # Errors
    /// No control group counts memory, or it cannot be made.
    pub(super) fn new(limit_bytes: u64) -> Result<Self> {
        let (above, files) = parent()?;
        remove_old(&above);
        let folder = above.join(format!("{NAME}{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let group = Self { folder, files };
        group.limit(limit_bytes)?;
        Ok(group)
    }

    /// Changes its limit.
    ///
    /// # Errors
    /// More is in use, and the kernel cannot take it back.
    pub(super) fn limit(&self, bytes: u64) -> Result<()> {
        // The limit with swap may not be below the other one. Without swap there is no such file.
        let is_one = self.files.limit == ONE.limit;
        let swap = if is_one { bytes } else { 0 };
        let limit = || fs::write(self.folder.join(self.files.limit), bytes.to_string());
        let first = limit();
        let _ = fs::write(self.folder.join(self.files.swap), swap.to_string());
        if first.is_err() {
            limit()?;
        }
        Ok(())
    }

    /// The words that start a command inside.
    pub(super) fn words(&self) -> Vec<String> {
        let enter = "echo 0 >\"$0\" && exec \"$@\"";
        let procs = self.folder.join("cgroup.procs").display().to_string();
        vec!["sh".to_owned(), "-c".to_owned(), enter.to_owned(), procs]
    }

    /// Returns the bytes in use now, with pages of files.
    pub(super) fn used(&self) -> u64 {
        self.number(self.files.used)
    }

    /// Returns the most bytes that were in use at a time; 0 if the kernel does not say.
    pub(super) fn peak(&self) -> u64 {
        self.number(self.files.peak)
    }

    /// Returns how many processes the kernel has killed for memory.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(super) fn kills(&self) -> Result<u64> {
        let text = fs::read_to_string(self.folder.join(self.files.kills))?;
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        kills.with_context(|| format!("no count of kills: {text}"))
    }

    fn number(&self, file: &str) -> u64 {
        let text = fs::read_to_string(self.folder.join(file)).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..TRIES {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(REST);
        }
    }
}

/// Removes groups of processes that have ended.
fn remove_old(above: &Path) {
    let Ok(entries) = fs::read_dir(above) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_old = name.strip_prefix(NAME).is_some_and(|pid| !Path::new("/proc").join(pid).exists());
        if is_old {
            // Fails while a process is inside: the next run tries again.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Returns the group of this process in the hierarchy that counts memory.
fn parent() -> Result<(PathBuf, &'static Files)> {
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let path = |is: fn(&str) -> bool| {
        own.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            is(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let mount = |kind: &str, option: &str| {
        mounts.lines().find_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            let is_it = fields.get(2) == Some(&kind)
                && (option.is_empty() || fields.get(3)?.split(',').any(|word| word == option));
            is_it.then(|| PathBuf::from(fields[1]))
        })
    };
    let is_memory = |controllers: &str| controllers.split(',').any(|word| word == "memory");
    if let (Some(path), Some(mount)) = (path(is_memory), mount("cgroup", "memory")) {
        return Ok((mount.join(path), &ONE));
    }
    let absent = || Unavailable::Absent("no control group counts memory here".to_owned()).into_error();
    let mount = mount("cgroup2", "").ok_or_else(absent)?;
    let folder = mount.join(path(str::is_empty).unwrap_or_default());
    // A group with processes cannot give its controllers to others: go up to one that does.
    let gives = |folder: &&Path| {
        let given = fs::read_to_string(folder.join("cgroup.subtree_control")).unwrap_or_default();
        given.split_whitespace().any(|word| word == "memory")
    };
    let found = folder.ancestors().take_while(|above| above.starts_with(&mount)).find(gives);
    found.map(|above| (above.to_owned(), &TWO)).ok_or_else(absent)
}
