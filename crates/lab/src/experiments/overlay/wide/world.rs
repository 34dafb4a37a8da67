//! Nodes of an overlay on any map, a process on each, and links of our own between them.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::super::scene::key;
use crate::launch::{self, Placement};
use crate::link::{Conditions, Kind, Network, Wire};
use crate::peers::{Unavailable, ours};
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::Node;

/// The server's address for flows over the overlay.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// Its address for plain TCP.
pub(super) const PLAIN: Ipv4Addr = Ipv4Addr::new(10, 99, 1, 1);
/// Its address for whole packets.
pub(super) const PACKETS: Ipv4Addr = Ipv4Addr::new(10, 99, 2, 1);
/// The address of the applications at the source.
pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 3, 1);
/// Their address for plain TCP: the target's node catches all packets to [`CLIENT`].
pub(super) const PLAIN_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 99, 4, 1);

/// The port of the overlay nodes, and of the servers that the source's listeners lead to.
const PORT: u16 = 8100;
const SERVERS: [u16; 3] = [8101, 8102, 22];
/// The ports of the source's listeners, in the same order.
const LISTENERS: [u16; 3] = [1090, 1091, 1092];

/// A server that the applications at the source reach over the overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Server {
    /// Sends every word back.
    Echo,
    /// Takes bulk data.
    Bulk,
    /// sshd.
    Ssh,
}

impl Server {
    /// Where it listens.
    pub(super) const fn address(self) -> SocketAddr {
        SocketAddr::new(std::net::IpAddr::V4(SERVER), SERVERS[self as usize])
    }

    /// The address at the source that leads to it.
    pub(super) const fn listener(self) -> SocketAddr {
        SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), LISTENERS[self as usize])
    }
}

/// How long a change of the network may take.
pub(super) const WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Where the nodes are, and how packets travel between two of them.
#[derive(Debug)]
pub(super) struct Map {
    /// Names of the nodes.
    pub names: &'static [&'static str],
    /// Links as indices into `names`, the dialling and lower end first, with their one-way delay in milliseconds.
    pub links: Vec<(usize, usize, u64)>,
    /// The node of the applications, and that of the servers.
    pub ends: [usize; 2],
    /// Lines of `[[overlay.packets]]` for packets from the source to [`PACKETS`]: one entry for each port from
    /// [`FIRST_PORT`] on. Empty: no packets are caught.
    pub services: Vec<String>,
}

/// The port of the first entry of [`Map::services`].
pub(super) const FIRST_PORT: u16 = 6000;

/// The needed fields of a node's status.
#[derive(Debug, Deserialize)]
pub(super) struct Status {
    pub paths: Vec<PathView>,
    pub links_changed_unix_ms: u64,
    pub links: Vec<LinkView>,
    pub services: Vec<Counts>,
    spread: Spread,
}

#[derive(Debug, Deserialize)]
pub(super) struct PathView {
    pub to: String,
    pub path: Vec<String>,
    #[serde(default)]
    services: Vec<Way>,
    by_datagram: bool,
}

#[derive(Debug, Deserialize)]
struct Way {
    arrives: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct LinkView {
    pub up: bool,
    pub datagrams: bool,
}

/// Counts of the packets of one service.
#[derive(Debug, Deserialize)]
pub(super) struct Counts {
    pub kind: String,
    pub dissemination: String,
    pub copies: u64,
}

#[derive(Debug, Deserialize)]
struct Spread {
    real_time: RealTime,
}

/// Counts of real-time links.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
pub(super) struct RealTime {
    /// Packets sent for the first time.
    pub sent: u64,
    /// Packets sent again.
    pub repeated: u64,
}

/// The nodes and links of a map.
pub(super) struct World {
    pub map: Map,
    pub wires: Vec<Wire>,
    pub nodes: Vec<Node>,
    pub directory: Scratch,
    program: PathBuf,
    keys: Vec<String>,
    /// Ends before the network.
    services: Vec<Service>,
    network: Network,
}

impl World {
    /// Builds everything; returns when all links are up and all paths are known.
    ///
    /// # Errors Not root, or our program is not built beside the lab.
    pub(super) fn new(map: Map, kind: Kind, seed: u64, progress: &Progress) -> Result<Self> {
        progress.say(&format!("{} nodes", map.names.len()));
        let launcher = launch::launcher()?;
        let program = ours::program().map_err(Unavailable::into_error)?;
        let network = Network::new(kind, &launcher, seed)?;
        let directory = Scratch::new()?;
        let nodes: Vec<_> = map.names.iter().map(|name| Node::new(name, &launcher)).collect::<Result<_>>()?;
        let mut wires = Vec::new();
        for (subnet, (a, b, ms)) in (1..).zip(&map.links) {
            let conditions = Conditions::delayed(Duration::from_millis(*ms));
            wires.push(network.join(&nodes[*a], &nodes[*b], subnet, [conditions; 2])?);
        }
        let keys = map.names.iter().map(|name| key(&program, &directory, name)).collect::<Result<_>>()?;
        let mut world = Self { map, wires, nodes, directory, program, keys, services: Vec::new(), network };
        world.address()?;
        for at in (0..world.nodes.len()).rev() {
            world.start(at)?;
        }
        world.wait("all links and paths", |status| {
            status.paths.iter().all(|path| !path.path.is_empty())
                && status.links.iter().all(|link| link.up && link.datagrams)
        })?;
        world.wait_for_packets()?;
        Ok(world)
    }

