//! The catalogue: all attributes, and the bridging functions that can apply them.

use super::cover::{self, Cover};
use super::set::SmallSet;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A set of attributes, as indexes in a [`Catalogue`].
pub type AttributeSet = SmallSet;

/// A set of bridging functions, as positions in the order that every chain follows.
pub type FunctionSet = SmallSet;

/// The position that a function may have in a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// Before every function that is not `First`: decryption.
    First,
    /// Any position that `before` and `after` allow.
    #[default]
    Anywhere,
    /// After every function that is not `Last`: encryption.
    Last,
}

/// A bridging function (EPI framework, Sec. III-B): the attributes it applies, its cost, and its position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BridgingFunction {
    /// Its name, unique in a catalogue.
    pub name: Arc<str>,
    /// The attributes it applies, at least one.
    pub applies: Vec<String>,
    /// The cost of using it, in a unit of the operator's choice. Only sums are compared.
    pub cost: u32,
    /// Its position.
    pub position: Position,
    /// Functions that must come after it, if they are in the same chain.
    pub before: Vec<String>,
    /// Functions that must come before it, if they are in the same chain.
    pub after: Vec<String>,
}

/// Why a catalogue is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CatalogueError {
    /// Too many attributes or functions.
    #[error("{count} {what} are too many: at most {} fit", SmallSet::MAX)]
    TooMany {
        /// `attributes` or `functions`.
        what: &'static str,
        /// The number of them.
        count: usize,
    },
    /// A name occurs twice.
    #[error("the {what} '{name}' is declared twice: take one out")]
    Twice {
        /// `attribute` or `function`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A function applies an attribute that is not declared.
    #[error(
        "the function '{function}' applies the unknown attribute '{attribute}': declare it, or correct the name"
    )]
    UnknownAttribute {
        /// The function's name.
        function: String,
        /// The attribute's name.
        attribute: String,
    },
    /// A function is ordered relative to one that is not declared.
    #[error("the function '{function}' is ordered against the unknown function '{other}'")]
    UnknownFunction {
        /// The function's name.
        function: String,
        /// The unknown name.
        other: String,
    },
    /// A function applies no attribute.
    #[error("the function '{function}' applies no attribute: name at least one")]
    AppliesNothing {
        /// The function's name.
        function: String,
    },
    /// No order satisfies all constraints.
    #[error("no order satisfies the constraints: {}; take one of them out", .cycle.join(" before "))]
    Cycle {
        /// Each function must come before the next one. The last is the first again.
        cycle: Vec<String>,
    },
}

/// The attributes A (Eq. 2), the bridging functions, and thus the bridgeable attributes A_delta.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalogue {
    attributes: Vec<Arc<str>>,
    numbers: BTreeMap<Arc<str>, usize>,
    /// The functions, in the order that every chain follows.
    functions: Vec<Arc<str>>,
    pub(super) applies: Vec<AttributeSet>,
    pub(super) costs: Vec<u32>,
    /// By attribute: the functions that apply it.
    pub(super) appliers: Vec<FunctionSet>,
    bridgeable: AttributeSet,
}

/// The cheapest functions for a set of missing attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bridge {
    /// The functions; empty if nothing was missing.
    pub functions: FunctionSet,
    /// The sum of their costs.
    pub cost: u64,
    /// Whether there is no cheaper set. False only if the search was stopped after [`Catalogue::SEARCH_MAX`] steps.
    pub is_cheapest: bool,
}

impl Catalogue {
    /// The search for a cheaper chain stops after this number of steps. It is far more than any real catalogue needs,
    /// and limits the cost of a malicious one.
    pub const SEARCH_MAX: u32 = cover::SEARCH_MAX;

    /// Checks attributes and functions and finds the order that chains follow.
    ///
    /// # Errors
    /// Fails with what is wrong, including the names.
    pub fn new(
        attributes: impl IntoIterator<Item = impl Into<Arc<str>>>,
        functions: Vec<BridgingFunction>,
    ) -> Result<Self, CatalogueError> {
        let attributes: Vec<Arc<str>> = attributes.into_iter().map(Into::into).collect();
        let numbers = numbered("attribute", attributes.iter().cloned())?;
        let places = numbered("function", functions.iter().map(|function| function.name.clone()))?;
        for (what, count) in [("attributes", attributes.len()), ("functions", functions.len())] {
            if count > SmallSet::MAX {
                return Err(CatalogueError::TooMany { what, count });
            }
        }
        // Number the functions in the order of chains, so that every set of them is a chain.
        let order = order(&functions, &places)?;
        let mut catalogue = Self {
            appliers: vec![FunctionSet::EMPTY; attributes.len()],
            attributes,
            numbers,
            functions: Vec::new(),
            applies: Vec::new(),
            costs: Vec::new(),
            bridgeable: AttributeSet::EMPTY,
        };
        for (place, index) in order.into_iter().enumerate() {
            catalogue.add(place, &functions[index])?;
        }
        Ok(catalogue)
    }

    fn add(&mut self, place: usize, function: &BridgingFunction) -> Result<(), CatalogueError> {
        let name = || function.name.to_string();
        let applies = self.set(&function.applies).map_err(|attribute| CatalogueError::UnknownAttribute {
            function: name(),
            attribute: attribute.to_owned(),
        })?;
        if applies.is_empty() {
            return Err(CatalogueError::AppliesNothing { function: name() });
        }
        for attribute in applies.iter() {
            self.appliers[attribute].insert(place);
        }
        self.bridgeable = self.bridgeable.union(&applies);
        self.functions.push(function.name.clone());
        self.applies.push(applies);
        self.costs.push(function.cost);
        Ok(())
    }

