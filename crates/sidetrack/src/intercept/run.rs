//! `sidetrack run -- CMD`: captures the connections of one command and its children.
//!
//! [`launch`] starts the command and returns what captures its connections. The data path accepts on
//! [`Launched::listeners`] as on any redirected listener. There are two modes with the same result:
//!
//! - [`Mode::Isolated`], without privilege: the command has its own network, in which all addresses are local
//!   (see [`sidetrack_sys::exec`]). Traffic that is neither TCP nor UDP has no receiver there.
//! - [`Mode::Cgroup`], as root, in the host's network: nft rules match the sockets of the command's control
//!   group. Traffic that is not TCP and would leave the host is dropped.

mod attach;
mod cgroup;
mod cgroup_datagrams;
mod resolver_files;
mod trust_files;
mod unix_sockets;

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use sidetrack_core::names::{NameTable, RESOLVER};
use sidetrack_core::time::Instant;
use sidetrack_sys::capture::CaptureSocket;
use sidetrack_sys::connects::Questions;
use sidetrack_sys::exec::{
    ChildProcess, Confined, Ended, HoldWish, IsolatedCommand, LaunchError, PrivateFiles, Program,
    spawn_isolated,
};
use sidetrack_sys::inside::InsideSockets;
use sidetrack_sys::nfqueue::{HOLD_NUMBERS, HoldSockets};
use sidetrack_sys::sockdiag::SockDiag;
use sidetrack_sys::udp::answers::AnswerSockets;
use tokio::sync::oneshot;

use super::hold;
use crate::dns::{self, Resolver, SharedNames};
pub use attach::{Attach, Subject as AttachTo, plan as plan_attach};
use attach::{Attached, Running};
use cgroup::CgroupNetwork;
pub use trust_files::Trusted;
pub use unix_sockets::UnixSockets;

/// Port of the listener in the command's own namespace: discard (RFC 863), which is not used otherwise.
const REDIRECT_PORT: u16 = 9;

/// How the command's traffic is captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// In its own network namespace. Needs no privilege.
    #[default]
    Isolated,
    /// By its control group, in the host's network. Needs root.
    Cgroup,
}

/// The command to run, and how.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The command and its arguments.
    pub argv: Vec<OsString>,
    /// The name that it is executed with (its argument 0). `None`: as in `argv`.
    pub name: Option<OsString>,
    /// How to capture its traffic.
    pub mode: Mode,
    /// Environment variables to set, or to remove with `None`.
    pub env: Vec<(OsString, Option<OsString>)>,
    /// Its working directory. `None`: ours.
    pub directory: Option<PathBuf>,
    /// Its soft limit of open descriptors. `None`: ours. Pass the limit from before we raised our own.
    pub open_files_limit: Option<u64>,
    /// Most names that have an address at the same time.
    pub name_capacity: usize,
    /// An authority that this command trusts; other programs do not.
    pub trusted: Option<Trusted>,
    /// Hold its connections until the far side has accepted. If more are held than there is room for, more pass.
    pub hold: bool,
    /// Files that the command does not see, and the content that it sees instead. A file that does not exist is left out.
    pub covered_files: Vec<(PathBuf, Vec<u8>)>,
    /// Make what reaches its servers from outside.
    pub publishes: bool,
    /// Capture packets from the first one on.
    pub captures: bool,
    /// Confine it beside its network: system calls, inherited descriptors, and these unix sockets.
    pub jail: Option<UnixSockets>,
    /// A confined command may have commands in networks of their own, with a jail or without.
    pub nested: bool,
    /// Ask about each connect(2), so that a denied one fails with `EACCES`.
    pub asks_connects: bool,
    /// The network namespace in which it runs, and which is steered then; `None`: one of its own, or the host's.
    pub netns: Option<PathBuf>,
    /// No command is started: this is attached to instead.
    pub attach: Option<Attach>,
}

impl RunOptions {
    /// The defaults for a command: isolated, our environment and directory, and one name for each address.
    pub fn new(argv: Vec<OsString>) -> Self {
        Self {
            argv,
            name: None,
            mode: Mode::default(),
            env: Vec::new(),
            directory: None,
            open_files_limit: None,
            name_capacity: NameTable::MAX_CAPACITY,
            trusted: None,
            hold: false,
            covered_files: Vec::new(),
            publishes: false,
            captures: false,
            jail: None,
            nested: false,
            asks_connects: false,
            netns: None,
            attach: None,
        }
    }
}

/// Why a command was not started. The program should exit with [`Self::exit_code`].
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The command's process could not be prepared, or its program could not be executed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// `--mode cgroup` without the necessary rights.
    #[error(
        "--mode cgroup needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN): run it as root, or leave --mode out"
    )]
    NotRoot,
    /// What was asked for cannot be, for a reason that says what to do.
    #[error("{0}")]
    Refused(String),
    /// `--mode cgroup` where root has no rights over the network.
    #[error(
        "--mode cgroup needs rights over this network, and has none here: inside another `sidetrack run` or a container, leave --mode out"
    )]
    NoRights,
    /// Setting up the host for `--mode cgroup` failed.
    #[error("cannot {what}: {source}")]
    Host {
        /// The failed action, as a verb phrase.
        what: &'static str,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl RunError {
    /// Returns 127 if the command was not found, 126 if it cannot be executed, and 125 for all other errors.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Launch(error) => error.exit_code(),
            _ => 125,
        }
    }

    fn host(what: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Host { what, source: source.into() }
    }
}

