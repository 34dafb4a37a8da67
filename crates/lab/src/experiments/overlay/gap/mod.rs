//! The metric of the paper on dissemination graphs (Babay, Wagner, Dinitz, Amir, ICDCS 2017) in simulation: how much of the gap
//! between one path and flooding a way of dissemination closes, and what it costs. The links of packets are chosen by the
//! program's own code, from what its nodes would announce.
//!
//! A packet is in time if a copy arrives within [`DEADLINE_US`]. All ways send the same packets into the same losses, and no
//! link recovers anything.

mod network;
mod trace;

use std::time::Duration;

use serde::Serialize;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service};

use crate::link::random::Random;
pub(super) use network::LINKS as CITIES;
use network::{Announced, DIRECTED, EAST, NODES, State, WEST, delay_us, ends, id, link_between};
use trace::Trace;

/// One way, µs: the goal of the paper.
const DEADLINE_US: u32 = 65_000;

/// Nodes announce changed costs at this interval, seconds.
const ANNOUNCED_EVERY: u64 = 2;

/// Packets of each flow in a second with trouble.
const PACKETS: u64 = 4;

/// Seconds of a trace of the table.
const SECONDS: u64 = 3600;

/// Most links on the way of a flooded packet: enough for all ways that can be in time.
const HOPS: u8 = 6;

/// A way to choose the links of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Way {
    /// The cheapest path now.
    Path,
    /// The two disjoint paths that are cheapest while there is no trouble.
    StaticTwo,
    /// The two disjoint paths that are cheapest now.
    DynamicTwo,
    /// Dissemination graphs with targeted redundancy.
    Graphs,
    /// All links that can be of use.
    Flood,
}

impl Way {
    const ALL: [Self; 5] = [Self::Path, Self::StaticTwo, Self::DynamicTwo, Self::Graphs, Self::Flood];

    /// Returns its name, and the share of the gap in the paper, percent.
    const fn named(self) -> (&'static str, Option<f64>) {
        match self {
            Self::Path => ("one path", Some(0.0)),
            Self::StaticTwo => ("two disjoint paths, static", Some(45.0)),
            Self::DynamicTwo => ("two disjoint paths, dynamic", Some(70.0)),
            Self::Graphs => ("graphs with targeted redundancy", Some(99.0)),
            Self::Flood => ("flooding", Some(100.0)),
        }
    }

    fn links(self, graph: &Graph, from: usize, to: usize) -> Vec<usize> {
        let dissemination = match self {
            Self::Path => Dissemination::Shortest,
            Self::StaticTwo | Self::DynamicTwo => Dissemination::Duplicate,
            Self::Graphs => Dissemination::Graph,
            Self::Flood => Dissemination::Flood,
        };
        let deadline = Some(Duration::from_micros(DEADLINE_US.into()));
        let service = Service { dissemination, hops: HOPS, deadline, ..Service::new(LinkKind::BestEffort) };
        let subgraph = graph.subgraph(id(from), id(to), &service);
        let numbers = |(from, to): (NodeId, NodeId)| link_between(from, to);
        subgraph.iter().flat_map(|subgraph| subgraph.links()).filter_map(numbers).collect()
    }
}

/// What one way of dissemination did.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Row {
    /// Packets that were not in time.
    pub late: u64,
    /// Links that carried a copy, summed over all flows and seconds.
    pub links: u64,
}

/// The result of all traces.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Gap {
    /// Traces.
    pub traces: u64,
    /// Flows in each trace.
    pub flows: u64,
    /// Seconds of all traces together.
    pub seconds: u64,
    /// Rows in the order of [`Way::ALL`].
    pub rows: [Row; 5],
}

impl Gap {
    fn row(&self, way: Way) -> &Row {
        &self.rows[way as usize]
    }

