//! Scripts of single packets: this comes in, that goes out, nothing else.

use crate::network::{Addresses, SERVER_HOP};
use crate::script::{CLIENT_ISN, SERVER_ISN, Script};
use crate::wire::{ACK, FIN, PSH, Packet, RST, SYN, checksum, ip, open_ip};
use sidetrack_core::engine::packet::Malformed;
use sidetrack_core::engine::{Drop, Fate, Payload, Selection, State, Target};
use sidetrack_core::flow::{EndReason, Side};

fn states(script: &mut Script) -> (EndReason, [Vec<State>; 2]) {
    let records = script.records();
    assert_eq!(records.len(), 1, "{records:?}");
    let of = |side: Side| {
        let stamps = records[0].stamps.iter();
        stamps.filter(|stamp| stamp.side == side).map(|stamp| stamp.state).collect::<Vec<_>>()
    };
    (records[0].reason, [of(Side::Client), of(Side::Server)])
}

#[test]
fn options_are_negotiated_end_to_end() {
    let mut script = Script::new();
    let syn = Packet {
        mss: Some(1400),
        scale: Some(3),
        sack_permitted: true,
        stamps: Some((77, 0)),
        ..script.syn()
    };
    let answer = script.take(&syn).remove(0);
    assert_eq!((answer.mss, answer.scale, answer.sack_permitted), (Some(1460), Some(7), true));
    let (ours, echo) = answer.stamps.unwrap();
    assert_eq!((echo, answer.window), (77, 14_600));
    let mut data = script.client(ACK | PSH, CLIENT_ISN.wrapping_add(1), answer.seq + 1).payload(b"x");
    data.stamps = Some((80, ours));
    let to_server = script.take(&data).remove(0);
    assert_eq!((to_server.mss, to_server.scale, to_server.sack_permitted), (Some(1400), Some(3), true));
    assert!(to_server.stamps.is_some_and(|(_, echo)| echo == 0));
    // Nothing more than was asked for is offered on.
    let mut plain = Script::new();
    let (_, syn) = plain.request(b"x");
    assert_eq!((syn.scale, syn.sack_permitted, syn.stamps), (None, false, None));
}

#[test]
fn a_first_request_of_several_segments_is_held_and_forwarded_at_once() {
    let mut script = Script::new();
    let isn = script.open();
    let part = |n: u32| vec![n as u8; 1460];
    let mut syn = None;
    for n in 0..5_u32 {
        let seq = CLIENT_ISN.wrapping_add(1 + n * 1460);
        let data = script.client(ACK, seq, isn.wrapping_add(1)).payload(&part(n));
        for packet in script.take(&data) {
            match packet.flags {
                SYN => syn = Some(packet),
                _ => {
                    assert_eq!(packet.ack, seq.wrapping_add(1460), "every second is acknowledged: {packet:?}")
                }
            }
        }
    }
    let late = script.wait(40);
    assert_eq!(late.len(), 1, "the fifth is acknowledged after a delay: {late:?}");
    let answer = script.syn_ack(&syn.unwrap());
    let out = script.take(&answer);
    let to_server: Vec<_> = out.iter().filter(|packet| packet.dst == script.addresses.server).collect();
    let bytes: Vec<u8> = to_server.iter().flat_map(|packet| packet.payload.clone()).collect();
    assert_eq!(bytes, (0..5).flat_map(part).collect::<Vec<_>>());
    assert!(to_server.iter().all(|packet| packet.ack == SERVER_ISN + 1 && packet.payload.len() <= 1460));
    assert_eq!(script.engine.counters().retransmitted, 0);
}

#[test]
fn data_in_the_last_packet_of_the_handshake_is_not_lost() {
    let mut script = Script::new();
    let syn = script.syn();
    let isn = script.take(&syn)[0].seq;
    let data = script.client(ACK | PSH, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(b"early");
    let syn = script.take(&data).remove(0);
    assert_eq!(syn.flags, SYN);
    let answer = script.syn_ack(&syn);
    assert_eq!(script.take(&answer)[0].payload, b"early");
}

#[test]
fn a_repeated_syn_gets_the_same_answer() {
    let mut script = Script::new();
    let syn = script.syn();
    let first = script.take(&syn);
    assert_eq!(script.take(&syn), first);
    let again = script.wait(3100);
    assert_eq!(again.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1000, 3000], "by itself, with back-off");
    assert!(again.iter().all(|(_, packet)| packet.seq == first[0].seq));
    let late = script.wait(20_000);
    assert!(late.len() <= 1 && script.engine.connections() == 0 && script.records().is_empty());
    assert_eq!(script.engine.counters().half_open_expired, 1);
}

