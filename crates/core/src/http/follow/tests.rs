//! Connections byte by byte: which streams are malformed, which go on, and what breaks the connection.

use super::{Broken, Follower, PREFACE};
use crate::http::h2::Malformed;
use crate::http::hpack::HpackError;
use crate::http::message::Sender;

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

/// A whole message without content: HEADERS with END_HEADERS and END_STREAM.
fn headers(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(1, 5, stream, &block(fields))
}

/// A request for a path with these fields behind the usual ones.
fn get<'a>(path: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let usual = [(":method", "GET"), (":scheme", "https"), (":authority", "h"), (":path", path)];
    [&usual[..], more].concat()
}

/// Follows these bytes of a client behind the preface and SETTINGS.
fn client(bytes: &[u8]) -> (Follower, Result<(), Broken>) {
    let mut follower = Follower::new(Sender::Client);
    let all = [PREFACE, &frame(4, 0, 0, &[0, 3, 0, 0, 0, 100]), bytes].concat();
    let read = follower.read(&all);
    (follower, read)
}

/// The judgement of one request between two well-formed neighbours.
fn judged(fields: &[(&str, &str)]) -> Result<(), Malformed> {
    let stream = [headers(1, &get("/", &[])), headers(3, fields), headers(5, &get("/", &[]))].concat();
    let (mut follower, read) = client(&stream);
    assert_eq!(read, Ok(()));
    assert_eq!(follower.take(1), Ok(()));
    let judged = follower.take(3);
    assert_eq!(follower.take(5), Ok(()), "{fields:?}");
    judged
}

#[test]
fn requests_are_malformed_as_the_rfc_says() {
    let plain: &[(&str, &str)] = &[(":method", "GET"), (":scheme", "https"), (":path", "/")];
    let with = |more: &[(&'static str, &'static str)]| [plain, more].concat();
    let path = |path: &'static str| get(path, &[]);
    let field = |name: &'static str, value: &'static str| get("/", &[(name, value)]);
    for (fields, wanted) in [
        (path("/a#b"), Malformed::Path),
        (path("#"), Malformed::Path),
        (path("/#"), Malformed::Path),
        (path(""), Malformed::Path),
        (path("x"), Malformed::Path),
        (path("?x"), Malformed::Path),
        (path("*"), Malformed::Path),
        (path("/a b"), Malformed::Path),
        (path("/a\x01"), Malformed::Path),
        (path("/\u{e4}"), Malformed::Path),
        (path("https://h/"), Malformed::Path),
        (get("/", &[(":path", "/")]), Malformed::Pseudo),
        (field(":unknown", "1"), Malformed::Pseudo),
        (field(":status", "200"), Malformed::Pseudo),
        (field(":protocol", "websocket"), Malformed::Pseudo),
        (get("/", &[("a", "1"), (":protocol", "x")]), Malformed::Pseudo),
        (with(&[("host", "h"), (":authority", "h")]), Malformed::Pseudo),
        (vec![(":scheme", "https"), (":authority", "h"), (":path", "/")], Malformed::Pseudo),
        (vec![(":method", "GET"), (":authority", "h"), (":path", "/")], Malformed::Pseudo),
        (vec![(":method", "GET"), (":scheme", "https"), (":authority", "h")], Malformed::Pseudo),
        (vec![(":method", "GET"), (":scheme", "https"), ("host", "h")], Malformed::Pseudo),
        (vec![(":method", "CONNECT"), (":scheme", "https"), (":authority", "h:1")], Malformed::Pseudo),
        (
            vec![(":method", "GE T"), (":scheme", "https"), (":authority", "h"), (":path", "/")],
            Malformed::Method,
        ),
        (vec![(":method", "GET"), (":scheme", "http"), (":path", "/"), ("host", "h")], Malformed::Scheme),
        (vec![(":method", "GET"), (":scheme", ""), (":path", "/"), ("host", "h")], Malformed::Scheme),
        (plain.to_vec(), Malformed::Authority),
        (with(&[(":authority", "")]), Malformed::Authority),
        (with(&[(":authority", "user@h")]), Malformed::Authority),
        (with(&[("host", "h"), ("host", "h")]), Malformed::Authority),
        (field("host", "other"), Malformed::Authority),
        (field("X", "1"), Malformed::Field),
        (field("", "1"), Malformed::Field),
        (field("a b", "1"), Malformed::Field),
        (field("connection", "close"), Malformed::Field),
        (field("transfer-encoding", "chunked"), Malformed::Field),
        (field("te", "gzip"), Malformed::Field),
        (field("a", " 1"), Malformed::Field),
        (field("a", "1\r\nb: 2"), Malformed::Field),
        (field("a", "\0"), Malformed::Field),
    ] {
        assert_eq!(judged(&fields), Err(wanted), "{fields:?}");
    }
}

