//! Many flows that lose their path together: each of them asks for another once, and nothing is made twice for it.

use crate::faults::{pair_of_sockets, pass};
use crate::node::Up;
use crate::scene::{Scene, path_to, random_bytes, status, wait_for};
use crate::tools::run;
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

/// As many connections as a node makes to a neighbour at a time do not hinder others; twice as many flows would.
const FLOWS: u64 = 120;

/// How long new connections are held up: as by a thousand handshakes before them.
const HELD_UP: Duration = Duration::from_millis(2500);

/// Bytes of a flow before it loses its path, and after.
const PART: usize = 20_000;

/// On the way to a node: counts the connections that others dial, and holds them up once it is told to.
#[derive(Clone)]
struct Gate {
    address: SocketAddr,
    came: Arc<AtomicU64>,
    shut_until: Arc<Mutex<Option<Instant>>>,
}

impl Gate {
    fn new(to: SocketAddr) -> Self {
        let (listener, udp) = pair_of_sockets();
        let address = listener.local_addr().expect("an address");
        let gate = Self { address, came: Arc::default(), shut_until: Arc::default() };
        let of_thread = gate.clone();
        std::thread::spawn(move || {
            // Nothing comes of datagrams here, and no other test gets the port.
            let _udp = udp;
            for near in listener.incoming().map_while(Result::ok) {
                of_thread.came.fetch_add(1, Relaxed);
                let gate = of_thread.clone();
                std::thread::spawn(move || {
                    while gate.is_shut() {
                        std::thread::park_timeout(Duration::from_millis(5));
                    }
                    let Ok(far) = TcpStream::connect(to) else { return };
                    pass(&near, &far, None);
                    pass(&far, &near, None);
                });
            }
        });
        gate
    }

    /// Connections that came so far.
    fn came(&self) -> u64 {
        self.came.load(Relaxed)
    }

    fn shut(&self, duration: Duration) {
        *self.shut_until.lock().expect("no panic") = Some(Instant::now() + duration);
    }

    fn open(&self) {
        *self.shut_until.lock().expect("no panic") = None;
    }

    fn is_shut(&self) -> bool {
        self.shut_until.lock().expect("no panic").is_some_and(|until| Instant::now() < until)
    }
}

/// Sends back what comes, and the end behind it.
fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut reader = stream.try_clone().expect("a socket");
                // A flow that breaks is noticed at its other end.
                let _ = std::io::copy(&mut reader, &mut stream);
                let _ = stream.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

/// Sends bytes on every flow, then reads them on every flow.
fn say(flows: &mut [TcpStream], seed: u64) {
    let parts: Vec<_> = (seed..).take(flows.len()).map(|seed| random_bytes(seed, PART)).collect();
    for (flow, part) in flows.iter_mut().zip(&parts) {
        flow.write_all(part).expect("room");
    }
    for (number, (flow, part)) in flows.iter_mut().zip(&parts).enumerate() {
        let mut back = vec![0; PART];
        flow.read_exact(&mut back).unwrap_or_else(|error| panic!("flow {number}: {error}"));
        assert!(back == *part, "flow {number}: other bytes");
    }
}

/// The scene, and what stands before `c` on the way from `b1` and from `b2`.
fn scene() -> (Scene, Vec<Gate>) {
    let mut gates = Vec::new();
    let scene = Scene::through(echo(), DELIVER, |_, to| {
        gates.push(Gate::new(to));
        gates[gates.len() - 1].address
    });
    (scene, gates)
}

/// Waits until all flows pass `b1`.
fn over_b1(scene: &Scene) {
    run(&scene.a, &["link", "set", "b2", "--cost", "100"]);
    scene.wait("the path over b1", |status| path_to(status, "c").get(1).is_some_and(|relay| relay == "b1"));
}

