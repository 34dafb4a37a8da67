//! Clients that wait for an answer before they say which server they want: an anonymous LDAP bind, then a search.

use crate::network::{Addresses, Faults, Network, SERVER_HOP, config};
use crate::peer::{Habits, roll};
use crate::script::{CLIENT_ISN, SERVER_ISN, Script};
use crate::wire::{ACK, FIN, PSH, Packet, RST, SYN};
use sidetrack_core::engine::{
    Callbacks, ConnectionId, Drop, Opening, Payload, Reply, Selection, State, Target,
};
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::ldap::{BindAnswer, First, answer_to_anonymous_bind, first_request};

const BIND: &[u8] = b"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00";
const SEARCH: &[u8] =
    b"\x30\x23\x02\x01\x02\x63\x1e\x04\x04dc=1\x0a\x01\x02\x0a\x01\x00\x02\x01\x00\x02\x01\x00\x01\x01\x00\x87\x03dc=\x30\x00";
/// The same answer with short and with long lengths.
const ANSWER: &[u8] = b"\x30\x0c\x02\x01\x01\x61\x07\x0a\x01\x00\x04\x00\x04\x00";
const LONG_ANSWER: &[u8] =
    b"\x30\x84\x00\x00\x00\x10\x02\x01\x01\x61\x84\x00\x00\x00\x07\x0a\x01\x00\x04\x00\x04\x00";

/// Chooses a server by the entry of an LDAP search.
struct Directory {
    target: Target,
    answer: Option<BindAnswer>,
    /// What the choice was made by.
    chosen_by: Vec<u8>,
    /// Calls of `payload` after it has said that there will be no more.
    late: u32,
}

impl Directory {
    fn new(addresses: &Addresses) -> Self {
        let target = Target::new(addresses.server, SERVER_HOP);
        Self { target, answer: None, chosen_by: Vec::new(), late: 0 }
    }
}

impl Callbacks for Directory {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        assert!(opening.replied || self.answer.is_none(), "it is asked again before the reply has arrived");
        if !opening.last && first_request(opening.first) == First::NeedMore {
            let reply = answer_to_anonymous_bind(opening.first).filter(|_| !opening.replied);
            let Some((bytes, answer)) = reply else { return Selection::Wait { wait_ms: 60_000 } };
            self.answer = Some(answer);
            return Reply::new(&bytes).map_or(Selection::Refuse(EndReason::Internal), Selection::Reply);
        }
        self.chosen_by = opening.first.to_vec();
        Selection::Server(Target { inspect_server: opening.replied, ..self.target })
    }

    fn payload(&mut self, _: ConnectionId, from: Side, bytes: &[u8]) -> Payload {
        assert_eq!(from, Side::Server);
        let Some(answer) = &mut self.answer else { return Payload::Keep };
        self.late += u32::from(answer.is_over());
        let left = answer.pass(bytes);
        if answer.is_over() { Payload::Last(left) } else { Payload::Replace(left) }
    }
}

/// How a run goes.
#[derive(Clone, Debug)]
struct Run {
    answer: &'static [u8],
    /// The client waits for the answer to its bind.
    waits: bool,
    /// Further bytes of both sides.
    more: [Vec<u8>; 2],
    cuts: [Vec<u64>; 2],
    habits: [Habits; 2],
    faults: Faults,
    seed: u64,
}

fn run(run: Run, addresses: &Addresses) {
    let what = format!("{:?}", Run { more: Default::default(), ..run.clone() });
    let [more_up, more_down] = run.more;
    let up = [BIND, SEARCH, &more_up].concat();
    let down = [run.answer, &more_down].concat();
    let mut network = Network::new(
        config(addresses),
        Directory::new(addresses),
        addresses,
        run.habits,
        [up.clone(), down.clone()],
        run.seed,
    );
    network.faults = run.faults;
    network.client.turn = run.waits.then_some((BIND.len() as u64, ANSWER.len()));
    // The server answers nothing that it was not asked.
    network.server.turn = Some((0, BIND.len()));
    [network.client.cuts, network.server.cuts] = run.cuts;
    // A link that loses packets may lose the last acknowledgement, too; then TIME-WAIT ends before the peer is content.
    let done = network.run(180_000) || run.faults.lost > 0;
    assert!(done, "{what}: stuck at {} ms, {:?}", network.now, network.records);
    let directory = network.engine.callbacks_mut();
    let replied = directory.answer.is_some();
    assert!(replied || !run.waits, "{what}: a client that waits needs a reply");
    let expected = if replied { [ANSWER, &more_down].concat() } else { down };
    assert!(directory.chosen_by.starts_with(BIND) && directory.chosen_by.len() > BIND.len(), "{what}");
    assert_eq!(directory.late, 0, "{what}: bytes are looked at after the answer");
    assert!(network.server.received == up, "{what}: the server gets the bind and all else, once");
    assert!(network.client.received == expected, "{what}: the client gets one answer to its bind");
    while network.step(900_000) {}
    assert_eq!((network.records.len(), network.engine.connections()), (1, 0), "{what}");
    if run.faults.lost == 0 {
        assert_eq!(network.records[0].reason, EndReason::Ok, "{what}");
    }
}

