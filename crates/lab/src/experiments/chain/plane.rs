//! The measured control plane: three domains, one of which shares data with the other two, an orchestrator between
//! them, and a proxy in each. All run on the loopback of the proxy's node. The functions are warm: one inside the
//! proxies, and one container.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::swap::echo;
use crate::engine::Engine;
use crate::launch::Placement;
use crate::peers::chains::CONTAINER;
use crate::peers::ours;
use crate::service::Service;
use crate::site::Site;

/// Time limit for every awaited event.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The data set.
const DATA: &str = "rates";
/// Port of the orchestrator, the agents and the proxies; each has a separate address.
const PORT: u16 = 7443;
const ORCHESTRATOR: Ipv4Addr = ip(1, 9);

/// A domain: the addresses of its agent, its proxy and its node.
#[derive(Debug)]
pub(super) struct Domain {
    name: &'static str,
    agent: Ipv4Addr,
    proxy: Ipv4Addr,
    node: Ipv4Addr,
    /// The end of the data's path where its proxy is.
    end: &'static str,
}

/// The first domain has the data; the nodes of the others read it.
pub(super) const DOMAINS: [Domain; 3] =
    [domain("lucas", 1, "server"), domain("westwal", 2, "client"), domain("radix", 3, "client")];

const fn domain(name: &'static str, number: u8, end: &'static str) -> Domain {
    Domain { name, agent: ip(1, number), proxy: ip(2, number), node: ip(3, number), end }
}

const fn ip(kind: u8, number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 83, kind, number)
}

/// A running control plane.
#[derive(Debug)]
pub(super) struct Plane<'s> {
    site: &'s Site,
    program: PathBuf,
    folder: PathBuf,
    services: Vec<Service>,
}

impl<'s> Plane<'s> {
    /// Starts everything, without an application.
    ///
    /// # Errors A part is missing, or does not start.
    pub(super) fn start(site: &'s Site) -> Result<Self> {
        let program = ours::program().map_err(|error| anyhow::anyhow!("{error}"))?;
        let folder = site.directory.path().join("plane");
        fs::create_dir(&folder)?;
        let cpu = site.proxy_placement().cpu.unwrap_or(0);
        let engine = Engine::shared(&program, cpu).map_err(anyhow::Error::msg)?;
        let listener = site.proxy.namespace()?.run(|| TcpListener::bind((DOMAINS[0].node, 0)))?;
        let server = listener.local_addr()?;
        std::thread::spawn(move || echo(&listener));
        let mut plane = Self { site, program, folder, services: Vec::new() };
        plane.keys()?;
        plane.write("agreement.toml", &agreement(server))?;
        plane.write("application.toml", APPLICATION)?;
        for domain in &DOMAINS {
            plane.start_domain(domain, server, engine)?;
        }
        plane.write("orchestrator.toml", &orchestrator())?;
        plane.serve("orchestrator", &["orchestrate", "serve", "-c", "orchestrator.toml"])?;
        Ok(plane)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        fs::write(self.folder.join(name), text).with_context(|| name.to_owned())
    }

    fn keys(&self) -> Result<()> {
        self.said(&["tunnel", "ca", "--out", "ca"])?;
        for name in DOMAINS.iter().map(|domain| domain.name).chain(["orchestrator", "app"]) {
            let (name, file) = (format!("{name}.lab"), format!("{name}.pem"));
            self.said(&["tunnel", "key", "--name", &name, "--ca", "ca-private.pem", "--out", &file])?;
        }
        Ok(())
    }

    fn start_domain(&mut self, domain: &Domain, server: SocketAddr, engine: &Engine) -> Result<()> {
        let Domain { name, agent, .. } = domain;
        let socket = self.folder.join(format!("{name}.sock"));
        let socket = socket.display();
        self.write(&format!("{name}-policy.toml"), "version = 1\n")?;
        let tables = proxy(domain, server, engine);
        let admin = format!("version = 1\nworkers = 1\ndefault = \"deny\"\n[admin]\nsocket = \"{socket}\"\n");
        self.write(&format!("{name}-proxy.toml"), &format!("{admin}{tables}"))?;
        let text = format!(
            "version = 1\nparty = \"{name}\"\nlisten = \"{agent}:{PORT}\"\nstate = \"{name}.redb\"\noperators = [\"app.lab\"]\n\
             nodes = [\"{name}-node\"]\nproxies = [\"{socket}\"]\n{}[orchestrator]\naddress = \"{ORCHESTRATOR}:{PORT}\"\n\
             name = \"orchestrator.lab\"\n[[grant]]\n",
            tls(name)
        );
        self.write(&format!("{name}-agent.toml"), &text)?;
        self.serve(&format!("{name}-proxy"), &["up", "-c", &format!("{name}-proxy.toml")])?;
        self.serve(&format!("{name}-agent"), &["domain", "serve", "-c", &format!("{name}-agent.toml")])
    }

    /// Our program in the node, on any CPU: the parts normally run on separate machines.
    fn command(&self, arguments: &[&str]) -> Command {
        let anywhere = Placement { cpu: None, ..self.site.proxy_placement() };
        let mut command = self.site.proxy.command_at(&self.program.to_string_lossy(), &anywhere);
        command.args(arguments).current_dir(&self.folder);
        command
    }

