//! PROXY protocol versions 1 and 2: test vectors, strictness, and both directions.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::flow::HostName;
use sidetrack_core::proxy_protocol::{
    Addresses, EncodeError, Header, HeaderError, MAX_V1, MAX_V2, Parsed, Tls, Tlv, Transport, Version,
    encode_v1, encode_v2, parse,
};
use std::net::SocketAddr;

const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

fn at(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

fn tcp(client: &str, server: &str) -> Addresses {
    Addresses::Inet { transport: Transport::Stream, client: at(client), server: at(server) }
}

/// Parses with more bytes behind, and checks that every proper prefix is incomplete.
fn header(bytes: &[u8]) -> Header {
    for end in 0..bytes.len() {
        assert_eq!(parse(&bytes[..end]), Parsed::Incomplete, "{end} of {bytes:02x?}");
    }
    match parse(&[bytes, b"GET / HTTP/1.1\r\n"].concat()) {
        Parsed::Header { header, consumed } => {
            assert_eq!(consumed, bytes.len());
            header
        }
        other => panic!("{bytes:02x?}: {other:?}"),
    }
}

fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
    let length = u16::try_from(block.len()).unwrap().to_be_bytes();
    [SIGNATURE, &[command, family], &length, block].concat()
}

const FOUR: [u8; 12] = [192, 0, 2, 1, 198, 51, 100, 1, 0xdc, 0x04, 0x01, 0xbb];

fn v2_with_tlvs(tlvs: &[u8]) -> Vec<u8> {
    v2(0x21, 0x11, &[&FOUR[..], tlvs].concat())
}

#[test]
fn version_1_lines() {
    for (line, expected) in [
        ("TCP4 192.0.2.1 198.51.100.1 56324 443", tcp("192.0.2.1:56324", "198.51.100.1:443")),
        (
            "TCP4 255.255.255.255 255.255.255.255 65535 65535",
            tcp("255.255.255.255:65535", "255.255.255.255:65535"),
        ),
        ("TCP4 0.0.0.0 0.0.0.0 0 0", tcp("0.0.0.0:0", "0.0.0.0:0")),
        ("TCP6 2001:db8::1 2001:DB8::2 1 2", tcp("[2001:db8::1]:1", "[2001:db8::2]:2")),
        (
            "TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535",
            tcp(
                "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535",
                "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535",
            ),
        ),
        ("TCP6 ::ffff:192.0.2.1 ::1 1 2", tcp("192.0.2.1:1", "[::1]:2")),
        ("UNKNOWN", Addresses::Unknown),
        ("UNKNOWN TCP9 what ever\t\0\u{1}", Addresses::Unknown),
        (
            "UNKNOWN ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535",
            Addresses::Unknown,
        ),
    ] {
        let read = header(format!("PROXY {line}\r\n").as_bytes());
        assert_eq!(read, Header { version: Version::V1, addresses: expected, tlvs: vec![] }, "{line}");
    }
    let longest = format!("PROXY UNKNOWN {}\r\n", "x".repeat(MAX_V1 - 16));
    assert_eq!(longest.len(), MAX_V1);
    assert_eq!(header(longest.as_bytes()).addresses, Addresses::Unknown);
}

#[test]
fn version_1_is_strict() {
    for line in [
        "",
        "TCP4",
        "TCP4 192.0.2.1 198.51.100.1 1",
        "TCP4 192.0.2.1 198.51.100.1 1 2 3",
        "TCP4 192.0.2.1 198.51.100.1 1 2 ",
        "TCP4  192.0.2.1 198.51.100.1 1 2",
        " TCP4 192.0.2.1 198.51.100.1 1 2",
        "TCP4 192.0.2.01 198.51.100.1 1 2",
        "TCP4 192.0.2.256 198.51.100.1 1 2",
        "TCP4 192.0.2 198.51.100.1 1 2",
        "TCP4 0xc0.0.2.1 198.51.100.1 1 2",
        "TCP4 192.0.2.1 198.51.100.1 01 2",
        "TCP4 192.0.2.1 198.51.100.1 00 2",
        "TCP4 192.0.2.1 198.51.100.1 +1 2",
        "TCP4 192.0.2.1 198.51.100.1 -1 2",
        "TCP4 192.0.2.1 198.51.100.1 65536 2",
        "TCP4 192.0.2.1 198.51.100.1 1 ",
        "TCP4 2001:db8::1 2001:db8::2 1 2",
        "TCP6 192.0.2.1 198.51.100.1 1 2",
        "TCP6 [2001:db8::1] 2001:db8::2 1 2",
        "TCP6 fe80::1%eth0 2001:db8::2 1 2",
        "TCP6 1::2::3 2001:db8::2 1 2",
        "TCP6 12345::1 2001:db8::2 1 2",
        "UDP4 192.0.2.1 198.51.100.1 1 2",
        "tcp4 192.0.2.1 198.51.100.1 1 2",
        "TCP4\t192.0.2.1 198.51.100.1 1 2",
        "UNKNOWNX",
        "unknown",
        "TCP4 192.0.2.1\0 198.51.100.1 1 2",
        "TCP4 192.0.2.1 198.51.100.1 1 ２",
    ] {
        let bytes = format!("PROXY {line}\r\n");
        assert_eq!(parse(bytes.as_bytes()), Parsed::Malformed(HeaderError::BadAddress), "{line:?}");
    }
}

