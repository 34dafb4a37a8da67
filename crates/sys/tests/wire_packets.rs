//! What happens to single packets of flows on the wire: each is tried on the program, without any traffic.

#[path = "support/frames.rs"]
mod frames;

use frames::{ACK, FIN, Frame, RST, SYN, fold, octets, sum};
use sidetrack_core::wire::{self, Options, Side};
use sidetrack_sys::bpf::{Program, WireEnd, WireId, WireMemory};
use sidetrack_sys::link;
use sidetrack_testkit::{in_namespace, is_root};
use std::net::IpAddr;

/// `TC_ACT_UNSPEC`, `TC_ACT_SHOT`, `TC_ACT_REDIRECT`.
const LEFT: u32 = u32::MAX;
const DROPPED: u32 = 2;
const PASSED: u32 = 7;

const URG: u8 = 32;

/// What is added to numbers of either side, the client first: the circle is crossed.
const ADD: [u32; 2] = [0xffff_fff0, 1_000_000];
/// What each side sends next.
const NEXT: [u32; 2] = [0xffff_fffd, 5000];
const MSS: u16 = 1448;

struct Scene {
    memory: WireMemory,
    program: Program,
    id: WireId,
    index: u32,
    sides: [Side; 2],
}

impl Scene {
    /// A flow that is on the wire.
    fn new(v6: bool) -> Self {
        let scene = Self::joining(v6);
        assert!(scene.memory.wired(scene.id));
        scene
    }

    /// A flow whose sockets still live.
    fn joining(v6: bool) -> Self {
        let [client, local, server, source] = frames::addresses(v6);
        let index = link::interface("lo").expect("there").index;
        let side = |at: usize, remote, local| {
            // What it has acknowledged of the other's, in the numbers that it is shown.
            let acknowledged = NEXT[at ^ 1].wrapping_add(ADD[at ^ 1]);
            Side {
                remote,
                local,
                add: ADD[at],
                expects: NEXT[at],
                next: NEXT[at],
                acknowledged,
                written: acknowledged,
                edge: acknowledged.wrapping_add(0xffff << 2),
                egress: index,
                mss: MSS,
                shift: 2,
                shown_shift: 2,
                clock: 7,
                options: Options { stamps: true, sack: true, ecn: false },
            }
        };
        let sides = [side(0, client, local), side(1, server, source)];
        let memory = WireMemory::new(2).expect("maps");
        let program = memory.program().expect("the kernel takes it");
        let id = memory.join(&sides).expect("no other").expect("room");
        Self { memory, program, id, index, sides }
    }

    /// A frame of a side. `before` is the number of bytes that each side has sent earlier.
    fn frame<'a>(&self, from: usize, before: [u32; 2], flags: u8, payload: &'a [u8]) -> Frame<'a> {
        let own = &self.sides[from];
        Frame {
            link: ([2; 6], [4; 6]),
            from: own.remote,
            to: own.local,
            seq: NEXT[from].wrapping_add(before[from]),
            ack: NEXT[from ^ 1].wrapping_add(ADD[from ^ 1]).wrapping_add(before[from ^ 1]),
            flags,
            payload,
            ..Frame::BARE
        }
    }

    fn verdict(&self, frame: &Frame<'_>) -> u32 {
        self.program.try_on(&frame.bytes(), self.index).expect("tried").verdict
    }

    /// What the other side is shown of a frame; options stay.
    fn shown<'a>(&self, frame: Frame<'a>) -> Frame<'a> {
        let at = usize::from(frame.from != self.sides[0].remote);
        let other = &self.sides[at ^ 1];
        Frame {
            from: other.local,
            to: other.remote,
            seq: frame.seq.wrapping_add(ADD[at]),
            ack: frame.ack.wrapping_sub(ADD[at ^ 1]),
            ttl: frame.ttl - 1,
            ..frame
        }
    }

    /// It is passed on, and exactly so.
    fn passes(&self, frame: Frame<'_>) {
        let trial = self.program.try_on(&frame.bytes(), self.index).expect("tried");
        assert_eq!(trial.verdict, PASSED, "{frame:?}");
        assert_eq!(trial.packet, self.shown(frame).bytes());
    }

    /// Passes a frame with time stamps; returns the stamp and the echo that the other side is shown.
    fn stamps(&self, frame: Frame<'_>, value: u32, echo: u32) -> [u32; 2] {
        let options = [&[1, 1, 8, 10][..], &value.to_be_bytes(), &echo.to_be_bytes()].concat();
        let bytes = Frame { options: &options, ..frame }.bytes();
        let trial = self.program.try_on(&bytes, self.index).expect("tried");
        assert_eq!(trial.verdict, PASSED);
        let at = bytes.len() - frame.payload.len() - 8;
        let word = |at: usize| u32::from_be_bytes(*trial.packet[at..].first_chunk().expect("four bytes"));
        let [shown, shown_echo] = [word(at), word(at + 4)];
        // The same with the right checksum.
        let options = [&[1, 1, 8, 10][..], &shown.to_be_bytes(), &shown_echo.to_be_bytes()].concat();
        let expected = Frame { options: &options, ..self.shown(frame) };
        assert_eq!(trial.packet, expected.bytes());
        [shown, shown_echo]
    }
}

