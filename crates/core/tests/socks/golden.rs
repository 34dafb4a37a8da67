//! The wire formats of SOCKS6 held to byte vectors that were agreed with other implementations: encoded exactly,
//! decoded exactly, and no proper prefix of them decodes.

use crate::{hex, to};
use sidetrack_core::carrier::Socks6Dialect::{self, Draft, Socksx, Socksx010};
use sidetrack_core::socks::ReplyCode;
use sidetrack_core::socks::address::AddressError;
use sidetrack_core::socks::v5::udp::{Datagram, HeaderError, put_header};
use sidetrack_core::socks::v6::{
    AuthData, AuthMethods, AuthReply, Command, Metadata, OperationReply, Options, Request, SessionId,
    SocksxChain, StackOption, TokenWindow, UdpError, UdpMessage,
};

fn announced(initial_data_len: u16, methods: &[u8]) -> Option<AuthMethods> {
    Some(AuthMethods { initial_data_len, methods: methods.to_vec() })
}

fn check_request(bytes: &str, dialect: Socks6Dialect, request: &Request) {
    let bytes = hex(bytes);
    assert_eq!(request.encode(dialect).unwrap(), bytes);
    for end in 0..bytes.len() {
        assert_eq!(Request::decode(&bytes[..end], dialect), Ok(None), "prefix of {end} bytes");
    }
    let longer = [&bytes[..], b"hello"].concat();
    assert_eq!(Request::decode(&longer, dialect), Ok(Some((request.clone(), bytes.len()))));
}

fn check_auth_reply(bytes: &str, reply: &AuthReply) {
    let bytes = hex(bytes);
    assert_eq!(reply.encode().unwrap(), bytes);
    for end in 0..bytes.len() {
        assert_eq!(AuthReply::decode(&bytes[..end]), Ok(None), "prefix of {end} bytes");
    }
    assert_eq!(AuthReply::decode(&bytes), Ok(Some((reply.clone(), bytes.len()))));
}

fn check_operation_reply(bytes: &str, reply: &OperationReply) {
    let bytes = hex(bytes);
    assert_eq!(reply.encode(Draft).unwrap(), bytes);
    for end in 0..bytes.len() {
        assert_eq!(OperationReply::decode(&bytes[..end], Draft), Ok(None), "prefix of {end} bytes");
    }
    assert_eq!(OperationReply::decode(&bytes, Draft), Ok(Some((reply.clone(), bytes.len()))));
}

fn v1(options: Options) -> Request {
    Request { command: Command::Connect, destination: to("192.0.2.1:443"), options }
}

fn bound_to(bound: &str, options: Options) -> OperationReply {
    OperationReply { code: ReplyCode::Succeeded, bound: to(bound), options }
}

#[test]
fn v1_no_authentication() {
    let options = Options { auth_methods: announced(5, &[]), ..Options::default() };
    check_request("06010008 01bb0001 c0000201 00020008 00050000", Draft, &v1(options));
    check_request("06010000 01bb0001 c0000201", Draft, &v1(Options::default()));
    check_auth_reply("06000000", &AuthReply { success: true, options: Options::default() });
    check_operation_reply("06000000 9c400001 c6336407", &bound_to("198.51.100.7:40000", Options::default()));
}

#[test]
fn v2_password_stack_session_and_tokens() {
    let options = Options {
        auth_methods: announced(0, &[2]),
        auth_data: vec![AuthData::Password { user: b"user".to_vec(), password: b"pass".to_vec() }],
        stack: vec![StackOption::Tfo(5), StackOption::Multipath(true)],
        session_request: true,
        token_request: Some(256),
        ..Options::default()
    };
    check_request(
        "06010034 15380003 0f64622e 6578616d 706c652e 6e6c0000 00020008 00000200 00040010 02010475 73657204 70617373
         00010008 84010005 00010008 84020200 00050004 000b0008 00000100",
        Draft,
        &Request { command: Command::Connect, destination: to("db.example.nl:5432"), options },
    );
    let options = Options {
        auth_data: vec![AuthData::PasswordStatus(0)],
        session_id: SessionId::from_bytes(&hex("0102030405060708")),
        token_window: TokenWindow::checked(0xffff_fff0, 256),
        ..Options::default()
    };
    check_auth_reply(
        "06000020 00040008 02010000 0006000c 01020304 05060708 000c000c fffffff0 00000100",
        &AuthReply { success: true, options },
    );
    let stack = vec![StackOption::Tfo(0), StackOption::Multipath(false)];
    check_operation_reply(
        "06000010 9c410004 20010db8 00000000 00000000 00000007 00010008 84010000 00010008 84020100",
        &bound_to("[2001:db8::7]:40001", Options { stack, ..Options::default() }),
    );
    let options = Options { auth_data: vec![AuthData::PasswordStatus(1)], ..Options::default() };
    check_auth_reply("06010008 00040008 02010100", &AuthReply { success: false, options });
}

#[test]
fn v3_noop_spends_a_token_and_tears_the_session_down() {
    let options = Options {
        session_id: SessionId::from_bytes(&hex("0102030405060708")),
        session_teardown: true,
        token_spend: Some(0xffff_fff0),
        ..Options::default()
    };
    check_request(
        "06000018 00000001 00000000 0006000c 01020304 05060708 000d0008 fffffff0 000a0004",
        Draft,
        &Request { command: Command::Noop, destination: to("0.0.0.0:0"), options },
    );
    let options = Options { session_invalid: true, ..Options::default() };
    check_auth_reply("06010004 00090004", &AuthReply { success: false, options });
}

