//! Packets to groups between sites: IP multicast of unmodified programs, and the nearest of several servers.
//!
//! ```text
//!   h1 --10.1.0.0/24-- a --10.7.1.0/24-- r1 --10.7.1x.0/24-- b --10.2.0.0/24-- h2
//!                        \                                  /  \
//!                         --10.7.2.0/24-- r2 --10.7.2x.0/24-    c --10.3.0.0/24-- h3    (c is joined to both relays, too)
//! ```

use crate::node::{Up, at};
use crate::scene::{Keys, wait_for};
use crate::streams::link;
use crate::tools::run;
use serde_json::Value;
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);
const PORT: u16 = 5004;

/// Three sites with a host each, and two relays.
pub(crate) struct Sites {
    hosts: Vec<Node>,
    pub(crate) gateways: Vec<Node>,
    _relays: Vec<Node>,
    pub(crate) ups: Vec<Up>,
    up_relays: Vec<Option<Up>>,
}

const NAMES: [&str; 3] = ["a", "b", "c"];

impl Sites {
    /// `entries` are the groups and packets of each gateway.
    fn new(entries: [&str; 3]) -> Self {
        Self::with("", entries)
    }

    /// The same; the file of a begins with `first`.
    pub(crate) fn with(first: &str, entries: [&str; 3]) -> Self {
        let keys = Keys::new(&["a", "b", "c", "r1", "r2"]);
        let hosts: Vec<_> = NAMES.iter().map(|_| Node::new()).collect();
        let gateways: Vec<_> = NAMES.iter().map(|_| Node::new()).collect();
        let relays: Vec<_> = (0..2).map(|_| Node::new()).collect();
        for (number, (gateway, host)) in gateways.iter().zip(&hosts).enumerate() {
            link(gateway, host, &format!("10.{}.0", number + 1), ["in", "eth0"]);
            host.ip(&format!("route add default via 10.{}.0.1", number + 1));
            gateway.run(|| sidetrack_sys::sysctl::write("net/ipv4/ip_forward", "1").expect("forwarding"));
        }
        let mut up_relays = Vec::new();
        for (at_relay, relay) in relays.iter().enumerate() {
            for (number, gateway) in gateways.iter().enumerate() {
                let net = format!("10.7.{}{number}", at_relay + 1);
                link(gateway, relay, &net, [&format!("up{at_relay}"), &format!("to{number}")]);
            }
            let section = keys.section(&format!("r{}", at_relay + 1), &[], true);
            let text = section.replace("127.0.0.1:0", "0.0.0.0:8100");
            up_relays.push(Some(relay.run(move || Up::start("", &text))));
        }
        let ups = NAMES.iter().enumerate().map(|(number, name)| {
            let dial = |relay: usize| at(&format!("10.7.{relay}{number}.2"), 8100);
            let text = keys.section(name, &[("r1", dial(1)), ("r2", dial(2))], false) + entries[number];
            let first = if number == 0 { first.to_owned() } else { String::new() };
            gateways[number].run(move || Up::start(&first, &text))
        });
        let ups = ups.collect();
        Self { hosts, gateways, _relays: relays, ups, up_relays }
    }

    /// What a gateway says of its group.
    pub(crate) fn group(&self, number: usize) -> Value {
        let all = crate::node::admin::show(&self.ups[number], "/v1/overlay/group");
        serde_json::from_str::<Value>(&all).expect("JSON")[0].clone()
    }

    fn count(&self, number: usize, what: &str) -> u64 {
        self.group(number)["packets"][what].as_u64().unwrap_or(0)
    }

    /// Waits until a gateway knows these members, and paths to both other sites.
    pub(crate) fn knows(&self, number: usize, members: &[&str]) {
        wait_for(&self.ups[number], "paths", |status| {
            let paths = status["paths"].as_array().expect("paths");
            NAMES.iter().enumerate().filter(|(other, _)| *other != number).all(|(_, name)| {
                paths.iter().any(|p| p["to"] == *name && p["path"].as_array().is_some_and(|p| !p.is_empty()))
            })
        });
        eventually("the members are known", || {
            let known = self.group(number)["members"].clone();
            let mut known: Vec<_> =
                known.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            known.sort_unstable();
            known == members
        });
    }

