//! Starting a program inside a node: `sidetrack-lab node-exec` re-executes itself there.
//!
//! The launcher joins the network namespace, makes the program end with its parent, gives it a new session and
//! autogroup, and replaces itself with the program (exec). A separate launcher, instead of code between fork and
//! exec, keeps the lab free of `unsafe`. The pid of the launcher stays the pid, session and process group of the
//! program; [`crate::cpu`] finds its children by it.

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
    /// Network namespace to join, as a path such as `/proc/PID/ns/net`; absent: the current one.
    #[arg(long)]
    pub netns: Option<PathBuf>,
    /// The only CPU to run on; absent: any.
    #[arg(long)]
    pub cpu: Option<usize>,
    /// Nice value of the process and of its autogroup, -20 to 19; absent: unchanged.
    #[arg(long, allow_hyphen_values = true)]
    pub nice: Option<i32>,
}

/// Arguments of `node-exec`: a [`Placement`] and the program to execute.
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
    /// Executes the program; returns only if that failed.
    ///
    /// # Errors
    /// The namespace cannot be joined, the parent is already gone, or the program cannot be executed.
    pub fn run(self) -> Result<()> {
        bind_life_to(self.parent)?;
        // A new session is also a new autogroup, so that `nice` has an effect relative to other sessions.
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

/// Returns the command line that runs `program` at `placement`, through the launcher binary `launcher`.
#[must_use]
pub fn command(launcher: &Path, placement: &Placement, program: &str) -> Command {
    let mut command = Command::new(launcher);
    // A node is a separate host: it must not use this machine's proxy settings.
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

/// Moves the calling thread, and the processes it starts later, into the network namespace at `path`.
///
/// # Errors
/// The path cannot be opened or the kernel refuses (CAP_SYS_ADMIN is needed in both namespaces).
pub fn join_netns(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("cannot open the namespace {}", path.display()))?;
    rustix::thread::move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("cannot join the namespace {}; the lab needs root", path.display()))
}

fn bind_life_to(parent: u32) -> Result<()> {
    // SIGTERM, not SIGKILL: on SIGTERM nginx, dante and HAProxy end their own workers.
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

/// Best effort: without the right to lower the nice value, the figures are noisier but not wrong.
fn set_nice(nice: i32) {
    let _ = rustix::process::setpriority_process(None, nice);
    let _ = std::fs::write("/proc/self/autogroup", nice.to_string());
}

/// Raises the soft limit of open files to the hard limit, for this process and its children.
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

/// Returns the launcher: this program if it is `sidetrack-lab`, otherwise the one built beside the test binary.
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

/// Returns the program `name` in the directory of `own`, or one level above (test binaries are in `deps/`).
#[must_use]
pub fn sibling_program(own: &Path, name: &str) -> Option<PathBuf> {
    own.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file())
}
