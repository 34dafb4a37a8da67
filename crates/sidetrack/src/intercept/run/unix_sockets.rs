//! Unix sockets of this host that a jailed command must not reach.
//!
//! A network namespace does not confine sockets with a path: a container engine, D-Bus or an SSH agent behind one acts outside. So those
//! that exist when the command starts are covered in its mount namespace. Those that it makes itself work.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Which unix sockets a command may use. Abstract ones belong to a network namespace: it sees its own only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UnixSockets {
    /// Those of the host, too.
    #[default]
    All,
    /// Its own, and these of the host.
    Own(Vec<PathBuf>),
    /// Its own that have no path. It makes no socket with a path.
    Abstract,
    /// None. Pairs of connected sockets are possible.
    None,
}

/// Folders in which sockets are looked for, with the number of levels. The kernel lists only those of this network namespace.
const FOLDERS: [(&str, usize); 2] = [("/run", 5), ("/tmp", 3)];

/// Most folders and files that are looked at.
const LOOKED_AT_MAX: usize = 20_000;

impl UnixSockets {
    /// Returns the sockets of this host to cover.
    pub(super) fn covered(&self) -> Vec<PathBuf> {
        let allowed = match self {
            Self::Own(allowed) => allowed.as_slice(),
            Self::Abstract => &[],
            Self::All | Self::None => return Vec::new(),
        };
        let real = |path: &PathBuf| fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        let allowed: BTreeSet<_> = allowed.iter().map(real).collect();
        let listed = fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let mut found: BTreeSet<_> = paths_of(&listed).filter(|path| is_socket(path)).collect();
        let mut left = LOOKED_AT_MAX;
        for (folder, levels) in FOLDERS {
            look_into(Path::new(folder), levels, &mut left, &mut found);
        }
        found.iter().map(real).collect::<BTreeSet<_>>().difference(&allowed).cloned().collect()
    }
}

/// The paths in `/proc/net/unix` (proc(5)): the eighth column, if it begins with a slash.
fn paths_of(listed: &str) -> impl Iterator<Item = PathBuf> + '_ {
    listed.lines().filter_map(|line| {
        let at = line.find(" /")?;
        (line.split_whitespace().count() >= 8).then(|| line.split_at(at + 1).1.into())
    })
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn look_into(folder: &Path, levels: usize, left: &mut usize, found: &mut BTreeSet<PathBuf>) {
    // The command cannot read what we cannot.
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        match entry.file_type() {
            Ok(kind) if kind.is_socket() => {
                found.insert(entry.path());
            }
            Ok(kind) if kind.is_dir() && levels > 1 => look_into(&entry.path(), levels - 1, left, found),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_from_the_kernels_list() {
        let listed = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 21014 /run/a b.sock\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 21015 @/abstract\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 21016\n";
        assert_eq!(paths_of(listed).collect::<Vec<_>>(), [Path::new("/run/a b.sock")]);
    }

    #[test]
    fn sockets_of_the_host_are_covered_but_for_those_that_are_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().canonicalize().unwrap().join(name);
        let _one = std::os::unix::net::UnixListener::bind(path("one")).unwrap();
        let _other = std::os::unix::net::UnixDatagram::bind(path("other")).unwrap();
        let covered = UnixSockets::Own(vec![path("other")]).covered();
        assert!(covered.contains(&path("one")) && !covered.contains(&path("other")), "{covered:?}");
        assert_eq!(UnixSockets::All.covered(), UnixSockets::None.covered());
    }
}
