//! Early data (0-RTT) can be replayed: we neither send nor take any.

use super::client::{Client, run};
use super::{Site, datagrams_to};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Connection, Endpoint, EndpointConfig, ServerConfig, VarInt};
use sidetrack::carry::h3::{Goal, Peer};
use sidetrack::carry::{Admitted, Dialing};
use sidetrack::reactor::{self, QuicRuntime, sleep};
use sidetrack::tls::{Own, Roots, authority, signed};
use sidetrack_core::flow::{EndReason, Host};
use sidetrack_core::http::message::Sender;
use std::net::{SocketAddr, UdpSocket};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Returns the number of packets of 0-RTT in a datagram (RFC 9000 Sec. 17.2).
fn early_packets(mut datagram: &[u8]) -> usize {
    let mut count = 0;
    while let [first, _, _, _, _, rest @ ..] = datagram {
        if first & 0x80 == 0 {
            break;
        }
        let kind = (first >> 4) & 3;
        let mut rest = rest;
        for _ in 0..2 {
            let length = usize::from(rest[0]);
            rest = &rest[1 + length..];
        }
        if kind == 0 {
            let length = number(&mut rest);
            rest = &rest[length..];
        }
        count += usize::from(kind == 1);
        let length = number(&mut rest);
        datagram = rest.get(length..).unwrap_or_default();
    }
    count
}

/// Takes a number of variable length from the front.
fn number(bytes: &mut &[u8]) -> usize {
    let length = 1 << (bytes[0] >> 6);
    let (own, rest) = bytes.split_at(length);
    *bytes = rest;
    own.iter().fold(0, |number, byte| (number << 8) | usize::from(*byte)) & ((1 << (8 * length - 2)) - 1)
}

/// A server that takes early data.
fn generous(identity: &str) -> SocketAddr {
    let mut tls = Own::new(identity).unwrap().server(&[b"h3"]).unwrap();
    tls.max_early_data_size = u32::MAX;
    let config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(Arc::new(tls)).unwrap()));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let endpoint =
        Endpoint::new(EndpointConfig::default(), Some(config), socket, Arc::new(QuicRuntime)).unwrap();
    let address = endpoint.local_addr().unwrap();
    reactor::spawn(async move {
        let mut kept: Vec<Rc<Peer>> = Vec::new();
        while let Some(incoming) = endpoint.accept().await {
            // A client may be gone already.
            let Ok(connection) = incoming.await else { continue };
            kept.extend(Peer::begin(connection, Sender::Client).await);
        }
    });
    address
}

/// Forwards datagrams to a server, and counts the packets of 0-RTT.
fn relay(to: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    let front = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
    let (address, count) = (front.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = count.clone();
    std::thread::spawn(move || {
        // One socket for each client, as each connection has a port of its own.
        let mut backs: Vec<(SocketAddr, Arc<UdpSocket>)> = Vec::new();
        let mut buffer = [0; 65_536];
        while let Ok((length, from)) = front.recv_from(&mut buffer) {
            counted.fetch_add(early_packets(&buffer[..length]), Relaxed);
            let known = backs.iter().find(|(client, _)| *client == from).map(|(_, back)| back.clone());
            let back = known.unwrap_or_else(|| {
                let back = Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap());
                back.connect(to).unwrap();
                let (front, answers) = (front.clone(), back.clone());
                std::thread::spawn(move || {
                    let mut buffer = [0; 65_536];
                    while let Ok(length) = answers.recv(&mut buffer) {
                        let _ = front.send_to(&buffer[..length], from);
                    }
                });
                backs.push((from, back.clone()));
                back
            });
            let _ = back.send(&buffer[..length]);
        }
    });
    (address, count)
}

/// Connects as a client that sends early data if it may. Returns whether it did.
async fn eager(tls: &rustls::ClientConfig, to: SocketAddr, name: &str) -> (Connection, bool) {
    let crypto = QuicClientConfig::try_from(Arc::new(tls.clone())).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(QuicRuntime)).unwrap();
    let connecting = endpoint.connect_with(ClientConfig::new(Arc::new(crypto)), to, name).unwrap();
    match connecting.into_0rtt() {
        Ok((connection, accepted)) => {
            let mut stream = connection.open_uni().await.unwrap();
            stream.write_all(b"\x21").await.unwrap();
            accepted.await;
            (connection, true)
        }
        Err(connecting) => (connecting.await.unwrap(), false),
    }
}

fn trusting(ca: &str) -> rustls::ClientConfig {
    let mut tls = Roots::of(ca).unwrap().client().unwrap();
    tls.alpn_protocols = vec![b"h3".to_vec()];
    tls.enable_early_data = true;
    tls
}

#[test]
fn no_early_data_is_sent_or_taken() {
    let ca = authority(3).unwrap();
    let made = signed("web.example", 3, &ca.identity_pem()).unwrap();
    let site = Site::named("localhost", "");
    run(async {
        let (to, early) = relay(generous(&made.identity_pem()));
        let (tls, dialing) = (trusting(&ca.certificate_pem), Dialing::default());
        let host: Host = Host::Name("web.example".parse().unwrap());
        // An eager client shows that the server would take it, once the ticket is there.
        loop {
            let (_connection, is_early) = eager(&tls, to, "web.example").await;
            if is_early {
                break;
            }
            sleep(Duration::from_millis(10)).await;
        }
        let before = early.load(Relaxed);
        assert!(before > 0, "the relay sees early data");
        for _ in 0..2 {
            let goal = Goal { host: &host, tls: tls.clone(), dialing: &dialing };
            let peer = goal.connect(&[Admitted::configured(to)]).await.unwrap();
            peer.connection().close(VarInt::from_u32(0x100), b"");
        }
        assert_eq!(early.load(Relaxed), before, "we send none");
        let tls = trusting(&site.ca);
        for _ in 0..3 {
            let (connection, is_early) = eager(&tls, site.address(), "localhost").await;
            assert!(!is_early, "our listener takes none");
            let peer = Peer::begin(connection, Sender::Server).await.unwrap();
            assert!(peer.told().await);
        }
    });
}

#[test]
fn our_own_port_of_http_3_is_a_loop() {
    let mut site = Site::named("localhost", "");
    let own = site.address();
    run(async {
        let dialing = Dialing { own_datagrams: vec![own], ..Dialing::default() };
        let host: Host = Host::Name("localhost".parse().unwrap());
        let goal = Goal { host: &host, tls: trusting(&site.ca), dialing: &dialing };
        let failure = goal.connect(&[Admitted::configured(own)]).await.unwrap_err();
        assert_eq!(failure.reason, EndReason::Loop, "{failure}");
        // A client that asks for a tunnel of datagrams to the port through which it asks.
        let client = Client::named(own, &site.ca, "localhost").await;
        let (status, _) = client.fetch(&datagrams_to(own.port()), b"").await;
        assert_eq!(status, 502);
        client.leave().await;
    });
    let record = site.up.record();
    assert_eq!((record.text("protocol"), record.text("reason")), ("udp", "loop"), "{record:?}");
}
