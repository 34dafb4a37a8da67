//! Two hosts, a firewall between them, and the shunt that moves flows past it.
//!
//! ```text
//!   client 10.0.0.1 --- to-client  firewall  to-server --- 10.0.0.2 server        each line a veth pair, or a link with
//!                       (bridge or router)                                        a delay; or all lines end in a switch
//! ```

use super::setup::Setup;
use super::switch::Switch;
use crate::launch;
use crate::link::{Conditions, Emulator, Rate};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{Node, veth};
use anyhow::{Context, Result, bail};
use sidetrack_sys::tap::Tap;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Flows to this port are shunted.
pub(super) const PORT: u16 = 5000;
/// The server's address, for them.
pub(super) const SERVER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)), PORT);
/// An idle time that no flow reaches.
pub(super) const NEVER_IDLE_MS: u64 = 600_000;
/// Rate of a link with a delay, in bits per second: what the emulator can do while everything else runs.
pub(super) const RATE: u64 = 500_000_000;
/// Its queue, which never overflows, so that the link loses nothing.
const QUEUE_BYTES: u64 = 1 << 30;
/// Time limit for everything to get ready.
const LIMIT: Duration = Duration::from_secs(20);

/// A running set-up.
pub(super) struct Network {
    /// 10.0.0.1.
    pub client: Node,
    /// 10.0.0.2.
    pub server: Node,
    /// The firewall between them.
    pub firewall: Node,
    setup: Setup,
    delay: Duration,
    sidetrack: Option<Service>,
    _switch: Option<Switch>,
    _emulator: Option<Emulator>,
    admin: PathBuf,
    program: PathBuf,
    scratch: Scratch,
}

