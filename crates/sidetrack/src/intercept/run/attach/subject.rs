//! Finds what the user wants to attach to, and refuses what cannot be, or would cut the user off.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sidetrack_sys::attach::{self, Container, OpenSockets};
use sidetrack_sys::cgroup::{self, Hierarchy, Leaf};
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::netns::{NAMED, NetNs};
use sidetrack_sys::{nft, process};

use super::{Attach, RunError, Subject, lone, refused};
use crate::intercept::run::resolver_files;

/// The commands of container engines that are asked about a name.
const ENGINES: [&str; 2] = ["podman", "docker"];

/// The beginnings of names of control groups and tables that a sidetrack has made, before its process id.
const OURS: [&str; 2] = ["sidetrack-attach-", "sidetrack-run-"];

/// What is matched.
pub(super) enum Kind {
    /// A process and its descendants, which are moved.
    Process {
        pid: u32,
        /// Its control group, by the path below the mount.
        origin: PathBuf,
    },
    /// A control group where it is.
    Group(Leaf),
    /// All programs of the network.
    Network,
}

/// What was found.
pub(super) struct Found {
    pub(super) kind: Kind,
    pub(super) network: NetNs,
    /// It is our own network.
    pub(super) is_ours: bool,
    /// Its network has no interface but `lo`.
    pub(super) is_lone: bool,
    /// The process whose end is ours.
    pub(super) pid: Option<u32>,
    what: String,
}

impl Found {
    fn new(kind: Kind, network: NetNs, pid: Option<u32>, what: String) -> Result<Self, RunError> {
        let failed =
            |error| RunError::host("look at its network (root, or the owner of its user namespace)", error);
        let is_ours = NetNs::current().and_then(|ours| network.is(&ours)).map_err(failed)?;
        let is_lone = !is_ours && !network.run(|| Ok(has_way_out())).map_err(failed)?;
        // Without a way out there is no route that rules for a group could lead elsewhere.
        let kind = if is_lone { Kind::Network } else { kind };
        let found = Self { kind, network, is_ours, is_lone, pid, what };
        found.refuse_twice()?;
        Ok(found)
    }

    /// Refuses what another sidetrack, or this one, steers already.
    fn refuse_twice(&self) -> Result<(), RunError> {
        let end = match &self.kind {
            Kind::Process { .. } => return Ok(()),
            Kind::Group(leaf) => format!("-{}", leaf.id()),
            Kind::Network => "-net".to_owned(),
        };
        let tables = self.network.run(|| {
            let mut socket = Socket::open(Protocol::Netfilter).map_err(io::Error::other)?;
            nft::list_tables(&mut socket).map_err(io::Error::other)
        });
        let tables = tables.map_err(|error| RunError::host("list the tables of its network", error))?;
        for table in tables {
            let is_same = self.is_lone && table.name == lone::TABLE
                || maker(&table.name).is_some_and(is_alive) && table.name.ends_with(&end);
            if is_same {
                return Err(refused(format!(
                    "{} is caught by sidetrack already (table {}); if that one was killed: `sidetrack cleanup` in that network",
                    self.what, table.name
                )));
            }
        }
        Ok(())
    }

    /// Whether processes are moved.
    pub(super) fn moves(&self) -> bool {
        matches!(self.kind, Kind::Process { .. })
    }

    /// The control group that is matched where it is.
    pub(super) fn existing_group(&self) -> Option<&Leaf> {
        match &self.kind {
            Kind::Group(leaf) => Some(leaf),
            _ => None,
        }
    }

    /// The control group for the rules: the existing one, or a new one below that of the process, whose limits go on holding.
    pub(super) fn leaf(&self) -> Result<Option<Leaf>, RunError> {
        match &self.kind {
            Kind::Network => Ok(None),
            Kind::Group(leaf) => Ok(Some(leaf.clone())),
            Kind::Process { origin, .. } => {
                let below = Hierarchy { own: origin.clone(), ..hierarchy()? };
                let made = below.create_leaf(&group_name());
                made.map(Some).map_err(|error| match error.kind() {
                    io::ErrorKind::ReadOnlyFilesystem => refused(format!(
                        "{} is mounted read-only here: attach from the host, or mount it writable",
                        below.mount.display()
                    )),
                    _ => RunError::host("make a control group below that of the process", error),
                })
            }
        }
    }

    /// The directory of the group that [`Self::leaf`] makes for a process.
    pub(super) fn new_group(&self) -> Result<PathBuf, RunError> {
        let origin = match &self.kind {
            Kind::Process { origin, .. } => origin.as_path(),
            _ => Path::new(""),
        };
        Ok(hierarchy()?.mount.join(origin).join(group_name()))
    }

    /// What it is, in words.
    pub(super) fn describe(&self) -> String {
        let all =
            if self.is_lone && self.pid.is_some() { ": its whole network, which has no way out" } else { "" };
        format!("{}{all}", self.what)
    }

