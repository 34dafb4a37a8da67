//! Held connections: golden packets, every order of events, random events against the rules of the machine, and the tables of
//! answers.

#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

use sidetrack_core::flow::EndReason;
use sidetrack_core::hold::{
    Answer, Config, Counts, Decision, Input, Machine, Output, Overflow, PacketId, Syn, Ticket,
};
use sidetrack_core::socks::ReplyCode;
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// curl's SYN from 10.0.0.1:40000 to 192.0.2.7:80, sequence number 0x01020304, with the options of Linux.
const SYN_V4: [u8; 60] = [
    0x45, 0x10, 0x00, 0x3c, 0x1c, 0x46, 0x40, 0x00, 0x40, 0x06, 0x92, 0x62, 10, 0, 0, 1, 192, 0, 2,
    7, //
    0x9c, 0x40, 0x00, 0x50, 1, 2, 3, 4, 0, 0, 0, 0, 0xa0, 0x02, 0xfa, 0xf0, 0, 0, 0, 0, //
    2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7,
];

fn syn_v6() -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, 40, 6, 64];
    packet.extend("2001:db8::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    packet.extend("2001:db8::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
    packet.extend(&SYN_V4[20..]);
    packet
}

fn parsed(packet: &[u8]) -> Syn {
    Syn::parse(packet).expect("a SYN")
}

/// The sum of all words, with the checksum in it, is 0xffff (RFC 1071).
fn is_right(bytes: &[u8], pseudo: &[u8]) -> bool {
    let words = |bytes: &[u8]| -> u32 {
        bytes
            .chunks(2)
            .map(|two| u32::from(u16::from_be_bytes([two[0], two.get(1).copied().unwrap_or(0)])))
            .sum()
    };
    let mut sum = words(bytes) + words(pseudo);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum == 0xffff
}

#[test]
fn a_syn_is_read_and_nothing_else_is_one() {
    let syn = parsed(&SYN_V4);
    assert_eq!(syn.client, "10.0.0.1:40000".parse::<SocketAddr>().unwrap());
    assert_eq!(syn.server, "192.0.2.7:80".parse::<SocketAddr>().unwrap());
    assert_eq!(syn.isn, 0x0102_0304);
    let six = parsed(&syn_v6());
    assert_eq!(six.client, "[2001:db8::1]:40000".parse::<SocketAddr>().unwrap());
    assert_eq!(six.server, "[2001:db8::2]:80".parse::<SocketAddr>().unwrap());
    for packet in [SYN_V4.to_vec(), syn_v6()] {
        let header = if packet[0] >> 4 == 4 { 20 } else { 40 };
        for length in 0..packet.len() {
            // The options do not matter; the first twenty bytes of the TCP header do.
            assert_eq!(Syn::parse(&packet[..length]).is_some(), length >= header + 20, "{length} bytes");
        }
        for flags in [0x12, 0x10, 0x04, 0x06, 0x03, 0x00] {
            let mut other = packet.clone();
            other[header + 13] = flags;
            assert_eq!(Syn::parse(&other), None, "flags {flags:#x}");
        }
        // Congestion notification is offered (RFC 3168): still a SYN.
        let mut ecn = packet.clone();
        ecn[header + 13] = 0xc2;
        assert!(Syn::parse(&ecn).is_some());
    }
    let with = |at: usize, byte: u8| {
        let mut packet = SYN_V4;
        packet[at] = byte;
        Syn::parse(&packet)
    };
    assert_eq!(with(9, 17), None, "UDP");
    assert_eq!(with(6, 0x20), None, "the first fragment");
    assert_eq!(with(7, 1), None, "a later fragment");
    assert_eq!(with(0, 0x44), None, "a header that is too short");
    assert_eq!(with(0, 0x55), None, "version 5");
    assert_eq!(with(32, 0x40), None, "a TCP header that is too short");
}

