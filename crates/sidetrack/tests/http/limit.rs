//! Bandwidth of requests: from servers, out of the cache, and of bodies on their way up.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Origin, ok};
use std::time::{Duration, Instant};

/// What the limits here let through in a second.
const RATE: usize = 400_000;
/// Content that takes more than half a second at that rate.
const SIZE: usize = 260_000;

fn limited(share: &str, direction: &str) -> Node {
    Node::start(&format!(
        "default = 'direct'\n[function.slow]\nkind = 'limit'\nbytes_per_second = {RATE}\nburst_bytes = 10000\n\
         share = '{share}'\ndirection = '{direction}'\n\
         [[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\ncache = {{}}\n\
         [[rule]]\nname = 'slowly'\ncarrier = 'direct'\nchain = 'slow'\n"
    ))
}

fn origin() -> Origin {
    Origin::start(|request| {
        let content =
            if request.content.is_empty() { "x".repeat(SIZE) } else { request.content.len().to_string() };
        ok("Cache-Control: max-age=60", &content)
    })
}

/// The least time that the content of this number of requests takes when they share one bandwidth.
fn least(requests: usize) -> Duration {
    Duration::from_secs_f64((SIZE - 10_000) as f64 * requests as f64 / RATE as f64 * 0.99)
}

#[test]
fn content_is_held_to_the_rate_from_the_server_and_out_of_the_cache() {
    let (origin, node) = (origin(), limited("flow", "down"));
    let mut client = Client::new(node.entry());
    for hit in [false, true] {
        let began = Instant::now();
        let response = client.fetch(&origin.url("/a"));
        assert_eq!((response.content.len(), response.is_hit()), (SIZE, hit));
        assert!(began.elapsed() >= least(1), "{:?}", began.elapsed());
    }
}

#[test]
fn bodies_on_their_way_up_are_held_to_the_rate() {
    let (origin, node) = (origin(), limited("flow", "up"));
    let mut client = Client::new(node.entry());
    let (url, host, body) = (origin.url("/up"), origin.address, "y".repeat(SIZE));
    let began = Instant::now();
    client.send(format!("POST {url} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {SIZE}\r\n\r\n{body}"));
    assert_eq!(client.response(false).text(), SIZE.to_string());
    assert!(began.elapsed() >= least(1), "{:?}", began.elapsed());
}

#[test]
fn requests_of_one_client_share_its_bandwidth() {
    let origin = origin();
    let node = limited("client", "down");
    let (entry, url) = (node.entry(), origin.url("/a"));
    let began = Instant::now();
    let threads: Vec<_> = (0..2)
        .map(|number| {
            let url = format!("{url}{number}");
            std::thread::spawn(move || Client::new(entry).fetch(&url).content.len())
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), SIZE);
    }
    // One full bucket between them.
    assert!(began.elapsed() >= least(2), "{:?}", began.elapsed());
}
