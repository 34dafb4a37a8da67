//! A control plane on loopback, each part a process that can be killed and started again.
#![allow(dead_code, reason = "each test target uses its own part")]

use crate::node::agreement::trial;
use crate::node::peers::Server;
use crate::node::{Up, send};
use axum::body::Body;
use hyper::Method;
use hyper::body::Body as _;
use rustix::process::Signal;
use serde_json::{Value, json};
use sidetrack::control::api::{ApplicationStatus, Phase, Progress};
use sidetrack::control::domain::Held;
use sidetrack::control::link::{ALPN, Link};
use sidetrack::tls::{Mutual, Trust, authority, signed};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process of the control plane.
pub(crate) struct Part {
    command: &'static str,
    file: PathBuf,
    child: Child,
    log: Arc<Mutex<Vec<String>>>,
}

impl Part {
    fn start(command: &'static str, file: &Path) -> Self {
        Self::start_with(command, file, &[])
    }

    fn start_with(command: &'static str, file: &Path, variables: &[(&str, &str)]) -> Self {
        let mut program = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        program.args([command, "serve", "-c"]).envs(variables.iter().copied()).arg(file).stdin(Stdio::null());
        Self::begun(command, file, program)
    }

    fn begun(command: &'static str, file: &Path, mut program: Command) -> Self {
        let mut child = program.stderr(Stdio::piped()).spawn().expect("the binary");
        let mut log = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut seen = Vec::new();
        loop {
            match log.next() {
                Some(Ok(line)) if line.ends_with(": ready") => break,
                Some(Ok(line)) => seen.push(line),
                _ => panic!("{command} ended:\n{}", seen.join("\n")),
            }
        }
        // The pipe is read to its end, so that the part never waits for room in it.
        let lines = Arc::new(Mutex::new(seen));
        let keep = lines.clone();
        std::thread::spawn(move || {
            log.map_while(Result::ok).for_each(|line| keep.lock().expect("no panic").push(line));
        });
        Self { command, file: file.to_owned(), child, log: lines }
    }

    /// What it has logged so far.
    pub(crate) fn logged(&self) -> String {
        self.log.lock().expect("no panic").join("\n")
    }

    /// Waits for its end.
    pub(crate) fn ended(&mut self) -> std::process::ExitStatus {
        eventually("it ends", || !matches!(self.child.try_wait(), Ok(None)));
        self.child.wait().expect("a child")
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        send(self.child.id(), Signal::KILL);
        self.child.wait().expect("a child");
    }

    /// After a kill: the same again.
    pub(crate) fn restart(&mut self) {
        self.restart_with(&[]);
    }

    /// The same with these variables in its environment.
    pub(crate) fn restart_with(&mut self, variables: &[(&str, &str)]) {
        *self = Self::start_with(self.command, &self.file, variables);
    }

    /// The same with this socket, as systemd passes it: the shell gives it the number that the protocol says.
    pub(crate) fn restart_on(&mut self, listener: TcpListener) {
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            "exec 3<&0 </dev/null; LISTEN_PID=$$ exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_sidetrack"),
        ]);
        shell.args([self.command, "serve", "-c"]).arg(&self.file).env("LISTEN_FDS", "1");
        shell.stdin(std::os::fd::OwnedFd::from(listener));
        *self = Self::begun(self.command, &self.file, shell);
    }

    /// Where its file says that it listens.
    pub(crate) fn listens(&self) -> SocketAddr {
        listens(&self.file)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
        }
    }
}

/// Where a file of the control plane says that its part listens.
fn listens(file: &Path) -> SocketAddr {
    let text = std::fs::read_to_string(file).expect("the file");
    let listen = text.lines().find_map(|line| line.strip_prefix("listen = \"")?.strip_suffix('"'));
    listen.expect("an address").parse().expect("an address")
}

/// All of it.
pub(crate) struct Plane {
    pub runtime: Runtime,
    pub folder: tempfile::TempDir,
    /// Serves until the plane goes.
    server: Server,
    /// The proxy in the client's network: its listener `in` leads to the data.
    pub lab: Up,
    /// The proxy in front of the data; here only to be configured.
    pub ward: Up,
    pub hospital: Part,
    pub centre: Part,
    pub orchestrator: Part,
    /// A second orchestrator on the same etcd.
    pub second: Option<Part>,
    app: Link,
    operator: [Link; 2],
}