#[test]
fn version_1_lines_end_with_crlf_in_time() {
    for bytes in ["PROXY UNKNOWN\n", "PROXY UNKNOWN\rx", "PROXY UNKNOWN \r\r\n", "PROXY \n"] {
        assert_eq!(parse(bytes.as_bytes()), Parsed::Malformed(HeaderError::BadLine), "{bytes:?}");
    }
    let mut bytes = b"PROXY UNKNOWN ".to_vec();
    bytes.resize(MAX_V1 - 1, b'x');
    assert_eq!(parse(&bytes), Parsed::Incomplete);
    bytes.push(b'x');
    assert_eq!(parse(&bytes), Parsed::Malformed(HeaderError::BadLine));
    bytes.truncate(MAX_V1 - 1);
    bytes.extend_from_slice(b"\r\n");
    assert_eq!(parse(&bytes), Parsed::Malformed(HeaderError::BadLine), "108 bytes with CRLF");
    assert_eq!(parse(&bytes[..MAX_V1]), Parsed::Malformed(HeaderError::BadLine), "no room for LF");
}

#[test]
fn other_first_bytes_are_refused_at_the_first_odd_one() {
    for (bytes, odd) in [
        (&b"GET / HTTP/1.1\r\n"[..], 1),
        (b"PRI * HTTP/2.0", 3),
        (b"PROXY\tTCP4", 6),
        (b"\x16\x03\x01", 1),
        (b"\r\n\r\nGET", 5),
        (b"\r\n\r\n\0\r\nQUIT\r", 12),
    ] {
        assert_eq!(parse(&bytes[..odd - 1]), Parsed::Incomplete, "{bytes:?}");
        assert_eq!(parse(&bytes[..odd]), Parsed::Malformed(HeaderError::NotProxy), "{bytes:?}");
        assert_eq!(parse(bytes), Parsed::Malformed(HeaderError::NotProxy), "{bytes:?}");
    }
}

#[test]
fn version_2_addresses() {
    let six =
        [&[0x20, 0x01, 0x0d, 0xb8][..], &[0; 11], &[1], &[0; 10], &[0xff, 0xff, 192, 0, 2, 7, 0, 1, 0, 2]]
            .concat();
    let mut unix = [0; 216];
    unix[..9].copy_from_slice(b"/tmp/sock");
    unix[108..114].copy_from_slice(b"\0abstr");
    let inet = |transport| Addresses::Inet {
        transport,
        client: at("192.0.2.1:56324"),
        server: at("198.51.100.1:443"),
    };
    let six_addresses =
        |transport| Addresses::Inet { transport, client: at("[2001:db8::1]:1"), server: at("192.0.2.7:2") };
    let unix_addresses =
        |transport| Addresses::Unix { transport, client: b"/tmp/sock".to_vec(), server: b"\0abstr".to_vec() };
    for (command, family, block, expected) in [
        (0x21, 0x11, &FOUR[..], inet(Transport::Stream)),
        (0x21, 0x12, &FOUR, inet(Transport::Datagram)),
        (0x21, 0x21, &six, six_addresses(Transport::Stream)),
        (0x21, 0x22, &six, six_addresses(Transport::Datagram)),
        (0x21, 0x31, &unix, unix_addresses(Transport::Stream)),
        (0x21, 0x32, &unix, unix_addresses(Transport::Datagram)),
        (0x20, 0x00, b"", Addresses::Local),
        (0x20, 0x00, b"\xff\xff\xff", Addresses::Local),
        (0x20, 0x11, &FOUR, Addresses::Local),
        (0x20, 0x11, b"short", Addresses::Local),
        (0x21, 0x00, b"", Addresses::Unknown),
        (0x21, 0x00, b"anything", Addresses::Unknown),
    ] {
        let read = header(&v2(command, family, block));
        assert_eq!(read, Header { version: Version::V2, addresses: expected, tlvs: vec![] });
    }
    assert_eq!(
        header(&v2(0x21, 0x11, &FOUR)).tcp_addresses(),
        Some((at("192.0.2.1:56324"), at("198.51.100.1:443")))
    );
    assert_eq!(header(&v2(0x21, 0x12, &FOUR)).tcp_addresses(), None);
    assert_eq!(header(&v2(0x20, 0x11, &FOUR)).tcp_addresses(), None);
}

