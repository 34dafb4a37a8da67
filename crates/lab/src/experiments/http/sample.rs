//! Measures one program in one column for about a second, and checks that it did what the column requires.

use anyhow::{anyhow, ensure};

use super::cells::Cell;
use super::rows::{Row, Scene};
use crate::kit::{Sample, Timing};
use crate::load::Report;
use crate::machine::DisturbanceMeter;
use crate::peers::Unavailable;
use crate::service::Service;

/// Maximum share of failed answers before ours counts as broken.
const OUR_FAILED_SHARE_LIMIT: f64 = 0.001;
/// Maximum share of answers that a cache may fetch from the origin in a column of hits, for requests that began
/// before the window.
const ASKED_SHARE_MOST: f64 = 0.01;
/// Number of requests that may cross the border of the window, a little more than one per connection.
const BORDER: f64 = 64.0;
/// Minimum ratio of the origin's requests to the answers, in columns where every answer comes from the origin. The
/// origin shares its core with the client, so its count is late, but not by more than this.
const ASKED_SHARE_LEAST: f64 = 0.5;

/// Takes one sample.
///
/// # Errors The program is absent, ended, or did something else than the column requires.
pub(super) fn take(scene: &Scene<'_>, row: &Row, cell: &Cell, timing: Timing) -> Result<Sample, Unavailable> {
    let mut services = (row.start)(scene)?;
    let spec = crate::load::Spec {
        warmup_ms: timing.warmup_ms,
        window_ms: timing.window_ms,
        ..row.load(scene, cell)
    };
    let mut generator = scene.site.generate(&spec)?;
    generator.wait_window()?;
    let asked_before = scene.origin.requests(scene.site)?;
    let (before, meter) = (cpu_ns(&services), DisturbanceMeter::start());
    let report = generator.report()?;
    let cpu_ns = (!services.is_empty()).then(|| cpu_ns(&services).saturating_sub(before));
    let disturbance = meter.stop();
    let asked = scene.origin.requests(scene.site)?.saturating_sub(asked_before);
    for service in &mut services {
        if !service.is_running() {
            let log: Vec<String> = service.log().lines().rev().take(3).map(str::to_owned).collect();
            return Err(anyhow!("{} ended under load: {}", row.name, log.join(" | ")).into());
        }
    }
    check(&report, asked, row, cell)?;
    Ok(Sample { report, cpu_ns, disturbance })
}

fn cpu_ns(services: &[Service]) -> u64 {
    services.iter().map(Service::cpu_ns).sum()
}

/// Rejects a sample that would compare failures with answers, or answers from the origin with answers from a cache.
fn check(report: &Report, asked: u64, row: &Row, cell: &Cell) -> anyhow::Result<()> {
    let (answers, failed) = (report.requests as f64, report.error_count() as f64);
    ensure!(answers > 0.0, "no answer; failed connections: {:?}", report.errors);
    ensure!(
        !row.is_ours || failed <= answers * OUR_FAILED_SHARE_LIMIT,
        "{failed} of {answers} failed: {:?}",
        report.errors
    );
    let asked = asked as f64;
    if row.asks_origin(cell) {
        ensure!(
            asked + BORDER >= answers * ASKED_SHARE_LEAST,
            "{answers} answers, but the origin was asked {asked} times only"
        );
    } else {
        ensure!(
            asked <= answers * ASKED_SHARE_MOST + BORDER,
            "{answers} answers, and the origin was asked {asked} times: no hits"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_something_else_is_refused() {
        let cell = |name| super::super::cells::CELLS.iter().find(|cell| cell.name == name).expect("a column");
        let row = |name| Row::named(name).expect("a row");
        let mut report = Report { requests: 10_000, window_ns: 1_000_000_000, ..Report::default() };
        let (hit, miss) = (cell("hit 1 KB"), cell("miss 1 KB"));
        assert!(check(&report, 100, row("ours"), hit).is_ok());
        assert!(check(&report, 9_990, row("ours"), hit).is_err(), "every answer came from the origin");
        assert!(check(&report, 9_990, row("direct"), hit).is_ok(), "it has no cache");
        assert!(check(&report, 9_990, row("nginx"), miss).is_ok());
        assert!(
            check(&report, 4_900, row("nginx"), miss).is_err(),
            "the cache answered what must not be stored"
        );
        report.errors.insert("closed early".into(), 11);
        assert!(check(&report, 100, row("ours"), hit).is_err());
        assert!(check(&report, 100, row("nginx"), hit).is_ok());
        assert!(check(&Report::default(), 0, row("nginx"), hit).is_err());
    }
}
