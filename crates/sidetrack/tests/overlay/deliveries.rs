//! The rules of the delivering node hold for flows that another node caught, whatever their names resolve to.

use crate::dns::{Answers, NameServer};
use crate::node::{Record, Up, admin, peers};
use crate::scene::{Keys, Scene as Relays, Server, exchange, overlay_address, random_bytes, wait_for};
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};

const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 8, 8, 8);
const INSIDE: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 9);

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"10.0.0.0/8\"\n";

/// One host with two addresses, a name server, node `a` with a SOCKS listener, and node `c`, which delivers.
struct Scene {
    host: Node,
    a: Up,
    c: Up,
    names: NameServer,
    inside: TcpListener,
    outside: TcpListener,
}

impl Scene {
    /// `rules` are those of the delivering node.
    fn new(answers: Answers, rules: &str) -> Self {
        let host = Node::new();
        host.ip("addr add 10.8.8.8/32 dev lo");
        host.ip("addr add 10.9.9.9/32 dev lo");
        let rules = rules.to_owned();
        let (names, a, c) = host.run(move || {
            let names = NameServer::start(answers);
            let keys = Keys::new(&["a", "c"]);
            let c = Up::start("default = \"deny\"\n", &(rules + &keys.section("c", &[], true) + DELIVER));
            let listener = "[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
                            [[rule]]\nname = \"over\"\ncarrier = \"overlay:c\"\n";
            let section = keys.section("a", &[("c", overlay_address(&c))], false);
            (names, Up::start("default = \"deny\"\n", &(listener.to_owned() + &section)), c)
        });
        wait_for(&a, "a link", |status| status["links"][0]["up"] == true);
        let [inside, outside] = [INSIDE, OUTSIDE].map(|ip| {
            let listener = host.run(move || TcpListener::bind((ip, 80)).expect("a port"));
            listener.set_nonblocking(true).expect("non-blocking");
            listener
        });
        Self { host, a, c, names, inside, outside }
    }

    /// Asks `a` by SOCKS5 for port 80 of a name.
    fn ask(&self, name: &str) {
        let (entry, name) = (self.a.addresses("socks")[0], name.to_owned());
        self.host.run(move || ask(entry, &name));
    }

    /// Expects that a flow reaches the server that is allowed.
    fn is_delivered(&mut self, name: &str) {
        self.ask(name);
        assert!(has_connection(&self.outside), "{name}");
        // The server's end is closed by now, so the flow is over.
        assert_eq!(self.a.record().text("rule"), "over");
        let record = delivered(&mut self.c, |record| record.text("orig_dst") == format!("{name}:80"));
        assert_eq!(record.text("path"), format!("direct {OUTSIDE}:80"), "{record:?}");
        assert!(!has_connection(&self.inside), "nothing was dialled that is denied");
    }

    /// Expects that the delivering node denies the flow: its record and that node's log name the rule.
    fn is_denied(&mut self, name: &str, why: &str) {
        self.ask(name);
        let record = self.a.record();
        assert_eq!(record.fate(), ("over", "overlay:c", "policy_denied"), "{record:?}");
        assert!(record.text("detail").contains(why), "{why}: {record:?}");
        let record = delivered(&mut self.c, |record| record.text("orig_dst") == format!("{name}:80"));
        assert_eq!(record.text("reason"), "policy_denied", "{record:?}");
        assert!(record.text("detail").contains(why), "{why}: {record:?}");
        let log = self.c.log_so_far();
        let is_it = |line: &str| line.contains("delivery denied") && line.contains(why);
        assert!(log.lines().any(is_it), "{why}:\n{log}");
        assert!(!has_connection(&self.inside), "nothing was dialled that is denied");
    }
}

/// The next record of a delivered flow that fits. Where a link was down for a moment, a flow is asked for again, and the
/// attempt before has a record, too.
fn delivered(up: &mut Up, fits: impl Fn(&Record) -> bool) -> Record {
    loop {
        let record = up.record();
        assert_eq!((record.text("listener"), record.text("user")), ("overlay", "a"), "{record:?}");
        if fits(&record) {
            return record;
        }
    }
}

fn has_connection(listener: &TcpListener) -> bool {
    match listener.accept() {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        Err(error) => panic!("{error}"),
    }
}

/// Asks, and ends the flow in order if it was accepted.
fn ask(entry: SocketAddr, name: &str) {
    let mut stream = TcpStream::connect(entry).expect("a's listener");
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let length = u8::try_from(name.len()).expect("a short name");
    let request = [&[5, 1, 0, 5, 1, 0, 3, length], name.as_bytes(), &[0, 80]].concat();
    stream.write_all(&request).expect("sent");
    // The answer to the greeting, and the head of the reply. A denied flow may end before the rest of it.
    let _ = stream.read_exact(&mut [0; 12]);
}

const DENY: &str = "[[rule]]\nname = \"no-inside\"\nmatch = { to = \"10.9.0.0/16\" }\naction = \"deny\"\n";

