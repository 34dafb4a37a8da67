//! Whole conversations, as bytes: exact answers, and the same ones wherever the bytes are cut.

use crate::drive::{self, Dialled, Served, dial, serve};
use crate::{account, hex, to};
use sidetrack_core::carrier::Socks6Dialect::{Draft, Socksx, Socksx010};
use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::ReplyCode;
use sidetrack_core::socks::client::Output as ClientOutput;
use sidetrack_core::socks::server::{Output, Reply, ServerConfig, Version};

/// Every way to cut bytes in two, byte by byte, and not at all.
fn cuts(bytes: &[u8]) -> Vec<Vec<&[u8]>> {
    let mut cuts: Vec<Vec<&[u8]>> = (1..bytes.len()).map(|at| vec![&bytes[..at], &bytes[at..]]).collect();
    cuts.push(bytes.chunks(1).collect());
    cuts.push(vec![bytes]);
    cuts
}

/// Serves `bytes` cut everywhere; all the same.
fn serve_cut(config: &ServerConfig, bytes: &[u8], reply: &Reply) -> Served {
    let served = serve(config, [bytes], reply);
    for pieces in cuts(bytes) {
        let what = format!("{pieces:02x?}");
        assert_eq!(serve(config, pieces, reply), served, "{what}");
    }
    served
}

fn connected() -> Reply {
    Reply::connected("198.51.100.7:40000".parse().unwrap())
}

fn config(accounts: &[&str]) -> ServerConfig {
    let accounts = accounts.iter().map(|text| account(text)).collect();
    ServerConfig { accounts, ..ServerConfig::default() }
}

const DONE: Option<Output> = Some(Output::Done { leftover: Vec::new() });

#[test]
fn version_5_servers() {
    let no_auth = "05 01 00";
    let password = "05 02 00 02  01 04 75736572 04 70617373";
    let ok = "05 00 00 01 c6336407 9c40";
    // accounts, client's bytes, server's bytes, destination
    let table = [
        (vec![], format!("{no_auth} 05 01 00 01 c0000201 01bb"), format!("0500 {ok}"), "192.0.2.1:443"),
        (
            vec![],
            format!("{no_auth} 05 01 00 03 0d 64622e6578616d706c652e6e6c 1538"),
            format!("0500 {ok}"),
            "db.example.nl:5432",
        ),
        (
            vec!["user:pass"],
            format!("{password} 05 01 00 04 20010db8000000000000000000000007 0050"),
            format!("0502 0100 {ok}"),
            "[2001:db8::7]:80",
        ),
    ];
    for (accounts, client, server, destination) in table {
        let bytes = [hex(&client), b"hello".to_vec()].concat();
        let served = serve_cut(&config(&accounts), &bytes, &connected());
        assert_eq!((served.sent, served.delivered, served.end), (hex(&server), b"hello".to_vec(), DONE));
        let request = served.request.unwrap();
        assert_eq!((request.version, request.destination), (Version::V5, to(destination)));
        assert_eq!(request.user.as_deref(), accounts.first().map(|_| "user"));
    }
    let failed = Reply::failed(ReplyCode::TimedOut);
    let served = serve_cut(&config(&[]), &hex("05 01 00 05 01 00 01 c0000201 01bb"), &failed);
    assert_eq!(served.sent, hex("0500 05 06 00 01 00000000 0000"), "version 5 has no code 9");
    assert!(matches!(served.end, Some(Output::Failed { reason: EndReason::ConnectTimeout, .. })));
    let six = Reply::connected("[2001:db8::7]:40001".parse().unwrap());
    let served = serve_cut(&config(&[]), &hex("05 01 00 05 01 00 01 c0000201 01bb"), &six);
    assert_eq!(served.sent, hex("0500 05 00 00 04 20010db8000000000000000000000007 9c41"));
    let mapped = Reply::connected("[::ffff:192.0.2.3]:1".parse().unwrap());
    let served = serve_cut(&config(&[]), &hex("05 01 00 05 01 00 01 c0000201 01bb"), &mapped);
    assert_eq!(served.sent, hex("0500 05 00 00 01 c0000203 0001"), "no mapped address is ever sent");
}

const V1: &str = "06010008 01bb0001 c0000201 00020008 00050000 68656c6c 6f";
const V1B: &str = "06010000 01bb0001 c0000201 68656c6c 6f";
const V2: &str = "06010034 15380003 0f64622e 6578616d 706c652e 6e6c0000 00020008 00000200 00040010 02010475 73657204 \
    70617373 00010008 84010005 00010008 84020200 00050004 000b0008 00000100 68656c6c 6f";
