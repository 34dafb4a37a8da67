//! Servers that authenticate the connection (NTLM, Negotiate): what one client has proved serves no other.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Act, Request, answer, ok, status};
use crate::tap::{Authority, NAME, node as tapped, opened};
use crate::tls_origin::{Asks, TlsOrigin, World};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// What a connection answers: once it has seen the last message of a handshake, everything, to everyone.
fn guarded(scheme: &str, is_authenticated: &AtomicBool, request: &Request) -> Act {
    let fields = "Cache-Control: max-age=60|Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT";
    let proof = request.field("authorization").or(request.field("x-proof")).unwrap_or_default().to_owned();
    if proof.ends_with(" three") || proof == "three" {
        is_authenticated.store(true, SeqCst);
        let more = if scheme == "Persistent" { "Persistent-Auth: true|" } else { "" };
        return ok(&format!("{more}{fields}"), &format!("alice {}", request.path()));
    }
    if is_authenticated.load(SeqCst) {
        return ok(fields, &format!("alice {}", request.path()));
    }
    let challenge = match (scheme, proof.ends_with(" one")) {
        ("Persistent", _) => String::new(),
        (_, true) => format!("WWW-Authenticate: {scheme} two"),
        (_, false) => format!("WWW-Authenticate: {scheme}"),
    };
    status("401 Unauthorized", &challenge, "who is it?")
}

/// A server whose connections are authenticated.
fn origin(scheme: &'static str) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let connections = count.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            count.fetch_add(1, SeqCst);
            std::thread::spawn(move || {
                let is_authenticated = AtomicBool::new(false);
                let act = move |request: &Request| guarded(scheme, &is_authenticated, request);
                answer(stream, &act, &Mutex::default());
            });
        }
    });
    (address, connections)
}

fn node(more: &str) -> Node {
    Node::start(&format!(
        "workers = 1\ndefault = 'direct'\n[[listen]]\nname = 'in'\nkind = 'http'\naddress = '127.0.0.1:0'\n{more}\n"
    ))
}

#[test]
fn an_authenticated_connection_serves_its_client_and_no_other() {
    // The scheme, and the request's fields that carry the first and the last message.
    for (scheme, one, three) in [
        ("NTLM", "Authorization: NTLM one", "Authorization: NTLM three"),
        ("Negotiate", "Authorization: Negotiate one", "Authorization: negotiate three"),
        ("X-Unheard-Of", "Authorization: X-Unheard-Of one", "Authorization: X-Unheard-Of three"),
        ("Persistent", "X-Proof: one", "X-Proof: three"),
    ] {
        for more in ["", "cache = {}"] {
            let (origin, connections) = origin(scheme);
            let node = node(more);
            let url = |path: &str| format!("http://{origin}{path}");
            let mut alice = Client::new(node.entry());
            let first = alice.ask("GET", &url("/a"), one);
            assert_eq!(first.status, 401, "{scheme} {more}");
            let says = first.field("proxy-support");
            let is_known = ["NTLM", "Negotiate"].contains(&scheme);
            assert_eq!(says, is_known.then_some("Session-Based-Authentication"), "{scheme}: {first:?}");
            assert_eq!(alice.ask("GET", &url("/b"), three).text(), "alice /b");
            for path in ["/c", "/d"] {
                assert_eq!(alice.fetch(&url(path)).text(), format!("alice {path}"), "{scheme}");
            }
            let posted = alice.ask("POST", &url("/e"), "Content-Length: 0");
            assert_eq!(posted.text(), "alice /e", "a request that cannot be repeated goes the same way");
            let hers = connections.load(SeqCst);
            for path in ["/b", "/c", "/d", "/fresh"] {
                let mut other = Client::new(node.entry());
                for _ in 0..2 {
                    let answered = other.fetch(&url(path));
                    assert_eq!(answered.status, 401, "{scheme} {more} {path}: {}", answered.text());
                }
            }
            assert_eq!(alice.fetch(&url("/f")).text(), "alice /f", "it is still hers");
            assert!(connections.load(SeqCst) > hers && hers <= 2, "{scheme}: {hers} connections were hers");
        }
    }
}

#[test]
fn several_servers_stay_authenticated_for_one_client() {
    let (one, two) = (origin("NTLM"), origin("Negotiate"));
    let node = node("");
    let mut alice = Client::new(node.entry());
    for (address, scheme) in [(one.0, "NTLM"), (two.0, "Negotiate")] {
        let url = format!("http://{address}/");
        assert_eq!(alice.ask("GET", &url, &format!("Authorization: {scheme} one")).status, 401);
        assert_eq!(alice.ask("GET", &url, &format!("Authorization: {scheme} three")).status, 200);
    }
    for address in [one.0, two.0, one.0] {
        assert_eq!(alice.fetch(&format!("http://{address}/more")).text(), "alice /more");
    }
    assert_eq!((one.1.load(SeqCst), two.1.load(SeqCst)), (1, 1));
}

#[test]
fn schemes_of_requests_share_connections() {
    let (origin, connections) = origin("Basic realm=\"NTLM\"");
    let node = node("");
    for scheme in ["Basic", "Bearer", "Digest", "AWS4-HMAC-SHA256"] {
        let mut client = Client::new(node.entry());
        let url = format!("http://{origin}/");
        assert_eq!(client.ask("GET", &url, &format!("Authorization: {scheme} x")).status, 401);
    }
    assert_eq!(connections.load(SeqCst), 1);
}

#[test]
fn an_opened_connection_is_authenticated_for_its_client_alone() {
    let world = World::new();
    let authority = Authority::new(&world);
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        match request.field("authorization") {
            Some(_) => ok("Persistent-Auth: true", "alice"),
            None => status("401 Unauthorized", "WWW-Authenticate: Basic", ""),
        }
    });
    let node = tapped(&authority, origin.address, "", "");
    let ask = |client: &mut Client, fields: &str| {
        client.send(format!("GET / HTTP/1.1\r\nHost: {NAME}\r\n{fields}\r\n"));
        client.response(false).status
    };
    let mut alice = opened(&node, &authority.root(), &["http/1.1"]);
    for _ in 0..2 {
        assert_eq!(ask(&mut alice.client, "Authorization: Negotiate x\r\n"), 200);
    }
    let mut bob = opened(&node, &authority.root(), &["http/1.1"]);
    assert_eq!(ask(&mut bob.client, ""), 401);
    let connections = *origin.connections.lock().unwrap();
    assert_eq!(connections, 2, "each client has a connection of its own, and keeps it");
}
