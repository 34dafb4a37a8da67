//! `sidetrack run -- CMD`: catches the connections of one command and its children.
//!
//! [`launch`] starts the command and returns what catches it; the data path accepts on [`Launched::listeners`]
//! like on any redirected listener. Two ways, one result:
//!
//! - [`Mode::Isolated`], without privilege: a network of its own, in which everything is local (see
//!   [`sidetrack_sys::exec`]). What is not TCP and not DNS finds nobody there.
//! - [`Mode::Cgroup`], as root, in the host's network: nft rules for the sockets of the command's control group.
//!   What is not TCP and would leave the host is dropped.

mod cgroup;
mod resolver_files;
mod trust_files;

use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use sidetrack_core::names::{NameTable, RESOLVER};
use sidetrack_core::time::Instant;
use sidetrack_sys::exec::{
    ChildProcess, IsolatedCommand, LaunchError, PrivateFiles, Program, spawn_isolated,
};
use tokio::sync::oneshot;

use crate::dns::{self, Resolver, SharedNames};
use cgroup::CgroupNetwork;
pub use trust_files::Trusted;

/// Port of the listener in the command's own namespace: discard (RFC 863), which nobody serves.
const REDIRECT_PORT: u16 = 9;

/// How the command's traffic is caught.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// In a network namespace of its own; needs no privilege.
    #[default]
    Isolated,
    /// By control group in the host's network; needs root.
    Cgroup,
}

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The command and its arguments.
    pub argv: Vec<OsString>,
    /// How to catch it.
    pub mode: Mode,
    /// Variables to set, or with `None` to remove, in its environment.
    pub env: Vec<(OsString, Option<OsString>)>,
    /// Its working directory; `None`: ours.
    pub directory: Option<PathBuf>,
    /// Its soft limit of open descriptors; `None`: ours. Give it what we had before we raised our own.
    pub open_files_limit: Option<u64>,
    /// Names that can have an address at one time.
    pub name_capacity: usize,
    /// An authority that it trusts, and nobody else does.
    pub trusted: Option<Trusted>,
}

impl RunOptions {
    /// The defaults for a command: isolated, everything else as we have it, as many names as addresses.
    pub fn new(argv: Vec<OsString>) -> Self {
        Self {
            argv,
            mode: Mode::default(),
            env: Vec::new(),
            directory: None,
            open_files_limit: None,
            name_capacity: NameTable::MAX_CAPACITY,
            trusted: None,
        }
    }
}

