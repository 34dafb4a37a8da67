//! Cooperative caching: two nodes that ask each other, and siblings that do not answer as they should.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Act, Origin, ok, status};
use crate::proxy::node;
use sidetrack_testkit::awaited;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

fn asking(siblings: &[SocketAddr]) -> Node {
    let list: Vec<String> = siblings.iter().map(|sibling| format!("'[{sibling}]'")).collect();
    node(&format!("cache = {{ siblings = [{}] }}", list.join(", ")), "")
}

fn origin() -> Origin {
    Origin::start(|request| ok("Cache-Control: max-age=60", request.path()))
}

/// Lets `other` store a resource and asks `near` for it, with a new one each time, until the sibling has answered in its
/// 20 ms, which a busy machine may not let it; the URL.
fn shared(origin: &Origin, other: &Node, near: &Node) -> String {
    let mut number = 0;
    awaited("the sibling answers in time", || {
        number += 1;
        let (path, url) = (format!("/shared/{number}"), origin.url(&format!("/shared/{number}")));
        assert_eq!(Client::new(other.entry()).fetch(&url).text(), path);
        let response = Client::new(near.entry()).fetch(&url);
        assert_eq!((response.status, response.text()), (200, path));
        // The sibling has said its part before ours.
        response.head.contains("detail=sibling").then_some(url)
    })
}

#[test]
fn what_a_sibling_has_is_not_asked_of_the_server() {
    let origin = origin();
    let other = node("cache = {}", "");
    let near = asking(&[other.entry()]);
    let url = shared(&origin, &other, &near);
    let mut client = Client::new(near.entry());
    assert!(!client.fetch(&url).head.contains("fwd="), "stored here, too");
    let asked = origin.asked().iter().filter(|request| url.ends_with(request.path())).count();
    assert_eq!(asked, 1, "by the sibling alone");
    // A miss of the sibling leaves its connection in step.
    for path in ["/b", "/c", "/d"] {
        assert_eq!(client.fetch(&origin.url(path)).text(), path);
    }
    shared(&origin, &other, &near);
}

#[test]
fn the_message_of_the_seed_is_answered_in_every_spelling_and_never_asked_on() {
    let origin = origin();
    let node = node("cache = {}", "");
    let mut client = Client::new(node.entry());
    let (url, host) = (origin.url("/x"), origin.address);
    let spellings = [
        format!("CACHEREQ {url}\r\nHost: {host}\r\n\r\n"),
        format!("CACHEREQ [{url}]\r\nHost: [{host}]\r\n\r\n"),
        format!("CACHEREQ[{url}]\r\nHost : [{host}]\r\n\r\n"),
    ];
    for text in &spellings {
        client.send(text);
        assert_eq!(client.response(false).status, 504, "a miss: {text}");
    }
    assert!(origin.asked().is_empty(), "who is asked never asks on");
    client.fetch(&url);
    for text in &spellings {
        client.send(text);
        let response = client.response(false);
        assert_eq!((response.status, response.text().as_str()), (200, "/x"), "{text}");
        assert!(response.field("age").is_some() && response.field("content-length").is_some());
    }
    client.send("CACHEREQ https://www.google.com/\r\nHost: www.google.com:80\r\n\r\n");
    assert_eq!(client.response(false).status, 504, "what came over TLS is not sent in clear");
    client.send("CACHEREQ nonsense\r\nHost: h\r\n\r\n");
    let broken = client.response(false);
    assert!(broken.status == 400 && broken.text().contains("Bad Request!"));
}

#[test]
fn a_sibling_that_is_dead_silent_or_broken_costs_its_part_of_a_wait_and_no_answer() {
    let origin = origin();
    let dead = {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket
    };
    let dead_address = dead.local_addr().unwrap().as_socket().unwrap();
    // Accepts by its queue and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let broken = Origin::start(|_| Act::SendAndClose(b"what?\r\n\r\n".to_vec()));
    let failing = Origin::start(|_| status("500 No", "Cache-Control: max-age=60", "wrong"));
    let siblings = [dead_address, silent.local_addr().unwrap(), broken.address, failing.address];
    let near = asking(&siblings);
    let mut client = Client::new(near.entry());
    let began = Instant::now();
    for number in 0..10 {
        let path = format!("/{number}");
        assert_eq!(client.fetch(&origin.url(&path)).text(), path);
    }
    // What ten waits of a minute each would take without a limit.
    assert!(began.elapsed() < Duration::from_secs(60));
    assert_eq!(origin.asked().len(), 10);
}

#[test]
fn siblings_are_read_from_the_file_of_the_seed() {
    let origin = origin();
    let other = node("cache = {}", "");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cache_server.txt");
    std::fs::write(&file, format!("[{}]\n", other.entry())).unwrap();
    let near = node(&format!("cache = {{ siblings_file = '{}' }}", file.display()), "");
    shared(&origin, &other, &near);
    std::fs::write(&file, "[localhost:0909]\nnonsense\n").unwrap();
    let text = format!(
        "version = 1\n[[listen]]\nkind = 'http'\naddress = '127.0.0.1:0'\ncache = {{ siblings_file = '{}' }}\n",
        file.display()
    );
    let error = sidetrack::config::Config::from_text("t.toml", &text).unwrap_err().render(false);
    assert!(error.contains("line 2") && error.contains("nonsense"), "{error}");
}

#[test]
fn what_was_selected_by_what_a_sibling_was_not_told_is_not_taken() {
    let origin = Origin::start(|request| {
        let language = request.field("accept-language").unwrap_or("none");
        ok("Cache-Control: max-age=60|Vary: Accept-Language", language)
    });
    let other = node("cache = {}", "");
    let near = asking(&[other.entry()]);
    let mut client = Client::new(near.entry());
    for number in 0..5 {
        let url = origin.url(&format!("/{number}"));
        assert_eq!(Client::new(other.entry()).fetch(&url).text(), "none");
        assert_eq!(client.ask("GET", &url, "Accept-Language: nl").text(), "nl");
    }
}
