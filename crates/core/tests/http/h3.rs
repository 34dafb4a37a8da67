//! HTTP/3 without QUIC. The fuzz target `http3` includes this file.

use sidetrack_core::http::h3::Error;
use sidetrack_core::http::h3::datagram;
use sidetrack_core::http::h3::message::{Message, Part};
use sidetrack_core::http::h3::qpack;
use sidetrack_core::http::h3::uni::{Opened, Said, Uni};
use sidetrack_core::http::message::Sender;

/// What a stream says, and how it ends. Content that comes in pieces is one text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Read {
    /// Heads and trailers.
    parts: Vec<Part<'static>>,
    /// All content.
    content: Vec<u8>,
    /// Why the stream is aborted.
    error: Option<Error>,
}

/// Reads a message that comes in pieces of this many bytes.
fn message(bytes: &[u8], sender: Sender, step: usize) -> Read {
    let mut machine = Message::new(sender);
    let mut read = Read::default();
    for piece in bytes.chunks(step.max(1)) {
        let mut rest = piece;
        loop {
            match machine.next(&mut rest) {
                Ok(None) => break,
                Ok(Some(Part::Content(content))) => read.content.extend_from_slice(content),
                Ok(Some(Part::Request(request))) => read.parts.push(Part::Request(request)),
                Ok(Some(Part::Response(status, lines))) => read.parts.push(Part::Response(status, lines)),
                Ok(Some(Part::Trailers(lines))) => read.parts.push(Part::Trailers(lines)),
                Err(error) => return Read { error: Some(error), ..read },
            }
        }
        assert!(rest.is_empty(), "all bytes are taken");
    }
    read.error = machine.end().err();
    read
}

/// Reads a stream of a peer that comes in pieces of this many bytes.
fn uni(bytes: &[u8], peer: Sender, step: usize) -> (Vec<Said>, Option<Error>) {
    let (mut machine, mut opened, mut said) = (Uni::new(peer), Opened::default(), Vec::new());
    for piece in bytes.chunks(step.max(1)) {
        let mut rest = piece;
        loop {
            match machine.next(&mut rest, &mut opened) {
                Ok(None) => break,
                Ok(Some(one)) => said.push(one),
                Err(error) => return (said, Some(error)),
            }
        }
    }
    (said, None)
}

