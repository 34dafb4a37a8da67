//! Hand-overs under load: how long a flow stands still, and whether every byte, FIN and RST arrives.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::Options;
use super::hosts::{Hosts, Up};
use super::stream::{Closes, exchange};
use crate::kit::{Bar, Bound, Page};
use crate::progress::Progress;
use crate::statistics::percentile;

/// Flows that are there at the same time.
const AT_A_TIME: usize = 8;
/// Bytes of each direction of a flow under load.
const BYTES: u64 = 3_000_000;
/// Rounds until the kinds of ends begin again: the client resets, the server does, and all others end in order.
const RESETS: usize = 10;
/// To the wire while both directions are busy.
const WIRE: &str = "{ fast_path = \"wire\", after_bytes = 100000 }";
const STAYS: &str = "{ fast_path = \"none\" }";

/// A steady stream: bytes of a message, time between two, and how many.
const MESSAGE: usize = 1000;
const PAUSE: Duration = Duration::from_micros(100);
const MESSAGES: usize = 2000;

/// Adds the part to the page, and its bars.
pub(super) fn measure(options: &Options, page: &mut Page, bars: &mut Vec<Bar>) -> Result<()> {
    let progress = Progress::new();
    steady(options.steady, page, bars, &progress)?;
    under_load(options.flows, page, bars, &progress)
}

/// The upper bounds of a histogram of the metrics with their counts, in rising order.
fn histogram(metrics: &BTreeMap<String, f64>, name: &str) -> Vec<(f64, f64)> {
    let begin = format!("{name}_bucket{{le=\"");
    let bucket = |(key, count): (&String, &f64)| {
        let bound = key.strip_prefix(&begin)?.strip_suffix("\"}")?;
        Some((if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? }, *count))
    };
    let mut buckets: Vec<_> = metrics.iter().filter_map(bucket).collect();
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    buckets
}

/// The least bound that this share of all does not exceed.
fn bound(histogram: &[(f64, f64)], share: f64) -> Option<f64> {
    let all = histogram.last()?.1;
    let found = histogram.iter().find(|(_, count)| all > 0.0 && *count >= all * share)?;
    Some(found.0)
}

fn freezes(up: &Up, page: &mut Page) -> Result<[Option<f64>; 2]> {
    let metrics = up.metrics()?;
    let buckets = histogram(&metrics, "sidetrack_wire_freeze_seconds");
    page.columns(["frozen for at most:", "hand-overs:"]);
    let mut before = 0.0;
    for (bound, count) in &buckets {
        page.row(format_args!("{} us | {}", bound * 1e6, count - before));
        before = *count;
    }
    let all = metrics.get("sidetrack_wire_freeze_seconds_count").copied().unwrap_or(0.0);
    let sum = metrics.get("sidetrack_wire_freeze_seconds_sum").copied().unwrap_or(0.0);
    page.line(format_args!("\n{all} hand-overs, {:.0} us each on average.\n", sum / all * 1e6));
    Ok([0.5, 0.99].map(|share| bound(&buckets, share).map(|seconds| seconds * 1e6)))
}

/// Sends messages at a steady pace, and returns the largest gap between two that arrive, microseconds.
fn largest_gap(mut from: TcpStream, mut to: TcpStream) -> Result<f64> {
    let sender = thread::spawn(move || -> std::io::Result<()> {
        let mut next = Instant::now();
        for _ in 0..MESSAGES {
            from.write_all(&[7; MESSAGE])?;
            next += PAUSE;
            while Instant::now() < next {
                thread::yield_now();
            }
        }
        Ok(())
    });
    let (mut buffer, mut rest, mut largest) = (vec![0; MESSAGE], MESSAGE * MESSAGES, Duration::ZERO);
    let mut last = None::<Instant>;
    while rest > 0 {
        let length = to.read(&mut buffer)?;
        anyhow::ensure!(length > 0, "a steady stream ended early");
        rest -= length.min(rest);
        let now = Instant::now();
        largest = largest.max(last.map_or(Duration::ZERO, |last| now - last));
        last = Some(now);
    }
    sender.join().map_err(|_| anyhow!("the sender has panicked"))??;
    Ok(largest.as_secs_f64() * 1e6)
}

