//! Our tables on the live kernel: real connections, and the nft tool's reading of them.

use sidetrack_core::flow::Protocol::{Tcp, Udp};
use sidetrack_core::net::IpNet;
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::netns::WHOLE_DATAGRAMS;
use sidetrack_sys::sockopt::{ListenOptions, listen as listen_with, original_dst};
use sidetrack_sys::udp::answers::AnswerSockets;
use sidetrack_sys::udp::batch::Batch;
use sidetrack_sys::udp::bind_transparent;
use sidetrack_sys::{nft, route};
use sidetrack_testkit::{accept, connect, eventually, flat, in_namespace, listen};
use std::io::{Read as _, Write as _};
use std::net::UdpSocket;
use std::time::Duration;

fn netfilter() -> Socket {
    Socket::open(Protocol::Netfilter).expect("netfilter socket")
}

#[test]
fn run_namespace_catches_every_address_of_both_versions() {
    in_namespace(|| {
        let listener = listen("::");
        let port = listener.local_addr().expect("address").port();
        route::add_local_default("lo").expect("any address is local");
        route::add_local_default("lo").expect("twice is no error");
        let table = nft::run_namespace(port);
        table.apply(&mut netfilter()).expect("first time");
        table.apply(&mut netfilter()).expect("again, in place of the first");
        for destination in ["192.0.2.7:80", "127.0.0.1:81", "[2001:db8::7]:443", "[::1]:444"] {
            let _client = connect(destination).expect(destination);
            let (caught, _) = accept(&listener);
            assert_eq!(original_dst(&caught).expect("kept").to_string(), destination);
        }
        if let Some(listing) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert_eq!(flat(&listing), flat(&table.to_string()));
        }
    });
}

#[test]
fn servers_of_the_namespace_are_reached_at_loopback_and_all_else_is_caught() {
    in_namespace(|| {
        let options = ListenOptions { dual_stack: true, transparent: true, ..ListenOptions::default() };
        let catching = listen_with("[::]:0".parse().expect("address"), &options).expect("listener");
        let port = catching.local_addr().expect("address").port();
        route::add_local_default("lo").expect("any address is local");
        nft::run_namespace_with_servers(port).apply(&mut netfilter()).expect("applied");
        for server in ["127.0.0.1", "0.0.0.0", "::1", "::"] {
            let server = listen(server);
            let port = server.local_addr().expect("address").port();
            let loopback = if server.local_addr().expect("address").is_ipv6() { "::1" } else { "127.0.0.1" };
            let destination = std::net::SocketAddr::new(loopback.parse().expect("address"), port);
            let client = connect(&destination.to_string()).expect("reached");
            let (served, peer) = accept(&server);
            assert_eq!(peer, client.local_addr().expect("address"));
            assert_eq!(served.local_addr().expect("address"), destination);
            drop(server);
            // Nothing listens there any more: it is caught.
            let _client = connect(&destination.to_string()).expect("caught");
            assert_eq!(original_dst(&accept(&catching).0).expect("kept"), destination);
        }
        for destination in ["192.0.2.7:80", "127.1.2.3:81", "[2001:db8::7]:443"] {
            let _client = connect(destination).expect(destination);
            assert_eq!(original_dst(&accept(&catching).0).expect("kept").to_string(), destination);
        }
        // Each has the port of its socket, also if two have the same one.
        let [first, second] = [80, 81].map(|server| {
            let socket =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("socket");
            socket.set_reuse_address(true).expect("set");
            socket.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 23_456)).into()).expect("bound");
            socket.connect(&std::net::SocketAddr::from(([192, 0, 2, 7], server)).into()).expect("caught");
            let (caught, peer) = accept(&catching);
            assert_eq!(original_dst(&caught).expect("kept").port(), server);
            (socket, caught, peer)
        });
        assert_eq!((first.2.port(), second.2.port()), (23_456, 23_456));
        if let Some(listing) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert_eq!(flat(&listing), flat(&nft::run_namespace_with_servers(port).to_string()));
        }
    });
}

