//! One flow over two paths that share no relay: striped, and duplicated.
//!
//! ```text
//!        .-- b1 --.
//!       a          c      an application at a sends to a server at c
//!        '-- b2 --'
//! ```

use crate::node::{Record, Up};
use crate::scene::{Scene, Server, exchange, random_bytes, status};
use crate::tools::run;
use serde_json::Value;
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

/// A scene whose flows use both relays.
fn scene(server: SocketAddr, dissemination: &str) -> Scene {
    let keys = format!("dissemination = \"{dissemination}\"\npaths = 2\n");
    let scene = Scene::by_rule(server, DELIVER, &keys, |_, to| to);
    scene.wait("both paths", |status| {
        let links = status["links"].as_array().expect("links");
        links.iter().filter(|link| link["up"] == true).count() == 2
    });
    scene
}

/// The paths of the sessions from a to c that use several.
fn session_paths(status: &Value) -> Vec<Vec<String>> {
    let to_c = status["paths"].as_array().expect("paths").iter().find(|path| path["to"] == "c");
    let sessions = to_c.expect("a member")["sessions"].as_array().cloned().unwrap_or_default();
    let names = |path: &Value| -> Vec<String> {
        path.as_array().expect("nodes").iter().map(|name| name.as_str().expect("a name").to_owned()).collect()
    };
    sessions.iter().flat_map(|set| set["paths"].as_array().expect("paths").iter().map(names)).collect()
}

fn relayed(up: &Up) -> u64 {
    status(up)["relayed_bytes"].as_u64().expect("a number")
}

#[test]
fn a_striped_flow_uses_both_relays_and_arrives_whole() {
    let (up, down) = (random_bytes(31, 16_000_000), random_bytes(32, 6_000_000));
    let server = Server::start(down.clone());
    let mut scene = scene(server.address, "stripe");
    // Each path is slower than the application, so both are used.
    for relay in ["b1", "b2"] {
        run(&scene.a, &["link", "set", relay, "--rate", "80"]);
    }
    let (entry, sent) = (scene.entry(), up.clone());
    let client = std::thread::spawn(move || exchange(entry, &sent));
    scene.wait("a session with two paths", |status| session_paths(status).len() == 2);
    let path = run(&scene.a, &["path", "c"]);
    // The path that the session began with comes first: whichever relay was nearer at that moment.
    assert!(path.contains("1 sessions, stripe: a -> b"), "{path}");
    assert!(path.contains("a -> b1 -> c (") && path.contains("a -> b2 -> c ("), "{path}");
    assert!(client.join().expect("no panic").expect("an answer") == down, "what the server sent");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    let passed = [&scene.b1, &scene.b2].map(|relay| relayed(relay.as_ref().expect("it runs")));
    println!("relayed bytes: {passed:?}");
    assert!(passed.iter().all(|bytes| *bytes > 2_000_000), "both relays carry it: {passed:?}");
    assert!(passed.iter().sum::<u64>() < 40_000_000, "hardly any byte twice: {passed:?}");
    let record = scene.a.record();
    assert_eq!(record.fate(), ("over", "overlay:c (stripe over 2 paths)", "ok"));
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (16_000_000, 6_000_000));
    let (opened, sent) = paths_of(&record);
    assert!(opened >= 2 && sent.len() == 2, "{opened} {sent:?}");
    assert!(sent.iter().all(|bytes| *bytes > 0) && sent.iter().sum::<u64>() >= 16_000_000, "{sent:?}");
    let metrics = crate::node::admin::show(&scene.a, "/metrics");
    assert!(metrics.contains("sidetrack_overlay_paths_total{fate=\"opened\"} "), "{metrics}");
    eventually("no session is left", || {
        status(&scene.a)["sessions"] == 0 && status(&scene.c)["sessions"] == 0
    });
}

