//! Hops of kind `https` that speak HTTP/2: flows are streams of one connection. The hop is one of the test, which does what each name
//! asks for, or our own node.

use super::hops::{datagram_through, hop, through_port};
use super::node::Up;
use super::{Site, node};
use bytes::Bytes;
use h2::ext::Protocol;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sidetrack::tls::{authority, provider, signed};
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

/// What the hop of the test offers.
#[derive(Clone, Copy)]
struct Offers {
    /// Most streams at a time.
    streams: u32,
    /// Extended CONNECT.
    extended: bool,
    /// Where connections of HTTP/1.1 go, if it speaks that.
    plain: Option<SocketAddr>,
}

const ALL: Offers = Offers { streams: 100, extended: true, plain: None };

/// A hop that echoes what its tunnels bring.
struct Hop {
    address: SocketAddr,
    files: tempfile::TempDir,
    /// Connections of HTTP/2, and of HTTP/1.1.
    connections: Arc<[AtomicUsize; 2]>,
    /// Changes when all connections are to be cut.
    cut: watch::Sender<()>,
}

impl Hop {
    fn start(offers: Offers) -> Self {
        let ca = authority(3).unwrap();
        let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
        let files = tempfile::tempdir().unwrap();
        std::fs::write(files.path().join("ca.pem"), &ca.certificate_pem).unwrap();
        let certificates = CertificateDer::pem_slice_iter(made.certificate_pem.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).unwrap();
        let mut tls = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates.map(Result::unwrap).collect(), key)
            .unwrap();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        if offers.plain.is_some() {
            tls.alpn_protocols.push(b"http/1.1".to_vec());
        }
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let (cut, is_cut) = watch::channel(());
        let connections = Arc::<[AtomicUsize; 2]>::default();
        let count = connections.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let asked = Arc::<AtomicUsize>::default();
                while let Ok((socket, _)) = listener.accept().await {
                    let (acceptor, count, asked) = (acceptor.clone(), count.clone(), asked.clone());
                    let mut is_cut = is_cut.clone();
                    is_cut.mark_unchanged();
                    tokio::spawn(async move {
                        let Ok(stream) = acceptor.accept(socket).await else { return };
                        let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                        count[usize::from(!is_h2)].fetch_add(1, SeqCst);
                        tokio::select! {
                            _ = is_cut.changed() => {}
                            () = serve(stream, is_h2, offers, &asked) => {}
                        }
                    });
                }
            });
        });
        Self { address, files, connections, cut }
    }

    /// The URL of the hop.
    fn url(&self) -> String {
        format!("https://localhost:{}?ca={}/ca.pem", self.address.port(), self.files.path().display())
    }

    fn connections(&self) -> usize {
        self.connections[0].load(SeqCst)
    }
}

type Tls = tokio_rustls::server::TlsStream<tokio::net::TcpStream>;

/// Serves a connection. `asked` counts requests for names that are served at the second time.
async fn serve(mut stream: Tls, is_h2: bool, offers: Offers, asked: &AtomicUsize) {
    if !is_h2 {
        let Some(to) = offers.plain else { return };
        let mut plain = tokio::net::TcpStream::connect(to).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut stream, &mut plain).await;
        let _ = plain.shutdown().await;
        return;
    }
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(offers.streams);
    if offers.extended {
        builder.enable_connect_protocol();
    }
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let name = request.uri().host().unwrap_or_default().to_owned();
        match name.as_str() {
            "forbidden.test" => answer(&mut respond, 403, true),
            "reset.test" => respond.send_reset(Reason::CONNECT_ERROR),
            "busy.test" if asked.fetch_add(1, SeqCst) == 0 => respond.send_reset(Reason::REFUSED_STREAM),
            // Its connection ends with the request unanswered.
            "lost.test" if asked.fetch_add(1, SeqCst) == 0 => return,
            "leaves.test" => {
                tokio::spawn(echo(name, request, respond));
                connection.graceful_shutdown();
            }
            _ => drop(tokio::spawn(echo(name, request, respond))),
        }
    }
}

fn answer(respond: &mut SendResponse<Bytes>, status: u16, ends: bool) {
    let mut head = http::Response::new(());
    *head.status_mut() = http::StatusCode::from_u16(status).unwrap();
    let _ = respond.send_response(head, ends);
}

