//! The engine beside other proxies: the same clients and the same server, both of the kernel, a new connection for
//! each request. The clients limit the rate on two cores, so compare the CPU time of a connection: that of the
//! program, and that of the kernel for the frames of the proxy's interfaces. Rows exist with and without gathering of
//! frames: if few frames come at a time, most of a packet's cost is the wake-up. A program that is better without
//! gathering is compared without it.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::super::relay::{Cell, take_counting};
use crate::kit::{Bar, Bound, Page, Sample, Timing, in_turn};
use crate::peers::{self, Peer, Unavailable};
use crate::progress::Progress;
use crate::site::{self, Site};
use crate::taker::Taker;

/// Maximum ratio of our CPU time of a connection to the others'.
const SHARE_AT_MOST: f64 = 0.25;
const OTHERS: [&str; 2] = ["HAProxy tcp", "nginx stream"];
const OURS: [&str; 3] = [
    "ours engine, AF_XDP, gathering",
    "ours engine, XDP after the first flight, gathering",
    "ours engine, XDP, decided, gathering",
];
/// The end of the name of a row with gathering.
const GATHERING: &str = ", gathering";

/// One program.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// Its name.
    pub name: String,
    /// Connections per second, the median of all rounds.
    pub rate: f64,
    /// CPU time of a connection in that round, in microseconds; `None` without a program.
    pub cpu_us: Option<f64>,
    /// Median time of a connection in that round, microseconds.
    pub p50_us: f64,
    /// 99th percentile of the same.
    pub p99_us: f64,
    /// Why there are no figures.
    pub missing: Option<String>,
}

/// Programs by the names of their rows. Our engine sets the gathering itself; for others the lab does.
fn rows() -> Vec<(String, Peer)> {
    let named = |name: &str| peers::find(name).map(|peer| (name.to_owned(), peer));
    let plain = ["direct", "HAProxy tcp", "nginx stream", "ours reverse"].into_iter().filter_map(named);
    let gathering = OTHERS.into_iter().filter_map(named).map(|(name, peer)| (name + GATHERING, peer));
    plain.chain(gathering).chain(peers::ENGINE.iter().map(|peer| (peer.name.to_owned(), *peer))).collect()
}

/// Measures; programs take turns.
///
/// # Errors
/// The site cannot be built: root and nginx are needed.
pub(super) fn run(quick: bool, rounds: u32, progress: &Progress) -> Result<Vec<Row>> {
    let timing = if quick { Timing::QUICK } else { Timing::FULL };
    let cell = Cell::New(64);
    let rows = rows();
    let mut samples = vec![Vec::new(); rows.len()];
    let places: Vec<usize> = (0..rows.len()).collect();
    for round in 0..rounds {
        for at in in_turn(&places, round) {
            let (name, peer) = &rows[at];
            progress.now(&format!("kernel clients, round {} of {rounds}: {name}", round + 1));
            let gathers = name.ends_with(GATHERING) && !peer.is_ours;
            samples[at].push(match sample(*peer, cell, timing, gathers) {
                Ok(sample) => Row {
                    name: name.clone(),
                    rate: sample.speed(cell),
                    cpu_us: sample.cost(cell),
                    p50_us: sample.report.p50_ns as f64 / 1e3,
                    p99_us: sample.report.p99_ns as f64 / 1e3,
                    missing: None,
                },
                Err(why) => missing(name, &why.to_string()),
            });
        }
    }
    Ok(samples.into_iter().filter_map(median).collect())
}

/// Takes one sample, in a new site, so that a row's interface settings do not affect the next. In all rows frames are
/// taken on the receiver's CPU; otherwise the sender would pay for it.
fn sample(peer: Peer, cell: Cell, timing: Timing, gathers: bool) -> Result<Sample, Unavailable> {
    let site = Site::new()?;
    let [first, second] = [&site.client_proxy, &site.proxy_server].map(|link| link.interface.as_str());
    let _ends = [Taker::of_plain(&site.client, first, 0)?, Taker::of_plain(&site.server, second, 0)?];
    let takers = [first, second].map(|interface| Taker::of_plain(&site.proxy, interface, site::proxy_cpu()));
    let takers = takers.into_iter().collect::<Result<Vec<_>>>()?;
    if gathers {
        takers.iter().try_for_each(|taker| taker.gather(Duration::from_micros(peers::GATHERING_US)))?;
    }
    take_counting(&site, peer, cell, timing, &takers)
}