    /// Returns the share of the gap between one path and flooding that this way closes.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub(super) fn share(&self, way: Way) -> f64 {
        let late = |way| self.row(way).late as f64;
        (late(Way::Path) - late(way)) / (late(Way::Path) - late(Way::Flood))
    }

    /// Returns the cost of this way, in those of two dynamic disjoint paths.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub(super) fn cost(&self, way: Way) -> f64 {
        self.row(way).links as f64 / self.row(Way::DynamicTwo).links as f64
    }

    /// Formats the table.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub(super) fn text(&self) -> String {
        let Self { traces, flows, seconds, .. } = self;
        let hours = *seconds as f64 / 3600.0;
        let mut text = format!(
            "\nIn simulation, {traces} seeded traces of {hours:.0} hours together, {flows} flows from coast to coast over twelve nodes, \
             {} ms one way, no recovery on links:\n\n\
             | dissemination | not in time, per million | of the gap | paper | cost, two dynamic paths = 1 |\n|---|---:|---:|---:|---:|\n",
            DEADLINE_US / 1000
        );
        let packets = (seconds * flows * PACKETS) as f64;
        for way in Way::ALL {
            let (name, paper) = way.named();
            let late = self.row(way).late as f64 * 1e6 / packets;
            let paper = paper.map_or_else(|| "-".to_owned(), |paper| format!("{paper:.0} %"));
            text += &format!(
                "| {name} | {late:.1} | {:.1} % | {paper} | {:.3} |\n",
                100.0 * self.share(way),
                self.cost(way)
            );
        }
        text
    }
}

/// Runs this number of traces for the table.
pub(super) fn measure(seed: u64, traces: u64) -> Gap {
    run(seed..seed.saturating_add(traces), SECONDS, EAST.len())
}

/// Runs traces with these seeds, each of `seconds`, and the flows between the first `coast` cities of each coast.
fn run(seeds: std::ops::Range<u64>, seconds: u64, coast: usize) -> Gap {
    let pairs = EAST.iter().take(coast).flat_map(|from| WEST.iter().take(coast).map(|to| (*from, *to)));
    let pairs: Vec<_> = pairs.collect();
    let traces = seeds.end.saturating_sub(seeds.start);
    let mut gap = Gap {
        traces,
        flows: pairs.len() as u64,
        seconds: traces * seconds,
        rows: std::array::from_fn(|_| Row::default()),
    };
    for seed in seeds {
        Run::new(seed, seconds, &pairs).run(seconds, &mut gap.rows);
    }
    gap
}

/// One trace.
struct Run<'p> {
    trace: Trace,
    pairs: &'p [(usize, usize)],
    announced: Announced,
    /// Decides which packets are lost.
    random: Random,
    /// The links of each flow, by [`Way::ALL`], and how many they are together.
    chosen: Vec<[Vec<usize>; 5]>,
}

impl<'p> Run<'p> {
    fn new(seed: u64, seconds: u64, pairs: &'p [(usize, usize)]) -> Self {
        let mut announced = Announced::new();
        let graph = announced.graph(0, &[State::default(); DIRECTED]);
        let chosen = pairs.iter().map(|(from, to)| Way::ALL.map(|way| way.links(&graph, *from, *to)));
        let chosen = chosen.collect();
        let random = Random::new(seed ^ 0x5eed);
        Self { trace: Trace::new(seed, seconds), pairs, announced, random, chosen }
    }

    fn run(mut self, seconds: u64, rows: &mut [Row; 5]) {
        let quiet = [State::default(); DIRECTED];
        // In quiet times nothing changes and all packets are in time.
        let mut is_settled = true;
        for second in 0..seconds {
            let is_troubled = self.trace.is_troubled(second);
            let states = if is_troubled { self.trace.states(second) } else { quiet };
            if is_troubled {
                self.send(&states, rows);
            }
            for (row, way) in rows.iter_mut().zip(0..) {
                row.links +=
                    self.chosen.iter().map(|links: &[Vec<usize>; 5]| links[way].len() as u64).sum::<u64>();
            }
            if is_troubled || !is_settled {
                self.announced.measure(&states);
                let is_quiet = !is_troubled && self.announced.is_quiet();
                if is_quiet {
                    self.announced.rest();
                }
                if second.is_multiple_of(ANNOUNCED_EVERY) && (!is_quiet || self.announced.is_due(second)) {
                    self.choose(second, &states);
                }
                is_settled = is_quiet && self.announced.is_well();
            }
        }
    }

