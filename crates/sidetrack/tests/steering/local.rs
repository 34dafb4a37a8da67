//! Connections of this host's own programs.

use crate::node::peers::{Client, Server, visit};
use crate::node::{Up, at};
use sidetrack_testkit::{Line, is_root};
use socket2::{Domain, Socket, Type};
use std::net::SocketAddr;
use std::process::Command;

/// Flows of a rule that stays in user space, so that whom the server sees tells who was caught.
const IN_USER_SPACE: &str = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n";

/// A line of three hosts with a server for each IP version at its end, and another port beside it.
struct Scene {
    line: Line,
    servers: [Server; 2],
    others: [Server; 2],
}

impl Scene {
    fn new() -> Self {
        let line = Line::new();
        let start = || ["10.0.2.1", "fd00:2::1"].map(Server::start);
        let (servers, others) = line.server.run(move || (start(), start()));
        Self { line, servers, others }
    }

    /// Starts on the client's host.
    fn up(&self, listen: &str, rules: &str) -> Up {
        let tables = format!("[[listen]]\nname = \"out\"\nkind = \"redirect\"\n{listen}{rules}");
        self.line.client.run(move || Up::start("default = \"deny\"\n", &tables))
    }

    /// Visits from the client's host: whether the server saw another address than the client's.
    fn caught(&self, to: SocketAddr) -> bool {
        let (client, seen, _) = self.line.client.run(move || visit(to, b"word"));
        client != seen
    }
}

fn ports(servers: &[Server; 2]) -> String {
    let [v4, v6] = servers.each_ref().map(|server| server.address.port());
    format!("ports = [{v4}, {v6}]\n")
}

#[test]
fn destinations_ports_and_exceptions_say_what_is_caught() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let listen = format!(
        "dst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\nexcept = [\"10.0.2.2\"]\n{}",
        ports(&scene.servers)
    );
    let mut up = scene.up(&listen, IN_USER_SPACE);
    for server in &scene.servers {
        let to = server.address;
        let (client, seen, down) = scene.line.client.run(move || visit(to, b"some words"));
        assert_ne!(client, seen, "the server sees the connection that we opened");
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"));
        assert_eq!((record.address("client"), record.address("orig_dst")), (client, to));
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (10, down));
        assert_eq!((record.text("listener"), record.text("intercept")), ("out", "redirect"));
    }
    for other in &scene.others {
        assert!(!scene.caught(other.address), "another port");
    }
    scene.line.server.ip("addr add 10.0.2.2/24 dev eth0");
    let port = scene.servers[0].address.port();
    let spared = scene.line.server.run(|| Server::start("10.0.2.2"));
    assert!(!scene.caught(spared.address), "excepted and another port");
    let listen = listen.replace(&format!("[{port}, "), &format!("[{port}, {}, ", spared.address.port()));
    up.reload(
        "default = \"deny\"\n",
        &format!("[[listen]]\nname = \"out\"\nkind = \"redirect\"\n{listen}{IN_USER_SPACE}"),
    );
    assert!(!scene.caught(spared.address), "excepted");
    let (status, rest) = up.stop();
    assert!(status.success());
    assert_eq!(rest.len(), 0, "a flow that is not caught has no record: {rest:?}");
}

#[test]
fn only_the_users_named_are_caught() {
    if !is_root() {
        return;
    }
    const NOBODY: u32 = 65_534;
    let scene = Scene::new();
    let up = scene.up(&format!("users = [{NOBODY}]\n"), IN_USER_SPACE);
    for server in &scene.servers {
        let to = server.address;
        assert!(!scene.caught(to), "root is not meant");
        let as_nobody = scene.line.client.run(move || {
            // A thread has its own user id: what it gives up is lost to it only.
            let thread = std::thread::spawn(move || {
                let nobody = rustix::process::Uid::from_raw(NOBODY);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root");
                let (client, seen, _) = visit(to, b"word");
                client != seen
            });
            thread.join().expect("visited")
        });
        assert!(as_nobody);
    }
    assert!(up.stop().0.success());
}