fn steady(flows: usize, page: &mut Page, bars: &mut Vec<Bar>, progress: &Progress) -> Result<()> {
    let hosts = Hosts::new()?;
    page.line(format_args!(
        "## Freeze at hand-over\n\nSteady streams, one at a time: {MESSAGE} bytes every {} us, {MESSAGES} times. The largest gap between two \
         messages that arrive, of {flows} streams each: those that stay with sockets show what the machine itself does.\n",
        PAUSE.as_micros()
    ));
    let mut gaps = Vec::new();
    let (mut frozen, mut again) = ([None; 2], 0);
    let mut seen = Page::default();
    for shunt in [STAYS, WIRE] {
        let up = hosts.start(shunt)?;
        let before = hosts.sent_again()?;
        let mut found = Vec::new();
        for flow in 0..flows {
            progress.now(&format!("steady stream {} of {flows}", flow + 1));
            let client = hosts.connect(1)?.pop().context("a connection")?;
            let server = hosts.accept()?;
            client.set_nodelay(true)?;
            server.set_nodelay(true)?;
            // Both directions are checked in turn.
            let (from, to) = if flow % 2 == 0 { (client, server) } else { (server, client) };
            found.push(largest_gap(from, to)?);
        }
        progress.now("");
        if shunt == WIRE {
            frozen = freezes(&up, &mut seen)?;
            again = hosts.sent_again()?[1] - before[1];
        }
        up.stop()?;
        gaps.push(found);
    }
    page.columns(["largest gap, us", "median:", "p90:", "p99:", "most:"]);
    for (name, found) in ["sockets", "handed over"].into_iter().zip(&gaps) {
        let [median, p90, p99, most] = [0.5, 0.9, 0.99, 1.0].map(|share| percentile(found, share));
        page.row(format_args!("{name} | {median:.0} | {p90:.0} | {p99:.0} | {most:.0}"));
    }
    page.text(format_args!("\nWhat the program has measured of these hand-overs:\n\n{}", seen.as_str()));
    bars.push(
        Bar::single("freeze at hand-over, steady: median", frozen[0], Bound::AtMost(100.0)).unit(" us"),
    );
    bars.push(Bar::single("freeze at hand-over, steady: p99", frozen[1], Bound::AtMost(1000.0)).unit(" us"));
    bars.push(Bar::single(
        "segments that the gateway has sent again",
        Some(again as f64),
        Bound::AtMost(0.0),
    ));
    Ok(())
}

/// Exchanges bytes over rounds of flows until this number was handed over, or half as many again have passed. Returns the rounds, and
/// what went wrong.
fn exchange_all(hosts: &Hosts, up: &Up, wanted: usize, progress: &Progress) -> Result<(usize, Vec<String>)> {
    let (mut troubles, mut round, mut handed) = (Vec::new(), 0, 0);
    let most = (wanted + wanted / 2).div_ceil(AT_A_TIME);
    while handed < wanted && round < most {
        progress.bar(handed, wanted, "hand-overs with loss");
        let clients = hosts.connect(AT_A_TIME)?;
        let servers = (0..AT_A_TIME).map(|_| hosts.accept()).collect::<std::io::Result<Vec<_>>>()?;
        // Connections may be accepted in another order, so all flows of a round end in the same way.
        let (client, server) = match round % RESETS {
            0 => (Closes::Resets, Closes::IsReset),
            1 => (Closes::IsReset, Closes::Resets),
            _ => (Closes::InOrder, Closes::InOrder),
        };
        let clients = clients.into_iter().map(|end| exchange(end, [1, 2], BYTES, client));
        let servers = servers.into_iter().map(|end| exchange(end, [2, 1], BYTES, server));
        let ends: Vec<_> = clients.chain(servers).collect();
        for end in ends {
            match end.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => troubles.push(error.to_string()),
                Err(_) => troubles.push("panicked".to_owned()),
            }
        }
        round += 1;
        if round % RESETS == 0 {
            handed = up.metrics()?.get("sidetrack_wire_taken_flows_total").map_or(0, |count| *count as usize);
        }
    }
    Ok((round, troubles))
}

