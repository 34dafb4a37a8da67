//! Handshakes that are offloaded: the kernel sends what the engine would have sent, and the engine's state is the same afterwards.

use crate::network::{Addresses, SERVER_HOP, at};
use crate::script::{Bound, CLIENT_ISN, Offered, SERVER_ISN, Script};
use crate::wire::{ACK, FIN, PSH, Packet, RST, SYN};
use sidetrack_core::engine::{
    Fin, Moved, OffloadId, Pair, Payload, Progress, Record, Selection, Slot, Standing, SynAck, Target,
    Translation,
};
use sidetrack_core::flow::{EndReason, Side};
use std::num::NonZeroU32;

const TO: OffloadId = OffloadId(NonZeroU32::new(7).unwrap());
const STAMP: u32 = 0x7000_0000;

fn target() -> Target {
    Target::new(Addresses::v4().server, SERVER_HOP)
}

/// An engine whose handshakes with servers are offloaded.
fn script(target: Target) -> Script {
    let mut script = Script::with(|config| config.offloads_handshakes = true, Selection::Server(target));
    script.engine.callbacks_mut().takes_handshakes = Some(TO);
    script
}

/// What a client offers.
#[derive(Clone, Copy, Debug)]
struct Offers {
    stamps: bool,
    scale: Option<u8>,
    sack: bool,
}

const PLAIN: Offers = Offers { stamps: false, scale: None, sack: false };

/// The handshake of such a client, and its first bytes; our number, and the SYN to the server.
fn request(script: &mut Script, offers: Offers, payload: &[u8]) -> (u32, Packet) {
    let stamps = |echo| offers.stamps.then_some((STAMP, echo));
    let syn = script.client(SYN, CLIENT_ISN, 0);
    let syn = Packet {
        mss: Some(1460),
        stamps: stamps(0),
        scale: offers.scale,
        sack_permitted: offers.sack,
        ..syn
    };
    let answer = script.take(&syn)[0].clone();
    let echo = answer.stamps.map_or(0, |(value, _)| value);
    let ack = |flags| script_client(script, flags, answer.seq, stamps(echo));
    let (first, data) = (ack(ACK), ack(ACK | PSH).payload(payload));
    assert_eq!(script.take(&first), []);
    let out = script.take(&data);
    assert!(out.len() == 1 && out[0].flags == SYN, "{out:?}");
    (answer.seq, out[0].clone())
}

fn script_client(script: &Script, flags: u8, isn: u32, stamps: Option<(u32, u32)>) -> Packet {
    Packet { stamps, window: 5000, ..script.client(flags, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)) }
}

/// The server's answer to a SYN: it agrees to everything.
fn syn_ack(syn: &Packet) -> Packet {
    let stamps = syn.stamps.map(|(value, _)| (STAMP + 5, value));
    let scale = syn.scale.map(|_| 9);
    let packet = Packet::new(syn.dst, syn.src, SYN | ACK, SERVER_ISN, syn.seq.wrapping_add(1));
    Packet { mss: Some(1400), stamps, scale, sack_permitted: syn.sack_permitted, ..packet }
}

fn handshake(script: &mut Script) -> Offered {
    script.engine.callbacks_mut().handshakes.pop().expect("the handshake was offered")
}

