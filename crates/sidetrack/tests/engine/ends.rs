//! How connections end, and what is left behind.

use crate::node::peers::{Client, visit};
use crate::node::{Dice, Record, admin, ended_by};
use crate::site::{ENGINE, Site, WAYS, engine, engine_by};
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually, is_root};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};

fn to(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

/// Connects, sends a byte, and gives the error that comes back, which may be before connect(2) returns.
fn refused() -> io::ErrorKind {
    let ask = || {
        let mut stream = TcpStream::connect_timeout(&to(ENGINE), LIMIT)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(b"x")?;
        stream.read(&mut [0; 1])
    };
    match ask() {
        Ok(count) => panic!("{count} bytes from nobody"),
        Err(error) => error.kind(),
    }
}

#[test]
fn a_server_that_refuses_and_one_that_is_not_there() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    // A port that is bound and never listens.
    let enter = site.enter_server();
    let closed = std::thread::spawn(move || {
        enter();
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)
            .and_then(|socket| socket.bind(&to("10.0.2.1:0").into()).map(|()| socket))
            .expect("bound")
    });
    let closed = closed.join().expect("no panic");
    let address = closed.local_addr().expect("an address").as_socket().expect("an IP address");
    let rules = "default = \"direct\"\n[limits]\nconnect_timeout_ms = 1500\n";
    site.start(rules, &engine(&format!("to = \"{address}\"")));
    assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset);
    let record = site.record();
    assert_eq!(record.text("reason"), "refused");
    assert_eq!(record.address("orig_dst"), address);
    drop(closed);

    let mut site = Site::new();
    site.start(rules, &engine("to = \"10.0.2.77:9\""));
    assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset);
    let reason = site.record().text("reason").to_owned();
    assert!(["connect_timeout", "unreachable"].contains(&&*reason), "{reason}");
}

#[test]
fn a_server_without_a_route_is_unreachable_at_once() {
    if is_root() {
        for way in WAYS {
            for server in ["10.9.9.9:80", "[fd00:9::9]:80"] {
                without_a_route(way, server);
            }
        }
    }
}

fn without_a_route(way: &str, server: &str) {
    let mut site = Site::new();
    // The time-out is longer than the test waits: what ends the flow is the missing route.
    let rules = "default = \"direct\"\n[limits]\nconnect_timeout_ms = 600000\n";
    site.start(rules, &engine_by(way, &format!("to = \"{server}\"")));
    assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset, "{way} {server}");
    assert_eq!(site.record().text("reason"), "unreachable", "{way} {server}");
    nothing_was_lost(&mut site);
}

#[test]
fn a_server_whose_neighbour_is_silent_is_unreachable() {
    if is_root() {
        for way in WAYS {
            for server in ["10.0.2.77:9", "[fd00:2::77]:9"] {
                silent_neighbour(way, server);
            }
        }
    }
}

/// No host has the server's address, so no host answers the kernel's ARP request or neighbour solicitation.
fn silent_neighbour(way: &str, server: &str) {
    let mut site = Site::new();
    // The connect time-out is longer than the test waits: only the neighbour's failure can end the flows.
    let rules = "default = \"direct\"\n[limits]\nconnect_timeout_ms = 600000\n";
    site.start(rules, &engine_by(way, &format!("to = \"{server}\"")));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let enter = crate::site::enter(&site.line.client);
            std::thread::spawn(move || {
                enter();
                refused()
            })
        })
        .collect();
    for client in clients {
        assert_eq!(client.join().expect("no panic"), io::ErrorKind::ConnectionReset, "{way} {server}");
        assert_eq!(site.record().text("reason"), "unreachable", "{way} {server}");
    }
    nothing_was_lost(&mut site);
}

#[test]
fn a_router_that_says_unreachable_ends_the_flow() {
    if is_root() {
        for way in WAYS {
            for server in ["10.9.9.9:80", "[fd00:9::9]:80"] {
                told_by_a_router(way, server);
            }
        }
    }
}

/// The server's host is the next hop, and has no route further on: it answers with an ICMP error.
fn told_by_a_router(way: &str, server: &str) {
    let mut site = Site::new();
    site.line.router.ip("route add 10.9.9.0/24 via 10.0.2.1");
    site.line.router.ip("route add fd00:9::/64 via fd00:2::1");
    site.line.server.ip("route add unreachable 10.9.9.0/24");
    site.line.server.ip("route add unreachable fd00:9::/64");
    site.line.server.run(|| {
        for setting in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            sidetrack_sys::sysctl::write(setting, "1").expect("forwarding");
        }
    });
    let rules = "default = \"direct\"\n[limits]\nconnect_timeout_ms = 600000\n";
    site.start(rules, &engine_by(way, &format!("to = \"{server}\"")));
    assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset, "{way} {server}");
    assert_eq!(site.record().text("reason"), "unreachable", "{way} {server}");
    nothing_was_lost(&mut site);
}

