//! First bytes of a connection: ClientHello and HTTP request heads. The hellos in `vectors/` were captured on
//! loopback from curl 7.88 and openssl s_client 3.0 (OpenSSL 3.0.19) and from Go 1.26 (with an ML-KEM key share).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::flow::Host;
use sidetrack_core::http::head::{self, Head, HeadError, TargetForm, request_head};
use sidetrack_core::http::sni::{self, ClientHello, Hello, HelloError, client_hello};
use sidetrack_core::http::{How, SNIFF_MAX, Sniff, sniff};

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    data_encoding::HEXLOWER.decode(&digits).unwrap()
}

macro_rules! captured {
    ($name:literal) => {
        unhex(include_str!(concat!("vectors/client_hello_", $name, ".hex")))
    };
}

fn hello(name: Option<&str>, alpn: &[&str]) -> ClientHello {
    ClientHello::Hello(Hello {
        server_name: name.map(|name| name.parse().unwrap()),
        alpn: alpn.iter().map(|protocol| protocol.as_bytes().to_vec()).collect(),
        ech: false,
    })
}

/// Every captured hello, and its content.
fn captures() -> Vec<(Vec<u8>, ClientHello)> {
    let web = ["h2", "http/1.1"];
    vec![
        (captured!("curl"), hello(Some("www.example.com"), &web)),
        (captured!("curl_ip"), hello(None, &web)),
        (captured!("openssl"), hello(Some("db.example.nl"), &web)),
        (captured!("openssl_nosni"), hello(None, &[])),
        (captured!("go"), hello(Some("big.example.nl"), &web)),
    ]
}

/// The handshake message of a capture, cut into records of `size` bytes.
fn in_records(capture: &[u8], size: usize) -> Vec<u8> {
    let record = |part: &[u8]| {
        let length = u16::try_from(part.len()).unwrap().to_be_bytes();
        [&[22, 3, 1], &length[..], part].concat()
    };
    capture[5..].chunks(size).flat_map(record).collect()
}

/// A hello with these extensions, in one record.
fn hello_with(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, data) in extensions {
        list.extend_from_slice(&kind.to_be_bytes());
        list.extend_from_slice(&vector16(data));
    }
    let mut body = vec![3, 3];
    body.extend_from_slice(&[7; 32]);
    body.extend_from_slice(&[0, 0, 2, 0x13, 0x01, 1, 0]);
    body.extend_from_slice(&vector16(&list));
    in_one_record(&body)
}

fn in_one_record(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let message = [&[1], &length[1..], body].concat();
    [&[22, 3, 1][..], &vector16(&message)].concat()
}

fn vector16(data: &[u8]) -> Vec<u8> {
    [&u16::try_from(data.len()).unwrap().to_be_bytes()[..], data].concat()
}

fn name_entry(name: &[u8]) -> Vec<u8> {
    [&[0][..], &vector16(name)].concat()
}

fn server_name(name: &[u8]) -> (u16, Vec<u8>) {
    (0, vector16(&name_entry(name)))
}

#[test]
fn captured_hellos_say_what_was_asked() {
    for (bytes, expected) in captures() {
        assert_eq!(client_hello(&bytes), expected);
        for end in 0..bytes.len() {
            assert_eq!(client_hello(&bytes[..end]), ClientHello::Incomplete, "{end} of {}", bytes.len());
        }
        assert_eq!(
            client_hello(&[&bytes[..], b"early data"].concat()),
            expected,
            "later bytes do not matter"
        );
    }
    let (longest, _) = captures().into_iter().max_by_key(|(bytes, _)| bytes.len()).unwrap();
    assert!(longest.len() > 1460, "one capture needs two segments");
}

#[test]
fn a_hello_cut_over_records_says_the_same() {
    for (bytes, expected) in captures() {
        for size in [1, 2, 3, 4, 5, 7, 64, 100, bytes.len() - 6] {
            let cut = in_records(&bytes, size);
            assert_eq!(client_hello(&cut), expected, "records of {size}");
            for end in (0..cut.len()).step_by(11).chain([cut.len() - 1]) {
                assert_eq!(client_hello(&cut[..end]), ClientHello::Incomplete, "{end} in records of {size}");
            }
        }
    }
}

