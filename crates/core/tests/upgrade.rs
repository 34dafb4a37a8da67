//! The format of a hand-over between two versions of the program: golden bytes, every cut, and what is refused.

use sidetrack_core::upgrade::{
    BODY_MAX, FormatError, Found, Kind, OPTIONAL, Part, Reader, VERSION, greeting, part,
};

/// The exact form. If it changes, the release before cannot hand over to this one.
const GOLDEN: &[u8] = b"sidetrack\0\x00\x01\
    \x00\x10\x00\x02\x00\x00\x00\x0d{\"name\":\"in\"}\
    \x7f\xff\x01\x01\x00\x00\x00\x02{}\
    \x00\x13\x00\x00\x00\x00\x00\x02{}";

fn parts() -> Vec<Found> {
    let known = |kind, descriptors, body: &[u8]| Found::Part(Part { kind, descriptors, body: body.to_vec() });
    vec![known(Kind::Listener, 2, b"{\"name\":\"in\"}"), Found::Skipped(1), known(Kind::Offered, 0, b"{}")]
}

fn all(reader: &mut Reader) -> Result<Vec<Found>, FormatError> {
    std::iter::from_fn(|| reader.next_part().transpose()).take(100).collect()
}

fn read(bytes: &[u8]) -> Result<Vec<Found>, FormatError> {
    let mut reader = Reader::default();
    reader.push(bytes);
    all(&mut reader)
}

#[test]
fn the_golden_bytes_are_written_and_read() {
    let mut written = greeting();
    written.extend(part(Kind::Listener, 0, 2, b"{\"name\":\"in\"}").unwrap());
    let mut unknown = part(Kind::Offered, OPTIONAL, 1, b"{}").unwrap();
    unknown[..2].copy_from_slice(&[0x7f, 0xff]);
    written.extend(unknown);
    written.extend(part(Kind::Offered, 0, 0, b"{}").unwrap());
    assert_eq!(written, GOLDEN);
    assert_eq!(read(GOLDEN).unwrap(), parts());
}

#[test]
fn every_cut_gives_the_same_parts() {
    for at in 0..=GOLDEN.len() {
        let mut reader = Reader::default();
        let (first, second) = GOLDEN.split_at(at);
        reader.push(first);
        let mut found = all(&mut reader).unwrap();
        reader.push(second);
        found.extend(all(&mut reader).unwrap());
        assert_eq!(found, parts(), "cut at {at}");
    }
    let mut reader = Reader::default();
    let single: Vec<_> = GOLDEN
        .iter()
        .flat_map(|byte| {
            reader.push(&[*byte]);
            all(&mut reader).unwrap()
        })
        .collect();
    assert_eq!(single, parts(), "byte by byte");
}

#[test]
fn the_future_and_what_is_foreign_are_refused_for_ever() {
    let future = [b"sidetrack\0".as_slice(), &(VERSION + 1).to_be_bytes()].concat();
    let error = read(&future).unwrap_err();
    assert_eq!(error, FormatError::Future(VERSION + 1));
    assert!(error.to_string().contains("a later sidetrack"), "{error}");
    let mut reader = Reader::default();
    reader.push(&future);
    assert!(reader.next_part().is_err());
    reader.push(GOLDEN);
    assert_eq!(reader.next_part().unwrap_err(), FormatError::Future(VERSION + 1), "it stays an error");
    for foreign in [&b"GET / HTTP/1.1"[..], b"sidetracks", b"S", b"sidetrack\0\0\0"] {
        assert_eq!(read(foreign).unwrap_err(), FormatError::Foreign);
    }
    assert_eq!(read(b"").unwrap(), []);
}

#[test]
fn an_unknown_part_that_is_needed_and_one_that_is_too_large_are_refused() {
    let needed = [&greeting()[..], b"\x7f\xff\x00\x00\x00\x00\x00\x00"].concat();
    assert_eq!(read(&needed).unwrap_err(), FormatError::Unknown(0x7fff));
    let large = [&greeting()[..], b"\x00\x10\x00\x00\xff\xff\xff\xff"].concat();
    assert_eq!(read(&large).unwrap_err(), FormatError::TooLarge(u32::MAX));
    assert_eq!(part(Kind::Flow, 0, 0, &vec![0; BODY_MAX + 1]), None);
    for (at, kind) in Kind::ALL.into_iter().enumerate() {
        let others = Kind::ALL.into_iter().enumerate().filter(|(other, _)| *other != at);
        assert!(
            others.into_iter().all(|(_, other)| other as u16 != kind as u16),
            "{kind:?} has its own number"
        );
    }
}