#[test]
fn streams_are_whole_with_the_larger_packets() {
    const BYTES: usize = 8_000_000;
    in_namespace(|| {
        route::set_mtu("lo", WHOLE_DATAGRAMS).expect("a larger MTU");
        for address in ["127.0.0.1", "::1"] {
            let listener = listen(address);
            let mut client =
                std::net::TcpStream::connect(listener.local_addr().expect("address")).expect("connected");
            let (mut server, _) = accept(&listener);
            let sender = std::thread::spawn(move || server.write_all(&vec![7; BYTES]));
            client.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
            let mut got = Vec::new();
            client.read_to_end(&mut got).expect("every byte in time");
            assert_eq!(got.len(), BYTES, "{address}");
            sender.join().expect("no panic").expect("sent");
        }
    });
}

#[test]
fn datagrams_of_the_namespace_are_caught_and_answered_from_the_asked_address() {
    in_namespace(|| {
        route::set_mtu("lo", WHOLE_DATAGRAMS).expect("a larger MTU");
        route::add_local_default("lo").expect("any address is local");
        let port = listen("127.0.0.1").local_addr().expect("address").port();
        nft::run_namespace_with_datagrams(port).apply(&mut netfilter()).expect("applied");
        let caught = ["0.0.0.0", "::"].map(|any| {
            let socket =
                bind_transparent((any.parse::<std::net::IpAddr>().expect("address"), port).into(), false);
            socket.expect("a transparent socket")
        });
        let answers = AnswerSockets::open(Some(nft::ANSWERS_MARK)).expect("raw sockets");
        let mut batch = Batch::new();
        for asked in ["192.0.2.7:443", "[2001:db8::7]:443", "127.1.2.3:81", "[::1]:82"] {
            let asked: std::net::SocketAddr = asked.parse().expect("address");
            let any = if asked.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            for length in [0, 1, 1473, 65_507] {
                let client = UdpSocket::bind(any).expect("bound");
                client.connect(asked).expect("connected");
                client.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
                let payload = vec![7; length];
                client.send(&payload).expect("sent");
                let socket = &caught[usize::from(asked.is_ipv6())];
                eventually("it is caught", || batch.receive(socket).is_ok());
                assert_eq!(batch.original(0), Some(asked), "{length} bytes");
                assert!(batch.datagrams(0).eq([&payload[..]]), "{length} bytes of {asked}");
                answers.send(asked, batch.addresses(0).0.expect("a sender"), &payload).expect("answered");
                let mut buffer = vec![0; 65_536];
                assert_eq!(client.recv(&mut buffer).expect("an answer"), length, "{asked}");
            }
        }
        // Sockets of the namespace at loopback reach each other, and the resolver has port 53.
        for (server, to) in [("127.0.0.1:0", None), ("[::1]:0", None), ("0.0.0.0:53", Some("192.0.2.53:53"))]
        {
            let server = UdpSocket::bind(server).expect("bound");
            let to =
                to.map_or_else(|| server.local_addr().expect("address"), |to| to.parse().expect("address"));
            let client = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).expect("bound");
            client.send_to(b"here", to).expect("sent");
            server.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
            assert_eq!(server.recv(&mut [0; 9]).expect("received"), 4, "{to}");
        }
        if let Some(listing) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert_eq!(flat(&listing), flat(&nft::run_namespace_with_datagrams(port).to_string()));
        }
    });
}

#[test]
fn run_namespace_works_where_ipv6_is_off() {
    in_namespace(|| {
        for name in ["all", "lo"] {
            sidetrack_sys::sysctl::write(&format!("net/ipv6/conf/{name}/disable_ipv6"), "1").expect("off");
        }
        assert!(!route::has_ipv6("lo") && !route::has_ipv6("no-such-link"));
        let listener = listen("0.0.0.0");
        route::add_local_default("lo").expect("IPv4 only");
        nft::run_namespace(listener.local_addr().expect("address").port())
            .apply(&mut netfilter())
            .expect("applied");
        let _client = connect("192.0.2.7:80").expect("caught");
        assert_eq!(original_dst(accept(&listener).0).expect("kept").to_string(), "192.0.2.7:80");
        route::remove_local_default("lo").expect("removed");
        assert!(connect("192.0.2.7:80").is_err(), "no route any more");
    });
}

fn net(text: &str) -> IpNet {
    text.parse().expect(text)
}

