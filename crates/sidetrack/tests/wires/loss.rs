//! Hand-overs while packets are lost on both sides.

use crate::node::Up;
use crate::{NO_PINS, RULE, address};
use sidetrack_testkit::streams::exchange;
use sidetrack_testkit::{Line, Node, is_root};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// Flows that are there at the same time.
const AT_A_TIME: usize = 2;

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
