//! Links that lose packets, on both sides: streams stay byte-exact, with payload changed on the way and without, and nothing
//! gets stuck.

use crate::node::Dice;
use crate::site::{ENGINE, Site, WAYS, engine_by};
use crate::tools::tool;
use sidetrack_testkit::{LIMIT, Node, is_root};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};

/// Connections at a time, and rounds of them.
const AT_ONCE: u64 = 12;
const ROUNDS: u64 = 2;

/// Three of a hundred packets that come in are lost.
fn lose(host: &Node) {
    host.run(|| {
        tool("nft", "add table netdev loss");
        tool("nft", "add chain netdev loss in { type filter hook ingress device eth0 priority 0 ; }");
        tool("nft", "add rule netdev loss in numgen random mod 100 < 3 drop");
    });
}

/// Sends random bytes, of a random number, and gives what the echo should be and what it was.
fn exchange(seed: u64, grown: bool) -> (Vec<u8>, Vec<u8>) {
    let mut dice = Dice(seed);
    let length = 1 + dice.below(60_000);
    let sent = dice.bytes(length);
    let expected = if grown {
        sent.iter().flat_map(|byte| if *byte == b'x' { vec![b'y'; 3] } else { vec![*byte] }).collect()
    } else {
        sent.clone()
    };
    let stream = TcpStream::connect_timeout(&ENGINE.parse().expect("an address"), LIMIT).expect("connected");
    stream.set_read_timeout(Some(LIMIT)).expect("limit");
    let mut reading = BufReader::new(stream.try_clone().expect("a copy"));
    // Every other begins with little, which fits into the frame of a SYN-ACK, and goes on when it was greeted.
    let first = if seed.is_multiple_of(2) { 0 } else { length.min(1 + dice.below(150)) };
    if first > 0 {
        (&stream).write_all(&sent[..first]).expect("sent");
        reading.read_line(&mut String::new()).expect("greeted");
    }
    let writer = std::thread::spawn(move || {
        for piece in sent[first..].chunks(1 + dice.below(9000)) {
            (&stream).write_all(piece).expect("sent");
        }
        stream.shutdown(Shutdown::Write).expect("half closed");
    });
    if first == 0 {
        reading.read_line(&mut String::new()).expect("greeted");
    }
    let mut echo = Vec::new();
    reading.read_to_end(&mut echo).expect("the whole echo");
    writer.join().expect("no panic");
    (expected, echo)
}

/// `more`: further keys of the engine.
fn all(way: &str, more: &str, grown: bool) {
    let mut site = Site::taking_frames();
    let server = site.server("10.0.2.1");
    let chain = "\n[function.grow]\nkind = \"replace\"\ndirection = \"up\"\nreplace = [{ find = \"x\", with = \"yyy\" }]\n\
                 [[rule]]\nname = \"grown\"\ncarrier = \"direct\"\nchain = [\"grow\"]\n";
    let mut tables =
        engine_by(way, &format!("to = \"{}\"{}", server.address, if grown { chain } else { "" }));
    tables = tables.replace("engine = {", &format!("engine = {{ {more}"));
    site.start(if grown { "default = \"direct\"\n" } else { "" }, &tables);
    let carries = more.contains("kernel_connections_max");
    if carries {
        // Otherwise all flows of a round may come before the decision.
        site.until_carried(ENGINE);
    }
    lose(&site.line.client);
    lose(&site.line.server);
    for round in 0..ROUNDS {
        site.line.client.run(move || {
            let enter = sidetrack_sys::netns::NetNs::current().expect("this host's namespace");
            std::thread::scope(|scope| {
                let ask = |number| {
                    let enter = &enter;
                    scope.spawn(move || {
                        enter.enter().expect("entered");
                        exchange(round * AT_ONCE + number, grown)
                    })
                };
                let threads: Vec<_> = (0..AT_ONCE).map(ask).collect();
                for thread in threads {
                    let (expected, echo) = thread.join().expect("no panic");
                    assert!(expected == echo, "{} of {} bytes, or others", echo.len(), expected.len());
                }
            });
        });
    }
    let mut carried = 0;
    for _ in 0..AT_ONCE * ROUNDS {
        let record = site.record();
        assert_eq!(record.text("reason"), "ok");
        carried += u64::from(record.flag("shunted"));
    }
    assert!(!carries || carried > 0);
    assert!(!more.contains("choose") || site.answered_by_xdp() > 0);
}

#[test]
fn streams_are_whole_when_packets_are_lost() {
    if is_root() {
        WAYS.into_iter().for_each(|way| all(way, "", false));
    }
}

#[test]
fn changed_streams_are_whole_when_packets_are_lost() {
    if is_root() {
        all("packet", "", true);
    }
}

#[test]
fn streams_that_the_kernel_takes_over_are_whole_when_packets_are_lost() {
    if is_root() {
        WAYS.into_iter().for_each(|way| all(way, "offload_max = 65536,", false));
    }
}

#[test]
fn streams_whose_first_bytes_xdp_sends_are_whole_when_packets_are_lost() {
    if is_root() {
        // Bytes that begin none of these protocols: all wait for their first bytes and go where they would go without.
        all("xdp", "offload_max = 65536, choose = [{ prefix = \"nobody\", to = \"10.0.2.1:1\" }],", false);
    }
}

#[test]
fn streams_that_the_kernel_carries_whole_are_whole_when_packets_are_lost() {
    if is_root() {
        all("xdp", "kernel_connections_max = 64,", false);
    }
}
