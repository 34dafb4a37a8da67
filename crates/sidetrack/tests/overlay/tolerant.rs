//! Intrusion-tolerant packets on real traffic, with a member that lies beside them.
//!
//! ```text
//! a -- 10.8.1.0/24 -- r1 -- 10.9.1.0/24 -- b      m, on the host of a, is a neighbour of r1 with a key of its own
//! ```

use crate::liar::Who;
use crate::node::{Up, at};
use crate::scene::{Keys, status, wait_for};
use crate::streams::{arrives, end, link, sockets, stream};
use crate::tools::run;
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use serde_json::Value;
use sidetrack_core::overlay::datagram::Header;
use sidetrack_core::overlay::frame::{
    Confirmed, Decoder, Dissemination, FlowName, Frame, Greeting, HASH_BYTES, Hash, Holding, LinkKind,
    Protocol, Purpose, Spread, Subgraph, VERSION, Vouched,
};
use sidetrack_core::overlay::node::{Config, Input, Node as Machine, Output};
use sidetrack_core::overlay::service::{Service, Trust};
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::overlay::tolerant::Vouch;
use sidetrack_core::overlay::tolerant::batch::{self, Unsigned};
use sidetrack_core::overlay::{Keys as _, NodeId, disseminate, hello};
use sidetrack_testkit::{LIMIT, Node, is_root};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const MEMBERS: [&str; 4] = ["a", "b", "r1", "m"];

/// Packets of one stream.
const COUNT: u32 = 300;

/// Between two packets: with its frame one counts about 330 bytes, so the stream has 0.3 Mb/s. Its share is 0.5.
const PACE: Duration = Duration::from_millis(10);

const RELIABLE: &str = "trust = \"intrusion-tolerant\"\ndissemination = \"flood\"\n";

const SERVICE: &str = "link = \"best-effort\"\ntrust = \"intrusion-tolerant\"\n";

/// The epoch of the liar's packets.
const EPOCH: u32 = 4242;

/// Two ends and a relay, as drawn at the head of the file. The relay sends 1 Mb/s, drops packets without proofs, and knows
/// which links there may be.
struct Chain {
    a: Node,
    b: Node,
    _r1: Node,
    up_a: Up,
    up_b: Up,
    up_r1: Up,
    keys: Keys,
}

impl Chain {
    fn new() -> Self {
        Self::with(SERVICE)
    }

    fn with(service: &str) -> Self {
        let [a, b, r1] = [(); 3].map(|()| Node::new());
        let keys = Keys::new(&MEMBERS);
        link(&a, &r1, "10.8.1", ["to-r1", "to-a"]);
        link(&b, &r1, "10.9.1", ["to-r1", "to-b"]);
        let links = [["a", "r1"], ["b", "r1"], ["m", "r1"]];
        let links =
            links.map(|[one, other]| format!("[[overlay.topology]]\nends = [\"{one}\", \"{other}\"]\n"));
        let top = "[overlay]\ntrust = \"intrusion-tolerant\"\ntolerant_rate_mbit = 1\n";
        let text = keys
            .section("r1", &[], true)
            .replace("[overlay]\n", top)
            .replace("\"127.0.0.1:0\"", "[\"10.8.1.2:8100\", \"10.9.1.2:8100\"]")
            + &links.concat();
        let up_r1 = r1.run(move || Up::start("", &text));
        let up_a = end(&a, (&keys, "a", "b"), (1, 2), &[("r1", at("10.8.1.2", 8100))], service);
        let up_b = end(&b, (&keys, "b", "a"), (2, 1), &[("r1", at("10.9.1.2", 8100))], service);
        wait_for(&up_a, "a way with proofs", |status| arrives(status, 2));
        wait_for(&up_b, "the way back", |status| {
            let paths = status["paths"].as_array().expect("paths");
            paths.iter().any(|path| path["services"][0]["arrives"] == true)
        });
        Self { a, b, _r1: r1, up_a, up_b, up_r1, keys }
    }

    /// Sends a stream. Returns how many of its packets arrived.
    fn stream(&self) -> usize {
        let times = stream(sockets(&self.a, &self.b), (COUNT, PACE), || ());
        assert!(times.iter().all(|times| *times < 2), "delivered twice");
        times.iter().filter(|times| **times == 1).count()
    }

