//! A member of the overlay that lies: about its own links, about those of others, and without pause. No honest node takes a way
//! that is not there, loses one that is, or grows by it.

use crate::node::Up;
use crate::scene::{
    Keys, Server, exchange, held_kib, overlay_address, path_to, random_bytes, status, wait_for,
};
use ring::signature::Ed25519KeyPair;
use rustls::client::AlwaysResolvesClientRawPublicKeys;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring as provider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};
use sidetrack::tls::{Believe, Believing};
use sidetrack_core::overlay::frame::{
    Decoder, Frame, Greeting, LinkEntry, LinkKind, Purpose, Record, VERSION,
};
use sidetrack_core::overlay::key::SecretKey;
use sidetrack_core::overlay::node::{Config, Input, Node, Output};
use sidetrack_core::overlay::{Keys as Signs, NodeId, Signature, disseminate, hello};
use sidetrack_testkit::LIMIT;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What stands before an Ed25519 key in its SubjectPublicKeyInfo and in its PKCS #8 (RFC 8410 Sec. 4 and 7).
const SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// False records that the liar sends in a row while it floods.
const BURST: u64 = 40;

/// It trusts all nodes.
#[derive(Debug)]
struct Gullible;

impl Believe for Gullible {
    const RAW_KEYS: bool = true;

    fn check(&self, _: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        Ok(())
    }

    fn verify(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// A member with a key of its own, and what it needs to say whatever it wants under it.
#[derive(Clone)]
pub(crate) struct Who {
    pub own: NodeId,
    pub members: BTreeSet<NodeId>,
    secret: SecretKey,
    pub config: Arc<ClientConfig>,
}

impl Signs for Who {
    fn sign(&self, bytes: &[u8]) -> Signature {
        let pair = Ed25519KeyPair::from_seed_unchecked(&self.secret.0).expect("a key");
        Signature(pair.sign(bytes).as_ref().try_into().expect("64 bytes"))
    }

    fn verify(&self, _: NodeId, _: &[u8], _: &Signature) -> bool {
        true
    }
}

impl Who {
    pub(crate) fn new(keys: &Keys, name: &str, members: &[&str]) -> Self {
        let text = std::fs::read_to_string(keys.file(name)).expect("a key file");
        let secret: SecretKey = text.trim().parse().expect("a secret key");
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from([&PKCS8[..], &secret.0].concat()));
        let provider = Arc::new(provider::default_provider());
        let key = provider.key_provider.load_private_key(key).expect("a key");
        let shown = CertificateDer::from([&SPKI[..], &keys.public(name).0].concat());
        let certified = Arc::new(CertifiedKey::new(vec![shown], key));
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Believing(Gullible)))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified)));
        config.alpn_protocols = vec![b"sidetrack-overlay/1".to_vec()];
        let members = members.iter().map(|name| keys.public(name).node_id()).collect();
        Self { own: keys.public(name).node_id(), members, secret, config: Arc::new(config) }
    }

    /// Links to all members for nothing, or none at all, in the name of `origin` and under our own signature.
    fn record(&self, origin: NodeId, sequence: u64, has_links: bool) -> Frame {
        let others = self.members.iter().filter(|member| **member != origin && has_links);
        let links = others.map(|neighbour| LinkEntry { neighbour: *neighbour, cost_us: 1 }).collect();
        let record = Record { origin, sequence, links, signature: Signature::NONE };
        let signature = self.sign(&record.signed_bytes());
        Frame::Record(Record { signature, ..record })
    }

    /// Instead of its own record: links to all nodes, and for all other nodes that they have none.
    fn lies(&self, sequence: u64) -> Vec<Frame> {
        let others = self.members.iter().filter(|member| **member != self.own);
        let robbed = others.map(|member| self.record(*member, u64::MAX - 1, false));
        robbed.chain([self.record(self.own, sequence, true)]).collect()
    }
}

