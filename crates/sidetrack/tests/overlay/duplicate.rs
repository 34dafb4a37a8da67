//! A copy of each packet on two paths: what a cut link or a killed relay costs.
//!
//! ```text
//!          .-- 10.8.1.0/24 -- r1 -- 10.9.1.0/24 --.
//!         a                                        b      an application on a sends numbered datagrams to one on b
//!          '-- 10.8.2.0/24 -- r2 -- 10.9.2.0/24 --'
//! ```

use crate::node::{Up, at};
use crate::scene::{Keys, status, wait_for};
use crate::streams::{arrives, end, link, sockets, stream};
use crate::tools::run;
use sidetrack_testkit::{Node, eventually, is_root};
use std::time::Duration;

/// Packets of one stream; the fault comes after a third of them.
const COUNT: u32 = 900;

/// Between two packets.
const PACE: Duration = Duration::from_millis(1);

/// Most runs of a stream: it is repeated if a busy machine declared a link dead that the test had not touched.
const RUNS: usize = 5;

/// Two ends and two relays, as drawn at the head of the file.
struct Square {
    a: Node,
    b: Node,
    relays: Vec<Node>,
    up_a: Up,
    up_b: Up,
    ups: Vec<Option<Up>>,
}

impl Square {
    /// Nodes whose packets travel by this service.
    fn new(service: &str) -> Self {
        Self::with(&["r1", "r2"], service)
    }

    /// The same with these relays.
    fn with(names: &[&str], service: &str) -> Self {
        let [a, b] = [(); 2].map(|()| Node::new());
        let keys = Keys::new(&[&["a", "b"], names].concat());
        let relays: Vec<_> = names.iter().map(|_| Node::new()).collect();
        let ups = (1..=names.len()).map(|at| {
            let relay = &relays[at - 1];
            link(&a, relay, &format!("10.8.{at}"), [&format!("to-r{at}"), "to-a"]);
            link(&b, relay, &format!("10.9.{at}"), [&format!("to-r{at}"), "to-b"]);
            let own = format!("listen = [\"10.8.{at}.2:8100\", \"10.9.{at}.2:8100\"]\n");
            let text = keys.section(&format!("r{at}"), &[], true).replace("listen = \"127.0.0.1:0\"\n", &own);
            Some(relay.run(move || Up::start("", &text)))
        });
        let dials = |net: u8| {
            let address = |relay: usize| at(&format!("10.{net}.{relay}.2"), 8100);
            names.iter().enumerate().map(|(number, name)| (*name, address(number + 1))).collect::<Vec<_>>()
        };
        let ups = ups.collect();
        let up_a = end(&a, (&keys, "a", "b"), (1, 2), &dials(8), service);
        let up_b = end(&b, (&keys, "b", "a"), (2, 1), &dials(9), service);
        let square = Self { a, b, relays, up_a, up_b, ups };
        square.stands();
        square
    }

    /// Waits until packets from a to b arrive over both paths.
    fn stands(&self) {
        wait_for(&self.up_a, "two paths that packets arrive over", |status| arrives(status, 4));
    }

    /// Sends a stream; `fault` happens within it. Gives how often each packet came.
    fn stream(&mut self, fault: impl FnOnce(&mut Self)) -> Vec<u32> {
        stream(sockets(&self.a, &self.b), (COUNT, PACE), || fault(self))
    }

    /// The links that a and b have taken for dead, by the name of the relay.
    fn fallen(&mut self) -> Vec<String> {
        let logs = [&mut self.up_a, &mut self.up_b].map(|up| up.log_so_far());
        let lines = logs.iter().flat_map(|log| log.lines()).filter(|line| line.contains("overlay link down"));
        lines.map(ToOwned::to_owned).collect()
    }
}

