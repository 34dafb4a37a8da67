//! `overlay bench` and `overlay link set`.

use crate::node::{Up, at};
use crate::scene::Server;
use crate::scene::{Scene, exchange, path_to, random_bytes};
use crate::schema;
use sidetrack_testkit::eventually;
use std::process::{Command, Output};

fn overlay(up: &Up, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("overlay").args(arguments).arg("--admin").arg(up.folder().join("admin.sock"));
    command.output().expect("the binary")
}

/// `sidetrack overlay …` of this node; what it prints.
pub(crate) fn run(up: &Up, arguments: &[&str]) -> String {
    let out = overlay(up, arguments);
    assert!(out.status.success(), "{arguments:?}: {out:?}");
    String::from_utf8(out.stdout).expect("text")
}

/// The same for a command that fails; what it prints.
pub(crate) fn refused(up: &Up, arguments: &[&str]) -> String {
    let out = overlay(up, arguments);
    assert!(!out.status.success(), "{arguments:?}: {out:?}");
    String::from_utf8(out.stderr).expect("text")
}

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

#[test]
fn a_path_is_measured_without_any_entry_that_delivers_and_keeps_to_the_rate_of_its_link() {
    let scene = Scene::new(at("127.0.0.1", 9), "");
    let flood = |arguments: &[&str]| -> serde_json::Value {
        let arguments = [&["bench", "c", "--json"], arguments].concat();
        serde_json::from_str(&run(&scene.a, &arguments)).expect("JSON")
    };
    let number = |view: &serde_json::Value, what: &str| view[what].as_f64().expect("a number");
    let free = flood(&["-s", "0.5"]);
    assert!(number(&free, "bytes") > 1e6 && number(&free, "mbit") > 0.0, "{free}");
    assert!(free["answer_ms"][0].as_f64() > Some(0.0), "{free}");
    // Half a second at 8 Mb/s is half a megabyte, however long it takes.
    let slow = flood(&["-s", "0.5", "-r", "8"]);
    assert!((400_000.0..700_000.0).contains(&number(&slow, "bytes")), "{slow}");
    // The link takes 40 Mb/s for all flows together: what was written in half a second takes as long as that.
    run(&scene.a, &["link", "set", "b1", "--rate", "40"]);
    run(&scene.a, &["link", "set", "b2", "--rate", "40"]);
    let bound = flood(&["-s", "0.5"]);
    let at_least = number(&bound, "bytes") * 8.0 / 40e6 - 0.5;
    assert!(number(&bound, "seconds") > at_least, "{bound}");
    let status = run(&scene.a, &["status"]);
    assert!(status.contains("by hand: link to b1: rate 40 Mb/s"), "{status}");
    run(&scene.a, &["link", "set", "b1", "--rate", "0"]);
    assert!(!run(&scene.a, &["status"]).contains("link to b1:"));
    assert!(refused(&scene.a, &["bench", "nobody"]).contains("the overlay has no node 'nobody'"));
    assert!(refused(&scene.a, &["bench", "c", "-s", "1000"]).contains("0.1 to 60"));
}

#[test]
fn links_are_taken_down_made_dear_and_left_alone_again() {
    let bytes = random_bytes(5, 300_000);
    let server = Server::start(bytes.clone());
    let scene = Scene::new(server.address, DELIVER);
    // Dear: the other relay is taken.
    let first = scene.relay();
    let other = if first == "b1" { "b2" } else { "b1" };
    assert_eq!(
        run(&scene.a, &["link", "set", &first, "--cost", "500"]),
        format!("link to {first}: cost 500 ms\n")
    );
    scene.wait("the other relay", |status| path_to(status, "c").get(1).is_some_and(|relay| relay == other));
    // Down: the first is taken again, dear as it is, and the one that is down stays so.
    run(&scene.a, &["link", "set", other, "--down"]);
    scene.wait("the dear relay", |status| path_to(status, "c").get(1) == Some(&first));
    assert!(exchange(scene.entry(), b"over what is left").expect("an answer") == bytes);
    assert!(server.finish().expect("an orderly end") == b"over what is left");
    fits_the_document(&scene.a, "get", "/v1/flows", "/v1/flows?recent=9");
    let links = scene.status()["links"].as_array().expect("links").clone();
    assert!(links.iter().all(|link| link["neighbour"] != other || link["up"] == false), "{links:?}");
    // As they are by themselves.
    run(&scene.a, &["link", "set", &first, "--cost", "0"]);
    run(&scene.a, &["link", "set", other, "--up"]);
    scene.wait("both links and nothing by hand", |status| {
        let up = status["links"].as_array().expect("links").iter().filter(|link| link["up"] == true).count();
        up == 2 && status["settings"].as_array().is_some_and(Vec::is_empty)
    });
    assert!(refused(&scene.a, &["link", "set", "nobody", "--down"]).contains("no node 'nobody'"));
    assert!(refused(&scene.a, &["link", "set", "a", "--down"]).contains("this node itself"));
    assert!(refused(&scene.a, &["link", "set", "b1", "--loss", "101"]).contains("0 to 100"));
    assert!(refused(&scene.a, &["link", "set", "b1"]).contains("nothing to set"));
}

