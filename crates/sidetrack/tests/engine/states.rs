//! The TCP states of a connection, as its user sees them.

use crate::node::peers::Client;
use crate::node::{Record, Up, admin};
use crate::site::{ENGINE, Site, WAYS, engine_by};
use serde_json::Value;
use sidetrack_testkit::{eventually, is_root};

/// What `sidetrack flows show` prints.
fn shown(up: &Up, id: u64) -> String {
    let socket = up.folder().join("admin.sock");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .args(["flows", "show", &id.to_string(), "--admin"])
        .arg(socket)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// The states of one side, in their order; times never go back and never pass the end.
fn states(record: &Record, side: &str) -> Vec<String> {
    let list = record.0["states"].as_array().unwrap_or_else(|| panic!("states of {record:?}"));
    let times: Vec<f64> = list.iter().filter_map(|state| state[2].as_f64()).collect();
    let end = record.0["duration_seconds"].as_f64().expect("a duration");
    assert!(times.len() == list.len() && times.is_sorted(), "{list:?}");
    assert!(times.last().is_some_and(|last| *last <= end + 1e-5), "{list:?} {end}");
    let own = list.iter().filter(|state| state[0] == *side);
    own.filter_map(|state| state[1].as_str()).map(str::to_owned).collect()
}

#[test]
fn a_flow_shows_the_states_of_both_sides_while_it_lives_and_in_its_record() {
    if is_root() {
        WAYS.into_iter().for_each(states_of);
    }
}

fn states_of(way: &str) {
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine_by(way, &format!("to = \"{}\"", server.address)));
    let client = site.line.client.run(|| {
        let mut client = Client::connect(ENGINE.parse().expect("an address")).expect("greeted");
        client.echo(b"seen").expect("echoed");
        client
    });
    let up = site.up.as_ref().expect("started");
    eventually("the states are shown", || {
        admin::flows(up).first().is_some_and(|flow| !flow.0["states"].is_null())
    });
    let live = admin::flows(up).remove(0);
    assert_eq!(states(&live, "client"), ["SYN-SENT", "ESTABLISHED"]);
    assert_eq!(states(&live, "server"), ["SYN-RECEIVED", "ESTABLISHED"]);
    let text = shown(up, live.number("flow"));
    assert!(text.contains("client  ESTABLISHED") && text.contains("in flight"), "{text}");
    client.close().expect("closed in order");
    let record = site.record();
    assert_eq!(record.text("reason"), "ok");
    let client = ["SYN-SENT", "ESTABLISHED", "FIN-WAIT-1", "FIN-WAIT-2", "TIME-WAIT"];
    let server = ["SYN-RECEIVED", "ESTABLISHED", "LAST-ACK", "CLOSED"];
    assert_eq!(states(&record, "client"), own(&client));
    // A server that acknowledges the client's FIN with its own passes CLOSE-WAIT in no time.
    let seen: Vec<_> = states(&record, "server").into_iter().filter(|state| state != "CLOSE-WAIT").collect();
    assert_eq!(seen, own(&server));
    let text = shown(site.up.as_ref().expect("started"), record.number("flow"));
    assert!(text.contains("client  TIME-WAIT") && text.contains("server  CLOSED"), "{text}");
}

fn own(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn flows_of_the_kernel_have_no_states() {
    let mut node = Up::start(
        "default = \"direct\"",
        "[[listen]]\nkind = \"socks\"\nname = \"proxy\"\naddress = \"127.0.0.1:0\"\n",
    );
    let proxy = node.addresses("proxy")[0];
    let stream = std::net::TcpStream::connect(proxy).expect("connected");
    drop(stream);
    assert_eq!(node.record().0["states"], Value::Null);
}
