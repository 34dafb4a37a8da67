//! Servers whose QUIC connection dies under a request: what can be repeated is repeated by TCP, the rest is answered with 502.

use super::node::Record;
use super::servers::{Near, curl, version};
use super::{Site, origin_saying};
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{
    ConnectionId, ConnectionIdGenerator, Endpoint, EndpointConfig, IdleTimeout, ServerConfig, VarInt,
};
use ring::hmac;
use sidetrack::carry::h3::{Came, Peer, Reading, send_data, transport};
use sidetrack::reactor::{self, QuicRuntime};
use sidetrack::tls::Own;
use sidetrack_core::http::h3::message::{Message, put_response};
use sidetrack_core::http::message::Sender;
use sidetrack_testkit::eventually;
use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender as Channel, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The key of stateless resets, which a server keeps over its restart (RFC 9000 Sec. 10.3.2).
const RESET_KEY: [u8; 32] = [7; 32];

/// Ids without a secret: another process cannot tell that they are of this one.
struct Ids(Arc<AtomicU64>);

impl ConnectionIdGenerator for Ids {
    fn generate_cid(&mut self) -> ConnectionId {
        ConnectionId::new(&self.0.fetch_add(1, SeqCst).to_be_bytes())
    }

    fn cid_len(&self) -> usize {
        8
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

/// Serves HTTP/3 until the test ends. A connection is lost after `idle` without a packet. A request for `/hold` is counted and not answered, one for `/close` ends its connection.
fn server(identity: &str, held: Arc<AtomicUsize>, idle: Duration) -> SocketAddr {
    let (sender, address) = channel();
    let identity = identity.to_owned();
    std::thread::spawn(move || reactor::block_on(serve(identity, (held, idle), sender)));
    address.recv().unwrap()
}

async fn serve(identity: String, (held, idle): (Arc<AtomicUsize>, Duration), told: Channel<SocketAddr>) {
    let tls = Own::new(&identity).unwrap().server(&[b"h3"]).unwrap();
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(Arc::new(tls)).unwrap()));
    let mut transport = transport();
    transport.max_idle_timeout(IdleTimeout::try_from(idle).ok());
    config.transport_config(Arc::new(transport));
    let mut own = EndpointConfig::new(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &RESET_KEY)));
    let ids = Arc::<AtomicU64>::default();
    own.cid_generator(move || Box::new(Ids(ids.clone())));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::new(own, Some(config), socket, Arc::new(QuicRuntime)).unwrap();
    told.send(endpoint.local_addr().unwrap()).unwrap();
    while let Some(incoming) = endpoint.accept().await {
        let Ok(connection) = incoming.await else { continue };
        let held = held.clone();
        reactor::spawn(async move {
            let Ok(peer) = Peer::begin(connection, Sender::Client).await else { return };
            while let Ok((send, recv)) = peer.connection().accept_bi().await {
                reactor::spawn(answer(peer.clone(), send, recv, held.clone()));
            }
        });
    }
}

async fn answer(
    peer: Rc<Peer>,
    mut send: quinn::SendStream,
    recv: quinn::RecvStream,
    held: Arc<AtomicUsize>,
) {
    let mut reading = Reading::new(recv, Message::new(Sender::Client));
    let Ok(Some(Came::Request(request))) = reading.next().await else { return };
    match request.path.as_deref() {
        Some(b"/hold") => {
            held.fetch_add(1, SeqCst);
            std::future::pending::<()>().await;
        }
        Some(b"/close") => peer.connection().close(VarInt::from_u32(0x102), b"the end"),
        _ => {}
    }
    let mut out = Vec::new();
    put_response(&mut out, 200, &vec![(b"content-length".to_vec(), b"7".to_vec())]);
    // The connection may be over.
    let _ = send.write_all(&out).await;
    let _ = send_data(&mut send, b"by QUIC"[..].into()).await;
    let _ = send.finish();
}

