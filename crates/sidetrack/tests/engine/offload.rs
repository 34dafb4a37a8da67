//! After the decision the kernel carries on: streams stay whole while it takes over, and records, ends and
//! time-outs are those of flows that stay with us.

use crate::node::peers::Client;
use crate::node::{Dice, Record, admin};
use crate::site::{ENGINE, ENGINE6, Site, WAYS, engine_by};
use crate::tools::tool;
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually, is_root};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// Bytes of each stream.
const BULK: usize = 24_000_000;

fn to(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect_timeout(&to(address), LIMIT).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).expect("limit");
    stream.set_write_timeout(Some(LIMIT)).expect("limit");
    stream
}

/// A server on the server's host that serves this number of connections as `serve` says; its address.
fn serve(
    site: &Site,
    ip: &'static str,
    count: usize,
    serve: impl Fn(TcpStream) + Send + Sync + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    let (tell, told) = channel();
    let enter = site.enter_server();
    let thread = std::thread::spawn(move || {
        enter();
        let listener = TcpListener::bind((ip, 0)).expect("bound");
        tell.send(listener.local_addr().expect("an address")).expect("the test waits");
        std::thread::scope(|scope| {
            for _ in 0..count {
                let (stream, _) = listener.accept().expect("a client");
                stream.set_read_timeout(Some(LIMIT)).expect("limit");
                scope.spawn(|| serve(stream));
            }
        });
    });
    (told.recv().expect("a server"), thread)
}

/// The listener of an engine that offloads at most this many connections.
fn offloading(io: &str, connections_max: u32, lines: &str) -> String {
    let io_is = format!("io = \"{io}\"");
    engine_by(io, lines).replace(&io_is, &format!("{io_is}, offload_max = {connections_max}"))
}

fn assert_carried(record: &Record, up: u64, down: u64) {
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (up, down), "{record:?}");
    assert!(record.flag("shunted"), "the kernel passed on nothing: {record:?}");
}

/// A stream down, whose length the client says, and one up.
fn both_ways(mut stream: TcpStream) {
    let mut first = [0];
    stream.read_exact(&mut first).expect("a word");
    if first == *b"d" {
        stream.write_all(&Dice(3).bytes(BULK)).expect("sent");
        return;
    }
    let mut all = vec![];
    stream.read_to_end(&mut all).expect("everything");
    let whole = all == Dice(4).bytes(BULK);
    stream.write_all(if whole { b"whole" } else { b"other" }).expect("sent");
}

#[test]
fn streams_are_whole_while_the_kernel_takes_over() {
    if !is_root() {
        return;
    }
    let families = [(ENGINE, "10.0.2.1"), (ENGINE6, "fd00:2::1")];
    for (io, (engine_at, ip)) in WAYS.into_iter().flat_map(|io| families.map(|family| (io, family))) {
        let mut site = Site::taking_frames();
        let (address, server) = serve(&site, ip, 4, both_ways);
        site.start("", &offloading(io, 65_536, &format!("to = \"{address}\"")));
        site.be_patient();
        for _ in 0..2 {
            site.line.client.run(move || {
                let mut stream = connect(engine_at);
                stream.write_all(b"d").expect("sent");
                let mut all = Vec::new();
                stream.read_to_end(&mut all).expect("everything");
                assert!(all == Dice(3).bytes(BULK), "{} bytes, or others", all.len());
            });
            assert_carried(&site.record(), 1, BULK as u64);
            site.line.client.run(move || {
                let mut stream = connect(engine_at);
                stream.write_all(b"u").expect("sent");
                stream.write_all(&Dice(4).bytes(BULK)).expect("sent");
                stream.shutdown(Shutdown::Write).expect("half closed");
                let mut answer = String::new();
                stream.read_to_string(&mut answer).expect("an answer");
                assert_eq!(answer, "whole");
            });
            assert_carried(&site.record(), BULK as u64 + 1, 5);
        }
        server.join().expect("no panic");
    }
}

/// A connection that has exchanged so much that the kernel has it.
fn carried(site: &Site) -> Client {
    let client = site.line.client.run(|| {
        let mut client = Client::connect(to(ENGINE)).expect("greeted");
        for number in 0..64_u8 {
            client.echo(&[number; 2000]).expect("echoed");
        }
        client
    });
    eventually("the kernel has it", || {
        admin::flows(site.up.as_ref().expect("started")).first().is_some_and(|flow| flow.flag("shunted"))
    });
    client
}

const ECHOED: u64 = 64 * 2000;

#[test]
fn ends_are_what_they_are_without() {
    if is_root() {
        WAYS.into_iter().for_each(ends_are_what_they_are_without_by);
    }
}

