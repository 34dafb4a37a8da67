//! HTTP CONNECT, client side.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::carrier::Credentials;
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::connect::{Client, Config, Input, Kind, MAX_FIELDS, MAX_HEAD, MAX_INTERIM, Output};
use sidetrack_core::time::Instant;
use std::time::Duration;

fn config(destination: &str) -> Config {
    Config {
        kind: Kind::Bytes,
        proxy: "gw.example:3128".parse().unwrap(),
        destination: destination.parse().unwrap(),
        credentials: None,
        initial_data: Vec::new(),
        timeout: Duration::from_millis(700),
    }
}

fn sent(config: Config) -> String {
    let mut client = Client::new(config, Instant::ZERO);
    let Some(Output::Send(bytes)) = client.poll() else { panic!("a request comes first") };
    assert_eq!(client.poll(), None);
    String::from_utf8(bytes).unwrap()
}

/// Returns the only output for these pieces of an answer, if there is one.
fn answered<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<Output> {
    answered_to(config("db.example.nl:5432"), pieces)
}

fn answered_to<'a>(config: Config, pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<Output> {
    let mut client = Client::new(config, Instant::ZERO);
    assert!(matches!(client.poll(), Some(Output::Send(_))));
    let mut result = None;
    for piece in pieces {
        client.handle(Instant::ZERO, Input::Bytes(piece));
        while let Some(output) = client.poll() {
            assert_eq!(result, None, "one result only");
            assert_eq!(client.deadline(), None);
            result = Some(output);
        }
    }
    result
}

fn failed(answer: &str) -> (EndReason, String) {
    match answered([answer.as_bytes()]) {
        Some(Output::Failed { reason, detail }) => (reason, detail),
        other => panic!("{answer}: {other:?}"),
    }
}

fn connected(leftover: &[u8]) -> Option<Output> {
    Some(Output::Connected { leftover: leftover.to_vec() })
}

#[test]
fn requests_as_they_go_on_the_wire() {
    assert_eq!(
        sent(config("db.example.nl:5432")),
        "CONNECT db.example.nl:5432 HTTP/1.1\r\nHost: db.example.nl:5432\r\n\r\n"
    );
    assert_eq!(
        sent(config("[2001:db8::1]:443")),
        "CONNECT [2001:db8::1]:443 HTTP/1.1\r\nHost: [2001:db8::1]:443\r\n\r\n"
    );
    // The example of RFC 7617 Sec. 2.
    let credentials = Credentials { user: "Aladdin".into(), password: "open sesame".into() };
    let optimistic = Config {
        credentials: Some(credentials),
        initial_data: b"first bytes".to_vec(),
        ..config("192.0.2.1:80")
    };
    assert_eq!(
        sent(optimistic),
        "CONNECT 192.0.2.1:80 HTTP/1.1\r\nHost: 192.0.2.1:80\r\n\
         Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\nfirst bytes"
    );
}

#[test]
fn what_http_cannot_express_is_refused_before_a_byte_is_sent() {
    let credentials = Some(Credentials { user: "a:b".into(), password: "c".into() });
    let mut client = Client::new(Config { credentials, ..config("a:1") }, Instant::ZERO);
    assert!(matches!(client.poll(), Some(Output::Failed { reason: EndReason::AuthFailed, .. })));
    for name in ["a,b", "a*b", "a;b", "a=b"] {
        let mut client = Client::new(config(&format!("{name}:1")), Instant::ZERO);
        assert!(
            matches!(client.poll(), Some(Output::Failed { reason: EndReason::BadRequest, .. })),
            "{name}"
        );
        assert_eq!((client.poll(), client.deadline()), (None, None));
    }
}

