//! A branch: leads each flow through one of several chains ("arms"), which merge behind it.
//!
//! ```text
//!            no arm depends on bytes                        bytes of the client: enough to tell
//!   new ------------------------------> (its stages        +----------------------------------+
//!    |                                   stand in the      |                                  v
//!    | an arm depends on the first bytes chain)        CHOOSING                            CHOSEN -> replaced by the
//!    +-------------------------------------------------> |   ^                              ^     stages of the arm
//!                                                        |   | bytes, not enough: held      |
//!                                                        |   +---+                          |
//!                                                        +--------------------------------- +
//!                                            1 s after the first byte, the end of a side, or bytes of the server:
//!                                            what is not known by then does not fit
//! ```
//!
//! The first arm that fits takes the flow. If none fits, the flow goes straight on. The first bytes are looked at where
//! they lie. They are copied only if they are not enough.

use super::{FunctionSpec, Interest, Named, Stage, Step, Stop, Successors};
use crate::flow::{Flow, HostName, Side};
use crate::http::{SNIFF_MAX, Sniff, sniff};
use crate::policy::{Match, Policy};
use crate::time::Instant;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long the first bytes may take to show the arm.
const WAIT: Duration = Duration::from_millis(Policy::FIRST_BYTES_MS);

/// The arms of a branch, in order: the first that fits takes a flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BranchSpec {
    /// The arms, at least one.
    pub arms: Vec<ArmSpec>,
}

/// One arm of a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArmSpec {
    /// Its name, unique in the branch.
    pub name: Arc<str>,
    /// Conditions that must all hold, about the flow and its host name.
    pub matcher: Match,
    /// If not empty, the client's first bytes must begin with one of these.
    pub prefixes: Vec<Box<[u8]>>,
    /// The functions of the arm, from the client to the server. None at all: the flow goes straight on.
    pub functions: Vec<Arc<FunctionSpec>>,
}

/// What a branch can say about a flow before its first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The flow takes this arm, or none.
    Arm(Option<usize>),
    /// The first bytes decide. These arms can still fit, in order.
    Open(Vec<usize>),
}

impl ArmSpec {
    /// Whether this arm takes every flow that `other` would take, as far as the conditions alone show.
    pub fn covers(&self, other: &Self) -> bool {
        let begins = |prefix: &[u8]| self.prefixes.iter().any(|outer| prefix.starts_with(outer));
        let bytes = self.prefixes.is_empty()
            || (!other.prefixes.is_empty() && other.prefixes.iter().all(|prefix| begins(prefix)));
        bytes && self.matcher.covers(&other.matcher)
    }

    /// Whether the first bytes begin as the arm wants. `None`: more bytes are needed.
    fn begins(&self, first: &[u8], is_last: bool) -> Option<bool> {
        if self.prefixes.is_empty() || self.prefixes.iter().any(|prefix| first.starts_with(prefix)) {
            return Some(true);
        }
        let may_fit = !is_last && self.prefixes.iter().any(|prefix| prefix.starts_with(first));
        if may_fit { None } else { Some(false) }
    }
}

impl BranchSpec {
    /// Chooses an arm by what is known of a flow before its first byte.
    pub fn choose(&self, flow: &Flow) -> Choice {
        let mut open = Vec::new();
        for (index, arm) in self.arms.iter().enumerate() {
            match arm.matcher.fits(flow) {
                Some(false) => {}
                Some(true) if arm.prefixes.is_empty() => {
                    if open.is_empty() {
                        return Choice::Arm(Some(index));
                    }
                    open.push(index);
                    break;
                }
                _ => open.push(index),
            }
        }
        if open.is_empty() { Choice::Arm(None) } else { Choice::Open(open) }
    }