#[test]
fn version_2_is_strict_as_early_as_it_can_be() {
    use HeaderError::{BadCommand, BadFamily, BadLength};
    for command in (0..=255).filter(|command| ![0x20, 0x21].contains(command)) {
        let bytes = [SIGNATURE, &[command]].concat();
        assert_eq!(parse(&bytes), Parsed::Malformed(BadCommand), "{command:02x}");
    }
    let families = [0x00, 0x11, 0x12, 0x21, 0x22, 0x31, 0x32];
    for family in (0..=255).filter(|family| !families.contains(family)) {
        for command in [0x20, 0x21] {
            let bytes = [SIGNATURE, &[command, family]].concat();
            assert_eq!(parse(&bytes), Parsed::Malformed(BadFamily), "{family:02x}");
        }
    }
    for (family, length) in [(0x11, 11), (0x12, 0), (0x21, 35), (0x31, 215)] {
        assert_eq!(parse(&v2(0x21, family, &vec![0; length])), Parsed::Malformed(BadLength), "{family:02x}");
    }
    let longest = u16::try_from(MAX_V2 - 16).unwrap();
    let start = |length: u16| [SIGNATURE, &[0x20, 0], &length.to_be_bytes()].concat();
    assert_eq!(parse(&start(longest)), Parsed::Incomplete);
    assert_eq!(parse(&start(longest + 1)), Parsed::Malformed(BadLength));
    assert_eq!(parse(&start(u16::MAX)), Parsed::Malformed(BadLength));
}

#[test]
fn tlvs_are_read_in_order() {
    let tlvs = [
        &[0x01, 0, 2][..],
        b"h2",
        &[0x02, 0, 11],
        b"WWW.Example",
        &[0x04, 0, 3, 9, 9, 9],
        &[0x05, 0, 4, 1, 2, 3, 4],
        &[0x20, 0, 15, 5, 0, 0, 0, 0, 0x21, 0, 7],
        b"TLSv1.3",
        &[0x30, 0, 3],
        b"red",
        &[0xea, 0, 1, 1],
        &[0xe0, 0, 0],
        &[0xff, 0, 1, 7],
    ]
    .concat();
    let read = header(&v2_with_tlvs(&tlvs));
    let tls = Tls { client: 5, verify: 0, facts: vec![(Tls::VERSION, b"TLSv1.3".to_vec())] };
    assert_eq!(tls.fact(Tls::VERSION), Some(&b"TLSv1.3"[..]));
    assert_eq!(tls.fact(Tls::COMMON_NAME), None);
    assert_eq!(
        read.tlvs,
        [
            Tlv::Alpn(b"h2".to_vec()),
            Tlv::Authority("www.example".parse().unwrap()),
            Tlv::UniqueId(vec![1, 2, 3, 4]),
            Tlv::Tls(tls),
            Tlv::Netns(b"red".to_vec()),
            Tlv::Other { kind: 0xea, value: vec![1] },
            Tlv::Other { kind: 0xe0, value: vec![] },
            Tlv::Other { kind: 0xff, value: vec![7] },
        ]
    );
    let name = read.find(|tlv| if let Tlv::Authority(name) = tlv { Some(name) } else { None });
    assert_eq!(name.map(HostName::as_str), Some("www.example"));
}

