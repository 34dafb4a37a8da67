//! Finds rules that are never reached, in files with tens of thousands of rules. A rule is compared only with
//! earlier rules that share a value with it.

use sidetrack_core::net::IpNet;
use sidetrack_core::policy::{Condition, HostPattern, Rule};
use std::collections::HashMap;

/// Most earlier rules that one rule is compared with. Beyond this number, a rule that is never reached may go
/// unreported.
pub(super) const COMPARED_MAX: usize = 256;

/// Finds rules that an earlier rule covers, in order. Yields the position of the rule and of the first rule
/// found to cover it.
pub(super) fn covered(rules: &[Option<Rule>]) -> impl Iterator<Item = (usize, usize)> {
    let mut earlier = Earlier::default();
    rules.iter().enumerate().filter_map(move |(index, rule)| {
        let rule = rule.as_ref()?;
        let found = earlier.covering(rule, rules);
        earlier.add(index, rule);
        found.map(|before| (index, before))
    })
}

/// Earlier rules, indexed by the values of one of their conditions. A rule covers another only if each of its
/// conditions covers a condition of the other. Then one of its values is found through the first value of the
/// other's condition.
#[derive(Default)]
struct Earlier {
    by_value: HashMap<String, Vec<usize>>,
    /// Rules without an indexed value.
    others: Vec<usize>,
    /// How many times two rules were compared.
    compared: usize,
}

impl Earlier {
    fn add(&mut self, index: usize, rule: &Rule) {
        // Take the condition whose values have the fewest rules so far: a value that all rules share selects
        // nothing.
        let conditions = rule.matcher.conditions().iter().map(values).filter(|values| !values.is_empty());
        let weight = |values: &Vec<String>| -> usize {
            values.iter().map(|value| self.by_value.get(value).map_or(0, Vec::len)).sum()
        };
        match conditions.min_by_key(weight) {
            Some(values) => {
                values.into_iter().for_each(|value| self.by_value.entry(value).or_default().push(index))
            }
            None => self.others.push(index),
        }
    }

    fn covering(&mut self, rule: &Rule, rules: &[Option<Rule>]) -> Option<usize> {
        let looked_for = rule.matcher.conditions().iter().flat_map(looked_for);
        let mut candidates: Vec<usize> = looked_for
            .filter_map(|value| self.by_value.get(&value))
            .chain([&self.others])
            .flat_map(|found| found.iter().copied().take(COMPARED_MAX))
            .collect();
        candidates.sort_unstable();
        candidates.dedup();
        candidates.truncate(COMPARED_MAX);
        candidates.into_iter().find(|before| {
            self.compared += 1;
            // Two rules with one name are reported elsewhere.
            let other = rules.get(*before).and_then(Option::as_ref).filter(|other| other.name != rule.name);
            other.is_some_and(|other| other.matcher.covers(&rule.matcher))
        })
    }
}

/// The values under which a condition is indexed. Empty if its kind is not indexed.
fn values(condition: &Condition) -> Vec<String> {
    let key = condition.key();
    match condition {
        Condition::Host(patterns) => {
            patterns.iter().map(|pattern| format!("{key} {}", text(pattern))).collect()
        }
        Condition::From(set) | Condition::To(set) => {
            set.nets().iter().map(|net| format!("{key} {net}")).collect()
        }
        _ => exact(condition),
    }
}

/// The values under which conditions that cover this one are indexed. Uses the first value of this condition.
fn looked_for(condition: &Condition) -> Vec<String> {
    let key = condition.key();
    match condition {
        Condition::Host(patterns) => {
            let Some(first) = patterns.first().map(text) else { return Vec::new() };
            let below = first.match_indices('.').filter_map(|(at, _)| first.get(at..));
            let all = below.map(str::to_owned).chain([first.clone(), "*".to_owned()]);
            all.map(|value| format!("{key} {value}")).collect()
        }
        Condition::From(set) | Condition::To(set) => {
            let Some(first) = set.nets().first() else { return Vec::new() };
            let wider = (0..=first.prefix_len()).map(|len| IpNet::new(first.address(), len));
            wider.map(|net| format!("{key} {net}")).collect()
        }
        _ => exact(condition).into_iter().take(1).collect(),
    }
}