/// Any bytes, as every kind of stream: no panic, and the same result however they are cut. A field section that is written again
/// is read as the same fields.
pub(crate) fn any_bytes(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let step = usize::from(first >> 1) + 1;
    let peer = if first & 1 == 0 { Sender::Client } else { Sender::Server };
    let whole = message(bytes, peer, usize::MAX);
    let cut = message(bytes, peer, step);
    assert_eq!((&whole.parts, &whole.error), (&cut.parts, &cut.error));
    // Where content is longer than it may be, the cut decides how much of it was passed on.
    if whole.error.is_none() {
        assert_eq!(whole.content, cut.content);
    }
    assert_eq!(uni(bytes, peer, usize::MAX), uni(bytes, peer, step));
    if let Ok((stream, Some(payload))) = datagram::read(bytes) {
        let mut out = Vec::new();
        datagram::put(&mut out, stream, payload);
        assert_eq!(datagram::read(&out), Ok((stream, Some(payload))));
    }
    let mut fields = Vec::new();
    if qpack::decode(bytes, 1 << 16, |name, value| fields.push((name.to_vec(), value.to_vec()))).is_ok() {
        let section = qpack::encode(fields.iter().map(|(name, value)| (name.as_slice(), value.as_slice())));
        let mut again = Vec::new();
        let read =
            qpack::decode(&section, 1 << 16, |name, value| again.push((name.to_vec(), value.to_vec())));
        assert_eq!((read, again), (Ok(()), fields));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sidetrack_core::http::h3::Code;
    use sidetrack_core::http::h3::frame::{Settings, put_frame, put_goaway, put_header};
    use sidetrack_core::http::h3::message::{Lines, Request, put_request, put_response, put_trailers};

    fn code(error: Option<Error>) -> Option<Code> {
        error.map(|error| error.code)
    }

    fn hex(text: &str) -> Vec<u8> {
        data_encoding::HEXLOWER_PERMISSIVE.decode(text.replace([' ', '\n'], "").as_bytes()).unwrap()
    }

    fn lines(lines: &[(&str, &str)]) -> Lines {
        lines.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
    }

    fn get(extra: &[(&str, &str)]) -> Request {
        Request {
            method: b"GET".to_vec(),
            scheme: Some(b"https".to_vec()),
            authority: Some(b"web.example".to_vec()),
            path: Some(b"/".to_vec()),
            protocol: None,
            lines: lines(extra),
        }
    }

    fn request(request: &Request, behind: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        put_request(&mut out, request);
        out.extend_from_slice(behind);
        out
    }

    /// Reads in one piece, and in pieces of every size.
    fn every_way(bytes: &[u8], sender: Sender) -> Read {
        let whole = message(bytes, sender, usize::MAX);
        for step in 1..bytes.len() {
            let cut = message(bytes, sender, step);
            assert_eq!((&cut.parts, &cut.error), (&whole.parts, &whole.error), "pieces of {step} bytes");
            assert!(whole.error.is_some() || cut.content == whole.content, "pieces of {step} bytes");
        }
        whole
    }

    fn refused(bytes: &[u8], sender: Sender) -> (Code, bool) {
        let error = every_way(bytes, sender).error.expect("it is refused");
        (error.code, error.is_of_stream)
    }

    /// RFC 9204 Appendix B.1.
    #[test]
    fn the_vector_of_the_rfc_is_read() {
        let section = hex("0000 510b 2f69 6e64 6578 2e68 746d 6c");
        let mut fields = Vec::new();
        qpack::decode(&section, 1000, |name, value| fields.push((name.to_vec(), value.to_vec()))).unwrap();
        assert_eq!(fields, lines(&[(":path", "/index.html")]));
        assert_eq!(qpack::encode([(&b":path"[..], &b"/index.html"[..])]), section);
        // The same with the Huffman code of RFC 7541, as ngtcp2's client sends it.
        let huffman = hex("0000 51 88 60d5485f2bce9a68");
        let mut fields = Vec::new();
        qpack::decode(&huffman, 1000, |name, value| fields.push((name.to_vec(), value.to_vec()))).unwrap();
        assert_eq!(fields, lines(&[(":path", "/index.html")]));
    }

    #[test]
    fn what_needs_a_dynamic_table_is_refused() {
        for section in [
            // The dynamic table is announced, a negative base, and each way to name one of its entries.
            "0200",
            "0080",
            "0000 80",
            "0000 4001 61",
            "0000 10",
            "0000 00 0161",
            // Entry 99 does not exist. Cut in the prefix, in an integer, in a string. Too many bytes of an integer.
            "0000 ff24",
            "00",
            "0000 ff",
            "0000 51 05 61",
            "0000 ffffffffffffff",
            // A bad Huffman code: EOS.
            "0000 5184 ffffffff",
        ] {
            let read = qpack::decode(&hex(section), 1 << 16, |_, _| {});
            assert_eq!(code(read.err()), Some(Code::QpackDecompression), "{section}");
        }
        let bomb = [&[0, 0][..], &[0xd1; 2000]].concat();
        let read = qpack::decode(&bomb, 1 << 16, |_, _| {}).unwrap_err();
        assert_eq!((read.code, read.is_of_stream), (Code::ExcessiveLoad, true));
    }

    #[test]
    fn a_request_is_read_however_it_is_cut() {
        let mut wire =
            request(&get(&[("accept", "*/*"), ("cookie", "a=1"), ("x-long", &"v".repeat(300))]), &[]);
        put_frame(&mut wire, 0, b"some ");
        put_frame(&mut wire, 0x21, b"an unknown frame is skipped");
        put_frame(&mut wire, 0, b"");
        put_frame(&mut wire, 0, b"content");
        put_trailers(&mut wire, &lines(&[("x-sum", "1")]));
        let read = every_way(&wire, Sender::Client);
        assert_eq!(read.error, None);
        assert_eq!(read.content, b"some content");
        let expected = get(&[("accept", "*/*"), ("cookie", "a=1"), ("x-long", &"v".repeat(300))]);
        assert_eq!(read.parts, [Part::Request(expected), Part::Trailers(lines(&[("x-sum", "1")]))]);
    }

    #[test]
    fn a_response_may_have_interim_ones_before_it() {
        let mut wire = Vec::new();
        put_response(&mut wire, 103, &lines(&[("link", "</a>")]));
        put_response(&mut wire, 200, &lines(&[("content-length", "2")]));
        put_frame(&mut wire, 0, b"ok");
        let read = every_way(&wire, Sender::Server);
        assert_eq!((read.error, &read.content[..]), (None, &b"ok"[..]));
        assert!(matches!(read.parts[..], [Part::Response(103, _), Part::Response(200, _)]));
        let only_interim = &wire[..wire.len() / 3];
        assert!(message(only_interim, Sender::Server, 1).error.is_some());
    }

    #[test]
    fn malformed_messages_end_the_stream_only() {
        let odd = |change: &dyn Fn(&mut Request)| {
            let mut odd = get(&[]);
            change(&mut odd);
            refused(&request(&odd, &[]), Sender::Client)
        };
        let malformed = (Code::Message, true);
        assert_eq!(odd(&|request| request.path = None), malformed);
        assert_eq!(odd(&|request| request.path = Some(b"x".to_vec())), malformed);
        assert_eq!(odd(&|request| request.scheme = None), malformed);
        assert_eq!(odd(&|request| request.scheme = Some(b"ftp".to_vec())), malformed);
        assert_eq!(odd(&|request| request.authority = None), malformed);
        assert_eq!(odd(&|request| request.authority = Some(b"u@h".to_vec())), malformed);
        assert_eq!(odd(&|request| request.method = b"CONNECT".to_vec()), malformed);
        assert_eq!(odd(&|request| request.protocol = Some(b"connect-udp".to_vec())), malformed);
        for (name, value) in [
            ("host", "other"),
            ("connection", "close"),
            ("Accept", "*/*"),
            ("te", "gzip"),
            ("x", "a\nb"),
            (":path", "/again"),
            (":status", "200"),
            ("content-length", "x"),
            ("content-length", "1, 2"),
        ] {
            assert_eq!(refused(&request(&get(&[(name, value)]), &[]), Sender::Client), malformed, "{name}");
        }
        let short = request(&get(&[("content-length", "3")]), &[0, 2, b'a', b'b']);
        assert_eq!(refused(&short, Sender::Client), malformed);
        let long = request(&get(&[("content-length", "1")]), &[0, 2, b'a', b'b']);
        assert_eq!(refused(&long, Sender::Client), malformed);
        for status in [101, 99, 1000] {
            let mut wire = Vec::new();
            put_response(&mut wire, status, &Lines::new());
            assert_eq!(refused(&wire, Sender::Server), malformed, "{status}");
        }
    }

    #[test]
    fn extended_connect_and_connect_have_their_own_shapes() {
        let connect =
            Request { method: b"CONNECT".to_vec(), authority: Some(b"h:1".to_vec()), ..Request::default() };
        assert_eq!(every_way(&request(&connect, &[0, 1, b'x']), Sender::Client).error, None);
        let udp = Request {
            method: b"CONNECT".to_vec(),
            protocol: Some(b"connect-udp".to_vec()),
            path: Some(b"/.well-known/masque/udp/192.0.2.1/53/".to_vec()),
            ..get(&[("capsule-protocol", "?1")])
        };
        let read = every_way(&request(&udp, &[]), Sender::Client);
        assert_eq!((read.error, read.parts), (None, vec![Part::Request(udp)]));
    }

    #[test]
    fn frames_out_of_order_end_the_connection() {
        let head = request(&get(&[]), &[]);
        let unexpected = (Code::FrameUnexpected, false);
        assert_eq!(refused(&[0, 1, b'x'], Sender::Client), unexpected);
        let mut trailed = head.clone();
        put_trailers(&mut trailed, &Lines::new());
        assert_eq!(refused(&[&trailed[..], &[0, 0]].concat(), Sender::Client), unexpected);
        assert_eq!(refused(&[&trailed[..], &[0, 1, 0]].concat(), Sender::Client), unexpected);
        assert_eq!(refused(&[&trailed[..], &head[..]].concat(), Sender::Client), unexpected);
        for kind in [0x2, 0x3, 0x4, 0x6, 0x7, 0x8, 0x9, 0xd] {
            assert_eq!(refused(&[kind, 1, 0], Sender::Client), unexpected, "{kind:#x}");
        }
        assert_eq!(refused(&[5, 1, 0], Sender::Server), (Code::Id, false));
        // Cut in a frame, and a request that never begins.
        assert_eq!(refused(&head[..head.len() - 1], Sender::Client), (Code::Frame, false));
        assert_eq!(refused(&[0x21, 0], Sender::Client), (Code::RequestIncomplete, true));
        let mut bomb = Vec::new();
        put_header(&mut bomb, 1, 1 << 20);
        assert_eq!(refused(&bomb, Sender::Client), (Code::ExcessiveLoad, true));
    }

    #[test]
    fn the_control_stream_says_settings_first_and_once() {
        let mut wire = vec![0];
        Settings::ours(true).put(&mut wire);
        let settings = wire.clone();
        put_frame(&mut wire, 0x21, b"grease");
        put_goaway(&mut wire, 8);
        put_goaway(&mut wire, 4);
        for step in 1..wire.len() {
            let expected = vec![Said::Settings(Settings::ours(true)), Said::Goaway(8), Said::Goaway(4)];
            assert_eq!(uni(&wire, Sender::Server, step), (expected, None));
        }
        let fails = |bytes: &[u8], peer| {
            let whole = code(uni(bytes, peer, usize::MAX).1);
            assert_eq!(code(uni(bytes, peer, 1).1), whole);
            whole
        };
        let behind = |more: &str| [&settings[..], &hex(more)].concat();
        for (bytes, expected) in [
            (hex("00 07 01 00"), Code::MissingSettings),
            (hex("00 00 01 00"), Code::MissingSettings),
            (behind("04 00"), Code::FrameUnexpected),
            (behind("00 01 00"), Code::FrameUnexpected),
            (behind("01 01 00"), Code::FrameUnexpected),
            (behind("06 01 00"), Code::FrameUnexpected),
            (behind("0d 01 00"), Code::FrameUnexpected),
            (behind("07 01 01"), Code::Id),
            (behind("07 01 04 07 01 08"), Code::Id),
            (behind("07 02 00 00"), Code::Frame),
            (behind("07 00"), Code::Frame),
            (behind("07 09"), Code::Frame),
            (hex("00 04 02 06 40"), Code::Frame),
            (hex("00 04 04 08 01 08 01"), Code::Settings),
            (hex("00 04 02 08 02"), Code::Settings),
            (hex("00 04 02 33 02"), Code::Settings),
            (hex("00 04 02 02 00"), Code::Settings),
            (hex("00 04 60 00"), Code::ExcessiveLoad),
            (hex("01 00"), Code::StreamCreation),
            // QPACK: a table, an entry, and what refers to one.
            (hex("02 3f e1 1f"), Code::QpackEncoderStream),
            (hex("02 c0 00"), Code::QpackEncoderStream),
            (hex("02 4a"), Code::QpackEncoderStream),
            (hex("03 80"), Code::QpackDecoderStream),
            (hex("03 01"), Code::QpackDecoderStream),
        ] {
            assert_eq!(fails(&bytes, Sender::Server), Some(expected), "{bytes:02x?}");
        }
        // What a client may say, capacity 0, and cancellations of streams however large their ids.
        assert_eq!(fails(&behind("0d 01 00 03 01 00"), Sender::Client), None);
        assert_eq!(fails(&hex("02 20 20"), Sender::Client), None);
        assert_eq!(fails(&hex("03 44 7f ff ff ff ff ff 01 41"), Sender::Client), None);
        assert_eq!(uni(&hex("21 00 00"), Sender::Client, 1), (vec![Said::Unknown], None));
    }

    #[test]
    fn each_stream_exists_once_and_stays_open() {
        let mut opened = Opened::default();
        for kind in [0_u8, 2, 3] {
            let mut first = Uni::new(Sender::Client);
            assert_eq!(first.end(), Ok(()));
            assert_eq!(first.next(&mut &[kind][..], &mut opened), Ok(None));
            assert_eq!(code(first.end().err()), Some(Code::ClosedCriticalStream));
            let again = Uni::new(Sender::Client).next(&mut &[kind][..], &mut opened);
            assert_eq!(code(again.err()), Some(Code::StreamCreation));
        }
    }

    #[test]
    fn datagrams_name_a_quarter_of_their_stream() {
        for (stream, head) in
            [(0, "00 00"), (4, "01 00"), (252, "3f 00"), (256, "4040 00"), (65_536, "80004000 00")]
        {
            let mut out = Vec::new();
            datagram::put(&mut out, stream, b"payload");
            assert_eq!(out, [&hex(head)[..], b"payload"].concat());
            assert_eq!(datagram::header_bytes(stream), hex(head).len());
            assert_eq!(datagram::read(&out), Ok((stream, Some(&b"payload"[..]))));
        }
        assert_eq!(datagram::read(&hex("01 00")), Ok((4, Some(&[][..]))));
        // Another context, and none.
        assert_eq!(datagram::read(&hex("01 02 61")), Ok((4, None)));
        assert_eq!(datagram::read(&hex("01")), Ok((4, None)));
        for odd in ["", "40", "ffffffffffffffff 00"] {
            assert_eq!(code(datagram::read(&hex(odd)).err()), Some(Code::Datagram), "{odd}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_alike(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            any_bytes(&bytes);
        }

        #[test]
        fn damaged_messages_are_read_alike(at in any::<proptest::sample::Index>(), byte: u8, first: u8) {
            for (_, seed) in seeds() {
                let mut bytes = seed;
                bytes[0] = first;
                let at = at.index(bytes.len());
                bytes[at] = byte;
                any_bytes(&bytes);
            }
        }
    }

    /// The seeds of the fuzz target. Their first byte says who sends, and how the rest is cut.
    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let mut post = request(&get(&[("content-length", "4")]), &[]);
        put_frame(&mut post, 0, b"data");
        put_trailers(&mut post, &lines(&[("x", "y")]));
        let mut response = Vec::new();
        put_response(&mut response, 103, &Lines::new());
        put_response(&mut response, 200, &lines(&[("content-type", "text/plain")]));
        put_frame(&mut response, 0, b"hello");
        let mut control = vec![0];
        Settings::ours(true).put(&mut control);
        put_goaway(&mut control, 4);
        let with = |first: u8, bytes: &[u8]| [&[first], bytes].concat();
        vec![
            ("request", with(0, &post)),
            ("response", with(3, &response)),
            ("control", with(1, &control)),
            ("encoder", with(2, &hex("02 20 3f e1 1f"))),
            ("decoder", with(2, &hex("03 44 80"))),
            ("datagram", with(0, &hex("01 00 616263"))),
            ("section", with(0, &hex("0000 d1 d7 50 8a 0161 2161 0162"))),
        ]
    }

    /// `SIDETRACK_WRITE_SEEDS=1 cargo test` writes the seeds of the fuzz target; otherwise they must be there as they are here.
    #[test]
    fn fuzz_seeds_are_current() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/http3");
        for (name, bytes) in seeds() {
            let path = folder.join(name);
            if option_env!("SIDETRACK_WRITE_SEEDS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(std::fs::read(&path).ok(), Some(bytes), "{name}: run with SIDETRACK_WRITE_SEEDS=1");
        }
    }
}
