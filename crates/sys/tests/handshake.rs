//! Server handshakes that the XDP program finishes: each frame is tried on the program, without any traffic.

#[path = "support/frames.rs"]
mod frames;

use frames::{ACK, CLIENT_LINK, FIN, Frame, OWN_LINK, PASS, REDIRECT, RST, SERVER_LINK, SYN};
use sidetrack_core::engine::{Handshake, Standing};
use sidetrack_sys::bpf::{OffloadMemory, OffloadPart, OffloadSide, Offloaded, Program, monotonic_ns};
use sidetrack_sys::link;
use sidetrack_testkit::{in_namespace, is_root};
use std::sync::Arc;

/// After the client's first bytes, and what the engine's SYN to the server had.
const CLIENT: u32 = 0xffff_fffd;
const SYN_NUMBER: u32 = 0x8000_0000;
/// Our number towards the client, and the server's.
const SHOWN: u32 = 77;
const SERVER: u32 = 5000;
const CLIENT_STAMP: u32 = 900;
const PSH: u8 = 8;

struct Scene {
    part: OffloadPart,
    program: Program,
    index: u32,
    sides: [OffloadSide; 2],
    /// The worker's time begins a second ago.
    behind_ns: u64,
}

/// What was offered, and what the answer has.
#[derive(Clone, Copy, Debug)]
struct Options {
    stamps: bool,
    sack: bool,
    scale: bool,
}

const BARE: Options = Options { stamps: false, sack: false, scale: false };
const ALL: Options = Options { stamps: true, sack: true, scale: true };

impl Options {
    fn bytes(self, mss: u16, stamp: u32) -> Vec<u8> {
        let mut bytes = [&[2, 4][..], &mss.to_be_bytes()].concat();
        if self.sack {
            bytes.extend([1, 1, 4, 2]);
        }
        if self.stamps {
            bytes.extend([&[1, 1, 8, 10][..], &stamp.to_be_bytes(), &[0; 4]].concat());
        }
        if self.scale {
            bytes.extend([1, 3, 3, 9]);
        }
        bytes
    }
}

fn scene(v6: bool, memory: &Arc<OffloadMemory>) -> Scene {
    let [client, local, server, source] = frames::addresses(v6);
    let index = link::interface("lo").expect("there").index;
    let program = frames::program(
        |own| own.try_offload_by_xdp(memory).expect("the kernel takes it"),
        Some(local.ip()),
        source.ip(),
    );
    let side = |remote, local, to, standing| OffloadSide {
        remote,
        local,
        add: 0,
        stamp_add: 0,
        stamp_first: 0,
        egress: index,
        to,
        from: OWN_LINK,
        mss: 1448,
        shift: 0,
        shown_shift: 0,
        finished: false,
        standing,
    };
    let stands =
        Standing { sent: CLIENT, acknowledged: SHOWN + 1, edge: SHOWN + 60_000, stamp: CLIENT_STAMP };
    let syn_sent = Standing { acknowledged: SYN_NUMBER + 1, ..Standing::default() };
    let mut client = side(client, local, CLIENT_LINK, stands);
    client.add = (SYN_NUMBER + 6).wrapping_sub(CLIENT);
    client.stamp_first = CLIENT_STAMP;
    let sides = [client, side(server, source, SERVER_LINK, syn_sent)];
    Scene { part: memory.part(0), program, index, sides, behind_ns: monotonic_ns() - 1_000_000_000 }
}

impl Scene {
    /// The frame with these first bytes, as the server is to get it.
    fn first<'a>(&self, ack: u32, payload: &'a [u8], options: &'a [u8]) -> Frame<'a> {
        let [_, server] = &self.sides;
        Frame {
            link: (server.to, OWN_LINK),
            from: server.local,
            to: server.remote,
            seq: SYN_NUMBER + 1,
            ack,
            flags: ACK | PSH,
            payload,
            options,
            finished: true,
            ..Frame::BARE
        }
    }