fn missing(name: &str, why: &str) -> Row {
    let why = Some(why.to_owned());
    Row { name: name.to_owned(), rate: 0.0, cpu_us: None, p50_us: 0.0, p99_us: 0.0, missing: why }
}

/// Returns the sample with the median CPU time, or rate if there is none; a failed one only if all failed.
fn median(samples: Vec<Row>) -> Option<Row> {
    let (mut good, bad): (Vec<Row>, Vec<Row>) = samples.into_iter().partition(|row| row.missing.is_none());
    let key = |row: &Row| row.cpu_us.unwrap_or(row.rate);
    good.sort_by(|a, b| key(a).total_cmp(&key(b)));
    let middle = good.len() / 2;
    good.into_iter().nth(middle).or_else(|| bad.into_iter().next())
}

/// Returns the bars of these rows.
pub(super) fn bars(rows: &[Row]) -> Vec<Bar> {
    let cpu = |name: &str| rows.iter().find(|row| row.name == name).and_then(|row| row.cpu_us);
    let least = |other: &str| {
        let both = [cpu(other), cpu(&format!("{other}{GATHERING}"))];
        both.into_iter().flatten().min_by(f64::total_cmp)
    };
    let bar = |ours: &str, other: &str| {
        let what = format!("CPU time of a connection, {ours} to {other} at its best");
        let share = cpu(ours).zip(least(other)).map(|(own, other)| own / other);
        Bar::single(what, share, Bound::AtMost(SHARE_AT_MOST))
    };
    OURS.iter().flat_map(|ours| OTHERS.map(|other| bar(ours, other))).collect()
}

/// The table.
pub(super) fn render(page: &mut Page, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    page.line(format_args!(
        "### Clients and server of the kernel, a new connection for each request, 64 at a time\n\nA kernel \
         thread on each host's own core takes its frames; the CPU time of the proxy's thread is counted. \
         *Gathering*: frames wait for up to {} us before the thread takes them (`coalesce_us`; \
         napi_defer_hard_irqs and gro_flush_timeout).\n",
        peers::GATHERING_US
    ));
    page.columns(["", "connections/s:", "CPU us a connection:", "p50 us:", "p99 us:"]);
    for row in rows {
        let cpu = row.cpu_us.map_or("-".to_owned(), |us| format!("{us:.1}"));
        match &row.missing {
            Some(why) => page.row(format_args!("{} | - | - | - | {why}", row.name)),
            None => page.row(format_args!(
                "{} | {:.0} | {cpu} | {:.0} | {:.0}",
                row.name, row.rate, row.p50_us, row.p99_us
            )),
        }
    }
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, cpu_us: f64) -> Row {
        Row { cpu_us: Some(cpu_us), missing: None, ..missing(name, "") }
    }

    #[test]
    fn the_median_is_of_what_worked() {
        let samples = vec![row("a", 3.0), missing("a", "no"), row("a", 1.0), row("a", 2.0)];
        assert_eq!(median(samples).and_then(|row| row.cpu_us), Some(2.0));
        assert_eq!(median(vec![missing("a", "no")]).and_then(|row| row.missing), Some("no".to_owned()));
    }

    #[test]
    fn bars_compare_with_each_of_the_others() {
        let ours = OURS.into_iter().zip([20.0, 16.0, 15.0]).map(|(name, us)| row(name, us));
        let gathering = "nginx stream, gathering";
        let others = [row("HAProxy tcp", 80.0), row("nginx stream", 70.0), row(gathering, 60.0)];
        let rows: Vec<_> = ours.chain(others).collect();
        let held: Vec<bool> = bars(&rows).iter().map(Bar::holds).collect();
        assert_eq!(held, [true, false, true, false, true, true], "of the better one's 80 and 60");
        assert!(!bars(&rows[OURS.len()..]).iter().any(Bar::holds), "not measured is not held");
    }
}