#[test]
fn broken_tlvs_are_named_by_their_type() {
    let long_id = [&[0x05, 0, 129][..], &[7; 129]].concat();
    for (tlvs, kind) in [
        (&[0xe0][..], 0xe0),
        (&[0xe1, 0], 0xe1),
        (&[0xe2, 0, 1], 0xe2),
        (&[0x04, 0, 0, 0xe3, 0xff, 0xff, 1], 0xe3),
        (&[0x01, 0, 0], 0x01),
        (&[0x02, 0, 0], 0x02),
        (&[0x02, 0, 3, b'a', 0, b'b'], 0x02),
        (&[0x03, 0, 3, 1, 2, 3], 0x03),
        (&[0x03, 0, 5, 1, 2, 3, 4, 5], 0x03),
        (&long_id, 0x05),
        (&[0x20, 0, 4, 1, 0, 0, 0], 0x20),
        (&[0x20, 0, 7, 1, 0, 0, 0, 0, 0x21, 0], 0x20),
        (&[0x20, 0, 9, 1, 0, 0, 0, 0, 0x21, 0, 2, b'T'], 0x20),
    ] {
        assert_eq!(parse(&v2_with_tlvs(tlvs)), Parsed::Malformed(HeaderError::BadTlv(kind)), "{tlvs:02x?}");
    }
}

#[test]
fn the_checksum_covers_every_byte() {
    let tlvs = [Tlv::UniqueId(b"flow 7".to_vec()), Tlv::Other { kind: 0xe4, value: vec![0; 5] }];
    let addresses = tcp("192.0.2.1:56324", "198.51.100.1:443");
    let bytes = encode_v2(&addresses, &tlvs, true).unwrap();
    assert_eq!(header(&bytes), Header { version: Version::V2, addresses, tlvs: tlvs.to_vec() });
    // After the fixed part, which has errors of its own, every flipped bit is detected. The exception is the type of the
    // checksum: if it changes, it is another TLV.
    for index in (16..bytes.len()).filter(|index| *index != bytes.len() - 7) {
        for bit in 0..8 {
            let mut broken = bytes.clone();
            broken[index] ^= 1 << bit;
            assert!(matches!(parse(&broken), Parsed::Malformed(_)), "bit {bit} of byte {index}");
        }
    }
    let mut twice = bytes.clone();
    twice.extend_from_slice(&bytes[bytes.len() - 7..]);
    twice[15] += 7;
    assert!(matches!(parse(&twice), Parsed::Malformed(HeaderError::BadChecksum)));
}

#[test]
fn a_checksum_in_the_middle_is_checked_as_well() {
    let mut bytes = v2_with_tlvs(&[0x03, 0, 4, 0, 0, 0, 0, 0x05, 0, 1, 9]);
    let field = 16 + 12 + 3;
    let sum = bitwise_crc32c(&bytes);
    bytes[field..field + 4].copy_from_slice(&sum);
    assert_eq!(header(&bytes).tlvs, [Tlv::UniqueId(vec![9])]);
    bytes[field] ^= 1;
    assert_eq!(parse(&bytes), Parsed::Malformed(HeaderError::BadChecksum));

    let mut two = v2_with_tlvs(&[0x03, 0, 4, 0, 0, 0, 0, 0x03, 0, 4, 1, 2, 3, 4]);
    let sum = bitwise_crc32c(&two);
    two[field..field + 4].copy_from_slice(&sum);
    assert_eq!(
        parse(&two),
        Parsed::Malformed(HeaderError::BadTlv(3)),
        "the first is right, a second makes no sense"
    );
}

/// CRC32c by its definition, independent of the one under test.
fn bitwise_crc32c(bytes: &[u8]) -> [u8; 4] {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0x82f6_3b78 * (sum & 1)))
    };
    (!bytes.iter().fold(!0, step)).to_be_bytes()
}

