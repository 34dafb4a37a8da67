//! The cache behind the listener: what is answered from it, and what is asked anew.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Act, Origin, Request, ok, status};
use crate::proxy::node;
use sidetrack_testkit::awaited;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};

fn cached() -> Node {
    node("cache = {}", "")
}

#[test]
fn a_fresh_response_is_answered_from_the_cache() {
    let origin = Origin::start(|request| ok("Cache-Control: max-age=60|ETag: \"a\"", request.path()));
    let node = cached();
    let url = origin.url("/x");
    let first = Client::new(node.entry()).fetch(&url);
    assert!(
        first.field("cache-status").unwrap().contains("fwd=uri-miss; fwd-status=200; stored"),
        "{first:?}"
    );
    // Another connection, perhaps of another worker.
    let mut client = Client::new(node.entry());
    let second = client.fetch(&url);
    assert!(second.is_hit() && second.field("age").is_some() && second.text() == "/x", "{second:?}");
    assert_eq!(client.ask("GET", &url, "If-None-Match: \"a\"").status, 304);
    let part = client.ask("GET", &url, "Range: bytes=1-");
    assert_eq!(
        (part.status, part.text().as_str(), part.field("content-range")),
        (206, "x", Some("bytes 1-1/2"))
    );
    let head = client.ask("HEAD", &url, "");
    assert!(head.is_hit() && head.field("content-length") == Some("2"), "{head:?}");
    assert_eq!(client.ask("GET", &origin.url("/y"), "Cache-Control: only-if-cached").status, 504);
    assert_eq!(origin.asked().len(), 1);
}

#[test]
fn every_framing_is_stored_and_cut_ones_are_not() {
    let origin = Origin::start(|request| {
        match request.path() {
        "/chunked" => Act::Send(
            b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"
                .to_vec(),
        ),
        "/close" => Act::SendAndClose(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n\r\nabcdef".to_vec()),
        "/cut" => Act::SendAndClose(
            b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 9\r\n\r\nabc".to_vec(),
        ),
        "/cut-chunk" => Act::SendAndClose(
            b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n".to_vec(),
        ),
        _ => ok("Cache-Control: max-age=60", "abcdef"),
    }
    });
    let node = cached();
    for path in ["/chunked", "/close", "/length"] {
        let fetch = || Client::new(node.entry()).fetch(&origin.url(path));
        let first = fetch();
        assert_eq!((first.text().as_str(), first.is_hit()), ("abcdef", false), "{path}");
        // What comes without a length is stored when its client has it.
        let hit = awaited("a hit", || Some(fetch()).filter(|response| response.is_hit()));
        assert_eq!(hit.text(), "abcdef", "{path}");
    }
    for path in ["/cut", "/cut-chunk"] {
        for _ in 0..2 {
            let mut client = Client::new(node.entry());
            client.send(format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url(path)));
            assert!(client.try_response(false).is_none(), "{path}");
        }
    }
    let cut = origin.asked().iter().filter(|asked| asked.path().starts_with("/cut")).count();
    assert_eq!(cut, 4, "what broke off is never answered from the cache");
}

