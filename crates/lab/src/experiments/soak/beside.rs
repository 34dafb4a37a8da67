//! The programs beside the gateway: a packet engine, a firewall with a shunt, and a command under `run`. Each has a network of its own
//! between the client's host and the server.
//!
//! ```text
//!   client 10.77.5.1 --- link5 --- .2 packets .1 --- link6 --- 10.77.6.2 server    listener of kind engine
//!          10.77.7.1 --- link7 --- .2 firewall .1 --- link8 --- 10.77.8.2          [shunt], routed
//!          10.77.9.1 --- link9 ---------------------------------- .9.2             `sidetrack run`
//! ```

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::routes::{self, Route};
use super::stand::{Files, READY, start, wait_for_links};
use super::traffic::{BEHIND_ENGINE, BEHIND_RUN, BEHIND_SHUNT, ENGINE, Entry};
use crate::experiments::echo::Echo;
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Node};
use sidetrack_sys::process::{process_info, process_tree};

/// Longest time for anything that is awaited.
const LIMIT: Duration = Duration::from_secs(60);
/// How often it is looked whether it is there.
const LOOK: Duration = Duration::from_millis(20);
/// What `run` runs: it does nothing, and its network is where clients are.
const COMMAND: [&str; 2] = ["sleep", "100000"];

/// The programs, and what belongs to them.
pub(super) struct Beside {
    /// The packet engine, the shunt, and `run`, with their names in tables.
    pub programs: Vec<(&'static str, Service)>,
    /// The configurations of those that can be reloaded.
    pub files: Vec<Files>,
    /// The network of the command under `run`.
    pub netns: PathBuf,
    folder: PathBuf,
    program: PathBuf,
    firewall: Node,
    _servers: Vec<Echo>,
    _packets: Node,
}

impl Beside {
    /// Makes their hosts and starts them.
    ///
    /// # Errors
    /// A host cannot be made, or a program does not start.
    pub(super) fn new(
        [client, server]: [&Node; 2],
        program: &Path,
        folder: &Scratch,
        routes: &[&'static Route],
    ) -> Result<Self> {
        let node = |name| Node::new(name, client.launcher());
        let (packets, firewall) = (node("packets")?, node("firewall")?);
        for (a, b, number) in [
            (client, &packets, 5),
            (&packets, server, 6),
            (client, &firewall, 7),
            (&firewall, server, 8),
            (client, server, 9),
        ] {
            topology::link(a, b, number)?;
        }
        client.run("ip", &["route", "add", "10.77.8.0/24", "via", "10.77.7.2"])?;
        server.run("ip", &["route", "add", "10.77.7.0/24", "via", "10.77.8.1"])?;
        firewall.sysctl("net/ipv4/ip_forward", "1")?;
        // The record of a flow is written when conntrack forgets it, which is to be before the next flow from the same port.
        firewall.sysctl("net/netfilter/nf_conntrack_tcp_timeout_time_wait", "1")?;
        let servers = servers(server, routes)?;
        let files = |name: &'static str, is_its: Entry, text: fn(&Path, &[&Route], u64) -> String| {
            let (own, folder) = (routes::of(routes, |entry| entry == is_its), folder.path().to_owned());
            Files::new(name, &folder.clone(), move |version| text(&folder, &own, version))
        };
        let mut files = vec![files("engine", Entry::Engine, engine), files("shunt", Entry::Shunt, shunt)];
        files.iter_mut().try_for_each(Files::write)?;
        // A command keeps the rules it began with.
        fs::write(folder.path().join("run.toml"), run(&routes::of(routes, |entry| entry == Entry::Run)))?;
        let rules = folder.path().join("shunt.toml").display().to_string();
        let rules = firewall.run(&program.to_string_lossy(), &["shunt", "rules", "-c", &rules])?;
        firewall.nft(&rules)?;
        let behind = routes::of(routes, |entry| entry == Entry::Shunt)[0].port;
        wait_for_links(client, (BEHIND_SHUNT, behind).into())?;
        let mut engine = start(&packets, program, folder, "engine")?;
        engine.wait_said(READY)?;
        let mut shunt = start(&firewall, program, folder, "shunt")?;
        shunt.wait_said(READY)?;
        let (run, netns) = run_command(client, program, folder)?;
        let programs = vec![("packet engine", engine), ("shunt", shunt), ("run", run)];
        let (folder, program) = (folder.path().to_owned(), program.to_owned());
        Ok(Self { programs, files, netns, folder, program, firewall, _servers: servers, _packets: packets })
    }