fn tried(test: fn(Scene)) {
    if is_root() {
        in_namespace(move || [false, true].map(Scene::new).into_iter().for_each(test));
    }
}

#[test]
fn a_flow_passes_until_both_fins_are_acknowledged() {
    tried(|scene| {
        scene.passes(scene.frame(0, [0, 0], ACK, b""));
        scene.passes(scene.frame(1, [0, 0], ACK, &[0x5a; 1399]));
        scene.passes(scene.frame(0, [0, 1399], ACK, b"more"));
        // Once more, urgent, and a probe of a host that wants to know whether the other is there.
        scene.passes(scene.frame(0, [0, 1399], ACK, b"more"));
        scene.passes(scene.frame(0, [4, 1399], ACK | URG, b"now"));
        scene.passes(scene.frame(0, [3, 1399], ACK, b""));
        scene.passes(scene.frame(1, [7, 1399], FIN | ACK, b"end"));
        scene.passes(scene.frame(0, [7, 1403], FIN | ACK, b""));
        assert_eq!(scene.memory.ended(scene.id), None, "not all is acknowledged");
        scene.passes(scene.frame(1, [8, 1403], ACK, b""));
        assert_eq!(scene.memory.ended(scene.id), Some(WireEnd::Finished));
        let seen = scene.memory.look(scene.id);
        assert_eq!(seen.map(|side| (side.dropped, side.finished)), [(0, true); 2]);
        assert_eq!(seen[0].sent - (1 << 32), u64::from(NEXT[0]) + 8, "wraps are counted");
        assert_eq!(seen[1].standing.sent, NEXT[1] + 1403);
        // What comes late passes, too.
        scene.passes(scene.frame(0, [7, 1403], FIN | ACK, b""));
    });
}

#[test]
fn time_stamps_continue_those_of_our_sockets() {
    tried(|scene| {
        let clock = || (sidetrack_sys::bpf::monotonic_ns() / 1_000_000) as u32 + 7;
        let before = clock();
        // It echoes one of ours. Nothing of the server is known that it could stand for.
        let [first, echo] = scene.stamps(scene.frame(0, [0, 0], ACK, b"x"), 500, 300);
        assert!((before..=clock()).contains(&first) && echo == 0, "{first} {echo}");
        let [later, _] = scene.stamps(scene.frame(0, [1, 0], ACK, b"y"), 510, 300);
        assert_eq!(later, first + 10);
        // The server echoes what it was shown, and something from before.
        let [_, echo] = scene.stamps(scene.frame(1, [2, 0], ACK, b"z"), 77, later);
        assert_eq!(echo, 510);
        let [_, echo] = scene.stamps(scene.frame(1, [2, 1], ACK, b"z"), 78, first - 5000);
        assert_eq!(echo, 500, "never from before the first");
    });
}

#[test]
fn a_reset_counts_only_at_the_number_that_is_expected() {
    tried(|scene| {
        for beside in [1, 5000] {
            scene.passes(scene.frame(0, [beside, 0], RST | ACK, b""));
            assert_eq!(scene.memory.ended(scene.id), None);
        }
        // A host that knows nothing of the flow sends no acknowledgement with it.
        scene.passes(Frame { ack: ADD[1], ..scene.frame(0, [0, 0], RST, b"") });
        assert_eq!(scene.memory.ended(scene.id), Some(WireEnd::ClientReset));
    });
}