/// What came elsewhere after the answer: bytes of both sides, and whether both have closed.
fn tell(script: &mut Script, isn: u32, syn: &Packet, bytes: [u64; 2], closed: bool) {
    let clock = (at(script.now).as_nanos() / 1_000_000) as u32;
    let handshake = script.engine.callbacks_mut().handshakes.last().expect("offered").clone();
    let syn_ack = SynAck {
        number: SERVER_ISN,
        mss: 1400,
        shift: 9,
        stamp: STAMP + 5,
        clock: clock.wrapping_add(handshake.clock),
        at: at(script.now),
    };
    let fin = u32::from(closed);
    let held = 5;
    let sent = [CLIENT_ISN.wrapping_add(1 + held), SERVER_ISN + 1];
    let sent = [0, 1].map(|side| sent[side].wrapping_add(bytes[side] as u32 + fin));
    let acknowledged =
        [isn.wrapping_add(1 + bytes[1] as u32 + fin), syn.seq.wrapping_add(1 + held + bytes[0] as u32 + fin)];
    let side = |side: usize| Moved {
        standing: Standing {
            sent: sent[side],
            acknowledged: acknowledged[side],
            edge: acknowledged[side].wrapping_add(0xffff),
            stamp: 0,
        },
        bytes: i64::try_from(bytes[side]).expect("few bytes"),
        packets: 1 + fin,
        fin: closed.then_some(Fin { end: sent[side], is_second: side == 1 }),
    };
    let progress =
        Progress { sides: Pair([side(0), side(1)]), active: Some(at(script.now)), syn_ack: Some(syn_ack) };
    script.engine.callbacks_mut().progress.push_back(progress);
}

#[test]
fn what_is_sent_elsewhere_is_what_the_engine_would_have_sent() {
    let mut here = Vec::new();
    for stamps in [false, true] {
        for scale in [None, Some(3)] {
            for sack in [false, true] {
                here.push(Offers { stamps, scale, sack });
            }
        }
    }
    for offers in here {
        let mut script = script(target());
        script.engine.callbacks_mut().takes_handshakes = None;
        let (isn, syn) = request(&mut script, offers, b"hello");
        let handshake = handshake(&mut script);
        script.now += 7;
        let answer = syn_ack(&syn);
        let sent = script.take(&answer)[0].clone();
        // What the answer brings: the acknowledgement and time stamps.
        let clock = ((at(script.now).as_nanos() / 1_000_000) as u32).wrapping_add(handshake.clock);
        let draft = Packet::decode(&handshake.packet);
        assert_eq!((draft.ack, draft.stamps), (0, offers.stamps.then_some((0, 0))), "{offers:?}");
        let stamps = answer.stamps.map(|(value, _)| (clock, value));
        assert_eq!(Packet { ack: answer.seq.wrapping_add(1), stamps, ..draft }, sent, "{offers:?}");
        // And so does the translation.
        let [client, server] = script.engine.translation(Slot::FIRST).expect("on its way");
        let [offered_client, offered_server] = handshake.sides;
        let stamp = answer.stamps.map_or(0, |(value, _)| value);
        let expected = Translation {
            stamp_add: clock.wrapping_sub(if offers.stamps { STAMP } else { 0 }),
            ..offered_client
        };
        assert_eq!(client, expected, "{offers:?}");
        let standing = Standing {
            sent: SERVER_ISN + 1,
            acknowledged: handshake.acknowledges,
            edge: handshake.acknowledges.wrapping_add(65_535),
            stamp,
        };
        let expected = Translation {
            add: handshake.shown.wrapping_sub(SERVER_ISN),
            mss: 1400,
            shift: if offers.scale.is_some() { 9 } else { 0 },
            stamp_add: if offers.stamps { clock.wrapping_sub(stamp) } else { server.stamp_add },
            stamp_first: stamp,
            standing,
            ..offered_server
        };
        assert_eq!(server, expected, "{offers:?}");
        assert_eq!(offered_server.mss, 1460);
        assert_eq!(usize::from(handshake.needs), 5 + if offers.stamps { 12 } else { 0 });
        assert_eq!(handshake.shown, isn);
    }
}

/// What a record says but for times.
fn said(record: &Record) -> (EndReason, [u64; 2], [u32; 2], Vec<String>) {
    let states = record.stamps.iter().map(|stamp| format!("{:?} {:?}", stamp.side, stamp.state)).collect();
    (
        record.reason,
        [record.client_bytes, record.server_bytes],
        [record.client_packets, record.server_packets],
        states,
    )
}

