//! What proxies send that they should not, and what clients make of it.

use crate::drive::{dial, v5_client, v6_client};
use crate::{hex, to};
use sidetrack_core::carrier::Socks6Dialect::{Draft, Socksx, Socksx010};
use sidetrack_core::flow::EndReason::{self, AuthFailed, HopFailed, Refused, Unreachable};
use sidetrack_core::socks::client::Output;
use sidetrack_core::socks::{Client, Command};

fn check(client: Client, bytes: &str, expected: EndReason, words: &str) {
    match dial(client, [&hex(bytes)[..]]).end {
        Some(Output::Failed { reason, detail }) => {
            assert_eq!(reason, expected, "{bytes}: {detail}");
            assert!(detail.contains(words), "{bytes}: {detail}");
        }
        end => panic!("{bytes}: {end:?}"),
    }
}

#[test]
fn version_5() {
    let destination = to("db.example.nl:5432");
    let table = [
        ("", HopFailed, "closed before its method selection"),
        ("05", HopFailed, "closed before its method selection"),
        ("0500", HopFailed, "closed before its reply to CONNECT"),
        ("0500 05000001 c63364", HopFailed, "closed before its reply to CONNECT"),
        ("05ff", AuthFailed, "give user:password@"),
        ("0502", HopFailed, "method 2, which was not offered"),
        ("0501", HopFailed, "method 1, which was not offered"),
        ("0600", HopFailed, "seems to speak SOCKS6"),
        ("005b", HopFailed, "seems to speak SOCKS4"),
        ("485454502f312e31", HopFailed, "seems to speak HTTP"),
        ("0500 0400", HopFailed, "begins with 0x04 instead of 05"),
        // A failure may be cut short after its code.
        ("0500 0505", Refused, "CONNECT to db.example.nl:5432: connection refused (code 5)"),
        ("0500 05040001 00000000 0000", Unreachable, "host unreachable (code 4)"),
        ("0500 0502", HopFailed, "not allowed by its rules (code 2)"),
        ("0500 05f0", HopFailed, "onion service descriptor not found (code 240)"),
        ("0500 0563", HopFailed, "code 99"),
        ("0500 05000002 00000000 0000", HopFailed, "address type 2"),
    ];
    for (bytes, reason, words) in table {
        check(v5_client(&destination, false, false), bytes, reason, words);
        check(v5_client(&destination, false, true), bytes, reason, words);
    }
    let with_password = [
        ("05ff", AuthFailed, "accepts no user name and password"),
        ("0502 0101", AuthFailed, "status 1"),
        ("0502 01", HopFailed, "closed before its answer to the password"),
    ];
    for (bytes, reason, words) in with_password {
        check(v5_client(&destination, true, false), bytes, reason, words);
        check(v5_client(&destination, true, true), bytes, reason, words);
    }
    // The optimistic client has offered the password method alone.
    check(v5_client(&destination, true, true), "0500", HopFailed, "method 0, which was not offered");
}

#[test]
fn version_6() {
    let destination = to("db.example.nl:5432");
    let table = [
        ("", HopFailed, "closed before its Authentication Reply"),
        ("06", HopFailed, "version mismatch reply"),
        ("0600", HopFailed, "closed before its Authentication Reply"),
        ("05ff", HopFailed, "seems to speak SOCKS5"),
        ("48545450", HopFailed, "seems to speak HTTP"),
        ("06020000", HopFailed, "type 2"),
        ("06000000", HopFailed, "closed before its Operation Reply"),
        ("06000000 06000000 9c400001 c63364", HopFailed, "closed before its Operation Reply"),
        ("06000000 0600ffff", HopFailed, "65535 bytes of options"),
        ("06005004", HopFailed, "20484 bytes of options"),
        ("06000000 06050000 00000001 00000000", Refused, "db.example.nl:5432: connection refused (code 5)"),
        ("06000000 06000000 00000007 00000000", HopFailed, "address type 7"),
        ("06000000 06000004 00000001 00000000 00010000", HopFailed, "length 0"),
        ("06000004 00050004", HopFailed, "kind 5 does not belong"),
        ("06000008 00080004 00090004", HopFailed, "both ok and invalid"),
        ("06000010 00060008 01020304 00060008 01020304", HopFailed, "kind 6 is there twice"),
        ("06010000", AuthFailed, "give user:password@"),
        ("06010008 00030008 02000000", AuthFailed, "give user:password@"),
    ];
    for (bytes, reason, words) in table {
        check(v6_client(&destination, false, 0, Draft), bytes, reason, words);
    }
    let with_password = [
        ("06010008 00030008 ff000000", AuthFailed, "did not accept"),
        ("06010008 00030008 01000000", AuthFailed, "method 1"),
        ("06010008 00040008 02010500", AuthFailed, "status 5"),
        ("06010008 00030008 02000000", HopFailed, "closed before its answer to the password"),
        ("06010004 00090004", AuthFailed, "does not know the session"),
        ("06010004 000f0004", AuthFailed, "rejected the token"),
    ];
    for (bytes, reason, words) in with_password {
        check(v6_client(&destination, true, 0, Draft), bytes, reason, words);
    }
}

#[test]
fn socksx() {
    let destination = to("192.0.2.1:443");
    for dialect in [Socksx010, Socksx] {
        let client = || v6_client(&destination, false, 0, dialect);
        check(client(), "06000000", Refused, "it could not connect");
        check(client(), "06000000 06", HopFailed, "closed before");
        // Over its limit it answers with an Operation Reply at once.
        check(client(), "06050001 00000000 00000000", HopFailed, "connection limit");
        check(client(), "06000000 06050001 00000000 00000000", Refused, "code 5");
        check(client(), "06000000 06050000 00010000 00000000", Refused, "code 5");
    }
}

#[test]
fn credentials_that_no_message_can_carry_fail_before_a_byte_is_sent() {
    use sidetrack_core::socks::{v5, v6};
    use sidetrack_core::time::Instant;
    let wrong = sidetrack_core::carrier::Credentials { user: "u".repeat(256), password: "p".into() };
    let config =
        v6::ClientConfig { credentials: Some(wrong.clone()), ..crate::pairs::v6_config(Draft, None) };
    let mut six = v6::Client::new(config, Instant::ZERO);
    assert!(matches!(six.poll(), Some(Output::Failed { .. })));
    let mut five = v5::Client::new(
        v5::ClientConfig {
            command: Command::Connect,
            destination: to("a:1"),
            credentials: Some(wrong),
            optimistic: true,
            initial_data: Vec::new(),
            handshake_timeout: std::time::Duration::from_secs(1),
        },
        Instant::ZERO,
    );
    assert!(matches!(five.poll(), Some(Output::Failed { .. })));
    assert_eq!((five.poll(), six.poll()), (None, None));
}
