//! Whole connections in XDP: each packet of a connection is tried on the program, without any traffic.

#[path = "support/frames.rs"]
mod frames;

use frames::{ACK, CLIENT_LINK, DROP, FIN, Frame, OWN_LINK, PASS, REDIRECT, RST, SERVER_LINK, SYN};
use sidetrack_sys::bpf::{DecidedKey, DecidedMemory, DecidedReason, DecidedRoute, DecidedState, Program};
use sidetrack_sys::link;
use sidetrack_testkit::{in_namespace, is_root};
use std::net::SocketAddr;
use std::sync::Arc;

struct Scene {
    decided: Arc<DecidedMemory>,
    program: Program,
    index: u32,
    client: SocketAddr,
    local: SocketAddr,
    server: SocketAddr,
    source: SocketAddr,
}

fn scene(v6: bool) -> Scene {
    scene_of(v6, 4, 2)
}

fn scene_of(v6: bool, count: u32, buckets: u32) -> Scene {
    let [client, local, server, source] = frames::addresses(v6);
    let index = link::interface("lo").expect("there").index;
    let decided = Arc::new(DecidedMemory::with_buckets(61_000, count, buckets, 99).expect("a decided"));
    decided.device(0, index).expect("an entry");
    decided
        .decide(
            &DecidedKey { client: client.ip(), local },
            &DecidedRoute {
                generation: 1,
                number: 7,
                server,
                source: source.ip(),
                egress: 0,
                to: SERVER_LINK,
                from: OWN_LINK,
            },
        )
        .expect("an entry");
    let program = frames::program(
        |own| own.try_decided(&decided).expect("the kernel takes it"),
        Some(local.ip()),
        source.ip(),
    );
    Scene { decided, program, index, client, local, server, source }
}

impl Scene {
    fn up<'a>(&self, seq: u32, ack: u32, flags: u8, payload: &'a [u8]) -> Frame<'a> {
        let link = (OWN_LINK, CLIENT_LINK);
        Frame { link, from: self.client, to: self.local, seq, ack, flags, payload, ..Frame::BARE }
    }

    fn down<'a>(&self, seq: u32, ack: u32, flags: u8, payload: &'a [u8]) -> Frame<'a> {
        let link = (OWN_LINK, SERVER_LINK);
        Frame { link, from: self.server, to: self.source, seq, ack, flags, payload, ..Frame::BARE }
    }

    fn verdict(&self, frame: &Frame<'_>) -> u32 {
        self.program.try_on(&frame.bytes(), self.index).expect("tried").verdict
    }

    /// It is passed on, and exactly so: only addresses, ports, one hop and checksums differ.
    fn passes(&self, frame: Frame<'_>) {
        let trial = self.program.try_on(&frame.bytes(), self.index).expect("tried");
        assert_eq!(trial.verdict, REDIRECT, "{:x} {}", frame.flags, frame.seq);
        let is_client = frame.from == self.client;
        let expected = Frame {
            link: (if is_client { SERVER_LINK } else { CLIENT_LINK }, OWN_LINK),
            from: if is_client { self.source } else { self.local },
            to: if is_client { self.server } else { self.client },
            ttl: 63,
            finished: true,
            ..frame
        };
        assert_eq!(trial.packet, expected.bytes());
    }

    fn open(&self) {
        self.passes(self.up(100, 0, SYN, b""));
        self.passes(self.down(u32::MAX, 101, SYN | ACK, b""));
        self.passes(self.up(101, 0, ACK, b""));
    }
}

