//! Every bound of the engine, reached: what is over it is shed with a reason, and what is there goes on.

use crate::network::{Addresses, CLIENT_HOP, SERVER_HOP};
use crate::script::{Bound, CLIENT_ISN, SERVER_ISN, Script};
use crate::wire::{ACK, PSH, Packet, RST, SYN};
use sidetrack_core::engine::{Selection, Share, Target};
use sidetrack_core::flow::EndReason;
use std::net::SocketAddr;

fn server() -> Selection {
    Selection::Server(Target::new(Addresses::v4().server, SERVER_HOP))
}

fn client(n: u16) -> SocketAddr {
    ([10, 0, 2, (n >> 8) as u8], 1000 + n).into()
}

#[test]
fn a_flood_of_syns_is_answered_with_cookies_and_the_established_go_on() {
    let mut script = Script::with(|config| config.syn_backlog = 10, server());
    let bound = script.bind(b"x");
    for n in 0..5000 {
        let syn = Packet::new(client(n), script.addresses.front, SYN, u32::from(n), 0);
        let out = script.fate(&Packet { mss: Some(1460), ..syn }, CLIENT_HOP).1;
        assert!(out[0].is(SYN | ACK));
    }
    assert_eq!(script.engine.connections(), 11, "one established, ten half open");
    assert_eq!(script.engine.counters().cookies_sent, 4990);
    let data = script.next(&bound, ACK).payload(b"unharmed");
    assert_eq!(script.take(&data)[0].payload, b"unharmed");
}

#[test]
fn a_cookie_opens_a_connection_with_all_its_options() {
    let mut script = Script::with(|config| config.syn_backlog = 0, server());
    let syn = Packet {
        scale: Some(9),
        sack_permitted: true,
        stamps: Some((50, 0)),
        mss: Some(1460),
        ..script.syn()
    };
    let answer = script.take(&syn).remove(0);
    assert_eq!(script.engine.connections(), 0, "no state yet");
    assert_eq!((answer.scale, answer.sack_permitted), (Some(7), true));
    let (stamp, _) = answer.stamps.unwrap();
    let mut data =
        script.client(ACK | PSH, CLIENT_ISN.wrapping_add(1), answer.seq.wrapping_add(1)).payload(b"hello");
    data.stamps = Some((60, stamp));
    let to_server = script.take(&data).remove(0);
    assert_eq!((to_server.scale, to_server.sack_permitted, to_server.mss), (Some(9), true, Some(1460)));
    let answer = Packet { stamps: Some((7, to_server.stamps.unwrap().0)), ..script.syn_ack(&to_server) };
    assert_eq!(script.take(&answer)[0].payload, b"hello");
    assert_eq!(script.engine.counters().cookies_accepted, 1);
}

#[test]
fn a_forged_cookie_is_reset() {
    let mut script = Script::with(|config| config.syn_backlog = 0, server());
    let syn = script.syn();
    let cookie = script.take(&syn)[0].seq;
    let forged = script.client(ACK, CLIENT_ISN.wrapping_add(1), cookie.wrapping_add(2));
    let out = script.take(&forged);
    assert_eq!((out[0].flags, out[0].seq), (RST, cookie.wrapping_add(2)));
    assert_eq!(script.engine.connections(), 0);
}

/// Opens a connection of another client up to its first bytes; what came out last.
fn request(script: &mut Script, n: u16) -> Vec<Packet> {
    let front = script.addresses.front;
    let syn = Packet { mss: Some(1460), ..Packet::new(client(n), front, SYN, 0, 0) };
    let isn = script.fate(&syn, CLIENT_HOP).1[0].seq;
    let data = Packet::new(client(n), front, ACK | PSH, 1, isn.wrapping_add(1)).payload(b"x");
    script.fate(&data, CLIENT_HOP).1
}

#[test]
fn without_a_free_port_a_client_is_shed() {
    let sources = Share { addresses: vec!["10.0.1.5".parse().expect("an address")], ports: 20_000..=20_002 };
    let mut script = Script::with(|config| config.sources = sources, server());
    for n in 0..3 {
        assert_eq!(request(&mut script, n)[0].flags, SYN);
    }
    let out = request(&mut script, 3);
    assert!(out.len() == 1 && out[0].is(RST) && out[0].dst == client(3), "{out:?}");
    assert_eq!(script.records()[0].reason, EndReason::Limit);
    assert_eq!((script.engine.connections(), script.engine.counters().shed), (3, 1));
    script.wait(11_000);
    assert_eq!(script.engine.connections(), 0, "all three gave their ports back");
    assert_eq!(request(&mut script, 4)[0].flags, SYN);
}

#[test]
fn a_full_table_makes_room_of_time_wait_first_and_then_sheds() {
    let mut script = Script::with(|config| config.max_connections = 2, server());
    let mut bound = script.bind(b"x");
    script.close(&mut bound);
    assert_eq!(request(&mut script, 1)[0].flags, SYN);
    assert_eq!(request(&mut script, 2)[0].flags, SYN);
    assert_eq!(script.engine.counters().time_wait_cut, 1);
    // Now both are in use. The answer to the SYN is a cookie, and its return finds no room.
    let out = request(&mut script, 3);
    assert!(out[0].is(RST) && script.engine.connections() == 2, "{out:?}");
    assert_eq!(script.engine.counters().shed, 1);
}