#[test]
fn a_new_connection_between_the_same_ends_ends_the_flow() {
    tried(|scene| {
        assert_eq!(scene.verdict(&scene.frame(1, [0, 0], SYN | ACK, b"")), DROPPED);
        assert_eq!(scene.memory.ended(scene.id), None);
        assert_eq!(scene.verdict(&scene.frame(0, [0, 0], SYN, b"")), DROPPED);
        assert_eq!(scene.memory.ended(scene.id), Some(WireEnd::Reused));
        let sides = scene.sides;
        scene.memory.remove(scene.id).expect("removed");
        assert_eq!(scene.verdict(&scene.frame(0, [0, 0], SYN, b"")), LEFT);
        assert!(scene.memory.join(&sides).expect("no other").is_some(), "its place is free");
    });
}

#[test]
fn what_cannot_be_translated_is_dropped_and_counted() {
    tried(|scene| {
        let usual = scene.frame(0, [0, 0], ACK, b"x");
        let large = [0; MSS as usize + 1];
        let odd = [
            Frame { ttl: 1, ..usual },
            Frame { payload: &large, ..usual },
            // Another option than time stamps and selective acknowledgements; a length that goes beyond the header.
            Frame { options: &[253, 4, 1, 2], ..usual },
            Frame { options: &[1, 1, 5, 30], ..usual },
        ];
        for frame in &odd {
            assert_eq!(scene.verdict(frame), DROPPED, "{frame:?}");
        }
        let seen = scene.memory.look(scene.id);
        assert_eq!(seen.map(|side| side.dropped), [4, 0]);
        assert_eq!(seen[0].standing.sent, NEXT[0], "it moves nothing on");
        // Another port is another flow.
        let mut other = usual;
        other.from.set_port(4001);
        assert_eq!(scene.verdict(&other), LEFT);
        scene.passes(usual);
    });
}

#[test]
fn a_segment_outside_of_every_window_passes_and_moves_nothing_on() {
    tried(|scene| {
        let far = 3_000_000;
        scene.passes(scene.frame(0, [far, 0], ACK, b"forged"));
        scene.passes(scene.frame(0, [0, far], ACK, b"forged"));
        scene.passes(scene.frame(0, [far, 0], FIN | ACK, b""));
        let seen = scene.memory.look(scene.id);
        assert_eq!((seen[0].standing.sent, seen[0].finished), (NEXT[0], false));
        assert_eq!(seen[0].standing.acknowledged, scene.sides[0].acknowledged);
    });
}

#[test]
fn two_flows_cannot_have_the_same_ends() {
    tried(|scene| {
        let sides = scene.sides;
        assert!(scene.memory.join(&sides).is_err());
        let mut others = sides;
        others[0].remote.set_port(4001);
        // The server's side is there already; nothing is left of the client's.
        assert!(scene.memory.join(&others).is_err());
        others[1].local.set_port(61_001);
        assert!(scene.memory.join(&others).expect("no other").is_some());
        others[0].remote.set_port(4002);
        others[1].local.set_port(61_002);
        assert_eq!(scene.memory.join(&others).expect("no other"), None, "full");
    });
}

/// An ICMP error "too large" about this frame, from a host to the sender of the frame.
fn too_large(from: IpAddr, frame: &Frame<'_>, link: ([u8; 6], [u8; 6])) -> Vec<u8> {
    let quoted = &frame.bytes()[14..];
    let (source, target) = (octets(from), octets(frame.from.ip()));
    let mut bytes = [link.0, link.1].concat();
    // Kind, code, checksum, the MTU of the next path, and all of a small packet.
    let mut icmp = if from.is_ipv4() { vec![3, 4, 0, 0, 0, 0, 5, 0] } else { vec![2, 0, 0, 0, 0, 0, 5, 0] };
    icmp.extend(quoted);
    let pseudo = if from.is_ipv4() { 0 } else { sum(&source) + sum(&target) + 58 + icmp.len() as u64 };
    let check = !fold(pseudo + sum(&icmp));
    icmp[2..4].copy_from_slice(&check.to_be_bytes());
    if from.is_ipv4() {
        let total = (20 + icmp.len() as u16).to_be_bytes();
        let mut ip = vec![0x45, 0, total[0], total[1], 0, 9, 0, 0, 61, 1, 0, 0];
        ip.extend([source, target].concat());
        let check = !fold(sum(&ip));
        ip[10..12].copy_from_slice(&check.to_be_bytes());
        bytes.extend([8, 0]);
        bytes.extend(ip);
    } else {
        let length = (icmp.len() as u16).to_be_bytes();
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, length[0], length[1], 58, 61]);
        bytes.extend([source, target].concat());
    }
    bytes.extend(icmp);
    bytes
}

