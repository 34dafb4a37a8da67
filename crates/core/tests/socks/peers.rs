//! What clients send that they should not, and what servers answer.

use crate::drive::{Served, serve};
use crate::{account, hex, to};
use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::server::{
    Input, MAX_PIPELINED_LEN, Output, Reply, ServerConfig, ServerDialect, Version,
};
use sidetrack_core::socks::v6::{DecodeError, Request};
use sidetrack_core::socks::{ReplyCode, Server};
use sidetrack_core::time::Instant;
use std::sync::Arc;
use std::time::Duration;

fn served(bytes: &[u8]) -> Served {
    serve(
        &ServerConfig::default(),
        bytes.chunks(1000),
        &Reply::connected("198.51.100.7:40000".parse().unwrap()),
    )
}

/// How a server refuses these bytes: its answer, the reason, the detail.
fn refused(bytes: &[u8]) -> (Vec<u8>, EndReason, String) {
    let served = served(bytes);
    match served.end {
        Some(Output::Failed { reason, detail }) => {
            assert_eq!(served.request, None, "{detail}");
            (served.sent, reason, detail)
        }
        end => panic!("not refused: {end:?}"),
    }
}

fn refused_with(bytes: &str, answer: &str, reason: EndReason, detail: &str) {
    let (sent, got, text) = refused(&hex(bytes));
    assert_eq!((sent, got), (hex(answer), reason), "{bytes}: {text}");
    assert!(text.contains(detail), "{bytes}: {text}");
}

#[test]
fn version_5_refusals() {
    use EndReason::{AuthFailed, BadRequest, ClientGone, Unsupported};
    let table = [
        ("05 01 00 05 02 00 01 c0000201 01bb", "0500 05070001 00000000 0000", Unsupported, "BIND"),
        ("05 01 00 05 03 00 01 00000000 0000", "0500 05070001 00000000 0000", Unsupported, "UDP ASSOCIATE"),
        ("05 01 00 05 f0 00 03 01 61 0000", "0500 05070001 00000000 0000", Unsupported, "command 240"),
        ("05 01 00 05 01 00 02 c0000201 01bb", "0500 05080001 00000000 0000", Unsupported, "type 2"),
        ("05 01 00 05 01 00 03 00 01bb", "0500 05010001 00000000 0000", BadRequest, "empty"),
        ("05 01 00 05 01 00 03 03 610062 01bb", "0500 05010001 00000000 0000", BadRequest, "control"),
        ("05 01 00 05 01 00 03 02 c328 01bb", "0500 05010001 00000000 0000", BadRequest, "UTF-8"),
        ("05 01 00 06 01 00 01 c0000201 01bb", "0500 05010001 00000000 0000", BadRequest, "0x06"),
        ("05 00", "05ff", AuthFailed, "none of the methods"),
        ("05 01 01", "05ff", AuthFailed, "[01]"),
        ("05 01 02 05 01 00", "0502 0101", BadRequest, "RFC 1929"),
        ("05 05 00 01", "", ClientGone, "greeting"),
        ("05 01 00 05 01 00 01 c00002", "0500", ClientGone, "request"),
        ("05 01 02 01 04 7573", "0502", ClientGone, "password"),
    ];
    for (bytes, answer, reason, detail) in table {
        refused_with(bytes, answer, reason, detail);
    }
}

#[test]
fn version_5_passwords() {
    let config =
        ServerConfig { accounts: vec![account("user:pass"), account("u:p")], ..ServerConfig::default() };
    let reply = Reply::failed(ReplyCode::ConnectionRefused);
    let user = |bytes: &str| {
        let served = serve(&config, [&hex(bytes)[..]], &reply);
        (served.sent[..served.sent.len().min(4)].to_vec(), served.request.map(|request| request.user))
    };
    let connect = "05 01 00 01 c0000201 01bb";
    assert_eq!(user(&format!("05 01 00 {connect}")), (hex("05ff"), None));
    assert_eq!(
        user(&format!("05 01 02 01 01 75 01 70 {connect}")),
        (hex("05020100"), Some(Some("u".into())))
    );
    for wrong in ["01 01 75 01 71", "01 01 75 00", "01 00 00", "01 01 75 02 7070", "01 04 75736572 01 70"] {
        assert_eq!(user(&format!("05 01 02 {wrong} {connect}")), (hex("05020101"), None), "{wrong}");
    }
    // Bytes that are not UTF-8 are just wrong.
    assert_eq!(user(&format!("05 01 02 01 02 fffe 01 70 {connect}")), (hex("05020101"), None));
}

