//! Hand-overs while packets are lost on both sides.

use crate::node::Up;
use crate::node::admin::{ask, flows as running};
use crate::{NO_PINS, RULE, address, on_the_wire};
use sidetrack_testkit::streams::{both_ways, exchange};
use sidetrack_testkit::{Line, Node, eventually, is_root};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Flows that are there at the same time.
const AT_A_TIME: usize = 4;

/// Bytes of each direction of a flow.
const BYTES: u64 = 3_000_000;

/// Flows of the test. `SIDETRACK_HANDOVERS=10000` takes some minutes.
fn flows() -> usize {
    std::env::var("SIDETRACK_HANDOVERS").ok().and_then(|text| text.parse().ok()).unwrap_or(48)
}

/// One packet of a hundred that come to this host is lost.
fn loses(node: &Node) {
    node.run(|| {
        let rules = "add table inet loss; \
                     add chain inet loss in { type filter hook prerouting priority -300; }; \
                     add rule inet loss in ip protocol tcp numgen random mod 100 < 1 drop";
        sidetrack_testkit::nft(rules).expect("rules");
    });
}

/// Flows with both directions busy go to the wire: every byte arrives, each flow ends in order, and each record has every byte.
fn with_loss(listen: &str, door: Option<&str>) {
    if !is_root() {
        return;
    }
    let line = Line::new();
    loses(&line.client);
    loses(&line.server);
    let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = address(&listener);
    let door: SocketAddr = door.map_or(to, |door| door.parse().expect("an address"));
    let tables = format!("{NO_PINS}{}{RULE}", listen.replace('@', &to.to_string()));
    let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let all = flows();
    let server = std::thread::spawn(move || {
        let ends = (0..all).map(|_| {
            let (end, _) = listener.accept().expect("accepted");
            std::thread::spawn(move || exchange(end, [2, 1], BYTES))
        });
        ends.collect::<Vec<_>>().into_iter().map(|end| end.join().expect("the server")).collect::<Vec<_>>()
    });
    for _ in 0..all / AT_A_TIME {
        let ends = line.client.run(move || {
            (0..AT_A_TIME).map(|_| TcpStream::connect(door).expect("connected")).collect::<Vec<_>>()
        });
        let ends: Vec<_> =
            ends.into_iter().map(|end| std::thread::spawn(move || exchange(end, [1, 2], BYTES))).collect();
        for end in ends {
            assert_eq!(end.join().expect("the client"), [BYTES; 2]);
        }
    }
    assert_eq!(server.join().expect("the server"), vec![[BYTES; 2]; all]);
    let records: Vec<_> = (0..all).map(|_| up.record()).collect();
    for record in &records {
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (BYTES, BYTES), "{record:?}");
    }
    let taken = records.iter().filter(|record| record.0["shunted"] == true).count();
    assert!(taken > 0, "none of {all} went to the wire");
    println!("{taken} of {all} flows went to the wire");
    assert!(up.stop().0.success());
}

#[test]
fn a_port_for_a_server_with_loss() {
    let listen = "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"@\"\n";
    with_loss(listen, Some("10.0.1.254:80"));
}

#[test]
fn redirect_with_loss() {
    let listen = "[[listen]]\nname = \"router\"\nkind = \"redirect\"\nlocal = false\nforwarded = true\n\
                  interfaces = [\"to-client\"]\n";
    with_loss(listen, None);
}

/// Hosts have bytes with holes when their flow comes back: they keep what they have, or forget it and get it again.
#[test]
fn flows_come_back_with_loss() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    loses(&line.client);
    loses(&line.server);
    let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = address(&listener);
    let tables = format!(
        "{NO_PINS}[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"{to}\"\n{RULE}"
    );
    let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    for _ in 0..8 {
        let client = line.client.run(|| TcpStream::connect("10.0.1.254:80").expect("connected"));
        let server = listener.accept().expect("accepted").0;
        let enough = Arc::new(AtomicBool::new(false));
        let (of_client, of_server) = (enough.clone(), enough.clone());
        // Slow enough that our sockets are nearly empty on any machine.
        let pause = Some(Duration::from_millis(5));
        let client = std::thread::spawn(move || both_ways(client, [1, 2], &of_client, pause));
        let server = std::thread::spawn(move || both_ways(server, [2, 1], &of_server, pause));
        let then = on_the_wire(&up);
        let (status, body) = ask(&up, "POST", &format!("/v1/flows/{}/back", then.number("flow")));
        assert_eq!(status, 200, "{body}");
        eventually("its sockets carry more", || {
            let Some(now) = running(&up).pop() else { panic!("it has ended: {:?}", up.record()) };
            ["bytes_up", "bytes_down"].iter().all(|key| now.number(key) > then.number(key) + 500_000)
        });
        enough.store(true, Relaxed);
        let [sent, received] = client.join().expect("the client");
        assert_eq!(server.join().expect("the server"), [received, sent]);
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (sent, received), "{record:?}");
    }
}