/// Why a command was not started. [`Self::exit_code`] is what the program should end with.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The command's process could not be made ready, or its program not executed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// `--mode cgroup` without the rights.
    #[error(
        "--mode cgroup needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN): run it as root, or leave --mode out"
    )]
    NotRoot,
    /// Something that `--mode cgroup` needs on the host could not be had.
    #[error("cannot {what}: {source}")]
    Host {
        /// What was tried, as a verb.
        what: &'static str,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl RunError {
    /// 127 if the command was not found, 126 if it cannot be executed, 125 for everything else.
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

/// A command that was started, and what catches its connections.
#[derive(Debug)]
pub struct Launched {
    /// Every connection arrives on one of these (one in its own namespace, one for each IP version in the
    /// host's), non-blocking; [`sidetrack_sys::sockopt::original_dst`] tells where it wanted to go.
    pub listeners: Vec<TcpListener>,
    /// The names behind the addresses of 198.18.0.0/15 that the command was given.
    pub names: SharedNames,
    child: Arc<ChildProcess>,
    dns: UdpSocket,
    resolver: SocketAddr,
    /// Rules and control group; removed with us, after the command.
    host: Option<CgroupNetwork>,
}

/// Starts the command and everything that catches it.
///
/// To be called while the process has one thread, so before any runtime.
///
/// # Errors
/// Says what failed and what to do about it; nothing is left behind.
///
/// # Panics
/// If the process has more than one thread.
pub fn launch(options: &RunOptions) -> Result<Launched, RunError> {
    let trusted_env = options.trusted.iter().flat_map(Trusted::variables);
    let program = Program {
        argv: options.argv.clone(),
        env: options.env.iter().cloned().chain(trusted_env).collect(),
        directory: options.directory.clone(),
        open_files_limit: options.open_files_limit,
    };
    let names = Arc::new(Mutex::new(NameTable::new(options.name_capacity)));
    match options.mode {
        Mode::Isolated => launch_isolated(program, names, options.trusted.as_ref()),
        Mode::Cgroup => launch_in_cgroup(&program, names, options.trusted.as_ref()),
    }
}

fn launch_isolated(
    program: Program,
    names: SharedNames,
    trusted: Option<&Trusted>,
) -> Result<Launched, RunError> {
    let files = private_files(IpAddr::V4(RESOLVER), trusted);
    let command = IsolatedCommand { program, files, redirect_port: REDIRECT_PORT };
    let isolated = spawn_isolated(&command)?;
    Ok(Launched {
        listeners: vec![isolated.listener],
        names,
        child: Arc::new(isolated.child),
        dns: isolated.dns,
        resolver: SocketAddr::new(IpAddr::V4(RESOLVER), dns::PORT),
        host: None,
    })
}

/// All that the command sees in place of the host's.
fn private_files(resolver: IpAddr, trusted: Option<&Trusted>) -> PrivateFiles {
    let mut files = resolver_files::for_resolver(resolver);
    files.contents.extend(trusted.map(Trusted::files).unwrap_or_default());
    files
}

fn launch_in_cgroup(
    program: &Program,
    names: SharedNames,
    trusted: Option<&Trusted>,
) -> Result<Launched, RunError> {
    let (network, sockets) = CgroupNetwork::build()?;
    let files = private_files(sockets.resolver.ip(), trusted);
    let child = network.spawn(program, &files)?;
    Ok(Launched {
        listeners: sockets.listeners,
        names,
        child: Arc::new(child),
        dns: sockets.dns,
        resolver: sockets.resolver,
        host: Some(network),
    })
}

impl Launched {
    /// The address of the resolver that the command asks: a TCP connection to it is for [`dns::serve_tcp`].
    pub fn resolver(&self) -> SocketAddr {
        self.resolver
    }

    /// Whether the command has a network of its own, where everything is redirected. In the host's, a connection
    /// whose original destination is a listener's own address dialled that, and would come back for ever.
    pub fn is_isolated(&self) -> bool {
        self.host.is_none()
    }

    /// The command's process id.
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Answers the command's DNS questions for as long as the future is polled, on the runtime that polls it.
    /// `now` is the clock that ages names: the one given to [`NameTable::name_used`] as well.
    ///
    /// # Errors
    /// If the socket breaks.
    pub fn serve_dns<F: Fn() -> Instant>(
        &self,
        resolver: Arc<Resolver>,
        now: F,
    ) -> impl Future<Output = io::Result<()>> + use<F> {
        let socket = self.dns.try_clone();
        async move { dns::serve_udp(socket?, resolver, now).await }
    }

    /// Waits for the command's end, passing on the signals that come for it; its exit code, or 128 and the number
    /// of the signal that ended it. To be called once: the code is given out once.
    ///
    /// # Errors
    /// If the process or the signals cannot be watched.
    pub async fn wait(&self) -> io::Result<u8> {
        let (tell, told) = oneshot::channel();
        let child = Arc::clone(&self.child);
        // A thread, not a task: it passes signals on even while the data path is busy.
        std::thread::Builder::new().name("command".to_owned()).spawn(move || {
            let ended = child.supervise();
            drop(child);
            // Nobody is left to be told if the future was dropped.
            let _ = tell.send(ended);
        })?;
        told.await.map_err(|_| io::Error::other("the thread that watches the command ended"))?
    }

    /// Ends what the command left running, where that could go past us otherwise, and removes what was put on
    /// the host. In a namespace of its own there is nothing to do: what runs on has no network any more.
    ///
    /// # Errors
    /// What could not be removed.
    pub fn finish(self) -> Result<(), RunError> {
        self.host.map_or(Ok(()), CgroupNetwork::remove)
    }
}

#[cfg(test)]
mod tests;
