//! Bytes over three nodes, also while relays die.

use crate::node::Up;
use crate::scene::{Keys, Scene, Server, exchange, overlay_address, path_to, random_bytes, wait_for};
use sidetrack_testkit::LIMIT;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

#[test]
fn bytes_and_half_closes_pass_both_ways_over_three_nodes() {
    let (up, down) = (random_bytes(1, 9_000_001), random_bytes(2, 7_000_003));
    let server = Server::start(down.clone());
    let mut scene = Scene::new(server.address, DELIVER);
    assert!(exchange(scene.entry(), &up).expect("an answer") == down, "what the server sent");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    let record = scene.a.record();
    assert_eq!(record.fate(), ("over", "overlay:c", "ok"));
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (9_000_001, 7_000_003));
    let status = scene.status();
    assert_eq!(status["sessions_opened"], 1);
    let path = path_to(&status, "c");
    assert!(path.len() == 3 && path[0] == "a" && path[2] == "c", "{path:?}");
    for (arguments, expected) in [
        (vec!["status"], "NEIGHBOUR"),
        (vec!["path", "c"], " -> c  ("),
        (vec!["ping", "c", "-c", "2"], " ms over a -> b"),
    ] {
        let socket = scene.a.folder().join("admin.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        let out =
            command.arg("overlay").args(arguments).arg("--admin").arg(socket).output().expect("the binary");
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && text.contains(expected), "{out:?}");
    }
}

#[test]
fn a_relay_that_is_killed_costs_no_byte() {
    let (up, down) = (random_bytes(3, 48_000_000), random_bytes(4, 1_000_000));
    let server = Server::start(down.clone());
    let mut scene = Scene::new(server.address, DELIVER);
    let (entry, sent, taken) = (scene.entry(), up.clone(), server.taken.clone());
    let (go_on, told) = std::sync::mpsc::channel::<()>();
    let client = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(entry)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let (most, rest) = sent.split_at(40_000_000);
        stream.write_all(most)?;
        // It may have been faster than the one that kills the relay.
        let _ = told.recv();
        stream.write_all(rest)?;
        stream.shutdown(Shutdown::Write)?;
        let mut got = Vec::new();
        stream.read_to_end(&mut got)?;
        std::io::Result::Ok(got)
    });
    sidetrack_testkit::eventually("the transfer begins", || taken.load(Relaxed) >= 4_000_000);
    let relay = scene.relay_at_work();
    scene.kill(&relay);
    let at = Instant::now();
    let before = taken.load(Relaxed);
    drop(go_on);
    assert!(client.join().expect("no panic").expect("an answer") == down, "what the server sent");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    println!("killed {relay} after {before} bytes; all was there {:?} later", at.elapsed());
    assert_eq!(scene.a.record().fate(), ("over", "overlay:c", "ok"));
    assert!(scene.status()["sessions_resumed"].as_u64() >= Some(1), "{:#}", scene.status());
    assert_ne!(scene.relay(), relay);
}

