//! `[function.NAME]` of kind "branch": its arms, and the functions that they name.

use super::super::raw::function::{Arm, Kind};
use super::super::{At, List, raw};
use super::Check;
use super::functions::CHAIN_MAX;
use sidetrack_core::function::{ArmSpec, BranchSpec, FunctionKind, FunctionSpec};
use sidetrack_core::policy::Match;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Most arms of a branch.
const ARMS_MAX: usize = 32;
/// Most functions in all arms of a branch, with those of the branches in them.
const FUNCTIONS_MAX: usize = 256;
/// Longest text of `prefix`, bytes.
const PREFIX_MAX: usize = 64;

/// The branches as they are written.
type Written<'f> = BTreeMap<&'f str, &'f At<raw::Function>>;

impl Check<'_> {
    /// Reads all branches, each after those that its arms name. Refuses cycles.
    pub(super) fn read_branches(&mut self, functions: &BTreeMap<String, At<raw::Function>>) {
        let is_branch = |function: &raw::Function| matches!(function.kind.as_deref(), Some(Kind::Branch));
        let branches = functions.iter().filter(|(_, function)| is_branch(function));
        let mut left: Written<'_> = branches.map(|(name, function)| (name.as_str(), function)).collect();
        // In each turn, read those whose arms name no unread branch.
        while !left.is_empty() {
            let ready: Vec<_> =
                left.keys().copied().filter(|name| waits_for(name, &left).is_empty()).collect();
            if ready.is_empty() {
                self.cycles(&left);
                return;
            }
            for name in ready {
                let Some(function) = left.remove(name) else { continue };
                let branch = self.branch(function);
                let kind = branch.map(|branch| FunctionKind::Branch(Arc::new(branch)));
                let spec = kind.map(|kind| Arc::new(FunctionSpec { name: name.into(), kind }));
                self.functions.insert(name.to_owned(), spec);
            }
        }
    }

    /// Reports branches that lead to themselves, and those that lead to such a branch.
    fn cycles(&mut self, left: &Written<'_>) {
        let mut reported = BTreeSet::new();
        for (name, function) in left {
            self.functions.insert((*name).to_owned(), None);
            // Every branch that is left waits for another. Follow the first one until a name comes twice.
            let mut way = vec![*name];
            while let Some(next) = way.last().and_then(|last| waits_for(last, left).into_iter().next()) {
                if let Some(start) = way.iter().position(|before| *before == next) {
                    way.drain(..start);
                    break;
                }
                way.push(next);
            }
            let members: BTreeSet<_> = way.iter().copied().collect();
            if !members.contains(name) || !reported.insert(members) {
                continue;
            }
            way.push(way[0]);
            let message = format!("the branch '{}' leads to itself: {}", way[0], way.join(" -> "));
            self.error(function.span(), message, "take one of these names out of the arms");
        }
    }

    fn branch(&mut self, function: &At<raw::Function>) -> Option<BranchSpec> {
        let Some(arms) = function.arms.as_ref().filter(|arms| !arms.items().is_empty()) else {
            let help = "write `arms = [{ name = \"web\", match = { port = 80 }, chain = [\"words\"] }]`";
            self.error(function.span(), "a branch needs arms", help);
            return None;
        };
        if arms.items().len() > ARMS_MAX {
            self.error(arms.span(), format!("{} arms", arms.items().len()), format!("at most {ARMS_MAX}"));
        }
        let named = arms.items().iter().filter_map(|arm| arm.name.as_ref());
        self.unique(named.map(|name| (name.as_str(), name.span())), "arm");
        let specs: Vec<_> = arms.items().iter().map(|arm| self.arm(arm)).collect();
        self.reachable(arms, &specs);
        let arms_of = specs.into_iter().collect::<Option<Vec<_>>>()?;
        let branch = BranchSpec { arms: arms_of };
        let count = size(&branch);
        if count > FUNCTIONS_MAX {
            let message = format!("the arms of this branch contain {count} functions");
            self.error(
                arms.span(),
                message,
                format!("at most {FUNCTIONS_MAX}, with those of branches in them"),
            );
            return None;
        }
        Some(branch)
    }

    /// Refuses arms that no flow can take.
    fn reachable(&mut self, arms: &List<Arm>, specs: &[Option<ArmSpec>]) {
        for (index, spec) in specs.iter().enumerate() {
            let Some(spec) = spec else { continue };
            let mut before = specs.iter().take(index).flatten();
            if let Some(other) = before.find(|other| other.covers(spec)) {
                let message = format!(
                    "no flow takes the arm '{}': the arm '{}' before it takes all of its flows",
                    spec.name, other.name
                );
                self.error(arms.items()[index].span(), message, "put it first, or take it out");
            }
        }
    }

    fn arm(&mut self, arm: &At<Arm>) -> Option<ArmSpec> {
        let Some(name) = &arm.name else {
            self.error(arm.span(), "this arm lacks a name", "write `name = \"web\"`: drawings show it");
            return None;
        };
        self.name(name);
        let matcher = arm.matcher.as_ref().map_or_else(Match::default, |matcher| {
            self.no_stray_conditions(matcher);
            self.matcher(matcher, &[])
        });
        let prefixes = self.prefixes(arm.prefix.as_ref());
        let Some(chain) = &arm.chain else {
            let help = "name its functions, or write `chain = []` to lead flows straight on";
            self.error(arm.span(), format!("the arm '{}' lacks its `chain`", name.as_str()), help);
            return None;
        };
        if chain.items().len() > CHAIN_MAX {
            let message = format!("a chain of {} functions", chain.items().len());
            self.error(chain.span(), message, format!("name at most {CHAIN_MAX} functions"));
        }
        let functions: Vec<_> = chain.items().iter().map(|name| self.function_named(name)).collect();
        let functions = functions.into_iter().collect::<Option<Vec<_>>>()?;
        if let Some(container) = functions.iter().find(|function| function.kind.is_container()) {
            let message =
                format!("the function '{}' is a container, which cannot be in an arm", container.name);
            let help = "name it in the `chain` of a rule: bytes pass containers over sockets";
            self.error(chain.span(), message, help);
            return None;
        }
        Some(ArmSpec { name: name.as_str().into(), matcher, prefixes, functions })
    }

    fn prefixes(&mut self, prefix: Option<&List<String>>) -> Vec<Box<[u8]>> {
        let Some(list) = prefix else { return Vec::new() };
        self.not_empty(list);
        for text in list.items().iter().filter(|text| !(1..=PREFIX_MAX).contains(&text.len())) {
            let message = format!("a prefix of {} bytes", text.len());
            self.error(text.span(), message, format!("give 1 to {PREFIX_MAX} bytes"));
        }
        list.items().iter().map(|text| text.as_bytes().into()).collect()
    }

    /// Refuses conditions that a branch cannot check: it sees the flow and its first bytes.
    fn no_stray_conditions(&mut self, matcher: &raw::Match) {
        let stray = [
            ("url", matcher.url.as_ref().map(List::span)),
            ("listener", matcher.listener.as_ref().map(List::span)),
            ("protocol", matcher.protocol.as_ref().map(At::span)),
            ("process", matcher.process.as_ref().map(List::span)),
            ("user", matcher.user.as_ref().map(List::span)),
        ];
        for (key, span) in stray {
            if let Some(span) = span {
                let help = "use `from`, `to`, `port`, `host`, `host_file`, `host_contains`, `intercept` or `socks_user`, or \
                            two rules with different chains";
                self.error(span, format!("an arm has no condition `{key}`"), help);
            }
        }
    }
}

/// Returns the unread branches that the arms of a branch name.
fn waits_for<'f>(name: &str, left: &Written<'f>) -> BTreeSet<&'f str> {
    let arms = left.get(name).and_then(|function| function.arms.as_ref());
    let chains = arms.into_iter().flat_map(|arms| arms.items()).filter_map(|arm| arm.chain.as_ref());
    let names = chains.flat_map(|chain| chain.items().iter());
    names.filter_map(|name| left.get_key_value(name.as_str()).map(|(name, _)| *name)).collect()
}

/// Returns the number of functions in the arms of a branch, with those of branches in them.
fn size(branch: &BranchSpec) -> usize {
    let of = |function: &Arc<FunctionSpec>| match &function.kind {
        FunctionKind::Branch(inner) => size(inner).saturating_add(1),
        _ => 1,
    };
    branch.arms.iter().flat_map(|arm| &arm.functions).map(of).fold(0, usize::saturating_add)
}
