//! The bars for ours, and their results.

use super::measure::{Figures, Plan};
use super::paper::TABLE_I;
use super::rows::{
    DANTE_PAIR, LIMITS, NGINX, NO_PROXY, OUR_KERNEL_PATH, OUR_REVERSE, OUR_SOCKS6, OUR_SOCKS6_DATA,
    OUR_TUNNEL, OUR_TUNNEL_TLS, RELAYS, ROWS, SOCKSX,
};
use crate::kit::{Bar, Bound, Need};

/// Maximum delay of ours above nginx in the same run, in milliseconds.
const BEHIND_NGINX_MS: f64 = 0.5;
/// The part of a round trip from client to proxy that a tunnel on the path must save, compared with no proxy.
const SAVED_ROUND_TRIPS: f64 = 0.8;
/// Maximum cost of a tunnel beside the path above one round trip from client to proxy, in milliseconds.
const BESIDE_THE_WAY_MS: f64 = 1.0;
/// Number of connections from which Fig. 13 is flat, and its bars apply.
const FROM_CONNECTIONS: u32 = 8;
/// Maximum ratio of our 99th percentile to that of the fastest relay.
const TAIL_AT_MOST: f64 = 1.2;

/// A bar whose figure may be missing: the table says why.
fn bar(what: String, reached: Option<f64>, bound: Bound) -> Bar {
    Bar::single(what, reached, bound).need(Need::IfMeasured)
}

/// All bars of a run.
#[must_use]
pub(super) fn judge(figures: &Figures, plan: &Plan) -> Vec<Bar> {
    let mut bars = times(figures);
    bars.extend(tunnels(figures));
    bars.extend(rates(figures, plan));
    bars
}

/// Proxy on the path: our rows that open one connection are as fast as nginx.
fn times(figures: &Figures) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (number, topology) in TABLE_I.iter().enumerate().filter(|(_, topology)| topology.is_in_between()) {
        for row in [OUR_REVERSE, OUR_SOCKS6_DATA] {
            let behind = figures.overhead_ms(row, number).zip(figures.overhead_ms(NGINX, number));
            let behind = behind.map(|(ours, nginx)| ours - nginx);
            let what = format!("{}: {row} behind nginx, at most {BEHIND_NGINX_MS} ms", topology.name);
            bars.push(bar(what, behind, Bound::AtMost(BEHIND_NGINX_MS)));
        }
    }
    bars
}

/// A tunnel saves the round trips of a connection's set-up: on the path it is faster than no proxy.
fn tunnels(figures: &Figures) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (number, topology) in TABLE_I.iter().enumerate() {
        let bound = match topology.is_in_between() {
            true => -SAVED_ROUND_TRIPS * topology.client_proxy_ms,
            false => topology.client_proxy_ms + BESIDE_THE_WAY_MS,
        };
        for row in [OUR_TUNNEL, OUR_TUNNEL_TLS] {
            let what = format!("{}: {row} over no proxy, at most {bound} ms", topology.name);
            bars.push(bar(what, figures.overhead_ms(row, number), Bound::AtMost(bound)));
        }
    }
    bars
}

/// A bar on a rate: ours must be at least `bound` times the best of `others`. The limit is the rate of another row.
fn at_least(
    figures: &Figures,
    plan: &Plan,
    (ours, limit): (&str, &str),
    others: &[&str],
    bound: f64,
) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (at, connections) in
        plan.connections.iter().enumerate().filter(|(_, count)| **count >= FROM_CONNECTIONS)
    {
        let best = others
            .iter()
            .filter_map(|name| Some((figures.rate(name, at)?, *name)))
            .max_by(|a, b| a.0.total_cmp(&b.0));
        let against_best = |name| figures.rate_of(name, best?.1, at);
        let against = best.map_or("the best of the others", |(_, name)| name);
        let what = format!("{connections} connections: {ours} against {against}, at least {bound}");
        let bar = bar(what, against_best(ours), Bound::AtLeast(bound));
        bars.push(Bar { limit: against_best(limit), ..bar });
    }
    bars
}

/// A relay's 99th percentile must be at most this number of times that of the fastest of the others.
fn tail(figures: &Figures, plan: &Plan, (ours, limit): (&str, &str), others: &[&str]) -> Vec<Bar> {
    let asked = plan.connections.iter().enumerate().filter(|(_, count)| **count >= FROM_CONNECTIONS);
    asked
        .map(|(at, connections)| {
            let fastest = others.iter().filter_map(|name| Some((figures.rate(name, at)?, *name)));
            let fastest = fastest.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name);
            let against = |row| figures.p99_of(row, fastest?, at);
            let name = fastest.unwrap_or("the fastest of the others");
            let what =
                format!("{connections} connections: p99 of {ours} against {name}, at most {TAIL_AT_MOST}");
            let bar = bar(what, against(ours), Bound::AtMost(TAIL_AT_MOST));
            Bar { limit: against(limit), ..bar }
        })
        .collect()
}

