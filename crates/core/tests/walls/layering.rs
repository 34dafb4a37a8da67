//! Which stage of `crates/sidetrack` may know which, and that only `sys` acts on the system.
//!
//! Stages use each other only as the picture in ARCHITECTURE.md draws them; `app` alone knows all. A new stage
//! needs a row here: that is the moment to ask whether it really has to know its neighbours.

use crate::source::{Source, files, root, sources, text, words};
use std::collections::{BTreeMap, BTreeSet};

/// A stage of `crates/sidetrack/src` (a file or folder there) and the stages it may use.
///
/// `app` and `lib` are not rows: the first knows all, the second declares modules. `control`, `rights`, `tls` and `wire` are
/// not rows either: crates of their own hold them, which know nothing of this one.
const MAY_USE: [(&str, &[&str]); 33] = [
    // Values every stage may read: they use nothing of ours in this crate.
    ("live", &["reactor"]),
    // Formats lines of the log; what writes them knows only `tracing`.
    ("log", &[]),
    // Runs a module in WebAssembly; knows only the contract of functions.
    ("wasm", &[]),
    // Compiles modules when it checks a file.
    ("config", &["tls", "wasm"]),
    // The data-flow agreement in force, and what it says of a flow.
    ("agreement", &["config"]),
    ("dns", &[]),
    ("process", &[]),
    // The event loop knows no flow.
    ("reactor", &[]),
    // Decides about packets that others carry; knows only the kernel.
    ("shunt", &["config", "keeper", "process", "rights", "started", "wire"]),
    // Flows without sockets: packets in, packets out; asks policy itself.
    ("engine", &["config", "live"]),
    // The data path: catching, deciding, carrying, moving. Each of the next six uses those above it, and none below: a test
    // holds that. `carry` has both ends of a flow, the connection to a server and the client that is still being served.
    ("carry", &["config", "live", "reactor", "tls"]),
    // What a flow passes between its two sides; the session leads the bytes through. Containers are proxies that are dialled
    // as hops are, and kept by a process of their own.
    ("function", &["carry", "live", "reactor", "rights", "wasm", "wire"]),
    // Reads the client's protocol up to the destination; `run` answers the command's DNS questions.
    ("intercept", &["carry", "config", "dns", "live", "reactor", "tls"]),
    // Accepts for listeners, and hands each client to what `app` has given it: it knows no session and no request.
    ("worker", &["agreement", "carry", "config", "function", "intercept", "live", "process", "reactor"]),
    // A flow's task on its worker: asks the interceptor for the destination, then policy, carrier and functions; a DNS question
    // of a command is a flow that ends here.
    ("session", &["carry", "config", "dns", "function", "intercept", "live", "process", "reactor", "worker"]),
    // Requests of one client, each a flow; a CONNECT, an upgrade and what is not HTTP go on as a session.
    ("http", &["carry", "config", "intercept", "live", "reactor", "session", "tls", "worker"]),
    // Flows of UDP: the task of a listening socket, beside the session that each connection has; a session whose client asks
    // for UDP ASSOCIATE goes on here.
    ("datagram", &["carry", "config", "function", "intercept", "live", "reactor", "session", "worker"]),
    // Threads of their own: links, relayed flows and both ends of sessions. Workers reach them through a trait of `carry`.
    // Packets that it catches know the mark of our own connections. During an upgrade flows of another process come as messages.
    ("overlay", &["carry", "config", "live", "steer", "tls", "wire"]),
    // Control: never touches a flow's bytes.
    ("keeper", &["process", "rights", "started", "steer", "wire"]),
    ("started", &[]),
    ("steer", &["config"]),
    ("reload", &["config"]),
    // Watching: fed by `live`, never by the data path.
    ("record", &["live"]),
    ("metrics", &["live", "record"]),
    // Packets that the kernel copies for a viewer, and whose flows they are.
    ("capture", &["live", "record"]),
    ("admin", &["agreement", "capture", "config", "live", "metrics", "overlay", "record", "reload", "shunt"]),
    // Threads that send what `record` offers to collectors; they dial through the gate.
    ("export", &["carry", "config", "live", "metrics", "record"]),
    // Commands that move no bytes.
    ("explain", &["config"]),
    ("plan", &["config", "steer"]),
    ("doctor", &["config"]),
    ("cleanup", &["config"]),
    // Arguments in, text out.
    (
        "cli",
        &[
            "admin",
            "agreement",
            "app",
            "capture",
            "cleanup",
            "config",
            "control",
            "doctor",
            "explain",
            "function",
            "intercept",
            "live",
            "metrics",
            "overlay",
            "plan",
            "record",
            "reload",
            "rights",
            "shunt",
            "tls",
        ],
    ),
    ("main", &["cli", "log"]),
];

