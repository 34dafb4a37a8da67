//! Offloaded connections in XDP: each packet is tried on the program, without any traffic.

#[path = "support/frames.rs"]
mod frames;

use frames::{ACK, CLIENT_LINK, FIN, Frame, OWN_LINK, PASS, REDIRECT, RST, SERVER_LINK, SYN};
use sidetrack_core::engine::{Fin, Standing};
use sidetrack_sys::bpf::{OffloadMemory, OffloadPart, OffloadSide, Offloaded, Program};
use sidetrack_sys::link;
use sidetrack_testkit::{in_namespace, is_root};
use std::sync::Arc;

/// What is added to numbers and time stamps of either side, the client first: the circle is crossed.
const ADD: [u32; 2] = [0xffff_fff0, 1_000_000];
const STAMP_ADD: [u32; 2] = [77, 0xffff_fffe];
/// Where both sides stand.
const CLIENT: u32 = 0xffff_fffd;
const SERVER: u32 = 5000;

struct Scene {
    part: OffloadPart,
    offloaded: Offloaded,
    program: Program,
    index: u32,
    sides: [OffloadSide; 2],
}

fn scene(v6: bool) -> Scene {
    scene_of(v6, &Arc::new(OffloadMemory::new(4, 1, 99).expect("maps")), 0)
}

fn scene_of(v6: bool, memory: &Arc<OffloadMemory>, worker: u32) -> Scene {
    let [client, local, server, source] = frames::addresses(v6);
    let index = link::interface("lo").expect("there").index;
    let program = frames::program(
        |own| own.try_offload_by_xdp(memory).expect("the kernel takes it"),
        Some(local.ip()),
        source.ip(),
    );
    let side = |at: usize, remote, local, to, standing| OffloadSide {
        remote,
        local,
        add: ADD[at],
        stamp_add: STAMP_ADD[at],
        stamp_first: 10,
        egress: index,
        to,
        from: OWN_LINK,
        mss: 1448,
        shift: 2,
        shown_shift: 2,
        finished: false,
        standing,
    };
    let numbers = |sent: u32, acknowledged: u32| Standing {
        sent,
        acknowledged,
        edge: acknowledged.wrapping_add(0xffff << 2),
        stamp: 0,
    };
    // Each sees the other's numbers as they are shown to it.
    let sides = [
        side(0, client, local, CLIENT_LINK, numbers(CLIENT, SERVER.wrapping_add(ADD[1]))),
        side(1, server, source, SERVER_LINK, numbers(SERVER, CLIENT.wrapping_add(ADD[0]))),
    ];
    let mut part = memory.part(worker);
    let offloaded = part.offload(&sides).expect("room");
    Scene { part, offloaded, program, index, sides }
}

impl Scene {
    /// A frame of a side. `before` is the number of bytes that each side has sent earlier.
    fn frame<'a>(&self, from: usize, before: [u32; 2], flags: u8, payload: &'a [u8]) -> Frame<'a> {
        let (own, other) = (&self.sides[from], &self.sides[from ^ 1]);
        Frame {
            link: (OWN_LINK, own.to),
            from: own.remote,
            to: own.local,
            seq: own.standing.sent.wrapping_add(before[from]),
            ack: other.standing.sent.wrapping_add(ADD[from ^ 1]).wrapping_add(before[from ^ 1]),
            flags,
            payload,
            ..Frame::BARE
        }
    }

    fn up<'a>(&self, before: [u32; 2], flags: u8, payload: &'a [u8]) -> Frame<'a> {
        self.frame(0, before, flags, payload)
    }

    fn down<'a>(&self, before: [u32; 2], flags: u8, payload: &'a [u8]) -> Frame<'a> {
        self.frame(1, before, flags, payload)
    }

    fn verdict(&self, frame: &Frame<'_>) -> u32 {
        self.program.try_on(&frame.bytes(), self.index).expect("tried").verdict
    }

    /// It is passed on with these options, and exactly so.
    fn passes_with(&self, frame: Frame<'_>, options: &[u8]) {
        let trial = self.program.try_on(&frame.bytes(), self.index).expect("tried");
        assert_eq!(trial.verdict, REDIRECT, "{:x} {}", frame.flags, frame.seq);
        let at = usize::from(frame.from != self.sides[0].remote);
        let other = &self.sides[at ^ 1];
        let expected = Frame {
            link: (other.to, OWN_LINK),
            from: other.local,
            to: other.remote,
            seq: frame.seq.wrapping_add(ADD[at]),
            ack: frame.ack.wrapping_sub(ADD[at ^ 1]),
            options,
            ttl: 63,
            finished: true,
            ..frame
        };
        assert_eq!(trial.packet, expected.bytes());
    }

    fn passes(&self, frame: Frame<'_>) {
        self.passes_with(frame, &[]);
    }
}

