//! Invitations: golden texts and messages, every split, cut and damage, any bytes, and all orders of events at the host.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use data_encoding::BASE64URL_NOPAD;
use proptest::prelude::*;
use sidetrack_core::invitation::host::{End, Host, Take, WRONG_MAX};
use sidetrack_core::invitation::table::{self, Table, TableError};
use sidetrack_core::invitation::{
    Edge, Invitation, InvitationError, Kind, Message, Node, OverlayOffer, Refusal, Secret, TunnelOffer,
    proven,
};
use sidetrack_core::overlay::key::PublicKey;
use sidetrack_core::tunnel::{BODY_MAX, DETAIL_MAX, MessageError, Parsed};
use std::collections::BTreeSet;

const GOLDEN: &str = "sidetrack1:SQBvgAABAYEABwERUsAAAgGBAA4DEVJmYXIuZXhhbXBsZYIAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4fgwAMbmVhci5leGFtcGxlhAAQ8PHy8_T19vf4-fr7_P3-_4UACAAAAABrSdIADy2B7w";

fn invitation() -> Invitation {
    Invitation {
        kind: Kind::Tunnel,
        addresses: vec!["192.0.2.1:4434".parse().unwrap(), "far.example:4434".parse().unwrap()],
        pin: std::array::from_fn(|at| at as u8),
        name: "near.example".into(),
        secret: Secret(std::array::from_fn(|at| 0xf0 + at as u8)),
        expires: 1_800_000_000,
    }
}

#[test]
fn an_invitation_is_this_line_and_its_secret_is_not_shown() {
    assert_eq!(invitation().to_text().unwrap(), GOLDEN);
    assert_eq!(GOLDEN.parse(), Ok(invitation()));
    // Terminals and mail programs break lines.
    assert_eq!(format!(" {}\n\t{} \r\n", &GOLDEN[..50], &GOLDEN[50..]).parse(), Ok(invitation()));
    let shown = format!("{:?}", invitation());
    assert!(shown.contains("Secret(***)") && !shown.contains("240"), "{shown}");
}

#[test]
fn every_cut_and_every_damaged_letter_is_noticed() {
    for end in 0..GOLDEN.len() {
        assert!(GOLDEN[..end].parse::<Invitation>().is_err(), "{end} letters");
    }
    for at in 0..GOLDEN.len() {
        for letter in ['A', 'b', '0', '-', '_', '=', '~', ':'] {
            let text: String =
                GOLDEN.chars().enumerate().map(|(other, c)| if other == at { letter } else { c }).collect();
            assert_eq!(text.parse::<Invitation>().is_ok(), text == GOLDEN, "{text}");
        }
    }
    assert!(format!("{GOLDEN}A").parse::<Invitation>().is_err());
    assert!(format!("{GOLDEN}{GOLDEN}").parse::<Invitation>().is_err());
    assert!("sidetrack1:".repeat(10_000).parse::<Invitation>().is_err());
}

#[test]
fn what_is_wrong_is_named() {
    let error = |text: &str| text.parse::<Invitation>().unwrap_err();
    assert_eq!(error(""), InvitationError::NotOne);
    assert_eq!(error("sha256//abc"), InvitationError::NotOne);
    assert_eq!(error("sidetrack2:abc"), InvitationError::Version);
    assert_eq!(error("sidetrack1:"), InvitationError::Damaged);
    assert_eq!(error("sidetrack1:a b"), InvitationError::Damaged);
    let mut none = invitation();
    none.addresses.clear();
    let text = none.to_text().unwrap();
    assert_eq!(error(&text), InvitationError::Content(MessageError::BadField(129)));
    for (field, name) in [(131, String::new()), (131, "a\nb".into()), (131, "n".repeat(254))] {
        let text = Invitation { name, ..invitation() }.to_text().unwrap();
        assert_eq!(error(&text), InvitationError::Content(MessageError::BadField(field)));
    }
    let nine = Invitation { addresses: vec!["192.0.2.1:1".parse().unwrap(); 9], ..invitation() };
    assert_eq!(error(&nine.to_text().unwrap()), InvitationError::Content(MessageError::BadField(129)));
    let long = Invitation { name: "n".repeat(4000), ..invitation() };
    assert_eq!(long.to_text(), Err(MessageError::TooLong));
}

