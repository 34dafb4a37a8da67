//! Steering on real connections: redirected, transparently taken, carried by the kernel; and what is left alone.

use std::net::{SocketAddr, TcpListener};

use sidetrack_core::flow::Protocol::Tcp;
use sidetrack_core::net::{IpNet, IpSet};
use sidetrack_sys::cgroup::Hierarchy;
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{
    CgroupMatch, Except, KernelPath, KernelRoute, Lifetime, MarkBits, OwnedTable, Redirect, Selector,
    Steering, TProxy,
};
use sidetrack_sys::route::{self, IpVersion, MarkRule};
use sidetrack_sys::sockopt;
use sidetrack_testkit::{Line, accept, connect, in_namespace, is_root, listen, talk};

const OUR_MARK: MarkBits = MarkBits { value: 0x5d00, mask: 0xff00 };
const TPROXY_MARK: MarkBits = MarkBits { value: 0x1_0000, mask: 0xff_0000 };

fn set(nets: &[&str]) -> IpSet {
    nets.iter().map(|net| net.parse::<IpNet>().expect(net)).collect()
}

fn port(listener: &TcpListener) -> u16 {
    listener.local_addr().expect("address").port()
}

fn apply(steering: &Steering) {
    let mut socket = Socket::open(Protocol::Netfilter).expect("socket");
    steering.table("sidetrack").apply(&mut socket).expect("applied");
}

/// Connects with our mark on the socket, as our own connections have it.
fn connect_marked(to: SocketAddr) -> std::net::TcpStream {
    let socket = sockopt::stream_socket(&to).expect("socket");
    sockopt::set_mark(&socket, OUR_MARK.value).expect("root");
    socket.set_nonblocking(false).expect("blocking");
    socket.connect_timeout(&to.into(), sidetrack_testkit::LIMIT).expect("connect");
    socket.into()
}

#[test]
fn local_connections_are_redirected_and_our_own_are_not() {
    in_namespace(|| {
        route::add_local_default("lo").expect("route");
        let (ours, server4, server6) = (listen("::"), listen("127.0.0.1"), listen("::1"));
        let selector = Selector {
            destinations: set(&["192.0.2.0/24", "127.0.0.1", "2001:db8::/32", "::1"]),
            to_this_host: true,
            ..Selector::default()
        };
        let except = Except { mark: Some(OUR_MARK), destinations: set(&["192.0.2.99"]), ..Except::default() };
        let redirect = Redirect {
            port: port(&ours),
            v4: true,
            v6: true,
            local: vec![selector],
            forwarded: vec![],
            hold: None,
        };
        apply(&Steering { except, redirects: vec![redirect], ..Steering::default() });

        let destinations = [
            "192.0.2.7:80".parse().expect("address"),
            "[2001:db8::7]:80".parse().expect("address"),
            server4.local_addr().expect("address"),
            server6.local_addr().expect("address"),
        ];
        for destination in destinations {
            let client = std::net::TcpStream::connect_timeout(&destination, sidetrack_testkit::LIMIT)
                .expect("connect");
            let (caught, peer) = accept(&ours);
            assert_eq!(sockopt::original_dst(&caught).expect("kept"), destination);
            assert_eq!(sockopt::canonical(peer).port(), client.local_addr().expect("address").port());
        }
        for server in [&server4, &server6] {
            let mut own = connect_marked(server.local_addr().expect("address"));
            talk(&mut own, &mut accept(server).0);
        }
        assert!(connect("192.0.2.99:9").is_err(), "what is excepted is not caught: nobody listens there");
        assert!(!sidetrack_testkit::readable(&ours, std::time::Duration::ZERO), "nothing else was caught");
    });
}