#[test]
fn a_stale_response_is_validated() {
    let origin = Origin::start(|request| match request.field("if-none-match") {
        Some("\"a\"") => status("304 Not Modified", "ETag: \"a\"|Cache-Control: max-age=0|X: new", ""),
        _ => ok("Cache-Control: max-age=0|ETag: \"a\"|X: old", "content"),
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    let url = origin.url("/");
    assert_eq!(client.fetch(&url).field("x"), Some("old"));
    let second = client.fetch(&url);
    assert_eq!((second.status, second.text().as_str(), second.field("x")), (200, "content", Some("new")));
    assert_eq!(origin.asked()[1].field("if-none-match"), Some("\"a\""));
}

#[test]
fn variants_are_kept_apart() {
    let origin = Origin::start(|request| {
        ok(
            "Cache-Control: max-age=60|Vary: Accept-Language",
            request.field("accept-language").unwrap_or("none"),
        )
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    let url = origin.url("/");
    for hit in [false, true] {
        for language in ["nl", "de"] {
            let response = client.ask("GET", &url, &format!("Accept-Language: {language}"));
            assert_eq!((response.text().as_str(), response.is_hit()), (language, hit));
        }
        assert_eq!(client.fetch(&url).text(), "none");
    }
    assert_eq!(origin.asked().len(), 3);
}

#[test]
fn of_several_variants_that_fit_the_one_with_the_highest_weight_is_served() {
    let origin = Origin::start(|request| match request.field("x-first") {
        Some(_) => ok("Cache-Control: max-age=60|Vary: Accept-Language|Content-Language: en", "english"),
        None => ok("Cache-Control: max-age=60|Vary: Accept|Content-Language: de", "deutsch"),
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    for (wanted, expected) in [("de, en;q=0.5", "deutsch"), ("de;q=0.5, en", "english")] {
        let url = origin.url(&format!("/{expected}"));
        assert_eq!(
            client.ask("GET", &url, &format!("X-First: 1|Accept-Language: {wanted}|Accept: a/b")).text(),
            "english"
        );
        assert_eq!(client.ask("GET", &url, "Accept-Language: fr|Accept: text/plain").text(), "deutsch");
        // It selects both.
        let both = client.ask("GET", &url, &format!("Accept-Language: {wanted}|Accept: text/plain"));
        assert!(both.is_hit() && both.text() == expected, "{wanted}: {}", both.head);
    }
    assert_eq!(origin.asked().len(), 4);
}

#[test]
fn the_answer_to_a_post_that_represents_its_target_answers_a_get() {
    let count = Arc::new(AtomicUsize::new(0));
    let asked = count.clone();
    let origin = Origin::start(move |request: &Request| {
        let number = asked.fetch_add(1, SeqCst);
        let path = request.path().to_owned();
        let host = request.field("host").unwrap_or_default();
        let fields = match path.as_str() {
            "/made" => format!("Cache-Control: max-age=60|Content-Location: {path}"),
            "/absolute?q" => {
                format!("Expires: Fri, 01 Jan 2100 00:00:00 GMT|Content-Location: http://{host}{path}")
            }
            "/elsewhere" => "Cache-Control: max-age=60|Content-Location: /other".to_owned(),
            "/foreign" => format!("Cache-Control: max-age=60|Content-Location: http://other.example{path}"),
            "/nowhere" => "Cache-Control: max-age=60".to_owned(),
            "/guessed" => format!("Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT|Content-Location: {path}"),
            "/public" => format!("Cache-Control: public|Content-Location: {path}"),
            "/private" => format!("Cache-Control: private, max-age=60|Content-Location: {path}"),
            "/cookie" => format!("Cache-Control: max-age=60|Set-Cookie: a=b|Content-Location: {path}"),
            _ => format!("Cache-Control: max-age=60|Content-Location: {path}"),
        };
        let content = format!("{number} {}", String::from_utf8_lossy(&request.content));
        match path.as_str() {
            "/failed" => status("500 No", &fields, &content),
            _ if request.line.starts_with("GET") => ok("Cache-Control: no-store", &content),
            _ => ok(&fields, &content),
        }
    });
    let node = cached();
    for (method, path, is_stored) in [
        ("POST", "/made", true),
        ("POST", "/absolute?q", true),
        ("PUT", "/put", false),
        ("POST", "/elsewhere", false),
        ("POST", "/foreign", false),
        ("POST", "/nowhere", false),
        ("POST", "/guessed", false),
        ("POST", "/public", false),
        ("POST", "/private", false),
        ("POST", "/cookie", false),
        ("POST", "/failed", false),
    ] {
        let url = origin.url(path);
        let mut client = Client::new(node.entry());
        client.send(format!("{method} {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nform"));
        let made = client.response(false);
        assert!(made.text().ends_with(" form"), "{made:?}");
        let fetch = || Client::new(node.entry()).fetch(&url);
        if is_stored {
            // A client on another worker may ask before the answer that was just sent is stored.
            awaited(&format!("a hit of {path}"), || {
                let got = fetch();
                (got.is_hit() && got.text() == made.text()).then_some(())
            });
        } else {
            let got = fetch();
            assert!(!got.is_hit() && got.text() != made.text(), "{method} {path}: {got:?}");
        }
        if is_stored {
            let part = Client::new(node.entry()).ask("GET", &url, "Range: bytes=-4");
            assert_eq!((part.status, part.text().as_str()), (206, "form"));
            let again = client.ask("POST", &url, "Content-Length: 0").text();
            awaited("the newest counts", || (fetch().text() == again).then_some(()));
            assert!(client.ask("PUT", &url, "Content-Length: 0").status == 200);
            assert!(!Client::new(node.entry()).fetch(&url).is_hit(), "it is invalidated as any");
        }
    }
}

#[test]
fn an_unsafe_request_makes_what_is_stored_stale() {
    let origin = Origin::start(|request| match request.line.starts_with("GET") {
        true => ok("Cache-Control: max-age=60", "page"),
        false if request.path() == "/fails" => status("500 No", "", ""),
        false => status("204 Done", "Location: /other", ""),
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    let (page, other) = (origin.url("/page"), origin.url("/other"));
    client.fetch(&page);
    client.fetch(&other);
    assert!(client.fetch(&page).is_hit() && client.fetch(&other).is_hit());
    client.ask("DELETE", &origin.url("/fails"), "");
    assert!(client.fetch(&page).is_hit());
    assert_eq!(client.ask("POST", &page, "Content-Length: 0").status, 204);
    assert!(!client.fetch(&page).is_hit() && !client.fetch(&other).is_hit());
}

#[test]
fn many_who_miss_the_same_make_one_fetch() {
    let gate = Arc::new(Barrier::new(2));
    let inner = gate.clone();
    let origin = Origin::start(move |_| {
        inner.wait();
        ok("Cache-Control: max-age=60", "shared")
    });
    let node = cached();
    let url = origin.url("/");
    let clients: Vec<_> = (0..20)
        .map(|_| {
            let (entry, url) = (node.entry(), url.clone());
            std::thread::spawn(move || Client::new(entry).fetch(&url).text())
        })
        .collect();
    sidetrack_testkit::awaited("all ask", || (node.live().len() == 20).then_some(()));
    gate.wait();
    for client in clients {
        assert_eq!(client.join().unwrap(), "shared");
    }
    assert_eq!(origin.asked().len(), 1);
}

#[test]
fn content_is_read_along_while_it_comes_in() {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let receiver = Mutex::new(receiver);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        assert!(stream.read(&mut buffer).unwrap() > 0);
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nCache-Control: max-age=9\r\nContent-Length: 10\r\n\r\nfirst")
            .unwrap();
        receiver.lock().unwrap().recv().unwrap();
        stream.write_all(b"after").unwrap();
    });
    let node = cached();
    let url = format!("http://{address}/");
    let mut clients = [Client::new(node.entry()), Client::new(node.entry())];
    for client in &mut clients {
        client.send(format!("GET {url} HTTP/1.1\r\nHost: h\r\n\r\n"));
        let mut seen = Vec::new();
        while !seen.ends_with(b"first") {
            seen.extend(client.bytes(1));
        }
    }
    sender.send(()).unwrap();
    for client in &mut clients {
        assert_eq!(client.bytes(5), b"after");
    }
    server.join().unwrap();
}

#[test]
fn stale_is_served_while_a_new_one_is_fetched_and_when_the_server_is_in_trouble() {
    let count = Arc::new(AtomicUsize::new(0));
    let asked = count.clone();
    let origin = Origin::start(move |request: &Request| {
        let number = asked.fetch_add(1, SeqCst);
        match request.path() {
            "/behind" => ok("Cache-Control: max-age=0, stale-while-revalidate=60", &number.to_string()),
            _ if number > 0 && request.path() == "/error" => status("503 No", "", "sorry"),
            _ => ok("Cache-Control: max-age=0, stale-if-error=60", "good"),
        }
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    assert_eq!(client.fetch(&origin.url("/error")).text(), "good");
    assert_eq!(client.fetch(&origin.url("/error")).text(), "good");
    let first = client.fetch(&origin.url("/behind")).text();
    let second = client.fetch(&origin.url("/behind"));
    assert!(second.is_hit() && second.text() == first);
    sidetrack_testkit::awaited("it is refreshed", || {
        (client.fetch(&origin.url("/behind")).text() != first).then_some(())
    });
}

/// A page that changed just now: the guess about its freshness is nothing.
fn alices_page(request: &Request) -> Act {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let now = sidetrack_core::http::cache::format_date(now);
    let more = match request.path() {
        "/sets" => "Set-Cookie: id=alice|Cache-Control: max-age=60",
        "/login" => "Cache-Control: public",
        _ => "",
    };
    match ok(&format!("Connection: close|Last-Modified: {now}|{more}"), "alice's page") {
        Act::Send(bytes) => Act::SendAndClose(bytes),
        other => other,
    }
}

#[test]
fn one_users_page_is_never_another_users_stale_answer() {
    for (more, heuristic) in [("", 502), ("stale_if_unreachable_ms = 86400000", 200)] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let node = node(&format!("cache = {{ {more} }}"), "");
        let url = |path: &str| format!("http://{address}{path}");
        let served = std::thread::spawn(move || {
            for (stream, _) in (0..4).map(|_| listener.accept().unwrap()) {
                crate::origin::answer(stream, &alices_page, &Mutex::default());
            }
            // Gone: nothing listens there any more.
            drop(listener);
        });
        let mut alice = Client::new(node.entry());
        alice.ask("GET", &url("/cookie"), "Cookie: id=alice");
        alice.ask("GET", &url("/login"), "Authorization: Basic YTpi");
        assert!(alice.fetch(&url("/sets")).field("set-cookie").is_some());
        alice.fetch(&url("/all"));
        served.join().unwrap();
        let mut bob = Client::new(node.entry());
        for (path, fields, expected) in [
            ("/cookie", "", 502),
            ("/cookie", "Cache-Control: max-stale", 502),
            ("/login", "", 502),
            ("/sets", "", 502),
            ("/all", "Cookie: id=bob", 502),
            ("/all", "", heuristic),
        ] {
            let answered = bob.ask("GET", &url(path), fields);
            assert_eq!(answered.status, expected, "{path} {fields} {more}: {answered:?}");
        }
    }
}

#[test]
fn a_cookie_of_a_304_is_for_the_client_that_asked() {
    let origin = Origin::start(|request| match request.field("if-none-match") {
        Some(_) => {
            status("304 Not Modified", "ETag: \"a\"|Set-Cookie: id=alice|Cache-Control: max-age=60", "")
        }
        None => ok("Cache-Control: max-age=0|ETag: \"a\"", "page"),
    });
    let node = cached();
    let url = origin.url("/");
    Client::new(node.entry()).fetch(&url);
    let alice = Client::new(node.entry()).fetch(&url);
    assert_eq!((alice.text().as_str(), alice.field("set-cookie")), ("page", Some("id=alice")));
    let bob = Client::new(node.entry()).fetch(&url);
    assert!(bob.is_hit() && bob.field("set-cookie").is_none(), "{bob:?}");
}

#[test]
fn a_304_to_a_clients_own_condition_removes_nothing() {
    let count = Arc::new(AtomicUsize::new(0));
    let asked = count.clone();
    let origin = Origin::start(move |request: &Request| match asked.fetch_add(1, SeqCst) {
        0 => ok("Cache-Control: max-age=0, stale-if-error=60", "page"),
        _ if request.field("if-modified-since").is_some() => status("304 Not Modified", "", ""),
        _ => status("503 No", "", "sorry"),
    });
    let node = cached();
    let url = origin.url("/");
    let mut client = Client::new(node.entry());
    assert_eq!(client.fetch(&url).text(), "page");
    let own = client.ask("GET", &url, "If-Modified-Since: Fri, 01 Jan 2100 00:00:00 GMT");
    assert_eq!(own.status, 304);
    let after = client.fetch(&url);
    assert_eq!((after.status, after.text().as_str()), (200, "page"), "{after:?}");
}

#[test]
fn a_response_larger_than_the_bound_passes_and_is_not_kept() {
    let origin = Origin::start(|request| match request.path() {
        "/chunked" => {
            let mut text =
                b"HTTP/1.1 200 OK\r\nCache-Control: max-age=9\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
            text.extend(format!("{:x}\r\n{}\r\n0\r\n\r\n", 3000, "x".repeat(3000)).into_bytes());
            Act::Send(text)
        }
        _ => ok("Cache-Control: max-age=9", &"x".repeat(3000)),
    });
    let node = node("cache = { object_bytes = 2999 }", "");
    let mut client = Client::new(node.entry());
    for path in ["/length", "/chunked"] {
        for _ in 0..2 {
            let response = client.fetch(&origin.url(path));
            assert!(response.content.len() == 3000 && !response.is_hit());
        }
    }
}

#[test]
fn rules_of_the_key_make_one_resource_of_several_urls() {
    let origin = Origin::start(|request| ok("Cache-Control: max-age=60", request.path()));
    let node = node("cache = { ignore_parameters = ['ved', 'utm_*'], purge_from = ['127.0.0.0/8'] }", "");
    let mut client = Client::new(node.entry());
    assert_eq!(client.fetch(&origin.url("/q?a=1&ved=x")).text(), "/q?a=1&ved=x");
    assert!(client.fetch(&origin.url("/q?a=1&ved=other&utm_source=y")).is_hit());
    assert!(!client.fetch(&origin.url("/q?a=2&ved=x")).is_hit());
    assert_eq!(client.ask("PURGE", &origin.url("/q?a=1"), "").status, 200);
    assert_eq!(client.ask("PURGE", &origin.url("/q?a=1"), "").status, 404);
    assert!(!client.fetch(&origin.url("/q?a=1&ved=x")).is_hit(), "purged");
}

#[test]
fn the_first_client_gets_all_fields_and_others_what_may_be_reused() {
    let origin = Origin::start(|_| {
        ok(
            "Cache-Control: max-age=60, no-cache=\"Set-Cookie\", private=\"X-User\"|Set-Cookie: a=b|X-User: me|X: y",
            "page",
        )
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    let url = origin.url("/");
    let first = client.fetch(&url);
    assert_eq!((first.field("set-cookie"), first.field("x-user")), (Some("a=b"), Some("me")));
    assert_eq!(first.field("age"), None, "it comes from the server");
    let second = client.fetch(&url);
    assert!(second.is_hit() && second.field("age").is_some() && second.field("x") == Some("y"));
    assert_eq!((second.field("set-cookie"), second.field("x-user")), (None, None));
}

#[test]
fn what_an_unsafe_request_changed_is_stale_before_its_client_knows() {
    // The answer's content is long in coming: its head alone says that something has changed.
    let origin = Origin::start(|request| match request.line.starts_with("GET") {
        true => ok("Cache-Control: max-age=60", "page"),
        false => Act::Send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal".to_vec()),
    });
    let node = cached();
    let url = origin.url("/");
    Client::new(node.entry()).fetch(&url);
    let mut writer = Client::new(node.entry());
    writer.send(format!("DELETE {url} HTTP/1.1\r\nHost: {}\r\n\r\n", origin.address));
    assert_eq!(writer.bytes(12), b"HTTP/1.1 200");
    assert!(!Client::new(node.entry()).fetch(&url).is_hit());
}

#[test]
fn nothing_stale_is_said_where_that_is_forbidden() {
    let gone = Arc::new(AtomicUsize::new(0));
    let is_gone = gone.clone();
    let origin = Origin::start(move |_| match is_gone.load(SeqCst) {
        0 => ok("Cache-Control: max-age=0, must-revalidate|ETag: \"a\"", "page"),
        _ => Act::SendAndClose(Vec::new()),
    });
    let node = cached();
    let mut client = Client::new(node.entry());
    assert_eq!(client.fetch(&origin.url("/")).status, 200);
    gone.store(1, SeqCst);
    let answer = client.fetch(&origin.url("/"));
    assert_eq!(answer.status, 504, "{answer:?}");
    assert!(answer.field("proxy-status").is_some_and(|text| text.contains("connection_terminated")));
}

/// A server of ten bytes that serves ranges of them, with this tag.
fn ten_bytes(tag: &'static str) -> Origin {
    const ALL: &str = "0123456789";
    Origin::start(move |request| {
        let fields = format!("Cache-Control: max-age=60|ETag: {tag}");
        let Some(range) = request.field("range").and_then(|range| range.strip_prefix("bytes=")) else {
            return ok(&fields, ALL);
        };
        let (first, last): (usize, usize) =
            range.split_once('-').map(|(a, b)| (a.parse().unwrap(), b.parse().unwrap())).unwrap();
        let part = format!("{fields}|Content-Range: bytes {first}-{last}/10");
        status("206 Partial Content", &part, &ALL[first..=last])
    })
}

#[test]
fn parts_of_one_representation_become_one_and_at_last_the_whole() {
    let origin = ten_bytes("\"a\"");
    let node = cached();
    let url = origin.url("/ten");
    let mut client = Client::new(node.entry());
    let mut part = |range: &str, text: &str, is_hit: bool| {
        let response = client.ask("GET", &url, &format!("Range: bytes={range}"));
        assert_eq!((response.status, response.text().as_str()), (206, text), "{range}");
        assert_eq!(response.is_hit(), is_hit, "{range}: {response:?}");
    };
    part("0-3", "0123", false);
    part("6-7", "67", false);
    // Touches both: three parts become one.
    part("3-5", "345", false);
    part("1-6", "123456", true);
    part("0-7", "01234567", true);
    part("7-8", "78", false);
    part("9-9", "9", false);
    let whole = Client::new(node.entry()).fetch(&url);
    assert!(whole.is_hit() && whole.status == 200 && whole.text() == "0123456789", "{whole:?}");
    assert_eq!(whole.field("content-range"), None);
    assert_eq!(origin.asked().len(), 5);
}

#[test]
fn parts_that_no_strong_tag_holds_together_stay_apart() {
    let origin = ten_bytes("W/\"a\"");
    let node = cached();
    let url = origin.url("/ten");
    let mut client = Client::new(node.entry());
    for range in ["0-4", "5-9"] {
        assert_eq!(client.ask("GET", &url, &format!("Range: bytes={range}")).status, 206);
    }
    assert!(client.ask("GET", &url, "Range: bytes=1-2").is_hit());
    let across = client.ask("GET", &url, "Range: bytes=3-6");
    assert!(!across.is_hit() && across.text() == "3456", "{across:?}");
}

#[test]
fn large_content_is_sent_as_it_is_whole_and_in_parts() {
    const LENGTH: usize = 3_000_001;
    let content: String = (0..LENGTH).map(|at| char::from(b'a' + (at * at % 23) as u8)).collect();
    let all = content.clone();
    // As a node does where it counts its descriptors.
    sidetrack::http::sheet::allow(8);
    let origin = Origin::start(move |_| ok("Cache-Control: max-age=60|ETag: \"a\"", &all));
    let node = cached();
    let url = origin.url("/large");
    assert!(Client::new(node.entry()).fetch(&url).text() == content, "on its way into the cache");
    let mut client = Client::new(node.entry());
    for _ in 0..2 {
        let hit = client.fetch(&url);
        assert!(hit.is_hit() && hit.text() == content, "{:?}", hit.status);
    }
    for (first, last) in
        [(0, 0), (0, 65_535), (65_535, 65_537), (1_048_575, 2_097_153), (LENGTH - 1, LENGTH - 1)]
    {
        let part = client.ask("GET", &url, &format!("Range: bytes={first}-{last}"));
        assert!(part.is_hit() && part.status == 206, "{:?}", part.status);
        assert!(part.text() == content[first..=last], "{first}-{last}");
    }
    let parts = client.ask("GET", &url, "Range: bytes=1-2,2000000-2000002");
    for wanted in [&content[1..=2], &content[2_000_000..=2_000_002]] {
        assert!(parts.text().contains(&format!("\r\n\r\n{wanted}\r\n")), "{}", parts.text());
    }
    assert!(sheets() >= 1, "it lies in pages of its own");
    assert_eq!(origin.asked().len(), 1);
}

/// Contents that this process, and the nodes in it, hold in pages of their own.
fn sheets() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("Linux");
    let is_sheet = |path: &std::path::PathBuf| path.to_string_lossy().contains("memfd:sidetrack-cache");
    files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok()).filter(is_sheet).count()
}
