//! Five hosts, the links between them, and an overlay node on each.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;

use crate::launch::{self, Placement};
use crate::link::{Conditions, Kind, Loss, Network, Rate, Wire};
use crate::peers::{Unavailable, ours};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::Node;

/// The target's address for what the overlay carries.
pub const TARGET: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// The target's address for plain TCP.
pub const PLAIN: Ipv4Addr = Ipv4Addr::new(10, 99, 1, 1);
/// The target's address for packets that are caught whole, and the ports that say on which kind of links they travel.
pub const PACKETS: Ipv4Addr = Ipv4Addr::new(10, 99, 2, 1);
/// See [`PACKETS`].
pub const PACKETS_RELIABLE: u16 = 5201;
/// See [`PACKETS`].
pub const PACKETS_BEST_EFFORT: u16 = 5202;
/// Where overlay nodes listen.
const PORT: u16 = 8100;
/// Where our listener at the source is.
const LISTENER: u16 = 1090;
/// Link rate, bits per second, as the seed's rate-limited rows.
pub const RATE: u64 = 200_000_000;
/// The queue before the rate, bytes: 60 ms of it.
const QUEUE: u64 = 1_500_000;
/// Names, in the order of [`Scene::nodes`].
const NAMES: [&str; 5] = ["source", "near", "far", "target", "spare"];
/// Links as indices into [`NAMES`], with their one-way delay in milliseconds: three hops, and two of the spare way.
const LINKS: [(usize, usize, u64); 5] = [(0, 1, 10), (1, 2, 10), (2, 3, 10), (0, 4, 17), (4, 3, 17)];
/// The link that loses.
const LOSSY: usize = 1;
const PATH_WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// See the module.
pub struct Scene {
    network: Network,
    nodes: Vec<Node>,
    wires: Vec<Wire>,
    services: Vec<Service>,
    directory: Scratch,
    program: PathBuf,
    /// Public keys of [`NAMES`].
    keys: Vec<String>,
    /// Lines about lost links in logs of processes that are gone.
    links_lost: usize,
}