#[test]
fn other_protocols_are_known_at_their_first_odd_byte() {
    for (bytes, odd) in [
        (&b"\x15\x03\x01\x00\x02\x02\x28"[..], 1),
        (b"\x16\x02", 2),
        (b"\x16\x03\x05", 3),
        (b"\x80\x2e\x01\x03\x01", 1),
        (b"GET / HTTP/1.1\r\n", 1),
        (b"SSH-2.0-x", 1),
        (b"\0", 1),
    ] {
        assert_eq!(client_hello(&bytes[..odd]), ClientHello::NotTls, "{bytes:?}");
        assert_eq!(client_hello(&bytes[..odd - 1]), ClientHello::Incomplete, "{bytes:?}");
        assert_eq!(client_hello(bytes), ClientHello::NotTls, "{bytes:?}");
    }
}

#[test]
fn broken_hellos_are_named() {
    use HelloError::{BadLength, BadName, BadRecord, NotClientHello, Repeated, TooLong};
    let name = || server_name(b"a.example");
    let two_names = vector16(&[name_entry(b"a.example"), name_entry(b"b.example")].concat());
    let cases: Vec<(Vec<u8>, HelloError)> = vec![
        (b"\x16\x03\x01\x00\x00".to_vec(), BadRecord),
        (b"\x16\x03\x01\x40\x01".to_vec(), BadRecord),
        (b"\x16\x03\x01\x00\x01\x01\x17".to_vec(), BadRecord),
        (b"\x16\x03\x01\x00\x04\x02".to_vec(), NotClientHello),
        (b"\x16\x03\x01\x40\x00\x01\x00\x40\x01".to_vec(), TooLong),
        (in_one_record(&[]), BadLength),
        (in_one_record(&[3; 34]), BadLength),
        (hello_with(&[name(), name()]), Repeated),
        (hello_with(&[(0, two_names)]), Repeated),
        (hello_with(&[(0, vec![])]), BadLength),
        (hello_with(&[(0, vec![0, 0])]), BadLength),
        (hello_with(&[(0, [vector16(&name_entry(b"a")), vec![0]].concat())]), BadLength),
        (hello_with(&[(0, vector16(&[1, 0, 1, b'a']))]), BadName),
        (hello_with(&[server_name(b"")]), BadName),
        (hello_with(&[server_name(b"a\0.example")]), BadName),
        (hello_with(&[server_name(b"a..example")]), BadName),
        (hello_with(&[server_name("ä.example".as_bytes())]), BadName),
        (hello_with(&[server_name(b"evil.example/ok.example")]), BadName),
        (hello_with(&[(16, vec![0, 0])]), BadLength),
        (hello_with(&[(16, vec![0, 1, 0])]), BadLength),
        (hello_with(&[(16, vec![0, 2, 2, b'h'])]), BadLength),
        (hello_with(&[(16, vec![0, 2, 1, b'h']), (16, vec![0, 2, 1, b'h'])]), Repeated),
        (hello_with(&[(0xfe0d, vec![]), (0xfe0d, vec![])]), Repeated),
    ];
    for (bytes, error) in cases {
        assert_eq!(client_hello(&bytes), ClientHello::Malformed(error), "{bytes:02x?}");
        assert_eq!(sniff(&bytes), Sniff::None);
    }
}

