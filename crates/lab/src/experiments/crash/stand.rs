//! The hosts of one configuration, and the program on one of them.
//!
//! ```text
//!   client 10.77.1.1 --- link1 --- .2 gateway .1 --- link2 --- 10.77.2.2 server
//!                                  `sidetrack up`
//! ```

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use sidetrack_sys::bpf;

use super::setups::{DOOR_PORT, Setup};
use super::traces::{Change, Traces};
use super::{LIMIT, POLL};
use crate::experiments::echo::{Echo, Flow};
use crate::launch;
use crate::peers::{Unavailable, ours};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Node};

/// The program says this when it serves, and this when it has read its configuration again.
pub(super) const READY: &str = ": ready";
pub(super) const RELOADED: &str = " reloaded (";
/// Bytes of a flow that a fast path is to take, and of one that is only served.
const LARGE: usize = 100_000;
/// A blocked connection is rejected at once; one that is not rejected within this time does not pass either.
const BLOCKED_WITHIN: Duration = Duration::from_secs(2);
/// Runs `cleanup` where it finds nothing of other programs of this machine: neither control groups nor sockets.
const ALONE: &str = "umount -lat cgroup2; mount -t tmpfs none /run && exec \"$@\"";

/// The hosts.
pub(super) struct Stand {
    setup: Setup,
    client: Node,
    gateway: Node,
    echo: Echo,
    door: SocketAddr,
    program: PathBuf,
    before: Before,
    folder: Scratch,
    _server: Node,
}

/// The host before our program was there.
#[derive(Debug, Default)]
struct Before {
    quick: Traces,
    full: Traces,
}

/// Everything is as before, or blocked as configured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settled {
    /// When that was so.
    pub after: Duration,
    /// Whether traffic is blocked.
    pub is_blocked: bool,
    /// Whether programs are left that outlive the process.
    pub is_pinned: bool,
}

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// In order: nothing is left.
    Orderly,
    /// It was killed: what is to be left after a crash may be there.
    Killed,
}

