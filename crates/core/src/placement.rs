//! Where the containers of a function go: on which node, and whether a container gets more (vertical) or another one is started
//! (horizontal). A pure function from offers and a demand to steps with their costs (EPI framework, Sec. II-A).
//!
//! The cost of a step is
//!
//! ```text
//!   added share of the node * cost of the node                  what the room costs
//! + START, for another container                                 time to start it
//! + SHIP, if the node has none of this function yet              the image has to be there
//! ```
//!
//! all in thousandths of the cost of a node. The share is the larger one of CPU time and memory. The step with the smallest cost
//! for each thousandth of a core is taken until the demand is covered. Of equal ones, the first in this order: more for a
//! container that runs, then the node that was offered first.

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

/// Cost of starting a container, thousandths.
pub const START: u64 = 20;
/// Cost of an image that a node lacks, thousandths.
pub const SHIP: u64 = 50;
/// Most steps of a plan.
pub const STEPS_MAX: usize = 64;

/// What a node offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: Arc<str>,
    /// CPU time, thousandths of a core.
    pub cpu_milli: u64,
    /// Memory, bytes.
    pub memory_bytes: u64,
    /// The cost of all of it, thousandths of a unit that all offers share.
    pub cost_milli: u64,
    /// Words that a function may ask for.
    pub labels: Vec<Arc<str>>,
}

/// A container that runs already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Its function.
    pub function: Arc<str>,
    /// The index of its node.
    pub node: usize,
    /// Its limit of CPU time, thousandths of a core.
    pub cpu_milli: u64,
    /// Its limit of memory, bytes.
    pub memory_bytes: u64,
}

/// What a function needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The function.
    pub function: Arc<str>,
    /// CPU time of all its containers together, thousandths of a core.
    pub cpu_milli: u64,
    /// The limit with which a container begins, thousandths of a core.
    pub replica_cpu_milli: u64,
    /// The highest limit that one container can use, thousandths of a core: a program with one thread uses no more than 1000.
    pub replica_cpu_max_milli: u64,
    /// Memory of one container, bytes.
    pub memory_bytes: u64,
    /// Most containers.
    pub replicas_max: usize,
    /// Labels that its nodes must have.
    pub labels: Vec<Arc<str>>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Vertical: a container gets more CPU time.
    Raise {
        /// The index of the container: first those that ran already, then those of earlier steps.
        container: usize,
        /// Its new limit, thousandths of a core.
        to_cpu_milli: u64,
    },
    /// Horizontal: another container on this node.
    Add {
        /// The index of the node.
        node: usize,
        /// Its limit, thousandths of a core.
        cpu_milli: u64,
    },
}

/// Something that could be done, with its cost, or why it cannot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The number of the step for which it was looked at, from 0.
    pub round: usize,
    /// The step in words.
    pub words: String,
    /// What it costs and how much CPU time it gives, both in thousandths; or why it cannot be done.
    pub cost: Result<Cost, String>,
    /// Whether it was taken.
    pub taken: bool,
}

/// The cost of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The share of the node, thousandths of its cost.
    pub room: u64,
    /// Starting a container.
    pub start: u64,
    /// Shipping its image.
    pub ship: u64,
    /// CPU time gained, thousandths of a core.
    pub gain: u64,
}

impl Cost {
    /// The sum.
    pub const fn total(&self) -> u64 {
        self.room.saturating_add(self.start).saturating_add(self.ship)
    }

    /// Compares two costs by what each thousandth of a core costs; more gain first if that is equal.
    fn key(&self) -> impl Ord + use<> {
        // A fraction in whole numbers: cost * 2^20 / gain.
        let each = (u128::from(self.total()) << 20) / u128::from(self.gain.max(1));
        (each, Reverse(self.gain))
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { room, start, ship, gain } = self;
        write!(
            f,
            "{} for {gain} thousandths of a core (room {room}, start {start}, ship {ship})",
            self.total()
        )
    }
}

/// A plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// What to do, in this order.
    pub steps: Vec<Step>,
    /// The sum of the costs, thousandths.
    pub cost: u64,
    /// CPU time that is still missing, thousandths of a core. 0: the demand is covered.
    pub missing_cpu_milli: u64,
    /// All that was looked at.
    pub why: Vec<Choice>,
}

