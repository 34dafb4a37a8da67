//! The bars: what ours must reach compared with which peers, and the result.

use super::Cell;
use crate::kit::{Bound, Results, Sample};
use crate::statistics::Spread;

/// The relays without a handshake that count as the best others.
const RELAYS: &[&str] = &["nginx stream", "HAProxy tcp", "HAProxy splice"];

/// The cells of a bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cells {
    New,
    KeepAlive,
    Bulk,
    BulkAt(u32),
}

impl Cells {
    fn contain(self, cell: Cell) -> bool {
        match self {
            Self::New => matches!(cell, Cell::New(_)),
            Self::KeepAlive => matches!(cell, Cell::KeepAlive(_)),
            Self::Bulk => cell.is_bulk(),
            Self::BulkAt(count) => cell == Cell::Bulk(count),
        }
    }
}

/// The compared quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Metric {
    /// Requests per second or Gbit/s; the bar is a minimum.
    Speed,
    /// CPU per connection, compared with the fastest of the others; the bar is a maximum.
    CostOfFastest,
    /// CPU per gigabyte, compared with the cheapest of the others; the bar is a maximum.
    Cost,
}

/// One bar.
struct Bar {
    cells: Cells,
    ours: &'static str,
    /// The best of these counts as the opponent.
    others: &'static [&'static str],
    metric: Metric,
    bound: f64,
}

const fn bar(
    cells: Cells,
    ours: &'static str,
    others: &'static [&'static str],
    metric: Metric,
    bound: f64,
) -> Bar {
    Bar { cells, ours, others, metric, bound }
}

/// Equal roles are compared: a hop without a handshake with relays, SOCKS with SOCKS, pairs with pairs.
const BARS: &[Bar] = &[
    bar(Cells::New, "ours reverse", RELAYS, Metric::Speed, 0.97),
    bar(Cells::New, "ours reverse", RELAYS, Metric::CostOfFastest, 1.03),
    bar(Cells::New, "ours S5", &["socksx 0.1.0 S5", "socksx 0.1.1 S5"], Metric::Speed, 1.3),
    bar(Cells::New, "ours S5", &["dante S5"], Metric::Speed, 3.0),
    bar(Cells::New, "ours S6", &["socksx 0.1.0 S6", "socksx 0.1.1 S6"], Metric::Speed, 1.3),
    bar(
        Cells::New,
        "ours S6 + data",
        &["socksx 0.1.0 S6 + data", "socksx 0.1.1 S6 + data"],
        Metric::Speed,
        1.3,
    ),
    bar(
        Cells::New,
        "ours S6 + data, socksx dialect",
        &["socksx 0.1.0 S6 + data", "socksx 0.1.1 S6 + data"],
        Metric::Speed,
        1.3,
    ),
    bar(Cells::New, "ours pair S5", &["socksx 0.1.0 pair S5"], Metric::Speed, 1.5),
    bar(Cells::New, "ours pair S5", &["redsocks + dante"], Metric::Speed, 1.5),
    bar(Cells::New, "ours pair S5, optimistic", &["socksx 0.1.0 pair S5"], Metric::Speed, 1.5),
    bar(Cells::New, "ours pair S6", &["socksx 0.1.0 pair S6"], Metric::Speed, 1.5),
    bar(Cells::New, "ours pair S6", &["redsocks + dante"], Metric::Speed, 1.5),
    bar(Cells::KeepAlive, "ours reverse", RELAYS, Metric::Speed, 1.0),
    bar(Cells::BulkAt(1), "ours reverse", &["HAProxy splice"], Metric::Speed, 1.0),
    bar(Cells::BulkAt(8), "ours reverse", &["nginx stream"], Metric::Speed, 1.3),
    bar(Cells::Bulk, "ours reverse", RELAYS, Metric::Cost, 1.0),
    bar(Cells::New, "ours kernel path", &["nft DNAT"], Metric::Speed, 0.93),
    bar(Cells::Bulk, "ours kernel path", &["nft DNAT"], Metric::Speed, 0.97),
];

/// Returns the smallest program that does the work of one of our rows with new connections.
const LIMITS: &[(&str, &str)] = &[
    ("ours reverse", "bare reverse"),
    ("ours S5", "bare S5"),
    ("ours S6", "bare S6"),
    ("ours S6 + data", "bare S6 + data"),
    ("ours pair S5", "bare pair S5"),
    ("ours pair S6", "bare pair S6"),
];