#[test]
fn many_flows_at_a_time_do_not_wait_for_each_other() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for _ in 0..1000 {
            let (mut stream, _) = listener.accept().expect("a connection");
            std::thread::spawn(move || {
                let mut reader = stream.try_clone().expect("a socket");
                std::io::copy(&mut reader, &mut stream).expect("an echo");
                // The client has sent its end: ours follows.
                stream.shutdown(Shutdown::Write).expect("a FIN");
            });
        }
    });
    let scene = Scene::new(address, DELIVER);
    let entry = scene.entry();
    // One that takes nothing of its echo: what it sends piles up, for itself only.
    let stuck = TcpStream::connect(entry).expect("a connection");
    let mut pushing = stuck.try_clone().expect("a socket");
    pushing.set_write_timeout(Some(Duration::from_millis(300))).expect("a time-out");
    // The sockets on the way, eight of them, may hold some megabytes each.
    let part = vec![7; 1_000_000];
    let pushed = (0..1000).find_map(|_| std::io::Write::write_all(&mut pushing, &part).err());
    assert!(pushed.is_some(), "back-pressure reaches the sender");
    let clients: Vec<_> = (0..100)
        .map(|number| {
            std::thread::spawn(move || {
                let bytes = random_bytes(number, 20_000);
                // Refused while a busy machine has kept hellos back: there is no path then.
                sidetrack_testkit::eventually("an echo", || match exchange(entry, &bytes) {
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => false,
                    echo => echo.expect("an echo") == bytes,
                });
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("an echo"));
}

#[test]
fn who_shows_another_key_is_no_neighbour() {
    let keys = Keys::new(&["a", "c"]);
    let c = Up::start("", &keys.section("c", &[], true));
    // The same names, other keys.
    let others = Keys::new(&["a", "c"]);
    let stranger = Up::start("", &others.section("a", &[("c", overlay_address(&c))], false));
    wait_for(&c, "a stranger", |status| status["strangers"].as_u64() > Some(0));
    assert_eq!(crate::scene::status(&c)["links"].as_array().map(Vec::len), Some(0));
    let links = &crate::scene::status(&stranger)["links"];
    assert_eq!(links.as_array().map(Vec::len), Some(0), "nor is c one to it: {links}");
    // Bytes that are not TLS at all.
    let mut garbage = TcpStream::connect(overlay_address(&c)).expect("a connection");
    garbage.write_all(&random_bytes(1, 5000)).expect("sent");
    garbage.set_read_timeout(Some(sidetrack_testkit::LIMIT)).expect("a time-out");
    let mut answer = Vec::new();
    // An alert, then the end, or a reset: in any case an end.
    let _ = garbage.read_to_end(&mut answer);
    let friend = Up::start("", &keys.section("a", &[("c", overlay_address(&c))], false));
    wait_for(&friend, "a link", |status| status["links"][0]["up"] == true);
}

/// Stops processes for a while and lets them go on.
fn starve(nodes: &[&Up], pause: Duration) {
    nodes.iter().for_each(|node| node.signal(rustix::process::Signal::STOP));
    std::thread::park_timeout(pause);
    nodes.iter().for_each(|node| node.signal(rustix::process::Signal::CONT));
}

#[test]
fn nodes_that_get_no_cpu_for_a_while_lose_neither_links_nor_flows() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut scene = Scene::new(listener.local_addr().expect("an address"), DELIVER);
    let mut held = TcpStream::connect(scene.entry()).expect("a's listener");
    let (mut far, _) = listener.accept().expect("the held flow");
    let (b1, b2) = (scene.b1.as_ref().expect("it runs"), scene.b2.as_ref().expect("it runs"));
    let pause = Duration::from_millis(1200);
    // All at a time, the near end, both relays, the far end.
    for starved in [&[&scene.a, b1, b2, &scene.c][..], &[&scene.a], &[b1, b2], &[&scene.c]] {
        starve(starved, pause);
        // At once, before anybody can have found a link again that it gave up.
        let client = TcpStream::connect(scene.entry()).expect("a's listener");
        let (mut server, _) = listener.accept().expect("the new flow");
        std::io::Write::write_all(&mut server, b"still here").expect("sent");
        client.set_read_timeout(Some(sidetrack_testkit::LIMIT)).expect("a time-out");
        let mut got = [0; 10];
        std::io::Read::read_exact(&mut &client, &mut got).expect("an orderly flow");
        assert_eq!(&got, b"still here");
    }
    std::io::Write::write_all(&mut held, b"from before").expect("sent");
    held.shutdown(Shutdown::Write).expect("ended");
    far.set_read_timeout(Some(sidetrack_testkit::LIMIT)).expect("a time-out");
    let mut got = Vec::new();
    std::io::Read::read_to_end(&mut far, &mut got).expect("the held flow goes on");
    assert_eq!(got, b"from before");
    let Scene { a, b1, b2, c, .. } = &mut scene;
    for node in [a, b1.as_mut().expect("it runs"), b2.as_mut().expect("it runs"), c] {
        let log = node.log_so_far();
        assert!(!log.contains("overlay link down"), "a link was lost:\n{log}");
    }
}
