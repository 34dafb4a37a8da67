//! Forwarding: heads, bodies, connections, policy and records.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Act, Origin, ok};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::awaited;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

/// A node with one http listener `in`, and more of a configuration.
pub(crate) fn node(listener: &str, more: &str) -> Node {
    let head = if more.contains("[[rule]]") { "default = 'direct'\n" } else { "" };
    Node::start(&format!(
        "{head}[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n{listener}\n{more}"
    ))
}

#[test]
fn requests_of_one_connection_are_flows_of_their_own() {
    let origin = Origin::start(|request| ok("X-Origin: yes", request.path()));
    let node = node("", "");
    let mut client = Client::new(node.entry());
    for path in ["/a", "/b?c=d"] {
        let response = client.ask("GET", &origin.url(path), "Connection: X-Hop|X-Hop: 1|X-Stays: 2");
        assert_eq!((response.status, response.text().as_str()), (200, path));
        assert_eq!(response.field("x-origin"), Some("yes"));
        assert!(response.field("via").is_some_and(|via| via.starts_with("1.1 sidetrack-")));
        assert!(response.field("date").is_some());
    }
    let asked = origin.asked();
    assert_eq!(asked[0].line, "GET /a HTTP/1.1");
    assert_eq!(asked[0].field("host"), Some(origin.address.to_string().as_str()));
    assert_eq!((asked[0].field("x-hop"), asked[0].field("x-stays")), (None, Some("2")));
    assert!(asked[0].field("via").is_some());
    assert_eq!(origin.connections(), 1, "the server's connection is kept");
    let ended = node.ended(2);
    assert!(ended.iter().all(|ended| ended.reason == EndReason::Ok), "{ended:?}");
    assert!(
        ended[1].detail.as_deref().is_some_and(|text| text.ends_with("/b 200")),
        "no query in records: {ended:?}"
    );
    assert_eq!(ended[0].flow.decided().unwrap().flow.orig_dst.to_string(), origin.address.to_string());
    assert!(ended[0].flow.bytes().0 > 50 && ended[0].flow.bytes().1 > 50);
}

