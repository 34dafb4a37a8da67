//! IPFIX: golden bytes (RFC 7011), sequence numbers, templates that are sent again, and the sizes of messages.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use sidetrack_core::flow::Protocol;
use sidetrack_core::ipfix::{End, MESSAGE_MAX, MESSAGE_MIN, Message, Report, Session, Settings};
use sidetrack_core::time::Instant;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const SETTINGS: Settings = Settings { domain: 7, message_bytes: 1400, refresh: None, enterprise: None };

fn report() -> Report<'static> {
    Report {
        flow: 9,
        protocol: Protocol::Tcp,
        client: Some("10.0.0.1:4660".parse().unwrap()),
        server: Some("192.0.2.7".parse().unwrap()),
        server_port: 443,
        dialled: None,
        start_ms: 0x18f_0000_0001,
        end_ms: 0x18f_0000_0002,
        bytes: [0x1122, 0x3344],
        packets: None,
        end: End::Seen,
        is_denied: false,
        host: "a.example",
        process: "",
        user: "uid:0",
        own: ["web", "direct", "in", "ok"],
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn messages(session: &mut Session) -> Vec<Message> {
    std::iter::from_fn(|| session.poll()).collect()
}

/// The sets of a message, each with its number and its bytes, after its header and lengths were checked.
fn sets(message: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let number = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    assert_eq!((number(0), usize::from(number(2))), (10, message.len()));
    let (mut at, mut sets) = (16, Vec::new());
    while at < message.len() {
        let length = usize::from(number(at + 2));
        assert!(length > 4 && at + length <= message.len(), "a set of {length} bytes at {at}");
        sets.push((number(at), message[at + 4..at + length].to_vec()));
        at += length;
    }
    sets
}

fn sequence(message: &Message) -> u32 {
    u32::from_be_bytes(message.bytes[8..12].try_into().unwrap())
}

#[test]
fn a_flow_is_written_as_the_standard_says() {
    let mut session = Session::new(SETTINGS);
    session.add(Instant::ZERO, 0x6543_2100, &report());
    assert_eq!(session.poll(), None, "it waits for more");
    session.flush(0x6543_2100);
    let [message] = messages(&mut session).try_into().unwrap();
    let expected = [
        // Version 10, length, export time, sequence number 0, observation domain 7.
        "000a00a9654321000000000000000007",
        // The set of templates: template 280 with 16 fields.
        "0002004c01180010",
        // flowId, flowStartMilliseconds, flowEndMilliseconds: 8 bytes each.
        "009400080098000800990008",
        // protocolIdentifier, flowEndReason, firewallEvent, biflowDirection: 1 byte each.
        "000400010088000100e9000100ef0001",
        // sourceIPv4Address, the two ports, destinationIPv4Address.
        "0008000400070002000b0002000c0004",
        // octetDeltaCount, and its reverse of enterprise 29305.
        "000100088001000800007279",
        // httpRequestHost, applicationName, userName: variable.
        "01ccffff0060ffff0173ffff",
        // The data set.
        "0118004d",
        "0000000000000009",
        "0000018f000000010000018f00000002",
        "06030201",
        "0a000001123401bbc0000207",
        "00000000000011220000000000003344",
        "09612e6578616d706c65",
        "00",
        "057569643a30",
    ];
    let found = hex(&message.bytes);
    assert_eq!(message.records, 1);
    assert_eq!(found, expected.concat());
}

#[test]
fn texts_without_a_standard_element_need_an_enterprise_number() {
    let mut session = Session::new(Settings { enterprise: Some(32_473), ..SETTINGS });
    session.add(Instant::ZERO, 0, &report());
    session.flush(0);
    let [message] = messages(&mut session).try_into().unwrap();
    let [(_, template), (_, data)] = sets(&message.bytes).try_into().unwrap();
    let own = [1, 2, 3, 4].map(|element| format!("800{element}ffff00007ed9")).concat();
    assert!(hex(&template).ends_with(&own), "{}", hex(&template));
    assert!(data.ends_with(b"\x03web\x06direct\x02in\x02ok"), "{}", hex(&data));
}

#[test]
fn sequence_numbers_count_data_records_of_the_messages_before() {
    let mut session = Session::new(SETTINGS);
    let mut all = Vec::new();
    for _ in 0..100 {
        session.add(Instant::ZERO, 0, &report());
        all.extend(messages(&mut session));
    }
    session.flush(0);
    all.extend(messages(&mut session));
    assert!(all.len() > 3, "{} messages", all.len());
    let mut before = 0;
    for message in &all {
        assert_eq!(sequence(message), before);
        before += message.records;
    }
    assert_eq!(before, 100);
    session.flush(0);
    assert_eq!(session.poll(), None, "an empty message is not sent");
}

#[test]
fn a_template_is_sent_again_when_its_time_is_over() {
    let templates = |refresh: Option<u64>| {
        let refresh = refresh.map(Duration::from_millis);
        let mut session = Session::new(Settings { refresh, ..SETTINGS });
        [0, 999, 1000, 1500, 2500].map(|at| {
            session.add(Instant::from_millis(at), 0, &report());
            session.flush(0);
            let [message] = messages(&mut session).try_into().unwrap();
            sets(&message.bytes).iter().filter(|(number, _)| *number == 2).count()
        })
    };
    assert_eq!(templates(Some(1000)), [1, 0, 1, 0, 1]);
    assert_eq!(templates(None), [1, 0, 0, 0, 0]);
}

#[test]
fn each_kind_of_flow_has_its_own_template_before_it() {
    let mut session = Session::new(SETTINGS);
    let v6: SocketAddr = "[2001:db8::1]:53".parse().unwrap();
    let nothing = Report { client: None, server: None, ..report() };
    let kinds = [
        report(),
        Report { client: Some(v6), ..report() },
        Report { server: Some(v6.ip()), protocol: Protocol::Udp, packets: Some([1, 2]), ..report() },
        Report { dialled: Some(v6), ..report() },
        Report { server: None, ..report() },
        nothing,
        report(),
    ];
    let mut all = Vec::new();
    for kind in &kinds {
        session.add(Instant::ZERO, 0, kind);
        all.extend(messages(&mut session));
    }
    session.flush(0);
    all.extend(messages(&mut session));
    let (mut known, mut found) = (Vec::new(), 0);
    for (number, bytes) in all.iter().flat_map(|message| sets(&message.bytes)) {
        if number == 2 {
            known.push(u16::from_be_bytes([bytes[0], bytes[1]]));
        } else {
            assert!(known.contains(&number), "{number} before its template");
            found += 1;
        }
    }
    known.sort_unstable();
    known.dedup();
    assert_eq!((known.len(), found), (6, 7));
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["\\PC{0,20}", "[a-zé\u{1f600}]{200,300}"]
}

proptest! {
    #[test]
    fn messages_keep_their_bound(
        limit in prop_oneof![0_usize..2000, Just(MESSAGE_MAX), Just(usize::MAX)],
        addresses in prop::collection::vec(prop::array::uniform3(prop::option::of(any::<IpAddr>())), 1..40),
        texts in prop::array::uniform7(text()),
        enterprise in prop::option::of(any::<u32>()),
        packets in prop::option::of(any::<[u64; 2]>()),
    ) {
        let mut session = Session::new(Settings { message_bytes: limit, enterprise, ..SETTINGS });
        let [host, process, user, rule, carrier, listener, reason] = texts.each_ref().map(String::as_str);
        let mut all = Vec::new();
        for [client, server, dialled] in &addresses {
            session.add(Instant::ZERO, 0, &Report {
                client: client.map(|ip| (ip, 1).into()),
                server: *server,
                dialled: dialled.map(|ip| (ip, 2).into()),
                packets,
                host,
                process,
                user,
                own: [rule, carrier, listener, reason],
                ..report()
            });
            prop_assert!(all.len() <= addresses.len());
            all.extend(messages(&mut session));
        }
        session.flush(0);
        all.extend(messages(&mut session));
        prop_assert_eq!(all.iter().map(|message| message.records as usize).sum::<usize>(), addresses.len());
        for message in &all {
            prop_assert!(message.bytes.len() <= limit.clamp(MESSAGE_MIN, MESSAGE_MAX));
            prop_assert!(!sets(&message.bytes).is_empty());
        }
    }
}