fn ends_are_what_they_are_without_by(io: &str) {
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    site.start("", &offloading(io, 65_536, &format!("to = \"{}\"", server.address)));
    // In order.
    let client = carried(&site);
    let down = client.greeting_bytes() + ECHOED;
    client.close().expect("closed in order");
    let record = site.record();
    assert_eq!(record.text("reason"), "ok");
    assert_carried(&record, ECHOED, down);
    // By reset.
    let client = carried(&site);
    let stream = client.into_stream();
    rustix::net::sockopt::set_socket_linger(&stream, Some(std::time::Duration::ZERO))
        .expect("a reset at the end");
    drop(stream);
    let record = site.record();
    assert_eq!(record.text("reason"), "client_reset");
    assert_carried(&record, ECHOED, down);
    // By hand.
    let mut client = carried(&site);
    let up = site.up.as_ref().expect("started");
    let id = admin::flows(up)[0].number("flow");
    let (status, body) = admin::ask(up, "DELETE", &format!("/v1/flows/{id}"));
    assert!(status < 300, "{status} {body}");
    let record = site.record();
    assert_eq!(record.text("reason"), "killed");
    assert_carried(&record, ECHOED, down);
    assert!(client.echo(b"x").is_err(), "reset");
    // With the program.
    let mut client = carried(&site);
    let (_, records) = site.up.take().expect("started").stop();
    assert_eq!(records.last().map(|record| record.text("reason")), Some("shutdown"));
    assert!(client.echo(b"x").is_err(), "reset");
}

#[test]
fn a_server_that_resets_and_one_that_says_nothing_more() {
    if is_root() {
        WAYS.into_iter().for_each(a_server_that_resets_and_one_that_says_nothing_more_by);
    }
}

fn a_server_that_resets_and_one_that_says_nothing_more_by(io: &str) {
    let mut site = Site::taking_frames();
    let (address, server) = serve(&site, "10.0.2.1", 2, |mut stream| {
        let mut word = [0; 1000];
        for _ in 0..40 {
            stream.read_exact(&mut word).expect("a word");
            stream.write_all(&word).expect("an answer");
        }
        if word[0] == b'r' {
            rustix::net::sockopt::set_socket_linger(&stream, Some(std::time::Duration::ZERO))
                .expect("a reset");
        } else {
            // Until the engine ends it.
            let _ = stream.read(&mut word);
        }
    });
    site.start(
        "default = \"direct\"\n[limits]\nidle_timeout_ms = 1500\n",
        &offloading(io, 65_536, &format!("to = \"{address}\"")),
    );
    for (word, reason) in [(b'r', "server_reset"), (b's', "idle")] {
        let error = site.line.client.run(move || {
            let mut stream = connect(ENGINE);
            let mut back = [0; 1000];
            for _ in 0..40 {
                stream.write_all(&[word; 1000]).expect("sent");
                stream.read_exact(&mut back).expect("an answer");
            }
            stream.read(&mut back).expect_err("a reset").kind()
        });
        assert_eq!(error, io::ErrorKind::ConnectionReset);
        let record = site.record();
        assert_eq!(record.text("reason"), reason);
        assert_carried(&record, 40_000, 40_000);
    }
    server.join().expect("no panic");
}

#[test]
fn nothing_is_left_of_it_when_the_program_is_killed() {
    if is_root() {
        WAYS.into_iter().for_each(nothing_is_left_of_it_when_the_program_is_killed_by);
    }
}

fn nothing_is_left_of_it_when_the_program_is_killed_by(io: &str) {
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let before = site.line.router.run(crate::node::traces::Traces::now);
    site.start("", &offloading(io, 65_536, &format!("to = \"{}\"", server.address)));
    let mut client = carried(&site);
    let mut up = site.up.take().expect("started");
    up.signal(Signal::KILL);
    up.gone();
    site.line.router.run(move || {
        sidetrack_testkit::eventually("nothing is left", || crate::node::traces::Traces::now() == before);
    });
    // Its packets come to the host's own TCP now, which knows of no such connection.
    assert!(client.echo(b"x").is_err(), "reset");
}

#[test]
fn what_the_kernel_has_no_room_for_stays_with_us() {
    if is_root() {
        WAYS.into_iter().for_each(what_the_kernel_has_no_room_for_stays_with_us_by);
    }
}

fn what_the_kernel_has_no_room_for_stays_with_us_by(io: &str) {
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let tables = offloading(io, 1, &format!("to = \"{}\"", server.address));
    site.start("", &tables);
    let first = carried(&site);
    let second = site.line.client.run(|| {
        let mut client = Client::connect(to(ENGINE)).expect("greeted");
        for number in 0..64_u8 {
            client.echo(&[number; 2000]).expect("echoed");
        }
        client
    });
    second.close().expect("closed in order");
    assert!(!site.record().flag("shunted"));
    first.close().expect("closed in order");
    assert!(site.record().flag("shunted"));
}

/// Reads a request of 40 bytes, whose first says who closes first, and answers with 5000.
fn answer(mut stream: TcpStream) {
    let mut request = [0; 40];
    stream.read_exact(&mut request).expect("a request");
    stream.write_all(&Dice(5).bytes(5000)).expect("an answer");
    if request[0] == b's' {
        stream.shutdown(Shutdown::Write).expect("half closed");
    }
    stream.read_to_end(&mut Vec::new()).expect("the client's end");
}