fn offer() -> OverlayOffer {
    OverlayOffer {
        host: "a".into(),
        addresses: vec!["192.0.2.1:80".parse().unwrap()],
        nodes: vec![Node { name: "a".into(), key: PublicKey([7; 32]) }],
        edges: vec![Edge { ends: ["a".into(), "b".into()], least_us: 0x1234 }],
    }
}

fn golden() -> Vec<(Message, Vec<u8>)> {
    let address = b"\x81\0\x07\x01\0\x50\xc0\0\x02\x01";
    let addresses = vec!["192.0.2.1:80".parse().unwrap()];
    let sevens = [7; 32];
    vec![
        (
            Message::Ask { proof: [7; 32], addresses: addresses.clone() },
            [&b"\x01\0\x2d\x80\0\x20"[..], &sevens, address].concat(),
        ),
        (
            Message::Tunnel(TunnelOffer { host: "far".into(), addresses }),
            [&b"\x02\0\x10\x82\0\x03far"[..], address].concat(),
        ),
        (
            Message::Overlay(offer()),
            [
                &b"\x03\0\x3c\x82\0\x01a"[..],
                address,
                b"\x83\0\x21",
                &sevens,
                b"a\x84\0\x07\0\0\x12\x34\x01ab",
            ]
            .concat(),
        ),
        (Message::Take, b"\x04\0\0".to_vec()),
        (Message::given(""), b"\x05\0\0".to_vec()),
        (Message::given("start"), b"\x05\0\x08\x02\0\x05start".to_vec()),
        (Message::Finish, b"\x06\0\0".to_vec()),
        (Message::refused(Refusal::Used, ""), b"\x07\0\x04\x85\0\x01\x02".to_vec()),
        (Message::refused(Refusal::Failed, "no"), b"\x07\0\x09\x85\0\x01\x06\x02\0\x02no".to_vec()),
    ]
}

#[test]
fn messages_have_these_bytes_and_are_incomplete_until_their_last() {
    for (message, bytes) in golden() {
        assert_eq!(message.encode().unwrap(), bytes, "{message:?}");
        for end in 0..bytes.len() {
            assert_eq!(Message::parse(&bytes[..end]), Parsed::Incomplete, "{end} of {bytes:02x?}");
        }
        let more = [&bytes[..], b"more"].concat();
        assert_eq!(Message::parse(&more), Parsed::Message(message, bytes.len()));
    }
}

