//! A site with two uplinks: one of them is pulled while packets and a transfer run.
//!
//! ```text
//!         .-- 10.8.1.0/24 --.
//!        a                   b       one link of the overlay with four legs; applications on both ends
//!         '-- 10.8.2.0/24 --'
//! ```

use crate::node::{Up, at};
use crate::scene::{Keys, random_bytes, status, wait_for};
use crate::streams::{behind, link, sockets, stream, to_b};
use crate::tools::run;
use serde_json::Value;
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Packets of one stream; an uplink is pulled after a third of them.
const COUNT: u32 = 1500;
const PACE: Duration = Duration::from_millis(1);

/// Most runs: the scene is made anew if a busy machine took the whole link for dead.
const RUNS: usize = 5;

struct Site {
    a: Node,
    b: Node,
    up_a: Up,
    up_b: Up,
    listener: Option<TcpListener>,
}

impl Site {
    /// Both ends send on these legs.
    fn new(legs: &str) -> Self {
        Self::with(legs, "")
    }

    /// `more` stands in the files of both ends.
    fn with(legs: &str, more: &str) -> Self {
        let [a, b] = [(); 2].map(|()| Node::new());
        let keys = Keys::new(&["a", "b"]);
        for net in 1..=2 {
            link(&a, &b, &format!("10.8.{net}"), [&format!("up{net}"), &format!("in{net}")]);
        }
        behind(&a, (1, 2));
        behind(&b, (2, 1));
        let listener = b.run(|| TcpListener::bind(at("10.2.0.1", 0)).expect("a port"));
        let server = listener.local_addr().expect("an address");
        let legs = format!("legs = \"{legs}\"\n[overlay.node.a]\n");
        let packets = |other: &str, own: u8, far: u8| {
            format!(
                "[[overlay.packets]]\nnode = \"{other}\"\nto = \"10.{far}.0.0/24\"\nlink = \"best-effort\"\n\
                 [[overlay.deliver]]\nto = \"10.{own}.0.0/24\"\n"
            )
        };
        let text = keys.section("b", &[], true).replace("127.0.0.1:0", "0.0.0.0:8100");
        let text = text.replacen("[overlay.node.a]\n", &legs, 1) + &packets("a", 2, 1) + more;
        let up_b = b.run(move || Up::start("", &text));
        let uplinks = format!("uplinks = [\"10.8.1.1\", \"10.8.2.1\"]\n{legs}");
        let text = keys.section("a", &[("b", at("10.8.1.2", 8100))], false);
        let text = text
            .replacen("[overlay.node.a]\n", &uplinks, 1)
            .replace("address = \"10.8.1.2:8100\"", "address = [\"10.8.1.2:8100\", \"10.8.2.2:8100\"]")
            + &packets("b", 1, 2)
            + more
            + &format!(
                "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
                 [[rule]]\nname = \"over\"\nmatch = {{ intercept = \"reverse\" }}\ncarrier = \"overlay:b\"\n"
            );
        let up_a = a.run(move || Up::start("default = \"direct\"\n", &text));
        let site = Self { a, b, up_a, up_b, listener: Some(listener) };
        site.stands();
        site
    }

    /// Waits until both ends use the link, and know that each uplink reaches each address.
    fn stands(&self) {
        for up in [&self.up_a, &self.up_b] {
            wait_for(up, "four legs", |status| up_legs(status).len() == 4);
        }
        wait_for(&self.up_a, "packets in datagrams", |status| to_b(status)["by_datagram"] == true);
    }

    /// Starts a transfer from a to b. Returns its sender, and its receiver with the longest time without a byte.
    fn transfer(&mut self, bytes: Vec<u8>) -> (JoinHandle<()>, JoinHandle<(Vec<u8>, Duration)>) {
        let entry = self.up_a.addresses("reverse")[0];
        let mut client = self.a.run(move || TcpStream::connect(entry).expect("a's listener"));
        let listener = self.listener.take().expect("one transfer");
        let receiver = std::thread::spawn(move || {
            let (mut server, _) = listener.accept().expect("the flow");
            server.set_read_timeout(Some(LIMIT)).expect("a time-out");
            let (mut got, mut longest, mut buffer) = (Vec::new(), Duration::ZERO, vec![0; 65_536]);
            let mut last = Instant::now();
            while let n @ 1.. = server.read(&mut buffer).expect("bytes") {
                longest = longest.max(last.elapsed());
                last = Instant::now();
                got.extend_from_slice(&buffer[..n]);
            }
            (got, longest)
        });
        let sender = std::thread::spawn(move || {
            for piece in bytes.chunks(4000) {
                client.write_all(piece).expect("room");
                std::thread::park_timeout(Duration::from_millis(1));
            }
            client.shutdown(Shutdown::Write).expect("ended");
            let _ = client.read(&mut [0]);
        });
        (sender, receiver)
    }

    fn fell(&mut self) -> bool {
        [&mut self.up_a, &mut self.up_b].iter_mut().any(|up| up.log_so_far().contains("overlay link down"))
    }
}

fn legs(status: &Value) -> Vec<Value> {
    status["links"][0]["legs"].as_array().cloned().unwrap_or_default()
}

fn up_legs(status: &Value) -> Vec<Value> {
    legs(status).into_iter().filter(|leg| leg["up"] == true).collect()
}

