//! Two chains that become one, as when the container between them is left out.

use super::drive::{Driven, stages};
use super::toy::Toy;
use sidetrack_core::chain::{Chain, Offered};
use sidetrack_core::flow::Side;
use sidetrack_core::function::{Directions, End, Records, Replace, Replacement, Replacements, Stage};
use sidetrack_core::time::Instant;

fn all() -> Vec<Box<dyn Stage>> {
    let word =
        Replacement { find: b"old".to_vec(), replace: b"newer".to_vec(), directions: Directions::Both };
    vec![
        Box::new(Records::new(Toy::shared(1, 2), End::Encrypt)),
        Box::new(Records::new(Toy::shared(1, 3), End::Decrypt)),
        Box::new(Replace::new(Replacements::new(&[word]).unwrap())),
        Box::new(Records::new(Toy::shared(4, 5), End::Encrypt)),
        Box::new(Records::new(Toy::shared(4, 6), End::Decrypt)),
    ]
}

/// As a session does it: the client's first bytes pass the first chain, what comes out passes the second, then they are one.
fn joined(at: usize, first: &[u8]) -> Driven {
    let mut before = all();
    let behind = before.split_off(at);
    let now = Instant::ZERO;
    let [mut before, mut behind] = [before, behind].map(|list| Chain::new(stages(list), now).unwrap());
    let lead = |chain: &mut Chain, bytes: &[u8]| match chain.handle(now, Side::Client, bytes).unwrap() {
        Offered::Unchanged => bytes.to_vec(),
        Offered::Inside => chain.take(Side::Client, usize::MAX).to_vec(),
    };
    let out = lead(&mut before, first);
    let out = if out.is_empty() { out } else { lead(&mut behind, &out) };
    let chain = before.followed_by(now, behind).unwrap();
    Driven { chain, now, out: [out, Vec::new()], take_max: usize::MAX }
}

#[test]
fn two_chains_become_one_without_losing_a_byte() {
    let (up, down) = (b"an old hat, an old hat".as_slice(), b"very old answers".as_slice());
    for at in 0..=all().len() {
        for cut in [1, 5, up.len()] {
            let mut one = joined(at, &up[..cut]);
            assert!(one.offer(Side::Client, &up[cut..]).unwrap() && one.offer(Side::Server, down).unwrap());
            assert!(one.end(Side::Client).unwrap() && one.end(Side::Server).unwrap(), "{at} {cut}");
            let expected = [b"an newer hat, an newer hat".to_vec(), b"very newer answers".to_vec()];
            assert_eq!(one.out, expected, "joined at {at}, the first {cut} bytes before");
        }
    }
}
