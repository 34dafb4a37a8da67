//! HTTP/2 at both ends of opened connections: curl as the client, nginx as the server, and a server of the test's own.

use crate::origin::ok;
use crate::tap::{Authority, NAME, node};
use crate::tls_origin::{Asks, TlsOrigin, World};
use bytes::Bytes;
use sidetrack::tls::{Made, provider};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Runs curl through the proxy, trusting the authority.
fn curl(node: &crate::node::Node, authority: &Authority, arguments: &[&str]) -> String {
    let proxy = format!("http://{}", node.entry());
    let root = authority.path("ca/root.pem");
    let output = Command::new("curl")
        .args(["-sS", "--max-time", "60", "-x", &proxy, "--noproxy", "", "--cacert", root.to_str().unwrap()])
        .args(arguments)
        .output()
        .expect("curl: apt-get install curl");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    out.into_owned()
}

/// A server that speaks HTTP/2 alone and answers with what it was sent, or with its path; and how many connections it had.
pub(crate) fn h2_origin(identity: &Made) -> (SocketAddr, Arc<AtomicUsize>) {
    let (certificates, key) = crate::tls_origin::chain(identity);
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let Ok(stream) = acceptor.accept(socket).await else { continue };
                count.fetch_add(1, SeqCst);
                tokio::spawn(async move {
                    let mut builder = h2::server::Builder::new();
                    let builder = builder.enable_connect_protocol();
                    let Ok(mut connection) = builder.handshake(stream).await else { return };
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        tokio::spawn(echo(request, respond));
                    }
                });
            }
        });
    });
    (address, connections)
}

async fn echo(request: http::Request<h2::RecvStream>, mut respond: h2::server::SendResponse<Bytes>) {
    if let Some(protocol) = request.extensions().get::<h2::ext::Protocol>() {
        assert_eq!(protocol.as_str(), "websocket");
        return echo_websocket(request, respond).await;
    }
    let path = request.uri().path().to_owned();
    let authorization = request.headers().get("authorization").map_or(&b""[..], |value| value.as_bytes());
    let authorization = data_encoding::HEXLOWER.encode(authorization);
    let mut body = request.into_body();
    let mut content = Vec::new();
    while let Some(Ok(data)) = body.data().await {
        content.extend_from_slice(&data);
        let _ = body.flow_control().release_capacity(data.len());
    }
    if path == "/reset" {
        return respond.send_reset(h2::Reason::INTERNAL_ERROR);
    }
    if content.is_empty() {
        content = path.into_bytes();
    }
    let response = http::Response::builder()
        .header("cache-control", "max-age=60")
        .header("x-got", authorization)
        .body(())
        .unwrap();
    let Ok(mut stream) = respond.send_response(response, false) else { return };
    let mut rest = Bytes::from(content);
    while !rest.is_empty() {
        stream.reserve_capacity(rest.len());
        let Some(Ok(room)) = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await else { return };
        if stream.send_data(rest.split_to(room.min(rest.len())), false).is_err() {
            return;
        }
    }
    let _ = stream.send_data(Bytes::new(), true);
}

/// A WebSocket of HTTP/2: says hello, then sends back what it gets. At `/no` it refuses.
async fn echo_websocket(
    request: http::Request<h2::RecvStream>,
    mut respond: h2::server::SendResponse<Bytes>,
) {
    let has_key = request.headers().contains_key("sec-websocket-key");
    assert!(!has_key && request.headers()["sec-websocket-version"] == "13", "{request:?}");
    let mut response = http::Response::new(());
    if request.uri().path() == "/no" {
        *response.status_mut() = http::StatusCode::FORBIDDEN;
        let _ = respond.send_response(response, true);
        return;
    }
    let Ok(mut stream) = respond.send_response(response, false) else { return };
    let _ = stream.send_data(Bytes::from_static(b"hello"), false);
    let mut body = request.into_body();
    while let Some(Ok(data)) = body.data().await {
        let _ = body.flow_control().release_capacity(data.len());
        if stream.send_data(data, false).is_err() {
            return;
        }
    }
    let _ = stream.send_data(Bytes::new(), true);
}

#[test]
fn each_side_speaks_the_version_it_can() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (modern, connections) = h2_origin(&world.identity(NAME, 30));
    let old = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        let content = String::from_utf8_lossy(&request.content).into_owned();
        ok("", if content.is_empty() { request.path() } else { &content })
    });
    let big = "0123456789abcdef".repeat(20_000);
    let file = authority.path("big");
    std::fs::write(&file, &big).unwrap();
    let upload = format!("@{}", file.display());
    for server in [modern, old.address] {
        let node = node(&authority, server, "", "");
        for (version, shown) in [("--http2", "2"), ("--http1.1", "1.1")] {
            let url = format!("https://{NAME}/page");
            let got = curl(&node, &authority, &[version, "-w", " %{http_version}", &url]);
            assert_eq!(got, format!("/page {shown}"));
            let got = curl(&node, &authority, &[version, "--data-binary", &upload, &url]);
            assert!(got == big, "{version} {server}: {} bytes", got.len());
            let head = curl(&node, &authority, &[version, "-I", &url]);
            assert!(head.contains("200"), "{head}");
        }
    }
    assert_eq!(connections.load(SeqCst), 1, "requests to a server share its connection");
}

