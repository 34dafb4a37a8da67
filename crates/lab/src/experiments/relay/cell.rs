//! The columns: kind of work and number of connections.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::load::Work;
use crate::site::{BIG_FILE, SMALL_FILE};

/// One column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cell {
    /// A new connection per request, this number at a time.
    New(u32),
    /// Requests on this number of connections that stay open.
    KeepAlive(u32),
    /// This number of large downloads at a time.
    Bulk(u32),
}

impl Cell {
    /// Returns the cells of a run; an empty `kinds` means all kinds.
    #[must_use]
    pub fn chosen(quick: bool, kinds: &[String]) -> Vec<Self> {
        let full =
            [Self::New(8), Self::New(32), Self::New(64), Self::KeepAlive(32), Self::Bulk(1), Self::Bulk(8)];
        let short = [Self::New(32), Self::KeepAlive(32), Self::Bulk(1), Self::Bulk(8)];
        let all = if quick { &short[..] } else { &full[..] };
        let wanted = |cell: &&Self| kinds.is_empty() || kinds.iter().any(|kind| kind == cell.kind());
        all.iter().filter(wanted).copied().collect()
    }

    /// Returns its name for `--work`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::New(_) => "new",
            Self::KeepAlive(_) => "keep-alive",
            Self::Bulk(_) => "bulk",
        }
    }

    /// Returns the generator's work, its number of connections, and the file.
    #[must_use]
    pub fn load(&self) -> (Work, u32, &'static str) {
        match *self {
            Self::New(count) => (Work::NewConnection, count, SMALL_FILE),
            Self::KeepAlive(count) => (Work::KeepAlive, count, SMALL_FILE),
            Self::Bulk(count) => (Work::Bulk, count, BIG_FILE),
        }
    }

    /// Returns true if bytes are compared, not requests.
    #[must_use]
    pub fn is_bulk(&self) -> bool {
        matches!(self, Self::Bulk(_))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::New(count) | Self::KeepAlive(count) | Self::Bulk(count)) = self;
        write!(formatter, "{} at {count}", self.kind())
    }
}
