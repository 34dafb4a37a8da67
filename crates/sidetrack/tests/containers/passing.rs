//! Flows through containers: every protocol, chains of all kinds, what passes along them.

use crate::function;
use crate::node::{Dice, Up};
use crate::scene::{Echo, ask, connect, exchange, own, tables, up};
use sidetrack_testkit::{LIMIT, in_namespace};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;

/// Flows of many sizes, some at a time, are byte-exact with their ends; each has a record that names the chain.
fn transfers(up: &mut Up, chain: &[&str]) {
    transfers_of(&[0, 1, 5, 70_000, 3_000_000], up, chain);
}

/// The same with flows of these sizes, in rising order.
fn transfers_of(lengths: &[usize], up: &mut Up, chain: &[&str]) {
    let mut dice = Dice(7);
    let flows: Vec<_> = lengths.iter().map(|length| dice.bytes(*length)).collect();
    let streams: Vec<_> = flows.iter().map(|_| connect(up)).collect();
    std::thread::scope(|scope| {
        let all: Vec<_> = streams
            .into_iter()
            .zip(&flows)
            .map(|(stream, bytes)| scope.spawn(move || exchange(stream, bytes).expect("a flow")))
            .collect();
        for (came, bytes) in all.into_iter().zip(&flows) {
            let came = came.join().expect("no panic");
            assert!(came == [bytes, &b"bye\n"[..]].concat(), "{} bytes became {}", bytes.len(), came.len());
        }
    });
    let mut sizes = Vec::new();
    for record in up.records(flows.len()).values() {
        assert_eq!(record.text("reason"), "ok", "{record:?}");
        let names: Vec<_> =
            record.0["chain"].as_array().expect("a list").iter().filter_map(|name| name.as_str()).collect();
        assert_eq!(names, chain);
        assert_eq!(record.number("bytes_down"), record.number("bytes_up") + 4, "{record:?}");
        sizes.push(usize::try_from(record.number("bytes_up")).expect("small"));
    }
    sizes.sort_unstable();
    assert_eq!(sizes, lengths);
}

fn led(chain: &str, keys: &str) -> String {
    format!("chain = {chain}\non_function_down = 'deny'\n{keys}")
}

#[test]
fn flows_are_byte_exact_through_a_function_of_each_protocol() {
    in_namespace(|| {
        let server = Echo::start();
        for keys in [
            "speaks = 'socks5'",
            "speaks = 'socks6'",
            "speaks = 'socks6+socksx'",
            "speaks = 'socks6'\nway_back = 'link'",
        ] {
            let mut up = up(server.address, &led("['f']", ""), &own("f", &format!("{keys}\npids = 512")));
            transfers(&mut up, &["f"]);
            assert!(up.stop().0.success());
        }
    });
}

#[test]
fn haproxy_is_a_function_by_its_proxy_protocol() {
    in_namespace(|| {
        let server = Echo::start();
        let haproxy = "[function.f]\nkind = 'container'\nimage = 'localhost/haproxy:1'\nspeaks = 'proxy-v2'\n\
                       command = ['/program', '-f', '/haproxy.cfg']\n";
        let mut up = up(server.address, &led("['f']", ""), haproxy);
        // It drops a client that sends nothing and has ended before the server is there: no empty flow.
        transfers_of(&[1, 5, 70_000, 3_000_000], &mut up, &["f"]);
        assert!(up.stop().0.success());
    });
}

/// A proxy that closes both directions when one ends: what it cuts is told, and never looks like an end in order.
#[test]
fn microsocks_is_a_function_and_what_it_cuts_is_told() {
    in_namespace(|| {
        let server = Echo::start();
        let microsocks = "[function.f]\nkind = 'container'\nimage = 'localhost/microsocks:1'\nspeaks = 'socks5'\n\
                          command = ['/program', '-i', '127.0.0.1', '-p', '1080']\n";
        let mut up = up(server.address, &led("['f']", ""), microsocks);
        let mut stream = connect(&up);
        for line in ["one\n", "two\n"] {
            assert_eq!(ask(&mut stream, line).expect("an answer"), line);
        }
        assert!(exchange(stream, b"").is_err(), "the server's last line is lost, and the client hears of it");
        let record = up.record();
        assert_eq!(record.text("reason"), "function_failed", "{record:?}");
        // By the end of one side, or by the reset that the server's last line is answered with.
        let words = ["function 'f': ended the flow", "function 'f': cut the flow"];
        assert!(words.iter().any(|words| record.text("detail").contains(words)), "{record:?}");
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_chain_mixes_kinds_and_one_container_serves_several_chains() {
    in_namespace(|| {
        let server = Echo::start();
        let key = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(key.path(), "ab".repeat(32)).expect("a file");
        let functions = format!(
            "{}{}[function.count]\nkind = 'count'\n[function.seal]\nkind = 'encrypt'\nkey_file = '{key}'\n\
             [function.open]\nkind = 'decrypt'\nkey_file = '{key}'\n[function.swap]\nkind = 'replace'\n\
             replace = [{{ find = 'SECRET', with = 'nothing' }}]\n",
            own("f", "pids = 512"),
            own("g", "pids = 512\nspeaks = 'socks5'"),
            key = key.path().display()
        );
        let chain = ["count", "f", "seal", "g", "f", "open", "swap"];
        let second =
            "[[listen]]\nname = 'other'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '@server'\n"
                .replace("@server", &server.address.to_string());
        let rule = format!("match = {{ listener = 'in' }}\n{}", led(&format!("{chain:?}"), ""));
        let other = "[[rule]]\nname = 'other'\ncarrier = 'direct'\nchain = ['f', 'swap']\non_function_down = 'deny'\n";
        let mut up = up(server.address, &rule, &format!("{other}{second}{functions}"));
        transfers(&mut up, &chain);
        let mut stream = TcpStream::connect(up.addresses("other")[0]).expect("the listener");
        // In capitals by the container, replaced behind it.
        assert_eq!(ask(&mut stream, "!upper secret\n").expect("an answer"), "!UPPER nothing\n");
        assert_eq!(exchange(stream, b"").expect("an end in order"), b"bye\n");
        assert_eq!(up.record().fate(), ("other", "direct", "ok"));
        assert_eq!(crate::engine::engine().containers(&format!("sidetrack-f-{}", children(&up))).len(), 1);
        assert!(up.stop().0.success());
    });
}

/// The process id in the names of the node's containers.
pub(crate) fn children(up: &Up) -> u32 {
    children_of(up.pid())
}

/// As [`children`], for the node with this process id.
pub(crate) fn children_of(node: u32) -> u32 {
    let children = sidetrack_sys::process::children(node);
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    children.into_iter().find(|pid| name(pid).trim() == "sidetrack-cont").expect("the containers' process")
}

#[test]
fn a_server_that_speaks_first_is_heard_through_a_container() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let up = up(listener.local_addr().expect("bound"), &led("['f']", ""), &own("f", ""));
        let mut client = connect(&up);
        let (mut served, _) = listener.accept().expect("the node dials");
        served.write_all(b"220 ready\n").expect("an open stream");
        let mut line = [0; 10];
        client.read_exact(&mut line).expect("a greeting");
        assert_eq!(&line, b"220 ready\n");
        client.write_all(b"QUIT\n").expect("an open stream");
        served.read_exact(&mut line[..5]).expect("an answer");
        drop((client, served));
        assert!(up.stop().0.success());
    });
}