fn open(scene: &Scene, flows: u64) -> Vec<TcpStream> {
    let entry = scene.entry();
    let open = |_| {
        let flow = TcpStream::connect(entry).expect("a's listener");
        flow.set_read_timeout(Some(LIMIT)).expect("a time-out");
        flow
    };
    (0..flows).map(open).collect()
}

#[test]
fn flows_that_lose_their_path_together_go_on_over_the_other_without_anything_made_twice() {
    let (mut scene, gates) = scene();
    over_b1(&scene);
    let mut flows = open(&scene, FLOWS);
    say(&mut flows, 1000);
    let relayed = status(scene.b1.as_ref().expect("it runs"))["relayed"].as_u64();
    assert!(relayed >= Some(FLOWS), "{relayed:?} flows pass b1");
    let gate = &gates[1];
    let before = gate.came();
    gate.shut(HELD_UP);
    scene.kill("b1");
    let killed = Instant::now();
    say(&mut flows, 2000);
    println!("all flows went on {:?} after the kill", killed.elapsed());
    for flow in &mut flows {
        flow.shutdown(Shutdown::Write).expect("ended");
        assert_eq!(flow.read(&mut [0]).expect("an orderly end"), 0);
    }
    // A few attempts may have been slower than they may be, on a machine with better things to do. What was dialled for them is
    // there for the next, though: connections are made for flows, not for attempts.
    let made = gate.came() - before;
    println!("{made} connections were made for {FLOWS} flows");
    assert!(made < FLOWS + FLOWS / 2, "{made} connections for {FLOWS} flows");
    eventually("no session is left", || {
        [&scene.a, &scene.c].into_iter().all(|node| status(node)["sessions"] == 0)
    });
    wait_for(&scene.a, "as many new paths as flows", |status| {
        status["sessions_resumed"].as_u64() >= Some(FLOWS)
    });
}

/// Connections that a node keeps ready for itself.
const WARM: u64 = 4;

/// Connections to `c` that wait at this node for flows.
fn idle(node: &Up) -> u64 {
    let status = status(node);
    let link = status["links"].as_array().expect("links").iter().find(|link| link["neighbour"] == "c");
    link.and_then(|link| link["idle_connections"].as_u64()).unwrap_or(0)
}

#[test]
fn an_opening_that_is_given_up_goes_no_further_and_its_connection_serves_the_next() {
    const GIVEN_UP: u64 = 8;
    let (mut scene, gates) = scene();
    over_b1(&scene);
    let (gate, b1) = (&gates[0], |scene: &Scene| idle(scene.b1.as_ref().expect("it runs")));
    eventually("connections are ready", || b1(&scene) == WARM);
    let before = gate.came();
    gate.shut(LIMIT);
    // These take what is ready, and find the gate behind them.
    let mut flows = open(&scene, WARM);
    say(&mut flows, 1);
    let others = open(&scene, GIVEN_UP);
    eventually("a connection is made for each of them", || gate.came() == before + WARM + GIVEN_UP);
    for flow in others {
        socket2::SockRef::from(&flow).set_linger(Some(Duration::ZERO)).expect("linger");
    }
    for _ in 0..GIVEN_UP {
        let relay = scene.b1.as_mut().expect("it runs");
        relay.log_line("an opening that is given up", |line| {
            line.contains("an opening was given up on its way")
        });
    }
    gate.open();
    eventually("connections are ready again", || b1(&scene) == WARM);
    assert_eq!(status(&scene.c)["sessions_delivered"], WARM, "nobody connects for who has left");
    let mut next = open(&scene, 1);
    say(&mut next, 2);
    assert_eq!(status(&scene.c)["sessions_delivered"], WARM + 1);
    // One that was there has served it, and the next takes its place: one of those that were being made, or a new one.
    eventually("as many are ready as before", || b1(&scene) == WARM);
    let made = gate.came() - before;
    assert!(made <= WARM + GIVEN_UP + 1, "{made} connections: something was made twice");
}