fn full_except() -> nft::Except {
    nft::Except {
        mark: Some(nft::MarkBits { value: 0x100, mask: 0xff00 }),
        listeners: ["192.0.2.9:1080", "[2001:db8::9]:1080", "0.0.0.0:8080"]
            .map(|a| a.parse().expect(a))
            .to_vec(),
        datagram_listeners: ["192.0.2.9:53", "[2001:db8::9]:53", "0.0.0.0:54"]
            .map(|a| a.parse().expect(a))
            .to_vec(),
        sources: [net("203.0.113.7")].into_iter().collect(),
        destinations: [net("169.254.0.0/16"), net("fe80::/10")].into_iter().collect(),
        users: vec![1, 2],
        cgroups: vec![],
    }
}

fn tproxy(
    protocol: sidetrack_core::flow::Protocol,
    port: u16,
    selectors: Vec<nft::Selector>,
    drop_without_listener: bool,
) -> nft::TProxy {
    let local = vec![];
    nft::TProxy {
        protocol,
        port,
        v4: true,
        v6: true,
        selectors,
        local,
        only_known: false,
        drop_without_listener,
        hold: None,
    }
}

fn full_paths(selector: &nft::Selector) -> Vec<nft::KernelPath> {
    use sidetrack_core::flow::Protocol::{Tcp, Udp};
    let pair = |from: &str, to: &str| (from.parse().expect(from), to.parse().expect(to));
    vec![
        nft::KernelPath {
            protocol: Udp,
            mark: nft::MarkBits { value: 3, mask: 0xff },
            route: nft::KernelRoute::Direct {
                local: vec![selector.clone()],
                forwarded: vec![selector.clone()],
                masquerade: false,
            },
        },
        nft::KernelPath {
            protocol: Udp,
            mark: nft::MarkBits { value: 4, mask: 0xff },
            route: nft::KernelRoute::Dnat {
                pairs: vec![pair("192.0.2.1:53", "192.0.2.2:5353"), pair("[::]:53", "[2001:db8::2]:5353")],
                masquerade: true,
            },
        },
        nft::KernelPath {
            protocol: Tcp,
            mark: nft::MarkBits { value: 1, mask: 0xff },
            route: nft::KernelRoute::Direct {
                local: vec![selector.clone()],
                forwarded: vec![selector.clone()],
                masquerade: true,
            },
        },
        nft::KernelPath {
            protocol: Tcp,
            mark: nft::MarkBits { value: 2, mask: 0xff },
            route: nft::KernelRoute::Dnat {
                pairs: vec![
                    pair("192.0.2.1:80", "192.0.2.2:8080"),
                    pair("192.0.2.1:81", "192.0.2.3:8080"),
                    pair("0.0.0.0:82", "192.0.2.3:8080"),
                    pair("[2001:db8::1]:80", "[2001:db8::2]:8080"),
                    pair("127.0.0.1:80", "192.0.2.3:8080"),
                ],
                masquerade: true,
            },
        },
    ]
}

/// Every builder at once, with every kind of match.
fn full_steering() -> nft::Steering {
    let selector = nft::Selector {
        sources: [net("198.51.100.0/24")].into_iter().collect(),
        destinations: [net("10.0.0.0/8"), net("192.0.2.1"), net("2001:db8::/32")].into_iter().collect(),
        ports: [(22, 22), (5000, 5010)].into_iter().collect(),
        ..nft::Selector::default()
    };
    let by_user = nft::Selector {
        users: vec![65534],
        ports: [(80, 80)].into_iter().collect(),
        to_this_host: true,
        ..nft::Selector::default()
    };
    let by_port = nft::Selector { ports: [(53, 53)].into_iter().collect(), ..nft::Selector::default() };
    let by_interface = nft::Selector {
        interfaces: vec!["eth0".parse().expect("name"), "eth1".parse().expect("name")],
        ..nft::Selector::default()
    };
    nft::Steering {
        forget_ended: true,
        datagram_idle_s: Some(300),
        divert_answers: true,
        kernel_mark: Some(nft::MarkBits { value: 0x8000_0000, mask: 0x8000_0000 }),
        except: full_except(),
        kernel_paths: full_paths(&selector),
        tproxies: vec![
            tproxy(Tcp, 1234, vec![by_interface.clone()], true),
            tproxy(Udp, 1235, vec![selector.clone(), by_port], false),
            nft::TProxy { local: vec![selector.clone(), by_user.clone()], ..tproxy(Udp, 1236, vec![], true) },
        ],
        tproxy_mark: Some(nft::MarkBits { value: 0x10000, mask: 0xff0000 }),
        redirects: vec![nft::Redirect {
            port: 15001,
            v4: true,
            v6: false,
            local: vec![by_user],
            forwarded: vec![selector, by_interface],
            hold: None,
        }],
    }
}