    fn said(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command(arguments).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sidetrack {}: {errors}", arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts a part of the plane and waits until its log says that it is ready.
    fn serve(&mut self, name: &str, arguments: &[&str]) -> Result<()> {
        let mut service = Service::start(name, self.command(arguments), &self.folder)?;
        let until = Instant::now() + PATIENCE;
        while !service.log().contains("ready") {
            ensure!(service.is_running(), "{name} ended: {}", service.log());
            ensure!(Instant::now() < until, "{name} is not ready: {}", service.log());
            std::thread::sleep(LOOK_AGAIN);
        }
        self.services.push(service);
        Ok(())
    }

    /// Submits the application; returns the lines of progress.
    ///
    /// # Errors It does not become ready.
    pub(super) fn submit(&self) -> Result<String> {
        self.ask((ORCHESTRATOR, "orchestrator"), &["orchestrate", "submit", "application.toml", "--json"])
    }

    /// Ends the application.
    ///
    /// # Errors
    /// It cannot be ended.
    pub(super) fn end(&self) -> Result<()> {
        self.ask((ORCHESTRATOR, "orchestrator"), &["orchestrate", "end", "study"]).map(drop)
    }

    /// Sets the consent at the party that has the data, as its operator does.
    ///
    /// # Errors Its agent refuses, or does not run.
    pub(super) fn consent(&self, word: &str) -> Result<()> {
        let domain = &DOMAINS[0];
        self.ask((domain.agent, domain.name), &["domain", "consent", DATA, word]).map(drop)
    }

    fn ask(&self, (at, name): (Ipv4Addr, &str), arguments: &[&str]) -> Result<String> {
        let (at, name) = (format!("{at}:{PORT}"), format!("{name}.lab"));
        let whom = ["--at", &at, "--server-name", &name, "--identity", "app.pem", "--ca", "ca.pem"];
        self.said(&[arguments, &whom].concat())
    }

    /// Opens a flow through a domain's proxy to the data, as soon as it is allowed.
    ///
    /// # Errors It is never allowed.
    pub(super) fn flow(&self, domain: &Domain) -> Result<TcpStream> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.try_flow(domain) {
                Ok(stream) => return Ok(stream),
                Err(error) if Instant::now() > until => {
                    return Err(error.context(format!("no flow passes the proxy of {}", domain.name)));
                }
                Err(_) => std::thread::sleep(LOOK_AGAIN),
            }
        }
    }

    fn try_flow(&self, domain: &Domain) -> Result<TcpStream> {
        // At the data's end, the clients are those of another domain.
        let node = if domain.end == "server" { DOMAINS[2].node } else { domain.node };
        let mut stream = self.site.proxy.namespace()?.run(|| dial(node, (domain.proxy, PORT).into()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"x")?;
        stream.read_exact(&mut [0])?;
        Ok(stream)
    }
}

/// Connects from this address.
fn dial(from: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddr::from((from, 0)))?;
    rustix::net::connect(&socket, &to)?;
    Ok(TcpStream::from(socket))
}

fn tls(name: &str) -> String {
    format!("[tls]\nidentity = \"{name}.pem\"\nca = \"ca.pem\"\n")
}

fn orchestrator() -> String {
    let party = |Domain { name, agent, .. }: &Domain| {
        format!("[domain.{name}]\naddress = \"{agent}:{PORT}\"\nname = \"{name}.lab\"\n")
    };
    format!(
        "version = 1\nlisten = \"{ORCHESTRATOR}:{PORT}\"\nagreement = \"agreement.toml\"\nstate = \"orchestrator.redb\"\n\
         applications = [\"app.lab\"]\n{}{}",
        tls("orchestrator"),
        DOMAINS.iter().map(party).collect::<String>()
    )
}

/// The node of a domain: a listener in front of the data, and a rule that asks the agreement.
fn proxy(domain: &Domain, server: SocketAddr, engine: &Engine) -> String {
    let Domain { name, proxy, end, .. } = domain;
    let socket = engine.socket();
    let audit = format!("[containers]\nengine = \"{}\"\n[function.audit]\n{CONTAINER}", socket.display());
    format!(
        "[record]\nto = \"none\"\n[policy]\nagreement = \"./{name}-policy.toml\"\n[function.count]\nkind = \"count\"\n{}\
         [[listen]]\nkind = \"reverse\"\naddress = \"{proxy}:{PORT}\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"research\"\ncarrier = \"direct\"\nagreement = {{ purpose = \"research\", at = \"{end}\" }}\n",
        if *end == "client" { &audit } else { "" }
    )
}

/// The application: it needs the data at both other domains.
const APPLICATION: &str = "name = \"study\"\npurpose = \"research\"\naccess = \"read\"\n\
    [[flows]]\nclient = \"westwal-node\"\ndata = \"rates\"\n[[flows]]\nclient = \"radix-node\"\ndata = \"rates\"\n";

fn agreement(server: SocketAddr) -> String {
    let node = |Domain { name, node, .. }: &Domain| {
        format!("[party.{name}]\n[node.{name}-node]\nparty = \"{name}\"\naddress = \"{node}\"\n")
    };
    format!(
        "version = 1\nattributes = [\"audited\", \"counted\"]\npurposes = [\"research\"]\n{}\
         [data.{DATA}]\nnode = \"lucas-node\"\nport = {}\nconsent = \"given\"\n\
         [function.audit]\napplies = \"audited\"\nclient = \"audit\"\n\
         [function.count]\napplies = \"counted\"\nclient = \"count\"\nserver = \"count\"\n\
         [[agreement]]\nname = \"study\"\nparties = [\"westwal\", \"radix\"]\ndata = \"{DATA}\"\npurpose = \"research\"\n\
         access = \"read\"\nrequires = [\"audited\", \"counted\"]\n",
        DOMAINS.iter().map(node).collect::<String>(),
        server.port()
    )
}