    /// What the user is to know.
    pub(super) fn notices(&self, moved: &[u32]) -> Vec<String> {
        let others = moved.len().saturating_sub(1);
        let with = if others > 0 { format!(" and {others} of its descendants") } else { String::new() };
        let mut told = vec![format!("attached to {}{with}; Ctrl-C detaches", self.describe())];
        let pids = match &self.kind {
            Kind::Process { .. } => moved.to_vec(),
            Kind::Group(leaf) => leaf.pids().unwrap_or_default(),
            Kind::Network => Vec::new(),
        };
        let OpenSockets { connections, datagrams } = attach::open_sockets(&pids);
        if connections > 0 {
            told.push(format!("{connections} connections that were open before stay as they are"));
        }
        if datagrams > 0 && self.moves() {
            told.push(format!("{datagrams} UDP sockets that were open before are not caught"));
        }
        let asks_daemon = |socket: &PathBuf| {
            let root = self.pid.map_or_else(|| PathBuf::from("/"), |pid| format!("/proc/{pid}/root").into());
            socket.strip_prefix("/").is_ok_and(|path| root.join(path).exists())
        };
        let masked = resolver_files::for_resolver(std::net::Ipv4Addr::LOCALHOST.into()).masked_sockets;
        if let Some(socket) = masked.iter().find(|socket| asks_daemon(socket)) {
            told.push(format!(
                "questions about names through {} are not seen; rules for names then use SNI and Host",
                socket.display()
            ));
        }
        told
    }
}

fn group_name() -> String {
    format!("{}{}", OURS[0], std::process::id())
}

fn hierarchy() -> Result<Hierarchy, RunError> {
    Hierarchy::find().map_err(|error| RunError::host("find the control groups of version 2", error))
}

/// Finds the subject.
pub(super) fn find(attach: &Attach) -> Result<Found, RunError> {
    match &attach.subject {
        Subject::Process(pid) => process(*pid, attach.force),
        Subject::Name(name) => named(name),
        Subject::Network(path) => network(path),
    }
}

/// Whether a process is not moved: this one and its children, and what another sidetrack has moved.
pub(super) fn stays(pid: u32) -> bool {
    let own = std::process::id();
    pid == own || attach::ancestors(pid).contains(&own) || caught_by(pid).is_some()
}

/// The sidetrack that has moved this process.
fn caught_by(pid: u32) -> Option<u32> {
    let group = cgroup::path_of(pid).ok()?;
    let makers = group.iter().filter_map(|name| maker(&name.to_string_lossy()));
    makers.into_iter().find(|maker| is_alive(*maker) && *maker != std::process::id())
}