#[test]
fn mistakes_in_messages_are_named() {
    use MessageError::{BadField, Kind, Missing, TooLong, Twice, Unknown};
    let many = |field: u8, value: &[u8], count: usize| {
        let item = [&[field], &u16::try_from(value.len()).unwrap().to_be_bytes()[..], value].concat();
        let body = item.repeat(count);
        [&[3], &u16::try_from(body.len()).unwrap().to_be_bytes()[..], &body].concat()
    };
    let node = [&[7; 32][..], b"a"].concat();
    for (bytes, error) in [
        (b"\0".to_vec(), Kind(0)),
        (b"\x08".to_vec(), Kind(8)),
        (b"\x01\xff\xff".to_vec(), TooLong),
        (b"\x01\0\0".to_vec(), Missing(128)),
        (b"\x01\0\x04\x80\0\x01a".to_vec(), BadField(128)),
        (b"\x02\0\x04\x82\0\x01a".to_vec(), Missing(129)),
        (b"\x02\0\x0a\x81\0\x07\x01\0\x50\xc0\0\x02\x01".to_vec(), Missing(130)),
        (b"\x02\0\x0a\x81\0\x07\x01\0\0\xc0\0\x02\x01".to_vec(), BadField(129)),
        (b"\x03\0\x04\x82\0\x01a".to_vec(), Missing(131)),
        (b"\x03\0\x08\x82\0\x01a\x82\0\x01a".to_vec(), Twice(130)),
        (b"\x03\0\x04\x82\0\x01\n".to_vec(), BadField(130)),
        (b"\x03\0\x08\x84\0\x05\0\0\0\0\x09".to_vec(), BadField(132)),
        (b"\x04\0\x03\xff\0\0".to_vec(), Unknown(255)),
        (b"\x07\0\0".to_vec(), Missing(133)),
        (many(131, &node, 257), BadField(131)),
        (many(129, b"\x01\0\x50\xc0\0\x02\x01", 9), BadField(129)),
        (many(132, b"\0\0\0\0\x01ab", 1025), BadField(132)),
    ] {
        assert_eq!(
            Message::parse(&bytes),
            Parsed::Malformed(error),
            "{:02x?}",
            &bytes[..bytes.len().min(20)]
        );
    }
    // A reason of a newer host, and words that would steer a terminal.
    assert_eq!(
        Message::parse(b"\x07\0\x08\x85\0\x01\x63\x02\0\x01\x1b"),
        Parsed::Message(Message::refused(Refusal::Failed, " "), 11)
    );
    let long = Message::Refused { reason: Refusal::Used, words: "x".repeat(DETAIL_MAX + 1) };
    assert_eq!(long.encode(), Err(TooLong));
    let Message::Given { left } = Message::given(&"é".repeat(DETAIL_MAX)) else { panic!() };
    assert_eq!(left, "é".repeat(DETAIL_MAX / 2));
    let nodes = vec![Node { name: "n".repeat(250), key: PublicKey([0; 32]) }; 256];
    assert_eq!(Message::Overlay(OverlayOffer { nodes, ..offer() }).encode(), Err(TooLong));
    let nodes = vec![Node { name: "n".repeat(80), key: PublicKey([0; 32]) }; 256];
    assert!(Message::Overlay(OverlayOffer { nodes, ..offer() }).encode().unwrap().len() <= BODY_MAX + 3);
}

#[test]
fn a_proof_covers_the_connection_both_keys_and_the_name() {
    let whole = proven(&[1; 32], &[2; 32], &[3; 32], "near");
    for other in [
        proven(&[0; 32], &[2; 32], &[3; 32], "near"),
        proven(&[1; 32], &[0; 32], &[3; 32], "near"),
        proven(&[1; 32], &[2; 32], &[0; 32], "near"),
        proven(&[1; 32], &[2; 32], &[3; 32], "far"),
    ] {
        assert_ne!(whole, other);
    }
    assert_eq!(whole, [b"sidetrack join 1\0", &[1; 32][..], &[2; 32], &[3; 32], b"near"].concat());
}

