//! What `up` changes on a host, read from the kernel: a set of lines, so that two readings can be compared.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sidetrack_sys::cgroup::Hierarchy;
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::{bpf, nft, process, route, sysctl};

/// Interfaces whose programs are listed.
const INTERFACES: [&str; 3] = ["lo", "link1", "link2"];

/// Kernel settings that `up` may change.
const SETTINGS: [&str; 8] = [
    "net/netfilter/nf_conntrack_acct",
    "net/netfilter/nf_conntrack_events",
    "net/netfilter/nf_conntrack_timestamp",
    "net/ipv4/ip_forward",
    "net/ipv4/ip_local_reserved_ports",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/conf/all/rp_filter",
];

/// Tools whose whole output is compared, with the word that begins their lines here.
const TOOLS: [(&str, &str, &[&str]); 6] = [
    (RULESET, "nft", &["-s", "list", "ruleset"]),
    ("rules of IPv4", "ip", &["-4", "rule"]),
    ("rules of IPv6", "ip", &["-6", "rule"]),
    ("routes of IPv4", "ip", &["-4", "route", "show", "table", "all"]),
    ("routes of IPv6", "ip", &["-6", "route", "show", "table", "all"]),
    ("link", "ip", &["-o", "link"]),
];
const RULESET: &str = "ruleset";
const TABLE: &str = "nftables table";
const PROGRAM: &str = "program";

/// The state of a host, as lines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Traces(BTreeSet<String>);

/// How a reading differs from an earlier one.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Not at all.
    None,
    /// Only by a table of ours that no process owns: it blocks traffic.
    Blocked,
    /// Only by BPF programs of ours: what is pinned outlives the process.
    Pinned,
    /// By these lines, each behind "left: " or "gone: ".
    Other(Vec<String>),
}

impl Traces {
    /// Reads what can be read within a few milliseconds, in the network namespace of the calling thread: tables, our rules
    /// and routes, settings, BPF programs, mounts, and processes (those of the namespace, and of `family`).
    ///
    /// # Errors
    /// Not root, or the kernel refuses.
    pub(super) fn quick(family: &[u32]) -> Result<Self> {
        let mut lines = BTreeSet::new();
        let mut socket = Socket::open(Protocol::Netfilter)?;
        for table in nft::list_tables(&mut socket)? {
            lines.insert(format!("{TABLE} {:?} {} owner {:?}", table.family, table.name, table.info.owner));
        }
        let ours = route::ours()?;
        lines.extend(ours.rules.iter().map(|rule| format!("policy rule {rule:?}")));
        lines.extend(ours.local_defaults.iter().map(|default| format!("route {default:?}")));
        for setting in SETTINGS {
            let value = sysctl::read(setting).unwrap_or_else(|_| "absent".to_owned());
            lines.insert(format!("setting {setting} = {value}"));
        }
        programs(&mut lines)?;
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
        lines.extend(mounts.lines().map(|line| format!("mount {line}")));
        processes(family, &mut lines)?;
        Ok(Self(lines))
    }

    /// Adds what takes longer: the whole output of `nft` and `ip`, and control groups that `family` made.
    ///
    /// # Errors
    /// A tool is not installed or fails.
    pub(super) fn full(family: &[u32]) -> Result<Self> {
        let Self(mut lines) = Self::quick(family)?;
        for (name, program, arguments) in TOOLS {
            let output =
                Command::new(program).args(arguments).output().with_context(|| program.to_owned())?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{program} {arguments:?}: {said}");
            let text = String::from_utf8_lossy(&output.stdout);
            lines.extend(text.lines().map(|line| format!("{name}: {}", line.trim())));
        }
        let groups = Hierarchy::find().map(|tree| tree.leaves("sidetrack-")).unwrap_or_default();
        let names = groups.iter().map(|group| group.path().display().to_string());
        let is_theirs = |name: &String| {
            name.split(|c: char| !c.is_ascii_digit())
                .any(|part| part.parse().is_ok_and(|pid: u32| family.contains(&pid)))
        };
        lines.extend(names.filter(is_theirs).map(|name| format!("control group {name}")));
        Ok(Self(lines))
    }

