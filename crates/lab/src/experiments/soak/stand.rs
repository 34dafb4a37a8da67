//! The hosts and their programs. Those beside the gateway are in `beside.rs`.
//!
//! ```text
//!   client 10.77.1.1 --- link1 --- .2 gateway .1 --- link2 --- 10.77.2.2 server
//!                                  `sidetrack up`                  | .4.2
//!                                     .3.1 --- link3 --- .3.2 far .4.1
//!                                                       `sidetrack up`
//! ```

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;

use super::beside::Beside;
use super::routes::{self, DATAGRAMS, Part, Route};
use super::setup::{self, Keys};
use super::traffic::{Entry, SERVER};
use crate::engine::Engine;
use crate::experiments::echo::{Echo, Flow};
use crate::launch;
use crate::peers::{Unavailable, ours};
use crate::scratch::Scratch;
use crate::service::Service;
use crate::topology::{self, Node};

/// The program says this when it serves.
pub(super) const READY: &str = ": ready";
/// Longest time for anything that is awaited.
const LIMIT: Duration = Duration::from_secs(60);
/// How often the server of datagrams looks whether it is dropped.
const LOOK: Duration = Duration::from_millis(50);

/// The hosts.
pub(super) struct Stand {
    /// The client's host.
    pub client: Arc<Node>,
    /// The gateway.
    pub gateway: Arc<Node>,
    /// The routes through it.
    pub routes: Vec<&'static Route>,
    /// The gateway's program.
    pub up: Service,
    /// The programs beside it.
    pub beside: Beside,
    far_up: Service,
    far: Node,
    /// The configurations that are reloaded: the gateway's, and those of programs beside it.
    pub files: Vec<Files>,
    engine: Option<&'static Engine>,
    program: PathBuf,
    folder: Scratch,
    _servers: Vec<Echo>,
    _datagrams: Datagrams,
    _server: Node,
}

/// The configuration of a program in its versions.
#[derive(Clone)]
pub(super) struct Files {
    name: &'static str,
    folder: PathBuf,
    text: Arc<dyn Fn(u64) -> String + Send + Sync>,
    version: u64,
}

impl Stand {
    /// Builds it and starts both programs. `engine`: with a function in a container.
    ///
    /// # Errors
    /// Not root, or a program is missing; the message names it.
    pub(super) fn new(engine: Option<&'static Engine>) -> Result<Self> {
        let launcher = launch::launcher()?;
        let program = ours::program().map_err(Unavailable::into_error)?;
        let node = |name| Node::new(name, &launcher);
        let (client, gateway, far, server) =
            (node("client")?, node("gateway")?, node("far")?, node("server")?);
        gateway.sysctl("net/ipv4/ip_forward", "1")?;
        gateway.sysctl("net/ipv4/conf/all/rp_filter", "0")?;
        let first = topology::link(&client, &gateway, 1)?;
        let second = topology::link(&gateway, &server, 2)?;
        topology::link(&gateway, &far, 3)?;
        let last = topology::link(&far, &server, 4)?;
        topology::default_route(&client, IpAddr::V4(first.b.v4))?;
        topology::default_route(&server, IpAddr::V4(second.a.v4))?;
        far.run("ip", &["route", "add", &format!("{SERVER}/32"), "via", &last.b.v4.to_string()])?;
        let routes = routes::all(engine.is_some());
        let own = routes::of(&routes, Entry::is_of_gateway);
        let servers = own.iter().map(|route| Echo::start(&server, (SERVER, route.port).into()));
        let servers = servers.collect::<Result<Vec<_>>>()?;
        let datagrams = Datagrams::start(&server)?;
        let folder = Scratch::new()?;
        setup::write_parts(folder.path())?;
        let keys = keys(&program, &folder)?;
        let up = |host: &Node, name: &str| start(host, &program, &folder, name);
        wait_for_links(&gateway, (SERVER, own[0].port).into())?;
        fs::write(folder.path().join("far.toml"), setup::far(folder.path(), &keys))?;
        let mut far_up = up(&far, "far")?;
        far_up.wait_said(READY)?;
        let (path, socket) = (folder.path().to_owned(), engine.map(Engine::socket));
        let text = move |version| setup::gateway(&path, &keys, &own, socket.as_deref(), version);
        let mut files = vec![Files::new("gateway", folder.path(), text)];
        files[0].write()?;
        let mut gateway_up = up(&gateway, "gateway")?;
        gateway_up.wait_said(READY)?;
        let beside = Beside::new([&client, &server], &program, &folder, &routes)?;
        files.extend(beside.files.iter().cloned());
        Ok(Self {
            client: client.into(),
            gateway: gateway.into(),
            routes,
            up: gateway_up,
            beside,
            far_up,
            far,
            files,
            engine,
            program,
            folder,
            _servers: servers,
            _datagrams: datagrams,
            _server: server,
        })
    }