#[test]
fn bodies_pass_both_ways_in_every_framing() {
    let origin = Origin::start(|request| {
        let content = String::from_utf8_lossy(&request.content).into_owned();
        match request.path() {
            "/chunked" => {
                let mut text = String::from("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
                for piece in content.as_bytes().chunks(70_000) {
                    text.push_str(&format!(
                        "{:x};ext=1\r\n{}\r\n",
                        piece.len(),
                        String::from_utf8_lossy(piece)
                    ));
                }
                Act::Send(format!("{text}0\r\nX-Sum: 1\r\n\r\n").into_bytes())
            }
            "/close" => Act::SendAndClose(format!("HTTP/1.0 200 OK\r\n\r\n{content}").into_bytes()),
            _ => ok("", &content),
        }
    });
    let node = node("", "");
    let big: String = "0123456789abcdef".repeat(20_000);
    for content in ["", "small", big.as_str()] {
        let mut client = Client::new(node.entry());
        for path in ["/length", "/chunked", "/close"] {
            let url = origin.url(path);
            let host = origin.address;
            let length = content.len();
            client.send(format!(
                "POST {url} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n{content}"
            ));
            assert!(client.response(false).text() == content, "{path} with a length");
            client.send(format!("POST {url} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"));
            for piece in content.as_bytes().chunks(30_000) {
                client.send(format!("{:x}\r\n{}\r\n", piece.len(), String::from_utf8_lossy(piece)));
            }
            client.send("0\r\n\r\n");
            assert!(client.response(false).text() == content, "{path} in chunks");
        }
        let mut old = Client::new(node.entry());
        old.send(format!("GET {} HTTP/1.0\r\n\r\n", origin.url("/chunked")));
        let response = old.response(false);
        assert!(response.field("transfer-encoding").is_none() && old.is_closed(), "{response:?}");
    }
}

#[test]
fn interim_answers_and_a_body_that_waits_for_them_pass() {
    let origin = Origin::start(|request| match request.path() {
        "/hints" => Act::Send(
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                .to_vec(),
        ),
        _ => ok("", &String::from_utf8_lossy(&request.content)),
    });
    let node = node("", "");
    let mut client = Client::new(node.entry());
    client.send(format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/hints")));
    let hints = client.one(false).unwrap();
    assert_eq!((hints.status, hints.field("link")), (103, Some("</a>")));
    assert_eq!(client.response(false).text(), "ok");
    let url = origin.url("/body");
    client
        .send(format!("PUT {url} HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"));
    assert_eq!(client.one(false).unwrap().status, 100);
    client.send("body");
    assert_eq!(client.response(false).text(), "body");
    let refused = client.ask("PUT", &url, "Expect: magic|Content-Length: 0");
    assert_eq!(refused.status, 417);
}

#[test]
fn an_upgrade_becomes_a_tunnel_in_both_directions() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        stream
            .write_all(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nhello",
            )
            .unwrap();
        let mut word = [0; 4];
        stream.read_exact(&mut word).unwrap();
        stream.write_all(&word).unwrap();
        String::from_utf8(head).unwrap()
    });
    let node = node("", "");
    let mut client = Client::new(node.entry());
    client.send(format!(
        "GET http://{address}/ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    ));
    let response = client.response(false);
    assert_eq!((response.status, response.field("upgrade")), (101, Some("websocket")));
    assert_eq!(client.bytes(5), b"hello");
    client.send("ping");
    assert_eq!(client.bytes(4), b"ping");
    assert!(server.join().unwrap().contains("Upgrade: websocket"));
    drop(client);
    node.ends_with(EndReason::Ok);
}

#[test]
fn connect_opens_a_tunnel_or_says_why_not() {
    let origin = Origin::start(|request| ok("", request.path()));
    // Bound, and not listening: a listener that is dropped may live on for a moment in a child of another test.
    let bound = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    bound.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let closed = bound.local_addr().unwrap().as_socket().unwrap();
    let rule = "[[rule]]\nname = 'no-example'\nmatch = { host = '*.example' }\naction = 'deny'\n";
    let node = node("", rule);
    let mut client = Client::new(node.entry());
    let to = origin.address;
    // The tunnel's first bytes come with the request.
    client.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\nGET /in HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    assert_eq!(client.response(true).status, 200);
    assert_eq!(client.response(false).text(), "/in");
    drop(client);
    node.ends_with(EndReason::Ok);
    for (target, status, words, reason) in [
        (closed.to_string(), 502, "connection_refused", EndReason::Refused),
        ("www.blocked.example:443".to_owned(), 403, "no-example", EndReason::PolicyDenied),
        (node.entry().to_string(), 502, "proxy_loop_detected", EndReason::Loop),
    ] {
        let mut client = Client::new(node.entry());
        client.send(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"));
        let response = client.response(false);
        assert_eq!(response.status, status, "{response:?}");
        assert!(response.head.contains(words) || response.text().contains(words), "{response:?}");
        assert!(client.is_closed());
        node.ends_with(reason);
    }
}

#[test]
fn a_denied_request_gets_a_page_with_the_rule_and_others_go_on() {
    let origin = Origin::start(|_| ok("", "fine"));
    let node =
        node("", "[[rule]]\nname = 'no-tracking'\nmatch = { host = 'blocked.example' }\naction = 'deny'\n");
    let mut client = Client::new(node.entry());
    let denied = client.fetch("http://blocked.example/x");
    assert_eq!(denied.status, 403);
    assert!(
        denied.text().contains("blocked.example") && denied.text().contains("rule 'no-tracking'"),
        "{}",
        denied.text()
    );
    assert_eq!(denied.field("cache-control"), Some("no-store"));
    assert_eq!(client.fetch(&origin.url("/")).text(), "fine", "the same connection goes on");
    let ended = node.ended(2);
    assert_eq!(ended[0].reason, EndReason::PolicyDenied);
}

#[test]
fn a_password_is_asked_for_where_users_are_named() {
    let origin = Origin::start(|_| ok("", "in"));
    let node = node("users = [{ user = 'ann', password = 'x:y' }]", "");
    let mut client = Client::new(node.entry());
    let url = origin.url("/");
    let challenge = client.fetch(&url);
    assert_eq!(challenge.status, 407);
    assert!(challenge.field("proxy-authenticate").is_some_and(|text| text.starts_with("Basic ")));
    // ann:wrong, then ann:x:y
    assert_eq!(client.ask("GET", &url, "Proxy-Authorization: Basic YW5uOndyb25n").status, 407);
    assert_eq!(client.ask("GET", &url, "Proxy-Authorization: Basic YW5uOng6eQ==").text(), "in");
    assert_eq!(origin.asked()[0].field("proxy-authorization"), None);
    let mut client = Client::new(node.entry());
    client.send(format!("CONNECT {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.address));
    assert_eq!(client.response(false).status, 407);
    let pac = Client::new(node.entry()).fetch_own("/proxy.pac");
    assert!(pac.text().contains(&format!("PROXY {}", node.entry())), "{pac:?}");
}

impl Client {
    /// Asks the proxy itself.
    fn fetch_own(mut self, path: &str) -> crate::client::Response {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: proxy\r\n\r\n"));
        self.response(false)
    }
}

#[test]
fn an_answer_that_breaks_off_is_seen_as_one() {
    let origin = Origin::start(|request| match request.path() {
        "/length" => Act::SendAndClose(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_vec()),
        "/chunked" => {
            Act::SendAndClose(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n".to_vec())
        }
        "/none" => Act::SendAndClose(Vec::new()),
        "/both" => {
            Act::SendAndClose(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx".to_vec())
        }
        _ => Act::SendAndClose(b"SSH-2.0-x\r\n\r\n".to_vec()),
    });
    let node = node("", "");
    for path in ["/length", "/chunked"] {
        let mut client = Client::new(node.entry());
        client.send(format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url(path)));
        assert!(client.try_response(false).is_none(), "{path}");
        node.ends_with(EndReason::ServerReset);
    }
    for (path, reason) in
        [("/none", EndReason::ServerReset), ("/both", EndReason::HopFailed), ("/ssh", EndReason::HopFailed)]
    {
        let mut client = Client::new(node.entry());
        assert_eq!(client.fetch(&origin.url(path)).status, 502, "{path}");
        node.ends_with(reason);
    }
}

#[test]
fn a_kept_connection_that_its_server_closed_is_replaced_unseen() {
    let origin = Origin::start(|request| match request.path() {
        "/last" => Act::SendAndClose(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec()),
        _ => ok("", "ok"),
    });
    let node = Node::start("workers = 1\n[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n");
    let mut client = Client::new(node.entry());
    for _ in 0..20 {
        assert_eq!(client.fetch(&origin.url("/last")).status, 200);
        assert_eq!(client.fetch(&origin.url("/next")).status, 200);
    }
    assert!(node.ended(40).iter().all(|ended| ended.reason == EndReason::Ok));
}

#[test]
fn what_smuggles_is_refused_before_anything_reaches_a_server() {
    let origin = Origin::start(|_| ok("", "reached"));
    let node = node("", "");
    let (url, host) = (origin.url("/"), origin.address);
    let smuggled = format!("GET {url}smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n");
    for lines in [
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: chunked, identity",
        "Content-Length: 1\r\nContent-Length: 2",
        "A: b\nTransfer-Encoding: chunked",
        "A: b\r\n folded",
        "Host: other",
    ] {
        let mut client = Client::new(node.entry());
        client.send(format!("POST {url} HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n\r\n0\r\n\r\n{smuggled}"));
        let response = client.response(false);
        assert!(response.status >= 400 && response.text().contains("Bad Request!"), "{lines:?} {response:?}");
        assert!(client.is_closed(), "{lines:?}");
        node.ends_with(EndReason::BadRequest);
    }
    assert!(origin.asked().is_empty(), "{:?}", origin.asked());
}

#[test]
fn a_loop_of_two_listeners_is_seen() {
    let node =
        Node::start("default = 'direct'\n[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n");
    let mut client = Client::new(node.entry());
    let response = client.fetch(&format!("http://{}/", node.entry()));
    assert_eq!(response.status, 502);
    assert!(
        response.field("proxy-status").is_some_and(|text| text.contains("proxy_loop_detected")),
        "{response:?}"
    );
}

#[test]
fn a_listener_can_stand_for_a_server() {
    let origin = Origin::start(|request| ok("", request.field("host").unwrap_or_default()));
    let node = node(&format!("to = '{}'", origin.address), "");
    let mut client = Client::new(node.entry());
    client.send("GET /x HTTP/1.1\r\nHost: www.example\r\n\r\n");
    assert_eq!(client.response(false).text(), "www.example");
    assert_eq!(origin.asked()[0].line, "GET /x HTTP/1.1");
}

#[test]
fn half_a_request_and_a_fin_is_a_bad_request() {
    let origin = Origin::start(|request| ok("", &request.content.len().to_string()));
    let node = node("", "");
    let url = origin.url("/");
    let whole = format!("POST {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody");
    let chunked =
        format!("POST {url} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n");
    let mut halves: Vec<String> = (1..whole.len()).map(|end| whole[..end].to_owned()).collect();
    halves.extend([5, 4, 2, 0].map(|less| chunked[..chunked.len() - less].to_owned()));
    let count = halves.len();
    for half in halves {
        let mut stream = std::net::TcpStream::connect(node.entry()).unwrap();
        stream.write_all(half.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 400 "), "{half:?}: {answer:?}");
    }
    assert!(node.ended(count).iter().all(|ended| ended.reason == EndReason::ClientGone));
    assert_eq!(Client::new(node.entry()).fetch(&url).text(), "0", "it goes on");
}

#[test]
fn a_first_chunk_that_is_none_is_a_bad_gateway() {
    let origin = Origin::start(|request| {
        let chunk = request.path().trim_start_matches('/').replace("%0d%0a", "\r\n");
        let fields = "Transfer-Encoding: chunked\r\nCache-Control: max-age=60";
        Act::SendAndClose(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n{chunk}").into_bytes())
    });
    for more in ["", "cache = {}"] {
        let node = node(more, "");
        for chunk in
            ["xyz%0d%0aabc", "-1%0d%0aa", "3%0d%0aabcdef", "0x3%0d%0aabc", "ffffffffffffffffff%0d%0aa"]
        {
            for method in ["GET", "POST"] {
                let mut client = Client::new(node.entry());
                let fields = if method == "POST" { "Content-Length: 0" } else { "" };
                let answered = client.ask(method, &origin.url(&format!("/{chunk}")), fields);
                assert_eq!(answered.status, 502, "{method} {chunk} {more}: {answered:?}");
                let body = client.ask("PUT", &origin.url("/0%0d%0a%0d%0a"), "Content-Length: 0");
                assert_eq!(body.status, 200, "the client's connection goes on");
            }
        }
        let ended = node.all_ended(20);
        // The origin closes at once: its reset may overtake the answer.
        let is_failure = |reason| matches!(reason, EndReason::HopFailed | EndReason::ServerReset);
        let failed = ended.iter().filter(|ended| is_failure(ended.reason)).count();
        assert_eq!(failed, 10, "{ended:?}");
    }
}

#[test]
fn bytes_of_a_request_in_flight_are_counted_and_those_of_a_killed_one_recorded() {
    const PART: usize = 300_000;
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = vec![0; 200 + PART];
        let mut read = 0;
        while read < PART {
            read += stream.read(&mut request[read..]).unwrap();
        }
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 2 * PART);
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b'x'; PART])).unwrap();
        // The rest never comes.
        let _ = gate.recv();
    });
    let node = node("", "");
    let mut client = Client::new(node.entry());
    client
        .send(format!("POST http://{address}/ HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", 2 * PART));
    client.send(vec![b'y'; PART]);
    let live = node.await_live("both ways are counted while they move", |live| {
        let (up, down) = live.bytes();
        up >= PART as u64 && down >= PART as u64
    });
    assert!(live.end(EndReason::Killed));
    let ended = node.only_end();
    let (up, down) = ended.flow.bytes();
    assert_eq!(ended.reason, EndReason::Killed);
    assert!(up >= PART as u64 && up < 2 * PART as u64 && down >= PART as u64, "{up} {down}");
    drop(go);
}

#[test]
fn a_client_that_leaves_ends_its_own_request_only() {
    let origin = Origin::start(|_| ok("", &"x".repeat(4 << 20)));
    let node = node("", "");
    let mut leaver = Client::new(node.entry());
    leaver.send(format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/")));
    leaver.bytes(10);
    let mut other = Client::new(node.entry());
    drop(leaver);
    assert_eq!(other.fetch(&origin.url("/")).content.len(), 4 << 20);
    let ended = node.ended(2);
    let reasons: Vec<_> = ended.iter().map(|ended| ended.reason).collect();
    assert!(reasons.contains(&EndReason::Ok) && reasons.contains(&EndReason::ClientGone), "{ended:?}");
    let mut half = Client::new(node.entry());
    half.send("GET http://h/ HT");
    drop(half);
    node.ends_with(EndReason::ClientGone);
    awaited("an idle connection is no flow", || node.live().is_empty().then_some(()));
}

#[test]
fn a_chain_of_functions_is_never_passed_by() {
    let origin = Origin::start(|_| ok("", "a secret"));
    let node = node(
        "",
        "[function.scrub]\nkind = 'replace'\nreplace = [{ find = 'secret', with = 'xxxxxx' }]\n\
         [[rule]]\nname = 'scrubbed'\ncarrier = 'direct'\nchain = 'scrub'\n",
    );
    let mut client = Client::new(node.entry());
    let refused = client.fetch(&origin.url("/"));
    assert_eq!(refused.status, 501);
    assert!(refused.text().contains("functions"), "{}", refused.text());
    assert!(origin.asked().is_empty(), "nothing reached the server");
    node.ends_with(EndReason::FunctionFailed);
    let mut client = Client::new(node.entry());
    let to = origin.address;
    client.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    assert_eq!(client.response(true).status, 200);
    client.send(format!("GET / HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    assert_eq!(client.response(false).text(), "a xxxxxx");
}