#[test]
fn only_the_users_named_are_redirected() {
    in_namespace(|| {
        route::add_local_default("lo").expect("route");
        let ours = listen("0.0.0.0");
        let by = |user| Selector { users: vec![user], to_this_host: true, ..Selector::default() };
        let redirect = |user| Redirect {
            port: port(&ours),
            v4: true,
            v6: false,
            local: vec![by(user)],
            forwarded: vec![],
            hold: None,
        };
        apply(&Steering { redirects: vec![redirect(65533)], ..Steering::default() });
        assert!(connect("192.0.2.7:9").is_err(), "root is not meant");
        apply(&Steering { redirects: vec![redirect(0)], ..Steering::default() });
        let _client = connect("192.0.2.7:9").expect("caught");
        assert_eq!(sockopt::original_dst(accept(&ours).0).expect("kept").to_string(), "192.0.2.7:9");
    });
}

#[test]
fn forwarded_connections_are_redirected() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| [listen("10.0.2.1"), listen("fd00:2::1")]);
    let destinations = server.each_ref().map(|listener| listener.local_addr().expect("address"));
    let ours = line.router.run(|| {
        let ours = listen("::");
        let selector =
            Selector { interfaces: vec!["to-client".parse().expect("name")], ..Selector::default() };
        let redirect = Redirect {
            port: port(&ours),
            v4: true,
            v6: true,
            local: vec![],
            forwarded: vec![selector],
            hold: None,
        };
        apply(&Steering { redirects: vec![redirect], ..Steering::default() });
        ours
    });
    for destination in destinations {
        let mut client = line.client.run(move || connect(&destination.to_string()).expect("connect"));
        let (mut caught, peer) = accept(&ours);
        assert_eq!(sockopt::original_dst(&caught).expect("kept"), destination);
        assert_eq!(sockopt::canonical(peer), client.local_addr().expect("address"));
        talk(&mut client, &mut caught);
    }
    // The router's own address is not meant, and the router itself still reaches the server.
    assert!(line.client.run(|| connect("10.0.1.254:9").is_err()));
    let mut own = line.router.run(move || connect(&destinations[0].to_string()).expect("connect"));
    talk(&mut own, &mut accept(&server[0]).0);
}

#[test]
fn the_kernel_path_carries_to_the_server() {
    if !is_root() {
        return;
    }
    for masquerade in [false, true] {
        let line = Line::new();
        let servers = line.server.run(|| [listen("10.0.2.1"), listen("fd00:2::1")]);
        let [server4, server6] = servers.each_ref().map(|listener| listener.local_addr().expect("address"));
        line.router.run(move || {
            let pairs = vec![
                ("10.0.1.254:80".parse().expect("address"), server4),
                ("[fd00:1::fe]:80".parse().expect("address"), server6),
                ("0.0.0.0:81".parse().expect("address"), server4),
                ("[::]:81".parse().expect("address"), server6),
            ];
            let path = KernelPath {
                protocol: Tcp,
                mark: MarkBits { value: 7, mask: 0xff },
                route: KernelRoute::Dnat { pairs, masquerade },
            };
            // All of these are addresses we listen on: that must not keep the kernel path from them.
            let listeners = ["10.0.1.254:80", "[fd00:1::fe]:80", "0.0.0.0:81", "[::]:81"];
            let except = Except {
                listeners: listeners.map(|address| address.parse().expect(address)).to_vec(),
                ..Except::default()
            };
            apply(&Steering { except, kernel_paths: vec![path], ..Steering::default() });
        });
        let targets = ["10.0.1.254:80", "[fd00:1::fe]:80", "10.0.1.254:81", "[fd00:2::fe]:81"];
        for (listener, target) in servers.iter().cycle().zip(targets) {
            let mut client = line.client.run(move || connect(target).expect(target));
            let (mut served, peer) = accept(listener);
            let masqueraded = peer.ip() != client.local_addr().expect("address").ip();
            assert_eq!(masqueraded, masquerade, "{target} from {peer}");
            talk(&mut client, &mut served);
        }
        // From the router itself too.
        let mut own = line.router.run(|| connect("10.0.1.254:80").expect("connect"));
        talk(&mut own, &mut accept(&servers[0]).0);
    }
}

