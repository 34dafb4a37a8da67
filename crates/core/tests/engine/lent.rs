//! Connections that are lent: what the borrower passed on counts as if it had come here.

use crate::network::{SERVER_HOP, at};
use crate::script::{Bound, Script};
use crate::wire::{ACK, FIN, PSH};
use sidetrack_core::engine::{Drop, LentTo, Moved, Progress, Selection, Standing, Target, Translation};
use sidetrack_core::flow::EndReason;
use std::num::NonZeroU32;

const TO: LentTo = LentTo(NonZeroU32::new(7).unwrap());

/// A bound connection that is lent, and how its packets are translated.
fn lent(script: &mut Script) -> (Bound, [Translation; 2]) {
    let bound = script.bind(b"hello");
    assert_eq!(script.engine.callbacks_mut().plain, [0], "it is offered once");
    let translation = script.engine.translation(0).expect("nothing but translation is left");
    script.engine.lend(0, TO);
    assert_eq!(script.engine.translation(0), None, "not twice");
    (bound, translation)
}

/// The borrower has passed on so many bytes of each side, in one packet each, now.
fn pass_on(script: &mut Script, bound: &mut Bound, translation: &[Translation; 2], bytes: [u64; 2]) {
    let [up, down] = bytes;
    let move_on = |number: &mut u32, by: u64| *number = number.wrapping_add(by as u32);
    move_on(&mut bound.client.0, up);
    move_on(&mut bound.server.1, up);
    move_on(&mut bound.server.0, down);
    move_on(&mut bound.client.1, down);
    let side = |(sent, acknowledged): (u32, u32), bytes| Moved {
        standing: Standing { sent, acknowledged, edge: acknowledged.wrapping_add(0xffff), stamp: 0 },
        bytes,
        packets: 1,
        fin: None,
    };
    let sides = [side(bound.client, up), side(bound.server, down)];
    assert_eq!(translation.map(|side| side.shift), [0, 0]);
    let active = Some(at(script.now));
    script.engine.callbacks_mut().progress.push_back(Progress { sides, active });
}

#[test]
fn a_borrower_is_told_how_the_engine_itself_translates() {
    let mut script = Script::new();
    let (bound, [client, server]) = lent(&mut script);
    assert_eq!((client.remote, client.local), (script.addresses.client, script.addresses.front));
    assert_eq!(
        (server.remote, server.local, server.hop),
        (script.addresses.server, bound.source, SERVER_HOP)
    );
    assert_eq!((client.standing.sent, client.standing.acknowledged), bound.client);
    assert_eq!((server.standing.sent, server.standing.acknowledged), bound.server);
    for (from, own, other) in
        [(script.next(&bound, ACK | PSH), client, server), (script.server(&bound, ACK), server, client)]
    {
        let packet = from.clone().payload(b"x");
        let out = script.take(&packet);
        assert_eq!(out.len(), 1);
        assert_eq!((out[0].src, out[0].dst), (other.local, other.remote));
        assert_eq!(out[0].seq, packet.seq.wrapping_add(own.add));
        assert_eq!(out[0].ack, packet.ack.wrapping_sub(other.add));
    }
}

#[test]
fn what_passed_elsewhere_is_counted_and_its_end_comes_here() {
    let mut script = Script::new();
    let (mut bound, translation) = lent(&mut script);
    // More than the circle of numbers goes round, and to its edge.
    for bytes in [[1, 5_000_000_000], [10_000_000_000, 3], [0, 0]] {
        pass_on(&mut script, &mut bound, &translation, bytes);
        script.engine.refresh(at(script.now));
    }
    let standing = script.engine.standing(0, TO).expect("lent to it").map(|(standing, _)| standing);
    assert_eq!(standing.map(|side| (side.sent, side.acknowledged)), [bound.client, bound.server]);
    // What came here is where the borrower goes on from.
    let packet = script.next(&bound, ACK).payload(b"late");
    assert_eq!(script.take(&packet).len(), 1);
    bound.client.0 = bound.client.0.wrapping_add(4);
    bound.server.1 = bound.server.1.wrapping_add(4);
    assert_eq!(script.engine.standing(0, TO).unwrap()[0].0.sent, bound.client.0);
    // Outside of the window as it is now.
    let far = script.client(ACK, bound.client.0.wrapping_add(1 << 20), bound.client.1).payload(b"x");
    assert_eq!(script.refused(&far), Drop::OutOfWindow);
    script.close(&mut bound);
    let records = script.records();
    assert_eq!((records[0].reason, records[0].passed_elsewhere), (EndReason::Ok, true));
    assert_eq!((records[0].client_bytes, records[0].server_bytes), (5 + 10_000_000_001 + 4, 5_000_000_003));
    // The borrower hears of it when its slot is needed for another.
    script.wait(5000);
    assert_eq!(script.engine.callbacks_mut().ended, [TO]);
}

