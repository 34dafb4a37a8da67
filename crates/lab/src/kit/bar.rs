//! Bars: what a figure must reach, and whether it does.

use std::fmt;

use serde::{Serialize, Serializer};

use super::Page;
use crate::statistics::Spread;

/// The side of a number on which a figure must be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// A higher figure is better.
    AtLeast(f64),
    /// A lower figure is better.
    AtMost(f64),
}

impl Bound {
    /// Returns true if the figure is on the right side; NaN is on none.
    #[must_use]
    pub fn holds(self, figure: f64) -> bool {
        match self {
            Self::AtLeast(bound) => figure >= bound,
            Self::AtMost(bound) => figure <= bound,
        }
    }

    /// Returns the number.
    #[must_use]
    pub const fn value(self) -> f64 {
        let (Self::AtLeast(bound) | Self::AtMost(bound)) = self;
        bound
    }
}

/// `at least 0.97`, with two digits after the point unless others are asked for.
impl fmt::Display for Bound {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if matches!(self, Self::AtLeast(_)) { "at least" } else { "at most" };
        write!(formatter, "{word} {:.*}", formatter.precision().unwrap_or(2), self.value())
    }
}

/// When a run fails because of a bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// If it does not hold, also if its figure is missing.
    Always,
    /// If its figure is there and does not hold.
    IfMeasured,
    /// Never: it is a goal.
    Goal,
}

/// One bar and its result.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// What is held against the bound.
    pub what: String,
    /// The figure: its median counts. Or the reason why there is none.
    pub measured: Result<Spread, String>,
    /// What it must reach.
    pub bound: Bound,
    /// The unit, after the numbers.
    pub unit: &'static str,
    /// When the run fails because of it.
    pub need: Need,
    /// The figure of the least possible program in the same run, if there is one.
    pub limit: Option<f64>,
}

impl Bar {
    /// Makes a bar that must hold, for a figure over all rounds.
    #[must_use]
    pub fn new(what: impl Into<String>, measured: Result<Spread, String>, bound: Bound) -> Self {
        Self { what: what.into(), measured, bound, unit: "", need: Need::Always, limit: None }
    }

    /// Makes a bar that must hold, for one figure.
    #[must_use]
    pub fn single(what: impl Into<String>, figure: Option<f64>, bound: Bound) -> Self {
        Self::new(what, figure.map(Spread::single).ok_or_else(|| "no figure".to_owned()), bound)
    }

    /// Sets the unit.
    #[must_use]
    pub fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    /// Sets when the run fails because of it.
    #[must_use]
    pub fn need(self, need: Need) -> Self {
        Self { need, ..self }
    }

    /// Returns the figure; `None` if there is none.
    #[must_use]
    pub fn reached(&self) -> Option<f64> {
        self.measured.as_ref().ok().map(|measured| measured.median)
    }

    /// Returns true if it was measured and its median is on the right side.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.reached().is_some_and(|reached| self.bound.holds(reached))
    }

    /// Returns true if the run fails because of it.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        match self.need {
            Need::Always => !self.holds(),
            Need::IfMeasured => self.measured.is_ok() && !self.holds(),
            Need::Goal => false,
        }
    }

    /// Returns `ok`, `**FAIL**`, or what else came of it.
    #[must_use]
    pub fn result(&self) -> &'static str {
        match (self.holds(), self.is_failure(), &self.measured) {
            (true, ..) => "ok",
            (_, true, _) => "**FAIL**",
            (_, _, Ok(_)) => "missed",
            (_, _, Err(_)) => "not measured",
        }
    }

    /// Writes bars as a table, and how many of them failed.
    pub fn table(page: &mut Page, bars: &[Self]) {
        page.columns(["bar", "measured (quartiles)", "wanted", ""]);
        for bar in bars {
            let unit = bar.unit;
            let measured = match &bar.measured {
                Ok(spread) => format!("{spread}{unit}"),
                Err(why) => format!("not measured: {why}"),
            };
            page.row(format_args!("{} | {measured} | {}{unit} | {}", bar.what, bar.bound, bar.result()));
        }
        let failed = bars.iter().filter(|bar| bar.is_failure()).count();
        page.line(format_args!("\n{} bars, {failed} failed.", bars.len()));
    }
}

/// What `results.json` has of a bar.
#[derive(Serialize)]
struct Written<'b> {
    bar: &'b str,
    reached: Option<f64>,
    bound: f64,
    at_least: bool,
    limit: Option<f64>,
    holds: bool,
}

impl Serialize for Bar {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let written = Written {
            bar: &self.what,
            reached: self.reached(),
            bound: self.bound.value(),
            at_least: matches!(self.bound, Bound::AtLeast(_)),
            limit: self.limit,
            holds: self.holds(),
        };
        written.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_that_was_not_measured_does_not_hold() {
        for bound in [Bound::AtLeast(10.0), Bound::AtMost(10.0)] {
            assert!(!Bar::single("", None, bound).holds() && !Bar::single("", Some(f64::NAN), bound).holds());
            assert!(Bar::single("", Some(10.0), bound).holds());
        }
        assert!(!Bar::single("", Some(9.0), Bound::AtLeast(10.0)).holds());
        assert!(!Bar::single("", Some(11.0), Bound::AtMost(10.0)).holds());
    }

    #[test]
    fn a_missed_bar_fails_as_far_as_it_is_needed() {
        let bar = |figure, need| Bar::single("", figure, Bound::AtMost(1.0)).need(need);
        let results = [Need::Always, Need::IfMeasured, Need::Goal].map(|need| {
            [Some(1.0), Some(2.0), None]
                .map(|figure| (bar(figure, need).result(), bar(figure, need).is_failure()))
        });
        let (ok, fail) = (("ok", false), ("**FAIL**", true));
        assert_eq!(
            results,
            [
                [ok, fail, fail],
                [ok, fail, ("not measured", false)],
                [ok, ("missed", false), ("not measured", false)]
            ]
        );
    }

    #[test]
    fn the_table_names_figures_bounds_and_results() {
        let measured = Spread { low: 0.5, median: 1.0, high: 1.5 };
        let bars = [
            Bar::new("a", Ok(measured), Bound::AtLeast(0.9)).unit(" ms"),
            Bar::new("b", Err("it is absent".to_owned()), Bound::AtMost(2.0)),
        ];
        let mut page = Page::default();
        Bar::table(&mut page, &bars);
        assert_eq!(
            page.as_str(),
            "| bar | measured (quartiles) | wanted | |\n|---|---|---|---|\n\
             | a | 1.00 (0.50 to 1.50) ms | at least 0.90 ms | ok |\n\
             | b | not measured: it is absent | at most 2.00 | **FAIL** |\n\n2 bars, 1 failed.\n"
        );
    }
}
