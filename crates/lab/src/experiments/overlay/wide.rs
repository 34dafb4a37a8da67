//! Twelve nodes over two coasts and an ocean, at about the distances of Seamless Overlays, Fig. 2, with flows from
//! one end to the other. Links on their path are cut, one after the other.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::scene::{bits, key};
use crate::launch::{self, Placement};
use crate::link::{Conditions, Kind, Network, Wire};
use crate::peers::{Unavailable, ours};
use crate::progress::Progress;
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::Node;

/// Links and their one-way delays in milliseconds; nodes are numbered from 1.
const LINKS: [(usize, usize, u64); 20] = [
    (1, 2, 5),
    (2, 3, 12),
    (3, 4, 10),
    (4, 5, 14),
    (5, 6, 9),
    (1, 6, 16),
    (1, 4, 20),
    (2, 5, 22),
    (3, 6, 25),
    (1, 7, 37),
    (2, 8, 40),
    (7, 8, 4),
    (8, 9, 6),
    (7, 9, 8),
    (9, 10, 10),
    (10, 11, 7),
    (11, 12, 9),
    (7, 12, 12),
    (6, 10, 45),
    (5, 12, 50),
];
const NODES: usize = 12;
/// The first and the last node of the flows.
const ENDS: [usize; 2] = [4, 11];
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const PORT: u16 = 8100;
const LISTENER: u16 = 1090;
const WITHIN: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Observation time after a cut: within it, all changes have happened.
const SETTLE: Duration = Duration::from_millis(1500);
/// Observation time of idle links.
const IDLE: Duration = Duration::from_secs(3);
/// The bytes that every flow sends after a cut.
const WORD: [u8; 100] = [0x5a; 100];

/// The measurements.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Wide {
    /// Number of flows from one end to the other.
    pub flows: usize,
    /// Bandwidth of the busiest link while the flows are idle, in kbit/s, both directions together.
    pub idle_kbit: f64,
    /// For each cut link: time until the last node had the new routes, in milliseconds, ascending.
    pub converged_ms: Vec<f64>,
    /// For each cut link: time until every flow had an answer to a word sent at the cut, in milliseconds, ascending.
    pub answered_ms: Vec<f64>,
}

/// The needed fields of a node's status.
#[derive(Debug, Deserialize)]
struct Status {
    paths: Vec<PathView>,
    links_changed_unix_ms: u64,
    links: Vec<LinkView>,
}

