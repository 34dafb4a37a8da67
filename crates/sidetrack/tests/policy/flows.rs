//! What an agreement does to real flows through a running node.

use crate::node::admin::{flows, show};
use crate::node::agreement::trial;
use crate::node::peers::{Client, Server};
use crate::node::{Record, Up};
use serde_json::Value;
use sidetrack_common::exchange;
use sidetrack_testkit::eventually;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Instant;

/// A node in front of the server, whose rule asks for this purpose.
struct Site {
    up: Up,
    server: Server,
}

impl Site {
    fn start(rest: &str, more: &str) -> Self {
        let server = Server::start("127.0.0.2");
        let address = server.address;
        let rules = format!(
            "[policy]\nagreement = \"@/agreement.toml\"\n{more}\n[function.count]\nkind = \"count\"\n\
             [[listen]]\nname = \"in\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{address}\"\n\
             [[listen]]\nname = \"care\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{address}\"\n\
             [[rule]]\nname = \"care\"\nmatch = {{ listener = \"care\" }}\ncarrier = \"direct\"\nagreement = {{ purpose = \"care\" }}\n\
             [[rule]]\nname = \"research\"\ncarrier = \"direct\"\nagreement = {{ purpose = \"research\" }}\n"
        );
        let text = trial(address.port(), "given", rest);
        let up = Up::start_with("default = \"deny\"\n", &rules, |folder| {
            std::fs::write(folder.join("agreement.toml"), text).expect("written");
        });
        Self { up, server }
    }

    fn at(&self, listener: &str) -> SocketAddr {
        self.up.addresses(listener)[0]
    }

    fn put(&self, consent: &str, rest: &str, dry_run: bool) -> Value {
        put(&self.up, &trial(self.server.address.port(), consent, rest), dry_run).expect("taken")
    }
}

/// `PUT /v1/policy`; the error's text if it is refused.
fn put(up: &Up, text: &str, dry_run: bool) -> Result<Value, String> {
    let target = format!("/v1/policy?dry_run={dry_run}");
    let answer = exchange::ask(&up.folder().join("admin.sock"), "PUT", &target, text);
    let (status, body) = answer.expect("the admin socket");
    let body: Value = serde_json::from_str(&body).expect("JSON");
    if status == 200 { Ok(body) } else { Err(body["error"].as_str().expect("an error").to_owned()) }
}

/// A connection that is refused: it ends before anything comes.
fn is_refused(to: SocketAddr) -> bool {
    Client::connect(to).is_err()
}

fn chain(record: &Record) -> Vec<&str> {
    record.0["chain"].as_array().expect("a list").iter().filter_map(Value::as_str).collect()
}

#[test]
fn a_rule_asks_the_agreement() {
    let mut site = Site::start("requires = \"counted\"", "");
    let mut client = Client::connect(site.at("in")).expect("allowed");
    client.echo(b"pulse").expect("echo");
    client.close().expect("closed");
    let record = site.up.record();
    assert_eq!(record.fate(), ("research", "direct", "ok"));
    assert_eq!((chain(&record), record.text("agreement")), (vec!["count"], "allow: trial"));
    assert!(is_refused(site.at("care")));
    let record = site.up.record();
    assert_eq!(record.fate(), ("care", "", "policy_denied"));
    let why =
        "deny: no agreement lets node 'lab' of 'centre' read 'pulse' for care; 'trial' is for research only";
    assert_eq!(record.text("agreement"), why);
}

#[test]
fn consent_that_is_withdrawn_ends_what_runs_and_keeps_out_what_comes() {
    let mut site = Site::start("", "");
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(site.at("in")).expect("allowed")).collect();
    clients.iter_mut().for_each(|client| client.echo(b"pulse").expect("echo"));
    let tried = site.put("withdrawn", "", true);
    assert_eq!(
        (tried["dry_run"].as_bool(), tried["revoked"].as_array().map(Vec::len)),
        (Some(true), Some(3))
    );
    clients.iter_mut().for_each(|client| client.echo(b"still").expect("echo"));
    let began = Instant::now();
    let applied = site.put("withdrawn", "", false);
    assert_eq!(applied["revoked"].as_array().map(Vec::len), Some(3));
    for client in &mut clients {
        assert!(client.echo(b"gone").is_err());
    }
    eprintln!("ended after {:?}", began.elapsed());
    for _ in 0..3 {
        let record = site.up.record();
        assert_eq!(record.text("reason"), "policy_revoked");
        assert_eq!(record.text("agreement"), "revoked: consent for 'pulse' is withdrawn");
    }
    assert!(is_refused(site.at("in")));
    assert_eq!(site.up.record().text("reason"), "policy_denied");
    // It is the file now: a restart or a reload finds the same.
    let file = std::fs::read_to_string(site.up.folder().join("agreement.toml")).expect("the file");
    assert!(file.contains("withdrawn"));
    site.put("given", "", false);
    Client::connect(site.at("in")).expect("allowed again");
}

