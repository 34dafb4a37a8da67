//! Connections that the kernel carries from their SYN on: whole streams, exact records, every end.

use crate::node::peers::{Client, visit};
use crate::node::{Dice, admin};
use crate::site::{ENGINE, ENGINE6, Site, engine_by};
use crate::tools::tool;
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually, is_root};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;

/// Bytes of a stream each way.
const BULK: usize = 6_000_000;

fn to(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

/// A listener whose connections the kernel may carry.
fn carrying(count: u32, lines: &str) -> String {
    engine_by("xdp", lines)
        .replace("io = \"xdp\"", &format!("io = \"xdp\", kernel_connections_max = {count}"))
}

/// A connection that the kernel carries, and that is shown as a flow in flight.
fn carried(site: &Site) -> (Client, u64) {
    let client = site.line.client.run(|| {
        let mut client = Client::connect(to(ENGINE)).expect("greeted");
        client.echo(&[1; 2000]).expect("echoed");
        client
    });
    eventually("it is shown", || {
        let flows = admin::flows(site.up.as_ref().expect("started"));
        flows.first().is_some_and(|flow| flow.flag("shunted") && flow.number("bytes_up") == 2000)
    });
    let id = admin::flows(site.up.as_ref().expect("started"))[0].number("flow");
    (client, id)
}

#[test]
fn whole_streams_pass_and_are_counted() {
    if !is_root() {
        return;
    }
    for (engine_at, server_ip) in [(ENGINE, "10.0.2.1"), (ENGINE6, "fd00:2::1")] {
        let mut site = Site::taking_frames();
        let (tell, told) = channel();
        let enter = site.enter_server();
        let server = std::thread::spawn(move || {
            enter();
            let listener = TcpListener::bind((server_ip, 0)).expect("bound");
            tell.send(listener.local_addr().expect("an address")).expect("the test waits");
            loop {
                let (mut stream, _) = listener.accept().expect("a client");
                let mut all = Vec::new();
                stream.read_to_end(&mut all).expect("everything");
                all.reverse();
                stream.write_all(&all).expect("sent");
                if all.len() == BULK {
                    return;
                }
            }
        });
        let address = told.recv().expect("a server");
        site.start("", &carrying(64, &format!("to = \"{address}\"")));
        let there_and_back = move |bytes: Vec<u8>| {
            let mut stream = TcpStream::connect_timeout(&to(engine_at), LIMIT).expect("connected");
            stream.set_read_timeout(Some(LIMIT)).expect("limit");
            stream.write_all(&bytes).expect("sent");
            stream.shutdown(Shutdown::Write).expect("half closed");
            let mut back = Vec::new();
            stream.read_to_end(&mut back).expect("everything");
            back.reverse();
            assert!(back == bytes, "{} of {} bytes came back", back.len(), bytes.len());
        };
        for _ in 0..3 {
            site.line.client.run(move || there_and_back(b"teaches".to_vec()));
            assert_eq!(site.record().number("bytes_down"), 7);
        }
        site.line.client.run(move || there_and_back(Dice(9).bytes(BULK)));
        let record = site.record();
        assert_eq!((record.text("reason"), record.flag("shunted")), ("ok", true), "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (BULK as u64, BULK as u64));
        server.join().expect("no panic");
    }
}

#[test]
fn ends_have_their_reasons() {
    if !is_root() {
        return;
    }
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    site.start("", &carrying(64, &format!("to = \"{}\"", server.address)));
    let record = site.until_carried(ENGINE);
    assert_eq!((record.text("listener"), record.address("orig_dst")), ("engine", server.address));
    // By reset of the client.
    let (client, _) = carried(&site);
    let stream = client.into_stream();
    rustix::net::sockopt::set_socket_linger(&stream, Some(std::time::Duration::ZERO))
        .expect("a reset at the end");
    drop(stream);
    assert_eq!(site.record().text("reason"), "client_reset");
    // By hand.
    let (mut client, id) = carried(&site);
    let (status, body) = admin::ask(site.up.as_ref().expect("started"), "DELETE", &format!("/v1/flows/{id}"));
    assert!(status < 300, "{status} {body}");
    let record = site.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("killed", 2000));
    assert!(client.echo(b"x").is_err(), "reset");
    // With the program.
    let (mut client, _) = carried(&site);
    let (status, records) = site.up.take().expect("started").stop();
    assert!(status.success(), "{status}");
    assert_eq!(records.last().map(|record| record.text("reason")), Some("shutdown"));
    assert!(client.echo(b"x").is_err(), "reset");
}

#[test]
fn what_says_nothing_is_ended() {
    if !is_root() {
        return;
    }
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let limits = "default = \"direct\"\n[limits]\nidle_timeout_ms = 1500\n";
    site.start(limits, &carrying(64, &format!("to = \"{}\"", server.address)));
    site.until_carried(ENGINE);
    let error = site.line.client.run(|| {
        let mut stream = Client::connect(to(ENGINE)).expect("greeted").into_stream();
        stream.set_read_timeout(Some(LIMIT)).expect("limit");
        stream.read(&mut [0; 1]).expect_err("a reset").kind()
    });
    assert_eq!(error, io::ErrorKind::ConnectionReset);
    let record = site.record();
    assert_eq!((record.text("reason"), record.flag("shunted")), ("idle", true));
}

#[test]
fn other_rules_hold_for_the_next_flow_and_limits_keep_flows_in_user_space() {
    if !is_root() {
        return;
    }
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let lines = carrying(64, &format!("to = \"{}\"", server.address));
    site.start("default = \"direct\"\n", &lines);
    site.until_carried(ENGINE);
    let deny = "\n[[rule]]\nname = \"no\"\naction = \"deny\"\nmatch = { from = \"10.0.1.1\" }\n";
    site.up.as_ref().expect("started").reload("default = \"direct\"\n", &format!("{lines}{deny}"));
    eventually("it is refused", || site.line.client.run(|| Client::connect(to(ENGINE)).is_err()));
    // What was open then passes away first.
    let mut record = site.record();
    while record.text("reason") == "ok" || record.text("reason") == "client_reset" {
        record = site.record();
    }
    assert_eq!((record.text("rule"), record.text("reason")), ("no", "policy_denied"));

    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let limits = "default = \"direct\"\n[limits]\nmax_flows_per_client = 5\n";
    site.start(limits, &carrying(64, &format!("to = \"{}\"", server.address)));
    for _ in 0..6 {
        site.line.client.run(|| visit(to(ENGINE), b"counted"));
        assert!(!site.record().flag("shunted"));
    }
}

#[test]
fn without_gro_at_the_other_end_flows_stay_in_user_space() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &carrying(64, &format!("to = \"{}\"", server.address)));
    let stay = |site: &mut Site| {
        for _ in 0..8 {
            site.line.client.run(|| visit(to(ENGINE), b"teaches"));
            let record = site.record();
            assert_eq!((record.text("reason"), record.flag("shunted")), ("ok", false), "{record:?}");
        }
    };
    stay(&mut site);
    // It was looked at before the node was ready.
    let log = site.up.as_mut().expect("started").log_so_far();
    assert_eq!(log.matches("offload is off for interface").count(), 2, "{log}");
    let switch = |site: &Site, word: &'static str| {
        for host in [&site.line.client, &site.line.server] {
            host.run(move || tool("ethtool", &format!("-K eth0 gro {word}")));
        }
    };
    switch(&site, "on");
    site.until_carried(ENGINE);
    switch(&site, "off");
    eventually("it is noticed", || {
        let log = site.up.as_mut().expect("started").log_so_far();
        log.matches("offload is off for interface").count() == 4
    });
    stay(&mut site);
}

#[test]
fn what_the_kernel_has_no_room_for_stays_with_us() {
    if !is_root() {
        return;
    }
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    site.start("", &carrying(1, &format!("to = \"{}\"", server.address)));
    site.until_carried(ENGINE);
    let mut clients: Vec<_> =
        (0..3).map(|_| site.line.client.run(|| Client::connect(to(ENGINE)).expect("greeted"))).collect();
    for client in &mut clients {
        client.echo(b"room").expect("echoed");
    }
    for client in clients {
        client.close().expect("closed in order");
        assert_eq!(site.record().text("reason"), "ok");
    }
}

#[test]
fn nothing_is_left_when_the_program_is_killed() {
    if !is_root() {
        return;
    }
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let before = site.line.router.run(crate::node::traces::Traces::now);
    site.start("", &carrying(64, &format!("to = \"{}\"", server.address)));
    site.until_carried(ENGINE);
    let (mut client, _) = carried(&site);
    let mut up = site.up.take().expect("started");
    up.signal(Signal::KILL);
    up.gone();
    site.line.router.run(move || {
        sidetrack_testkit::eventually("nothing is left", || crate::node::traces::Traces::now() == before);
    });
    assert!(client.echo(b"x").is_err(), "reset");
}