/// Forwards datagrams to where `to` says, if anywhere.
fn relay(to: Arc<Mutex<Option<SocketAddr>>>) -> SocketAddr {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
    let address = front.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut backs: Vec<(SocketAddr, Arc<UdpSocket>)> = Vec::new();
        let mut buffer = [0; 65_536];
        while let Ok((length, from)) = front.recv_from(&mut buffer) {
            let known = backs.iter().find(|(client, _)| *client == from).map(|(_, back)| back.clone());
            let back = known.unwrap_or_else(|| {
                let back = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
                let (front, answers) = (front.clone(), back.clone());
                std::thread::spawn(move || {
                    let mut buffer = [0; 65_536];
                    while let Ok((length, _)) = answers.recv_from(&mut buffer) {
                        let _ = front.send_to(&buffer[..length], from);
                    }
                });
                backs.push((from, back.clone()));
                back
            });
            let to = *to.lock().unwrap();
            if let Some(to) = to {
                let _ = back.send_to(&buffer[..length], to);
            }
        }
    });
    address
}

/// How the connection dies, and what its record says.
#[derive(Clone, Copy, Debug)]
enum Death {
    Closed,
    Reset,
    Silent,
}

impl Death {
    /// How long the server waits for a packet. Where the test does not wait for it, no pause of the machine reaches it.
    const fn idle(self) -> Duration {
        match self {
            Self::Silent => Duration::from_secs(10),
            Self::Closed | Self::Reset => Duration::from_secs(300),
        }
    }

    const fn said(self) -> &'static str {
        match self {
            Self::Closed => "the end",
            Self::Reset => "reset by peer",
            Self::Silent => "timed out",
        }
    }
}

fn dies(death: Death) {
    let to = Arc::<Mutex<Option<SocketAddr>>>::default();
    let tcp = origin_saying(&format!("h3=\":{}\"", relay(to.clone()).port()));
    let site = Site::made("localhost", &format!("to = \"{tcp}\""), false);
    let identity = std::fs::read_to_string(site.up.folder().join("proxy.pem")).unwrap();
    let held = Arc::<AtomicUsize>::default();
    *to.lock().unwrap() = Some(server(&identity, held.clone(), death.idle()));
    let mut near = Near::start(site.address().port(), &site.ca_file(), "announced");
    eventually("HTTP/3 is used", || near.get("/a").contains("by QUIC"));
    let ask = |arguments: &[&str]| {
        let url = near.url("/hold");
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).chain([url]).collect();
        std::thread::spawn(move || curl(&arguments.iter().map(String::as_str).collect::<Vec<_>>()))
    };
    let (safe, unsafe_one) = (ask(&["--include"]), ask(&["--include", "--data", "x"]));
    eventually("both wait for the server", || {
        // A machine that pauses for too long loses the connection before: then they are answered by TCP.
        assert!(!safe.is_finished() && !unsafe_one.is_finished(), "{death:?}: too early");
        held.load(SeqCst) == 2
    });
    match death {
        Death::Closed => drop(near.get("/close")),
        Death::Reset => {
            // The server has lost its state, but not its key.
            *to.lock().unwrap() = Some(server(&identity, held.clone(), death.idle()));
            assert_eq!(version(&near.get("/x")), "2.0");
        }
        Death::Silent => *to.lock().unwrap() = None,
    }
    let told = safe.join().unwrap();
    assert_eq!((told.starts_with("HTTP/1.1 200 "), version(&told)), (true, "2.0".to_owned()), "{told}");
    let told = unsafe_one.join().unwrap();
    assert!(told.starts_with("HTTP/1.1 502 "), "{death:?}: {told}");
    let is_failed = |record: &Record| record.text("reason") != "ok";
    let record = std::iter::repeat_with(|| near.up.record()).find(is_failed).unwrap();
    assert_eq!(record.text("reason"), "server_reset", "{record:?}");
    assert!(record.text("detail").contains(death.said()), "{death:?}: {record:?}");
}

#[test]
fn safe_requests_on_a_connection_that_dies_are_repeated_and_others_fail() {
    let deaths =
        [Death::Closed, Death::Reset, Death::Silent].map(|death| std::thread::spawn(move || dies(death)));
    for death in deaths {
        death.join().unwrap();
    }
}
