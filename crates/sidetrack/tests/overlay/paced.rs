//! Paced links between nodes whose bandwidth is bought: flows over them behave as over TCP.
//!
//! ```text
//! client on a -- 10.8.1.0/24 -- r -- 10.9.1.0/24 -- c, a server on it
//! ```

use crate::node::{Up, at};
use crate::scene::{Keys, Server, exchange, random_bytes, status, wait_for};
use crate::streams::link;
use crate::tools::run;
use serde_json::Value;
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

/// Bits per second of each link.
const RATE: u64 = 100_000_000;

/// Declares the links of the chain as bought.
const BOUGHT: &str = "[[overlay.link]]\nbetween = [\"a\", \"r\"]\nrate = \"100Mbit/s\"\nbought = true\n\
                      [[overlay.link]]\nbetween = [\"r\", \"c\"]\nrate = \"100Mbit/s\"\nbought = true\n";

/// Two ends and a relay, as drawn at the head of the file.
struct Chain {
    hosts: [Node; 3],
    a: Up,
    r: Up,
    c: Up,
}

impl Chain {
    /// `server` starts the server on c. `at_r`: what the relay declares.
    fn new<S: Send + 'static>(
        at_r: &str,
        server: impl FnOnce() -> (SocketAddr, S) + Send + 'static,
    ) -> (Self, S) {
        let hosts = [(); 3].map(|()| Node::new());
        let [host_a, host_r, host_c] = &hosts;
        link(host_a, host_r, "10.8.1", ["to-r", "to-a"]);
        link(host_r, host_c, "10.9.1", ["to-c", "to-r"]);
        hosts.iter().for_each(|host| host.ip("link set lo up"));
        let (address, server) = host_c.run(server);
        let keys = Keys::new(&["a", "r", "c"]);
        let start = |host: &Node, more: &'static str, text: String| host.run(move || Up::start(more, &text));
        let listen = |text: String, at: &str| text.replace("\"127.0.0.1:0\"", at);
        let text = listen(keys.section("c", &[], true), "\"10.9.1.2:8100\"");
        let c = start(host_c, "", text + DELIVER + BOUGHT);
        let text = listen(keys.section("r", &[("c", at("10.9.1.2", 8100))], true), "\"10.8.1.2:8100\"");
        let r = start(host_r, "", text + at_r);
        let entry = format!(
            "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{address}\"\n\
             [[rule]]\nname = \"over\"\ncarrier = \"overlay:c\"\n"
        );
        let text = keys.section("a", &[("r", at("10.8.1.2", 8100))], false);
        let a = start(host_a, "default = \"deny\"\n", entry + &text + BOUGHT);
        wait_for(&a, "a path to c", |status| crate::scene::path_to(status, "c").len() == 3);
        (Self { hosts, a, r, c }, server)
    }

    fn agreed(at_r: &str, server: impl FnOnce() -> Server + Send + 'static) -> (Self, Server) {
        let (chain, server) = Self::new(at_r, || {
            let server = server();
            (server.address, server)
        });
        chain.wait_agreed();
        (chain, server)
    }

    fn wait_agreed(&self) {
        for (up, neighbour) in [(&self.a, "r"), (&self.r, "a"), (&self.r, "c"), (&self.c, "r")] {
            wait_for(up, "a paced link", |status| paced(status, neighbour)["state"] == "agreed");
        }
    }

    /// Runs this beside the test, as a client on a.
    fn client<T: Send + 'static>(
        &self,
        work: impl FnOnce(SocketAddr) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let entry = self.a.addresses("reverse")[0];
        self.hosts[0].run(move || std::thread::spawn(move || work(entry)))
    }

    /// Two of a hundred packets that come in are lost, at all three hosts.
    fn lose(&self) {
        for (host, devices) in self.hosts.iter().zip([&["to-r"][..], &["to-a", "to-c"], &["to-r"]]) {
            host.run(move || {
                sidetrack_testkit::nft("add table netdev loss").expect("nft");
                for device in devices {
                    let chain = format!("add chain netdev loss {device} {{ type filter hook ingress device {device} priority 0 ; }}");
                    sidetrack_testkit::nft(&chain).expect("nft");
                    let rule = format!("add rule netdev loss {device} numgen random mod 100 < 2 drop");
                    sidetrack_testkit::nft(&rule).expect("nft");
                }
            });
        }
    }

    /// Whether a link was declared dead.
    fn has_fallen(&mut self) -> bool {
        [&mut self.a, &mut self.r, &mut self.c]
            .into_iter()
            .any(|up| up.log_so_far().contains("overlay link down"))
    }
}

