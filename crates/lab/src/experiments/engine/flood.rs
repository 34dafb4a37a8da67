//! A flood of SYNs beside connections that exist: what they still get of their answers, and what memory it takes.
//!
//! The flood has twice as many packets as the connections that stay send towards the engine without it: a question and an answer
//! each time. It comes from addresses without hosts.

use anyhow::{Result, ensure};
use serde::Serialize;
use sidetrack_common::exchange;

use super::wire::{Scene, with_cookies};
use crate::kit::{Bar, Bound, Missing, Page};
use crate::packets::{Report, Spec};
use crate::progress::Progress;

/// Connections that stay.
const KEPT: u32 = 256;
/// Time between two questions of one of them, in microseconds: 32,000 questions a second of all, about a third of what the engine
/// can pass.
const EVERY_US: u64 = 8000;
/// SYNs for each packet of a connection that exists.
const SYNS: u64 = 2;
/// Packets towards the engine for each answer: the question, and the answer of the server.
const PACKETS: u64 = 2;
/// Minimum share of the answers without a flood.
const SHARE_AT_LEAST: f64 = 0.8;
/// Maximum growth of resident memory by a flood, in MiB.
const GROWTH_AT_MOST: f64 = 8.0;
/// The values of `syn_cookies`.
const COOKIES: [&str; 2] = ["flood", "xdp"];

/// How fast connections that stay ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Asking {
    /// Each at its times.
    Paced,
    /// The next question follows each answer at once: the engine has no time left.
    AtOnce,
}

impl Asking {
    const fn every_us(self) -> u64 {
        match self {
            Self::Paced => EVERY_US,
            Self::AtOnce => 0,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Paced => "at their times",
            Self::AtOnce => "without a pause",
        }
    }
}

/// One sample, the median of its rounds by its answers.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// How the connections that stay ask.
    pub asking: Asking,
    /// Value of `syn_cookies`.
    pub cookies: &'static str,
    /// SYNs per second that were wanted; 0: no flood.
    pub wanted: u64,
    /// The generator's report.
    pub report: Report,
    /// Resident memory of Sidetrack before the packets and after them, in bytes.
    pub resident: [u64; 2],
    /// SYNs that the engine dropped under overload, and answered with a cookie, in the whole run.
    pub shed: u64,
}

impl Row {
    fn answers_per_s(&self) -> f64 {
        per_s(self.report.kept.answered, &self.report)
    }

    fn growth_mib(&self) -> f64 {
        let [before, after] = self.resident;
        after.saturating_sub(before) as f64 / 1024.0 / 1024.0
    }
}

fn per_s(count: u64, report: &Report) -> f64 {
    count as f64 * 1e9 / report.window_ns.max(1) as f64
}

/// Measures. The rate of a flood follows from the answers without it.
pub(super) fn run(quick: bool, rounds: u32, progress: &Progress, missing: &mut Missing) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for asking in [Asking::Paced, Asking::AtOnce].into_iter().take(if quick { 1 } else { 2 }) {
        for cookies in COOKIES {
            for with in [false, true] {
                let before = rows.iter().rfind(|row| with && row.wanted == 0).map(Row::answers_per_s);
                let wanted = before.map_or(0, |answers| answers as u64 * PACKETS * SYNS);
                let name = format!("flood of {wanted}/s, {}, syn_cookies {cookies}", asking.name());
                let mut samples = Vec::new();
                for round in 0..rounds {
                    progress.now(&format!("{name}, round {} of {rounds}", round + 1));
                    samples.extend(missing.note(&name, sample(asking, cookies, wanted, quick), progress));
                }
                samples.sort_by_key(|row: &Row| row.report.kept.answered);
                let middle = samples.len() / 2;
                rows.extend(samples.into_iter().nth(middle));
            }
        }
    }
    rows
}

