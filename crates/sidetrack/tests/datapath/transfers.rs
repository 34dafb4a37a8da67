//! Transfers of random sizes with random pauses and half-closes in every order, byte-exact by SHA-256 through every
//! carrier.
//!
//! The first eight bytes from the client are the seed of the transfer: both sides make their plan from it.

use crate::node::Node;
use crate::path::{Hop, Path};
use crate::peers::{Server, connect};
use crate::random::{Hash, Random, seed};
use crate::socks::{v5_connect, v6_ask, v6_config};
use sidetrack::live::Ended;
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::LIMIT;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

const SMALL_MAX: usize = 200_000;
const LARGE_MIN: usize = 4 << 20;

/// Who closes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Client,
    Server,
    Nobody,
}

/// One direction of a transfer.
#[derive(Clone, Copy, Debug)]
struct Direction {
    seed: u64,
    len: usize,
}

/// What both sides do, made from the seed.
#[derive(Clone, Copy, Debug)]
struct Plan {
    up: Direction,
    down: Direction,
    first: First,
}

impl Plan {
    /// The lowest bit says whether it is a large one.
    fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let large = seed & 1 == 1;
        let mut direction = || {
            let len = random.below(SMALL_MAX) + if large { LARGE_MIN } else { 0 };
            // One in four sends nothing at all.
            let len = if !large && random.below(4) == 0 { 0 } else { len };
            Direction { seed: random.next(), len }
        };
        let (up, down) = (direction(), direction());
        let first = [First::Client, First::Server, First::Nobody][random.below(3)];
        Self { up, down, first }
    }
}

impl Direction {
    fn sum(self) -> (u64, [u8; 32]) {
        let (mut random, mut hash) = (Random::new(self.seed), Hash::default());
        let mut left = self.len;
        while left > 0 {
            let bytes = random.bytes(left.min(65_536));
            hash.feed(&bytes);
            left -= bytes.len();
        }
        hash.sum()
    }

    /// Sends it in random pieces with pauses, then FIN; with a `gate`, its second half only after that opened.
    fn send(self, mut stream: &TcpStream, gate: Option<&Receiver<()>>) {
        let (mut bytes, mut pieces) = (Random::new(self.seed), Random::new(!self.seed));
        let mut sent = 0;
        let mut pauses = 8;
        let mut gate = gate;
        while sent < self.len {
            // Whole blocks of the generator, so that the pieces do not change the bytes.
            let piece = (pieces.below(8192) + 1) * 8;
            let bytes = bytes.bytes(piece.min(65_536).min(self.len - sent));
            stream.write_all(&bytes).unwrap_or_else(|error| panic!("{sent} of {self:?}: {error}"));
            sent += bytes.len();
            if pauses > 0 && pieces.below(4) == 0 {
                pauses -= 1;
                std::thread::sleep(Duration::from_micros(pieces.below(3000) as u64));
            }
            if sent * 2 > self.len
                && let Some(gate) = gate.take()
            {
                gate.recv_timeout(LIMIT).expect("the other side closes first");
            }
        }
        if let Some(gate) = gate {
            gate.recv_timeout(LIMIT).expect("the other side closes first");
        }
        stream.shutdown(Shutdown::Write).expect("an open stream");
    }
}

/// Reads to the end with pauses, and hashes.
fn receive(mut stream: &TcpStream, mut pauses: Random) -> (u64, [u8; 32]) {
    let (mut hash, mut buffer) = (Hash::default(), vec![0; 65_536]);
    let mut left = 8;
    loop {
        match stream.read(&mut buffer).expect("no reset") {
            0 => return hash.sum(),
            n => hash.feed(&buffer[..n]),
        }
        if left > 0 && pauses.below(4) == 0 {
            left -= 1;
            std::thread::sleep(Duration::from_micros(pauses.below(5000) as u64));
        }
    }
}

