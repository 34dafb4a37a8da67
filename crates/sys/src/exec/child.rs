//! The child between fork and exec.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::process::Command;

use rustix::process::{DumpableBehavior, Pid, Signal};
use rustix::thread::UnshareFlags;

use super::error::LaunchError;
use super::error::Step;
use super::report::{Report, Reports};
use super::signals::ForwardedSignals;
use super::{Caught, HoldWish, IsolatedCommand, PrivateFiles, Program, idmap};
use crate::caps::{self, CapabilitySet};
use crate::capture::CaptureSocket;
use crate::cgroup::Leaf;
use crate::inside::InsideSockets;
use crate::netns::{CatchStep, NetNs};
use crate::nfqueue::HoldSockets;
use crate::nft::{ANSWERS_MARK, HoldQueue};
use crate::sockdiag::SockDiag;
use crate::sockopt::ListenOptions;
use crate::udp::answers::AnswerSockets;
use crate::{connects, netlink, netns, sockopt, udp};

/// A step that failed.
pub(super) struct Failure {
    step: Step,
    errno: i32,
    text: String,
}

impl Failure {
    pub(super) fn new(step: Step, error: &io::Error) -> Self {
        Self { step, errno: error.raw_os_error().unwrap_or(0), text: error.to_string() }
    }

    /// As the caller of the public functions gets it.
    pub(super) fn into_error(self, program: &Program) -> LaunchError {
        LaunchError::reported(self.step, self.errno, self.text, program)
    }

    fn catching(step: CatchStep, error: &netlink::Error) -> Self {
        let step = match step {
            CatchStep::Loopback => Step::Loopback,
            CatchStep::Route => Step::Route,
            CatchStep::Redirect => Step::Redirect,
        };
        Self { step, errno: error.errno().unwrap_or(0), text: error.to_string() }
    }
}

trait AtStep<T> {
    /// Names the step for an error.
    fn at(self, step: Step) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> AtStep<T> for Result<T, E> {
    fn at(self, step: Step) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(step, &error.into()))
    }
}

/// True if the process may make namespaces and map all ids without a user namespace around them.
pub(super) fn is_privileged() -> bool {
    caps::holds(
        CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN | CapabilitySet::SETUID | CapabilitySet::SETGID,
    )
}

/// Prepares and executes; never returns into the copy of the parent's stack.
pub(super) fn run(
    program: &Program,
    reports: &Reports,
    signals: &ForwardedSignals,
    parent: Pid,
    prepare: impl FnOnce(&Reports) -> Result<(), Failure>,
) -> ! {
    let attempt = AssertUnwindSafe(|| {
        prepare(reports)?;
        execute(program, reports, signals, parent)
    });
    let failure = match std::panic::catch_unwind(attempt) {
        Ok(Ok(never)) => match never {},
        Ok(Err(failure)) => failure,
        Err(_) => Failure { step: Step::Process, errno: 0, text: "panicked: please report it".to_owned() },
    };
    let Failure { step, errno, text } = failure;
    // If the parent is gone, no process waits for the report.
    let _ = reports.send(&Report::Failed { step, errno, text }, &[]);
    // SAFETY: _exit ends the process at once; the parent's buffers and exit functions are not run twice.
    unsafe { libc::_exit(125) }
}

/// Limits, mask, death with the parent; then exec.
fn execute(
    program: &Program,
    reports: &Reports,
    signals: &ForwardedSignals,
    parent: Pid,
) -> Result<std::convert::Infallible, Failure> {
    if let Some(limit) = program.open_files_limit {
        caps::set_open_files_limit(limit).at(Step::Process)?;
    }
    // The last change of credentials is behind us: it would clear this.
    if !caps::signal_on_parent_death(Signal::KILL, parent).at(Step::Process)? {
        return Err(Failure { step: Step::Process, errno: 0, text: "the parent has ended".to_owned() });
    }
    let Some((name, arguments)) = program.argv.split_first() else {
        return Err(Failure::new(Step::Exec, &io::ErrorKind::NotFound.into()));
    };
    let mut command = Command::new(name);
    command.args(arguments);
    if let Some(name) = &program.name {
        command.arg0(name);
    }
    for (variable, value) in &program.env {
        match value {
            Some(value) => command.env(variable, value),
            None => command.env_remove(variable),
        };
    }
    if let Some(directory) = &program.directory {
        std::env::set_current_dir(directory).map_err(|error| Failure {
            text: format!("working directory {}: {error}", directory.display()),
            ..Failure::new(Step::Process, &error)
        })?;
    }
    signals.restore_mask().at(Step::Process)?;
    // Without it, the command learns of a denial from the network.
    if program.asks_connects
        && let Ok(listener) = connects::ask()
    {
        reports.send(&Report::Asks(None), &[listener.as_fd()]).at(Step::Handover)?;
    }
    if let Some(confined) = program.confined {
        confined.enter().at(Step::Confine)?;
    }
    Err(Failure::new(Step::Exec, &command.exec()))
}

