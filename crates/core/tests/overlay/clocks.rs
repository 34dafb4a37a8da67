//! Clocks that leap, go back, or stand still while a node is suspended, and wall clocks that are wrong at a start.

use crate::network::{assert_truth, assert_whole, heal, mischief, wild};
use crate::random::{Random, each_seed};
use crate::world::{Wire, World};
use sidetrack_core::overlay::NodeId;
use std::collections::BTreeSet;
use std::time::Duration;

/// Where clocks begin, so that they can go back.
const BEGINNING: Duration = Duration::from_secs(1_000_000);

/// What a clock may do to a node at whose end a flow is: less than a session may be without a path.
const FLOW_MAX_MS: u64 = 5_000;

fn network(seed: u64, random: &mut Random, wire: fn(&mut Random) -> Wire) -> (World, Vec<NodeId>) {
    let nodes = 4 + seed % 6;
    let mut world = World::new(seed, World::topology(random, nodes, wire));
    let names: Vec<_> = world.nodes.keys().copied().collect();
    for name in &names {
        world.leap(*name, BEGINNING);
    }
    world.run_ms(3000);
    (world, names)
}

/// A clock does what clocks do; `most_ms`: it leaps no further, and sleeps no longer.
fn clock_mischief(world: &mut World, name: NodeId, most_ms: u64) {
    let ahead = world.ahead[&name];
    let by = Duration::from_millis(world.random.below(most_ms));
    match world.random.below(4) {
        0 | 1 => world.leap(name, ahead + by),
        // It may go back a little: no node sends until the time has come again.
        2 => world.leap(name, ahead.saturating_sub(by.min(Duration::from_millis(700)))),
        _ => {
            let stands = world.random.permille(500);
            world.suspend(name, by.min(Duration::from_millis(FLOW_MAX_MS)), stands);
        }
    }
}

#[test]
fn networks_whose_clocks_jump_learn_the_truth_and_flows_survive() {
    each_seed(60, |seed| {
        let mut random = Random::new(seed);
        let (mut world, names) = network(seed, &mut random, wild);
        let count = names.len() as u64;
        let pair = [names[0], names[1 + random.below(count - 1) as usize]];
        let ends = BTreeSet::from(pair);
        world.begin(pair, [random.below(100_000), random.below(50_000)]);
        for _ in 0..12 {
            world.run_ms(20 + random.below(400));
            let name = names[random.below(count) as usize];
            match random.below(4) {
                0 => mischief(&mut world, &ends),
                1 if !ends.contains(&name) => {
                    // The wall clock is somewhere between 1970 and 2100 when it starts.
                    world.crash(name);
                    world.start_at(name, 1 + random.below(4_102_444_800_000));
                }
                _ => {
                    let most_ms = if ends.contains(&name) { FLOW_MAX_MS } else { 10_000_000 };
                    clock_mischief(&mut world, name, most_ms);
                }
            }
        }
        // All are awake, and the clocks that went back have caught up.
        world.run_ms(FLOW_MAX_MS + 1000);
        heal(&mut world);
        world.run_ms(4000);
        assert_truth(&world);
        world.run_ms(16_000);
        assert_whole(&world);
    });
}

#[test]
fn a_leap_forward_takes_no_link_down_and_no_route_away() {
    each_seed(60, |seed| {
        let mut random = Random::new(seed);
        let (mut world, names) =
            network(seed, &mut random, |random| Wire::clean(1000 + random.below(20_000)));
        assert_truth(&world);
        let downs = world.downs;
        for _ in 0..10 {
            let name = names[random.below(names.len() as u64) as usize];
            // From a moment to a few days.
            let most_ms = 1 << random.below(29);
            let by = Duration::from_millis(random.below(most_ms));
            world.leap(name, world.ahead[&name] + by);
            for _ in 0..20 {
                world.run_ms(random.below(40));
                assert_truth(&world);
            }
        }
        assert_eq!(world.downs, downs, "a link was given up");
    });
}

#[test]
fn a_short_sleep_takes_no_link_down_whatever_the_clock_does() {
    each_seed(40, |seed| {
        let mut random = Random::new(seed);
        let (mut world, names) = network(seed, &mut random, |random| Wire::clean(1000 + random.below(5_000)));
        let downs = world.downs;
        for _ in 0..10 {
            let name = names[random.below(names.len() as u64) as usize];
            let slept = Duration::from_millis(random.below(80));
            match random.below(3) {
                0 => world.suspend(name, slept, true),
                1 => world.suspend(name, slept, false),
                _ => world.leap(name, world.ahead[&name].saturating_sub(slept)),
            }
            world.run_ms(500);
            assert_truth(&world);
        }
        assert_eq!(world.downs, downs, "a link was given up");
    });
}
