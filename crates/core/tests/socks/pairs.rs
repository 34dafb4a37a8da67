//! Every client against every server: what arrives, and how many round trips it takes.

use crate::network::{ANSWER, Network};
use crate::{account, to};
use sidetrack_core::carrier::Socks6Dialect::{self, Draft, Socksx, Socksx010};
use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::server::{Output, Reply, ServerConfig, Version};
use sidetrack_core::socks::v6::{ClientCommand, ClientConfig, Metadata, SessionUse, StackOption};
use sidetrack_core::socks::{Client, Command, ReplyCode, v5, v6};
use sidetrack_core::time::Instant;
use std::time::Duration;

const PIECES: [usize; 4] = [1, 3, 16, usize::MAX];

fn network(accounts: &[&str]) -> Network {
    let accounts = accounts.iter().map(|text| account(text)).collect();
    Network::new(ServerConfig { accounts, ..ServerConfig::default() })
}

fn v5(credentials: Option<&str>, optimistic: bool) -> impl FnOnce(Instant) -> Client {
    let config = v5::ClientConfig {
        command: Command::Connect,
        destination: to("db.example.nl:5432"),
        credentials: credentials.map(account),
        optimistic,
        initial_data: b"hello".to_vec(),
        handshake_timeout: Duration::from_secs(10),
    };
    move |now| Client::V5(Box::new(v5::Client::new(config, now)))
}

/// A version 6 client's configuration, to be changed where a test differs.
pub(crate) fn v6_config(dialect: Socks6Dialect, credentials: Option<&str>) -> ClientConfig {
    ClientConfig {
        command: ClientCommand::Connect(to("db.example.nl:5432")),
        dialect,
        credentials: credentials.map(account),
        metadata: Vec::new(),
        stack: Vec::new(),
        initial_data: b"hello".to_vec(),
        session: SessionUse::None,
        handshake_timeout: Duration::from_secs(10),
    }
}

/// A version 6 client.
pub(crate) fn v6(config: ClientConfig) -> impl FnOnce(Instant) -> Client {
    move |now| Client::V6(Box::new(v6::Client::new(config, now)))
}

#[test]
fn version_5_takes_the_fewest_round_trips() {
    // (credentials asked, credentials given, optimistic) -> (connected, first answer byte) in round trips.
    let table = [
        (None, None, false, 2, 3),
        (None, None, true, 1, 1),
        // A server that asks for no password saves that round trip.
        (None, Some("user:pass"), false, 2, 3),
        (None, Some("user:pass"), true, 1, 1),
        (Some("user:pass"), Some("user:pass"), false, 3, 4),
        (Some("user:pass"), Some("user:pass"), true, 1, 1),
    ];
    for (asked, given, optimistic, connected, answered) in table {
        for piece_len in PIECES {
            let mut network = network(asked.as_slice());
            network.piece_len = piece_len;
            let run = network.run(v5(given, optimistic));
            let what = format!("{asked:?} {given:?} optimistic {optimistic} pieces of {piece_len}");
            assert_eq!(run.connected().bound, to("198.51.100.7:40000"), "{what}");
            assert_eq!((run.client_round_trips, run.answer_round_trips), (connected, answered), "{what}");
            assert_eq!((&run.delivered[..], &run.received[..]), (&b"hello"[..], ANSWER), "{what}");
            assert_eq!(run.server, Some(Output::Done { leftover: Vec::new() }), "{what}");
            let request = run.request.unwrap();
            assert_eq!((request.version, request.destination), (Version::V5, to("db.example.nl:5432")));
            assert_eq!(request.user.as_deref(), asked.map(|_| "user"), "{what}");
        }
    }
}

#[test]
fn version_5_wrong_password_missing_password_and_no_password_wanted() {
    for optimistic in [false, true] {
        let run = network(&["user:pass", "other:word"]).run(v5(Some("user:word"), optimistic));
        assert_eq!(run.client_failure().0, EndReason::AuthFailed);
        assert!(run.server_failure().1.contains("\"user\""), "{:?}", run.server);
        assert!(run.request.is_none(), "nothing is dialled for a wrong password");
        let run = network(&["user:pass"]).run(v5(None, optimistic));
        assert_eq!(
            run.client_failure(),
            (EndReason::AuthFailed, "the proxy asks for authentication: give user:password@ in the hop")
        );
        assert_eq!(run.server_failure().0, EndReason::AuthFailed);
        assert!(run.request.is_none());
    }
}