/// Sends and receives at once; fails if what comes is not what was planned.
fn exchange(stream: &TcpStream, out: Direction, back: Direction, waits: bool) {
    let (open, gate) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || out.send(stream, waits.then_some(&gate)));
        let got = receive(stream, Random::new(out.seed ^ back.seed));
        // No flow waits where there is no gate.
        let _ = open.send(());
        assert_eq!(got, back.sum(), "{back:?}");
    });
}

/// The server of all transfers: it reads the preamble, then the seed, and does its part.
pub(crate) fn server(preamble: &'static [u8]) -> Server {
    Server::start(move |mut stream| {
        let mut head = vec![0; preamble.len() + 8];
        if stream.read_exact(&mut head).is_err() {
            return;
        }
        assert_eq!(&head[..preamble.len()], preamble);
        let seed = u64::from_le_bytes(head[preamble.len()..].try_into().expect("eight bytes"));
        let plan = Plan::of(seed);
        exchange(&stream, plan.down, plan.up, plan.first == First::Client);
    })
}

/// The client's part of one transfer; gives the bytes it sent and got.
fn transfer(mut stream: TcpStream, preamble: &[u8], seed: u64) -> (u64, u64) {
    let plan = Plan::of(seed);
    stream.write_all(&[preamble, &seed.to_le_bytes()].concat()).expect("an open stream");
    exchange(&stream, plan.up, plan.down, plan.first == First::Server);
    (plan.up.len as u64 + 8 + preamble.len() as u64, plan.down.len as u64)
}

/// Small transfers side by side, and two large ones; every node must have recorded every flow as `ok`, the first with
/// the bytes of the client and the server and no others. Gives the records of each.
pub(crate) fn transfers(
    nodes: &[Node],
    preamble: &'static [u8],
    open: impl Fn() -> TcpStream + Sync,
) -> Vec<Vec<Ended>> {
    let mut random = Random::new(seed());
    let small: Vec<_> = (0..8).map(|_| random.next() & !1).collect();
    let large: Vec<_> = (0..2).map(|_| random.next() | 1).collect();
    let open = &open;
    let counts: Vec<_> = std::thread::scope(|scope| {
        let start = |seed: u64| scope.spawn(move || transfer(open(), preamble, seed));
        let running: Vec<_> = small.into_iter().chain(large).map(start).collect();
        running.into_iter().map(|thread| thread.join().expect("byte-exact")).collect()
    });
    let mut expected = counts;
    expected.sort_unstable();
    let of_node = |(index, node): (usize, &Node)| {
        let ended = node.ended(expected.len());
        assert!(ended.iter().all(|ended| ended.reason == EndReason::Ok), "{ended:?}");
        let mut counted: Vec<_> = ended.iter().map(|ended| ended.flow.bytes()).collect();
        counted.sort_unstable();
        if index == 0 {
            assert_eq!(counted, expected);
        }
        // To a hop in the middle the handshakes with later ones are bytes like others.
        let total = |counts: &[(u64, u64)]| counts.iter().map(|(up, down)| up + down).sum::<u64>();
        assert!(total(&counted) >= total(&expected), "{counted:?}");
        ended
    };
    nodes.iter().enumerate().map(of_node).collect()
}

fn through(hops: &[Hop], rule: &str) {
    let server = server(b"");
    let path = Path::over(hops, server.address, rule);
    transfers(&path.nodes, b"", || path.open());
}

const SOCKS5: Hop = Hop::new("socks5");
const SOCKS6: Hop = Hop::new("socks6");
const SOCKSX: Hop = Hop::new("socks6+socksx");
const SOCKSX010: Hop = Hop::new("socks6+socksx010");
const HTTP: Hop = Hop::new("http");
const OPTIMISTIC: &str = "?optimistic=true";
const INITIAL_DATA: &str = "initial_data_wait_ms = 50";

#[test]
fn direct() {
    through(&[], "");
}

