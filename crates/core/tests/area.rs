//! The area logic against a model that tries all combinations, on random catalogues and nodes.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use sidetrack_core::area::{Areas, BridgingFunction, Catalogue, CatalogueError, Outcome, Position};
use std::collections::{BTreeMap, BTreeSet};

type Names = BTreeSet<usize>;

fn attribute(number: usize) -> String {
    format!("a{number}")
}

fn function(name: &str, applies: &[usize], cost: u32) -> BridgingFunction {
    let applies = applies.iter().map(|number| attribute(*number)).collect();
    BridgingFunction { name: name.into(), applies, cost, ..BridgingFunction::default() }
}

fn catalogue(count: usize, functions: Vec<BridgingFunction>) -> Result<Catalogue, CatalogueError> {
    Catalogue::new((0..count).map(attribute), functions)
}

fn names(numbers: &Names) -> Vec<String> {
    numbers.iter().map(|number| attribute(*number)).collect()
}

/// The definition of the cheapest functions, by trying every subset.
fn cheapest_by_trying(functions: &[BridgingFunction], missing: &BTreeSet<String>) -> Option<u64> {
    (0..1_usize << functions.len())
        .filter_map(|subset| {
            let used = functions.iter().enumerate().filter(|(at, _)| subset & (1 << at) != 0);
            let used: Vec<_> = used.map(|(_, function)| function).collect();
            let applied: BTreeSet<_> = used.iter().flat_map(|function| function.applies.clone()).collect();
            (applied == *missing).then(|| used.iter().map(|function| u64::from(function.cost)).sum())
        })
        .min()
}

fn functions() -> impl Strategy<Value = Vec<BridgingFunction>> {
    let one = (btree_set(0..6_usize, 1..4), 0..9_u32, 0..3_u8, btree_set(0..8_usize, 0..3));
    vec(one, 0..8).prop_map(|all| {
        let count = all.len();
        let position = |kind| match kind {
            0 => Position::First,
            1 => Position::Anywhere,
            _ => Position::Last,
        };
        all.into_iter()
            .enumerate()
            .map(|(at, (applies, cost, kind, before))| BridgingFunction {
                name: format!("f{at}").into(),
                applies: names(&applies),
                cost,
                position: position(kind),
                // Constraints lead to later functions of the same position only, so that there is never a cycle.
                before: before
                    .into_iter()
                    .filter(|other| *other > at && *other < count)
                    .map(|other| format!("f{other}"))
                    .collect(),
                after: Vec::new(),
            })
            .collect()
    })
}