/// The paced part of the link to a neighbour.
fn paced<'s>(status: &'s Value, neighbour: &str) -> &'s Value {
    let links = status["links"].as_array().expect("links");
    links.iter().find(|link| link["neighbour"] == neighbour).map_or(&Value::Null, |link| &link["paced"])
}

fn streams(up: &Up, neighbour: &str) -> u64 {
    paced(&status(up), neighbour)["streams"].as_u64().unwrap_or(0)
}

#[test]
fn bytes_pass_both_ways_over_paced_links_that_lose_packets() {
    if !is_root() {
        return;
    }
    let (up, down) = (random_bytes(1, 12_000_001), random_bytes(2, 5_000_003));
    let answer = down.clone();
    let (mut chain, server) = Chain::agreed(BOUGHT, move || Server::start(answer));
    chain.lose();
    let (sent, began) = (up.clone(), Instant::now());
    let got = chain.client(move |entry| exchange(entry, &sent)).join().expect("no panic");
    let took = began.elapsed();
    assert!(got.expect("an answer") == down, "what the server sent");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    assert_eq!(chain.a.record().fate(), ("over", "overlay:c", "ok"));
    for (up, bytes) in [(&chain.a, 12_000_001), (&chain.r, 17_000_004), (&chain.c, 5_000_003)] {
        let totals = &status(up)["paced"];
        assert!(totals["bytes"].as_u64() > Some(bytes), "{totals}");
        assert!(totals["bytes_again"].as_u64() > Some(0), "{totals}");
    }
    if !chain.has_fallen() {
        // One after the other, at the rate: it cannot be faster.
        let least = Duration::from_secs_f64(17_000_004.0 * 8.0 / RATE as f64 * 0.95);
        assert!(took >= least, "{took:?}");
    }
    let text = run(&chain.a, &["status"]);
    assert!(text.contains("paced link to r: 100 Mb/s there, 100 Mb/s back; "), "{text}");
    let metrics = crate::node::admin::show(&chain.a, "/metrics");
    assert!(metrics.contains("sidetrack_overlay_paced_total{what=\"bytes_again\"}"), "{metrics}");
    for (up, neighbour) in [(&chain.a, "r"), (&chain.r, "a"), (&chain.r, "c"), (&chain.c, "r")] {
        eventually("both ends forget the stream", || streams(up, neighbour) == 0);
    }
}

#[test]
fn a_link_that_is_cut_and_comes_back_costs_no_byte() {
    if !is_root() {
        return;
    }
    let up = random_bytes(3, 20_000_000);
    let (chain, server) = Chain::agreed(BOUGHT, || Server::start(b"answer".to_vec()));
    let (sent, taken) = (up.clone(), server.taken.clone());
    let client = chain.client(move |entry| exchange(entry, &sent));
    eventually("the transfer begins", || taken.load(Relaxed) >= 2_000_000);
    chain.hosts[0].ip("link set to-r down");
    wait_for(&chain.r, "the link to be down", |status| {
        status["links"]
            .as_array()
            .is_some_and(|links| links.iter().all(|link| link["neighbour"] != "a" || link["up"] == false))
    });
    assert!(taken.load(Relaxed) < 20_000_000, "cut in mid transfer");
    chain.hosts[0].ip("link set to-r up");
    assert_eq!(client.join().expect("no panic").expect("an answer"), b"answer");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    assert!(status(&chain.a)["sessions_resumed"].as_u64() >= Some(1));
    chain.wait_agreed();
}

