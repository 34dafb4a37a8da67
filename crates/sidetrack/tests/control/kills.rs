//! Orchestrators, agents and members of etcd are killed while applications are set up: each is ready or clearly refused, and
//! nothing is left of it. `SIDETRACK_KILLS` is the number of kills, `SIDETRACK_SEED` makes a run again.

use crate::etcd::{Etcd, table};
use crate::node::Dice;
use crate::plane::Plane;
use sidetrack::control::api::Progress;

/// Kills in a usual run of the tests.
const KILLS: usize = 5;

fn number<T: std::str::FromStr>(name: &str, usual: T) -> T {
    std::env::var(name).map_or(usual, |text| text.parse().ok().expect("a number"))
}

/// What can be killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    First,
    Second,
    Hospital,
    Centre,
    Member(usize),
}

const VICTIMS: [Victim; 7] = [
    Victim::First,
    Victim::Hospital,
    Victim::Member(0),
    Victim::Second,
    Victim::Centre,
    Victim::Member(1),
    Victim::Member(2),
];

impl Victim {
    fn kill(self, plane: &mut Plane, etcd: &mut Etcd) {
        match self {
            Self::First => plane.orchestrator.kill(),
            Self::Second => plane.second.as_mut().expect("a second one").kill(),
            Self::Hospital => plane.hospital.kill(),
            Self::Centre => plane.centre.kill(),
            Self::Member(at) => etcd.kill(at),
        }
    }

    fn restart(self, plane: &mut Plane, etcd: &mut Etcd) {
        match self {
            Self::First => plane.orchestrator.restart(),
            Self::Second => plane.second.as_mut().expect("a second one").restart(),
            Self::Hospital => plane.hospital.restart(),
            Self::Centre => plane.centre.restart(),
            Self::Member(at) => etcd.restart(at),
        }
    }
}

#[test]
fn whatever_is_killed_an_application_is_ready_or_refused_and_nothing_is_orphaned() {
    let (kills, seed) = (number("SIDETRACK_KILLS", KILLS), number("SIDETRACK_SEED", 29_u64));
    let mut dice = Dice(seed);
    let mut etcd = None;
    let mut plane = Plane::shared("[[grant]]\n", |folder| {
        let (started, clients) = Etcd::start(folder);
        etcd = Some(started);
        table(clients)
    });
    let etcd = etcd.as_mut().expect("started");
    let (mut ready, mut refused, mut unknown) = (0, 0, 0);
    for kill in 0..kills {
        let victim = VICTIMS[(kill + dice.below(2) * 3) % VICTIMS.len()];
        let after = dice.below(8);
        let told = plane.try_submit(&format!("trial-{kill}"), after, |plane| victim.kill(plane, etcd));
        let last = told.as_ref().and_then(|told| told.last());
        let is_ready = matches!(last, Some(Progress::Done { number: 8, .. }));
        let is_refused = matches!(last, Some(Progress::Failed { .. }));
        eprintln!("seed {seed}, kill {kill}: {victim:?} after {after} lines: {last:?}");
        // Before its restart: the other orchestrator takes the set-up over, if it is the victim that led it.
        if matches!(victim, Victim::First | Victim::Second) {
            assert!(plane.settled() || !is_ready, "it was ready, and is gone while one orchestrator is down");
        }
        victim.restart(&mut plane, etcd);
        let left = plane.settled();
        assert!(left || !is_ready, "it was ready, and is gone");
        assert!(!left || !is_refused, "it was refused, and is there");
        match (is_ready, is_refused) {
            (true, _) => ready += 1,
            (_, true) => refused += 1,
            _ => unknown += 1,
        }
        if left {
            plane.end(&format!("trial-{kill}"));
            assert!(!plane.settled(), "it was ended");
        }
    }
    eprintln!("{kills} kills: {ready} ready, {refused} refused, {unknown} without an answer");
}