const X1: &str = "060101c0 00020101 bb000008 00020008 00050000 68656c6c 6f";

#[test]
fn version_6_servers() {
    for bytes in [V1, V1B] {
        let served = serve_cut(&config(&[]), &hex(bytes), &connected());
        assert_eq!(served.sent, hex("06000000 06000000 9c400001 c6336407"));
        assert_eq!((&served.delivered[..], served.end), (&b"hello"[..], DONE));
        let request = served.request.unwrap();
        assert_eq!((request.version, request.destination), (Version::V6, to("192.0.2.1:443")));
    }
    let served = serve_cut(&config(&[]), &hex(X1), &connected());
    assert_eq!(served.sent, hex("06000000 06000001 00010000 00000000"));
    assert_eq!((&served.delivered[..], served.end), (&b"hello"[..], DONE));
    let request = served.request.unwrap();
    assert_eq!((request.version, request.destination), (Version::V6Socksx, to("192.0.2.1:443")));
    let six = Reply::connected("[2001:db8::7]:40001".parse().unwrap());
    let served = serve_cut(&config(&["user:pass"]), &hex(V2), &six);
    // The id and the window's base are the random bytes of the test's driver.
    assert_eq!(
        served.sent,
        hex("06000028 00040008 02010000 00060014 30313233 34353637 38396162 63646566 000c000c fffffff0 00000100
             06000010 9c410004 20010db8 00000000 00000000 00000007 00010008 84010000 00010008 84020100")
    );
    assert_eq!((&served.delivered[..], served.end), (&b"hello"[..], DONE));
    assert_eq!(served.request.unwrap().user.as_deref(), Some("user"));
    let v2_wrong = V2.replace("70617373", "70617374");
    let served = serve_cut(&config(&["user:pass"]), &hex(&v2_wrong), &six);
    assert_eq!((served.sent, served.request), (hex("06010008 00040008 02010100"), None));
    let v3 = "06000018 00000001 00000000 0006000c 01020304 05060708 000d0008 fffffff0 000a0004";
    let served = serve_cut(&config(&[]), &hex(v3), &six);
    assert_eq!((served.sent, served.request), (hex("06010004 00090004"), None));
}

#[test]
fn no_proper_prefix_of_a_request_is_answered() {
    for (bytes, data_len) in [(V1, 5), (V1B, 5), (V2, 5), (X1, 5)] {
        let bytes = hex(bytes);
        for end in 1..bytes.len() - data_len {
            let served = serve(&config(&["user:pass"]), [&bytes[..end]], &connected());
            assert_eq!((served.sent, served.request), (vec![], None));
            assert!(matches!(served.end, Some(Output::Failed { reason: EndReason::ClientGone, .. })));
        }
    }
}

#[test]
fn a_password_in_the_stream_of_draft_11() {
    // Five bytes of initial data, then the password message, then more data.
    let request = "06010008 01bb0001 c0000201 00020008 00050200 68656c6c 6f  01 04 75736572 04 70617373";
    let bytes = [hex(request), b" world".to_vec()].concat();
    let served = serve_cut(&config(&["user:pass"]), &bytes, &connected());
    assert_eq!(served.sent, hex("06010008 00030008 02000000  0100  06000000  06000000 9c400001 c6336407"));
    assert_eq!((&served.delivered[..], served.end), (&b"hello world"[..], DONE));
    assert_eq!(served.request.unwrap().user.as_deref(), Some("user"));
    let wrong = [hex(&request.replace("70617373", "70617374")), b" world".to_vec()].concat();
    let served = serve_cut(&config(&["user:pass"]), &wrong, &connected());
    assert_eq!(served.sent, hex("06010008 00030008 02000000  0101  06010000"));
    assert!(matches!(served.end, Some(Output::Failed { reason: EndReason::AuthFailed, .. })));
    assert_eq!(served.request, None);
    // A client that advertises nothing we know.
    let served = serve_cut(&config(&["user:pass"]), &hex(V1), &connected());
    assert_eq!(served.sent, hex("06010008 00030008 ff000000"));
}

/// Feeds a client the proxy's bytes cut everywhere; all the same.
fn dial_cut(client: impl Fn() -> sidetrack_core::socks::Client, bytes: &[u8]) -> Dialled {
    let dialled = dial(client(), [bytes]);
    for pieces in cuts(bytes) {
        let what = format!("{pieces:02x?}");
        assert_eq!(dial(client(), pieces), dialled, "{what}");
    }
    dialled
}

#[test]
fn version_5_clients() {
    let destination = to("db.example.nl:5432");
    let request = "05 01 00 03 0d 64622e6578616d706c652e6e6c 1538";
    let password = "01 04 75736572 04 70617373";
    let hello = "68656c6c 6f";
    // password, optimistic, proxy's bytes, client's bytes
    let table = [
        (false, false, "0500", format!("05 01 00 {request} {hello}")),
        (false, true, "0500", format!("05 01 00 {request} {hello}")),
        (true, false, "0500", format!("05 02 00 02 {request} {hello}")),
        (true, false, "0502 0100", format!("05 02 00 02 {password} {request} {hello}")),
        (true, true, "0502 0100", format!("05 01 02 {password} {request} {hello}")),
        // A status with the wrong version byte, as some servers send it.
        (true, false, "0502 0500", format!("05 02 00 02 {password} {request} {hello}")),
    ];
    let bounds = [
        ("01 c6336407 9c40", "198.51.100.7:40000"),
        ("04 20010db8000000000000000000000007 9c41", "[2001:db8::7]:40001"),
        ("03 05 70726f7879 0438", "proxy:1080"),
        // Servers that have nothing to say.
        ("01 00000000 0000", "0.0.0.0:0"),
        ("03 00 0000", "0.0.0.0:0"),
    ];
    for (password, optimistic, proxy, sent) in table {
        for (bound, expected) in bounds {
            let bytes = [hex(&format!("{proxy} 05 00 00 {bound}")), b"server first".to_vec()].concat();
            let dialled = dial_cut(|| drive::v5_client(&destination, password, optimistic), &bytes);
            assert_eq!((dialled.sent, &dialled.received[..]), (hex(&sent), &b"server first"[..]));
            let Some(ClientOutput::Connected(connected)) = dialled.end else { panic!("{:?}", dialled.end) };
            assert_eq!(connected.bound, to(expected));
        }
    }
}

#[test]
fn version_6_clients() {
    let destination = to("192.0.2.1:443");
    for (dialect, replies) in [
        (Draft, vec!["06000000 9c400001 c6336407", "06000008 9c400001 c6336407 12340008 01020304"]),
        (Socksx010, vec!["06000000 00010000 00000000", "06000001 00010000 00000000"]),
        (Socksx, vec!["06000001 00000000 00000000", "06000001 00010000 00000000"]),
    ] {
        for reply in replies {
            let bytes = [hex("06000000"), hex(reply), b"server first".to_vec()].concat();
            let dialled = dial_cut(|| drive::v6_client(&destination, false, 0, dialect), &bytes);
            assert_eq!(&dialled.received[..], b"server first");
            let sent = match dialect {
                Draft => "06010008 01bb0001 c0000201 00010008 84010005 68656c6c 6f",
                Socksx010 | Socksx => X1,
            };
            assert_eq!(dialled.sent, hex(sent));
            assert!(matches!(dialled.end, Some(ClientOutput::Connected(_))));
        }
    }
}

#[test]
fn a_version_6_client_gives_its_password_in_the_stream_when_asked() {
    let client = || drive::v6_client(&to("192.0.2.1:443"), true, 0, Draft);
    let request = "06010020 01bb0001 c0000201 00020008 00050200 00040010 02010475 73657204 70617373
        00010008 84010005 68656c6c 6f";
    let selection = "06010008 00030008 02000000";
    let ok = format!("{selection} 0100 06000000 06000000 9c400001 c6336407");
    let dialled = dial_cut(client, &[hex(&ok), b"x".to_vec()].concat());
    assert_eq!(dialled.sent, hex(&format!("{request} 01 04 75736572 04 70617373")));
    assert!(matches!(dialled.end, Some(ClientOutput::Connected(_))));
    assert_eq!(dialled.received, b"x");
    for refusal in ["0101", "0100 06010000", "0100 06010008 00030008 02000000"] {
        let dialled = dial_cut(client, &hex(&format!("{selection} {refusal}")));
        let Some(ClientOutput::Failed { reason, .. }) = dialled.end else { panic!("{refusal}") };
        assert_eq!(reason, EndReason::AuthFailed, "{refusal}");
    }
}