#[test]
fn version_6_takes_one_round_trip() {
    for dialect in [Draft, Socksx010, Socksx] {
        for (asked, given) in
            [(None, None), (None, Some("user:pass")), (Some("user:pass"), Some("user:pass"))]
        {
            if asked.is_some() && dialect != Draft {
                continue;
            }
            for piece_len in PIECES {
                let mut network = network(asked.as_slice());
                network.piece_len = piece_len;
                let run = network.run(v6(v6_config(dialect, given)));
                let what = format!("{dialect:?} {asked:?} {given:?} pieces of {piece_len}");
                let connected = run.connected();
                let bound = if dialect == Draft { "198.51.100.7:40000" } else { "0.0.0.0:0" };
                assert_eq!(connected.bound, to(bound), "{what}");
                assert_eq!((run.client_round_trips, run.answer_round_trips), (1, 1), "{what}");
                assert_eq!(run.client_writes, 1, "request and initial data are one write: {what}");
                assert_eq!((&run.delivered[..], &run.received[..]), (&b"hello"[..], ANSWER), "{what}");
                let request = run.request.unwrap();
                let version = if dialect == Draft { Version::V6 } else { Version::V6Socksx };
                assert_eq!((request.version, request.destination), (version, to("db.example.nl:5432")));
                assert_eq!(request.user.as_deref(), asked.map(|_| "user"), "{what}");
            }
        }
    }
}

#[test]
fn replies_share_a_write_where_the_client_cannot_act_on_the_first() {
    let run = network(&[]).run(v6(v6_config(Draft, None)));
    assert_eq!(run.server_writes, 1, "a false start: nothing waits for the Authentication Reply");
    let run = network(&["user:pass"]).run(v6(v6_config(Draft, Some("user:pass"))));
    assert_eq!(run.server_writes, 2, "the client may send more after the Authentication Reply");
}

#[test]
fn version_6_wrong_and_missing_password() {
    let run = network(&["user:pass"]).run(v6(v6_config(Draft, Some("user:word"))));
    assert_eq!(
        run.client_failure(),
        (EndReason::AuthFailed, "the proxy did not accept user name and password (status 1)")
    );
    assert!(run.request.is_none());
    for dialect in [Draft, Socksx] {
        let run = network(&["user:pass"]).run(v6(v6_config(dialect, None)));
        assert_eq!(run.client_failure().0, EndReason::AuthFailed);
        assert_eq!(run.server_failure().0, EndReason::AuthFailed);
        assert!(run.request.is_none());
    }
}

#[test]
fn long_initial_data_follows_the_authentication() {
    let data: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
    // (accounts, dialect, sent with the request, round trips to the answer)
    let with_password = Some("user:pass");
    let table = [
        (None, Draft, data.len(), 1),
        (with_password, Draft, v6::MAX_INITIAL_DATA_LEN, 2),
        (None, Socksx, v6::MAX_INITIAL_DATA_LEN, 2),
    ];
    for (asked, dialect, sent_first, round_trips) in table {
        let mut network = network(asked.as_slice());
        network.expected_len = data.len();
        network.piece_len = 8192;
        let config = ClientConfig { initial_data: data.clone(), ..v6_config(dialect, asked) };
        let mut at_first = None;
        let run = network.run(|now| {
            let client = v6(config)(now);
            at_first = Some(client.initial_data_sent());
            client
        });
        assert_eq!(at_first, Some(sent_first), "{dialect:?} {asked:?}");
        assert_eq!(run.answer_round_trips, round_trips, "{dialect:?} {asked:?}");
        assert!(run.delivered == data, "{dialect:?} {asked:?}");
    }
}

#[test]
fn stack_options_are_answered() {
    let asked = [StackOption::Tfo(5), StackOption::Multipath(true), StackOption::HappyEyeballs(true)];
    let config = || ClientConfig { stack: asked.to_vec(), ..v6_config(Draft, None) };
    let run = network(&[]).run(v6(config()));
    assert_eq!(run.request.as_ref().unwrap().stack, asked);
    let refused = [StackOption::Tfo(0), StackOption::Multipath(false), StackOption::HappyEyeballs(false)];
    assert_eq!(run.connected().stack, refused, "what the driver does not answer was not done");
    let mut network = network(&[]);
    network.reply.stack = vec![StackOption::Multipath(true), StackOption::Ttl(v6::Leg::Remote, 64)];
    let answers = network.run(v6(config())).connected().stack.clone();
    let expected =
        [network.reply.stack, vec![StackOption::Tfo(0), StackOption::HappyEyeballs(false)]].concat();
    assert_eq!(answers, expected);
}