/// Runs nc towards the server and gives what it printed.
fn nc(to: SocketAddr) -> Command {
    let mut nc = Command::new("nc");
    nc.args(["-N", "-w", "60"]).arg(to.ip().to_string()).arg(to.port().to_string());
    nc.stdin(std::process::Stdio::null());
    nc
}

#[test]
fn only_programs_in_the_cgroup_are_caught() {
    if !is_root() {
        return;
    }
    let Ok(tree) = sidetrack_sys::cgroup::Hierarchy::find() else {
        eprintln!("skipped: needs a cgroup2 hierarchy");
        return;
    };
    let leaf =
        tree.create_leaf(&format!("sidetrack-test-steering-{}", std::process::id())).expect("a cgroup");
    let path = leaf.directory().strip_prefix(&tree.mount).expect("below").display().to_string();
    let scene = Scene::new();
    let up = scene.up(&format!("cgroup = \"{path}\"\n"), IN_USER_SPACE);
    for server in &scene.servers {
        let to = server.address;
        assert!(!scene.caught(to), "this process is not in it");
        let procs = leaf.directory().join("cgroup.procs");
        let seen = scene.line.client.run(move || {
            let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
            let nc = nc(to);
            let mut shell = Command::new("sh");
            shell.args(["-c", &script, "sh"]).arg(nc.get_program()).args(nc.get_args());
            let output = shell.stdin(std::process::Stdio::null()).output().expect("sh");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).expect("text")
        });
        // nc does not tell its own port: ours, dialled again, is in our record, the client's is another.
        assert!(seen.trim().parse::<SocketAddr>().is_ok(), "{seen}");
    }
    let (_, records) = up.stop();
    assert_eq!(records.len(), 2, "nc's flows, by IPv4 and IPv6: {records:?}");
    std::fs::remove_dir(leaf.directory()).expect("empty");
}

#[test]
fn rules_on_the_process_and_its_user_ask_the_keeper() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let rules = "[[rule]]\nname = \"by-nc\"\nmatch = { process = \"nc.openbsd\", user = 0 }\ncarrier = \"direct\"\n\
                 [[rule]]\nname = \"no-process\"\nmatch = { process = \"nobody-is-called-so\" }\naction = \"deny\"\n\
                 [[rule]]\nname = \"others\"\ncarrier = \"direct\"\n";
    let mut up = scene.up(&ports(&scene.servers), rules);
    for server in &scene.servers {
        let to = server.address;
        let output = scene.line.client.run(move || nc(to).output().expect("nc"));
        assert!(output.status.success(), "{output:?}");
        let record = up.record();
        assert_eq!(record.fate(), ("by-nc", "direct", "ok"), "{record:?}");
        assert_eq!((record.text("process"), record.text("user")), ("nc.openbsd", "uid:0"));
        assert!(scene.caught(to));
        assert_eq!(up.record().text("rule"), "others");
    }
    assert!(up.stop().0.success());
}

/// A connection from this port, which other connections may have used.
fn from_port(port: u16, to: SocketAddr) -> std::io::Result<Client> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    let any = if to.is_ipv4() { "0.0.0.0" } else { "::" };
    socket.bind(&at(any, port).into())?;
    socket.connect(&to.into())?;
    Client::over(socket.into())
}

/// Both connections lead to our listener. Conntrack knows the first one still, so it gives the second one another port.
#[test]
fn a_port_that_is_used_again_hides_no_user() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let [v4, v6] = scene.others.each_ref().map(|server| server.address.port());
    let rules = format!(
        "[[rule]]\nname = \"not-root\"\nmatch = {{ user = 0, port = [{v4}, {v6}] }}\naction = \"deny\"\n{IN_USER_SPACE}"
    );
    let mut up = scene.up("dst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n", &rules);
    for (server, other) in scene.servers.iter().zip(&scene.others) {
        let (to, other) = (server.address, other.address);
        scene.line.client.run(move || {
            from_port(23_456, to).expect("connected").echo(b"word").expect("an echo");
            assert!(from_port(23_456, other).is_err(), "{other} is denied");
        });
        // The denied one may have ended first.
        let records = [up.record(), up.record()];
        let denied = records.iter().find(|record| record.text("rule") == "not-root").expect("denied");
        assert_eq!(denied.text("user"), "uid:0");
        assert_ne!(denied.address("client").port(), 23_456, "the kernel has changed it");
    }
    assert!(up.stop().0.success());
}