    /// Repeats a stream until at least nine tenths arrive: a busy machine may take a link for dead once.
    fn nine_tenths(&self, what: &str) {
        let least = COUNT as usize * 9 / 10;
        let got: Vec<_> = (0..3).map(|_| self.stream()).take_while(|got| *got < least).collect();
        assert!(got.len() < 3, "{what}: {got:?} of {COUNT}; {:#}", status(&self.up_r1));
    }
}

fn count(up: &Up, what: &str) -> u64 {
    status(up)["spread"]["tolerant"][what].as_u64().expect("a count")
}

#[test]
fn packets_with_proofs_need_no_session_and_a_relay_takes_no_others() {
    if !is_root() {
        return;
    }
    let chain = Chain::new();
    chain.nine_tenths("alone");
    assert!(count(&chain.up_r1, "relayed") >= u64::from(COUNT), "{:#}", status(&chain.up_r1));
    let end = status(&chain.up_b);
    assert!(end["spread"]["tolerant"]["delivered"]["shortest"].as_u64() >= Some(u64::from(COUNT)), "{end:#}");
    let at_a = status(&chain.up_a);
    assert_eq!(
        (&at_a["sessions_opened"], &at_a["caught"]["by_datagram"]),
        (&Value::from(0), &Value::from(0))
    );
    assert!(run(&chain.up_r1, &["status"]).contains("intrusion-tolerant packets "));
    let metrics = crate::node::admin::show(&chain.up_r1, "/metrics");
    assert!(metrics.contains("sidetrack_overlay_packets_total{fate=\"tolerant_relayed\"}"), "{metrics}");
}

impl Vouch for Who {
    fn digest(&self, bytes: &[u8]) -> Hash {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&digest(&SHA256, bytes).as_ref()[..HASH_BYTES]);
        hash
    }
}

/// What the liar does.
const FLOODS: usize = 1;
const FORGES: usize = 2;
const CLAIMS: usize = 3;

/// The liar at work: a neighbour of r1 that can speak in datagrams.
struct Liar {
    stop: Arc<AtomicBool>,
    does: Arc<AtomicUsize>,
    /// Packets that it has sent.
    sent: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

/// The sealed datagrams to r1.
struct Datagrams {
    socket: UdpSocket,
    key: LessSafeKey,
    first_nonce: [u8; 12],
    name: u32,
    sequence: u64,
}

impl Datagrams {
    fn new(material: &[u8; 64], is_lower: bool, to: SocketAddr) -> io::Result<Self> {
        let half = if is_lower { &material[..32] } else { &material[32..] };
        let key = UnboundKey::new(&AES_128_GCM, &half[..16]).expect("16 bytes");
        let (first_nonce, name) = (half[16..28].try_into(), half[28..].try_into());
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(to)?;
        Ok(Self {
            socket,
            key: LessSafeKey::new(key),
            first_nonce: first_nonce.map_err(io::Error::other)?,
            name: u32::from_be_bytes(name.map_err(io::Error::other)?),
            sequence: 0,
        })
    }

