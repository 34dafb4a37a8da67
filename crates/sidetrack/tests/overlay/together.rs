//! Many flows that lose their path together: each of them asks for another once, and nothing is made twice for it.

use crate::faults::{pair_of_sockets, pass};
use crate::node::{LIMIT, eventually};
use crate::scene::{Scene, path_to, random_bytes, status, wait_for};
use crate::tools::run;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";

/// As many connections as a node makes to a neighbour at a time stand in nobody's way; twice as many flows would.
const FLOWS: u64 = 120;

/// How long new connections are held up: as by a thousand handshakes before them.
const HELD_UP: Duration = Duration::from_secs(3);

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
                let until = *of_thread.shut_until.lock().expect("no panic");
                std::thread::spawn(move || {
                    while let Some(left) = until.and_then(|until| until.checked_duration_since(Instant::now()))
                    {
                        std::thread::park_timeout(left);
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

    fn shut(&self) {
        *self.shut_until.lock().expect("no panic") = Some(Instant::now() + HELD_UP);
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

#[test]
fn flows_that_lose_their_path_together_go_on_over_the_other_without_anything_made_twice() {
    let mut gates = Vec::new();
    let mut scene = Scene::through(echo(), DELIVER, |_, to| {
        gates.push(Gate::new(to));
        gates[gates.len() - 1].address
    });
    run(&scene.a, &["link", "set", "b2", "--cost", "100"]);
    scene.wait("the path over b1", |status| path_to(status, "c").get(1).is_some_and(|relay| relay == "b1"));
    let entry = scene.entry();
    let open = |_| {
        let flow = TcpStream::connect(entry).expect("a's listener");
        flow.set_read_timeout(Some(LIMIT)).expect("a time-out");
        flow
    };
    let mut flows: Vec<_> = (0..FLOWS).map(open).collect();
    say(&mut flows, 1000);
    assert_eq!(status(scene.b1.as_ref().expect("it runs"))["relayed"], FLOWS, "all pass one relay");
    let gate = &gates[1];
    let before = gate.came();
    gate.shut();
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
