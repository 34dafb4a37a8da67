//! One sample: a peer is started, loaded for a second, measured and ended.

use super::Cell;
use crate::kit::{Sample, Timing};
use crate::load::{Report, Spec};
use crate::machine::DisturbanceMeter;
use crate::peers::{Peer, Running, Unavailable};
use crate::site::Site;
use crate::taker::Taker;
use anyhow::anyhow;

/// A sample of ours is invalid if more connections than this share of the answers failed. Other programs may lose any
/// number, as the SOCKS6 redirector of socksx does: their answers count, and the table says how many they lost.
const OUR_FAILED_SHARE_LIMIT: f64 = 0.001;
/// The log text of our program about flows in the kernel without a record.
const EVENTS_LOST: &str = "conntrack events were lost";

impl Sample {
    /// Returns requests per second, or Gbit/s in bulk cells.
    #[must_use]
    pub fn speed(&self, cell: Cell) -> f64 {
        if cell.is_bulk() { self.report.gbit_per_second() } else { self.report.rate() }
    }

    /// Returns CPU microseconds per request, or CPU seconds per gigabyte (10^9) in bulk cells.
    #[must_use]
    pub fn cost(&self, cell: Cell) -> Option<f64> {
        let cpu_ns = self.cpu_ns? as f64;
        let (amount, scale) = if cell.is_bulk() {
            (self.report.bytes as f64, 1.0)
        } else {
            (self.report.requests as f64, 1e-3)
        };
        (amount > 0.0).then(|| cpu_ns * scale / amount)
    }
}

/// Takes one sample.
///
/// # Errors The peer is absent or does not do its work; the message has the client's errors.
pub fn take(site: &Site, peer: Peer, cell: Cell, timing: Timing) -> Result<Sample, Unavailable> {
    take_counting(site, peer, cell, timing, &[])
}

/// As [`take`], with the CPU time of these kernel threads added to the peer's.
///
/// # Errors
/// As [`take`].
pub fn take_counting(
    site: &Site,
    peer: Peer,
    cell: Cell,
    timing: Timing,
    takers: &[Taker<'_>],
) -> Result<Sample, Unavailable> {
    let mut running = peer.start(site)?;
    let (work, connections, path) = cell.load();
    let spec = Spec {
        work,
        connections,
        dial: running.dial,
        via: running.via,
        destination: running.destination,
        authority: None,
        tls: false,
        path: path.to_owned(),
        fast_open: false,
        warmup_ms: timing.warmup_ms,
        window_ms: timing.window_ms,
        max_requests: u64::MAX,
        per_second: None,
    };
    let mut generator = site.generate(&spec)?;
    generator.wait_window()?;
    let cpu = |running: &Running<'_>| running.cpu_ns() + takers.iter().map(Taker::cpu_ns).sum::<u64>();
    let (cpu_before, meter) = (cpu(&running), DisturbanceMeter::start());
    let report = generator.report()?;
    let cpu_ns = running.has_programs().then(|| cpu(&running).saturating_sub(cpu_before));
    let disturbance = meter.stop();
    if !running.is_running() {
        return Err(Unavailable::Failed(anyhow!("{} ended under load: {}", peer.name, tail(&running.log()))));
    }
    if peer.is_ours && running.log().contains(EVENTS_LOST) {
        return Err(Unavailable::Failed(anyhow!(
            "{}: the kernel lost events, records are missing",
            peer.name
        )));
    }
    check(&report, cell, peer.is_ours).map_err(|error| anyhow!("{}: {error}", peer.name))?;
    Ok(Sample { report, cpu_ns, disturbance })
}

/// Rejects a report that would compare failures with answers.
fn check(report: &Report, cell: Cell, is_ours: bool) -> anyhow::Result<()> {
    let errors = report.error_count() as f64;
    let answers = if cell.is_bulk() { report.bytes } else { report.requests } as f64;
    let tolerated = if cell.is_bulk() { 0.0 } else { answers * OUR_FAILED_SHARE_LIMIT };
    if answers == 0.0 || (is_ours && errors > tolerated) {
        return Err(anyhow!("{cell}: {answers} answers or bytes, failed connections {:?}", report.errors));
    }
    Ok(())
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().rev().take(3).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Disturbance;

    fn sample(requests: u64, bytes: u64, cpu_ns: Option<u64>) -> Sample {
        let report = Report { requests, bytes, window_ns: 2_000_000_000, ..Report::default() };
        Sample { report, cpu_ns, disturbance: Disturbance::default() }
    }

    #[test]
    fn units_are_those_of_the_headings() {
        let sample = sample(1000, 4_000_000_000, Some(80_000_000));
        assert_eq!(sample.speed(Cell::New(8)), 500.0);
        assert_eq!(sample.speed(Cell::Bulk(1)), 16.0);
        assert_eq!(sample.cost(Cell::New(8)), Some(80.0), "microseconds each");
        assert_eq!(sample.cost(Cell::Bulk(1)), Some(0.02), "seconds a gigabyte");
    }

    #[test]
    fn failures_are_not_averaged_away() {
        let mut report = sample(1000, 1, None).report;
        assert!(check(&report, Cell::New(8), true).is_ok());
        report.errors.insert("read: reset".into(), 2);
        assert!(check(&report, Cell::New(8), true).is_err());
        assert!(check(&report, Cell::New(8), false).is_ok());
        assert!(check(&Report::default(), Cell::New(8), false).is_err(), "nothing answered");
    }
}
