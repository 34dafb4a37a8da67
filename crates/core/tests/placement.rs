//! Placement of functions: no node is overfull, the demand is covered where it can be, and the cheapest step is taken.

use sidetrack_core::placement::{Demand, Node, Plan, Running, SHIP, START, Step, plan};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

fn node(name: &str, cpu_milli: u64, cost_milli: u64, labels: &[&str]) -> Node {
    let labels = labels.iter().map(|label| Arc::from(*label)).collect();
    Node { name: name.into(), cpu_milli, memory_bytes: 1024 * MIB, cost_milli, labels }
}

fn demand(cpu_milli: u64) -> Demand {
    Demand {
        function: "f".into(),
        cpu_milli,
        replica_cpu_milli: 500,
        replica_cpu_max_milli: 1000,
        memory_bytes: 64 * MIB,
        replicas_max: 8,
        labels: Vec::new(),
    }
}

fn running(node: usize, cpu_milli: u64) -> Running {
    Running { function: "f".into(), node, cpu_milli, memory_bytes: 64 * MIB }
}

#[test]
fn a_container_is_raised_before_another_one_is_started() {
    let nodes = [node("a", 4000, 1000, &[]), node("b", 4000, 1000, &[])];
    let made = plan(&nodes, &[running(0, 500)], &demand(1000));
    assert_eq!(made.steps, [Step::Raise { container: 0, to_cpu_milli: 1000 }]);
    assert_eq!((made.cost, made.missing_cpu_milli), (125, 0), "an eighth of the node");
    // One container cannot use more than a core: the rest is horizontal, where the image is.
    let made = plan(&nodes, &[running(0, 500)], &demand(1500));
    assert_eq!(
        made.steps,
        [Step::Raise { container: 0, to_cpu_milli: 1000 }, Step::Add { node: 0, cpu_milli: 500 }]
    );
    assert_eq!(made.cost, 125 + 125 + START);
}

#[test]
fn a_node_without_room_leads_to_another_node() {
    let nodes = [node("small", 500, 100, &[]), node("big", 8000, 4000, &[])];
    let made = plan(&nodes, &[running(0, 500)], &demand(1000));
    assert_eq!(made.steps, [Step::Add { node: 1, cpu_milli: 500 }]);
    assert_eq!(made.cost, 250 + START + SHIP);
    let refused: Vec<_> = made.why.iter().filter_map(|choice| choice.cost.as_ref().err()).collect();
    assert!(refused.iter().any(|why| why.contains("no CPU time left")), "{refused:?}");
}

#[test]
fn labels_memory_and_the_largest_number_of_containers_are_kept() {
    let nodes = [node("cheap", 8000, 1, &[]), node("gpu", 8000, 1000, &["gpu"])];
    let asks = Demand { labels: vec!["gpu".into()], ..demand(500) };
    assert_eq!(plan(&nodes, &[], &asks).steps, [Step::Add { node: 1, cpu_milli: 500 }]);
    let asks = Demand { labels: vec!["tpu".into()], ..demand(500) };
    let made = plan(&nodes, &[], &asks);
    assert_eq!((made.steps.len(), made.missing_cpu_milli), (0, 500));
    assert!(made.why.iter().all(|choice| choice.cost.as_ref().is_err_and(|why| why.contains("'tpu'"))));
    let asks = Demand { replicas_max: 2, ..demand(5000) };
    assert_eq!(plan(&nodes, &[], &asks).missing_cpu_milli, 3000, "two containers of a core each");
    let asks = Demand { memory_bytes: 600 * MIB, ..demand(5000) };
    let made = plan(&nodes, &[], &asks);
    assert_eq!(
        made.steps.iter().filter(|step| matches!(step, Step::Add { .. })).count(),
        2,
        "one on each node"
    );
}

#[test]
fn a_function_that_is_needed_has_a_container_even_without_a_demand() {
    let nodes = [node("a", 1000, 1000, &[])];
    assert_eq!(plan(&nodes, &[], &demand(0)).steps.len(), 1);
    assert!(plan(&nodes, &[running(0, 1)], &demand(0)).steps.is_empty());
    assert_eq!(plan(&[], &[], &demand(0)), Plan::default());
}

/// Carries a plan out; gives what is used of each node.
fn used(nodes: &[Node], before: &[Running], made: &Plan, demand: &Demand) -> (Vec<(u64, u64)>, u64, usize) {
    let mut state = before.to_vec();
    for step in &made.steps {
        match *step {
            Step::Raise { container, to_cpu_milli } => {
                assert_eq!(state[container].function, demand.function, "only our own");
                assert!(
                    to_cpu_milli > state[container].cpu_milli && to_cpu_milli <= demand.replica_cpu_max_milli
                );
                state[container].cpu_milli = to_cpu_milli;
            }
            Step::Add { node, cpu_milli } => {
                assert!(demand.labels.iter().all(|label| nodes[node].labels.contains(label)));
                let (function, memory_bytes) = (demand.function.clone(), demand.memory_bytes);
                state.push(Running { function, node, cpu_milli, memory_bytes });
            }
        }
    }
    let of = |at: usize| state.iter().filter(move |one| one.node == at);
    let sums = (0..nodes.len())
        .map(|at| (of(at).map(|one| one.cpu_milli).sum(), of(at).map(|one| one.memory_bytes).sum()));
    let ours = state.iter().filter(|one| one.function == demand.function);
    (sums.collect(), ours.clone().map(|one| one.cpu_milli).sum(), ours.count())
}

#[test]
fn no_plan_overfills_a_node_and_none_stops_while_there_is_room() {
    let mut state = 7_u64;
    let mut roll = move |end: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    };
    for round in 0..3000 {
        let count = 1 + roll(4) as usize;
        let label = |roll: u64| if roll == 0 { vec![] } else { vec![Arc::from("x")] };
        let nodes: Vec<_> = (0..count)
            .map(|at| Node {
                name: format!("n{at}").into(),
                cpu_milli: roll(5000),
                memory_bytes: roll(500) * MIB,
                cost_milli: roll(3000),
                labels: label(roll(2)),
            })
            .collect();
        let demand = Demand {
            cpu_milli: roll(6000),
            replica_cpu_milli: 1 + roll(1000),
            replica_cpu_max_milli: 1000 + roll(1000),
            replicas_max: roll(6) as usize,
            labels: label(roll(2)),
            ..demand(0)
        };
        let made = plan(&nodes, &[], &demand);
        let (sums, ours, containers) = used(&nodes, &[], &made, &demand);
        for (node, (cpu, memory)) in nodes.iter().zip(&sums) {
            assert!(*cpu <= node.cpu_milli && *memory <= node.memory_bytes, "round {round}: {made:?}");
        }
        assert!(containers <= demand.replicas_max);
        assert_eq!(made.missing_cpu_milli, demand.cpu_milli.saturating_sub(ours), "round {round}");
        let taken: u64 = made
            .why
            .iter()
            .filter(|choice| choice.taken)
            .filter_map(|choice| choice.cost.as_ref().ok())
            .map(|cost| cost.total())
            .sum();
        assert_eq!(taken, made.cost);
        if made.missing_cpu_milli > 0 {
            let last = made.why.iter().map(|choice| choice.round).max().unwrap_or(0);
            let possible = made.why.iter().any(|choice| choice.round == last && choice.cost.is_ok());
            assert!(
                !possible || made.steps.len() == sidetrack_core::placement::STEPS_MAX,
                "round {round}: {made:?}"
            );
        }
    }
}