    /// A program on a host that has joined the multicast address.
    fn receiver(&self, number: usize) -> UdpSocket {
        let own = Ipv4Addr::new(10, number as u8 + 1, 0, 2);
        self.hosts[number].run(move || {
            let socket = UdpSocket::bind((GROUP, PORT)).expect("a socket");
            socket.join_multicast_v4(&GROUP, &own).expect("joined");
            socket.set_nonblocking(true).expect("nonblocking");
            socket
        })
    }

    /// A program on a host that sends to the multicast address.
    fn sender(&self, number: usize, ttl: u32) -> UdpSocket {
        let own = Ipv4Addr::new(10, number as u8 + 1, 0, 2);
        let socket = self.hosts[number].run(move || UdpSocket::bind((own, 0)).expect("a socket"));
        socket.set_multicast_ttl_v4(ttl).expect("a time to live");
        socket
    }
}

/// The words that have come.
fn arrived(socket: &UdpSocket) -> Vec<String> {
    let mut buffer = [0; 64];
    let words = std::iter::from_fn(|| socket.recv(&mut buffer).ok().map(|n| buffer[..n].to_vec()));
    words.map(|word| String::from_utf8(word).expect("a word")).collect()
}

/// Sends numbered words until one has come to each receiver; no word comes twice anywhere.
fn reaches(sender: &UdpSocket, receivers: &[&UdpSocket], word: &str) {
    let until = Instant::now() + LIMIT;
    let mut seen: Vec<Vec<String>> = receivers.iter().map(|_| Vec::new()).collect();
    for number in 0.. {
        assert!(Instant::now() < until, "'{word}' came to {seen:?}");
        sender.send_to(format!("{word}-{number}").as_bytes(), (GROUP, PORT)).expect("sent");
        std::thread::park_timeout(Duration::from_millis(20));
        for (seen, receiver) in seen.iter_mut().zip(receivers) {
            seen.extend(arrived(receiver));
            let mut once = seen.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), seen.len(), "twice: {seen:?}");
        }
        if seen.iter().all(|seen| seen.iter().any(|came| came.starts_with(word))) {
            return;
        }
    }
}

const TV: &str = "[[overlay.group]]\nname = \"tv\"\nto = \"239.1.2.3\"\ninterface = \"in\"\n";

#[test]
fn a_multicast_stream_reaches_the_members_one_leaves_and_a_relay_is_killed() {
    if !is_root() {
        return;
    }
    let sends = format!(
        "{TV}[[overlay.packets]]\ngroup = \"tv\"\nat = \"router\"\nlink = \"best-effort\"\ndissemination = \"duplicate\"\n"
    );
    // b takes nothing from c, and c sends all the same.
    let joins = format!("{TV}join = true\nsenders = [\"a\"]\n");
    let sends_too = joins.clone() + &sends[TV.len()..];
    let mut sites = Sites::new([&sends, &joins, &sends_too]);
    sites.knows(0, &["b", "c"]);
    let seen = run(&sites.ups[0], &["status"]);
    // The order is that of the keys, which are new in each run.
    let named =
        ["b, c", "c, b"].map(|members| format!("group tv: this node is no member; members: {members}\n"));
    assert!(named.iter().any(|line| seen.contains(line)), "{seen}");
    assert!(run(&sites.ups[1], &["status"]).contains("group tv: this node is a member; members: "));
    let [near, far] = [sites.receiver(1), sites.receiver(2)];
    // In the network of the sender, the packets come as before, and only from there.
    let beside = sites.receiver(0);
    let sender = sites.sender(0, 4);
    reaches(&sender, &[&near, &far], "first");
    let came = arrived(&beside);
    let once: std::collections::BTreeSet<_> = came.iter().collect();
    assert!(
        !came.is_empty() && once.len() == came.len(),
        "nothing is sent back to where it came from: {came:?}"
    );
    // A packet that may not leave its network does not.
    let before = sites.count(0, "sent");
    sites.sender(0, 1).send_to(b"local", (GROUP, PORT)).expect("sent");
    reaches(&sender, &[&near, &far], "second");
    assert!(sites.count(0, "sent") > before);
    for (site, receiver) in [(1, &near), (2, &far)] {
        assert_eq!(sites.count(site, "ttl"), 0);
        assert!(arrived(receiver).iter().all(|word| word != "local"));
    }
    // What c has delivered comes by its own interface and is not sent again: a source that may not send is refused by b.
    assert_eq!(sites.count(1, "sender"), 0);
    let wrong = sites.sender(2, 4);
    // They are numbered: the receiver in c's own network gets each of them once.
    let mut number = 0;
    eventually("b refuses packets of c", || {
        wrong.send_to(format!("wrong-{number}").as_bytes(), (GROUP, PORT)).expect("sent");
        number += 1;
        sites.count(1, "sender") > 0
    });
    assert!(arrived(&near).iter().all(|word| !word.starts_with("wrong")));
    // One leaves: it delivers nothing from then on.
    run(&sites.ups[2], &["group", "leave", "tv"]);
    sites.knows(0, &["b"]);
    let left = sites.count(2, "delivered");
    reaches(&sender, &[&near], "third");
    assert_eq!(sites.count(2, "delivered"), left);
    run(&sites.ups[2], &["group", "join", "tv"]);
    sites.knows(0, &["b", "c"]);
    // A relay dies: the other carries all.
    let mut relay = sites.up_relays[0].take().expect("it runs");
    relay.signal(rustix::process::Signal::KILL);
    relay.gone();
    reaches(&sender, &[&near, &far], "fourth");
    // A member hangs: the others get all, and so does it once it goes on.
    sites.ups[2].signal(rustix::process::Signal::STOP);
    reaches(&sender, &[&near], "fifth");
    sites.ups[2].signal(rustix::process::Signal::CONT);
    sites.knows(0, &["b", "c"]);
    reaches(&sender, &[&near, &far], "sixth");
    metrics_fit(&sites);
}