/// The limit of a bar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Limit {
    /// The row of the smallest program.
    pub bare: &'static str,
    /// Its ratio to the others: no program in user space can have a better one.
    pub best: Spread,
    /// The ratio of ours to it.
    pub reached: Spread,
}

/// The result of a bar in a cell.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Verdict {
    /// Our row.
    pub ours: &'static str,
    /// The row that counted as the best of the others.
    pub other: &'static str,
    /// Speed or cost.
    pub what: &'static str,
    /// The cell.
    pub cell: Cell,
    /// The ratio of ours to the other's, or why there is none.
    pub ratio: Result<Spread, String>,
    /// The limit, if it was measured.
    pub limit: Option<Limit>,
    /// A minimum for speed, a maximum for cost.
    pub bound: Bound,
}

impl Verdict {
    /// Returns true if the median ratio is on the right side of the bound.
    #[must_use]
    pub(super) fn holds(&self) -> bool {
        self.ratio.as_ref().is_ok_and(|ratio| self.bound.holds(ratio.median))
    }

    /// Returns true if the run fails because of it: measured and missed, ours does not work, or everything is
    /// required.
    #[must_use]
    pub(super) fn is_failure(&self) -> bool {
        let is_required = std::env::var_os("SIDETRACK_REQUIRE_ALL").is_some_and(|value| value == "1");
        match &self.ratio {
            Ok(_) => !self.holds(),
            Err(reason) => reason.starts_with(self.ours) || is_required,
        }
    }

    /// Returns `ok`, `FAIL`, or why it was not measured.
    #[must_use]
    pub(super) fn result(&self) -> String {
        match (&self.ratio, self.is_failure()) {
            (Err(reason), true) => format!("**FAIL**, not measured: {reason}"),
            (Err(reason), false) => format!("not measured: {reason}"),
            (Ok(_), true) => "**FAIL**".into(),
            (Ok(_), false) => "ok".into(),
        }
    }
}

/// Compares every bar with every measured cell. A bar without requested rows is left out.
#[must_use]
pub(super) fn judge(results: &Results<Cell>) -> Vec<Verdict> {
    let cells = results.cells();
    let pairs = BARS.iter().flat_map(|bar| cells.iter().map(move |cell| (bar, *cell)));
    pairs
        .filter(|(bar, cell)| bar.cells.contain(*cell))
        .filter_map(|(bar, cell)| bar.judge(results, cell))
        .collect()
}

impl Bar {
    fn judge(&self, results: &Results<Cell>, cell: Cell) -> Option<Verdict> {
        let was_asked = |peer: &&str| results.was_asked(cell, peer);
        if !was_asked(&self.ours) || !self.others.iter().any(was_asked) {
            return None;
        }
        let other = self.best_other(results, cell);
        let ratio = other.and_then(|other| self.ratio(results, cell, self.ours, other).ok());
        let is_speed = self.metric == Metric::Speed;
        Some(Verdict {
            ours: self.ours,
            other: other.or(self.others.first().copied()).unwrap_or_default(),
            what: if is_speed { "speed" } else { "CPU" },
            cell,
            ratio: ratio.ok_or_else(|| results.why_none(cell, &[&[self.ours], self.others].concat())),
            limit: other.and_then(|other| self.limit(results, cell, other)),
            bound: if is_speed { Bound::AtLeast(self.bound) } else { Bound::AtMost(self.bound) },
        })
    }

    fn ratio(&self, results: &Results<Cell>, cell: Cell, row: &str, other: &str) -> Result<Spread, String> {
        results.ratio(cell, row, other, |sample| {
            if self.metric == Metric::Speed { Some(sample.speed(cell)) } else { sample.cost(cell) }
        })
    }

    fn limit(&self, results: &Results<Cell>, cell: Cell, other: &str) -> Option<Limit> {
        let (_, bare) = LIMITS.iter().find(|(ours, _)| *ours == self.ours && self.cells == Cells::New)?;
        let best = self.ratio(results, cell, bare, other).ok()?;
        Some(Limit { bare, best, reached: self.ratio(results, cell, self.ours, bare).ok()? })
    }

    /// Returns the fastest of the others by median; for cost, the cheapest.
    fn best_other(&self, results: &Results<Cell>, cell: Cell) -> Option<&'static str> {
        let score = |sample: &Sample| match self.metric {
            Metric::Cost => sample.cost(cell).map(|cost| -cost),
            Metric::Speed | Metric::CostOfFastest => Some(sample.speed(cell)),
        };
        results.best(cell, self.others, score)
    }
}

#[cfg(test)]
mod tests;