/// Pulls the uplink `pulled` while a stream and a transfer run. Returns how often each packet came, or `None` if the machine
/// took the whole link for dead.
fn pull(site: &mut Site, pulled: &str) -> Option<Vec<u32>> {
    let bytes = random_bytes(41, 6_000_000);
    let (sender, receiver) = site.transfer(bytes.clone());
    let times = stream(sockets(&site.a, &site.b), (COUNT, PACE), || {
        site.a.ip(&format!("link set {pulled} down"));
    });
    sender.join().expect("no panic");
    let (got, longest) = receiver.join().expect("no panic");
    assert!(got == bytes, "every byte, once");
    let lost = times.iter().filter(|times| **times == 0).count();
    println!("{pulled} pulled: {lost} of {COUNT} packets lost; the transfer's longest pause was {longest:?}");
    assert!(times.iter().all(|times| *times < 2), "none twice");
    (!site.fell()).then_some(times)
}

/// Makes sites until the whole link stayed up in one.
fn pulled(legs: &str, which: impl Fn(&Site) -> String) -> (Site, Vec<u32>) {
    for _ in 0..RUNS {
        let mut site = Site::new(legs);
        let uplink = which(&site);
        if let Some(times) = pull(&mut site, &uplink) {
            return (site, times);
        }
    }
    panic!("the machine took the link for dead in each of {RUNS} runs");
}

#[test]
fn a_pulled_uplink_costs_no_packet_where_both_legs_are_used_and_no_byte_of_a_transfer() {
    if !is_root() {
        return;
    }
    let (site, times) = pulled("both", |site| {
        wait_for(&site.up_a, "both legs", |status| legs(status).iter().all(|leg| leg["used"] == true));
        "up1".to_owned()
    });
    assert!(times.iter().all(|times| *times == 1), "none lost");
    wait_for(&site.up_b, "legs that are down", |status| (1..4).contains(&up_legs(status).len()));
    assert!(status(&site.up_b)["datagrams"]["leg_copies"].as_u64() > Some(300), "{:#}", status(&site.up_b));
    assert_eq!(status(&site.up_b)["datagrams"]["replayed"], 0, "copies do not count as replays");
    site.a.ip("link set up1 up");
    site.stands();
}

#[test]
fn a_pulled_uplink_moves_the_link_to_the_other_leg() {
    if !is_root() {
        return;
    }
    let used = |site: &Site| {
        let mut uplink = String::new();
        eventually("one leg is used", || {
            let status = status(&site.up_a);
            let used: Vec<_> = legs(&status).into_iter().filter(|leg| leg["used"] == true).collect();
            uplink =
                if used.len() == 1 && used[0]["to"] == "10.8.1.2:8100" { "up1" } else { "up2" }.to_owned();
            used.len() == 1
        });
        uplink
    };
    let (site, times) = pulled("best", used);
    // A third was sent before; what comes after the time-out of a leg arrives over the other one.
    let lost = times.iter().filter(|times| **times == 0).count();
    assert!(lost < COUNT as usize / 2, "{lost} lost");
    assert_eq!(times.last(), Some(&1), "the last ones arrive");
    let text = run(&site.up_a, &["status"]);
    assert!(text.contains("  leg 10.8.1.1 -> 10.8.1.2:8100: ") && text.contains(": up, used, "), "{text}");
    let metrics = crate::node::admin::show(&site.up_a, "/metrics");
    assert!(metrics.contains("sidetrack_overlay_paths_total{fate=\"leg_changed\"} "), "{metrics}");
}

const BOUGHT: &str = "[[overlay.link]]\nbetween = [\"a\", \"b\"]\nrate = \"100Mbit/s\"\nbought = true\n";

/// Returns the bytes that a has sent on each uplink.
fn sent(site: &Site) -> [u64; 2] {
    let table = site.a.run(|| std::fs::read_to_string("/proc/thread-self/net/dev").expect("the devices"));
    ["up1:", "up2:"].map(|name| {
        let line = table.lines().find_map(|line| line.trim().strip_prefix(name)).expect("the uplink");
        line.split_whitespace().nth(8).and_then(|bytes| bytes.parse().ok()).expect("bytes sent")
    })
}

/// Pulls the uplink that a paced link uses while it carries a flow. Returns false if the machine took the whole link for dead, or
/// moved it to another leg before that.
fn pull_paced() -> bool {
    let mut site = Site::with("best", BOUGHT);
    for up in [&site.up_a, &site.up_b] {
        wait_for(up, "a paced link", |status| status["links"][0]["paced"]["state"] == "agreed");
    }
    let moves = |site: &Site| {
        let metrics = crate::node::admin::show(&site.up_a, "/metrics");
        let line = metrics.lines().find(|line| line.contains("leg_changed")).map(str::to_owned);
        line.expect("the count of moves")
    };
    let (before, moved) = (sent(&site), moves(&site));
    let bytes = random_bytes(43, 6_000_000);
    let (sender, receiver) = site.transfer(bytes.clone());
    let mut shares = [0; 2];
    eventually("a third of the transfer", || {
        let now = sent(&site);
        shares = [now[0] - before[0], now[1] - before[1]];
        shares[0] + shares[1] > 2_000_000
    });
    let has_moved = moves(&site) != moved;
    site.a.ip(&format!("link set {} down", if shares[0] > shares[1] { "up1" } else { "up2" }));
    sender.join().expect("no panic");
    let (got, longest) = receiver.join().expect("no panic");
    assert!(got == bytes, "every byte, once");
    println!("paced: {shares:?} bytes on the uplinks before the pull; the longest pause was {longest:?}");
    if site.fell() || has_moved {
        return false;
    }
    assert!(shares.iter().any(|share| *share < 400_000), "one leg carries the flow: {shares:?}");
    assert!(
        status(&site.up_a)["links"][0]["paced"]["bytes"].as_u64() > Some(6_000_000),
        "{:#}",
        status(&site.up_a)
    );
    true
}

#[test]
fn a_paced_link_sends_on_the_best_leg_and_moves_when_its_uplink_is_pulled() {
    if !is_root() {
        return;
    }
    assert!((0..RUNS).any(|_| pull_paced()), "the machine took the link for dead in each of {RUNS} runs");
}
