//! HTCP (RFC 2756, version 0.1): caches of other makers ask each other in datagrams whether they store a resource,
//! and then fetch it over HTTP.
//!
//! This module implements TST and NOP, with answers as the most common cache expects them. A miss has the same three
//! strings as a hit, all empty, although the RFC does not require it. CLR, which would remove stored responses, is
//! ignored. Version 0.0, which had another order of bits, is not supported.

use super::octets::Reader;

/// Longest datagram that is read or written, in bytes.
pub const MAX_BYTES: usize = 16 * 1024;

const NOP: u8 = 0;
const TST: u8 = 1;
/// Bit of the flags byte: this is a response.
const RESPONSE: u8 = 1;
/// Bit of the flags byte. In a request: a response is wanted. In a response: its code concerns the whole message.
const F1: u8 = 2;

/// A datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Asks whether the cache is alive.
    Nop {
        /// The transaction number.
        id: u32,
    },
    /// Asks whether a resource is stored.
    Test(Test<'a>),
    /// The answer to a test.
    Answer {
        /// The transaction number.
        id: u32,
        /// Whether the resource is stored.
        has: bool,
    },
    /// A message that needs no answer.
    Other,
}

/// A question about a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test<'a> {
    /// The transaction number.
    pub id: u32,
    /// The sender wants an answer.
    pub wants_answer: bool,
    /// The method.
    pub method: &'a [u8],
    /// The absolute URI.
    pub uri: &'a [u8],
    /// The field lines of the request.
    pub fields: &'a [u8],
}

/// Parses a datagram. `None` if it is not HTCP 0.1.
pub fn parse(bytes: &[u8]) -> Option<Message<'_>> {
    let mut all = Reader(bytes);
    let (length, major, minor) = (all.u16_be()?, all.u8()?, all.u8()?);
    if usize::from(length) != bytes.len() || (major, minor) != (0, 1) {
        return None;
    }
    let data_bytes = usize::from(all.u16_be()?);
    let mut data = Reader(all.take(data_bytes.checked_sub(2)?)?);
    // A signature is not checked: the sender's address decides who may ask.
    let auth = usize::from(all.u16_be()?);
    all.take(auth.checked_sub(2)?)?;
    let (code, flags, id) = (data.u8()?, data.u8()?, data.u32_be()?);
    let (opcode, response) = (code >> 4, code & 15);
    let is_response = flags & RESPONSE != 0;
    Some(match (opcode, is_response) {
        (NOP, false) => Message::Nop { id },
        (TST, false) => {
            let (method, uri, _version, fields) =
                (data.counted()?, data.counted()?, data.counted()?, data.counted()?);
            Message::Test(Test { id, wants_answer: flags & F1 != 0, method, uri, fields })
        }
        (TST, true) if flags & F1 == 0 => Message::Answer { id, has: response == 0 },
        // A code about the whole message: it was not understood, or is not allowed.
        (TST, true) => Message::Answer { id, has: false },
        _ => Message::Other,
    })
}

/// Encodes a question about a resource by GET, with these field lines. `None` if it is too long for a datagram.
pub fn write_test(id: u32, uri: &[u8], fields: &[u8]) -> Option<Vec<u8>> {
    message((TST << 4, F1, id), &[b"GET", uri, b"1/1", fields])
}

/// Encodes the answer to a question. `age_s` is the age of the stored response in seconds, or `None` for a miss.
pub fn write_answer(id: u32, age_s: Option<u64>) -> Option<Vec<u8>> {
    let age = age_s.map(|age_s| format!("Age: {age_s}\r\n")).unwrap_or_default();
    let not_found = u8::from(age_s.is_none());
    message((TST << 4 | not_found, RESPONSE, id), &[age.as_bytes(), b"", b""])
}

/// Encodes the answer to [`Message::Nop`].
pub fn write_nop(id: u32) -> Option<Vec<u8>> {
    message((NOP << 4, RESPONSE, id), &[])
}

