//! The columns.

use std::fmt;

use serde::Serialize;

use crate::datagrams::Work;

/// Flows that echo.
const FLOWS: u32 = 32;
/// Datagrams of one of them under way.
const UNDER_WAY: u32 = 4;
/// New flows per second.
const NEW_PER_SECOND: u32 = 10_000;
/// Datagrams per second of a fixed rate.
const PER_SECOND: u32 = 100_000;
/// Flows that are idle.
const IDLE_FLOWS: u32 = 1000;

/// One column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Cell {
    /// Datagrams of this many bytes, sent back by the server.
    Echo(usize),
    /// Datagrams at a fixed rate, sent back by the server.
    Rate,
    /// Bulk data over QUIC.
    Quic,
    /// New flows at a fixed rate, of one datagram each.
    New,
    /// Memory of flows that are idle.
    Idle,
}

impl Cell {
    /// All columns, in the order of the tables.
    pub(super) const ALL: [Self; 6] =
        [Self::Echo(64), Self::Echo(1200), Self::Rate, Self::Quic, Self::New, Self::Idle];

    /// Returns whether the row is of use here. An association of SOCKS begins with a connection, which is another cost.
    pub(super) fn has(self, row: &str) -> bool {
        match self {
            Self::Echo(_) => true,
            Self::New => !row.ends_with("S5"),
            Self::Idle => !matches!(row, "direct" | "nft DNAT" | "ours run S5"),
            Self::Rate => matches!(row, "direct" | "dante S5" | "ours S5" | "ours run S5"),
            // The client of QUIC speaks no SOCKS.
            Self::Quic => !matches!(row, "dante S5" | "ours S5"),
        }
    }

    /// Returns the generator's work, its flows, and the bytes of a datagram.
    pub(super) const fn load(self) -> (Work, u32, usize) {
        match self {
            Self::Echo(bytes) => (Work::Echo { under_way: UNDER_WAY }, FLOWS, bytes),
            Self::New => (Work::New { per_second: NEW_PER_SECOND }, 0, 64),
            Self::Idle => (Work::Idle, IDLE_FLOWS, 64),
            Self::Rate => (Work::Rate { per_second: PER_SECOND }, FLOWS, 64),
            Self::Quic => (Work::Quic, 1, 1200),
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Echo(bytes) => write!(formatter, "{bytes} bytes"),
            Self::Rate => write!(formatter, "{PER_SECOND} datagrams per second"),
            Self::Quic => formatter.write_str("bulk over QUIC"),
            Self::New => write!(formatter, "{NEW_PER_SECOND} new flows per second"),
            Self::Idle => write!(formatter, "{IDLE_FLOWS} idle flows"),
        }
    }
}