/// What the files say of images.
#[derive(Default)]
pub(crate) struct Images {
    /// Tables of the orchestrator's.
    pub orchestrator: String,
    /// Keys of the centre's.
    pub centre_top: String,
    /// Tables of the centre's.
    pub centre: String,
}

/// Free addresses: a part that is started again has to find its own free, so each plane has a host of
/// its own on loopback.
pub(crate) fn addresses<const N: usize>() -> [SocketAddr; N] {
    static PLANES: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, 64 | high >> 2, low, PLANES.fetch_add(1, Relaxed));
    let listeners = [0; N].map(|_| TcpListener::bind((host, 0)).expect("bound"));
    listeners.map(|listener| listener.local_addr().expect("an address"))
}

/// The function that is agreed on, inside a proxy.
const COUNT: &str = "[function.count]\nkind = \"count\"\n";
/// What every proxy says at the top of its configuration.
const TOP: &str = "default = \"deny\"\n";

fn tables(server: &Server, end: &str, functions: &str) -> String {
    format!(
        "[policy]\nagreement = \"@/agreement.toml\"\n{functions}\
         [[listen]]\nname = \"in\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"research\"\ncarrier = \"direct\"\nagreement = {{ purpose = \"research\", at = \"{end}\" }}\n",
        server.address
    )
}

fn proxy(tables: &str) -> Up {
    let nothing =
        |folder: &Path| std::fs::write(folder.join("agreement.toml"), "version = 1\n").expect("written");
    Up::start_with(TOP, tables, nothing)
}

impl Plane {
    /// Everything runs; no application is there. `grants` of the hospital, in TOML.
    pub(crate) fn start(grants: &str) -> Self {
        Self::with(grants, COUNT)
    }

    /// The same with these tables for the functions of the client's proxy: `count` has to be one of them.
    pub(crate) fn with(grants: &str, functions: &str) -> Self {
        Self::shipping(grants, functions, &Images::default())
    }

    /// The same where images may be shipped to the centre.
    pub(crate) fn shipping(grants: &str, functions: &str, images: &Images) -> Self {
        Self::on(grants, functions, images, None)
    }

    /// Two orchestrators that share their state: `etcd` is the table [etcd] of their file. Its paths start from the folder of the
    /// plane, in which `make` is called first.
    pub(crate) fn shared(grants: &str, make: impl FnOnce(&Path) -> String) -> Self {
        let mut make = Some(make);
        let mut etcd = |folder: &Path| make.take().map(|make| make(folder)).expect("called once");
        Self::on(grants, COUNT, &Images::default(), Some(&mut etcd))
    }

    fn on(
        grants: &str,
        functions: &str,
        images: &Images,
        etcd: Option<&mut dyn FnMut(&Path) -> String>,
    ) -> Self {
        let server = Server::start("127.0.0.2");
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        make_keys(folder.path());
        let agreed = trial(server.address.port(), "given", "requires = \"counted\"\n");
        std::fs::write(at("agreement.toml"), agreed).expect("written");
        let [main, one, two, more] = addresses();
        let lab = proxy(&tables(&server, "client", functions));
        let ward = proxy(&tables(&server, "server", COUNT));
        let tls = |name: &str| format!("[tls]\nidentity = \"{name}.pem\"\nca = \"ca.pem\"\n");
        let etcd = etcd.map(|make| make(folder.path()));
        let (state, table) = match &etcd {
            None => ("state = \"orchestrator.redb\"\n", ""),
            Some(table) => ("", &**table),
        };
        let reached =
            if etcd.is_some() { format!("[\"{main}\", \"{more}\"]") } else { format!("\"{main}\"") };
        let orchestrator = |listen: SocketAddr, file: &str| {
            let text = format!(
                "version = 1\nlisten = \"{listen}\"\nagreement = \"agreement.toml\"\n{state}\
                 applications = [\"app.example\", \"other.example\"]\n\
                 operators = [\"keeper.example\"]\n{}[domain.hospital]\naddress = \"{one}\"\nname = \"hospital.example\"\n\
                 [domain.centre]\naddress = \"{two}\"\nname = \"centre.example\"\n{}{table}",
                tls("orchestrator"),
                images.orchestrator
            );
            std::fs::write(at(file), text).expect("written");
            Part::start("orchestrate", &at(file))
        };
        let domain = |party: &str, listen: SocketAddr, node: &str, proxy: &Up, grants: &str, top: &str| {
            let text = format!(
                "{top}version = 1\nparty = \"{party}\"\nlisten = \"{listen}\"\nstate = \"{party}.redb\"\noperators = [\"app.example\"]\n\
                 nodes = [\"{node}\"]\nproxies = [\"{}\"]\n{}[orchestrator]\naddress = {reached}\n\
                 name = \"orchestrator.example\"\n{grants}\n",
                proxy.folder().join("admin.sock").display(),
                tls(party)
            );
            let file = at(&format!("{party}.toml"));
            std::fs::write(&file, text).expect("written");
            Part::start("domain", &file)
        };
        let hospital = domain("hospital", one, "ward", &ward, grants, "");
        let centre =
            domain("centre", two, "lab", &lab, &format!("[[grant]]\n{}", images.centre), &images.centre_top);
        let second = etcd.is_some().then(|| orchestrator(more, "second.toml"));
        let orchestrator = orchestrator(main, "orchestrator.toml");
        let link = |to: SocketAddr, name: &str, who: &str| link(folder.path(), to, name, who);
        let mut app = link(main, "orchestrator.example", "app");
        if etcd.is_some() {
            app = several(folder.path(), [main, more], "orchestrator.example", "app");
        }
        let operator = [link(one, "hospital.example", "app"), link(two, "centre.example", "app")];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { runtime, server, lab, ward, hospital, centre, orchestrator, second, app, operator, folder }
    }