fn rates(figures: &Figures, plan: &Plan) -> Vec<Bar> {
    let all: Vec<&str> = ROWS
        .iter()
        .map(|row| row.name)
        .filter(|name| *name != NO_PROXY && *name != OUR_KERNEL_PATH && !LIMITS.contains(name))
        .collect();
    let relays = [&[NGINX], &RELAYS[..]].concat();
    let [relay, pair, kernel] = LIMITS;
    [
        at_least(figures, plan, (OUR_SOCKS6, pair), &[SOCKSX[0], SOCKSX[1], DANTE_PAIR], 1.3),
        at_least(figures, plan, (OUR_SOCKS6, pair), &[NGINX], 1.0),
        at_least(figures, plan, (OUR_REVERSE, relay), &relays, 1.0),
        tail(figures, plan, (OUR_REVERSE, relay), &relays),
        at_least(figures, plan, (OUR_KERNEL_PATH, kernel), &all, 1.1),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::epi::clients::Rate;
    use crate::experiments::epi::measure::Times;

    fn plan() -> Plan {
        Plan { connections: vec![1, 8], ..Plan::quick() }
    }

    fn figures(rows: &[(&str, f64, f64)]) -> Figures {
        let mut figures = Figures::default();
        for (name, time, rate) in rows {
            let times = Times { each_ms: vec![*time], failed: 0 };
            figures.times.insert((*name).into(), vec![times; 6]);
            let seen = |per_second| Some(Rate { per_second, p99_ms: 100.0 / per_second });
            figures.rates.insert((*name).into(), vec![vec![seen(*rate / 2.0), seen(*rate)]]);
        }
        figures
    }

    fn failures(figures: &Figures) -> Vec<String> {
        judge(figures, &plan()).into_iter().filter(Bar::is_failure).map(|bar| bar.what).collect()
    }

    #[test]
    fn a_missed_bar_fails_and_a_held_one_does_not() {
        let good = [
            (NO_PROXY, 20.0, 50.0),
            (NGINX, 20.2, 9.0),
            (OUR_REVERSE, 20.6, 20.0),
            (OUR_SOCKS6_DATA, 20.7, 1.0),
            (OUR_SOCKS6, 25.0, 14.0),
            (SOCKSX[1], 26.0, 10.0),
            (OUR_KERNEL_PATH, 20.0, 22.0),
        ];
        assert_eq!(failures(&figures(&good)), Vec::<String>::new());
        let slow = good.map(|(name, time, rate)| (name, time, if name == OUR_SOCKS6 { 12.0 } else { rate }));
        assert_eq!(
            failures(&figures(&slow)),
            ["8 connections: ours, SOCKS6 against socksx SOCKS6, at least 1.3"]
        );
        let late = good.map(|(name, time, rate)| (name, if name == OUR_REVERSE { 20.8 } else { time }, rate));
        assert_eq!(failures(&figures(&late)).len(), 3, "in each of the first three topologies");
    }

    #[test]
    fn a_tail_longer_than_that_of_the_fastest_relay_misses_its_bar() {
        let tail = |ms| {
            let rates = [(NGINX, 9.0, 1.0), (OUR_REVERSE, 20.0, ms)];
            let mut figures = Figures::default();
            for (row, per_second, p99_ms) in rates {
                figures.rates.insert(row.into(), vec![vec![None, Some(Rate { per_second, p99_ms })]]);
            }
            failures(&figures)
        };
        assert_eq!(tail(1.2), Vec::<String>::new());
        assert_eq!(tail(1.3), ["8 connections: p99 of ours, reverse against nginx, at most 1.2"]);
    }

    #[test]
    fn a_tunnel_on_the_way_has_to_be_faster_than_no_proxy() {
        // 4 ms less is 0.8 of DOCKER 1's and 2's 5 ms, not of DOCKER 3's 10; the triangles allow more anyway.
        let rows = [(NO_PROXY, 20.0, 1.0), (OUR_TUNNEL, 16.0, 1.0)];
        assert_eq!(failures(&figures(&rows)), ["DOCKER 3: ours, tunnel over no proxy, at most -8 ms"]);
        let late = [(NO_PROXY, 20.0, 1.0), (OUR_TUNNEL, 22.5, 1.0)];
        assert_eq!(failures(&figures(&late)).len(), 4, "on the way, and DOCKER 4 with 2 ms");
    }

    #[test]
    fn what_was_not_measured_is_told_and_does_not_hold() {
        let bars = judge(&Figures::default(), &plan());
        assert!(bars.len() >= 10 && bars.iter().all(|bar| !bar.holds() && !bar.is_failure()));
    }
}