fn under_load(flows: usize, page: &mut Page, bars: &mut Vec<Bar>, progress: &Progress) -> Result<()> {
    let hosts = Hosts::new()?;
    hosts.lose(1)?;
    let up = hosts.start(WIRE)?;
    let (rounds, troubles) = exchange_all(&hosts, &up, flows, progress)?;
    progress.now("");
    let all = rounds * AT_A_TIME;
    page.line(format_args!(
        "\n## Hand-overs under load\n\n{all} flows, {AT_A_TIME} at a time, {BYTES} bytes in each direction at once, each byte checked; one packet of a \
         hundred that comes to the client and to the server is lost.\n"
    ));
    let frozen = freezes(&up, page)?;
    let records = up.stop()?;
    let is = |record: &&serde_json::Value, key: &str, value: &str| record[key] == value;
    let count = |reason: &str| records.iter().filter(|record| is(record, "reason", reason)).count();
    let wired = records.iter().filter(|record| record["shunted"] == true).count();
    let bytes =
        |record: &serde_json::Value| ["bytes_up", "bytes_down"].map(|key| record[key].as_u64().unwrap_or(0));
    // An end that waits for a reset sends some bytes more.
    let is_exact = |record: &&serde_json::Value| match is(record, "reason", "ok") {
        true => bytes(record) == [BYTES; 2],
        false => bytes(record).iter().all(|count| *count >= BYTES),
    };
    let exact = records.iter().filter(is_exact).count();
    page.line(format_args!(
        "{wired} of {all} flows were handed over. Ends: {} ok, {} reset by the client, {} by the server, {} others.\n",
        count("ok"),
        count("client_reset"),
        count("server_reset"),
        records.len() - count("ok") - count("client_reset") - count("server_reset")
    ));
    for trouble in troubles.iter().take(20) {
        page.line(format_args!("- {trouble}"));
    }
    let [ok, by_client, by_server] = ends_expected(rounds);
    let misjudged = all.abs_diff(records.len()) + ok.abs_diff(count("ok"));
    let misjudged =
        misjudged + by_client.abs_diff(count("client_reset")) + by_server.abs_diff(count("server_reset"));
    let bar = |what: &str, figure: usize, bound| Bar::single(what, Some(figure as f64), bound);
    bars.push(
        Bar::single("freeze at hand-over, under load: median", frozen[0], Bound::AtMost(100.0)).unit(" us"),
    );
    bars.push(
        Bar::single("freeze at hand-over, under load: p99", frozen[1], Bound::AtMost(1000.0)).unit(" us"),
    );
    bars.push(bar("ends with a wrong byte, stuck or broken", troubles.len(), Bound::AtMost(0.0)));
    bars.push(bar("records with wrong bytes", records.len() - exact, Bound::AtMost(0.0)));
    bars.push(bar("records with a wrong or no end", misjudged, Bound::AtMost(0.0)));
    bars.push(bar("flows handed over", wired, Bound::AtLeast(flows as f64)));
    Ok(())
}

/// How many flows end in order, by a reset of the client, and by one of the server.
fn ends_expected(rounds: usize) -> [usize; 3] {
    let of = |kind: usize| (0..rounds).filter(|round| round % RESETS == kind).count() * AT_A_TIME;
    [rounds * AT_A_TIME - of(0) - of(1), of(0), of(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_a_histogram_has_the_bound_of_its_bucket() {
        let metrics: BTreeMap<String, f64> =
            [("0.0001", 5.0), ("0.001", 9.0), ("+Inf", 10.0), ("0.00001", 0.0)]
                .map(|(bound, count)| (format!("x_bucket{{le=\"{bound}\"}}"), count))
                .into();
        let found = histogram(&metrics, "x");
        assert_eq!(found.first(), Some(&(0.000_01, 0.0)));
        assert_eq!(
            [0.5, 0.9, 0.99].map(|share| bound(&found, share)),
            [Some(0.0001), Some(0.001), Some(f64::INFINITY)]
        );
        assert_eq!(bound(&histogram(&metrics, "y"), 0.5), None);
    }
}
