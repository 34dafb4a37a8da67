//! The encrypting pair: two chains, one after the other, and an enemy between them.

use super::drive::{Driven, cut, numbers};
use super::toy::Toy;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::function::{ByteBucket, Directions, End, Header, REKEY_RECORDS, Records, Throttle};
use sidetrack_core::time::Instant;

const BOTH: [Side; 2] = [Side::Client, Side::Server];

fn encrypting() -> Driven {
    Driven::new(vec![Box::new(Records::new(Toy::shared(5, 1), End::Encrypt))])
}

fn decrypting() -> Driven {
    Driven::new(vec![Box::new(Records::new(Toy::shared(5, 2), End::Decrypt))])
}

/// Moves what came out of one end into the other, in parts of at most `most` bytes.
fn cross(near: &mut Driven, far: &mut Driven, most: usize, next: &mut impl FnMut(u64) -> u64) -> bool {
    let mut moved = false;
    for from in BOTH {
        let (giving, taking) = match from {
            Side::Client => (&mut *near, &mut *far),
            Side::Server => (&mut *far, &mut *near),
        };
        giving.drain().unwrap();
        let wire = std::mem::take(&mut giving.out[from as usize]);
        moved |= !wire.is_empty();
        for part in cut(&wire, most, next) {
            assert!(taking.offer(from, &part).unwrap());
        }
    }
    moved
}

#[test]
fn what_one_end_seals_the_other_opens_however_it_is_cut() {
    for seed in 0..60 {
        let mut next = numbers(seed);
        let (mut near, mut far) = (encrypting(), decrypting());
        near.take_max = 1 + next(40_000) as usize;
        far.take_max = 1 + next(40_000) as usize;
        let most = [1, 7, 1000, 100_000][next(4) as usize];
        let length = if most == 1 { 300 } else { 60_000 };
        let said: Vec<Vec<u8>> =
            (0..2).map(|_| (0..next(length)).map(|_| next(256) as u8).collect()).collect();
        let mut left = [cut(&said[0], 30_000, &mut next), cut(&said[1], 30_000, &mut next)];
        let mut opened = [Vec::new(), Vec::new()];
        let mut collect = |near: &mut Driven, far: &mut Driven| {
            opened[0].append(&mut far.out[0]);
            opened[1].append(&mut near.out[1]);
        };
        while left.iter().any(|parts| !parts.is_empty()) {
            // The server may speak first: its words wait for the client's header.
            let side = BOTH[next(2) as usize];
            let end = if side == Side::Client { &mut near } else { &mut far };
            if end.chain.is_open(side)
                && let Some(part) = left[side as usize].pop_front()
            {
                let _ = end.offer(side, &part).unwrap();
            }
            cross(&mut near, &mut far, most, &mut next);
            collect(&mut near, &mut far);
        }
        assert!(near.end(Side::Client).unwrap());
        while cross(&mut near, &mut far, most, &mut next) {}
        assert!(far.end(Side::Client).unwrap(), "an end that was sealed is an end");
        assert!(far.end(Side::Server).unwrap());
        while cross(&mut near, &mut far, most, &mut next) {}
        assert!(near.end(Side::Server).unwrap());
        collect(&mut near, &mut far);
        assert_eq!(opened[0], said[0], "seed {seed}");
        assert_eq!(opened[1], said[1], "seed {seed}");
    }
}

/// The bytes on the wire for one message of the client and the end.
fn wire(message: &[u8]) -> Vec<u8> {
    let mut near = encrypting();
    near.offer(Side::Client, message).unwrap();
    assert!(near.end(Side::Client).unwrap());
    near.out[0].clone()
}