#[test]
fn a_flow_without_a_function_that_is_asked_for_now_ends() {
    let mut site = Site::start("", "");
    let mut client = Client::connect(site.at("in")).expect("allowed");
    site.put("given", "requires = \"counted\"", false);
    assert!(client.echo(b"pulse").is_err());
    let record = site.up.record();
    assert_eq!(record.text("reason"), "policy_revoked");
    assert!(record.text("agreement").contains("'count'"), "{record:?}");
    let client = Client::connect(site.at("in")).expect("through the function");
    // What passes it already goes on when it is not asked for any more.
    site.put("given", "", false);
    client.close().expect("closed");
    assert_eq!(chain(&site.up.record()), ["count"]);
}

#[test]
fn a_wrong_agreement_changes_nothing() {
    let site = Site::start("", "");
    let mut client = Client::connect(site.at("in")).expect("allowed");
    let before = show(&site.up, "/v1/policy");
    let right = trial(site.server.address.port(), "given", "");
    let wrong = [
        "[[agreement",
        "version = 1\n",
        &right.replace("applies = \"counted\"", "applies = \"other\""),
        &right.replace("[function.count]", "[function.strange]").replace("consent", "port = 1\nconsent"),
        &right.replace("[function.count]", "[function.unknown]"),
    ];
    for text in wrong.iter().filter(|text| !text.starts_with("version = 1\n")) {
        put(&site.up, text, false).expect_err(text);
        put(&site.up, text, true).expect_err(text);
    }
    assert_eq!(show(&site.up, "/v1/policy"), before);
    client.echo(b"pulse").expect("goes on");
}

#[test]
fn the_file_is_followed_and_so_is_a_reload() {
    let mut site = Site::start("", "");
    let mut client = Client::connect(site.at("in")).expect("allowed");
    client.echo(b"pulse").expect("echo");
    write(&site.up.folder(), &trial(site.server.address.port(), "withdrawn", ""));
    eventually("the flow ends", || flows(&site.up).is_empty());
    assert_eq!(site.up.record().text("reason"), "policy_revoked");
    assert!(client.echo(b"pulse").is_err());
}

fn write(folder: &Path, text: &str) {
    let fresh = folder.join("fresh.toml");
    std::fs::write(&fresh, text).expect("written");
    std::fs::rename(fresh, folder.join("agreement.toml")).expect("renamed");
}

#[test]
fn an_audit_carries_what_it_would_deny() {
    let mut site = Site::start("", "mode = \"audit\"");
    let mut client = Client::connect(site.at("care")).expect("carried");
    client.echo(b"pulse").expect("echo");
    site.put("withdrawn", "", false);
    client.echo(b"pulse").expect("goes on");
    client.close().expect("closed");
    let record = site.up.record();
    assert_eq!(record.fate(), ("care", "direct", "ok"));
    assert!(record.text("agreement").starts_with("would deny: no agreement lets"), "{record:?}");
}

#[test]
fn no_flow_slips_through_while_the_agreement_changes() {
    let site = Site::start("", "");
    let at = site.at("in");
    let allowed = || flows(&site.up).iter().any(|flow| flow.text("agreement").starts_with("allow"));
    for _ in 0..20 {
        site.put("given", "", false);
        // Some are decided before the change, some after it, some while it is made: none lives on.
        let coming =
            std::thread::spawn(move || (0..40).flat_map(|_| TcpStream::connect(at)).collect::<Vec<_>>());
        site.put("withdrawn", "", false);
        let held = coming.join().expect("connections");
        for mut stream in held {
            // Whatever was carried ends; a reset is an end, too.
            let _ = stream.read_to_end(&mut Vec::new());
        }
        assert!(!allowed());
    }
}
