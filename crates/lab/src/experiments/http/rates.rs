//! How well a bandwidth limit is kept: what arrives at the application, over the whole time and in every 100 ms.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

use super::origin::PORT;
use super::programs::Listener;
use super::rows::{PROXY_PORT, Scene};
use crate::kit::{Bar, Bound, Missing, Page};
use crate::progress::Progress;
use crate::site::ORIGIN_NAME;

/// Not counted: the initial burst of a bucket.
const WARM_UP: Duration = Duration::from_secs(1);
/// Length of the spans in which bursts are measured.
const SPAN: Duration = Duration::from_millis(100);
/// Maximum ratio to the rate in such a span; or one segment more than the rate.
const BURST_MOST: f64 = 1.1;
/// Payload of a full segment.
const SEGMENT_BYTES: f64 = 1448.0;
/// Tolerance of the rate.
const ERROR_MOST: f64 = 0.01;

/// The measured arrivals.
struct Seen {
    bytes_per_second: f64,
    /// The maximum of any span, divided by what the rate allows there: 1.1 of it or, if that is more, one segment
    /// above it.
    burst: f64,
}

/// Measures, writes the table and returns the bars. A rate at which ours does not start or breaks off is missing.
pub(super) fn run(
    scene: &Scene<'_>,
    quick: bool,
    page: &mut Page,
    progress: &Progress,
    missing: &mut Missing,
) -> Vec<Bar> {
    let rates: &[u64] =
        if quick { &[8_000, 12_500_000] } else { &[8_000, 125_000, 1_250_000, 12_500_000, 125_000_000] };
    let window = Duration::from_secs(if quick { 3 } else { 10 });
    page.line(format_args!(
        "### Bandwidth\n\nAn answer through `limit`, read as it arrives, for {} s after the first bytes. The \
         burst is the maximum of any {} ms, divided by what the rate allows there (1.1 of it, or one segment \
         more).\n",
        window.as_secs(),
        SPAN.as_millis()
    ));
    page.columns(["set, kbit/s:", "reached, kbit/s:", "error %:", "most of 100 ms, of the allowed:"]);
    let mut bars = Vec::new();
    for rate in rates {
        let name = format!("bandwidth: {} kbit/s", rate * 8 / 1000);
        progress.now(&name);
        let Some(seen) = missing.note(&name, measure(scene, *rate, window), progress) else { continue };
        let error = (seen.bytes_per_second / *rate as f64 - 1.0).abs();
        let kbit = |bytes: f64| bytes * 8.0 / 1000.0;
        let set = kbit(*rate as f64);
        page.row(format_args!(
            "{set:.0} | {:.1} | {:.2} | {:.2}",
            kbit(seen.bytes_per_second),
            error * 100.0,
            seen.burst
        ));
        for (what, measured, bound) in
            [("error", error, ERROR_MOST), ("burst, of the allowed", seen.burst, 1.0)]
        {
            let what = format!("{set:.0} kbit/s: {what}");
            bars.push(Bar::single(what, Some(measured), Bound::AtMost(bound)));
        }
    }
    page.blank();
    bars
}

fn measure(scene: &Scene<'_>, rate: u64, window: Duration) -> Result<Seen> {
    // The limit is for the function, not for each flow, because every request is a flow.
    let slow =
        format!("[function.slow]\nkind = \"limit\"\nbytes_per_second = {rate}\nshare = \"function\"\n");
    let to = format!("to = \"{}:{PORT}\"\n", scene.site.proxy_server.b.v4);
    let listener = Listener { keys: &to, tables: &slow, rule: "carrier = \"direct\"\nchain = \"slow\"" };
    let _service = listener.start(scene).map_err(|why| anyhow!("ours: {why}"))?;
    let proxy = scene.site.proxy_address(PROXY_PORT);
    scene.site.client.enter(|| read(proxy, rate as f64, window))
}

/// Requests one large file after the other and counts the received bytes.
fn read(proxy: SocketAddr, rate: f64, window: Duration) -> Result<Seen> {
    let mut stream = TcpStream::connect(proxy)?;
    stream.set_read_timeout(Some(window))?;
    let request = format!("GET /miss/10m HTTP/1.1\r\nHost: {ORIGIN_NAME}\r\n\r\n");
    // As many requests as the time may need, pipelined: heads count as bytes like all others.
    let wanted = rate * (WARM_UP + window).as_secs_f64() / f64::from(10 << 20);
    stream.write_all(request.repeat(wanted.ceil() as usize + 1).as_bytes())?;
    let mut buffer = vec![0; 256 << 10];
    let mut meter = Meter::new(rate);
    let began = Instant::now();
    while began.elapsed() < WARM_UP + window {
        let n = stream.read(&mut buffer).context("the answer stopped")?;
        ensure!(n > 0, "the proxy closed the connection");
        if began.elapsed() >= WARM_UP {
            meter.count(Instant::now(), n);
        }
    }
    meter.seen().context("nothing came after the first second")
}

/// Counts the received bytes, in total and in every span.
struct Meter {
    rate: f64,
    first: Option<Instant>,
    last: Option<Instant>,
    /// All except the first bytes, with which the time began.
    bytes: usize,
    span: VecDeque<(Instant, usize)>,
    in_span: usize,
    most: usize,
}

impl Meter {
    fn new(rate: f64) -> Self {
        Self { rate, first: None, last: None, bytes: 0, span: VecDeque::new(), in_span: 0, most: 0 }
    }

    fn count(&mut self, now: Instant, bytes: usize) {
        match self.first {
            None => self.first = Some(now),
            Some(_) => self.bytes += bytes,
        }
        self.last = Some(now);
        self.span.push_back((now, bytes));
        self.in_span += bytes;
        while let Some((at, old)) = self.span.front().copied().filter(|(at, _)| now - *at >= SPAN) {
            debug_assert!(at <= now);
            self.in_span -= old;
            self.span.pop_front();
        }
        self.most = self.most.max(self.in_span);
    }

    fn seen(&self) -> Option<Seen> {
        let time = (self.last? - self.first?).as_secs_f64();
        let of_span = self.rate * SPAN.as_secs_f64();
        let allowed = (of_span * BURST_MOST).max(of_span + SEGMENT_BYTES);
        (time > 0.0)
            .then(|| Seen { bytes_per_second: self.bytes as f64 / time, burst: self.most as f64 / allowed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_the_most_of_any_span_and_the_rate_what_came_over_all() {
        let start = Instant::now();
        let mut meter = Meter::new(1_000_000.0);
        // 10,000 bytes every 10 ms, and once twice as much.
        for step in 0..1001_u64 {
            let bytes = if step == 500 { 30_000 } else { 10_000 };
            meter.count(start + Duration::from_millis(10 * step), bytes);
        }
        let seen = meter.seen().expect("something came");
        assert!((seen.bytes_per_second - 1_002_000.0).abs() < 1.0, "{}", seen.bytes_per_second);
        assert!((seen.burst - 120_000.0 / 110_000.0).abs() < 1e-9, "{}", seen.burst);
    }
}
