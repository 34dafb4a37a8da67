//! `sidetrack attach` and `run --netns`: catches programs that run already, and networks that exist.
//!
//! | subject | what is matched | where |
//! |---|---|---|
//! | a process | a control group of ours, into which it and its descendants are moved, and from which they return | its network |
//! | a container, a unit, a control group | the control group where it is; no process is moved | its network |
//! | a network namespace | its programs | the network itself |
//!
//! A network without a way out but `lo` has no routes that rules could change. There all addresses are made local, as in the network of
//! `run`; that is [`lone`]. Everywhere else, [`rules`] match. In both cases the guard takes everything back in that network.

mod lone;
mod rules;
mod subject;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sidetrack_core::names::RESOLVER;
use sidetrack_sys::attach::{self, End, Watch};
use sidetrack_sys::caps;
use sidetrack_sys::cgroup::{Hierarchy, Leaf};
use sidetrack_sys::exec::{Ended, Program, spawn_in_network};
use sidetrack_sys::nfqueue::HoldSockets;
use sidetrack_sys::nft::OwnedTable;
use sidetrack_sys::process;
use sidetrack_sys::sockdiag::SockDiag;
use sidetrack_sys::udp;
use sidetrack_sys::udp::answers::AnswerSockets;
use sidetrack_sys::undo::{Action, Guard};

use super::{
    Launched, RunError, RunOptions, Subject as Watched, all_private_files, cgroup, cgroup_datagrams,
};
use crate::dns::{self, SharedNames};
use subject::{Found, Kind};

/// Attempts to find a port that is free on both 127.0.0.1 and ::1.
const ATTEMPTS: u8 = 100;

/// What is attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A process with its descendants.
    Process(u32),
    /// A container, a unit of systemd or a control group, as the user wrote it.
    Name(String),
    /// A network namespace by its path.
    Network(PathBuf),
}

/// What is attached to, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attach {
    /// The subject.
    pub subject: Subject,
    /// When it is left by itself.
    pub ends_after: Option<Duration>,
    /// Leave its questions about names alone: they are datagrams as others.
    pub keeps_dns: bool,
    /// Attach also to a process that has started us.
    pub force: bool,
}

/// What was installed for a subject, and what waits for its end.
#[derive(Debug)]
pub(super) struct Attached {
    table: Option<OwnedTable>,
    guard: Option<Guard>,
    /// All addresses of its network are local.
    is_lone: bool,
    notices: Vec<String>,
}

/// Sockets in the network of a subject.
struct Caught {
    listeners: Vec<std::net::TcpListener>,
    datagrams: Vec<UdpSocket>,
    answers: Arc<AnswerSockets>,
    dns: Vec<UdpSocket>,
    hold: Option<HoldSockets>,
    owners: Option<SockDiag>,
    table: Option<OwnedTable>,
}

/// Waits for the end of what is attached to.
#[derive(Debug)]
pub(super) struct Running {
    watch: Watch,
    limit: Option<Duration>,
    pid: u32,
}

impl Running {
    /// The process whose descendants are looked through for the owner of a socket.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits; the exit code is 0.
    pub(super) fn wait(&self) -> io::Result<Ended> {
        let end = self.watch.wait(self.limit)?;
        let why = match end {
            End::Signal => "a signal asked for it",
            End::Process => "what was attached to has ended",
            End::Time => "the time is over",
        };
        tracing::debug!("detaches: {why}");
        Ok(Ended::Exit(0))
    }
}

fn refused(text: impl Into<String>) -> RunError {
    RunError::Refused(text.into())
}

fn refuse_unless_root() -> Result<(), RunError> {
    match caps::is_network_root() {
        true => Ok(()),
        false => Err(refused("attach needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN): run it with sudo")),
    }
}