    /// Returns the set of these attributes.
    ///
    /// # Errors
    /// Fails with the first name that is not declared.
    pub fn set<'n>(
        &self,
        names: impl IntoIterator<Item = &'n (impl AsRef<str> + ?Sized + 'n)>,
    ) -> Result<AttributeSet, &'n str> {
        let mut set = AttributeSet::EMPTY;
        for name in names {
            let name = name.as_ref();
            set.insert(*self.numbers.get(name).ok_or(name)?);
        }
        Ok(set)
    }

    /// Returns the names of the attributes in a set, in the order of their declaration.
    pub fn attribute_names(&self, set: AttributeSet) -> impl Iterator<Item = &Arc<str>> {
        set.iter().filter_map(|number| self.attributes.get(number))
    }

    /// Returns the names of functions in the order in which a flow passes them.
    pub fn chain(&self, functions: FunctionSet) -> impl Iterator<Item = &Arc<str>> {
        functions.iter().filter_map(|place| self.functions.get(place))
    }

    /// Returns the attributes that at least one function applies: A_delta.
    pub const fn bridgeable(&self) -> AttributeSet {
        self.bridgeable
    }

    /// Returns the cheapest functions that apply exactly `missing` and nothing else.
    ///
    /// # Errors
    /// Fails with the attributes that cannot be applied without also applying one that is not missing.
    pub fn bridge(&self, missing: AttributeSet) -> Result<Bridge, AttributeSet> {
        let Cover { allowed, covered } = self.cover(missing);
        let offending = missing.minus(&covered);
        if offending.is_empty() { Ok(cover::cheapest(self, missing, allowed)) } else { Err(offending) }
    }

    /// Whether `missing` can be bridged. Cheaper than finding the bridge.
    pub fn is_bridgeable(&self, missing: AttributeSet) -> bool {
        missing.is_empty()
            || (missing.is_subset(&self.bridgeable) && missing.is_subset(&self.cover(missing).covered))
    }

    /// Returns the functions that apply nothing outside `missing`, and all attributes that they apply.
    fn cover(&self, missing: AttributeSet) -> Cover {
        let mut cover = Cover::default();
        for (place, applies) in self.applies.iter().enumerate() {
            if applies.is_subset(&missing) {
                cover.allowed.insert(place);
                cover.covered = cover.covered.union(applies);
            }
        }
        cover
    }
}

/// Maps names to their indexes. Fails if a name occurs twice.
fn numbered(
    what: &'static str,
    names: impl Iterator<Item = Arc<str>>,
) -> Result<BTreeMap<Arc<str>, usize>, CatalogueError> {
    let mut numbers = BTreeMap::new();
    for (number, name) in names.enumerate() {
        if numbers.insert(name.clone(), number).is_some() {
            return Err(CatalogueError::Twice { what, name: name.to_string() });
        }
    }
    Ok(numbers)
}

/// Returns an order of the functions that satisfies all constraints. Among those that may come next, the one declared
/// first is taken.
fn order(
    functions: &[BridgingFunction],
    places: &BTreeMap<Arc<str>, usize>,
) -> Result<Vec<usize>, CatalogueError> {
    let mut earlier = earlier(functions, places)?;
    let mut order = Vec::with_capacity(functions.len());
    let mut left: FunctionSet = (0..functions.len()).collect();
    while !left.is_empty() {
        let Some(next) = left.iter().find(|index| earlier[*index].is_empty()) else {
            return Err(CatalogueError::Cycle { cycle: cycle(functions, &earlier, left) });
        };
        order.push(next);
        let done = FunctionSet::of(next);
        left = left.minus(&done);
        for set in &mut earlier {
            *set = set.minus(&done);
        }
    }
    Ok(order)
}

/// Returns for each function those that must come before it.
fn earlier(
    functions: &[BridgingFunction],
    places: &BTreeMap<Arc<str>, usize>,
) -> Result<Vec<FunctionSet>, CatalogueError> {
    let place = |function: &BridgingFunction, other: &String| {
        places.get(other.as_str()).copied().ok_or_else(|| CatalogueError::UnknownFunction {
            function: function.name.to_string(),
            other: other.clone(),
        })
    };
    let mut earlier = vec![FunctionSet::EMPTY; functions.len()];
    for (index, function) in functions.iter().enumerate() {
        for other in &function.after {
            earlier[index].insert(place(function, other)?);
        }
        for other in &function.before {
            earlier[place(function, other)?].insert(index);
        }
        let before = functions.iter().enumerate().filter(|(_, other)| other.position < function.position);
        earlier[index] = earlier[index].union(&before.map(|(other, _)| other).collect());
    }
    Ok(earlier)
}

/// Returns a cycle among `left`. Each of these functions has one of `left` before it.
fn cycle(functions: &[BridgingFunction], earlier: &[FunctionSet], left: FunctionSet) -> Vec<String> {
    let mut path: Vec<usize> = Vec::new();
    let mut at = left.iter().next().unwrap_or(0);
    while !path.contains(&at) {
        path.push(at);
        at = earlier[at].intersection(&left).iter().next().unwrap_or(at);
    }
    let start = path.iter().position(|other| *other == at).unwrap_or(0);
    // The path goes from later to earlier functions.
    let cycle = path[start..].iter().chain([&at]).rev();
    cycle.map(|index| functions[*index].name.to_string()).collect()
}