#[test]
fn a_whole_connection_passes_and_leaves_its_counts() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        in_namespace(move || {
            let scene = scene(v6);
            scene.open();
            scene.passes(scene.up(101, 0, ACK, b"request"));
            scene.passes(Frame { finished: false, ..scene.down(0, 108, ACK, &[0x5a; 1399]) });
            scene.passes(scene.up(101, 1399, ACK, b"request"));
            scene.passes(scene.down(1399, 108, FIN | ACK, b"end"));
            assert_eq!(scene.decided.ended(), None);
            scene.passes(scene.up(108, 1403, FIN | ACK, b""));
            scene.passes(scene.down(1403, 108, ACK, b""));
            assert_eq!(scene.decided.ended(), None, "not all is acknowledged");
            scene.passes(scene.down(1403, 109, ACK, b""));
            let closing = scene.decided.ended().expect("over");
            let flow = scene.decided.look(closing);
            assert_eq!((flow.state, flow.reason, flow.number), (DecidedState::Closed, DecidedReason::Ok, 7));
            assert_eq!(flow.sides.map(|side| (side.bytes, side.packets)), [(7, 5), (1402, 5)]);
            assert_eq!((flow.client, flow.local), (scene.client, scene.local));
            assert_eq!((flow.server, flow.source), (scene.server, scene.source));
            assert_eq!((flow.sides[0].to, flow.sides[1].to), (CLIENT_LINK, SERVER_LINK));
            assert!(flow.opened_ns <= flow.connected_ns && flow.connected_ns <= flow.closed_ns);
            // What comes late passes until the slot is free again; the next connection has another one.
            scene.passes(scene.up(108, 1403, FIN | ACK, b""));
            assert_eq!(scene.decided.free(), 3);
            assert_eq!(scene.verdict(&scene.up(900, 0, SYN, b"")), REDIRECT);
            scene.decided.release(closing);
            assert_eq!(scene.decided.free(), 3);
            let next = scene.decided.standing(1).expect("the next");
            assert_eq!(scene.decided.look(next).state, DecidedState::Syn);
            assert_eq!(scene.verdict(&scene.up(900, 0, SYN, b"")), REDIRECT, "still found");
            assert_eq!(scene.decided.free(), 3);
        });
    }
}

#[test]
fn ends_have_reasons() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        type End = fn(&Scene) -> Frame<'static>;
        let ends: [(bool, End, DecidedReason); 4] = [
            (true, |scene| scene.up(101, 0, RST, b""), DecidedReason::ClientReset),
            (true, |scene| scene.down(0, 101, RST | ACK, b""), DecidedReason::ServerReset),
            (false, |scene| scene.down(0, 101, RST | ACK, b""), DecidedReason::Refused),
            (false, |scene| scene.up(101, 0, RST, b""), DecidedReason::ClientReset),
        ];
        for (opened, end, reason) in ends {
            let scene = scene(false);
            if opened {
                // An attempt that the client has given up.
                scene.passes(scene.up(70_000, 0, SYN, b""));
                scene.open();
                scene.passes(scene.up(100_000, 0, RST, b""));
                scene.passes(scene.down(77, 101, RST | ACK, b""));
                assert_eq!(scene.decided.ended(), None, "a guess is passed on, and ends nothing");
            } else {
                scene.passes(scene.up(100, 0, SYN, b""));
            }
            scene.passes(end(&scene));
            let closing = scene.decided.ended().expect("over");
            assert_eq!(scene.decided.look(closing).reason, reason);
            assert!(!scene.decided.kill(closing), "over already");
        }
    });
}

