//! The controller against a switch that keeps a table, and that may lie, stall, refuse, be full, forget, talk nonsense or go
//! away at any moment.

mod model;
mod network;

use model::{Held, Manners, World, config, entry};
use proptest::prelude::*;
use sidetrack_core::openflow::{ControllerConfig, ControllerInput, ControllerOutput, PRIORITY_FLOW, Version};
use sidetrack_core::shunt::{Both, Cause, EntryId, Obstacle, Transport, Tuple};
use std::collections::BTreeMap;
use std::time::Duration;

fn packets(both: Both) -> (u64, u64) {
    (both.to_server.packets, both.to_client.packets)
}

#[test]
fn an_entry_is_confirmed_counted_and_given_back_with_its_last_counts() {
    for version in Version::ALL {
        let mut world = World::new(version);
        assert!(matches!(world.take()[..], [ControllerOutput::Ready(spoken, _)] if spoken == version));
        assert_eq!(world.switch.table.len(), 4, "pairs of ports");
        world.install(&entry(1, 4000));
        assert_eq!(world.take(), [ControllerOutput::Installed(EntryId(1))]);
        assert_eq!(world.switch.flows().count(), 2);
        world.switch.table.iter_mut().for_each(|held| held.packets += 5);
        world.pass(Duration::from_secs(2));
        let told = world.take();
        let [ControllerOutput::Counted(EntryId(1), both)] = told[..] else { panic!("{told:?}") };
        assert_eq!((packets(both), both.to_server.bytes), ((5, 5), 500), "IP bytes, not frames");
        world.switch.table.iter_mut().for_each(|held| held.packets += 2);
        world.remove(1);
        let told = world.take();
        let [ControllerOutput::Gone(EntryId(1), Cause::Withdrawn, both)] = told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(packets(both), (7, 7));
        assert_eq!((world.switch.flows().count(), world.controller.entries()), (0, 0));
    }
}

#[test]
fn a_full_table_is_said_and_leaves_no_half_entry() {
    for version in Version::ALL {
        let mut world = World::new(version);
        world.take();
        world.switch.manners.room = Some(3);
        world.install(&entry(1, 4000));
        world.install(&entry(2, 4001));
        let told = world.take();
        let failed = ControllerOutput::Failed(EntryId(2), Obstacle::Full);
        assert_eq!(told, [ControllerOutput::Installed(EntryId(1)), failed]);
        assert_eq!(world.switch.flows().count(), 2);
    }
}

#[test]
fn a_switch_without_tcp_flags_gets_the_entry_without() {
    let mut world = World::new(Version::V1_3);
    world.take();
    world.switch.manners.plain = true;
    assert!(world.controller.matches_flags());
    world.install(&entry(1, 4000));
    assert_eq!(world.told_of_entries(), [ControllerOutput::Installed(EntryId(1))]);
    assert!(!world.controller.matches_flags());
    assert_eq!(world.switch.flows().count(), 2);
    world.remove(1);
    assert_eq!(world.switch.flows().count(), 0, "what was said is what is taken back");
}

#[test]
fn a_switch_that_confirms_what_it_does_not_have_is_found_out() {
    let mut world = World::new(Version::V1_3);
    world.take();
    world.switch.manners.lies = true;
    world.install(&entry(1, 4000));
    assert_eq!(world.take(), [ControllerOutput::Installed(EntryId(1))]);
    world.pass(Duration::from_secs(3));
    assert_eq!(world.take(), [ControllerOutput::Gone(EntryId(1), Cause::Lost, Both::default())]);
}

#[test]
fn a_switch_that_stalls_is_hung_up_and_its_entries_are_settled_when_it_comes_back() {
    let mut world = World::new(Version::V1_3);
    world.install(&entry(1, 4000));
    world.take();
    world.switch.manners.stalls = true;
    world.remove(1);
    world.pass(Duration::from_secs(20));
    let told = world.take();
    assert!(
        matches!(&told[..], [ControllerOutput::Close(why)] if why.contains("not what it is asked")),
        "{told:?}"
    );
    world.switch.manners.stalls = false;
    world.connect();
    let told = world.told_of_entries();
    assert_eq!(told, [ControllerOutput::Gone(EntryId(1), Cause::Withdrawn, Both::default())]);
}