    /// The network of the links.
    pub(super) fn network(&self) -> &Network {
        &self.network
    }

    /// The node of the applications.
    pub(super) fn source(&self) -> &Node {
        &self.nodes[self.map.ends[0]]
    }

    /// The node of the servers.
    pub(super) fn target(&self) -> &Node {
        &self.nodes[self.map.ends[1]]
    }

    /// The addresses of applications and servers. Those of the overlay have no route that works, so that an uncaught packet
    /// cannot arrive by accident.
    fn address(&self) -> Result<()> {
        let add = |node: &Node, address: Ipv4Addr| {
            node.run("ip", &["addr", "add", &format!("{address}/32"), "dev", "lo"]).map(|_| ())
        };
        for address in [SERVER, PLAIN, PACKETS] {
            add(self.target(), address)?;
        }
        for address in [CLIENT, PLAIN_CLIENT] {
            add(self.source(), address)?;
        }
        let neighbour = |end: usize| {
            let link = self.map.links.iter().zip(&self.wires).find_map(|((a, b, _), wire)| {
                (*a == end).then_some(wire.link.b.v4).or_else(|| (*b == end).then_some(wire.link.a.v4))
            });
            link.context("an end without links")
        };
        let nowhere = |node: &Node, to: Ipv4Addr, via: Ipv4Addr| {
            node.run("ip", &["route", "add", &to.to_string(), "via", &via.to_string()]).map(|_| ())
        };
        nowhere(self.source(), PACKETS, neighbour(self.map.ends[0])?)?;
        nowhere(self.target(), CLIENT, neighbour(self.map.ends[1])?)?;
        for node in &self.nodes {
            node.sysctl("net/ipv4/conf/all/rp_filter", "0")?;
            node.sysctl("net/ipv4/ip_forward", "1")?;
            for key in ["net/ipv4/tcp_wmem", "net/ipv4/tcp_rmem"] {
                node.sysctl(key, "4096 131072 33554432")?;
            }
        }
        Ok(())
    }

    fn start(&mut self, at: usize) -> Result<()> {
        let (name, directory) = (self.map.names[at], self.directory.path());
        let path = directory.join(format!("{name}.toml"));
        std::fs::write(&path, self.config(at))?;
        let placement = Placement { netns: None, cpu: None, nice: Some(-10) };
        let node = &self.nodes[at];
        let mut command = node.command_at(&self.program.to_string_lossy(), &placement);
        command.args(["up", "-c"]).arg(&path);
        let mut service = Service::start(&format!("sidetrack-{name}"), command, directory)?;
        service.wait_listening(node, if at == self.map.ends[0] { LISTENERS[0] } else { PORT })?;
        service.wait_socket(&directory.join(format!("{name}.sock")))?;
        self.services.push(service);
        Ok(())
    }