/// A listener that takes connections to any address.
fn transparent_listener(address: &str) -> TcpListener {
    let address: SocketAddr = format!("{address}:0").parse().expect("address");
    let socket = sockopt::stream_socket(&address).expect("socket");
    sockopt::set_transparent(&socket).expect("root");
    socket.bind(&address.into()).expect("bind");
    socket.listen(16).expect("listen");
    socket.into()
}

fn route_marked_packets_here() -> Vec<MarkRule> {
    let rules = IpVersion::BOTH.map(|version| MarkRule {
        version,
        mark: TPROXY_MARK.value,
        mask: TPROXY_MARK.mask,
        table: 5300,
        priority: 5300,
    });
    for rule in &rules {
        route::add_mark_rule(rule).expect("rule");
        route::add_local_default_in("lo", rule.version, rule.table).expect("route");
    }
    rules.to_vec()
}

#[test]
fn tproxy_keeps_both_addresses_on_both_sides() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| [listen("10.0.2.1"), listen("fd00:2::1")]);
    let ours = line.router.run(|| {
        route_marked_packets_here();
        let ours = [transparent_listener("0.0.0.0"), transparent_listener("[::]")];
        let tproxy = |listener: &TcpListener, v6: bool| TProxy {
            protocol: Tcp,
            port: port(listener),
            v4: !v6,
            v6,
            selectors: vec![Selector {
                interfaces: vec!["to-client".parse().expect("name")],
                ..Selector::default()
            }],
            local: vec![],
            only_known: false,
            drop_without_listener: true,
            hold: None,
        };
        let tproxies = vec![tproxy(&ours[0], false), tproxy(&ours[1], true)];
        let except = Except { mark: Some(OUR_MARK), ..Except::default() };
        apply(&Steering { except, tproxies, tproxy_mark: Some(TPROXY_MARK), ..Steering::default() });
        ours
    });
    for (server, listener) in servers.iter().zip(&ours) {
        let destination = server.local_addr().expect("address");
        let mut client = line.client.run(move || connect(&destination.to_string()).expect("connect"));
        let client_address = client.local_addr().expect("address");
        let (mut caught, peer) = accept(listener);
        assert_eq!(
            caught.local_addr().expect("address"),
            destination,
            "the listener sees where it was to go"
        );
        assert_eq!(peer, client_address);
        talk(&mut client, &mut caught);
        let mut carried = line.router.run(move || connect_as(client_address, destination));
        let (mut served, peer) = accept(server);
        assert_eq!(peer.ip(), client_address.ip(), "the server sees the client");
        talk(&mut carried, &mut served);
    }
}

/// Connects from a foreign address.
fn connect_as(client: SocketAddr, to: SocketAddr) -> std::net::TcpStream {
    let socket = sockopt::stream_socket(&to).expect("socket");
    sockopt::set_transparent(&socket).expect("root");
    sockopt::set_mark(&socket, OUR_MARK.value).expect("root");
    socket.bind(&SocketAddr::new(client.ip(), 0).into()).expect("foreign bind");
    socket.set_nonblocking(false).expect("blocking");
    socket.connect_timeout(&to.into(), sidetrack_testkit::LIMIT).expect("connect");
    socket.into()
}

#[test]
fn tproxy_without_a_listener_drops_or_lets_pass_as_told() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| listen("10.0.2.1"));
    let destination = server.local_addr().expect("address");
    for (drop_without_listener, reachable) in [(false, true), (true, false)] {
        line.router.run(move || {
            route_marked_packets_here();
            let tproxy = TProxy {
                protocol: Tcp,
                port: 9,
                v4: true,
                v6: true,
                selectors: vec![Selector::default()],
                local: vec![],
                only_known: false,
                drop_without_listener,
                hold: None,
            };
            apply(&Steering {
                tproxies: vec![tproxy],
                tproxy_mark: Some(TPROXY_MARK),
                ..Steering::default()
            });
        });
        let reached = line.client.run(move || {
            let limit =
                if reachable { sidetrack_testkit::LIMIT } else { std::time::Duration::from_millis(200) };
            std::net::TcpStream::connect_timeout(&destination, limit).is_ok()
        });
        assert_eq!(reached, reachable);
    }
}

