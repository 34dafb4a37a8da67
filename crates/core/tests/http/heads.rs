//! Heads: what is read, and what is refused at which byte.

use crate::readers::agree;
use crate::{Read, error, read, read_every_way};
use proptest::prelude::*;
use sidetrack_core::http::head::{Head, request_head};
use sidetrack_core::http::message::{
    MAX_HEAD, MessageError, Method, Request, Response, Scan, Sender, Version,
};
use sidetrack_core::http::uri::{Scheme, Target};

fn request(text: &str) -> Result<Request, MessageError> {
    match read_every_way(text.as_bytes(), Sender::Client).into_iter().next() {
        Some(Read::Request(request, _)) => Ok(request),
        Some(Read::Broken(error)) => Err(error),
        other => panic!("{text:?} gave {other:?}"),
    }
}

fn response(text: &str) -> Result<Response, MessageError> {
    let mut scan = Scan::default();
    let length = scan.advance(text.as_bytes(), Sender::Server)?.expect("a whole head");
    Response::parse(&text.as_bytes()[..length])
}

#[test]
fn a_request_is_read_as_it_was_written() {
    let text = "\r\nGET http://a.example/x?y HTTP/1.1\r\nHost: a.example\r\nx-a:  b c\t\r\nEmpty:\r\n\r\n";
    let head = request(text).unwrap();
    assert_eq!((&head.method, head.version), (&Method::Get, Version::Http11));
    assert_eq!(head.target, b"http://a.example/x?y");
    let fields: Vec<_> = head.fields.iter().collect();
    assert_eq!(
        fields,
        [(&b"Host"[..], &b"a.example"[..]), (b"x-a", b"b c"), (b"Empty", b"")],
        "names keep their case, values lose the space around them"
    );
}

#[test]
fn a_request_head_is_right_or_refused() {
    use MessageError::*;
    let with_line = |line: &str| request(&format!("GET / HTTP/1.1\r\nHost: h\r\n{line}\r\n\r\n")).err();
    for (line, expected) in [
        ("A : b", Some(BadField)),
        (" A: b", Some(Folded)),
        ("A: b\r\n c", Some(Folded)),
        ("A", Some(BadField)),
        (": b", Some(BadField)),
        ("A(b: c", Some(BadField)),
        ("A: b\rc", Some(BareLineEnd)),
        ("A: b\nC: d", Some(BareLineEnd)),
        ("A: b\0", Some(ControlByte)),
        ("A: \u{b}b", Some(ControlByte)),
        ("A: b\x7f", Some(ControlByte)),
        ("A: caf\u{e9}", None),
        ("Host: h", Some(BadHost)),
        ("host: other", Some(BadHost)),
    ] {
        assert_eq!(with_line(line), expected, "{line:?}");
    }
    for (text, expected) in [
        ("GET / HTTP/1.1\r\n\r\n", Some(BadHost)),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", Some(BadHost)),
        ("GET / HTTP/1.1\r\nHost: u@h\r\n\r\n", Some(BadHost)),
        ("GET / HTTP/1.1\r\nHost: h:080\r\n\r\n", None),
        ("GET / HTTP/1.1\r\nHost: h:99999\r\n\r\n", Some(BadHost)),
        ("GET / HTTP/1.0\r\n\r\n", None),
        ("GET  / HTTP/1.1\r\nHost: h\r\n\r\n", Some(BadStartLine)),
        ("GET / HTTP/1.1 \r\nHost: h\r\n\r\n", Some(BadStartLine)),
        ("GET /\tx HTTP/1.1\r\nHost: h\r\n\r\n", Some(BadStartLine)),
        ("G@T / HTTP/1.1\r\nHost: h\r\n\r\n", Some(BadStartLine)),
        ("GET / HTTP/1.7\r\nHost: h\r\n\r\n", None),
        ("GET / HTTP/2.0\r\nHost: h\r\n\r\n", Some(BadVersion)),
        ("GET / http/1.1\r\nHost: h\r\n\r\n", Some(BadStartLine)),
        ("GET /\r\n\r\n", Some(BadStartLine)),
        ("\r\n\r\n\r\nGET / HTTP/1.0\r\n\r\n", Some(BadStartLine)),
        ("\x16\x03\x01\x02\0\x01\0\x01", Some(ControlByte)),
    ] {
        assert_eq!(request(text).err(), expected, "{text:?}");
    }
}

