//! Maps the number in a connection mark to the rule that the connection belongs to.

use crate::config::Config;
use crate::steer::{Path, Steer};
use sidetrack_core::policy::Verdict;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Most stored paths. Connections outlive reloads, and their records name the rule under which they began.
const PATHS_KEPT: usize = 4096;

/// The paths of this configuration and of earlier ones, by number.
#[derive(Default)]
pub(crate) struct Paths {
    known: BTreeMap<usize, Known>,
    next: usize,
}

struct Known {
    path: Path,
    verdict: Verdict,
    /// Connections that began earlier belong to an earlier process, which used other numbers.
    since_ns: u64,
}

impl Paths {
    /// The number of the next configuration's first path.
    pub(crate) const fn next(&self) -> usize {
        self.next
    }

    /// Adds the paths of a configuration that came into force at `since` or later.
    pub(crate) fn learn(&mut self, steer: &Steer, config: &Config, since: SystemTime) {
        let since_ns = since.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let since_ns = u64::try_from(since_ns).unwrap_or(u64::MAX);
        for (number, path) in steer.numbered_paths() {
            let verdict = verdict(path, config);
            self.known.insert(number, Known { path: path.clone(), verdict, since_ns });
        }
        self.next = steer.first_path + steer.paths.len();
        while self.known.len() > PATHS_KEPT.max(steer.paths.len()) {
            // Numbers are used as a ring, so the oldest one follows the newest.
            let newest = steer.numbered_paths().last().map_or(0, |(number, _)| number);
            let after = self.known.range(newest + 1..).next().map(|(number, _)| *number);
            let Some(oldest) = after.or_else(|| self.known.keys().next().copied()) else { break };
            self.known.remove(&oldest);
        }
    }

    /// Returns the path and verdict of a connection with this mark and start time.
    pub(crate) fn of(&self, mark: u32, start_ns: Option<u64>) -> Option<(&Path, &Verdict)> {
        let known = self.known.get(&Path::number_in(mark)?)?;
        let ours = start_ns.is_none_or(|start| start >= known.since_ns);
        ours.then_some((&known.path, &known.verdict))
    }
}

fn verdict(path: &Path, config: &Config) -> Verdict {
    let rule = path.index.and_then(|index| config.policy.rules().get(index));
    let name = path.rule.as_ref();
    Verdict {
        rule: path.rule.clone(),
        index: path.index,
        action: rule.map_or_else(|| config.policy.default_action().clone(), |rule| rule.action.clone()),
        why: name.map_or_else(|| "default".into(), |rule| format!("rule '{rule}'").into()),
        agreement: None,
    }
}