impl Stand {
    /// Builds it, and notes how it is before our program was there.
    ///
    /// # Errors
    /// Not root, or a program is missing; the message names it.
    pub(super) fn new(setup: Setup) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = ours::program().map_err(Unavailable::into_error)?;
        let node = |name| Node::new(name, &launcher);
        let (client, gateway, server) = (node("client")?, node("gateway")?, node("server")?);
        gateway.sysctl("net/ipv4/ip_forward", "1")?;
        gateway.sysctl("net/ipv4/conf/all/rp_filter", "0")?;
        let first = topology::link(&client, &gateway, 1)?;
        let second = topology::link(&gateway, &server, 2)?;
        topology::default_route(&client, IpAddr::V4(first.b.v4))?;
        topology::default_route(&server, IpAddr::V4(second.a.v4))?;
        let echo = Echo::start(&server, (second.b.v4, 0).into())?;
        let mut stand = Self {
            setup,
            client,
            gateway,
            echo,
            door: (first.b.v4, DOOR_PORT).into(),
            program,
            before: Before::default(),
            folder: Scratch::new()?,
            _server: server,
        };
        if setup.is_pinned() {
            // Mounts the file system of pins: the program does it only where it is missing.
            stand.gateway.enter(|| Ok(bpf::Pins::open(&bpf::default_pins()?)?.remove()?))?;
        }
        if setup == Setup::Shunt {
            stand.write(0)?;
            let file = stand.file().display().to_string();
            let rules = stand.ask(&["shunt", "rules", "-c", &file])?;
            stand.gateway.nft(&rules)?;
        }
        let begun = Instant::now();
        loop {
            stand.before = stand
                .gateway
                .enter(|| Ok(Before { full: Traces::full(&[])?, quick: Traces::quick(&[])? }))?;
            if stand.before.full.are_links_up() && stand.passes().is_ok() {
                return Ok(stand);
            }
            ensure!(begun.elapsed() < LIMIT, "the links do not get ready: {:#?}", stand.before.full);
            std::thread::sleep(POLL);
        }
    }

    /// Returns the program's path.
    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("sidetrack.toml")
    }

    /// Writes this version of the configuration, at once: the running program watches the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&self, version: u16) -> Result<()> {
        let text = self.setup.configuration(self.folder.path(), self.door, self.echo.address, version);
        let fresh = self.folder.path().join("fresh");
        fs::write(&fresh, text)?;
        Ok(fs::rename(fresh, self.file())?)
    }

    /// Starts the program with the configuration; returns when the kernel has executed it. Its log is `NAME.log`.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(&self, name: &str) -> Result<Service> {
        let mut command = self.command();
        command.args(["up", "-c"]).arg(self.file());
        let mut service = Service::start(name, command, self.folder.path())?;
        let wanted = self.program.file_name().map(|name| name.to_string_lossy().into_owned());
        let comm = format!("/proc/{}/comm", service.pid());
        let begun = Instant::now();
        // Until then it is the launcher.
        while fs::read_to_string(&comm).ok().map(|name| name.trim().to_owned()) != wanted {
            ensure!(service.is_running() && begun.elapsed() < LIMIT, "it does not start: {}", service.log());
            std::thread::yield_now();
        }
        Ok(service)
    }

    fn command(&self) -> Command {
        let mut command = self.gateway.command(&self.program.to_string_lossy());
        command.env("SIDETRACK_LOG", "sidetrack=info").env("XDG_RUNTIME_DIR", self.folder.path());
        command
    }

    /// Runs a command of the program to its end; returns what it prints.
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command().args(arguments).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sidetrack {}: {said}", arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Where the client connects to.
    fn entry(&self) -> SocketAddr {
        if self.setup == Setup::Wire { self.door } else { self.echo.address }
    }

    /// Opens a flow that stays, and waits until it is on its fast path if there is one.
    ///
    /// # Errors
    /// It does not get there.
    pub(super) fn hold(&self) -> Result<Flow> {
        let entry = self.entry();
        let mut flow = self.client.enter(|| Ok(Flow::open(entry, LIMIT)?))?;
        flow.echo(LARGE)?;
        let socket = self.folder.path().join("admin.sock").display().to_string();
        let (command, mark) = match self.setup {
            Setup::Open | Setup::Closed => return Ok(flow),
            Setup::Wire => ("flows", "\"shunted\":true"),
            Setup::Shunt => ("shunt ls", "\"state\":\"installed\""),
        };
        let list: Vec<&str> = command.split(' ').chain(["--json", "--admin", &socket]).collect();
        let begun = Instant::now();
        loop {
            let text = self.ask(&list)?;
            if text.split_whitespace().collect::<String>().contains(mark) {
                return Ok(flow);
            }
            ensure!(begun.elapsed() < LIMIT, "the flow does not get onto its fast path: {text}");
            flow.echo(1)?;
            std::thread::sleep(POLL);
        }
    }

    /// Checks that a running program serves: a connection from the client, and one of the gateway's own where those are
    /// redirected.
    ///
    /// # Errors
    /// A connection is not served, or passes beside the program.
    pub(super) fn serves(&self) -> Result<()> {
        let entry = self.entry();
        let hosts: &[&Node] = match self.setup {
            Setup::Open | Setup::Closed => &[&self.client, &self.gateway],
            Setup::Wire | Setup::Shunt => &[&self.client],
        };
        for host in hosts {
            let mut flow = host.enter(|| Ok(Flow::open(entry, LIMIT)?))?;
            flow.echo(LARGE)?;
            if self.setup != Setup::Shunt {
                ensure!(flow.is_relayed(), "a connection of {} passes beside the program", host.name());
            }
        }
        if self.setup == Setup::Shunt {
            let programs = self.gateway.enter(|| Traces::quick(&[]))?.programs();
            ensure!(programs >= 2, "the shunt has {programs} programs on its two ports");
        }
        Ok(())
    }

    /// Checks that a connection reaches the server without the program.
    ///
    /// # Errors
    /// It does not, or something relays it.
    pub(super) fn passes(&self) -> Result<()> {
        let server = self.echo.address;
        let mut flow = self.client.enter(|| Ok(Flow::open(server, LIMIT)?))?;
        flow.echo(1)?;
        ensure!(!flow.is_relayed(), "{} reaches the server as {}", flow.own, flow.seen);
        Ok(())
    }

    /// Checks that connections of the client and of the gateway do not get through.
    ///
    /// # Errors
    /// One does.
    pub(super) fn is_blocked(&self) -> Result<()> {
        let server = self.echo.address;
        for host in [&self.client, &self.gateway] {
            let passed = host.enter(|| Ok(Flow::open(server, BLOCKED_WITHIN).is_ok()))?;
            ensure!(!passed, "a connection of {} passes the block", host.name());
        }
        Ok(())
    }

    /// Runs `sidetrack cleanup`.
    ///
    /// # Errors
    /// It fails.
    pub(super) fn cleanup(&self) -> Result<()> {
        let program = self.program.to_string_lossy();
        let socket = self.folder.path().join("admin.sock").display().to_string();
        let words = ["--mount", "--", "sh", "-c", ALONE, "sh", &program, "cleanup", "--admin", &socket];
        self.gateway.run("unshare", &words).map(drop)
    }

    /// Says what there is more than before our program was started, by kind.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn in_force(&self) -> Result<String> {
        Ok(self.gateway.enter(|| Traces::quick(&[]))?.beyond(&self.before.quick))
    }

    /// Waits until everything is as it was before the program was started, or blocked as configured. `family`: the
    /// processes that were killed or left alone. `end`: whether pins may be left. The inner error lists what is left after [`LIMIT`].
    ///
    /// # Errors
    /// The state of the host cannot be read.
    pub(super) fn settle(
        &self,
        family: &[u32],
        since: Instant,
        end: End,
    ) -> Result<Result<Settled, Vec<String>>> {
        let quick = match self.wait_for(Traces::quick, &self.before.quick, family, (since, end))? {
            Ok(settled) => settled,
            left => return Ok(left),
        };
        // What the tools show counts, too, but running them takes longer than most of what is awaited.
        let full = self.wait_for(Traces::full, &self.before.full, family, (since, end))?;
        Ok(full.map(|full| Settled { after: quick.after, ..full }))
    }

    fn wait_for(
        &self,
        read: fn(&[u32]) -> Result<Traces>,
        before: &Traces,
        family: &[u32],
        (since, end): (Instant, End),
    ) -> Result<Result<Settled, Vec<String>>> {
        let may_be_pinned = end == End::Killed && self.setup.is_pinned();
        loop {
            let change = self.gateway.enter(|| read(family))?.since(before);
            let (after, is_blocked) = (since.elapsed(), change == Change::Blocked);
            let is_pinned = change == Change::Pinned;
            if change == Change::None || is_blocked && self.setup.is_closed() || is_pinned && may_be_pinned {
                return Ok(Ok(Settled { after, is_blocked, is_pinned }));
            }
            if after > LIMIT {
                return Ok(Err(match change {
                    Change::Other(lines) => lines,
                    Change::Pinned => vec!["left: BPF programs, against the configuration".to_owned()],
                    _ => vec!["left: a table that blocks traffic, against the configuration".to_owned()],
                }));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Starts the program again, has it serve, and stops it in order.
    ///
    /// # Errors
    /// One of these does not succeed, or something is left afterwards.
    pub(super) fn again(&self) -> Result<()> {
        let mut up = self.start("again")?;
        up.wait_said(READY).context("the start")?;
        self.serves().with_context(|| format!("serving; its log: {}", up.log()))?;
        up.signal(Signal::TERM)?;
        let status = up.wait_ended()?;
        ensure!(status.success(), "its end: {status}: {}", up.log());
        match self.settle(&[up.pid()], Instant::now(), End::Orderly)? {
            Ok(settled) if settled.is_blocked => bail!("after its orderly end traffic is blocked"),
            Ok(_) => Ok(()),
            Err(left) => bail!("after its orderly end: {}", left.join("; ")),
        }
    }
}