/// A command that was started, and the sockets that capture its connections.
#[derive(Debug)]
pub struct Launched {
    /// Each connection arrives on one of these non-blocking listeners: one in the command's own namespace, or
    /// one per IP version in the host's. [`sidetrack_sys::sockopt::original_dst`] returns the destination.
    pub listeners: Vec<TcpListener>,
    /// The command's datagrams but for DNS arrive on these, one for each IP version. [`sidetrack_sys::udp::batch::Batch::original`]
    /// returns the destination.
    pub datagrams: Vec<UdpSocket>,
    /// Sends the answers to them.
    pub answers: Option<Arc<AnswerSockets>>,
    /// The names for the addresses of 198.18.0.0/15 that the command got.
    pub names: SharedNames,
    /// Where its opening segments are held, if that was asked for and the kernel can do it.
    pub hold: Option<HoldSockets>,
    /// Asks about connect(2), if that was wanted and is possible.
    pub questions: Option<Questions>,
    /// Finds the owners of sockets in the command's own network.
    pub owners: Option<SockDiag>,
    /// Reads the packets of its own network.
    pub packets: Option<CaptureSocket>,
    /// Reaches its servers, if that was asked for.
    pub inside: Option<InsideSockets>,
    child: Subject,
    dns: Option<UdpSocket>,
    dns_v6: Option<UdpSocket>,
    resolver: SocketAddr,
    /// Rules and control group in the host's network. They are removed after the command has ended.
    host: Option<CgroupNetwork>,
    /// The same for what was attached to.
    attached: Option<Attached>,
}

/// Whose traffic is caught.
#[derive(Debug)]
enum Subject {
    /// A command that was started.
    Command(Arc<ChildProcess>),
    /// What ran before.
    Running(Arc<Running>),
}

/// Starts the command and everything that captures its connections.
///
/// Must be called while the process has one thread, so before any runtime starts.
///
/// # Errors
/// Says what failed and what to do about it. Nothing is left behind.
///
/// # Panics
/// If the process has more than one thread.
pub fn launch(options: &RunOptions) -> Result<Launched, RunError> {
    let names = Arc::new(Mutex::new(NameTable::new(options.name_capacity)));
    if let Some(attach) = &options.attach {
        return attach::launch(attach, names, options);
    }
    let trusted_env = options.trusted.iter().flat_map(Trusted::variables);
    let program = Program {
        argv: options.argv.clone(),
        name: options.name.clone(),
        env: options.env.iter().cloned().chain(trusted_env).collect(),
        directory: options.directory.clone(),
        open_files_limit: options.open_files_limit,
        confined: options.jail.as_ref().map(|unix| Confined {
            unix_sockets: *unix != UnixSockets::None,
            no_socket_files: *unix == UnixSockets::Abstract,
            nested: options.nested,
        }),
        asks_connects: options.asks_connects,
    };
    if let Some(path) = &options.netns {
        return attach::launch_in(path, &program, names, options);
    }
    match options.mode {
        Mode::Isolated => launch_isolated(program, names, options),
        Mode::Cgroup => launch_in_cgroup(&program, names, options),
    }
}

fn launch_isolated(program: Program, names: SharedNames, options: &RunOptions) -> Result<Launched, RunError> {
    let files = all_private_files(IpAddr::V4(RESOLVER), options);
    let hold = options.hold.then_some(HoldWish {
        queue: *HOLD_NUMBERS.start(),
        packets_max: hold::PACKETS_MAX,
        fail_open: true,
    });
    let publishes = options.publishes;
    let (redirect_port, captures) = (REDIRECT_PORT, options.captures);
    let command = IsolatedCommand { program, files, redirect_port, hold, publishes, captures };
    let isolated = spawn_isolated(&command)?;
    Ok(Launched {
        listeners: vec![isolated.listener],
        datagrams: isolated.datagrams,
        answers: Some(Arc::new(isolated.answers)),
        names,
        hold: isolated.hold,
        questions: isolated.questions,
        owners: isolated.owners,
        packets: isolated.packets,
        inside: isolated.inside,
        child: Subject::Command(Arc::new(isolated.child)),
        dns: Some(isolated.dns),
        dns_v6: None,
        resolver: SocketAddr::new(IpAddr::V4(RESOLVER), dns::PORT),
        host: None,
        attached: None,
    })
}

