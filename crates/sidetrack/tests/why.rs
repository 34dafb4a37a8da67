//! `sidetrack flows why` and `flows show`: the decision trace of flows on real traffic.

mod node;

use node::peers::{Client, Server};
use node::{Up, admin};
use serde_json::Value;
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

const TOP: &str = "user = \"root\"\ndefault = \"deny\"\n";
const SOCKS: &str = "[[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n";

/// Asks a SOCKS5 listener for a name. Returns the connection and the code of the answer.
fn ask(listener: SocketAddr, name: &str, port: u16) -> (TcpStream, u8) {
    let mut stream = TcpStream::connect_timeout(&listener, LIMIT).expect("connects");
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut asked = vec![5, 1, 0, 5, 1, 0, 3, u8::try_from(name.len()).expect("short")];
    asked.extend_from_slice(name.as_bytes());
    asked.extend_from_slice(&port.to_be_bytes());
    stream.write_all(&asked).expect("written");
    let mut answer = [0; 5 + 1];
    stream.read_exact(&mut answer).expect("an answer");
    // The address: IPv4 or IPv6, and a port; one byte of the first kind was read.
    let rest = if answer[5] == 1 { 4 + 2 } else { 16 + 2 };
    stream.read_exact(&mut vec![0; rest]).expect("the whole answer");
    (stream, answer[3])
}

fn flows(node: &Up, words: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("flows").args(words).arg("--admin").arg(node.folder().join("admin.sock"));
    let output = command.output().expect("the binary");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn why(node: &Up, id: u64) -> Value {
    serde_json::from_str(&flows(node, &["--json", "why", &id.to_string()])).expect("JSON")
}

/// The numbers of the flows that have ended, in the order in which they were caught.
fn ended(node: &Up) -> Vec<u64> {
    let lines = flows(node, &["--recent", "100", "--json", "state == ended"]);
    let flows = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let mut ids: Vec<_> = flows.map(|flow| flow["flow"].as_u64().expect("a number")).collect();
    ids.sort_unstable();
    ids
}

fn words<'a>(list: &'a Value, name: &str) -> Vec<&'a str> {
    let list = list.as_array().expect("a list");
    list.iter().map(|one| one[name].as_str().expect("text")).collect()
}

/// Each step comes after the one before.
fn rise(trace: &Value) {
    let steps = trace["steps"].as_array().expect("a list");
    let times: Vec<f64> = steps.iter().map(|step| step["at_seconds"].as_f64().expect("a number")).collect();
    assert!(times.is_sorted(), "{times:?}");
}

#[test]
fn it_says_which_rules_were_tried_and_where_the_time_went_also_after_they_are_replaced() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let exit = Up::start(
            TOP,
            &format!(
                "{SOCKS}[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nmatch = {{ listener = \"socks\" }}\n"
            ),
        );
        let hop = exit.addresses("socks")[0];
        let rules = format!(
            "{SOCKS}[[rule]]\nname = \"far\"\naction = \"deny\"\nmatch = {{ to = [\"10.0.0.0/8\"] }}\n\
             [[rule]]\nname = \"by-name\"\nmatch = {{ host = [\"localhost\"] }}\ncarrier = \"socks5://{hop}\"\n\
             [[rule]]\nname = \"behind\"\nmatch = {{ port = [1] }}\ncarrier = \"direct\"\n"
        );
        let entry = Up::start(TOP, &rules);
        let (stream, code) = ask(entry.addresses("socks")[0], "localhost", server.address.port());
        assert_eq!(code, 0);
        drop(Client::over(stream).expect("the server's greeting"));
        assert_eq!(ask(entry.addresses("socks")[0], "other.example", 80).1, 2, "not allowed");
        eventually("two flows have ended", || ended(&entry).len() == 2);
        let ids = ended(&entry);

        // At this node: two rules were tried, and the hop was dialled.
        let carried = why(&entry, ids[0]);
        assert_eq!(words(&carried["rules"], "rule"), ["far", "by-name", "behind"]);
        assert_eq!(words(&carried["rules"], "outcome"), ["failed", "matched", "not_reached"]);
        assert_eq!(carried["rules"][0]["condition"], "to 10.0.0.0/8");
        assert_eq!(carried["dialled"], hop.to_string());
        assert_eq!(carried["destination"], format!("localhost:{}", server.address.port()));
        let steps = words(&carried["steps"], "step");
        let wanted = ["caught", "decided", "connected", "hop_answered", "ready", "first_byte", "ended"];
        assert_eq!(steps, wanted, "{carried}");
        assert_eq!(carried["steps"][3]["what"], format!("socks5://{hop}"));
        rise(&carried);

        // A denied flow has no destination, and each rule says why not.
        let denied = why(&entry, ids[1]);
        assert_eq!(words(&denied["rules"], "outcome"), ["failed", "failed", "failed"]);
        assert_eq!(denied["verdict"], "denied (no rule matched; default deny)");
        assert_eq!(words(&denied["steps"], "step"), ["caught", "decided", "ended"], "{denied}");
        assert_eq!((&denied["destination"], &denied["dialled"]), (&Value::Null, &Value::Null));

        // The last hop has resolved the name.
        eventually("its flow has ended", || ended(&exit).len() == 1);
        let there = why(&exit, ended(&exit)[0]);
        assert!(words(&there["steps"], "step").contains(&"resolved"), "{there}");
        assert!(there["resolved_count"].as_u64().is_some_and(|count| count >= 1), "{there}");
        assert_eq!(there["dialled"], server.address.to_string());

        // For people; and other rules do not change what was decided.
        let before = flows(&entry, &["why", &ids[0].to_string()]);
        entry.reload(TOP, &format!("{SOCKS}[[rule]]\nname = \"new\"\ncarrier = \"direct\"\n"));
        let text = flows(&entry, &["why", &ids[0].to_string()]);
        assert_eq!(text, before);
        for line in [
            "rules     1. 'far': no: not to 10.0.0.0/8",
            "          2. 'by-name': matches",
            &format!("dialled   {hop}"),
            "end       ok",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
        }
        assert!(!text.contains("behind"), "{text}");
    });
}

#[test]
fn a_running_flow_and_one_that_ended_badly_say_what_tcp_measured() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let tables = format!(
            "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
             [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
            server.address
        );
        let node = Up::start(TOP, &tables);
        let client = Client::connect(node.addresses("port")[0]).expect("the server's greeting");
        let (status, list) = admin::ask(&node, "GET", "/v1/flows");
        assert_eq!(status, 200);
        let list: Value = serde_json::from_str(&list).expect("JSON");
        let id = list["flows"][0]["flow"].as_u64().expect("a number");
        let measured = |trace: &Value| {
            for side in ["tcp_client", "tcp_server"] {
                assert!(trace[side]["rtt_seconds"].as_f64().is_some_and(|rtt| rtt > 0.0), "{side}: {trace}");
                assert_eq!(trace[side]["lost_segments"], 0, "{trace}");
            }
        };
        // It is asked anew each time.
        let first = why(&node, id);
        measured(&first);
        eventually("a later measurement", || {
            why(&node, id)["tcp_client"]["at_seconds"].as_f64() > first["tcp_client"]["at_seconds"].as_f64()
        });
        let text = flows(&node, &["show", &id.to_string()]);
        assert!(
            text.contains("in flight") && text.contains("MIN RTT") && text.contains("connected"),
            "{text}"
        );
        flows(&node, &["kill", &id.to_string()]);
        eventually("it has ended", || ended(&node) == [id]);
        let last = why(&node, id);
        assert_eq!(last["flow"]["reason"], "killed");
        measured(&last);
        drop(client);
    });
}
