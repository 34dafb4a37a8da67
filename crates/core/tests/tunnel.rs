//! The messages of a tunnel: golden bytes, every split, strictness, and both directions.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::flow::{Destination, EndReason, HostName};
use sidetrack_core::tunnel::{
    BODY_MAX, DETAIL_MAX, Greeting, MessageError, Parsed, Reply, Request, datagram,
};
use std::fmt::Debug;

/// Parses with more bytes behind, and checks that every proper prefix is incomplete.
fn message<T: Debug + PartialEq>(parse: fn(&[u8]) -> Parsed<T>, bytes: &[u8]) -> T {
    for end in 0..bytes.len() {
        assert_eq!(parse(&bytes[..end]), Parsed::Incomplete, "{end} of {bytes:02x?}");
    }
    match parse(&[bytes, b"GET / HTTP/1.1\r\n"].concat()) {
        Parsed::Message(message, consumed) => {
            assert_eq!(consumed, bytes.len());
            message
        }
        other => panic!("{bytes:02x?}: {other:?}"),
    }
}

fn request(host: &str) -> Request {
    Request::to(host.parse().unwrap())
}

#[test]
fn requests_have_these_bytes() {
    let full = Request {
        host: Some("web.example".parse().unwrap()),
        client: Some("10.0.0.5:4660".parse().unwrap()),
        metadata: vec![(1000, "a".into()), (1, String::new())],
        ..request("192.0.2.1:80")
    };
    let datagrams = Request { datagrams: Some(0x1234), ..request("192.0.2.1:80") };
    let golden: [(Request, &[u8]); 5] = [
        (datagrams, b"\x01\0\x15\x80\0\x07\x01\0\x50\xc0\0\x02\x01\x81\0\x08\0\0\0\0\0\0\x12\x34"),
        (request("192.0.2.1:80"), b"\x01\0\x0a\x80\0\x07\x01\0\x50\xc0\0\x02\x01"),
        (
            request("[2001:db8::1]:443"),
            b"\x01\0\x16\x80\0\x13\x04\x01\xbb\x20\x01\x0d\xb8\0\0\0\0\0\0\0\0\0\0\0\x01",
        ),
        (request("db.example:5432"), b"\x01\0\x10\x80\0\x0d\x03\x15\x38db.example"),
        (
            full,
            b"\x01\0\x2d\x80\0\x07\x01\0\x50\xc0\0\x02\x01\x02\0\x0bweb.example\x03\0\x07\x01\x12\x34\x0a\0\0\x05\
              \x04\0\x03\x03\xe8a\x04\0\x02\0\x01",
        ),
    ];
    for (request, bytes) in golden {
        assert_eq!(request.encode().unwrap(), bytes, "{request:?}");
        assert_eq!(message(Request::parse, bytes), request);
    }
}

#[test]
fn replies_and_greetings_have_these_bytes() {
    let golden: [(Reply, &[u8]); 3] = [
        (Reply::Connected { bound: None }, b"\x02\0\0"),
        (
            Reply::Connected { bound: Some("192.0.2.1:80".parse().unwrap()) },
            b"\x02\0\x0a\x01\0\x07\x01\0\x50\xc0\0\x02\x01",
        ),
        (Reply::refused(EndReason::Dns, "no 'x'"), b"\x03\0\x0f\x80\0\x03dns\x02\0\x06no 'x'"),
    ];
    for (reply, bytes) in golden {
        assert_eq!(reply.encode().unwrap(), bytes, "{reply:?}");
        assert_eq!(message(Reply::parse, bytes), reply);
    }
    assert_eq!(Greeting.encode().unwrap(), b"G\0\0");
    assert_eq!(message(Greeting::parse, b"G\0\0"), Greeting);
}

#[test]
fn every_reason_comes_back_as_itself_and_an_unknown_one_as_hop_failed() {
    for reason in EndReason::ALL {
        let reply = Reply::refused(reason, "why");
        assert_eq!(message(Reply::parse, &reply.encode().unwrap()), reply);
    }
    let future = b"\x03\0\x09\x80\0\x06vortex";
    assert_eq!(message(Reply::parse, future), Reply::refused(EndReason::HopFailed, ""));
}

#[test]
fn what_is_not_known_is_skipped_unless_it_must_be_understood() {
    let skipped = b"\x01\0\x0f\x7f\0\x02xx\x80\0\x07\x01\0\x50\xc0\0\x02\x01";
    assert_eq!(message(Request::parse, skipped), request("192.0.2.1:80"));
    assert_eq!(message(Greeting::parse, b"G\0\x03\x01\0\0"), Greeting);
    assert_eq!(message(Reply::parse, b"\x02\0\x03\x03\0\0"), Reply::Connected { bound: None });
    let must = b"\x01\0\x0d\x80\0\x07\x01\0\x50\xc0\0\x02\x01\xff\0\0";
    assert_eq!(Request::parse(must), Parsed::Malformed(MessageError::Unknown(0xff)));
    assert_eq!(Greeting::parse(b"G\0\x03\x80\0\0"), Parsed::Malformed(MessageError::Unknown(0x80)));
}

