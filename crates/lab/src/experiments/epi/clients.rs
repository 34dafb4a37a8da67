//! The paper's two clients, `httping` and `wrk`: runs them in the client's node and reads their output.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::launch;
use crate::load::Via;
use crate::peers::{Absent, Running};
use crate::site::{SMALL_FILE, Site};

/// Time between two requests, in seconds. The paper waits 1 s; this does not change the figures here.
const INTERVAL_SECONDS: &str = "0.005";
/// Time limit for a request, in seconds; `timeout` ends a client that hangs after the sum for all requests.
const REQUEST_SECONDS: u32 = 3;

/// The result of one run of `httping`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Pings {
    /// From before connect to the end of the answer, in milliseconds, in order.
    pub times_ms: Vec<f64>,
    /// Requests without an answer.
    pub failed: u32,
}

/// The result of one run of `wrk`.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub(super) struct Rate {
    /// Requests per second.
    pub per_second: f64,
    /// 99th percentile of the times of answers, in milliseconds.
    pub p99_ms: f64,
}

/// Checks that a client is installed.
///
/// # Errors
/// It is not; the message says how to get it.
pub(super) fn require(program: &str) -> Result<()> {
    let absent = || Absent(format!("{program} is not installed; bench/peers.sh installs it"));
    launch::find_program(program).map(drop).ok_or_else(|| absent().into())
}

/// Sends `count` requests, each on a new connection, after a first one that does not count, as in the paper.
///
/// # Errors The client cannot be started, or it does not support this peer's protocol.
pub(super) fn httping(site: &Site, running: &Running<'_>, count: u32) -> Result<Pings> {
    let patience = REQUEST_SECONDS * (count + 2);
    let mut command = site.client.command_at("timeout", &site.client_placement());
    command.args([&patience.to_string(), "httping", "-S", "-i", INTERVAL_SECONDS]);
    command.args(["-c", &(count + 1).to_string(), "-t", &REQUEST_SECONDS.to_string()]);
    match running.via {
        Via::Plain => command.args(["-g", &url(running.dial)]),
        Via::Socks5 => command.args(["-5", "-x", &running.dial.to_string(), "-g", &url(running.destination)]),
        _ => bail!("httping does not speak that protocol to a proxy"),
    };
    let output = command.env("LC_ALL", "C").stdin(Stdio::null()).stderr(Stdio::null()).output()?;
    Ok(read_httping(&String::from_utf8_lossy(&output.stdout), count))
}

/// Sends requests on `connections` connections that stay open, for `window` (whole seconds).
///
/// # Errors
/// The client cannot be started or saw errors; the message says which.
pub(super) fn wrk(site: &Site, running: &Running<'_>, connections: u32, window: Duration) -> Result<Rate> {
    if running.via != Via::Plain {
        bail!("wrk does not speak that protocol to a proxy");
    }
    let seconds = window.as_secs().max(1);
    let mut command = site.client.command_at("timeout", &site.client_placement());
    command.args([
        &(seconds + 10).to_string(),
        "wrk",
        "--latency",
        "-t",
        "1",
        "-c",
        &connections.to_string(),
    ]);
    command.args(["-d", &format!("{seconds}s"), &url(running.dial)]);
    let output = command.env("LC_ALL", "C").stdin(Stdio::null()).output().context("cannot start wrk")?;
    read_wrk(&String::from_utf8_lossy(&output.stdout))
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}{SMALL_FILE}")
}

/// Reads lines such as `connected to 10.77.3.2:80 (130 bytes), seq=1 time=  0.01+ 10.20+ ...= 20.84 ms`. The first
/// request is left out; lines without a time are failures.
fn read_httping(text: &str, count: u32) -> Pings {
    let time = |line: &str| {
        let (head, rest) = line.split_once(" time=")?;
        let sequence: u32 = head.rsplit("seq=").next()?.trim().parse().ok()?;
        let total = rest.split(" ms").next()?.rsplit('=').next()?.trim().parse().ok()?;
        Some((sequence, total))
    };
    let times: Vec<(u32, f64)> = text.lines().filter_map(time).collect();
    let times_ms: Vec<f64> =
        times.iter().filter(|(sequence, _)| *sequence > 0).map(|(_, time)| *time).collect();
    let failed = count.saturating_sub(u32::try_from(times_ms.len()).unwrap_or(u32::MAX));
    Pings { times_ms, failed }
}