#[test]
fn any_2xx_opens_the_tunnel_however_it_is_split() {
    for head in [
        "HTTP/1.1 200 Connection established\r\n\r\n",
        "HTTP/1.0 200 OK\r\nVia: 1.1 gw\r\n\r\n",
        "HTTP/1.1 204 \r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 299 x\r\n\r\n",
    ] {
        for leftover in [&b""[..], b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\n"] {
            let stream = [head.as_bytes(), leftover].concat();
            assert_eq!(answered([&stream[..]]), connected(leftover), "{head}");
            for cut in 0..head.len() {
                assert_eq!(answered([&stream[..cut]]), None, "{cut} of {head}");
                assert_eq!(
                    answered([&stream[..cut], &stream[cut..]]),
                    connected(leftover),
                    "{cut} of {head}"
                );
            }
            assert_eq!(answered(head.as_bytes().chunks(1)), connected(b""));
        }
    }
}

fn datagrams(destination: &str) -> Config {
    Config { kind: Kind::Datagrams, ..config(destination) }
}

#[test]
fn connect_udp_is_an_upgrade_with_the_target_in_its_path() {
    // The example of RFC 9298 Sec. 3.2, with our proxy and path.
    assert_eq!(
        sent(datagrams("192.0.2.6:443")),
        "GET /.well-known/masque/udp/192.0.2.6/443/ HTTP/1.1\r\nHost: gw.example:3128\r\nConnection: Upgrade\r\n\
         Upgrade: connect-udp\r\nCapsule-Protocol: ?1\r\n\r\n"
    );
    let credentials = Some(Credentials { user: "Aladdin".into(), password: "open sesame".into() });
    let text =
        sent(Config { credentials, initial_data: b"\0\x03\0hi".to_vec(), ..datagrams("[2001:db8::42]:443") });
    assert!(text.starts_with("GET /.well-known/masque/udp/2001%3Adb8%3A%3A42/443/ HTTP/1.1\r\n"), "{text}");
    assert!(
        text.ends_with("Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\n\0\x03\0hi"),
        "{text}"
    );
    let mut client = Client::new(datagrams("a*b:1"), Instant::ZERO);
    assert!(matches!(client.poll(), Some(Output::Failed { reason: EndReason::BadRequest, .. })));
}

#[test]
fn connect_udp_is_open_after_a_switch_to_it_and_to_nothing_else() {
    let accept = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                  upgrade: Connect-UDP\r\nCapsule-Protocol: ?1\r\n\r\n";
    let stream = [accept.as_bytes(), b"\0\x03\0hi"].concat();
    for cut in 0..=stream.len() {
        let (one, other) = stream.split_at(cut);
        if let Some(Output::Connected { leftover }) = answered_to(datagrams("a:1"), [one]) {
            assert_eq!([&leftover[..], other].concat(), b"\0\x03\0hi");
        } else {
            assert_eq!(answered_to(datagrams("a:1"), [one, other]), connected(b"\0\x03\0hi"), "{cut}");
        }
    }
    for (answer, wanted, says) in [
        ("101 S\r\nUpgrade: websocket", EndReason::HopFailed, "without a request"),
        ("101 S\r\nUpgrade: connect-udp\r\nUpgrade: connect-udp", EndReason::HopFailed, "without a request"),
        ("101 S", EndReason::HopFailed, "without a request"),
        ("200 OK", EndReason::HopFailed, "does not serve CONNECT-UDP"),
        ("404 Not Found", EndReason::HopFailed, "does not serve CONNECT-UDP"),
        ("501 Not Implemented", EndReason::HopFailed, "does not serve CONNECT-UDP"),
        ("400 Bad Request", EndReason::HopFailed, "400 Bad Request"),
        ("407 No\r\nProxy-Authenticate: Basic", EndReason::AuthFailed, "it asks for Basic"),
        ("403 Forbidden", EndReason::HopFailed, "403 Forbidden"),
        ("502 Bad Gateway\r\nProxy-Status: p; error=dns_error", EndReason::Dns, "dns_error"),
        ("504 Late", EndReason::ConnectTimeout, "504"),
    ] {
        match answered_to(datagrams("a:1"), [format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes()]) {
            Some(Output::Failed { reason, detail }) => {
                assert!(reason == wanted && detail.contains(says), "{answer}: {reason:?} {detail}");
            }
            other => panic!("{answer}: {other:?}"),
        }
    }
    assert!(failed("HTTP/1.1 101 S\r\nUpgrade: connect-udp\r\n\r\n").1.contains("without a request"));
}