#[test]
fn a_striped_flow_survives_each_relay_in_turn() {
    let (up, down) = (random_bytes(33, 40_000_000), random_bytes(34, 1_000_000));
    let server = Server::start(down.clone());
    let mut scene = scene(server.address, "stripe");
    for relay in ["b1", "b2"] {
        run(&scene.a, &["link", "set", relay, "--rate", "100"]);
    }
    let (entry, sent, taken) = (scene.entry(), up.clone(), server.taken.clone());
    let client = std::thread::spawn(move || exchange(entry, &sent));
    scene.wait("a session with two paths", |status| session_paths(status).len() == 2);
    eventually("the transfer goes on", || taken.load(Relaxed) >= 4_000_000);
    assert!(taken.load(Relaxed) < 40_000_000, "killed in mid transfer");
    scene.kill("b1");
    assert!(client.join().expect("no panic").expect("an answer") == down, "what the server sent");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    assert_eq!(scene.a.record().fate(), ("over", "overlay:c (stripe over 2 paths)", "ok"));
}

/// What a record says of the paths of its flow: how many were opened, and the bytes sent on each.
fn paths_of(record: &Record) -> (u64, Vec<u64>) {
    let detail = record.text("detail");
    let told = detail.split_once(" paths opened, bytes sent on each: ");
    let (opened, sent) = told.unwrap_or_else(|| panic!("no paths in {detail:?}"));
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("{detail:?}"));
    (number(opened), sent.split(", ").map(number).collect())
}

/// What came at a server: the bytes, and the longest time between two reads.
type Came = std::io::Result<(Vec<u8>, Duration)>;

/// A server that takes one connection to its end, and watches how long nothing comes.
fn watching() -> (SocketAddr, Arc<AtomicU64>, JoinHandle<Came>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let taken = Arc::new(AtomicU64::new(0));
    let count = taken.clone();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(LIMIT))?;
        let (mut got, mut longest, mut buffer) = (Vec::new(), Duration::ZERO, vec![0; 65_536]);
        let mut last = None;
        while let n @ 1.. = stream.read(&mut buffer)? {
            let now = Instant::now();
            longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
            last = Some(now);
            got.extend_from_slice(&buffer[..n]);
            count.store(got.len() as u64, Relaxed);
        }
        Ok((got, longest))
    });
    (address, taken, thread)
}

#[test]
fn a_duplicated_flow_does_not_notice_that_a_relay_is_killed() {
    const PIECE: usize = 2000;
    let bytes = random_bytes(35, 6_000_000);
    let (address, taken, server) = watching();
    let mut scene = scene(address, "duplicate");
    let mut client = TcpStream::connect(scene.entry()).expect("a's listener");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || -> std::io::Result<TcpStream> {
        for piece in sent.chunks(PIECE) {
            client.write_all(piece)?;
            std::thread::park_timeout(Duration::from_millis(1));
        }
        client.shutdown(Shutdown::Write)?;
        Ok(client)
    });
    scene.wait("a session with two paths", |status| session_paths(status).len() == 2);
    eventually("the stream flows over both relays", || {
        let passed = [&scene.b1, &scene.b2].map(|relay| relayed(relay.as_ref().expect("it runs")));
        taken.load(Relaxed) >= 300_000 && passed.iter().all(|bytes| *bytes > 50_000)
    });
    scene.kill("b1");
    assert!(taken.load(Relaxed) < 6_000_000, "killed in mid stream");
    let client = writer.join().expect("no panic").expect("all is taken");
    let (got, longest) = server.join().expect("no panic").expect("an orderly end");
    println!("duplicate, relay killed: the longest time without a byte was {longest:?}");
    assert!(got == bytes, "every byte, once");
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    assert_eq!(status(&scene.a)["sessions_resumed"], 0, "the other path was there all the time");
    drop(client);
    let record = scene.a.record();
    assert_eq!(record.fate(), ("over", "overlay:c (duplicate over 2 paths)", "ok"));
    let (_, sent) = paths_of(&record);
    // The second path is open a moment after the first.
    assert!(
        sent.len() == 2 && sent.iter().sum::<u64>() > 6_000_000,
        "a part of the bytes went twice: {sent:?}"
    );
}
