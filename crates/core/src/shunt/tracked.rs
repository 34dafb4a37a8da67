//! What is known of one flow.

use super::{
    Both, Cause, Connection, EntryId, Identity, Mark, Obstacle, Phase, ShuntAction, Times, Transport, Tuple,
    Wish,
};
use crate::policy::FastPathKind;
use crate::time::Instant;

/// Where a flow stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// On the slow path.
    Slow,
    /// The fast path has been asked.
    Requested,
    /// On the fast path.
    Installed,
    /// The fast path was asked to let go, for this cause.
    Leaving(Cause),
    /// The policy bit was cleared; nothing is done before conntrack has shown that.
    Asking,
    /// The fast path did not take it; tried again then.
    Failed {
        /// Why.
        why: Obstacle,
        /// When it is tried again.
        until: Instant,
    },
}

impl Standing {
    /// The word of listings.
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

/// One flow that policy wanted on the fast path at least once, or that somebody pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Its addresses.
    pub tuple: Tuple,
    /// Which connection on these addresses.
    pub identity: Identity,
    /// Its mark, as last reported.
    pub mark: Mark,
    /// How far it is.
    pub phase: Phase,
    /// Where it stands.
    pub standing: Standing,
    /// The number of its entry, or of the latest.
    pub entry: Option<EntryId>,
    /// What the entry does, or the latest did.
    pub action: ShuntAction,
    /// The fast path that has the entry, or had the latest.
    pub path: FastPathKind,
    /// What somebody wants whatever policy says.
    pub pinned: Option<ShuntAction>,
    /// Why it last left the fast path.
    pub cause: Option<Cause>,
    /// How often it was installed.
    pub installs: u32,
    /// Times of the latest stay.
    pub times: Times,
    /// All that passed on the fast path in stays that are over.
    pub before: Both,
    /// All that was dropped there in stays that are over.
    pub dropped_before: Both,
    /// What passed in the present stay, or was dropped, as last counted.
    pub now: Both,
    /// What conntrack counted, as last reported; final when the connection has ended. On the slow path, and on a fast path
    /// that it counts as well.
    pub tracked: Both,
    /// Conntrack has reported its end.
    pub ended: bool,
    /// What our own rules want, where its mark leaves that to them.
    pub wish: Option<Wish>,
    /// One of them asks for the process behind it, and that is being looked for.
    pub(super) asked_whose: bool,
    /// When we first saw it.
    pub(super) seen: Instant,
    /// What its rule waits for has come.
    pub(super) ripe: bool,
    /// What of `before` conntrack has counted as well.
    pub(super) counted_twice: Both,
    pub(super) both_ways: bool,
    pub(super) translated: bool,
    pub(super) inspected: bool,
    /// When conntrack was last told to keep it.
    pub(super) kept: Instant,
    /// When its entry was last seen to count a packet.
    pub(super) moved: Instant,
}

impl Flow {
    pub(super) fn new(connection: &Connection, seen: Instant) -> Self {
        let mut flow = Self {
            tuple: connection.tuple,
            identity: connection.identity,
            mark: connection.mark,
            // A report without a phase is of a connection that changed otherwise: later than its handshake.
            phase: Phase::Open,
            standing: Standing::Slow,
            entry: None,
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
        };
        flow.learn(connection);
        flow
    }

    /// All that passed on the fast path.
    pub fn fast(&self) -> Both {
        let mut all = self.before;
        if self.action != ShuntAction::Block {
            all += self.now;
        }
        all
    }

    /// All that was dropped on the fast path.
    pub fn dropped(&self) -> Both {
        let mut all = self.dropped_before;
        if self.action == ShuntAction::Block {
            all += self.now;
        }
        all
    }

    /// All that passed on the slow path, as far as it is known.
    pub fn slow(&self) -> Both {
        let mut fast = self.counted_twice;
        if self.path.is_counted_by_conntrack() {
            fast += self.now;
        }
        self.tracked.less(fast)
    }

    /// Whether it was on the fast path, if only until its removal was confirmed.
    pub fn was_shunted(&self) -> bool {
        self.installs > 0 || self.before != Both::default() || self.dropped_before != Both::default()
    }

    /// Takes what a report says.
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

    /// Whether a report is of this very connection. A report without time stamp is taken to be.
    pub(super) fn is(&self, identity: Identity) -> bool {
        self.identity.id == identity.id
            && match (self.identity.start_ns, identity.start_ns) {
                (Some(known), Some(reported)) => known == reported,
                _ => true,
            }
    }

    /// What stands against an entry as far as the connection itself goes.
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

    /// The present stay is over.
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
        self.times.gone = Some(now);
    }
}