#[test]
fn a_name_that_resolves_to_a_denied_network_is_not_delivered() {
    if !is_root() {
        return;
    }
    let answers = [
        ("inside.test", vec![vec![INSIDE]]),
        ("mixed.test", vec![vec![INSIDE, OUTSIDE]]),
        ("rebind.test", vec![vec![OUTSIDE], vec![INSIDE], vec![INSIDE]]),
    ];
    // A rule that carries all stands before it: rules that deny by network are asked first.
    let rules = format!("[[rule]]\nname = \"all\"\ncarrier = \"direct\"\n{DENY}");
    let mut scene = Scene::new(answers.into(), &rules);
    scene.is_denied("inside.test", "rule 'no-inside'");
    scene.is_denied("10.9.9.9", "rule 'no-inside'");
    scene.is_delivered("mixed.test");
    scene.is_delivered("rebind.test");
    assert_eq!(
        scene.names.asked("rebind.test"),
        1,
        "the address that was asked about is dialled, not another"
    );
    scene.is_denied("rebind.test", "rule 'no-inside'");
    assert_eq!(scene.names.asked("rebind.test"), 2);
}

#[test]
fn rules_by_name_port_and_node_hold_for_deliveries_and_a_rule_before_them_lets_pass() {
    if !is_root() {
        return;
    }
    let answers = [
        ("bad.test", vec![vec![INSIDE]]),
        ("good.test", vec![vec![OUTSIDE]]),
        ("other.test", vec![vec![INSIDE]]),
    ];
    let rules = "[[rule]]\nname = \"bad\"\nmatch = { host = \"bad.test\" }\naction = \"deny\"\n\
                 [[rule]]\nname = \"good\"\nmatch = { host = \"good.test\" }\ncarrier = \"direct\"\n\
                 [[rule]]\nname = \"port\"\nmatch = { port = 80 }\naction = \"deny\"\n";
    let mut scene = Scene::new(answers.into(), rules);
    scene.is_denied("bad.test", "rule 'bad'");
    scene.is_denied("other.test", "rule 'port'");
    scene.is_delivered("good.test");
}

const LOOPBACK: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

#[test]
fn a_delivered_flow_has_one_record_at_the_delivering_node() {
    let answer = random_bytes(1, 300_000);
    let server = Server::start(answer.clone());
    let to = server.address;
    let mut scene = Relays::new(to, LOOPBACK);
    assert_eq!(exchange(scene.entry(), &random_bytes(2, 200_000)).expect("exchanged"), answer);
    server.finish().expect("served");
    let caught = scene.a.record();
    let records = scene.c.stop().1;
    let (moved, given_up): (Vec<_>, Vec<_>) =
        records.iter().partition(|record| record.text("reason") == "ok");
    assert_eq!(moved.len(), 1, "{records:?}");
    assert!(given_up.iter().all(|record| record.number("bytes_up") == 0), "{records:?}");
    let delivered = moved[0];
    assert_eq!(
        ["listener", "intercept", "user", "carrier", "reason"].map(|field| delivered.text(field)),
        ["overlay", "tunnel", "a", "direct", "ok"],
        "{delivered:?}"
    );
    assert_eq!(delivered.text("path"), format!("direct {to}"), "{delivered:?}");
    for record in [&caught, delivered] {
        assert_eq!(record.address("orig_dst"), to, "{record:?}");
        assert_eq!(
            (record.number("bytes_up"), record.number("bytes_down")),
            (200_000, 300_000),
            "{record:?}"
        );
    }
    assert_eq!(delivered.address("client"), caught.address("client"));
}

#[test]
fn a_delivered_flow_is_listed_and_ends_as_the_delivering_node_says() {
    let server = peers::Server::start("127.0.0.1");
    let mut scene = Relays::new(server.address, LOOPBACK);
    let entry = scene.entry();
    let begin = || {
        let mut client = peers::Client::connect(entry).expect("a connection");
        client.echo(b"before").expect("an echo");
        client
    };
    let reset = |client: peers::Client| {
        let mut stream = client.into_stream();
        stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
        assert_eq!(stream.read(&mut [0; 1]).expect_err("cut").kind(), ErrorKind::ConnectionReset);
    };
    let client = begin();
    let bytes = [6, client.greeting_bytes() + 6];
    let mut flow = None;
    eventually("its bytes are counted", || {
        let is_it = |flow: &Record| ["bytes_up", "bytes_down"].map(|field| flow.number(field)) == bytes;
        flow = admin::flows(&scene.c).into_iter().find(is_it);
        flow.is_some()
    });
    let flow = flow.expect("a flow");
    assert_eq!((flow.text("listener"), flow.text("user")), ("overlay", "a"), "{flow:?}");
    let (status, body) = admin::ask(&scene.c, "DELETE", &format!("/v1/flows/{}", flow.number("flow")));
    assert_eq!(status / 100, 2, "{body}");
    let killed = delivered(&mut scene.c, |record| record.text("reason") == "killed");
    assert_eq!(killed.number("flow"), flow.number("flow"));
    reset(client);
    let client = begin();
    let (status, rest) = scene.c.stop();
    assert!(status.success());
    let shut_down = rest.iter().filter(|record| record.text("reason") == "shutdown");
    assert_eq!(shut_down.count(), 1, "{rest:?}");
    drop(client);
}

#[test]
fn a_destination_that_refuses_is_in_the_delivering_nodes_record() {
    // Bound, and never listening: nothing else gets the port meanwhile.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    closed.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
    let to = closed.local_addr().expect("an address").as_socket().expect("of the Internet");
    let mut scene = Relays::new(to, LOOPBACK);
    let _ = exchange(scene.entry(), b"to nobody");
    let record = delivered(&mut scene.c, |record| record.text("reason") == "refused");
    assert_eq!(record.address("orig_dst"), to, "{record:?}");
    assert!(record.text("detail").contains(&to.to_string()), "{record:?}");
}
