//! From a flow to a verdict.

use super::condition::Truth;
use super::{Action, Policy, Url};
use crate::flow::{Flow, HostName, Process};
use std::fmt;
use std::sync::Arc;

/// What is known of the client's first bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seen<'a> {
    /// They were not read yet.
    #[default]
    Nothing,
    /// They were read, or the wait for them ended; with the host name they hold, if any.
    FirstBytes(Option<&'a HostName>),
    /// A request was read.
    Request {
        /// The host it is for, if that has a name.
        host: Option<&'a HostName>,
        /// What it asks for.
        url: &'a Url,
    },
}

/// The answer of [`Policy::decide`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Decide again with [`Seen::FirstBytes`], after waiting for them for at most so long.
    NeedFirstBytes {
        /// The rule that asks.
        rule: Arc<str>,
        /// Longest wait, milliseconds.
        wait_ms: u64,
    },
    /// Decide again with `flow.process` filled; with `Process::default()` if there is none to be found.
    NeedProcess {
        /// The rule that asks.
        rule: Arc<str>,
    },
    /// The verdict.
    Verdict(Verdict),
}

/// What policy says about a flow, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The rule that decided; none if the default did.
    pub rule: Option<Arc<str>>,
    /// Its place in the policy, from 0.
    pub index: Option<usize>,
    /// What happens to the flow.
    pub action: Action,
    /// The reason in words: `rule 'x'`, or `no rule matched; default deny`.
    pub why: Arc<str>,
    /// What the data-flow agreement said, in words; none if the rule does not ask it, or it was not asked yet.
    pub agreement: Option<Arc<str>>,
}

/// One rule's part in a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceLine {
    /// The rule's name.
    pub rule: Arc<str>,
    /// Its place in the policy, from 0.
    pub index: usize,
    /// What became of it.
    pub outcome: TraceOutcome,
}

/// What became of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceOutcome {
    /// All its conditions hold: it decides.
    Matched,
    /// This condition does not hold.
    Failed {
        /// The condition's key and value, as in `to 10.0.0.0/8`.
        condition: String,
    },
    /// All else holds, but the host name has to be looked for in the first bytes: it would be waited for.
    NeedsFirstBytes,
    /// All else holds, but the process has to be looked up.
    NeedsProcess,
    /// An earlier rule decided, or has to wait.
    NotReached,
}

impl Verdict {
    /// Whether the data-flow agreement has to be asked before this is final.
    pub fn asks_agreement(&self) -> bool {
        matches!(&self.action, Action::Carry(carry) if carry.agreement.is_some())
    }

    /// What happens and why, in one line: `carried direct (rule 'x')`.
    pub fn summary(&self) -> String {
        match &self.action {
            Action::Deny => format!("denied ({})", self.why),
            Action::Carry(carry) => {
                let names: Vec<_> =
                    carry.chain.iter().flat_map(|chain| chain.names()).map(|name| &**name).collect();
                let chain =
                    if names.is_empty() { String::new() } else { format!(" through {}", names.join(" -> ")) };
                let to = carry.to.as_ref().map(|to| format!(" to {to}")).unwrap_or_default();
                let asked = carry.agreement.as_ref().filter(|_| self.agreement.is_none());
                let asked =
                    asked.map(|clause| format!(", if the agreement allows it: {clause}")).unwrap_or_default();
                format!("carried {}{to}{chain} ({}){asked}", carry.carrier, self.why)
            }
        }
    }
}

impl fmt::Display for TraceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}. '{}': ", self.index + 1, self.rule)?;
        match &self.outcome {
            TraceOutcome::Matched => f.write_str("matches"),
            TraceOutcome::Failed { condition } => write!(f, "no: not {condition}"),
            TraceOutcome::NeedsFirstBytes => f.write_str("has to see the first bytes"),
            TraceOutcome::NeedsProcess => f.write_str("has to know the process"),
            TraceOutcome::NotReached => f.write_str("not reached"),
        }
    }
}

/// A decision played through without any traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The verdict.
    pub verdict: Verdict,
    /// Each rule's part in it.
    pub trace: Vec<TraceLine>,
    /// The rule for which the flow would be held until its first bytes are there, and for how long at most,
    /// milliseconds.
    pub waits: Option<(Arc<str>, u64)>,
}

impl Policy {
    /// Plays the decision through: first bytes that are asked for hold `host`, a process that is asked for is the
    /// one in `flow`, or none.
    pub fn explain(&self, flow: &Flow, host: Option<&HostName>) -> Explanation {
        let mut flow = flow.clone();
        flow.process.get_or_insert_with(Process::default);
        let mut seen = Seen::Nothing;
        let mut waits = None;
        let verdict = match self.decide(&flow, seen) {
            Decision::NeedFirstBytes { rule, wait_ms } => {
                waits = Some((rule, wait_ms));
                seen = Seen::FirstBytes(host);
                self.first_match(&flow, seen).unwrap_or_else(|_| self.default_verdict())
            }
            Decision::Verdict(verdict) => verdict,
            Decision::NeedProcess { .. } => self.default_verdict(),
        };
        Explanation { verdict, trace: self.trace(&flow, seen), waits }
    }

    /// Decides about a flow. Allocates nothing.
    ///
    /// A rule asks for first bytes, or for the process, only when all its other conditions hold.
    pub fn decide(&self, flow: &Flow, seen: Seen<'_>) -> Decision {
        self.first_match(flow, seen).map_or_else(|need| need, Decision::Verdict)
    }

    /// The verdict, or what is needed for one.
    fn first_match(&self, flow: &Flow, seen: Seen<'_>) -> Result<Verdict, Decision> {
        for (index, rule) in self.rules.iter().enumerate() {
            match rule.obstacle(flow, seen).map(|(_, truth)| truth) {
                Some(Truth::Fails) => {}
                Some(Truth::NeedsProcess) => return Err(Decision::NeedProcess { rule: rule.name.clone() }),
                Some(Truth::NeedsFirstBytes) => {
                    let wait_ms = self.first_bytes_ms;
                    return Err(Decision::NeedFirstBytes { rule: rule.name.clone(), wait_ms });
                }
                None | Some(Truth::Holds) => {
                    return Ok(Verdict {
                        rule: Some(rule.name.clone()),
                        index: Some(index),
                        action: rule.action.clone(),
                        why: self.whys.get(index).unwrap_or(&rule.name).clone(),
                        agreement: None,
                    });
                }
            }
        }
        Ok(self.default_verdict())
    }

    fn default_verdict(&self) -> Verdict {
        let (action, why) = (self.default.clone(), self.default_why.clone());
        Verdict { rule: None, index: None, action, why, agreement: None }
    }

    /// What became of every rule, for `explain`.
    pub fn trace(&self, flow: &Flow, seen: Seen<'_>) -> Vec<TraceLine> {
        let mut decided = false;
        let line = |(index, rule): (usize, &super::Rule)| {
            let outcome = if decided {
                TraceOutcome::NotReached
            } else {
                match rule.obstacle(flow, seen) {
                    Some((condition, Truth::Fails)) => {
                        TraceOutcome::Failed { condition: condition.to_string() }
                    }
                    Some((_, Truth::NeedsProcess)) => TraceOutcome::NeedsProcess,
                    Some((_, Truth::NeedsFirstBytes)) => TraceOutcome::NeedsFirstBytes,
                    None | Some((_, Truth::Holds)) => TraceOutcome::Matched,
                }
            };
            decided |= !matches!(outcome, TraceOutcome::Failed { .. });
            TraceLine { rule: rule.name.clone(), index, outcome }
        };
        self.rules.iter().enumerate().map(line).collect()
    }
}