#[test]
fn packets_of_a_service_are_measured_and_their_links_are_shown() {
    let scene = Scene::new(at("127.0.0.1", 9), "");
    let service = ["--kind", "real-time", "--dissemination", "duplicate", "--deadline", "5000"];
    let path = [&["path", "c"], &service[..]].concat();
    // Nodes learn what others understand a moment after their links are up.
    eventually("two paths for packets", || {
        let out = String::from_utf8(overlay(&scene.a, &path).stdout).expect("text");
        out.starts_with("real-time, duplicate: a -> b") && out.matches(" -> ").count() == 4
    });
    let bench = [&["bench", "c", "-s", "0.5", "--packets", "100", "--json"], &service[..]].concat();
    eventually("packets are answered", || {
        let view: serde_json::Value = serde_json::from_str(&run(&scene.a, &bench)).expect("JSON");
        assert!(view["packets"].as_u64() > Some(1) && view["links"] == 4.0, "{view}");
        view["lost_percent"].as_f64() < Some(50.0) && view["rtt_ms"][0].as_f64() > Some(0.0)
    });
    let words = run(&scene.a, &["bench", "c", "-s", "0.2", "--kind", "best-effort"]);
    assert!(words.contains("packets over 2.0 links"), "{words}");
    // The kind of flows is measured as a flow.
    let flow = run(&scene.a, &["bench", "c", "-s", "0.2", "--kind", "reliable"]);
    assert!(flow.contains("bytes arrived in"), "{flow}");
    for wrong in [["--kind", "best-effort", "-r", "5"], ["--kind", "best-effort", "--packets", "501"]] {
        let told = refused(&scene.a, &[&["bench", "c"], &wrong[..]].concat());
        assert!(told.contains("packets_per_second (1 to 500)"), "{told}");
    }
    assert!(refused(&scene.a, &["path", "c", "--kind", "carrier-pigeon"]).contains("no such service"));
    assert!(refused(&scene.a, &["path", "nobody", "--kind", "best-effort"]).contains("no node 'nobody'"));
    // All nodes have this version.
    assert!(scene.status()["links"].as_array().expect("links").iter().all(|link| link["lacks"].is_null()));
    answers_fit_the_document(&scene.a);
}

/// Asks a node, and checks that the answer is what `docs/openapi.json` says of this path.
fn fits_the_document(up: &Up, method: &str, path: &str, target: &str) {
    let document = schema::openapi();
    let (status, body) = crate::node::admin::ask(up, &method.to_uppercase(), target);
    assert_eq!(status, 200, "{target}: {body}");
    let answer: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let wrong = schema::mismatches(&document, schema::answer_schema(&document, method, path), &answer);
    assert!(wrong.is_empty(), "{target}: {wrong:#?}\n{answer:#}");
}

/// What a node says of itself and of its overlay.
fn answers_fit_the_document(up: &Up) {
    for path in ["status", "config", "rules", "functions", "flows", "policy", "doctor", "overlay/group"] {
        let path = format!("/v1/{path}");
        fits_the_document(up, "get", &path, &path);
    }
    let service = "kind=real-time&dissemination=duplicate&deadline_ms=5000";
    for (method, path, target) in [
        ("get", "/v1/overlay/ping/{node}", "/v1/overlay/ping/c".to_owned()),
        ("get", "/v1/overlay/way/{node}", format!("/v1/overlay/way/c?{service}")),
        ("post", "/v1/overlay/bench/{node}", "/v1/overlay/bench/c?seconds=0.1".to_owned()),
        ("post", "/v1/overlay/bench/{node}", format!("/v1/overlay/bench/c?seconds=0.1&{service}")),
        ("post", "/v1/overlay/link/{neighbour}", "/v1/overlay/link/b1?cost_ms=1".to_owned()),
        ("get", "/v1/overlay", "/v1/overlay".to_owned()),
    ] {
        fits_the_document(up, method, path, &target);
    }
}