#[test]
fn an_error_about_a_packet_reaches_its_sender_who_recognises_it() {
    tried(|scene| {
        for at in [0, 1] {
            let sent = scene.frame(at, [300, 40], ACK, b"too large");
            scene.passes(sent);
            let passed = scene.shown(sent);
            let router = if sent.from.is_ipv4() { "192.0.2.9" } else { "2001:db8::9" };
            let error = too_large(router.parse().expect("an address"), &passed, sent.link);
            let trial = scene.program.try_on(&error, scene.index).expect("tried");
            assert_eq!(trial.verdict, PASSED);
            // The sender knows its packet: ends and number. What comes after that is not for it.
            let quoted = Frame { from: sent.from, to: sent.to, seq: sent.seq, ..passed };
            let expected = too_large(sent.to.ip(), &quoted, sent.link);
            // Addresses of both headers, and ports and number of the quoted segment.
            let places = if sent.from.is_ipv4() { [26..34, 54..70] } else { [22..54, 70..110] };
            for place in places {
                assert_eq!(trial.packet[place.clone()], expected[place]);
            }
            checks(&trial.packet);
        }
    });
}

/// The checksums of an ICMP packet are right.
fn checks(frame: &[u8]) {
    let is_v4 = frame[12..14] == [8, 0];
    let (ip, icmp) = frame[14..].split_at(if is_v4 { 20 } else { 40 });
    if is_v4 {
        assert_eq!(fold(sum(ip)), 0xffff);
        assert_eq!(fold(sum(&icmp[8..28])), 0xffff, "of the quoted header");
    }
    let pseudo = if is_v4 { 0 } else { sum(&ip[8..40]) + 58 + icmp.len() as u64 };
    assert_eq!(fold(pseudo + sum(icmp)), 0xffff);
}

#[test]
fn errors_that_are_not_about_the_flow_are_left_and_odd_ones_dropped() {
    tried(|scene| {
        let sent = scene.frame(0, [0, 0], ACK, b"");
        let other = Frame { to: (sent.to.ip(), 9).into(), ..scene.shown(sent) };
        let router = if sent.from.is_ipv4() { "192.0.2.9" } else { "2001:db8::9" };
        let router: IpAddr = router.parse().expect("an address");
        let left = scene.program.try_on(&too_large(router, &other, sent.link), scene.index).expect("tried");
        assert_eq!(left.verdict, LEFT);
        let error = too_large(router, &scene.shown(sent), sent.link);
        for length in 15..error.len() {
            // Cut at every byte: nothing is made up.
            let Ok(trial) = scene.program.try_on(&error[..length], scene.index) else { continue };
            assert!([LEFT, DROPPED, PASSED].contains(&trial.verdict), "{length}");
            assert_eq!(trial.packet.len(), length);
        }
    });
}

/// `WIRE_COPY` of wire.h.
const COPY: u32 = 0x51de_7ac5;

/// A segment that our socket sends to the client, which acknowledges `more` bytes than it did when the kernel began.
fn of_socket(scene: &Scene, more: u32, payload: &'static [u8]) -> Frame<'static> {
    let own = &scene.sides[0];
    Frame {
        link: ([2; 6], [4; 6]),
        from: own.local,
        to: own.remote,
        seq: own.written,
        ack: own.expects.wrapping_add(more),
        flags: ACK,
        payload,
        ..Frame::BARE
    }
}

/// The socket would take a copy that stands before what it has acknowledged for an old packet, and never learn what its peer has.
#[test]
fn a_copy_stands_where_the_socket_has_acknowledged_and_acknowledges_what_it_has_sent() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        for v6 in [false, true] {
            let scene = Scene::joining(v6);
            let out = scene.memory.program_out().expect("the kernel takes it");
            let own = scene.sides[0];
            let acknowledges = |bytes: u32| {
                // What the client has sent meanwhile went past the socket; so did what it acknowledges beyond.
                let frame = Frame {
                    ack: own.written.wrapping_add(1_000_000),
                    ..scene.frame(0, [70_000, 0], ACK, b"on")
                };
                let trial = scene.program.try_marked(&frame.bytes(), scene.index, COPY).expect("tried");
                assert_eq!(trial.verdict, LEFT);
                let shown = Frame {
                    seq: own.expects.wrapping_add(bytes),
                    ack: own.written.wrapping_add(bytes / 100),
                    payload: b"",
                    ..frame
                };
                assert_eq!(trial.packet, shown.bytes());
            };
            acknowledges(0);
            let sent = of_socket(&scene, 500, b"five!");
            assert_eq!(out.try_on(&sent.bytes(), scene.index).expect("tried").verdict, LEFT);
            acknowledges(500);
            // An older one, sent again: nothing goes back.
            let old = of_socket(&scene, 0, b"");
            assert_eq!(out.try_on(&old.bytes(), scene.index).expect("tried").verdict, LEFT);
            acknowledges(500);
            // Nothing of this host's leaves once no socket has the flow.
            assert!(scene.memory.wired(scene.id));
            assert_eq!(out.try_on(&sent.bytes(), scene.index).expect("tried").verdict, DROPPED);
        }
    });
}