    /// The parts that can be killed or cut.
    pub(super) fn parts(&self) -> Vec<Part> {
        let container = self.engine.is_some().then_some(Part::Container);
        [Part::Far, Part::Link].into_iter().chain(container).collect()
    }

    /// Returns the records of all programs.
    ///
    /// # Errors
    /// They cannot be read.
    pub(super) fn records(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.path().join("records"))? + &self.beside.records()?)
    }

    /// The programs under test, with their names in tables and their process ids.
    pub(super) fn programs(&self) -> Vec<(&'static str, u32)> {
        let beside = self.beside.programs.iter().map(|(name, service)| (*name, service.pid()));
        [("gateway", self.up.pid())].into_iter().chain(beside).collect()
    }

    /// Kills the far program and starts it again.
    ///
    /// # Errors
    /// It does not start.
    pub(super) fn restart_far(&mut self) -> Result<()> {
        self.far_up.signal(Signal::KILL)?;
        self.far_up.wait_ended()?;
        self.far_up = start(&self.far, &self.program, &self.folder, "far")?;
        self.far_up.wait_said(READY)
    }

    /// Kills the program of every container.
    ///
    /// # Errors
    /// The engine refuses.
    pub(super) fn kill_container(&self) -> Result<()> {
        self.engine.map_or(Ok(()), Engine::kill_all)
    }

    /// Sets the link between the gateway and the far host up or down.
    ///
    /// # Errors
    /// `ip` refuses.
    pub(super) fn set_link(&self, state: &str) -> Result<()> {
        self.gateway.run("ip", &["link", "set", "link3", state]).map(drop)
    }
}

impl Files {
    /// `NAME.toml` in a folder; `text` makes each version of it.
    pub(super) fn new(
        name: &'static str,
        folder: &Path,
        text: impl Fn(u64) -> String + Send + Sync + 'static,
    ) -> Self {
        Self { name, folder: folder.to_owned(), text: Arc::new(text), version: 0 }
    }

    /// Writes the next version, at once: the running program watches the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&mut self) -> Result<()> {
        let fresh = self.folder.join(format!("{}.fresh", self.name));
        fs::write(&fresh, (self.text)(self.version))?;
        self.version += 1;
        Ok(fs::rename(fresh, self.folder.join(format!("{}.toml", self.name)))?)
    }
}

/// Makes keys for both ends.
fn keys(program: &Path, folder: &Scratch) -> Result<Keys> {
    let ask = |words: &[&str]| -> Result<String> {
        let output = Command::new(program).args(words).current_dir(folder.path()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sidetrack {}: {said}", words.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let pin = |name: &str| -> Result<String> {
        let file = format!("{name}.pem");
        ask(&["tunnel", "key", "--name", &format!("{name}.example"), "--out", &file])?;
        ask(&["tunnel", "pin", &file])
    };
    let node = |name: &str| ask(&["overlay", "key", &format!("{name}.key")]);
    Ok(Keys { pins: [pin("gateway")?, pin("far")?], nodes: [node("gateway")?, node("far")?] })
}

/// Starts a program with `NAME.toml`.
pub(super) fn start(host: &Node, program: &Path, folder: &Scratch, name: &str) -> Result<Service> {
    let mut command = host.command(&program.to_string_lossy());
    command.env("SIDETRACK_LOG", "sidetrack=info").env("XDG_RUNTIME_DIR", folder.path());
    command.args(["up", "-c"]).arg(folder.path().join(format!("{name}.toml")));
    Service::start(name, command, folder.path())
}

/// Waits until connections from a host reach a server without our programs.
pub(super) fn wait_for_links(host: &Node, server: SocketAddr) -> Result<()> {
    let begun = Instant::now();
    host.enter(|| {
        while Flow::open(server, Duration::from_secs(1)).and_then(Flow::finish).is_err() {
            ensure!(begun.elapsed() < LIMIT, "the links do not get ready");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    })
}

/// Sends datagrams back, until it is dropped.
struct Datagrams {
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Datagrams {
    fn start(host: &Node) -> Result<Self> {
        let socket = host.enter(|| Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, DATAGRAMS))?))?;
        socket.set_read_timeout(Some(LOOK))?;
        let stopping = Arc::<AtomicBool>::default();
        let stop = stopping.clone();
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !stop.load(Relaxed) {
                if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                    // A datagram that cannot be sent is lost, as on any path.
                    let _ = socket.send_to(&buffer[..length], from);
                }
            }
        });
        Ok(Self { stopping, thread: Some(thread) })
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.stopping.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