/// Makes the command's network, hands its sockets out, and gives up the capabilities over it.
pub(super) fn isolate(command: &IsolatedCommand, privileged: bool, reports: &Reports) -> Result<(), Failure> {
    let ids = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let spaces = UnshareFlags::NEWNET | UnshareFlags::NEWNS;
    if privileged {
        unshare(spaces).at(Step::Namespaces)?;
    } else {
        // A process that has changed its user is not dumpable, and its files in /proc, the id maps among them,
        // belong to root.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable).at(Step::UserNamespace)?;
        unshare(spaces | UnshareFlags::NEWUSER).at(Step::UserNamespace)?;
        // User 0, not the own one: only then do programs started here keep capabilities over exec.
        idmap::map_one((0, 0), ids).at(Step::IdMap)?;
    }
    let hold = command.hold.and_then(open_hold);
    let held = command.hold.filter(|_| hold.is_some());
    let network = make_network(command.redirect_port, held, command.publishes)?;
    let inside =
        command.publishes.then(|| InsideSockets::open(ANSWERS_MARK)).transpose().at(Step::Listener)?;
    command.files.mount().at(Step::Files)?;
    reports.send(&Report::Ready(Vec::new()), &network.descriptors()).at(Step::Handover)?;
    if let Some(mut inside) = inside {
        reports.send(&Report::Ready(Vec::new()), &inside.descriptors()).at(Step::Handover)?;
    }
    if let Some(hold) = &hold {
        reports.send(&Report::Ready(Vec::new()), &hold.descriptors()).at(Step::Handover)?;
    }
    // Without it, /proc is read, which takes milliseconds for each connection.
    if let Ok(owners) = SockDiag::open() {
        reports.send(&Report::Owners(None), &[owners.as_fd()]).at(Step::Handover)?;
    }
    // It costs nothing until it is read.
    if let Ok(packets) = CaptureSocket::open() {
        if command.captures {
            packets.fill().at(Step::Handover)?;
        }
        reports.send(&Report::Packets(None), &[packets.as_fd()]).at(Step::Handover)?;
    }
    drop((network, hold));
    unshare(UnshareFlags::NEWUSER).at(Step::NestedNamespace)?;
    if privileged { map_by_parent(reports) } else { idmap::map_one(ids, (0, 0)).at(Step::NestedNamespace) }
}

fn map_by_parent(reports: &Reports) -> Result<(), Failure> {
    reports.send(&Report::MapIds, &[]).at(Step::IdMap)?;
    match reports.receive().at(Step::IdMap)? {
        Some(Report::Mapped) => Ok(()),
        _ => Err(Failure::new(Step::IdMap, &io::ErrorKind::UnexpectedEof.into())),
    }
}

/// The sockets in the command's network.
struct Network {
    listener: std::net::TcpListener,
    dns: std::net::UdpSocket,
    datagrams: Vec<std::net::UdpSocket>,
    answers: AnswerSockets,
}

impl Network {
    /// In the order that [`super::Isolated::of_descriptors`] expects.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let datagrams = self.datagrams.iter().map(AsFd::as_fd);
        [self.listener.as_fd(), self.dns.as_fd()]
            .into_iter()
            .chain(self.answers.descriptors())
            .chain(datagrams)
            .collect()
    }
}

/// The queue of a fresh network, which has no other. `None`: the kernel has no queues, so nothing is held.
fn open_hold(wish: HoldWish) -> Option<HoldSockets> {
    let bounds = (wish.packets_max, wish.fail_open);
    HoldSockets::open(wish.queue..=wish.queue, 1, bounds, 0).ok()
}

fn make_network(port: u16, hold: Option<HoldWish>, publishes: bool) -> Result<Network, Failure> {
    let hold = hold.map(|wish| HoldQueue { number: wish.queue, bypass: wish.fail_open });
    netns::catch_all(port, hold, publishes).map_err(|(step, error)| Failure::catching(step, &error))?;
    let any = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let options = ListenOptions {
        dual_stack: true,
        transparent: true,
        reset_if_killed: true,
        ..ListenOptions::default()
    };
    let listener = sockopt::listen(any(port), &options).at(Step::Listener)?;
    let dns = udp::bind(any(53)).at(Step::Resolver)?;
    // To a socket that is not connected, an answer of the resolver looks like any other datagram.
    sockopt::set_mark(&dns, ANSWERS_MARK).at(Step::Resolver)?;
    let answers = AnswerSockets::open(Some(ANSWERS_MARK)).at(Step::Datagrams)?;
    let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let mut datagrams = vec![udp::bind_transparent(v4, false).at(Step::Datagrams)?];
    // Without IPv6 no datagram of it can leave the command.
    datagrams.extend(udp::bind_transparent(any(port), false).ok());
    Ok(Network { listener, dns, datagrams, answers })
}

/// Joins a control group and mounts private files, in the caller's network.
pub(super) fn join(leaf: &Leaf, files: &PrivateFiles, reports: &Reports) -> Result<(), Failure> {
    leaf.add(0).at(Step::Cgroup)?;
    unshare(UnshareFlags::NEWNS).at(Step::Namespaces)?;
    files.mount().at(Step::Files)?;
    reports.send(&Report::Ready(Vec::new()), &[]).at(Step::Handover)
}

/// Enters a network and mounts private files; gives up the capabilities over the network.
pub(super) fn enter(network: &NetNs, files: &PrivateFiles, reports: &Reports) -> Result<(), Failure> {
    network.enter().at(Step::Namespaces)?;
    unshare(UnshareFlags::NEWNS).at(Step::Namespaces)?;
    files.mount().at(Step::Files)?;
    reports.send(&Report::Ready(Vec::new()), &[]).at(Step::Handover)?;
    unshare(UnshareFlags::NEWUSER).at(Step::NestedNamespace)?;
    map_by_parent(reports)
}

/// Catches all traffic of the calling thread's network.
pub(super) fn catch_network(port: u16, hold: Option<HoldWish>) -> Result<Caught, Failure> {
    let queue = hold.and_then(open_hold);
    let Network { listener, dns, datagrams, answers } =
        make_network(port, hold.filter(|_| queue.is_some()), false)?;
    Ok(Caught { listener, dns, datagrams, answers, hold: queue })
}

fn unshare(spaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: none of the flags given here is CLONE_FILES, the one that makes unshare unsafe: descriptors stay
    // not shared in a process with one thread.
    Ok(unsafe { rustix::thread::unshare_unsafe(spaces) }?)
}
