//! client (10.0.0.1, fd00::1) - firewall - server (10.0.0.2, fd00::2), bridged; or routed with 10.0.1.1 and 10.0.2.1.
//!
//! The rule set is the one that `sidetrack shunt rules --iptables` prints, in NFShunt's mark layout.

use sidetrack::shunt::{Engine, FlowView, Path, PathKind, Settings, ShuntRecord};
use sidetrack_core::shunt::{
    Config, FastPathKind, MarkActions, PortNumber, RuleSet, ShuntAction, Transport, Tuple, WhenFull,
};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_sys::sysctl;
use sidetrack_testkit::{LIMIT, Line, Node};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Destination ports of the policy below.
pub(crate) const SHUNT: u16 = 5000;
pub(crate) const IGNORE: u16 = 4999;
pub(crate) const BLOCK: u16 = 5666;

/// Idle time of shunted flows where a test waits for it.
pub(crate) const IDLE: Duration = Duration::from_secs(4);
/// Elsewhere: no flow stands still for so long, whatever else the machine does.
const NEVER_IDLE: Duration = Duration::from_secs(600);

/// The rules that the product prints, in the original's form, with this policy.
pub(crate) fn rule_set(bridged: bool) -> String {
    let ports = [(1, "to-client"), (2, "to-server")];
    let ports = ports.map(|(number, name)| (PortNumber::new(number).expect("a number"), name));
    let rules =
        RuleSet { ports: &ports, bridged, actions: MarkActions::default(), own_rules: false, lines: &[] };
    let policy = [(IGNORE, ShuntAction::Ignore), (SHUNT, ShuntAction::Shunt), (BLOCK, ShuntAction::Block)];
    let mut lines = String::new();
    for ((port, action), protocol) in policy.into_iter().flat_map(|one| [(one, "tcp"), (one, "udp")]) {
        let bits = rules.decision(action).expect("a number");
        lines += &format!(
            "-A SHUNT_POLICY -p {protocol} --dport {port} -m conntrack --ctstate RELATED,ESTABLISHED -j MARK --set-xmark \
             {bits:#x}/0x100f0000\n"
        );
    }
    rules.iptables().replace("COMMIT", &format!("{lines}COMMIT"))
}

/// The rules that leave every flow to Sidetrack's own.
pub(crate) fn own_rules(bridged: bool) -> String {
    let ports = [(1, "to-client"), (2, "to-server")];
    let ports = ports.map(|(number, name)| (PortNumber::new(number).expect("a number"), name));
    RuleSet { ports: &ports, bridged, actions: MarkActions::default(), own_rules: true, lines: &[] }
        .iptables()
}