#[test]
fn lengths_inside_must_fit_exactly() {
    let whole = hello_with(&[server_name(b"a.example")]);
    let body = &whole[9..];
    let long_session_id = [&body[..34], &[33], &[7; 33], &body[35..]].concat();
    for body in [[body, &[0]].concat(), long_session_id] {
        assert_eq!(client_hello(&in_one_record(&body)), ClientHello::Malformed(HelloError::BadLength));
    }
    let extensions_length = 5 + 4 + 2 + 32 + 1 + 2 + 2 + 1 + 1;
    for (offset, delta) in
        [(extensions_length + 1, 1), (extensions_length + 1, 0xff), (45, 1), (48, 1), (43, 33)]
    {
        let mut bytes = whole.clone();
        bytes[offset] = bytes[offset].wrapping_add(delta);
        assert_eq!(client_hello(&bytes), ClientHello::Malformed(HelloError::BadLength), "at {offset}");
    }
}

#[test]
fn names_that_are_no_names_and_the_ech_flag() {
    for literal in [&b"192.0.2.1"[..], b"2001:db8::1"] {
        assert_eq!(client_hello(&hello_with(&[server_name(literal)])), hello(None, &[]));
    }
    assert_eq!(client_hello(&hello_with(&[server_name(b"A.Example.")])), hello(Some("a.example"), &[]));
    assert_eq!(
        client_hello(&hello_with(&[server_name(b"_dmarc.a-b.example")])),
        hello(Some("_dmarc.a-b.example"), &[])
    );
    let bytes = hello_with(&[(0x0a0a, vec![]), (0xfe0d, vec![0; 9]), server_name(b"cover.example")]);
    let ClientHello::Hello(read) = client_hello(&bytes) else { panic!("a hello") };
    assert!(read.ech);
    assert_eq!(read.server_name.unwrap().as_str(), "cover.example");
}

#[test]
fn an_endless_hello_ends() {
    let mut bytes =
        b"\x16\x03\x01\x00\x01\x01\x16\x03\x01\x00\x01\x00\x16\x03\x01\x00\x01\x40\x16\x03\x01\x00\x01\x00"
            .to_vec();
    while bytes.len() < sni::MAX_BYTES {
        if bytes.len().is_multiple_of(97) || bytes.len() + 6 >= sni::MAX_BYTES {
            assert_eq!(client_hello(&bytes), ClientHello::Incomplete);
        }
        bytes.extend_from_slice(b"\x16\x03\x01\x00\x01\x00");
    }
    assert_eq!(client_hello(&bytes), ClientHello::Malformed(HelloError::TooLong));
    assert_eq!(sniff(&bytes), Sniff::None);
}

fn http_host(name: &str) -> Sniff {
    Sniff::Host { name: name.parse().unwrap(), how: How::HttpHost }
}

#[test]
fn request_heads_say_who_is_asked_for() {
    for (head, expected) in [
        ("GET /a?b HTTP/1.1\r\nHost: www.example.com:8080\r\nAccept: */*\r\n\r\n", "www.example.com"),
        ("GET / HTTP/1.1\r\nAccept: */*\r\nhOSt:\tWWW.Example.COM. \r\n\r\n", "www.example.com"),
        ("CONNECT db.example.nl:443 HTTP/1.1\r\nHost: other.example\r\n\r\n", "db.example.nl"),
        ("GET http://a.example:80/x?http://b.example/ HTTP/1.1\r\nHost: c.example\r\n\r\n", "a.example"),
        ("GET HTTP://a.example?x HTTP/1.0\r\n\r\n", "a.example"),
        ("GET http://a.example HTTP/1.1\r\nHost: a.example\r\n\r\n", "a.example"),
        ("OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n", "a.example"),
        ("VERSION-CONTROL /d HTTP/1.1\r\nHost: a.example:\r\n\r\n", "a.example"),
        ("M-SEARCH * HTTP/1.1\r\nHOST: a.example:1900\r\n\r\n", "a.example"),
    ] {
        let bytes = head.as_bytes();
        assert_eq!(sniff(bytes), http_host(expected), "{head}");
        for end in 0..bytes.len() {
            assert_eq!(sniff(&bytes[..end]), Sniff::NeedMore, "{end} of {head}");
        }
        let Head::Request(request) = request_head(&[bytes, b"body"].concat()) else { panic!("{head}") };
        assert_eq!(request.length, bytes.len());
    }
}

