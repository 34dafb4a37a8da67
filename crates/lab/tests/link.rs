//! Emulated links between real namespaces: the configured conditions apply to real packets, and are counted.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::time::Duration;

use sidetrack_lab::launch::launcher;
use sidetrack_lab::link::{Conditions, Counts, Kind, Loss, Network, Rate, Way, Wire};
use sidetrack_lab::probe::{self, Stream};
use sidetrack_lab::topology::Node;
use support::{Done, Tally};

const MS: Duration = Duration::from_millis(1);
/// Maximum time that a link may subtract from a delay for its own wake-up, in nanoseconds. The least of many delays
/// may show some of it.
const WAKE_NS: u64 = 80_000;
/// 2 ms between datagrams: this test is about the behaviour of the link, not its speed.
const STREAM: Stream =
    Stream { count: 1000, gap: Duration::from_micros(200), bytes: 1000, longest: Duration::from_secs(2) };

struct Pair {
    a: Node,
    b: Node,
    wire: Wire,
    _network: Network,
}

fn pair(conditions: [Conditions; 2]) -> Pair {
    let launcher = launcher().expect("built beside the tests");
    let (a, b) = (Node::new("a", &launcher).expect("a node"), Node::new("b", &launcher).expect("a node"));
    let network = Network::new(Kind::Builtin, &launcher, 5).expect("a network");
    let wire = network.join(&a, &b, 9, conditions).expect("a link");
    Pair { a, b, wire, _network: network }
}

impl Pair {
    fn forth(&self) -> Counts {
        self.wire.counts().expect("it runs").expect("our own link")[Way::Forth.index()]
    }

    fn address(&self) -> IpAddr {
        self.wire.link.b.v4.into()
    }

    fn stream(&self) -> probe::Arrivals {
        probe::one_way(&self.a, &self.b, self.address(), STREAM).expect("datagrams")
    }
}

/// Runs `body` as root if there is TUN/TAP; otherwise the test is skipped.
fn as_root(case: &str, body: impl FnOnce()) {
    let mut tally = Tally::default();
    let done = if !rustix::process::geteuid().is_root() {
        Done::Skipped("namespaces with links need root".into())
    } else if !std::path::Path::new("/dev/net/tun").exists() {
        Done::Skipped("this host has no /dev/net/tun".into())
    } else {
        body();
        Done::Ran
    };
    tally.note(case, Ok(done));
    tally.finish();
}

/// Returns the least measured time, in nanoseconds. It measures again while that is not below `bound`: on a busy
/// machine all times of a round may be too long, but not for ever.
fn least_of(bound: u64, measure: impl Fn() -> Vec<u64>) -> u64 {
    let mut least = u64::MAX;
    for _ in 0..20 {
        least = measure().into_iter().fold(least, u64::min);
        if least < bound {
            break;
        }
    }
    least
}

#[test]
fn delay_is_never_less_than_nominal_and_each_way_has_its_own() {
    as_root("delays", || {
        let pair = pair([Conditions::delayed(8 * MS), Conditions::delayed(3 * MS)]);
        let (v4, v6) = (pair.wire.link.b.v4.into(), pair.wire.link.b.v6.into());
        for address in [v4, v6] {
            let least = least_of(16_000_000, || {
                let times = probe::round_trips(&pair.a, &pair.b, address, 20, MS).expect("answers");
                assert_eq!(times.len(), 20);
                times
            });
            assert!((11_000_000 - 2 * WAKE_NS..16_000_000).contains(&least), "{least}");
        }
        let least = least_of(11_000_000, || pair.stream().delays_ns());
        assert!((8_000_000 - WAKE_NS..11_000_000).contains(&least), "{least}");
    });
}

