//! Request smuggling: every form known gives one reading or an error, and what follows an error is never read.

use crate::{Read, read_every_way};
use sidetrack_core::http::message::{MessageError, Sender};

/// A request with these field lines and this body, and a smuggled one behind it.
fn attack(fields: &str, body: &str) -> String {
    format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\n\r\n{body}GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
}

#[test]
fn contradictory_lengths_are_refused() {
    use MessageError::*;
    for (fields, expected) in [
        ("Content-Length: 6\r\nTransfer-Encoding: chunked", BadLength),
        ("Transfer-Encoding: chunked\r\nContent-Length: 6", BadLength),
        ("Transfer-Encoding: chunked\r\nContent-Length: 0", BadLength),
        ("Content-Length: 5\r\nContent-Length: 6", BadLength),
        ("Content-Length: 5, 6", BadLength),
        ("Content-Length: 5,", BadLength),
        ("Content-Length: 0x5", BadLength),
        ("Content-Length: +5", BadLength),
        ("Content-Length: -5", BadLength),
        ("Content-Length: 5 5", BadLength),
        ("Content-Length: 5;a", BadLength),
        ("Content-Length: \"5\"", BadLength),
        ("Content-Length:", BadLength),
        ("Transfer-Encoding: chunked, identity", BadLength),
        ("Transfer-Encoding: identity", BadLength),
        ("Transfer-Encoding: identity, chunked", BadLength),
        ("Transfer-Encoding: chunked, chunked", BadLength),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", BadLength),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: cow", BadLength),
        ("Transfer-Encoding: chunked;q=1", BadLength),
        ("Transfer-Encoding: \"chunked\"", BadLength),
        ("Transfer-Encoding: ,chunked", BadLength),
        ("Transfer-Encoding: chunked,", BadLength),
        ("Transfer-Encoding:", BadLength),
        ("Transfer-Encoding: xchunked", UnknownCoding),
        ("Transfer-Encoding: gzip", UnknownCoding),
        ("Transfer-Encoding: gzip, chunked", UnknownCoding),
        ("Transfer-Encoding : chunked", BadField),
        ("Transfer-Encoding\t: chunked", BadField),
        ("Transfer-Encoding: \u{b}chunked", ControlByte),
        ("X: y\r\n Transfer-Encoding: chunked", Folded),
        ("Transfer-Encoding:\r\n chunked", Folded),
        ("X: y\nTransfer-Encoding: chunked", BareLineEnd),
        ("X: y\rTransfer-Encoding: chunked", BareLineEnd),
        ("Transfer-Encoding: chunked\0", ControlByte),
        ("Host: other", BadHost),
    ] {
        let found = read_every_way(attack(fields, "0\r\n\r\n").as_bytes(), Sender::Client);
        assert_eq!(found, [Read::Broken(expected)], "{fields:?}");
    }
}

#[test]
fn a_tab_around_a_value_is_only_white_space() {
    let text = attack("Transfer-Encoding: \tchunked\t", "0\r\n\r\n");
    let found = read_every_way(text.as_bytes(), Sender::Client);
    assert!(
        matches!(&found[..], [Read::Request(..), Read::Request(second, _)] if second.target == b"/smuggled")
    );
}

#[test]
fn a_length_takes_its_body_with_it() {
    let inner = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";
    let text = format!("GET / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{inner}", inner.len());
    let found = read_every_way(text.as_bytes(), Sender::Client);
    assert!(matches!(&found[..], [Read::Request(_, content)] if content == inner.as_bytes()), "{found:?}");
}

#[test]
fn http_1_0_has_no_transfer_coding() {
    let text = "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    assert_eq!(read_every_way(text.as_bytes(), Sender::Client), [Read::Broken(MessageError::BadLength)]);
}

#[test]
fn broken_chunks_end_the_connection() {
    for body in [
        "0;\n\r\n",
        "0\n\r\n",
        "1\nx\r\n0\r\n\r\n",
        "1\r\nxx\r\n0\r\n\r\n",
        "ffffffffffffffff1\r\n",
        "0\r\n\n",
    ] {
        let found = read_every_way(attack("Transfer-Encoding: chunked", body).as_bytes(), Sender::Client);
        assert_eq!(found, [Read::Broken(MessageError::BadChunk)], "{body:?}");
    }
}