#[test]
fn forms_and_ports_are_told_apart() {
    let read = |head: &str| match request_head(head.as_bytes()) {
        Head::Request(read) => {
            (read.form, read.authority.map(|authority| (authority.host.to_string(), authority.port)))
        }
        other => panic!("{head}: {other:?}"),
    };
    let some = |host: &str, port| Some((host.to_owned(), port));
    assert_eq!(read("GET / HTTP/1.0\r\n\r\n"), (TargetForm::Origin, None));
    assert_eq!(read("GET / HTTP/1.1\r\nHost:\r\n\r\n"), (TargetForm::Origin, None));
    assert_eq!(read("OPTIONS * HTTP/1.1\r\nHost: a:81\r\n\r\n"), (TargetForm::Asterisk, some("a", Some(81))));
    assert_eq!(read("GET / HTTP/1.1\r\nHost: [::1]:82\r\n\r\n"), (TargetForm::Origin, some("::1", Some(82))));
    assert_eq!(
        read("GET / HTTP/1.1\r\nHost: [::ffff:192.0.2.1]\r\n\r\n"),
        (TargetForm::Origin, some("192.0.2.1", None))
    );
    assert_eq!(
        read("CONNECT [2001:db8::1]:443 HTTP/1.1\r\n\r\n"),
        (TargetForm::Authority, some("2001:db8::1", Some(443)))
    );
    assert_eq!(read("GET ws://a:/ HTTP/1.1\r\n\r\n"), (TargetForm::Absolute, some("a", None)));
    let Head::Request(read) = request_head(b"GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n") else { panic!() };
    assert!(matches!(read.authority.unwrap().host, Host::Ip(_)));
    assert_eq!(sniff(b"GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n"), Sniff::None);
}

#[test]
fn broken_heads_are_named() {
    use HeadError::{BadAuthority, BadLine, BadTarget, RepeatedHost};
    for (head, error) in [
        ("GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n", RepeatedHost),
        ("GET / HTTP/1.1\r\nHost: a.example\r\nhost: a.example\r\n\r\n", RepeatedHost),
        ("GET http://a.example/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", RepeatedHost),
        ("GET / HTTP/1.1\r\nHost : a.example\r\n\r\n", BadLine),
        ("GET / HTTP/1.1\r\nA: b\r\n Host: a.example\r\n\r\n", BadLine),
        ("GET / HTTP/1.1\r\nHost: a\0.example\r\n\r\n", BadLine),
        ("GET / HTTP/1.9\r\nHost: a.example\r\n\r\n", BadLine),
        ("GET / HTTP/1.1\r\nHost: a.example, b.example\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: a.example/b.example\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: user@a.example\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: a.example:http\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: a.example:65536\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: a.example:0\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: a.example:+80\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: [::1]a\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: ::1\r\n\r\n", BadAuthority),
        ("GET / HTTP/1.1\r\nHost: .\r\n\r\n", BadAuthority),
        ("GET http://user:pw@a.example/ HTTP/1.1\r\n\r\n", BadAuthority),
        ("GET http:///x HTTP/1.1\r\n\r\n", BadAuthority),
        ("GET a.example HTTP/1.1\r\n\r\n", BadTarget),
        ("CONNECT a.example HTTP/1.1\r\n\r\n", BadTarget),
        ("CONNECT /x HTTP/1.1\r\n\r\n", BadAuthority),
    ] {
        assert_eq!(request_head(head.as_bytes()), Head::Malformed(error), "{head}");
        assert_eq!(sniff(head.as_bytes()), Sniff::None, "{head}");
    }
}

