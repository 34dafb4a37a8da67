//! Stages that misbehave, and chains of many.

use super::drive::{Driven, numbers};
use sidetrack_core::chain::{Chain, Offered};
use sidetrack_core::flow::Side;
use sidetrack_core::function::{
    ByteBucket, Directions, Interest, STAGE_OUT_MAX, Stage, Step, Stop, Throttle,
};
use sidetrack_core::time::Instant;
use std::time::Duration;

/// Says every byte twice.
struct Doubling;

impl Stage for Doubling {
    fn interest(&self, _from: Side) -> Interest {
        Interest::Bytes
    }

    fn handle(&mut self, _: Instant, _: Side, bytes: &[u8], out: &mut Vec<u8>) -> Step {
        let taken = bytes.len().min(STAGE_OUT_MAX / 2);
        out.extend(bytes[..taken].iter().flat_map(|byte| [*byte; 2]));
        Step::Taken(taken)
    }
}

/// Takes nothing before its time, and says something when it comes.
struct Late(Option<Instant>);

impl Stage for Late {
    fn interest(&self, _from: Side) -> Interest {
        Interest::Bytes
    }

    fn handle(&mut self, _: Instant, _: Side, bytes: &[u8], _: &mut Vec<u8>) -> Step {
        if self.0.is_some() { Step::Taken(0) } else { Step::Pass(bytes.len()) }
    }

    fn tick(&mut self, now: Instant, _: Side, out: &mut Vec<u8>) {
        if self.0.take_if(|due| *due <= now).is_some() {
            out.extend_from_slice(b"now: ");
        }
    }

    fn deadline(&self, from: Side) -> Option<Instant> {
        self.0.filter(|_| from == Side::Client)
    }
}

/// Takes one byte a call, of whatever is offered.
struct Nibbling;

impl Stage for Nibbling {
    fn interest(&self, _from: Side) -> Interest {
        Interest::Bytes
    }

    fn handle(&mut self, _: Instant, _: Side, _: &[u8], _: &mut Vec<u8>) -> Step {
        Step::Pass(1)
    }

    fn finish(&mut self, _: Instant, _: Side, out: &mut Vec<u8>) -> Result<bool, Stop> {
        out.push(b'.');
        Ok(true)
    }
}

#[test]
fn chains_of_stages_that_grow_hold_a_bounded_number_of_bytes() {
    let mut driven =
        Driven::new(vec![Box::new(Doubling), Box::new(Doubling), Box::new(Doubling), Box::new(Doubling)]);
    let bytes = vec![7; 60_000];
    assert_eq!(driven.chain.handle(driven.now, Side::Client, &bytes).unwrap(), Offered::Inside);
    assert!(!driven.chain.is_open(Side::Client));
    let mut out = 0;
    loop {
        assert!(driven.chain.ready(Side::Client) < 3 * STAGE_OUT_MAX, "{}", driven.chain.ready(Side::Client));
        let part = driven.chain.take(Side::Client, 10_000).len();
        out += part;
        driven.chain.advance(driven.now, Side::Client).unwrap();
        if part == 0 && driven.chain.is_open(Side::Client) {
            break;
        }
    }
    assert_eq!(out, 60_000 * 16);
}

#[test]
fn what_waits_keeps_its_place() {
    let due = Instant::from_millis(5);
    let mut driven = Driven::new(vec![Box::new(Nibbling), Box::new(Late(Some(due))), Box::new(Nibbling)]);
    assert_eq!(driven.chain.handle(driven.now, Side::Client, b"one ").unwrap(), Offered::Inside);
    assert!(!driven.chain.is_open(Side::Client) && driven.chain.is_open(Side::Server));
    driven.drain().unwrap();
    assert!(driven.out[0].is_empty());
    driven.now = due;
    driven.drain().unwrap();
    assert!(driven.offer(Side::Client, b"two").unwrap() && driven.end(Side::Client).unwrap());
    assert_eq!(driven.out[0], b"now: one two..");
}

#[test]
fn a_limit_holds_its_rate_and_counts_alone_let_the_kernel_move_the_bytes() {
    let limit = || Box::new(Throttle::new(ByteBucket::new(1000, 100, Instant::ZERO), Directions::Both));
    let mut driven = Driven::new(vec![limit()]);
    assert_eq!(driven.chain.interest(Side::Client), Interest::Count);
    assert!(driven.offer(Side::Client, &[0; 5100]).unwrap() && driven.end(Side::Client).unwrap());
    assert_eq!(driven.out[0].len(), 5100);
    assert!((4990..5010).contains(&(driven.now - Instant::ZERO).as_millis()), "{:?}", driven.now);
    // The same by counting.
    let mut chain = Chain::new(super::drive::stages(vec![limit(), limit()]), Instant::ZERO).unwrap();
    let mut now = Instant::ZERO;
    let mut moved = 0;
    while moved < 2100 {
        let n = chain.allowance(now, Side::Server);
        if n == 0 {
            let due = chain.deadline().unwrap();
            assert!(due > now);
            now = due;
            chain.advance(now, Side::Server).unwrap();
            continue;
        }
        chain.count(now, Side::Server, n);
        moved += n;
    }
    assert!(now - Instant::ZERO >= Duration::from_millis(1990), "{now:?}");
    assert_eq!(chain.deadline().filter(|due| *due <= now), None);
}

#[test]
fn an_empty_chain_is_not_there() {
    let mut driven = Driven::new(Vec::new());
    assert_eq!(driven.chain.interest(Side::Client), Interest::Nothing);
    assert_eq!(driven.chain.handle(driven.now, Side::Client, b"x").unwrap(), Offered::Unchanged);
    assert!(driven.end(Side::Client).unwrap());
}

#[test]
fn random_stages_in_random_orders_lose_nothing() {
    for seed in 0..300 {
        let mut next = numbers(seed);
        let mut ends = 0;
        let list: Vec<Box<dyn Stage>> = (0..next(6))
            .map(|_| -> Box<dyn Stage> {
                match next(3) {
                    0 => {
                        ends += 1;
                        Box::new(Nibbling)
                    }
                    1 => Box::new(Late(Some(Instant::from_millis(next(50))))),
                    _ => {
                        let bucket = ByteBucket::new(1 + next(100_000), 1 + next(100), Instant::ZERO);
                        Box::new(Throttle::new(bucket, Directions::Up))
                    }
                }
            })
            .collect();
        let mut driven = Driven::new(list);
        driven.take_max = 1 + next(50) as usize;
        let bytes: Vec<u8> = (0..next(400)).map(|_| next(256) as u8).collect();
        assert!(
            driven.offer(Side::Client, &bytes).unwrap() && driven.end(Side::Client).unwrap(),
            "seed {seed}"
        );
        let mut rest = driven.out[0].as_slice();
        while let Some(after) = rest.strip_prefix(b"now: ") {
            rest = after;
        }
        // Ticks may come between; what was said is there in order.
        let mut said = bytes.iter();
        let mut wanted = said.next();
        for byte in &driven.out[0] {
            if wanted == Some(byte) {
                wanted = said.next();
            }
        }
        assert_eq!(wanted, None, "seed {seed}");
        assert!(driven.out[0].len() >= bytes.len() + ends, "seed {seed}");
    }
}
