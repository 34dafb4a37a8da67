//! SYNs that XDP answers: the program's answer is the one that the engine itself would give, and the engine takes what comes back.

#[path = "support/frames.rs"]
mod frames;

use frames::{ACK, CLIENT_LINK, FIN, Frame, OWN_LINK, PASS, REDIRECT, SYN};
use sidetrack_core::engine::{
    Callbacks, Checksums, Config, ConnectionId, Engine, Hop, Listen, Opening, Payload, Selection, Share,
};
use sidetrack_core::flow::Side;
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::{CookieSettings, Cookies, Program, monotonic_ns};
use sidetrack_sys::link;
use sidetrack_testkit::{in_namespace, is_root};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

const ETHERNET: usize = 14;
/// The engine's time when it is asked: in the middle of a cookie's step, so that it stays there.
const NOW_NS: u64 = 64_000_000_000 * 1000 + 32_000_000_000;
const ISN: u32 = 0xffff_ffff;

/// Decides nothing.
struct Nobody;

impl Callbacks for Nobody {
    fn select(&mut self, _: &Opening<'_>) -> Selection {
        Selection::Wait { wait_ms: 1000 }
    }

    fn payload(&mut self, _: ConnectionId, _: Side, _: &[u8]) -> Payload {
        Payload::Keep
    }
}

struct Scene {
    engine: Engine<Nobody>,
    program: Program,
    cookies: Arc<Cookies>,
    index: u32,
    client: SocketAddr,
    front: SocketAddr,
}

fn scene(v6: bool, any_address: bool) -> Scene {
    let [client, front, _, source] = frames::addresses(v6);
    let listen = Listen { address: Some(front.ip()), port: Some(80) };
    let sources = Share { addresses: vec![source.ip()], ports: 61_000..=61_015 };
    let seed = [1, 0x0fed_cba9_8765_4321, 0xdead_beef_0bad_cafe, 0x5ca1_ab1e_7e57_ab1e];
    let mut config = Config::new(vec![listen], sources, seed);
    // It answers with cookies itself.
    (config.syn_backlog, config.cookies_elsewhere) = (0, true);
    let engine = Engine::new(config, Nobody, Instant::from_nanos(NOW_NS));
    let cookies = Arc::new(Cookies::new(1).expect("a map"));
    let program = frames::program(
        |own| own.try_cookies(&cookies).expect("the kernel takes it"),
        (!any_address).then_some(front.ip()),
        source.ip(),
    );
    let index = link::interface("lo").expect("there").index;
    Scene { engine, program, cookies, index, client, front }
}

impl Scene {
    fn start(&self) {
        let cookies = self.engine.cookies();
        self.cookies.set(
            0,
            &CookieSettings {
                key: cookies.key,
                clock: cookies.clock,
                behind_ns: monotonic_ns().wrapping_sub(NOW_NS),
                mss: cookies.mss,
                window: cookies.window,
                shift: cookies.window_shift,
            },
        );
    }

    fn syn<'a>(&self, options: &'a [u8]) -> Frame<'a> {
        let link = (OWN_LINK, CLIENT_LINK);
        Frame { link, from: self.client, to: self.front, seq: ISN, flags: SYN, options, ..Frame::BARE }
    }

    fn verdict(&self, frame: &Frame<'_>) -> u32 {
        self.program.try_on(&frame.bytes(), self.index).expect("tried").verdict
    }

    /// What the program answers.
    fn answer(&self, frame: &Frame<'_>) -> Vec<u8> {
        let trial = self.program.try_on(&frame.bytes(), self.index).expect("tried");
        assert_eq!(trial.verdict, REDIRECT, "{:?}", frame.options);
        trial.packet
    }

    /// What the engine answers.
    fn engines(&mut self, frame: &Frame<'_>) -> Vec<u8> {
        let mut packet = frame.bytes().split_off(ETHERNET);
        self.engine.handle(Instant::from_nanos(NOW_NS), &mut packet, Hop(1), Checksums::Verify);
        self.engine.poll().expect("an answer").0.to_vec()
    }
}