#[test]
fn cut_at_every_byte_of_both_sides() {
    let rest = b"\x30\x0c\x02\x01\x02\x65\x07\x0a\x01\x00\x04\x00\x04\x00";
    for (answer, waits) in [(ANSWER, true), (LONG_ANSWER, true), (LONG_ANSWER, false)] {
        for client in 0..=(BIND.len() + SEARCH.len()) as u64 {
            for server in 0..=(answer.len() + rest.len()) as u64 {
                let more = [Vec::new(), rest.to_vec()];
                let cuts = [vec![client], vec![server]];
                let (habits, faults) = (Default::default(), Faults::default());
                let addresses = Addresses::v4();
                run(Run { answer, waits, more, cuts, habits, faults, seed: client }, &addresses);
            }
        }
    }
}

#[test]
fn over_links_that_lose_repeat_and_reorder() {
    // In 524 a late copy of a segment takes the client's time stamp back behind the first one that was translated.
    for seed in (0..300_u64).chain([524]) {
        let mut random = seed.wrapping_mul(0xa076_1d64_78bd_642f) | 1;
        let mut size = || [0, 1, 100, 1460, 20_000][(roll(&mut random) % 5) as usize];
        let more = [vec![7; size()], vec![9; size()]];
        let ragged =
            |ragged| Habits { ragged, stamps: seed % 3 > 0, sack: seed % 5 > 0, ..Habits::default() };
        let faults = Faults { lost: 60, repeated: 60, delayed: 200 };
        let answer = if seed % 2 == 0 { ANSWER } else { LONG_ANSWER };
        let habits = [ragged(seed % 4 == 0), ragged(seed % 3 == 0)];
        let addresses = if seed % 8 == 0 { Addresses::v6() } else { Addresses::v4() };
        let waits = seed % 4 < 3;
        run(Run { answer, waits, more, cuts: Default::default(), habits, faults, seed }, &addresses);
    }
}

fn script() -> Script {
    let reply = Reply::new(ANSWER).expect("a reply");
    let mut script = Script::with(|_| {}, Selection::Reply(reply));
    script.engine.callbacks_mut().payload = Payload::Last(Vec::new());
    script
}