#[test]
fn requests_that_look_odd_are_well_formed() {
    let extended = |protocol| {
        let usual = [(":method", "CONNECT"), (":scheme", "https"), (":authority", "h"), (":path", "/")];
        [&usual[..], &[(":protocol", protocol)]].concat()
    };
    for fields in [
        get("/?a=/../b%23", &[("te", "trailers"), ("cookie", "a"), ("cookie", "b"), ("x", "")]),
        vec![(":path", "*"), (":method", "OPTIONS"), (":scheme", "HTTPS"), (":authority", "h")],
        vec![(":method", "GET"), (":scheme", "https"), (":path", "/"), ("host", "h")],
        vec![(":method", "CONNECT"), (":authority", "h:1")],
        extended("websocket"),
        get("/", &[("host", "H:443")]),
    ] {
        assert_eq!(judged(&fields), Ok(()), "{fields:?}");
    }
}

#[test]
fn blocks_may_be_padded_prioritised_and_continued() {
    let whole = block(&get("/", &[("a", "1")]));
    let padded = [&[3][..], &[0x80, 0, 0, 1, 16], &whole, &[0; 3]].concat();
    let (one, rest) = whole.split_at(10);
    let bytes = [
        frame(1, 0x2d, 3, &padded),
        frame(1, 0x1, 5, one),
        frame(9, 0, 5, &[]),
        frame(9, 0x4, 5, rest),
        frame(0x42, 0xff, 7, b"unknown"),
        frame(0, 1, 7, &[0; 100]),
        headers(7, &get("/#", &[])),
    ]
    .concat();
    let (mut follower, read) = client(&bytes);
    assert_eq!(read, Ok(()));
    let judged = [3, 5, 7, 9].map(|stream| follower.take(stream));
    assert_eq!(judged, [Ok(()), Ok(()), Err(Malformed::Path), Err(Malformed::Unread)]);
}

#[test]
fn any_split_gives_the_same() {
    let whole = block(&get("/a#b", &[]));
    let (one, rest) = whole.split_at(20);
    let bytes = [
        PREFACE,
        &frame(4, 0, 0, &[]),
        &headers(1, &get("/", &[])),
        &frame(1, 1, 3, one),
        &frame(9, 4, 3, rest),
        &frame(0, 0, 1, b"data"),
        &headers(5, &get("/", &[])),
        // An index that does not exist.
        &frame(1, 5, 7, &[0xff]),
    ]
    .concat();
    let look = |follower: &mut Follower| [1, 3, 5, 7].map(|stream| follower.take(stream));
    let wanted = [Ok(()), Err(Malformed::Path), Ok(()), Err(Malformed::Unread)];
    for at in 0..=bytes.len() {
        let mut follower = Follower::new(Sender::Client);
        let (one, other) = bytes.split_at(at);
        let _ = follower.read(one);
        assert_eq!(follower.read(other), Err(Broken::Block(HpackError::Truncated)), "{at}");
        assert_eq!(look(&mut follower), wanted, "{at}");
    }
    let mut follower = Follower::new(Sender::Client);
    let read: Vec<_> = bytes.iter().map(|byte| follower.read(std::slice::from_ref(byte))).collect();
    assert_eq!(read.iter().filter(|read| read.is_err()).count(), 1, "the last byte breaks it");
    assert_eq!(look(&mut follower), wanted);
}

#[test]
fn what_breaks_a_connection_makes_all_later_requests_malformed() {
    let good = headers(3, &get("/", &[]));
    let continued = [frame(1, 1, 1, &[0x82]), frame(9, 0, 1, &[]).repeat(9)].concat();
    for (bytes, wanted) in [
        (vec![0, 0x40, 1, 0, 0, 0, 0, 0, 1], Broken::FrameSize),
        (frame(1, 5, 0, &[0x82]), Broken::Frame),
        (frame(1, 5, 2, &[0x82]), Broken::Frame),
        (frame(5, 4, 1, &[0; 4]), Broken::Frame),
        (frame(9, 4, 1, &[0x82]), Broken::Frame),
        ([frame(1, 1, 1, &[0x82]), frame(9, 4, 3, &[])].concat(), Broken::Frame),
        ([frame(1, 1, 1, &[0x82]), frame(6, 0, 0, &[0; 8])].concat(), Broken::Frame),
        (frame(1, 0xd, 1, &[2, 0x82]), Broken::Frame),
        (frame(1, 0xd, 1, &[]), Broken::Frame),
        (frame(1, 0x25, 1, &[0; 4]), Broken::Frame),
        (frame(1, 0x25, 1, &[0, 0, 0, 1, 0, 0x82]), Broken::OwnDependency),
        (continued, Broken::Continuations),
        (frame(1, 5, 1, &[0x80]), Broken::Block(HpackError::Index)),
        (frame(1, 5, 1, &[0, 0x81, 0xfe]), Broken::Block(HpackError::Huffman)),
    ] {
        let (mut follower, read) = client(&[&bytes[..], &good].concat());
        assert_eq!(read, Err(wanted), "{bytes:?}");
        assert_eq!(follower.read(&good), Err(wanted), "the error stays");
        assert_eq!(follower.take(3), Err(Malformed::Unread));
    }
    assert_eq!(Follower::new(Sender::Client).read(b"GET / HTTP/1.1\r\n"), Err(Broken::Preface));
}

