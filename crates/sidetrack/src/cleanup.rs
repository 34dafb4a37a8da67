//! `sidetrack cleanup`: finds what a crash has left behind, and removes it.
//!
//! Normally nothing is left: rules vanish with the process that owns them, and a guard process undoes the rest
//! even after SIGKILL. These can be left: a table of `on_crash = "closed"` and flows on the wire (intended); everything, on kernels
//! without owned tables or if the guard was killed too; empty control groups; and a socket without a listener.

use sidetrack_sys::cgroup::{Hierarchy, Leaf};
use sidetrack_sys::netlink::{Error, Protocol, Socket};
use sidetrack_sys::route::{RUN_MARKS, RUN_PID_BITS};
use sidetrack_sys::undo::Action;
use sidetrack_sys::{bpf, nft, probe, process, route};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Prefix of our tables and control groups.
pub const PREFIX: &str = "sidetrack";

/// The places to search.
#[derive(Clone, Debug)]
pub struct Places {
    /// Base name of the program. Its running instances are left alone.
    pub program: String,
    /// Admin sockets that may be stale.
    pub sockets: Vec<PathBuf>,
    /// A folder of flows on the wire that may have been left, besides the usual ones.
    pub pins: Option<PathBuf>,
}

/// A running instance in this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its process id.
    pub pid: u32,
    /// Its sub-command: `up` or `keeper`.
    pub command: String,
}

/// The result of the search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// The actions that remove the leftovers.
    pub leftovers: Vec<Action>,
    /// Running instances. Whatever may belong to them is not in `leftovers`.
    pub running: Vec<Running>,
    /// What could not be searched, and why.
    pub unseen: Vec<String>,
}

/// Searches for leftovers. Changes nothing.
pub fn survey(places: &Places) -> Survey {
    let mut survey = Survey { running: running(&places.program), ..Survey::default() };
    if survey.running.is_empty() {
        survey.look("nftables", tables());
        survey.look("policy rules and routes", routes());
    }
    let pins = places.pins.iter().filter(|folder| bpf::Pins::lock(folder).is_ok()).cloned();
    survey.leftovers.extend(bpf::abandoned_pins().into_iter().chain(pins).map(Action::EndWire));
    survey.leftovers.extend(cgroups_of_attach());
    survey.leftovers.extend(empty_cgroups());
    survey.leftovers.extend(places.sockets.iter().flat_map(|path| stale_sockets(path)));
    survey
}

impl Survey {
    fn look(&mut self, what: &str, found: Result<Vec<Action>, Error>) {
        match found {
            Ok(actions) => self.leftovers.extend(actions),
            Err(error) if error.errno() == Some(libc::EPERM) => {
                self.unseen.push(format!("{what}: only root may look; sudo sidetrack cleanup"));
            }
            Err(error) => self.unseen.push(format!("{what}: {error}")),
        }
    }
}

