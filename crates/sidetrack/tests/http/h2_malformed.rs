//! Malformed HTTP/2 messages, written byte by byte: each is reset and not passed on, and its neighbours go on.

use crate::client::Client;
use crate::node::Node;
use crate::origin::ok;
use crate::tap::{Authority, NAME, node, opened};
use crate::tls_origin::{Asks, TlsOrigin, World, chain};
use sidetrack::tls::{Made, provider};
use sidetrack_core::http::hpack::Decoder;
use sidetrack_testkit::awaited;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const PROTOCOL_ERROR: u32 = 1;

type Fields<'a> = Vec<(&'a str, &'a str)>;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A block of literal fields that are not added to the table.
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        out.push(0);
        for text in [name, value] {
            out.push(u8::try_from(text.len()).unwrap());
            out.extend(text.as_bytes());
        }
    }
    out
}

/// A message without content.
fn headers(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(1, 5, stream, &block(fields))
}

/// A request for a path, with these fields behind the usual ones.
fn get<'a>(path: &'a str, more: &[(&'a str, &'a str)]) -> Fields<'a> {
    let usual = [(":method", "GET"), (":scheme", "https"), (":authority", NAME), (":path", path)];
    [&usual[..], more].concat()
}

/// A request without `:authority`.
fn by_host<'a>(pseudo: &[(&'a str, &'a str)]) -> Fields<'a> {
    [&[(":method", "GET")], pseudo, &[("host", NAME)]].concat()
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Answered(u16),
    Reset(u32),
}

/// A client that writes frames as they are.
struct Raw {
    client: Client,
    decoder: Decoder,
    outcomes: BTreeMap<u32, Outcome>,
    statuses: BTreeMap<u32, u16>,
}

impl Raw {
    fn new(node: &Node, authority: &Authority) -> Self {
        let shaken = opened(node, &authority.root(), &["h2"]);
        assert_eq!(shaken.protocol.as_deref(), Some(&b"h2"[..]));
        let mut client = shaken.client;
        client.send([PREFACE, &frame(4, 0, 0, &[])].concat());
        let decoder = Decoder::new(4096, 1 << 20);
        Self { client, decoder, outcomes: BTreeMap::new(), statuses: BTreeMap::new() }
    }

    /// Waits for the end of a stream; `None` if the connection ends before.
    fn outcome(&mut self, stream: u32) -> Option<Outcome> {
        while !self.outcomes.contains_key(&stream) {
            let head = self.client.read(9)?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let on = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            let payload = self.client.read(length as usize)?;
            match head[3] {
                1 => {
                    let mut status = None;
                    let read = |name: &[u8], value: &[u8]| {
                        if name == b":status" {
                            status = std::str::from_utf8(value).unwrap().parse().ok();
                        }
                    };
                    self.decoder.decode(&payload, read).unwrap();
                    self.statuses.extend(status.map(|status| (on, status)));
                }
                3 => {
                    let code = u32::from_be_bytes(payload.try_into().unwrap());
                    self.outcomes.entry(on).or_insert(Outcome::Reset(code));
                    continue;
                }
                _ => {}
            }
            if matches!(head[3], 0 | 1) && head[4] & 1 == 1 {
                self.outcomes.insert(on, Outcome::Answered(self.statuses[&on]));
            }
        }
        self.outcomes.get(&stream).copied()
    }
}

/// A world, an authority and a server that remembers what it was asked.
fn setting() -> (Authority, TlsOrigin) {
    let world = World::new();
    let origin = TlsOrigin::start(&world.identity(NAME, 30), Asks::Nothing, |request| {
        ok("Cache-Control: max-age=60", request.path())
    });
    (Authority::new(&world), origin)
}

fn paths(origin: &TlsOrigin) -> Vec<String> {
    origin.asked.lock().unwrap().iter().map(|request| request.path().to_owned()).collect()
}