#[test]
fn the_answers_are_these_bytes() {
    let reset = parsed(&SYN_V4).answered(Answer::Reset).expect("a packet");
    assert_eq!(
        reset,
        [
            0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0x6e, 0xc8, 192, 0, 2, 7, 10, 0, 0, 1, //
            0x00, 0x50, 0x9c, 0x40, 0, 0, 0, 0, 1, 2, 3, 5, 0x50, 0x14, 0, 0, 0x43, 0x31, 0, 0,
        ]
    );
    assert!(is_right(&reset[..20], &[]));
    assert!(is_right(&reset[20..], &[192, 0, 2, 7, 10, 0, 0, 1, 0, 6, 0, 20]));
    let host = parsed(&SYN_V4).answered(Answer::Host).expect("a packet");
    assert_eq!(host[..20], [0x45, 0, 0, 68, 0, 0, 0x40, 0, 64, 1, 0x6e, 0xb1, 192, 0, 2, 7, 10, 0, 0, 1]);
    assert_eq!((host[20], host[21]), (3, 1));
    assert_eq!(host[28..], SYN_V4[..40], "the header and the first bytes are quoted");
    assert!(is_right(&host[20..], &[]));
    let six = syn_v6();
    let admin = parsed(&six).answered(Answer::Admin).expect("a packet");
    assert_eq!(admin[..8], [0x60, 0, 0, 0, 0, 68, 58, 64]);
    assert_eq!((&admin[8..24], &admin[24..40]), (&six[24..40], &six[8..24]));
    assert_eq!((admin[40], admin[41]), (1, 1));
    assert_eq!(admin[48..], six[..60]);
    let pseudo = [&admin[8..40], &[0, 58, 0, 68]].concat();
    assert!(is_right(&admin[40..], &pseudo));
    for answer in Answer::ALL {
        for packet in [SYN_V4.to_vec(), six.clone()] {
            assert_eq!(parsed(&packet).answered(answer).is_none(), answer == Answer::Silent);
        }
    }
}

#[test]
fn carriers_say_the_same_with_other_words() {
    let v6 = [1, 2, 3, 4, 5, 6, 9].map(|code| Answer::of_reply(ReplyCode::from_wire(code), false).as_str());
    assert_eq!(
        v6,
        [
            "host_unreachable",
            "prohibited",
            "net_unreachable",
            "host_unreachable",
            "reset",
            "host_unreachable",
            "silent"
        ]
    );
    assert_eq!(Answer::of_reply(ReplyCode::TtlExpired, true), Answer::Silent, "version 5 has no other code");
    for answer in Answer::ALL {
        // Through two servers the answer is the same; a port that is unreachable is refused.
        let again = Answer::of_reply(answer.reply_code(), false);
        let expected = if answer == Answer::Port { Answer::Reset } else { answer };
        assert_eq!(again, expected);
        assert_eq!(answer.icmp(false).is_none(), answer.icmp(true).is_none());
    }
    let statuses = [403, 407, 502, 503, 504, 500].map(|status| Answer::of_status(status).as_str());
    assert_eq!(
        statuses,
        ["prohibited", "prohibited", "host_unreachable", "host_unreachable", "silent", "host_unreachable"]
    );
    for (reason, answer) in [
        (EndReason::PolicyDenied, Answer::Admin),
        (EndReason::Refused, Answer::Reset),
        (EndReason::Unreachable, Answer::Host),
        (EndReason::Dns, Answer::Host),
        (EndReason::ConnectTimeout, Answer::Silent),
        (EndReason::HopFailed, Answer::Net),
        (EndReason::Killed, Answer::Reset),
        (EndReason::Limit, Answer::Reset),
    ] {
        assert_eq!(Answer::of_end(reason), answer, "{reason}");
    }
}

const CONFIG: Config = Config { held_max: 2, overflow: Overflow::Early, wait_max: Duration::from_secs(600) };

/// The SYN of client `port` with this sequence number.
fn syn(port: u16, isn: u32) -> Syn {
    let mut packet = SYN_V4;
    packet[20..22].copy_from_slice(&port.to_be_bytes());
    packet[24..28].copy_from_slice(&isn.to_be_bytes());
    parsed(&packet)
}

fn packet(id: u32) -> PacketId {
    PacketId { queue: 1, id }
}

/// A machine, the present, and the next packet's number.
struct Driver {
    machine: Machine,
    now: Instant,
}

impl Driver {
    fn new(config: Config) -> Self {
        Self { machine: Machine::new(config), now: Instant::from_millis(5) }
    }

    fn after(&mut self, ms: u64) -> Vec<Output> {
        self.now = self.now + Duration::from_millis(ms);
        self.give(Input::Tick)
    }

    fn give(&mut self, input: Input) -> Vec<Output> {
        self.machine.handle(self.now, input);
        std::iter::from_fn(|| self.machine.poll()).collect()
    }

    fn syn(&mut self, id: u32, port: u16, isn: u32, is_local: bool) -> Vec<Output> {
        self.give(Input::Syn { packet: packet(id), syn: syn(port, isn), is_local })
    }

    fn decide(&mut self, ticket: Ticket, decision: Decision) -> Vec<Output> {
        self.give(Input::Decided(ticket, decision))
    }

