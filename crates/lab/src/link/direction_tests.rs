use super::super::conditions::{Loss, Rate};
use super::*;

/// Numbered wire frames of 1,000 bytes each.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Numbers(Vec<u64>);

impl Frame for Numbers {
    fn wire_frames(&self) -> usize {
        self.0.len()
    }

    fn wire_bytes(&self, _index: usize) -> usize {
        1000
    }

    fn cut(&self, range: Range<usize>) -> Option<Self> {
        Some(Self(self.0.get(range)?.to_vec()))
    }

    fn memory_bytes(&self) -> usize {
        1000 * self.0.len()
    }
}

const MS: Duration = Duration::from_millis(1);

/// Offers super-frames of `size` frames, one every `gap`, and returns the arrivals with their times.
fn carried(conditions: Conditions, count: u64, size: u64, gap: Duration) -> (Vec<(Instant, u64)>, Counts) {
    let mut direction = Direction::new(conditions, 42);
    let mut arrived = Vec::new();
    let mut now = Instant::ZERO;
    let mut drain = |direction: &mut Direction<Numbers>, until: Instant| {
        while let Some(due) = direction.deadline().filter(|due| *due <= until) {
            let frame = direction.poll(due).expect("due");
            arrived.extend(frame.0.into_iter().map(|number| (due, number)));
        }
    };
    for start in (0..count).step_by(usize::try_from(size).unwrap()) {
        drain(&mut direction, now);
        direction.handle(now, Input::Frame(Numbers((start..(start + size).min(count)).collect())));
        now = now + gap;
    }
    drain(&mut direction, Instant::from_nanos(u64::MAX));
    assert_eq!(direction.poll(Instant::from_nanos(u64::MAX)), None);
    let counts = direction.counts();
    let gone = counts.lost + counts.queue_full + counts.down + counts.overrun;
    assert_eq!(counts.offered + counts.duplicated, counts.delivered + gone, "{counts:?}");
    assert_eq!(counts.delivered, arrived.len() as u64);
    (arrived, counts)
}

fn numbers(arrived: &[(Instant, u64)]) -> Vec<u64> {
    arrived.iter().map(|(_, number)| *number).collect()
}

#[test]
fn a_perfect_wire_passes_super_frames_whole_and_at_once() {
    let mut direction = Direction::new(Conditions::default(), 1);
    let frame = Numbers((0..44).collect());
    direction.handle(Instant::from_millis(3), Input::Frame(frame.clone()));
    assert_eq!(direction.deadline(), Some(Instant::from_millis(3)));
    assert_eq!(direction.poll(Instant::from_millis(3)), Some(frame));
    assert_eq!(direction.deadline(), None);
}

#[test]
fn delay_is_exact_and_nothing_comes_early() {
    let mut direction = Direction::new(Conditions::delayed(5 * MS), 1);
    direction.handle(Instant::ZERO, Input::Frame(Numbers(vec![0])));
    assert_eq!(direction.poll(Instant::from_nanos(4_999_999)), None);
    assert_eq!(direction.poll(Instant::from_millis(5)), Some(Numbers(vec![0])));
}

#[test]
fn jitter_keeps_the_order_and_its_bounds() {
    let conditions = Conditions { jitter: 2 * MS, ..Conditions::delayed(5 * MS) };
    let (arrived, _) = carried(conditions, 2000, 1, 10 * MS);
    assert_eq!(numbers(&arrived), (0..2000).collect::<Vec<_>>());
    let delays = arrived.iter().map(|(at, number)| at.since(Instant::ZERO + 10 * MS * *number as u32));
    let (least, most) = delays.fold((Duration::MAX, Duration::ZERO), |(a, b), d| (a.min(d), b.max(d)));
    assert!(least >= 3 * MS && least < 3 * MS + MS / 10, "{least:?}");
    assert!(most <= 7 * MS && most > 7 * MS - MS / 10, "{most:?}");
    // If frames are close together, a later one waits for an earlier one.
    let (arrived, _) = carried(conditions, 2000, 1, MS / 100);
    assert_eq!(numbers(&arrived), (0..2000).collect::<Vec<_>>());
}

#[test]
fn losses_fall_on_wire_frames_of_super_frames_too() {
    for size in [1, 44] {
        let conditions = Conditions { loss: Loss::Bernoulli(0.05), ..Conditions::default() };
        let (arrived, counts) = carried(conditions, 40_040, size, MS);
        // 2,002 +- 4 * sqrt(40,040 * 0.05 * 0.95).
        assert!((1_827..2_177).contains(&counts.lost), "size {size}: {counts:?}");
        assert!(numbers(&arrived).is_sorted(), "order is kept");
        let gaps = arrived.windows(2).filter(|pair| pair[1].1 > pair[0].1 + 1).count();
        assert!(gaps > 1_500, "single frames are missing, not whole super-frames: {gaps} gaps");
    }
}

#[test]
fn on_super_frames_all_or_nothing_is_lost() {
    let conditions =
        Conditions { loss: Loss::Bernoulli(0.2), on_super_frames: true, ..Conditions::default() };
    let (arrived, counts) = carried(conditions, 4_000, 10, MS);
    assert!(counts.lost > 400 && counts.lost.is_multiple_of(10), "{counts:?}");
    assert!(arrived.chunks(10).all(|ten| ten[0].1.is_multiple_of(10) && ten[9].1 == ten[0].1 + 9));
}

