//! The history of a running node: `sidetrack flows --since`, sums, and what a killed node leaves.

mod node;

use node::{Up, admin};
use rustix::process::Signal;
use serde_json::Value;
use sidetrack_testkit::{eventually, in_namespace};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};

/// A server that answers each connection with as many bytes as it got, and ends it.
fn server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut bytes = Vec::new();
            if stream.read_to_end(&mut bytes).is_ok() {
                let _ = stream.write_all(&bytes);
            }
        }
    });
    address
}

fn configuration(server: SocketAddr, history: &Path, more: &str) -> String {
    format!(
        "default = \"deny\"\n[history]\npath = \"{}\"\n{more}\n[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \
         \"127.0.0.1:0\"\nto = \"{server}\"\n[[rule]]\nname = \"all\"\nmatch = {{ listener = \"port\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n",
        history.display()
    )
}

fn start(server: SocketAddr, history: &Path, more: &str) -> Up {
    // Keys before tables: the first line is one.
    let text = configuration(server, history, more);
    let (top, tables) = text.split_once('\n').expect("lines");
    Up::start(&format!("{top}\nuser = \"root\"\n"), tables)
}

/// One flow that moves `bytes` both ways.
fn visit(node: &Up, bytes: usize) {
    let mut stream = TcpStream::connect(node.addresses("port")[0]).expect("connects");
    stream.write_all(&vec![7; bytes]).expect("written");
    stream.shutdown(std::net::Shutdown::Write).expect("a FIN");
    let mut back = Vec::new();
    stream.read_to_end(&mut back).expect("an answer");
    assert_eq!(back.len(), bytes);
}

fn flows(node: &Up, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("flows").args(words).arg("--admin").arg(node.folder().join("admin.sock"));
    command.output().expect("the binary")
}

fn json(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn bytes_up(flows: &[Value]) -> Vec<u64> {
    let mut all: Vec<_> = flows.iter().map(|flow| flow["bytes_up"].as_u64().expect("a number")).collect();
    all.sort_unstable();
    all
}

#[test]
fn ended_flows_are_found_again_also_after_sigkill() {
    in_namespace(|| {
        let (server, place) = (server(), tempfile::tempdir().expect("a folder"));
        let history = place.path().join("history");
        let mut node = start(server, &history, "");
        for bytes in [10, 20, 3000] {
            visit(&node, bytes);
        }
        // The recorder has them within a moment.
        eventually("all flows are stored", || json(&flows(&node, &["--since", "1h", "--json"])).len() == 3);
        let found = json(&flows(&node, &["--since", "1h", "--json", "up >= 20 and rule == all"]));
        assert_eq!(bytes_up(&found), [20, 3000]);
        assert_eq!(json(&flows(&node, &["--until", "1h", "--json"])), [] as [Value; 0]);
        // A flow that runs is part of the answer.
        let open = TcpStream::connect(node.addresses("port")[0]).expect("connects");
        eventually("the flow that runs", || {
            json(&flows(&node, &["--since", "1h", "--json", "state == live"])).len() == 1
        });
        let sums = json(&flows(&node, &["--since", "1h", "--top", "rule,reason", "--by", "up", "--json"]));
        assert_eq!(sums[0]["bytes_up"], 3030, "{sums:?}");
        assert_eq!((&sums[0]["rule"], &sums[0]["reason"]), (&"all".into(), &"ok".into()));
        let table = flows(&node, &["--since", "1h", "--top", "rule"]);
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        assert!(table.starts_with("RULE") && table.contains("all"), "{table}");
        let (_, metrics) = admin::ask(&node, "GET", "/metrics");
        assert!(
            metrics.contains("sidetrack_history_bytes")
                && metrics.contains("sidetrack_history_missing_total 0"),
            "{metrics}"
        );
        node.signal(Signal::KILL);
        node.gone();
        drop(open);
        let node = start(server, &history, "");
        visit(&node, 40);
        eventually("old and new flows", || {
            bytes_up(&json(&flows(&node, &["--since", "1h", "--json", "state == ended"])))
                == [10, 20, 40, 3000]
        });
    });
}

#[test]
fn bytes_of_each_second_are_kept() {
    in_namespace(|| {
        let (server, place) = (server(), tempfile::tempdir().expect("a folder"));
        let node = start(server, &place.path().join("history"), "");
        let mut stream = TcpStream::connect(node.addresses("port")[0]).expect("connects");
        let mut sent = 0;
        eventually("samples of two seconds", || {
            stream.write_all(&[7; 1000]).expect("written");
            sent += 1000;
            let (status, body) = admin::ask(&node, "GET", "/v1/history/moved?since=1h");
            assert_eq!(status, 200, "{body}");
            let answer: Value = serde_json::from_str(&body).expect("JSON");
            let moved = answer["moved"].as_array().expect("a list");
            let up: u64 = moved.iter().filter_map(|one| one["up"].as_u64()).sum();
            assert!(up <= sent, "{up} of {sent}");
            std::thread::sleep(std::time::Duration::from_millis(50));
            moved.len() >= 2
        });
        let (_, body) = admin::ask(&node, "GET", "/v1/history/moved?flow=999&since=1h");
        assert_eq!(body.trim(), "{\"moved\":[]}");
    });
}

#[test]
fn mistakes_are_answered() {
    in_namespace(|| {
        let (server, place) = (server(), tempfile::tempdir().expect("a folder"));
        let node = start(server, &place.path().join("history"), "counters = false");
        for (path, wanted) in [
            ("/v1/history?since=yesterday", "'yesterday' is not a moment"),
            ("/v1/history?since=1h&until=2h", "since is later than until"),
            ("/v1/history?top=hots", "no groups by 'hots'"),
            ("/v1/history?top=host,process,user,rule,port", "5 fields are too many"),
            ("/v1/history?by=bytes", "`by` orders groups"),
            ("/v1/history?sort=up", "sort"),
            ("/v1/history?filter=prot%20%3D%3D%20443", "did you mean 'proc'"),
        ] {
            let (status, body) = admin::ask(&node, "GET", path);
            assert!(status == 400 && body.contains(wanted), "{path}: {status} {body}");
        }
        // A second node cannot write the same history.
        let text = configuration(server, &place.path().join("history"), "");
        let (top, tables) = text.split_once('\n').expect("lines");
        let mut second = Up::spawn(&format!("{top}\nuser = \"root\"\n"), tables);
        let (status, _) = second.gone();
        assert!(!status.success());
        assert!(second.logged().contains("another sidetrack writes the history"), "{}", second.logged());
    });
}

#[test]
fn without_a_history_the_command_says_how_to_get_one() {
    in_namespace(|| {
        let server = server();
        let tables = format!(
            "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n[[rule]]\nname = \"all\"\nmatch \
         = {{ listener = \"port\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n"
        );
        let node = Up::start("default = \"deny\"\nuser = \"root\"\n", &tables);
        let output = flows(&node, &["--since", "1h"]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains("keeps no history") && text.contains("[history]"),
            "{text}"
        );
    });
}