    /// Ends the programs.
    ///
    /// # Errors
    /// One does not end in order.
    pub(super) fn end(&mut self) -> Result<()> {
        // The shunt hears from conntrack that a flow is over.
        let admin = self.folder.join("shunt.sock").display().to_string();
        let begun = Instant::now();
        let running =
            || self.firewall.run(&self.program.to_string_lossy(), &["flows", "--json", "--admin", &admin]);
        while !running()?.trim().is_empty() {
            ensure!(begun.elapsed() < LIMIT, "the shunt still has flows: {}", running()?);
            std::thread::sleep(LOOK);
        }
        for (name, service) in &mut self.programs {
            service.signal(Signal::TERM)?;
            let status = service.wait_ended()?;
            // `run` ends as its command does.
            ensure!(*name == "run" || status.success(), "the end of {name}: {status}: {}", service.log());
        }
        Ok(())
    }

    /// Returns what they have logged.
    pub(super) fn log(&self) -> String {
        self.programs.iter().map(|(_, service)| service.log()).collect()
    }

    /// Returns their records.
    ///
    /// # Errors
    /// They cannot be read.
    pub(super) fn records(&self) -> Result<String> {
        let read = |name| {
            let path = self.folder.join(format!("{name}.records"));
            fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        ["engine", "shunt", "run"].into_iter().map(read).collect()
    }
}

/// Servers for each route, where its way in leads.
fn servers(server: &Node, routes: &[&Route]) -> Result<Vec<Echo>> {
    let behind: [(Entry, Ipv4Addr); 3] =
        [(Entry::Engine, BEHIND_ENGINE), (Entry::Shunt, BEHIND_SHUNT), (Entry::Run, BEHIND_RUN)];
    let all = behind.iter().flat_map(|&(entry, address)| {
        let of_entry = routes.iter().filter(move |route| route.only == Some(entry));
        of_entry.map(move |route| Echo::start(server, (address, route.port).into()))
    });
    all.collect()
}

/// Starts a command under `run` and waits for its network.
fn run_command(client: &Node, program: &Path, folder: &Scratch) -> Result<(Service, PathBuf)> {
    let mut command = client.command(&program.to_string_lossy());
    command.env("XDG_RUNTIME_DIR", folder.path());
    let at = |name: &str| folder.path().join(name);
    command
        .args(["run", "-c"])
        .arg(at("run.toml"))
        .arg("--records")
        .arg(at("run.records"))
        .arg("--")
        .args(COMMAND);
    let run = Service::start("run", command, folder.path())?;
    let begun = Instant::now();
    loop {
        let is_command = |pid: &u32| process_info(*pid).is_ok_and(|info| info.name == COMMAND[0]);
        if let Some(pid) = process_tree(run.pid()).into_iter().find(is_command) {
            return Ok((run, PathBuf::from(format!("/proc/{pid}/ns/net"))));
        }
        ensure!(begun.elapsed() < LIMIT, "run does not start its command: {}", run.log());
        std::thread::sleep(LOOK);
    }
}

fn top(folder: &Path, name: &str, default: &str) -> String {
    let folder = folder.display();
    format!(
        "version = 1\ndefault = \"{default}\"\n[admin]\nsocket = \"{folder}/{name}.sock\"\n[record]\nto = \"{folder}/{name}.records\"\n"
    )
}

fn engine(folder: &Path, routes: &[&Route], version: u64) -> String {
    let listener = |(number, route): (usize, &&Route)| {
        let port = route.port;
        let first = 20_000 + 10_000 * number;
        format!(
            "[[listen]]\nname = \"port{port}\"\nkind = \"engine\"\naddress = \"{ENGINE}:{port}\"\ninterfaces = [\"link5\", \"link6\"]\n\
             to = \"{BEHIND_ENGINE}:{port}\"\n\
             engine = {{ io = \"packet\", sources = [\"10.77.6.1\"], source_ports = \"{first}-{}\", offload_max = 1000 }}\n",
            first + 9_999
        )
    };
    let listeners: String = routes.iter().enumerate().map(listener).collect();
    let rules = routes::rules(routes, version);
    top(folder, "engine", "deny") + &listeners + "[function.count]\nkind = \"count\"\n" + &rules
}

fn shunt(folder: &Path, routes: &[&Route], version: u64) -> String {
    let ports = "[shunt]\nforwarding = \"routed\"\n[[shunt.port]]\nnumber = 1\ninterface = \"link7\"\n\
         [[shunt.port]]\nnumber = 2\ninterface = \"link8\"\n";
    // With one rule only, its version is told by a comment.
    top(folder, "shunt", "direct")
        + ports
        + &routes::rules(routes, version)
        + &format!("# version {version}\n")
}

fn run(routes: &[&Route]) -> String {
    let top = "version = 1\ndefault = \"deny\"\n[function.count]\nkind = \"count\"\n";
    top.to_owned() + &routes::rules(routes, 0)
}
