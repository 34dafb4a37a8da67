//! More flows through a hop than fit on one connection to it.

use super::hops::{hop, near};
use super::node::Up;
use super::{Site, hops};
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Endpoint, EndpointConfig, RecvStream, SendStream, ServerConfig, TransportConfig};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sidetrack::reactor::{self, QuicRuntime};
use sidetrack::tls::{authority, provider, signed};
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Streams that the hop of the tests allows for flows of TCP.
const STREAMS: u32 = 10;

#[test]
fn three_hundred_associations_pass_one_hop_at_a_time() {
    let servers = (hops::echo(), Echo::start("127.0.0.1"));
    for scheme in ["https", "h3"] {
        let site = Site::named("localhost", "");
        let near = near(&hop(scheme, &site, &site.ca_file()), (servers.0, servers.1.address));
        let to = near.addresses("udp")[0];
        let clients: Vec<UdpSocket> = (0..300_u16)
            .map(|number| {
                let client = UdpSocket::bind("127.0.0.1:0").unwrap();
                client.set_read_timeout(Some(LIMIT)).unwrap();
                client.connect(to).unwrap();
                client.send(&number.to_be_bytes()).unwrap();
                client
            })
            .collect();
        for (number, client) in (0..300_u16).zip(&clients) {
            let mut buffer = [0; 8];
            let length =
                client.recv(&mut buffer).unwrap_or_else(|error| panic!("{scheme}: {number}: {error}"));
            assert_eq!(buffer[..length], number.to_be_bytes(), "{scheme}");
        }
    }
}

/// A hop of HTTP/3 that allows few streams, and returns what its tunnels bring.
struct Narrow {
    address: SocketAddr,
    files: tempfile::TempDir,
    connections: Arc<AtomicUsize>,
}

impl Narrow {
    /// `streams`: how many it allows on a connection.
    fn start(streams: u32) -> Self {
        let ca = authority(3).unwrap();
        let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
        let files = tempfile::tempdir().unwrap();
        std::fs::write(files.path().join("ca.pem"), &ca.certificate_pem).unwrap();
        let certificates = CertificateDer::pem_slice_iter(made.certificate_pem.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).unwrap();
        let mut tls = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates.map(Result::unwrap).collect(), key)
            .unwrap();
        tls.alpn_protocols = vec![b"h3".to_vec()];
        let mut transport = TransportConfig::default();
        transport.max_concurrent_bidi_streams(streams.into());
        let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).unwrap()));
        config.transport_config(Arc::new(transport));
        let connections = Arc::<AtomicUsize>::default();
        let count = connections.clone();
        let (tell, told) = std::sync::mpsc::channel();
        let serve = async move {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let own = EndpointConfig::default();
            let endpoint = Endpoint::new(own, Some(config), socket, Arc::new(QuicRuntime)).unwrap();
            tell.send(endpoint.local_addr().unwrap()).unwrap();
            while let Some(incoming) = endpoint.accept().await {
                let Ok(connection) = incoming.await else { continue };
                count.fetch_add(1, SeqCst);
                reactor::spawn(async move {
                    // The control stream (RFC 9114 Sec. 6.2.1), which must stay open. Extended CONNECT is allowed (RFC 9220 Sec. 3).
                    let mut control = connection.open_uni().await.unwrap();
                    control.write_all(&[0, 4, 2, 8, 1]).await.unwrap();
                    while let Ok((send, recv)) = connection.accept_bi().await {
                        reactor::spawn(async move {
                            let _ = echo(send, recv).await;
                        });
                    }
                });
            }
        };
        std::thread::spawn(move || reactor::block_on(serve));
        Self { address: told.recv_timeout(LIMIT).unwrap(), files, connections }
    }

    fn url(&self) -> String {
        format!("h3://localhost:{}?ca={}/ca.pem", self.address.port(), self.files.path().display())
    }
}

/// A number of one or two bytes (RFC 9000 Sec. 16).
async fn number(recv: &mut RecvStream) -> Option<usize> {
    let mut byte = [0; 1];
    recv.read_exact(&mut byte).await.ok()?;
    let first = usize::from(byte[0]);
    if first < 64 {
        return Some(first);
    }
    recv.read_exact(&mut byte).await.ok()?;
    Some((first & 63) * 256 + usize::from(byte[0]))
}

