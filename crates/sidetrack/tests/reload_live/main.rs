//! Reload of a running node under traffic: rules and listeners change as one, a wrong file changes nothing, no flow is cut
//! and nothing grows.

#[path = "../node/mod.rs"]
mod node;

mod endurance;
mod log;
mod passed;
mod systemd;
mod taken;
mod zones;

use node::peers::{Client, Server, visit};
use node::{Record, Up, admin};
use rustix::process::Signal;
use sidetrack_testkit::{in_namespace, nft};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

const TOP: &str = "default = \"deny\"\n";

fn redirect(server: SocketAddr) -> String {
    format!(
        "[[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {}\n",
        server.port()
    )
}

fn reverse(name: &str, address: &str, server: SocketAddr) -> String {
    format!("[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"{address}\"\nto = \"{server}\"\n")
}

/// A rule for everything, in user space.
fn rule(name: &str) -> String {
    format!("[[rule]]\nname = \"{name}\"\ncarrier = \"direct\"\nkernel = \"never\"\n")
}

/// The rule under which a new flow to the server runs.
fn rule_now(up: &mut Up, server: SocketAddr) -> String {
    let (client, seen, _) = visit(server, b"word");
    assert_ne!(client, seen, "caught");
    let record = up.record();
    assert_eq!((record.address("client"), record.text("reason")), (client, "ok"));
    record.text("rule").to_owned()
}

/// What is in force: rules, listeners, and the packet filter.
fn in_force(up: &Up) -> (String, String, String) {
    let status = admin::show(up, "/v1/status");
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    let table = nft("list table inet sidetrack").unwrap_or_default();
    (admin::show(up, "/v1/rules"), status["listeners"].to_string(), table)
}

#[test]
fn a_wrong_file_changes_nothing() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let taken = TcpListener::bind("127.0.0.1:0").expect("bound");
        let taken = taken.local_addr().expect("an address").to_string();
        let right = format!("{}{}", redirect(server.address), rule("first"));
        let mut up = Up::start(TOP, &right);
        let mut client = Client::connect(server.address).expect("connect");
        let before = in_force(&up);
        let other = format!("{}{}", redirect(server.address), rule("second"));
        let no_cgroup = redirect(server.address) + "cgroup = \"no/such/group\"\n" + &rule("second");
        let wrong = [
            format!("{other}[[rule]]\nnam = \"typing\"\n"),
            "[[listen".to_owned(),
            // Right as such, but an address is taken: found only when it is put in force.
            format!("{}{other}", reverse("port", &taken, server.address)),
            no_cgroup,
        ];
        for text in wrong {
            up.rewrite(TOP, &text);
            let (status, answer) = admin::ask(&up, "POST", "/v1/reload");
            assert!(status >= 400 && answer.contains("error"), "{status} {answer}\nof {text}");
            assert_eq!(in_force(&up), before, "{text}");
            assert_eq!(rule_now(&mut up, server.address), "first");
        }
        client.echo(b"still there").expect("not cut");
        up.reload(TOP, &other);
        assert_eq!(rule_now(&mut up, server.address), "second");
        client.echo(b"still there").expect("not cut");
        client.close().expect("closed");
        assert_eq!(up.record().text("rule"), "first", "a flow keeps the rule it began under");
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_change_of_the_file_or_a_signal_is_enough() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let text = |name: &str| format!("{}{}", redirect(server.address), rule(name));
        let mut up = Up::start(TOP, &text("first"));
        assert_eq!(rule_now(&mut up, server.address), "first");
        up.rewrite(TOP, &text("second"));
        up.log_line("reload", |line| line.contains("reloaded (the file changed)"));
        assert_eq!(rule_now(&mut up, server.address), "second");
        up.signal(Signal::HUP);
        up.log_line("reload", |line| line.contains("reloaded (SIGHUP)"));
        assert_eq!(rule_now(&mut up, server.address), "second");
        up.rewrite(TOP, "[[listen");
        up.signal(Signal::HUP);
        up.log_line("refusal", |line| line.contains("is rejected (SIGHUP)"));
        assert_eq!(rule_now(&mut up, server.address), "second");
        assert!(up.stop().0.success());
    });
}

