//! Frames: known bytes, every split, and bytes that are none.

use crate::random::Random;
use sidetrack_core::overlay::frame::{
    Ack, Chunk, Confirmed, DATA_MAX, Decoder, Dissemination, FRAME_MAX, Features, FlowName, Frame,
    FrameError, Greeting, HASH_BYTES, Hello, Holding, LinkEntry, LinkKind, LinkState, Mark, Membership,
    Newest, Offer, Open, Opened, Paced, PacedAck, Packet, Path, Piece, Proof, Protocol, Purpose, RESEND_MAX,
    RUNS_MAX, Record, Refusal, Refused, Repeats, Resend, ResetReason, Resume, Run, SUBGRAPH_NODES_MAX,
    SessionFrame, SessionId, Spread, Standing, Subgraph, Timed, Vouched,
};
use sidetrack_core::overlay::group::GROUPS_MAX;
use sidetrack_core::overlay::{NodeId, PATH_MAX, Signature};

fn path(nodes: &[u64]) -> Path {
    Path::new(nodes.iter().copied().map(NodeId).collect()).expect("a path")
}

fn open() -> Open {
    Open {
        session: SessionId([7; 16]),
        path: path(&[1, 2, 3]),
        position: 1,
        resume: Some(Resume { attempt: 3, next: 70_000 }),
        window_bytes: 262_144,
        destination: "db.example.nl:5432".parse().expect("a destination"),
        client: "192.0.2.7:40000".parse().expect("an address"),
        host: Some("db.example.nl".parse().expect("a name")),
        signature: Signature([9; 64]),
    }
}

/// Source 1, destination 4, relays 2 and 3: two paths.
fn subgraph() -> Subgraph {
    let links = [(1, 2), (2, 4), (1, 3), (3, 4)].map(|(from, to)| (NodeId(from), NodeId(to)));
    Subgraph::new(NodeId(1), NodeId(4), links).expect("a subgraph")
}

fn spread() -> Spread {
    Spread {
        kind: LinkKind::BestEffort,
        dissemination: Dissemination::Duplicate,
        protocol: Protocol::Ip,
        epoch: 5,
        sequence: 6,
        age_us: 7,
        budget_us: 8,
        subgraph: subgraph(),
        payload: vec![0xAB],
    }
}

/// One of each, with its bytes where they are few.
fn all() -> Vec<(Frame, Option<&'static str>)> {
    let links = vec![
        LinkEntry { neighbour: NodeId(2), cost_us: 10_300 },
        LinkEntry { neighbour: NodeId(9), cost_us: 1 },
    ];
    let greeting = Greeting { version: 1, kind: LinkKind::Reliable, purpose: Purpose::FromAcceptor };
    let hello = Hello { state: LinkState::Up, sequence: 258, interval_ms: 40, echo: Some((7, 1500)) };
    let ack = Ack { next: 1, limit: 2, confirmed: 3, hole_end: 4 };
    let destination = "[2001:db8::1]:22".parse().expect("a destination");
    let bare = Open { resume: None, host: None, destination, ..open() };
    let packet =
        Packet { path: path(&[1, 2]), position: 1, protocol: Protocol::EchoRequest, payload: vec![0xAA] };
    let refused = Refused { by: NodeId(3), reason: Refusal::Denied, detail: "no".into() };
    let record = Record { origin: NodeId(1), sequence: 5, links, signature: Signature([3; 64]) };
    let opened =
        Opened { session: SessionId([7; 16]), next: 1, window_bytes: 2, signature: Signature([1; 64]) };
    vec![
        (Frame::Greeting(greeting), Some("0000000401010002")),
        (Frame::Hello(hello), Some("0000001102020000010200280100000007000005dc")),
        (Frame::Hello(Hello { echo: None, ..hello }), Some("00000009020200000102002800")),
        (Frame::Record(record), None),
        (
            Frame::RecordAck { origin: NodeId(1), sequence: 2 },
            Some("000000110400000000000000010000000000000002"),
        ),
        (Frame::Want { connections: 3 }, Some("00000003050003")),
        (Frame::Packet(packet), Some("000000150602000000000000000100000000000000020100aa")),
        (
            Frame::Piece(Piece { message: 7, index: 1, count: 2, bytes: vec![0xAB] }),
            Some("0000000807000000070102ab"),
        ),
        (Frame::Probe { number: 1, padding: 3 }, Some("000000080800000001000000")),
        (Frame::ProbeAck { number: 2 }, Some("000000050900000002")),
        (Frame::Open(Box::new(open())), None),
        (Frame::Open(Box::new(bare)), None),
        (Frame::Opened(opened), None),
        (Frame::Refused(refused), Some("0000000c120000000000000003026e6f")),
        (
            Frame::Session(SessionFrame::Data { offset: 1, bytes: vec![0xAB] }),
            Some("0000000a200000000000000001ab"),
        ),
        (
            Frame::Session(SessionFrame::Ack(ack)),
            Some("00000021210000000000000001000000000000000200000000000000030000000000000004"),
        ),
        (Frame::Session(SessionFrame::Fin { offset: 1 }), Some("00000009220000000000000001")),
        (
            Frame::Session(SessionFrame::Reset { offset: 1, reason: ResetReason::PathLost }),
            Some("0000000a23000000000000000101"),
        ),
        (Frame::Session(SessionFrame::Done), Some("0000000124")),
    ]
    .into_iter()
    .chain(extensions())
    .collect()
}