#[test]
fn nft_lists_what_the_plan_shows() {
    in_namespace(|| {
        let table = full_steering().table("sidetrack");
        table.apply(&mut netfilter()).expect("applied");
        if let Some(listing) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert_eq!(flat(&listing), flat(&table.to_string()), "listed:\n{listing}\nplanned:\n{table}");
        }
    });
}

#[test]
fn the_probe_knows_this_kernel_and_leaves_nothing() {
    in_namespace(|| {
        let probe = nft::probe(&mut netfilter()).expect("probe");
        eprintln!("{probe:?}");
        assert!(probe.has(nft::Feature::Redirect));
        if let Some(listing) = sidetrack_testkit::nft("list ruleset") {
            assert_eq!(listing, "");
        }
    });
}

#[test]
fn nft_reads_the_plan_as_we_mean_it() {
    in_namespace(|| {
        let table = full_steering().table("sidetrack");
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), table.to_string()).expect("written");
        if sidetrack_testkit::nft(&format!("-f {}", file.path().display())).is_none() {
            return;
        }
        let theirs = sidetrack_testkit::nft("list table inet sidetrack").expect("installed");
        table.apply(&mut netfilter()).expect("ours in its place");
        let ours = sidetrack_testkit::nft("list table inet sidetrack").expect("installed");
        assert_eq!(theirs, ours);
    });
}

#[test]
fn plans_are_as_reviewed() {
    insta::assert_snapshot!("run_namespace", nft::run_namespace(9).to_string());
    insta::assert_snapshot!("run_namespace_with_datagrams", nft::run_namespace_with_datagrams(9).to_string());
    insta::assert_snapshot!("run_namespace_with_servers", nft::run_namespace_with_servers(9).to_string());
    insta::assert_snapshot!("steering", full_steering().table("sidetrack").to_string());
}

/// What no builder uses yet but the model has.
fn every_other_statement() -> nft::Table {
    use nft::{DataKind as D, Field as F, Statement as S, Test as T, Value as V, Verdict};
    let rule = |statements: Vec<S>| nft::Rule::new(statements);
    let verdicts = nft::Set {
        name: "verdicts".into(),
        key: vec![D::Port],
        interval: true,
        data: Some(nft::MapData::Verdict),
        elements: [(1, 9, Verdict::Drop), (10, 65535, Verdict::Goto("other".into()))]
            .map(|(first, last, verdict)| nft::Element {
                key: vec![nft::Span::ports(first, last)],
                data: Some(nft::ElementData::Verdict(verdict)),
            })
            .to_vec(),
    };
    let ranges = nft::Set {
        name: "ranges".into(),
        key: vec![D::Ipv6, D::Port],
        interval: true,
        data: None,
        elements: vec![nft::Element::set(vec![net("2001:db8::/32").into(), nft::Span::ports(80, 90)])],
    };
    let filter = nft::Chain::base("early", nft::ChainKind::Filter, nft::Hook::Output, nft::priority::RAW - 5)
        .with(rule(vec![S::is(F::Ip4Destination, V::Ipv4([192, 0, 2, 1].into())), S::NoTrack]))
        .with(rule(vec![S::Match(vec![F::TcpDestination], T::NotIn("ports".into())), S::Counter]));
    let late = nft::Chain::base("late", nft::ChainKind::Filter, nft::Hook::Output, nft::priority::FILTER)
        .with(rule(vec![
            S::Match(
                vec![F::CtState],
                T::AnyOf(V::CtState(nft::ct_state::ESTABLISHED | nft::ct_state::RELATED)),
            ),
            S::Verdict(Verdict::Accept),
        ]))
        .with(rule(vec![
            S::is(F::OutputInterface, V::Interface("lo".parse().expect("name"))),
            S::SetCtMark { value: 1, mask: u32::MAX },
        ]))
        .with(rule(vec![
            S::Match(vec![F::Ip6Destination, F::TcpDestination], T::In("ranges".into())),
            S::Verdict(Verdict::Return),
        ]))
        .with(rule(vec![S::VerdictMap(vec![F::TcpDestination], "verdicts".into())]));
    let other = nft::Chain::regular("other")
        .with(rule(vec![S::is(F::TcpSource, V::Port(7)), S::Verdict(Verdict::Drop)]))
        .with(rule(vec![S::is(F::TcpDestination, V::Port(99)), S::RejectWithReset]));
    nft::Table::new(nft::Family::Inet, "sidetrack")
        .with_set(verdicts)
        .with_set(ranges)
        .with_set(nft::Set::of("ports", D::Port, [V::Port(7), V::Port(8)]))
        .with_chain(filter)
        .with_chain(other)
        .with_chain(late)
}