/// Asks and reads the answer; the client closes first if the word says so.
fn ask(mut stream: TcpStream, closes_first: u8) {
    stream.write_all(&[closes_first; 40]).expect("sent");
    let mut back = vec![0; 5000];
    stream.read_exact(&mut back).expect("an answer");
    if closes_first == b'c' {
        stream.shutdown(Shutdown::Write).expect("half closed");
    }
    stream.read_to_end(&mut back).expect("the server's end");
    assert!(back == Dice(5).bytes(5000), "{} bytes, or others", back.len());
}

/// The listener whose connections XDP has from their first bytes on, or but for these from their SYN on.
fn by_xdp(address: SocketAddr, answers: bool) -> String {
    let cookies = if answers { "syn_cookies = \"xdp\", " } else { "" };
    let choose = format!("engine = {{ {cookies}choose = [{{ prefix = \"s\", to = \"{address}\" }}],");
    offloading("xdp", 64, &format!("to = \"{address}\"")).replace("engine = {", &choose)
}

#[test]
fn xdp_has_a_connection_from_its_first_bytes_to_its_end() {
    if !is_root() {
        return;
    }
    let families = [(ENGINE, "10.0.2.1"), (ENGINE6, "fd00:2::1")];
    for (answers, (engine_at, ip)) in
        [false, true].into_iter().flat_map(|answers| families.map(|family| (answers, family)))
    {
        let mut site = Site::taking_frames();
        let (address, server) = serve(&site, ip, 40, answer);
        site.start("", &by_xdp(address, answers));
        for closes_first in [b's', b'c'].repeat(20) {
            site.line.client.run(move || ask(connect(engine_at), closes_first));
            let record = site.record();
            assert_eq!(record.text("reason"), "ok", "{record:?}");
            assert_carried(&record, 40, 5000);
        }
        server.join().expect("no panic");
        // The way to the server is learnt from an answer; later ones need no process here, unless they are late.
        assert!(site.answered_by_xdp() >= 30);
    }
}

#[test]
fn a_client_that_comes_back_by_the_same_port_is_served_where_xdp_answers() {
    if !is_root() {
        return;
    }
    let mut site = Site::taking_frames();
    let (address, server) = serve(&site, "10.0.2.1", 3, answer);
    site.start("", &by_xdp(address, true));
    for _ in 0..3 {
        site.line.client.run(|| {
            let socket =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
            socket.set_reuse_address(true).expect("set");
            socket.bind(&to("10.0.1.1:4444").into()).expect("bound");
            socket.connect_timeout(&to(ENGINE).into(), LIMIT).expect("connected");
            let stream = TcpStream::from(socket);
            stream.set_read_timeout(Some(LIMIT)).expect("limit");
            // The server closes first, so that the client need not wait; the engine still remembers it.
            ask(stream, b's');
        });
        assert_eq!(site.record().text("reason"), "ok");
    }
    server.join().expect("no panic");
}

/// An end of a veth drops what XDP redirects to it unless the other end has GRO.
#[test]
fn without_gro_at_the_other_end_connections_stay_in_user_space() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    let listen = offloading("xdp", 65_536, &format!("to = \"{}\"", server.address));
    site.start("", &listen);
    let exchange = |site: &Site| {
        site.line.client.run(|| {
            let mut client = Client::connect(to(ENGINE)).expect("greeted");
            for number in 0..16_u8 {
                client.echo(&[number; 2000]).expect("echoed");
            }
        });
    };
    exchange(&site);
    let record = site.record();
    assert_eq!(record.text("reason"), "ok");
    assert!(!record.flag("shunted"), "{record:?}");
    let up = site.up.as_mut().expect("started");
    // It was looked at before the node was ready.
    let log = up.log_so_far();
    let line = log.lines().find(|line| line.contains("offload is off for interface"));
    assert!(line.is_some_and(|line| line.contains("ethtool -K <interface> gro on")), "{log}");
    // With GRO new connections are offloaded.
    let switch = |site: &Site, word: &'static str| {
        for host in [&site.line.client, &site.line.server] {
            host.run(move || tool("ethtool", &format!("-K eth0 gro {word}")));
        }
    };
    let mut early = site.line.client.run(|| Client::connect(to(ENGINE)).expect("greeted"));
    early.echo(&[5; 2000]).expect("echoed");
    switch(&site, "on");
    // So is one that began before.
    eventually("the earlier connection is offloaded", || {
        early.echo(&[6; 2000]).expect("echoed");
        admin::flows(site.up.as_ref().expect("started")).first().is_some_and(|flow| flow.flag("shunted"))
    });
    drop(early);
    assert_eq!(site.record().text("reason"), "ok");
    eventually("a connection is offloaded", || {
        exchange(&site);
        site.record().flag("shunted")
    });
    // Without it an offloaded connection comes back, and goes on.
    let mut client = carried(&site);
    switch(&site, "off");
    client.echo(&[7; 20_000]).expect("echoed");
    drop(client);
    assert_eq!(site.record().text("reason"), "ok");
}