/// The frames that older nodes skip.
fn extensions() -> Vec<(Frame, Option<&'static str>)> {
    vec![
        (
            Frame::Spread(Box::new(spread())),
            Some(concat!(
                "0000003c80010103",                   // length, type, kind, dissemination, protocol
                "000000050000000000000006",           // epoch, sequence
                "0000000700000008",                   // age, budget
                "0400000000000000010000000000000004", // four nodes: source, destination,
                "00000000000000020000000000000003",   // relays
                "3044",                               // 1 -> 2, 1 -> 3; none from 4; 2 -> 4; 3 -> 4
                "ab",
            )),
        ),
        (Frame::Features(features()), None),
        (
            Frame::Membership(membership(&["ops", "tv"])),
            Some(concat!(
                "0000005a90",                       // length, type
                "00000000000000010000000000000002", // origin, sequence
                "0002036f7073027476",               // two groups
                "05050505050505050505050505050505050505050505050505050505050505050505050505050505",
                "050505050505050505050505050505050505050505050505",
            )),
        ),
        (
            Frame::MembershipAck { origin: NodeId(1), sequence: 2 },
            Some("000000119100000000000000010000000000000002"),
        ),
        (Frame::Session(SessionFrame::Arrived { bytes: 258 }), Some("00000009c00000000000000102")),
        (Frame::LegHello { leg: 3, hello: leg_hello() }, Some("0000000ac1030200000102001c00")),
        (Frame::Vouched(Box::new(vouched())), None),
        (
            Frame::Standing(standing()),
            Some(concat!(
                "0000005db1",                       // length, type
                "00000000000000010000000000000002", // origin, sequence
                "000000030000000000000004",         // epoch, next packet
                "06060606060606060606060606060606060606060606060606060606060606060606060606060606",
                "060606060606060606060606060606060606060606060606",
            )),
        ),
        (
            Frame::Holding(Box::new(Holding { confirmed: None, next: 1, ..holding() })),
            Some("00000024b2000000000000000100000000000000040000000500000009010000000000000001a080"),
        ),
        (Frame::Holding(Box::new(holding())), None),
        (timed(None), None),
        (timed(Some(Repeats { first: 3, lost: 7 })), None),
        (
            Frame::Resend(Resend { request: 2, numbers: vec![1, 3] }),
            Some("00000015830000000200000000000000010000000000000003"),
        ),
        (Frame::Newest(Newest { number: 5, heard: 2 }), Some("0000000d84000000000000000500000002")),
    ]
    .into_iter()
    .chain(paced_links())
    .collect()
}

