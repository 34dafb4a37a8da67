//! Offloaded connections: what the kernel passed on counts as if it had come here.

use crate::network::{SERVER_HOP, at};
use crate::script::{Bound, CLIENT_ISN, SERVER_ISN, Script};
use crate::wire::{ACK, FIN, PSH, Packet};
use sidetrack_core::engine::{
    Drop, Fin, Moved, OffloadId, Pair, Payload, Progress, Record, Selection, Slot, Standing, State, Target,
    Translation,
};
use sidetrack_core::flow::{EndReason, Side};
use std::num::NonZeroU32;

const TO: OffloadId = OffloadId(NonZeroU32::new(7).unwrap());

/// A bound connection that is offloaded, and how its packets are translated.
fn offloaded(script: &mut Script) -> (Bound, [Translation; 2]) {
    let bound = script.bind(b"hello");
    assert_eq!(script.engine.callbacks_mut().plain, [Slot::FIRST], "it is offered once");
    let translation = script.engine.translation(Slot::FIRST).expect("nothing but translation is left");
    script.engine.offload(Slot::FIRST, TO);
    assert_eq!(script.engine.translation(Slot::FIRST), None, "not twice");
    (bound, translation)
}

/// Reports that the kernel has just forwarded `bytes` of each side, in one packet each.
fn pass_on(script: &mut Script, bound: &mut Bound, translation: &[Translation; 2], bytes: [u64; 2]) {
    let [up, down] = bytes;
    let move_on = |number: &mut u32, by: u64| *number = number.wrapping_add(by as u32);
    move_on(&mut bound.client.0, up);
    move_on(&mut bound.server.1, up);
    move_on(&mut bound.server.0, down);
    move_on(&mut bound.client.1, down);
    let side = |(sent, acknowledged): (u32, u32), bytes: u64| Moved {
        standing: Standing { sent, acknowledged, edge: acknowledged.wrapping_add(0xffff), stamp: 0 },
        bytes: i64::try_from(bytes).expect("few bytes"),
        packets: 1,
        fin: None,
    };
    let sides = Pair([side(bound.client, up), side(bound.server, down)]);
    assert_eq!(translation.map(|side| side.shift), [0, 0]);
    let active = Some(at(script.now));
    script.engine.callbacks_mut().progress.push_back(Progress { sides, active, syn_ack: None });
}

#[test]
fn a_borrower_is_told_how_the_engine_itself_translates() {
    let mut script = Script::new();
    let (bound, [client, server]) = offloaded(&mut script);
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
    let (mut bound, translation) = offloaded(&mut script);
    // More than the circle of numbers goes round, and to its edge.
    for bytes in [[1, 5_000_000_000], [10_000_000_000, 3], [0, 0]] {
        pass_on(&mut script, &mut bound, &translation, bytes);
        script.engine.refresh(at(script.now));
    }
    let standing =
        script.engine.standing(Slot::FIRST, TO).expect("it is offloaded").map(|(standing, _)| standing);
    assert_eq!(standing.map(|side| (side.sent, side.acknowledged)), [bound.client, bound.server]);
    // What came here is where the kernel goes on from.
    let packet = script.next(&bound, ACK).payload(b"late");
    assert_eq!(script.take(&packet).len(), 1);
    bound.client.0 = bound.client.0.wrapping_add(4);
    bound.server.1 = bound.server.1.wrapping_add(4);
    assert_eq!(script.engine.standing(Slot::FIRST, TO).unwrap()[0].0.sent, bound.client.0);
    // Outside of the window as it is now.
    let far = script.client(ACK, bound.client.0.wrapping_add(1 << 20), bound.client.1).payload(b"x");
    assert_eq!(script.refused(&far), Drop::OutOfWindow);
    script.close(&mut bound);
    let records = script.records();
    assert_eq!((records[0].reason, records[0].passed_elsewhere), (EndReason::Ok, true));
    assert_eq!((records[0].client_bytes, records[0].server_bytes), (5 + 10_000_000_001 + 4, 5_000_000_003));
    // The kernel hears of it when its slot is needed for another.
    script.wait(5000);
    assert_eq!(script.engine.callbacks_mut().ended, [TO]);
}