#[test]
fn socks5() {
    through(&[SOCKS5], "");
}

#[test]
fn socks5_optimistic() {
    through(&[SOCKS5.with(OPTIMISTIC)], INITIAL_DATA);
}

#[test]
fn socks5_password() {
    through(&[SOCKS5.password()], "");
    through(&[SOCKS5.password().with(OPTIMISTIC)], INITIAL_DATA);
}

#[test]
fn socks6() {
    through(&[SOCKS6], "");
}

#[test]
fn socks6_password_and_initial_data() {
    through(&[SOCKS6.password()], INITIAL_DATA);
}

#[test]
fn socks6_in_the_layouts_of_socksx() {
    through(&[SOCKSX], INITIAL_DATA);
    through(&[SOCKSX010], INITIAL_DATA);
}

#[test]
fn http_connect() {
    through(&[HTTP], "");
    through(&[HTTP.password().with(OPTIMISTIC)], INITIAL_DATA);
}

#[test]
fn two_hops() {
    through(&[SOCKS5, SOCKS6], "");
    through(&[SOCKS6, SOCKS6.password()], INITIAL_DATA);
}

#[test]
fn three_hops() {
    through(&[SOCKS6, HTTP, SOCKS5.password()], INITIAL_DATA);
}

#[test]
fn five_hops() {
    through(&[SOCKS6.password(), SOCKS5, HTTP, SOCKSX, SOCKS5.with(OPTIMISTIC)], INITIAL_DATA);
}

#[test]
fn a_socks_client_of_its_own() {
    let (nodes, server) = ([Node::socks()], server(b""));
    let to = server.address.to_string();
    transfers(&nodes, b"", || v5_connect(nodes[0].entry(), &to));
    transfers(&nodes, b"", || {
        let mut stream = connect(nodes[0].entry());
        v6_ask(&mut stream, v6_config(&to)).expect("connected");
        stream
    });
}

/// What a program sends first that names its server.
const HTTP_HEAD: &[u8] = b"GET /file HTTP/1.1\r\nUser-Agent: test\r\nHost: www.example.com\r\n\r\n";

/// The ClientHello of curl for www.example.com.
pub(crate) fn client_hello() -> &'static [u8] {
    let hex = include_str!("../../../core/tests/vectors/client_hello_curl.hex");
    let digits: Vec<_> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("hex");
    Box::leak(digits.chunks(2).map(byte).collect())
}

#[test]
fn by_name() {
    for preamble in [HTTP_HEAD, client_hello()] {
        let server = server(preamble);
        let nodes = [Node::start(&format!(
            "[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\n\
             names = {{ 'www.example.com' = '{}', '*.example.com' = '127.0.0.1:1' }}\n",
            server.address
        ))];
        transfers(&nodes, preamble, || connect(nodes[0].entry()));
    }
}

#[test]
fn proxy_protocol_out_and_in() {
    let over: [(&[Hop], _); 4] = [(&[], 1), (&[], 2), (&[SOCKS5], 1), (&[SOCKS6, SOCKSX], 2)];
    for (hops, version) in over {
        let server = server(b"");
        let last = Node::start(&format!(
            "[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{}'\n\
             accept_proxy_protocol = '127.0.0.0/8'\n",
            server.address
        ));
        let mut nodes = Path::over(hops, last.entry(), &format!("proxy_protocol = {version}")).nodes;
        nodes.push(last);
        let ended = transfers(&nodes, b"", || connect(nodes[0].entry()));
        let clients = |ended: &[Ended]| -> BTreeSet<_> {
            ended.iter().map(|ended| ended.flow.decided().expect("decided").flow.client).collect()
        };
        assert_eq!(
            clients(&ended[0]),
            clients(&ended[nodes.len() - 1]),
            "the last node knows the clients of the first"
        );
        assert_eq!(clients(&ended[0]).len(), ended[0].len());
    }
}