/// The liar at work, a neighbour of one node.
struct Liar {
    stop: Arc<AtomicBool>,
    floods: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Liar {
    fn start(who: Who, neighbour: NodeId, address: SocketAddr) -> Self {
        let [stop, floods] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (stopped, flooding) = (stop.clone(), floods.clone());
        let thread = std::thread::spawn(move || {
            let mut sequence = 1;
            // A busy machine may cost it its link.
            while !stopped.load(Relaxed) {
                let ended = speak(&who, neighbour, address, &mut sequence, [&stopped, &flooding]);
                ended.unwrap_or_else(|_| std::thread::park_timeout(Duration::from_millis(20)));
            }
        });
        Self { stop, floods, thread: Some(thread) }
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let joined = self.thread.take().map(JoinHandle::join);
        assert!(joined.is_none_or(|ended| ended.is_ok()) || std::thread::panicking(), "the liar panicked");
    }
}

/// One life of its link, as an honest node speaks, but for records.
fn speak(
    who: &Who,
    neighbour: NodeId,
    address: SocketAddr,
    sequence: &mut u64,
    [stopped, floods]: [&AtomicBool; 2],
) -> io::Result<()> {
    let name = ServerName::try_from("overlay.invalid").map_err(io::Error::other)?;
    let tls = ClientConnection::new(who.config.clone(), name).map_err(io::Error::other)?;
    let tcp = TcpStream::connect_timeout(&address, LIMIT)?;
    tcp.set_nodelay(true)?;
    let mut stream = StreamOwned::new(tls, tcp);
    let greeting = Greeting { version: VERSION, kind: LinkKind::Reliable, purpose: Purpose::Control };
    stream.write_all(&Frame::Greeting(greeting).to_bytes())?;
    stream.sock.set_read_timeout(Some(Duration::from_millis(10)))?;
    let (began, mut decoder, mut buffer) = (Instant::now(), Decoder::new(), [0; 16_384]);
    let clock = || {
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        sidetrack_core::time::Instant::from_nanos(nanos)
    };
    // It never takes its neighbour for dead.
    let pace = hello::Pace { interval: Duration::from_millis(65), missed: 1000 };
    let hello = hello::Config { stream: pace, ..hello::Config::default() };
    let disseminate = disseminate::Config::new(who.own, who.members.clone(), 1);
    let config = Config { hello, ..Config::new(disseminate) };
    let mut node = Node::new(config, who.clone(), clock());
    node.handle(clock(), Input::LinkOpened(neighbour));
    while !stopped.load(Relaxed) {
        node.handle(clock(), Input::Tick);
        let mut frames = Vec::new();
        while let Some(output) = node.poll() {
            match output {
                Output::Send(_, Frame::Record(_)) => {
                    *sequence += 1;
                    frames.extend(who.lies(*sequence));
                }
                Output::Send(_, frame) => frames.push(frame),
                Output::Hello(_, hello, _) => frames.push(Frame::Hello(hello)),
                _ => {}
            }
        }
        if floods.load(Relaxed) && node.is_up(neighbour) {
            frames.extend((0..BURST).map(|at| who.record(who.own, *sequence + 1 + at, at % 2 == 0)));
            *sequence += BURST;
        }
        for frame in frames {
            stream.write_all(&frame.to_bytes())?;
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => decoder.push(&buffer[..n]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        while let Some(frame) = decoder.next_frame().map_err(io::Error::other)? {
            node.handle(clock(), Input::Frame(neighbour, frame));
        }
    }
    Ok(())
}

#[test]
fn a_node_that_advertises_false_links_draws_no_flow_and_takes_no_link_away() {
    const MEMBERS: [&str; 4] = ["a", "b", "c", "m"];
    let keys = Keys::new(&MEMBERS);
    let bytes = random_bytes(8, 2_000_000);
    let server = Server::start(b"all of it".to_vec());
    let deliver = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";
    let c = Up::start_measured("", &(keys.section("c", &[], true) + deliver));
    let b = Up::start_measured("", &keys.section("b", &[("c", overlay_address(&c))], true));
    let listener = format!(
        "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"over\"\ncarrier = \"overlay:c\"\n",
        server.address
    );
    let section = keys.section("a", &[("b", overlay_address(&b))], true);
    let mut a = Up::start_measured("default = \"deny\"\n", &(listener + &section));
    wait_for(&a, "a path to c", |status| path_to(status, "c") == ["a", "b", "c"]);

    let who = Who::new(&keys, "m", &MEMBERS);
    let liar = Liar::start(who, keys.public("a").node_id(), overlay_address(&a));
    // What is true of its record counts; what is not does not, though the honest way costs a thousand times as much.
    for (node, to_liar) in [(&a, &["a", "m"][..]), (&b, &["b", "a", "m"]), (&c, &["c", "b", "a", "m"])] {
        wait_for(node, "the liar's one true link", |status| path_to(status, "m") == to_liar);
    }
    wait_for(&a, "forged records, dropped", |status| status["records_dropped"].as_u64() >= Some(3));
    let honest = |what: &str| {
        assert_eq!(path_to(&status(&a), "c"), ["a", "b", "c"], "{what}");
        assert_eq!(path_to(&status(&c), "a"), ["c", "b", "a"], "{what}");
    };
    honest("lies");

    let before: u64 = [&a, &b, &c].map(held_kib).iter().sum();
    liar.floods.store(true, Relaxed);
    wait_for(&a, "records that come too fast", |status| status["records_dropped"].as_u64() >= Some(5000));
    honest("a flood of lies");
    let entry = a.addresses("reverse")[0];
    assert_eq!(exchange(entry, &bytes).expect("an orderly end"), b"all of it");
    assert!(server.finish().expect("an orderly end") == bytes, "every byte, once");
    let held: u64 = [&a, &b, &c].map(held_kib).iter().sum();
    assert!(held < before + 32_768, "{before} KiB, then {held} KiB");
    drop(liar);
    let log = a.log_so_far();
    assert!(!log.contains("overlay link down neighbour=b"), "{log}");
}
