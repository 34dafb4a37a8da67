//! Client, gateway and server, with our program on the gateway.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use sidetrack_common::exchange;

use crate::launch;
use crate::peers::{Unavailable, ours};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Node};

/// What our program says when it serves.
const READY: &str = ": ready";

/// The three hosts, joined in a line.
pub(super) struct Hosts {
    client: Node,
    gateway: Node,
    server: Node,
    door: SocketAddr,
    listener: TcpListener,
    folder: Scratch,
}

/// Our program on the gateway: a port that leads to the server.
pub(super) struct Up {
    service: Service,
    folder: std::path::PathBuf,
}

impl Hosts {
    /// Makes them.
    ///
    /// # Errors
    /// Not root, or a program is missing.
    pub(super) fn new() -> Result<Self> {
        let launcher = launch::launcher()?;
        let node = |name| Node::new(name, &launcher);
        let (client, gateway, server) = (node("client")?, node("gateway")?, node("server")?);
        let first = topology::link(&client, &gateway, 1)?;
        let second = topology::link(&gateway, &server, 2)?;
        let listener = server.enter(|| Ok(TcpListener::bind((second.b.v4, 0))?))?;
        let door = SocketAddr::new(IpAddr::V4(first.b.v4), 80);
        Ok(Self { client, gateway, server, door, listener, folder: Scratch::new()? })
    }

    /// Starts our program. `shunt`: of its only rule.
    ///
    /// # Errors
    /// It does not start.
    pub(super) fn start(&self, shunt: &str) -> Result<Up> {
        let program = ours::program().map_err(Unavailable::into_error)?;
        let (folder, to) = (self.folder.path(), self.listener.local_addr()?);
        let (shown, door) = (folder.display(), self.door);
        let text = format!(
            "version = 1\ndefault = \"deny\"\n[admin]\nsocket = \"{shown}/admin.sock\"\n[record]\nto = \"{shown}/records.jsonl\"\n\
             [wire]\npins = \"none\"\n[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"{door}\"\nto = \"{to}\"\n\
             [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\nshunt = {shunt}\n"
        );
        fs::write(folder.join("sidetrack.toml"), text)?;
        let _ = fs::remove_file(folder.join("records.jsonl"));
        let mut command = self.gateway.command(&program.to_string_lossy());
        command.env("SIDETRACK_LOG", "sidetrack=info");
        command.args(["up", "-c"]).arg(folder.join("sidetrack.toml"));
        let mut service = Service::start("sidetrack", command, folder)?;
        service.wait_said(READY)?;
        Ok(Up { service, folder: folder.to_owned() })
    }

    /// Lets both outer hosts lose this share of the packets that come to them.
    ///
    /// # Errors
    /// nft refuses.
    pub(super) fn lose(&self, percent: u32) -> Result<()> {
        for host in [&self.client, &self.server] {
            host.nft(&format!(
                "table inet loss {{ chain in {{ type filter hook prerouting priority -300; \
                 ip protocol tcp numgen random mod 100 < {percent} drop; }}\n}}\n"
            ))?;
        }
        Ok(())
    }

    /// Opens connections through the gateway.
    ///
    /// # Errors
    /// One cannot be opened.
    pub(super) fn connect(&self, count: usize) -> Result<Vec<TcpStream>> {
        let door = self.door;
        self.client.enter(move || {
            (0..count).map(|_| TcpStream::connect(door)).collect::<io::Result<Vec<_>>>().context("connect")
        })
    }

    /// The server's end of the next connection.
    ///
    /// # Errors
    /// What accept says.
    pub(super) fn accept(&self) -> io::Result<TcpStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }

    /// Segments that TCP of each host has sent again: client, gateway, server.
    ///
    /// # Errors
    /// The counters cannot be read.
    pub(super) fn sent_again(&self) -> Result<[u64; 3]> {
        let of = |host: &Node| {
            let text = host.enter(|| Ok(fs::read_to_string("/proc/thread-self/net/snmp")?))?;
            let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
            let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
            let at = names.split(' ').position(|name| name == "RetransSegs").context("no RetransSegs")?;
            Ok::<u64, anyhow::Error>(values.split(' ').nth(at).context("no value")?.parse()?)
        };
        Ok([of(&self.client)?, of(&self.gateway)?, of(&self.server)?])
    }
}

impl Up {
    /// Processor time that it has used, nanoseconds.
    pub(super) fn cpu_ns(&self) -> u64 {
        self.service.cpu_ns()
    }

    /// Its metrics, by name and labels.
    ///
    /// # Errors
    /// The admin socket does not answer.
    pub(super) fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        let asked = exchange::ask(&self.folder.join("admin.sock"), "GET", "/metrics", "");
        let (status, text) = asked.map_err(|error| anyhow::anyhow!("{error}"))?;
        ensure!(status == 200, "metrics: {status}");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let pairs = lines.filter_map(|line| line.rsplit_once(' '));
        Ok(pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
    }

    /// Ends it, and returns its records.
    ///
    /// # Errors
    /// It does not end well.
    pub(super) fn stop(mut self) -> Result<Vec<serde_json::Value>> {
        self.service.signal(Signal::TERM)?;
        let status = self.service.wait_ended()?;
        ensure!(status.success(), "sidetrack: {status}: {}", self.service.log());
        let text = fs::read_to_string(self.folder.join("records.jsonl"))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}