#[test]
fn a_connection_passes_from_its_first_answer_to_its_last_fin() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        in_namespace(move || {
            let mut scene = scene(v6);
            // An acknowledgement waits for user space to hold it, until the other side is the program's.
            assert_eq!(scene.verdict(&scene.up([0, 0], ACK, b"")), PASS);
            scene.passes(Frame { finished: false, ..scene.down([0, 0], ACK, &[0x5a; 1399]) });
            scene.passes(scene.up([0, 1399], ACK, b""));
            scene.passes(scene.up([0, 1399], ACK, b"more"));
            scene.passes(scene.down([4, 1399], FIN | ACK, b"end"));
            assert_eq!(scene.part.over(), None);
            scene.passes(scene.up([4, 1403], FIN | ACK, b""));
            scene.passes(scene.down([4, 1403], ACK, b""));
            assert_eq!(scene.part.over(), None, "not all is acknowledged");
            scene.passes(scene.down([5, 1403], ACK, b""));
            assert_eq!((scene.part.over(), scene.part.over()), (Some(scene.offloaded), None), "once");
            let [client, server] = scene.part.look(scene.offloaded);
            let fin = |end: u32, is_second| Some(Fin { end, is_second });
            assert_eq!(
                (client.fin, server.fin),
                (fin(CLIENT.wrapping_add(5), true), fin(SERVER + 1403, false))
            );
            assert_eq!((client.sent - (1 << 32), client.packets), (u64::from(CLIENT) + 5, 3));
            assert_eq!((server.standing.sent, server.packets), (SERVER + 1403, 4));
            assert_eq!(client.standing.acknowledged, (SERVER + 1403).wrapping_add(ADD[1]));
            assert!(!scene.part.is_returned(scene.offloaded));
            // What comes late passes until it is taken back.
            scene.passes(scene.up([4, 1403], FIN | ACK, b""));
            assert_eq!(scene.part.over(), None);
            scene.part.take_back(scene.offloaded);
            assert_eq!(scene.verdict(&scene.up([4, 1403], FIN | ACK, b"")), PASS);
            scene.part.forget(scene.offloaded);
            assert_eq!(scene.part.offload(&scene.sides), Some(scene.offloaded), "its place is free");
            assert_eq!(scene.part.look(scene.offloaded)[0].fin, None);
        });
    }
}

#[test]
fn time_stamps_and_sack_blocks_are_translated() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        in_namespace(move || {
            let scene = scene(v6);
            let stamps = |value: u32, echo: u32| {
                [&[1, 1, 8, 10][..], &value.to_be_bytes(), &echo.to_be_bytes()].concat()
            };
            let theirs = stamps(500, 300);
            let shown = stamps(500_u32.wrapping_add(STAMP_ADD[1]), 300 - STAMP_ADD[0]);
            scene.passes_with(Frame { options: &theirs, ..scene.down([0, 0], ACK, b"answer") }, &shown);
            // Never an echo from before the first.
            let (theirs, shown) = (stamps(9, 0), stamps(9 + STAMP_ADD[0], 10));
            scene.passes_with(Frame { options: &theirs, ..scene.up([0, 6], ACK, b"x") }, &shown);
            for blocks in 1..=3_u32 {
                let sack = |add: u32| {
                    let mut options = vec![1, 1, 5, 2 + 8 * blocks as u8];
                    for edge in 0..blocks * 2 {
                        options.extend(SERVER.wrapping_add(100 + edge * 10).wrapping_add(add).to_be_bytes());
                    }
                    options
                };
                let (theirs, shown) = (sack(ADD[1]), sack(0));
                scene.passes_with(Frame { options: &theirs, ..scene.up([1, 6], ACK, b"") }, &shown);
                let both = |stamps: &[u8], sack: &[u8]| [stamps, sack].concat();
                let (theirs, shown) =
                    (both(&stamps(50, 520), &theirs), both(&stamps(50 + STAMP_ADD[0], 522), &shown));
                scene.passes_with(Frame { options: &theirs, ..scene.up([1, 6], ACK, b"") }, &shown);
            }
        });
    }
}