#[test]
fn a_host_that_the_target_repeats_is_judged_with_it() {
    for (authority, is_good) in [
        ("h", true),
        ("h:80", true),
        ("[::1]:8", true),
        ("u@h", false),
        ("h:99999", false),
        ("h:0", false),
        ("[h]", false),
    ] {
        for end in ["/", "", "?q"] {
            let text = format!("GET http://{authority}{end} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
            let target = request(&text).and_then(|request| Target::within(&request, Scheme::Http));
            assert_eq!(target.is_ok(), is_good, "{text:?}: {target:?}");
        }
    }
    // What the target goes on with behind the authority is not the host's.
    for host in ["a/b", "a?b", "a/"] {
        let text = format!("GET http://a/b?b HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert_eq!(request(&text).err(), Some(MessageError::BadHost), "{text:?}");
    }
}

#[test]
fn lines_are_written_in_the_usual_way_whatever_way_they_came() {
    let text =
        "GET / HTTP/1.1\r\nHost: h\r\nA: 1\r\nGone: x\r\nB:2\r\nC: 3\r\nD:\t4 \r\nE:\r\nF: \r\nG: 7\r\n\r\n";
    let mut head = request(text).unwrap();
    head.fields.remove("gone");
    head.fields.push("Via", "1.1 edge");
    for mut head in [head.clone(), Request { fields: head.fields.clone_with_room(1, 1), ..head }] {
        head.fields.push("Z", "");
        let mut out = Vec::new();
        head.write_to(&mut out);
        let wanted = "GET / HTTP/1.1\r\nHost: h\r\nA: 1\r\nB: 2\r\nC: 3\r\nD: 4\r\nE: \r\nF: \r\nG: 7\r\nVia: 1.1 edge\r\n\
                      Z: \r\n\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), wanted);
    }
}

#[test]
fn a_response_head_is_read_with_what_servers_may_do() {
    let head = response("HTTP/1.1 200 All is well\nA: b\r\nC: d\n\n").unwrap();
    let mut out = Vec::new();
    head.write_to(&mut out);
    assert_eq!(out, b"HTTP/1.1 200 All is well\r\nA: b\r\nC: d\r\n\r\n", "a bare LF never leaves us");
    assert_eq!(response("HTTP/1.0 404\r\n\r\n").unwrap().status, 404);
    for (text, expected) in [
        ("HTTP/1.1 20 OK\r\n\r\n", MessageError::BadStartLine),
        ("HTTP/1.1 099 OK\r\n\r\n", MessageError::BadStartLine),
        ("HTTP/1.1 200OK\r\n\r\n", MessageError::BadStartLine),
        ("HTTP/1.1  200 OK\r\n\r\n", MessageError::BadStartLine),
        ("ICY 200 OK\r\n\r\n", MessageError::BadStartLine),
        ("HTTP/3.0 200 OK\r\n\r\n", MessageError::BadVersion),
        ("HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n", MessageError::Folded),
        ("HTTP/1.1 200 OK\r\nA : b\r\n\r\n", MessageError::BadField),
    ] {
        assert_eq!(response(text).err(), Some(expected), "{text:?}");
    }
}

#[test]
fn endless_heads_are_refused_where_they_pass_their_bound() {
    let long_target = format!("GET /{} HTTP/1.0\r\n\r\n", "a".repeat(9000));
    assert_eq!(read(&[long_target.as_bytes()], Sender::Client), [Read::Broken(MessageError::TargetTooLong)]);
    let many = format!("GET / HTTP/1.0\r\n{}\r\n", "A: b\r\n".repeat(101));
    assert_eq!(read(&[many.as_bytes()], Sender::Client), [Read::Broken(MessageError::TooLong)]);
    let endless = format!("GET / HTTP/1.0\r\nA: {}", "b".repeat(MAX_HEAD));
    for size in [1, 7, 1000, endless.len()] {
        let pieces: Vec<_> = endless.as_bytes().chunks(size).collect();
        assert_eq!(read(&pieces, Sender::Client), [Read::Broken(MessageError::TooLong)], "pieces of {size}");
    }
    assert_eq!(error("GET / HTTP/1.0\r\nA: b\r\n\r\n", Sender::Client), None);
}

#[test]
fn a_bare_line_feed_hides_no_host_and_is_never_forwarded() {
    for text in ["GET / HTTP/1.1\nHost: web.example\n\n", "GET / HTTP/1.1\r\nA: b\nHost: web.example\r\n\r\n"]
    {
        // Rules about the host apply, as servers read it, too.
        let Head::Request(found) = request_head(text.as_bytes()) else { panic!("{text:?} has a host") };
        assert_eq!(found.authority.unwrap().host.to_string(), "web.example");
        assert_eq!(request(text).err(), Some(MessageError::BareLineEnd), "{text:?}");
        agree(text.as_bytes());
    }
}

/// A line of a head with one of the ends that occur.
fn line() -> impl Strategy<Value = String> {
    let text = prop_oneof![
        4 => "(Host|host|A|Content-Length|X-Y): ?(h|web\\.example:8080|\\[::1\\]|192\\.0\\.2\\.1|u@h|127\\.1|[ -~]{0,6})",
        1 => "[ -~\t]{0,8}",
    ];
    (text, prop::sample::select(vec!["\r\n", "\r\n", "\r\n", "\n", "\r"])).prop_map(|(text, end)| text + end)
}

proptest! {
    #[test]
    fn both_readers_of_heads_agree(
        method in prop::sample::select(vec!["GET", "POST", "CONNECT", "OPTIONS", "M-SEARCH", "get"]),
        target in prop_oneof![
            "/[a-z?#%]{0,5}", "http://(h|u@h|web\\.example:81|127\\.1)(/x|\\?y|#z)?", "(ftp|https)://h/",
            prop::sample::select(vec!["*", "h:443", "h", ""]).prop_map(str::to_owned),
        ],
        version in prop::sample::select(vec!["HTTP/1.1", "HTTP/1.0", "HTTP/1.7", "HTTP/2.0"]),
        first_end in prop::sample::select(vec!["\r\n", "\r\n", "\n"]),
        lines in prop::collection::vec(line(), 0..5),
        last in prop::sample::select(vec!["\r\n", "\r\n", "\n", "\r\nbody", ""]),
    ) {
        agree(format!("{method} {target} {version}{first_end}{}{last}", lines.concat()).as_bytes());
    }

    #[test]
    fn any_bytes_are_survived_and_split_anyhow(
        bytes in prop::collection::vec(prop_oneof![
            4 => prop::sample::select(b"GET / HTTP/1.1\r\nhost: a\r\n:chunked,0123456789abcdef;\t\"".to_vec()),
            1 => any::<u8>(),
        ], 0..200),
        cut in 0_usize..200,
    ) {
        for sender in [Sender::Client, Sender::Server] {
            let (first, second) = bytes.split_at(cut.min(bytes.len()));
            prop_assert_eq!(read(&[&bytes], sender), read(&[first, second], sender));
        }
    }
}