#[test]
fn what_is_not_certain_is_left_to_user_space() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let scene = scene(false);
        let mut other = scene.up(100, 0, SYN, b"");
        other.from = "10.0.1.2:4000".parse().expect("an address");
        assert_eq!(scene.verdict(&other), PASS, "no decision");
        assert_eq!(scene.verdict(&scene.up(101, 1, ACK, b"x")), PASS, "no connection");
        assert_eq!(scene.verdict(&scene.down(1, 101, SYN | ACK, b"")), PASS);
        scene.decided.renew(2);
        assert_eq!(scene.verdict(&scene.up(100, 0, SYN, b"")), PASS, "other rules");
        scene.decided.renew(1);
        assert_eq!((scene.decided.free(), scene.decided.counts().full), (4, 0));
        scene.open();
        let good = scene.up(101, 0, ACK, b"request").bytes();
        let broken: [(&str, usize, u8); 8] = [
            ("IP options", 14, 0x46),
            ("a fragment", 20, 0x20),
            ("a later fragment", 21, 1),
            ("no TCP", 23, 17),
            ("the last hop", 22, 1),
            ("longer than its frame", 16, 9),
            ("shorter than its header", 17, 30),
            ("a short header", 46, 0x40),
        ];
        for (what, at, byte) in broken {
            let mut frame = good.clone();
            frame[at] = byte;
            let trial = scene.program.try_on(&frame, scene.index).expect("tried");
            assert_eq!((trial.verdict, trial.packet == frame), (PASS, true), "{what}");
        }
        for cut in [20, 34, 53] {
            let trial = scene.program.try_on(&good[..cut], scene.index).expect("tried");
            assert_eq!(trial.verdict, PASS, "cut at {cut}");
        }
        // Impossible numbers go nowhere.
        assert_eq!(scene.verdict(&scene.up(101, 1, ACK, b"")), DROP, "acknowledges what was never sent");
        assert_eq!(scene.verdict(&scene.down(1 << 31, 101, ACK, b"x")), DROP, "far outside");
        assert_eq!(scene.verdict(&scene.down(5, 101, SYN | ACK, b"")), DROP, "another SYN-ACK");
        assert_eq!(scene.decided.counts().refused, 3);
        // A stranger at the server's side of it.
        let mut stranger = scene.down(0, 101, ACK, b"x");
        stranger.from = "10.0.2.2:8080".parse().expect("an address");
        assert_eq!(scene.verdict(&stranger), PASS);
        // One that user space has ended.
        let slot = scene.decided.standing(0).expect("open");
        assert!(scene.decided.kill(slot));
        assert_eq!(scene.verdict(&scene.up(101, 0, ACK, b"x")), PASS);
        assert_eq!(scene.verdict(&scene.down(0, 101, ACK, b"x")), PASS);
    });
}

#[test]
fn a_full_table_leaves_the_next_to_user_space() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let scene = scene(false);
        let from = |port: u16| {
            let mut frame = scene.up(100, 0, SYN, b"");
            frame.from.set_port(port);
            scene.verdict(&frame)
        };
        let verdicts: Vec<u32> = (0..5).map(|port| from(5000 + port)).collect();
        assert_eq!(verdicts, [REDIRECT, REDIRECT, REDIRECT, REDIRECT, PASS]);
        assert_eq!((scene.decided.free(), scene.decided.counts().full), (0, 1));
    });
}

#[test]
fn connections_that_rest_make_room() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        // One bucket of eight places, and sixteen slots.
        let scene = scene_of(false, 16, 1);
        for port in 5000..5016 {
            let mut syn = scene.up(100, 0, SYN, b"");
            syn.from.set_port(port);
            let mut reset = scene.up(101, 0, RST, b"");
            reset.from.set_port(port);
            assert_eq!(scene.verdict(&syn), REDIRECT, "{port}");
            assert_eq!(scene.verdict(&reset), REDIRECT, "{port}: it is found");
        }
        let reasons: Vec<_> =
            std::iter::from_fn(|| scene.decided.ended()).map(|end| scene.decided.end(end).reason).collect();
        assert_eq!(reasons, [DecidedReason::ClientReset; 16]);
        assert_eq!(scene.verdict(&scene.up(100, 0, SYN, b"")), PASS, "no slot");
    });
}

#[test]
fn a_client_that_user_space_serves_is_not_taken_over() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let scene = scene(false);
        // A repeated SYN of a connection that user space has answered, before there was a decision.
        scene.passes(scene.up(100, 0, SYN, b""));
        assert_eq!(scene.verdict(&scene.up(101, 5000, ACK, b"request")), PASS);
        scene.passes(scene.down(9, 101, SYN | ACK, b""));
        assert_eq!(
            scene.verdict(&scene.up(101, 5000, ACK, b"request")),
            PASS,
            "that number is not this server's"
        );
        assert_eq!(scene.decided.look(scene.decided.standing(0).expect("there")).state, DecidedState::SynAck);
    });
}