/// Malformed requests. The library itself rejects some of them; others it would repair.
fn malformed_requests() -> Vec<Fields<'static>> {
    let field = |name: &'static str, value: &'static str| get("/bad", &[(name, value)]);
    vec![
        get("/page#bad", &[]),
        get("#bad", &[]),
        get("/#", &[]),
        get("", &[]),
        get("bad", &[]),
        get("?bad", &[]),
        get("*", &[]),
        get("/bad bad", &[]),
        get("/bad\u{e4}", &[]),
        get("/bad\x7f", &[]),
        get("https://web.site.test/bad", &[]),
        by_host(&[(":scheme", "https")]),
        by_host(&[(":scheme", "http"), (":path", "/bad")]),
        by_host(&[(":scheme", "ftp"), (":path", "/bad")]),
        by_host(&[(":path", "/bad")]),
        vec![(":method", "GET"), (":scheme", "http"), (":authority", NAME), (":path", "/bad")],
        vec![(":method", "GET"), (":scheme", "https"), (":path", "/bad")],
        vec![(":scheme", "https"), (":authority", NAME), (":path", "/bad")],
        get("/bad", &[(":path", "/bad")]),
        get("/bad", &[(":method", "GET")]),
        get("/bad", &[("a", "1"), (":protocol", "websocket")]),
        field(":protocol", "websocket"),
        field(":status", "200"),
        field("host", "other.site.test"),
        get("/bad", &[("host", NAME), ("host", NAME)]),
        vec![(":method", "GET"), (":scheme", "https"), (":authority", "u@web.site.test"), (":path", "/bad")],
        field("connection", "close"),
        field("proxy-connection", "close"),
        field("http2-settings", "x"),
        field("upgrade", "h2c"),
        field("transfer-encoding", "chunked"),
        field("te", "gzip"),
        field("a", " padded"),
        field("content-length", "1"),
    ]
}

#[test]
fn each_malformed_request_is_reset_alone_and_reaches_nobody() {
    let (authority, origin) = setting();
    let node = node(&authority, origin.address, "cache = {}", "");
    let mut raw = Raw::new(&node, &authority);
    let mut stream = 1;
    let mut wanted = Vec::new();
    // What a fragment might find in the cache.
    raw.client.send(headers(stream, &get("/page", &[])));
    assert_eq!(raw.outcome(stream), Some(Outcome::Answered(200)));
    wanted.push("/page".to_owned());
    for (index, fields) in malformed_requests().iter().enumerate() {
        // Each is sent in two pieces between two neighbours, in one write.
        let (before, after) = (format!("/before-{index}"), format!("/after-{index}"));
        let whole = block(fields);
        let (one, rest) = whole.split_at(whole.len() / 2);
        let bytes = [
            headers(stream + 2, &get(&before, &[])),
            if index % 2 == 0 {
                frame(1, 5, stream + 4, &whole)
            } else {
                // Padded, with a priority.
                frame(1, 0x2d, stream + 4, &[&[2, 0, 0, 0, 0, 9][..], one, rest, &[0, 0]].concat())
            },
            headers(stream + 6, &get(&after, &[])),
        ];
        raw.client.send(bytes.concat());
        let outcomes = [2, 4, 6].map(|more| raw.outcome(stream + more));
        let good = Some(Outcome::Answered(200));
        assert_eq!(outcomes, [good, Some(Outcome::Reset(PROTOCOL_ERROR)), good], "{fields:?}");
        wanted.extend([before, after]);
        stream += 6;
    }
    let mut asked = paths(&origin);
    asked.sort();
    wanted.sort();
    assert_eq!(asked, wanted);
    drop(raw);
    let ended = node.ended(wanted.len() + 1);
    let told =
        |text: &str| ended.iter().any(|ended| ended.detail.as_deref().unwrap_or_default().contains(text));
    assert!(told("/after-1 ") && !told("bad") && !told(" hit"), "{ended:?}");
}

