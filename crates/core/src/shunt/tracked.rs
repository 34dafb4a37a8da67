//! The state of one flow.

use super::capacity::Rate;
use super::{
    Both, Cause, Connection, EntryId, Identity, Mark, Obstacle, Phase, ShuntAction, Times, Transport, Tuple,
    Wish,
};
use crate::policy::FastPathKind;
use crate::time::Instant;

/// The state of a flow, see the diagram in the module above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The flow is on the slow path.
    Slow,
    /// An entry was requested from the fast path.
    Requested,
    /// The flow is on the fast path.
    Installed,
    /// The removal of the entry was requested, for this cause.
    Leaving(Cause),
    /// The policy bit was cleared. The shunt waits until conntrack has reported that.
    Asking,
    /// The fast path did not install the entry. It is tried again later.
    Failed {
        /// The reason.
        why: Obstacle,
        /// When to try again.
        until: Instant,
    },
}

impl Standing {
    /// Returns the word of listings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Slow | Self::Asking => "slow",
            Self::Requested => "requested",
            Self::Installed => "installed",
            Self::Leaving(_) => "leaving",
            Self::Failed { .. } => "failed",
        }
    }

    /// Whether the fast path has, or may have, an entry.
    pub const fn has_entry(self) -> bool {
        matches!(self, Self::Requested | Self::Installed | Self::Leaving(_))
    }
}

/// One flow that policy wanted on the fast path at least once, or that was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Its addresses.
    pub tuple: Tuple,
    /// Distinguishes connections with the same addresses.
    pub identity: Identity,
    /// Its mark, as last reported.
    pub mark: Mark,
    /// Its phase.
    pub phase: Phase,
    /// Its state.
    pub standing: Standing,
    /// The number of its entry, or of its latest entry; 0 if it had none.
    pub(super) entry: EntryId,
    /// The action of its entry, or of its latest entry.
    pub action: ShuntAction,
    /// The fast path that has its entry, or had its latest entry.
    pub path: FastPathKind,
    /// The action that a person or a program demands, whatever policy says.
    pub pinned: Option<ShuntAction>,
    /// Why it last left the fast path.
    pub cause: Option<Cause>,
    /// How many times it was installed.
    pub installs: u32,
    /// The times of its latest stay.
    pub times: Times,
    /// The traffic of earlier stays on the fast path.
    pub before: Both,
    /// The traffic that was dropped in earlier stays.
    pub dropped_before: Both,
    /// The traffic that passed or was dropped in the present stay, as last counted.
    pub now: Both,
    /// The traffic that conntrack counted, as last reported. Final when the connection has ended. It covers the slow
    /// path, and a fast path that conntrack counts, too.
    pub tracked: Both,
    /// Conntrack has reported its end.
    pub ended: bool,
    /// What our own rules want, if its mark leaves the decision to them.
    pub wish: Option<Wish>,
    /// One of the rules needs the process behind it, which was requested.
    pub(super) asked_whose: bool,
    /// When the flow was first seen.
    pub(super) seen: Instant,
    /// The bytes and the time that its rule waits for have passed.
    pub(super) ripe: bool,
    /// The part of `before` that conntrack has counted, too.
    pub(super) counted_twice: Both,
    pub(super) both_ways: bool,
    pub(super) translated: bool,
    pub(super) inspected: bool,
    /// When conntrack was last told to keep the connection.
    pub(super) kept: Instant,
    /// When its entry was last seen to count a packet.
    pub(super) moved: Instant,
    pub(super) rate: Rate,
}

