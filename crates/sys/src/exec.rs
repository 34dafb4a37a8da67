//! Starts one command in a network of its own, or in a control group of its own.
//!
//! [`spawn_isolated`] needs no privilege: the command gets a user, a network and a mount namespace. In that
//! network every address is local, every TCP connection is redirected to one listener, and datagrams to one
//! socket for each IP version. They are handed out to the caller together with the socket that receives DNS questions. The caller accepts there and dials from
//! its own network, so nothing can pass it by, nothing is left on the host, and everything ends with the
//! command.
//!
//! What happens, in order (namespaces(7), user_namespaces(7), ip-route(8) "local"):
//!
//! | who | does | without privilege | as root |
//! |---|---|---|---|
//! | child | new namespaces | user, network, mount; user 0 is the caller | network, mount |
//! | child | `lo` up, local default routes, nft redirect, listener, UDP socket | | |
//! | child | private `resolv.conf`, `nsswitch.conf`, masked resolver sockets | | |
//! | child | sends the sockets to the parent | | |
//! | child | a nested user namespace, in which no capability over that network is held | own id mapped back | all ids mapped as they are, by the parent |
//! | child | a filter that asks about connect(2), and one that confines, if wanted | | |
//! | child | dies with the parent from here on, then exec | | |
//!
//! Limits, all by nature of user namespaces: set-user-id programs get no privilege inside (without root); a
//! server that listens inside is not reachable from outside.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

mod child;
mod confined;
mod error;
mod files;
mod idmap;
mod report;
mod signals;
mod wait;

pub use confined::Confined;
pub use error::{LaunchError, Step, user_namespace_obstacle};
pub use files::PrivateFiles;
pub use signals::{ForwardedSignals, ReceivedSignal};
pub use wait::{ChildProcess, Ended};

use std::ffi::OsString;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::capture::CaptureSocket;
use crate::cgroup::Leaf;
use crate::connects::Questions;
use crate::inside::InsideSockets;
use crate::netns::NetNs;
use crate::nfqueue::HoldSockets;
use crate::sockdiag::SockDiag;
use crate::terminal::Terminal;
use crate::udp::answers::AnswerSockets;
use report::{Report, Reports};

/// A program to execute, as the caller of `exec` gives it.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The program (looked up in `PATH` if it has no slash) and its arguments.
    pub argv: Vec<OsString>,
    /// The name that it is executed with (its argument 0); `None`: the program as in `argv`.
    pub name: Option<OsString>,
    /// Variables to set, or with `None` to remove, in an environment otherwise inherited.
    pub env: Vec<(OsString, Option<OsString>)>,
    /// Working directory; `None`: the caller's.
    pub directory: Option<PathBuf>,
    /// Soft limit of open descriptors to give it; `None`: the caller's.
    pub open_files_limit: Option<u64>,
    /// What it cannot do beside what its network confines; `None`: it is not confined.
    pub confined: Option<Confined>,
    /// Ask the caller about each connect(2), if the kernel can do it and no other program around asks.
    pub asks_connects: bool,
}

/// A program and the network made for it.
#[derive(Clone, Debug)]
pub struct IsolatedCommand {
    /// What to execute.
    pub program: Program,
    /// Files only it sees: `resolv.conf` and the like.
    pub files: PrivateFiles,
    /// TCP port of the listener inside the namespace. A program that listens on the same port inside fails.
    pub redirect_port: u16,
    /// Hold opening segments in a queue, if the kernel has queues.
    pub hold: Option<HoldWish>,
    /// Make what reaches its servers ([`Isolated::inside`]).
    pub publishes: bool,
    /// Capture packets from the first one on ([`Isolated::packets`]).
    pub captures: bool,
}

/// How opening segments are held in the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldWish {
    /// The number of the queue.
    pub queue: u16,
    /// Most segments in it.
    pub packets_max: u32,
    /// Whether more pass; otherwise they are dropped.
    pub fail_open: bool,
}

