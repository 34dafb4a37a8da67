//! Budgets, token buckets and per-source limits.

use proptest::prelude::*;
use sidetrack_core::limit::{
    Budget, DESCRIPTORS_PER_FLOW, DESCRIPTORS_PER_PIPE, OldestFirst, SourceLimit, TokenBucket,
};
use sidetrack_core::time::Instant;
use std::net::IpAddr;
use std::time::Duration;

#[test]
fn known_descriptor_limits() {
    let maxima = |nofile, reserve| {
        let budget = Budget::from_nofile(nofile, reserve);
        (budget.flows().max, budget.pipes())
    };
    assert_eq!(maxima(1024, 64), (465, 15));
    assert_eq!(maxima(20_000, 64), (9_657, 311));
    assert_eq!(maxima(1 << 20, 64), (523_232, 1024));
    assert_eq!(maxima(u64::MAX, 64), (Budget::MAX_FLOWS, Budget::MAX_PIPES));
    assert_eq!(maxima(64, 64), (0, 0));
    assert_eq!(maxima(0, u64::MAX), (0, 0));
}

#[test]
fn what_is_shed_is_counted_and_what_is_released_can_be_had_again() {
    let mut budget = Budget::from_nofile(4, 0);
    assert!(budget.admit() && budget.admit());
    assert!(!budget.admit() && !budget.admit());
    budget.release();
    assert!(budget.admit());
    let flows = budget.flows();
    assert_eq!((flows.max, flows.live, flows.peak, flows.admitted, flows.shed), (2, 2, 2, 3, 2));
}

#[test]
fn a_bucket_lets_a_burst_through_then_the_rate_and_says_what_it_swallowed() {
    let at = Instant::from_millis;
    let mut bucket = TokenBucket::new(3, 2, at(0));
    assert_eq!([(); 4].map(|()| bucket.take(at(0))), [Some(0), Some(0), Some(0), None]);
    assert_eq!(bucket.deadline(), Some(at(500)));
    assert_eq!(bucket.take(Instant::from_nanos(499_999_999)), None);
    assert_eq!(bucket.take(at(500)), Some(2));
    assert_eq!(bucket.take(at(100)), None, "a clock that goes back gives nothing");
    assert_eq!(bucket.take(at(999)), None, "nor does it fill twice for the time between");
    assert_eq!(bucket.take(at(3_600_000)), Some(2));
    assert_eq!((bucket.take(at(3_600_000)), bucket.take(at(3_600_000))), (Some(0), Some(0)));
    assert_eq!(bucket.take(at(3_600_000)), None, "an hour fills it no higher than the burst");
}

#[test]
fn a_bucket_at_its_extremes() {
    let mut never = TokenBucket::new(0, 0, Instant::ZERO);
    assert_eq!(never.take(Instant::ZERO), Some(0), "a burst of 0 is 1");
    assert_eq!(never.take(Instant::from_nanos(u64::MAX)), None);
    assert_eq!(never.deadline(), None);
    let mut wide = TokenBucket::new(u32::MAX, u32::MAX, Instant::ZERO);
    assert_eq!(wide.take(Instant::from_nanos(u64::MAX)), Some(0));
}

#[test]
fn one_source_cannot_take_all_and_the_table_is_bounded() {
    let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
    let mut limit = SourceLimit::new(2, 2);
    assert!(limit.admit(ip("192.0.2.1")) && limit.admit(ip("::ffff:192.0.2.1")));
    assert!(!limit.admit(ip("192.0.2.1")), "a mapped address is the same source");
    assert!(limit.admit(ip("2001:db8::1")) && limit.admit(ip("2001:db8::2:ffff:ffff:ffff")));
    assert!(!limit.admit(ip("2001:db8::3")), "a /64 is one source");
    assert!(!limit.admit(ip("2001:db8:0:1::1")), "the table is full");
    assert_eq!((limit.sources(), limit.shed()), (2, 3));
    limit.release(ip("192.0.2.1"));
    limit.release(ip("192.0.2.1"));
    assert_eq!((limit.live(ip("192.0.2.1")), limit.sources()), (0, 1));
    assert!(limit.admit(ip("2001:db8:0:1::1")));
}

#[test]
fn the_one_who_waits_longest_leaves_and_who_left_by_himself_does_not() {
    let mut places = OldestFirst::new(2);
    let enter = |places: &mut OldestFirst<char>, who| places.enter(who);
    let (a, none) = enter(&mut places, 'a');
    assert_eq!(none, None);
    let (b, none) = enter(&mut places, 'b');
    assert_eq!((none, places.len()), (None, 2));
    let (_, oldest) = enter(&mut places, 'c');
    assert_eq!((oldest, places.len(), places.left()), (Some('a'), 2, 1));
    places.leave(a);
    places.leave(b);
    assert_eq!(places.len(), 1, "a had left before");
    let (_, none) = enter(&mut places, 'd');
    assert_eq!(none, None, "b left by itself");
    assert_eq!(enter(&mut places, 'e').1, Some('c'));
    assert_eq!((places.leave_oldest(), places.left()), (Some('d'), 3), "for someone who needs no place here");
    assert_eq!((places.len(), places.leave_oldest(), places.leave_oldest()), (1, Some('e'), None));
    assert_eq!(OldestFirst::<char>::new(0).most(), 1, "the newest always has a place");
}