#[test]
fn via_and_the_archive_name_the_version_that_was_received() {
    let world = World::new();
    let authority = Authority::new(&world);
    let old = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        ok("", request.field("via").unwrap_or("none"))
    });
    let (modern, _) = h2_origin(&world.identity(NAME, 30));
    let har = authority.path("requests.har");
    for (server, answered) in [(old.address, "1.1"), (modern, "2.0")] {
        let node = node(&authority, server, "", &format!("har = '{}'", har.display()));
        for (version, asked) in [("--http2", "2.0"), ("--http1.1", "1.1")] {
            let got = curl(&node, &authority, &[version, "-i", &format!("https://{NAME}/page")]);
            let via = got.lines().find(|line| line.to_ascii_lowercase().starts_with("via:")).unwrap();
            assert!(via[4..].trim().starts_with(&format!("{answered} sidetrack-")), "{got}");
            if answered == "1.1" {
                assert!(got.contains(&format!("\n{asked} sidetrack-")), "what the server was told: {got}");
            }
        }
        node.stop();
        let text = std::fs::read_to_string(&har).unwrap();
        let archive: serde_json::Value = serde_json::from_str(&text).unwrap();
        let said = |at: &str| -> Vec<String> {
            let entries = archive["log"]["entries"].as_array().unwrap().iter();
            entries.map(|entry| entry[at]["httpVersion"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(said("request"), ["HTTP/2.0", "HTTP/1.1"]);
        assert_eq!(said("response"), [format!("HTTP/{answered}"), format!("HTTP/{answered}")]);
    }
}

#[test]
fn a_scheme_other_than_that_of_the_connection_is_malformed() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (server, _) = h2_origin(&world.identity(NAME, 30));
    let node = node(&authority, server, "", "");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let requests = h2_client(&node, &authority).await;
        for (scheme, is_good) in [("http", false), ("ftp", false), ("https", true)] {
            let request = http::Request::get(format!("{scheme}://{NAME}/page")).body(()).unwrap();
            let mut requests = requests.clone().ready().await.unwrap();
            let (answer, _) = requests.send_request(request, true).unwrap();
            match answer.await {
                Ok(answer) => assert!(is_good && answer.status() == 200, "{scheme}"),
                Err(error) => {
                    assert!(!is_good && error.reason() == Some(h2::Reason::PROTOCOL_ERROR), "{error}")
                }
            }
        }
    });
}

#[test]
fn a_scheme_that_authenticates_connections_is_asked_for_by_http_1() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        ok("", request.field("authorization").unwrap_or("none"))
    });
    let node = node(&authority, origin.address, "", "");
    let url = format!("https://{NAME}/");
    for (scheme, version) in [("NTLM", "1.1"), ("Negotiate", "1.1"), ("Basic", "2"), ("X-Own", "2")] {
        let field = format!("Authorization: {scheme} x");
        let got = curl(&node, &authority, &["--http2", "-H", &field, "-w", " %{http_version}", &url]);
        assert_eq!(got, format!("{scheme} x {version}"));
    }
}

#[test]
fn many_streams_share_a_connection_and_the_cache() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (server, _) = h2_origin(&world.identity(NAME, 30));
    let node = node(&authority, server, "cache = {}", "");
    let url = format!("https://{NAME}/[1-40]");
    let write = ["-o", "/dev/null", "-w", "%{http_version} %{http_code} %{num_connects}\n"];
    let out =
        curl(&node, &authority, &[&["--http2", "-Z", "--parallel-max", "20"], &write[..], &[&url]].concat());
    assert_eq!(out.lines().filter(|line| line.starts_with("2 200 ")).count(), 40, "{out}");
    let again = format!("https://{NAME}/7");
    let out = curl(&node, &authority, &["--http2", "-D", "-", &again]);
    assert!(out.contains("; hit") && out.ends_with("/7"), "{out}");
}

#[test]
fn a_stream_that_is_reset_ends_its_own_request_only() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (server, _) = h2_origin(&world.identity(NAME, 30));
    let node = node(&authority, server, "", "");
    let (bad, good) = (format!("https://{NAME}/reset"), format!("https://{NAME}/good"));
    let write = ["-o", "/dev/null", "-w", "%{http_code}\n"];
    let out =
        curl(&node, &authority, &[&["--http2"], &write[..], &[&bad, "-o", "/dev/null", &good]].concat());
    assert_eq!(out, "502\n200\n");
}

/// A server of WebSockets over TLS and HTTP/1.1 that greets, then sends back what it gets. At `/no` it refuses.
fn websocket_origin(identity: &Made) -> SocketAddr {
    let (certificates, key) = crate::tls_origin::chain(identity);
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .unwrap();
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            std::thread::spawn(move || serve_websocket(rustls::StreamOwned::new(connection, socket)));
        }
    });
    address
}

