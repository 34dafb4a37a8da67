//! Finds the cheapest functions that together apply a set of attributes: weighted set cover, by branch and bound.

use super::catalogue::{AttributeSet, Bridge, Catalogue, FunctionSet};

/// After this number of steps, the search ends with the best result so far.
pub(super) const SEARCH_MAX: u32 = 20_000;

/// The functions that apply nothing unwanted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cover {
    /// The functions.
    pub allowed: FunctionSet,
    /// All attributes that they apply.
    pub covered: AttributeSet,
}

/// Returns the cheapest subset of `allowed` that applies all of `missing`. All of `allowed` together must apply it.
pub(super) fn cheapest(catalogue: &Catalogue, missing: AttributeSet, allowed: FunctionSet) -> Bridge {
    let mut start = Chosen { functions: FunctionSet::EMPTY, cost: 0, left: missing };
    // If only one function applies an attribute, it must be chosen.
    for attribute in missing.iter() {
        let appliers = catalogue.appliers[attribute].intersection(&allowed);
        if appliers.len() == 1
            && let Some(place) = appliers.iter().next()
        {
            start = start.with(catalogue, place);
        }
    }
    let mut search = Search { catalogue, allowed, best: None, steps: 0 };
    search.visit(start);
    let is_cheapest = search.steps < SEARCH_MAX;
    let best = search.best.unwrap_or(start);
    Bridge { functions: best.functions, cost: best.cost, is_cheapest }
}

#[derive(Clone, Copy)]
struct Chosen {
    functions: FunctionSet,
    cost: u64,
    /// The attributes that no chosen function applies yet.
    left: AttributeSet,
}

impl Chosen {
    fn with(mut self, catalogue: &Catalogue, place: usize) -> Self {
        if self.functions.contains(place) {
            return self;
        }
        self.functions.insert(place);
        self.cost += u64::from(catalogue.costs[place]);
        self.left = self.left.minus(&catalogue.applies[place]);
        self
    }
}

struct Search<'c> {
    catalogue: &'c Catalogue,
    allowed: FunctionSet,
    best: Option<Chosen>,
    steps: u32,
}

impl Search<'_> {
    fn visit(&mut self, chosen: Chosen) {
        self.steps += 1;
        if chosen.left.is_empty() {
            if self.best.is_none_or(|best| chosen.cost < best.cost) {
                self.best = Some(chosen);
            }
            return;
        }
        let is_hopeless = |best: Chosen| chosen.cost + self.least_cost(chosen.left) >= best.cost;
        if self.best.is_some_and(is_hopeless) {
            return;
        }
        let mut appliers = self.scarcest(chosen.left);
        while let Some(place) = appliers.iter().min_by_key(|place| self.price(*place, chosen.left)) {
            appliers = appliers.minus(&FunctionSet::of(place));
            // The first descent always ends with a complete set, so there is a result before the search may stop.
            if self.steps >= SEARCH_MAX && self.best.is_some() {
                return;
            }
            self.visit(chosen.with(self.catalogue, place));
        }
    }

    /// Returns the functions for the attribute that the fewest functions apply.
    fn scarcest(&self, left: AttributeSet) -> FunctionSet {
        let appliers = |attribute: usize| self.catalogue.appliers[attribute].intersection(&self.allowed);
        left.iter().map(appliers).min_by_key(FunctionSet::len).unwrap_or_default()
    }

    /// Returns the cost per attribute of `left` that the function applies, in units of 1/65536.
    fn price(&self, place: usize, left: AttributeSet) -> u64 {
        let applied = self.catalogue.applies[place].intersection(&left).len() as u64;
        (u64::from(self.catalogue.costs[place]) << 16) / applied.max(1)
    }

    /// Returns a lower bound for the cost of `left`: each attribute at its best price.
    fn least_cost(&self, left: AttributeSet) -> u64 {
        let cheapest = |attribute: usize| {
            let appliers = self.catalogue.appliers[attribute].intersection(&self.allowed);
            appliers.iter().map(|place| self.price(place, left)).min().unwrap_or(0)
        };
        left.iter().map(cheapest).sum::<u64>() >> 16
    }
}