#[test]
fn a_fin_may_come_before_the_borrower_has_told_of_the_bytes_before_it() {
    let mut script = Script::new();
    let (mut bound, translation) = offloaded(&mut script);
    let (seq, ack) = bound.client;
    pass_on(&mut script, &mut bound, &translation, [50_000, 0]);
    let fin = script.client(FIN | ACK, seq.wrapping_add(50_000), ack);
    let out = script.take(&fin);
    assert_eq!(out.len(), 1, "it is forwarded: {out:?}");
    assert_eq!(out[0].seq, bound.server.1);
    assert_eq!(script.engine.translation(Slot::FIRST), None, "offloaded, and one side has closed");
    script.engine.reclaim(at(script.now), Slot::FIRST);
    assert_eq!(script.engine.translation(Slot::FIRST), None, "not before that is acknowledged");
    bound.server.1 = bound.server.1.wrapping_add(1);
    let ack = script.server(&bound, ACK);
    assert_eq!(script.take(&ack).len(), 1);
    assert!(script.engine.translation(Slot::FIRST).is_some(), "the other side may go on for long");
}

#[test]
fn packets_elsewhere_keep_it_from_being_idle() {
    let mut script = Script::with(
        |config| config.idle_timeout_ms = 3000,
        Selection::Server(Target::new(crate::network::Addresses::v4().server, SERVER_HOP)),
    );
    let (mut bound, translation) = offloaded(&mut script);
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
fn one_that_is_looked_at_is_not_offloaded() {
    let mut script = Script::with(
        |_| {},
        Selection::Server(Target {
            inspect_server: true,
            ..Target::new(crate::network::Addresses::v4().server, SERVER_HOP)
        }),
    );
    script.bind(b"hello");
    assert_eq!(script.engine.callbacks_mut().plain, []);
    assert_eq!(script.engine.translation(Slot::FIRST), None);
}

/// The kernel lets pass what it has of both sides, as their numbers in `bound` stand.
fn tell(script: &mut Script, bound: &Bound) {
    let side = |(sent, acknowledged): (u32, u32)| Moved {
        standing: Standing { sent, acknowledged, edge: acknowledged.wrapping_add(0xffff), stamp: 0 },
        bytes: 0,
        packets: 1,
        fin: None,
    };
    let sides = Pair([side(bound.client), side(bound.server)]);
    let progress = Progress { sides, active: Some(at(script.now)), syn_ack: None };
    script.engine.callbacks_mut().progress.push_back(progress);
}

#[test]
fn fins_that_are_acknowledged_elsewhere_end_the_connection() {
    let mut script = Script::new();
    let (mut bound, _) = offloaded(&mut script);
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
    script.engine.reclaim(at(script.now), Slot::FIRST);
    assert_eq!(script.records()[0].reason, EndReason::Ok);
}

/// What a kernel has seen of the ends of both sides, the client first.
#[derive(Clone, Copy, Default)]
struct Closing {
    /// Its FIN has passed, as the second.
    fin: [Option<bool>; 2],
    /// It has acknowledged the other's.
    heard: [bool; 2],
    /// Bytes before the FIN, since the connection was offloaded, and those that were not told before.
    bytes: [u64; 2],
    new: [u64; 2],
}

impl Closing {
    fn tell(&self, script: &mut Script, bound: &Bound) {
        let numbers = [bound.client, bound.server];
        let side = |at: usize| {
            let (own, other) = (numbers[at], at ^ 1);
            let sent = own.0.wrapping_add(self.bytes[at] as u32 + u32::from(self.fin[at].is_some()));
            let acknowledged = own.1.wrapping_add(self.bytes[other] as u32 + u32::from(self.heard[at]));
            Moved {
                standing: Standing { sent, acknowledged, edge: acknowledged.wrapping_add(0xffff), stamp: 0 },
                bytes: i64::try_from(self.new[at]).expect("few bytes"),
                packets: 1,
                fin: self.fin[at].map(|is_second| Fin { end: sent, is_second }),
            }
        };
        let (sides, active) = (Pair([side(0), side(1)]), Some(at(script.now)));
        let progress = Progress { sides, active, syn_ack: None };
        script.engine.callbacks_mut().progress.push_back(progress);
    }
}

/// The states that a connection went through.
fn states(record: &Record) -> Vec<(Side, State)> {
    record.stamps.iter().map(|stamp| (stamp.side, stamp.state)).collect()
}

#[test]
fn fins_that_pass_elsewhere_are_followed_as_if_they_had_passed_here() {
    let ends = |first, second| {
        [
            (first, State::FinWait1),
            (second, State::CloseWait),
            (first, State::FinWait2),
            (second, State::LastAck),
            (first, State::TimeWait),
            (second, State::Closed),
        ]
    };
    let steps = [
        Closing { fin: [Some(false), None], ..Closing::default() },
        Closing { fin: [Some(false), None], heard: [false, true], ..Closing::default() },
        Closing { fin: [Some(false), Some(true)], heard: [false, true], ..Closing::default() },
        Closing { fin: [Some(false), Some(true)], heard: [true, true], ..Closing::default() },
    ];
    let mirrored = |step: Closing| {
        let Closing { fin: [a, b], heard: [c, d], .. } = step;
        Closing { fin: [b, a], heard: [d, c], ..Closing::default() }
    };
    for server_first in [false, true] {
        // Told of each step, of every second, and of the last one only.
        for every in [1, 2, 4] {
            let mut script = Script::new();
            let (bound, _) = offloaded(&mut script);
            for (number, step) in steps.into_iter().enumerate() {
                let step = if server_first { mirrored(step) } else { step };
                if (number + 1) % every == 0 {
                    step.tell(&mut script, &bound);
                    script.engine.refresh(at(script.now));
                }
            }
            let records = script.records();
            assert_eq!((records.len(), records[0].reason), (1, EndReason::Ok), "every {every}");
            let (first, second) =
                if server_first { (Side::Server, Side::Client) } else { (Side::Client, Side::Server) };
            let all = states(&records[0]);
            assert_eq!(all[all.len() - 6..], ends(first, second), "every {every}");
            assert_eq!(script.engine.callbacks_mut().ended, []);
            script.engine.over(at(script.now), Slot::FIRST, TO);
            assert_eq!(script.engine.callbacks_mut().ended, [TO], "it is given back at once");
            assert_eq!(script.records(), [], "one record");
        }
    }
}

#[test]
fn both_may_close_at_the_same_time_elsewhere() {
    let mut script = Script::new();
    let (bound, _) = offloaded(&mut script);
    let fin = [Some(false), Some(true)];
    Closing { fin, ..Closing::default() }.tell(&mut script, &bound);
    script.engine.over(at(script.now), Slot::FIRST, TO);
    assert_eq!(script.records(), [], "nothing is acknowledged");
    assert_eq!(script.engine.callbacks_mut().ended, []);
    Closing { fin, heard: [true, false], ..Closing::default() }.tell(&mut script, &bound);
    script.engine.refresh(at(script.now));
    assert_eq!(script.records(), [], "one is");
    Closing { fin, heard: [true, true], ..Closing::default() }.tell(&mut script, &bound);
    script.engine.over(at(script.now), Slot::FIRST, OffloadId(NonZeroU32::MAX));
    assert_eq!(script.records(), [], "another's");
    script.engine.over(at(script.now), Slot::FIRST, TO);
    let records = script.records();
    assert_eq!(records[0].reason, EndReason::Ok);
    assert!(states(&records[0]).iter().any(|(_, state)| *state == State::Closing), "{records:?}");
}

#[test]
fn after_one_side_has_closed_elsewhere_the_other_may_go_on() {
    let mut script = Script::with(
        |config| config.idle_timeout_ms = 3000,
        Selection::Server(Target::new(crate::network::Addresses::v4().server, SERVER_HOP)),
    );
    let (bound, _) = offloaded(&mut script);
    let half = Closing { fin: [Some(false), None], heard: [false, true], ..Closing::default() };
    half.tell(&mut script, &bound);
    script.engine.refresh(at(script.now));
    script.wait(2500);
    let more = Closing { bytes: [0, 100_000], new: [0, 100_000], ..half };
    more.tell(&mut script, &bound);
    assert_eq!(script.wait(2500), [], "not idle");
    // The last of it comes here, and the acknowledgement passes there.
    let seq = bound.server.0.wrapping_add(100_000);
    let ack = bound.server.1.wrapping_add(1);
    let fin = Packet::new(script.addresses.server, bound.source, FIN | ACK, seq, ack);
    assert_eq!(script.take(&fin).len(), 1);
    let end = Closing { fin: [Some(false), None], heard: [true, true], bytes: [0, 100_000], new: [0, 0] };
    end.tell(&mut script, &bound);
    script.engine.reclaim(at(script.now), Slot::FIRST);
    let records = script.records();
    assert_eq!((records[0].reason, records[0].server_bytes), (EndReason::Ok, 100_000));
}

/// A connection whose first bytes are on their way to the server, and offloaded.
fn delivering(script: &mut Script) -> Bound {
    let (isn, syn) = script.request(b"hello");
    let answer = script.syn_ack(&syn);
    assert_eq!(script.engine.callbacks_mut().delivering, []);
    let out = script.take(&answer);
    assert_eq!(out.last().map(|packet| packet.payload.clone()), Some(b"hello".to_vec()));
    assert_eq!(
        (script.engine.callbacks_mut().delivering.clone(), script.engine.callbacks_mut().plain.len()),
        (vec![Slot::FIRST], 0)
    );
    let [client, server] =
        script.engine.translation(Slot::FIRST).expect("there is nothing to do but to see them there");
    assert_eq!((client.standing.sent, client.finished), (CLIENT_ISN.wrapping_add(6), false));
    assert_eq!(server.standing.sent, SERVER_ISN + 1);
    script.engine.offload(Slot::FIRST, TO);
    Bound {
        source: syn.src,
        client: (CLIENT_ISN.wrapping_add(6), isn.wrapping_add(1)),
        server: (SERVER_ISN + 1, syn.seq.wrapping_add(6)),
    }
}

#[test]
fn first_bytes_that_are_acknowledged_elsewhere_are_not_sent_again() {
    let mut script = Script::new();
    let bound = delivering(&mut script);
    let all = Closing { bytes: [0, 3], new: [0, 3], ..Closing::default() };
    all.tell(&mut script, &bound);
    assert_eq!(script.wait(10_000), [], "not one packet");
    let end = Closing { fin: [Some(true), Some(false)], heard: [true, true], new: [0, 0], ..all };
    end.tell(&mut script, &bound);
    script.engine.over(at(script.now), Slot::FIRST, TO);
    let records = script.records();
    assert_eq!((records[0].reason, records[0].passed_elsewhere), (EndReason::Ok, true));
    assert_eq!((records[0].client_bytes, records[0].server_bytes), (5, 3));
}

#[test]
fn first_bytes_that_are_lost_are_sent_again_while_it_is_offloaded() {
    let mut script = Script::new();
    let bound = delivering(&mut script);
    let again = script.wait(1500);
    assert!(!again.is_empty() && again.iter().all(|(_, packet)| packet.payload == b"hello"), "{again:?}");
    assert!(again.iter().all(|(_, packet)| packet.seq == bound.server.1.wrapping_sub(5)));
    // Acknowledged here: that is the client's to hear, and no more is sent.
    let out = script.take(&script.server(&bound, ACK).clone());
    assert_eq!(
        out.iter().map(|packet| (packet.dst, packet.ack)).collect::<Vec<_>>(),
        [(script.addresses.client, bound.client.0)]
    );
    assert_eq!(script.wait(10_000), []);
}

#[test]
fn first_bytes_are_nobody_elses_if_there_is_more_to_do() {
    // They are changed, or what comes back is looked at, or they are the last ones.
    let target = Target::new(crate::network::Addresses::v4().server, SERVER_HOP);
    let looks = Target { inspect_server: true, ..target };
    let changes = Target { inspect_client: true, ..target };
    for (target, payload, fin) in [
        (looks, Payload::Keep, 0),
        (changes, Payload::Replace(b"hello!".to_vec()), 0),
        (target, Payload::Keep, FIN),
    ] {
        let mut script = Script::with(|_| {}, Selection::Server(target));
        script.engine.callbacks_mut().payload = payload;
        let isn = script.open();
        let data = script.client(ACK | PSH | fin, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1));
        let syn = script.take(&data.payload(b"hello"))[0].clone();
        let answer = script.syn_ack(&syn);
        assert!(!script.take(&answer).is_empty());
        assert_eq!(script.engine.callbacks_mut().delivering, []);
        assert_eq!(script.engine.translation(Slot::FIRST), None);
    }
}