#[test]
fn mistakes_are_named() {
    use MessageError::{BadField, Kind, Missing, TooLong, Twice};
    for (bytes, error) in [
        (&b"G"[..], Kind(b'G')),
        (b"\x01\xff\xff", TooLong),
        (b"\x01\0\0", Missing(0x80)),
        // A field that ends outside the message.
        (b"\x01\0\x02\x80\0", BadField(0x80)),
        (b"\x01\0\x03\x80\0\x01", BadField(0x80)),
        // No address type, no port, port 0, an address that is too short, an empty name, a name with a blank.
        (b"\x01\0\x03\x80\0\0", BadField(0x80)),
        (b"\x01\0\x05\x80\0\x02\x01\0", BadField(0x80)),
        (b"\x01\0\x0a\x80\0\x07\x01\0\0\xc0\0\x02\x01", BadField(0x80)),
        (b"\x01\0\x09\x80\0\x06\x01\0\x50\xc0\0\x02", BadField(0x80)),
        (b"\x01\0\x06\x80\0\x03\x03\0\x50", BadField(0x80)),
        (b"\x01\0\x09\x80\0\x06\x03\0\x50a b", BadField(0x80)),
        (b"\x01\0\x09\x80\0\x06\x02\0\x50a.b", BadField(0x80)),
        (b"\x01\0\x12\x80\0\x06\x03\0\x50a.b\x80\0\x06\x03\0\x50a.b", Twice(0x80)),
        // A client that is known by name, metadata without a key, metadata with broken text.
        (b"\x01\0\x09\x03\0\x06\x03\0\x50a.b", BadField(3)),
        (b"\x01\0\x04\x04\0\x01\0", BadField(4)),
        (b"\x01\0\x06\x04\0\x03\0\0\xff", BadField(4)),
        (b"\x01\0\x03\x02\0\0", BadField(2)),
    ] {
        assert_eq!(Request::parse(bytes), Parsed::Malformed(error), "{bytes:02x?}");
    }
    assert_eq!(Reply::parse(b"\x01"), Parsed::Malformed(Kind(1)));
    assert_eq!(Reply::parse(b"\x03\0\0"), Parsed::Malformed(Missing(0x80)));
}

#[test]
fn what_is_too_long_is_not_sent() {
    let metadata = |length| Request { metadata: vec![(0, "m".repeat(length))], ..request("192.0.2.1:80") };
    // The destination field has 10 bytes, the head of the metadata field 3, its key 2.
    assert_eq!(metadata(BODY_MAX - 15).encode().unwrap().len(), BODY_MAX + 3);
    assert_eq!(metadata(BODY_MAX - 14).encode(), Err(MessageError::TooLong));
    assert_eq!(metadata(1 << 20).encode(), Err(MessageError::TooLong));
    let Reply::Refused { detail, .. } = Reply::refused(EndReason::Dns, &"é".repeat(DETAIL_MAX)) else {
        panic!()
    };
    assert_eq!(detail, "é".repeat(DETAIL_MAX / 2));
    let long = Reply::Refused { reason: EndReason::Dns, detail: "x".repeat(DETAIL_MAX + 1) };
    assert_eq!(long.encode(), Err(MessageError::TooLong));
}

#[test]
fn words_of_a_refusal_cannot_steer_a_terminal() {
    let reply = Reply::Refused { reason: EndReason::Dns, detail: "\x1b[2J\u{9b}x\n".into() };
    assert_eq!(message(Reply::parse, &reply.encode().unwrap()), Reply::refused(EndReason::Dns, " [2J x "));
}

fn destinations() -> impl Strategy<Value = Destination> {
    let host = prop_oneof![
        any::<std::net::IpAddr>().prop_map(|ip| ip.to_string()),
        "[a-z0-9_-]{1,63}(\\.[a-z]{1,20}){0,3}",
    ];
    // The pattern also makes names whose last label is a number, which are rejected.
    (host, 1..=u16::MAX).prop_filter_map("a destination", |(host, port)| {
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        format!("{host}:{port}").parse().ok()
    })
}

fn requests() -> impl Strategy<Value = Request> {
    let host = proptest::option::of("[a-z]{1,20}".prop_map(|name| name.parse::<HostName>().unwrap()));
    let client = proptest::option::of(
        any::<(std::net::IpAddr, u16)>().prop_map(|(ip, port)| (ip.to_canonical(), port).into()),
    );
    let metadata = proptest::collection::vec(any::<(u16, String)>(), 0..4);
    let context = proptest::option::of(0..1_u64 << 62);
    (destinations(), host, client, metadata, context).prop_map(
        |(destination, host, client, metadata, datagrams)| Request {
            destination,
            host,
            client,
            metadata,
            datagrams,
        },
    )
}

proptest! {
    #[test]
    fn every_request_comes_back(request in requests()) {
        prop_assert_eq!(message(Request::parse, &request.encode().unwrap()), request);
    }

    #[test]
    fn any_bytes_are_survived(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0..4_u8) {
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        if let Parsed::Message(request, consumed) = Request::parse(&bytes) {
            prop_assert!(consumed <= bytes.len());
            prop_assert_eq!(Request::parse(&request.encode().unwrap()), Parsed::Message(request.clone(), request.encode().unwrap().len()));
        }
        let _ = (Reply::parse(&bytes), Greeting::parse(&bytes));
    }
}

#[test]
fn datagrams_begin_with_their_context() {
    for (context, header) in
        [(0, &b"\0"[..]), (0x3f, b"\x3f"), (0x1234, b"\x52\x34"), (1 << 40, b"\xc0\0\x01\0\0\0\0\0")]
    {
        let mut bytes = Vec::new();
        datagram::put(&mut bytes, context, b"payload");
        assert_eq!(bytes, [header, b"payload"].concat());
        assert_eq!(datagram::context(&bytes), Some((context, header.len())));
        for length in 0..header.len() {
            assert_eq!(datagram::context(&bytes[..length]), None, "its context is cut");
        }
    }
}

#[test]
fn an_older_end_says_that_it_does_not_know_datagrams() {
    let words = format!("the request: {}", MessageError::Unknown(129));
    assert!(MessageError::means_no_datagrams(&words));
    assert!(!MessageError::means_no_datagrams(&MessageError::Unknown(130).to_string()));
}