/// Reads the HEADERS of a request, says 200, and returns the frames that follow.
async fn echo(mut send: SendStream, mut recv: RecvStream) -> Option<()> {
    let (kind, length) = (number(&mut recv).await?, number(&mut recv).await?);
    assert_eq!(kind, 1, "HEADERS come first");
    recv.read_exact(&mut vec![0; length]).await.ok()?;
    // HEADERS with `:status: 200`, entry 25 of the static table of QPACK (RFC 9204 Appendix A).
    send.write_all(&[1, 3, 0, 0, 0xd9]).await.ok()?;
    while let Ok(Some(chunk)) = recv.read_chunk(65_536, true).await {
        send.write_all(&chunk.bytes).await.ok()?;
    }
    send.finish().ok()
}

fn open(near: &Up) -> TcpStream {
    try_open(near).unwrap()
}

fn try_open(near: &Up) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(near.addresses("tcp")[0])?;
    stream.set_read_timeout(Some(LIMIT))?;
    exchange(&mut stream, b"hello")?;
    Ok(stream)
}

fn exchange(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(bytes)?;
    let mut came = vec![0; bytes.len()];
    stream.read_exact(&mut came)?;
    assert_eq!(came, bytes);
    Ok(())
}

#[test]
fn further_connections_are_opened_to_a_hop_that_allows_few_streams() {
    let hop = Narrow::start(STREAMS);
    let mut near = near(&hop.url(), (hops::echo(), "127.0.0.1:9".parse().unwrap()));
    let mut flows: Vec<TcpStream> = (0..35).map(|_| open(&near)).collect();
    assert_eq!(hop.connections.load(SeqCst), 4, "ten flows on each");
    flows.iter_mut().for_each(|flow| exchange(flow, b"again").unwrap());
    // Places that are free again are used: as many flows again need no further connection, once the hop has said so.
    drop(flows);
    for _ in 0..35 {
        near.record();
    }
    eventually("places are used again", || {
        let before = hop.connections.load(SeqCst);
        let flows: Vec<TcpStream> = (0..20).map(|_| open(&near)).collect();
        drop(flows);
        hop.connections.load(SeqCst) == before
    });
    // 64 connections of ten streams: what comes then is refused with the reason. Some places may not be free again yet.
    let mut flows = Vec::new();
    let refused = (0..641).find_map(|_| match try_open(&near) {
        Ok(flow) => {
            flows.push(flow);
            None
        }
        Err(error) => Some(error),
    });
    assert!(refused.is_some() && flows.len() > 500, "{refused:?} after {} flows", flows.len());
    let mut record = near.record();
    while record.text("reason") != "limit" {
        record = near.record();
    }
    assert!(record.text("detail").contains("the hop takes no further flow"), "{record:?}");
    assert_eq!(hop.connections.load(SeqCst), 64);
    drop(flows);
}

#[test]
fn the_association_that_is_idle_for_longest_leaves_a_hop_that_takes_no_further_flow() {
    let hop = Narrow::start(2);
    let mut near = near(&hop.url(), (hops::echo(), "192.0.2.1:9".parse().unwrap()));
    let to = near.addresses("udp")[0];
    let new = || {
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client.connect(to).unwrap();
        client
    };
    let ask = |client: &UdpSocket, number: u16| {
        client.send(&number.to_be_bytes()).unwrap();
        let mut buffer = [0; 8];
        let length = client.recv(&mut buffer).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_eq!(buffer[..length], number.to_be_bytes());
    };
    // 64 connections of two streams. No first datagram of a later client is lost.
    let clients: Vec<UdpSocket> = (0..128_u16)
        .map(|number| {
            let client = new();
            ask(&client, number);
            client
        })
        .collect();
    ask(&clients[0], 1000);
    let later: Vec<UdpSocket> = (200..210_u16)
        .map(|number| {
            let client = new();
            ask(&client, number);
            client
        })
        .collect();
    let left = near.records(10);
    for client in &clients[1..11] {
        let record = &left[&client.local_addr().unwrap()];
        assert_eq!(record.text("reason"), "limit", "{record:?}");
        assert!(
            record.text("detail").contains("left for a newer one")
                && record.text("detail").contains("no further flow"),
            "{record:?}"
        );
    }
    ask(&clients[0], 1001);
    ask(&clients[1], 1002);
    assert_eq!(near.record().address("client"), clients[11].local_addr().unwrap());
    assert!(hop.connections.load(SeqCst) <= 64);
    drop(later);
}