/// What only `crates/sys` may do: words of code and the reason.
const SYS_ONLY: [(&str, &str); 9] = [
    ("AF_NETLINK", "netlink belongs to crates/sys"),
    ("NETLINK_NETFILTER", "netlink belongs to crates/sys"),
    ("NETLINK_ROUTE", "netlink belongs to crates/sys"),
    ("SOCK_RAW", "raw sockets belong to crates/sys"),
    ("AF_PACKET", "packet sockets belong to crates/sys"),
    ("SYS_bpf", "BPF belongs to crates/sys"),
    ("fork", "processes are started by crates/sys"),
    ("execve", "processes are started by crates/sys"),
    ("unshare", "namespaces are made by crates/sys"),
];

/// The stage a file of `crates/sidetrack/src` belongs to.
fn stage(path: &str) -> &str {
    let inside = path.strip_prefix("crates/sidetrack/src/").unwrap_or(path);
    let first = inside.split('/').next().unwrap_or(inside);
    first.strip_suffix(".rs").unwrap_or(first)
}

/// The stages that code names by `crate::` paths, with the offset of each.
fn named_stages(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, word) in words(code).filter(|(_, word)| *word == "crate") {
        let Some(rest) = code[at + word.len()..].strip_prefix("::") else { continue };
        if let Some(list) = rest.strip_prefix('{') {
            found.extend(top_level_names(list).into_iter().map(|name| (at, name)));
        } else if let Some((0, name)) = words(rest).next() {
            found.push((at, name.to_owned()));
        }
    }
    found
}

/// The first names of the branches of a use tree, which begins after its brace: `a::{b, c}, d` gives `a` and `d`.
fn top_level_names(list: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut depth = 0_i32;
    let mut expect = true;
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => expect = true,
            c if expect && (c.is_alphanumeric() || c == '_') => {
                names.extend(words(&list[at..]).next().map(|(_, word)| word.to_owned()));
                expect = false;
            }
            _ => {}
        }
    }
    names
}

fn breaches(source: &Source, table: &BTreeMap<&str, &[&str]>) -> Vec<String> {
    let own = stage(&source.path);
    let Some(allowed) = table.get(own) else {
        return vec![format!("{}: stage `{own}` has no row in MAY_USE", source.path)];
    };
    named_stages(&source.code)
        .into_iter()
        .filter(|(_, name)| name != own && !allowed.contains(&name.as_str()))
        .map(|(at, name)| format!("{}: `{own}` may not use `{name}`", source.place(at)))
        .collect()
}

#[test]
fn stages_know_only_their_neighbours() {
    let table: BTreeMap<_, _> = MAY_USE.into_iter().collect();
    let found: Vec<_> = sources("crates/sidetrack/src")
        .iter()
        .filter(|source| !["app", "lib"].contains(&stage(&source.path)))
        .flat_map(|source| breaches(source, &table))
        .collect();
    assert!(
        found.is_empty(),
        "stages that know each other (crates/core/tests/walls/layering.rs):\n{}",
        found.join("\n")
    );
}

/// The stages that reach a circle of stages: what is left when all that use none of the rest are taken away, again and again.
fn in_circles(table: &[(&'static str, &[&'static str])]) -> Vec<&'static str> {
    let mut left: BTreeMap<_, _> = table.iter().copied().collect();
    loop {
        let free: Vec<_> = left
            .iter()
            .filter(|(_, uses)| uses.iter().all(|name| !left.contains_key(name)))
            .map(|(stage, _)| *stage)
            .collect();
        if free.is_empty() {
            return left.into_keys().collect();
        }
        left.retain(|stage, _| !free.contains(stage));
    }
}

#[test]
fn stages_form_no_circle() {
    let circles = in_circles(&MAY_USE);
    assert!(circles.is_empty(), "these stages use each other, or stages that do: {circles:?}");
    assert_eq!(in_circles(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"]), ("d", &[])]), ["a", "b", "c"]);
}

#[test]
fn a_breach_would_be_seen() {
    let table: BTreeMap<&str, &[&str]> = BTreeMap::from([("carry", &["live"][..])]);
    for (code, expected) in [
        ("use crate::live::LiveFlow;", 0),
        ("use crate::{live::{A, B}, carry::C};", 0),
        ("use crate::{live::{A, admin}, record};", 1),
        ("fn f() { crate::admin::serve() }", 1),
    ] {
        let path = "crates/sidetrack/src/carry/socks.rs".to_owned();
        let source = Source { path, text: code.into(), code: code.into() };
        assert_eq!(breaches(&source, &table).len(), expected, "{code}");
    }
    let stranger =
        Source { path: "crates/sidetrack/src/new.rs".into(), text: String::new(), code: String::new() };
    assert_eq!(breaches(&stranger, &table).len(), 1, "a stage without a row");
}

#[test]
fn only_sys_acts_on_the_system() {
    let mut found = Vec::new();
    for source in PROGRAM.into_iter().chain(["crates/core/src"]).flat_map(sources) {
        for (at, word) in words(&source.code) {
            if let Some((_, why)) = SYS_ONLY.iter().find(|(forbidden, _)| *forbidden == word) {
                found.push(format!("{}: `{word}`: {why}", source.place(at)));
            }
        }
        let squeezed: String = source.code.split_whitespace().collect();
        if squeezed.contains("process::Command") || squeezed.contains("Command::new(") {
            found.push(format!("{}: starts a process: put it into crates/sys/src/exec.rs", source.path));
        }
    }
    assert!(found.is_empty(), "only crates/sys touches Linux:\n{}", found.join("\n"));
}

/// The names of the workspace's own crates that a manifest lists under `[section]`.
fn own_dependencies(manifest: &str, section: &str) -> BTreeSet<String> {
    let mut inside = false;
    let mut found = BTreeSet::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.trim() == format!("[{section}]");
        } else if inside && line.starts_with("sidetrack") {
            found.extend(line.split([' ', '=', '.']).next().map(str::to_owned));
        }
    }
    found
}