#[test]
fn headers_as_they_go_on_the_wire() {
    let text = |addresses: &Addresses| String::from_utf8(encode_v1(addresses)).unwrap();
    assert_eq!(
        text(&tcp("192.0.2.1:56324", "198.51.100.1:443")),
        "PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n"
    );
    assert_eq!(text(&tcp("[2001:db8::1]:1", "[::1]:2")), "PROXY TCP6 2001:db8::1 ::1 1 2\r\n");
    assert_eq!(text(&tcp("192.0.2.1:1", "[::1]:2")), "PROXY TCP6 ::ffff:192.0.2.1 ::1 1 2\r\n");
    assert_eq!(text(&Addresses::Local), "PROXY UNKNOWN\r\n");
    let mapped = Addresses::tcp(at("[::ffff:192.0.2.1]:1"), at("198.51.100.1:2"));
    assert_eq!(text(&mapped), "PROXY TCP4 192.0.2.1 198.51.100.1 1 2\r\n");

    assert_eq!(encode_v2(&Addresses::Local, &[Tlv::UniqueId(vec![1])], true).unwrap(), v2(0x20, 0, b""));
    assert_eq!(encode_v2(&Addresses::Unknown, &[], false).unwrap(), v2(0x20, 0, b""));
    assert_eq!(
        encode_v2(&tcp("192.0.2.1:56324", "198.51.100.1:443"), &[Tlv::UniqueId(vec![7])], false).unwrap(),
        v2_with_tlvs(&[5, 0, 1, 7])
    );
}

#[test]
fn what_does_not_fit_is_refused() {
    let addresses = tcp("192.0.2.1:1", "198.51.100.1:2");
    let other = |length| Tlv::Other { kind: 0xe0, value: vec![1; length] };
    let room = MAX_V2 - 16 - 12 - 3;
    assert_eq!(encode_v2(&addresses, &[other(room)], false).unwrap().len(), MAX_V2);
    for tlvs in [vec![other(room + 1)], vec![other(room), other(0)], vec![other(70_000)]] {
        assert_eq!(encode_v2(&addresses, &tlvs, false), Err(EncodeError::TooLong));
    }
    assert_eq!(encode_v2(&addresses, &[other(room)], true), Err(EncodeError::TooLong));
    assert_eq!(encode_v2(&addresses, &[Tlv::UniqueId(vec![1; 129])], false), Err(EncodeError::TooLong));
    let unix =
        |length| Addresses::Unix { transport: Transport::Stream, client: vec![1; length], server: vec![] };
    assert!(encode_v2(&unix(108), &[], false).is_ok());
    assert_eq!(encode_v2(&unix(109), &[], false), Err(EncodeError::PathTooLong));
}

/// Headers of HAProxy 2.6.12, captured on loopback: `send-proxy`, `send-proxy-v2`, the same with `crc32c,unique-id,
/// authority`, and over TLS also with `ssl,cert-cn,ssl-cipher,cert-sig,cert-key`.
#[test]
fn headers_from_haproxy() {
    let unhex = |text: &str| data_encoding::HEXLOWER.decode(text.replace(' ', "").as_bytes()).unwrap();
    let here = |client, server| tcp(&format!("127.0.0.1:{client}"), &format!("127.0.0.1:{server}"));
    let line = header(b"PROXY TCP4 127.0.0.1 127.0.0.1 35484 39239\r\n");
    assert_eq!(line.addresses, here(35484, 39239));
    let plain = header(&unhex("0d0a0d0a000d0a515549540a2111000c7f0000017f000001acd0be97"));
    assert_eq!(plain, Header { version: Version::V2, addresses: here(44240, 48791), tlvs: vec![] });
    assert_eq!(
        encode_v2(&plain.addresses, &[], false).unwrap(),
        unhex("0d0a0d0a000d0a515549540a2111000c7f0000017f000001acd0be97")
    );
    let with_id = header(&unhex(
        "0d0a0d0a000d0a515549540a2111002a7f0000017f000001c4f4d4f9030004adb528bb050014666c6f772d3132372e30 \
     2e302e313a3530343230",
    ));
    assert_eq!(with_id.addresses, here(50420, 54521));
    assert_eq!(with_id.tlvs, [Tlv::UniqueId(b"flow-127.0.0.1:50420".to_vec())]);
    let over_tls = header(&unhex(
        "0d0a0d0a000d0a515549540a2111008d7f0000017f000001d4668543030004fb9b7013010008687474702f312e310200 \
     0e7777772e6578616d706c652e6e6c050014666c6f772d3132372e302e302e313a353433373420004401000000002100 \
     07544c5376312e33250005454332353624001165636473612d776974682d534841323536230016544c535f4145535f32 \
     35365f47434d5f534841333834",
    ));
    assert_eq!(over_tls.addresses, here(54374, 34115));
    let fact = |kind, text: &str| (kind, text.as_bytes().to_vec());
    assert_eq!(
        over_tls.tlvs,
        [
            Tlv::Alpn(b"http/1.1".to_vec()),
            Tlv::Authority("www.example.nl".parse().unwrap()),
            Tlv::UniqueId(b"flow-127.0.0.1:54374".to_vec()),
            Tlv::Tls(Tls {
                client: 1,
                verify: 0,
                facts: vec![
                    fact(Tls::VERSION, "TLSv1.3"),
                    fact(Tls::KEY_ALGORITHM, "EC256"),
                    fact(Tls::SIGNATURE_ALGORITHM, "ecdsa-with-SHA256"),
                    fact(Tls::CIPHER, "TLS_AES_256_GCM_SHA384"),
                ],
            }),
        ]
    );
}

