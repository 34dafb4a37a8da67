//! Flows that are blocked: they stay so, and make room for others only where the packet filter drops them.

use super::Shunt;
use crate::shunt::{Cause, Flow, Output, ShuntAction, Standing, Tuple, Want};
use crate::time::Instant;

impl Shunt {
    /// The number that makes the packet filter drop a flow which our own rules deny; none if its mark has it already.
    pub(super) fn number_to_block(&self, flow: &Flow) -> Option<u8> {
        let left_to_rules = flow.mark.action().is_some_and(|number| self.config.actions.asks_rules(number));
        let denied = flow.pinned.is_none() && flow.wish.is_some_and(|wish| wish.want == Want::Block);
        let here = !self.stopping && self.ports(flow).is_some() && flow.standing != Standing::Asking;
        self.config.actions.number(ShuntAction::Block).filter(|_| left_to_rules && denied && here)
    }

    /// Takes the entry of the blocked flow that has been silent for longest, if that is long enough. The packet filter goes on
    /// dropping what has its mark.
    pub(super) fn make_room(&mut self, now: Instant) {
        let silent = |flow: &&Flow| {
            flow.standing == Standing::Installed
                && flow.action == ShuntAction::Block
                && now - flow.moved >= self.config.block_idle
        };
        let longest = self.flows.values().filter(silent).min_by_key(|flow| flow.moved).map(|flow| flow.tuple);
        if let Some(tuple) = longest {
            self.remove(&tuple, Cause::Evicted);
        }
    }

    /// Keeps conntrack from forgetting a connection whose packets it does not see.
    pub(super) fn keep(&mut self, now: Instant, tuple: &Tuple) {
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        flow.kept = now;
        self.outputs.push_back(match flow.action {
            ShuntAction::Block => Output::KeepBlocked(flow.tuple, flow.identity),
            ShuntAction::Shunt | ShuntAction::Ignore => Output::Keep(flow.tuple, flow.identity),
        });
    }
}