#[test]
fn metadata_goes_both_ways() {
    let entry = |key, value: &str| Metadata { key, value: value.into() };
    let metadata = vec![entry(7, "a"), entry(1000, "socks6://fn:1080"), entry(9, "")];
    for dialect in [Draft, Socksx010, Socksx] {
        let mut network = network(&[]);
        network.reply.metadata = vec![entry(42, "back")];
        // What is copied and what a rule adds may meet: the later entry counts.
        let given = [vec![entry(9, "old")], metadata.clone()].concat();
        let run = network.run(v6(ClientConfig { metadata: given, ..v6_config(dialect, None) }));
        assert_eq!(run.request.as_ref().unwrap().metadata, metadata, "{dialect:?}");
        let back = if dialect == Draft { network.reply.metadata } else { vec![] };
        assert_eq!(run.connected().metadata, back, "the common socksx reply has no room for metadata");
    }
}

#[test]
fn a_chain_of_three_hops_goes_out_in_one_write() {
    // Each hop's request is the initial data of the hop before.
    let mut data = b"hello".to_vec();
    let mut hops = vec!["db.example.nl:5432", "hop3:1080", "hop2:1080"];
    for destination in &hops {
        let command = ClientCommand::Connect(to(destination));
        let config = ClientConfig { command, initial_data: data, ..v6_config(Draft, None) };
        let Some(sidetrack_core::socks::client::Output::Send(bytes)) = v6(config)(Instant::ZERO).poll()
        else {
            panic!("the first output is the request");
        };
        data = bytes;
    }
    while let Some(destination) = hops.pop() {
        let reply = Reply::connected("198.51.100.7:40000".parse().unwrap());
        let served = crate::drive::serve(&ServerConfig::default(), [&data[..]], &reply);
        assert_eq!(served.request.unwrap().destination, to(destination));
        data = served.delivered;
    }
    assert_eq!(data, b"hello");
}

#[test]
fn every_reply_code_reaches_the_client() {
    let codes = (1..=9).map(ReplyCode::from_wire);
    for code in codes {
        let mut network = network(&[]);
        network.reply = Reply::failed(code);
        let clients = [
            network.run(v5(None, false)),
            network.run(v5(None, true)),
            network.run(v6(v6_config(Draft, None))),
            network.run(v6(v6_config(Socksx, None))),
            network.run(v6(v6_config(Socksx010, None))),
        ];
        for run in clients {
            let (reason, detail) = run.client_failure();
            assert_eq!(reason, code.end_reason(), "{code}: {detail}");
            let text = if code == ReplyCode::TimedOut { "timed out" } else { code.text() };
            assert!(detail.contains(text) && detail.contains("db.example.nl:5432"), "{detail}");
            assert_eq!(run.server_failure().0, code.end_reason());
        }
    }
}

#[test]
fn noop_connects_nothing() {
    let config = ClientConfig { command: ClientCommand::Noop, ..v6_config(Draft, None) };
    let run = network(&[]).run(v6(config));
    assert_eq!((&run.server, &run.request), (&Some(Output::Finished), &None));
    assert_eq!(run.client_round_trips, 1);
    assert_eq!(run.connected().bound, to("0.0.0.0:0"));
}

#[test]
fn a_listener_serves_only_its_versions() {
    let config = ServerConfig { v6: false, ..ServerConfig::default() };
    let run = Network::new(config).run(v6(v6_config(Draft, None)));
    assert_eq!(run.client_failure().0, EndReason::HopFailed);
    assert_eq!(run.server_failure().0, EndReason::Unsupported);
    let config = ServerConfig { v5: false, ..ServerConfig::default() };
    let run = Network::new(config).run(v5(None, false));
    assert_eq!(run.client_failure().0, EndReason::AuthFailed);
    assert!(run.server_failure().1.contains("serves SOCKS versions: 6"), "{:?}", run.server);
}

#[test]
fn a_silent_proxy_is_given_up_at_the_deadline() {
    use sidetrack_core::socks::client::{Input, Output};
    for mut client in [v5(None, false)(Instant::ZERO), v6(v6_config(Draft, None))(Instant::ZERO)] {
        assert!(matches!(client.poll(), Some(Output::Send(_))));
        let deadline = client.deadline().unwrap();
        assert_eq!(deadline, Instant::from_millis(10_000));
        client.handle(Instant::from_millis(9_999), Input::Tick);
        assert_eq!(client.poll(), None);
        client.handle(deadline, Input::Tick);
        assert!(matches!(client.poll(), Some(Output::Failed { reason: EndReason::ConnectTimeout, .. })));
    }
}
