//! Bodies: lengths, chunks and trailers.

use crate::{Read, read, read_every_way};
use proptest::prelude::*;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{
    Decoder, Length, ResponseLength, response_length, write_chunk_size, write_last_chunk,
};
use sidetrack_core::http::message::{MessageError, Method, Response, Sender};

fn length_of(method: &Method, head: &str) -> Result<ResponseLength, MessageError> {
    response_length(method, &Response::parse(format!("{head}\r\n\r\n").as_bytes()).expect("a head"))
}

#[test]
fn the_length_of_a_response_follows_one_table() {
    let exact = |n| Ok((Length::Exact(n), true));
    let none = Ok((Length::None, true));
    let get = &Method::Get;
    for (method, head, expected) in [
        (get, "HTTP/1.1 200 OK\r\nContent-Length: 5", exact(5)),
        (get, "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\nContent-Length: 5", exact(5)),
        (get, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 200 OK\r\nContent-Length: +5", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 200 OK\r\nContent-Length: ", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 200 OK", Ok((Length::UntilClose, true))),
        (get, "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked", Ok((Length::Chunked, true))),
        (
            get,
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3",
            Ok((Length::Chunked, false)),
        ),
        (get, "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip", Err(MessageError::UnknownCoding)),
        (get, "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked", Err(MessageError::UnknownCoding)),
        (get, "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity", Ok((Length::UntilClose, false))),
        (get, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip", Ok((Length::UntilClose, false))),
        (get, "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 204 No\r\nContent-Length: 0", none),
        (get, "HTTP/1.1 204 No\r\nContent-Length: 1", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 103 Hints\r\nTransfer-Encoding: chunked", Err(MessageError::BadLength)),
        (get, "HTTP/1.1 304 No\r\nContent-Length: 7\r\nTransfer-Encoding: x", none),
        (&Method::Head, "HTTP/1.1 200 OK\r\nContent-Length: 7", none),
        (&Method::Connect, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: x", none),
        (&Method::Connect, "HTTP/1.1 403 No\r\nContent-Length: 2", exact(2)),
    ] {
        let found = length_of(method, head).map(|found| (found.length, found.is_certain));
        assert_eq!(found, expected, "{head:?}");
    }
}

#[test]
fn chunks_give_their_content_and_their_trailers() {
    let text = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n\
                5;a=\"b;c\"\r\nhello\r\n00001\r\n!\r\n0\r\nX-Sum: 1\r\nContent-Length: 9\r\n\r\nGET / HTTP/1.0\r\n\r\n";
    let found = read_every_way(text.as_bytes(), Sender::Client);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(matches!(&found[0], Read::Request(_, content) if content == b"hello!"));
    let mut decoder = Decoder::new(Length::Chunked);
    let decoded = decoder.decode(b"0\r\nX-Sum: 1\r\nContent-Length: 9\r\n\r\nrest").unwrap();
    assert!(decoder.is_done());
    assert_eq!(decoded.consumed, 34);
    assert_eq!(decoder.take_trailers(), Fields::from([("X-Sum", "1")]), "framing fields never trail");
}

#[test]
fn broken_chunks_are_refused() {
    for bad in [
        "5\nhello\r\n0\r\n\r\n",
        "5 \r\nhello\r\n0\r\n\r\n",
        " 5\r\nhello\r\n0\r\n\r\n",
        "+5\r\nhello\r\n0\r\n\r\n",
        "0x5\r\nhello\r\n0\r\n\r\n",
        "-1\r\n",
        "\r\n",
        ";a\r\n",
        "5\r\nhelloX\r\n0\r\n\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "00000000000000001\r\n",
        "5;\0\r\nhello\r\n",
        "0\r\nA b\r\n\r\n",
        "0\r\n A: b\r\n\r\n",
        "0\r\nA: b\n\r\n",
    ] {
        let mut decoder = Decoder::new(Length::Chunked);
        let mut rest = bad.as_bytes();
        let broken = loop {
            match decoder.decode(rest) {
                Err(error) => break Some(error),
                Ok(decoded) if decoded.consumed == 0 => break decoder.end().err(),
                Ok(decoded) => rest = &rest[decoded.consumed..],
            }
        };
        assert!(broken.is_some(), "{bad:?} was taken");
    }
    let mut decoder = Decoder::new(Length::Chunked);
    let endless = format!("1;{}", "x".repeat(5000));
    assert_eq!(decoder.decode(endless.as_bytes()), Err(MessageError::BadChunk));
}

#[test]
fn an_early_end_is_seen() {
    for (length, bytes, complete) in [
        (Length::Exact(3), "ab", false),
        (Length::Exact(3), "abc", true),
        (Length::Chunked, "3\r\nabc\r\n", false),
        (Length::Chunked, "0\r\n", false),
        (Length::UntilClose, "ab", true),
        (Length::None, "", true),
    ] {
        let mut decoder = Decoder::new(length);
        let mut rest = bytes.as_bytes();
        while !rest.is_empty() {
            rest = &rest[decoder.decode(rest).unwrap().consumed..];
        }
        assert_eq!(decoder.end().is_ok(), complete, "{length:?} {bytes:?}");
    }
}

proptest! {
    #[test]
    fn what_we_write_is_what_is_read(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..70), 0..8),
        pieces in 1_usize..40,
    ) {
        let mut text = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for chunk in &chunks {
            write_chunk_size(&mut text, chunk.len());
            text.extend_from_slice(chunk);
            text.extend_from_slice(b"\r\n");
        }
        write_last_chunk(&mut text, &Fields::from([("X-Sum", "1")]));
        let pieces: Vec<_> = text.chunks(pieces).collect();
        let found = read(&pieces, Sender::Client);
        prop_assert!(
            matches!(&found[..], [Read::Request(_, content)] if *content == chunks.concat()),
            "{:?}", found
        );
    }
}
