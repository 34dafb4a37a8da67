//! Replacing, against a model that sees all bytes at once.

use super::drive::{Driven, cut, numbers};
use sidetrack_core::flow::Side;
use sidetrack_core::function::{Directions, Replace, Replacement, Replacements};

fn table(pairs: &[(&[u8], &[u8])]) -> Vec<Replacement> {
    let one = |(find, replace): &(&[u8], &[u8])| Replacement {
        find: find.to_vec(),
        replace: replace.to_vec(),
        directions: Directions::Up,
    };
    pairs.iter().map(one).collect()
}

fn replacing(all: &[Replacement]) -> Driven {
    Driven::new(vec![Box::new(Replace::new(Replacements::new(all).unwrap()))])
}

/// The leftmost word, the first in the list of those that begin there, replaced; then on behind it.
fn model(all: &[Replacement], bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match all.iter().find(|one| bytes[at..].starts_with(&one.find)) {
            Some(one) => {
                out.extend_from_slice(&one.replace);
                at += one.find.len();
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    out
}

#[test]
fn every_cut_gives_what_the_whole_gives() {
    let tables = [
        table(&[(b"abc", b"X"), (b"ab", b"YY"), (b"b", b"")]),
        table(&[(b"ab", b"YY"), (b"abab", b"never"), (b"ba", b"ab")]),
        table(&[(b"aaaa", b"a"), (b"aab", b"bbbbbbbbbb")]),
        table(&[(b"cabcab", b"1"), (b"abcc", b"2"), (b"bca", b"3")]),
    ];
    for (at, all) in tables.iter().enumerate() {
        for seed in 0..400 {
            let mut next = numbers(seed * 7 + at as u64);
            let bytes: Vec<u8> = (0..next(60)).map(|_| b'a' + next(3) as u8).collect();
            let most = 1 + next(9) as usize;
            let mut driven = replacing(all);
            // No time passes, so nothing is let go before its rest has come.
            for part in cut(&bytes, most, &mut next) {
                driven
                    .chain
                    .handle(driven.now, Side::Client, &part)
                    .map(|offered| {
                        if offered == sidetrack_core::chain::Offered::Unchanged {
                            driven.out[0].extend_from_slice(&part);
                        }
                    })
                    .unwrap();
                driven.drain().unwrap();
            }
            assert!(driven.end(Side::Client).unwrap());
            let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(
                shown(&driven.out[0]),
                shown(&model(all, &bytes)),
                "table {at} seed {seed} {:?}",
                shown(&bytes)
            );
        }
    }
}

#[test]
fn large_transfers_that_grow_and_shrink_are_whole() {
    for pairs in [&[(&b"a"[..], &b"0123456789"[..])][..], &[(b"aaaaaaaa", b"")], &[(b"zz", b"y")]] {
        let all = table(pairs);
        let bytes = vec![b'a'; 700_000];
        let mut driven = replacing(&all);
        assert!(driven.offer(Side::Client, &bytes).unwrap() && driven.end(Side::Client).unwrap());
        assert_eq!(driven.out[0], model(&all, &bytes));
    }
}

#[test]
fn a_beginning_is_let_go_when_its_rest_does_not_come() {
    let mut driven = replacing(&table(&[(b"password", b"********")]));
    assert!(driven.offer(Side::Client, b"my pass").unwrap());
    assert_eq!(driven.out[0], b"my ");
    let due = driven.chain.deadline().unwrap();
    driven.now = due;
    driven.drain().unwrap();
    assert_eq!(driven.out[0], b"my pass");
    assert_eq!(driven.chain.deadline(), None);
    assert!(driven.offer(Side::Client, b" and my password.").unwrap());
    assert_eq!(driven.out[0], b"my pass and my ********.");
    assert!(driven.offer(Side::Server, b"password").unwrap());
    assert_eq!(driven.out[1], b"password", "one direction only");
}
