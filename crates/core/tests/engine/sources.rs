//! Source ports: one for each connection to the same server, taken again from TIME-WAIT, shared by different servers.

use crate::network::{Addresses, CLIENT_HOP, SERVER_HOP, at};
use crate::script::Script;
use crate::wire::{ACK, FIN, PSH, Packet, RST, SYN};
use proptest::prelude::*;
use sidetrack_core::engine::{Moved, OffloadId, Pair, Progress, Selection, Share, Slot, Target};
use sidetrack_core::flow::EndReason;
use std::collections::BTreeMap;
use std::net::SocketAddr;

const FIRST: u16 = 20_000;

fn server(n: u16) -> SocketAddr {
    SocketAddr::new(Addresses::v4().server.ip(), 8080 + n)
}

fn select(n: u16) -> Selection {
    Selection::Server(Target::new(server(n), SERVER_HOP))
}

/// An engine with this number of source ports.
fn script(ports: u16) -> Script {
    let sources =
        Share { addresses: vec!["10.0.1.5".parse().expect("an address")], ports: FIRST..=FIRST + ports - 1 };
    Script::with(|config| config.sources = sources, select(0))
}

/// A connection of which both ends are the test.
struct Connection {
    client: SocketAddr,
    /// The engine's initial number towards the client.
    isn: u32,
    syn: Packet,
}

/// A client asks; none if it is reset because there is no port.
fn ask(script: &mut Script, n: u16, stamps: Option<(u32, u32)>) -> Option<Connection> {
    let client = SocketAddr::from(([10, 0, 2, (n >> 8) as u8], 1000 + n));
    let front = script.addresses.front;
    let syn = Packet { mss: Some(1460), stamps, ..Packet::new(client, front, SYN, 0, 0) };
    let isn = script.fate(&syn, CLIENT_HOP).1[0].seq;
    let data =
        Packet { stamps, ..Packet::new(client, front, ACK | PSH, 1, isn.wrapping_add(1)).payload(b"x") };
    let out = script.fate(&data, CLIENT_HOP).1;
    let syn = out.into_iter().next().expect("an answer");
    (!syn.is(RST)).then_some(Connection { client, isn, syn })
}

/// The server answers, and both close, the client first; the last number of the client that the server saw.
fn serve_and_close(script: &mut Script, connection: &Connection, stamps: Option<(u32, u32)>) -> u32 {
    let Connection { client, isn, syn } = connection;
    let front = script.addresses.front;
    let mut step = |packet: Packet, hop| {
        let out = script.fate(&Packet { stamps, ..packet }, hop).1;
        assert!(!out.is_empty() && !out.iter().any(|packet| packet.is(RST)), "{out:?}");
    };
    let (first, mine) = (syn.seq.wrapping_add(1), 77);
    let to_engine = |flags, seq, ack| Packet::new(syn.dst, syn.src, flags, seq, ack);
    step(Packet { mss: Some(1460), ..to_engine(SYN | ACK, mine, first) }, SERVER_HOP);
    step(to_engine(ACK, mine + 1, first.wrapping_add(1)), SERVER_HOP);
    step(Packet::new(*client, front, FIN | ACK, 2, isn.wrapping_add(1)), CLIENT_HOP);
    step(to_engine(FIN | ACK, mine + 1, first.wrapping_add(2)), SERVER_HOP);
    step(Packet::new(*client, front, ACK, 3, isn.wrapping_add(2)), CLIENT_HOP);
    first.wrapping_add(2)
}

fn after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

#[test]
fn a_port_in_time_wait_is_taken_again_with_a_later_number() {
    let mut script = script(1);
    let first = ask(&mut script, 0, None).expect("a free port");
    let last = serve_and_close(&mut script, &first, None);
    // Within the same microsecond: the clock of initial numbers (RFC 6528) alone has not gone on.
    let second = ask(&mut script, 1, None).expect("the same port");
    assert_eq!(second.syn.src, first.syn.src);
    assert!(after(second.syn.seq, last), "{} after {last}", second.syn.seq);
    assert_eq!((script.engine.counters().time_wait_cut, script.engine.counters().shed), (1, 0));
    // A late packet of the first connection changes nothing of the second.
    let late = Packet::new(server(0), first.syn.src, FIN | ACK, 78, last);
    script.fate(&late, SERVER_HOP);
    serve_and_close(&mut script, &second, None);
    let reasons: Vec<_> = script.records().iter().map(|record| record.reason).collect();
    assert_eq!(reasons, [EndReason::Ok, EndReason::Ok]);
}

#[test]
fn a_port_whose_server_saw_a_later_time_stamp_is_not_taken_again() {
    let mut script = script(1);
    let first = ask(&mut script, 0, Some((1000, 0))).expect("a free port");
    // Its clock is ten seconds ahead of what it said at first; the server would take ours for an old duplicate.
    serve_and_close(&mut script, &first, Some((11_000, 0)));
    assert!(ask(&mut script, 1, Some((1, 0))).is_none());
    assert_eq!(script.records().last().expect("a record").reason, EndReason::Limit);
    script.wait(1001);
    assert!(ask(&mut script, 2, Some((1, 0))).is_some(), "after TIME-WAIT");
}

