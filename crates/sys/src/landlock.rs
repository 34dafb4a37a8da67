//! Which files a process may open from now on (Landlock, landlock(7), since Linux 5.13). Descriptors that are open stay so.

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus,
};
use std::io;
use std::path::{Path, PathBuf};

/// What a process may do below a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum May {
    /// Read files and list folders.
    Read,
    /// Also write to files and make new ones.
    Append,
    /// Also remove and rename files, and make and remove folders.
    Change,
    /// Remove files, and nothing else.
    RemoveFiles,
    /// Remove empty folders, and nothing else.
    RemoveFolders,
}

/// A path with what is allowed there: a folder with all below it, or one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// The path. One that is not there is left out.
    pub path: PathBuf,
    /// What is allowed.
    pub may: May,
}

/// How much of a restriction this kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforced {
    /// All that Landlock knows about files.
    Fully,
    /// An older Landlock: some kinds of access (rename, truncate, ioctl) are not restricted.
    Partly,
    /// The kernel has no Landlock, or it is switched off.
    No,
}

/// The newest version whose kinds of access are used. Later ones restrict sockets, which name services need.
const NEWEST: ABI = ABI::V5;

impl May {
    fn access(self) -> BitFlags<AccessFs> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let append = read | AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::Truncate;
        match self {
            Self::Read => read,
            Self::Append => append,
            Self::Change => {
                append | AccessFs::MakeDir | AccessFs::RemoveFile | AccessFs::RemoveDir | AccessFs::Refer
            }
            Self::RemoveFiles => AccessFs::RemoveFile.into(),
            Self::RemoveFolders => AccessFs::RemoveDir.into(),
        }
    }
}

/// Restricts this thread, and those that it starts, to these paths, for good. It sets no_new_privs.
///
/// # Errors
/// What the kernel says; nothing is restricted then.
pub fn restrict(allowed: &[Allowed]) -> io::Result<Enforced> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .map_err(io::Error::other)?
        .create()
        .map_err(io::Error::other)?;
    for Allowed { path, may } in allowed {
        let Ok(opened) = PathFd::new(path) else { continue };
        // For one file the kinds of access that folders have mean nothing.
        let access = if path.is_dir() { may.access() } else { may.access() & AccessFs::from_file(NEWEST) };
        if access.is_empty() {
            continue;
        }
        rules = rules.add_rule(PathBeneath::new(opened, access)).map_err(io::Error::other)?;
    }
    let status = rules.restrict_self().map_err(io::Error::other)?;
    Ok(match status.ruleset {
        RulesetStatus::FullyEnforced => Enforced::Fully,
        RulesetStatus::PartiallyEnforced => Enforced::Partly,
        RulesetStatus::NotEnforced => Enforced::No,
    })
}

/// Forbids this thread, and those that it starts, to make unix sockets with a path, for good. It sets no_new_privs, and no mount can be
/// changed any more.
///
/// # Errors
/// The kernel has no Landlock, or it is switched off.
pub(crate) fn forbid_socket_files() -> io::Result<()> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::MakeSock)
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    rules.map(drop).map_err(|error| io::Error::other(format!("--unix abstract needs Landlock: {error}")))
}

/// The version of Landlock in this kernel; none if it has none or Landlock is switched off.
pub fn version() -> Option<u32> {
    const VERSION: libc::c_long = 1;
    // SAFETY: with a null pointer, no size and this flag the call reads nothing and gives a number.
    #[allow(unsafe_code, reason = "the crate does not tell the version")]
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, VERSION) };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

/// The folder whose files belong together with this file, or the file alone where its folder is one that all programs share.
///
/// Editors and configuration tools replace the old file by a new one: only a folder allows to read that one, too.
pub fn around(file: &Path) -> PathBuf {
    const SHARED: &[&str] = &[
        "/",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/media",
        "/mnt",
        "/opt",
        "/proc",
        "/root",
        "/run",
        "/srv",
        "/sys",
        "/tmp",
        "/usr",
        "/var",
        "/var/cache",
        "/var/lib",
        "/var/log",
        "/var/run",
        "/var/tmp",
    ];
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let Ok(real) = folder.canonicalize() else { return folder.to_owned() };
    if SHARED.iter().any(|shared| Path::new(shared) == real) { file.to_owned() } else { folder.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A restriction is a thread's own.
    fn restricted(allowed: Vec<Allowed>, test: impl FnOnce() + Send + 'static) {
        if version().is_none() {
            return eprintln!("skipped: needs Landlock");
        }
        std::thread::spawn(move || {
            restrict(&allowed).unwrap();
            test();
        })
        .join()
        .unwrap();
    }

    fn refused<T>(result: io::Result<T>) -> bool {
        result.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    }

    #[test]
    fn what_is_not_allowed_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["read", "append", "change", "other"] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("file"), "text").unwrap();
        }
        let allowed = [("read", May::Read), ("append", May::Append), ("change", May::Change)];
        let allowed = allowed.map(|(name, may)| Allowed { path: at(name), may }).to_vec();
        let root = folder.path().to_owned();
        restricted(allowed, move || {
            let at = |name: &str| root.join(name);
            // Read.
            assert_eq!(fs::read_to_string(at("read/file")).unwrap(), "text");
            assert!(refused(fs::read_to_string(at("other/file"))) && refused(fs::read_dir(at("other"))));
            assert!(refused(fs::read("/etc/hostname").or_else(|_| fs::read("/etc/passwd"))));
            // Write.
            assert!(refused(fs::write(at("read/file"), "")) && refused(fs::write(at("other/new"), "")));
            fs::write(at("append/new"), "text").unwrap();
            // Remove and rename.
            assert!(refused(fs::remove_file(at("append/new"))));
            fs::rename(at("change/file"), at("change/moved")).unwrap();
            assert!(fs::rename(at("change/moved"), at("other/moved")).is_err());
            fs::create_dir(at("change/folder")).unwrap();
            fs::remove_dir(at("change/folder")).unwrap();
            fs::remove_file(at("change/moved")).unwrap();
        });
    }

    #[test]
    fn what_is_open_stays_open_and_one_file_can_be_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::write(&one, "1").unwrap();
        fs::write(&two, "2").unwrap();
        let open = fs::File::open(&two).unwrap();
        let missing = Allowed { path: folder.path().join("missing"), may: May::Read };
        restricted(vec![Allowed { path: one.clone(), may: May::Read }, missing], move || {
            assert_eq!(fs::read_to_string(one).unwrap(), "1");
            assert!(refused(fs::read_to_string(two)));
            assert_eq!(io::read_to_string(open).unwrap(), "2");
        });
    }

    #[test]
    fn folders_that_all_programs_share_are_not_allowed_as_a_whole() {
        assert_eq!(around(Path::new("/etc/sidetrack.toml")), Path::new("/etc/sidetrack.toml"));
        assert_eq!(around(Path::new("/etc/sidetrack/sidetrack.toml")), Path::new("/etc/sidetrack"));
        assert_eq!(around(Path::new("/etc/../etc/x")), Path::new("/etc/../etc/x"));
    }
}
