//! Decides about flows.

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
    /// They were read, or the wait for them timed out. Contains the host name in them, if any.
    FirstBytes(Option<&'a HostName>),
    /// A request was read.
    Request {
        /// The host of the request, if it has a name.
        host: Option<&'a HostName>,
        /// The URL of the request.
        url: &'a Url,
    },
}

/// The answer of [`Policy::decide`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Decide again with [`Seen::FirstBytes`] after waiting for the first bytes, for at most `wait_ms`.
    NeedFirstBytes {
        /// The rule that needs them.
        rule: Arc<str>,
        /// The longest wait, ms.
        wait_ms: u64,
    },
    /// Decide again after `flow.process` was set. Set it to `Process::default()` if the process cannot be found.
    NeedProcess {
        /// The rule that needs it.
        rule: Arc<str>,
    },
    /// The verdict.
    Verdict(Verdict),
}

/// The decision of policy about a flow, with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The rule that decided. `None` if the default did.
    pub rule: Option<Arc<str>>,
    /// Its index in the policy, from 0.
    pub index: Option<usize>,
    /// What happens to the flow.
    pub action: Action,
    /// The reason in words: `rule 'x'`, or `no rule matched; default deny`.
    pub why: Arc<str>,
    /// The answer of the data-flow agreement in words. `None` if the rule does not ask it, or if it was not asked
    /// yet.
    pub agreement: Option<Arc<str>>,
}

/// The outcome of one rule in a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceLine {
    /// The name of the rule.
    pub rule: Arc<str>,
    /// Its index in the policy, from 0.
    pub index: usize,
    /// The outcome.
    pub outcome: TraceOutcome,
}

/// The outcome of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceOutcome {
    /// All its conditions hold, so it decides.
    Matched,
    /// This condition does not hold.
    Failed {
        /// The condition's key and value, as in `to 10.0.0.0/8`.
        condition: String,
    },
    /// All other conditions hold, but the host name must be looked for in the first bytes. The flow would wait for
    /// them.
    NeedsFirstBytes,
    /// All other conditions hold, but the process must be looked up.
    NeedsProcess,
    /// An earlier rule decided, or has to wait.
    NotReached,
}

impl Verdict {
    /// Whether the data-flow agreement must be asked before this verdict is final.
    pub fn asks_agreement(&self) -> bool {
        matches!(&self.action, Action::Carry(carry) if carry.agreement.is_some())
    }

    /// Returns the action and its reason in one line, such as `carried direct (rule 'x')`.
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

/// A decision that was simulated without traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The verdict.
    pub verdict: Verdict,
    /// The outcome of each rule.
    pub trace: Vec<TraceLine>,
    /// The rule for which the flow would wait for its first bytes, and the longest wait, ms.
    pub waits: Option<(Arc<str>, u64)>,
}

impl Policy {
    /// Simulates the decision. If a rule needs the first bytes, they contain `host`. If a rule needs the process, it
    /// is the one in `flow`, or unknown.
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

    /// Decides about a flow. Allocates no memory.
    ///
    /// A rule needs the first bytes, or the process, only if all its other conditions hold.
    pub fn decide(&self, flow: &Flow, seen: Seen<'_>) -> Decision {
        self.first_match(flow, seen).map_or_else(|need| need, Decision::Verdict)
    }

    /// Returns the verdict, or what is needed for one.
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
                    let is_hidden = flow.process.as_ref().is_some_and(|process| process.is_hidden);
                    let hidden = self.hidden_whys.get(index).and_then(Option::as_ref).filter(|_| is_hidden);
                    return Ok(Verdict {
                        rule: Some(rule.name.clone()),
                        index: Some(index),
                        action: rule.action.clone(),
                        why: hidden.or(self.whys.get(index)).unwrap_or(&rule.name).clone(),
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

    /// Returns the outcome of every rule, for `explain`.
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