/// Connections of clients with these addresses (10.0.3.n), each bound to its server; their answers.
fn bound_from(script: &mut Script, clients: &[u8]) {
    for (n, client) in (1_u16..).zip(clients) {
        let syn_to_server = request_from(script, ([10, 0, 3, *client], 2000 + n).into()).remove(0);
        assert_eq!(syn_to_server.flags, SYN);
        let answer = script.syn_ack(&syn_to_server);
        script.fate(&answer, SERVER_HOP);
    }
}

fn request_from(script: &mut Script, client: SocketAddr) -> Vec<Packet> {
    let front = script.addresses.front;
    let syn = Packet { mss: Some(1460), ..Packet::new(client, front, SYN, 0, 0) };
    let isn = script.fate(&syn, CLIENT_HOP).1[0].seq;
    let data = Packet::new(client, front, ACK | PSH, 1, isn.wrapping_add(1)).payload(b"x");
    script.fate(&data, CLIENT_HOP).1
}

#[test]
fn in_a_full_table_the_oldest_idle_connection_of_the_client_with_the_most_leaves_for_another() {
    let mut script = Script::with(|config| config.max_connections = 4, server());
    bound_from(&mut script, &[2, 1, 1, 1]);
    let newcomer: SocketAddr = "10.0.3.9:1".parse().unwrap();
    // All are busy: nothing may leave.
    let out = request_from(&mut script, newcomer);
    assert!(out[0].is(RST) && out[0].dst == newcomer, "{out:?}");
    assert_eq!(script.engine.counters().shed, 1);
    script.wait(2000);
    script.records();
    // A SYN alone moves nothing: anybody can send it under any address.
    let front = script.addresses.front;
    let syn = Packet { mss: Some(1460), ..Packet::new(newcomer, front, SYN, 0, 0) };
    assert!(script.fate(&syn, CLIENT_HOP).1[0].is(SYN | ACK));
    assert_eq!(script.engine.counters().left_for_others, 0);
    let out = request_from(&mut script, newcomer);
    let resets: Vec<_> = out.iter().filter(|packet| packet.is(RST)).map(|packet| packet.dst).collect();
    assert_eq!(resets, ["10.0.3.1:2002".parse().unwrap(), Addresses::v4().server], "{out:?}");
    assert!(out.iter().any(|packet| packet.flags == SYN), "its server is asked: {out:?}");
    let records = script.records();
    assert_eq!((records.len(), records[0].reason), (1, EndReason::Limit));
    assert_eq!(records[0].client(), "10.0.3.1:2002".parse().unwrap());
    assert_eq!((script.engine.connections(), script.engine.counters().left_for_others), (4, 1));
    // Now 1 has two, 2 and the newcomer have one each: another one of these gets none.
    let out = request_from(&mut script, "10.0.3.9:2".parse().unwrap());
    assert!(out[0].is(RST), "{out:?}");
}

#[test]
fn without_room_for_flows_the_selection_is_asked_again_with_what_became_of_it() {
    let mut script = Script::with(|_| {}, server());
    bound_from(&mut script, &[1, 1, 1]);
    script.wait(2000);
    script.records();
    script.engine.callbacks_mut().crowded = true;
    let out = request_from(&mut script, "10.0.3.2:1".parse().unwrap());
    assert!(out.iter().any(|packet| packet.flags == SYN), "{out:?}");
    let records = script.records();
    assert_eq!((records.len(), records[0].reason), (1, EndReason::Limit));
    assert_eq!(records[0].client(), "10.0.3.1:2001".parse().unwrap(), "the oldest");
    // One of the client with the most leaves for none of its own.
    let out = request_from(&mut script, "10.0.3.1:9".parse().unwrap());
    assert!(out[0].is(RST), "{out:?}");
    assert_eq!(script.records()[0].reason, EndReason::Limit);
    assert_eq!(script.engine.counters().left_for_others, 1);
}

#[test]
fn held_bytes_are_bounded_one_by_one_and_together() {
    let waits = Selection::Wait { wait_ms: 60_000 };
    let mut script = Script::with(|config| config.hold_bytes = 2000, waits);
    let isn = script.open();
    let first = CLIENT_ISN.wrapping_add(1);
    let data = script.client(ACK, first, isn.wrapping_add(1)).payload(&[1; 1460]);
    script.take(&data);
    let more = script.client(ACK, first.wrapping_add(1460), isn.wrapping_add(1)).payload(&[2; 1460]);
    let out = script.take(&more);
    assert_eq!((out[0].ack, out[0].window), (first.wrapping_add(2000), 0), "the window is closed: {out:?}");
    assert_eq!(script.engine.callbacks_mut().asked.last().unwrap().0.len(), 2000);
    assert!(out[1].is(RST), "full, and still not decided");

    let mut script = Script::with(|config| config.hold_total_bytes = 1000, waits);
    let isn = script.open();
    let data = script.client(ACK, first, isn.wrapping_add(1)).payload(&[1; 1460]);
    assert!(script.take(&data).last().unwrap().is(RST));
    assert_eq!(script.records()[0].reason, EndReason::Limit);
}