#[test]
fn the_port_of_a_offloaded_connection_rests_first() {
    let mut script = script(1);
    script.engine.callbacks_mut().plain.clear();
    let first = ask(&mut script, 0, None).expect("a free port");
    let answer = Packet::new(first.syn.dst, first.syn.src, SYN | ACK, 77, first.syn.seq.wrapping_add(1));
    script.fate(&Packet { mss: Some(1460), ..answer }, SERVER_HOP);
    script.engine.offload(Slot::FIRST, OffloadId(1.try_into().expect("a number")));
    script.engine.reclaim(at(script.now), Slot::FIRST);
    let front = script.addresses.front;
    for packet in [
        Packet::new(first.syn.dst, first.syn.src, FIN | ACK, 78, first.syn.seq.wrapping_add(2)),
        Packet::new(first.client, front, FIN | ACK, 2, first.isn.wrapping_add(2)),
        Packet::new(first.syn.dst, first.syn.src, ACK, 79, first.syn.seq.wrapping_add(3)),
    ] {
        let hop = if packet.src == first.client { CLIENT_HOP } else { SERVER_HOP };
        script.fate(&packet, hop);
    }
    assert!(ask(&mut script, 1, None).is_none(), "the kernel may still translate the first one");
    script.wait(51);
    assert!(ask(&mut script, 2, None).is_some());
}

#[test]
fn what_the_kernel_did_for_one_connection_is_not_said_of_the_next_in_its_slot() {
    let mut script = script(1);
    for (n, carried) in [(0, true), (1, false)] {
        let one = ask(&mut script, n, None).expect("a port");
        let answer = Packet::new(one.syn.dst, one.syn.src, SYN | ACK, 77, one.syn.seq.wrapping_add(1));
        script.fate(&Packet { mss: Some(1460), ..answer }, SERVER_HOP);
        if carried {
            let kernel = OffloadId(1.try_into().expect("a number"));
            script.engine.offload(Slot::FIRST, kernel);
            let stands = script.engine.standing(Slot::FIRST, kernel).expect("it is offloaded");
            let sides = stands.map(|(standing, _)| Moved { standing, packets: 1, ..Moved::default() });
            let progress = Progress { sides: Pair(sides), active: None, syn_ack: None };
            script.engine.callbacks_mut().progress.push_back(progress);
            script.engine.reclaim(at(script.now), Slot::FIRST);
        }
        let reset = Packet::new(one.client, script.addresses.front, RST, 2, 0);
        script.fate(&reset, CLIENT_HOP);
        let record = script.records().pop().expect("a record");
        assert_eq!(record.passed_elsewhere, carried);
    }
}

#[test]
fn one_port_serves_as_many_servers_as_there_are() {
    let mut script = script(1);
    let mut all = Vec::new();
    for n in 0..4 {
        script.engine.callbacks_mut().selection = select(n);
        all.push(ask(&mut script, n, None).expect("the port, for another server"));
    }
    assert!(all.iter().all(|one| one.syn.src == all[0].syn.src), "one port");
    assert!(ask(&mut script, 4, None).is_none(), "this server has a connection from it");
    // Each server's packets come to its own connection, whichever ends first.
    for n in [2, 0, 3, 1] {
        serve_and_close(&mut script, &all[n], None);
    }
    let ok = script.records().iter().filter(|record| record.reason == EndReason::Ok).count();
    assert_eq!(ok, 4);
}

/// What happens next in an exploration.
#[derive(Clone, Copy, Debug)]
enum Step {
    Ask(u16),
    Close(usize),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..3_u16).prop_map(Step::Ask),
        3 => (0..8_usize).prop_map(Step::Close),
        1 => (0..600_u64).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #[test]
    fn no_two_connections_have_the_same_ends_and_numbers_only_rise(steps in steps()) {
        let mut script = script(3);
        let mut open: Vec<(Connection, u16)> = Vec::new();
        let mut last: BTreeMap<(u16, SocketAddr), u32> = BTreeMap::new();
        let mut client = 0;
        for step in steps {
            match step {
                Step::Ask(n) => {
                    script.engine.callbacks_mut().selection = select(n);
                    client += 1;
                    let of_server = open.iter().filter(|(_, server)| *server == n).count();
                    let Some(new) = ask(&mut script, client, None) else {
                        prop_assert_eq!(of_server, 3, "only a server to which every port is in use is refused");
                        continue;
                    };
                    let ends = (n, new.syn.src);
                    prop_assert!(open.iter().all(|(one, server)| (*server, one.syn.src) != ends), "{ends:?}");
                    if let Some(last) = last.get(&ends) {
                        prop_assert!(after(new.syn.seq, *last), "{} after {last}", new.syn.seq);
                    }
                    open.push((new, n));
                }
                Step::Close(at) => {
                    if at < open.len() {
                        let (one, n) = open.remove(at);
                        last.insert((n, one.syn.src), serve_and_close(&mut script, &one, None));
                    }
                }
                // Less than the handshake with a server may take.
                Step::Wait(ms) => {
                    script.wait(ms);
                    if !open.is_empty() && script.now > 5000 {
                        break;
                    }
                }
            }
        }
    }
}