#[test]
fn crates_depend_one_way() {
    let expected: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("core", &[][..]),
        ("sys", &["sidetrack-core"][..]),
        ("common", &["sidetrack-core", "sidetrack-sys"][..]),
        ("control", &["sidetrack-common", "sidetrack-core", "sidetrack-sys"][..]),
        ("sidetrack", &["sidetrack-common", "sidetrack-control", "sidetrack-core", "sidetrack-sys"][..]),
        ("lab", &["sidetrack", "sidetrack-common", "sidetrack-core", "sidetrack-sys"][..]),
        // Only the tests of the others depend on it.
        ("testkit", &["sidetrack-sys"][..]),
    ]);
    let manifests = files("crates", "Cargo.toml");
    assert_eq!(
        manifests.len(),
        expected.len(),
        "a new crate needs a row here and a reason in ARCHITECTURE.md"
    );
    for (name, allowed) in expected {
        let manifest = text(&root().join(format!("crates/{name}/Cargo.toml")));
        let allowed: BTreeSet<_> = allowed.iter().map(|name| (*name).to_owned()).collect();
        let actual = own_dependencies(&manifest, "dependencies");
        assert!(actual.is_subset(&allowed), "crates/{name} depends on {actual:?}, allowed is {allowed:?}");
    }
}

/// Files of the program that connect to something, and why the gate (`carry/gate.rs`) is not asked.
const CONNECTS: [(&str, &str); 10] = [
    ("control/src/domain/authoriser.rs", "the reasoner of a domain's agent, which its own file names"),
    ("control/src/link.rs", "an orchestrator, in a process of its own, which its own file names"),
    ("control/src/store/etcd/client.rs", "the members of etcd, which the orchestrator's own file names"),
    ("sidetrack/src/carry/gate.rs", "it is the gate"),
    (
        "sidetrack/src/carry/h3/dial.rs",
        "datagrams to a hop of HTTP/3, which the configuration names, and to servers whose addresses the gate has admitted",
    ),
    (
        "sidetrack/src/carry/tunnel/quic.rs",
        "datagrams to the far side of a tunnel, which the configuration names",
    ),
    (
        "sidetrack/src/cli/invite/guest.rs",
        "a command joins at the addresses of the invitation that its user gave it",
    ),
    ("sidetrack/src/dns/forward.rs", "the name servers of the host's resolv.conf, or those of `[dns]`"),
    ("sidetrack/src/doctor/collectors.rs", "a command tries the collectors that its own file names"),
    ("sidetrack/src/overlay/mod.rs", "two sockets of our own that are joined over loopback"),
];

/// The crates that the program is made of, apart from `sys`, which connects as it is told.
const PROGRAM: [&str; 3] = ["crates/common/src", "crates/control/src", "crates/sidetrack/src"];

/// What starts a connection over a network.
const STARTS: [&str; 5] = [
    "start_connect(",
    "TcpStream::connect(",
    "TcpSocket::new_",
    "connect_with(",
    "TcpStream::connect_timeout(",
];

/// The code without its tests.
fn without_tests(source: &Source) -> &str {
    if source.path.ends_with("/tests.rs") {
        return "";
    }
    source.code.split("#[cfg(test)]").next().unwrap_or_default()
}

#[test]
fn only_the_gate_connects() {
    let connecting: BTreeSet<String> = PROGRAM
        .into_iter()
        .flat_map(sources)
        .filter(|source| {
            let code: String = without_tests(source).split_whitespace().collect();
            STARTS.iter().any(|start| code.contains(start))
        })
        .filter_map(|source| source.path.strip_prefix("crates/").map(str::to_owned))
        .collect();
    let known: BTreeSet<String> = CONNECTS.iter().map(|(file, _)| (*file).to_owned()).collect();
    assert_eq!(
        connecting, known,
        "an address is dialled past the gate: use carry::gate, or add the file to CONNECTS with the reason why no client can \
         choose the address"
    );
}