/// The process id in the name of a control group or table of ours.
fn maker(name: &str) -> Option<u32> {
    let rest = OURS.iter().find_map(|begin| name.strip_prefix(begin))?;
    rest.split('-').next()?.parse().ok()
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn process(pid: u32, force: bool) -> Result<Found, RunError> {
    let own = std::process::id();
    let info = process::process_info(pid).map_err(|_| refused(format!("there is no process {pid}")))?;
    let what = format!("process {pid} ({})", info.name);
    if pid == own {
        return Err(refused(format!("{what} is this sidetrack itself")));
    }
    if attach::is_kernel_thread(pid).unwrap_or(false) {
        return Err(refused(format!("{what} is a thread of the kernel: it has no connections of its own")));
    }
    if attach::ancestors(own).contains(&pid) && !force {
        return Err(refused(format!(
            "{what} has started this sidetrack, perhaps as your shell or your ssh login: new connections of all that it starts \
             would be caught. If that is wanted: --force"
        )));
    }
    if let Some(maker) = caught_by(pid) {
        return Err(refused(format!("{what} is caught by sidetrack already (process {maker})")));
    }
    moved(pid, what)
}

/// A process that will be moved.
fn moved(pid: u32, what: String) -> Result<Found, RunError> {
    hierarchy()?;
    let gone = |_| refused(format!("{what} has ended"));
    let origin = cgroup::path_of(pid).map_err(gone)?;
    let network = NetNs::of_process(pid).map_err(gone)?;
    Found::new(Kind::Process { pid, origin }, network, Some(pid), what)
}

fn named(name: &str) -> Result<Found, RunError> {
    let (scheme, rest) = name.split_once(':').unwrap_or(("", name));
    match scheme {
        "cgroup" => {
            let path = PathBuf::from(rest.trim_matches('/'));
            let leaf = hierarchy()?.group(&path);
            return group(
                leaf.map_err(|_| refused(format!("there is no control group {rest}")))?,
                None,
                name.into(),
            );
        }
        "unit" => return one(rest, Vec::new(), units(rest)?),
        _ => {}
    }
    match ENGINES.iter().find(|engine| **engine == scheme) {
        Some(engine) => one(rest, attach::find_container(engine, rest).into_iter().collect(), Vec::new()),
        None => {
            let mut containers: Vec<Container> = Vec::new();
            for found in ENGINES.iter().filter_map(|engine| attach::find_container(engine, name)) {
                // One engine may answer by the command of another.
                if containers.iter().all(|other| other.id != found.id) {
                    containers.push(found);
                }
            }
            one(name, containers, units(name)?)
        }
    }
}

/// Control groups with the name of a unit.
fn units(name: &str) -> Result<Vec<Leaf>, RunError> {
    let is_unit = |leaf: &Leaf| {
        let file = leaf.path().file_name().unwrap_or_default().to_string_lossy();
        file == name
            || [".service", ".scope", ".slice"].iter().any(|end| file.strip_suffix(end) == Some(name))
    };
    if name.is_empty() {
        return Ok(Vec::new());
    }
    Ok(hierarchy()?.leaves(name).into_iter().filter(is_unit).collect())
}

/// Takes the one thing that has this name.
fn one(name: &str, mut containers: Vec<Container>, mut units: Vec<Leaf>) -> Result<Found, RunError> {
    if containers.len() + units.len() > 1 {
        let ways = containers.iter().map(|container| format!("{}:{name}", container.engine));
        let ways = ways.chain(units.iter().map(|leaf| format!("cgroup:/{}", leaf.path().display())));
        let ways: Vec<_> = ways.collect();
        return Err(refused(format!("several things are named {name}: write {}", ways.join(" or "))));
    }
    if let Some(unit) = units.pop() {
        let what = format!("unit {}", unit.path().file_name().unwrap_or_default().to_string_lossy());
        return group(unit, None, what);
    }
    let Some(container) = containers.pop() else {
        return Err(refused(format!(
            "there is no container, unit or control group {name}: write PID, [podman:|docker:]NAME, [unit:]NAME or cgroup:PATH"
        )));
    };
    let what = format!("container {name} of {}", container.engine);
    let Some(pid) = container.pid else {
        return Err(refused(format!("{what} does not run: start it first")));
    };
    let own_group = hierarchy()?.own;
    match cgroup::path_of(pid).ok().filter(|path| !own_group.starts_with(path)) {
        Some(path) => {
            let leaf = hierarchy()?.group(&path).map_err(|_| refused(format!("{what} has ended")))?;
            group(leaf, Some(pid), what)
        }
        // On a host with control groups of version 1, a container may have none of version 2.
        None => moved(pid, what),
    }
}

/// A control group, where it is.
fn group(leaf: Leaf, pid: Option<u32>, what: String) -> Result<Found, RunError> {
    let path = leaf.path().to_owned();
    if hierarchy()?.own.starts_with(&path) {
        return Err(refused(format!(
            "this sidetrack runs in {what} itself: its own connections would be caught"
        )));
    }
    let first = pid.or_else(|| first_process(&leaf));
    let Some(first) = first else { return Err(refused(format!("{what} has no running process"))) };
    let network = NetNs::of_process(first).map_err(|_| refused(format!("{what} has ended")))?;
    Found::new(Kind::Group(leaf), network, pid, what)
}

/// A process in this group or in one below.
fn first_process(leaf: &Leaf) -> Option<u32> {
    let mut waiting = vec![leaf.directory()];
    while let Some(directory) = waiting.pop() {
        let inside = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        if let Some(pid) = inside.lines().find_map(|line| line.parse().ok().filter(|pid| *pid != 0)) {
            return Some(pid);
        }
        let below = fs::read_dir(&directory).into_iter().flatten().flatten();
        waiting.extend(
            below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()),
        );
    }
    None
}

/// A network namespace.
pub(super) fn network(path: &Path) -> Result<Found, RunError> {
    let path = if path.components().count() == 1 { Path::new(NAMED).join(path) } else { path.to_owned() };
    let what = format!("network {}", path.display());
    let network = NetNs::open(&path)
        .map_err(|error| refused(format!("there is no network namespace {}: {error}", path.display())))?;
    // A name of a thread has no process to wait for.
    let pid = path.strip_prefix("/proc").ok().and_then(|rest| rest.iter().next()?.to_str()?.parse().ok());
    let pid = pid.filter(|pid| process::watch(*pid).is_ok());
    let found = Found::new(Kind::Network, network, pid, what)?;
    if found.is_ours {
        return Err(refused(format!(
            "{} is the network of this sidetrack: attach to a process, a unit or a container instead",
            path.display()
        )));
    }
    Ok(found)
}

/// Whether the network of this thread has an interface beside `lo` that is in use: a route, or an address of IPv6.
fn has_way_out() -> bool {
    let uses = |table: &str, column: usize| {
        let rows = fs::read_to_string(format!("/proc/thread-self/net/{table}")).unwrap_or_default();
        // The first row of `route` is its head.
        let rows = rows.lines().filter_map(|row| row.split_whitespace().nth(column));
        rows.into_iter().any(|interface| interface != "lo" && interface != "Iface")
    };
    uses("route", 0) || uses("if_inet6", 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ours_tell_their_maker() {
        assert_eq!(maker("sidetrack-attach-12"), Some(12));
        assert_eq!(maker("sidetrack-attach-12-net"), Some(12));
        assert_eq!(maker("sidetrack-run-7"), Some(7));
        assert_eq!(maker("sidetrack"), None);
        assert_eq!(maker("nginx.service"), None);
    }
}