#[test]
fn connections_that_were_there_before_are_not_cut() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| listen("10.0.2.1"));
    let destination = server.local_addr().expect("address");
    let mut client = line.client.run(move || connect(&destination.to_string()).expect("connect"));
    let (mut served, _) = accept(&server);
    talk(&mut client, &mut served);
    line.router.run(|| {
        route_marked_packets_here();
        let all = Selector::default();
        let redirect =
            Redirect { port: 9, v4: true, v6: true, local: vec![], forwarded: vec![all.clone()], hold: None };
        let tproxy = TProxy {
            protocol: Tcp,
            port: 9,
            v4: true,
            v6: true,
            selectors: vec![all],
            local: vec![],
            only_known: false,
            drop_without_listener: true,
            hold: None,
        };
        apply(&Steering {
            tproxies: vec![tproxy],
            tproxy_mark: Some(TPROXY_MARK),
            redirects: vec![redirect],
            ..Steering::default()
        });
    });
    talk(&mut client, &mut served);
    talk(&mut served, &mut client);
}

#[test]
fn reloading_cuts_nothing() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| listen("10.0.2.1"));
    let steering = |to: &TcpListener| {
        let pairs = vec![("10.0.1.254:80".parse().expect("address"), to.local_addr().expect("address"))];
        let mark = MarkBits { value: 7, mask: 0xff };
        let path = KernelPath { protocol: Tcp, mark, route: KernelRoute::Dnat { pairs, masquerade: false } };
        Steering { kernel_paths: vec![path], ..Steering::default() }
    };
    let (first, second) = (steering(&server), Steering::default());
    let mut table = line
        .router
        .run(move || OwnedTable::create(&first.table("sidetrack"), Lifetime::Socket).expect("table"));
    let mut client = line.client.run(|| connect("10.0.1.254:80").expect("connect"));
    let (mut served, _) = accept(&server);
    talk(&mut client, &mut served);
    let table = line.router.run(move || {
        table.replace(&second.table("sidetrack")).expect("replaced");
        table
    });
    // The kernel removes unused state a moment later. If that removed the address translation, the connection would
    // end here.
    let replaced = std::time::Instant::now();
    while replaced.elapsed() < std::time::Duration::from_secs(1) {
        talk(&mut client, &mut served);
        std::thread::park_timeout(std::time::Duration::from_millis(10));
    }
    assert!(line.client.run(|| connect("10.0.1.254:80").is_err()), "new connections follow the new table");
    drop(table);
}

/// Waits until one of the two has a connection: whether it is the first. A connection may be in the queue of its listener a
/// moment later than connect(2) returns.
fn whose(first: &TcpListener, second: &TcpListener) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec { tv_sec: sidetrack_testkit::LIMIT.as_secs().cast_signed(), tv_nsec: 0 };
    let mut fds = [PollFd::new(first, PollFlags::IN), PollFd::new(second, PollFlags::IN)];
    assert!(poll(&mut fds, Some(&limit)).expect("poll") > 0, "nobody has it");
    fds[0].revents().contains(PollFlags::IN)
}

#[test]
fn no_connection_slips_past_a_change() {
    in_namespace(|| {
        let [ours, server] = ["127.0.0.1", "127.0.0.1"].map(listen);
        let (to, redirected) = (server.local_addr().expect("address"), port(&ours));
        let steering = |other: u16| {
            // Sets of ranges and of single values, which differ each time.
            let selector = Selector {
                destinations: set(&["127.0.0.0/8", &format!("192.0.2.{}", other % 256)]),
                ports: [(to.port(), to.port()), (other, other)].into_iter().collect(),
                to_this_host: true,
                ..Selector::default()
            };
            let redirect = Redirect {
                port: redirected,
                v4: true,
                v6: false,
                local: vec![selector],
                forwarded: vec![],
                hold: None,
            };
            Steering { redirects: vec![redirect], ..Steering::default() }.table("sidetrack")
        };
        let mut table = OwnedTable::create(&steering(1), Lifetime::Socket).expect("table");
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let connecting = std::thread::spawn(move || {
            let running = || stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty);
            let (mut caught, mut slipped) = (0, 0);
            while running() && caught < 20_000 {
                let client = connect(&to.to_string()).expect("connect");
                let is_caught = whose(&ours, &server);
                drop((client, accept(if is_caught { &ours } else { &server })));
                *(if is_caught { &mut caught } else { &mut slipped }) += 1;
            }
            (caught, slipped)
        });
        for other in 2..80 {
            table.replace(&steering(other)).expect("replaced");
        }
        drop(stop);
        let (caught, slipped) = connecting.join().expect("connected");
        assert!(caught > 0 && slipped == 0, "{slipped} went past, {caught} did not");
    });
}