#[test]
fn what_is_counted_as_lost_is_what_is_missing() {
    as_root("loss", || {
        let lossy = Conditions { loss: Loss::Bernoulli(0.05), ..Conditions::default() };
        let pair = pair([lossy, Conditions::default()]);
        // Neighbour discovery of both families comes first, so that only the probe's datagrams are lost.
        probe::round_trips(&pair.a, &pair.b, pair.address(), 2, MS).expect("answers");
        let before = pair.forth();
        let arrivals = pair.stream();
        let after = pair.forth();
        let lost = after.lost - before.lost;
        let missing = u64::from(STREAM.count) - arrivals.distinct();
        // A host may send frames by itself (MLD, neighbour probes), and lose those.
        assert!(lost >= missing && lost - missing <= 3, "{lost} counted, {missing} missing");
        // 50 +- 4 * sqrt(1000 * 0.05 * 0.95).
        assert!((22..78).contains(&missing), "{missing}");
        assert_eq!(arrivals.out_of_order(), 0);
    });
}

#[test]
fn duplicates_and_overtaking_reach_the_receiver() {
    as_root("duplicates", || {
        let odd = Conditions { duplicate: 0.1, reorder: 0.1, ..Conditions::delayed(5 * MS) };
        let pair = pair([odd, Conditions::default()]);
        let arrivals = pair.stream();
        assert_eq!(arrivals.distinct(), 1000);
        assert!((60..140).contains(&arrivals.duplicates()), "{}", arrivals.duplicates());
        assert!(arrivals.out_of_order() > 500, "an early frame makes late ones of those it overtook");
    });
}

#[test]
fn a_link_goes_down_and_up_while_it_runs() {
    as_root("down and up", || {
        let pair = pair([Conditions::default(); 2]);
        let reaches =
            || !probe::round_trips(&pair.a, &pair.b, pair.address(), 1, MS).expect("sockets").is_empty();
        assert!(reaches());
        pair.wire.set(Way::Forth, Conditions { is_up: false, ..Conditions::default() }).expect("it runs");
        assert!(!reaches());
        assert!(pair.forth().down > 0);
        pair.wire.set_both(Conditions::delayed(MS)).expect("it runs");
        assert!(reaches());
    });
}

#[test]
fn tcp_is_byte_exact_through_loss_and_a_rate_cut_out_of_super_frames() {
    as_root("tcp", || {
        let rate = Some(Rate { bits_per_second: 100_000_000, queue_bytes: 200_000 });
        let hard = Conditions { loss: Loss::Bernoulli(0.01), rate, ..Conditions::delayed(MS) };
        let pair = pair([hard, hard]);
        for address in [pair.address(), pair.wire.link.b.v6.into()] {
            let listener = pair.b.enter(|| Ok(TcpListener::bind((address, 0))?)).expect("bound");
            let target = listener.local_addr().expect("bound");
            let connect = move || Ok(TcpStream::connect_timeout(&target, Duration::from_secs(60))?);
            let mut client = pair.a.enter(connect).expect("connected");
            let (mut server, _) = listener.accept().expect("connected");
            server.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
            let sent: Vec<u8> =
                (0..2_000_003u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            let copy = sent.clone();
            let sending = std::thread::spawn(move || client.write_all(&copy));
            let mut received = Vec::new();
            server.read_to_end(&mut received).expect("all of it");
            sending.join().expect("no panic").expect("written");
            assert!(received == sent, "{} bytes of {}", received.len(), sent.len());
        }
        let counts = pair.forth();
        assert!(counts.lost > 10 && counts.overrun == 0, "{counts:?}");
        assert!(counts.offered > 2 * 1300, "super-frames count as what they stand for: {counts:?}");
    });
}

#[test]
fn ends_of_links_go_with_the_network() {
    as_root("ends", || {
        let Pair { a, b, wire, _network: network } = pair([Conditions::default(); 2]);
        let has_link = |node: &Node| node.run("ip", &["link"]).expect("listed").contains("link9");
        assert!(has_link(&a) && has_link(&b));
        assert_eq!(wire.overruns(&a).expect("readable"), 0);
        drop((wire, network));
        assert!(!has_link(&a) && !has_link(&b));
    });
}