/// Stops the engine and reads its counts: no packet was lost for want of room.
fn nothing_was_lost(site: &mut Site) {
    let up = site.up.as_mut().expect("started");
    up.signal(Signal::TERM);
    let line = up.log_line("its counts", |line| line.contains("a worker of the packet engine ends"));
    assert!(line.contains("lost=0"), "{line}");
}

#[test]
fn source_ports_are_taken_again_from_time_wait() {
    if is_root() {
        for way in WAYS {
            few_source_ports(way);
        }
    }
}

/// More connections within one second of TIME-WAIT than there are source ports; the client closes first each time.
fn few_source_ports(way: &str) {
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    let listen = engine_by(way, &format!("to = \"{}\"", server.address))
        .replace("engine = {", "engine = { source_ports = \"61000-61003\",");
    site.start("", &listen);
    site.line.client.run(|| {
        for _ in 0..60 {
            let mut client = Client::connect(to(ENGINE)).expect("greeted");
            client.echo(b"again").expect("echoed");
            client.close().expect("closed in order");
        }
    });
    for _ in 0..60 {
        assert_eq!(site.record().text("reason"), "ok", "{way}");
    }
}

#[test]
fn policy_denies_and_says_why() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    let rule = "\n[[rule]]\nname = \"no\"\naction = \"deny\"\nmatch = { from = \"10.0.1.1\", intercept = \"engine\" }\n";
    site.start(
        "default = \"direct\"\n",
        &format!("{}{rule}", engine(&format!("to = \"{}\"", server.address))),
    );
    assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset);
    let record = site.record();
    assert_eq!((record.text("rule"), record.text("reason")), ("no", "policy_denied"));
    // What the engine cannot do is said, not left out.
    let rule = "\n[[rule]]\nname = \"far\"\ncarrier = \"socks5://10.0.2.1:1\"\n";
    let tables = format!("{}{rule}", engine(&format!("to = \"{}\"", server.address)));
    site.up.as_ref().expect("started").reload("default = \"direct\"\n", &tables);
    assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset);
    let record = site.record();
    assert_eq!((record.text("rule"), record.text("reason")), ("far", "unsupported"));
    assert!(record.text("detail").contains("no carrier but direct"), "{record:?}");
}

#[test]
fn limits_count_its_flows() {
    if !is_root() {
        return;
    }
    for (limit, said) in
        [("max_flows = 2", "limits.max_flows"), ("max_flows_per_client = 2", "max_flows_per_client")]
    {
        let mut site = Site::new();
        let server = site.server("10.0.2.1");
        site.start(
            &format!("default = \"direct\"\n[limits]\n{limit}\n"),
            &engine(&format!("to = \"{}\"", server.address)),
        );
        let [first, _second] =
            site.line.client.run(|| [0; 2].map(|_| Client::connect(to(ENGINE)).expect("greeted")));
        assert_eq!(site.line.client.run(refused), io::ErrorKind::ConnectionReset);
        let record = site.record();
        assert_eq!(record.text("reason"), "limit");
        assert!(record.text("detail").contains(said), "{record:?}");
        first.close().expect("closed in order");
        assert_eq!(site.record().text("reason"), "ok");
        site.line.client.run(|| visit(to(ENGINE), b"room again"));
    }
}

#[test]
fn an_idle_flow_of_the_client_with_the_most_leaves_for_another_client() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    site.line.client.ip("addr add 10.0.1.2/24 dev eth0");
    let server = site.server("10.0.2.1");
    site.start(
        "default = \"direct\"\n[limits]\nmax_flows = 3\n",
        &engine(&format!("to = \"{}\"", server.address)),
    );
    let connect = || Client::connect(to(ENGINE)).expect("greeted");
    let mut held: Vec<_> = (0..3).map(|_| site.line.client.run(connect)).collect();
    let from_another_address = || {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        socket.bind(&to("10.0.1.2:0").into())?;
        socket.connect_timeout(&to(ENGINE).into(), LIMIT)?;
        Client::over(socket.into())
    };
    // None of the three is idle at once.
    let mut other = None;
    eventually("another client has room", || {
        other = site.line.client.run(from_another_address).ok();
        other.is_some()
    });
    other.expect("connected").echo(b"room").expect("echoed");
    let first = held[0].address;
    let is_of_first = |record: &Record| record.address("client").ip() == first.ip();
    let record = std::iter::repeat_with(|| site.record()).find(is_of_first).expect("a record");
    assert_eq!((record.text("reason"), record.address("client")), ("limit", first), "the oldest");
    assert!(record.text("detail").contains("its client has the most flows"), "{record:?}");
    assert!(held[0].echo(b"x").is_err(), "reset");
    for client in &mut held[1..] {
        client.echo(b"goes on").expect("echoed");
    }
}