    /// Compares with an earlier reading.
    pub(super) fn since(&self, before: &Self) -> Change {
        let left: Vec<&String> = self.0.difference(&before.0).collect();
        let gone: Vec<&String> = before.0.difference(&self.0).collect();
        if left.is_empty() && gone.is_empty() {
            return Change::None;
        }
        let (tables, rest): (Vec<&String>, Vec<&String>) = left
            .iter()
            .copied()
            .filter(|line| !line.starts_with(RULESET))
            .partition(|line| line.starts_with(TABLE));
        let is_block = |line: &str| line.contains(" sidetrack ") && line.ends_with("owner None");
        if gone.is_empty() && rest.is_empty() && tables.len() == 1 && is_block(tables[0]) {
            return Change::Blocked;
        }
        if gone.is_empty() && left.iter().all(|line| line.starts_with(PROGRAM)) {
            return Change::Pinned;
        }
        let left = left.into_iter().map(|line| format!("left: {line}"));
        Change::Other(left.chain(gone.into_iter().map(|line| format!("gone: {line}"))).collect())
    }

    /// Says what there is in addition to an earlier reading, by kind.
    pub(super) fn beyond(&self, before: &Self) -> String {
        let count = |start: &str| self.0.difference(&before.0).filter(|line| line.starts_with(start)).count();
        format!(
            "{} | {} | {} | {} | {} | {}",
            count(TABLE),
            count("policy rule"),
            count("route "),
            count("setting"),
            count(PROGRAM),
            count("process")
        )
    }

    /// Returns how many BPF programs there are.
    pub(super) fn programs(&self) -> usize {
        self.0.iter().filter(|line| line.starts_with(PROGRAM)).count()
    }

    /// Returns true if all links are up and the kernel has given them their addresses of IPv6; it does so a moment after
    /// the command.
    pub(super) fn are_links_up(&self) -> bool {
        let count = |start: &str, word: &str| {
            self.0.iter().filter(|line| line.starts_with(start) && line.contains(word)).count()
        };
        count("link: ", " state UP ") == 2
            && count("routes of IPv6: local fe80:", " link") == 2
            && count("routes of IPv6: multicast ff00::/8", " link") == 2
    }
}

fn programs(lines: &mut BTreeSet<String>) -> Result<()> {
    for interface in INTERFACES {
        let index = route::interface_index(interface)?;
        let found = match bpf::attached(index) {
            // Before Linux 6.6 there are none at these hooks.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Vec::new(),
            found => found.with_context(|| format!("the BPF programs of {interface}"))?,
        };
        lines.extend(found.iter().map(|(hook, id)| format!("{PROGRAM} {interface} {hook:?} {id}")));
    }
    Ok(())
}

/// Processes of this network namespace, and those of `family` wherever they are. One that waits for its parent to take
/// note of its end has ended.
fn processes(family: &[u32], lines: &mut BTreeSet<String>) -> Result<()> {
    let here = fs::metadata("/proc/thread-self/ns/net")?.ino();
    let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_here = |pid: u32| process::namespace_inode(pid, "net").is_ok_and(|inode| inode == here);
    for pid in pids.filter(|pid| family.contains(pid) || is_here(*pid)) {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((name, rest)) = stat.rsplit_once(')') else { continue };
        if !rest.trim_start().starts_with(['Z', 'X']) {
            lines.insert(format!("process {name})"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Traces {
        Traces(lines.iter().map(|line| (*line).to_owned()).collect())
    }

    #[test]
    fn a_table_without_an_owner_is_a_block_and_everything_else_is_left_behind() {
        let before = of(&["setting a = 0", "nftables table Some(Inet) filter owner None"]);
        assert_eq!(before.since(&before), Change::None);
        let with = |more: &[&str]| {
            let mut lines = before.clone();
            lines.0.extend(more.iter().map(|line| (*line).to_owned()));
            lines
        };
        let block = "nftables table Some(Inet) sidetrack owner None";
        assert_eq!(with(&[block, "ruleset: table inet sidetrack {"]).since(&before), Change::Blocked);
        let owned = "nftables table Some(Inet) sidetrack owner Some(7)";
        assert_eq!(with(&[owned]).since(&before), Change::Other(vec![format!("left: {owned}")]));
        let both = with(&[block, "process 7 (sidetrack)"]).since(&before);
        assert!(matches!(&both, Change::Other(lines) if lines.len() == 2), "{both:?}");
        assert_eq!(with(&["program link1 TcxIngress 7"]).since(&before), Change::Pinned);
        assert!(matches!(with(&["program link1 TcxIngress 7", block]).since(&before), Change::Other(_)));
        assert!(matches!(with(&["ruleset: rule"]).since(&before), Change::Other(_)));
        let gone = of(&["setting a = 0"]).since(&before);
        assert_eq!(gone, Change::Other(vec!["gone: nftables table Some(Inet) filter owner None".into()]));
    }
}