/// One sample, with a new link.
fn sample(asking: Asking, cookies: &'static str, wanted: u64, quick: bool) -> Result<Row> {
    let scene = Scene::new()?;
    let service = scene.start(KEPT, &with_cookies(cookies))?;
    let before = service.resident_bytes();
    let flood_per_s = u32::try_from(wanted)?;
    let every_us = Some(asking.every_us());
    let spec = Spec { kept: KEPT, every_us, flood_per_s, ..scene.spec(1, quick)? };
    let (report, _) = scene.by_process(&service, &spec)?;
    let resident = [before, service.resident_bytes()];
    ensure!(report.kept.answered > 0, "no question was answered: {:?}", report.kept);
    ensure!(report.kept.reset == 0, "{} connections that stay were reset", report.kept.reset);
    // The worker publishes its counts once a second.
    std::thread::sleep(std::time::Duration::from_millis(1200));
    let (status, text) = exchange::ask(&scene.admin(), "GET", "/metrics", "")?;
    ensure!(status == 200, "{text}");
    let shed = super::overload::count(&text, "shed", "reason=\"overload\"");
    Ok(Row { asking, cookies, wanted, report, resident, shed })
}

/// Returns the bars of these rows.
pub(super) fn bars(rows: &[Row]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for row in rows.iter().filter(|row| row.wanted > 0) {
        let same =
            |other: &&Row| other.wanted == 0 && (other.asking, other.cookies) == (row.asking, row.cookies);
        let share = rows.iter().find(same).map(|before| row.answers_per_s() / before.answers_per_s());
        let of = format!("connections that ask {}, syn_cookies {}", row.asking.name(), row.cookies);
        bars.push(Bar::single(
            format!("answers in a flood, of those without: {of}"),
            share,
            Bound::AtLeast(SHARE_AT_LEAST),
        ));
        let what = format!("memory that a flood takes, MiB: {of}");
        bars.push(Bar::single(what, Some(row.growth_mib()), Bound::AtMost(GROWTH_AT_MOST)));
    }
    bars
}

/// The table.
pub(super) fn render(page: &mut Page, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    page.line(format_args!(
        "### A flood of SYNs\n\n{KEPT} connections stay and ask {}, once in {EVERY_US} us each, or {}. The flood has {SYNS} SYNs for \
         each packet that they send towards the engine without it (question, and answer of the server). *xdp*: the program in the \
         driver answers with cookies; *flood*: user space does, once many handshakes are half done. The generator makes \
         the flood, the questions and the answers on one core.\n",
        Asking::Paced.name(),
        Asking::AtOnce.name()
    ));
    page.columns([
        "questions",
        "syn_cookies",
        "SYNs/s wanted:",
        "SYNs/s sent:",
        "answers/s:",
        "p50 us:",
        "p99 us:",
        "sent again:",
        "shed:",
        "memory grew, MiB:",
    ]);
    for row in rows {
        let (report, kept) = (&row.report, &row.report.kept);
        let us = |ns: u64| ns as f64 / 1e3;
        page.row(format_args!(
            "{} | {} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {} | {:.1}",
            row.asking.name(),
            row.cookies,
            row.wanted,
            per_s(report.flooded, report),
            row.answers_per_s(),
            us(kept.p50_ns),
            us(kept.p99_ns),
            kept.repeated,
            row.shed,
            row.growth_mib()
        ));
    }
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::KeptReport;

    fn row(wanted: u64, answered: u64, after: u64) -> Row {
        let kept = KeptReport { answered, ..KeptReport::default() };
        let report = Report { kept, window_ns: 1_000_000_000, ..Report::default() };
        Row { asking: Asking::Paced, cookies: "xdp", wanted, report, resident: [0, after], shed: 0 }
    }

    #[test]
    fn a_flood_is_compared_with_none_and_may_not_take_memory() {
        let held = |answered, after| -> Vec<bool> {
            bars(&[row(0, 1000, 0), row(4000, answered, after)]).iter().map(Bar::holds).collect()
        };
        assert_eq!(held(800, 8 << 20), [true, true]);
        assert_eq!(held(799, 9 << 20), [false, false]);
        assert!(bars(&[]).is_empty() && !bars(&[row(4000, 800, 0)])[0].holds(), "not measured is not held");
    }
}