#[test]
fn bytes_arrive_as_they_were_sent_and_half_closes_pass() {
    if is_root() {
        WAYS.into_iter().for_each(there_and_back);
    }
}

fn there_and_back(way: &str) {
    let mut site = Site::new();
    let (tell, told) = std::sync::mpsc::channel();
    let enter = site.enter_server();
    // Takes everything until the client closes, then says it all.
    let server = std::thread::spawn(move || {
        enter();
        let listener = TcpListener::bind("10.0.2.1:0").expect("bound");
        tell.send(listener.local_addr().expect("an address")).expect("the test waits");
        let (mut stream, _) = listener.accept().expect("a client");
        let mut all = Vec::new();
        stream.read_to_end(&mut all).expect("everything");
        all.reverse();
        stream.write_all(&all).expect("sent");
    });
    let address = told.recv().expect("a server");
    site.start("", &engine_by(way, &format!("to = \"{address}\"")));
    let mut bytes = Dice(7).bytes(3_000_000);
    let back = site.line.client.run({
        let bytes = bytes.clone();
        move || {
            let mut stream = TcpStream::connect_timeout(&to(ENGINE), LIMIT).expect("connected");
            stream.set_read_timeout(Some(LIMIT)).expect("limit");
            stream.write_all(&bytes).expect("sent");
            stream.shutdown(Shutdown::Write).expect("half closed");
            let mut back = Vec::new();
            stream.read_to_end(&mut back).expect("everything");
            back
        }
    });
    server.join().expect("no panic");
    bytes.reverse();
    assert!(back == bytes, "{} of {} bytes came back", back.len(), bytes.len());
    let record = site.record();
    assert_eq!(record.text("reason"), "ok");
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (3_000_000, 3_000_000));
}

#[test]
fn flows_are_seen_and_can_be_ended_by_hand() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine(&format!("to = \"{}\"", server.address)));
    let client = site.line.client.run(|| {
        let mut client = Client::connect(to(ENGINE)).expect("greeted");
        client.echo(b"seen").expect("echoed");
        client
    });
    let up = site.up.as_ref().expect("started");
    eventually("its bytes are shown", || {
        let flows = admin::flows(up);
        flows.len() == 1 && flows[0].number("bytes_up") == 4 && flows[0].text("intercept") == "engine"
    });
    let id = admin::flows(up)[0].number("flow");
    let (status, body) = admin::ask(up, "DELETE", &format!("/v1/flows/{id}"));
    assert!(status < 300, "{status} {body}");
    assert_eq!(site.record().text("reason"), "killed");
    drop(client);
}

#[test]
fn other_services_of_the_host_are_left_alone_and_nothing_is_left_behind() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    let kernel = site.line.router.run(|| crate::node::peers::Server::start("10.0.1.254"));
    let before = site.line.router.run(crate::node::traces::Traces::now);
    site.start("", &engine(&format!("to = \"{}\"", server.address)));
    let own = kernel.address;
    site.line.client.run(move || {
        visit(to(ENGINE), b"the engine's");
        visit(own, b"the kernel's");
    });
    let mut up = site.up.take().expect("started");
    up.signal(Signal::KILL);
    let (status, _) = up.gone();
    assert_eq!(ended_by(status), Some(Signal::KILL));
    site.line.router.run(move || {
        sidetrack_testkit::eventually("nothing is left", || crate::node::traces::Traces::now() == before);
    });
    // The kernel answers for itself again.
    let kind =
        site.line.client.run(|| TcpStream::connect_timeout(&to(ENGINE), LIMIT).expect_err("nobody").kind());
    assert_eq!(kind, io::ErrorKind::ConnectionRefused);
    drop(kernel);
}

#[test]
fn a_stop_resets_both_sides_and_says_so() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine(&format!("to = \"{}\"", server.address)));
    let mut client = site.line.client.run(|| Client::connect(to(ENGINE)).expect("greeted"));
    let (status, records) = site.up.take().expect("started").stop();
    assert!(status.success(), "{status}");
    let reasons: Vec<_> = records.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["shutdown"]);
    assert!(client.echo(b"x").is_err());
}