#[test]
fn refusals_keep_status_and_words() {
    use EndReason::{AuthFailed, ConnectTimeout, Dns, HopFailed, Refused, Unreachable};
    for (answer, reason, said) in [
        ("407 Auth\r\nProxy-Authenticate: Negotiate\r\n", AuthFailed, "407 Auth: it asks for Negotiate"),
        ("407 \r\n", AuthFailed, "407: it asks for no method"),
        ("403 Forbidden\r\n", HopFailed, "403 Forbidden"),
        ("400 Bad Request\r\n", HopFailed, "400"),
        ("302 Found\r\nLocation: http://login/\r\n", HopFailed, "302 Found"),
        ("502 Bad Gateway\r\n", Unreachable, "502 Bad Gateway"),
        ("503 Service Unavailable\r\n", Unreachable, "503"),
        ("504 Gateway Timeout\r\n", ConnectTimeout, "504"),
        ("408 Request Timeout\r\n", ConnectTimeout, "408"),
        (
            "502 x\r\nProxy-Status: gw.example; error=connection_refused; details=\"no\"\r\n",
            Refused,
            "gw.example",
        ),
        ("502 x\r\nproxy-status: a, gw;error=dns_error;rcode=NXDOMAIN\r\n", Dns, "NXDOMAIN"),
        ("502 x\r\nProxy-Status: gw; error=connection_timeout\r\n", ConnectTimeout, "502 x"),
        ("502 x\r\nProxy-Status: gw; error=something_new\r\n", Unreachable, "something_new"),
        ("503 x\r\nX-Squid-Error: ERR_DNS_FAIL 0\r\n", Dns, "ERR_DNS_FAIL"),
        ("503 x\r\nX-Squid-Error: ERR_CONNECT_FAIL 111\r\n", Refused, "ERR_CONNECT_FAIL 111"),
        ("503 x\r\nX-Squid-Error: ERR_CONNECT_FAIL 113\r\n", Unreachable, "113"),
        ("403 x\r\nX-Squid-Error: ERR_ACCESS_DENIED 0\r\n", HopFailed, "ERR_ACCESS_DENIED"),
        ("600 Odd\r\n", HopFailed, "600"),
        // Answers of Squid 5.7 and tinyproxy 1.11.1 on loopback: closed port, unknown name, closed port.
        (
            "503 Service Unavailable\r\nServer: squid/5.7\r\nX-Squid-Error: ERR_CONNECT_FAIL 111\r\n",
            Refused,
            "111",
        ),
        (
            "500 Internal Server Error\r\nX-Squid-Error: ERR_CANNOT_FORWARD 0\r\n",
            Unreachable,
            "CANNOT_FORWARD",
        ),
        ("500 Unable to connect\r\nServer: tinyproxy/1.11.1\r\n", Unreachable, "500 Unable to connect"),
        ("500 Internal Server Error\r\n", HopFailed, "500"),
    ] {
        let (found, detail) = failed(&format!("HTTP/1.1 {answer}\r\n"));
        assert_eq!(found, reason, "{answer}");
        assert!(detail.contains(said), "'{said}' in '{detail}'");
    }
}

