//! The rules that keep opening segments in a queue until user space knows what the far side says.

use super::except;
use super::path::KernelPath;
use super::selector::{Origin, Selector, Versions};
use super::steering::{Steering, path_name};
use crate::nft::{Chain, ChainKind, Field, Hook, Rule, Set, Statement, TCP, Verdict, priority};
use sidetrack_core::flow::Protocol;

/// Right before the chains that mark and redirect: conntrack knows the connection, and its destination is the original one.
const BEFORE_STEERING: i32 = priority::MANGLE - 1;

/// The queue of one listener's opening segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldQueue {
    /// Its number.
    pub number: u16,
    /// Whether segments pass while no process reads the queue; otherwise they are dropped.
    pub bypass: bool,
}

impl HoldQueue {
    /// The end of a rule that has matched TCP.
    pub(super) fn end(self) -> [Statement; 2] {
        [Statement::opens_connection(), Statement::Queue { number: self.number, bypass: self.bypass }]
    }

    /// The chain that holds all connections of this host's processes which `among` selects.
    pub fn output_chain(self, among: impl IntoIterator<Item = Statement>) -> Chain {
        let all = among.into_iter().chain([Statement::is(Field::L4Proto, TCP)]).chain(self.end());
        chain(Origin::Local).with(Rule::new(all))
    }
}

/// An empty chain for connections of this origin.
pub(super) fn chain(origin: Origin) -> Chain {
    let (name, hook) = match origin {
        Origin::Local => ("hold_output", Hook::Output),
        Origin::Forwarded => ("hold_prerouting", Hook::Prerouting),
    };
    Chain::base(name, ChainKind::Filter, hook, BEFORE_STEERING)
}

impl Steering {
    /// The chains that hold connections; none if no listener asks for it.
    pub(super) fn hold_chains(&self, sets: &mut Vec<Set>) -> Vec<Chain> {
        [Origin::Local, Origin::Forwarded]
            .into_iter()
            .filter_map(|origin| self.hold_chain(origin, sets))
            .collect()
    }

    /// In the order of the chains that steer: what they leave alone is not held, what they take first is held for that one.
    fn hold_chain(&self, origin: Origin, sets: &mut Vec<Set>) -> Option<Chain> {
        let is_held = self.redirects.iter().any(|one| one.hold.is_some())
            || self.tproxies.iter().any(|one| one.hold.is_some());
        if !is_held {
            return None;
        }
        let mut held = Vec::new();
        for (index, tproxy) in self.tproxies.iter().enumerate() {
            if tproxy.protocol == Protocol::Tcp && origin == Origin::Forwarded {
                let name = format!("tproxy{}_", index + 1);
                let versions = Versions { v4: tproxy.v4, v6: tproxy.v6 };
                held.extend(rules(tproxy.hold, &tproxy.selectors, &name, (origin, versions), sets));
            }
        }
        for (index, redirect) in self.redirects.iter().enumerate() {
            let (selectors, word) = match origin {
                Origin::Local => (&redirect.local, "local"),
                Origin::Forwarded => (&redirect.forwarded, "forwarded"),
            };
            let name = format!("redirect{}_{word}", index + 1);
            let versions = Versions { v4: redirect.v4, v6: redirect.v6 };
            held.extend(rules(redirect.hold, selectors, &name, (origin, versions), sets));
        }
        if held.iter().all(|(queue, _)| queue.is_none()) {
            return None;
        }
        let mut chain =
            chain(origin).with(Rule::new([Statement::Verdict(Verdict::Jump(except::CHAIN.into()))]));
        let paths = self.kernel_paths.iter().enumerate().filter(|(_, path)| path.protocol == Protocol::Tcp);
        for (index, path) in paths {
            chain.rules.extend(KernelPath::pass_rules(path, &path_name(index), origin, sets));
        }
        chain.rules.extend(held.into_iter().map(|(_, rule)| rule));
        Some(chain)
    }
}

/// The rules of one listener: its connections are held, or pass on to the chains that steer.
fn rules(
    queue: Option<HoldQueue>,
    selectors: &[Selector],
    name: &str,
    way: (Origin, Versions),
    sets: &mut Vec<Set>,
) -> Vec<(Option<HoldQueue>, Rule)> {
    let mut rules = Vec::new();
    for (place, selector) in (1..).zip(selectors) {
        for matches in selector.matches(&format!("{name}{place}"), way.0, way.1, sets) {
            let end = queue.map_or_else(
                || vec![Statement::opens_connection(), Statement::Verdict(Verdict::Accept)],
                |queue| queue.end().to_vec(),
            );
            let tcp = Statement::is(Field::L4Proto, TCP);
            rules.push((queue, Rule::new([tcp].into_iter().chain(matches).chain(end))));
        }
    }
    rules
}