#[test]
fn other_first_bytes() {
    use EndReason::{BadRequest, ClientGone, Unsupported};
    refused_with("04 01 0050 c0000201 00", "005b 000000000000", Unsupported, "SOCKS4");
    refused_with("16 0301", "06", BadRequest, "0x16");
    refused_with("00", "06", BadRequest, "0x00");
    refused_with("", "", ClientGone, "without a byte");
    for first in ["GET / HTTP/1.1\r\n", "CONNECT a:1 HTTP/1.1\r\n", "get"] {
        let (sent, reason, detail) = refused(first.as_bytes());
        let text = String::from_utf8(sent).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with("HTTP/1.1 400 ")
                && head.contains(&format!("Content-Length: {}\r\n", body.len()))
        );
        assert_eq!((reason, detail.contains("HTTP")), (BadRequest, true));
    }
}

const GENERAL_FAILURE: &str = "06000000 06010000 00000001 00000000";

#[test]
fn version_6_refusals() {
    use EndReason::{AuthFailed, BadRequest, Unsupported};
    let head = |cmd: &str, len: &str| format!("06{cmd}{len} 01bb0001 c0000201");
    let connect = |options: &str| {
        let len = hex(options).len();
        format!("{} {options}", head("01", &format!("{len:04x}")))
    };
    let code = |code: &str| format!("06000000 06{code}0000 00000001 00000000");
    let table = [
        (head("02", "0000"), code("07"), Unsupported, "Bind"),
        (head("03", "0000"), code("07"), Unsupported, "UdpAssociate"),
        (head("09", "0000"), code("07"), Unsupported, "Other(9)"),
        ("06010000 01bb0002 c0000201".into(), code("08"), Unsupported, "type 2"),
        ("06010000 00350001 00000000".into(), code("05"), Unsupported, "DNS"),
        ("06010000 00350004 00000000 00000000 00000000 00000000".into(), code("05"), Unsupported, "DNS"),
        ("06010000 01bb0003 03000000".into(), code("01"), BadRequest, "empty"),
        ("06010000 01bb0003 03610062".into(), code("01"), BadRequest, "control"),
        // Refused by the header alone, long before the options are there.
        ("06015004 01bb0001 c0000201".into(), code("01"), BadRequest, "20484 bytes of options"),
        (connect("0002 0008 4001 0000"), code("01"), BadRequest, "16385 bytes of initial data"),
        // An option whose length is 0 to 3, no multiple of 4, or beyond the end.
        (connect("0001 0000"), code("01"), BadRequest, "length 0"),
        (connect("0001 0003"), code("01"), BadRequest, "length 3"),
        (connect("ffff 0006 0000 0000"), code("01"), BadRequest, "length 6"),
        (connect("0001 000c 8401 0005"), code("01"), BadRequest, "length 12"),
        (connect("0001"), code("01"), BadRequest, "length 2"),
        // Duplicates, also where one stack option covers the leg of another.
        (connect("0005 0004 0005 0004"), code("01"), BadRequest, "kind 5 is there twice"),
        (connect("0001 0008 8401 0005 0001 0008 8401 0006"), code("01"), BadRequest, "kind 1 is there twice"),
        (connect("0001 0008 c101 1000 0001 0008 4101 1000"), code("01"), BadRequest, "kind 1 is there twice"),
        (connect("0004 0008 0700 0000 0004 0008 0700 0000"), code("01"), BadRequest, "kind 4 is there twice"),
        (connect("fde8 0008 0001 0000 fde8 0008 0001 0000"), code("01"), BadRequest, "65000 is there twice"),
        // Options of replies.
        (connect("0003 0008 0000 0000"), code("01"), BadRequest, "kind 3 does not belong"),
        (connect("0008 0004"), code("01"), BadRequest, "kind 8 does not belong"),
        (connect("000c 000c 0000 0000 0000 0001"), code("01"), BadRequest, "kind 12 does not belong"),
        (connect("000e 0004"), code("01"), BadRequest, "kind 14 does not belong"),
        // Contradictions.
        (connect("0005 0004 0006 0008 0102 0304"), code("01"), BadRequest, "inside another"),
        (connect("000a 0004"), code("01"), BadRequest, "without a session"),
        (connect("0006 0008 0102 0304"), "06010004 00090004".into(), AuthFailed, "session"),
    ];
    for (bytes, answer, reason, detail) in &table {
        refused_with(bytes, answer, *reason, detail);
    }
    assert_eq!(hex(GENERAL_FAILURE), hex(&code("01")));
}