#[test]
fn a_connection_that_was_over_before_anybody_asked_is_told_as_if_it_had_passed_here() {
    let mut elsewhere = script(target());
    let (isn, syn) = request(&mut elsewhere, PLAIN, b"hello");
    elsewhere.now += 3;
    tell(&mut elsewhere, isn, &syn, [0, 9], true);
    elsewhere.engine.over(at(elsewhere.now), Slot::FIRST, TO);
    assert_eq!(elsewhere.output(), []);
    let records = elsewhere.records();
    assert_eq!((records.len(), records[0].passed_elsewhere), (1, true));
    assert_eq!(records[0].connected, Some(at(3)));
    assert_eq!(elsewhere.engine.counters().bound, 1);
    let mut here = Script::new();
    let mut bound = here.bind(b"hello");
    let data = here.server(&bound, ACK).payload(b"ninebytes");
    here.take(&data);
    (bound.server.0, bound.client.1) = (bound.server.0 + 9, bound.client.1.wrapping_add(9));
    here.take(&here.next(&bound, FIN | ACK).clone());
    bound.server.1 = bound.server.1.wrapping_add(1);
    here.take(&here.server(&bound, ACK).clone());
    here.take(&here.server(&bound, FIN | ACK).clone());
    (bound.client.0, bound.client.1) = (bound.client.0.wrapping_add(1), bound.client.1.wrapping_add(1));
    here.take(&here.next(&bound, ACK).clone());
    let (reason, bytes, _, states) = said(&here.records()[0]);
    let (reason_there, bytes_there, packets, states_there) = said(&records[0]);
    assert_eq!((reason_there, bytes_there, states_there), (reason, bytes, states));
    // The client's SYN, ACK, bytes and what was told; the server's SYN and that.
    assert_eq!(packets, [2 + 3, 1 + 2]);
    assert_eq!(elsewhere.engine.callbacks_mut().ended, [TO]);
}

#[test]
fn an_answer_that_comes_here_is_the_engines() {
    let mut script = script(target());
    let (isn, syn) = request(&mut script, PLAIN, b"hello");
    let out = script.take(&syn_ack(&syn));
    assert_eq!(script.engine.callbacks_mut().closing, [TO], "nobody else is to take it");
    assert_eq!(out[0].payload, b"hello");
    script.engine.reclaim(at(script.now), Slot::FIRST);
    let mut bound = Bound {
        source: syn.src,
        client: (CLIENT_ISN.wrapping_add(6), isn.wrapping_add(1)),
        server: (SERVER_ISN + 1, syn.seq.wrapping_add(6)),
    };
    script.take(&script.server(&bound, ACK).clone());
    script.close(&mut bound);
    assert_eq!(script.records()[0].reason, EndReason::Ok);
    assert_eq!(script.engine.callbacks_mut().ended, []);
}