#[test]
fn trailers_have_no_pseudo_header_fields_and_end_their_stream() {
    let open = |stream| frame(1, 4, stream, &block(&get("/", &[])));
    let bytes = [
        open(1),
        open(3),
        open(5),
        open(7),
        headers(1, &[("x-sum", "1")]),
        headers(3, &[("x-sum", "1"), (":path", "/")]),
        frame(1, 4, 5, &block(&[("x-sum", "1")])),
    ]
    .concat();
    let (mut follower, read) = client(&bytes);
    assert_eq!(read, Ok(()));
    let judged = [1, 3, 5, 7].map(|stream| follower.take(stream));
    assert_eq!(judged, [Ok(()), Err(Malformed::Pseudo), Err(Malformed::Trailers), Ok(())]);
    assert_eq!(follower.read(&headers(7, &[("connection", "close")])), Ok(()));
    assert_eq!(follower.check(7), Err(Malformed::Field));
    follower.forget(7);
    assert_eq!(follower.read(&headers(7, &[("x", "1")])), Ok(()));
    assert_eq!(follower.check(7), Err(Malformed::Unread));
}

#[test]
fn fields_beyond_our_limit_are_malformed_and_still_change_the_table() {
    // One entry of 4000 bytes, then named as often as the list may be large.
    let entry = [&[0x40, 1, b'a', 0x7f, 0xa1, 0x1e][..], &[b'x'; 4000]].concat();
    let usual = block(&get("/", &[]));
    let large = |count| [&usual[..], &entry, &vec![0xbe; count]].concat();
    let bytes = [frame(1, 5, 1, &large(20)), frame(1, 5, 3, &[&usual[..], &[0xbe]].concat())].concat();
    let (mut follower, read) = client(&bytes);
    assert_eq!(read, Ok(()));
    assert_eq!((follower.take(1), follower.take(3)), (Err(Malformed::TooLong), Ok(())));
    let (_, read) = client(&frame(1, 5, 1, &large(100)));
    assert_eq!(read, Err(Broken::Block(HpackError::TooLarge)));
}

#[test]
fn requests_that_are_never_taken_are_bounded() {
    let bytes: Vec<u8> = (0..1025).flat_map(|index| headers(2 * index + 1, &get("#", &[]))).collect();
    let (_, read) = client(&bytes);
    assert_eq!(read, Err(Broken::Waiting));
    // Those before one that is taken are forgotten, but not those that are being served.
    let mut bytes = headers(1, &get("/", &[]));
    bytes.extend((1..=1000).flat_map(|index| headers(2 * index + 1, &get("#", &[]))));
    let (mut follower, read) = client(&bytes);
    assert_eq!((read, follower.take(1), follower.take(2001)), (Ok(()), Ok(()), Err(Malformed::Path)));
    assert_eq!((follower.check(1), follower.check(3)), (Ok(()), Err(Malformed::Unread)));
}

#[test]
fn responses_have_a_status_and_no_other_pseudo_header_field() {
    let respond = |blocks: &[&[(&str, &str)]]| {
        let mut follower = Follower::new(Sender::Server);
        follower.open(1);
        follower.open(3);
        let (last, first) = blocks.split_last().unwrap();
        let mut bytes = frame(4, 0, 0, &[]);
        for fields in first {
            bytes.extend(frame(1, 4, 1, &block(fields)));
        }
        bytes.extend(headers(1, last));
        bytes.extend(headers(3, &[(":status", "204")]));
        // What answers no request of ours only changes the table.
        bytes.extend(headers(5, &[(":path", "/")]));
        assert_eq!(follower.read(&bytes), Ok(()));
        assert_eq!((follower.check(3), follower.check(5)), (Ok(()), Err(Malformed::Unread)));
        follower.check(1)
    };
    let ok: &[(&str, &str)] = &[(":status", "200"), ("a", " padded ")];
    let early: &[(&str, &str)] = &[(":status", "103"), ("link", "x")];
    assert_eq!(respond(&[ok]), Ok(()));
    assert_eq!(respond(&[early, early, ok, &[("x-sum", "1")]]), Ok(()));
    for (blocks, wanted) in [
        (&[&[("a", "1")][..]][..], Malformed::Pseudo),
        (&[&[(":status", "200"), (":status", "200")]], Malformed::Pseudo),
        (&[&[("a", "1"), (":status", "200")]], Malformed::Pseudo),
        (&[&[(":status", "200"), (":path", "/")]], Malformed::Pseudo),
        (&[ok, &[(":status", "200")]], Malformed::Pseudo),
        (&[&[(":status", "101")], ok], Malformed::Status),
        (&[&[(":status", "2000")]], Malformed::Status),
        (&[&[(":status", "099")]], Malformed::Status),
        (&[early], Malformed::Status),
        (&[&[(":status", "200"), ("connection", "close")]], Malformed::Field),
        (&[&[(":status", "200"), ("a", "1\r\nb: 2")]], Malformed::Field),
    ] {
        assert_eq!(respond(blocks), Err(wanted), "{blocks:?}");
    }
    // Without any head there is nothing to give out.
    let mut follower = Follower::new(Sender::Server);
    follower.open(1);
    assert_eq!(follower.check(1), Err(Malformed::Unread));
}