/// Runs streams until one in which no link fell but those to `relay`.
fn without_loss(
    square: &mut Square,
    relay: usize,
    mut fault: impl FnMut(&mut Square),
    heal: impl Fn(&mut Square),
) {
    let other = format!("r{}", 2 - relay);
    for run in 0..RUNS {
        let before = square.fallen().iter().filter(|line| line.contains(&other)).count();
        let times = square.stream(&mut fault);
        assert!(times.iter().all(|times| *times < 2), "delivered twice");
        let lost = times.iter().filter(|times| **times == 0).count();
        let after = square.fallen().iter().filter(|line| line.contains(&other)).count();
        heal(square);
        if lost == 0 {
            return;
        }
        assert!(after > before, "{lost} packets lost in run {run}: {:#}", status(&square.up_a));
        square.stands();
    }
    panic!("the machine took links for dead in each of {RUNS} runs");
}

#[test]
fn a_cut_link_and_a_killed_relay_cost_no_packet_and_none_comes_twice() {
    if !is_root() {
        return;
    }
    let mut square = Square::new("link = \"best-effort\"\ndissemination = \"duplicate\"\n");
    // Within a stream the link from a to r1 is cut.
    let cut = |square: &mut Square| square.a.ip("link set to-r1 down");
    let heal = |square: &mut Square| {
        square.a.ip("link set to-r1 up");
        square.stands();
    };
    without_loss(&mut square, 0, cut, heal);
    let copies = |square: &Square| status(&square.up_a)["spread"]["copies"].as_u64().expect("a count");
    assert!(copies(&square) > u64::from(COUNT), "{:#}", status(&square.up_a));
    let end = status(&square.up_b);
    assert!(end["spread"]["duplicates"].as_u64() > Some(u64::from(COUNT / 4)), "{end:#}");
    assert!(end["spread"]["delivered"]["duplicate"].as_u64() >= Some(u64::from(COUNT)), "{end:#}");
    assert!(end["spread"]["off_graph"] == 0, "{end:#}");
    // Then a relay is killed as by a power cut; a new one takes its place.
    let kill = |square: &mut Square| {
        let mut relay = square.ups[1].take().expect("it runs");
        relay.signal(rustix::process::Signal::KILL);
        relay.gone();
    };
    let times = square.stream(kill);
    let lost = times.iter().filter(|times| **times == 0).count();
    assert!(times.iter().all(|times| *times < 2), "delivered twice");
    let is_to_first = |line: &String| line.contains("r1");
    let fell = square.fallen().iter().filter(|line| is_to_first(line)).count();
    // The link to r1 was cut before, and fell at both of its ends at most.
    assert!(lost == 0 || fell > 2, "{lost} packets lost: {:#}", status(&square.up_a));
    // One path is left, and packets go on over it.
    wait_for(&square.up_a, "one path", |status| arrives(status, 2));
    let times = square.stream(|_| {});
    assert!(times.iter().filter(|times| **times == 1).count() > COUNT as usize / 2);
    let metrics = crate::node::admin::show(&square.up_b, "/metrics");
    assert!(metrics.contains("sidetrack_overlay_packets_total{fate=\"duplicate\"}"), "{metrics}");
}

#[test]
fn a_flood_uses_all_links_within_its_hops_and_delivers_once() {
    if !is_root() {
        return;
    }
    let flood = "link = \"best-effort\"\ndissemination = \"flood\"\nhops = 2\ndeadline_ms = 5000\n";
    let mut square = Square::new(flood);
    let cut = |square: &mut Square| square.relays[0].ip("link set to-b down");
    let heal = |square: &mut Square| {
        square.relays[0].ip("link set to-b up");
        square.stands();
    };
    without_loss(&mut square, 0, cut, heal);
    eventually("the relays have passed packets", || {
        let relays = square.ups.iter().flatten();
        relays.map(|up| status(up)["spread"]["relayed"].as_u64()).all(|count| count > Some(100))
    });
    assert!(status(&square.up_b)["spread"]["delivered"]["flood"].as_u64() >= Some(u64::from(COUNT)));
}