    fn begin_handshake(&mut self, offered: Options, needs: u16, payload: &[u8]) -> Option<Offloaded> {
        let stamps = [&[1, 1, 8, 10][..], &[0; 8]].concat();
        let frame = self.first(0, payload, if offered.stamps { &stamps } else { &[] }).bytes();
        let handshake = Handshake {
            clock: 10,
            acknowledges: SYN_NUMBER + 1,
            shown: SHOWN,
            timestamps: offered.stamps,
            sack: offered.sack,
            window_scale: offered.scale,
            needs,
            packet: &frame[14..],
        };
        let sides = self.sides;
        self.part.begin_handshake(&sides, &handshake, self.behind_ns)
    }

    /// The server's answer.
    fn answer<'a>(&self, options: &'a [u8]) -> Frame<'a> {
        let [_, server] = &self.sides;
        Frame {
            link: (OWN_LINK, server.to),
            from: server.remote,
            to: server.local,
            seq: SERVER,
            ack: SYN_NUMBER + 1,
            flags: SYN | ACK,
            options,
            ..Frame::BARE
        }
    }

    fn verdict(&self, frame: &Frame<'_>) -> u32 {
        self.program.try_on(&frame.bytes(), self.index).expect("tried").verdict
    }

    fn forget(&mut self, offloaded: Offloaded) {
        self.part.take_back(offloaded);
        self.part.forget(offloaded);
    }
}

/// From here on it is offloaded: a byte of the server's passes, and the client's answer, which was user space's before.
fn is_offloaded(scene: &Scene, offloaded: Offloaded, usual: &Frame<'_>) {
    let [client, server] = scene.sides;
    let data = Frame {
        seq: SERVER + 1,
        ack: SYN_NUMBER + 6,
        flags: ACK,
        options: &[],
        payload: b"y",
        ..scene.answer(&[])
    };
    let trial = scene.program.try_on(&data.bytes(), scene.index).expect("tried");
    assert_eq!(trial.verdict, REDIRECT);
    let shown = Frame {
        link: (client.to, OWN_LINK),
        from: client.local,
        to: client.remote,
        seq: SHOWN + 1,
        ack: CLIENT,
        ttl: 63,
        finished: true,
        ..data
    };
    assert_eq!(trial.packet, shown.bytes());
    assert_eq!(scene.verdict(&Frame { ack: SHOWN + 2, ..*usual }), REDIRECT);
    let [_, seen] = scene.part.look(offloaded);
    assert_eq!((seen.sent, seen.packets), (1 << 32 | u64::from(SERVER + 2), 1));
    assert_eq!(server.mss, 1448);
}

#[test]
fn the_answer_becomes_the_frame_with_the_first_bytes() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        in_namespace(move || {
            let mut scene = scene(v6, &Arc::new(OffloadMemory::new(4, 1, 99).expect("maps")));
            // Shorter than the answer, as long, longer by what fits before, and by more.
            for (offered, length) in
                [(ALL, 5), (ALL, 8), (BARE, 5), (BARE, 1), (ALL, 199), (BARE, 600), (ALL, 850)]
            {
                for finished in [false, true] {
                    let payload = vec![0x5a; length];
                    let offloaded = scene.begin_handshake(offered, 900, &payload).expect("room");
                    assert_eq!(scene.part.syn_ack(offloaded, scene.behind_ns), None);
                    // The client's are user space's as yet.
                    let [client, _] = scene.sides;
                    let usual = Frame {
                        link: (OWN_LINK, client.to),
                        from: client.remote,
                        to: client.local,
                        seq: CLIENT,
                        ack: SHOWN + 1,
                        flags: ACK,
                        payload: b"x",
                        ..Frame::BARE
                    };
                    assert_eq!(scene.verdict(&usual), PASS);
                    let options = offered.bytes(1400, 12_345);
                    let frame = Frame { finished, ..scene.answer(&options) };
                    let trial = scene.program.try_on(&frame.bytes(), scene.index).expect("tried");
                    assert_eq!(trial.verdict, REDIRECT, "{offered:?} {length}");
                    let behind_ns = scene.behind_ns;
                    let syn_ack = scene.part.syn_ack(offloaded, behind_ns).expect("taken");
                    let clock = syn_ack.clock;
                    let ms = syn_ack.at.as_nanos() / 1_000_000;
                    // The time is a coarse one.
                    assert!(u64::from(clock) >= ms + 10 && u64::from(clock) < ms + 60);
                    assert_eq!(syn_ack.number, SERVER);
                    assert_eq!(
                        (syn_ack.mss, syn_ack.shift, syn_ack.stamp),
                        (1400, if offered.scale { 9 } else { 0 }, if offered.stamps { 12_345 } else { 0 })
                    );
                    let stamps =
                        [&[1, 1, 8, 10][..], &clock.to_be_bytes(), &12_345_u32.to_be_bytes()].concat();
                    let expected =
                        scene.first(SERVER + 1, &payload, if offered.stamps { &stamps } else { &[] }).bytes();
                    assert_eq!(trial.packet, expected, "{offered:?} {length}");
                    is_offloaded(&scene, offloaded, &usual);
                    scene.forget(offloaded);
                }
            }
        });
    }
}

