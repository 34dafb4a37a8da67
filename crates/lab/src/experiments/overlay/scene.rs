//! Hosts, the links between them, and an overlay node on each.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;

use super::shape::{Shape, subnet};
use crate::launch::{self, Placement};
use crate::link::{Conditions, Kind, Loss, Network, Wire};
use crate::peers::{Unavailable, ours};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Link, Node};

/// The target's address for flows over the overlay.
pub(super) const TARGET: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// The target's address for flows over the overlay that use two paths at a time.
pub(super) const COPIES: Ipv4Addr = Ipv4Addr::new(10, 99, 3, 1);
/// The target's address for plain TCP.
pub(super) const PLAIN: Ipv4Addr = Ipv4Addr::new(10, 99, 1, 1);
/// The target's address for packets that are caught whole.
pub(super) const PACKETS: Ipv4Addr = Ipv4Addr::new(10, 99, 2, 1);
/// The port for packets on one kind of links; see [`PACKETS`].
pub(super) const PACKETS_RELIABLE: u16 = 5201;
/// The port for packets on one kind of links; see [`PACKETS`].
pub(super) const PACKETS_BEST_EFFORT: u16 = 5202;
/// Port of the overlay nodes.
const PORT: u16 = 8100;
/// Port of our listener at the source.
const LISTENER: u16 = 1090;
const PATH_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Hosts without any software of ours, behind the source and behind the target.
struct Hosts {
    left: Node,
    right: Node,
    /// The link between source and left host, and between target and right host.
    links: [Link; 2],
}

/// The hosts, links and nodes.
pub(super) struct Scene {
    shape: &'static Shape,
    network: Network,
    nodes: Vec<Node>,
    hosts: Option<Hosts>,
    wires: Vec<Wire>,
    services: Vec<Service>,
    directory: Scratch,
    program: PathBuf,
    /// Public keys of the nodes.
    keys: Vec<String>,
    /// Lines about lost links in the logs of ended processes.
    links_lost: usize,
}

impl Scene {
    /// Builds everything; returns when the overlay has a path.
    ///
    /// # Errors Not root, or our program is not built beside the lab.
    pub(super) fn new(shape: &'static Shape, kind: Kind, seed: u64) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = ours::program().map_err(Unavailable::into_error)?;
        let network = Network::new(kind, &launcher, seed)?;
        let directory = Scratch::new()?;
        let nodes: Vec<_> =
            shape.names.iter().map(|name| Node::new(name, &launcher)).collect::<Result<_>>()?;
        let mut wires = Vec::new();
        for (number, (a, b, _)) in shape.links.iter().enumerate() {
            let conditions = [shape.conditions(number, Loss::None); 2];
            wires.push(network.join(&nodes[*a], &nodes[*b], subnet(number)?, conditions)?);
        }
        let hosts = shape.has_hosts.then(|| Hosts::new(shape, &nodes, &launcher)).transpose()?;
        let keys = shape.names.iter().map(|name| key(&program, &directory, name)).collect::<Result<_>>()?;
        let services = Vec::new();
        let mut scene =
            Self { shape, network, nodes, hosts, wires, services, directory, program, keys, links_lost: 0 };
        scene.route()?;
        // A node that dials starts after the node that it dials.
        for at in (shape.target()..shape.names.len()).chain((0..shape.target()).rev()) {
            scene.start(at)?;
        }
        if shape.names.contains(&"spare") {
            // This link is only for failures. Without a higher cost, the overlay would prefer it to a link with much
            // loss.
            scene.overlay(&["link", "set", "spare", "--cost", "500"])?;
        }
        scene.wait_for_path(shape.names[1])?;
        Ok(scene)
    }

    /// Returns the network of the links.
    pub(super) fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the node of the applications.
    pub(super) fn source(&self) -> &Node {
        &self.nodes[0]
    }

    /// Returns the node of the servers.
    pub(super) fn target(&self) -> &Node {
        &self.nodes[self.shape.target()]
    }

    /// Returns the host behind the source, the host behind the target, and the latter's address.
    ///
    /// # Errors This shape has none.
    pub(super) fn hosts(&self) -> Result<(&Node, &Node, Ipv4Addr)> {
        let hosts = self.hosts.as_ref().context("nobody is behind the ends of this path")?;
        Ok((&hosts.left, &hosts.right, hosts.links[1].b.v4))
    }

    /// Returns the rate of every link, in bits per second.
    pub(super) fn rate(&self) -> u64 {
        self.shape.rate
    }

    /// Returns the scratch space.
    pub(super) fn directory(&self) -> &Scratch {
        &self.directory
    }