#[test]
fn a_silent_switch_is_asked_and_then_hung_up() {
    let mut world = World::new(Version::V1_0);
    world.take();
    world.pass(Duration::from_secs(60));
    assert_eq!(world.take(), [], "it answers echoes");
    world.connected = false; // What we say is lost, and no error tells us.
    world.pass(Duration::from_secs(60));
    assert_eq!(world.take(), [ControllerOutput::Close("the switch does not answer".into())]);
    world.install(&entry(1, 4000));
    assert_eq!(world.take(), [ControllerOutput::Failed(EntryId(1), Obstacle::Unreachable)]);
}

#[test]
fn it_reconnects_in_the_middle_of_an_installation() {
    for version in Version::ALL {
        let mut world = World::new(version);
        world.take();
        world.tell(ControllerInput::Install(&entry(1, 4000)));
        world.disconnect(); // The entry is in its table, the answer is lost.
        assert_eq!(world.switch.flows().count(), 2);
        world.switch.table.iter_mut().for_each(|held| held.packets += 3);
        world.connect();
        assert_eq!(world.told_of_entries(), [ControllerOutput::Installed(EntryId(1))]);
        assert_eq!(world.switch.flows().count(), 2);
        world.remove(1);
        let told = world.take();
        let [ControllerOutput::Gone(_, _, both)] = told[..] else { panic!("{told:?}") };
        assert_eq!(packets(both), (3, 3), "what it carried meanwhile is counted");
    }
}

#[test]
fn entries_that_went_while_it_was_away_are_lost_and_those_that_stayed_stay() {
    let mut world = World::new(Version::V1_3);
    world.install(&entry(1, 4000));
    world.install(&entry(2, 4001));
    world.take();
    world.disconnect();
    let first = world.switch.flows().next().expect("an entry").pattern.clone();
    world.switch.table.retain(|held| held.pattern != first);
    world.connect();
    assert_eq!(world.told_of_entries(), [ControllerOutput::Gone(EntryId(1), Cause::Lost, Both::default())]);
    assert_eq!(world.switch.flows().count(), 2, "of the first, the other direction is deleted");
}

#[test]
fn what_passed_while_it_was_away_is_counted_though_nothing_more_comes() {
    let mut world = World::new(Version::V1_3);
    world.install(&entry(1, 4000));
    world.take();
    world.disconnect();
    world.switch.table.iter_mut().for_each(|held| held.packets += 5);
    world.connect();
    let told = world.told_of_entries();
    let [ControllerOutput::Counted(EntryId(1), both)] = told[..] else { panic!("{told:?}") };
    assert_eq!(packets(both), (5, 5));
}

#[test]
fn entries_of_an_earlier_run_are_taken_over_with_their_counts_and_the_rest_deleted() {
    for version in Version::ALL {
        let mut world = World::new(version);
        world.install(&entry(1, 4000));
        world.install(&entry(2, 4001));
        world.switch.table.iter_mut().for_each(|held| held.packets += 4);
        let table = world.switch.table.clone();
        let mut world = World::alone(version, 2);
        world.switch.table = table;
        world.connect();
        world.take();
        assert_eq!(world.switch.flows().count(), 4, "they wait");
        world.install(&entry(1, 4001));
        assert_eq!(world.take(), [ControllerOutput::Installed(EntryId(1))]);
        world.pass(Duration::from_secs(20));
        assert_eq!(world.switch.flows().count(), 2, "nobody wants the other");
        world.remove(1);
        let told = world.take();
        let Some(ControllerOutput::Gone(_, _, both)) = told.last() else { panic!("{told:?}") };
        assert_eq!(packets(*both), (4, 4));
    }
}

#[test]
fn one_message_takes_all_flows_off_and_leaves_the_pairs() {
    let mut world = World::new(Version::V1_3);
    world.install(&entry(1, 4000));
    world.take();
    world.tell(ControllerInput::Suspend);
    assert_eq!((world.switch.flows().count(), world.switch.table.len()), (0, 4));
    world.settle();
    assert!(matches!(world.take()[..], [ControllerOutput::Gone(EntryId(1), Cause::Lost, _)]));
}

#[test]
fn one_direction_that_ends_takes_the_other_with_it() {
    for (number, cause) in [(0, Cause::Idle), (5, Cause::Evicted), (2, Cause::Lost)] {
        let mut world = World::new(Version::V1_3);
        world.install(&entry(1, 4000));
        world.take();
        let at = world.switch.table.iter().position(|held| held.priority == PRIORITY_FLOW).expect("one");
        let held = world.switch.table.remove(at);
        world.switch.removed(&held, number);
        world.settle();
        assert_eq!(world.take(), [ControllerOutput::Gone(EntryId(1), cause, Both::default())]);
        assert_eq!(world.switch.flows().count(), 0);
    }
}