    /// Chooses the links of the next seconds by what is announced at the end of this one.
    fn choose(&mut self, second: u64, states: &[State; DIRECTED]) {
        let graph = self.announced.graph(second, states);
        for ((from, to), chosen) in self.pairs.iter().zip(&mut self.chosen) {
            for way in [Way::Path, Way::DynamicTwo, Way::Graphs] {
                chosen[way as usize] = way.links(&graph, *from, *to);
            }
        }
    }

    /// Sends the packets of one second.
    fn send(&mut self, states: &[State; DIRECTED], rows: &mut [Row; 5]) {
        for _ in 0..PACKETS {
            let passes: [bool; DIRECTED] =
                std::array::from_fn(|link| !self.random.happens(states[link].loss));
            for ((from, to), chosen) in self.pairs.iter().zip(&self.chosen) {
                for (row, links) in rows.iter_mut().zip(chosen) {
                    row.late += u64::from(!is_in_time(states, &passes, links, *from, *to));
                }
            }
        }
    }
}

/// Whether a copy of a packet arrives in time over these links.
fn is_in_time(
    states: &[State; DIRECTED],
    passes: &[bool; DIRECTED],
    links: &[usize],
    from: usize,
    to: usize,
) -> bool {
    let mut arrives = [u32::MAX; NODES];
    arrives[from] = 0;
    let mut changed = true;
    while changed {
        changed = false;
        for link in links.iter().filter(|link| passes[**link]) {
            let (one, other) = ends(*link);
            let at = arrives[one].saturating_add(delay_us(*link) + states[*link].more_us);
            if at < arrives[other] {
                arrives[other] = at;
                changed = true;
            }
        }
    }
    arrives[to] <= DEADLINE_US
}

#[cfg(test)]
mod tests {
    use super::super::bars::{GAP_COST, GAP_SHARE};
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn targeted_redundancy_closes_nearly_all_of_the_gap_at_little_cost() {
        let gap = run(0..300, 1800, 2);
        println!("{}", gap.text());
        assert!(gap.row(Way::Path).late > 1000, "there is trouble at all: {gap:?}");
        let share = |way| gap.share(way);
        assert!(share(Way::Graphs) >= GAP_SHARE && gap.cost(Way::Graphs) <= GAP_COST, "{}", gap.text());
        assert!(share(Way::StaticTwo) < share(Way::DynamicTwo), "{}", gap.text());
        assert!(share(Way::DynamicTwo) < share(Way::Graphs), "{}", gap.text());
    }

    #[test]
    fn the_same_seed_gives_the_same_trace() {
        let text = |seed: u64| run(seed..seed + 2, 900, 1).text();
        assert_eq!(text(7), text(7));
    }

    #[test]
    fn every_flow_has_two_disjoint_paths_in_time_and_flooding_uses_more() {
        let graph = Announced::new().graph(0, &[State::default(); DIRECTED]);
        let quiet = [State::default(); DIRECTED];
        for (from, to) in EAST.iter().flat_map(|from| WEST.map(|to| (*from, to))) {
            let [path, two, now, graphs, flood] = Way::ALL.map(|way| way.links(&graph, from, to));
            assert!(is_in_time(&quiet, &[true; DIRECTED], &path, from, to));
            assert!(two.len() > path.len() && two == now && two == graphs && flood.len() > two.len());
            // Without the first link of the cheapest path, the second path is in time.
            let mut passes = [true; DIRECTED];
            passes[path[0]] = false;
            assert!(is_in_time(&quiet, &passes, &two, from, to), "{from} to {to}");
            let used: BTreeSet<_> = flood.iter().collect();
            assert_eq!(used.len(), flood.len());
        }
    }
}