/// What b says in its metrics is what it says of its group.
fn metrics_fit(sites: &Sites) {
    let metrics = crate::node::admin::show(&sites.ups[1], "/metrics");
    for line in ["sidetrack_overlay_groups 1", "sidetrack_overlay_group_members 2"] {
        assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
    }
    let delivered = format!(
        "sidetrack_overlay_group_packets_total{{fate=\"delivered\"}} {}",
        sites.count(1, "delivered")
    );
    assert!(metrics.lines().any(|found| found == delivered), "{delivered} in\n{metrics}");
}

#[test]
fn a_member_among_liars_takes_only_packets_with_a_proof() {
    if !is_root() {
        return;
    }
    let sends = |service: &str| {
        format!("{TV}[[overlay.packets]]\ngroup = \"tv\"\nat = \"router\"\nlink = \"best-effort\"\n{service}")
    };
    let proven = sends("dissemination = \"duplicate\"\ntrust = \"intrusion-tolerant\"\n");
    let strict = format!("{TV}join = true\ntrust = \"intrusion-tolerant\"\n");
    let any = format!("{TV}join = true\n");
    // c sends without proofs.
    let plain = any + &sends("")[TV.len()..];
    let sites = Sites::new([&proven, &strict, &plain]);
    sites.knows(0, &["b", "c"]);
    let [near, far] = [sites.receiver(1), sites.receiver(2)];
    reaches(&sites.sender(0, 4), &[&near, &far], "proven");
    assert_eq!(sites.count(1, "unproven"), 0);
    sites.knows(2, &["b", "c"]);
    let plain = sites.sender(2, 4);
    let mut number = 0;
    eventually("b refuses packets without a proof", || {
        plain.send_to(format!("plain-{number}").as_bytes(), (GROUP, PORT)).expect("sent");
        number += 1;
        sites.count(1, "unproven") > 0
    });
    assert!(arrived(&near).iter().all(|word| !word.starts_with("plain")));
}