    /// Routes plain TCP along the hops, with a congestion control that applies to all programs.
    ///
    /// # Errors
    /// `ip` refuses.
    pub(super) fn route_plain(&self, congestion: &str) -> Result<()> {
        let sources = self.wires[0].link.a.v4.to_string();
        let replace = |node: usize, to: &str, via: Ipv4Addr| {
            let route = ["route", "replace", to, "via", &via.to_string(), "congctl", congestion];
            self.nodes[node].run("ip", &route).map(|_| ())
        };
        for (hop, wire) in self.wires.iter().take(self.shape.hops).enumerate() {
            replace(hop, &PLAIN.to_string(), wire.link.b.v4)?;
            if hop > 0 {
                replace(hop + 1, &sources, wire.link.a.v4)?;
            }
        }
        Ok(())
    }

    fn route(&self) -> Result<()> {
        for address in [TARGET, COPIES, PLAIN, PACKETS] {
            self.target().run("ip", &["addr", "add", &format!("{address}/32"), "dev", "lo"])?;
        }
        // The overlay's addresses have no route, so that an uncaught connection cannot arrive by accident.
        let nowhere = |node: &Node, to: &str, via: Ipv4Addr| {
            node.run("ip", &["route", "add", to, "via", &via.to_string()]).map(|_| ())
        };
        for address in [TARGET, COPIES, PACKETS] {
            nowhere(self.source(), &address.to_string(), self.wires[0].link.b.v4)?;
        }
        if let Some(Hosts { links: [left, right], .. }) = &self.hosts {
            nowhere(self.source(), &network_of(right), self.wires[0].link.b.v4)?;
            nowhere(self.target(), &network_of(left), self.wires[self.shape.hops - 1].link.a.v4)?;
        }
        for node in &self.nodes {
            node.sysctl("net/ipv4/conf/all/rp_filter", "0")?;
            node.sysctl("net/ipv4/ip_forward", "1")?;
            for key in ["net/ipv4/tcp_wmem", "net/ipv4/tcp_rmem"] {
                node.sysctl(key, "4096 131072 33554432")?;
            }
        }
        self.route_plain("bbr")
    }

    /// Sets the share of frames lost on the lossy link, in each direction.
    ///
    /// # Errors
    /// The emulator has ended.
    pub(super) fn set_loss(&self, share: f64) -> Result<()> {
        let loss = if share > 0.0 { Loss::Bernoulli(share) } else { Loss::None };
        self.wires[self.shape.lossy].set_both(self.shape.conditions(self.shape.lossy, loss))
    }

    /// Cuts or restores the lossy link.
    ///
    /// # Errors
    /// The emulator has ended.
    pub(super) fn set_cut(&self, is_cut: bool) -> Result<()> {
        let whole = self.shape.conditions(self.shape.lossy, Loss::None);
        self.wires[self.shape.lossy].set_both(Conditions { is_up: !is_cut, ..whole })
    }