#[test]
fn a_flow_that_comes_for_one_that_leaves_is_counted_and_not_shed() {
    let mut budget = Budget::from_nofile(4096, 0).at_most(2);
    assert!(budget.admit() && budget.admit() && !budget.admit());
    assert_eq!(budget.flows().shed, 1);
    budget.admit_for_one_that_leaves();
    assert_eq!((budget.flows().live, budget.flows().shed, budget.flows().admitted), (3, 0, 3));
    budget.release();
    assert!(!budget.admit(), "the other one has left, and both places are taken");
    budget.release();
    assert!(budget.admit());
}

proptest! {
    #[test]
    fn a_budget_never_exceeds_the_descriptor_limit(nofile: u64, reserve: u64) {
        let budget = Budget::from_nofile(nofile, reserve);
        let used = u128::from(budget.flows().max) * u128::from(DESCRIPTORS_PER_FLOW)
            + u128::from(budget.pipes()) * u128::from(DESCRIPTORS_PER_PIPE);
        prop_assert!(used <= u128::from(nofile.saturating_sub(reserve)));
    }

    #[test]
    fn a_bucket_never_gives_more_than_burst_and_rate(
        burst in 1u32..20,
        per_second in 0u32..50,
        waits_ms in prop::collection::vec(0u64..400, 1..300),
    ) {
        let mut bucket = TokenBucket::new(burst, per_second, Instant::ZERO);
        let mut now = Instant::ZERO;
        let (mut taken, mut refused, mut told) = (0u64, 0u64, 0u64);
        for wait in waits_ms {
            now = now + Duration::from_millis(wait);
            match bucket.take(now) {
                Some(swallowed) => {
                    taken += 1;
                    told += swallowed;
                }
                None => refused += 1,
            }
            let allowed = u64::from(burst) + now.as_nanos() / 1000 * u64::from(per_second) / 1_000_000 + 1;
            prop_assert!(taken <= allowed, "{taken} of {allowed}");
            prop_assert!(told <= refused);
            if let Some(deadline) = bucket.deadline() {
                prop_assert!(bucket.clone().take(deadline).is_some(), "a token is there at the deadline");
            }
        }
    }

    #[test]
    fn a_source_limit_counts_like_a_model(
        steps in prop::collection::vec((0u8..6, any::<bool>()), 1..200),
    ) {
        let mut limit = SourceLimit::new(3, 4);
        let mut live = [0u32; 6];
        for (source, admit) in steps {
            let address = IpAddr::from([10, 0, 0, source]);
            let slot = &mut live[usize::from(source)];
            if !admit && *slot > 0 {
                limit.release(address);
                *slot -= 1;
            } else if admit {
                let count = *slot;
                let sources = live.iter().filter(|count| **count > 0).count();
                let expected = count < 3 && (count > 0 || sources < 4);
                prop_assert_eq!(limit.admit(address), expected);
                live[usize::from(source)] += u32::from(expected);
            }
            prop_assert_eq!(limit.live(address), live[usize::from(source)]);
            prop_assert_eq!(limit.sources(), live.iter().filter(|count| **count > 0).count());
        }
    }
}

#[test]
fn associations_use_half_of_the_descriptors_and_one_each() {
    let mut budget = Budget::from_nofile(8, 0);
    assert_eq!(budget.flows().max, 4);
    for _ in 0..4 {
        assert!(budget.admit_single());
    }
    assert!(!budget.admit_single(), "the other half is for connections");
    assert!(budget.admit() && budget.admit());
    assert!(!budget.admit(), "all eight descriptors are used");
    budget.release_single();
    assert!(!budget.admit(), "a connection needs two");
    budget.release_single();
    assert!(budget.admit() && !budget.admit_single());
    let mut budget = Budget::from_nofile(4096, 0).at_most(2);
    assert!(budget.admit_single() && budget.admit_beside());
    assert!(
        !budget.admit_single() && !budget.admit() && !budget.admit_beside(),
        "as configured, of all kinds"
    );
    budget.release_single();
    assert!(budget.admit());
}

#[test]
fn descriptors_that_flows_share_are_counted_once_and_outlive_the_first_flow() {
    let mut budget = Budget::from_nofile(8, 0);
    assert!(budget.admit_single());
    budget.share_single();
    for _ in 0..100 {
        assert!(budget.admit_beside(), "it needs no descriptor");
    }
    assert_eq!(budget.beside(), 101);
    // The first one ends, and its descriptor stays.
    budget.release_beside();
    assert!(budget.admit_single() && budget.admit_single() && budget.admit_single());
    assert!(!budget.admit_single(), "four are half of the descriptors");
    budget.release_shared();
    assert!(budget.admit_single(), "it is closed");
    let mut budget = Budget::from_nofile(8, 0);
    assert!(budget.admit());
    budget.share();
    assert!(budget.admit() && budget.admit() && budget.admit());
    assert!(!budget.admit(), "two descriptors of a hop are shared");
    budget.release_shared();
    budget.release_shared();
    assert!(budget.admit());
    let mut few = Budget::from_nofile(8, 0).at_most(2);
    assert!(few.admit_single());
    few.share_single();
    assert!(few.admit_beside() && !few.admit_beside(), "each counts as one flow");
}
