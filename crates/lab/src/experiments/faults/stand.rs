//! The hosts, and the program on one of them.
//!
//! ```text
//!   client 10.77.1.1 --- link1 --- .2 gateway .1 --- link2 --- 10.77.2.2 server
//!                                  `sidetrack up`
//! ```

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{LIMIT, wait};
use crate::experiments::echo::{Echo, Flow};
use crate::launch;
use crate::peers::{Unavailable, ours};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Node};

/// The server, and the gateway as the client sees it.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 2, 2);
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 1, 2);
/// The program says this when it serves.
pub(super) const READY: &str = ": ready";

/// The hosts.
pub(super) struct Stand {
    /// The client's host.
    pub client: Arc<Node>,
    /// The gateway.
    pub gateway: Arc<Node>,
    /// The server's host.
    pub server: Arc<Node>,
    program: PathBuf,
    folder: Scratch,
    _echoes: Vec<Echo>,
}

impl Stand {
    /// Builds it, with a server that echoes at each of these ports.
    ///
    /// # Errors
    /// Not root, or a program is missing; the message names it.
    pub(super) fn new(ports: &[u16]) -> Result<Self> {
        Self::with_files_in(Scratch::new()?, ports)
    }

    /// As [`Self::new`], with this folder for files of the program.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn with_files_in(folder: Scratch, ports: &[u16]) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = ours::program().map_err(Unavailable::into_error)?;
        let node = |name| Node::new(name, &launcher);
        let (client, gateway, server) = (node("client")?, node("gateway")?, node("server")?);
        gateway.sysctl("net/ipv4/ip_forward", "1")?;
        gateway.sysctl("net/ipv4/conf/all/rp_filter", "0")?;
        for host in [&client, &gateway, &server] {
            // Thousands of sockets with full buffers must not use up what the kernel has for TCP of all hosts.
            host.sysctl("net/ipv4/tcp_rmem", "4096 16384 262144")?;
            host.sysctl("net/ipv4/tcp_wmem", "4096 16384 262144")?;
        }
        let first = topology::link(&client, &gateway, 1)?;
        let second = topology::link(&gateway, &server, 2)?;
        topology::default_route(&client, IpAddr::V4(first.b.v4))?;
        topology::default_route(&server, IpAddr::V4(second.a.v4))?;
        let echoes = ports.iter().map(|port| Echo::start(&server, (SERVER, *port).into()));
        let echoes = echoes.collect::<Result<Vec<_>>>()?;
        if let Some(echo) = echoes.first() {
            let passes = || {
                let open =
                    || Ok(Flow::open(echo.address, Duration::from_secs(1)).and_then(Flow::finish).is_ok());
                gateway.enter(open)
            };
            wait("the links are ready", passes)?;
        }
        let (client, gateway, server) = (client.into(), gateway.into(), server.into());
        Ok(Self { client, gateway, server, program, folder, _echoes: echoes })
    }

    /// The folder for files of the program.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes the gateway's configuration, at once. `FOLDER` stands for [`Self::folder`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&self, text: &str) -> Result<()> {
        let text = text.replace("FOLDER", &self.folder().display().to_string());
        let fresh = self.folder().join("fresh");
        fs::write(&fresh, text)?;
        Ok(fs::rename(fresh, self.folder().join("gateway.toml"))?)
    }

    /// Starts the program, behind the words `before` and with this environment, and waits until it serves.
    ///
    /// # Errors
    /// It does not start.
    pub(super) fn start(&self, before: &[String], environment: &[(&str, String)]) -> Result<Service> {
        let program = self.program.display().to_string();
        let words: Vec<&str> = before.iter().map(String::as_str).chain([program.as_str()]).collect();
        let mut command = self.gateway.command(words[0]);
        command.args(&words[1..]).args(["up", "-c"]).arg(self.folder().join("gateway.toml"));
        command.env("SIDETRACK_LOG", "sidetrack=info").env("XDG_RUNTIME_DIR", self.folder());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        let mut up = Service::start("gateway", command, self.folder())?;
        up.wait_said(READY)?;
        Ok(up)
    }

    /// Returns a command of the program, on the gateway.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        self.command_on(&self.gateway, arguments)
    }

    /// Returns a command of the program, on a host.
    pub(super) fn command_on(&self, host: &Node, arguments: &[&str]) -> Command {
        let mut command = host.command(&self.program.to_string_lossy());
        command.args(arguments).env("XDG_RUNTIME_DIR", self.folder());
        command
    }

    /// Asks the admin interface. Returns the status and the body.
    ///
    /// # Errors
    /// It does not answer.
    pub(super) fn ask(&self, method: &str, path: &str) -> Result<(u16, String)> {
        let mut stream = UnixStream::connect(self.folder().join("gateway.sock"))?;
        stream.set_read_timeout(Some(LIMIT))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the admin interface: no answer")?;
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
        Ok((status.context("the admin interface: no status")?, body.to_owned()))
    }

    /// Returns the value of a metric, with its labels.
    ///
    /// # Errors
    /// The admin interface does not answer.
    pub(super) fn metric(&self, name: &str) -> Result<f64> {
        let (_, text) = self.ask("GET", "/metrics")?;
        let line =
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::to_owned);
        let value = line.as_deref().map_or(Some(0.0), |value| value.trim().parse().ok());
        value.with_context(|| format!("{name}: {line:?}"))
    }
}
