//! `flights`: round trips from connect to the first answer byte, counted from captures on both links.
//!
//! On a link, each run of segments (SYN or payload) from the near side that the far side answered counts as a round
//! trip, until the answer appears. The links have no delay, so a segment that need not wait for an answer may still
//! be seen after it; therefore the least count of several attempts is taken. Waiting for a bare acknowledgement
//! (Nagle's algorithm without TCP_NODELAY) is not counted: the socksx redirector needs one round trip more on a real
//! link than here.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

use crate::capture::{Capture, Segment};
use crate::load::{Spec, Via, Work};
use crate::peers::{self, Running, Unavailable};
use crate::site::{SMALL_FILE, Site};

/// How the answer begins on every link; none of the carriers here encrypts.
const ANSWER: &[u8] = b"HTTP/1.1 200";
/// Maximum delay of a capture behind the client.
const CAPTURE_WITHIN: Duration = Duration::from_secs(3);
/// Attempts per row; the row has the least count, because each count is an upper bound.
const ATTEMPTS: u32 = 3;
/// Maximum number of attempts, for peers that lose connections.
const THEIR_ATTEMPTS: u32 = 12;

/// Options of `sidetrack-lab flights`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Only rows whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
}

/// Round trips on the client-proxy and proxy-server links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Flights {
    client_proxy: usize,
    proxy_server: usize,
}

/// One row: for ours the maximum allowed; for others what the peer's manual or the paper says.
struct Row {
    peer: &'static str,
    /// The client's request travels in its SYN.
    fast_open: bool,
    most: Flights,
}

const fn row(peer: &'static str, fast_open: bool, client_proxy: usize, proxy_server: usize) -> Row {
    Row { peer, fast_open, most: Flights { client_proxy, proxy_server } }
}

const ROWS: &[Row] = &[
    row("nginx stream", false, 2, 2),
    row("ours reverse", false, 2, 2),
    row("dante S5", false, 4, 2),
    row("microsocks S5", false, 4, 2),
    row("socksx 0.1.0 S5", false, 4, 2),
    row("ours S5", false, 4, 2),
    row("socksx 0.1.0 S6 + data", false, 3, 2),
    row("ours S6 + data", false, 2, 2),
    row("ours S6 + data", true, 1, 2),
    row("redsocks + dante", false, 4, 2),
    row("socksx 0.1.0 pair S5", false, 4, 2),
    row("ours pair S5", false, 4, 2),
    row("ours pair S5, optimistic", false, 3, 2),
    row("socksx 0.1.0 pair S6", false, 3, 2),
    row("ours pair S6", false, 2, 2),
    row("ours pair S6, TFO", false, 1, 2),
];