#[test]
fn every_other_statement_is_listed_as_planned_and_works() {
    in_namespace(|| {
        let table = every_other_statement();
        table.apply(&mut netfilter()).expect("applied");
        if let Some(listing) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert_eq!(flat(&listing), flat(&table.to_string()), "listed:\n{listing}\nplanned:\n{table}");
        }
        let _listener = std::net::TcpListener::bind("127.0.0.1:99").expect("a namespace of its own");
        let rejected = connect("127.0.0.1:99").expect_err("reset").kind();
        assert_eq!(rejected, std::io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn a_set_larger_than_one_message_is_filled_whole() {
    in_namespace(|| {
        let nets =
            (0..20_000u32).map(|n| IpNet::new(std::net::Ipv4Addr::from(0x0a00_0000 + n * 512).into(), 24));
        let except = nft::Except { destinations: nets.collect(), ..nft::Except::default() };
        let table = nft::Steering { except, ..nft::Steering::default() }.table("sidetrack");
        table.apply(&mut netfilter()).expect("applied");
        table.apply(&mut netfilter()).expect("replaced");
        if let Some(listing) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert_eq!(listing.matches("/24").count(), 20_000);
        }
    });
}

#[test]
fn without_the_right_the_refusal_says_what_to_do() {
    in_namespace(|| {
        sidetrack_sys::caps::keep_only(rustix::thread::CapabilitySet::empty()).expect("dropped");
        let error = nft::run_namespace(9).apply(&mut netfilter()).expect_err("no right").to_string();
        assert!(error.contains("table inet sidetrack") && error.contains("CAP_NET_ADMIN"), "{error}");
        let error = nft::probe(&mut netfilter()).expect_err("nothing is known").to_string();
        assert!(error.contains("CAP_NET_ADMIN"), "{error}");
    });
}

#[test]
fn a_flow_table_reads_as_nft_writes_it() {
    in_namespace(|| {
        let flowtable = nft::Flowtable {
            name: "shunted".into(),
            priority: nft::priority::FILTER,
            devices: vec!["lo".parse().expect("a name")],
            counter: true,
        };
        let rule = nft::Rule::new([
            nft::Statement::mark(nft::Field::CtMark, 0x8000_0000, 0x8000_0000),
            nft::Statement::FlowAdd("shunted".into()),
        ]);
        let chain = nft::Chain::base("forward", nft::ChainKind::Filter, nft::Hook::Forward, 0).with(rule);
        let table =
            nft::Table::new(nft::Family::Inet, "sidetrack").with_flowtable(flowtable).with_chain(chain);
        assert_eq!(
            table.to_string(),
            "table inet sidetrack {\n\tflowtable shunted {\n\t\thook ingress priority filter\n\t\tdevices = { lo }\n\
             \t\tcounter\n\t}\n\n\tchain forward {\n\t\ttype filter hook forward priority filter; policy accept;\n\
             \t\tct mark 0x80000000/1 flow add @shunted\n\t}\n}\n"
        );
        if nft::knows(&mut netfilter(), nft::Feature::Flowtable).expect("asked") {
            table.apply(&mut netfilter()).expect("taken");
            let listing = sidetrack_testkit::nft("list table inet sidetrack").expect("nft");
            assert_eq!(flat(&listing), flat(&table.to_string()), "listed:\n{listing}\nplanned:\n{table}");
        }
    });
}
