//! The real binary: `[shunt]` of a configuration, the rules it prints, its commands, its records, and what is left behind.

use crate::firewall::{Network, SHUNT, tool};
use crate::flows::{Pair, connect, forget};
use crate::node::traces::Traces;
use crate::node::{Up, is_confined};
use rustix::process::Signal;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, eventually, is_root};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

fn configuration(forwarding: Forwarding) -> String {
    let word = if forwarding == Forwarding::Bridged { "bridged" } else { "routed" };
    format!(
        "[shunt]\nforwarding = \"{word}\"\nidle_timeout_ms = 600000\n[[shunt.port]]\nnumber = 1\ninterface = \"to-client\"\n\
         [[shunt.port]]\nnumber = 2\ninterface = \"to-server\"\n"
    )
}

/// Runs `sidetrack shunt` and gives what it prints.
fn shunt(folder: &std::path::Path, arguments: &str) -> Result<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .arg("shunt")
        .args(arguments.split_whitespace())
        .arg("--admin")
        .arg(folder.join("admin.sock"))
        .output()
        .expect("the binary");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// A firewall with the product's own nft rules and a running sidetrack.
pub(crate) struct Node {
    pub network: Network,
    pub up: Up,
    pub folder: PathBuf,
    pub before: Traces,
}

pub(crate) fn start(forwarding: Forwarding) -> Node {
    start_with(forwarding, "", "")
}

/// The same with these keys and rules.
fn start_with(forwarding: Forwarding, top: &str, rules: &str) -> Node {
    let network = Network::bare(forwarding);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rules.toml");
    let tables = format!("{}{rules}", configuration(forwarding));
    std::fs::write(&file, format!("version = 1\n{top}{tables}")).expect("written");
    let rules = shunt(folder.path(), &format!("rules -c {}", file.display())).expect("rules");
    // The examples of the policy are the policy here.
    let rules = rules.replace("# tcp", "tcp");
    network.firewall.run(move || tool("nft", "-f -", &rules));
    let before = network.firewall.run(Traces::now);
    let top = top.to_owned();
    let up = network.firewall.run(move || Up::start(&top, &tables));
    let folder = up.folder();
    Node { network, up, folder, before }
}

impl Node {
    pub(crate) fn shunt(&self, arguments: &str) -> Result<String, String> {
        let (folder, arguments) = (self.folder.clone(), arguments.to_owned());
        self.network.firewall.run(move || shunt(&folder, &arguments))
    }

    /// What `ls` says of a client's flow, once it fits.
    fn wait_for(&self, client: SocketAddr, fits: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        let mut seen = String::new();
        while begun.elapsed() < LIMIT {
            seen = self.shunt("ls").expect("a list");
            let line = seen.lines().find(|line| line.contains(&format!(" {client} ")));
            if let Some(line) = line.filter(|line| fits(line)) {
                return line.to_owned();
            }
        }
        panic!("it never fits:\n{seen}");
    }

    pub(crate) fn shunted(&self, pair: &mut Pair) {
        pair.talk();
        self.wait_for(pair.from, |line| line.starts_with("installed"));
    }
}

fn commands_and_records(forwarding: Forwarding) {
    if !is_root() {
        return;
    }
    let mut node = start(forwarding);
    let address = node.network.server_addresses[0];
    let mut pair = connect(&node.network, address, SHUNT);
    let flow = format!("{} {}", pair.from, pair.to);
    node.shunted(&mut pair);
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    let why = node.shunt(&format!("why {flow}")).expect("why");
    assert!(why.contains("on the fast path") && why.contains("in by port 1, out by 2, action 1"), "{why}");
    let json = node.shunt("ls --json").expect("JSON");
    assert!(json.contains("\"state\":\"installed\""), "{json}");
    node.shunt(&format!("release {flow}")).expect("released");
    pair.talk();
    node.wait_for(pair.from, |line| line.starts_with("slow") && line.contains("ignore"));
    node.shunt(&format!("rm {flow}")).expect("withdrawn");
    node.shunted(&mut pair);
    let error = node.shunt("drop 192.0.2.1:1 192.0.2.2:2").expect_err("none");
    assert!(error.contains("no such connection"), "{error}");
    let (from, to) = (pair.from, pair.to);
    pair.close();
    forget(&node.network.firewall);
    let record = node.up.record();
    assert_eq!((record.address("client"), record.address("orig_dst")), (from, to));
    assert_eq!((record.text("reason"), record.0["shunted"].as_bool()), ("kernel_closed", Some(true)));
    assert!(record.number("bytes_up") > 1_000_000, "{record:?}");
    assert!(record.text("detail").contains("fast path 2 times"), "{record:?}");
    let (status, rest) = node.up.stop();
    assert!(status.success() && rest.is_empty(), "{rest:?}");
    node.network.firewall.run(move || node.before.expect_back("after the end"));
}

#[test]
fn commands_and_records_of_a_bridge() {
    commands_and_records(Forwarding::Bridged);
}

#[test]
fn commands_and_records_of_a_router() {
    commands_and_records(Forwarding::Routed);
}