/// Opens the tunnel, and returns what it brings. `cut.test`: resets it when it brings something.
async fn echo(name: String, request: http::Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    assert_eq!(request.method(), http::Method::CONNECT);
    if let Some(protocol) = request.extensions().get::<Protocol>() {
        assert_eq!(
            (protocol.as_str(), &request.headers()["capsule-protocol"]),
            ("connect-udp", &"?1".parse().unwrap())
        );
        assert_eq!(request.uri().path(), "/.well-known/masque/udp/192.0.2.1/7/");
    }
    let mut head = http::Response::new(());
    *head.status_mut() = http::StatusCode::OK;
    let Ok(mut to) = respond.send_response(head, false) else { return };
    let mut body = request.into_body();
    while let Some(Ok(data)) = body.data().await {
        if name == "cut.test" {
            return to.send_reset(Reason::CONNECT_ERROR);
        }
        let _ = body.flow_control().release_capacity(data.len());
        if sidetrack::carry::h2::send(&mut to, data).await.is_err() {
            return;
        }
    }
    let _ = to.send_data(Bytes::new(), true);
}

/// A node with a listener for each name, which leads to it through the hop, and one for UDP.
fn near(hop: &str, names: &[&str]) -> Up {
    let mut tables = format!(
        "[[listen]]\nname = \"udp\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"192.0.2.1:7\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"{hop}\"\n"
    );
    for name in names {
        tables.push_str(&format!(
            "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{name}.test:7\"\n"
        ));
    }
    Up::start("default = \"deny\"\n", &tables)
}

/// A flow whose tunnel is open.
fn open(near: &Up, name: &str) -> TcpStream {
    let mut stream = TcpStream::connect(near.addresses(name)[0]).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    exchange(&mut stream, b"hello");
    stream
}

fn exchange(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut came = vec![0; bytes.len()];
    stream.read_exact(&mut came).unwrap();
    assert!(came == bytes);
}

/// Ends a flow in order, and checks its record.
fn end(near: &mut Up, stream: TcpStream) {
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!((&stream).read(&mut [0; 1]).unwrap(), 0);
    drop(stream);
    let record = near.record();
    assert_eq!(record.text("reason"), "ok", "{record:?}");
}

#[test]
fn flows_are_streams_of_one_connection_until_it_is_full() {
    let hop = Hop::start(Offers { streams: 20, ..ALL });
    let mut near = near(&hop.url(), &["echo"]);
    // All at once: those that come while the first opens the connection wait for it.
    let mut flows: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(near.addresses("echo")[0]).unwrap()).collect();
    let content: Vec<u8> = (0..60_000_u32).map(|at| (at % 251) as u8).collect();
    for flow in &mut flows {
        flow.set_read_timeout(Some(LIMIT)).unwrap();
        exchange(flow, &content);
    }
    assert_eq!(hop.connections(), 1);
    flows.push(open(&near, "echo"));
    assert_eq!(hop.connections(), 2, "the hop allows 20 streams");
    for flow in flows {
        end(&mut near, flow);
    }
    let big: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    let mut flow = open(&near, "echo");
    let (mut up, sent) = (flow.try_clone().unwrap(), big.clone());
    let sending = std::thread::spawn(move || up.write_all(&sent).unwrap());
    let mut came = vec![0; big.len()];
    flow.read_exact(&mut came).unwrap();
    sending.join().unwrap();
    assert!(came == big);
    end(&mut near, flow);
    assert_eq!(hop.connections(), 2, "places are free again");
    assert_eq!(datagram_through(&near, "udp", b"by Extended CONNECT"), b"by Extended CONNECT");
    assert_eq!(hop.connections(), 2);
}

#[test]
fn a_stream_that_is_refused_or_reset_is_alone() {
    let hop = Hop::start(ALL);
    let mut near = near(&hop.url(), &["echo", "forbidden", "reset", "cut"]);
    let mut other = open(&near, "echo");
    for (name, reason, detail) in
        [("forbidden", "hop_failed", "403"), ("reset", "hop_failed", "stream error")]
    {
        assert_eq!(through_port(&near, name, b"x"), b"", "{name}");
        let record = near.record();
        assert_eq!(record.text("reason"), reason, "{record:?}");
        assert!(record.text("detail").contains(detail), "{record:?}");
        assert!(record.text("detail").contains("hop 1 of 1 (https://localhost"), "{record:?}");
    }
    let mut flow = TcpStream::connect(near.addresses("cut")[0]).unwrap();
    flow.set_read_timeout(Some(LIMIT)).unwrap();
    flow.write_all(b"x").unwrap();
    let end_of_flow = flow.read(&mut [0; 1]);
    assert!(end_of_flow.is_err(), "a reset is no end in order: {end_of_flow:?}");
    assert_eq!(near.record().text("reason"), "server_reset");
    exchange(&mut other, b"still there");
    end(&mut near, other);
    assert_eq!(hop.connections(), 1);
}

#[test]
fn a_request_that_the_hop_has_not_processed_is_sent_again() {
    for name in ["busy", "lost"] {
        let hop = Hop::start(ALL);
        let mut near = near(&hop.url(), &[name]);
        let flow = open(&near, name);
        end(&mut near, flow);
        assert_eq!(hop.connections(), 2, "{name}");
    }
}