/// Files that a command with a network of its own sees instead of the host's.
fn all_private_files(resolver: IpAddr, options: &RunOptions) -> PrivateFiles {
    let mut files = private_files(resolver, options.trusted.as_ref());
    files.contents.extend(options.covered_files.iter().cloned());
    files.masked_sockets.extend(options.jail.iter().flat_map(UnixSockets::covered));
    files.masked_sockets.sort_unstable();
    files.masked_sockets.dedup();
    files
}

/// Files that the command sees instead of the host's.
fn private_files(resolver: IpAddr, trusted: Option<&Trusted>) -> PrivateFiles {
    let mut files = resolver_files::for_resolver(resolver);
    files.contents.extend(trusted.map(Trusted::files).unwrap_or_default());
    files
}

fn launch_in_cgroup(
    program: &Program,
    names: SharedNames,
    options: &RunOptions,
) -> Result<Launched, RunError> {
    // Rules before the command: otherwise its first connections would bypass us.
    let (network, sockets) = CgroupNetwork::build(options.hold)?;
    let files = private_files(sockets.resolver.ip(), options.trusted.as_ref());
    let (child, questions) = network.spawn(program, &files)?;
    Ok(Launched {
        listeners: sockets.listeners,
        datagrams: sockets.datagrams.sockets,
        answers: Some(sockets.datagrams.answers),
        names,
        hold: sockets.hold,
        questions,
        // In the host's network, this process can open one itself.
        owners: SockDiag::open().ok(),
        packets: None,
        inside: None,
        child: Subject::Command(Arc::new(child)),
        dns: Some(sockets.dns),
        dns_v6: None,
        resolver: sockets.resolver,
        host: Some(network),
        attached: None,
    })
}

impl Launched {
    /// The address of the command's resolver. A TCP connection to it is for [`dns::serve_tcp`].
    pub fn resolver(&self) -> SocketAddr {
        self.resolver
    }

    /// Whether the command has its own network, where everything is redirected. In the host's network, a
    /// connection may have a listener's own address as original destination. It was dialled directly, and
    /// carrying it would be a loop.
    pub fn is_isolated(&self) -> bool {
        self.host.is_none() && self.attached.as_ref().is_none_or(Attached::is_lone)
    }

    /// The command's process id. For what was attached to, the process whose descendants may own a connection.
    pub fn pid(&self) -> u32 {
        match &self.child {
            Subject::Command(child) => child.pid(),
            Subject::Running(running) => running.pid(),
        }
    }

    /// What the user is to know about what was attached to.
    pub fn notices(&self) -> &[String] {
        self.attached.as_ref().map(Attached::notices).unwrap_or_default()
    }

    /// Answers the command's DNS queries while the future is polled, on the runtime that polls it. `now` is the
    /// clock that ages names; [`NameTable::name_used`] must get times of the same clock.
    ///
    /// # Errors
    /// Fails if the socket fails.
    pub fn serve_dns<F: Fn() -> Instant + Clone>(
        &self,
        resolver: Arc<Resolver>,
        now: F,
    ) -> impl Future<Output = io::Result<()>> + use<F> {
        let copy = |socket: &Option<UdpSocket>| socket.as_ref().map(UdpSocket::try_clone).transpose();
        let (first, second) = (copy(&self.dns), copy(&self.dns_v6));
        let serve = move |socket, resolver, now| async move {
            match socket {
                Some(socket) => dns::serve_udp(socket, resolver, now).await,
                None => std::future::pending().await,
            }
        };
        async move {
            let (first, second) = (first?, second?);
            tokio::try_join!(serve(first, resolver.clone(), now.clone()), serve(second, resolver, now))
                .map(drop)
        }
    }

    /// Waits for the command's end, passes signals on to it, and stops this process when the command stops. Call it once: the end is
    /// returned once.
    ///
    /// # Errors
    /// Fails if the process or the signals cannot be watched.
    pub async fn wait(&self) -> io::Result<Ended> {
        let (tell, told) = oneshot::channel();
        let watch: Box<dyn FnOnce() -> io::Result<Ended> + Send> = match &self.child {
            Subject::Command(child) => {
                let child = Arc::clone(child);
                Box::new(move || child.supervise())
            }
            Subject::Running(running) => {
                let running = Arc::clone(running);
                Box::new(move || running.wait())
            }
        };
        // A thread, not a task, so that it passes signals on even while the data path is busy.
        std::thread::Builder::new().name("command".to_owned()).spawn(move || {
            let ended = watch();
            // Fails if the future was dropped; then the exit code is not needed.
            let _ = tell.send(ended);
        })?;
        told.await.map_err(|_| io::Error::other("the thread that watches the command ended"))?
    }

    /// Ends processes that the command left behind, if they could bypass us otherwise, and removes what was
    /// installed on the host. With an own namespace nothing is needed: remaining processes have no network.
    ///
    /// # Errors
    /// Says what could not be removed.
    pub fn finish(self) -> Result<(), RunError> {
        self.host.map_or(Ok(()), CgroupNetwork::remove)?;
        self.attached.map_or(Ok(()), Attached::remove)
    }
}

#[cfg(test)]
mod tests;