impl Scene {
    /// Builds it; returns when the overlay has a path.
    ///
    /// # Errors
    /// No root, or our program is not built beside the lab.
    pub fn new(kind: Kind, seed: u64) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = match ours::program() {
            Ok(program) => program,
            Err(Unavailable::Absent(why)) => bail!(why),
            Err(Unavailable::Failed(why)) => return Err(why),
        };
        let network = Network::new(kind, &launcher, seed)?;
        let directory = Scratch::new()?;
        let nodes: Vec<_> = NAMES.iter().map(|name| Node::new(name, &launcher)).collect::<Result<_>>()?;
        let mut wires = Vec::new();
        for (subnet, (a, b, ms)) in (1..).zip(LINKS) {
            wires.push(network.join(&nodes[a], &nodes[b], subnet, [conditions(ms, Loss::None); 2])?);
        }
        let keys = NAMES.iter().map(|name| key(&program, &directory, name)).collect::<Result<_>>()?;
        let services = Vec::new();
        let mut scene = Self { network, nodes, wires, services, directory, program, keys, links_lost: 0 };
        scene.route()?;
        for at in [3, 2, 4, 1, 0] {
            scene.start(at)?;
        }
        // The spare way is for failures alone: by itself the overlay would prefer it to a link that loses much.
        scene.overlay(&["link", "set", "spare", "--cost", "500"])?;
        scene.wait_for_path("near")?;
        Ok(scene)
    }

    /// The network of the links.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Where applications are.
    pub fn source(&self) -> &Node {
        &self.nodes[0]
    }

    /// Where servers are.
    pub fn target(&self) -> &Node {
        &self.nodes[3]
    }

    /// Scratch space.
    pub fn directory(&self) -> &Scratch {
        &self.directory
    }

    /// Plain TCP is routed along the three hops, with a congestion control that programs cannot choose themselves.
    ///
    /// # Errors
    /// `ip` refuses.
    pub fn route_plain(&self, congestion: &str) -> Result<()> {
        let via = |wire: usize, is_forth: bool| {
            let link = &self.wires[wire].link;
            if is_forth { link.b.v4 } else { link.a.v4 }.to_string()
        };
        let sources = self.wires[0].link.a.v4.to_string();
        let routes = [
            (0, PLAIN.to_string(), via(0, true)),
            (1, PLAIN.to_string(), via(1, true)),
            (2, PLAIN.to_string(), via(2, true)),
            (3, sources.clone(), via(2, false)),
            (2, sources, via(1, false)),
        ];
        for (node, to, via) in routes {
            self.nodes[node]
                .run("ip", &["route", "replace", &to, "via", &via, "congctl", congestion])
                .map(|_| ())?;
        }
        Ok(())
    }

    fn route(&self) -> Result<()> {
        for address in [TARGET, PLAIN, PACKETS] {
            self.target().run("ip", &["addr", "add", &format!("{address}/32"), "dev", "lo"])?;
        }
        // The overlay's address leads nowhere: what is not caught does not arrive by accident.
        let nowhere = self.wires[0].link.b.v4.to_string();
        for address in [TARGET, PACKETS] {
            self.source().run("ip", &["route", "add", &address.to_string(), "via", &nowhere])?;
        }
        for node in &self.nodes {
            node.sysctl("net/ipv4/conf/all/rp_filter", "0")?;
            for key in ["net/ipv4/tcp_wmem", "net/ipv4/tcp_rmem"] {
                node.sysctl(key, "4096 131072 33554432")?;
            }
        }
        for relay in [1, 2] {
            self.nodes[relay].sysctl("net/ipv4/ip_forward", "1")?;
        }
        self.route_plain("bbr")
    }

    /// The share of frames lost on the lossy link, each way.
    ///
    /// # Errors
    /// The emulator has ended.
    pub fn set_loss(&self, share: f64) -> Result<()> {
        let loss = if share > 0.0 { Loss::Bernoulli(share) } else { Loss::None };
        self.wires[LOSSY].set_both(conditions(LINKS[LOSSY].2, loss))
    }

    /// Cuts the lossy link, or joins it again.
    ///
    /// # Errors
    /// The emulator has ended.
    pub fn set_cut(&self, is_cut: bool) -> Result<()> {
        let whole = conditions(LINKS[LOSSY].2, Loss::None);
        self.wires[LOSSY].set_both(Conditions { is_up: !is_cut, ..whole })
    }

    /// Kills the first relay as a power cut of the process would.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_relay(&mut self) -> Result<()> {
        let at = self.index("near")?;
        let relay = self.services.remove(at);
        self.links_lost += lost(&relay.log());
        relay.signal(Signal::KILL)
    }

    /// Starts it again; returns when flows pass it.
    ///
    /// # Errors
    /// It does not come up.
    pub fn revive_relay(&mut self) -> Result<()> {
        self.start(1)?;
        self.wait_for_path("near")
    }

    fn index(&self, name: &str) -> Result<usize> {
        let name = format!("sidetrack-{name}");
        let at = self.services.iter().position(|service| service.name() == name);
        at.with_context(|| format!("{name} does not run"))
    }

    /// CPU time of the nodes along the three hops so far, nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        let spare = |service: &&Service| service.name() != "sidetrack-spare";
        self.services.iter().filter(spare).map(Service::cpu_ns).sum()
    }

    /// Bits that passed the overlay's middle link, both ways: of its control connection if nobody else speaks.
    ///
    /// # Errors
    /// The node is gone.
    pub fn middle_bits(&self) -> Result<u64> {
        let table = self.nodes[1].run("cat", &["/proc/thread-self/net/dev"])?;
        let name = format!("{}:", self.wires[LOSSY].link.interface);
        let line = table.lines().find_map(|line| line.trim().strip_prefix(&name)).context("no such link")?;
        let number = |at: usize| line.split_whitespace().nth(at).and_then(|word| word.parse::<u64>().ok());
        let bytes = number(0).zip(number(8)).map(|(received, sent)| received + sent);
        Ok(bytes.context("no counts of the link")? * 8)
    }

    /// How often a node has said that a link was lost.
    pub fn links_lost(&self) -> usize {
        self.links_lost + self.services.iter().map(|service| lost(&service.log())).sum::<usize>()
    }

    /// Waits until flows from the source to the target pass this node first.
    ///
    /// # Errors
    /// They do not within a minute.
    pub fn wait_for_path(&self, first: &str) -> Result<()> {
        let began = Instant::now();
        let wanted = format!("source -> {first} -> ");
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

    /// Waits until packets to the target travel in datagrams.
    ///
    /// # Errors
    /// They do not within a minute.
    pub fn wait_for_packets(&self) -> Result<()> {
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

    /// `sidetrack overlay …` at the source.
    fn overlay(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.arg("overlay").args(arguments).arg("--admin").arg(self.directory.path().join("source.sock"));
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn start(&mut self, at: usize) -> Result<()> {
        let name = NAMES[at];
        let directory = self.directory.path();
        let path = directory.join(format!("{name}.toml"));
        std::fs::write(&path, self.config(at))?;
        let placement = Placement { netns: None, cpu: None, nice: Some(-10) };
        let mut command = self.nodes[at].command_at(&self.program.to_string_lossy(), &placement);
        command.env("SIDETRACK_LOG", "sidetrack=info").args(["up", "-c"]).arg(&path);
        let mut service = Service::start(&format!("sidetrack-{name}"), command, directory)?;
        service.wait_listening(&self.nodes[at], if at == 0 { LISTENER } else { PORT })?;
        self.services.push(service);
        Ok(())
    }

    fn config(&self, at: usize) -> String {
        let name = NAMES[at];
        let folder = self.directory.path().display();
        let mut text = format!(
            "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"{folder}/{name}.sock\"\n\
             [record]\nto = \"none\"\n[overlay]\nname = \"{name}\"\nkey_file = \"{folder}/{name}.key\"\n"
        );
        if at != 0 {
            let _ = writeln!(text, "listen = \"0.0.0.0:{PORT}\"");
        }
        for (other, (node, key)) in NAMES.iter().zip(&self.keys).enumerate() {
            let _ = write!(text, "[overlay.node.{node}]\nkey = \"{key}\"\n");
            let dialled = LINKS.iter().zip(&self.wires).find(|((a, b, _), _)| (*a, *b) == (at, other));
            if let Some((_, wire)) = dialled {
                let _ = writeln!(text, "address = \"{}\"", SocketAddr::from((wire.link.b.v4, PORT)));
            }
        }
        match at {
            0 => {
                let _ = write!(
                    text,
                    "[[listen]]\nkind = \"redirect\"\naddress = \"127.0.0.1:{LISTENER}\"\nlocal = true\n\
                     dst = \"{TARGET}/32\"\n[[rule]]\nname = \"all\"\nmatch = {{ to = \"{TARGET}/32\" }}\n\
                     carrier = \"overlay:target\"\n"
                );
                text += &packets("target", PACKETS);
            }
            3 => {
                for address in [TARGET, PACKETS] {
                    let _ = write!(text, "[[overlay.deliver]]\nfrom = \"source\"\nto = \"{address}/32\"\n");
                }
                text += &packets("source", self.wires[0].link.a.v4);
            }
            _ => {}
        }
        text
    }
}

/// Packets to this address at that node are caught whole.
fn packets(node: &str, to: Ipv4Addr) -> String {
    let entry = |port: u16, link: &str| {
        format!(
            "[[overlay.packets]]\nnode = \"{node}\"\nto = \"{to}/32\"\nport = [{port}]\nlink = \"{link}\"\n"
        )
    };
    entry(PACKETS_RELIABLE, "reliable") + &entry(PACKETS_BEST_EFFORT, "best-effort")
}

fn conditions(ms: u64, loss: Loss) -> Conditions {
    let rate = Some(Rate { bits_per_second: RATE, queue_bytes: QUEUE });
    Conditions { loss, rate, ..Conditions::delayed(Duration::from_millis(ms)) }
}

fn lost(log: &str) -> usize {
    log.matches("overlay link down").count()
}

/// Makes a node's key; gives the public one.
pub fn key(program: &std::path::Path, directory: &Scratch, name: &str) -> Result<String> {
    let file = directory.path().join(format!("{name}.key"));
    let made = Command::new(program).args(["overlay", "key"]).arg(file).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr).trim());
    Ok(String::from_utf8(made.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_three_hops_is_shorter_than_the_spare_way() {
        let way = |links: &[usize]| links.iter().map(|at| LINKS[*at].2).sum::<u64>();
        assert_eq!(way(&[0, 1, 2]), 30, "the seed's path");
        assert!(way(&[3, 4]) > 30);
        assert!(LINKS[LOSSY] == (1, 2, 10));
    }

    #[test]
    fn lost_links_are_counted_in_logs() {
        assert_eq!(lost("x overlay link up\ny overlay link down n=1\nz overlay link down\n"), 2);
    }
}