#[test]
fn routes_and_rules_are_found_and_removed() {
    in_namespace(|| {
        let rules = route_marked_packets_here();
        route_marked_packets_here();
        let mut found = route::ours().expect("listed");
        found.rules.sort_unstable();
        assert_eq!(found.rules, rules, "twice the same is there once");
        assert_eq!(found.local_defaults, IpVersion::BOTH.map(|version| (version, 1, 5300)));
        assert_eq!(route::remove_ours().expect("removed"), 4);
        assert_eq!(route::ours().expect("listed"), route::Ours::default());
        assert_eq!(route::remove_ours().expect("nothing left"), 0);
        for rule in &rules {
            route::remove_mark_rule(rule).expect("gone already is no error");
            route::remove_local_default_in("lo", rule.version, rule.table).expect("gone already is no error");
        }
        route::add_address("lo", "192.0.2.1".parse().expect("address"), 32).expect("added");
        route::add_address("lo", "192.0.2.1".parse().expect("address"), 32).expect("twice is no error");
        let error = route::link_up("no-such-link").expect_err("there is none");
        assert!(error.to_string().contains("no-such-link"), "{error}");
    });
}

/// Set in the environment of the child process that connects from a cgroup.
const CHILD: &str = "SIDETRACK_TEST_CONNECTS";

/// The child's part: once a line comes in it connects and says how that went. Without the variable it does nothing.
#[test]
fn connects_from_a_cgroup() {
    let Ok(to) = std::env::var(CHILD) else { return };
    std::io::stdin().lines().next();
    println!("\nconnected: {}", connect(&to).is_ok());
}

#[test]
fn only_the_cgroup_named_is_redirected() {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    in_namespace(|| {
        let Ok(leaf) = Hierarchy::find()
            .and_then(|tree| tree.create_leaf(&format!("sidetrack-test-{}", std::process::id())))
        else {
            eprintln!("skipped: needs a writable cgroup2 hierarchy");
            return;
        };
        route::add_local_default("lo").expect("route");
        let ours = listen("0.0.0.0");
        let cgroups = vec![CgroupMatch { id: leaf.id(), level: leaf.level() }];
        let selector = Selector { cgroups, to_this_host: true, ..Selector::default() };
        let redirect = Redirect {
            port: port(&ours),
            v4: true,
            v6: true,
            local: vec![selector],
            forwarded: vec![],
            hold: None,
        };
        apply(&Steering { redirects: vec![redirect], ..Steering::default() });
        for (inside, expected) in [(false, "connected: false"), (true, "connected: true")] {
            let mut child = Command::new(std::env::current_exe().expect("this test"))
                .args(["--exact", "connects_from_a_cgroup", "--nocapture"])
                .env(CHILD, "192.0.2.7:9")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .expect("child");
            if inside {
                leaf.add(child.id()).expect("moved");
            }
            child.stdin.take().expect("piped").write_all(b"go\n").expect("told");
            let output = child.wait_with_output().expect("ended");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains(expected), "{said}");
        }
        leaf.remove().expect("empty again");
        assert_eq!(sockopt::original_dst(accept(&ours).0).expect("kept").to_string(), "192.0.2.7:9");
    });
}