#[test]
fn copies_on_two_real_time_paths_survive_losses_on_both() {
    if !is_root() {
        return;
    }
    let mut square = Square::new("link = \"real-time\"\ndissemination = \"duplicate\"\ndeadline_ms = 5000\n");
    // Without recovery, both copies of about nine in a thousand packets would be lost.
    for relay in ["r1", "r2"] {
        run(&square.up_a, &["link", "set", relay, "--loss", "5"]);
        run(&square.up_b, &["link", "set", relay, "--loss", "5"]);
    }
    for up in square.ups.iter().flatten() {
        run(up, &["link", "set", "a", "--loss", "5"]);
        run(up, &["link", "set", "b", "--loss", "5"]);
    }
    for _ in 0..RUNS {
        square.stands();
        let before = square.fallen().len();
        let times = square.stream(|_| {});
        assert!(times.iter().all(|times| *times < 2), "delivered twice");
        if square.fallen().len() > before {
            continue;
        }
        let lost = times.iter().filter(|times| **times == 0).count();
        assert_eq!(lost, 0, "{:#}", status(&square.up_b));
        let end = status(&square.up_b);
        assert!(end["spread"]["real_time"]["recovered"].as_u64() > Some(10), "{end:#}");
        assert!(end["spread"]["duplicates"].as_u64() > Some(u64::from(COUNT / 2)), "{end:#}");
        return;
    }
    panic!("the machine took links for dead in each of {RUNS} runs");
}

#[test]
#[ignore = "takes most of a minute: make test-more"]
fn a_graph_uses_all_neighbours_of_a_source_in_trouble_and_two_paths_again_later() {
    if !is_root() {
        return;
    }
    let graph = "link = \"best-effort\"\ndissemination = \"graph\"\ndeadline_ms = 5000\n";
    let mut square = Square::with(&["r1", "r2", "r3"], graph);
    // Two of the three links of a lose an eighth, both ways.
    let lose = |square: &Square, percent: &str| {
        for (relay, up) in ["r1", "r2"].iter().zip(&square.ups) {
            run(&square.up_a, &["link", "set", relay, "--loss", percent]);
            run(up.as_ref().expect("it runs"), &["link", "set", "a", "--loss", percent]);
        }
    };
    lose(&square, "12");
    for number in 0..=RUNS {
        assert!(number < RUNS, "the machine took links for dead in each of {RUNS} runs");
        wait_for(&square.up_a, "all neighbours of a", |status| arrives(status, 6));
        let before = square.fallen().len();
        let times = square.stream(|_| {});
        assert!(times.iter().all(|times| *times < 2), "delivered twice");
        if square.fallen().len() == before {
            let lost = times.iter().filter(|times| **times == 0).count();
            assert_eq!(lost, 0, "{:#}", status(&square.up_b));
            break;
        }
    }
    let ping =
        run(&square.up_a, &["ping", "b", "-c", "1", "--kind", "best-effort", "--dissemination", "duplicate"]);
    assert_eq!(ping.matches(" -> ").count(), 4, "{ping}");
    assert!(run(&square.up_a, &["path", "b"]).contains("best-effort, graph: a -> r"));
    let end = status(&square.up_b);
    assert!(end["spread"]["delivered"]["graph"].as_u64() >= Some(u64::from(COUNT)), "{end:#}");
    let services = end["services"].as_array().expect("services");
    let of = services.iter().find(|of| of["kind"] == "best-effort" && of["dissemination"] == "graph");
    let of = of.expect("the service of the stream");
    assert!(of["delivered"].as_u64() >= Some(u64::from(COUNT)) && of["late"] == 0, "{end:#}");
    let copies = status(&square.up_a)["services"][0]["copies"].as_u64();
    assert!(copies > Some(u64::from(2 * COUNT)), "{copies:?}");
    let metrics = crate::node::admin::show(&square.up_b, "/metrics");
    let labels = "kind=\"best-effort\",dissemination=\"graph\",fate=\"delivered\"";
    assert!(metrics.contains(&format!("sidetrack_overlay_service_packets_total{{{labels}}}")), "{metrics}");
    lose(&square, "0");
    square.stands();
}