    fn config(&self, at: usize) -> String {
        let (own, folder) = (self.map.names[at], self.directory.path().display());
        let mut text = format!(
            "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"{folder}/{own}.sock\"\n\
             [record]\nto = \"none\"\n[overlay]\nname = \"{own}\"\nkey_file = \"{folder}/{own}.key\"\n\
             listen = \"0.0.0.0:{PORT}\"\n"
        );
        for (other, (name, key)) in self.map.names.iter().zip(&self.keys).enumerate() {
            let _ = write!(text, "[overlay.node.{name}]\nkey = \"{key}\"\n");
            let dialled =
                self.map.links.iter().zip(&self.wires).find(|((a, b, _), _)| (*a, *b) == (at, other));
            if let Some((_, wire)) = dialled {
                let _ = writeln!(text, "address = \"{}\"", SocketAddr::from((wire.link.b.v4, PORT)));
            }
        }
        let [source, target] = self.map.ends.map(|end| self.map.names[end]);
        if own == source {
            for server in [Server::Echo, Server::Bulk, Server::Ssh] {
                let (from, to) = (server.listener(), server.address());
                let _ = write!(
                    text,
                    "[[listen]]\nname = \"to-{}\"\nkind = \"reverse\"\naddress = \"{from}\"\nto = \"{to}\"\n",
                    to.port()
                );
            }
            let _ = write!(text, "[[rule]]\nname = \"all\"\ncarrier = \"overlay:{target}\"\n");
            for (port, service) in (FIRST_PORT..).zip(&self.map.services) {
                let _ = write!(
                    text,
                    "[[overlay.packets]]\nnode = \"{target}\"\nto = \"{PACKETS}/32\"\nport = [{port}]\n{service}"
                );
            }
        }
        if own == target {
            for address in [SERVER, PACKETS] {
                let _ = write!(text, "[[overlay.deliver]]\nto = \"{address}/32\"\n");
            }
            if !self.map.services.is_empty() {
                let _ = write!(text, "[[overlay.packets]]\nnode = \"{source}\"\nto = \"{CLIENT}/32\"\n");
            }
        }
        text
    }

    /// Returns the state of a node.
    pub(super) fn status(&self, at: usize) -> Result<Status> {
        let mut command = Command::new(&self.program);
        let socket = self.directory.path().join(format!("{}.sock", self.map.names[at]));
        command.args(["overlay", "status", "--json", "--admin"]).arg(socket);
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Waits until the status of every node fits.
    ///
    /// # Errors
    /// It does not within a minute.
    pub(super) fn wait(&self, what: &str, fits: impl Fn(&Status) -> bool) -> Result<()> {
        (0..self.nodes.len()).try_for_each(|at| self.wait_for(at, what, &fits))
    }

    fn wait_for(&self, at: usize, what: &str, fits: impl Fn(&Status) -> bool) -> Result<()> {
        let began = Instant::now();
        loop {
            let status = self.status(at)?;
            if fits(&status) {
                return Ok(());
            }
            let name = self.map.names[at];
            ensure!(began.elapsed() < WITHIN, "not in time: {what}; {name} says {status:?}");
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits until the packets of all services arrive over their links.
    ///
    /// # Errors
    /// They do not within a minute.
    pub(super) fn wait_for_packets(&self) -> Result<()> {
        if self.map.services.is_empty() {
            return Ok(());
        }
        let target = self.map.names[self.map.ends[1]];
        self.wait_for(self.map.ends[0], "packets arrive over their links", |status| {
            let path = status.paths.iter().find(|path| path.to == target);
            path.is_some_and(|path| path.by_datagram && path.services.iter().all(|way| way.arrives))
        })
    }

    /// Returns the nodes that flows pass now, from the source to the target.
    ///
    /// # Errors
    /// There is no path.
    pub(super) fn route(&self) -> Result<Vec<usize>> {
        let target = self.map.names[self.map.ends[1]];
        let status = self.status(self.map.ends[0])?;
        let path = status.paths.into_iter().find(|path| path.to == target).context("no such node")?.path;
        let index = |name: &String| self.map.names.iter().position(|other| other == name);
        path.iter().map(|name| index(name).context("no such node")).collect()
    }

    /// Returns the links that flows pass now, as indices.
    ///
    /// # Errors
    /// There is no path.
    pub(super) fn path(&self) -> Result<Vec<usize>> {
        self.route()?.windows(2).map(|pair| self.link(pair[0], pair[1])).collect()
    }

    /// Returns the link between two nodes.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn link(&self, one: usize, other: usize) -> Result<usize> {
        let ends = (one.min(other), one.max(other));
        self.map.links.iter().position(|(a, b, _)| (*a, *b) == ends).context("no such link")
    }

    /// Returns the delay of a link.
    pub(super) fn delay(&self, link: usize) -> Duration {
        Duration::from_millis(self.map.links[link].2)
    }

    /// Returns the copies that all nodes have sent of the packets of each service, and what their real-time links did.
    ///
    /// # Errors
    /// A node does not answer.
    pub(super) fn copies(&self) -> Result<(Vec<Counts>, RealTime)> {
        let (mut all, mut links) = (Vec::new(), RealTime::default());
        for at in 0..self.nodes.len() {
            let status = self.status(at)?;
            let RealTime { sent, repeated } = status.spread.real_time;
            links = RealTime { sent: links.sent + sent, repeated: links.repeated + repeated };
            all.extend(status.services);
        }
        Ok((all, links))
    }

    /// Returns the CPU time of all nodes, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> u64 {
        self.services.iter().map(Service::cpu_ns).sum()
    }
}
