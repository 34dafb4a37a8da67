//! What our own rules say of a flow whose mark leaves the decision to them.

use super::{Flow, Obstacle, ShuntAction, Tuple};
use crate::flow::{self, Destination, Intercept, Process};
use crate::policy::{Action, Decision, FastPathKind, Policy, Seen};
use crate::time::Instant;
use std::time::Duration;

/// What the rules want. They decide once for a connection, by its addresses and ports, and by its process if a rule
/// needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    rule: Option<u32>,
    /// The decision.
    pub want: Want,
}

/// The decision of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The flow stays on the slow path.
    Leave,
    /// The flow takes the fast path, once this traffic has passed.
    Shunt {
        /// Bytes of IP packets, both directions together.
        bytes: u64,
        /// Milliseconds since the flow was first seen.
        ms: u64,
        /// The fast path. `None`: the first one of the configuration.
        path: Option<FastPathKind>,
    },
    /// The flow is dropped on the fast path.
    Block,
}

impl Wish {
    /// Returns the decision of the first matching rule, or of the default. `action = "deny"` blocks, `shunt` shunts,
    /// and any other rule leaves the flow on the slow path. `None` if a rule needs the process and `process` is
    /// `None`. Pass [`Process::default`] if the process is unknown.
    pub fn of(policy: &Policy, tuple: &Tuple, process: Option<&Process>) -> Option<Self> {
        let server = tuple.server();
        let flow = flow::Flow {
            protocol: tuple.transport,
            intercept: Intercept::Kernel,
            listener: "".into(),
            client: tuple.client(),
            orig_dst: Destination { host: server.ip().into(), port: server.port(), zone: 0 },
            host: None,
            process: process.cloned(),
            // The user is unknown for forwarded packets, and no rule waits for it.
            user: None,
        };
        let verdict = match policy.decide(&flow, Seen::FirstBytes(None)) {
            Decision::Verdict(verdict) => verdict,
            Decision::NeedProcess { .. } => return None,
            Decision::NeedFirstBytes { .. } => return Some(Self { rule: None, want: Want::Leave }),
        };
        let want = match &verdict.action {
            Action::Deny => Want::Block,
            Action::Carry(carry) => carry.shunt.map_or(Want::Leave, |after| Want::Shunt {
                bytes: after.bytes,
                ms: after.ms,
                path: after.fast_path,
            }),
        };
        Some(Self { rule: verdict.index.and_then(|index| index.try_into().ok()), want })
    }

    /// Returns the index of the rule in the policy, from 0. `None` if the default decided.
    pub fn rule(self) -> Option<usize> {
        self.rule?.try_into().ok()
    }

    /// Returns the fast path that its rule names, if any.
    pub(super) const fn path(self) -> Option<FastPathKind> {
        match self.want {
            Want::Shunt { path, .. } => path,
            Want::Leave | Want::Block => None,
        }
    }

    /// Returns the action for the flow now, or why it has to wait.
    pub(super) fn action(self, ripe: bool) -> Result<ShuntAction, Obstacle> {
        match self.want {
            Want::Leave => Ok(ShuntAction::Ignore),
            Want::Block => Ok(ShuntAction::Block),
            Want::Shunt { .. } if ripe => Ok(ShuntAction::Shunt),
            Want::Shunt { .. } => Err(Obstacle::TooEarly),
        }
    }
}

impl Flow {
    /// Notes whether the bytes and the time that its rule waits for have passed. Once is enough.
    pub(super) fn ripen(&mut self, now: Instant) {
        if let Some(Wish { want: Want::Shunt { bytes, ms, .. }, .. }) = self.wish {
            let passed = self.slow();
            let passed = passed.to_server.bytes + passed.to_client.bytes;
            self.ripe |= passed >= bytes && now - self.seen >= Duration::from_millis(ms);
        }
    }

    /// Whether its rule still waits for bytes or time.
    pub(super) const fn is_unripe(&self) -> bool {
        matches!(self.wish, Some(Wish { want: Want::Shunt { .. }, .. })) && !self.ripe
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Carry, Condition, Match, Rule, ShuntAfter};
    use crate::shunt::Transport;
    use std::sync::Arc;

    fn rule(name: &str, ports: (u16, u16), action: Action) -> Rule {
        let matcher = Match::new(vec![Condition::Port([ports].into_iter().collect())]);
        Rule { name: name.into(), matcher, action }
    }

    #[test]
    fn the_process_is_asked_for_where_all_else_of_a_rule_holds() {
        let port = Condition::Port([(22, 22)].into_iter().collect());
        let matcher = Match::new(vec![port, Condition::Process(vec!["rsync".into()])]);
        let carry =
            Carry { shunt: Some(ShuntAfter { bytes: 0, ms: 0, fast_path: None }), ..Carry::default() };
        let action = Action::Carry(Arc::new(carry));
        let policy = Policy::new(vec![Rule { name: "r".into(), matcher, action }], Action::default());
        let wish = |port: u16, process: Option<&Process>| {
            let (client, server) = (([192, 0, 2, 1], 4000).into(), ([192, 0, 2, 1], port).into());
            Wish::of(&policy, &Tuple::new(client, server, Transport::Tcp, 0), process)
        };
        let rsync = Process { name: Some("rsync".into()), ..Process::default() };
        assert_eq!(wish(22, None), None);
        assert_eq!(wish(22, Some(&rsync)).map(|wish| wish.rule), Some(Some(0)));
        let left = Some(Wish { rule: None, want: Want::Leave });
        assert_eq!(wish(22, Some(&Process::default())), left, "nobody knows it");
        assert_eq!(wish(23, None), left, "nobody asks");
    }

    #[test]
    fn the_first_rule_that_matches_decides_and_else_the_default() {
        let after = ShuntAfter { bytes: 1000, ms: 2000, fast_path: Some(FastPathKind::Xdp) };
        let shunt = Action::Carry(Arc::new(Carry { shunt: Some(after), ..Carry::default() }));
        let policy = Policy::new(
            vec![
                rule("no", (23, 23), Action::Deny),
                rule("bulk", (20, 30), shunt),
                rule("web", (80, 80), Action::default()),
            ],
            Action::Deny,
        );
        let wish = |port: u16| {
            let address = |port| std::net::SocketAddr::from(([192, 0, 2, 1], port));
            let (client, server) = (address(4000), address(port));
            let tuple = Tuple::new(client, server, Transport::Tcp, 0);
            Wish::of(&policy, &tuple, None).expect("no rule asks for the process")
        };
        assert_eq!(wish(23), Wish { rule: Some(0), want: Want::Block });
        let want = Want::Shunt { bytes: 1000, ms: 2000, path: Some(FastPathKind::Xdp) };
        assert_eq!(wish(22), Wish { rule: Some(1), want });
        assert_eq!(wish(80), Wish { rule: Some(2), want: Want::Leave });
        assert_eq!(wish(81), Wish { rule: None, want: Want::Block });
    }
}