fn message((code, flags, id): (u8, u8, u32), texts: &[&[u8]]) -> Option<Vec<u8>> {
    let mut data = vec![code, flags];
    data.extend_from_slice(&id.to_be_bytes());
    for text in texts {
        data.extend_from_slice(&u16::try_from(text.len()).ok()?.to_be_bytes());
        data.extend_from_slice(text);
    }
    let length = data.len() + 2 + 4 + 2;
    let short = |length: usize| u16::try_from(length).ok().filter(|_| length <= MAX_BYTES);
    let mut out = Vec::with_capacity(length);
    out.extend_from_slice(&short(length)?.to_be_bytes());
    out.extend_from_slice(&[0, 1]);
    out.extend_from_slice(&short(data.len() + 2)?.to_be_bytes());
    out.extend_from_slice(&data);
    out.extend_from_slice(&[0, 2]);
    Some(out)
}

impl<'a> Reader<'a> {
    /// Reads a COUNTSTR (RFC 2756 Sec. 3.1).
    fn counted(&mut self) -> Option<&'a [u8]> {
        let length = self.u16_be()?;
        self.take(usize::from(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TST for `http://a/` with one field line, laid out as in RFC 2756 Sec. 2 and 5.
    const QUESTION: &[u8] = b"\x00\x2f\x00\x01\x00\x29\x10\x02\x00\x00\x00\x07\x00\x03GET\x00\x09http://a/\x00\x031/1\x00\x0aAccept: *\n\x00\x02";

    #[test]
    fn a_question_is_these_bytes() {
        assert_eq!(write_test(7, b"http://a/", b"Accept: *\n").unwrap(), QUESTION);
        let test =
            Test { id: 7, wants_answer: true, method: b"GET", uri: b"http://a/", fields: b"Accept: *\n" };
        assert_eq!(parse(QUESTION), Some(Message::Test(test)));
        assert_eq!(write_test(1, &[b'a'; MAX_BYTES], b""), None);
    }

    #[test]
    fn answers_are_these_bytes_and_a_miss_has_three_empty_strings() {
        let hit = write_answer(9, Some(5)).unwrap();
        assert_eq!(
            hit,
            b"\x00\x1c\x00\x01\x00\x16\x10\x01\x00\x00\x00\x09\x00\x08Age: 5\r\n\x00\x00\x00\x00\x00\x02"
        );
        let miss = write_answer(9, None).unwrap();
        assert_eq!(miss, b"\x00\x14\x00\x01\x00\x0e\x11\x01\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00\x02");
        assert_eq!(parse(&hit), Some(Message::Answer { id: 9, has: true }));
        assert_eq!(parse(&miss), Some(Message::Answer { id: 9, has: false }));
        assert_eq!(parse(&write_nop(3).unwrap()), Some(Message::Other), "an answer that nobody waits for");
        assert_eq!(
            parse(b"\x00\x0e\x00\x01\x00\x08\x00\x02\x00\x00\x00\x03\x00\x02"),
            Some(Message::Nop { id: 3 })
        );
        let refused = b"\x00\x0e\x00\x01\x00\x08\x15\x03\x00\x00\x00\x09\x00\x02";
        assert_eq!(parse(refused), Some(Message::Answer { id: 9, has: false }));
    }

    #[test]
    fn what_is_cut_changed_or_of_another_version_is_none() {
        for end in 0..QUESTION.len() {
            assert_eq!(parse(&QUESTION[..end]), None, "cut at {end}");
        }
        let with = |at: usize, byte: u8| {
            let mut bytes = QUESTION.to_vec();
            bytes[at] = byte;
            bytes
        };
        for (at, byte) in [(1, 0x30), (2, 1), (3, 0), (5, 0xff), (5, 1), (13, 0xff), (46, 1)] {
            assert_eq!(parse(&with(at, byte)), None, "{byte} at {at}");
        }
        assert_eq!(parse(&with(6, 0x40)), Some(Message::Other), "CLR");
        // Change every byte: no panic.
        for at in 0..QUESTION.len() {
            for byte in 0..=255 {
                let _ = parse(&with(at, byte));
            }
        }
    }
}