/// The client's handshake and its bind; the engine's number.
fn bound(script: &mut Script) -> u32 {
    let isn = script.open();
    let bind = script.client(ACK | PSH, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(BIND);
    let out = script.take(&bind);
    assert_eq!(out.len(), 1, "{out:?}");
    assert_reply(&out[0], isn);
    isn
}

fn assert_reply(packet: &Packet, isn: u32) {
    let acknowledged = CLIENT_ISN.wrapping_add(1 + BIND.len() as u32);
    assert_eq!((packet.flags, packet.seq, packet.ack), (ACK | PSH, isn.wrapping_add(1), acknowledged));
    assert_eq!(packet.payload, ANSWER);
}

const AFTER_BIND: u32 = CLIENT_ISN.wrapping_add(1 + BIND.len() as u32);

#[test]
fn a_server_is_chosen_when_the_reply_is_acknowledged() {
    let mut script = script();
    let isn = bound(&mut script);
    let out = script.wait(2999);
    assert_eq!(out.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1000], "{out:?}");
    assert_reply(&out[0].1, isn);
    // The next request comes although the reply was lost: it is held.
    let server = Selection::Server(Target {
        inspect_server: true,
        ..Target::new(script.addresses.server, SERVER_HOP)
    });
    script.engine.callbacks_mut().selection = server;
    let search = script.client(ACK | PSH, AFTER_BIND, isn.wrapping_add(1)).payload(SEARCH);
    assert_eq!(script.take(&search), []);
    let after_search = AFTER_BIND.wrapping_add(SEARCH.len() as u32);
    let half = script.client(ACK, after_search, isn.wrapping_add(8));
    assert_eq!(script.take(&half), [], "half of the reply");
    let after_reply = isn.wrapping_add(1 + ANSWER.len() as u32);
    let too_much = script.client(ACK, after_search, after_reply.wrapping_add(1));
    assert_eq!(script.refused(&too_much), Drop::AckOfUnsent);
    let all = script.client(ACK, after_search, after_reply);
    let syn = script.take(&all).remove(0);
    assert_eq!((syn.flags, syn.dst), (SYN, script.addresses.server));
    let answer = script.syn_ack(&syn);
    let out = script.take(&answer);
    assert_eq!((out.len(), out[0].payload.as_slice()), (1, [BIND, SEARCH].concat().as_slice()));
    // The server's answer to the bind goes no further; the engine acknowledges it.
    let server_ack = syn.seq.wrapping_add(1 + (BIND.len() + SEARCH.len()) as u32);
    let from_server = |seq: u32| Packet::new(script.addresses.server, syn.src, ACK | PSH, seq, server_ack);
    let (removed, found) = (
        from_server(SERVER_ISN + 1).payload(LONG_ANSWER),
        from_server(SERVER_ISN + 1 + LONG_ANSWER.len() as u32).payload(b"found"),
    );
    let out = script.take(&removed);
    let to_server: Vec<_> = out.iter().filter(|packet| packet.dst == script.addresses.server).collect();
    assert_eq!(to_server.len(), 1, "{out:?}");
    assert_eq!(to_server[0].ack, SERVER_ISN + 1 + LONG_ANSWER.len() as u32);
    assert!(out.iter().all(|packet| packet.payload.is_empty()), "{out:?}");
    // What follows begins behind the reply, and no callback sees it.
    script.engine.callbacks_mut().payload = Payload::Reset(EndReason::Internal);
    let out = script.take(&found);
    assert_eq!((out.len(), out[0].seq, out[0].payload.as_slice()), (1, after_reply, &b"found"[..]));
    // A late copy of the answer tells the client nothing new.
    let out = script.take(&removed);
    assert!(out.iter().all(|packet| packet.payload.is_empty()), "{out:?}");
}

#[test]
fn a_client_that_never_acknowledges_the_reply_is_given_up() {
    let mut script = script();
    bound(&mut script);
    let out = script.wait(20_000);
    let times: Vec<_> = out.iter().map(|(at, packet)| (*at, packet.is(RST))).collect();
    assert_eq!(times, [(1000, false), (3000, false), (7000, false), (10_000, true)]);
    let records = script.records();
    assert_eq!((records.len(), records[0].reason), (1, EndReason::HandshakeTimeout));
    assert_eq!(script.engine.connections(), 0);
}

#[test]
fn a_client_that_closes_after_the_reply_is_asked_about_once_more() {
    let mut script = script();
    let isn = bound(&mut script);
    script.engine.callbacks_mut().asked.clear();
    script.engine.callbacks_mut().selection = Selection::Refuse(EndReason::BadRequest);
    let fin = script.client(FIN | ACK, AFTER_BIND, isn.wrapping_add(1));
    assert!(script.take(&fin).iter().all(|packet| packet.flags == ACK), "the reply may still be lost");
    let all = script.client(ACK, AFTER_BIND.wrapping_add(1), isn.wrapping_add(1 + ANSWER.len() as u32));
    assert!(script.take(&all).iter().any(|packet| packet.is(RST)));
    assert_eq!(script.engine.callbacks_mut().asked, [(BIND.to_vec(), true)]);
    let record = script.records().remove(0);
    assert_eq!(record.reason, EndReason::BadRequest);
    assert!(record.stamps.iter().any(|stamp| stamp.state == State::FinWait1));
}

#[test]
fn a_second_reply_and_one_after_the_last_byte_are_faults_of_the_selector() {
    let mut script = script();
    let isn = bound(&mut script);
    let all = script.client(ACK, AFTER_BIND, isn.wrapping_add(1 + ANSWER.len() as u32));
    assert!(script.take(&all)[0].is(RST));
    assert_eq!(script.records()[0].reason, EndReason::Internal);
    let mut script = self::script();
    let isn = script.open();
    let bind = script.client(FIN | ACK, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(BIND);
    assert!(script.take(&bind).iter().any(|packet| packet.is(RST)));
    assert_eq!(script.records()[0].reason, EndReason::Internal);
    assert_eq!((Reply::new(b""), Reply::new(&[0; Reply::MAX + 1])), (None, None));
}
