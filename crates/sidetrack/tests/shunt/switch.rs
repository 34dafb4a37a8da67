//! Open vSwitch with its user-space datapath, on a host of its own between the hosts and the firewall:
//!
//! ```text
//!  client --49-- switch --50-- server
//!              10 |  | 11
//!              firewall (bridge)
//! ```

use crate::firewall::Network;
use sidetrack::config::{ShuntSwitch, SwitchMember};
use sidetrack_core::openflow::{SwitchPorts, Version};
use sidetrack_core::shunt::PortNumber;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_sys::sysctl;
use sidetrack_testkit::{LIMIT, Node};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Where the controller listens, on the firewall's own wire to the switch.
const CONTROLLER: &str = "192.168.77.1";
/// The same on the wire to the second of two switches.
const CONTROLLER_OF_RIGHT: &str = "192.168.78.1";

/// A running switch.
pub(crate) struct OpenVSwitch {
    pub node: Node,
    /// Where the firewall is, seen from here.
    controller: &'static str,
    folder: tempfile::TempDir,
    daemons: Vec<Child>,
}

/// Client, firewall, server and the switch that all their wires end in.
pub(crate) fn network() -> (Network, OpenVSwitch) {
    let node = Node::new();
    let network = around([&node, &node]);
    wire(&node, "control", &network.firewall, "switch");
    network.firewall.ip(&format!("addr add {CONTROLLER}/24 dev switch"));
    node.ip("addr add 192.168.77.2/24 dev control");
    let ports = [("fast1", 49), ("fast2", 50), ("slow1", 10), ("slow2", 11)];
    (network, OpenVSwitch::start(node, CONTROLLER, &ports))
}

/// The same with two switches in a row, joined by their ports 20:
///
/// ```text
///  client --49-- left --20---20-- right --50-- server
///               10 |                | 11
///                  firewall (bridge)
/// ```
pub(crate) fn network_of_two() -> (Network, [OpenVSwitch; 2]) {
    let (left, right) = (Node::new(), Node::new());
    let network = around([&left, &right]);
    wire(&left, "trunk", &right, "trunk");
    for (node, name, at, own) in [
        (&left, "switch", CONTROLLER, "192.168.77.2"),
        (&right, "switch2", CONTROLLER_OF_RIGHT, "192.168.78.2"),
    ] {
        wire(node, "control", &network.firewall, name);
        network.firewall.ip(&format!("addr add {at}/24 dev {name}"));
        node.ip(&format!("addr add {own}/24 dev control"));
    }
    let left = OpenVSwitch::start(left, CONTROLLER, &[("fast1", 49), ("slow1", 10), ("trunk", 20)]);
    let right =
        OpenVSwitch::start(right, CONTROLLER_OF_RIGHT, &[("fast2", 50), ("slow2", 11), ("trunk", 20)]);
    (network, [left, right])
}

/// Client, firewall and server, whose wires end in these switches.
fn around([left, right]: [&Node; 2]) -> Network {
    let (client, firewall, server) = (Node::new(), Node::new(), Node::new());
    firewall.ip("link add br0 type bridge");
    for (host, node, number, fast, slow, name) in [
        (&client, left, 1, "fast1", "slow1", "to-client"),
        (&server, right, 2, "fast2", "slow2", "to-server"),
    ] {
        wire(node, fast, host, "eth0");
        wire(node, slow, &firewall, name);
        firewall.ip(&format!("link set {name} master br0"));
        host.ip(&format!("addr add 10.0.0.{number}/24 dev eth0"));
        host.ip(&format!("addr add fd00::{number}/64 dev eth0 nodad"));
    }
    firewall.ip("link set br0 up");
    firewall.run(|| {
        for name in ["bridge-nf-call-iptables", "bridge-nf-call-ip6tables"] {
            sysctl::write(&format!("net/bridge/{name}"), "1").expect("br_netfilter");
        }
    });
    let server_addresses = ["10.0.0.2", "fd00::2"];
    let network = Network { client, firewall, server, server_addresses, forwarding: Forwarding::Bridged };
    network.load(&crate::firewall::rule_set(true));
    network
}

/// A wire between two hosts. The switch reads frames from a packet socket, which knows no checksum that is still to be made.
fn wire(switch: &Node, here: &str, host: &Node, there: &str) {
    switch.ip(&format!("link add {here} type veth peer name {there} netns {}", host.thread_id()));
    for (node, name) in [(switch, here), (host, there)] {
        let name = name.to_owned();
        node.run(move || {
            crate::firewall::tool("ethtool", &format!("-K {name} tx off"), "");
        });
    }
    switch.ip(&format!("link set {here} up"));
    host.ip(&format!("link set {there} up"));
    switch.carries(here);
    host.carries(there);
}

/// How a shunt is to use two switches.
pub(crate) fn settings_of_two(port: u16) -> ShuntSwitch {
    let number = |number| PortNumber::new(number).expect("a number");
    let member = |name: &str, address: &str, (at, ports), to| SwitchMember {
        name: name.to_owned(),
        address: address.parse().expect("address"),
        ports: BTreeMap::from([(number(at), ports)]),
        links: vec![(to, 20)],
    };
    let single = settings(&[Version::V1_3], port);
    let right = SocketAddr::new(CONTROLLER_OF_RIGHT.parse().expect("address"), port);
    ShuntSwitch {
        listen: single.listen.iter().copied().chain([right]).collect(),
        from: None,
        ports: BTreeMap::new(),
        members: vec![
            member("left", "192.168.77.2", (1, SwitchPorts { fast: 49, slow: 10 }), 1),
            member("right", "192.168.78.2", (2, SwitchPorts { fast: 50, slow: 11 }), 0),
        ],
        ..single
    }
}