fn any_tlv() -> impl Strategy<Value = Tlv> {
    let bytes = |range| prop::collection::vec(any::<u8>(), range);
    prop_oneof![
        bytes(1..20).prop_map(Tlv::Alpn),
        // The pattern also makes names whose last label is a number ("a.0xf"), which are rejected.
        "[a-z0-9.-]{0,40}[a-z]".prop_filter_map("a host name", |name| name.parse().ok().map(Tlv::Authority)),
        bytes(0..129).prop_map(Tlv::UniqueId),
        bytes(0..20).prop_map(Tlv::Netns),
        (any::<u8>(), any::<u32>(), prop::collection::vec((any::<u8>(), bytes(0..9)), 0..4))
            .prop_map(|(client, verify, facts)| Tlv::Tls(Tls { client, verify, facts })),
        (0xe0_u8..=0xff, bytes(0..30)).prop_map(|(kind, value)| Tlv::Other { kind, value }),
    ]
}

fn any_addresses() -> impl Strategy<Value = Addresses> {
    let transport = prop_oneof![Just(Transport::Stream), Just(Transport::Datagram)];
    let unix = || prop::collection::vec(1_u8.., 0..=108);
    let (client, server) = (any::<SocketAddr>(), any::<SocketAddr>());
    // Scope and flow label are not part of the header.
    let plain = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    prop_oneof![
        (transport.clone(), client, server).prop_map(move |(transport, client, server)| Addresses::Inet {
            transport,
            client: plain(client),
            server: plain(server)
        }),
        (transport, unix(), unix()).prop_map(|(transport, client, server)| Addresses::Unix {
            transport,
            client,
            server
        }),
    ]
}

proptest! {
    #[test]
    fn version_2_comes_back(
        addresses in any_addresses(),
        tlvs in prop::collection::vec(any_tlv(), 0..5),
        checksum: bool,
    ) {
        let bytes = encode_v2(&addresses, &tlvs, checksum).unwrap();
        prop_assert_eq!(header(&bytes), Header { version: Version::V2, addresses, tlvs });
    }

    #[test]
    fn version_1_comes_back(client: SocketAddr, server: SocketAddr) {
        let addresses = Addresses::tcp(client, server);
        let bytes = encode_v1(&addresses);
        prop_assert!(bytes.len() <= MAX_V1);
        prop_assert_eq!(header(&bytes).addresses, addresses);
    }

    #[test]
    fn random_and_mutated_bytes_never_panic_and_decide_once(
        start in prop::sample::select(vec![&b""[..], b"PROXY ", b"PROXY TCP4 1.2.3.4 ", SIGNATURE, b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x20"]),
        tail in prop::collection::vec(any::<u8>(), 0..150),
    ) {
        let bytes = [start, &tail].concat();
        let whole = parse(&bytes);
        match (0..=bytes.len()).map(|end| parse(&bytes[..end])).find(|parsed| *parsed != Parsed::Incomplete) {
            Some(first) => prop_assert_eq!(first, whole),
            None => prop_assert_eq!(whole, Parsed::Incomplete),
        }
    }

    #[test]
    fn mutated_headers_never_panic(
        addresses in any_addresses(),
        tlvs in prop::collection::vec(any_tlv(), 0..4),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mut bytes = encode_v2(&addresses, &tlvs, false).unwrap();
        for (index, value) in changes {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        if let Parsed::Header { consumed, .. } = parse(&bytes) {
            prop_assert!(consumed <= bytes.len());
        }
    }
}