#[test]
fn what_1_0_cannot_say_is_refused_and_unknown_words_are_survived() {
    let mut world = World::new(Version::V1_0);
    world.take();
    let mut udp = entry(1, 4000);
    udp.tuple.transport = Transport::Udp;
    let mut v6 = entry(2, 4000);
    let address = |text: &str| text.parse().expect("address");
    v6.tuple = Tuple::new(
        address("[2001:db8::1]:4000"),
        address("[2001:db8::2]:5000"),
        v6.tuple.transport,
        v6.tuple.zone,
    );
    for (id, entry) in [(1, udp), (2, v6)] {
        world.install(&entry);
        assert_eq!(world.take(), [ControllerOutput::Failed(EntryId(id), Obstacle::Unsupported)]);
    }
    // A message of no known type, one of another version, an error about nothing, a barrier that was not requested.
    for (kind, body) in [(77, vec![1, 2, 3]), (10, vec![0; 20]), (1, vec![9, 9, 9, 9]), (19, vec![])] {
        world.switch.answer(kind, 4_000_000, &body);
        world.settle();
    }
    assert!(world.told_of_entries().is_empty() && world.connected);
    world.switch.answers.extend([1, 6, 0, 3, 0, 0, 0, 0]);
    world.settle();
    assert!(matches!(&world.take()[..], [ControllerOutput::Close(why)] if why.contains("3 bytes")));
}

#[test]
fn a_switch_of_another_version_is_told_so() {
    let mut world = World::alone(Version::V1_3, 1);
    world.switch.version = Version::V1_0;
    world.connect();
    assert!(matches!(&world.take()[..], [ControllerOutput::Close(why)] if why.contains("0x01")));
}

#[derive(Clone, Debug)]
enum Step {
    Install(u16),
    Remove(u64),
    Traffic(u64),
    Answers,
    Disconnect,
    Connect,
    Pass(u64),
    Room(Option<usize>),
    Lie(bool),
    Stall(bool),
    Expire,
    Suspend,
    Noise(Vec<u8>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u16..4).prop_map(Step::Install),
        3 => (1u64..12).prop_map(Step::Remove),
        2 => (1u64..9).prop_map(Step::Traffic),
        6 => Just(Step::Answers),
        1 => Just(Step::Disconnect),
        2 => Just(Step::Connect),
        2 => (1u64..20_000).prop_map(Step::Pass),
        1 => proptest::option::of(0usize..6).prop_map(Step::Room),
        1 => any::<bool>().prop_map(Step::Lie),
        1 => any::<bool>().prop_map(Step::Stall),
        1 => Just(Step::Expire),
        1 => Just(Step::Suspend),
        1 => proptest::collection::vec(any::<u8>(), 1..40).prop_map(Step::Noise),
    ];
    proptest::collection::vec(step, 1..60)
}

fn apply(world: &mut World, step: Step, next: &mut u64, there: &mut BTreeMap<u64, bool>) {
    match step {
        Step::Install(port) => {
            // As the shunt does: no second entry for a flow whose first is not gone.
            *next += 1;
            there.insert(*next, false);
            world.tell(ControllerInput::Install(&entry(
                *next,
                4000 + port * 100 + u16::try_from(*next % 100).unwrap_or(0),
            )));
        }
        Step::Remove(id) => world.tell(ControllerInput::Remove(EntryId(id), Cause::Withdrawn)),
        Step::Traffic(count) => world.switch.table.iter_mut().for_each(|held| held.packets += count),
        Step::Answers => world.settle(),
        Step::Disconnect => world.disconnect(),
        Step::Connect => {
            if !world.connected {
                world.connect();
            }
        }
        Step::Pass(ms) => world.pass(Duration::from_millis(ms)),
        Step::Room(room) => world.switch.manners.room = room,
        Step::Lie(lies) => world.switch.manners.lies = lies,
        Step::Stall(stalls) => world.switch.manners.stalls = stalls,
        Step::Expire => {
            if let Some(at) = world.switch.table.iter().position(|held| held.priority == PRIORITY_FLOW) {
                let held = world.switch.table.remove(at);
                world.switch.removed(&held, 0);
            }
        }
        Step::Suspend => world.tell(ControllerInput::Suspend),
        Step::Noise(bytes) => {
            if world.connected {
                world.tell(ControllerInput::Bytes(&bytes));
            }
        }
    }
}