fn serve_websocket(mut stream: rustls::StreamOwned<rustls::ServerConnection, std::net::TcpStream>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read_exact(&mut byte).is_err() {
            return;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    if head.starts_with("GET /no ") {
        let _ = stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
        return;
    }
    assert!(
        head.starts_with("GET /chat?room=1 HTTP/1.1\r\n") && head.contains("\r\nUpgrade: websocket\r\n"),
        "{head}"
    );
    let key = head.lines().find_map(|line| line.strip_prefix("Sec-WebSocket-Key: ")).unwrap();
    let hashed = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let hash = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, hashed.as_bytes());
    let accept = data_encoding::BASE64.encode(hash.as_ref());
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: {accept}\r\n\r\nhello"
    );
    stream.write_all(answer.as_bytes()).unwrap();
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        stream.write_all(&buffer[..n]).unwrap();
    }
}

/// HTTP/2 as a client that has come through CONNECT and trusts the authority.
pub(crate) async fn h2_client(
    node: &crate::node::Node,
    authority: &Authority,
) -> h2::client::SendRequest<Bytes> {
    let mut socket = tokio::net::TcpStream::connect(node.entry()).await.unwrap();
    let connect = format!("CONNECT {NAME}:443 HTTP/1.1\r\nHost: {NAME}:443\r\n\r\n");
    socket.write_all(connect.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.unwrap());
    }
    let mut config = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(crate::tls_origin::roots(&authority.root()))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = connector.connect(NAME.try_into().unwrap(), socket).await.unwrap();
    let (requests, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    // The server's settings come behind its handshake.
    for _ in 0..60_000 {
        if requests.is_extended_connect_protocol_enabled() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    requests.ready().await.unwrap()
}

fn extended(path: &str, protocol: &'static str) -> http::Request<()> {
    let mut request = http::Request::new(());
    *request.method_mut() = http::Method::CONNECT;
    *request.uri_mut() = format!("https://{NAME}{path}").parse().unwrap();
    *request.version_mut() = http::Version::HTTP_2;
    request.headers_mut().insert("sec-websocket-version", "13".parse().unwrap());
    request.extensions_mut().insert(h2::ext::Protocol::from_static(protocol));
    request
}

#[test]
fn a_websocket_over_http_2_reaches_a_server_that_knows_http_1_only() {
    let world = World::new();
    let authority = Authority::new(&world);
    let server = websocket_origin(&world.identity(NAME, 30));
    let node = node(&authority, server, "cache = {}", "");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut requests = h2_client(&node, &authority).await;
        let big = "0123456789abcdef".repeat(2_000);
        let got = over_websocket(&mut requests, "/chat?room=1", &big).await;
        assert!(got == format!("hello{big}").into_bytes(), "{} bytes", got.len());
        // Refused by the server, and an unknown kind.
        let (refused, _up) = requests.send_request(extended("/no", "websocket"), false).unwrap();
        assert_eq!(refused.await.unwrap().status(), 403);
        let (unknown, _up) = requests.send_request(extended("/", "connect-ip"), false).unwrap();
        assert_eq!(unknown.await.unwrap().status(), 501);
    });
}

/// Sends over a WebSocket of HTTP/2 and gives what comes back.
async fn over_websocket(requests: &mut h2::client::SendRequest<Bytes>, path: &str, sent: &str) -> Vec<u8> {
    let (answer, mut up) = requests.send_request(extended(path, "websocket"), false).unwrap();
    let answer = answer.await.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(!answer.headers().contains_key("sec-websocket-accept"), "{answer:?}");
    let mut down = answer.into_body();
    up.send_data(Bytes::from(sent.to_owned()), true).unwrap();
    let mut got = Vec::new();
    while let Some(data) = down.data().await {
        let data = data.unwrap();
        let _ = down.flow_control().release_capacity(data.len());
        got.extend_from_slice(&data);
    }
    got
}

#[test]
fn a_websocket_is_a_stream_of_a_connection_whose_server_takes_it_so() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (server, connections) = h2_origin(&world.identity(NAME, 30));
    let node = node(&authority, server, "", "");
    // What a page asks before it opens one; the server's settings have come with the answer.
    let page = curl(&node, &authority, &["--http2", &format!("https://{NAME}/page")]);
    assert_eq!(page, "/page");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut requests = h2_client(&node, &authority).await;
        let big = "0123456789abcdef".repeat(2_000);
        for path in ["/chat", "/chat?again"] {
            let got = over_websocket(&mut requests, path, &big).await;
            assert!(got == format!("hello{big}").into_bytes(), "{} bytes", got.len());
        }
        let (refused, _up) = requests.send_request(extended("/no", "websocket"), false).unwrap();
        assert_eq!(refused.await.unwrap().status(), 403);
    });
    assert_eq!(connections.load(SeqCst), 1, "all of it is streams of one connection");
}