/// A command of a host, with something for its standard input.
pub(crate) fn tool(program: &str, arguments: &str, input: &str) -> String {
    use std::io::Write as _;
    use std::process::Stdio;
    let mut child = Command::new(program)
        .args(arguments.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("written");
    let output = child.wait_with_output().expect("waited");
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Three hosts.
pub(crate) struct Network {
    pub client: Node,
    pub firewall: Node,
    pub server: Node,
    pub server_addresses: [&'static str; 2],
    pub forwarding: Forwarding,
}

impl Network {
    /// With the firewall's rules loaded.
    pub(crate) fn new(forwarding: Forwarding) -> Self {
        let network = Self::bare(forwarding);
        network.load(&rule_set(forwarding == Forwarding::Bridged));
        network
    }

    /// Without rules.
    pub(crate) fn bare(forwarding: Forwarding) -> Self {
        match forwarding {
            Forwarding::Bridged => Self::bridged(),
            Forwarding::Routed => {
                let Line { client, router, server } = Line::new();
                let server_addresses = ["10.0.2.1", "fd00:2::1"];
                Self { client, firewall: router, server, server_addresses, forwarding }
            }
        }
    }

    fn bridged() -> Self {
        let (client, firewall, server) = (Node::new(), Node::new(), Node::new());
        firewall.ip("link add br0 type bridge");
        for (node, name, number) in [(&client, "to-client", 1), (&server, "to-server", 2)] {
            firewall.ip(&format!("link add {name} type veth peer name eth0 netns {}", node.thread_id()));
            firewall.ip(&format!("link set {name} master br0 up"));
            node.ip(&format!("addr add 10.0.0.{number}/24 dev eth0"));
            node.ip(&format!("addr add fd00::{number}/64 dev eth0 nodad"));
            node.ip("link set eth0 up");
        }
        firewall.ip("link set br0 up");
        for name in ["to-client", "to-server", "br0"] {
            firewall.carries(name);
        }
        firewall.run(|| {
            for name in ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"] {
                sysctl::write(&format!("net/bridge/{name}"), "1").expect("br_netfilter");
            }
        });
        let server_addresses = ["10.0.0.2", "fd00::2"];
        Self { client, firewall, server, server_addresses, forwarding: Forwarding::Bridged }
    }

    /// Makes the hosts send what this fast path takes: XDP on a veth loses checksums that are still to be made, and hands
    /// frames only to a peer that polls.
    pub(crate) fn prepare(&self, path: PathKind) {
        if path == PathKind::Tc {
            return;
        }
        for host in [&self.client, &self.server] {
            host.run(|| tool("ethtool", "-K eth0 tx off gro on", ""));
        }
    }

    /// Loads rules of both IP versions.
    pub(crate) fn load(&self, rules: &str) {
        for program in ["iptables-restore", "ip6tables-restore"] {
            let rules = rules.to_owned();
            self.firewall.run(move || tool(program, "--noflush", &rules));
        }
    }

    /// Runs a tool on the firewall.
    pub(crate) fn tool(&self, program: &'static str, arguments: &str) -> String {
        let arguments = arguments.to_owned();
        self.firewall.run(move || tool(program, &arguments, ""))
    }

    pub(crate) fn settings(&self, path: impl Into<Path>, idle: Duration) -> Settings {
        let names = ["to-client", "to-server"];
        let port = |number| PortNumber::new(number).expect("a number");
        Settings {
            paths: vec![path.into()],
            forwarding: self.forwarding,
            keep_when_stalled: false,
            redirect_peer: true,
            ports: BTreeMap::from([(port(1), names[0].to_owned()), (port(2), names[1].to_owned())]),
            core: Config {
                ports: BTreeSet::new(),
                actions: MarkActions::default(),
                fast_path: FastPathKind::None,
                rules: None,
                entries_max: 1024,
                entries_max_per_client: 1024,
                when_full: WhenFull::default(),
                shunt_idle: idle,
                block_idle: idle,
                keep_every: Duration::from_secs(1),
            },
        }
    }

    /// Starts a shunt on the firewall.
    pub(crate) fn start(&self, path: impl Into<Path>) -> Running {
        self.start_with(path, NEVER_IDLE)
    }

    /// The same; flows that stand still so long leave the fast path.
    pub(crate) fn start_with(&self, path: impl Into<Path>, idle: Duration) -> Running {
        self.start_as(self.settings(path, idle))
    }

    /// The same with these settings.
    pub(crate) fn start_as(&self, settings: Settings) -> Running {
        self.firewall.run(move || Running::start(settings))
    }
}

type Job = Box<dyn FnOnce(&mut Engine) + Send>;

/// A shunt on a thread of its own.
pub(crate) struct Running {
    jobs: Sender<Job>,
    pub records: Receiver<ShuntRecord>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(settings: Settings) -> Self {
        let (jobs, queue) = channel::<Job>();
        let (record, records) = channel();
        let (started, start) = channel();
        let thread = std::thread::spawn(move || {
            let mut engine = Engine::start(&settings).expect("a shunt");
            started.send(()).expect("the test waits");
            loop {
                engine.turn(Duration::from_millis(5), None).expect("a turn");
                engine.records().into_iter().for_each(|one| drop(record.send(one)));
                match queue.try_recv() {
                    Ok(job) => job(&mut engine),
                    Err(std::sync::mpsc::TryRecvError::Disconnected) => {
                        return engine.stop().expect("stopped");
                    }
                    Err(std::sync::mpsc::TryRecvError::Empty) => {}
                }
            }
        });
        start.recv_timeout(LIMIT).expect("it starts");
        Self { jobs, records, thread: Some(thread) }
    }

    /// Does something with the engine.
    pub(crate) fn with<T: Send + 'static>(&self, work: impl FnOnce(&mut Engine) -> T + Send + 'static) -> T {
        let (done, result) = channel();
        self.jobs.send(Box::new(move |engine| drop(done.send(work(engine))))).expect("it lives");
        result.recv_timeout(LIMIT).expect("it answers")
    }

    /// The flow from this client, once it fits.
    pub(crate) fn wait_for(&self, client: SocketAddr, fits: impl Fn(&FlowView) -> bool) -> FlowView {
        let begun = Instant::now();
        let mut seen = None;
        while begun.elapsed() < LIMIT {
            let flows = self.with(|engine| engine.flows());
            seen = flows.into_iter().find(|flow| flow.client == client);
            if let Some(flow) = seen.as_ref().filter(|flow| fits(flow)) {
                return flow.clone();
            }
        }
        panic!("it never fits: {seen:?}");
    }

    /// The next record.
    pub(crate) fn record(&self) -> ShuntRecord {
        self.records.recv_timeout(LIMIT).expect("a record")
    }

    /// Pins a flow.
    pub(crate) fn pin(&self, client: SocketAddr, server: SocketAddr, action: ShuntAction) -> bool {
        let tuple = Tuple::new(client, server, Transport::Tcp, 0);
        self.with(move |engine| engine.pin(&tuple, action)).expect("asked")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let (none, _) = channel();
        self.jobs = none;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the shunt's thread panicked");
        }
    }
}