#[test]
fn details_are_fit_for_a_log() {
    let (_, detail) = failed(&format!("HTTP/1.1 500 {}\r\n\r\n", "x".repeat(5000)));
    assert!(detail.len() < 200, "{}", detail.len());
    let (_, detail) = failed("HTTP/1.1 502 x\r\nProxy-Status: a\tb\u{1b}[31mred\r\n\r\n");
    assert!(detail.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{detail:?}");
}

#[test]
fn what_is_no_answer_fails_at_once() {
    for (answer, said) in [
        (&b"\x05\xff"[..], "does not speak HTTP/1"),
        (b"\x15\x03\x01\0\x02\x02\x28", "does not speak HTTP/1"),
        (b"SSH-2.0-x", "does not speak HTTP/1"),
        (b"HTTP/2", "does not speak HTTP/1"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nbad field\r\n\r\n", "malformed"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "switched protocols"),
    ] {
        for size in [1, answer.len()] {
            let Some(Output::Failed { reason, detail }) = answered(answer.chunks(size)) else {
                panic!("{answer:?}");
            };
            assert_eq!(reason, EndReason::HopFailed);
            assert!(detail.contains(said), "'{said}' in '{detail}'");
        }
    }
}

#[test]
fn answers_without_end_end() {
    let interim = "HTTP/1.1 102 Processing\r\n\r\n";
    let last = "HTTP/1.1 200 OK\r\n\r\n";
    assert_eq!(answered([(interim.repeat(MAX_INTERIM) + last).as_bytes()]), connected(b""));
    assert!(failed(&interim.repeat(MAX_INTERIM + 1)).1.contains("without end"));
    let with_fields = |count| format!("HTTP/1.1 200 OK\r\n{}\r\n", "A: b\r\n".repeat(count));
    assert_eq!(answered([with_fields(MAX_FIELDS).as_bytes()]), connected(b""));
    assert!(failed(&with_fields(MAX_FIELDS + 1)).1.contains("fields"));
    let of_length = |length: usize| {
        let rest = "HTTP/1.1 200 OK\r\nA: \r\n\r\n".len();
        format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "b".repeat(length - rest))
    };
    for size in [61, 1000, usize::MAX] {
        assert_eq!(answered(of_length(MAX_HEAD - 1).as_bytes().chunks(size)), connected(b""));
        let Some(Output::Failed { detail, .. }) = answered(of_length(MAX_HEAD + 1).as_bytes().chunks(size))
        else {
            panic!("too long");
        };
        assert!(detail.contains("16 KiB"), "{detail}");
    }
}

#[test]
fn silence_and_a_close_have_their_reasons() {
    let mut client = Client::new(config("a:1"), Instant::from_millis(100));
    client.poll();
    assert_eq!(client.deadline(), Some(Instant::from_millis(800)));
    client.handle(Instant::from_millis(799), Input::Tick);
    assert_eq!(client.poll(), None);
    client.handle(Instant::from_millis(800), Input::Tick);
    let Some(Output::Failed { reason: EndReason::ConnectTimeout, detail }) = client.poll() else { panic!() };
    assert!(detail.contains("700 ms"), "{detail}");
    client.handle(Instant::from_millis(800), Input::Bytes(b"HTTP/1.1 200 OK\r\n\r\n"));
    client.handle(Instant::from_millis(801), Input::End);
    assert_eq!((client.poll(), client.deadline()), (None, None));

    let mut client = Client::new(config("a:1"), Instant::ZERO);
    client.poll();
    client.handle(Instant::ZERO, Input::Bytes(b"HTTP/1.1 20"));
    client.handle(Instant::ZERO, Input::End);
    assert!(matches!(client.poll(), Some(Output::Failed { reason: EndReason::HopFailed, .. })));
}

proptest! {
    #[test]
    fn any_split_of_anything_gives_the_same_result(
        start in prop::sample::select(vec!["", "HTTP/1.1 ", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 100 x\r\n\r\nHTTP/1.1 "]),
        tail in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"\r\n 2:AHTP/1.".to_vec())], 0..80),
        size in 1usize..40,
    ) {
        let stream = [start.as_bytes(), &tail].concat();
        let whole = answered([&stream[..]]);
        let pieces = answered(stream.chunks(size));
        match (whole, pieces) {
            (Some(Output::Connected { leftover }), Some(Output::Connected { leftover: begun })) => {
                prop_assert!(leftover.starts_with(&begun));
            }
            (whole, pieces) => prop_assert_eq!(whole, pieces),
        }
    }
}