#[test]
fn records_that_nobody_takes_are_lost_and_counted() {
    let mut script =
        Script::with(|config| config.max_records = 1, Selection::Refuse(EndReason::PolicyDenied));
    for n in 0..3 {
        request(&mut script, n);
    }
    assert_eq!((script.records().len(), script.engine.counters().records_lost), (1, 2));
}

/// What a client sends that was answered elsewhere, with these bytes.
fn brings_cookie(script: &Script, payload: &[u8]) -> Packet {
    brings_cookie_for(script, 7_000_000, payload)
}

/// The same of a client with this initial number.
fn brings_cookie_for(script: &Script, isn: u32, payload: &[u8]) -> Packet {
    let mut elsewhere = Script::with(|config| config.syn_backlog = 0, server());
    elsewhere.now = script.now;
    let syn = Packet { seq: isn, ..elsewhere.syn() };
    let cookie = elsewhere.take(&syn)[0].seq;
    script.client(ACK | PSH, isn.wrapping_add(1), cookie.wrapping_add(1)).payload(payload)
}

/// Clients take a port again before a minute is over: cookies of the same time are alike in their first bits.
#[test]
fn a_client_whose_last_connection_began_with_a_cookie_too_begins_anew() {
    for number in 0..200_u32 {
        let mut script = Script::with(|config| config.cookies_elsewhere = true, server());
        let isn = number.wrapping_mul(0x9e37_79b9);
        let first = brings_cookie_for(&script, isn, b"first");
        let syn = script.take(&first)[0].clone();
        let answer = script.syn_ack(&syn);
        script.take(&answer);
        let mut bound = Bound {
            source: syn.src,
            client: (isn.wrapping_add(6), first.ack),
            server: (SERVER_ISN + 1, syn.seq.wrapping_add(6)),
        };
        script.take(&script.server(&bound, ACK).clone());
        script.close(&mut bound);
        assert_eq!(script.records()[0].reason, EndReason::Ok);
        let last = script.next(&bound, ACK);
        script.take(&last);
        assert_eq!(
            script.engine.counters().cookies_accepted,
            1,
            "what was its own is not taken for a cookie"
        );
        // As a kernel numbers the next connection half a second later.
        let second = brings_cookie_for(&script, isn.wrapping_add(7_000_000), b"second");
        let out = script.take(&second);
        assert_eq!(out.first().map(|packet| packet.flags), Some(SYN), "{number}: {out:?}");
    }
}

#[test]
fn cookies_from_elsewhere_are_taken_and_begin_anew_over_what_was_there() {
    let elsewhere = || Script::with(|config| config.cookies_elsewhere = true, server());
    // Nothing was there.
    let mut script = elsewhere();
    let first = brings_cookie(&script, b"first");
    assert_eq!(script.take(&first)[0].flags, SYN);
    // The same once more is the same connection.
    let again = brings_cookie(&script, b"first");
    let out = script.take(&again);
    assert!(out.iter().all(|packet| packet.flags != SYN), "{out:?}");
    assert_eq!(script.engine.connections(), 1);
    // Servers, bound; then the client has forgotten it.
    let mut script = elsewhere();
    script.bind(b"hello");
    let anew = brings_cookie(&script, b"anew");
    let out = script.take(&anew);
    let to_server: Vec<_> = out.iter().filter(|packet| packet.dst == script.addresses.server).collect();
    assert!(
        to_server.iter().any(|packet| packet.flags & RST != 0),
        "the old one's server hears of it: {out:?}"
    );
    assert!(to_server.iter().any(|packet| packet.flags == SYN), "and is asked again: {out:?}");
    assert_eq!(script.records()[0].reason, EndReason::ClientReset);
    assert_eq!(script.engine.connections(), 1);
    // Over, and resting.
    let mut script = elsewhere();
    let mut bound = script.bind(b"hello");
    script.close(&mut bound);
    assert_eq!(script.records()[0].reason, EndReason::Ok);
    let anew = brings_cookie(&script, b"anew");
    assert_eq!(script.take(&anew)[0].flags, SYN);
    assert_eq!((script.records(), script.engine.connections()), (vec![], 1));
    // A number that is not a cookie changes nothing, nor does a cookie where none were given out.
    let mut script = elsewhere();
    script.bind(b"hello");
    let forged = Packet { ack: brings_cookie(&script, b"").ack ^ 1, ..brings_cookie(&script, b"x") };
    script.take(&forged);
    let mut without = Script::new();
    without.bind(b"hello");
    let cookie = brings_cookie(&without, b"x");
    without.take(&cookie);
    for script in [&mut script, &mut without] {
        assert_eq!((script.records(), script.engine.connections()), (vec![], 1));
    }
}
