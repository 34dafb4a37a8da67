//! Maps of user and group ids (user_namespaces(7)).

use std::fs;
use std::io::{self, Write};

/// In a user namespace just made by the calling process: `inside` ids stand for the one user and group
/// `outside`. Groups cannot be changed inside any more; the kernel asks that of unprivileged maps.
pub(super) fn map_one(inside: (u32, u32), outside: (u32, u32)) -> io::Result<()> {
    write("/proc/self/setgroups", "deny")?;
    write("/proc/self/uid_map", &format!("{} {} 1", inside.0, outside.0))?;
    write("/proc/self/gid_map", &format!("{} {} 1", inside.1, outside.1))
}

/// As root, for the user namespace that process `pid` has just made: every id that exists here stands for
/// itself there.
pub(super) fn map_all(pid: i32) -> io::Result<()> {
    for name in ["uid_map", "gid_map"] {
        let ours = fs::read_to_string(format!("/proc/self/{name}"))?;
        write(&format!("/proc/{pid}/{name}"), &identity(&ours))?;
    }
    Ok(())
}

/// The ids that a map gives meaning to inside, each standing for itself.
fn identity(map: &str) -> String {
    map.lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let (first, count) = (fields.next()?, fields.nth(1)?);
            Some(format!("{first} {first} {count}\n"))
        })
        .collect()
}

/// The kernel takes a map in one write only.
fn write(path: &str, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_maps_keep_the_inside_ids() {
        assert_eq!(identity("         0          0 4294967295\n"), "0 0 4294967295\n");
        assert_eq!(identity("0 1000 1\n1 100000 65536\n"), "0 0 1\n1 1 65536\n");
        assert_eq!(identity(""), "");
    }
}