/// The frames of paced links.
fn paced_links() -> Vec<(Frame, Option<&'static str>)> {
    vec![
        (
            Frame::Paced(Box::new(paced())),
            Some(concat!(
                "00000047a0",                 // length, type
                "000000070002",               // number, back
                "00000000010000000000000002", // data: stream, offset,
                "0001ab",                     // length, byte
                "01000000030000000000000004", // end: stream, offset
                "0200000005",                 // reset: stream
                "03000000060000000000000007", // credit: stream, limit
                "0000000008000000000000000a0002cdef",
            )),
        ),
        (Frame::PacedAck(Box::new(paced_ack())), Some("00000013a100000009000000100003000200010001ffff")),
        (
            Frame::Offer(Offer { rate: 200_000_000, credit: 65_536, heard: true }),
            Some("0000000ea2000000000bebc2000001000001"),
        ),
    ]
}

fn leg_hello() -> Hello {
    Hello { state: LinkState::Up, sequence: 258, interval_ms: 28, echo: None }
}

fn paced() -> Paced {
    let chunks = vec![
        Chunk::Data { stream: 1, offset: 2, bytes: vec![0xAB] },
        Chunk::End { stream: 3, offset: 4 },
        Chunk::Reset { stream: 5 },
        Chunk::Credit { stream: 6, limit: 7 },
        Chunk::Data { stream: 8, offset: 10, bytes: vec![0xCD, 0xEF] },
    ];
    Paced { number: 7, back: 2, chunks }
}

fn paced_ack() -> PacedAck {
    let runs = vec![Run { missing: 2, arrived: 1 }, Run { missing: 1, arrived: u16::MAX }];
    PacedAck { newest: 9, age_us: 16, arrived: 3, runs }
}

fn timed(repeats: Option<Repeats>) -> Frame {
    Frame::Timed(Timed { mark: Mark { number: 9, heard: 4, repeats }, packet: Box::new(spread()) })
}

fn features() -> Features {
    Features { origin: NodeId(1), sequence: 2, bits: Features::SPREAD, signature: Signature([4; 64]) }
}

fn membership(groups: &[&str]) -> Membership {
    let groups = groups.iter().map(|name| name.parse().expect("a name")).collect();
    Membership { origin: NodeId(1), sequence: 2, groups, signature: Signature([5; 64]) }
}

fn vouched() -> Vouched {
    let steps = vec![[1; HASH_BYTES], [2; HASH_BYTES]];
    let proof = Proof { index: 3, steps, signature: Signature([8; 64]) };
    Vouched { priority: 7, target: 9, proof, packet: Box::new(spread()) }
}

fn holding() -> Holding {
    let flow = FlowName { source: NodeId(1), destination: NodeId(4), epoch: 5, target: 9 };
    let confirmed = Some(Confirmed { next: 258, signature: Signature([2; 64]) });
    Holding { flow, asks: true, confirmed, next: 300, beyond: vec![0xA0, 0x80] }
}

#[test]
fn what_a_node_has_of_a_flow_has_one_encoding() {
    let bytes = Frame::Holding(Box::new(holding())).to_datagram();
    // Flags, what is confirmed, next, the last byte of the list; the flow from a node to itself.
    for (at, value) in [(25, 7), (25, 4), (26, 1), (98, 255), (bytes.len() - 1, 0), (16, 1)] {
        let mut changed = bytes.clone();
        changed[at] = value;
        let is_same_length = Frame::from_datagram(&changed);
        assert!(is_same_length.is_err() || at == 98, "byte {at} = {value}: {is_same_length:?}");
    }
    let long = Holding { beyond: vec![1; 65], ..holding() };
    assert!(Frame::from_datagram(&Frame::Holding(Box::new(long)).to_datagram()).is_err());
    let mut holding = holding();
    let has: Vec<_> = (0..400).filter(|sequence| holding.has(*sequence)).collect();
    assert_eq!(has, (0..300).chain([301, 303, 309]).collect::<Vec<_>>());
    assert_eq!(holding.end(), 310);
    holding.set_beyond([301, 303, 309, 299, 300, 301 + 512, u64::MAX].into_iter());
    assert_eq!(holding.beyond, [0xA0, 0x80]);
}

fn standing() -> Standing {
    Standing { origin: NodeId(1), sequence: 2, epoch: 3, next: 4, signature: Signature([6; 64]) }
}