#[test]
fn version_6_oddities_that_are_let_through() {
    let names = [
        // -12: padding inside the length byte; -11: outside; no padding needed.
        ("0f 64622e6578616d706c652e6e6c 0000", "db.example.nl:443"),
        ("0d 64622e6578616d706c652e6e6c 0000", "db.example.nl:443"),
        ("03 612e62", "a.b:443"),
        ("03 610000", "a:443"),
        ("01 61 0000", "a:443"),
        ("03 412e00", "a:443"),
    ];
    for (name, destination) in names {
        let served = served(&[hex(&format!("06010000 01bb0003 {name}")), b"hello".to_vec()].concat());
        assert_eq!(served.request.unwrap().destination, to(destination), "{name}");
        assert_eq!(served.delivered, b"hello", "{name}");
    }
    let options = [
        // Unknown kinds, also ones that earlier drafts gave a meaning; twice does no harm.
        "0000 0004",
        "0007 0004 0010 0008 0000 0000 ffff 0004 ffff 0004",
        // Stack options of no known leg, level, code or value.
        "0001 0008 0401 0005 0001 0008 8409 0005 0001 0008 8402 0900 0001 0004 0001 000c 8401 0005 0000 0000",
        // TFO on the client's leg.
        "0001 0008 4401 0005",
        // Bodies that make no sense: metadata with a length beyond its end, or no UTF-8; a cut password; an empty id.
        "fde8 0008 0001 00ff",
        "fde8 000c 0001 0002 ffff 0000",
        "0004 0008 0201 ff75",
        "0006 0004",
        // Tokens outside a session mean nothing.
        "000d 0008 0000 0001 000b 0008 0000 0010",
    ];
    for options in options {
        let len = hex(options).len();
        let bytes = hex(&format!("0601{len:04x} 01bb0001 c0000201 {options}"));
        let served = served(&[bytes, b"hello".to_vec()].concat());
        let request = served.request.unwrap_or_else(|| panic!("{options}: {:?}", served.end));
        assert_eq!((request.stack, request.metadata), (vec![], vec![]), "{options}");
        assert_eq!((request.session, &served.delivered[..]), (None, &b"hello"[..]), "{options}");
    }
}

#[test]
fn the_largest_request_is_taken() {
    let mut bytes = hex("06015000 01bb0001 c0000201");
    for key in 0u16..256 {
        bytes.extend_from_slice(&hex("fde8 0050"));
        bytes.extend_from_slice(&key.to_be_bytes());
        bytes.extend_from_slice(&hex("0048"));
        bytes.extend_from_slice(&[b'v'; 72]);
    }
    assert_eq!(bytes.len(), 12 + 20 * 1024);
    assert_eq!(served(&bytes).request.unwrap().metadata.len(), 256);
    let (request, used) = Request::decode(&bytes, Default::default()).unwrap().unwrap();
    assert_eq!(request.encode(Default::default()).unwrap(), bytes);
    assert_eq!(used, bytes.len());
    let long = Request { destination: to("a:1"), ..request };
    let mut options = long.options.clone();
    options.metadata.push(sidetrack_core::socks::v6::Metadata { key: 999, value: String::new() });
    assert!(Request { options, ..long }.encode(Default::default()).is_err());
}