#[test]
fn a_side_is_the_programs_from_the_byte_that_user_space_has_reached() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let scene = scene(false);
        // One that was lost before user space: what follows goes there, too, and is counted.
        for before in [10, 15] {
            assert_eq!(scene.verdict(&scene.down([0, before], ACK, b"later")), PASS);
        }
        let to_user =
            |scene: &Scene| scene.part.look(scene.offloaded).map(|seen| (seen.to_user, seen.joined));
        assert_eq!(to_user(&scene), [(0, false), (2, false)]);
        // User space gets the first, and sends on all three.
        let [_, server] = &scene.sides;
        let sent = Standing { sent: SERVER + 20, ..server.standing };
        scene.part.advance(scene.offloaded, 1, &sent);
        scene.passes(scene.down([0, 20], ACK, b"next"));
        assert_eq!(to_user(&scene), [(0, false), (2, true)]);
        // From now on in any order.
        scene.passes(scene.down([0, 40], ACK, b"far"));
        scene.passes(scene.down([0, 20], ACK, b"next"));
        // A FIN alone is as good as a byte.
        scene.passes(scene.up([0, 43], FIN | ACK, b""));
        assert_eq!(to_user(&scene), [(0, true), (2, true)]);
    });
}

#[test]
fn the_rest_is_user_spaces() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let scene = scene(false);
        scene.passes(scene.down([0, 0], ACK, b"answer"));
        let usual = scene.up([0, 6], ACK, b"x");
        let stays = [
            Frame { flags: SYN, ..usual },
            Frame { flags: 0, ..usual },
            Frame { ttl: 1, ..usual },
            Frame { seq: usual.seq.wrapping_add(0x10_0000), ..usual },
            Frame { ack: usual.ack.wrapping_add(1), ..usual },
            Frame { from: "10.0.1.1:4001".parse().expect("an address"), ..usual },
        ];
        for frame in &stays {
            assert_eq!(scene.verdict(frame), PASS, "{:x} {}", frame.flags, frame.seq);
            assert!(!scene.part.is_returned(scene.offloaded));
        }
        scene.passes(usual);
        // And all that comes after one of these.
        let large = [0; 1449];
        let returns: [fn(Frame<'_>) -> Frame<'_>; 2] = [
            |usual| Frame { flags: RST | ACK, ..usual },
            |usual| Frame { options: &[2, 4, 5, 0xb4], ..usual },
        ];
        for change in returns {
            let mut scene = self::scene(false);
            scene.passes(scene.down([0, 0], ACK, b"answer"));
            assert_eq!(scene.verdict(&change(scene.up([0, 6], ACK, b"x"))), PASS);
            assert!(scene.part.is_returned(scene.offloaded));
            assert_eq!(scene.verdict(&scene.up([0, 6], ACK, b"x")), PASS);
            assert_eq!(scene.part.over(), None);
        }
        let scene = self::scene(false);
        assert_eq!(scene.verdict(&scene.up([0, 0], ACK, &large)), PASS);
        assert!(scene.part.is_returned(scene.offloaded), "more than the receiver takes");
    });
}

#[test]
fn each_worker_hears_of_its_own() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let memory = Arc::new(OffloadMemory::new(8, 2, 99).expect("maps"));
        let mut other = memory.part(0);
        let mut scene = scene_of(false, &memory, 1);
        for round in 0..20 {
            scene.passes(scene.down([0, 0], FIN | ACK, b""));
            scene.passes(scene.up([0, 1], FIN | ACK, b""));
            scene.passes(scene.down([1, 1], ACK, b""));
            assert_eq!((other.over(), scene.part.over()), (None, Some(scene.offloaded)), "round {round}");
            scene.part.take_back(scene.offloaded);
            scene.part.forget(scene.offloaded);
            scene.offloaded = scene.part.offload(&scene.sides).expect("room");
        }
        // Who comes after a fault begins with an empty ring, and none of the connections.
        scene.passes(scene.down([0, 0], FIN | ACK, b""));
        scene.passes(scene.up([0, 1], FIN | ACK, b""));
        scene.passes(scene.down([1, 1], ACK, b""));
        let next = memory.part(1);
        scene.part = next;
        assert_eq!(scene.part.over(), None);
        assert_eq!(scene.verdict(&scene.down([1, 1], ACK, b"")), PASS);
    });
}