#[test]
fn an_answer_that_is_not_as_was_asked_is_user_spaces() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let mut scene = scene(false, &Arc::new(OffloadMemory::new(4, 1, 99).expect("maps")));
        let offloaded = scene.begin_handshake(ALL, 1000, b"hello").expect("room");
        let all = ALL.bytes(1400, 5);
        let usual = scene.answer(&all);
        let [bare, no_sack, no_stamps, no_scale] = [
            BARE,
            Options { sack: false, ..ALL },
            Options { stamps: false, ..ALL },
            Options { scale: false, ..ALL },
        ]
        .map(|options| options.bytes(1400, 5));
        let (small, odd) = (ALL.bytes(999, 5), [&all[..], &[8, 12, 0, 0]].concat());
        for frame in [
            Frame { ack: SYN_NUMBER, ..usual },
            Frame { flags: SYN, ..usual },
            Frame { flags: ACK, ..usual },
            Frame { flags: SYN | ACK | RST, ..usual },
            Frame { flags: SYN | ACK | FIN, ..usual },
            Frame { payload: b"x", ..usual },
            Frame { options: &bare, ..usual },
            Frame { options: &no_sack, ..usual },
            Frame { options: &no_stamps, ..usual },
            Frame { options: &no_scale, ..usual },
            Frame { options: &small, ..usual },
            Frame { options: &odd, ..usual },
        ] {
            assert_eq!(scene.verdict(&frame), PASS, "{frame:?}");
            assert_eq!(scene.part.syn_ack(offloaded, scene.behind_ns), None);
            assert!(!scene.part.is_returned(offloaded));
        }
        let mut wrong = Frame { finished: true, ..usual }.bytes();
        wrong[14 + 20 + 17] ^= 1;
        assert_eq!(scene.program.try_on(&wrong, scene.index).expect("tried").verdict, PASS, "its checksum");
        // Called back, the right one is user space's, too.
        scene.part.take_back(offloaded);
        assert_eq!(scene.verdict(&usual), PASS);
        assert_eq!(scene.part.syn_ack(offloaded, scene.behind_ns), None);
        scene.part.forget(offloaded);
        // Once only.
        let offloaded = scene.begin_handshake(ALL, 1000, b"hello").expect("room");
        assert_eq!(scene.verdict(&usual), REDIRECT);
        assert_eq!(scene.verdict(&usual), PASS, "the second is for whoever knows that it is one");
        assert!(
            !scene.part.is_returned(offloaded) && scene.part.syn_ack(offloaded, scene.behind_ns).is_some()
        );
    });
}

#[test]
fn a_connection_that_finds_no_room_is_not_asked_for() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let mut scene = scene(false, &Arc::new(OffloadMemory::new(2, 1, 99).expect("maps")));
        assert_eq!(scene.begin_handshake(ALL, 1000, &[0; 1000]), None, "more than a handshake has room for");
        let first = scene.begin_handshake(ALL, 10, b"hello").expect("room");
        // The same ends are found twice: the newer one stands behind.
        let second = scene.begin_handshake(ALL, 10, b"hello").expect("room");
        assert_eq!(scene.begin_handshake(ALL, 10, b"hello"), None);
        scene.forget(first);
        scene.forget(second);
        for _ in 0..10 {
            let offloaded = scene.begin_handshake(ALL, 10, b"hello").expect("what was to_user back");
            scene.forget(offloaded);
        }
    });
}
