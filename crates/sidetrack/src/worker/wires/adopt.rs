//! Goes on with the flows that an earlier process has left on the wire, or ends them.
//!
//! ```text
//! LEFT --the rules in force still carry it in the same way--> PASSED ON (see `wired`)
//! LEFT --otherwise, or `on_crash = "end"`-------------------> both hosts get a RST, its record is written
//! LEFT --what is known of it cannot be read-----------------> both hosts get a RST
//! LEFT --its record was written by the earlier process------> LINGERING (see `wired`)
//! ```

use super::Wires;
use super::noted::{Bounds, Kind, carrier};
use super::watch::now;
use super::wired::{Known, Wired, bytes};
use crate::agreement::InForce;
use crate::config::{Config, OnWireCrash};
use crate::live::{Decided, Ledger};
use sidetrack_core::flow::{EndReason, Process};
use sidetrack_core::policy::{Action, Decision, Seen, Verdict};
use sidetrack_core::time::Instant;
use sidetrack_core::wire::Note;
use sidetrack_sys::bpf;
use sidetrack_sys::link;
use sidetrack_sys::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What decides about flows that were left.
#[derive(Debug)]
pub struct Adopting<'a> {
    /// The configuration in force.
    pub config: &'a Config,
    /// The agreement in force.
    pub in_force: &'a InForce,
    /// Where the flows are shown.
    pub ledger: &'a Arc<Ledger>,
    /// Whether the earlier process could not hand over: it was killed.
    pub is_crash: bool,
}

/// What came of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Adoption {
    /// Flows that go on.
    pub adopted: usize,
    /// Flows that were ended.
    pub ended: usize,
    /// The highest number of a flow among them, 0 if there is none. Further flows have higher ones.
    pub last_number: u64,
}

impl Wires {
    /// Goes on with the flows that an earlier process has left. Does nothing if it was called before.
    pub fn adopt(self: &Arc<Self>, by: &Adopting<'_>) -> Adoption {
        let mut adoption = Adoption::default();
        for left in std::mem::take(&mut *lock(&self.left)) {
            self.flows.fetch_add(1, Relaxed);
            match self.known(&left, by, &mut adoption) {
                Some(wired) => {
                    adoption.adopted += 1;
                    self.adopted.fetch_add(1, Relaxed);
                    self.enter(wired);
                }
                None => adoption.ended += 1,
            }
        }
        let Adoption { adopted, ended, .. } = adoption;
        if adopted + ended > 0 {
            tracing::info!(adopted, ended, "flows on the wire that an earlier process has left");
        }
        adoption
    }

    /// Returns the flow if it goes on.
    fn known(
        self: &Arc<Self>,
        left: &bpf::Adopted,
        by: &Adopting<'_>,
        adoption: &mut Adoption,
    ) -> Option<Arc<Wired>> {
        let has_ended = self.memory().ended(left.id).is_some();
        let note = match self.memory().noted(left.id) {
            Ok(Some(note)) => Note::parse(&note).map_err(|error| error.to_string()),
            // Its record was written.
            Ok(None) if has_ended => {
                self.leave(left.id, None);
                return None;
            }
            Ok(None) => Err("nothing is known of it".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let note = match note {
            Ok(note) => note,
            Err(why) => {
                let [(client, _), (server, _)] = left.ends;
                tracing::error!(%client, %server, why, "a flow on the wire ends, without a record: what was known of it cannot be read");
                self.cut(left.id);
                return None;
            }
        };
        adoption.last_number = adoption.last_number.max(note.number.0);
        let judged = judge(&note, by);
        let kind = judged.as_ref().map_or_else(|_| Kind::of_note(&note), Clone::clone);
        let wired = self.wired(left, &note, kind);
        let slot = by.ledger.enter_afar(wired.clone());
        wired.is_at(by.ledger, slot);
        let obstacle = if has_ended {
            None
        } else if left.is_joining {
            Some((EndReason::Internal, "its sockets ended with their process".to_owned()))
        } else if by.is_crash && self.on_crash == OnWireCrash::End {
            Some((EndReason::Shutdown, "left by a process that was killed; on_crash = \"end\"".to_owned()))
        } else if let Err(why) = judged {
            Some((EndReason::PolicyDenied, format!("after a change of processes: {why}")))
        } else {
            let gone = !wired.lead() && self.has_no_interface(left.id);
            gone.then(|| (EndReason::Unreachable, "its interface is gone".to_owned()))
        };
        let Some((reason, why)) = obstacle else { return Some(wired) };
        wired.finish_with(reason, Some(&why));
        None
    }

    fn wired(self: &Arc<Self>, left: &bpf::Adopted, note: &Note, kind: Kind) -> Arc<Wired> {
        let now = now();
        let last_ns = self.memory().look(left.id).map(|side| side.last_ns).into_iter().max().unwrap_or(0);
        let active = if last_ns == 0 { now } else { now.min(Instant::from_nanos(last_ns)) };
        let since = UNIX_EPOCH + Duration::from_micros(note.since_us);
        let age = SystemTime::now().duration_since(since).unwrap_or_default();
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        let known = Known {
            number: note.number,
            base: note.base,
            opened: Instant::from_nanos(now.as_nanos().saturating_sub(age)),
            bytes: bytes(self, left.id, note.base),
            active,
        };
        Wired::new(self, left.id, known, kind)
    }

    /// Whether an interface that it leaves by is gone.
    fn has_no_interface(&self, id: bpf::WireId) -> bool {
        let there = link::interfaces().unwrap_or_default();
        let is_there = |index: u32| there.iter().any(|interface| interface.index == index);
        [0, 1].into_iter().any(|side| !is_there(self.memory().egress(id, side)))
    }
}

/// Whether the rules in force still carry the flow as it is. Says what keeps them from it.
fn judge(note: &Note, by: &Adopting<'_>) -> Result<Kind, String> {
    let mut flow = note.flow.clone();
    let host = flow.host.clone();
    let verdict = loop {
        match by.config.policy.decide(&flow, Seen::FirstBytes(host.as_ref())) {
            Decision::Verdict(verdict) => break verdict,
            Decision::NeedProcess { .. } if flow.process.is_none() => flow.process = Some(Process::default()),
            Decision::NeedProcess { rule } | Decision::NeedFirstBytes { rule, .. } => {
                return Err(format!("rule '{rule}' asks for what is not known any more"));
            }
        }
    };
    let verdict = by.in_force.judge(by.config, &flow, verdict);
    let Action::Carry(carry) = &verdict.action else { return Err(verdict.why.to_string()) };
    if verdict.rule.as_deref() != note.rule.as_deref() {
        let old = note.rule.as_deref().unwrap_or("default");
        return Err(format!("'{old}' had decided, and now it is {}", verdict.why));
    }
    if carrier(&verdict.action) != note.carrier {
        return Err(format!("{} leads elsewhere now", verdict.why));
    }
    if carry.chain.is_some() {
        return Err(format!("{} leads through functions now", verdict.why));
    }
    let verdict = Some(Verdict { agreement: None, ..verdict });
    Ok(Kind::of(Some(&Decided::new(flow, verdict).by(&by.config.policy)), Bounds::of_note(note)))
}