#[test]
fn unknown_protocols_are_let_go_at_their_first_odd_byte() {
    for (bytes, odd) in [
        (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], 5),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 12),
        (b"\0\0\0\x08\x04\xd2\x16\x2f", 1),
        (b"get key\r\n", 1),
        (b"*1\r\n$4\r\nPING\r\n", 1),
        (b"PING\r\n", 5),
        (b"CONNECT\naccept-version:1.2\n", 8),
        (b"CONNECT {\"verbose\":false}\r\n", 9),
        (b"GET /\r\n", 6),
        (b"GET  / HTTP/1.1\r\n", 5),
        (b"GET / HTCPCP/1.0\r\n", 9),
        (b"INVITE sip:a@b SIP/2.0\r\n", 16),
        (b" GET / HTTP/1.1\r\n", 1),
        (b"\r\nGET / HTTP/1.1\r\n", 1),
        (b"\x05\x01\x00", 1),
        (b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", 33),
    ] {
        let text = String::from_utf8_lossy(bytes);
        assert_eq!(sniff(&bytes[..odd - 1]), Sniff::NeedMore, "{text}");
        assert_eq!(sniff(&bytes[..odd]), Sniff::None, "{text}");
        assert_eq!(sniff(bytes), Sniff::None, "{text}");
    }
}

#[test]
fn heads_without_end_end() {
    for start in ["GET /", "GET / HTTP/1.1\r\nCookie: "] {
        let mut bytes = start.as_bytes().to_vec();
        bytes.resize(head::MAX_HEAD - 1, b'a');
        assert_eq!(request_head(&bytes), Head::Incomplete);
        bytes.push(b'a');
        assert_eq!(request_head(&bytes), Head::Malformed(HeadError::TooLong));
    }
    let many = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(head::MAX_FIELDS));
    assert_eq!(request_head(many.as_bytes()), Head::Malformed(HeadError::TooLong));
    let fit = format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(head::MAX_FIELDS - 1));
    assert_eq!(sniff(fit.as_bytes()), http_host("a"));
}

/// Checks that later bytes never change a decision, and that a decision is made within the bound.
fn check_steady(bytes: &[u8]) {
    let whole = sniff(bytes);
    let first = (0..=bytes.len()).find(|end| sniff(&bytes[..*end]) != Sniff::NeedMore);
    match first {
        None => assert!(bytes.len() < SNIFF_MAX),
        Some(end) => assert_eq!(sniff(&bytes[..end]), whole, "decided at {end}"),
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check_steady(&bytes);
        check_steady(&[b"\x16\x03\x01", &bytes[..]].concat());
        check_steady(&[b"GET / HTTP/1.1\r\nHost: ", &bytes[..]].concat());
    }

    #[test]
    fn mutated_hellos_never_panic(
        which in 0usize..5,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        size in 1usize..600,
    ) {
        let (mut bytes, _) = captures().swap_remove(which);
        for (index, value) in &changes {
            let index = index.index(bytes.len());
            bytes[index] = *value;
        }
        let (plain, cut) = (client_hello(&bytes), client_hello(&in_records(&bytes, size)));
        // Cutting writes new record headers, so the original one does not matter.
        if let ClientHello::Hello(_) = plain {
            prop_assert_eq!(&plain, &cut);
        }
        let _ = sniff(&bytes);
    }

    #[test]
    fn mutated_heads_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = b"GET http://a.example:80/x HTTP/1.1\r\nHost: [::1]:80\r\nAccept: */*\r\n\r\n".to_vec();
        for (index, value) in changes {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        check_steady(&bytes);
    }

    #[test]
    fn any_name_comes_back(name in "[a-z0-9_]([a-z0-9-]{0,20}[a-z0-9])?(\\.[a-z]([a-z0-9-]{0,20}[a-z])?){0,4}") {
        // A name whose last label is a number is not a host name.
        prop_assume!(name.parse::<sidetrack_core::flow::HostName>().is_ok());
        let tls = hello_with(&[(0x1a1a, vec![]), server_name(name.as_bytes())]);
        prop_assert_eq!(sniff(&tls), Sniff::Host { name: name.parse().unwrap(), how: How::Sni });
        let http = format!("GET / HTTP/1.1\r\nHost: {name}:8080\r\n\r\n");
        prop_assert_eq!(sniff(http.as_bytes()), http_host(&name));
    }
}