#[test]
fn a_client_may_close_before_there_is_a_server() {
    let mut script = Script::new();
    let isn = script.open();
    let fin = script.client(FIN | ACK | PSH, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(b"bye");
    let out = script.take(&fin);
    assert_eq!(
        (out[0].flags, out[0].ack),
        (ACK, CLIENT_ISN.wrapping_add(5)),
        "bytes and FIN are acknowledged"
    );
    assert_eq!(out[1].flags, SYN);
    let answer = script.syn_ack(&out[1]);
    let sent = script.take(&answer);
    assert_eq!((sent[0].payload.as_slice(), sent[0].flags & FIN), (&b"bye"[..], FIN));
    let end = out[1].seq.wrapping_add(5);
    let fin = Packet::new(sent[0].dst, sent[0].src, FIN | ACK, SERVER_ISN + 1, end);
    assert_eq!(script.take(&fin)[0].flags, FIN | ACK);
    let last = script.client(ACK, CLIENT_ISN.wrapping_add(5), isn.wrapping_add(2));
    assert_eq!(script.take(&last).len(), 1);
    let (reason, [client, server]) = states(&mut script);
    assert_eq!(reason, EndReason::Ok);
    assert_eq!(
        client,
        [State::SynSent, State::Established, State::FinWait1, State::FinWait2, State::TimeWait]
    );
    assert_eq!(
        server,
        [State::SynReceived, State::Established, State::LastAck, State::Closed],
        "its FIN came with the acknowledgement"
    );
}

#[test]
fn states_of_every_order_of_closing() {
    let mut script = Script::new();
    let mut bound = script.bind(b"x");
    script.close(&mut bound);
    let (_, [client, server]) = states(&mut script);
    assert_eq!(client[2..], [State::FinWait1, State::FinWait2, State::TimeWait]);
    assert_eq!(server[2..], [State::LastAck, State::Closed]);
    // Both at once: neither FIN acknowledges the other.
    let mut script = Script::new();
    let bound = script.bind(b"x");
    let (client_fin, server_fin) = (script.next(&bound, FIN | ACK), script.server(&bound, FIN | ACK));
    script.take(&client_fin);
    script.take(&server_fin);
    let mut ack = script.next(&bound, ACK);
    (ack.seq, ack.ack) = (ack.seq.wrapping_add(1), ack.ack.wrapping_add(1));
    script.take(&ack);
    let mut ack = script.server(&bound, ACK);
    (ack.seq, ack.ack) = (ack.seq + 1, ack.ack.wrapping_add(1));
    script.take(&ack);
    let (_, [client, server]) = states(&mut script);
    assert_eq!(client[2..], [State::FinWait1, State::Closing, State::TimeWait]);
    // We see its FIN acknowledged before we see that it has the client's.
    assert_eq!(server[2..], [State::FinWait1, State::FinWait2, State::TimeWait]);
}

#[test]
fn a_refused_server_resets_the_client() {
    let mut script = Script::new();
    let (_, syn) = script.request(b"x");
    let foreign = Packet::new(syn.dst, syn.src, RST | ACK, 0, syn.seq.wrapping_add(2));
    assert_eq!(script.refused(&foreign), Drop::OutOfWindow, "a blind reset");
    let rst = Packet::new(syn.dst, syn.src, RST | ACK, 0, syn.seq.wrapping_add(1));
    let out = script.take(&rst);
    assert!(out.len() == 1 && out[0].is(RST) && out[0].dst == script.addresses.client, "{out:?}");
    assert_eq!(states(&mut script).0, EndReason::Refused);
    assert_eq!(script.engine.connections(), 0);
}

#[test]
fn a_server_that_remembers_an_older_connection_is_made_to_forget() {
    let mut script = Script::new();
    let (_, syn) = script.request(b"x");
    let old = Packet::new(syn.dst, syn.src, ACK, 4711, 12_345);
    let out = script.take(&old);
    assert_eq!((out[0].flags, out[0].seq), (RST, 12_345));
    assert_eq!(out[1], syn, "and asked again at once");
}

#[test]
fn a_server_that_never_answers() {
    let mut script = Script::new();
    let (_, syn) = script.request(b"x");
    let out = script.wait(10_000);
    let syns: Vec<_> = out.iter().filter(|(_, p)| p.flags == SYN).map(|(at, _)| *at).collect();
    assert_eq!(syns, [1000, 3000, 7000], "{syn:?}");
    assert!(out.iter().any(|(at, p)| *at == 40 && p.flags == ACK), "held bytes are acknowledged");
    let to_client: Vec<_> =
        out.iter().filter(|(_, p)| p.is(RST) && p.dst == script.addresses.client).collect();
    assert_eq!(to_client.len(), 1);
    assert_eq!(states(&mut script).0, EndReason::ConnectTimeout);
}

#[test]
fn a_selector_that_never_decides_and_one_that_denies() {
    let mut script = Script::with(|_| {}, Selection::Wait { wait_ms: 500 });
    let isn = script.open();
    let data = script.client(ACK, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(b"x");
    script.take(&data);
    let out = script.wait(500);
    assert!(out.last().unwrap().1.is(RST), "{out:?}");
    assert_eq!(script.engine.callbacks_mut().asked.last(), Some(&(b"x".to_vec(), true)));
    assert_eq!(states(&mut script).0, EndReason::HandshakeTimeout);

    let mut script = Script::with(|_| {}, Selection::Refuse(EndReason::PolicyDenied));
    let isn = script.open();
    let data = script.client(ACK, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(b"x");
    assert!(script.take(&data)[0].is(RST));
    assert_eq!(states(&mut script).0, EndReason::PolicyDenied);
}

#[test]
fn a_client_that_says_nothing_is_asked_about_when_the_wait_is_over() {
    let mut script = Script::new();
    script.open();
    let out = script.wait(500);
    assert!(out.len() == 1 && out[0].1.flags == SYN && out[0].0 == 500, "{out:?}");
    assert_eq!(script.engine.callbacks_mut().asked, [(vec![], false), (vec![], true)]);
}

#[test]
fn a_syn_on_a_live_connection_is_challenged_and_changes_nothing() {
    let mut script = Script::new();
    let bound = script.bind(b"x");
    for seq in [CLIENT_ISN, 12_345, bound.client.0] {
        let syn = Packet { seq, ..script.syn() };
        let out = script.take(&syn);
        assert_eq!(out.len(), 1);
        assert_eq!(
            (out[0].flags, out[0].ack, out[0].dst),
            (ACK, bound.client.0, syn.src),
            "RFC 5961, section 4"
        );
    }
    let data = script.next(&bound, ACK).payload(b"still here");
    assert_eq!(script.take(&data)[0].payload, b"still here");
}

#[test]
fn blind_resets_do_not_end_a_connection_and_real_ones_do() {
    let mut script = Script::new();
    let bound = script.bind(b"x");
    let mut guess = script.next(&bound, RST);
    guess.seq = guess.seq.wrapping_add(1 << 20);
    assert_eq!(script.refused(&guess), Drop::OutOfWindow);
    guess.seq = bound.client.0.wrapping_sub(5000);
    assert_eq!(script.refused(&guess), Drop::OutOfWindow);
    // In the window: the server, not we, decides; its challenge comes back through us.
    guess.seq = bound.client.0.wrapping_add(100);
    assert_eq!(script.take(&guess).len(), 1);
    assert_eq!(script.engine.connections(), 1);
    let data = script.next(&bound, ACK).payload(b"alive");
    assert_eq!(script.take(&data).len(), 1);
    let exact = Packet { seq: bound.client.0.wrapping_add(5), ..script.next(&bound, RST) };
    let out = script.take(&exact);
    assert!(out[0].is(RST) && out[0].seq == bound.server.1.wrapping_add(5), "{out:?}");
    assert_eq!(states(&mut script).0, EndReason::ClientReset);

    let mut script = Script::new();
    let bound = script.bind(b"x");
    let rst = script.server(&bound, RST | ACK);
    assert!(script.take(&rst)[0].is(RST));
    assert_eq!(states(&mut script).0, EndReason::ServerReset);
}

#[test]
fn resets_before_there_is_a_server() {
    let mut script = Script::new();
    let (_, syn) = script.request(b"x");
    let next = CLIENT_ISN.wrapping_add(2);
    let near = script.client(RST, next.wrapping_add(5), 0);
    let out = script.take(&near);
    assert!(out.len() == 1 && out[0].flags == ACK && out[0].ack == next, "RFC 5961: {out:?}");
    let far = script.client(RST, next.wrapping_add(100_000), 0);
    assert_eq!(script.refused(&far), Drop::OutOfWindow);
    let exact = script.client(RST, next, 0);
    let out = script.take(&exact);
    assert!(out.len() == 1 && out[0].is(RST) && out[0].dst == syn.dst, "the server that was asked: {out:?}");
    assert_eq!(states(&mut script).0, EndReason::ClientGone);
}

#[test]
fn what_lies_outside_the_window_is_refused() {
    let mut script = Script::new();
    let bound = script.bind(b"x");
    let mut beyond = script.next(&bound, ACK).payload(b"far");
    beyond.seq = beyond.seq.wrapping_add(70_000);
    assert_eq!(script.refused(&beyond), Drop::OutOfWindow);
    let mut unsent = script.next(&bound, ACK);
    unsent.ack = unsent.ack.wrapping_add(1);
    assert_eq!(script.refused(&unsent), Drop::AckOfUnsent);
    // A keep-alive: one number before the next. It passes, and so does the answer.
    let mut probe = script.next(&bound, ACK);
    probe.seq = probe.seq.wrapping_sub(1);
    assert_eq!(script.take(&probe)[0].seq, bound.server.1.wrapping_sub(1));
}

#[test]
fn time_wait_passes_late_packets_and_can_be_used_again() {
    let mut script = Script::new();
    let mut bound = script.bind(b"x");
    script.close(&mut bound);
    let mut fin = script.server(&bound, FIN | ACK);
    fin.seq -= 1;
    assert_eq!(script.take(&fin)[0].flags, FIN | ACK, "a repeated FIN still gets to the client");
    // An old SYN is rejected, a later one is accepted (RFC 6191).
    let old = Packet { seq: bound.client.0.wrapping_sub(10_000), ..script.syn() };
    assert_eq!(script.take(&old)[0].flags, ACK);
    let new = Packet { seq: bound.client.0.wrapping_add(10), ..script.syn() };
    assert_eq!(script.take(&new)[0].flags, SYN | ACK);
    assert_eq!((script.records().len(), script.engine.connections()), (1, 1));
    // Without a new one it goes by itself.
    let mut script = Script::new();
    let mut bound = script.bind(b"x");
    script.close(&mut bound);
    assert_eq!(script.engine.connections(), 1);
    script.wait(1001);
    assert_eq!((script.engine.connections(), script.records().len()), (0, 1));
}

#[test]
fn idle_and_long_connections_end_with_resets_to_both() {
    let target = Target {
        idle_timeout_ms: Some(2000),
        lifetime_ms: Some(5000),
        ..Target::new(Addresses::v4().server, SERVER_HOP)
    };
    for (busy, reason) in [(false, EndReason::Idle), (true, EndReason::Lifetime)] {
        let mut script = Script::with(|_| {}, Selection::Server(target));
        let bound = script.bind(b"x");
        let mut out = Vec::new();
        for _ in 0..8 {
            out.extend(script.wait(1000));
            let ack = script.next(&bound, ACK);
            if busy && script.engine.connections() == 1 {
                script.take(&ack);
            }
        }
        let resets: Vec<_> = out.iter().filter(|(_, p)| p.is(RST)).collect();
        assert_eq!(resets.len(), 2, "{out:?}");
        let expected = if busy { 5000 } else { 2000 };
        assert!(resets.iter().all(|(at, _)| (expected..=expected + 10).contains(at)), "{resets:?}");
        assert_eq!(states(&mut script).0, reason);
    }
}

#[test]
fn a_callback_may_end_a_connection() {
    let target = Target { inspect_server: true, ..Target::new(Addresses::v4().server, SERVER_HOP) };
    let mut script = Script::with(|_| {}, Selection::Server(target));
    let bound = script.bind(b"x");
    script.engine.callbacks_mut().payload = Payload::Reset(EndReason::FunctionRefused);
    let data = script.server(&bound, ACK | PSH).payload(b"secret");
    let out = script.take(&data);
    assert!(
        out.len() == 2 && out.iter().all(|packet| packet.is(RST) && packet.payload.is_empty()),
        "{out:?}"
    );
    assert_eq!(states(&mut script).0, EndReason::FunctionRefused);
}

#[test]
fn the_server_may_see_the_clients_own_address() {
    let target = Target { keep_client_address: true, ..Target::new(Addresses::v4().server, SERVER_HOP) };
    let mut script = Script::with(|_| {}, Selection::Server(target));
    let mut bound = script.bind(b"x");
    assert_eq!(bound.source, script.addresses.client);
    script.close(&mut bound);
    assert_eq!(states(&mut script).0, EndReason::Ok);
}

#[test]
fn strangers_are_reset_and_not_too_many_of_them() {
    let mut script =
        Script::with(|config| config.challenges_per_second = 3, Selection::Refuse(EndReason::PolicyDenied));
    let server = script.addresses.server;
    let owned = "10.0.1.5:20500".parse().unwrap();
    let stray = Packet::new(server, owned, ACK, 1, 77);
    let out = script.take(&stray);
    assert_eq!((out[0].flags, out[0].seq), (RST, 77));
    for _ in 0..2 {
        assert_eq!(script.take(&stray).len(), 1);
    }
    assert_eq!(script.refused(&stray), Drop::NoConnection);
    assert_eq!(script.engine.counters().challenges_suppressed, 1);
    script.wait(1000);
    assert_eq!(script.take(&stray).len(), 1);
    let other = Packet::new(server, "10.0.1.5:19999".parse().unwrap(), ACK, 1, 77);
    assert_eq!(script.fate(&other, SERVER_HOP).0, Fate::NotOurs);
}

#[test]
fn malformed_packets_of_every_class() {
    let mut script = Script::new();
    let good = script.syn().encode();
    let cut = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes[10..12].copy_from_slice(&[0, 0]);
        let sum = checksum(&[&bytes[..20]]);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes
    };
    let mut syn_fin = script.syn();
    syn_fin.flags = SYN | FIN;
    let mut none = script.syn();
    none.flags = 0;
    let mut multicast = script.syn();
    multicast.src = "224.0.0.1:1".parse().unwrap();
    let mut port = script.syn();
    port.src.set_port(0);
    let mut ip_sum = good.clone();
    ip_sum[10] ^= 1;
    let mut tcp_sum = good.clone();
    tcp_sum[36] ^= 1;
    let cases: Vec<(&str, Vec<u8>, Malformed)> = vec![
        ("nothing", Vec::new(), Malformed::Truncated),
        ("version 5", cut(0, 0x55), Malformed::Header),
        ("IP header of 16 bytes", cut(0, 0x44), Malformed::Header),
        ("longer than it is", cut(3, 200), Malformed::Truncated),
        ("shorter than its header", cut(3, 19), Malformed::Header),
        ("no room for TCP", cut(3, 39), Malformed::Truncated),
        ("more fragments", cut(6, 0x20), Malformed::Fragment),
        ("fragment offset", cut(7, 1), Malformed::Fragment),
        ("TCP header of 16 bytes", cut(32, 0x40), Malformed::Header),
        ("TCP header past the end", cut(32, 0xf0), Malformed::Truncated),
        ("IP checksum", ip_sum, Malformed::Checksum),
        ("TCP checksum", tcp_sum, Malformed::Checksum),
        ("SYN and FIN", syn_fin.encode(), Malformed::Flags),
        ("no flags", none.encode(), Malformed::Flags),
        ("from a multicast address", multicast.encode(), Malformed::Address),
        ("from port 0", port.encode(), Malformed::Address),
    ];
    for (what, bytes, expected) in cases {
        assert_eq!(script.raw(bytes, SERVER_HOP).0, Fate::Dropped(Drop::Malformed(expected)), "{what}");
    }
    assert_eq!(script.engine.connections(), 0);
    let mut expired = script.syn().encode();
    let bound = script.bind(b"x");
    expired.clear();
    expired.extend(script.next(&bound, ACK).encode());
    expired[8] = 1;
    expired[10..12].copy_from_slice(&[0, 0]);
    let sum = checksum(&[&expired[..20]]);
    expired[10..12].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(script.raw(expired, SERVER_HOP).0, Fate::Dropped(Drop::Expired));
}

/// An ICMP message of a router about a packet.
fn icmp(to: std::net::IpAddr, kind: u8, code: u8, rest: [u8; 4], about: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(rest);
    message.extend(&about[..about.len().min(28)]);
    let sum = checksum(&[&message]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ip("10.0.1.254".parse().unwrap(), to, 1, &message)
}

#[test]
fn an_unreachable_server_is_told_by_icmp() {
    let mut script = Script::new();
    let (_, syn) = script.request(b"x");
    let mut other = syn.clone();
    other.seq = other.seq.wrapping_add(1);
    let blind = icmp(syn.src.ip(), 3, 1, [0; 4], &other.encode());
    assert_eq!(script.raw(blind, SERVER_HOP), (Fate::Taken, vec![]), "a guess (RFC 5927)");
    let message = icmp(syn.src.ip(), 3, 1, [0; 4], &syn.encode());
    let (_, out) = script.raw(message, SERVER_HOP);
    assert!(out.len() == 1 && out[0].is(RST), "{out:?}");
    assert_eq!(states(&mut script).0, EndReason::Unreachable);
}

#[test]
fn a_server_without_a_route_is_given_up_and_an_established_one_is_not() {
    let mut script = Script::new();
    let (_, syn) = script.request(b"x");
    let mut other = syn.clone();
    other.seq = other.seq.wrapping_add(1);
    let now = crate::network::at(0);
    script.engine.unrouted(now, &other.encode());
    script.engine.unrouted(now, &[]);
    assert!(script.output().is_empty(), "not the packet that asks");
    script.engine.unrouted(now, &syn.encode());
    let out = script.output();
    assert!(out.len() == 1 && out[0].is(RST), "{out:?}");
    assert_eq!(states(&mut script).0, EndReason::Unreachable);

    let mut script = Script::new();
    let bound = script.bind(b"x");
    let data = script.next(&bound, ACK).payload(b"more");
    let sent = script.take(&data).remove(0);
    script.engine.unrouted(now, &sent.encode());
    assert!(script.output().is_empty() && script.engine.connections() == 1, "it retransmits");
}

#[test]
fn what_the_host_hears_of_a_silent_neighbour_ends_the_connection() {
    let now = crate::network::at(0);
    for (length, reached) in [(28, true), (27, false)] {
        let mut script = Script::new();
        let (_, syn) = script.request(b"x");
        // From the type on, without the IP header around it.
        let message = |syn: &[u8], kind, code| {
            let mut message = vec![kind, code, 0, 0, 0, 0, 0, 0];
            message.extend(&syn[..length]);
            let sum = checksum(&[&message]);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            message
        };
        let host = message(&syn.encode(), 3, 1);
        let mut broken = host.clone();
        broken[9] ^= 1;
        let mut guess = syn.clone();
        guess.seq = guess.seq.wrapping_add(1);
        let others = [
            broken,
            message(&syn.encode(), 3, 4),
            message(&syn.encode(), 11, 0),
            message(&guess.encode(), 3, 1),
            vec![3, 1],
            vec![],
        ];
        for other in others {
            script.engine.reported(now, &other, true);
            assert!(script.output().is_empty(), "{other:?}");
        }
        script.engine.reported(now, &host, true);
        let out = script.output();
        assert_eq!(out.iter().any(|packet| packet.is(RST)), reached, "{length} bytes of the packet: {out:?}");
        if reached {
            assert_eq!(states(&mut script).0, EndReason::Unreachable);
        }
    }
}

#[test]
fn packet_too_big_reaches_the_side_that_sent_it() {
    let mut script = Script::new();
    let bound = script.bind(b"x");
    let data = script.next(&bound, ACK).payload(&[7; 1000]);
    let sent = script.take(&data).remove(0);
    let message = icmp(bound.source.ip(), 3, 4, [0, 0, 5, 0], &sent.encode());
    let mut bytes = message.clone();
    let fate = script.engine.handle(crate::network::at(0), &mut bytes, SERVER_HOP, Default::default());
    assert!(matches!(fate, Fate::Forward { .. }), "{fate:?}");
    let (src, dst, protocol, body) = open_ip(&bytes);
    assert_eq!((src, dst, protocol), (data.dst.ip(), data.src.ip(), 1));
    assert_eq!((checksum(&[body]), &body[..2], &body[6..8]), (0, &[3, 4][..], &[5, 0][..]));
    // It quotes what the client sent, as far as it goes.
    let original = data.encode();
    assert_eq!(body[8 + 12..8 + 28], original[12..28], "addresses, ports and number are the client's own");
    assert_eq!(checksum(&[&body[8..28]]), 0, "the quoted header's checksum");
    let mut old = sent;
    old.seq = old.seq.wrapping_sub(100_000);
    let blind = icmp(bound.source.ip(), 3, 4, [0, 0, 0, 68], &old.encode());
    assert_eq!(script.raw(blind, SERVER_HOP).0, Fate::Dropped(Drop::OutOfWindow));
}