    fn ask(&mut self, id: u32, port: u16, isn: u32, is_local: bool) -> Ticket {
        match self.syn(id, port, isn, is_local).as_slice() {
            [Output::Ask { ticket, queue: 1, client, .. }] if client.port() == port => *ticket,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_admitted_connection_passes_and_so_does_its_syn_again() {
    let mut driver = Driver::new(CONFIG);
    let ticket = driver.ask(1, 1000, 7, false);
    assert_eq!(driver.syn(2, 1000, 7, false), [Output::Verdict(packet(2), false)], "it joins");
    assert_eq!(driver.decide(ticket, Decision::Admit), [Output::Verdict(packet(1), true)]);
    assert_eq!(driver.syn(3, 1000, 7, false), [Output::Verdict(packet(3), true)]);
    assert_eq!(driver.decide(ticket, Decision::Refuse(Answer::Reset)), [], "it is over");
    assert_eq!((driver.machine.held(), driver.machine.known()), (0, 1));
    driver.after(20_000);
    assert_eq!(driver.machine.known(), 0);
    assert_eq!(driver.machine.deadline(), None);
}

#[test]
fn a_refused_connection_gets_the_same_answer_again() {
    let mut driver = Driver::new(CONFIG);
    let ticket = driver.ask(1, 1000, 7, false);
    let told = driver.decide(ticket, Decision::Refuse(Answer::Net));
    let [Output::Send(client, bytes), Output::Verdict(id, false)] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert_eq!((client.port(), *id), (1000, packet(1)));
    let again = driver.syn(2, 1000, 7, false);
    assert_eq!(again, [Output::Send(*client, bytes.clone()), Output::Verdict(packet(2), false)]);
    driver.ask(3, 1000, 8, false);
}

#[test]
fn a_connection_that_timed_out_stays_unanswered_as_long_as_the_client_tries() {
    let mut driver = Driver::new(CONFIG);
    let ticket = driver.ask(1, 1000, 7, false);
    assert_eq!(driver.decide(ticket, Decision::Refuse(Answer::Silent)), [Output::Verdict(packet(1), false)]);
    for id in 2..8 {
        driver.after(64_000);
        assert_eq!(driver.syn(id, 1000, 7, false), [Output::Verdict(packet(id), false)]);
    }
    driver.after(131_000);
    assert_eq!(driver.machine.known(), 0);
}

#[test]
fn another_sequence_number_is_another_attempt() {
    let mut driver = Driver::new(CONFIG);
    let first = driver.ask(1, 1000, 7, false);
    let outputs = driver.syn(2, 1000, 8, false);
    let [Output::Abandon(gone), Output::Verdict(id, false), Output::Ask { ticket, .. }] = outputs.as_slice()
    else {
        panic!("{outputs:?}")
    };
    assert_eq!((*gone, *id), (first, packet(1)));
    assert_eq!(driver.decide(first, Decision::Admit), [], "of the attempt that was given up");
    assert_eq!(driver.decide(*ticket, Decision::Admit), [Output::Verdict(packet(2), true)]);
    assert_eq!(driver.machine.counts().replaced, 1);
}

#[test]
fn the_syn_of_a_local_client_is_released_before_it_comes_again() {
    let mut driver = Driver::new(CONFIG);
    let ticket = driver.ask(1, 1000, 7, true);
    assert_eq!(driver.machine.deadline(), Some(driver.now + Duration::from_millis(700)));
    assert_eq!(driver.after(699), []);
    assert_eq!(driver.after(1), [Output::Verdict(packet(1), false)]);
    driver.after(300);
    assert_eq!(driver.syn(2, 1000, 7, true), [], "it takes the place of the first");
    assert_eq!(driver.after(1699), []);
    assert_eq!(driver.after(1), [Output::Verdict(packet(2), false)]);
    assert_eq!(driver.decide(ticket, Decision::Admit), [], "there is nothing to let pass");
    driver.after(300);
    assert_eq!(driver.syn(3, 1000, 7, true), [Output::Verdict(packet(3), true)]);
    // Refused while no packet is there: the answer is sent, and there is nothing to drop.
    let ticket = driver.ask(4, 1001, 7, true);
    driver.after(700);
    let told = driver.decide(ticket, Decision::Refuse(Answer::Reset));
    assert!(matches!(told.as_slice(), [Output::Send(..)]), "{told:?}");
    // A remote client's waits as long as it takes.
    let ticket = driver.ask(5, 1002, 7, false);
    assert_eq!(driver.after(60_000), []);
    assert_eq!(driver.decide(ticket, Decision::Admit), [Output::Verdict(packet(5), true)]);
}

#[test]
fn an_icmp_error_to_a_local_client_is_sent_again_three_times() {
    let mut driver = Driver::new(CONFIG);
    let ticket = driver.ask(1, 1000, 7, true);
    let told = driver.decide(ticket, Decision::Refuse(Answer::Host));
    let [send @ Output::Send(..), Output::Verdict(..)] = told.as_slice() else { panic!("{told:?}") };
    for pause in [2, 20, 200] {
        assert_eq!(driver.after(pause - 1), []);
        assert_eq!(driver.after(1), std::slice::from_ref(send));
    }
    assert_eq!(driver.after(2_000), []);
    // A segment of TCP is not lost, and a remote client's kernel does what it does without us.
    for (port, answer, is_local) in [(1001, Answer::Reset, true), (1002, Answer::Host, false)] {
        let ticket = driver.ask(2, port, 7, is_local);
        assert_eq!(driver.decide(ticket, Decision::Refuse(answer)).len(), 2);
        assert_eq!(driver.after(1_000), []);
    }
}

#[test]
fn no_more_are_held_than_there_is_room_for() {
    for overflow in [Overflow::Early, Overflow::Refuse] {
        let mut driver = Driver::new(Config { overflow, ..CONFIG });
        let first = driver.ask(1, 1000, 7, false);
        driver.ask(2, 1001, 7, false);
        let outputs = driver.syn(3, 1002, 7, false);
        match (overflow, outputs.as_slice()) {
            (Overflow::Early, [Output::Verdict(id, true)]) => assert_eq!(*id, packet(3)),
            (Overflow::Refuse, [Output::Send(..), Output::Verdict(id, false)]) => assert_eq!(*id, packet(3)),
            other => panic!("{other:?}"),
        }
        driver.decide(first, Decision::Early);
        driver.ask(4, 1002, 7, false);
        assert_eq!(driver.machine.counts().overflowed, 1);
    }
}

#[test]
fn what_waits_too_long_is_abandoned() {
    let mut driver = Driver::new(CONFIG);
    let ticket = driver.ask(1, 1000, 7, false);
    let outputs = driver.after(600_000);
    assert_eq!(outputs, [Output::Abandon(ticket), Output::Verdict(packet(1), false)]);
}

/// Random events: every packet gets exactly one verdict, no more are held than allowed, and at the end nothing is left.
#[test]
fn every_packet_gets_one_verdict_whatever_happens() {
    for seed in 1..=300_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let mut driver = Driver::new(Config { held_max: 4, ..CONFIG });
        let (mut open, mut tickets): (BTreeSet<u32>, BTreeMap<Ticket, u16>) = Default::default();
        let mut id = 0;
        let take = |outputs: Vec<Output>, open: &mut BTreeSet<u32>, tickets: &mut BTreeMap<Ticket, u16>| {
            for output in outputs {
                match output {
                    Output::Verdict(packet, _) => {
                        assert!(open.remove(&packet.id), "seed {seed}: a second verdict")
                    }
                    Output::Ask { ticket, client, .. } => {
                        assert!(
                            tickets.insert(ticket, client.port()).is_none(),
                            "seed {seed}: a ticket again"
                        );
                    }
                    Output::Abandon(ticket) => assert!(tickets.remove(&ticket).is_some(), "seed {seed}"),
                    Output::Send(client, bytes) => {
                        assert!((1000..1006).contains(&client.port()) && bytes.len() >= 40);
                    }
                }
            }
        };
        for _ in 0..200 {
            let outputs = match random(8) {
                0..=3 => {
                    id += 1;
                    open.insert(id);
                    let port = 1000 + u16::try_from(random(6)).unwrap();
                    let isn = u32::try_from(random(2)).unwrap();
                    driver.syn(id, port, isn, random(2) == 0)
                }
                4..=5 => {
                    let at = usize::try_from(random(5)).unwrap();
                    let ticket = tickets.keys().copied().nth(at).unwrap_or(Ticket(random(40)));
                    tickets.remove(&ticket);
                    let place = usize::try_from(random(6)).unwrap();
                    let decisions = [Decision::Early, Decision::Admit, Decision::Refuse(Answer::ALL[place])];
                    driver.decide(ticket, decisions[usize::try_from(random(3)).unwrap()])
                }
                _ => {
                    let wait = [1, 300, 700, 3000, 130_000][usize::try_from(random(5)).unwrap()];
                    driver.after(wait)
                }
            };
            take(outputs, &mut open, &mut tickets);
            assert!(driver.machine.held() <= 4 && driver.machine.known() <= 8, "seed {seed}");
            assert!(open.len() <= driver.machine.held(), "seed {seed}: a packet without a verdict is held");
        }
        while let Some(at) = driver.machine.deadline() {
            driver.now = at;
            let outputs = driver.give(Input::Tick);
            take(outputs, &mut open, &mut tickets);
        }
        assert!(open.is_empty() && tickets.is_empty(), "seed {seed}: {open:?} {tickets:?}");
        let Counts { held, early, admitted, refused, replaced, .. } = driver.machine.counts();
        assert_eq!(held, early + admitted + refused.iter().sum::<u64>() + replaced, "seed {seed}");
    }
}