/// Attaches to a running subject.
pub(super) fn launch(
    attach: &Attach,
    names: SharedNames,
    options: &RunOptions,
) -> Result<Launched, RunError> {
    refuse_unless_root()?;
    let found = subject::find(attach)?;
    // Before the rules: from here on a signal lets us end in order.
    let group = found.existing_group().filter(|_| found.pid.is_none());
    let watch = Watch::start(found.pid, group).map_err(|error| RunError::host("watch it", error))?;
    let running = Running { watch, limit: attach.ends_after, pid: found.pid.unwrap_or(1) };
    let running = Watched::Running(Arc::new(running));
    let (attached, caught) = Attached::build(&found, options.hold, !attach.keeps_dns)?;
    Ok(launched(attached, caught, running, names))
}

/// Steers an existing network and starts the command in it.
pub(super) fn launch_in(
    path: &Path,
    program: &Program,
    names: SharedNames,
    options: &RunOptions,
) -> Result<Launched, RunError> {
    if !caps::is_network_root() {
        return Err(refused(
            "run --netns needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), in the user namespace that owns that network: \
             use sudo; for a rootless container of podman, `podman unshare`",
        ));
    }
    let found = subject::network(path)?;
    let (attached, caught) = Attached::build(&found, options.hold, true)?;
    let resolver = if attached.is_lone { RESOLVER } else { Ipv4Addr::LOCALHOST };
    let files = all_private_files(resolver.into(), options);
    let (child, questions) = spawn_in_network(program, &files, &found.network)?;
    let child = Watched::Command(Arc::new(child));
    let launched = launched(attached, caught, child, names);
    Ok(Launched { questions, ..launched })
}

/// What takes the rules and routes for a subject back.
fn undoing(found: &Found, name: &str) -> Result<Vec<Action>, RunError> {
    let undo = match found.is_lone {
        true => lone::undoing(&found.network),
        false => rules::undoing(&found.network, name),
    };
    undo.map_err(|error| RunError::host("look at its network", error))
}

/// Says what `attach` would do and how it would be undone. Changes nothing.
///
/// # Errors
/// It cannot be attached to; says why.
pub fn plan(attach: &Attach) -> Result<String, RunError> {
    refuse_unless_root()?;
    let found = subject::find(attach)?;
    let mut text = format!("attach to {}\n", found.describe());
    let mut undo = undoing(&found, &table_name(&found))?;
    if let Kind::Process { pid, origin } = &found.kind {
        let count = process::process_tree(*pid).into_iter().filter(|pid| !subject::stays(*pid)).count();
        text.push_str(&format!(
            "  move {count} processes into a new control group below /{}\n",
            origin.display()
        ));
        undo.push(Action::RemoveDirectory(found.new_group()?));
        let to = Hierarchy::find().map_err(|error| RunError::host("find cgroup2", error))?.mount.join(origin);
        undo.push(Action::ReturnProcesses { from: found.new_group()?, to, pid: 0 });
    }
    text.push_str(if found.is_lone {
        "  make all addresses of its network local, and catch all that its programs send\n"
    } else {
        "  in its network, catch connections that begin, datagrams and questions about names\n  drop what else would leave it\n"
    });
    text.push_str("undo, also after SIGKILL\n");
    undo.iter().rev().for_each(|action| text.push_str(&format!("  {action}\n")));
    Ok(text)
}

fn launched(attached: Attached, caught: Caught, subject: Watched, names: SharedNames) -> Launched {
    let mut dns = caught.dns.into_iter();
    let resolver = match attached.is_lone {
        true => SocketAddr::from((RESOLVER, dns::PORT)),
        false => SocketAddr::from((Ipv4Addr::LOCALHOST, dns::PORT)),
    };
    Launched {
        listeners: caught.listeners,
        datagrams: caught.datagrams,
        answers: Some(caught.answers),
        names,
        hold: caught.hold,
        questions: None,
        owners: caught.owners,
        packets: None,
        inside: None,
        child: subject,
        dns: dns.next(),
        dns_v6: dns.next(),
        resolver,
        host: None,
        attached: Some(attached),
    }
}