#[test]
fn a_flow_that_is_stopped_loses_its_packets_and_goes_on() {
    tried(|scene| {
        let out = scene.memory.program_out().expect("the kernel takes it");
        let usual = scene.frame(0, [0, 0], ACK, b"x");
        assert!(scene.memory.hold(scene.id).expect("stopped"));
        assert!(!scene.memory.hold(scene.id).expect("no error"), "it is stopped already");
        assert_eq!(scene.verdict(&usual), DROPPED);
        assert_eq!(scene.memory.look(scene.id)[0].standing.sent, NEXT[0], "its numbers stand still");
        let own = of_socket(&scene, 0, b"late");
        assert_eq!(out.try_on(&own.bytes(), scene.index).expect("tried").verdict, DROPPED);
        scene.memory.go_on(scene.id);
        scene.passes(usual);
    });
}

#[test]
fn a_new_socket_is_shown_acknowledgements_of_no_more_than_it_has_sent() {
    tried(|scene| {
        let out = scene.memory.program_out().expect("the kernel takes it");
        // The client has got 1000 bytes of the server, and has acknowledged none of them.
        scene.passes(scene.frame(1, [0, 0], ACK, &[7; 1000]));
        assert!(scene.memory.hold(scene.id).expect("stopped"));
        let options = scene.memory.options(scene.id).expect("known");
        assert_eq!(options, scene.sides[0].options);
        let begin = wire::back(&scene.memory.stands(scene.id), options, 0);
        let client = begin[0];
        assert_eq!(client.passed.wrapping_sub(client.sends), 1000);
        scene.memory.leave(scene.id, &begin);
        let passed = begin.map(|one| one.passed);
        let shown = |bytes: u32, shown: u32| {
            let frame =
                Frame { ack: client.sends.wrapping_add(bytes), ..scene.frame(0, [0, 0], ACK, b"data") };
            let trial = scene.program.try_on(&frame.bytes(), scene.index).expect("tried");
            assert_eq!(trial.verdict, LEFT);
            let expected = Frame { ack: client.sends.wrapping_add(shown), ..frame };
            assert_eq!(trial.packet, expected.bytes(), "{bytes}");
        };
        shown(0, 0);
        shown(1000, 0);
        // The socket sends again what the server has sent again: 600 bytes of it.
        let sent = Frame { seq: client.sends, ..of_socket(&scene, 0, &[7; 600]) };
        assert_eq!(out.try_on(&sent.bytes(), scene.index).expect("tried").verdict, LEFT);
        shown(1000, 600);
        shown(500, 500);
        assert!(!scene.memory.has_left(scene.id, passed));
        let rest = Frame { seq: client.sends.wrapping_add(600), ..of_socket(&scene, 0, &[7; 400]) };
        assert_eq!(out.try_on(&rest.bytes(), scene.index).expect("tried").verdict, LEFT);
        shown(1000, 1000);
        assert!(scene.memory.has_left(scene.id, passed));
    });
}

#[test]
fn a_new_connection_between_the_ends_of_a_flow_that_leaves_is_left_alone() {
    tried(|scene| {
        scene.passes(scene.frame(1, [0, 0], ACK, &[7; 1000]));
        assert!(scene.memory.hold(scene.id).expect("stopped"));
        let options = scene.memory.options(scene.id).expect("known");
        let begin = wire::back(&scene.memory.stands(scene.id), options, 0);
        scene.memory.leave(scene.id, &begin);
        assert_eq!(scene.verdict(&scene.frame(0, [0, 0], SYN, b"")), LEFT);
        assert!(scene.memory.has_left(scene.id, begin.map(|one| one.passed)));
        let far = scene.frame(0, [0, 500_000], ACK, b"");
        let trial = scene.program.try_on(&far.bytes(), scene.index).expect("tried");
        assert_eq!((trial.verdict, trial.packet), (LEFT, far.bytes()));
    });
}