proptest! {
    #[test]
    fn any_bytes_are_survived(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0..9_u8) {
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        if let Parsed::Message(message, consumed) = Message::parse(&bytes) {
            prop_assert!(consumed <= bytes.len());
            let again = message.encode().unwrap();
            prop_assert_eq!(Message::parse(&again), Parsed::Message(message, again.len()));
        }
        let text = format!("sidetrack1:{}", BASE64URL_NOPAD.encode(&bytes));
        let _ = text.parse::<Invitation>();
    }

    #[test]
    fn any_text_is_survived(text in ".{0,200}") {
        let _ = text.parse::<Invitation>();
        let _ = format!("sidetrack1:{text}").parse::<Invitation>();
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Ask(u8, bool),
    Take(u8),
    Written(bool),
    Finish(u8),
    Expire,
}

const EVENTS: [Event; 11] = [
    Event::Ask(1, true),
    Event::Ask(1, false),
    Event::Ask(2, true),
    Event::Ask(2, false),
    Event::Take(1),
    Event::Take(2),
    Event::Written(true),
    Event::Written(false),
    Event::Finish(1),
    Event::Finish(2),
    Event::Expire,
];

/// All orders of events, in each state that can be reached: at most one key is ever written, and what is over stays over.
#[test]
fn one_guest_at_most_is_written_in_every_order() {
    // The written key is part of what is explored: the test's own account, not the host's.
    let mut seen: BTreeSet<String> = BTreeSet::new();
    let mut open = vec![(Host::<u8>::default(), None::<u8>, None::<u8>)];
    while let Some((host, writing, written)) = open.pop() {
        if !seen.insert(format!("{host:?} {writing:?} {written:?}")) {
            continue;
        }
        for event in EVENTS {
            let (mut next, mut writing, mut written) = (host.clone(), writing, written);
            match event {
                Event::Ask(key, is_right) => {
                    let answer = next.ask(&key, is_right);
                    assert!(is_right || answer.is_err(), "a wrong proof never goes on");
                    assert!(answer.is_err() || written.is_none_or(|other| other == key), "{host:?}");
                }
                Event::Take(key) => match next.take(&key) {
                    Ok(Take::Write) => {
                        assert_eq!((writing, written), (None, None), "{host:?}");
                        writing = Some(key);
                    }
                    Ok(Take::Again) => assert_eq!(written, Some(key), "{host:?}"),
                    Err(_) => {}
                },
                Event::Written(is_written) => {
                    next.written(is_written);
                    if let Some(key) = writing.take().filter(|_| is_written) {
                        assert_eq!(written, None);
                        written = Some(key);
                    }
                }
                Event::Finish(key) => next.finish(&key),
                Event::Expire => next.expire(),
            }
            assert!(
                host.end().is_none() || next.end() == host.end(),
                "what is over stays over: {host:?} {event:?}"
            );
            match next.end() {
                Some(End::Joined | End::Unconfirmed) => assert!(written.is_some()),
                Some(End::Expired | End::Guessed) => assert_eq!((writing, written), (None, None)),
                None => {}
            }
            open.push((next, writing, written));
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
}

#[test]
fn guesses_are_counted_and_cannot_take_the_invitation_from_a_guest() {
    let mut host = Host::default();
    for _ in 0..WRONG_MAX {
        assert_eq!(host.ask(&9, false), Err(Refusal::Proof));
    }
    assert_eq!((host.end(), host.ask(&1, true)), (Some(End::Guessed), Err(Refusal::Guessed)));

    let mut host = Host::default();
    host.ask(&1, true).unwrap();
    assert_eq!(host.take(&1), Ok(Take::Write));
    assert_eq!(host.take(&2), Err(Refusal::Busy));
    host.written(true);
    for _ in 0..2 * WRONG_MAX {
        assert_eq!(host.ask(&9, false), Err(Refusal::Proof));
    }
    assert_eq!((host.ask(&2, true), host.take(&2)), (Err(Refusal::Used), Err(Refusal::Used)));
    assert_eq!((host.ask(&1, true), host.take(&1)), (Ok(()), Ok(Take::Again)));
    host.finish(&1);
    assert_eq!((host.end(), host.ask(&1, true)), (Some(End::Joined), Err(Refusal::Used)));
}

#[test]
fn a_table_has_one_line_and_its_signature_covers_all_of_it() {
    let text = table::signed(&offer(), |bytes| {
        assert!(bytes.starts_with(b"sidetrack nodes 1\0\x03"));
        [9; 64]
    })
    .unwrap();
    let read: Table = format!(" {}\n{}", &text[..30], &text[30..]).parse().unwrap();
    assert_eq!((read.content, read.signature), (offer(), [9; 64]));
    let encoded = Message::Overlay(offer()).encode().unwrap();
    assert_eq!(read.signed, [&b"sidetrack nodes 1\0"[..], &encoded].concat());
    for end in 0..text.len() {
        assert!(text[..end].parse::<Table>().is_err(), "{end} letters");
    }
    let take = [&Message::Take.encode().unwrap()[..], &[0; 64]].concat();
    let take = format!("sidetrack-nodes1:{}", BASE64URL_NOPAD.encode(&take));
    assert_eq!(take.parse::<Table>(), Err(TableError::Damaged));
    assert_eq!(GOLDEN.parse::<Table>(), Err(TableError::NotOne));
    assert_eq!(text.parse::<Invitation>(), Err(InvitationError::NotOne));
}