#[test]
fn what_is_malformed_in_its_bytes_reaches_nobody() {
    let (authority, origin) = setting();
    let node = node(&authority, origin.address, "cache = {}", "");
    let raw_field = |name: &[u8], value: &[u8]| {
        let (one, other) = (u8::try_from(name.len()).unwrap(), u8::try_from(value.len()).unwrap());
        [&block(&get("/bad", &[]))[..], &[0, one], name, &[other], value].concat()
    };
    let usual = block(&get("/bad", &[]));
    let cases: Vec<Vec<u8>> = vec![
        frame(1, 5, 3, &raw_field(b"Upper", b"1")),
        frame(1, 5, 3, &raw_field(b"", b"1")),
        frame(1, 5, 3, &raw_field(b"a b", b"1")),
        frame(1, 5, 3, &raw_field(b":unknown", b"1")),
        frame(1, 5, 3, &raw_field(b"a", b"1\r\nb: 2")),
        frame(1, 5, 3, &raw_field(b"a", b"\0")),
        frame(1, 5, 3, &raw_field(b":path", b"/\xff")),
        // A size update behind fields, an index that does not exist, a bad Huffman code, half a field.
        frame(1, 5, 3, &[&usual[..], &[0x20]].concat()),
        frame(1, 5, 3, &[&usual[..], &[0xbe]].concat()),
        frame(1, 5, 3, &[&usual[..], &[0, 1, b'a', 0x81, 0xfe]].concat()),
        frame(1, 5, 3, &[&usual[..], &[0, 1]].concat()),
        // A fragment in a block whose parts have something between them.
        [frame(1, 1, 3, &block(&get("/bad#", &[]))), frame(6, 0, 0, &[0; 8]), frame(9, 4, 3, &[])].concat(),
        // The library skips the block of a stream that depends on itself. So the next block, whose path is in the table,
        // would be read as another one.
        [
            frame(1, 0x25, 3, &[&[0, 0, 0, 3, 1][..], &[0x44, 4, b'/', b'b', b'a', b'd'], &usual].concat()),
            frame(1, 5, 5, &[&block(&get("/bad", &[])[..3])[..], &[0xbe]].concat()),
        ]
        .concat(),
    ];
    for (index, bytes) in cases.iter().enumerate() {
        let mut raw = Raw::new(&node, &authority);
        let path = format!("/good-{index}");
        raw.client.send(headers(1, &get(&path, &[])));
        assert_eq!(raw.outcome(1), Some(Outcome::Answered(200)));
        raw.client.send(bytes);
        for stream in [3, 5] {
            let outcome = raw.outcome(stream);
            assert!(!matches!(outcome, Some(Outcome::Answered(_))), "{index}: {outcome:?}");
        }
    }
    let wanted: Vec<String> = (0..cases.len()).map(|index| format!("/good-{index}")).collect();
    assert_eq!(paths(&origin), wanted);
}

#[test]
fn malformed_trailers_end_their_request_alone() {
    let (authority, origin) = setting();
    let node = node(&authority, origin.address, "", "");
    let mut raw = Raw::new(&node, &authority);
    let post = |path| [&[(":method", "POST")], &get(path, &[])[1..]].concat();
    let mut stream = 1;
    for (trailers, wanted) in [
        (vec![("x-sum", "1")], Outcome::Answered(200)),
        (vec![(":path", "/bad")], Outcome::Reset(PROTOCOL_ERROR)),
        (vec![("x-sum", "1"), (":method", "GET")], Outcome::Reset(PROTOCOL_ERROR)),
        (vec![("x-sum", " 1")], Outcome::Reset(PROTOCOL_ERROR)),
        (vec![("connection", "close")], Outcome::Reset(PROTOCOL_ERROR)),
        (vec![("x-sum", "1")], Outcome::Answered(200)),
    ] {
        let path = if matches!(wanted, Outcome::Answered(_)) { "/good" } else { "/bad" };
        raw.client.send(frame(1, 4, stream, &block(&post(path))));
        raw.client.send([frame(0, 0, stream, b"content"), headers(stream, &trailers)].concat());
        assert_eq!(raw.outcome(stream), Some(wanted), "{trailers:?}");
        stream += 2;
    }
    assert_eq!(paths(&origin), ["/good", "/good"]);
}

/// A server that answers a path with frames, and the streams that were reset, each with its code.
fn raw_origin(
    identity: &Made,
    act: impl Fn(&str, u32) -> Vec<u8> + Send + Sync + 'static,
) -> (SocketAddr, Arc<Mutex<Vec<u32>>>) {
    let (certificates, key) = chain(identity);
    let mut config = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let config = Arc::new(config);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let resets = Arc::new(Mutex::new(Vec::new()));
    let (act, seen) = (Arc::new(act), resets.clone());
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            let (act, seen) = (act.clone(), seen.clone());
            std::thread::spawn(move || {
                // It ends with the connection.
                let _ = serve_raw(rustls::StreamOwned::new(connection, socket), &*act, &seen);
            });
        }
    });
    (address, resets)
}

