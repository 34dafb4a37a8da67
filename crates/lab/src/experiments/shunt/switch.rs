//! Open vSwitch with its user-space datapath and separate folders.

use crate::service::Service;
use crate::topology::Node;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time limit for the start of a daemon.
const LIMIT: Duration = Duration::from_secs(20);

/// A running switch with the ports 49 and 50, where the hosts are, and 10 and 11, which lead to the firewall.
pub(super) struct Switch {
    node: Node,
    folder: PathBuf,
    _daemons: [Service; 2],
}

impl Switch {
    /// Starts it on a node that already has the interfaces. `controlled`: it connects to the firewall; otherwise the
    /// hosts reach each other directly.
    ///
    /// # Errors
    /// Open vSwitch is not installed or does not start.
    pub(super) fn start(node: Node, folder: &Path, controlled: bool) -> Result<Self> {
        let database = folder.join("conf.db").display().to_string();
        node.run("ovsdb-tool", &["create", &database, "/usr/share/openvswitch/vswitch.ovsschema"])
            .context("package openvswitch-switch")?;
        let socket = folder.join("db.sock");
        let remote = format!("--remote=punix:{}", socket.display());
        let server = daemon(&node, "ovsdb-server", &[database, remote], folder, &socket)?;
        let at = format!("unix:{}", socket.display());
        node.run("ovs-vsctl", &[&format!("--db={at}"), "--no-wait", "init"])?;
        let ready = folder.join("ovs-vswitchd.ctl");
        let daemons = [daemon(&node, "ovs-vswitchd", &[at], folder, &ready)?, server];
        let switch = Self { node, folder: folder.to_owned(), _daemons: daemons };
        switch.configure(controlled)?;
        Ok(switch)
    }

    fn vsctl(&self, arguments: &str) -> Result<()> {
        let at = format!("--db=unix:{}", self.folder.join("db.sock").display());
        let arguments: Vec<_> =
            ["--timeout=20", &at].into_iter().chain(arguments.split_whitespace()).collect();
        self.node.run("ovs-vsctl", &arguments).map(drop)
    }

    fn configure(&self, controlled: bool) -> Result<()> {
        self.vsctl(
            "add-br sw -- set bridge sw datapath_type=netdev fail_mode=secure protocols=[OpenFlow10,OpenFlow13]",
        )?;
        for (name, number) in [("fast1", 49), ("fast2", 50), ("slow1", 10), ("slow2", 11)] {
            self.vsctl(&format!("add-port sw {name} -- set interface {name} ofport_request={number}"))?;
        }
        if controlled {
            let more = "-- set controller sw connection_mode=out-of-band max_backoff=1000";
            return self.vsctl(&format!("set-controller sw tcp:192.168.77.1:6653 {more}"));
        }
        let bridge = format!("unix:{}", self.folder.join("sw.mgmt").display());
        for flow in ["in_port=49,actions=output:50", "in_port=50,actions=output:49"] {
            self.node.run("ovs-ofctl", &["-O", "OpenFlow13", "add-flow", &bridge, flow])?;
        }
        Ok(())
    }
}

/// Starts a daemon and waits for its socket, which shows that it is ready.
fn daemon(node: &Node, program: &str, arguments: &[String], folder: &Path, ready: &Path) -> Result<Service> {
    let mut command = node.command(&format!("/usr/sbin/{program}"));
    command.args(arguments).arg("--no-chdir");
    command.arg(format!("--unixctl={}", folder.join(format!("{program}.ctl")).display()));
    for name in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
        command.env(name, folder);
    }
    let service = Service::start(program, command, folder)?;
    let begun = Instant::now();
    while !ready.exists() {
        ensure!(begun.elapsed() < LIMIT, "{program} does not start: {}", service.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(service)
}