fn read_wrk(text: &str) -> Result<Rate> {
    let field = |name: &str| text.lines().find_map(|line| line.trim().strip_prefix(name));
    let rate = field("Requests/sec:").and_then(|rate| rate.trim().parse::<f64>().ok());
    let per_second = rate.with_context(|| format!("wrk printed no rate: {}", text.trim()))?;
    let troubles = [field("Socket errors:"), field("Non-2xx or 3xx responses:")];
    match troubles.into_iter().flatten().next() {
        // Only read errors are connections that the proxy closed: wrk dials again.
        Some(trouble) if per_second == 0.0 => bail!("wrk: {}", trouble.trim()),
        _ => {}
    }
    let p99_ms = field("99%").and_then(|time| milliseconds(time.trim()));
    let p99_ms = p99_ms.with_context(|| format!("wrk printed no 99th percentile: {}", text.trim()))?;
    Ok(Rate { per_second, p99_ms })
}

/// Reads a time as `wrk` prints it: `437.00us`, `1.23ms`, `2.00s`, `1.50m`.
fn milliseconds(time: &str) -> Option<f64> {
    let unit = time.find(|c: char| c.is_ascii_alphabetic())?;
    let (number, unit) = time.split_at(unit);
    let scale = match unit {
        "us" => 1e-3,
        "ms" => 1.0,
        "s" => 1e3,
        "m" => 6e4,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_totals_the_first_is_dropped_and_gaps_are_failures() {
        let text = "PING 10.77.3.2:8001 (/small):
connected to 10.77.3.2:8001 (160 bytes), seq=0 time=  0.01+  0.07+  0.01+305.42+  0.07=305.52 ms 
connected to 10.77.3.2:8001 (160 bytes), seq=1 time=  0.01+ 20.05+  0.03+  0.75+  0.01= 20.84 ms 
could not connect (Connection refused)
connected to 10.77.3.2:8001 (160 bytes), seq=3 time=  0.01+  0.06+  3.31+  9.07+  0.07= 12.45 ms 
--- http://10.77.3.2:8001/small ping statistics ---
";
        assert_eq!(read_httping(text, 3), Pings { times_ms: vec![20.84, 12.45], failed: 1 });
        assert_eq!(read_httping("", 3), Pings { times_ms: vec![], failed: 3 });
    }

    #[test]
    fn a_rate_and_its_tail_are_read_and_their_absence_is_told() {
        let text = |p99: &str| {
            format!(
                "Running 1s test @ http://10.77.1.2:9080/small
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   313.33us   58.09us   1.42ms   87.53%
    Req/Sec   101.70k     1.76k  105.02k    72.73%
  Latency Distribution
     50%  303.00us
     75%  330.00us
     90%  359.00us
     99%  {p99}
  111274 requests in 1.10s, 29.61MB read
Requests/sec: 101142.13
Transfer/sec:     26.91MB
"
            )
        };
        let seen = |p99: &str| read_wrk(&text(p99)).map(|rate| (rate.per_second, rate.p99_ms));
        for (p99, ms) in [("514.00us", 0.514), ("3.98ms", 3.98), ("1.25s", 1250.0), ("1.00m", 60_000.0)] {
            let (rate, read) = seen(p99).expect("both are there");
            assert!(rate == 101_142.13 && (read - ms).abs() < 1e-6, "{p99}: {read}");
        }
        assert!(seen("514.00ns").is_err() && seen("").is_err());
        assert!(read_wrk("Requests/sec:   6243.21\n").is_err(), "without --latency");
        assert!(read_wrk("unable to connect").is_err());
        assert!(read_wrk("  Socket errors: connect 4, read 0\nRequests/sec:      0.00\n").is_err());
    }
}