/// Whether a chain obeys all declared constraints.
fn is_in_order(functions: &[BridgingFunction], chain: &[String]) -> bool {
    let place = |name: &str| chain.iter().position(|other| other == name);
    functions.iter().all(|function| {
        let Some(own) = place(&function.name) else { return true };
        let before = function.before.iter().filter_map(|other| place(other)).all(|other| own < other);
        let ranks = functions.iter().filter(|other| other.position > function.position);
        before && ranks.filter_map(|other| place(&other.name)).all(|other| own < other)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_pair_is_as_the_equations_say(
        functions in functions(),
        nodes in vec(btree_set(0..6_usize, 0..6), 2..6),
    ) {
        // Constraints across positions may contradict each other. Then there must be an error instead of a catalogue.
        let across = functions.iter().any(|function| function.before.iter().any(|other| {
            functions.iter().any(|f| *f.name == **other && f.position < function.position)
        }));
        let built = catalogue(6, functions.clone());
        if across {
            let is_cycle = matches!(built, Err(CatalogueError::Cycle { .. }));
            prop_assert!(is_cycle);
            return Ok(());
        }
        let catalogue = built.unwrap();
        let mut areas = Areas::new(catalogue);
        for (at, attributes) in nodes.iter().enumerate() {
            let set = areas.catalogue().set(&names(attributes)).unwrap();
            areas.set_node(format!("n{at}"), set);
        }
        for (g, from) in nodes.iter().enumerate() {
            for (h, to) in nodes.iter().enumerate() {
                let outcome = areas.between(&format!("n{g}"), &format!("n{h}")).unwrap();
                let missing: BTreeSet<_> = names(&(to - from)).into_iter().collect();
                let cheapest = cheapest_by_trying(&functions, &missing);
                match outcome {
                    Outcome::Channel => prop_assert!(from.is_subset(to)),
                    // Eq. 4 does not hold, and by Eq. 5 there is nothing to apply.
                    Outcome::Surplus(surplus) => {
                        prop_assert!(!from.is_subset(to) && missing.is_empty());
                        let surplus: BTreeSet<_> =
                            areas.catalogue().attribute_names(surplus).map(ToString::to_string).collect();
                        prop_assert_eq!(surplus, names(&(from - to)).into_iter().collect());
                    }
                    Outcome::Bridged(bridge) => {
                        prop_assert!(!from.is_subset(to) && !missing.is_empty() && bridge.is_cheapest);
                        prop_assert_eq!(Some(bridge.cost), cheapest);
                        let chain: Vec<_> =
                            areas.catalogue().chain(bridge.functions).map(ToString::to_string).collect();
                        let used = functions.iter().filter(|f| chain.contains(&f.name.to_string()));
                        let applied: BTreeSet<_> = used.flat_map(|f| f.applies.clone()).collect();
                        prop_assert_eq!(applied, missing);
                        prop_assert!(is_in_order(&functions, &chain));
                    }
                    Outcome::Unfeasible(offending) => {
                        prop_assert!(!from.is_subset(to) && cheapest.is_none());
                        let offending: BTreeSet<_> =
                            areas.catalogue().attribute_names(offending).map(ToString::to_string).collect();
                        // Exactly those attributes that no function applies without applying another one, too.
                        let fits = |f: &&BridgingFunction| f.applies.iter().all(|a| missing.contains(a));
                        let possible: BTreeSet<_> =
                            functions.iter().filter(fits).flat_map(|f| f.applies.clone()).collect();
                        prop_assert_eq!(offending, &missing - &possible);
                    }
                }
            }
        }
    }

    #[test]
    fn changes_one_by_one_give_what_a_fresh_start_gives(
        functions in functions(),
        changes in vec((0..5_usize, prop::option::of(btree_set(0..6_usize, 0..6))), 1..30),
    ) {
        let Ok(catalogue) = catalogue(6, functions) else { return Ok(()) };
        let mut areas = Areas::new(catalogue.clone());
        let mut nodes = BTreeMap::new();
        for (node, attributes) in changes {
            let node = format!("n{node}");
            match attributes {
                Some(attributes) => {
                    let set = catalogue.set(&names(&attributes)).unwrap();
                    nodes.insert(node.clone(), set);
                    areas.set_node(node, set);
                }
                None => prop_assert_eq!(areas.remove_node(&node), nodes.remove(&node).is_some()),
            }
            let mut fresh = Areas::new(catalogue.clone());
            for (node, set) in &nodes {
                fresh.set_node(node.as_str(), *set);
            }
            prop_assert_eq!(areas.counts(), fresh.counts());
            prop_assert_eq!(areas.areas(), fresh.areas());
            prop_assert_eq!(areas.counts(), counted(&areas, &nodes.keys().cloned().collect::<Vec<_>>()));
        }
    }
}

/// Counts the outcomes pair by pair.
fn counted(areas: &Areas, nodes: &[String]) -> sidetrack_core::area::Counts {
    let mut counts = sidetrack_core::area::Counts::default();
    for from in nodes {
        for to in nodes.iter().filter(|to| *to != from) {
            counts.pairs += 1;
            match areas.between(from, to).unwrap() {
                Outcome::Channel => counts.channels += 1,
                Outcome::Bridged(_) => counts.bridged += 1,
                Outcome::Surplus(_) | Outcome::Unfeasible(_) => counts.unfeasible += 1,
            }
        }
    }
    counts
}

#[test]
fn the_example_of_two_hospitals() {
    let functions = vec![
        BridgingFunction { position: Position::Last, ..function("encrypt", &[0], 3) },
        function("audit", &[1], 1),
        BridgingFunction { after: vec!["audit".into()], ..function("firewall", &[2], 2) },
    ];
    let mut areas = Areas::new(catalogue(4, functions).unwrap());
    for (node, attributes) in [("a", &[3][..]), ("b", &[0, 1, 2, 3]), ("c", &[0, 1, 2]), ("d", &[0, 1, 2])] {
        let set =
            areas.catalogue().set(&attributes.iter().map(|n| attribute(*n)).collect::<Vec<_>>()).unwrap();
        areas.set_node(node, set);
    }
    assert_eq!(areas.between("a", "b"), Some(Outcome::Channel));
    let Some(Outcome::Bridged(bridge)) = areas.between("a", "c") else { panic!("a to c is bridged") };
    let chain: Vec<_> = areas.catalogue().chain(bridge.functions).map(|name| &**name).collect();
    assert_eq!((chain, bridge.cost), (vec!["audit", "firewall", "encrypt"], 6));
    // No function applies a3.
    let Some(Outcome::Unfeasible(offending)) = areas.between("c", "a") else {
        panic!("c to a is unfeasible")
    };
    assert_eq!(areas.catalogue().attribute_names(offending).map(|n| &**n).collect::<Vec<_>>(), ["a3"]);
    assert_eq!(areas.areas().len(), 3);
    let counts = areas.counts();
    // From c and d to a: no function applies a3. From b to each other node: b has more attributes, and nothing is missing.
    assert_eq!((counts.pairs, counts.unfeasible), (12, 5));
    assert!((counts.unfeasibility_ratio() - 5.0 / 12.0).abs() < 1e-12);
    let Some(Outcome::Surplus(surplus)) = areas.between("b", "a") else { panic!("nothing is missing") };
    assert_eq!(surplus.len(), 3);
}

#[test]
fn bad_catalogues_are_named() {
    let error = |functions| catalogue(3, functions).unwrap_err().to_string();
    assert!(error(vec![function("f", &[7], 1)]).contains("the unknown attribute 'a7'"));
    assert!(error(vec![function("f", &[], 1)]).contains("'f' applies no attribute"));
    assert!(error(vec![function("f", &[0], 1), function("f", &[1], 1)]).contains("'f' is declared twice"));
    let lost = BridgingFunction { before: vec!["g".into()], ..function("f", &[0], 1) };
    assert!(error(vec![lost]).contains("unknown function 'g'"));
    let before =
        |name: &str, other: &str| BridgingFunction { before: vec![other.into()], ..function(name, &[0], 1) };
    let cycle = error(vec![function("z", &[0], 1), before("f", "g"), before("g", "h"), before("h", "f")]);
    assert!(
        ["f before g before h before f", "g before h before f before g", "h before f before g before h"]
            .iter()
            .any(|text| cycle.contains(text)),
        "{cycle}"
    );
    let own = error(vec![before("f", "f")]);
    assert!(own.contains("f before f"), "{own}");
    let many = Catalogue::new((0..257).map(attribute), Vec::new()).unwrap_err();
    assert_eq!(many, CatalogueError::TooMany { what: "attributes", count: 257 });
}

/// The random numbers of the large application: xorshift, so that every run is the same.
fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    }
}