/// Plans the containers of one function. `running` are the containers of all functions on these nodes.
pub fn plan(nodes: &[Node], running: &[Running], demand: &Demand) -> Plan {
    let mut state = running.to_vec();
    let mut made = Plan::default();
    loop {
        let there: u64 = ours(&state, demand).map(|(_, one)| one.cpu_milli).sum();
        made.missing_cpu_milli = demand.cpu_milli.saturating_sub(there);
        // A function that is needed has at least one container.
        let is_served = made.missing_cpu_milli == 0 && ours(&state, demand).next().is_some();
        if is_served || made.steps.len() == STEPS_MAX {
            return made;
        }
        let (steps, mut choices) = choices(nodes, &state, demand, made.missing_cpu_milli, made.steps.len());
        let possible = choices
            .iter()
            .enumerate()
            .filter_map(|(at, choice)| Some((at, choice.cost.as_ref().ok()?.key())));
        let best = possible.min_by(|a, b| a.1.cmp(&b.1)).map(|(at, _)| at);
        let taken = best.and_then(|at| Some((steps.get(at)?.clone(), choices.get_mut(at)?)));
        let Some((step, choice)) = taken else {
            made.why.append(&mut choices);
            return made;
        };
        choice.taken = true;
        made.cost += choice.cost.as_ref().map_or(0, Cost::total);
        made.why.append(&mut choices);
        match step {
            Step::Raise { container, to_cpu_milli } => {
                if let Some(one) = state.get_mut(container) {
                    one.cpu_milli = to_cpu_milli;
                }
            }
            Step::Add { node, cpu_milli } => {
                let (function, memory_bytes) = (demand.function.clone(), demand.memory_bytes);
                state.push(Running { function, node, cpu_milli, memory_bytes });
            }
        }
        made.steps.push(step);
    }
}

/// The containers of this function, with their indices.
fn ours<'s>(state: &'s [Running], demand: &'s Demand) -> impl Iterator<Item = (usize, &'s Running)> {
    state.iter().enumerate().filter(|(_, one)| one.function == demand.function)
}

/// Everything that could be done next.
fn choices(
    nodes: &[Node],
    state: &[Running],
    demand: &Demand,
    missing: u64,
    round: usize,
) -> (Vec<Step>, Vec<Choice>) {
    let (mut steps, mut choices) = (Vec::new(), Vec::new());
    let mut look = |step, words, cost| {
        steps.push(step);
        choices.push(Choice { round, words, cost, taken: false });
    };
    for (at, one) in ours(state, demand) {
        let Some(node) = nodes.get(one.node) else { continue };
        let (free, _) = free(nodes, state, one.node);
        let most = demand.replica_cpu_max_milli.saturating_sub(one.cpu_milli);
        let gain = missing.min(most).min(free);
        let to = one.cpu_milli + gain;
        let words = format!(
            "raise container {at} on '{}' from {} to {to} thousandths of a core",
            node.name, one.cpu_milli
        );
        let cost = match (most, gain) {
            (0, _) => Err(format!("one container can use {} at most", demand.replica_cpu_max_milli)),
            (_, 0) => Err("the node has no CPU time left".to_owned()),
            _ => Ok(Cost { room: room(node, gain, 0), start: 0, ship: 0, gain }),
        };
        look(Step::Raise { container: at, to_cpu_milli: to }, words, cost);
    }
    for (at, node) in nodes.iter().enumerate() {
        let cpu = demand.replica_cpu_milli.min(demand.replica_cpu_max_milli).max(1);
        let words = format!("start a container on '{}' with {cpu} thousandths of a core", node.name);
        let has_one = ours(state, demand).any(|(_, one)| one.node == at);
        let cost = fits(nodes, state, demand, at, cpu).map(|()| Cost {
            room: room(node, cpu, demand.memory_bytes),
            start: START,
            ship: if has_one { 0 } else { SHIP },
            gain: cpu,
        });
        look(Step::Add { node: at, cpu_milli: cpu }, words, cost);
    }
    (steps, choices)
}

/// CPU time and memory that a node has left.
fn free(nodes: &[Node], state: &[Running], at: usize) -> (u64, u64) {
    let Some(node) = nodes.get(at) else { return (0, 0) };
    let used = state.iter().filter(|one| one.node == at);
    let (cpu, memory) = used.fold((0_u64, 0_u64), |(cpu, memory), one| {
        (cpu.saturating_add(one.cpu_milli), memory.saturating_add(one.memory_bytes))
    });
    (node.cpu_milli.saturating_sub(cpu), node.memory_bytes.saturating_sub(memory))
}

fn fits(nodes: &[Node], state: &[Running], demand: &Demand, at: usize, cpu: u64) -> Result<(), String> {
    let labels = nodes.get(at).map_or(&[][..], |node| &node.labels);
    if let Some(label) = demand.labels.iter().find(|label| !labels.contains(label)) {
        return Err(format!("the node lacks the label '{label}'"));
    }
    if ours(state, demand).count() >= demand.replicas_max {
        return Err(format!("there are {} containers already", demand.replicas_max));
    }
    let (free_cpu, free_memory) = free(nodes, state, at);
    if free_cpu < cpu {
        return Err(format!("the node has {free_cpu} thousandths of a core left"));
    }
    if free_memory < demand.memory_bytes {
        return Err(format!("the node has {free_memory} bytes of memory left"));
    }
    Ok(())
}

/// The cost of a share of a node, rounded up.
fn room(node: &Node, cpu: u64, memory: u64) -> u64 {
    let share = |part: u64, whole: u64| {
        let cost = u128::from(part) * u128::from(node.cost_milli);
        u64::try_from(cost.div_ceil(u128::from(whole.max(1)))).unwrap_or(u64::MAX)
    };
    share(cpu, node.cpu_milli).max(share(memory, node.memory_bytes))
}