#[test]
#[ignore = "takes most of a minute: make test-more"]
fn a_flow_of_udp_goes_to_all_members() {
    if !is_root() {
        return;
    }
    let sends = format!(
        "{TV}[[listen]]\nname = \"video\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"10.1.0.1:7000\"\n\
         to = \"{GROUP}:{PORT}\"\n[[rule]]\nname = \"to-all\"\nmatch = {{ protocol = \"udp\" }}\n\
         carrier = \"overlay:group:tv\"\ndissemination = \"duplicate\"\n"
    );
    let joins = format!("{TV}join = true\nsenders = [\"a\"]\n");
    let mut sites = Sites::with("default = \"deny\"\n", [&sends, &joins, &joins]);
    sites.knows(0, &["b", "c"]);
    let receivers = [sites.receiver(1), sites.receiver(2)];
    let own = Ipv4Addr::new(10, 1, 0, 2);
    let sender = sites.hosts[0].run(move || UdpSocket::bind((own, 0)).expect("a socket"));
    let from = sender.local_addr().expect("an address");
    let mut seen = [false; 2];
    eventually("both members have delivered it", || {
        sender.send_to(b"frame", ("10.1.0.1", 7000)).expect("sent");
        for (seen, receiver) in seen.iter_mut().zip(&receivers) {
            let mut buffer = [0; 16];
            while let Ok((length, source)) = receiver.recv_from(&mut buffer) {
                assert_eq!((&buffer[..length], source), (&b"frame"[..], from));
                *seen = true;
            }
        }
        std::thread::park_timeout(Duration::from_millis(20));
        seen == [true; 2]
    });
    assert!(sites.count(0, "sent") > 0 && sites.count(1, "delivered") > 0 && sites.count(2, "delivered") > 0);
    let up = &mut sites.ups[0];
    up.signal(rustix::process::Signal::TERM);
    let record = up.record();
    assert_eq!(record.fate(), ("to-all", "overlay:group:tv (duplicate over 2 paths)", "shutdown"));
}

#[test]
fn the_nearest_server_answers_and_the_next_one_when_it_is_gone() {
    if !is_root() {
        return;
    }
    let dns = "[[overlay.group]]\nname = \"dns\"\nto = \"10.99.0.1\"\n";
    let asks =
        format!("{dns}[[overlay.packets]]\nnearest = \"dns\"\nlink = \"best-effort\"\nat = \"router\"\n");
    // Answers go back to the network of the client.
    let answers = format!(
        "{dns}join = true\n[[overlay.packets]]\nnode = \"a\"\nto = \"10.1.0.0/24\"\nlink = \"best-effort\"\n"
    );
    let back = |node: &str, net: u8| {
        format!(
            "[[overlay.packets]]\nnode = \"{node}\"\nto = \"10.{net}.0.0/24\"\nlink = \"best-effort\"\nat = \"router\"\n"
        )
    };
    let asks = asks + &back("b", 2) + &back("c", 3);
    let mut sites = Sites::new([&asks, &answers, &answers]);
    // What is not caught arrives nowhere.
    sites.gateways[0].ip("route add 10.99.0.1 via 10.7.10.77");
    let servers: Vec<_> = [1, 2]
        .map(|number: usize| {
            let gateway = &sites.gateways[number];
            gateway.ip("link set lo up");
            gateway.ip("addr add 10.99.0.1/32 dev lo");
            gateway.ip("route add 10.1.0.0/24 via 10.7.10.77 dev in onlink src 10.99.0.1");
            gateway.run(|| {
                let server = UdpSocket::bind("10.99.0.1:5300").expect("a socket");
                server.set_nonblocking(true).expect("nonblocking");
                server
            })
        })
        .into();
    sites.knows(0, &["b", "c"]);
    // c is far.
    for relay in ["r1", "r2"] {
        run(&sites.ups[2], &["link", "set", relay, "--cost", "500"]);
    }
    eventually("b is the nearest", || sites.group(0)["nearest"] == "b");
    let asks = |word: &str, client: &UdpSocket, server: usize| {
        let mut from = None;
        eventually(word, || {
            client.send_to(word.as_bytes(), "10.99.0.1:5300").expect("sent");
            std::thread::park_timeout(Duration::from_millis(20));
            let mut buffer = [0; 64];
            while let Ok((length, client)) = servers[server].recv_from(&mut buffer) {
                from = (buffer[..length] == *word.as_bytes()).then_some(client).or(from);
            }
            from.is_some()
        });
        from.expect("a client")
    };
    let client = sites.hosts[0].run(|| UdpSocket::bind("10.1.0.2:0").expect("a socket"));
    client.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let seen = asks("first", &client, 0);
    assert_eq!(seen, client.local_addr().expect("an address"));
    // A conversation stays with its server though another one is nearer now; a new one goes there.
    for relay in ["r1", "r2"] {
        run(&sites.ups[1], &["link", "set", relay, "--cost", "5000"]);
    }
    eventually("c is the nearest", || sites.group(0)["nearest"] == "c");
    asks("still first", &client, 0);
    let other = sites.hosts[0].run(|| UdpSocket::bind("10.1.0.2:0").expect("a socket"));
    asks("second", &other, 1);
    // b is gone: all go to c.
    sites.ups[1].signal(rustix::process::Signal::KILL);
    sites.ups[1].gone();
    asks("third", &client, 1);
}
