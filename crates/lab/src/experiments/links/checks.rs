//! The checks: conditions, the measured quantity, and its tolerance.

use std::time::Duration;

use anyhow::Result;

use crate::link::{Conditions, Counts, Loss, Rate, Way, Wire};
use crate::probe::{self, Stream, quantile};
use crate::topology::Node;

const MS: Duration = Duration::from_millis(1);
/// Tolerance of a link's RTT, in milliseconds.
const RTT_BAR_MS: f64 = 0.2;
/// Tolerance of a count, in standard deviations.
const DEVIATIONS: f64 = 3.0;

/// The two ends of a link and the link.
pub(super) struct Ends<'e> {
    pub a: &'e Node,
    pub b: &'e Node,
    pub wire: &'e Wire,
    /// Fewer frames.
    pub quick: bool,
}

/// The result of a check.
pub(super) struct Found {
    pub value: f64,
    pub tolerance: f64,
    pub remark: String,
    /// False: a property without tolerance is wrong, such as the order; the remark says which.
    pub is_valid: bool,
}

/// One row.
pub(super) struct Check {
    pub name: &'static str,
    pub unit: &'static str,
    pub nominal: f64,
    /// Returns true if the result depends on the speed of the machine.
    pub is_timed: bool,
    pub conditions: fn() -> Conditions,
    pub measure: fn(&Ends<'_>, &Check) -> Result<Found>,
}

const fn check(
    name: &'static str,
    nominal: f64,
    unit: &'static str,
    is_timed: bool,
    conditions: fn() -> Conditions,
    measure: fn(&Ends<'_>, &Check) -> Result<Found>,
) -> Check {
    Check { name, unit, nominal, is_timed, conditions, measure }
}

/// The checks in the order of the table. Conditions hold in both directions; streams go forth.
pub(super) const CHECKS: &[Check] = &[
    check("round trip, 0.5 ms each way", 1.0, "ms", true, || Conditions::delayed(MS / 2), round_trip),
    check("round trip, 2.5 ms each way", 5.0, "ms", true, || Conditions::delayed(MS * 5 / 2), round_trip),
    check("round trip, 5 ms each way", 10.0, "ms", true, || Conditions::delayed(5 * MS), round_trip),
    check("round trip, 7.5 ms each way", 15.0, "ms", true, || Conditions::delayed(MS * 15 / 2), round_trip),
    check("one way at 10,000 frames/s", 2.5, "ms", true, || Conditions::delayed(MS * 5 / 2), one_way),
    check("loss, independent", 0.5, "%", false, || lossy(Loss::Bernoulli(0.005)), loss),
    check("loss, independent, more", 5.0, "%", false, || lossy(Loss::Bernoulli(0.05)), loss),
    check("loss in bursts", 4.762, "%", false, || lossy(BURSTS), loss),
    check("length of a burst", 5.0, "frames", false, || lossy(BURSTS), burst),
    check(
        "duplicates",
        1.0,
        "%",
        false,
        || Conditions { duplicate: 0.01, ..Conditions::default() },
        duplicates,
    ),
    check(
        "overtaking",
        0.5,
        "%",
        false,
        || Conditions { reorder: 0.005, ..Conditions::delayed(5 * MS) },
        overtaking,
    ),
    check("down, and up again", 50.0, "%", false, Conditions::default, down_and_up),
    check("rate 10 Mbit/s", 10.0, "Mbit/s", true, slow, rate),
    check("longest wait in its queue of 60,000 bytes", 49.0, "ms", true, slow, longest_wait),
    check("rate 1 Gbit/s, one TCP flow over 10 ms", 0.95, "Gbit/s", true, fast, tcp_at_rate),
    check("no rate, one TCP flow", 1.0, "Gbit/s or more", true, Conditions::default, tcp),
    check("0.5 ms each way, one TCP flow", 1.0, "Gbit/s or more", true, || Conditions::delayed(MS / 2), tcp),
];

const BURSTS: Loss = Loss::Burst { enter: 0.01, leave: 0.2 };

fn lossy(loss: Loss) -> Conditions {
    Conditions { loss, ..Conditions::default() }
}

fn slow() -> Conditions {
    let rate = Some(Rate { bits_per_second: 10_000_000, queue_bytes: 60_000 });
    Conditions { rate, ..Conditions::delayed(MS) }
}

fn fast() -> Conditions {
    let rate = Some(Rate { bits_per_second: 1_000_000_000, queue_bytes: 2_000_000 });
    Conditions { rate, ..Conditions::delayed(5 * MS) }
}

impl Ends<'_> {
    fn address(&self) -> std::net::IpAddr {
        self.wire.link.b.v4.into()
    }

    fn stream(&self, count: u32, gap: Duration, bytes: usize) -> Result<probe::Arrivals> {
        // The neighbours resolve each other first, so that the stream does not lose frames to that.
        probe::round_trips(self.a, self.b, self.address(), 3, MS)?;
        let count = if self.quick { count / 4 } else { count };
        probe::one_way(self.a, self.b, self.address(), Stream { count, gap, bytes, longest: 100 * MS })
    }

    /// Sends a stream for counting; returns how many were sent, what arrived, and the change of the link's own
    /// counts.
    fn counted(&self) -> Result<(u64, probe::Arrivals, Option<Counts>)> {
        let own = || Ok::<_, anyhow::Error>(self.wire.counts()?.map(|counts| counts[Way::Forth.index()]));
        let before = own()?;
        let arrivals = self.stream(COUNTED, Duration::from_micros(50), 200)?;
        let own = own()?.zip(before).map(|(now, before)| Counts {
            lost: now.lost - before.lost,
            reordered: now.reordered - before.reordered,
            ..now
        });
        Ok((if self.quick { COUNTED / 4 } else { COUNTED }.into(), arrivals, own))
    }
}

const COUNTED: u32 = 40_000;

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn round_trip(ends: &Ends<'_>, _check: &Check) -> Result<Found> {
    let count = if ends.quick { 60 } else { 200 };
    let times = probe::round_trips(ends.a, ends.b, ends.address(), count, 3 * MS)?;
    let (least, p99) = (ms(quantile(&times, 0.0)), ms(quantile(&times, 0.99)));
    Ok(Found {
        value: ms(quantile(&times, 0.5)),
        tolerance: RTT_BAR_MS,
        remark: format!("median of {}; least {least:.3}, p99 {p99:.3}", times.len()),
        is_valid: times.len() == count as usize,
    })
}

fn one_way(ends: &Ends<'_>, _check: &Check) -> Result<Found> {
    let arrivals = ends.stream(40_000, Duration::from_micros(100), 200)?;
    let delays = arrivals.delays_ns();
    let remark = format!("median of {}; p99 {:.3}", delays.len(), ms(quantile(&delays, 0.99)));
    let is_valid = arrivals.out_of_order() == 0;
    Ok(Found { value: ms(quantile(&delays, 0.5)), tolerance: RTT_BAR_MS / 2.0, remark, is_valid })
}

/// Returns the share of `count` among `total` in percent, with the tolerance of a binomial distribution around the
/// nominal share.
fn share(check: &Check, count: u64, total: u64, remark: String, is_valid: bool) -> Found {
    let (total, p) = (total as f64, check.nominal / 100.0);
    let deviation = (p * (1.0 - p) * (check.conditions)().loss.variance_factor() / total).sqrt();
    let value = 100.0 * count as f64 / total;
    Found { value, tolerance: 100.0 * DEVIATIONS * deviation, remark, is_valid }
}

fn loss(ends: &Ends<'_>, check: &Check) -> Result<Found> {
    let (sent, arrivals, counted) = ends.counted()?;
    let lost = sent.saturating_sub(arrivals.distinct());
    let counted = counted.map(|counts| counts.lost);
    let own = counted.map_or_else(String::new, |own| format!(", {own} by the link's own count"));
    let remark = format!("{lost} of {sent}{own}, {} out of order", arrivals.out_of_order());
    // A few more frames may be lost than those of the stream: the round trips before it, neighbour probes, MLD.
    let agrees = counted.is_none_or(|own| own >= lost && own - lost <= 5);
    Ok(share(check, lost, sent, remark, agrees && arrivals.out_of_order() == 0))
}

fn burst(ends: &Ends<'_>, check: &Check) -> Result<Found> {
    let (sent, arrivals, _) = ends.counted()?;
    let lost = sent.saturating_sub(arrivals.distinct());
    let bursts = (lost as f64 / arrivals.mean_burst()).max(1.0);
    // Lengths are geometric: their standard deviation is sqrt(1 - leave) / leave.
    let tolerance = DEVIATIONS * check.nominal / bursts.sqrt();
    let remark = format!("mean of {bursts:.0}");
    Ok(Found { value: arrivals.mean_burst(), tolerance, remark, is_valid: lost > 0 })
}

fn duplicates(ends: &Ends<'_>, check: &Check) -> Result<Found> {
    let (sent, arrivals, _) = ends.counted()?;
    let remark = format!("{} of {sent}", arrivals.duplicates());
    Ok(share(check, arrivals.duplicates(), sent, remark, arrivals.distinct() == sent))
}

/// A frame that overtakes is recognised by its short delay, whatever it overtook.
fn overtaking(ends: &Ends<'_>, check: &Check) -> Result<Found> {
    let (sent, arrivals, counted) = ends.counted()?;
    let early = arrivals.delays_ns().iter().filter(|delay| **delay < 4_000_000).count() as u64;
    let counted = counted.map(|counts| counts.reordered);
    let own = counted.map_or_else(String::new, |own| format!(", {own} by the link's own count"));
    let remark = format!("{early} of {sent}{own}; {} were late", arrivals.out_of_order());
    Ok(share(check, early, sent, remark, arrivals.distinct() == sent && arrivals.out_of_order() > 0))
}

/// Two streams of the same length, one while the link is down.
fn down_and_up(ends: &Ends<'_>, _check: &Check) -> Result<Found> {
    let stream = Stream { count: 200, gap: MS / 5, bytes: 200, longest: MS };
    let arrived = |conditions: Conditions| {
        ends.wire.set_both(conditions)?;
        Ok::<_, anyhow::Error>(probe::one_way(ends.a, ends.b, ends.address(), stream)?.distinct())
    };
    let up = arrived(Conditions::default())?;
    let down = arrived(Conditions { is_up: false, ..Conditions::default() })?;
    let again = arrived(Conditions::default())?;
    let value = 100.0 * (up + down) as f64 / 400.0;
    let remark = format!("{up} and {again} of 200 while up, {down} while down");
    Ok(Found { value, tolerance: 0.0, remark, is_valid: again == 200 })
}

/// Offered at three times the rate.
fn rate(ends: &Ends<'_>, _check: &Check) -> Result<Found> {
    let arrivals = ends.stream(8_000, Duration::from_micros(400), 1472)?;
    let rate = arrivals.frames_per_second() * f64::from(8 * 1514) / 1e6;
    let remark = format!("{} of the stream came through", arrivals.distinct());
    Ok(Found { value: rate, tolerance: 0.2, remark, is_valid: arrivals.out_of_order() == 0 })
}

fn longest_wait(ends: &Ends<'_>, _check: &Check) -> Result<Found> {
    let arrivals = ends.stream(8_000, Duration::from_micros(400), 1472)?;
    let delays = arrivals.delays_ns();
    let remark = format!("p99; median {:.1}", ms(quantile(&delays, 0.5)));
    // A queue of 60,000 bytes holds 39 or 40 frames of 1,514.
    Ok(Found { value: ms(quantile(&delays, 0.99)), tolerance: 2.0, remark, is_valid: true })
}

fn flow(ends: &Ends<'_>) -> Result<(f64, String)> {
    let window = if ends.quick { 600 * MS } else { 2000 * MS };
    let reached = probe::throughput(ends.a, ends.b, ends.address(), window, None)? / 1e9;
    let control = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    Ok((reached, control.trim().to_owned()))
}

fn tcp_at_rate(ends: &Ends<'_>, _check: &Check) -> Result<Found> {
    let (value, remark) = flow(ends)?;
    Ok(Found { value, tolerance: 0.06, remark, is_valid: true })
}

/// The rate must be at least the nominal rate; a higher value is within the tolerance.
fn tcp(ends: &Ends<'_>, check: &Check) -> Result<Found> {
    let (value, remark) = flow(ends)?;
    Ok(Found { value, tolerance: (value - check.nominal).max(0.0), remark, is_valid: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nominal_figures_are_those_of_the_conditions() {
        for check in CHECKS.iter().filter(|check| check.name.starts_with("loss")) {
            let share = 100.0 * (check.conditions)().loss.share();
            assert!((share - check.nominal).abs() < 0.001, "{}: {share}", check.name);
        }
        for check in CHECKS.iter().filter(|check| check.name.starts_with("round trip")) {
            let round_trip = 2000.0 * (check.conditions)().delay.as_secs_f64();
            assert!((round_trip - check.nominal).abs() < 1e-9, "{}", check.name);
        }
    }

    #[test]
    fn a_share_is_allowed_what_chance_allows() {
        let loss = CHECKS.iter().find(|check| check.name == "loss, independent").expect("there");
        let found = share(loss, 206, 40_000, String::new(), true);
        assert!((found.value - 0.515).abs() < 1e-9);
        // 3 * sqrt(0.005 * 0.995 / 40,000) = 0.106 %.
        assert!((found.tolerance - 0.1058).abs() < 0.001, "{}", found.tolerance);
    }
}