#[test]
fn v4_udp() {
    let id = 0x1122_3344_5566_7788;
    let messages = [
        ("0601000c 11223344 55667788", UdpMessage::Init { id }),
        ("0602000c 11223344 55667788", UdpMessage::Confirm { id }),
        (
            "06030016 11223344 55667788 01000035 c0000235 6869",
            UdpMessage::Datagram { id, remote: to("192.0.2.53:53"), payload: b"hi".to_vec() },
        ),
        (
            "06030014 11223344 55667788 01000000 00000000",
            UdpMessage::Datagram { id, remote: to("0.0.0.0:0"), payload: Vec::new() },
        ),
        (
            "0604001c 11223344 55667788 01000035 c0000235 01020000 cb007101",
            UdpMessage::Error {
                id,
                remote: "192.0.2.53:53".parse().unwrap(),
                reporter: "203.0.113.1".parse().unwrap(),
                error: UdpError::HostUnreachable,
            },
        ),
    ];
    for (bytes, message) in messages {
        let bytes = hex(bytes);
        assert_eq!(message.encode().unwrap(), bytes);
        for end in 0..bytes.len() {
            assert_eq!(UdpMessage::decode_stream(&bytes[..end]), Ok(None));
            assert_eq!(UdpMessage::decode_datagram(&bytes[..end]), None, "a length beyond the datagram");
        }
        let padded = [&bytes[..], &[0xee; 7]].concat();
        assert_eq!(UdpMessage::decode_stream(&padded), Ok(Some((message.clone(), bytes.len()))));
        assert_eq!(UdpMessage::decode_datagram(&padded), Some(message));
    }
}

#[test]
fn version_5_datagrams() {
    let datagrams = [
        ("0000 00 01 c0000235 0035 6869", "192.0.2.53:53", &b"hi"[..]),
        ("0000 00 01 c0000235 0035", "192.0.2.53:53", b""),
        ("0000 00 04 20010db8000000000000000000000007 0035 6869", "[2001:db8::7]:53", b"hi"),
        ("0000 00 03 0b 646e732e6578616d706c65 0035 6869", "dns.example:53", b"hi"),
    ];
    for (bytes, remote, payload) in datagrams {
        let bytes = hex(bytes);
        let mut header = Vec::new();
        put_header(&mut header, &to(remote));
        assert_eq!([&header[..], payload].concat(), bytes);
        assert_eq!(Datagram::parse(&bytes), Ok(Datagram { remote: to(remote), payload }));
        for end in 0..header.len() {
            assert_eq!(Datagram::parse(&bytes[..end]), Err(HeaderError::Short), "{end} of {remote}");
        }
    }
    let error = |bytes| Datagram::parse(&hex(bytes)).map(|_| ()).unwrap_err();
    assert_eq!(error("0000 81 01 c0000235 0035 6869"), HeaderError::Fragment(0x81));
    assert_eq!(error("0000 00 02 c0000235 0035 6869"), HeaderError::Address(AddressError::Type(2)));
    assert!(matches!(error("0000 00 03 02 2e2e 0035 6869"), HeaderError::Address(AddressError::Name(_))));
}

#[test]
fn x1_socksx() {
    let options = Options { auth_methods: announced(5, &[]), ..Options::default() };
    for dialect in [Socksx010, Socksx] {
        check_request("060101c0 00020101 bb000008 00020008 00050000", dialect, &v1(options.clone()));
        for reply in
            ["06000001 00000000 00000000", "06000000 00010000 00000000", "06000001 00010000 00000000"]
        {
            let bytes = hex(reply);
            for end in 0..bytes.len() {
                assert_eq!(OperationReply::decode(&bytes[..end], dialect), Ok(None));
            }
            let (reply, used) = OperationReply::decode(&bytes, dialect).unwrap().unwrap();
            assert_eq!((reply.code, used), (ReplyCode::Succeeded, 12));
        }
        let reply = bound_to("198.51.100.7:40000", Options::default());
        assert_eq!(reply.encode(dialect).unwrap(), hex("06000001 00010000 00000000"));
    }
}

#[test]
fn socksx_chain_metadata() {
    let chain = SocksxChain::rooted(&[to("fn:1080")]).unwrap();
    let (next, sent) = chain.next().unwrap().unwrap();
    assert_eq!((next, sent.index()), (to("fn:1080"), 1));
    let request = v1(Options { metadata: sent.to_metadata(), ..Options::default() });
    let bytes = request.encode(Socksx).unwrap();
    let options = "fde8001c 03e80012 736f636b 73363a2f 2f726f6f 743a3130 38300000
        fde8001c 03e90010 736f636b 73363a2f 2f666e3a 31303830 00000000
        fde8000c 03e60001 31000000 fde8000c 03e70001 32000000";
    assert_eq!(bytes, [hex("060101c0 00020101 bb000050"), hex(options)].concat());
    let (read, _) = Request::decode(&bytes, Socksx).unwrap().unwrap();
    assert_eq!(SocksxChain::from_metadata(&read.options.metadata).unwrap(), Some(sent));
    // The draft's layout pads only where it must.
    let metadata = vec![Metadata { key: 1001, value: "socks6://fn:1080".into() }];
    let request = v1(Options { metadata, ..Options::default() });
    let option = hex("fde80018 03e90010 736f636b 73363a2f 2f666e3a 31303830");
    assert!(request.encode(Draft).unwrap().ends_with(&option));
}
