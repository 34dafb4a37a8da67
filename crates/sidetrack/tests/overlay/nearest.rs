//! Connections to the nearest member of a group whose server can be reached: a asks b, which is near, and c, which is far.

use crate::groups::Sites;
use crate::tools::run;
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// The address of the servers of both members, and one that only c has: at b, no host of the network answers for it.
const BOTH: &str = "10.99.0.1";
const ONLY_FAR: &str = "10.99.0.2";

/// A port that both members deliver to, and one that b does not.
const PORT: u16 = 5300;
const DENIED: u16 = 5301;

/// Three sites. The listeners of a lead to the group: by these names, to these addresses.
fn sites() -> Sites {
    let group = "[[overlay.group]]\nname = \"web\"\nto = \"10.99.0.0/24\"\n";
    let listener = |name: &str, to: &str, port: u16| {
        format!(
            "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{to}:{port}\"\n"
        )
    };
    let asks = format!(
        "{group}{}{}{}[[rule]]\nname = \"web\"\ncarrier = \"overlay:nearest:web\"\n",
        listener("both", BOTH, PORT),
        listener("far", ONLY_FAR, PORT),
        listener("denied", BOTH, DENIED)
    );
    let joins = format!("{group}join = true\n[[overlay.deliver]]\nfrom = \"a\"\nto = \"10.99.0.0/24\"\n");
    let near = format!("{joins}port = [{PORT}]\n");
    let sites = Sites::with("default = \"deny\"\n", [&asks, &near, &joins]);
    for gateway in &sites.gateways {
        gateway.ip("link set lo up");
    }
    for gateway in &sites.gateways[1..] {
        gateway.ip(&format!("addr add {BOTH}/32 dev lo"));
    }
    sites.gateways[1].ip(&format!("route add {ONLY_FAR}/32 dev in"));
    sites.gateways[2].ip(&format!("addr add {ONLY_FAR}/32 dev lo"));
    sites.knows(0, &["b", "c"]);
    for relay in ["r1", "r2"] {
        run(&sites.ups[2], &["link", "set", relay, "--cost", "500"]);
    }
    eventually("b is the nearest", || sites.group(0)["nearest"] == "b");
    sites
}

/// A server in the network of a member.
fn server(at: &Node, address: &'static str, port: u16) -> TcpListener {
    let listener = at.run(move || TcpListener::bind((address, port)).expect("a port"));
    listener.set_nonblocking(true).expect("nonblocking");
    listener
}

/// Closes a server, also for children of other tests that hold a copy.
fn close(listener: TcpListener) {
    socket2::SockRef::from(&listener).shutdown(std::net::Shutdown::Both).expect("shut down");
}

fn connect(sites: &Sites, listener: &str) -> TcpStream {
    let entry: SocketAddr = sites.ups[0].addresses(listener)[0];
    let client = sites.gateways[0].run(move || TcpStream::connect(entry).expect("a's listener"));
    client.set_read_timeout(Some(LIMIT)).expect("a time-out");
    client
}

/// Connects, and expects that this server gets the connection.
fn reaches(sites: &Sites, listener: &str, server: &TcpListener) {
    let mut client = connect(sites, listener);
    let mut accepted = None;
    eventually("the server gets the connection", || {
        accepted = server.accept().ok();
        accepted.is_some()
    });
    let (mut connection, _) = accepted.expect("a connection");
    connection.write_all(b"hello").expect("sent");
    drop(connection);
    let mut words = String::new();
    client.read_to_string(&mut words).expect("the words of the server");
    assert_eq!(words, "hello");
}

#[test]
fn a_connection_goes_to_the_next_member_when_the_server_of_the_nearest_cannot_be_reached() {
    if !is_root() {
        return;
    }
    let mut sites = sites();
    let far = server(&sites.gateways[2], BOTH, PORT);
    // The server of b is closed: it refuses.
    reaches(&sites, "both", &far);
    assert_eq!(sites.ups[0].record().fate(), ("web", "overlay:nearest:web", "ok"));
    let refused = sites.ups[1].record();
    assert_eq!((refused.text("user"), refused.text("reason")), ("a", "refused"), "{refused:?}");
    assert_eq!(sites.ups[2].record().text("reason"), "ok");
    // No host answers for the address at b.
    let only = server(&sites.gateways[2], ONLY_FAR, PORT);
    reaches(&sites, "far", &only);
    assert_eq!(sites.ups[0].record().fate(), ("web", "overlay:nearest:web", "ok"));
    // Once b has a server, it gets the connections.
    let near = server(&sites.gateways[1], BOTH, PORT);
    reaches(&sites, "both", &near);
    assert_eq!(sites.ups[0].record().text("reason"), "ok");
    assert!(far.accept().is_err(), "the far server is not asked");
    // No member has a server: the record has what each of them said.
    close(near);
    close(far);
    let mut client = connect(&sites, "both");
    assert!(client.read(&mut [0; 1]).is_err(), "the connection is reset");
    let record = sites.ups[0].record();
    assert_eq!(record.fate(), ("web", "overlay:nearest:web", "refused"));
    let detail = record.text("detail");
    let (b, c) = (detail.find("b: ").expect("what b said"), detail.find("; c: ").expect("what c said"));
    assert!(b < c, "the nearest is asked first: {detail}");
}

#[test]
fn a_connection_that_the_nearest_member_denies_is_not_offered_to_the_next_one() {
    if !is_root() {
        return;
    }
    let mut sites = sites();
    let far = server(&sites.gateways[2], BOTH, DENIED);
    let mut client = connect(&sites, "denied");
    assert!(client.read(&mut [0; 1]).is_err(), "the connection is reset");
    let record = sites.ups[0].record();
    assert_eq!(record.fate(), ("web", "overlay:nearest:web", "policy_denied"));
    assert!(record.text("detail").contains("overlay:nearest:web: b: "), "{record:?}");
    assert!(far.accept().is_err(), "the far server is not asked");
}
