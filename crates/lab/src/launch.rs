//! Starting a program inside a node: `sidetrack-lab node-exec` re-executes itself there.
//!
//! The launcher joins the network namespace, makes the program die with its parent, gives it a session and
//! autogroup of its own and replaces itself by the program. Doing it in a program of our own rather than
//! between fork and exec keeps the lab free of `unsafe`, and the pid of the launcher stays the pid, session
//! and process group of the program, which is how [`crate::cpu`] finds its children again.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, Signal};
use rustix::thread::LinkNameSpaceType;

/// Where and how a program runs.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Placement {
    /// Network namespace to join, as a path such as `/proc/PID/ns/net`; absent: stay where we are.
    #[arg(long)]
    pub netns: Option<PathBuf>,
    /// The one CPU to run on; absent: any.
    #[arg(long)]
    pub cpu: Option<usize>,
    /// Nice value of the process and of its own autogroup, -20 to 19; absent: unchanged.
    #[arg(long, allow_hyphen_values = true)]
    pub nice: Option<i32>,
}

/// `node-exec`: a [`Placement`] and the program to become.
#[derive(Debug, clap::Args)]
pub struct NodeExec {
    /// Where to run it.
    #[command(flatten)]
    pub placement: Placement,
    /// The process that must stay alive; when it ends, the program gets SIGTERM.
    #[arg(long)]
    pub parent: u32,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub program: Vec<OsString>,
}

impl NodeExec {
    /// Becomes the program; returns only if that failed.
    ///
    /// # Errors
    /// The namespace cannot be joined, the parent is already gone, or the program cannot be executed.
    pub fn run(self) -> Result<()> {
        bind_life_to(self.parent)?;
        // A session of its own is also an autogroup of its own, so that `nice` counts against other sessions.
        let _ = rustix::process::setsid();
        raise_file_limit();
        if let Some(nice) = self.placement.nice {
            set_nice(nice);
        }
        if let Some(cpu) = self.placement.cpu {
            pin_to(cpu)?;
        }
        if let Some(netns) = &self.placement.netns {
            join_netns(netns)?;
        }
        let Some((program, arguments)) = self.program.split_first() else {
            bail!("node-exec needs a program")
        };
        let error = Command::new(program).args(arguments).exec();
        Err(error).with_context(|| format!("cannot execute {}", program.display()))
    }
}

/// The command line that runs `program` at `placement`, through the launcher binary `launcher`.
#[must_use]
pub fn command(launcher: &Path, placement: &Placement, program: &str) -> Command {
    let mut command = Command::new(launcher);
    // A node is a host of its own: what proxies this machine uses is none of its business.
    for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
        command.env_remove(name).env_remove(name.to_uppercase());
    }
    command.arg("node-exec").arg("--parent").arg(std::process::id().to_string());
    if let Some(netns) = &placement.netns {
        command.arg("--netns").arg(netns);
    }
    if let Some(cpu) = placement.cpu {
        command.arg("--cpu").arg(cpu.to_string());
    }
    if let Some(nice) = placement.nice {
        command.arg("--nice").arg(nice.to_string());
    }
    command.arg("--").arg(program);
    command
}

/// Moves the calling thread, and what it starts later, into the network namespace at `path`.
///
/// # Errors
/// The path cannot be opened or the kernel refuses (CAP_SYS_ADMIN is needed in both namespaces).
pub fn join_netns(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open the namespace {}", path.display()))?;
    rustix::thread::move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("cannot join the namespace {}; the lab needs root", path.display()))
}

fn bind_life_to(parent: u32) -> Result<()> {
    // SIGTERM, not SIGKILL: nginx, dante and HAProxy end their own workers on it.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .context("cannot set the death signal")?;
    let current = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().cast_unsigned());
    if current != Some(parent) {
        bail!("the process {parent} that asked for this one has already ended");
    }
    Ok(())
}

fn pin_to(cpu: usize) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("cannot pin to CPU {cpu}"))
}

/// Best effort: without the right to be nicer the figures are noisier, not wrong.
fn set_nice(nice: i32) {
    let _ = rustix::process::setpriority_process(None, nice);
    let _ = std::fs::write("/proc/self/autogroup", nice.to_string());
}

/// The soft limit of open files goes up to the hard one, for us and whatever we start.
pub fn raise_file_limit() {
    let hard = rustix::process::getrlimit(Resource::Nofile).maximum;
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard });
}

/// Finds a program in `PATH` and the administrator's directories.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
}

/// The launcher: this very program when it is `sidetrack-lab`, else the one built beside the test binary.
///
/// # Errors
/// Neither exists.
pub fn launcher() -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    if own.file_name().is_some_and(|name| name == "sidetrack-lab") {
        return Ok(own);
    }
    sibling_program(&own, "sidetrack-lab")
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "sidetrack-lab is not built beside the tests"))
}

/// The program `name` in the directory of `own`, or one above (test binaries live in `deps/`).
#[must_use]
pub fn sibling_program(own: &Path, name: &str) -> Option<PathBuf> {
    own.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file())
}