#[test]
fn dialects_are_told_apart() {
    let auto =
        |bytes: &str| served(&hex(bytes)).request.map(|request| (request.version, request.destination));
    let x = |version, destination| Some((version, to(destination)));
    // socksx: IPv4, name, IPv6.
    assert_eq!(auto("060101c0 00020101 bb000000"), x(Version::V6Socksx, "192.0.2.1:443"));
    assert_eq!(auto("06010301 61 01bb 00 0000"), x(Version::V6Socksx, "a:443"));
    assert_eq!(
        auto("060104 20010db8000000000000000000000007 01bb 00 0000"),
        x(Version::V6Socksx, "[2001:db8::7]:443")
    );
    // The draft, with options so long that their length looks like an address type.
    for (len, kind) in [(0x0104, "IPv4"), (0x0308, "name"), (0x0400, "IPv6")] {
        let mut bytes = hex(&format!("0601{len:04x} 01bb0001 c0000201 ffff{len:04x}"));
        bytes.resize(12 + len, 0);
        let version = served(&bytes).request.map(|request| request.version);
        assert_eq!(version, Some(Version::V6), "{kind}");
    }
    // What auto takes for the draft (byte 3 a multiple of 4, byte 6 zero, byte 7 an address type), a setting decides.
    let ambiguous = hex("06 01 01 c0 00 02 00 01 bb 00 0000");
    let with = |dialect| {
        let config = ServerConfig { dialect, ..ServerConfig::default() };
        serve(&config, [&ambiguous[..]], &Reply::failed(ReplyCode::ConnectionRefused)).request
    };
    assert_eq!(with(ServerDialect::Auto), None);
    assert_eq!(with(ServerDialect::Socksx).unwrap().destination, to("192.0.2.0:443"));
    assert_eq!(with(ServerDialect::Draft), None);
}

#[test]
fn what_breaks_socksx_does_not_break_us() {
    use EndReason::{BadRequest, ClientGone, Unsupported};
    let common = |code: &str| format!("06000000 06{code}0001 00010000 00000000");
    let config = ServerConfig { dialect: ServerDialect::Socksx, ..ServerConfig::default() };
    let reply = Reply::connected("198.51.100.7:40000".parse().unwrap());
    let table = [
        ("060102 c0000201 01bb 00 0000", common("08"), Unsupported),
        ("060101 c0000201 01bb 00 0004 00020003", common("01"), BadRequest),
        ("060101 c0000201 01bb 00 0002 0002", common("01"), BadRequest),
        ("060101 c0000201 01bb 00 ffff", common("01"), BadRequest),
        ("060103 00 01bb 00 0000", common("01"), BadRequest),
        ("060201 c0000201 01bb 00 0000", common("07"), Unsupported),
        ("060101 c0000201 01bb 00 0008 0002", String::new(), ClientGone),
    ];
    for (bytes, answer, expected) in table {
        let served = serve(&config, [&hex(bytes)[..]], &reply);
        assert_eq!((served.sent, served.request), (hex(&answer), None), "{bytes}");
        let Some(Output::Failed { reason, .. }) = served.end else { panic!("{bytes}: {:?}", served.end) };
        assert_eq!(reason, expected, "{bytes}");
    }
    // Metadata with a length beyond its end is skipped; what a chain lacks is the chain's error (see below).
    let served = serve(&config, [&hex("060101 c0000201 01bb 00 0008 fde80008 03e600ff")[..]], &reply);
    assert_eq!(served.request.unwrap().metadata, vec![]);
}