    /// Chooses by the first bytes. The outer option is `None` if more bytes are needed.
    fn choose_by(&self, open: &[(usize, bool)], first: &[u8], is_last: bool) -> Option<Chosen> {
        let mut host = None;
        for &(index, by_host) in open {
            let arm = &self.arms[index];
            let names = if by_host {
                match host.get_or_insert_with(|| sniff(first)) {
                    Sniff::Host { name, .. } => Some(arm.matcher.fits_host(Some(name))),
                    Sniff::NeedMore if !is_last => None,
                    Sniff::NeedMore | Sniff::None => Some(false),
                }
            } else {
                Some(true)
            };
            match (names, arm.begins(first, is_last)) {
                (Some(false), _) | (_, Some(false)) => {}
                (Some(true), Some(true)) => return Some(Chosen { arm: Some(index), host: named(host) }),
                _ => return None,
            }
        }
        Some(Chosen { arm: None, host: named(host) })
    }
}

fn named(host: Option<Sniff>) -> Option<HostName> {
    match host {
        Some(Sniff::Host { name, .. }) => Some(name),
        _ => None,
    }
}

/// The arm of a flow, and the host name in its first bytes if that was looked for.
#[derive(Debug)]
struct Chosen {
    arm: Option<usize>,
    host: Option<HostName>,
}

/// Makes the stages of an arm (none: of no arm) for a flow to this host, if the first bytes have shown one.
pub type Make = Box<dyn FnMut(Option<usize>, Option<HostName>) -> Result<Named, Stop> + Send>;

/// The branch of one flow whose first bytes decide.
pub struct Branch {
    spec: Arc<BranchSpec>,
    make: Make,
    /// The arms that can still fit, and whether that depends on the host name.
    open: Vec<(usize, bool)>,
    /// The client's first bytes, while they are not enough.
    head: Vec<u8>,
    /// When to choose with what is there.
    until: Option<Instant>,
    chosen: Option<Chosen>,
}

impl Branch {
    /// Makes the stage for a flow that [`BranchSpec::choose`] left open.
    pub fn new(spec: Arc<BranchSpec>, open: &[usize], flow: &Flow, make: Make) -> Self {
        let by_host = |index: &usize| (*index, spec.arms[*index].matcher.fits(flow).is_none());
        let open = open.iter().map(by_host).collect();
        Self { spec, make, open, head: Vec::new(), until: None, chosen: None }
    }

    /// Chooses with what is there.
    fn settle(&mut self) {
        self.chosen = self.spec.choose_by(&self.open, &self.head, true);
    }

    fn look(&mut self, now: Instant, bytes: &[u8]) -> Step {
        let before = self.head.len();
        let taken = bytes.len().min(SNIFF_MAX.saturating_sub(before));
        let is_last = before + taken >= SNIFF_MAX;
        if before == 0 {
            // Usually the first bytes are enough, and nothing is copied.
            self.chosen = self.spec.choose_by(&self.open, &bytes[..taken], is_last);
            if self.chosen.is_some() {
                return Step::Become;
            }
            self.until = Some(now + WAIT);
        }
        self.head.extend_from_slice(&bytes[..taken]);
        if before > 0 {
            self.chosen = self.spec.choose_by(&self.open, &self.head, is_last);
        }
        if self.chosen.is_some() {
            self.head.truncate(before);
            return Step::Become;
        }
        Step::Taken(taken)
    }
}

impl Stage for Branch {
    fn interest(&self, _from: Side) -> Interest {
        Interest::Bytes
    }

    fn handle(&mut self, now: Instant, from: Side, bytes: &[u8], _out: &mut Vec<u8>) -> Step {
        match from {
            Side::Client => self.look(now, bytes),
            Side::Server => {
                self.settle();
                Step::Become
            }
        }
    }

    fn finish(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) -> Result<bool, Stop> {
        self.settle();
        Ok(false)
    }

    fn tick(&mut self, _now: Instant, _from: Side, _out: &mut Vec<u8>) {
        self.settle();
    }

    fn deadline(&self, from: Side) -> Option<Instant> {
        self.until.filter(|_| from == Side::Client)
    }

    fn has_chosen(&self) -> bool {
        self.chosen.is_some()
    }

    fn successors(&mut self) -> Result<Successors, Stop> {
        let Chosen { arm, host } = self.chosen.take().unwrap_or(Chosen { arm: None, host: None });
        Ok(Successors { stages: (self.make)(arm, host)?, held: std::mem::take(&mut self.head) })
    }
}

impl fmt::Debug for Branch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Branch").field("open", &self.open).finish_non_exhaustive()
    }
}