    /// The orchestrator, or the agent of a party, asked by a peer that no list names.
    pub(crate) fn stranger(&self, whom: &str) -> Link {
        self.asked_by(whom, "stranger")
    }

    /// The orchestrator, or the agent of a party, asked with this peer's certificate.
    pub(crate) fn asked_by(&self, whom: &str, who: &str) -> Link {
        let listen = listens(&self.folder.path().join(format!("{whom}.toml")));
        link(self.folder.path(), listen, &format!("{whom}.example"), who)
    }

    /// Gives the client's proxy other functions.
    pub(crate) fn replace_functions(&self, functions: &str) {
        self.lab.reload(TOP, &tables(&self.server, "client", functions));
    }

    /// Names of all that lies beside the files of orchestrator and agents.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("the folder");
        let mut names: Vec<_> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Starts a node whose page shows the applications, as an operator of the orchestrator.
    pub(crate) fn watching(&self) -> Up {
        let at = |name: &str| self.folder.path().join(name);
        let listen = self.orchestrator.listens();
        let (identity, ca) = (at("keeper.pem"), at("ca.pem"));
        let orchestrator = format!(
            "#admin orchestrator = {{ address = \"{listen}\", name = \"orchestrator.example\", identity = \"{}\", ca = \"{}\" }}\n",
            identity.display(),
            ca.display()
        );
        Up::start(&(TOP.to_owned() + &orchestrator), "")
    }

    /// Where clients reach the data.
    pub(crate) fn entry(&self) -> SocketAddr {
        self.lab.addresses("in")[0]
    }