fn serve_raw(
    mut stream: rustls::StreamOwned<rustls::ServerConnection, std::net::TcpStream>,
    act: &dyn Fn(&str, u32) -> Vec<u8>,
    seen: &Mutex<Vec<u32>>,
) -> std::io::Result<()> {
    stream.read_exact(&mut [0; 24])?;
    stream.write_all(&frame(4, 0, 0, &[]))?;
    let mut decoder = Decoder::new(4096, 1 << 20);
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload)?;
        let on = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        match (head[3], head[4] & 1) {
            (1, _) => {
                let mut path = String::new();
                let read = |name: &[u8], value: &[u8]| {
                    if name == b":path" {
                        path = String::from_utf8_lossy(value).into_owned();
                    }
                };
                decoder.decode(&payload, read).unwrap();
                stream.write_all(&act(&path, on))?;
            }
            (3, _) => seen.lock().unwrap().push(u32::from_be_bytes(payload.try_into().unwrap())),
            (4, 0) => stream.write_all(&frame(4, 1, 0, &[]))?,
            _ => {}
        }
    }
}

#[test]
fn malformed_responses_of_servers_are_not_forwarded_and_their_streams_are_reset() {
    let world = World::new();
    let authority = Authority::new(&world);
    let fresh = ("cache-control", "max-age=60");
    let (server, resets) = raw_origin(&world.identity(NAME, 30), move |path, stream| {
        let head = |fields: &[(&str, &str)]| frame(1, 4, stream, &block(fields));
        // The content of a malformed response does not end, so that its stream is there to be reset.
        let open = |fields: &[(&str, &str)]| [head(fields), frame(0, 0, stream, b"content")].concat();
        let whole = |fields: &[(&str, &str)]| [head(fields), frame(0, 1, stream, b"content")].concat();
        let good = [(":status", "200"), ("x-padded", " 1 "), fresh];
        match path {
            "/path" => open(&[(":status", "200"), (":path", "/"), fresh]),
            "/method" => open(&[(":status", "200"), (":method", "GET"), fresh]),
            "/upgrade" => [head(&[(":status", "101")]), open(&good)].concat(),
            "/field" => open(&[(":status", "200"), ("connection", "x-secret"), fresh]),
            "/missing" => open(&[fresh]),
            "/repeated" => open(&[(":status", "200"), (":status", "200"), fresh]),
            "/early" => [head(&[(":status", "103")]), whole(&good)].concat(),
            "/trailers" => [open(&good), headers(stream, &[("x-sum", "1")])].concat(),
            "/bad-trailers" => [open(&good), headers(stream, &[(":status", "200")])].concat(),
            _ => whole(&good),
        }
    });
    let node = node(&authority, server, "cache = {}", "");
    let ask = |path: &str| {
        let mut client = opened(&node, &authority.root(), &["http/1.1"]).client;
        client.send(format!("GET {path} HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n"));
        client.try_response(false).map(|response| (response.status, response.text()))
    };
    let good = Some((200, "content".to_owned()));
    for path in ["/path", "/method", "/upgrade", "/field", "/missing", "/repeated"] {
        assert_eq!(ask("/good"), good, "the connection goes on");
        for _ in 0..2 {
            let status = ask(path).map(|(status, _)| status);
            assert_eq!(status, Some(502), "{path}");
        }
    }
    // The trailers arrive before the head was used, or the content is cut.
    for _ in 0..2 {
        let got = ask("/bad-trailers");
        assert!(got.as_ref().is_none_or(|(status, _)| *status == 502), "{got:?}");
    }
    for path in ["/early", "/trailers", "/other"] {
        assert_eq!(ask(path), good, "{path}");
    }
    awaited("each malformed response is reset", || {
        let resets = resets.lock().unwrap();
        assert!(resets.iter().all(|code| *code == PROTOCOL_ERROR), "{resets:?}");
        (resets.len() >= 12).then_some(())
    });
}
