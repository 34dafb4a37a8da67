//! What the resolver of a node has done since its start.

use super::answer::Transport;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// It is an address that represents the name.
    Name,
    /// It was kept.
    Cache,
    /// A name server.
    Server,
    /// The resolver knows it itself: `localhost`, a reverse name, no data, or an error in the query.
    Own,
    /// The rules let no flow to the name pass.
    Denied,
    /// No name server answered in time.
    Failed,
}

impl Source {
    /// All, in the order of their counts.
    pub const ALL: [Self; 6] = [Self::Name, Self::Cache, Self::Server, Self::Own, Self::Denied, Self::Failed];

    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Cache => "cache",
            Self::Server => "server",
            Self::Own => "own",
            Self::Denied => "denied",
            Self::Failed => "failed",
        }
    }
}

/// Why a query got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// Its source may not ask.
    Stranger,
    /// Its source asks too often: it was told to come over TCP.
    Slowed,
    /// Its source asks far too often.
    Rate,
    /// There are too many connections.
    Connections,
    /// It is not a query.
    NoQuery,
}

impl Unanswered {
    /// All, in the order of their counts.
    pub const ALL: [Self; 5] = [Self::Stranger, Self::Slowed, Self::Rate, Self::Connections, Self::NoQuery];

    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stranger => "stranger",
            Self::Slowed => "slowed",
            Self::Rate => "rate",
            Self::Connections => "connections",
            Self::NoQuery => "no_query",
        }
    }
}

/// The counts.
#[derive(Debug, Default)]
pub struct Counts {
    queries: [AtomicU64; 2],
    answers: [AtomicU64; Source::ALL.len()],
    unanswered: [AtomicU64; Unanswered::ALL.len()],
}

impl Counts {
    pub(super) fn query(&self, transport: Transport) {
        self.queries[usize::from(transport == Transport::Tcp)].fetch_add(1, Relaxed);
    }

    pub(super) fn answer(&self, source: Source) {
        self.answers[source as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn unanswered(&self, why: Unanswered) {
        self.unanswered[why as usize].fetch_add(1, Relaxed);
    }

    /// Queries by their transport.
    pub fn queries(&self) -> [(&'static str, u64); 2] {
        let [udp, tcp] = &self.queries;
        [("udp", udp.load(Relaxed)), ("tcp", tcp.load(Relaxed))]
    }

    /// Answers by their source.
    pub fn answers(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Source::ALL.into_iter().zip(&self.answers).map(|(one, count)| (one.as_str(), count.load(Relaxed)))
    }

    /// Queries and connections without an answer, by the reason.
    pub fn without_answer(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let all = Unanswered::ALL.into_iter().zip(&self.unanswered);
        all.map(|(one, count)| (one.as_str(), count.load(Relaxed)))
    }
}