    /// Submits an application as this member, and returns all lines of progress as they came.
    pub(crate) fn submitted(&self, member: &Link, application: &Value) -> String {
        let body = serde_json::to_vec(application).expect("JSON");
        self.runtime.block_on(async {
            let answer = member.send(Method::POST, "/v1/applications", body).await.expect("submitted");
            let read = axum::body::to_bytes(answer.into_body(), 1 << 20);
            let bytes = tokio::time::timeout(LIMIT, read).await.expect("in time").expect("lines");
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    /// Submits an application; after this number of lines of progress `then` is done. Gives the lines that came.
    pub(crate) fn submit(&mut self, name: &str, after: usize, then: impl FnOnce(&mut Self)) -> Vec<Progress> {
        self.try_submit(name, after, then).expect("submitted")
    }

    /// The same if the orchestrator may not be there: then `then` is done, and there is no line.
    pub(crate) fn try_submit(
        &mut self,
        name: &str,
        after: usize,
        then: impl FnOnce(&mut Self),
    ) -> Option<Vec<Progress>> {
        let application =
            json!({ "name": name, "purpose": "research", "flows": [{ "client": "lab", "data": "pulse" }] });
        let body = serde_json::to_vec(&application).expect("JSON");
        let answer = self.runtime.block_on(self.app.send(Method::POST, "/v1/applications", body));
        let Ok(answer) = answer else {
            then(self);
            return None;
        };
        let mut lines = Lines { body: answer.into_body(), held: Vec::new() };
        let mut told = Vec::new();
        let mut then = Some(then);
        loop {
            if told.len() == after
                && let Some(then) = then.take()
            {
                then(self);
            }
            let next = async { tokio::time::timeout(LIMIT, lines.next()).await };
            match self.runtime.block_on(next).expect("in time") {
                Some(line) => told.push(serde_json::from_slice(&line).expect("a line of progress")),
                None => break,
            }
        }
        if let Some(then) = then {
            then(self);
        }
        Some(told)
    }

    /// The applications of the orchestrator; none if it cannot be asked.
    pub(crate) fn applications(&self) -> Option<Vec<ApplicationStatus>> {
        self.runtime.block_on(self.app.ask(Method::GET, "/v1/applications", &(), PATIENCE)).ok()
    }

    /// Ends an application.
    pub(crate) fn end(&self, name: &str) {
        let path = format!("/v1/applications/{name}");
        self.runtime.block_on(self.app.ask::<()>(Method::DELETE, &path, &(), PATIENCE)).expect("ended");
    }

    /// What the hospital (0) or the centre (1) holds; none if it cannot be asked.
    pub(crate) fn held(&self, domain: usize) -> Option<Vec<Held>> {
        self.runtime.block_on(self.operator[domain].ask(Method::GET, "/v1/applications", &(), PATIENCE)).ok()
    }

    /// Has the hospital say whether consent holds.
    pub(crate) fn consent(&self, word: &str) -> Value {
        let change = json!({ "consent": word });
        let asked = self.operator[0].ask(Method::PUT, "/v1/consent/pulse", &change, PATIENCE);
        self.runtime.block_on(asked).expect("changed")
    }

    /// Waits until nothing is in between: each application is ready everywhere, or nowhere. Gives whether one is ready.
    pub(crate) fn settled(&self) -> bool {
        let mut ready = false;
        eventually("each application is ready everywhere or gone", || {
            let (Some(all), Some(one), Some(two)) = (self.applications(), self.held(0), self.held(1)) else {
                return false;
            };
            ready = !all.is_empty();
            let everywhere = |held: &[Held]| {
                held.len() == all.len()
                    && held.iter().all(|held| held.lease.is_none() && held.configuration.is_some())
            };
            all.iter().all(|status| status.phase == Phase::Ready) && everywhere(&one) && everywhere(&two)
        });
        ready
    }
}

/// An authority, and a key for each part and each member.
fn make_keys(folder: &Path) {
    let ca = authority(1).expect("an authority");
    let ca_private = ca.identity_pem();
    std::fs::write(folder.join("ca.pem"), &ca.certificate_pem).expect("written");
    for name in ["orchestrator", "hospital", "centre", "app", "other", "keeper", "stranger", "etcd"] {
        let made = signed(&format!("{name}.example"), 1, &ca_private).expect("a key");
        std::fs::write(folder.join(format!("{name}.pem")), made.identity_pem()).expect("written");
    }
}

fn link(folder: &Path, to: SocketAddr, name: &str, who: &str) -> Link {
    several(folder, [to], name, who)
}

/// A peer that has several addresses.
fn several(folder: &Path, to: impl IntoIterator<Item = SocketAddr>, name: &str, who: &str) -> Link {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("a key");
    let mutual = Mutual::new(&read(&format!("{who}.pem")), Trust::Authority(read("ca.pem").into()), ALPN);
    Link::new(name, to.into_iter().map(|to| to.to_string()), name, mutual.expect("a key"))
}

/// Lines of a body as they come.
struct Lines {
    body: Body,
    held: Vec<u8>,
}

impl Lines {
    /// The next line; none at the end, in order or not.
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(end) = self.held.iter().position(|byte| *byte == b'\n') {
                let rest = self.held.split_off(end + 1);
                return Some(std::mem::replace(&mut self.held, rest));
            }
            match std::future::poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await {
                Some(Ok(frame)) => self.held.extend(frame.into_data().expect("data")),
                _ => return None,
            }
        }
    }
}