fn exact(condition: &Condition) -> Vec<String> {
    let key = condition.key();
    let words = |words: &[Box<str>]| words.iter().map(|word| format!("{key} {word}")).collect();
    match condition {
        Condition::Listener(names) => names.iter().map(|name| format!("{key} {name}")).collect(),
        Condition::Intercept(kinds) => kinds.iter().map(|kind| format!("{key} {}", kind.as_str())).collect(),
        Condition::Protocol(protocol) => vec![format!("{key} {}", protocol.as_str())],
        Condition::SocksUser(list) | Condition::Process(list) => words(list),
        Condition::Uid(uids) => uids.iter().map(|uid| format!("{key} {uid}")).collect(),
        Condition::HostFile(files) => files.iter().map(|file| format!("{key} {}", file.path)).collect(),
        _ => Vec::new(),
    }
}

/// A name, `.name` for all names below it, or `*` for all names.
fn text(pattern: &HostPattern) -> String {
    match pattern {
        HostPattern::Exact(name) => name.as_str().to_owned(),
        HostPattern::Below(name) => name.to_string(),
        HostPattern::Any => "*".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::policy::{Action, Match};

    fn rules(count: usize, conditions: impl Fn(usize) -> Vec<Condition>) -> Vec<Option<Rule>> {
        let rule = |index| Rule {
            name: format!("r{index}").into(),
            matcher: Match::new(conditions(index)),
            action: Action::Deny,
        };
        (0..count).map(|index| Some(rule(index))).collect()
    }

    fn compared(rules: &[Option<Rule>]) -> usize {
        let mut earlier = Earlier::default();
        for (index, rule) in rules.iter().enumerate() {
            earlier.covering(rule.as_ref().unwrap(), rules);
            earlier.add(index, rule.as_ref().unwrap());
        }
        earlier.compared
    }

    fn host(text: String) -> Condition {
        Condition::Host(vec![text.parse().unwrap()])
    }

    fn net(index: usize) -> Condition {
        Condition::To(
            [format!("10.{}.{}.0/24", index / 256, index % 256).parse().unwrap()].into_iter().collect(),
        )
    }

    #[test]
    fn twice_the_rules_are_at_most_twice_the_work() {
        type Made = fn(usize) -> Vec<Condition>;
        let kinds: [Made; 4] = [
            |index| vec![host(format!("h{index}.example"))],
            |index| vec![net(index)],
            |index| vec![host(format!("*.h{index}.example")), Condition::Listener(vec!["lan".into()])],
            |_| vec![host("one.example".to_owned()), Condition::Port([(1, 2)].into_iter().collect())],
        ];
        for (kind, conditions) in kinds.into_iter().enumerate() {
            let (few, many) = (compared(&rules(2000, conditions)), compared(&rules(4000, conditions)));
            assert!(many <= 2 * few + COMPARED_MAX * COMPARED_MAX, "{kind}: {few} {many}");
            assert!(many <= 4000 * COMPARED_MAX, "{kind}: {many}");
        }
    }

    #[test]
    fn what_the_slow_way_finds_is_found() {
        let conditions = |index: usize| match index % 7 {
            0 => vec![host(format!("*.a{}.example", index % 5))],
            1 => vec![host(format!("b.a{}.example", index % 6)), Condition::Uid(vec![1])],
            2 => vec![Condition::To(["10.0.0.0/16".parse().unwrap()].into_iter().collect())],
            3 => vec![net(index), Condition::Listener(vec!["lan".into()])],
            4 => vec![Condition::Port([(1, 100)].into_iter().collect()), net(index)],
            5 => vec![Condition::Process(vec!["curl".into(), "wget".into()])],
            _ => vec![Condition::Process(vec!["wget".into()]), host(format!("x{index}.example"))],
        };
        let rules = rules(120, conditions);
        let slow = |(index, rule): (usize, &Option<Rule>)| {
            let rule = rule.as_ref().unwrap();
            let covers = |other: &Option<Rule>| other.as_ref().unwrap().matcher.covers(&rule.matcher);
            rules.iter().take(index).position(covers).map(|before| (index, before))
        };
        let expected: Vec<_> = rules.iter().enumerate().filter_map(slow).collect();
        assert!(expected.len() > 20);
        assert_eq!(covered(&rules).collect::<Vec<_>>(), expected);
    }
}
