//! Blocked flows: they stay blocked, and make room for others only if the packet filter drops their packets.

use super::Shunt;
use crate::shunt::{Cause, Flow, Output, ShuntAction, Standing, Tuple, Want};
use crate::time::Instant;
use std::time::Duration;

/// The time between two searches for a blocked flow that can make room: each goes through all flows.
const ROOM: Duration = Duration::from_millis(100);

impl Shunt {
    /// Returns the number to set in the mark of a flow that our own rules deny, so that the packet filter drops it.
    /// `None` if our rules do not deny the flow, or if no number means block.
    pub(super) fn number_to_block(&self, flow: &Flow) -> Option<u8> {
        let left_to_rules = flow.mark.action().is_some_and(|number| self.config.actions.asks_rules(number));
        let denied = flow.pinned.is_none() && flow.wish.is_some_and(|wish| wish.want == Want::Block);
        let here = !self.stopping && self.ports(flow).is_some() && flow.standing != Standing::Asking;
        self.config.actions.number(ShuntAction::Block).filter(|_| left_to_rules && denied && here)
    }

    /// Removes the entry of the blocked flow that was idle for longest, if it was idle for long enough. The packet
    /// filter still drops packets with its mark.
    pub(super) fn make_room(&mut self, now: Instant) {
        if self.room_sought.is_some_and(|at| now - at < ROOM) {
            return;
        }
        self.room_sought = Some(now);
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

    /// Tells conntrack to keep a connection whose packets it does not see.
    pub(super) fn keep(&mut self, now: Instant, tuple: &Tuple) {
        let Some(flow) = self.flows.get_mut(tuple) else { return };
        flow.kept = now;
        self.outputs.push_back(match flow.action {
            ShuntAction::Block => Output::KeepBlocked(flow.tuple, flow.identity),
            ShuntAction::Shunt | ShuntAction::Ignore => Output::Keep(flow.tuple, flow.identity),
        });
    }
}
