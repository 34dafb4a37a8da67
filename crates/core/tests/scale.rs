//! Pools that grow and shrink: within their bounds, at once where flows need it, and never to and fro under the same load.

use sidetrack_core::function::scale::{Bounds, CPU_HIGH_MILLI, CPU_LOW_MILLI, CPU_REST, Sample, Scaler};
use sidetrack_core::time::Instant;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const CALM: Duration = Duration::from_secs(30);

/// A pool whose containers start and end at once, and its clock.
struct Pool {
    scaler: Scaler,
    now: Instant,
    changes: Vec<u16>,
}

impl Pool {
    fn new(min: u16, max: u16, flows_per_replica: u32) -> Self {
        let scaler = Scaler::new(Bounds { min, max, flows_per_replica, calm: CALM });
        Self { scaler, now: Instant::ZERO, changes: Vec::new() }
    }

    /// The same load for a number of seconds.
    fn load(&mut self, seconds: u64, flows: u64, cpu_milli: Option<u64>) -> u16 {
        for _ in 0..seconds {
            let sample = Sample { flows, well: self.scaler.target(), cpu_milli };
            self.scaler.handle(self.now, sample);
            self.changes.extend(self.scaler.poll());
            assert_eq!(self.scaler.poll(), None, "told once");
            self.now = self.now + SECOND;
        }
        self.scaler.target()
    }
}

/// Longer than a pool of eight needs to reach its end.
const LONG: u64 = 8 * (CALM.as_secs() + 2);

#[test]
fn it_grows_at_once_and_shrinks_one_by_one_after_a_while() {
    let mut pool = Pool::new(1, 8, 10);
    assert_eq!(pool.load(1, 10, None), 1);
    assert_eq!(pool.load(1, 11, None), 2);
    assert_eq!(pool.load(1, 75, None), 8);
    assert_eq!(pool.load(1, 1_000_000, None), 8, "no more than its maximum");
    assert_eq!(pool.load(CALM.as_secs(), 0, None), 8, "not yet");
    assert_eq!(pool.load(1, 0, None), 7);
    assert_eq!(pool.load(LONG, 0, None), 1);
    assert_eq!(pool.changes, [2, 8, 7, 6, 5, 4, 3, 2, 1]);
}

#[test]
fn under_the_same_load_it_comes_to_rest_whatever_was_before() {
    for before in 0..=90 {
        for flows in 0..=90 {
            let mut pool = Pool::new(2, 8, 10);
            pool.load(1, before, None);
            let rest = pool.load(LONG, flows, None);
            pool.changes.clear();
            assert_eq!(pool.load(LONG, flows, None), rest);
            assert!(pool.changes.is_empty(), "{before}, then {flows}: {:?}", pool.changes);
            let needed = flows.div_ceil(10).clamp(2, 8);
            assert!(
                u64::from(rest) >= needed && u64::from(rest) <= (needed * 4).div_ceil(3) + 1,
                "{flows}: {rest}"
            );
        }
    }
}

#[test]
fn a_load_that_goes_to_and_fro_within_a_quarter_changes_nothing() {
    let mut pool = Pool::new(1, 8, 10);
    pool.load(1, 40, None);
    pool.changes.clear();
    for turn in 0..500 {
        pool.load(1, if turn % 2 == 0 { 40 } else { 31 }, None);
    }
    assert!(pool.changes.is_empty(), "{:?}", pool.changes);
    // One moment of more load begins the calm time anew.
    for _ in 0..20 {
        pool.load(CALM.as_secs() - 1, 5, None);
        pool.load(1, 40, None);
    }
    assert!(pool.changes.is_empty(), "{:?}", pool.changes);
}

#[test]
fn cpu_time_asks_for_more_with_a_rest_between() {
    let mut pool = Pool::new(1, 4, 1000);
    assert_eq!(pool.load(1, 1, Some(CPU_HIGH_MILLI)), 1);
    assert_eq!(pool.load(1, 1, Some(CPU_HIGH_MILLI + 1)), 2);
    assert_eq!(pool.load(CPU_REST.as_secs() - 1, 1, Some(5_000)), 2, "the new one takes its share first");
    assert_eq!(pool.load(1, 1, Some(5_000)), 3);
    assert_eq!(pool.load(LONG, 1, Some(CPU_LOW_MILLI * 2 + 1)), 3, "two would be too busy");
    assert_eq!(pool.load(LONG, 1, Some(CPU_LOW_MILLI + 1)), 2, "one would be too busy");
    assert_eq!(pool.load(LONG, 1, None), 1);
}

#[test]
fn containers_that_do_not_work_yet_are_not_counted_twice() {
    let mut scaler = Scaler::new(Bounds { min: 1, max: 8, flows_per_replica: 10, calm: CALM });
    let mut now = Instant::ZERO;
    // The second container does not start: CPU time asks for no third one, and fewer do not do.
    for _ in 0..LONG {
        scaler.handle(now, Sample { flows: 15, well: 1, cpu_milli: Some(1_000) });
        now = now + SECOND;
    }
    assert_eq!(scaler.target(), 2);
}

#[test]
fn in_any_order_of_loads_it_stays_in_its_bounds_and_is_never_too_small_for_the_flows() {
    let mut state = 29_u64;
    let mut roll = move |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    for _ in 0..300 {
        let (min, more) = (roll(4) as u16, roll(8) as u16);
        let per = roll(20) as u32;
        let mut scaler = Scaler::new(Bounds { min, max: min + more, flows_per_replica: per, calm: CALM });
        let (low, high) = (min.max(1), (min + more).max(min.max(1)));
        let mut now = Instant::ZERO;
        for _ in 0..400 {
            let flows = roll(200);
            let well = roll(u64::from(high) + 1) as u16;
            let cpu_milli = (roll(2) == 0).then(|| roll(9_000));
            let before = scaler.target();
            scaler.handle(now, Sample { flows, well, cpu_milli });
            let target = scaler.target();
            assert!((low..=high).contains(&target));
            assert!(u64::from(target) >= flows.div_ceil(per.max(1).into()).min(high.into()));
            assert!(target + 1 >= before, "one at a time");
            now = now + Duration::from_millis(roll(20_000));
        }
    }
}