#[test]
fn the_rate_spaces_frames_and_its_queue_is_finite() {
    // 1,000 bytes at 8 Mbit/s take 1 ms. The queue holds five frames, including the one being sent.
    let rate = Some(Rate { bits_per_second: 8_000_000, queue_bytes: 5_000 });
    let conditions = Conditions { rate, ..Conditions::delayed(5 * MS) };
    let (arrived, counts) = carried(conditions, 10, 10, MS);
    let due: Vec<_> = arrived.iter().map(|(at, _)| at.since(Instant::ZERO)).collect();
    assert_eq!(due, [6 * MS, 7 * MS, 8 * MS, 9 * MS, 10 * MS]);
    assert_eq!(counts.queue_full, 5);
    // Of frames offered at twice the rate, half arrive, at the rate.
    let (arrived, _) = carried(conditions, 4_000, 1, MS / 2);
    let seconds = arrived.last().unwrap().0.since(arrived[0].0).as_secs_f64();
    let reached = (arrived.len() - 1) as f64 * 8_000.0 / seconds;
    assert!((7_999_000.0..8_001_000.0).contains(&reached), "{reached} bit/s");
}

#[test]
fn a_fast_rate_cuts_super_frames_only_as_finely_as_the_bunch() {
    let rate = Some(Rate { bits_per_second: 1_000_000_000, queue_bytes: 1_000_000 });
    let mut direction = Direction::new(Conditions { rate, ..Conditions::default() }, 1);
    direction.handle(Instant::ZERO, Input::Frame(Numbers((0..44).collect())));
    let mut sizes = Vec::new();
    while let Some(due) = direction.deadline() {
        let frame = direction.poll(due).expect("due");
        // Each frame leaves with its last byte: 8 us per frame.
        assert_eq!(due.as_nanos(), 8_000 * (frame.0.last().unwrap() + 1));
        sizes.push(frame.0.len());
    }
    assert_eq!(sizes, [13, 13, 13, 5], "13 frames are 96 us apart");
}

#[test]
fn duplicates_and_overtaking_are_counted_and_seen() {
    let conditions = Conditions { duplicate: 0.1, reorder: 0.05, ..Conditions::delayed(5 * MS) };
    for size in [1, 7] {
        let (arrived, counts) = carried(conditions, 7_000, size, MS);
        assert!((600..800).contains(&counts.duplicated), "{counts:?}");
        assert!((280..420).contains(&counts.reordered), "{counts:?}");
        let early = arrived.windows(2).filter(|pair| pair[1].1 < pair[0].1).count();
        assert!(early > 200, "{early} frames came out of order");
        let mut once = numbers(&arrived);
        once.sort_unstable();
        once.dedup();
        assert_eq!(once, (0..7_000).collect::<Vec<_>>(), "none is missing");
    }
}

#[test]
fn down_stops_what_enters_and_lets_arrive_what_is_under_way() {
    let mut direction = Direction::new(Conditions::delayed(5 * MS), 1);
    direction.handle(Instant::ZERO, Input::Frame(Numbers(vec![0])));
    direction.handle(Instant::ZERO, Input::Conditions(Conditions { is_up: false, ..Conditions::default() }));
    direction.handle(Instant::ZERO, Input::Frame(Numbers(vec![1, 2])));
    assert_eq!(direction.poll(Instant::from_millis(5)), Some(Numbers(vec![0])));
    assert_eq!((direction.poll(Instant::from_millis(500)), direction.counts().down), (None, 2));
    direction.handle(Instant::from_millis(9), Input::Conditions(Conditions::default()));
    direction.handle(Instant::from_millis(9), Input::Frame(Numbers(vec![3])));
    assert_eq!(direction.poll(Instant::from_millis(9)), Some(Numbers(vec![3])));
}

#[test]
fn a_shorter_delay_does_not_let_later_frames_overtake() {
    let mut direction = Direction::new(Conditions::delayed(50 * MS), 1);
    direction.handle(Instant::ZERO, Input::Frame(Numbers(vec![0])));
    direction.handle(Instant::ZERO, Input::Conditions(Conditions::delayed(MS)));
    direction.handle(Instant::from_millis(1), Input::Frame(Numbers(vec![1])));
    assert_eq!(direction.poll(Instant::from_millis(49)), None);
    assert_eq!(direction.poll(Instant::from_millis(50)), Some(Numbers(vec![0])));
    assert_eq!(direction.poll(Instant::from_millis(50)), Some(Numbers(vec![1])));
}

#[test]
fn the_line_is_bounded() {
    let mut direction = Direction::new(Conditions::delayed(50 * MS), 1);
    let most = (LINE_BYTES / 1000) as u64;
    for number in 0..most + 3 {
        direction.handle(Instant::ZERO, Input::Frame(Numbers(vec![number])));
    }
    assert_eq!(direction.counts().overrun, 3);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let conditions = Conditions {
        jitter: MS,
        loss: Loss::Burst { enter: 0.02, leave: 0.3 },
        duplicate: 0.01,
        reorder: 0.01,
        rate: Some(Rate { bits_per_second: 50_000_000, queue_bytes: 30_000 }),
        ..Conditions::delayed(3 * MS)
    };
    let first = carried(conditions, 5_000, 9, MS);
    assert_eq!(first, carried(conditions, 5_000, 9, MS));
    assert!(first.1.lost > 0 && first.1.queue_full > 0 && first.1.reordered > 0);
}