#[test]
fn a_hop_that_says_goodbye_keeps_its_flows_and_gets_no_more() {
    let hop = Hop::start(ALL);
    let mut near = near(&hop.url(), &["echo", "leaves"]);
    let mut before = open(&near, "echo");
    let mut last = open(&near, "leaves");
    eventually("GOAWAY has come", || {
        let flow = open(&near, "echo");
        end(&mut near, flow);
        hop.connections() == 2
    });
    exchange(&mut before, b"it goes on");
    exchange(&mut last, b"it goes on");
    end(&mut near, before);
    end(&mut near, last);
}

#[test]
fn a_hop_that_dies_cuts_all_its_flows_and_is_dialled_again() {
    let hop = Hop::start(ALL);
    let mut near = near(&hop.url(), &["echo"]);
    let flows: Vec<TcpStream> = (0..30).map(|_| open(&near, "echo")).collect();
    assert_eq!(hop.connections(), 1);
    hop.cut.send_replace(());
    for mut flow in flows {
        let end = flow.read(&mut [0; 1]);
        assert!(end.is_err(), "a cut is no end in order: {end:?}");
    }
    for _ in 0..30 {
        let record = near.record();
        assert_eq!(record.text("reason"), "server_reset", "{record:?}");
    }
    let flow = open(&near, "echo");
    end(&mut near, flow);
    assert_eq!(hop.connections(), 2);
}

#[test]
fn a_hop_without_extended_connect_carries_datagrams_by_http_1_or_refuses() {
    let server = Echo::start("127.0.0.1");
    let plain = Up::start(
        "default = \"direct\"\n",
        "[[listen]]\nname = \"http\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n",
    );
    let offers = Offers { extended: false, plain: Some(plain.addresses("http")[0]), ..ALL };
    let hop = Hop::start(offers);
    let to = format!(
        "[[listen]]\nname = \"udp\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"{}\"\n",
        server.address,
        hop.url()
    );
    let mut through = Up::start("default = \"deny\"\n", &to);
    assert_eq!(datagram_through(&through, "udp", b"by an upgrade"), b"by an upgrade");
    assert_eq!(hop.connections.each_ref().map(|count| count.load(SeqCst)), [1, 1]);
    through.signal(rustix::process::Signal::TERM);
    assert_eq!(through.record().text("protocol"), "udp");
    let hop = Hop::start(Offers { extended: false, ..ALL });
    let mut near = near(&hop.url(), &["echo"]);
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"x", near.addresses("udp")[0]).unwrap();
    let record = near.record();
    assert_eq!(record.text("protocol"), "udp", "{record:?}");
    assert!(record.text("detail").contains("no Extended CONNECT"), "{record:?}");
    let flow = open(&near, "echo");
    end(&mut near, flow);
}

/// Writes until nothing is taken for some time. Returns how much was taken.
fn fill(mut stream: &TcpStream) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let (chunk, mut count) = ([7; 65_536], 0);
    loop {
        match stream.write(&chunk) {
            Ok(written) => count += written,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return count;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A server that fills what it accepts and then says so. It reads nothing.
fn flood() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, full) = (listener.local_addr().unwrap(), Arc::<AtomicUsize>::default());
    let is_full = full.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let full = full.clone();
            std::thread::spawn(move || {
                fill(&stream);
                full.fetch_add(1, SeqCst);
                std::thread::sleep(LIMIT);
            });
        }
    });
    (address, is_full)
}

#[test]
fn unread_streams_do_not_stop_the_others() {
    for scheme in ["https", "h3"] {
        let ((full, filled), server) = (flood(), super::hops::echo());
        let site = Site::named("localhost", "");
        let carrier = hop(scheme, &site, &site.ca_file());
        let listener = |name: &str, to: SocketAddr| {
            format!(
                "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{to}\"\n"
            )
        };
        let rule = format!("[[rule]]\nname = \"all\"\ncarrier = \"{carrier}\"\n");
        let tables = [listener("flood", full), listener("echo", server), rule];
        let near = Up::start("default = \"deny\"\n", &tables.concat());
        let stalled: Vec<TcpStream> =
            (0..6).map(|_| TcpStream::connect(near.addresses("flood")[0]).unwrap()).collect();
        let filling = stalled.iter().map(|stream| stream.try_clone().unwrap());
        let filling: Vec<_> = filling.map(|stream| std::thread::spawn(move || fill(&stream))).collect();
        for each in filling {
            assert!(each.join().unwrap() > 0);
        }
        eventually("nothing more passes", || filled.load(SeqCst) == stalled.len());
        assert_eq!(node::admin::flows(&near).len(), stalled.len());
        let content: Vec<u8> = (0..500_000_u32).map(|at| (at % 251) as u8).collect();
        assert!(through_port(&near, "echo", &content) == content, "{scheme}");
        drop(stalled);
    }
}
