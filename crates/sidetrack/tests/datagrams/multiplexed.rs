//! CONNECT-UDP over HTTP/2 without TLS (RFC 9298 Sec. 3.4, RFC 8441), by a client of the library `h2`. The capsules are those of
//! this test.

use super::Echo;
use super::masque::datagram;
use super::node::admin;
use super::tunnelled::{RULES, path, up};
use bytes::Bytes;
use h2::client::SendRequest;
use h2::ext::Protocol;
use sidetrack_testkit::{LIMIT, eventually};
use std::future::Future;
use std::net::SocketAddr;

/// Makes the runtime of a client.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a part of a client's work to its end, in bounded time.
fn within<T>(runtime: &tokio::runtime::Runtime, work: impl Future<Output = T>) -> T {
    runtime.block_on(async { tokio::time::timeout(LIMIT, work).await.expect("in time") })
}

/// Connects, and waits until the proxy has said that it knows extended CONNECT.
async fn connected(proxy: SocketAddr) -> SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(proxy).await.unwrap();
    let (client, connection) = h2::client::Builder::new().handshake::<_, Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    let client = client.ready().await.unwrap();
    while !client.is_extended_connect_protocol_enabled() {
        tokio::task::yield_now().await;
    }
    client
}

fn request(scheme: &str, path: &str, protocol: &'static str) -> http::Request<()> {
    let mut request = http::Request::builder()
        .method("CONNECT")
        .uri(format!("{scheme}://proxy.example{path}"))
        .header("capsule-protocol", "?1")
        .header("proxy-authorization", "Basic YW5uOnNlY3JldA==")
        .body(())
        .unwrap();
    request.extensions_mut().insert(Protocol::from_static(protocol));
    request
}

/// The status of the answer to a request.
async fn status(client: SendRequest<Bytes>, request: http::Request<()>) -> u16 {
    let (answer, _to) = client.ready().await.unwrap().send_request(request, false).unwrap();
    answer.await.unwrap().status().as_u16()
}

const USERS: &str = "users = [{ user = \"ann\", password = \"secret\" }]";

#[test]
fn streams_carry_datagrams_and_each_is_a_flow() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(USERS, RULES);
    let proxy = up.addresses("web")[0];
    let runtime = runtime();
    let (_client, mut streams) = within(&runtime, async {
        let client = connected(proxy).await;
        let mut streams = Vec::new();
        for scheme in ["https", "http"] {
            let asked = request(scheme, &path("127.0.0.1", server.address.port()), "connect-udp");
            let (answer, to) = client.clone().ready().await.unwrap().send_request(asked, false).unwrap();
            let answer = answer.await.unwrap();
            assert_eq!(answer.status(), 200, "{answer:?}");
            assert_eq!(answer.headers()["capsule-protocol"], "?1");
            assert!(!answer.headers().contains_key("upgrade"));
            streams.push((to, answer.into_body()));
        }
        for (number, (to, body)) in streams.iter_mut().enumerate() {
            let payload = vec![u8::try_from(number).unwrap(); 1200];
            to.send_data(datagram(&payload).into(), false).unwrap();
            let mut came = Vec::new();
            // As we write it: a length in two bytes and a context in one.
            while came.len() < 4 + payload.len() {
                let data = body.data().await.unwrap().unwrap();
                body.flow_control().release_capacity(data.len()).unwrap();
                came.extend_from_slice(&data);
            }
            assert_eq!(came, [&[0, 0x44, 0xb1, 0][..], &payload].concat());
        }
        (client, streams)
    });
    eventually("both are flows", || admin::flows(&up).len() == 2);
    let (mut to, mut body) = streams.remove(0);
    within(&runtime, async {
        to.send_data(Bytes::new(), true).unwrap();
        // The end comes back, in a frame without content.
        while let Some(data) = body.data().await {
            assert!(data.unwrap().is_empty());
        }
    });
    eventually("one has ended", || admin::flows(&up).len() == 1);
    drop((runtime, streams));
    for _ in 0..2 {
        let record = up.record();
        assert_eq!((record.text("protocol"), record.text("user")), ("udp", "ann"), "{record:?}");
        assert_eq!((record.number("packets_up"), record.number("packets_down")), (1, 1));
    }
}

#[test]
fn a_refusal_has_its_status_and_nothing_else_is_served() {
    let up = up(USERS, RULES);
    let proxy = up.addresses("web")[0];
    within(&runtime(), async {
        let client = connected(proxy).await;
        let to_dns = request("https", &path("192.0.2.1", 53), "connect-udp");
        assert_eq!(status(client.clone(), to_dns).await, 403);
        let no_port = request("https", &path("192.0.2.1", 0), "connect-udp");
        assert_eq!(status(client.clone(), no_port).await, 400);
        let mut no_user = request("https", &path("192.0.2.1", 7), "connect-udp");
        no_user.headers_mut().remove("proxy-authorization");
        assert_eq!(status(client.clone(), no_user).await, 407);
        assert_eq!(status(client.clone(), request("https", "/", "websocket")).await, 501);
        let page = http::Request::builder().uri("http://web.example/").body(()).unwrap();
        // A scheme without TLS is malformed for anything but a tunnel.
        let (answer, _to) = client.clone().ready().await.unwrap().send_request(page, true).unwrap();
        assert!(answer.await.is_err());
        let page = http::Request::builder().uri("https://web.example/").body(()).unwrap();
        assert_eq!(status(client, page).await, 501);
    });
}