/// A command that runs in a network of its own.
#[derive(Debug)]
pub struct Isolated {
    /// Gets every TCP connection the command makes, IPv4 as IPv4-mapped; non-blocking.
    pub listener: TcpListener,
    /// Gets every datagram to port 53 of any address; made by [`crate::udp::bind`], non-blocking.
    pub dns: UdpSocket,
    /// Get all other datagrams of the command, one for each IP version; made by [`crate::udp::bind_transparent`]. Those between
    /// sockets of the command at loopback addresses stay there.
    pub datagrams: Vec<UdpSocket>,
    /// Send the answers.
    pub answers: AnswerSockets,
    /// The queue, if it was wanted and the kernel has queues.
    pub hold: Option<HoldSockets>,
    /// Asks about connect(2), if that was wanted and is possible.
    pub questions: Option<Questions>,
    /// Finds the owners of sockets in the network, if the kernel can do it.
    pub owners: Option<SockDiag>,
    /// Reads the packets of the network, if the kernel can do it.
    pub packets: Option<CaptureSocket>,
    /// Reaches servers of the command, if that was wanted.
    pub inside: Option<InsideSockets>,
    /// The command.
    pub child: ChildProcess,
}

/// Starts a command in a network of its own.
///
/// # Errors
/// Says which step failed and what to do about it; nothing is left behind.
///
/// # Panics
/// If the process has more than one thread: a fork copies only the calling one.
pub fn spawn_isolated(command: &IsolatedCommand) -> Result<Isolated, LaunchError> {
    let privileged = child::is_privileged();
    let (child, given) =
        spawn(&command.program, privileged, |reports| child::isolate(command, privileged, reports))?;
    // Behind the other sockets: what reaches servers, if it was wanted, then the queue, if there is one.
    let mut parts = given.sockets.into_iter();
    let network = parts.next().unwrap_or_default();
    let inside = command.publishes.then(|| parts.next()).flatten();
    let inside = inside.and_then(InsideSockets::from_descriptors);
    let hold = command.hold.zip(parts.next());
    let hold = hold.and_then(|(wish, fds)| HoldSockets::from_descriptors(fds, vec![wish.queue]));
    let isolated = Isolated::of_descriptors(network, child).ok_or(LaunchError::ChildVanished)?;
    let (questions, owners, packets) = (given.questions, given.owners, given.packets);
    Ok(Isolated { hold, inside, questions, owners, packets, ..isolated })
}

impl Isolated {
    /// Two sockets of each IP version send answers, and one gets datagrams: seven or more are those of both versions.
    fn of_descriptors(mut descriptors: Vec<OwnedFd>, child: ChildProcess) -> Option<Self> {
        let answers = if descriptors.len() >= 7 { 4 } else { 2 };
        if descriptors.len() <= 2 + answers {
            return None;
        }
        let datagrams = descriptors.split_off(2 + answers).into_iter().map(UdpSocket::from).collect();
        let answers = AnswerSockets::of_descriptors(descriptors.split_off(2))?;
        let [listener, dns] = <[OwnedFd; 2]>::try_from(descriptors).ok()?;
        Some(Self {
            listener: listener.into(),
            dns: dns.into(),
            datagrams,
            answers,
            hold: None,
            questions: None,
            owners: None,
            packets: None,
            inside: None,
            child,
        })
    }
}

/// Starts a command in the caller's network but inside a control group, with private files. Needs root.
///
/// # Errors
/// Says which step failed and what to do about it.
///
/// # Panics
/// If the process has more than one thread.
pub fn spawn_in_cgroup(
    program: &Program,
    files: &PrivateFiles,
    leaf: &Leaf,
) -> Result<(ChildProcess, Option<Questions>), LaunchError> {
    let (child, given) = spawn(program, false, |reports| child::join(leaf, files, reports))?;
    Ok((child, given.questions))
}

/// Starts a command in an existing network, with private files. As root it keeps all ids; it gets no capability over the network.
///
/// # Errors
/// Says which step failed and what to do about it.
///
/// # Panics
/// If the process has more than one thread.
pub fn spawn_in_network(
    program: &Program,
    files: &PrivateFiles,
    network: &NetNs,
) -> Result<(ChildProcess, Option<Questions>), LaunchError> {
    let (child, given) = spawn(program, true, |reports| child::enter(network, files, reports))?;
    Ok((child, given.questions))
}