#[test]
fn a_proof_has_one_encoding_and_a_priority_is_in_its_range() {
    let bytes = Frame::Vouched(Box::new(vouched())).to_datagram();
    let head = "b007000000090302";
    assert_eq!(hex(&bytes[..8]), head, "type, priority, target, index, steps");
    assert_eq!(hex(&bytes[8..12]), "01010101");
    let end = 8 + 2 * HASH_BYTES + 64;
    assert_eq!(bytes[end..], Frame::Spread(Box::new(spread())).to_datagram()[1..], "then a spread packet");
    let with = |at: usize, value: u8| {
        let mut changed = bytes.clone();
        changed[at] = value;
        Frame::from_datagram(&changed)
    };
    for (at, value) in [(1, 0), (1, 11), (6, 4), (6, 255), (7, 6), (7, 1), (7, 0)] {
        assert!(with(at, value).is_err(), "byte {at} = {value}");
    }
    // Another age changes nothing that the source vouches for; anything else does.
    let mut older = vouched();
    older.packet.age_us = 70_000;
    assert_eq!(older.vouched_bytes(), vouched().vouched_bytes());
    older.packet.budget_us += 1;
    assert_ne!(older.vouched_bytes(), vouched().vouched_bytes());
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn frames_travel_as_the_protocol_says() {
    for (frame, known) in all() {
        let bytes = frame.to_bytes();
        if let Some(known) = known {
            assert_eq!(hex(&bytes), known, "{frame:?}");
        }
        let mut decoder = Decoder::new();
        decoder.push(&bytes);
        assert_eq!(decoder.next_frame(), Ok(Some(frame.clone())));
        assert_eq!(decoder.next_frame(), Ok(None));
        assert_eq!(frame.to_datagram(), bytes[4..]);
        assert_eq!(Frame::from_datagram(&bytes[4..]), Ok(Some(frame)));
    }
    assert_eq!(Frame::from_datagram(&[]), Err(FrameError::BadLength(0)));
    assert_eq!(Frame::from_datagram(&[0xff]), Ok(None), "may be skipped");
    assert_eq!(Frame::from_datagram(&[8, 0, 0, 0, 1, 0, 1]), Err(FrameError::BadValue("probe")));
    assert_eq!(Frame::from_datagram(&[7, 0, 0, 0, 1, 2, 2, 9]), Err(FrameError::BadValue("piece")));
    let header = SessionFrame::data_header(1, 1);
    assert_eq!(hex(&header) + "ab", "0000000a200000000000000001ab");
}

#[test]
fn every_split_gives_the_same_frames() {
    let frames: Vec<_> = all().into_iter().map(|(frame, _)| frame).collect();
    let bytes: Vec<u8> = frames.iter().flat_map(Frame::to_bytes).chain([0, 0, 0]).collect();
    for at in 0..=bytes.len() {
        let mut decoder = Decoder::new();
        let mut came = Vec::new();
        for part in [&bytes[..at], &bytes[at..]] {
            decoder.push(part);
            while let Some(frame) = decoder.next_frame().unwrap() {
                came.push(frame);
            }
        }
        assert_eq!(came, frames, "cut at {at}");
        assert_eq!(decoder.into_rest(), [0, 0, 0]);
    }
}

#[test]
fn what_is_no_frame_is_told_by_name() {
    let decode = |hex: &str| {
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let mut decoder = Decoder::new();
        decoder.push(&bytes);
        decoder.next_frame()
    };
    assert_eq!(decode("00000000"), Err(FrameError::BadLength(0)));
    assert_eq!(decode("00010001"), Err(FrameError::BadLength(FRAME_MAX as u32 + 1)));
    assert_eq!(decode("000000017f"), Err(FrameError::UnknownType(0x7f)));
    assert_eq!(decode("00000001ff"), Ok(None), "may be skipped");
    assert_eq!(decode("00000001ff0000000124"), Ok(Some(Frame::Session(SessionFrame::Done))));
    assert_eq!(decode("00000002240a"), Err(FrameError::TrailingBytes(1)));
    assert_eq!(decode("000000020500"), Err(FrameError::Truncated));
    assert_eq!(decode("0000000401010004"), Err(FrameError::BadValue("purpose")));
    assert_eq!(decode("00000009200000000000000001"), Err(FrameError::BadValue("data")), "no empty data");
    assert_eq!(
        decode("0000000a20ffffffffffffffffab"),
        Err(FrameError::BadValue("data")),
        "no offset overflows"
    );
    // The same node twice.
    assert_eq!(
        decode("00000014060200000000000000010000000000000001010000"),
        Err(FrameError::BadValue("path"))
    );
    let long = Frame::Session(SessionFrame::Data { offset: 0, bytes: vec![0; DATA_MAX] }).to_bytes();
    assert_eq!(long.len(), 16_384, "header and payload fill one TLS record");
    assert_eq!(Path::new((0..=PATH_MAX as u64).map(NodeId).collect()), None);
    assert_eq!(Path::new(vec![NodeId(1)]), None);
}

#[test]
fn flipped_and_random_bytes_never_panic_and_read_back_the_same() {
    let mut random = Random::new(1);
    let frames: Vec<_> = all().into_iter().map(|(frame, _)| frame.to_bytes()).collect();
    for round in 0..20_000 {
        let mut bytes = frames[random.below(frames.len() as u64) as usize].clone();
        if round % 4 == 0 {
            bytes = (0..random.below(200)).map(|_| random.next() as u8).collect();
            bytes.splice(..0, (bytes.len() as u32).to_be_bytes());
        } else {
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
        }
        let mut decoder = Decoder::new();
        decoder.push(&bytes);
        while let Ok(Some(frame)) = decoder.next_frame() {
            // One spelling for each frame: what is read is written as it came.
            let mut again = Decoder::new();
            again.push(&frame.to_bytes());
            assert_eq!(again.next_frame(), Ok(Some(frame)));
        }
    }
}

#[test]
fn signatures_cover_all_but_the_position() {
    let open = open();
    assert_eq!(
        Open { position: 2, signature: Signature::NONE, ..open.clone() }.signed_bytes(),
        open.signed_bytes()
    );
    for other in [
        Open { resume: None, ..open.clone() },
        Open { resume: Some(Resume { attempt: 4, next: 70_000 }), ..open.clone() },
        Open { path: path(&[1, 4, 3]), ..open.clone() },
        Open { destination: "db.example.nl:5433".parse().unwrap(), ..open.clone() },
        Open { client: "192.0.2.7:40001".parse().unwrap(), ..open.clone() },
        Open { host: None, ..open.clone() },
        Open { session: SessionId([8; 16]), ..open.clone() },
    ] {
        assert_ne!(other.signed_bytes(), open.signed_bytes());
    }
}

#[test]
fn a_subgraph_has_one_spelling_and_no_link_that_cannot_be() {
    let frame = Frame::Spread(Box::new(spread())).to_datagram();
    // The count of nodes is behind type, kind, dissemination, protocol, epoch, sequence, age and budget.
    let count = 1 + 3 + 4 + 8 + 4 + 4;
    let bits = count + 1 + 4 * 8;
    assert_eq!((frame[count], frame.len()), (4, bits + 2 + 1));
    let bad = |at: usize, value: u8| {
        let mut frame = frame.clone();
        frame[at] = value;
        Frame::from_datagram(&frame)
    };
    const BAD: Result<Option<Frame>, FrameError> = Err(FrameError::BadValue("subgraph"));
    // A link from each node to itself.
    for node in 0..4 {
        let bit = node * 5;
        assert_eq!(bad(bits + bit / 8, frame[bits + bit / 8] | 0x80 >> (bit % 8)), BAD, "{node}");
    }
    assert_eq!(bad(count, 0), BAD);
    assert_eq!(bad(count, 1), BAD);
    assert_eq!(bad(count, SUBGRAPH_NODES_MAX as u8 + 1), BAD);
    assert_eq!(bad(count + 8, 4), BAD, "the source is the destination");
    assert_eq!(bad(1, 3), Err(FrameError::BadValue("kind of link")));
    assert_eq!(bad(2, 9), Err(FrameError::BadValue("dissemination")));
    // Three nodes have 9 bits; those behind them must be 0.
    let links = [(NodeId(1), NodeId(2)), (NodeId(2), NodeId(3))];
    let three = Subgraph::new(NodeId(1), NodeId(3), links).expect("a subgraph");
    let mut frame =
        Frame::Spread(Box::new(Spread { subgraph: three, payload: Vec::new(), ..spread() })).to_datagram();
    for bit in 1..8 {
        *frame.last_mut().unwrap() = 0x80 >> bit;
        assert_eq!(Frame::from_datagram(&frame), BAD);
    }
    for length in 1..bits + 2 {
        let cut = Frame::Spread(Box::new(spread())).to_datagram();
        assert!(Frame::from_datagram(&cut[..length]).is_err(), "{length} bytes");
    }
    let node = |at: u64| NodeId(at + 1);
    let chain =
        |links: u64| Subgraph::new(node(0), node(links), (0..links).map(|at| (node(at), node(at + 1))));
    let most = chain(SUBGRAPH_NODES_MAX as u64 - 1).expect("as many as fit");
    assert_eq!(most.reversed().reversed(), most);
    assert_eq!(most.links().count(), SUBGRAPH_NODES_MAX - 1);
    assert_eq!(chain(SUBGRAPH_NODES_MAX as u64), None);
    assert_eq!(Subgraph::new(node(0), node(1), [(node(2), node(2))]), None);
    assert_eq!(Subgraph::new(node(0), node(0), []), None);
}

#[test]
fn frames_of_real_time_links_say_what_they_repeat_and_request() {
    let hexed = |frame: &Frame| hex(&frame.to_datagram()[..21]);
    assert_eq!(hexed(&timed(None)), "820000000000000009000000040000000000000000");
    // Distances: 9 - 3 and 9 - 7.
    let repeated = timed(Some(Repeats { first: 3, lost: 7 }));
    assert_eq!(hexed(&repeated), "820000000000000009000000040000000600000002");
    let bad = |first: u32, lost: u32| {
        let mut bytes = repeated.to_datagram();
        bytes[13..17].copy_from_slice(&first.to_be_bytes());
        bytes[17..21].copy_from_slice(&lost.to_be_bytes());
        Frame::from_datagram(&bytes)
    };
    assert_eq!(bad(6, 2), Ok(Some(repeated.clone())));
    assert_eq!(bad(9, 9), Ok(Some(timed(Some(Repeats { first: 0, lost: 0 })))));
    for (first, lost) in [(10, 2), (6, 0), (0, 2), (2, 6), (6, 10)] {
        assert_eq!(bad(first, lost), Err(FrameError::BadValue("repetition")), "{first} {lost}");
    }
    let request = |numbers: &[u64]| {
        let frame = Frame::Resend(Resend { request: 1, numbers: numbers.to_vec() });
        Frame::from_datagram(&frame.to_datagram())
    };
    let most: Vec<_> = (0..RESEND_MAX as u64).collect();
    assert!(matches!(request(&most), Ok(Some(Frame::Resend(_)))));
    assert_eq!(request(&(0..=RESEND_MAX as u64).collect::<Vec<_>>()), Err(FrameError::BadValue("request")));
    assert_eq!(request(&[]), Err(FrameError::Truncated));
    assert_eq!(request(&[2, 2]), Err(FrameError::BadValue("request")));
    assert_eq!(request(&[3, 2]), Err(FrameError::BadValue("request")));
}

#[test]
fn a_frame_of_a_paced_link_that_is_cut_or_impossible_is_an_error() {
    // A packet that is cut between two chunks is a shorter packet, which the seal of its datagram forbids.
    let between = [20 + 3, 20 + 16, 20 + 21, 20 + 34];
    for frame in [Frame::Paced(Box::new(paced())), Frame::Offer(Offer { rate: 1, credit: 2, heard: false })] {
        let bytes = frame.to_datagram();
        for length in 1..bytes.len() {
            let cut = Frame::from_datagram(&bytes[..length]);
            let is_whole = matches!(frame, Frame::Paced(_)) && between.contains(&length);
            assert_eq!(cut.is_ok(), is_whole, "{length} bytes of {frame:?}: {cut:?}");
        }
    }
    let ack = |ack: PacedAck| Frame::from_datagram(&Frame::PacedAck(Box::new(ack)).to_datagram());
    let bad = Err(FrameError::BadValue("run of packets"));
    let run = Run { missing: 1, arrived: 1 };
    assert!(ack(PacedAck { runs: vec![run; RUNS_MAX], ..paced_ack() }).is_ok());
    assert_eq!(ack(PacedAck { runs: vec![run; RUNS_MAX + 1], ..paced_ack() }), bad);
    assert_eq!(ack(PacedAck { runs: vec![Run { missing: 0, ..run }], ..paced_ack() }), bad);
    assert_eq!(ack(PacedAck { runs: vec![Run { arrived: 0, ..run }], ..paced_ack() }), bad);
    assert_eq!(ack(PacedAck { arrived: 0, ..paced_ack() }), bad);
    let packet = |chunk: Chunk| {
        Frame::from_datagram(&Frame::Paced(Box::new(Paced { chunks: vec![chunk], ..paced() })).to_datagram())
    };
    let data = |offset: u64, bytes: Vec<u8>| packet(Chunk::Data { stream: 1, offset, bytes });
    assert_eq!(data(0, Vec::new()), Err(FrameError::BadValue("chunk")));
    assert_eq!(data(u64::MAX, vec![1]), Err(FrameError::BadValue("chunk")));
    assert!(data(u64::MAX - 2, vec![1]).is_ok());
    assert_eq!(
        Frame::from_datagram(&[0xA0, 0, 0, 0, 1, 0, 0, 4, 0, 0, 0, 1]),
        Err(FrameError::BadValue("chunk"))
    );
    assert_eq!(Frame::from_datagram(&[0xA0, 0, 0, 0, 1, 0, 0]), Err(FrameError::Truncated), "no chunk");
}

#[test]
fn old_nodes_skip_the_new_frames() {
    // What version 1 says about types from 0x80 on; a node of this version does it with what comes after them.
    for (frame, _) in all() {
        let is_new = matches!(
            frame,
            Frame::Spread(_)
                | Frame::Features(_)
                | Frame::Timed(_)
                | Frame::Resend(_)
                | Frame::Newest(_)
                | Frame::Membership(_)
                | Frame::MembershipAck { .. }
                | Frame::LegHello { .. }
                | Frame::Session(SessionFrame::Arrived { .. })
                | Frame::Paced(_)
                | Frame::PacedAck(_)
                | Frame::Offer(_)
                | Frame::Vouched(_)
                | Frame::Standing(_)
                | Frame::Holding(_)
        );
        assert_eq!(frame.to_bytes()[4] >= 0x80, is_new, "{frame:?}");
    }
}

#[test]
fn a_list_of_groups_is_short_in_order_and_has_names_only() {
    let decode = |groups: &[&str]| Frame::from_datagram(&Frame::Membership(membership(groups)).to_datagram());
    assert!(matches!(decode(&[]), Ok(Some(Frame::Membership(_)))));
    for unordered in [["b", "a"], ["a", "a"]] {
        assert_eq!(decode(&unordered), Err(FrameError::BadValue("list of groups")));
    }
    let names: Vec<_> = (0..=GROUPS_MAX).map(|number| format!("{number:04}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    assert!(decode(&names[1..]).is_ok());
    assert_eq!(decode(&names), Err(FrameError::BadValue("number of groups")));
    let good = Frame::Membership(membership(&["ops"])).to_datagram();
    for length in 1..good.len() {
        assert!(Frame::from_datagram(&good[..length]).is_err(), "{length}");
    }
    let changed = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        Frame::from_datagram(&bytes)
    };
    // The length and the first letter of the name.
    for (at, to) in [(19, 0), (19, 33), (20, b' '), (20, 0xff)] {
        assert!(changed(at, to).is_err(), "byte {at} is {to}");
    }
}

#[test]
fn a_packet_to_a_group_takes_no_path() {
    let packet = Packet { path: path(&[1, 2]), position: 1, protocol: Protocol::Group, payload: vec![0xAA] };
    let bytes = Frame::Packet(packet).to_datagram();
    assert_eq!(Frame::from_datagram(&bytes), Err(FrameError::BadValue("protocol")));
}