/// A free port of the loopback of this test's own namespace: below those that the kernel gives to connections, so that none
/// takes it before it is bound.
fn free() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    format!("127.0.0.1:{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

#[test]
fn listeners_come_go_and_move_and_their_flows_stay() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let [a, b] = [free(), free()];
        let text = |listeners: &[(&str, &str)]| {
            let listeners = listeners.iter().map(|(name, address)| reverse(name, address, server.address));
            listeners.collect::<String>() + &rule("all")
        };
        let to = |address: &str| address.parse::<SocketAddr>().expect("an address");
        let mut up = Up::start(TOP, &text(&[("one", &a)]));
        let mut held = vec![Client::connect(to(&a)).expect("one")];
        assert!(Client::connect(to(&b)).is_err());
        up.reload(TOP, &text(&[("one", &a), ("two", &b)]));
        held.push(Client::connect(to(&b)).expect("added"));
        up.reload(TOP, &text(&[("two", &b)]));
        assert!(Client::connect(to(&a)).is_err(), "removed");
        up.reload(TOP, &text(&[("two", &a)]));
        held.push(Client::connect(to(&a)).expect("moved"));
        assert!(Client::connect(to(&b)).is_err(), "it has moved");
        for client in &mut held {
            client.echo(b"still there").expect("not cut");
        }
        for (client, name) in held.into_iter().zip(["one", "two", "two"]) {
            client.close().expect("closed");
            let record: Record = up.record();
            assert_eq!((record.text("listener"), record.text("reason")), (name, "ok"));
        }
        assert!(up.stop().0.success());
    });
}

#[test]
fn steering_and_the_kernel_path_come_by_reload() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let port = free();
        let socks = "[[listen]]\nname = \"in\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n";
        let mut up = Up::start(TOP, &format!("{socks}{}", rule("first")));
        let (client, seen, _) = visit(server.address, b"word");
        assert_eq!(client, seen, "nothing is caught yet");
        let kernel = "[[rule]]\nname = \"kernel\"\nmatch = { listener = \"port\" }\ncarrier = \"direct\"\n";
        let reverse = reverse("port", &port, server.address);
        up.reload(TOP, &format!("{}{reverse}{kernel}{}", redirect(server.address), rule("second")));
        assert_eq!(rule_now(&mut up, server.address), "second");
        let (client, ..) = visit(port.parse().expect("an address"), b"word");
        let record = up.record();
        assert_eq!(record.fate(), ("kernel", "kernel", "kernel_closed"), "{record:?}");
        assert_eq!(record.address("client"), client);
        up.reload(TOP, &format!("{socks}{}", rule("third")));
        let (client, seen, _) = visit(server.address, b"word");
        assert_eq!(client, seen, "nothing is caught any more");
        assert!(up.stop().0.success());
    });
}

#[test]
fn a_reload_says_what_only_a_restart_changes() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let text = |name: &str| format!("{}{}", redirect(server.address), rule(name));
        let mut up = Up::start(TOP, &text("first"));
        let metrics = free();
        let top = format!(
            "workers = 3\n{TOP}#admin metrics = \"{metrics}\"\n[limits]\nmax_flows = 9\ndrain_ms = 7000\n"
        );
        up.rewrite(&top, &text("second"));
        let (status, answer) = admin::ask(&up, "POST", "/v1/reload");
        assert_eq!(status, 200, "{answer}");
        let expected = [
            "workers: 1 stays in force, not 3; restart sidetrack to apply it".to_owned(),
            format!("[admin] metrics: none stays in force, not {metrics}; restart sidetrack to apply it"),
            "[limits] max_flows: none stays in force, not 9; restart sidetrack to apply it".to_owned(),
        ];
        let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["waiting_for_restart"], serde_json::json!(expected));
        for line in expected {
            up.log_line("the setting", |logged| logged.contains(&line));
        }
        assert_eq!(rule_now(&mut up, server.address), "second", "the rest is in force");
        // What counts is the configuration of the start, not that of the reload before.
        up.signal(Signal::HUP);
        up.log_line("the setting again", |logged| logged.contains("workers: 1 stays in force, not 3"));
        up.reload(TOP, &text("third"));
        let status: serde_json::Value = serde_json::from_str(&admin::show(&up, "/v1/config")).expect("JSON");
        assert!(status["waiting_for_restart"].is_null(), "{status}");
        assert!(up.stop().0.success());
    });
}