fn tcp(packet: &[u8]) -> &[u8] {
    &packet[if packet[0] >> 4 == 4 { 20 } else { 40 }..]
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Both checksums are right.
fn assert_sums(packet: &[u8]) {
    let v4 = packet[0] >> 4 == 4;
    let addresses = if v4 { &packet[12..20] } else { &packet[8..40] };
    let segment = tcp(packet);
    let sum = frames::sum(addresses) + 6 + segment.len() as u64 + frames::sum(segment);
    assert_eq!(frames::fold(sum), 0xffff, "TCP's");
    assert!(!v4 || frames::fold(frames::sum(&packet[..20])) == 0xffff, "IP's");
}

/// The options of well-known systems, and some that no system sends.
const SYNS: [&[u8]; 9] = [
    // Linux.
    &[2, 4, 5, 0xb4, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7],
    // Darwin.
    &[2, 4, 5, 0xa0, 1, 3, 3, 6, 1, 1, 8, 10, 9, 9, 9, 9, 0, 0, 0, 0, 4, 2, 0, 0],
    // Windows.
    &[2, 4, 5, 0xb4, 1, 3, 3, 8, 1, 1, 4, 2],
    // Time stamps without SACK or scale; a shift that is too large; nothing but an MSS, a small one, one that lies.
    &[2, 4, 2, 0x18, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 1],
    &[2, 4, 5, 0x78, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 200],
    &[2, 4, 5, 0xb4],
    &[2, 4, 0, 0],
    &[2, 4, 0xff, 0xff],
    // Of unknown kinds, and all the room there is.
    &[
        2, 4, 5, 0x64, 254, 6, 1, 1, 1, 1, 34, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1,
        1, 1, 1, 1, 1, 0, 0, 0, 0,
    ],
];

#[test]
fn the_program_answers_as_the_engine_does() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        in_namespace(move || {
            let mut scene = scene(v6, false);
            assert_eq!(scene.verdict(&scene.syn(SYNS[0])), PASS, "before anybody says how");
            scene.start();
            for (number, options) in SYNS.into_iter().enumerate() {
                let syn = scene.syn(options);
                let theirs = scene.engines(&syn);
                let frame = scene.answer(&syn);
                assert_eq!(frame[..12], [CLIENT_LINK, OWN_LINK].concat(), "back to whom it came from");
                let packet = &frame[ETHERNET..];
                assert_sums(packet);
                let (ours, theirs) = (tcp(packet), tcp(&theirs));
                // Ports, both numbers, flags, window.
                assert_eq!(ours[..12], theirs[..12], "SYN {number}");
                assert_eq!(ours[13..16], theirs[13..16]);
                let end = usize::from(theirs[12] >> 4) * 4;
                let stamp = (theirs.get(26) == Some(&8)).then_some(28);
                for at in (20..end).step_by(4) {
                    if stamp == Some(at) {
                        // Its low bits are what the client asked for; time goes on.
                        assert_eq!(word(ours, at) & 63, word(theirs, at) & 63, "SYN {number}");
                        let later = word(ours, at).wrapping_sub(word(theirs, at));
                        assert!(later < 30_000, "{later} ms");
                    } else {
                        assert_eq!(ours[at..at + 4], theirs[at..at + 4], "SYN {number}, option at {at}");
                    }
                }
                assert!(ours[end..].iter().all(|byte| *byte == 1), "NOPs up to the SYN's length");
            }
            assert_eq!(scene.cookies.sent(0), SYNS.len() as u64);
            // One without options in a frame of the shortest length, which has room for an MSS.
            let bare = scene.syn(&[]);
            let theirs = scene.engines(&bare);
            let mut bytes = bare.bytes();
            bytes.extend([0; 6]);
            let trial = scene.program.try_on(&bytes, scene.index).expect("tried");
            assert_eq!(trial.verdict, REDIRECT);
            let end = if v6 { 64 } else { 44 };
            let packet = &trial.packet[ETHERNET..ETHERNET + end];
            assert_sums(packet);
            assert_eq!(tcp(packet)[..16], tcp(&theirs)[..16]);
            assert_eq!(tcp(packet)[20..], tcp(&theirs)[20..]);
        });
    }
}

#[test]
fn what_comes_back_opens_a_connection() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        for any_address in [false, true] {
            let mut scene = scene(false, any_address);
            scene.start();
            let answer = scene.answer(&scene.syn(SYNS[0]));
            let answer = tcp(&answer[ETHERNET..]);
            let mut stamps = vec![1, 1, 8, 10, 1, 2, 3, 5];
            stamps.extend(&answer[28..32]);
            let ack = Frame {
                flags: ACK,
                seq: ISN.wrapping_add(1),
                ack: word(answer, 4).wrapping_add(1),
                options: &stamps,
                payload: b"hello",
                ..scene.syn(&[])
            };
            assert_eq!(scene.verdict(&ack), PASS, "user space has it");
            let mut packet = ack.bytes().split_off(ETHERNET);
            scene.engine.handle(Instant::from_nanos(NOW_NS), &mut packet, Hop(1), Checksums::Verify);
            assert_eq!((scene.engine.counters().cookies_accepted, scene.engine.connections()), (1, 1));
        }
    });
}

#[test]
fn the_rest_is_user_spaces() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        let scene = scene(false, false);
        scene.start();
        let usual = scene.syn(SYNS[0]);
        let other = |text: &str| text.parse().expect("an address");
        let stamps_only = [8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 1];
        for (frame, why) in [
            (Frame { flags: SYN | ACK, ..usual }, "an answer"),
            (Frame { flags: SYN | FIN, ..usual }, "an odd one"),
            (Frame { flags: ACK, ..usual }, "no SYN"),
            (Frame { payload: b"early", ..usual }, "TCP Fast Open"),
            (Frame { ttl: 1, ..usual }, "not one hop more"),
            (Frame { to: other("10.0.1.254:81"), ..usual }, "nobody listens"),
            (Frame { to: other("10.0.2.254:61003"), ..usual }, "where servers answer to"),
            (Frame { options: &[2, 9, 0, 0], ..usual }, "runs past the end"),
            (Frame { options: &[2, 1, 0, 0], ..usual }, "no length"),
            (Frame { options: &[], ..usual }, "no room for an MSS"),
            (Frame { options: &stamps_only, ..usual }, "no room for an MSS beside them"),
        ] {
            assert_eq!(scene.verdict(&frame), PASS, "{why}");
        }
        assert_eq!(scene.cookies.sent(0), 0);
        assert_eq!(scene.verdict(&usual), REDIRECT);
        // Another host's packets are the kernel's, which has none of this here.
        let stranger: IpAddr = "10.0.1.253".parse().expect("an address");
        assert_eq!(scene.verdict(&Frame { to: SocketAddr::new(stranger, 80), ..usual }), PASS);
    });
}