/// The sockets that get all traffic of a network in which all addresses are local; as those of [`Isolated`].
#[derive(Debug)]
pub struct Caught {
    /// See [`Isolated::listener`].
    pub listener: TcpListener,
    /// See [`Isolated::dns`].
    pub dns: UdpSocket,
    /// See [`Isolated::datagrams`].
    pub datagrams: Vec<UdpSocket>,
    /// See [`Isolated::answers`].
    pub answers: AnswerSockets,
    /// See [`Isolated::hold`].
    pub hold: Option<HoldSockets>,
}

/// Makes all addresses of the calling thread's network local and catches all traffic there, as [`spawn_isolated`] does in the network that it
/// makes. Undo: the table `inet sidetrack`, the local default routes, and `lo` as it was.
///
/// # Errors
/// Says which step failed.
pub fn catch_network(redirect_port: u16, hold: Option<HoldWish>) -> Result<Caught, LaunchError> {
    child::catch_network(redirect_port, hold).map_err(|failure| failure.into_error(&Program::default()))
}

/// What the child has handed out.
#[derive(Debug, Default)]
struct Given {
    sockets: Vec<Vec<OwnedFd>>,
    questions: Option<Questions>,
    owners: Option<SockDiag>,
    packets: Option<CaptureSocket>,
}

/// Forks; the child prepares itself and executes, the parent serves it until then.
fn spawn(
    program: &Program,
    privileged: bool,
    prepare: impl FnOnce(&Reports) -> Result<(), child::Failure>,
) -> Result<(ChildProcess, Given), LaunchError> {
    assert!(crate::process::is_single_threaded(), "a command is started before any thread");
    if program.argv.is_empty() {
        return Err(LaunchError::NoCommand);
    }
    let (ours, theirs) = report::pair().map_err(LaunchError::Fork)?;
    let signals = ForwardedSignals::block().map_err(LaunchError::Fork)?;
    let parent = rustix::process::getpid();
    let terminal = Terminal::remember();
    // SAFETY: there is one thread (asserted above), so no lock is held by anybody else in the child's copy of
    // memory, and the child may allocate and call anything; it never returns from `child::run`.
    match unsafe { libc::fork() } {
        -1 => Err(LaunchError::Fork(std::io::Error::last_os_error())),
        0 => {
            drop(ours);
            child::run(program, &theirs, &signals, parent, prepare)
        }
        pid => {
            drop(theirs);
            let child = ChildProcess::new(pid, signals, terminal)?;
            match serve(&ours, pid, privileged, program) {
                Ok(given) => Ok((child, given)),
                Err(error) => {
                    child.kill_and_reap();
                    Err(error)
                }
            }
        }
    }
}

/// Does what the child asks for until it has executed its program, and returns the sockets it made.
fn serve(reports: &Reports, pid: i32, privileged: bool, program: &Program) -> Result<Given, LaunchError> {
    let mut given = Given::default();
    loop {
        match reports.receive() {
            Ok(Some(Report::MapIds)) if privileged => {
                idmap::map_all(pid).map_err(|error| LaunchError::step(Step::IdMap, &error))?;
                reports.send(&Report::Mapped, &[]).map_err(|_| LaunchError::ChildVanished)?;
            }
            Ok(Some(Report::Ready(fds))) => given.sockets.push(fds),
            Ok(Some(Report::Owners(socket))) => given.owners = socket.map(SockDiag::from),
            Ok(Some(Report::Packets(socket))) => {
                given.packets = socket.map(CaptureSocket::from_descriptor);
            }
            Ok(Some(Report::Asks(listener))) => given.questions = listener.map(Questions::from),
            Ok(Some(Report::Failed { step, errno, text })) => {
                return Err(LaunchError::reported(step, errno, text, program));
            }
            Ok(Some(Report::MapIds | Report::Mapped)) => return Err(LaunchError::ChildVanished),
            // Its end closes on exec, and that is how we know.
            Ok(None) if given.sockets.is_empty() => return Err(LaunchError::ChildVanished),
            Ok(None) => return Ok(given),
            Err(error) => return Err(LaunchError::Wait(error)),
        }
    }
}
