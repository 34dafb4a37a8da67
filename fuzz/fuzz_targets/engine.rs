//! The packet engine: any packets, in any order, from either side, their checksums taken as verified.
//! No panic, no packet with a wrong checksum, no more connections than allowed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::engine::packet::{Header, Ip};
use sidetrack_core::engine::{
    Callbacks, Checksums, Config, ConnectionId, Crowd, Engine, Fate, Hop, Listen, Opening, Payload, Reply,
    Selection, Share, Target,
};
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::time::Instant;

struct Any(u8);

impl Callbacks for Any {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        match self.0 % 4 {
            0 if !opening.last => Selection::Wait { wait_ms: 100 },
            1 if self.0 & 64 != 0 && !opening.first.is_empty() && !opening.replied && !opening.last => {
                Reply::new(opening.first.get(..8).unwrap_or(b"reply"))
                    .map_or(Selection::Refuse(EndReason::Internal), Selection::Reply)
            }
            1 if self.0 & 64 == 0 => Selection::Refuse(EndReason::PolicyDenied),
            2 if self.0 & 64 != 0 && opening.crowd != Crowd::HasLeft => Selection::Crowded,
            _ => Selection::Server(Target {
                inspect_client: self.0 & 16 != 0,
                inspect_server: self.0 & 32 != 0,
                ..Target::new(([10, 0, 0, 9], 80).into(), Hop(2))
            }),
        }
    }

    fn payload(&mut self, _: ConnectionId, _: Side, bytes: &[u8]) -> Payload {
        match bytes.first().map(|byte| byte % 5) {
            Some(0) => Payload::Replace(Vec::new()),
            Some(1) => Payload::Replace([bytes, bytes].concat()),
            Some(2) => Payload::Reset(EndReason::FunctionRefused),
            Some(3) => Payload::Last(bytes.get(1..).unwrap_or_default().to_vec()),
            _ => Payload::Keep,
        }
    }
}

/// An IPv4 TCP packet between the few addresses of this target: one byte says whence and whither, then come numbers,
/// flags, window, options and payload as they are.
fn packet(kind: u8, body: &[u8], last_ours: (u32, u32)) -> Vec<u8> {
    let mut tcp = vec![0; 20];
    let (src, dst, ports) = match kind & 3 {
        0 => ([10, 0, 0, 1], [10, 0, 0, 2], [0x03, 0xe8, 0, 80]),
        1 => ([10, 0, 0, 9], [10, 0, 0, 5], [0, 80, 0x07, 0xd0]),
        2 => ([10, 0, 0, 1], [10, 0, 0, 2], [0x03, 0xe9, 0, 80]),
        _ => ([10, 0, 0, 9], [10, 0, 0, 5], [0, 80, 0x07, 0xd1]),
    };
    tcp[..4].copy_from_slice(&ports);
    let near = |base: u32, at: usize| {
        base.wrapping_add(u32::from(body.get(at).copied().unwrap_or(0))).wrapping_sub(16)
    };
    tcp[4..8].copy_from_slice(&near(last_ours.1, 0).to_be_bytes());
    tcp[8..12].copy_from_slice(&near(last_ours.0, 1).to_be_bytes());
    tcp[12] = 0x50 | (body.get(2).copied().unwrap_or(0) & 3) << 4;
    tcp[13] = body.get(3).copied().unwrap_or(0);
    tcp[14] = kind;
    tcp.extend(body.get(4..).unwrap_or_default());
    let total = (tcp.len() + 20) as u16;
    let mut out = vec![0x45, 0, (total >> 8) as u8, total as u8, 0, 0, 0x40, 0, 64, 6, 0, 0];
    out.extend(src);
    out.extend(dst);
    out.extend(tcp);
    out
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&setting, mut rest)) = bytes.split_first() else { return };
    let sources = Share { addresses: vec![[10, 0, 0, 5].into()], ports: 2000..=2003 };
    let listen = Listen { address: None, port: Some(80) };
    let config = Config {
        max_connections: 3,
        syn_backlog: u32::from(setting & 3),
        hold_bytes: 300,
        ..Config::new(vec![listen], sources, [1, 2, 3, 4])
    };
    let mut engine = Engine::new(config, Any(setting), Instant::ZERO);
    let (mut now, mut ours) = (0, (0, 0));
    while let [kind, len, tail @ ..] = rest {
        let (body, after) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = after;
        now += u64::from(kind >> 4) * 50;
        let at = Instant::from_millis(now);
        // Some packets are wholly the input's own.
        let mut packet = if kind & 12 == 12 { body.to_vec() } else { packet(*kind, body, ours) };
        let fate = engine.handle(at, &mut packet, Hop(1), Checksums::Verified);
        engine.tick(at);
        if let Fate::Forward { len, .. } = fate {
            assert!(len <= packet.len());
        }
        while let Some((sent, _)) = engine.poll() {
            let ip = Ip::parse(sent).expect("what is sent is well-formed");
            let header = Header::parse(sent, &ip, Checksums::Verify).expect("and its checksums hold");
            ours = (header.seq_end().0, header.ack.0);
        }
        while engine.poll_record().is_some() {}
        assert!(engine.connections() <= 3);
    }
});
