//! A node is replaced several times in a row under many flows, half of them on the wire: every byte is right, and each flow has one
//! record. With `SIDETRACK_UPGRADE_FLOWS=500` it is the measurement of `make bench-upgrade`, which prints how long bytes waited.

use crate::node::Up;
use crate::node::admin::flows;
use crate::node::upgrading::{Started, Upgrade, ends, stop};
use rustix::event::epoll;
use sidetrack_testkit::{Line, awaited, eventually, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The variable with the number of flows of the measurement, which has ten upgrades.
const FLOWS: &str = "SIDETRACK_UPGRADE_FLOWS";

/// Time between two messages of a flow.
const PAUSE: Duration = Duration::from_millis(20);

/// Bytes of a message: when it was sent, its number, and bytes that follow from the number.
const MESSAGE: usize = 64;

/// Where flows go to the wire, and where they keep their sockets.
const DOORS: [&str; 2] = ["10.0.1.254:80", "10.0.1.254:81"];

fn message(sent: u64, number: u64) -> [u8; MESSAGE] {
    let mut bytes = [0; MESSAGE];
    bytes[..8].copy_from_slice(&sent.to_be_bytes());
    bytes[8..16].copy_from_slice(&number.to_be_bytes());
    for (at, byte) in bytes.iter_mut().enumerate().skip(16) {
        *byte = (number.wrapping_mul(31) + at as u64) as u8;
    }
    bytes
}

/// What both ends and the test share.
struct Clock {
    began: Instant,
    stop: AtomicBool,
    /// Messages that have arrived.
    arrived: AtomicU64,
    /// The part of the test that it is now.
    part: AtomicUsize,
}

impl Clock {
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// Sends a message on each connection, again and again; returns how many each has got.
fn send(mut to: Vec<TcpStream>, clock: Arc<Clock>) -> JoinHandle<u64> {
    std::thread::spawn(move || {
        let mut number = 0;
        while !clock.stop.load(Relaxed) {
            let began = Instant::now();
            for stream in &mut to {
                stream.write_all(&message(clock.now(), number)).expect("sent");
            }
            number += 1;
            std::thread::sleep(PAUSE.saturating_sub(began.elapsed()));
        }
        number
    })
}

/// One connection at the client.
struct Reading {
    stream: TcpStream,
    bytes: Vec<u8>,
    number: u64,
    /// The longest way of a message in each part, nanoseconds.
    longest: Vec<u64>,
}

impl Reading {
    /// Reads what is there. Returns whether the stream has ended.
    fn read(&mut self, clock: &Clock) -> bool {
        let mut buffer = [0; 64 * MESSAGE];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(length) => self.bytes.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("a flow is cut: {error}"),
            }
        }
        let (now, part) = (clock.now(), clock.part.load(Relaxed));
        let whole = self.bytes.len() / MESSAGE * MESSAGE;
        for bytes in self.bytes[..whole].chunks_exact(MESSAGE) {
            let sent = u64::from_be_bytes(bytes[..8].try_into().expect("eight bytes"));
            assert!(bytes == message(sent, self.number), "a wrong byte in message {}", self.number);
            self.number += 1;
            if self.longest.len() <= part {
                self.longest.resize(part + 1, 0);
            }
            self.longest[part] = self.longest[part].max(now.saturating_sub(sent));
            clock.arrived.fetch_add(1, Relaxed);
        }
        self.bytes.drain(..whole);
        false
    }
}

/// Reads all connections until each has ended: what came, in their order.
fn receive(from: Vec<TcpStream>, clock: Arc<Clock>) -> JoinHandle<Vec<Reading>> {
    let mut all: Vec<_> = from
        .into_iter()
        .map(|stream| Reading { stream, bytes: Vec::new(), number: 0, longest: Vec::new() })
        .collect();
    let ready: OwnedFd = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
    for (at, one) in all.iter().enumerate() {
        one.stream.set_nonblocking(true).expect("set");
        let data = epoll::EventData::new_u64(at as u64);
        epoll::add(&ready, &one.stream, data, epoll::EventFlags::IN).expect("watched");
    }
    std::thread::spawn(move || {
        let (mut left, mut events) = (all.len(), Vec::with_capacity(1024));
        while left > 0 {
            events.clear();
            epoll::wait(&ready, rustix::buffer::spare_capacity(&mut events), None).expect("events");
            for event in &events {
                let one = &mut all[event.data.u64() as usize];
                if one.read(&clock) {
                    epoll::delete(&ready, &one.stream).expect("watched");
                    left -= 1;
                }
            }
        }
        all
    })
}