/// A port that the packet filter says nothing of.
const BULK: u16 = 7000;

/// `nc` on the client's host, talking to the server's.
fn nc(network: &Network, address: &str) -> (Child, TcpStream, SocketAddr) {
    let to = SocketAddr::new(address.parse().expect("address"), BULK);
    let listener = network.server.run(move || TcpListener::bind(to).expect("listen"));
    let start = move || {
        let (host, port) = (to.ip().to_string(), to.port().to_string());
        Command::new("nc").args([host, port]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("nc")
    };
    let child = network.client.run(start);
    let (server, from) = sidetrack_testkit::accept(&listener);
    server.set_read_timeout(Some(LIMIT)).expect("limit");
    (child, server, from)
}

/// A container is a process of this host in another network namespace; so is `nc` here.
fn by_process(forwarding: Forwarding) {
    if !is_root() {
        return;
    }
    let rule = "[[rule]]\nname = \"copies\"\nmatch = { port = 7000, process = \"nc.openbsd\" }\ncarrier = \"direct\"\nshunt = {}\n";
    let node = start_with(forwarding, "default = \"direct\"\n", rule);
    for address in node.network.server_addresses {
        let (mut copy, mut server, from) = nc(&node.network, address);
        let begun = Instant::now();
        let mut input = copy.stdin.take().expect("piped");
        let mut ls = String::new();
        while begun.elapsed() < LIMIT && !ls.contains("installed") {
            input.write_all(b"word").expect("sent");
            server.read_exact(&mut [0; 4]).expect("it comes");
            ls = node
                .shunt("ls")
                .expect("a list")
                .lines()
                .find(|line| line.contains(&format!(" {from} ")))
                .unwrap_or_default()
                .into();
        }
        assert!(ls.contains("installed"), "{ls}");
        let why = node.shunt(&format!("why {from} {}", server.local_addr().expect("address"))).expect("why");
        assert!(why.contains("copies"), "{why}");
        drop(input);
        drop(server);
        assert!(copy.wait().is_ok());
        // Another program's to the same port, this test's own.
        let mut pair = connect(&node.network, address, BULK);
        pair.talk();
        let line = node.wait_for(pair.from, |line| line.starts_with("slow") && line.contains("ignore"));
        assert!(!line.contains("copies"), "{line}");
        Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
        node.wait_for(pair.from, |line| line.starts_with("slow"));
    }
}

#[test]
fn a_rule_shunts_by_the_process_of_a_container_on_a_bridge() {
    by_process(Forwarding::Bridged);
}

#[test]
fn a_rule_shunts_by_the_process_of_a_container_on_a_router() {
    by_process(Forwarding::Routed);
}

#[test]
fn nothing_is_left_and_the_flow_goes_on_when_it_is_killed() {
    if !is_root() {
        return;
    }
    let mut node = start(Forwarding::Bridged);
    let mut pair = connect(&node.network, "10.0.0.2", SHUNT);
    node.shunted(&mut pair);
    node.up.signal(Signal::KILL);
    let _ = node.up.gone();
    node.network.firewall.run(move || node.before.expect_back("after the end"));
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    pair.close();
}

/// What is done with a flow before its shunt is killed, as `sidetrack shunt` has it, and how it is listed then.
const STANDS: [(&str, &str); 4] =
    [("", "installed"), ("release", "slow"), ("drop", "installed"), ("rm", "slow")];

#[test]
fn wherever_a_flow_stands_nothing_is_left_by_a_kill() {
    if !is_root() {
        return;
    }
    for (verb, state) in STANDS {
        let mut node = start(Forwarding::Bridged);
        let mut pair = connect(&node.network, "10.0.0.2", SHUNT);
        node.shunted(&mut pair);
        if !verb.is_empty() {
            node.shunt(&format!("{verb} {} {}", pair.from, pair.to)).expect("done");
            node.wait_for(pair.from, |line| line.starts_with(state));
        }
        node.up.signal(Signal::KILL);
        let _ = node.up.gone();
        node.network.firewall.run(move || node.before.expect_back("after the end"));
        Pair::transfer(&mut pair.client, &mut pair.server, 300_000);
        pair.close();
    }
}

/// A flow's (state, action, and bytes fast, slow, dropped) as `ls` has them.
fn listed(node: &Node, client: SocketAddr) -> Option<(String, String, [u64; 3])> {
    let text = node.shunt("ls --json").expect("a list");
    let mut flows = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let flow = flows.find(|flow| flow["client"] == client.to_string())?;
    let sum = |path: &str| {
        ["bytes_up", "bytes_down"].map(|way| flow[path][way].as_u64().expect("bytes")).iter().sum()
    };
    let word = |field: &str| flow[field].as_str().expect("a word").to_owned();
    Some((word("state"), word("action"), ["fast", "slow", "dropped"].map(sum)))
}

/// Waits until `why` begins with this place, and `ls` has the same state, action and bytes as `why`.
fn agreed(node: &Node, pair: &Pair, place: &str) -> [u64; 3] {
    let mut bytes = [0; 3];
    eventually(&format!("both say: {place}"), || {
        let before = listed(node, pair.from);
        let why = node.shunt(&format!("why {} {}", pair.from, pair.to)).expect("why");
        // Of a flow that moved between the questions nothing can be compared.
        let Some((state, action, moved)) =
            before.filter(|before| listed(node, pair.from).as_ref() == Some(before))
        else {
            return false;
        };
        let line = |what: &str| {
            let line = why.lines().find_map(|line| line.trim_start().strip_prefix(what)).unwrap_or_default();
            line.trim().to_owned()
        };
        assert_eq!((line("state "), line("action ")), (state, action), "{why}");
        let [fast, slow, dropped] = moved;
        assert_eq!(line("bytes "), format!("{fast} fast, {slow} slow, {dropped} dropped"), "{why}");
        bytes = moved;
        why.contains(&format!(": {place}.\n"))
    });
    bytes
}

#[test]
fn ls_and_why_agree_whatever_is_done_with_a_flow_and_what_is_dropped_has_not_moved() {
    if !is_root() {
        return;
    }
    let mut node = start(Forwarding::Bridged);
    let mut pair = connect(&node.network, "10.0.0.2", SHUNT);
    let flow = format!("{} {}", pair.from, pair.to);
    node.shunted(&mut pair);
    agreed(&node, &pair, "on the fast path");
    for (verb, place) in [
        ("release", "on the slow path"),
        ("add", "on the fast path"),
        ("release", "on the slow path"),
        ("add", "on the fast path"),
    ] {
        node.shunt(&format!("{verb} {flow}")).expect("done");
        pair.talk();
        agreed(&node, &pair, place);
    }
    // Without a pin the packet filter decides, as it did at first.
    node.shunt(&format!("rm {flow}")).expect("withdrawn");
    node.shunted(&mut pair);
    let [fast, slow, _] = agreed(&node, &pair, "on the fast path");
    node.shunt(&format!("drop {flow}")).expect("dropped");
    agreed(&node, &pair, "dropped on the fast path");
    pair.client.write_all(&[7; 50_000]).expect("buffered");
    eventually("the kernel's packets are dropped", || {
        listed(&node, pair.from).is_some_and(|(_, _, [.., dropped])| dropped > 0)
    });
    let [fast_after, slow_after, dropped] = agreed(&node, &pair, "dropped on the fast path");
    assert!(dropped > 0);
    assert_eq!((fast_after, slow_after), (fast, slow), "nothing has moved");
    drop(pair);
    forget(&node.network.firewall);
    let record = node.up.record();
    assert_eq!(record.number("bytes_up") + record.number("bytes_down"), fast + slow, "{record:?}");
    assert!(node.up.stop().0.success());
}

#[test]
fn a_stop_records_what_there_was_and_a_reload_leaves_the_shunt_alone() {
    if !is_root() {
        return;
    }
    let node = start(Forwarding::Bridged);
    let mut pair = connect(&node.network, "10.0.0.2", SHUNT);
    node.shunted(&mut pair);
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    node.up.rewrite("", &configuration(Forwarding::Bridged).replace("600000", "700000"));
    let (status, body) = crate::node::admin::ask(&node.up, "POST", "/v1/reload");
    assert!(status == 409 && body.contains("[shunt] is not changed by a reload"), "{body}");
    let (status, records) = node.up.stop();
    assert!(status.success());
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].text("reason"), "shutdown");
    assert!(records[0].number("bytes_up") > 1_000_000, "{records:?}");
    assert!(
        records[0].0["duration_seconds"].as_f64() > Some(0.01),
        "since the connection began: {records:?}"
    );
    pair.talk();
}

