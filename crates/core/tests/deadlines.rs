//! The order of deadlines, against the simplest model: check every flow.

use proptest::prelude::*;
use sidetrack_core::deadlines::Deadlines;
use sidetrack_core::time::Instant;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

#[test]
fn a_later_deadline_costs_nothing_and_an_earlier_one_counts() {
    let mut deadlines = Deadlines::new();
    assert_eq!((deadlines.deadline(), deadlines.due(at(1 << 40))), (None, None));
    deadlines.by(7, at(100));
    deadlines.by(7, at(5000));
    assert_eq!((deadlines.look_at(7), deadlines.look_at(8)), (Some(at(100)), None));
    deadlines.by(3, at(200));
    deadlines.by(3, at(50));
    assert_eq!(deadlines.due(at(49)), None);
    assert_eq!(deadlines.due(at(100)), Some(3), "the longest due first");
    assert_eq!(deadlines.due(at(100)), Some(7));
    assert_eq!((deadlines.due(at(1 << 40)), deadlines.look_at(7)), (None, None));
    // Like the flow's owner after a look: set the real deadline.
    deadlines.by(7, at(5000));
    assert_eq!(deadlines.deadline(), Some(at(5000)));
}

/// A step of the model: a flow gets a deadline, loses it, or time passes.
#[derive(Clone, Copy, Debug)]
enum Step {
    Set(u32, u64),
    Clear(u32),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u32..6, 0u64..500).prop_map(|(place, ms)| Step::Set(place, ms)),
        1 => (0u32..6).prop_map(Step::Clear),
        2 => (0u64..200).prop_map(Step::Pass),
    ]
}

proptest! {
    /// The test acts like a worker's sweep: at a look it reads the real deadline, and puts the flow back if that is later.
    /// Each flow whose deadline has passed must be found at once, and once.
    #[test]
    fn everybody_overdue_is_found(steps in prop::collection::vec(step(), 1..200)) {
        let mut deadlines = Deadlines::new();
        let mut real = [None; 6];
        let mut now = 0;
        for step in steps {
            match step {
                Step::Set(place, ms) => {
                    real[place as usize] = Some(now + ms);
                    deadlines.by(place, at(now + ms));
                }
                Step::Clear(place) => real[place as usize] = None,
                Step::Pass(ms) => now += ms,
            }
            let mut found = Vec::new();
            while let Some(place) = deadlines.due(at(now)) {
                match real[place as usize] {
                    Some(due) if due <= now => found.push(place),
                    Some(due) => deadlines.by(place, at(due)),
                    None => {}
                }
            }
            found.sort_unstable();
            let expected: Vec<u32> =
                (0..6).filter(|place| real[*place as usize].is_some_and(|due| due <= now)).collect();
            prop_assert_eq!(&found, &expected);
            for place in found {
                real[place as usize] = None;
            }
            let first = (0..6).filter_map(|place| deadlines.look_at(place)).min();
            prop_assert_eq!(deadlines.deadline(), first);
            prop_assert!(first.is_none_or(|first| first > at(now)));
        }
    }
}