/// Every entry is answered as `FastPath` promises: one yes at most, and one end.
fn check(told: &[ControllerOutput], there: &mut BTreeMap<u64, bool>) {
    for output in told {
        match output {
            ControllerOutput::Installed(id) => {
                assert_eq!(there.insert(id.0, true), Some(false), "confirmed once, before its end: {told:?}");
            }
            ControllerOutput::Failed(id, _) => {
                assert_eq!(there.remove(&id.0), Some(false), "refused once, never after a yes: {told:?}");
            }
            ControllerOutput::Gone(id, ..) => {
                assert!(there.remove(&id.0).is_some(), "it ends once: {told:?}");
            }
            ControllerOutput::Counted(id, _) => assert!(there.contains_key(&id.0), "{told:?}"),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn whatever_the_switch_does_every_entry_has_one_end_and_nothing_stays(old: bool, steps in steps()) {
        let mut world = World::new(if old { Version::V1_0 } else { Version::V1_3 });
        let (mut next, mut there) = (0, BTreeMap::new());
        for step in steps {
            apply(&mut world, step, &mut next, &mut there);
            check(&world.take(), &mut there);
        }
        // It behaves from now on, and everything is to go.
        world.switch.manners = Manners::default();
        world.disconnect();
        world.connect();
        let ids: Vec<_> = there.keys().copied().collect();
        ids.into_iter().for_each(|id| world.remove(id));
        world.pass(Duration::from_secs(40));
        check(&world.take(), &mut there);
        prop_assert!(there.is_empty(), "without an end: {:?}", there);
        prop_assert_eq!((world.controller.entries(), world.switch.flows().count()), (0, 0));
        prop_assert_eq!(world.switch.table.len(), 4);
    }
}

#[test]
fn a_master_that_another_controller_displaced_claims_the_switch_again() {
    let config = ControllerConfig { master: Some(1000), ..config(Version::V1_3, 1) };
    let mut world = World::with(config, Version::V1_3);
    world.connect();
    assert_eq!(world.switch.masters, [1000]);
    world.install(&entry(1, 4000));
    assert_eq!(world.told_of_entries(), [ControllerOutput::Installed(EntryId(1))]);
    world.switch.manners.serves_another = true;
    world.remove(1);
    let told = world.take();
    assert!(
        matches!(&told[..], [ControllerOutput::Close(why)] if why.contains("claims it again")),
        "{told:?}"
    );
    world.now = world.now + Duration::from_millis(500);
    world.connect();
    assert_eq!(world.switch.masters, [1000, 1500], "a newer generation");
    let gone = ControllerOutput::Gone(EntryId(1), Cause::Withdrawn, Both::default());
    assert_eq!(world.told_of_entries(), [gone]);
    assert_eq!(world.switch.flows().count(), 0, "what the slave could not remove is gone");
}

#[test]
fn a_controller_of_1_0_or_without_the_wish_asks_for_no_role() {
    for (version, master) in [(Version::V1_0, Some(1)), (Version::V1_3, None)] {
        let mut world = World::with(ControllerConfig { master, ..config(version, 1) }, version);
        world.connect();
        world.install(&entry(1, 4000));
        assert_eq!(world.told_of_entries(), [ControllerOutput::Installed(EntryId(1))]);
        assert!(world.switch.masters.is_empty());
    }
}

#[test]
fn entries_of_others_stay_on_a_shared_switch() {
    for (shared, left) in [(true, 1), (false, 0)] {
        let config = ControllerConfig { shared, clear: true, ..config(Version::V1_3, 1) };
        let mut world = World::with(config, Version::V1_3);
        let other =
            Held { cookie: 0x99, priority: 40_000, pattern: vec![0, 1, 0, 4, 0, 0, 0, 0], packets: 0 };
        world.switch.table.push(other.clone());
        world.connect();
        world.install(&entry(1, 4000));
        assert_eq!(world.switch.table.iter().filter(|held| held.cookie == 0x99).count(), left);
        world.tell(ControllerInput::Clear);
        world.settle();
        assert_eq!(world.switch.table.len(), left, "shared: {shared}");
    }
}