impl Attached {
    /// Installs everything, and moves the processes last.
    fn build(found: &Found, hold: bool, dns: bool) -> Result<(Self, Caught), RunError> {
        let leaf = found.leaf()?;
        let is_lone = found.is_lone;
        let name = table_name(found);
        let mut undo = undoing(found, &name)?;
        if let (Some(leaf), Kind::Process { .. }) = (&leaf, &found.kind) {
            undo.push(Action::RemoveDirectory(leaf.directory()));
        }
        let guard = if found.is_ours { Guard::spawn(&undo) } else { Guard::spawn_in(&found.network, &undo) };
        let guard = guard.map_err(|error| {
            // Without a guard, only this is there yet.
            let _ = leaf.as_ref().filter(|_| found.moves()).map(Leaf::remove);
            RunError::host("enter its network (root, or the owner of its user namespace)", error)
        })?;
        // From here on, dropping it takes everything back after an error.
        let mut attached = Self { table: None, guard: Some(guard), is_lone, notices: Vec::new() };
        let install = || {
            Ok(match is_lone {
                true => lone::install(hold),
                false => rules::install(found, leaf.as_ref(), &name, (hold, dns)),
            })
        };
        let installed = found.network.run(install);
        let mut caught = installed.map_err(|error| RunError::host("enter its network", error))??;
        attached.table = caught.table.take();
        attached.gather(found, leaf.as_ref())?;
        Ok((attached, caught))
    }

    /// Moves the processes, and says what is attached to.
    fn gather(&mut self, found: &Found, leaf: Option<&Leaf>) -> Result<(), RunError> {
        let mut pids = Vec::new();
        if let (Kind::Process { pid, origin }, Some(leaf), Some(guard)) = (&found.kind, leaf, &mut self.guard)
        {
            let hierarchy = Hierarchy::find().map_err(|error| RunError::host("find cgroup2", error))?;
            let back = |to: &Path, pid| Action::ReturnProcesses {
                from: leaf.directory(),
                to: hierarchy.mount.join(to),
                pid,
            };
            let lost = |error| RunError::host("tell the process that cleans up after a crash", error);
            guard.add(&back(origin, 0)).map_err(lost)?;
            let before = |pid, from: &Path| match from == origin {
                true => Ok(()),
                false => guard.add(&back(from, pid)),
            };
            pids = attach::gather(leaf, *pid, subject::stays, before)
                .map_err(|error| RunError::host("move the process into a control group", error))?;
        }
        self.notices = found.notices(&pids);
        Ok(())
    }

    /// What the user is to know, once.
    pub(super) fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Whether all addresses of the network are local.
    pub(super) fn is_lone(&self) -> bool {
        self.is_lone
    }

    /// Takes everything back. The guard does it: this process has given up its capabilities.
    pub(super) fn remove(mut self) -> Result<(), RunError> {
        self.release().map_err(|error| RunError::host("take the rules and the control group back", error))
    }

    fn release(&mut self) -> io::Result<()> {
        let Some(guard) = self.guard.take() else { return Ok(()) };
        self.table = None;
        guard.finish()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // On error paths an error here cannot be handled.
        let _ = self.release();
    }
}

/// The table's name has our process id, for `cleanup`, and what it is for, so that the same subject is not attached to twice.
fn table_name(found: &Found) -> String {
    let own = std::process::id();
    match &found.kind {
        Kind::Process { .. } => format!("sidetrack-attach-{own}"),
        Kind::Group(leaf) => format!("sidetrack-attach-{own}-{}", leaf.id()),
        Kind::Network => format!("sidetrack-attach-{own}-net"),
    }
}

/// Opens the two sockets of the resolver, on one port of 127.0.0.1 and ::1.
fn resolver() -> io::Result<Vec<UdpSocket>> {
    for _ in 0..ATTEMPTS {
        let first = udp::bind_family((Ipv4Addr::LOCALHOST, 0).into())?;
        let second = SocketAddr::from((Ipv6Addr::LOCALHOST, first.local_addr()?.port()));
        match udp::bind_family(second) {
            Ok(second) => return Ok(vec![first, second]),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            // A network without IPv6.
            Err(_) => return Ok(vec![first]),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}