#[test]
fn every_changed_bit_and_every_cut_is_noticed() {
    let wire = wire(b"the patient's record");
    assert_eq!(wire.len(), Header::BYTES + 3 + 20 + 16 + 3 + 16);
    for bit in 0..wire.len() * 8 {
        let mut bytes = wire.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let mut far = decrypting();
        let result = far.offer(Side::Client, &bytes).and_then(|_| far.end(Side::Client));
        assert_eq!(result.map_err(|stop| stop.reason), Err(EndReason::FunctionFailed), "bit {bit}");
        // A changed header spoils all; otherwise nothing but whole, true records comes out.
        assert!(far.out[0].is_empty() || far.out[0] == b"the patient's record", "bit {bit}");
    }
    for length in 0..wire.len() {
        let mut far = decrypting();
        let result = far.offer(Side::Client, &wire[..length]).and_then(|_| far.end(Side::Client));
        let stop = result.expect_err("a cut stream is no end");
        assert!(stop.detail.starts_with("function 'f0': "), "{stop:?}");
    }
    let mut far = decrypting();
    assert!(far.offer(Side::Client, &wire).unwrap() && far.end(Side::Client).unwrap());
    let more = [wire, vec![0, 0, 16]].concat();
    let mut far = decrypting();
    let result = far.offer(Side::Client, &more).and_then(|_| far.end(Side::Client));
    assert!(result.is_ok(), "a beginning behind the end says nothing yet");
    let extra = [more, vec![0; 16]].concat();
    assert!(decrypting().offer(Side::Client, &extra).is_err(), "a record behind the end does");
}

#[test]
fn another_key_or_a_header_seen_before_is_refused() {
    let wire = wire(b"x");
    let mut other = Driven::new(vec![Box::new(Records::new(Toy::shared(6, 2), End::Decrypt))]);
    assert!(other.offer(Side::Client, &wire).unwrap_err().detail.contains("does not authenticate"));
    let suite = std::sync::Arc::new(Toy { key: 5, salt: 2, refuses: true });
    let mut replayed = Driven::new(vec![Box::new(Records::new(suite, End::Decrypt))]);
    assert_eq!(replayed.offer(Side::Client, &wire).unwrap_err().detail, "function 'f0': seen before");
    assert!(decrypting().offer(Side::Client, b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n").is_err());
}

#[test]
fn an_answer_belongs_to_one_request() {
    let mut far = decrypting();
    far.offer(Side::Client, &wire(b"q")).unwrap();
    far.offer(Side::Server, b"answer").unwrap();
    let answer = far.out[1].clone();
    assert!(encrypting().offer(Side::Server, &answer).is_ok());
    // The same answer to a client whose header was another.
    let mut stranger = Driven::new(vec![Box::new(Records::new(Toy::shared(5, 3), End::Encrypt))]);
    assert!(stranger.offer(Side::Server, &answer).is_err());
}

#[test]
fn a_server_that_speaks_first_waits_for_the_clients_header() {
    let mut far = decrypting();
    assert!(far.offer(Side::Server, b"220 ready").unwrap());
    assert!(far.out[1].is_empty() && !far.chain.is_open(Side::Server));
    // The header alone, which the other end sends before its client says anything.
    let near = encrypting();
    let mut near = near;
    near.drain().unwrap();
    assert_eq!(near.out[0].len(), Header::BYTES);
    let header = near.out[0].clone();
    assert!(far.offer(Side::Client, &header).unwrap());
    let sealed = far.out[1].clone();
    assert!(near.offer(Side::Server, &sealed).unwrap());
    assert_eq!(near.out[1], b"220 ready");
}

#[test]
fn keys_change_on_both_sides_alike() {
    let (mut near, mut far) = (encrypting(), decrypting());
    near.drain().unwrap();
    for at in 0..REKEY_RECORDS + 3 {
        assert!(near.offer(Side::Client, &[at as u8]).unwrap());
        let wire = std::mem::take(&mut near.out[0]);
        assert!(far.offer(Side::Client, &wire).unwrap());
        assert_eq!(far.out[0], [at as u8]);
        far.out[0].clear();
    }
}

#[test]
fn a_pair_in_one_chain_is_as_if_it_were_not_there() {
    // With a limit between them, so that what waits inside has a bound and still comes out.
    for seed in 0..20 {
        let mut next = numbers(seed);
        let bucket = ByteBucket::new(1 + next(5_000_000), 1 + next(9000), Instant::ZERO);
        let mut both = Driven::new(vec![
            Box::new(Records::new(Toy::shared(5, 1), End::Encrypt)),
            Box::new(Throttle::new(bucket, Directions::Both)),
            Box::new(Records::new(Toy::shared(5, 2), End::Decrypt)),
        ]);
        let said: Vec<u8> = (0..next(20_000)).map(|_| next(256) as u8).collect();
        for part in cut(&said, 5000, &mut next) {
            let side = BOTH[next(2) as usize];
            assert!(both.offer(side, &part).unwrap());
        }
        for side in BOTH {
            assert!(both.end(side).unwrap());
        }
        assert_eq!(both.out[0].len() + both.out[1].len(), said.len(), "seed {seed}");
    }
}
