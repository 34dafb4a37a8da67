//! Capsules and the paths of CONNECT-UDP. The fuzz target `http_capsules` includes this file.

use sidetrack_core::http::capsule::{
    CapsuleError, HEADER_MAX, PAYLOAD_MAX, Reader, VALUE_MAX, VARINT_MAX, put_datagram, put_varint,
    read_varint,
};
use sidetrack_core::http::udp::{TargetError, path, target};

/// What a stream of capsules has brought: the payloads, how many capsules were skipped, and how it ended.
type Brought = (Vec<Vec<u8>>, u64, Result<(), CapsuleError>);

/// Reads a stream that comes in these pieces. The reader never holds more than one capsule besides the last piece.
fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Brought {
    let mut reader = Reader::default();
    let mut payloads = Vec::new();
    for piece in pieces {
        reader.push(piece);
        loop {
            match reader.payload() {
                Ok(Some(payload)) => payloads.push(payload.to_vec()),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(reader.payload(), Err(error), "it stays broken");
                    return (payloads, reader.skipped(), Err(error));
                }
            }
        }
        assert!(reader.held_bytes() <= VALUE_MAX + 16, "it holds {} bytes", reader.held_bytes());
    }
    (payloads, reader.skipped(), reader.end())
}

/// Any bytes as a stream of capsules: no panic, and the same result however they are cut. What is brought is written and read
/// again as it was. Any bytes as a path: what is accepted comes back as it was.
pub(crate) fn any_bytes(bytes: &[u8]) {
    let whole = read([bytes]);
    assert_eq!(read(bytes.chunks(1)), whole);
    assert_eq!(read(bytes.chunks(7)), whole);
    let mut again = Vec::new();
    assert!(whole.0.iter().all(|payload| put_datagram(&mut again, payload)));
    assert_eq!(read([&*again]), (whole.0, 0, Ok(())));
    if let Ok(to) = target(bytes) {
        let written = path(&to).expect("what was read can be written");
        assert_eq!(target(written.as_bytes()), Ok(to));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<_> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
    }

    fn datagrams(payloads: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        payloads.iter().for_each(|payload| assert!(put_datagram(&mut out, payload)));
        out
    }

    #[test]
    fn integers_are_those_of_rfc_9000() {
        // RFC 9000 Appendix A.1.
        for (bytes, value) in [
            ("c2197c5eff14e88c", 151_288_809_941_952_652),
            ("9d7f3e7d", 494_878_333),
            ("7bbd", 15_293),
            ("25", 37),
        ] {
            let bytes = hex(bytes);
            assert_eq!(read_varint(&bytes), Some((value, bytes.len())));
            let mut out = Vec::new();
            put_varint(&mut out, value);
            assert_eq!(out, bytes);
            for length in 0..bytes.len() {
                assert_eq!(read_varint(&bytes[..length]), None);
            }
        }
        assert_eq!(read_varint(&hex("4025")), Some((37, 2)), "more bytes than necessary");
        for value in [0, 0x3f, 0x40, 0x3fff, 0x4000, 0x3fff_ffff, 0x4000_0000, VARINT_MAX] {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            assert_eq!(read_varint(&out), Some((value, out.len())));
        }
        let mut out = Vec::new();
        put_varint(&mut out, u64::MAX);
        assert_eq!(read_varint(&out), Some((VARINT_MAX, 8)));
    }

    #[test]
    fn a_datagram_has_three_bytes_before_it() {
        assert_eq!(datagrams(&[b"hi"]), hex("00 03 00 6869"));
        assert_eq!(datagrams(&[b""]), hex("00 01 00"));
        assert_eq!(datagrams(&[&[7; 63]])[..4], *hex("00 4040 00"));
        let longest = vec![1; PAYLOAD_MAX];
        let bytes = datagrams(&[&longest]);
        assert_eq!(bytes[..6], *hex("00 8000fff8 00"));
        assert_eq!(bytes.len(), HEADER_MAX + PAYLOAD_MAX);
        assert_eq!(read([&*bytes]), (vec![longest], 0, Ok(())));
        let mut out = Vec::new();
        assert!(!put_datagram(&mut out, &vec![1; PAYLOAD_MAX + 1]) && out.is_empty(), "never cut");
    }

    #[test]
    fn what_is_unknown_is_skipped_wherever_the_stream_is_cut() {
        // A datagram; a capsule of type 0x2a; one of a reserved type (0x29 * n + 0x17) without a value; a datagram of context 2;
        // a datagram with the context in 8 bytes; an empty payload.
        let stream = hex(
            "00 03 00 6869 2a 05 0102030405 40a9 00 00 04 02 616263 00 0b c000000000000000 6f6b21 00 01 00",
        );
        let expected = (vec![b"hi".to_vec(), b"ok!".to_vec(), Vec::new()], 3, Ok(()));
        for cut in 0..=stream.len() {
            let (one, other) = stream.split_at(cut);
            assert_eq!(read([one, other]), expected, "cut at {cut}");
        }
        assert_eq!(read(stream.chunks(1)), expected);
        // The stream that ends within a capsule is told from one that ends between two.
        let ends = [0, 5, 12, 15, 21, 34, 37];
        for cut in 0..=stream.len() {
            let ended = read([&stream[..cut]]).2;
            let is_whole = ends.contains(&cut);
            assert_eq!(ended, if is_whole { Ok(()) } else { Err(CapsuleError::Cut) }, "ends at {cut}");
        }
    }

    #[test]
    fn a_long_capsule_of_an_unknown_type_costs_no_memory() {
        let mut reader = Reader::default();
        let mut header = Vec::new();
        put_varint(&mut header, 0x2a);
        put_varint(&mut header, 1 << 32);
        reader.push(&header);
        assert_eq!(reader.payload(), Ok(None));
        let block = vec![9; 1 << 20];
        for _ in 0..1 << 12 {
            reader.push(&block);
            assert_eq!(reader.payload(), Ok(None));
            assert_eq!(reader.held_bytes(), 0);
        }
        reader.push(&datagrams(&[b"after"]));
        assert_eq!(reader.payload(), Ok(Some(&b"after"[..])));
        // The longest there can be does not overflow.
        let (mut reader, mut header) = (Reader::default(), Vec::new());
        put_varint(&mut header, 0x2a);
        put_varint(&mut header, VARINT_MAX);
        reader.push(&header);
        reader.push(&block);
        assert_eq!(reader.payload(), Ok(None));
        assert_eq!(reader.held_bytes(), 0);
        assert_eq!(reader.end(), Err(CapsuleError::Cut));
    }

    #[test]
    fn a_datagram_that_is_too_long_breaks_the_stream_before_it_is_held() {
        for (header, error) in [
            // 65,536 bytes of value: more than the longest context and payload.
            ("00 80010000", CapsuleError::TooLong(65_536)),
            ("00 ffffffffffffffff", CapsuleError::TooLong(VARINT_MAX)),
            // A payload of 65,528 bytes of context 0.
            ("00 8000fff9 00", CapsuleError::TooLong(65_529)),
            ("00 00", CapsuleError::NoContext),
            ("00 01 40", CapsuleError::NoContext),
        ] {
            let mut stream = datagrams(&[b"before"]);
            stream.extend(hex(header));
            let expected = (vec![b"before".to_vec()], 0, Err(error));
            assert_eq!(read([&*stream]), expected, "{header}");
            assert_eq!(read(stream.chunks(1)), expected, "{header}");
        }
    }

    #[test]
    fn paths_are_those_of_rfc_9298() {
        for (text, to) in [
            ("/.well-known/masque/udp/192.0.2.6/443/", "192.0.2.6:443"),
            ("/.well-known/masque/udp/2001%3Adb8%3A%3A42/443/", "[2001:db8::42]:443"),
            ("/.well-known/masque/udp/target.example.com/1/", "target.example.com:1"),
        ] {
            let to = to.parse().unwrap();
            assert_eq!(path(&to).as_deref(), Some(text));
            assert_eq!(target(text.as_bytes()), Ok(to));
        }
        let read = |text: &str| target(format!("/.well-known/masque/udp/{text}").as_bytes());
        assert_eq!(read("2001:db8::42/443/"), read("2001%3adb8%3a%3a42/443/"), "colons as they are");
        assert_eq!(read("%77eb.example/65535/"), Ok("web.example:65535".parse().unwrap()));
        assert_eq!(read("%3A%3Affff%3A192.0.2.6/9/"), Ok("192.0.2.6:9".parse().unwrap()));
        for (text, error) in [
            ("", TargetError::Shape),
            ("h/1", TargetError::Shape),
            ("h/1/?x", TargetError::Shape),
            ("h/1/x", TargetError::Shape),
            ("h/1//", TargetError::Shape),
            ("/1/", TargetError::Host),
            ("%/1/", TargetError::Host),
            ("%4/1/", TargetError::Host),
            ("%zz/1/", TargetError::Host),
            ("%+1/1/", TargetError::Host),
            ("a%00b/1/", TargetError::Host),
            ("a%2fb/1/", TargetError::Host),
            ("a%0d%0ab/1/", TargetError::Host),
            ("[2001:db8::1]/1/", TargetError::Host),
            ("fe80%3A%3A1%25eth0/1/", TargetError::Host),
            ("127.1/1/", TargetError::Host),
            ("h:1/1/", TargetError::Host),
            ("h/0/", TargetError::Port),
            ("h/65536/", TargetError::Port),
            ("h/+1/", TargetError::Port),
            ("h/%31/", TargetError::Port),
            ("h//", TargetError::Port),
        ] {
            assert_eq!(read(text), Err(error), "{text}");
        }
        assert_eq!(target(b"/.well-known/masque/ip/h/1/"), Err(TargetError::Shape));
        let destination: sidetrack_core::flow::Destination = "web.example:1".parse().unwrap();
        assert_eq!(path(&sidetrack_core::flow::Destination { port: 0, ..destination }), None);
        let zone = sidetrack_core::flow::Destination { zone: 3, ..("[fe80::1]:1".parse().unwrap()) };
        assert_eq!(path(&zone), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_alike(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            any_bytes(&bytes);
        }

        #[test]
        fn damaged_streams_are_read_alike(
            payloads in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..70), 0..6),
            at in any::<proptest::sample::Index>(),
            byte in 0u8..70,
        ) {
            let mut stream = Vec::new();
            payloads.iter().for_each(|payload| assert!(put_datagram(&mut stream, payload)));
            any_bytes(&stream);
            if !stream.is_empty() {
                let at = at.index(stream.len());
                stream[at] = byte;
                any_bytes(&stream);
            }
        }

        #[test]
        fn any_path_is_read_as_it_is_written(text in "/\\.well-known/masque/udp/[a-f0-9:.%]{0,20}/[0-9]{0,6}/") {
            any_bytes(text.as_bytes());
        }
    }

    /// `SIDETRACK_WRITE_SEEDS=1 cargo test` writes the seeds of the fuzz target; otherwise they must be there as they are here.
    #[test]
    fn fuzz_seeds_are_current() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/http_capsules");
        for (name, bytes) in [
            ("datagrams", datagrams(&[b"one", b"", &[7; 100]])),
            ("unknown", hex("2a 05 0102030405 40a9 00 00 04 02 616263 00 03 00 6869")),
            ("too_long", hex("00 80010000 00")),
            ("path", b"/.well-known/masque/udp/2001%3Adb8%3A%3A42/443/".to_vec()),
        ] {
            let path = folder.join(name);
            if option_env!("SIDETRACK_WRITE_SEEDS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(std::fs::read(&path).ok(), Some(bytes), "{name}: run with SIDETRACK_WRITE_SEEDS=1");
        }
    }
}