    fn send(&mut self, frame: &Frame) {
        let header = Header { link: self.name, sequence: self.sequence }.to_bytes();
        let mut nonce = self.first_nonce;
        for (byte, number) in nonce[4..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= number;
        }
        self.sequence += 1;
        let mut sealed = frame.to_datagram();
        let nonce = Nonce::assume_unique_for_key(nonce);
        self.key.seal_in_place_append_tag(nonce, Aad::from(header), &mut sealed).expect("sealed");
        // A full buffer drops some, as the network does.
        let _ = self.socket.send(&[&header[..], &sealed].concat());
    }
}

impl Liar {
    fn start(chain: &Chain) -> Self {
        let [does, sent] = [0; 2].map(|_| Arc::new(AtomicUsize::new(0)));
        let (who, stop) = (Who::new(&chain.keys, "m", &MEMBERS), Arc::new(AtomicBool::new(false)));
        let [a, b, r1] = ["a", "b", "r1"].map(|name| chain.keys.public(name).node_id());
        let (stopped, doing, counted) = (stop.clone(), does.clone(), sent.clone());
        let thread = chain.a.run(move || {
            std::thread::spawn(move || {
                let mut source = Source::new(EPOCH);
                // A busy machine may cost it its link.
                while !stopped.load(Relaxed) {
                    let ended = speak(&who, [a, b, r1], &mut source, (&stopped, &doing, &counted));
                    ended.unwrap_or_else(|_| std::thread::park_timeout(Duration::from_millis(20)));
                }
            })
        });
        Self { stop, does, sent, thread: Some(thread) }
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let joined = self.thread.take().map(JoinHandle::join);
        assert!(joined.is_none_or(|ended| ended.is_ok()) || std::thread::panicking(), "the liar panicked");
    }
}

/// One life of its link: it speaks as an honest node does, and beside that it sends what it likes.
fn speak(
    who: &Who,
    [a, b, r1]: [NodeId; 3],
    source: &mut Source,
    (stopped, does, sent): (&AtomicBool, &AtomicUsize, &AtomicUsize),
) -> io::Result<()> {
    let address = at("10.8.1.2", 8100);
    let name = ServerName::try_from("overlay.invalid").map_err(io::Error::other)?;
    let tls = ClientConnection::new(who.config.clone(), name).map_err(io::Error::other)?;
    let tcp = TcpStream::connect_timeout(&address, LIMIT)?;
    tcp.set_nodelay(true)?;
    let mut stream = StreamOwned::new(tls, tcp);
    let greeting = Greeting { version: VERSION, kind: LinkKind::Reliable, purpose: Purpose::Control };
    stream.write_all(&Frame::Greeting(greeting).to_bytes())?;
    stream.flush()?;
    stream.sock.set_read_timeout(Some(Duration::from_millis(10)))?;
    let (began, mut decoder, mut buffer) = (Instant::now(), Decoder::new(), [0; 16_384]);
    let clock = || {
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        sidetrack_core::time::Instant::from_nanos(nanos)
    };
    let pace = hello::Pace { interval: Duration::from_millis(65), missed: 1000 };
    let hello = hello::Config { stream: pace, ..hello::Config::default() };
    let disseminate = disseminate::Config::new(who.own, who.members.clone(), 1);
    let config = Config { hello, epoch: EPOCH, ..Config::new(disseminate) };
    let mut node = Machine::new(config, who.clone(), clock());
    node.handle(clock(), Input::LinkOpened(r1));
    let (mut datagrams, mut epochs) = (None, BTreeMap::new());
    while !stopped.load(Relaxed) {
        node.handle(clock(), Input::Tick);
        while let Some(output) = node.poll() {
            match output {
                Output::Send(_, frame) => stream.write_all(&frame.to_bytes())?,
                Output::Hello(_, hello, _) => stream.write_all(&Frame::Hello(hello).to_bytes())?,
                _ => {}
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => decoder.push(&buffer[..n]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        while let Some(frame) = decoder.next_frame().map_err(io::Error::other)? {
            if let Frame::Standing(standing) = &frame {
                epochs.insert(standing.origin, standing.epoch);
            }
            node.handle(clock(), Input::Frame(r1, frame));
        }
        let (Some(of_a), Some(of_b)) = (epochs.get(&a), epochs.get(&b)) else { continue };
        if datagrams.is_none() && !stream.conn.is_handshaking() {
            let label = b"EXPORTER sidetrack overlay 1 datagrams";
            let material = stream.conn.export_keying_material([0; 64], label, None);
            datagrams = Some(Datagrams::new(&material.map_err(io::Error::other)?, who.own < r1, address)?);
        }
        let Some(datagrams) = datagrams.as_mut().filter(|_| node.is_up(r1)) else { continue };
        let vouched =
            |packets: Vec<Vouched>| packets.into_iter().map(|it| Frame::Vouched(Box::new(it))).collect();
        let frames: Vec<_> = match does.load(Relaxed) {
            FLOODS => vouched(own_packets(who, (b, *of_b), r1, source)),
            FORGES => vouched(forgeries(who, [a, b, r1], [*of_a, *of_b], source)),
            CLAIMS => claims(who, FlowName { source: a, destination: b, epoch: *of_a, target: *of_b }),
            _ => Vec::new(),
        };
        sent.fetch_add(frames.len(), Relaxed);
        frames.iter().for_each(|frame| datagrams.send(frame));
    }
    Ok(())
}

const TOLERANT: Service = Service { trust: Trust::Tolerant, ..Service::new(LinkKind::BestEffort) };

fn way(from: NodeId, r1: NodeId, b: NodeId, more: Option<(NodeId, NodeId)>) -> Subgraph {
    Subgraph::new(from, b, [(from, r1), (r1, b)].into_iter().chain(more)).expect("a path")
}

/// Six packets of 900 bytes every 10 ms or so: up to 5.7 Mb/s, where its share is a half.
fn own_packets(who: &Who, (b, target): (NodeId, u32), r1: NodeId, source: &mut Source) -> Vec<Vouched> {
    let unsigned = (0..6).map(|_| {
        let packet = source.packet(&TOLERANT, way(who.own, r1, b, None), Protocol::Ip, vec![0; 900]);
        Unsigned { priority: 10, target, packet }
    });
    batch::sign(who.own, unsigned, who)
}

/// Packets in the name of a, one of its own that it has changed, one twice, and one of an earlier epoch.
fn forgeries(
    who: &Who,
    [a, b, r1]: [NodeId; 3],
    [epoch, target]: [u32; 2],
    source: &mut Source,
) -> Vec<Vouched> {
    let make = |source: &mut Source, subgraph: Subgraph| {
        let packet = source.packet(&TOLERANT, subgraph, Protocol::Ip, vec![7; 40]);
        batch::sign(who.own, [Unsigned { priority: 5, target, packet }], who).remove(0)
    };
    let own = make(source, way(who.own, r1, b, None));
    let mut of_a = make(source, way(a, r1, b, Some((who.own, r1))));
    (of_a.packet.epoch, of_a.packet.sequence) = (epoch, u64::MAX);
    let mut changed = make(source, way(who.own, r1, b, None));
    changed.packet.payload[0] ^= 1;
    let old = make(&mut Source::new(EPOCH - 1), way(who.own, r1, b, None));
    vec![own.clone(), own, old, of_a, changed]
}

/// What the liar says about a flow of a: that it has all of it, that b has confirmed all of it, and messages in the name of a,
/// within the window and beyond it.
fn claims(who: &Who, flow: FlowName) -> Vec<Frame> {
    let holding = |next: u64, confirmed: Option<Confirmed>| {
        Frame::Holding(Box::new(Holding { flow, asks: true, confirmed, next, beyond: Vec::new() }))
    };
    let next = 1 << 40;
    let confirmed = Confirmed { next, signature: who.sign(&flow.confirmed_bytes(next)) };
    let subgraph = Subgraph::new(flow.source, flow.destination, []).expect("two nodes");
    let message = |sequence: u64| {
        let service = Service { dissemination: Dissemination::Flood, ..Service::new(LinkKind::Reliable) };
        let mut source = Source::new(flow.epoch);
        let packet = source.packet(&service, subgraph.clone(), Protocol::Ip, vec![7; 40]);
        let packet = Spread { sequence, ..packet };
        let forged = Unsigned { priority: 5, target: flow.target, packet };
        Frame::Vouched(Box::new(batch::sign(who.own, [forged], who).remove(0)))
    };
    let numbers = (0..3).map(|at| at * 200).chain([1 << 40]);
    [holding(u64::MAX, None), holding(next, Some(confirmed))]
        .into_iter()
        .chain(numbers.map(message))
        .collect()
}

/// `explain` says which nodes the packets rely on, and over which links they go.
fn explained(up: &Up) {
    let folder = up.folder();
    let mut explain = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    explain
        .args(["explain", "10.1.0.1", "10.2.0.1:80", "--intercept", "run", "-c"])
        .arg(folder.join("sidetrack.toml"));
    let out = explain.arg("--admin").arg(folder.join("admin.sock")).output().expect("the binary");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("to node b: reliable, flood, intrusion-tolerant"), "{out:?}");
    assert!(text.contains("a -> r1") && text.contains("r1 -> b"), "{text}");
}

#[test]
fn reliable_packets_all_arrive_over_links_that_lose_some_beside_a_member_that_claims_to_have_them() {
    if !is_root() {
        return;
    }
    let chain = Chain::with(RELIABLE);
    let flows =
        |up: &Up, what: &str| status(up)["spread"]["tolerant"]["flows"][what].as_u64().expect("a count");
    run(&chain.up_r1, &["link", "set", "a", "--loss", "10"]);
    run(&chain.up_b, &["link", "set", "r1", "--loss", "10"]);
    let all_arrive = |what: &str| {
        let mut got = Vec::new();
        // While packets have no way for three seconds, they are not caught: a busy machine may do that to a link.
        for _ in 0..3 {
            let before = status(&chain.up_a)["caught"]["without_way"].as_u64();
            got.push(chain.stream());
            if got.last() == Some(&(COUNT as usize)) {
                return;
            }
            let after = status(&chain.up_a)["caught"]["without_way"].as_u64();
            assert!(after > before, "{what}: {got:?} of {COUNT}; {:#}", status(&chain.up_r1));
            wait_for(&chain.up_a, "a way again", |status| arrives(status, 2));
        }
        panic!("{what}: {got:?} of {COUNT}");
    };
    all_arrive("over lossy links");
    assert!(flows(&chain.up_r1, "relayed") >= u64::from(COUNT), "{:#}", status(&chain.up_r1));
    assert!(flows(&chain.up_a, "resent") > 0 && flows(&chain.up_b, "delivered") >= u64::from(COUNT));
    let liar = Liar::start(&chain);
    wait_for(&chain.up_r1, "a link to the liar", |status| {
        let links = status["links"].as_array().expect("links");
        links.iter().any(|link| link["neighbour"] == "m" && link["up"] == true)
    });
    liar.does.store(CLAIMS, Relaxed);
    wait_for(&chain.up_r1, "claims", |status| {
        let flows = &status["spread"]["tolerant"]["flows"];
        flows["forged"].as_u64() > Some(10) && flows["beyond"].as_u64() > Some(10)
    });
    all_arrive("beside claims");
    assert!(flows(&chain.up_r1, "kept_bytes") < 4 << 20, "{:#}", status(&chain.up_r1));
    assert!(run(&chain.up_r1, &["status"]).contains("reliable flows "));
    explained(&chain.up_a);
    let metrics = crate::node::admin::show(&chain.up_r1, "/metrics");
    assert!(metrics.contains("sidetrack_overlay_packets_total{fate=\"reliable_relayed\"}"), "{metrics}");
}

#[test]
fn a_member_that_floods_gets_its_share_and_what_it_forges_or_repeats_goes_nowhere() {
    if !is_root() {
        return;
    }
    let chain = Chain::new();
    let liar = Liar::start(&chain);
    wait_for(&chain.up_r1, "a link to the liar", |status| {
        let links = status["links"].as_array().expect("links");
        links.iter().any(|link| link["neighbour"] == "m" && link["up"] == true)
    });
    liar.does.store(FLOODS, Relaxed);
    wait_for(&chain.up_r1, "a flood", |status| {
        status["spread"]["tolerant"]["over_share"].as_u64() > Some(100)
    });
    chain.nine_tenths("beside a flood");
    assert!(count(&chain.up_r1, "waiting_bytes") < 4 << 20, "{:#}", status(&chain.up_r1));
    // What it sends under other names, twice, or from the past.
    liar.does.store(FORGES, Relaxed);
    wait_for(&chain.up_r1, "lies of all kinds", |status| {
        let count = |what: &str| status["spread"]["tolerant"][what].as_u64();
        let bounds = [("forged", 20), ("replayed", 10), ("duplicates", 5), ("unchecked", 20)];
        bounds.iter().all(|(what, least)| count(what) >= Some(*least))
    });
    chain.nine_tenths("beside forgeries");
    assert!(liar.sent.load(Relaxed) > 100);
    let caught = status(&chain.up_b)["caught"].clone();
    assert!(caught["delivered"].as_u64() >= Some(u64::from(COUNT)), "{caught:#}");
}