#[test]
fn an_end_that_is_killed_resets_its_flows_and_leaves_no_stream() {
    if !is_root() {
        return;
    }
    let (mut chain, server) = Chain::agreed(BOUGHT, || Server::start(Vec::new()));
    let taken = server.taken.clone();
    let client = chain.client(|entry| exchange(entry, &random_bytes(4, 60_000_000)));
    eventually("the transfer begins", || taken.load(Relaxed) >= 2_000_000);
    assert!(streams(&chain.r, "c") > 0, "{:#}", status(&chain.r));
    chain.c.signal(rustix::process::Signal::KILL);
    chain.c.gone();
    let error = client.join().expect("no panic").expect_err("the node that delivers is gone");
    assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    assert!(server.finish().is_err(), "the server sees it, too");
    for (up, neighbour) in [(&chain.a, "r"), (&chain.r, "a"), (&chain.r, "c")] {
        eventually("the stream is forgotten", || streams(up, neighbour) == 0);
    }
}

#[test]
fn a_neighbour_that_does_not_declare_the_link_gets_tcp() {
    if !is_root() {
        return;
    }
    let up = random_bytes(5, 3_000_000);
    let (mut chain, server) = Chain::new("", || {
        let server = Server::start(b"answer".to_vec());
        (server.address, server)
    });
    wait_for(&chain.a, "the state of the link", |status| paced(status, "r")["state"] == "not declared there");
    wait_for(&chain.r, "the offer", |status| paced(status, "a")["state"] == "not declared here");
    let sent = up.clone();
    let got = chain.client(move |entry| exchange(entry, &sent)).join().expect("no panic");
    assert_eq!(got.expect("an answer"), b"answer");
    assert!(server.finish().expect("an orderly end") == up, "what the client sent");
    assert_eq!(status(&chain.a)["paced"]["bytes"], 0);
    let log = chain.r.log_so_far();
    assert!(log.contains("the neighbour declares the link to this node as bought"), "{log}");
    let text = run(&chain.a, &["status"]);
    assert!(text.contains("paced link to r: not declared there"), "{text}");
}

#[test]
fn a_stuck_flow_holds_up_no_other_and_a_reset_passes() {
    if !is_root() {
        return;
    }
    let (chain, stuck) = Chain::new(BOUGHT, || {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        // The first connection is not read until its client has reset it, and then ends with an error.
        let stuck = std::thread::spawn(move || {
            let (mut first, _) = listener.accept().expect("a connection");
            first.set_read_timeout(Some(LIMIT)).expect("a time-out");
            for _ in 0..8 {
                let (mut stream, _) = listener.accept().expect("a connection");
                let mut reader = stream.try_clone().expect("a socket");
                std::io::copy(&mut reader, &mut stream).expect("an echo");
                stream.shutdown(std::net::Shutdown::Write).expect("a FIN");
            }
            let mut buffer = vec![0; 65_536];
            loop {
                match first.read(&mut buffer) {
                    Ok(0) => return Ok(()),
                    Ok(_) => {}
                    Err(error) => return Err(error.kind()),
                }
            }
        });
        (address, stuck)
    });
    chain.wait_agreed();
    let stuck_client = chain.client(|entry| {
        let mut stream = TcpStream::connect(entry).expect("a connection");
        stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a time-out");
        let part = vec![7; 1_000_000];
        let pushed = (0..1000).find_map(|_| stream.write_all(&part).err());
        assert!(pushed.is_some(), "back-pressure reaches the sender");
        stream
    });
    let stream = stuck_client.join().expect("back-pressure");
    for number in 0..8 {
        let bytes = random_bytes(number, 300_000);
        let sent = bytes.clone();
        let echo = chain.client(move |entry| exchange(entry, &sent)).join().expect("no panic");
        assert!(echo.expect("an echo") == bytes, "flow {number}");
    }
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("a reset at its end");
    drop(stream);
    assert_eq!(stuck.join().expect("no panic"), Err(ErrorKind::ConnectionReset));
}