impl Network {
    /// Builds it and waits until it works. Flows leave the fast path after this idle time; `round_trip` is added on
    /// the client's wire.
    ///
    /// # Errors Not root, or a program is missing; the message names it.
    pub(super) fn new(setup: Setup, idle_timeout_ms: u64, round_trip: Duration) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = launch::sibling_program(&launcher, "sidetrack")
            .context("sidetrack is not built: cargo build --release --workspace")?;
        let scratch = Scratch::new()?;
        let node = |name| Node::new(name, &launcher);
        let (client, firewall, server) = (node("client")?, node("firewall")?, node("server")?);
        let mut network = Self {
            admin: scratch.path().join("admin.sock"),
            client,
            server,
            firewall,
            setup,
            delay: round_trip / 2,
            sidetrack: None,
            _switch: None,
            _emulator: None,
            program,
            scratch,
        };
        network.wire(&launcher)?;
        network.hosts()?;
        if setup != Setup::Direct && setup != Setup::Switch {
            network.filter()?;
        }
        if let Some(path) = setup.fast_path() {
            network.start(path, idle_timeout_ms)?;
        }
        network.wait_until_ready()?;
        Ok(network)
    }

    /// Returns which set-up it is.
    pub(super) fn setup(&self) -> Setup {
        self.setup
    }

    /// Returns a folder for files.
    pub(super) fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Returns the admin socket of the shunt.
    pub(super) fn admin(&self) -> &Path {
        &self.admin
    }

    fn wire(&mut self, launcher: &Path) -> Result<()> {
        // No frames of other programs: then one end counts exactly what the other sent.
        for node in [&self.client, &self.server, &self.firewall] {
            node.sysctl("net/ipv6/conf/all/disable_ipv6", "1")?;
            node.sysctl("net/ipv6/conf/default/disable_ipv6", "1")?;
        }
        if self.setup.has_switch() {
            return self.wire_switch(launcher);
        }
        let (there, name) = match self.setup {
            Setup::Direct => (&self.server, "eth0"),
            _ => (&self.firewall, "to-client"),
        };
        if self.delay.is_zero() {
            veth(&self.client, "eth0", there, name)?;
        } else {
            self._emulator = Some(delayed(&self.client, there, name, self.delay)?);
        }
        if self.setup != Setup::Direct {
            veth(&self.firewall, "to-server", &self.server, "eth0")?;
            self.join_ports()?;
        }
        Ok(())
    }

    fn wire_switch(&mut self, launcher: &Path) -> Result<()> {
        let node = Node::new("switch", launcher)?;
        node.sysctl("net/ipv6/conf/default/disable_ipv6", "1")?;
        for (host, name, number) in [(&self.client, "to-client", 1), (&self.server, "to-server", 2)] {
            let wires =
                [(format!("fast{number}"), host, "eth0"), (format!("slow{number}"), &self.firewall, name)];
            for (place, other, there) in wires {
                veth(&node, &place, other, there)?;
                node.run("ip", &["link", "set", &place, "up"])?;
                other.run("ethtool", &["-K", there, "tx", "off"])?;
            }
        }
        self.join_ports()?;
        veth(&node, "control", &self.firewall, "switch")?;
        for (place, name, number) in [(&node, "control", 2), (&self.firewall, "switch", 1)] {
            place.run("ip", &["addr", "add", &format!("192.168.77.{number}/24"), "dev", name])?;
            place.run("ip", &["link", "set", name, "up"])?;
        }
        self._switch = Some(Switch::start(node, self.scratch.path(), self.setup == Setup::OpenFlow)?);
        Ok(())
    }

    /// Makes the firewall a bridge, or a router that answers for each host on the other side (proxy ARP).
    fn join_ports(&self) -> Result<()> {
        if self.setup.is_routed() {
            self.firewall.sysctl("net/ipv4/ip_forward", "1")?;
            for (name, host) in [("to-client", "10.0.0.1"), ("to-server", "10.0.0.2")] {
                self.firewall.run("ip", &["link", "set", name, "up"])?;
                self.firewall.run("ip", &["route", "add", host, "dev", name])?;
                self.firewall.sysctl(&format!("net/ipv4/conf/{name}/proxy_arp"), "1")?;
            }
            return Ok(());
        }
        self.firewall.run("ip", &["link", "add", "br0", "type", "bridge"])?;
        for name in ["to-client", "to-server"] {
            self.firewall.run("ip", &["link", "set", name, "master", "br0", "up"])?;
        }
        self.firewall.run("ip", &["link", "set", "br0", "up"]).map(drop)
    }

    fn hosts(&self) -> Result<()> {
        for (host, number) in [(&self.client, 1), (&self.server, 2)] {
            host.run("ip", &["addr", "add", &format!("10.0.0.{number}/24"), "dev", "eth0"])?;
            host.run("ip", &["link", "set", "eth0", "up"])?;
            if self.setup.plain_frames() {
                host.run("ethtool", &["-K", "eth0", "tx", "off", "gro", "on"])?;
            }
            // Buffers for all packets on their way at the longest round trip.
            for key in ["net/ipv4/tcp_wmem", "net/ipv4/tcp_rmem"] {
                host.sysctl(key, "4096 131072 268435456")?;
            }
        }
        Ok(())
    }

    /// The rules that `sidetrack shunt rules` prints, with a policy, and a stateful firewall of some size.
    fn filter(&self) -> Result<()> {
        if !self.setup.is_routed() {
            self.firewall.sysctl("net/bridge/bridge-nf-call-iptables", "1")?;
        }
        let file = self.scratch.path().join("rules.toml");
        std::fs::write(&file, format!("version = 1\n{}", self.setup.configuration("tc", NEVER_IDLE_MS)))?;
        let (file, program) = (file.display().to_string(), self.program.display().to_string());
        let rules = self.firewall.run(&program, &["shunt", "rules", "--iptables", "-c", &file])?;
        let policy = ["tcp", "udp"].map(|protocol| {
            format!(
                "-A SHUNT_POLICY -p {protocol} --dport {PORT} -m conntrack --ctstate RELATED,ESTABLISHED -j MARK --set-xmark \
                 0x10010000/0x100f0000\n"
            )
        });
        let rules = rules.replace("COMMIT", &format!("{}COMMIT", policy.concat()));
        self.firewall.run_with_input("iptables-restore", &["--noflush"], &rules)?;
        // Twenty rules that do not match, for both protocols.
        let deny = |n: usize| {
            format!("-A FORWARD -p tcp --dport {n} -j DROP\n-A FORWARD -p udp --dport {n} -j DROP\n")
        };
        let filter: String = (1..=10).map(deny).collect();
        let accept = "-A FORWARD -m conntrack --ctstate NEW,RELATED,ESTABLISHED -j ACCEPT\n";
        let filter = format!("*filter\n:FORWARD DROP [0:0]\n{filter}{accept}COMMIT\n");
        self.firewall.run_with_input("iptables-restore", &["--noflush"], &filter).map(drop)
    }

    /// Lets each packet of the slow path have DSCP CS1 from now on.
    ///
    /// # Errors
    /// `nft` refuses it.
    pub(super) fn mark_slow_packets(&self) -> Result<()> {
        self.firewall.nft(
            "table bridge lab { chain forward { type filter hook forward priority 0; ip dscp set cs1; }; }\n",
        )
    }

    fn start(&mut self, path: &str, idle_timeout_ms: u64) -> Result<()> {
        let file = self.scratch.path().join("sidetrack.toml");
        let shunt = self.setup.configuration(path, idle_timeout_ms);
        let admin = self.admin.display();
        std::fs::write(&file, format!("version = 1\n[admin]\nsocket = \"{admin}\"\n{shunt}"))?;
        let mut command = self.firewall.command(&self.program.display().to_string());
        command.args(["up", "-c"]).arg(&file);
        self.sidetrack = Some(Service::start("sidetrack", command, self.scratch.path())?);
        Ok(())
    }

    /// Waits until packets pass and the shunt answers.
    fn wait_until_ready(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let passes = self.client.enter(answered);
            let answers = match self.setup.fast_path() {
                Some(_) => self.flows().map(drop),
                None => Ok(()),
            };
            match (passes, answers) {
                (Ok(()), Ok(())) => return Ok(()),
                (passed, answered) if begun.elapsed() > LIMIT => {
                    let log = self.sidetrack.as_ref().map(Service::log).unwrap_or_default();
                    bail!("{} does not get ready: {passed:?} {answered:?} {log}", self.setup.name());
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Returns the shunt's list of flows; empty without a shunt.
    ///
    /// # Errors It does not answer.
    pub(super) fn flows(&self) -> Result<Vec<FlowLine>> {
        if self.setup.fast_path().is_none() {
            return Ok(Vec::new());
        }
        let (program, admin) = (self.program.display().to_string(), self.admin.display().to_string());
        let text = self.firewall.run(&program, &["shunt", "ls", "--json", "--admin", &admin])?;
        text.lines().map(|line| serde_json::from_str(line).context("a flow")).collect()
    }

    /// Returns the flow of a client's port, once it fits.
    ///
    /// # Errors It does not fit within [`LIMIT`].
    pub(super) fn wait_for(&self, port: u16, fits: impl Fn(&FlowLine) -> bool) -> Result<FlowLine> {
        let begun = Instant::now();
        loop {
            let flows = self.flows()?;
            let flow = flows.into_iter().find(|flow| flow.client.port() == port);
            match flow {
                Some(flow) if fits(&flow) => return Ok(flow),
                other if begun.elapsed() > LIMIT => {
                    bail!("{}: the flow does not get there: {other:?}", self.setup.name())
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

/// Makes a link with a delay between `eth0` of a host and `name` of another.
fn delayed(host: &Node, other: &Node, name: &str, delay: Duration) -> Result<Emulator> {
    let tap = |node: &Node, name: &str| {
        let tap = node.enter(|| Ok(Tap::create(name)?))?;
        node.run("ip", &["link", "set", "dev", name, "txqueuelen", "10000"])?;
        Ok::<_, anyhow::Error>(tap)
    };
    let rate = Rate { bits_per_second: RATE, queue_bytes: QUEUE_BYTES };
    let conditions = Conditions { rate: Some(rate), ..Conditions::delayed(delay) };
    let emulator = Emulator::start()?;
    emulator.add([tap(host, "eth0")?, tap(other, name)?], [conditions; 2], 1)?;
    Ok(emulator)
}

/// Returns true if the server's host answers; a reset counts as an answer.
fn answered() -> Result<()> {
    match TcpStream::connect_timeout(&SocketAddr::new(SERVER.ip(), 99), Duration::from_secs(2)) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionRefused => Err(error.into()),
        _ => Ok(()),
    }
}

/// The needed fields of a line of `shunt ls --json`.
#[derive(Clone, Debug, serde::Deserialize)]
pub(super) struct FlowLine {
    /// Who sent the first packet.
    pub client: SocketAddr,
    /// Its state.
    pub state: String,
    /// How often it was put on the fast path.
    pub installs: u32,
    /// When its entry was requested, in nanoseconds since 1970.
    pub requested_ns: Option<u64>,
    /// When its entry was confirmed.
    pub installed_ns: Option<u64>,
    /// When its entry was gone.
    pub gone_ns: Option<u64>,
    /// Counts of the slow path.
    pub slow: Bytes,
    /// Counts of the fast path.
    pub fast: Bytes,
}

/// Bytes of IP packets.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub(super) struct Bytes {
    /// From client to server.
    pub bytes_up: u64,
}