/// A client need not wait for anything: its socket may be gone before we look for it.
#[test]
fn a_client_that_has_gone_evades_no_rule_against_its_user() {
    const TIMES: usize = 25;
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let rules = "[[rule]]\nname = \"not-root\"\nmatch = { user = 0 }\naction = \"deny\"\n";
    let mut up = scene.up("dst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n", &format!("{rules}{IN_USER_SPACE}"));
    for server in &scene.servers {
        let to = server.address;
        scene.line.client.run(move || {
            for at in 0..TIMES {
                let Ok(mut stream) = std::net::TcpStream::connect(to) else { continue };
                // A reset leaves no trace of the socket at all.
                let linger = (at % 2 == 0).then_some(std::time::Duration::ZERO);
                socket2::SockRef::from(&stream).set_linger(linger).expect("set");
                let _ = std::io::Write::write_all(&mut stream, b"secret");
            }
        });
        for _ in 0..TIMES {
            let record = up.record();
            assert_eq!(
                (record.text("rule"), record.text("reason")),
                ("not-root", "policy_denied"),
                "{record:?}"
            );
        }
    }
    assert!(up.stop().0.success());
}

#[test]
fn our_own_listener_is_a_loop_and_our_own_connections_are_not_caught() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    // Everything is caught, so that a connection of ours that were caught would come back for ever.
    let up = scene.up("dst = [\"0.0.0.0/0\", \"::/0\"]\n", IN_USER_SPACE);
    for server in &scene.servers {
        assert!(scene.caught(server.address));
    }
    let listeners = up.addresses("out");
    assert_eq!(listeners.len(), 2, "IPv4 and IPv6");
    for listener in listeners {
        let to = at(if listener.is_ipv4() { "127.0.0.1" } else { "::1" }, listener.port());
        let refused = scene.line.client.run(move || Client::connect(to).map(drop));
        assert!(refused.is_err(), "{to}");
    }
    let (status, records) = up.stop();
    assert!(status.success());
    let reasons: Vec<_> = records.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["ok", "ok", "loop", "loop"], "{records:?}");
}

#[test]
fn connections_within_the_host_are_caught_only_where_named() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let here = scene.line.client.run(|| ["127.0.0.1", "::1"].map(Server::start));
    let up = scene.up(&ports(&here), IN_USER_SPACE);
    for server in &here {
        assert!(!scene.caught(server.address), "a port alone does not name this host");
    }
    assert!(up.stop().0.success());
    let mut up = scene.up(&format!("dst = [\"127.0.0.0/8\", \"::1\"]\n{}", ports(&here)), IN_USER_SPACE);
    for server in &here {
        assert!(scene.caught(server.address));
        assert_eq!(up.record().address("orig_dst"), server.address);
    }
    assert!(up.stop().0.success());
}

#[test]
fn a_port_that_stands_for_itself_is_a_loop() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let tables = format!(
        "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"0.0.0.0:80\"\nto = \"10.0.1.1:80\"\n{IN_USER_SPACE}"
    );
    let mut up = scene.line.client.run(move || Up::start("default = \"deny\"\n", &tables));
    let refused = scene.line.client.run(|| Client::connect(at("127.0.0.1", 80)).map(drop));
    assert!(refused.is_err());
    assert_eq!(up.record().text("reason"), "loop");
    let (status, records) = up.stop();
    assert!(status.success() && records.is_empty(), "once: {records:?}");
}