impl Flow {
    pub(super) fn new(connection: &Connection, seen: Instant) -> Self {
        let mut flow = Self {
            tuple: connection.tuple,
            identity: connection.identity,
            mark: connection.mark,
            // A report without a phase is about a later change, so the handshake is complete.
            phase: Phase::Open,
            standing: Standing::Slow,
            entry: EntryId(0),
            action: ShuntAction::Ignore,
            path: FastPathKind::None,
            pinned: None,
            cause: None,
            installs: 0,
            times: Times::default(),
            before: Both::default(),
            dropped_before: Both::default(),
            now: Both::default(),
            tracked: Both::default(),
            counted_twice: Both::default(),
            ended: false,
            wish: None,
            asked_whose: false,
            seen,
            ripe: false,
            both_ways: false,
            translated: false,
            inspected: false,
            kept: Instant::ZERO,
            moved: seen,
            rate: Rate::default(),
        };
        flow.learn(connection);
        flow
    }

    /// Returns the number of its entry, or of its latest entry.
    pub fn entry(&self) -> Option<EntryId> {
        Some(self.entry).filter(|entry| entry.0 > 0)
    }

    /// Returns all traffic that passed on the fast path.
    pub fn fast(&self) -> Both {
        let mut all = self.before;
        if self.action != ShuntAction::Block {
            all += self.now;
        }
        all
    }

    /// Returns all traffic that was dropped on the fast path.
    pub fn dropped(&self) -> Both {
        let mut all = self.dropped_before;
        if self.action == ShuntAction::Block {
            all += self.now;
        }
        all
    }

    /// Returns all traffic on the slow path, as far as it is known.
    pub fn slow(&self) -> Both {
        let mut fast = self.counted_twice;
        if self.path.is_counted_by_conntrack() {
            fast += self.now;
        }
        self.tracked.less(fast)
    }

    /// Returns its bytes per second on both paths, as last measured. Rates are measured while entries are scarce.
    pub const fn bytes_per_s(&self) -> Option<u64> {
        self.rate.bytes_per_s()
    }

    /// Whether it was on the fast path, even if its removal was requested before the confirmation.
    pub fn was_shunted(&self) -> bool {
        self.installs > 0 || self.before != Both::default() || self.dropped_before != Both::default()
    }

    /// Takes over the values of a report.
    pub(super) fn learn(&mut self, connection: &Connection) {
        self.mark = connection.mark;
        self.identity.start_ns = self.identity.start_ns.or(connection.identity.start_ns);
        self.both_ways |= connection.both_ways;
        self.translated = connection.translated;
        self.inspected |= connection.inspected;
        if let Some(phase) = connection.phase {
            self.phase = phase;
        }
        if let Some(traffic) = connection.traffic {
            self.tracked = traffic;
        }
    }

    /// Whether a report is about this connection. A report without a time stamp counts as such.
    pub(super) fn is(&self, identity: Identity) -> bool {
        self.identity.id == identity.id
            && match (self.identity.start_ns, identity.start_ns) {
                (Some(known), Some(reported)) => known == reported,
                _ => true,
            }
    }

    /// Returns why the connection itself does not allow an entry.
    pub(super) fn obstacle(&self, action: ShuntAction) -> Option<Obstacle> {
        if self.translated {
            return Some(Obstacle::Translated);
        }
        if action == ShuntAction::Block {
            return None;
        }
        match self.phase {
            Phase::Closing | Phase::Reset => return Some(Obstacle::Closing),
            Phase::Opening if self.tuple.transport == Transport::Tcp => {
                return Some(Obstacle::NotEstablished);
            }
            Phase::Opening | Phase::Open => {}
        }
        if self.inspected {
            return Some(Obstacle::Inspected);
        }
        (!self.both_ways).then_some(Obstacle::NotEstablished)
    }

    /// Adds the counters of the present stay, which is over.
    pub(super) fn left(&mut self, now: Instant, cause: Cause, traffic: Both) {
        match self.action {
            ShuntAction::Block => self.dropped_before += traffic,
            _ => self.before += traffic,
        }
        if self.path.is_counted_by_conntrack() {
            self.counted_twice += traffic;
        }
        self.now = Both::default();
        self.cause = Some(cause);
        self.times.end(now);
    }
}