/// The metadata that came with a SOCKS6 request reaches the next proxy, with what the function has added.
#[test]
fn metadata_passes_along_a_chain_and_functions_add_to_it() {
    in_namespace(|| {
        let (sender, metadata) = mpsc::channel();
        let next = proxy(sender);
        let server: SocketAddr = "192.0.2.7:80".parse().expect("an address");
        let rule = format!("match = {{ listener = 'in' }}\n{}metadata = {{ 5 = 'rule' }}", led("['f']", ""));
        let tables = tables(server, &rule, &own("f", "speaks = 'socks6+socksx'"))
            .replace("carrier = 'direct'", &format!("carrier = 'socks6://{next}'"));
        let up = Up::start("default = 'deny'\n", &tables);
        let mut stream = connect(&up);
        stream.write_all(b"x").expect("an open stream");
        let (destination, metadata) = metadata.recv_timeout(LIMIT).expect("a request");
        assert_eq!(destination, "192.0.2.7:80", "the container was told the flow's own destination");
        assert!(metadata.contains(&(function::SEEN, "seen".to_owned())), "{metadata:?}");
        assert!(metadata.contains(&(5, "rule".to_owned())), "{metadata:?}");
        assert!(!metadata.iter().any(|(key, _)| *key == 998), "our own links stay here: {metadata:?}");
        drop(stream);
        assert!(up.stop().0.success());
    });
}

/// A SOCKS6 proxy that tells what it is asked.
fn proxy(asked: mpsc::Sender<(String, Vec<(u16, String)>)>) -> SocketAddr {
    use sidetrack_core::socks::server::{Input, Output, ServerConfig};
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a flow");
        let now = sidetrack_core::time::Instant::from_millis(0);
        let config = std::sync::Arc::new(ServerConfig::default());
        let mut machine = sidetrack_core::socks::Server::new(config, now);
        let mut bytes = [0; 4096];
        loop {
            while let Some(output) = machine.poll() {
                if let Output::Request(request) = output {
                    let all = request.metadata.iter().map(|entry| (entry.key, entry.value.clone()));
                    let _ = asked.send((request.destination.to_string(), all.collect()));
                    return;
                }
            }
            match stream.read(&mut bytes) {
                Ok(n) if n > 0 => machine.handle(now, Input::Bytes(&bytes[..n])),
                _ => return,
            }
        }
    });
    address
}

/// What a container may do is nothing: no right, no disk, no network but our sockets.
#[test]
fn a_container_has_no_right_no_disk_and_no_way_out() {
    in_namespace(|| {
        let server = Echo::start();
        let up = up(server.address, &led("['f']", ""), &own("f", ""));
        let mut stream = connect(&up);
        stream.write_all(b"!about\n").expect("an open stream");
        let mut facts = String::new();
        let mut bytes = [0; 512];
        while !facts.contains("no way out") || !facts.ends_with('\n') {
            let n = stream.read(&mut bytes).expect("facts");
            facts.push_str(&String::from_utf8_lossy(&bytes[..n]));
        }
        for fact in
            ["CapBnd:\t0000000000000000", "interfaces lo\n", "root is read-only true", "no way out true"]
        {
            assert!(facts.contains(fact), "{fact} is not in\n{facts}");
        }
        let engine = crate::engine::engine();
        let name = engine.containers(&format!("sidetrack-f-{}", children(&up))).remove(0);
        let limits = "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}} {{.HostConfig.NanoCpus}}";
        let limits = engine.podman(&["inspect", "--format", limits, &name]);
        assert_eq!(String::from_utf8_lossy(&limits.stdout).trim(), "134217728 64 1000000000");
        drop(stream);
        assert!(up.stop().0.success());
    });
}