#[test]
fn a_fin_may_come_before_the_borrower_has_told_of_the_bytes_before_it() {
    let mut script = Script::new();
    let (mut bound, translation) = lent(&mut script);
    let (seq, ack) = bound.client;
    pass_on(&mut script, &mut bound, &translation, [50_000, 0]);
    let fin = script.client(FIN | ACK, seq.wrapping_add(50_000), ack);
    let out = script.take(&fin);
    assert_eq!(out.len(), 1, "it is forwarded: {out:?}");
    assert_eq!(out[0].seq, bound.server.1);
    assert_eq!(script.engine.translation(0), None, "lent, and one side has closed");
    script.engine.reclaim(at(script.now), 0);
    assert_eq!(script.engine.translation(0), None, "not before that is acknowledged");
    bound.server.1 = bound.server.1.wrapping_add(1);
    let ack = script.server(&bound, ACK);
    assert_eq!(script.take(&ack).len(), 1);
    assert!(script.engine.translation(0).is_some(), "the other side may go on for long");
}

#[test]
fn packets_elsewhere_keep_it_from_being_idle() {
    let mut script = Script::with(
        |config| config.idle_timeout_ms = 3000,
        Selection::Server(Target::new(crate::network::Addresses::v4().server, SERVER_HOP)),
    );
    let (mut bound, translation) = lent(&mut script);
    script.wait(2500);
    pass_on(&mut script, &mut bound, &translation, [9, 0]);
    assert_eq!(script.wait(2500), [], "the last packet passed elsewhere");
    let resets = script.wait(1000);
    assert_eq!(resets.len(), 2, "{resets:?}");
    // The resets stand where the connection stands.
    let to_server =
        resets.iter().map(|(_, packet)| packet).find(|packet| packet.dst == script.addresses.server);
    assert_eq!(to_server.map(|packet| packet.seq), Some(bound.server.1));
    assert_eq!(script.records()[0].reason, EndReason::Idle);
    assert_eq!(script.engine.callbacks_mut().ended, [TO]);
}

#[test]
fn one_that_is_looked_at_is_not_lent() {
    let mut script = Script::with(
        |_| {},
        Selection::Server(Target {
            inspect_server: true,
            ..Target::new(crate::network::Addresses::v4().server, SERVER_HOP)
        }),
    );
    script.bind(b"hello");
    assert_eq!(script.engine.callbacks_mut().plain, []);
    assert_eq!(script.engine.translation(0), None);
}

/// The borrower lets pass what it has of both sides, as their numbers in `bound` stand.
fn tell(script: &mut Script, bound: &Bound) {
    let side = |(sent, acknowledged): (u32, u32)| Moved {
        standing: Standing { sent, acknowledged, edge: acknowledged.wrapping_add(0xffff), stamp: 0 },
        bytes: 0,
        packets: 1,
        fin: None,
    };
    let progress = Progress { sides: [side(bound.client), side(bound.server)], active: Some(at(script.now)) };
    script.engine.callbacks_mut().progress.push_back(progress);
}

#[test]
fn fins_that_are_acknowledged_elsewhere_end_the_connection() {
    let mut script = Script::new();
    let (mut bound, _) = lent(&mut script);
    let fin = script.client(FIN | ACK, bound.client.0, bound.client.1);
    assert_eq!(script.take(&fin).len(), 1);
    assert_eq!(script.engine.callbacks_mut().closing, [TO], "what answers is to come here");
    // It was too late: a program was at work on the answer.
    (bound.client.0, bound.server.1) = (bound.client.0.wrapping_add(1), bound.server.1.wrapping_add(1));
    tell(&mut script, &bound);
    let fin = script.server(&bound, FIN | ACK);
    assert_eq!(script.take(&fin).len(), 1);
    assert_eq!(script.records(), [], "nobody has acknowledged the second");
    (bound.server.0, bound.client.1) = (bound.server.0.wrapping_add(1), bound.client.1.wrapping_add(1));
    tell(&mut script, &bound);
    script.engine.reclaim(at(script.now), 0);
    assert_eq!(script.records()[0].reason, EndReason::Ok);
}