    /// Kills the first relay with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub(super) fn kill_relay(&mut self) -> Result<()> {
        let at = self.index("near")?;
        let relay = self.services.remove(at);
        self.links_lost += lost(&relay.log());
        relay.signal(Signal::KILL)
    }

    /// Starts it again; returns when flows pass it.
    ///
    /// # Errors It does not start.
    pub(super) fn revive_relay(&mut self) -> Result<()> {
        self.start(1)?;
        self.wait_for_path("near")
    }

    fn index(&self, name: &str) -> Result<usize> {
        let name = format!("sidetrack-{name}");
        let at = self.services.iter().position(|service| service.name() == name);
        at.with_context(|| format!("{name} does not run"))
    }

    /// Returns the CPU time of the nodes along the three hops, in nanoseconds.
    pub(super) fn cpu_ns(&self) -> u64 {
        let spare = |service: &&Service| service.name() != "sidetrack-spare";
        self.services.iter().filter(spare).map(Service::cpu_ns).sum()
    }

    /// Returns the bits that passed the overlay's middle link in both directions: only its control connection's if
    /// the link is idle.
    ///
    /// # Errors
    /// The node is gone.
    pub(super) fn middle_bits(&self) -> Result<u64> {
        bits(&self.nodes[1], &self.wires[self.shape.lossy])
    }

    /// Returns the largest percentage of hellos in datagrams that a node of the path misses from a neighbour.
    ///
    /// # Errors
    /// A node does not answer, or datagrams do not pass.
    pub(super) fn hello_loss_percent(&self) -> Result<f64> {
        let mut worst = 0.0_f64;
        for name in &self.shape.names[..=self.shape.hops] {
            let status: serde_json::Value =
                serde_json::from_str(&self.overlay_of(name, &["status", "--json"])?)?;
            for link in status["links"].as_array().context("no links")? {
                ensure!(link["datagrams"] == true, "{name}: its datagrams do not arrive: {link}");
                worst = worst.max(link["loss_percent"].as_f64().context("no loss")?);
            }
        }
        Ok(worst)
    }

    /// Returns how often a node has logged that a link was lost.
    pub(super) fn links_lost(&self) -> usize {
        self.links_lost + self.services.iter().map(|service| lost(&service.log())).sum::<usize>()
    }

    /// Waits until flows from the source to the target pass this node as the first hop.
    ///
    /// # Errors
    /// They do not within a minute.
    pub(super) fn wait_for_path(&self, first: &str) -> Result<()> {
        let began = Instant::now();
        let wanted = format!("source -> {first} ");
        let mut said = String::new();
        while began.elapsed() < PATH_WITHIN {
            said = self.overlay(&["path", "target"]).unwrap_or_else(|error| error.to_string());
            if said.starts_with(&wanted) {
                return Ok(());
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Err(anyhow!("no path from source to target over {first}: {said}"))
    }

    /// Waits until flows use the paced link of every hop.
    ///
    /// # Errors
    /// They do not within a minute.
    pub(super) fn wait_for_paced(&self) -> Result<()> {
        let began = Instant::now();
        while began.elapsed() < PATH_WITHIN {
            let agreed = self.shape.names[..self.shape.hops].iter().zip(&self.shape.names[1..]);
            let agreed = agreed.map(|(node, next)| {
                let status: serde_json::Value =
                    serde_json::from_str(&self.overlay_of(node, &["status", "--json"])?)?;
                let links = status["links"].as_array().context("no links")?;
                Ok(links.iter().any(|link| link["neighbour"] == *next && link["paced"]["state"] == "agreed"))
            });
            if agreed.collect::<Result<Vec<bool>>>()?.into_iter().all(|is_agreed| is_agreed) {
                return Ok(());
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        bail!("no paced links from source to target")
    }

    /// Waits until packets to the target travel in datagrams.
    ///
    /// # Errors
    /// They do not within a minute.
    pub(super) fn wait_for_packets(&self) -> Result<()> {
        let began = Instant::now();
        while began.elapsed() < PATH_WITHIN {
            let status: serde_json::Value = serde_json::from_str(&self.overlay(&["status", "--json"])?)?;
            let paths = status["paths"].as_array().map(Vec::as_slice).unwrap_or_default();
            if paths.iter().any(|path| path["to"] == "target" && path["by_datagram"] == true) {
                return Ok(());
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        bail!("no datagrams from source to target")
    }

    /// Runs `sidetrack overlay …` at the source.
    fn overlay(&self, arguments: &[&str]) -> Result<String> {
        self.overlay_of("source", arguments)
    }

    fn overlay_of(&self, node: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.program);
        let socket = self.directory.path().join(format!("{node}.sock"));
        command.arg("overlay").args(arguments).arg("--admin").arg(socket);
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn start(&mut self, at: usize) -> Result<()> {
        let name = self.shape.names[at];
        let directory = self.directory.path();
        let path = directory.join(format!("{name}.toml"));
        std::fs::write(&path, self.config(at))?;
        let placement = Placement { netns: None, cpu: None, nice: Some(-10) };
        let mut command = self.nodes[at].command_at(&self.program.to_string_lossy(), &placement);
        command.env("SIDETRACK_LOG", "sidetrack=info").args(["up", "-c"]).arg(&path);
        let mut service = Service::start(&format!("sidetrack-{name}"), command, directory)?;
        service.wait_listening(&self.nodes[at], if at == 0 { LISTENER } else { PORT })?;
        service.wait_socket(&directory.join(format!("{name}.sock")))?;
        self.services.push(service);
        Ok(())
    }

    fn config(&self, at: usize) -> String {
        let name = self.shape.names[at];
        let folder = self.directory.path().display();
        let mut text = format!(
            "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"{folder}/{name}.sock\"\n\
             [record]\nto = \"none\"\n[overlay]\nname = \"{name}\"\nkey_file = \"{folder}/{name}.key\"\n"
        );
        if at != 0 {
            let _ = writeln!(text, "listen = \"0.0.0.0:{PORT}\"");
        }
        for (other, (node, key)) in self.shape.names.iter().zip(&self.keys).enumerate() {
            let _ = write!(text, "[overlay.node.{node}]\nkey = \"{key}\"\n");
            let dialled =
                self.shape.links.iter().zip(&self.wires).find(|((a, b, _), _)| (*a, *b) == (at, other));
            if let Some((_, wire)) = dialled {
                let _ = writeln!(text, "address = \"{}\"", SocketAddr::from((wire.link.b.v4, PORT)));
            }
        }
        for (one, other, _) in self.shape.links.iter().take(self.shape.hops) {
            let Some(rate) = self.shape.bought else { break };
            let (one, other) = (self.shape.names[*one], self.shape.names[*other]);
            let _ = write!(
                text,
                "[[overlay.link]]\nbetween = [\"{one}\", \"{other}\"]\nrate = \"{}kbit/s\"\nbought = true\n",
                rate / 1000
            );
        }
        if at == 0 {
            let _ = write!(
                text,
                "[[listen]]\nkind = \"redirect\"\naddress = \"127.0.0.1:{LISTENER}\"\nlocal = true\n\
                 dst = [\"{TARGET}/32\", \"{COPIES}/32\"]\n\
                 [[rule]]\nname = \"all\"\nmatch = {{ to = \"{TARGET}/32\" }}\ncarrier = \"overlay:target\"\n\
                 [[rule]]\nname = \"copies\"\nmatch = {{ to = \"{COPIES}/32\" }}\ncarrier = \"overlay:target\"\n\
                 dissemination = \"duplicate\"\n"
            );
            text += &packets("target", PACKETS);
        } else if at == self.shape.target() {
            for address in [TARGET, COPIES, PACKETS] {
                let _ = write!(text, "[[overlay.deliver]]\nfrom = \"source\"\nto = \"{address}/32\"\n");
            }
            text += &packets("source", self.wires[0].link.a.v4);
        }
        text + &self.packets_of_hosts(at)
    }

    /// Lets this node forward packets of the hosts behind it.
    fn packets_of_hosts(&self, at: usize) -> String {
        let Some(Hosts { links: [left, right], .. }) = &self.hosts else { return String::new() };
        let router = |node: &str, to: &Link| {
            let to = network_of(to);
            format!("[[overlay.packets]]\nnode = \"{node}\"\nto = \"{to}\"\nat = \"router\"\n")
        };
        match at {
            0 => router("target", right),
            at if at == self.shape.target() => {
                let deliver =
                    format!("[[overlay.deliver]]\nfrom = \"source\"\nto = \"{}\"\n", network_of(right));
                router("source", left) + &deliver
            }
            _ => String::new(),
        }
    }
}

impl Hosts {
    fn new(shape: &Shape, nodes: &[Node], launcher: &std::path::Path) -> Result<Self> {
        let [left, right] = [Node::new("left", launcher)?, Node::new("right", launcher)?];
        let first = shape.links.len();
        let links = [
            topology::link(&nodes[0], &left, subnet(first)?)?,
            topology::link(&nodes[shape.target()], &right, subnet(first + 1)?)?,
        ];
        for (host, link) in [&left, &right].into_iter().zip(&links) {
            topology::default_route(host, link.a.v4.into())?;
        }
        Ok(Self { left, right, links })
    }
}

/// Returns the configuration by which packets to this address are caught whole and delivered by that node.
fn packets(node: &str, to: Ipv4Addr) -> String {
    let entry = |port: u16, link: &str| {
        format!(
            "[[overlay.packets]]\nnode = \"{node}\"\nto = \"{to}/32\"\nport = [{port}]\nlink = \"{link}\"\n"
        )
    };
    entry(PACKETS_RELIABLE, "reliable") + &entry(PACKETS_BEST_EFFORT, "best-effort")
}

fn network_of(link: &Link) -> String {
    let [a, b, c, _] = link.a.v4.octets();
    format!("{a}.{b}.{c}.0/24")
}

/// Returns the bits that one end of a link has sent and received.
///
/// # Errors
/// The node is gone.
pub(super) fn bits(node: &Node, wire: &Wire) -> Result<u64> {
    let table = node.run("cat", &["/proc/thread-self/net/dev"])?;
    let name = format!("{}:", wire.link.interface);
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&name)).context("no such link")?;
    let number = |at: usize| line.split_whitespace().nth(at).and_then(|word| word.parse::<u64>().ok());
    let bytes = number(0).zip(number(8)).map(|(received, sent)| received + sent);
    Ok(bytes.context("no counts of the link")? * 8)
}

fn lost(log: &str) -> usize {
    log.matches("overlay link down").count()
}

/// Makes a node's key; returns the public key.
pub(super) fn key(program: &std::path::Path, directory: &Scratch, name: &str) -> Result<String> {
    let file = directory.path().join(format!("{name}.key"));
    let made = Command::new(program).args(["overlay", "key"]).arg(file).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr).trim());
    Ok(String::from_utf8(made.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_links_are_counted_in_logs() {
        assert_eq!(lost("x overlay link up\ny overlay link down n=1\nz overlay link down\n"), 2);
    }
}