/// Makes this number of nodes, each with a random part of 64 attributes, and 96 functions.
fn large(nodes: usize) -> Areas {
    let mut next = numbers(0x5EED);
    let mut functions: Vec<_> = (0..62).map(|at| function(&format!("f{at}"), &[at], 4)).collect();
    for at in 0..34 {
        let pair = [(next() % 62) as usize, (next() % 62) as usize];
        functions.push(function(&format!("g{at}"), &pair, 5));
    }
    let mut areas = Areas::new(catalogue(64, functions).unwrap());
    for node in 0..nodes {
        let bits = next();
        areas.set_node(format!("n{node}"), (0..64).filter(|bit| bits >> bit & 1 == 1).collect());
    }
    areas
}

#[test]
fn a_large_application_is_counted_and_bridged() {
    let areas = large(250);
    let counts = areas.counts();
    assert_eq!(counts.pairs, 250 * 249);
    // Two of the attributes are not applied by any function. A pair misses each of them with a probability of a quarter.
    let ratio = counts.unfeasibility_ratio();
    assert!((0.38..0.50).contains(&ratio), "{ratio}");
    assert_eq!(cheapest_of_all_pairs(&areas), counts.bridged);
}

/// Finds the chains of all pairs; fails if a chain is not known to be the cheapest.
fn cheapest_of_all_pairs(areas: &Areas) -> u64 {
    let bridged = areas.pairs().filter(|(_, _, outcome)| match outcome {
        Outcome::Bridged(bridge) => {
            assert!(bridge.is_cheapest);
            true
        }
        _ => false,
    });
    bridged.count() as u64
}

/// The target is all pairs within 1 s in a release build: first the classes of all pairs, then all chains.
/// `cargo test --release -p sidetrack-core --test area -- --ignored` prints the times.
#[test]
#[ignore = "a measurement, for a release build"]
fn measure_the_classes_of_a_thousand_nodes() {
    assert_eq!(large(1000).counts().pairs, 999_000);
}

#[test]
#[ignore = "a measurement, for a release build"]
fn measure_all_chains_of_a_thousand_nodes() {
    let areas = large(1000);
    assert_eq!(cheapest_of_all_pairs(&areas), areas.counts().bridged);
}
