//! How packets travel: four axes that each rule chooses on its own, the kind of links, the dissemination, the delivery and
//! the trust.

pub use super::frame::{Dissemination, LinkKind};
use std::time::Duration;

/// Fewest and most node-disjoint paths of [`Dissemination::Duplicate`].
pub const PATHS: std::ops::RangeInclusive<u8> = 2..=5;

/// Fewest and most links between source and destination with [`Dissemination::Flood`].
pub const HOPS: std::ops::RangeInclusive<u8> = 1..=15;

/// Which nodes deliver a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Delivery {
    /// The node that the rule names.
    #[default]
    Node,
    /// Each member of a group (multicast).
    Group,
    /// The member of a group that is cheapest to reach (anycast).
    Nearest,
}

impl Delivery {
    /// Returns the word of the configuration for this delivery.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Group => "group",
            Self::Nearest => "nearest",
        }
    }
}

/// Which nodes a packet relies on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Trust {
    /// The members of the overlay: each node trusts what its neighbours pass on.
    #[default]
    Members,
    /// The source, the destination, and one way of honest nodes between them ([`super::tolerant`]).
    Tolerant,
}

impl Trust {
    /// All kinds of trust.
    pub const ALL: [Self; 2] = [Self::Members, Self::Tolerant];

    /// Returns the word of the configuration for this trust.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Members => "members",
            Self::Tolerant => "intrusion-tolerant",
        }
    }

    /// Returns the trust with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.name() == name)
    }
}

/// The priority of packets that have none of their own.
pub const PRIORITY: u8 = 5;

impl LinkKind {
    /// Returns the word of the configuration for this kind.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reliable => "reliable",
            Self::BestEffort => "best-effort",
            Self::RealTime => "real-time",
        }
    }

    /// Returns the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

impl Dissemination {
    /// Returns the word of the configuration for this dissemination.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shortest => "shortest",
            Self::Duplicate => "duplicate",
            Self::Flood => "flood",
            Self::Graph => "graph",
        }
    }

    /// Returns the dissemination with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.name() == name)
    }
}

/// The service that a rule chooses for its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Service {
    /// How each link recovers from loss.
    pub kind: LinkKind,
    /// Over which links a packet travels.
    pub dissemination: Dissemination,
    /// The number of paths of [`Dissemination::Duplicate`], in [`PATHS`]. Fewer are used if the network has fewer.
    pub paths: u8,
    /// Most links on the way of a packet with [`Dissemination::Flood`], in [`HOPS`].
    pub hops: u8,
    /// How long a packet may travel. Later it is dropped, and no link recovers it. `None`: there is no limit.
    pub deadline: Option<Duration>,
    /// Which nodes a packet relies on.
    pub trust: Trust,
    /// With [`Trust::Tolerant`]: packets with a higher priority are sent before others of the same source,
    /// [`super::frame::PRIORITIES`].
    pub priority: u8,
}

impl Service {
    /// Returns a service with this kind of links, over the shortest path, without a deadline.
    pub const fn new(kind: LinkKind) -> Self {
        let (dissemination, trust) = (Dissemination::Shortest, Trust::Members);
        Self { kind, dissemination, paths: 2, hops: 4, deadline: None, trust, priority: PRIORITY }
    }

    /// Returns the service in the words of the configuration, for people.
    pub fn words(&self) -> String {
        let mut words = format!("{}, {}", self.kind.name(), self.dissemination.name());
        match self.dissemination {
            Dissemination::Duplicate => words += &format!(" over {} paths", self.paths),
            Dissemination::Flood if self.is_reliable_flood() => {}
            Dissemination::Flood => words += &format!(" over {} hops", self.hops),
            Dissemination::Shortest | Dissemination::Graph => {}
        }
        if let Some(deadline) = self.deadline {
            words += &format!(", within {} ms", deadline.as_millis());
        }
        if self.trust == Trust::Tolerant {
            words += &format!(", {}", self.trust.name());
        }
        words
    }

    /// Whether packets travel in [`super::frame::Spread`] or [`super::frame::Vouched`] frames. Only nodes that announce
    /// [`super::frame::Features::SPREAD`] understand them.
    pub fn spreads(&self) -> bool {
        let is_tolerant = self.trust == Trust::Tolerant;
        is_tolerant || self.dissemination != Dissemination::Shortest || self.kind == LinkKind::RealTime
    }

    /// Whether packets are messages of a reliable intrusion-tolerant flow ([`super::tolerant::reliable`]).
    pub fn is_reliable_flood(&self) -> bool {
        self.trust == Trust::Tolerant && self.kind == LinkKind::Reliable
    }

    /// Returns the deadline as frames carry it: µs, 0 if there is no limit.
    pub fn budget_us(&self) -> u32 {
        self.deadline.map_or(0, |deadline| u32::try_from(deadline.as_micros()).unwrap_or(u32::MAX).max(1))
    }
}