/// Counts, prints the table and returns whether ours stays within its maximum.
///
/// # Errors
/// The site cannot be built.
pub fn run(options: &Options) -> Result<ExitCode> {
    let site = Site::new()?;
    println!(
        "## Flights to the first answer byte\n\nRound trips on the client-proxy (CP) and proxy-server (PS) links, counted from \
         captures, the least of {ATTEMPTS}; SYNs count.\n\n| | CP | PS | model | |\n|---|---:|---:|---:|---|"
    );
    let wanted = |row: &&Row| super::is_named(&options.only, row.peer);
    let mut failed = false;
    for row in ROWS.iter().filter(wanted) {
        let (line, is_failure) = judge(row, count(&site, row));
        println!("{line}");
        failed |= is_failure;
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn judge(row: &Row, found: Result<Flights, Unavailable>) -> (String, bool) {
    let is_ours = peers::find(row.peer).is_some_and(|peer| peer.is_ours);
    let name = format!("{}{}", row.peer, if row.fast_open { " (client with TFO)" } else { "" });
    let model = format!("{} + {}", row.most.client_proxy, row.most.proxy_server);
    match found {
        Err(reason) => {
            let is_required = std::env::var_os("SIDETRACK_REQUIRE_ALL").is_some_and(|value| value == "1");
            let reason = reason.to_string().replace('\n', " ");
            (format!("| {name} | - | - | {model} | {reason} |"), is_ours || is_required)
        }
        Ok(found) => {
            let fits =
                found.client_proxy <= row.most.client_proxy && found.proxy_server <= row.most.proxy_server;
            let result = if !is_ours {
                ""
            } else if fits {
                "ok"
            } else {
                "**FAIL**"
            };
            let line =
                format!("| {name} | {} | {} | {model} | {result} |", found.client_proxy, found.proxy_server);
            (line, is_ours && !fits)
        }
    }
}

fn count(site: &Site, row: &Row) -> Result<Flights, Unavailable> {
    let peer = peers::find(row.peer).ok_or_else(|| anyhow!("no peer is called {}", row.peer))?;
    let running = peer.start(site)?;
    // The first connection fetches Fast Open cookies and warms caches; it is not counted.
    let _ = request(site, &running, row.fast_open);
    let mut found = Vec::new();
    for _ in 0..if peer.is_ours { ATTEMPTS } else { THEIR_ATTEMPTS } {
        match attempt(site, &running, row.fast_open) {
            Ok(flights) => found.push(flights),
            Err(error) if peer.is_ours => return Err(error.into()),
            // The SOCKS6 redirector of socksx loses connections whose first bytes are late.
            Err(_) => {}
        }
        if found.len() == ATTEMPTS as usize {
            break;
        }
    }
    found.into_iter().min().ok_or_else(|| anyhow!("no answer in {THEIR_ATTEMPTS} attempts").into())
}

fn attempt(site: &Site, running: &Running<'_>, fast_open: bool) -> Result<Flights> {
    let (first, second) = (&site.client_proxy, &site.proxy_server);
    let directory = site.directory.path();
    let near = Capture::start(&site.client, &first.interface, &directory.join("client-proxy.pcap"))?;
    let far = Capture::start(&site.proxy, &second.interface, &directory.join("proxy-server.pcap"))?;
    request(site, running, fast_open)?;
    let found = Flights {
        client_proxy: wait_for_answer(&near, IpAddr::V4(first.a.v4))?,
        proxy_server: wait_for_answer(&far, IpAddr::V4(second.a.v4))?,
    };
    if found.proxy_server == 0 {
        bail!("the answer did not come through the proxy: nothing was sent from {}", second.a.v4);
    }
    Ok(found)
}

/// One request on one connection.
fn request(site: &Site, running: &Running<'_>, fast_open: bool) -> Result<()> {
    let spec = Spec {
        work: Work::NewConnection,
        connections: 1,
        dial: running.dial,
        via: running.via,
        destination: running.destination,
        authority: None,
        tls: false,
        path: SMALL_FILE.into(),
        fast_open: fast_open && running.via != Via::Plain,
        warmup_ms: 0,
        window_ms: 5000,
        max_requests: 1,
        per_second: None,
    };
    let mut generator = site.generate(&spec)?;
    generator.wait_window()?;
    let report = generator.report()?;
    if report.requests == 0 {
        bail!("no answer from {}: {:?}", dialled(running.dial), report.errors);
    }
    Ok(())
}

fn dialled(address: SocketAddr) -> String {
    format!("the proxy at {address}")
}

fn wait_for_answer(capture: &Capture, near: IpAddr) -> Result<usize> {
    let since = Instant::now();
    loop {
        let segments = capture.segments()?;
        if let Some(count) = round_trips(&segments, near) {
            return Ok(count);
        }
        if since.elapsed() > CAPTURE_WITHIN {
            bail!("the capture shows no answer after {CAPTURE_WITHIN:?}; {} segments", segments.len());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the runs of segments from `near` until the answer; `None` if the answer has not come.
fn round_trips(segments: &[Segment], near: IpAddr) -> Option<usize> {
    let is_answer = |segment: &Segment| segment.from != near && contains(&segment.payload, ANSWER);
    let answer = segments.iter().position(is_answer)?;
    let directions: Vec<bool> = segments.get(..=answer)?.iter().map(|segment| segment.from == near).collect();
    Some(directions.chunk_by(|a, b| a == b).filter(|run| run.first() == Some(&true)).count())
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `>` means from the client, `<` to it; the rest of a word is the payload; `S` alone is a SYN.
    fn segments(text: &str) -> Vec<Segment> {
        let ends = [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])];
        let segment = |word: &str| {
            let (direction, payload) = word.split_at(1);
            let [from, to] = if direction == ">" { ends } else { [ends[1], ends[0]] };
            let payload = payload.replace("OK", "HTTP/1.1 200 OK").into_bytes();
            Segment { from, to, is_syn: payload == b"S", payload }
        };
        text.split(' ').map(segment).collect()
    }

    #[test]
    fn the_models_of_the_paper_count_as_they_should() {
        for (text, expected) in [
            (">S <S >get <OK", Some(2)),
            (">S <S >hello <method >connect <reply >get <OK", Some(4)),
            (">S <S >connect >get <auth <reply <replyOK", Some(2)),
            (">Sconnect,get <S <auth <OK", Some(1)),
            (">S <S >get", None),
            (">S <S >OK", None),
        ] {
            assert_eq!(round_trips(&segments(text), IpAddr::from([10, 0, 0, 1])), expected, "{text}");
        }
    }

    #[test]
    fn every_row_exists_and_only_ours_can_fail() {
        for row in ROWS {
            assert!(peers::find(row.peer).is_some(), "{}", row.peer);
        }
        let found = || Ok(Flights { client_proxy: 5, proxy_server: 2 });
        assert!(judge(&row("ours S5", false, 4, 2), found()).1);
        assert!(!judge(&row("dante S5", false, 4, 2), found()).1);
    }
}