#[test]
fn all_processes_beside_the_node_are_confined() {
    if !is_root() {
        return;
    }
    let node = start(Forwarding::Routed);
    let children = sidetrack_sys::process::children(node.up.pid());
    assert!(children.len() >= 3, "the keeper, the shunt, the guard of the admin socket: {children:?}");
    let ids = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let line = |field: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a line");
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        (line("Name:"), line("Uid:"), line("CapEff:"), line("CapBnd:"), line("NoNewPrivs:"))
    };
    // CAP_NET_ADMIN (12), and CAP_BPF (39).
    for (name, keeps) in [("sidetrack-keep", 1_u64 << 12), ("sidetrack-shunt", 1 << 12 | 1 << 39)] {
        let found = children.iter().map(|pid| ids(*pid)).find(|ids| ids.0 == name).expect(name);
        let keeps = format!("{keeps:016x}");
        assert_ne!(found.1, "0 0 0 0", "{name}");
        assert_eq!((found.2, found.3, found.4), (keeps.clone(), keeps, "1".to_owned()), "{name}");
    }
    let guards = children.iter().flat_map(|pid| sidetrack_sys::process::children(*pid));
    for pid in guards.chain(children.clone()) {
        // A process is heard of before it has its name and has confined itself. What the starter starts must not inherit a
        // filter; it reads no byte of a peer.
        let is_right = || is_confined(pid) || ids(pid).0 == "sidetrack-start";
        eventually(&format!("process {pid} is confined"), is_right);
    }
    assert!(node.up.stop().0.success());
}
