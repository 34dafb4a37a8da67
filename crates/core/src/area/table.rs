//! The results for all pairs of nodes, kept up to date.

use super::catalogue::{AttributeSet, Bridge, Catalogue};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The result for a pair of nodes, from the first to the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A channel (Eq. 4): data may move unchanged.
    Channel,
    /// These functions bridge the missing attributes (Eq. 5).
    Bridged(Bridge),
    /// Nothing is missing, but the second node lacks these attributes of the first. Eq. 4 does not hold, and no
    /// function helps.
    Surplus(AttributeSet),
    /// Functions cannot bridge the missing attributes, because of these.
    Unfeasible(AttributeSet),
}

/// The number of ordered pairs of different nodes, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All pairs.
    pub pairs: u64,
    /// Pairs with a channel.
    pub channels: u64,
    /// Pairs that functions bridge.
    pub bridged: u64,
    /// Other pairs: no function can apply the missing attributes, or there is only a surplus.
    pub unfeasible: u64,
}

impl Counts {
    /// Returns the share of pairs between which data cannot move, 0 to 1 (EPI framework, Sec. III-B). 0 if there are
    /// no pairs.
    #[expect(clippy::cast_precision_loss, reason = "a ratio: an error of 2^-53 does not matter")]
    pub fn unfeasibility_ratio(&self) -> f64 {
        if self.pairs == 0 { 0.0 } else { self.unfeasible as f64 / self.pairs as f64 }
    }

    fn add(&mut self, class: Class, pairs: u64) {
        self.pairs += pairs;
        match class {
            Class::Channel => self.channels += pairs,
            Class::Bridged => self.bridged += pairs,
            Class::Unfeasible => self.unfeasible += pairs,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Channel,
    Bridged,
    Unfeasible,
}

/// The nodes of an application (N_App), their areas, and the result for each pair.
#[derive(Clone, Debug)]
pub struct Areas {
    catalogue: Catalogue,
    /// The area of each node.
    nodes: BTreeMap<Arc<str>, usize>,
    areas: Vec<Area>,
    numbers: BTreeMap<AttributeSet, usize>,
    /// Areas without nodes, to be reused.
    free: Vec<usize>,
    /// The class from area to area.
    classes: Vec<Vec<Class>>,
}

#[derive(Clone, Copy, Debug)]
struct Area {
    attributes: AttributeSet,
    /// The number of nodes in it.
    size: u64,
}

impl Areas {
    /// Makes a table without nodes.
    pub const fn new(catalogue: Catalogue) -> Self {
        Self {
            catalogue,
            nodes: BTreeMap::new(),
            areas: Vec::new(),
            numbers: BTreeMap::new(),
            free: Vec::new(),
            classes: Vec::new(),
        }
    }

    /// Returns the attributes and functions.
    pub const fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Adds a node, or changes its attributes.
    pub fn set_node(&mut self, node: impl Into<Arc<str>>, attributes: AttributeSet) {
        let node = node.into();
        let area = self.area_of(attributes);
        self.areas[area].size += 1;
        if let Some(old) = self.nodes.insert(node, area) {
            self.leave(old);
        }
    }

    /// Removes a node. Returns false if there is no node with this name.
    pub fn remove_node(&mut self, node: &str) -> bool {
        let area = self.nodes.remove(node);
        area.map(|area| self.leave(area)).is_some()
    }

    /// Returns the attributes of a node.
    pub fn attributes(&self, node: &str) -> Option<AttributeSet> {
        Some(self.areas[*self.nodes.get(node)?].attributes)
    }

    /// Returns the areas: their attributes, and the nodes that have exactly these.
    pub fn areas(&self) -> BTreeMap<AttributeSet, Vec<&Arc<str>>> {
        let mut areas: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (node, area) in &self.nodes {
            areas.entry(self.areas[*area].attributes).or_default().push(node);
        }
        areas
    }

    /// Returns the result for two nodes, from the first to the second. `None` if one of them is unknown.
    pub fn between(&self, from: &str, to: &str) -> Option<Outcome> {
        Some(outcome(&self.catalogue, self.attributes(from)?, self.attributes(to)?))
    }

    /// Returns all ordered pairs of different nodes with their results, in the order of their names.
    pub fn pairs(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<str>, Outcome)> {
        let attributes = |area: &usize| self.areas[*area].attributes;
        self.nodes.iter().flat_map(move |(from, from_area)| {
            let others = self.nodes.iter().filter(move |(to, _)| *to != from);
            others.map(move |(to, to_area)| {
                (from, to, outcome(&self.catalogue, attributes(from_area), attributes(to_area)))
            })
        })
    }

    /// Returns the number of pairs of each kind.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for (from, row) in self.areas.iter().zip(&self.classes) {
            for (to, class) in self.areas.iter().zip(row) {
                counts.add(*class, from.size * to.size);
            }
            // A node does not form a pair with itself.
            counts.channels -= from.size;
            counts.pairs -= from.size;
        }
        counts
    }

    /// Returns the area with these attributes. A new area gets its row and its column.
    fn area_of(&mut self, attributes: AttributeSet) -> usize {
        if let Some(area) = self.numbers.get(&attributes) {
            return *area;
        }
        let area = self.free.pop().unwrap_or_else(|| {
            self.areas.push(Area { attributes, size: 0 });
            self.classes.iter_mut().for_each(|row| row.push(Class::Unfeasible));
            self.classes.push(vec![Class::Unfeasible; self.areas.len()]);
            self.areas.len() - 1
        });
        self.areas[area] = Area { attributes, size: 0 };
        self.numbers.insert(attributes, area);
        for other in 0..self.areas.len() {
            let theirs = self.areas[other].attributes;
            self.classes[area][other] = class(&self.catalogue, attributes, theirs);
            self.classes[other][area] = class(&self.catalogue, theirs, attributes);
        }
        area
    }

    fn leave(&mut self, area: usize) {
        self.areas[area].size -= 1;
        if self.areas[area].size == 0 {
            self.numbers.remove(&self.areas[area].attributes);
            self.free.push(area);
        }
    }
}

fn class(catalogue: &Catalogue, from: AttributeSet, to: AttributeSet) -> Class {
    let missing = to.minus(&from);
    if from.is_subset(&to) {
        Class::Channel
    } else if !missing.is_empty() && catalogue.is_bridgeable(missing) {
        Class::Bridged
    } else {
        Class::Unfeasible
    }
}

/// Applies Eqs. 4 and 5.
fn outcome(catalogue: &Catalogue, from: AttributeSet, to: AttributeSet) -> Outcome {
    if from.is_subset(&to) {
        return Outcome::Channel;
    }
    let missing = to.minus(&from);
    if missing.is_empty() {
        return Outcome::Surplus(from.minus(&to));
    }
    catalogue.bridge(missing).map_or_else(Outcome::Unfeasible, Outcome::Bridged)
}