#[test]
fn whatever_comes_first_calls_it_back() {
    // More of the client, a reset of either, silence, the end from above.
    for (what, taken) in (0..5).flat_map(|what| [(what, false), (what, true)]) {
        let mut script = script(target());
        let (isn, syn) = request(&mut script, PLAIN, b"hello");
        if taken {
            // Nothing has come at the first look; the SYN-ACK crosses with the call.
            let nothing = Progress { sides: Pair::default(), active: None, syn_ack: None };
            script.engine.callbacks_mut().progress.push_back(nothing);
            tell(&mut script, isn, &syn, [0, 0], false);
        }
        let (seq, ack) = (CLIENT_ISN.wrapping_add(6), isn.wrapping_add(1));
        match what {
            0 => {
                let out = script.take(&script.client(ACK | PSH, seq, ack).payload(b"more").clone());
                if taken {
                    assert_eq!((out.len(), &out[0].payload[..]), (1, &b"more"[..]), "passed on");
                    assert_eq!(out[0].seq, syn.seq.wrapping_add(6));
                } else {
                    assert!(out.iter().all(|packet| packet.dst == script.addresses.client), "{out:?}");
                    let out = script.take(&syn_ack(&syn));
                    assert_eq!(out[0].payload, b"hellomore");
                }
            }
            1 => {
                let out = script.take(&script.client(RST, seq, 0).clone());
                assert!(out.iter().all(|packet| packet.dst == script.addresses.server && packet.is(RST)));
                assert_eq!(out.len(), 1, "{taken}: {out:?}");
                assert_eq!(script.records().len(), 1);
            }
            2 => {
                let refusal = Packet::new(syn.dst, syn.src, RST | ACK, 0, syn.seq.wrapping_add(1));
                let out = script.take(&refusal);
                // Where the server has answered, its reset has to be at its place.
                assert_eq!(out.iter().any(|packet| packet.is(RST)), !taken, "{out:?}");
            }
            3 => {
                let out = script.wait(3000);
                let syns = out.iter().filter(|(_, packet)| packet.flags == SYN).count();
                assert_eq!((syns > 0, out.is_empty()), (!taken, taken), "{out:?}");
            }
            _ => {
                script.engine.shut_down(at(script.now), EndReason::Shutdown);
                let out = script.output();
                assert_eq!(out.iter().filter(|packet| packet.is(RST)).count(), 2, "{out:?}");
                let to_server = out.iter().find(|packet| packet.dst == script.addresses.server);
                let next = if taken { 6 } else { 1 };
                assert_eq!(to_server.map(|packet| packet.seq), Some(syn.seq.wrapping_add(next)));
                assert_eq!(script.engine.callbacks_mut().ended, [TO]);
            }
        }
        let closing = &script.engine.callbacks_mut().closing;
        assert!(!closing.is_empty() && closing.iter().all(|to| *to == TO), "{what} {taken}");
        assert_eq!(script.engine.counters().bound, u64::from(taken || what == 0), "{what} {taken}");
    }
}

#[test]
fn first_bytes_that_are_lost_after_the_answer_are_sent_again() {
    let mut script = script(target());
    let (isn, syn) = request(&mut script, PLAIN, b"hello");
    tell(&mut script, isn, &syn, [0, 0], false);
    // The server has acknowledged nothing of them.
    if let Some(progress) = script.engine.callbacks_mut().progress.back_mut() {
        progress.sides[Side::Server] = Moved {
            standing: Standing {
                sent: SERVER_ISN + 1,
                acknowledged: syn.seq.wrapping_add(1),
                ..Standing::default()
            },
            ..Moved::default()
        };
        progress.sides[Side::Server].standing.edge = syn.seq.wrapping_add(60_000);
    }
    let again = script.wait(1500);
    assert!(!again.is_empty() && again.iter().all(|(_, packet)| packet.payload == b"hello"), "{again:?}");
    assert!(again.iter().all(|(_, packet)| packet.seq == syn.seq.wrapping_add(1)));
    assert!(again[0].0 >= 200, "not before it can have been acknowledged: {again:?}");
}

#[test]
fn nobody_else_is_asked_where_there_is_more_to_do() {
    let looks = Target { inspect_server: true, ..target() };
    let changes = Target { inspect_client: true, ..target() };
    let other = Target::new(Addresses::v6().server, SERVER_HOP);
    for (target, flags) in [(looks, 0), (changes, 0), (target(), FIN), (other, 0)] {
        let mut script = script(target);
        script.engine.callbacks_mut().payload = Payload::Keep;
        let isn = script.open();
        let data = script.client(ACK | PSH | flags, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1));
        script.take(&data.payload(b"hello"));
        assert!(script.engine.callbacks_mut().handshakes.is_empty(), "{target:?} {flags}");
    }
    // And not unless the engine was told that a server is there.
    let mut script = Script::new();
    script.engine.callbacks_mut().takes_handshakes = Some(TO);
    script.request(b"hello");
    assert!(script.engine.callbacks_mut().handshakes.is_empty());
}
