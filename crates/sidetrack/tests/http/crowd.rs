//! One client that keeps connections open does not keep another client from being served.

use crate::client::Client;
use crate::h2::{h2_client, h2_origin};
use crate::node::Node;
use crate::origin::{Origin, ok};
use crate::tap::{Authority, NAME, connect, node};
use crate::tls_origin::World;
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::{LIMIT, awaited};
use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;
use std::time::Duration;

/// As many connections as these nodes have room for.
const FLOWS: usize = 4;
const LIMITS: &str = "[limits]\nmax_flows = 4\n";

/// A connection from another address of this host; none if it was reset at once.
fn connect_from(source: &str, to: SocketAddr) -> Option<Client> {
    use socket2::{Domain, Socket, Type};
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(source.parse().unwrap(), 0).into()).unwrap();
    socket.connect_timeout(&to.into(), LIMIT).ok()?;
    Some(Client::over(socket.into()))
}

#[test]
fn an_idle_connection_leaves_for_another_client() {
    let origin = Origin::start(|request| ok("", request.path()));
    let node = Node::start(&format!(
        "workers = 1\ndefault = 'direct'\n{LIMITS}[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n"
    ));
    let mut idle: Vec<_> = (0..FLOWS)
        .map(|number| {
            let mut client = connect_from("127.0.0.2", node.entry()).unwrap();
            assert_eq!(client.fetch(&origin.url(&format!("/{number}"))).status, 200);
            client
        })
        .collect();
    // A connection counts as idle after a moment only.
    let answer = awaited("another client is served", || {
        connect_from("127.0.0.3", node.entry())?.try_ask(&origin.url("/other"))
    });
    assert_eq!((answer.status, answer.text().as_str()), (200, "/other"));
    assert_eq!(node.shared.closed_for_others(), (0, 1), "handshakes and idle connections");
    let again = origin.url("/again");
    let kept =
        idle.iter_mut().filter_map(|client| client.try_ask(&again)).filter(|answer| answer.status == 200);
    assert_eq!(kept.count(), FLOWS - 1, "one has left, the others are kept");
}

#[test]
fn an_idle_connection_of_http_2_leaves_for_another_client() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (server, _) = h2_origin(&world.identity(NAME, 30));
    let node = node(&authority, server, "", LIMITS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let get = async |requests: &mut h2::client::SendRequest<bytes::Bytes>| {
        let request = http::Request::get(format!("https://{NAME}/page")).body(()).unwrap();
        let (answer, _) = requests.send_request(request, true)?;
        let (parts, mut body) = answer.await?.into_parts();
        while let Some(data) = body.data().await {
            body.flow_control().release_capacity(data?.len())?;
        }
        Ok::<_, h2::Error>(parts.status.as_u16())
    };
    let mut idle = runtime.block_on(async {
        let mut idle = Vec::new();
        for _ in 0..FLOWS {
            let mut requests = h2_client(&node, &authority).await;
            assert_eq!(get(&mut requests).await.unwrap(), 200);
            idle.push(requests);
        }
        idle
    });
    let origin = Origin::start(|request| ok("", request.path()));
    let answer = awaited("another client is served", || {
        connect_from("127.0.0.3", node.entry())?.try_ask(&origin.url("/other"))
    });
    assert_eq!(answer.text(), "/other");
    assert_eq!(node.shared.closed_for_others(), (0, 1));
    runtime.block_on(async {
        let (which, error) = async {
            for _ in 0..LIMIT.as_millis() {
                for (which, requests) in idle.iter_mut().enumerate() {
                    if let Poll::Ready(Err(error)) = poll_fn(|cx| Poll::Ready(requests.poll_ready(cx))).await
                    {
                        return (which, error);
                    }
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            panic!("no connection was told to leave");
        }
        .await;
        // GOAWAY: the client knows that a request after it was not seen.
        assert!(error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR), "{error:?}");
        idle.remove(which);
        for requests in &mut idle {
            assert_eq!(get(requests).await.unwrap(), 200, "the others are kept");
        }
    });
}

#[test]
fn handshakes_of_intercepted_tls_leave_for_others() {
    let world = World::new();
    let authority = Authority::new(&world);
    let (server, _) = h2_origin(&world.identity(NAME, 30));
    let limits = "[limits]\nmax_handshakes = 2\nhandshake_timeout_ms = 3600000\n";
    let node = node(&authority, server, "", limits);
    // They get their tunnel and never begin TLS; the last one has begun.
    let mut silent: Vec<_> = (0..3).map(|_| connect(&node, &format!("{NAME}:443"))).collect();
    silent[2].send(b"\x16\x03\x01");
    assert!(silent[0].is_closed(), "the oldest has left");
    let ended = node.ended_when(1);
    assert_eq!(ended[0].reason, EndReason::Limit, "{ended:?}");
    assert!(ended[0].detail.as_deref().is_some_and(|detail| detail.contains("max_handshakes")), "{ended:?}");
    let mut other = crate::tap::opened(&node, &authority.root(), &["http/1.1"]);
    other.client.send(format!("GET /page HTTP/1.1\r\nHost: {NAME}\r\n\r\n"));
    assert_eq!(other.client.response(false).text(), "/page");
    assert!(node.shared.closed_for_others().0 >= 2, "the silent ones leave, the quick one is served");
}