/// How a shunt is to use the switch.
pub(crate) fn settings(versions: &[Version], port: u16) -> ShuntSwitch {
    let number = |number| PortNumber::new(number).expect("a number");
    ShuntSwitch {
        listen: vec![SocketAddr::new(CONTROLLER.parse().expect("address"), port)],
        from: Some("192.168.77.2".parse().expect("address")),
        versions: versions.iter().copied().collect(),
        ports: BTreeMap::from([
            (number(1), SwitchPorts { fast: 49, slow: 10 }),
            (number(2), SwitchPorts { fast: 50, slow: 11 }),
        ]),
        clear_at_start: false,
        clear_at_end: false,
        pairs: true,
        master: false,
        shared: false,
        table: 0,
        members: Vec::new(),
    }
}

impl OpenVSwitch {
    fn start(node: Node, controller: &'static str, ports: &[(&str, u16)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        let at = path.clone();
        let daemons = node.run(move || daemons(&at));
        let switch = Self { node, controller, folder, daemons };
        switch.vsctl(
            "add-br sw -- set bridge sw datapath_type=netdev fail_mode=secure protocols=[OpenFlow10,OpenFlow13]",
        );
        for (name, number) in ports {
            switch.vsctl(&format!("add-port sw {name} -- set interface {name} ofport_request={number}"));
        }
        switch
    }

    /// Lets it connect to the controller.
    pub(crate) fn connect(&self, port: u16) {
        // In one step: a controller that is in-band for a moment makes the switch add entries of its own.
        self.vsctl(&format!(
            "set-controller sw tcp:{}:{port} -- set controller sw connection_mode=out-of-band max_backoff=1000",
            self.controller
        ));
    }

    /// Lets it connect to several controllers.
    pub(crate) fn connect_to(&self, ports: &[u16]) {
        let controllers: Vec<_> =
            ports.iter().map(|port| format!("tcp:{}:{port}", self.controller)).collect();
        self.vsctl(&format!("set-controller sw {}", controllers.join(" ")));
        for one in self.vsctl("--bare --columns=_uuid list controller").split_whitespace() {
            self.vsctl(&format!("set controller {one} connection_mode=out-of-band max_backoff=1000"));
        }
    }

    /// `ovs-vsctl`.
    pub(crate) fn vsctl(&self, arguments: &str) -> String {
        let socket = self.folder.path().join("db.sock");
        let arguments = format!("--timeout=50 --db=unix:{} {arguments}", socket.display());
        self.node.run(move || crate::firewall::tool("ovs-vsctl", &arguments, ""))
    }

    /// `ovs-ofctl` with its command before the bridge and `more` behind it.
    pub(crate) fn ofctl(&self, command: &str, more: &str) -> String {
        let bridge = self.folder.path().join("sw.mgmt");
        let arguments = format!("-O OpenFlow13 {command} unix:{} {more}", bridge.display());
        self.node.run(move || crate::firewall::tool("ovs-ofctl", &arguments, ""))
    }

    /// The entries, one a line, once they fit.
    pub(crate) fn wait_for_entries(&self, fits: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        let mut seen = String::new();
        while begun.elapsed() < LIMIT {
            seen = self.ofctl("dump-flows", "");
            if fits(&seen) {
                return seen;
            }
        }
        panic!("they never fit:\n{seen}");
    }
}

/// Starts the database and the switch; they live in `folder` alone.
fn daemons(folder: &Path) -> Vec<Child> {
    let database = folder.join("conf.db");
    crate::firewall::tool(
        "ovsdb-tool",
        &format!("create {} /usr/share/openvswitch/vswitch.ovsschema", database.display()),
        "",
    );
    let socket = folder.join("db.sock");
    let start = |program: &str, arguments: &[String], ready: PathBuf| {
        let log = std::fs::File::create(folder.join(format!("{program}.log"))).expect("a log");
        let child = Command::new(format!("/usr/sbin/{program}"))
            .args(arguments)
            .arg("--no-chdir")
            .arg(format!("--unixctl={}", folder.join(format!("{program}.ctl")).display()))
            .env("OVS_RUNDIR", folder)
            .env("OVS_LOGDIR", folder)
            .env("OVS_DBDIR", folder)
            .env("OVS_SYSCONFDIR", folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{program} (package openvswitch-switch): {error}"));
        let begun = Instant::now();
        while !ready.exists() {
            assert!(begun.elapsed() < LIMIT, "{program} does not start");
            std::thread::yield_now();
        }
        child
    };
    let server = start(
        "ovsdb-server",
        &[database.display().to_string(), format!("--remote=punix:{}", socket.display())],
        socket.clone(),
    );
    // The socket's file is there a moment before it listens.
    let init = format!("--retry --timeout=50 --no-wait --db=unix:{} init", socket.display());
    crate::firewall::tool("ovs-vsctl", &init, "");
    let switch =
        start("ovs-vswitchd", &[format!("unix:{}", socket.display())], folder.join("ovs-vswitchd.ctl"));
    vec![switch, server]
}

impl Drop for OpenVSwitch {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("ovs-vswitchd.log"));
            eprintln!("the switch said:\n{}", log.unwrap_or_default());
        }
    }
}
