//! The examples of RFC 7541 Appendix C, malformed blocks, and random blocks of an encoder.

use super::{Decoder, HpackError, Rest, huffman};
use proptest::prelude::*;

type Field = (Vec<u8>, Vec<u8>);

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<Field>, HpackError> {
    let mut fields = Vec::new();
    let size = decoder.decode(block, |name, value| fields.push((name.to_vec(), value.to_vec())))?;
    assert_eq!(size, fields.iter().map(|(name, value)| name.len() + value.len() + 32).sum::<usize>());
    Ok(fields)
}

/// The bytes of a block in hexadecimal, its fields, and the table's size after it.
type Example<'a> = (&'a str, &'a [(&'a str, &'a str)], usize);

/// Decodes blocks of one connection.
fn check(table_max: usize, blocks: &[Example<'_>]) {
    let mut decoder = Decoder::new(table_max, 1 << 20);
    for (hex, wanted, size) in blocks {
        let fields = decode(&mut decoder, &bytes(hex)).unwrap();
        let wanted: Vec<Field> =
            wanted.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        assert_eq!(fields, wanted, "{hex}");
        assert_eq!(decoder.table.size(), *size, "{hex}");
    }
}

const WWW: &[(&str, &str)] =
    &[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")];
const NO_CACHE: &[(&str, &str)] = &[
    (":method", "GET"),
    (":scheme", "http"),
    (":path", "/"),
    (":authority", "www.example.com"),
    ("cache-control", "no-cache"),
];
const CUSTOM: &[(&str, &str)] = &[
    (":method", "GET"),
    (":scheme", "https"),
    (":path", "/index.html"),
    (":authority", "www.example.com"),
    ("custom-key", "custom-value"),
];
const FOUND: &[(&str, &str)] = &[
    (":status", "302"),
    ("cache-control", "private"),
    ("date", "Mon, 21 Oct 2013 20:13:21 GMT"),
    ("location", "https://www.example.com"),
];
const TEMPORARY: &[(&str, &str)] = &[
    (":status", "307"),
    ("cache-control", "private"),
    ("date", "Mon, 21 Oct 2013 20:13:21 GMT"),
    ("location", "https://www.example.com"),
];
const COOKIE: &[(&str, &str)] = &[
    (":status", "200"),
    ("cache-control", "private"),
    ("date", "Mon, 21 Oct 2013 20:13:22 GMT"),
    ("location", "https://www.example.com"),
    ("content-encoding", "gzip"),
    ("set-cookie", "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"),
];

#[test]
fn examples_of_single_fields() {
    check(
        4096,
        &[(
            "400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572",
            &[("custom-key", "custom-header")],
            55,
        )],
    );
    check(4096, &[("040c 2f73 616d 706c 652f 7061 7468", &[(":path", "/sample/path")], 0)]);
    check(4096, &[("1008 7061 7373 776f 7264 0673 6563 7265 74", &[("password", "secret")], 0)]);
    check(4096, &[("82", &[(":method", "GET")], 0)]);
}

#[test]
fn examples_of_requests_and_responses() {
    check(
        4096,
        &[
            ("8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d", WWW, 57),
            ("8286 84be 5808 6e6f 2d63 6163 6865", NO_CACHE, 110),
            ("8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65", CUSTOM, 164),
        ],
    );
    check(
        4096,
        &[
            ("8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff", WWW, 57),
            ("8286 84be 5886 a8eb 1064 9cbf", NO_CACHE, 110),
            ("8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf", CUSTOM, 164),
        ],
    );
    // Here the table has room for 256 bytes, so that entries leave.
    check(
        256,
        &[
            (
                "4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 \
                 3120 474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
                FOUND,
                222,
            ),
            ("4803 3330 37c1 c0bf", TEMPORARY, 222),
            (
                "88c1 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3220 474d 54c0 5a04 677a 6970 \
                 7738 666f 6f3d 4153 444a 4b48 514b 425a 584f 5157 454f 5049 5541 5851 5745 4f49 553b 206d 6178 2d61 \
                 6765 3d33 3630 303b 2076 6572 7369 6f6e 3d31",
                COOKIE,
                215,
            ),
        ],
    );
    check(
        256,
        &[
            (
                "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad \
                 1718 63c7 8f0b 97c8 e9ae 82ae 43d3",
                FOUND,
                222,
            ),
            ("4883 640e ffc1 c0bf", TEMPORARY, 222),
            (
                "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 821d d7f2 \
                 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
                COOKIE,
                215,
            ),
        ],
    );
}

#[test]
fn integers_have_their_value_or_too_many_bytes() {
    for (hex, prefix, wanted) in [
        ("0a", 5, Ok(10)),
        ("1f9a0a", 5, Ok(1337)),
        ("2a", 8, Ok(42)),
        ("1f00", 5, Ok(31)),
        ("1fffffff7f", 5, Ok(31 + (1 << 28) - 1)),
        ("1f80808000", 5, Ok(31)),
        ("1f8080808000", 5, Err(HpackError::Integer)),
        ("1fffffffff7f", 5, Err(HpackError::Integer)),
        ("1f80", 5, Err(HpackError::Truncated)),
        ("", 5, Err(HpackError::Truncated)),
    ] {
        assert_eq!(Rest(&bytes(hex)).integer(prefix), wanted, "{hex}");
    }
}

#[test]
fn malformed_blocks_are_errors() {
    for (hex, wanted) in [
        // No such entry: 0, and the first of an empty dynamic table.
        ("80", HpackError::Index),
        ("be", HpackError::Index),
        ("7e00", HpackError::Index),
        // A size update behind a field, and one beyond what we allow.
        ("8220", HpackError::SizeUpdate),
        ("3fe21f", HpackError::SizeUpdate),
        // Huffman: padding of 8 bits, padding with a 0, EOS, a code that is cut.
        ("0082 1fff", HpackError::Huffman),
        ("0081 18", HpackError::Huffman),
        ("0084 ffff ffff", HpackError::Huffman),
        ("0081 fe", HpackError::Huffman),
        // Longer than 100 bytes in all.
        // Three fields of 42 bytes, where 100 are allowed.
        ("8282 82", HpackError::TooLarge),
    ] {
        assert_eq!(decode(&mut Decoder::new(4096, 100), &bytes(hex)), Err(wanted), "{hex}");
    }
    // Every block that is cut inside a field.
    let whole = bytes("400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572");
    for length in 1..whole.len() {
        let cut = decode(&mut Decoder::new(4096, 100), &whole[..length]);
        assert_eq!(cut, Err(HpackError::Truncated), "{length}");
    }
}

#[test]
fn the_table_shrinks_and_grows_as_the_encoder_says() {
    let mut decoder = Decoder::new(4096, 1 << 20);
    // Added, and found again.
    decode(&mut decoder, &bytes("4001 6101 62")).unwrap();
    assert_eq!(decode(&mut decoder, &bytes("be")).unwrap(), [(b"a".to_vec(), b"b".to_vec())]);
    // Size 0 empties the table. Then 4096 again, in the same block.
    assert_eq!(
        decode(&mut decoder, &bytes("20 3fe11f 82")).unwrap(),
        [(b":method".to_vec(), b"GET".to_vec())]
    );
    assert_eq!(decode(&mut decoder, &bytes("be")), Err(HpackError::Index));
    // An entry that is larger than the table empties it.
    let mut decoder = Decoder::new(40, 1 << 20);
    decode(&mut decoder, &bytes("4001 6101 62")).unwrap();
    decode(&mut decoder, &bytes("4001 6108 6161 6161 6161 6161")).unwrap();
    assert_eq!(decoder.table.size(), 0);
}

#[test]
fn every_byte_has_its_own_code() {
    let all: Vec<u8> = (0..=u8::MAX).collect();
    assert_eq!(huffman::decode(&huffman::encode(&all)), Ok(all));
}

/// An encoder that keeps a table like the decoder, and takes one of the ways to write a field as it is told.
struct Encoder {
    table: Vec<Field>,
    max: usize,
}

impl Encoder {
    fn integer(out: &mut Vec<u8>, pattern: u8, prefix: u32, value: usize) {
        let full = (1 << prefix) - 1;
        if value < full {
            return out.push(pattern | u8::try_from(value).unwrap());
        }
        out.push(pattern | u8::try_from(full).unwrap());
        let mut rest = value - full;
        while rest >= 128 {
            out.push(u8::try_from(rest % 128).unwrap() | 0x80);
            rest /= 128;
        }
        out.push(u8::try_from(rest).unwrap());
    }

    fn string(out: &mut Vec<u8>, text: &[u8], is_huffman: bool) {
        let coded = if is_huffman { huffman::encode(text) } else { text.to_vec() };
        Self::integer(out, if is_huffman { 0x80 } else { 0 }, 7, coded.len());
        out.extend(coded);
    }

    fn shrink(&mut self) {
        let size = |field: &Field| field.0.len() + field.1.len() + 32;
        while self.table.iter().map(size).sum::<usize>() > self.max {
            self.table.pop();
        }
    }

    fn resize(&mut self, out: &mut Vec<u8>, max: usize) {
        Self::integer(out, 0x20, 5, max);
        self.max = max;
        self.shrink();
    }

    fn field(&mut self, out: &mut Vec<u8>, field: &Field, way: u8) {
        let is_huffman = way & 1 == 1;
        if let Some(at) = self.table.iter().position(|known| known == field) {
            return Self::integer(out, 0x80, 7, 62 + at);
        }
        let (pattern, prefix) = [(0x40, 6), (0x00, 4), (0x10, 4)][usize::from(way / 2) % 3];
        let known = self.table.iter().position(|(name, _)| *name == field.0);
        Self::integer(out, pattern, prefix, known.map_or(0, |at| 62 + at));
        if known.is_none() {
            Self::string(out, &field.0, is_huffman);
        }
        Self::string(out, &field.1, is_huffman);
        if pattern == 0x40 {
            self.table.insert(0, field.clone());
            self.shrink();
        }
    }
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![proptest::collection::vec(any::<u8>(), 0..40), "[a-c]{1,3}".prop_map(String::into_bytes)]
}

proptest! {
    #[test]
    fn what_an_encoder_writes_is_read(
        blocks in proptest::collection::vec(
            (proptest::option::of(0_usize..300), proptest::collection::vec((text(), text(), 0_u8..6), 0..8)),
            1..20,
        )
    ) {
        let mut decoder = Decoder::new(300, 1 << 20);
        let mut encoder = Encoder { table: Vec::new(), max: 300 };
        for (resize, fields) in blocks {
            let mut out = Vec::new();
            if let Some(max) = resize {
                encoder.resize(&mut out, max);
            }
            let fields: Vec<(Field, u8)> = fields.into_iter().map(|(name, value, way)| ((name, value), way)).collect();
            for (field, way) in &fields {
                encoder.field(&mut out, field, *way);
            }
            let wanted: Vec<Field> = fields.into_iter().map(|(field, _)| field).collect();
            prop_assert_eq!(decode(&mut decoder, &out), Ok(wanted));
            prop_assert!(decoder.table.size() <= encoder.max);
        }
    }

    #[test]
    fn any_bytes_are_survived(blocks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..5)) {
        let mut decoder = Decoder::new(200, 2000);
        for block in blocks {
            if decode(&mut decoder, &block).is_err() {
                break;
            }
            prop_assert!(decoder.table.size() <= 200);
        }
    }
}
