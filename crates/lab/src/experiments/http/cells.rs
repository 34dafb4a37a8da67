//! The columns: the requested content, the number of connections, and the way.

use serde::Serialize;

use crate::load::Work;

/// A part of the experiment; each has a table of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Part {
    /// Answers from the cache.
    Hit,
    /// Answers that may not be stored.
    Miss,
    /// Tunnels through CONNECT.
    Tunnel,
    /// Requests inside intercepted TLS.
    Tls,
    /// Hits and misses with a record line for each, and without.
    Records,
}

impl Part {
    /// All parts, in the order of the report.
    pub(super) const ALL: [Self; 5] = [Self::Hit, Self::Miss, Self::Tunnel, Self::Tls, Self::Records];

    /// Its name for `--part`.
    #[must_use]
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Miss => "miss",
            Self::Tunnel => "tunnel",
            Self::Tls => "tls",
            Self::Records => "records",
        }
    }

    /// Returns the heading of its table.
    #[must_use]
    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::Hit => "Answers from the cache",
            Self::Miss => "Answers that may not be stored (`no-store`)",
            Self::Tunnel => "CONNECT",
            Self::Tls => "Intercepted TLS",
            Self::Records => "A record line for each answer, in a file on disk",
        }
    }
}

/// One column.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Cell {
    /// Heading, and the key of the results.
    pub name: &'static str,
    /// The table it stands in.
    pub part: Part,
    /// The work of the connections.
    pub work: Work,
    /// Number of connections at a time.
    pub connections: u32,
    /// The file.
    pub path: &'static str,
    /// Whether a quick run has it, too.
    pub is_quick: bool,
}

const fn cell(name: &'static str, part: Part, work: Work, connections: u32, path: &'static str) -> Cell {
    Cell { name, part, work, connections, path, is_quick: true }
}

const fn long(cell: Cell) -> Cell {
    Cell { is_quick: false, ..cell }
}

/// Every column.
pub(super) static CELLS: &[Cell] = &[
    cell("hit 1 KB", Part::Hit, Work::KeepAlive, 32, "/hit/1k"),
    long(cell("hit 100 KB", Part::Hit, Work::KeepAlive, 32, "/hit/100k")),
    cell("hit 10 MB", Part::Hit, Work::Bulk, 4, "/hit/10m"),
    cell("miss 1 KB", Part::Miss, Work::KeepAlive, 32, "/miss/1k"),
    long(cell("miss 100 KB", Part::Miss, Work::KeepAlive, 32, "/miss/100k")),
    cell("tunnel, kept, 1 KB", Part::Tunnel, Work::KeepAlive, 32, "/miss/1k"),
    long(cell("tunnel, kept, 100 KB", Part::Tunnel, Work::KeepAlive, 32, "/miss/100k")),
    cell("tunnel, new", Part::Tunnel, Work::NewConnection, 32, "/miss/1k"),
    cell("new, hit 1 KB", Part::Tls, Work::NewConnection, 16, "/hit/1k"),
    long(cell("new, miss 1 KB", Part::Tls, Work::NewConnection, 16, "/miss/1k")),
    cell("kept, hit 1 KB", Part::Tls, Work::KeepAlive, 32, "/hit/1k"),
    long(cell("kept, hit 100 KB", Part::Tls, Work::KeepAlive, 32, "/hit/100k")),
    long(cell("kept, miss 1 KB", Part::Tls, Work::KeepAlive, 32, "/miss/1k")),
    cell("recorded hit 1 KB", Part::Records, Work::KeepAlive, 32, "/hit/1k"),
    cell("recorded miss 1 KB", Part::Records, Work::KeepAlive, 32, "/miss/1k"),
];

impl Cell {
    /// The columns of a part.
    pub(super) fn of(part: Part, quick: bool) -> impl Iterator<Item = &'static Self> {
        CELLS.iter().filter(move |cell| cell.part == part && (cell.is_quick || !quick))
    }

    /// Returns true if a cache answers without the origin.
    #[must_use]
    pub(super) fn is_hit(&self) -> bool {
        self.path.starts_with("/hit/")
    }
}