/// Whether an object with this name is ours and no longer used, judging by its name. `run --mode cgroup` puts
/// its process id at the end of names, `attach` puts it into them.
fn is_abandoned(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    let maker = rest.strip_prefix("-run-").or_else(|| rest.strip_prefix("-attach-"));
    // `attach` adds what its table is for.
    let pid = maker.and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
    (rest.is_empty() || rest.starts_with('-')) && !pid.is_some_and(is_alive)
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Our tables that no living process owns.
fn tables() -> Result<Vec<Action>, Error> {
    let mut socket = Socket::open(Protocol::Netfilter)?;
    let ours = nft::list_tables(&mut socket)?
        .into_iter()
        .filter(|table| table.info.owner.is_none() && is_abandoned(&table.name));
    Ok(ours
        .filter_map(|table| Some(Action::DeleteTable { family: table.family?, name: table.name }))
        .collect())
}

/// Policy rules and local default routes with our protocol tag.
fn routes() -> Result<Vec<Action>, Error> {
    let ours = route::ours()?;
    // Those of a running command have its process id in the mark, which is the table's number too.
    let is_over = |mark: u32| mark & !RUN_PID_BITS != RUN_MARKS || !is_alive(mark & RUN_PID_BITS);
    let rules = ours.rules.into_iter().filter(|rule| is_over(rule.mark)).map(Action::RemoveMarkRule);
    let routes = ours
        .local_defaults
        .into_iter()
        .filter(|(_, _, table)| is_over(*table))
        .map(|(version, interface, table)| Action::RemoveLocalDefault { version, interface, table });
    Ok(rules.chain(routes).collect())
}

/// Groups of an `attach` that was killed together with its guard: what runs in them goes back to the group around them.
fn cgroups_of_attach() -> Vec<Action> {
    let Ok(hierarchy) = Hierarchy::find() else { return Vec::new() };
    let leaves = hierarchy.leaves(&format!("{PREFIX}-attach-")).into_iter();
    let named =
        |leaf: &Leaf| leaf.path().file_name().is_some_and(|name| is_abandoned(&name.to_string_lossy()));
    let held = leaves.filter(|leaf| named(leaf) && leaf.pids().is_ok_and(|pids| !pids.is_empty()));
    held.flat_map(|leaf| {
        let from = leaf.directory();
        let to = from.parent().unwrap_or(&from).to_owned();
        [Action::ReturnProcesses { from: from.clone(), to, pid: 0 }, Action::RemoveDirectory(from)]
    })
    .collect()
}

fn empty_cgroups() -> Vec<Action> {
    let Ok(hierarchy) = Hierarchy::find() else { return Vec::new() };
    let leaves = hierarchy.leaves(&format!("{PREFIX}-")).into_iter();
    let named =
        |leaf: &Leaf| leaf.path().file_name().is_some_and(|name| is_abandoned(&name.to_string_lossy()));
    let empty = leaves.filter(|leaf| named(leaf) && leaf.pids().is_ok_and(|pids| pids.is_empty()));
    empty.map(|leaf| Action::RemoveDirectory(leaf.directory())).collect()
}

/// The socket itself, and the temporary names of sockets (`.admin.sock.PID`).
fn stale_sockets(path: &Path) -> Vec<Action> {
    let hidden = format!(".{}.", path.file_name().unwrap_or_default().to_string_lossy());
    let beside = path.parent().and_then(|directory| fs::read_dir(directory).ok());
    let half_made = beside.into_iter().flatten().flatten().filter(|entry| {
        let name = entry.file_name();
        let pid =
            name.to_str().and_then(|name| name.strip_prefix(&hidden)).and_then(|pid| pid.parse::<u32>().ok());
        pid.is_some_and(|pid| !is_alive(pid))
    });
    let candidates = std::iter::once(path.to_owned()).chain(half_made.map(|entry| entry.path()));
    candidates.filter(|path| probe::socket_is_stale(path)).map(Action::RemoveFile).collect()
}

/// Returns other processes of this program in this network namespace that hold rules.
fn running(program: &str) -> Vec<Running> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let own = fs::metadata("/proc/thread-self/ns/net").map(|metadata| metadata.ino()).ok();
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| *pid != std::process::id())
        .filter(|pid| process::process_info(*pid).is_ok_and(|info| info.name == program))
        .filter(|pid| process::namespace_inode(*pid, "net").ok() == own)
        .filter_map(|pid| Some(Running { pid, command: sub_command(pid)? }))
        .collect()
}

/// Whether a process is the guard of an `attach` that steers this network from another one: its table may have no name of its own.
fn is_guard_of_another_network(pid: u32) -> bool {
    let is_guard =
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sidetrack-guard");
    let maker = process::process_info(pid).map(|info| info.parent_pid);
    let network = |pid| process::namespace_inode(pid, "net").ok();
    is_guard && maker.is_ok_and(|maker| network(maker).is_some_and(|other| Some(other) != network(pid)))
}

fn sub_command(pid: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = line.split(|byte| *byte == 0).skip(1).map(String::from_utf8_lossy);
    let guards = is_guard_of_another_network(pid);
    let holds = |word: &str| ["up", "keeper"].contains(&word) || guards && ["attach", "run"].contains(&word);
    words.into_iter().find(|word| holds(word)).map(|word| word.into_owned())
}

#[cfg(test)]
mod tests {
    use super::is_abandoned;

    #[test]
    fn names_tell_what_is_ours_and_whether_its_maker_lives() {
        let of_attach = ["sidetrack-attach-4194305", "sidetrack-attach-4194305-net"];
        for name in ["sidetrack", "sidetrack-old", "sidetrack-run-4194305", "sidetrack-run-"]
            .into_iter()
            .chain(of_attach)
        {
            assert!(is_abandoned(name), "{name}");
        }
        let alive = format!("sidetrack-run-{}", std::process::id());
        let attached = format!("sidetrack-attach-{}-net", std::process::id());
        for name in ["", "filter", "sidetracker", "my-sidetrack", &alive, &attached] {
            assert!(!is_abandoned(name), "{name}");
        }
    }
}