#[derive(Debug, Deserialize)]
struct PathView {
    to: String,
    path: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct LinkView {
    up: bool,
    datagrams: bool,
}

/// The nodes and their flows.
struct World {
    wires: Vec<Wire>,
    nodes: Vec<Node>,
    directory: Scratch,
    program: PathBuf,
    keys: Vec<String>,
    /// Ends before the network.
    services: Vec<Service>,
    _network: Network,
}

/// Measures.
///
/// # Errors The network cannot be built, a flow breaks, or the overlay does not converge.
pub(super) fn run(kind: Kind, seed: u64, cuts: u32, flows: usize, progress: &Progress) -> Result<Wide> {
    progress.say("twelve nodes");
    let world = World::new(kind, seed)?;
    let listener = world.nodes[ENDS[1] - 1].enter(|| Ok(TcpListener::bind((SERVER, PORT + 1))?))?;
    std::thread::spawn(move || echo(&listener));
    world.wait("all links and paths", |status| {
        status.paths.iter().all(|path| !path.path.is_empty())
            && status.links.iter().all(|link| link.up && link.datagrams)
    })?;
    progress.say(&format!("{flows} flows over twelve nodes"));
    let mut open = world.open(flows)?;
    say(&mut open)?;
    progress.say("twelve nodes, idle");
    let mut wide = Wide { flows, idle_kbit: world.idle_kbit()?, ..Wide::default() };
    for cut in 0..cuts {
        progress.say(&format!("cut {} of {cuts}", cut + 1));
        let (converged, answered) = world.cut(&mut open, cut as usize)?;
        wide.converged_ms.push(converged);
        wide.answered_ms.push(answered);
    }
    wide.converged_ms.sort_by(f64::total_cmp);
    wide.answered_ms.sort_by(f64::total_cmp);
    Ok(wide)
}

/// Echoes the bytes of every connection.
fn echo(listener: &TcpListener) {
    for mut stream in listener.incoming().map_while(Result::ok) {
        std::thread::spawn(move || {
            let mut buffer = [0; WORD.len()];
            while stream.read_exact(&mut buffer).is_ok() && stream.write_all(&buffer).is_ok() {}
        });
    }
}

/// Sends a word on every flow, and waits for its echo.
fn say(flows: &mut [TcpStream]) -> Result<()> {
    for flow in &mut *flows {
        flow.write_all(&WORD)?;
    }
    for flow in flows {
        let mut back = [0; WORD.len()];
        flow.read_exact(&mut back).context("a flow has no answer")?;
        ensure!(back == WORD, "a flow has another answer");
    }
    Ok(())
}

fn unix_ms() -> Result<u64> {
    Ok(u64::try_from(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_millis())?)
}

impl World {
    fn new(kind: Kind, seed: u64) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = ours::program().map_err(Unavailable::into_error)?;
        let network = Network::new(kind, &launcher, seed)?;
        let directory = Scratch::new()?;
        let names = (1..=NODES).map(name);
        let nodes: Vec<_> = names.map(|name| Node::new(&name, &launcher)).collect::<Result<_>>()?;
        let mut wires = Vec::new();
        for (subnet, (a, b, ms)) in (1..).zip(LINKS) {
            let conditions = Conditions::delayed(Duration::from_millis(ms));
            wires.push(network.join(&nodes[a - 1], &nodes[b - 1], subnet, [conditions; 2])?);
        }
        let keys = (1..=NODES).map(|at| key(&program, &directory, &name(at))).collect::<Result<_>>()?;
        let services = Vec::new();
        let mut world = Self { wires, nodes, directory, program, keys, services, _network: network };
        let server = &world.nodes[ENDS[1] - 1];
        server.run("ip", &["addr", "add", &format!("{SERVER}/32"), "dev", "lo"])?;
        for at in (1..=NODES).rev() {
            world.start(at)?;
        }
        Ok(world)
    }

    fn start(&mut self, at: usize) -> Result<()> {
        let directory = self.directory.path();
        let path = directory.join(format!("{}.toml", name(at)));
        std::fs::write(&path, self.config(at))?;
        let placement = Placement { netns: None, cpu: None, nice: Some(-10) };
        let node = &self.nodes[at - 1];
        let mut command = node.command_at(&self.program.to_string_lossy(), &placement);
        command.args(["up", "-c"]).arg(&path);
        let mut service = Service::start(&format!("sidetrack-{}", name(at)), command, directory)?;
        service.wait_listening(node, if at == ENDS[0] { LISTENER } else { PORT })?;
        service.wait_socket(&directory.join(format!("{}.sock", name(at))))?;
        self.services.push(service);
        Ok(())
    }

    fn config(&self, at: usize) -> String {
        let (own, folder) = (name(at), self.directory.path().display());
        let mut text = format!(
            "version = 1\nworkers = 1\ndefault = \"direct\"\n[admin]\nsocket = \"{folder}/{own}.sock\"\n\
             [record]\nto = \"none\"\n[overlay]\nname = \"{own}\"\nkey_file = \"{folder}/{own}.key\"\n\
             listen = \"0.0.0.0:{PORT}\"\n"
        );
        for (other, key) in (1..).zip(&self.keys) {
            let _ = write!(text, "[overlay.node.{}]\nkey = \"{key}\"\n", name(other));
            let dialled = LINKS.iter().zip(&self.wires).find(|((a, b, _), _)| (*a, *b) == (at, other));
            if let Some((_, wire)) = dialled {
                let _ = writeln!(text, "address = \"{}\"", SocketAddr::from((wire.link.b.v4, PORT)));
            }
        }
        if at == ENDS[0] {
            let _ = write!(
                text,
                "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:{LISTENER}\"\nto = \"{SERVER}:{}\"\n\
                 [[rule]]\nname = \"all\"\ncarrier = \"overlay:{}\"\n",
                PORT + 1,
                name(ENDS[1])
            );
        }
        if at == ENDS[1] {
            let _ = write!(text, "[[overlay.deliver]]\nto = \"{SERVER}/32\"\n");
        }
        text
    }