/// The row of a table: the longest ways of messages, one for each flow and part.
fn row(name: &str, mut longest: Vec<u64>) -> String {
    longest.sort_unstable();
    let at = |share: f64| {
        let at = ((longest.len() - 1) as f64 * share).round() as usize;
        longest[at] as f64 / 1e6
    };
    format!(
        "| {name} | {} | {:.2} | {:.2} | {:.2} | {:.2} |",
        longest.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    )
}

fn table(all: &[Reading], upgrades: usize) {
    println!("| flows | values | median, ms | p90, ms | p99, ms | longest, ms |");
    println!("|---|---:|---:|---:|---:|---:|");
    for (kind, name) in ["on the wire", "with sockets"].into_iter().enumerate() {
        for (offset, when) in ["without an upgrade", "during an upgrade"].into_iter().enumerate() {
            let of_kind = all.iter().skip(kind).step_by(2);
            let values = of_kind.flat_map(|one| (0..upgrades).map(move |at| one.longest[at * 2 + offset]));
            println!("{}", row(&format!("{name}, {when}"), values.collect()));
        }
    }
}

fn tables(to: SocketAddr) -> String {
    let [wire, plain] = DOORS;
    format!(
        "[limits]\ndrain_ms = 3600000\n[wire]\npins = \"none\"\nflows_max = 4096\n\
         [[listen]]\nname = \"wire\"\nkind = \"reverse\"\naddress = \"{wire}\"\nto = \"{to}\"\n\
         [[listen]]\nname = \"plain\"\nkind = \"reverse\"\naddress = \"{plain}\"\nto = \"{to}\"\n\
         [[rule]]\nname = \"wire\"\nmatch = {{ listener = \"wire\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n\
         shunt = {{ fast_path = \"wire\", after_bytes = 1000 }}\n\
         [[rule]]\nname = \"plain\"\ncarrier = \"direct\"\nkernel = \"never\"\nshunt = {{ fast_path = \"none\" }}\n"
    )
}

#[test]
fn replaced_again_and_again_under_many_flows() {
    if !is_root() {
        return;
    }
    let wanted = std::env::var(FLOWS).ok().map(|number| number.parse::<usize>().expect("a number"));
    let (count, upgrades) = wanted.map_or((40, 3), |flows| (flows, 10));
    sidetrack_sys::caps::raise_open_files_limit().expect("enough descriptors");
    let line = Line::new();
    let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = listener.local_addr().expect("bound");
    let tables = tables(to);
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let (mut clients, mut servers) = (Vec::new(), Vec::new());
    for at in 0..count {
        clients.push(line.client.run(move || TcpStream::connect(DOORS[at % 2]).expect("connected")));
        servers.push(listener.accept().expect("accepted").0);
    }
    let clock = Arc::new(Clock {
        began: Instant::now(),
        stop: AtomicBool::new(false),
        arrived: AtomicU64::new(0),
        part: AtomicUsize::new(0),
    });
    let (received, sent) = (receive(clients, clock.clone()), send(servers, clock.clone()));
    awaited("half of the flows are on the wire", || {
        let shunted = flows(&up).iter().filter(|flow| flow.0["shunted"] == true).count();
        (shunted == count.div_ceil(2)).then_some(())
    });
    let go_on = |messages: u64| {
        let until = clock.arrived.load(Relaxed) + messages * count as u64;
        eventually("messages arrive", || clock.arrived.load(Relaxed) >= until);
    };
    let mut last: Option<Started> = None;
    for round in 0..upgrades {
        clock.part.store(round * 2, Relaxed);
        go_on(25);
        clock.part.store(round * 2 + 1, Relaxed);
        let mut upgrade = Upgrade::start(&up.folder(), &[]);
        let new = upgrade.started();
        let (success, said) = upgrade.ended();
        assert!(success, "{said}");
        assert!(said.contains(&format!("{} flows on the wire go on", count.div_ceil(2))), "{said}");
        assert!(said.contains(&format!("{} flows have moved", count / 2)), "{said}");
        go_on(5);
        last.replace(new).iter().for_each(ends);
    }
    clock.stop.store(true, Relaxed);
    let numbers = sent.join().expect("the servers");
    let all = received.join().expect("the clients");
    assert!(all.iter().all(|one| one.number == numbers && one.bytes.is_empty()), "every message has arrived");
    let addresses: Vec<_> = all.iter().map(|one| one.stream.local_addr().expect("an address")).collect();
    if wanted.is_some() {
        table(&all, upgrades);
    }
    drop(all);
    eventually("all flows have ended", || flows(&up).is_empty());
    let records = stop(up, &last.expect("upgrades"));
    assert_eq!(records.len(), count, "one record each");
    for client in addresses {
        let record = records.iter().find(|record| record.address("client") == client).expect("a record");
        assert_eq!(record.text("reason"), "ok", "{record:?}");
        assert_eq!(record.number("bytes_down"), numbers * MESSAGE as u64, "{record:?}");
    }
}
