//! What is checked from time to time: all flows, and how scarce entries are.

use super::{CONFIRM, LOOK, Shunt};
use crate::shunt::capacity::{Contender, SURVEY, WhenFull, exchanges};
use crate::shunt::{Cause, EntryId, Flow, Obstacle, Output, ShuntAction, Standing};
use crate::time::Instant;

/// The measurements of rates while entries are scarce.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Survey {
    /// When to measure again. `None`: entries were not scarce.
    next: Option<Instant>,
    /// The counts of the slow path were requested, and are there at the next check.
    counting: bool,
}

impl Shunt {
    /// Checks all flows: entries without confirmation, refused entries to retry, connections that conntrack must keep.
    pub(super) fn look(&mut self, now: Instant) {
        if now < self.look_at {
            return;
        }
        self.look_at = now + LOOK;
        let (mut late, mut again, mut keep) = (Vec::new(), Vec::new(), Vec::new());
        let (mut unripe, mut scarce) = (false, false);
        for flow in self.flows.values_mut() {
            scarce |= flow.waits_for_room();
            match flow.standing {
                Standing::Slow if flow.is_unripe() => {
                    flow.ripen(now);
                    match flow.is_unripe() {
                        true => unripe = true,
                        false => again.push(flow.tuple),
                    }
                }
                Standing::Requested if flow.times.requested().is_some_and(|at| now - at >= CONFIRM) => {
                    late.push(flow.tuple)
                }
                Standing::Failed { until, .. } if now >= until => again.push(flow.tuple),
                // A blocked flow that has stopped sending is left to conntrack. When conntrack forgets it, its entry
                // is removed.
                Standing::Installed
                    if now - flow.kept >= self.config.keep_every
                        && (flow.action == ShuntAction::Shunt || flow.moved > flow.kept) =>
                {
                    keep.push(flow.tuple);
                }
                _ => {}
            }
        }
        keep.iter().for_each(|tuple| self.keep(now, tuple));
        late.iter().for_each(|tuple| self.remove(tuple, Cause::Unconfirmed));
        again.iter().for_each(|tuple| self.decide(now, tuple));
        let survey = self.survey(now, scarce);
        if unripe || survey {
            self.outputs.push_back(Output::CountSlow);
        }
    }

    /// Measures the rates from time to time while entries are scarce. Returns true if the slow path must be counted
    /// for it.
    fn survey(&mut self, now: Instant, scarce: bool) -> bool {
        if !scarce || self.stopping || self.config.when_full == WhenFull::Wait {
            self.survey = Survey::default();
            return false;
        }
        if self.survey.counting {
            self.survey.counting = false;
            self.make_way(now);
            return false;
        }
        let is_due = self.survey.next.is_none_or(|next| now >= next);
        if is_due {
            self.survey = Survey { next: Some(now + SURVEY), counting: true };
        }
        is_due
    }

    /// Takes entries from slow flows for faster ones that wait.
    fn make_way(&mut self, now: Instant) {
        let (mut waiting, mut holding) = (Vec::new(), Vec::new());
        for flow in self.flows.values_mut() {
            flow.measure(now);
            let Some(bytes_per_s) = flow.bytes_per_s() else { continue };
            let contender = Contender { tuple: flow.tuple, bytes_per_s };
            if flow.waits_for_room() {
                waiting.push(contender);
            } else if flow.may_make_way() {
                holding.push(contender);
            }
        }
        waiting.retain(|flow| {
            let action = self.flows.get(&flow.tuple).map(|flow| self.action(flow));
            action == Some(ShuntAction::Shunt)
        });
        let all = exchanges(waiting, holding, &self.clients, self.config.entries_max_per_client);
        for exchange in all {
            let entry = self.flows.get(&exchange.from).and_then(Flow::entry);
            if let Some(entry) = entry {
                self.successors.insert(entry, exchange.to);
                self.evicted = self.evicted.saturating_add(1);
                self.remove(&exchange.from, Cause::Evicted);
            }
        }
    }

    /// Gives the place of an entry that is gone to the flow that it was taken for.
    pub(super) fn succeed(&mut self, now: Instant, entry: EntryId) {
        let Some(tuple) = self.successors.remove(&entry) else { return };
        let Some(flow) = self.flows.get_mut(&tuple).filter(|flow| flow.waits_for_room()) else { return };
        flow.standing = Standing::Failed { why: Obstacle::Full, until: now };
        self.decide(now, &tuple);
    }

    /// Returns how many entries flows have lost to faster ones.
    pub const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns how many flows wait because there is no entry for them.
    pub fn waiting(&self) -> usize {
        self.flows.values().filter(|flow| flow.waits_for_room()).count()
    }
}

impl Flow {
    /// Whether it is on the slow path because there is no entry for it.
    const fn waits_for_room(&self) -> bool {
        matches!(self.standing, Standing::Failed { why: Obstacle::Full, .. })
    }

    /// Whether a faster flow may take its entry. A pinned one is kept.
    fn may_make_way(&self) -> bool {
        self.standing == Standing::Installed && self.action == ShuntAction::Shunt && self.pinned.is_none()
    }

    fn measure(&mut self, now: Instant) {
        let (slow, fast) = (self.slow(), self.fast());
        let bytes = [slow.to_server, slow.to_client, fast.to_server, fast.to_client];
        self.rate.measure(now, bytes.iter().fold(0, |sum, one| sum.saturating_add(one.bytes)));
    }
}
