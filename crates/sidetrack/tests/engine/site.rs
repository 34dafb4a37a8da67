//! client (10.0.1.1, fd00:1::1) - engine (.254, ::fe) - servers (10.0.2.1, fd00:2::1).

use crate::node::peers::{Server, visit};
use crate::node::{Record, Up};
use crate::tools::tool;
use rustix::process::Signal;
use sidetrack_sys::netns::NetNs;
use sidetrack_testkit::{Line, Node};
use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};

/// Where the engine answers.
pub(crate) const ENGINE: &str = "10.0.1.254:80";
/// The same by IPv6.
pub(crate) const ENGINE6: &str = "[fd00:1::fe]:80";
/// What connections to servers come from.
pub(crate) const SOURCE: &str = "10.0.2.254";

/// Every way to get at packets.
pub(crate) const WAYS: [&str; 2] = ["packet", "xdp"];

/// A listener of kind engine with these lines besides.
pub(crate) fn engine(lines: &str) -> String {
    engine_by("packet", lines)
}

/// The same with the way it gets at packets.
pub(crate) fn engine_by(io: &str, lines: &str) -> String {
    format!(
        "[[listen]]\nkind = \"engine\"\naddress = [\"{ENGINE}\", \"{ENGINE6}\"]\ninterfaces = [\"to-client\", \"to-server\"]\n\
         engine = {{ io = \"{io}\", sources = [\"{SOURCE}\", \"fd00:2::fe\"] }}\n{lines}\n"
    )
}

/// A server that is at work on the server's host until it is dropped.
pub(crate) struct Served {
    /// Where it listens.
    pub address: SocketAddr,
    _stop: Sender<()>,
}

/// Hosts and a running engine.
pub(crate) struct Site {
    /// The hosts.
    pub line: Line,
    /// The engine, once it is started.
    pub up: Option<Up>,
}

impl Site {
    /// The hosts, each knowing its neighbours.
    pub(crate) fn new() -> Self {
        let line = Line::new();
        // The engine is not a router: it drops packets that are not its own.
        line.router.run(|| {
            for setting in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
                sidetrack_sys::sysctl::write(setting, "0").expect("no forwarding");
            }
        });
        Self { line, up: None }
    }

    /// The same where both other hosts take frames that XDP sends: the end of a veth does only with GRO, or a program of its own.
    pub(crate) fn taking_frames() -> Self {
        let site = Self::new();
        for host in [&site.line.client, &site.line.server] {
            host.run(|| tool("ethtool", "-K eth0 gro on"));
        }
        site
    }

    /// Starts it.
    pub(crate) fn start(&mut self, top: &str, tables: &str) {
        let (top, tables) = (top.to_owned(), tables.to_owned());
        self.up = Some(self.line.router.run(move || Up::start(&top, &tables)));
    }

    /// A server that greets and echoes.
    pub(crate) fn server(&self, ip: &'static str) -> Served {
        let (stop, stopped) = channel::<()>();
        let (tell, told) = channel();
        let enter = self.enter_server();
        std::thread::spawn(move || {
            enter();
            let server = Server::start(ip);
            tell.send(server.address).expect("the test waits");
            let _ = stopped.recv();
        });
        Served { address: told.recv().expect("a server"), _stop: stop }
    }

    /// Moves the calling thread to the host of the servers.
    pub(crate) fn enter_server(&self) -> impl FnOnce() + Send + 'static {
        enter(&self.line.server)
    }

    /// The next record.
    pub(crate) fn record(&mut self) -> Record {
        self.up.as_mut().expect("started").record()
    }

    /// Visits the engine until the kernel carries a flow, which shows that it has the decision. The engine learns the
    /// server's neighbour from the first flow and decides with a later one. Returns the record of the carried flow.
    pub(crate) fn until_carried(&mut self, engine_at: &'static str) -> Record {
        for _ in 0..100 {
            self.line.client.run(move || visit(engine_at.parse().expect("an address"), b"teaches"));
            let record = self.record();
            assert_eq!(record.text("reason"), "ok");
            if record.flag("shunted") {
                return record;
            }
        }
        panic!("the kernel carries no flow");
    }

    /// Ends Sidetrack; how many servers' answers XDP has taken, as the engine says then.
    pub(crate) fn answered_by_xdp(&mut self) -> u32 {
        let up = self.up.as_mut().expect("started");
        up.signal(Signal::TERM);
        let line =
            up.log_line("what it has counted", |line| line.contains("a worker of the packet engine ends"));
        let (_, count) = line.rsplit_once("syn_acks: ").expect("a count");
        count.split_once(' ').and_then(|(count, _)| count.parse().ok()).expect("a number")
    }

    /// What a busy machine delays is not sent again: only what is lost, or held for long. (The second needs Linux 6.11.)
    pub(crate) fn be_patient(&self) {
        for host in [&self.line.client, &self.line.server] {
            host.run(|| {
                sidetrack_sys::sysctl::write("net/ipv4/tcp_early_retrans", "0").expect("no tail loss probe");
                let _ = sidetrack_sys::sysctl::write("net/ipv4/tcp_rto_min_us", "20000000");
            });
        }
    }

    /// TCP segments that the client's and the server's kernel have sent again so far.
    pub(crate) fn retransmitted(&self) -> [u64; 2] {
        [&self.line.client, &self.line.server].map(|node| node.run(retransmitted))
    }
}

/// Moves the thread that calls the result to this host.
pub(crate) fn enter(node: &Node) -> impl FnOnce() + Send + 'static {
    let namespace = node.run(|| NetNs::current().expect("the host's namespace"));
    move || namespace.enter().expect("entered")
}

/// `RetransSegs` of this thread's network namespace.
fn retransmitted() -> u64 {
    counter("snmp", "Tcp:", "RetransSegs")
}

/// A counter of this thread's network namespace.
pub(crate) fn counter(file: &str, group: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).expect("counters");
    let mut lines = text.lines().filter(|line| line.starts_with(group));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let at = names.split(' ').position(|one| one == name).expect("a counter");
    values.split(' ').nth(at).expect("a value").parse().expect("a number")
}