#[test]
fn broken_chains() {
    use sidetrack_core::socks::v6::{Metadata, SocksxChain};
    let parse = |entries: &[(u16, &str)]| {
        let entries: Vec<_> =
            entries.iter().map(|(key, value)| Metadata { key: *key, value: (*value).into() }).collect();
        SocksxChain::from_metadata(&entries).map_err(|error| error.to_string())
    };
    assert_eq!(parse(&[(7, "x")]), Ok(None));
    let (root, us) = ((1000, "socks6://root:1080"), (1001, "socks5://u:p@us:1080/"));
    let chain = parse(&[(998, "1"), (999, "2"), root, us]).unwrap().unwrap();
    assert_eq!((chain.index(), chain.next()), (1, Ok(None)));
    let mut longer = chain.clone();
    longer.insert(&[to("a:1"), to("[2001:db8::7]:2")]).unwrap();
    assert_eq!(longer.links()[2..], ["socks6://a:1", "socks6://[2001:db8::7]:2"]);
    let (next, chain) = longer.next().unwrap().unwrap();
    assert_eq!((next, chain.index(), chain.links().len()), (to("a:1"), 2, 4));
    let back = SocksxChain::from_metadata(&chain.to_metadata()).unwrap();
    assert_eq!(back.as_ref(), Some(&chain));
    assert!(chain.to_metadata().iter().all(|entry| SocksxChain::is_chain_key(entry.key)));
    for (entries, error) in [
        (vec![(999, "1"), root], "lacks key 998"),
        (vec![(998, "0"), root], "lacks key 999"),
        (vec![(998, "0"), (999, "2"), root], "lacks key 1001"),
        (vec![(998, "1"), (999, "1"), root], "value '1' of key 998"),
        (vec![(998, "-1"), (999, "1"), root], "value '-1' of key 998"),
        (vec![(998, "0"), (999, "257"), root], "value '257' of key 999"),
        (vec![(998, "0"), (999, "99999999999999999999"), root], "of key 999"),
        (vec![(998, "0"), (999, "1"), (1000, "fn")], "chain link 'fn'"),
    ] {
        let text = parse(&entries).unwrap_err();
        assert!(text.contains(error), "{text}");
    }
    assert!(SocksxChain::rooted(&vec![to("a:1"); 256]).is_err());
}

#[test]
fn announced_data_that_never_comes_holds_no_request() {
    // X1 and V1 without their data: the request is out at once, with nothing in it.
    for bytes in
        ["060101c0 00020101 bb000008 00020008 00050000", "06010008 01bb0001 c0000201 00020008 00050000"]
    {
        let mut server = Server::new(Arc::new(ServerConfig::default()), Instant::ZERO);
        server.handle(Instant::ZERO, Input::Bytes(&hex(bytes)));
        let request = std::iter::from_fn(|| server.poll()).find_map(|output| match output {
            Output::Request(request) => Some(request),
            _ => None,
        });
        let request = request.expect(bytes);
        assert_eq!((request.announced_len, request.first_bytes.len()), (5, 0));
        assert_eq!(server.deadline(), None);
    }
}

#[test]
fn data_for_the_syn_is_waited_for_in_bounds() {
    let request = hex("06010010 01bb0001 c0000201 00020008 00050000 00010008 84010005");
    let at = Instant::from_millis;
    let fresh = || {
        let mut server = Server::new(Arc::new(ServerConfig::default()), at(0));
        server.handle(at(7), Input::Bytes(&[&request[..], b"he"].concat()));
        assert!(matches!(server.poll(), Some(Output::Send(_))));
        assert_eq!((server.poll(), server.deadline()), (None, Some(at(37))));
        server
    };
    let first_bytes = |server: &mut Server| match server.poll() {
        Some(Output::Request(request)) => request.first_bytes,
        other => panic!("{other:?}"),
    };
    let mut server = fresh();
    server.handle(at(9), Input::Bytes(b"llo!"));
    assert_eq!(first_bytes(&mut server), b"hello!");
    let mut server = fresh();
    server.handle(at(36), Input::Tick);
    assert_eq!(server.poll(), None);
    server.handle(at(37), Input::Tick);
    assert_eq!(first_bytes(&mut server), b"he");
    let mut server = fresh();
    server.handle(at(8), Input::Eof);
    assert_eq!(first_bytes(&mut server), b"he", "after the FIN nothing more comes");
}