    fn open(&self, flows: usize) -> Result<Vec<TcpStream>> {
        self.nodes[ENDS[0] - 1].enter(|| {
            let to = SocketAddr::from((Ipv4Addr::LOCALHOST, LISTENER));
            let open = (0..flows).map(|_| {
                let flow = TcpStream::connect_timeout(&to, WITHIN)?;
                flow.set_read_timeout(Some(WITHIN))?;
                anyhow::Ok(flow)
            });
            open.collect::<Result<Vec<_>>>()
        })
    }

    fn status(&self, at: usize) -> Result<Status> {
        let mut command = Command::new(&self.program);
        command.args(["overlay", "status", "--json", "--admin"]);
        let output = command.arg(self.directory.path().join(format!("{}.sock", name(at)))).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Waits until the status of every node fits.
    fn wait(&self, what: &str, fits: impl Fn(&Status) -> bool) -> Result<()> {
        let began = Instant::now();
        for at in 1..=NODES {
            loop {
                let status = self.status(at)?;
                if fits(&status) {
                    break;
                }
                ensure!(began.elapsed() < WITHIN, "not in time: {what}; {} says {status:?}", name(at));
                std::thread::sleep(LOOK_AGAIN);
            }
        }
        Ok(())
    }

    /// Returns the bandwidth of the busiest idle link, in kbit/s.
    fn idle_kbit(&self) -> Result<f64> {
        // Waits until the traffic of the flows' start is over: spare connections are ready again.
        std::thread::sleep(SETTLE);
        let count = || {
            let ends = LINKS.iter().zip(&self.wires);
            ends.map(|((a, ..), wire)| bits(&self.nodes[a - 1], wire)).collect::<Result<Vec<_>>>()
        };
        let (since, before) = (Instant::now(), count()?);
        std::thread::sleep(IDLE);
        let after = count()?;
        let most = after.iter().zip(&before).map(|(after, before)| after - before).max();
        Ok(most.context("no links")? as f64 / since.elapsed().as_secs_f64() / 1e3)
    }

    /// Returns the links that flows pass now, as indices into [`LINKS`].
    fn path(&self) -> Result<Vec<usize>> {
        let status = self.status(ENDS[0])?;
        let target = name(ENDS[1]);
        let path = status.paths.into_iter().find(|path| path.to == target).context("no such node")?.path;
        let names = |a: usize, b: usize| (name(a), name(b));
        let link = |pair: &[String]| {
            LINKS.iter().position(|(a, b, _)| {
                let (a, b) = names(*a, *b);
                pair == [a.clone(), b.clone()] || pair == [b, a]
            })
        };
        path.windows(2).map(|pair| link(pair).context("no such link")).collect()
    }

    /// Cuts a link of the path and restores it. Returns the time until all nodes knew, and until all flows had an
    /// answer.
    fn cut(&self, flows: &mut [TcpStream], number: usize) -> Result<(f64, f64)> {
        let path = self.path()?;
        let link = *path.get(number % path.len().max(1)).context("no path")?;
        let whole = Conditions::delayed(Duration::from_millis(LINKS[link].2));
        let (since, at) = (Instant::now(), unix_ms()?);
        self.wires[link].set_both(Conditions { is_up: false, ..whole })?;
        say(flows)?;
        let answered = since.elapsed();
        std::thread::sleep(SETTLE.saturating_sub(answered));
        let mut last = 0;
        for node in 1..=NODES {
            let changed = self.status(node)?.links_changed_unix_ms;
            ensure!(changed >= at, "{} has not heard of the cut", name(node));
            last = last.max(changed - at);
        }
        self.wires[link].set_both(whole)?;
        self.wait("the link is back", |status| status.links.iter().all(|link| link.up && link.datagrams))?;
        // By then both ends have informed all nodes.
        std::thread::sleep(SETTLE);
        Ok((last as f64, answered.as_secs_f64() * 1e3))
    }
}

fn name(at: usize) -> String {
    format!("n{at}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_has_two_links_and_the_lower_one_dials() {
        for at in 1..=NODES {
            assert!(LINKS.iter().filter(|(a, b, _)| *a == at || *b == at).count() >= 2, "{at}");
        }
        assert!(LINKS.iter().all(|(a, b, _)| a < b && *b <= NODES));
    }
}