#[test]
fn slow_clients_are_given_up_whatever_they_have_sent() {
    let requests = [
        hex("05 02 00 02 01 04 75736572 04 70617373"),
        hex("06010034 15380003 0f64622e 6578616d 706c652e 6e6c0000"),
        hex("06010008 01bb0001 c0000201 00020008 00050200 68656c6c 6f 01 04"),
    ];
    let accounts = vec![account("user:pass")];
    let config = Arc::new(ServerConfig { accounts, ..ServerConfig::default() });
    for bytes in requests {
        for end in 0..bytes.len() {
            let mut server = Server::new(config.clone(), Instant::ZERO);
            // One byte a second, so that no byte starts the clock again.
            for (second, byte) in bytes[..end].iter().take(9).enumerate() {
                let now = Instant::from_millis(1000 * second as u64);
                server.handle(now, Input::Bytes(&[*byte]));
            }
            server
                .handle(Instant::from_millis(9_500), Input::Bytes(bytes[..end].get(9..).unwrap_or_default()));
            while let Some(Output::Send(_)) = server.poll() {}
            assert_eq!(server.deadline(), Some(Instant::from_millis(10_000)), "{end}");
            server.handle(Instant::from_millis(10_000), Input::Tick);
            let last = std::iter::from_fn(|| server.poll()).last();
            assert!(
                matches!(last, Some(Output::Failed { reason: EndReason::HandshakeTimeout, .. })),
                "{end}: {last:?}"
            );
            assert_eq!(server.deadline(), None);
        }
    }
}

#[test]
fn bytes_while_dialling_are_bounded() {
    for request in ["05 01 00 05 01 00 01 c0000201 01bb", "06010000 01bb0001 c0000201"] {
        let mut server = Server::new(Arc::new(ServerConfig::default()), Instant::ZERO);
        server.handle(Instant::ZERO, Input::Bytes(&hex(request)));
        while server.poll().is_some() {}
        let mut held = 0;
        while server.wants_bytes() {
            server.handle(Instant::ZERO, Input::Bytes(&[7; 1000]));
            held += 1000;
        }
        assert!((MAX_PIPELINED_LEN..MAX_PIPELINED_LEN + 1000).contains(&held));
        assert_eq!(server.poll(), None);
        assert_eq!(server.take_pipelined().len(), held);
        assert!(server.wants_bytes(), "what was taken makes room");
        while server.wants_bytes() {
            server.handle(Instant::ZERO, Input::Bytes(&[7; 1000]));
        }
        server.handle(Instant::ZERO, Input::Bytes(&[7]));
        let last = std::iter::from_fn(|| server.poll()).last();
        assert!(matches!(last, Some(Output::Failed { reason: EndReason::Limit, .. })));
    }
}

#[test]
fn a_half_close_while_dialling_changes_nothing() {
    for request in ["05 01 00 05 01 00 01 c0000201 01bb", "06010000 01bb0001 c0000201"] {
        let mut server = Server::new(Arc::new(ServerConfig::default()), Instant::ZERO);
        server.handle(Instant::ZERO, Input::Bytes(&hex(request)));
        while server.poll().is_some() {}
        server.handle(Instant::ZERO, Input::Eof);
        server.handle(Instant::ZERO + Duration::from_secs(60), Input::Tick);
        assert_eq!(server.poll(), None);
        let reply = Reply::connected("198.51.100.7:40000".parse().unwrap());
        server.handle(Instant::ZERO, Input::Reply(reply));
        assert!(matches!(server.poll(), Some(Output::Send(_))));
        assert_eq!(server.poll(), Some(Output::Done { leftover: Vec::new() }));
    }
}

#[test]
fn version_bytes_of_the_decoders() {
    let request = Request::decode(&[5], Default::default());
    assert_eq!(request, Err(DecodeError::Version(5)));
}
